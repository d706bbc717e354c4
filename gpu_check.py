"""What a GPU does with this program: is every path right, how fast is each, what does a step take. Under five minutes.

    make gpu-check                                   all GPUs of this machine; or 4 CPU ranks, which proves its logic only
    make gpu-check RANKS=1 ARGS="--out=out/h200.json --moe_kernel=sonic"
    make plan ARGS="--machine out/gpu-check.json"    a plan by the rates that were measured

    checks   each path's values and gradients on the device beside the same in fp32 on the CPU; transfers beside their results
    rates    products (dense, of experts, attention, Newton-Schulz), passes over memory, fp8, copies each way, gathers, launches
    step     schedule and optimizer of the single-node size with as many layers as fit, profiled, beside a plan by these rates

Writes a JSON file; ends with 70 where a check failed.
"""

import dataclasses
import json
import math
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, NamedTuple

import torch
from torch import Tensor

import launch
import model
import offload
import optim
import parallel
import plan
import timeline
import train
from model import ConfigError, Model, Segments
from offload import GIB
from parallel import Grid, Transport

CPU = torch.device("cpu")
SMALL = dict(layers=2, width=256, heads=4, kv_heads=2, head_dim=64, experts=16, top_k=4, groups=4, expert_width=128, vocab=512,
             seq_len=512)  # of the checks: large enough for every kernel's tiles, small for the CPU that it is compared with
DEFAULTS_FROM = "jupiter-gh200"  # constants that one machine cannot measure, such as the network


@dataclass
class Settings:
    out: str = "out/gpu-check.json"
    size: str = ""  # of the step; empty: 15b on accelerators, debug on a CPU
    steps: int = 6  # that are timed, after two that are not; the last is profiled
    memory: float = 0.7  # share of the device that masters, moments and gradients may take: decides how many layers the step has
    seconds: float = 0.4  # of each measurement
    moe_kernel: str = "grouped_mm"
    attention: str = "auto"
    compile: bool = False


class Here(NamedTuple):
    """Where this rank runs."""

    s: Settings
    where: launch.Place
    grid: Grid
    m: Model  # of the checks
    dtype: torch.dtype  # of products

    @property
    def device(self) -> torch.device:
        return self.where.device

    def finish(self):
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def together(self):
        parallel.exchange([0.0], self.grid, self.device)


# ------------------------------------------------------------------------------------------------------------------
# Checks: name -> (what measures the error, the largest that passes)
# ------------------------------------------------------------------------------------------------------------------


def random(*shape: int, seed: int, scale: float = 1.0, dtype=torch.bfloat16) -> Tensor:
    """On the CPU, rounded to a type, so that both sides have the same."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def distance(a: Tensor, b: Tensor) -> float:
    """Of a to b, over b's size. Infinite where a is not finite."""
    a, b = a.detach().to(CPU, torch.float64), b.detach().to(CPU, torch.float64)
    error = float((a - b).norm() / b.norm().clamp(min=1e-30))
    return error if math.isfinite(error) else math.inf


def compare(h: Here, function: Callable, inputs: list[Tensor], dtype: torch.dtype | None = None) -> float:
    """Largest distance of function's results and gradients on the device, in a type, to those in fp32 on the CPU. function is
    told the device; inputs that are fp32 stay so."""
    results = []
    for device, kind in ((CPU, torch.float32), (h.device, dtype or h.dtype)):
        x = [t.to(device, kind if t.dtype == torch.bfloat16 else t.dtype).requires_grad_() for t in inputs]
        y = function(device, *x)
        dy = random(*y.shape, seed=99).to(device, y.dtype)
        results.append([y, *torch.autograd.grad(y, x, dy)])
    return max(distance(a, b) for b, a in zip(*results))


