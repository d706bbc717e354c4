"""optim.py, and who owns and initialises what (parallel.py), seen by one process."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

import model
import optim
import order
import parallel
import train
from model import ConfigError, Segments
from parallel import OWNERSHIP, Transport, init_state, initial_values, make_grid, pieces

CPU = torch.device("cpu")
PLAIN = Transport(torch.float32)
TINY = dict(layers=2, width=32, heads=3, kv_heads=1, head_dim=16, experts=8, top_k=4, groups=4, expert_width=48,
            vocab=64)
LAYOUTS = [(1, 1, 1), (1, 1, 4), (1, 2, 2), (1, 4, 1), (1, 3, 1), (1, 3, 2), (2, 1, 2), (2, 2, 1)]  # R, N, E; 3: padded


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def one_rank(m: model.Model, optimizer: str = "muon", dtype=torch.float32):
    """A State of the only rank and its grid; with another dtype, masters and moments are made of it."""
    grid = make_grid(0, 1, 1, 1, m, connect=False)
    state = init_state(m, grid, 0, CPU)
    state.master = {name: value.to(dtype) for name, value in state.master.items()}
    optim.init_moments(state, optimizer)
    state.moments = {name: {kind: x.to(dtype) for kind, x in kinds.items()} for name, kinds in state.moments.items()}
    return state, grid


def grids(layout, m):
    R, N, E = layout
    return [make_grid(rank, R * N * E, E, R, m, connect=False) for rank in range(R * N * E)]


def by_name(values: dict[str, Tensor], state, m, grid) -> dict[str, Tensor]:
    """What a lone rank's buckets hold, by full parameter name."""
    return {p.name: values[name].flatten()[p.at : p.at + p.stop - p.start].view(p.shape).clone()
            for name, bucket in state.buckets.items() for p in pieces(bucket, m, grid)}


def set_gradients(state, grads: dict[str, Tensor], m, grid):
    """Puts whole gradients, by full name, where the optimizer finds this rank's part."""
    for name, bucket in state.buckets.items():
        flat = torch.zeros(math.prod(bucket.owned), dtype=state.master[name].dtype)
        for p in pieces(bucket, m, grid):
            flat[p.at : p.at + p.stop - p.start] = grads[p.name].flatten()[p.start : p.stop]
        state.grad[name] = flat.view(bucket.owned)


def random_gradients(m, dtype=torch.float32) -> dict[str, Tensor]:
    return {name: torch.randn(shape, dtype=torch.float64).to(dtype) for name, shape in model.param_shapes(m).items()}


def is_matrix_of_a_layer(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in "q k v o gate up down shared_gate shared_up shared_down".split()


# ------------------------------------------------------------------------------------------------------------------
# Muon
# ------------------------------------------------------------------------------------------------------------------


class PlainMuon:
    """Muon as in a paper: one matrix at a time. One that travels does so in the type of the iteration, both ways."""

    def __init__(self, value: Tensor, dtype: torch.dtype, travels: bool):
        self.value, self.momentum, self.dtype = value.clone(), torch.zeros_like(value), dtype
        self.travels = travels and dtype == torch.bfloat16

    def step(self, grad: Tensor, lr: float, decay: float):
        self.momentum = 0.95 * self.momentum + grad
        nesterov = grad + 0.95 * self.momentum
        if self.travels:
            nesterov = nesterov.bfloat16().float()
        x = (nesterov / (1.02 * nesterov.square().sum().sqrt())).to(self.dtype)
        if len(x) > len(x.T):
            x = x.T
        for a, b, c in optim.POLAR_EXPRESS:
            s = x @ x.T
            x = a * x + (b * s + (c * s) @ s) @ x  # where c multiplies matters in bf16: 2% of the update
        if x.shape != self.value.shape:
            x = x.T
        direction = 0.2 * max(self.value.shape) ** 0.5 * x.to(torch.float32 if self.travels else self.value.dtype)
        if self.travels:
            direction = direction.bfloat16()
        self.value = (1 - lr * decay) * self.value - lr * direction.to(self.value.dtype)


# widths that make q and gate tall, k, o and down wide; then all of them square
SHAPES = [dict(), dict(shared_experts=1), dict(heads=2, kv_heads=2, expert_width=32)]


@pytest.mark.parametrize("changes", SHAPES, ids=str)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.bfloat16, 1e-3)])
def test_muon_equals_a_plain_muon_of_single_matrices(changes, dtype, tolerance):
    m = model.model_of("debug", **TINY | changes)
    state, grid = one_rank(m, dtype=torch.float64)
    start = by_name(state.master, state, m, grid)
    plain = {name: PlainMuon(value, dtype, "experts" not in name) for name, value in start.items() if is_matrix_of_a_layer(name)}
    for step in range(10):
        grads, lr = random_gradients(m, torch.float64), 0.02 / (step + 1)
        set_gradients(state, grads, m, grid)
        optim.update(state, grid, optim.plan_muon(state, grid, m, "muon"), "muon", lr, 0.1, 1.0, step, PLAIN, dtype)
        assert not state.grad
        for name, muon in plain.items():
            muon.step(grads[name], lr, 0.1)
    end = by_name(state.master, state, m, grid)
    for name, muon in plain.items():
        error = (end[name] - muon.value).norm() / (muon.value - start[name]).norm()
        assert error < tolerance, f"{name}: {error:.1e} of the update"


