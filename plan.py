"""The dry run: a step of the trainer's own schedule on any machine, without the machine. One process, no values.

    python plan.py --nodes 96 --size 1t                                   does it fit, how fast, what limits it
    python plan.py --nodes 96 --size 1t --seq_len=32768 --rows_per_rank=2  any setting of train.py
    python plan.py --nodes 96 --size 1t --sweep seq_len=32768,65536 --sweep dense_gather=step,layer
    python plan.py --ladder                                               predictions beside published figures
    python plan.py --machine this-machine --nodes 1 --size debug          rates measured here by a short probe
    options: --ranks-per-node n  --rank r  --json  --trace FILE  --calibrated  (--help: all)

Three stages, each a section below:

    record    train.schedule and optim.update run as one rank on `meta` tensors. A collective, a copy or an operation does nothing
              but leave an event, in program order, with its bytes and FLOPs. Nothing about the model is derived again here.
    replay    the events pass through the machine's resources: the compute stream, a queue per process group, the links (shared
              by what is on them at the same time), copies in each direction, the SMs that transfers hold, the launching CPU.
    report    a page, JSON, a trace for Perfetto, a table of a sweep, the ladder.

What it leaves out: jitter between ranks, contention in the fabric beyond the node's own links, the allocator's fragmentation,
and what kernels and communication libraries allocate for themselves (a lump of the machine table stands for it).
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Callable, NamedTuple

import torch
from torch import Tensor

import launch
import model
import offload
import optim
import parallel
import train
from model import ConfigError, Model, Segments
from offload import GIB, Tracker

META = torch.device("meta")

# ------------------------------------------------------------------------------------------------------------------
# Machines
# ------------------------------------------------------------------------------------------------------------------


class Fact(NamedTuple):
    """A constant and where it comes from. calibrated: read off the published ladder, so no evidence for its rows."""

    value: float
    source: str
    calibrated: bool = False


HOPPER = {
    "peak_bf16": Fact(989e12, "FLOP/s, dense; NVIDIA's H100 data sheet"),
    "peak_fp32": Fact(67e12, "FLOP/s, no TF32; NVIDIA's H100 data sheet"),
    "processors": Fact(132, "SMs of a GPU; DESIGN section 2"),
    "dense_efficiency": Fact(0.72, "share of peak of cuBLAS bf16 products with all sides >= 4096: 700-730 TFLOP/s in public tests"),
    "expert_efficiency": Fact(0.65, "of grouped products, K 2048-6144: a tenth below cuBLAS's plain ones; public Hopper kernels"),
    "attention_efficiency": Fact(0.37, "FlashAttention-2 forward, head 128: 370 of 989 TFLOP/s (FlashAttention-3 paper, figure 5)"),
    "attention_back_efficiency": Fact(0.33, "FlashAttention-2 backward on H100, about 0.9 of forward; same paper"),
    "fp32_efficiency": Fact(0.75, "cuBLAS fp32 products: 50 of 67 TFLOP/s"),
    "memory_efficiency": Fact(0.85, "share of HBM bandwidth of element-wise kernels: 2.8 of 3.35 TB/s in H100 copies"),
    "sort_passes": Fact(4, "times that a sort reads and writes its keys: radix sort, 8 bits a pass, keys and indices"),
    "kernel_s": Fact(3e-6, "seconds between two dependent kernels on one stream beyond their work; CUDA's start and drain"),
    "launch_s": Fact(6e-6, "seconds of CPU per eager operation, autograd included; PyTorch overhead benchmarks 4-8 us"),
    "default_ctas": Fact(32, "thread blocks, so SMs, of a process group without a cap; NCCL's default NCCL_MAX_CTAS"),
    "base_s": Fact(17e-6, "seconds to start a collective; NCCL's tuning table, ring, simple protocol"),
    "node_hop_s": Fact(3.4e-6, "seconds per step over NVLink; NCCL's tuning table, ring, simple protocol"),
    "net_hop_s": Fact(14e-6, "seconds per step over the network; NCCL's tuning table, ring, simple protocol"),
    "peer_s": Fact(1e-6, "seconds per peer of an all-to-all; assumed, a message's posting cost"),
    "reserved": Fact(4 * GIB, "bytes of 96 GB that tensors cannot have: DESIGN section 5, about 92 GiB usable"),
}

MACHINES: dict[str, dict[str, Fact]] = {
    "jupiter-gh200": HOPPER | {
        "ranks_per_node": Fact(4, "DESIGN section 2"),
        "memory": Fact(96 * GIB, "bytes of HBM3, as the budget of DESIGN section 5 counts them"),
        "memory_rate": Fact(4e12, "bytes/s of HBM3; DESIGN section 2"),
        "host_memory": Fact(108 * GIB, "bytes of LPDDR5X usable per superchip; DESIGN section 2"),
        "host_reserved": Fact(8 * GIB, "bytes of a process before its arenas: torch, CUDA, NCCL's pinned buffers; assumed"),
        "host_rate": Fact(512e9 * 0.9, "bytes/s of LPDDR5X, both directions; DESIGN section 2, 90% of it"),
        "copy_rate": Fact(450e9 * 0.85, "bytes/s each way over C2C; DESIGN section 2, copies reach 375-420 GB/s"),
        "node_rate": Fact(450e9 * 0.8, "bytes/s sent per GPU: three peers at 150 GB/s (DESIGN section 2), 80% of it as in nccl-tests"),
        "net_rate": Fact(25e9 * 0.96, "bytes/s per GPU: NDR200 less protocol, 24 GB/s (DESIGN section 2, one gather of 3.74 GB)"),
    },
    "h100-ib": HOPPER | {
        "ranks_per_node": Fact(8, "DGX H100"),
        "memory": Fact(80 * GIB, "bytes; NVIDIA's H100 data sheet"),
        "memory_rate": Fact(3.35e12, "bytes/s; NVIDIA's H100 SXM data sheet"),
        "host_memory": Fact(240 * GIB, "bytes per GPU: 2 TB per DGX H100, less the system's"),
        "host_reserved": Fact(8 * GIB, "bytes of a process before its arenas; assumed"),
        "host_rate": Fact(76e9 * 0.8, "bytes/s per GPU: 2 x 8 channels DDR5-4800 for 8 GPUs"),
        "copy_rate": Fact(64e9 * 0.85, "bytes/s each way; PCIe 5 x16"),
        "node_rate": Fact(450e9 * 0.8, "bytes/s sent per GPU; NVLink 4, 80% as in nccl-tests"),
        "net_rate": Fact(50e9 * 0.96, "bytes/s per GPU; NDR400, a NIC per GPU"),
    },
    "aurora-pvc": HOPPER | {
        "ranks_per_node": Fact(12, "tiles of 6 Intel Max 1550"),
        "peak_bf16": Fact(419e12, "FLOP/s per tile; Intel's Max 1550 data sheet, half of 839"),
        "peak_fp32": Fact(26e12, "FLOP/s per tile; Intel's Max 1550 data sheet, half of 52"),
        "processors": Fact(64, "Xe cores per tile"),
        "default_ctas": Fact(8, "Xe cores that a oneCCL transfer holds; assumed"),
        "dense_efficiency": Fact(0.55, "oneMKL bf16 products; assumed from public tests at 200-230 TFLOP/s"),
        "expert_efficiency": Fact(0.45, "assumed: a fifth below the plain products"),
        "memory": Fact(64 * GIB, "bytes of HBM2e per tile"),
        "memory_rate": Fact(1.0e12, "bytes/s per tile in stream tests; 1.6e12 on the data sheet"),
        "memory_efficiency": Fact(0.95, "the rate above is measured already"),
        "host_memory": Fact(80 * GIB, "bytes per rank: 1 TB DDR5 per node for 12"),
        "host_reserved": Fact(6 * GIB, "bytes of a process before its arenas; assumed"),
        "host_rate": Fact(50e9, "bytes/s per rank: 16 channels DDR5-4400 for 12"),
        "copy_rate": Fact(27e9, "bytes/s each way per tile: PCIe 5 x16 shared by two tiles, measured publicly at 54 per card"),
        "node_rate": Fact(60e9, "bytes/s per tile over Xe Link; assumed from public all-to-all tests"),
        "net_rate": Fact(200e9 / 12 * 0.85, "bytes/s per tile: 8 Slingshot-11 NICs at 25 GB/s for 12"),
    },
}

# Properties of the published runs that no setting of the trainer has. (factor or seconds, source); all read off the ladder.
PENALTIES: dict[str, Fact] = {
    "host newton-schulz": Fact(41.7, "seconds of the optimizer step with Newton-Schulz on Grace", True),
    "static tiles": Fact(4.9, "seconds a step: 108.7 -> 103.8 with the dynamic tile scheduler", True),
    "unbalanced data": Fact(12.1, "seconds a step: 103.8 -> 91.7 with cost-balanced rows", True),
    "slow gather": Fact(0.237 / 0.155, "factor on expert gathers with default CTAs: 35.1 s in 148 gathers, later 155 ms", True),
    "slow dense gather": Fact(0.119, "seconds of a dense gather over all ranks with default CTAs", True),
    "dense gather at 16 CTAs": Fact(0.040, "seconds of a dense gather over all ranks, NCCL_MAX_CTAS=16", True),
    "allocator retries": Fact(8.0, "seconds a step: 1,022-1,038 with retries, 1,210 without: 63.5 -> 54.2, rounded down", True),
}


def rates(machine: str, measured: dict[str, Fact] | None = None) -> dict[str, float]:
    """Values of a machine's constants."""
    table = measured if machine == "this-machine" else MACHINES.get(machine)
    if table is None:
        raise ConfigError(f"--machine={machine}: unknown; use one of {', '.join([*MACHINES, 'this-machine'])}")
    return {name: fact.value for name, fact in table.items()}


