"""Optimizers on owned values, and the learning rate. Who updates what: OWNERSHIP (parallel.py) and OPTIMIZERS.

Everything here happens after the backward pass, when each owner holds its fp32 gradient and the global norm is known.
Muon and Mano update whole matrices, the others single values. Experts are whole on their owner, so their update
communicates nothing. A matrix of a dense bucket lies in slices on the ranks of the shard group; for the step it has one
owner there, to which the slices travel in one packed all-to-all and from which the directions come back in another,
while experts are being updated.
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

# --optimizer: what stands in for the method that OWNERSHIP (parallel.py) names; by default matrices inside the layers are Muon's,
# the rest is AdamW's
OPTIMIZERS = {"muon": {}, "mano": {"muon": "mano"}, "adamw": {"muon": "adamw"},
              "sophiag": {"muon": "sophiag", "adamw": "sophiag"}}
MOMENTS = {"muon": ("momentum",), "mano": ("momentum",), "adamw": ("m", "v"), "sophiag": ("m", "h")}
WHOLE = ("muon", "mano")  # these need whole matrices

# Coefficients (a, b, c) of X <- aX + b(XX')X + c(XX')^2 X, one row per iteration: Polar Express, 5 iterations, safety
# 2% (Amsel et al. 2025, arXiv 2505.16932). They bring singular values from [1e-3, 1] close to 1.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
QUINTIC = (3.4445, -4.7750, 2.0315)  # fast for small singular values; all end between 0.7 and 1.2 (Jordan 2024)
NEWTON_SCHULZ = {  # --newton_schulz
    "polar5": POLAR_EXPRESS,
    "quintic5": (QUINTIC,) * 5,
    # DeepSeek-V4 technical report (2026), section 2.4: the last two have 1 as their fixed point, with slope 0, and so end there
    "ten": (QUINTIC,) * 8 + ((2.0, -1.5, 0.5),) * 2,
}
MOMENTUM = 0.95
BETAS, EPS = (0.9, 0.95), 1e-8
SOPHIA_BETAS, SOPHIA_GAMMA, SOPHIA_EPS = (0.96, 0.99), 0.05, 1e-12  # Liu et al. 2023, arXiv 2305.14342


def learning_rate(step: int, steps: int, lr: float, warmup: int, schedule: str, final: float, decay: float = 0.2) -> float:
    """Rate of step 0, 1, ...: linear warmup; then constant; or a cosine down to final * lr at the last step; or wsd (warmup,
    stable, decay; Hu et al. 2024): constant, and over the last `decay` of the steps a line down to final * lr. ramp: exponentially from
    final * lr to lr (lr_find.py)."""
    if step < warmup:
        return lr * (step + 1) / warmup
    if schedule == "constant":
        return lr
    if schedule == "ramp":
        return lr * final ** (1 - step / max(1, steps - 1))
    if schedule == "wsd":
        length = max(1, min(round(decay * steps), steps - warmup))
        return lr * (1 - (1 - final) * min(1.0, max(0, step - (steps - 1 - length)) / length))
    if schedule == "cosine":
        progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
        return lr * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))
    raise ConfigError(f"--schedule={schedule}: unknown; use cosine, constant, wsd or ramp")


def scaled_rate(lr: float, rule: str, tokens: int, reference: int) -> float:
    """The rate for a step of so many tokens, from one that was found at `reference` tokens. rule: none | sqrt (the noise of an
    adaptive update stays the same; Malladi et al. 2022) | linear (Goyal et al. 2017)."""
    powers = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
    if rule not in powers:
        raise ConfigError(f"--lr_scaling={rule}: unknown; use one of {', '.join(powers)}")
    if powers[rule] and not reference:
        raise ConfigError(f"--lr_scaling={rule}: scales --lr={lr:g} from the batch that it was found for; give its tokens per step as "
                          f"--lr_batch (this run's are {tokens})")
    return lr * (tokens / reference) ** powers[rule] if powers[rule] else lr


def clip_scale(grad_norm: float, max_norm: float) -> float:
    """Factor that brings the global norm down to max_norm; 1 below it, or where max_norm is 0."""
    return min(1.0, max_norm / (grad_norm + 1e-12)) if max_norm else 1.0


def kind_of(bucket: Bucket, optimizer: str) -> str:
    """Which method updates a bucket."""
    if optimizer not in OPTIMIZERS:
        raise ConfigError(f"--optimizer={optimizer}: unknown; use one of {', '.join(OPTIMIZERS)}")
    kind = OPTIMIZERS[optimizer].get(bucket.rule.optimizer, bucket.rule.optimizer)
    if kind in WHOLE and (vectors := [name for name, shape in bucket.params if len(shape) != 2]):
        raise ConfigError(f"OWNERSHIP gives {bucket.name} to {kind.capitalize()}, which takes matrices only, and {', '.join(vectors)} "
                          "are none; give them to adamw")
    return kind


def init_moments(state: State, optimizer: str):
    """Creates every moment at once: what is made lazily is missing after a resume."""
    device, offload = state.bias_LX.device, state.copies is not None
    state.moments = {name: {} for name in state.buckets}
    for kind in dict.fromkeys(kind for kinds in MOMENTS.values() for kind in kinds):
        shapes = {name: b.owned for name, b in state.buckets.items() if kind in MOMENTS[kind_of(b, optimizer)]}
        for name, zeros in homes(f"moments {kind}", shapes, device, offload).items():
            state.moments[name][kind] = zeros


# ------------------------------------------------------------------------------------------------------------------
# The exchange of the dense matrices
# ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MuonPlan:
    """Who updates which dense matrix, and which values travel. All packed buffers, of the mixed gradients to the owners and of
    the directions back, have the same layout: by owner, and within an owner by matrix."""

    iteration: str  # of NEWTON_SCHULZ
    owners: dict[str, int]  # matrix -> place in the shard group
    mine: dict[str, tuple[int, ...]]  # matrices of this rank -> shape, in the order of the buffers; of heads (heads, rows, columns)
    slices: list[list[tuple[str, int, int]]]  # for each owner: (bucket, start, stop) of what this rank sends and gets back
    runs: list[list[tuple[str, int, int]]]  # for each rank: (matrix, start, stop) of what it sends to this owner
    buckets: list[str]  # whose values travel
    counts: list[list[int]]  # values from each rank to each owner


def plan_muon(state: State, grid: Grid, m: Model, optimizer: str, iteration: str = "polar5", per_head: bool = False) -> MuonPlan:
    """Longest processing time first on the cost of Newton-Schulz, ties by name and by place: the same on all ranks. per_head: each
    head of q, k and v is a matrix of its own."""
    dense = {name: bucket for name, bucket in state.buckets.items()
             if bucket.rule.owner == "slice" and kind_of(bucket, optimizer) in WHOLE}
    heads = {"q": m.heads, "k": m.kv_heads, "v": m.kv_heads} if per_head else {}
    shapes = {f"{name.removesuffix(bucket.rule.bucket)}{short}":
              (heads[short], rows // heads[short], columns) if short in heads else (rows, columns)
              for name, bucket in dense.items() for short, (rows, columns) in bucket.params}
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
    return MuonPlan(iteration, owners, mine, slices, runs, list(dense), counts)


def newton_schulz_cost(shape: tuple[int, ...]) -> int:
    """Multiplications of an iteration: XX', its square, and a product with X."""
    short, long = sorted(shape[-2:])
    return math.prod(shape[:-2]) * short * short * (2 * long + short)


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


