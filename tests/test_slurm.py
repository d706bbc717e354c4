"""Under a real Slurm of four virtual nodes, and a real mpiexec with hosts on the loopback network."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from spawn import ROOT
from virtual_slurm import VirtualSlurm, missing

import cluster
from errors import EXIT_STOPPED, ConfigError

TINY = ["--layers=2", "--width=64", "--heads=4", "--kv_heads=2", "--head_dim=16", "--expert_width=32", "--vocab=300",
        "--seq_len=64", "--data=texts", "--wandb=off", "--val_every=0", "--warmup=5"]
TORTURE = ["--run=two words", "it's", 'say "x"', "$HOME", "`id`", "a\nb", "", "größe=✓", "--", "*", "\\n", "#SBATCH --nodes=9"]
LAUNCH, TRAIN = ROOT / "launch.py", ROOT / "train.py"
NAP = ("import json, os, socket, sys, time\nserver = socket.create_server(('', int(os.environ['MASTER_PORT']))) "
       "if os.environ['RANK'] == '0' else None\n"  # it keeps the port where ranks meet
       "open(sys.argv[2] + os.environ['RANK'], 'w').write(os.environ['MASTER_PORT'])\n")
NAP += "while True:\n    time.sleep(0.1)\n"  # a signal that comes between two naps is seen after the next
NOTE = "import json, os, sys\nopen(__file__ + os.environ['RANK'], 'w').write(json.dumps([sys.argv[1:], dict(os.environ)]))\n"


@pytest.fixture(scope="session")
def slurm():
    if lacks := missing():
        pytest.skip(f"not installed: {lacks} (packages slurm-wlm and munge)")
    virtual = VirtualSlurm()
    try:
        virtual.start()
        yield virtual
    finally:
        virtual.stop()


@pytest.fixture(scope="module")
def home(here):
    """Where a user works: the project's files, and texts."""
    for path in [*ROOT.glob("*.py"), ROOT / "Makefile"]:
        (here / path.name).symlink_to(path)
    return here


