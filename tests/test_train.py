"""train.py as a user runs it: interrupted and resumed, with bad input, and what it leaves behind."""

import dataclasses
import errno
import fcntl
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import cluster
import pytest
import recover
import torch
import train
from checkpoint import Outcome
from launch import EXIT_CONFIG, EXIT_NOT_SAVED, EXIT_STOPPED, Place
from model import ConfigError, model_of
from safetensors.torch import load_file
from spawn import ROOT, launch

TINY = ["--layers=2", "--width=64", "--heads=4", "--kv_heads=2", "--head_dim=16", "--expert_width=32", "--vocab=300",
        "--seq_len=64", "--data=texts", "--wandb=off", "--val_rows=3", "--val_every=10", "--warmup=5"]


def run(here, name, *args, nodes=2, ranks=2, check=True):
    return launch(nodes, ranks, "train.py", f"--run={name}", *TINY, *args, cwd=here, check=check)


def losses(here, name) -> list[tuple]:
    lines = [json.loads(line) for line in (here / "out" / name / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"], line.get("val_loss") if line["step"] % 10 == 0 else None)
            for line in lines]  # a run that stops measures once more


def final_tensors(here, name, step) -> dict[str, torch.Tensor]:
    files = sorted((here / "out" / name / "ckpt" / f"step-{step:08d}").glob("*.safetensors"))
    return {f"{f.name}/{key}": tensor for f in files for key, tensor in load_file(f).items()}


PRODUCTION = ["--dtype=bfloat16", "--weight_transport=fp8", "--grad_transport=bf16", "--dense_gather=step", "--router=sigmoid",
              "--replicas=2"]


def test_interrupted_twice_and_resumed_is_bit_identical(here):
    """Two replicas with what production uses; soak.py does the same for one replica and other ways to be interrupted."""
    nodes, ranks, more, whole, parts = 4, 1, PRODUCTION, "whole", "parts"
    settings = ["--steps=40", "--ckpt_every=15", *more]
    run(here, whole, *settings, nodes=nodes, ranks=ranks)
    run(here, parts, *settings, "--stop_at=7", nodes=nodes, ranks=ranks)
    assert len(losses(here, parts)) == 7

    argv = [sys.executable, ROOT / "launch.py", "--nodes", str(nodes), "--ranks-per-node", str(ranks), "--", ROOT / "train.py"]
    argv += [f"--run={parts}"]
    process = subprocess.Popen([*argv, *TINY, *settings], cwd=here, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step 17/"):
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stdout.read()
    assert process.wait(60) == EXIT_STOPPED, rest
    assert "stopped by SIGTERM" in rest
    stopped = len(losses(here, parts))
    assert 17 <= stopped < 40

    run(here, parts, *settings, nodes=nodes, ranks=ranks)
    assert losses(here, parts) == losses(here, whole)
    whole, parts = final_tensors(here, whole, 40), final_tensors(here, parts, 40)
    assert whole.keys() == parts.keys() and len(whole) > 20
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_rewind_keeps_no_step_twice(tmp_path, monkeypatch):
    """Whole runs do so in soak.py."""
    monkeypatch.chdir(tmp_path)
    (out := tmp_path / "out" / "rewind").mkdir(parents=True)
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 7)]
    (out / "metrics.jsonl").write_text("".join(lines) + '{"step": 7, "lo')  # the last line is torn
    train.Output(train.Hyperparameters(run="rewind"), Place(0, 1, 0, 1, torch.device("cpu"), "gloo")).keep_metrics_before(4)
    assert (out / "metrics.jsonl").read_text() == "".join(lines[:4])


def output(tmp_path, monkeypatch, name) -> train.Output:
    """Of a run in tmp_path/out/<name>, open."""
    monkeypatch.chdir(tmp_path)
    hp = train.Hyperparameters(run=name, wandb="off", val_rows=0)
    out = train.Output(hp, Place(0, 1, 0, 1, torch.device("cpu"), "gloo"))
    out.lock()
    out.open(hp, model_of("debug"), 0)
    return out