def send_slices(values: dict[str, Tensor], plan: MuonPlan, grid: Grid, dtype: torch.dtype, purpose: str) -> Pending:
    """To each owner, this rank's slices of its matrices."""
    packed = [values[bucket][start:stop] for to in plan.slices for bucket, start, stop in to]
    device = next(iter(values.values())).device
    return all_to_all_uneven(concatenate(packed, dtype, device), sizes(plan.slices), sizes(plan.runs), grid.shard, purpose)


def assemble(packed: Tensor, plan: MuonPlan) -> dict[str, Tensor]:
    """Whole matrices from the slices that have come."""
    matrices = {name: packed.new_empty(math.prod(shape)) for name, shape in plan.mine.items()}
    runs = [run for theirs in plan.runs for run in theirs]
    for (name, start, stop), part in zip(runs, packed.split([stop - start for _, start, stop in runs])):
        matrices[name][start:stop] = part
    return {name: matrices[name].view(shape) for name, shape in plan.mine.items()}


def send_directions(mixed: Tensor, weights: Tensor | None, plan: MuonPlan, grid: Grid, dtype: torch.dtype, step: int) -> Pending:
    """Whole matrices are put together, their directions found, and the slices of these sent back to where they came from. mixed and,
    for Mano, weights: as they came."""
    matrices = assemble(mixed, plan)
    where = assemble(weights, plan) if weights is not None else {}
    for name, matrix in matrices.items():
        matrices[name] = (mano_direction(matrix, where.pop(name), step) if weights is not None else
                          muon_direction(matrix, dtype, NEWTON_SCHULZ[plan.iteration])).flatten()
    back = [matrices[name][start:stop] for theirs in plan.runs for name, start, stop in theirs]
    return all_to_all_uneven(concatenate(back, dtype, mixed.device), sizes(plan.runs), sizes(plan.slices), grid.shard,
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


EVERY = ("master", "momentum", "m", "v", "h")


def phases(state: State, plan: MuonPlan) -> list[tuple[list[str], tuple[str, ...]]]:
    """What a step changes, in this order: (buckets, which of their tensors). `update` goes by it, and a checkpoint that is
    written beside training, so that the next step finds written first what it changes first."""
    gate_up, down = ([n for n, b in state.buckets.items() if b.rule.bucket == kind] for kind in ("gate_up", "down"))
    rest = [name for name in state.buckets if name not in {*plan.buckets, *gate_up, *down}]
    return [(plan.buckets, ("momentum",)), (gate_up, EVERY), (rest + down[: len(down) // 2], EVERY), (plan.buckets, ("master",)),
            (down[len(down) // 2 :], EVERY)]


def chunks(state: State, names: list[str], kinds: tuple[str, ...], size: int, grad: bool,
           read: tuple[str, ...] = ()) -> Iterator[Chunk]:
    """The named buckets in parts of about `size` values on the device: whole experts, or runs of a flat buffer; 0: a bucket at a
    time. kinds: which of master and moments will change; each bucket has some. grad: the gradient, too; read: what else is
    needed."""

    def parts():
        for name in names:
            tensors = {"master": state.master[name], **state.moments[name]}
            rows, values = len(tensors["master"]), tensors["master"].numel()
            tensors = {kind: x for kind, x in tensors.items() if kind in (*kinds, *read)}
            if grad:
                tensors["grad"] = state.grad.pop(name)
            # of a flat buffer whole vectors of any processor: the end of an odd chunk would be rounded another way
            step = rows if not size else -(-size // 1024) * 1024 if rows == values else max(1, size * rows // values)
            for start in range(0, rows, step):
                at = slice(start, min(start + step, rows))
                state.before_change(name, at, kinds)
                yield (name, at), {kind: x[at] for kind, x in tensors.items()}

    for (name, at), tensors in stream(parts(), state.copies, ("grad", *read)):
        yield Chunk(state.buckets[name], at, tensors)


def update(state: State, grid: Grid, plan: MuonPlan, optimizer: str, lr: float, decay: float, clip: float, step: int,
           transport: Transport, dtype: torch.dtype = torch.bfloat16, chunk: int = 0):
    """One optimizer step on every owned value; empties state.grad. step counts from 0; dtype: of Newton-Schulz and of the
    dense matrices on the wire; chunk: values that are updated at a time, for state that streams from the host, 0: a
    bucket. In order (-> starts, <- is waited for):

      -> dense slices to their owners
         update gate and up
      <- whole matrices; find their directions; -> these back to the slices
         update norms, router, embedding, head, and down of half of the layers
      <- directions; update the dense slices; -> refresh of the node-resident weights
         update down of the other half
      <- refresh"""

    def keep_own(part: Chunk):
        if state.copies:  # what travels of it stays on the device
            state.own[part.bucket.name][part.at] = travelling(part.tensors["master"], part.bucket, transport)

    def update_own(names: list[str], kinds: tuple[str, ...]):
        for part in chunks(state, names, kinds, chunk, grad=True):
            wd, kind = decay if part.bucket.rule.decay else 0.0, kind_of(part.bucket, optimizer)
            if kind == "adamw":
                adamw(**part.tensors, lr=lr, decay=wd, clip=clip, step=step)
            elif kind == "sophiag":
                sophia(**part.tensors, lr=lr, decay=wd, clip=clip)
            else:  # experts: gate and up are separate matrices
                update_experts(part, kind, plan, lr, wd, clip, step, dtype)
            keep_own(part)

    momentum, gate_up, others, dense, last = phases(state, plan)
    mano, device = optimizer == "mano", state.bias_LX.device
    mixed, weights = ({name: torch.empty_like(state.master[name], device=device) for name in plan.buckets if wanted}
                      for wanted in (True, mano))
    for part in chunks(state, *momentum, chunk, grad=True, read=("master",) if mano else ()):
        mixed[part.bucket.name][part.at] = mix_momentum(part.tensors["momentum"], part.tensors["grad"], clip)
        if mano:
            weights[part.bucket.name][part.at] = part.tensors["master"]

    going = send_slices(mixed, plan, grid, dtype, "muon momentum") if mixed else None
    beside = send_slices(weights, plan, grid, dtype, "mano weights") if weights else None
    del weights
    update_own(*gate_up)
    coming = send_directions(going.wait(), beside and beside.wait(), plan, grid, dtype, step) if mixed else None
    update_own(*others)
    if mixed:
        directions = mixed  # in the same place: slices that have gone out come back as directions; padding stays zero
        slices = [run for to in plan.slices for run in to]
        for (name, start, stop), part in zip(slices, coming.wait().split([stop - start for _, start, stop in slices])):
            directions[name][start:stop] = part
        for part in chunks(state, *dense, chunk, grad=False):
            apply_direction(part.tensors["master"], directions[part.bucket.name][part.at], lr, decay)
            keep_own(part)
    finish_refresh = start_refresh(state, grid, transport)
    update_own(*last)
    finish_refresh()


def update_experts(part: Chunk, kind: str, plan: MuonPlan, lr: float, decay: float, clip: float, step: int, dtype: torch.dtype):
    master, shape = part.tensors["master"], (-1, *part.bucket.params[0][1])
    mixed = mix_momentum(part.tensors["momentum"], part.tensors["grad"], clip).view(shape)
    direction = (mano_direction(mixed, master.view(shape), step) if kind == "mano" else
                 muon_direction(mixed, dtype, NEWTON_SCHULZ[plan.iteration]))
    apply_direction(master, direction.view_as(master), lr, decay)


def mix_momentum(momentum: Tensor, grad: Tensor, clip: float) -> Tensor:
    """Nesterov: momentum <- mu * momentum + g; returns g + mu * momentum. The momentum changes in place."""
    grad = grad * clip
    momentum.mul_(MOMENTUM).add_(grad)
    return grad.add_(momentum, alpha=MOMENTUM)


def muon_direction(matrices: Tensor, dtype: torch.dtype, coefficients=POLAR_EXPRESS) -> Tensor:
    """Orthogonal factor of each matrix [..., rows, columns] times 0.2 sqrt(max(rows, columns)), fp32.

    The factor gives an element the size of an AdamW update, so both share a learning rate (Liu et al. 2025, Moonlight)."""
    factor = orthogonalise(matrices, dtype, coefficients).to(torch.promote_types(dtype, torch.float32))
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


def mano_direction(mixed: Tensor, weights: Tensor, step: int) -> Tensor:
    """Mano (Gu and Xie 2026, arXiv 2601.23000): of the momentum of each matrix [..., rows, columns] what is perpendicular to the
    weights, column by column in even steps and row by row in odd ones, every such vector scaled to the same length. fp32 or wider.

    With Nesterov's momentum, which the authors have found better since. The factor 0.2 sqrt(length of a vector) gives an element
    the size of an AdamW update, as in the paper. A vector that is parallel to its weights (a single number always is) has no
    perpendicular part but rounding, which must not be scaled up."""
    dim, wide = -2 + step % 2, torch.promote_types(mixed.dtype, torch.float32)
    mixed, unit = mixed.to(wide), torch.nn.functional.normalize(weights.to(wide), dim=dim, eps=1e-15)
    across = mixed - (mixed * unit).sum(dim, keepdim=True) * unit
    rounding = 16 * torch.finfo(wide).eps * torch.linalg.vector_norm(mixed, dim=dim, keepdim=True)
    norm = torch.linalg.vector_norm(across, dim=dim, keepdim=True)
    across = torch.where(norm > rounding, across, 0.0)
    return across / norm.clamp(min=1e-15) * (0.2 * math.sqrt(mixed.shape[dim]))


def apply_direction(master: Tensor, direction: Tensor, lr: float, decay: float):
    master.mul_(1 - lr * decay).sub_(direction, alpha=lr)


def adamw(master: Tensor, grad: Tensor, m: Tensor, v: Tensor, lr: float, decay: float, clip: float, step: int):
    """AdamW with bias correction (Loshchilov and Hutter 2019); all fp32, in place, torch's fused kernel: one pass over memory.
    The gradient is scaled in place as well."""
    # full, unlike tensor, copies nothing from the host, which would wait for it
    unscale, count = (torch.full((), x, dtype=torch.float32, device=master.device) for x in (1 / clip, step + 1))
    torch._fused_adamw_([master], [grad], [m], [v], [], [count], lr=lr, beta1=BETAS[0], beta2=BETAS[1], weight_decay=decay,
                        eps=EPS, amsgrad=False, maximize=False, grad_scale=unscale)


def sophia(master: Tensor, grad: Tensor, m: Tensor, h: Tensor, lr: float, decay: float, clip: float):
    """Sophia-G (Liu et al. 2023): the first moment over the curvature h (see measure_curvature), each element's step at most lr.
    In place."""
    m.mul_(SOPHIA_BETAS[0]).add_(grad, alpha=(1 - SOPHIA_BETAS[0]) * clip)
    step = (m / (SOPHIA_GAMMA * h).clamp_(min=SOPHIA_EPS)).clamp_(-1, 1)
    master.mul_(1 - lr * decay).sub_(step, alpha=lr)


def measure_curvature(state: State, targets: float, chunk: int = 0):
    """Moves h towards targets * g^2, where state.grad is g: the gradient of the mean loss over `targets` labels that were drawn from
    the model's own predictions. This is the Gauss-Newton-Bartlett estimate of the diagonal of the Gauss-Newton matrix (Liu et al.
    2023, algorithm 2). Empties state.grad."""
    for part in chunks(state, list(state.buckets), ("h",), chunk, grad=True):
        part.tensors["h"].mul_(SOPHIA_BETAS[1]).addcmul_(part.tensors["grad"], part.tensors["grad"],
                                                         value=(1 - SOPHIA_BETAS[1]) * targets)
