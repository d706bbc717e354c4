"""timeline.py: the parts of a step add up and agree with what the trainer measures itself; what a GPU's trace would say."""

import gzip
import json
import random
import re
import statistics

import parallel
import pytest
import report
import timeline
import torch
from model import ConfigError
from parallel import Group, Pending, all_gather
from test_train import run
from timeline import length, minus, union, within

PARTS = ("compute_s", "exposed_comm_s", "launching_s", "copies_s", "idle_s")


def test_the_parts_add_up_to_the_step_and_match_the_metrics(here):
    """2 x 1 ranks that offload, so that there are gathers over the column, copies both ways and an optimizer that streams."""
    done = run(here, "profiled", "--steps=8", "--profile=3-7", "--profile_ranks=all", "--offload_state=True",
               "--offload_fraction=0.5", "--track_memory=0", nodes=2, ranks=1)
    out = here / "out" / "profiled"
    metrics = {line["step"]: line for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())}
    errors = []
    for rank in (0, 1):
        found = json.loads((out / "profile" / f"steps-3-7-rank-{rank}.json").read_text())
        assert [s["step"] for s in found["steps"]] == [3, 4, 5, 6, 7] and found["device"] == "cpu"
        for s in found["steps"]:
            assert sum(s[part] for part in PARTS) == pytest.approx(s["step_s"], rel=1e-6) and all(s[part] > 0 for part in PARTS)
            assert sum(s["exposed_s"].values()) == pytest.approx(s["exposed_comm_s"])
            if rank == 0:  # whose metrics are kept
                m = metrics[s["step"]]
                errors += [{part: abs(s[part] - m[part]) / m["step_s"] for part in ("step_s", "exposed_comm_s")}]
                assert {k for k, v in m["exposed_s"].items() if v > 1e-3} <= s["exposed_s"].keys() <= m["exposed_s"].keys()
        assert {"state in", "state out", "inputs in", "gradient out"} <= found["steps"][0]["copies_by_s"].keys()
        trace = json.loads(gzip.open(out / "profile" / found["trace"]).read())
        assert {"start: expert gather", "wait: expert gather", "step 4"} <= {e["name"] for e in trace["traceEvents"]}
    for part in ("step_s", "exposed_comm_s"):  # the median: where others take the core between two clocks, a step may be off
        assert statistics.median(e[part] for e in errors) < 0.03, errors
    assert report.profiles_of(report.Run(out)).count("<tr>") == 3
    assert re.search(r"compute +\d", done.stdout)
    assert re.search(r"rank 1: step .* = compute .* \+ exposed .* \(most: ", done.stdout)


@pytest.mark.parametrize("text", ["x", "3-", "5-4", "0", "-3", "1-2-3"])
def test_steps_that_are_none_are_refused(text):
    with pytest.raises(ConfigError, match=f"--profile={text}"):
        timeline.parse_steps(text)


def test_steps_and_ranks():
    assert timeline.parse_steps("7") == range(7, 8) and timeline.parse_steps("7-9") == range(7, 10)
    assert not timeline.parse_steps("")
    assert timeline.parse_ranks("all", 3) == [0, 1, 2] and timeline.parse_ranks("2,0,2", 3) == [0, 2]
    for text in ("3", "x", "0,,1", ""):
        with pytest.raises(ConfigError, match=f"--profile_ranks={text}"):
            timeline.parse_ranks(text, 3)


def test_intervals_against_sets_of_points():
    rng = random.Random(0)
    for _ in range(300):
        a, b = ([(s, s + rng.randrange(6)) for s in (rng.randrange(30) for _ in range(rng.randrange(6)))] for _ in range(2))

        def points(spans):
            return {x for s, e in spans for x in range(s, e)}

        for mine, expected in ((union(a), points(a)), (minus(union(a), union(b)), points(a) - points(b)),
                               (within(union(a), 5, 20), points(a) & set(range(5, 20)))):
            assert points(mine) == expected and length(mine) == len(expected)


def event(cat: str, name: str, ts: float, dur: float, tid=1, **args) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "pid": 0, "args": args}


def gpu_trace() -> dict:
    """A step of 100 us: kernels at 0-40 and 60-80; a column gather at 30-70 on 16 SMs, a transfer that another thread launched at
    80-85; copies in at 35-90 and out at 90-95."""
    return {"deviceProperties": [{"numSms": 132}], "traceEvents": [
        event("user_annotation", "step 7", 1000, 100), event("user_annotation", "start: control gather", 1000, 0.5),
        event("user_annotation", "start: expert gather", 1001, 2),
        event("user_annotation", "start: dispatch gradient", 1050, 5, tid=2),
        event("user_annotation", "wait: expert gather", 1010, 1),
        event("cuda_runtime", "cudaLaunchKernelExC", 1002, 0.5, correlation=5),
        event("cuda_driver", "cuLaunchKernelEx", 1052, 0.5, tid=2, correlation=6),
        event("kernel", "gemm", 990, 50, 7, correlation=1, grid=[500, 1, 1]), event("kernel", "silu", 1060, 20, 7, correlation=2),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 1075, 4, 7), event("cpu_op", "aten::mm", 1000, 90),
        event("kernel", "ncclDevKernel_AllGather_RING_LL(args)", 1030, 40, 20, correlation=5, grid=[16, 1, 1]),
        event("kernel", "ncclDevKernel_SendRecv(args)", 1080, 5, 21, correlation=6, grid=[32, 1, 1]),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1035, 55, 22),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1090, 5, 22), {"ph": "f", "name": "flow", "ts": 3, "cat": "ac2g"}]}


