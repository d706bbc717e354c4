"""The dry run: a step of the trainer's own schedule on any machine, without the machine. One process, no values.

    python plan.py --nodes 96 --size 1t                                   does it fit, how fast, what limits it
    python plan.py --nodes 96 --size 1t --seq_len=32768 --rows_per_rank=2  any setting of train.py
    python plan.py --nodes 96 --size 1t --sweep seq_len=32768,65536 --sweep dense_gather=step,layer
    python plan.py --ladder                                               predictions beside published figures
    python plan.py --machine this-machine --nodes 1 --size debug          rates measured here by a short probe
    python plan.py --machine out/gpu-check.json --nodes 2 --size 15b      rates that gpu_check.py measured on a GPU
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
import contextlib
import dataclasses
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Callable, NamedTuple

import torch
from torch import Tensor

import checkpoint
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
    "processors": Fact(132, "SMs of a GPU; NVIDIA, H100 data sheet (SXM)"),
    "dense_efficiency": Fact(0.72, "share of peak of bf16 products: 716 of 989 TFLOP/s, torch on H100, 4,096 x 7,168 x 2,112 (vLLM pull request "
                                   "23280); 720 for 10,240 cubed (torch-performance-test-data, issue 79)"),
    "expert_efficiency": Fact(0.71, "of grouped products: 705 of 989 TFLOP/s, torch on H200, 16 groups, K = N = 7,168 (PyTorch pull request 156203)"),
    "attention_efficiency": Fact(0.37, "FlashAttention-2 forward, head 128: 370 of 989 TFLOP/s (FlashAttention-3 paper, figure 5)"),
    "attention_back_efficiency": Fact(0.33, "FlashAttention-2 backward on H100, about 0.9 of forward; same paper"),
    "fp32_efficiency": Fact(0.77, "51.8 of 67 TFLOP/s, torch on H100, 8,192 cubed (torch-performance-test-data, issue 79)"),
    "memory_efficiency": Fact(0.83, "share of HBM bandwidth of element-wise kernels: triad of 3.31 of 4 TB/s on GH200 (BabelStream, issue 194)"),
    "sort_passes": Fact(4, "times that a sort reads and writes its keys: radix sort, 8 bits a pass, keys and indices"),
    "kernel_s": Fact(3e-6, "seconds of a kernel beyond its work, start and drain; assumed"),
    "launch_s": Fact(6e-6, "seconds of CPU per eager operation, autograd included; assumed, 4-8 us is usual"),
    "default_ctas": Fact(32, "thread blocks, so SMs, of a process group without a cap; NCCL's default NCCL_MAX_CTAS"),
    "base_s": Fact(17e-6, "seconds to start a collective; NCCL's tuning table, ring, simple protocol"),
    "node_hop_s": Fact(3.4e-6, "seconds per step over NVLink; NCCL's tuning table, ring, simple protocol"),
    "net_hop_s": Fact(14e-6, "seconds per step over the network; NCCL's tuning table, ring, simple protocol"),
    "peer_s": Fact(1e-6, "seconds per peer of an all-to-all; assumed, a message's posting cost"),
    "reserved": Fact(4 * GIB, "bytes of 96 GB that tensors cannot have: about 92 GiB usable, as in the published run"),
}

MACHINES: dict[str, dict[str, Fact]] = {
    "jupiter-gh200": HOPPER | {
        "ranks_per_node": Fact(4, "published description of a JUPITER Booster node"),
        "memory": Fact(96 * GIB, "bytes of HBM3, as the published run counts them"),
        "memory_rate": Fact(4e12, "bytes/s of HBM3; published description of a JUPITER Booster node"),
        "host_memory": Fact(108 * GIB, "bytes of LPDDR5X usable per superchip; published description of a JUPITER Booster node"),
        "host_reserved": Fact(8 * GIB, "bytes of a process before its arenas: torch, CUDA, NCCL's pinned buffers; assumed"),
        "host_rate": Fact(512e9 * 0.9, "bytes/s of LPDDR5X, both directions; published description of a JUPITER Booster node, 90% of it"),
        "copy_rate": Fact(450e9 * 0.85, "bytes/s each way over C2C; published description of a JUPITER Booster node, copies reach 375-420 GB/s"),
        "node_rate": Fact(450e9 * 0.8, "bytes/s sent per GPU: three peers at 150 GB/s (published description of a JUPITER Booster node), 80% of it as in nccl-tests"),
        "net_rate": Fact(25e9 * 0.96, "bytes/s per GPU: NDR200 less protocol, 24 GB/s (published description of a JUPITER Booster node, one gather of 3.74 GB)"),
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

# Properties of the published runs that no setting of the trainer has; all read off the ladder.
PENALTIES: dict[str, Fact] = {
    "host newton-schulz": Fact(41.7, "seconds of the optimizer step with Newton-Schulz on Grace", True),
    "static tiles": Fact(4.9, "seconds a step: 108.7 -> 103.8 with the dynamic tile scheduler", True),
    "unbalanced data": Fact(12.1, "seconds a step: 103.8 -> 91.7 with cost-balanced rows", True),
    "slow dense gather": Fact(0.119, "seconds of a dense gather over all ranks with default CTAs", True),
    "dense gather at 16 CTAs": Fact(0.040, "seconds of a dense gather over all ranks, NCCL_MAX_CTAS=16", True),
    "allocator retries": Fact(8.0, "seconds a step: 1,022-1,038 with retries, 1,210 without: 63.5 -> 54.2, rounded down", True),
}


def rates(machine: str) -> dict[str, float]:
    """Values of a machine's constants; of a file that gpu_check.py has written, what it measured."""
    if machine.endswith(".json"):
        return measured_elsewhere(Path(machine))
    if (table := MACHINES.get(machine)) is None:
        raise ConfigError(f"--machine={machine}: unknown; use one of {', '.join(MACHINES)}, this-machine, or a file of gpu_check.py")
    return {name: fact.value for name, fact in table.items()}


def measured_elsewhere(path: Path) -> dict[str, float]:
    try:
        found = json.loads(path.read_text())["machine"]
        found = {name: float(value) for name, value in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--machine={path}: no file that gpu_check.py has written ({type(error).__name__}: {error}); make one with "
                          "make gpu-check") from None
    known = {name for table in MACHINES.values() for name in table}
    if missing := sorted(known - found.keys()):
        raise ConfigError(f"--machine={path}: {', '.join(missing)} missing; make it again with make gpu-check")
    return found


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


def grouped_result(a: Tensor, b: Tensor, offsets: Tensor | None) -> Tensor:
    """Of the same four forms, in any type: the meta kernel knows bf16 only."""
    if a.dim() == 2 and b.dim() == 2:
        return a.new_empty(len(offsets), a.shape[0], b.shape[1])
    return a.new_empty(*a.shape[:-1], b.shape[-1]) if a.dim() == b.dim() or a.dim() == 2 else a.new_empty(a.shape[1], b.shape[1])


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
    writes: bool  # it changes an argument
    in_place: bool  # it changes its first argument and returns it


@lru_cache(maxsize=None)
def kind_of(func) -> Kind:
    schema = func._schema
    aliases = [r.alias_info for r in schema.returns if r.alias_info is not None]
    changed = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    view = bool(aliases) and not any(a.is_write for a in aliases) or schema.name in FREE
    in_place = sum(changed) == 1 and changed[0] and len(aliases) == 1 and schema.name[-1] == "_"
    return Kind(schema.name, view, any(changed), in_place)


