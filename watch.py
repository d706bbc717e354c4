"""What each rank is doing, where others can see it, and the report of a hang.

Each rank keeps one page of memory, the file <folder>/rank-00003 (folder: NANO1T_WATCH, on a file system in memory): a heartbeat
that a thread writes, step and phase, the last collectives that were launched, the one that is waited for, and how far they are
complete. An entry costs a few stores. The page can be read when the rank is stopped, dead, or in a call that does not return.

On a hang, on each node:

    python watch.py report FOLDER     JSON: of each of the node's ranks the page, the state of its process and its Python stacks

and `blame` puts the nodes' reports together. Counters alone cannot tell a stopped rank from one that waits for it, and the state
of a process cannot tell which collective it has not reached; together they name both.
"""

import argparse
import contextlib
import faulthandler
import json
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER_VAR = "NANO1T_WATCH"  # folder of the pages, local to the node
NODE_VAR = "NANO1T_NODE"  # name of this rank's node, as the scheduler calls it
ATTEMPT_VAR = "NANO1T_ATTEMPT"  # folder of this attempt, on a file system that all nodes share
STACK_SIGNAL = signal.SIGUSR2  # has a rank write its Python stacks
BEAT_S = 0.25
PHASES = ("start", "init", "data", "compile", "step", "eval", "checkpoint", "end")

# The page: words of 8 bytes, then text. A word is written by one store, so a reader sees the old or the new one. A collective is
# its number << 8 | its name's place in the table: number and name never disagree.
MAGIC = int.from_bytes(b"nano1t\0\1", "little")
WORDS = ("magic", "pid", "rank", "world", "started", "beat", "phase", "phase_since", "step", "launched", "waiting", "complete",
         "oldest", "asked", "memory", "ends", "ends_at", "queued")
AT = {name: i for i, name in enumerate(WORDS)}
RING_AT, RING = 32, 128  # the last collectives, at their number modulo RING
NODE_AT, NAMES_AT, NAME_BYTES, NAMES = 2048, 2112, 64, 64
SIZE = 8192


class Page:
    """This rank's page. Until `open` it is memory of its own, so that nobody need ask whether it is there."""

    def __init__(self):
        self.count, self.names, self.in_flight, self.thread = 0, {}, deque(maxlen=4096), None
        self._take(bytearray(SIZE))

    def _take(self, memory):
        self.memory = memory
        self.words, self.times = memoryview(memory).cast("Q"), memoryview(memory).cast("d")

    def open(self):
        """Makes the page a file, if a launcher asks for it, and starts the heartbeat."""
        folder, rank = os.environ.get(FOLDER_VAR), int(os.environ.get("RANK", "0"))
        if not folder or self.thread:
            return
        path = page_file(Path(folder), rank)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.stacks = open(path.with_suffix(".stacks"), "wb")
        faulthandler.register(STACK_SIGNAL, self.stacks, all_threads=True)
        with open(path.with_suffix(".new"), "w+b") as file:
            file.write(bytes(self.memory))
            file.flush()
            self._take(mmap.mmap(file.fileno(), SIZE))
        node = os.environ.get(NODE_VAR, socket.gethostname()).encode()[: NAME_BYTES - 1]
        self.memory[NODE_AT : NODE_AT + len(node)] = node
        words = {"magic": MAGIC, "pid": os.getpid(), "rank": rank, "world": int(os.environ.get("WORLD_SIZE", "1"))}
        for name, value in words.items():
            self.words[AT[name]] = value
        self.times[AT["started"]] = self.times[AT["beat"]] = time.time()
        self.times[AT["memory"]] = free_memory()
        self.phase("init", 0)
        path.with_suffix(".new").rename(path)
        self.thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self.thread.start()

    def phase(self, name: str, step: int):
        self.words[AT["step"]], self.words[AT["phase"]], self.times[AT["phase_since"]] = step, PHASES.index(name), time.time()

    def asked(self, number: int):
        """A signal has asked this rank to stop. Called in its handler."""
        self.words[AT["asked"]] = self.words[AT["asked"]] or number

    def ends(self, code: int):
        """This rank has failed and is on its way out, which may take long or never end."""
        self.times[AT["ends_at"]], self.words[AT["ends"]] = time.time(), code

    def launches(self, group: str, purpose: str) -> list:
        """Notes that a collective is about to be launched; returns its entry, for the calls below: [number and name, how to get
        what tells whether it is complete]."""
        self.count += 1
        name = self.names.get((group, purpose))
        token = self.count << 8 | (self._name(group, purpose) if name is None else name)
        self.words[RING_AT + self.count % RING] = token
        self.words[LAUNCHED] = token
        return [token, None]

    def launched(self, entry: list, work):
        """Has the poller follow it. A Work that nobody holds any longer was waited for, and so is complete."""
        if self.thread:
            entry[1] = weakref.ref(work)
            self.in_flight.append(entry)

    def waits(self, entry: list):
        self.words[WAITING] = entry[0]

    def waited(self):
        self.words[WAITING] = 0

    def passes(self, entry: list, event):
        """On an accelerator wait() returns at once: from now on the poller asks an event of the stream that waits, which holds no
        memory, and the rank waits for the oldest that is not complete."""
        self.words[AT["queued"]], entry[1] = 1, lambda: event

    def _name(self, group: str, purpose: str) -> int:
        place = self.names[group, purpose] = min(len(self.names), NAMES - 1)
        text = f"{purpose} over {group}".encode()[: NAME_BYTES - 1].ljust(NAME_BYTES, b"\0")
        self.memory[NAMES_AT + place * NAME_BYTES : NAMES_AT + (place + 1) * NAME_BYTES] = text
        return place

    def _beat(self):
        beats = 0
        while True:
            self.times[AT["beat"]] = time.time()
            if beats % 8 == 0:
                self.times[AT["memory"]] = free_memory()
            self.poll()
            beats += 1
            time.sleep(BEAT_S)

    def poll(self):
        """How far the collectives are complete, in the order in which they were launched."""
        flying = self.in_flight
        while flying and done(flying[0][1]()):
            self.words[AT["complete"]] = flying.popleft()[0]
        self.words[AT["oldest"]] = flying[0][0] if flying else 0


