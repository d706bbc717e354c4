"""Where a run is started: inside a Slurm or PBS allocation, from a login node through the queue, or on this machine.

    make train NODES=96 SIZE=1t SITE=jupiter TIME=12:00:00 ACCOUNT=...    on a login node: prints a job script and submits it
    make train NODES=96 SIZE=1t SITE=jupiter DRY=1                        only prints it
    make train NODES=96 SIZE=1t SITE=jupiter                              inside an allocation: starts the run there
    python cluster.py check-nodes                                         inside an allocation: names bad nodes
    python cluster.py sites                                               the table of sites, with sources

Imports no torch: the launcher must start at once. Only what runs on a node to check it does.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import hosts
import stage
import watch
from errors import (EXIT_CONFIG, EXIT_FAILED, EXIT_NO_SPACE, EXIT_OK, EXIT_STOPPED, EXIT_UNHEALTHY, ConfigError, LaunchError,
                    ShortOfNodes)

HERE = Path(__file__).resolve().parent
STARTER_VAR = "NANO1T_SCHEDULER"  # default of --scheduler
SITE_VAR = "NANO1T_SITE"  # default of --site
JOB_END_VAR = "NANO1T_JOB_END"  # Unix time at which the job will be killed
CHAIN_VAR = "NANO1T_CHAIN"  # jobs that may still follow this one
FIRST_VAR = "NANO1T_CHAIN_FIRST"  # the job that this chain began with
SCRIPT_VAR = "NANO1T_JOB_SCRIPT"  # the job script, to submit again
NODES_VAR = "NANO1T_NODES"  # of an attempt, in order of rank, separated by commas
RUN_VAR = "NANO1T_RUN"  # marks every process of a run
ASK_AGAIN_S = 10.0  # a request to stop is sent again: srun loses it while it starts its tasks
# options of srun that a job's own become: right for its ranks, not for the one task that looks at a whole node
PER_TASK = "SLURM_(GPUS|GPUS_PER_TASK|TRES_PER_TASK|NTASKS_PER_GPU|GPU_BIND|CPU_BIND.*|MEM_BIND.*)|SRUN_CPUS_PER_TASK"
TASK_VARS = (RUN_VAR, NODES_VAR, "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
             "MASTER_ADDR", "MASTER_PORT", "NANO1T_DEVICE", "NANO1T_MESSAGES_FD", watch.NODE_VAR, watch.ATTEMPT_VAR,
             watch.FOLDER_VAR)

# ----------------------------------------------------------------------------------------------
# Sites
# ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """What a site's documentation says that a run needs. Facts that it does not state are left out, and given by flags."""

    scheduler: str = "auto"  # slurm | pbs | auto: whatever is found
    ranks_per_node: int = 0  # accelerators that torch sees on a node; 0: count them
    environment: dict[str, str] = field(default_factory=dict)  # of every rank
    setup: tuple[str, ...] = ()  # lines of the job script, before the launcher starts
    submit: tuple[str, ...] = ()  # options of sbatch or qsub
    start: tuple[str, ...] = ()  # options of srun or mpiexec
    membind: str = ""  # NUMA nodes that host memory is taken from (numactl)
    suffix: str = ""  # behind a node's name: its address on the fast network
    source: str = ""


# How memory is taken, on every rank. On GPUs: segments that grow leave no holes that other sizes cannot use; pinned memory comes in the
# size that was asked for. On the host: huge pages would be taken whole for a few bytes
MEMORY_VARS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,pinned_max_round_threshold_mb:1", "MIMALLOC_ALLOW_THP": "0"}

SITES = {
    "laptop": Site(scheduler="none", source="this machine; nodes are simulated"),
    "jupiter": Site(
        "slurm", 4, start=("--cpus-per-task=72",), membind="0-3",
        source="JSC, JUPITER documentation, page Configuration: 4 GH200 per node, 72 cores each, HBM as further NUMA nodes. "
               "Account, partition, modules and interface are not in it: --account, --partition, --setup, --interface"),
    "alps": Site(
        "slurm", 4,
        {"NCCL_NET": "AWS Libfabric", "NCCL_NET_GDR_LEVEL": "PHB", "NCCL_CROSS_NIC": "1", "NCCL_PROTO": "^LL128",
                 "FI_CXI_DEFAULT_CQ_SIZE": "131072", "FI_CXI_DEFAULT_TX_SIZE": "16384", "FI_CXI_DISABLE_HOST_REGISTER": "1",
                 "FI_CXI_RX_MATCH_MODE": "software", "FI_MR_CACHE_MONITOR": "userfaultfd", "MPICH_GPU_SUPPORT_ENABLED": "0"},
        submit=("--uenv=pytorch/v2.9.1:/user-environment", "--view=default"), membind="0-3",
        source="CSCS documentation (eth-cscs/cscs-docs, August 2026), pages NCCL, PyTorch, Slurm; NUMA nodes: its drawing of a "
               "GH200 node"),
    "aurora": Site(
        "pbs", 12,
        {"CCL_PROCESS_LAUNCHER": "pmix", "CCL_ATL_TRANSPORT": "mpi", "CCL_KVS_MODE": "mpi", "FI_MR_CACHE_MONITOR": "userfaultfd",
         "ZE_FLAT_DEVICE_HIERARCHY": "FLAT"},
        setup=("module load frameworks",), submit=("-l filesystems=home:flare", "-l place=scatter", "-k doe"),
        start=("--pmi=pmix",
               "--cpu-bind=list:4-7:8-11:12-15:16-19:20-23:24-27:56-59:60-63:64-67:68-71:72-75:76-79"),
        suffix=".hsn.cm.aurora.alcf.anl.gov",
        source="ALCF user guides (argonne-lcf/user-guides, August 2026), pages Aurora: PyTorch, oneCCL, Running jobs"),
    "polaris": Site(
        "pbs", 4,
        {"NCCL_NET": "AWS Libfabric", "NCCL_NET_GDR_LEVEL": "PHB", "NCCL_CROSS_NIC": "1", "NCCL_COLLNET_ENABLE": "1",
         "FI_CXI_DISABLE_HOST_REGISTER": "1", "FI_MR_CACHE_MONITOR": "userfaultfd", "FI_CXI_DEFAULT_CQ_SIZE": "131072"},
        setup=("module use /soft/modulefiles", "module load conda", "conda activate",
               "export LD_LIBRARY_PATH=/soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib:/soft/libraries/hwloc/lib/:$LD_LIBRARY_PATH"),
        submit=("-l filesystems=home:eagle", "-l place=scatter"), start=("--cpu-bind=depth", "--depth=16"),
        suffix=".hsn.cm.polaris.alcf.anl.gov",
        source="ALCF user guides (argonne-lcf/user-guides, August 2026), pages Polaris: PyTorch, NCCL, Running jobs"),
}


