"""Who owns what, and how it travels.

The grid:       rank = (replica r, node n, local e), world = R x N x E.

    group     ranks that differ in   carries
    node      e                      tokens to the experts and partial sums back; dense weights (dense="step")
    column    n                      expert weights and gradients; once per step the node's part of the dense weights
    shard     n and e                embedding and head; dense weights and gradients (dense="layer"); Muon's matrices
    replica   r                      all-reduce of gradients that are already sharded (HSDP)

The weights:    each rank keeps fp32 masters of what it owns. `gather` starts the collective that puts a bucket together in
the compute type; `reduce` starts those that add up a gradient and leave each owner its part in fp32. Both return at
once; the result is there after `Gathering.wait` or `advance`.

Experts are owned whole: slot e of a node holds X/E consecutive experts, and the N ranks of a column share them out,
o = ceil(X/E / N) each, the last ones padded. Everything else lies in flat buffers of which each rank of `shard` owns
an equal slice.
"""

import hashlib
import math
import time
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Callable, Iterator, NamedTuple, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from model import ConfigError, Model, expert_shapes, init_std, layer_shapes, nothing, param_shapes
from offload import Copies, homes, label
from timeline import START, WAIT, span
from watch import PAGE

# ------------------------------------------------------------------------------------------------------------------
# Grid
# ------------------------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """A process group, its size and this rank's place in it. A group of one has no handle and communicates nothing."""

    name: str
    handle: object
    size: int
    index: int
    direct: bool = False  # gloo: ranks send to each other, see SendToEach


