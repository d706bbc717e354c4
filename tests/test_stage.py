"""An environment copied to simulated hosts: folders, between which the real `cp` copies, and on which real processes unpack."""

import math
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import stage
from errors import LaunchError

HOST_NAMES = [f"h{i}" for i in range(9)]


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    """A virtual environment layered on the packages that the tests use, with scripts of its own."""
    path = tmp_path_factory.mktemp("made") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", path], check=True)
    site = next(path.glob("lib/python*/site-packages"))
    (site / "base.pth").write_text(sysconfig.get_path("purelib") + "\n" + f"{path}/extra\n{path}-other\n")
    (path / "extra").mkdir()
    (path / "extra" / "mine.py").write_text("VALUE = 7\n")
    script = path / "bin" / "tell"
    script.write_text(f"#!{path}/bin/python\nimport sys, mine\nprint(sys.prefix, mine.VALUE)\n")
    script.chmod(0o755)
    (path / "bin" / "absolute").symlink_to(path / "bin" / "tell")
    return path


class Folders:
    """Hosts that are folders. broken: those that nothing can be copied to; mute: those from which nothing can be copied."""

    def __init__(self, root, names, broken=(), mute=()):
        self.root, self.names, self.broken, self.mute, self.calls = root, names, broken, mute, []
        for name in names:
            (root / name).mkdir(parents=True)

    def stage(self, env, minimum=1):
        copies = {}

        def copy(source, target):
            self.calls.append((source, target))
            here = self.archive if source is None else self.root / source / "archive.tar"
            there = self.root / ("nowhere" if target in self.broken or source in self.mute else target) / "archive.tar"
            return ["cp", here, there]

        def on_each(nodes, argv, timeout_s):
            done = {}
            for node in nodes:
                folder = str(self.root / node)
                here = {True: folder + "/archive.tar", False: folder + "/env"}
                words = [here[word.endswith(".tar")] if word.startswith("/local/") else word for word in argv]
                ran = subprocess.run(words, capture_output=True)
                done[node] = ran.returncode, ran.stdout + ran.stderr
                copies[node] = Path(folder, "env")
            return done

        self.archive = self.root / "env.tar"
        self.copies = copies
        return stage.stage(env, "/local", self.names, on_each, copy=copy, minimum=minimum, archive=self.archive)


def output(*argv):
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(argv, capture_output=True, text=True, check=True, env=clean).stdout.strip()


def test_nine_hosts_in_four_rounds_and_the_copy_imports_torch(env, tmp_path):
    hosts = Folders(tmp_path, HOST_NAMES)
    report = hosts.stage(env)
    assert (report.rounds, report.failed) == (math.ceil(math.log2(len(HOST_NAMES) + 1)), {})
    assert sum(source is None for source, _ in hosts.calls) <= report.rounds  # the others gave what they had got
    shutil.move(env, tmp_path / "away")  # whatever still points there fails
    try:
        for name in ("h0", "h8"):
            there = tmp_path / name / "env"
            assert output(there / "bin" / "tell") == output(there / "bin" / "absolute") == f"{there} 7"
            assert not list((tmp_path / name).glob("*.tar"))
        assert output("sh", "-c", f". '{there}/bin/activate' && echo $VIRTUAL_ENV && which python").split() == [
            str(there), f"{there}/bin/python"]
        assert str(env) not in (there / "pyvenv.cfg").read_text()
        assert f"{env}-other" in next(there.glob("lib/python*/site-packages/base.pth")).read_text()
        code = "import torch, sys; print(sys.prefix, torch.ones(2).sum().item())"
        assert output(there / "bin" / "python", "-c", code) == f"{there} 2.0"
    finally:
        shutil.move(tmp_path / "away", env)
    assert hosts.stage(env).rounds == 0  # it is there


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 7, 8, 16, 31])
def test_rounds_grow_like_the_logarithm(hosts):
    rounds, failed = stage.tree(lambda source, target: ["true"], [f"h{i}" for i in range(hosts)])
    assert (rounds, failed) == (math.ceil(math.log2(hosts + 1)), {})


