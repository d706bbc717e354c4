"""Training that stays healthy: which steps are not applied, and what is looked after beside a run.

Everything here is judged from numbers that every rank has (parallel.exchange), so all ranks decide the same. What a decision
depends on from step to step is small and goes into the checkpoint's manifest: a resumed run decides as an uninterrupted one.
"""

import math
from collections import deque
from statistics import median

import numpy as np


class Diverged(RuntimeError):
    """Too many steps in a row could not be applied; raised on all ranks."""


# ------------------------------------------------------------------------------------------------------------------
# Steps that are skipped
# ------------------------------------------------------------------------------------------------------------------

JUDGED_AFTER = 20  # accepted steps; before, only what is not finite is skipped
NORM_FLOOR, LOSS_FLOOR = 0.1, 0.02  # least spread, as a fraction of the median: a quiet stretch must not make the next step an outlier
MAD_TO_SIGMA = 1.4826  # of a normal distribution


def upper_limit(values: list[float], sigma: float, floor: float) -> float:
    """Median and `sigma` standard deviations, these by the median absolute deviation: half of the values may be anything."""
    middle = median(values)
    spread = MAD_TO_SIGMA * median(abs(value - middle) for value in values)
    return middle + sigma * max(spread, floor * abs(middle))


class Skips:
    """Which steps are not applied: those whose loss or gradient norm is not finite, or far above what the last accepted steps
    had. A rejected step never enters the statistics, so neither a NaN nor a spike can hide or cause what comes after it."""

    def __init__(self, sigma: float, window: int, most: int, saved: dict | None = None):
        """sigma: 0 skips only what is not finite; window: accepted steps that are compared with; most: skipped in a row until
        the run is given up; saved: what `state` returned."""
        saved = saved or {}
        self.sigma, self.most = sigma, most
        self.accepted = deque(map(tuple, saved.get("accepted", ())), maxlen=window)  # (gradient norm, loss)
        self.streak = list(saved.get("streak", ()))  # the last steps, if they were skipped
        self.total, self.alarmed = saved.get("total", 0), saved.get("alarmed", False)

    def state(self) -> dict:
        return {"accepted": list(self.accepted), "streak": self.streak, "total": self.total, "alarmed": self.alarmed}

    def limits(self) -> tuple[float, float]:
        """Largest gradient norm and loss that are accepted."""
        if not self.sigma or len(self.accepted) < min(JUDGED_AFTER, self.accepted.maxlen):
            return math.inf, math.inf
        norms, losses = zip(*self.accepted)
        return upper_limit(norms, self.sigma, NORM_FLOOR), upper_limit(losses, self.sigma, LOSS_FLOOR)

    def judge(self, step: int, loss: float, grad_norm: float, ranks: list[int]) -> str:
        """Why this step is skipped, or "" and it is accepted. ranks: where a cause would lie (see suspects)."""
        norm_limit, loss_limit = self.limits()
        if not math.isfinite(grad_norm):
            why = f"gradient norm {grad_norm}"
        elif not math.isfinite(loss):
            why = f"loss {loss}"
        elif grad_norm > norm_limit:
            why = f"gradient norm {grad_norm:.4g} above {norm_limit:.4g}"
        elif loss > loss_limit:
            why = f"loss {loss:.4g} above {loss_limit:.4g}"
        else:
            self.accepted.append((grad_norm, loss))
            self.streak = []
            return ""
        why += f", on rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
        if not math.isfinite(grad_norm) and not self.alarmed:
            why, self.alarmed = f"{why}; the first gradient norm of this run that is not finite", True
        self.total += 1
        self.streak.append({"step": step, "loss": loss, "grad_norm": grad_norm, "ranks": ranks, "why": why})
        return why

    @property
    def given_up(self) -> bool:
        return len(self.streak) >= self.most

    def report(self, run: str, checkpoints: list[str]) -> str:
        """What a person needs who is to decide how the run goes on."""
        accepted = f"{len(self.accepted)} accepted steps are compared with"
        if self.accepted:
            (norms, losses), (norm_limit, loss_limit) = zip(*self.accepted), self.limits()
            accepted += (f": gradient norm, median {median(norms):.4g}, largest {max(norms):.4g}, limit {norm_limit:.4g}; loss, median "
                         f"{median(losses):.4g}, last {losses[-1]:.4g}, limit {loss_limit:.4g}")
        skipped = [f"  step {s['step']}: loss {s['loss']:.6g}, gradient norm {s['grad_norm']:.6g}, "
                   f"ranks {', '.join(map(str, s['ranks'])) or 'none in particular'}" for s in self.streak]
        first = self.streak[0]["step"]
        newest = [f"  {path}" for path in checkpoints] or ["  none: the run starts again from its initial weights"]
        return "\n".join([
            f"Run {run}: {len(self.streak)} steps in a row could not be applied (--max_skips={self.most}).", "", *skipped, "", accepted,
            f"No weight has changed since step {first - 1}, and no checkpoint was written since.",
            "Checkpoints, newest first:", *newest, "",
            "Always the same rank: suspect its device. All ranks from one step on: the update before made the weights bad; resume from",
            "an older checkpoint (--resume=PATH) with a lower --lr or --clip. Norms that are finite and stay high: the run has moved to",
            "another level; --skip_sigma=0 applies every finite step.", ""])


def suspects(losses: np.ndarray, token_norms: np.ndarray, squared_norms: np.ndarray) -> list[int]:
    """Ranks where a bad step comes from. All are [world]. A gradient's sum is bad on every rank that owns a part of it; a rank's own
    loss, and the gradient with respect to its own tokens, are bad only where the fault is."""
    own = ~np.isfinite(losses) | ~np.isfinite(token_norms)
    if own.any():
        return np.flatnonzero(own).tolist()
    if not np.isfinite(squared_norms).all():
        return np.flatnonzero(~np.isfinite(squared_norms)).tolist()
    usual = np.sort(token_norms)[(len(token_norms) - 1) // 2]
    return np.flatnonzero(token_norms > 10 * usual).tolist()
