"""order.py: the rows of a run are a pure function of position, in proportion, balanced, and nothing is repeated or left out."""

import math
from collections import Counter

import numpy as np
import order
import pytest
from errors import ConfigError
from order import Order, Source, Stage


def source(n_rows: int, name: str = "a", seed: int = 0) -> Source:
    return Source(name * 16, np.random.default_rng([seed, ord(name)]).integers(0, 256, n_rows, np.uint8))


def run(stages, anchors, steps, seed=0, balance="sorted") -> list:
    """[(stage, corpora, rows)] of the first steps."""
    o = Order(stages, anchors, seed, balance)
    return [o.rows(step) for step in range(steps)]


def same(a: list, b: list) -> bool:
    return len(a) == len(b) and all(x[0] == y[0] and (x[1] == y[1]).all() and (x[2] == y[2]).all() for x, y in zip(a, b))


def counted(steps: list) -> Counter:
    return Counter((c, r) for _, cs, rs in steps for c, r in zip(cs.tolist(), rs.tolist()))


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights, want", [
    (["7", "3"], [7, 3]), ([0.7, 0.3], [7, 3]), (["1/3", "2"], [1, 6]), ([5], [1]), ([10, 20, 0], [1, 2, 0]),
    ([0.5, "0.25"], [2, 1]),
    (["1e9", "1"], [10**9, 1]), ([1e300, 1e300], [1, 1])])
def test_weights_are_whole_and_exact(weights, want):
    assert order.integer_weights(weights) == want


def test_weights_beyond_the_resolution_are_rounded_and_none_vanishes():
    found = order.integer_weights([math.pi, 1e-30, 0, math.e])
    assert found[1] == 1 and found[2] == 0 and abs(sum(found) - order.RESOLUTION) <= 2
    assert found[0] / found[3] == pytest.approx(math.pi / math.e, rel=1e-8)


@pytest.mark.parametrize("weights, words", [(["-1", "2"], "weight -1 is negative"), (["nan", "1"], "weight nan is not a finite"),
                                            ([float("inf"), 1], "not a finite"), (["x", "1"], "weight x"),
                                            (["1/0", "1"], "weight 1/0"), (["1e99999999", "1"], "weight 1e99999999 has an exp"),
                                            (["1", "1E-99_999_999"], "an exponent beyond"), (["1e", "1"], "weight 1e is not"),
                                            ([0, "0.0"], "are all 0")])
def test_bad_weights(weights, words):
    with pytest.raises(ConfigError, match=words):
        order.integer_weights(weights)


# ---- blend -----------------------------------------------------------------------------------------------------------


def shares(weights: tuple[int, ...], positions: int) -> np.ndarray:
    corpus_P, index_P = order.blend(np.arange(positions), order.split_tree(weights))
    for c in range(len(weights)):
        assert (index_P[corpus_P == c] == np.arange((corpus_P == c).sum())).all(), "the index counts the corpus' positions"
    return corpus_P


@pytest.mark.parametrize("weights", [(7, 3), (1, 1, 1, 1, 1), (1, 2, 3, 4, 5, 6, 7), (1000, 1), (0, 5, 0, 3), (1,), (0, 0, 9)])
def test_a_whole_period_is_exact_and_weight_0_never_comes(weights):
    corpus_P = shares(weights, 3 * sum(weights))
    assert np.bincount(corpus_P, minlength=len(weights)).tolist() == [3 * w for w in weights]


