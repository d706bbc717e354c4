"""Models that leave, and models that come in: directories as Hugging Face libraries read them.

    python export.py export --run=debug                    out/debug/export/step-00000200, in bf16; also make export
    python export.py export --run=debug --out=DIR --dtype=float32 --shard_gb=5
    python export.py import --source=DIR --run=mine        out/mine with a checkpoint of step 0, to go on from
    python export.py check --source=DIR                    names, shapes, sizes and checksums

What comes out depends on the model, since a loader that does not know a setting would run another model without a word:

    Qwen3-MoE          RoPE on all layers, softmax router, plain top-k, no shared expert
    GLM-4 MoE          RoPE on all layers, sigmoid router with a selection bias, plain top-k, one shared expert
    modeling_nano1t.py the rest (layers without RoPE, group-limited routing): our own code beside the weights

Norms, router and selection bias stay fp32 in every export, as in training; the rest is rounded to --dtype. Nothing is ever
whole in memory but one tensor (an import: one tensor's slice) and a piece of a few of the checkpoint's files. A directory
appears when it is finished, or not at all.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Callable, Iterable, Iterator

import numpy as np
import sentencepiece
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import checkpoint
import data
import launch
import optim
import train
from model import SIZES, ConfigError, Model, model_of, param_shapes
from parallel import OWNERSHIP, make_buckets, make_grid, pieces
from shards import file_sha256, write_synced
from tokenizer import BPE, BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, USER_DEFINED, load_model, model_settings, wire


@dataclass
class ExportSettings:
    run: str = "debug"  # name of the directory out/<run>
    step: int = 0  # of the checkpoint; 0: the newest
    checkpoint: str = ""  # a checkpoint's directory, instead of run and step
    out: str = ""  # directory to write; empty: out/<run>/export/step-<step>
    dtype: str = "bfloat16"  # of the weights: bfloat16 | float32
    architecture: str = "auto"  # auto: the first that fits of qwen3_moe | glm4_moe | nano1t
    shard_gb: float = 5.0  # largest weight file, in 1e9 bytes
    data: str = ""  # where the run's data are now, if they have moved; empty: where the run found them
    tokenizer: str = ""  # the same for its tokenizer


@dataclass
class ImportSettings:
    source: str = ""  # directory with config.json and weights as .safetensors
    run: str = ""  # name of the directory out/<run> to make
    optimizer: str = "muon"  # that training will go on with; its moments start at zero
    seq_len: int = 0  # tokens per row; 0: the longest that the model was made for


@dataclass
class CheckSettings:
    source: str = ""  # directory with config.json and weights as .safetensors


# ------------------------------------------------------------------------------------------------------------------
# Architectures: which one runs a model as it was trained, and what its parts are called there
# ------------------------------------------------------------------------------------------------------------------

CLASSES = {"qwen3_moe": "Qwen3MoeForCausalLM", "glm4_moe": "Glm4MoeForCausalLM", "nano1t": "Nano1tForCausalLM"}
OWN_CODE = Path(__file__).with_name("modeling_nano1t.py")

LAYER_NAMES = {  # short name of a parameter -> its name inside model.layers.<i>; experts: inside mlp.experts.<x>
    "q": "self_attn.q_proj.weight", "k": "self_attn.k_proj.weight", "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight", "q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight",
    "attn_norm": "input_layernorm.weight", "moe_norm": "post_attention_layernorm.weight",
    "gate": "gate_proj.weight", "up": "up_proj.weight", "down": "down_proj.weight",
    "shared_gate": "mlp.shared_experts.gate_proj.weight", "shared_up": "mlp.shared_experts.up_proj.weight",
    "shared_down": "mlp.shared_experts.down_proj.weight",
}
TOP_NAMES = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
ROUTER_NAMES = {  # the selection bias is a parameter here
    "qwen3_moe": {"router": "mlp.gate.weight"},
    "glm4_moe": {"router": "mlp.gate.weight", "bias": "mlp.gate.e_score_correction_bias"},
    "nano1t": {"router": "mlp.router.weight", "bias": "mlp.router.selection_bias"},
}

COMMON = {"layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
          "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "vocab": "vocab_size", "seq_len": "max_position_embeddings"}
CONFIG_NAMES = {  # field of Model -> key of config.json; RoPE's are apart
    "qwen3_moe": COMMON | {"experts": "num_experts", "top_k": "num_experts_per_tok", "expert_width": "moe_intermediate_size"},
    "glm4_moe": COMMON | {"experts": "n_routed_experts", "top_k": "num_experts_per_tok", "expert_width": "moe_intermediate_size"},
    "nano1t": COMMON | {"rope_theta": "theta", "top_k": "experts_per_token"} | {name: name for name in (
        "experts", "expert_width", "groups", "max_per_group", "rope_every", "shared_experts", "router")},
}
ALIASES = {"num_experts": "num_local_experts", "n_routed_experts": "num_local_experts"}  # newer writers' keys
IMPLIED = {  # what an architecture fixes of Model
    "qwen3_moe": dict(groups=1, rope_every=1, router="softmax", shared_experts=0),
    "glm4_moe": dict(groups=1, rope_every=1, router="sigmoid", shared_experts=1),
    "nano1t": {},
}
# Settings that must be so for a model of ours; (key, value, whether a config without the key means the same)
ALWAYS = [("hidden_act", "silu", True), ("attention_bias", False, True), ("tie_word_embeddings", False, True)]
REQUIRED = {
    "qwen3_moe": ALWAYS + [("rms_norm_eps", 1e-6, True), ("use_sliding_window", False, True), ("norm_topk_prob", True, False),
                           ("decoder_sparse_step", 1, True), ("mlp_only_layers", [], True)],
    "glm4_moe": ALWAYS + [("rms_norm_eps", 1e-6, False), ("norm_topk_prob", True, True), ("use_qk_norm", True, False),
                          ("n_shared_experts", 1, True), ("n_group", 1, True), ("topk_group", 1, True),
                          ("routed_scaling_factor", 1.0, True), ("first_k_dense_replace", 0, False)],
    "nano1t": [("rms_norm_eps", 1e-6, True), ("tie_word_embeddings", False, True)],
}


def misfit(kind: str, m: Model, biased: bool) -> str:
    """Why an architecture would not run this model as it was trained; empty if it would. biased: a selection bias is not 0."""
    fits = {"qwen3_moe": ("softmax", 0), "glm4_moe": ("sigmoid", 1)}
    if kind not in fits:
        return ""
    router, shared = fits[kind]
    reasons = {f"RoPE on every {m.rope_every}. layer only": m.rope_every != 1,
               f"at most {m.group_limit} of a token's {m.top_k} experts in a group":
                   m.groups > 1 and m.group_limit < min(m.top_k, m.experts // m.groups),
               f"a {m.router} router": m.router != router,
               f"{m.shared_experts} shared experts": m.shared_experts != shared,
               "a selection bias": biased and router == "softmax",
               "a single expert": m.experts < 2}  # GLM-4 MoE looks at the two best
    return ", ".join(reason for reason, holds in reasons.items() if holds)


def choose_architecture(wanted: str, m: Model, biased: bool) -> str:
    """The first architecture that fits, or the wanted one; raises ConfigError if that does not."""
    if wanted == "auto":
        return next(kind for kind in CLASSES if not misfit(kind, m, biased))
    if wanted not in CLASSES:
        raise ConfigError(f"--architecture={wanted}: unknown; use auto or one of {', '.join(CLASSES)}")
    if reason := misfit(wanted, m, biased):
        raise ConfigError(f"--architecture={wanted}: would run another model, since this one has {reason}; use "
                          "--architecture=auto")
    return wanted


def tensor_shapes(m: Model, kind: str) -> dict[str, tuple[int, ...]]:
    """Every tensor of an export by our name, in the order of the forward pass: param_shapes and layers.<i>.bias."""
    shapes = {}
    for name, shape in param_shapes(m).items():
        shapes[name] = shape
        if name.endswith(".router") and "bias" in ROUTER_NAMES[kind]:
            shapes[name.removesuffix("router") + "bias"] = (m.experts,)
    return shapes


def their_name(name: str, kind: str) -> str:
    """Of a parameter of ours: layers.3.experts.17.gate -> model.layers.3.mlp.experts.17.gate_proj.weight."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, i, *middle, short = name.split(".")
    inside = f"mlp.experts.{middle[1]}." if middle else ""
    return f"model.layers.{i}.{inside}{(LAYER_NAMES | ROUTER_NAMES[kind])[short]}"


