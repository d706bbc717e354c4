"""Optimizers on owned values: Muon for the matrices inside the layers, AdamW for the rest, and the learning rate.

Everything here happens after the backward pass, when each owner holds its fp32 gradient and the global norm is known.
Experts are whole on their owner, so their Muon update communicates nothing. A matrix of a dense bucket lies in slices on
the ranks of the shard group; for the step it has one owner there, to which the slices travel in one packed all-to-all
and from which the directions come back in another, while experts are being updated.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Iterator, NamedTuple

import torch
from torch import Tensor

from model import ConfigError, Model
from offload import homes, stream
from parallel import (Bucket, Grid, Pending, State, Transport, all_to_all_uneven, make_grid, pieces, share_texts, start_refresh,
                      travelling)

# Coefficients (a, b, c) of X <- aX + b(XX')X + c(XX')^2 X, one row per iteration: Polar Express, 5 iterations, safety
# 2% (Amsel et al. 2025, arXiv 2505.16932). They bring singular values from [1e-3, 1] close to 1.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
MOMENTUM = 0.95
BETAS, EPS = (0.9, 0.95), 1e-8
MOMENTS = {"muon": ("momentum",), "adamw": ("m", "v")}


def learning_rate(step: int, steps: int, lr: float, warmup: int, schedule: str, final: float) -> float:
    """Rate of step 0, 1, ...: linear warmup, then constant, or a cosine down to final * lr at the last step."""
    if step < warmup:
        return lr * (step + 1) / warmup
    if schedule == "constant":
        return lr
    if schedule == "cosine":
        progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
        return lr * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))
    raise ConfigError(f"--schedule={schedule}: unknown; use cosine or constant")


def clip_scale(grad_norm: float, max_norm: float) -> float:
    """Factor that brings the global norm down to max_norm; 1 below it, or where max_norm is 0."""
    return min(1.0, max_norm / (grad_norm + 1e-12)) if max_norm else 1.0


def kind_of(bucket: Bucket, optimizer: str) -> str:
    """Which optimizer updates a bucket: the table's, or AdamW for everything with --optimizer=adamw."""
    if optimizer not in ("muon", "adamw"):
        raise ConfigError(f"--optimizer={optimizer}: unknown; use muon or adamw")
    kind = "adamw" if optimizer == "adamw" else bucket.rule.optimizer
    if kind == "muon" and (vectors := [name for name, shape in bucket.params if len(shape) != 2]):
        raise ConfigError(f"OWNERSHIP gives {bucket.name} to Muon, which takes matrices only, and {', '.join(vectors)} are none; give "
                          "them to adamw")
    return kind


def init_moments(state: State, optimizer: str):
    """Creates every moment at once: what is made lazily is missing after a resume."""
    device, offload = state.bias_LX.device, state.copies is not None
    state.moments = {name: {} for name in state.buckets}
    for kind in ("momentum", "m", "v"):
        shapes = {name: b.owned for name, b in state.buckets.items() if kind in MOMENTS[kind_of(b, optimizer)]}
        for name, zeros in homes(f"moments {kind}", shapes, device, offload).items():
            state.moments[name][kind] = zeros


# ------------------------------------------------------------------------------------------------------------------
# The exchange of the dense matrices
# ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MuonPlan:
    """Who orthogonalises which dense matrix, and which values travel. Both packed buffers, of the mixed gradients to the
    owners and of the directions back, have the same layout: by owner, and within an owner by matrix."""

    owners: dict[str, int]  # matrix -> place in the shard group
    mine: dict[str, tuple[int, int]]  # matrices of this rank -> shape, in the order of the buffers
    slices: list[list[tuple[str, int, int]]]  # for each owner: (bucket, start, stop) of what this rank sends and gets back
    runs: list[list[tuple[str, int, int]]]  # for each rank: (matrix, start, stop) of what it sends to this owner
    buckets: list[str]  # whose values travel
    counts: list[list[int]]  # values from each rank to each owner