def segments(device: torch.device, T: int) -> Segments:
    bounds = [0, 1, T // 5, T // 2, T]
    return Segments(bounds, torch.tensor(bounds, dtype=torch.int32, device=device))


def check_norm(h: Here) -> float:
    return compare(h, lambda _, x, w: model.rms_norm(x, w), [random(512, 256, seed=1), random(256, seed=2, dtype=torch.float32)])


def check_rope(h: Here) -> float:
    def turn(device, x):
        return model.RoPE.apply(x, *model.rope_cache(1e4, 64, 512, device))

    return compare(h, turn, [random(512, 4, 64, seed=1)])


def check_attention(h: Here) -> float:
    """In the row's documents, by the kernel that the run would use."""
    def attend(device, q, k, v):
        return model.segment_attention(q, k, v, segments(device, 512))

    return compare(h, attend, [random(512, heads, 64, seed=i) for i, heads in enumerate((4, 2, 2))])


def check_router(h: Here) -> float:
    """Logits, choice by score and bias, and weights, all fp32. What is chosen must agree exactly."""
    m = dataclasses.replace(h.m, max_per_group=2)
    logits, bias = random(512, 16, seed=1, dtype=torch.float32), random(16, seed=2, scale=0.1, dtype=torch.float32)
    chosen = [model.choose_experts(logits.to(d), bias.to(d), m).cpu() for d in (CPU, h.device)]
    if not torch.equal(*chosen):
        return math.inf

    def weights(device, x, w):
        return model.RoutingWeights.apply(model.RouterLogits.apply(x, w), chosen[0].to(device).long(), "softmax")

    fp32 = torch.float32
    return compare(h, weights, [random(512, 256, seed=3, dtype=fp32), random(16, 256, seed=4, scale=0.1, dtype=fp32)])


def experts_of(kernel: str, c: int) -> Callable[[Here], float]:
    """The experts' products by a kernel, of half of the experts; c experts of a group at most per token."""
    def check(h: Here) -> float:
        m, mine = dataclasses.replace(h.m, max_per_group=c), range(4, 12)
        logits = random(512, 16, seed=1, dtype=torch.float32)
        if c > 1:
            logits[:, 5] = -1e4  # an expert without tokens: its gradient has been garbage on some GPUs (PyTorch issue 172439)
        chosen = model.choose_experts(logits, torch.zeros(16), m)
        rows = model.count_rows(chosen, mine, m)

        def run(device, x, weights, gate_up, down):
            model.MOE_KERNEL = kernel if device.type != "cpu" or kernel == "grouped_mm" else "grouped_mm"
            return model.run_experts(x, weights, chosen.to(device), gate_up, down, mine, rows, True, m)

        try:
            return compare(h, run, [random(512, 256, seed=2), random(512, 4, seed=3, dtype=torch.float32),
                                    random(8, 256, 256, seed=4, scale=0.06), random(8, 256, 128, seed=5, scale=0.09)])
        finally:
            model.MOE_KERNEL = h.s.moe_kernel

    return check


def check_head(h: Here) -> float:
    """Loss and gradients of the chunked head."""
    targets = torch.randint(-1, 512, (512,), generator=torch.Generator().manual_seed(0))
    x, norm, head = random(512, 256, seed=1), random(256, seed=2, dtype=torch.float32), random(512, 256, seed=3, scale=0.1)
    results = [model.head_loss(x.to(d, t), targets.to(d), norm.to(d), head.to(d, t), 1e-2, True)
               for d, t in ((CPU, torch.float32), (h.device, h.dtype))]
    return max(distance(a, b) for b, a in zip(*results))


def check_embedding(h: Here) -> float:
    tokens, dx = torch.arange(512) ** 2 % 512, random(512, 256, seed=1)
    want = model.embed_grad(tokens, dx.float(), 512)
    return distance(model.embed_grad(tokens.to(h.device), dx.to(h.device), 512), want)


def check_fp8(h: Here) -> float:
    """Bytes and what becomes of them, exactly; a block of zeros and one that is not finite too."""
    x = random(4, 1024, seed=1, dtype=torch.float32)
    x[0, :128], x[1, 5], x[2, 300] = 0, math.inf, math.nan
    packed = parallel.quantise(x.to(h.device))
    same = torch.equal(packed.cpu(), parallel.quantise(x))
    back = [parallel.dequantise(p, torch.bfloat16).cpu() for p in (parallel.quantise(x), packed)]
    return 0.0 if same and torch.equal(back[0].nan_to_num(7), back[1].nan_to_num(7)) else math.inf


def check_norms(h: Here) -> float:
    x = random(100_001, seed=1, dtype=torch.float32)
    return distance(parallel.squared_norm(x.to(h.device)), x.double().square().sum())


def check_newton_schulz(h: Here) -> float:
    """Of matrices whose sizes differ by 1e6, in bf16, whose rounding alone makes 5%."""
    x = random(4, 128, 256, seed=1, dtype=torch.float32) * torch.tensor([1e-3, 1, 10, 1e3])[:, None, None]
    return distance(optim.orthogonalise(x.to(h.device), torch.bfloat16), optim.orthogonalise(x, torch.float32))


def check_adamw(h: Here) -> float:
    def run(device):
        state = [random(1000, seed=i, dtype=torch.float32).abs().to(device) for i in range(4)]
        optim.adamw(*state, lr=1e-2, decay=0.1, clip=0.5, step=3)
        return torch.stack([state[0], *state[2:]])

    return distance(run(h.device), run(CPU))


def check_copies(h: Here) -> float:
    """Out to an arena and back while the device computes, many times; and what a checkpoint's writer sees."""
    size = 8 * offload.Arena.bytes_of((256, 256), torch.float32)
    copies, arena = offload.Copies(h.device), offload.Arena("inputs", size, h.device)
    slots, x = [arena.take((256, 256), torch.float32) for _ in range(8)], torch.eye(256, device=h.device)
    window, error = offload.Window(h.device, x.nbytes), 0.0
    for round_ in range(4):
        sent = [x * (i + round_) for i in range(8)]
        leaving = [copies.send("inputs out", t, slot) for t, slot in zip(sent, slots)]
        busy = x @ x
        for copy in leaving:
            copy.wait()
        coming = [copies.fetch("inputs in", slot) for slot in slots]
        busy = busy @ x
        back = [copy.wait() for copy in coming]
        error = max(error, *(float((a - b).abs().max()) for a, b in zip(sent, back)))
        window.follow(h.device)
        shown = torch.from_numpy(window.show(sent[-1]).copy()).view(torch.float32).view(256, 256)
        error = max(error, float((shown - sent[-1].cpu()).abs().max()), float((busy - x).abs().max()))
    copies.finish()
    return error


def check_transfers(h: Here) -> float:
    """Each collective over all ranks beside what it must give. One rank communicates nothing."""
    group, device = h.grid.world, h.device
    n, mine = group.size, group.index

    def of(rank: int) -> Tensor:
        return random(n, 1000, seed=rank, dtype=torch.float32).to(device)

    everyone = [of(rank) for rank in range(n)]
    gathered = parallel.all_gather(of(mine), group, "scalars").wait()
    swapped = torch.stack(list(parallel.all_to_all(of(mine), group, "scalars").wait()))
    summed = parallel.reduce_scatter(of(mine), group, torch.float32, "scalars").wait()
    reduced = parallel.all_reduce(of(mine).clone(), group, "expert load").wait()
    wants = [(gathered, torch.stack(everyone)), (swapped, torch.stack([x[mine] for x in everyone])),
             (summed, sum(x[mine] for x in everyone)), (reduced, sum(everyone))]
    return max(distance(a, b) for a, b in wants)


def schedule_in(compute: torch.dtype) -> Callable[[Here], float]:
    """Loss and the gradient of every bucket of a whole forward and backward pass, beside fp32 on the CPU. The routing must not
    depend on rounding, so the router is the same on both sides only in fp32: in bf16 a single layer's is compared."""
    def check(h: Here) -> float:
        m = dataclasses.replace(h.m, layers=2 if compute == torch.float32 else 1)
        grid, results = parallel.make_grid(0, 1, 1, 1, m, connect=False), []
        tokens = torch.randint(0, 512, (512,), generator=torch.Generator().manual_seed(1))
        for device, kind in ((CPU, torch.float32), (h.device, compute)):
            state = parallel.init_state(m, grid, 0, CPU)
            state.master = {name: x.to(torch.bfloat16).float().to(device) for name, x in state.master.items()}
            state.bias_LX = state.bias_LX.to(device)
            row = train.DeviceRow(tokens.to(device), tokens.roll(-1).to(device), segments(device, 512), 512)
            loss, squared = train.schedule([row], state, grid, m, Transport(kind), 1 / 512)
            results.append([loss, squared.sqrt(), *(state.grad[name] for name in state.buckets if "control" not in name)])
        return max(distance(a, b) for b, a in zip(*results))

    return check


CHECKS: dict[str, tuple[Callable[[Here], float], float]] = {
    "norm": (check_norm, 1e-2), "rope": (check_rope, 1e-2), "attention": (check_attention, 2e-2), "router": (check_router, 1e-5),
    "experts, even": (experts_of("grouped_mm", 1), 2e-2), "experts, uneven": (experts_of("grouped_mm", 3), 2e-2),
    "head and loss": (check_head, 2e-2), "embedding gradient": (check_embedding, 1e-6), "fp8 blocks": (check_fp8, 0.0),
    "squared norm": (check_norms, 1e-6), "Newton-Schulz": (check_newton_schulz, 0.1), "AdamW": (check_adamw, 1e-6),
    "copies": (check_copies, 0.0), "transfers": (check_transfers, 1e-6), "step in fp32": (schedule_in(torch.float32), 1e-4),
    "step in bf16": (schedule_in(torch.bfloat16), 6e-2),
}


def run_checks(h: Here, say: Callable[[str], None]) -> dict[str, dict]:
    """Every check on every rank; of each the largest error. One that cannot run is an error too, and the others go on."""
    found, checks = {}, dict(CHECKS)
    if h.s.moe_kernel == "sonic":
        checks |= {f"experts by sonic, {load}": (experts_of("sonic", c), 2e-2) for load, c in (("even", 1), ("uneven", 3))}
    for name, (check, tolerance) in checks.items():
        why, began = "", time.perf_counter()
        try:
            error = check(h)
        except Exception as failure:  # noqa: BLE001 the point is to learn of every path, and to end with the list
            error, why = math.inf, f"{type(failure).__name__}: {failure}".splitlines()[0][:300]
        error = float(parallel.exchange([error], h.grid, h.device).max())
        ok = error <= tolerance
        found[name] = {"error": error if math.isfinite(error) else None, "tolerance": tolerance, "ok": ok, "why": why}
        say(f"  {'ok    ' if ok else 'WRONG '} {name:<26} error {error:.2g}, at most {tolerance:g}   "
            f"{time.perf_counter() - began:.1f} s{'   ' + why if why else ''}")
    return found


# ------------------------------------------------------------------------------------------------------------------
# Rates, as constants of a machine
# ------------------------------------------------------------------------------------------------------------------


def measure(h: Here, m: Model) -> dict[str, float]:
    """This rank's rates in the shapes of a model, all ranks at the same time. Names as in plan.py; and of what it has none."""
    device, T, finish = h.device, m.seq_len, h.finish

    def seconds(run: Callable[[], object]) -> float:
        return plan.seconds_of(run, h.together, finish=finish)

    found, as_device = {}, "cpu" if device.type == "cpu" else "cuda"
    tiny = torch.zeros(8, device=device)
    launches = [0.0]

    def launch_many():
        began = time.perf_counter()
        for _ in range(200):
            tiny.add_(1)
        launches[0] = (time.perf_counter() - began) / 200

    found["kernel_s"] = seconds(launch_many) / 200 * (2 if device.type == "cpu" else 1)
    found["launch_s"] = 2 * launches[0]  # autograd costs about as much again
    for name in plan.passes(m, h.grid, h.dtype, T, torch.device("meta")):
        _, nbytes, count = plan.cost_of(lambda d, name=name: plan.passes(m, h.grid, h.dtype, T, d)[name], m, as_device)
        took = seconds(plan.passes(m, h.grid, h.dtype, T, device)[name])
        found[f"{name} rate"] = nbytes / max(1e-9, took - count * found["kernel_s"] * (device.type == "cpu"))
    for name, (flops, run) in plan.product_rates(m, h.grid, h.dtype, T, device).items():
        found[name] = flops / seconds(run)
    if device.type != "cpu":
        found |= attention_rates(h, m, seconds)
    found |= other_rates(h, m, seconds, as_device)
    return found | plan.transfer_rates(h.grid, T, m, device, h.together, finish)


def attention_rates(h: Here, m: Model, seconds: Callable) -> dict[str, float]:
    """FLOP/s of the attention that the run would use, forward and backward."""
    T = m.seq_len
    q, k, v = (torch.randn(T, n, m.head_dim, device=h.device, dtype=h.dtype).requires_grad_()
               for n in (m.heads, m.kv_heads, m.kv_heads))
    row = segments(h.device, T)
    forward, backward = (plan.attention_flops(q, row.bounds, products) for products in (2, 5))
    y = model.segment_attention(q, k, v, row)
    dy = torch.randn_like(y)
    with torch.no_grad():
        forward_s = seconds(lambda: model.segment_attention(q, k, v, row))
    return {"attention_efficiency": forward / forward_s,
            "attention_back_efficiency": backward / seconds(lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True))}