@pytest.mark.parametrize("optimizer", ["muon", "mano", "adamw", "sophiag"])
@pytest.mark.parametrize("layout", LAYOUTS[1:6], ids=str)
def test_the_update_of_many_ranks_equals_that_of_one(layout, optimizer, monkeypatch):
    """The ranks are threads that hand each other what they would send. Update scale and matrices are the whole ones."""
    m = model.model_of("debug", **TINY, shared_experts=1)
    alone, grid = one_rank(m, optimizer)
    ranks = grids(layout, m)
    states = [init_state(m, g, 0, CPU) for g in ranks]
    for state in states:
        optim.init_moments(state, optimizer)
    barrier, box = threading.Barrier(len(ranks), timeout=30), {}

    def all_to_all_uneven(x, to, back, group, purpose):
        if group.handle is None and group is grid.shard:
            return parallel.Pending(purpose, None, (), lambda: x)
        box[purpose, group.index] = x.split(to)
        barrier.wait()
        got = [box[purpose, i][group.index] for i in range(group.size)]
        barrier.wait()
        assert [len(part) for part in got] == back
        return parallel.Pending(purpose, None, (), lambda: torch.cat(got))

    monkeypatch.setattr(optim, "all_to_all_uneven", all_to_all_uneven)
    def update(state, g):
        plan = optim.plan_muon(state, g, m, optimizer, per_head=layout == (1, 2, 2))
        optim.update(state, g, plan, optimizer, 0.02, 0.1, 0.5, step, PLAIN, torch.float32)

    for step in range(2):
        grads = random_gradients(m)
        for state, g in [(alone, grid), *zip(states, ranks)]:
            set_gradients(state, grads, m, g)
        update(alone, grid)
        with ThreadPoolExecutor(len(ranks)) as pool:
            list(pool.map(update, states, ranks))
    want = by_name(alone.master, alone, m, grid)
    for state, g in zip(states, ranks):
        for name, bucket in state.buckets.items():
            flat = state.master[name].flatten()
            for p in pieces(bucket, m, g):
                part = want[p.name].flatten()[p.start : p.stop]
                torch.testing.assert_close(flat[p.at : p.at + len(part)], part, rtol=1e-5, atol=1e-6)


def test_coefficients_bring_singular_values_close_to_one():
    values = torch.logspace(-3, 0, 4001, dtype=torch.float64) / 1.02  # the division by the norm has this safety
    for a, b, c in optim.POLAR_EXPRESS:
        values = a * values + b * values**3 + c * values**5
    assert 0.84 < values.min() and values.max() < 1.15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (96, 32), (32, 96)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape, dtype):
    n = min(shape)
    for smallest in (1.0, 0.1, 3e-3):  # of the largest; about 1e-3 of the norm that they are divided by
        values = torch.logspace(0, math.log10(smallest), n)
        u, v = (torch.linalg.qr(torch.randn(side, n)).Q for side in shape)
        x = optim.orthogonalise(u * values @ v.T, dtype).float()
        assert x.shape == shape
        result = torch.linalg.svdvals(x)
        assert 0.7 < result.min() and result.max() < 1.3
        # the factor of its own decomposition, not some other orthogonal matrix
        inner = u.T @ x @ v
        assert inner.diag().min() > 0.7
        assert (inner - inner.diag().diag()).abs().max() < (1e-4 if dtype == torch.float32 else 0.1)