LAUNCHED, WAITING = AT["launched"], AT["waiting"]
PAGE = Page()


def done(work) -> bool:
    """Whether a collective is complete: a Work that nobody holds has been waited for; an event tells by its query."""
    return work is None or (work.query() if hasattr(work, "query") else work.is_completed())


def page_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}"


def tell_launcher(values: dict):
    """Rank 0's progress, for the launcher: replaced as a whole."""
    if folder := os.environ.get(ATTEMPT_VAR):
        replace_json(Path(folder) / "progress.json", values)


def replace_json(path: Path, values: dict):
    tmp = path.with_name(f".{path.name}")
    tmp.write_text(json.dumps(values))
    tmp.rename(path)


def free_memory() -> float:
    """Part of the host's memory that is available, or of this process's cgroup if that has less; 1 where nobody tells."""
    free = 1.0
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) / int(lines["MemTotal"].split()[0])
    with contextlib.suppress(OSError, ValueError, StopIteration):
        own = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        limit, used = ((Path("/sys/fs/cgroup" + own) / name).read_text() for name in ("memory.max", "memory.current"))
        free = min(free, 1 - int(used) / int(limit))  # "max": no limit, a ValueError
    return free


# ------------------------------------------------------------------------------------------------------------------
# Reading
# ------------------------------------------------------------------------------------------------------------------


@dataclass
class Rank:
    """What is known of a rank: its page; after `examine` its process, too. A collective is [number, name], None: none yet."""

    rank: int
    node: str
    pid: int
    beat_age_s: float
    phase: str
    phase_s: float
    step: int
    launched: list | None
    waiting: list | None  # the one it waits for now; where waits only queue, the oldest that is not complete
    complete: list | None  # all before it are complete, as far as the poller saw
    oldest: list | None  # in flight
    recent: dict[str, str]  # number -> name of the last launched
    asked: int  # signal that asked this rank to stop, 0: none
    memory: float  # part of the host's memory that was available lately
    ends: int  # exit code with which it is on its way out, 0: it is not
    ends_at: float  # since when, Unix time
    state: str = "?"  # of the process as /proc has it: R runs, S sleeps, D in the kernel, T stopped, X is gone
    cpu: float = 0.0  # part of the time in which the main thread ran, or wanted to on a loaded machine
    wchan: str = ""  # where in the kernel the main thread sleeps
    stacks: str = ""  # of Python, innermost frame first


