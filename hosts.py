"""What a node has, and whether it computes and talks as it should.

    examine      on a node: memory, disk, accelerators; no tensors unless there are device files, since it runs before every start
    unfit        pure: of all nodes' reports, which cannot take part, and why
    pair         on a node: a product, and a sum with a partner
    rounds       pure: partners, other ones in each round, so that one bad node among good ones is told from its partner
    blamed       pure: of all rounds' results, which nodes are bad

The launcher runs them through `on_each` of cluster.py. A failure is so put on a node by what it does, not by guessing.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import random
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median

from watch import NODE_VAR

GIB = 2**30
DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd", "/dev/dri/renderD*")  # without one there is no accelerator
ENOUGH = 0.9  # of what the other nodes have
LOCAL_DISK = 1 * GIB  # bytes that must be free in the temporary directory
PORTS = (20000, 32000)  # below what systems give to outgoing connections
PRODUCT = "the product"
EXIT_BUSY = 3  # of `pair`: the port was taken, which says nothing of the node
EXAMINE_S, PAIR_S = 120, 180  # patience with a node; an import from a busy shared file system takes a while

# ------------------------------------------------------------------------------------------------------------------
# Memory
# ------------------------------------------------------------------------------------------------------------------


def numa_nodes(root: str = "/sys/devices/system/node") -> list[dict]:
    """Of each NUMA node with memory: id, whether it has CPUs (on GH200 the GPU's memory is a node without), and total, free and
    unattributed bytes. Unattributed is what neither files, processes nor the kernel's own lists account for: drivers and other
    jobs' remains, mostly released under pressure."""
    nodes = []
    for path in sorted(Path(root).glob("node[0-9]*"), key=lambda p: int(p.name[4:])):
        fields = {}
        for line in (path / "meminfo").read_text().splitlines():
            _, _, name, kib, *_ = line.split()
            fields[name.rstrip(":")] = int(kib) * 1024
        if not fields.get("MemTotal"):
            continue
        known = sum(fields.get(name, 0) for name in ("MemFree", "FilePages", "AnonPages", "Slab", "KernelStack", "PageTables"))
        nodes.append({"node": int(path.name[4:]), "cpus": bool((path / "cpulist").read_text().strip()),
                      "total": fields["MemTotal"], "free": fields["MemFree"], "unattributed": max(0, fields["MemTotal"] - known)})
    return nodes


def control_group_limit(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> int | None:
    """Bytes that this job may take on the host (Slurm and containers set it), or None. Version 1 and 2 of the interface."""
    limits = []
    for line in Path(own).read_text().splitlines() if Path(own).exists() else ():
        _, controllers, place = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base, name = (Path(root), "memory.max") if not controllers else (Path(root, "memory"), "memory.limit_in_bytes")
        here = base / place.lstrip("/")
        for folder in (here, *here.parents):  # a limit of any group above holds too
            if (folder / name).exists() and (text := (folder / name).read_text().strip()).isdecimal():
                limits.append(int(text))
            if folder == base:
                break
    return min(limits, default=None)


def host_memory() -> tuple[int, list[dict]]:
    """(bytes that the host has for this job, its NUMA nodes)."""
    nodes = numa_nodes()
    total = sum(n["total"] for n in nodes if n["cpus"]) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, control_group_limit() or total), nodes


# ------------------------------------------------------------------------------------------------------------------
# Before a start
# ------------------------------------------------------------------------------------------------------------------


def free_port(first: int | None = None) -> int:
    """A TCP port that is free on this machine, on both families of addresses; `first` or the next one. Raises OSError."""
    start = first if first is not None else random.randrange(*PORTS)
    for i in range(count := PORTS[1] - PORTS[0]):
        port = PORTS[0] + (start - PORTS[0] + i) % count
        dual = socket.has_dualstack_ipv6()
        family, host = (socket.AF_INET6, "::") if dual else (socket.AF_INET, "0.0.0.0")
        with contextlib.suppress(OSError), socket.create_server((host, port), family=family, dualstack_ipv6=dual):
            return port
    raise OSError(f"no free TCP port between {PORTS[0]} and {PORTS[1]} on {socket.gethostname()}")


def examine(nodes: list[str], first_port: int) -> dict:
    """This node's report. nodes: all of them; those that share a machine get different ports."""
    total, numa = host_memory()
    index = nodes.index(os.environ[NODE_VAR]) if os.environ.get(NODE_VAR) in nodes else 0
    accelerators = 0
    if any(glob.glob(pattern) for pattern in DEVICE_FILES):
        import torch

        accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return {"host": socket.gethostname(), "memory": total, "numa": {str(n["node"]): n["total"] for n in numa if n["cpus"]},
            "disk": shutil.disk_usage(tempfile.gettempdir()).free, "accelerators": accelerators,
            "port": free_port(first_port + 16 * index)}


def unfit(reports: dict[str, dict], ranks_per_node: int, planned: int) -> dict[str, str]:
    """Nodes that cannot take part. reports: of `examine`, by node; planned: bytes of host memory that a node's ranks will take, 0:
    not known. What a node should have is what most others have."""
    if not reports:
        return {}
    found: dict[str, list[str]] = {node: [] for node in reports}
    typical = median(r["memory"] for r in reports.values())
    devices = ranks_per_node if max(r["accelerators"] for r in reports.values()) else 0
    banks = {bank for r in reports.values() for bank in r["numa"]}
    usual = {bank: median(r["numa"].get(bank, 0) for r in reports.values()) for bank in banks}
    for node, r in reports.items():
        if r["accelerators"] < devices:
            found[node].append(f"{r['accelerators']} accelerators, {devices} ranks need one each")
        if r["memory"] < planned:
            found[node].append(f"{r['memory'] / GIB:.1f} GiB of host memory, the plan is {planned / GIB:.1f}")
        elif r["memory"] < ENOUGH * typical:
            found[node].append(f"{r['memory'] / GIB:.1f} GiB of host memory, other nodes have {typical / GIB:.1f}")
        found[node] += [f"{r['numa'].get(bank, 0) / GIB:.1f} GiB on NUMA node {bank}, others have {usual[bank] / GIB:.1f}"
                        for bank in sorted(banks) if r["numa"].get(bank, 0) < ENOUGH * usual[bank]]
        if r["disk"] < LOCAL_DISK:
            found[node].append(f"{r['disk'] / GIB:.2f} GiB free on its local disk, {LOCAL_DISK / GIB:.0f} are needed")
    return {node: "; ".join(whys) for node, whys in found.items() if whys}


def planned_memory(record: Path, run: str) -> int:
    """Bytes of host memory that the run took on a node when it last started, as out/hosts.jsonl says; 0: it never did."""
    planned = 0
    with contextlib.suppress(OSError), open(record) as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                host = json.loads(line)
                if host["run"] == run:
                    planned = sum(host["planned"].values())
    return planned


def answer_of(code: int, output: bytes) -> dict | None:
    """The last line of a node's output that is an object, if it ended well; modules and libraries print what they like before."""
    lines = [line for line in output.decode(errors="replace").splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if code == 0 and lines else None


def why_silent(code: int, output: bytes) -> str:
    if code == 124:
        return "no answer in time"
    lines = output.decode(errors="replace").strip().splitlines() or ["no output"]
    return f"its check ended with code {code}: {lines[-1][:200]}"


def check_start(on_each: Callable, nodes: list[str], ranks_per_node: int, planned: int) -> tuple[dict[str, dict], dict[str, str]]:
    """(reports of the nodes that answered, nodes that cannot take part and why)."""
    argv = [sys.executable, str(Path(__file__).resolve()), "examine", json.dumps(nodes), str(random.randrange(*PORTS))]
    answers = on_each(nodes, argv, EXAMINE_S)
    reports, bad = {}, {}
    for node in nodes:
        code, output = answers.get(node, (124, b""))
        if (report := answer_of(code, output)) is None:
            bad[node] = why_silent(code, output)
        else:
            reports[node] = report
    return reports, bad | unfit(reports, ranks_per_node, planned)


# ------------------------------------------------------------------------------------------------------------------
# In pairs
# ------------------------------------------------------------------------------------------------------------------


def rounds(nodes: list[str]) -> list[list[tuple[str, str]]]:
    """Pairs in each round; no pair comes twice. Two rounds; three for an odd number, where one sits out each time. The circle
    of a round-robin tournament: the first stays, the others move on."""
    ring: list[str | None] = [*nodes, None] if len(nodes) % 2 else list(nodes)
    found = []
    for _ in range(min(len(ring) - 1, 3 if len(nodes) % 2 else 2)):
        pairs = [(ring[i], ring[-1 - i]) for i in range(len(ring) // 2)]
        found.append([(a, b) for a, b in pairs if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


def blamed(nodes: list[str], results: list[dict[tuple[str, str], str]], own: dict[str, str]) -> dict[str, str]:
    """Bad nodes and why. results: of each round, by pair: "" or how it failed; own: nodes that failed without a partner's help. A
    node is bad if no pair with it worked, and one of its partners did work with another, which so is not the bad one itself."""
    bad = dict(own)
    of = {node: [(pair, why) for one in results for pair, why in one.items() if node in pair] for node in nodes}
    works = {node for node in nodes if any(not why for _, why in of[node])}
    for node in nodes:
        if node in bad or node in works or not of[node]:
            continue
        partners = [a if b == node else b for (a, b), _ in of[node]]
        if any(partner in works for partner in partners):
            bad[node] = f"with {' and with '.join(partners)}: {of[node][0][1]}"
    return bad


def pair(spec: dict) -> str:
    """On a node: the product on each of its devices, then sums with its partner on each. spec: host, port, rank, seconds; without
    a host only the product. Returns "" or what was wrong; ends the process with EXIT_BUSY if the port is taken."""
    import torch
    import torch.distributed as dist

    kind = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    devices = [f"{kind}:{i}" for i in range(torch.accelerator.device_count())] if kind != "cpu" else ["cpu"]
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 9, (512, 512), generator=generator) for _ in range(2))  # small integers: every device is exact
    want, wrong = a @ b, ""
    for device in devices:
        got = (a.to(device, torch.float32) @ b.to(device, torch.float32)).cpu()
        if not torch.equal(got, want.float()):
            wrong = f"{PRODUCT} on {device} is wrong in {int((got != want).sum())} of {want.numel()} places"
    if not spec.get("host"):
        return wrong
    try:
        store = dist.TCPStore(spec["host"], spec["port"], 2, spec["rank"] == 0, timedelta(seconds=spec["seconds"]))
    except RuntimeError as error:
        if "address already in use" in str(error).lower() or "EADDRINUSE" in str(error):
            sys.exit(EXIT_BUSY)
        return wrong or f"no connection: {str(error).splitlines()[0][:150]}"
    backend = {"cuda": "nccl", "xpu": "xccl"}.get(kind, "gloo")
    try:
        dist.init_process_group(backend, store=store, rank=spec["rank"], world_size=2, timeout=timedelta(seconds=spec["seconds"]))
        for device in devices:
            x = (torch.arange(1 << 18) % 1000 + spec["rank"]).to(device, torch.float32)
            dist.all_reduce(x)
            if not torch.equal(x.cpu(), (2 * (torch.arange(1 << 18) % 1000) + 1).float()):
                return wrong or f"the sum on {device} is wrong"
    except RuntimeError as error:
        return wrong or f"no sum: {str(error).splitlines()[0][:150]}"
    return wrong


def check_pairs(on_each: Callable, nodes: list[str], reports: dict[str, dict], seconds: float = PAIR_S) -> dict[str, str]:
    """Bad nodes among those that `check_start` found fit, and why. reports: its."""
    results, own = [], {}
    for number, pairs in enumerate(rounds(nodes) or [[]]):
        specs = {}
        for a, b in pairs:
            meeting = {"host": reports[a]["host"], "port": reports[a]["port"] + number, "seconds": seconds / 3}
            specs |= {a: meeting | {"rank": 0}, b: meeting | {"rank": 1}}
        specs = specs or {node: {} for node in nodes}  # one alone
        argv = [sys.executable, str(Path(__file__).resolve()), "pair", json.dumps(specs)]
        answers = on_each(list(specs), argv, seconds)
        said = {}
        for node in specs:
            code, output = answers.get(node, (124, b""))
            answer = answer_of(code, output)
            said[node] = answer["why"] if answer else "busy" if code == EXIT_BUSY else why_silent(code, output)
            if said[node].startswith(PRODUCT):  # which no partner can have to do with
                own[node], said[node] = said[node], ""
        results.append({(a, b): said[a] or said[b] for a, b in pairs if "busy" not in (said[a], said[b])})
    return blamed(nodes, results, own)


def check_nodes(on_each: Callable, nodes: list[str], ranks_per_node: int) -> dict[str, str]:
    """Both checks: bad nodes, and why."""
    reports, bad = check_start(on_each, nodes, ranks_per_node, 0)
    return bad | check_pairs(on_each, [node for node in nodes if node not in bad], reports)


def main(argv: list[str]) -> int:
    """On a node, started by the launcher."""
    if argv[0] == "examine":
        print(json.dumps(examine(json.loads(argv[1]), int(argv[2]))), flush=True)
    elif argv[0] == "pair":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        print(json.dumps({"why": pair(json.loads(argv[1])[os.environ[NODE_VAR]])}), flush=True)
        os._exit(0)  # a partner that hangs must not keep this process
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
