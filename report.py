"""A page of a run, or of several beside each other: one HTML file that needs nothing else.

    make report                                    out/debug/report.html
    make report ARGS="--run a --run b"             both in one page: out/a/report.html
    python report.py --run a --x tokens --out FILE

Reads what a run leaves in out/<run>/ and nothing else: metrics.jsonl, config.json, log.txt, progress.json, evals.jsonl,
samples.jsonl, experts.json, attempts.jsonl. A run that is going on, was cut short or was restarted reads as well: a torn line is
left out and counted, of a step that was run twice the later counts, and what is missing is missing in the page.

Plots are drawn here, as SVG; the script in the page only tells values under the pointer. However long the run, a curve has at
most some hundred points: of each bucket of steps the mean, and the range from least to largest as a band.
"""

import argparse
import base64
import html
import json
import math
import re
import struct
import sys
import zlib
from array import array
from pathlib import Path
from typing import Iterable, Iterator, NamedTuple

import numpy as np

from errors import ConfigError

# Metrics by group: the sections of the page, and of wandb.
GROUPS = {
    "loss": ("loss", "val_loss", "aux_loss", "z_loss"),
    "optimizer": ("lr", "grad_norm", "skipped", "noise_tokens"),
    "speed": ("tok_s", "tok_s_gpu", "mfu", "goodput"),
    "time": ("step_s", "optimizer_s", "exposed_comm_s", "exposed_s", "ckpt_blocked_s", "ckpt_write_s", "recovery_s"),
    "memory": ("tracked_peak_bytes", "tracked_bytes", "peak_host_gb", "peak_device_gb", "alloc_retries"),
    "experts": ("expert_load", "rank_load", "dead_experts"),
    "traffic": ("sent_bytes",),
}
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}
GIB = 2**30
LIMIT = 1_900_000  # bytes of a page
COLOURS = ("#3b7dd8", "#d9663a", "#2f9e6e", "#b4548f", "#a58416", "#6a63c9", "#c0444c", "#4d8d9c")


def escape(text: str) -> str:
    """For the page: control characters, which samples may hold, are shown as such."""
    return html.escape(re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "\ufffd", text))


def flat(values: dict) -> Iterator[tuple[str, float]]:
    """Numbers of a line of metrics.jsonl by name; those of an object or a list as name/part."""
    for name, value in values.items():
        parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ((None, value),)
        for part, x in parts:
            if isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x):
                yield name if part is None else f"{name}/{part}", x


def grouped(values: dict) -> dict[str, float]:
    """The same numbers by the names under which wandb puts them in the sections of this page."""
    return {f"{GROUP_OF.get(name.partition('/')[0], 'run')}/{name}": x for name, x in flat(values)}


# ------------------------------------------------------------------------------------------------------------------
# Reading a run
# ------------------------------------------------------------------------------------------------------------------


class Run:
    """What is known of a run. Columns of metrics have a value per step, NaN where there is none."""

    def __init__(self, path: Path):
        self.path, self.name, self.notes = path, path.name, []
        self.steps, self.columns, self.skips, self.starts = [], {}, [], []
        self.config = self.read_json("config.json")
        self.settings = self.config.get("settings") if isinstance(self.config.get("settings"), dict) else {}
        self.progress, self.experts = self.read_json("progress.json"), self.read_json("experts.json")
        self.evals, self.samples, self.attempts = (list(self.lines(f"{name}.jsonl")) for name in ("evals", "samples", "attempts"))
        self.profiles = [self.read_json(f"profile/{p.name}") for p in sorted((path / "profile").glob("*.json"))]
        self.warnings: list[str] = []
        self.versions = ""
        self.read_metrics()
        self.read_log()

    def read_json(self, name: str) -> dict:
        if not (self.path / name).is_file():
            return {}
        try:
            found = json.loads((self.path / name).read_bytes().decode(errors="replace"))
        except ValueError:
            self.notes.append(f"{name} cannot be read as JSON and is left out")
            return {}
        return found if isinstance(found, dict) else {}

    def lines(self, name: str) -> Iterator[dict]:
        """Objects of a file with one per line."""
        if not (self.path / name).is_file():
            return
        torn = 0
        with open(self.path / name, "rb") as file:
            for line in file:
                try:
                    found = json.loads(line.decode(errors="replace"))
                except ValueError:
                    found = None
                torn += not isinstance(found, dict) and bool(line.strip())
                if isinstance(found, dict):
                    yield found
        if torn:
            self.notes.append(f"{name}: {torn} line{'s' if torn > 1 else ''} cut or damaged, left out")

    def read_metrics(self):
        again = 0
        for line in self.lines("metrics.jsonl"):
            step = line.get("step")
            if not isinstance(step, int) or isinstance(step, bool):
                continue
            while self.steps and self.steps[-1] >= step:  # the run went back and took another way from there
                self.steps.pop()
                again += 1
            n = len(self.steps)
            for column in self.columns.values() if again else ():
                del column[n:]
            for name, value in flat(line):
                column = self.columns.setdefault(name, array("d"))
                column.extend([math.nan] * (n - len(column)))
                column.append(value)
            self.steps.append(step)
            self.skips = [(s, why) for s, why in self.skips if s < step]
            if line.get("skipped_why"):
                self.skips.append((step, str(line["skipped_why"])))
        if again:
            self.notes.append(f"metrics.jsonl: {again} steps are there twice, the later ones are shown")
        n = len(self.steps)
        for name, column in self.columns.items():
            del column[n:]
            self.columns[name] = np.array([*column, *[math.nan] * (n - len(column))])
        self.steps = np.array(self.steps, np.float64)

    def read_log(self):
        """Starts of the run, and warnings."""
        if not (self.path / "log.txt").is_file():
            return
        with open(self.path / "log.txt", encoding="utf-8", errors="replace") as file:
            for line in file:
                line = line.rstrip("\n")
                if match := re.match(r"--- (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (.*)", line):
                    self.starts.append({"time": match[1], "command": match[2], "first": None, "last": None, "how": "",
                                        "back_s": None})
                elif match := re.match(r"step (\d+)/\d+ ", line):
                    for start in self.starts[-1:]:
                        start["first"], start["last"] = start["first"] or int(match[1]), int(match[1])
                elif self.starts and line.startswith("resumed from "):
                    self.starts[-1]["how"] = line
                elif self.starts and (match := re.match(r"first step back ([\d.]+) s", line)):
                    self.starts[-1]["back_s"] = float(match[1])
                elif "stopped by " in line and self.starts:
                    self.starts[-1]["how"] += "; " + line[line.index("stopped by"):]
                elif line.lower().startswith(("warning:", "error:")):
                    self.warnings.append(line)
                elif line.startswith("versions "):
                    self.versions = line.removeprefix("versions ")

    def x(self, kind: str) -> np.ndarray:
        if kind == "tokens" and "tokens" in self.columns:
            return np.where(np.isnan(self.columns["tokens"]), 0, self.columns["tokens"])
        return self.steps

    def restarts(self) -> list[int]:
        """First steps of all starts but the first one."""
        return [start["first"] for start in self.starts[1:] if start["first"]]

    def part(self, name: str) -> dict[str, np.ndarray]:
        """Columns of an object or a list, by part."""
        return {key.partition("/")[2]: column for key, column in self.columns.items() if key.startswith(name + "/")}


