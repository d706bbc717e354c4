"""The model: a table of sizes, and pure functions on weights.

A decoder-only Mixture-of-Experts transformer. One layer is

    x += attention(rms_norm(x))          causal, GQA, RMSNorm on q and k, RoPE on every `rope_every`-th layer
    x += experts(rms_norm(x))            top-k of X SwiGLU experts, optionally one shared expert

Nothing here knows about ranks. `block` takes two callables, `dispatch` and `combine`, which carry tokens to the
experts of the node and their partial sums back; with one rank both are the identity. The schedule in train.py passes
the collectives in.

Shape suffixes: T tokens of a rank, M tokens of its node (those of all its ranks), D width, H query heads, J key-value
heads, K head dimension, X experts, F expert width (gate and up side by side: U = 2F), k chosen experts, P
token-expert pairs, V vocabulary.
"""

import functools
import importlib.util
import inspect
import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Callable, Iterator, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

import sonic
from errors import ConfigError


META_AS: torch.device | None = None  # whose branches meta tensors take in a dry run; None: an accelerator's


def acting(device: torch.device) -> torch.device:
    """The device whose branches to take: in a dry run that of the machine that is planned for."""
    return META_AS if META_AS and device.type == "meta" else device


# ------------------------------------------------------------------------------------------------------------------
# Kernels: what a run may choose
# ------------------------------------------------------------------------------------------------------------------

MOE_KERNELS = ("grouped_mm", "sonic")
ATTENTION = ("auto", "fa2", "fa3")
MOE_KERNEL = "grouped_mm"  # of the experts' products
COMPILER: str | None = None  # torch.compile's backend for the functions marked `fused`; None: they run operation by operation


def choose_kernels(moe_kernel: str, attention: str, compiled: bool, device: torch.device, dtype: str, m: "Model") -> str:
    """Sets what this process runs from here on, and says it in words. Raises ConfigError where it cannot run here."""
    global MOE_KERNEL, COMPILER
    if moe_kernel == "sonic":
        sonic.check(device, dtype, m.width, m.expert_width)
    MOE_KERNEL, COMPILER = moe_kernel, "inductor" if compiled else None
    if compiled:
        try_compiler(device)
    words = [f"experts by {moe_kernel}", choose_attention(attention, device)] + ["block compiled region by region"] * compiled
    return ", ".join(words)


def choose_attention(name: str, device: torch.device) -> str:
    """FlashAttention 3 where it is installed and the GPU is a Hopper (or where it is asked for), else what torch brings. torch
    registers its kernels, which varlen_attn then calls."""
    if device.type != "cuda":
        if name == "fa3":
            raise ConfigError(f"--attention=fa3: needs an NVIDIA Hopper GPU, this rank runs on {device.type}; use "
                              "--attention=auto")
        return "attention by blocks of queries"
    hopper, there = torch.cuda.get_device_capability(device)[0] == 9, importlib.util.find_spec("flash_attn_interface") is not None
    if name == "fa2" or name == "auto" and not (hopper and there):
        return "FlashAttention 2"
    from torch.nn.attention import activate_flash_attention_impl

    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError, ValueError) as error:
        if name == "fa3":
            raise ConfigError(f"--attention=fa3: FlashAttention 3 cannot be used ({error}); install flash_attn_interface with "
                              "its backward pass, or use --attention=fa2") from error
        return f"FlashAttention 2 (3 cannot be used: {error})"
    return "FlashAttention 3"


def fused(function: Callable) -> Callable:
    """A region of the block that torch.compile makes one kernel of, with --compile=True: a function of tensors between two
    products, without autograd (the Functions below state their gradients) and without transfers. Collectives, copies and the
    lifetime of what is saved so stay as the schedule has them."""
    compiled: dict[str, Callable] = {}

    @functools.wraps(function)
    def call(*args):
        if COMPILER is None or args[0].is_meta:
            return function(*args)
        if COMPILER not in compiled:
            compiled[COMPILER] = torch.compile(function, backend=COMPILER, fullgraph=True)
        return compiled[COMPILER](*args)

    return call


def try_compiler(device: torch.device):
    """Raises ConfigError where nothing can be compiled."""
    try:
        rotate(torch.ones(2, 1, 2, device=device), torch.ones(2, 1, device=device), torch.zeros(2, 1, device=device))
    except Exception as error:  # noqa: BLE001 the compiler's own kinds differ from version to version; whatever it is, it is told
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"--compile=True: torch.compile does not work here ({first}); on a CPU it needs a C++ compiler (g++); "
                          "or leave it out") from error


# ------------------------------------------------------------------------------------------------------------------
# Sizes
# ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    groups: int  # routing groups of consecutive experts: part of the model, not of the layout
    expert_width: int
    vocab: int
    seq_len: int  # tokens of a row, by default
    rope_theta: float = 1e6
    rope_every: int = 2  # RoPE on layers 1, 3, 5, ... (2) or on all (1); the others see positions through the mask only
    shared_experts: int = 0  # 0 or 1: an expert that every token passes
    router: str = "softmax"  # softmax, renormalised over the chosen | sigmoid, with a selection bias
    max_per_group: int = 0  # at most this many experts of a group per token; 0: top_k / groups, rounded up

    @property
    def group_limit(self) -> int:
        return self.max_per_group or math.ceil(self.top_k / self.groups)

    @property
    def even_groups(self) -> bool:
        """Every group gets the same number of pairs, so that shapes do not depend on the data (MoGE)."""
        return self.group_limit * self.groups == self.top_k


SIZES = {
    # trains on two CPU cores in minutes
    "debug": Model(4, 256, 4, 2, 64, 16, 4, 4, 128, 4096, seq_len=512, rope_theta=1e4),
    # 15 B parameters, 1.4 B active: meant for one node of four 96 GB GPUs, optimizer state included
    "15b": Model(24, 2048, 32, 4, 128, 128, 8, 4, 768, 32768, seq_len=8192),
    # 177 B parameters, 9.8 B active: meant for 12 nodes and more
    "177b": Model(48, 4096, 32, 8, 128, 192, 8, 4, 1536, 131072, seq_len=32768),
    # 1.08 T parameters, 32 B active: 96 nodes
    "1t": Model(74, 6144, 64, 8, 128, 384, 8, 4, 2048, 131072, seq_len=65536),
}


