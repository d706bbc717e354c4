"""report.py: a page of any run, however long, damaged or restarted, that needs nothing but itself."""

import json
import math
import random
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import report

LAYERS = 4


def line(step: int, **more) -> dict:
    rng = random.Random(step)
    return {"step": step, "tokens": step * 4096, "loss": 2 + 6 * math.exp(-step / 500) + rng.random() / 10,
            "grad_norm": 0.15 + rng.random(), "lr": 1e-3, "step_s": 1.0, "optimizer_s": 0.1, "exposed_comm_s": 0.2,
            "exposed_s": {"expert gather": 0.15, "dispatch": 0.05}, "tok_s": 4096.0, "tok_s_gpu": 1024.0, "mfu": None,
            "expert_load": [1.5 + rng.random() for _ in range(LAYERS)], "rank_load": 1.1, "dead_experts": 0,
            "ckpt_blocked_s": 0.01, "sent_bytes": {"column expert gather": 10**7}, "peak_host_gb": 2.0,
            "peak_device_gb": None, **more}


def write(root, name: str, lines: list, **files) -> None:
    folder = root / "out" / name
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    for file, content in files.items():
        (folder / file.replace("_", ".")).write_bytes(content if isinstance(content, bytes) else content.encode())


def made(root, monkeypatch, *args: str) -> str:
    monkeypatch.chdir(root)
    assert report.main(list(args)) == 0
    place = root / "out" / args[1] / "report.html"
    text = place.read_text()
    assert place.stat().st_size < 2_000_000
    return text


def plots(text: str) -> dict[str, list[ET.Element]]:
    """Title -> its elements. Well-formed or an error."""
    found = {}
    for svg in re.findall(r"<svg .*?</svg>", text, re.S):
        root = ET.fromstring(svg)
        found[root.get("aria-label")] = list(root.iter())
    return found


def test_every_plot_has_units_on_both_axes_and_no_label_lies_on_another(tmp_path, monkeypatch):
    tracked = {"tracked_bytes": {"weights": 2**31, "transient": 2**30}, "tracked_peak_bytes": 3 * 2**30}
    rows = [line(i, aux_loss=0.1, noise_tokens=1e5 * i, mfu=0.4, goodput=0.9, ckpt_write_s=2.0, alloc_retries=i,
                 **(tracked if i % 9 == 1 else {}), **({"val_loss": 3.0} if i % 10 == 0 else {})) for i in range(1, 201)]
    evals = "".join(json.dumps({"step": s, "tokens": s, "bits_per_byte": {"model": 2.0 + s}, "nats": {"model": 3.0}}) + "\n"
                    for s in (1, 2))
    write(tmp_path, "a", rows, evals_jsonl=evals, experts_json=json.dumps({"step": 200, "load": [[1.0, 0.5], [2.0, 0.1]]}))
    found = plots(made(tmp_path, monkeypatch, "--run", "a"))
    assert {"Loss", "Learning rate", "Gradient norm", "Throughput", "Time of a step", "Where a step's time goes (rank 0)",
            "Memory of tensors at the peak of a step, by purpose (rank 0)", "Load of the fullest expert",
            "Load of every expert at step 200", "Evaluated checkpoints", "Share of the peak"} <= found.keys()
    for title, elements in found.items():
        units = [e for e in elements if e.get("class") == "unit"]
        assert len(units) == 2 and all(e.text.strip() for e in units), title
        assert len(units[1].text) * 7.4 < report.HEIGHT - report.BOTTOM - report.TOP + 30, f"{title}: {units[1].text} is too long"
        ticks = [e for e in elements if e.get("class") == "tick"]
        assert all(len(e.text) <= 7 for e in ticks), title
        columns = sorted(float(e.get("y")) for e in ticks if e.get("text-anchor") == "end" and float(e.get("x")) < report.LEFT)
        assert all(b - a > 17 for a, b in zip(columns, columns[1:])), title
        under = sorted((float(e.get("x")), e.text) for e in ticks if float(e.get("y")) == report.HEIGHT - report.BOTTOM + 17)
        assert under and all(b[0] - a[0] > 8.5 * max(len(a[1]), len(b[1])) for a, b in zip(under, under[1:])), (title, under)


def test_a_long_run_is_a_small_page_that_keeps_every_extreme(tmp_path, monkeypatch):
    template, rows = json.dumps(line(1)), []
    for i in range(1, 100_001):
        loss = 50.0 if i == 77_777 else 0.01 if i == 33_333 else 3 + i % 7 / 10
        rows.append('{"step": %d, "tokens": %d, "loss": %s, "grad_norm": 1.5, "lr": 1e-3, "step_s": %s, "tok_s": 5e3}' % (
            i, i * 4096, loss, 1 + i % 3) if i % 100 else template.replace('"step": 1,', f'"step": {i},', 1))
    write(tmp_path, "long", rows)
    text = made(tmp_path, monkeypatch, "--run", "long")
    run = report.Run(tmp_path / "out" / "long")
    assert len(run.steps) == 100_000
    drawn = report.buckets(run.steps, run.columns["loss"], 1, 100_000, 380)
    assert drawn.shape[1] == 380 and drawn[3].max() == 50.0 and drawn[2].min() == 0.01
    assert np.average(drawn[1]) == pytest.approx(run.columns["loss"].mean(), rel=1e-3)
    assert len([e for e in plots(text)["Loss"] if e.get("class") == "band"]) == 1