def test_a_full_disk_leaves_gaps_in_the_output_and_nothing_else(tmp_path, monkeypatch, capsys):
    out, limits = output(tmp_path, monkeypatch, "full"), resource.getrlimit(resource.RLIMIT_FSIZE)
    out.metrics({"step": 1})
    out.progress(1, "step")
    out.log("--data=texts\udcff")
    assert "--data=texts\\udcff\n" in capsys.readouterr().out and (out.path / "log.txt").read_text().endswith("=texts\\udcff\n")
    used = (out.path / "log.txt").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (17, limits[1]))  # five bytes of the next metrics fit, of the log none
    try:
        for step in (2, 3):
            out.log(f"step {step}")
            out.metrics({"step": step})
            out.progress(step, "step")
        with pytest.raises(train.health.Diverged):
            skips = train.health.Skips(12, 128, 1)
            skips.judge(3, 1.0, float("nan"), [])
            out.diverged(3, skips)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().out.count("WARNING: out/full cannot be written ([Errno 27] File too large") == 1
    assert json.loads((out.path / "progress.json").read_text())["step"] == 1 and (out.path / "log.txt").stat().st_size == used
    assert (out.path / "metrics.jsonl").read_text() == '{"step": 1}\n', "no torn line"
    out.metrics({"step": 4})
    assert [line["step"] for line in map(json.loads, (out.path / "metrics.jsonl").read_text().splitlines())] == [1, 4]


@pytest.mark.parametrize("text, found", [
    ('{"step": 3, "phase": "step", "time": 12.5}', 12.5), ('{"step": 3, "phase": "checkpoint", "time": 12}', 12.0),
    *((f'{{"phase": "{phase}", "time": 12}}', None) for phase in ("done", "stopped", "diverged", "unhealthy")),
    ("", None), ('{"step": 3, "pha', None), ("[]", None), ("{}", None), ('{"phase": "step", "time": null}', None), (None, None)])
def test_only_a_crash_counts_as_one_and_a_torn_progress_file_is_none(tmp_path, text, found):
    if text is not None:
        (tmp_path / "progress.json").write_text(text)
    assert train.alive_before_a_crash(tmp_path / "progress.json") == found


def test_the_end_of_a_job_is_kept_off_by_a_step_a_held_out_loss_and_a_checkpoint():
    class Saver:
        needs_s = 30.0

    class Stop:
        requested = None

    needs_s = train.launch.JOB_MARGIN_S + 2 * 7.0 + 500.0 + 30.0
    for spare_s, stops in ((-5, True), (5, False)):
        reason = train.why_stop(Stop, time.time() + needs_s + spare_s, [3.0, 7.0, 5.0], 500.0, Saver)
        assert bool(reason) == stops and (not stops or reason.startswith("the end of the job at"))
    assert train.why_stop(Stop, None, [], 0.0, Saver) is None


def test_a_save_that_was_asked_for_and_failed_is_asked_for_again(tmp_path, monkeypatch):
    out = output(tmp_path, monkeypatch, "asked")
    (out.path / "save").touch()
    assert out.save_wanted(10) and not out.save_wanted(11), "it is on its way"
    out.saved(Outcome(10, out.path, "disk full", "", 0.0, 0))  # an earlier one
    assert out.asked == 11
    out.saved(Outcome(11, out.path, "disk full", "", 0.0, 0))
    assert not out.save_wanted(12), "not at once, in every step"
    monkeypatch.setattr(train.time, "monotonic", lambda real=time.monotonic: real() + train.ASK_AGAIN_S)
    assert out.save_wanted(500)
    out.saved(Outcome(501, out.path, "", "", 0.0, 0))
    assert not (out.path / "save").exists() and not out.save_wanted(502)