def find(name: str) -> Run:
    path = Path("out") / name
    if not (path / "metrics.jsonl").is_file() and not (path / "log.txt").is_file():
        there = sorted(p.parent.name for p in Path("out").glob("*/metrics.jsonl"))
        raise ConfigError(f"--run={name}: there is no run in {path}; "
                          + (f"there are {', '.join(there[:20])}" if there else "start one with make train"))
    return Run(path)


# ------------------------------------------------------------------------------------------------------------------
# Fewer points
# ------------------------------------------------------------------------------------------------------------------


def buckets(x: np.ndarray, y: np.ndarray, low: float, high: float, count: int) -> np.ndarray:
    """[4, n]: x, mean, least and largest y of each of `count` equal parts of low..high with a value. NaN is none."""
    there = ~np.isnan(y)
    x, y = x[there], y[there]
    if len(x) <= count:
        return np.stack([x, y, y, y])
    at = np.clip(((x - low) / max(high - low, 1e-300) * count).astype(int), 0, count - 1)
    used, first, counts = np.unique(at, return_index=True, return_counts=True)  # x ascends, so parts are runs
    mean = np.add.reduceat(y, first) / counts
    middle = np.add.reduceat(x, first) / counts
    return np.stack([middle, mean, np.minimum.reduceat(y, first), np.maximum.reduceat(y, first)])


def parts_over_time(run: Run, parts: dict[str, np.ndarray], kind: str, count: int, most: int = 7) -> tuple[np.ndarray, dict]:
    """(x of each bar, part -> its mean in the bar): the largest parts, all others as one."""
    x = run.x(kind)
    there = ~np.all(np.isnan(np.stack([*parts.values()])), 0) if parts else np.zeros(len(x), bool)
    if not there.any():
        return np.empty(0), {}
    x, values = x[there], {name: np.nan_to_num(y[there]) for name, y in parts.items()}
    groups = np.array_split(np.arange(len(x)), min(count, len(x)))
    means = {name: np.array([y[g].mean() for g in groups]) for name, y in values.items()}
    order = sorted(means, key=lambda name: -means[name].mean())
    kept = {name: means[name] for name in order[:most] if means[name].any()}
    if rest := order[most:]:
        kept["others"] = sum(means[name] for name in rest)
    return np.array([x[g].mean() for g in groups]), kept


# ------------------------------------------------------------------------------------------------------------------
# Axes
# ------------------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 250, 86, 14, 12, 46  # of a plot, in units of its view box


class Scale(NamedTuple):
    """From values to a range of the view box."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value):
        value, low, high = (np.log10(v) if self.log else np.asarray(v, float) for v in (value, self.low, self.high))
        return self.start + (value - low) / max(float(high - low), 1e-300) * (self.end - self.start)


def ticks(low: float, high: float, log: bool, most: int = 6) -> list[float]:
    """Round values inside the range."""
    if log and high / low >= 20:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        every = max(1, math.ceil((last - first + 1) / most))
        return [10.0**e for e in range(first, last + 1, every)]
    if not high > low:
        return [low]
    rough = (high - low) / most
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough * 0.999)
    return [round(i * step, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number in few characters: 1.2M, 350, 0.003, 3e-05."""
    if value == 0:
        return "0"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    text = f"{value:.4g}"
    return text if len(text) < 7 else f"{value:.2e}".replace("e-0", "e-").replace("0e", "e").replace(".0e", "e")


