"""Fifty steps that must come out bit for bit: losses, gradient norms, tracked peak memory, and the state at the end.

    make smoke                         python tests/smoke.py
    make smoke ARGS=--record           takes what comes out now for right, and writes it to tests/smoke.json

The debug model on two simulated nodes of one rank, one thread each. A record is for one processor, torch, Python and corpus;
where there is none for these, the steps run twice and are compared. Ends with code 1 if anything differs.
"""

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(__file__).with_name("smoke.json")
SETTINGS = ["--size=debug", "--seq_len=128", "--router=sigmoid", "--warmup=5", "--val_every=25", "--val_rows=4", "--ckpt_every=0",
            "--track_memory=10", "--wandb=off", "--run=smoke"]


def processor() -> str:
    """Its model, as the system names it, with family and number where those say more: results depend on its vector units."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n\n")[0].splitlines() if info.exists() else []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    return " ".join([facts["model name"], *(f"{name} {facts[key]}" for name, key in (("family", "cpu family"), ("model", "model")) if key in facts)])


def measure(steps: int = 50, script: tuple[str, ...] = ("train.py",)) -> tuple[str, dict]:
    """(key of the record, what came out). Raises RuntimeError with the output of a run that failed."""
    import torch

    (ROOT / "data").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as here:
        (Path(here) / "data").symlink_to(ROOT / "data")  # the prepared corpus is kept
        argv = [sys.executable, ROOT / "launch.py", "--scheduler=none", "--nodes", "2", "--ranks-per-node", "1", "--threads", "1", "--",
                ROOT / script[0], *script[1:], *SETTINGS, f"--steps={steps}"]
        done = subprocess.run(argv, cwd=here, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the run ended with code {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        out = Path(here) / "out" / "smoke"
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        manifest = json.loads((out / "ckpt" / f"step-{steps:08d}" / "manifest.json").read_text())
        shutil.rmtree(out)
    # a thread of gloo sometimes lets go of a tensor late, so the least of the peaks after the first step
    peaks = [line["tracked_peak_bytes"] for line in lines[1:] if "tracked_peak_bytes" in line]
    key = f"{processor()}, torch {torch.__version__}, Python {platform.python_version()}, corpus {manifest['fingerprint'][:16]}"
    return key, {"loss": [line["loss"] for line in lines], "grad_norm": [line["grad_norm"] for line in lines],
                 "peak_bytes": min(peaks), "state": {name: entry["sha256"][:16] for name, entry in manifest["files"].items()}}


def difference(want: dict, got: dict) -> str:
    """The first that there is, or ""."""
    for i, step in enumerate(zip(want["loss"], got["loss"], want["grad_norm"], got["grad_norm"]), 1):
        for what, a, b in (("loss", *step[:2]), ("gradient norm", *step[2:])):
            if a != b:
                return f"{what} of step {i}: {b!r}, should be {a!r}"
    if want["peak_bytes"] != got["peak_bytes"]:
        return f"tracked peak memory: {got['peak_bytes']:,} bytes, should be {want['peak_bytes']:,}"
    wrong = [name for name, digest in want["state"].items() if got["state"].get(name) != digest]
    return f"losses and norms are equal, but not the weights or moments in {wrong[0]}" if wrong else ""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="smoke.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write what comes out to tests/smoke.json")
    record = parser.parse_args(argv).record
    records = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    key, got = measure()
    if record:
        RECORD.write_text(json.dumps(records | {key: got}, indent=1, sort_keys=True) + "\n")
        print(f"recorded for {key}: last loss {got['loss'][-1]:.6f}")
        return 0
    if key not in records:
        print(f"no record for {key}: running again to compare (--record keeps this one)", flush=True)
    text = difference(records.get(key) or measure()[1], got)
    against = "the record" if key in records else "the second run"
    print(f"FAILED against {against}: {text}" if text else f"ok: {len(got['loss'])} steps are those of {against}, bit for bit")
    return int(bool(text))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