def site_of(options: argparse.Namespace) -> Site:
    """The row of the table, with what flags say instead. Raises LaunchError."""
    name = options.site or os.environ.get(SITE_VAR, "")
    if name and name not in SITES:
        raise LaunchError(f"--site={name}: unknown; use one of {', '.join(SITES)}, or none of them and flags")
    site = SITES.get(name, Site())
    environment = dict(site.environment)
    if options.interface:
        environment |= {"NCCL_SOCKET_IFNAME": options.interface, "GLOO_SOCKET_IFNAME": options.interface}
    for assignment in options.set or ():
        variable, equals, value = assignment.partition("=")
        if not equals or not variable.isidentifier():
            raise LaunchError(f"--set {assignment!r}: write NAME=VALUE")
        environment[variable] = value
    changes = {"environment": environment}
    if options.start_options is not None:
        changes["start"] = tuple(shlex.split(options.start_options))
    if options.submit_options is not None:
        changes["submit"] = directives(shlex.split(options.submit_options))
    if options.setup is not None:
        changes["setup"] = tuple(options.setup)
    if options.membind is not None:
        changes["membind"] = options.membind
    return replace(site, **changes)


def directives(words: list[str]) -> tuple[str, ...]:
    """One option with its value per line of a job script: qsub reads each line by itself."""
    lines: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not lines:
            lines.append([])
        lines[-1].append(shlex.quote(word) if re.search(r"\s", word) else word)
    return tuple(map(" ".join, lines))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The launcher's options for clusters."""
    group = parser.add_argument_group("clusters")
    group.add_argument("--scheduler", choices=("auto", "slurm", "pbs", "none"), default=os.environ.get(STARTER_VAR, "auto"),
                       help="none: simulate nodes on this machine, whatever is installed (default: look)")
    group.add_argument("--site", default="", help=f"facts of a site: {', '.join(SITES)} (python cluster.py sites)")
    group.add_argument("--dry", "--dry-run", action="store_true",
                       help="outside an allocation: print the job script, do not submit it")
    group.add_argument("--time", default="01:00:00", help="time limit of a job, hours:minutes:seconds (default 01:00:00)")
    group.add_argument("--warn", type=int, default=300, metavar="SECONDS",
                       help="before its end Slurm tells the job to write a checkpoint and stop (default 300)")
    group.add_argument("--account", default="", help="project that is charged")
    group.add_argument("--partition", "--queue", default="", help="partition (Slurm) or queue (PBS)")
    group.add_argument("--chain", type=int, default=0, metavar="N", help="jobs that follow this one while the run is not done")
    group.add_argument("--interface", default="", help="network interface of NCCL and gloo, e.g. hsn0")
    group.add_argument("--set", action="append", metavar="NAME=VALUE", help="variable of every rank, beyond the site's")
    group.add_argument("--setup", action="append", metavar="LINE", help="line of the job script, instead of the site's")
    group.add_argument("--submit-options", metavar="TEXT", help="options of sbatch or qsub, instead of the site's")
    group.add_argument("--start-options", metavar="TEXT", help="options of srun or mpiexec, instead of the site's")
    group.add_argument("--membind", metavar="NODES", help="NUMA nodes for host memory, instead of the site's; empty: any")
    group.add_argument("--no-node-check", dest="node_check", action="store_false",
                       help="do not look at the nodes before the start, nor test them in pairs after a failure")
    group.add_argument("--stage", default="", metavar="FOLDER",
                       help="copy the environment to this local folder of each node, e.g. /tmp")
    group.add_argument("--task", help=argparse.SUPPRESS)  # this process is one rank's, started by srun or mpiexec


# ----------------------------------------------------------------------------------------------
# Where are we
# ----------------------------------------------------------------------------------------------


def quiet(argv: list[str], timeout_s: float = 30) -> subprocess.CompletedProcess:
    """Runs a command of the scheduler; one that is missing or does not answer ends with code 127 or 124."""
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s)
    except OSError as error:
        return subprocess.CompletedProcess(argv, 127, "", str(error))
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", f"no answer within {timeout_s:g} s")


