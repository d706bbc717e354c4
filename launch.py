"""Starts the ranks of a run, and tells each rank where it runs.

    python launch.py -- train.py --steps=50                                    4 CPU ranks, or one per accelerator
    python launch.py --nodes 2 --ranks-per-node 2 -- train.py --size=debug     two simulated nodes of two ranks
    python launch.py --nodes 2 --spares 1 --timeout 60 -- train.py             one more to put in; a step of 60 s is a hang
    python launch.py --nodes 96 --site jupiter -- train.py --size=1t           in a Slurm or PBS job; on a login node: submits one
    torchrun --nproc-per-node 4 -- train.py --steps=50                         works too: the variables are the same
    python train.py                                                            and so does one rank alone

As a library (train.py, eval.py):

    def main(argv):
        stop = launch.StopRequest()
        where = launch.place()
        launch.setup(where)
        ...
        return launch.EXIT_STOPPED if stop.requested else launch.EXIT_OK

    if __name__ == "__main__":
        sys.exit(launch.run(main))
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import gc
import glob
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import cluster
import recover
import watch
from errors import (EXIT_CONFIG, EXIT_DIVERGED, EXIT_FAILED, EXIT_HANG, EXIT_NO_SPACE, EXIT_NOT_SAVED, EXIT_OK,  # noqa: F401
                    EXIT_OUT_OF_MEMORY, EXIT_STOPPED, EXIT_UNHEALTHY, ConfigError, LaunchError)
from cluster import JOB_END_VAR, MEMORY_VARS, RUN_VAR, kill_marked
from hosts import DEVICE_FILES
from recover import say

if TYPE_CHECKING:  # the command line must start at once, so torch is imported only where a rank needs it
    import torch

SRUN_S = 10.0  # that an srun or mpiexec may take to end its tasks on all nodes, once its launcher was killed
RESUMABLE = ("train.py",)  # programs that tell their progress, and go on from a checkpoint when they are started again
CPU_RANKS = 4  # ranks per node where there is no accelerator: enough for a 2 x 2 grid
RANK_BYTES = 250 << 20  # of memory that a process takes once it has loaded torch
KILL_PATIENCE_S = 30.0  # for the end of a killed process: one that the kernel holds may take longer, and is left to it
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

# Variables between launcher and ranks, beyond those of torchrun
DEVICE_VAR = "NANO1T_DEVICE"  # accelerator index: simulated nodes share a machine, so LOCAL_RANK repeats
MESSAGES_VAR = "NANO1T_MESSAGES_FD"  # file that takes the config errors of ranks other than 0
STARTED_VAR = "NANO1T_STARTED"  # Unix time at which the launcher started
JOB_MARGIN_S = 20.0  # that a job's end is kept off beyond a step and a checkpoint: the way out, and a slow file system


# ----------------------------------------------------------------------------------------------
# In a rank: where am I, join the others, leave with the right exit code
# ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where this process runs. Node = rank // ranks_per_node, for simulated nodes as well."""

    rank: int
    world: int
    local_rank: int
    ranks_per_node: int
    device: torch.device
    backend: str


def place() -> Place:
    """Read torchrun's variables; without any of them this is the only rank.

    Raises ConfigError when they are incomplete, contradict each other or name a missing accelerator.
    """
    import torch

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    given = {name: os.environ[name] for name in names if name in os.environ}
    shown = " ".join(f"{name}={value}" for name, value in given.items())
    fix = "start with `python launch.py -- train.py` or torchrun, or unset them all for one rank"
    if missing := [name for name in names if given and name not in given]:
        raise ConfigError(f"{shown} in the environment, but {', '.join(missing)} not set; {fix}")
    if bad := [name for name, value in given.items() if not value.strip().isdecimal()]:
        raise ConfigError(f"{bad[0]}={given[bad[0]]!r} in the environment is not a whole number >= 0; {fix}")
    rank, world, local_rank, ranks_per_node = (int(given.get(n, d)) for n, d in zip(names, (0, 1, 0, 1), strict=True))
    if not rank < world:
        raise ConfigError(f"RANK={rank} must be below WORLD_SIZE={world}; {fix}")
    if ranks_per_node < 1 or world % ranks_per_node:
        raise ConfigError(f"WORLD_SIZE={world} is not a multiple of LOCAL_WORLD_SIZE={ranks_per_node}; {fix}")
    if local_rank != rank % ranks_per_node:
        raise ConfigError(f"LOCAL_RANK={local_rank} is not RANK={rank} modulo LOCAL_WORLD_SIZE={ranks_per_node}; {fix}")

    kind, backend, count = accelerator()
    if not count:
        return Place(rank, world, local_rank, ranks_per_node, torch.device(kind), backend)
    index = int(os.environ.get(DEVICE_VAR, local_rank))
    if index >= count:
        raise ConfigError(
            f"rank {rank} needs {kind} device {index}, but this machine shows {count}; start at most {count} ranks "
            "on it (--nodes times --ranks-per-node), or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
        )
    return Place(rank, world, local_rank, ranks_per_node, torch.device(kind, index), backend)