def form(args: tuple) -> tuple:
    """All that the result's shape can depend on, hashable."""
    return tuple((x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else
                 form(tuple(x)) if isinstance(x, (list, tuple)) else (type(x), x) for x in args)


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
    wide: bool  # the FLOPs are fp32 although the model's are not


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

    def __init__(self, already: dict, bounds: dict[int, list[int]], compute=torch.bfloat16, sort_passes: float = 4):
        super().__init__(already)
        self.compute = compute  # type of the model's products
        self.events: list = []
        self.phase, self.work, self.copies, self.forms = "forward", None, 0, {}
        self.bounds, self.sort_passes = bounds, sort_passes  # storage of a row's bounds on the device -> the bounds

    def see(self, x: Tensor, purpose: str):
        if x.is_meta:
            super().see(x, purpose)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = kind_of(func)
        if kind.name == "aten::_fused_adamw_":
            return self.fused_adamw(args)
        out = self.result(func, kind, args, kwargs or {})
        outputs = [x for x in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(x, Tensor)]
        for x in outputs:
            self.see(x, "transient")
        if not kind.view and any(x.is_meta for x in outputs):
            inputs = [x for part in (*args, *(kwargs or {}).values())
                      for x in (part if isinstance(part, (tuple, list)) else (part,)) if isinstance(x, Tensor)]
            self.note(kind, inputs, outputs)
        return out

    def result(self, func, kind: Kind, args: tuple, kwargs: dict):
        """What the operation returns. Meta kernels are slow (0.1 ms): those that change an argument in place are not run, of the
        others each form is run once and later results are made like the first."""
        if kind.in_place and args[0].is_meta:
            return args[0]
        if kind.name == "aten::_grouped_mm":
            return grouped_result(*args[:2], args[2] if len(args) > 2 else kwargs.get("offs"))
        if kind.view or kind.writes or kind.name in FREE:
            return func(*args, **kwargs)
        key = func, form(args), form(tuple(kwargs.items()))
        if key not in self.forms:
            out = func(*args, **kwargs)
            parts = out if isinstance(out, (tuple, list)) else (out,)
            plain = all(isinstance(x, Tensor) and x.is_meta and x.storage_offset() == 0 for x in parts)
            self.forms[key] = (type(out), [(x.shape, x.stride(), x.dtype) for x in parts]) if plain else None
            return out
        if (known := self.forms[key]) is None:
            return func(*args, **kwargs)
        made = [torch.empty_strided(shape, stride, dtype=dtype, device=META) for shape, stride, dtype in known[1]]
        return made[0] if known[0] is Tensor else tuple(made)

    def note(self, kind: Kind, inputs: list[Tensor], outputs: list[Tensor]):
        name, flops = kind.name.removeprefix("aten::"), 0
        if kind.name in ATTENTION:
            q = next(x for x in inputs if x.dim() == 3)
            bounds = next(self.bounds[key] for x in inputs if (key := x.untyped_storage()._cdata) in self.bounds)
            flops = attention_flops(q, bounds, ATTENTION[kind.name])
        elif kind.name in FLOPS:
            flops = FLOPS[kind.name](*inputs)
        nbytes = bytes_moved(kind, inputs, outputs, self.sort_passes)
        wide = bool(inputs) and inputs[-1].dtype in (torch.float32, torch.float64) and self.compute != torch.float32
        self.events.append(Op(self.phase, self.work or self.class_of(kind, flops, wide, outputs), name, flops, nbytes, wide))

    def class_of(self, kind: Kind, flops: int, wide: bool, outputs: list[Tensor]) -> str:
        if kind.name in ATTENTION:
            return "attention" if ATTENTION[kind.name] == 2 else "attention gradient"
        if "grouped_mm" in kind.name:
            return "expert products"
        if self.phase == "optimizer":
            return "Newton-Schulz" if flops else "optimizer passes"
        if kind.name in ("aten::bmm", "aten::baddbmm"):  # a CPU's query blocks
            return "attention gradient" if self.phase == "backward" else "attention"
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
    if not 1 <= median < math.inf or not 0 <= sigma < math.inf:
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
    hp, m = train.resolve(train.parse(argv), where)
    longest = max(stage.seq_len for stage in train.declared(hp))  # what needs most
    return dataclasses.replace(hp, seq_len=longest), dataclasses.replace(m, seq_len=longest)


def record(hp: train.Hyperparameters, m: Model, o: Options, rows: list | None = None) -> Recording:
    """A steady step of one rank. rows: bounds of each row, instead of the distribution."""
    began = time.perf_counter()
    model.META_AS = torch.device(o.device) if o.device == "cpu" else None
    world, transport = o.nodes * o.ranks_per_node, train.transport_of(hp)
    grid = parallel.make_grid(o.rank, world, o.ranks_per_node, hp.replicas, m, connect=False, backend="gloo" if model.META_AS else "")
    parallel.check_transport(transport, m, grid)
    all_bounds = rows or [segments_of(m.seq_len, o.lengths, seed) for seed in range(hp.rows_per_rank)]
    batch = [row_of(bounds, m.seq_len) for bounds in all_bounds]
    recorder = Recorder({}, {row.segments.bounds_device.untyped_storage()._cdata: row.segments.bounds for row in batch},
                        transport.compute)
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
                balance = model.Balance(m, META, 1.0, hp.aux_loss, hp.z_loss)
                train.schedule(batch, state, grid, m, transport, 1.0, keep_layers=hp.keep_layers, inputs=inputs, balance=balance)
                recorder.events.append(Sync())
                parallel.all_gather(torch.empty(10, dtype=torch.float64, device=META), grid.world, "scalars").wait()
                recorder.events.append(Sync())
                optim.update(state, grid, muon, hp.optimizer, hp.lr, hp.weight_decay, 1.0, 0, transport, chunk=hp.stream_chunk)
            counted = parallel.WIRE.sent
    finally:
        parallel.WIRE.calls, parallel.WIRE.sent, model.META_AS = calls, sent, None
    mine = sum(x.nbytes for x in (*state.master.values(), *(x for kinds in state.moments.values() for x in kinds.values())))
    peak = {k: v for k, v in recorder.at_peak.items() if v}
    return Recording(hp, m, grid, recorder.events, peak, counted, muon, mine, all_bounds, time.perf_counter() - began)


def row_of(bounds: list[int], T: int) -> train.DeviceRow:
    tokens = torch.empty(T, dtype=torch.int64, device=META)
    on_device = torch.empty(len(bounds), dtype=torch.int32, device=META)
    return train.DeviceRow(tokens, torch.empty_like(tokens), Segments(bounds, on_device), T)


def prepare(hp, m: Model, grid, transport, recorder: Recorder):
    """State as train.train has it before its first step."""
    state = parallel.init_state(m, grid, hp.seed, META, hp.offload_state)
    optim.init_moments(state, hp.optimizer)
    copies = state.copies or offload.Copies(META)
    copies.record = recorder.copy
    inputs = offload.make_inputs(m.layers, hp.rows_per_rank, (m.seq_len, m.width), transport.compute, hp.offload_fraction, copies)
    parallel.fill_own(state, transport)
    parallel.start_refresh(state, grid, transport)()
    return state, optim.plan_muon(state, grid, m, hp.optimizer, hp.newton_schulz, hp.muon_per_head), inputs


# ------------------------------------------------------------------------------------------------------------------
# Replay
# ------------------------------------------------------------------------------------------------------------------

# class of operations -> its share of the peak, where the machine has one (else that of dense products)
EFFICIENCY = {"expert products": "expert_efficiency", "attention": "attention_efficiency",
              "attention gradient": "attention_back_efficiency", "head products": "head_efficiency",
              "Newton-Schulz": "orthogonal_efficiency"}
INFINIBAND, NVLINK, C2C_IN, C2C_OUT = "InfiniBand", "NVLink", "C2C in", "C2C out"


def links_of(s: Start, grid: parallel.Grid) -> dict[str, float]:
    """Bytes of a transfer that this rank puts on each link. Groups across nodes split: of a gather, what other nodes hold comes in
    over this rank's own network card once and is passed on inside the node; of an all-to-all each part goes where it goes."""
    if s.kind == "copy":
        return {C2C_IN if s.group == "in" else C2C_OUT: s.sent}
    if s.group == "node":
        return {NVLINK: s.sent}
    if s.group in ("column", "replica"):
        return {INFINIBAND: s.sent}
    nodes, peers = s.size // grid.E, s.size - 1  # shard and world
    far = s.sent * ((nodes - 1) if s.kind == "all-gather" else (s.size - grid.E)) / peers
    return {name: count for name, count in {INFINIBAND: far, NVLINK: s.sent - far}.items() if count}


def latency(s: Start, grid: parallel.Grid, r: dict[str, float]) -> float:
    """Seconds of a transfer without bytes: a ring's steps, or the posts of an all-to-all."""
    if s.kind == "copy":
        return r.get("copy_s", r["base_s"])
    nodes = 1 if s.group == "node" else s.size if s.group in ("column", "replica") else s.size // grid.E
    if s.kind == "all-to-all":
        return r["base_s"] + (r["net_hop_s"] if nodes > 1 else r["node_hop_s"]) + r["peer_s"] * (s.size - 1)
    rounds = 2 if s.kind == "all-reduce" else 1
    return r["base_s"] + rounds * ((nodes - 1) * r["net_hop_s"] + (s.size - nodes) * r["node_hop_s"])


class Flow:
    """A transfer on its way: first its latency passes, then its bytes on each link."""

    def __init__(self, start: Start, latency_s: float, left: dict[str, float], ctas: float):
        self.start, self.latency_s, self.left, self.ctas = start, latency_s, left, ctas
        self.issued = self.begun = self.end = None


class Transfers:
    """All queues and links. A group's transfers run one after the other; those that are on a link share it evenly."""

    def __init__(self, link_rates: dict[str, float], alone: bool = False):
        """alone: one transfer at a time, whatever its group: they take the time of a core."""
        self.now, self.rates, self.alone = 0.0, link_rates, alone
        self.queues: dict[str, list[Flow]] = defaultdict(list)
        self.active: list[Flow] = []
        self.done: list[Flow] = []
        self.busy = Counter()  # link -> seconds with something on it

    def add(self, flow: Flow):
        flow.issued = self.now
        queue = self.queues["all" if self.alone else flow.start.group]
        queue.append(flow)
        if queue[0] is flow:
            flow.begun = self.now
            self.active.append(flow)

    def held(self) -> float:
        return sum(flow.ctas for flow in self.active)

    def next_change(self) -> tuple[float, dict[str, float]]:
        """(seconds until a latency or a part of a flow is over, rate of each link's flows)."""
        on = Counter(link for flow in self.active if flow.latency_s <= 0 for link in flow.left)
        shares = {link: self.rates[link] / count for link, count in on.items()}
        soonest = math.inf
        for flow in self.active:
            if flow.latency_s > 0:
                soonest = min(soonest, flow.latency_s)
            for link, count in flow.left.items() if flow.latency_s <= 0 else ():
                soonest = min(soonest, count / shares[link])
        return soonest, shares

    def advance(self, seconds: float, shares: dict[str, float]):
        """By at most what next_change said."""
        self.now += seconds
        for link in shares:
            self.busy[link] += seconds
        for flow in list(self.active):
            if flow.latency_s > 0:
                flow.latency_s = flow.latency_s - seconds if flow.latency_s - seconds > 1e-12 else 0.0
            else:
                for link in list(flow.left):
                    flow.left[link] -= seconds * shares[link]
                    if flow.left[link] < 1e-3:
                        del flow.left[link]
            if flow.latency_s <= 0 and not flow.left:
                self.finish(flow)

    def finish(self, flow: Flow):
        flow.end = self.now
        self.active.remove(flow)
        self.done.append(flow)
        queue = self.queues["all" if self.alone else flow.start.group]
        queue.pop(0)
        if queue:
            queue[0].begun = self.now
            self.active.append(queue[0])


class Timeline(NamedTuple):
    step_s: float
    compute: Counter  # (phase, class) -> seconds, the slowdown by transfers included
    slowed_s: float  # of these: because transfers held SMs
    exposed: Counter  # (group, purpose) -> seconds that the compute stream waited
    launch_s: float  # seconds that the device waited for the launching CPU
    phases: Counter  # phase -> seconds
    flows: list[Flow]
    spans: list[tuple[str, str, float, float]]  # (phase, class, start, end) of the compute stream
    busy: Counter  # link -> seconds
    link_bytes: Counter


def op_seconds(op: Op, r: dict[str, float]) -> tuple[float, bool]:
    """(seconds on an idle device, whether products bound it)."""
    peak, share = (r["peak_fp32"], r["fp32_efficiency"]) if op.wide else (r["peak_bf16"], r["dense_efficiency"])
    products = op.flops / (peak * r.get(EFFICIENCY.get(op.work, ""), share)) if op.flops else 0.0
    memory = op.nbytes / r.get(f"{op.work} rate", r["memory_rate"] * r["memory_efficiency"])
    return max(products, memory), products > memory


def merged(events: list, r: dict[str, float], attention: float):
    """Events with a phase's operations between two transfers added up by class: (phase, class) -> [bound by products, by memory,
    count], seconds. attention: factor on attention's time."""
    here: dict = {}
    for event in events:
        if isinstance(event, Op):
            if here and next(iter(here))[0] != event.phase:
                yield here
                here = {}
            seconds, products = op_seconds(event, r)
            cell = here.setdefault((event.phase, event.work), [0.0, 0.0, 0])
            cell[0 if products else 1] += seconds * (attention if event.work.startswith("attention") else 1)
            cell[2] += 1
        else:
            if here:
                yield here
                here = {}
            yield event
    if here:
        yield here


def replay(rec: Recording, r: dict[str, float], attention: float = 1.12, penalties: dict | None = None) -> Timeline:
    """The step's timeline: the compute stream runs operations in order, never before the CPU has launched them; at a wait it stands
    still until the transfer is over. penalties: (group, purpose) -> seconds that each such transfer takes at least."""
    shared = r["processors"] == 1 and r["default_ctas"] > 0  # a machine whose ranks have less than a core each
    ctas = {"column": (r["processors"] > 1 and rec.hp.column_ctas) or r["default_ctas"], "in": 0, "out": 0}
    link = {INFINIBAND: r["net_rate"], NVLINK: r["node_rate"], C2C_IN: r["copy_rate"], C2C_OUT: r["copy_rate"]}
    moving, flows, spans = Transfers(link, shared), {}, []
    compute, exposed, phases, link_bytes = Counter(), Counter(), Counter(), Counter()
    cpu = slowed = launch_wait = 0.0
    phase = "forward"

    def pass_time(seconds: float, products: float) -> float:
        """Lets the compute stream work; the share that products bound is slowed by the SMs that transfers hold. Where cores are
        shared a transfer stops all of it."""
        began = moving.now
        while seconds > 1e-12:
            change, shares = moving.next_change() if moving.active else (math.inf, {})
            held = moving.held() / r["processors"]
            speed = float(not held) if shared else 1 - products * min(0.9, held)
            step = min(seconds / speed, change) if speed else change
            moving.advance(step, shares)
            seconds -= step * speed
        return moving.now - began

    def wait_for(flow: Flow):
        while flow.end is None:
            moving.advance(*moving.next_change())

    for event in merged(rec.events, r, attention):
        began = moving.now
        if isinstance(event, dict):
            for (phase, work), (products, memory, count) in event.items():
                whole, start = products + memory + count * r["kernel_s"], moving.now
                took = pass_time(whole, products / whole if whole else 0.0)
                cpu += count * r["launch_s"]
                slowed += took - whole
                compute[phase, work] += took
                spans.append((phase, work, start, moving.now))
            if cpu > moving.now:  # the next one is not there yet
                launch_wait += cpu - moving.now
                pass_time(cpu - moving.now, 0.0)
        elif isinstance(event, Start):
            left = links_of(event, rec.grid)
            link_bytes.update(left)
            cap = 0 if event.kind == "copy" else ctas.get(event.group, r["default_ctas"])
            flow = Flow(event, *penalised(event, latency(event, rec.grid, r), left, penalties), cap)
            flows[event.number] = flow
            moving.add(flow)
            cpu += r["launch_s"]
        elif isinstance(event, Wait):
            flow = flows[event.number]
            wait_for(flow)
            if moving.now > began:
                exposed[flow.start.group, flow.start.purpose] += moving.now - began
                spans.append((phase, f"waits for {flow.start.purpose}", began, moving.now))
        else:
            cpu = max(cpu, moving.now)
        phases[phase] += moving.now - began
    while moving.active:
        moving.advance(*moving.next_change())
    return Timeline(moving.now, compute, slowed, exposed, launch_wait, phases, moving.done, spans, moving.busy, link_bytes)


def penalised(s: Start, seconds: float, left: dict[str, float], penalties: dict | None) -> tuple[float, dict]:
    """A transfer's latency and bytes; a named penalty makes the latency at least so long."""
    return max(seconds, (penalties or {}).get((s.group, s.purpose), 0.0)), left


# ------------------------------------------------------------------------------------------------------------------
# Report
# ------------------------------------------------------------------------------------------------------------------


class Given(NamedTuple):
    """What is not the trainer's: assumptions about data, file system and machine."""

    attention_imbalance: float = 1.12
    file_system: float = 100e9  # bytes/s of all ranks together
    mtbf_hours: float = 0.0  # of the job; 0: 50,000 GPU hours (Llama 3: 419 interruptions of 16,384 GPUs in 54 days) over its ranks


def memory_of(rec: Recording, r: dict[str, float]) -> dict:
    """Bytes at the peak by purpose, on device and host, beside what is there."""
    device = {k: v for k, v in rec.peak.items() if not k.startswith("host ")}
    host = {k.removeprefix("host "): v for k, v in rec.peak.items() if k.startswith("host ")}
    found = {"device": device, "host": host, "device_bytes": sum(device.values()), "host_bytes": sum(host.values()),
             "device_has": int(r["memory"] - r["reserved"]), "host_has": int(r["host_memory"] - r["host_reserved"])}
    if "shared_memory" in r:  # the device is the host
        found["device_has"] = int(r["memory"] - r["reserved"] - found["host_bytes"])
    over = {"device": found["device_bytes"] - found["device_has"], "host": found["host_bytes"] - found["host_has"]}
    return found | {"over": {k: v for k, v in over.items() if v > 0}, "fits": max(over.values()) <= 0}


def checkpoint_of(rec: Recording, tl: Timeline, given: Given) -> dict:
    """Bytes, and in seconds the write, what it stalls of a step, and the interval that loses least."""
    world, R = rec.grid.world.size, rec.grid.R
    total = rec.state_bytes * world // R  # replicas share the write
    mtbf = (given.mtbf_hours or 50_000 / world) * 3600
    return {"bytes": total, **checkpoint.save_interval(total / given.file_system, tl.step_s, mtbf)}


def no_kernel(machine: str) -> list[str]:
    return ["attention is planned as one fused kernel; on this machine's GPUs the trainer computes it by blocks of queries, which "
            "takes more time and memory"] if machine == "aurora-pvc" else []


def report(rec: Recording, tl: Timeline, r: dict[str, float], given: Given, machine: str) -> dict:
    """Everything that the page shows, as data; seconds and bytes of one rank."""
    hp, m, grid = rec.hp, rec.m, rec.grid
    tokens = hp.rows_per_rank * m.seq_len
    lengths = [b - a for bounds in rec.bounds for a, b in zip(bounds, bounds[1:])]
    segment = sum(n * n for n in lengths) / sum(lengths)
    rate = tokens / tl.step_s
    by_class, by_phase = Counter(), Counter()
    for (phase, work), seconds in tl.compute.items():
        by_class[work] += seconds
        by_phase[phase] += seconds
    occupied = {"compute": sum(tl.compute.values())} | dict(tl.busy)
    muon = {p: rec.sent[k] for k in rec.sent for p in ("muon momentum", "muon direction") if k[1] == p}
    transfers = defaultdict(list)
    for flow in tl.flows:
        transfers[flow.start.group, flow.start.purpose].append(flow.end - flow.begun)
    return {
        "machine": machine, "size": hp.size, "ranks": grid.world.size, "replicas": grid.R, "nodes_per_replica": grid.N,
        "ranks_per_node": grid.E, "rank": grid.world.index, "warnings": parallel.grid_warnings(grid, m) + no_kernel(machine),
        "settings": {f.name: getattr(hp, f.name) for f in dataclasses.fields(hp) if getattr(hp, f.name) != f.default},
        "tokens_per_rank": tokens, "tokens_per_step": tokens * grid.world.size, "step_s": tl.step_s, "tokens_per_s_per_gpu": rate,
        "mfu": rate * model.flops_per_token(m, segment) / r["peak_bf16"], "hardware_flops": sum(
            e.flops for e in rec.events if isinstance(e, Op)), "mean_segment": segment,
        "memory": memory_of(rec, r), "limit": max(occupied, key=occupied.get), "occupied_s": occupied,
        "phases_s": dict(tl.phases), "compute_s": dict(by_class.most_common()), "compute_by_phase_s": dict(by_phase),
        "slowed_by_transfers_s": tl.slowed_s, "launch_bound_s": tl.launch_s,
        "exposed_s": {" ".join(k): v for k, v in tl.exposed.most_common()}, "exposed_total_s": sum(tl.exposed.values()),
        "transfers": {" ".join(k): {"count": len(v), "total_s": sum(v), "median_s": statistics.median(v), "longest_s": max(v)}
                      for k, v in transfers.items()},
        "link_bytes": dict(tl.link_bytes), "sent_bytes": {" ".join(k): v for k, v in sorted(rec.sent.items()) if v},
        "muon": {"momentum_bytes": muon.get("muon momentum", 0), "direction_bytes": muon.get("muon direction", 0),
                 "owned_matrices": len(rec.muon.mine)},
        "node_traffic_bytes": sum(v for (group, _), v in rec.sent.items() if group == "node"),
        "checkpoint": checkpoint_of(rec, tl, given), "data_bytes": tokens * 16, "recorded_s": rec.took_s,
        "events": len(rec.events),
    }


def measured_run(path: Path, tl: Timeline, rec: Recording) -> dict[str, tuple[float, float]]:
    """What -> (planned, measured): medians of the metrics that a run wrote after its first steps."""
    file = path / "metrics.jsonl"
    if not file.is_file():
        raise ConfigError(f"--compare={path}: there is no {file}; give the directory of a run, out/<run>")
    steps = []
    for line in file.read_text().splitlines():
        with contextlib.suppress(ValueError):  # one that a killed run has torn
            steps.append(json.loads(line))
    if not steps:
        raise ConfigError(f"--compare={path}: {file} holds no step yet; wait for a few")
    steps = steps[min(3, len(steps) - 1):]

    def median(of: Callable[[dict], float | None]) -> float:
        return statistics.median([value for step in steps if (value := of(step)) is not None] or [0.0])

    exposed = Counter()
    for (_, purpose), value in tl.exposed.items():
        exposed[purpose] += value
    purposes = dict.fromkeys([*exposed, *(name for step in steps for name in step.get("exposed_s") or ())])
    return {"step_s": (tl.step_s, median(lambda s: s["step_s"])),
            "optimizer_s": (tl.phases["optimizer"], median(lambda s: s.get("optimizer_s"))),
            "exposed_comm_s": (sum(exposed.values()), median(lambda s: s.get("exposed_comm_s"))),
            **{f"exposed {name}": (exposed[name], median(lambda s: (s.get("exposed_s") or {}).get(name, 0.0))) for name in purposes},
            "sent bytes": (sum(rec.sent.values()), median(lambda s: sum(s["sent_bytes"].values()))),
            "tracked peak bytes": (sum(rec.peak.values()), median(lambda s: s.get("tracked_peak_bytes")))}


def table(rows: list[tuple], indent: str = "  ") -> list[str]:
    """Rows of equal length as aligned text; the first column to the left."""
    rows = rows or [("none",)]
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    cells = [[str(cell).ljust(w) if i == 0 else str(cell).rjust(w) for i, (cell, w) in enumerate(zip(row, widths))] for row in rows]
    return [(indent + "  ".join(row)).rstrip() for row in cells]


def seconds_table(parts: dict[str, float], whole: float, least: float = 0.001) -> list[str]:
    rows = [(name, f"{value:.2f} s", f"{value / whole:.1%}") for name, value in parts.items() if value >= least * whole]
    rest = sum(value for value in parts.values() if value < least * whole)
    return table(rows + ([("others", f"{rest:.2f} s", f"{rest / whole:.1%}")] if rest > 0 else []))


def page(d: dict) -> str:
    """The report in words."""
    mem, ck, step = d["memory"], d["checkpoint"], d["step_s"]
    verdict = "fits" if mem["fits"] else "DOES NOT FIT: " + ", ".join(
        f"{v / GIB:.1f} GiB too much on the {where}" for where, v in mem["over"].items())
    idle = {"waits for transfers": d["exposed_total_s"], "waits for the launching CPU": d["launch_bound_s"]}
    lines = [
        f"{d['size']} on {d['machine']}: {d['ranks']} ranks = {d['replicas']} replicas x {d['nodes_per_replica']} nodes x "
        f"{d['ranks_per_node']}; rank {d['rank']}",
        "settings  " + ", ".join(f"{k}={v}" for k, v in d["settings"].items() if k not in train.MODEL_FIELDS or k == "seq_len"),
        *(f"warning   {text}" for text in d["warnings"]), "",
        f"{verdict}.  {d['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU, step {step:.2f} s, MFU {d['mfu']:.1%}, limited by {d['limit']} "
        f"({d['occupied_s'][d['limit']] / step:.0%} of the step)", "",
        f"The step of {d['tokens_per_step'] / 1e6:,.1f} M tokens ({d['tokens_per_rank']:,} per rank, mean segment "
        f"{d['mean_segment']:,.0f})", *seconds_table(d["phases_s"], step),
        "Where the compute stream's time goes", *seconds_table(d["compute_s"] | idle, step),
        f"  of these {d['slowed_by_transfers_s']:.2f} s because transfers hold SMs, or cores",
        "Exposed transfers", *seconds_table(d["exposed_s"], step),
        "Resources, time in use", *seconds_table(d["occupied_s"], step, 0),
        "Transfers (count, time from start to end in all, median)",
        *table([(k, v["count"], f"{v['total_s']:.2f} s", f"{v['median_s'] * 1e3:.1f} ms") for k, v in sorted(
            d["transfers"].items(), key=lambda kv: -kv[1]["total_s"])[:12]]),
        "Bytes per link and rank", *table([(k, f"{v / 1e9:,.1f} GB") for k, v in d["link_bytes"].items()]),
        f"Device memory at its peak: {mem['device_bytes'] / GIB:.1f} of {mem['device_has'] / GIB:.1f} GiB",
        *table([(k, f"{v / GIB:.2f} GiB") for k, v in sorted(mem["device"].items(), key=lambda kv: -kv[1]) if v > 2**20]),
        f"Host memory per rank: {mem['host_bytes'] / GIB:.1f} of {mem['host_has'] / GIB:.1f} GiB",
        *table([(k, f"{v / GIB:.2f} GiB") for k, v in sorted(mem["host"].items(), key=lambda kv: -kv[1])]),
        f"Muon: {d['muon']['owned_matrices']} dense matrices here; {d['muon']['momentum_bytes'] / 1e6:,.0f} MB of momentum to their "
        f"owners, {d['muon']['direction_bytes'] / 1e6:,.0f} MB of directions back.  Inside the node: "
        f"{d['node_traffic_bytes'] / 1e9:,.0f} GB sent per rank",
        f"Checkpoint: {ck['bytes'] / 1e12:.2f} TB, written in {ck['write_s']:.0f} s beside the next step, which waits "
        f"{ck['stall_s']:.0f} s for it",
        f"  with a failure every {ck['mtbf_s'] / 3600:.0f} h: one every {ck['interval_s'] / 60:.0f} min (Young-Daly), {ck['lost']:.1%} of the "
        "time lost",
        f"Data: {d['data_bytes'] / 1e6:.1f} MB of tokens and targets per rank and step, copied beside the step before",
        f"recorded {d['events']:,} events in {d['recorded_s']:.1f} s"]
    if "measured" in d:
        rows = [(name, f"{ours:,.4g}", f"{theirs:,.4g}", f"{ours / theirs - 1:+.1%}" if theirs else "") for name, (ours, theirs) in
                d["measured"].items()]
        lines += ["", *table([("beside the run's median step", "planned", "measured", "error"), *rows])]
    return "\n".join(lines)


def trace(rec: Recording, tl: Timeline, path: Path):
    """The timeline in the format that Perfetto and chrome://tracing open; a track per queue."""
    tracks = {"compute": 0}
    out = [{"ph": "X", "pid": 0, "tid": 0, "name": work, "cat": phase, "ts": a * 1e6, "dur": (b - a) * 1e6}
           for phase, work, a, b in tl.spans]
    for flow in tl.flows:
        s = flow.start
        name = f"copies {s.group}" if s.kind == "copy" else f"{s.group} [{s.size}]"
        out.append({"ph": "X", "pid": 0, "tid": tracks.setdefault(name, len(tracks)), "name": s.purpose, "cat": s.kind,
                    "ts": flow.begun * 1e6, "dur": (flow.end - flow.begun) * 1e6,
                    "args": {"bytes sent": s.sent, "seconds in the queue": flow.begun - flow.issued}})
    out += [{"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": name}} for name, tid in tracks.items()]
    out.append({"ph": "M", "pid": 0, "name": "process_name", "args": {"name": f"rank {rec.grid.world.index}"}})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"traceEvents": out, "displayTimeUnit": "ms"}))
    except OSError as error:
        raise ConfigError(f"--trace={path}: cannot be written ({error.strerror}); give another file") from None


