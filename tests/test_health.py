"""health.py: steps that are skipped, and checks beside a run."""

import json
import math

import check
import data
import health
import model
import numpy as np
import optim
import parallel
import pytest
import smoke
import torch
from health import CheckFailed, Moves, Noise, Repeats, Skips, suspects
from launch import EXIT_DIVERGED, EXIT_UNHEALTHY
from spawn import launch, worker
from test_train import TINY

import train as trainer

CPU = torch.device("cpu")

# ------------------------------------------------------------------------------------------------------------------
# Steps that are skipped
# ------------------------------------------------------------------------------------------------------------------


def judged(skips: Skips, norms: list[float], first: int = 1) -> list[int]:
    """Steps that are skipped, of those with these gradient norms and a loss of 2."""
    return [step for step, norm in enumerate(norms, first) if skips.judge(step, 2.0, norm, [])]


def healthy(count: int, seed: int = 0) -> list[float]:
    return np.random.default_rng(seed).lognormal(0, 0.2, count).tolist()


def test_what_is_not_finite_or_far_above_is_skipped_and_never_enters_the_statistics():
    norms = healthy(400)
    disturbed = norms.copy()
    for step, value in {30: math.nan, 60: math.inf, 61: math.nan, 100: 1000.0, 101: 900.0, 395: 40.0}.items():
        disturbed[step - 1] = value
    skips = Skips(12, 128, 20)
    assert judged(skips, disturbed) == [30, 60, 61, 100, 101, 395]
    assert skips.total == 6 and len(skips.accepted) == 128
    assert set(skips.accepted) <= {(norm, 2.0) for norm in norms}, "a rejected step is in the statistics"
    assert judged(Skips(12, 128, 20), norms) == []
    assert judged(Skips(0, 128, 20), disturbed) == [30, 60, 61]


def test_a_loss_far_above_is_skipped_too_and_an_early_spike_is_not_judged():
    skips = Skips(12, 128, 20)
    assert not skips.judge(1, 8.0, 500.0, []), "there is nothing to compare with yet"
    assert judged(skips, healthy(60), 2) == []
    assert "loss 20 above" in skips.judge(62, 20.0, 1.0, [3]) and "loss nan, on rank 3" in skips.judge(63, math.nan, 1.0, [3])


def test_a_quiet_stretch_does_not_make_the_next_step_an_outlier():
    assert judged(Skips(12, 128, 20), [1.0] * 50 + [3.2]) == []
    assert judged(Skips(12, 128, 20), [1.0] * 50 + [3.4]) == [51]


def test_the_first_norm_that_is_not_finite_is_an_alarm_of_its_own():
    skips = Skips(12, 128, 20)
    first, second = (skips.judge(step, 2.0, math.nan, [1]) for step in (1, 2))
    assert "on rank 1; the first gradient norm of this run that is not finite" in first and "first" not in second


def test_a_resumed_run_judges_as_an_uninterrupted_one():
    norms = healthy(200) + [math.nan] * 3 + [1e3] * 2 + healthy(50, 1) + [math.inf] * 4
    whole = Skips(12, 64, 4)
    want = judged(whole, norms)
    for cut in (10, 100, 202, 204, 257):
        first = Skips(12, 64, 4)
        found = judged(first, norms[:cut])
        rest = Skips(12, 64, 4, json.loads(json.dumps(first.state())))
        assert found + judged(rest, norms[cut:], cut + 1) == want and rest.given_up == whole.given_up
        assert rest.accepted == whole.accepted


def test_the_rank_where_it_comes_from_is_named():
    good, nan = np.ones(4), math.nan
    assert suspects(good, np.array([1, 1, nan, 1]), np.full(4, nan)) == [2]  # the sum is bad everywhere, its tokens there
    assert suspects(np.array([1, nan, 1, 1]), good, good) == [1]
    assert suspects(good, good, np.array([1, 1, 1, math.inf])) == [3]
    assert suspects(good, np.array([1, 1, 1, 900.0]), good * 1e6) == [3]
    assert suspects(good, good, good) == []


def train(here, name, faults, *args, check=True):
    return launch(2, 1, "tests/faulty.py", json.dumps(faults), f"--run={name}", *TINY, "--layers=1", "--seq_len=32",
                  "--router=sigmoid", *args, cwd=here, check=check)


def lines(here, name) -> list[dict]:
    return [json.loads(line) for line in (here / "out" / name / "metrics.jsonl").read_text().splitlines()]


