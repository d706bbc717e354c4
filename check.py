"""Checks that need no run: what must hold for this machine, these settings and every layout. Beside a run: health.py.

    make check                                   python check.py
    make check ARGS="--size=1t --router=sigmoid"    the positions of this size, the routing of these settings

Gradients are compared between one rank and two along each axis (ranks of a node, nodes, replicas), on a small model with the
settings' routing and unequal numbers of targets. Ends with code 70 if something is not as it must be.
"""

import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import health
import launch
import optim
import train
from model import Balance, ConfigError, Model, Segments, model_of, param_shapes
from parallel import Grid, State, Transport, exchange, fill_own, init_state, initial_values, make_grid, pieces, start_refresh

ROWS = 12  # divides by 1, 2, 3 and 4 ranks
AXES = {"2 ranks of a node": (1, 2, 1), "2 nodes": (2, 1, 1), "2 replicas": (2, 1, 2)}  # nodes, ranks per node, replicas
STEPS = 3
CPU = torch.device("cpu")


def tiny(**changes) -> Model:
    """Small, but with everything in it: GQA, a layer with and one without RoPE, 4 groups of 4 experts."""
    return model_of("debug", layers=2, width=64, heads=4, kv_heads=2, head_dim=16, expert_width=32, vocab=250, seq_len=40,
                    **changes)


def random_rows(m: Model, count: int = ROWS, seed: int = 0) -> list[train.DeviceRow]:
    """Rows of several documents, with very unequal numbers of targets; one row has none."""
    rng = np.random.default_rng(seed)
    rows = []
    for r in range(count):
        cuts = sorted(rng.choice(np.arange(1, m.seq_len), r % 4, replace=False).tolist())
        tokens = torch.from_numpy(rng.integers(0, m.vocab, m.seq_len))
        targets = torch.from_numpy(rng.integers(0, m.vocab, m.seq_len))
        targets[torch.from_numpy(rng.random(m.seq_len)) < r / (count - 1)] = -1
        bounds = [0, *cuts, m.seq_len]
        rows.append(train.DeviceRow(tokens, targets, Segments(bounds, torch.tensor(bounds, dtype=torch.int32)),
                                   int((targets >= 0).sum())))
    return rows


# ------------------------------------------------------------------------------------------------------------------
# Layouts
# ------------------------------------------------------------------------------------------------------------------


def measure(grid: Grid, m: Model, dense: str, aux: float = 0.0, z: float = 0.0) -> dict:
    """On every rank of a layout: the losses of some steps on the same rows; of the first the gradient norm, and of each
    parameter's gradient its norm and its product with random numbers, which depends on every value of it. aux, z: see Balance."""
    state, wire = init_state(m, grid, 1, CPU), Transport(torch.float32, dense=dense)
    optim.init_moments(state, "muon")
    plan = optim.plan_muon(state, grid, m, "muon")
    fill_own(state, wire)
    start_refresh(state, grid, wire)()
    per_rank = ROWS // grid.world.size
    rows = random_rows(m)[grid.world.index * per_rank : (grid.world.index + 1) * per_rank]
    targets = exchange([train.count_targets(rows)], grid, CPU).sum()
    found = {"losses": []}
    for step in range(STEPS):
        balance = Balance(m, CPU, ROWS * m.seq_len, aux, z)
        sums = train.schedule(rows, state, grid, m, wire, 1 / targets, balance=balance)
        loss, squared = exchange([float(x) for x in sums], grid, CPU).sum(0)
        norm = math.sqrt(squared / grid.R)
        found["losses"].append(loss / targets)
        if step == 0:
            found |= {"norm": norm, "gradients": gradients(state, grid, m)}
        optim.update(state, grid, plan, "muon", 2e-3, 0.1, optim.clip_scale(norm, 1.0), step, wire, torch.float32)
    return found