def test_every_window_is_near_its_share():
    """At most 2 rows off in steps of any size; at the end of a block as well, since errors do not add up."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        k, rows = int(rng.integers(1, 20)), int(rng.integers(1, 64))
        weights = tuple(order.integer_weights([f"{w:.3f}" for w in rng.pareto(0.7, k) + 1e-3]))
        corpus_P = shares(weights, 256 * rows)
        for c, weight in enumerate(weights):
            count_N = (corpus_P == c).reshape(256, rows).sum(1)
            assert abs(count_N - rows * weight / sum(weights)).max() < 2
            assert abs(np.cumsum(count_N) - np.arange(1, 257) * rows * weight / sum(weights)).max() < 2


def test_positions_far_out_do_not_overflow():
    weights = (2**30 - 7, 5, 12345)
    tree, n = order.split_tree(weights), 2**61 + 12345
    corpus_P, index_P = order.blend(np.arange(n, n + 1000), tree)
    taken = order.counts(n, tree)
    assert sum(taken.values()) == n and abs(taken[1] - n * 5 / sum(weights)) < 1e6
    for c, count in order.counts(n + 1000, tree).items():
        assert (index_P[corpus_P == c] == np.arange(taken[c], count)).all()
        exact = n * weights[c] // sum(weights)
        assert abs(taken[c] - exact) <= 2


# ---- shuffle ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 16, 17, 1000])
def test_each_epoch_has_each_row_once(n):
    ids = order.shuffled(np.arange(6 * n), n, 3)
    assert ids.dtype == np.int64
    for epoch in ids.reshape(6, n):
        assert sorted(epoch) == list(range(n))


def test_shuffled_depends_on_the_index_only():
    whole = order.shuffled(np.arange(5000), 1000, 3)
    for index in (np.arange(999, 1001), np.array([4999, 0, 2500]), np.arange(0)):
        assert (order.shuffled(index, 1000, 3) == whole[index]).all()


def test_epochs_and_keys_differ():
    a, b = order.shuffled(np.arange(2000), 1000, 0).reshape(2, 1000)
    c = order.shuffled(np.arange(1000), 1000, 1)
    for x, y in ((a, b), (a, c), (b, c), (a, np.arange(1000))):
        assert (x == y).sum() < 20                           # one fixed point is the expectation
        assert abs(np.corrcoef(x, y)[0, 1]) < 0.12
    # key 0, epoch 1 must not be key 1, epoch 0, nor any such alias
    firsts = {tuple(order.shuffled(np.arange(e * 1000, e * 1000 + 8), 1000, k)) for e in range(30) for k in range(30)}
    assert len(firsts) == 900


def test_shuffled_far_out():
    n = 3_000_000_000                                        # more than 2^31 rows, and indices beyond 2^40
    ids = order.shuffled(np.arange(2**40, 2**40 + 1000), n, 0)
    assert len(set(ids.tolist())) == 1000 and ids.min() >= 0 and ids.max() > 2**31 and ids.max() < n


# ---- balance ---------------------------------------------------------------------------------------------------------


def test_cost_keys_are_logarithms():
    for S in (2, 512, 65_536):
        squares = np.linspace(S, S * S, 500)
        keys, cost = order.cost_keys(squares, S), order.LINEAR_TOKENS * S + squares
        width = (cost[-1] / cost[0]) ** (1 / 256)
        assert keys[0] == 0 and keys[-1] == 255 and (np.diff(keys.astype(int)) >= 0).all()
        assert (abs(np.log(order.key_cost(keys, S) / cost)) <= np.log(width) * 0.51).all()


@pytest.mark.parametrize("balance", order.BALANCE)
def test_a_block_only_rearranges_its_rows(balance):
    stage = Stage(0, [source(3000), source(500, "b")], [5, 1], 4096)
    plain, found = (run([stage], [(0, 6)], 300, balance=b) for b in ("none", balance))
    for block in (slice(0, 128), slice(128, 256)):
        pairs = [counted(steps[block]) for steps in (plain, found)]
        assert pairs[0] == pairs[1] and pairs[0].total() == 768
        assert abs(sum(c for (c, _), n in pairs[0].items() for _ in range(n)) - 768 / 6) < 1
    if balance != "none":
        keys = [[[stage.sources[c].key_R[r] for c, r in zip(cs, rs)] for _, cs, rs in steps] for steps in (plain, found)]
        spread = [np.ptp(key_NR, axis=1).mean() for key_NR in keys]
        assert spread[1] < (0.02 if balance == "sorted" else 0.3) * spread[0]


def test_sixteen_steps_have_the_costs_of_the_block():
    stage = Stage(0, [source(100_000)], [1], 65_536)
    for balance, most in (("sorted", 0.05), ("buckets", 9)):
        key_N = np.array([stage.sources[0].key_R[rs].mean() for _, _, rs in run([stage], [(0, 32)], 256, balance=balance)])
        drift = key_N.reshape(-1, 16).mean(1).std() / key_N.mean()
        assert drift < most, (balance, drift)
    assert drift > 0.1, "of the published method"


def test_steps_of_short_epochs_have_the_same_rows_and_others_do_not():
    """Also of two stages in which the corpus has another number."""
    o = Order([Stage(0, [source(8)], [1], 64), Stage(128, [source(50, "b"), source(8)], [0, 1], 64)], [(0, 8)], 0, "none")
    assert o.same_rows(0, 1) and o.same_rows(3, 130) and not np.array_equal(o.rows(0)[2], o.rows(1)[2])
    o = Order([Stage(0, [source(24), source(24, "b")], [1, 1], 64)], [(0, 8)], 0, "none")
    assert not any(o.same_rows(a, b) for a in range(6) for b in range(a))


@pytest.mark.parametrize("sources, weights, rows, steps", [([source(100)], [1], 4, 16), ([source(3)], [1], 4, 1),
                                                           ([source(9000), source(30, "b")], [20, 1], 16, 32)])
def test_copies_of_a_row_do_not_meet_in_a_step(sources, weights, rows, steps):
    """Blocks are smaller where a corpus has not enough rows for a whole one; more than two copies are there only by force."""
    o = Order([Stage(0, sources, weights, 64)], [(0, rows)], 0, "sorted")
    assert o.legs[0].block_steps == steps
    for step in range(600):
        _, cs, rs = o.rows(step)
        assert Counter(zip(cs.tolist(), rs.tolist())).most_common(1)[0][1] <= 2


@pytest.mark.parametrize("world", [1, 2, 3, 4, 12])
def test_rows_are_dealt_once_and_evenly(world):
    parts = [order.dealt(12, world, rank) for rank in range(world)]
    assert sorted(np.concatenate(parts)) == list(range(12)) and {len(p) for p in parts} == {12 // world}
    if 12 // world % 2 == 0:
        assert len({int(p.sum()) for p in parts}) == 1       # costs that rise evenly give even sums


# ---- runs ------------------------------------------------------------------------------------------------------------

BLEND = Stage(0, [source(5000), source(700, "b"), source(2000, "c"), source(9, "d")], [70, 20, 10, 0], 512)


def test_the_sequence_does_not_depend_on_length_or_interruptions():
    whole = run([BLEND], [(0, 8)], 1000)
    assert same(run([BLEND], [(0, 8)], 400), whole[:400])
    resumed = Order([BLEND], [[0, 8]], 0, "sorted")          # as read from a checkpoint, twice, other steps first
    assert same([resumed.rows(s) for s in range(400, 700)], whole[400:700])
    assert same([resumed.rows(s) for s in range(1000)], whole)
    assert same([whole[999]], [Order([BLEND], [(0, 8)], 0, "sorted").rows(999)])
    assert not same(whole, run([BLEND], [(0, 8)], 1000, seed=1))
    assert 3 not in np.concatenate([cs for _, cs, _ in whole])           # weight 0
    epoch = [r for _, cs, rs in whole for r in rs[cs == 0].tolist()][:5000]
    blocks = 5000 // (128 * 8 * 7 // 10) * (128 * 8 * 7 // 10)
    assert len(set(epoch[:blocks])) > blocks - 10            # no row twice in an epoch, but for the block that is cut here


def test_world_size_does_not_enter():
    o = Order([BLEND], [(0, 24)], 0, "sorted")
    for step in (0, 130):
        _, cs, rs = o.rows(step)
        for world in (1, 2, 3, 8, 24):
            mine = np.concatenate([order.dealt(24, world, rank) for rank in range(world)])
            assert Counter(zip(cs[mine].tolist(), rs[mine].tolist())) == Counter(zip(cs.tolist(), rs.tolist()))


@pytest.mark.parametrize("anchors", [[(0, 8), (128, 12)], [(0, 8), (256, 2), (384, 16)]])
def test_a_change_of_rows_per_step_repeats_and_omits_nothing(anchors):
    o, steps = Order([BLEND], anchors, 5, "sorted"), anchors[-1][0] + 128
    found, rows = [o.rows(s) for s in range(steps)], o.rows_before(steps)
    assert [len(rs) for _, _, rs in found[::128]] == [[n for at, n in anchors if at <= s][-1] for s in range(0, steps, 128)]
    plain = run([BLEND], [(0, 1)], rows, seed=5, balance="none")
    assert sum(len(rs) for _, _, rs in found) == rows and counted(found) == counted(plain)
    assert o.tokens_before(steps) == rows * 512


@pytest.mark.parametrize("step", [1, 100, 129, 300])
def test_rows_per_step_may_not_change_inside_a_block(step):
    with pytest.raises(ConfigError, match=f"nearest are steps {step // 128 * 128} and {step // 128 * 128 + 128}"):
        Order([BLEND], [(0, 8), (step, 4)], 0, "sorted")


def test_boundaries_count_from_the_last_change():
    Order([BLEND], [(0, 8), (128, 4), (256, 8)], 0, "sorted")
    with pytest.raises(ConfigError, match="nearest are steps 256 and 384"):
        Order([BLEND], [(0, 8), (128, 4), (320, 8)], 0, "sorted")


def test_a_corpus_that_goes_on_in_the_next_stage_is_not_begun_anew():
    a, b, c = source(4000), source(4000, "b"), source(4000, "c")
    stages = [Stage(0, [a, b], [1, 1], 512), Stage(128, [c], [1], 512), Stage(256, [b, c, a], [1, 1, 2], 512)]
    o = Order(stages, [(0, 8)], 0, "sorted")
    found = [o.rows(s) for s in range(512)]
    assert [s for s, *_ in found] == [0] * 128 + [1] * 128 + [2] * 256
    names = [["a", "b"], ["c"], ["b", "c", "a"]]
    seen = Counter((names[s][x], r) for s, cs, rs in found for x, r in zip(cs.tolist(), rs.tolist()))
    assert max(seen.values()) == 1 and seen.total() == 512 * 8
    firsts = {}
    for corpus, count in zip((a, b, c), (512 + 1024, 512 + 512, 1024 + 512)):
        name, key = corpus.identity[0], int(order.hashed(0, int(corpus.identity, 16))[0])
        want = order.shuffled(np.arange(count), 4000, key).tolist()
        assert {r for n, r in seen if n == name} == set(want), "the corpus' first rows, none left out"
        firsts[name] = want[:100]
    assert len({tuple(rows) for rows in firsts.values()}) == 3, "each corpus has an order of its own"
    again = Order([*stages, Stage(512, [a], [1], 1024)], [(0, 8)], 0, "sorted")  # appended: what was stays
    assert same([again.rows(s) for s in range(512)], found) and again.tokens_before(513) == 512 * 8 * 512 + 8 * 1024
    with pytest.raises(ConfigError, match="another stage.*nearest are steps 128 and 256"):
        Order([stages[0], Stage(200, [c], [1], 512)], [(0, 8)], 0)


def test_auto_sorts_long_rows():
    for S, method in ((512, "none"), (4096, "sorted")):
        key_P = source(512).key_R
        assert (order.balanced(key_P, 4, S, "auto", 9) == order.balanced(key_P, 4, S, method, 9)).all()


def test_digest():
    o, other = Order([BLEND], [(0, 8)], 0, "sorted"), Order([BLEND], [(0, 8)], 1, "sorted")
    assert o.digest(5) == Order([BLEND], [(0, 8), (128, 4)], 0, "sorted").digest(5)
    assert len({o.digest(5), o.digest(6), other.digest(5)}) == 3
    with pytest.raises(ConfigError, match="--balance=best"):
        Order([BLEND], [(0, 8)], 0, "best")
