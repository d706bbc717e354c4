"""Runs inside the ranks that the tests spawn: python launch.py ... -- tests/worker.py FUNCTION OUT [JSON]."""

import errno
import hashlib
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import check  # noqa: E402
import checkpoint  # noqa: E402
import health  # noqa: E402
import launch  # noqa: E402
import model  # noqa: E402
import offload  # noqa: E402
import optim  # noqa: E402
import parallel  # noqa: E402
import train  # noqa: E402
from check import ROWS, random_rows, tiny  # noqa: E402
from model import Segments, model_of  # noqa: E402

def full_gradients(state, m, grid) -> dict[str, torch.Tensor]:
    """This rank's pieces of every gradient, under names that say which values they are."""
    found = {}
    for name, bucket in state.buckets.items():
        flat = state.grad[name].flatten()
        for p in parallel.pieces(bucket, m, grid):
            found[f"{p.name}@{p.start}"] = flat[p.at : p.at + p.stop - p.start].clone()
    return found


def transport(case: dict) -> parallel.Transport:
    """A case's way of travelling; without any, nothing is compressed."""
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return parallel.Transport(named[case.get("compute", "float32")], case.get("weights", "compute"),
                              named[case.get("grads", "float32")], case.get("dense", "step"), case.get("reshard", True),
                              case.get("chunk", 0))


def plant(fault: str, grid):
    """Puts in one of the faults that layout equality must catch: GROUP:PURPOSE is a sum over the group that is left out."""
    reduce_scatter, all_reduce = parallel.reduce_scatter, parallel.all_reduce

    def faulty(x, group, wire, purpose, inner=1):
        if fault == f"{group.name}:{purpose}" and group.size > 1:
            return parallel.Pending(purpose, None, (), lambda: x[group.index].float())
        scaled = fault == "experts x E" and purpose == "expert gradient"
        return reduce_scatter(x * grid.E if scaled else x, group, wire, purpose, inner)

    parallel.reduce_scatter = faulty
    if fault == "replica:replica gradient":
        parallel.all_reduce = lambda x, group, purpose: parallel.Pending(purpose, None, (), lambda: x)
    return reduce_scatter, all_reduce