def accelerator() -> tuple[str, str, int]:
    """Device type, backend for torch.distributed, and how many such devices this process sees (0: CPU)."""
    import torch

    if torch.cuda.is_available():
        return "cuda", "nccl", torch.cuda.device_count()
    if torch.xpu.is_available():
        return "xpu", "xccl", torch.xpu.device_count()
    return "cpu", "gloo", 0


PEAK_FLOPS = {"GH200": 989e12, "H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bf16, vendors' data sheets


def peak_flops(device: torch.device) -> float | None:
    """Floating-point operations per second that MFU is measured against; None where the device is not in the table."""
    import torch

    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)


def device_memory(device: torch.device) -> int:
    """Bytes of an accelerator's own memory."""
    import torch

    return torch.get_device_module(device).mem_get_info(device)[1]


def group_options(backend: str, max_ctas: int):
    """Options of a process group whose collectives may hold at most max_ctas thread blocks, and so as many SMs, on NCCL; None
    elsewhere or for 0. An environment variable would cap the node group as well."""
    if backend != "nccl" or not max_ctas:
        return None
    import torch.distributed as dist

    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = max_ctas
    return options


def setup(where: Place, timeout_s: float = 1800) -> None:
    """Join the process group; a collective that waits longer than timeout_s seconds fails. Sets CPU threads.

    Raises ConfigError when the environment names no meeting point for more than one rank.
    """
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    # OMP_NUM_THREADS may be a list, one number per nesting level
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if threads and (not threads.isdecimal() or int(threads) < 1):
        raise ConfigError(f"OMP_NUM_THREADS={threads!r} is not a number of threads >= 1; unset it or correct it")
    if threads:
        torch.set_num_threads(int(threads))
    options = {"backend": where.backend, "timeout": timedelta(seconds=timeout_s)}
    if where.device.type == "cpu":
        keep_freed_memory()
    if where.device.index is not None:
        torch.accelerator.set_device_index(where.device.index)
        if where.backend == "nccl":  # it connects at once; groups of another backend that inherit this may not know the device
            options["device_id"] = where.device
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if where.world == 1 and missing:
        # No peers, so no port: two single-rank runs on one machine never meet.
        options.update(store=dist.HashStore(), rank=0, world_size=1)
    elif missing:
        raise ConfigError(f"WORLD_SIZE={where.world}, but {missing[0]} is not set; start with launch.py or torchrun")
    dist.init_process_group(**options)


def keep_freed_memory() -> None:
    """Lets the C library keep what large tensors have freed for the next ones, instead of having the kernel zero new pages each
    time: half the step time at width 512 (LOG.md). Where there is no glibc nothing happens."""
    m_trim_threshold, m_mmap_threshold = -1, -3  # of malloc.h
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(m_trim_threshold, 2**31 - 1)
        libc.mallopt(m_mmap_threshold, 2**30)


RANK_VARS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
             "MASTER_PORT")


def without_ranks() -> dict[str, str]:
    """This environment for a process that is no rank: it has nobody to meet."""
    dropped = (*RANK_VARS, DEVICE_VAR, MESSAGES_VAR, watch.FOLDER_VAR, watch.NODE_VAR, watch.ATTEMPT_VAR, recover.BEGUN_VAR)
    return {name: value for name, value in os.environ.items() if name not in dropped}