def other_rates(h: Here, m: Model, seconds: Callable, as_device: str) -> dict[str, float]:
    """fp8 each way and copies each way, in bytes/s; Newton-Schulz in FLOP/s, its passes between products included."""
    values = 3 * m.expert_width * m.width // parallel.FP8_BLOCK * parallel.FP8_BLOCK
    x = torch.randn(2, values, device=h.device)
    packed, found = parallel.quantise(x), {}
    _, nbytes, _ = plan.cost_of(lambda d: lambda: parallel.dequantise(packed.to(d), h.dtype), m, as_device)
    found["fp8 rate"] = nbytes / seconds(lambda: parallel.dequantise(packed, h.dtype))
    found["quantise bytes/s"] = x.nbytes / seconds(lambda: parallel.quantise(x))
    shape = 4, m.expert_width, m.width
    flops, _, _ = plan.cost_of(lambda d: lambda: optim.orthogonalise(torch.empty(shape, device=d), torch.bfloat16), m, as_device)
    matrices = torch.randn(shape, device=h.device)
    found["orthogonal_efficiency"] = flops / seconds(lambda: optim.orthogonalise(matrices, torch.bfloat16))
    copies, large = offload.Copies(h.device), torch.zeros(64 * 2**20 if h.device.type != "cpu" else 2**20, device=h.device)
    slot = offload.Arena("rates", large.nbytes, h.device).take(tuple(large.shape), torch.float32)
    found["copy out bytes/s"] = large.nbytes / seconds(lambda: copies.send("state out", large, slot).wait())
    found["copy in bytes/s"] = large.nbytes / seconds(lambda: copies.fetch("state in", slot).wait())
    return found