def read(path: Path) -> Rank | None:
    """A rank's page; None where there is none, or it is not of this version."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != SIZE or struct.unpack_from("=Q", data)[0] != MAGIC:
        return None
    words, times = (struct.unpack_from(f"={RING_AT + RING}{kind}", data) for kind in "Qd")

    def text(at: int) -> str:
        return data[at : at + NAME_BYTES].split(b"\0")[0].decode(errors="replace")

    def collective(token: int) -> list | None:
        return [token >> 8, text(NAMES_AT + (token & 255) * NAME_BYTES)] if token else None

    now, waiting = time.time(), words[AT["waiting"]] or words[AT["oldest"]] * words[AT["queued"]]
    ring = sorted(filter(None, words[RING_AT : RING_AT + RING]))
    return Rank(words[AT["rank"]], text(NODE_AT), words[AT["pid"]], round(now - times[AT["beat"]], 2),
                PHASES[words[AT["phase"]] % len(PHASES)], round(now - times[AT["phase_since"]], 2), words[AT["step"]],
                *map(collective, (words[AT["launched"]], waiting, words[AT["complete"]], words[AT["oldest"]])),
                {str(number): name for number, name in map(collective, ring)}, words[AT["asked"]], round(times[AT["memory"]], 4),
                words[AT["ends"]], times[AT["ends_at"]])


def process_state(pid: int) -> tuple[str, float]:
    """(state, seconds in which the main thread ran or wanted to); ("X", 0) for a process that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ran_ns, waited_ns = map(int, Path(f"/proc/{pid}/schedstat").read_text().split()[:2])
    except OSError:
        return "X", 0.0
    return ("X" if fields[0] == "Z" else fields[0].upper()), (ran_ns + waited_ns) / 1e9


def is_rank(pid: int, folder: Path) -> bool:
    """Whether the process has this folder for its page: its number may be someone else's by now."""
    with contextlib.suppress(OSError):
        return f"{FOLDER_VAR}={folder}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def examine(folder: Path, node: str | None = None, sample_s: float = 0.5) -> list[Rank]:
    """The ranks that have a page here, of one simulated node or of all, with the state of their processes: CPU time is measured
    over sample_s seconds, and the stacks are asked for. Nothing here waits for a rank."""
    ranks = [rank for path in sorted(folder.glob("rank-?????")) if (rank := read(path)) and node in (None, rank.node)]
    ranks = [rank for rank in ranks if is_rank(rank.pid, folder) or not setattr(rank, "state", "X")]
    there, before = [rank for rank in ranks if rank.state != "X"], time.monotonic()
    used = {rank.rank: process_state(rank.pid)[1] for rank in there}
    time.sleep(sample_s)
    for rank in there:
        rank.state, seconds = process_state(rank.pid)
        rank.cpu = round((seconds - used[rank.rank]) / (time.monotonic() - before), 2)
        with contextlib.suppress(OSError):
            rank.wchan = Path(f"/proc/{rank.pid}/wchan").read_text().strip("0\n")
    written = {}
    for rank in there:
        if rank.state not in "TX":
            path = page_file(folder, rank.rank).with_suffix(".stacks")
            written[rank.rank] = path, path.stat().st_size
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, STACK_SIGNAL)
    time.sleep(0.3)
    for rank in there:
        if rank.rank in written:
            path, size = written[rank.rank]
            rank.stacks = path.read_bytes()[size:].decode(errors="replace")
    return ranks


# ------------------------------------------------------------------------------------------------------------------
# Who is to blame
# ------------------------------------------------------------------------------------------------------------------


@dataclass
class Hang:
    """Why nothing moves. kind: a key of MEANING."""

    kind: str
    ranks: list[int] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    collective: list | None = None  # [number, name] of the one that these ranks have not reached, or are in
    reached: bool = False  # they have launched it
    text: str = ""


MEANING = {"stopped": "stopped (SIGSTOP or a debugger)", "gone": "gone, or not there yet",
           "unreachable": "on a node that does not answer", "blocked": "blocked in the kernel",
           "busy": "busy outside of any collective",
           "asleep": "asleep outside of any collective", "behind": "behind the others",
           "collective": "all in the same collective: a link or a network card", "livelock": "all running, none in a collective",
           "elsewhere": "all outside of any collective", "unknown": "not to be told apart"}
BUSY = 0.5  # part of the time


def main_stack(rank: Rank) -> list[str]:
    """Frames of the main thread, innermost first. faulthandler calls the thread that got the signal, the main one, current."""
    lines, found = rank.stacks.splitlines(), []
    start = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), None)
    for line in lines[start + 1 :] if start is not None else []:
        if not line.startswith("  File"):
            break
        found.append(line.strip())
    return found


