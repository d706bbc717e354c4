"""The other fault harness: does the launcher tell kinds of failure apart, and do the right thing? A tiny run of two nodes and
some spares goes through seeded faults of failing.py, and some that lie in how it is started.

    python tests/soak.py --kinds failures --faults 100      all kinds
    python tests/soak.py --kinds hangs --faults 20          a rank stopped at random places

Of each fault: cause, decision, exit code, excluded node, for a hang the rank and the collective. After each launch no process
and no port of it is left. At the end the losses and weights are the undisturbed run's. Misjudged ones are counted, not fatal;
anything else is."""

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median

import checkpoint
import hosts
import recover
from errors import EXIT_CONFIG, EXIT_DIVERGED, EXIT_NO_SPACE, EXIT_OK, EXIT_STOPPED

HERE = Path(__file__).resolve().parent
TINY = ["--layers=2", "--width=32", "--heads=4", "--kv_heads=2", "--head_dim=8", "--expert_width=16", "--vocab=300",
        "--seq_len=32", "--data=texts", "--wandb=off", "--val_every=0", "--warmup=5", "--track_memory=0", "--max_skips=2"]
SHAPE = ["--nodes", "2", "--ranks-per-node", "1", "--threads", "1"]
EVERY = 3  # steps between checkpoints
STEP_TIMEOUT_S = 6.0  # a step takes 0.05 s, but other work may share the machine
SPARES = 2
NO_MEMORY = "killed for memory"  # by the kernel, in a control group that may take ROOM more
ROOM = 64 * 2**20
# kind -> cause, and the launcher's exit code if it must not go on
EXPECTED = {"kill 9": (recover.KILLED, None), "kill 11": (recover.KILLED, None), "kill 15": (recover.KILLED, None),
            "kill 15 at the start": (recover.KILLED, None), "node down": (recover.NODE, None),
            "damaged checkpoint": (recover.KILLED, None),
            "stopped": (recover.HANG, None), "busy": (recover.HANG, None), "asleep": (recover.HANG, None),
            "silent": (recover.HANG, None), "printing": (recover.HANG, None), "out of memory": (recover.MEMORY, None),
            NO_MEMORY: (recover.MEMORY, None),
            "before the first line": (recover.START, None), "exception": (recover.ERROR, None),
            "no space": (recover.NO_SPACE, EXIT_NO_SPACE), "diverged": (recover.DIVERGED, EXIT_DIVERGED),
            "cancelled": (recover.STOPPED, EXIT_STOPPED), "walltime": (recover.STOPPED, EXIT_STOPPED),
            "bad flag": (recover.CONFIG, EXIT_CONFIG)}
OUTSIDE = ("walltime", "bad flag")  # how it is started, not what a rank does
FRUITLESS = ("kill 15 at the start", "before the first line")  # no new step comes of that attempt
# the launcher with a scheduler that knows which nodes are down
LAUNCHER = """
import json, pathlib, sys
sys.path.insert(0, {root!r})
import launch
def unusable(self, file=pathlib.Path("down.json")):
    return json.loads(file.read_text()) if file.exists() else {{}}
launch.Local.unusable = unusable
sys.exit(launch.main(sys.argv[1:]))
"""


class Failure(Exception):
    """The trainer did what it must not."""


