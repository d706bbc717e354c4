"""A real Slurm of four nodes on this one machine, with ports, keys and directories of its own."""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

CONF = """ClusterName=nano1t
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={dir}/munge.sock
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
SlurmctldPidFile={dir}/ctld.pid
SlurmdPidFile={dir}/%n.pid
SlurmdSpoolDir={dir}/spool-%n
StateSaveLocation={dir}/state
SlurmctldLogFile={dir}/ctld.log
SlurmdLogFile={dir}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
ReturnToService=2
SlurmdParameters=config_overrides
MpiDefault=none
KillWait=2
NodeName=n[1-4] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=8 RealMemory=4000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "salloc")


def missing() -> str:
    """What of Slurm is not installed."""
    return ", ".join(name for name in DAEMONS if not find(name))


def find(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")


class VirtualSlurm:
    def __init__(self):
        self.dir = Path(tempfile.mkdtemp(prefix="nano1t-slurm-"))
        self.dir.chmod(0o755)  # munge wants its socket to be reachable for all
        self.processes: dict[str, subprocess.Popen] = {}
        first = free_ports(5)
        text = CONF.format(host=socket.gethostname(), user=user(), dir=self.dir, ports=[first], first=first + 1, last=first + 4)
        (self.dir / "slurm.conf").write_text(text)
        key = self.dir / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for name in ("state", *(f"spool-n{n}" for n in range(1, 5))):
            (self.dir / name).mkdir()
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "NANO1T"))}
        self.env |= {"SLURM_CONF": str(self.dir / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def start(self):
        files = {name: str(self.dir / f"munge.{name}") for name in ("sock", "key", "pid", "log", "seed")}
        self.daemon("munged", "-F", f"--socket={files['sock']}", f"--key-file={files['key']}", f"--pid-file={files['pid']}",
                    f"--log-file={files['log']}", f"--seed-file={files['seed']}", "--num-threads=10")
        self.until(lambda: Path(files["sock"]).exists(), "munged")
        self.daemon("slurmctld", "-D")
        for n in range(1, 5):
            self.daemon("slurmd", "-D", "-N", f"n{n}")
        self.until(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D", check=False).strip() == "4", "four idle nodes")

    def daemon(self, name: str, *argv: str):
        libc = ctypes.CDLL(None)
        self.processes[argv[-1] if name == "slurmd" else name] = subprocess.Popen(
            [find(name), *argv], env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=lambda: libc.prctl(1, signal.SIGTERM))  # ends with the tests

    def stop(self):
        for job in self.jobs():
            self.run("scancel", job, check=False)
        with contextlib.suppress(AssertionError):
            self.until(lambda: not self.jobs(), "the end of all jobs")
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.dir, ignore_errors=True)

    def run(self, *argv, cwd=None, check=True, timeout=120) -> str:
        """Runs a command of a user of this Slurm; its output."""
        done = subprocess.run([str(a) for a in argv], cwd=cwd, env=self.env, stdin=subprocess.DEVNULL, capture_output=True,
                              text=True,
                              timeout=timeout)
        assert not check or done.returncode == 0, f"{argv}: code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def jobs(self) -> list[str]:
        return self.run("squeue", "-h", "-o", "%i", check=False).split()

    def wait(self, job: str, patience_s: float = 120):
        """Until a job has ended."""
        self.until(lambda: job not in self.jobs(), f"the end of job {job}", patience_s)

    def until(self, condition, what: str, patience_s: float = 60):
        deadline = time.monotonic() + patience_s
        while not (value := condition()):
            assert time.monotonic() < deadline, f"waited {patience_s} s for {what}"
            time.sleep(0.05)
        return value


def user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def free_ports(count: int) -> int:
    """The first of so many free ports in a row, below those that systems give to outgoing connections."""
    for first in range(13000 + os.getpid() % 4000, 19000):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for i in range(count):
                stack.enter_context(socket.create_server(("127.0.0.1", first + i)))
            return first
    raise OSError("no free ports")