def background(argv: list[str], output: str) -> subprocess.Popen:
    """Starts a command beside the run: one thread, the lowest priority, no accelerator; what it prints goes to the end of a file.

    It keeps the run's mark, so that it ends when the launcher does."""
    env = without_ranks() | ON_CPU | {"OMP_NUM_THREADS": "1"}
    with open(output, "a") as f:
        process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=f, stderr=subprocess.STDOUT)
    os.setpriority(os.PRIO_PROCESS, process.pid, 19)
    return process


def run(main) -> int:
    """Exit code of main(argv), where None counts as 0. A ConfigError becomes one line on stderr and EXIT_CONFIG.

    After any other exception a peer may be waiting inside a collective, where leaving the process group in good order could hang:
    one that the launcher should know, as memory or space were wanting, gets its own code; the others propagate.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C before StopRequest exists: end at once, without a traceback
    gc.freeze()  # what imports have made stays: no collection looks at it again, nor does the end of Python, for 0.4 s
    watch.PAGE.open()
    try:
        code = main(sys.argv[1:])
    except ConfigError as error:
        watch.PAGE.ends(code := EXIT_CONFIG)
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        elif MESSAGES_VAR in os.environ:  # mostly the same as rank 0's; the launcher shows it when rank 0 had none
            line = f"rank {os.environ['RANK']}: error: {error}".replace("\n", " ") + "\n"
            os.write(int(os.environ[MESSAGES_VAR]), line.encode(errors="surrogateescape"))
    except Exception as error:
        watch.PAGE.ends(code := code_of(error))
        if code == EXIT_FAILED:
            raise
        traceback.print_exc()
        return code
    if code not in (None, EXIT_OK, EXIT_STOPPED):
        watch.PAGE.ends(code)

    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    ignore_requests()
    return EXIT_OK if code is None else code


def ignore_requests() -> None:
    """Nothing is left to stop, and Python takes its handlers of signals away before the process is gone."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def code_of(error: BaseException) -> int:
    """Exit code for an exception: memory and space have their own. torch's allocator for the CPU raises a plain RuntimeError."""
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
            isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)):
        return EXIT_OUT_OF_MEMORY
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EXIT_NO_SPACE
    return EXIT_OUT_OF_MEMORY if isinstance(error, OSError) and error.errno == errno.ENOMEM else EXIT_FAILED


def end_of_job(walltime_min: float = 0.0) -> float | None:
    """Unix time at which the job will be killed, as the scheduler says, or after walltime_min minutes (0: unlimited) from its
    start, or the launcher's; the earlier. None: never."""
    variables = (os.environ.get(name, "") for name in ("SLURM_JOB_START_TIME", STARTED_VAR))
    started = next((float(text) for text in variables if text.isdecimal()), time.time())
    ends = [started + 60 * walltime_min] if walltime_min else []
    for name in ("SLURM_JOB_END_TIME", JOB_END_VAR):
        if (text := os.environ.get(name, "")).isdecimal():
            ends.append(float(text))
    return min(ends, default=None)