def gradients(state: State, grid: Grid, m: Model) -> dict[str, tuple[float, float]]:
    """Name -> (norm, product with random numbers), of all ranks together."""
    sums = {name: [0.0, 0.0] for name in param_shapes(m)}
    for name, bucket in state.buckets.items():
        flat = state.grad[name].view(-1).double()
        for p in pieces(bucket, m, grid):
            part = flat[p.at : p.at + p.stop - p.start]
            sums[p.name][0] += float(part.square().sum())
            sums[p.name][1] += float(part @ initial_values(5, f"{p.name}/probe", p.start, p.stop, 1.0).double())
    total = exchange([x for pair in sums.values() for x in pair], grid, CPU).sum(0).reshape(-1, 2) / grid.R
    return {name: (math.sqrt(squared), product) for name, (squared, product) in zip(sums, total.tolist())}


def differences(reference: dict, found: dict, layout: str) -> list[str]:
    """What is not equal: loss of the first step (1e-6), every gradient (1e-4 of its norm), losses of later steps (1e-4)."""
    wrong = []
    if not math.isclose(reference["losses"][0], found["losses"][0], rel_tol=1e-6):
        wrong.append(f"{layout}: the first loss is {found['losses'][0]:.7f}, on one rank {reference['losses'][0]:.7f}: is it "
                     "summed over all ranks and divided by the targets of all?")
    off = {}
    for name, (norm, product) in reference["gradients"].items():
        error = max(abs(found["gradients"][name][0] - norm), abs(found["gradients"][name][1] - product)) / max(norm, 1e-30)
        off |= {name: error} if not error <= 1e-4 else {}
    if off:
        worst = max(off, key=off.get)
        wrong.append(f"{layout}: gradients of {len(off)} of {len(reference['gradients'])} parameters differ from those of one "
                     f"rank, most that of {worst} by {off[worst]:.1%}: a sum over the {layout.split()[-1]} is left out, made "
                     "twice, or divided by another count")
    elif not np.allclose(reference["losses"], found["losses"], rtol=1e-4):
        wrong.append(f"{layout}: the losses {found['losses']} are not those of one rank, {reference['losses']}: updates differ")
    return wrong


def run_layout(nodes: int, ranks: int, replicas: int, settings: list[str]) -> dict:
    """Starts the ranks; raises RuntimeError with their output if they fail."""
    with tempfile.TemporaryDirectory() as out:
        here = Path(__file__).resolve().parent
        argv = [sys.executable, here / "launch.py", "--scheduler=none", "--nodes", str(nodes), "--ranks-per-node", str(ranks), "--",
                here / "check.py", "--part", f"{out}/found.json", str(replicas), *settings]
        done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | launch.ON_CPU)
        if done.returncode:
            raise RuntimeError(f"{nodes} x {ranks} ranks ended with code {done.returncode}:\n{done.stdout[-1000:]}"
                               f"{done.stderr[-2000:]}")
        return json.loads(Path(out, "found.json").read_text())


def part(path: str, replicas: str, settings: list[str]) -> int:
    """In a rank of run_layout."""
    where, (hp, real) = launch.place(), resolved(settings)
    launch.setup(where)
    m = small(real)
    grid = make_grid(where.rank, where.world, where.ranks_per_node, int(replicas), m)
    found = measure(grid, m, hp.dense_gather, hp.aux_loss, hp.z_loss)
    if where.rank == 0:
        Path(path).write_text(json.dumps(found))
    return launch.EXIT_OK


# ------------------------------------------------------------------------------------------------------------------
# One process
# ------------------------------------------------------------------------------------------------------------------


def resolved(settings: list[str]) -> tuple[train.Hyperparameters, Model]:
    """As a run of one rank has them; of how many ranks its rows and replicas are, is not asked here. Raises ConfigError."""
    hp = dataclasses.replace(train.parse(settings), replicas=1, rows_per_step=0)
    return train.resolve(hp, launch.Place(0, 1, 0, 1, CPU, "gloo"))


