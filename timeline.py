"""Where a step's time goes: torch's profiler on chosen steps and ranks, reduced to parts that add up to the step.

    make train ARGS="--profile=20-22 --profile_ranks=0,3"
        tables in the log; out/<run>/profile/steps-20-22-rank-0.json, and the trace beside it, .trace.json.gz

    compute         operations; on an accelerator the union of its kernels, transfers' left out
    exposed         waits for a transfer while nothing computes, by what travels
    launching       on a CPU: starting transfers, part of whose work happens there
    copies          between host and device, while neither computes nor communicates
    idle            the rest: on a CPU Python between operations, on an accelerator nothing that runs at all

The trace opens in Perfetto or chrome://tracing. The parts come from its events alone, so that they can be held against the
metrics, which are measured by other means (parallel.Wire).
"""

import gzip
import json
import os
from collections import Counter, defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Iterable, NamedTuple

from errors import ConfigError

WAIT, START, COPY = "wait: ", "start: ", "wait for copy: "  # ranges in a trace, before what travels
_recording = False


def span(name: str):
    """A named range of a trace; nothing while none is recorded."""
    if not _recording:
        return nullcontext()
    from torch.profiler import record_function

    return record_function(name)


# ------------------------------------------------------------------------------------------------------------------
# Which steps and ranks
# ------------------------------------------------------------------------------------------------------------------


def parse_steps(text: str) -> range:
    """`20` or `20-22`, as the log numbers steps. Empty: none."""
    if not text:
        return range(0)
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()) or int(first) < 1 or int(last or first) < int(first):
        raise ConfigError(f"--profile={text}: expected steps, e.g. 20 or 20-22")
    return range(int(first), int(last or first) + 1)


def parse_ranks(text: str, world: int) -> list[int]:
    """`all`, or numbers with commas."""
    if text == "all":
        return list(range(world))
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) < world for part in parts):
        raise ConfigError(f"--profile_ranks={text}: expected all, or numbers below {world}"
                          + (f" with commas, e.g. 0,{world - 1}" if world > 1 else ""))
    return sorted({int(part) for part in parts})


def settle(device):
    """Waits for all that an accelerator has been given."""
    if device.type != "cpu":
        import torch

        torch.accelerator.synchronize(device)


class Profiler:
    """Records the chosen steps of this rank, and at their end writes and tells what they consist of."""

    def __init__(self, steps: str, ranks: str, rank: int, world: int, device, folder: Path):
        self.steps, self.ranks, self.rank = parse_steps(steps), parse_ranks(ranks, world), rank
        self.device, self.folder, self.active, self.range = device, folder, None, None
        self.mine = bool(self.steps) and rank in self.ranks
        if self.mine:  # its first start takes seconds, for which the other ranks would wait in a profiled step
            with self.make():
                pass

    def make(self):
        from torch.profiler import ProfilerActivity, profile

        kinds = {"cpu": [], "cuda": [ProfilerActivity.CUDA], "xpu": [ProfilerActivity.XPU]}[self.device.type]
        return profile(activities=[ProfilerActivity.CPU, *kinds])

    def start(self, step: int):
        """Before the step's clock starts: it takes a moment."""
        global _recording
        if self.mine and self.active is None and step in self.steps:
            self.active = self.make()
            self.active.start()
            _recording = True

    def step_begins(self, step: int):
        """And what the step before has launched is no part of this one."""
        if self.active is not None:
            settle(self.device)
            self.range = span(f"step {step}")
            self.range.__enter__()

    def step_ends(self):
        if self.range is not None:
            settle(self.device)  # of the update, nothing but its launch would be in it
            self.range.__exit__(None, None, None)
            self.range = None

    def finish(self, step: int, last: bool) -> list[dict] | None:
        """After the step's clock has stopped. After the last profiled step: what each of them consists of; [] on ranks that are
        not profiled. After any other step: None. last: the run ends here."""
        global _recording
        if not self.steps or step < self.steps.start or step > self.steps[-1] or not (step == self.steps[-1] or last):
            return None
        if self.active is None:
            return []
        settle(self.device)  # so that the last kernels are in it
        _recording = False
        self.active.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / f"{self.name(self.rank)}.trace.json.gz"
        self.active.export_chrome_trace(str(trace))
        self.active = None
        found = reduce(json.loads(gzip.open(trace).read()), self.device.type)
        text = json.dumps({"rank": self.rank, "device": self.device.type, "trace": trace.name, "steps": found}, indent=1)
        tmp = trace.with_name(f".{trace.name}.{os.getpid()}")
        tmp.write_text(text)
        tmp.rename(self.folder / f"{self.name(self.rank)}.json")
        return found

    def name(self, rank: int) -> str:
        return f"steps-{self.steps.start}-{self.steps[-1]}-rank-{rank}"


