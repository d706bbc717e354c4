"""train.py that fails as planned: python launch.py --retries 9 ... -- tests/failing.py PLAN --run=NAME ...

PLAN: a JSON file {"lines": n, "faults": [{"kind", "rank", "ahead", "at"}, ...]}: the first attempt once out/NAME/attempts.jsonl
has n lines has the first fault, and so on. It strikes in that rank, or in all, so many steps after the furthest one of the
attempts before, and before the at-th collective there. Then "struck" beside the plan takes that collective. "group" there names
the control group in which the kernel kills for memory."""

import json
import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
EVERYBODY = ("printing", "silent")  # not one rank alone
RANK = int(os.environ["RANK"])


def planned(plan: Path, run: str) -> dict:
    told, path = json.loads(plan.read_text()), Path("out", run, "attempts.jsonl")
    lines = path.read_text().splitlines() if path.exists() else []
    faults = told["faults"][len(lines) - told["lines"] :] or [{"kind": "none", "ahead": 10**9, "rank": 0, "at": 0}]
    return {**faults[0], "step": (json.loads(lines[-1])["step_after"] if lines else 0) + faults[0]["ahead"]}


def strike(kind: str, run, plan: Path):
    """What the fault does to this process, for real."""
    if kind.startswith("kill "):
        os.kill(os.getpid(), int(kind[5:]))
    elif kind == "node down":
        Path("down.json").write_text(json.dumps({os.environ["NANO1T_NODE"]: "DOWN: Not responding"}))
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "damaged checkpoint":
        import random

        import checkpoint
        from soak import damage

        good = checkpoint.complete(run.out.path / "ckpt")
        damage("a flipped bit", good[-1], good[-1], random.Random(0))
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "busy":
        while True:
            pass
    elif kind in ("asleep", "silent"):
        time.sleep(1000)
    elif kind == "printing":
        while True:
            os.write(1, f"step {RANK}/9 loss 1.0 \xff\n".encode("latin-1"))
            time.sleep(0.05)
    elif kind == "out of memory":
        import torch

        torch.empty(2**56, dtype=torch.uint8)
    elif kind == "killed for memory":
        Path((plan.parent / "group").read_text(), "cgroup.procs").write_text(str(os.getpid()))
        taken = []
        while True:
            taken.append(b"x" * 2**20)
    elif kind == "no space":
        with open("/dev/full", "w") as full:
            full.write("x")
    elif kind == "cancelled":
        os.kill(os.getppid(), signal.SIGTERM)
    elif kind == "exception":
        raise KeyError("a planned error")


def main(argv: list[str]) -> int:
    import parallel
    import torch
    import train
    from watch import PAGE

    plan, now = Path(argv[0]), {"step": -1, "collectives": 0, "run": None, "done": False}
    rate, start, head_loss = train.rate, parallel.start, train.head_loss

    def noted(run, step):
        os.write(1, b"\xff\xfe not text\n")
        now.update(step=step, run=run)
        return rate(run, step)

    def starting(kind, op, x, out, group, purpose, sent):
        if now["step"] >= FAULT["step"] and FAULT["kind"] != "diverged" and not now["done"]:
            now["collectives"] += 1
            if now["collectives"] > FAULT["at"] and (FAULT["kind"] in EVERYBODY or RANK == FAULT["rank"]):
                now["done"] = True
                if RANK == FAULT["rank"]:
                    told = {"collective": [PAGE.count + 1, f"{purpose} over {group.name}"]}
                    (plan.parent / ".struck").write_text(json.dumps(told))
                    (plan.parent / ".struck").rename(plan.parent / "struck")
                strike(FAULT["kind"], now["run"], plan)
        return start(kind, op, x, out, group, purpose, sent)

    def losing(*args):
        loss, dx, *rest = head_loss(*args)
        bad = FAULT["kind"] == "diverged" and now["step"] >= FAULT["step"]
        return (loss * torch.nan, dx * torch.nan, *rest) if bad else (loss, dx, *rest)

    train.rate, parallel.start, train.head_loss = noted, starting, losing
    return train.main(argv[1:])


if __name__ == "__main__":
    FAULT = planned(Path(sys.argv[1]), next(arg[6:] for arg in sys.argv if arg.startswith("--run=")))
    if FAULT["kind"] == "before the first line":
        sys.exit(1)
    import launch

    if FAULT["kind"] == "kill 15 at the start" and RANK == FAULT["rank"]:
        os.kill(os.getpid(), signal.SIGTERM)
    sys.exit(launch.run(main))