def config_of(m: Model, kind: str, eos: int, dtype: str) -> dict:
    """config.json."""
    config = {"architectures": [CLASSES[kind]], "model_type": kind, "dtype": dtype, "torch_dtype": dtype,
              "bos_token_id": None, "eos_token_id": eos, "pad_token_id": eos, "use_cache": True}
    if kind == "nano1t":
        module = OWN_CODE.stem
        config["auto_map"] = {"AutoConfig": f"{module}.Nano1tConfig", "AutoModelForCausalLM": f"{module}.Nano1tForCausalLM"}
    else:  # both spellings: version 5 of transformers moved them
        config |= {"rope_theta": m.rope_theta, "rope_parameters": {"rope_type": "default", "rope_theta": m.rope_theta},
                   "intermediate_size": m.expert_width * m.top_k}  # of dense layers, which there are none of
    if kind == "glm4_moe":
        config["rope_parameters"]["partial_rotary_factor"] = config["partial_rotary_factor"] = 1.0
        config["num_nextn_predict_layers"] = 0
    sizes = {key: getattr(m, name) for name, key in CONFIG_NAMES[kind].items()}
    if "max_per_group" in sizes:
        sizes["max_per_group"] = m.group_limit
    return config | sizes | {key: value for key, value, _ in REQUIRED[kind]}


