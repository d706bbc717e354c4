"""Copies a virtual environment to a disk of every node: thousands of ranks that import torch from a shared one take minutes.

    python launch.py --stage /tmp ... -- train.py ...      before the run starts; ranks then use the copy
    python stage.py pack .venv env.tar                     one archive
    python stage.py unpack env.tar /tmp/env SHA256         relocates it: scripts, activation and pyvenv.cfg name the new place

    pack         one tar file: a node reads one large file instead of 30,000 small ones
    broadcast    sbcast under Slurm, else a tree of copies in which every node that has the archive becomes a source
    unpack       on each node, into a directory that appears under its name only when it is complete

The base interpreter stays where it is, and with it the site's own packages, where the environment is layered on them (python -m
venv --system-site-packages). Imports nothing beyond the standard library: it runs with the base interpreter, before there is a
copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from errors import LaunchError, ShortOfNodes

MARKER = ".staged"  # in a complete copy: the archive's SHA-256
SHEBANG_BYTES = 127  # that every Linux reads
COPY_S, UNPACK_S = 600, 900  # patience with a node
LOST = (124, b"no answer in time")  # of a node

# ----------------------------------------------------------------------------------------------
# The archive
# ----------------------------------------------------------------------------------------------


def pack(env: Path, archive: Path) -> str:
    """Writes an environment into a tar file; returns its SHA-256. Raises LaunchError if it is no virtual environment."""
    if not (env / "pyvenv.cfg").is_file():
        raise LaunchError(f"--stage: {env} is no virtual environment (it has no pyvenv.cfg); start the launcher with one's Python")
    with tarfile.open(archive, "w") as tar:  # not compressed: the network is faster than any one core
        tar.add(env, ".", recursive=False)
        for path in sorted(env.rglob("*")):
            tar.add(path, str(path.relative_to(env)), recursive=False)
    return sha256(archive)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def unpack(archive: Path, target: Path, digest: str) -> None:
    """Makes the environment at `target` from an archive, which then goes. Raises LaunchError for a damaged one."""
    with open(f"{target}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several nodes may share a disk
        if staged(target, digest):
            archive.unlink(missing_ok=True)
            return
        if (found := sha256(archive)) != digest:
            raise LaunchError(f"{archive} is damaged: its SHA-256 is {found[:12]}..., not {digest[:12]}...")
        fresh = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
        try:
            with tarfile.open(archive) as tar:
                # links to the base interpreter lead out of the directory, which the strictest filter refuses
                tar.extractall(fresh, **({"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}))
            relocate(fresh, target)
            (fresh / MARKER).write_text(digest)
            shutil.rmtree(target, ignore_errors=True)
            fresh.rename(target)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
            archive.unlink()


def staged(target: Path, digest: str) -> bool:
    """Whether a complete copy is there already."""
    with contextlib.suppress(OSError):
        return (target / MARKER).read_text() == digest
    return False


# ----------------------------------------------------------------------------------------------
# Relocation
# ----------------------------------------------------------------------------------------------


def relocate(env: Path, target: Path) -> None:
    """Has an environment say that it is at `target`: scripts (first lines and activation), pyvenv.cfg, .pth files, links."""
    old, new = prefix_of(env), str(target)
    if old is None:
        raise LaunchError(f"{env / 'bin' / 'activate'} does not tell where the environment was made; make it with python -m venv")
    for path in [*(env / "bin").iterdir(), env / "pyvenv.cfg", *env.glob("lib/python*/site-packages/*.pth")]:
        if path.is_symlink():
            continue
        data = path.read_bytes()
        if path.is_file() and b"\0" not in data[:1024]:
            if (changed := long_shebang(replaced(data, old, new))) != data:
                path.write_bytes(changed)  # in place: it keeps its mode
    for path in env.rglob("*"):
        if path.is_symlink() and (inside := replaced(link := os.fsencode(os.readlink(path)), old, new)) != link:
            path.unlink()
            path.symlink_to(os.fsdecode(inside))


def prefix_of(env: Path) -> str | None:
    """Where an environment was made, as its activation script says; several versions of venv quote it in several ways."""
    text = (env / "bin" / "activate").read_text(errors="surrogateescape")
    found = re.search(r"""^\s*(?:export )?VIRTUAL_ENV=(['"]?)(/.+?)\1$""", text, re.MULTILINE)
    return found[2] if found else None


def replaced(data: bytes, old: str, new: str) -> bytes:
    """Every mention of the directory `old`, but not of one whose name only begins like it."""
    return re.sub(re.escape(os.fsencode(old)) + rb"(?![\w.-])", lambda _: os.fsencode(new), data)


def long_shebang(data: bytes) -> bytes:
    """A first line that the kernel would cut becomes one for sh, which runs the script with the interpreter; as pip does it."""
    first, _, rest = data.partition(b"\n")
    if len(first) <= SHEBANG_BYTES or not re.fullmatch(rb"#!/.*/bin/python[\d.]*", first):
        return data
    return b"#!/bin/sh\n'''exec' \"" + first[2:] + b"\" \"$0\" \"$@\"\n' '''\n" + rest


# ----------------------------------------------------------------------------------------------
# To all nodes
# ----------------------------------------------------------------------------------------------


@dataclass
class Report:
    """How staging went."""

    python: str = ""  # interpreter of the copies
    failed: dict[str, str] = field(default_factory=dict)  # node -> why
    rounds: int = 0  # of copies, one after the other; 0: sbcast, or nothing was to be copied
    seconds: float = 0.0


def tree(copy, nodes: list[str], timeout_s: float = COPY_S) -> tuple[int, dict[str, str]]:
    """Copies from here to all nodes. copy(source, target) -> the command that does it, source None: from here. In each round
    every node that has the archive gives it to one that has not, so their number doubles. A copy that fails is tried once more,
    from another source; which of the two was at fault is not known before. Returns (rounds, node -> why it has none)."""
    sources: list[str | None] = [None]
    waiting, failures, rounds = list(nodes), {}, 0
    blamed: dict[str | None, int] = {}
    while waiting:
        rounds += 1
        now, waiting = waiting[: len(sources)], waiting[len(sources):]
        running = {}
        for source, target in zip(sources, now):
            running[target] = source, subprocess.Popen(copy(source, target), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                                       stderr=subprocess.PIPE)
        until, again = time.monotonic() + timeout_s, []
        for target, (source, process) in running.items():
            try:
                _, errors = process.communicate(timeout=max(0.1, until - time.monotonic()))
                said = errors.decode(errors="replace").strip()[-200:]
                why = f"code {process.returncode}: {said}" if process.returncode else ""
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                why = f"no end within {timeout_s:g} s"
            if not why:
                sources.append(target)
                failures.pop(target, None)
            elif target in failures:
                failures[target] += f"; then {why}"
            else:
                failures[target] = why
                again.append(target)
                blamed[source] = blamed.get(source, 0) + 1
        sources = [s for s in sources if s is None or blamed.get(s, 0) < 2]
        # behind the others, and so from another source: this one is now further back in the row
        waiting += again
        sources.sort(key=lambda s: blamed.get(s, 0))
    return rounds, failures


def ssh(here: str, path: str):
    """Copies by ssh and scp: from the file `here` on this machine, `path` on the others. The words of the remote command hold
    nothing that a shell would read: see `place`."""
    options = ["-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no"]

    def copy(source: str | None, target: str) -> list[str]:
        words = ["scp", "-q", *options, here if source is None else path, f"{target}:{path}"]
        return words if source is None else ["ssh", *options, source, *words]

    return copy


def place(folder: str, env: Path, digest: str) -> tuple[str, str]:
    """(archive, copy) on each node; the name tells user and content."""
    if not re.fullmatch(r"/[\w./-]*", folder):
        raise LaunchError(f"--stage {folder}: must be an absolute path of letters, digits, dots, dashes, underscores and slashes")
    name = re.sub(r"[^\w.-]", "-", f"nano1t-{getpass.getuser()}-{env.name.lstrip('.')}-{digest[:12]}")
    return f"{folder.rstrip('/')}/{name}.tar", f"{folder.rstrip('/')}/{name}"


def stage(env: Path, folder: str, nodes: list[str], on_each, broadcast=None, copy=None, minimum: int = 1, archive=None) -> Report:
    """Puts an environment onto all nodes. folder: on them; on_each(nodes, argv, timeout) runs a command there; broadcast(archive,
    path) -> command that copies to all nodes at once, or None; copy: see `tree`, by default ssh; archive: for the tar file, by
    default in the temporary directory. Raises LaunchError where fewer than `minimum` nodes have it in the end."""
    began, report = time.monotonic(), Report()
    with tempfile.TemporaryDirectory() as scratch:
        archive = Path(archive or Path(scratch) / "env.tar")
        digest = pack(env, archive)
        path, target = place(folder, env, digest)
        program = [os.path.realpath(sys.executable), str(Path(__file__).resolve())]
        have = on_each(nodes, [*program, "staged", target, digest], UNPACK_S)
        missing = [node for node in nodes if have.get(node, LOST)[0] != 0]
        done = missing and broadcast and subprocess.run(broadcast(str(archive), path), stdin=subprocess.DEVNULL).returncode == 0
        if missing and not done:
            report.rounds, report.failed = tree(copy or ssh(str(archive), path), missing)
        there = nodes if done else [node for node in missing if node not in report.failed]  # a broadcast reaches all
        answers = on_each(there, [*program, "unpack", path, target, digest], UNPACK_S) if there else {}
        for node in there:
            code, output = answers.get(node, LOST)
            if code:
                report.failed[node] = output.decode(errors="replace").strip()[-300:] or f"unpacking ended with code {code}"
    report.python, report.seconds = f"{target}/bin/python", time.monotonic() - began
    if len(nodes) - len(report.failed) < minimum:
        lost = "; ".join(f"{node}: {why}" for node, why in report.failed.items())
        raise ShortOfNodes(f"--stage {folder}: {len(nodes) - len(report.failed)} of {len(nodes)} nodes have the environment, "
                          f"{minimum} are needed ({lost})")
    return report


def main(argv: list[str]) -> int:
    try:
        match argv:
            case ["pack", env, archive]:
                print(pack(Path(env), Path(archive)))
            case ["unpack", archive, target, digest]:
                unpack(Path(archive).absolute(), Path(target).absolute(), digest)
            case ["staged", target, digest]:
                return 0 if staged(Path(target), digest) else 1
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
