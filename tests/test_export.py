"""Models that leave and come back: every value, every refusal; and, where `transformers` is there, the same logits and text."""

import dataclasses
import hashlib
import json
import math
import random
import re
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file

import checkpoint
import data
import eval as ev
import export
import launch
import optim
import train
from model import ConfigError, Model, model_of
from order import Order
from parallel import Transport, init_state, make_grid, pieces
from spawn import write_documents
from tokenizer import SPACE, encode

ROOT = Path(__file__).parent.parent
SIZES = ["--layers=2", "--width=64", "--heads=4", "--kv_heads=2", "--head_dim=16", "--expert_width=32", "--experts=8",
         "--vocab=300", "--seq_len=64", "--data=text", "--wandb=off", "--steps=3", "--warmup=1", "--val_every=0"]
KINDS = {  # run -> its settings; the name is the architecture that fits
    "qwen3_moe": ["--rope_every=1", "--max_per_group=2", "--rope_theta=20000"],
    "glm4_moe": ["--rope_every=1", "--groups=1", "--router=sigmoid", "--shared_experts=1", "--eval_ckpt=True"],
    "nano1t": ["--router=sigmoid", "--shared_experts=1", "--groups=2", "--max_per_group=3"],
}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for a busy core would make the small products here many times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def start(cwd: Path, *command, code=0) -> subprocess.CompletedProcess:
    env = launch.without_ranks() | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *map(str, command)], cwd=cwd, env=env, capture_output=True, timeout=300, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def start_all(cwd: Path, *calls: list[str]) -> str:
    """What programs of the project print that run in one process after each other, since starting takes most of the time."""
    script = ("import sys, json, importlib\nimport torch.distributed as dist\n"
              "for name, *argv in json.loads(sys.argv[1]):\n    importlib.import_module(name).main(argv)\n"
              "    print('=====', flush=True)\n    dist.destroy_process_group()\n")
    return start(cwd, "-c", script, json.dumps(calls)).stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with the three runs, and of each a checkpoint of one rank in biased/<run> where sigmoid routers have a bias."""
    cwd = tmp_path_factory.mktemp("trained")
    write_documents(cwd / "text", 1500)
    start_all(cwd, *(["train", f"--run={run}", *SIZES, *KINDS[run]] for run in KINDS))
    for run in KINDS:
        manifest, m, grid, state = whole(cwd / "out" / run / "ckpt" / "step-00000003")
        if m.router == "sigmoid":
            state.bias_LX += 0.1 * torch.randn(state.bias_LX.shape, generator=torch.Generator().manual_seed(0))
        checkpoint.save(cwd / "biased" / run, 3, state, grid, meta_of(manifest))
    return cwd


def meta_of(manifest: dict) -> dict:
    """What training has a checkpoint keep."""
    return {key: value for key, value in manifest.items() if key not in ("format", "step", "grid", "files")}


def whole(path: Path):
    """(manifest, model, grid of one rank, state without moments)."""
    manifest = checkpoint.read_manifest(path)
    m = Model(**manifest["model"])
    grid = make_grid(0, 1, 1, 1, m, connect=False)
    return manifest, m, grid, ev.load_state(ev.Run(path, manifest, None, m), grid, CPU)


def biased(trained: Path, run: str) -> Path:
    return trained / "biased" / run / "step-00000003"


@pytest.fixture(scope="module")
def tokenizer(trained) -> bytes:
    return (prepared(trained) / "tokenizer.model").read_bytes()


def prepared(trained: Path) -> Path:
    """The rows that the runs were trained on."""
    wanted = checkpoint.read_manifest(biased(trained, "glm4_moe"))["fingerprint"]
    return next(path for path in (trained / "data").glob("rows-*") if data.Blend(path).fingerprint == wanted)


@pytest.fixture(scope="module")
def exported(trained, tokenizer) -> Path:
    """A folder with each run in fp32, in several files."""
    for run in KINDS:
        assert export.export_checkpoint(biased(trained, run), trained / "fp32" / run, tokenizer, "float32", shard_gb=1e-4) == run
    return trained / "fp32"


# ------------------------------------------------------------------------------------------------------------------
# Which architecture, which names
# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes, bias, kind", [
    (dict(rope_every=1, max_per_group=4), False, "qwen3_moe"),
    (dict(rope_every=1, groups=1), False, "qwen3_moe"),
    (dict(rope_every=1, groups=8, max_per_group=2, experts=16), False, "qwen3_moe"),  # all of a group's experts are allowed
    (dict(rope_every=1, groups=1), True, "nano1t"),
    (dict(rope_every=2, groups=1), False, "nano1t"),
    (dict(rope_every=1, max_per_group=3), False, "nano1t"),
    (dict(rope_every=1, groups=1, shared_experts=1), False, "nano1t"),
    (dict(rope_every=1, groups=1, router="sigmoid", shared_experts=1), True, "glm4_moe"),
    (dict(rope_every=1, groups=1, router="sigmoid", shared_experts=1), False, "glm4_moe"),
    (dict(rope_every=1, groups=1, router="sigmoid"), True, "nano1t"),
    (dict(rope_every=1, groups=4, router="sigmoid", shared_experts=1), True, "nano1t"),
    (dict(rope_every=2, groups=1, router="sigmoid", shared_experts=1), True, "nano1t"),
])
def test_architecture_is_the_one_that_runs_the_model_as_trained(changes, bias, kind):
    m = model_of("debug", **changes)
    assert export.choose_architecture("auto", m, bias) == kind
    assert export.choose_architecture("nano1t", m, bias) == "nano1t"  # which runs all
    for other in {"qwen3_moe", "glm4_moe"} - {kind}:
        with pytest.raises(ConfigError, match=f"--architecture={other}: would run another model"):
            export.choose_architecture(other, m, bias)


def test_production_sizes_go_out_with_code_of_our_own():
    for size in ("debug", "15b", "177b", "1t"):
        assert export.choose_architecture("auto", model_of(size), False) == "nano1t"


def test_names_are_those_of_the_architectures():
    m = model_of("debug", layers=1, experts=4, groups=1, shared_experts=1, router="sigmoid", rope_every=1)
    layer = {"input_layernorm", "post_attention_layernorm", *(f"self_attn.{x}_norm" for x in "qk"),
             *(f"self_attn.{x}_proj" for x in "qkvo"),
             *(f"mlp.experts.{x}.{p}_proj" for x in range(4) for p in ("gate", "up", "down"))}
    shared = {f"mlp.shared_experts.{p}_proj" for p in ("gate", "up", "down")}
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    names |= {f"model.layers.0.{name}.weight" for name in layer | shared}
    for kind, router in {"glm4_moe": {"mlp.gate.weight", "mlp.gate.e_score_correction_bias"},
                         "nano1t": {"mlp.router.weight", "mlp.router.selection_bias"}}.items():
        found = [export.their_name(name, kind) for name in export.tensor_shapes(m, kind)]
        assert set(found) == names | {f"model.layers.0.{name}" for name in router} and len(found) == len(set(found))
    m = dataclasses.replace(m, shared_experts=0)
    found = [export.their_name(name, "qwen3_moe") for name in export.tensor_shapes(m, "qwen3_moe")]
    assert set(found) == names - {f"model.layers.0.{name}.weight" for name in shared} | {"model.layers.0.mlp.gate.weight"}


@pytest.mark.parametrize("run", KINDS)
def test_config_leads_back_to_the_model(trained, exported, run):
    m = Model(**checkpoint.read_manifest(biased(trained, run))["model"])
    config = json.loads((exported / run / "config.json").read_text())
    kind, back = export.model_of_config(config, Path("c"))
    assert kind == run
    if run == "qwen3_moe":
        m = dataclasses.replace(m, groups=1, max_per_group=0)  # the same routing, said as Qwen3 says it
    assert dataclasses.replace(back, max_per_group=back.group_limit) == dataclasses.replace(m, max_per_group=m.group_limit)
    assert config["architectures"] == [export.CLASSES[run]] and config["eos_token_id"] == 1
    for key in ("num_experts_per_tok", "top_k", "num_experts"):
        assert run != "nano1t" or key not in config  # nothing that a server could take for plain top-k


# ------------------------------------------------------------------------------------------------------------------
# Values
# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", KINDS)
def test_every_value_is_there_in_fp32_and_rounded_in_bf16(trained, exported, tokenizer, run):
    masters = export.Masters(biased(trained, run))
    export.export_checkpoint(biased(trained, run), trained / "bf16" / run, tokenizer)
    owned = whole(biased(trained, run))[3].master
    state = {p.name: part for bucket, values in owned.items() for p, part in parts(bucket, values, masters.m)}
    index = json.loads((exported / run / "model.safetensors.index.json").read_text())
    files = sorted((exported / run).glob("*.safetensors"))
    assert len(files) > 3 and max(f.stat().st_size for f in files) < 1e5 + 20_000  # the header is extra
    wide = {name: (x, f.name) for f in files for name, x in load_file(f).items()}
    narrow = load_file(trained / "bf16" / run / "model.safetensors")
    assert wide.keys() == narrow.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x, _ in wide.values())
    for name, shape in export.tensor_shapes(masters.m, run).items():
        theirs, value = export.their_name(name, run), masters.read(name).view(shape)
        assert name.endswith(".bias") or torch.equal(value, state[name].view(shape)), name
        assert index["weight_map"][theirs] == wide[theirs][1]
        assert torch.equal(wide[theirs][0], value) and wide[theirs][0].dtype == torch.float32
        exact = name.endswith(("norm", "router", "bias"))
        assert torch.equal(narrow[theirs], value if exact else value.bfloat16()) and (exact or value.std() > 0)
    assert masters.m.router == "softmax" or masters.bias_LX.abs().min() > 0


def parts(bucket: str, part: torch.Tensor, m: Model):
    grid = make_grid(0, 1, 1, 1, m, connect=False)
    for p in pieces(ev.make_buckets(m, grid)[bucket], m, grid):
        yield p, part.flatten()[p.at : p.at + p.stop - p.start]


def split_checkpoint(path: Path, root: Path, R: int, N: int, E: int) -> Path:
    """A checkpoint's masters as ranks of this grid would have written them."""
    manifest, tmp, files = checkpoint.read_manifest(path), root / "tmp", {}
    m = Model(**manifest["model"])
    tmp.mkdir(parents=True)
    for rank in range(R * N * E):
        grid = make_grid(rank, R * N * E, E, R, m, connect=False)
        state = ev.load_state(ev.Run(path, manifest, None, m), grid, CPU)
        tensors = {f"{name}/master": x.view(-1) for name, x in state.master.items()}
        units = checkpoint.share_of(tensors, checkpoint.in_order(tensors, []), R, grid.r)
        tensors |= {"bias_LX": state.bias_LX.view(-1)} if rank == 0 else {}
        units += [checkpoint.Unit("bias_LX", 0, len(tensors["bias_LX"]))] if rank == 0 else []
        file = checkpoint.RankFileWriter(checkpoint.rank_file(tmp, rank), {u.name: len(tensors[u.name]) for u in units})
        for unit in units:
            file.add(unit.name, tensors[unit.name][unit.start : unit.stop].numpy().view(np.uint8))
        files[checkpoint.rank_file(tmp, rank).name] = file.finish() | {"owner": rank % (N * E)}
        file.close()
    final = checkpoint.directory(root, manifest["step"])
    checkpoint.publish(final, tmp, {**manifest, "grid": [R, N, E], "files": files})
    return final


