"""The dry run: costs against hand counts, bytes and memory against real runs, its clock against small sums, refusals."""

import json
import math
import subprocess
import sys
from types import SimpleNamespace

import check
import pytest
import torch
import torch.nn.functional as F
import worker as ranks
from model import ConfigError, model_of
from spawn import ROOT, worker

import launch
import offload
import parallel
import plan
from plan import META, Flow, Op, Options, Recorder, Start, Sync, Transfers, Wait

SETTINGS = ["--size=debug", "--layers=2", "--seq_len=256", "--max_per_group=1", "--stream_chunk=0"]
CASES = [
    dict(name="production", compute="bfloat16", weights="fp8", grads="bfloat16", dense="step"),
    dict(name="plain", compute="float32", weights="compute", grads="float32", dense="layer"),
    dict(name="regather", compute="bfloat16", weights="bf16", grads="bfloat16", dense="layer", reshard=False),
    dict(name="chunks", compute="float32", weights="bf16", grads="bfloat16", dense="step", chunk=1),
]


def recorded(run, *already) -> list[Op]:
    """Operations of run() on meta tensors."""
    recorder = Recorder({}, dict(already))
    with recorder:
        run()
    return [event for event in recorder.events if isinstance(event, Op)]


def empty(*shape: int, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device=META)


# ------------------------------------------------------------------------------------------------------------------
# Costs
# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run, flops, nbytes", [
    (lambda: empty(3, 5) @ empty(5, 7), 2 * 3 * 5 * 7, 2 * (15 + 35 + 21)),
    (lambda: torch.bmm(empty(2, 3, 5), empty(2, 5, 7)), 2 * 2 * 3 * 5 * 7, 2 * (30 + 70 + 42)),
    (lambda: torch.baddbmm(empty(2, 3, 7), empty(2, 3, 5), empty(2, 5, 7)), 2 * 2 * 3 * 5 * 7, 2 * (42 + 30 + 70 + 42)),
    (lambda: torch.addmm(empty(3, 7), empty(3, 5), empty(5, 7)), 2 * 3 * 5 * 7, 2 * (21 + 15 + 35 + 21)),
    (lambda: empty(3, 5) @ empty(5), 2 * 3 * 5, 2 * (15 + 5 + 3)),
    (lambda: F.grouped_mm(empty(48, 16), empty(4, 16, 8), offs=empty(4, dtype=torch.int32)), 2 * 48 * 16 * 8,
     2 * (48 * 16 + 4 * 16 * 8 + 48 * 8) + 16),
    (lambda: F.grouped_mm(empty(48, 16).T, empty(48, 8), offs=empty(4, dtype=torch.int32)), 2 * 48 * 16 * 8,
     2 * (48 * 16 + 48 * 8 + 4 * 16 * 8) + 16),
    (lambda: F.grouped_mm(empty(4, 16, 8), empty(8, 48), offs=empty(4, dtype=torch.int32)), 2 * 16 * 8 * 48,
     2 * (4 * 16 * 8 + 8 * 48 + 16 * 48) + 16),
    (lambda: F.grouped_mm(empty(4, 16, 8), empty(4, 8, 24)), 4 * 2 * 16 * 8 * 24, 2 * (4 * 16 * 8 + 4 * 8 * 24 + 4 * 16 * 24)),
    (lambda: empty(6, 4).add_(empty(6, 4)), 0, 2 * 24 * 3),
    (lambda: empty(6, 4).copy_(empty(4)), 0, 2 * (24 + 4)),  # the expanded row is read once
    (lambda: empty(6, 4).zero_(), 0, 2 * 24),
    (lambda: empty(600, 4).index_select(0, empty(5, dtype=torch.int64)), 0, 2 * 2 * 20 + 8 * 5),  # not the whole table
    (lambda: empty(6, 4).float(), 0, 24 * (2 + 4)),
], ids=lambda x: "" if callable(x) else str(x))
def test_cost_of_an_operation(run, flops, nbytes):
    (op,) = recorded(run)
    assert (op.flops, op.nbytes) == (flops, nbytes)