def detect(asked: str, submitting: bool) -> tuple[str, bool]:
    """(slurm | pbs | none, whether this process is inside an allocation). submitting: whether a queue would be used if there is
    one. Raises LaunchError where a scheduler was asked for and is not there, or one is set up but does not answer."""
    inside = {"slurm": "SLURM_JOB_ID" in os.environ and "SLURM_JOB_NODELIST" in os.environ,
              "pbs": "PBS_JOBID" in os.environ and "PBS_NODEFILE" in os.environ, "none": False}
    if asked != "auto":
        if asked != "none" and not inside[asked] and not shutil.which(queue := {"slurm": "sbatch", "pbs": "qsub"}[asked]):
            raise LaunchError(f"--scheduler={asked}: this is no allocation, and there is no {queue} on the PATH; use "
                              "--scheduler=none to simulate nodes")
        return asked, inside[asked]
    for name in ("slurm", "pbs"):
        if inside[name]:
            return name, True
    if submitting and shutil.which("sbatch"):
        answer = quiet(["sinfo", "-h", "-o", "%D"])
        if answer.returncode == 0:
            return "slurm", False
        if os.environ.get("SLURM_CONF") or os.path.exists("/etc/slurm/slurm.conf"):
            raise LaunchError(f"Slurm is set up here but does not answer ({last_line(answer.stderr)}); try again later, or use "
                              "--scheduler=none to simulate the nodes on this machine")
    if submitting and shutil.which("qsub") and shutil.which("pbsnodes"):
        return "pbs", False
    return "none", False


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def job_id() -> str:
    """Of the job that this process belongs to; empty outside."""
    return os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID") or ""


def note_job_end() -> None:
    """Puts the time at which Slurm will end this job into the environment, for the launcher and the ranks; PBS's comes with the
    job script."""
    if "SLURM_JOB_ID" in os.environ and JOB_END_VAR not in os.environ:
        with contextlib.suppress(ValueError):  # N/A: no limit
            end = datetime.datetime.fromisoformat(quiet(["squeue", "-h", "-j", job_id(), "-o", "%e"]).stdout.strip())
            os.environ[JOB_END_VAR] = str(int(end.timestamp()))


# ----------------------------------------------------------------------------------------------
# From a login node: the job script, and the jobs that follow
# ----------------------------------------------------------------------------------------------


def run_name(command: list[str]) -> str:
    """The run's name, as train.py will read it."""
    return next((arg[len("--run="):] for arg in reversed(command) if arg.startswith("--run=")), "debug")


def job_name(command: list[str]) -> str:
    """The run's name with nothing in it that a scheduler would read."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", f"nano1t-{run_name(command)}")


def shared_folder(command: list[str], name: str) -> Path:
    """A new folder for what a launch's attempts leave: beside the runs, which all nodes see. name: of the launch."""
    folder = Path("out", "jobs", f"{job_name(command)}-{job_id()}-{name}").absolute()
    folder.mkdir(parents=True)
    return folder


def seconds(text: str) -> int:
    """[days-][hours:]minutes:seconds, as both schedulers write it. Raises LaunchError."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if not match:
        raise LaunchError(f"--time={text}: write hours:minutes:seconds, e.g. 12:00:00")
    days, hours, minutes, rest = (int(x or 0) for x in match.groups())
    return ((24 * days + hours) * 60 + minutes) * 60 + rest


def job_script(scheduler: str, site: Site, options: argparse.Namespace, argv: list[str], path: Path) -> str:
    """The text of a job script. argv: of the launcher, which runs the same command line again, inside; path: where the script
    will be."""
    name, nodes, limit_s = job_name(argv), options.nodes + options.spares, seconds(options.time)
    spares = f"  # {options.spares} of them spare" if options.spares else ""
    if scheduler == "slurm":
        warn, per_node = min(options.warn, limit_s // 2), options.ranks_per_node or site.ranks_per_node
        wanted = [f"--job-name={name}", f"--nodes={nodes}{spares}", *[f"--ntasks-per-node={per_node}"] * bool(per_node),
                  f"--time={options.time}", f"--signal=B:USR1@{warn}  # time for a checkpoint",
                  "--no-kill  # a node that fails is replaced by a spare", "--no-requeue  # a follower goes on instead",
                  f"--output=out/jobs/{name}-%j.log", "--open-mode=append"]
        wanted += [f"--account={options.account}"] * bool(options.account)
        wanted += [f"--partition={options.partition}"] * bool(options.partition)
        head, home = [f"#SBATCH {line}" for line in (*wanted, *site.submit)], os.getcwd()
    else:
        hours = f"{limit_s // 3600:02d}:{limit_s // 60 % 60:02d}:{limit_s % 60:02d}"
        wanted = [f"-N {name[:15]}", f"-l select={nodes}", f"-l walltime={hours}", "-j oe", "-o out/jobs/", "-r n"]
        wanted += [f"-A {options.account}"] * bool(options.account) + [f"-q {options.partition}"] * bool(options.partition)
        head, home = [f"#PBS {line}" for line in (*wanted, *site.submit)], os.getcwd()
    lines = ["#!/bin/bash", *head, "", f"cd {shlex.quote(home)} || exit 2", *site.setup,
             f"export {SCRIPT_VAR}={shlex.quote(str(path))}", "trap '' USR1  # a warning before the launcher listens ends nothing"]
    if scheduler == "pbs":
        lines.append(f"export {JOB_END_VAR}=$(($(date +%s) + {limit_s}))")
        lines += [f"export {key}={shlex.quote(os.environ[key])}" for key in (SITE_VAR, STARTER_VAR) if key in os.environ]
    words = [sys.executable, str(HERE / "launch.py"),
             *(arg for arg in argv[: argv.index("--")] if arg not in ("--dry", "--dry-run")), *argv[argv.index("--"):]]
    return "\n".join([*lines, f"exec {shlex.join(words)}", ""])  # exec: signals to the job reach the launcher


def outside_job() -> dict[str, str]:
    """This environment without what belongs to one job or one run: another job gets its own."""
    mine = (*TASK_VARS, JOB_END_VAR, CHAIN_VAR, FIRST_VAR, SCRIPT_VAR, "NANO1T_STARTED")
    return {k: v for k, v in os.environ.items() if k not in mine and (not k.startswith("SLURM_") or k == "SLURM_CONF")}


CHECK = """import sys
sys.path.insert(0, sys.argv[1])
import train
nodes, ranks = map(int, sys.argv[2:4])
try:
    hp = train.parse(sys.argv[4:])
    m = train.model_of(hp.size, **{name: getattr(hp, name) or None for name in train.MODEL_FIELDS})
    if ranks:
        train.grid_shape(nodes * ranks, ranks, hp.replicas, m)
