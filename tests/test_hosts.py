"""Nodes that are bad are named, from what they do: pure judgements, and real processes on a node that computes wrongly."""

import json
import os
import random
import subprocess
import sys
from itertools import combinations

import pytest

import hosts

GIB = 2**30
GOOD = {"host": "h", "memory": 432 * GIB, "numa": {str(i): 108 * GIB for i in range(4)}, "disk": 50 * GIB, "accelerators": 4,
        "port": 20000}


@pytest.mark.parametrize(("changes", "planned", "why"), [
    ({"accelerators": 3}, 0, "3 accelerators, 4 ranks need one each"),
    ({"accelerators": 0}, 0, "0 accelerators"),
    ({"memory": 316 * GIB}, 317 * GIB, "316.0 GiB of host memory, the plan is 317.0"),
    ({"memory": 316 * GIB}, 0, "316.0 GiB of host memory, other nodes have 432.0"),
    ({"numa": {**GOOD["numa"], "2": 72 * GIB}}, 0, "72.0 GiB on NUMA node 2, others have 108.0"),
    ({"numa": {str(i): 108 * GIB for i in range(3)}}, 0, "0.0 GiB on NUMA node 3"),
    ({"disk": GIB // 2}, 0, "0.50 GiB free on its local disk"),
])
def test_a_node_that_lacks_something_is_named_with_it(changes, planned, why):
    reports = {f"n{i}": dict(GOOD) for i in range(5)}
    assert hosts.unfit(reports, 4, planned) == {}
    reports["n3"] |= changes
    bad = hosts.unfit(reports, 4, planned)
    assert list(bad) == ["n3"] and why in bad["n3"]


def test_nodes_without_accelerators_are_alike():
    assert hosts.unfit({n: GOOD | {"accelerators": 0} for n in "ab"}, 4, 0) == {}
    assert set(hosts.unfit({n: dict(GOOD) for n in "ab"}, 4, 500 * GIB)) == {"a", "b"}  # a plan that fits nowhere
    assert hosts.unfit({}, 4, 0) == {}


def test_the_plan_is_what_the_run_took_last(tmp_path):
    record = tmp_path / "hosts.jsonl"
    assert hosts.planned_memory(record, "a") == 0
    lines = [{"run": "a", "planned": {"masters": 5, "inputs": 2}}, {"run": "b", "planned": {"masters": 100}},
             {"run": "a", "planned": {"masters": 7, "inputs": 4}}]
    record.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"run": "a", "pla')  # a torn line
    assert hosts.planned_memory(record, "a") == 11


@pytest.mark.parametrize("count", range(2, 12))
def test_rounds_have_other_partners_each_time(count):
    nodes = [f"n{i}" for i in range(count)]
    rounds = hosts.rounds(nodes)
    assert len(rounds) == min(count - 1 + count % 2, 2 + count % 2)
    pairs = [frozenset(pair) for one in rounds for pair in one]
    assert len(pairs) == len(set(pairs))
    for one in rounds:
        used = [node for pair in one for node in pair]
        assert len(used) == len(set(used)) == count - count % 2
    if count > 2:
        assert all(sum(node in pair for pair in pairs) >= 2 for node in nodes)


def outcome(nodes, bad):
    """Of all rounds, where a pair fails if one of it is bad."""
    return [{pair: "no sum" if bad & set(pair) else "" for pair in one} for one in hosts.rounds(nodes)]


@pytest.mark.parametrize("count", range(3, 12))
def test_one_bad_node_is_told_from_its_partners(count):
    nodes = [f"n{i}" for i in range(count)]
    assert hosts.blamed(nodes, outcome(nodes, set()), {}) == {}
    for bad in nodes:
        assert list(hosts.blamed(nodes, outcome(nodes, {bad}), {})) == [bad]
    if count >= 8:
        for bad in combinations(nodes, 2):
            found = hosts.blamed(nodes, outcome(nodes, set(bad)), {})
            assert set(found) <= set(bad)  # never a good one


def test_what_cannot_be_told_apart_is_not_guessed():
    assert hosts.blamed(["a", "b"], outcome(["a", "b"], {"a"}), {}) == {}
    assert hosts.blamed(["a", "b"], outcome(["a", "b"], {"a"}), {"a": "the product is wrong"}) == {"a": "the product is wrong"}
    shaky = [{("a", "b"): "no sum", ("c", "d"): ""}, {("a", "c"): "", ("b", "d"): ""}]  # a link, not a node
    assert hosts.blamed(["a", "b", "c", "d"], shaky, {}) == {}


WRONG = """import builtins
real = builtins.__import__
def spoil(name, *args, **more):
    module = real(name, *args, **more)
    if name == "torch" and not hasattr(module, "spoilt") and hasattr(module, "equal"):
        module.spoilt, product = True, module.Tensor.__matmul__
        module.Tensor.__matmul__ = lambda a, b: product(a, b) + (a.dtype == module.float32)
    return module
builtins.__import__ = spoil
"""


def test_real_processes_name_the_node_that_computes_wrongly(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WRONG)

    def on_each(nodes, argv, timeout_s):
        started = {node: subprocess.Popen(argv, env=os.environ | {hosts.NODE_VAR: node, "OMP_NUM_THREADS": "1"} | (
            {"PYTHONPATH": str(tmp_path)} if node == "n1" else {}), stdout=subprocess.PIPE,
                                          stderr=subprocess.STDOUT) for node in nodes}
        return {node: (process.communicate(timeout=timeout_s)[0], process.returncode)[::-1] for node, process in started.items()}

    bad = hosts.check_nodes(on_each, ["n0", "n1"], 1)
    assert bad == {"n1": "the product on cpu is wrong in 262144 of 262144 places"}


def test_ports_of_nodes_that_share_a_machine_differ():
    argv = [sys.executable, hosts.__file__, "examine", json.dumps(["a", "b"]), str(random.randrange(*hosts.PORTS))]
    answers = [subprocess.run(argv, env=os.environ | {hosts.NODE_VAR: node}, capture_output=True,
                              check=True).stdout for node in "ab"]
    first, second = (hosts.answer_of(0, b"noise\n" + answer) for answer in answers)
    assert first["port"] != second["port"] and first["memory"] > 0 and first["numa"]
    assert hosts.answer_of(0, b"noise\n") is None and hosts.answer_of(1, answers[0]) is None
