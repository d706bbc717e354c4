"""What a checkpoint has learnt: held-out loss beside count-based tables, and text.

    make eval   ARGS="--run=debug"              the newest checkpoint of out/debug; python eval.py loss --run=debug
    make eval   ARGS="--tasks=out/debug/tasks"  also lm-eval, offline, on the task files in a directory, or on tasks by name
    make sample ARGS="--prompt='Return a'"      python eval.py sample --prompt='Return a' --temperature=0.7
    python eval.py task --run=debug             writes an example: out/debug/tasks, which continuation is the true one
    python eval.py harness --model=DIR --tasks=DIR_OR_NAMES     lm-eval on any Hugging Face directory
    python launch.py -- eval.py loss            on several ranks; any grid reads any checkpoint

`loss` measures all held-out rows, next to what needs no network: tables of single tokens and of token pairs, counted
in the very rows that the checkpoint was trained on. Nats per token depend on the tokenizer, bits per byte do not.
`loss` also appends an object to out/<run>/evals.jsonl, and to wandb where the run does. Tasks are measured through an
export (export.py), so what is scored is what others will load. The other commands run on one rank.

The pair table is Jelinek-Mercer interpolation, p(t | c) = a n(c,t) / n(c) + b n(t) / N + g / V, with weights a, b, g
that depend on n(c) (Jelinek and Mercer 1980). They are set by EM on rows that the counts leave out.
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# Threads that spin while they wait for a busy core make small products up to 100 times slower; read by torch's import.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from torch import Tensor

import checkpoint
import data
import export
import launch
import tokenizer
import train
from model import ConfigError, Model, Segments, block, embed_tokens, rms_norm, rope_cache, uses_rope
from order import Order
from parallel import Grid, State, Transport, exchange, gather, layer_buckets, make_buckets, make_grid


@dataclass
class Settings:
    run: str = "debug"  # name of the directory out/<run>
    step: int = 0  # of the checkpoint; 0: the newest
    checkpoint: str = ""  # a checkpoint's directory, instead of run and step
    data: str = ""  # where the run's data are now, if they have moved; empty: where the run found them
    tokenizer: str = ""  # the same for its tokenizer
    dtype: str = "auto"  # auto (bfloat16 on accelerators, else float32) | float32 | bfloat16


@dataclass
class LossSettings(Settings):
    rows: int = 0  # held-out rows that are measured: the first ones; 0: all
    fit_tokens: int = 1 << 25  # the tables count at most so many of the tokens seen (8 bytes each, and again to sort)
    replicas: int = 1  # with many ranks: copies of the sharded model
    tasks: str = ""  # for lm-eval: a directory of task files, or names with commas; empty: none
    limit: int = 0  # questions of a task, the first ones; 0: all
    batch: int = 16  # answers that lm-eval scores at a time
    wandb: str = "auto"  # auto: as the run did | off


@dataclass
class HarnessSettings:
    model: str = ""  # a directory with config.json, weights and tokenizer
    tasks: str = ""  # a directory of task files, or names with commas
    limit: int = 0  # questions of a task, the first ones; 0: all
    batch: int = 16  # answers that are scored at a time
    dtype: str = "auto"  # auto: the directory's | float32 | bfloat16
    out: str = ""  # a file for the scores, as JSON; empty: print them


@dataclass
class TaskSettings(Settings):
    out: str = ""  # directory to write; empty: out/<run>/tasks
    questions: int = 400  # at most; there may be fewer in the held-out documents
    choices: int = 4  # continuations of a question, one of them true
    context: int = 64  # tokens of a passage that are shown
    length: int = 16  # tokens of a continuation
    seed: int = 0


@dataclass
class SampleSettings(Settings):
    prompt: str = "Return the"  # no space at the end: pieces carry theirs at the front
    prompts: str = ""  # a file with one prompt per line, or .jsonl with strings or {"prompt": "..."}; instead of prompt
    samples: int = 3  # of each prompt
    tokens: int = 200  # at most, per sample; it ends before where the document does
    temperature: float = 0.8  # 0: the likeliest token each time
    greedy: bool = False  # the same as --temperature=0
    top_p: float = 0.95  # draw from the likeliest tokens that together have this probability
    seed: int = 0


# ------------------------------------------------------------------------------------------------------------------
# A checkpoint, its model and its data
# ------------------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    path: Path  # the checkpoint
    manifest: dict
    hp: train.Hyperparameters  # as the run was trained, but with this call's data, tokenizer and dtype
    m: Model


def open_run(s: Settings, device: torch.device) -> Run:
    path = checkpoint.find(s.run, s.step, s.checkpoint)
    manifest = checkpoint.read_manifest(path)
    known = {f.name for f in dataclasses.fields(train.Hyperparameters)}
    hp = train.Hyperparameters(**{k: v for k, v in manifest["settings"].items() if k in known})
    hp = dataclasses.replace(hp, data=s.data or hp.data, tokenizer=s.tokenizer or hp.tokenizer,
                             dtype=train.resolve_dtype(s.dtype, device))
    if s.data or s.tokenizer:
        train.declared(hp, [])
    return Run(path, manifest, hp, checkpoint.model_of(manifest))


class Seen(NamedTuple):
    """The run's prepared data, and the order in which it saw them."""

    blends: list[data.Blend]  # of each stage
    order: Order
    step: int

    @property
    def blend(self) -> data.Blend:
        """Of the last step's stage."""
        return self.blends[self.order.leg(max(self.step - 1, 0)).stage]


