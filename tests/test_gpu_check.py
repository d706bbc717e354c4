"""gpu_check.py: ends well on a CPU and says so, notices faults, and what it writes makes a plan."""

import json
import types

import gpu_check
import launch
import model
import offload
import parallel
import plan
import pytest
import torch
from model import ConfigError
from spawn import launch as start
from test_timeline import PARTS

CPU = torch.device("cpu")


def test_on_a_cpu_it_ends_well_says_so_and_its_file_makes_a_plan(tmp_path, capsys):
    done = start(1, 1, "gpu_check.py", "--seconds=0.01", "--steps=1", f"--out={tmp_path}/here.json")
    assert "NO ACCELERATOR HERE" in done.stdout and "no statement about a GPU" in done.stdout and "WRONG" not in done.stdout
    found = json.loads((tmp_path / "here.json").read_text())
    assert found["device"] == "cpu" and found["on_accelerator"] is False and all(c["ok"] for c in found["checks"].values())
    assert found["checks"].keys() == gpu_check.CHECKS.keys() and all(x > 0 for x in found["rates"].values())
    step = found["step"]
    assert step["size"] == "debug" and step["layers"] == 4 and step["step_s"] > step["optimizer_s"] > 0 and step["planned_s"] > 0
    (profiled,) = step["profile"]
    assert sum(profiled[part] for part in PARTS) == pytest.approx(profiled["step_s"])
    assert plan.main(["--machine", f"{tmp_path}/here.json", "--nodes", "1", "--size", "debug", "--layers=2", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["machine"] == f"{tmp_path}/here.json" and planned["ranks_per_node"] == 1 and planned["memory"]["fits"]
    assert planned["step_s"] > 0 and planned["settings"]["layers"] == 2


@pytest.fixture
def here() -> gpu_check.Here:
    m = model.model_of("debug", **gpu_check.SMALL)
    grid = parallel.make_grid(0, 1, 1, 1, m, connect=False)
    return gpu_check.Here(gpu_check.Settings(), launch.Place(0, 1, 0, 1, CPU, "gloo"), grid, m, torch.bfloat16)


def of_the_device(real, wrong):
    """A function that is wrong where it works on what the device has: bf16."""
    return lambda x, *args: wrong(real(x, *args)) if x.dtype == torch.bfloat16 else real(x, *args)


def break_norm(monkeypatch):
    monkeypatch.setattr(model, "rms_norm", of_the_device(model.rms_norm, lambda y: y * 1.02))


def break_attention(monkeypatch):
    real = model.segment_attention

    def across_documents(q, k, v, segments):
        return real(q, k, v, segments._replace(bounds=[0, len(q)]) if q.dtype == torch.bfloat16 else segments)

    monkeypatch.setattr(model, "segment_attention", across_documents)


def break_experts(monkeypatch):
    monkeypatch.setattr(model, "swiglu_slab", lambda gate_up, weight, out: out.copy_(torch.nn.functional.silu(
        gate_up[:, : out.shape[1]].float()) * gate_up[:, out.shape[1] :] * (1 if weight is None or gate_up.dtype == torch.bfloat16
                                                                           else weight[:, None])))


def break_fp8(monkeypatch):
    real, calls = parallel.quantise, []

    def flipped(x):
        calls.append(0)
        packed = real(x)
        packed[0, 700] ^= len(calls) == 1
        return packed

    monkeypatch.setattr(parallel, "quantise", flipped)


def break_copies(monkeypatch):
    real = offload.Copies.fetch
    monkeypatch.setattr(offload.Copies, "fetch", lambda self, what, source: real(self, what, source * 0))


def break_transfers(monkeypatch):
    real = parallel.reduce_scatter
    monkeypatch.setattr(parallel, "reduce_scatter", lambda x, *args, **kwargs: real(x * 1.001, *args, **kwargs))


@pytest.mark.parametrize("fault, noticed", [
    (break_norm, {"norm", "head and loss"}), (break_attention, {"attention"}),
    (break_experts, {"experts, even", "experts, uneven"}), (break_fp8, {"fp8 blocks"}), (break_copies, {"copies"}), (break_transfers, {"transfers"})])
def test_a_fault_of_the_device_is_noticed_where_it_is(fault, noticed, here, monkeypatch):
    fault(monkeypatch)
    monkeypatch.setattr(gpu_check, "CHECKS", {name: c for name, c in gpu_check.CHECKS.items() if not name.startswith("step")})
    found = gpu_check.run_checks(here, lambda _: None)
    assert {name for name, check in found.items() if not check["ok"]} == noticed


def test_a_path_that_fails_is_told_and_the_others_are_checked(here, monkeypatch):
    def missing(*_):
        raise RuntimeError("no kernel image is available\nmore")

    monkeypatch.setattr(model, "embed_grad", missing)
    checks = {name: gpu_check.CHECKS[name] for name in ("embedding gradient", "AdamW")}
    monkeypatch.setattr(gpu_check, "CHECKS", checks)
    said = []
    found = gpu_check.run_checks(here, said.append)
    assert found["embedding gradient"] == {"error": None, "tolerance": 1e-6, "ok": False,
                                           "why": "RuntimeError: no kernel image is available"}
    assert found["AdamW"]["ok"] and "WRONG" in said[0] and "no kernel image" in said[0]


def test_a_gpus_file_makes_a_plan_with_its_rates(here, monkeypatch, tmp_path, capsys):
    """Rates as an H200 would have them; what one machine cannot measure comes from a known one, and is named."""
    properties = types.SimpleNamespace(multi_processor_count=132)
    module = types.SimpleNamespace(get_device_properties=lambda _: properties)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(launch, "device_memory", lambda device: 141 * 10**9)
    on_gpu = here._replace(where=launch.Place(0, 1, 0, 1, torch.device("cuda", 0), "nccl"))
    rates = {"dense_efficiency": 700e12, "expert_efficiency": 560e12, "attention_efficiency": 420e12,
             "attention_back_efficiency": 350e12, "orthogonal_efficiency": 600e12, "head_efficiency": 650e12,
             "fp32_efficiency": 50e12, "kernel_s": 2e-6, "launch_s": 5e-6, "element-wise rate": 3.5e12,
             "routing and permutation rate": 2e12, "optimizer passes rate": 3e12, "fp8 rate": 2.5e12,
             "quantise bytes/s": 2e12, "copy out bytes/s": 50e9, "copy in bytes/s": 55e9, "base_s": 1e-5, "node_rate": 1e10}
    constants, assumed = gpu_check.machine_of(on_gpu, rates)
    assert constants["expert_efficiency"] == pytest.approx(0.8) and constants["peak_bf16"] == 700e12
    assert constants["copy_rate"] == 50e9
    assert constants["memory"] == 141e9 and "net_rate" in assumed and "node_rate" in assumed and "memory" not in assumed
    assert constants["node_rate"] == plan.rates("jupiter-gh200")["node_rate"], "one rank has measured no transfer"
    (tmp_path / "gpu.json").write_text(json.dumps({"machine": constants}))
    argv = ["--nodes", "1", "--ranks-per-node", "1", "--size", "15b", "--layers=4", "--json"]
    seconds = []
    for machine in (f"{tmp_path}/gpu.json", "jupiter-gh200"):
        assert plan.main(["--machine", machine, *argv]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["step_s"])
    assert 0 < seconds[0] != seconds[1]


@pytest.mark.parametrize("content, words", [(None, "make gpu-check"), ("{", "make gpu-check"),
                                            ('{"machine": []}', "AttributeError"), ('{"machine": {"peak_bf16": "fast"}}', "ValueError"),
                                            ('{"machine": {"peak_bf16": 1}}', "attention_back_efficiency, .* missing")])
def test_a_file_that_is_none_of_these_is_refused(content, words, tmp_path):
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    with pytest.raises(ConfigError, match=f"--machine=.*x.json: .*{words}"):
        plan.main(["--machine", f"{tmp_path}/x.json", "--nodes", "1", "--size", "debug"])


@pytest.mark.parametrize("changed", [{"steps": 0}, {"memory": 1.5}])
def test_settings_that_cannot_be_are_refused(changed):
    with pytest.raises(ConfigError, match="--steps=.* --memory="):
        gpu_check.main([f"--{name}={value}" for name, value in changed.items()])
