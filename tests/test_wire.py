"""What travels: bytes against the table of the design, compressed transports, order of starts and waits, lifetimes."""

import dataclasses
import json
import math

import numpy as np
import optim
import parallel
import pytest
import torch
import train
from launch import Place, group_options
from model import ConfigError, count_params, expert_shapes, layer_shapes, model_of
from parallel import Transport, check_transport, dequantise, grid_warnings, make_grid, quantise
from spawn import ROOT, launch, worker

CPU = torch.device("cpu")

# ------------------------------------------------------------------------------------------------------------------
# The ledger against the table
# ------------------------------------------------------------------------------------------------------------------

TRANSPORTS = [
    dict(name="production", compute="bfloat16", weights="fp8", grads="bfloat16", dense="step"),
    dict(name="plain", compute="float32", weights="compute", grads="float32", dense="layer"),
    dict(name="regather", compute="bfloat16", weights="bf16", grads="bfloat16", dense="layer", reshard=False),
    dict(name="bf16 over fp32", compute="float32", weights="bf16", grads="bfloat16", dense="step", chunk=1),
]


def table(m, case, R, N, E) -> dict[str, float]:
    """Bytes that a rank sends in a step, by group and purpose: section 6 of the design, written out again."""
    c = dict(float32=4, bfloat16=2)[case["compute"]]
    g = dict(float32=4, bfloat16=2)[case["grads"]]
    b = dict(fp8=1 + 4 / 128, bf16=2, compute=c)[case["weights"]]
    L, T, k, o = m.layers, m.seq_len, m.top_k, math.ceil(m.experts / E / N)
    v = sum(math.prod(s) for s in expert_shapes(m).values())
    small = ("attn_norm", "q_norm", "k_norm", "moe_norm", "router")
    sizes = {name: math.prod(shape) for name, shape in layer_shapes(m).items()}
    slices = {"dense": sum(n for name, n in sizes.items() if name not in small),
              "control": sum(sizes[name] for name in small), "embed": m.vocab * m.width, "head": m.vocab * m.width,
              "final": m.width}
    slices = {name: math.ceil(n / (N * E)) for name, n in slices.items()}
    want = {"column expert gather": L * 2 * o * v * b * (N - 1), "column expert gradient": L * o * v * g * (N - 1)}
    for kind, weight, grad in (("dense", c, g), ("control", 4, 4)):
        s, whole = slices[kind], slices[kind] * N
        if case["dense"] == "step":
            want[f"column {kind} refresh"] = L * s * weight * (N - 1)
            want[f"node {kind} gather"] = L * 2 * whole * weight * (E - 1)
            want[f"node {kind} gradient"] = L * whole * grad * (E - 1)
            want[f"column {kind} gradient"] = L * s * 4 * (N - 1)
        else:
            passes = 1 if case.get("reshard", True) else 2
            want[f"shard {kind} gather"] = L * passes * s * weight * (N * E - 1)
            want[f"node {kind} gather"] = L * (2 - passes) * whole * weight * (E - 1)
            want[f"shard {kind} gradient"] = L * s * grad * (N * E - 1)
    for kind, weight, grad in (("embed", c, g), ("head", c, g), ("final", 4, 4)):  # once per step
        want[f"shard {kind} gather"] = slices[kind] * weight * (N * E - 1)
        want[f"shard {kind} gradient"] = slices[kind] * grad * (N * E - 1)
    tokens = L * T * m.width * c * (E - 1)
    want |= {"node dispatch": 2 * tokens, "node combine": tokens, "node combine gradient": tokens,
             "node dispatch gradient": tokens, "node dispatch routing": 2 * L * T * k * 8 * (E - 1),
             "node dispatch routing gradient": L * T * k * 4 * (E - 1)}
    owned = L * (o * v + slices["dense"] + slices["control"]) + slices["embed"] + slices["head"] + slices["final"]
    want["replica replica gradient"] = 2 * owned * 4 * (R - 1) / R
    return {name: count for name, count in want.items() if count}


def muon_bytes(m, N, E, n, e) -> dict[str, int]:
    """Values in this rank's slices of matrices that others own go there, and those of its own matrices elsewhere come back."""
    place, here = n * E + e, [0, 0]
    owners = plan_at(place, N, E, m)[0].owners
    for i in range(m.layers):
        begin, matrices = 0, [(name, math.prod(s)) for name, s in layer_shapes(m).items() if name in "qkvo"]
        size = math.ceil(sum(count for _, count in matrices) / (N * E))
        low = (e * N + n) * size
        for name, count in matrices:
            mine = max(0, min(begin + count, low + size) - max(begin, low))
            owned = owners[f"layers.{i}.{name}"] == place
            here[0] += 0 if owned else mine
            here[1] += count - mine if owned else 0
            begin += count
    return {"shard muon momentum": here[0] * 2, "shard muon direction": here[1] * 2}