# ------------------------------------------------------------------------------------------------------------------
# Costs of operations
# ------------------------------------------------------------------------------------------------------------------


def grouped_flops(a: Tensor, b: Tensor) -> int:
    """The four forms of grouped_mm; a grouped dimension is as long as its array, whatever the offsets say."""
    if a.dim() == 2 and b.dim() == 3:  # [rows, K] x [G, K, N]
        return 2 * a.shape[0] * a.shape[1] * b.shape[2]
    if a.dim() == 2:  # [M, rows] x [rows, N] -> [G, M, N]
        return 2 * a.shape[0] * a.shape[1] * b.shape[1]
    if b.dim() == 2:  # [G, M, K] x [K, columns]
        return 2 * a.shape[1] * a.shape[2] * b.shape[1]
    return 2 * math.prod(a.shape) * b.shape[2]


def attention_flops(q: Tensor, bounds: list[int], products: int) -> int:
    """Causal, segment by segment: each product takes 2 FLOPs per head, head value and visible (query, key)."""
    visible = sum(n * (n + 1) // 2 for n in (b - a for a, b in zip(bounds, bounds[1:])))
    return products * 2 * q.shape[1] * q.shape[2] * visible


FLOPS: dict[str, Callable[..., int]] = {  # of an operator's tensors, in the order of its schema
    "aten::mm": lambda a, b, *_: 2 * a.shape[0] * a.shape[1] * b.shape[1],
    "aten::bmm": lambda a, b, *_: 2 * math.prod(a.shape) * b.shape[2],
    "aten::addmm": lambda c, a, b, *_: 2 * a.shape[0] * a.shape[1] * b.shape[1],
    "aten::baddbmm": lambda c, a, b, *_: 2 * math.prod(a.shape) * b.shape[2],
    "aten::mv": lambda a, b, *_: 2 * math.prod(a.shape),
    "aten::dot": lambda a, b, *_: 2 * math.prod(a.shape),
    "aten::_grouped_mm": lambda a, b, *_: grouped_flops(a, b),
}
ATTENTION = {"torch_attn::_varlen_attn": 2, "torch_attn::_varlen_attn_backward": 5}  # products of each; their place of q below
FREE = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided", "aten::detach",
        "aten::_unsafe_view", "aten::lift_fresh", "aten::_reshape_alias"}