def plan_muon(state: State, grid: Grid, m: Model, optimizer: str) -> MuonPlan:
    """Longest processing time first on the cost of Newton-Schulz, ties by name and by place: the same on all ranks."""
    dense = {name: bucket for name, bucket in state.buckets.items()
             if bucket.rule.owner == "slice" and kind_of(bucket, optimizer) == "muon"}
    shapes = {f"{name.removesuffix(bucket.rule.bucket)}{short}": shape
              for name, bucket in dense.items() for short, shape in bucket.params}
    load, owners = [0] * grid.shard.size, {}
    for matrix in sorted(shapes, key=lambda name: (-newton_schulz_cost(shapes[name]), name)):
        owners[matrix] = load.index(min(load))
        load[owners[matrix]] += newton_schulz_cost(shapes[matrix])
    order = {matrix: i for i, matrix in enumerate(shapes)}

    def pieces_of(place: int) -> list:
        """(matrix, start, stop, bucket, at) that a rank of the shard group has, in the order of the buffers."""
        one = make_grid(place, grid.shard.size, grid.E, 1, m, connect=False)
        found = [(p.name, p.start, p.stop, name, p.at) for name, bucket in dense.items() for p in pieces(bucket, m, one)]
        return sorted(found, key=lambda p: order[p[0]])

    slices, runs, counts = [[] for _ in load], [], [[0] * grid.shard.size for _ in load]
    for place in range(grid.shard.size):
        theirs = pieces_of(place)
        runs.append([(name, start, stop) for name, start, stop, *_ in theirs if owners[name] == grid.shard.index])
        for name, start, stop, *_ in theirs:
            counts[place][owners[name]] += stop - start
        if place == grid.shard.index:
            for name, start, stop, bucket, at in theirs:
                slices[owners[name]].append((bucket, at, at + stop - start))
    mine = {name: shapes[name] for name in shapes if owners[name] == grid.shard.index}
    return MuonPlan(owners, mine, slices, runs, list(dense), counts)


def newton_schulz_cost(shape: tuple[int, int]) -> int:
    """Multiplications of an iteration: XX', its square, and a product with X."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)


def check_plan(plan: MuonPlan, grid: Grid, device: torch.device):
    """Before any matrix travels: every value of an owned matrix comes from exactly one rank, and all ranks have the same owners
    and counts. Raises RuntimeError on all ranks otherwise."""
    torn = ""
    for name, shape in plan.mine.items():
        runs = sorted((start, stop) for theirs in plan.runs for matrix, start, stop in theirs if matrix == name)
        ends = [0, *(stop for _, stop in runs)]
        if [start for start, _ in runs] != ends[:-1] or ends[-1] != math.prod(shape):
            torn = torn or f"the slices of {name} do not make up its {math.prod(shape)} values: {runs}"
    digest = hashlib.sha256(json.dumps([plan.owners, plan.counts]).encode()).hexdigest()
    seen = share_texts(torn or digest, grid, device)
    if broken := [f"rank {rank}: {text}" for rank, text in enumerate(seen) if len(text) != len(digest)]:
        raise RuntimeError(f"Muon exchange: {broken[0]}")
    if different := [rank for rank, text in enumerate(seen) if text != seen[0]]:
        raise RuntimeError(f"Muon exchange: ranks {different} have another plan than rank 0; do all ranks run the same code?")


def send_slices(mixed: dict[str, Tensor], plan: MuonPlan, grid: Grid, dtype: torch.dtype) -> Pending:
    """To each owner, this rank's slices of its matrices."""
    packed = [mixed[bucket][start:stop] for to in plan.slices for bucket, start, stop in to]
    device = next(iter(mixed.values())).device
    return all_to_all_uneven(concatenate(packed, dtype, device), sizes(plan.slices), sizes(plan.runs), grid.shard,
                             "muon momentum")


