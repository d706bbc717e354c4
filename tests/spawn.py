"""Starts the real launcher for a test and waits for it."""

import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent


def launch(nodes: int, ranks: int, *command: str, cwd=None, timeout=300, check=True, alone=False) -> subprocess.CompletedProcess:
    """Runs a script of the project on nodes x ranks processes; raises AssertionError with its output if it fails.

    alone: with a loopback interface of its own where the system allows it, so that its byte counters count nothing else."""
    argv = [sys.executable, ROOT / "launch.py", "--nodes", str(nodes), "--ranks-per-node", str(ranks), "--",
            ROOT / command[0], *command[1:]]
    done = subprocess.run(argv, cwd=cwd or ROOT, capture_output=True, text=True, timeout=timeout,
                          preexec_fn=own_loopback if alone else None)
    assert not check or done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done


def write_documents(folder: Path, count: int):
    """A .jsonl file of short documents in a new folder, the same each time."""
    rng, words = np.random.default_rng(0), "the value of a list is not in this row and we return it as one more key for each item".split()
    folder.mkdir()
    with open(folder / "docs.jsonl", "w") as f:
        for _ in range(count):
            picked = rng.integers(len(words), size=rng.integers(8, 60))
            text = " ".join(words[(i * i) % len(words)] + ("\n" if i % 7 == 0 else "") for i in picked)
            f.write(json.dumps({"text": text}) + "\n")


def own_loopback():
    """Moves the calling process into a new network namespace and brings its loopback interface up."""
    new_user, new_net = 0x10000000, 0x40000000
    if ctypes.CDLL(None).unshare(new_net if os.geteuid() == 0 else new_user | new_net) == 0:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            set_flags, up_and_running = 0x8914, 0x41
            fcntl.ioctl(s, set_flags, struct.pack("16sh", b"lo", up_and_running))


def worker(function: str, nodes: int, ranks: int, out: Path, alone=False, **options) -> subprocess.CompletedProcess:
    out.mkdir(parents=True, exist_ok=True)
    return launch(nodes, ranks, "tests/worker.py", function, str(out), json.dumps(options), alone=alone)
