"""Runs inside the ranks that the tests spawn: python launch.py ... -- tests/worker.py FUNCTION OUT [JSON]."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import launch  # noqa: E402
import optim  # noqa: E402
import parallel  # noqa: E402
import train  # noqa: E402
from model import Segments, model_of  # noqa: E402

ROWS = 12  # divides by 1, 2, 3 and 4 ranks


def tiny(**changes):
    """Small, but with everything in it: GQA, a layer with and one without RoPE, 4 groups of 4 experts."""
    return model_of("debug", layers=2, width=64, heads=4, kv_heads=2, head_dim=16, expert_width=32, vocab=250, seq_len=40,
                    **changes)


def random_rows(m, count=ROWS, seed=0) -> list[train.Row]:
    """Rows of several documents, with very unequal numbers of targets; one row has none."""
    rng = np.random.default_rng(seed)
    rows = []
    for r in range(count):
        cuts = sorted(rng.choice(np.arange(1, m.seq_len), r % 4, replace=False).tolist())
        tokens = torch.from_numpy(rng.integers(0, m.vocab, m.seq_len))
        targets = torch.from_numpy(rng.integers(0, m.vocab, m.seq_len))
        targets[torch.from_numpy(rng.random(m.seq_len)) < r / (count - 1)] = -1
        bounds = [0, *cuts, m.seq_len]
        rows.append(train.Row(tokens, targets, Segments(bounds, torch.tensor(bounds, dtype=torch.int32))))
    return rows


def full_gradients(state, m, grid) -> dict[str, torch.Tensor]:
    """This rank's pieces of every gradient, under names that say which values they are."""
    found = {}
    for name, bucket in state.buckets.items():
        flat = state.grad[name].flatten()
        for p in parallel.pieces(bucket, m, grid):
            found[f"{p.name}@{p.start}"] = flat[p.at : p.at + p.stop - p.start].clone()
    return found


def plant(fault: str, grid, monkey: dict):
    """One of the faults that layout equality must catch. Returns what undoes it."""
    original = parallel.reduce_scatter

    if fault.startswith("unreduced:"):  # an axis whose gradients are never added up
        def reduce_scatter(x, group, wire):
            if group.name == fault.split(":")[1] and group.size > 1:
                return parallel.Pending(None, (), lambda: x[group.index].float())
            return original(x, group, wire)

        parallel.reduce_scatter = reduce_scatter
    if fault == "unreduced:replica":
        parallel.all_reduce = lambda x, group: parallel.Pending(None, (), lambda: x)
    if fault == "experts x E":
        def scaled(x, group, wire):
            return original(x * grid.E if group.name == "column" else x, group, wire)

        parallel.reduce_scatter = scaled


def layouts(where, out: Path, options: dict):
    """For each case: step-1 loss, norm and gradients, then the loss after 5 steps."""
    healthy = parallel.reduce_scatter, parallel.all_reduce
    results = {}
    for case in options["cases"]:
        m = tiny(max_per_group=case["c"], router=case["router"], shared_experts=case.get("shared", 0))
        grid = parallel.make_grid(where.rank, where.world, where.ranks_per_node, options["replicas"], m)
        count = ROWS // where.world
        rows = random_rows(m)[where.rank * count : (where.rank + 1) * count]
        state = parallel.init_state(m, grid, 1, where.device)
        optim.init_moments(state, "muon")
        if m.router == "sigmoid":  # a bias that changes choices
            state.bias_LX.copy_(torch.linspace(-0.1, 0.1, m.experts).expand(m.layers, -1))
        plant(case.get("fault", ""), grid, options)
        targets = parallel.exchange([train.count_targets(rows)], grid, where.device).sum()
        scale = 1 / targets
        if case.get("fault") == "wrong count":
            scale = 1 / max(1, train.count_targets(rows)) / where.world  # averaged per rank, not per token
        losses = []
        for step in range(5):
            loss, squared = train.schedule(rows, state, grid, m, torch.float32, torch.float32, scale)
            totals = parallel.exchange([float(loss), float(squared)], grid, where.device).sum(0)
            losses.append(totals[0] / targets)
            if step == 0:
                norm = (totals[1] / grid.R) ** 0.5
                if grid.r == 0:
                    save_file(full_gradients(state, m, grid), out / f"{case['name']}.{where.rank}.safetensors")
            optim.update(state, grid, m, "muon", 2e-3, 0.1, optim.clip_scale(norm, 1.0), step)
        results[case["name"]] = {"losses": losses, "norm": norm}
        parallel.reduce_scatter, parallel.all_reduce = healthy
    if where.rank == 0:
        (out / "results.json").write_text(json.dumps(results))


def main(argv):
    where = launch.place()
    launch.setup(where)
    globals()[argv[0]](where, Path(argv[1]), json.loads(argv[2]) if len(argv) > 2 else {})


if __name__ == "__main__":
    sys.exit(launch.run(main))