def test_a_checkpoint_of_many_ranks_is_exported_as_that_of_one(trained, tokenizer, monkeypatch):
    monkeypatch.setattr(export, "OPEN_OWNERS", 2)  # of four
    one = biased(trained, "nano1t")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "PIECE", 1000)  # pieces end within parameters
        eight = split_checkpoint(one, trained / "eight", 2, 2, 2)
    for name, path in {"eight": eight, "one": one}.items():
        export.export_checkpoint(path, trained / "same" / name, tokenizer, shard_gb=1e-4)
    one, eight = ((trained / "same" / name / "SHA256SUMS").read_text() for name in ("one", "eight"))
    assert one == eight and len(one.splitlines()) > 8
    for line in eight.splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((trained / "same/eight" / name).read_bytes()).hexdigest() == digest
    listed = {line.split("  ")[1] for line in eight.splitlines()}
    assert {p.name for p in (trained / "same/eight").iterdir()} == listed | {"SHA256SUMS"}


@pytest.mark.parametrize("run", KINDS)
def test_import_of_an_export_is_the_same_bit_for_bit(trained, exported, tokenizer, tmp_path, monkeypatch, run):
    monkeypatch.setattr(export, "RANK_FILE_BYTES", 1e6)  # several files
    before = export.Masters(biased(trained, run))
    for dtype, source in {"fp32": exported / run, "bf16": trained / "bf16" / run}.items():
        if not source.exists():
            export.export_checkpoint(biased(trained, run), source, tokenizer)
        export.import_directory(export.Directory(source), tmp_path / dtype, "muon", "--run")
        path = tmp_path / dtype / "ckpt" / "step-00000000"
        after = export.Masters(path)
        assert after.manifest["grid"][1] > 1
        for name in export.tensor_shapes(before.m, run):
            value = before.read(name)
            rounded = value if dtype == "fp32" or name.endswith(("norm", "router", "bias")) else value.bfloat16().float()
            assert torch.equal(after.read(name), rounded), name
        wide = "float32" if dtype == "fp32" else "bfloat16"
        export.export_checkpoint(path, tmp_path / f"{dtype}-again", tokenizer, wide, shard_gb=1e-4)
        again = {n: x for f in (tmp_path / f"{dtype}-again").glob("*.safetensors") for n, x in load_file(f).items()}
        first = {n: x for f in source.glob("*.safetensors") for n, x in load_file(f).items()}
        assert again.keys() == first.keys() and all(torch.equal(again[n], first[n]) for n in first)


