"""Kernels that a run may choose, and the accelerator's branches: with meta tensors, and stand-ins for streams and packages."""

import contextlib
import sys
import types

import model
import offload
import parallel
import plan
import pytest
import sonic
import torch
import torch.nn.functional as F
import train
from launch import MEMORY_VARS, rank_environments
from model import ConfigError
from test_model import TINY, expert_inputs, random_row, slot_sum

CUDA = torch.device("cuda", 0)


# ------------------------------------------------------------------------------------------------------------------
# The block, compiled region by region
# ------------------------------------------------------------------------------------------------------------------


def gradients() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of two layers in bf16, with slots that are not all filled; one layer is recomputed, of one the graph is kept."""
    torch.manual_seed(0)
    m = model.model_of("debug", **TINY | dict(layers=2, max_per_group=2))
    grid = parallel.make_grid(0, 1, 1, 1, m, connect=False)
    state = parallel.init_state(m, grid, 0, torch.device("cpu"))
    loss, _ = train.schedule([random_row(40, m, [0, 17, 40])], state, grid, m, parallel.Transport(torch.bfloat16), scale=1 / 64,
                             keep_layers=1)
    return loss, state.grad


def test_a_compiled_block_has_the_same_loss_and_gradients(monkeypatch):
    """Traced as for inductor, each region as one graph, but no code is generated: that takes 25 s of a core's time. The rest of
    the way is the same."""
    loss, grads = gradients()
    monkeypatch.setattr(model, "COMPILER", "eager")
    calls, real = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: calls.append((f.__name__, how)) or real(f, **how))
    compiled_loss, compiled = gradients()
    assert sorted(calls, key=str) == [(name, {"backend": "eager", "fullgraph": True}) for name in (
        "normalise", "normalise_grad", "rotate", "sum_slab", "swiglu_grad_slab", "swiglu_slab")]
    assert float(compiled_loss) == pytest.approx(float(loss), rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(compiled[name], grad, rtol=1e-5, atol=1e-7, msg=name)


def test_without_a_compiler_a_run_says_so(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("InvalidCxxCompiler: none of g++ was found\nmore")

    monkeypatch.setattr(torch, "compile", lambda f, **how: broken)
    monkeypatch.setattr(model, "rotate", model.fused(model.rotate.__wrapped__))
    with pytest.raises(ConfigError, match=r"--compile=True: .*none of g\+\+ was found\); .*C\+\+ compiler"):
        model.choose_kernels("grouped_mm", "auto", True, torch.device("cpu"), "float32", model.SIZES["debug"])
    model.COMPILER = None


# ------------------------------------------------------------------------------------------------------------------
# Nothing in a step waits for the device
# ------------------------------------------------------------------------------------------------------------------

WAITS = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::nonzero_numpy",
         "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::equal", "aten::_assert_async")


class Waits(Exception):
    """An operation for whose result the host would wait."""


class Strict(plan.Recorder):
    """Refuses what makes the host wait for an accelerator: values or sizes that depend on data, copies to and from the host that
    are not started as copies (offload.Copies)."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, tensors = func._schema.name, [x for x in args if isinstance(x, torch.Tensor)]
        chosen = args[1] if name in ("aten::index", "aten::index_put_", "aten::index_put") else ()
        by_mask = any(isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in chosen)
        if name in WAITS or by_mask or name == "aten::repeat_interleave" and "output_size" not in (kwargs or {}):
            raise Waits(name)
        if name == "aten::copy_" and args[0].is_meta != args[1].is_meta:
            raise Waits("aten::copy_ between host and device")
        device = (kwargs or {}).get("device")
        if name == "aten::_to_copy" and device is not None and (torch.device(device).type == "meta") != tensors[0].is_meta:
            raise Waits("aten::_to_copy between host and device")
        return super().__torch_dispatch__(func, types, args, kwargs)


def record(monkeypatch, *settings: str) -> plan.Recording:
    monkeypatch.setattr(plan, "Recorder", Strict)
    o = plan.Options(2, 2)
    hp, m = plan.resolve(["--size=debug", "--layers=3", "--seq_len=256", "--dtype=bfloat16", *settings], o)
    return plan.record(hp, m, o)


@pytest.mark.parametrize("settings", [
    ["--max_per_group=1"],
    ["--max_per_group=1", "--offload_state=True", "--offload_fraction=0.5", "--rows_per_rank=2", "--router=sigmoid",
     "--aux_loss=0.01", "--z_loss=0.001", "--dense_gather=layer", "--grad_chunk=1"],
    ["--max_per_group=1", "--optimizer=adamw", "--keep_layers=2", "--weight_transport=bf16", "--shared_experts=1",
     "--replicas=2"]])