def test_damage_repeats_and_gaps_are_told_and_shown(tmp_path, monkeypatch):
    rows = [line(i, **({"odd": 1.0} if i == 22 else {})) for i in range(1, 31)]
    rows += [line(i, loss=9.0, recovery_s=12.5) for i in range(21, 26)]  # went back, and ends earlier
    log = b"--- 2026-01-02 03:04:05 train.py --run=b\nstep 1/40  loss 3\nstep 30/40  loss \xff\xfe 3\nWARNING: odd <b>&\xff\n" \
          b"--- 2026-01-02 04:00:00 train.py --run=b\nresumed from out/b/ckpt/step-00000020\nfirst step back 12.5 s after\n" \
          b"step 21/40  loss 9\n"
    attempt = {"attempt": 1, "cause": "node", "decision": "again", "excluded": {"n7": "silent"}}
    write(tmp_path, "b", [*rows[:10], '"text"', "[1]", '{"loss": 1}', *rows[10:], '{"step": 26, "lo'], log_txt=log,
          progress_json='{"step": 25, "st', config_json=b'{"settings": {"size": "\xff", "run": "<script>alert(1)</script>"}}',
          samples_jsonl=json.dumps({"step": 20, "prompt": "a <i>", "text": "b </pre><script>x\0\x1b[2J"}) + "\n{",
          experts_json='{"load": [[1, 2], [3]]}',
          attempts_jsonl=json.dumps(attempt) + "\n[]\n")
    with open(tmp_path / "out" / "b" / "metrics.jsonl", "ab") as f:
        f.write(b"\n\xff\xfe{")
    run = report.Run(tmp_path / "out" / "b")
    assert run.steps.tolist() == list(range(1, 26)) and run.restarts() == [21]
    assert run.columns["loss"][20:].tolist() == [9.0] * 5 and np.isnan(run.columns["recovery_s"][:20]).all()
    assert np.isnan(run.columns["odd"]).all()  # it was measured on the way that was given up
    assert any("10 steps are there twice" in n for n in run.notes) and any("4 lines cut or damaged" in n for n in run.notes)
    text = made(tmp_path, monkeypatch, "--run", "b")
    assert [e.get("class") for e in plots(text)["Loss"]].count("restart") == 1
    assert "n7: silent" in text and "progress.json cannot be read" in text and "12.5 s" in text and "step-00000020" in text
    assert text.count("<script>") == 1 and "b &lt;/pre&gt;" in text and "odd &lt;b&gt;" in text
    assert not re.search("[\0\x1b]", text)


def test_a_skipped_step_is_marked_and_its_missing_values_leave_the_curve_whole(tmp_path, monkeypatch):
    bad = {"loss": None, "grad_norm": None, "skipped_why": "loss is nan"}
    rows = [line(i, **(bad if i in (5, 9) else {})) for i in range(1, 20)]
    write(tmp_path, "c", rows)
    text = made(tmp_path, monkeypatch, "--run", "c")
    for title in ("Loss", "Gradient norm"):
        marks = [e for e in plots(text)[title] if e.tag == "path" and e.get("fill") == report.COLOURS[6]]
        assert len(marks) == 2, title
    assert "loss is nan" in text and "NaN" not in text and "nan " not in re.sub(r"loss is nan", "", text)


def test_runs_are_compared_in_one_page_that_fetches_nothing(tmp_path, monkeypatch):
    settings = {name: json.dumps({"settings": {"size": "debug", "lr": lr}}) for name, lr in (("a", 1e-3), ("b", 2e-3))}
    write(tmp_path, "a", [line(i) for i in range(1, 50)], config_json=settings["a"])
    write(tmp_path, "b", [line(i, loss=1.0) for i in range(1, 90)], config_json=settings["b"])
    write(tmp_path, "empty", [], log_txt="")
    text = made(tmp_path, monkeypatch, "--run", "a", "--run", "b", "--run", "empty", "--x", "tokens")
    names = [e.get("data-name") for e in plots(text)["Loss"] if e.get("class") == "line"]
    assert names == ["a: training", "b: training"]
    assert "Settings that differ" in text and "0.002" in text and "<td>size</td>" not in text
    assert [e.text for e in plots(text)["Loss"] if e.get("class") == "unit"][0] == "tokens"
    rest = text.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?:|//cdn|@import|url\(|<link|src=|fetch\(|XMLHttp", rest)
    assert report.main(["--run", "nowhere"]) == 2


def test_wandb_has_the_sections_of_the_page():
    named = report.grouped(line(3, val_loss=2.0, tracked_bytes={"weights": 5}, skipped_why="why", row_ids="x", ckpt_step=7))
    assert named["loss/val_loss"] == 2.0 and named["memory/tracked_bytes/weights"] == 5 and named["experts/expert_load/3"] > 1
    assert named["time/exposed_s/expert gather"] == 0.15 and named["traffic/sent_bytes/column expert gather"] == 10**7
    assert named["run/ckpt_step"] == 7 and named["run/tokens"] == 3 * 4096
    assert not any("why" in name or "row_ids" in name for name in named)
    for name in (n for names in report.GROUPS.values() for n in names):
        assert len([g for g, names in report.GROUPS.items() if name in names]) == 1