def span(arrays: Iterable[np.ndarray], log: bool, zero: bool) -> tuple[float, float]:
    """Range of an axis with some room; of a log axis values above 0 only."""
    values = np.concatenate([a for a in arrays if len(a)] or [np.array([0.0, 1.0])])
    values = values[values > 0] if log else values
    if not len(values):
        return (0.1, 1.0) if log else (0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    if log:
        return low / 1.15, high * 1.15
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return (0.0 if zero else low - room), high + room


def axes(xs: Scale, ys: Scale, x_unit: str, y_unit: str) -> str:
    """Grid, ticks and the two axes' names with their units."""
    out, right, floor = [], WIDTH - RIGHT, HEIGHT - BOTTOM
    above = math.inf
    for value in ticks(ys.low, ys.high, ys.log):
        y = float(ys(value))
        if above - y < 19:  # on a log axis round values crowd
            continue
        above = y
        out.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/><text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" '
                   f'text-anchor="end">{short(value)}</text>')
    for value in ticks(xs.low, xs.high, False, 5):
        x = float(xs(value))
        anchor = "end" if x > right - 20 else "middle"
        out.append(f'<path class="grid" d="M{x:.1f} {TOP}V{floor}"/><text class="tick" x="{x:.1f}" y="{floor + 17}" '
                   f'text-anchor="{anchor}">{short(value)}</text>')
    middle = (TOP + floor) / 2
    out.append(f'<path class="axis" d="M{LEFT} {TOP}V{floor}H{right}"/>'
               f'<text class="unit" x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_unit)}</text>'
               f'<text class="unit" transform="translate(15 {middle}) rotate(-90)" text-anchor="middle">{escape(y_unit)}'
               "</text>")
    return "".join(out)


# ------------------------------------------------------------------------------------------------------------------
# Plots
# ------------------------------------------------------------------------------------------------------------------


DASHES = ("", "6 3", "2 2")  # of the first, second and third metric of a run, where colours tell the runs apart


class Curve(NamedTuple):
    name: str
    colour: str
    x: np.ndarray
    y: np.ndarray
    dash: str = ""  # pattern of the line
    points: bool = False  # few and far between: with a mark each


class Marks(NamedTuple):
    name: str
    kind: str  # restart: a line | skip: a triangle
    colour: str
    x: list[float]


def path(x: Iterable[float], y: Iterable[float]) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y))


def figure(title: str, svg: str, legend: list[tuple[str, str, str]], attributes: str = "") -> str:
    """legend: (kind, colour, text)."""
    keys = "".join(f'<span><i class="{kind}" style="--c:{colour}"></i>{escape(text)}</span>'
                   for kind, colour, text in legend)
    return (f'<figure><figcaption><b>{escape(title)}</b><span class="keys">{keys}</span></figcaption>'
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" {attributes}>{svg}</svg></figure>')


def lines_plot(title: str, y_unit: str, curves: list[Curve], marks: list[Marks], x_unit: str, count: int,
               log: bool = False, zero: bool = False) -> str:
    """Curves over steps: the mean of each bucket, and as a band its range. Nothing where there is nothing to show."""
    curves = [c for c in curves if np.any(~np.isnan(c.y) & ((c.y > 0) | (not log)))]
    if not curves:
        return ""
    low, high = min(float(c.x[0]) for c in curves), max(float(c.x[-1]) for c in curves)
    drawn = [buckets(c.x, np.where(c.y > 0, c.y, np.nan) if log else c.y, low, high, count) for c in curves]
    xs = Scale(low, high if high > low else low + 1, LEFT, WIDTH - RIGHT)
    ys = Scale(*span([d[2:].ravel() for d in drawn], log, zero), HEIGHT - BOTTOM, TOP, log)
    out, legend = [axes(xs, ys, x_unit, y_unit)], []
    for c, (x, mean, least, largest) in zip(curves, drawn):
        across = xs(x)
        if np.any(largest > least):
            back = path(across[::-1], ys(least)[::-1])[1:]
            out.append(f'<path class="band" fill="{c.colour}" d="{path(across, ys(largest))}L{back}Z"/>')
        style = f'stroke="{c.colour}"' + (f' stroke-dasharray="{c.dash}"' if c.dash else "")
        out.append(f'<path class="line" {style} data-name="{escape(c.name)}" d="{path(across, ys(mean))}"/>')
        if c.points or len(x) == 1:
            out += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.6" fill="{c.colour}"/>' for a, b in zip(across, ys(mean))]
        legend.append(({"": "solid", DASHES[1]: "dash"}.get(c.dash, "dot"), c.colour, c.name))
    for m in marks:
        inside = sorted({round(float(xs(v)), 1) for v in m.x if low <= v <= high})[:400]
        if m.kind == "skip":
            out += [f'<path fill="{m.colour}" d="M{a:.1f} {TOP + 9}l-4 -8h8Z"/>' for a in inside]
        else:
            out += [f'<path class="restart" stroke="{m.colour}" d="M{a:.1f} {TOP}V{HEIGHT - BOTTOM}"/>' for a in inside]
        if inside:
            legend.append((m.kind, m.colour, m.name))
    scale = (f'data-x="{xs.low} {xs.high} {xs.start} {xs.end}" data-y="{ys.low} {ys.high} {ys.start} {ys.end} {int(log)}" '
             f'data-units="{escape(x_unit)}|{escape(y_unit)}"')
    return figure(title, "".join(out), legend, scale)


def bars_plot(title: str, y_unit: str, x: np.ndarray, parts: dict[str, np.ndarray], x_unit: str) -> str:
    """Stacked bars, each as wide as there is room to its neighbours. Each part tells its value when pointed at."""
    if not len(x) or not parts:
        return ""
    total = sum(parts.values())
    between = (x[1:] + x[:-1]) / 2
    edges = np.array([2 * x[0] - between[0], *between, 2 * x[-1] - between[-1]]) if len(x) > 1 else x[0] + np.array([-0.5, 0.5])
    xs = Scale(float(edges[0]), float(edges[-1]), LEFT, WIDTH - RIGHT)
    ys = Scale(0.0, float(total.max()) * 1.05 or 1.0, HEIGHT - BOTTOM, TOP)
    across = xs(edges)
    out, legend, under = [axes(xs, ys, x_unit, y_unit)], [], np.zeros(len(x))
    for (name, values), colour in zip(parts.items(), [*COLOURS, "#8a8f98", "#5e646e"]):
        for left, right, bottom, value in zip(across, across[1:], under, values):
            top = float(ys(bottom + value))
            if (height := float(ys(bottom)) - top) >= 0.15:
                out.append(f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(0.8, (right - left) * 0.92):.1f}" '
                           f'height="{height:.1f}" fill="{colour}"><title>{escape(name)}: {short(value)}</title></rect>')
        under = under + values
        legend.append(("box", colour, name))
    return figure(title, "".join(out), legend)