def model_of_config(config: dict, where: Path) -> tuple[str, Model]:
    """(architecture, model) of a config.json. Raises ConfigError where ours would compute something else."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CLASSES:
        raise ConfigError(f"{where}: model_type is {kind!r}; {', '.join(CLASSES)} can be imported")
    for key, value, may_be_absent in REQUIRED[kind]:
        found = config.get(key, value if may_be_absent else None)
        if (found or value) != value if isinstance(value, list) else found != value:
            raise ConfigError(f"{where}: {key} is {found!r}; this trainer's models have {value!r}, others cannot be imported")
    fields = dict(IMPLIED[kind])
    for name, key in CONFIG_NAMES[kind].items():
        fields[name] = config.get(key, config.get(ALIASES.get(key)))
        if name == "head_dim" and fields[name] is None:
            fields[name] = fields["width"] // max(fields["heads"], 1)
        if fields[name] is None:
            raise ConfigError(f"{where}: has no {key}; give a directory that was written whole")
        check_type(fields[name], Model.__annotations__[name], key, where)
    if kind != "nano1t":
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        check_type(rope, dict, "rope_parameters", where)
        fields["rope_theta"] = rope.get("rope_theta", config.get("rope_theta"))
        part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.5 if kind == "glm4_moe" else 1.0))
        check_type(part, float, "partial_rotary_factor", where)
        if fields["rope_theta"] is None or rope.get("rope_type", rope.get("type", "default")) != "default" or part != 1.0:
            raise ConfigError(f"{where}: RoPE is {rope or 'not given'}, on {part:g} of each head; only plain RoPE on whole heads "
                              "can be imported")
        check_type(fields["rope_theta"], float, "rope_theta", where)
    try:
        return kind, model_of("debug", **fields)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def check_type(value, kind: type, key: str, where: Path):
    """Raises ConfigError where a value of a config.json is of another type; a whole number may stand for a float."""
    said = {int: "a whole number", float: "a finite number above 0", str: "a string", dict: "an object"}[kind]
    fits = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
    if not fits or kind is float and not 0 < value < math.inf:
        raise ConfigError(f"{where}: {key} is {value!r}, where {said} belongs; correct it, or copy the directory again")


# ------------------------------------------------------------------------------------------------------------------
# Files
# ------------------------------------------------------------------------------------------------------------------

TYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


class Progress:
    """How far something is, on stderr: a line that is written over; where that is no terminal, a line every ten seconds."""

    def __init__(self, what: str, total: int):
        self.what, self.total, self.done, self.live = what, max(total, 1), 0, sys.stderr.isatty()
        self.due = time.monotonic() + (0 if self.live else 10)

    def add(self, count: int):
        self.done += count
        ended = self.live and self.done >= self.total
        if time.monotonic() < self.due and not ended:
            return
        self.due = time.monotonic() + (0.2 if self.live else 10)
        percent = min(100, self.done * 100 // self.total)
        print(f"{chr(13) if self.live else ''}{self.what} [{'#' * (percent // 4):<25}] {percent:3}% of {self.total / 1e9:.2f} GB",
              end="" if self.live and not ended else "\n", file=sys.stderr, flush=True)


@contextlib.contextmanager
def new_directory(final: Path, setting: str, needed: int) -> Iterator[Path]:
    """A temporary directory beside `final`, which becomes `final` if nothing fails and goes away if something does.

    needed: bytes that it will take. Raises ConfigError if `final` exists, or where it cannot be written."""
    if final.exists():
        raise ConfigError(f"{setting}: {final} exists; remove it, or write to another place")
    tmp = final.with_name(f".{final.name}.tmp")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(tmp, ignore_errors=True)  # what a killed one has left
        tmp.mkdir()
        if (free := shutil.disk_usage(tmp).free) < needed:
            raise ConfigError(f"{setting}: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} are free; free some, or write to "
                              "another place")
        yield tmp
        checkpoint.sync(tmp)
        tmp.rename(final)
        checkpoint.sync(final.parent)
    except OSError as error:
        raise ConfigError(f"{setting}: not written, {error.filename or tmp}: {error.strerror or error}; free space or write to "
                          "another place, then start again") from None
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def write_safetensors(path: Path, entries: list[tuple[str, torch.dtype, tuple[int, ...]]], parts: Iterable[Tensor],
                      progress: Progress) -> str:
    """Writes and syncs a file of these tensors (name, dtype, shape); returns its SHA-256.

    parts: their values in order, each a tensor or a run of one: they need not be there all at once."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape in entries:
        assert at % dtype.itemsize == 0, f"{name} would not be aligned"
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, written = hashlib.sha256(), 0
    with open(path, "wb") as f:
        for raw in itertools.chain([len(text).to_bytes(8, "little") + text], map(raw_bytes, parts)):
            f.write(raw)
            digest.update(raw)
            written += len(raw)
            progress.add(len(raw))
        f.flush()
        os.fsync(f.fileno())
    assert written == 8 + len(text) + at, f"{path}: {written} bytes were written, {8 + len(text) + at} are announced"
    return digest.hexdigest()