def test_views_and_fresh_memory_cost_nothing():
    x = empty(8, 6)
    assert recorded(lambda: x.view(-1)[3:].unflatten(0, (5, 9)).T.expand(2, 9, 5).detach().new_empty(3)) == []


def test_attention_counts_visible_pairs_of_each_segment():
    heads, K, bounds = 4, 16, [0, 3, 10, 40]
    cu = torch.empty(len(bounds), dtype=torch.int32, device=META)
    segments = plan.Segments(bounds, cu)
    q, k = empty(40, heads, K).requires_grad_(), empty(40, 2, K).requires_grad_()
    ops = recorded(lambda: torch.autograd.grad(plan.model.segment_attention(q, k, k, segments), (q, k), empty(40, heads, K)),
                   (cu.untyped_storage()._cdata, bounds))
    visible = sum(i + 1 for n in (3, 7, 30) for i in range(n))
    forward, backward = (next(op for op in ops if op.work == work) for work in ("attention", "attention gradient"))
    assert forward.flops == 2 * heads * visible * 2 * K and backward.flops == 5 * heads * visible * 2 * K


def test_products_of_a_step_are_those_of_the_model():
    """Without recomputation: forward once and backward twice of every weight and token, plus attention."""
    settings = [*SETTINGS, "--recompute=False", "--dtype=bfloat16", "--optimizer=adamw"]
    hp, m = plan.resolve(settings, Options(1, 1))
    rec = plan.record(hp, m, Options(1, 1), rows=[[0, 256]])
    ops = [e for e in rec.events if isinstance(e, Op)]
    attention = sum(op.flops for op in ops if op.work.startswith("attention"))
    products = sum(op.flops for op in ops if op.work.endswith("products"))
    _, active = plan.model.count_params(m)
    norms = m.layers * (2 * m.width + 2 * m.head_dim) + m.width
    assert products == 6 * (active - norms) * 256
    assert attention == m.layers * 7 * 2 * m.heads * m.head_dim * 256 * 257 // 2


# ------------------------------------------------------------------------------------------------------------------
# A recording against real runs
# ------------------------------------------------------------------------------------------------------------------


def recording(case: dict, nodes: int, per_node: int, rank: int, device: str = "cpu", **options) -> plan.Recording:
    names = {"float32": "fp32", "bfloat16": "bf16"}
    settings = [*SETTINGS, f"--dtype={case['compute']}", f"--weight_transport={case['weights']}",
                f"--grad_transport={names[case['grads']]}", f"--dense_gather={case['dense']}",
                f"--node_reshard={case.get('reshard', True)}", f"--grad_chunk={case.get('chunk', 0)}",
                f"--offload_state={case.get('offload_state', False)}", f"--offload_fraction={case.get('offload', 0)}",
                f"--keep_layers={case.get('keep', 0)}"]
    o = Options(nodes, per_node, rank, device, **options)
    hp, m = plan.resolve(settings, o)
    rows = ranks.random_rows(model_of("debug", layers=2, seq_len=256), nodes * per_node)
    return plan.record(hp, m, o, rows=[rows[rank].segments.bounds])


@pytest.mark.parametrize("nodes, per_node", [(1, 4), (2, 2)])
def test_bytes_and_peak_memory_equal_those_of_a_real_run(tmp_path, nodes, per_node):
    cases = [CASES[0], CASES[2], dict(CASES[3], name="offloaded", offload_state=True, offload=0.5), dict(CASES[1], name="kept", keep=1)]
    worker("tracked", nodes, per_node, tmp_path, cases=cases)
    for rank in range(4):
        results = json.loads((tmp_path / f"tracked.{rank}.json").read_text())
        for case in cases:
            plans = {device: recording(case, nodes, per_node, rank, device) for device in ("cpu", "cuda")}
            for device, rec in plans.items():
                sent = {" ".join(k): v for k, v in rec.sent.items() if k[0] != "world"}
                assert sent == results[case["name"]]["sent"], (rank, case["name"], device)
            found, want = plans["cpu"].peak, results[case["name"]]["peak"]
            assert sum(found.values()) == pytest.approx(sum(want.values()), rel=0.05), (rank, case["name"])
            for purpose in found.keys() | want.keys():
                if sum(found.values()) == sum(want.values()):  # else something was let go late, and the peak is another moment
                    assert found.get(purpose, 0) == pytest.approx(want.get(purpose, 0), rel=0.05), (rank, case["name"], purpose)