def test_failing_hosts_are_named_and_a_minimum_decides(env, tmp_path):
    hosts = Folders(tmp_path, HOST_NAMES, broken=("h2",), mute=("h1",))
    report = hosts.stage(env, minimum=8)
    assert list(report.failed) == ["h2"] and "nowhere" in report.failed["h2"]
    assert {source for source, target in hosts.calls if target == "h2"} != {"h1"}
    hosts = Folders(tmp_path / "again", HOST_NAMES[:3], broken=("h0", "h2"))
    with pytest.raises(LaunchError, match="1 of 3 nodes.*2 are needed.*h0.*h2"):
        hosts.stage(env, minimum=2)


def test_a_damaged_archive_and_an_old_copy(env, tmp_path):
    digest = stage.pack(env, tmp_path / "env.tar")
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "old").touch()
    data = (tmp_path / "env.tar").read_bytes()
    (tmp_path / "bad.tar").write_bytes(data[:600] + b"x" + data[601:])
    with pytest.raises(LaunchError, match="damaged"):
        stage.unpack(tmp_path / "bad.tar", tmp_path / "env", digest)
    assert (tmp_path / "env" / "old").exists()
    stage.unpack(tmp_path / "env.tar", tmp_path / "env", digest)
    assert not (tmp_path / "env" / "old").exists() and stage.staged(tmp_path / "env", digest)
    with pytest.raises(LaunchError, match="no virtual environment"):
        stage.pack(tmp_path, tmp_path / "x.tar")


def test_a_broadcast_leaves_no_archive_on_nodes_that_had_the_copy(env, tmp_path):
    def on_each(nodes, argv, timeout_s):
        ended = {}
        for node in nodes:
            own = [word.replace("/local", str(tmp_path / node)) for word in argv]
            ended[node] = subprocess.run(own, capture_output=True)
        return {node: (done.returncode, done.stdout + done.stderr) for node, done in ended.items()}

    def broadcast(archive, path):
        return ["sh", "-c", 'for node in a b; do cp "$0" "$1/$node/$2" || exit 1; done', archive, str(tmp_path), Path(path).name]

    for node in "ab":
        (tmp_path / node).mkdir()
    for nodes in (["a"], ["a", "b"]):
        report = stage.stage(env, "/local", nodes, on_each, broadcast)
        assert not report.failed
    assert len([path for path in (tmp_path / "b").iterdir() if path.is_dir()]) == 1
    assert not [*(tmp_path / "a").glob("*.tar"), *(tmp_path / "b").glob("*.tar")]


def test_a_first_line_that_the_kernel_would_cut(env, tmp_path):
    deep = tmp_path / ("d" * 60) / ("e" * 60) / "env"
    deep.parent.mkdir(parents=True)
    digest = stage.pack(env, tmp_path / "env.tar")
    stage.unpack(tmp_path / "env.tar", deep, digest)
    assert (deep / "bin" / "tell").read_bytes().startswith(b"#!/bin/sh\n")
    assert output(deep / "bin" / "tell") == f"{deep} 7"


def test_places_hold_nothing_that_a_shell_reads():
    archive, copy = stage.place("/tmp/", Path("/x/.my env"), "0" * 64)
    assert archive == copy + ".tar" and copy.startswith("/tmp/nano1t-") and copy.endswith("my-env-000000000000")
    with pytest.raises(LaunchError, match="absolute path"):
        stage.place("/tmp/$HOME", Path("/x"), "0")
    assert stage.ssh("/a/env.tar", archive)(None, "n2")[-2:] == ["/a/env.tar", f"n2:{archive}"]
    assert stage.ssh("/a/env.tar", archive)("n1", "n2")[-2:] == [archive, f"n2:{archive}"]
