"""Failures judged: pure judgements on made-up evidence, the launcher with real processes, and short faults of the tiny model.

Most programs that the launcher starts here do without torch: they start in a tenth of a second, tell their progress and wait for
each other as train.py does."""

import json
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import launch
import pytest
import recover
import watch
from errors import EXIT_HANG, EXIT_STOPPED
from failures import lines_of
from recover import (CANCELLED, CONFIG, DIVERGED, DONE, ERROR, HANG, KILLED, MEMORY, NO_SPACE, NODE, NOT_SAVED, START, STOPPED,
                     UNHEALTHY, Evidence, Exit, History, Limits, judge)
from soak import main as soak
from test_launch import LAUNCH, PATIENCE_S, all_gone, environment, until

PAGE = {"step": 7, "phase": "step", "asked": 0, "memory": 0.5, "launched": None, "ends": 0, "ends_at": 0.0}


# ---- judgements


def ended(*codes, nodes=2, page=PAGE, **changes) -> Evidence:
    """Ranks that ended with these codes one after the other, 10 ms apart, in an attempt that made 3 steps."""
    names, per_node = tuple(f"n{i}" for i in range(nodes)), len(codes) // nodes
    exits = {rank: Exit(rank, names[rank // per_node], code, 100 + rank / 100, page=page) for rank, code in enumerate(codes)
             if code is not None}
    return replace(Evidence(names, per_node, exits, step_before=4, step_after=7), **changes)


def page(e: Evidence, rank: int, **changes) -> Evidence:
    return replace(e, exits={**e.exits, rank: replace(e.exits[rank], page={**PAGE, **changes})})


def hang(kind="stopped", ranks=(3,), nodes=("n1",)) -> watch.Hang:
    return watch.Hang(kind, list(ranks), list(nodes), text="rank 3 hangs")


STUCK = {"step_before": 7}  # no new step
HUNG = ended(-9, -9, -9, -9, ended=(0, 1, 2, 3), hang=hang())
CASES = {
    # (evidence, cause, restart, code, excluded), with one spare
    "done": (ended(0, 0, 0, 0), DONE, False, 0, ()),
    "config": (ended(1, 2, 2, 1), CONFIG, False, 2, ()),
    "diverged": (ended(65, 65, 65, 65), DIVERGED, False, 65, ()),
    "a failed check": (ended(70, 70, 1, 70), UNHEALTHY, False, 70, ()),
    "no space": (ended(1, 73, 1, 1), NO_SPACE, False, 73, ()),
    "not saved": (ended(74, 74, 74, 74), NOT_SAVED, False, 74, ()),
    "a bad flag although a node is down": (ended(2, 2, 2, 2, down={"n0": "drained"}), CONFIG, False, 2, ()),
    "killed by 9": (ended(1, 1, -9, 1), KILLED, True, 137, ()),
    "killed by 11": (ended(1, 1, 1, -11), KILLED, True, 139, ()),
    "killed by 15 before the first step": (ended(0, -15, 1, 1, page=None), KILLED, True, 143, ()),
    "told to stop, one rank alone": (page(ended(75, 75, 75, 75), 2, asked=15), KILLED, True, 75, ()),
    "told to stop by the scheduler": (replace(ended(75, 75, 75, 75, page={**PAGE, "asked": 15})), STOPPED, False, 75, ()),
    "warned by the scheduler, one rank alone": (page(ended(75, 75, 75, 75), 0, asked=10), STOPPED, False, 75, ()),
    "the end of the job": (ended(75, 75, 75, 75), STOPPED, False, 75, ()),
    "cancelled": (ended(75, 75, 75, 75, asked=("SIGTERM",)), STOPPED, False, 75, ()),
    "warned before the ranks listen": (ended(-10, 1, 75, 1, asked=("SIGUSR1",)), STOPPED, False, 75, ()),
    "warned before the ranks are there": (ended(None, None, None, None, asked=("SIGUSR1",)), STOPPED, False, 75, ()),
    "a rank lost after the warning": (ended(1, 1, -9, -9, asked=("SIGUSR1",)), STOPPED, False, 75, ()),
    "warned, then told to end": (ended(None, None, None, None, asked=("SIGUSR1", "SIGTERM")), STOPPED, False, 75, ()),
    "told to end at the job's end": (ended(-10, -10, -10, -10, asked=("SIGTERM",), left_s=3.0), STOPPED, False, 75, ()),
    "told to end long before the job's end": (ended(-10, -10, -10, -10, asked=("SIGTERM",), left_s=300.0), CANCELLED, False, 138, ()),
    "a check that fails after the warning": (ended(70, 75, 75, 75, asked=("SIGUSR1",)), UNHEALTHY, False, 70, ()),
    "cancelled before the ranks are there": (ended(None, None, None, None, asked=("SIGTERM",)), CANCELLED, False, 1, ()),
    "cancelled before the first step": (ended(-2, -2, -2, -2, asked=("SIGINT",)), CANCELLED, False, 130, ()),
    "cancelled while a rank died": (ended(1, -9, 1, 1, asked=("SIGINT",)), CANCELLED, False, 137, ()),
    "a node killed": (ended(1, 1, -9, -9), NODE, True, 137, ("n1",)),
    "all nodes killed": (ended(-9, -9, -9, -9), KILLED, True, 137, ()),
    "one node only": (ended(-9, -9, nodes=1), KILLED, True, 137, ()),
    "a node down, says the scheduler": (ended(1, 1, -9, 1, down={"n1": "not responding"}), NODE, True, 137, ("n1",)),
    "a node gone without a word": (ended(1, 1, None, None), NODE, True, 1, ("n1",)),
    "a hang": (HUNG, HANG, True, 124, ()),
    "a hang, and a silent node": (replace(HUNG, hang=hang("unreachable"), silent=("n1",)), NODE, True, 124, ("n1",)),
    "a hang, and a node down": (replace(HUNG, down={"n0": "drained"}), NODE, True, 124, ("n0",)),
    "out of memory, said so": (ended(1, 1, 71, 1), MEMORY, True, 71, ()),
    "out of memory at the first step": (ended(71, 1, 1, 1, **STUCK), MEMORY, False, 71, ()),
    "killed by 9 with no memory left": (page(ended(1, -9, 1, 1), 1, memory=0.004), MEMORY, True, 137, ()),
    "an error": (ended(1, 1, 1, 1), ERROR, True, 1, ()),
    "an error at the first step": (ended(1, 1, 1, 1, **STUCK), ERROR, False, 1, ()),
    "an abort because a peer has failed": (ended(1, -6, 1, 1), ERROR, True, 1, ()),
    "before the first line, everywhere": (ended(1, 1, 1, 1, page=None, **STUCK), START, True, 1, ()),
    "an error in the start": (ended(1, 1, 1, 1, page={**PAGE, "phase": "init"}, **STUCK), START, True, 1, ()),
    "before the first line, on a node": (ended(None, None, 1, 1, page=None, **STUCK), START, True, 1, ("n1",)),
    "peers that the launcher has ended": (ended(-15, -15, -11, -15, ended=(0, 1, 3)), KILLED, True, 139, ()),
    "killed, and gone long after its peers have lost it": (
        replace(e := ended(1, 1, -9, 1, ended=(3,)), exits={**e.exits, 2: replace(e.exits[2], time=103.5)}), KILLED, True, 137, ()),
    "bad in a check": (ended(1, 1, -9, 1, suspects={"n0": "wrong product"}), KILLED, True, 137, ("n0",)),
    "an error whose exit aborts": (
        page(page(ended(1, -6, 1, 1), 1, ends=71, ends_at=99.0), 0, ends=1, ends_at=99.5), MEMORY, True, 71, ()),
    "no space, a long exit": (page(ended(-9, -9, 1, 1, ended=(0, 1)), 0, ends=73, ends_at=99.0), NO_SPACE, False, 73, ()),
    "an error whose exit hangs": (page(HUNG, 1, ends=1, ends_at=99.0), ERROR, True, 1, ()),
    "an abort before the exit that caused it": (page(ended(1, -6, 71, 1), 2, ends=71, ends_at=99.0), MEMORY, True,
                                                71, ()),
    "no time left": (ended(1, 1, -9, 1, left_s=20.0), KILLED, False, 75, ()),
    "time left": (ended(1, 1, -9, 1, left_s=200.0), KILLED, True, 137, ()),
}
CASES["before the first line, on a node"] = (replace(CASES["before the first line, on a node"][0], exits={
    **CASES["before the first line, on a node"][0].exits, **{r: Exit(r, "n0", -15, 103.0, page=PAGE) for r in (0, 1)}},
    ended=(0, 1)), *CASES["before the first line, on a node"][1:])


@pytest.mark.parametrize("name", CASES)
def test_judgement(name):
    e, cause, restart, code, excluded = CASES[name]
    verdict = judge(e, History(), Limits(), spares=1, now=0.0)
    found = verdict.cause.name, verdict.restart, verdict.code, tuple(verdict.exclude)
    assert found == (cause, restart, code, excluded), verdict
    assert not judge(e, History(), Limits(retries=0), 1, 0.0).restart
    assert verdict.restart or judge(e, History(), Limits(), 0, 0.0).code == code


def test_the_kernels_word_on_memory_counts_for_the_signals_that_it_sends():
    e = ended(1, -9, 1, 1)
    e = replace(e, exits={**e.exits, 1: replace(e.exits[1], out_of_memory=True)})
    assert judge(e, History(), Limits(), 1, 0.0).cause.name == MEMORY
    e = replace(e, exits={**e.exits, 1: replace(e.exits[1], code=-15)})
    assert judge(e, History(), Limits(), 1, 0.0).cause.name == KILLED


def test_a_node_goes_after_two_faults_of_its_own_and_a_new_spare_stays():
    history, excluded = History(), []
    faults = [(1, 1, -9, 1), (-9, 1, 1, 1), (1, 1, -9, 1), (1, 1, 1, -9)]  # n1, n0, n1 again in the same step, n1
    for number, codes in enumerate(faults):
        verdict = judge(ended(*codes, step_here=number // 3), history, Limits(), 2, 0.0)
        recover.note(verdict, history)
        excluded.append(list(verdict.exclude))
    assert excluded == [[], [], [], ["n1"]] and " | " in history.excluded["n1"]["why"] and history.excluded["n1"]["time"] > 0
    e = replace(ended(1, 1, -9, 1), nodes=("n0", "n2"))  # the spare's first fault
    assert judge(e, history, Limits(), 1, 0.0).exclude == {}
    assert judge(ended(-9, 1, 1, 1), history, Limits(), 1, 0.0).exclude == {}, "the same as before"
    assert list(judge(ended(-11, 1, 1, 1), history, Limits(), 1, 0.0).exclude) == ["n0"]
    assert judge(ended(-11, 1, 1, 1), history, Limits(), 0, 0.0).exclude == {}, "without a spare the node is kept"
    down = judge(ended(1, 1, -9, 1, down={"n1": "drained"}), History(), Limits(), 0, 0.0)
    assert not down.restart and "0 spare nodes" in down.why


def test_each_cause_has_its_budget_and_two_attempts_without_a_step_end_the_run():
    limits, now = Limits(budgets=recover.BUDGETS | {KILLED: 2}), 10**6
    history = History(charged=[(now - 10, KILLED), (now - 5, HANG)])
    assert judge(ended(-9, 1, 1, 1), history, limits, 0, now).restart
    history.charged.append((now - 1, KILLED))
    assert "--budget killed" in judge(ended(-9, 1, 1, 1), history, limits, 0, now).why
    assert judge(HUNG, history, limits, 0, now).restart
    assert judge(ended(-9, 1, 1, 1), history, limits, 0, now + 24 * 3600).restart, "a day later"
    assert not judge(ended(-9, 1, 1, 1), history, replace(limits, retries=3), 0, now + 24 * 3600).restart
    first = judge(ended(-9, 1, 1, 1, **STUCK), History(), Limits(), 0, now)
    assert first.restart and first.fruitless == 1
    second = judge(ended(1, -11, 1, 1, **STUCK), History(fruitless=1), Limits(), 0, now)
    assert not second.restart and "2 attempts in a row" in second.why and second.code == 139
    assert judge(ended(1, -11, 1, 1), History(fruitless=1), Limits(), 0, now).fruitless == 0
    firm = judge(ended(1, -9, 1, 1, down={"n0": "drained"}, **STUCK), History(fruitless=1), Limits(), 1, now)
    assert firm.restart and firm.wait_s > first.wait_s > 0
    checked = judge(ended(1, -9, 1, 1, suspects={"n0": "wrong product"}, **STUCK), History(fruitless=1), Limits(), 1, now)
    assert checked.restart and list(checked.exclude) == ["n0"]


# ---- the watchdog


def test_watchdog_wants_new_steps_and_takes_the_phase_into_account():
    dog = recover.Watchdog({**recover.TIMEOUTS, "step": 0.0, "init": 50.0, "eval": 100.0}, 0.0)

    def look(now, step, phase, step_s=0.0):
        dog.looked = now - 1  # the launcher looks often
        return dog.look({"step": step, "phase": phase, "step_s": step_s} if phase else {}, now)

    assert not look(50, 0, None) and "phase init at step 0" in look(51, 0, None)
    assert not look(52, 1, "step") and not look(352, 1, "step") and "300 are allowed" in look(353, 1, "step")
    assert not look(360, 2, "step", 100.0) and not look(2360, 2, "step", 100.0), "20 times the median of recent steps"
    assert look(2361, 2, "step", 100.0)
    assert not look(2400, 2, "eval") and not look(2500, 2, "eval") and "--timeout eval" in look(2501, 2, "eval")
    now = 3000
    for _ in range(20):  # phases that change for ever are no progress
        for phase in ("checkpoint", "step"):
            now += 100
            told = look(now, 3, phase)
    assert told


def test_watchdog_forgives_time_in_which_the_launcher_itself_stood_still():
    dog = recover.Watchdog({**recover.TIMEOUTS, "step": 30.0}, 0.0)
    assert not dog.look({"step": 1, "phase": "step"}, 1.0) and not dog.look({"step": 1, "phase": "step"}, 1000.0)
    for now in range(1001, 1035):
        told = dog.look({"step": 1, "phase": "step"}, float(now))
    assert told


# ---- who is to blame


def rank(number, node, launched, waiting=None, state="S", cpu=0.0) -> watch.Rank:
    names = {str(n): f"purpose {n} over world" for n in range(max(1, launched - 60), launched + 1)}
    pair = {n: [n, f"purpose {n} over world"] for n in (launched, waiting) if n}
    return watch.Rank(number, node, 100 + number, 0.1, "step", 1.0, 5, pair.get(launched), pair.get(waiting), None, None, names,
                      0, 0.5, 0, 0.0, state, cpu)


FOUR = {0: "n0", 1: "n0", 2: "n1", 3: "n1"}
BLAMES = {
    "stopped": ([rank(0, "n0", 9, 8), rank(1, "n0", 8, 7), rank(2, "n1", 6, None, "T"), rank(3, "n1", 9, 9)], [2], ["n1"], 7,
                False),
    "stopped in one that all have launched": (
        [rank(0, "n0", 9, 8), rank(1, "n0", 9, 9), rank(2, "n1", 9, 8, "T"), rank(3, "n1", 9, 9)], [2], ["n1"], 8, True),
    "busy": ([rank(0, "n0", 9, 9), rank(1, "n0", 8, None, "R", 0.9), rank(2, "n1", 9, 9), rank(3, "n1", 9, 9)], [1], ["n0"], 9,
             False),
    "busy, though another waits with all its might": (
        [rank(0, "n0", 9, 9, "R", 1.0), rank(1, "n0", 8, None, "R", 0.9), rank(2, "n1", 9, 9), rank(3, "n1", 9, 9)], [1], ["n0"],
        9, False),
    "asleep": ([rank(0, "n0", 9, 9), rank(1, "n0", 9, 9), rank(2, "n1", 9, 9), rank(3, "n1", 4)], [3], ["n1"], 5, False),
    "blocked": ([rank(0, "n0", 9, 9), rank(1, "n0", 9, 9), rank(2, "n1", 9, 9), rank(3, "n1", 4, None, "D")], [3], ["n1"], 5,
                False),
    "gone": ([rank(0, "n0", 9, 9), rank(1, "n0", 9, 9), rank(2, "n1", 9, 9), rank(3, "n1", 8, state="X")], [3], ["n1"], 9, False),
    "gone: no page": ([rank(0, "n0", 9, 9), rank(1, "n0", 9, 9), rank(2, "n1", 9, 9)], [3], ["n1"], 1, False),
    "behind": ([rank(0, "n0", 9, 9), rank(1, "n0", 9, 9), rank(2, "n1", 8, 8), rank(3, "n1", 9, 9)], [2], ["n1"], 9, False),
    "collective": ([rank(r, node, 9, 9) for r, node in FOUR.items()], [0, 1, 2, 3], ["n0", "n1"], 9, True),
    "livelock": ([rank(r, node, 9, cpu=0.5) for r, node in FOUR.items()], [0, 1, 2, 3], ["n0", "n1"], None, False),
    "elsewhere": ([rank(r, node, 9) for r, node in FOUR.items()], [0, 1, 2, 3], ["n0", "n1"], None, False),
}


@pytest.mark.parametrize("name", BLAMES)
def test_blame(name):
    ranks, guilty, nodes, number, reached = BLAMES[name]
    found = watch.blame(ranks, 4, FOUR)
    assert (found.kind, found.ranks, found.nodes) == (name.split(":")[0].split(",")[0].split(" in ")[0], guilty, nodes), found
    if name != "gone: no page":
        assert found.collective == (number and [number, f"purpose {number} over world"]) and found.reached == reached
    assert watch.table(ranks).count("\n") >= len(ranks)


def test_where_waits_only_queue_a_rank_waits_for_the_oldest_that_is_not_complete(tmp_path):
    page, events = watch.Page(), [type("Event", (), {"query": lambda self: self.ended, "ended": False})() for _ in range(3)]
    page.thread = True  # a poller that this test is
    for event in events:
        entry = page.launches("column", "expert gather")
        page.launched(entry, event)
        page.waits(entry)
        page.waited()
        page.passes(entry, event)
    events[0].ended = events[2].ended = True
    page.poll()
    page.words[watch.AT["magic"]] = watch.MAGIC
    (tmp_path / "rank-00000").write_bytes(bytes(page.memory))
    seen = watch.read(tmp_path / "rank-00000")
    assert (seen.launched[0], seen.waiting, seen.complete[0]) == (3, [2, "expert gather over column"], 1)
    events[1].ended = True
    page.poll()
    (tmp_path / "rank-00000").write_bytes(bytes(page.memory))
    assert watch.read(tmp_path / "rank-00000").waiting is None


def test_a_node_that_does_not_answer_is_named():
    ranks = [rank(0, "n0", 9, 9), rank(1, "n0", 9, 9)]
    found = watch.blame(ranks, 4, FOUR, ["n1"])
    assert (found.kind, found.ranks, found.nodes) == ("unreachable", [2, 3], ["n1"])


class Ending:
    """A starter of attempts whose ranks end at once, with the codes of a list; and their handle."""

    ranks_per_node, names, mute = 2, ["n0", "n1"], ()

    def __init__(self, *attempts, told=()):
        self.attempts, self.told, self.number = attempts, told, 0

    def start(self, nodes, command, environment, folder):
        if self.number < len(self.told):
            watch.replace_json(folder / "progress.json", self.told[self.number])
        self.number += 1
        return self

    def codes(self):
        return dict(enumerate(self.attempts[self.number - 1]))

    def on_each(self, nodes, argv, timeout_s):
        return {node: (0, b"[]") for node in nodes if node not in self.mute}

    def nodes(self):
        return self.names

    poll, kill, send, unusable = (lambda self, *_: True), (lambda self: None), (lambda self, _: None), (lambda self: {})


def supervised(tmp_path, starter, **limits):
    options = recover.Options(2, tmp_path / "attempts", tmp_path / "pages", Limits(backoff_s=0.0, **limits))
    return recover.supervise(starter, ["train.py"], options, None)


def test_a_cause_is_known_before_there_is_a_run_to_note_it_in(tmp_path):
    assert supervised(tmp_path, Ending([1, 1, -9, -9]), retries=0) == (137, True)  # another job's nodes may do better


def test_what_a_start_goes_on_from_is_no_progress(tmp_path):
    """A run at step 500 whose ranks fail before they say that they have begun."""
    init = {"step": 500, "phase": "data"}
    starter = Ending(*[[1, 1, 1, 1]] * 5, told=[init] * 5)
    assert supervised(tmp_path, starter) == (1, False) and starter.number == 2


def test_where_no_node_answers_none_is_to_blame(tmp_path):
    for mute, silent in (([], ()), (["n1"], ("n1",)), (["n0", "n1"], ())):
        starter = Ending([0, 0, 0, 0])
        starter.mute = mute
        attempt = recover.Attempt(starter, starter.names, 1, recover.Options(2, tmp_path, tmp_path, Limits()))
        attempt.handle = starter
        attempt.hung("no step")
        assert attempt.silent == silent
    assert not recover.most(["n0"], ["n0"]) and not recover.most(["n0"], ["n0", "n1"]) and recover.most("ab", "abc")


# ---- the page


PAGE_USER = """
import sys, time, os, weakref, watch
class Work:
    def __init__(self): self.ended = False
    def is_completed(self): return self.ended
page = watch.Page()
page.open()
works = []
for number in range(1, 201):
    entry = page.launches("column" if number % 2 else "node", f"purpose {number % 70}")
    works.append(Work())
    page.launched(entry, works[-1])
for work in works[:150]: work.ended = True
works[150:160] = []  # waited for: nobody holds them
page.waits(entry)
page.phase("eval", 12)
page.asked(15)
print("ready", flush=True)
def deep(): time.sleep(100)
deep()
"""


def test_a_page_tells_what_its_rank_does(tmp_path):
    settings = environment(NANO1T_WATCH=str(tmp_path / "pages"), NANO1T_NODE="n7", RANK="3", WORLD_SIZE="4")
    process = subprocess.Popen([sys.executable, "-c", PAGE_USER], stdout=subprocess.PIPE, text=True, env=settings)
    try:
        assert process.stdout.readline() == "ready\n"
        file = watch.page_file(tmp_path / "pages", 3)
        until(lambda: (watch.read(file).oldest or [0])[0] == 161, "the poller")
        seen = watch.read(file)
        assert (seen.rank, seen.node, seen.pid, seen.phase, seen.step, seen.asked) == (3, "n7", process.pid, "eval", 12, 15)
        assert seen.launched == seen.waiting == [200, "purpose 60 over node"][:1] + seen.launched[1:] and seen.complete[0] == 160
        assert len(seen.recent) == watch.RING and seen.recent["200"] == seen.launched[1]
        assert 0 < seen.memory <= 1 and seen.beat_age_s < PATIENCE_S
        argv = [sys.executable, LAUNCH.replace("launch.py", "watch.py"), "report", tmp_path / "pages"]
        done = subprocess.run(argv, capture_output=True, env=environment(NANO1T_NODE="n7"), check=True)
        (told,) = [watch.Rank(**r) for r in json.loads(done.stdout)]
        assert told.state == "S" and told.cpu < 0.2 and "in deep" in watch.main_stack(told)[0]
        process.send_signal(signal.SIGSTOP)
        (told,) = watch.examine(tmp_path / "pages", sample_s=0.05)
        assert told.state == "T" and not told.stacks and not watch.examine(tmp_path / "pages", "another node", 0.01)
    finally:
        process.kill()
        process.wait()
    (told,) = watch.examine(tmp_path / "pages", sample_s=0.01)
    assert told.state == "X" and told.launched[0] == 200
    recover.write_exit(tmp_path, 3, "n7", -9, tmp_path / "pages")
    assert not list((tmp_path / "pages").iterdir())
    exit = recover.read_exits(tmp_path)[3]
    assert exit.code == -9 and exit.page["step"] == 12 and exit.page["asked"] == 15
    assert watch.read(tmp_path / "exit-3.json") is None


# ---- the launcher with real processes

MINI = """
import json, os, pathlib, signal, sys, time
import launch, watch
from watch import PAGE
RANK, WORLD, HERE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), pathlib.Path(os.environ["NANO1T_ATTEMPT"])
OUT, FAULTS = pathlib.Path("out/mini"), json.loads(sys.argv[1])
where, when, what = FAULTS.get(HERE.name, ("", -1, ""))
if when == 0 and str(RANK) in where: exec(what)
PAGE.open()
stop, step = launch.StopRequest(), int((OUT / "saved").read_text()) if (OUT / "saved").exists() else 0
told = {"run": str(OUT.absolute()), "from": step}
def meet(purpose):
    entry = PAGE.launches("world", purpose)
    mark = f"{HERE}/{PAGE.count}-"
    open(f"{mark}{RANK}", "w").close()
    PAGE.waits(entry)
    began = time.monotonic()
    while not all(os.path.exists(f"{mark}{r}") for r in range(WORLD)):
        time.sleep(0.001)
        if stop.requested and time.monotonic() > began + 1: sys.exit(1)
    PAGE.waited()
def tell(phase):
    PAGE.phase("step", step)
    if RANK == 0: watch.tell_launcher(told | {"step": step, "phase": phase, "time": time.time()})
if RANK == 0: OUT.mkdir(parents=True, exist_ok=True)
tell("compile")
while step < 30:
    meet("gather")
    if step + 1 == when and str(RANK) in where: exec(what)
    meet("reduce")
    step += 1
    if RANK == 0:
        told = {"first_step": time.time(), **told, "useful_s": 0.01 * step}
        (OUT / "saved").write_text(str(step))
    tell("step")
    os.write(1, b"\\xff\\xfe not text\\n")
    time.sleep(0.01)
    (HERE / f"stop-{RANK}").write_text("") if stop.requested else None
    meet("told")
    if any((HERE / f"stop-{r}").exists() for r in range(WORLD)): sys.exit(75)
"""


QUICK = f"""import sys; sys.path.insert(0, {str(Path(LAUNCH).parent)!r})
import launch, recover; recover.PEER_GRACE_S, recover.TERM_GRACE_S, recover.POLL_S = 0.3, 0.3, 0.1; sys.exit(launch.main())"""


def mini(tmp_path, faults, *options, nodes=2, ranks=2):
    """faults: attempt -> (ranks as digits, step, what happens there before the step's second collective; step 0: before all)."""
    (tmp_path / "mini.py").write_text(MINI)
    shape = ["--nodes", str(nodes), "--ranks-per-node", str(ranks)]
    options = ["--retries", "20", "--backoff", "0.02", *options]
    return [sys.executable, "-c", QUICK, *shape, *options, "--", "mini.py", json.dumps(faults)]


def go(tmp_path, faults, *options, **shape):
    """(exit code, lines of attempts.jsonl, stderr)"""
    done = subprocess.run(mini(tmp_path, faults, *options, **shape), cwd=tmp_path, capture_output=True, timeout=3 * PATIENCE_S,
                          env=environment())
    return done.returncode, lines_of(tmp_path / "out" / "mini" / "attempts.jsonl"), done.stderr.decode()


KILL = "os.kill(os.getpid(), signal.SIGKILL)"


def test_a_launch_goes_through_faults_and_charges_each_to_its_cause(tmp_path):
    faults = {1: ("1", 3, KILL), 2: ("2", 6, KILL.replace("KILL", "SEGV")), 3: ("3", 8, KILL.replace("KILL", "TERM")),
              4: ("0", 12, KILL.replace("KILL", "STOP")), 5: ("2", 15, "while True: pass"),
              6: ("0123", 18, "while not time.sleep(0.01): os.write(1, b'step 19 loss \\xff\\n')"), 7: ("1", 21, "sys.exit(71)"),
              8: ("0123", 0, "sys.exit(1)"), 9: ("2", 26, "sys.exit(1)")}
    code, lines, errors = go(tmp_path, faults, "--timeout", "step=2,compile=10")
    causes = [KILLED, KILLED, KILLED, HANG, HANG, HANG, MEMORY, START, ERROR, DONE]
    assert (code, [line["cause"] for line in lines]) == (0, causes), errors
    charged = [sum(name == cause for name in causes[:i]) for i, cause in enumerate(causes)]
    assert [line["charged"].get(line["cause"], 0) for line in lines[:-1]] == [n + 1 for n in charged[:-1]]
    assert not any(line["excluded"] for line in lines) and all(line["nodes"] == ["node0", "node1"] for line in lines)
    assert [(h["kind"], h["ranks"], h["nodes"]) for line in lines if (h := line["hang"])] == [
        ("stopped", [0], ["node0"]), ("busy", [2], ["node1"]), ("elsewhere", [0, 1, 2, 3], ["node0", "node1"])]
    assert lines[3]["hang"]["collective"][1] == "reduce over world" and not lines[3]["hang"]["reached"]
    assert "rank 0 (node0): stopped (SIGSTOP or a debugger), not at collective" in errors
    assert "rank 1 was killed by signal 9 (SIGKILL)" in errors
    assert "10 attempts, goodput" in errors and "crash to first step back" in errors
    report = max((tmp_path / "out" / "mini").glob("hang-*.txt")).read_text()
    assert "innermost frame first" in report and 'File "<string>", line 1 in <module>' in report


def test_a_killed_node_is_replaced_and_never_returns(tmp_path):
    code, lines, errors = go(tmp_path, {1: ("23", 4, KILL), 2: ("0", 8, KILL), 3: ("01", 12, KILL)}, "--spares", "2")
    assert [(line["cause"], line["nodes"], list(line["excluded"])) for line in lines] == [
        (NODE, ["node0", "node1"], ["node1"]), (KILLED, ["node0", "node2"], []), (NODE, ["node0", "node2"], ["node0"]),
        (DONE, ["node2", "node3"], [])] and code == 0, errors
    assert "all ranks of node1, and only they, were killed by signal 9" in lines[0]["excluded"]["node1"]["why"]


@pytest.mark.parametrize("number", [2, 71, 73])
def test_what_will_fail_again_stops_at_once_and_costs_no_spare(tmp_path, number):
    step = 1 if number == 71 else 5
    code, lines, errors = go(tmp_path, {1: ("1", step, f"sys.exit({number})")}, "--spares", "1", ranks=1)
    assert (code, len(lines), lines[0]["excluded"], lines[0]["restart"]) == (number, 1, {}, False), errors


def test_two_attempts_without_a_step_stop(tmp_path):
    code, lines, errors = go(tmp_path, {n: ("0", 5, KILL) for n in range(1, 9)}, nodes=1)
    assert code == 137 and [line["restart"] for line in lines] == [True, True, False], "the first made 4 steps, the others none"
    assert "2 attempts in a row brought no new step" in errors


def test_a_hang_that_is_given_up_ends_with_its_own_code(tmp_path):
    options = ["--retries", "0", "--timeout", "step=1.5,compile=10"]
    code, lines, errors = go(tmp_path, {1: ("1", 5, "time.sleep(100)")}, *options, ranks=1)
    assert code == EXIT_HANG and lines[0]["hang"]["kind"] == "asleep" and lines[0]["hang"]["ranks"] == [1], errors


def test_budgets_can_be_set(tmp_path):
    code, lines, errors = go(tmp_path, {1: ("1", 5, KILL)}, "--budget", "killed=0", ranks=1)
    assert code == 137 and len(lines) == 1 and "--budget killed=n" in errors
    for line in ("--budget killed", "--budget luck=3", "--timeout step=-1", "--retries -1", "--backoff nan"):
        option, value = line.split()
        done = subprocess.run(mini(tmp_path, {}, option, value), capture_output=True, env=environment(), cwd=tmp_path)
        assert done.returncode == 2 and option.encode() in done.stderr


def test_a_signal_between_two_attempts_ends_the_launch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = mini(tmp_path, {1: ("0", 3, KILL)}, "--backoff", "60", nodes=1)
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment())
    for line in process.stderr:
        if line.startswith("attempt 2 in"):
            process.send_signal(signal.SIGTERM)
            break
    assert "SIGTERM while waiting" in process.stderr.read() and process.wait(PATIENCE_S) == EXIT_STOPPED
    process.stderr.close()


def test_nothing_of_an_attempt_is_left_when_the_next_one_runs(tmp_path):
    helper = ("import subprocess; p = subprocess.Popen(['sleep', '300'], start_new_session=True); "
              "open('helper', 'w').write(str(p.pid)); ")
    look = "open('seen', 'w').write(str(watch.process_state(int(open('helper').read()))[0]))"
    code, lines, errors = go(tmp_path, {1: ("0", 3, helper + KILL), 2: ("0", 6, look)}, nodes=1)
    assert code == 0 and (tmp_path / "seen").read_text() == "X", errors


def test_nothing_is_left_of_a_launch_whose_launcher_is_killed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    faults = {1: ("0123", 3, "open(f'{os.getpid()}.pid', 'w').close(); signal.pause()")}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(mini(tmp_path, faults), **quiet, env=environment()) as process:
        until(lambda: len(list(tmp_path.glob("*.pid"))) == 4, "the ranks")
        pages = list(Path("/dev/shm").glob(f"nano1t-{process.pid}-*/1/rank-00003"))
        process.kill()
        process.wait()
    all_gone([int(path.stem) for path in tmp_path.glob("*.pid")])
    assert len(pages) == 1
    until(lambda: not pages[0].parent.parent.exists(), "the end of the pages")


def test_the_port_is_kept_for_rank_0_and_given_to_nobody_else():
    with launch.reserve_port(None) as reserved:
        port = reserved.getsockname()[1]
        socket.create_server(("", port)).close()
        for _ in range(300):
            with socket.create_server(("", 0)) as other:
                assert other.getsockname()[1] != port
        launch.reserve_port(port).close()


# ---- the tiny model


def test_the_tiny_model_goes_through_faults_and_ends_with_the_same_bits(capfd):
    """Soak.py --kinds failures has all kinds."""
    kinds = "node down,stopped,busy,printing,kill 11,killed for memory,out of memory,damaged checkpoint,exception,cancelled"
    assert soak(["--kinds", kinds, "--faults", "10", "--seed", "1"]) == 0, capfd.readouterr().out
