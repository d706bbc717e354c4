"""Checkpoints: what is written, when, and what is read back. Whole runs through faults are in soak.py."""

import ctypes
import errno
import json
import math
import mmap
import os
import random
import shutil
import threading
import time
from pathlib import Path

import checkpoint
import launch
import numpy as np
import optim
import parallel
import pytest
import torch
from checkpoint import Damaged, RankFile, Saver
from model import ConfigError
from safetensors import safe_open
from soak import DAMAGES, damage
from soak import main as soak
from spawn import worker
from worker import drawn_state, tiny

ALONE = parallel.make_grid(0, 1, 1, 1, tiny(), connect=False)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Many pieces in a small model, the last of each tensor shorter."""
    monkeypatch.setattr(checkpoint, "PIECE", 1000)


def alone(optimizer="muon", offload=False):
    m = tiny()
    state = parallel.init_state(m, ALONE, 1, torch.device("cpu"), offload)
    optim.init_moments(state, optimizer)
    return m, state


def copy_of(state) -> dict[str, torch.Tensor]:
    kinds = {name: {"master": state.master[name], **state.moments[name]} for name in state.master}
    return {f"{name}/{kind}": x.flatten().clone() for name, tensors in kinds.items() for kind, x in tensors.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def change(state, plan, optimizer="muon", chunk=0):
    """An optimizer step that changes every value."""
    generator = torch.Generator().manual_seed(2)
    for name, x in state.master.items():
        grad = torch.randn(x.shape, generator=generator)
        state.grad[name] = state.slots[name].copy_(grad) if state.copies else grad
    optim.update(state, ALONE, plan, optimizer, 1e-2, 0.1, 1.0, 1, parallel.Transport(torch.float32), torch.float32, chunk)


def written(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(checkpoint.rank_file(path, 0), "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys() if name != "bias_LX"}


# ---- written while training goes on ----------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer, offload, chunk", [("muon", False, 0), ("muon", False, 3000), ("adamw", False, 3000),
                                                       ("muon", True, 3000)])
def test_values_written_are_those_of_the_saved_step(tmp_path, optimizer, offload, chunk):
    """The disk is slow, and the next update comes at once: it waits, chunk by chunk. Without its wait the files would hold some
    values from before and some from after."""
    m, state = alone(optimizer, offload)
    parallel.fill_own(state, parallel.Transport(torch.float32))
    plan = optim.plan_muon(state, ALONE, m, optimizer)
    saver = Saver(tmp_path, state, ALONE)
    saver.delay_s = 2e-4
    for step, healthy in ((1, True), (2, False)):
        before = copy_of(state)
        saver.start(step, {}, optim.phases(state, plan))
        if not healthy:
            state.before_change = lambda *_: None
        change(state, plan, optimizer, chunk)
        running = not saver.running.done()
        assert not saver.wait().error and not same(before, copy_of(state))
        assert same(before, written(checkpoint.directory(tmp_path, step))) == healthy
        assert healthy or running
        assert (saver.take_blocked_s() > 0) and saver.take_blocked_s() == 0


def test_the_optimizer_waits_for_what_it_changes_next_not_for_the_whole(tmp_path):
    m, state = alone()
    plan = optim.plan_muon(state, ALONE, m, "muon")
    saver, changing, in_time = Saver(tmp_path, state, ALONE), threading.Event(), []
    show, shown, phases = saver.window.show, [], optim.phases(state, plan)

    def held_back(x):
        shown.append(x)
        if len(shown) == saver.flush.total:  # the last piece is written once the update has begun to change the first
            in_time.append(changing.wait(30))
        return show(x)

    saver.window.show = held_back
    saver.start(1, {}, phases)
    wait, asked = state.before_change, []

    def noted(name, at, kinds):
        asked.append((name, kinds))
        changing.set() if len(asked) == len(plan.buckets) else None
        wait(name, at, kinds)

    state.before_change = noted
    change(state, plan)
    assert not saver.wait().error and in_time == [True]
    every = [(name, kinds) for names, kinds in phases for name in names]
    assert asked == every, "the update asks in the order in which the pieces are written"
    units = [unit.name for unit in checkpoint.in_order(saver.tensors, phases)]
    order = [f"{name}/{kind}" for name, kinds in every for kind in kinds if f"{name}/{kind}" in saver.tensors]
    assert list(dict.fromkeys(units)) == order and set(units) == saver.tensors.keys()


def test_small_state_and_settings_are_those_of_the_saved_step(tmp_path):
    m, state = alone()
    saver, meta = Saver(tmp_path, state, ALONE), {"skipped": [1, 2]}
    saver.delay_s = 1e-3
    saver.start(7, meta)
    meta["skipped"].append(3)
    state.bias_LX += 1
    assert not saver.wait().error
    path = checkpoint.directory(tmp_path, 7)
    assert checkpoint.read_manifest(path)["skipped"] == [1, 2]
    checkpoint.load(path, state, ALONE, m)
    assert not state.bias_LX.any()


def test_saving_takes_no_memory(tmp_path, monkeypatch):
    """960 MB are written through less than 64 MiB, page cache included."""
    monkeypatch.undo()
    master = {"a": torch.randn(30, 2_000_000), "b": torch.randn(60_000_000)}
    moments = {"a": {"momentum": torch.randn(30, 2_000_000)}, "b": {"m": torch.randn(60_000_000)}}
    state = parallel.State({}, master, moments, torch.zeros(2, 16))
    saver = Saver(tmp_path, state, ALONE)
    status = {}

    def memory() -> dict[str, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmRSS", "VmHWM"))}

    cached, sync = [], checkpoint.sync_and_drop

    def watched(fd):
        cached.append(cached_bytes(checkpoint.rank_file(tmp_path / ".tmp-step-00000001", 0)))
        sync(fd)

    monkeypatch.setattr(checkpoint, "sync_and_drop", watched)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = memory()["VmRSS"]
    saver.start(1, {})
    assert not saver.wait().error
    status = memory()
    assert status["VmHWM"] - before + max(cached) < 64 * 2**20, (status, before, max(cached))
    assert max(cached) > 0 and cached_bytes(checkpoint.rank_file(checkpoint.directory(tmp_path, 1), 0)) < 2**20


def cached_bytes(path: Path) -> int:
    """Of a file, in the page cache."""
    size = path.stat().st_size
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    fd = os.open(path, os.O_RDONLY)
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    os.close(fd)
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return int((np.frombuffer(pages, np.uint8) & 1).sum()) * mmap.PAGESIZE


# ---- the protocol ----------------------------------------------------------------------------------------------------


def test_whatever_call_fails_older_ones_stay_and_the_next_save_works(tmp_path, monkeypatch):
    """Each call that can fail for want of space fails once, the first to the last."""
    monkeypatch.setattr(checkpoint, "PIECE", 5000)
    m, state = alone()
    saver = Saver(tmp_path, state, ALONE, keep=1)
    saver.start(1, {})
    assert not saver.wait().error
    calls = {"pwrite": os.pwrite, "fsync": os.fsync, "rename": Path.rename, "open": os.open, "mkdir": Path.mkdir}
    left = [0]

    def failing(call):
        def wrapped(*args, **kwargs):
            if threading.current_thread().name == "checkpoint":
                left[0] -= 1
                if left[0] == 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
            return call(*args, **kwargs)
        return wrapped

    for name, call in calls.items():
        monkeypatch.setattr(Path if name in ("rename", "mkdir") else os, name, failing(call))
    count = after = 0
    while True:
        count += 1
        left[0], before = count, copy_of(state)
        saver.start(count + 1, {})
        outcome = saver.wait()
        if left[0] > 0:
            break
        newest = checkpoint.complete(tmp_path)[-1]
        if outcome.error:
            assert "No space left on device" in outcome.error and "untouched" in outcome.error
            assert checkpoint.step_of(newest) in (1, after) and not outcome.warning
        else:
            assert "could not be removed: rank 0: [Errno 28]" in outcome.warning, count
            after = checkpoint.step_of(newest)
            assert after == count + 1
        checkpoint.load(newest, state, ALONE, m)
        assert same(before, copy_of(state))
    assert count > 60 and not outcome.error and not outcome.warning and after
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("step-")] == [f"step-{count + 1:08d}"]
    checkpoint.remove_unfinished(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_rank_that_cannot_write_is_known_to_all_and_the_next_save_works(tmp_path):
    """Two ranks, one writes at a time; the second cannot write the second of three checkpoints."""
    worker("failing_save", 1, 2, tmp_path)
    for rank in range(2):
        first, second, third = json.loads((tmp_path / f"messages.{rank}").read_text())
        assert not first and not third
        assert "not written, rank 1: [Errno 28] No space left on device" in second and "older checkpoints are untouched" in second
    assert [p.name for p in sorted((tmp_path / "ckpt").iterdir())] == ["step-00000003"]
    (begin_0, end_0), (begin_1, end_1) = (json.loads((tmp_path / f"writing.{rank}").read_text()) for rank in range(2))
    assert begin_0 < end_0 <= begin_1 < end_1, "with one writer, the second begins when the first has ended"


def test_a_save_that_may_not_retire_takes_no_older_ones_place(tmp_path):
    saver = Saver(tmp_path, alone()[1], ALONE, keep=1)
    for step, retire in ((1, True), (2, False), (3, False)):
        saver.start(step, {}, retire=retire)
        assert not saver.wait().error
    assert [checkpoint.step_of(p) for p in checkpoint.complete(tmp_path)] == [1, 2, 3]


def test_an_old_one_goes_only_after_a_newer_one_has_been_read_back(tmp_path, monkeypatch):
    m, state = alone()
    saver = Saver(tmp_path, state, ALONE, keep=1, keep_every=4)
    foreign = [tmp_path / "step-of-mine", tmp_path / ".tmp-step-notes", tmp_path / "step-00000001.bak"]
    for path in foreign:
        path.mkdir()
    for step in (2, 4, 6):
        saver.start(step, {})
        assert not saver.wait().error
    assert [p.name for p in checkpoint.complete(tmp_path)] == ["step-00000004", "step-00000006"]
    publish = checkpoint.publish

    def then_flip(final, tmp, manifest):
        publish(final, tmp, manifest)
        file = checkpoint.rank_file(final, 0)
        content = bytearray(file.read_bytes())
        content[-9] ^= 4
        file.write_bytes(content)

    monkeypatch.setattr(checkpoint, "publish", then_flip)
    saver.start(7, {})
    assert "reads back damaged" in saver.wait().error
    assert [p.name for p in checkpoint.complete(tmp_path)] == ["step-00000004", "step-00000006"]
    assert len(list(tmp_path.glob("damaged-*-step-00000007"))) == 1
    checkpoint.remove_unfinished(tmp_path)
    assert all(path.exists() for path in foreign)


def test_what_a_start_may_begin_from(tmp_path):
    m, state = alone()
    assert checkpoint.candidates(tmp_path) == []
    for step in (3, 12):
        checkpoint.save(tmp_path, step, state, ALONE, {})
    assert [checkpoint.step_of(p) for p in checkpoint.candidates(tmp_path)] == [12, 3]
    (aside,) = checkpoint.set_aside_after(tmp_path, 3)
    assert checkpoint.candidates(tmp_path) == [checkpoint.directory(tmp_path, 3)] and aside.name.startswith("abandoned-")
    (tmp_path / "step-00000003" / ".complete").unlink()
    for rest in ("step-00000003, abandoned", "abandoned"):  # from scratch only when told
        with pytest.raises(ConfigError, match="no complete checkpoint.*--resume=never"):
            checkpoint.candidates(tmp_path)
        shutil.rmtree(tmp_path / "step-00000003", ignore_errors=True)
    checkpoint.begun_from(tmp_path, tmp_path / "elsewhere")
    assert json.loads((tmp_path / checkpoint.BEGUN).read_text()) == {"path": str(tmp_path / "elsewhere")}
    (tmp_path / checkpoint.BEGUN).write_text("")
    with pytest.raises(ConfigError, match="does not say from which checkpoint.*delete it"):
        checkpoint.candidates(tmp_path)


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_no_damage_is_loaded(tmp_path, capsys):
    """Each kind at several random places; `verify` finds it too."""
    root, m = tmp_path / "run" / "ckpt", tiny()
    for step in (1, 2):
        for rank in range(2):
            grid = parallel.make_grid(rank, 2, 2, 1, m, connect=False)
            save_alone(root, step, drawn_state(m, grid, step), grid, "last" if rank else "")
    assert checkpoint.main(["verify", str(tmp_path / "run")]) == 0 and capsys.readouterr().out.count("as written") == 2
    older, newest = checkpoint.complete(root)
    shutil.copytree(newest, tmp_path / "kept")
    state = parallel.init_state(m, ALONE, 1, torch.device("cpu"))
    optim.init_moments(state, "muon")
    for i, fault in enumerate(DAMAGES * 5):
        shutil.rmtree(newest)
        shutil.copytree(tmp_path / "kept", newest)
        checkpoint.load(newest, state, ALONE, m)
        damage(fault, newest, older, random.Random(i))
        with pytest.raises(Damaged, match=str(newest)) as error:
            checkpoint.load(newest, state, ALONE, m)
        assert fault == "a missing marker" or str(older) in str(error.value), "says what to use instead"
        assert checkpoint.main(["verify", str(newest)]) == 1 and "all values as written" not in capsys.readouterr().out
    (newest / ".complete").write_text("")
    assert checkpoint.main(["list", str(tmp_path / "run")]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "1 replicas x 1 nodes x 2 ranks" in first and "2 files" in first and "damaged" in second
    assert checkpoint.main(["verify", str(tmp_path / "nothing")]) == 2


def save_alone(root: Path, step: int, state, grid, last: str):
    """One rank's part of a checkpoint; the last of them publishes it."""
    tmp = root / f".tmp-step-{step:08d}"
    tmp.mkdir(parents=True, exist_ok=True)
    saver = Saver(root, state, ALONE)
    saver.grid = grid
    small = {} if grid.world.index else {"bias_LX": state.bias_LX.flatten()}
    entry = saver._write(tmp, checkpoint.share_of(saver.tensors, checkpoint.in_order(saver.tensors, []), grid.R, grid.r), small)
    entries = root / f"entries-{step}.json"
    known = json.loads(entries.read_text()) if entries.exists() else []
    entries.write_text(json.dumps([*known, {**entry, "owner": grid.world.index % (grid.N * grid.E)}]))
    if last:
        files = {checkpoint.rank_file(tmp, rank).name: entry for rank, entry in enumerate(json.loads(entries.read_text()))}
        checkpoint.publish(checkpoint.directory(root, step), tmp, {"step": step, "files": files,
                                                                  "grid": [grid.R, grid.N, grid.E]})
        entries.unlink()