def test_what_a_run_leaves_behind(here):
    done = run(here, "files", "--steps=10", nodes=1, ranks=2)
    out = here / "out" / "files"
    assert re.search(r"step 10/10  loss \d\.\d+  norm .* tok/s .* eta 0m00s  held-out \d", done.stdout)
    assert json.loads((out / "progress.json").read_text())["phase"] == "done"
    settings = json.loads((out / "config.json").read_text())["settings"]
    assert settings["rows_per_step"] == 2 and settings["dtype"] == "float32"
    log = (out / "log.txt").read_text()
    assert "versions python" in log and "git " in log and '"lr": ' in log
    line = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"step", "tokens", "loss", "grad_norm", "lr", "step_s", "tok_s", "tok_s_gpu", "mfu", "exposed_comm_s",
            "peak_host_gb", "alloc_retries", "val_loss"} <= line.keys()
    assert line["tokens"] == 10 * 2 * 64
    assert not list(out.rglob("*.tmp")) and not list((out / "ckpt").glob(".tmp*"))

    again = run(here, "files", "--steps=10", nodes=1, ranks=2)
    assert "nothing to do" in again.stdout
    afresh = run(here, "files", "--steps=10", "--resume=never", nodes=1, ranks=2)
    assert "is now in out/files." in afresh.stdout and len(losses(here, "files")) == 10
    assert len(list((here / "out").glob("files.*"))) == 1, "the earlier run is kept"


def test_another_configuration_is_refused_and_harmless_changes_are_told(here):
    config = ["train", "--run=config"]
    first, = short_runs(here, [*config, "--steps=5"])
    before = sorted((p, p.stat().st_mtime_ns) for p in (here / "out" / "config").rglob("*"))
    changes = {"--seed=3": "seed: checkpoint 0, now 3", "--expert_width=64": "expert_width: checkpoint 32, now 64",
               "--optimizer=adamw": "optimizer: checkpoint muon", "--rows_per_rank=2": "rows_per_step: checkpoint 1"}
    afresh = [*config, "--steps=8", "--resume=never", "--vocab=50000"]  # this text has not so many pieces
    *refused, cannot = short_runs(here, *([*config, "--steps=8", change] for change in changes), afresh)
    for named, out in zip(changes.values(), refused, strict=True):
        assert f"exit {EXIT_CONFIG}" in out and named in out and "--run=NAME" in out, out
    assert f"exit {EXIT_CONFIG}" in cannot and "--vocab=50000" in cannot and "is now in" not in cannot, cannot
    assert before == sorted((p, p.stat().st_mtime_ns) for p in (here / "out" / "config").rglob("*"))
    told, = short_runs(here, [*config, "--steps=8", "--lr=1e-3"])
    assert "exit 0" in first and "another --lr: 0.003 -> 0.001" in told


def test_a_checkpoint_loads_at_another_layout(here):
    """Written at 2x2; an uneven grid of 3 ranks goes on with the same rows and the same losses."""
    run(here, "from", "--steps=9", "--rows_per_step=12", "--ckpt_every=6")
    run(here, "to", "--steps=9", "--rows_per_step=12", f"--resume={here}/out/from/ckpt/step-00000006", nodes=3, ranks=1)
    for there, back in zip(losses(here, "from")[6:], losses(here, "to"), strict=True):
        assert there[0] == back[0] and there[1] == pytest.approx(back[1], rel=1e-4)
    rows = [[json.loads(line)["row_ids"] for line in (here / "out" / name / "metrics.jsonl").read_text().splitlines()][-3:]
            for name in ("from", "to")]
    assert rows[0] == rows[1]