def test_a_trace_of_a_gpu():
    (step,) = timeline.reduce(gpu_trace(), "cuda")
    us = {part: round(step[part] * 1e6, 3) for part in (*PARTS, "step_s")}
    assert us == {"compute_s": 60, "exposed_comm_s": 25, "launching_s": 0, "copies_s": 10, "idle_s": 5, "step_s": 100}
    assert {k: round(v * 1e6, 3) for k, v in step["exposed_s"].items()} == {"expert gather": 20, "dispatch gradient": 5}
    assert {k: round(v * 1e6, 3) for k, v in step["copies_by_s"].items()} == {"to the device": 5, "to the host": 5}
    held = step["transfers"]
    assert held["sms_held_mean"] == pytest.approx(16 * 0.4 + 32 * 0.05) and held["sms"] == 132
    assert held["sms_held_while_sent"] == {"expert gather": pytest.approx(16), "dispatch gradient": pytest.approx(32)}
    words = "\n".join(timeline.in_words([step, step], "cuda"))
    assert "idle" in words and "8.0 of 132 SMs" in words and "copies to the host" in words


def test_a_trace_of_a_cpu():
    """What a wait, a copy or a launch covers is not compute, whatever runs inside; nor is what other threads do."""
    events = [event("user_annotation", "step 3", 0, 100), event("cpu_op", "aten::mm", 10, 20), event("cpu_op", "aten::mul", 15, 5),
              event("user_annotation", "wait: dispatch", 40, 10), event("cpu_op", "aten::copy_", 45, 10),
              event("user_annotation", "start: dispatch", 60, 10), event("cpu_op", "aten::empty", 61, 2),
              event("user_annotation", "wait for copy: state in", 75, 5), event("cpu_op", "aten::add", 90, 20),
              event("cpu_op", "aten::mm", 30, 50, tid=2), event("user_annotation", "wait: combine", 30, 5, tid=2),
              event("cpu_op", "Experts", 0, 100), event("cpu_op", "autograd::engine::evaluate_function: x", 0, 100)]
    (step,) = timeline.reduce({"traceEvents": events}, "cpu")
    us = {part: round(step[part] * 1e6, 3) for part in PARTS}
    assert us == {"compute_s": 35, "exposed_comm_s": 10, "launching_s": 10, "copies_s": 5, "idle_s": 40}
    assert step["exposed_s"].keys() == {"dispatch"} and step["copies_by_s"].keys() == {"state in"}
    assert timeline.reduce({"traceEvents": []}, "cpu") == [] and timeline.in_words([], "cpu") == ["no step was recorded"]


class Stream:
    """Stands in for an accelerator's: work and waits take their place in it at once, time passes when it gets to them."""

    def __init__(self):
        self.queue, self.now_ms, self.done = [], 0.0, 0

    def event(self):
        return Event(self)

    def run(self, count: int | None = None):
        for kind, x in self.queue[: count or len(self.queue)]:
            if kind == "event":
                x.time_ms = self.now_ms
            else:
                self.now_ms = max(self.now_ms, x) if kind == "until" else self.now_ms + x
        del self.queue[: count or len(self.queue)]


class Event:
    def __init__(self, stream: Stream):
        self.time_ms = None
        stream.queue.append(("event", self))

    def query(self) -> bool:
        return self.time_ms is not None

    def elapsed_time(self, other) -> float:
        return other.time_ms - self.time_ms


class Work:
    """Done at a moment of the stream's time; its wait returns at once."""

    def __init__(self, stream: Stream, at_ms: float):
        self.stream, self.at_ms = stream, at_ms

    def wait(self):
        self.stream.queue.append(("until", self.at_ms))


def test_waits_on_an_accelerator_are_measured_on_its_stream_and_nothing_is_waited_for(monkeypatch):
    stream, wire = Stream(), parallel.Wire()
    monkeypatch.setattr(parallel, "WIRE", wire)
    wire.event = stream.event
    stream.queue.append(("work", 10.0))
    Pending("expert gather", Work(stream, 25.0), (None,), lambda: torch.ones(1)).wait()  # 15 ms late
    stream.queue.append(("work", 10.0))
    Pending("dispatch", Work(stream, 30.0), (None,), lambda: torch.ones(1)).wait()  # there before
    Pending("expert gather", Work(stream, 40.0), (None,), lambda: torch.ones(1)).wait()  # 5 ms late
    wire.settle()
    assert not wire.waited and wire.waited_s == 0, "the stream has not got anywhere yet"
    stream.run(6)
    wire.settle()
    assert wire.waited == {"expert gather": pytest.approx(0.015)} and len(wire.unsettled) == 2
    stream.run()
    wire.settle()
    assert wire.waited == {"expert gather": pytest.approx(0.020), "dispatch": pytest.approx(0.0)} and not wire.unsettled
    assert wire.waited_s == pytest.approx(0.020)
    alone = Group("node", None, 1, 0)
    all_gather(torch.ones(2), alone, "dispatch").wait()
    assert not wire.unsettled, "a group of one waits for nothing"