def machine_of(h: Here, found: dict[str, float]) -> tuple[dict[str, float], list[str]]:
    """(constants for plan.py, those that were not measured here). Shares of peak are those of the rate of dense products, which
    stands for the peak."""
    per_node, peak = h.where.ranks_per_node, found["dense_efficiency"]
    shares = {name: value / peak for name, value in found.items() if name.endswith("_efficiency") and name != "dense_efficiency"}
    measured = {"peak_bf16": peak, "kernel_s": found["kernel_s"], "launch_s": found["launch_s"],
                "memory_rate": found["element-wise rate"], **{k: v for k, v in found.items() if k.endswith(" rate")}, **shares}
    if h.grid.world.size > 1:
        measured |= {name: found[name] for name in ("base_s", "node_rate")}
    base = plan.rates(DEFAULTS_FROM)
    if h.device.type == "cpu":
        return base | measured | {"base_s": found["base_s"], "node_rate": found["node_rate"]} | plan.of_a_cpu(
            measured | {"node_rate": found["node_rate"]}, per_node), sorted(base.keys() - measured.keys())
    properties = torch.get_device_module(h.device).get_device_properties(h.device)
    measured |= {"dense_efficiency": 1.0, "memory_efficiency": 1.0, "peak_fp32": found["fp32_efficiency"], "fp32_efficiency": 1.0,
                 "ranks_per_node": per_node, "memory": launch.device_memory(h.device), "copy_rate": min(
                     found["copy in bytes/s"], found["copy out bytes/s"]), "host_memory": offload.host_memory()[0] / per_node,
                 "processors": getattr(properties, "multi_processor_count", base["processors"])}
    return base | measured, sorted(base.keys() - measured.keys())