# ---- heat maps: an image inside the plot, a pixel per value

# from dark to bright, even in lightness
MAP = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)], float)


def png(values_RC: np.ndarray) -> str:
    """Data URI of an image with a pixel for each value from 0 to 1; grey for NaN."""
    at = np.nan_to_num(np.clip(values_RC, 0, 1)) * (len(MAP) - 1)
    low = np.minimum(at.astype(int), len(MAP) - 2)
    rgb = MAP[low] + (at - low)[..., None] * (MAP[low + 1] - MAP[low])
    rgb[np.isnan(values_RC)] = 128
    raw = b"".join(b"\0" + row.tobytes() for row in rgb.round().astype(np.uint8))

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows, columns = values_RC.shape
    content = (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0))
               + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b""))
    return "data:image/png;base64," + base64.b64encode(content).decode()


def heat_plot(title: str, values_RC: np.ndarray, x: tuple[float, float], x_unit: str, y_unit: str, what: str) -> str:
    """Rows from the top down are numbered from 0; columns cover x. what: of the colours, with its unit."""
    if not values_RC.size or np.all(np.isnan(values_RC)):
        return ""
    rows, floor, bar = len(values_RC), HEIGHT - BOTTOM, 52
    low, high = float(np.nanmin(values_RC)), float(np.nanmax(values_RC))
    right = WIDTH - RIGHT - bar
    xs, ys = Scale(x[0], x[1] if x[1] > x[0] else x[0] + 1, LEFT, right), Scale(0, rows, TOP, floor)
    image = png((values_RC - low) / (high - low) if high > low else values_RC * 0)
    gradient = png(np.linspace(1, 0, 64)[:, None])
    out = [f'<image href="{uri}" x="{x}" y="{TOP}" width="{width}" height="{floor - TOP}" preserveAspectRatio="none"/>'
           for uri, x, width in ((image, LEFT, right - LEFT), (gradient, right + 8, 9))]
    for value, at in ((high, TOP + 9), ((low + high) / 2, (TOP + floor) / 2 + 4), (low, floor)):
        out.append(f'<text class="tick" x="{right + 21}" y="{at:.1f}">{value:.2f}</text>')
    for value in ticks(0, rows - 1, False, min(6, max(rows - 1, 1))):
        if value == int(value):
            y = float(ys(value + 0.5)) + 4
            out.append(f'<text class="tick" x="{LEFT - 6}" y="{y:.1f}" text-anchor="end">{int(value)}</text>')
    for value in ticks(xs.low, xs.high, False, 5):
        at = float(xs(value))
        anchor = "end" if at > right - 20 else "middle"
        out.append(f'<text class="tick" x="{at:.1f}" y="{floor + 17}" text-anchor="{anchor}">{short(value)}</text>')
    out.append(f'<text class="unit" x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_unit)}</text>'
               f'<text class="unit" transform="translate(15 {(TOP + floor) / 2}) rotate(-90)" text-anchor="middle">'
               f"{escape(y_unit)}</text>")
    return figure(title, "".join(out), [("map", "", what)])


# ------------------------------------------------------------------------------------------------------------------
# The page
# ------------------------------------------------------------------------------------------------------------------


