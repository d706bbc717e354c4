"""Who owns what, and how it travels.

The grid:       rank = (replica r, node n, local e), world = R x N x E.

    group     ranks that differ in   carries
    node      e                      tokens to the experts and partial sums back
    column    n                      expert weights and expert gradients
    shard     n and e                dense and control weights and gradients, embedding, head
    replica   r                      all-reduce of gradients that are already sharded (HSDP)

The weights:    each rank keeps fp32 masters of what it owns, nothing else. `gather_*` starts the collective that puts a
bucket together in the compute type; `reduce_*` starts the one that adds up a gradient and leaves each owner its part in
fp32. Both return at once; the result is there after `.wait()` or `.finish()`.

Experts are owned whole: slot e of a node holds X/E consecutive experts, and the N ranks of a column share them out,
o = ceil(X/E / N) each, the last ones padded. Everything else lies in flat buffers of which each rank of `shard` owns
an equal slice.
"""

import hashlib
import math
import time
from dataclasses import dataclass, field
from typing import Callable, Iterator, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from model import ConfigError, Model, expert_shapes, init_std, layer_shapes, param_shapes

# ------------------------------------------------------------------------------------------------------------------
# Grid
# ------------------------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """A process group, its size and this rank's place in it. A group of one has no handle and communicates nothing."""

    name: str
    handle: object
    size: int
    index: int
    direct: bool = False  # all-gather by sending to each rank


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


def make_grid(rank: int, world: int, ranks_per_node: int, replicas: int, m: Model, connect: bool = True) -> Grid:
    """Unpacks the rank and creates the process groups; every rank must call it. connect=False: who would own what."""
    R, N, E = grid_shape(world, ranks_per_node, replicas, m)
    ranks = np.arange(world).reshape(R, N, E)
    r, n, e = (int(i) for i in np.argwhere(ranks == rank)[0])

    def group(name: str, members: np.ndarray) -> Group:
        """members [groups, size]: all groups of this kind; all ranks create all of them, in the same order."""
        mine = None
        for row in members.tolist():
            handle = dist.new_group(row) if connect and len(row) > 1 else None
            if rank in row:
                # gloo's all-gather takes 4 ms whatever the size, its all-to-all 0.5 ms (4 ranks on 2 cores, LOG.md)
                direct = handle is not None and dist.get_backend(handle) == "gloo"
                mine = Group(name, handle, len(row), row.index(rank), direct)
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

# torch 2.13 renamed it; 2.11 knows the old name only
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending:
    """A collective in flight. It keeps input, output and handle alive until `wait`, which returns the result."""

    waited_s = 0.0  # time that this process spent in waits, for exposed_comm_s

    def __init__(self, work, keep: tuple, result: Callable[[], Tensor]):
        self._work, self._keep, self._result = work, keep, result

    def wait(self) -> Tensor:
        if self._work is not None:
            start = time.perf_counter()
            self._work.wait()
            Pending.waited_s += time.perf_counter() - start
        out = self._result()
        self._work = self._keep = self._result = None
        return out


def all_gather(x: Tensor, group: Group) -> Pending:
    """x of every rank, [size, *x.shape]. A group of one gets a view of x."""
    if group.size == 1:
        return Pending(None, (x,), lambda: x[None])
    out = x.new_empty(group.size, *x.shape)
    if group.direct:
        x = x.expand(group.size, *x.shape).contiguous()
        work = dist.all_to_all_single(out, x, group=group.handle, async_op=True)
    else:
        x = x.contiguous()
        work = _all_gather(out.flatten(), x.flatten(), group=group.handle, async_op=True)
    return Pending(work, (x, out), lambda: out)


def all_to_all(x: Tensor, group: Group) -> Pending:
    """x[j] goes to rank j of the group; the result's row i came from rank i. Same shape and type as x."""
    if group.size == 1:
        return Pending(None, (x,), lambda: x)
    x = x.contiguous()
    out = torch.empty_like(x)
    work = dist.all_to_all_single(out, x, group=group.handle, async_op=True)
    return Pending(work, (x, out), lambda: out)


def reduce_scatter(x: Tensor, group: Group, wire: torch.dtype) -> Pending:
    """Sum over the ranks of x[own index], in fp32: an all-to-all in the `wire` type, then every owner adds up in rank order.

    The order is fixed, so the bits are the same from run to run. On gloo it also moves half the bytes of reduce_scatter,
    which is an all-reduce there (LOG.md)."""
    if group.size == 1:
        return Pending(None, (x,), lambda: x[0].float())
    parts = all_to_all(x.to(wire), group)
    return Pending(None, (x,), lambda: sum_ranks(parts.wait()))