MOVES = {"aten::index_select", "aten::gather", "aten::embedding"}  # read as much as they write, not all of their source
FILLS = {"aten::fill_", "aten::zero_", "aten::zeros", "aten::new_zeros", "aten::zeros_like", "aten::full", "aten::arange",
         "aten::full_like", "aten::scalar_tensor"}
ROUTING = MOVES | {"aten::sort", "aten::scatter_", "aten::scatter_add_", "aten::searchsorted", "aten::embedding_dense_backward"}


class Kind(NamedTuple):
    name: str
    view: bool  # its results are views: costs nothing
    writes: bool  # its first argument is changed in place


@lru_cache(maxsize=None)
def kind_of(func) -> Kind:
    schema = func._schema
    aliases = [r.alias_info for r in schema.returns if r.alias_info is not None]
    first = schema.arguments[0].alias_info if schema.arguments else None
    view = bool(aliases) and not any(a.is_write for a in aliases) or schema.name in FREE
    return Kind(schema.name, view, bool(first is not None and first.is_write))


def touched(x: Tensor) -> int:
    """Bytes of distinct elements: what an expanded tensor repeats is read from a cache."""
    count = 1
    for size, stride in zip(x.shape, x.stride()):
        count *= size if stride else 1
    return count * x.element_size()