def test_faults_of_one_rank_are_skipped_by_all_and_training_goes_on(here):
    done = train(here, "undisturbed", {}, "--steps=160", "--ckpt_every=0")
    assert "skipped" not in done.stdout
    done = train(here, "disturbed", {"nan": [25], "inf": [43], "spike": [60], "loss": [77]}, "--steps=160", "--ckpt_every=0")
    found, want = lines(here, "disturbed"), lines(here, "undisturbed")
    why = {line["step"]: line["skipped_why"] for line in found if "skipped_why" in line}
    assert list(why) == [25, 43, 60, 77] and found[-1]["skipped"] == 4
    assert all("on rank 1" in text for text in why.values()), why
    assert "step 25 is skipped, 1 in a row: gradient norm nan, on rank 1; the first gradient norm" in done.stdout
    assert [line["row_ids"] for line in found] == [line["row_ids"] for line in want], "the data position goes on"
    assert found[-1]["val_loss"] == pytest.approx(want[-1]["val_loss"], rel=0.02)
    assert found[23]["loss"] == want[23]["loss"] and found[25]["loss"] != want[25]["loss"]


def test_a_row_of_skipped_steps_ends_the_run_with_its_own_code_and_an_older_checkpoint(here):
    settings = ["--steps=60", "--ckpt_every=10", "--max_skips=20"]
    done = train(here, "bad", {"nan": range_list(28, 60)}, *settings, check=False)
    out = here / "out" / "bad"
    assert done.returncode == EXIT_DIVERGED and "the last 20 steps could not be applied" in done.stdout, done
    assert lines(here, "bad")[-1]["step"] == 47 and "Traceback" not in done.stderr
    assert sorted(p.name for p in (out / "ckpt").iterdir()) == ["step-00000010", "step-00000020"]
    report = (out / "diverged.txt").read_text()
    assert "step 28: loss" in report and "step 47: loss" in report and "ranks 1" in report and "ckpt/step-00000020" in report
    again = train(here, "bad", {"nan": [24]}, *settings, "--stop_at=24")  # the cause is gone, but for the last step
    assert "resumed from out/bad/ckpt/step-00000020" in again.stdout and again.stdout.count("is skipped") == 1
    assert lines(here, "bad")[-1]["step"] == 24
    kept = sorted(p.name for p in (out / "ckpt").iterdir())
    assert kept == ["step-00000010", "step-00000020", "step-00000024"], "older ones stay"


def range_list(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


# ------------------------------------------------------------------------------------------------------------------
# Checks: each finds its fault and names it, and is silent otherwise
# ------------------------------------------------------------------------------------------------------------------


def states(R=1, N=2, E=2, offset=lambda rank: 0):
    """The state of every rank. offset: of a rank, how far its values are taken from another place."""
    m, found = check.tiny(), []
    for rank in range(R * N * E):
        grid = parallel.make_grid(rank + offset(rank), R * N * E, E, R, m, connect=False)
        state = parallel.init_state(m, grid, 0, CPU)
        optim.init_moments(state, "muon")
        found.append((grid, state))
    return m, found


def test_masters_in_bf16_are_found():
    m, ((grid, state), *_) = states(N=1, E=1)
    health.check_state(state, grid, m)
    state.master["layers.0.control"] = state.master["layers.0.control"].bfloat16()
    with pytest.raises(CheckFailed, match="rank 0: masters and moments must be float32, but layers.0.control/master is torch.bf"):
        health.check_state(state, grid, m)
    _, ((grid, state), *_) = states(N=1, E=1)
    state.moments["head"]["v"] = state.moments["head"]["v"].half()
    assert "head/v is torch.float16" in health.type_problem(state)


def test_equal_shards_and_a_replica_that_drifts_are_found():
    m, found = states(R=2)
    grid, held = found[0][0], [health.held_values(state) for _, state in found]
    assert health.shard_problem(held, grid) == ""
    _, same = states(R=2, offset=lambda rank: -1 if rank % 4 == 3 else 0)  # rank 3 draws what rank 2 does
    assert "ranks 2 and 3 own different parts of embed, but hold the same values" in health.shard_problem(
        [health.held_values(state) for _, state in same], grid)
    drifted = found[5][1].master["layers.1.down"].view(torch.int32)
    drifted[0, 3, 3] ^= 1  # the last bit of one value
    held[5] = health.held_values(found[5][1])
    assert "a replica has drifted: rank 5 owns the same part of down as rank 1" in health.shard_problem(held, grid)
    held[5] = held[1]
    found[6][1].bias_LX[1, 2] += 1e-3
    held[6] = health.held_values(found[6][1])
    assert "selection bias of rank 6 is not that of rank 0" in health.shard_problem(held, grid)


def test_padding_and_norms_are_no_equal_shards():
    """Three of eight ranks of a column own padding only, all own norms of ones."""
    m = model.model_of("debug", experts=6, groups=1, top_k=2, layers=1, width=64, vocab=300)
    held = []
    for rank in range(4):
        grid = parallel.make_grid(rank, 4, 1, 1, m, connect=False)
        held.append(health.held_values(parallel.init_state(m, grid, 0, CPU)))
    assert health.shard_problem(held, grid) == "" and held[3]["gate_up"] == "" and held[0]["final"] == ""


def test_rope_in_bf16_is_found(monkeypatch):
    m = model.model_of("debug", seq_len=4096)
    assert health.rope_problem(m, CPU) == ""
    assert health.rope_problem(model.model_of("1t"), CPU) == ""

    def in_bf16(theta, head_dim, length, device):
        inv_freq = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.bfloat16) / head_dim)
        angle = torch.arange(length).bfloat16()[:, None] * inv_freq
        return angle.cos().float(), angle.sin().float()

    monkeypatch.setattr(model, "rope_cache", in_bf16)
    assert "RoPE turns the last position, 4095, wrongly by" in health.rope_problem(m, CPU)


