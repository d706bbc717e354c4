"""Where a run is started, and the job scripts: text only, no scheduler."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from spawn import ROOT

import cluster
import launch
from errors import EXIT_CONFIG, EXIT_NO_SPACE, LaunchError

VARIABLES = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "PBS_JOBID", "PBS_NODEFILE", "SLURM_CONF", cluster.SITE_VAR, cluster.CHAIN_VAR,
             cluster.FIRST_VAR, cluster.SCRIPT_VAR, cluster.JOB_END_VAR)


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """No scheduler's variables, and only the programs that a test puts into the returned folder."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def program(folder, name, text):
    (folder / name).write_text("#!/bin/sh\n" + text)
    (folder / name).chmod(0o755)


def test_detection(bare, monkeypatch):
    assert cluster.detect("auto", True) == ("none", False)
    program(bare, "sbatch", "exit 0\n")
    assert cluster.detect("auto", False) == ("none", False)  # nothing is to be submitted: nobody is asked
    program(bare, "sinfo", "exit 1\n")
    assert cluster.detect("auto", True) == ("none", False)  # installed, but set up nowhere
    monkeypatch.setenv("SLURM_CONF", "/somewhere")
    with pytest.raises(LaunchError, match="does not answer.*--scheduler=none"):
        cluster.detect("auto", True)
    program(bare, "sinfo", "echo 4\n")
    assert cluster.detect("auto", True) == ("slurm", False)
    assert cluster.detect("none", True) == ("none", False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert cluster.detect("auto", True) == ("slurm", True)
    assert cluster.detect("none", True) == ("none", False)


def test_detection_of_pbs(bare, monkeypatch):
    for name in ("qsub", "pbsnodes"):
        program(bare, name, "exit 0\n")
    assert cluster.detect("auto", True) == ("pbs", False)
    monkeypatch.setenv("PBS_JOBID", "7.x")
    monkeypatch.setenv("PBS_NODEFILE", "/x")
    assert cluster.detect("auto", False) == cluster.detect("pbs", True) == ("pbs", True)
    with pytest.raises(LaunchError, match="no sbatch on the PATH"):
        cluster.detect("slurm", True)


def script(scheduler, *options, command=("train.py", "--run=a 'b' $c\n#d")):
    argv = ["--nodes", "8", "--spares", "2", *options, "--", str(ROOT / command[0]), *command[1:]]
    parsed, _ = launch.parse(argv)
    return cluster.job_script(scheduler, cluster.site_of(parsed), parsed, argv, Path("/jobs/x y.sh"))


def test_a_slurm_script_is_read_by_slurm_and_the_shell_as_it_is_meant(monkeypatch):
    monkeypatch.delenv(cluster.SITE_VAR, raising=False)
    text = script("slurm", "--site=jupiter", "--account=project", "--partition=booster", "--time=12:00:00", "--warn=900",
                  "--setup=module load Stages/2026", "--dry-run")
    head = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert head == ["#SBATCH --job-name=nano1t-a--b---c--d", "#SBATCH --nodes=10  # 2 of them spare",
                    "#SBATCH --ntasks-per-node=4",
                    "#SBATCH --time=12:00:00", "#SBATCH --signal=B:USR1@900  # time for a checkpoint",
                    "#SBATCH --no-kill  # a node that fails is replaced by a spare",
                    "#SBATCH --no-requeue  # a follower goes on instead",
                    "#SBATCH --output=out/jobs/nano1t-a--b---c--d-%j.log", "#SBATCH --open-mode=append",
                    "#SBATCH --account=project",
                    "#SBATCH --partition=booster"]
    assert text.splitlines()[len(head) + 2 : len(head) + 5] == [
        f"cd {shlex.quote(os.getcwd())} || exit 2", "module load Stages/2026", "export NANO1T_JOB_SCRIPT='/jobs/x y.sh'"]
    words = shlex.split(text[text.index("exec ") :])
    assert words[:3] == ["exec", sys.executable, str(ROOT / "launch.py")] and "--dry-run" not in words
    assert words[-3:] == ["--", str(ROOT / "train.py"), "--run=a 'b' $c\n#d"]
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_a_pbs_script(monkeypatch):
    monkeypatch.setenv(cluster.SITE_VAR, "aurora")  # qsub passes nothing on
    text = script("pbs", "--site=aurora", "--queue=prod", "--account=project", "--time=1-00:30:00", command=("train.py",
                                                                                                             "--run=big"))
    head = [line for line in text.splitlines() if line.startswith("#PBS")]
    assert head == ["#PBS -N nano1t-big", "#PBS -l select=10", "#PBS -l walltime=24:30:00", "#PBS -j oe", "#PBS -o out/jobs/",
                    "#PBS -r n", "#PBS -A project", "#PBS -q prod", "#PBS -l filesystems=home:flare", "#PBS -l place=scatter", "#PBS -k doe"]
    assert "\nmodule load frameworks\n" in text and "\nexport NANO1T_JOB_END=$(($(date +%s) + 88200))\n" in text
    assert "\nexport NANO1T_SITE=aurora\n" in text


@pytest.mark.parametrize("text", ["1h", "", "90", "1:2:3:4", "a:b"])
def test_a_time_limit_that_is_none(text):
    with pytest.raises(LaunchError, match="--time="):
        cluster.seconds(text)


def test_flags_override_the_table():
    def site(*options):
        return cluster.site_of(launch.parse([*options, "--", str(ROOT / "train.py")])[0])

    assert site("--site=aurora").ranks_per_node == 12 and site().environment == {}
    changed = site("--site=alps", "--interface=hsn0", "--set", "NCCL_NET=Socket", "--set", "A=b=c", "--membind=",
                   "--setup=module load x",
                   "--submit-options=", "--start-options=--cpu-bind='map ldom'")
    assert changed.environment | {"NCCL_SOCKET_IFNAME": "hsn0", "GLOO_SOCKET_IFNAME": "hsn0", "NCCL_NET": "Socket",
                                  "A": "b=c"} == changed.environment
    assert changed.environment["FI_CXI_RX_MATCH_MODE"] == "software"
    assert (changed.membind, changed.setup, changed.submit, changed.start) == ("", ("module load x",), (),
                                                                               ("--cpu-bind=map ldom",))
    words = "-l filesystems=home:eagle -l place=scatter --comment='a b' --exclusive"  # qsub reads each line by itself
    assert site(f"--submit-options={words}").submit == ("-l filesystems=home:eagle", "-l place=scatter", "'--comment=a b'",
                                                        "--exclusive")
    for wrong in (["--site=mars"], ["--set", "novalue"], ["--set", "1a=b"]):
        with pytest.raises(LaunchError, match=wrong[0][:6]):
            site(*wrong)


def test_every_site_names_its_source_and_its_script_is_a_script(monkeypatch):
    for name, site in cluster.SITES.items():
        assert len(site.source) > 10
        if site.scheduler != "none":
            assert subprocess.run(["bash", "-n"], input=script(site.scheduler, f"--site={name}"), text=True).returncode == 0
    shown = subprocess.run([sys.executable, ROOT / "cluster.py", "sites"], capture_output=True, text=True, check=True).stdout
    assert all(f"{name}: {site.source}" in shown for name, site in cluster.SITES.items())


def test_a_task_knows_its_place_whatever_started_it(monkeypatch):
    for name in (*cluster.RANK_FROM, "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LaunchError, match="--task is for processes that srun or mpiexec start"):
        cluster.task_environment()
    given = {cluster.NODES_VAR: "a,b", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", cluster.RUN_VAR: "/x"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "cpu_count", lambda: 288)
    for variable in cluster.RANK_FROM:
        with monkeypatch.context() as patch:
            patch.setenv(variable, "6")
            patch.setattr(os, "sched_getaffinity", lambda pid: range(72), raising=False)  # bound to its own cores
            env = cluster.task_environment()
            assert [env[n] for n in ("RANK", "LOCAL_RANK", "GROUP_RANK", "NANO1T_DEVICE", "NANO1T_NODE", "OMP_NUM_THREADS")] == [
                "6", "2", "1", "2", "b", "72"]
            patch.setattr(os, "sched_getaffinity", lambda pid: range(288), raising=False)
            patch.setenv("CUDA_VISIBLE_DEVICES", "2")  # the scheduler shows each task its own
            assert [cluster.task_environment()[n] for n in ("NANO1T_DEVICE", "OMP_NUM_THREADS")] == ["0", "72"]


def test_mpiexec_is_told_in_its_own_language(bare, monkeypatch):
    (bare / "nodes").write_text("a.site\na.site\nb.site\nb.site\n")
    monkeypatch.setenv("PBS_NODEFILE", str(bare / "nodes"))
    wanted = {"HYDRA build details:": ["-n", "6", "-ppn", "3", "-f"], "mpiexec (OpenRTE) 4.1.4": ["-n", "6", "--map-by",
                                                                                                  "ppr:3:node:OVERSUBSCRIBE"],
              "PALS 1.2": ["-n", "6", "--ppn", "3", "--hostfile"]}
    for version, words in wanted.items():
        program(bare, "mpiexec", f"echo '{version}'\n")
        starter = cluster.Pbs(cluster.Site(start=("--extra",)), 3)
        assert starter.nodes() == ["a.site", "b.site"]
        argv = starter.tasks(["a.site", "b.site"], 3, ["python", "x y"], ["A", "PMI_RANK", "BASH_FUNC_m%%"], bare)
        assert argv[: len(words) + 1] == ["mpiexec", *words] and argv[-3:] == ["--extra", "python",
                                                                               "x y"] and "PMI_RANK" not in argv
        assert (bare / f"hosts-{starter.started}").read_text() == "a.site\nb.site\n"
        assert "--extra" not in starter.tasks(["a.site"], 1, ["python"], [], bare)  # beside the run: not bound like it
    (bare / "mpiexec").unlink()
    with pytest.raises(LaunchError, match="no mpiexec on the PATH"):
        cluster.Pbs(cluster.Site(), 3)


def test_words_of_the_scheduler_on_nodes(bare, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-6]")
    program(bare, "scontrol", 'case "$3" in "n[1-6]") echo n1 n2 n3 n4 n5 n6;; *) echo n1 n2 n3 n4 n5;; esac\n')
    program(bare, "squeue", "echo 'n[1-5]'\n")
    program(bare, "sinfo",
            "echo 'n1|mixed|none'; echo 'n2|down|bad dimm'; echo 'n3|draining|after the job'; echo 'n4|allocated*|none'\n")
    assert cluster.Slurm(cluster.Site(), 1).down() == {"n6": "Slurm has taken it out of the job",
                                                       "n2": "Slurm says down: bad dimm",
                                                       "n4": "Slurm says allocated*: none"}
    program(bare, "pbsnodes", 'case $1 in a|c) echo "     state = down,offline";; b) echo "     state = job-exclusive";; '
                              "*) echo unknown node >&2; exit 1;; esac\n")
    program(bare, "mpiexec", "echo PALS\n")
    (bare / "nodes").write_text("a\nb.site\nc.site\n")  # vnodes have short names
    monkeypatch.setenv("PBS_NODEFILE", str(bare / "nodes"))
    assert cluster.Pbs(cluster.Site(), 1).down() == {"a": "PBS says down,offline", "c.site": "PBS says down,offline"}


@pytest.mark.parametrize("answer, alive", [
    ("echo '    job_state = R'", True), ("echo '    job_state = F'", False), ("echo cannot connect >&2; exit 1", True),
    ("echo qstat: Unknown Job Id 7.server >&2; exit 153", False), ("echo 7.server Job has finished >&2; exit 35", False),
    ('test $1 = -x && echo no job history >&2 && exit 1; echo "    job_state = R"', True),
    ("test $1 = -x && echo no job history >&2 && exit 1; echo Unknown Job Id >&2; exit 153", False)])
def test_whether_a_job_of_pbs_may_still_run(bare, answer, alive):
    program(bare, "qstat", answer + "\n")
    assert cluster.job_alive("pbs", "7.server") == alive


def test_a_look_at_a_node_is_not_bound_like_a_rank(bare, monkeypatch):
    """Options of srun that a job has for each of its ranks are variables in it."""
    for name in ("SLURM_GPUS_PER_TASK", "SLURM_CPU_BIND_TYPE", "SRUN_CPUS_PER_TASK", "SLURM_JOB_GPUS"):
        monkeypatch.setenv(name, "1")
    program(bare, "srun", "/usr/bin/env\n")
    code, output = cluster.Slurm(cluster.Site(), 4).on_each(["n1"], ["true"], 30)["n1"]
    assert code == 0 and b"SLURM_JOB_GPUS=1" in output
    assert not any(name in output for name in (b"GPUS_PER_TASK", b"CPU_BIND", b"CPUS_PER_TASK"))


def test_what_is_left_of_a_launch_gets_time_to_end_its_tasks():
    """As an srun does, whose launcher was killed."""
    def start(seconds):
        code = f"import time; print(flush=True); time.sleep({seconds}); exit(5)"
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, cluster.RUN_VAR: mark})
        process.stdout.readline()
        return process

    mark = f"/left-{os.getpid()}/"
    quick = start(1)
    cluster.kill_marked(mark, 30)  # not all of it
    assert quick.wait() == 5
    slow = start(60)
    cluster.kill_marked(mark, 0.5)
    assert slow.wait() == -signal.SIGKILL
    quick.stdout.close(), slow.stdout.close()


def test_a_task_that_cannot_write_how_its_rank_ended_says_so_by_its_code(tmp_path):
    (tmp_path / ".exit-0.json").symlink_to("/dev/full")
    env = {**os.environ, "SLURM_PROCID": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "NANO1T_FOLDER": "",
           cluster.NODES_VAR: "a,b", cluster.RUN_VAR: f"/full-{os.getpid()}", launch.watch.FOLDER_VAR: str(tmp_path / "pages")}
    (tmp_path / "program.py").write_text("exit(3)\n")
    argv = [sys.executable, str(ROOT / "launch.py"), "--task", str(tmp_path), "--", str(tmp_path / "program.py")]
    process = subprocess.Popen(argv, env=env)
    assert process.wait(60) == EXIT_NO_SPACE
    starter = cluster.Starter(cluster.Site(), 1)
    assert cluster.Step(starter, process, ["a", "b"], tmp_path, "", "").codes() == {0: EXIT_NO_SPACE, 1: EXIT_NO_SPACE}


def test_the_chain_of_pbs_jobs(bare, monkeypatch, tmp_path):
    program(bare, "qsub", f'echo "$@" >> {bare}/said; env | grep -c SLURM_ >> {bare}/said; echo 8.server\n')
    program(bare, "qdel", f'echo qdel "$@" >> {bare}/said\n')
    monkeypatch.setenv("PATH", f"{bare}:/usr/bin:/bin")
    monkeypatch.setenv("PBS_JOBID", "7.server")
    monkeypatch.setenv(cluster.SCRIPT_VAR, "/jobs/x.sh")
    options = launch.parse(["--chain", "2", "--", str(ROOT / "train.py")])[0]
    for code, elsewhere, deleted in ((75, True, False), (75, False, False), (0, True, True), (2, False, True), (1, False, True),
                                     (130, False, True), (124, True, False), (137, True, False)):
        (bare / "said").unlink(missing_ok=True)
        monkeypatch.delenv(cluster.CHAIN_VAR, raising=False)
        chain = cluster.Chain("pbs", options, tmp_path)
        chain.code, chain.elsewhere = code, elsewhere
        chain.end()
        said = (bare / "said").read_text().splitlines()
        assert said[0] == "-v NANO1T_CHAIN=1,NANO1T_CHAIN_FIRST=7.server -W depend=afterany:7.server /jobs/x.sh"
        assert ("qdel 8.server" in said) == deleted
    monkeypatch.setenv(cluster.CHAIN_VAR, "0")
    assert cluster.Chain("pbs", options, tmp_path).follower == ""
    monkeypatch.setenv(cluster.CHAIN_VAR, "1")
    monkeypatch.setenv("PBS_JOBID", "8.server")  # a follower; the next one belongs to the same chain
    monkeypatch.setenv(cluster.FIRST_VAR, "7.server")
    (bare / "said").unlink()
    cluster.Chain("pbs", options, tmp_path)
    assert "NANO1T_CHAIN_FIRST=7.server" in (bare / "said").read_text()
    assert cluster.follows("7.server") and not cluster.follows("6.server")
    (tmp_path / "stop").touch()
    assert cluster.Chain("pbs", options, tmp_path).follower == ""
    monkeypatch.delenv(cluster.FIRST_VAR)
    assert cluster.chain_id() == "8.server" and not cluster.follows("8.server")  # a second launch in one allocation is no follower


def test_a_request_to_stop_travels_as_usr1(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import signal\nwanted = {signal.SIGUSR1, signal.SIGTERM}\n"
                                "signal.pthread_sigmask(signal.SIG_BLOCK, wanted)\nprint(flush=True)\n"
                                "exit(5 if signal.sigwait(wanted) == signal.SIGUSR1 else 6)"], stdout=subprocess.PIPE)
    process.stdout.readline()
    step = cluster.Step(None, process, ["a"], tmp_path, "mark", "")
    assert not step.poll(0)
    step.send(signal.SIGTERM)
    assert step.poll(30) and process.returncode == 5
    process.stdout.close()
    (tmp_path / "exit-3.json").write_text(json.dumps({"rank": 3, "code": -9}))
    assert step.codes() == {3: -9}