def bytes_moved(kind: Kind, inputs: list[Tensor], outputs: list[Tensor], sort_passes: float) -> float:
    """Bytes that an operation reads and writes in device memory."""
    written = sum(touched(x) for x in outputs)
    if kind.name in FILLS:
        return written
    if kind.name in MOVES:
        return 2 * written + sum(touched(x) for x in inputs[1:])
    if kind.name == "aten::copy_":
        return written + touched(inputs[1])
    if kind.name in ("aten::scatter_", "aten::scatter_add_"):
        return sum(touched(x) * 2 for x in inputs[1:])
    if kind.name == "aten::sort":
        return (touched(inputs[0]) + written) * sort_passes
    return sum(touched(x) for x in inputs) + written


# ------------------------------------------------------------------------------------------------------------------
# Record
# ------------------------------------------------------------------------------------------------------------------


class Op(NamedTuple):
    phase: str  # forward | head | backward | optimizer
    work: str  # class of the operation
    name: str
    flops: float
    nbytes: float
    wide: bool  # the FLOPs are fp32


class Start(NamedTuple):
    """A transfer: of a collective, or a copy (group "out" or "in", kind "copy")."""

    number: int
    kind: str
    group: str
    size: int  # ranks of the group
    purpose: str
    sent: int  # bytes that this rank sends
    held: int  # bytes of its input and output


class Wait(NamedTuple):
    number: int


class Sync(NamedTuple):
    """The CPU waits for the device."""


class Recorder(Tracker):
    """Counts live bytes by purpose as a Tracker does, and writes down what happens."""

    def __init__(self, already: dict, bounds: dict[int, list[int]], sort_passes: float = 4):
        super().__init__(already)
        self.events: list = []
        self.phase, self.work, self.copies = "forward", None, 0
        self.bounds, self.sort_passes = bounds, sort_passes  # storage of a row's bounds on the device -> the bounds

    def see(self, x: Tensor, purpose: str):
        if x.is_meta:
            super().see(x, purpose)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = kind_of(func)
        if kind.name == "aten::_fused_adamw_":
            return self.fused_adamw(args)
        out = func(*args, **(kwargs or {}))
        outputs = [x for x in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(x, Tensor)]
        for x in outputs:
            self.see(x, "transient")
        if not kind.view and any(x.is_meta for x in outputs):
            inputs = [x for part in (*args, *(kwargs or {}).values())
                      for x in (part if isinstance(part, (tuple, list)) else (part,)) if isinstance(x, Tensor)]
            self.note(kind, args, inputs, outputs)
        return out

    def note(self, kind: Kind, args, inputs: list[Tensor], outputs: list[Tensor]):
        name, flops = kind.name.removeprefix("aten::"), 0
        if kind.name in ATTENTION:
            q = next(x for x in inputs if x.dim() == 3)
            bounds = next(self.bounds[key] for x in inputs if (key := x.untyped_storage()._cdata) in self.bounds)
            flops = attention_flops(q, bounds, ATTENTION[kind.name])
        elif kind.name in FLOPS:
            flops = FLOPS[kind.name](*inputs)
        nbytes = bytes_moved(kind, inputs, outputs, self.sort_passes)
        wide = bool(inputs) and inputs[-1].dtype in (torch.float32, torch.float64)
        self.events.append(Op(self.phase, self.work or self.class_of(kind, flops, wide, outputs), name, flops, nbytes, wide))

    def class_of(self, kind: Kind, flops: int, wide: bool, outputs: list[Tensor]) -> str:
        if kind.name in ATTENTION:
            return "attention" if ATTENTION[kind.name] == 2 else "attention gradient"
        if "grouped_mm" in kind.name:
            return "expert products"
        if self.phase == "optimizer":
            return "Newton-Schulz" if flops and not wide else "optimizer passes"
        if kind.name in ROUTING:
            return "routing and permutation"
        if flops and outputs[0].dim() > 1:
            return "head products" if self.phase == "head" else "router products" if wide else "dense products"
        return "element-wise"

    def fused_adamw(self, args):
        """Has no meta kernel. Reads master, gradient and two moments, writes the first and last two, and the scaled gradient."""
        moved = sum(2 * touched(x) for group in args[:4] for x in group)
        self.events.append(Op(self.phase, "optimizer passes", "_fused_adamw_", 0, moved, True))
        return None

    def collective(self, kind: str, group, purpose: str, sent: int, x: Tensor, out: Tensor):
        self.see(out, "transient")
        return self.start(kind, group.name, group.size, purpose, sent, x.nbytes + (out.nbytes if out is not x else 0))

    def copy(self, way: str, what: str, nbytes: int) -> Callable[[], None]:
        return self.start("copy", way, 2, what, nbytes, nbytes).wait

    def start(self, kind: str, group: str, size: int, purpose: str, sent: int, held: int) -> "RecordedWork":
        self.copies += 1
        self.events.append(Start(self.copies, kind, group, size, purpose, sent, held))
        return RecordedWork(self.events, self.copies)