def sum_ranks(parts: Tensor) -> Tensor:
    """Sum over the first dimension in its order, in fp32."""
    total = parts[0].float() if parts.dtype != torch.float32 else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def all_reduce(x: Tensor, group: Group) -> Pending:
    """x summed over the group, in place."""
    work = dist.all_reduce(x, group=group.handle, async_op=True) if group.size > 1 else None
    return Pending(work, (x,), lambda: x)


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
        started = [all_gather(x, node) for x in (h_TD, weights_Tk, chosen_Tk)]
        h_MD, weights_Mk, chosen_Mk = (p.wait().flatten(0, 1) for p in started)
        ctx.mark_non_differentiable(chosen_Mk)
        return h_MD, weights_Mk, chosen_Mk

    @staticmethod
    def backward(ctx, dh_MD, dweights_Mk, _):
        E = ctx.node.size
        started = [reduce_scatter(d.unflatten(0, (E, -1)), ctx.node, d.dtype) for d in (dh_MD, dweights_Mk)]
        dh_TD, dweights_Tk = (p.wait() for p in started)
        return dh_TD.to(dh_MD.dtype), dweights_Tk, None, None


class Combine(Function):
    """Partial sums of the node's tokens go to the tokens' ranks and are added there in fp32: [E*T, D] -> [T, D].

    Backward: all-gather. The recomputation does not need the result, only its gradient's path: transfer=False."""

    @staticmethod
    def forward(ctx, y_MD, node, transfer):
        ctx.node = node
        if not transfer:
            return y_MD.new_zeros(()).expand(y_MD.shape[0] // node.size, *y_MD.shape[1:])
        return reduce_scatter(y_MD.unflatten(0, (node.size, -1)), node, y_MD.dtype).wait().to(y_MD.dtype)

    @staticmethod
    def backward(ctx, dy_TD):
        return all_gather(dy_TD, ctx.node).wait().flatten(0, 1), None, None


# ------------------------------------------------------------------------------------------------------------------
# Ownership: one table
# ------------------------------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    bucket: str  # parameters of a layer with the same bucket travel together
    optimizer: str
    owner: str  # slice: 1/(N*E) of the bucket's flat buffer | expert: whole experts
    group: str  # gathered and reduced over
    dtype: str  # gathered as: compute | fp32 (tiny, and it keeps norms and router exact)
    decay: bool  # decoupled weight decay


OWNERSHIP = {  # last part of a parameter's name -> rule
    "embed": Rule("embed", "adamw", "slice", "shard", "compute", False),
    "head": Rule("head", "adamw", "slice", "shard", "compute", True),
    "final_norm": Rule("final", "adamw", "slice", "shard", "fp32", False),
    "attn_norm": Rule("control", "adamw", "slice", "shard", "fp32", False),
    "q_norm": Rule("control", "adamw", "slice", "shard", "fp32", False),
    "k_norm": Rule("control", "adamw", "slice", "shard", "fp32", False),
    "moe_norm": Rule("control", "adamw", "slice", "shard", "fp32", False),
    "router": Rule("control", "adamw", "slice", "shard", "fp32", False),
    "q": Rule("dense", "muon", "slice", "shard", "compute", True),
    "k": Rule("dense", "muon", "slice", "shard", "compute", True),
    "v": Rule("dense", "muon", "slice", "shard", "compute", True),
    "o": Rule("dense", "muon", "slice", "shard", "compute", True),
    "shared_gate": Rule("dense", "muon", "slice", "shard", "compute", True),
    "shared_up": Rule("dense", "muon", "slice", "shard", "compute", True),
    "shared_down": Rule("dense", "muon", "slice", "shard", "compute", True),
    "gate": Rule("gate_up", "muon", "expert", "column", "compute", True),
    "up": Rule("gate_up", "muon", "expert", "column", "compute", True),
    "down": Rule("down", "muon", "expert", "column", "compute", True),
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
    """What a rank keeps from step to step: all of it is in the checkpoint."""

    buckets: dict[str, Bucket]
    master: dict[str, Tensor]  # bucket -> fp32 owned values
    moments: dict[str, dict[str, Tensor]]  # bucket -> what its optimizer keeps, fp32
    bias_LX: Tensor  # selection bias of the router, the same on all ranks
    grad: dict[str, Tensor] = field(default_factory=dict)  # bucket -> fp32 owned gradient of this step


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


def init_state(m: Model, grid: Grid, seed: int, device: torch.device) -> State:
    """Masters drawn, moments left empty (optim.init_moments makes them)."""
    buckets, master = make_buckets(m, grid), {}
    for name, bucket in buckets.items():
        flat = torch.zeros(math.prod(bucket.owned))
        for p in pieces(bucket, m, grid):
            flat[p.at : p.at + p.stop - p.start] = initial_values(seed, p.name, p.start, p.stop, init_std(p.name, m))
        master[name] = flat.view(bucket.owned).to(device)
    return State(buckets, master, {}, torch.zeros(m.layers, m.experts, device=device))


# ------------------------------------------------------------------------------------------------------------------
# Weights out, gradients home
# ------------------------------------------------------------------------------------------------------------------


class Gathering(NamedTuple):
    """Buckets on their way."""

    parts: list[tuple[Bucket, Pending]]
    grid: Grid

    def wait(self) -> dict[str, Tensor]:
        """Weights by short name: q [Q, D], ..., and gate_up [X', 2F, D], down [X', D, F]."""
        weights = {}
        for bucket, pending in self.parts:
            whole = pending.wait()
            if bucket.rule.owner == "expert":
                weights[bucket.rule.bucket] = whole.flatten(0, 1)
            else:
                weights |= unpack(bucket, from_shard_order(whole, self.grid))
        return weights


def gather(state: State, names: list[str], grid: Grid, dtype: torch.dtype) -> Gathering:
    """Starts putting the named buckets together, from masters cast to the type they travel in."""
    parts = []
    for name in names:
        bucket = state.buckets[name]
        own = state.master[name].to(dtype if bucket.rule.dtype == "compute" else torch.float32)
        parts.append((bucket, all_gather(own, getattr(grid, bucket.rule.group))))
    return Gathering(parts, grid)


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


class Reduction:
    """A bucket's gradient on its way to its owners, then, with replicas, being added over them."""

    def __init__(self, state: State, bucket: Bucket, grads: dict[str, Tensor], grid: Grid, wire: torch.dtype):
        self.state, self.bucket, self.grid = state, bucket, grid
        group = getattr(grid, bucket.rule.group)
        if bucket.rule.owner == "expert":  # expert-major already: the gradient is the all-to-all's input
            (grad,) = grads.values()
            parts = grad.unflatten(0, (grid.N, -1))
        else:
            flat = torch.zeros(bucket.owned[0] * grid.shard.size, dtype=torch.float32 if bucket.rule.dtype == "fp32" else wire,
                               device=state.master[bucket.name].device)
            for name, view in unpack(bucket, flat).items():
                view.copy_(grads[name])
            parts = to_shard_order(flat, grid)
        self.pending = reduce_scatter(parts, group, torch.float32 if bucket.rule.dtype == "fp32" else wire)

    def add_replicas(self):
        """The own part is complete: start adding it up over the replicas."""
        self.pending = all_reduce(self.pending.wait(), self.grid.replica)

    def finish(self) -> Tensor:
        """Puts the fp32 gradient where the optimizer finds it; returns its squared norm, fp64 on the device."""
        grad = self.pending.wait().view(self.bucket.owned)
        self.state.grad[self.bucket.name] = grad
        return grad.square().sum(dtype=torch.float64)


def reduce(state: State, names: list[str], grads: dict[str, Tensor], grid: Grid, wire: torch.dtype) -> list[Reduction]:
    """Starts the reductions of the named buckets. grads: by short name, as Gathering.wait names the weights."""
    started = []
    for name in names:
        bucket = state.buckets[name]
        keys = [bucket.rule.bucket] if bucket.rule.owner == "expert" else [short for short, _ in bucket.params]
        started.append(Reduction(state, bucket, {k: grads[k] for k in keys}, grid, wire))
    return started


def finish(reductions: list[Reduction]) -> Tensor:
    """Completes reductions; returns the sum of their squared norms, fp64."""
    for reduction in reductions:
        reduction.add_replicas()
    return sum(reduction.finish() for reduction in reductions)


def exchange(values: list[float], grid: Grid, device: torch.device) -> np.ndarray:
    """The values of every rank, fp64 [world, len(values)]: the one small collective at the end of a step.

    A gather rather than a sum, so that all ranks add in the same order and decide the same, and any rank can be named."""
    sent = torch.tensor(values, dtype=torch.float64, device=device)
    return all_gather(sent, grid.world).wait().cpu().numpy()