# ------------------------------------------------------------------------------------------------------------------
# A step of the single-node size
# ------------------------------------------------------------------------------------------------------------------


def settings_of_step(h: Here) -> tuple[train.Hyperparameters, Model, list[str]]:
    """The size with as many layers as fit, and the settings that say so."""
    size = h.s.size or ("debug" if h.device.type == "cpu" else "15b")
    layers = model.model_of(size).layers
    has = launch.device_memory(h.device) if h.device.type != "cpu" else offload.host_memory()[0] / h.where.ranks_per_node
    while True:
        argv = [f"--size={size}", f"--layers={layers}", f"--moe_kernel={h.s.moe_kernel}", f"--attention={h.s.attention}",
                f"--compile={h.s.compile}", "--wandb=off"]
        hp, m = train.resolve(train.parse(argv), h.where)
        needs = sum(sum(part.values()) for part in train.planned_memory(hp, m, h.grid))
        if needs <= h.s.memory * has or layers == 1:
            return hp, m, argv
        layers -= 1


def state_of(h: Here, hp: train.Hyperparameters, m: Model, grid: Grid) -> parallel.State:
    """As parallel.init_state has it, but drawn on the device: for times, not for training."""
    buckets = parallel.make_buckets(m, grid)
    master = {name: torch.zeros(bucket.owned, device=h.device).normal_(0, 0.02) if "control" not in name and name != "final_norm"
              else torch.ones(bucket.owned, device=h.device) for name, bucket in buckets.items()}
    state = parallel.State(buckets, master, {}, torch.zeros(m.layers, m.experts, device=h.device))
    optim.init_moments(state, hp.optimizer)
    return state