def small(m: Model) -> Model:
    """The tiny model with m's kind of routing: even over groups, limited to some experts of a group, or free."""
    groups = m.groups if m.groups in (1, 2) else 4
    if m.group_limit >= m.top_k:
        top_k = limit = min(m.top_k, 4)
    elif m.even_groups:
        limit = min(m.group_limit, 2)
        top_k = limit * groups
    else:
        top_k, limit = 4, 4 // groups + 1  # above the even one, below top_k
    return tiny(router=m.router, shared_experts=m.shared_experts, groups=groups, top_k=top_k, max_per_group=limit)


def isolation_problem(m: Model) -> str:
    """Changes one token: no loss before it may change, and none in another document; those after it do."""
    grid = make_grid(0, 1, 1, 1, m, connect=False)
    state, wire = init_state(m, grid, 1, CPU), Transport(torch.float32)
    row, (begin, at, end) = random_rows(m)[0], (10, 20, 30)
    bounds, place = [0, begin, end, m.seq_len], torch.arange(m.seq_len)
    changed = row.tokens_T.clone()
    changed[at] = (changed[at] + 1) % m.vocab
    parts = {"before it": (place >= begin) & (place < at), "in another document": (place < begin) | (place >= end),
             "after it": (place >= at) & (place < end)}
    for where, measured in parts.items():
        targets = torch.where(measured, place % m.vocab, -1)
        segments = Segments(bounds, torch.tensor(bounds, dtype=torch.int32))
        a, b = (float(train.schedule([train.DeviceRow(x, targets, segments, 1)], state, grid, m, wire, train=False)[0])
                for x in (row.tokens_T, changed))
        if (where == "after it") == math.isclose(a, b, rel_tol=1e-6):
            what = "nothing" if where == "after it" else "a loss"
            return f"a changed token changes {what} {where}: is attention causal inside each document?"
    return ""


def state_problem(m: Model) -> str:
    """What a run checks at its start, of all ranks of 2 nodes of 2 and their replicas."""
    held = []
    for rank in range(8):
        grid = make_grid(rank, 8, 2, 2, m, connect=False)
        state = init_state(m, grid, 0, CPU)
        optim.init_moments(state, "muon")
        held.append(health.held_values(state))
    return health.type_problem(state) or health.shard_problem(held, grid)


def main(argv: list[str]) -> int:
    if argv[:1] == ["--part"]:
        return part(argv[1], argv[2], argv[3:])
    if "--help" in argv:
        print(__doc__)
        return launch.EXIT_OK
    real = resolved(argv)[1]
    m = small(real)
    failures, reference = [], None

    def check(what: str, found: list[str]):
        failures.extend(found)
        result = f"{'FAILED' if found else 'ok':<8}{what}  {time.perf_counter() - began:.0f} s"
        print(result, *found, sep="\n        ", flush=True)

    for what, problem in {f"RoPE at position {real.seq_len - 1:,} against fp64": lambda: health.rope_problem(real, CPU),
                          "a token is seen after it, in its document": lambda: isolation_problem(m),
                          "types; shards differ, replicas are equal": lambda: state_problem(m)}.items():
        began = time.perf_counter()
        check(what, [text] if (text := problem()) else [])
    for layout, shape in {"1 rank": (1, 1, 1), **AXES}.items():
        began = time.perf_counter()
        found = run_layout(*shape, argv)
        reference = reference or found
        warning = health.loss_warning(found["losses"][0], m.vocab)
        check(f"{layout}: first loss near ln V{'' if found is reference else ', gradients and steps as on 1 rank'}",
              ([warning] if warning else []) + differences(reference, found, layout))
    return launch.EXIT_UNHEALTHY if failures else launch.EXIT_OK


if __name__ == "__main__":
    try:
        sys.exit(launch.run(main) if sys.argv[1:2] == ["--part"] else main(sys.argv[1:]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(launch.EXIT_CONFIG)