GRIDS = [(1, 1, 1), (1, 1, 4), (1, 4, 1), (1, 2, 2), (2, 2, 2), (1, 3, 1)]  # replicas, nodes, ranks per node


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Written by real ranks at 2x2, and by 2 replicas of 2x1 that share the write."""
    out = tmp_path_factory.mktemp("saved")
    worker("save_drawn", 2, 2, out)
    return {grid: out / grid for grid in ("1-2-2", "2-2-1")}


@pytest.mark.parametrize("writer", ["1-2-2", "2-2-1"])
@pytest.mark.parametrize("R, N, E", GRIDS)
def test_every_tensor_is_the_same_on_another_grid(saved, writer, R, N, E):
    m = tiny()
    (path,) = checkpoint.complete(saved[writer])
    for rank in range(R * N * E):
        grid = parallel.make_grid(rank, R * N * E, E, R, m, connect=False)
        want, got = drawn_state(m, grid, 5), drawn_state(m, grid, 6)
        checkpoint.load(path, got, grid, m)
        padding = {name: padding_of(b, m, grid) for name, b in got.buckets.items()}
        for name, x in copy_of(got).items():
            mask = padding[name.rpartition("/")[0]]
            assert torch.equal(x[mask], copy_of(want)[name][mask]), (rank, name)
        assert torch.equal(got.bias_LX, want.bias_LX)
    if writer == "2-2-1":
        files = [RankFile(path / name, entry).values for name, entry in checkpoint.read_manifest(path)["files"].items()]
        for one, other in ((files[0], files[2]), (files[1], files[3])):  # about half of it by each replica, nothing twice
            assert not one.keys() & other.keys() and 0.8 < sum(one.values()) / sum(other.values()) < 1.25


def padding_of(bucket, m, grid) -> torch.Tensor:
    real = torch.zeros(math.prod(bucket.owned), dtype=torch.bool)
    for p in parallel.pieces(bucket, m, grid):
        real[p.at : p.at + p.stop - p.start] = True
    return real


def test_a_rank_reads_only_what_it_will_own(saved, monkeypatch):
    """Of a checkpoint by 2x2, rank 1 of 1x4 reads its quarter, and the rest of the pieces at the edges."""
    m, got = tiny(), []
    (path,) = checkpoint.complete(saved["1-2-2"])
    grid = parallel.make_grid(1, 4, 4, 1, m, connect=False)
    state, get = drawn_state(m, grid, 6), RankFile._get
    monkeypatch.setattr(RankFile, "_get", lambda self, at, data: got.append(len(data)) or get(self, at, data))
    checkpoint.load(path, state, grid, m)
    own = sum(x.nbytes for x in copy_of(state).values())
    headers = sum(int.from_bytes(file.read_bytes()[:8], "little") for file in path.glob("*.safetensors"))
    assert max(got) <= max(4 * checkpoint.PIECE, headers) and sum(got) < 1.3 * own + headers + 100_000


# ---- when to save ----------------------------------------------------------------------------------------------------


def test_the_interval_that_loses_least():
    """Against a search: lost = stall per interval, and on a failure half an interval and the write that was under way."""
    for write_s in (300.0, 87.0, 1000.0):
        found = checkpoint.save_interval(write_s, 100.0, 36_000.0)
        stall = max(0.0, write_s - 100)
        assert found["stall_s"] == stall
        lost = {t: stall / t + (t / 2 + write_s) / 36_000 for t in np.linspace(max(100, write_s), 20_000, 20_000)}
        assert found["lost"] == pytest.approx(min(lost.values()), rel=0.02)


def test_the_end_of_the_job(monkeypatch):
    for name in ("SLURM_JOB_END_TIME", "SLURM_JOB_START_TIME", launch.STARTED_VAR):
        monkeypatch.delenv(name, raising=False)
    assert launch.end_of_job() is None
    assert launch.end_of_job(2) == pytest.approx(time.time() + 120, abs=5)
    monkeypatch.setenv(launch.STARTED_VAR, "1000")  # a launcher that started ranks before
    assert launch.end_of_job(2) == 1120
    monkeypatch.setenv("SLURM_JOB_START_TIME", "900")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1015")
    assert launch.end_of_job(2) == 1015 and launch.end_of_job(1) == 960 and launch.end_of_job() == 1015


def test_ten_faults(capfd):
    assert soak(["--faults", "10", "--seed", "16976"]) == 0, capfd.readouterr().out