@pytest.mark.parametrize("stuck", ["layers.1.q_norm", "layers.0.router", "embed", "layers.1.down"])
def test_a_parameter_that_never_moves_is_named(stuck):
    for planted in (False, True):
        m, ((grid, state), *_) = states(N=1, E=1)
        moves = Moves(state, grid, m)
        for name, bucket in state.buckets.items():
            kept = {p.name: (p.at, state.master[name].view(-1)[p.at : p.at + p.stop - p.start].clone())
                    for p in parallel.pieces(bucket, m, grid)} if planted else {}
            state.master[name] += 1e-3
            for key, (at, values) in kept.items():
                if key == stuck or name == stuck:
                    state.master[name].view(-1)[at : at + len(values)] = values
        for lr in [1e-3, 1e-9] * (health.MOVED_AFTER - 1):
            moves.accepted(lr)
        if not planted:
            moves.accepted(1e-3)
            continue
        with pytest.raises(CheckFailed, match=f"^{stuck} did not move in 10 steps"):
            moves.accepted(1e-3)


def test_what_cannot_move_is_no_alarm():
    """Steps that fp32 rounds away near 1.0, and the router of a single expert."""
    m, ((grid, state), *_) = states(N=1, E=1)
    moves = Moves(state, grid, m)
    for _ in range(1000):
        moves.accepted(1e-8)
    assert "layers.0.router" in moves.names
    alone = model.model_of("debug", layers=1, width=64, experts=1, top_k=1, groups=1, vocab=300)
    names = Moves(parallel.init_state(alone, grid, 0, CPU), grid, alone).names
    assert "layers.0.q_norm" in names and "layers.0.router" not in names


def test_the_largest_of_the_smallest_steps_that_count_moves_a_norm():
    """What MOVES_AT stands for: a few of AdamW's steps at that rate change ones in fp32, at a twentieth of it they need not."""
    ones = torch.ones(16)
    for lr, moved in {health.MOVES_AT: True, 5e-8: False}.items():
        x = ones.clone()
        for _ in range(health.MOVED_AFTER):
            x -= lr * 0.3
        assert bool((x != ones).all()) == moved


def test_double_counting_is_found(monkeypatch):
    """Also where layers are recomputed and where their graph is kept; padding is no token."""
    m = check.tiny(router="sigmoid")
    (grid, state), row = states(N=1, E=1)[1][0], check.random_rows(m)[0]._replace(n_real=30)
    parallel.start_refresh(state, grid, parallel.Transport(torch.float32, dense="step"))()

    def counted() -> str:
        balance = model.Balance(m, CPU, 60, aux=1e-3)
        trainer.schedule([row, row], state, grid, m, parallel.Transport(torch.float32), 1 / 80, keep_layers=1, balance=balance)
        return health.count_problem(balance.counts_LX, 60, m.top_k)

    assert counted() == ""
    count = model.Balance.count
    monkeypatch.setattr(model.Balance, "count", lambda *args: (count(*args), count(*args)))
    assert counted() == ("layer 0 counted 480 tokens of experts, but 60 tokens with 4 each are 240: some are counted twice, "
                         "or not at all")