class StopRequest:
    """Turns the signals that ask for an end into a flag, so that the loop stops after a step, with a checkpoint. SIGUSR1 is
    one of them: it is what `sbatch --signal=USR1@600` sends before the end of a job. To save and go on, make the file
    out/<run>/save.

    `requested` is the name of the first such signal ("SIGTERM"), or None. A second SIGINT raises
    KeyboardInterrupt. SIGHUP stays ignored under nohup. Create it in the main thread.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._interrupts = 0
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        self.requested = self.requested or signal.Signals(number).name
        watch.PAGE.asked(number)
        self._interrupts += number == signal.SIGINT
        if number == signal.SIGINT and self._interrupts > 1:
            raise KeyboardInterrupt


# ----------------------------------------------------------------------------------------------
# The launcher: what to start
# ----------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options of the launcher and the command after `--`, which is passed on untouched."""

    def positive(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
        return int(text)

    def duration(text: str) -> float:
        try:
            if 0 <= float(text) < float("inf"):
                return float(text)
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds >= 0")

    def whole(text: str) -> int:
        if not text.isdecimal():
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 0")
        return int(text)

    def pairs(names: list[str], kind: type, alone: str | None = None):
        """Parser of "name=number,name=number"; a number alone means the name `alone`."""
        def parse(text: str) -> dict:
            found = {}
            for item in text.split(","):
                name, _, value = item.rpartition("=")
                name = name or alone
                try:
                    found[name] = kind(value)
                except ValueError:
                    found[name] = -1
                if name not in names or not 0 <= found[name] < float("inf"):
                    raise argparse.ArgumentTypeError(f"{item!r} must be NAME=NUMBER with one of {', '.join(names)}")
            return found
        return parse

    number, seconds = pairs(list(recover.BUDGETS), int), pairs(list(recover.TIMEOUTS), float, "step")

    parser = argparse.ArgumentParser(
        prog="launch.py",
        usage="python launch.py [options] -- train.py --key=value ...",
        description="Start the ranks of a run on this machine, in an allocation, or through a queue.",
        allow_abbrev=False,
    )
    parser.add_argument("--nodes", type=positive,
                        help="nodes of a run; simulated where there is no scheduler (default: those of the "
                        "allocation, else 1)")
    parser.add_argument(
        "--ranks-per-node", type=positive, help=f"default: the accelerators present, {CPU_RANKS} where there are none"
    )
    parser.add_argument("--port", type=positive, help="TCP port where the ranks meet (default: a free one)")
    parser.add_argument("--threads", type=positive, help="CPU threads per rank (default: cores / ranks)")
    parser.add_argument("--spares", type=whole, default=0, help="nodes beyond --nodes, to put in for bad ones (default 0)")
    parser.add_argument("--retries", "--restarts", type=whole, help="restarts in all; 0: none (default: "
                        f"{recover.Limits.retries} for {', '.join(RESUMABLE)}, which go on from a checkpoint, 0 for others)")
    parser.add_argument("--timeout", type=seconds, help="seconds without progress that make a hang: of a step, or by phase as in "
                        f"step=60,init=600 (phases: {', '.join(recover.TIMEOUTS)}; default of a step: {recover.STEP_FACTOR:g} "
                        f"times the median of recent ones, at least {recover.STEP_FLOOR_S:g})")
    parser.add_argument("--budget", type=number, default={}, help="restarts per cause and day, as in hang=3,killed=5 "
                        f"(causes: {', '.join(recover.BUDGETS)})")
    parser.add_argument("--backoff", type=duration, default=recover.Limits.backoff_s, help="seconds before a restart (default "
                        f"{recover.Limits.backoff_s:g}); doubles while nothing comes of it")
    cluster.add_options(parser)
    split = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:split])
    command = argv[split + 1 :]
    if not command:
        parser.error("no script: put it behind `--`, as in `python launch.py -- train.py --steps=50`")
    if not command[0].startswith("-") and not os.path.isfile(command[0]):
        parser.error(f"no file {command[0]!r} to run, seen from {os.getcwd()}")
    return options, command


def count_accelerators() -> int:
    """Accelerators that torch would use here.

    Only torch knows (drivers, visibility variables, its own build), but importing it takes seconds, so it is asked
    only where a device file exists, and in a process of its own: the launcher stays single-threaded, so it can fork.
    """
    if not any(glob.glob(pattern) for pattern in DEVICE_FILES):
        return 0
    code = "import sys; sys.path.insert(0, sys.argv[1]); import launch; print(launch.accelerator()[2])"
    asked = subprocess.run(
        [sys.executable, "-c", code, os.path.dirname(os.path.abspath(__file__))], stdout=subprocess.PIPE, text=True
    )
    if asked.returncode:
        raise LaunchError("torch could not count the accelerators (see above); give --ranks-per-node")
    return int(asked.stdout.split()[-1])


