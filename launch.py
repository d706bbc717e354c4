"""Starts the ranks of a run, and tells each rank where it runs.

    python launch.py -- train.py --steps=50                                    4 CPU ranks, or one per accelerator
    python launch.py --nodes 2 --ranks-per-node 2 -- train.py --size=debug     two simulated nodes of two ranks
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
import glob
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import cluster
from errors import ConfigError

if TYPE_CHECKING:  # the command line must start at once, so torch is imported only where a rank needs it
    import torch

EXIT_OK, EXIT_FAILED, EXIT_CONFIG = 0, 1, 2
EXIT_UNHEALTHY = 70  # a check found what must not be: the last line of the log names it (EX_SOFTWARE)
EXIT_NOT_SAVED = 74  # the last checkpoint could not be written, older ones are untouched (EX_IOERR)
EXIT_DIVERGED = 65  # too many steps in a row were not finite or far off: see out/<run>/diverged.txt (EX_DATAERR)
EXIT_STOPPED = 75  # stopped on request after a checkpoint: run again to continue (EX_TEMPFAIL of sysexits.h)

CPU_RANKS = 4  # ranks per node where there is no accelerator: enough for a 2 x 2 grid
PEER_GRACE_S = 2.0  # after a rank failed, its peers mostly fail by themselves, and say why
TERM_GRACE_S = 10.0  # from SIGTERM to SIGKILL for the peers of a failed rank: they may wait for it forever
ECHO_S = 0.5  # the same signal within this time is one request: timeout(1) and make signal both us and our group
MEMORY_SIGNALS = (signal.SIGKILL, signal.SIGBUS, signal.SIGSEGV)  # how a process ends when the host has no more memory
OUT_OF_MEMORY = ("; meanwhile the kernel ended processes because the host was out of memory: see out/hosts.jsonl for what was "
                 "planned, use fewer ranks or more nodes, or lower --offload_fraction")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

# Variables between launcher and ranks, beyond those of torchrun
DEVICE_VAR = "NANO1T_DEVICE"  # accelerator index: simulated nodes share a machine, so LOCAL_RANK repeats
MESSAGES_VAR = "NANO1T_MESSAGES_FD"  # file that takes the config errors of ranks other than 0
STARTED_VAR = "NANO1T_STARTED"  # Unix time at which the launcher started
JOB_MARGIN_S = 20.0  # that a job's end is kept off beyond a step and a checkpoint: the way out, and a slow file system
RUN_VAR = "NANO1T_RUN"  # marks every process of this run, those that left their process group too


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

    from model import ConfigError

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

    from model import ConfigError

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
    return {name: value for name, value in os.environ.items() if name not in (*RANK_VARS, DEVICE_VAR, MESSAGES_VAR)}


def background(argv: list[str], output: str) -> subprocess.Popen:
    """Starts a command beside the run: one thread, the lowest priority, no accelerator; what it prints goes to the end of a file.

    It keeps the run's mark, so that it ends when the launcher does."""
    env = without_ranks() | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": "none"}
    with open(output, "a") as f:
        process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=f, stderr=subprocess.STDOUT)
    os.setpriority(os.PRIO_PROCESS, process.pid, 19)
    return process


def run(main) -> int:
    """Exit code of main(argv), where None counts as 0. A ConfigError becomes one line on stderr and EXIT_CONFIG.

    Any other exception propagates: then a peer may be waiting inside a collective, where leaving the process
    group in good order could hang.
    """
    from model import ConfigError

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C before StopRequest exists: end at once, without a traceback
    try:
        code = main(sys.argv[1:])
    except ConfigError as error:
        code = EXIT_CONFIG
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        elif MESSAGES_VAR in os.environ:  # mostly the same as rank 0's; the launcher shows it when rank 0 had none
            line = f"rank {os.environ['RANK']}: error: {error}".replace("\n", " ") + "\n"
            os.write(int(os.environ[MESSAGES_VAR]), line.encode(errors="surrogateescape"))

    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    return EXIT_OK if code is None else code