def test_the_same_plan_twice_and_other_tensors_untouched():
    first, second = (recording(CASES[0], 2, 2, 1) for _ in range(2))
    assert first.events == second.events and first.peak == second.peak
    r = plan.rates("jupiter-gh200")
    assert plan.replay(first, r).step_s == plan.replay(second, r).step_s
    assert parallel.WIRE.record is None and plan.model.META_AS is None and offload.Tracker.active is None


def test_every_start_is_waited_for_once_and_uneven_routing_waits_for_the_device():
    rec = recording(CASES[0], 2, 2, 0, "cuda")
    starts = [e.number for e in rec.events if isinstance(e, Start)]
    waits = [e.number for e in rec.events if isinstance(e, Wait)]
    assert sorted(starts) == sorted(waits) and len(set(starts)) == len(starts)
    settings = [s for s in SETTINGS if "max_per_group" not in s] + ["--max_per_group=4", "--dtype=bfloat16"]
    o = Options(1, 2, routing_imbalance=1.5)
    hp, m = plan.resolve(settings, o)
    uneven = plan.record(hp, m, o)
    assert sum(isinstance(e, Sync) for e in uneven.events) == 2 + m.layers


# ------------------------------------------------------------------------------------------------------------------
# The clock
# ------------------------------------------------------------------------------------------------------------------


def flow(number: int, group: str, seconds: float, **left: float) -> Flow:
    return Flow(Start(number, "all-gather", group, 2, "dispatch", 0, 0), seconds, left, 0)


def run_out(transfers: Transfers):
    while transfers.active:
        transfers.advance(*transfers.next_change())


def test_transfers_of_a_group_queue_and_those_of_two_groups_share_a_link():
    transfers = Transfers({"net": 10.0})
    a, b, c = flow(1, "column", 1.0, net=100), flow(2, "column", 0.0, net=50), flow(3, "shard", 1.0, net=50)
    for one in (a, b, c):
        transfers.add(one)
    run_out(transfers)
    # both from 1 s on with 5 each: c is done at 11; a has 50 left, alone until 16; then b
    assert (c.end, a.end, b.begun, b.end) == pytest.approx((11, 16, 16, 21))
    assert transfers.busy["net"] == pytest.approx(20)


def small_clock(**changes) -> dict[str, float]:
    r = plan.rates("jupiter-gh200") | dict(peak_bf16=100.0, dense_efficiency=1.0, memory_rate=10.0, memory_efficiency=1.0, kernel_s=0.0,
                                           launch_s=0.0, base_s=0.0, net_hop_s=0.0, node_hop_s=0.0, peer_s=0.0, net_rate=1.0, processors=4.0)
    return r | changes


def clock(events: list, **changes) -> plan.Timeline:
    rec = recording(CASES[0], 2, 1, 0)
    return plan.replay(rec._replace(events=events, hp=plan.dataclasses.replace(rec.hp, column_ctas=1)), small_clock(**changes), 1.0)


def product(seconds: float) -> Op:
    return Op("forward", "dense products", "mm", 100 * seconds, 0, False)


GATHER = Start(1, "all-gather", "column", 2, "expert gather", 8, 16)  # 8 seconds