def test_no_step_waits_where_every_group_gets_the_same(settings, monkeypatch):
    """Schedule and optimizer, on meta tensors: values do not exist, so that nothing can have been read."""
    rec = record(monkeypatch, *settings)
    assert sum(isinstance(e, plan.Sync) for e in rec.events) == 2, "the step's numbers, which plan.record puts there, no more"


def plant(place: str, monkeypatch):
    """Something that waits, somewhere in a step."""
    def count(mask):
        return int(mask.sum())

    plants = {
        "item": lambda x: x if count(x > 0) >= 0 else x, "mask": lambda x: x[x > 0].sum() + x,
        "nonzero": lambda x: x.nonzero() and x, "to the host": lambda x: x.cpu().to(x.device),
        "from the host": lambda x: x + torch.ones(3).to(x.device).sum(), "list": lambda x: x + x.sum().tolist()}
    real = model.choose_experts

    def choose(logits_TX, bias_X, m):
        return real(plants[place](logits_TX), bias_X, m)

    monkeypatch.setattr(model, "choose_experts", choose)


@pytest.mark.parametrize("place", ["item", "mask", "nonzero", "to the host", "from the host", "list"])
def test_a_planted_wait_is_caught(place, monkeypatch):
    plant(place, monkeypatch)
    with pytest.raises((Waits, RuntimeError, NotImplementedError)) as caught:
        record(monkeypatch, "--max_per_group=1")
    assert "aten::" in str(caught.value) or "meta" in str(caught.value)


def test_uneven_routing_waits_once_per_layer_and_says_so(monkeypatch):
    rec = record(monkeypatch, "--max_per_group=2")
    assert sum(isinstance(e, plan.Sync) for e in rec.events) == 2 + rec.m.layers


# ------------------------------------------------------------------------------------------------------------------
# SonicMoE, by a stand-in for its package
# ------------------------------------------------------------------------------------------------------------------


class Package:
    """Stands in for sonicmoe 0.1.2: its general-routing entry in plain torch, with what it demands of its inputs; and QuACK's
    products, which tell how they were called."""

    def __init__(self):
        self.calls, self.inference = [], []
        self.functional, self.forward, self.backward, self.enums = (types.ModuleType(f"sonicmoe.{name}") for name in (
            "functional", "functional.forward", "functional.backward", "enums"))
        self.enums.ActivationType = types.SimpleNamespace(SWIGLU="swiglu")

        def gemm(a, b, cu_seqlens_m=None, cu_seqlens_k=None, dynamic_scheduler=False):
            self.calls.append((cu_seqlens_m is not None, dynamic_scheduler))
            return a

        self.forward.gemm = self.backward.gemm = gemm
        self.functional.moe_general_routing_inputs = self.entry

    def entry(self, x, router_scores, token_indices, expert_indices, w1, b1, w2, b2, E, stream_id, activation_type,
              is_inference_mode_enabled=False, concat_layout=False):
        assert token_indices.dtype == expert_indices.dtype == torch.int32 and router_scores.dtype == torch.float32
        assert len(token_indices) == len(expert_indices) == len(router_scores) and bool((token_indices.diff() >= 0).all())
        assert concat_layout and activation_type == "swiglu" and b1 is None and b2 is None
        assert w1.shape == (2 * w2.shape[1], x.shape[1], E) and w2.shape == (x.shape[1], w2.shape[1], E)
        assert sorted(range(3), key=lambda i: -w1.stride(i)) == sorted(range(3), key=lambda i: -w2.stride(i)) == [2, 0, 1]
        assert bool((expert_indices >= 0).all()) and bool((expert_indices < E).all())
        self.inference.append(is_inference_mode_enabled)
        gathered, offsets = x[token_indices.long()], torch.zeros(E + 1, dtype=torch.int32)
        self.forward.gemm(gathered, w1, cu_seqlens_m=offsets), self.backward.gemm(gathered, w1, cu_seqlens_k=offsets)
        up = torch.einsum("pd,udp->pu", gathered, w1[:, :, expert_indices.long()])
        gate, up = up.chunk(2, -1)
        y = torch.einsum("pf,dfp->pd", F.silu(gate) * up * router_scores[:, None], w2[:, :, expert_indices.long()])
        return torch.zeros_like(x).index_add(0, token_indices.long(), y), None


@pytest.fixture
def package(monkeypatch):
    found = Package()
    modules = {"sonicmoe": types.ModuleType("sonicmoe"), "sonicmoe.functional": found.functional, "sonicmoe.enums": found.enums,
               "sonicmoe.functional.forward": found.forward, "sonicmoe.functional.backward": found.backward}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sonic, "version", {"sonic-moe": (0, 1, 2), "quack-kernels": (0, 6, 5)}.get)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    sonic.load.cache_clear()
    yield found
    sonic.load.cache_clear()