@pytest.mark.parametrize("nodes, ranks, replicas", [(1, 4, 1), (2, 2, 1), (4, 1, 1), (3, 1, 1), (2, 2, 2), (4, 1, 2)])
def test_bytes_are_those_of_the_table_and_of_the_interface(tmp_path, nodes, ranks, replicas):
    cases = TRANSPORTS if replicas == 1 or ranks == 1 else TRANSPORTS[:2]  # of both axes at once two will do
    worker("ledger", nodes, ranks, tmp_path, alone=True, cases=cases, replicas=replicas)
    m = model_of("debug", layers=2, seq_len=256)
    found = [json.loads((tmp_path / f"ledger.{rank}.json").read_text()) for rank in range(nodes * ranks)]
    for case in cases:
        want = table(m, case, replicas, nodes // replicas, ranks)
        for rank, results in enumerate(found):
            n, e = rank // ranks % (nodes // replicas), rank % ranks
            sent = {name: count for name, count in results[case["name"]]["sent"].items() if count}
            exact = want | muon_bytes(m, nodes // replicas, ranks, n, e)
            assert sent == pytest.approx({k: v for k, v in exact.items() if v}, abs=8), case["name"]  # all-reduce: whole bytes
        total, carried = found[0][case["name"]]["all ranks"], found[0][case["name"]]["loopback"]
        assert carried == pytest.approx(total, rel=0.02), case["name"]


# ------------------------------------------------------------------------------------------------------------------
# fp8 blocks
# ------------------------------------------------------------------------------------------------------------------


def test_quantising_then_gathering_is_gathering_then_quantising():
    experts = torch.randn(6, 512) * torch.logspace(-3, 3, 6)[:, None]
    assert torch.equal(torch.cat([quantise(part) for part in experts.split(2)]), quantise(experts))
    assert quantise(experts).shape == (6, 512 + 4 * 4) and quantise(experts).dtype == torch.uint8


def test_blocks_keep_three_bits_and_their_largest_value():
    x = torch.randn(4, 1024)
    back = dequantise(quantise(x), torch.float32)
    blocks = x.unflatten(-1, (-1, 128))
    error = (back.unflatten(-1, (-1, 128)) - blocks).abs()
    largest = blocks.abs().amax(-1, keepdim=True)
    assert (error <= blocks.abs() / 16 * 1.0001 + largest * 2**-9 / 448 * 1.0001).all()  # normal | subnormal E4M3
    assert torch.allclose(back.unflatten(-1, (-1, 128)).abs().amax(-1), largest[..., 0], rtol=1e-6)


def test_zeros_denormals_and_values_that_are_not_finite():
    x = torch.randn(8, 128)
    x[0] = 0
    x[1] = 1e-42  # a denormal: scale must not underflow to 0
    x[2, 5], x[3, 6], x[4, 7] = float("inf"), float("-inf"), float("nan")
    x[5, 0] = 3e38  # one huge value: the others vanish, nothing overflows
    x[6] = torch.finfo(torch.float32).tiny
    packed = quantise(x)
    back = dequantise(packed, torch.float32)
    assert (back[0] == 0).all() and packed[0, 128:].view(torch.float32) == 1
    assert back[1].isfinite().all() and (back[1] - x[1]).abs().max() <= 1e-42
    assert back[2:5].isnan().all(), "a block that is not finite becomes NaN as a whole"
    assert back[5, 0] == pytest.approx(3e38, rel=1e-6) and (back[5, 1:] == 0).all()
    assert back[6].isfinite().all() and back[7].isfinite().all()


# ------------------------------------------------------------------------------------------------------------------
# Losses
# ------------------------------------------------------------------------------------------------------------------


def test_compressed_transports_follow_the_uncompressed_losses(tmp_path):
    """The first 50 steps of the default run, two nodes of two ranks: fp8 gathers and bf16 gradients against none."""
    (ROOT / "data").mkdir(exist_ok=True)
    (tmp_path / "data").symlink_to(ROOT / "data")  # prepared once
    found = {}
    for name, weights, grads in (("plain", "compute", "fp32"), ("compressed", "fp8", "bf16")):
        launch(2, 2, "train.py", f"--run={name}", "--stop_at=50", "--val_every=0", "--wandb=off", "--track_memory=0",
               "--check_every=0", f"--weight_transport={weights}", f"--grad_transport={grads}", cwd=tmp_path)
        lines = (tmp_path / "out" / name / "metrics.jsonl").read_text().splitlines()
        found[name] = [json.loads(line)["loss"] for line in lines]
    difference = np.abs(np.subtract(found["plain"], found["compressed"]))
    assert len(difference) == 50 and difference.max() < 0.01 and found["plain"][-1] < found["plain"][0] - 2


# ------------------------------------------------------------------------------------------------------------------
# Sums, lifetimes, order
# ------------------------------------------------------------------------------------------------------------------


def test_the_sum_of_bf16_slices_is_the_fp64_sum_to_fp32_rounding_every_time(tmp_path):
    worker("sums", 4, 1, tmp_path)
    results = [json.loads((tmp_path / f"sums.{rank}.json").read_text()) for rank in range(4)]
    assert all(r["error"] < 2e-7 and r["repeats differ"] == 0 for r in results), results


POISONED = [dict(name=f"{name}{poison}", poison=poison, lr=1e-3, **case) for poison in (0, 7) for name, case in {
    "production": dict(steps=50, router="sigmoid", compute="bfloat16", weights="fp8", grads="bfloat16", offload=1.0,
                       offload_state=True, stream=5000, keep=1),
    "chunks": dict(steps=10, c=2, weights="bf16", dense="layer", chunk=1)}.items()]


@pytest.mark.parametrize("nodes, ranks, replicas, many", [(2, 2, 1, 12), (4, 1, 2, 50)])
def test_poison_changes_nothing(tmp_path, nodes, ranks, replicas, many):
    """50 steps with NaN in every destination until it is waited for, and transfers and copies at random moments."""
    cases = [case | dict(steps=min(case["steps"], many)) for case in POISONED]
    worker("layouts", nodes, ranks, tmp_path, replicas=replicas, cases=cases)
    results = json.loads((tmp_path / "results.json").read_text())
    for name, steps in (("production", many), ("chunks", 10)):
        assert results[f"{name}0"] == results[f"{name}7"]
        assert np.isfinite(results[f"{name}7"]["losses"]).all() and len(results[f"{name}7"]["losses"]) == steps


def test_poison_shows_an_early_read_and_a_changed_input(tmp_path):
    worker("poisoned_faults", 1, 2, tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"faults.{rank}.json").read_text())
        assert found["healthy"] == 0 and found["read early"] == 40 and 5 < found["input changed"] < 35, found
        assert found["dropped"] == 40, found


def test_transfers_run_beside_computation(tmp_path):
    """Launch and wait order: while a layer computes, the next layer's weights and the last one's gradients are on their way.
    Exposed are the ends only: the first layer's weights in the forward pass, and its gradients at the end."""
    case = dict(router="sigmoid", compute="bfloat16", weights="fp8", grads="bfloat16")
    worker("trace", 2, 2, tmp_path, case=case, replicas=1)
    events = [tuple(e) for e in json.loads((tmp_path / "trace.0.json").read_text())]
    L = 4
    in_flight_at = []  # purposes on their way at each computation
    flying = []
    for event, what in events:
        if event == "start":
            flying.append(what)
        elif event == "wait":
            flying.remove(what)
        else:
            in_flight_at.append((what, list(flying)))
    blocks = [flying for what, flying in in_flight_at if what == "block"]
    assert len(blocks) == 2 * L
    for i, flying in enumerate(blocks):
        last_of_pass = i in (L - 1, 2 * L - 1)
        assert flying.count("expert gather") == (0 if last_of_pass else 2), f"weights of the next layer at block {i}"
        if i > L:  # gradients of the layer before: experts', and the first stage of the dense ones; the stage over the column
            assert flying.count("expert gradient") == 2  # of the layer before that follows a layer later
            assert flying.count("dense gradient") == (1 if i == L + 1 else 2)
    assert blocks[L - 1].count("head gather") == 1
    computed = [(what, flying) for what, flying in in_flight_at if what != "block"]
    experts = [flying for what, flying in computed if what == "experts"]
    assert len(experts) == 2 * L
    assert all("muon momentum" in flying for flying in experts[:L]), "slices travel while gate and up are updated"
    assert all("muon direction" in flying for flying in experts[L : L + L // 2]), "directions, while half of down is"
    assert all("dense refresh" in flying for flying in experts[L + L // 2 :]), "the refresh, while the other half is"


# ------------------------------------------------------------------------------------------------------------------
# The Muon exchange's plan
# ------------------------------------------------------------------------------------------------------------------


def plan_at(rank, N, E, m):
    grid = make_grid(rank, N * E, E, 1, m, connect=False)
    state = parallel.State(parallel.make_buckets(m, grid), {}, {}, torch.zeros(1))
    return optim.plan_muon(state, grid, m, "muon"), grid


@pytest.mark.parametrize("N, E", [(1, 1), (1, 4), (2, 2), (3, 1), (3, 2)])
def test_all_ranks_plan_the_same_even_exchange(N, E):
    m = model_of("debug", layers=6, shared_experts=1)
    plans = [plan_at(rank, N, E, m)[0] for rank in range(N * E)]
    grids = [plan_at(rank, N, E, m)[1] for rank in range(N * E)]
    assert all(plan.owners == plans[0].owners for plan in plans)
    cost = np.zeros(N * E)
    for rank, (plan, grid) in enumerate(zip(plans, grids)):
        for other, there in zip(plans, grids):  # what one sends is what the other expects
            sends = sum(b - a for _, a, b in plan.slices[there.shard.index])
            assert sends == sum(b - a for _, a, b in other.runs[grid.shard.index])
            assert sends == plan.counts[grid.shard.index][there.shard.index]
        cost[rank] = sum(optim.newton_schulz_cost(shape) for shape in plan.mine.values())
    assert cost.max() <= 1.34 * cost.mean()  # the bound of longest-processing-time-first is 4/3 of the best


def test_a_broken_plan_is_refused_before_anything_travels():
    plan, grid = plan_at(0, 1, 1, model_of("debug"))
    torn = dataclasses.replace(plan, runs=[plan.runs[0][1:]])
    with pytest.raises(RuntimeError, match=r"the slices of layers.0.q do not make up its 65536 values"):
        optim.check_plan(torn, grid, CPU)


# ------------------------------------------------------------------------------------------------------------------
# Settings
# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args, message", [
    ("--weight_transport=int8", "--weight_transport=int8: unknown; use one of auto, fp8, bf16, compute"),
    ("--grad_transport=fp8", "--grad_transport=fp8: unknown; use one of auto, bf16, fp32"),
    ("--dense_gather=always", "--dense_gather=always: unknown; use one of step, layer"),
])
def test_unknown_transports(args, message):
    with pytest.raises(ConfigError) as error:
        train.resolve(train.parse(args.split()), Place(0, 4, 0, 4, CPU, "gloo"))
    assert message in str(error.value)


def test_sizes_that_do_not_divide():
    odd = model_of("debug", width=8, expert_width=24, heads=2, kv_heads=1, head_dim=8)
    with pytest.raises(ConfigError, match=r"--weight_transport=fp8: the 192 values of an expert's down"):
        check_transport(Transport(torch.bfloat16, "fp8"), odd, make_grid(0, 1, 1, 1, odd, connect=False))
    m = model_of("debug")
    with pytest.raises(ConfigError, match=r"--grad_chunk=3: must divide the 8 experts.*use one of 1, 2, 4, 8, or 0"):
        check_transport(Transport(torch.bfloat16, grad_chunk=3), m, make_grid(0, 2, 1, 1, m, connect=False))


def test_wasteful_numbers_of_nodes_are_told():
    m = model_of("1t")
    told = grid_warnings(make_grid(0, 4 * 80, 4, 1, m, connect=False), m)
    assert "96 experts of a column over 80 nodes: 1.67x the bytes" in told[0] and "48, 96 nodes per replica" in told[0]
    assert not grid_warnings(make_grid(0, 4 * 96, 4, 1, m, connect=False), m)


def test_the_cap_on_thread_blocks_is_per_group():
    assert group_options("gloo", 16) is None and group_options("nccl", 0) is None
    if torch.distributed.is_nccl_available():
        assert group_options("nccl", 16).config.max_ctas == 16


def test_reference_model_has_the_published_bytes():
    """A gather of 7.25 GB in bf16 per rank and layer; 1.09 TB of experts over InfiniBand per step on 96 nodes."""
    m = model_of("1t")
    want = table(m, dict(TRANSPORTS[0]), 1, 96, 4)
    v = sum(math.prod(s) for s in expert_shapes(m).values())
    assert 96 * v * 2 == pytest.approx(7.25e9, rel=0.01) and count_params(m)[0] == pytest.approx(1.08e12, rel=0.01)
    assert want["column expert gather"] + want["column expert gradient"] == pytest.approx(1.09e12, rel=0.05)
