"""offload.py: arenas, copies, streamed state, kept and tracked memory, the host's report and its refusals."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from spawn import ROOT, launch, worker
from worker import random_rows

import offload
import optim
import parallel
import train
from model import ConfigError, model_of, param_shapes

CPU = torch.device("cpu")

# ------------------------------------------------------------------------------------------------------------------
# Where things live changes no result
# ------------------------------------------------------------------------------------------------------------------

SAME = {"resident": dict(), "some inputs": dict(offload=0.5), "state": dict(offload_state=True),
        "kept": dict(keep=1), "kept and offloaded": dict(keep=1, offload=1.0),
        "odd chunks": dict(offload=1.0, offload_state=True, stream=7777),
        "an expert at a time": dict(offload_state=True, stream=1)}
VARIANTS = {
    "muon": dict(),
    "adamw": dict(optimizer="adamw"),
    "production": dict(router="sigmoid", compute="bfloat16", weights="fp8", grads="bfloat16"),
    "layer": dict(dense="layer", weights="bf16"),
}


@pytest.mark.parametrize("nodes, ranks, replicas, variants", [(2, 2, 1, [*VARIANTS]), (4, 1, 2, ["production"])])
def test_where_things_live_changes_no_bit(tmp_path, nodes, ranks, replicas, variants):
    """Activations and state on the host, streamed in chunks that do and do not divide: losses, norm and masters are the same
    bits as with everything on the device, for every optimizer."""
    same = {v: [*SAME] if v in ("muon", "production") else ["resident", "odd chunks"] for v in variants}
    cases = [VARIANTS[v] | SAME[s] | dict(name=f"{v}, {s}", steps=3) for v in variants for s in same[v]]
    worker("layouts", nodes, ranks, tmp_path, replicas=replicas, cases=cases)
    results = json.loads((tmp_path / "results.json").read_text())
    for v in variants:
        resident = results[f"{v}, resident"]
        assert len(set(resident["losses"])) == 3
        assert not [s for s in same[v] if results[f"{v}, {s}"] != resident]


def test_a_pinned_slab_is_unregistered_once_nothing_of_it_is_left(monkeypatch):
    calls = []

    class Runtime:
        cudaHostRegister = staticmethod(lambda at, nbytes, flags: calls.append(("register", at)) or 0)
        cudaHostUnregister = staticmethod(lambda at: calls.append(("unregister", at)) or 0)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime)
    arena = offload.Arena("inputs", 64 << 20, torch.device("cuda"))
    parts = [arena.take((1000,), torch.float32) for _ in range(2)]
    place = arena.slab.data_ptr()
    del arena
    parts.pop()
    assert calls == [("register", place)], "a part is still there"
    parts.pop()
    assert calls == [("register", place), ("unregister", place)]


# ------------------------------------------------------------------------------------------------------------------
# Copies hide behind computation
# ------------------------------------------------------------------------------------------------------------------


def test_slow_copies_are_started_before_and_waited_for_after_a_layers_compute(tmp_path):
    worker("trace", 1, 2, tmp_path, replicas=1, case=dict(offload=1.0, offload_state=True, delay_s=0.01))
    events = [tuple(event) for event in json.loads((tmp_path / "trace.0.json").read_text())]
    blocks = [i for i, event in enumerate(events) if event == ("compute", "block")]
    assert len(blocks) == 8  # 4 layers forward, 4 backward

    def places(*event):
        return [i for i, e in enumerate(events) if e == event]

    # the inputs of layers 0, 1 and 2 leave before their layer computes, and are waited for after it
    out, gone = places("start", "inputs out"), places("wait", "inputs out")
    assert len(out) == len(gone) == 3
    for i in range(3):
        assert out[i] < blocks[i] < gone[i] < blocks[i + 1]
    # those of layers 2, 1 and 0 come back while the layer above is recomputed (and run backward)
    back, here = places("start", "inputs in"), places("wait", "inputs in")
    assert len(back) == len(here) == 3
    for i in range(3):
        assert back[i] < blocks[4 + i] < here[i] < blocks[5 + i]
    # a layer's gradients leave behind the next layer's compute; the ends, embedding and layer 0, have none
    for start, end in list(zip(places("start", "gradient out"), places("wait", "gradient out"))):
        assert start < end
    # the optimizer fetches the next chunk before it works on this one
    inside = [e for e in events[blocks[-1]:] if e[1] in ("state in", "experts")]
    first = inside.index(("compute", "experts"))
    assert inside[:first].count(("start", "state in")) > inside[:first].count(("wait", "state in"))


def test_a_copy_keeps_what_it_needs_until_wait_and_poison_shows_an_early_read():
    copies = offload.Copies(CPU)
    copies.poison = np.random.default_rng(0)
    arena = offload.Arena("test", 4096, CPU)
    slots, want = [arena.take((8, 8), torch.float32) for _ in range(4)], torch.arange(64.0).view(8, 8)
    early, started = [], []
    for slot in slots:  # some are copied in a thread, some in wait
        started.append(copies.send("out", want.clone(), slot))
        early.append(slot.isnan().any())
    assert any(early)
    with pytest.raises(RuntimeError, match="4 copies between host and device were never waited for"):
        copies.finish()
    for copy, slot in zip(started, slots):
        assert torch.equal(copy.wait(), want) and torch.equal(copies.fetch("in", slot).wait(), want)
    copies.finish()
    dropped = 0
    for _ in range(8):
        copy = copies.send("out", want.clone(), slots[0])
        copy._keep = (None, slots[0])
        try:
            copy.wait()
        except RuntimeError as error:
            dropped += "dropped before wait()" in str(error)
    assert dropped


# ------------------------------------------------------------------------------------------------------------------
# Arenas
# ------------------------------------------------------------------------------------------------------------------


def test_an_arena_is_one_slab_of_aligned_parts_that_is_touched_at_once():
    arena = offload.Arena("test", 3 * 512, CPU)
    parts = [arena.take((5, 7), torch.bfloat16), arena.take((100,), torch.float32), arena.take((1,), torch.uint8)]
    assert [p.data_ptr() - arena.slab.data_ptr() for p in parts] == [0, 512, 1024]
    assert all((p == 0).all() for p in parts)
    with pytest.raises(AssertionError, match="arena test: 1536 bytes do not hold"):
        arena.take((1,), torch.uint8)


def test_an_arena_that_cannot_be_had_names_the_host_and_the_setting():
    with pytest.raises(ConfigError, match=r"host \S+: .* GiB of host memory for inputs could not be had .* --offload_fraction"):
        offload.Arena("inputs", 2**60, CPU)


# ------------------------------------------------------------------------------------------------------------------
# Tracked memory
# ------------------------------------------------------------------------------------------------------------------


def peaks(steps: int, rows: int = 1, keep_layers: int = 0, layers: int = 4,
          compute=torch.float32) -> tuple[list[int], Counter, object]:
    """Tracked peak of each step of one rank, and what it was made of in the last."""
    m = model_of("debug", layers=layers, width=64, heads=4, kv_heads=2, head_dim=16, expert_width=32, vocab=250, seq_len=40)
    grid = parallel.make_grid(0, 1, 1, 1, m, connect=False)
    state, transport = parallel.init_state(m, grid, 0, CPU), parallel.Transport(compute, dense="step")
    optim.init_moments(state, "muon")
    plan, inputs = optim.plan_muon(state, grid, m, "muon"), offload.Inputs(None, [], None)
    parallel.start_refresh(state, grid, transport)()
    batch, found = random_rows(m)[:rows], []
    for step in range(steps):
        with offload.Tracker(offload.resident(state, inputs)) as memory:
            train.schedule(batch, state, grid, m, transport, 1 / 40, keep_layers=keep_layers, inputs=inputs)
            optim.update(state, grid, plan, "muon", 1e-3, 0.1, 1.0, step, transport)
        found.append(memory.peak)
    return found, memory.at_peak, m


def test_tracked_peak_is_flat_over_200_steps():
    found, _, _ = peaks(200, layers=2)
    assert len(set(found)) == 1, Counter(found)


def test_rows_add_their_inputs_and_one_accumulator():
    """From one row to two: boundary inputs and the gradients of one layer; from then on boundary inputs only."""
    (one, *_), _, m = peaks(1, rows=1)
    two, three, five = (peaks(1, rows=rows)[0][0] for rows in (2, 3, 5))
    T_D = m.seq_len * m.width * 4
    row = (m.layers + 3) * T_D + m.layers * m.seq_len * m.top_k * 4  # inputs, this layer's output and gradient, routing
    layer = 4 * sum(b.values * (m.experts if b.rule.owner == "expert" else 1)
                    for name, b in parallel.make_buckets(m, parallel.make_grid(0, 1, 1, 1, m, connect=False)).items()
                    if name.startswith("layers.0."))
    assert 0 < two - one <= row + layer
    assert 0 < three - two <= row and 0 < five - three <= 2 * row


def test_activations_of_the_last_layers_take_what_gradients_take_later():
    """Those of the last half are gone before the gradients of the first half are there; those of all are not."""
    none, one, half, every = (peaks(1, rows=2, keep_layers=keep, layers=12)[0][0] for keep in (0, 1, 6, 12))
    assert none == one == half < every


def test_kept_graphs_hold_no_weights():
    """In bf16 weights are no views of the masters: at the peak there are those of the layer at work and of the next."""
    _, at_peak, m = peaks(1, keep_layers=6, layers=6, compute=torch.bfloat16)
    a_layer = 2 * sum(math.prod(shape) for name, shape in param_shapes(m).items() if name.startswith("layers.0."))
    assert at_peak["weights"] <= 2 * a_layer


def test_offloaded_state_lies_in_one_slab_per_purpose():
    m = model_of("debug", layers=2, width=64, expert_width=32, vocab=256)
    state = parallel.init_state(m, parallel.make_grid(0, 1, 1, 1, m, connect=False), 0, CPU, offload=True)
    optim.init_moments(state, "muon")
    for tensors in (state.master, state.slots, *({n: k[kind] for n, k in state.moments.items() if kind in k}
                                                 for kind in ("momentum", "m", "v"))):
        assert len({x.untyped_storage()._cdata for x in tensors.values()}) == 1
    of_head = (state.master["head"], state.slots["head"], *state.moments["head"].values())
    assert len({x.untyped_storage()._cdata for x in of_head}) == 4


def test_the_tracker_sees_storages_once_and_their_purposes():
    base, slot = torch.zeros(1000), torch.zeros(7)
    with offload.Tracker({"masters": [base, base[10:]], "host inputs": [slot]}) as memory:
        x = torch.ones(100)
        y = x.view(10, 10).t()[2:]
        y.add_(1)
        offload.label("weights", {"a": y})
        z = x + 1
        del x, y
    assert memory.peak == 4000 + 800 and memory.total == 4000 + 400
    assert memory.at_peak == {"masters": 4000, "weights": 400, "transient": 400, "host inputs": 28} and z is not None


def test_the_tracker_works_without_values():
    with offload.Tracker({}) as memory:
        x = torch.empty(2**20, 2**12, dtype=torch.bfloat16, device="meta")
        del x
    assert memory.peak == 2**33 and memory.total == 0


# ------------------------------------------------------------------------------------------------------------------
# The host: report, record, refusal
# ------------------------------------------------------------------------------------------------------------------


def fake_numa(root, nodes):
    for n, (total, free, files, cpus) in nodes.items():
        (root / f"node{n}").mkdir(parents=True)
        fields = {"MemTotal": total, "MemFree": free, "MemUsed": total - free, "FilePages": files, "AnonPages": 10, "Slab": 1}
        (root / f"node{n}" / "meminfo").write_text("".join(f"Node {n} {k}:  {v} kB\n" for k, v in fields.items()))
        (root / f"node{n}" / "cpulist").write_text(cpus + "\n")


def test_numa_nodes_of_a_gh200(tmp_path):
    """Two CPU nodes, two of GPU memory without CPUs, one without memory."""
    fake_numa(tmp_path, {0: (120_000, 100_000, 5_000, "0-71"), 1: (120_000, 110_000, 0, "72-143"), 2: (0, 0, 0, ""),
                         4: (96_000, 95_000, 0, ""), 12: (96_000, 96_000, 0, "")})
    nodes = offload.numa_nodes(tmp_path)
    assert [n["node"] for n in nodes] == [0, 1, 4, 12] and [n["cpus"] for n in nodes] == [True, True, False, False]
    assert nodes[0] == {"node": 0, "cpus": True, "total": 120_000 * 1024, "free": 100_000 * 1024, "unattributed": 14_989 * 1024}


@pytest.mark.parametrize("groups, files, want", [
    ("0::/a/job\n", {"a/memory.max": "5000\n", "a/job/memory.max": "max\n"}, 5000),
    ("0::/a/job\n", {"a/job/memory.max": "max\n"}, None),
    ("5:cpu:/x\n4:memory:/x/job\n0::/\n", {"memory/x/job/memory.limit_in_bytes": "7000\n"}, 7000),
    ("", {}, None),
])
def test_limit_of_the_control_group(tmp_path, groups, files, want):
    (tmp_path / "own").write_text(groups)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert offload.control_group_limit(tmp_path, tmp_path / "own") == want


def test_a_host_that_cannot_hold_the_plan_is_refused_by_name():
    gib = 2**30
    fits = {"host": "n1", "has": 100 * gib, "numa": [], "planned": {"masters": 20 * gib, "inputs": 5 * gib}}
    offload.check_hosts([fits] * 4, "fix")
    with pytest.raises(ConfigError, match=r"host n2 has 90.0 GiB of memory, its 4 ranks would take 100.0 \(masters 80.00, inputs "
                                          r"20.00\); use more nodes"):
        offload.check_hosts([fits] * 4 + [fits | {"host": "n2", "has": 90 * gib}] * 4, "use more nodes")


def test_records_of_hosts_are_appended(tmp_path):
    report = offload.host_report({"masters": 2**30})
    for run in ("a", "b"):
        words = offload.record_hosts(tmp_path / "hosts.jsonl", [report, report], run)
        assert "2 ranks plan 2.00 (masters 2.00)" in words[0]
    lines = [json.loads(line) for line in (tmp_path / "hosts.jsonl").read_text().splitlines()]
    assert [line["run"] for line in lines] == ["a", "b"] and lines[0]["planned"] == {"masters": 2**31}
    assert lines[0]["numa"] and {"node", "cpus", "total", "free", "unattributed"} <= lines[0]["numa"][0].keys()


@pytest.mark.parametrize("settings, message", [
    (["--size=15b"], "ranks would take 175.2 (masters 56.21, moments 56.74, gradients 56.21, inputs 6.00); use more nodes"),
    (["--offload_fraction=1.5"], "--offload_fraction=1.5: a fraction of the layers"),
    (["--offload_fraction=0.5", "--recompute=False"], "--offload_fraction=0.5: offloads the inputs that layers are recomputed"),
    (["--keep_layers=9"], "--keep_layers=9: the model has 4 layers"),
])
def test_what_cannot_fit_is_refused_before_training(tmp_path, settings, message):
    ranks = 4 if "--size=15b" in settings else 1
    done = launch(1, ranks, "train.py", "--run=refused", "--wandb=off", *settings, cwd=tmp_path, check=False)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out" / "refused").exists()
    assert not (tmp_path / "out" / "hosts.jsonl").exists()  # else the next job of this name would ask so much of its nodes


def test_a_run_reports_memory_by_purpose(tmp_path):
    (ROOT / "data").mkdir(exist_ok=True)
    (tmp_path / "data").symlink_to(ROOT / "data")  # prepared once
    done = launch(1, 2, "train.py", "--run=memory", "--wandb=off", "--steps=4", "--seq_len=64", "--val_every=0",
                  "--track_memory=3", "--offload_fraction=0.5", "--offload_state=True", cwd=tmp_path)
    assert "2 ranks plan" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "out" / "memory" / "metrics.jsonl").read_text().splitlines()]
    assert ["tracked_bytes" in line for line in lines] == [True, True, True, False]
    assert lines[1]["tracked_peak_bytes"] == lines[2]["tracked_peak_bytes"]
    purposes = {"host masters", "host moments", "host gradients", "host inputs", "own weights", "weights"}
    assert purposes <= lines[2]["tracked_bytes"].keys()
    assert (tmp_path / "out" / "hosts.jsonl").exists()




def test_a_run_may_move_its_state_at_a_checkpoint(tmp_path):
    """Started on the host, resumed on the device: the same bits as a run that never moved."""
    (ROOT / "data").mkdir(exist_ok=True)
    (tmp_path / "data").symlink_to(ROOT / "data")
    common = ["--wandb=off", "--steps=4", "--seq_len=64", "--val_every=0"]
    for settings in (["--run=stays"], ["--run=moves", "--stop_at=2", "--offload_state=True", "--stream_chunk=9999"],
                     ["--run=moves"]):
        launch(1, 2, "train.py", *common, *settings, cwd=tmp_path)
    stays, moves = ([json.loads(line) for line in (tmp_path / "out" / run / "metrics.jsonl").read_text().splitlines()]
                    for run in ("stays", "moves"))
    assert [(s["loss"], s["grad_norm"]) for s in stays] == [(s["loss"], s["grad_norm"]) for s in moves] and len(stays) == 4