@dataclass(frozen=True)
class Grid:
    R: int
    N: int
    E: int
    r: int
    n: int
    e: int
    node: Group
    column: Group
    shard: Group
    replica: Group
    world: Group

    def local_experts(self, m: Model) -> range:
        """The experts that slot e of every node computes."""
        return range(self.e * m.experts // self.E, (self.e + 1) * m.experts // self.E)

    def owned_per_rank(self, m: Model) -> int:
        return math.ceil(m.experts // self.E / self.N)


def grid_shape(world: int, ranks_per_node: int, replicas: int, m: Model) -> tuple[int, int, int]:
    """(R, N, E). Raises ConfigError where the ranks, the replicas and the model do not fit together."""
    E = ranks_per_node
    if replicas < 1 or world % (replicas * E):
        fit = [r for r in range(1, world // E + 1) if world // E % r == 0]
        raise ConfigError(f"--replicas={replicas}: must divide the {world // E} nodes ({world} ranks, {E} per node); use one "
                          f"of {', '.join(map(str, fit))}")
    N = world // (replicas * E)
    if m.experts % E:
        raise ConfigError(f"--experts={m.experts}: must be a multiple of the {E} ranks per node; change it or "
                          "--ranks-per-node")
    if m.groups % E and E % m.groups:
        raise ConfigError(f"--groups={m.groups}: neither divides nor is divided by the {E} ranks per node; change it or "
                          "--ranks-per-node")
    if N * E > m.experts:
        fit = next(r for r in range(replicas + 1, world + 1) if world % (r * E) == 0 and world // r <= m.experts)
        raise ConfigError(f"--replicas={replicas}: {N} nodes x {E} ranks are more than the {m.experts} experts, some would own "
                          f"none; use --replicas={fit}")
    return replicas, N, E


def grid_warnings(grid: Grid, m: Model) -> list[str]:
    """What works but costs: ranks with uneven load, and padding that travels with the experts."""
    found = []
    if grid.E > m.groups and m.even_groups:
        found.append(f"{grid.E} ranks per node share {m.groups} routing groups: the load is even per group but not per rank")
    sent, needed = grid.owned_per_rank(m) * grid.N, m.experts // grid.E
    if sent > needed:
        better = [n for n in range(1, needed + 1) if needed % n == 0]
        found.append(f"{needed} experts of a column over {grid.N} nodes: {sent / needed:.2f}x the bytes, as padding; even: "
                     f"{', '.join(str(n) for n in better)} nodes per replica")
    return found


def make_grid(rank: int, world: int, ranks_per_node: int, replicas: int, m: Model, connect: bool = True,
              options: dict | None = None, timeout_s: float = 1800, backend: str = "") -> Grid:
    """Unpacks the rank and creates the process groups; every rank must call it. connect=False: who would own what, and how it
    would communicate over the given backend.
    options: the backend's options for a group, by its name; timeout_s: after which a waiting collective fails."""
    R, N, E = grid_shape(world, ranks_per_node, replicas, m)
    ranks = np.arange(world).reshape(R, N, E)
    r, n, e = (int(i) for i in np.argwhere(ranks == rank)[0])

    def group(name: str, members: np.ndarray) -> Group:
        """members [groups, size]: all groups of this kind; all ranks create all of them, in the same order."""
        mine = None
        for row in members.tolist():
            handle = None
            if connect and len(row) > 1:
                handle = dist.new_group(row, timedelta(seconds=timeout_s), pg_options=(options or {}).get(name))
            if rank in row:
                # gloo's own all-gather is slower: 5.2 against 3.1 ms for 1 MiB, 4 ms for the smallest (4 ranks, 2 cores, LOG.md)
                over = dist.get_backend(handle) if handle is not None else backend
                mine = Group(name, handle, len(row), row.index(rank), direct=over == "gloo")
        return mine

    return Grid(
        R, N, E, r, n, e,
        node=group("node", ranks.reshape(R * N, E)),
        column=group("column", ranks.transpose(0, 2, 1).reshape(R * E, N)),
        shard=group("shard", ranks.reshape(R, N * E)),
        replica=group("replica", ranks.transpose(1, 2, 0).reshape(N * E, R)),
        world=group("world", ranks.reshape(1, world)),
    )


# ------------------------------------------------------------------------------------------------------------------
# Collectives. Each is started from the compute stream and returns a Pending.
# ------------------------------------------------------------------------------------------------------------------

# What travels: purpose -> (what a rank holds before, what it holds after)
PURPOSES = {
    "expert gather": ("the experts it owns", "all experts of its node slot"),
    "expert gradient": ("its node's gradient of the slot's experts", "the column's sum for the experts it owns"),
    "dense gather": ("a part of the layer's dense weights", "all of them"),
    "dense refresh": ("its slice of every layer's dense weights", "1/E of every layer's, together with its node all"),
    "dense gradient": ("its own gradient of the dense weights", "the sum of its slice (node, then column; or shard)"),
    "control gather": ("a part of the layer's norms and router", "all of them"),
    "control refresh": ("its slice of every layer's norms and router", "1/E of every layer's"),
    "control gradient": ("its own gradient of norms and router", "the sum of its slice"),
    "embed gather": ("its slice of the embedding", "the embedding"),
    "embed gradient": ("its own gradient of the embedding", "the sum of its slice"),
    "head gather": ("its slice of the head", "the head"),
    "head gradient": ("its own gradient of the head", "the sum of its slice"),
    "final gather": ("its slice of the last norm", "the last norm"),
    "final gradient": ("its own gradient of the last norm", "the sum of its slice"),
    "dispatch": ("its own tokens", "the tokens of its node"),
    "dispatch routing": ("its tokens' choices and weights", "those of its node"),
    "dispatch gradient": ("its experts' part of the node's token gradients", "the sum for its own tokens"),
    "dispatch routing gradient": ("its experts' part of the node's weight gradients", "the sum for its own tokens"),
    "combine": ("its experts' partial sums for the node's tokens", "the sum for its own tokens"),
    "combine gradient": ("the output gradient of its own tokens", "that of the node's tokens"),
    "muon momentum": ("its slices of the mixed gradients", "whole matrices, the ones it updates"),
    "mano weights": ("its slices of the weights", "whole matrices, the ones it updates"),
    "muon direction": ("the directions of whole matrices", "its slices of all directions"),
    "replica gradient": ("its replica's gradient of what it owns", "the sum over the replicas"),
    "expert load": ("how many of its tokens each expert got", "the sum over all ranks"),
    "scalars": ("its own numbers", "everybody's"),
    "texts": ("its own message or path", "everybody's"),
}


@dataclass
class Wire:
    """What this process has put on the wire, and how it is watched. `WIRE` is the only one."""

    calls: Counter = field(default_factory=Counter)  # (group, purpose) -> collectives
    sent: Counter = field(default_factory=Counter)  # (group, purpose) -> bytes that this rank sent
    waited_s: float = 0.0  # time spent in waits, for exposed_comm_s
    waited: Counter = field(default_factory=Counter)  # the same by purpose
    # on an accelerator, whose wait() returns at once: makes an event of its stream; and pairs of them around each wait, (purpose,
    # before, after), until they are over
    event: Callable | None = None
    unsettled: deque = field(default_factory=deque)
    trace: list | None = None  # (event, what) in program order, where a test wants it
    tell: Callable[[str], None] | None = None  # prints each collective, with --verbose_comm
    poison: np.random.Generator | None = None  # see PoisonedWork
    # dry run: told (kind, group, purpose, bytes sent, input, output) of each collective, which does not run; returns its Work
    record: Callable | None = None

    def started(self, kind: str, group: Group, purpose: str, sent: int):
        self.calls[group.name, purpose] += 1
        self.sent[group.name, purpose] += sent
        if self.trace is not None:
            self.trace.append(("start", purpose))
        if self.tell:
            before, after = PURPOSES[purpose]
            where = f"{group.name}[{group.size}]"
            self.tell(f"{where:<11} {kind:<10} {purpose:<25} {sent:>15,} B sent   {before} -> {after}")

    def wait(self, purpose: str, work, entry: list | None = None, device: torch.device | None = None):
        """Waits for a Work, and measures for how long: the host's time; or that of the stream that waits, by events on it. entry:
        on the watchdog's page; device: where the buffers are."""
        if entry:
            PAGE.waits(entry)
        start, before = time.perf_counter(), self.event and self.event()
        with span(WAIT + purpose):
            work.wait()
        PAGE.waited()
        after = self.event and self.event()
        if after:
            self.unsettled.append((purpose, before, after))
        else:
            self.add(purpose, time.perf_counter() - start)
        if entry and PAGE.thread and device.type != "cpu":
            PAGE.passes(entry, after or torch.accelerator.current_stream(device).record_event())

    def add(self, purpose: str, seconds: float):
        self.waited_s, self.waited[purpose] = self.waited_s + seconds, self.waited[purpose] + seconds

    def settle(self):
        """Adds up the waits that the stream has passed by now, without waiting for it; the others count later."""
        while self.unsettled and self.unsettled[0][2].query():
            purpose, before, after = self.unsettled.popleft()
            self.add(purpose, before.elapsed_time(after) * 1e-3)


WIRE = Wire()


def timed_event(device: torch.device):
    """An event on the device's current stream, now."""
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event



# torch 2.13 renamed it; 2.11 knows the old name only
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending:
    """A collective in flight. It keeps input, output and handle alive until `wait`, which returns the result: what
    result() makes, or else the last of `keep`. entry: on the watchdog's page."""

    def __init__(self, purpose: str, work, keep: tuple, result: Callable[[], Tensor] | None, entry: list | None = None):
        self.purpose, self._work, self._keep, self._result, self._entry = purpose, work, keep, result, entry
        self._device = keep[0].device if entry else None

    def wait(self) -> Tensor:
        if WIRE.trace is not None and self._work is not None:
            WIRE.trace.append(("wait", self.purpose))
        if self._work is not None:
            WIRE.wait(self.purpose, self._work, self._entry, self._device)
        out = self._result() if self._result else self._keep[-1]
        self._work = self._keep = self._result = None
        return out


class PoisonedWork:
    """Makes faults of lifetime visible on a CPU, where a collective is done almost as soon as it is started.

    The destination holds NaN until `wait`. The transfer itself happens at a random moment, the same on all ranks: at the
    start, into a hidden buffer, or as late as in `wait`, so that it sees an input that was changed meanwhile. Input and
    destination are not kept alive from here: one that was dropped before `wait` is an error. The hidden buffer is poisoned
    when it is given up."""

    def __init__(self, op, x: Tensor, out: Tensor):
        in_place = out is x
        self.late, self.op = WIRE.poison.random() < 0.5 and not in_place, op
        self.x, self.out = weakref.ref(x), weakref.ref(out)
        self.hidden = x.clone() if in_place else torch.empty_like(out)
        poison(out)
        self.work = None if self.late else op(self.hidden, self.hidden if in_place else x)
        self.delay_s = WIRE.poison.random() * 1e-3

    def wait(self):
        time.sleep(self.delay_s)
        x, out = self.x(), self.out()
        if x is None or out is None:
            raise RuntimeError("a buffer of a collective in flight was dropped before wait()")
        work = self.op(self.hidden, x) if self.late else self.work
        work.wait()
        out.copy_(self.hidden)
        poison(self.hidden)

    def is_completed(self) -> bool:
        return False  # until wait


def poison(x: Tensor):
    """NaN, also where the bytes are fp8 (0xFF is NaN in E4M3 and in fp32)."""
    x.fill_(float("nan")) if x.is_floating_point() else x.fill_(255 if x.dtype == torch.uint8 else -1)


def start(kind: str, op, x: Tensor, out: Tensor, group: Group, purpose: str, sent: int) -> Pending:
    """Counts a collective and starts it; op(out, x) returns the Work."""
    WIRE.started(kind, group, purpose, sent)
    if WIRE.record is not None:
        return Pending(purpose, WIRE.record(kind, group, purpose, sent, x, out), (x, out), None)
    entry = PAGE.launches(group.name, purpose)
    with span(START + purpose):
        work = op(out, x) if WIRE.poison is None else PoisonedWork(op, x, out)
    PAGE.launched(entry, work)
    return Pending(purpose, work, (x, out), None, entry)


def all_gather(x: Tensor, group: Group, purpose: str) -> Pending:
    """x of every rank, [size, *x.shape]. A group of one gets a view of x; else x is copied to its place in the result, from
    where it is sent, and is free again."""
    if group.size == 1:
        return Pending(purpose, None, (x,), lambda: x[None])
    sent, out = x.nbytes * (group.size - 1), x.new_empty(group.size, *x.shape)
    if WIRE.poison is None:
        x = out[group.index].copy_(x)

    def op(out, x):
        if group.direct and WIRE.poison is None:  # which drops some: sends without their receives would break the connection
            return SendToEach(group, [x] * group.size, out)
        return _all_gather(out.flatten(), x.flatten(), group=group.handle, async_op=True)

    return start("all-gather", op, x, out, group, purpose, sent)


class SendToEach:
    """A Work of sends and receives: parts[j] goes to rank j, into[j] comes from it; nothing is copied here."""

    def __init__(self, group: Group, parts: Sequence[Tensor], into: Sequence[Tensor]):
        peers = [(group.index + i) % group.size for i in range(1, group.size)]  # not all to the same one at first
        ops = [dist.P2POp(op, x[peer], group=group.handle, group_peer=peer)
               for peer in peers for op, x in ((dist.irecv, into), (dist.isend, parts))]
        self.works = dist.batch_isend_irecv(ops)

    def wait(self):
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


def all_to_all(x: Tensor, group: Group, purpose: str) -> Pending:
    """x[j] goes to rank j of the group; the result's i-th came from rank i: same shape and type as x, or where ranks send to
    each other a list, in which its own is the one in x."""
    if group.size == 1:
        return Pending(purpose, None, (x,), lambda: x)
    x, sent = x.contiguous(), x.nbytes // group.size * (group.size - 1)
    if not group.direct or WIRE.poison is not None:
        def op(out, x):
            return dist.all_to_all_single(out, x, group=group.handle, async_op=True)

        return start("all-to-all", op, x, torch.empty_like(x), group, purpose, sent)

    def with_own(out):
        return [*out[: group.index], x[group.index], *out[group.index :]]

    received = x.new_empty(group.size - 1, *x.shape[1:])
    pending = start("all-to-all", lambda out, x: SendToEach(group, x, with_own(out)), x, received, group, purpose, sent)
    return Pending(purpose, None, (x,), lambda: with_own(pending.wait()))


def all_to_all_uneven(x: Tensor, to: list[int], back: list[int], group: Group, purpose: str) -> Pending:
    """x is flat: to[j] values of it go to rank j, in order; back[i] values come from rank i."""
    if group.size == 1:
        return Pending(purpose, None, (x,), lambda: x)

    def op(out, x):
        return dist.all_to_all_single(out, x, back, to, group=group.handle, async_op=True)

    sent = (sum(to) - to[group.index]) * x.element_size()
    return start("all-to-all", op, x, x.new_empty(sum(back)), group, purpose, sent)


def reduce_scatter(x: Tensor, group: Group, dtype: torch.dtype, purpose: str, inner: int = 1) -> Pending:
    """Sum over the ranks of x[own index], in fp32: an all-to-all in the given type, then every owner adds up in rank order,
    first over each `inner` consecutive ranks.

    The order is fixed, so the bits are the same from run to run. On gloo it also moves half the bytes of reduce_scatter,
    which is an all-reduce there (LOG.md)."""
    if group.size == 1:
        return Pending(purpose, None, (x,), lambda: x[0].to(dtype).float())
    parts = all_to_all(x.to(dtype), group, purpose)
    return Pending(purpose, None, (), lambda: sum_ranks(parts.wait(), inner))


def sum_ranks(parts: Sequence[Tensor], inner: int = 1) -> Tensor:
    """Sum of the parts in their order, first over each `inner` consecutive ones, in fp32."""
    if inner > 1:
        parts = [sum_ranks(parts[a : a + inner]) for a in range(0, len(parts), inner)]
    total = parts[0].float() if parts[0].dtype != torch.float32 else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def all_reduce(x: Tensor, group: Group, purpose: str) -> Pending:
    """x summed over the group, in place."""
    if group.size == 1:
        return Pending(purpose, None, (x,), lambda: x)

    def op(out, _):
        return dist.all_reduce(out, group=group.handle, async_op=True)

    return start("all-reduce", op, x, x, group, purpose, 2 * x.nbytes * (group.size - 1) // group.size)


# ------------------------------------------------------------------------------------------------------------------
# fp8 blocks: what expert weights travel as
# ------------------------------------------------------------------------------------------------------------------

FP8_BLOCK = 128  # values that share a scale
FP8_MAX = 448.0  # largest E4M3 value


def quantise(x: Tensor) -> Tensor:
    """[..., n] -> uint8 [..., n + 4 n/128]: E4M3 values, then the blocks' fp32 scales (max / 448), as bytes.

    A block of zeros gets scale 1. A block with an infinity or a NaN becomes NaN as a whole, on purpose: its scale is one,
    and times any value that stays NaN."""
    blocks = x.float().unflatten(-1, (-1, FP8_BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = largest / largest.new_full((), FP8_MAX)  # by a tensor: by a number, a GPU multiplies with its rounded reciprocal
    scale = torch.where(largest == 0, 1.0, scale.clamp(min=torch.finfo(torch.float32).tiny))
    scale = torch.where(largest.isfinite(), scale, float("nan"))
    values = (blocks / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return torch.cat((values.view(torch.uint8).flatten(-2), scale.flatten(-2).contiguous().view(torch.uint8)), -1)


def dequantise(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of quantise for packed [experts, bytes]: [experts, n] in `dtype`. One expert at a time, since fp32
    intermediates of all of them would be several times the result."""
    n = packed.shape[-1] * FP8_BLOCK // (FP8_BLOCK + 4)
    out = torch.empty(len(packed), n, dtype=dtype, device=packed.device)
    for expert, into in zip(packed, out):
        values = expert[:n].view(torch.float8_e4m3fn).to(torch.bfloat16).view(-1, FP8_BLOCK)  # exact
        scale = expert[n:].clone().view(torch.float32)  # a copy, or its bytes may not be aligned
        torch.mul(values, scale[:, None], out=into.view(-1, FP8_BLOCK))
    return out


# ------------------------------------------------------------------------------------------------------------------
# Tokens to the experts of the node and back: an all-gather and its transpose
# ------------------------------------------------------------------------------------------------------------------


class Dispatch(Function):
    """Every rank of the node gets the tokens, routing weights and choices of all: [T, ...] -> [E*T, ...].

    With top-8 over 4 ranks almost every token is needed on every rank, so an all-gather beats an all-to-all and needs no
    counts. Backward: the gradients go home by all-to-all and are added in fp32."""

    @staticmethod
    def forward(ctx, h_TD, weights_Tk, chosen_Tk, node):
        ctx.node = node
        purposes = ("dispatch", "dispatch routing", "dispatch routing")
        started = [all_gather(x, node, purpose) for x, purpose in zip((h_TD, weights_Tk, chosen_Tk), purposes)]
        h_MD, weights_Mk, chosen_Mk = (p.wait().flatten(0, 1) for p in started)
        ctx.mark_non_differentiable(chosen_Mk)
        return h_MD, weights_Mk, chosen_Mk

    @staticmethod
    def backward(ctx, dh_MD, dweights_Mk, _):
        E = ctx.node.size
        started = [reduce_scatter(d.unflatten(0, (E, -1)), ctx.node, d.dtype, purpose) for d, purpose in
                   ((dh_MD, "dispatch gradient"), (dweights_Mk, "dispatch routing gradient"))]
        dh_TD, dweights_Tk = (p.wait() for p in started)
        return dh_TD.to(dh_MD.dtype), dweights_Tk, None, None


class Combine(Function):
    """Partial sums of the node's tokens go to the tokens' ranks and are added there in fp32: [E*T, D] -> [T, D].

    Backward: all-gather. value=False: only its gradient's path, nothing is sent."""

    @staticmethod
    def forward(ctx, y_MD, node, value):
        ctx.node = node
        if not value:
            return nothing(y_MD, y_MD.shape[0] // node.size, *y_MD.shape[1:])
        return reduce_scatter(y_MD.unflatten(0, (node.size, -1)), node, y_MD.dtype, "combine").wait().to(y_MD.dtype)

    @staticmethod
    def backward(ctx, dy_TD):
        return all_gather(dy_TD, ctx.node, "combine gradient").wait().flatten(0, 1), None, None


def dispatch_tokens(node: Group, h_TD: Tensor, weights_Tk: Tensor, chosen_Tk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return Dispatch.apply(h_TD, weights_Tk, chosen_Tk, node)


def combine_tokens(node: Group, y_MD: Tensor, value: bool) -> Tensor:
    return Combine.apply(y_MD, node, value)


# ------------------------------------------------------------------------------------------------------------------
# Ownership: one table
# ------------------------------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    bucket: str  # parameters of a layer with the same bucket travel together
    optimizer: str  # muon | adamw; or what stands in for it (optim.OPTIMIZERS)
    owner: str  # slice: 1/(N*E) of the bucket's flat buffer, over the shard | expert: whole experts, over the column
    dtype: str  # gathered as: compute | fp32 (tiny, and it keeps norms and router exact)
    decay: bool  # decoupled weight decay


OWNERSHIP = {  # last part of a parameter's name -> rule
    "embed": Rule("embed", "adamw", "slice", "compute", False),
    "head": Rule("head", "adamw", "slice", "compute", True),
    "final_norm": Rule("final", "adamw", "slice", "fp32", False),
    "attn_norm": Rule("control", "adamw", "slice", "fp32", False),
    "q_norm": Rule("control", "adamw", "slice", "fp32", False),
    "k_norm": Rule("control", "adamw", "slice", "fp32", False),
    "moe_norm": Rule("control", "adamw", "slice", "fp32", False),
    "router": Rule("control", "adamw", "slice", "fp32", False),
    "q": Rule("dense", "muon", "slice", "compute", True),
    "k": Rule("dense", "muon", "slice", "compute", True),
    "v": Rule("dense", "muon", "slice", "compute", True),
    "o": Rule("dense", "muon", "slice", "compute", True),
    "shared_gate": Rule("dense", "muon", "slice", "compute", True),
    "shared_up": Rule("dense", "muon", "slice", "compute", True),
    "shared_down": Rule("dense", "muon", "slice", "compute", True),
    "gate": Rule("gate_up", "muon", "expert", "compute", True),
    "up": Rule("gate_up", "muon", "expert", "compute", True),
    "down": Rule("down", "muon", "expert", "compute", True),
}


@dataclass(frozen=True)
class Bucket:
    """Parameters that travel together. Names ending in a short name; of expert buckets, those of one expert."""

    name: str  # layers.3.dense
    rule: Rule
    params: tuple[tuple[str, tuple[int, ...]], ...]  # (short name, shape), in the order of the buffer
    owned: tuple[int, ...]  # shape of a rank's part: (slice,) or (o, rows, columns)

    @property
    def values(self) -> int:
        """Values without padding: of the flat buffer, or of one expert."""
        return sum(math.prod(shape) for _, shape in self.params)


def layer_buckets(i: int) -> list[str]:
    """Names of layer i's buckets."""
    return [f"layers.{i}.{bucket}" for bucket in ("dense", "control", "gate_up", "down")]


def make_buckets(m: Model, grid: Grid) -> dict[str, Bucket]:
    """All buckets in the order of the forward pass. Asserts that every parameter has exactly one place."""
    buckets = {}

    def add(prefix: str, shapes: dict[str, tuple[int, ...]]):
        unknown = [prefix + name for name in shapes if name not in OWNERSHIP]
        assert not unknown, f"no rule in OWNERSHIP for {', '.join(unknown)}"
        for kind in dict.fromkeys(OWNERSHIP[name].bucket for name in shapes):
            params = tuple((name, shape) for name, shape in shapes.items() if OWNERSHIP[name].bucket == kind)
            rules = {OWNERSHIP[name] for name, _ in params}
            assert len(rules) == 1, f"parameters of bucket {prefix}{kind} follow different rules: {rules}"
            rule = OWNERSHIP[params[0][0]]
            if rule.owner == "expert":
                owned = (grid.owned_per_rank(m), sum(shape[0] for _, shape in params), params[0][1][1])
            else:
                owned = (math.ceil(sum(math.prod(s) for _, s in params) / grid.shard.size),)
            buckets[prefix + kind] = Bucket(prefix + kind, rule, params, owned)

    top = {name: shape for name, shape in param_shapes(m).items() if "." not in name}
    add("", {"embed": top.pop("embed")})
    for i in range(m.layers):
        add(f"layers.{i}.", layer_shapes(m))
        add(f"layers.{i}.", expert_shapes(m))
    add("", top)
    placed = sum(b.values * (m.experts if b.rule.owner == "expert" else 1) for b in buckets.values())
    assert placed == sum(map(math.prod, param_shapes(m).values())), "a parameter has no bucket, or two"
    return buckets


class Piece(NamedTuple):
    """A run of a parameter's values inside a rank's part of a bucket, both flattened."""

    name: str  # full name
    shape: tuple[int, ...]  # of the whole parameter
    start: int  # the run, in the parameter
    stop: int
    at: int  # where it begins in the owned part


def slice_index(grid: Grid, n: int, e: int) -> int:
    """Which slice of a flat buffer rank (n, e) owns: the ranks of a column are neighbours."""
    return e * grid.N + n


def pieces(bucket: Bucket, m: Model, grid: Grid) -> Iterator[Piece]:
    """What this rank owns of a bucket. Initialisation, checkpoints and tests all go by it."""
    prefix = bucket.name[: bucket.name.rfind(".") + 1]
    if bucket.rule.owner == "expert":
        mine = grid.local_experts(m)
        for j in range(bucket.owned[0]):
            x = mine.start + grid.n * bucket.owned[0] + j
            at = j * bucket.values
            for name, shape in bucket.params if x in mine else ():
                yield Piece(f"{prefix}experts.{x}.{name}", shape, 0, math.prod(shape), at)
                at += math.prod(shape)
        return
    (size,) = bucket.owned
    low, begin = slice_index(grid, grid.n, grid.e) * size, 0
    for name, shape in bucket.params:
        end = begin + math.prod(shape)
        start, stop = max(begin, low), min(end, low + size)
        if start < stop:
            yield Piece(prefix + name, shape, start - begin, stop - begin, start - low)
        begin = end


# ------------------------------------------------------------------------------------------------------------------
# State and its initialisation
# ------------------------------------------------------------------------------------------------------------------


@dataclass
class State:
    """What a rank keeps from step to step: master, moments and bias are in the checkpoint, the rest follows from them.

    Masters, moments and gradients are on the device; or, where there are `copies`, in arenas on the host."""

    buckets: dict[str, Bucket]
    master: dict[str, Tensor]  # bucket -> fp32 owned values
    moments: dict[str, dict[str, Tensor]]  # bucket -> what its optimizer keeps, fp32
    bias_LX: Tensor  # selection bias of the router, the same on all ranks
    grad: dict[str, Tensor] = field(default_factory=dict)  # bucket -> fp32 owned gradient of this step
    squared: dict[str, Tensor] = field(default_factory=dict)  # bucket -> squared norm of grad, fp64
    # where it is a dict: bucket -> squared norm of this rank's part of its node's gradient, of the buckets that have such a sum
    node_squared: dict[str, Tensor] | None = None
    token_squared: Tensor | None = None  # squared norm of this step's gradient of this rank's embedded tokens, fp64
    node: dict[str, Tensor] = field(default_factory=dict)  # bucket -> the node's 1/E of its weights, made from the masters
    copies: Copies | None = None  # between the arenas and the device
    slots: dict[str, Tensor] = field(default_factory=dict)  # bucket -> where on the host its gradient goes
    own: dict[str, Tensor] = field(default_factory=dict)  # bucket -> owned values as they travel, on the device, unless masters
    # called before owned rows `at` of a bucket's tensors of these kinds change: a checkpoint may be writing them still
    before_change: Callable[[str, slice, tuple[str, ...]], None] = lambda name, at, kinds: None


BLOCK = 1 << 12  # values per generator call: whole blocks are drawn, so that any slice gets the same values


def initial_values(seed: int, name: str, start: int, stop: int, std: float) -> Tensor:
    """Values start..stop of a parameter: a normal truncated at 3 sigma, fp32, a pure function of (seed, name, index).

    A Philox counter gives the uniform number of each index, the inverse CDF makes it normal: no rejection loop, no
    collective, and a rank draws only the blocks that it owns a part of."""
    if std == 0:
        return torch.ones(stop - start)
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    first, last = start // BLOCK, -(-stop // BLOCK)
    generator = np.random.Philox(key=key)
    generator.advance(first * BLOCK // 4)  # a counter step makes four 64-bit words
    words = generator.random_raw((last - first) * BLOCK)
    uniform = torch.from_numpy(((words >> np.uint64(40)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-24))
    inside = math.erf(3 / math.sqrt(2))
    values = torch.erfinv((uniform * 2 - 1) * inside) * (math.sqrt(2) * std)
    return values[start - first * BLOCK : stop - first * BLOCK]


def init_state(m: Model, grid: Grid, seed: int, device: torch.device, offload: bool = False) -> State:
    """Masters drawn, moments left empty (optim.init_moments makes them). offload: their home is the host."""
    buckets = make_buckets(m, grid)
    shapes = {name: bucket.owned for name, bucket in buckets.items()}
    master = homes("masters", shapes, device, offload)
    for name, bucket in buckets.items():
        if device.type == "meta":
            continue
        flat = master[name].view(-1)
        for p in pieces(bucket, m, grid):
            flat[p.at : p.at + p.stop - p.start] = initial_values(seed, p.name, p.start, p.stop, init_std(p.name, m))
    state = State(buckets, master, {}, torch.zeros(m.layers, m.experts, device=device))
    if offload:
        state.copies, state.slots = Copies(device), homes("gradients", shapes, device, offload)
    return state


# ------------------------------------------------------------------------------------------------------------------
# Weights out, gradients home
# ------------------------------------------------------------------------------------------------------------------


class Transport(NamedTuple):
    """How weights and gradients travel."""

    compute: torch.dtype  # of products and activations
    weights: str = "compute"  # expert weights: fp8 blocks | bf16 | compute
    grads: torch.dtype = torch.float32  # gradients; they are added in fp32
    dense: str = "layer"  # dense weights: step, node-resident and refreshed once per step | layer, gathered over all ranks
    node_reshard: bool = True  # with dense="layer": keep 1/E of a layer for the backward pass, which then gathers in the node
    grad_chunk: int = 0  # experts of an owner per gradient all-to-all; 0: all at once


def check_transport(transport: Transport, m: Model, grid: Grid):
    """Raises ConfigError where sizes do not divide."""
    for name, values in {"gate and up": 2 * m.width * m.expert_width, "down": m.width * m.expert_width}.items():
        if transport.weights == "fp8" and values % FP8_BLOCK:
            raise ConfigError(f"--weight_transport=fp8: the {values} values of an expert's {name} are no multiple of the block "
                              f"of {FP8_BLOCK}; use --weight_transport=bf16 or other --width and --expert_width")
    owned = grid.owned_per_rank(m)
    if transport.grad_chunk and owned % transport.grad_chunk:
        fit = [c for c in range(1, owned + 1) if owned % c == 0]
        raise ConfigError(f"--grad_chunk={transport.grad_chunk}: must divide the {owned} experts that a rank owns per layer; use "
                          f"one of {', '.join(map(str, fit))}, or 0 for all at once")


class Gathering(NamedTuple):
    """Buckets on their way: (bucket, collective, how its result becomes weights)."""

    parts: list[tuple[Bucket, Pending, Callable[[Tensor], dict[str, Tensor]]]]

    def wait(self) -> dict[str, Tensor]:
        """Weights by short name: q [Q, D], ..., and gate_up [X', 2F, D], down [X', D, F].

        fp8 bytes stay bytes until this moment, so that only one layer is there in the compute type."""
        weights = {}
        for _, pending, unfold in self.parts:
            weights |= unfold(pending.wait())
        return weights


def gather(state: State, names: list[str], grid: Grid, transport: Transport, backward: bool = False) -> Gathering:
    """Starts putting the named buckets together, from masters cast to the type they travel in."""
    return Gathering([(state.buckets[n], *start_gather(state, state.buckets[n], grid, transport, backward)) for n in names])


def start_gather(state: State, bucket: Bucket, grid: Grid, transport: Transport, backward: bool):
    name, kind = bucket.name, bucket.rule.bucket
    if bucket.rule.owner == "expert":
        own = own_part(state, bucket, transport)
        if transport.weights == "fp8":
            return (all_gather(own, grid.column, "expert gather"),
                    lambda x: {kind: dequantise(x.flatten(0, 1), transport.compute).view(-1, *bucket.owned[1:])})
        return all_gather(own, grid.column, "expert gather"), lambda x: {kind: x.flatten(0, 1).to(transport.compute)}

    purpose = f"{kind} gather"
    resident = transport.dense == "step" or backward and transport.node_reshard
    if node_resident(bucket) and resident:  # 1/E of it is here already (start_refresh, or the forward pass): gather in the node
        own = state.node[name] if transport.dense == "step" else state.node.pop(name)
        return all_gather(own, grid.node, purpose), lambda x: unpack(bucket, x.flatten())

    def unfold(parts):
        flat = from_shard_order(parts, grid)
        if node_resident(bucket) and transport.dense == "layer" and transport.node_reshard and not backward:
            state.node[name] = flat.view(grid.E, -1)[grid.e].clone()
        return unpack(bucket, flat)

    return all_gather(own_part(state, bucket, transport), grid.shard, purpose), unfold


def travelling(master: Tensor, bucket: Bucket, transport: Transport) -> Tensor:
    """Owned fp32 values, or some of their experts, in the type in which they travel; fp8: uint8 [experts, bytes]."""
    if bucket.rule.owner == "expert" and transport.weights == "fp8":
        return quantise(master.flatten(1))
    if bucket.rule.owner == "expert" and transport.weights == "bf16":
        return master.to(torch.bfloat16)
    return master.to(transport.compute if bucket.rule.dtype == "compute" else torch.float32)


def own_part(state: State, bucket: Bucket, transport: Transport) -> Tensor:
    return state.own[bucket.name] if state.copies else travelling(state.master[bucket.name], bucket, transport)


def fill_own(state: State, transport: Transport):
    """Where masters live on the host, what travels is on the device: made here once, afterwards by the optimizer."""
    if state.copies:
        for name, bucket in state.buckets.items():
            state.own[name] = travelling(state.copies.fetch("state in", state.master[name]).wait(), bucket, transport)


def node_resident(bucket: Bucket) -> bool:
    """Dense and control weights of layers: those that both passes need."""
    return bucket.rule.bucket in ("dense", "control")


def start_refresh(state: State, grid: Grid, transport: Transport) -> Callable[[], None]:
    """With dense="step": after the masters have changed, one gather over the column per type brings the node's 1/E of every
    layer's dense and control weights up to date. Both passes of the next step gather inside the node only. Returns what
    waits for it."""
    started = []
    for kind in ("dense", "control") if transport.dense == "step" else ():
        buckets = [b for b in state.buckets.values() if b.rule.bucket == kind]
        own = torch.cat([own_part(state, b, transport) for b in buckets])
        started.append((buckets, all_gather(own, grid.column, f"{kind} refresh")))

    def wait():
        for buckets, pending in started:
            for b, part in zip(buckets, pending.wait().split([b.owned[0] for b in buckets], 1)):
                state.node[b.name] = label("node weights", part.reshape(-1))  # one by one: the old go as the new come

    return wait


def from_shard_order(parts: Tensor, grid: Grid) -> Tensor:
    """[N*E, slice] in the order of the group (n, e) -> the flat buffer, whose slices are in the order (e, n)."""
    return parts.view(grid.N, grid.E, -1).transpose(0, 1).reshape(-1)


def to_shard_order(flat: Tensor, grid: Grid) -> Tensor:
    return flat.view(grid.E, grid.N, -1).transpose(0, 1).reshape(grid.N * grid.E, -1)


def unpack(bucket: Bucket, flat: Tensor) -> dict[str, Tensor]:
    """Views of the parameters in a bucket's flat buffer."""
    views, at = {}, 0
    for name, shape in bucket.params:
        views[name] = flat[at : at + math.prod(shape)].view(shape)
        at += math.prod(shape)
    return views


# A gradient on its way home is a generator: it starts a collective, yields False, and when it is resumed waits for it and
# starts the next. `advance` resumes all of them once per layer, so that each transfer has a layer's compute to hide behind.


def reduce(state: State, names: list[str], grads: dict[str, Tensor], grid: Grid, transport: Transport) -> list[Iterator]:
    """Starts the reductions of the named buckets. grads: by short name, as Gathering.wait names the weights; taken out of the
    dict, so that each goes as soon as it has been sent."""
    started = []
    for name in names:
        bucket = state.buckets[name]
        if bucket.rule.owner == "expert":
            started.append(reduce_experts(state, bucket, grads.pop(bucket.rule.bucket), grid, transport))
        else:
            started.append(reduce_flat(state, bucket, {short: grads.pop(short) for short, _ in bucket.params}, grid, transport))
        next(started[-1])
    return started


def advance(reductions: list[Iterator], to_the_end: bool = False):
    """Moves every reduction one collective on, or all of them to the end; the finished ones leave the list."""
    while reductions:
        reductions[:] = [reduction for reduction in reductions if not next(reduction)]
        if not to_the_end:
            return


def reduce_experts(state: State, bucket: Bucket, grad: Tensor, grid: Grid, transport: Transport) -> Iterator:
    """Over the column. The gradient is expert-major already, so it is the all-to-all's input as it is. In chunks of an owner's
    experts (each then copied) the receive buffers are smaller: two chunks travel beside a layer's compute, and a gradient of
    more than two takes as many layers more."""
    note_node(state, bucket, grad)
    parts = grad.unflatten(0, (grid.N, -1))
    size = transport.grad_chunk or bucket.owned[0]
    chunks = [parts[:, a : a + size] for a in range(0, bucket.owned[0], size)]
    done = []
    for a in range(0, len(chunks), 2):
        pair = [reduce_scatter(c, grid.column, transport.grads, "expert gradient") for c in chunks[a : a + 2]]
        yield False
        done += [pending.wait() for pending in pair]
    del grad, parts, chunks
    yield from over_replicas(state, bucket, torch.cat(done) if len(done) > 1 else done[0], grid)


def reduce_flat(state: State, bucket: Bucket, grads: dict[str, Tensor], grid: Grid, transport: Transport) -> Iterator:
    """Over the shard; or, the way the weights come with dense="step", inside the node and then, in fp32, over the column."""
    dtype = transport.grads if bucket.rule.dtype == "compute" else torch.float32
    purpose = f"{bucket.rule.bucket} gradient"
    flat = torch.zeros(bucket.owned[0] * grid.shard.size, dtype=dtype, device=state.bias_LX.device)
    for name, view in unpack(bucket, flat).items():
        view.copy_(grads.pop(name))
    if node_resident(bucket) and transport.dense == "step":
        pending = reduce_scatter(flat.view(grid.E, -1), grid.node, dtype, purpose)
        del flat, view
        yield False
        of_node = pending.wait()
        note_node(state, bucket, of_node)
        pending = reduce_scatter(of_node.view(grid.N, -1), grid.column, torch.float32, purpose)
        del of_node
    else:
        # node by node, as the two stages above add: dense_gather changes no bit of a result
        pending = reduce_scatter(to_shard_order(flat, grid), grid.shard, dtype, purpose, inner=grid.E)
        del flat, view
    yield False
    yield from over_replicas(state, bucket, pending.wait(), grid)


def over_replicas(state: State, bucket: Bucket, grad: Tensor, grid: Grid) -> Iterator:
    """The last stretch: the sum over the replicas of what each owns, its squared norm, and the way to its home. Leaves the
    fp32 gradient and the squared norm in the state, and yields True."""
    if grid.R > 1:
        pending = all_reduce(grad, grid.replica, "replica gradient")
        del grad
        yield False
        grad = pending.wait()
    grad = label("gradients", grad.view(bucket.owned))
    state.squared[bucket.name] = squared_norm(grad)
    if state.copies:
        copy = state.copies.send("gradient out", grad, state.slots[bucket.name])
        del grad
        yield False
        grad = copy.wait()
    state.grad[bucket.name] = grad
    yield True


def note_node(state: State, bucket: Bucket, grad: Tensor):
    if state.node_squared is not None:
        state.node_squared[bucket.name] = squared_norm(grad)


def squared_norm(x: Tensor) -> Tensor:
    """fp64 scalar: fp32 norms of short runs, whose squares are added in fp64. A sum in fp64 throughout reads 10 times slower."""
    flat = x.reshape(-1)
    whole = len(flat) // 4096 * 4096
    runs = torch.linalg.vector_norm(flat[:whole].view(-1, 4096), dim=1, dtype=torch.promote_types(x.dtype, torch.float32))
    return runs.double().square().sum() + torch.linalg.vector_norm(flat[whole:], dtype=torch.float64).square()


def exchange(values: list[float], grid: Grid, device: torch.device) -> np.ndarray:
    """The values of every rank, fp64 [world, len(values)]: the one small collective at the end of a step.

    A gather rather than a sum, so that all ranks add in the same order and decide the same, and any rank can be named."""
    sent = torch.tensor(values, dtype=torch.float64, device=device)
    return all_gather(sent, grid.world, "scalars").wait().cpu().numpy()


LONGEST_MESSAGE = 2000  # characters of what a rank says that went wrong there


def share_texts(text: str, grid: Grid, device: torch.device) -> list[str]:
    """Every rank's text on every rank: the lengths, then all filled up to the longest. For short texts, rarely: names of files
    that are not UTF-8 come through."""
    content = text.encode(errors="surrogatepass")
    length = torch.tensor([len(content)], dtype=torch.int64, device=device)
    lengths = all_gather(length, grid.world, "texts").wait().flatten().tolist()
    if not max(lengths):
        return [""] * len(lengths)
    sent = torch.frombuffer(bytearray(content.ljust(max(lengths), b"\0")), dtype=torch.uint8)
    received = all_gather(sent.to(device), grid.world, "texts").wait().cpu().numpy()
    return [row[:n].tobytes().decode(errors="surrogatepass") for row, n in zip(received, lengths)]


def patient_group(grid: Grid):
    """A gloo group of all ranks in which one may take a day, to write or to prepare data; the death of one shows at once. None for a
    single rank. All ranks call it."""
    return dist.new_group(backend="gloo", timeout=timedelta(days=1)) if grid.world.size > 1 else None


def patiently(action: Callable, grid: Grid):
    """action() of this rank, which may take longer than a collective may; returns, or raises what it raised, once all ranks are there."""
    group = patient_group(grid)
    try:
        return action()
    finally:
        if group:
            dist.all_reduce(torch.zeros(1), group=group)  # not barrier(), which may choose an accelerator that gloo does not know
            dist.destroy_process_group(group)


def together(action: Callable, grid: Grid, device: torch.device):
    """action() of this rank; if it raises ConfigError on any rank, all raise it, with the first one's message."""
    result, failure = None, ""
    try:
        result = action()
    except ConfigError as error:
        failure = str(error)[:LONGEST_MESSAGE]
    for rank, message in enumerate(share_texts(failure, grid, device)):
        if message:
            raise ConfigError(f"rank {rank}: {message}" if rank else message)
    return result