except train.ConfigError as error:
    sys.exit(print(error) or 2)
"""


def check_settings(command: list[str], nodes: int, ranks_per_node: int) -> None:
    """Raises LaunchError where train.py would refuse names, types, size or layout: now, not after hours in the queue. Where torch
    is there inside a job only, nothing is told."""
    if os.path.basename(command[0]) == "train.py":
        argv = [sys.executable, "-c", CHECK, str(HERE), str(nodes), str(ranks_per_node), *command[1:]]
        if (said := quiet(argv, 120)).returncode == EXIT_CONFIG:
            raise LaunchError(last_line(said.stdout))


def submit(scheduler: str, site: Site, options: argparse.Namespace, argv: list[str]) -> int:
    """Prints the job script and, unless --dry, submits it. Exit code 0, or 1 if the queue refused it. Raises LaunchError."""
    check_settings(argv[argv.index("--") + 1 :], options.nodes, options.ranks_per_node or site.ranks_per_node)
    folder = Path("out", "jobs")
    path = folder.absolute() / f"{job_name(argv)}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.sh"
    text = job_script(scheduler, site, options, argv, path)
    print(text, end="", flush=True)
    if options.dry:
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    answer = queue(scheduler, path, os.environ, chain=options.chain)
    print(f"# {last_line(answer.stdout) or last_line(answer.stderr)}", flush=True)
    if answer.returncode:
        print(f"error: the queue did not take {path}: {answer.stderr.strip()}", file=sys.stderr)
    return 1 if answer.returncode else 0


def queue(scheduler: str, script: Path, environment, chain: int, after: str = "") -> subprocess.CompletedProcess:
    """Submits a script. chain: jobs that may follow it; after: the job at whose end, however it ends, it may start."""
    own = {CHAIN_VAR: str(chain), **({FIRST_VAR: chain_id()} if after else {})}
    passed = environment | own
    if scheduler == "slurm":
        argv = ["sbatch", "--export=ALL", *([f"--dependency=afterany:{after}"] if after else []), str(script)]
    else:
        variables = ",".join(f"{name}={value}" for name, value in own.items())
        argv = ["qsub", "-v", variables, *(["-W", f"depend=afterany:{after}"] if after else []), str(script)]
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=passed, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(argv, 1, "", str(error))


def chain_id() -> str:
    """The job that this one's chain began with; empty outside of jobs."""
    return os.environ.get(FIRST_VAR) or job_id()


def follows(chain: str) -> bool:
    """Whether this job follows another of this chain."""
    return FIRST_VAR in os.environ and chain == os.environ[FIRST_VAR]


@contextlib.contextmanager
def chained(scheduler: str, options: argparse.Namespace, command: list[str]):
    """While a run is on, the job that goes on after this one waits. Set `code` and `elsewhere` before the end: see supervise."""
    chain = Chain(scheduler, options, Path("out", run_name(command)))
    try:
        yield chain
    except ShortOfNodes:
        chain.elsewhere = True
        raise
    finally:
        chain.end()


class Chain:
    """The job that follows this one. It is submitted before the run starts, not after it stopped: so it waits in the queue while
    this one runs, and comes even if this one's first node dies. Its dependency keeps it from starting earlier. A run that is
    done, was cancelled, or failed in a way that would repeat takes it out again; so does the file out/<run>/stop. What lies with
    this job's nodes, another job's may do better."""

    def __init__(self, scheduler: str, options: argparse.Namespace, folder: Path) -> None:
        self.scheduler, self.stop_file = scheduler, folder / "stop"
        self.follower, self.code, self.elsewhere = "", EXIT_FAILED, False
        self.left = int(os.environ.get(CHAIN_VAR) or options.chain)
        script = os.environ.get(SCRIPT_VAR, "")
        if self.left < 1 or not script or self.stopped():
            return
        answer = queue(scheduler, Path(script), outside_job(), self.left - 1, after=job_id())
        if answer.returncode:
            print(f"warning: no job follows this one: {last_line(answer.stderr)}", file=sys.stderr, flush=True)
        else:
            self.follower = answer.stdout.split()[-1]  # "Submitted batch job 7", or the id alone
            print(f"job {self.follower} goes on after this one; {self.left - 1} more may follow; touch {self.stop_file} to end "
                  "the chain", file=sys.stderr, flush=True)

    def stopped(self) -> bool:
        return self.stop_file.exists()

    def end(self) -> None:
        goes_on = self.code == EXIT_STOPPED or self.elsewhere and self.code != EXIT_OK
        if self.follower and (self.stopped() or not goes_on):
            why = f"{self.stop_file} is there" if self.stopped() else f"the run ended with code {self.code}"
            print(f"job {self.follower} is not needed: {why}", file=sys.stderr, flush=True)
            quiet([{"slurm": "scancel", "pbs": "qdel"}[self.scheduler], self.follower])