def test_any_grid_loads_an_import_with_moments_of_zero(exported, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "RANK_FILE_BYTES", 4e5)
    for optimizer in optim.OPTIMIZERS:
        export.import_directory(export.Directory(exported / "glm4_moe"), tmp_path / optimizer, optimizer, "--run")
        path = tmp_path / optimizer / "ckpt/step-00000000"
        m, source = Model(**checkpoint.read_manifest(path)["model"]), export.Masters(path)
        for rank, world, E in [(0, 1, 1), (0, 2, 2), (1, 2, 2), (2, 3, 1)]:
            grid = make_grid(rank, world, E, 1, m, connect=False)
            state = init_state(m, grid, 5, CPU)
            optim.init_moments(state, optimizer)
            for moments in state.moments.values():
                for moment in moments.values():
                    moment.fill_(7)
            checkpoint.load(path, state, grid, m)
            for name, bucket in state.buckets.items():
                for p in pieces(bucket, m, grid):
                    there = slice(p.at, p.at + p.stop - p.start)
                    assert torch.equal(state.master[name].view(-1)[there], source.read(p.name)[p.start : p.stop])
                    assert not any(moment.view(-1)[there].any() for moment in state.moments[name].values())
            assert torch.equal(state.bias_LX, source.bias_LX)


def test_an_import_names_the_settings_that_make_its_model(exported, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(exported / "qwen3_moe", "hf")
    config = json.loads(Path("hf/config.json").read_text())
    for number, (optimizer, theta) in enumerate((("mano", 1234567.125), ("sophiag", 5000000))):
        config["rope_parameters"]["rope_theta"] = theta
        Path("hf/config.json").write_text(json.dumps(config))
        Path("hf/SHA256SUMS").unlink(missing_ok=True)
        assert export.main(["import", "--source=hf", f"--run={number}", f"--optimizer={optimizer}"]) == 0
        argv = shlex.split(capsys.readouterr().out.split("train.py ")[1])
        hp, m = train.resolve(train.parse(argv[:-1]), launch.Place(0, 1, 0, 1, CPU, "gloo"))
        assert hp.optimizer == optimizer and m.rope_theta == theta and m == export.Directory(Path("hf")).m


def test_an_import_is_evaluated_and_trained_on(trained, exported, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    assert checkpoint.main(["import", f"--source={exported / 'qwen3_moe'}", "--run=back"]) == 0
    command = re.search(r"go on with: python train.py (.*) --data=\.\.\.", capsys.readouterr().out)[1].split()
    assert "--rope_theta=20000.0" in command and "--tokenizer=out/back/tokenizer.model" in command
    assert checkpoint.main(["verify", "out/back"]) == 0
    # by the newest checkpoint of the run, and by its path in another run
    more = ["--data=text", "--steps=2", "--lr=1e-9", "--wandb=off"]
    log = start_all(trained, ["eval", "loss", "--run=back", "--data=text", "--wandb=off"], ["train", *command, *more],
                    ["train", *command, *more, "--run=other", "--resume=out/back/ckpt/step-00000000"])
    measured, back, other, _ = log.split("=====")
    assert "0 tokens seen" in measured and "this model" in measured and "bigram" not in measured
    for run, said in (("back", back), ("other", other)):
        assert "resumed from out/back/ckpt/step-00000000" in said and ("resumed with another" in said) == (run == "other")
        steps = [json.loads(line) for line in (trained / "out" / run / "metrics.jsonl").read_text().splitlines()]
        assert [s["step"] for s in steps] == [1, 2]
        assert steps[0]["loss"] == pytest.approx(start_loss(trained, "qwen3_moe"), abs=1e-4)


def start_loss(trained: Path, run: str) -> float:
    """Of a run's checkpoint on the first training row."""
    _, m, grid, state = whole(biased(trained, run))
    blend = data.Blend(prepared(trained))
    _, corpus_R, row_R = Order([blend.stage(0)], [(0, 1)], 0).rows(0)
    row = train.to_device(blend.corpora[corpus_R[0]][row_R[0]], CPU)
    loss, _ = train.schedule([row], state, grid, m, Transport(torch.float32), train=False)
    return float(loss) / row.n_targets


def anonymous_bytes() -> int:
    """Of this process: what it holds beyond mapped files."""
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells what a process holds")
def test_memory_is_that_of_a_few_tensors(tokenizer, tmp_path, monkeypatch):
    m = model_of("debug", layers=4, width=128, heads=4, kv_heads=2, head_dim=16, expert_width=128, experts=64, groups=1,
                 vocab=300, seq_len=64, rope_every=1)
    grid = make_grid(0, 1, 1, 1, m, connect=False)
    state = init_state(m, grid, 0, CPU)
    optim.init_moments(state, "muon")
    monkeypatch.setattr(checkpoint, "PIECE", 1 << 18)
    checkpoint.save(tmp_path, 1, state, grid, {"settings": {}, "model": dataclasses.asdict(m), "fingerprint": "x"})
    size, held = sum(x.nbytes for x in state.master.values()), []
    del state
    monkeypatch.setattr(export.Progress, "add", lambda self, count: held.append(anonymous_bytes()))
    monkeypatch.setattr(export, "ZEROS", 1 << 16)
    before = anonymous_bytes()
    export.export_checkpoint(tmp_path / "step-00000001", tmp_path / "hf", tokenizer)
    export.import_directory(export.Directory(tmp_path / "hf"), tmp_path / "run", "muon", "--run")
    assert size > 50e6 and len(held) > 1000
    assert max(held) - before < 0.15 * size  # mostly the allocator's; a layer is a quarter of the model


# ------------------------------------------------------------------------------------------------------------------
# Refusals, after which nothing is left behind
# ------------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_written_leaves_nothing(trained, tokenizer, tmp_path, monkeypatch):
    path, out = biased(trained, "nano1t"), tmp_path / "deep" / "hf"

    def refused(said):
        with pytest.raises(ConfigError, match=said):
            export.export_checkpoint(path, out, tokenizer)
        assert [p.name for p in out.parent.iterdir()] in ([], ["hf"])

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))  # as a full disk: in the middle of a write
    try:
        refused("not written, .*: File too large; free space")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with monkeypatch.context() as patch:
        patch.setattr(export.shutil, "disk_usage", lambda _: type("usage", (), {"free": 1000}))
        refused(r"0\.\d+ GB are needed, 0\.00 are free")
    with monkeypatch.context() as patch:
        patch.setattr(export, "config_of", lambda *_: 1 / 0)  # a fault of ours
        with pytest.raises(ZeroDivisionError):
            export.export_checkpoint(path, out, tokenizer)
    assert not list(out.parent.iterdir())
    (out.parent / ".hf.tmp").mkdir()  # what kill -9 has left
    (out.parent / ".hf.tmp" / "model.safetensors").write_text("half")
    export.export_checkpoint(path, out, tokenizer)
    refused("hf exists; remove it")
    assert export.Directory(out).verify() == ""


