"""Checkpoints: each rank writes what it owns while training goes on, every byte has a checksum, and a marker comes last.

    out/<run>/ckpt/step-00000100/
        rank-00000.safetensors     masters and moments that this rank owns (of replicas, each writes a part), flat
        rank-00000.json            checksums: of the file's header and of each piece of each tensor
        manifest.json              step, data fingerprint, model, settings, grid; every file's size and its .json's checksum
        .complete                  the manifest's checksum; without it the directory does not exist for a reader

    python checkpoint.py list out/debug            what is there
    python checkpoint.py verify out/debug          reads everything back and compares; also a single checkpoint's directory
    python checkpoint.py export --run=debug        as a Hugging Face directory; import --source=DIR --run=NAME: see export.py

The write, in a thread of each rank, over a process group that training never uses:

    temporary directory -> files, synced -> every rank's result -> manifest -> rename -> sync of the parent -> marker
    -> read back, if older ones are due to go -> these go

State changes only in the optimizer step. So nothing is copied: the thread reads live tensors, in the order in which the
optimizer will change them, and the optimizer waits before each chunk until that chunk has been written (Flush).

A save that fails on any rank fails on all: it is reported, older checkpoints are untouched, and the next one is tried when
it is due. On reading, damage in the newest leads to the one before, never to a start from scratch. Files hold no padding
rules of their own: the manifest's grid and parallel.pieces say which values of which parameter lie where, so that any
other grid can read the ranges it needs.

A checksum is a CRC-32 of up to 16 MiB: it finds all damage of up to 32 bits in a row and misses other damage once in 4
billion pieces. zlib's runs at 6.5 GB/s on one core here, SHA-256 with the processor's own instructions at 1.9 (LOG.md);
it is to find faults, not forgery. The few small files above it have SHA-256.
"""

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import sys
import threading
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from model import ConfigError, Model
from offload import Window
from parallel import Grid, State, make_buckets, make_grid, patient_group, pieces, share_texts

FORMAT = 2  # of what is written; 1 had one checksum per file
NAME = re.compile(r"^step-(\d{8,})$")
UNFINISHED = re.compile(r"^\.tmp-(step|removed)-\d{8,}$")
PIECE = 1 << 22  # values (16 MiB) that are written, released to the optimizer and summed at a time
BLOCK = 1 << 20  # bytes that are read or written at a time, so that their checksum finds them in the processor's cache
UNSYNCED = 1 << 25  # bytes that may wait in the page cache, so that a checkpoint takes no memory from the run
SLOW_BYTES_S = 5e9  # of all ranks together: what a file system is trusted with before a save has been measured
BEGUN = "begun_from.json"  # beside the checkpoints of a run that began from another run's


class Damaged(ConfigError):
    """A checkpoint that is incomplete, unreadable or not as it was written."""


class NotSaved(RuntimeError):
    """On some rank a checkpoint could not be written; raised on all."""


# ------------------------------------------------------------------------------------------------------------------
# Places
# ------------------------------------------------------------------------------------------------------------------


def directory(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def step_of(path: Path) -> int:
    return int(NAME.search(path.name)[1])


def model_of(manifest: dict) -> Model:
    """The checkpoint's model, for as many positions as it has been trained on in any stage so far."""
    lengths = [s["seq_len"] for s in manifest.get("declared", ()) if s["from_step"] < max(manifest["step"], 1)]
    return replace(Model(**manifest["model"]), **({"seq_len": max(lengths)} if lengths else {}))


def complete(root: Path) -> list[Path]:
    """The finished checkpoints under root, oldest first."""
    found = [p for p in root.glob("step-*") if NAME.search(p.name) and (p / ".complete").exists()]
    return sorted(found, key=step_of)


def candidates(root: Path) -> list[Path]:
    """What --resume=auto may start from, the best first, at last what the run was begun from (see begun_from); empty where there is
    nothing at all. Raises ConfigError where there are only incomplete checkpoints or such as were set aside: starting from scratch
    must be asked for."""
    found, note = complete(root), root / BEGUN
    if note.exists():
        try:
            source = Path(json.loads(note.read_text())["path"])
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"--resume=auto: {note} does not say from which checkpoint this run was begun; delete it and give "
                              "--resume=PATH once more, or go on from the run's own checkpoints without it") from None
        if not found and not (source / ".complete").exists():
            raise ConfigError(f"--resume=auto: this run has no checkpoint yet, and {source}, from which it was begun, is gone; bring it "
                              "back, or --resume=never starts afresh and moves the run aside")
        found = [source] * (source / ".complete").exists() + found
    kinds = ("step-*", "damaged-*", "abandoned-*")
    if not found and (rest := sorted(p.name for kind in kinds for p in root.glob(kind))):
        raise ConfigError(f"--resume=auto: {root} holds {', '.join(rest)}, but no complete checkpoint (.complete is missing); "
                          "--resume=never starts afresh and moves the run aside")
    return found[::-1]


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
    for tmp in root.glob(".tmp-*"):
        if UNFINISHED.search(tmp.name):
            shutil.rmtree(tmp)