@pytest.mark.parametrize("E, c, padded", [(1, 1, 0), (2, 1, 0), (4, 1, 1), (1, 2, 0), (4, 2, 2), (8, 4, 0)])
def test_sonic_has_the_values_and_gradients_of_grouped_mm(E, c, padded, package):
    m = model.model_of("debug", **TINY | (dict(groups=1) if c == 4 else {}), max_per_group=c)
    tensors, chosen = expert_inputs(m)
    pads = [torch.randn(padded, *t.shape[1:]) for t in tensors[2:]]

    def by_sonic(x, weights, gate_up, down):
        total, count = 0, m.experts // E
        for e in range(E):
            mine = range(e * count, (e + 1) * count)
            w = [torch.cat((t[mine.start : mine.stop], pad)) for t, pad in zip((gate_up, down), pads)]
            total = total + model.run_experts(x, weights, chosen, *w, mine, model.count_rows(chosen, mine, m), True, m)
        return total

    want = slot_sum(tensors[0], tensors[1], chosen, tensors[2], tensors[3], E, m)
    dy = torch.randn_like(want)
    want_grads = torch.autograd.grad(want, tensors, dy)
    model.MOE_KERNEL = "sonic"
    try:
        y = by_sonic(*tensors)
        with torch.no_grad():
            torch.testing.assert_close(by_sonic(*tensors), want)
    finally:
        model.MOE_KERNEL = "grouped_mm"
    torch.testing.assert_close(y, want)
    for grad, expected in zip(torch.autograd.grad(y, tensors, dy), want_grads):
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)
    assert package.inference == [False] * E + [True] * E
    assert set(package.calls) == {(True, True), (False, False)}, "dynamic where rows per expert differ, and only there"


def test_the_stages_of_sonics_check(package, monkeypatch):
    sizes = ("bfloat16", 6144, 2048)
    sonic.check(CUDA, *sizes)
    for device, args, words in ((torch.device("cpu"), sizes, "Hopper's generation or newer, this rank runs on cpu"),
                                (CUDA, ("float32", 6144, 2048), "not --dtype=float32"),
                                (CUDA, ("bfloat16", 6144, 200), "--expert_width=200")):
        with pytest.raises(ConfigError, match=f"--moe_kernel=sonic: .*{words}"):
            sonic.check(device, *args)
    for versions, words in (({}, "sonic-moe is not installed; install both"),
                            ({"sonic-moe": (0, 1, 2)}, "quack-kernels is not installed"),
                            ({"sonic-moe": (0, 1, 1)}, r"sonic-moe 0.1.1 is older than 0.1.2"),
                            ({"sonic-moe": (0, 1, 3), "quack-kernels": (0, 3, 11)}, "quack-kernels 0.3.11 is older than 0.4")):
        monkeypatch.setattr(sonic, "version", lambda name, versions=versions: versions.get(name, ()))
        with pytest.raises(ConfigError, match=f"{words}.*--moe_kernel=grouped_mm"):
            sonic.check(CUDA, *sizes)


def test_a_sonicmoe_that_is_not_as_known_is_refused(package, monkeypatch):
    package.functional.moe_general_routing_inputs = lambda x, router_scores: None
    with pytest.raises(ConfigError, match="knows no weights with gate and up rows side by side"):
        sonic.load()
    package.functional.moe_general_routing_inputs = package.entry
    del package.forward.gemm, package.backward.gemm
    with pytest.raises(ConfigError, match="does not call QuACK's products where they are expected"):
        sonic.load()
    monkeypatch.setitem(sys.modules, "sonicmoe.functional", None)
    with pytest.raises(ConfigError, match="sonicmoe cannot be used .*--moe_kernel=grouped_mm"):
        sonic.load()


def test_versions(monkeypatch):
    known = {"sonic-moe": "0.1.2.post1", "quack-kernels": "0.6.5+git", "odd": "main"}

    def version(name):
        if name not in known:
            raise sonic.importlib.metadata.PackageNotFoundError(name)
        return known[name]

    monkeypatch.setattr(sonic.importlib.metadata, "version", version)
    assert [sonic.version(name) for name in (*known, "none")] == [(0, 1, 2), (0, 6, 5), (0,), ()]


# ------------------------------------------------------------------------------------------------------------------
# FlashAttention, streams, pinned memory, the environment
# ------------------------------------------------------------------------------------------------------------------


