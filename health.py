"""Training that stays healthy: which steps are not applied, what is checked beside a run, how large a batch is worth its cost.

Everything here is judged from numbers that every rank has (parallel.exchange), so all ranks decide the same. What a decision
depends on from step to step is small and goes into the checkpoint's manifest: a resumed run decides as an uninterrupted one.

    steps that are skipped     Skips            each step
    checks of the state        check_state      at the start and every check_every steps
    checks of a run            Moves, Repeats, count_problem, loss_warning, chance_warning
    gradient noise scale       Noise            every noise_every steps
"""

import hashlib
import json
import math
from collections import deque
from statistics import median
from typing import Callable

import numpy as np
import torch
from torch import Tensor

import model
from model import Model
from parallel import LONGEST_MESSAGE, Grid, State, exchange, pieces, share_texts


class Diverged(RuntimeError):
    """Too many steps in a row could not be applied; raised on all ranks."""


class CheckFailed(RuntimeError):
    """A check has found what must not be; raised on all ranks."""


# ------------------------------------------------------------------------------------------------------------------
# Steps that are skipped
# ------------------------------------------------------------------------------------------------------------------

JUDGED_AFTER = 20  # accepted steps; before, only what is not finite is skipped
# least deviation, of a norm as a factor (1.1), of a loss as a part of the median: after a quiet stretch the next is no outlier
NORM_FLOOR, LOSS_FLOOR = 0.1, 0.02
MAD_TO_SIGMA = 1.4826  # of a normal distribution


def upper_limit(values: list[float], sigma: float, floor: float) -> float:
    """Median and `sigma` standard deviations, these by the median absolute deviation: half of the values may be anything. floor:
    the least deviation."""
    middle = median(values)
    return middle + sigma * max(MAD_TO_SIGMA * median(abs(value - middle) for value in values), floor)


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
        # norms spread by factors: of a batch of few documents one in a hundred healthy ones is four times the median
        log_limit = upper_limit([math.log(max(norm, 1e-30)) for norm in norms], self.sigma, NORM_FLOOR)
        return math.exp(min(log_limit, 700.0)), upper_limit(losses, self.sigma, LOSS_FLOOR * median(losses))

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
            accepted += (f": gradient norm, median {median(norms):.4g}, largest {max(norms):.4g}, limit {norm_limit:.4g}; loss, "
                         f"median {median(losses):.4g}, last {losses[-1]:.4g}, limit {loss_limit:.4g}")
        skipped = [f"  step {s['step']}: loss {s['loss']:.6g}, gradient norm {s['grad_norm']:.6g}, "
                   f"ranks {', '.join(map(str, s['ranks'])) or 'none in particular'}" for s in self.streak]
        first = self.streak[0]["step"]
        newest = [f"  {path}" for path in checkpoints] or ["  none: the run starts again from its initial weights"]
        return "\n".join([
            f"Run {run}: {len(self.streak)} steps in a row could not be applied (--max_skips={self.most}).", "", *skipped, "",
            accepted, f"No weight has changed since step {first - 1}; a checkpoint of a later step, written where the run was",
            "stopped, has the weights of that step, and took no older one's place.", "Checkpoints, newest first:", *newest, "",
            "Always the same rank: suspect its device. All ranks from one step on: the update before made the weights bad;",
            "resume from an older checkpoint (--resume=PATH) with a lower --lr or --clip. Norms that are finite and stay high:",
            "the run has moved to another level; --skip_sigma=0 applies every finite step.", ""])


