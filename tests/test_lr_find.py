"""lr_find.py: what it reads from a curve, and a whole search."""

import json
import math
import subprocess
import sys

import lr_find
import pytest
from lr_find import diverged, smooth, suggest
from spawn import ROOT
from test_train import TINY


def curve(steps=100, low=1e-5, high=1.0, fall=1e-2, rise=0.2):
    """Losses of a ramp: from 8 down around the rate `fall`, up again around `rise`."""
    rates = [low * (high / low) ** (i / (steps - 1)) for i in range(steps)]
    return [(lr, 8 - 3 / (1 + (fall / lr) ** 2) + 10 / (1 + (rise / lr) ** 3)) for lr in rates]


def test_the_suggestion_is_where_the_loss_falls_fastest_and_below_where_it_turns():
    points = smooth(curve())
    suggestion, steepest, lowest = suggest(points)
    assert suggestion == min(steepest, lowest / 4) and 5e-3 < steepest < lowest < 0.3
    assert suggest(smooth([(10.0 ** (i / 20 - 5), 8.0) for i in range(80)])) is None
    assert suggest(smooth(curve()[:5])) is None and suggest([]) is None


def test_it_stops_once_the_loss_has_turned_up_and_not_before():
    points = smooth(curve())
    first = next(n for n in range(1, len(points) + 1) if diverged(points[:n]))
    assert 0.05 < points[first - 1].lr < 1.0
    noise = [(lr, loss + 0.2 * math.sin(7 * i)) for i, (lr, loss) in enumerate(curve(rise=1e3))]
    assert not any(diverged(smooth(noise[:n])) for n in range(1, 100))
    assert diverged(smooth(noise + [(1.0, math.nan)]))


def test_smoothing_starts_from_the_first_loss():
    assert [p.smoothed for p in smooth([(1.0, 5.0)] * 3)] == pytest.approx([5.0] * 3)


def test_a_search_prints_a_table_and_a_suggestion(here):
    argv = [sys.executable, ROOT / "lr_find.py", "--from=1e-3", "--to=30", "--ranks-per-node=1", *TINY, "--steps=60",
            "--optimizer=adamw"]
    done = subprocess.run(argv, cwd=here, capture_output=True, text=True)
    assert done.returncode == 0, done
    found = json.loads((here / "out" / "lr-find" / "lr_find.json").read_text())
    assert f"suggestion: --lr={found['suggestion']:.2g}" in done.stdout and "learning rate       loss   smoothed" in done.stdout
    assert 1e-3 < found["suggestion"] < 3 and len(found["points"]) <= 60
    lines = [json.loads(line) for line in (here / "out" / "lr-find" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["lr"] == pytest.approx(1e-3) and lines[1]["lr"] / lines[0]["lr"] == pytest.approx((30 / 1e-3) ** (1 / 59))


@pytest.mark.parametrize("args, message", [("--from=2 --to=1", "--from=2 --to=1: give two rates"),
                                           ("--stepz=1", "--stepz=1: no such setting")])
def test_wrong_settings_are_told_at_once(args, message, capsys):
    with pytest.raises(lr_find.ConfigError, match=message):
        lr_find.main(args.split())