def test_which_attention_runs(monkeypatch):
    import torch.nn.attention as attention

    there, generation, fails, active = [False], [9], [], []

    def activate(name):
        if fails:
            raise fails[0]
        active.append(name)

    monkeypatch.setattr(attention, "activate_flash_attention_impl", activate)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (generation[0], 0))
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: object() if there[0] else None)
    assert model.choose_attention("auto", CUDA) == "FlashAttention 2" and not active
    there[0] = True
    assert model.choose_attention("fa2", CUDA) == "FlashAttention 2" and not active
    assert model.choose_attention("auto", CUDA) == "FlashAttention 3" and active == ["FA3"]
    generation[0] = 10
    assert model.choose_attention("auto", CUDA) == "FlashAttention 2"
    generation[0], fails[:] = 9, [RuntimeError("no backward kernels")]
    assert model.choose_attention("auto", CUDA) == "FlashAttention 2 (3 cannot be used: no backward kernels)"
    with pytest.raises(ConfigError, match="--attention=fa3: .*no backward kernels.*--attention=fa2"):
        model.choose_attention("fa3", CUDA)
    with pytest.raises(ConfigError, match="--attention=fa3: needs an NVIDIA Hopper"):
        model.choose_attention("fa3", torch.device("cpu"))


class FakeStream:
    """Writes down what is asked of it."""

    def __init__(self, log: list, name: str):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.log.append(f"event on {self.name}")
        return f"event of {self.name}"

    def __enter__(self):
        self.log.append(f"in {self.name}")

    def __exit__(self, *_):
        self.log.append(f"out of {self.name}")


def test_copies_of_an_accelerator_follow_the_computation_and_are_waited_for_by_it(monkeypatch):
    log, names = [], iter(("out", "in"))
    monkeypatch.setattr(torch, "Stream", lambda device: FakeStream(log, next(names)))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda *_: FakeStream(log, "compute"))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: log.append(f"host waits for {device}"))
    copies = offload.Copies(CUDA)
    x, slot = torch.arange(4.0), torch.zeros(4)
    copy = copies.send("inputs out", x, slot)
    assert log == ["out waits for compute", "in out", "event on out", "out of out"] and slot.equal(x)
    with pytest.raises(RuntimeError, match="1 copies .* were never waited for"):
        copies.finish()
    log.clear()
    assert copy.wait() is slot and log == ["compute waits for event of out"]
    back = copies._start("in", "inputs in", slot, torch.zeros(4))
    assert back.wait().equal(x)
    assert log[1:] == ["in waits for compute", "in in", "event on in", "out of in", "compute waits for event of in"]
    copies.finish()
    assert log[-1] == "host waits for cuda:0"


def test_an_arena_for_a_gpu_is_pinned_after_the_cpu_has_touched_it(monkeypatch):
    pinned, failure = [], [0]

    def register(address, nbytes, flags):
        pinned.append((address, nbytes, flags))
        return failure[0]

    monkeypatch.setattr(torch.cuda, "cudart", lambda: types.SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda address: 0))
    arena = offload.Arena("inputs", 4096, CUDA)
    assert pinned == [(arena.slab.data_ptr(), 4096, 0)] and arena.slab.device.type == "cpu" and not arena.slab.any()
    failure[0] = 2
    with pytest.raises(ConfigError, match="pinning .* for inputs failed .*ulimit -l"):
        offload.Arena("inputs", 4096, CUDA)


def test_ranks_get_the_allocators_settings_unless_they_are_set(monkeypatch):
    for name in MEMORY_VARS:
        monkeypatch.delenv(name, raising=False)
    (one,) = rank_environments(["node0"], 1, 1, None, "")
    assert "expandable_segments:True" in one["PYTORCH_CUDA_ALLOC_CONF"] and one["MIMALLOC_ALLOW_THP"] == "0"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert rank_environments(["node0"], 1, 1, None, "")[0]["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"


def test_only_named_groups_are_capped(monkeypatch):
    import launch
    import torch.distributed as dist

    class Options:
        def __init__(self):
            self.config = types.SimpleNamespace(max_ctas=None)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", types.SimpleNamespace(Options=Options), raising=False)
    assert launch.group_options("nccl", 16).config.max_ctas == 16
    assert launch.group_options("nccl", 0) is None and launch.group_options("gloo", 16) is None


def test_setup_gives_nccl_its_device(monkeypatch):
    import launch
    import torch.distributed as dist

    asked = {}
    monkeypatch.setattr(dist, "init_process_group", lambda **options: asked.update(options))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: asked.update(index=index))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    with contextlib.suppress(KeyError):
        monkeypatch.delenv("OMP_NUM_THREADS")
    launch.setup(launch.Place(3, 8, 3, 4, torch.device("cuda", 3), "nccl"))
    assert asked["backend"] == "nccl" and asked["device_id"] == torch.device("cuda", 3) and asked["index"] == 3
