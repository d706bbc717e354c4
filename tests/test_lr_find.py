"""lr_find.py: what it reads from a curve, and a whole search."""

import json
import math
import signal
import subprocess
import sys

import lr_find
import pytest
import train
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


def test_rates_are_told_as_lr_has_them_before_they_are_scaled(tmp_path):
    lines = [{"step": n, "tokens": n * 2048, "lr": 0.5 * 0.1 * n, "loss": 8.0} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(found) + "\n" for found in lines))
    hp = train.parse(["--lr_scaling=sqrt", "--lr_batch=8192"])
    assert lr_find.read(tmp_path / "metrics.jsonl", hp) == [(pytest.approx(0.1), 8.0), (pytest.approx(0.2), 8.0)]


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
                                           ("--from=abc", "--from=abc: expected a number"),
                                           ("--to=inf", "--to=inf: must be a finite"),
                                           ("--stepz=1", "--stepz=1: no such setting")])
def test_wrong_settings_are_told_at_once(args, message, capsys):
    with pytest.raises(lr_find.ConfigError, match=message):
        lr_find.main(args.split())


LAUNCHER = """
import os, pathlib, signal, sys, time
def end(number, _):
    print("ended by", number, flush=True)
    time.sleep(0.3)  # as a launcher whose ranks save
    pathlib.Path("ended").touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
print("ready", flush=True)
time.sleep(0.1)
"""


def search_with(tmp_path, monkeypatch, rest: str):
    """A search whose launcher is this script; beside an earlier one's results."""
    (tmp_path / "launch.py").write_text(LAUNCHER + rest)
    (tmp_path / "out" / "lr-find").mkdir(parents=True)
    (tmp_path / "out" / "lr-find" / "metrics.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lr_find, "HERE", tmp_path)
    return lr_find.ramp({"from": "1e-5", "to": "1"}, [])


def test_the_error_that_ended_the_run_is_told_and_an_earlier_search_stays(tmp_path, monkeypatch):
    with pytest.raises(lr_find.ConfigError, match="^the run ended with code 2: --run=lr-find: another process"):
        search_with(tmp_path, monkeypatch, "print('error: --run=lr-find: another process is training this run')\n"
                                           "print('rank 0 ended with exit code 2')\nsys.exit(2)")
    assert (tmp_path / "out" / "lr-find" / "metrics.jsonl").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_goes_on_to_the_launcher_which_is_waited_for(tmp_path, monkeypatch, number):
    handler = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended:
        search_with(tmp_path, monkeypatch, f"os.kill(os.getppid(), {int(number)})\ntime.sleep(60)")
    assert ended.value.code == 128 + number and (tmp_path / "ended").exists() and signal.getsignal(number) == handler
