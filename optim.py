"""Optimizers on owned values: Muon for the matrices inside the layers, AdamW for the rest, and the learning rate.

Everything here happens after the backward pass, when each owner holds its fp32 gradient and the global norm is known.
Experts are whole on their owner, so their Muon update communicates nothing; the matrices of a dense bucket are put
together from the slices of the shard group, and each rank keeps its slice of the result.
"""

import math

import torch
from torch import Tensor

from model import ConfigError, Model
from parallel import Bucket, Grid, Pending, State, all_gather, from_shard_order, slice_index, unpack

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
    return "adamw" if optimizer == "adamw" else bucket.rule.optimizer


def init_moments(state: State, optimizer: str):
    """Creates every moment at once: what is made lazily is missing after a resume."""
    for name, bucket in state.buckets.items():
        kinds = {"muon": ("momentum",), "adamw": ("m", "v")}[kind_of(bucket, optimizer)]
        state.moments[name] = {k: torch.zeros_like(state.master[name]) for k in kinds}


def update(state: State, grid: Grid, m: Model, optimizer: str, lr: float, decay: float, clip: float, step: int,
           dtype: torch.dtype = torch.bfloat16):
    """One optimizer step on every owned value; empties state.grad. step counts from 0; dtype: Newton-Schulz."""
    gathering: dict[str, Pending] = {}
    for name, bucket in state.buckets.items():  # mixed gradients of the dense matrices set out first
        if kind_of(bucket, optimizer) == "muon" and bucket.rule.owner == "slice":
            mixed = mix_momentum(state.moments[name]["momentum"], state.grad.pop(name), clip)
            gathering[name] = all_gather(mixed, grid.shard)
    for name, bucket in state.buckets.items():
        if name in gathering:
            continue
        master, wd = state.master[name], decay if bucket.rule.decay else 0.0
        if kind_of(bucket, optimizer) == "adamw":
            adamw(master, state.grad.pop(name), **state.moments[name], lr=lr, decay=wd, clip=clip, step=step)
        else:
            mixed = mix_momentum(state.moments[name]["momentum"], state.grad.pop(name), clip)
            matrices = mixed.view(-1, *bucket.params[0][1])  # gate and up are separate matrices
            apply_muon(master, muon_direction(matrices, dtype).view_as(master), lr, wd)
    for name, pending in gathering.items():
        bucket, master = state.buckets[name], state.master[name]
        flat = from_shard_order(pending.wait(), grid)
        for matrix in unpack(bucket, flat).values():
            matrix.copy_(muon_direction(matrix, dtype))
        own = slice_index(grid, grid.n, grid.e) * master.numel()
        apply_muon(master, flat[own : own + master.numel()], lr, decay if bucket.rule.decay else 0.0)


def mix_momentum(momentum: Tensor, grad: Tensor, clip: float) -> Tensor:
    """Nesterov: momentum <- mu * momentum + g; returns g + mu * momentum. The momentum changes in place."""
    grad = grad * clip
    momentum.mul_(MOMENTUM).add_(grad)
    return grad.add_(momentum, alpha=MOMENTUM)


def muon_direction(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Orthogonal factor of each matrix [..., rows, columns] times 0.2 sqrt(max(rows, columns)), fp32.

    The factor gives an element the size of an AdamW update, so both share a learning rate (Liu et al. 2025, Moonlight)."""
    return orthogonalise(matrices, dtype).to(matrices.dtype) * (0.2 * math.sqrt(max(matrices.shape[-2:])))


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
    """AdamW with bias correction (Loshchilov and Hutter 2019); all fp32, in place."""
    grad = grad * clip
    m.lerp_(grad, 1 - BETAS[0])
    v.lerp_(grad.square_(), 1 - BETAS[1])
    scale = math.sqrt(1 - BETAS[1] ** (step + 1))
    denominator = v.sqrt().div_(scale).add_(EPS)
    master.mul_(1 - lr * decay).addcdiv_(m, denominator, value=-lr / (1 - BETAS[0] ** (step + 1)))