# ------------------------------------------------------------------------------------------------------------------
# Intervals: sorted lists of (start, end) that do not overlap
# ------------------------------------------------------------------------------------------------------------------

Intervals = list[tuple[float, float]]


def union(spans: Iterable[tuple[float, float]]) -> Intervals:
    out: Intervals = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        elif end > start:
            out.append((start, end))
    return out


def minus(a: Intervals, b: Intervals) -> Intervals:
    """What of a is not in b."""
    out, j = [], 0
    for start, end in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        i = j
        while i < len(b) and b[i][0] < end:
            if b[i][0] > start:
                out.append((start, b[i][0]))
            start = max(start, b[i][1])
            i += 1
        if start < end:
            out.append((start, end))
    return out


def within(a: Intervals, start: float, end: float) -> Intervals:
    return [(max(s, start), min(e, end)) for s, e in a if s < end and e > start]


def length(a: Intervals) -> float:
    return sum(end - start for start, end in a)


# ------------------------------------------------------------------------------------------------------------------
# A trace, reduced
# ------------------------------------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """Of a whole trace: what runs when. Earlier ones count where several do."""

    compute: Intervals
    exposed: dict[str, Intervals]  # by what travels
    launching: Intervals
    copies: dict[str, Intervals]  # by what is copied, or the way it goes
    transfers: list[tuple[str, float, float, int]]  # (what, start, end, thread blocks) of each transfer's kernel on the device


def reduce(trace: dict, device: str) -> list[dict]:
    """Seconds of each part of each profiled step. They add up to the step."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    steps = [e for e in events if e["cat"] == "user_annotation" and e["name"].startswith("step ")]
    if not steps:
        return []
    parts = on_host(events, steps[0]["tid"]) if device == "cpu" else on_device(events)
    sms = next((d.get("numSms") for d in trace.get("deviceProperties", []) if d.get("numSms")), None)
    return [reduce_step(parts, e, sms) for e in sorted(steps, key=lambda e: e["ts"])]


def reduce_step(parts: Parts, step: dict, sms: int | None) -> dict:
    start, end = step["ts"], step["ts"] + step["dur"]
    taken: Intervals = []

    def claim(spans: Intervals) -> float:
        nonlocal taken
        mine = minus(within(spans, start, end), taken)
        taken = union([*taken, *mine])
        return length(mine) * 1e-6

    out = {"step": int(step["name"].split()[1]), "step_s": step["dur"] * 1e-6, "compute_s": claim(parts.compute)}
    exposed = {what: claim(spans) for what, spans in parts.exposed.items()}
    out |= {"exposed_comm_s": sum(exposed.values()), "exposed_s": dict(Counter(exposed).most_common()),
            "launching_s": claim(parts.launching)}
    copies = {what: claim(spans) for what, spans in parts.copies.items()}
    out |= {"copies_s": sum(copies.values()), "copies_by_s": copies}
    out["idle_s"] = max(0.0, (end - start - length(taken)) * 1e-6)
    if parts.transfers:
        out["transfers"] = on_the_way(parts.transfers, start, end, sms)
    return out


def on_the_way(transfers: list[tuple[str, float, float, int]], start: float, end: float, sms: int | None) -> dict:
    """Of transfers on the device: seconds by purpose, hidden ones too, and the SMs that they hold: a thread block takes one."""
    seconds, blocks = Counter(), Counter()
    for what, a, b, count in transfers:
        inside = max(0.0, min(b, end) - max(a, start)) * 1e-6
        seconds[what] += inside
        blocks[what] += inside * count
    mean = sum(blocks.values()) / ((end - start) * 1e-6)
    return {"seconds": dict(seconds.most_common()), "sms_held_mean": mean, "sms": sms,
            "sms_held_share": mean / sms if sms else None,
            "sms_held_while_sent": {what: blocks[what] / seconds[what] for what in seconds if seconds[what]}}


def ranges(events: list[dict], prefix: str, tid=None) -> dict[str, Intervals]:
    found = defaultdict(list)
    for e in events:
        if e["cat"] == "user_annotation" and e["name"].startswith(prefix) and (tid is None or e["tid"] == tid):
            found[e["name"].removeprefix(prefix)].append((e["ts"], e["ts"] + e["dur"]))
    return {what: union(spans) for what, spans in found.items()}


def on_host(events: list[dict], tid) -> Parts:
    """Of the thread that runs the steps. What its waits cover is theirs, whatever runs inside."""
    waits, copies = ranges(events, WAIT, tid), ranges(events, COPY, tid)
    launching = union(s for spans in ranges(events, START, tid).values() for s in spans)
    ops = union((e["ts"], e["ts"] + e["dur"]) for e in events if e["cat"] == "cpu_op" and e["tid"] == tid and is_work(e["name"]))
    for spans in (*waits.values(), *copies.values(), launching):
        ops = minus(ops, spans)
    return Parts(ops, waits, launching, copies, [])


def is_work(name: str) -> bool:
    """An operation, and not the engine or a Function around some."""
    return "::" in name and not name.startswith(("autograd::", "c10d::"))


def on_device(events: list[dict]) -> Parts:
    """Of what ran on an accelerator. A transfer's kernel is named by the range in which it was launched."""
    starts = defaultdict(list)
    for e in events:
        if e["cat"] == "user_annotation" and e["name"].startswith(START):
            starts[e["tid"]].append((e["ts"], e["ts"] + e["dur"], e["name"].removeprefix(START)))
    launches = {e["args"]["correlation"]: e for e in events if "runtime" in e["cat"] or "driver" in e["cat"]
                if "correlation" in e.get("args", {})}
    compute, transfers, copies = [], [], defaultdict(list)
    for e in events:
        at = e["ts"], e["ts"] + e["dur"]
        if e["cat"] == "kernel" and any(library in e["name"].lower() for library in ("nccl", "ccl_", "oneccl")):
            grid = e.get("args", {}).get("grid") or [0]
            transfers.append((purpose_of(e, launches, starts), *at, grid[0] * (grid[1] if len(grid) > 1 else 1)))
        elif e["cat"] == "gpu_memcpy" and "DtoD" not in e["name"]:
            copies["to the host" if "DtoH" in e["name"] else "to the device"].append(at)
        elif e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"):
            compute.append(at)
    exposed = defaultdict(list)
    for what, start, end, _ in transfers:
        exposed[what].append((start, end))
    return Parts(union(compute), {what: union(spans) for what, spans in exposed.items()}, [],
                 {way: union(spans) for way, spans in copies.items()}, transfers)