def test_one_large_expert_does_not_change_the_others():
    batch = torch.randn(4, 32, 48)
    large = batch.clone()
    large[2] *= 1000
    for dtype in (torch.float32, torch.bfloat16):
        a, b = optim.orthogonalise(batch, dtype), optim.orthogonalise(large, dtype)
        assert torch.equal(a[[0, 1, 3]], b[[0, 1, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_stays_zero_and_the_scale_does_not_matter(dtype):
    batch = torch.randn(3, 32, 48)
    assert (optim.orthogonalise(torch.zeros(3, 32, 48), dtype) == 0).all()
    want = optim.orthogonalise(batch, dtype)
    assert torch.equal(optim.orthogonalise(batch * 2.0**-20, dtype), want)  # powers of two: no rounding
    assert torch.equal(optim.orthogonalise(batch * 2.0**20, dtype), want)
    for scale in (1e-9, 1e9):
        error = (optim.orthogonalise(batch * scale, dtype) - want).float().norm() / want.float().norm()
        assert error < (1e-4 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("exponent", range(-45, -8, 2))
def test_vanishing_momentum_gives_no_nan(exponent):
    """The squares of values below 1e-23 are zero in fp32, and so was the norm that such a matrix is divided by."""
    matrix = torch.randn(2, 32, 48) * 10.0**exponent
    for dtype in (torch.float32, torch.bfloat16):
        x = optim.orthogonalise(matrix, dtype).float()
        assert x.isfinite().all() and x.abs().max() < 1.5


def test_an_expert_that_gets_no_tokens_stays_finite_for_good():
    """Its momentum decays by 0.95 a step: 1e-25 of what it was after 1,100 steps."""
    m = model.model_of("debug", **TINY | dict(layers=1))
    state, grid = one_rank(m)
    set_gradients(state, {name: 1e-4 * g for name, g in random_gradients(m).items()}, m, grid)
    optim.update(state, grid, optim.plan_muon(state, grid, m, "muon"), "muon", 1e-3, 0.1, 1.0, 0, PLAIN)
    for moments in state.moments.values():
        for moment in moments.values():
            moment.mul_(0.95**1100)
    set_gradients(state, {name: 0 * g for name, g in random_gradients(m).items()}, m, grid)
    optim.update(state, grid, optim.plan_muon(state, grid, m, "muon"), "muon", 1e-3, 0.1, 1.0, 1101, PLAIN)
    assert all(master.isfinite().all() for master in state.master.values())


def test_a_single_row_or_column_is_normalised():
    for shape in [(1, 40), (40, 1), (1, 1)]:
        x = torch.randn(shape)
        y = optim.orthogonalise(x, torch.float32)
        assert y.shape == shape and abs(y.norm() - 1) < 0.15
        assert torch.allclose(y / y.norm(), x / x.norm(), atol=1e-5)


def test_muon_moves_an_element_as_much_as_adamw_does():
    # 0.2: the usual root mean square of AdamW's update in units of lr
    for shape in [(64, 64), (96, 48), (48, 96)]:
        rms = optim.muon_direction(torch.randn(shape), torch.float32).square().mean().sqrt()
        assert 0.17 < rms < 0.23


# ------------------------------------------------------------------------------------------------------------------
# All methods against plain ones of single matrices, in fp64
# ------------------------------------------------------------------------------------------------------------------


def plain_muon(iteration: str, heads: dict[str, int]):
    """Of a name's matrix: its direction in units of lr. Orthogonalised head by head where heads says so."""
    def direction(name, value, mixed, step):
        out = []
        for x in mixed.chunk(heads.get(name.rsplit(".", 1)[-1], 1)):
            side = max(x.shape)
            x = x / (1.02 * x.norm())
            for a, b, c in optim.NEWTON_SCHULZ[iteration]:
                gram = x @ x.T if len(x) <= len(x.T) else x.T @ x
                step_of = b * gram + c * gram @ gram
                x = a * x + (step_of @ x if len(x) <= len(x.T) else x @ step_of)
            out.append(0.2 * side**0.5 * x)
        return torch.cat(out)
    return direction


def plain_mano(name, value, mixed, step):
    out = torch.zeros_like(value)
    lines = [(slice(None), j) for j in range(value.shape[1])] if step % 2 == 0 else [(i, slice(None)) for i in range(len(value))]
    for line in lines:
        w, g = value[line] / value[line].norm(), mixed[line]
        across = g - (g @ w) * w
        if across.norm() > 1e-14 * g.norm():
            out[line] = across / across.norm() * 0.2 * len(w) ** 0.5
    return out


METHODS = {"polar5": ("muon", dict()), "quintic5": ("muon", dict(iteration="quintic5")), "ten": ("muon", dict(iteration="ten")),
           "heads": ("muon", dict(per_head=True)), "mano": ("mano", dict())}


@pytest.mark.parametrize("method, scale", [*((method, 1.0) for method in METHODS), ("polar5", 1e-9), ("mano", 1e-9)])
def test_matrix_methods_equal_plain_ones_over_twenty_steps(method, scale):
    """Tall, wide, square and single-row matrices; one expert with a thousand times the others' gradient."""
    optimizer, options = METHODS[method]
    m = model.model_of("debug", **TINY | dict(shared_experts=1, heads=2, kv_heads=1))
    state, grid = one_rank(m, optimizer, torch.float64)
    plan = optim.plan_muon(state, grid, m, optimizer, **options)
    direction = plain_mano if method == "mano" else plain_muon(
        options.get("iteration", "polar5"), {"q": 2, "k": 1, "v": 1} if options.get("per_head") else {})
    start = by_name(state.master, state, m, grid)
    plain = {name: (value.clone(), torch.zeros_like(value)) for name, value in start.items() if is_matrix_of_a_layer(name)}
    for step in range(20):
        grads, lr = random_gradients(m, torch.float64), 0.02 / (step + 1)
        grads = {name: g * scale * (1000 if "experts.3." in name else 1) for name, g in grads.items()}
        set_gradients(state, grads, m, grid)
        optim.update(state, grid, plan, optimizer, lr, 0.1, 0.5, step, PLAIN, torch.float64)
        for name, (value, momentum) in plain.items():
            momentum.mul_(0.95).add_(0.5 * grads[name])
            moved = direction(name, value, 0.5 * grads[name] + 0.95 * momentum, step)
            value.mul_(1 - lr * 0.1).sub_(lr * moved)
    end = by_name(state.master, state, m, grid)
    for name, (value, _) in plain.items():
        error = (end[name] - value).norm() / (value - start[name]).norm()
        assert error < (1e-9 if scale == 1 else 1e-6), f"{name}: {error:.1e} of the update"  # 1e-15 is added to a norm


def test_ten_iterations_end_at_one_and_five_only_near_it():
    for name, worst in {"polar5": 0.16, "quintic5": 0.32, "ten": 1e-3}.items():
        values = torch.logspace(-2, 0, 2001, dtype=torch.float64) / 1.02
        for a, b, c in optim.NEWTON_SCHULZ[name]:
            values = a * values + b * values**3 + c * values**5
        assert (values - 1).abs().max() < worst, name


@pytest.mark.parametrize("shape", [(96, 32), (32, 96), (1, 40), (40, 1), (1, 1)])
def test_mano_is_perpendicular_line_by_line_and_what_is_parallel_vanishes(shape):
    value, mixed = torch.randn(shape), torch.randn(shape) * 1e-9
    for step in (0, 1):
        moved, dim = optim.mano_direction(mixed, value, step), step % 2
        assert moved.isfinite().all() and (moved * value).sum(dim).abs().max() < 1e-4 * value.norm()
        length = torch.linalg.vector_norm(moved, dim=dim)
        if shape[dim] == 1:
            assert (moved == 0).all(), "a single number is parallel to its weight"
        else:
            torch.testing.assert_close(length, torch.full_like(length, 0.2 * shape[dim] ** 0.5))
        assert (optim.mano_direction(torch.zeros(shape), value, step) == 0).all()
        assert (optim.mano_direction(3 * value, value, step) == 0).all(), "rounding was scaled up to a full step"
    assert optim.mano_direction(mixed, torch.zeros(shape), 0).isfinite().all()


def test_sophia_equals_a_plain_one_over_twenty_steps():
    m = model.model_of("debug", **TINY)
    state, grid = one_rank(m, "sophiag", torch.float64)
    start = by_name(state.master, state, m, grid)
    plain = {name: [value.clone(), torch.zeros_like(value), torch.zeros_like(value)] for name, value in start.items()}
    decays, plan = [n for n in start if is_matrix_of_a_layer(n) or n == "head"], optim.plan_muon(state, grid, m, "sophiag")
    for step in range(20):
        if step % 5 == 0:
            drawn = random_gradients(m, torch.float64)
            set_gradients(state, drawn, m, grid)
            optim.measure_curvature(state, 300.0)
            assert not state.grad
            for name, (_, _, h) in plain.items():
                h.mul_(0.99).add_(0.01 * 300.0 * drawn[name] ** 2)
        grads, lr = random_gradients(m, torch.float64), 0.01 / (step + 1)
        grads = {n: g * (0 if n == "embed" else 1e-9 if ".q" in n else 1) for n, g in grads.items()}
        set_gradients(state, grads, m, grid)
        optim.update(state, grid, plan, "sophiag", lr, 0.1, 0.5, step, PLAIN)
        for name, (value, first, h) in plain.items():
            first.mul_(0.96).add_(0.04 * 0.5 * grads[name])
            value.mul_(1 - lr * (0.1 if name in decays else 0)).sub_(lr * (first / (0.05 * h).clamp(min=1e-12)).clamp(-1, 1))
    for name, value in by_name(state.master, state, m, grid).items():
        torch.testing.assert_close(value, plain[name][0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("optimizer", ["muon", "mano", "adamw", "sophiag"])
def test_state_that_streams_from_the_host_is_updated_to_the_same_bits(optimizer):
    m, results = model.model_of("debug", **TINY), []
    grid = make_grid(0, 1, 1, 1, m, connect=False)
    for offload, chunk in ((False, 0), (False, 5000), (True, 5000)):
        state = init_state(m, grid, 0, CPU, offload)
        optim.init_moments(state, optimizer)
        parallel.fill_own(state, PLAIN)
        for step in range(3):
            torch.manual_seed(step)
            set_gradients(state, random_gradients(m), m, grid)
            state.grad = {n: state.slots[n].copy_(g) for n, g in state.grad.items()} if offload else state.grad
            if optimizer == "sophiag" and step == 0:
                optim.measure_curvature(state, 10.0, chunk)
                continue
            optim.update(state, grid, optim.plan_muon(state, grid, m, optimizer), optimizer, 0.02, 0.1, 0.5, step, PLAIN, chunk=chunk)
            if offload:
                state.copies.finish()
        results.append({n: (x.clone(), {k: y.clone() for k, y in state.moments[n].items()}) for n, x in state.master.items()})
    for other in results[1:]:
        for name, (master, moments) in results[0].items():
            assert torch.equal(master, other[name][0]) and all(torch.equal(x, other[name][1][k]) for k, x in moments.items()), name


def test_labels_are_drawn_from_the_predictions_and_the_curvature_is_that_of_gauss_newton():
    """Of a head alone: the mean of targets * gradient^2 over draws against the diagonal of J' (diag p - p p') J."""
    T, D, V = 6, 4, 5
    x, norm, head = torch.randn(T, D), torch.ones(D), torch.randn(V, D)
    targets = torch.tensor([0, 1, -1, 2, 3, 4])
    h = model.rms_norm(x, norm).double()
    p = torch.softmax(h @ head.double().T, -1) * (targets >= 0)[:, None]
    want = (p * (1 - p)).T @ h**2 / 5
    total, count = torch.zeros(V, D, dtype=torch.float64), 6000
    draws = torch.rand(count, T, generator=torch.Generator().manual_seed(1))
    for u in draws:
        total += 5 * model.head_loss(x, targets, norm, head, 1 / 5, True, u)[3].double() ** 2
    torch.testing.assert_close(total / count, want, rtol=0.1, atol=4e-3)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_no_layout_changes_the_draws(world, monkeypatch):
    """Each row of a step has the same draws whoever takes it; those of another step are others."""
    o = order.Order([order.Stage(0, [order.Source("a" * 16, np.arange(200, dtype=np.uint8))], [1], 64)], [(0, 12)], 0)
    seen = {}
    monkeypatch.setattr(train, "exchange", lambda *_: np.array([np.nan]))
    monkeypatch.setattr(train, "schedule", lambda rows, *_, **__: (seen.update({row.digest: row.draws_T for row in rows}), 0.0))

    def draws(step: int, world: int) -> dict[int, Tensor]:
        seen.clear()
        for rank in range(world):
            rows = [train.DeviceRow(torch.zeros(8, dtype=torch.int64), None, None, 8, None, int(r))
                    for r in o.rows(step)[2][order.dealt(12, world, rank)]]
            grid = SimpleNamespace(world=SimpleNamespace(size=world, index=rank))
            run = SimpleNamespace(hp=train.Hyperparameters(seed=3), grid=grid, order=o, transport=None, device=None)
            train.measure_curvature(rows, step, 1.0, SimpleNamespace(grad={}), run, None, None)
        return dict(seen)

    one, many = draws(5, 1), draws(5, world)
    assert len(one) == 12 and one.keys() == many.keys() and all(torch.equal(one[r], many[r]) for r in one)
    values = {float(x[0]) for x in (*one.values(), *draws(6, world).values())}
    assert len(values) == 24


def test_the_rate_is_scaled_to_the_tokens_of_its_stage():
    sources = [order.Source("a" * 16, np.zeros(5000, np.uint8))]
    o = order.Order([order.Stage(0, sources, [1], 64), order.Stage(256, sources, [1], 256)], [(0, 4), (128, 16)], 0)
    stages = [train.Stage(0, "x", 64, 1e-2, "constant", 0.1), train.Stage(256, "x", 256, 1e-2, "wsd", 0.1)]
    hp = train.Hyperparameters(steps=1000, warmup=10, lr_scaling="sqrt", lr_batch=256, decay=0.5)
    rates = [train.rate(SimpleNamespace(hp=hp, order=o, stages=stages), step) for step in (4, 100, 200, 300, 999)]
    assert rates == pytest.approx([0.5e-2, 1e-2, 2e-2, 4e-2, 0.4e-2])


# ------------------------------------------------------------------------------------------------------------------
# AdamW, learning rate, clipping, decay
# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_adamw_equals_that_of_torch(dtype, tolerance):
    m = model.model_of("debug", **TINY)
    state, grid = one_rank(m, "adamw", dtype)
    start = by_name(state.master, state, m, grid)
    decays = [n for n in start if is_matrix_of_a_layer(n) or n == "head"]
    leaves = {name: value.clone().requires_grad_() for name, value in start.items()}
    theirs = torch.optim.AdamW([
        {"params": [leaves[n] for n in start if n in decays], "weight_decay": 0.1},
        {"params": [leaves[n] for n in start if n not in decays], "weight_decay": 0.0},
    ], betas=(0.9, 0.95), eps=1e-8)
    for step in range(20):
        grads, lr = random_gradients(m, dtype), 0.01 / (step + 1)
        set_gradients(state, grads, m, grid)
        optim.update(state, grid, optim.plan_muon(state, grid, m, "adamw"), "adamw", lr, 0.1, 1.0, step, PLAIN)
        for group in theirs.param_groups:
            group["lr"] = lr
        for name, value in leaves.items():
            value.grad = grads[name]
        theirs.step()
    for name, value in by_name(state.master, state, m, grid).items():
        assert (value - leaves[name]).norm() / (value - start[name]).norm() < tolerance, name


def test_learning_rate_schedules():
    cosine = [optim.learning_rate(step, 100, 2.0, 10, "cosine", 0.1) for step in range(100)]
    assert cosine[:10] == pytest.approx([2.0 * (i + 1) / 10 for i in range(10)])
    assert cosine[10] == 2.0 and cosine[99] == pytest.approx(0.2)
    assert all(a > b for a, b in zip(cosine[10:], cosine[11:]))
    for step in range(10, 100):
        assert cosine[step] == pytest.approx(0.2 + 1.8 * (1 + math.cos(math.pi * (step - 10) / 89)) / 2)
    assert optim.learning_rate(500, 100, 2.0, 10, "cosine", 0.1) == pytest.approx(0.2)  # never up again
    constant = [optim.learning_rate(step, 100, 2.0, 10, "constant", 0.1) for step in range(100)]
    assert constant[:10] == cosine[:10] and constant[10:] == [2.0] * 90
    assert optim.learning_rate(0, 1, 2.0, 0, "cosine", 0.1) == 2.0  # a run of one step, no warmup
    wsd = [optim.learning_rate(step, 100, 2.0, 10, "wsd", 0.1, 0.2) for step in range(101)]
    assert wsd[:80] == constant[:80] and wsd[99] == wsd[100] == pytest.approx(0.2) and wsd[89] == pytest.approx(1.1)
    assert [a - b for a, b in zip(wsd[79:], wsd[80:100])] == pytest.approx([0.09] * 20)
    assert optim.learning_rate(99, 100, 2.0, 10, "wsd", 0.1, 0.0) == pytest.approx(0.2)  # at least one step of decay
    with pytest.raises(ConfigError, match="--schedule=linear"):
        optim.learning_rate(20, 100, 2.0, 10, "linear", 0.1)


def test_the_rate_follows_the_batch_by_a_named_rule():
    assert optim.scaled_rate(1e-3, "none", 4000, 0) == 1e-3
    assert optim.scaled_rate(1e-3, "sqrt", 4000, 1000) == pytest.approx(2e-3)
    assert optim.scaled_rate(1e-3, "linear", 500, 1000) == pytest.approx(5e-4)
    with pytest.raises(ConfigError, match="give its tokens per step as --lr_batch"):
        optim.scaled_rate(1e-3, "sqrt", 4000, 0)


def test_clip_scale():
    assert optim.clip_scale(4.0, 1.0) == pytest.approx(0.25)
    assert optim.clip_scale(0.5, 1.0) == 1.0 and optim.clip_scale(0.0, 1.0) == 1.0
    assert optim.clip_scale(1e9, 0) == 1.0


@pytest.mark.parametrize("optimizer", ["muon", "mano", "adamw", "sophiag"])
def test_clipping_scales_every_gradient(optimizer):
    m = model.model_of("debug", **TINY)
    grads, results = random_gradients(m), []
    for factor, clip in [(1.0, 0.25), (0.25, 1.0)]:
        state, grid = one_rank(m, optimizer)
        set_gradients(state, {name: factor * g for name, g in grads.items()}, m, grid)
        optim.update(state, grid, optim.plan_muon(state, grid, m, optimizer), optimizer, 0.01, 0.1, clip, 0, PLAIN)
        results.append({**state.master, **{f"{n}/{k}": v for n, ms in state.moments.items() for k, v in ms.items()}})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("optimizer", ["muon", "mano", "adamw", "sophiag"])
def test_decay_is_decoupled_and_spares_norms_router_and_embedding(optimizer):
    m = model.model_of("debug", **TINY, shared_experts=1)
    state, grid = one_rank(m, optimizer)
    start = by_name(state.master, state, m, grid)
    set_gradients(state, {name: torch.zeros(s) for name, s in model.param_shapes(m).items()}, m, grid)
    optim.update(state, grid, optim.plan_muon(state, grid, m, optimizer), optimizer, 0.5, 0.1, 1.0, 0, PLAIN)
    for name, value in by_name(state.master, state, m, grid).items():
        factor = 1 - 0.5 * 0.1 if is_matrix_of_a_layer(name) or name == "head" else 1
        assert torch.equal(value, start[name] * factor), name


# ------------------------------------------------------------------------------------------------------------------
# Every parameter: one optimizer, one owner, and it moves
# ------------------------------------------------------------------------------------------------------------------


def test_muon_gets_the_matrices_of_layers_and_adamw_the_rest():
    for m in (model.model_of("debug"), model.model_of("debug", shared_experts=1)):
        grid = make_grid(0, 1, 1, 1, m, connect=False)
        kinds = {}
        for bucket in parallel.make_buckets(m, grid).values():
            for p in pieces(bucket, m, grid):
                kinds.setdefault(p.name, []).append(optim.kind_of(bucket, "muon"))
        assert kinds.keys() == model.param_shapes(m).keys()
        for name, kind in kinds.items():
            assert kind == ["muon" if is_matrix_of_a_layer(name) else "adamw"], name
    assert optim.kind_of(bucket, "adamw") == "adamw"
    with pytest.raises(ConfigError, match="--optimizer=sgd"):
        optim.kind_of(bucket, "sgd")


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_ranks_of_a_replica_own_every_value_exactly_once(layout, shared):
    m = model.model_of("debug", shared_experts=shared)
    shapes = model.param_shapes(m)
    for r in range(layout[0]):
        runs, owner_rules = {name: [] for name in shapes}, {}
        for grid in (g for g in grids(layout, m) if g.r == r):
            for bucket in parallel.make_buckets(m, grid).values():
                used = []
                for p in pieces(bucket, m, grid):
                    assert p.shape == shapes[p.name]
                    runs[p.name].append((p.start, p.stop))
                    owner_rules.setdefault(p.name, set()).add(bucket.rule)
                    used.append((p.at, p.at + p.stop - p.start))
                spans = [(0, 0), *sorted(used), (math.prod(bucket.owned),) * 2]
                for (_, stop), (start, _) in zip(spans, spans[1:]):
                    assert stop <= start, f"pieces of {bucket.name} overlap, or leave the owned part"
        for name, found in runs.items():
            edges = [0, *(edge for run in sorted(found) for edge in run), math.prod(shapes[name])]
            assert edges[::2] == edges[1::2], f"{name}: values without owner, or with two: {found}"
            assert len(owner_rules[name]) == 1
            if ".experts." in name:
                assert len(found) == 1, f"{name} is not whole on its owner"


@pytest.mark.parametrize("old, new", [("q", "qkv"), ("router", "gating"), ("attn_norm", "norm1")])
def test_a_renamed_or_fused_parameter_is_named_and_refused(old, new, monkeypatch):
    shapes = model.layer_shapes
    monkeypatch.setattr(model, "layer_shapes", lambda m: {new if n == old else n: s for n, s in shapes(m).items()})
    monkeypatch.setattr(parallel, "layer_shapes", model.layer_shapes)
    m = model.model_of("debug")
    with pytest.raises(AssertionError, match=new):
        parallel.make_buckets(m, make_grid(0, 1, 1, 1, m, connect=False))


@pytest.mark.parametrize("name", ["layers.0.extra", "layers.0.experts.3.bias", "layers.1.q_bias", "extra"])
def test_a_parameter_outside_the_table_is_refused(name, monkeypatch):
    shapes = model.param_shapes
    monkeypatch.setattr(parallel, "param_shapes", lambda m: shapes(m) | {name: (4,)})
    m = model.model_of("debug")
    with pytest.raises(AssertionError):
        parallel.make_buckets(m, make_grid(0, 1, 1, 1, m, connect=False))


@pytest.mark.parametrize("change", [dict(decay=True), dict(optimizer="muon"), dict(dtype="compute")], ids=str)
def test_parameters_of_a_bucket_must_agree_in_every_rule(change, monkeypatch):
    monkeypatch.setitem(OWNERSHIP, "router", OWNERSHIP["router"]._replace(**change))
    m = model.model_of("debug")
    with pytest.raises(AssertionError, match="different rules"):
        parallel.make_buckets(m, make_grid(0, 1, 1, 1, m, connect=False))


def random_rows(m: model.Model, count: int, T: int) -> list[train.DeviceRow]:
    segments = Segments([0, T // 3, T], torch.tensor([0, T // 3, T], dtype=torch.int32))
    return [train.DeviceRow(torch.randint(0, m.vocab, (T,)), torch.randint(0, m.vocab, (T,)), segments, T)
            for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["muon", "mano", "adamw"])
def test_every_parameter_moves_in_ten_steps_of_training(optimizer, dtype):
    m = model.model_of("debug", **TINY, shared_experts=1)
    state, grid = one_rank(m, optimizer)
    start, losses, rows = by_name(state.master, state, m, grid), [], random_rows(m, 2, 48)
    for step in range(10):
        loss, squared_norm = train.schedule(rows, state, grid, m, parallel.Transport(dtype), scale=1 / 96)
        losses.append(float(loss) / 96)
        clip = optim.clip_scale(math.sqrt(squared_norm), 1.0)
        optim.update(state, grid, optim.plan_muon(state, grid, m, optimizer), optimizer, 0.01, 0.1, clip, step, PLAIN)
    for name, value in by_name(state.master, state, m, grid).items():
        assert value.dtype == torch.float32 and value.isfinite().all()
        moved = (value != start[name]).double().mean()
        assert moved > (0.5 if name == "embed" else 0.9), f"{name}: only {moved:.0%} of its values moved"
    assert losses[-1] < losses[0] - 0.5  # the same rows: it learns them by heart


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["muon", "mano", "adamw", "sophiag"])
def test_masters_moments_and_gradients_are_fp32_and_share_no_memory(optimizer, dtype):
    m = model.model_of("debug", **TINY)
    state, grid = one_rank(m, optimizer)

    def kept() -> list[Tensor]:
        assert state.master.keys() == state.moments.keys() == state.buckets.keys()
        return [*state.master.values(), *(x for moments in state.moments.values() for x in moments.values())]

    def check(tensors: list[Tensor]):
        assert all(t.dtype == torch.float32 for t in tensors)
        spans = sorted((t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors)
        assert all(at + size <= after for (at, size), (after, _) in zip(spans, spans[1:])), "two share memory"

    places = [t.data_ptr() for t in kept()]
    for step in range(2):
        train.schedule(random_rows(m, 2, 48), state, grid, m, parallel.Transport(dtype, grads=dtype))
        assert state.grad.keys() == state.buckets.keys()
        grads = list(state.grad.values())
        check(kept() + grads)
        optim.update(state, grid, optim.plan_muon(state, grid, m, optimizer), optimizer, 0.01, 0.1, 1.0, step, PLAIN)
        check(kept() + grads)
    assert places == [t.data_ptr() for t in kept()]  # updated in place


# ------------------------------------------------------------------------------------------------------------------
# Initial values
# ------------------------------------------------------------------------------------------------------------------


def test_any_slice_of_the_initial_values_equals_the_slice_of_the_whole():
    whole = initial_values(3, "layers.0.q", 0, 30000, 0.02)
    assert whole.dtype == torch.float32 and whole.shape == (30000,)
    B = parallel.BLOCK
    for start, stop in [(1, 8), (B - 1, B + 1), (B, 2 * B), (B + 1, 3 * B - 1), (4 * B + 3, 30000), (29999, 30000),
                        (5, 5)]:
        assert torch.equal(initial_values(3, "layers.0.q", start, stop, 0.02), whole[start:stop])
    assert torch.equal(initial_values(3, "layers.0.q", 0, 30000, 0.04), 2 * whole)


def test_seeds_names_and_blocks_give_different_values():
    draws = {(seed, name): initial_values(seed, name, 0, 20000, 1.0)
             for seed in (0, 1, 11) for name in ("layers.0.q", "layers.1.q", "layers.11.q", "embed")}
    all_values = torch.stack(list(draws.values()))
    correlation = torch.corrcoef(all_values.view(-1, 4000)) - torch.eye(5 * len(all_values))  # between blocks as well
    assert correlation.abs().max() < 0.1


def test_initial_values_are_a_normal_truncated_at_three_sigma():
    x = initial_values(0, "embed", 0, 1_000_000, 0.5).double() / 0.5
    inside = math.erf(3 / math.sqrt(2))
    std = math.sqrt(1 - 6 * math.exp(-4.5) / math.sqrt(2 * math.pi) / inside)
    assert x.abs().max() <= 3.0001 and abs(x.mean()) < 5e-3 and abs(x.std() / std - 1) < 5e-3
    for z in (-2.5, -1.0, 0.0, 0.5, 2.0):  # share below z
        assert abs((x < z).double().mean() - (0.5 + 0.5 * math.erf(z / math.sqrt(2)) / inside)) < 2e-3
    assert (initial_values(0, "final_norm", 7, 50, 0.0) == 1).all()


def test_every_parameter_starts_with_its_own_values_and_std():
    m = model.model_of("debug", shared_experts=1)
    state, grid = one_rank(m)
    values = by_name(state.master, state, m, grid)
    first = {name: tuple(v.flatten()[:16].tolist()) for name, v in values.items() if not name.endswith("norm")}
    assert len(set(first.values())) == len(first)
    want = dict.fromkeys(("q", "k", "v", "router", "gate", "up", "shared_gate", "shared_up"), 1 / 16)
    want |= {"embed": 1.0, "head": 0.2 / 16, "o": 1 / math.sqrt(256 * 8), "down": 1 / math.sqrt(128 * 8),
             "shared_down": 1 / math.sqrt(128 * 8)}
    for name, value in values.items():
        kind = name.rsplit(".", 1)[-1]
        if kind.endswith("norm"):
            assert (value == 1).all()
        else:
            assert abs(value.std() / (0.9866 * want[kind]) - 1) < 0.05, name


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_all_layouts_start_with_the_same_values(layout):
    m = model.model_of("debug", **TINY, shared_experts=1)
    alone, grid = one_rank(m)
    want = by_name(alone.master, alone, m, grid)
    for g in grids(layout, m):
        state = init_state(m, g, 0, CPU)
        for name, bucket in state.buckets.items():
            flat, filled = state.master[name].flatten(), 0
            for p in pieces(bucket, m, g):
                filled += p.stop - p.start
                assert torch.equal(flat[p.at : p.at + p.stop - p.start], want[p.name].flatten()[p.start : p.stop])
            assert int((flat != 0).sum()) <= filled  # padding is zero


def test_muon_for_a_vector_is_refused(monkeypatch):
    monkeypatch.setitem(OWNERSHIP, "final_norm", OWNERSHIP["final_norm"]._replace(optimizer="muon"))
    m = model.model_of("debug", **TINY)
    state = init_state(m, make_grid(0, 1, 1, 1, m, connect=False), 0, CPU)
    with pytest.raises(ConfigError, match="OWNERSHIP gives final to Muon, which takes matrices only, and final_norm are none"):
        optim.init_moments(state, "muon")
    optim.init_moments(state, "adamw")