def damage(source: Path, how: str):
    file = source / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    if how == "flipped":
        raw = bytearray(file.read_bytes())
        raw[-1000] ^= 4
        file.write_bytes(raw)
    elif how == "truncated":
        file.write_bytes(file.read_bytes()[:-1000])
    elif how == "gone":
        file.unlink()
    else:
        if how == "missing":
            del tensors[name]
        elif how == "surplus":
            tensors["model.layers.2.mlp.gate.weight"] = tensors["model.layers.1.mlp.gate.weight"].clone()
        elif how == "shape":
            tensors[name] = tensors[name].T.contiguous()
        elif how == "type":
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        save_file(tensors, file)


@pytest.mark.parametrize("how, said", [
    ("flipped", "model.safetensors is missing or damaged .*SHA256SUMS"), ("truncated", "model.safetensors is missing or damaged"),
    ("gone", "model.safetensors is missing or damaged"),
    ("missing", "lacks 1 tensors: model.layers.1.mlp.experts.3.up_proj.weight"),
    ("surplus", "has, beyond its config.json, 1 tensors: model.layers.2.mlp.gate.weight"),
    ("shape", r"up_proj.weight is \[64, 32\], its config.json says \[32, 64\]"), ("type", "up_proj.weight is F8_E4M3; only"),
])
def test_a_damaged_directory_is_not_imported(trained, tokenizer, tmp_path, monkeypatch, how, said):
    export.export_checkpoint(biased(trained, "qwen3_moe"), tmp_path / "hf", tokenizer)
    damage(tmp_path / "hf", how)
    monkeypatch.chdir(tmp_path)
    for command in (["import", "--run=x"], ["check"]):
        with pytest.raises(ConfigError, match=said):
            export.main([*command, "--source=hf"])
    assert {p.name for p in tmp_path.iterdir()} <= {"hf", "out"} and not list(tmp_path.glob("out/*"))


