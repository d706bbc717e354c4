"""The fault harness: a tiny model trains through seeded faults, each followed by a restart.

    make soak                                     100 faults, about 10 minutes on two cores
    python tests/soak.py --faults 10 --seed 3     the same faults each time, but for the machine's timing
    python tests/soak.py --kinds failures         does the launcher tell kinds of failure apart? see failures.py
    python tests/soak.py --kinds hangs            a rank stopped at random places: is it named, and the collective?

Real processes, signals and files: the run's out/ lies on a small file system of its own where the system allows it
(unshare, mount), so that it can be full. Before each restart the harness knows which checkpoint is the newest good one, and
demands that the run resumes from it. Every checkpoint that it meets must have the checksums of the same step of a run that
nothing disturbed, and at the end weights, moments, losses and rows must be the same bits.
"""

import argparse
import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import checkpoint  # noqa: E402
import failures  # noqa: E402

TINY = ["--layers=2", "--width=32", "--heads=4", "--kv_heads=2", "--head_dim=8", "--expert_width=16", "--vocab=300",
        "--seq_len=32", "--data=texts", "--wandb=off", "--val_every=0", "--warmup=5", "--track_memory=0"]
EVERY = 3  # steps between checkpoints
STEPS_PER_LIFE = 5  # of the whole run; a life makes fewer, so that the run does not end before its faults
DISK = 16  # MiB
PATIENCE_S = 120  # for anything that should happen soon
KILLS = [f"kill {whom} {when}" for whom in ("a rank", "all ranks", "the launcher") for when in ("at a step", "in a save")]
DAMAGES = ["a flipped bit", "a hole of zeros", "a truncated file", "a missing file", "a missing description",
           "a missing manifest", "a missing marker", "a stale file", "a stale checkpoint", "an unreadable file"]
FAULTS = [*KILLS, "kill all ranks at the start", "a full disk", *DAMAGES, "SIGTERM", "a save on request"]


class Failure(Exception):
    """The trainer did what it must not."""


class Life:
    """One start of the run."""

    def __init__(self, here: Path, name: str, settings: list[str]):
        argv = [sys.executable, ROOT / "launch.py", "--scheduler=none", "--ranks-per-node", "2", "--threads", "1", "--retries", "0",
                "--", ROOT / "train.py"]
        self.process = subprocess.Popen([*argv, f"--run={name}", *TINY, *settings], cwd=here, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True, errors="replace")
        self.lines: list[str] = []
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout), daemon=True)
        self.reader.start()

    def wait_for(self, pattern: str, since: int = 0) -> re.Match:
        """The first line after `since` that has the pattern. Raises Failure if the run ends first, or nothing comes."""
        until, seen = time.monotonic() + PATIENCE_S, since
        while time.monotonic() < until:
            ended = self.process.poll() is not None
            if ended:
                self.reader.join(5)
            while seen < len(self.lines):
                if found := re.search(pattern, self.lines[seen]):
                    return found
                seen += 1
            if ended:
                raise Failure(f"the run ended with {self.process.returncode} before {pattern!r}")
            time.sleep(0.002)
        raise Failure(f"no {pattern!r} within {PATIENCE_S} s")

    def ranks(self) -> list[int]:
        """Process ids by rank."""
        found = {}
        for pid in children(self.process.pid):
            with contextlib.suppress(OSError):
                entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found |= {int(entry[5:]): pid for entry in entries if entry.startswith(b"RANK=")}
        return [found[rank] for rank in sorted(found)]

    def kill(self, whom: str, chance: random.Random):
        ranks = self.ranks()
        pids = {"a rank": ranks and [chance.choice(ranks)], "all ranks": ranks, "the launcher": [self.process.pid]}[whom]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> int:
        """Waits until no process is left; returns the launcher's exit code."""
        ranks = self.ranks()
        code = self.process.wait(PATIENCE_S)
        until = time.monotonic() + PATIENCE_S
        while any(alive(pid) for pid in ranks):
            if time.monotonic() > until:
                raise Failure(f"ranks {ranks} outlive their launcher")
            time.sleep(0.01)
        self.reader.join(PATIENCE_S)
        return code


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ------------------------------------------------------------------------------------------------------------------
# Faults
# ------------------------------------------------------------------------------------------------------------------