def plan_faults(count: int, kinds: list[str], chance: random.Random) -> list[dict]:
    """All kinds equally often, in random order. A fruitless attempt must follow one of the same launch that made a step: else it
    is not written down, or is the second that ends the launch."""
    names = [kind for _ in range(-(-count // len(kinds))) for kind in chance.sample(kinds, len(kinds))][:count]
    for number, kind in enumerate(names):
        if kind in FRUITLESS and (not number or names[number - 1] in (*FRUITLESS, *OUTSIDE, *stopping())):
            names[number] = "kill 9"
        if kind in OUTSIDE and number and names[number - 1] not in (*OUTSIDE, *stopping()):
            names[number - 1] = "cancelled"  # it takes another launch
    return [{"kind": kind, "rank": chance.randrange(2), "ahead": chance.randint(2, 4) if number else 2 * EVERY + 1,
             "at": chance.randrange(60)} for number, kind in enumerate(names)]


def stopping() -> tuple[str, ...]:
    return tuple(kind for kind, (_, code) in EXPECTED.items() if code is not None)


@contextlib.contextmanager
def control_group():
    """A folder of the kernel's whose processes may take ROOM bytes of memory, or None where we may not make one."""
    places = {"/sys/fs/cgroup/memory": ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
              "/sys/fs/cgroup": ("memory.max", "memory.swap.max")}  # of both versions: memory, and what counts swap
    for parent, (limit, swap) in places.items():
        group = Path(parent, f"nano1t-soak-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / limit).exists():
                (group / limit).write_text(str(ROOM))
                if (group / swap).exists():
                    (group / swap).write_text("0" if swap == "memory.swap.max" else str(ROOM))
                yield group
                return
        finally:
            with contextlib.suppress(OSError):  # a process is still in it, which the soak has told
                group.rmdir()
    yield None


def left_of(here: Path, port: int) -> str:
    """What a launch has left though it ended: processes that know this folder, the port where its ranks met. Waits a little for
    what is on its way."""
    until = time.monotonic() + 5
    while found := [place.name for place in Path("/proc").glob("[0-9]*") if knows(place, os.fsencode(f"{here}/plan.json"))]:
        if time.monotonic() > until:
            return f"processes {found}"
        time.sleep(0.05)
    while True:
        try:
            socket.create_server(("", port)).close()
            return ""
        except OSError as error:
            if time.monotonic() > until:
                return f"port {port}: {error}"
        time.sleep(0.05)


def knows(place: Path, word: bytes) -> bool:
    with contextlib.suppress(OSError):
        return word in (place / "cmdline").read_bytes().split(b"\0")
    return False


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def start(here: Path, lines: int, faults: list[dict], steps: int, port: int, log) -> subprocess.Popen:
    """A launch that goes through these faults until one of them ends it. lines: that attempts.jsonl has now."""
    for name in ("down.json", "struck"):
        (here / name).unlink(missing_ok=True)
    (here / "plan.json").write_text(json.dumps({"lines": lines, "faults": faults}))
    budgets = ",".join(f"{cause}=1000" for cause in recover.BUDGETS)
    argv = [*SHAPE, "--port", str(port), "--spares", str(SPARES), "--retries", "1000", "--backoff", "0.05", "--budget", budgets,
            "--timeout", f"step={STEP_TIMEOUT_S},init=60,compile=30,checkpoint=30,end=30", "--", HERE / "failing.py",
            here / "plan.json", "--run=soak", *TINY, f"--steps={steps}", f"--ckpt_every={EVERY}", "--ckpt_keep=3"]
    environment = dict(os.environ)
    kind = faults[0]["kind"] if faults else ""
    if kind == "walltime":
        environment["SLURM_JOB_END_TIME"] = str(int(time.time()) + 25)  # 20 are kept for the way out
    if kind == "bad flag":
        argv.append("--stepz=3")
    return subprocess.Popen([sys.executable, "-c", LAUNCHER.format(root=str(HERE.parent)), *argv], cwd=here, stdout=log,
                            stderr=subprocess.STDOUT, env=environment)


def wrong(fault: dict, line: dict, before: dict, struck: dict | None) -> str:
    """What the launcher has misjudged, or "". before: what had been charged to each cause in this launch."""
    cause, code = EXPECTED[fault["kind"]]
    found = [] if line["cause"] == cause else [f"cause {line['cause']}"]
    found += [] if line["restart"] == (code is None) else [f"restart {line['restart']}: {line['decision']}"]
    found += [] if code in (None, line["code"]) else [f"code {line['code']}"]
    charged = Counter(before) + Counter([cause] if code is None else [])
    found += [] if line["charged"] == charged else [f"charged {line['charged']}, should be {dict(charged)}"]
    node = line["nodes"][fault["rank"]]
    if fault["kind"] == "node down" and list(line["excluded"]) != [node]:
        found.append(f"excluded {list(line['excluded'])}, {node} is down")
    if set(line["excluded"]) - {node}:
        found.append(f"excluded {list(line['excluded'])}, the fault was on {node}")
    if fault["kind"] in ("stopped", "busy", "asleep") and line["hang"]:
        named = line["hang"]
        if (named["kind"], named["ranks"], named["nodes"]) != (fault["kind"], [fault["rank"]], [node]):
            found.append(f"blamed {named['text']}")
        if fault["kind"] == "stopped":  # where others wait for one before, that one is named
            right = named["collective"] == struck["collective"]
            if named["reached"]:
                right = named["collective"][0] < struck["collective"][0]
            found += [] if right else [f"named {named['collective']}, it was stopped before {struck['collective']}"]
    return "; ".join(found)


def follow(here: Path, process: subprocess.Popen, before: int, faults: list[dict], wrongs: list[str], seen: Counter) -> int:
    """Compares each attempt with its fault, until the launch ends; returns how many faults are behind. before: lines at first."""
    path, done, charged = here / "out" / "soak" / "attempts.jsonl", 0, {}
    while True:
        ended = process.poll() is not None
        for line in lines_of(path)[before + done :]:
            struck = json.loads((here / "struck").read_text()) if (here / "struck").exists() else None
            if done < len(faults):
                fault = faults[done]
                error, charged = wrong(fault, line, charged, struck), line["charged"]
                seen["reached" if line["hang"] and line["hang"]["reached"] else "not reached"] += fault["kind"] == "stopped"
                wrongs += [f"{fault}: {error}"] if error else []
                print(f"{fault['kind']:<22} step {line['step_after']:>4}  {line['cause']:<9} {line['why'][:100]}  "
                      f"{'RESTART' if line['restart'] else line['code']}{'  WRONG: ' + error if error else ''}", flush=True)
            done += 1
        if ended:
            return done
        time.sleep(0.05)


def soak(here: Path, count: int, seed: int, kinds: list[str]) -> list[str]:
    """Goes through the faults; returns the misjudged ones. Raises Failure for all else that must not happen."""
    with control_group() as group:
        (here / "group").write_text(str(group))
        if group is None and NO_MEMORY in kinds:
            print(f"left out: {NO_MEMORY}, which takes the right to make a control group (root)", flush=True)
            kinds = [kind for kind in kinds if kind != NO_MEMORY]
        if not kinds:
            raise Failure("no kind of fault is left")
        return go_through(here, count, seed, kinds)


def go_through(here: Path, count: int, seed: int, kinds: list[str]) -> list[str]:
    """All faults, launch after launch; returns the misjudged ones."""
    chance, began, wrongs, seen = random.Random(seed), time.monotonic(), [], Counter()
    faults, log, code = plan_faults(count, kinds, chance), open(here / "log", "w+b"), None
    number = Counter(fault["kind"] for fault in faults)
    steps, done = 5 * count + 100 * number["walltime"] + 20, 0
    while code != EXIT_OK:
        rest = faults[done:]
        inside = next((i for i, fault in enumerate(rest) if fault["kind"] in OUTSIDE), len(rest))
        batch = rest[: max(inside, 1)]
        lines = len(lines_of(here / "out" / "soak" / "attempts.jsonl"))
        process = start(here, lines, batch, steps, port := hosts.free_port(), log)
        behind, code = follow(here, process, lines, batch, wrongs, seen), process.returncode
        if batch and batch[0]["kind"] == "bad flag":
            behind = 1
            wrongs += [] if code == EXIT_CONFIG else [f"{batch[0]}: code {code}"]
            print(f"{'bad flag':<22} code {code}", flush=True)
        if left := left_of(here, port):
            raise Failure(f"after a launch through {[fault['kind'] for fault in batch]} there are still {left}")
        if not behind or done + behind < count and code == EXIT_OK:
            raise Failure(f"the launch ended with {code} after {behind} of {len(batch)} faults; the log ends with\n{tail(log)}")
        done += behind
    check_end(here, steps)
    text = tail(log, 10**8)
    back = [float(x) for x in re.findall(r"first step back ([\d.]+) s", text)]
    wall_s = sum(float(x) for x in re.findall(r"goodput \d+% \([\d.]+ s of steps that count in ([\d.]+) s\)", text))
    useful_s = sum(line["step_s"] for line in lines_of(here / "out" / "soak" / "metrics.jsonl"))
    names = ", ".join(f"{n} x {kind}" for kind, n in sorted(number.items()))
    print(f"{count} faults ({names}) in {time.monotonic() - began:.0f} s, {len(wrongs)} misjudged; goodput "
          f"{useful_s / wall_s:.0%}; from the last sign of life to the first step back: median {median(back):.1f} s, longest "
          f"{max(back):.1f} s; no process and no port left; losses and weights are the undisturbed run's. Stopped ranks, by whether they had launched the "
          f"collective that is named: {dict(seen)}")
    return wrongs


def tail(log, count: int = 3000) -> str:
    log.flush()
    return Path(log.name).read_bytes()[-count:].decode(errors="replace")


def check_end(here: Path, steps: int):
    """The undisturbed run, and that the soaked one has its bits."""
    argv = [sys.executable, HERE.parent / "launch.py", *SHAPE, "--", HERE.parent / "train.py", "--run=whole", *TINY,
            f"--steps={steps}", f"--ckpt_every={EVERY}"]
    done = subprocess.run(argv, cwd=here, capture_output=True)
    if done.returncode:
        raise Failure(f"the undisturbed run failed: {done.stderr[-2000:]}")
    runs = [here / "out" / name for name in ("soak", "whole")]
    losses = [[(line["step"], line["loss"], line["grad_norm"]) for line in lines_of(run / "metrics.jsonl")] for run in runs]
    if losses[0] != losses[1] or len(losses[0]) != steps:
        raise Failure("metrics.jsonl differs from the undisturbed run's")
    for rank in range(2):
        ours, theirs = (checkpoint.rank_file(checkpoint.directory(run / "ckpt", steps), rank).read_bytes() for run in runs)
        if ours != theirs:
            raise Failure("the last weights differ from the undisturbed run's")