def suspects(losses: np.ndarray, token_norms: np.ndarray, squared_norms: np.ndarray) -> list[int]:
    """Ranks where a bad step comes from. All are [world]. A gradient's sum is bad on every rank that owns a part of it; a rank's
    own loss, and the gradient with respect to its own tokens, are bad only where the fault is."""
    own = ~np.isfinite(losses) | ~np.isfinite(token_norms)
    if own.any():
        return np.flatnonzero(own).tolist()
    if not np.isfinite(squared_norms).all():
        return np.flatnonzero(~np.isfinite(squared_norms)).tolist()
    usual = np.sort(token_norms)[(len(token_norms) - 1) // 2]
    return np.flatnonzero(token_norms > 10 * usual).tolist()


# ------------------------------------------------------------------------------------------------------------------
# Checks of the state
# ------------------------------------------------------------------------------------------------------------------


def agree(problem: str, grid: Grid, device: torch.device):
    """Raises CheckFailed on all ranks if any has a problem, with the first one's. All ranks call it."""
    for rank, text in enumerate(share_texts(problem[:LONGEST_MESSAGE], grid, device)):
        if text:
            raise CheckFailed(f"rank {rank}: {text}")


def check_state(state: State, grid: Grid, m: Model):
    """All that can be told from the state alone; reads every master once. Raises CheckFailed on all ranks."""
    device = state.bias_LX.device
    if state.copies:
        state.copies.finish()  # the host reads what the device has sent there
    agree(type_problem(state) or rope_problem(m, device), grid, device)
    held = share_texts(json.dumps(held_values(state)), grid, device)
    if problem := shard_problem([json.loads(text) for text in held], grid):
        raise CheckFailed(problem)


def type_problem(state: State) -> str:
    """Masters in bf16 stop moving: norms near 1.0 change by less than its spacing."""
    tensors = {f"{name}/{kind}": x for name, master in state.master.items()
               for kind, x in {"master": master, **state.moments[name]}.items()}
    wrong = [f"{name} is {x.dtype}" for name, x in tensors.items() if x.dtype != torch.float32]
    return (f"masters and moments must be float32, but {wrong[0]} (one of {len(wrong)}): small updates would be lost" if wrong
            else "")


def rope_problem(m: Model, device: torch.device) -> str:
    """The rotation at the last position of a row against fp64: an angle in bf16 is wrong by radians beyond a few hundred."""
    cos, sin = model.rope_cache(m.rope_theta, m.head_dim, m.seq_len, device)
    x = torch.linspace(-1, 1, m.head_dim, dtype=torch.float64)
    angle = (m.seq_len - 1) * m.rope_theta ** (-torch.arange(0, m.head_dim, 2, dtype=torch.float64) / m.head_dim)
    turned = torch.complex(*x.chunk(2)) * torch.polar(torch.ones_like(angle), angle)
    got = model.rotate(x.float().to(device)[None, None], cos[-1:], sin[-1:]).flatten().double().cpu()
    error = float((got - torch.cat((turned.real, turned.imag))).abs().max())
    return "" if error < 1e-5 else (f"RoPE turns the last position, {m.seq_len - 1}, wrongly by {error:.1e} compared with fp64: "
                                    "are its angles formed in less?")


def fingerprint(x: Tensor) -> bytes:
    """Of the bits of fp32 values, made where they lie: sums of every 4096th as integers. A change of one bit changes it."""
    bits = x.detach().reshape(-1).view(torch.int32)
    whole = len(bits) // 4096 * 4096
    sums = bits[:whole].view(-1, 4096).sum(0, dtype=torch.int64)
    return sums.cpu().numpy().tobytes() + bits[whole:].cpu().numpy().tobytes()


def held_values(state: State) -> dict[str, str]:
    """Of the values that this rank owns, by kind of bucket: a hash, or "" where all are the same (norms at first, padding)."""
    kinds: dict[str, list] = {}
    for name, bucket in state.buckets.items():
        kinds.setdefault(bucket.rule.bucket, []).append(state.master[name])
    held = {}
    for kind, masters in kinds.items():
        first = masters[0].view(-1)[0]
        digest = hashlib.sha256(b"".join(map(fingerprint, masters))).hexdigest()[:16]
        held[kind] = "" if all(bool((x == first).all()) for x in masters) else digest
    return held | {"bias": hashlib.sha256(state.bias_LX.cpu().numpy().tobytes()).hexdigest()[:16]}


def shard_problem(held: list[dict[str, str]], grid: Grid) -> str:
    """held: of every rank. Ranks of a replica own different values, ranks in the same place of two replicas the same."""
    for kind in held[0]:
        owner: dict[str, int] = {}  # hash -> the first rank that has it
        for rank, mine in enumerate(held):
            place, value = rank % grid.shard.size, mine[kind]
            if kind == "bias":
                if value != held[0][kind]:
                    return (f"the router's selection bias of rank {rank} is not that of rank 0: counts were not the same on all "
                            "ranks")
            elif value != held[place][kind]:
                return (f"a replica has drifted: rank {rank} owns the same part of {kind} as rank {place}, but holds other "
                        "values; resume from the last checkpoint, and suspect that rank's device")
            elif rank < grid.shard.size and value and value in owner:
                return (f"ranks {owner[value]} and {rank} own different parts of {kind}, but hold the same values: was each "
                        "initialised as if it were the first?")
            owner.setdefault(value, rank)
    return ""


# ------------------------------------------------------------------------------------------------------------------
# Checks of a run
# ------------------------------------------------------------------------------------------------------------------

MOVED_AFTER = 10  # accepted steps of at least this learning rate
MOVES_AT = 1e-6  # at which norms near 1.0 are sure to move: every optimizer's largest steps are about the rate, and fp32 values
# there lie 1.2e-7 apart, so that smaller steps may be rounded away, each for itself
KEPT = 128  # digests of the first steps, and of the last


class Moves:
    """Whether every parameter changes; of experts, any of a layer's. The router of a single expert decides nothing, and need
    not."""

    def __init__(self, state: State, grid: Grid, m: Model):
        """Remembers how the parameters are now."""
        self.state, self.grid, self.m = state, grid, m
        self.names = list(dict.fromkeys(name for bucket in state.buckets.values() for name in self.names_of(bucket)
                                        if m.experts > 1 or not name.endswith(".router")))
        self.steps, self.before = 0, self.marks()

    @staticmethod
    def names_of(bucket) -> list[str]:
        prefix = bucket.name.removesuffix(bucket.rule.bucket)
        return [bucket.name] if bucket.rule.owner == "expert" else [prefix + short for short, _ in bucket.params]

    def marks(self) -> dict[str, bytes]:
        """What this rank owns of each parameter."""
        found = {}
        if self.state.copies:
            self.state.copies.finish()
        for name, bucket in self.state.buckets.items():
            flat = self.state.master[name].view(-1)
            parts = [(name, flat)] if bucket.rule.owner == "expert" else [
                (p.name, flat[p.at : p.at + p.stop - p.start]) for p in pieces(bucket, self.m, self.grid)]
            found |= {key: hashlib.sha256(fingerprint(x)).digest() for key, x in parts}
        return found

    def accepted(self, lr: float):
        """Call it after each accepted step, on all ranks, with its learning rate; raises CheckFailed on all once, after
        MOVED_AFTER of MOVES_AT or more."""
        if lr < MOVES_AT:
            return
        self.steps += 1
        if self.steps != MOVED_AFTER:
            return
        after = self.marks()
        moved = [float(after.get(name) != self.before.get(name)) for name in self.names]
        everywhere = exchange(moved, self.grid, self.state.bias_LX.device).max(0)
        self.before = {}
        if still := [name for name, x in zip(self.names, everywhere) if not x]:
            raise CheckFailed(f"{', '.join(still[:10])}{' and others' if len(still) > 10 else ''} did not move in {MOVED_AFTER} "
                              f"steps of lr {MOVES_AT:g} or more: no gradient arrives, or updates are rounded away")


class Repeats:
    """Whether a step's rows are those of an earlier step: the data position was lost in a resume."""

    def __init__(self, same_rows: Callable[[int, int], bool], saved: dict | None = None):
        """same_rows: whether two steps, counted from 0, are meant to have the same rows: short epochs wrap, so they may."""
        self.same_rows = same_rows
        self.seen = {int(step): digest for step, digest in (saved or {}).items()}

    def state(self) -> dict:
        return {str(step): digest for step, digest in self.seen.items()}

    def problem(self, step: int, digest: int) -> str:
        """digest: of the rows that the ranks of this step have read; step counts from 1."""
        again = next((old for old, other in self.seen.items()
                      if other == digest and old != step and not self.same_rows(old - 1, step - 1)), None)
        self.seen[step] = digest
        for old in [old for old in self.seen if KEPT < old <= step - KEPT]:
            del self.seen[old]
        return f"step {step} reads the rows of step {again} again: the data position was lost" if again else ""


def count_problem(counts_LX: Tensor, tokens: float, top_k: int) -> str:
    """Every token has top_k experts in every layer, and is counted once."""
    for layer, found in enumerate(counts_LX.sum(1).tolist()):
        if found != tokens * top_k:
            return (f"layer {layer} counted {found:.0f} tokens of experts, but {tokens:.0f} tokens with {top_k} each are "
                    f"{tokens * top_k:.0f}: some are counted twice, or not at all")
    return ""


def loss_warning(loss: float, vocab: int) -> str:
    """Of the first step of a new model, whose guess is as good as chance."""
    return "" if abs(loss - math.log(vocab)) < 0.25 else (
        f"the first loss is {loss:.3f}, that of a guess among {vocab} tokens is ln {vocab} = {math.log(vocab):.3f}: is it "
        "divided by the number of targets of all ranks, and are the initial weights right?")


def chance_warning(loss: float, val_loss: float, vocab: int) -> str:
    chance = math.log(vocab)
    return "" if val_loss < chance - 0.1 or loss > chance - 0.5 else (
        f"the held-out loss {val_loss:.3f} is still that of a guess ({chance:.3f}), while the training loss has fallen to "
        f"{loss:.3f}: are the held-out rows of the same text and tokenizer, and does training see its targets?")


# ------------------------------------------------------------------------------------------------------------------
# Gradient noise scale
# ------------------------------------------------------------------------------------------------------------------


class Noise:
    """The simple noise scale, tr(S) / |G|^2 in tokens (McCandlish et al. 2018, appendix A.1): a batch much smaller wastes
    nothing, one much larger gains little. From the squared norms of one node's gradient and of all nodes'; of numerator and
    denominator the averages are taken separately, since a mean of ratios is biased. Covers the buckets that are summed up node
    by node."""

    KEEP = 0.95  # about 20 measurements

    def __init__(self, saved: list | None = None):
        self.noise, self.signal = saved or (0.0, 0.0)

    def state(self) -> list:
        return [self.noise, self.signal]

    def add(self, parts: np.ndarray, squared: float, targets: np.ndarray):
        """parts: [nodes] squared norm of each node's part of the gradient, which is the sum of the parts; squared: of the
        gradient; targets: [nodes] of each."""
        total = targets.sum()
        if len(parts) < 2 or not (targets > 0).all() or not np.isfinite([*parts, squared]).all():
            return
        small = float((parts * (total / targets) ** 2).mean())  # of the mean gradient of one node
        per_small, per_big = float((1 / targets).mean()), 1 / total  # E|mean of n|^2 = |G|^2 + tr(S) / n
        noise = (small - squared) / (per_small - per_big)
        self.noise = self.KEEP * self.noise + (1 - self.KEEP) * noise
        self.signal = self.KEEP * self.signal + (1 - self.KEEP) * (squared - noise * per_big)

    def tokens(self) -> float | None:
        return self.noise / self.signal if self.noise > 0 and self.signal > 0 else None
