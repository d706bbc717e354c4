"""Looks for a learning rate: one short run whose rate grows exponentially until the loss turns up (Smith 2017).

    make lr-find                                             the debug size on this machine
    make lr-find ARGS="--optimizer=adamw --steps=200"        any setting of train.py
    python lr_find.py --from=1e-5 --to=1 --nodes=2 --ranks-per-node=2 --optimizer=mano

Prints a table, writes it to out/lr-find/lr_find.json and, where matplotlib is installed, a plot beside it. What it suggests is
a start for a search, not its end: the best rate of a long run is mostly lower, and depends on its length and its batch.
"""

import contextlib
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import cluster
import launch
import optim
import train
from model import ConfigError

HERE = Path(__file__).resolve().parent
SMOOTHING = 0.9
WINDOW = 9  # points of the line whose slope is taken
RUN = "lr-find"


class Point(NamedTuple):
    lr: float
    loss: float
    smoothed: float


def smooth(pairs: list[tuple[float, float]]) -> list[Point]:
    """Exponential mean of the losses, the first ones weighted as many as there are."""
    points, total = [], 0.0
    for n, (lr, loss) in enumerate(pairs, 1):
        total = SMOOTHING * total + (1 - SMOOTHING) * loss
        points.append(Point(lr, loss, total / (1 - SMOOTHING**n)))
    return points


def diverged(points: list[Point]) -> bool:
    """The smoothed loss has risen by half of what it had fallen, and by half a nat at least."""
    if len(points) < WINDOW:
        return False
    best, last = min(p.smoothed for p in points), points[-1]
    return not math.isfinite(last.smoothed) or last.smoothed > best + max(0.5, 0.5 * (points[0].smoothed - best))


def suggest(points: list[Point]) -> tuple[float, float, float] | None:
    """(suggestion, rate of the steepest fall, rate of the lowest smoothed loss): the steepest, but at most a quarter of the
    lowest, which is the edge of what works. None where the loss did not fall by a tenth of a nat."""
    low = min(range(len(points)), key=lambda i: points[i].smoothed, default=0)
    if low < WINDOW or points[0].smoothed - points[low].smoothed < 0.1:
        return None

    def slope(i: int) -> float:
        part = points[i : i + WINDOW]
        x, y = [math.log(p.lr) for p in part], [p.smoothed for p in part]
        mx, my = sum(x) / len(x), sum(y) / len(y)
        return sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)

    steepest = points[min(range(low - WINDOW + 1), key=slope) + WINDOW // 2].lr
    return min(steepest, points[low].lr / 4), steepest, points[low].lr


def ramp(options: dict, settings: list[str], say=print) -> list[Point]:
    """Runs train.py with a growing rate until the loss turns up, or all steps are done. Raises ConfigError if it could not. An
    earlier search is set aside by train.py, once it is known that no other runs. A SIGTERM or SIGINT goes on to the launcher;
    when that has ended, the program does."""
    low, high = (train.parse_value(name, str(options[name]), float) for name in ("from", "to"))
    if not 0 < low < high:
        raise ConfigError(f"--from={low:g} --to={high:g}: give two rates above 0, the larger last")
    out, hp = Path("out") / RUN, train.parse(settings)
    ranks = [f"--{name}={options[name]}" for name in ("nodes", "ranks-per-node") if name in options]
    scheduler, _ = cluster.detect("auto", submitting=False)  # inside an allocation there; a queue would give no answer
    argv = [sys.executable, HERE / "launch.py", f"--scheduler={scheduler}", *ranks, "--", HERE / "train.py", "--steps=100", "--val_every=0", *settings,
            f"--run={RUN}", "--resume=never", "--schedule=ramp", "--warmup=0", f"--lr={high:g}", f"--final_lr={low / high:g}",
            "--ckpt_every=0", "--skip_sigma=0", "--max_skips=3", "--wandb=off"]
    points, process, asked, errors, line = [], None, [], [], ""

    def forward(number: int, _frame: object):
        asked.append(number)
        if process:
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        if asked:  # before there was anyone to tell
            process.send_signal(asked[0])
        stopping = False
        for line in process.stdout:
            errors += [line] if line.startswith("error:") else []
            if not line.startswith("step ") or stopping:
                continue
            points = smooth(read(out / "metrics.jsonl", hp))
            if len(points) % 10 == 1:
                say(line.rstrip())
            if stopping := diverged(points):
                process.send_signal(signal.SIGTERM)  # ends after a step
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if asked:
        print(f"stopped by {signal.Signals(asked[0]).name}", file=sys.stderr)
        sys.exit(128 + asked[0])
    if code not in (launch.EXIT_OK, launch.EXIT_STOPPED, launch.EXIT_DIVERGED):
        raise ConfigError(f"the run ended with code {code}: {(errors or [line])[-1].removeprefix('error:').strip()}")
    return points


def read(metrics: Path, hp: train.Hyperparameters) -> list[tuple[float, float]]:
    """(rate, loss) of each step that has a finite loss; a line that is being written is left out. The rate is as --lr says it,
    before --lr_scaling."""
    pairs = []
    for line in metrics.read_text().splitlines() if metrics.exists() else []:
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            scale = optim.scaled_rate(1.0, hp.lr_scaling, found["tokens"] // found["step"], hp.lr_batch)
            pairs += [(found["lr"] / scale, found["loss"])] if found["loss"] is not None else []
    return pairs


def plot(points: list[Point], suggestion: float | None, path: Path) -> str:
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed (pip install matplotlib)"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.semilogx([p.lr for p in points], [p.loss for p in points], ".", alpha=0.4, label="loss")
    axes.semilogx([p.lr for p in points], [p.smoothed for p in points], label="smoothed")
    if suggestion:
        axes.axvline(suggestion, linestyle="--", color="black", label=f"suggestion {suggestion:.2g}")
    axes.set(xlabel="learning rate", ylabel="nats per token")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    return f"plot: {path}"


def main(argv: list[str]) -> int:
    if "--help" in argv:
        print(__doc__)
        return launch.EXIT_OK
    mine = {"from": "1e-5", "to": "1"}
    for arg in list(argv):
        name, _, value = arg.removeprefix("--").partition("=")
        if name in ("from", "to", "nodes", "ranks-per-node"):
            mine[name] = value
            argv.remove(arg)
    train.parse(argv)  # a wrong name is told before anything starts
    began = time.time()
    points = ramp(mine, argv)
    found = suggest(points)
    out = Path("out") / RUN
    (out / "lr_find.json").write_text(json.dumps({"points": points, "suggestion": found and found[0]}))
    print("\n   learning rate       loss   smoothed")
    for p in points[:: max(1, len(points) // 25)]:
        print(f"{p.lr:>16.2e} {p.loss:>10.4f} {p.smoothed:>10.4f}")
    print(plot(points, found and found[0], out / "lr_find.png"))
    end = "the loss turned up" if diverged(points) else "it never turned up; try a larger --to"
    if not found:
        print(f"no suggestion: the loss did not fall clearly in {len(points)} steps; use more --steps, or another range")
        return launch.EXIT_FAILED
    print(f"{len(points)} steps in {time.time() - began:.0f} s, {end}. Steepest at {found[1]:.2g}, lowest at {found[2]:.2g}; "
          f"suggestion: --lr={found[0]:.2g}")
    return launch.EXIT_OK


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(launch.EXIT_CONFIG)