def test_what_a_wait_exposes_and_what_transfers_slow():
    tl = clock([GATHER, product(3), Wait(1)])  # a quarter of the SMs is taken: 3 seconds become 4
    assert tl.step_s == pytest.approx(8) and tl.slowed_s == pytest.approx(1)
    assert tl.exposed["column", "expert gather"] == pytest.approx(4)
    assert clock([product(3), GATHER, Wait(1)]).step_s == pytest.approx(11)
    memory_bound = Op("forward", "element-wise", "add", 0, 30, False)
    assert clock([GATHER, memory_bound, Wait(1)]).slowed_s == 0
    assert clock([GATHER, product(12), Wait(1)]).exposed.total() == 0


def test_where_ranks_share_cores_transfers_go_one_by_one_and_stop_all_work():
    near, memory_bound = Start(2, "all-gather", "node", 2, "dispatch", 8, 16), Op("forward", "element-wise", "add", 0, 30, False)
    events = [GATHER, near, memory_bound, Wait(1), Wait(2)]
    alone, shared = (clock(events, processors=1, default_ctas=share, node_rate=4.0) for share in (0, 1))
    assert shared.step_s == pytest.approx(8 + 2 + 3) and shared.slowed_s == pytest.approx(8 + 2)
    assert alone.step_s == pytest.approx(8) and alone.slowed_s == 0


def test_the_device_waits_for_a_slow_cpu_and_the_cpu_for_the_device():
    ops = [product(1)] * 5
    assert clock(ops, launch_s=2.0).step_s == pytest.approx(10)
    assert clock(ops, launch_s=0.5).launch_s == 0
    assert clock([product(1), Sync(), *ops], launch_s=2.0).step_s == pytest.approx(12)


def test_collectives_over_nodes_split_between_the_links():
    grid = parallel.make_grid(0, 8, 4, 1, model_of("debug"), connect=False)
    gather = plan.links_of(Start(1, "all-gather", "shard", 8, "embed gather", 700, 0), grid)
    assert gather == {plan.INFINIBAND: 100, plan.NVLINK: 600}  # of each slice of the other node once, over this rank's card
    assert plan.links_of(Start(1, "all-to-all", "shard", 8, "embed gradient", 700, 0), grid) == {plan.INFINIBAND: 400, plan.NVLINK: 300}
    assert plan.links_of(Start(1, "copy", "in", 2, "state in", 5, 5), grid) == {plan.C2C_IN: 5}


# ------------------------------------------------------------------------------------------------------------------
# The command
# ------------------------------------------------------------------------------------------------------------------