def model_of(size: str, **changes) -> Model:
    """The size's model with some fields replaced. Raises ConfigError if the size is unknown or the parts do not fit."""
    if size not in SIZES:
        raise ConfigError(f"--size={size}: unknown; sizes are {', '.join(SIZES)}")
    m = replace(SIZES[size], **{k: v for k, v in changes.items() if v is not None})
    for name in ("layers", "width", "heads", "kv_heads", "head_dim", "experts", "top_k", "groups", "expert_width",
                 "vocab", "rope_every"):
        if getattr(m, name) < 1:
            raise ConfigError(f"--{name}={getattr(m, name)}: must be at least 1")
    for name in ("width", "expert_width"):
        if getattr(m, name) % 8:
            raise ConfigError(f"--{name}={getattr(m, name)}: must be a multiple of 8, grouped products want rows of whole "
                              f"16 bytes; use {-(-getattr(m, name) // 8) * 8}")
    if m.heads % m.kv_heads:
        raise ConfigError(f"--kv_heads={m.kv_heads}: must divide the {m.heads} query heads; "
                          f"nearest that do: {_divisors_near(m.heads, m.kv_heads)}")
    if m.head_dim % 2:
        raise ConfigError(f"--head_dim={m.head_dim}: must be even, RoPE rotates pairs")
    if m.experts % m.groups:
        raise ConfigError(f"--groups={m.groups}: must divide the {m.experts} experts; "
                          f"nearest that do: {_divisors_near(m.experts, m.groups)}")
    if m.top_k > m.experts:
        raise ConfigError(f"--top_k={m.top_k}: more than the {m.experts} experts; lower it")
    c = m.group_limit
    if m.max_per_group < 0 or c > m.experts // m.groups or c * m.groups < m.top_k:
        raise ConfigError(f"--max_per_group={m.max_per_group}: at most {m.experts // m.groups} experts are in a group, and "
                          f"{m.groups} groups must offer top_k={m.top_k}; use {math.ceil(m.top_k / m.groups)} to "
                          f"{min(m.top_k, m.experts // m.groups)}")
    if m.router not in ("softmax", "sigmoid"):
        raise ConfigError(f"--router={m.router}: unknown; use softmax or sigmoid")
    if m.shared_experts not in (0, 1):
        raise ConfigError(f"--shared_experts={m.shared_experts}: use 0 or 1")
    return m


def _divisors_near(n: int, near: int) -> str:
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    return ", ".join(str(d) for d in sorted(sorted(divisors, key=lambda d: abs(d - near))[:3]))


def layer_shapes(m: Model) -> dict[str, tuple[int, ...]]:
    """Parameters of a layer except the routed experts: name -> shape; a matrix is [outputs, inputs]."""
    D, Q, KV = m.width, m.heads * m.head_dim, m.kv_heads * m.head_dim
    shapes = {"q": (Q, D), "k": (KV, D), "v": (KV, D), "o": (D, Q)}
    if m.shared_experts:
        shapes |= {"shared_gate": (m.expert_width, D), "shared_up": (m.expert_width, D), "shared_down": (D, m.expert_width)}
    return shapes | {"attn_norm": (D,), "q_norm": (m.head_dim,), "k_norm": (m.head_dim,), "moe_norm": (D,),
                     "router": (m.experts, D)}


def expert_shapes(m: Model) -> dict[str, tuple[int, ...]]:
    return {"gate": (m.expert_width, m.width), "up": (m.expert_width, m.width), "down": (m.width, m.expert_width)}


