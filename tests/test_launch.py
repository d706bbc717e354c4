"""The launcher with real processes. The scripts it starts avoid torch where they can: they start in 20 ms."""

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

import launch

ROOT = Path(__file__).parent.parent
LAUNCH = str(ROOT / "launch.py")
PATIENCE_S = 30  # for what takes well under a second on an idle machine
NAP = "import time; time.sleep(600)"


def script(tmp_path, source):
    path = tmp_path / "child.py"
    path.write_text("import json, os, signal, subprocess, sys, time\nRANK = os.environ.get('RANK')\n" + source)
    return str(path)


def command(path, *options, args=()):
    options = ("--nodes", "2", "--ranks-per-node", "2", *options)
    return [sys.executable, LAUNCH, *options, "--", path, *args]


def environment(**changes):
    """Ours, without what a launcher or torchrun around the tests may have set."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", launch.DEVICE_VAR)
    dropped += ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME", launch.MESSAGES_VAR)
    base = {name: value for name, value in os.environ.items() if name not in dropped}
    return base | {"PYTHONPATH": str(ROOT)} | changes


def finish(path, *options, args=(), **changes):
    """Run to the end: exit code, stdout, stderr."""
    done = subprocess.run(
        command(path, *options, args=args), capture_output=True, timeout=PATIENCE_S * 2, env=environment(**changes)
    )
    return done.returncode, done.stdout, done.stderr.decode(errors="replace")


@contextlib.contextmanager
def started(path, *options):
    process = subprocess.Popen(
        command(path, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def running(pid):
    """Whether the process exists; a zombie that nobody collected has ended."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        with contextlib.suppress(OSError):
            return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def until(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.02)
    return value


def pids(folder, count=1):
    """Process ids that the children wrote as names of empty files, once there are that many."""
    until(lambda: len(list(folder.glob("*.pid"))) >= count, f"{count} processes to start")
    return [int(path.stem) for path in folder.glob("*.pid")]


def all_gone(ids):
    until(lambda: not any(running(pid) for pid in ids), f"the end of {ids}")


NOTE_PID = "open(os.path.join(os.path.dirname(__file__), f'{os.getpid()}.pid'), 'w').close()\n"


# ---- starting