def choose_by_place(logits_TX, bias_X, m):
    """Experts by the token's place instead of its logits: bf16's rounding cannot send it elsewhere in another layout."""
    groups, per_group = torch.arange(m.groups), m.experts // m.groups
    place = torch.arange(len(logits_TX))[:, None]
    return (groups * per_group + (place * (groups + 1) + place // 5) % per_group).to(torch.int32)


def start(where, case: dict, replicas: int = 1, m=None):
    """A case's model, grid, state and this rank's rows."""
    m = m or tiny(max_per_group=case.get("c", 1), router=case.get("router", "softmax"), shared_experts=case.get("shared", 0))
    grid = parallel.make_grid(where.rank, where.world, where.ranks_per_node, replicas, m)
    state = parallel.init_state(m, grid, 1, where.device, case.get("offload_state", False))
    optim.init_moments(state, case.get("optimizer", "muon"))
    if m.router == "sigmoid":  # a bias that changes choices
        state.bias_LX.copy_(torch.linspace(-0.1, 0.1, m.experts).expand(m.layers, -1))
    count = ROWS // where.world
    rows = random_rows(m)[where.rank * count : (where.rank + 1) * count]
    return m, grid, state, rows


def steps(where, case: dict, m, grid, state, rows, count: int, after_first=lambda norm: None):
    """Trains on the same rows; returns the losses, summed over all ranks per target, and the first gradient norm."""
    wire, optimizer = transport(case), case.get("optimizer", "muon")
    plan = optim.plan_muon(state, grid, m, optimizer)
    optim.check_plan(plan, grid, where.device)
    copies = state.copies or offload.Copies(where.device)
    copies.poison, copies.trace, copies.delay_s = parallel.WIRE.poison, parallel.WIRE.trace, case.get("delay_s", 0)
    inputs = offload.make_inputs(m.layers, len(rows), (m.seq_len, m.width), wire.compute, case.get("offload", 0), copies)
    parallel.fill_own(state, wire)
    parallel.start_refresh(state, grid, wire)()
    targets = parallel.exchange([train.count_targets(rows)], grid, where.device).sum()
    scale = 1 / targets
    if case.get("fault") == "wrong count":
        scale = 1 / max(1, train.count_targets(rows)) / where.world  # averaged per rank, not per token
    losses, first_norm, tokens = [], None, ROWS * m.seq_len
    for step in range(count):
        balance = model.Balance(m, where.device, tokens, case["aux"], case["z"]) if "aux" in case else None
        loss, squared = train.schedule(rows, state, grid, m, wire, scale, keep_layers=case.get("keep", 0), inputs=inputs,
                                       balance=balance)
        totals = parallel.exchange([float(loss), float(squared)], grid, where.device).sum(0)
        losses.append(totals[0] / targets)
        norm = (totals[1] / grid.R) ** 0.5
        if step == 0:
            first_norm = norm
            after_first(norm)
        optim.update(state, grid, plan, optimizer, case.get("lr", 2e-3), 0.1, optim.clip_scale(norm, 1.0), case.get("first", 0) + step,
                     wire, chunk=case.get("stream", 0))
        if balance:
            model.move_bias(state.bias_LX, balance.counts_LX, 0.01)
            case.setdefault("found", {"counts": balance.counts_LX.tolist(), "router_losses": balance.losses(),
                                      "bias": state.bias_LX.tolist()})  # of the first step: near-ties flip later
        copies.finish()
    return losses, first_norm


def layouts(where, out: Path, options: dict):
    """For each case: step-1 loss, norm and gradients, then the losses of 5 steps, or as many as the case says."""
    results = {}
    for case in options["cases"]:
        m, grid, state, rows = start(where, case, options["replicas"])
        if case.get("load"):
            checkpoint.load(Path(case["load"]), state, grid, m)
        healthy, choose = plant(case.get("fault", ""), grid), model.choose_experts
        model.choose_experts = choose_by_place if case.get("fixed") else choose
        if case.get("poison"):
            parallel.WIRE.poison = np.random.default_rng(case["poison"])

        def keep_gradients(_):
            if grid.r == 0:
                save_file(full_gradients(state, m, grid), out / f"{case['name']}.{where.rank}.safetensors")

        losses, norm = steps(where, case, m, grid, state, rows, case.get("steps", 5), keep_gradients)
        results[case["name"]] = {"losses": losses, "norm": norm, "masters": digest(state.master), **case.pop("found", {})}
        parallel.reduce_scatter, parallel.all_reduce = healthy
        model.choose_experts, parallel.WIRE.poison = choose, None
    if where.rank == 0:
        (out / "results.json").write_text(json.dumps(results))


def midway(where, out: Path, options: dict):
    """Three steps, a checkpoint, and the losses of three more while it is written."""
    case = options["case"]
    m, grid, state, rows = start(where, case)
    steps(where, case, m, grid, state, rows, 3)
    saver = checkpoint.Saver(out, state, grid)
    saver.start(3, {}, optim.phases(state, optim.plan_muon(state, grid, m, "muon")))
    losses, _ = steps(where, case | {"first": 3}, m, grid, state, rows, 3)
    assert not saver.wait().error
    if where.rank == 0:
        (out / "losses.json").write_text(json.dumps(losses))


def checked(where, out: Path, options: dict):
    """What check.py measures, without and with faults."""
    results = {}
    for fault in options["faults"]:
        m = tiny()
        grid = parallel.make_grid(where.rank, where.world, where.ranks_per_node, options["replicas"], m)
        healthy, exchange = plant(fault, grid), check.exchange
        if fault == "wrong count":  # of this rank's targets instead of all
            check.exchange = lambda values, *args: exchange(values, *args) if len(values) > 1 else np.array([values]) * where.world
        results[fault] = check.measure(grid, m, "step")
        parallel.reduce_scatter, parallel.all_reduce = healthy
        check.exchange = exchange
    if where.rank == 0:
        (out / "checked.json").write_text(json.dumps(results))


def noise(where, out: Path, options: dict):
    """The gradient noise scale of a fixed model, in tokens: as a run measures it, with one row per node and step; and directly, from
    the gradients of those rows one by one: of what is summed up node by node, their variance over the squared norm of their mean."""
    m = tiny()
    grid, wire = parallel.make_grid(where.rank, where.world, 1, 1, m), parallel.Transport(torch.float32, dense="step")
    alone = parallel.make_grid(0, 1, 1, 1, m, connect=False)
    state, whole = parallel.init_state(m, grid, 1, where.device), parallel.init_state(m, alone, 1, where.device)
    parallel.start_refresh(state, grid, wire)()
    parallel.start_refresh(whole, alone, wire)()
    measured, total, squares, averaged = health.Noise(), 0, 0.0, np.zeros(2)
    for step in range(options["steps"]):
        rng = np.random.default_rng([step, where.rank])
        tokens = torch.from_numpy(rng.zipf(1.3, m.seq_len) % m.vocab)  # a common part: frequent tokens
        targets = tokens.roll(-1)
        row = train.DeviceRow(tokens, targets, Segments([0, m.seq_len], None), m.seq_len)
        state.node_squared = {}
        sums = train.schedule([row], state, grid, m, wire, 1 / (2 * m.seq_len))
        counts = np.full((2, 2), m.seq_len)
        told = train.tell(sums, state, 2 * m.seq_len, [row], [row], False, False, grid, where.device)
        measured.noise = measured.signal = 0.0
        measured.add(told.node_parts, told.parts_squared, counts[:, 0])
        averaged += measured.state()
        train.schedule([row], whole, alone, m, wire, 1 / m.seq_len)
        gradient = torch.cat([whole.grad[name].flatten() for name in state.node_squared]).double()
        total, squares = total + gradient, squares + float(gradient.square().sum())
    n = options["steps"] * where.world
    both = parallel.all_reduce(torch.cat((total, torch.tensor([squares]).double())), grid.world, "scalars").wait()
    mean_squared = float((both[:-1] / n).square().sum())
    variance = (float(both[-1]) / n - mean_squared) * n / (n - 1)  # of a row
    if where.rank == 0:
        direct = variance * m.seq_len / (mean_squared - variance / n)
        (out / "noise.json").write_text(json.dumps({"estimate": averaged[0] / averaged[1], "direct": direct}))


def digest(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name, x in tensors.items():
        found.update(name.encode() + x.numpy().tobytes())
    return found.hexdigest()


def ledger(where, out: Path, options: dict):
    """Bytes by group and purpose that every rank sent in one step, and what the loopback interface carried."""
    m = model_of("debug", layers=2, seq_len=256, max_per_group=1)
    results = {}
    for case in options["cases"]:
        _, grid, state, _ = start(where, case, options["replicas"], m)
        rows, wire = random_rows(m, where.world)[where.rank : where.rank + 1], transport(case)
        plan = optim.plan_muon(state, grid, m, "muon")
        parallel.start_refresh(state, grid, wire)()
        carried = []
        for step in range(3):  # the first makes the connections; others may use the interface too, so the least counts
            parallel.exchange([0.0], grid, where.device)
            time.sleep(0.05)
            before = loopback_bytes()
            time.sleep(0.05)
            parallel.exchange([0.0], grid, where.device)  # nobody goes on before all have read
            parallel.WIRE.calls.clear(), parallel.WIRE.sent.clear()
            train.schedule(rows, state, grid, m, wire, 1 / m.seq_len)
            optim.update(state, grid, plan, "muon", 1e-3, 0.1, 1.0, step, wire)
            sent = {f"{group} {purpose}": count for (group, purpose), count in parallel.WIRE.sent.items()}
            total = parallel.exchange([sum(sent.values())], grid, where.device).sum()
            time.sleep(0.05)
            carried.append(loopback_bytes() - before)
            time.sleep(0.05)
        results[case["name"]] = {"sent": sent, "all ranks": total, "loopback": min(carried[1:])}
    (out / f"ledger.{where.rank}.json").write_text(json.dumps(results))


def tracked(where, out: Path, options: dict):
    """Peak of live bytes by purpose in a step of each case after the first, in which nothing is made for the first time. Of two
    steps the one with the lower: gloo's threads sometimes let go of a tensor late. And the bytes sent, by group and purpose."""
    m = model_of("debug", layers=2, seq_len=256, max_per_group=1)
    results = {}
    for case in options["cases"]:
        _, grid, state, _ = start(where, case, 1, m)
        rows, wire = random_rows(m, where.world)[where.rank : where.rank + 1], transport(case)
        plan, inputs = optim.plan_muon(state, grid, m, "muon"), offload.make_inputs(
            m.layers, 1, (m.seq_len, m.width), wire.compute, case.get("offload", 0), state.copies or offload.Copies(where.device))
        parallel.fill_own(state, wire)
        parallel.start_refresh(state, grid, wire)()
        peaks = []
        for step in range(3):
            parallel.WIRE.sent.clear()
            with offload.Tracker(offload.resident(state, inputs)) as memory:
                train.schedule(rows, state, grid, m, wire, 1 / m.seq_len, keep_layers=case.get("keep", 0), inputs=inputs)
                optim.update(state, grid, plan, "muon", 1e-3, 0.1, 1.0, step, wire)
            peaks.append(memory)
        lowest = min(peaks[1:], key=lambda memory: memory.peak)
        sent = {f"{group} {purpose}": count for (group, purpose), count in parallel.WIRE.sent.items()}
        results[case["name"]] = {"peak": {purpose: count for purpose, count in lowest.at_peak.items() if count}, "sent": sent}
    (out / f"tracked.{where.rank}.json").write_text(json.dumps(results))


def loopback_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


def trace(where, out: Path, options: dict):
    """Order of starts, waits and computations in one step of a model of 4 layers."""
    m = model_of("debug", layers=4, width=64, heads=4, kv_heads=2, head_dim=16, expert_width=32, vocab=250, seq_len=40)
    _, grid, state, rows = start(where, options["case"], options["replicas"], m)
    block, direction = train.block, optim.muon_direction

    def traced_block(*args):
        parallel.WIRE.trace.append(("compute", "block"))
        return block(*args)

    def traced_direction(matrices, *args):
        parallel.WIRE.trace.append(("compute", "experts" if matrices.dim() == 3 else "matrix"))
        return direction(matrices, *args)

    train.block, optim.muon_direction = traced_block, traced_direction
    parallel.WIRE.trace = []
    steps(where, options["case"], m, grid, state, rows[:1], 1)
    (out / f"trace.{where.rank}.json").write_text(json.dumps(parallel.WIRE.trace))


def failing_save(where, out: Path, options: dict):
    """Checkpoints at steps 1, 2 and 3, of which rank 1 cannot write the second. The third is made, and replaces the first. One
    rank writes at a time."""
    m, grid, state, _ = start(where, {})
    saver = checkpoint.Saver(out / "ckpt", state, grid, keep=1, writers=1)
    write, messages = saver._write, []

    def timed(*args):
        began = time.monotonic()
        if step == 2 and where.rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        entry = write(*args)
        time.sleep(0.05)
        (out / f"writing.{where.rank}").write_text(json.dumps([began, time.monotonic()]))
        return entry

    saver._write = timed
    for step in (1, 2, 3):
        saver.start(step, {})
        messages.append(saver.wait().error)
    (out / f"messages.{where.rank}").write_text(json.dumps(messages))
    texts = [parallel.share_texts(text, grid, where.device) for text in ("", "long\udcff " * (1 + 3000 * where.rank))]
    assert texts == [["", ""], ["long\udcff ", "long\udcff " * 3001]], "of any length, and of any bytes"


def drawn_state(m, grid, seed: int) -> parallel.State:
    """Masters, moments and bias that depend on the seed and on which values they are, not on the grid."""
    state = parallel.init_state(m, grid, seed, torch.device("cpu"))
    optim.init_moments(state, "muon")
    for name, bucket in state.buckets.items():
        for kind, x in state.moments[name].items():
            for p in parallel.pieces(bucket, m, grid):
                x.view(-1)[p.at : p.at + p.stop - p.start] = parallel.initial_values(seed, f"{p.name}/{kind}", p.start, p.stop, 1.0)
    state.bias_LX.copy_(torch.randn(m.layers, m.experts, generator=torch.Generator().manual_seed(seed)))
    return state


def save_drawn(where, out: Path, options: dict):
    """A checkpoint by 2 x 2, and one by 2 replicas of 2 x 1."""
    m, checkpoint.PIECE = tiny(), 1000
    for replicas, ranks_per_node in ((1, 2), (2, 1)):
        grid = parallel.make_grid(where.rank, where.world, ranks_per_node, replicas, m)
        checkpoint.save(out / f"{grid.R}-{grid.N}-{grid.E}", 5, drawn_state(m, grid, 5), grid, {})


def causality(where, out: Path, options: dict):
    """Losses of this rank's row when a token of rank 0's row changes: at targets before it and in other documents, and at
    those after it in the same document."""
    results = {}
    for case in options["cases"]:
        m, grid, state, _ = start(where, case)
        parallel.start_refresh(state, grid, transport(case))()
        (row,) = random_rows(m, where.world)[where.rank : where.rank + 1]
        bounds, position = [0, 10, 30, m.seq_len], 20
        segments = Segments(bounds, torch.tensor(bounds, dtype=torch.int32))
        changed = row.tokens_T.clone()
        if where.rank == 0:
            changed[position] = (changed[position] + 1) % m.vocab
        place = torch.arange(m.seq_len)
        after = (place >= position) & (place < 30)
        for name, measured in {"unaffected": ~after, "affected": after}.items():
            targets = torch.where(measured, torch.arange(m.seq_len) % m.vocab, -1)
            losses = [float(train.schedule([train.DeviceRow(tokens, targets, segments, 1)], state, grid, m, transport(case),
                                           train=False)[0]) for tokens in (row.tokens_T, changed)]
            results[f"{case['name']} {name}"] = losses
    (out / f"causality.{where.rank}.json").write_text(json.dumps(results))


def sums(where, out: Path, options: dict):
    """reduce_scatter of bf16 slices against an fp64 sum, and against itself, with ranks arriving at random."""
    m = tiny()
    grid = parallel.make_grid(where.rank, where.world, where.ranks_per_node, 1, m)
    inputs = torch.randn(4, 4, 1000, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 3, 4)[:, None, None]
    want = inputs.bfloat16().double().sum(0)[grid.n]
    got = []
    for _ in range(5):
        time.sleep(np.random.default_rng(where.rank).random() * 0.02)
        got.append(parallel.reduce_scatter(inputs[where.rank], grid.column, torch.bfloat16, "expert gradient").wait())
    size = inputs.bfloat16().double().abs().sum(0)[grid.n]
    result = {"error": float(((got[0] - want).abs() / size).max()), "repeats differ": sum(not torch.equal(g, got[0]) for g in got)}
    (out / f"sums.{where.rank}.json").write_text(json.dumps(result))


def poisoned_faults(where, out: Path, options: dict):
    """Of 40 gathers each: healthy ones, ones whose result is read before wait, ones whose input changes before wait, ones whose
    buffers nobody keeps."""
    grid = parallel.make_grid(where.rank, where.world, where.ranks_per_node, 1, tiny())
    parallel.WIRE.poison = np.random.default_rng(5)
    found = {"healthy": 0, "read early": 0, "input changed": 0, "dropped": 0}
    for fault in found:
        for _ in range(40):
            x = torch.full((64,), float(where.rank + 1))
            pending = parallel.all_gather(x, grid.node, "dispatch")
            early = pending._keep[1].clone()
            if fault == "dropped":
                pending._keep = ()
                try:
                    pending.wait()
                except RuntimeError as error:
                    found[fault] += "dropped before wait()" in str(error)
                continue
            if fault == "input changed":
                time.sleep(0.002)
                x.zero_()
            right = torch.equal(pending.wait(), torch.tensor([1.0, 2.0])[:, None].expand(2, 64))
            found[fault] += early.isnan().all().item() if fault == "read early" else not right
    (out / f"faults.{where.rank}.json").write_text(json.dumps(found))


def main(argv):
    where = launch.place()
    launch.setup(where)
    globals()[argv[0]](where, Path(argv[1]), json.loads(argv[2]) if len(argv) > 2 else {})


if __name__ == "__main__":
    sys.exit(launch.run(main))