class View(NamedTuple):
    runs: list[Run]
    x: str  # step | tokens
    count: int  # buckets of a curve

    @property
    def x_unit(self) -> str:
        return "tokens" if self.x == "tokens" else "optimizer steps"

    def label(self, run: Run, text: str) -> str:
        return f"{run.name}: {text}" if len(self.runs) > 1 else text

    def marks(self, skips: bool) -> list[Marks]:
        found = []
        for n, run in enumerate(self.runs):
            at = dict(zip(run.steps.tolist(), run.x(self.x).tolist()))
            colour = COLOURS[n % len(COLOURS)] if len(self.runs) > 1 else "#8a8f98"
            found.append(Marks(self.label(run, "restart"), "restart", colour, [at[s] for s in run.restarts() if s in at]))
            if skips:
                found.append(Marks(self.label(run, "skipped step"), "skip", COLOURS[6] if len(self.runs) == 1 else colour,
                                   [at[s] for s, _ in run.skips if s in at]))
        return found

    def plot(self, title: str, unit: str, names: dict[str, str], scale: float = 1.0, skips: bool = False, log: bool = False,
             zero: bool = False) -> str:
        """One plot of these metrics (metric -> its name in the legend) of all runs."""
        curves = []
        for n, run in enumerate(self.runs):
            for k, (metric, text) in enumerate(names.items()):
                if metric in run.columns:
                    colour = COLOURS[(n if len(self.runs) > 1 else k) % len(COLOURS)]
                    y = run.columns[metric] * scale
                    few = 0 < np.count_nonzero(~np.isnan(y)) <= min(60, 0.6 * len(y))
                    dash = DASHES[min(k, 2)] if len(self.runs) > 1 else ""
                    curves.append(Curve(self.label(run, text), colour, run.x(self.x), y, dash, few))
        return lines_plot(title, unit, curves, self.marks(skips), self.x_unit, self.count, log, zero)


def time_plots(v: View, bars: int) -> str:
    out = v.plot("Time of a step", "seconds", {"step_s": "step", "optimizer_s": "of it optimizer", "exposed_comm_s":
                                               "of it waits for transfers"}, zero=True)
    for run in v.runs:
        step, waits = run.columns.get("step_s"), run.part("exposed_s")
        if step is None or not waits:
            continue
        blocked = np.nan_to_num(run.columns.get("ckpt_blocked_s", np.zeros(len(step))))
        work = step - sum(np.nan_to_num(x) for x in waits.values()) - blocked
        x, parts = parts_over_time(run, {f"wait: {name}": y for name, y in waits.items()} | {
            "wait: checkpoint": blocked, "work": np.maximum(work, 0)}, v.x, bars)
        out += bars_plot(v.label(run, "Where a step's time goes (rank 0)"), "seconds, mean of steps", x, parts, v.x_unit)
    return out + v.plot("Checkpoints", "seconds to write", {"ckpt_write_s": "write"}, zero=True)


def memory_plots(v: View, bars: int) -> str:
    out = ""
    for run in v.runs:
        x, parts = parts_over_time(run, {name: y / GIB for name, y in run.part("tracked_bytes").items()}, v.x, bars)
        largest = max((float(sum(parts.values()).max()), 0.0)) if parts else 0.0
        unit = "GiB" if largest >= 1 else "MiB"
        scaled = {name: y * (1 if unit == "GiB" else 1024) for name, y in parts.items()}
        out += bars_plot(v.label(run, "Memory of tensors at the peak of a step, by purpose (rank 0)"), unit, x, scaled, v.x_unit)
    return out + v.plot("Peak memory of rank 0 so far", "GiB", {"peak_host_gb": "host, resident", "peak_device_gb":
                                                               "device, allocated"}, zero=True) + v.plot(
        "Allocator retries so far", "count", {"alloc_retries": "retries"}, zero=True)


def expert_plots(v: View) -> str:
    out = ""
    for run in v.runs:
        layers = run.part("expert_load")
        load_LS = np.stack([layers[k] for k in sorted(filter(str.isdigit, layers), key=int)] or [np.empty(0)])
        if load_LS.size:
            columns = np.array_split(np.arange(load_LS.shape[1]), min(96, load_LS.shape[1]))
            means = np.stack([np.nan_to_num(load_LS[:, c], nan=1.0).mean(1) for c in columns], 1)
            x = run.x(v.x)
            out += heat_plot(v.label(run, "Load of the fullest expert"), means, (float(x[0]), float(x[-1])), v.x_unit, "layer",
                             "tokens of the fullest expert / mean of its layer")
        if (load_LX := matrix(run.experts.get("load"))) is not None:
            out += heat_plot(v.label(run, f"Load of every expert at step {run.experts.get('step')}"), load_LX,
                             (0, load_LX.shape[1]), "expert", "layer", "tokens of the expert / mean of its layer")
    out += v.plot("Load of the fullest rank of a node", "fullest / mean rank", {"rank_load": "rank"})
    return out + v.plot("Experts without a token", "experts of all layers", {"dead_experts": "experts"}, zero=True)


def matrix(rows) -> np.ndarray | None:
    """Of lists of numbers of equal length; of anything else None."""
    try:
        found = np.array(rows, float)
    except (TypeError, ValueError):
        return None
    return found if found.ndim == 2 and found.size else None