def test_a_loss_that_is_divided_wrongly_is_found():
    assert health.loss_warning(8.33, 4096) == ""
    for wrong in (8.33 / 2, 8.33 * 1.1, math.nan):
        assert "that of a guess among 4096 tokens is ln 4096 = 8.318" in health.loss_warning(wrong, 4096)


def test_a_held_out_loss_at_chance_is_told():
    assert health.chance_warning(8.2, 8.31, 4096) == "" == health.chance_warning(5.0, 5.2, 4096)
    told = health.chance_warning(5.0, 8.3, 4096)
    assert "is still that of a guess (8.318), while the training loss has fallen to 5.000" in told


def test_rows_that_come_again_are_found_and_epochs_are_not():
    rng = np.random.default_rng(0)
    digests = rng.integers(0, 2**32, 1000).tolist()
    repeats = Repeats(lambda a, b: False)
    assert not any(repeats.problem(step, digests[step]) for step in range(1, 900)) and len(repeats.seen) == 2 * health.KEPT
    resumed = Repeats(lambda a, b: False, json.loads(json.dumps(repeats.state())))
    assert not resumed.problem(900, digests[900]), "a resumed run goes on"
    assert "step 901 reads the rows of step 1 again: the data position was lost" in resumed.problem(901, digests[1])
    assert "step 902 reads the rows of step 850 again" in resumed.problem(902, digests[850])
    few = Repeats(lambda a, b: a % 8 == b % 8)  # one row per step: each comes again in the next epoch
    assert not any(few.problem(step, digests[(step - 1) % 8]) for step in range(1, 50))


def test_rows_are_told_apart_by_their_place_and_by_their_tokens():
    def digest(tokens, origin):
        return trainer.to_device(data.Row(np.array(tokens), np.array([1, -1]), [0, 2], 2, origin), CPU).digest

    found = {digest(*args) for args in (([1, 2], "a 1"), ([1, 2], "a 2"), ([1, 2], "b 1"), ([2, 1], "a 1"))}
    assert len(found) == 4 and max(found) < 2**48 and digest([1, 2], "a 1") in found


def test_a_run_whose_rows_are_repeated_after_a_resume_ends_with_its_own_code(here):
    args = [*TINY, "--run=repeats", "--steps=12", "--check_every=3"]
    launch(1, 1, "tests/faulty.py", "{}", *args, "--stop_at=6", cwd=here)
    done = launch(1, 1, "tests/faulty.py", json.dumps({"rewound": 6}), *args, cwd=here, check=False)
    assert done.returncode == EXIT_UNHEALTHY and "error: step 7 reads the rows of step 1 again" in done.stdout, done
    assert json.loads((here / "out" / "repeats" / "progress.json").read_text())["phase"] == "unhealthy"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("nodes, ranks, replicas, faults", [
    (1, 2, 1, ["node:dense gradient", "experts x E", "wrong count"]), (2, 1, 1, ["column:expert gradient"]),
    (2, 1, 2, ["replica:replica gradient"])])
def test_gradients_of_each_axis_are_compared_with_those_of_one_rank(tmp_path, nodes, ranks, replicas, faults, one_rank):
    worker("checked", nodes, ranks, tmp_path, replicas=replicas, faults=["", *faults])
    found = json.loads((tmp_path / "checked.json").read_text())
    axis = next(name for name, shape in check.AXES.items() if shape == (nodes, ranks, replicas))
    assert check.differences(one_rank, found.pop(""), axis) == []
    for fault, measured in found.items():
        text = " ".join(check.differences(one_rank, measured, axis))
        assert f"a sum over the {axis.split()[-1]} is left out" in text, (fault, text)
        assert ("is it summed over all ranks" in text) == (fault == "wrong count")


@pytest.fixture(scope="module")
def one_rank():
    m = check.tiny()
    return check.measure(parallel.make_grid(0, 1, 1, 1, m, connect=False), m, "step")


def kind_of(m: model.Model) -> str:
    return "free" if m.group_limit >= m.top_k else "even" if m.even_groups else "limited"


