"""Checkpoints: each rank writes what it owns, and a marker comes last.

    out/<run>/ckpt/step-00000100/
        rank-00000.safetensors     masters and moments that this rank owns, flat, bucket by bucket
        rank-00000.json            the file's size and checksum
        manifest.json              step, data position and fingerprint, model, settings, grid, all files
        .complete                  without it the directory does not exist for a reader

A directory is written under a temporary name, synced, and renamed when every rank has reported. Replicas own the same, so
only the first writes. The files hold no rank-dependent names or padding rules of their own: the manifest's grid and
parallel.pieces say which values of which parameter lie where, so that any other grid can read them.
"""

import hashlib
import json
import os
import re
import shutil
import time
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from model import ConfigError, Model
from parallel import Grid, State, exchange, make_buckets, make_grid, pieces, share_texts

NAME = re.compile(r"step-(\d{8})$")


def directory(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def complete(root: Path) -> list[Path]:
    """The finished checkpoints under root, oldest first."""
    found = [p for p in root.glob("step-*") if NAME.search(p.name) and (p / ".complete").exists()]
    return sorted(found)


def save(root: Path, step: int, state: State, grid: Grid, meta: dict, keep: int):
    """Writes the state before step `step`. All ranks call it; all raise RuntimeError if one could not write.

    meta goes into the manifest. Afterwards the newest `keep` complete checkpoints stay (0: all)."""
    final, tmp = directory(root, step), root / f".tmp-step-{step:08d}"
    if grid.world.index == 0:
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
    device = state.bias_LX.device
    exchange([0.0], grid, device)  # the directory is there
    raise_together(write_rank_file(tmp, state, grid) if grid.r == 0 else "", final, tmp, grid, device)
    failure = ""
    if grid.world.index == 0:
        try:
            publish(final, tmp, {"step": step, "grid": [grid.R, grid.N, grid.E], **meta}, grid.N * grid.E)
            for old in complete(root)[:-keep] if keep else []:
                (old / ".complete").unlink()
                shutil.rmtree(old)
        except OSError as error:
            failure = str(error)
    raise_together(failure, final, tmp, grid, device)  # nobody goes on, or exits, before the marker is there


def raise_together(failure: str, final: Path, tmp: Path, grid: Grid, device: torch.device):
    """Raises RuntimeError on all ranks if one could not write, after removing what was written."""
    for rank, message in enumerate(share_texts(failure, grid, device)):
        if message:
            if grid.world.index == 0:
                shutil.rmtree(tmp, ignore_errors=True)
            raise RuntimeError(f"checkpoint {final} not written, rank {rank}: {message}; older checkpoints are untouched. Free "
                               "space or check the file system, then run again to resume")


def newest(root: Path) -> str:
    """The newest complete checkpoint; empty where there are none at all. Raises ConfigError where there are only incomplete
    ones: starting from scratch must be asked for."""
    found = complete(root)
    if not found and (rest := sorted(p.name for p in root.glob("step-*"))):
        raise ConfigError(f"--resume=auto: {root} holds {', '.join(rest)}, but no complete checkpoint (.complete is missing); "
                          "--resume=never starts afresh and moves the run aside")
    return str(found[-1]) if found else ""


def find(run: str, step: int = 0, path: str = "") -> Path:
    """The checkpoint in out/<run> of this step, or the newest (0); or the one at `path`. Raises ConfigError where there is no
    such finished checkpoint, and names those that are there."""
    if path:
        if step:
            raise ConfigError(f"--step={step} and --checkpoint={path}: give one of them")
        if not (Path(path) / ".complete").exists():
            raise ConfigError(f"--checkpoint={path}: not a complete checkpoint (no .complete in it); name a "
                              "directory such as out/debug/ckpt/step-00000100")
        return Path(path)
    found = complete(Path("out") / run / "ckpt")
    if not found:
        others = sorted({p.parent.parent.parent.name for p in Path("out").glob("*/ckpt/step-*/.complete")})
        there = f"or name a run that has one: {', '.join(others)}" if others else "no run in out/ has one"
        raise ConfigError(f"--run={run}: no finished checkpoint in out/{run}/ckpt; train it (make train "
                          f'ARGS="--run={run}"), {there}')
    wanted = directory(Path("out") / run / "ckpt", step) if step else found[-1]
    if wanted not in found:
        steps = ", ".join(str(int(NAME.search(p.name)[1])) for p in found)
        raise ConfigError(f"--step={step}: run {run} has no finished checkpoint of this step; use one of {steps}")
    return wanted


def remove_unfinished(root: Path):
    """What a crash in the middle of saving has left; call it with the run locked."""
    for tmp in root.glob(".tmp-step-*"):
        shutil.rmtree(tmp)


def set_aside_after(root: Path, step: int) -> list[Path]:
    """A run that starts at this step takes another way than the checkpoints of later steps: they are renamed, or the next
    start would take them for the newest. Returns their new places."""
    later = [p for p in root.glob("step-*") if NAME.search(p.name) and int(NAME.search(p.name)[1]) > step]
    return [p.rename(p.with_name(f"abandoned-{time.strftime('%Y%m%d-%H%M%S')}-{p.name}")) for p in later]


def write_rank_file(tmp: Path, state: State, grid: Grid) -> str:
    """Writes and syncs this rank's file and its description; returns the error where there was one."""
    tensors = {f"{name}/master": master.flatten() for name, master in state.master.items()}
    for name, moments in state.moments.items():
        tensors |= {f"{name}/{kind}": moment.flatten() for kind, moment in moments.items()}
    tensors["bias_LX"] = state.bias_LX.flatten()
    path = rank_file(tmp, grid.n * grid.E + grid.e)
    try:
        save_file({name: t.cpu() for name, t in tensors.items()}, path)
        write_synced(path.with_suffix(".json"), json.dumps({"bytes": path.stat().st_size, "sha256": checksum(path)}))
        sync(path)
    except (OSError, SafetensorError) as error:
        return str(error)
    return ""


def publish(final: Path, tmp: Path, manifest: dict, files: int):
    manifest["files"] = {}
    for path in (rank_file(tmp, i) for i in range(files)):
        manifest["files"][path.name] = json.loads(path.with_suffix(".json").read_text())
    write_synced(tmp / "manifest.json", json.dumps(manifest, indent=1))
    sync(tmp)
    if final.exists():  # left behind by a crash between rename and marker, or written before a rewind
        shutil.rmtree(final)
    tmp.rename(final)
    sync(final.parent)
    write_synced(final / ".complete", checksum(final / "manifest.json"))
    sync(final)


def rank_file(path: Path, index: int) -> Path:
    return path / f"rank-{index:05d}.safetensors"


def write_synced(path: Path, text: str):
    with open(path, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())


def sync(path: Path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def checksum(path: Path) -> str:
    with open(path, "rb") as f:
        digest = hashlib.sha256()
        while block := f.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def read_manifest(path: Path) -> dict:
    """Raises ConfigError if path is not a complete checkpoint with an undamaged manifest."""
    if not (path / ".complete").exists():
        raise ConfigError(f"--resume={path}: not a complete checkpoint (no .complete in it); name one that is, or use "
                          "--resume=auto for the newest")
    manifest = path / "manifest.json"
    if not manifest.exists() or checksum(manifest) != (path / ".complete").read_text():
        raise ConfigError(f"checkpoint {manifest} is missing or damaged (its checksum is not the one in .complete); {others(path)}")
    return json.loads(manifest.read_text())


def others(path: Path) -> str:
    """What to use instead of a damaged checkpoint."""
    found = [str(p) for p in complete(path.parent) if p != path]
    return f"use another one (--resume=PATH): {', '.join(found)}" if found else "there is no other; --resume=never starts afresh"


def load(path: Path, state: State, grid: Grid, m: Model):
    """Fills the state's masters, moments and bias from a checkpoint, whatever grid wrote it. Reads only the files that
    hold something of this rank's, after comparing their checksums; raises ConfigError for a damaged one."""
    manifest = read_manifest(path)
    R, N, E = manifest["grid"]
    sources: dict[str, list] = {}  # parameter -> runs of its values: (start, stop, file, at)
    buckets = None
    for rank in range(N * E):
        saved = make_grid(rank, N * E, E, 1, m, connect=False)
        buckets = buckets or make_buckets(m, saved)
        for bucket in buckets.values():
            for p in pieces(bucket, m, saved):
                sources.setdefault(p.name, []).append((p.start, p.stop, rank, p.at))
    files = {}
    for name, bucket in state.buckets.items():
        targets = {"master": state.master[name], **state.moments[name]}
        for p in pieces(bucket, m, grid):
            for start, stop, rank, at in sources[p.name]:
                low, high = max(p.start, start), min(p.stop, stop)
                if low >= high:
                    continue
                if rank not in files:
                    files[rank] = open_verified(path, rank, manifest)
                for kind, target in targets.items():
                    values = files[rank].get_slice(f"{name}/{kind}")[at + low - start : at + high - start]
                    target.view(-1)[p.at + low - p.start : p.at + high - p.start] = values
    any_file = next(iter(files.values()))
    state.bias_LX.copy_(any_file.get_tensor("bias_LX").view_as(state.bias_LX))


def open_verified(path: Path, rank: int, manifest: dict):
    file = rank_file(path, rank)
    said = manifest["files"][file.name]
    if not file.exists() or file.stat().st_size != said["bytes"] or checksum(file) != said["sha256"]:
        raise ConfigError(f"checkpoint file {file} is missing or damaged (its checksum differs from the manifest's); {others(path)}")
    return safe_open(file, "pt")