class RecordedWork:
    def __init__(self, events: list, number: int):
        self.events, self.number = events, number

    def wait(self):
        self.events.append(Wait(self.number))


@contextmanager
def marked(recorder: Recorder, imbalance: float):
    """While it lasts the trainer's functions tell the recorder which phase it is, transfers are recorded, and what would be read
    from the device is expected: a rank with the given share more than the mean of the pairs."""
    saved, wire = [], parallel.WIRE.record

    def wrap(module, name: str, phase: str | None, after: str | None = None, work: str | None = None):
        real = getattr(module, name)

        def wrapped(*args, **kwargs):
            recorder.phase, recorder.work = phase or recorder.phase, work
            result = real(*args, **kwargs)
            recorder.phase, recorder.work = after or recorder.phase, None
            return result

        saved.append((module, name, real))
        setattr(module, name, wrapped)

    def expected(chosen_Mk: Tensor, mine: range) -> int:
        recorder.events.append(Sync())
        return math.ceil(chosen_Mk.numel() * len(mine) / recorder.experts * imbalance)

    wrap(train, "head_loss", "head", after="backward")
    wrap(optim, "update", "optimizer")
    wrap(parallel, "quantise", None, work="fp8")
    wrap(parallel, "dequantise", None, work="fp8")
    wrap(parallel, "sum_ranks", None, work="sum of what arrived")
    saved.append((model, "count_mine", model.count_mine))
    model.count_mine, parallel.WIRE.record = expected, recorder.collective
    try:
        yield
    finally:
        parallel.WIRE.record = wire
        for module, name, real in reversed(saved):
            setattr(module, name, real)


def segments_of(T: int, lengths: str, seed: int = 0) -> list[int]:
    """Bounds of a row of documents. lengths: `median,sigma` of a log-normal distribution; or one length for all."""
    median, _, sigma = lengths.partition(",")
    try:
        median, sigma = float(median), float(sigma or 0)
    except ValueError:
        raise ConfigError(f"--segment-lengths={lengths}: expected tokens, or median,sigma of a log-normal, e.g. 600,1.1") from None
    if median < 1 or sigma < 0:
        raise ConfigError(f"--segment-lengths={lengths}: the length must be at least 1 and sigma 0")
    rng, bounds = random.Random(seed), [0]
    while bounds[-1] < T:
        bounds.append(min(T, bounds[-1] + max(1, round(median * math.exp(sigma * rng.gauss(0, 1))))))
    return bounds


class Recording(NamedTuple):
    hp: train.Hyperparameters
    m: Model
    grid: parallel.Grid
    events: list
    peak: dict[str, int]  # purpose -> bytes at the peak; "host ..." lies in arenas
    sent: Counter  # (group, purpose) -> bytes, as the trainer's own ledger has them
    muon: optim.MuonPlan
    state_bytes: int  # masters and moments of this rank: its part of a checkpoint
    bounds: list[list[int]]
    took_s: float