def test_environment_of_two_nodes_with_two_ranks(tmp_path):
    path = script(tmp_path, "open(__file__ + RANK, 'w').write(json.dumps(dict(os.environ)))")
    assert finish(path, TORCHELASTIC_USE_AGENT_STORE="True")[0] == 0
    seen = [json.loads(Path(f"{path}{rank}").read_text()) for rank in range(4)]
    assert [e["RANK"] for e in seen] == ["0", "1", "2", "3"]
    assert [e["LOCAL_RANK"] for e in seen] == ["0", "1", "0", "1"]
    assert [e["GROUP_RANK"] for e in seen] == ["0", "0", "1", "1"]
    assert {(e["WORLD_SIZE"], e["LOCAL_WORLD_SIZE"], e["MASTER_ADDR"]) for e in seen} == {("4", "2", "127.0.0.1")}
    assert len({e["MASTER_PORT"] for e in seen}) == 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert {e["OMP_NUM_THREADS"] for e in seen} == {e["MKL_NUM_THREADS"] for e in seen} == {str(max(1, cores // 4))}
    assert all(e["GLOO_SOCKET_IFNAME"] in ("lo", "lo0") for e in seen)
    assert not any("TORCHELASTIC_USE_AGENT_STORE" in e for e in seen)


def test_user_choices_of_threads_and_interface_win(tmp_path):
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    path = script(tmp_path, f"if RANK == '0': print(*[os.environ[name] for name in {names}])")
    assert finish(path, OMP_NUM_THREADS="3", GLOO_SOCKET_IFNAME="ib0")[1].split() == [b"3", b"3", b"ib0"]
    assert finish(path, "--threads", "5", OMP_NUM_THREADS="3")[1].split()[:2] == [b"5", b"5"]


def test_default_is_one_rank_per_accelerator_or_four(tmp_path, monkeypatch):
    path = script(tmp_path, "if RANK == '0': print(os.environ['WORLD_SIZE'], os.environ['LOCAL_WORLD_SIZE'])")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    line = [sys.executable, LAUNCH, "--", path]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S * 2, env=environment())
    assert done.stdout.split() == [str(launch.count_accelerators() or launch.CPU_RANKS)] * 2


def test_torch_is_asked_for_accelerators_where_there_are_device_files(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(launch.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    assert launch.count_accelerators() == launch.accelerator()[2]
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(launch.LaunchError, match="--ranks-per-node"):
        launch.count_accelerators()


def test_arguments_arrive_unchanged(tmp_path):
    args = ["--run=two words", "it's", 'say "x"', "$HOME", "`id`", "a\nb", "", "größe=✓", "--", "*", "\\n", "--port"]
    path = script(tmp_path, "open(__file__ + RANK, 'w').write(json.dumps(sys.argv[1:]))")
    assert finish(path, args=args)[0] == 0
    for rank in range(4):
        assert json.loads(Path(f"{path}{rank}").read_text()) == args


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
def test_make_passes_quoted_arguments_and_fails_with_the_command(tmp_path):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / ".installed").touch()
    python = venv / "bin" / "python"
    python.write_text('#!/bin/sh\nfor arg; do printf "%s\\n" "[$arg]"; done\nexit 75\n')
    python.chmod(0o755)
    make = ["make", "-s", "-C", str(ROOT), f"VENV={venv}", "ARGS=--run='two words' --text=\"it's $$x\""]
    done = subprocess.run([*make, "train"], capture_output=True, text=True, env=environment(x="5"))
    assert [line for line in done.stdout.splitlines() if line.startswith("[")] == [
        *("[launch.py]", "[--]", "[train.py]", "[--size=debug]", "[--run=two words]", "[--text=it's 5]")
    ]
    assert done.returncode != 0 and "Error 75" in done.stderr
    done = subprocess.run([*make, "NODES=2", "RANKS=3", "train"], capture_output=True, text=True, env=environment())
    assert "[launch.py]\n[--nodes]\n[2]\n[--ranks-per-node]\n[3]\n[--]\n" in done.stdout


def test_output_that_is_not_utf8_passes(tmp_path):
    path = script(tmp_path, "if RANK == '3': os.write(1, b'\\xff\\xfe\\x80\\n')")
    assert finish(path)[:2] == (0, b"\xff\xfe\x80\n")


# ---- what cannot start


def test_taken_port_is_an_error_before_any_process_starts(tmp_path):
    path = script(tmp_path, NOTE_PID)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        began = time.monotonic()
        code, _, errors = finish(path, "--port", str(port))
    assert code == launch.EXIT_CONFIG
    assert f"--port {port}" in errors and "leave --port out" in errors and "Traceback" not in errors
    assert time.monotonic() - began < 10
    assert not list(tmp_path.glob("*.pid"))


def test_given_port_is_used_and_free_again(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    source = "import socket\nif RANK == '0': s = socket.create_server(('', int(os.environ['MASTER_PORT'])))\n"
    path = script(tmp_path, source + "if RANK == '0': print(s.getsockname()[1])")
    for _ in range(2):
        assert finish(path, "--port", str(port))[:2] == (0, f"{port}\n".encode())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--nodes", "2"], "no script"),
        (["--", "nowhere.py"], "nowhere.py"),
        (["--nodes", "0", "--", LAUNCH], "--nodes"),
        (["--port", "70000", "--", LAUNCH], "70000"),
        (["--rank", "2", "--", LAUNCH], "--rank"),
    ],
)
def test_wrong_command_lines(line, message):
    done = subprocess.run([sys.executable, LAUNCH, *line], capture_output=True, text=True, env=environment())
    assert done.returncode == launch.EXIT_CONFIG
    assert message in done.stderr and "Traceback" not in done.stderr


# ---- how it ends


def test_first_failing_rank_decides_and_the_others_end(tmp_path):
    # Rank 1 fails as a consequence of rank 2, rank 3 would never end, rank 0 has ended well.
    source = f"if RANK == '2': sys.exit(7)\nif RANK == '1': time.sleep(1); sys.exit(1)\nif RANK == '3': {NAP}"
    code, _, errors = finish(script(tmp_path, NOTE_PID + source))
    assert code == 7
    assert errors == "rank 2 ended with exit code 7\n"
    all_gone(pids(tmp_path))


def test_peer_that_ignores_sigterm_is_killed(tmp_path):
    source = f"if RANK == '0': time.sleep(1); sys.exit(9)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN); {NAP}"
    path = script(tmp_path, NOTE_PID + source)
    short = "import launch, recover, sys; recover.PEER_GRACE_S, recover.TERM_GRACE_S = 0.2, 0.5; sys.exit(launch.main())"
    line = [sys.executable, "-c", short, *command(path)[2:]]
    done = subprocess.run(line, capture_output=True, timeout=PATIENCE_S, env=environment())
    assert done.returncode == 9
    all_gone(pids(tmp_path))


def test_rank_killed_by_a_signal(tmp_path):
    source = f"if RANK == '2': os.kill(os.getpid(), signal.SIGKILL)\n{NAP}"
    code, _, errors = finish(script(tmp_path, NOTE_PID + source))
    assert code == 137
    assert errors == "rank 2 was killed by signal 9 (SIGKILL)\n"
    all_gone(pids(tmp_path))


STOPPABLE = """
def stop(number, frame):
    os.write(1, f"{RANK} {number}\\n".encode())  # one write per line: the ranks share stdout
    time.sleep(float(RANK))
    sys.exit(CODE)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, stop)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_stop_signal_reaches_every_rank_and_their_code_comes_back(tmp_path, number):
    # Rank 3 takes longer than PEER_GRACE_S after rank 0: a second SIGTERM would show as a second line.
    source = STOPPABLE.replace("CODE", str(launch.EXIT_STOPPED)) + NOTE_PID + NAP
    with started(script(tmp_path, source)) as process:
        ids = pids(tmp_path, 4)
        process.send_signal(number)
        time.sleep(0.1)
        process.send_signal(number)  # an echo, as timeout(1) sends it
        output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == launch.EXIT_STOPPED, errors
    assert sorted(output.splitlines()) == [f"{rank} {number.value}" for rank in range(4)]
    all_gone(ids)


def test_second_signal_kills(tmp_path):
    handler = "signal.signal(signal.SIGINT, lambda *_: os.write(1, RANK.encode() + b'\\n'))\n"
    source = f"{handler}{NOTE_PID}while True: time.sleep(1)"
    with started(script(tmp_path, source)) as process:
        ids = pids(tmp_path, 4)
        process.send_signal(signal.SIGINT)
        assert sorted(process.stdout.readline().strip() for _ in range(4)) == ["0", "1", "2", "3"]
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
    assert process.returncode == 137
    all_gone(ids)


def test_a_second_request_does_not_hide_who_failed_first(tmp_path):
    """Rank 1 ends only by the launcher's SIGKILL, which is nobody's failure."""
    ignore = "[signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)]\n"
    source = f"{ignore}if RANK == '0': sys.exit(1)\n{NOTE_PID}print('ready', flush=True)\n{NAP}"
    with started(script(tmp_path, source), "--ranks-per-node", "2") as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(3)  # PEER_GRACE_S: the launcher has asked rank 1 to end
        process.send_signal(signal.SIGINT)
        time.sleep(1)  # more than ECHO_S
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 1 and "rank 0 ended with exit code 1" in errors, errors


HELPERS = f"""
helpers = [subprocess.Popen([sys.executable, "-c", "{NAP}"], start_new_session=own) for own in (False, True)]
for helper in helpers:
    open(os.path.join(os.path.dirname(__file__), f'{{helper.pid}}.pid'), 'w').close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="helpers with a session of their own are found through /proc")
def test_killed_launcher_leaves_neither_children_nor_grandchildren(tmp_path):
    source = f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{HELPERS}{NOTE_PID}{NAP}"
    with started(script(tmp_path, source)) as process:
        ids = pids(tmp_path, 12)
        assert all(running(pid) for pid in ids)
        process.kill()
        all_gone(ids)


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_ranks_die_with_the_launcher_although_its_guard_was_killed_first(tmp_path):
    with started(script(tmp_path, NOTE_PID + NAP)) as process:
        ids = pids(tmp_path, 4)
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (guard,) = set(map(int, listed)) - set(ids)
        os.kill(guard, signal.SIGKILL)
        process.kill()
        all_gone(ids)


@pytest.mark.skipif(sys.platform != "linux", reason="helpers with a session of their own are found through /proc")
@pytest.mark.parametrize("end", ["sys.exit(0)", "sys.exit(5)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_no_grandchild_is_left_after_any_end(tmp_path, end):
    path = script(tmp_path, HELPERS + NOTE_PID + end)
    finish(path)
    all_gone(pids(tmp_path, 12))


# ---- in a rank


def test_config_error_is_told_once(tmp_path):
    source = "import launch, model\ndef main(argv):\n    raise model.ConfigError('--steps=-1 must be > 0')\n"
    code, _, errors = finish(script(tmp_path, source + "sys.exit(launch.run(main))"))
    assert code == launch.EXIT_CONFIG
    assert errors == "error: --steps=-1 must be > 0\n"


def test_config_error_of_another_rank_is_told_too(tmp_path):
    source = "import launch, model\ndef main(argv):\n    if RANK == '2': raise model.ConfigError('no /local/data')\n"
    code, _, errors = finish(script(tmp_path, source + "sys.exit(launch.run(main))"))
    assert code == launch.EXIT_CONFIG
    assert errors == "rank 2: error: no /local/data\n"


def test_more_ranks_than_the_machine_has_room_for_are_refused(capsys):
    began = time.monotonic()
    assert launch.main(["--nodes", "1000000", "--", str(ROOT / "train.py")]) == launch.EXIT_CONFIG
    assert re.search(r"error: --nodes 1000000: .*simulated on this machine, and [\d,]+ processes take.*sbatch", capsys.readouterr().err)
    assert time.monotonic() < began + 5


def test_run_gives_the_code_and_lets_other_errors_through(monkeypatch, handlers):
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps=3"])
    assert launch.run(lambda argv: None) == 0
    assert launch.run(lambda argv: argv == ["--steps=3"] and launch.EXIT_STOPPED) == launch.EXIT_STOPPED
    with pytest.raises(ZeroDivisionError):
        launch.run(lambda argv: 1 // 0)


def test_a_request_that_comes_while_python_ends_changes_nothing(tmp_path):
    """Variables of a module go after the handlers of signals."""
    source = ("import launch\nclass Last:\n    def __del__(self, kill=os.kill, pid=os.getpid()):\n"
              f"        for number in {[int(number) for number in launch.STOP_SIGNALS]}:\n            kill(pid, number)\n"
              "last = Last()\ndef main(argv):\n    launch.StopRequest()\nsys.exit(launch.run(main))\n")
    code, _, errors = finish(script(tmp_path, source))
    assert (code, errors) == (0, "")


ALL_REDUCE = """
import launch, torch, torch.distributed as dist
def main(argv):
    where = launch.place()
    launch.setup(where)
    x = torch.tensor([float(where.rank + 1)], device=where.device)
    dist.all_reduce(x)
    os.write(1, f"{where.rank} {where.world} {where.local_rank} {where.ranks_per_node} {x.item():g}\\n".encode())
    assert torch.get_num_threads() == int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads()))
sys.exit(launch.run(main))
"""
WARNINGS_ARE_ERRORS = {"PYTHONWARNINGS": "error", "CUDA_VISIBLE_DEVICES": ""}


def test_all_reduce_over_two_simulated_nodes(tmp_path):
    code, output, errors = finish(script(tmp_path, ALL_REDUCE), OMP_NUM_THREADS="1", **WARNINGS_ARE_ERRORS)
    assert (code, errors) == (0, "")
    assert sorted(output.decode().splitlines()) == ["0 4 0 2 10", "1 4 1 2 10", "2 4 0 2 10", "3 4 1 2 10"]


def test_torchrun_starts_the_same_script(tmp_path):
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    line += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", script(tmp_path, ALL_REDUCE)]
    settings = environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S * 2, env=settings)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 0 2 3", "1 2 1 2 3"]


def test_one_rank_alone_needs_no_port(tmp_path):
    path = script(tmp_path, ALL_REDUCE)
    settings = environment(**WARNINGS_ARE_ERRORS)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=PATIENCE_S, env=settings)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 1 0 1 1\n", "")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "1"}, "RANK=1 .*WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 .*RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE not set"),
        ({"RANK": "4", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, "RANK=4 .*WORLD_SIZE=4"),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}, "WORLD_SIZE=4 .*=3"),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0"),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=0 .*RANK=3"),
        ({"RANK": "x", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "RANK='x'"),
        ({"RANK": "-1", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "RANK='-1'"),
    ],
)
def test_place_names_the_variable_that_is_wrong(monkeypatch, variables, message):
    from model import ConfigError

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        launch.place()