def live_through(life: Life, fault: str, root: Path, at: int, chance: random.Random) -> int:
    """Waits for the moment of the fault and makes it, as far as it concerns processes; returns the least step that must not be
    lost by it. at: step of the moment."""
    if fault == "kill all ranks at the start":
        wait_until(lambda: len(life.ranks()) == 2)
        time.sleep(chance.uniform(0, 4))
        life.kill("all ranks", chance)
        return 0
    life.wait_for("^step ")
    if fault == "a full disk":
        return fill_disk(life, root, chance)
    if fault == "a save on request":
        step = int(life.wait_for(rf"^step ({at})/")[1])
        (root.parent / "save").write_text("")
        wait_until(lambda: not (root.parent / "save").exists() or life.process.poll() is not None)
        life.kill("all ranks", chance)
        return step + 1
    if fault == "SIGTERM":
        life.wait_for(rf"^step {at}/")
        life.process.send_signal(signal.SIGTERM)
        if life.end() != 75:
            raise Failure(f"SIGTERM ended the run with {life.process.returncode}")
        return int(re.findall(r"^step (\d+)/", "".join(life.lines), re.MULTILINE)[-1])
    if fault in DAMAGES:
        life.wait_for(rf"saved step {-(-at // EVERY) * EVERY}:")  # with the one before there are two
    elif fault.endswith("in a save"):
        life.wait_for(rf"^step {at}/")
        wait_until(lambda: list(root.glob(".tmp-step-*")) or life.process.poll() is not None)
        time.sleep(chance.uniform(0, 0.04))
    else:
        life.wait_for(rf"^step {at}/")
        time.sleep(chance.uniform(0, 0.05))
    life.kill(next((whom for whom in ("a rank", "the launcher") if whom in fault), "all ranks"), chance)
    return 0


def wait_until(condition):
    until = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until:
            raise Failure(f"waited {PATIENCE_S} s in vain")
        time.sleep(0.0005)


def fill_disk(life: Life, root: Path, chance: random.Random) -> int:
    """Leaves less space than a checkpoint needs, but some for the log; frees it while the run goes on, or after its end."""
    ballast, since = root.parent / "ballast", len(life.lines)
    told = "WARNING: checkpoint .*(No space left on device|File too large).*older checkpoints are untouched"
    if os.path.ismount(root.parent.parent):
        with open(ballast, "wb") as file:
            while not any(re.search(told, line) for line in life.lines[since:]) and life.process.poll() is None:
                with contextlib.suppress(OSError):  # the run writes and removes meanwhile
                    if (more := shutil.disk_usage(root).free - 100_000) > 0:
                        os.posix_fallocate(file.fileno(), ballast.stat().st_size, more)
                time.sleep(0.005)
    else:  # no file system of our own: no file may be as large as a rank's
        for pid in life.ranks():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    life.wait_for(told, since)
    if chance.random() < 0.5 and ballast.exists():
        since = len(life.lines)
        ballast.unlink()
        step = int(life.wait_for(r"saved step (\d+):", since)[1])
        life.kill("all ranks", chance)
        return step
    life.kill("all ranks", chance)
    life.end()
    ballast.unlink(missing_ok=True)
    return 0