# ----------------------------------------------------------------------------------------------
# One job at a time on a run
# ----------------------------------------------------------------------------------------------


def claim(path: Path, what: str) -> None:
    """Raises ConfigError if another job, which may still be alive, works on a run; else writes that this one does. A lock of the
    file system may hold on one host only, this holds on any shared one; and what a dead job has left does not block. Outside of
    jobs nothing is written. what: the setting to change."""
    me = owner()
    mine = path.with_name(f"{path.name}.{me['host']}-{me['pid']}")
    for _ in range(5):  # several may see the same leftover: one takes it away
        if me["job"]:
            mine.write_text(json.dumps(me))
            try:
                os.link(mine, path)  # unlike open(O_EXCL) atomic on NFS, too, and never seen half written
                return
            except FileExistsError:
                pass
            finally:
                mine.unlink()
        try:
            text = path.read_text()
        except FileNotFoundError:
            if me["job"]:
                continue
            return
        if why := alive(json.loads(text), me):
            raise ConfigError(f"{what}: {why}; wait for it, end it, or use another run's name. If it is certain that it has "
                              f"ended, delete {path}")
        with contextlib.suppress(FileNotFoundError):
            path.rename(mine)
            if mine.read_text() != text:  # someone was faster, and this is theirs
                with contextlib.suppress(FileExistsError):
                    os.link(mine, path)
            mine.unlink()
    raise ConfigError(f"{what}: several jobs start this run at the same time; start one")


def release(path: Path) -> None:
    """Takes the claim back, if it is this process's."""
    with contextlib.suppress(OSError):
        if json.loads(path.read_text()) == owner():
            path.unlink()


def owner() -> dict:
    """This process, as others can look for it."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": started(os.getpid()), "job": job_id(),
            "scheduler": "slurm" if "SLURM_JOB_ID" in os.environ else "pbs"}


def started(pid: int) -> str:
    """When a process of this host started, in ticks since boot; empty if there is none."""
    with contextlib.suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    return ""


def alive(found: dict, me: dict) -> str:
    """Who holds a claim, in words, if that may still run; else nothing."""
    if found["host"] == me["host"]:
        return f"process {found['pid']} of job {found['job']} is training it" if started(found["pid"]) == found["started"] else ""
    if found["job"] != me["job"] and job_alive(found["scheduler"], found["job"]):
        return f"job {found['job']} on {found['host']} is training it"
    return ""  # or it was an earlier attempt of this very job, which its launcher has ended


def job_alive(scheduler: str, job: str) -> bool:
    """Whether a job is running, or the scheduler cannot tell."""
    if scheduler == "pbs":
        answer = quiet(["qstat", "-x", "-f", job])
        if answer.returncode and "history" in answer.stderr:  # the server keeps none
            answer = quiet(["qstat", "-f", job])
        if answer.returncode:
            return not re.search("Unknown Job|has finished", answer.stderr, re.IGNORECASE)
        return not re.search(r"job_state = [FX]", answer.stdout)
    answer = quiet(["squeue", "-h", "-t", "all", "-j", job, "-o", "%T"])
    if answer.returncode:
        return "Invalid job id" not in answer.stderr  # forgotten, as old ones are
    over = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"}
    return not set(answer.stdout.split()) <= over


# ----------------------------------------------------------------------------------------------
# Starters
# ----------------------------------------------------------------------------------------------


def die_with_parent(parent: int, libc: ctypes.CDLL) -> None:
    """In a new srun or mpiexec: a launcher that is killed takes it along, with SIGTERM, so that it ends its tasks."""
    pr_set_pdeathsig = 1
    libc.prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def spawn(argv: list[str], environment: dict[str, str], **more) -> subprocess.Popen:
    """Starts srun or mpiexec, out of reach of the terminal's Ctrl-C."""
    die = None
    if sys.platform == "linux":
        libc, parent = ctypes.CDLL(None), os.getpid()  # loaded before the fork

        def die() -> None:
            die_with_parent(parent, libc)

    return subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die, **more)


