"""Two questions on the embedded corpus, answered with several seeds: which optimizer, and how free the routing should be.

    make study                                    about 20 minutes on two quiet cores; prints markdown tables for LOG.md
    python tests/study.py --seeds=5 --steps=100   more of it
    python tests/study.py --only=mano --seeds=1   one cell: does it run?

Optimizers: each at its own rate, the best of half, once and twice what lr_find.py suggests, and on if the best is the last; then
steps and seconds to a loss that every run reaches, and the held-out loss at the end. Routing: max_per_group from top_k / groups
(the same load on every group) to top_k (free), with the load of the ranks of a node. Mean and standard error over seeds; a
seed decides the weights, the rows and which of them are held out, so losses are compared seed by seed with the first line's.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import lr_find  # noqa: E402

OPTIMIZERS = ("muon", "adamw", "mano")
ROUTING = (1, 2, 4)  # max_per_group; top_k is 4, over 4 groups
MODEL = ["--layers=2", "--width=128", "--heads=4", "--kv_heads=2", "--head_dim=32", "--expert_width=64", "--seq_len=256",
         "--rows_per_rank=2", "--val_rows=64", "--wandb=off", "--check_every=0", "--track_memory=0", "--warmup=10"]
RANKS = 2  # of one node


def run(steps: int, *settings: str) -> dict:
    """One run's lines of metrics: smoothed loss and seconds by step, held-out loss, and the mean load of the ranks."""
    argv = [sys.executable, ROOT / "launch.py", "--scheduler=none", "--ranks-per-node", str(RANKS), "--", ROOT / "train.py",
            "--run=study", "--resume=never", f"--steps={steps}", f"--val_every={steps}", "--ckpt_every=0", *MODEL, *settings]
    shutil.rmtree(Path("out") / "study", ignore_errors=True)
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{settings}: code {done.returncode}\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    lines = [json.loads(line) for line in Path("out", "study", "metrics.jsonl").read_text().splitlines()]
    smoothed = [p.smoothed for p in lr_find.smooth([(line["lr"], line["loss"]) for line in lines])]
    late = lines[len(lines) // 2 :]
    return {"smoothed": smoothed, "step_s": [line["step_s"] for line in lines], "held_out": lines[-1]["val_loss"],
            "rank_load": statistics.mean(line["rank_load"] for line in late), "skipped": lines[-1]["skipped"],
            "expert_load": statistics.mean(statistics.mean(line["expert_load"]) for line in late)}


def found_rate(optimizer: str, steps: int) -> float:
    """The best of three around what the finder suggests, by held-out loss, with a seed that the study does not use."""
    points = lr_find.ramp({"from": 1e-4, "to": 1, "ranks-per-node": RANKS}, [*MODEL, f"--optimizer={optimizer}"],
                          say=lambda _: None)
    found = lr_find.suggest(points)
    if not found:
        raise RuntimeError(f"{optimizer}: the finder's loss did not fall")
    losses, lr = {}, found[0] / 2
    while len(losses) < 3 or min(losses, key=losses.get) == lr / 2 and len(losses) < 6:
        losses[lr] = run(steps, f"--optimizer={optimizer}", f"--lr={lr:g}", "--seed=1000")["held_out"]
        lr *= 2
    print(f"{optimizer}: " + ", ".join(f"{lr:.2g} -> {loss:.4f}" for lr, loss in losses.items()), flush=True)
    return min(losses, key=losses.get)


def with_error(values: list[float], digits: int) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.mean(values):.{digits}f} ± {error:.{digits}f}"


def optimizers(names: list[str], seeds: int, steps: int) -> dict[str, float]:
    """Prints the first table; returns the rates."""
    rates = {name: found_rate(name, steps) for name in names}
    runs = {name: [run(steps, f"--optimizer={name}", f"--lr={rates[name]:g}", f"--seed={seed}") for seed in range(seeds)]
            for name in names}
    target = max(r["smoothed"][-1] for found in runs.values() for r in found)
    print(f"\n| optimizer | lr | steps to {target:.3f} | seconds | seconds per step | held-out loss after {steps} steps | "
          "difference |")
    print("|---|---|---|---|---|---|---|")
    first = runs[names[0]]
    for name, found in runs.items():
        reached = [next(i for i, loss in enumerate(r["smoothed"], 1) if loss <= target) for r in found]
        seconds = [sum(r["step_s"][:n]) for r, n in zip(found, reached)]
        per_step = [statistics.median(r["step_s"]) for r in found]
        print(f"| {name} | {rates[name]:.2g} | {with_error(reached, 1)} | {with_error(seconds, 2)} | {with_error(per_step, 3)} | "
              f"{with_error([r['held_out'] for r in found], 4)} | {paired(found, first)} |", flush=True)
    return rates


def paired(found: list[dict], first: list[dict]) -> str:
    """Held-out losses against another line's, seed by seed."""
    return with_error([a["held_out"] - b["held_out"] for a, b in zip(found, first)], 4) if found is not first else "-"


def routing(limits: list[int], lr: float, seeds: int, steps: int):
    """Prints the second table: each limit without and with the balancing bias."""
    print(f"\n| max_per_group | router | held-out loss after {steps} steps | difference | busiest rank over mean | "
          "busiest expert over mean |")
    print("|---|---|---|---|---|---|")
    first = None
    for limit in limits:
        for router, settings in {"softmax": [], "sigmoid, bias": ["--router=sigmoid"]}.items():
            found = [run(steps, f"--max_per_group={limit}", f"--lr={lr:g}", f"--seed={seed}", *settings) for seed in range(seeds)]
            first = first or found
            loss, rank, expert = (with_error([r[key] for r in found], digits) for key, digits in
                                  (("held_out", 4), ("rank_load", 3), ("expert_load", 3)))
            print(f"| {limit} | {router} | {loss} | {paired(found, first)} | {rank} | {expert} |", flush=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="of each cell (default 3)")
    parser.add_argument("--steps", type=int, default=80, help="of each run (default 80)")
    parser.add_argument("--only", default="", choices=["", *OPTIMIZERS, *map(str, ROUTING)],
                        help="one optimizer, or one max_per_group")
    options = parser.parse_args(argv)
    if min(options.seeds, options.steps) < 1:
        parser.error("--seeds and --steps must be at least 1")
    seeds, steps, only = options.seeds, options.steps, options.only
    (ROOT / "data").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as here:
        (Path(here) / "data").symlink_to(ROOT / "data")  # the prepared corpus is kept
        os.chdir(here)
        rates = optimizers([name for name in OPTIMIZERS if only in ("", name)], seeds, steps) if not only.isdecimal() else {}
        if not only or only.isdecimal():
            routing([c for c in ROUTING if only in ("", str(c))], rates.get("muon", 3e-3), seeds, steps)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