def damage(fault: str, newest: Path, older: Path, chance: random.Random):
    """Does to the newest checkpoint what disks, administrators and crashes do."""
    rank = chance.randrange(2)
    file = checkpoint.rank_file(newest, rank)
    size = file.stat().st_size
    if fault == "a flipped bit":
        with open(file, "r+b") as f:
            f.seek(place := chance.randrange(size))
            (byte,) = f.read(1)
            f.seek(place)
            f.write(bytes([byte ^ 1 << chance.randrange(8)]))
    elif fault == "a hole of zeros":
        content = bytearray(file.read_bytes())
        place = next(p for _ in range(1000) if any(content[(p := chance.randrange(size - 4096)) : p + 4096]))
        content[place : place + 4096] = bytes(4096)
        file.write_bytes(content)
    elif fault == "a truncated file":
        os.truncate(file, chance.randrange(size))
    elif fault == "a stale file":
        for path in (file, file.with_suffix(".json")):
            shutil.copyfile(older / path.name, path)
    elif fault == "a stale checkpoint":
        for path in older.iterdir():
            shutil.copyfile(path, newest / path.name)
    elif fault == "an unreadable file":
        file.unlink()
        file.symlink_to(file) if chance.random() < 0.5 else file.mkdir()
    else:
        {"a missing file": file, "a missing description": file.with_suffix(".json"),
         "a missing manifest": newest / "manifest.json", "a missing marker": newest / ".complete"}[fault].unlink()


# ------------------------------------------------------------------------------------------------------------------
# What must hold
# ------------------------------------------------------------------------------------------------------------------


def check_values(paths: list[Path], whole: Path):
    """Every one of these checkpoints is what the undisturbed run had at that step."""
    for path in paths:
        manifest = checkpoint.read_manifest(path)
        for name, entry in manifest["files"].items():
            checkpoint.RankFile(path / name, entry).verify()
            sums = Path(name).with_suffix(".json")
            if (path / sums).read_bytes() != (whole / path.name / sums).read_bytes():
                raise Failure(f"{path / name} differs from the undisturbed run's: a torn or wrong state was written")


def check_end(run: Path, whole: Path, steps: int):
    """Same losses, norms and rows at each step, each step once; same last state."""
    keys = ("step", "loss", "grad_norm", "lr", "row_ids")
    records = [[tuple(json.loads(line)[key] for key in keys) for line in (path / "metrics.jsonl").read_text().splitlines()]
               for path in (run, whole)]
    if records[0] != records[1] or len(records[0]) != steps:
        raise Failure("metrics.jsonl differs from the undisturbed run's")
    last = [checkpoint.directory(path / "ckpt", steps) for path in (run, whole)]
    for rank in range(2):
        ours, theirs = (checkpoint.rank_file(path, rank).read_bytes() for path in last)
        if ours != theirs:
            raise Failure("the last weights differ from the undisturbed run's")