def end(process: subprocess.Popen, grace_s: float) -> None:
    """Ends srun or mpiexec: SIGTERM has them kill their tasks."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    os.killpg(process.pid, number)
                else:
                    process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)


def marked(mark: str) -> list[int]:
    """The processes of this machine whose environment carries a run's mark; Linux only.

    Finds those that left their process group, as the helper of wandb does.
    """
    wanted, found = f"{RUN_VAR}={mark}".encode(), []
    for place in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to someone else
            if any(entry.startswith(wanted) for entry in place.read_bytes().split(b"\0")):
                found.append(int(place.parts[2]))
    return found


def kill_marked(mark: str, grace_s: float = 0.0) -> None:
    """SIGKILL to these processes. grace_s: how long they may take to end by themselves, as an srun that ends its tasks does."""
    until = time.monotonic() + grace_s
    while time.monotonic() < until and marked(mark):
        time.sleep(0.1)
    for _ in range(10):  # again, because one of them may just have started another
        found = marked(mark)
        for process in found:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.02)


class Step:
    """One attempt under srun or mpiexec. Each task wraps one rank and always ends with 0, so that neither of them ends the
    others; how its rank ended stands in exit-<rank>.json."""

    def __init__(self, starter: Starter, process: subprocess.Popen, nodes: list[str], folder: Path, mark: str,
                 pages: str) -> None:
        self.starter, self.process, self.nodes, self.folder, self.mark, self.pages = starter, process, nodes, folder, mark, pages
        self.ended: dict[int, int] = {}
        self.told, self.asked = False, 0.0  # when the ranks were last asked to stop, seconds of the monotonic clock

    def poll(self, seconds: float) -> bool:
        """Waits up to that long; True once everything of the attempt has ended."""
        if self.asked and time.monotonic() > self.asked + ASK_AGAIN_S:
            self.send(signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, seconds))
        return self.process.returncode is not None

    def codes(self) -> dict[int, int]:
        """Exit codes by rank that are known so far; negative for signals."""
        for path in self.folder.glob("exit-*.json"):
            if (rank := int(path.stem[5:])) not in self.ended:
                self.ended[rank] = json.loads(path.read_text())["code"]
        if self.process.returncode == EXIT_NO_SPACE:  # the tasks could not write how their ranks ended
            return {rank: EXIT_NO_SPACE for rank in range(len(self.nodes) * self.starter.ranks_per_node)} | self.ended
        return dict(self.ended)

    def send(self, number: int) -> None:
        """To all ranks. A request to stop travels as SIGUSR1, which srun and mpiexec pass on; others end their tasks."""
        stops = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
        self.asked = time.monotonic() if number in stops else self.asked
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1 if number in stops else number)

    def kill(self) -> None:
        """Returns when nothing of the attempt is left, on every node that answers."""
        end(self.process, 10)
        if len(self.codes()) < len(self.nodes) * self.starter.ranks_per_node:  # some task could not put its own house in order
            down = self.starter.down()
            self.starter.on_each([node for node in self.nodes if node not in down],
                                 [sys.executable, str(HERE / "cluster.py"), "sweep", self.mark, self.pages], 30)
        if self.ended.get(0) != EXIT_CONFIG and not self.told:
            self.told = True
            said = min(self.folder.glob("said-*.txt"), default=None)  # of a rank other than 0, which said nothing
            print(said.read_text() if said else "", end="", file=sys.stderr, flush=True)


class Starter:
    """What Slurm and PBS have in common. Nodes are called as the scheduler calls them."""

    at_once = 256  # processes of srun or mpiexec that on_each has at a time; hosts.py puts partners side by side

    def __init__(self, site: Site, ranks_per_node: int, mark: str = "") -> None:
        """mark: of the launch, at the beginning of that of every attempt."""
        self.site, self.ranks_per_node, self.mark = site, ranks_per_node, mark
        self.unfit: dict[str, str] = {}  # nodes that failed the check at the start, and why
        self.python = sys.executable  # of the ranks
        self.started = 0  # command lines

    def nodes(self) -> list[str]:
        raise NotImplementedError

    def tasks(self, nodes: list[str], ranks_per_node: int, argv: list[str], names: list[str], folder: Path) -> list[str]:
        """The command line that runs argv so many times on each node. names: of the variables that it must pass on."""
        raise NotImplementedError

    def here(self) -> str:
        """The node that this process runs on."""
        raise NotImplementedError

    def start(self, nodes: list[str], command: list[str], environment: dict[str, str], folder: Path) -> Step:
        """Starts the ranks of one attempt on these nodes, in the allocation's order, whatever theirs. command: a script and its
        arguments; environment: extra variables of the ranks; folder: of this attempt, on the shared file system."""
        nodes = sorted(nodes, key=self.nodes().index)
        host, port = self.meeting(nodes[0])
        mark = f"{self.mark}/{time.time_ns()}"
        mine = self.site.environment | environment | {
            RUN_VAR: mark, NODES_VAR: ",".join(nodes), "WORLD_SIZE": str(len(nodes) * self.ranks_per_node),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node), "GROUP_WORLD_SIZE": str(len(nodes)), "MASTER_ADDR": host,
            "MASTER_PORT": str(port)}
        bind = ["numactl", f"--membind={self.site.membind}"] if self.site.membind else []
        if bind and not shutil.which("numactl"):
            raise LaunchError(f"--membind={self.site.membind}: there is no numactl on the PATH; load its module with --setup, or "
                              "use --membind= (empty)")
        everything = MEMORY_VARS | {k: v for k, v in os.environ.items() if k not in (*TASK_VARS, *RANK_FROM)} | mine
        task = [*bind, self.python, str(HERE / "launch.py"), "--task", str(folder.absolute()), "--", *command]
        argv = self.tasks(nodes, self.ranks_per_node, task, list(everything), folder)
        return Step(self, spawn(argv, everything), nodes, folder, mark, environment[watch.FOLDER_VAR])

    def meeting(self, node: str) -> tuple[str, int]:
        """Address and free port of the node where rank 0 will run."""
        if node == self.here():
            found = {"host": socket.gethostname(), "port": hosts.free_port()}
        else:
            answer = self.on_each([node], [sys.executable, str(HERE / "cluster.py"), "meet"], 60)[node]
            found = hosts.answer_of(*answer) or {"host": node, "port": random.randrange(*hosts.PORTS)}
        return (node.split(".")[0] + self.site.suffix if self.site.suffix else found["host"]), found["port"]

    def on_each(self, nodes: list[str], argv: list[str], timeout_s: float) -> dict[str, tuple[int, bytes]]:
        """Runs a command once on each node, beside the run: exit code (124: it took too long) and output by node."""
        environment = {k: v for k, v in os.environ.items() if k not in TASK_VARS and not re.fullmatch(PER_TASK, k)}
        waiting, running, done = list(nodes), {}, {}
        with tempfile.TemporaryDirectory() as scratch:
            while waiting or running:
                while waiting and len(running) < self.at_once:
                    node = waiting.pop(0)
                    out, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()
                    command = self.tasks([node], 1, argv, [*environment, watch.NODE_VAR], Path(scratch))
                    process = spawn(command, environment | {watch.NODE_VAR: node}, stdout=out, stderr=errors)
                    running[node] = (process, out, errors, time.monotonic() + timeout_s)
                for node, (process, out, errors, until) in list(running.items()):
                    code = process.poll()
                    if code is None and time.monotonic() < until:
                        continue
                    end(process, 3)
                    out.seek(0), errors.seek(0)
                    done[node] = (124 if code is None else code, out.read() + (errors.read() if code else b""))
                    out.close(), errors.close()
                    del running[node]
                time.sleep(0.02)
        return {node: done[node] for node in nodes}

    def broadcast(self, archive: str, path: str) -> list[str] | None:
        """The command that copies a file to all nodes, where there is one."""
        return None

    def down(self) -> dict[str, str]:
        """Nodes that the scheduler cannot use, in its words."""
        raise NotImplementedError

    def unusable(self) -> dict[str, str]:
        """Nodes that the scheduler calls down or drained, and those that failed the check at the start, with the reason."""
        return self.unfit | self.down()


class Slurm(Starter):
    def nodes(self) -> list[str]:
        """Every node that the allocation had at its start, in Slurm's order."""
        return self.hostnames(os.environ["SLURM_JOB_NODELIST"])

    def hostnames(self, text: str) -> list[str]:
        answer = quiet(["scontrol", "show", "hostnames", text])
        if answer.returncode:
            raise LaunchError(f"scontrol cannot list the nodes {text} of job {job_id()}: {last_line(answer.stderr)}")
        return answer.stdout.split()

    def here(self) -> str:
        return os.environ.get("SLURMD_NODENAME", "")

    def broadcast(self, archive: str, path: str) -> list[str] | None:
        return ["sbcast", "--force", archive, path]

    def tasks(self, nodes, ranks_per_node, argv, names, folder):
        extra = self.site.start if ranks_per_node == self.ranks_per_node else ()
        return ["srun", "--overlap", f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}",
                f"--ntasks={len(nodes) * ranks_per_node}", f"--ntasks-per-node={ranks_per_node}", "--distribution=block",
                "--kill-on-bad-exit=0", "--wait=0", "--unbuffered", "--export=ALL", *extra, *argv]

    def down(self) -> dict[str, str]:
        answer = quiet(["sinfo", "-h", "-N", "-n", os.environ["SLURM_JOB_NODELIST"], "-o", "%N|%T|%E"])
        found, left = {}, quiet(["squeue", "-h", "-j", job_id(), "-o", "%N"])
        if left.returncode == 0 and left.stdout.strip():  # one that failed is taken out, and may be up again by now
            mine = self.hostnames(left.stdout.strip())
            found = {node: "Slurm has taken it out of the job" for node in self.nodes() if node not in mine}
        for node, state, reason in (line.split("|", 2) for line in answer.stdout.splitlines()):
            # a draining node keeps its jobs until they end
            if state.endswith("*") or re.match("down|drained|fail|error|power|unknown", state):
                found[node] = f"Slurm says {state}: {reason}"
        return found