def raw_bytes(x: Tensor) -> memoryview:
    return memoryview(x.contiguous().view(-1).view(torch.uint8).numpy())


# ------------------------------------------------------------------------------------------------------------------
# Export
# ------------------------------------------------------------------------------------------------------------------


OPEN_OWNERS = 32  # saved ranks whose files are open at a time; each file keeps the piece that was read last


class Masters:
    """The parameters of a checkpoint, read one at a time, whatever grid wrote them; every piece is compared with its checksum.

    Raises checkpoint.Damaged where a file is missing or of another size, and `read` where its values are not as written."""

    def __init__(self, path: Path):
        self.path, self.manifest = path, checkpoint.read_manifest(path)
        self.m = checkpoint.model_of(self.manifest)
        _, N, E = self.manifest["grid"]
        self.open = lru_cache(OPEN_OWNERS)(partial(checkpoint.open_owner, path, self.manifest))
        self.runs: dict[str, list] = {}  # parameter -> where its values are: (start, stop, saved rank, tensor, at)
        grids = [make_grid(rank, N * E, E, 1, self.m, connect=False) for rank in range(N * E)]
        buckets = make_buckets(self.m, grids[0])  # the same for all ranks
        for rank, grid in enumerate(grids):
            self.open(rank)  # what is missing shows before anything is written
            for name, bucket in buckets.items():
                for p in pieces(bucket, self.m, grid):
                    self.runs.setdefault(p.name, []).append((p.start, p.stop, rank, f"{name}/master", p.at))
        self.bias_LX = torch.empty(self.m.layers, self.m.experts)
        self.fill(self.bias_LX.view(-1), 0, "bias_LX", 0)

    def fill(self, target: Tensor, rank: int, tensor: str, at: int):
        """Values from `at` on of a tensor that a saved rank or one of its replicas wrote."""
        checkpoint.holder(tensor, self.open(rank)).read(tensor, at, target)

    def read(self, name: str) -> Tensor:
        """A parameter, flat and fp32; layers.<i>.bias is a row of the selection bias."""
        if name.endswith(".bias"):
            return self.bias_LX[int(name.split(".")[1])]
        values = torch.empty(max(stop for _, stop, *_ in self.runs[name]))
        for start, stop, rank, tensor, at in self.runs[name]:
            self.fill(values[start:stop], rank, tensor, at)
        return values


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """fp32 for what training keeps exact, too: norms, router, selection bias."""
    short = name.rsplit(".", 1)[-1]
    return torch.float32 if short == "bias" or OWNERSHIP[short].dtype == "fp32" else dtype


def plan_shards(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, limit: float) -> list[list[str]]:
    """Names by file: in order, as many as fit into `limit` bytes, but at least one."""
    shards, size = [[]], 0
    for name, shape in shapes.items():
        n_bytes = math.prod(shape) * stored_dtype(name, dtype).itemsize
        if shards[-1] and size + n_bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += n_bytes
    return shards


def export_checkpoint(path: Path, out: Path, tokenizer: bytes, dtype: str = "bfloat16", architecture: str = "auto",
                      shard_gb: float = 5.0, setting: str = "--out") -> str:
    """Writes a checkpoint as a directory that `transformers` loads; returns the architecture.

    tokenizer: a serialized SentencePiece model. Raises ConfigError where the architecture or the tokenizer does not fit, or
    the directory exists or cannot be written."""
    files = tokenizer_files(tokenizer)
    masters, wide = Masters(path), getattr(torch, dtype)
    m, tok = masters.m, sentencepiece.SentencePieceProcessor(model_proto=tokenizer)
    eos = tok.eos_id()
    no_text = [i for i in range(m.vocab) if i != eos and (i >= tok.vocab_size() or tok.is_control(i) or tok.is_unknown(i))]
    kind = choose_architecture(architecture, m, bool(masters.bias_LX.any()))
    shapes = tensor_shapes(m, kind)
    size = sum(math.prod(shape) * stored_dtype(name, wide).itemsize for name, shape in shapes.items())
    shards, where, sums = plan_shards(shapes, wide, shard_gb * 1e9), {}, {}
    with new_directory(out, setting, size) as tmp:
        progress = Progress("writing", size)
        for i, names in enumerate(shards):
            file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
            entries = [(their_name(name, kind), stored_dtype(name, wide), shapes[name]) for name in names]
            values = (masters.read(name).to(stored_dtype(name, wide)) for name in names)
            sums[file] = write_safetensors(tmp / file, entries, values, progress)
            where |= {name: file for name, *_ in entries}
        if len(shards) > 1:
            index = {"metadata": {"total_size": size}, "weight_map": where}
            files["model.safetensors.index.json"] = json.dumps(index, indent=1, sort_keys=True)
        files["config.json"] = json.dumps(config_of(m, kind, eos, dtype), indent=1)
        generation = {"eos_token_id": eos, "pad_token_id": eos, "suppress_tokens": no_text}
        files["generation_config.json"] = json.dumps(generation, indent=1)
        if kind == "nano1t":
            files[OWN_CODE.name] = OWN_CODE.read_text()
        for name, content in files.items():
            write_synced(tmp / name, content.encode() if isinstance(content, str) else content)
            sums[name] = file_sha256(tmp / name)
        lines = "".join(f"{digest}  {name}\n" for name, digest in sums.items())
        write_synced(tmp / "SHA256SUMS", lines.encode())  # for sha256sum -c
    return kind