def losses(home, name):
    lines = [json.loads(line) for line in (home / "out" / name / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def attempts(home, name):
    return [json.loads(line) for line in (home / "out" / name / "attempts.jsonl").read_text().splitlines()]


def tensors(home, name, step):
    files = sorted((home / "out" / name / "ckpt" / f"step-{step:08d}").glob("*.safetensors"))
    return {f"{file.name}/{key}": tensor for file in files for key, tensor in load_file(file).items()}


def make(slurm, home, *words, **more):
    return slurm.run("make", "-s", "-C", home, "-o", ".venv/.installed", "PY=" + sys.executable, *words, **more)


def job_of(output):
    return re.search(r"# Submitted batch job (\d+)", output)[1]


def log_of(home, job):
    found = list((home / "out" / "jobs").glob(f"*-{job}.log"))
    return found[0].read_text(errors="replace") if found else ""


def gone(marker):
    """No process is left whose environment or command line carries this text."""
    def any_left():
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                text = (place / "environ").read_bytes() + (place / "cmdline").read_bytes()
                if marker.encode() in text and int(place.name) != os.getpid():
                    return True
        return False

    deadline = time.monotonic() + 30
    while any_left():
        assert time.monotonic() < deadline, f"a process with {marker} is left"
        time.sleep(0.1)


def free(port):
    """Somebody else could listen there."""
    socket.create_server(("", int(port))).close()


SETTINGS = [f"--{name}" for name in ("steps=150", "ckpt_every=0", "rows_per_rank=1")]


@pytest.fixture(scope="module")
def whole(slurm, home):
    """A run that nobody disturbed: from a login shell, through make."""
    words = ["train", "NODES=2", "RANKS=1", "TIME=10:00", "ARGS=" + " ".join(["--run=whole", *TINY, *SETTINGS])]
    printed = make(slurm, home, *words, "DRY=1")
    assert "#SBATCH --nodes=2\n" in printed and "#SBATCH --time=10:00\n" in printed and not slurm.jobs()
    assert not (home / "out").exists()
    submitted = make(slurm, home, *words)
    assert [line for line in submitted.splitlines() if line.startswith("#SBATCH")] == [
        line for line in printed.splitlines() if line.startswith("#SBATCH")]
    slurm.wait(job := job_of(submitted))
    return job


def test_make_train_on_a_login_node_submits_trains_and_finishes(whole, home):
    assert "step 150/150" in log_of(home, whole) and [step for step, *_ in losses(home, "whole")] == list(range(1, 151))
    (only,) = attempts(home, "whole")
    assert (only["cause"], only["nodes"]) == ("done", ["n1", "n2"])
    assert not list((home / "out" / "jobs").glob("*/"))  # what the attempts left is gone


def test_chained_jobs_finish_a_run_that_is_longer_than_their_limit(whole, slurm, home):
    """The first job's ranks stand still until Slurm itself warns them: at its next look, at the latest 30 s before their limit. A
    look in the job's first moment is before anyone listens; then Slurm ends it at its limit, and the next job goes on all the same."""
    job = job_of(make(slurm, home, "train", "NODES=2", "RANKS=1", "TIME=1:00", "CHAIN=5", "LAUNCH=--no-node-check",
                      "ARGS=" + " ".join(["--run=chained", "--resume=never", *TINY, *SETTINGS])))
    slurm.until(lambda: re.search("step 20/|passed on", log_of(home, job)), "the 20th step, or a warning before")
    ranks = ranks_of("--run=chained") if "passed on" not in log_of(home, job) else []
    for rank, _ in ranks:
        os.kill(rank, signal.SIGSTOP)
    slurm.until(lambda: "passed on to 2 ranks" in log_of(home, job) or job not in slurm.jobs(), "the warning, or the limit", 150)
    for rank, _ in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGCONT)
    slurm.until(lambda: not slurm.jobs(), "the end of the chain", 200)
    assert losses(home, "chained") == losses(home, "whole")
    *warned, last = [(a["cause"], a["code"], bool(a["asked"])) for a in attempts(home, "chained")]
    assert all(end == ("stopped", EXIT_STOPPED, True) for end in warned) and last[:2] == ("done", 0)
    assert not warned or attempts(home, "chained")[1]["step_before"] > 0  # --resume=never means the first job
    assert len(list((home / "out" / "jobs").glob("nano1t-chained-*.log"))) > 1
    whole_state, state = tensors(home, "whole", 150), tensors(home, "chained", 150)
    assert whole_state.keys() == state.keys() and all(torch.equal(whole_state[k], state[k]) for k in state)


def test_a_warning_before_the_ranks_listen_does_not_end_the_chain(whole, slurm, home):
    output = slurm.run(sys.executable, LAUNCH, "--nodes", 2, "--ranks-per-node", 1, "--time", "10:00", "--chain", 3,
                       "--no-node-check", "--", TRAIN, "--run=early", *TINY, *SETTINGS, cwd=home)
    job = job_of(output)
    slurm.until(lambda: "goes on after this one" in log_of(home, job), "the launcher")
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    slurm.until(lambda: not slurm.jobs(), "the end of the chain", 150)
    assert "SIGUSR1 passed on to 2 ranks" in log_of(home, job)
    assert losses(home, "early") == losses(home, "whole"), log_of(home, job)


def test_a_warning_ends_the_run_with_a_checkpoint_and_a_file_ends_the_chain(slurm, home):
    output = slurm.run(sys.executable, LAUNCH, "--nodes", 2, "--ranks-per-node", 1, "--time", "10:00", "--chain", 3,
                       "--no-node-check",
                       "--", TRAIN, "--run=warned", *TINY, "--steps=100000", "--ckpt_every=0", cwd=home)
    job = job_of(output)
    slurm.until(lambda: "step 2/" in log_of(home, job), "the second step")
    follower = re.search(r"job (\d+) goes on after this one; 2 more may follow", log_of(home, job))[1]
    assert f"afterany:{job}" in slurm.run("squeue", "-h", "-j", follower, "-o", "%E")
    port = ranks_of("--run=warned")[0][1]["MASTER_PORT"]
    (home / "out" / "warned" / "stop").touch()
    slurm.run("scancel", "--batch", "--signal=USR1", job)  # as `#SBATCH --signal=B:USR1@...` does
    slurm.until(lambda: not slurm.jobs(), "the end of the job and its follower")
    (only,) = attempts(home, "warned")
    assert (only["cause"], only["code"], only["asked"]) == ("stopped", EXIT_STOPPED, ["SIGUSR1"]), log_of(home, job)
    assert tensors(home, "warned", only["step_after"])
    gone("--run=warned")
    free(port)


def ranks_of(word):
    """(process id, environment) of the ranks that have this word in their command line."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words, entries = ((place / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
            if word.encode() in words and b"--task" not in words and any(entry.startswith(b"RANK=") for entry in entries):
                found.append((int(place.name), dict(entry.decode().split("=", 1) for entry in entries if b"=" in entry)))
    assert found, f"no rank with {word}"
    return found


def test_a_node_that_fails_is_replaced_through_the_node_list(slurm, home):
    """Three nodes train, a fourth waits."""
    settings = ["--replicas=3", *TINY, "--steps=12", "--ckpt_every=4"]
    output = slurm.run(sys.executable, LAUNCH, "--nodes", 3, "--spares", 1, "--ranks-per-node", 1, "--time", "10:00", "--backoff",
                       0.1, "--", TRAIN, "--run=swapped", *settings, "--verbose_comm=False", cwd=home)
    job = job_of(output)
    slurm.until(lambda: (home / "out" / "swapped" / "ckpt" / "step-00000004" / ".complete").exists(), "a checkpoint")
    slurm.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    slurm.wait(job)
    first, second = attempts(home, "swapped")
    assert (first["cause"], first["nodes"], list(first["excluded"])) == ("node", ["n1", "n2", "n3"], ["n2"])
    assert (second["cause"], second["nodes"], second["step_before"]) == ("done", ["n1", "n3", "n4"], first["step_after"])
    subprocess.run([sys.executable, LAUNCH, "--nodes", "3", "--ranks-per-node", "1", "--", TRAIN, "--run=undisturbed", *settings],
                   cwd=home, check=True, capture_output=True, env={**os.environ, "NANO1T_SCHEDULER": "none"})
    assert losses(home, "swapped") == losses(home, "undisturbed")
    ours, theirs = tensors(home, "swapped", 12), tensors(home, "undisturbed", 12)
    assert ours.keys() == theirs.keys() and len(ours) > 20
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    gone("--run=swapped")
    slurm.until(lambda: slurm.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "4", "the node's return")


def test_arguments_arrive_unchanged_inside_an_allocation_and_through_the_queue(slurm, tmp_path):
    script = tmp_path / "child.py"
    script.write_text(NOTE)
    options = ["--nodes", 2, "--ranks-per-node", 2, "--", script, *TORTURE]
    slurm.run("salloc", "-Q", "-N", 3, "--ntasks-per-node", 2, sys.executable, LAUNCH, *options, cwd=tmp_path)
    seen = [json.loads(Path(f"{script}{rank}").read_text()) for rank in range(4)]
    assert [arguments for arguments, _ in seen] == [TORTURE] * 4
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURMD_NODENAME", "NANO1T_NODE")
    assert [tuple(env[name] for name in names) for _, env in seen] == [
        (str(rank), str(rank % 2), str(rank // 2), "4", "2", *[f"n{1 + rank // 2}"] * 2) for rank in range(4)]
    for rank in range(4):
        Path(f"{script}{rank}").unlink()
    slurm.wait(job_of(slurm.run(sys.executable, LAUNCH, *options, cwd=tmp_path)))
    assert [json.loads(Path(f"{script}{rank}").read_text())[0] for rank in range(4)] == [TORTURE] * 4


def test_ranks_run_on_the_nodes_of_the_list_and_nowhere_else(slurm, tmp_path):
    script = tmp_path / "child.py"
    script.write_text(NOTE)
    code = ("import sys, cluster, watch; from pathlib import Path; s = cluster.Slurm(cluster.Site(), 2); here = Path(sys.argv[1]); "
            "step = s.start(['n4', 'n2'], [sys.argv[2]], {watch.FOLDER_VAR: str(here / 'pages')}, here); step.poll(60); "
            "step.kill(); print(sorted(step.codes().items()))")
    slurm.env["PYTHONPATH"] = str(ROOT)
    try:
        told = slurm.run("salloc", "-Q", "-N", 4, "--ntasks-per-node", 2, sys.executable, "-c", code, tmp_path, script)
    finally:
        del slurm.env["PYTHONPATH"]
    assert told == "[(0, 0), (1, 0), (2, 0), (3, 0)]\n"
    seen = [json.loads(Path(f"{script}{rank}").read_text())[1] for rank in range(4)]
    assert [env["SLURMD_NODENAME"] for env in seen] == ["n2", "n2", "n4", "n4"]
    assert not (tmp_path / "pages").exists()


def test_bytes_that_are_not_utf8_and_exit_codes_come_through(slurm, tmp_path):
    script = tmp_path / "child.py"
    script.write_text("import os, sys\nos.write(1, b'\\xff\\xfe\\n')\nsys.exit(65 if os.environ['RANK'] == '1' else 0)\n")
    done = subprocess.run(["salloc", "-Q", "-N", "2", sys.executable, LAUNCH, "--ranks-per-node", "1", "--no-node-check", "--",
                           script],
                          cwd=tmp_path, env=slurm.env, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (65, b"\xff\xfe\n" * 2), done.stderr


@pytest.mark.parametrize("end", ["the launcher killed", "a second request", "the job cancelled"])
def test_nothing_is_left_after_any_end(slurm, tmp_path, end):
    script = tmp_path / "child.py"
    script.write_text("import signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)\n" + NAP)
    process = subprocess.Popen(["salloc", "-Q", "-N", "2", "--ntasks-per-node", "2", sys.executable, LAUNCH, "--ranks-per-node",
                                "2",
                                "--no-node-check", "--", script, "x", f"{tmp_path}/port-"], cwd=tmp_path, env=slurm.env,
                               stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    slurm.until(lambda: len(list(tmp_path.glob("port-*"))) == 4, "four ranks")
    launcher = next(int(place.name) for place in Path("/proc").glob("[0-9]*") if is_launcher(place, script))
    if end == "the launcher killed":
        os.kill(launcher, signal.SIGKILL)
    elif end == "a second request":
        os.kill(launcher, signal.SIGTERM)
        assert b"SIGTERM passed on to 4 ranks" in process.stderr.readline()
        os.kill(launcher, signal.SIGINT)
    else:
        slurm.run("scancel", *slurm.jobs())
    process.communicate(timeout=60)
    gone(str(script))
    free((tmp_path / "port-0").read_text())


def is_launcher(place, script):
    with contextlib.suppress(OSError):
        words = (place / "cmdline").read_bytes().split(b"\0")
        return os.fsencode(script) in words and b"--task" not in words and words[:2] == list(map(os.fsencode, (sys.executable, LAUNCH)))
    return False


def test_two_jobs_never_work_on_one_run(slurm, tmp_path, monkeypatch):
    for name, value in slurm.env.items():
        monkeypatch.setenv(name, value)
    job = slurm.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 600").strip()
    slurm.until(lambda: slurm.run("squeue", "-h", "-j", job, "-t", "R", "-o", "%i").strip(), "the job")
    path = tmp_path / ".run.owner"
    other = {"host": "elsewhere", "pid": 1, "started": "5", "job": job, "scheduler": "slurm"}
    path.write_text(json.dumps(other))
    cluster_jobs = [{}, {"SLURM_JOB_ID": "999"}]
    for variables in cluster_jobs:  # neither a login node nor another job
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            with pytest.raises(ConfigError, match=f"--run=x: job {job} on elsewhere"):
                cluster.claim(path, "--run=x")
    with monkeypatch.context() as patch:  # the same job: an earlier attempt, whose node is gone
        patch.setenv("SLURM_JOB_ID", job)
        cluster.claim(path, "--run=x")
        assert json.loads(path.read_text())["pid"] == os.getpid()
        with pytest.raises(ConfigError, match=f"process {os.getpid()} of job {job}"):
            cluster.claim(path, "--run=x")
        cluster.release(path)
        assert not path.exists()
    path.write_text(json.dumps(other))
    slurm.run("scancel", job)
    slurm.wait(job)
    with monkeypatch.context() as patch:  # it has ended, and left this
        patch.setenv("SLURM_JOB_ID", "999")
        cluster.claim(path, "--run=x")
    assert list(tmp_path.iterdir()) == [path]


def test_the_check_of_an_allocation_names_a_node_that_does_not_answer(slurm, tmp_path):
    """n3 is stopped: neither Slurm nor the launcher hears from it."""
    code = ("import sys, hosts, cluster; hosts.EXAMINE_S = 3; s = cluster.Slurm(cluster.Site(), 1); "
            "print(hosts.check_start(s.on_each, s.nodes(), 1, 0)[1])")
    daemon = slurm.processes["n3"]
    argv = ["salloc", "-Q", "-N", "3", "-w", "n[1-3]", "sh", "-c", 'touch in; while [ -e in ]; do sleep 0.1; done; exec "$@"',
            "sh",
            sys.executable, "-c", code]
    process = subprocess.Popen(argv, cwd=tmp_path, env=slurm.env | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)
    try:
        slurm.until(lambda: (tmp_path / "in").exists(), "the allocation")
        os.kill(daemon.pid, signal.SIGSTOP)
        (tmp_path / "in").unlink()
        output, _ = process.communicate(timeout=60)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert output == "{'n3': 'no answer in time'}\n"


# ---- mpiexec


MPIEXECS = {"mpich": "mpiexec.hydra", "openmpi": "mpiexec.openmpi"}


@pytest.fixture(params=list(MPIEXECS))
def pbs(request, tmp_path):
    """An allocation as PBS makes it, of two hosts on the loopback network, which mpiexec reaches by a stand-in for ssh."""
    program = shutil.which(MPIEXECS[request.param])
    if not program:
        if any(map(shutil.which, MPIEXECS.values())):
            pytest.skip(f"the other MPI is installed, not {request.param}")
        pytest.skip("no MPI is installed (package mpich)")
    (tmp_path / "bin").mkdir()
    texts = {"bin/mpiexec": f'#!/bin/sh\nexec {program} "$@"\n',
             "rsh": f'#!/bin/sh\necho "$1" >> {tmp_path}/reached\n'
                    # a temporary directory for each host: daemons of Open MPI that share one trip over each other
                    f'export TMPDIR={tmp_path}/$1\nmkdir -p "$TMPDIR"\nshift\nexec /bin/sh -c "$*"\n'}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "nodes").write_text("127.0.0.2\n" * 2 + "127.0.0.3\n" * 2 + "127.0.0.4\n" * 2)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "NANO1T", "OMPI", "PMI"))}
    agent = str(tmp_path / "rsh")
    return env | {"PATH": f"{tmp_path}/bin:{env['PATH']}", "PBS_JOBID": "7.here", "PBS_NODEFILE": str(tmp_path / "nodes"),
                  "HYDRA_LAUNCHER": "rsh", "HYDRA_LAUNCHER_EXEC": agent, "OMPI_MCA_plm_rsh_agent": agent,
                  "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "SECRET": "two\nlines"}


def test_mpiexec_starts_ranks_on_the_nodes_of_the_file(pbs, tmp_path):
    script = tmp_path / "child.py"
    script.write_text(NOTE)
    argv = [sys.executable, LAUNCH, "--nodes", "2", "--ranks-per-node", "2", "--no-node-check", "--set", "FI_X=a b", "--",
            script, *TORTURE]
    done = subprocess.run(argv, cwd=tmp_path, env=pbs, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seen = [json.loads(Path(f"{script}{rank}").read_text()) for rank in range(4)]
    assert [arguments for arguments, _ in seen] == [TORTURE] * 4
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NANO1T_NODE", "FI_X", "SECRET")
    assert [tuple(env.get(name) for name in names) for _, env in seen] == [
        (str(rank), str(rank % 2), "4", f"127.0.0.{2 + rank // 2}", "a b", "two\nlines") for rank in range(4)]
    assert {"127.0.0.2", "127.0.0.3"} == set((tmp_path / "reached").read_text().split())


def test_mpiexec_passes_a_request_to_stop_and_leaves_nothing(pbs, tmp_path):
    script = tmp_path / "child.py"
    script.write_text("import os, signal, sys\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\n" + NAP)
    process = subprocess.Popen([sys.executable, LAUNCH, "--nodes", "2", "--ranks-per-node", "2", "--no-node-check", "--", script,
                                "x",
                                f"{tmp_path}/port-"], cwd=tmp_path, env=pbs, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("port-*"))) < 4:
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == EXIT_STOPPED, errors
    gone(str(script))
    free((tmp_path / "port-0").read_text())


def test_ranks_that_mpiexec_starts_meet(pbs, tmp_path):
    script = tmp_path / "child.py"
    script.write_text("import launch, os, sys, torch, torch.distributed as dist\n"
                      "def main(argv):\n    where = launch.place()\n    launch.setup(where)\n    x = torch.tensor([where.rank + 1.0])\n"
                      "    dist.all_reduce(x)\n    os.write(1, f'{x.item()}\\n'.encode())\nsys.exit(launch.run(main))\n")
    done = subprocess.run([sys.executable, LAUNCH, "--nodes", "2", "--ranks-per-node", "1", "--no-node-check", "--", script],
                          cwd=tmp_path, env=pbs | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True,
                          text=True, timeout=90)
    assert (done.returncode, done.stdout.split()) == (0, ["3.0"] * 2), done.stderr