def open_data(run: Run, grid: Grid, device: torch.device) -> Seen:
    """The run's prepared data, rebuilt from their text where they are missing. Raises ConfigError where that is not the run's."""
    hp, manifest = run.hp, run.manifest
    imported = manifest["fingerprint"] is None  # and not trained since: any data will do
    stages = train.declared(hp, []) if imported else [train.Stage(**values) for values in manifest["declared"]]
    was = manifest["settings"].get("data", hp.data)  # they may have moved
    stages = [dataclasses.replace(s, data=hp.data if s.data == was else s.data) for s in stages]
    found = [] if imported or hp.data != was else [data.find(pinned["fingerprint"]) for pinned in manifest["stages"]]
    at_hand = exchange([bool(found) and all(found)], grid, device).all()  # the text itself may have changed, or be gone
    blends = [data.Blend(path) for path in found] if at_hand else train.prepare_stages(
        hp, stages, grid, device, log=lambda line: print(line, file=sys.stderr, flush=True))
    for stage, blend, pinned in zip(stages, blends, [] if imported else manifest["stages"]):
        if blend.fingerprint != pinned["fingerprint"]:
            hint = ("the embedded corpus is read from the installed Python and packages: use the environment of the run"
                    if stage.data == "embedded" else "restore those files or the directory in data/ that was made of them, or give their "
                    "place with --data=PATH")
            raise ConfigError(f"--data={stage.data}: not what {run.path} was trained on (fingerprint "
                              f"{blend.fingerprint[:12]}, the checkpoint's is {pinned['fingerprint'][:12]}); {hint}")
    rows_per_step = [[0, 1]] if imported else manifest["rows_per_step"]
    order = Order([b.stage(s.from_step) for s, b in zip(stages, blends)], rows_per_step, hp.seed, hp.balance)
    return Seen(blends, order, manifest["step"])


def as_trained(run: Run) -> Transport:
    """How the run's weights travel, so that fp8 is measured where it was trained with; without what a step would refresh."""
    return train.transport_of(run.hp)._replace(dense="layer", node_reshard=False)


def load_state(run: Run, grid: Grid, device: torch.device) -> State:
    """Masters and routing bias, without the optimizer's moments."""
    buckets = make_buckets(run.m, grid)
    master = {name: torch.zeros(bucket.owned, device=device) for name, bucket in buckets.items()}
    bias_LX = torch.zeros(run.m.layers, run.m.experts, device=device)
    state = State(buckets, master, {name: {} for name in buckets}, bias_LX)
    checkpoint.load(run.path, state, grid, run.m)
    return state


# ------------------------------------------------------------------------------------------------------------------
# Tables of counts. A pair is one int64 key, context * V + target, so that V^2 is never stored.
# ------------------------------------------------------------------------------------------------------------------

BUCKETS = 20  # of n(c), for the weights
LEFT_OUT = 10  # one in so many rows is left out of the counts while the weights are set
EM_ROUNDS = 100


class Counts(NamedTuple):
    vocab: int
    keys: np.ndarray  # int64, ascending: the pairs that occurred ...
    times: np.ndarray  # int64: ... and how often
    context_V: np.ndarray  # int64: n(c)
    target_V: np.ndarray  # int64: n(t)


class Table(NamedTuple):
    counts: Counts
    edges: np.ndarray  # int64, ascending: where the next bucket of n(c) begins; bucket 0 is n(c) = 0
    weights_B3: np.ndarray  # of the pair's, the target's and the uniform probability, fp64; rows sum to 1