def run_tokenizer(manifest: dict, moved_data: str, moved_tokenizer: str, path: Path) -> bytes:
    """The SentencePiece model of the run that wrote a checkpoint, from its first stage's prepared data, rebuilt where they are
    missing; later stages have the same.

    Raises ConfigError where those are not the run's."""
    s = manifest["settings"]
    source, tokenizer = moved_data or s.get("data", "embedded"), moved_tokenizer or s.get("tokenizer", "")
    if manifest["fingerprint"] is None:  # imported, and not trained since
        data.check_data(source, tokenizer)
        if not tokenizer:
            raise ConfigError(f"--tokenizer=: {path} was imported without one; give the SentencePiece model that it was trained "
                              "with")
        return Path(tokenizer).read_bytes()
    if not (moved_data or moved_tokenizer) and (found := data.find(manifest["fingerprint"])):  # its text may be gone
        return (found / "tokenizer.model").read_bytes()
    data.check_data(source, tokenizer)
    prepared = data.prepare(source, s["vocab"], s["seq_len"], s["seed"], tokenizer,
                            log=lambda line: print(line, file=sys.stderr), packing=s["packing"])
    if data.Blend(prepared).fingerprint != manifest["fingerprint"]:
        raise ConfigError(f"--data={source}: not what {path} was trained on, so its tokenizer may be another; restore "
                          "those files, or give their place with --data=PATH and --tokenizer=PATH")
    return (prepared / "tokenizer.model").read_bytes()


def export(argv: list[str]) -> int:
    s = train.parse(argv, ExportSettings)
    if s.dtype not in ("bfloat16", "float32"):
        raise ConfigError(f"--dtype={s.dtype}: use bfloat16 or float32")
    if s.shard_gb <= 0:
        raise ConfigError(f"--shard_gb={s.shard_gb:g}: must be above 0, in 1e9 bytes, e.g. 5")
    path = checkpoint.find(s.run, s.step, s.checkpoint)
    out = Path(s.out) if s.out else path.resolve().parent.parent / "export" / path.name
    if out.exists():
        raise ConfigError(f"--out={out}: exists; remove it, or write to another place with --out=DIR")
    tokenizer = run_tokenizer(checkpoint.read_manifest(path), s.data, s.tokenizer, path)
    kind = export_checkpoint(path, out, tokenizer, s.dtype, s.architecture, s.shard_gb, f"--out={out}")
    call = f"from_pretrained({str(out)!r}{', trust_remote_code=True' if kind == 'nano1t' else ''})"
    print(f"{path} -> {out}: {CLASSES[kind]}, {s.dtype}\nload it with AutoModelForCausalLM.{call} and AutoTokenizer.{call}")
    return launch.EXIT_OK


# ------------------------------------------------------------------------------------------------------------------
# Tokenizer: a SentencePiece model as the files of Hugging Face's `tokenizers`
# ------------------------------------------------------------------------------------------------------------------