def meeting_port(port: int | None) -> int:
    """The given TCP port if it is free, else a free one. Raises LaunchError."""
    dual = socket.has_dualstack_ipv6()  # torch listens on both families, so both must be free
    family, host = (socket.AF_INET6, "::") if dual else (socket.AF_INET, "0.0.0.0")
    try:
        with socket.create_server((host, port or 0), family=family, dualstack_ipv6=dual) as server:
            return server.getsockname()[1]
    except (OSError, OverflowError) as error:
        if port is None:
            raise LaunchError(f"no free TCP port on this machine ({error}); end other jobs or give --port") from None
        raise LaunchError(
            f"--port {port} cannot be used ({error}); leave --port out to take a free one, or end the process on it"
        ) from None


def reserve_port(port: int | None) -> socket.socket:
    """A socket bound to the given TCP port, or to a free one, that never listens: on Linux nobody else is then given the port,
    while rank 0, seconds later, can listen on it (both with SO_REUSEADDR). Raises LaunchError."""
    number, dual = meeting_port(port), socket.has_dualstack_ipv6()
    reserved = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if dual:
        reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        reserved.bind(("", number if port else 0))
    except OSError as error:
        raise LaunchError(f"TCP port {number} cannot be reserved ({error}); end other jobs or give --port") from None
    return reserved