def send_directions(packed: Tensor, plan: MuonPlan, grid: Grid, dtype: torch.dtype) -> Pending:
    """Whole matrices are put together, orthogonalised, and their slices sent back to where they came from."""
    matrices = {name: packed.new_empty(math.prod(shape)) for name, shape in plan.mine.items()}
    runs = [run for theirs in plan.runs for run in theirs]
    for (name, start, stop), part in zip(runs, packed.split([stop - start for _, start, stop in runs])):
        matrices[name][start:stop] = part
    for name, shape in plan.mine.items():
        matrices[name] = muon_direction(matrices[name].view(shape), dtype).flatten()
    back = [matrices[name][start:stop] for name, start, stop in runs]
    return all_to_all_uneven(concatenate(back, dtype, packed.device), sizes(plan.runs), sizes(plan.slices), grid.shard,
                             "muon direction")


def concatenate(parts: list[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Parts as one flat tensor in the type they travel in; empty where there are none."""
    return torch.cat([torch.empty(0, dtype=dtype, device=device), *(part.to(dtype) for part in parts)])


def sizes(runs: list[list[tuple[str, int, int]]]) -> list[int]:
    return [sum(stop - start for _, start, stop in run) for run in runs]


# ------------------------------------------------------------------------------------------------------------------
# The step
# ------------------------------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """A part of a bucket that is updated at a time: `at` of the flat buffer's values, or of the owned experts."""

    bucket: Bucket
    at: slice
    tensors: dict[str, Tensor]  # master, grad, momentum, ...; on the device


EVERY = ("master", "momentum", "m", "v")


def phases(state: State, plan: MuonPlan) -> list[tuple[list[str], tuple[str, ...]]]:
    """What a step changes, in this order: (buckets, which of their tensors). `update` goes by it, and a checkpoint that is
    written beside training, so that the next step finds written first what it changes first."""
    gate_up, down = ([n for n, b in state.buckets.items() if b.rule.bucket == kind] for kind in ("gate_up", "down"))
    rest = [name for name in state.buckets if name not in {*plan.buckets, *gate_up, *down}]
    return [(plan.buckets, ("momentum",)), (gate_up, EVERY), (rest + down[: len(down) // 2], EVERY), (plan.buckets, ("master",)),
            (down[len(down) // 2 :], EVERY)]


def chunks(state: State, names: list[str], kinds: tuple[str, ...], size: int, grad: bool) -> Iterator[Chunk]:
    """The named buckets in parts of about `size` values on the device: whole experts, or runs of a flat buffer; 0: a bucket at a
    time. kinds: which of master and moments are needed; each bucket has some. grad: the gradient, too."""

    def parts():
        for name in names:
            tensors = {"master": state.master[name], **state.moments[name]}
            rows, values = len(tensors["master"]), tensors["master"].numel()
            tensors = {kind: x for kind, x in tensors.items() if kind in kinds}
            if grad:
                tensors["grad"] = state.grad.pop(name)
            # of a flat buffer whole vectors of any processor: the end of an odd chunk would be rounded another way
            step = rows if not size else -(-size // 1024) * 1024 if rows == values else max(1, size * rows // values)
            for start in range(0, rows, step):
                at = slice(start, min(start + step, rows))
                state.before_change(name, at, kinds)
                yield (name, at), {kind: x[at] for kind, x in tensors.items()}

    for (name, at), tensors in stream(parts(), state.copies):
        yield Chunk(state.buckets[name], at, tensors)


def update(state: State, grid: Grid, plan: MuonPlan, optimizer: str, lr: float, decay: float, clip: float, step: int,
           transport: Transport, dtype: torch.dtype = torch.bfloat16, chunk: int = 0):
    """One optimizer step on every owned value; empties state.grad. step counts from 0; dtype: of Newton-Schulz and of the
    dense matrices on the wire; chunk: values that are updated at a time, for state that streams from the host, 0: a
    bucket. In order (-> starts, <- is waited for):

      -> dense slices to their owners
         update gate and up
      <- whole matrices; orthogonalise them; -> directions back to the slices
         update norms, router, embedding, head, and down of half of the layers
      <- directions; update the dense slices; -> refresh of the node-resident weights
         update down of the other half
      <- refresh"""

    def keep_own(part: Chunk):
        if state.copies:  # what travels of it stays on the device
            state.own[part.bucket.name][part.at] = travelling(part.tensors["master"], part.bucket, transport)

    def update_own(names: list[str], kinds: tuple[str, ...]):
        for part in chunks(state, names, kinds, chunk, grad=True):
            wd = decay if part.bucket.rule.decay else 0.0
            if kind_of(part.bucket, optimizer) == "adamw":
                adamw(**part.tensors, lr=lr, decay=wd, clip=clip, step=step)
            else:  # experts: gate and up are separate matrices
                mixed_X = mix_momentum(part.tensors["momentum"], part.tensors["grad"], clip)
                direction = muon_direction(mixed_X.view(-1, *part.bucket.params[0][1]), dtype)
                apply_muon(part.tensors["master"], direction.view_as(mixed_X), lr, wd)
            keep_own(part)

    momentum, gate_up, others, dense, last = phases(state, plan)
    mixed = {name: torch.empty_like(state.moments[name]["momentum"], device=state.bias_LX.device) for name in plan.buckets}
    for part in chunks(state, *momentum, chunk, grad=True):
        mixed[part.bucket.name][part.at] = mix_momentum(part.tensors["momentum"], part.tensors["grad"], clip)

    going = send_slices(mixed, plan, grid, dtype) if mixed else None
    update_own(*gate_up)
    coming = send_directions(going.wait(), plan, grid, dtype) if mixed else None
    update_own(*others)
    if mixed:
        directions = mixed  # in the same place: slices that have gone out come back as directions; padding stays zero
        slices = [run for to in plan.slices for run in to]
        for (name, start, stop), part in zip(slices, coming.wait().split([stop - start for _, start, stop in slices])):
            directions[name][start:stop] = part
        for part in chunks(state, *dense, chunk, grad=False):
            apply_muon(part.tensors["master"], directions[part.bucket.name][part.at], lr, decay)
            keep_own(part)
    finish_refresh = start_refresh(state, grid, transport)
    update_own(*last)
    finish_refresh()


def mix_momentum(momentum: Tensor, grad: Tensor, clip: float) -> Tensor:
    """Nesterov: momentum <- mu * momentum + g; returns g + mu * momentum. The momentum changes in place."""
    grad = grad * clip
    momentum.mul_(MOMENTUM).add_(grad)
    return grad.add_(momentum, alpha=MOMENTUM)


def muon_direction(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Orthogonal factor of each matrix [..., rows, columns] times 0.2 sqrt(max(rows, columns)), fp32.

    The factor gives an element the size of an AdamW update, so both share a learning rate (Liu et al. 2025, Moonlight)."""
    factor = orthogonalise(matrices, dtype).to(torch.promote_types(dtype, torch.float32))
    return factor * (0.2 * math.sqrt(max(matrices.shape[-2:])))


def orthogonalise(matrices: Tensor, dtype: torch.dtype, coefficients=POLAR_EXPRESS) -> Tensor:
    """Newton-Schulz iteration towards U V' of each matrix's own singular value decomposition (Jordan 2024, Muon).

    Every matrix is divided by its own Frobenius norm: over a batch, one large expert would ruin the others."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    # squares of values below 1e-23 vanish in fp32: the momentum of an expert without tokens must fade out, not become NaN
    x = (x / (norm * 1.02 + 1e-15)).to(dtype)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def apply_muon(master: Tensor, direction: Tensor, lr: float, decay: float):
    master.mul_(1 - lr * decay).sub_(direction, alpha=lr)


def adamw(master: Tensor, grad: Tensor, m: Tensor, v: Tensor, lr: float, decay: float, clip: float, step: int):
    """AdamW with bias correction (Loshchilov and Hutter 2019); all fp32, in place, torch's fused kernel: one pass over memory.
    The gradient is scaled in place as well."""
    # full, unlike tensor, copies nothing from the host, which would wait for it
    unscale, count = (torch.full((), x, dtype=torch.float32, device=master.device) for x in (1 / clip, step + 1))
    torch._fused_adamw_([master], [grad], [m], [v], [], [count], lr=lr, beta1=BETAS[0], beta2=BETAS[1], weight_decay=decay,
                        eps=EPS, amsgrad=False, maximize=False, grad_scale=unscale)