def command(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "plan.py", *args], capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_page_json_and_trace(tmp_path, capsys):
    args = ["--nodes", "2", "--ranks-per-node", "2", "--size", "debug", "--offload_state=True"]
    assert plan.main([*args, "--trace", str(tmp_path / "new" / "trace.json")]) == 0
    text = capsys.readouterr().out
    for words in ("fits.", "tokens/s per GPU", "Exposed transfers", "Checkpoint:", "Young-Daly", "Host memory", "Muon:", "MFU"):
        assert words in text
    events = json.loads((tmp_path / "new" / "trace.json").read_text())["traceEvents"]
    assert {"compute", "column [2]", "node [2]", "copies in"} <= {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")
    assert plan.main([*args, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    parts = sum(found["compute_s"].values()) + found["exposed_total_s"] + found["launch_bound_s"]
    assert parts == pytest.approx(found["step_s"]) and sum(found["phases_s"].values()) == pytest.approx(found["step_s"])


def test_a_sweep_shows_every_value_and_refusals(capsys):
    assert plan.main(["--nodes", "1", "--ranks-per-node", "2", "--sweep", "seq_len=256,512", "--sweep", "kv_heads=2,3"]) == 0
    text = capsys.readouterr().out
    assert text.count("refused") == 2 and text.count("yes") == 2


def test_what_does_not_fit_says_by_how_much_and_what_would(capsys):
    args = ["--nodes", "1", "--ranks-per-node", "4", "--size", "1t", "--layers=3", "--vocab=4096"]
    assert plan.main(args) == 0
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text and "GiB too much on the device" in text and "Nearest settings that fit" in text


@pytest.mark.parametrize("args, words", [
    (["--nodes", "3", "--replicas=2"], ["--replicas=2", "must divide the 3 nodes"]),
    (["--machine", "cray-1"], ["--machine=cray-1", "jupiter-gh200", "this-machine"]),
    (["--size", "2t"], ["--size=2t"]),
    (["--sequence=5"], ["--sequence=5", "no such setting"]),
    (["--rank", "9"], ["--rank=9", "4 ranks"]),
    (["--nodes", "0"], ["--nodes=0"]),
    (["--segment-lengths", "long"], ["--segment-lengths=long"]),
    (["--segment-lengths", "600,inf"], ["--segment-lengths=600,inf"]),
    (["--sweep", "seq_len"], ["--sweep seq_len"]),
    (["--sweep", "nodes=1,x"], ["nodes=x"]),
    (["--file-system", "0"], ["--file-system=0"]),
    (["--ladder", "--machine", "this-machine"], ["--ladder --machine=this-machine"]),
    (["--trace", "/dev/null/step.json"], ["--trace=/dev/null/step.json", "cannot be written"]),
    (["--compare", "no/run"], ["--compare=no/run"]),
])
def test_bad_input_is_refused_in_one_line(args, words):
    with pytest.raises(ConfigError) as refusal:
        plan.main(args)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_of_stages_the_longest_is_planned(tmp_path):
    """It needs most; the trainer's own look at memory takes it, too."""
    (tmp_path / "stages.json").write_text('[{"from_step": 128, "seq_len": 2048}]')
    o = plan.Options(1, 2)
    hp, m = plan.resolve(["--steps=300", f"--stages={tmp_path}/stages.json"], o)
    assert hp.seq_len == m.seq_len == 2048 and plan.resolve([], o)[1].seq_len == 512


def test_a_torn_line_is_left_out_of_a_comparison(tmp_path, monkeypatch):
    lines = [json.dumps({"step": i, "step_s": float(i), "sent_bytes": {}}) for i in range(1, 7)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 7, "ste']))
    tl = SimpleNamespace(exposed={}, step_s=1.0, phases={"optimizer": 0.1})
    assert plan.measured_run(tmp_path, tl, SimpleNamespace(sent={}, peak={}))["step_s"] == (1.0, 5.0)
    (tmp_path / "metrics.jsonl").write_text("{")
    with pytest.raises(ConfigError, match="holds no step yet"):
        plan.measured_run(tmp_path, tl, None)


def test_probes_and_checks_run_on_the_cpu_whatever_the_machine_has(monkeypatch):
    seen = []

    def run(argv, **how):
        seen.append(how["env"]["CUDA_VISIBLE_DEVICES"])
        return SimpleNamespace(returncode=1, stdout="", stderr="as far as here")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ConfigError, match="as far as here"):
        plan.measure([], plan.Options(1, 2))
    with pytest.raises(RuntimeError, match="as far as here"):
        check.run_layout(1, 2, 1, [])
    assert seen == ["", ""]


def test_the_command_ends_with_the_code_of_a_config_error():
    done = command("--machine", "cray-1")
    assert done.returncode == launch.EXIT_CONFIG and done.stderr.startswith("error: --machine=cray-1") and done.stderr.count("\n") == 1


def test_every_constant_names_its_source_and_no_machine_has_calibrated_ones():
    names = {frozenset(table) for table in plan.MACHINES.values()}
    assert len(names) == 1  # all machines have the same constants
    for table in plan.MACHINES.values():
        assert all(fact.source and math.isfinite(fact.value) and not fact.calibrated for fact in table.values())
    assert all(fact.calibrated and fact.source for fact in plan.PENALTIES.values())
    assert all(name in plan.PENALTIES for rung in plan.LADDER for name in rung.penalties)
