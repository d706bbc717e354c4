"""The restart loop: start an attempt, watch its progress, judge how it ended, then go on, put a spare in, or stop.

    Evidence     what is known of an attempt that has ended: exit codes, pages, the scheduler's word, the hang report
    judge        evidence -> cause and decision: pure, and nothing here reads log text
    supervise    the loop; appends each attempt with its evidence to out/<run>/attempts.jsonl

Progress means that the step advances: rank 0 tells (step, phase) in a small file, and each phase has its time. What will fail
again the same way (a bad setting, a full disk, a diverged run) stops at once and costs no node. Only evidence against a node
costs one: the scheduler's word, all its ranks gone at once, silence, a failed check, or that it alone was at fault twice. Nodes
are never rotated. Each cause has its budget, and two attempts in a row without a new step end the run.
"""

import contextlib
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

import watch
from errors import (EXIT_CONFIG, EXIT_DIVERGED, EXIT_FAILED, EXIT_HANG, EXIT_NO_SPACE, EXIT_NOT_SAVED, EXIT_OK,
                    EXIT_OUT_OF_MEMORY, EXIT_STOPPED, EXIT_UNHEALTHY, LaunchError)

BEGUN_VAR = "NANO1T_BEGUN"  # step from which this launch's first attempt started: a later one goes on from its checkpoints
PEER_GRACE_S = 2.0  # after a rank failed, its peers mostly fail by themselves, and say why
TERM_GRACE_S = 5.0  # from SIGTERM to SIGKILL for the peers of a failed rank: they may wait for it forever
ECHO_S = 0.5  # the same signal within this time is one request: timeout(1) and make signal both us and our group
END_S = 60.0  # a request to stop so near the job's end is the scheduler's: PBS gives no other warning
POLL_S = 0.5  # between looks at the progress
MEMORY_SIGNALS = (signal.SIGKILL, signal.SIGBUS, signal.SIGSEGV)  # how a process ends when the host has no more memory
OUT_OF_MEMORY = ("; meanwhile the kernel ended processes because the host was out of memory: see out/hosts.jsonl for what was "
                 "planned, use fewer ranks or more nodes, or lower --offload_fraction")
LITTLE_MEMORY = 0.02  # part of the host's memory: a rank killed with less available is out of memory

# seconds that a phase may take without anything new; a step, if 0: STEP_FACTOR x the median of recent ones, at least STEP_FLOOR_S
TIMEOUTS = {"init": 1800.0, "data": 6 * 3600.0, "compile": 3600.0, "step": 0.0, "eval": 3600.0, "checkpoint": 3600.0,
            "end": 1800.0}
STEP_FACTOR, STEP_FLOOR_S = 20.0, 300.0

DONE, STOPPED, CANCELLED = "done", "stopped", "cancelled"
CONFIG, DIVERGED, UNHEALTHY, NOT_SAVED, NO_SPACE = "config", "diverged", "check", "not-saved", "no-space"
NODE, KILLED, HANG, MEMORY, START, ERROR = "node", "killed", "hang", "memory", "start", "error"
KNOWN = {EXIT_CONFIG: CONFIG, EXIT_DIVERGED: DIVERGED, EXIT_UNHEALTHY: UNHEALTHY, EXIT_NOT_SAVED: NOT_SAVED,
         EXIT_NO_SPACE: NO_SPACE}
MEANING = {CONFIG: "a setting, a file or a layout that cannot work", DIVERGED: "the run diverged", UNHEALTHY: "a check failed",
           NOT_SAVED: "the last checkpoint could not be written", NO_SPACE: "no space on a file system",
           MEMORY: "out of memory", ERROR: "an error", START: "failed before it began"}
# restarts in BUDGET_HOURS that a cause may have; what is not here is never tried again
BUDGETS = {NODE: 20, KILLED: 10, HANG: 5, MEMORY: 1, START: 2, ERROR: 1}
BUDGET_HOURS = 24.0
STRIKES = 2  # faults of one node, each of which was no other's, that exclude it


# ------------------------------------------------------------------------------------------------------------------
# Evidence
# ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exit:
    """How a rank ended. code: negative for a signal."""

    rank: int
    node: str
    code: int
    time: float  # Unix
    out_of_memory: bool = False  # meanwhile the kernel of its node ended processes for want of memory
    page: dict | None = None  # the last state of its page; None: it never had one