def end_of_job(walltime_min: float = 0.0) -> float | None:
    """Unix time at which the job will be killed, as Slurm says, or after walltime_min minutes (0: unlimited) from its start, or
    the launcher's; the earlier. None: never."""
    variables = (os.environ.get(name, "") for name in ("SLURM_JOB_START_TIME", STARTED_VAR))
    started = next((float(text) for text in variables if text.isdecimal()), time.time())
    ends = [started + 60 * walltime_min] if walltime_min else []
    if (text := os.environ.get("SLURM_JOB_END_TIME", "")).isdecimal():
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
        self._interrupts += number == signal.SIGINT
        if number == signal.SIGINT and self._interrupts > 1:
            raise KeyboardInterrupt


# ----------------------------------------------------------------------------------------------
# The launcher: what to start
# ----------------------------------------------------------------------------------------------


class LaunchError(Exception):
    """A setting of the launcher that cannot work; the message names it, its value and the fix."""


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options of the launcher and the command after `--`, which is passed on untouched."""

    def positive(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
        return int(text)

    parser = argparse.ArgumentParser(
        prog="launch.py",
        usage="python launch.py [options] -- train.py --key=value ...",
        description="Start the ranks of a run on this machine.",
        allow_abbrev=False,
    )
    parser.add_argument("--nodes", type=positive, help="nodes; simulated where there is no scheduler (default 1, or the allocation's)")
    parser.add_argument("--spares", type=int, default=0, help="further nodes that wait to replace one that fails")
    parser.add_argument(
        "--ranks-per-node", type=positive, help=f"default: the accelerators present, {CPU_RANKS} where there are none"
    )
    parser.add_argument("--port", type=positive, help="TCP port where the ranks meet (default: a free one)")
    parser.add_argument("--threads", type=positive, help="CPU threads per rank (default: cores / ranks)")
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
    files = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd", "/dev/dri/renderD*")
    if not any(glob.glob(pattern) for pattern in files):
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


def rank_environments(nodes: int, ranks_per_node: int, port: int, threads: int | None) -> list[dict[str, str]]:
    """One environment per rank: torchrun's variables, CPU threads, and the loopback interface for gloo."""
    world = nodes * ranks_per_node
    # What an outer torchrun left behind would change how init_process_group meets.
    base = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads:
        base["OMP_NUM_THREADS"] = base["MKL_NUM_THREADS"] = str(threads)
    base.setdefault("OMP_NUM_THREADS", str(max(1, cores // world)))
    base.setdefault("MKL_NUM_THREADS", base["OMP_NUM_THREADS"])
    if world > 1:
        base.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait take the cores of other ranks
    # Without it gloo looks up the host's own name, which on laptops may not resolve or change with the network.
    if loopback := [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]:
        base.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    base.setdefault(STARTED_VAR, str(int(time.time())))  # nested, or started again: the outer one's
    base[RUN_VAR] = f"{base.get(RUN_VAR, '')}/{os.getpid()}-{time.time_ns()}"  # nested: inside the outer run's mark
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    base |= {"LOCAL_WORLD_SIZE": str(ranks_per_node), "GROUP_WORLD_SIZE": str(nodes)}
    return [
        base
        | {"RANK": str(rank), "GROUP_RANK": str(rank // ranks_per_node)}
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


def kill_group(group: int) -> None:
    """SIGKILL to a rank and to all that it started in its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: PermissionError for a dead group
        os.killpg(group, signal.SIGKILL)


class Guard:
    """A process that waits for the end of the launcher, and kills what a launcher killed by SIGKILL could not."""

    def __init__(self, mark: str) -> None:
        read_end, self.pipe = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self.pipe)
                self._watch(read_end, mark)
            finally:
                os._exit(0)
        os.close(read_end)

    def _watch(self, read_end: int, mark: str) -> None:
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
        cluster.kill_marked(mark)

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
    """The processes of a run: start them, pass signals on, wait for them, and keep the first failure."""

    def __init__(self, inbox: Inbox, guard: Guard) -> None:
        self.inbox, self.guard = inbox, guard
        self.running: dict[int, subprocess.Popen] = {}
        self.codes: dict[int, int] = {}
        self.failed: int | None = None  # the first rank that failed
        self.failed_at = 0.0  # seconds on the monotonic clock
        self.oom_kills_before = oom_kills()
        self.sent: dict[signal.Signals, float] = {}  # stop signals passed on, and when (monotonic seconds)

    def start(self, command: list[str], environments: list[dict[str, str]], messages: int) -> None:
        """Start one process per environment; `messages` is a file descriptor that they inherit."""
        die = None
        if sys.platform == "linux":
            libc, parent = ctypes.CDLL(None), os.getpid()  # loaded before the fork

            def die() -> None:
                die_with_parent(libc, parent)

        for environment in environments:
            process = subprocess.Popen(
                [sys.executable, *command],
                env=environment | {MESSAGES_VAR: str(messages)},
                stdin=subprocess.DEVNULL,  # ranks would steal one another's input
                pass_fds=(messages,),
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which forwards it once
                preexec_fn=die,  # safe here: the launcher has one thread
            )
            self.running[int(environment["RANK"])] = process
            self.guard.note(process.pid)

    def wait(self) -> None:
        """Return when every rank has ended."""
        terminated = killed = False
        while self.running:
            since = time.monotonic() - self.failed_at if self.failed is not None else 0.0
            if since >= PEER_GRACE_S and not terminated:
                terminated = True
                self.send(signal.SIGTERM)
            if since >= PEER_GRACE_S + TERM_GRACE_S and not killed:
                killed = True
                self.kill()
            due = PEER_GRACE_S + (TERM_GRACE_S if terminated else 0.0) - since
            for number in self.inbox.wait(due if self.failed is not None and not killed else 60.0):
                self.on_signal(number)
            self.collect()

    def on_signal(self, number: signal.Signals) -> None:
        """Forward each stop signal once; the second SIGINT or SIGTERM kills."""
        urgent = {signal.SIGINT, signal.SIGTERM}
        now = time.monotonic()
        if number in self.sent and now < self.sent[number] + ECHO_S:
            return
        if number in urgent and self.sent.keys() & urgent:
            say(f"second request to stop ({number.name}): killing {len(self.running)} ranks")
            self.kill()
        elif number not in self.sent:
            say(f"{number.name} passed on to {len(self.running)} ranks, to stop after a checkpoint; a second one kills")
            self.sent[number] = now
            self.send(number)

    def send(self, number: signal.Signals) -> None:
        for process in self.running.values():
            process.send_signal(number)

    def kill(self) -> None:
        for process in self.running.values():
            kill_group(process.pid)

    def reap(self) -> list[int]:
        """Take the exit codes of the ranks that ended, and kill what they left in their process groups."""
        ended = {rank: process for rank, process in self.running.items() if process.poll() is not None}
        for rank, process in ended.items():
            del self.running[rank]
            self.codes[rank] = process.returncode
            kill_group(process.pid)
            self.guard.note(process.pid)
        return list(ended)

    def collect(self) -> None:
        """Take the exit codes of the ranks that ended, and tell the first failure."""
        ended = self.reap()
        failures = [rank for rank in ended if self.codes[rank] not in (EXIT_OK, EXIT_STOPPED)]
        if failures and self.failed is None:
            # Of those that ended at the same time, one killed by a signal is the cause, and a plain 1 is mostly
            # the consequence (a lost connection).
            self.failed = min(failures, key=lambda rank: (self.codes[rank] >= 0, self.codes[rank] == EXIT_FAILED, rank))
            self.failed_at = time.monotonic()
            code = self.codes[self.failed]
            if code < 0:
                say(f"rank {self.failed} was killed by signal {-code} ({signal_name(-code)})"
                    + (OUT_OF_MEMORY if -code in MEMORY_SIGNALS and oom_kills() > self.oom_kills_before else ""))
            elif code != EXIT_CONFIG:
                say(f"rank {self.failed} ended with exit code {code}")

    def exit_code(self) -> int:
        """That of the first rank that failed (128 + signal for a killed one), else EXIT_STOPPED if one stopped."""
        if self.failed is not None:
            code = self.codes[self.failed]
            return 128 - code if code < 0 else code
        return EXIT_STOPPED if EXIT_STOPPED in self.codes.values() else EXIT_OK


def oom_kills() -> int:
    """How many processes the kernel has ended for want of memory since it started; 0 where it does not tell."""
    with contextlib.suppress(OSError), open("/proc/vmstat") as lines:
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0


def signal_name(number: int) -> str:
    return signal.Signals(number).name if number in list(signal.Signals) else "real-time signal"


def say(text: str) -> None:
    """One line on stderr; a closed terminal must not keep us from ending the ranks."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def run_task(folder: Path, command: list[str]) -> int:
    """This process as a task of srun or mpiexec: starts its one rank, passes signals on, leaves nothing behind, and writes how the
    rank ended. Always 0, or the others' tasks would be ended by srun or mpiexec."""
    environment = cluster.task_environment()
    rank = int(environment["RANK"])
    inbox = Inbox()
    guard = Guard(environment[RUN_VAR])
    ranks = Ranks(inbox, guard)
    with tempfile.TemporaryFile() as messages:
        try:
            ranks.start(command, [environment], messages.fileno())
            while ranks.running:
                for number in inbox.wait(60):
                    ranks.send(number)
                ranks.reap()
        finally:
            ranks.kill()
            guard.close()
            messages.seek(0)
            said = messages.read().decode(errors="replace").strip()
            cluster.note_exit(folder, rank, ranks.codes.get(rank, -signal.SIGKILL), said)
    return EXIT_OK


def start_on_cluster(scheduler: str, options: argparse.Namespace, command: list[str]) -> int:
    """Inside an allocation."""
    site = cluster.site_of(options)
    per_node = options.ranks_per_node or site.ranks_per_node or count_accelerators() or CPU_RANKS
    starter = {"slurm": cluster.Slurm, "pbs": cluster.Pbs}[scheduler](site, per_node)
    cluster.note_job_end()
    folder = Path("out", cluster.run_name(command))
    chain = cluster.Chain(scheduler, options, folder)
    nodes = starter.nodes()
    inbox = Inbox()
    step = starter.start(nodes[: options.nodes], command, {}, folder / "attempts" / "0")
    while not step.poll(0):
        for number in inbox.wait(1.0):
            step.send(number)
    codes = step.codes()
    say(f"{codes} {step.said()}")
    code = max(codes.values(), default=1)
    chain.end(code)
    return code


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code of the run."""
    argv = sys.argv[1:] if argv is None else argv
    options, command = parse(argv)
    if options.task:
        return run_task(Path(options.task), command)
    try:
        scheduler, inside = cluster.detect(options.scheduler, submitting=options.nodes is not None)
        if scheduler != "none" and not inside and options.nodes:
            site = cluster.site_of(options)
            options.ranks_per_node = options.ranks_per_node or site.ranks_per_node or CPU_RANKS
            return cluster.submit(scheduler, site, options, options.nodes + options.spares, argv)
        if inside:
            return start_on_cluster(scheduler, options, command)
    except (ConfigError, LaunchError) as error:
        say(f"error: {error}")
        return EXIT_CONFIG
    options.nodes = options.nodes or 1
    try:
        ranks_per_node = options.ranks_per_node
        if ranks_per_node is None:
            present = count_accelerators()
            ranks_per_node = max(1, present // options.nodes) if present else CPU_RANKS
        port = meeting_port(options.port)
    except LaunchError as error:
        say(f"error: {error}")
        return EXIT_CONFIG
    environments = rank_environments(options.nodes, ranks_per_node, port, options.threads)
    inbox = Inbox()
    guard = Guard(environments[0][RUN_VAR])
    ranks = Ranks(inbox, guard)
    with tempfile.TemporaryFile() as messages:
        try:
            ranks.start(command, environments, messages.fileno())
            ranks.wait()
        finally:
            ranks.kill()
            guard.close()
        messages.seek(0)
        told = messages.read().decode(errors="replace").splitlines()
    if EXIT_CONFIG in ranks.codes.values() and ranks.codes.get(0) != EXIT_CONFIG and told:
        say(told[0])
    return ranks.exit_code()


if __name__ == "__main__":
    sys.exit(main())