# ------------------------------------------------------------------------------------------------------------------
# This machine: rates measured by a short probe, all ranks at the same time
# ------------------------------------------------------------------------------------------------------------------

PROBE_S = 0.4  # seconds of each measurement


def measure(settings: list[str], o: Options) -> dict[str, float]:
    """Starts the ranks, which measure together, and returns the mean of their rates."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "launch.py", "--scheduler=none", "--nodes", str(o.nodes), "--ranks-per-node", str(o.ranks_per_node),
                "--", "plan.py", "--probe", folder, *settings]
        done = subprocess.run(argv, cwd=Path(__file__).parent, capture_output=True, text=True, env=os.environ | launch.ON_CPU)
        if done.returncode:
            raise ConfigError(f"--machine=this-machine: the probe ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    middle = {name: statistics.mean(rank[name] for rank in found) for name in found[0]}
    return middle | of_a_cpu(middle, o.ranks_per_node, o.nodes)


def of_a_cpu(measured: dict[str, float], ranks_per_node: int, nodes: int = 1) -> dict[str, float]:
    """The constants of a machine without accelerators that are not measured: ranks, simulated nodes and arenas share what it has.
    Where no core is left over, transfers take those that compute."""
    cores, total = len(os.sched_getaffinity(0)), offload.host_memory()[0]
    share = int(nodes * ranks_per_node >= cores)
    return {
        "ranks_per_node": ranks_per_node, "peak_fp32": measured["peak_bf16"], "processors": 1, "default_ctas": share, "launch_s": 0.0,
        "dense_efficiency": 1.0, "memory_efficiency": 1.0, "sort_passes": 4, "node_hop_s": 0.0, "net_hop_s": 0.0, "peer_s": 0.0,
        "net_rate": measured["node_rate"], "copy_rate": measured["memory_rate"], "host_rate": measured["memory_rate"], "copy_s": 1e-4,
        "reserved": 0.3 * GIB, "host_reserved": 0.0, "memory": total / (nodes * ranks_per_node),
        "host_memory": total / (nodes * ranks_per_node), "shared_memory": 1.0}


def seconds_of(run: Callable[[], object], together: Callable[[], object], count: int = 0, finish: Callable[[], object] = lambda: None,
               clock: Callable[[], float] = time.perf_counter) -> float:
    """Mean time of a call, while all ranks make it; count: that often, where they must agree on it. finish: waits for the device."""
    run()
    finish()
    together()
    times, until = [], time.perf_counter() + PROBE_S
    while len(times) < count or not count and (not times or time.perf_counter() < until):
        began = clock()
        run()
        finish()
        times.append(clock() - began)
    return statistics.mean(times)


def cost_of(run: Callable[[torch.device], Callable[[], object]], m: Model, as_device: str = "cpu") -> tuple[float, float, int]:
    """(FLOPs, bytes, operations) of a piece of work, by recording it."""
    model.META_AS = torch.device("cpu") if as_device == "cpu" else None
    work, recorder = run(META), Recorder({}, {})
    recorder.experts = m.experts
    with recorder:
        work()
    model.META_AS = None
    ops = recorder.events
    return sum(e.flops for e in ops), sum(e.nbytes for e in ops), len(ops)


def probe(folder: str, settings: list[str]):
    """One rank's measurements: products in the model's own shapes, passes over memory, transfers."""
    where = launch.place()
    hp, m = train.resolve(train.parse(settings), where)
    launch.setup(where)
    grid = parallel.make_grid(where.rank, where.world, where.ranks_per_node, hp.replicas, m)
    dtype, T = getattr(torch, hp.dtype), m.seq_len

    def together():
        parallel.exchange([0.0], grid, where.device)

    # the time on a core, of which a rank has its share: who is at work while another measures is chance, in a step all are
    share = max(1.0, where.world * torch.get_num_threads() / len(os.sched_getaffinity(0)))

    tiny, known = torch.zeros(8), product_rates(m, grid, dtype, T, where.device)
    works = {"kernel": lambda: [tiny.add_(1) for _ in range(100)], **passes(m, grid, dtype, T, where.device),
             **{name: run for name, (_, run) in known.items()}}
    seconds = {name: share * took for name, took in in_turn(works, together).items()}
    found = {"kernel_s": seconds["kernel"] / 100 * 2}  # autograd costs about as much
    for name in passes(m, grid, dtype, T, META):
        _, nbytes, count = cost_of(lambda device, name=name: passes(m, grid, dtype, T, device)[name], m)
        found[f"{name} rate"] = nbytes / max(1e-9, seconds[name] - count * found["kernel_s"])
    found["memory_rate"] = found["element-wise rate"]
    speed = {name: flops / seconds[name] for name, (flops, _) in known.items()}
    peak = found["peak_bf16"] = speed.pop("dense_efficiency")
    found |= {name: value / peak for name, value in speed.items()}
    found |= transfer_rates(grid, T, m, where.device, together, share=max(1.0, where.world / len(os.sched_getaffinity(0))),
                            work=works["dense_efficiency"])
    Path(folder, f"{where.rank}.json").write_text(json.dumps(found))


def in_turn(works: dict[str, Callable[[], object]], together: Callable[[], object]) -> dict[str, float]:
    """Mean seconds on a core that each takes, one after the other as in a step: what it reads is seldom in a cache then."""
    times, until = defaultdict(list), time.perf_counter() + PROBE_S * len(works)
    for run in works.values():
        run()
    together()
    while not times or time.perf_counter() < until:
        for name, run in works.items():
            began = time.thread_time()
            run()
            times[name].append(time.thread_time() - began)
    return {name: statistics.mean(of_one) for name, of_one in times.items()}


def passes(m: Model, grid, dtype, T: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Work of each class that memory bounds, in the model's sizes."""
    def x(*shape, dtype=dtype, grad=False):
        return torch.ones(shape, dtype=dtype, device=device).requires_grad_(grad)  # zeros would all lie on one page of the kernel's

    rows = T * m.top_k
    h, w, dy, gate_up, weight = x(T, m.width, grad=True), x(m.width, dtype=torch.float32, grad=True), x(T, m.width), x(
        rows, 2 * m.expert_width), x(rows, dtype=torch.float32)
    gradient = x(m.experts // grid.E, 2 * m.expert_width, m.width)
    dgate, order = x(rows, m.expert_width), torch.arange(rows, device=device) * 7 % T
    state = [x(2**20, dtype=torch.float32) for _ in range(4)]
    return {"element-wise": lambda: (gradient.float(), torch.autograd.grad(model.rms_norm(h, w), (h, w), dy),
                                     model.swiglu(gate_up, weight), model.swiglu_grad(dgate, gate_up, weight)),
            "routing and permutation": lambda: dy.index_select(0, order),
            "optimizer passes": lambda: optim.adamw(*state, lr=1e-3, decay=0.1, clip=0.5, step=3)}


def product_rates(m: Model, grid, dtype, T: int, device: torch.device) -> dict[str, tuple[int, Callable[[], object]]]:
    """Name of the constant -> (FLOPs, what takes them)."""
    def x(*shape, dtype=dtype):
        return torch.randn(shape, device=device).to(dtype)

    local, rows, J, n = m.experts // grid.E, T * m.top_k, m.kv_heads, min(T, model.QUERY_BLOCK)
    h, wide, tokens, experts = x(T, m.width), x(m.width, m.width), x(rows, m.width), x(local, m.width, 2 * m.expert_width)
    offsets = (torch.arange(1, local + 1, device=device) * (rows // local)).int()
    q, k, p = x(J, m.heads // J * n, m.head_dim), x(J, m.head_dim, n), x(J, m.heads // J * n, n)
    router, grouped = x(m.width, m.experts, dtype=torch.float32), torch.nn.functional.grouped_mm
    head, h32 = x(m.width, m.vocab), h.float()
    one, matrix = 2 * m.heads * n * n * m.head_dim, x(4, m.expert_width, m.width, dtype=torch.bfloat16)
    return {"dense_efficiency": (2 * T * m.width**2, lambda: h @ wide),
            "expert_efficiency": (4 * rows * m.width * m.expert_width, lambda: grouped(tokens, experts, offs=offsets)),
            "attention_efficiency": (2 * one, lambda: (torch.baddbmm(p, q, k), torch.bmm(p, k.mT))),
            "attention_back_efficiency": (2 * one, lambda: (torch.bmm(p, k.mT), torch.bmm(p.mT, q))),
            "orthogonal_efficiency": (8 * m.expert_width**2 * m.width, lambda: matrix @ matrix.mT),
            "head_efficiency": (2 * T * m.width * m.vocab, lambda: h @ head),
            "fp32_efficiency": (2 * T * m.width * m.experts, lambda: h32 @ router)}


def transfer_rates(grid, T: int, m: Model, device: torch.device, together, finish: Callable[[], object] = lambda: None,
                   share: float = 1.0, work: Callable[[], object] = lambda: None) -> dict[str, float]:
    """Of a gather over all ranks: seconds of a small one, bytes/s of a large one. share: ranks per core. With more than one a
    transfer costs what it adds to the cores' time of work beside it: several times what it takes alone, since it comes in
    small pieces between those of the work, and takes the caches."""
    if grid.world.size == 1:
        return {"base_s": 1e-5, "node_rate": 1e10}
    group, xs = grid.shard, [torch.ones(T, m.width, device=device) for _ in range(16)]  # more than a cache holds
    turn, clock = itertools.cycle(xs), time.process_time if share > 1 else time.perf_counter

    def gather(x, work=lambda: None):
        pending = parallel.all_gather(x, group, "scalars")
        work()
        pending.wait()

    work = work if share > 1 else lambda: None
    base = share * seconds_of(lambda: gather(xs[0][0, :1]), together, 30, finish, clock)
    small, large = (share * seconds_of(lambda: gather(x(), work), together, 64, finish, clock)
                    for x in (lambda: xs[0][0, :1], lambda: next(turn)))
    return {"base_s": base, "node_rate": xs[0].nbytes * (group.size - 1) / max(1e-9, large - small)}


# ------------------------------------------------------------------------------------------------------------------
# What would fit
# ------------------------------------------------------------------------------------------------------------------


SEARCH_S = 35  # seconds after which no further settings are tried


def nearest_that_fit(argv: list[str], o: Options, mem: dict, r: dict[str, float]) -> list[str]:
    """Settings that fit, one way at a time, each tried: less on the device, shorter rows, more nodes."""
    found, until = [], time.perf_counter() + SEARCH_S
    for change in (offload_more_or_less, shorten, add_nodes):
        args, place, now, tries = argv, o, mem, 0
        while not now["fits"] and tries < 3 and time.perf_counter() < until:
            hp, m = resolve(args, place)
            args, place = change(args, place, now, hp, m)
            if args is None:
                break
            tries += 1
            try:
                now = memory_of(record(*resolve(args, place), place), r)
            except ConfigError:
                break
        if args is not None and now["fits"]:
            found.append(f"--nodes {place.nodes} {' '.join(args)}   (device {now['device_bytes'] / GIB:.1f}, host "
                         f"{now['host_bytes'] / GIB:.1f} GiB)")
    return found


def offload_more_or_less(argv: list[str], o: Options, mem: dict, hp, m: Model):
    """The least of the layers' inputs on the host that makes room on the device; or the most that the host has room for."""
    one_layer = hp.rows_per_rank * m.seq_len * m.width * getattr(torch, hp.dtype).itemsize
    away, state = offload.offloaded_layers(m.layers, hp.offload_fraction), set()
    freed = 0
    if not hp.offload_state and "device" in mem["over"]:
        state, freed = {"--offload_state=True"}, sum(mem["device"].get(k, 0) for k in ("masters", "moments", "gradients"))
    over = max(0, mem["over"].get("device", 0) - freed)
    layers = away + math.ceil(over / one_layer) if over else away - math.ceil(mem["over"].get("host", 0) / one_layer)
    if not 0 <= layers < m.layers - hp.keep_layers or (layers == away and not state):
        return None, o
    fraction = math.ceil(layers / m.layers * 1000) / 1000
    kept = [a for a in argv if not a.startswith(("--offload_fraction", "--offload_state" if state else "-" * 3))]
    return [*kept, *state, f"--offload_fraction={fraction}"], o


def shorten(argv: list[str], o: Options, mem: dict, hp, m: Model):
    """Rows as long as there is room for what grows with them."""
    scale = 1.0
    for where, over in mem["over"].items():
        grows = sum(v for k, v in mem[where].items() if k in ("transient", "inputs"))
        scale = min(scale, 1 - over / grows if grows else 0.0)
    step = 1024 if m.seq_len > 8192 else 128
    tokens = int(m.seq_len * scale) // step * step
    return ([*(a for a in argv if not a.startswith("--seq_len")), f"--seq_len={tokens}"] if tokens >= step else None), o


def add_nodes(argv: list[str], o: Options, mem: dict, hp, m: Model):
    """The next number of nodes per replica that the experts divide evenly among."""
    slot, now = m.experts // o.ranks_per_node, o.nodes // hp.replicas
    more = next((n for n in range(now + 1, slot + 1) if slot % n == 0), None)
    return (None, o) if more is None else (argv, o._replace(nodes=more * hp.replicas))


# ------------------------------------------------------------------------------------------------------------------
# The ladder of published figures
# ------------------------------------------------------------------------------------------------------------------


class Rung(NamedTuple):
    name: str
    published: float  # tokens/s per GPU, on 384 GH200
    settings: dict  # that change from the rung before
    attention: float = 1.12  # of the slowest rank to the mean
    penalties: tuple[str, ...] = ()  # of PENALTIES, for the calibrated column
    note: str = ""


RANDOM = 7.1  # slowest rank's attention to the mean where rows come in random order: python data.py balance --synthetic shows as much
BASE = {"size": "1t", "optimizer": "adamw", "seq_len": 8192, "offload_state": True, "weight_transport": "bf16",
        "grad_transport": "fp32", "dense_gather": "layer", "node_reshard": False, "max_per_group": 8, "column_ctas": 0}
CTAS = ("slow dense gather",)
LADDER = (
    Rung("8,192 tokens, AdamW", 90, BASE, RANDOM, CTAS, "selective checkpointing: here full recomputation"),
    Rung("full recompute, 32,768", 370, {"seq_len": 32768}, RANDOM, CTAS),
    Rung("+ activation offload, 49,152", 508, {"seq_len": 49152, "offload_fraction": 0.86}, RANDOM, CTAS),
    Rung("+ Muon on Grace, 65,536", 441, {"seq_len": 65536, "optimizer": "muon"}, RANDOM,
         (*CTAS, "host newton-schulz", "static tiles", "unbalanced data"), "Newton-Schulz on the host: no setting"),
    Rung("Newton-Schulz on the GPU", 597, {}, RANDOM, (*CTAS, "static tiles", "unbalanced data"), "static tiles: no setting"),
    Rung("+ dynamic tiles (103.8 s)", 65536 / 103.8, {}, RANDOM, (*CTAS, "unbalanced data")),
    Rung("+ cost-balanced data (91.7 s)", 65536 / 91.7, {}, 1.12, CTAS),
    Rung("+ group-limited routing (85.9 s)", 763, {"max_per_group": 2}, 1.12, CTAS),
    Rung("+ fp8 expert gather", 898, {"weight_transport": "fp8"}, 1.12, CTAS),
    Rung("+ bf16 gradients", 1022, {"grad_transport": "bf16"}, 1.12, (*CTAS, "allocator retries"), "allocator retries"),
    Rung("+ node-local reshard", 1038, {"node_reshard": True}, 1.12, (*CTAS, "allocator retries"), "allocator retries"),
    Rung("+ norm in backward, ...", 996, {}, 1.12, (*CTAS, "allocator retries"), "allocator retries; the rest always on here"),
    Rung("+ pools on the compute stream", 1210, {}, 1.12, CTAS, "always so here"),
    Rung("+ NCCL_MAX_CTAS=16", 1293, {"column_ctas": 16}, 1.12, ("dense gather at 16 CTAs",), "column group only here"),
)


def applied(names: tuple[str, ...]) -> tuple[dict, dict[str, float]]:
    """Named penalties as (what replay does to transfers, seconds that the step takes longer or the optimizer takes)."""
    transfers, seconds = {}, {}
    for name in names:
        value = PENALTIES[name].value
        if "dense gather" in name:
            transfers["shard", "dense gather"] = value
        else:
            seconds[name] = value
    return transfers, seconds


def step_with(rec: Recording, r: dict[str, float], attention: float, names: tuple[str, ...]) -> tuple[float, Timeline]:
    transfers, seconds = applied(names)
    tl = replay(rec, r, 1.12 if "unbalanced data" in names else attention, transfers)
    extra = sum(value - (tl.phases["optimizer"] if name == "host newton-schulz" else 0) for name, value in seconds.items())
    return tl.step_s + extra, tl


def ladder(machine: str, say: Callable[[str], None] = lambda _: None) -> dict:
    """Every rung predicted without calibrated constants, and again with its named penalties."""
    r, settings, known, rows = rates(machine), {}, {}, []
    for rung in LADDER:
        settings |= rung.settings
        key = tuple(sorted((k, v) for k, v in settings.items() if k != "column_ctas"))
        hp, m = resolve([f"--{k}={v}" for k, v in settings.items()], Options(96, 4))
        if key not in known:
            say(f"recording {rung.name}")
            known[key] = record(hp, m, Options(96, 4))
        rec = known[key]._replace(hp=hp)
        (plain, tl), (with_penalties, _) = step_with(rec, r, rung.attention, ()), step_with(rec, r, rung.attention, rung.penalties)
        rows.append({"name": rung.name, "published": rung.published, "predicted": m.seq_len / plain, "step_s": plain,
                     "calibrated": m.seq_len / with_penalties, "penalties": rung.penalties, "note": rung.note,
                     "gather_s": flow_seconds(tl, "expert gather"), "gradient_s": flow_seconds(tl, "expert gradient"),
                     "device_gib": memory_of(rec, r)["device_bytes"] / GIB})
    say("recording 1,536 GPUs")
    four = record(*resolve([f"--{k}={v}" for k, v in (settings | {"replicas": 4}).items()], Options(384, 4)), Options(384, 4))
    tl4 = replay(four, r)
    by = defaultdict(list)
    for flow in tl.flows:
        by[flow.start.group, flow.start.purpose].append(flow.end - flow.begun)
    # gate_up and down are two transfers of a layer, which follow each other
    before = {row["name"]: row for row in rows}
    groups, fp8, bf16 = (before[name] for name in ("+ group-limited routing (85.9 s)", "+ fp8 expert gather", "+ bf16 gradients"))
    details = [("expert gathers, a step, bf16", "s", 53.6, groups["gather_s"]),
               ("expert gathers, a step, fp8", "s", 35.1, fp8["gather_s"]),
               ("gradients, a step, fp32", "s", 50.7, fp8["gradient_s"]), ("gradients, a step, bf16", "s", 33.2, bf16["gradient_s"]),
               ("expert gather of a layer", "ms", 155, sum(by["column", "expert gather"]) / 2 / m.layers * 1e3),
               ("gradient all-to-all, a step", "s", 22.8, sum(by["column", "expert gradient"])),
               ("dense gather over all ranks", "ms", 40, statistics.median(by["shard", "dense gather"]) * 1e3),
               ("peak HBM", "GiB", 74.6, rows[-1]["device_gib"]),
               ("main kernels", "s", 44.8, sum(v for (phase, _), v in tl.compute.items() if phase != "optimizer")),
               ("expert products", "s", 19.2, sum(v for (_, work), v in tl.compute.items() if work == "expert products")),
               ("optimizer", "s", 1.6, tl.phases["optimizer"]),
               ("scaling efficiency at 1,536 GPUs", "%", 89, tl.step_s / tl4.step_s * 100)]
    return {"rows": rows, "details": details}


def flow_seconds(tl: Timeline, purpose: str) -> float:
    return sum(flow.end - flow.begun for flow in tl.flows if flow.start.purpose == purpose)


def ladder_page(d: dict) -> str:
    def error(value: float, published: float) -> str:
        return f"{value / published - 1:+.1%}"

    lines = [("published configuration, 384 GH200", "published", "predicted", "error", "with penalties", "error", "HBM GiB")]
    lines += [(row["name"], f"{row['published']:,.0f}", f"{row['predicted']:,.0f}", error(row["predicted"], row["published"]),
               f"{row['calibrated']:,.0f}", error(row["calibrated"], row["published"]), f"{row['device_gib']:.1f}") for row in d["rows"]]
    details = [("of the last row, where not said", "", "published", "predicted", "error")]
    details += [(name, unit, f"{published:g}", f"{value:.3g}", error(value, published)) for name, unit, published, value in d["details"]]
    notes = [f"  {row['name']}: {row['note']}" for row in d["rows"] if row["note"]]
    names = dict.fromkeys(name for row in d["rows"] for name in row["penalties"])
    return "\n".join(["Tokens/s per GPU. `predicted` uses no calibrated constant; `with penalties` adds those below, read off this very table,",
                      "so that it is no evidence.", *table(lines), "", *table(details), "", "Notes", *notes, "Penalties (calibrated)",
                      *(f"  {name}: {PENALTIES[name].value:.3g}, {PENALTIES[name].source}" for name in names),
                      "At 1,536 GPUs the model leaves out contention in the fabric above the nodes, stragglers and jitter: what is left is the",
                      "replicas' all-reduce."])


# ------------------------------------------------------------------------------------------------------------------
# The command line
# ------------------------------------------------------------------------------------------------------------------


def options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="plan.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--size", default="debug")
    parser.add_argument("--machine", default="jupiter-gh200", help=f"{', '.join(MACHINES)}, this-machine, or a file of gpu_check.py")
    parser.add_argument("--ranks-per-node", type=int, help="default: the machine's")
    parser.add_argument("--rank", type=int, default=0, help="which rank is planned")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="timeline for Perfetto")
    parser.add_argument("--sweep", action="append", default=[], metavar="name=a,b,c", help="a table; several: all combinations")
    parser.add_argument("--ladder", action="store_true", help="beside the published figures")
    parser.add_argument("--compare", type=Path, metavar="out/RUN", help="beside the metrics of a real run with these settings")
    parser.add_argument("--calibrated", action="store_true", help="with the penalties that fit the ladder's dense gathers")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="another value of a machine's constant")
    parser.add_argument("--segment-lengths", default="600,1.1", metavar="MEDIAN[,SIGMA]",
                        help="documents in tokens, log-normal: web text has about 1,100 a document")
    parser.add_argument("--attention-imbalance", type=float, default=1.12,
                        help="slowest rank's attention to the mean; balanced rows 1.001 to 1.12, random order 7 (data.py balance)")
    parser.add_argument("--routing-imbalance", type=float, default=1.15,
                        help="pairs of the fullest rank to the mean, where max_per_group leaves it open")
    parser.add_argument("--probe", help=argparse.SUPPRESS)  # folder: one of the ranks that measure this machine
    parser.add_argument("--file-system", type=float, default=100, help="GB/s that all ranks together write")
    parser.add_argument("--mtbf-hours", type=float, default=0, help="of the job; 0: 50,000 GPU hours over its GPUs")
    return parser.parse_known_args(argv)


def main(argv: list[str]) -> int:
    args, settings = options(argv)
    if args.probe:
        return probe(args.probe, settings)
    if args.nodes < 1 or (args.ranks_per_node is not None and args.ranks_per_node < 1):
        per_node = "" if args.ranks_per_node is None else f" --ranks-per-node={args.ranks_per_node}"
        raise ConfigError(f"--nodes={args.nodes}{per_node}: must be at least 1")
    if not 0 < args.file_system < math.inf or not 0 <= args.mtbf_hours < math.inf:
        raise ConfigError(f"--file-system={args.file_system:g} --mtbf-hours={args.mtbf_hours:g}: give GB/s above 0, and hours of at least 0")
    if args.ladder and args.machine == "this-machine":
        raise ConfigError("--ladder --machine=this-machine: the ladder's runs are of a machine in the table; leave out one of them")
    if args.ladder:
        found = ladder(args.machine, lambda text: print(text, file=sys.stderr, flush=True))
        print(json.dumps(found) if args.json else ladder_page(found))
        return launch.EXIT_OK
    here = args.machine == "this-machine"
    per_node = args.ranks_per_node or (launch.CPU_RANKS if here else int(rates(args.machine)["ranks_per_node"]))
    on_cpu = here or "shared_memory" in rates(args.machine)
    o = Options(args.nodes, per_node, args.rank, "cpu" if on_cpu else "cuda", args.segment_lengths, args.routing_imbalance)
    given = Given(args.attention_imbalance, args.file_system * 1e9, args.mtbf_hours)
    settings = [f"--size={args.size}", *settings]
    resolve(settings, o)  # refuses before anything is measured
    r = measure(settings, o) if here else rates(args.machine)
    for text in args.set:
        name, _, value = text.partition("=")
        if name not in r and not name.endswith(" rate"):
            raise ConfigError(f"--set {text}: no such constant; {args.machine} has {', '.join(r)}; and any class of operations has "
                              "'<class> rate', its bytes/s")
        r[name] = train.parse_value(name, value, float)
    if args.sweep:
        rows = sweep(args.sweep, settings, o, r, given, args)
        print(json.dumps(rows) if args.json else sweep_page(rows))
        return launch.EXIT_OK
    rec, tl, found = plan(settings, o, r, given, args)
    if args.compare:
        found["measured"] = measured_run(args.compare, tl, rec)
    print(json.dumps(found) if args.json else page(found), flush=True)
    if args.trace:
        trace(rec, tl, args.trace)
    if not found["memory"]["fits"] and not args.json:
        near = nearest_that_fit(settings, o, found["memory"], r)
        print("\n  ".join(["Nearest settings that fit", *(near or ["none was found in the time that is given to it"])]))
    return launch.EXIT_OK


def plan(settings: list[str], o: Options, r: dict[str, float], given: Given, args) -> tuple[Recording, Timeline, dict]:
    hp, m = resolve(settings, o)
    rec = record(hp, m, o)
    names = () if not args.calibrated else ("dense gather at 16 CTAs",) if hp.column_ctas else CTAS
    if hp.dtype == "float32" and "shared_memory" not in r:  # where the rates were measured, they are of this type already
        r = r | {"peak_bf16": r["peak_fp32"]}
    tl = replay(rec, r, given.attention_imbalance, applied(names)[0])
    return rec, tl, report(rec, tl, r, given, args.machine)


def sweep(texts: list[str], settings: list[str], o: Options, r: dict[str, float], given: Given, args) -> list[dict]:
    """All combinations; names are settings of the trainer, or nodes."""
    axes = []
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise ConfigError(f"--sweep {text}: write name=a,b,c")
        axes.append([(name, value) for value in values.split(",")])
    rows = []
    for chosen in itertools.product(*axes):
        place, changed = o, list(settings)
        for name, value in chosen:
            if name == "nodes":
                place = place._replace(nodes=train.parse_value("sweep nodes", value, int))
            else:
                changed = [s for s in changed if not s.startswith(f"--{name}=")] + [f"--{name}={value}"]
        row = dict(chosen)
        try:
            d = plan(changed, place, r, given, args)[2]
            row |= {"tokens_per_s_per_gpu": d["tokens_per_s_per_gpu"], "step_s": d["step_s"], "mfu": d["mfu"],
                    "device_gib": d["memory"]["device_bytes"] / GIB, "host_gib": d["memory"]["host_bytes"] / GIB,
                    "fits": d["memory"]["fits"], "limit": d["limit"], "exposed_s": d["exposed_total_s"]}
        except ConfigError as error:
            row["refused"] = str(error)
        rows.append(row)
        print(f"{len(rows)} of {math.prod(map(len, axes))}", file=sys.stderr, flush=True)
    return rows


def sweep_page(rows: list[dict]) -> str:
    names = [k for k in rows[0] if k not in ("tokens_per_s_per_gpu", "step_s", "mfu", "device_gib", "host_gib", "fits", "limit",
                                             "exposed_s", "refused")]
    lines = [(*names, "tok/s/GPU", "step s", "exposed s", "MFU", "HBM GiB", "host GiB", "fits", "limit")]
    for row in rows:
        cells = ("-",) * 7 + ("refused: " + row["refused"][:60],) if "refused" in row else (
            f"{row['tokens_per_s_per_gpu']:,.0f}", f"{row['step_s']:.2f}", f"{row['exposed_s']:.2f}", f"{row['mfu']:.1%}",
            f"{row['device_gib']:.1f}", f"{row['host_gib']:.1f}", "yes" if row["fits"] else "NO", row["limit"])
        lines.append((*(row[name] for name in names), *cells))
    return "\n".join(table(lines))


if __name__ == "__main__":
    sys.exit(launch.run(main))
