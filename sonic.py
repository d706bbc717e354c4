"""SonicMoE's kernels (arXiv 2512.14080) for the products of the experts, on Hopper GPUs and newer: `--moe_kernel=sonic`.

An optional package (`pip install --no-deps sonic-moe`, CUDA only). Its general-routing entry takes any list of (token, expert) pairs, so
what lies on this rank is enough. Our weights are in its concatenated layout already: gate rows, then up rows.

Beside model.Experts: the gather of the rows, SwiGLU and the routing weights are fused into the products, so that neither the
gathered rows nor what SwiGLU makes of them pass through memory. A recomputation runs the down-projection too, whose result
nobody reads. QuACK's products are told to hand out tiles as they go (dynamic scheduling) where rows per expert differ: in the
four of them whose token dimension varies.
"""

import functools
import importlib
import importlib.metadata
import inspect

import torch
from torch import Tensor

from errors import ConfigError

NEEDS = {"sonic-moe": (0, 1, 2), "quack-kernels": (0, 4)}  # distributions; the first versions with what is used here
PRODUCTS = ("gemm", "gemm_gated", "gemm_dgated", "gemm_act", "gemm_dact")
FIX = ("install both for this torch (Python 3.12 or newer; pip install --no-deps, or their pins replace torch; and the nvidia-cutlass-dsl "
       "that the QuACK names), or use --moe_kernel=grouped_mm")


def version(name: str) -> tuple[int, ...]:
    """The leading numbers of a version; () where it is not installed."""
    try:
        text = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ()
    numbers = []
    for part in text.split("+")[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers) or (0,)


def check(device: torch.device, dtype: str, width: int, expert_width: int):
    """Raises ConfigError where the kernels cannot run: another device, type or size, or a package that is missing or unfit."""
    setting = "--moe_kernel=sonic"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        raise ConfigError(f"{setting}: needs an NVIDIA GPU of Hopper's generation or newer, this rank runs on {device.type}; use "
                          "--moe_kernel=grouped_mm")
    if dtype != "bfloat16":
        raise ConfigError(f"{setting}: computes in bfloat16, not --dtype={dtype}; use one or the other")
    for name, size in (("width", width), ("expert_width", expert_width)):
        if size % 64:
            raise ConfigError(f"{setting}: --{name}={size} must be a multiple of 64; change it, or use --moe_kernel=grouped_mm")
    for name, least in NEEDS.items():
        if not (found := version(name)):
            raise ConfigError(f"{setting}: the package {name} is not installed; {FIX}")
        if found < least:
            raise ConfigError(f"{setting}: {name} {'.'.join(map(str, found))} is older than {'.'.join(map(str, least))}; {FIX}")
    load()


@functools.cache
def load():
    """(its entry, its name of SwiGLU), with tiles handed out dynamically. Raises ConfigError for a package that is not as
    known."""
    try:
        entry = importlib.import_module("sonicmoe.functional").moe_general_routing_inputs
        swiglu = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--moe_kernel=sonic: sonicmoe cannot be used ({error}); {FIX}") from error
    if "concat_layout" not in inspect.signature(entry).parameters:
        raise ConfigError(f"--moe_kernel=sonic: this sonicmoe knows no weights with gate and up rows side by side; {FIX}")
    if not schedule_dynamically():
        raise ConfigError(f"--moe_kernel=sonic: this sonicmoe does not call QuACK's products where they are expected; {FIX}")
    return entry, swiglu


def schedule_dynamically() -> int:
    """Has sonicmoe's modules call QuACK's products with dynamic scheduling where rows per expert differ; how many it found."""
    found = 0
    for name in ("sonicmoe.functional", "sonicmoe.functional.forward", "sonicmoe.functional.backward"):
        module = importlib.import_module(name)
        for product in PRODUCTS:
            real = getattr(module, product, None)
            if real is not None and not hasattr(real, "dynamic") and "dynamic_scheduler" in inspect.signature(real).parameters:
                setattr(module, product, dynamic(real))
                found += 1
    return found


def dynamic(product):
    """The product with a dynamic schedule, if the offsets of experts say that its rows are theirs."""
    @functools.wraps(product)
    def call(*args, **kwargs):
        if kwargs.get("cu_seqlens_m") is not None:
            kwargs["dynamic_scheduler"] = True
        return product(*args, **kwargs)

    call.dynamic = True
    return call


def local_pairs(chosen_Mk: Tensor, mine: range, rows: int, slots: int, full: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(token, local expert, index into the flattened [M, k] choices, whether it is a pair) of `rows` pairs, tokens ascending.
    What is left over at the end belongs to the last token and expert, and is none. full: every token has `slots` pairs here."""
    M, k = chosen_Mk.shape
    is_mine_Mk = (chosen_Mk >= mine.start) & (chosen_Mk < mine.stop)
    if full:  # choices ascend, so a token's local ones are neighbours
        column = is_mine_Mk.to(torch.int8).argmax(1, keepdim=True) + torch.arange(slots, device=chosen_Mk.device)
        choice_P = (torch.arange(M, device=chosen_Mk.device)[:, None] * k + column).flatten()
        real_P = torch.ones_like(choice_P, dtype=torch.bool)
    else:
        other, order = (~is_mine_Mk).flatten().to(torch.int8).sort(stable=True)
        choice_P, real_P = order[:rows], other[:rows] == 0
    token_P = torch.where(real_P, choice_P // k, M - 1)
    expert_P = torch.where(real_P, chosen_Mk.flatten()[choice_P] - mine.start, len(mine) - 1)
    return token_P.to(torch.int32), expert_P.to(torch.int32), choice_P, real_P


def experts(h_MD: Tensor, weights_Mk: Tensor, chosen_Mk: Tensor, gate_up_XUD: Tensor, down_XDF: Tensor, mine: range, rows: int,
            slots: int, full: bool) -> Tensor:
    """As model.Experts: the sum over a token's local experts, [M, D]."""
    entry, swiglu = load()
    token_P, expert_P, choice_P, real_P = local_pairs(chosen_Mk, mine, rows, slots, full)
    weight_P = weights_Mk.flatten().gather(0, choice_P) * real_P  # each choice occurs once, so its gradient is deterministic
    y_MD, _ = entry(h_MD, weight_P, token_P, expert_P, gate_up_XUD.permute(1, 2, 0), None, down_XDF.permute(1, 2, 0), None,
                    len(down_XDF), stream_of(h_MD), swiglu, is_inference_mode_enabled=not torch.is_grad_enabled(),
                    concat_layout=True)
    return y_MD


def stream_of(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
