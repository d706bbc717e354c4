"""model.py on one rank, against references written out in fp64."""

import ast
import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import model
import parallel
import train
from model import ConfigError, Segments

CPU = torch.device("cpu")
TINY = dict(layers=3, width=32, heads=4, kv_heads=2, head_dim=16, experts=8, top_k=4, groups=4, expert_width=16,
            vocab=96)
LAYER = ("dense", "control", "gate_up", "down")  # a layer's buckets


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def poisoned():
    """Fresh memory is NaN, so that whatever reads what was never written shows."""
    torch.use_deterministic_algorithms(True)  # fills fresh memory, a default of torch.utils.deterministic
    yield
    torch.use_deterministic_algorithms(False)


def leaf(*shape: int, dtype=torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype).requires_grad_()


def double(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_(x.requires_grad)


def close(actual: Tensor, expected: Tensor, tolerance: float):
    """The error's norm relative to the expected norm, or to 0.01 where that is smaller (a gradient may be zero)."""
    assert actual.shape == expected.shape and actual.isfinite().all()
    error = (actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-2)
    assert error < tolerance, f"relative error {error:.1e}"


def check(function, reference, inputs: list[Tensor], tolerance: float = 1e-6):
    """Value and all gradients of `function` against `reference` on fp64 copies of the inputs."""
    exact = [double(x) if x.is_floating_point() else x for x in inputs]
    y, z = function(*inputs), reference(*exact)
    close(y, z, tolerance)
    dy = torch.randn(y.shape).to(y.dtype)
    some = [i for i, x in enumerate(inputs) if x.requires_grad]
    got = torch.autograd.grad(y, [inputs[i] for i in some], dy)
    want = torch.autograd.grad(z, [exact[i] for i in some], dy.double())
    for i, a, b in zip(some, got, want):
        assert a.dtype == inputs[i].dtype
        close(a, b, tolerance)


def saved_shapes(function, *inputs) -> list[tuple]:
    """Shapes of what the graph of function(*inputs) keeps for the backward pass."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
        function(*inputs)
    return sorted(kept)


# ------------------------------------------------------------------------------------------------------------------
# Sizes and refusals
# ------------------------------------------------------------------------------------------------------------------


def test_sizes_are_what_their_names_say():
    total, active = model.count_params(model.SIZES["1t"])
    assert abs(total / 1.08e12 - 1) < 0.01 and abs(active / 32e9 - 1) < 0.02
    for size, parameters in {"15b": 15e9, "177b": 177e9}.items():
        assert abs(model.count_params(model.SIZES[size])[0] / parameters - 1) < 0.02
    for size, m in model.SIZES.items():
        assert model.model_of(size) == m and m.even_groups
    shapes = model.param_shapes(model.SIZES["debug"])
    assert sum(map(math.prod, shapes.values())) == model.count_params(model.SIZES["debug"])[0]


def test_a_1t_layer_has_the_published_dense_bytes_and_rope_layers():
    m = model.SIZES["1t"]
    dense = 2 * sum(math.prod(model.layer_shapes(m)[name]) for name in "qkvo") / 2**20
    assert abs(dense / 220 - 1) < 0.03
    assert sum(model.uses_rope(i, m) for i in range(m.layers)) == 37
    per_gather = 2 * m.experts // m.groups * sum(map(math.prod, model.expert_shapes(m).values()))
    assert abs(per_gather / 7.25e9 - 1) < 0.01


def test_flops_count_six_per_active_parameter_and_causal_attention():
    m = model.model_of("debug", **TINY)
    # two products of 2 H K per query and key, forward once and backward twice, on half of the square
    attention = m.layers * (2 * 2 * m.heads * m.head_dim) * 3 * 50 / 2
    assert model.flops_per_token(m, 50) == 6 * model.count_params(m)[1] + attention


@pytest.mark.parametrize("changes, words", [
    (dict(layers=0), ["--layers=0", "at least 1"]),
    (dict(width=0), ["--width=0"]),
    (dict(heads=0), ["--heads=0"]),
    (dict(kv_heads=0), ["--kv_heads=0"]),
    (dict(kv_heads=-1), ["--kv_heads=-1"]),
    (dict(head_dim=0), ["--head_dim=0"]),
    (dict(experts=0), ["--experts=0"]),
    (dict(top_k=0), ["--top_k=0"]),
    (dict(groups=0), ["--groups=0"]),
    (dict(expert_width=0), ["--expert_width=0"]),
    (dict(vocab=0), ["--vocab=0"]),
    (dict(rope_every=0), ["--rope_every=0"]),
    (dict(kv_heads=3), ["--kv_heads=3", "4 query heads", "1, 2, 4"]),
    (dict(head_dim=15), ["--head_dim=15", "even"]),
    (dict(groups=3), ["--groups=3", "2, 4"]),
    (dict(groups=64), ["--groups=64", "16"]),
    (dict(top_k=17), ["--top_k=17", "16 experts", "lower"]),
    (dict(max_per_group=5), ["--max_per_group=5", "use 1 to 4"]),
    (dict(top_k=8, max_per_group=1), ["--max_per_group=1", "use 2 to 4"]),
    (dict(max_per_group=-1), ["--max_per_group=-1", "use 1 to 4"]),
    (dict(router="Softmax"), ["--router=Softmax", "softmax or sigmoid"]),
    (dict(shared_experts=2), ["--shared_experts=2", "0 or 1"]),
])
def test_what_does_not_fit_is_refused_with_setting_value_and_fix(changes, words):
    with pytest.raises(ConfigError) as refusal:
        model.model_of("debug", **changes)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_an_unknown_size_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="--size=2t: unknown; sizes are debug, 15b, 177b, 1t"):
        model.model_of("2t")


@pytest.mark.parametrize("name", ["width", "expert_width"])
def test_widths_that_grouped_products_cannot_take_are_refused(name):
    # grouped_mm wants rows of whole 16 bytes: 8 values in bf16
    with pytest.raises(ConfigError, match=f"--{name}=100"):
        model.model_of("debug", **{name: 100})


# ------------------------------------------------------------------------------------------------------------------
# RMSNorm, RoPE, SwiGLU
# ------------------------------------------------------------------------------------------------------------------


def ref_norm(x, w):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w


@pytest.mark.parametrize("shape", [(7, 32), (5, 3, 16)])
def test_rms_norm(shape):
    check(model.rms_norm, ref_norm, [leaf(*shape, scale=3.0), leaf(shape[-1])])


def test_rms_norm_keeps_the_types_and_only_one_value_per_row():
    x, w = leaf(7, 32, dtype=torch.bfloat16), leaf(32)
    y = model.rms_norm(x, w)
    dx, dw = torch.autograd.grad(y.sum(), (x, w))
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    close(y, ref_norm(double(x), double(w)), 4e-3)
    assert saved_shapes(model.rms_norm, x, w) == [(7, 1), (7, 32), (32,)]


def test_rope_angles_at_the_last_position_are_those_of_fp64():
    cos, sin = model.rope_cache(1e6, 128, 65536, CPU)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (65536, 64)
    for position, i in itertools.product((1, 4097, 65535), range(64)):
        angle = position / 1e6 ** (2 * i / 128)
        assert abs(cos[position, i].item() - math.cos(angle)) < 1e-7
        assert abs(sin[position, i].item() - math.sin(angle)) < 1e-7


def ref_rope(x, theta=1e4):
    """Rotation as a product of complex numbers."""
    T, _, K = x.shape
    angle = torch.outer(torch.arange(T).double(), theta ** (-torch.arange(K // 2).double() * 2 / K))
    turned = torch.complex(x[..., : K // 2], x[..., K // 2 :]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def test_rope_values_and_gradients():
    tables = model.rope_cache(1e4, 16, 50, CPU)
    x = leaf(50, 3, 16)
    check(lambda x: model.RoPE.apply(x, *tables), ref_rope, [x])
    assert saved_shapes(lambda x: model.RoPE.apply(x, *tables), x) == []


def test_rope_products_depend_on_the_distance_only():
    cos, sin = model.rope_cache(1e6, 128, 65536, CPU)
    q, k = torch.randn(1, 1, 128), torch.randn(1, 1, 128)

    def product(i, j):
        return (model.rotate(q, cos[i : i + 1], sin[i : i + 1]) * model.rotate(k, cos[j : j + 1], sin[j : j + 1])).sum()

    for near, far in [((0, 0), (65535, 65535)), ((7, 0), (65535, 65528)), ((3000, 0), (60000, 57000))]:
        assert abs(product(*near) - product(*far)) < 1e-4
    assert abs(product(7, 0) - product(8, 0)) > 1e-2


def test_rope_falls_on_every_nth_layer():
    assert [i for i in range(6) if model.uses_rope(i, model.model_of("debug"))] == [1, 3, 5]
    assert all(model.uses_rope(i, model.model_of("debug", rope_every=1)) for i in range(6))


def ref_swiglu(gate_up, weight=None):
    gate, up = gate_up.chunk(2, -1)
    y = gate / (1 + torch.exp(-gate)) * up
    return y if weight is None else y * weight[:, None]


def test_swiglu_with_and_without_weight():
    gate_up, weight, dy = leaf(9, 20, scale=2.0), leaf(9), torch.randn(9, 10)
    check(model.SwiGLU.apply, ref_swiglu, [gate_up])
    assert saved_shapes(model.SwiGLU.apply, gate_up) == [(9, 20)]
    want = ref_swiglu(gate_up, weight)
    again = dy.clone()
    grads = model.swiglu_grad(again, gate_up.detach(), weight.detach())
    close(model.swiglu(gate_up.detach(), weight.detach()), want, 1e-6)
    close(again, want, 1e-6)  # where the gradient was, the value is now
    for got, expected in zip(grads, torch.autograd.grad(want, (gate_up, weight), dy)):
        close(got, expected, 1e-5)


# ------------------------------------------------------------------------------------------------------------------
# Router
# ------------------------------------------------------------------------------------------------------------------


def ref_weights(logits, chosen, kind):
    """Scores of all experts, then renormalised over the chosen."""
    score = torch.softmax(logits, -1) if kind == "softmax" else 1 / (1 + torch.exp(-logits))
    picked = score.gather(1, chosen)
    return picked / picked.sum(-1, keepdim=True)


@pytest.mark.parametrize("kind, kept", [("softmax", [(11, 4), (11, 4)]), ("sigmoid", [(11, 4)] * 3)])
def test_routing_weights(kind, kept):
    logits = leaf(11, 16, scale=2.0)
    chosen = torch.rand(11, 16).argsort(-1)[:, :4].sort(-1).values
    check(lambda x: model.RoutingWeights.apply(x, chosen, kind), lambda x: ref_weights(x, chosen, kind), [logits])
    # weights and indices (and scores), never the logits of all experts
    assert saved_shapes(lambda x: model.RoutingWeights.apply(x, chosen, kind), logits) == kept


def test_router_logits_are_fp32_whatever_the_tokens_are():
    h, router = torch.randn(5, 32).bfloat16().requires_grad_(), leaf(8, 32)
    logits = model.RouterLogits.apply(h, router)
    assert logits.dtype == torch.float32
    close(logits, h.double() @ router.double().T, 1e-6)
    assert saved_shapes(model.RouterLogits.apply, h, router) == [(5, 32), (8, 32)]
    check(model.RouterLogits.apply, lambda h, w: h @ w.T, [leaf(5, 32), router])


def routing_models():
    """All c between k/G and k for some shapes, both routers."""
    for (X, k, G), router in itertools.product([(16, 4, 4), (16, 8, 4), (12, 3, 2), (20, 5, 4), (8, 4, 1)],
                                               ["softmax", "sigmoid"]):
        for c in range(math.ceil(k / G), min(k, X // G) + 1):
            yield model.model_of("debug", experts=X, top_k=k, groups=G, max_per_group=c, router=router)


def ref_choice(score: list[float], m: model.Model) -> list[int]:
    """Of one token: the best c of each group, then the best k of those; the lower index wins a tie."""
    size, left = m.experts // m.groups, []
    for g in range(m.groups):
        group = range(g * size, (g + 1) * size)
        left += sorted(group, key=lambda x: (-score[x], x))[: m.group_limit]
    return sorted(sorted(left, key=lambda x: (-score[x], x))[: m.top_k])


@pytest.mark.parametrize("m", list(routing_models()),
                         ids=lambda m: f"{m.experts}.{m.top_k}.{m.groups}.{m.max_per_group}{m.router}")
def test_choice_equals_brute_force(m):
    ties = torch.randint(0, 3, (60, m.experts)).float()  # three values only: ties everywhere
    bias = torch.randn(m.experts) * 0.1
    none = torch.zeros(m.experts)
    for logits, b in [(torch.randn(60, m.experts), bias), (ties, none), (ties, bias.round(decimals=1))]:
        score = (torch.softmax(logits, -1) if m.router == "softmax" else torch.sigmoid(logits)) + b
        chosen = model.choose_experts(logits, b, m)
        assert chosen.dtype == torch.int32
        assert chosen.tolist() == [ref_choice(row, m) for row in score.tolist()]
    # equal logits must be ties whatever the arithmetic in between makes of them
    assert model.choose_experts(ties, none, m).tolist() == [ref_choice(row, m) for row in ties.tolist()]


def test_largest_c_is_plain_top_k_and_smallest_loads_groups_evenly():
    logits, bias = torch.randn(200, 16), torch.zeros(16)
    plain = model.choose_experts(logits, bias, model.model_of("debug", max_per_group=4))
    assert torch.equal(plain.long(), logits.topk(4).indices.sort(-1).values)
    even = model.choose_experts(logits, bias, model.model_of("debug", top_k=8, max_per_group=2))
    assert (F.one_hot(even.long() // 4, 4).sum(1) == 2).all()


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_bias_moves_the_choice_but_not_the_weights(router):
    m = model.model_of("debug", max_per_group=4, router=router)
    logits, bias = torch.randn(50, 16), torch.zeros(16)
    bias[3] = 10.0
    chosen = model.choose_experts(logits, bias, m)
    assert (chosen == 3).any(-1).all() and not (model.choose_experts(logits, 0 * bias, m) == 3).any(-1).all()
    weights = model.RoutingWeights.apply(logits, chosen.long(), router)
    close(weights, ref_weights(logits.double(), chosen.long(), router), 1e-6)
    assert torch.allclose(weights.sum(-1), torch.ones(50))


# ------------------------------------------------------------------------------------------------------------------
# Experts
# ------------------------------------------------------------------------------------------------------------------


class NaNBeyond(torch.autograd.Function):
    """Rows from `end` on become NaN, forward and backward: what grouped_mm may leave in rows that it does not write."""

    @staticmethod
    def forward(ctx, x, end):
        ctx.end = end
        return torch.cat((x[:end], torch.full_like(x[end:], math.nan)))

    @staticmethod
    def backward(ctx, dy):
        return NaNBeyond.forward(ctx, dy, ctx.end), None


@pytest.fixture
def nan_rows(monkeypatch, poisoned):
    real = F.grouped_mm

    class NaNGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, end):
            ctx.end = end
            return x.clone()

        backward = NaNBeyond.backward

    def grouped_mm(x, w, offs):
        if w.dim() == 2:  # the gradient of weights: the rows are summed over
            return real(x, w, offs=offs)
        return NaNBeyond.apply(real(NaNGradient.apply(x, int(offs[-1])), w, offs=offs), int(offs[-1]))

    monkeypatch.setattr(F, "grouped_mm", grouped_mm)


def ref_experts(x, weights, chosen, gate_up, down):
    """Every token through every expert it chose."""
    y = torch.zeros_like(x)
    for e in range(len(down)):
        token, choice = (chosen == e).nonzero(as_tuple=True)
        hidden = ref_swiglu(x[token] @ gate_up[e].T) @ down[e].T
        y = y.index_add(0, token, hidden * weights[token, choice][:, None])
    return y


def slot_sum(x, weights, chosen, gate_up, down, E: int, m: model.Model, padding: Tensor | None = None):
    """The partial sums of E slots, each with its own part of the experts, added up."""
    total, count = 0, m.experts // E
    for e in range(E):
        mine = range(e * count, (e + 1) * count)
        w1, w2 = gate_up[mine.start : mine.stop], down[mine.start : mine.stop]
        if padding is not None:
            w1, w2 = torch.cat((w1, padding[0])), torch.cat((w2, padding[1]))
        rows = model.count_rows(chosen, mine, m)
        assert int(((chosen >= mine.start) & (chosen < mine.stop)).sum()) <= rows
        pairs = model.sort_pairs(chosen, mine, len(w2), rows, model.most_per_token(count, m))
        total = total + model.Experts.apply(x, weights, w1, w2, pairs, True)
    return total


def expert_inputs(m: model.Model, T: int = 70):
    chosen = model.choose_experts(torch.randn(T, m.experts), torch.zeros(m.experts), m)
    tensors = [leaf(T, m.width), leaf(T, m.top_k), leaf(m.experts, 2 * m.expert_width, m.width, scale=0.3),
               leaf(m.experts, m.width, m.expert_width, scale=0.3)]
    return tensors, chosen


@pytest.mark.parametrize("E, c", [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2), (8, 2)])
def test_partial_sums_of_the_slots_equal_a_loop_over_experts(E, c, nan_rows):
    m = model.model_of("debug", **TINY, max_per_group=c)
    tensors, chosen = expert_inputs(m)
    check(lambda *t: slot_sum(t[0], t[1], chosen, t[2], t[3], E, m),
          lambda *t: ref_experts(t[0], t[1], chosen, t[2], t[3]), tensors)


@pytest.mark.parametrize("E", [1, 2, 4])
def test_plain_top_k_over_one_group(E, nan_rows):
    m = model.model_of("debug", **TINY | dict(groups=1), max_per_group=4)
    tensors, chosen = expert_inputs(m)
    check(lambda *t: slot_sum(t[0], t[1], chosen, t[2], t[3], E, m),
          lambda *t: ref_experts(t[0], t[1], chosen, t[2], t[3]), tensors)


def test_experts_that_pad_a_slot_change_nothing_and_get_no_gradient(nan_rows):
    m = model.model_of("debug", **TINY)
    tensors, chosen = expert_inputs(m)
    padding = [leaf(3, 2 * m.expert_width, m.width), leaf(3, m.width, m.expert_width)]
    check(lambda *t: slot_sum(t[0], t[1], chosen, t[2], t[3], 2, m, t[4:]),
          lambda *t: ref_experts(*t[:2], chosen, *t[2:4]) + 0 * (t[4].sum() + t[5].sum()), tensors + padding)


def test_an_expert_without_tokens_gets_a_zero_gradient(nan_rows):
    m = model.model_of("debug", **TINY)
    (x, weights, gate_up, down), chosen = expert_inputs(m)
    chosen = chosen.where(chosen != 2, 3)  # expert 2 and its neighbour 3 are group 1
    y = slot_sum(x, weights, chosen, gate_up, down, 2, m)
    for dw in torch.autograd.grad(y.sum(), (gate_up, down)):
        assert (dw[2] == 0).all() and all(dw[e].abs().sum() > 0 for e in range(8) if e != 2)


def test_a_slot_without_any_token_returns_zeros(nan_rows):
    m = model.model_of("debug", **TINY | dict(groups=1), max_per_group=4)
    (x, weights, gate_up, down), _ = expert_inputs(m)
    chosen = torch.arange(4, dtype=torch.int32).expand(70, 4).contiguous()
    mine = range(4, 8)
    rows = model.count_rows(chosen, mine, m)
    pairs = model.sort_pairs(chosen, mine, 4, rows, model.most_per_token(4, m))
    y = model.Experts.apply(x, weights, gate_up[4:], down[4:], pairs, True)
    assert rows == 128 and (y == 0).all()
    for grad in torch.autograd.grad(y, (x, weights, gate_up, down), torch.randn_like(y)):
        assert (grad == 0).all()


def test_one_token(nan_rows):
    m = model.model_of("debug", **TINY, max_per_group=2)
    tensors, chosen = expert_inputs(m, T=1)
    check(lambda *t: slot_sum(t[0], t[1], chosen, t[2], t[3], 2, m),
          lambda *t: ref_experts(t[0], t[1], chosen, t[2], t[3]), tensors)


@pytest.mark.parametrize("multiple", [1, 32])
def test_pairs_are_sorted_by_expert_and_point_at_their_tokens(multiple, monkeypatch):
    monkeypatch.setattr(model, "row_multiple", lambda device: multiple)
    m = model.model_of("debug", **TINY, max_per_group=2)
    _, chosen = expert_inputs(m)
    mine = range(4, 8)
    rows = model.count_rows(chosen, mine, m)
    pairs = model.sort_pairs(chosen, mine, 5, rows, model.most_per_token(4, m))
    want = sorted((int(chosen[t, j]), t, j) for t in range(70) for j in range(4) if int(chosen[t, j]) in mine)
    counts = [sum(x == e for x, _, _ in want) for e in mine]
    ends = torch.tensor([-(-c // multiple) * multiple for c in counts]).cumsum(0).tolist()
    assert pairs.offsets_X.tolist() == ends + ends[-1:] and pairs.offsets_X.dtype == torch.int32
    places = [start + i for start, c in zip([0, *ends], counts) for i in range(c)]
    assert pairs.token_P[places].tolist() == [t for _, t, _ in want]
    assert pairs.choice_P[places].tolist() == [4 * t + j for _, t, j in want]
    padding = sorted({*range(len(pairs.choice_P))} - {*places})
    assert (pairs.choice_P[padding] == 70 * 4).all() and ends[-1] <= len(pairs.token_P)
    at = dict(zip(places, want))
    for t, slots in enumerate(pairs.slot_MS.tolist()):
        assert [at[s][1:] for s in slots if s < len(pairs.token_P)] == [(t, j) for j in range(4) if int(chosen[t, j]) in mine]


def test_padding_of_experts_changes_nothing(monkeypatch):
    m = model.model_of("debug", **TINY, max_per_group=2)
    (x, weights, gate_up, down), chosen = expert_inputs(m)
    dy, found = torch.randn_like(x), []
    for multiple in (1, 32):
        monkeypatch.setattr(model, "row_multiple", lambda device: multiple)
        y = slot_sum(x, weights, chosen, gate_up, down, 2, m)
        found.append((y, *torch.autograd.grad(y, (x, weights, gate_up, down), dy)))
    for a, b in zip(*found):
        close(b, a, 1e-6)


def test_experts_keep_one_wide_array_of_pairs_and_give_it_back():
    m = model.model_of("debug", **TINY)
    (x, weights, gate_up, down), chosen = expert_inputs(m)
    P = 280 + len(gate_up) * (model.row_multiple(CPU) - 1)
    kept = saved_shapes(lambda: slot_sum(x, weights, chosen, gate_up, down, 1, m))
    assert [s for s in kept if P in s] == [(P,)], "routing weights"
    y = slot_sum(x, weights, chosen, gate_up, down, 1, m)
    (node, _), *_ = (f for f in y.grad_fn.next_functions if f[0] is not None)  # of the plain sum over the slots
    assert node.gate_up_PU.shape == (P, gate_up.shape[1])
    torch.autograd.grad(y.sum(), gate_up)
    assert node.gate_up_PU is None


def test_row_counts_are_known_beforehand_only_where_they_can_be():
    m = model.model_of("debug", top_k=8, groups=4)  # 2 of each 4
    chosen = model.choose_experts(torch.randn(300, 16), torch.zeros(16), m)
    assert model.count_rows(chosen.to("meta"), range(0, 8), m) == 300 * 4  # meta: nothing could be read
    part = model.count_rows(chosen, range(0, 2), m)  # half a group
    count = int((chosen < 2).sum())
    assert part % 128 == 0 and count <= part < count + 128
    assert [model.most_per_token(n, m) for n in (2, 4, 8, 16)] == [2, 2, 4, 8]


# ------------------------------------------------------------------------------------------------------------------
# Attention
# ------------------------------------------------------------------------------------------------------------------


def ref_attention(q, k, v, bounds):
    """Masked softmax over the whole row."""
    T, H, K = q.shape
    part = torch.bucketize(torch.arange(T), torch.tensor(bounds[1:]), right=True)
    allowed = (part[:, None] == part) & (torch.arange(T)[:, None] >= torch.arange(T))
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))  # query head h reads kv head h // (H / J)
    scores = torch.einsum("thk,shk->hts", q, k) / math.sqrt(K)
    return torch.einsum("hts,shk->thk", scores.masked_fill(~allowed, -math.inf).softmax(-1), v)


@pytest.mark.parametrize("bounds", [[0, 24], [0, 1, 2, 24], [0, 7, 8, 20, 24], list(range(25)), [0, 23, 24]])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_inside_segments(bounds, kv_heads):
    inputs = [leaf(24, h, 16, dtype=torch.float64) for h in (4, kv_heads, kv_heads)]
    segments = Segments(bounds, torch.tensor(bounds, dtype=torch.int32))
    check(lambda *x: model.segment_attention(*x, segments), lambda *x: ref_attention(*x, bounds), inputs, 1e-12)


# ------------------------------------------------------------------------------------------------------------------
# Head and embedding
# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [7, 64, 1000])
def test_head_loss_in_chunks_equals_cross_entropy(chunk, monkeypatch, poisoned):
    monkeypatch.setattr(model, "HEAD_CHUNK", chunk * 50)
    x, norm, head = torch.randn(100, 16), torch.randn(16), torch.randn(50, 16)
    targets = torch.randint(-1, 50, (100,))
    targets[30:45] = -1
    exact = [double(t).requires_grad_() for t in (x, norm, head)]
    loss = F.cross_entropy(ref_norm(*exact[:2]) @ exact[2].T, targets, ignore_index=-1, reduction="sum")
    want = torch.autograd.grad(0.125 * loss, exact)
    got_loss, *got = model.head_loss(x, targets, norm, head, 0.125, True)
    assert got_loss.dtype == torch.float64 and abs(got_loss / loss - 1) < 1e-6
    for a, b in zip(got, want):
        close(a, b, 1e-6)
    value, *none = model.head_loss(x, targets, norm, head, 0.125, False)
    assert value == got_loss and none == [None] * 3


def test_head_loss_in_bf16_returns_an_fp32_head_gradient():
    x, norm, head = torch.randn(100, 16).bfloat16(), torch.randn(16), torch.randn(50, 16).bfloat16()
    targets = torch.randint(0, 50, (100,))
    exact = [double(t).requires_grad_() for t in (x, norm, head)]
    loss = F.cross_entropy(ref_norm(*exact[:2]) @ exact[2].T, targets, reduction="sum")
    got_loss, dx, dnorm, dhead = model.head_loss(x, targets, norm, head, 1.0, True)
    assert (dx.dtype, dnorm.dtype, dhead.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert abs(got_loss / loss - 1) < 1e-2
    for a, b in zip((dx, dnorm, dhead), torch.autograd.grad(loss, exact)):
        close(a, b, 1e-2)


def test_a_row_without_targets_has_no_loss_and_no_gradient(poisoned):
    x, norm, head = torch.randn(20, 16), torch.ones(16), torch.randn(50, 16)
    results = model.head_loss(x, torch.full((20,), -1), norm, head, 1.0, True)
    assert all((r == 0).all() for r in results)


def test_embedding_gradient_adds_up_the_rows_of_a_token():
    tokens, dx = torch.randint(0, 9, (200,)), torch.randn(200, 16)
    want = torch.zeros(12, 16, dtype=torch.float64).index_add(0, tokens, dx.double())
    close(model.embed_grad(tokens, dx, 12), want, 1e-6)
    low = model.embed_grad(tokens, dx.bfloat16(), 12)
    assert low.dtype == torch.float32
    close(low, torch.zeros(12, 16, dtype=torch.float64).index_add(0, tokens, dx.bfloat16().double()), 1e-6)
    assert (low[9:] == 0).all()


# ------------------------------------------------------------------------------------------------------------------
# Block and whole model against a composed fp64 version
# ------------------------------------------------------------------------------------------------------------------


def ref_block(x, w, bounds, layer: int, bias, m: model.Model):
    """w: the layer's weights by the names of param_shapes, without the prefix."""
    T, score_of = len(x), {"softmax": lambda z: z.softmax(-1), "sigmoid": torch.sigmoid}[m.router]
    h = ref_norm(x, w["attn_norm"])
    q, k, v = ((h @ w[n].T).view(T, -1, m.head_dim) for n in "qkv")
    q, k = ref_norm(q, w["q_norm"]), ref_norm(k, w["k_norm"])
    if layer % m.rope_every == m.rope_every - 1:
        q, k = ref_rope(q, m.rope_theta), ref_rope(k, m.rope_theta)
    x = x + ref_attention(q, k, v, bounds).flatten(1) @ w["o"].T
    h = ref_norm(x, w["moe_norm"])
    logits = h @ w["router"].T
    chosen = torch.tensor([ref_choice(row, m) for row in (score_of(logits) + bias).tolist()])
    gate_up = torch.stack([torch.cat((w[f"experts.{e}.gate"], w[f"experts.{e}.up"])) for e in range(m.experts)])
    down = torch.stack([w[f"experts.{e}.down"] for e in range(m.experts)])
    y = ref_experts(h, ref_weights(logits, chosen, m.router), chosen, gate_up, down)
    if m.shared_experts:
        y = y + ref_swiglu(torch.cat((h @ w["shared_gate"].T, h @ w["shared_up"].T), -1)) @ w["shared_down"].T
    return x + y


def ref_model_loss(p: dict[str, Tensor], rows: list[train.DeviceRow], bias_LX, m: model.Model):
    """Summed loss of rows; p by full name."""
    loss = 0
    for row in rows:
        x = p["embed"][row.tokens_T]
        for i in range(m.layers):
            w = {n.removeprefix(f"layers.{i}."): v for n, v in p.items() if n.startswith(f"layers.{i}.")}
            x = ref_block(x, w, row.segments.bounds, i, bias_LX[i].double(), m)
        logits = ref_norm(x, p["final_norm"]) @ p["head"].T
        loss = loss + F.cross_entropy(logits, row.targets_T, ignore_index=-1, reduction="sum")
    return loss


def random_row(T: int, m: model.Model, bounds: list[int]) -> train.DeviceRow:
    targets = torch.randint(0, m.vocab, (T,))
    targets[torch.tensor(bounds[1:]) - 1] = -1
    segments = Segments(bounds, torch.tensor(bounds, dtype=torch.int32))
    return train.DeviceRow(torch.randint(0, m.vocab, (T,)), targets, segments, int((targets >= 0).sum()))


def by_name(values: dict[str, Tensor], state: parallel.State, m: model.Model, grid) -> dict[str, Tensor]:
    """What the buckets of the only rank hold, by full parameter name."""
    return {p.name: values[name].flatten()[p.at : p.at + p.stop - p.start].view(p.shape).clone()
            for name, bucket in state.buckets.items() for p in parallel.pieces(bucket, m, grid)}


VARIANTS = [
    dict(),
    dict(max_per_group=2, shared_experts=1, router="sigmoid"),
    dict(groups=1, max_per_group=4, rope_every=1, kv_heads=4),
    dict(experts=12, top_k=3, groups=2, shared_experts=1, head_dim=8),
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_loss_and_every_gradient_of_the_schedule_equal_the_composed_model(changes, poisoned):
    m = model.model_of("debug", **TINY | changes)
    grid = parallel.make_grid(0, 1, 1, 1, m, connect=False)
    state = parallel.init_state(m, grid, 0, CPU)
    for master in state.master.values():  # norms away from one, or errors in their place in the product would hide
        master.mul_(1 + 0.2 * torch.randn_like(master))
    state.bias_LX.copy_(0.05 * torch.randn_like(state.bias_LX))
    rows = [random_row(40, m, [0, 1, 17, 40]), random_row(40, m, [0, 40])]

    loss, squared_norm = train.schedule(rows, state, grid, m, parallel.Transport(torch.float32), scale=1 / 64)
    params = {n: double(v).requires_grad_() for n, v in by_name(state.master, state, m, grid).items()}
    want = ref_model_loss(params, rows, state.bias_LX, m)
    assert abs(loss / want - 1) < 1e-6
    grads = by_name(state.grad, state, m, grid)
    assert grads.keys() == params.keys() == model.param_shapes(m).keys()
    exact = dict(zip(params, torch.autograd.grad(want / 64, list(params.values()))))
    for name, grad in grads.items():
        assert grad.dtype == torch.float32 and exact[name].norm() > 0, name
        error = (grad - exact[name]).norm() / exact[name].norm()
        assert error < 2e-5, f"{name}: relative error {error:.1e}"
    assert abs(squared_norm / sum(g.square().sum() for g in exact.values()) - 1) < 1e-5


@pytest.mark.parametrize("keep_layers", [0, 1, 2])
def test_rows_breadth_first_equal_one_long_row(keep_layers):
    """Whose documents are the same: to fp32 rounding, with recomputation and without."""
    m = model.model_of("debug", **TINY)
    grid = parallel.make_grid(0, 1, 1, 1, m, connect=False)
    state = parallel.init_state(m, grid, 0, CPU)
    a, b = random_row(40, m, [0, 17, 40]), random_row(40, m, [0, 40])
    bounds = [0, 17, 40, 80]
    long = train.DeviceRow(torch.cat((a.tokens_T, b.tokens_T)), torch.cat((a.targets_T, b.targets_T)),
                           Segments(bounds, torch.tensor(bounds, dtype=torch.int32)), a.n_targets + b.n_targets)
    results = []
    for rows, keep in (([long], 0), ([a, b], keep_layers)):
        loss, squared = train.schedule(rows, state, grid, m, parallel.Transport(torch.float32), 1 / 80, keep_layers=keep)
        results.append((loss, squared, by_name(state.grad, state, m, grid)))
    (loss, squared, grads), (loss_2, squared_2, grads_2) = results
    assert abs(loss_2 / loss - 1) < 1e-6 and abs(squared_2 / squared - 1) < 1e-5
    for name, grad in grads.items():
        close(grads_2[name], grad, 2e-5)


def test_recomputation_with_the_recorded_routing_has_the_same_gradients():
    """Bit for bit, though it leaves out what only the value needs. The recorded routing is used, not decided again: here it is
    one that the logits would never choose."""
    m = model.model_of("debug", **TINY, shared_experts=1)
    grid = parallel.make_grid(0, 1, 1, 1, m, connect=False)
    state = parallel.init_state(m, grid, 0, CPU)
    w = parallel.gather(state, [f"layers.0.{b}" for b in LAYER], grid, parallel.Transport(torch.float32)).wait()
    w = {n: v.detach().requires_grad_() for n, v in w.items()}
    row = random_row(40, m, [0, 40])

    def run(x, route, bias):
        return model.block(x, w, row.segments, None, route, bias, lambda *t: t, lambda y, value: y, range(8), m)

    x, zero = leaf(40, 32), torch.zeros(8)
    dy, odd = torch.randn(40, 32), torch.tensor([0.0, 10.0] * 4)  # odd: only experts 1, 3, 5 and 7
    y, route = run(x, None, odd)
    assert route.chosen_Tk.tolist() == [[1, 3, 5, 7]] * 40
    again, same = run(x, route, zero)
    assert y.shape == again.shape and same.rows == route.rows and torch.equal(same.chosen_Tk, route.chosen_Tk)
    assert not torch.equal(y, run(x, None, zero)[0])
    for a, b in zip(*(torch.autograd.grad(out, [x, *w.values()], dy) for out in (y, again))):
        assert torch.equal(a, b)


def test_first_loss_of_the_debug_size_is_ln_v():
    m = model.model_of("debug")
    grid = parallel.make_grid(0, 1, 1, 1, m, connect=False)
    state = parallel.init_state(m, grid, 0, CPU)
    row = random_row(256, m, [0, 100, 256])
    for dtype in (torch.float32, torch.bfloat16):
        loss, _ = train.schedule([row], state, grid, m, parallel.Transport(dtype), train=False)
        assert abs(loss / 254 / math.log(m.vocab) - 1) < 0.02


def test_bfloat16_gradients_are_near_those_of_fp32():
    m = model.model_of("debug", **TINY | dict(groups=1), max_per_group=4)
    grid = parallel.make_grid(0, 1, 1, 1, m, connect=False)
    state = parallel.init_state(m, grid, 0, CPU)
    row, grads = random_row(64, m, [0, 64]), []
    for dtype in (torch.float32, torch.bfloat16):
        state.bias_LX.copy_(10 * (torch.arange(8) % 2).float())  # the same experts in both, or near-ties would differ
        train.schedule([row], state, grid, m, parallel.Transport(dtype, grads=dtype), scale=1 / 64)
        grads.append(by_name(state.grad, state, m, grid))
    for name, exact in grads[0].items():
        assert grads[1][name].dtype == torch.float32
        if exact.norm() > 0:
            close(grads[1][name], exact, 0.15)


# ------------------------------------------------------------------------------------------------------------------
# Shapes without values, devices
# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, dict(shared_experts=1, router="sigmoid", top_k=8, experts=16)], ids=str)
def test_block_and_schedule_run_without_values_when_groups_are_even(changes):
    # a meta tensor raises wherever a value is read, so this is also a step without a host synchronisation
    m, meta = model.model_of("debug", **TINY | changes), torch.device("meta")
    grid = parallel.make_grid(0, 1, 1, 1, m, connect=False)
    state = parallel.init_state(m, grid, 0, meta)
    row = random_row(40, m, [0, 10, 40])
    segments = Segments([0, 10, 40], row.segments.bounds_device.to(meta))
    row = train.DeviceRow(row.tokens_T.to(meta), row.targets_T.to(meta), segments, row.n_targets)
    w = parallel.gather(state, [f"layers.1.{b}" for b in LAYER], grid, parallel.Transport(torch.bfloat16)).wait()
    rope = model.rope_cache(m.rope_theta, m.head_dim, 40, meta)
    x = torch.empty(40, m.width, dtype=torch.bfloat16, device=meta, requires_grad=True)
    w = {n: v.detach().requires_grad_() for n, v in w.items()}
    y, route = model.block(x, w, segments, rope, None, state.bias_LX[1], lambda *t: t, lambda y, value: y,
                           range(m.experts), m)
    assert (y.shape, y.dtype) == (x.shape, torch.bfloat16)
    chosen = route.chosen_Tk
    assert (chosen.shape, chosen.dtype, route.rows) == ((40, m.top_k), torch.int32, 40 * m.top_k)
    for v, dv in zip([x, *w.values()], torch.autograd.grad(y, [x, *w.values()], torch.empty_like(y))):
        assert (dv.shape, dv.dtype, dv.device) == (v.shape, v.dtype, meta)

    loss, squared_norm = train.schedule([row], state, grid, m, parallel.Transport(torch.bfloat16, grads=torch.bfloat16))
    assert loss.dtype == squared_norm.dtype == torch.float64 and loss.device == meta
    for name, bucket in state.buckets.items():
        assert (state.grad[name].shape, state.grad[name].dtype) == (bucket.owned, torch.float32)


NAMES = ("model", "offload", "parallel", "optim", "train", "data", "checkpoint", "eval", "launch")
SOURCES = [p for p in sorted(Path(__file__).resolve().parent.parent.glob("*.py")) if p.stem in NAMES]
DEVICES = ("cuda", "cpu", "xpu", "meta")


def device_literals(tree: ast.AST) -> set[ast.Constant]:
    return {n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)
            and n.value.partition(":")[0] in DEVICES}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_device_names_are_compared_with_device_type_only(path):
    """device == "cuda" is always False. Only launch.py chooses a device; device="cpu" asks for host memory."""
    tree = ast.parse(path.read_text())
    allowed = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and device_literals(node):
            sides = [s for s in (node.left, *node.comparators) if not device_literals(s)]
            assert all(isinstance(s, ast.Attribute) and s.attr == "type" for s in sides), f"{path.name}:{node.lineno}"
            allowed |= device_literals(node)
        if isinstance(node, ast.keyword) and node.arg == "device":
            allowed |= {n for n in device_literals(node.value) if n.value == "cpu"}
    if path.name != "launch.py":
        assert not device_literals(tree) - allowed, [f"{path.name}:{n.lineno}" for n in device_literals(tree) - allowed]


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_router_losses_have_the_gradients_that_autograd_finds(router):
    """Over two rows, one with padding at its end; the shares are constants."""
    m = model.model_of("debug", layers=1, experts=8, top_k=2, groups=1, router=router)
    rows, real = [torch.randn(6, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)], [6, 4]
    balance, chosen = model.Balance(m, torch.device("cpu"), 10, aux=0.3, z=0.2), []
    out = [balance.logits(0, n, True, x) for x, n in zip(rows, real)]
    again = [balance.logits(0, n, False, x) for x, n in zip(rows, real)]  # a recomputation adds nothing
    for x, n in zip(rows, real):
        chosen.append(model.choose_experts(x.detach(), torch.zeros(8), m))
        balance.count(0, n, chosen[-1])
    balance.summed(balance.total_LC)
    counts = torch.cat([c[:n] for c, n in zip(chosen, real)]).flatten().bincount(minlength=8).double()
    assert balance.counts_LX[0].tolist() == counts.tolist() and counts.sum() == 10 * 2
    upstream = [torch.randn_like(x) for x in rows]
    seen = torch.cat([x[:n] for x, n in zip(rows, real)])
    p = torch.softmax(seen, -1) if router == "softmax" else torch.sigmoid(seen) / torch.sigmoid(seen).sum(-1, keepdim=True)
    aux = 0.3 * 8 * (counts / 20 * p.mean(0)).sum()
    z = 0.2 * seen.logsumexp(-1).square().mean()
    assert balance.losses() == pytest.approx((aux.item(), z.item()))
    want = torch.autograd.grad(aux + z + sum((x * u).sum() for x, u in zip(rows, upstream)), rows)
    for found in (out, again):
        got = torch.autograd.grad(sum((x * u).sum() for x, u in zip(found, upstream)), rows, retain_graph=True)
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_the_bias_rises_for_experts_below_the_mean_and_evens_out_the_load():
    bias, counts = torch.zeros(2, 4), torch.tensor([[5, 1, 3, 3], [2, 2, 2, 2]]).double()
    model.move_bias(bias, counts, 0.1)
    torch.testing.assert_close(bias, torch.tensor([[-0.1, 0.1, 0, 0], [0, 0, 0, 0.0]]))
    m = model.model_of("debug", router="sigmoid", layers=1, max_per_group=4)
    logits, bias, load = torch.randn(4000, 16) + torch.linspace(-1, 1, 16), torch.zeros(1, 16), []
    for _ in range(300):
        balance = model.Balance(m, torch.device("cpu"))
        balance.count(0, None, model.choose_experts(logits, bias[0], m))
        load.append(float(balance.counts_LX.max() / balance.counts_LX.mean()))
        model.move_bias(bias, balance.counts_LX, 0.003)
    assert load[0] > 1.5 and load[-1] < 1.05