def tokenizer_files(model: bytes) -> dict[str, str | bytes]:
    """File name -> content. The ids are those of tokenizer.encode for every text. Raises ConfigError for a kind of model that
    cannot be written so.

    SentencePiece merges the neighbours whose union has the best score, the leftmost first; `tokenizers` merges by a ranked
    list of pairs. So each piece gives all its splits, at its score's rank. Pieces hold spaces as spaces and not as U+2581,
    which lets a U+2581 in the text fall back to its bytes, as tokenizer.encode has it. Control pieces in the text stay
    text (split_special_tokens)."""
    tok = load_model(model, "the run's tokenizer")
    check_kind(model_settings(model))
    found = [piece_of(value) for field, value in wire(model) if field == 1]
    texts = [text.replace(SPACE, " ") if kind in (NORMAL, USER_DEFINED) else text for text, _, kind in found]
    best_first = sorted((-score, i) for i, (_, score, kind) in enumerate(found) if kind == NORMAL)
    normal = {texts[i] for _, i in best_first}
    merges = [[texts[i][:cut], texts[i][cut:]] for _, i in best_first for cut in range(1, len(texts[i]))
              if texts[i][:cut] in normal and texts[i][cut:] in normal]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": i, "content": texts[i], "special": kind != USER_DEFINED, **plain}
             for i, (_, _, kind) in enumerate(found) if kind in (UNKNOWN, CONTROL, USER_DEFINED)]
    prefix = tok.encode("a", out_type=str)[0].startswith(SPACE)
    exact = not prefix and all(tok.is_byte(tok.piece_to_id(f"<0x{b:02X}>")) for b in SPACE.encode())
    before = [{"type": "Prepend", "prepend": " "}] if prefix else []
    before += [] if exact else [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    after = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    after += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    unk, eos = tok.id_to_piece(tok.unk_id()), tok.id_to_piece(tok.eos_id())
    fast = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "normalizer": {"type": "Sequence", "normalizers": before} if before else None,
            "pre_tokenizer": None, "post_processor": None, "decoder": {"type": "Sequence", "decoders": after},
            "model": {"type": "BPE", "dropout": None, "unk_token": unk, "fuse_unk": True, "ignore_merges": False,
                      "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "byte_fallback": any(kind == BYTE for _, _, kind in found),
                      "vocab": {text: i for i, text in enumerate(texts)}, "merges": merges}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": unk, "eos_token": eos, "pad_token": eos,
              "bos_token": None, "split_special_tokens": True, "clean_up_tokenization_spaces": False,
              "model_max_length": int(1e30)}
    return {"tokenizer.json": json.dumps(fast, ensure_ascii=False), "tokenizer_config.json": json.dumps(config, indent=1),
            "tokenizer.model": model}


def piece_of(message: bytes) -> tuple[str, float, int]:
    """(text, score, type)."""
    fields = dict(wire(message))
    score = float(np.frombuffer(fields.get(2, bytes(4)), "<f4")[0])
    return fields[1].decode(), score, int.from_bytes(fields.get(3, bytes([NORMAL])), "little")


def check_kind(s: dict):
    """Raises ConfigError for a SentencePiece model (tokenizer.model_settings) whose encoding `tokenizers` would not repeat."""
    kinds = {kind for _, kind in s["pieces"]}
    problems = {"it is not a BPE model": s["type"] != BPE,
                "spaces are at the end of its pieces": s["as_suffix"],
                "it normalises the text": s["charsmap"],
                "it removes spaces": s["squeeze"],
                "it keeps spaces unescaped": not s["escape"],
                "it puts a space before the text and has user-defined pieces": s["dummy_prefix"] and USER_DEFINED in kinds,
                "it has unused pieces": kinds - {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE}}
    if reasons := [reason for reason, holds in problems.items() if holds]:
        raise ConfigError(f"the run's tokenizer cannot be exported: {'; '.join(reasons)}. The ids would differ; tokenizers that "
                          "train.py trains, and other BPE models with identity normalisation, can")


# ------------------------------------------------------------------------------------------------------------------
# Import
# ------------------------------------------------------------------------------------------------------------------