class Pbs(Starter):
    def __init__(self, site: Site, ranks_per_node: int, mark: str = "") -> None:
        super().__init__(site, ranks_per_node, mark)
        said = quiet(["mpiexec", "--version"])
        text = said.stdout + said.stderr
        self.flavour = "openmpi" if re.search("Open ?MPI|OpenRTE", text) else "hydra" if "HYDRA" in text else "pals"
        if said.returncode == 127:
            raise LaunchError("there is no mpiexec on the PATH; load the module of an MPI, e.g. with --setup='module load ...'")

    def nodes(self) -> list[str]:
        """Every node of the allocation; PBS lists one once per processor."""
        return list(dict.fromkeys(Path(os.environ["PBS_NODEFILE"]).read_text().split()))

    def here(self) -> str:
        return next((node for node in self.nodes() if node.split(".")[0] == socket.gethostname().split(".")[0]), "")

    def tasks(self, nodes, ranks_per_node, argv, names, folder):
        self.started += 1
        hostfile = Path(folder, f"hosts-{self.started}")
        hostfile.write_text("".join(f"{node}\n" for node in nodes))
        extra = self.site.start if ranks_per_node == self.ranks_per_node else ()
        total = ["-n", str(len(nodes) * ranks_per_node)]
        names = [n for n in names if n.isidentifier() and not re.match("OMPI_|PMIX_|PMI_|PALS_|HYDI?_|BASH_FUNC", n)]
        if self.flavour == "hydra":
            options = [*total, "-ppn", str(ranks_per_node), "-f", str(hostfile), "-genvlist", ",".join(names)]
        elif self.flavour == "openmpi":
            options = [*total, "--map-by", f"ppr:{ranks_per_node}:node:OVERSUBSCRIBE", "--bind-to", "none", "--hostfile",
                       str(hostfile),
                       *(word for name in names for word in ("-x", name))]
        else:
            options = [*total, "--ppn", str(ranks_per_node), "--hostfile", str(hostfile), "--envall"]
        return ["mpiexec", *options, *extra, *argv]

    def down(self) -> dict[str, str]:
        found = {}
        for node in self.nodes() if shutil.which("pbsnodes") else ():
            said = [quiet(["pbsnodes", name]).stdout for name in dict.fromkeys((node, node.split(".")[0]))]  # vnodes have short names
            match = re.search(r"^\s*state = (.*)$", "".join(said), re.MULTILINE)
            if match and re.search("down|offline|unresolvable|unknown", match[1]):
                found[node] = f"PBS says {match[1].strip()}"
        return found