def test_an_index_that_names_another_file_is_refused(exported, tmp_path):
    shutil.copytree(exported / "glm4_moe", tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    where = index["weight_map"]
    first, last = min(where.values()), max(where.values())
    for change, said in (({"model.embed_tokens.weight": last}, f"model.embed_tokens.weight is not in {last}, where"),
                         ({"model.embed_tokens.weight": ""}, "hf is missing or damaged"),
                         ({"model.embed_tokens.weight": 3}, "its weight_map does not give"),
                         ([first], "its weight_map does not give")):
        file.write_text(json.dumps({"weight_map": where | change if isinstance(change, dict) else change}))
        with pytest.raises(ConfigError, match=said):
            export.Directory(tmp_path / "hf")
    for text in ("[]", '"x"', "null", "{"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="index.json cannot be read"):
            export.Directory(tmp_path / "hf")


def test_what_has_no_checksum_is_said(exported, tmp_path, monkeypatch, capsys):
    shutil.copytree(exported / "qwen3_moe", tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    sums = tmp_path / "hf" / "SHA256SUMS"
    lines, source = sums.read_text().splitlines(), export.Directory(Path("hf"))
    for gone in ("model-00002-of-[0-9]*.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.model"):
        sums.write_text("\n".join(line for line in lines if not re.search(f"  {gone}$", line)))
        assert re.fullmatch(f"SHA256SUMS does not list {gone}, so their bytes were not checked", source.verify())
    assert export.main(["check", "--source=hf"]) == 0 and "does not list tokenizer.model" in capsys.readouterr().out
    assert export.main(["import", "--source=hf", "--run=x"]) == 0 and "does not list tokenizer.model" in capsys.readouterr().out
    sums.write_text("\n".join(line[:64].upper() + " *./" + line[66:] for line in lines))  # sha256sum --binary ./*
    assert source.verify() == ""
    for line in ("# from the hub", "", lines[0][:63] + "  config.json", lines[0][:64] + " config.json", lines[0][:64]):
        sums.write_text("\n".join([lines[0], line, *lines[1:]]))
        with pytest.raises(ConfigError, match="hf/SHA256SUMS: line 2 is not a checksum"):
            source.verify()
    sums.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="hf/SHA256SUMS cannot be read"):
        source.verify()


def test_a_damaged_checkpoint_is_not_exported(trained, tokenizer, tmp_path):
    _, _, grid, state = whole(biased(trained, "qwen3_moe"))
    manifest = checkpoint.read_manifest(biased(trained, "qwen3_moe"))
    checkpoint.save(tmp_path / "ckpt", 3, state, grid, meta_of(manifest))
    path = tmp_path / "ckpt" / "step-00000003"
    file = checkpoint.rank_file(path, 0)
    whole_file = file.read_bytes()
    raw = bytearray(whole_file)
    raw[len(raw) // 2] ^= 1
    for content, said in ((raw, "the checksum of its .* is not"), (whole_file[:-4], "bytes, should be"), (b"", "missing")):
        file.unlink()
        if content:
            file.write_bytes(content)
        with pytest.raises(checkpoint.Damaged, match=said):
            export.export_checkpoint(path, tmp_path / "hf", tokenizer)
        assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


@pytest.mark.parametrize("run, change, said", [
    ("qwen3_moe", {"model_type": "llama"}, "model_type is 'llama'; qwen3_moe, glm4_moe, nano1t can be imported"),
    ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
    ("qwen3_moe", {"norm_topk_prob": None}, "norm_topk_prob is None"),
    ("qwen3_moe", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
    ("qwen3_moe", {"attention_bias": True}, "attention_bias"), ("qwen3_moe", {"rms_norm_eps": 1e-5}, "rms_norm_eps"),
    ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ("qwen3_moe", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "RoPE is"),
    ("qwen3_moe", {"rope_scaling": {"type": "linear"}, "rope_parameters": None}, "RoPE is"),
    ("qwen3_moe", {"num_experts": None}, "has no num_experts"), ("qwen3_moe", {"num_experts_per_tok": 99}, "--top_k=99"),
    ("glm4_moe", {"first_k_dense_replace": 1}, "first_k_dense_replace"),
    ("glm4_moe", {"routed_scaling_factor": 2.5}, "routed_scaling"),
    ("glm4_moe", {"use_qk_norm": False}, "use_qk_norm"), ("glm4_moe", {"n_group": 2}, "n_group"),
    ("glm4_moe", {"rope_parameters": None, "partial_rotary_factor": None}, "on 0.5 of each head"),
    ("qwen3_moe", {"hidden_size": "32"}, "config.json: hidden_size is '32', where a whole number belongs"),
    ("qwen3_moe", {"hidden_size": "64", "head_dim": None}, "hidden_size is '64', where"),
    ("qwen3_moe", {"num_attention_heads": 0, "head_dim": None}, "--heads=0"),
    ("qwen3_moe", {"vocab_size": 300.5}, "vocab_size is 300.5"),
    ("qwen3_moe", {"num_experts": True}, "num_experts is True"), ("qwen3_moe", {"model_type": ["qwen3_moe"]}, "model_type is"),
    ("qwen3_moe", {"rope_parameters": "plain"}, "rope_parameters is 'plain', where an object belongs"),
    ("qwen3_moe", {"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta is '1e4', where a finite number above 0"),
    ("qwen3_moe", {"rope_parameters": {"rope_theta": math.nan}}, "rope_theta is nan"),
    ("glm4_moe", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": "all"}}, "partial_rotary_factor is 'all'"),
    ("nano1t", {"router": 1}, "router is 1, where a string"), ("nano1t", {"theta": [1]}, "theta is [1], where"),
])
def test_a_config_that_ours_would_compute_otherwise_is_refused(exported, run, change, said):
    config = json.loads((exported / run / "config.json").read_text()) | change
    config = {key: value for key, value in config.items() if value is not None}
    with pytest.raises(ConfigError, match=re.escape(said)):
        export.model_of_config(config, Path("config.json"))


def test_a_config_with_the_keys_of_newer_and_older_writers_is_read(exported):
    config = json.loads((exported / "qwen3_moe" / "config.json").read_text())
    want = export.model_of_config(config, Path("c"))[1]
    newer = {k: v for k, v in config.items() if k != "rope_theta"}
    newer |= {"num_local_experts": config["num_experts"], "mlp_only_layers": None}
    del newer["num_experts"]
    older = {k: v for k, v in config.items() if k not in ("rope_parameters", "head_dim", "dtype")} | {"rope_scaling": None}
    assert export.model_of_config(newer, Path("c"))[1] == export.model_of_config(older, Path("c"))[1] == want


def test_help_names_every_setting(capsys):
    for main, doc, argv, shown, hidden in (
            (export.main, export.__doc__, ["--help"], ["--shard_gb=5.0", "--optimizer=muon", "check:\n  --source="], []),
            (checkpoint.main, export.__doc__, ["export", "--help"], ["--architecture=auto", "--dtype=bfloat16"], ["--optimiz"]),
            (export.main, export.__doc__, ["import", "--run=x", "--help"], ["--optimizer=muon"], ["--shard_gb=5.0"]),
            (ev.main, ev.__doc__, ["--help"], ["--fit_tokens=33554432", "--top_p=0.95", "--choices=4", "--out="], []),
            (ev.main, ev.__doc__, ["sample", "--help"], ["--top_p=0.95", "--run=debug"], ["--choices=4"])):
        assert main(argv) == 0
        out = capsys.readouterr().out.split(doc)[1]
        assert all(text in out for text in shown) and not any(text in out for text in hidden)


@pytest.mark.parametrize("argv, said", [
    ([], "no command: write"), (["exprot"], "'exprot': write"),
    (["export", "--run=nowhere"], "--run=nowhere: no finished checkpoint"),
    (["export", "--run=glm4_moe", "--dtype=float16"], "--dtype=float16: use"),
    (["export", "--shard_gb=0"], "--shard_gb=0: must be"),
    (["export", "--run=glm4_moe", "--out=text"], "--out=text: exists"),
    (["export", "--run=glm4_moe", "--data=gone"], "--data='gone'"),
    (["export", "--run=glm4_moe", "--data=other"], "--data=other: not what .* was trained on"),
    (["export", "--run=glm4_moe", "--architecture=llama"], "--architecture=llama: unknown"),
    (["export", "--run=glm4_moe", "--architecture=qwen3_moe"], "has a sigmoid router, 1 shared experts"),
    (["export", "--run=glm4_moe", "--step=9"], "--step=9: .* use one of 3"),
    (["import", "--run=x"], "--source= --run=x: give"), (["import", "--source=text", "--run=.x"], "--run=.x: give"),
    (["import", "--source=text", "--run=x"], "--source=text: has no config.json"),
    (["import", "--source=fp32/glm4_moe", "--run=glm4_moe"], "--run=glm4_moe: out/glm4_moe exists"),
    (["import", "--source=fp32/glm4_moe", "--run=x", "--optimizer=sgd"], "--optimizer=sgd: unknown"),
    (["check"], "--source=: give"),
])
def test_bad_input_is_refused(trained, exported, monkeypatch, argv, said):
    monkeypatch.chdir(trained)
    if not Path("other").exists():
        Path("other").mkdir()
        Path("other/docs.jsonl").write_text(Path("text/docs.jsonl").read_text().replace("value", "word"))
    with pytest.raises(ConfigError) as error:
        export.main(argv)
    assert re.search(said, str(error.value)) and "\n" not in str(error.value)
    assert not Path("out/x").exists() and not list(Path("out").glob(".*.tmp"))


def test_the_program_end_to_end(trained, capsys, monkeypatch):
    monkeypatch.chdir(trained)
    assert checkpoint.main(["export", "--run=glm4_moe", "--dtype=float32"]) == 0
    assert "Glm4MoeForCausalLM, float32" in capsys.readouterr().out
    assert export.main(["check", "--source=out/glm4_moe/export/step-00000003"]) == 0
    assert "every file has its checksum" in capsys.readouterr().out
    generation = json.loads(Path("out/glm4_moe/export/step-00000003/generation_config.json").read_text())
    assert generation == {"eos_token_id": 1, "pad_token_id": 1, "suppress_tokens": [0]}


# ------------------------------------------------------------------------------------------------------------------
# Tokenizer
# ------------------------------------------------------------------------------------------------------------------


def sentencepiece_model(**changes) -> bytes:
    import argparse
    import io
    model = io.BytesIO()
    lines = Path(argparse.__file__).read_text().split("\n")
    settings = dict(vocab_size=700, model_type="bpe", normalization_rule_name="identity", byte_fallback=True, split_digits=True,
                    add_dummy_prefix=False, remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
                    user_defined_symbols=["\n"], character_coverage=0.9995, unk_id=0, eos_id=1, bos_id=-1, pad_id=-1)
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, minloglevel=2, num_threads=1,
                                             **(settings | changes))
    return model.getvalue()


def awkward_texts(model: bytes) -> list[str]:
    """Real text, random pieces, random characters in runs, and every run of what occurs in runs."""
    rng, tok = random.Random(0), sentencepiece.SentencePieceProcessor(model_proto=model)
    found = ["", " ", "\n", "</s>", "a</s>b<unk>", "<0x0A>", "\u2581", " \u2581 \u2581\u2581x", "12345 3.14",
             "caf\u00e9 \u4e2d\U0001f600\0\t\r\n",
             "    def f(x):\n        return  x\n\n\n", Path(train.__file__).read_text(), Path(data.__file__).read_text()]
    some = [tok.id_to_piece(i).replace("\u2581", " ") for i in range(tok.vocab_size())
            if not (tok.is_control(i) or tok.is_byte(i))]
    found += ["".join(rng.choice(some) for _ in range(rng.randrange(1, 40))) for _ in range(1500)]
    characters = " \n=-#*.'_ab019\u00e9\u4e2d\U0001f600\u2581\0\t</s><unk><0x0A>"
    for _ in range(2500):
        used = characters[: rng.randrange(2, len(characters))]
        found.append("".join(rng.choice(used) * rng.choice([1, 1, 2, 3, 5, 9]) for _ in range(rng.randrange(1, 30))))
    return found + [a + c * n + b for n in range(1, 50) for c in " -=#" for a, b in (("", ""), ("a", "b"), ("\n", "return"))]


@pytest.mark.parametrize("changes", [dict(control_symbols=["<a\u2581b>"]), dict(add_dummy_prefix=True, user_defined_symbols=[]),
                                     dict(user_defined_symbols=["\n", "<|x|>", "<|x"])])
def test_tokenizer_gives_the_same_ids_and_text(tmp_path, changes):
    tokenizers = pytest.importorskip("tokenizers")
    model = sentencepiece_model(**changes)
    tok, texts = sentencepiece.SentencePieceProcessor(model_proto=model), awkward_texts(model)
    theirs = tokenizers.Tokenizer.from_str(export.tokenizer_files(model)["tokenizer.json"])
    theirs.encode_special_tokens = True  # what split_special_tokens in tokenizer_config.json does
    assert [theirs.id_to_token(i) for i in range(3)] == [tok.id_to_piece(i) for i in range(3)]
    ids = [encoding.ids for encoding in theirs.encode_batch(texts, add_special_tokens=False)]
    for text, found, wanted in zip(texts, ids, encode(tok, texts)):
        assert found == wanted, repr(text[:200])
        assert theirs.decode(found, skip_special_tokens=False) == tok.decode(wanted), repr(text[:200])


@pytest.mark.parametrize("changes, said", [
    (dict(model_type="unigram", vocab_size=400), "it is not a BPE model"),
    (dict(normalization_rule_name="nmt_nfkc"), "it normalises the text"),
    (dict(remove_extra_whitespaces=True), "it removes spaces"),
    (dict(add_dummy_prefix=True), "a space before the text and has user-defined"),
    (dict(treat_whitespace_as_suffix=True), "spaces are at the end"),
])
def test_a_tokenizer_that_cannot_be_written_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        export.tokenizer_files(sentencepiece_model(**changes))


# ------------------------------------------------------------------------------------------------------------------
# In transformers
# ------------------------------------------------------------------------------------------------------------------


@pytest.fixture()
def transformers(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("run", KINDS)
def test_transformers_computes_the_same(transformers, trained, exported, tokenizer, tmp_path, run):
    remote = run == "nano1t"
    model, info = transformers.AutoModelForCausalLM.from_pretrained(exported / run, trust_remote_code=remote, dtype="auto",
                                                                    output_loading_info=True)
    assert not any(info.values()), info  # missing, unexpected and mismatched keys
    assert type(model).__name__ == export.CLASSES[run] and {p.dtype for p in model.parameters()} == {torch.float32}
    _, m, grid, state = whole(biased(trained, run))
    weights = ev.whole_weights(state, grid, m, Transport(torch.float32))
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for T in (64, 1, 17):
            ids = torch.randint(3, m.vocab, (T,), generator=rng)
            ours, theirs = ev.logits(ids, [0, T], weights, m), model(ids[None]).logits[0]
            assert (ours - theirs).abs().max() < 1e-4 and ours.std() > 0.05
            short = model(ids[None], logits_to_keep=1).logits[0]
            assert short.shape == (1, m.vocab) and torch.allclose(short, theirs[-1:], atol=1e-5)

        ids = torch.randint(3, m.vocab, (1, 17), generator=rng)
        first = model(ids[:, :10], use_cache=True)
        rest = model(ids[:, 10:], past_key_values=first.past_key_values).logits
        assert torch.allclose(torch.cat((first.logits, rest), 1), model(ids).logits, atol=1e-5)

    # greedy text, with and without a cache, alone and beside a longer prompt
    tok = sentencepiece.SentencePieceProcessor(model_proto=tokenizer)
    prompt, s = ids[0].tolist()[:12], ev.SampleSettings(tokens=20, temperature=0.0)
    said = ev.continuation(prompt, s, weights, m, tok, None, CPU)
    pad = torch.tensor([[1] * 8 + prompt, torch.randint(3, m.vocab, (20,), generator=rng).tolist()])
    for cached in (True, False):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, use_cache=cached)[0, 12:].tolist()
        assert out[: len(said)] == said and (len(said) == 20 or out[len(said)] == tok.eos_id())
        real = (torch.arange(20) >= torch.tensor([[8], [0]])).long()
        out = model.generate(pad, attention_mask=real, max_new_tokens=20, do_sample=False, use_cache=cached)[0, 20:].tolist()
        assert out[: len(said)] == said

    theirs = transformers.AutoTokenizer.from_pretrained(exported / run, trust_remote_code=remote)
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.bos_token_id) == (1, 1, None)
    texts = ["the value</s> of\n\n   a list<unk> \u2581x caf\u00e9 12", "", " ", "\n  return it"]
    assert theirs(texts)["input_ids"] == encode(tok, texts) and theirs.batch_decode(encode(tok, texts)) == texts
    assert "\ufffd" in tok.decode(said) or tok.decode(said) == theirs.decode(said)

    # written again by the library, it comes back the same
    model.save_pretrained(tmp_path / "again")
    again, first = export.Directory(tmp_path / "again"), export.Directory(exported / run)
    assert again.m == first.m
    for name, shape in export.tensor_shapes(m, run).items():
        assert torch.equal(again.read(name, 0, math.prod(shape)), first.read(name, 0, math.prod(shape)))


def test_our_code_keeps_what_decides_in_fp32_and_trains(transformers, trained, exported, tokenizer):
    if not (trained / "bf16" / "nano1t").exists():
        export.export_checkpoint(biased(trained, "nano1t"), trained / "bf16" / "nano1t", tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(trained / "bf16" / "nano1t", trust_remote_code=True, dtype="auto")
    for name, p in model.named_parameters():
        assert p.dtype == (torch.float32 if "norm" in name or "router" in name else torch.bfloat16), name
    ids = torch.arange(3, 60)[None]
    wide = transformers.AutoModelForCausalLM.from_pretrained(trained / "fp32" / "nano1t", trust_remote_code=True)
    assert (model(ids).logits.float() - wide(ids).logits).abs().max() < 0.05
    out = wide(ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:])
    assert out.loss.item() == pytest.approx(expected.item(), abs=1e-5)
    out.loss.backward()
    still = [name for name, p in wide.named_parameters() if "experts" not in name and (p.grad is None or not p.grad.any())]
    assert still == [f"model.layers.{i}.mlp.router.selection_bias" for i in range(2)]
    drawn = wide.generate(ids[:, :5], max_new_tokens=8, do_sample=True, num_return_sequences=2, pad_token_id=1)
    beams = wide.generate(ids[:, :5], max_new_tokens=8, num_beams=3, pad_token_id=1)
    assert drawn.shape[0] == 2 and beams.shape[1] > 5


def test_the_trainer_of_transformers_accumulates_to_the_same_update(transformers, exported, tmp_path):
    """Targets are spread unevenly over four passes: a mean of means, or their sum, would be another update."""
    pytest.importorskip("accelerate")
    rng, rows, updated = torch.Generator().manual_seed(0), [], []
    for hidden in (1, 20, 35, 39):  # of 40
        ids = torch.randint(3, 300, (40,), generator=rng)
        rows.append({"input_ids": ids, "labels": torch.where(torch.arange(40) < hidden, -100, ids)})
    for passes in (1, 4):
        model = transformers.AutoModelForCausalLM.from_pretrained(exported / "nano1t", trust_remote_code=True)
        asked = transformers.TrainingArguments(str(tmp_path), max_steps=1, per_device_train_batch_size=4 // passes, use_cpu=True,
                                               gradient_accumulation_steps=passes, optim="sgd", learning_rate=1.0,
                                               lr_scheduler_type="constant", max_grad_norm=0, save_strategy="no", report_to=[],
                                               disable_tqdm=True, remove_unused_columns=False)
        before = model.lm_head.weight.detach().clone()
        transformers.Trainer(model, asked, train_dataset=rows, data_collator=lambda some: {
            key: torch.stack([row[key] for row in some]) for key in some[0]}).train()
        updated.append(model.lm_head.weight.detach() - before)
    assert updated[0].abs().max() > 1e-3 and torch.allclose(*updated, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------------
# lm-eval
# ------------------------------------------------------------------------------------------------------------------


def test_an_evaluation_ran_beside_the_training(trained):
    (found,) = [json.loads(line) for line in (trained / "out/glm4_moe/evals.jsonl").read_text().splitlines()]
    assert found["checkpoint"] == "out/glm4_moe/ckpt/step-00000003" and 0 < found["nats"]["model"] < 6
    assert "this model" in (trained / "out/glm4_moe/eval.log").read_text()


def test_only_finished_checkpoints_are_evaluated_one_at_a_time(tmp_path, monkeypatch):
    started, ended = [], [None]

    class Process:
        poll, wait = staticmethod(lambda: ended[0]), staticmethod(lambda timeout: 0)

    monkeypatch.setattr(launch, "background", lambda argv, output: started.append(argv[3]) or Process())
    out = train.Output(train.Hyperparameters(eval_ckpt=True), launch.Place(0, 1, 0, 1, CPU, "gloo"))
    out.path, out.evaluation_bytes = tmp_path, 1
    for name, error in (("a", "no space"), ("b", ""), ("c", ""), ("d", "")):
        out.saved(checkpoint.Outcome(1, Path(name), error, "", 0.5, 9))
    assert started == ["--checkpoint=b"]
    out.finish_evaluation(60)
    assert started == ["--checkpoint=b", "--checkpoint=d"]  # the newest only
    out.evaluation_bytes = 1 << 60
    out.saved(checkpoint.Outcome(1, Path("e"), "", "", 0.5, 9))
    assert len(started) == 2


def test_questions_have_one_true_answer():
    found = [ev.Passage(i // 3, f"context {i}", f" text {i}") for i in range(30)]
    asked = ev.questions(found, 25, 4, np.random.default_rng(0))
    assert len(asked) == 25 and {q["answer"] for q in asked} == {0, 1, 2, 3} and len({q["context"] for q in asked}) == 25
    for q in asked:
        i = int(q["context"].split()[1])
        those = [int(text.split()[1]) // 3 for text in q["choices"]]
        assert q["choices"][q["answer"]] == f" text {i}" and len(set(those)) == 4 and those[q["answer"]] == i // 3
    assert ev.questions(found[:6], 9, 4, np.random.default_rng(0)) == []  # two pieces cannot give three wrong ones


def test_passages_are_parts_of_held_out_documents(trained, tokenizer):
    rows, tok = data.Blend(prepared(trained)).held_out, sentencepiece.SentencePieceProcessor(model_proto=tokenizer)
    found = ev.passages(rows, tok, 6, 4)
    text = "".join(tok.decode(rows[r].tokens_S.tolist()) for r in range(len(rows)))
    assert len({p.piece for p in found}) > 1
    for p in found:
        assert p.context + p.continuation in text and re.match(r" [a-z]", p.continuation) and not p.context[-1].isspace()


class FakeRows:
    """Pieces of documents, two in each row."""

    tokens = list(range(10, 16)), list(range(16, 22))
    targets = [11, 12, -1, 14, 15, 16], [17, 18, -1, 20, 21, -1]

    def __len__(self):
        return 2

    def __getitem__(self, r):
        return data.Row(np.array(self.tokens[r]), np.array(self.targets[r]), [0, 3, 6], 6)


class FakeTokenizer:
    """Every token is a word."""

    def vocab_size(self):
        return 30

    def id_to_piece(self, i):
        return SPACE + chr(87 + i)

    def decode(self, ids):
        return "".join(" " + chr(87 + i) for i in ids)


def test_passages_know_the_piece_that_they_are_from():
    found = ev.passages(FakeRows(), FakeTokenizer(), 1, 1)
    assert [(p.piece, p.context + p.continuation) for p in found] == [(0, " a b"), (1, " d e"), (2, " g h"), (3, " j k")]


@pytest.mark.parametrize("argv, said", [
    (["loss", "--run=glm4_moe", "--tasks=text"], "--tasks=text: no directory with task files"),
    (["loss", "--run=glm4_moe", "--tasks=no/where"], "--tasks=no/where: no directory with task files"),
    (["loss", "--run=glm4_moe", "--wandb=yes"], "--wandb=yes: unknown"),
    (["harness", "--model=text", "--tasks=x"], "--model=text --tasks=x: give"),
    (["task", "--run=glm4_moe", "--choices=1"], "--choices=1: must"),
    (["task", "--run=glm4_moe", "--context=60"], "--context=60 --length=16: the held-out rows have fewer"),
])
def test_bad_tasks_are_refused(trained, monkeypatch, argv, said):
    monkeypatch.chdir(trained)
    monkeypatch.setattr(ev.importlib.util, "find_spec", lambda name: True)
    with pytest.raises(ConfigError, match=re.escape(said)):
        ev.main(argv)


def test_missing_packages_are_named_at_once(trained, monkeypatch):
    monkeypatch.chdir(trained)
    monkeypatch.setattr(ev.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--tasks=t: needs transformers, lm_eval, accelerate, .*requirements-extra.txt"):
        ev.main(["loss", "--run=glm4_moe", "--tasks=t"])


def test_lm_eval_scores_as_we_do(transformers, trained, tokenizer, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(trained)
    assert ev.main(["task", "--run=nano1t", "--context=6", "--length=4", "--questions=12"]) == 0
    done = start(trained, ROOT / "eval.py", "loss", "--run=nano1t", "--tasks=out/nano1t/tasks", "--wandb=off")
    scores = json.loads((trained / "out/nano1t/evals.jsonl").read_text().splitlines()[-1])["tasks"]["continuation"]
    _, m, grid, state = whole(trained / "out/nano1t/ckpt/step-00000003")
    weights = ev.whole_weights(state, grid, m, Transport(torch.float32))
    tok, right, asked = sentencepiece.SentencePieceProcessor(model_proto=tokenizer), 0, []
    for line in Path("out/nano1t/tasks/continuation.jsonl").read_text().splitlines():
        q, likelihood = json.loads(line), []
        for choice in q["choices"]:
            before, ids = (encode(tok, [text])[0] for text in (q["context"], q["context"] + choice))
            p = torch.log_softmax(ev.logits(torch.tensor(ids), [0, len(ids)], weights, m), -1)
            likelihood.append(sum(p[t - 1, ids[t]].item() for t in range(len(before), len(ids))))
        right += int(np.argmax(likelihood)) == q["answer"]
        asked.append(q)
    assert len(asked) == 12 and scores["acc"] == pytest.approx(right / len(asked))
    assert re.search(rf"continuation  acc +{scores['acc']:.4f}", done.stdout)
    assert not list((trained / "out/nano1t").glob(".tasks-*"))


@pytest.mark.parametrize("run_said, asked, sent", [("auto", "auto", True), ("off", "auto", False), ("auto", "off", False)])
def test_results_go_to_wandb_where_the_run_does(tmp_path, monkeypatch, run_said, asked, sent):
    logged = []

    class Wandb:
        def log(self, numbers, step):
            logged.append((numbers, step))

        def finish(self):
            logged.append("finished")

    monkeypatch.setattr(train, "start_wandb", lambda hp, path: logged.append(hp.run) or Wandb())
    path = tmp_path / "ckpt" / "step-00000007"
    path.mkdir(parents=True)
    run = ev.Run(path, {}, train.Hyperparameters(run="r", wandb=run_said), None)
    result = {"step": 7, "nats": {"model": 2.0}, "bits_per_byte": {"model": 1.0}, "tasks": {"t": {"acc": 0.5}}}
    ev.record(result, run, asked)
    assert json.loads((tmp_path / "evals.jsonl").read_text()) == result
    numbers = {"eval/nats/model": 2.0, "eval/bits_per_byte/model": 1.0, "eval/t/acc": 0.5}
    assert logged == (["r-eval", (numbers, 7), "finished"] if sent else [])