class Directory:
    """A model as Hugging Face libraries write it, read slice by slice. Raises ConfigError where a tensor is missing, surplus or
    of another shape than config.json says, or a file is damaged."""

    def __init__(self, path: Path):
        self.path = path
        self.kind, self.m = model_of_config(self.read_json(path / "config.json"), path / "config.json")
        if (path / "model.safetensors.index.json").is_file():
            index = path / "model.safetensors.index.json"
            self.where = self.read_json(index).get("weight_map", {})
            if not isinstance(self.where, dict) or not all(isinstance(file, str) for file in self.where.values()):
                raise ConfigError(f"{index}: its weight_map does not give each tensor the name of a file; copy it again")
        else:
            self.where = dict.fromkeys(self.open("model.safetensors").keys(), "model.safetensors")
        self.files = {name: self.open(name) for name in sorted(set(self.where.values()))}
        self.check_tensors()

    def read_json(self, file: Path) -> dict:
        try:
            found = json.loads(file.read_text())
            if not isinstance(found, dict):
                raise ValueError("it holds no object")
            return found
        except FileNotFoundError:
            raise ConfigError(f"--source={self.path}: has no {file.name}; give a directory with config.json and .safetensors "
                              "files") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from None

    def open(self, name: str):
        try:
            return safe_open(self.path / Path(name).name, "pt")
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self.path / name} is missing or damaged: {error}") from None

    def check_tensors(self):
        names_in = {file: set(opened.keys()) for file, opened in self.files.items()}
        there = set().union(*names_in.values())
        expected = {their_name(name, self.kind): shape for name, shape in tensor_shapes(self.m, self.kind).items()}
        for what, names in (("lacks", expected.keys() - (there & self.where.keys())),
                            ("has, beyond its config.json,", there - expected.keys())):
            if names:
                some = ", ".join(sorted(names)[:3]) + (" ..." if len(names) > 3 else "")
                raise ConfigError(f"{self.path} {what} {len(names)} tensors: {some}")
        for name, shape in expected.items():
            if name not in names_in[self.where[name]]:
                raise ConfigError(f"{self.path}: {name} is not in {self.where[name]}, where model.safetensors.index.json has it; "
                                  "copy the index again")
            found = self.files[self.where[name]].get_slice(name)
            if tuple(found.get_shape()) != shape:
                raise ConfigError(f"{self.path}: {name} is {list(found.get_shape())}, its config.json says {list(shape)}")
            if found.get_dtype() not in ("F32", "BF16", "F16"):
                raise ConfigError(f"{self.path}: {name} is {found.get_dtype()}; only F32, BF16 and F16 are read, convert it")

    def verify(self) -> str:
        """Compares every file that SHA256SUMS lists; returns what is unchecked of the files that are read here, "" where nothing
        is. Raises ConfigError for a damaged file."""
        if not (self.path / "SHA256SUMS").is_file():
            return "no SHA256SUMS, so its bytes were not checked"
        listed = self.read_sums(self.path / "SHA256SUMS")
        sizes = {name: (self.path / name).stat().st_size if (self.path / name).is_file() else 0 for name in listed}
        progress = Progress("checking", sum(sizes.values()))
        for name, digest in listed.items():
            if not (self.path / name).is_file() or file_sha256(self.path / name) != digest:
                raise ConfigError(f"{self.path / name} is missing or damaged (its checksum is not the one in SHA256SUMS); copy "
                                  "it again")
            progress.add(sizes[name])
        others = [name for name in ("model.safetensors.index.json", "tokenizer.model") if (self.path / name).is_file()]
        unlisted = sorted({"config.json", *others, *(Path(name).name for name in self.files)} - listed.keys())
        return f"SHA256SUMS does not list {', '.join(unlisted)}, so their bytes were not checked" if unlisted else ""

    def read_sums(self, file: Path) -> dict[str, str]:
        """Digest by file name. Raises ConfigError for a line that is not as sha256sum writes it."""
        found = {}
        try:
            lines = file.read_text().splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from None
        for number, line in enumerate(lines, 1):
            if not (parts := re.fullmatch(r"([0-9a-fA-F]{64}) [ *](.+)", line)):  # *: sha256sum --binary
                raise ConfigError(f"{file}: line {number} is not a checksum, two spaces and a file name; delete the line, or "
                                  "write the file anew with sha256sum")
            found[os.path.normpath(parts[2])] = parts[1].lower()
        return found

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Values start..stop of a parameter of ours, flattened: fp32. Reads the rows that hold them."""
        theirs = their_name(name, self.kind)
        tensor = self.files[self.where[theirs]].get_slice(theirs)
        per_row = math.prod(tensor.get_shape()[1:])
        first = start // per_row
        rows = tensor[first : -(-stop // per_row)].float().flatten()
        return rows[start - first * per_row : stop - first * per_row]


RANK_FILE_BYTES = 16e9  # of an imported checkpoint, about: files that many ranks can read and check side by side


def import_directory(source: Directory, final: Path, optimizer: str, setting: str):
    """Writes a run with a checkpoint of step 0: the directory's weights as masters, moments of zero.

    It is what `expert-parallel by columns` ranks would have written (grid 1 x N x 1), so any grid loads it."""
    m = source.m
    buckets = make_buckets(m, make_grid(0, 1, 1, 1, m, connect=False)).values()
    size = 4 * sum(math.prod(b.owned) * (1 + len(optim.MOMENTS[optim.kind_of(b, optimizer)])) for b in buckets)
    ranks = next((n for n in range(1, m.experts + 1) if m.experts % n == 0 and size / n <= RANK_FILE_BYTES), m.experts)
    with new_directory(final, setting, size) as tmp:
        step = tmp / "ckpt" / ".tmp-step-00000000"
        step.mkdir(parents=True)
        progress, files = Progress("writing", size), {}
        for rank in range(ranks):
            path = checkpoint.rank_file(step, rank)
            files[path.name] = write_rank_file(source, path, rank, ranks, optimizer, progress) | {"owner": rank}
        settings = {name: getattr(m, name) for name in train.MODEL_FIELDS} | {"run": final.name, "optimizer": optimizer}
        if (source.path / "tokenizer.model").is_file():
            write_synced(tmp / "tokenizer.model", (source.path / "tokenizer.model").read_bytes())
            settings["tokenizer"] = str(final / "tokenizer.model")
        manifest = {"step": 0, "grid": [1, ranks, 1], "settings": settings, "model": asdict(m), "fingerprint": None,
                    "imported": str(source.path.resolve()), "files": files}
        checkpoint.publish(checkpoint.directory(step.parent, 0), step, manifest)


def write_rank_file(source: Directory, path: Path, rank: int, ranks: int, optimizer: str, progress: Progress) -> dict:
    """The masters that this rank would own, and moments of zero; returns the file's entry in the manifest."""
    m, shapes, values = source.m, {}, {}
    grid = make_grid(rank, ranks, 1, 1, m, connect=False)

    def masters(bucket) -> Iterator[Tensor]:
        end = 0
        for p in pieces(bucket, m, grid):  # one behind the other
            yield source.read(p.name, p.start, p.stop)
            end = p.at + p.stop - p.start
        yield from zeros(math.prod(bucket.owned) - end)  # padding

    for name, bucket in make_buckets(m, grid).items():
        count = math.prod(bucket.owned)
        kinds = optim.MOMENTS[optim.kind_of(bucket, optimizer)]
        shapes |= {f"{name}/{kind}": count for kind in ("master", *kinds)}
        values |= {f"{name}/master": masters(bucket), **{f"{name}/{kind}": zeros(count) for kind in kinds}}
    if rank == 0:  # as in training
        shapes["bias_LX"] = m.layers * m.experts
        values["bias_LX"] = [source.read(f"layers.{i}.bias", 0, m.experts) if "bias" in ROUTER_NAMES[source.kind] else
                             torch.zeros(m.experts) for i in range(m.layers)]
    file = checkpoint.RankFileWriter(path, shapes)
    try:
        for name, parts in values.items():
            for part in parts:
                file.add(name, part.numpy().view(np.uint8))
                progress.add(part.nbytes)
            assert file.at[name] == 4 * shapes[name], f"{name}: {file.at[name]} bytes were written"
        return file.finish()
    finally:
        file.close()