def sections(v: View, bars: int) -> list[tuple[str, str]]:
    """(heading, content) for each group that has something."""
    losses = {"loss": "training", "val_loss": "held out"}
    found = [
        ("Loss", v.plot("Loss", "nats per target", losses, skips=True) + v.plot("Losses that even out the load", "nats", {
            "aux_loss": "auxiliary", "z_loss": "z"}) + eval_plot(v)),
        ("Optimizer", v.plot("Learning rate", "of the matrices, per step", {"lr": "lr"}, zero=True)
         + v.plot("Gradient norm", "norm, before clipping", {"grad_norm": "norm"}, skips=True, log=True)
         + v.plot("Gradient noise scale", "tokens", {"noise_tokens": "noise scale"}, log=True)),
        ("Speed", v.plot("Throughput", "tokens/s of all ranks", {"tok_s": "tokens/s"}, zero=True)
         + v.plot("Share of the peak", "% of bf16 peak", {"mfu": "MFU"}, 100, zero=True)
         + v.plot("Goodput", "% of the time since launch", {"goodput": "in steps that count"}, 100, zero=True)),
        ("Time", time_plots(v, bars)), ("Memory", memory_plots(v, bars)), ("Experts", expert_plots(v)),
    ]
    return [(heading, f'<div class="plots">{content}</div>') for heading, content in found if content]


def eval_plot(v: View) -> str:
    """Bits per byte of checkpoints, where eval.py measured two or more."""
    curves = []
    for n, run in enumerate(v.runs):
        found = {}
        for line in run.evals:
            bits = line["bits_per_byte"].get("model") if isinstance(line.get("bits_per_byte"), dict) else None
            if isinstance(bits, (int, float)) and math.isfinite(bits) and isinstance(line.get(v.x), int):
                found[line[v.x]] = bits
        if len(found) > 1:
            x, bits = np.array(sorted(found.items()), float).T
            curves.append(Curve(v.label(run, "model"), COLOURS[n % len(COLOURS)], x, bits, points=True))
    return lines_plot("Evaluated checkpoints", "bits per byte, held out", curves, [], v.x_unit, v.count)


def last(run: Run, name: str) -> float | None:
    column = run.columns.get(name, np.empty(0))
    there = column[~np.isnan(column)]
    return float(there[-1]) if len(there) else None


def median(run: Run, name: str) -> float | None:
    column = run.columns.get(name, np.empty(0))
    there = column[~np.isnan(column)]
    return float(np.median(there)) if len(there) else None