def set_aside(path: Path, why: str) -> Path:
    """Renames a checkpoint, so that no reader takes it, and nothing is lost; returns its new place. why: damaged | abandoned."""
    return path.rename(path.with_name(f"{why}-{time.strftime('%Y%m%d-%H%M%S')}-{path.name}"))


def begun_from(root: Path, source: Path) -> list[Path]:
    """A run that starts from another run's checkpoint: until it has one of its own it begins there again. Its earlier ones, if it has
    any, are renamed; returns their new places."""
    aside = set_aside_after(root, -1)
    root.mkdir(parents=True, exist_ok=True)
    write_synced(root / ".begun", json.dumps({"path": str(source.absolute())}))
    (root / ".begun").rename(root / BEGUN)  # all of it or nothing
    sync(root)
    return aside


def set_aside_after(root: Path, step: int) -> list[Path]:
    """A run that starts at this step takes another way than the checkpoints of later steps: they are renamed, or the next
    start would take them for the newest. Returns their new places."""
    return [set_aside(p, "abandoned") for p in root.glob("step-*") if NAME.search(p.name) and step_of(p) > step]


def superfluous(root: Path, keep: int, keep_every: int) -> list[Path]:
    """Complete checkpoints but for the newest `keep` (0: all) and those of steps that `keep_every` divides (0: none)."""
    found = [p for p in complete(root) if not p.is_symlink()]
    return [p for p in (found[:-keep] if keep else []) if not keep_every or step_of(p) % keep_every]


def remove_superfluous(root: Path, keep: int, keep_every: int):
    """A reader sees all of a checkpoint or nothing."""
    for path in superfluous(root, keep, keep_every):
        shutil.rmtree(path.rename(path.with_name(f".tmp-removed-{path.name.removeprefix('step-')}")))


def rank_file(path: Path, index: int) -> Path:
    return path / f"rank-{index:05d}.safetensors"


# ------------------------------------------------------------------------------------------------------------------
# Writing beside the next step
# ------------------------------------------------------------------------------------------------------------------


class Unit(NamedTuple):
    """A piece of a tensor on its way to the file."""

    name: str  # of the tensor: layers.0.dense/master
    start: int  # the first of its values; a multiple of PIECE
    stop: int


def in_order(tensors: dict[str, Tensor], phases: list[tuple[list[str], tuple[str, ...]]]) -> list[Unit]:
    """The pieces of all tensors in the order in which the optimizer changes them (optim.phases); a chunk of a bucket needs all
    its kinds, so these lie side by side. What no phase names comes last."""
    units, left = [], dict(tensors)
    for buckets, kinds in [*phases, *(([name.rpartition("/")[0]], (name.rpartition("/")[2],)) for name in tensors)]:
        for bucket in buckets:
            names = [name for kind in kinds if (name := f"{bucket}/{kind}") in left]
            for start in range(0, max((len(left[name]) for name in names), default=0), PIECE):
                units += [Unit(name, start, min(start + PIECE, len(left[name]))) for name in names]
            for name in names:
                del left[name]
    return units


def share_of(tensors: dict[str, Tensor], units: list[Unit], replicas: int, r: int) -> list[Unit]:
    """Of what the replicas hold alike, the part that replica r writes: whole tensors, about the same number of bytes each."""
    load, writer = [0] * replicas, {}
    for name in dict.fromkeys(unit.name for unit in units):
        writer[name] = load.index(min(load))
        load[writer[name]] += tensors[name].nbytes
    return [unit for unit in units if writer[unit.name] == r]