ZEROS = 1 << 22  # values written at a time


def zeros(count: int) -> Iterator[Tensor]:
    """So many zeros, some at a time."""
    some = torch.zeros(min(count, ZEROS))
    for start in range(0, count, ZEROS):
        yield some[: count - start]


def flags_of(m: Model) -> list[str]:
    """The settings of train.py that make this model, from the size that needs the fewest."""
    def changed(size: str) -> list[str]:
        return [f"--{name}={getattr(m, name)}" for name in train.MODEL_FIELDS
                if getattr(m, name) != getattr(SIZES[size], name)]

    size = min(SIZES, key=lambda size: len(changed(size)))
    return [f"--size={size}", *changed(size)]


def import_(argv: list[str]) -> int:
    s = train.parse(argv, ImportSettings)
    if not s.source or not s.run or s.run != Path(s.run).name or s.run.startswith("."):
        raise ConfigError(f"--source={s.source} --run={s.run}: give the directory to read, and a plain name for out/<run>")
    if s.optimizer not in optim.OPTIMIZERS:
        raise ConfigError(f"--optimizer={s.optimizer}: unknown; use one of {', '.join(optim.OPTIMIZERS)}")
    source, final = Directory(Path(s.source)), Path("out") / s.run
    if final.exists():
        raise ConfigError(f"--run={s.run}: {final} exists; use another name")
    if s.seq_len:
        source.m = dataclasses.replace(source.m, seq_len=s.seq_len)
    unchecked = source.verify()
    import_directory(source, final, s.optimizer, f"--run={s.run}")
    has_tokenizer = (final / "tokenizer.model").is_file()
    flags = [f"--run={s.run}", f"--optimizer={s.optimizer}", *flags_of(source.m)]
    flags += [f"--tokenizer={final / 'tokenizer.model'}"] if has_tokenizer else ["--tokenizer=..."]
    print(f"{s.source} ({CLASSES[source.kind]}{unchecked and f'; {unchecked}'}) -> {final}\n"
          + ("" if has_tokenizer else "it has no tokenizer.model: give the SentencePiece model that it was trained with\n")
          + f"go on with: python train.py {shlex.join(flags)} --data=...")
    return launch.EXIT_OK


def check(argv: list[str]) -> int:
    s = train.parse(argv, CheckSettings)
    if not s.source:
        raise ConfigError("--source=: give the directory to check")
    source = Directory(Path(s.source))
    checked = source.verify() or "every file has its checksum"
    print(f"{s.source}: {CLASSES[source.kind]}, {len(source.where):,} tensors in {len(source.files)} files as config.json says; "
          f"{checked}")
    return launch.EXIT_OK


def show_help(doc: str, settings: dict[str, type], argv: list[str]) -> int:
    """Prints a program's docstring and the settings, with defaults, of the command in argv, or of all commands."""
    print(doc)
    for command in argv[:1] if argv[0] in settings else settings:
        print(f"{command}:\n" + "\n".join(f"  --{f.name}={f.default}" for f in dataclasses.fields(settings[command])))
    return launch.EXIT_OK


COMMANDS: dict[str, Callable[[list[str]], int]] = {"export": export, "import": import_, "check": check}
SETTINGS = {"export": ExportSettings, "import": ImportSettings, "check": CheckSettings}


def main(argv: list[str]) -> int:
    if "--help" in argv:
        return show_help(__doc__, SETTINGS, argv)
    if not argv or argv[0] not in COMMANDS:
        given = repr(argv[0]) if argv else "no command"
        raise ConfigError(f"{given}: write `export.py export`, `import` or `check`, then settings as --name=value")
    return COMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    sys.exit(launch.run(main))