class Options(NamedTuple):
    """What a plan needs beyond the trainer's settings."""

    nodes: int
    ranks_per_node: int
    rank: int = 0
    device: str = "cuda"  # whose branches of the model run
    lengths: str = "600,1.1"
    routing_imbalance: float = 1.15


def resolve(argv: list[str], o: Options) -> tuple[train.Hyperparameters, Model]:
    """Settings as the trainer would have them on that machine, refused as the trainer would refuse them."""
    world = o.nodes * o.ranks_per_node
    if not 0 <= o.rank < world:
        raise ConfigError(f"--rank={o.rank}: there are {world} ranks, 0 to {world - 1}")
    where = launch.Place(o.rank, world, o.rank % o.ranks_per_node, o.ranks_per_node, torch.device(o.device), "none")
    return train.resolve(train.parse(argv), where)


def record(hp: train.Hyperparameters, m: Model, o: Options, rows: list | None = None) -> Recording:
    """A steady step of one rank. rows: bounds of each row, instead of the distribution."""
    began = time.perf_counter()
    model.META_AS = torch.device(o.device) if o.device == "cpu" else None
    world, transport = o.nodes * o.ranks_per_node, train.transport_of(hp)
    grid = parallel.make_grid(o.rank, world, o.ranks_per_node, hp.replicas, m, connect=False)
    parallel.check_transport(transport, m, grid)
    all_bounds = rows or [segments_of(m.seq_len, o.lengths, seed) for seed in range(hp.rows_per_rank)]
    batch = [row_of(bounds, m.seq_len) for bounds in all_bounds]
    recorder = Recorder({}, {row.segments.bounds_device.untyped_storage()._cdata: row.segments.bounds for row in batch})
    recorder.experts = m.experts
    model.rope_cache(m.rope_theta, m.head_dim, m.seq_len, META)
    calls, sent = parallel.WIRE.calls, parallel.WIRE.sent
    parallel.WIRE.calls, parallel.WIRE.sent = Counter(), Counter()
    try:
        with marked(recorder, o.routing_imbalance):
            state, muon, inputs = prepare(hp, m, grid, transport, recorder)
            recorder.events.clear(), parallel.WIRE.sent.clear(), parallel.WIRE.calls.clear()
            recorder.already = offload.resident(state, inputs)
            with recorder:
                train.schedule(batch, state, grid, m, transport, 1.0, keep_layers=hp.keep_layers, inputs=inputs)
                recorder.events.append(Sync())
                parallel.all_gather(torch.empty(4, dtype=torch.float64, device=META), grid.world, "scalars").wait()
                recorder.events.append(Sync())
                optim.update(state, grid, muon, hp.optimizer, hp.lr, hp.weight_decay, 1.0, 0, transport, chunk=hp.stream_chunk)
            counted = parallel.WIRE.sent
    finally:
        parallel.WIRE.calls, parallel.WIRE.sent, model.META_AS = calls, sent, None
    mine = sum(x.nbytes for x in (*state.master.values(), *(x for kinds in state.moments.values() for x in kinds.values())))
    return Recording(hp, m, grid, recorder.events, {k: v for k, v in recorder.at_peak.items() if v}, counted, muon, mine, all_bounds,
                     time.perf_counter() - began)


def row_of(bounds: list[int], T: int) -> train.DeviceRow:
    tokens = torch.empty(T, dtype=torch.int64, device=META)
    return train.DeviceRow(tokens, torch.empty_like(tokens), Segments(bounds, torch.empty(len(bounds), dtype=torch.int32, device=META)), T)


def prepare(hp, m: Model, grid, transport, recorder: Recorder):
    """State as train.train has it before its first step."""
    state = parallel.init_state(m, grid, hp.seed, META, hp.offload_state)
    optim.init_moments(state, hp.optimizer)
    copies = state.copies or offload.Copies(META)
    copies.record = recorder.copy
    inputs = offload.make_inputs(m.layers, hp.rows_per_rank, (m.seq_len, m.width), transport.compute, hp.offload_fraction, copies)
    parallel.fill_own(state, transport)
    parallel.start_refresh(state, grid, transport)()
    return state, optim.plan_muon(state, grid, m, hp.optimizer), inputs