def purpose_of(kernel: dict, launches: dict, starts: dict) -> str:
    launch = launches.get(kernel.get("args", {}).get("correlation"))
    for start, end, what in starts.get(launch["tid"], ()) if launch else ():
        if start <= launch["ts"] <= end:
            return what
    return kernel["name"].partition("(")[0]


# ------------------------------------------------------------------------------------------------------------------
# In words
# ------------------------------------------------------------------------------------------------------------------


def mean_of(steps: list[dict]) -> dict:
    """Mean of the steps' parts, nested ones too."""
    def mean(values: list):
        if isinstance(values[0], dict):
            return {k: mean([v.get(k, 0) or 0 for v in values]) for k in dict.fromkeys(k for v in values for k in v)}
        return sum(values) / len(values) if all(isinstance(v, (int, float)) for v in values) else values[0]

    return {k: mean([s[k] for s in steps]) for k in steps[0] if all(k in s for s in steps)}


def in_words(steps: list[dict], device: str) -> list[str]:
    """A table of the steps' mean."""
    if not steps:
        return ["no step was recorded"]
    d = mean_of(steps)
    whole = d["step_s"]
    exposed = sorted(d["exposed_s"].items(), key=lambda kv: -kv[1])
    rows = [("compute", d["compute_s"]), *((f"exposed {what}", s) for what, s in exposed if s >= 0.001 * whole)]
    few = sum(s for s in d["exposed_s"].values() if s < 0.001 * whole)
    rows += [("exposed, others", few)] * bool(few) + [("launching transfers", d["launching_s"])] * (device == "cpu")
    rows += [(f"copies {what}", s) for what, s in d["copies_by_s"].items() if s >= 0.001 * whole]
    rows += [("idle" if device != "cpu" else "between operations", d["idle_s"])]
    lines = [f"{name:<36}{s:>10.4f} s {s / whole:>7.1%}" for name, s in rows]
    lines.append(f"{'step, mean of ' + str(len(steps)):<36}{whole:>10.4f} s")
    if "transfers" in d:
        t = d["transfers"]
        of = f" of {t['sms']:.0f}" if t["sms"] else ""
        each = ", ".join(f"{what} {count:.0f}" for what, count in t["sms_held_while_sent"].items())
        lines.append(f"transfers hold {t['sms_held_mean']:.1f}{of} SMs in the mean of the step; while they are sent: {each}")
    return lines


def in_a_line(steps: list[dict]) -> str:
    """The same, short."""
    if not steps:
        return ""
    d = mean_of(steps)
    most = max(d["exposed_s"], key=d["exposed_s"].get, default="none")
    return (f"step {d['step_s']:.4f} s = compute {d['compute_s']:.4f} + exposed {d['exposed_comm_s']:.4f} (most: {most}) + "
            f"launching {d['launching_s']:.4f} + copies {d['copies_s']:.4f} + idle {d['idle_s']:.4f}")