def soak(here: Path, faults: int, seed: int):
    """Raises Failure at the first thing that must not happen. The undisturbed run is in here/whole."""
    chance, steps, began = random.Random(seed), STEPS_PER_LIFE * faults + 10, time.monotonic()
    kinds = [kind for _ in range(-(-faults // len(FAULTS))) for kind in chance.sample(FAULTS, len(FAULTS))][:faults]
    whole, root, settings = here / "out" / "whole" / "ckpt", here / "disk" / "out" / "soak" / "ckpt", [f"--steps={steps}"]
    undisturbed = Life(here, "whole", [*settings, "--ckpt_every=1", "--ckpt_keep=0"])
    if undisturbed.end():
        raise Failure("the undisturbed run failed:\n" + "".join(undisturbed.lines[-20:]))
    here, settings = here / "disk", [*settings, f"--ckpt_every={EVERY}", "--ckpt_keep=2"]
    expected, recoveries, spoilt = None, [], []
    for number, fault in enumerate([*kinds, "none"]):
        life = Life(here, "soak", settings)
        try:
            after = (expected or 0) + chance.randint(2, 4) if number else 2 * EVERY + 1  # with two checkpoints to begin with
            if fault == "none":
                life.end()
            least = live_through(life, fault, root, after, chance) if fault != "none" else steps
            code = life.end()
            resumed = re.search(r"resumed from \S*step-(\d+)", text := "".join(life.lines))
            if expected and fault != "kill all ranks at the start" and (not resumed or int(resumed[1]) != expected):
                raise Failure(f"started from {resumed and resumed[0]}, the newest good one was {expected}")
            recoveries += [float(x) for x in re.findall(r"first step back ([\d.]+) s", text)]
            expected = judge(fault, root, whole, expected, least, text, spoilt, chance)
        except Failure as failure:
            raise Failure(f"fault {number}, {fault}, seed {seed}: {failure}\n{''.join(life.lines[-30:])}") from None
        print(f"{number:4} {fault:<30} code {code:4}  from {resumed and int(resumed[1])}  next from {expected}", flush=True)
    if life.process.returncode:
        raise Failure(f"the last start ended with {life.process.returncode}:\n" + "".join(life.lines[-20:]))
    check_end(here / "out" / "soak", whole.parent, steps)
    print(f"{faults} faults ({', '.join(f'{n} x {kind}' for kind, n in sorted(Counter(kinds).items()))}) in "
          f"{time.monotonic() - began:.0f} s; from the last sign of life to the first step back: median "
          f"{sorted(recoveries)[len(recoveries) // 2]:.1f} s, longest {max(recoveries):.1f} s; all {steps} steps and the last "
          "state are bit-identical to the undisturbed run's")


def judge(fault: str, root: Path, whole: Path, before: int | None, least: int, text: str, spoilt: list[int],
          chance: random.Random) -> int | None:
    """After the end of a life: is what must be there, there? Then the disk's part of the fault. Returns the step from which the
    next start must resume. spoilt: inodes of directories that a fault has damaged."""
    good = [path for path in checkpoint.complete(root) if path.stat().st_ino not in spoilt]
    check_values(good, whole)
    newest = checkpoint.step_of(good[-1]) if good else 0
    reached = max((int(step) for step in re.findall(r"^step (\d+)/", text, re.MULTILINE)), default=0)
    due = 0 if fault == "a full disk" else reached // EVERY * EVERY - EVERY
    least = max(least, before or 0, due, *(int(step) for step in re.findall(r"saved step (\d+):", text)))
    if newest < least:
        raise Failure(f"step {least} was saved or due, the newest checkpoint is of step {newest}")
    for place in [*root.glob("damaged-*"), *root.glob("abandoned-*")]:  # an operator has seen them
        if place.stat().st_ino not in spoilt and "abandoned" not in place.name:
            raise Failure(f"{place} was not damaged by any fault")
        shutil.rmtree(place)
    if fault in DAMAGES:
        if len(good) < 2:
            raise Failure(f"two checkpoints should be there: {good}")
        spoilt.append(good[-1].stat().st_ino)
        damage(fault, good[-1], good[-2], chance)
        newest = checkpoint.step_of(good[-2])
    return newest or None


# ------------------------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------------------------


def prepare(here: Path):
    """Texts to train on, and the disk."""
    chance = random.Random(0)
    words = "the model reads a row of tokens and every rank adds its part of the gradient to what the others sent".split()
    (here / "texts").mkdir()
    for i in range(60):
        (here / "texts" / f"{i}.txt").write_text(" ".join(chance.choices(words, k=chance.randint(5, 400))))
    (here / "disk" / "out").mkdir(parents=True)
    (here / "data").mkdir()
    for name in ("texts", "data"):
        (here / "disk" / name).symlink_to(here / name)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}m", "soak", here / "disk" / "out"], capture_output=True)
    print(f"out/ is on a file system of {DISK} MiB" if mounted.returncode == 0 else
          "out/ is on the same disk as everything; a limit of file sizes stands for a full one")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="soak.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--kinds", default="disk", help="disk | failures | hangs, or kinds of failures.py with commas between")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inside", metavar="DIR", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inside:
        prepare(Path(args.inside))
        try:
            if args.kinds != "disk":
                kinds = {"failures": list(failures.EXPECTED), "hangs": ["stopped"]}.get(args.kinds, args.kinds.split(","))
                return int(bool(failures.soak(Path(args.inside), args.faults, args.seed, kinds)))
            soak(Path(args.inside), args.faults, args.seed)
        except (Failure, failures.Failure) as failure:
            print(f"FAILED: {failure}", flush=True)
            return 1
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *argv, "--inside", folder]
        own = ["unshare", "--user", "--map-root-user", "--mount"]
        with contextlib.suppress(FileNotFoundError):
            if subprocess.run([*own, "true"], capture_output=True).returncode == 0:
                return subprocess.run([*own, *command]).returncode
        return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