def blame(ranks: list[Rank], world: int, nodes_of: dict[int, str], silent: list[str] = ()) -> Hang:
    """ranks: as examined; nodes_of: rank -> node; silent: nodes that gave no report in time. The first of these kinds that holds
    for any ranks: the rest waits for them."""
    known = {rank.rank: rank for rank in ranks}
    missing = [r for r in range(world) if r not in known]
    waits = [r for r in ranks if r.waiting]
    free = [r for r in ranks if not r.waiting and r.state not in "TX"]
    furthest = max((r.launched[0] for r in ranks if r.launched), default=0)
    behind = [r for r in ranks if furthest and (r.launched or [0])[0] < furthest]
    first_behind = min(((r.launched or [0])[0] for r in behind), default=0)
    kinds = {
        "stopped": [r.rank for r in ranks if r.state == "T"],
        "unreachable": [r for r in missing if nodes_of.get(r) in silent],
        "gone": [r.rank for r in ranks if r.state == "X"] + [r for r in missing if nodes_of.get(r) not in silent],
        "blocked": [r.rank for r in free if r.state == "D"],
        "busy": [r.rank for r in free if r.cpu >= BUSY] if waits else [],
        "asleep": [r.rank for r in free] if waits else [],
        "livelock": [r.rank for r in ranks] if ranks and not waits and all(r.cpu >= BUSY for r in ranks) else [],
        "elsewhere": [r.rank for r in ranks] if not waits else [],
        "behind": [r.rank for r in behind if (r.launched or [0])[0] == first_behind],
        "collective": [r.rank for r in ranks] if waits and len(waits) == len(ranks) else [],
        "unknown": list(range(world)),
    }
    kind, guilty = next((kind, sorted(found)) for kind, found in kinds.items() if found)
    hang = Hang(kind, guilty, sorted({nodes_of[r] for r in guilty if r in nodes_of}))
    hang.collective, hang.reached = unreached(guilty, ranks)
    hang.text = describe(hang, known)
    return hang


def unreached(guilty: list[int], ranks: list[Rank]) -> tuple[list | None, bool]:
    """([number, name], False) of the first collective that others have launched and a guilty rank has not; else (the first one
    that others wait for, True), which it has launched but not finished."""
    others = [r for r in ranks if r.rank not in guilty]
    names = {int(number): name for r in others or ranks for number, name in r.recent.items()}
    own = [(r.launched or [0])[0] for r in ranks if r.rank in guilty]
    next_one = min(own, default=0) + 1
    if others and next_one in names:
        return [next_one, names[next_one]], False
    waiting = sorted(r.waiting for r in others or ranks if r.waiting)
    return (waiting[0], True) if waiting else (None, False)


def describe(hang: Hang, known: dict[int, Rank]) -> str:
    """The report's first line."""
    who = f"rank{'s' if len(hang.ranks) > 1 else ''} {shortened(hang.ranks)} ({', '.join(hang.nodes[:8]) or 'node unknown'})"
    if hang.kind in ("collective", "livelock", "elsewhere", "unknown"):
        who = f"{len(hang.ranks)} ranks"
    what = ""
    if hang.collective:
        number, name = hang.collective
        what = f", {'in' if hang.reached else 'not at'} collective {number}, {name}"
    one = known.get(hang.ranks[0]) if hang.ranks else None
    where = f"; {main_stack(one)[0]}" if one and hang.kind not in ("stopped", "collective") and main_stack(one) else ""
    return f"{who}: {MEANING[hang.kind]}{what}{where}"


def shortened(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def table(ranks: list[Rank]) -> str:
    """The report's lines, one per rank, then the main threads' stacks, equal ones together."""
    def name(collective: list | None) -> str:
        return f"{collective[0]} {collective[1]}" if collective else "-"

    rows = [("rank", "node", "pid", "state", "busy", "beat", "step", "phase", "launched", "waits for", "complete to",
             "in the kernel")]
    for r in sorted(ranks, key=lambda r: r.rank):
        rows.append((str(r.rank), r.node, str(r.pid), r.state, f"{r.cpu:.0%}", f"{r.beat_age_s:.1f} s ago", str(r.step), r.phase,
                     name(r.launched), name(r.waiting), name(r.complete), r.wchan or "-"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    who: dict[str, list[int]] = {}
    for r in ranks:
        if stack := "\n    ".join(main_stack(r)):
            who.setdefault(stack, []).append(r.rank)
    for stack, found in sorted(who.items(), key=lambda item: -len(item[1])):
        lines += [f"ranks {shortened(found)}, innermost frame first:", f"    {stack}"]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="watch.py", description="What the ranks on this node are doing, as JSON.")
    parser.add_argument("command", choices=["report"])
    parser.add_argument("folder", type=Path, help="of the pages: NANO1T_WATCH of the ranks")
    args = parser.parse_args(argv)
    print(json.dumps([asdict(rank) for rank in examine(args.folder, os.environ.get(NODE_VAR))]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
