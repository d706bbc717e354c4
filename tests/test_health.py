"""health.py: steps that are skipped, and checks beside a run."""

import json
import math

import numpy as np
import pytest
from health import Skips, suspects
from launch import EXIT_DIVERGED
from spawn import launch
from test_train import TINY

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
    for step, value in {30: math.nan, 60: math.inf, 61: math.nan, 100: 1000.0, 101: 900.0, 250: 40.0}.items():
        disturbed[step - 1] = value
    skips = Skips(10, 128, 20)
    assert judged(skips, disturbed) == [30, 60, 61, 100, 101, 250]
    assert skips.total == 6 and len(skips.accepted) == 128
    assert set(skips.accepted) <= {(norm, 2.0) for norm in norms}, "a rejected step is in the statistics"
    assert judged(Skips(10, 128, 20), norms) == []
    assert judged(Skips(0, 128, 20), disturbed) == [30, 60, 61]


def test_a_loss_far_above_is_skipped_too_and_an_early_spike_is_not_judged():
    skips = Skips(10, 128, 20)
    assert not skips.judge(1, 8.0, 500.0, []), "there is nothing to compare with yet"
    assert judged(skips, healthy(60), 2) == []
    assert "loss 20 above" in skips.judge(62, 20.0, 1.0, [3]) and "loss nan, on rank 3" in skips.judge(63, math.nan, 1.0, [3])


def test_a_quiet_stretch_does_not_make_the_next_step_an_outlier():
    assert judged(Skips(10, 128, 20), [1.0] * 50 + [1.9]) == []
    assert judged(Skips(10, 128, 20), [1.0] * 50 + [2.1]) == [51]


def test_the_first_norm_that_is_not_finite_is_an_alarm_of_its_own():
    skips = Skips(10, 128, 20)
    first, second = (skips.judge(step, 2.0, math.nan, [1]) for step in (1, 2))
    assert "on rank 1; the first gradient norm of this run that is not finite" in first and "first" not in second


def test_a_resumed_run_judges_as_an_uninterrupted_one():
    norms = healthy(200) + [math.nan] * 3 + [1e3] * 2 + healthy(50, 1) + [math.inf] * 4
    whole = Skips(10, 64, 4)
    want = judged(whole, norms)
    for cut in (10, 100, 202, 204, 257):
        first = Skips(10, 64, 4)
        found = judged(first, norms[:cut])
        rest = Skips(10, 64, 4, json.loads(json.dumps(first.state())))
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
    return launch(2, 1, "tests/faulty.py", json.dumps(faults), f"--run={name}", *TINY, "--router=sigmoid", *args, cwd=here, check=check)


def lines(here, name) -> list[dict]:
    return [json.loads(line) for line in (here / "out" / name / "metrics.jsonl").read_text().splitlines()]


def test_faults_of_one_rank_are_skipped_by_all_and_training_goes_on(here):
    done = train(here, "undisturbed", {}, "--steps=150", "--ckpt_every=0")
    assert "skipped" not in done.stdout
    done = train(here, "disturbed", {"nan": [25], "inf": [43], "spike": [60], "loss": [77]}, "--steps=150", "--ckpt_every=0")
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
    train(here, "bad", {}, *settings)  # the cause is gone
    whole = train(here, "good", {}, *settings)
    assert lines(here, "bad")[-1]["loss"] == lines(here, "good")[-1]["loss"], whole.stdout[-500:]


def range_list(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))