def cell(value, unit: str = "", digits: str = ".4g") -> str:
    if value is None or value == "":
        return "–"
    text = value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:{digits}}"
    return escape(text + unit)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Cells are HTML already."""
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def summary(runs: list[Run]) -> str:
    rows = []
    for n, run in enumerate(runs):
        done, of = int(run.steps[-1]) if len(run.steps) else 0, run.progress.get("steps") or run.settings.get("steps")
        held_out = run.columns.get("val_loss", np.empty(0))
        best = float(np.nanmin(held_out)) if len(held_out) and not np.all(np.isnan(held_out)) else None
        recover = run.columns.get("recovery_s", np.empty(0))
        tokens = last(run, "tokens")
        rows.append([f'<i class="solid" style="--c:{COLOURS[n % len(COLOURS)]}"></i> {escape(run.name)}',
                     cell(str(run.settings.get("size", ""))), cell(f"{done:,} of {of:,}" if isinstance(of, int) else f"{done:,}"),
                     cell(str(run.progress.get("phase", ""))), cell(short(tokens) if tokens else None),
                     cell(last(run, "loss"), digits=".4f"), cell(best, digits=".4f"),
                     cell(median(run, "tok_s"), digits=",.0f"), cell(median(run, "step_s"), " s", ".3g"),
                     cell(len(run.skips)), cell(max(len(run.starts) - 1, 0)),
                     cell(float(np.nansum(recover)) if np.any(~np.isnan(recover)) else None, " s", ".1f")])
    return table(["run", "size", "steps", "phase", "tokens", "last loss, nats", "best held-out, nats", "median tokens/s",
                  "median step", "skipped steps", "restarts", "crash to first step, all"], rows)


ATTEMPT = ("attempt", "step_before", "step_after", "cause", "why", "decision", "code", "excluded")  # of attempts.jsonl


def of_attempt(value) -> str | None:
    """Excluded nodes with what speaks against them; anything else as it is."""
    if isinstance(value, dict):
        return "; ".join(f"{k}: {v}" for k, v in value.items())
    return None if value is None else str(value)


def events(run: Run) -> str:
    """Starts and restarts, skipped steps, warnings."""
    out = ""
    if run.starts:
        rows = [[cell(s["time"]), cell(s["first"]), cell(s["last"]), cell(s["back_s"], " s", ".1f"), cell(s["how"].strip("; ")),
                 f"<code>{cell(s['command'])}</code>"] for s in run.starts[-50:]]
        head = ["time", "first step", "last step", "from the crash to the first step", "how", "command"]
        out += "<h3>Starts</h3>" + table(head, rows)
    if run.attempts:
        rows = [[cell(of_attempt(a.get(name))) for name in ATTEMPT] for a in run.attempts[-50:]]
        out += "<h3>Attempts, as the launcher judged them</h3>" + table([name.replace("_", " ") for name in ATTEMPT], rows)
    if run.skips:
        out += "<h3>Skipped steps</h3>" + table(["step", "why"], [[cell(s), cell(why)] for s, why in run.skips[-50:]])
    if run.warnings:
        rows = [[cell(text)] for text in run.warnings[-30:]]
        out += f"<h3>Warnings and errors in the log</h3>{table([f'the last {len(rows)} of {len(run.warnings)}'], rows)}"
    return out


def samples_of(run: Run) -> str:
    out = ""
    for s in run.samples[-8:]:
        note = f"step {s.get('step')}, temperature {s.get('temperature')}, top-p {s.get('top_p')}, seed {s.get('seed')}"
        out += (f"<h4>{cell(note)}</h4><pre><mark>{escape(str(s.get('prompt', '')))}</mark>"
                f"{escape(str(s.get('text', ''))[:4000])}</pre>")
    return f"<h3>Samples</h3>{out}" if out else ""


def evals_of(run: Run) -> str:
    rows = []
    for line in run.evals[-20:]:
        nats, bits, tasks = (line.get(k) if isinstance(line.get(k), dict) else {} for k in ("nats", "bits_per_byte", "tasks"))
        scores = ", ".join(f"{task} {metric} {x:.4g}" for task, found in tasks.items() if isinstance(found, dict)
                           for metric, x in found.items() if isinstance(x, (int, float)) and not metric.endswith("_stderr"))
        rows.append([cell(line.get("step")), cell(nats.get("model"), digits=".4f"), cell(nats.get("bigram"), digits=".4f"),
                     cell(nats.get("unigram"), digits=".4f"), cell(bits.get("model"), digits=".4f"), cell(scores)])
    head = ["step", "model, nats per token", "bigram table", "unigram table", "model, bits per byte", "tasks"]
    return f"<h3>Evaluations</h3>{table(head, rows)}" if rows else ""


def traffic_of(run: Run) -> str:
    """Median bytes that rank 0 sent in a step, by group and purpose."""
    found = {name: float(np.nanmedian(y)) for name, y in run.part("sent_bytes").items() if not np.all(np.isnan(y))}
    rows = [[cell(*name.split(" ", 1)[:1]), cell(name.partition(" ")[2]), cell(value / 1e6, " MB", ",.3f")]
            for name, value in sorted(found.items(), key=lambda kv: -kv[1]) if value]
    return f"<h3>Sent by rank 0 in a step</h3>{table(['group', 'purpose', 'median'], rows)}" if rows else ""


def profiles_of(run: Run) -> str:
    """Mean of the profiled steps of each rank."""
    rows = []
    for found in run.profiles[:64]:
        steps = [s for s in found.get("steps") or () if isinstance(s, dict) and s.get("step_s")]
        if not steps:
            continue
        mean = {part: sum(s.get(part) or 0 for s in steps) / len(steps) for part in (
            "step_s", "compute_s", "exposed_comm_s", "launching_s", "copies_s", "idle_s")}
        most = steps[0].get("exposed_s") or {}
        rows.append([cell(found.get("rank")), cell(f"{steps[0].get('step')} to {steps[-1].get('step')}"),
                     *(cell(s, " s", ".4f") for s in mean.values()), cell(max(most, key=most.get, default=""))])
    head = ["rank", "steps", "step", "compute", "exposed transfers", "launching transfers", "exposed copies", "idle",
            "longest wait"]
    return f"<h3>Profiled steps</h3>{table(head, rows)}" if rows else ""


def settings_of(runs: list[Run]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    if len(runs) > 1:
        names = [n for n in names if len({json.dumps(run.settings.get(n)) for run in runs if run.settings}) > 1]
    rows = [[cell(n), *(cell(str(run.settings.get(n, ""))) for run in runs)] for n in names]
    heading = "Settings that differ" if len(runs) > 1 else "Settings"
    if not rows:
        return ""
    return f"<details><summary>{heading}</summary>{table(['setting', *(run.name for run in runs)], rows)}</details>"


STYLE = """
:root{--bg:#fff;--fg:#1c2129;--dim:#5a626e;--line:#d5d9df;--card:#f6f7f9;color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--bg:#14171c;--fg:#e6e9ee;--dim:#a3abb8;--line:#363c46;--card:#1c2027}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1500px;padding:18px;background:var(--bg);color:var(--fg);font:15px/1.45 system-ui,sans-serif}
h1{font-size:1.5em;margin:.2em 0;overflow-wrap:anywhere}h3{font-size:1em;margin:1.2em 0 .4em}
h2{font-size:1.2em;margin:1.6em 0 .5em;border-bottom:1px solid var(--line)}
h4{font-weight:400;color:var(--dim);margin:.8em 0 .2em}.dim{color:var(--dim);overflow-wrap:anywhere}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,430px),1fr));gap:14px}
figure{margin:0;padding:10px;background:var(--card);border:1px solid var(--line);border-radius:8px;position:relative;min-width:0}
figcaption{min-height:2.6em}svg{display:block;width:100%;height:auto}
svg text{fill:var(--fg);font-size:12px;font-family:system-ui,sans-serif}svg .unit{fill:var(--dim)}
.keys{display:block;color:var(--dim);font-size:.85em}.keys span{margin-right:1em;display:inline-block;overflow-wrap:anywhere}
i{display:inline-block;width:16px;height:0;border-top:3px solid var(--c);vertical-align:middle;margin-right:5px}
i.dash{border-top-style:dashed}i.dot{border-top-style:dotted}i.box{height:11px;width:11px;border:0;background:var(--c)}
i.restart{border-top:2px dotted var(--c)}
i.skip{width:0;border:6px solid transparent;border-top:9px solid var(--c);border-bottom:0}
i.map{height:11px;width:44px;border:0;background:linear-gradient(90deg,#440154,#3b528b,#21918c,#5ec962,#fde725)}
.grid{stroke:var(--line);stroke-width:.6}.axis{stroke:var(--dim);fill:none}.line{fill:none;stroke-width:1.7}.band{opacity:.25}
.restart{stroke-dasharray:2 3;stroke-width:1.3}image{image-rendering:pixelated}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.87em}
th,td{text-align:left;vertical-align:top;padding:3px 12px 3px 0;
border-bottom:1px solid var(--line)}th{color:var(--dim);font-weight:500}td{font-variant-numeric:tabular-nums}
th{min-width:4.5em}td code{display:inline-block;min-width:22em}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--card);border:1px solid var(--line);border-radius:8px;
padding:10px;margin:.2em 0}
mark{background:none;color:inherit;font-weight:700}code{overflow-wrap:anywhere;font-size:.92em}
.tip{position:absolute;pointer-events:none;background:var(--bg);border:1px solid var(--dim);border-radius:6px;padding:4px 8px;
font-size:.8em;z-index:2;max-width:75%}.cursor{stroke:var(--dim);stroke-width:1}
@media (max-width:560px){body{padding:8px}figure{padding:6px}svg text{font-size:15px}}
"""

# Reads values back from the curves' own coordinates, so that the page holds each only once.
SCRIPT = """
for (const svg of document.querySelectorAll('svg[data-x]')) {
  const [xl, xh, xs, xe] = svg.dataset.x.split(' ').map(Number), [yl, yh, ys, ye, log] = svg.dataset.y.split(' ').map(Number)
  const [xUnit, yUnit] = svg.dataset.units.split('|')
  const curves = [...svg.querySelectorAll('.line')].map(p => ({name: p.dataset.name, colour: p.getAttribute('stroke'),
    at: p.getAttribute('d').slice(1).split('L').map(pair => pair.split(' ').map(Number))}))
  const value = y => { const t = (y - ys) / (ye - ys); return log ? yl * (yh / yl) ** t : yl + t * (yh - yl) }
  const show = v => Math.abs(v) >= 1e6 || (v && Math.abs(v) < 1e-3) ? v.toExponential(2) : String(+v.toPrecision(4))
  const tip = document.createElement('div'), cursor = document.createElementNS('http://www.w3.org/2000/svg', 'path')
  tip.className = 'tip'; cursor.setAttribute('class', 'cursor'); tip.hidden = true
  svg.append(cursor); svg.parentNode.append(tip)
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width
    if (x < xs || x > xe) return leave()
    cursor.setAttribute('d', `M${x} 12V${ys}`)
    const line = text => Object.assign(document.createElement('div'), {textContent: text})
    tip.replaceChildren(line(`${xUnit} ${Math.round(xl + (x - xs) / (xe - xs) * (xh - xl)).toLocaleString()}`))
    for (const curve of curves) {
      const near = curve.at.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a)
      tip.append(line(`${curve.name} ${show(value(near[1]))}`))
      tip.lastChild.style.color = curve.colour
    }
    tip.hidden = false
    const frame = svg.parentNode.getBoundingClientRect(), left = event.clientX - frame.left
    tip.style.left = left > frame.width / 2 ? '' : left + 12 + 'px'
    tip.style.right = left > frame.width / 2 ? frame.width - left + 12 + 'px' : ''
    tip.style.top = event.clientY - frame.top + 10 + 'px'
  })
  const leave = () => { tip.hidden = true; cursor.setAttribute('d', '') }
  svg.addEventListener('pointerleave', leave)
}
"""


def page(runs: list[Run], x: str, count: int) -> str:
    v, several = View(runs, x, count), len(runs) > 1
    bars = max(8, count // 7)
    names = ", ".join(run.name for run in runs)
    notes = "".join(f"<p class=dim>{escape(run.name)}: {escape(note)}</p>" for run in runs for note in run.notes)
    versions = "".join(f"<p class=dim>{escape(v.label(run, run.versions))}</p>" for run in runs if run.versions)
    body = [f"<h1>{escape(names)}</h1>", summary(runs), versions, notes, settings_of(runs)]
    body += [f"<h2>{heading}</h2>{content}" for heading, content in sections(v, bars)]
    for run in runs:
        content = events(run) + evals_of(run) + samples_of(run) + profiles_of(run) + traffic_of(run)
        if content:
            body.append(f"<h2>{escape(run.name) if several else 'Events, evaluations, samples, traffic'}</h2>{content}")
    return ('<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{escape(names)}</title><style>{STYLE}</style></head>"
            f"<body>{''.join(body)}<script>{SCRIPT}</script></body></html>")


def fitting(runs: list[Run], x: str) -> str:
    """The page with as many points as it has room for."""
    for count in (380, 190, 95, 48, 24):
        text = page(runs, x, count)
        if len(text.encode(errors="replace")) < LIMIT:
            break
    return text


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="report.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="append", help="directory in out/; several: compared (default: debug)")
    parser.add_argument("--x", choices=("step", "tokens"), default="step", help="what plots run over")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in the first run's directory")
    args = parser.parse_args(argv)
    try:
        runs = [find(name) for name in dict.fromkeys(args.run or ["debug"])]
        text = fitting(runs, args.x)
        place = args.out or runs[0].path / "report.html"
        place.write_bytes(text.encode(errors="replace"))
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{place}: {len(text.encode(errors='replace')) / 1e6:.2f} MB, {', '.join(run.name for run in runs)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