class Flush:
    """How far the writing of a state has come. The writer calls `passed` after each unit, the optimizer `wait` before it changes
    something."""

    def __init__(self, units: list[Unit]):
        self.places: dict[str, list[int]] = {}  # tensor -> place of each of its pieces in the order of writing
        for place, unit in enumerate(units):
            self.places.setdefault(unit.name, []).append(place)
        self.written, self.total = 0, len(units)
        self.moved = threading.Condition()
        self.blocked_s = 0.0

    def passed(self):
        with self.moved:
            self.written += 1
            self.moved.notify()

    def end(self):
        """Everything is written, or nothing more will be."""
        with self.moved:
            self.written = self.total
            self.moved.notify()

    def wait(self, tensors: dict[str, Tensor], bucket: str, at: slice, kinds: tuple[str, ...]):
        """Until rows `at` of these tensors of the bucket have been written. tensors: name -> with its rows."""
        if self.written == self.total:
            return
        began, last = time.perf_counter(), -1
        for kind in kinds:
            if places := self.places.get(name := f"{bucket}/{kind}"):
                x = tensors[name]
                last = max(last, places[(at.stop * (x.numel() // len(x)) - 1) // PIECE])
        with self.moved:
            self.moved.wait_for(lambda: self.written > last)
        self.blocked_s += time.perf_counter() - began


class RankFileWriter:
    """A safetensors file whose tensors come in pieces, in any order of tensors. Bytes go to the disk while the next piece comes,
    and leave the page cache."""

    def __init__(self, path: Path, shapes: dict[str, int]):
        """shapes: tensor -> number of its fp32 values."""
        table, at = {"__metadata__": {"format": "pt"}}, 0
        for name, values in shapes.items():
            table[name] = {"dtype": "F32", "shape": [values], "data_offsets": [at, at := at + 4 * values]}
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        self.begin = {name: len(header) + entry["data_offsets"][0] for name, entry in table.items() if name in shapes}
        self.path, self.bytes, self.at = path, len(header) + at, dict.fromkeys(shapes, 0)
        self.sums = {"piece": PIECE, "header_bytes": len(header), "header": zlib.crc32(header),
                     "crc32": {name: [] for name in shapes}}
        self.syncing, self.unsynced, self.lane = None, 0, ThreadPoolExecutor(1)
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._put(header, 0)

    def add(self, name: str, data: np.ndarray):
        """The next bytes of a tensor, uint8 [bytes]."""
        sums, size = self.sums["crc32"][name], 4 * PIECE
        while len(data):
            if self.at[name] % size == 0:
                sums.append(0)
            part = data[: min(BLOCK, size - self.at[name] % size)]
            sums[-1] = zlib.crc32(part, sums[-1])
            self._put(part, self.begin[name] + self.at[name])
            self.at[name] += len(part)
            self.unsynced, data = self.unsynced + len(part), data[len(part) :]
        if self.unsynced >= UNSYNCED // 2:  # as much may be on its way already
            self.wait_for_sync()
            self.syncing, self.unsynced = self.lane.submit(sync_and_drop, self.fd), 0

    def _put(self, data, at: int):
        view = memoryview(data)
        while len(view):
            written = os.pwrite(self.fd, view, at)
            view, at = view[written:], at + written

    def wait_for_sync(self):
        if self.syncing:
            self.syncing.result()
        self.syncing = None

    def finish(self) -> dict:
        """Returns the manifest's entry once everything is on the disk."""
        self.wait_for_sync()
        os.fsync(self.fd)
        sync_and_drop(self.fd)
        text = json.dumps(self.sums, separators=(",", ":"))
        write_synced(self.path.with_suffix(".json"), text)
        return {"bytes": self.bytes, "sha256": hashlib.sha256(text.encode()).hexdigest()}

    def close(self):
        self.lane.shutdown()
        os.close(self.fd)


def sync_and_drop(fd: int):
    """Waits until the file's data are on the disk, and lets go of the memory that held them. Not on every system."""
    getattr(os, "fdatasync", os.fsync)(fd)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def write_synced(path: Path, text: str):
    with open(path, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())


def sync(path: Path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


# ------------------------------------------------------------------------------------------------------------------
# The protocol
# ------------------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """Of a save, the same on all ranks."""

    step: int
    path: Path
    error: str  # empty: it is complete
    warning: str  # what went wrong afterwards: an older one could not be removed
    seconds: float  # from the start to the marker, on this rank
    bytes: int  # of all files


class Saver:
    """Writes checkpoints beside training, one at a time, with a thread and a process group of its own. All ranks make the same
    calls."""

    def __init__(self, root: Path, state: State, grid: Grid, keep: int = 0, keep_every: int = 0, writers: int = 0):
        """keep, keep_every: see superfluous; writers: ranks that write at a time, 0: all."""
        self.root, self.state, self.grid, self.device = root, state, grid, state.bias_LX.device
        self.keep, self.keep_every, self.writers = keep, keep_every, writers or grid.world.size
        self.group = patient_group(grid)
        self.window = Window(self.device, 4 * PIECE)
        self.rows = {f"{name}/{kind}": x for name, master in state.master.items()
                     for kind, x in {"master": master, **state.moments[name]}.items()}
        self.tensors = {name: x.view(-1) for name, x in self.rows.items()}  # live, [values]
        self.flush = Flush([])
        self.running: Future | None = None
        self.blocked_s, self.slowest_s = 0.0, 0.0
        self.needs_s = sum(x.nbytes for x in self.rows.values()) * grid.N * grid.E / SLOW_BYTES_S  # that a save should be given
        self.delay_s = 0.0  # before each unit: tests make the disk slow

    def start(self, step: int, meta: dict, phases: list | tuple = (), retire: bool = True) -> Outcome | None:
        """Begins to write the state before step `step` and returns; from here on it changes only through state.before_change.
        meta: goes into the manifest, as it is now. phases: optim.phases. retire: whether older checkpoints may go once this one
        has been read back. If an earlier save still runs, its end is waited for, and its outcome returned."""
        before, began = self.wait(), time.perf_counter()
        units = share_of(self.tensors, in_order(self.tensors, phases), self.grid.R, self.grid.r)
        self.flush = Flush(units)
        self.state.before_change = partial(self.flush.wait, self.rows)
        small = {"bias_LX": self.state.bias_LX.detach().flatten().clone()} if self.grid.world.index == 0 else {}
        manifest = json.dumps({"step": step, "grid": [self.grid.R, self.grid.N, self.grid.E], **meta})
        self.window.follow(self.device)
        self.running = Future()
        work = partial(self._save, step, units, small, json.loads(manifest), retire)
        threading.Thread(target=into, args=(self.running, work), name="checkpoint", daemon=True).start()
        self.blocked_s += time.perf_counter() - began
        return before

    def finished(self) -> Outcome | None:
        """Of a save that has ended since this was last asked."""
        return self.wait() if self.running and self.running.done() else None

    def wait(self) -> Outcome | None:
        """Until the save that runs, if any, has ended."""
        began, outcome = time.perf_counter(), self.running and self.running.result()
        self.running = None
        if outcome:
            self.slowest_s = max(self.slowest_s, outcome.seconds)
            self.needs_s = 2 * self.slowest_s
        self.blocked_s += time.perf_counter() - began
        return outcome

    def take_blocked_s(self) -> float:
        """Seconds that the training thread has lost to saving since this was last asked."""
        seconds, self.blocked_s, self.flush.blocked_s = self.blocked_s + self.flush.blocked_s, 0.0, 0.0
        return seconds

    # what follows runs in the thread

    def _save(self, step: int, units: list[Unit], small: dict[str, Tensor], manifest: dict, retire: bool) -> Outcome:
        began, first = time.perf_counter(), self.grid.world.index == 0
        final, tmp = directory(self.root, step), self.root / f".tmp-step-{step:08d}"

        def failed(error: str) -> Outcome:
            if first:
                shutil.rmtree(tmp, ignore_errors=True)
            text = f"checkpoint {final} not written, {error}; older checkpoints are untouched. Free space or check the file system"
            return Outcome(step, final, text, "", time.perf_counter() - began, 0)

        try:
            _, error = self._all(lambda: make_directory(tmp) if first else None)
            if error:
                return failed(error)
            self._turn(begin=True)
            entries, error = self._all(lambda: self._write(tmp, units, small), after=partial(self._turn, begin=False))
        finally:
            self.flush.end()
        if error:
            return failed(error)
        N, E = manifest["grid"][1:]
        manifest["files"] = {rank_file(tmp, rank).name: {**entry, "owner": rank % (N * E)} for rank, entry in enumerate(entries)}
        _, error = self._all(lambda: publish(final, tmp, manifest) if first else None)
        if error:
            return failed(error)
        seconds, (error, warning) = time.perf_counter() - began, self._retire(final, entries) if retire else ("", "")
        return Outcome(step, final, error, warning, seconds, sum(entry["bytes"] for entry in entries))

    def _write(self, tmp: Path, units: list[Unit], small: dict[str, Tensor]) -> dict:
        """This rank's file; returns its entry in the manifest."""
        if not tmp.is_dir():
            raise FileNotFoundError(f"{tmp} is not seen from here; out/ must be on a file system that all nodes share")
        shapes = {name: len(x) for name, x in small.items()} | {unit.name: len(self.tensors[unit.name]) for unit in units}
        file = RankFileWriter(rank_file(tmp, self.grid.world.index), shapes)
        try:
            for name, x in small.items():
                for part in x.split(PIECE):
                    file.add(name, self.window.show(part))
            for unit in units:
                time.sleep(self.delay_s)
                file.add(unit.name, self.window.show(self.tensors[unit.name][unit.start : unit.stop]))
                self.flush.passed()
            return file.finish()
        finally:
            file.close()

    def _retire(self, final: Path, entries: list[dict]) -> tuple[str, str]:
        """Removes what need not stay any longer, once the new one has been read back; returns (error, warning)."""
        first, rank = self.grid.world.index == 0, self.grid.world.index
        old, trouble = self._all(lambda: len(superfluous(self.root, self.keep, self.keep_every)) if first else 0)
        if old[0]:
            _, error = self._all(lambda: RankFile(rank_file(final, rank), entries[rank]).verify())
            if error:
                _, trouble = self._all(lambda: set_aside(final, "damaged") and None if first else None)
                return f"checkpoint {final} was written, but reads back damaged, {error}; older ones are untouched", trouble
            _, trouble = self._all(lambda: remove_superfluous(self.root, self.keep, self.keep_every) if first else None)
        return "", trouble and f"older checkpoints could not be removed: {trouble}"

    def _all(self, action: Callable, after: Callable = lambda: None) -> tuple[list, str]:
        """action() of every rank: (what each returned, the first one's error or ""). after() follows it whatever happened."""
        result = {}
        try:
            result["value"] = action()
        except (OSError, Damaged) as error:
            result["error"] = f"rank {self.grid.world.index}: {str(error)[:300]}"  # escaped, less than what is shared
        after()
        results = [json.loads(text) for text in self._share(json.dumps(result))]
        return [r.get("value") for r in results], next((r["error"] for r in results if "error" in r), "")

    def _share(self, text: str) -> list[str]:
        """Every rank's text on every rank."""
        if not self.group:
            return [text]
        sent = torch.zeros(2048, dtype=torch.uint8)
        content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        sent[: len(content)] = content
        received = [torch.empty_like(sent) for _ in range(self.grid.world.size)]
        dist.all_gather(received, sent, group=self.group)
        return [x.numpy().tobytes().rstrip(b"\0").decode() for x in received]

    def _turn(self, begin: bool):
        """At the beginning waits for the rank `writers` before this one, at the end tells the one after."""
        rank, token = self.grid.world.index, torch.zeros(1)
        if begin and rank >= self.writers:
            dist.recv(token, rank - self.writers, group=self.group)
        if not begin and rank + self.writers < self.grid.world.size:
            dist.send(token, rank + self.writers, group=self.group)


def into(future: Future, work: Callable):
    """Runs work in a thread; what it raises, future.result() raises."""
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)


def make_directory(tmp: Path):
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)


def publish(final: Path, tmp: Path, manifest: dict):
    """Makes a checkpoint of the files in tmp. manifest: step, grid, and for each file what RankFileWriter.finish returned and the
    saved rank inside a replica, its owner. After an OSError there is none."""
    text = json.dumps({"format": FORMAT, **manifest}, indent=1)
    write_synced(tmp / "manifest.json", text)
    sync(tmp)
    if final.exists():  # a crash came between rename and marker
        set_aside(final, "abandoned")
    tmp.rename(final)
    try:
        sync(final.parent)
        write_synced(final / ".marker", hashlib.sha256(text.encode()).hexdigest())
        (final / ".marker").rename(final / ".complete")
        sync(final)
    except OSError:
        (final / ".complete").unlink(missing_ok=True)
        final.rename(tmp)
        raise


def save(root: Path, step: int, state: State, grid: Grid, meta: dict, keep: int = 0):
    """Writes the state before step `step` and waits for it. All ranks call it; all raise NotSaved if one could not write."""
    saver = Saver(root, state, grid, keep)
    saver.start(step, meta)
    if error := saver.wait().error:
        raise NotSaved(error)


# ------------------------------------------------------------------------------------------------------------------
# Reading
# ------------------------------------------------------------------------------------------------------------------


def read_manifest(path: Path) -> dict:
    """Raises Damaged if path is not a complete checkpoint with an undamaged manifest."""
    if not (path / ".complete").exists():
        why = "no .complete in it" if path.exists() else "there is no such directory"
        raise Damaged(f"--resume={path}: not a complete checkpoint ({why}); name one that is, or use "
                      "--resume=auto for the newest")
    manifest = path / "manifest.json"
    with reading(manifest):
        text = manifest.read_bytes()
        if hashlib.sha256(text).hexdigest() != (path / ".complete").read_text():
            raise ValueError("its checksum is not the one in .complete")
    found = json.loads(text)
    if found.get("format") != FORMAT:
        raise ConfigError(f"checkpoint {path} has format {found.get('format', 1)}, this program reads {FORMAT}; use the one that "
                          "wrote it")
    if NAME.search(path.name) and found["step"] != step_of(path):
        raise Damaged(f"checkpoint {path} is damaged: its manifest is that of step {found['step']}; {others(path)}")
    return found


def others(path: Path) -> str:
    """What to use instead of a damaged checkpoint."""
    found = [str(p) for p in complete(path.parent) if p != path]
    return f"use another one (--resume=PATH): {', '.join(found)}" if found else "there is no other; --resume=never starts afresh"


@contextmanager
def reading(path: Path):
    """What cannot be read is damaged."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise Damaged(f"checkpoint file {path} is missing or damaged ({error}); {others(path.parent)}") from error


class RankFile:
    """One rank's file, of which ranges of values are read; each is compared with its checksums. Every method raises Damaged."""

    def __init__(self, path: Path, entry: dict):
        """entry: the manifest's."""
        self.path, self.last, self.scratch = path, None, np.empty(0, np.uint8)
        with reading(path):
            text = path.with_suffix(".json").read_bytes()
            if hashlib.sha256(text).hexdigest() != entry["sha256"]:
                raise ValueError(f"{path.with_suffix('.json').name} is not the one that the manifest names")
            self.sums = json.loads(text)
            self.file = open(path, "rb", buffering=0)
            if (size := os.fstat(self.file.fileno()).st_size) != entry["bytes"]:
                raise ValueError(f"{size} bytes, should be {entry['bytes']}")
            header = np.empty(self.sums["header_bytes"], np.uint8)
            self._compare(self._get(0, header), self.sums["header"], "header")
            table = {name: entry for name, entry in json.loads(bytes(header[8:])).items() if "dtype" in entry}
            self.begin = {name: len(header) + entry["data_offsets"][0] for name, entry in table.items()}
            self.values = {name: entry["shape"][0] for name, entry in table.items()}

    def close(self):
        self.file.close()

    def _get(self, at: int, data: np.ndarray) -> int:
        """Fills data, uint8, from byte `at` of the file on; returns its checksum."""
        view, found = memoryview(data), 0
        while len(view):
            got = os.preadv(self.file.fileno(), [view[:BLOCK]], at)
            if not got:
                raise ValueError(f"ends at byte {at}")
            found = zlib.crc32(view[:got], found)
            view, at = view[got:], at + got
        return found

    def _compare(self, found: int, said: int, what: str):
        if found != said:
            raise ValueError(f"the checksum of its {what} is not the one that was written")

    def piece(self, name: str, i: int, data: np.ndarray | None = None) -> np.ndarray:
        """Piece i of a tensor as bytes; they stay valid until the next call. data: uint8, put them there."""
        if self.last == (name, i) and data is None:
            return self.scratch
        size = self.sums["piece"]
        start, stop = i * size, min((i + 1) * size, self.values[name])
        at, count = self.begin[name] + 4 * start, 4 * (stop - start)
        if data is None:
            data = self.scratch = np.empty(count, np.uint8)
            self.last = None
        with reading(self.path):
            if hasattr(os, "posix_fadvise"):  # the disk works on the next piece meanwhile
                os.posix_fadvise(self.file.fileno(), at, count + 4 * size, os.POSIX_FADV_WILLNEED)
            self._compare(self._get(at, data), self.sums["crc32"][name][i], f"{name}, values {start} to {stop},")
        if data is self.scratch:
            self.last = name, i
        return data

    def read(self, name: str, start: int, target: Tensor):
        """Values start, start + 1, ... of a tensor, as many as target [values] holds, fp32. Reads the pieces they lie in."""
        if name not in self.values:
            raise Damaged(f"checkpoint file {self.path} has no {name}")
        size, stop = self.sums["piece"], start + len(target)
        host = target.numpy().view(np.uint8) if target.device.type == "cpu" else None
        for i in range(start // size, -(-stop // size)):
            begin, end = i * size, min((i + 1) * size, self.values[name])
            low, high = max(begin, start), min(end, stop)
            if host is not None and (low, high) == (begin, end):
                self.piece(name, i, host[4 * (low - start) : 4 * (high - start)])
            else:
                values = torch.from_numpy(self.piece(name, i)[4 * (low - begin) : 4 * (high - begin)].view(np.float32))
                target[low - start : high - start] = values

    def verify(self, tell: Callable[[int], None] = lambda nbytes: None):
        """Reads everything. tell: called with the bytes of each piece."""
        for name, sums in self.sums["crc32"].items():
            for i in range(len(sums)):
                tell(len(self.piece(name, i)))
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self.close()


class Run(NamedTuple):
    """Values that lie in a row in a saved rank's part of a bucket, and in this rank's."""

    owner: int  # the saved rank, within its replica
    bucket: str
    source: int
    target: int
    count: int


def runs(manifest: dict, state: State, grid: Grid, m: Model) -> list[Run]:
    """Where everything that this rank owns lies in a checkpoint, whatever grid wrote it; sorted by file."""
    _, N, E = manifest["grid"]
    sources: dict[str, list] = {}  # parameter -> runs of its values: (start, stop, owner, at)
    buckets = None
    for owner in range(N * E):
        saved = make_grid(owner, N * E, E, 1, m, connect=False)
        buckets = buckets or make_buckets(m, saved)
        for bucket in buckets.values():
            for p in pieces(bucket, m, saved):
                sources.setdefault(p.name, []).append((p.start, p.stop, owner, p.at))
    found: list[Run] = []
    for name, bucket in state.buckets.items():
        for p in pieces(bucket, m, grid):
            for start, stop, owner, at in sources[p.name]:
                low, high = max(p.start, start), min(p.stop, stop)
                if low < high:
                    found.append(Run(owner, name, at + low - start, p.at + low - p.start, high - low))
    merged: list[Run] = []
    for run in sorted(found, key=lambda run: run.owner):
        last = merged[-1] if merged else None
        if last and last[:2] == run[:2] and (last.source + last.count, last.target + last.count) == (run.source, run.target):
            merged[-1] = last._replace(count=last.count + run.count)
        else:
            merged.append(run)
    return merged


def load(path: Path, state: State, grid: Grid, m: Model):
    """Fills the state's masters, moments and bias from a checkpoint, whatever grid wrote it. Reads only the pieces that hold
    something of this rank's, and compares each with its checksum; takes no memory but the state's and a piece. Raises Damaged;
    the state is then of no use until another load."""
    manifest = read_manifest(path)
    for name, file, start, target in wanted(path, manifest, state, grid, m):
        file.read(name, start, target)


def wanted(path: Path, manifest: dict, state: State, grid: Grid, m: Model) -> Iterator[tuple[str, RankFile, int, Tensor]]:
    """(tensor, file, its first value, where it goes), file by file."""
    here, files = None, []
    for run in [Run(0, "", 0, 0, 0), *runs(manifest, state, grid, m)]:
        if run.owner != here:
            for file in files:
                file.close()
            here, files = run.owner, open_owner(path, manifest, run.owner)
        if not run.bucket:  # the router's bias is in the first file
            yield "bias_LX", holder("bias_LX", files), 0, state.bias_LX.view(-1)
            continue
        for kind, target in {"master": state.master[run.bucket], **state.moments[run.bucket]}.items():
            name = f"{run.bucket}/{kind}"
            yield name, holder(name, files), run.source, target.view(-1)[run.target : run.target + run.count]
    for file in files:
        file.close()


def open_owner(path: Path, manifest: dict, owner: int) -> list[RankFile]:
    """The files of what a saved rank and its like in the other replicas held."""
    return [RankFile(path / name, entry) for name, entry in manifest["files"].items() if entry["owner"] == owner]


def holder(name: str, files: list[RankFile]) -> RankFile:
    return next((file for file in files if name in file.values), files[0])


def agreed(action: Callable, grid: Grid, device: torch.device) -> tuple[object, str]:
    """action() of this rank; and if it raised Damaged on any rank, on all what the first one said, else ""."""
    result, failure = None, ""
    try:
        result = action()
    except Damaged as error:
        failure = str(error)
    said = share_texts(failure, grid, device)
    return result, next((f"rank {rank}: {text}" if rank else text for rank, text in enumerate(said) if text), "")


# ------------------------------------------------------------------------------------------------------------------
# How often
# ------------------------------------------------------------------------------------------------------------------


def save_interval(write_s: float, step_s: float, mtbf_s: float) -> dict[str, float]:
    """The interval between saves that loses least work, in seconds: sqrt(2 x cost x MTBF) (Young 1974, Daly 2006), where the cost of
    a save is what it stalls: chunks are released in the optimizer's order, so a write hides behind a whole step. write_s: of a
    checkpoint; mtbf_s: mean time between failures of the job."""
    stall = max(0.0, write_s - step_s)
    interval = max(math.sqrt(2 * stall * mtbf_s), step_s, write_s)
    return {"write_s": write_s, "stall_s": stall, "mtbf_s": mtbf_s, "interval_s": interval,
            "lost": stall / interval + (interval / 2 + write_s) / mtbf_s}


# ------------------------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------------------------


def found_at(place: str) -> list[Path]:
    """The complete checkpoints of a run's directory or of its ckpt/, or the checkpoint itself. Raises ConfigError where there is
    none."""
    path = Path(place)
    itself = path.is_dir() and (NAME.search(path.name) or (path / "manifest.json").exists())
    found = [path] if itself else complete(path) or complete(path / "ckpt")
    if not found:
        raise ConfigError(f"{place}: no checkpoint; give the directory of a run, such as out/debug, or of a checkpoint, such as "
                          "out/debug/ckpt/step-00000100")
    return found


def describe(path: Path) -> str:
    """One line of `list`."""
    if not (path / ".complete").exists():
        return f"{path}  incomplete"
    try:
        manifest = read_manifest(path)
    except ConfigError as error:
        return f"{path}  {error}"
    R, N, E = manifest["grid"]
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((path / ".complete").stat().st_mtime))
    nbytes = sum(entry["bytes"] for entry in manifest["files"].values())
    return f"{path}  {saved}  {nbytes / 1e9:.3f} GB in {len(manifest['files'])} files  {R} replicas x {N} nodes x {E} ranks"


def show(places: list[str]) -> int:
    for place in places:
        path = Path(place, "ckpt") if Path(place, "ckpt").is_dir() else Path(place)
        kinds = ("step-*", "damaged-*", "abandoned-*", ".tmp-*")
        there = [p for kind in kinds for p in sorted(path.glob(kind))] or found_at(place)
        print("\n".join(describe(p) for p in there))
    return 0


def verify(places: list[str]) -> int:
    """1 if anything is damaged, else 0."""
    bad = 0
    for path in (path for place in places for path in found_at(place)):
        began, damage = time.perf_counter(), []
        try:
            manifest = read_manifest(path)
            bar = Bar(str(path), sum(entry["bytes"] for entry in manifest["files"].values()))
            for name, entry in manifest["files"].items():
                _, error = attempt(lambda: RankFile(path / name, entry).verify(bar.add))
                damage += [error] if error else []
            bar.end()
            read = f"{bar.total / 1e9:.3f} GB in {time.perf_counter() - began:.1f} s"
        except ConfigError as error:
            damage.append(str(error))
        print(f"{path}: " + ("; ".join(damage) if damage else f"all values as written, {read}"))
        bad += bool(damage)
    return int(bad > 0)


def attempt(action: Callable) -> tuple[object, str]:
    """(result, "") or (None, what is damaged)."""
    try:
        return action(), ""
    except Damaged as error:
        return None, str(error)


class Bar:
    """Progress on a terminal; elsewhere silent."""

    def __init__(self, what: str, total: int):
        self.what, self.total, self.done, self.shown = what, total, 0, 0.0

    def add(self, nbytes: int):
        self.done += nbytes
        if sys.stderr.isatty() and time.monotonic() - self.shown > 0.2:
            self.shown = time.monotonic()
            done = f"{self.done / max(self.total, 1):4.0%} of {self.total / 1e9:.3f} GB"
            print(f"\r{self.what}: {done}", end="", file=sys.stderr, flush=True)

    def end(self):
        if self.shown:
            print("\r" + " " * (len(self.what) + 30) + "\r", end="", file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="checkpoint.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, action, text in (("list", show, "checkpoints that are there"), ("verify", verify, "read back and compare")):
        command = commands.add_parser(name, help=text)
        command.add_argument("places", nargs="+", metavar="DIR", help="a run's directory, or a checkpoint's")
        command.set_defaults(action=action)
    try:
        if argv[:1] in (["export"], ["import"]):
            import export  # which imports this file

            return export.main(argv)
        args = parser.parse_args(argv)
        return args.action(args.places)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