@dataclass(frozen=True)
class Evidence:
    """All that is known of an attempt once it has ended."""

    nodes: tuple[str, ...]
    ranks_per_node: int
    exits: dict[int, Exit]
    ended: tuple[int, ...] = ()  # ranks that the launcher ended because of the others, or of the hang
    step_before: int = 0  # the furthest step of the attempts before
    step_after: int = 0  # the furthest now
    step_here: int = 0  # where this attempt ended
    down: dict[str, str] = field(default_factory=dict)  # of these nodes, those that the scheduler calls unusable, in its words
    suspects: dict[str, str] = field(default_factory=dict)  # nodes that have failed a check since, and how
    asked: tuple[str, ...] = ()  # signals that the launcher got and passed on
    hang: watch.Hang | None = None
    silent: tuple[str, ...] = ()  # nodes that gave no hang report
    left_s: float | None = None  # until the end of the job; None: no limit is known

    def node_of(self, rank: int) -> str:
        return self.nodes[rank // self.ranks_per_node]

    def ranks_of(self, n: int) -> range:
        return range(n * self.ranks_per_node, (n + 1) * self.ranks_per_node)


def write_exit(folder: Path, rank: int, node: str, code: int, pages: Path | None, out_of_memory: bool = False):
    """On the node of a rank that has ended: what is known of it, where the launcher finds it. Its page goes."""
    file = pages and watch.page_file(pages, rank)
    page = file and watch.read(file)
    kept = page and {name: getattr(page, name) for name in ("step", "phase", "asked", "memory", "launched", "ends", "ends_at")}
    watch.replace_json(folder / f"exit-{rank}.json", asdict(Exit(rank, node, code, time.time(), out_of_memory, kept)))
    for name in (file, file and file.with_suffix(".stacks")):
        if name:
            name.unlink(missing_ok=True)


def read_exits(folder: Path) -> dict[int, Exit]:
    found = (Exit(**json.loads(path.read_text())) for path in folder.glob("exit-*.json"))
    return {exit.rank: exit for exit in found}


def by_themselves(e: Evidence) -> list[Exit]:
    """How ranks ended that the launcher did not end; and those that had said with which code they would, when they failed: an
    exit may take long, crash, or hang until the launcher ends it."""
    found = []
    for rank, exit in sorted(e.exits.items()):
        if said := exit.page and exit.page["ends"]:
            found.append(replace(exit, code=said, time=exit.page["ends_at"]))
        elif rank not in e.ended:
            found.append(exit)
    return found


def first_failure(exits: list[Exit]) -> Exit | None:
    """The cause among those that failed at about the same time: one killed by a signal rather than one that gave a code; last
    what is mostly the consequence, a lost connection: a plain 1, or an abort. A process that SIGKILL ends may close its
    connections long before it is gone, while the kernel writes its files to the disk."""
    failed = [exit for exit in exits if exit.code not in (EXIT_OK, EXIT_STOPPED)]
    earliest = min((exit.time for exit in failed), default=0.0)
    mostly_consequences = (EXIT_FAILED, -signal.SIGABRT)
    near = [exit for exit in failed if exit.time < earliest + PEER_GRACE_S]
    if all(exit.code in mostly_consequences for exit in near):
        near = [exit for exit in failed if exit.code == -signal.SIGKILL] or near
    return min(near, key=lambda x: (2 if x.code in mostly_consequences else x.code >= 0, x.time, x.rank), default=None)


def shell_code(code: int) -> int:
    return 128 - code if code < 0 else code


# ------------------------------------------------------------------------------------------------------------------
# The judgement: pure functions
# ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cause:
    name: str
    why: str
    nodes: tuple[str, ...] = ()  # where the fault lies, if it can be told
    firm: bool = False  # these nodes are unusable, or nothing else can have been at fault
    code: int = EXIT_FAILED  # of the launcher, if it ends here


def cause_of(e: Evidence) -> Cause:
    """Why an attempt ended. What ranks say knowingly, by their code, goes first; then what was asked for, the scheduler's word,
    the watchdog's; then how the first one died."""
    own = by_themselves(e)
    first = first_failure(own) or first_failure(list(e.exits.values()))
    code = shell_code(first.code) if first else EXIT_STOPPED if any(x.code == EXIT_STOPPED for x in own) else EXIT_OK
    if len(e.exits) == len(e.nodes) * e.ranks_per_node and all(exit.code == EXIT_OK for exit in e.exits.values()):
        return Cause(DONE, "all ranks have ended well", code=EXIT_OK)
    for exit in own:
        if exit.code in KNOWN:
            return Cause(KNOWN[exit.code], f"rank {exit.rank}: {MEANING[KNOWN[exit.code]]}", code=exit.code)
    if "SIGUSR1" in e.asked or e.asked and e.left_s is not None and e.left_s < END_S:
        how = "" if code == EXIT_STOPPED else ", and the job's end came before theirs in good order"
        return Cause(STOPPED, f"{e.asked[0]} was passed on, the scheduler's warning{how}", code=EXIT_STOPPED)
    if e.asked:
        return Cause(STOPPED if code == EXIT_STOPPED else CANCELLED, f"{e.asked[0]} was passed on", code=code or EXIT_FAILED)
    if e.down:
        why = "; ".join(f"{node}: {why}" for node, why in e.down.items())
        return Cause(NODE, why, tuple(e.down), True, EXIT_HANG if e.hang else code or EXIT_FAILED)
    if e.hang and not first_failure(own):
        if e.silent:
            return Cause(NODE, f"no answer from {', '.join(e.silent)}; {e.hang.text}", e.silent, True, EXIT_HANG)
        return Cause(HANG, e.hang.text, tuple(e.hang.nodes), code=EXIT_HANG)
    if not first and own and not missing(e):
        return why_stopped(e, own)
    return cause_of_death(e, own, first, code or EXIT_FAILED)


def missing(e: Evidence) -> list[int]:
    """Ranks of which nobody can say how they ended."""
    return [rank for rank in range(len(e.nodes) * e.ranks_per_node) if rank not in e.exits]


def why_stopped(e: Evidence, own: list[Exit]) -> Cause:
    """All ranks ended with a checkpoint, though the launcher passed nothing on: a few that got a signal are a fault; all of them,
    or SIGUSR1, are the scheduler; none, the end of the job."""
    asked = {exit.rank: exit.page["asked"] for exit in own if exit.page and exit.page["asked"]}
    if asked and len(asked) < len(own) and signal.SIGUSR1 not in asked.values():
        names = ", ".join(f"rank {rank} by {signal.Signals(number).name}" for rank, number in asked.items())
        nodes = only({e.node_of(rank) for rank in asked})
        return Cause(KILLED, f"told to stop, but not by the launcher: {names}", nodes, code=EXIT_STOPPED)
    why = f"the ranks got {signal.Signals(max(asked.values())).name}" if asked else "the end of the job is near"
    return Cause(STOPPED, why, code=EXIT_STOPPED)


def cause_of_death(e: Evidence, own: list[Exit], first: Exit | None, code: int) -> Cause:
    lost = missing(e)
    lost_nodes = [node for n, node in enumerate(e.nodes) if set(e.ranks_of(n)) <= set(lost)]
    if lost_nodes and len(lost_nodes) < len(e.nodes):
        return Cause(NODE, f"nothing is left of {', '.join(lost_nodes)}", tuple(lost_nodes), code=code)
    if not e.exits:  # not even their wrappers could tell: srun or mpiexec did not start, or was ended with all of them
        return Cause(KILLED if e.step_after > e.step_before else START, "all ranks are gone, nobody knows how", code=code)
    if first is None:
        return Cause(ERROR, f"ranks {watch.shortened(lost)} are gone, nobody knows how", code=code)
    if first.code == EXIT_OUT_OF_MEMORY:
        return Cause(MEMORY, f"rank {first.rank}: an allocation failed", code=code)
    if first.code == -signal.SIGABRT:
        return Cause(ERROR, f"rank {first.rank} aborted", (first.node,), code=code)
    if first.code < 0:
        number = -first.code
        if number in MEMORY_SIGNALS and (first.out_of_memory or (first.page or {}).get("memory", 1.0) < LITTLE_MEMORY):
            return Cause(MEMORY, f"rank {first.rank} was killed by signal {number} on a host without memory", code=code)
        killed = {exit.rank for exit in own if exit.code == first.code}
        if e.ranks_per_node > 1 and len(e.nodes) > 1:
            whole = [node for n, node in enumerate(e.nodes) if killed == set(e.ranks_of(n))]
            if whole:
                why = f"all ranks of {whole[0]}, and only they, were killed by signal {number}"
                return Cause(NODE, why, tuple(whole), code=code)
        return Cause(KILLED, f"rank {first.rank} was killed by signal {number} ({signal_name(number)})",
                     only({e.node_of(rank) for rank in killed}), code=code)
    early = [exit for exit in own if exit.code not in (EXIT_OK, EXIT_STOPPED) and not exit.page]
    if not first.page:
        nodes = only({exit.node for exit in early}) if len(e.nodes) > 1 else ()
        return Cause(START, f"rank {first.rank} ended with exit code {first.code} before it began", nodes, bool(nodes), code)
    if first.page["phase"] == "init" and e.step_after == e.step_before:
        return Cause(START, f"rank {first.rank} ended with exit code {first.code} while it began", code=code)
    return Cause(ERROR, f"rank {first.rank} ended with exit code {first.code}", (first.node,), code=code)


def most(bad, nodes: list[str]) -> bool:
    """So many at once say more of the scheduler, or the network, that should reach them."""
    return len(nodes) > 1 and 2 * len(bad) > len(nodes)


def lies_with_nodes(cause: Cause) -> bool:
    return cause.name in (STOPPED, NODE, HANG, KILLED) or cause.name == START and bool(cause.nodes)


def only(nodes: set[str]) -> tuple[str, ...]:
    """One node can be named; of several none is more at fault than another."""
    return tuple(nodes) if len(nodes) == 1 else ()


@dataclass
class Limits:
    retries: int = 50  # restarts in all; 0: none
    budgets: dict[str, int] = field(default_factory=lambda: dict(BUDGETS))
    hours: float = BUDGET_HOURS
    backoff_s: float = 2.0  # before the next attempt; doubles with each that brought nothing, up to a minute
    start_s: float = 60.0  # from an attempt's start to its first step, as far as is known: less is no use


@dataclass
class History:
    """What a launch remembers from attempt to attempt."""

    charged: list[tuple[float, str]] = field(default_factory=list)  # Unix time, cause of each restart
    strikes: dict[str, list[str]] = field(default_factory=dict)  # node -> why it alone was at fault
    fruitless: int = 0  # attempts in a row without a new step
    excluded: dict[str, dict] = field(default_factory=dict)  # node -> evidence, and when


@dataclass(frozen=True)
class Verdict:
    cause: Cause
    restart: bool
    code: int  # of the launcher, if it ends here
    why: str  # of the decision
    exclude: dict[str, str]  # node -> evidence
    strikes: dict[str, str]
    fruitless: int
    wait_s: float = 0.0


def judge(e: Evidence, history: History, limits: Limits, spares: int, now: float) -> Verdict:
    """Cause of an attempt's end and what to do. spares: healthy nodes that are not in use; now: Unix time."""
    cause = cause_of(e)
    progress = e.step_after > e.step_before
    fruitless = 0 if progress else history.fruitless + 1
    strikes, exclude = {}, dict(e.suspects)
    if cause.name in (NODE, KILLED, HANG, START, ERROR) and len(cause.nodes) == 1 or cause.firm:
        strikes = {node: f"{cause.why} (after step {e.step_here})" for node in cause.nodes}
    for node, why in strikes.items():
        before = [text for text in history.strikes.get(node, []) if text != why]  # the same twice is rather the program
        if cause.firm or len(before) + 1 >= STRIKES or cause.name == NODE:
            exclude.setdefault(node, " | ".join([*before, why]))
    unusable = [node for node in exclude if cause.firm or node in e.suspects]
    if len(exclude) > spares and not unusable:
        exclude = {}  # there is none to put in its place; it may do
    recent = Counter(name for when, name in history.charged if when > now - 3600 * limits.hours)

    def verdict(restart: bool, why: str, code: int = cause.code) -> Verdict:
        wait_s = min(60.0, limits.backoff_s * 2 ** min(fruitless, 8)) if restart else 0.0
        return Verdict(cause, restart, code, why, exclude, strikes, fruitless, wait_s)

    if cause.name in (DONE, STOPPED, CANCELLED):
        return verdict(False, "nothing is to be done")
    if cause.name not in BUDGETS:
        return verdict(False, "it would end the same way again")
    if not limits.retries:
        return verdict(False, "no restarts are allowed (--retries 0)")
    if cause.name in (MEMORY, ERROR) and not progress:
        return verdict(False, "it came before any new step, and would again")
    if len(history.charged) >= limits.retries:
        return verdict(False, f"all {limits.retries} restarts (--retries) are used")
    if recent[cause.name] >= limits.budgets[cause.name]:
        allowed = limits.budgets[cause.name]
        return verdict(False, f"its {allowed} restarts in {limits.hours:g} hours (--budget {cause.name}=n) are used")
    if len(exclude) > spares:
        return verdict(False, f"{', '.join(exclude)} cannot be used and there are {spares} spare nodes (--spares)")
    if fruitless >= 2 and not unusable:
        return verdict(False, f"{fruitless} attempts in a row brought no new step")
    if e.left_s is not None and e.left_s < limits.start_s:
        return verdict(False, f"{e.left_s:.0f} s are left of the job, less than a start takes", EXIT_STOPPED)
    return verdict(True, "restarted" + (f" without {', '.join(exclude)}" if exclude else ""))


def signal_name(number: int) -> str:
    return signal.Signals(number).name if number in list(signal.Signals) else "real-time signal"


# ------------------------------------------------------------------------------------------------------------------
# The watchdog
# ------------------------------------------------------------------------------------------------------------------


class Watchdog:
    """Whether a run makes progress: pairs (step, phase) that are new. One that comes back a few times (a save within a step)
    counts, one that comes back for ever does not."""

    def __init__(self, timeouts: dict[str, float], now: float):
        """now: seconds of the monotonic clock, which all times here are in."""
        self.timeouts, self.since, self.looked, self.last, self.seen = timeouts, now, now, (0, "init"), Counter()

    def look(self, progress: dict, now: float) -> str:
        """progress: what rank 0 told last, {} before anything. Returns why this is a hang, or ""."""
        step, phase = progress.get("step", 0), progress.get("phase", "init")
        if now > self.looked + 10 + 2 * POLL_S:
            self.since += now - self.looked  # we were stopped ourselves, and the ranks perhaps with us
        self.looked = now
        if (step, phase) != self.last:
            self.last = step, phase
            self.seen[self.last] += 1
            if self.seen[self.last] <= 4:
                self.since = now
        allowed = self.allowed(phase, progress.get("step_s") or 0.0)
        if now - self.since <= allowed:
            return ""
        return (f"nothing new for {now - self.since:.0f} s in phase {phase} at step {step}, {allowed:.0f} are allowed "
                f"(--timeout {phase}=s)")

    def allowed(self, phase: str, step_s: float) -> float:
        known = self.timeouts.get(phase, self.timeouts["end"])
        return known or max(STEP_FLOOR_S, STEP_FACTOR * step_s)


# ------------------------------------------------------------------------------------------------------------------
# The loop
# ------------------------------------------------------------------------------------------------------------------


@dataclass
class Options:
    """Of a launch."""

    nodes: int  # that an attempt runs on; what the starter has beyond are spares
    folder: Path  # for what the attempts leave, on a file system that all nodes share
    pages: Path  # for the ranks' pages, in memory, on each node
    limits: Limits = field(default_factory=Limits)
    timeouts: dict[str, float] = field(default_factory=lambda: dict(TIMEOUTS))
    watched: bool = True  # False: a program that tells no progress, such as eval.py
    end_of_job: float | None = None  # Unix time
    check: Callable[[list[str]], dict[str, str]] | None = None  # finds bad nodes among those whose ranks have just failed


class Requests:
    """Signals to stop: each is passed on once, the second SIGINT or SIGTERM kills."""

    def __init__(self):
        self.sent: dict[signal.Signals, float] = {}  # and when (monotonic seconds)
        self.killed = False

    def take(self, number: signal.Signals, handle, running: int):
        urgent, now = {signal.SIGINT, signal.SIGTERM}, time.monotonic()
        if number in self.sent and now < self.sent[number] + ECHO_S:
            return
        if number in urgent and self.sent.keys() & urgent:
            say(f"second request to stop ({number.name}): killing {running} ranks")
            self.killed = True
            handle.kill()
        elif number not in self.sent:
            say(f"{number.name} passed on to {running} ranks, to stop after a checkpoint; a second one kills")
            self.sent[number] = now
            handle.send(number)


class Attempt:
    """One start of all ranks, until nothing of it is left."""

    def __init__(self, starter, nodes: list[str], number: int, options: Options):
        self.starter, self.nodes, self.number, self.options = starter, nodes, number, options
        self.folder, self.pages = options.folder / str(number), options.pages / str(number)
        self.began, self.progress = time.time(), {}
        self.failed: float | None = None  # monotonic seconds of the first failure that was seen
        self.own: set[int] = set()  # ranks that ended before the launcher ended the rest
        self.ending = self.killed = False
        self.hang, self.ranks, self.silent = None, [], ()

    def run(self, command: list[str], environment: dict[str, str], inbox, requests: Requests):
        """Returns when it has ended. Raises LaunchError where the ranks cannot be started."""
        self.folder.mkdir(parents=True)
        environment = {**environment, watch.ATTEMPT_VAR: str(self.folder), watch.FOLDER_VAR: str(self.pages)}
        self.handle = self.starter.start(self.nodes, command, environment, self.folder)
        dog = Watchdog(self.options.timeouts, time.monotonic())
        try:
            while not (self.handle.poll(0) or self.killed):
                self.end_peers()
                for number in inbox.wait(self.due()):
                    requests.take(number, self.handle, self.world() - len(self.handle.codes()))
                self.progress = self.read_progress()
                if self.options.watched and self.failed is None and (why := dog.look(self.progress, time.monotonic())):
                    self.hung(why)
        finally:
            self.handle.kill()
        self.progress = self.read_progress()
        if not self.ending:
            self.own = set(self.handle.codes())
        elif not (self.killed or requests.killed):
            self.own |= self.killed_by_others()

    def world(self) -> int:
        return len(self.nodes) * self.starter.ranks_per_node

    def due(self) -> float:
        return POLL_S if self.options.watched or self.failed is not None else 60.0

    def read_progress(self) -> dict:
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.folder / "progress.json").read_text())
        return self.progress

    def end_peers(self):
        """Peers of a failed rank may wait for it forever: they get time to fail by themselves, then SIGTERM, then SIGKILL."""
        codes, now = self.handle.codes(), time.monotonic()
        if self.failed is None and any(code not in (EXIT_OK, EXIT_STOPPED) for code in codes.values()):
            self.failed = now
        if self.failed is None:
            return
        if now >= self.failed + PEER_GRACE_S and not self.ending:
            self.ending, self.own = True, set(codes)
            self.handle.send(signal.SIGTERM)
        if now >= self.failed + PEER_GRACE_S + TERM_GRACE_S:
            self.kill()

    def killed_by_others(self) -> set[int]:
        """Ranks that SIGKILL has ended, while the launcher had sent no more than SIGTERM."""
        return {rank for rank, code in self.handle.codes().items() if code == -signal.SIGKILL}

    def kill(self):
        """Ends the attempt; a process that the kernel holds, or that cannot be reached, is left to it."""
        self.own |= self.killed_by_others()
        self.killed = True
        self.handle.kill()

    def hung(self, why: str):
        """Gathers what the nodes know, says who is to blame, and ends the attempt."""
        self.ending, self.own, program = True, set(self.handle.codes()), Path(watch.__file__).resolve()
        answers = self.starter.on_each(self.nodes, [sys.executable, str(program), "report", str(self.pages)], 60)
        for node in self.nodes:
            code, output = answers.get(node, (1, b""))
            try:
                self.ranks += [watch.Rank(**rank) for rank in json.loads(output)] if code == 0 else []
            except ValueError:
                code = 1
            self.silent += () if code == 0 else (node,)
        self.silent = () if most(self.silent, self.nodes) else self.silent
        nodes_of = {rank: self.nodes[rank // self.starter.ranks_per_node] for rank in range(self.world())}
        self.hang = watch.blame(self.ranks, self.world(), nodes_of, self.silent)
        shown = sorted(self.ranks, key=lambda rank: (rank.rank not in self.hang.ranks, rank.rank))[:32]
        say(f"hang: {why}\n{self.hang.text}\n{watch.table(shown)}")
        self.kill()

    def evidence(self, step_before: int, asked: tuple[str, ...]) -> Evidence:
        options, exits = self.options, read_exits(self.folder)
        for rank, code in self.handle.codes().items():  # one whose node did not write it
            exits.setdefault(rank, Exit(rank, self.nodes[rank // self.starter.ranks_per_node], code, time.time()))
        down = {node: why for node, why in self.starter.unusable().items() if node in self.nodes}
        left_s = min((end for end in (options.end_of_job, self.progress.get("end")) if end), default=None)
        e = Evidence(tuple(self.nodes), self.starter.ranks_per_node, exits, tuple(sorted(set(range(self.world())) - self.own)),
                     step_before, max(step_before, self.progress.get("step", 0)), self.progress.get("step", 0), down, {}, asked,
                     self.hang, self.silent, left_s - time.time() if left_s else None)
        if options.check and cause_of(e).name in (KILLED, HANG, ERROR, START):
            suspects = options.check(self.nodes)
            e = replace(e, suspects={} if most(suspects, self.nodes) else suspects)
        return e


class Account:
    """What a launch costs and yields: seconds of steps that count, and from a crash to the first step back."""

    def __init__(self):
        self.began, self.attempts, self.useful_s, self.back_s, self.crashed = time.time(), 0, None, [], None

    def add(self, attempt: Attempt, limits: Limits):
        told, self.attempts = attempt.progress, attempt.number
        self.useful_s = told.get("useful_s", self.useful_s)
        if first := told.get("first_step"):
            limits.start_s = 1.5 * (first - attempt.began)
            self.back_s += [first - self.crashed] if self.crashed else []
            self.crashed = None

    def fails(self, e: Evidence, attempt: Attempt):
        """From the last progress before a hang, or the first rank's end; from the first crash, if there was no step since."""
        failed = [exit.time for exit in by_themselves(e) if exit.code not in (EXIT_OK, EXIT_STOPPED)]
        moment = min(failed, default=attempt.progress.get("time", attempt.began))
        self.crashed = self.crashed or moment

    def say(self):
        wall_s, times = time.time() - self.began, self.back_s
        back = f"; crash to first step back: median {median(times):.1f} s, longest {max(times):.1f} s" if times else ""
        if self.useful_s is not None:
            say(f"{self.attempts} attempt{'s' if self.attempts > 1 else ''}, goodput {self.useful_s / wall_s:.0%} "
                f"({self.useful_s:.1f} s of steps that count in {wall_s:.1f} s){back}")


def supervise(starter, command: list[str], options: Options, inbox) -> tuple[int, bool]:
    """Runs the command on the first healthy nodes until it is done, or must not be started again; returns the exit code and
    whether another job, on other nodes, may do better. inbox: the launcher's signals, wait(seconds) -> list. Raises LaunchError
    where it cannot be started at all."""
    history, requests, account, verdict = History(), Requests(), Account(), None
    run, environment, best = None, {}, None
    while True:
        try:
            nodes = healthy(starter, history, options.nodes)
            attempt = Attempt(starter, nodes[: options.nodes], account.attempts + 1, options)
            attempt.run(command, environment, inbox, requests)
        except LaunchError as error:
            if verdict is None:
                raise
            say(f"error: {error}")
            break
        account.add(attempt, options.limits)
        told = attempt.progress
        if told.get("run") and run is None:
            run, environment = Path(told["run"]), {BEGUN_VAR: str(told["from"])}
        best = told.get("from", told.get("step", 0)) if best is None else best
        e = attempt.evidence(best, tuple(s.name for s in requests.sent))
        verdict, best = judge(e, history, options.limits, len(nodes) - options.nodes, time.time()), e.step_after
        announce(e)
        note(verdict, history)
        record(run, attempt, e, verdict, history)
        if not verdict.restart:
            break
        account.fails(e, attempt)
        say(f"attempt {attempt.number + 1} in {verdict.wait_s:.0f} s: {verdict.cause.name}, {verdict.cause.why}; {verdict.why}")
        if asked := pause(inbox, verdict.wait_s):
            say(f"{asked} while waiting to start again: the run can go on from its newest checkpoint")
            account.say()
            return EXIT_STOPPED, True
    account.say()
    if verdict.cause.name in BUDGETS and options.limits.retries:
        say(f"given up: {verdict.cause.name}, {verdict.cause.why}; {verdict.why}")
    return verdict.code, lies_with_nodes(verdict.cause)


def healthy(starter, history: History, needed: int) -> list[str]:
    """Nodes that can be used, in their order. Raises LaunchError if they are too few."""
    for node, why in starter.unusable().items():
        exclude(history, node, why)
    nodes = [node for node in starter.nodes() if node not in history.excluded]
    if len(nodes) < needed:
        lost = "; ".join(f"{node} ({found['why']})" for node, found in history.excluded.items())
        raise LaunchError(f"{needed} nodes are needed, {len(nodes)} can be used; not: {lost}")
    return nodes


def exclude(history: History, node: str, why: str):
    history.excluded.setdefault(node, {"why": why, "time": time.time()})


def note(verdict: Verdict, history: History):
    """What the next judgement needs to know of this one."""
    history.fruitless = verdict.fruitless
    for node, why in verdict.strikes.items():
        history.strikes.setdefault(node, []).append(why)
    for node, why in verdict.exclude.items():
        exclude(history, node, why)
    if verdict.restart:
        history.charged.append((time.time(), verdict.cause.name))


def announce(e: Evidence):
    """One line on the first failure, where the rank has not said it itself."""
    first = first_failure(by_themselves(e))
    if first is None or first.code == EXIT_CONFIG:
        return
    if first.code < 0:
        say(f"rank {first.rank} was killed by signal {-first.code} ({signal_name(-first.code)})"
            + (OUT_OF_MEMORY if -first.code in MEMORY_SIGNALS and first.out_of_memory else ""))
    else:
        say(f"rank {first.rank} ended with exit code {first.code}")


def record(run: Path | None, attempt: Attempt, e: Evidence, verdict: Verdict, history: History):
    """A line in out/<run>/attempts.jsonl, once there is such a run; the hang report beside it."""
    if run is None or not run.is_dir():
        return
    first = first_failure(by_themselves(e))
    line = {"attempt": attempt.number, "began": attempt.began, "ended": time.time(), "nodes": e.nodes,
            "codes": dict(Counter(str(exit.code) for exit in e.exits.values())), "first": first and asdict(first),
            "step_before": e.step_before, "step_after": e.step_after, "step_here": e.step_here,
            "cause": verdict.cause.name, "why": verdict.cause.why,
            "restart": verdict.restart, "decision": verdict.why, "code": verdict.code,
            "charged": Counter(name for _, name in history.charged), "strikes": verdict.strikes,
            "excluded": {node: history.excluded[node] for node in verdict.exclude}, "asked": e.asked, "down": e.down,
            "suspects": e.suspects, "hang": e.hang and asdict(e.hang), "left_s": e.left_s, "wait_s": verdict.wait_s}
    try:
        with open(run / "attempts.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if e.hang:
            stacks = "\n".join(f"rank {rank.rank}\n{rank.stacks}" for rank in attempt.ranks)
            text = f"{e.hang.text}\n{watch.table(attempt.ranks)}\n\n{stacks}"
            (run / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.txt").write_text(text, encoding="utf-8")
    except OSError as error:
        say(f"{run}: how attempt {attempt.number} ended could not be written there ({error.strerror})")


def pause(inbox, seconds: float) -> str:
    """Waits; the name of a signal that asks to stop ends it."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        for number in inbox.wait(left):
            return number.name
    return ""


def say(text: str):
    """On stderr; a closed terminal must not keep us from ending the ranks."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