def test_a_damaged_checkpoint_that_is_the_only_one_is_refused_by_all_ranks_and_nothing_changes(here):
    run(here, "damage", "--steps=4", nodes=1, ranks=2)
    file = here / "out" / "damage" / "ckpt" / "step-00000004" / "rank-00001.safetensors"  # only one of the ranks reads it
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    before = sorted((p, p.stat().st_mtime_ns) for p in (here / "out" / "damage").rglob("*"))
    done = run(here, "damage", "--steps=8", nodes=1, ranks=2, check=False)
    assert done.returncode == EXIT_CONFIG and done.stderr.count("rank 1: checkpoint file") == 1 and "damaged" in done.stderr
    assert "--resume=never starts afresh" in done.stderr and "Traceback" not in done.stderr
    assert before == sorted((p, p.stat().st_mtime_ns) for p in (here / "out" / "damage").rglob("*"))
    assert "step 1/8" in run(here, "damage", "--steps=8", "--resume=never", nodes=1, ranks=1).stdout


def test_the_end_of_the_job_is_kept_and_a_last_checkpoint_that_fails_is_an_error(here):
    argv = [sys.executable, ROOT / "launch.py", "--ranks-per-node", "1", "--", ROOT / "train.py", "--run=end", *TINY,
            "--steps=100000", "--ckpt_every=0"]
    for limit, code, message in (("--fsize=1000000", EXIT_NOT_SAVED, "the last checkpoint of this run is missing: checkpoint "
                                  "out/end/ckpt/step-.* not written, rank 0: .*File too large.*older checkpoints are untouched"),
                                 ("--core=0", EXIT_STOPPED, "stopped by the end of the job at")):
        environment = os.environ | {"SLURM_JOB_END_TIME": str(int(time.time()) + 20)}  # which are kept for the way out
        done = subprocess.run(["prlimit", limit, *argv], cwd=here, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == code and re.search(message, done.stdout) and "Traceback" not in done.stderr, done
    assert len(list((here / "out" / "end" / "ckpt").iterdir())) == 1


def test_two_processes_never_train_one_run(here):
    argv = [sys.executable, ROOT / "launch.py", "--ranks-per-node", "1", "--", ROOT / "train.py", "--run=twice", *TINY]
    first = subprocess.Popen([*argv, "--steps=100000"], cwd=here, stdout=subprocess.PIPE, text=True)
    for line in first.stdout:
        if line.startswith("step 2/"):
            break
    second = run(here, "twice", "--steps=100000", nodes=1, ranks=2, check=False)
    first.send_signal(signal.SIGINT)
    assert "stopped by SIGINT" in first.stdout.read() and first.wait(60) == EXIT_STOPPED
    assert second.returncode == EXIT_CONFIG and "another process is training this run" in second.stderr
    assert len(losses(here, "twice")) >= 2


COMPILED = """
import sys, torch
real = torch.compile
torch.compile = lambda f, **how: real(f, **how | {"backend": "eager"})  # the code that inductor makes takes 25 s of a core
import launch, train
sys.exit(launch.run(train.main))
"""


def test_a_run_with_compile_counts_no_live_bytes(here):
    """torch.compile cannot see through what counts them, and they are counted by default."""
    done = subprocess.run([sys.executable, "-c", COMPILED, "--run=compiled", "--steps=2", "--compile=True", *TINY], cwd=here,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "step 2/2" in done.stdout, done.stderr
    assert "tracked_bytes" not in (here / "out" / "compiled" / "metrics.jsonl").read_text()


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    """Lustre mounted without flock, NFS without a lock daemon: the claim of the job must do."""
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fcntl, "flock", flock)
    out = train.Output(train.Hyperparameters(run="nolocks"), SimpleNamespace(rank=0))
    for number in (errno.ENOSYS, errno.ENOLCK):
        out.lock()
    number = errno.EIO
    with pytest.raises(ConfigError, match="cannot be written"):
        out.lock()


def test_a_follower_in_a_chain_knows_that_its_run_has_begun(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_JOB_ID", cluster.FIRST_VAR, recover.BEGUN_VAR):
        monkeypatch.delenv(name, raising=False)
    out = train.Output(train.Hyperparameters(run="chained", wandb="off"), SimpleNamespace(rank=0))
    (tmp_path / "out").mkdir()
    for job, first, before, after in (("1", None, False, False), ("2", "1", True, True), ("3", None, False, False), ("4", "1", False,
                                                                                                                     True)):
        monkeypatch.setenv("PBS_JOBID", job)
        monkeypatch.setenv(cluster.FIRST_VAR, first) if first else monkeypatch.delenv(cluster.FIRST_VAR, raising=False)
        assert out.begun_before() == before
        out.open(out.hp, model_of("debug"), 0)
        assert out.begun_before() == after
    assert (tmp_path / "out" / "chained" / "chain").read_text() == "1"


def test_a_signal_before_the_first_step_ends_at_once(here):
    (here / "large").mkdir()
    text = "\n".join(f"{i} lines of some text to prepare for {i * i} ranks" for i in range(400_000))
    (here / "large" / "text.txt").write_text(text)
    argv = [sys.executable, ROOT / "launch.py", "--ranks-per-node", "2", "--", ROOT / "train.py", "--run=early", *TINY,
            "--data=large"]
    process = subprocess.Popen(argv, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "ranks on" in process.stdout.readline()
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    start = time.time()
    assert process.wait(30) == 128 + signal.SIGINT and time.time() - start < 15
    assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("make, message", [
    (lambda out: out.write_text(""), "out/blocked cannot be written"),
    (lambda out: (out.mkdir(), (out / "blocked").write_text("")), "out/blocked cannot be written (is not a directory)"),
    (lambda out: ((out / "blocked").mkdir(parents=True), (out / "blocked" / "ckpt").write_text("")),
     "--run=blocked: out/blocked/ckpt cannot be written")])
def test_an_output_directory_that_cannot_be_made(here, tmp_path, make, message):
    (tmp_path / "texts").symlink_to(here / "texts")
    make(tmp_path / "out")
    done = launch(1, 2, "train.py", "--run=blocked", *TINY, cwd=tmp_path, check=False)
    assert done.returncode == EXIT_CONFIG and message in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_metrics_of_a_run_whose_checkpoints_are_gone_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = train.Output(train.Hyperparameters(run="gone", wandb="off"), SimpleNamespace(rank=0))
    (tmp_path / "out" / "gone").mkdir(parents=True)
    lines = "".join(json.dumps({"step": step, "step_s": 1.0}) + "\n" for step in (1, 2, 3))
    (tmp_path / "out" / "gone" / "metrics.jsonl").write_text(lines)
    out.open(out.hp, model_of("debug"), 0)
    (aside,) = (tmp_path / "out" / "gone").glob("metrics-*.jsonl")
    assert aside.read_text() == lines and (tmp_path / "out" / "gone" / "metrics.jsonl").read_text() == ""
    assert f"are now in {aside.relative_to(tmp_path)}" in (tmp_path / "out" / "gone" / "log.txt").read_text()


def test_help_says_what_each_setting_means():
    text = train.settings_in_words(train.Hyperparameters)
    assert re.findall(r"^  --(\w+)=", text, re.M) == [f.name for f in dataclasses.fields(train.Hyperparameters)]
    assert "--steps=200                     length of the run and of the learning-rate schedule\n" in text


def test_a_run_that_goes_another_way_keeps_its_own_checkpoints(here):
    """Back to step 4 of 8: the checkpoint of step 8 is no longer the newest of this run, and is not lost."""
    way, root = ["train", "--run=way", "--steps=8"], here / "out" / "way" / "ckpt"
    back = f"--resume={root / 'step-00000004'}"
    outputs = short_runs(here, [*way, "--ckpt_every=4"], [*way, back, "--stop_at=4"], [*way, back, "--lr=1e-3", "--stop_at=6"])
    assert "nothing to do" in outputs[1] and "goes another way" not in outputs[1], "only a run that starts moves what is in its way"
    assert len(list(root.glob("abandoned-*-step-00000008"))) == 1, outputs
    again, = short_runs(here, [*way, "--lr=1e-3"])
    assert "resumed from out/way/ckpt/step-00000006" in again
    assert "resumed with another --lr: 0.003 -> 0.001" in (here / "out" / "way" / "log.txt").read_text()


def test_a_run_begun_from_anothers_checkpoint_begins_there_again_until_it_has_its_own(tmp_path):
    source, root = tmp_path / "source" / "ckpt" / "step-00000004", tmp_path / "own" / "ckpt"

    def complete(path):
        path.mkdir(parents=True)
        (path / ".complete").touch()

    complete(source)
    complete(root / "step-00000002")
    lines = []
    train.start_from(source, 4, [], SimpleNamespace(path=root.parent, active=True, log=lines.append))
    assert train.checkpoint.candidates(root) == [source], "not its own step 2, nor from scratch"
    assert "an earlier checkpoint of it is now" in lines[-1] and len(list(root.glob("abandoned-*"))) == 1
    complete(root / "step-00000006")
    assert train.checkpoint.candidates(root) == [root / "step-00000006", source]
    (source / ".complete").unlink()
    assert train.checkpoint.candidates(root) == [root / "step-00000006"]
    (root / "step-00000006" / ".complete").unlink()
    with pytest.raises(ConfigError, match="from which it was begun, is gone"):
        train.checkpoint.candidates(root)


def test_every_rank_ends_with_the_same_error_at_once(here):
    start = time.time()
    done = run(here, "bad", "--stepz=3", check=False)
    assert done.returncode == EXIT_CONFIG and time.time() - start < 30
    assert done.stderr.count("error:") == 1 and "--stepz=3: no such setting; did you mean --steps?" in done.stderr
    assert not (here / "out" / "bad").exists()


@pytest.mark.parametrize("args, message", [
    ("--steps", "write settings as --name=value"),
    ("--steps=ten", "--steps=ten: expected a whole number"),
    ("--lr=fast", "--lr=fast: expected a number"),
    ("--lr=nan", "--lr=nan: must be a finite number"),
    ("--lr=-1", "--lr=-1: must be a finite number, zero or more"),
    ("--steps=0", "--steps=0: must be at least 1"),
    ("--size=2t", "--size=2t: unknown; sizes are debug"),
    ("--dtype=float16", "--dtype=float16: unknown; use one of auto, float32, bfloat16"),
    ("--experts=18", "--groups=4: must divide the 18 experts"),
    ("--experts=6 --groups=2 --top_k=2", "--experts=6: must be a multiple of the 4 ranks per node"),
    ("--groups=3 --experts=12 --top_k=3", "--groups=3: neither divides nor is divided by the 4 ranks per node"),
    ("--kv_heads=3", "--kv_heads=3: must divide the 4 query heads; nearest that do: 1, 2, 4"),
    ("--max_per_group=5", "--max_per_group=5: at most 4 experts are in a group"),
    ("--top_k=17", "--top_k=17: more than the 16 experts"),
    ("--top_k=1", "--top_k=1: of 16 experts, but the weight of one alone is always 1"),
    ("--replicas=3", "--replicas=3: must divide the 2 nodes"),
    ("--rows_per_step=7", "--rows_per_step=7: must be rows_per_rank x 8 ranks"),
    ("--rows_per_step=16 --rows_per_rank=3", "use --rows_per_step=24 or leave out --rows_per_rank=3"),
    ("--data=nowhere", "--data='nowhere'"),
    ("--run=../x", "--run=../x: must be a plain directory name"),
    ("--optimizer=sgd", "--optimizer=sgd: unknown; use one of muon, mano, adamw, sophiag"),
    ("--shared_experts=2", "--shared_experts=2: use 0 or 1"),
])
def test_bad_settings_name_setting_value_and_fix(args, message):
    where = Place(0, 8, 0, 4, torch.device("cpu"), "gloo")
    if "--experts=6" in args:
        where = Place(0, 4, 0, 4, torch.device("cpu"), "gloo")
    with pytest.raises(ConfigError) as error:
        train.resolve(train.parse(args.split()), where)
    assert message in str(error.value), error.value


def test_more_ranks_than_experts_asks_for_replicas():
    with pytest.raises(ConfigError, match=r"--replicas=1: 8 nodes x 4 ranks are more than the 16 experts.*use --replicas=2"):
        train.resolve(train.parse([]), Place(0, 32, 0, 4, torch.device("cpu"), "gloo"))


# ------------------------------------------------------------------------------------------------------------------
# Stages, blends, rows per step
# ------------------------------------------------------------------------------------------------------------------

# Runs on one rank, one after the other, each in a fork of a process that has imported everything; blocks of 4 steps, not 128.
SHORT_RUNS = """
import json, os, sys
import order
order.BLOCK_STEPS = 4
import eval, launch, train
for program, *sys.argv[1:] in json.loads(sys.stdin.read()):
    if (child := os.fork()) == 0:
        os.dup2(1, 2)
        code = launch.run(eval.main if program == "eval" else train.main)
        sys.stdout.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"exit {code}\\0", flush=True)
"""


def short_runs(here, *runs: list[str]) -> list[str]:
    """What each printed, with "exit CODE" at the end."""
    argvs = [[program, *(TINY if program == "train" else []), *args] for program, *args in runs]
    done = subprocess.run([sys.executable, "-c", SHORT_RUNS], input=json.dumps(argvs), cwd=here, timeout=200, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    outputs = done.stdout.split("\0\n")[:-1]
    assert len(outputs) == len(runs), done.stdout
    return outputs


def seen(here, name) -> list[tuple]:
    lines = [json.loads(line) for line in (here / "out" / name / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["stage"], line["row_ids"], line["tokens"], line["loss"], line["lr"]) for line in lines]


def test_stages(here):
    """Declared in advance or appended, the run is the same; a change of what is past, or undeclared, is refused."""
    lines = (json.dumps({"text": f"{i} more text to read, line {i * i}\n" * 20}) + "\n" for i in range(40))
    (here / "more.jsonl").write_text("".join(lines))
    first = {"from_step": 4, "data": "2 texts 1 more.jsonl"}
    second = {"from_step": 8, "seq_len": 128, "lr": 1e-3, "schedule": "constant"}
    files = {"none": [], "one": [first], "both": [first, second], "past": [{**first, "data": "1 texts 1 more.jsonl"}, second],
             "late": [first, second, {"from_step": 12, "lr": 5e-4}], "odd": [{**first, "from_step": 6}]}
    for name, stages in files.items():
        (here / f"{name}.json").write_text(json.dumps(stages))

    def args(run, stages, stop):
        return ["train", f"--run={run}", f"--stages={stages}.json", f"--stop_at={stop}", "--val_every=0", "--rows_per_step=2",
                "--steps=16", "--offload_fraction=1"]

    plan = [args("declared", "both", 13), args("appended", "none", 4), args("appended", "one", 7), args("appended", "both", 12)]
    refused = {"one": "stage 2: checkpoint from_step=8 .*seq_len=128.*, now none", "none": "stage 1: checkpoint",
               "past": "stage 1: checkpoint from_step=4 fingerprint=.*, now from_step=4", "odd": "nearest are steps 4 and 8",
               "late": "stage 3: checkpoint none, now one from step 12 on, which is past"}
    plan += [args("declared", name, 15) for name in refused]
    outputs = short_runs(here, *plan, args("appended", "late", 13), ["eval", "loss", "--run=appended", "--rows=2"])

    assert all("exit 0" in out for out in outputs[:4]), outputs[:4]
    for (name, words), out in zip(refused.items(), outputs[4:9]):
        assert f"exit {EXIT_CONFIG}" in out and re.search(words, out), (name, out)
    assert all("exit 0" in out for out in outputs[9:]), outputs[9:]
    found = seen(here, "appended")
    assert [stage for _, stage, *_ in found] == [0] * 4 + [1] * 4 + [2] * 4 + [3]
    assert [tokens for _, _, _, tokens, *_ in found] == [128 * n for n in range(1, 9)] + [1024 + 256 * n for n in range(1, 6)]
    assert [lr for *_, lr in found[8:]] == [1e-3] * 4 + [5e-4] and len({ids for _, _, ids, *_ in found}) == 13
    assert seen(here, "declared")[:12] == found[:12]
    models = {path.read_bytes() for path in (here / "data").glob("rows-*/tokenizer.model")}
    assert len(models) == 1, "the later stages have the tokenizer of the first"
    assert "2,304 tokens seen" in outputs[10]
    watched = json.loads((here / "out" / "appended" / "ckpt" / "step-00000013" / "manifest.json").read_text())["health"]
    assert len(watched["skips"]["accepted"]) == 1, "a step is compared with those of its own stage"
    assert len(watched["rows"]) == 13 and watched["skips"]["total"] == 0


def test_rows_per_step_stay_unless_a_block_ends(here):
    """A run keeps its rows per step where no others are asked for; it may change them where a block ends, and knows where."""
    outputs = short_runs(here, *(["train", "--run=rows", "--val_every=0", "--steps=12", *more] for more in (
        ["--rows_per_step=2", "--stop_at=6"], ["--rows_per_step=4"], ["--stop_at=8"], ["--rows_per_step=4"])))
    assert all(words in outputs[1] for words in (f"exit {EXIT_CONFIG}", "rows_per_step: checkpoint 2, now 4", "steps 4 or 8"))
    assert "rows_per_step: 2 -> 4" in outputs[3] and all("exit 0" in outputs[n] for n in (0, 2, 3))
    assert [line[3] for line in seen(here, "rows")] == [128 * n for n in range(1, 9)] + [1024 + 256 * n for n in range(1, 5)]
    manifest = json.loads((here / "out" / "rows" / "ckpt" / "step-00000012" / "manifest.json").read_text())
    assert manifest["rows_per_step"] == [[0, 2], [8, 4]] and manifest["row"] == 32
    hp = train.Hyperparameters()
    with pytest.raises(ConfigError, match="rows_per_step=4, which 3 ranks cannot share"):
        train.rows_of_run(hp, hp, manifest, 3)
    assert train.rows_of_run(hp, hp, manifest, 2).rows_per_rank == 2


@pytest.mark.parametrize("stages, words", [
    ("{", "cannot be read"), ("{}", "must be a list"), ("[4]", "must be an object"),
    ('[{"from_step": 128}]', "must be an object"), ('[{"from_step": 128, "dat": "x"}]', "dat is not a setting"),
    ('[{"from_step": "128", "data": "x"}]', "from_step='128' must be a number"),
    ('[{"from_step": 0, "lr": 1}]', "must be above 0"), ('[{"from_step": 130, "lr": 1}]', "nearest are steps 128 and 256"),
    ('[{"from_step": 128, "data": "nowhere"}]', "nowhere' does not exist"),
    ('[{"from_step": 128, "schedule": "up"}]', "schedule=up"),
    ('[{"from_step": 128, "seq_len": 1}]', "seq_len=1"), ('[{"from_step": 128, "lr": NaN}]', "lr=nan"),
    ('[{"from_step": 128, "lr": Infinity}]', "lr=inf must be a number, zero or more and finite"),
    ('[{"from_step": 128, "final_lr": -1}]', "final_lr=-1")])
def test_bad_stages(tmp_path, stages, words):
    (tmp_path / "s.json").write_text(stages)
    hp = train.parse([f"--stages={tmp_path}/s.json"])
    with pytest.raises(ConfigError, match=words):
        train.declared(train.resolve(hp, Place(0, 1, 0, 1, torch.device("cpu"), "gloo"))[0])
