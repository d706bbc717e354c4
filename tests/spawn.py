"""Starts the real launcher for a test and waits for it."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def launch(nodes: int, ranks: int, *command: str, cwd=None, timeout=300, check=True) -> subprocess.CompletedProcess:
    """Runs a script of the project on nodes x ranks processes; raises AssertionError with its output if it fails."""
    argv = [sys.executable, ROOT / "launch.py", "--nodes", str(nodes), "--ranks-per-node", str(ranks), "--",
            ROOT / command[0], *command[1:]]
    done = subprocess.run(argv, cwd=cwd or ROOT, capture_output=True, text=True, timeout=timeout)
    assert not check or done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done


def worker(function: str, nodes: int, ranks: int, out: Path, **options) -> subprocess.CompletedProcess:
    out.mkdir(parents=True, exist_ok=True)
    return launch(nodes, ranks, "tests/worker.py", function, str(out), json.dumps(options))
