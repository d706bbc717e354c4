"""Memory: what lives on the host, how it gets to the device and back, and who counts it.

    arenas     host memory that is taken once at start-up, a slab per purpose, pinned for CUDA
    copies     between device and arenas, beside the computation: on streams of their own, on a CPU in threads
    inputs     the layers' inputs, kept from the forward to the backward pass, some of them in an arena
    stream     optimizer state from its arenas through the device, chunk by chunk: one comes, one is worked on, one goes
    window     parts of any tensor as bytes on the host, for who writes them to a file beside the computation
    tracking   bytes of live tensors by purpose, on any device
    report     host memory by NUMA node beside the planned use, and the refusal where it cannot fit

Streams and events occur in this file only. On a CPU the same code makes real copies into real arenas.
"""

import json
import math
import resource
import socket
import time
import weakref
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hosts import control_group_limit, host_memory, numa_nodes  # noqa: F401
from model import ConfigError
from timeline import COPY, span

GIB = 2**30

# ------------------------------------------------------------------------------------------------------------------
# Arenas
# ------------------------------------------------------------------------------------------------------------------


class Arena:
    """One slab of host memory. `take` hands out consecutive parts, which are never given back.

    Its pages are written by the CPU before anything else touches them: a page of a GH200 that a GPU copy touches first may
    lie in the GPU's memory. It is pinned by registering it, since the caching allocator of pinned memory rounds sizes up to
    powers of two. Touching it is also the proof that the memory is there: free memory at start is none, as much of what looks
    taken is released under pressure."""

    ALIGN = 512  # bytes

    def __init__(self, purpose: str, nbytes: int, device: torch.device):
        self.purpose, self.used = purpose, 0
        try:
            self.slab = torch.empty(nbytes, dtype=torch.uint8, device=device if device.type == "meta" else "cpu")
            self.slab.fill_(0)
        except RuntimeError as error:
            lower = "lower --offload_fraction" if purpose == "inputs" else "use --offload_state=False"
            raise ConfigError(f"host {socket.gethostname()}: {nbytes / GIB:.1f} GiB of host memory for {purpose} could not be "
                              f"had ({error}); {lower}, or use more nodes") from error
        if device.type == "cuda" and nbytes:
            failed = torch.cuda.cudart().cudaHostRegister(self.slab.data_ptr(), nbytes, 0)
            if int(failed):
                raise ConfigError(f"host {socket.gethostname()}: pinning {nbytes / GIB:.1f} GiB for {purpose} failed ({failed}); "
                                  "raise the limit of locked memory (ulimit -l)")
            # with its memory, which the parts hold: a later slab at the same address could not be registered
            storage = self.slab.untyped_storage()
            weakref.finalize(storage, torch.cuda.cudart().cudaHostUnregister, storage.data_ptr()).atexit = False

    @classmethod
    def bytes_of(cls, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return -(-math.prod(shape) * dtype.itemsize // cls.ALIGN) * cls.ALIGN

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        start, size = self.used, self.bytes_of(shape, dtype)
        assert start + size <= self.slab.numel(), f"arena {self.purpose}: {self.slab.numel()} bytes do not hold {start} + {size}"
        self.used += size
        return self.slab[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def homes(purpose: str, shapes: dict[str, tuple[int, ...]], device: torch.device, offload: bool) -> dict[str, Tensor]:
    """fp32 zeros of the given shapes: on the device, or in an arena of their own."""
    if not offload:
        return {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
    arena = Arena(purpose, sum(Arena.bytes_of(shape, torch.float32) for shape in shapes.values()), device)
    return {name: arena.take(shape, torch.float32) for name, shape in shapes.items()}


# ------------------------------------------------------------------------------------------------------------------
# Copies
# ------------------------------------------------------------------------------------------------------------------


class Copy:
    """A copy in flight. It keeps source and target alive until `wait`, which returns the target."""

    def __init__(self, copies: "Copies", what: str, source: Tensor, target: Tensor, done):
        self._copies, self._what, self._keep, self._done = copies, what, (source, target), done

    def wait(self) -> Tensor:
        if self._copies.trace is not None:
            self._copies.trace.append(("wait", self._what))
        self._copies.in_flight -= 1
        with span(COPY + self._what):
            if isinstance(self._done, Future):
                self._done.result()
            elif callable(self._done):
                self._done()
            else:
                torch.accelerator.current_stream().wait_event(self._done)
        target = self._keep[1]
        self._keep = self._done = None
        return target


class Copies:
    """Starts copies beside the computation, one after the other in each direction (the link carries both at once)."""

    def __init__(self, device: torch.device):
        self.device = device
        self.trace: list | None = None  # (event, what) in program order, where a test wants it
        self.delay_s = 0.0  # of each copy on a CPU: tests make the link slow
        self.poison: np.random.Generator | None = None  # targets hold NaN until wait; copies happen late at random, even in
        # wait, and keep nothing alive: a source or target that was dropped or changed before wait shows
        self.in_flight = 0  # started and not waited for
        # dry run, on a meta device: told (way, what, bytes) of each copy, which is not made; returns what its wait calls
        self.record: Callable[[str, str, int], Callable[[], None]] | None = None
        if device.type == "cpu":
            self.lanes = {way: ThreadPoolExecutor(1, f"copies-{way}") for way in ("out", "in")}
        elif device.type != "meta":  # of a dry run
            self.lanes = {way: torch.Stream(device) for way in ("out", "in")}

    def send(self, what: str, source: Tensor, target: Tensor) -> Copy:
        """Device to host. The source must not change until `wait`."""
        return self._start("out", what, source, target)

    def fetch(self, what: str, source: Tensor) -> Copy:
        """Host to device, into memory of the compute stream's pool; the source must not change until `wait`."""
        return self._start("in", what, source, torch.empty(source.shape, dtype=source.dtype, device=self.device))

    def _start(self, way: str, what: str, source: Tensor, target: Tensor) -> Copy:
        if self.trace is not None:
            self.trace.append(("start", what))
        self.in_flight += 1
        if self.record is not None:
            return Copy(self, what, source, target, self.record(way, what, source.nbytes))
        lane, delay_s = self.lanes[way], self.delay_s
        if isinstance(lane, ThreadPoolExecutor):
            if self.poison is not None:
                return Copy(self, what, source, target, self._poisoned(lane, source, target))

            def copy():
                time.sleep(delay_s)
                target.copy_(source)

            return Copy(self, what, source, target, lane.submit(copy))
        lane.wait_stream(torch.accelerator.current_stream())
        with lane:
            target.copy_(source, non_blocking=True)
            return Copy(self, what, source, target, lane.record_event())

    def _poisoned(self, lane: ThreadPoolExecutor, source: Tensor, target: Tensor):
        target.fill_(255 if target.dtype == torch.uint8 else float("nan"))
        source, target, delay_s = weakref.ref(source), weakref.ref(target), self.poison.random() * 2e-3

        def copy():
            time.sleep(delay_s)
            here, there = source(), target()
            if here is None or there is None:
                raise RuntimeError("a buffer of a copy in flight was dropped before wait()")
            there.copy_(here)

        return copy if self.poison.random() < 0.5 else lane.submit(copy)

    def finish(self):
        """Before the host reads an arena: `wait` makes the device's stream wait only. Raises RuntimeError if a copy was never
        waited for."""
        if self.in_flight:
            raise RuntimeError(f"{self.in_flight} copies between host and device were never waited for")
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


# ------------------------------------------------------------------------------------------------------------------
# Inputs of the layers
# ------------------------------------------------------------------------------------------------------------------


def offloaded_layers(layers: int, fraction: float) -> int:
    """How many layers have their inputs offloaded: the first ones, which are needed last. The last layer's input is needed
    at once."""
    return min(round(layers * fraction), layers - 1)


class Inputs:
    """The layers' inputs, one tensor [T, D] per row, from the forward pass to the backward pass.

    Offloaded ones leave while the next layer computes and come back while the one above is recomputed."""

    def __init__(self, arena: Arena | None, slots: list[list[Tensor]], copies: Copies | None):
        self.arena, self.slots, self.copies = arena, slots, copies
        self.kept: list[list] = []  # layer -> for each row the tensor, or its copy on the way back
        self.leaving: list[Copy] = []

    def save(self, x: list[Tensor]):
        """Of the next layer."""
        self.wait_for_leaving()
        i = len(self.kept)
        if i < len(self.slots):
            self.leaving = [self.copies.send("inputs out", x_TD, slot) for x_TD, slot in zip(x, self.slots[i])]
        self.kept.append(x if not self.leaving else None)

    def wait_for_leaving(self):
        """For the inputs of the layer before: their device memory is free from here on."""
        for copy in self.leaving:
            copy.wait()
        self.leaving = []

    def fetch_ahead(self, i: int):
        """Starts bringing layer i's inputs back, if they are away."""
        self.wait_for_leaving()
        if 0 <= i < len(self.slots):
            self.kept[i] = [self.copies.fetch("inputs in", slot) for slot in self.slots[i]]

    def take(self) -> list[Tensor]:
        """Of the last layer that is left. It must have been fetched."""
        x = self.kept.pop()
        return [label("inputs", part.wait()) if isinstance(part, Copy) else part for part in x]


def make_inputs(layers: int, rows: int, shape: tuple[int, int], dtype: torch.dtype, fraction: float,
                copies: Copies | None) -> Inputs:
    """With an arena for the offloaded ones; shape [T, D] of a row."""
    count = offloaded_layers(layers, fraction) if fraction else 0
    if not count:
        return Inputs(None, [], None)
    arena = Arena("inputs", count * rows * Arena.bytes_of(shape, dtype), copies.device)
    return Inputs(arena, [[arena.take(shape, dtype) for _ in range(rows)] for _ in range(count)], copies)


# ------------------------------------------------------------------------------------------------------------------
# Optimizer state through the device
# ------------------------------------------------------------------------------------------------------------------


def stream(chunks: Iterable[tuple[object, dict[str, Tensor]]], copies: Copies | None,
           read_only: tuple[str, ...] = ("grad",)) -> Iterator[tuple[object, dict[str, Tensor]]]:
    """(key, tensors on the host) -> (key, tensors on the device), which the caller changes in place. While one chunk is worked
    on, the next is on its way in and the one before on its way back; of `read_only` nothing goes back. Without copies the state
    is on the device already, and chunks are yielded as they are."""
    if copies is None:
        yield from chunks
        return
    chunks, leaving = iter(chunks), []

    def fetch():
        key, home = next(chunks, (None, None))
        return key, home, home and {name: copies.fetch("state in", x) for name, x in home.items()}

    ahead = fetch()
    while ahead[1] is not None:
        key, home, coming = ahead
        here = {name: label("streamed state", copy.wait()) for name, copy in coming.items()}
        ahead = fetch()
        yield key, here
        for copy in leaving:
            copy.wait()
        leaving = [copies.send("state out", here[name], home[name]) for name in here if name not in read_only]
        del here, coming
    for copy in leaving:
        copy.wait()


class Window:
    """Shows parts of tensors to the host as bytes, one part at a time: where they lie on the host, they themselves; of an
    accelerator's, a copy in a small pinned buffer, made on a stream of its own."""

    def __init__(self, device: torch.device, nbytes: int):
        """nbytes: of the largest part."""
        if device.type != "cpu":
            self.buffer, self.stream = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), torch.Stream(device)

    def follow(self, device: torch.device):
        """What is shown from now on holds what has been launched up to now. Call it where the computation is launched."""
        if device.type != "cpu":
            self.stream.wait_stream(torch.accelerator.current_stream(device))

    def show(self, x: Tensor) -> np.ndarray:
        """uint8 [x.nbytes], of a contiguous x; on return nothing reads x any more but through this, until the next call."""
        flat = x.detach().view(-1).view(torch.uint8)
        if x.device.type == "cpu":
            return flat.numpy()
        host = self.buffer[: len(flat)]
        with self.stream:
            host.copy_(flat, non_blocking=True)
            self.stream.synchronize()
        return host.numpy()


# ------------------------------------------------------------------------------------------------------------------
# Tracking
# ------------------------------------------------------------------------------------------------------------------


class Tracker(TorchDispatchMode):
    """While it is on, counts the bytes of live tensors by purpose and keeps the peak: on `meta`, CPU and CUDA alike, so that a
    plan, a test and a run can be compared. What an operation takes and gives back inside itself is not seen. The peak is the
    device's: purposes that begin with "host" lie in arenas.

    Every new storage is "transient" until `label` names its purpose. It takes 10 to 30 microseconds per operation."""

    active: "Tracker | None" = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled inside: spares a second for the import of the compiler, and time per operation

    def __init__(self, already: dict[str, Iterable[Tensor]]):
        super().__init__()
        self.known: dict[int, tuple[str, int]] = {}  # storage -> purpose, bytes
        self.finalizers: list[weakref.finalize] = []
        self.fixed: set[int] = set()  # storages that keep the purpose which they came with
        self.live, self.total, self.peak, self.at_peak = Counter(), 0, 0, Counter()
        self.already = already

    def __enter__(self):
        Tracker.active = self
        for purpose, tensors in self.already.items():
            for x in tensors:
                self.see(x, purpose)
        self.fixed = set(self.known)
        return super().__enter__()

    def __exit__(self, *args):
        Tracker.active = None
        for finalizer in self.finalizers:  # what lives on must not hold this
            finalizer.detach()
        return super().__exit__(*args)

    def see(self, x: Tensor, purpose: str):
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        self.known[key] = purpose, storage.nbytes()
        self.finalizers.append(weakref.finalize(storage, self.forget, key))
        self.add(purpose, storage.nbytes())

    def add(self, purpose: str, nbytes: int):
        self.live[purpose] += nbytes
        self.total += nbytes if not purpose.startswith("host ") else 0
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, self.live.copy()

    def forget(self, key: int):
        purpose, nbytes = self.known.pop(key)
        self.fixed.discard(key)  # the address may be taken again
        self.add(purpose, -nbytes)

    def relabel(self, x: Tensor, purpose: str):
        """But for what was there before: gathered weights may be the masters themselves."""
        key = x.untyped_storage()._cdata
        if key in self.known and key not in self.fixed and self.known[key][0] != purpose:
            old, nbytes = self.known[key]
            self.known[key] = purpose, nbytes
            self.live[old] -= nbytes
            self.live[purpose] += nbytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.see(x, "transient")
        return out


def label(purpose: str, value):
    """Says what the memory of a tensor, or of all in a list or dict, is for; returns it. Costs nothing while nobody counts."""
    if Tracker.active is not None:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        for x in parts:
            Tracker.active.relabel(x, purpose)
    return value


def resident(state, inputs: Inputs) -> dict[str, list[Tensor]]:
    """What is there between steps, by purpose; "host ..." lies in arenas. state: parallel.State."""
    where = "host " if state.copies else ""
    moments = [x for kinds in state.moments.values() for x in kinds.values()]
    return {f"{where}masters": list(state.master.values()), f"{where}moments": moments,
            f"{where}gradients": list(state.slots.values()), "own weights": list(state.own.values()),
            "node weights": list(state.node.values()), "host inputs": [x for row in inputs.slots for x in row]}


# ------------------------------------------------------------------------------------------------------------------
# Host memory: what is there, what is planned, and whether it can be
# ------------------------------------------------------------------------------------------------------------------


def describe(planned: dict[str, int]) -> str:
    return ", ".join(f"{purpose} {nbytes / GIB:.2f}" for purpose, nbytes in planned.items() if nbytes)


def host_report(planned: dict[str, int]) -> dict:
    """One rank's record: where it runs, what is there, and what it is going to take. planned: purpose -> bytes."""
    total, nodes = host_memory()
    return {"host": socket.gethostname(), "has": total, "numa": nodes, "planned": planned}


def check_hosts(reports: list[dict], fixes: str):
    """Raises ConfigError where the ranks of a host plan to take more than it has. Free memory is no verdict, total memory is."""
    for host in dict.fromkeys(r["host"] for r in reports):
        ranks = [r for r in reports if r["host"] == host]
        planned = Counter()
        for r in ranks:
            planned.update(r["planned"])
        if sum(planned.values()) > ranks[0]["has"]:
            raise ConfigError(f"host {host} has {ranks[0]['has'] / GIB:.1f} GiB of memory, its {len(ranks)} ranks would take "
                              f"{sum(planned.values()) / GIB:.1f} ({describe(planned)}); {fixes}")


def record_hosts(path: Path, reports: list[dict], run: str) -> list[str]:
    """Appends one line per host to a record that all jobs share; returns them in words."""
    lines, words = [], []
    for host in dict.fromkeys(r["host"] for r in reports):
        ranks = [r for r in reports if r["host"] == host]
        planned = sum((Counter(r["planned"]) for r in ranks), Counter())
        lines.append(json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "run": run, "ranks": len(ranks), **ranks[0],
                                 "planned": planned}) + "\n")
        cpu_nodes = [n for n in ranks[0]["numa"] if n["cpus"]]
        free, lost = (sum(n[kind] for n in cpu_nodes) / GIB for kind in ("free", "unattributed"))
        words.append(f"host {host}: {ranks[0]['has'] / GIB:.1f} GiB on {len(cpu_nodes)} NUMA nodes, {free:.1f} free, {lost:.1f} "
                     f"unattributed; {len(ranks)} ranks plan {sum(planned.values()) / GIB:.2f} ({describe(planned)})")
    with open(path, "a") as f:
        f.writelines(lines)
    return words


def peak_memory(device: torch.device) -> dict:
    """Peaks of this process so far: resident host memory and, on an accelerator, allocated memory; allocator retries."""
    peak = {"peak_host_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "peak_device_gb": None,
            "alloc_retries": None}
    if device.type != "cpu":
        stats = torch.accelerator.memory_stats(device)
        peak |= {"peak_device_gb": stats["allocated_bytes.all.peak"] / 2**30, "alloc_retries": stats["num_alloc_retries"]}
    return peak