def pair_keys(rows: data.Rows, ids) -> np.ndarray:
    """Keys of all (token, target) pairs of these rows, in order; tokens without a target make none."""
    found = [np.empty(0, np.int64)]
    for r in ids:
        row = rows[int(r)]
        has_target = row.targets_S >= 0
        found.append(row.tokens_S[has_target] * rows.vocab + row.targets_S[has_target])
    return np.concatenate(found)


def count_pairs(keys: np.ndarray, vocab: int) -> Counts:
    distinct, times = np.unique(keys, return_counts=True)

    def add_up(ids):
        return np.bincount(ids, times, vocab).astype(np.int64)  # exact: below 2^53

    return Counts(vocab, distinct, times, add_up(distinct // vocab), add_up(distinct % vocab))


def parts(counts: Counts, keys: np.ndarray) -> np.ndarray:
    """fp64 [n, 3]: n(c,t) / n(c), n(t) / N and 1 / V of each pair; 0 where the divisor is."""
    at = np.searchsorted(counts.keys, keys)
    there = at < len(counts.keys)
    there[there] = counts.keys[at[there]] == keys[there]
    times = np.zeros(len(keys))
    times[there] = counts.times[at[there]]
    pair = times / np.maximum(counts.context_V[keys // counts.vocab], 1)
    target = counts.target_V[keys % counts.vocab] / max(counts.times.sum(), 1)
    return np.stack([pair, target, np.full(len(keys), 1 / counts.vocab)], 1)


def bucket_of(table: Table, contexts: np.ndarray) -> np.ndarray:
    """Row of the weights for each context. Of a table with one row, that row."""
    n = table.counts.context_V[contexts]
    bucket = np.where(n > 0, 1 + np.searchsorted(table.edges, n, "right"), 0)
    return np.minimum(bucket, len(table.weights_B3) - 1)


def probability(table: Table, keys: np.ndarray) -> np.ndarray:
    """p(target | context) of each pair, fp64, never 0."""
    return (parts(table.counts, keys) * table.weights_B3[bucket_of(table, keys // table.counts.vocab)]).sum(1)


def fit_weights(table: Table, keys: np.ndarray) -> Table:
    """The weights that make these pairs, which the table did not count, likeliest: EM, from the given ones.

    Those are also added as one pair per bucket. So a weight of 0 stays 0, and no other becomes 0."""
    prior, weights = table.weights_B3, table.weights_B3
    p_n3, bucket = parts(table.counts, keys), bucket_of(table, keys // table.counts.vocab)
    for _ in range(EM_ROUNDS):
        share = p_n3 * weights[bucket]
        share /= share.sum(1, keepdims=True)
        total = prior + np.stack([np.bincount(bucket, part, len(prior)) for part in share.T], 1)
        weights = total / total.sum(1, keepdims=True)
    return table._replace(weights_B3=weights)


def fit_tables(counted: np.ndarray, left_out: np.ndarray, vocab: int) -> dict[str, Table]:
    """The unigram and the bigram table: weights set on the pairs left out, which then are counted too."""
    counts = count_pairs(counted, vocab)
    seen = counts.context_V[left_out // vocab]
    seen = seen[seen > 0]
    # quantiles, so that each bucket has its share of the pairs that decide the weights
    ranks = np.linspace(0, 1, BUCKETS + 1)[1:-1]
    edges = np.unique(np.quantile(seen, ranks, method="higher")) if len(seen) else np.empty(0, np.int64)
    unseen, any_seen = np.array([0, 1, 1]) / 2, np.ones(3) / 3
    start = {"unigram": Table(counts, edges[:0], unseen[None]),
             "bigram": Table(counts, edges, np.stack([unseen] + [any_seen] * (len(edges) + 1)))}
    everything = count_pairs(np.concatenate([counted, left_out]), vocab)
    return {name: fit_weights(table, left_out)._replace(counts=everything) for name, table in start.items()}


def seen_rows(seen: Seen, fit_tokens: int) -> tuple[dict[tuple[int, int], np.ndarray], int]:
    """({(stage, corpus): numbers of rows, as often as they were seen}, tokens) of the first steps, as many as have fit_tokens;
    at least a row."""
    found: dict[tuple[int, int], list] = {}
    tokens = 0
    for step in range(seen.step):
        stage, corpus_R, row_R = seen.order.rows(step)
        length = seen.blends[stage].seq_len
        many = min(len(row_R), max((fit_tokens - tokens) // length, 0 if tokens else 1))
        for corpus in np.unique(corpus_R[:many]).tolist():
            found.setdefault((stage, corpus), []).append(row_R[:many][corpus_R[:many] == corpus])
        tokens += many * length
        if many < len(row_R):
            break
    return {key: np.concatenate(rows) for key, rows in found.items()}, tokens


def seen_pairs(seen: Seen, rows: dict[tuple[int, int], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of these rows of each stage and corpus, as often as they are named: (counted, left out).

    The rows left out are the last by number: documents lie in random order along the rows, and most end inside the
    block, whereas scattered rows would share theirs with counted neighbours."""
    counted, left_out = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for (stage, corpus), ids in rows.items():
        ids, source = np.sort(ids), seen.blends[stage].corpora[corpus]
        distinct = np.unique(ids)
        kept = max(1, len(distinct) * (LEFT_OUT - 1) // LEFT_OUT)
        cut = np.searchsorted(ids, distinct[kept - 1], "right")  # of a single row nothing is left out: equal weights then
        counted.append(pair_keys(source, ids[:cut]))
        left_out.append(pair_keys(source, ids[cut:]))
    return np.concatenate(counted), np.concatenate(left_out)


# ------------------------------------------------------------------------------------------------------------------
# loss
# ------------------------------------------------------------------------------------------------------------------


def bits_per_byte(nats: float, n_bytes: int) -> float:
    """From summed nats and the UTF-8 bytes of the tokens they were spent on."""
    return nats / math.log(2) / max(n_bytes, 1)


def loss(argv: list[str]) -> int:
    start = time.perf_counter()
    s = train.parse(argv, LossSettings)
    if s.tasks:
        check_tasks(s.tasks)
    if s.wandb not in ("auto", "off"):
        raise ConfigError(f"--wandb={s.wandb}: unknown; use auto or off")
    where = launch.place()
    run = open_run(s, where.device)
    launch.setup(where)
    grid = make_grid(where.rank, where.world, where.ranks_per_node, s.replicas, run.m)
    seen = open_data(run, grid, where.device)
    held_out = seen.blend.held_out
    state = load_state(run, grid, where.device)
    mean, targets = train.held_out_loss(held_out, s.rows, state, grid, run.m, as_trained(run), where.device)
    if where.rank == 0:
        keys = pair_keys(held_out, range(min(s.rows or len(held_out), len(held_out))))
        assert len(keys) == targets, f"{targets} targets were measured, the rows have {len(keys)}"
        result = compare(s, run, seen, mean, keys)
        result |= {"dtype": run.hp.dtype, "ranks": where.world, "seconds": round(time.perf_counter() - start, 1)}
        print_table(result)
        if s.tasks:
            del state  # the tasks' process loads the model again
            if where.device.type != "cpu":
                torch.accelerator.empty_cache()
            result["tasks"] = through_export(s, run, seen.blend.path)
            print_scores(result["tasks"])
        record(result, run, s.wandb)
    return launch.EXIT_OK


def record(result: dict, run: Run, wandb: str):
    """Appends a line to the run's evals.jsonl; the numbers go to wandb, too, if they go there during training."""
    folder = run.path.resolve().parent.parent
    try:
        with open(folder / "evals.jsonl", "a") as f:
            f.write(json.dumps(result) + "\n")
    except OSError as error:
        print(f"warning: {folder}/evals.jsonl cannot be written ({error.strerror}): this evaluation is kept nowhere", file=sys.stderr)
        return
    if wandb == "auto" and run.hp.wandb == "auto":
        numbers = {f"eval/{kind}/{name}": x for kind in ("nats", "bits_per_byte") for name, x in result[kind].items()}
        numbers |= {f"eval/{task}/{name}": x for task, scores in result.get("tasks", {}).items() for name, x in scores.items()}
        to = train.start_wandb(dataclasses.replace(run.hp, run=f"{run.hp.run}-eval"), folder)
        to.log(numbers, step=result["step"])
        to.finish()


def compare(s: LossSettings, run: Run, seen: Seen, mean: float, keys: np.ndarray) -> dict:
    """The model's mean loss beside the tables', as an object for evals.jsonl. keys: the held-out pairs."""
    blend, n_held_out = seen.blend, len(seen.blend.held_out)
    rows, fit_tokens = seen_rows(seen, s.fit_tokens)
    tables = fit_tables(*seen_pairs(seen, rows), blend.vocab) if rows else {}  # an imported model has seen nothing here yet
    n_bytes = int(tokenizer.token_bytes(tokenizer.load_tokenizer(blend.path))[keys % blend.vocab].sum())
    nats = {"model": mean}
    for name in reversed(tables):
        nats[name] = float(-np.log(probability(tables[name], keys)).sum() / max(len(keys), 1))
    nats["chance"] = math.log(blend.vocab)
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"), "checkpoint": str(run.path), "step": seen.step,
        "tokens": seen.order.tokens_before(seen.step), "fit_tokens": fit_tokens,
        "rows": min(s.rows or n_held_out, n_held_out), "targets": len(keys), "bytes": n_bytes, "nats": nats,
        "bits_per_byte": {name: bits_per_byte(x * len(keys), n_bytes) for name, x in nats.items()},
    }


LABELS = {"model": "this model", "bigram": "bigram table", "unigram": "unigram table", "chance": "chance, ln V"}


def print_table(r: dict):
    counted = "" if r["fit_tokens"] == r["tokens"] else f", the tables {r['fit_tokens']:,} (--fit_tokens)"
    print(f"{r['checkpoint']}: {r['tokens']:,} tokens seen{counted}")
    print(f"held out: {r['rows']:,} rows, {r['targets']:,} targets, {r['bytes']:,} bytes; {r['dtype']}, "
          f"{r['seconds']:.1f} s\n")
    print(f"{'':16}{'nats/token':>12}{'perplexity':>14}{'bits/byte':>12}")
    for name, x in r["nats"].items():
        print(f"{LABELS[name]:16}{x:12.4f}{math.exp(min(x, 700)):14,.1f}{r['bits_per_byte'][name]:12.4f}")
    worse = [LABELS[name] for name, x in r["nats"].items() if name != "model" and not r["nats"]["model"] < x]
    if worse:
        print(f"\nThe model does not beat: {'; '.join(worse)}. Train longer than {r['step']} steps, or look for a "
              "fault.")
    sys.stdout.flush()


# ------------------------------------------------------------------------------------------------------------------
# sample
# ------------------------------------------------------------------------------------------------------------------


def whole_weights(state: State, grid: Grid, m: Model, transport: Transport) -> dict:
    """All weights in the compute type, on a grid of one rank; takes the masters out of the state on the way.

    Returns embed, final_norm, head, bias_LX, and layers: one dict per layer as `block` wants it."""
    assert grid.world.size == 1

    def take(*names: str) -> dict[str, Tensor]:
        weights = gather(state, list(names), grid, transport).wait()
        for name in names:
            del state.master[name]
        return weights

    layers = [take(*layer_buckets(i)) for i in range(m.layers)]
    return take("embed", "final", "head") | {"layers": layers, "bias_LX": state.bias_LX}


@torch.no_grad()
def logits(tokens_T: Tensor, bounds: list[int], weights: dict, m: Model, last: bool = False) -> Tensor:
    """fp32 [T, V], or [1, V] of the last position. bounds: [0, ..., T], the documents inside the row."""
    T, device = len(tokens_T), tokens_T.device
    segments = Segments(bounds, torch.tensor(bounds, dtype=torch.int32, device=device))
    cos, sin = rope_cache(m.rope_theta, m.head_dim, max(T, m.seq_len), device)  # one length, so one entry in the cache
    x_TD = embed_tokens(tokens_T, weights["embed"])
    for i, w in enumerate(weights["layers"]):
        rope = (cos[:T], sin[:T]) if uses_rope(i, m) else None
        x_TD, _ = block(x_TD, w, segments, rope, None, weights["bias_LX"][i], lambda *tokens: tokens, lambda y_TD, value: y_TD,
                        range(m.experts), m)
    return (rms_norm(x_TD[-1:] if last else x_TD, weights["final_norm"]) @ weights["head"].T).float()


def pick(logits_V: np.ndarray, temperature: float, top_p: float, rng: np.random.Generator) -> int:
    """A token id. logits: fp64, -inf for what must not come. temperature 0: the likeliest, of equals the first."""
    order = np.argsort(-logits_V, kind="stable")
    if temperature == 0:
        return int(order[0])
    p = np.exp((logits_V[order] - logits_V[order[0]]) / temperature)
    below = np.cumsum(p / p.sum())
    keep = 1 + int((below[:-1] < top_p).sum())
    return int(order[np.searchsorted(below[:keep], rng.random() * below[keep - 1], "right").clip(max=keep - 1)])


def continuation(prompt: list[int], s: SampleSettings, weights: dict, m: Model, tok, rng, device) -> list[int]:
    """Up to s.tokens ids, without end-of-document. One forward pass of the last seq_len tokens for each: no cache."""
    ids = list(prompt)
    never = np.ones(m.vocab, bool)  # the vocabulary may be padded, and control pieces and <unk> are no text
    never[: tok.vocab_size()] = [tok.is_control(i) or tok.is_unknown(i) for i in range(tok.vocab_size())]
    never[tok.eos_id()] = False
    while len(ids) < len(prompt) + s.tokens:
        row = torch.tensor(ids[-m.seq_len:], device=device)
        logits_V = logits(row, [0, len(row)], weights, m, last=True)[0].double().cpu().numpy()
        logits_V[never] = -np.inf
        ids.append(pick(logits_V, s.temperature, s.top_p, rng))
        if ids[-1] == tok.eos_id():
            return ids[len(prompt):-1]
    return ids[len(prompt):]


def check_sample(s: SampleSettings) -> SampleSettings:
    for name in ("samples", "tokens"):
        if getattr(s, name) < 1:
            raise ConfigError(f"--{name}={getattr(s, name)}: must be at least 1")
    if not 0 < s.top_p <= 1:
        raise ConfigError(f"--top_p={s.top_p}: must be above 0 and at most 1; 1 draws from all tokens")
    if not s.prompt:
        raise ConfigError("--prompt=: empty; give the first words of a text, e.g. --prompt='Return the'")
    for prompt in read_prompts(s):
        if any("\ud800" <= c <= "\udfff" for c in prompt):
            raise ConfigError(f"--prompt={ascii(prompt)}: not valid UTF-8; write it in UTF-8")
    if s.greedy or s.temperature == 0:  # the others would be the same
        s = dataclasses.replace(s, temperature=0.0, samples=1)
    return s


def read_prompts(s: SampleSettings) -> list[str]:
    """The prompts of a file, or the one. Raises ConfigError for a file that cannot be read or has none."""
    if not s.prompts:
        return [s.prompt]
    try:
        lines = Path(s.prompts).read_bytes().decode().splitlines() if s.prompts.endswith(".jsonl") else \
            Path(s.prompts).read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts={s.prompts}: cannot be read ({error}); give a UTF-8 file with a prompt per line") from None
    found = []
    for number, line in enumerate(lines, 1):
        prompt = line.removesuffix("\r")
        if s.prompts.endswith(".jsonl") and prompt.strip():
            try:
                prompt = json.loads(prompt)
            except ValueError as error:
                raise ConfigError(f"--prompts={s.prompts}: line {number} is not JSON ({error})") from None
            prompt = prompt.get("prompt") if isinstance(prompt, dict) else prompt
            if not isinstance(prompt, str) or not prompt:
                raise ConfigError(f'--prompts={s.prompts}: line {number} is neither a string nor {{"prompt": "..."}}')
        found += [prompt] if prompt.strip() else []
    if not found:
        raise ConfigError(f"--prompts={s.prompts}: holds no prompt; write one per line")
    return found


def sample(argv: list[str]) -> int:
    s = check_sample(train.parse(argv, SampleSettings))
    where = launch.place()
    if where.world > 1:
        raise ConfigError(f"WORLD_SIZE={where.world}: sample runs on one rank; start it with make sample or "
                          "`python eval.py sample`")
    run = open_run(s, where.device)
    launch.setup(where)
    grid = make_grid(0, 1, 1, 1, run.m)
    tok = tokenizer.load_tokenizer(open_data(run, grid, where.device).blend.path)
    weights = whole_weights(load_state(run, grid, where.device), grid, run.m, as_trained(run))
    sys.stdout.reconfigure(encoding="utf-8")  # whatever the locale says
    for text in read_prompts(s):
        prompt = tokenizer.encode(tok, [text])[0]
        note = f", of which the last {run.m.seq_len} are read" if len(prompt) > run.m.seq_len else ""
        print(f"{run.path}; prompt in [[ ]], {len(prompt)} tokens{note}; "
              + (f"temperature {s.temperature}, top-p {s.top_p}, seed {s.seed}" if s.temperature else "greedy"))
        for i in range(s.samples):
            rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([s.seed, i])))  # so neither other prompts nor
            ids = continuation(prompt, s, weights, run.m, tok, rng, where.device)            # --samples change any
            ended = "cut" if len(ids) == s.tokens else "ended by itself"
            # decoded at once, since a character may be several byte pieces, and with the prompt, since it may end in one
            more = tok.decode(prompt + ids)[len(tok.decode(prompt)):]
            print(f"\n--- sample {i + 1} of {s.samples}: {len(ids)} tokens, {ended}")
            print(f"[[{printable(text)}]]{printable(more)}", flush=True)
            keep_sample(run, s, text, more)
    return launch.EXIT_OK


def keep_sample(run: Run, s: SampleSettings, prompt: str, text: str):
    """Appends it to the run's samples.jsonl, for report.py. A run that others own is only read."""
    path = run.path.resolve().parent.parent / "samples.jsonl"
    line = {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "step": run.manifest["step"], "temperature": s.temperature,
            "top_p": s.top_p, "seed": s.seed, "prompt": prompt, "text": text}
    with contextlib.suppress(OSError), open(path, "a") as f:
        f.write(json.dumps(line) + "\n")


def printable(text: str) -> str:
    """Without control characters, which could change the terminal."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)


# ------------------------------------------------------------------------------------------------------------------
# Tasks: lm-eval on an export
# ------------------------------------------------------------------------------------------------------------------

EXTRAS = ("transformers", "lm_eval", "accelerate")  # packages that tasks need


def check_tasks(tasks: str):
    """Raises ConfigError where tasks cannot be measured here, before anything has been computed."""
    if missing := [name for name in EXTRAS if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"--tasks={tasks}: needs {', '.join(missing)}, which is not installed; use make extras (it installs "
                          "requirements-extra.txt)")
    if ("/" in tasks or Path(tasks).is_dir()) and not any(Path(tasks).rglob("*.y*ml")):
        raise ConfigError(f"--tasks={tasks}: no directory with task files (.yaml) in it; make the example with "
                          "`python eval.py task --run=NAME`, or give names of lm-eval's own tasks")


def through_export(s: LossSettings, run: Run, prepared: Path) -> dict[str, dict[str, float]]:
    """Scores of a checkpoint, by task and metric: from another process, for which it is exported, beside the run where that can be
    written, and removed afterwards. prepared: the directory of the data, for their tokenizer."""
    beside = run.path.resolve().parent.parent
    with tempfile.TemporaryDirectory(prefix=".tasks-", dir=beside if os.access(beside, os.W_OK) else None) as tmp:
        model, out = Path(tmp) / "model", Path(tmp) / "scores.json"
        pieces = (prepared / "tokenizer.model").read_bytes()
        export.export_checkpoint(run.path, model, pieces, run.hp.dtype, setting=f"--tasks={s.tasks}")
        argv = [f"--model={model}", f"--tasks={s.tasks}", f"--limit={s.limit}", f"--batch={s.batch}", f"--out={out}"]
        done = subprocess.run([sys.executable, __file__, "harness", *argv], env=launch.without_ranks(), stdout=sys.stderr)
        if done.returncode:
            raise ConfigError(f"--tasks={s.tasks}: lm-eval ended with code {done.returncode}, its reason is above")
        return json.loads(out.read_text())


def harness(argv: list[str]) -> int:
    s = train.parse(argv, HarnessSettings)
    if not (Path(s.model) / "config.json").is_file() or not s.tasks:
        raise ConfigError(f"--model={s.model} --tasks={s.tasks}: give a directory with a config.json, such as export.py writes, "
                          "and tasks")
    check_tasks(s.tasks)
    model, out, folder = Path(s.model).resolve(), Path(s.out).resolve(), Path(s.tasks).resolve()
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ.setdefault(name, "1")  # read by their imports; set them to 0 to fetch data sets
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    if folder.is_dir():
        os.chdir(folder)  # so that data files can be named relative to the task files
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        names = manager.all_subtasks
    else:
        manager, names = TaskManager(), s.tasks.split(",")
        if unknown := [name for name in names if name not in manager.all_tasks]:
            raise ConfigError(f"--tasks={s.tasks}: lm-eval knows no {', '.join(unknown)}; `lm-eval ls tasks` lists what it knows")
    own = model / export.OWN_CODE.name  # only code that is ours is run
    trusted = own.is_file() and own.read_bytes() == export.OWN_CODE.read_bytes()
    results = simple_evaluate(
        model="hf", model_args={"pretrained": str(model), "dtype": s.dtype, "trust_remote_code": trusted}, tasks=names,
        task_manager=manager, limit=s.limit or None, batch_size=s.batch, device=str(launch.place().device),
        log_samples=False)["results"]
    scores = {task: {metric.removesuffix(",none"): value for metric, value in found.items() if isinstance(value, float)}
              for task, found in results.items()}
    if s.out:
        out.write_text(json.dumps(scores))
    else:
        print_scores(scores)
    return launch.EXIT_OK


def print_scores(scores: dict[str, dict[str, float]]):
    width = max(map(len, scores), default=0)
    print(f"\n{'':{width}}  {'metric':12}{'score':>10}{'+-':>10}")
    for task, found in scores.items():
        for metric in (name for name in found if not name.endswith("_stderr")):
            print(f"{task:{width}}  {metric:12}{found[metric]:10.4f}{found.get(metric + '_stderr', math.nan):10.4f}")
    sys.stdout.flush()


TASK = """\
# Which continuation of a held-out passage is the true one? The others come from elsewhere in the held-out documents, most
# from other ones; chance is 1/{choices}.
# Written by `eval.py task`. Run it with `eval.py loss --tasks=` this directory, or with lm-eval from inside it.
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {name}.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""


def task(argv: list[str]) -> int:
    s = train.parse(argv, TaskSettings)
    for name, least in {"questions": 1, "choices": 2, "context": 1, "length": 1}.items():
        if getattr(s, name) < least:
            raise ConfigError(f"--{name}={getattr(s, name)}: must be at least {least}")
    device = launch.place().device
    run = open_run(s, device)
    blend = open_data(run, make_grid(0, 1, 1, 1, run.m, connect=False), device).blend
    found = passages(blend.held_out, tokenizer.load_tokenizer(blend.path), s.context, s.length)
    rng = np.random.Generator(np.random.PCG64(s.seed))
    lines = [json.dumps(q) for q in questions(found, s.questions, s.choices, rng)]
    if not lines:
        raise ConfigError(f"--context={s.context} --length={s.length}: the held-out rows have fewer than {s.choices} pieces of "
                          "documents with so many tokens; lower them")
    out, name = Path(s.out) if s.out else run.path.resolve().parent.parent / "tasks", "continuation"
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (out / f"{name}.yaml").write_text(TASK.format(name=name, choices=s.choices))
    print(f"{out}: {len(lines)} questions with {s.choices} choices from {len({p.piece for p in found})} pieces of held-out "
          f"documents; measure them with make eval ARGS='--run={s.run} --tasks={out}'")
    return launch.EXIT_OK


class Passage(NamedTuple):
    piece: int  # of a document: what of it lies in a row
    context: str
    continuation: str


def passages(rows: data.HeldOut, tok, context: int, length: int) -> list[Passage]:
    """Of all rows: so many tokens, and then so many, the second part beginning with a word."""
    found, piece = [], -1
    begins = np.array([tok.id_to_piece(i).startswith(tokenizer.SPACE) and
                       tok.id_to_piece(i).lstrip(tokenizer.SPACE)[:1].isalpha() for i in range(tok.vocab_size())])
    for r in range(len(rows)):
        row = rows[r]
        for piece, (first, end) in enumerate(zip(row.bounds, row.bounds[1:]), piece + 1):
            ids, at = row.tokens_S[first:end], context
            while at + length < len(ids):  # the last token ends the document
                if begins[ids[at]] and not tok.decode(ids[at - 1 : at].tolist()).isspace():
                    shown, next_ids = ids[at - context : at].tolist(), ids[at : at + length].tolist()
                    found.append(Passage(piece, tok.decode(shown), tok.decode(next_ids)))
                    at += context
                at += 1
    return [p for p in found if "\ufffd" not in p.context + p.continuation]


def questions(found: list[Passage], limit: int, choices: int, rng: np.random.Generator) -> list[dict]:
    """{"context", "choices", "answer"}: the wrong continuations are those of other pieces, each piece at most once."""
    asked = []
    for i in rng.permutation(len(found))[:limit].tolist():
        others = {found[j].piece: found[j].continuation for j in rng.permutation(len(found)).tolist()}
        wrong = [text for piece, text in others.items() if piece != found[i].piece and text != found[i].continuation]
        if len(wrong) < choices - 1:
            continue
        answer = int(rng.integers(choices))
        asked.append({"context": found[i].context, "answer": answer,
                      "choices": wrong[: answer] + [found[i].continuation] + wrong[answer : choices - 1]})
    return asked


COMMANDS = {"loss": loss, "sample": sample, "task": task, "harness": harness}
SETTINGS = {"loss": LossSettings, "sample": SampleSettings, "task": TaskSettings, "harness": HarnessSettings}


def main(argv: list[str]) -> int:
    if "--help" in argv:
        return export.show_help(__doc__, SETTINGS, argv)
    if not argv or argv[0] not in COMMANDS:
        given = repr(argv[0]) if argv else "no command"
        raise ConfigError(f"{given}: write `eval.py loss`, `sample`, `task` or `harness`, then settings as --name=value")
    return COMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    sys.exit(launch.run(main))