@pytest.mark.parametrize("settings, kind, groups, limit", [
    ("", "even", 4, 1), ("--size=1t", "even", 4, 2), ("--size=1t --max_per_group=3", "limited", 4, 2),
    ("--size=1t --max_per_group=8", "free", 4, 4), ("--size=1t --groups=8", "even", 4, 1),
    ("--size=15b --groups=1", "free", 1, 4),
    ("--size=15b --top_k=4 --groups=2 --max_per_group=3", "limited", 2, 3), ("--size=15b --top_k=4 --groups=2", "even", 2, 2),
    ("--size=15b --top_k=6", "limited", 4, 2), ("--top_k=2", "limited", 4, 2), ("--top_k=1 --aux_loss=1e-3", "free", 4, 1),
    ("--experts=1 --top_k=1 --groups=1", "free", 1, 1),
    ("--top_k=3 --max_per_group=3 --replicas=2 --rows_per_step=8", "free", 4, 3)])
def test_the_small_model_has_the_settings_kind_of_routing(settings, kind, groups, limit):
    hp, real = check.resolved(settings.split())
    m = check.small(real)
    assert kind_of(real) == kind
    assert (kind_of(m), m.groups, m.group_limit, m.experts) == (kind, groups, limit, 16)


def test_settings_are_those_of_a_run(capsys):
    for wrong, words in (("--dense_gather=stpe", "dense_gather=stpe: unknown"), ("--max_per_group=9", "at most 4 experts"),
                         ("--data=nowhere", "nowhere"), ("--top_k=1", "no gradient")):
        with pytest.raises(model.ConfigError, match=words):
            check.main([wrong])
    assert not capsys.readouterr().out


def test_the_losses_that_balance_the_load_are_in_what_is_compared(one_rank):
    m = check.tiny()
    pushed = check.measure(parallel.make_grid(0, 1, 1, 1, m, connect=False), m, "step", aux=1.0)
    plain = one_rank["gradients"]
    off = {name for name, (norm, _) in pushed["gradients"].items() if norm != pytest.approx(plain[name][0], rel=1e-4)}
    assert "layers.1.router" in off and "layers.1.experts.0.gate" not in off and "head" not in off


def test_a_mask_that_lets_the_future_through_is_found(monkeypatch):
    m = check.tiny()
    assert check.isolation_problem(m) == check.state_problem(m) == ""
    monkeypatch.setattr(model, "query_blocks", lambda bounds: [(0, 0, bounds[-1])])  # one document
    assert "a changed token changes a loss in another document" in check.isolation_problem(m)


def test_smoke_is_bit_exact_and_finds_one_bit_of_one_initial_weight():
    runs = [smoke.measure(3, ("tests/faulty.py", json.dumps(faults)))[1] for faults in ({}, {}, {"flip": 1})]
    assert smoke.difference(runs[0], runs[1]) == ""
    assert "should be" in smoke.difference(runs[0], runs[2]) or "weights or moments" in smoke.difference(runs[0], runs[2])
    assert "tracked peak memory" in smoke.difference(runs[0], runs[0] | {"peak_bytes": 1})


# ------------------------------------------------------------------------------------------------------------------
# Gradient noise scale
# ------------------------------------------------------------------------------------------------------------------


def test_noise_scale_of_known_gradients():
    """Vectors with mean g and variance s: s / |g|^2, from ragged groups of them."""
    rng, noise = np.random.default_rng(0), Noise()
    g, sizes = rng.normal(0, 0.05, 400), np.array([30, 50, 20, 60])
    estimates = []
    for _ in range(300):
        sums = [rng.normal(g, 1.0, (n, 400)).sum(0) / sizes.sum() for n in sizes]
        noise.add(np.array([(s**2).sum() for s in sums]), float((sum(sums) ** 2).sum()), sizes)
        estimates.append(list(noise.state()))
    averaged = np.mean(estimates[100:], 0)
    assert averaged[0] / averaged[1] == pytest.approx(400 / (g**2).sum(), rel=0.1)
    before = noise.state()
    noise.add(np.array([1.0, math.nan]), 1.0, np.array([4, 4]))
    noise.add(np.array([1.0, 1.0]), 1.0, np.array([4, 0]))
    noise.add(np.array([1.0]), 1.0, np.array([4]))
    assert noise.state() == before


def test_noise_scale_of_a_model_is_that_of_its_rows(tmp_path):
    """Against the variance of the gradients of single rows, on a fixed model."""
    worker("noise", 2, 1, tmp_path, steps=60)
    found = json.loads((tmp_path / "noise.json").read_text())
    assert found["estimate"] == pytest.approx(found["direct"], rel=0.2), found