def param_shapes(m: Model) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model by its full name, e.g. layers.3.q or layers.3.experts.17.gate."""
    shapes = {"embed": (m.vocab, m.width)}
    for i in range(m.layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer_shapes(m).items()}
        for x in range(m.experts):
            shapes |= {f"layers.{i}.experts.{x}.{name}": shape for name, shape in expert_shapes(m).items()}
    return shapes | {"final_norm": (m.width,), "head": (m.vocab, m.width)}


def init_std(name: str, m: Model) -> float:
    """Standard deviation of a parameter's initial values; 0 means ones (norms).

    1/sqrt(fan-in); what writes to the residual stream is scaled down by the depth (GPT-2); the head is small, so that
    the first loss is ln V whatever the width."""
    kind = name.rsplit(".", 1)[-1]
    if kind.endswith("norm"):
        return 0.0
    if kind in ("o", "down", "shared_down"):
        fan_in = m.heads * m.head_dim if kind == "o" else m.expert_width
        return 1 / math.sqrt(fan_in * 2 * m.layers)
    if kind == "embed":
        return 1.0
    return (0.2 if kind == "head" else 1.0) / math.sqrt(m.width)


def count_params(m: Model) -> tuple[int, int]:
    """(all, active per token): the embedding table counts in the first only."""
    dense = m.layers * sum(math.prod(s) for s in layer_shapes(m).values()) + m.width + m.vocab * m.width
    expert = sum(math.prod(s) for s in expert_shapes(m).values())
    return dense + m.vocab * m.width + m.layers * m.experts * expert, dense + m.layers * m.top_k * expert


def flops_per_token(m: Model, mean_segment: float) -> float:
    """Floating-point operations that training one token needs: 6 per active parameter and the attention products.
    Recomputation is not counted (model FLOPs, as in MFU)."""
    attention = 6 * m.layers * m.heads * m.head_dim * mean_segment  # causal: half of 12
    return 6 * count_params(m)[1] + attention


# ------------------------------------------------------------------------------------------------------------------
# Autograd functions with stated saved tensors. The composed versions keep several times more alive.
# ------------------------------------------------------------------------------------------------------------------


def wide(x: Tensor) -> Tensor:
    """x for an operation whose other operand is fp32. An accelerator's kernels convert while they read, which spares a pass;
    a CPU is faster with an fp32 copy."""
    return x.float() if acting(x.device).type == "cpu" else x


class RMSNorm(Function):
    """y = x / rms(x) * w in fp32, returned in x's type. Saves x, w and one fp32 value per row."""

    @staticmethod
    def forward(ctx, x, w, eps):
        y, rstd = normalise(x, w, eps)
        ctx.save_for_backward(x, w, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        return *normalise_grad(dy, *ctx.saved_tensors), None


@fused
def normalise(x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, 1 / rms of each row)."""
    x32 = x.to(torch.float32, copy=True)
    norm = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
    rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(x32.mul_(rstd), w, out=x.new_empty(x.shape)), rstd


@fused
def normalise_grad(dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    dy32, xhat = wide(dy), wide(x) * rstd
    product = dy32 * xhat
    along = (product @ w)[..., None].div_(x.shape[-1])  # mean of dy * w * xhat
    dx32 = (dy32 * w if dy32 is dy else dy32.mul_(w)).addcmul_(xhat, along, value=-1)
    return torch.mul(dx32, rstd, out=x.new_empty(x.shape)), product.flatten(0, -2).sum(0)


def rms_norm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm over the last dimension; w is fp32 (Zhang and Sennrich 2019)."""
    return RMSNorm.apply(x, w, eps)


@lru_cache(maxsize=4)
def rope_cache(theta: float, head_dim: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [length, head_dim / 2] in fp32, shared by all layers. The angles are formed in fp64: in bf16, positions
    beyond a few hundred rotate wrongly."""
    inv_freq = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    angle = torch.arange(length, dtype=torch.float64, device="cpu")[:, None] * inv_freq
    return angle.cos().float().to(device), angle.sin().float().to(device)


def uses_rope(layer: int, m: Model) -> bool:
    return layer % m.rope_every == m.rope_every - 1


class RoPE(Function):
    """Rotates the pairs (x[i], x[i + K/2]) by the position's angle; the backward pass rotates back. Saves nothing of x."""

    @staticmethod
    def forward(ctx, x_THK, cos, sin):
        ctx.tables = (cos, sin)
        return rotate(x_THK, cos, sin)

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.tables
        return rotate(dy, cos, -sin), None, None


@fused
def rotate(x_THK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-rotation ("NeoX") RoPE in fp32 (Su et al. 2021); cos and sin are [T, K/2]."""
    a, b = x_THK.float().chunk(2, -1)
    cos, sin, y_THK = cos[:, None], sin[:, None], torch.empty_like(x_THK)
    left, right = y_THK.chunk(2, -1)
    left.copy_((a * cos).addcmul_(b, sin, value=-1))
    right.copy_((b * cos).addcmul_(a, sin))
    return y_THK


def swiglu(gate_up_PU: Tensor, weight_P: Tensor | None) -> Tensor:
    """silu(gate) * up * weight, [P, F], weight being the routing weight of each row or None. In slabs of rows, which bounds the
    fp32 intermediates (on a CPU they then stay in its cache)."""
    y_PF = gate_up_PU.new_empty(len(gate_up_PU), gate_up_PU.shape[1] // 2)
    for at in slabs(gate_up_PU):
        swiglu_slab(gate_up_PU[at], None if weight_P is None else weight_P[at], y_PF[at])
    return y_PF


@fused
def swiglu_slab(gate_up_PU: Tensor, weight_P: Tensor | None, out_PF: Tensor):
    gate, up = wide(gate_up_PU).chunk(2, -1)
    y = F.silu(gate.float()).mul_(up)
    out_PF.copy_(y if weight_P is None else y.mul_(weight_P[:, None]))


def swiglu_grad(dy_PF: Tensor, gate_up_PU: Tensor, weight_P: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients of gate_up and weight. dy_PF becomes, in place, the value again: the next product's gradient needs it."""
    dgate_up_PU, dweight_P = torch.empty_like(gate_up_PU), None if weight_P is None else torch.empty_like(weight_P)
    for at in slabs(gate_up_PU):
        weights = (None, None) if weight_P is None else (weight_P[at], dweight_P[at])
        swiglu_grad_slab(dy_PF[at], gate_up_PU[at], *weights, dgate_up_PU[at])
    return dgate_up_PU, dweight_P


@fused
def swiglu_grad_slab(dy_PF: Tensor, gate_up_PU: Tensor, weight_P: Tensor | None, dweight_P: Tensor | None, dgate_up_PU: Tensor):
    gate, up = wide(gate_up_PU).chunk(2, -1)
    dgate, dup = dgate_up_PU.chunk(2, -1)
    gate, dy = gate.float(), dy_PF.to(torch.float32, copy=True)
    silu = F.silu(gate)
    dup32, y = silu * dy, silu.mul_(up)
    if weight_P is not None:
        dweight_P.copy_((dup32 * up).sum(-1))
        for x in (dup32, dy, y):
            x.mul_(weight_P[:, None])
    dup.copy_(dup32)
    dgate.copy_(torch.ops.aten.silu_backward(dy.mul_(up), gate))
    dy_PF.copy_(y)


class SwiGLU(Function):
    """silu(gate) * up of a dense layer."""

    @staticmethod
    def forward(ctx, gate_up_TU):
        ctx.save_for_backward(gate_up_TU)
        return swiglu(gate_up_TU, None)

    @staticmethod
    def backward(ctx, dy_TF):
        return swiglu_grad(dy_TF.clone(), *ctx.saved_tensors, None)[0]


def slabs(x: Tensor) -> Iterator[slice]:
    """Rows of x, some at a time."""
    rows = max(1, (2**18 if acting(x.device).type == "cpu" else 2**27) // x.shape[1])
    return (slice(a, a + rows) for a in range(0, len(x), rows))


# ------------------------------------------------------------------------------------------------------------------
# Attention
# ------------------------------------------------------------------------------------------------------------------


class Segments(NamedTuple):
    """The documents inside a row. `bounds` lies on the host, so that launching needs no synchronisation."""

    bounds: list[int]  # [0, ..., T]
    bounds_device: Tensor  # the same, int32


QUERY_BLOCK = 128  # queries that are scored at a time: their scores stay in a CPU's cache, and little is computed to be masked


class SegmentAttention(Function):
    """Causal attention inside each segment, none across, block of queries by block of queries. Saves its inputs; the backward
    pass computes the probabilities again (Dao et al. 2022). Products, and so the scores, in the inputs' type; softmax in fp32.

    A CPU's scaled_dot_product_attention takes 2 to 3 times as long in bf16, forward and backward (LOG.md)."""

    @staticmethod
    def forward(ctx, q_THK, k_TJK, v_TJK, bounds):
        ctx.save_for_backward(q_THK, k_TJK, v_TJK)
        ctx.bounds = bounds
        k_JKT, v_JTK, y_THK = k_TJK.permute(1, 2, 0), v_TJK.transpose(0, 1), torch.empty_like(q_THK)
        for first, a, b in query_blocks(bounds):
            q_JnK = by_kv_head(q_THK[a:b], len(k_JKT))
            p_JnL = probabilities(q_JnK, k_JKT[..., first:b], b - a).to(q_THK.dtype)
            y_THK[a:b] = by_token(torch.bmm(p_JnL, v_JTK[:, first:b]), b - a)
        return y_THK

    @staticmethod
    def backward(ctx, dy_THK):
        q_THK, k_TJK, v_TJK = ctx.saved_tensors
        k_JKT, v_JTK, J = k_TJK.permute(1, 2, 0), v_TJK.transpose(0, 1), k_TJK.shape[1]
        dq_THK, scale = torch.empty_like(q_THK), q_THK.shape[-1] ** -0.5
        wide = torch.promote_types(k_TJK.dtype, torch.float32)
        dk_JTK, dv_JTK = (torch.zeros_like(v_JTK, dtype=wide, memory_format=torch.contiguous_format) for _ in range(2))
        for first, a, b in query_blocks(ctx.bounds):
            q_JnK, dy_JnK = by_kv_head(q_THK[a:b], J), by_kv_head(dy_THK[a:b], J)
            p_JnL = probabilities(q_JnK, k_JKT[..., first:b], b - a)
            dv_JTK[:, first:b] += torch.bmm(p_JnL.to(q_THK.dtype).mT, dy_JnK)
            dp_JnL = torch.bmm(dy_JnK, v_JTK[:, first:b].mT).to(wide)
            ds_JnL = torch._softmax_backward_data(dp_JnL, p_JnL, -1, wide).to(q_THK.dtype)
            dq_THK[a:b] = by_token(torch.bmm(ds_JnL, k_JKT[..., first:b].mT), b - a)
            dk_JTK[:, first:b] += torch.bmm(ds_JnL.mT, q_JnK)
        dk_TJK, dv_TJK = (d.transpose(0, 1).to(k_TJK.dtype) for d in (dk_JTK.mul_(scale), dv_JTK))
        return dq_THK.mul_(scale), dk_TJK, dv_TJK, None


def query_blocks(bounds: list[int]) -> Iterator[tuple[int, int, int]]:
    """(first key, first query, end of both) of each block."""
    for first, end in zip(bounds, bounds[1:]):
        for a in range(first, end, QUERY_BLOCK):
            yield first, a, min(a + QUERY_BLOCK, end)


def by_kv_head(x_nHK: Tensor, J: int) -> Tensor:
    """[n, H, K] -> [J, H/J * n, K]: the queries that share a key-value head together."""
    return x_nHK.unflatten(1, (J, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def by_token(x_JnK: Tensor, n: int) -> Tensor:
    return x_JnK.unflatten(1, (-1, n)).permute(2, 0, 1, 3).flatten(1, 2)


def probabilities(q_JnK: Tensor, k_JKL: Tensor, n: int) -> Tensor:
    """Of the last n of L positions over all L, for each of the query heads that are stacked in q, in fp32 or wider."""
    mask_nL = torch.full((n, k_JKL.shape[-1]), -math.inf, dtype=q_JnK.dtype, device=q_JnK.device).triu_(k_JKL.shape[-1] - n + 1)
    mask_nL = mask_nL.repeat(q_JnK.shape[1] // n, 1).expand(len(q_JnK), -1, -1)
    scores = torch.baddbmm(mask_nL, q_JnK, k_JKL, alpha=q_JnK.shape[-1] ** -0.5)
    return torch.softmax(scores.to(torch.promote_types(scores.dtype, torch.float32)), -1)


def segment_attention(q_THK: Tensor, k_TJK: Tensor, v_TJK: Tensor, segments: Segments) -> Tensor:
    """Causal attention inside each segment, none across; returns [T, H, K]."""
    if acting(q_THK.device).type not in ("cuda", "meta") or q_THK.dtype == torch.float32:
        return SegmentAttention.apply(q_THK, k_TJK, v_TJK, segments.bounds)
    from torch.nn.attention.varlen import varlen_attn

    gqa, cu = q_THK.shape[1] != k_TJK.shape[1], segments.bounds_device
    longest = max(b - a for a, b in zip(segments.bounds, segments.bounds[1:]))
    options = {"enable_gqa": gqa} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}  # torch 2.11 has none
    return varlen_attn(q_THK, k_TJK, v_TJK, cu, cu, longest, longest, window_size=(-1, 0), **options)


def attention(x_TD: Tensor, w: dict[str, Tensor], segments: Segments, rope, m: Model) -> Tensor:
    T = x_TD.shape[0]
    h_TD = rms_norm(x_TD, w["attn_norm"])
    q_THK = rms_norm((h_TD @ w["q"].T).view(T, m.heads, m.head_dim), w["q_norm"])
    k_TJK = rms_norm((h_TD @ w["k"].T).view(T, m.kv_heads, m.head_dim), w["k_norm"])
    v_TJK = (h_TD @ w["v"].T).view(T, m.kv_heads, m.head_dim)
    if rope is not None:
        q_THK, k_TJK = RoPE.apply(q_THK, *rope), RoPE.apply(k_TJK, *rope)
    y_THK = segment_attention(q_THK, k_TJK, v_TJK, segments)
    return y_THK.reshape(T, -1) @ w["o"].T


# ------------------------------------------------------------------------------------------------------------------
# Router
# ------------------------------------------------------------------------------------------------------------------


class RouterLogits(Function):
    """fp32 logits [T, X]: in bf16 about 9% of the tokens tie at the cut. Keeps the input as it is, not its fp32 copy."""

    @staticmethod
    def forward(ctx, h_TD, router_XD):
        ctx.save_for_backward(h_TD, router_XD)
        return h_TD.float() @ router_XD.T

    @staticmethod
    def backward(ctx, d_TX):
        h_TD, router_XD = ctx.saved_tensors
        return (d_TX @ router_XD).to(h_TD.dtype), d_TX.T @ h_TD.float()


@torch.no_grad()
def choose_experts(logits_TX: Tensor, bias_X: Tensor, m: Model) -> Tensor:
    """The k experts of each token, ascending, int32 [T, k].

    First the best `max_per_group` of each group, then the best k of those, both by score + bias; the lower index wins
    a tie. max_per_group = k is plain top-k, k / groups gives each group the same load (MoGE, Tang et al. 2025), values
    between are group-limited routing."""
    T, c, per_group = logits_TX.shape[0], m.group_limit, m.experts // m.groups
    score = torch.softmax(logits_TX, -1) if m.router == "softmax" else torch.sigmoid(logits_TX)
    score = score + bias_X
    if c >= m.top_k or m.groups == 1:
        chosen = best(score, m.top_k)
    else:
        score_TGx = score.view(T, m.groups, per_group)
        in_group = best(score_TGx, c).sort(-1).values
        first = torch.arange(0, m.experts, per_group, device=score.device)[:, None]
        chosen = (in_group + first).flatten(1)
        if not m.even_groups:
            chosen = chosen.gather(1, best(score.gather(1, chosen), m.top_k))
    return chosen.sort(-1).values.to(torch.int32)


def best(score: Tensor, n: int) -> Tensor:
    """Indices of the n largest along the last dimension. A stable sort, since topk may return either of a tie."""
    return score.sort(dim=-1, descending=True, stable=True).indices[..., :n]


class RoutingWeights(Function):
    """Weights of the chosen experts, [T, k] fp32, summing to 1. Saves the weights and the indices, not the logits.

    softmax: renormalising over the chosen makes it the softmax of the chosen logits alone.
    sigmoid: s / sum(s) of the chosen (DeepSeek-V3), as the softmax of log s, which survives very low logits."""

    @staticmethod
    def forward(ctx, logits_TX, chosen_Tk, kind):
        picked = logits_TX.gather(1, chosen_Tk)
        weights = torch.softmax(picked if kind == "softmax" else F.logsigmoid(picked), -1)
        ctx.save_for_backward(weights, torch.sigmoid(picked) if kind == "sigmoid" else None, chosen_Tk)
        ctx.experts = logits_TX.shape[1]
        return weights

    @staticmethod
    def backward(ctx, dweights):
        weights, score, chosen = ctx.saved_tensors
        dpicked = weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
        if score is not None:
            dpicked = dpicked * (1 - score)  # d log s / d logit = 1 - s
        return dpicked.new_zeros(len(dpicked), ctx.experts).scatter_(1, chosen, dpicked), None, None


class RouterLosses(Function):
    """The logits as they are; backward adds the gradients of two losses, each a mean over all `tokens` of the step and a sum over
    layers: aux * X * sum over experts of share * probability, share being the part of the step's pairs that the expert got on
    all ranks (Shazeer et al. 2017, over the global batch as in Qiu et al. 2025, arXiv 2501.11873), and z * logsumexp(logits)^2
    (Zoph et al. 2022). The shares have no gradient; they are known once every rank has routed, before any backward pass."""

    @staticmethod
    def forward(ctx, logits_TX, balance, layer, real):
        ctx.save_for_backward(logits_TX)
        ctx.balance, ctx.layer, ctx.real = balance, layer, real
        return logits_TX.view_as(logits_TX)

    @staticmethod
    def backward(ctx, d_TX):
        (logits_TX,), balance, real = ctx.saved_tensors, ctx.balance, ctx.real
        logits_TX, d_TX = logits_TX[:real], d_TX.clone()
        if balance.aux:
            value_X = balance.aux * logits_TX.shape[1] / balance.tokens * balance.share_LX[ctx.layer].to(logits_TX.dtype)
            p_TX = probability(logits_TX, balance.router)
            along = p_TX * (value_X - (p_TX @ value_X)[:, None])
            d_TX[:real] += along if balance.router == "softmax" else along * (1 - torch.sigmoid(logits_TX))
        if balance.z:
            d_TX[:real] += torch.softmax(logits_TX, -1) * (2 * balance.z / balance.tokens * logits_TX.logsumexp(-1, keepdim=True))
        return d_TX, None, None, None


def probability(logits_TX: Tensor, router: str) -> Tensor:
    """Of each expert, over all of them: what the auxiliary loss evens out."""
    return torch.softmax(logits_TX if router == "softmax" else F.logsigmoid(logits_TX), -1)


class Balance:
    """Where a step's tokens went, over all ranks, and what pushes them apart. Only the forward pass adds to it, never a
    recomputation, and no padding is counted."""

    def __init__(self, m: Model, device: torch.device, tokens: float = 1, aux: float = 0.0, z: float = 0.0):
        """tokens: of all ranks in the step, without padding; aux, z: coefficients of RouterLosses."""
        self.aux, self.z, self.tokens, self.router, self.experts = aux, z, tokens, m.router, m.experts
        # counts; and with losses the summed probabilities and squared logsumexps, for their values
        columns = 2 * m.experts + 1 if aux or z else m.experts
        self.total_LC = torch.zeros(m.layers, columns, dtype=torch.float64, device=device)
        self.share_LX: Tensor | None = None

    def logits(self, layer: int, real: int | None, first: bool, logits_TX: Tensor) -> Tensor:
        """Passes the logits on, with the losses' gradients. first: not a recomputation."""
        if not (self.aux or self.z):
            return logits_TX
        if first:
            with torch.no_grad():
                seen_TX = logits_TX[:real]
                self.total_LC[layer, self.experts : -1] += probability(seen_TX, self.router).sum(0, dtype=torch.float64)
                self.total_LC[layer, -1] += seen_TX.logsumexp(-1).square().sum(dtype=torch.float64)
        return RouterLosses.apply(logits_TX, self, layer, real)

    def count(self, layer: int, real: int | None, chosen_Tk: Tensor):
        index = chosen_Tk[:real].flatten().long()
        self.total_LC[layer].scatter_add_(0, index, torch.ones_like(index, dtype=torch.float64))  # whole numbers: any order

    def summed(self, total_LC: Tensor):
        """total_LC of all ranks added up."""
        self.total_LC = total_LC
        self.share_LX = self.counts_LX / self.counts_LX.sum(1, keepdim=True).clamp(min=1)

    def to_host(self):
        """For all that reads it there: once the step's numbers are known, for after the update it would wait for that too."""
        self.summed(self.total_LC.cpu())

    @property
    def counts_LX(self) -> Tensor:
        return self.total_LC[:, : self.experts]

    def losses(self) -> tuple[float, float]:
        """Values of the auxiliary and the z-loss, coefficients included."""
        if not (self.aux or self.z):
            return 0.0, 0.0
        aux = (self.share_LX * self.total_LC[:, self.experts : -1]).sum() * self.experts
        return self.aux * float(aux) / self.tokens, self.z * float(self.total_LC[:, -1].sum()) / self.tokens


def move_bias(bias_LX: Tensor, counts_LX: Tensor, rate: float):
    """Raises the selection bias of experts that got less than the mean and lowers that of the others, by `rate` (DeepSeek-V3;
    Wang et al. 2024, arXiv 2408.15664). In place."""
    counts_LX = counts_LX.to(bias_LX.device)
    bias_LX += rate * torch.sign(counts_LX.mean(1, keepdim=True) - counts_LX).to(bias_LX.dtype)


# ------------------------------------------------------------------------------------------------------------------
# Experts
# ------------------------------------------------------------------------------------------------------------------


class Pairs(NamedTuple):
    """The token-expert pairs that a rank's experts process, sorted by expert. P rows: the pairs, padding after each expert's,
    and what is left over at the end. Padding has routing weight 0, which makes it zeros from there on."""

    token_P: Tensor  # int64: which token of the node; of padding any
    slot_MS: Tensor  # int64 [M, S]: where a token's (at most S) pairs are in the sorted order; P where it has fewer
    choice_P: Tensor  # int64: index into the flattened [M, k] routing weights; of padding M * k
    offsets_X: Tensor  # int32: end of each expert's rows
    full: bool  # every token has all its S pairs


def row_multiple(device: torch.device) -> int:
    """Each expert's rows are filled up to a multiple of this: a CPU's products are compiled for each new number of rows."""
    return 32 if acting(device).type == "cpu" else 1


def sort_pairs(chosen_Mk: Tensor, mine: range, padded: int, rows: int, slots: int, full: bool = False) -> Pairs:
    """Pairs of the experts in `mine`; offsets for `padded` of them, the surplus being empty. full: every token is known to have
    `slots` of them.

    rows: at least the number of pairs; what lies beyond the last offset is never read back and takes no part in a product's
    result. slots: the most pairs that one token has."""
    M, k = chosen_Mk.shape
    device, count, multiple = chosen_Mk.device, len(mine), row_multiple(chosen_Mk.device)
    P = rows + count * (multiple - 1)
    local_Mk = chosen_Mk.long() - mine.start
    is_mine_Mk = (local_Mk >= 0) & (local_Mk < count)
    key, order = torch.where(is_mine_Mk, local_Mk, count).flatten().sort(stable=True)  # the others' sort to the end
    ends_X = torch.searchsorted(key, torch.arange(1, count + 1, device=device))
    counts_X = ends_X.diff(prepend=ends_X.new_zeros(1))
    room_X = counts_X if multiple == 1 else (counts_X + multiple - 1) // multiple * multiple
    room_ends_X = room_X.cumsum(0)
    shift_X = F.pad(room_ends_X - room_X - (ends_X - counts_X), (0, 1))  # by the padding before; 0 for the others'
    place = torch.where(key < count, torch.arange(M * k, device=device) + shift_X[key], P)  # of each sorted pair
    choice_P = torch.full((P + 1,), M * k, device=device).scatter_(0, place, order)[:P]
    # the inverse: where pair (token, choice) went; then only the local ones of each token, in the first columns
    slot_MS = torch.empty_like(order).scatter_(0, order, place).view(M, k)
    if slots < k:  # choices ascend, so a token's local ones are neighbours
        column = is_mine_Mk.to(torch.int8).argmax(1, keepdim=True) + torch.arange(slots, device=device)
        slot_MS = slot_MS.gather(1, column.clamp(max=k - 1)).masked_fill_(column >= k, P)
    offsets_X = F.pad(room_ends_X, (0, padded - count), value=0).cummax(0).values.to(torch.int32)
    return Pairs((choice_P // k).clamp_(max=M - 1), slot_MS, choice_P, offsets_X, full)


def sum_slots(rows_PD: Tensor, pairs: Pairs) -> Tensor:
    """out[n] = sum over s of rows[slot[n, s]] in fp32, in the order of s; a slot that holds P (the number of rows) adds nothing.

    A gather and a sum, no atomic add: the same bits every time. In slabs of tokens, which bounds the fp32 sums."""
    if pairs.full and pairs.slot_MS.shape[1] == 1:
        return rows_PD.index_select(0, pairs.slot_MS[:, 0])
    out_MD = rows_PD.new_empty(len(pairs.slot_MS), rows_PD.shape[1])
    for at in slabs(out_MD):
        sum_slab(rows_PD, pairs.slot_MS[at], pairs.full, out_MD[at])
    return out_MD


@fused
def sum_slab(rows_PD: Tensor, slot_MS: Tensor, full: bool, out_MD: Tensor):
    P, total = len(rows_PD), None
    for slot in slot_MS.unbind(1):
        part = rows_PD.index_select(0, slot if full else slot.clamp(max=P - 1))
        if not full:
            part.masked_fill_((slot == P)[:, None], 0.0)  # not a product: unread rows may hold NaN
        total = part.float() if total is None else total.add_(wide(part))
    out_MD.copy_(total)


def nothing(like: Tensor, *shape: int) -> Tensor:
    """Zeros of a shape that take no memory: a result that nobody reads."""
    return like.new_zeros(()).expand(shape)


class Experts(Function):
    """Sum over a token's local experts of weight * down(silu(gate(h)) * up(h)), [M, D]; value=False: zeros, with the same graph.

    The routing weight multiplies before the down-projection, so that combining is a plain sum. Kept for the gradient are the
    tokens and the result of the first product; their rows, k times as many values, are gathered and the second product's input
    is computed again (SonicMoE, arXiv 2512.14080)."""

    @staticmethod
    def forward(ctx, h_MD, weights_Mk, gate_up_XUD, down_XDF, pairs, value):
        weight_P = F.pad(weights_Mk.flatten(), (0, 1)).index_select(0, pairs.choice_P)  # 0 for padding
        gate_up_PU = F.grouped_mm(h_MD.index_select(0, pairs.token_P), gate_up_XUD.transpose(1, 2), offs=pairs.offsets_X)
        ctx.save_for_backward(h_MD, weight_P, gate_up_XUD, down_XDF)
        ctx.gate_up_PU, ctx.pairs, ctx.choices = gate_up_PU, pairs, weights_Mk.shape  # this one goes as soon as it was read
        if not value:
            return nothing(h_MD, *h_MD.shape)
        hidden_PF = swiglu(gate_up_PU, weight_P)
        del gate_up_PU
        return sum_slots(F.grouped_mm(hidden_PF, down_XDF.transpose(1, 2), offs=pairs.offsets_X), pairs)

    @staticmethod
    def backward(ctx, dy_MD):
        h_MD, weight_P, gate_up_XUD, down_XDF = ctx.saved_tensors
        token_P, offsets_X = ctx.pairs.token_P, ctx.pairs.offsets_X
        dy_PD = dy_MD.index_select(0, token_P)
        hidden_PF = F.grouped_mm(dy_PD, down_XDF, offs=offsets_X)  # its gradient, until the next line
        dgate_up_PU, dweight_P = swiglu_grad(hidden_PF, ctx.gate_up_PU, weight_P)
        ctx.gate_up_PU = None
        ddown_XDF = F.grouped_mm(dy_PD.T, hidden_PF, offs=offsets_X)
        del dy_PD, hidden_PF
        dgate_up_XUD = F.grouped_mm(dgate_up_PU.T, h_MD.index_select(0, token_P), offs=offsets_X)
        dh_PD = F.grouped_mm(dgate_up_PU, gate_up_XUD, offs=offsets_X)
        del dgate_up_PU
        # each choice occurs once, so the scatter is deterministic; what padding and uninitialised rows hold goes to the end
        dweights = dweight_P.new_zeros(math.prod(ctx.choices) + 1).scatter_(0, ctx.pairs.choice_P, dweight_P)
        return sum_slots(dh_PD, ctx.pairs), dweights[:-1].view(ctx.choices), dgate_up_XUD, ddown_XDF, None, None


# ------------------------------------------------------------------------------------------------------------------
# Block and head
# ------------------------------------------------------------------------------------------------------------------


class Route(NamedTuple):
    """What the forward pass decided and the recomputation must reuse, or near-ties would flip."""

    chosen_Tk: Tensor  # int32
    rows: int  # length of the pair arrays


def block(x_TD: Tensor, w: dict[str, Tensor], segments: Segments, rope, route: Route | None, bias_X: Tensor,
          dispatch: Callable, combine: Callable, mine: range, m: Model,
          pushed: Callable[[Tensor], Tensor] = lambda logits_TX: logits_TX) -> tuple[Tensor, Route]:
    """One layer on one row. Returns the layer's output and the routing. With a `route` it is a recomputation: it reuses the
    routing, and of the experts only what their gradients need is computed; the output is a placeholder with the right graph.

    w: the layer's weights by short name; gate_up [X', 2F, D] and down [X', D, F] are the experts `mine` of this rank's
    node slot, padded to X'. dispatch(h_TD, weights_Tk, chosen_Tk) returns the node's tokens, weights and choices;
    combine(y_MD, value) sends the partial sums home and adds them. pushed: see Balance.logits."""
    first = route is None
    x_TD = x_TD + attention(x_TD, w, segments, rope, m)
    h_TD = rms_norm(x_TD, w["moe_norm"])
    logits_TX = pushed(RouterLogits.apply(h_TD, w["router"]))
    chosen_Tk = choose_experts(logits_TX, bias_X, m) if first else route.chosen_Tk
    weights_Tk = RoutingWeights.apply(logits_TX, chosen_Tk.long(), m.router)

    h_MD, weights_Mk, chosen_Mk = dispatch(h_TD, weights_Tk, chosen_Tk)
    rows = count_rows(chosen_Mk, mine, m) if first else route.rows
    y_TD = combine(run_experts(h_MD, weights_Mk, chosen_Mk, w["gate_up"], w["down"], mine, rows, first, m), first)
    if m.shared_experts:
        gate_up = torch.cat((h_TD @ w["shared_gate"].T, h_TD @ w["shared_up"].T), -1)
        y_TD = y_TD + SwiGLU.apply(gate_up) @ w["shared_down"].T
    return x_TD + y_TD, Route(chosen_Tk, rows)


def run_experts(h_MD: Tensor, weights_Mk: Tensor, chosen_Mk: Tensor, gate_up_XUD: Tensor, down_XDF: Tensor, mine: range,
                rows: int, value: bool, m: Model) -> Tensor:
    """Sum over the experts `mine` of this rank, [M, D], by the kernel that the run has chosen. value: see Experts."""
    slots, full = most_per_token(len(mine), m), even_load(mine, m)
    if MOE_KERNEL == "sonic" and not h_MD.is_meta:
        return sonic.experts(h_MD, weights_Mk, chosen_Mk, gate_up_XUD, down_XDF, mine, rows, slots, full)
    pairs = sort_pairs(chosen_Mk, mine, len(down_XDF), rows, slots, full)
    return Experts.apply(h_MD, weights_Mk, gate_up_XUD, down_XDF, pairs, value)


class Weight(Function):
    """A weight as an inner node of the graph: what holds on to the graph then does not hold on to the weight."""

    @staticmethod
    def forward(ctx, value, anchor):
        return value.detach()

    @staticmethod
    def backward(ctx, _):  # never reached: torch.autograd.grad takes the gradient that arrives here
        return None, None


class Recorded:
    """A layer that has run with its autograd graph. `backward` returns the gradients of its input and of its weights.

    With forget=True the graph keeps activations only: where it would save a weight it saves the place in the weight, and
    looks it up in the ones that `backward` is given, which have been gathered again."""

    def __init__(self, layer: Callable, x_TD: Tensor, w: dict[str, Tensor], forget: bool):
        self.x_TD, anchor = x_TD.detach().requires_grad_(), torch.empty(0, requires_grad=True)
        w = {name: Weight.apply(value, anchor) for name, value in w.items()}
        self.edges = {name: torch.autograd.graph.get_gradient_edge(value) for name, value in w.items()}
        self.again: dict[str, Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(*self.hooks(w)) if forget else nullcontext():
            y_TD, self.route = layer(self.x_TD, w)
        self.end = torch.autograd.graph.get_gradient_edge(y_TD)
        self.y_TD = y_TD.detach() if forget else None  # of a recomputation nobody needs the value

    def hooks(self, w: dict[str, Tensor]) -> tuple[Callable, Callable]:
        again = self.again
        place = {value.untyped_storage()._cdata: (name, value.storage_offset()) for name, value in w.items()}

        def pack(x: Tensor):
            name, base = place.get(x.untyped_storage()._cdata, (None, 0))
            return x.detach() if name is None else (name, x.size(), x.stride(), x.storage_offset() - base)

        def unpack(saved):
            if isinstance(saved, Tensor):
                return saved
            name, size, stride, offset = saved
            return again[name].as_strided(size, stride, again[name].storage_offset() + offset)

        return pack, unpack

    def backward(self, dy_TD: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        self.again.update(w)
        dx_TD, *dw = torch.autograd.grad([self.end], [self.x_TD, *self.edges.values()], dy_TD)
        return dx_TD, dict(zip(self.edges, dw))


def most_per_token(n_local: int, m: Model) -> int:
    """The most pairs that one token can have among n_local consecutive experts."""
    return min(m.top_k, n_local, m.group_limit * math.ceil(n_local * m.groups / m.experts))


def even_load(mine: range, m: Model) -> bool:
    """Whole groups lie here and each gets the same load: every token has the same number of pairs here."""
    per_group = m.experts // m.groups
    return m.even_groups and mine.start % per_group == 0 and len(mine) % per_group == 0


def count_rows(chosen_Mk: Tensor, mine: range, m: Model) -> int:
    """Length of the pair arrays: known beforehand where the load is even; else read from the device once, in the forward
    pass, and rounded up (fewer sizes for the allocator to hold)."""
    if even_load(mine, m):
        return chosen_Mk.shape[0] * most_per_token(len(mine), m)
    count = count_mine(chosen_Mk, mine)
    return min(-(-max(count, 1) // 128) * 128, chosen_Mk.numel())


def count_mine(chosen_Mk: Tensor, mine: range) -> int:
    """Waits for the device. The dry run, which has no values, puts its expectation in this place."""
    return int(((chosen_Mk >= mine.start) & (chosen_Mk < mine.stop)).sum())


HEAD_CHUNK = 2**26  # logits that exist at a time: 128 MiB in bf16


def head_loss(x_TD: Tensor, targets_T: Tensor, norm_D: Tensor, head_VD: Tensor, scale: float, grads: bool,
              draws_T: Tensor | None = None):
    """Final norm, logits and cross-entropy in chunks of tokens: the T x V logits never exist.

    targets: int64, -1 for none. draws: uniform numbers, with which the targets that there are are drawn anew, from the model's
    own predictions. Returns (summed loss in nats, fp64 scalar on the device; dx, dnorm, dhead), the gradients of
    scale * loss, or None where grads is False. dhead is fp32."""
    T, V = x_TD.shape[0], head_VD.shape[0]
    chunk = max(1, HEAD_CHUNK // V)
    with torch.set_grad_enabled(grads):
        x_leaf, norm_leaf = x_TD.detach().requires_grad_(grads), norm_D.detach().requires_grad_(grads)
        h_TD = rms_norm(x_leaf, norm_leaf)
    with torch.no_grad():
        loss = torch.zeros((), dtype=torch.float64, device=x_TD.device)
        dh_TD, dhead_VD = torch.empty_like(h_TD) if grads else None, None
        for a in range(0, T, chunk):
            h = h_TD[a : a + chunk]
            logits, targets = h @ head_VD.T, targets_T[a : a + chunk]
            if draws_T is not None:
                targets = torch.where(targets >= 0, draw_tokens(logits, draws_T[a : a + chunk]), targets)
            loss += cross_entropy(logits, targets, scale, grads)
            if grads:
                torch.matmul(logits, head_VD, out=dh_TD[a : a + chunk])
                part = logits.T @ h
                del logits
                dhead_VD = part.float() if dhead_VD is None else dhead_VD.add_(part)
    if not grads:
        return loss, None, None, None
    dx_TD, dnorm_D = torch.autograd.grad(h_TD, (x_leaf, norm_leaf), dh_TD)
    return loss, dx_TD, dnorm_D, dhead_VD


def cross_entropy(logits_TV: Tensor, targets_T: Tensor, scale: float, grads: bool) -> Tensor:
    """Summed loss, fp64. With grads the logits become, in place, the gradient of scale * loss. fp32 inside, in slabs of rows."""
    loss = torch.zeros((), dtype=torch.float64, device=logits_TV.device)
    for at in slabs(logits_TV):
        target = targets_T[at, None]
        has_target, index = target >= 0, target.clamp(min=0)
        logits = logits_TV[at].to(torch.float32, copy=True)
        largest, of_target = logits.amax(-1, keepdim=True), logits.gather(1, index)
        e = logits.sub_(largest).exp_()
        total = e.sum(-1, keepdim=True)
        loss += torch.where(has_target, total.log().add_(largest).sub_(of_target), 0.0).sum(dtype=torch.float64)
        if grads:
            factor = has_target * scale
            logits_TV[at] = e.mul_(factor / total).scatter_add_(1, index, -factor)
    return loss


def draw_tokens(logits_TV: Tensor, draws_T: Tensor) -> Tensor:
    """A token of each row's distribution, int64 [T]: where the cumulated probability passes the row's uniform number."""
    drawn_T = torch.empty(len(logits_TV), dtype=torch.int64, device=logits_TV.device)
    for at in slabs(logits_TV):
        up_to = torch.softmax(logits_TV[at].float(), -1).cumsum_(-1)
        drawn_T[at] = torch.searchsorted(up_to, draws_T[at, None].float() * up_to[:, -1:]).squeeze(1)
    return drawn_T.clamp_(max=logits_TV.shape[1] - 1)


def embed_tokens(tokens_T: Tensor, embed_VD: Tensor) -> Tensor:
    return embed_VD.index_select(0, tokens_T)


def embed_grad(tokens_T: Tensor, dx_TD: Tensor, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gradient of the embedding table [V, D], summed in fp32 and then rounded to dtype: needs the token ids only, not the table.
    By quarters of the columns, so that little of it exists in fp32."""
    grad_VD = dx_TD.new_empty(vocab, dx_TD.shape[1], dtype=dtype)
    for part_VC, dx_TC in zip(grad_VD.chunk(4, 1), dx_TD.chunk(4, 1)):
        part_VC.copy_(torch.ops.aten.embedding_dense_backward(dx_TC.float(), tokens_T, vocab, -1, False))
    return grad_VD