def time_steps(h: Here, hp: train.Hyperparameters, m: Model) -> dict:
    """Medians of the steps of this rank, seconds; the profiled one's parts."""
    transport, grid = train.transport_of(hp), h.grid
    state = state_of(h, hp, m, grid)
    muon = optim.plan_muon(state, grid, m, hp.optimizer, hp.newton_schulz, hp.muon_per_head)
    parallel.fill_own(state, transport)
    parallel.start_refresh(state, grid, transport)()
    tokens = torch.randint(0, m.vocab, (m.seq_len,), generator=torch.Generator().manual_seed(h.where.rank)).to(h.device)
    bounds = plan.segments_of(m.seq_len, "600,1.1")
    row = train.DeviceRow(tokens, tokens.roll(-1), Segments(bounds, torch.tensor(bounds, dtype=torch.int32, device=h.device)),
                          m.seq_len)
    inputs = offload.make_inputs(m.layers, 1, (m.seq_len, m.width), transport.compute, 0.0, None)
    total, parts = h.s.steps + 2, {"step_s": [], "passes_s": [], "optimizer_s": []}
    profiler = timeline.Profiler(str(total), "0", h.where.rank, h.where.world, h.device, Path(h.s.out).with_suffix(".profile"))
    profiled = None
    for step in range(1, total + 1):
        profiler.start(step)
        h.finish(), h.together()
        began = time.perf_counter()
        profiler.step_begins(step)
        _, squared = train.schedule([row], state, grid, m, transport, 1 / m.seq_len / grid.world.size, inputs=inputs,
                                    balance=model.Balance(m, h.device, m.seq_len))
        parallel.exchange([float(squared)], grid, h.device)  # as a step does before its optimizer
        middle = time.perf_counter()
        optim.update(state, grid, muon, hp.optimizer, 1e-4, 0.1, 1.0, step - 1, transport, chunk=hp.stream_chunk)
        h.finish()
        now = time.perf_counter()
        profiler.step_ends()
        profiled = profiler.finish(step, step == total) or profiled
        for name, value in (("step_s", now - began), ("passes_s", middle - began), ("optimizer_s", now - middle)):
            parts[name].append(value)
    medians = {name: sorted(values[2:-1] or values[-1:])[len(values[2:-1] or [0]) // 2] for name, values in parts.items()}
    return medians | {"profile": profiled or [], "bounds": bounds, **offload.peak_memory(h.device)}


def step_report(h: Here, hp, m: Model, argv: list[str], constants: dict[str, float]) -> dict:
    """A timed step beside a plan of the same by the constants that were just measured."""
    timed = time_steps(h, hp, m)
    as_device = "cpu" if h.device.type == "cpu" else "cuda"
    o = plan.Options(h.grid.N * h.grid.R, h.where.ranks_per_node, h.where.rank, as_device)
    rec = plan.record(hp, m, o, rows=[timed.pop("bounds")])
    planned = plan.replay(rec, constants, 1.0)
    tokens = m.seq_len * h.grid.world.size
    total, active = model.count_params(m)
    return {"size": hp.size, "layers": m.layers, "settings": argv, "parameters": total, "active": active, "tokens": tokens,
            "tok_s": tokens / timed["step_s"], "planned_s": planned.step_s, "planned_peak_gib": sum(
                v for k, v in rec.peak.items() if not k.startswith("host ")) / GIB, **timed}


# ------------------------------------------------------------------------------------------------------------------
# All of it
# ------------------------------------------------------------------------------------------------------------------


def name_of(device: torch.device) -> str:
    if device.type == "cpu":
        return platform.processor() or platform.machine()
    return torch.get_device_module(device).get_device_name(device)


def in_words(found: dict) -> list[str]:
    """The rates and the step as a table."""
    def value(name: str, x: float) -> str:
        if name.endswith("_s"):
            return f"{x * 1e6:,.1f} us"
        return f"{x / 1e12:,.3f} TFLOP/s" if name.endswith("efficiency") else f"{x / 1e9:,.2f} GB/s"

    lines = ["rates of a rank, all ranks at the same time:"]
    lines += [f"  {name.replace('_efficiency', ' products').replace('_', ' '):<34}{value(name, x):>20}"
              for name, x in found["rates"].items()]
    step = found["step"]
    peak = step.get("peak_device_gb") or step["peak_host_gb"]
    lines.append(f"step of {step['size']} with {step['layers']} layers: {step['step_s']:.3f} s (passes {step['passes_s']:.3f}, "
                 f"optimizer {step['optimizer_s']:.3f}), planned {step['planned_s']:.3f} s; {step['tok_s']:,.0f} tokens/s; "
                 f"peak {peak:.1f} GiB")
    return lines + [f"  {line}" for line in timeline.in_words(step["profile"], found["device"])]


def main(argv: list[str]) -> int:
    s, where = train.parse(argv, Settings), launch.place()
    if s.steps < 1 or not 0 < s.memory < 1:
        raise ConfigError(f"--steps={s.steps} --memory={s.memory:g}: at least one step; a share of the memory, between 0 and 1")
    began, dtype, plan.PROBE_S = time.perf_counter(), getattr(torch, train.resolve_dtype("auto", where.device)), s.seconds
    m = model.model_of("debug", **SMALL)
    if m.experts % where.ranks_per_node:
        raise ConfigError(f"{where.ranks_per_node} ranks on a node cannot share the {m.experts} experts of the checks; use fewer of them, "
                          "e.g. make gpu-check RANKS=4")
    launch.setup(where)
    grid = parallel.make_grid(where.rank, where.world, where.ranks_per_node, 1, m,
                              options={"column": launch.group_options(where.backend, train.Hyperparameters.column_ctas)})
    h = Here(s, where, grid, m, dtype)

    def say(text: str):
        if where.rank == 0:
            print(text, flush=True)

    real = where.device.type != "cpu"
    kernels = parallel.together(lambda: model.choose_kernels(s.moe_kernel, s.attention, s.compile, where.device,
                                                             str(dtype).removeprefix("torch."), m), grid, where.device)
    say(f"{where.world} ranks on {name_of(where.device)}; {kernels}")
    if not real:
        say("NO ACCELERATOR HERE: checks compare bf16 and fp32 of this CPU, rates are its own. Says nothing about a GPU.")
    checks = run_checks(h._replace(dtype=torch.bfloat16), say)
    hp, m_step, settings = settings_of_step(h)
    measured = measure(h, m_step)
    means = parallel.exchange(list(measured.values()), grid, where.device).mean(0).tolist()
    rates = dict(zip(measured, means))
    constants, assumed = machine_of(h, rates)
    step = step_report(h, hp, m_step, settings, constants)
    found = {"made": time.strftime("%Y-%m-%d %H:%M:%S"), "device": where.device.type, "name": name_of(where.device),
             "on_accelerator": real, "ranks": where.world, "kernels": kernels, "torch": torch.__version__,
             "python": platform.python_version(), "seconds": time.perf_counter() - began, "checks": checks, "rates": rates,
             "step": step, "not_measured": {"from": DEFAULTS_FROM, "names": assumed}, "machine": constants}
    for line in in_words(found):
        say(line)
    if where.rank == 0:
        place = Path(s.out)
        place.parent.mkdir(parents=True, exist_ok=True)
        tmp = place.with_name(f".{place.name}.{os.getpid()}")
        tmp.write_text(json.dumps(found, indent=1))
        tmp.rename(place)
    wrong = [name for name, check in checks.items() if not check["ok"]]
    say(f"{s.out}: {len(checks) - len(wrong)} of {len(checks)} checks passed{', WRONG: ' + ', '.join(wrong) if wrong else ''}; "
        f"{found['seconds']:.0f} s{'' if real else '; on a CPU, so no statement about a GPU'}")
    return launch.EXIT_UNHEALTHY if wrong else launch.EXIT_OK


if __name__ == "__main__":
    sys.exit(launch.run(main))