def test_place_gives_each_simulated_node_its_own_accelerators(monkeypatch):
    from model import ConfigError

    monkeypatch.setattr(launch, "accelerator", lambda: ("cuda", "nccl", 4))
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(launch.DEVICE_VAR, raising=False)
    assert (launch.place().device.index, launch.place().backend) == (1, "nccl")
    monkeypatch.setenv(launch.DEVICE_VAR, "3")
    assert launch.place().device.index == 3
    monkeypatch.setenv(launch.DEVICE_VAR, "4")
    with pytest.raises(ConfigError, match="device 4.* shows 4"):
        launch.place()


def test_setup_of_several_ranks_names_the_missing_meeting_point(monkeypatch):
    from model import ConfigError

    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setattr(launch, "accelerator", lambda: ("cpu", "gloo", 0))
    with pytest.raises(ConfigError, match="MASTER_PORT"):
        launch.setup(launch.place())
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS='many'"):
        launch.setup(launch.place())


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in launch.STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_stop_request_notes_the_first_signal(handlers):
    stop = launch.StopRequest()
    assert stop.requested is None
    signal.raise_signal(signal.SIGUSR1)
    assert stop.requested == "SIGUSR1"
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert stop.requested == "SIGUSR1"
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_stop_request_respects_nohup(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = launch.StopRequest()
    signal.raise_signal(signal.SIGHUP)
    assert stop.requested is None


def test_launcher_does_not_import_torch():
    code = "import sys, launch; sys.exit('torch' in sys.modules or 'model' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0