def test_a_script_can_be_read_where_there_is_no_scheduler(bare, monkeypatch, capsys):
    monkeypatch.chdir(bare)
    command = ["--scheduler=auto", "--site=polaris", "--nodes", "2", "--", str(ROOT / "train.py")]
    assert launch.main(["--dry", *command]) == 0
    assert "#PBS -l select=2\n" in capsys.readouterr().out and not list(bare.iterdir())
    assert launch.main(command) == EXIT_CONFIG
    assert "there is no qsub on the PATH" in capsys.readouterr().err
    assert launch.main(["--dry", "--scheduler=auto", "--site=jupiter", *command[4:]]) == 0
    assert "#SBATCH --nodes=1\n" in capsys.readouterr().out
    assert launch.main(["--dry", "--scheduler=auto", *command[2:]]) == EXIT_CONFIG  # it never starts anything here
    assert "--dry prints a job script, but nothing says of which scheduler" in capsys.readouterr().err
    options, _ = launch.parse(["--site=laptop", "--nodes", "2", *command[-2:]])
    assert launch.place_of(options, command) == ("none", cluster.SITES["laptop"])


@pytest.mark.parametrize("setting, said", [("--stpes=5", "--stpes=5: no such setting; did you mean --steps?"),
                                           ("--size=2t", "--size=2t: unknown"), ("--replicas=3", "--replicas=3: must divide the 2 nodes")])
def test_settings_are_checked_before_a_job_waits(bare, monkeypatch, capsys, setting, said):
    monkeypatch.chdir(bare)
    assert launch.main(["--dry", "--scheduler=slurm", "--ranks-per-node=4", "--nodes=2", "--", str(ROOT / "train.py"), setting]) == EXIT_CONFIG
    assert f"error: {said}" in (shown := capsys.readouterr()).err and not shown.out


def test_more_nodes_than_the_allocation_has(bare, monkeypatch, capsys):
    monkeypatch.setenv("PBS_JOBID", "7")
    (bare / "nodes").write_text("a\nb\n")
    monkeypatch.setenv("PBS_NODEFILE", str(bare / "nodes"))
    monkeypatch.setattr(cluster, "shared_folder", lambda *_: bare / "folder")
    program(bare, "mpiexec", "echo PALS\n")
    assert launch.main(["--scheduler=pbs", "--nodes", "3", "--ranks-per-node", "1", "--", str(ROOT / "train.py")]) == EXIT_CONFIG
    assert "--nodes 3: the allocation has 2" in capsys.readouterr().err