def starter(scheduler: str, site: Site, options: argparse.Namespace, mark: str) -> Starter:
    """Of the allocation that this process is in; options.nodes is set where it was left to it. Raises LaunchError."""
    note_job_end()
    made = {"slurm": Slurm, "pbs": Pbs}[scheduler](site, options.ranks_per_node, mark)
    has = len(made.nodes())
    options.nodes = options.nodes or max(1, has - options.spares)
    if options.nodes > has:
        raise LaunchError(f"--nodes {options.nodes}: the allocation has {has}")
    return made


def prepare(starter: Starter, options: argparse.Namespace, command: list[str]) -> None:
    """Before the first attempt: nodes that miss something are left out, and the environment goes to the others' disks. Raises
    LaunchError if too few are left."""
    down = starter.down()
    nodes = [node for node in starter.nodes() if node not in down]
    if options.node_check:
        planned = hosts.planned_memory(Path("out", "hosts.jsonl"), run_name(command))
        _, starter.unfit = hosts.check_start(starter.on_each, nodes, starter.ranks_per_node, planned)
    if options.stage:
        nodes = [node for node in nodes if node not in starter.unfit]
        report = stage.stage(Path(sys.prefix), options.stage, nodes, starter.on_each, starter.broadcast, minimum=options.nodes)
        starter.python = report.python
        starter.unfit |= {node: f"the environment could not be copied there: {why}" for node, why in report.failed.items()}
        good = len(nodes) - len(report.failed)
        say(f"environment copied to {good} of {len(nodes)} nodes in {report.seconds:.1f} s: {report.python}")
    lost = down | starter.unfit
    for node, why in lost.items():
        say(f"node {node} is left out: {why}")
    if len(starter.nodes()) - len(lost) < options.nodes:
        raise ShortOfNodes(f"{options.nodes} nodes are needed, {len(starter.nodes()) - len(lost)} can be used")


def node_check(starter: Starter):
    """For the restart loop: nodes among an attempt's that fail a check, and why. Idle nodes help as partners."""
    def check(nodes: list[str]) -> dict[str, str]:
        lost = starter.unusable()
        bad = hosts.check_nodes(starter.on_each, [node for node in starter.nodes() if node not in lost], starter.ranks_per_node)
        return {node: why for node, why in bad.items() if node in nodes}

    return check


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# Of an MPI, if one started this: where it uses srun to reach the nodes, Slurm's says something else
RANK_FROM = ("PALS_RANKID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def task_environment() -> dict[str, str]:
    """In a task of srun or mpiexec: torchrun's variables of its rank, and its share of the threads. Ranks are numbered along the
    nodes, so the local one follows from the rank. Raises LaunchError."""
    own = dict(os.environ)
    known = [own[name] for name in RANK_FROM if name in own]
    if not known or NODES_VAR not in own:
        raise LaunchError(f"--task is for processes that srun or mpiexec start: none of {', '.join(RANK_FROM)} is set")
    rank, per_node = int(known[0]), int(own["LOCAL_WORLD_SIZE"])
    local = rank % per_node
    cores = len(os.sched_getaffinity(0))
    threads = cores if cores * per_node <= (os.cpu_count() or 1) else max(1, cores // per_node)  # bound to its own, or all share
    own.setdefault("OMP_NUM_THREADS", str(threads))
    own.setdefault("MKL_NUM_THREADS", own["OMP_NUM_THREADS"])
    own.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    seen = next((own[name] for name in ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK") if own.get(name)), "")
    alone = seen and "," not in seen and per_node > 1  # the scheduler shows each task its own accelerator only
    node = own.get("SLURMD_NODENAME") or own[NODES_VAR].split(",")[rank // per_node]
    return own | {"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(rank // per_node), watch.NODE_VAR: node,
                  "NANO1T_DEVICE": "0" if alone else str(local), RUN_VAR: f"{own[RUN_VAR]}/{rank}."}


# ----------------------------------------------------------------------------------------------
# Commands
# ----------------------------------------------------------------------------------------------


def check_allocation() -> int:
    """Checks every node of this allocation; exit code 0, or EXIT_UNHEALTHY if some are bad. Raises LaunchError."""
    scheduler, inside = detect("auto", submitting=False)
    if not inside:
        raise LaunchError("check-nodes: this is no allocation; get one with salloc or qsub -I")
    starter = {"slurm": Slurm, "pbs": Pbs}[scheduler](SITES.get(os.environ.get(SITE_VAR, ""), Site()), 1)
    nodes, down = starter.nodes(), starter.down()
    bad = down | hosts.check_nodes(starter.on_each, [node for node in nodes if node not in down],
                                   starter.site.ranks_per_node or 1)
    for node in nodes:
        print(f"{node}: {bad.get(node, 'good')}")
    return EXIT_UNHEALTHY if bad else EXIT_OK


def show_sites() -> None:
    for name, site in SITES.items():
        print(f"{name}: {site.source}")
        for key in ("scheduler", "ranks_per_node", "setup", "submit", "start", "membind", "suffix"):
            if value := getattr(site, key):
                print(f"    {key:<15} {' | '.join(value) if isinstance(value, tuple) else value}")
        for variable, value in site.environment.items():
            print(f"    {variable}={value}")


def main(argv: list[str]) -> int:
    try:
        match argv:
            case ["check-nodes"]:
                return check_allocation()
            case ["sites"]:
                show_sites()
            case ["meet"]:  # on a node, by the launcher
                print(json.dumps({"host": socket.gethostname(), "port": hosts.free_port()}))
            case ["sweep", mark, pages]:
                kill_marked(mark)
                shutil.rmtree(pages, ignore_errors=True)
            case _:
                print(__doc__, file=sys.stderr)
                return EXIT_CONFIG
    except LaunchError as error:
        say(f"error: {error}")
        return EXIT_CONFIG
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