def rank_environments(nodes: list[str], ranks_per_node: int, port: int, threads: int | None, mark: str) -> list[dict[str, str]]:
    """One environment per rank: torchrun's variables, CPU threads, the loopback interface for gloo, and the mark."""
    world = len(nodes) * ranks_per_node
    # What an outer torchrun left behind would change how init_process_group meets.
    base = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads:
        base["OMP_NUM_THREADS"] = base["MKL_NUM_THREADS"] = str(threads)
    base.setdefault("OMP_NUM_THREADS", str(max(1, cores // world)))
    base.setdefault("MKL_NUM_THREADS", base["OMP_NUM_THREADS"])
    if world > 1:
        base.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait take the cores of other ranks
    for name, value in MEMORY_VARS.items():
        base.setdefault(name, value)
    # Without it gloo looks up the host's own name, which on laptops may not resolve or change with the network.
    if loopback := [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]:
        base.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    base[RUN_VAR] = mark
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    base |= {"LOCAL_WORLD_SIZE": str(ranks_per_node), "GROUP_WORLD_SIZE": str(len(nodes))}
    return [
        base
        | {"RANK": str(rank), "GROUP_RANK": str(rank // ranks_per_node), watch.NODE_VAR: nodes[rank // ranks_per_node]}
        | {"LOCAL_RANK": str(rank % ranks_per_node), DEVICE_VAR: str(rank)}
        for rank in range(world)
    ]


# ----------------------------------------------------------------------------------------------
# The launcher: no process outlives it
#
# Three nets, since each has a hole: a rank dies with the launcher (Linux only), its process group is killed when
# it ends or the launcher dies, and at the end every process that carries the run's mark is killed (Linux only).
# ----------------------------------------------------------------------------------------------


def die_with_parent(libc: ctypes.CDLL, parent: int) -> None:
    """In a new rank, before exec: have Linux kill this process when the launcher is gone, however it went."""
    pr_set_pdeathsig = 1
    libc.prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the call
        os._exit(EXIT_FAILED)


ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": "none"}  # for ranks that are to run there, whatever the machine has


def kill_group(group: int) -> None:
    """SIGKILL to a rank and to all that it started in its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: PermissionError for a dead group
        os.killpg(group, signal.SIGKILL)


class Guard:
    """A process that waits for the end of the launcher, and kills and removes what a launcher killed by SIGKILL could not."""

    def __init__(self, mark: str, folders: list[Path], grace_s: float = 0.0) -> None:
        """grace_s: what is left may take so long to end by itself, before it is killed."""
        read_end, self.pipe = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self.pipe)
                self._watch(read_end, mark, folders, grace_s)
            finally:
                os._exit(0)
        os.close(read_end)

    def _watch(self, read_end: int, mark: str, folders: list[Path], grace_s: float) -> None:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        groups = set()
        with open(read_end) as lines:  # ends when the launcher does: nobody else holds the other end
            for line in lines:
                groups ^= {int(line)}
        for group in groups:
            kill_group(group)
        kill_marked(mark, grace_s)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

    def note(self, group: int) -> None:
        """Watch this process group; told a second time, stop watching it."""
        with contextlib.suppress(BrokenPipeError):  # someone killed the guard: the other nets are still there
            os.write(self.pipe, f"{group}\n".encode())

    def close(self) -> None:
        """The run is over: let it kill what is left, and wait for it."""
        os.close(self.pipe)
        os.waitpid(self.pid, 0)


# ----------------------------------------------------------------------------------------------
# The launcher: start, forward signals, wait
#
# We start the processes ourselves and not through torchrun, because torchrun turns every exit code of a rank into
# 1, and kills ranks 30 s after a SIGTERM although a checkpoint may be on its way to the disk.
# ----------------------------------------------------------------------------------------------


class Inbox:
    """Signals as data: none is lost, none interrupts the launcher in the middle of something."""

    def __init__(self) -> None:
        self.read_end, write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, lambda *_: None)

    def wait(self, seconds: float) -> list[signal.Signals]:
        """Signals that came, at once when there are some, else after that many seconds."""
        ready, _, _ = select.select([self.read_end], [], [], max(0.0, seconds))
        numbers = os.read(self.read_end, 4096) if ready else b""
        return [signal.Signals(n) for n in numbers if n != signal.SIGCHLD]


class Ranks:
    """The processes of one attempt on this machine."""

    def __init__(self, guard: Guard, mark: str, folder: Path, pages: Path, reserved: socket.socket | None = None) -> None:
        """mark: of all its processes; folder: takes the ranks' ends; pages: of the watchdog; reserved: see reserve_port."""
        self.guard, self.mark, self.folder, self.pages = guard, mark, folder, pages
        self.node_of: dict[int, str] = {}
        self.running: dict[int, subprocess.Popen] = {}
        self.ended: dict[int, int] = {}
        self.oom_kills_before = oom_kills()
        self.messages, self.reserved = tempfile.TemporaryFile(), reserved

    def start(self, command: list[str], environments: list[dict[str, str]]) -> None:
        """Start one process per environment."""
        die, messages = None, self.messages.fileno()
        if sys.platform == "linux":
            libc, parent = ctypes.CDLL(None), os.getpid()  # loaded before the fork

            def die() -> None:
                die_with_parent(libc, parent)

        for environment in environments:
            rank = int(environment["RANK"])
            process = subprocess.Popen(
                [sys.executable, *command],
                env=environment | {MESSAGES_VAR: str(messages)},
                stdin=subprocess.DEVNULL,  # ranks would steal one another's input
                pass_fds=(messages,),
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which forwards it once
                preexec_fn=die,  # safe here: the launcher has one thread
            )
            self.running[rank], self.node_of[rank] = process, environment[watch.NODE_VAR]
            self.guard.note(process.pid)

    def poll(self, seconds: float) -> bool:
        """Take the exit codes of the ranks that ended, and kill what they left in their process groups; True once all have."""
        until = time.monotonic() + seconds
        while True:
            for rank, process in [pair for pair in self.running.items() if pair[1].poll() is not None]:
                del self.running[rank]
                self.ended[rank] = process.returncode
                kill_group(process.pid)
                self.guard.note(process.pid)
                recover.write_exit(self.folder, rank, self.node_of[rank], process.returncode, self.pages,
                                   oom_kills() > self.oom_kills_before)
            if not self.running or time.monotonic() >= until:
                return not self.running
            time.sleep(0.01)

    def codes(self) -> dict[int, int]:
        """By rank, negative for a signal; of those that have ended."""
        return dict(self.ended)

    def send(self, number: signal.Signals) -> None:
        for process in self.running.values():
            process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL; returns when nothing is left."""
        for process in self.running.values():
            kill_group(process.pid)
        self.poll(KILL_PATIENCE_S)
        kill_marked(self.mark)
        if self.reserved:
            self.reserved.close()
        self.tell()

    def tell(self) -> None:
        """The first config error that a rank other than 0 has left, if rank 0 had none. Once."""
        if self.messages.closed or self.running:
            return
        told = self.said()
        if EXIT_CONFIG in self.ended.values() and self.ended.get(0) != EXIT_CONFIG and told:
            say(told)

    def said(self) -> str:
        """The first config error of a rank other than 0. Once."""
        self.messages.seek(0)
        told = self.messages.read().decode(errors="replace").splitlines()
        self.messages.close()
        return told[0] if told else ""


class Local:
    """Starts ranks on this machine, whose nodes are simulated: node0, node1, ..."""

    def __init__(self, nodes: int, ranks_per_node: int, port: int | None, threads: int | None, guard: Guard, mark: str) -> None:
        self.names, self.ranks_per_node = [f"node{n}" for n in range(nodes)], ranks_per_node
        self.port, self.threads, self.guard, self.mark, self.attempts = port, threads, guard, mark, 0

    def nodes(self) -> list[str]:
        return self.names

    def unusable(self) -> dict[str, str]:
        return {}

    def start(self, nodes: list[str], command: list[str], environment: dict[str, str], folder: Path) -> Ranks:
        """Raises LaunchError when there is no port for them to meet."""
        self.attempts += 1
        mark = f"{self.mark}.{self.attempts}."  # begins with the launch's
        reserved = reserve_port(self.port) if sys.platform == "linux" else None
        port = reserved.getsockname()[1] if reserved else meeting_port(self.port)
        environments = rank_environments(nodes, self.ranks_per_node, port, self.threads, mark)
        ranks = Ranks(self.guard, mark, folder, Path(environment[watch.FOLDER_VAR]), reserved)
        ranks.start(command, [e | environment for e in environments])
        return ranks

    def on_each(self, nodes: list[str], argv: list[str], timeout_s: float) -> dict[str, tuple[int, bytes]]:
        """Runs a command once per node, all at the same time: (exit code, output) of those that ended in time."""
        started = {node: subprocess.Popen(argv, env=without_ranks() | {watch.NODE_VAR: node}, stdin=subprocess.DEVNULL,
                                          stdout=subprocess.PIPE) for node in nodes}
        until, done = time.monotonic() + timeout_s, {}
        for node, process in started.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, _ = process.communicate(timeout=max(0.1, until - time.monotonic()))
                done[node] = process.returncode, output
            if node not in done:
                process.kill()
                process.communicate()
        return done


def oom_kills() -> int:
    """How many processes the kernel has ended for want of memory since it started; 0 where it does not tell."""
    with contextlib.suppress(OSError), open("/proc/vmstat") as lines:
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0


def memory_folder() -> Path:
    """Where files lie in memory, if there is such a place."""
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())


def run_task(folder: Path, command: list[str]) -> int:
    """This process as a task of srun or mpiexec: starts its one rank, passes signals on to it, writes how it ended, and leaves
    nothing behind. Always 0, or srun or mpiexec would end the other tasks; but where that cannot be written, EXIT_NO_SPACE."""
    environment = cluster.task_environment()
    pages, mark = Path(environment[watch.FOLDER_VAR]), environment[RUN_VAR]
    inbox = Inbox()
    guard = Guard(mark, [])
    ranks = Ranks(guard, mark, folder, pages)
    try:
        ranks.start(command, [environment])
        while not ranks.poll(0):
            for number in inbox.wait(60):
                ranks.send(number)
        if said := ranks.said():
            (folder / f"said-{environment['RANK']}.txt").write_text(said + "\n")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return EXIT_NO_SPACE  # nowhere else can it be said
    finally:
        ranks.kill()
        guard.close()
        with contextlib.suppress(OSError):  # until the node's last task has ended it is not empty
            pages.rmdir()
            pages.parent.rmdir()
    return EXIT_OK


def supervision(options: argparse.Namespace, command: list[str], folder: Path, pages: Path) -> recover.Options:
    """How the run is watched and restarted. A program that tells no progress is neither, unless it is asked for."""
    resumable = os.path.basename(command[0]) in RESUMABLE
    retries = options.retries if options.retries is not None else recover.Limits.retries if resumable else 0
    limits = recover.Limits(retries, recover.BUDGETS | options.budget, backoff_s=options.backoff)
    watched = resumable or options.timeout is not None or bool(options.retries)
    timeouts = recover.TIMEOUTS | (options.timeout or {})
    return recover.Options(options.nodes, folder, pages, limits, timeouts, watched, end_of_job())


def place_of(options: argparse.Namespace, argv: list[str]) -> tuple[str, cluster.Site] | int:
    """(scheduler of the allocation that this is, its site), or the exit code of a job's submission. Fills in what options leave
    to the place. Raises LaunchError."""
    site, asked, named = cluster.site_of(options), options.scheduler, options.nodes is not None
    if asked == "auto" and named:
        asked = site.scheduler
    asked = site.scheduler if options.dry and asked == "auto" else asked
    if options.dry and asked in ("slurm", "pbs"):
        scheduler, inside = asked, False  # its script can be read anywhere
    else:
        scheduler, inside = cluster.detect(asked, submitting=named)
    if options.dry and scheduler == "none":
        raise LaunchError("--dry prints a job script, but nothing says of which scheduler; add --site=NAME or "
                          "--scheduler=slurm|pbs, and --nodes")
    if scheduler != "none" and not inside:
        options.nodes = options.nodes or 1
        return cluster.submit(scheduler, site, options, argv)
    options.ranks_per_node = options.ranks_per_node or site.ranks_per_node
    if not options.ranks_per_node:
        present, simulated = count_accelerators(), 1 if inside else options.nodes or 1
        options.ranks_per_node = max(1, present // simulated) if present else CPU_RANKS
    if not inside:
        options.nodes = options.nodes or 1
        check_room(options.nodes + options.spares, options.ranks_per_node)
        meeting_port(options.port)
    return scheduler, site


def check_room(nodes: int, ranks_per_node: int) -> None:
    """Raises LaunchError where so many ranks do not fit into this machine: mostly it is not the one that was meant."""
    has, needs = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), nodes * ranks_per_node * RANK_BYTES
    if needs > has:
        raise LaunchError(f"--nodes {nodes}: without a scheduler nodes are simulated on this machine, and "
                          f"{nodes * ranks_per_node:,} processes take {needs / 2**30:,.0f} GiB at least of its {has / 2**30:,.0f}; use "
                          "fewer, or start where sbatch or qsub can be found (--scheduler=slurm or pbs says why it is not)")


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code of the run."""
    argv = sys.argv[1:] if argv is None else argv
    options, command = parse(argv)
    try:
        if options.task:
            return run_task(Path(options.task), command)
        place = place_of(options, argv)
    except LaunchError as error:
        say(f"error: {error}")
        return EXIT_CONFIG
    if isinstance(place, int):
        return place
    scheduler, site = place
    os.environ.setdefault(STARTED_VAR, str(int(time.time())))  # nested, or started again: the outer one's
    name = f"{os.getpid()}-{time.time_ns()}"
    mark = f"{os.environ.get(RUN_VAR, '')}/{name}"  # nested: inside the outer run's mark
    folder = Path(tempfile.mkdtemp(prefix="nano1t-")) if scheduler == "none" else cluster.shared_folder(command, name)
    pages = memory_folder() / f"nano1t-{name}"
    inbox = Inbox()
    guard = Guard(mark, [folder, pages], 0.0 if scheduler == "none" else SRUN_S)
    try:
        if scheduler == "none":
            local = Local(options.nodes + options.spares, options.ranks_per_node, options.port, options.threads, guard, mark)
            return recover.supervise(local, command, supervision(options, command, folder, pages), inbox)[0]
        starter = cluster.starter(scheduler, site, options, mark)
        with cluster.chained(scheduler, options, command) as chain:
            cluster.prepare(starter, options, command)
            settings = supervision(options, command, folder, pages)
            settings.check = cluster.node_check(starter) if options.node_check else None
            chain.code, chain.elsewhere = recover.supervise(starter, command, settings, inbox)
        return chain.code
    except LaunchError as error:
        say(f"error: {error}")
        return EXIT_CONFIG
    finally:
        guard.close()


if __name__ == "__main__":
    ended = main()
    ignore_requests()
    sys.exit(ended)
