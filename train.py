"""nano1t: train a Mixture-of-Experts language model.

    make train                                                    4 ranks on this machine, debug size, embedded corpus
    make train ARGS="--steps=50 --seq_len=1024"                   any hyperparameter below
    python launch.py --nodes 2 --ranks-per-node 2 -- train.py     two simulated nodes
    python train.py                                               one rank

Reads top to bottom: hyperparameters, the schedule of a step with every collective in it, the loop. Names end in the letters of a
tensor's dimensions (x_TD: tokens by width); model.py lists them.
"""

import atexit
import dataclasses
import difflib
import errno
import fcntl
import hashlib
import inspect
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import checkpoint
import cluster
import data
import health
import launch
import optim
import recover
import timeline
from model import (ATTENTION, MOE_KERNELS, Balance, ConfigError, Model, Recorded, Route, Segments, block, choose_kernels,
                   count_params, embed_grad, embed_tokens, flops_per_token, head_loss, model_of, move_bias, rope_cache, uses_rope)
from order import BALANCE, BLOCK_STEPS, LINEAR_TOKENS, Order, check_boundary, dealt, key_cost
from offload import (GIB, Copies, Inputs, Tracker, check_hosts, describe, host_memory, host_report, label, make_inputs,
                     offloaded_layers, peak_memory, record_hosts, resident)
from parallel import (WIRE, Grid, State, Transport, advance, all_reduce, check_transport, combine_tokens, dispatch_tokens, exchange,
                      fill_own, gather, grid_shape, grid_warnings, init_state, layer_buckets, make_buckets, make_grid, patiently, reduce,
                      share_texts, squared_norm, start_refresh, timed_event, together)
from report import grouped
from watch import PAGE, PHASES, replace_json, tell_launcher

SCHEDULES = ("cosine", "constant", "wsd", "ramp")


@dataclass
class Hyperparameters:
    # the run
    run: str = "debug"  # name of the directory out/<run>
    size: str = "debug"  # row of the table in model.py
    steps: int = 200  # length of the run and of the learning-rate schedule
    stop_at: int = 0  # end before this step, with a checkpoint and the schedule unchanged; 0: do not
    seed: int = 0  # of the initial weights and of the order of the data
    resume: str = "auto"  # auto: the newest checkpoint of this run, if any | never | a checkpoint's directory
    # data
    data: str = "embedded"  # embedded | text: a file or a directory | token shards | a blend: "7 notes.jsonl 3 books.txt"
    stages: str = ""  # a JSON file that says from which steps on other data, another seq_len or learning rate hold; see Stage
    packing: str = "fit"  # fit: documents whole in a row where they fit | stream: end to end
    balance: str = "auto"  # a step's rows cost about the same: sorted in blocks of 128 steps | buckets | none | auto: sorted, but
    #   not where rows are short
    tokenizer: str = ""  # a SentencePiece model; empty: train one on the data
    seq_len: int = 0  # tokens per row; 0: the size's
    rows_per_rank: int = 0  # rows of a rank in a step, run breadth-first; 0: rows_per_step / ranks, or 1
    rows_per_step: int = 0  # rows of all ranks in a step; 0: the resumed run's, or rows_per_rank x ranks
    # layout and precision
    replicas: int = 1  # copies of the sharded model (HSDP); nodes are divided evenly
    dtype: str = "auto"  # of products and activations: auto (bfloat16 on accelerators, else float32) | float32 | bfloat16
    weight_transport: str = "auto"  # expert weights between nodes: fp8 (blocks of 128, a scale each) | bf16 | compute; auto:
    #   fp8 where products are bfloat16, else compute. The same on every layout, one node included, so that results are too
    grad_transport: str = "auto"  # gradients on the wire: bf16 | fp32; the sum is fp32. auto: bf16 where products are
    grad_chunk: int = 0  # experts of an owner per gradient transfer (two travel at a time), bounds the receive buffer; 0: all
    dense_gather: str = "step"  # step: 1/E of all dense weights stays here, refreshed once per step | layer: gather each layer
    node_reshard: bool = True  # with dense_gather=layer: keep 1/E of a layer after its forward pass
    # kernels
    moe_kernel: str = "grouped_mm"  # of the experts' products: grouped_mm | sonic (SonicMoE, on Hopper GPUs and newer)
    attention: str = "auto"  # on NVIDIA GPUs: fa2 | fa3 (FlashAttention 3) | auto: fa3 on a Hopper where it is installed
    compile: bool = False  # torch.compile what lies between products, attention and transfers of the block, region by region
    # memory
    recompute: bool = True  # keep a layer's inputs and recompute it in the backward pass | False: keep all its activations
    keep_layers: int = 0  # with recompute: of so many last layers all activations, which go before gradients fill the memory
    offload_fraction: float = 0.0  # of the layers: those whose inputs wait on the host for the backward pass
    offload_state: bool = False  # fp32 masters, moments and gradients live on the host; the optimizer streams them
    stream_chunk: int = 2**26  # values that the optimizer updates at a time; 0: a bucket. Bounds what streams through the device
    track_memory: int = 50  # steps between steps (and the first two) whose live bytes are counted by purpose; 0: never
    column_ctas: int = 16  # thread blocks that NCCL may take for the column group; 0: its default
    verbose_comm: bool = False  # print each collective of the first step
    profile: str = ""  # steps that are profiled, e.g. 20-22: where their time goes, and a trace; empty: none
    profile_ranks: str = "0"  # on which ranks: all, or e.g. 0,4
    # optimizer
    optimizer: str = "muon"  # muon | mano (matrices inside the layers; the rest AdamW) | adamw | sophiag (everything)
    newton_schulz: str = "polar5"  # muon's iteration: polar5 | quintic5 | ten (8 quintic and 2 that end at 1: the most exact)
    muon_per_head: bool = False  # muon takes each head of q, k and v as a matrix of its own
    curvature_every: int = 10  # sophiag: steps between estimates of the curvature, each as dear as a step
    lr: float = 3e-3  # peak; Muon's update is scaled so that both share it
    warmup: int = 20  # steps of linear warmup
    schedule: str = "cosine"  # cosine | constant | wsd (warmup, constant, a straight decay) | ramp (of lr_find.py)
    final_lr: float = 0.05  # end of the cosine or the decay, as a fraction of lr
    decay: float = 0.2  # of the steps: length of wsd's decay
    lr_scaling: str = "none"  # none | sqrt | linear: lr is that of lr_batch tokens per step, and is scaled to this run's
    lr_batch: int = 0  # tokens per step for which lr was found
    weight_decay: float = 0.1  # decoupled, on matrices
    clip: float = 1.0  # largest global gradient norm; 0: no clipping
    skip_sigma: float = 12.0  # skip a step whose loss or log gradient norm is so many deviations above the accepted ones' median;
    #   0: only one that is not finite
    skip_window: int = 128  # accepted steps that a step is compared with
    max_skips: int = 20  # skipped steps in a row that end the run
    # load of the experts; the losses are a mean over the tokens of all ranks and a sum over layers
    bias_rate: float = 1e-3  # router=sigmoid: step of the selection bias towards even load, once per step; 0: it stays
    aux_loss: float = 0.0  # coefficient of the auxiliary loss that evens out the load, e.g. 1e-3; 0: none
    z_loss: float = 0.0  # coefficient of the squared log-sum-exp of the router's logits, e.g. 1e-4; 0: none
    # checks and measurements
    check_every: int = 500  # steps between checks of the state (also at the start): types, shards distinct, replicas equal; 0:
    #   never
    noise_every: int = 10  # steps between measurements of the gradient noise scale, with two nodes or more; 0: never
    # evaluation, checkpoints, output
    val_every: int = 50  # steps between held-out losses (and one at the end); 0: never
    val_rows: int = 32  # held-out rows that are measured: always the first ones
    ckpt_every: int = 100  # steps between checkpoints (and one at the end); 0: only at the end
    ckpt_keep: int = 2  # newest checkpoints that stay; 0: all. An old one goes once a newer one has been read back
    ckpt_keep_every: int = 0  # checkpoints of steps that this divides stay, too; 0: none
    ckpt_writers: int = 0  # ranks that write to the file system at the same time; 0: all
    eval_ckpt: bool = False  # eval.py loss on finished checkpoints, in the background, on a CPU; a slow one leaves some out
    walltime: float = 0.0  # minutes that the job may run: stop before, with a checkpoint; 0: as long as Slurm says, if it does
    wandb: str = "auto"  # auto: online if logged in, else offline | off
    # the model, where it should differ from the size; 0: the size's
    layers: int = 0
    width: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    experts: int = 0
    top_k: int = 0
    groups: int = 0  # routing groups of consecutive experts
    expert_width: int = 0
    vocab: int = 0
    rope_every: int = 0  # RoPE on every n-th layer
    rope_theta: float = 0.0  # base of its wavelengths
    shared_experts: int = 0  # 1: an expert that every token passes
    max_per_group: int = 0  # experts of a group that a token may use; top_k / groups makes the load even
    router: str = ""  # softmax | sigmoid; empty: the size's


# A resumed run must agree with its checkpoint in these, or it would be another run; the model is compared as well.
FIXED = ("seed", "optimizer", "balance")
MODEL_FIELDS = ("layers", "width", "heads", "kv_heads", "head_dim", "experts", "top_k", "groups", "expert_width",
                "vocab", "rope_every", "rope_theta", "shared_experts", "max_per_group", "router", "seq_len")


# ------------------------------------------------------------------------------------------------------------------
# The schedule
# ------------------------------------------------------------------------------------------------------------------


# Every collective of a step, in the order in which it happens (-> starts, <- is waited for; over which group; what a rank
# holds afterwards). `--verbose_comm=True` prints the same list with bytes, as it happens.
#
#   forward    <- embedding            shard: the whole table
#     layer i  <- weights i            column: the experts of its node slot; node (or shard): the dense weights
#              -> weights i+1          after the last layer: head and last norm, over the shard
#                 dispatch             node, all-gather: tokens, routing weights and choices of its node
#                 combine              node, all-to-all and sum: its own tokens, the sums over all experts
#              -> expert load          world, all-reduce: tokens of each expert; <- before the backward pass
#   head       <- head, last norm; -> weights of the last layer
#              -> gradients of head and last norm, over the shard
#   backward
#     layer i  <- weights i, -> weights i-1
#                 dispatch             node: again, with the recorded routing; combine's transfer is left out (kept layers: none)
#                 gradients of combine (all-gather) and of dispatch (all-to-all and sum), node
#              -> gradients i          column: of the experts; node (or shard): of the dense weights
#              <- gradients i+1        dense: -> on over the column; with replicas: -> on over these. Each transfer so has
#                                      a layer's compute to hide behind, and ends as the owner's part of the sum of all ranks
#   embedding  -> its gradient, shard; <- all that is still on its way
#   numbers       world, all-gather of a few: loss, norm, next targets, who was told to stop       (train, below)
#   update     -> dense slices         shard, all-to-all: each dense matrix whole at its owner     (optim.update)
#              <- them, -> directions  shard, all-to-all: the slices of the update
#              <- them, -> refresh     column, all-gather: 1/E of all new dense weights; <- at the end
#   checkpoint    each rank's result   world, of its own and over gloo, in a thread beside the next step        (checkpoint.Saver)
#
# With offload: the layer's inputs leave (-> host) while it computes and come back while the layer above is recomputed; a finished
# gradient leaves while the next layer computes; the optimizer's chunks of state stream in and out beside its own work.


class DeviceRow(NamedTuple):
    """One row of tokens on the device."""

    tokens_T: Tensor  # int64
    targets_T: Tensor  # int64, -1: none
    segments: Segments
    n_targets: int
    n_real: int | None = None  # tokens that are not padding, which comes last; None: all
    digest: int = 0  # of its place in its corpus and of its tokens
    draws_T: Tensor | None = None  # uniform numbers with which the targets are drawn from the predictions (see draw_labels)


def schedule(rows: list[DeviceRow], state: State, grid: Grid, m: Model, transport: Transport, scale: float = 1.0,
             train: bool = True, keep_layers: int = 0, inputs: Inputs | None = None,
             balance: Balance | None = None) -> tuple[Tensor, Tensor]:
    """Forward and backward pass over this rank's rows; with train=False it ends at the loss.

    Before, each rank holds the fp32 masters of what it owns. After, state.grad holds the fp32 gradient of the same
    values: of scale * (summed loss of all ranks). Of the last keep_layers layers all activations, but no weights, are kept
    from the forward pass; of the others the inputs, in `inputs` (default: on the device). balance: where routing is
    counted and pushed. Returns (summed loss of this
    rank's rows in nats, squared norm of the gradients owned here), fp64 on the device."""
    T = len(rows[0].tokens_T)
    tables = rope_cache(m.rope_theta, m.head_dim, T, rows[0].tokens_T.device)
    inputs, graphs, routes = inputs or Inputs(None, [], None), [], []
    dispatch = partial(dispatch_tokens, grid.node)  # all-gather over the node: [T, ...] -> [E*T, ...]
    combine = partial(combine_tokens, grid.node)  # all-to-all over the node and a local sum: [E*T, D] -> [T, D]

    def layer(i: int, b: int, route: Route | None, x_TD: Tensor, w: dict[str, Tensor]) -> tuple[Tensor, Route]:
        pushed = {"pushed": partial(balance.logits, i, rows[b].n_real, route is None)} if balance else {}
        return block(x_TD, w, rows[b].segments, tables if uses_rope(i, m) else None, route, state.bias_LX[i], dispatch, combine,
                     grid.local_experts(m), m, **pushed)

    # ---- forward: no autograd graph is kept, only each layer's input and its routing; of the last keep_layers their graph
    embedding = gather(state, ["embed"], grid, transport)
    ahead = gather(state, layer_buckets(0), grid, transport)
    table_VD = embedding.wait()["embed"]
    x = [embed_tokens(row.tokens_T, table_VD) for row in rows]
    del table_VD
    for i in range(m.layers):
        w = label("weights", ahead.wait())
        ahead = gather(state, layer_buckets(i + 1) if i + 1 < m.layers else ["final", "head"], grid, transport)
        if train and i >= m.layers - keep_layers:
            graphs.append([Recorded(partial(layer, i, b, None), x[b], w, forget=True) for b in range(len(rows))])
            x, route = [graph.y_TD for graph in graphs[-1]], [graph.route for graph in graphs[-1]]
        else:
            if train:
                inputs.save(label("inputs", x))
            with torch.no_grad():
                out = [layer(i, b, None, x[b], w) for b in range(len(rows))]  # breadth-first: all rows while w is here
            x, route = map(list, zip(*out))
            routes.append(route)
            del out
        for b in range(len(rows) if balance else 0):
            balance.count(i, rows[b].n_real, route[b].chosen_Tk)
        del w
    counting = all_reduce(balance.total_LC, grid.world, "expert load") if balance else None

    # ---- head and loss, in chunks of tokens
    w = label("weights", ahead.wait())
    if train:
        ahead = gather(state, layer_buckets(m.layers - 1), grid, transport, backward=True)
    loss, dx, grads = 0, [], {}
    for b, row in enumerate(rows):
        loss_b, dx_b, dnorm, dhead = head_loss(x[b], row.targets_T, w["final_norm"], w["head"], scale, train, row.draws_T)
        loss, dx = loss + loss_b, dx + [dx_b]
        if train:
            accumulate(grads, {"final_norm": dnorm, "head": dhead})
    del w, x, loss_b, dx_b, dnorm, dhead
    if not train:
        return loss, torch.zeros_like(loss)
    if balance:
        balance.summed(counting.wait())
    reducing = reduce(state, ["final", "head"], grads, grid, transport)
    del grads

    # ---- backward: each layer is recomputed from its input, unless its graph is there
    for i in reversed(range(m.layers)):
        w = label("weights", ahead.wait())
        if i:
            ahead = gather(state, layer_buckets(i - 1), grid, transport, backward=True)
        grads, recorded = {}, graphs.pop() if graphs else []
        x = [] if recorded else inputs.take()
        inputs.fetch_ahead(i - 1)
        for b in range(len(rows)):
            graph = recorded.pop(0) if recorded else Recorded(partial(layer, i, b, routes[i][b]), x.pop(0), w, forget=False)
            dx[b], dw = graph.backward(dx[b], w)
            accumulate(grads, dw)
            del graph, dw
        del w, x, recorded
        started = reduce(state, layer_buckets(i), grads, grid, transport)
        del grads  # only the reductions hold them now
        advance(reducing)  # those of layer i+1 and before, while layer i's are on their way
        reducing += started

    # ---- the embedding's gradient needs the token ids only
    tokens, dx = torch.cat([row.tokens_T for row in rows]), torch.cat(dx)
    state.token_squared = squared_norm(dx)
    reducing += reduce(state, ["embed"], {"embed": embed_grad(tokens, dx, m.vocab, transport.grads)}, grid, transport)
    advance(reducing, to_the_end=True)
    return loss, sum(state.squared[name] for name in state.buckets)  # in a fixed order, whatever came home first


def accumulate(total: dict[str, Tensor], grads: dict[str, Tensor]):
    """Adds the gradients of one more row."""
    for name, grad in grads.items():
        total[name] = total[name].add_(grad) if name in total else label("gradients in flight", grad)


# ------------------------------------------------------------------------------------------------------------------
# Data of a step, evaluation
# ------------------------------------------------------------------------------------------------------------------


DIGEST_BITS = 48  # what fp64 carries exactly, with room to spare


def to_device(row: data.Row, device: torch.device) -> DeviceRow:
    tensors = [torch.from_numpy(x) for x in (row.tokens_S, row.targets_S, np.array(row.bounds, np.int32))]
    if device.type != "cpu":  # from pinned memory, or the copy would wait for the step that is running
        tensors = [x.pin_memory().to(device, non_blocking=True) for x in tensors]
    tokens_T, targets_T, bounds = tensors
    digest = hashlib.blake2b(row.origin.encode() + row.tokens_S.tobytes(), digest_size=DIGEST_BITS // 8).digest()
    return DeviceRow(tokens_T, targets_T, Segments(row.bounds, bounds), int((row.targets_S >= 0).sum()), row.n_real,
                     int.from_bytes(digest, "little"))


def mean_segment(blend: data.Blend) -> float:
    """Length of the document piece that a token lies in, averaged over the tokens of the run; what attention costs."""
    means = [key_cost(c.key_R[: 1 << 20], c.seq_len).mean() / c.seq_len - LINEAR_TOKENS for c in blend.corpora]
    return sum(mean * weight for mean, weight in zip(means, blend.weights)) / sum(blend.weights)


def next_rows(loader: data.Loader, step: int, device) -> tuple[list[DeviceRow], str]:
    """This rank's rows of a step, and the digest of the numbers of all its rows."""
    rows, digest = loader.take(step)
    return [to_device(row, device) for row in rows], digest


def count_targets(rows: list[DeviceRow]) -> int:
    return sum(row.n_targets for row in rows)


def count_tokens(rows: list[DeviceRow]) -> int:
    """Without padding."""
    return sum(len(row.tokens_T[: row.n_real]) for row in rows)


def draw_labels(rows: list[DeviceRow], places: list[int], seed: int) -> list[DeviceRow]:
    """The same rows with labels that the model will draw. places: of each row among all rows of the run; this and the seed decide
    the draws, so no layout changes them."""
    generators = [np.random.Generator(np.random.Philox(key=[seed, place])) for place in places]
    draws = [torch.from_numpy(generator.random(len(row.tokens_T))) for row, generator in zip(rows, generators)]
    return [row._replace(draws_T=x.to(row.tokens_T.device)) for row, x in zip(rows, draws)]


def measure_curvature(batch: list[DeviceRow], step: int, targets: float, state: State, run: "Run", m: Model, inputs: Inputs):
    """For Sophia: a pass over the step's rows with labels drawn from the predictions, whose gradient is of the same sum over all
    ranks as the loss's. A pass that is not finite counts for nothing."""
    hp, grid, order = run.hp, run.grid, run.order
    places = order.rows_before(step) + dealt(order.leg(step).rows_per_step, grid.world.size, grid.world.index)
    rows = draw_labels(batch, places.tolist(), hp.seed)
    _, squared = schedule(rows, state, grid, m, run.transport, 1 / max(targets, 1), keep_layers=hp.keep_layers, inputs=inputs)
    if np.isfinite(exchange([float(squared)], grid, run.device)).all():
        optim.measure_curvature(state, targets, hp.stream_chunk)
    state.grad.clear()


def held_out_loss(rows: data.HeldOut, limit: int, state: State, grid: Grid, m: Model, transport: Transport,
                  device) -> tuple[float, int]:
    """Mean loss in nats per target over the first `limit` held-out rows, and the number of targets.

    Ranks take turns; one whose rows run out before the others' computes a row without targets, so that every rank takes
    part in every collective."""
    limit = min(limit or len(rows), len(rows))
    total, unsettled = torch.zeros(2, dtype=torch.float64), len(WIRE.unsettled)
    for first in range(0, limit, grid.world.size):
        r = first + grid.world.index
        row = to_device(rows[min(r, limit - 1)], device)
        if r >= limit:
            row = row._replace(targets_T=torch.full_like(row.targets_T, -1), n_targets=0)
        loss, _ = schedule([row], state, grid, m, transport._replace(node_reshard=False), train=False)
        total += torch.tensor([float(loss), count_targets([row])], dtype=torch.float64)
    loss, targets = exchange(total.tolist(), grid, device).sum(0)
    while len(WIRE.unsettled) > unsettled:  # no step waited for these
        WIRE.unsettled.pop()
    return loss / max(targets, 1), int(targets)


# ------------------------------------------------------------------------------------------------------------------
# Settings
# ------------------------------------------------------------------------------------------------------------------


def parse(argv: list[str], cls=Hyperparameters):
    """--name=value for any field of the dataclass. Raises ConfigError for an unknown name or a value of another type."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values = {}
    for arg in argv:
        name, equals, text = arg.removeprefix("--").partition("=")
        if not arg.startswith("--") or not equals:
            raise ConfigError(f"{arg!r}: write settings as --name=value, e.g. --steps=50")
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            hint = f"did you mean --{near[0]}?" if near else f"the names are: {', '.join(fields)}"
            raise ConfigError(f"--{name}={text}: no such setting; {hint}")
        values[name] = parse_value(name, text, fields[name].type)
    return cls(**values)


def parse_value(name: str, text: str, kind: type):
    if kind is bool:
        if text.lower() in ("true", "false", "1", "0"):
            return text.lower() in ("true", "1")
        raise ConfigError(f"--{name}={text}: expected True or False")
    try:
        value = kind(text)
    except ValueError:
        example = {int: "a whole number, e.g. 100", float: "a number, e.g. 1e-3"}[kind]
        raise ConfigError(f"--{name}={text}: expected {example}") from None
    if kind is not str and not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"--{name}={text}: must be a finite number, zero or more")
    return value


def resolve(hp: Hyperparameters, where: launch.Place) -> tuple[Hyperparameters, Model]:
    """Fills in what 0 and auto stand for, and refuses what cannot work before anything is started or written."""
    changes = {name: getattr(hp, name) or None for name in MODEL_FIELDS}
    m = model_of(hp.size, **changes)
    grid_shape(where.world, where.ranks_per_node, hp.replicas, m)
    per_rank = hp.rows_per_rank or (hp.rows_per_step // where.world if hp.rows_per_step else 1)
    per_step = hp.rows_per_step or per_rank * where.world
    if per_rank * where.world != per_step:
        raise ConfigError(f"--rows_per_step={per_step}: must be rows_per_rank x {where.world} ranks; use --rows_per_step="
                          f"{max(per_rank, 1) * where.world}" + (f" or leave out --rows_per_rank={hp.rows_per_rank}"
                                                                 if hp.rows_per_rank else ""))
    for name, allowed in {"weight_transport": ("auto", "fp8", "bf16", "compute"), "grad_transport": ("auto", "bf16", "fp32"),
                          "dense_gather": ("step", "layer"),
                          "optimizer": tuple(optim.OPTIMIZERS), "schedule": SCHEDULES,
                          "packing": data.PACKINGS, "balance": BALANCE,
                          "newton_schulz": tuple(optim.NEWTON_SCHULZ), "lr_scaling": ("none", "sqrt", "linear"),
                          "moe_kernel": MOE_KERNELS, "attention": ATTENTION,
                          "wandb": ("auto", "off")}.items():
        if getattr(hp, name) not in allowed:
            raise ConfigError(f"--{name}={getattr(hp, name)}: unknown; use one of {', '.join(allowed)}")
    if hp.offload_fraction > 1:
        raise ConfigError(f"--offload_fraction={hp.offload_fraction}: a fraction of the layers, 0 to 1")
    kept = hp.keep_layers if hp.recompute else m.layers
    if kept > m.layers:
        raise ConfigError(f"--keep_layers={kept}: the model has {m.layers} layers")
    if hp.offload_fraction and offloaded_layers(m.layers, hp.offload_fraction) + kept > m.layers:
        raise ConfigError(f"--offload_fraction={hp.offload_fraction:g}: offloads the inputs that layers are recomputed from, but "
                          f"of the last {kept} of {m.layers} all is kept; use --recompute=True --keep_layers=0, or offload fewer")
    if not hp.run or hp.run != Path(hp.run).name or hp.run.startswith("."):
        raise ConfigError(f"--run={hp.run}: must be a plain directory name, it becomes out/<run>")
    if hp.decay > 1:
        raise ConfigError(f"--decay={hp.decay:g}: a fraction of the steps, 0 to 1")
    optim.scaled_rate(hp.lr, hp.lr_scaling, per_step * m.seq_len, hp.lr_batch)
    timeline.parse_steps(hp.profile), timeline.parse_ranks(hp.profile_ranks, where.world)
    for name in ("skip_window", "max_skips", "curvature_every"):
        if getattr(hp, name) < 1:
            raise ConfigError(f"--{name}={getattr(hp, name)}: must be at least 1")
    if hp.steps < 1:
        raise ConfigError(f"--steps={hp.steps}: must be at least 1")
    if m.seq_len < 2:
        raise ConfigError(f"--seq_len={m.seq_len}: must be at least 2")
    if m.top_k == 1 < m.experts and not (hp.aux_loss or hp.z_loss):
        raise ConfigError(f"--top_k=1: of {m.experts} experts, but the weight of one alone is always 1, so that the router would "
                          "get no gradient; use --top_k=2 or more, or set --aux_loss=1e-3 or --z_loss=1e-4, which give it one")
    declared(dataclasses.replace(hp, seq_len=m.seq_len))
    dtype = resolve_dtype(hp.dtype, where.device)
    weights, grads = ("fp8", "bf16") if dtype == "bfloat16" else ("compute", "fp32")
    hp = dataclasses.replace(hp, dtype=dtype,
                             weight_transport=weights if hp.weight_transport == "auto" else hp.weight_transport,
                             grad_transport=grads if hp.grad_transport == "auto" else hp.grad_transport,
                             keep_layers=hp.keep_layers if hp.recompute else m.layers,
                             seq_len=m.seq_len, rows_per_rank=per_rank, rows_per_step=per_step,
                             **{name: getattr(m, name) for name in MODEL_FIELDS[:-1]})
    return hp, m


@dataclass
class Stage:
    """From a step on: what differs from the stage before. A run without --stages has one, from step 0."""

    from_step: int  # a multiple of 128, as rows are balanced in blocks of so many steps
    data: str
    seq_len: int
    lr: float
    schedule: str
    final_lr: float


def declared(hp: Hyperparameters, stages: list[dict] | None = None) -> list[Stage]:
    """The stages of a run: one by its settings, then those of --stages, or instead of the file these. Each has what it does not
    say from the one before. Raises ConfigError for what cannot be, naming the stage."""
    found = [Stage(0, hp.data, hp.seq_len, hp.lr, hp.schedule, hp.final_lr)]
    data.check_data(hp.data, hp.tokenizer)
    for number, said in enumerate(read_stages(hp.stages) if stages is None else stages, 1):
        where = f"--stages={hp.stages}: stage {number}"
        if not isinstance(said, dict) or "from_step" not in said or len(said) < 2:
            raise ConfigError(f'{where} must be an object such as {{"from_step": 1280, "data": "7 notes.jsonl 3 books.txt"}}')
        for name, value in said.items():
            kind = Stage.__annotations__.get(name)
            if kind is None:
                raise ConfigError(f"{where}: {name} is not a setting of a stage; they are {', '.join(Stage.__annotations__)}")
            if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind) or (
                    kind is not str and not 0 <= value < math.inf):
                allowed = "a text" if kind is str else "a number, zero or more and finite"
                raise ConfigError(f"{where}: {name}={value!r} must be {allowed}")
        found.append(dataclasses.replace(found[-1], **said))
        if found[-1].from_step <= found[-2].from_step:
            raise ConfigError(f"{where}: from_step={found[-1].from_step} must be above {found[-2].from_step}, the stage before's")
        check_boundary(found[-1].from_step, 0, f"{where}: another stage")
        if found[-1].schedule not in SCHEDULES:
            raise ConfigError(f"{where}: schedule={found[-1].schedule}: unknown; use one of {', '.join(SCHEDULES)}")
        if found[-1].seq_len < 2:
            raise ConfigError(f"{where}: seq_len={found[-1].seq_len}: must be at least 2")
        data.check_data(found[-1].data, hp.tokenizer)
    return found


def read_stages(path: str) -> list[dict]:
    if not path:
        return []
    try:
        stages = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--stages={path}: cannot be read ({error}); give a JSON file with a list of stages") from None
    if not isinstance(stages, list):
        raise ConfigError(f"--stages={path}: must be a list of stages, [{{\"from_step\": ...}}, ...]")
    return stages


def resolve_dtype(dtype: str, device: torch.device) -> str:
    """What auto stands for on this device."""
    if dtype not in ("auto", "float32", "bfloat16"):
        raise ConfigError(f"--dtype={dtype}: unknown; use one of auto, float32, bfloat16")
    return dtype if dtype != "auto" else "float32" if device.type == "cpu" else "bfloat16"


def transport_of(hp: Hyperparameters) -> Transport:
    return Transport(getattr(torch, hp.dtype), hp.weight_transport, torch.bfloat16 if hp.grad_transport == "bf16" else
                     torch.float32, hp.dense_gather, hp.node_reshard, hp.grad_chunk)


def check_same_run(found: dict, hp: Hyperparameters, m: Model, pinned: list[dict], path: Path, log):
    """Raises ConfigError where a checkpoint belongs to another run; logs the settings that changed harmlessly.

    pinned: what `pin` says of the stages. Those of the checkpoint must come first, and what is new lies ahead."""
    was, step = found["settings"], found["step"]
    imported = found["fingerprint"] is None  # and not trained since: its first start sets what an import does not know
    known = [name for name in FIXED if name in was or not imported]
    pairs = {name: (was.get(name, getattr(Hyperparameters, name)), getattr(hp, name)) for name in known}
    defaults = {f.name: f.default for f in dataclasses.fields(Model)}  # of what older checkpoints did not have yet
    pairs |= {name: (found["model"].get(name, defaults[name]), value) for name, value in asdict(m).items()}
    stages = found.get("stages", [{"fingerprint": found["fingerprint"]}])
    if not imported and stages[0]["fingerprint"] != pinned[0]["fingerprint"]:
        pairs |= {name: (was.get(name), getattr(hp, name)) for name in ("data", "tokenizer", "packing")}
        pairs["fingerprint of the data"] = (stages[0]["fingerprint"][:12], pinned[0]["fingerprint"][:12])
    for n in range(1, max(len(stages), len(pinned))):
        old, new = (s[n] if n < len(s) else None for s in (stages, pinned))
        if old is None and new["from_step"] < step:
            pairs[f"stage {n}"] = ("none", f"one from step {new['from_step']} on, which is past")
        elif old is not None and old != new:
            pairs[f"stage {n}"] = (describe_stage(old), describe_stage(new) if new else "none")
    over = (step - found.get("rows_per_step", [[0]])[-1][0]) % BLOCK_STEPS
    if over:
        pairs["rows_per_step"] = (was["rows_per_step"], hp.rows_per_step)
    different = [f"{name}: checkpoint {old}, now {new}" for name, (old, new) in pairs.items() if old != new]
    if different:
        hint = ""
        if over and was["rows_per_step"] != hp.rows_per_step:
            hint = f"; rows_per_step may change at the end of a block: steps {step - over} or {step - over + BLOCK_STEPS}"
        raise ConfigError(f"checkpoint {path} was written by another configuration ({'; '.join(different)}{hint}); set it as it "
                          f"was, or start another run with --run=NAME (this one: --run={hp.run})")
    for name, value in asdict(hp).items():
        if name in was and was[name] != value and name not in ("resume", "stop_at"):
            log(f"resumed with another --{name}: {was[name]} -> {value}")


def describe_stage(stage: dict) -> str:
    return " ".join(f"{name}={value[:12] if name == 'fingerprint' else value}" for name, value in stage.items())


# ------------------------------------------------------------------------------------------------------------------
# Output of a run
# ------------------------------------------------------------------------------------------------------------------


ENDS = ("done", "stopped", "diverged", "unhealthy")  # phases in which a process leaves a run that has not crashed
ASK_AGAIN_S = 60  # after a save that failed, until out/<run>/save is looked for again
EVALUATION_S = 600  # how long a finished run waits for its last evaluation (eval_ckpt)


class Output:
    """Rank 0's files in out/<run>/ and the console; on other ranks every method does nothing."""

    def __init__(self, hp: Hyperparameters, where: launch.Place):
        self.path, self.active, self.wandb = Path("out") / hp.run, where.rank == 0, None
        self.hp, self.log_file, self.metrics_file, self.early = hp, None, None, []  # lines from before there is a file
        self.trouble = False  # a file could not be written, and that has been told
        self.evaluation, self.unevaluated = None, None  # the process that is at it, and the newest checkpoint that waits
        self.asked = 0  # step after which someone wants a checkpoint
        self.ask_from = 0.0  # monotonic time from which on it is looked whether someone does
        self.alive_before: float | None = None  # last sign of life before the crash, Unix time
        self.told = {"steps": hp.steps}  # to the launcher
        self.useful_s = 0.0  # of the steps of this launch that count, those of earlier attempts too
        self.started = float(os.environ.get(launch.STARTED_VAR, time.time()))  # the launch

    def lock(self):
        """Claims the run for this process until it ends; raises ConfigError if another has it, or if out/ cannot be written."""
        if not self.active:
            return
        try:
            self.path.parent.mkdir(exist_ok=True)
            self.lock_file = open(self.path.with_name(f".{self.path.name}.lock"), "a")
            if self.path.exists() and not self.path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "is not a directory")
            try:
                fcntl.flock(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):  # without locks the claim must do
                    raise
            owner = self.path.with_name(f".{self.path.name}.owner")
            cluster.claim(owner, f"--run={self.hp.run}")
            atexit.register(cluster.release, owner)
        except BlockingIOError:
            raise ConfigError(f"--run={self.hp.run}: another process is training this run; wait for it, end it, or use another "
                              "--run") from None
        except OSError as error:
            raise ConfigError(f"--run={self.hp.run}: {self.path} cannot be written ({error.strerror}); free it, or start in "
                              "another directory") from None

    def begun_before(self) -> bool:
        """Whether an earlier attempt of this launch has begun this run, or an earlier job of this chain."""
        with suppress(OSError):
            return recover.BEGUN_VAR in os.environ or cluster.follows((self.path / "chain").read_text())
        return False

    def try_writing(self):
        """Raises ConfigError where the run's directory takes no files: better now than with the first checkpoint."""
        probe = self.path / "ckpt" / ".writable"
        if not self.active:
            return
        try:
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"x" * 4096)
            probe.unlink()
        except OSError as error:
            raise ConfigError(f"--run={self.hp.run}: {probe.parent} cannot be written ({error.strerror}); make it writable, free "
                              "space, or start in another directory") from None

    def open(self, hp: Hyperparameters, m: Model, step: int):
        """Once the run is known to be able to start: nothing is written before."""
        if not self.active:
            return
        with self.survived():
            self.path.mkdir(parents=True, exist_ok=True)
            if chain := cluster.chain_id():
                (self.path / "chain").write_text(chain)
            (self.path / "config.json").write_text(json.dumps({"settings": asdict(hp), "model": asdict(m)}, indent=1))
            self.keep_metrics_before(step)
        self.alive_before = alive_before_a_crash(self.path / "progress.json") if step else None
        begun = int(os.environ.get(recover.BEGUN_VAR, step))
        self.useful_s = sum(line["step_s"] for line in self.metrics_so_far() if line["step"] > begun)
        self.told |= {"run": str(self.path.absolute()), "from": step}
        with self.survived():
            files = [open(self.path / name, "ab", buffering=0) for name in ("log.txt", "metrics.jsonl")]
            self.log_file, self.metrics_file = files
        total, active = count_params(m)
        self.log(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(sys.argv)}", console=False)
        self.log(f"settings {json.dumps(asdict(hp))}", console=False)
        self.log(f"versions python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}; "
                 f"git {git_state()}", console=False)
        if self.log_file:
            self.write(self.log_file, "".join(self.early))
        self.log(f"model {total / 1e6:.1f} M parameters, {active / 1e6:.1f} M active per token")
        self.evaluation_bytes = 8 * total  # one process holds masters and weights
        if hp.wandb == "auto":
            self.wandb = start_wandb(hp, self.path)

    def keep_metrics_before(self, step: int):
        """After a rewind the steps that will be run again must not be in the file twice."""
        path = self.path / "metrics.jsonl"
        if path.exists() and path.stat().st_size and not step:
            aside = path.rename(path.with_name(f"metrics-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"))
            self.log(f"this run starts from its beginning, for it has no checkpoint; the metrics of earlier steps are now in {aside}")
        elif path.exists():
            lines = [line for line in path.read_text().splitlines(True) if step_of(line) <= step]
            path.with_suffix(".tmp").write_text("".join(lines))
            path.with_suffix(".tmp").rename(path)

    @contextmanager
    def survived(self):
        """Around writes that nothing depends on: where they fail, as on a full disk, this is told once, and the run goes on."""
        try:
            yield
        except OSError as error:
            if not self.trouble:
                self.trouble = True  # the file that the log is in may be the one
                print(f"WARNING: {self.path} cannot be written ({error}): log, metrics and progress have gaps until it can; free "
                      "space", flush=True)

    def write(self, file, text: str):
        """All of it at the end of the file or, where it does not fit, nothing: half a line would run into the next."""
        with self.survived():
            content, end = text.encode(), file.seek(0, os.SEEK_END)
            try:
                if file.write(content) < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
            except OSError:
                file.truncate(end)
                raise

    def log(self, text: str, console: bool = True):
        if not self.active:
            return
        text = printable(text)
        if console:
            print(text, flush=True)
        if self.log_file:
            self.write(self.log_file, text + "\n")
        else:
            self.early.append(text + "\n")

    def metrics_so_far(self) -> list[dict]:
        path = self.path / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines() if step_of(line) < math.inf] if path.exists() else []

    def progress(self, step: int, phase: str):
        """What this rank is doing, for the watchdog; of rank 0 for the launcher and for people."""
        PAGE.phase(phase if phase in PHASES else "end", step)
        if self.active:
            self.told |= {"step": step, "phase": phase, "time": time.time()}
            with self.survived():
                tell_launcher(self.told)
                if self.log_file:
                    replace_json(self.path / "progress.json", self.told)

    def step_ended(self, step: int, times: list[float], end_of_job: float | None) -> dict:
        """Part of the time since the launch that went into steps that count. times: of this process's steps, in seconds."""
        self.useful_s += times[-1]
        goodput = self.useful_s / max(time.time() - self.started, self.useful_s)
        self.told |= {"step_s": median(times[-20:]), "useful_s": self.useful_s, "end": end_of_job}
        self.told.setdefault("first_step", time.time())
        self.progress(step, "step")
        return {"goodput": goodput}

    def save_wanted(self, step: int) -> bool:
        """Whether someone has made the file out/<run>/save since the last time. It goes when a later state has been saved."""
        if not self.active or self.asked or time.monotonic() < self.ask_from or not (self.path / "save").exists():
            return False
        self.log(f"{self.path / 'save'} is there: saving after step {step + 1}")
        self.asked = step + 1
        return True

    def saved(self, outcome: checkpoint.Outcome | None) -> dict:
        """Logs how a save ended, if one did, and has what it wrote evaluated; returns its metrics."""
        if outcome is None:
            return {}
        if outcome.error:
            self.log(f"WARNING: {outcome.error}; the next one is tried when it is due")
            if outcome.step >= self.asked:
                self.asked, self.ask_from = 0, time.monotonic() + ASK_AGAIN_S
            return {"ckpt_error": outcome.error}
        if self.asked and outcome.step >= self.asked:
            with self.survived():
                (self.path / "save").unlink(missing_ok=True)
                self.asked = 0
        if outcome.warning:
            self.log(f"WARNING: {outcome.warning}")
        self.log(f"saved step {outcome.step}: {outcome.bytes / 1e9:.3f} GB in {outcome.seconds:.2f} s beside training")
        self.evaluate(outcome.path)
        return {"ckpt_step": outcome.step, "ckpt_write_s": outcome.seconds, "ckpt_bytes": outcome.bytes}

    def recovered(self) -> dict:
        """After the first step of a run that goes on after a crash: seconds since the last sign of life before it."""
        if not self.alive_before:
            return {}
        seconds, self.alive_before = time.time() - self.alive_before, None
        self.log(f"first step back {seconds:.1f} s after the last sign of life before the crash")
        return {"recovery_s": seconds}

    def warn(self, text: str):
        if text:
            self.log(f"WARNING: {text}")

    def diverged(self, step: int, skips: health.Skips):
        """Writes what a person needs; raises Diverged on every rank."""
        place = self.path / "diverged.txt"
        if self.active:
            with self.survived():
                place.write_text(skips.report(self.hp.run, [str(p) for p in reversed(checkpoint.complete(self.path / "ckpt"))]))
            self.progress(step, "diverged")
        raise health.Diverged(f"the last {len(skips.streak)} steps could not be applied ({skips.streak[-1]['why']}); {place} "
                              "names them, and the checkpoints from before")

    def metrics(self, values: dict):
        if self.active:
            # JSON has no NaN
            values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
            if self.metrics_file:
                self.write(self.metrics_file, json.dumps(values) + "\n")
            if self.wandb:
                self.wandb.log(grouped(values), step=values["step"])

    def expert_load(self, step: int, counts_LX: Tensor):
        """Keeps the newest step's tokens of each expert, over their layer's mean."""
        if self.active:
            load_LX = counts_LX / counts_LX.mean(1, keepdim=True).clamp(min=1e-9)
            with self.survived():
                replace_json(self.path / "experts.json", {"step": step, "load": [[round(x, 3) for x in row] for row in load_LX.tolist()]})

    def evaluate(self, path: Path):
        """Has a finished checkpoint evaluated beside the training, once the one before is; only the newest waits."""
        if not self.active or not self.hp.eval_ckpt:
            return
        if self.evaluation_bytes > host_memory()[0] / 4:
            self.log(f"--eval_ckpt=True: not done, one process would need {self.evaluation_bytes / GIB:.1f} GiB beside the "
                     "training; use eval.py on several ranks")
            return
        self.unevaluated = path
        self.start_evaluation()

    def start_evaluation(self):
        if self.unevaluated and (self.evaluation is None or self.evaluation.poll() is not None):
            argv = [Path(__file__).with_name("eval.py"), "loss", f"--checkpoint={self.unevaluated}", "--wandb=off"]
            with self.survived():
                self.evaluation, self.unevaluated = launch.background([sys.executable, *argv], self.path / "eval.log"), None

    def finish_evaluation(self, wait_s: float):
        """Waits so long for the last checkpoint's evaluation; then it is ended."""
        until = time.monotonic() + wait_s
        while self.evaluation:
            try:
                code = self.evaluation.wait(max(0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.evaluation.kill()
                code = self.evaluation.wait()
            if code:
                self.log(f"warning: an evaluation ended with code {code}; {self.path / 'eval.log'} says more")
            self.evaluation = None
            if time.monotonic() < until:
                self.start_evaluation()

    def close(self):
        if self.wandb:
            self.wandb.finish()


def alive_before_a_crash(progress: Path) -> float | None:
    """Unix time of the last sign of life of a run that was not ended; None where it was, or where nothing can be read: a crash of
    the machine may have left the file empty."""
    try:
        found = json.loads(progress.read_text())
        return None if found["phase"] in ENDS else float(found["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def step_of(line: str) -> float:
    """Of a line of metrics.jsonl; infinity for one that a crash has cut short."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return math.inf


def printable(text: str) -> str:
    """With what is not UTF-8 in the name of a file written as an escape."""
    return text.encode(errors="backslashreplace").decode()


def git_state() -> str:
    """Commit and whether files differ from it; 'unknown' outside a checkout or without git."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
        dirty = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, cwd=Path(__file__).parent)
    except OSError:
        return "unknown"
    return f"{head.stdout.strip()}{' with changes' if dirty.stdout else ''}" if head.returncode == 0 else "unknown"


def start_wandb(hp: Hyperparameters, path: Path):
    import wandb

    mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False, verify=False) else "offline")
    config = {name: printable(value) if isinstance(value, str) else value for name, value in asdict(hp).items()}
    return wandb.init(project="nano1t", name=printable(hp.run), id=None, dir=path, config=config, mode=mode,
                      settings=wandb.Settings(silent=True, console="off"))


def duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m{seconds:02d}s"


# ------------------------------------------------------------------------------------------------------------------
# The loop
# ------------------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """What stays the same from step to step."""

    hp: Hyperparameters
    m: Model
    grid: Grid
    transport: Transport
    device: torch.device
    stages: list[Stage]
    blends: list[data.Blend]  # of each stage
    order: Order
    meta: dict  # for checkpoints
    out: Output


def prepare_stages(hp: Hyperparameters, stages: list[Stage], grid: Grid, device, log) -> list[data.Blend]:
    """The prepared data of each stage. All have the first one's tokenizer."""
    blends = []
    for stage in stages:
        tokenizer = str(blends[0].path / "tokenizer.model") if blends else hp.tokenizer
        blends.append(prepare_data(hp, stage, tokenizer, grid, device, log))
    return blends


def prepare_data(hp: Hyperparameters, stage: Stage, tokenizer: str, grid: Grid, device, log) -> data.Blend:
    """Rank 0 prepares what is missing and tells the others where it is; one that does not see it, because its disk is
    another, makes its own, which must be the same."""
    def prepare(log) -> Path:
        try:
            return data.prepare(stage.data, hp.vocab, stage.seq_len, hp.seed, tokenizer, log=log, packing=hp.packing)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            raise ConfigError(f"--data={stage.data}: {error.filename} cannot be written or read ({error.strerror}); prepared data "
                              "lie in data/: make that writable, or a link to a place that is") from None

    path = together(lambda: patiently(lambda: str(prepare(log)) if grid.world.index == 0 else "", grid), grid, device)
    path = Path(share_texts(path, grid, device)[0])
    blend = together(lambda: patiently(lambda: data.Blend(path if path.exists() else prepare(lambda *_: None)), grid), grid, device)
    fingerprints = share_texts(blend.fingerprint, grid, device)
    if different := [rank for rank, f in enumerate(fingerprints) if f != fingerprints[0]]:
        raise ConfigError(f"--data={stage.data}: ranks {different} made other rows of it than rank 0; give all nodes the same "
                          "files and packages, or a shared directory data/")
    return blend


def pin(stages: list[Stage], blends: list[data.Blend], said: list[dict]) -> list[dict]:
    """What a checkpoint keeps of the stages: what the file says of each, with the data's fingerprint in place of their path."""
    found = [{"from_step": 0, "fingerprint": blends[0].fingerprint}]
    for values, blend in zip(said, blends[1:]):
        found.append({**{k: v for k, v in values.items() if k != "data"}, "fingerprint": blend.fingerprint})
    return found


def rows_of_run(hp: Hyperparameters, asked: Hyperparameters, found: dict, world: int) -> Hyperparameters:
    """A resumed run keeps its rows per step where no other number was asked for. Raises ConfigError if they cannot be shared."""
    rows = found and found["settings"].get("rows_per_step")  # an imported one has none
    if not rows or asked.rows_per_step or asked.rows_per_rank:
        return hp
    if rows % world:
        raise ConfigError(f"the run has rows_per_step={rows}, which {world} ranks cannot share evenly; start with a number of "
                          f"ranks that divides it, or, at the end of a block of {BLOCK_STEPS} steps, set another --rows_per_step")
    return dataclasses.replace(hp, rows_per_step=rows, rows_per_rank=rows // world)


def planned_memory(hp: Hyperparameters, m: Model, grid: Grid) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that this rank will hold from step to step, by purpose: (on the host, on the device)."""
    buckets = make_buckets(m, grid)
    values = {name: math.prod(bucket.owned) for name, bucket in buckets.items()}
    moments = sum(count * len(optim.MOMENTS[optim.kind_of(buckets[name], hp.optimizer)]) for name, count in values.items())
    state = {"masters": 4 * sum(values.values()), "moments": 4 * moments, "gradients": 4 * sum(values.values())}
    away = offloaded_layers(m.layers, hp.offload_fraction) if hp.offload_fraction else 0
    one_layer = hp.rows_per_rank * hp.seq_len * m.width * getattr(torch, hp.dtype).itemsize
    inputs = {"inputs": (m.layers - hp.keep_layers - away) * one_layer}
    arena = {"offloaded inputs": away * one_layer}
    return (state | arena, inputs) if hp.offload_state else (arena, state | inputs)


def check_memory(hp: Hyperparameters, m: Model, grid: Grid, where: launch.Place, out: Output):
    """Raises ConfigError on all ranks where what is certain to be needed cannot be had; else it is logged and recorded."""
    on_host, on_device = planned_memory(hp, m, grid)
    lower = f", or lower --offload_fraction={hp.offload_fraction:g}" if hp.offload_fraction else ""
    rows = f", fewer rows than --rows_per_rank={hp.rows_per_rank}" if hp.rows_per_rank > 1 else ""
    fixes = f"use more nodes{rows} or another --size than {hp.size}{lower}"
    if where.device.type == "cpu":
        on_host |= on_device
    else:
        has = launch.device_memory(where.device)
        if sum(on_device.values()) > has:
            raise ConfigError(f"each device has {has / GIB:.1f} GiB of memory, a rank would hold "
                              f"{sum(on_device.values()) / GIB:.1f} ({describe(on_device)}); use --offload_state=True, more "
                              f"nodes, or another --size than {hp.size}")
    reports = [json.loads(text) for text in share_texts(json.dumps(host_report(on_host)), grid, where.device)]
    check_hosts(reports, fixes)
    if out.active:
        with out.survived():
            for line in record_hosts(out.path.parent / "hosts.jsonl", reports, hp.run):
                out.log(line)


def begin(asked: Hyperparameters, hp: Hyperparameters, m: Model, grid: Grid, where: launch.Place,
          out: Output) -> tuple[Run, State, dict]:
    """Fresh or from a checkpoint, which rank 0 chooses; also this one's manifest, or nothing. With --resume=auto the newest that is
    as it was written; those that are not are set aside, once a good one has been found."""
    root, device = out.path / "ckpt", where.device

    def choose() -> tuple[str, list[str]]:
        resume = hp.resume
        if out.active and out.begun_before() and (resume == "never" or checkpoint.complete(root)):
            resume = "auto"  # an earlier attempt, or job of the chain, has done as it says, and has gone on from there
        if resume != "auto" or not out.active:
            return resume, [] if resume == "never" else [resume]
        return resume, [str(p) for p in checkpoint.candidates(root)[:5]]  # so many damaged ones in a row are no accident

    resume, paths = json.loads(share_texts(json.dumps(together(choose, grid, device)), grid, device)[0])
    hp = dataclasses.replace(hp, resume=resume)
    if out.active and hp.resume != "never":
        checkpoint.remove_unfinished(root)
    if not paths:
        run, state = run_of(asked, hp, m, grid, where, {}, None, out), empty_state(hp, m, grid, device)
        if hp.resume == "never" and out.active and out.path.exists():
            aside = out.path.rename(out.path.with_name(f"{out.path.name}.{time.strftime('%Y%m%d-%H%M%S')}"))
            out.log(f"--resume=never: the run that was in {out.path} is now in {aside}")
        return run, state, {}
    state, damaged = None, []
    for chosen in map(Path, paths):
        manifest, damage = checkpoint.agreed(lambda: checkpoint.read_manifest(chosen), grid, device)
        if not damage:
            run = run_of(asked, hp, m, grid, where, manifest, chosen, out)
            state = state or empty_state(hp, m, grid, device)
            _, damage = checkpoint.agreed(lambda: checkpoint.load(chosen, state, grid, m), grid, device)
        if not damage:
            if manifest["step"] < last_step(run.hp):
                start_from(chosen, manifest["step"], damaged, out)
            return run, state, manifest
        out.log(f"WARNING: {damage}")
        damaged.append((chosen, damage))
    raise ConfigError(f"{damaged[0][1]}" + (f"; nor can any other of {len(damaged)} be read" if len(damaged) > 1 else ""))


def run_of(asked: Hyperparameters, hp: Hyperparameters, m: Model, grid: Grid, where: launch.Place, found: dict,
           chosen: Path | None, out: Output) -> Run:
    """The run with its data prepared, its stages and its order. found: the manifest of the checkpoint it goes on from, or nothing.
    Raises ConfigError on all ranks where that was another run's, or where memory or data are wanting."""
    device, hp = where.device, rows_of_run(hp, asked, found, where.world)
    stages = declared(hp)
    check_memory(dataclasses.replace(hp, seq_len=max(stage.seq_len for stage in stages)), m, grid, where, out)
    out.progress(found.get("step", 0), "data")
    blends = prepare_stages(hp, stages, grid, device, out.log)
    out.progress(found.get("step", 0), "init")
    pinned = pin(stages, blends, read_stages(hp.stages))
    if found:
        check_same_run(found, hp, m, pinned, chosen, out.log)
    anchors = found.get("rows_per_step", [])  # [step, rows per step from there on]
    if not anchors or anchors[-1][1] != hp.rows_per_step:
        anchors = [*anchors, [found.get("step", 0), hp.rows_per_step]]
    order = Order([b.stage(s.from_step) for s, b in zip(stages, blends)], anchors, hp.seed, hp.balance)
    meta = {"settings": asdict(hp), "model": asdict(m), "fingerprint": blends[0].fingerprint, "stages": pinned,
            "rows_per_step": anchors, "declared": [asdict(stage) for stage in stages]}
    return Run(hp, m, grid, transport_of(hp), device, stages, blends, order, meta, out)


def empty_state(hp: Hyperparameters, m: Model, grid: Grid, device) -> State:
    """Initial weights and moments. Raises ConfigError on all ranks where the memory cannot be had."""
    state = together(lambda: init_state(m, grid, hp.seed, device, hp.offload_state), grid, device)
    together(lambda: optim.init_moments(state, hp.optimizer), grid, device)
    return state


def last_step(hp: Hyperparameters) -> int:
    return min(hp.stop_at or hp.steps, hp.steps)


def start_from(chosen: Path, step: int, damaged: list[tuple[Path, str]], out: Output):
    """Puts the run's directory in order for a run that starts from this checkpoint of this step."""
    out.log(f"resumed from {chosen}" + (f", because newer ones are damaged: {len(damaged)}" if damaged else ""))
    root = out.path / "ckpt"
    if out.active:
        for path, _ in damaged:
            aside = checkpoint.set_aside(path, "damaged")
            out.log(f"WARNING: {path} is damaged and now {aside}; delete it when you have seen to it")
        foreign = chosen.resolve().parent != root.resolve()
        for place in checkpoint.begun_from(root, chosen) if foreign else checkpoint.set_aside_after(root, step):
            out.log(f"this run goes another way from step {step} on: an earlier checkpoint of it is now {place}")


def settings_in_words(kind: type) -> str:
    """Each setting with its default and what the source says of it."""
    lines = []
    for line in inspect.getsource(kind).splitlines():
        if found := re.match(r"    (\w+): [^=]+ = (.+?)(?:  # (.*))?$", line):
            default = found[2].strip('"')
            lines.append(f"  --{found[1]}={default}".ljust(32) + f"  {found[3] or ''}".rstrip())
        elif found := re.match(r"    #   (.*)", line):  # goes on with the setting before
            lines.append(" " * 34 + found[1])
        elif found := re.match(r"    # (.*)", line):
            lines.append(f"\n{found[1]}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(__doc__ + "\n" + settings_in_words(Hyperparameters))
        return launch.EXIT_OK
    where = launch.place()
    asked = parse(argv)
    hp, m = resolve(asked, where)
    out = Output(hp, where)
    out.progress(0, "init")
    launch.setup(where)
    device, transport = where.device, transport_of(hp)
    grid = make_grid(where.rank, where.world, where.ranks_per_node, hp.replicas, m,
                     options={"column": launch.group_options(where.backend, hp.column_ctas)})
    check_transport(transport, m, grid)
    out.log(f"{where.world} ranks on {device.type}: {grid.R} replicas x {grid.N} nodes x {grid.E} ranks, {hp.dtype}")
    for warning in grid_warnings(grid, m):
        out.log(f"warning: {warning}")

    chosen = together(lambda: choose_kernels(hp.moe_kernel, hp.attention, hp.compile, device, hp.dtype, m), grid, device)
    out.log(f"kernels: {chosen}")
    together(out.lock, grid, device)
    run, state, found = begin(asked, hp, m, grid, where, out)
    hp, step = run.hp, found.get("step", 0)
    last = last_step(hp)
    if step >= last:
        out.log(f"nothing to do: the newest checkpoint is at step {step} of {last}; "
                f"--{'stop_at' if hp.stop_at and last == hp.stop_at else 'steps'}=N goes on, --run=NAME or "
                "--resume=never starts afresh")
        return launch.EXIT_OK
    together(out.try_writing, grid, device)
    out.open(hp, m, step)
    saver = checkpoint.Saver(out.path / "ckpt", state, grid, hp.ckpt_keep, hp.ckpt_keep_every, hp.ckpt_writers)
    # until here a signal ends the program at once, nothing is lost; from here on it waits for a step and a checkpoint
    try:
        stopped = train(run, state, saver, step, last, launch.StopRequest(), found)
    except (checkpoint.NotSaved, health.Diverged, health.CheckFailed) as error:
        out.saved(saver.wait())  # what it still writes is from before
        out.log(f"error: {error}")
        out.finish_evaluation(0)
        return {checkpoint.NotSaved: launch.EXIT_NOT_SAVED, health.Diverged: launch.EXIT_DIVERGED,
                health.CheckFailed: launch.EXIT_UNHEALTHY}[type(error)]
    out.log(ledger(), console=False)
    out.finish_evaluation(0 if stopped else EVALUATION_S)
    out.close()
    return launch.EXIT_STOPPED if stopped else launch.EXIT_OK


def train(run: Run, state: State, saver: checkpoint.Saver, step: int, last: int, stop: launch.StopRequest, found: dict) -> bool:
    """Steps until `last`; True if it ended early because a signal asked for it. found: the manifest of the checkpoint that the
    run goes on from, or nothing. Raises NotSaved, Diverged, CheckFailed."""
    hp, m, grid, transport, device, order, out = run.hp, run.m, run.grid, run.transport, run.device, run.order, run.out
    flops, times = [flops_per_token(m, mean_segment(blend)) for blend in run.blends], []
    plan = optim.plan_muon(state, grid, m, hp.optimizer, hp.newton_schulz, hp.muon_per_head)
    optim.check_plan(plan, grid, device)
    copies = state.copies or Copies(device)
    WIRE.event = partial(timed_event, device) if device.type != "cpu" else None
    fill_own(state, transport)
    start_refresh(state, grid, transport)()
    watch = Watch(run, state, found)
    loader = data.Loader(run.blends, order, grid.world.size, grid.world.index, step)
    batch, digest = next_rows(loader, step, device)
    counts = exchange([count_targets(batch), count_tokens(batch)], grid, device)
    inputs, end_of_job, news, save_due, held_out_s = None, launch.end_of_job(hp.walltime), {}, False, 0.0
    profiler = timeline.Profiler(hp.profile, hp.profile_ranks, grid.world.index, grid.world.size, device, out.path / "profile")
    out.progress(step, "compile")
    while step < last:
        profiler.start(step + 1)
        clock = Clock(device)
        profiler.step_begins(step + 1)
        WIRE.tell = out.log if hp.verbose_comm and not times else None
        stage, blend = run.stages[number := order.leg(step).stage], run.blends[number]
        lr = rate(run, step)
        if inputs is None or m.seq_len != stage.seq_len:
            inputs, m = None, dataclasses.replace(m, seq_len=stage.seq_len)  # the old ones go first
            inputs = together(lambda: make_inputs(m.layers, hp.rows_per_rank, (m.seq_len, m.width), transport.compute,
                                                  hp.offload_fraction, copies), grid, device)
        next_batch, next_digest = next_rows(loader, step + 1, device)
        watch.step_begins(step)

        counted = hp.track_memory and not hp.compile and (len(times) < 2 or (step + 1) % hp.track_memory == 0)
        with Tracker(resident(state, inputs)) if counted else nullcontext() as memory:
            sums, balance = passes(run, m, state, step, batch, counts, inputs)
            # with --val_every=1 one held-out loss follows this step, and another the next, before a checkpoint can be written
            reason = why_stop(stop, end_of_job, times, (2 if hp.val_every == 1 else 1) * held_out_s, saver)
            told = tell(sums, state, counts[:, 0].sum(), batch, next_batch, bool(reason), out.save_wanted(step), grid, device)
            balance.to_host()
            clock.update_begins()
            if skipped := watch.skips.judge(step + 1, told.loss, told.grad_norm, told.suspects):
                state.grad.clear()
            else:
                update(run, state, step, plan, lr, told.grad_norm, balance)

        step += 1
        profiler.step_ends()
        measured = {"row_ids": digest, "stage": number, "loss": told.loss, "grad_norm": told.grad_norm, "lr": lr,
                    **clock.step_ends(times), **load_of(balance, grid), **watch.step_ends(step, told, counts, balance, skipped),
                    "ckpt_blocked_s": saver.take_blocked_s(), **news, **out.saved(saver.finished()), **out.recovered()}
        batch, digest, counts = next_batch, next_digest, told.counts
        if memory:
            measured |= {"tracked_peak_bytes": memory.peak, "tracked_bytes": dict(memory.at_peak)}
        WIRE.tell = None
        if hp.val_every and (step % hp.val_every == 0 or step == last):
            began = time.perf_counter()
            out.progress(step, "eval")
            measured["val_loss"], _ = held_out_loss(blend.held_out, hp.val_rows, state, grid, m, transport, device)
            held_out_s = max(held_out_s, time.perf_counter() - began)
            out.expert_load(step, balance.counts_LX)
            out.warn(health.chance_warning(told.loss, measured["val_loss"], m.vocab))
        measured |= out.step_ended(step, times, end_of_job)
        report(run, step, measured, flops[number], times)
        if (profiled := profiler.finish(step, told.stopping or step == last)) is not None:
            tell_profile(run, profiler, profiled)
        if watch.skips.given_up:
            out.saved(saver.wait())  # what it writes is from before
            out.diverged(step, watch.skips)
        # while steps are being skipped the state may be bad already: it is saved only where this process ends, and nothing goes
        news, save_due = {}, save_due or told.saving or bool(hp.ckpt_every and step % hp.ckpt_every == 0)
        if step == last or told.stopping or save_due and not watch.skips.streak:
            out.progress(step, "checkpoint")
            copies.finish()
            meta = {**run.meta, "row": order.rows_before(step), "health": watch.state()}
            news, save_due = out.saved(saver.start(step, meta, optim.phases(state, plan), retire=not watch.skips.streak)), False
            out.progress(step, "step")
        if told.stopping:
            break
    loader.close()
    why = f"; stopped by {reason or 'another rank'}, run again (--resume=auto) to go on" if told.stopping else ""
    finish(out, saver, step, why)
    return told.stopping and step < last


def rate(run: Run, step: int) -> float:
    """The learning rate of a step: its stage's schedule, scaled to its number of tokens."""
    hp, leg = run.hp, run.order.leg(step)
    stage = run.stages[leg.stage]
    peak = optim.scaled_rate(stage.lr, hp.lr_scaling, leg.rows_per_step * stage.seq_len, hp.lr_batch)
    return optim.learning_rate(step, hp.steps, peak, hp.warmup, stage.schedule, stage.final_lr, hp.decay)


def passes(run: Run, m: Model, state: State, step: int, batch: list[DeviceRow], counts: np.ndarray,
           inputs: Inputs) -> tuple[tuple[Tensor, Tensor], Balance]:
    """Forward and backward pass of a step, before it Sophia's where it is due: what schedule returned, and where the tokens went.
    counts: [world, 2] targets and tokens of the step."""
    hp, (targets, tokens) = run.hp, counts.sum(0)
    balance = Balance(m, run.device, tokens, hp.aux_loss, hp.z_loss)
    if hp.optimizer == "sophiag" and step % hp.curvature_every == 0:
        measure_curvature(batch, step, targets, state, run, m, inputs)
    return schedule(batch, state, run.grid, m, run.transport, 1 / max(targets, 1), keep_layers=hp.keep_layers, inputs=inputs,
                    balance=balance), balance


def update(run: Run, state: State, step: int, plan: optim.MuonPlan, lr: float, grad_norm: float, balance: Balance):
    """Moves the weights and, where the router has one, the bias that evens out the load."""
    hp = run.hp
    optim.update(state, run.grid, plan, hp.optimizer, lr, hp.weight_decay, optim.clip_scale(grad_norm, hp.clip), step,
                 run.transport, chunk=hp.stream_chunk)
    if hp.bias_rate and run.m.router == "sigmoid":
        move_bias(state.bias_LX, balance.counts_LX, hp.bias_rate)


def finish(out: Output, saver: checkpoint.Saver, step: int, why: str):
    """Waits for the last checkpoint; raises NotSaved if there is none."""
    out.progress(step, "checkpoint")
    if error := out.saved(final := saver.wait()).get("ckpt_error"):
        raise checkpoint.NotSaved(f"the last checkpoint of this run is missing: {error}, then run again to resume")
    out.log(f"checkpoint {final.path}{why}")
    out.progress(step, "done" if step == out.hp.steps else "stopped")


class Told(NamedTuple):
    """What every rank knows once a step's backward pass is over."""

    loss: float  # nats per target
    grad_norm: float
    suspects: list[int]  # ranks where something that is bad would come from
    digest: int  # of the rows that were read, in any order
    node_parts: np.ndarray  # [nodes] squared norms of the parts of the gradient that are summed up in a node
    parts_squared: float  # squared norm of their sum
    counts: np.ndarray  # [world, 2]: targets and tokens of the next step
    stopping: bool  # some rank was told to stop
    saving: bool  # someone wants a checkpoint


def tell(sums: tuple[Tensor, Tensor], state: State, targets: float, batch: list[DeviceRow], next_batch: list[DeviceRow],
         stopping: bool, saving: bool, grid: Grid, device) -> Told:
    """The small collective at the end of a step. sums: what schedule returned; targets: of this step, of all ranks."""
    zero = torch.zeros_like(sums[0])
    parts = state.node_squared or {}
    summed = sum((state.squared[name] for name in parts), zero)
    measured = torch.stack([*sums, state.token_squared, sum(parts.values(), zero), summed])
    digest = sum(row.digest for row in batch) % 2**DIGEST_BITS
    mine = [*measured.tolist(), digest, count_targets(next_batch), count_tokens(next_batch), stopping, saving]
    numbers = exchange(mine, grid, device)
    loss, squared, token_squared, node_part, parts_squared, digests, _, _, stopping, saving = numbers.T
    suspects = health.suspects(loss, np.sqrt(token_squared), squared)
    # each rank has its own tokens, so losses add up; but replicas hold the same gradient, whose squares come grid.R times
    return Told(loss.sum() / max(targets, 1), math.sqrt(squared.sum() / grid.R), suspects,
                sum(map(int, digests)) % 2**DIGEST_BITS, node_part.reshape(-1, grid.E).sum(1),
                parts_squared.sum() / grid.R, numbers[:, 6:8], bool(stopping.any()), bool(saving.any()))


class Watch:
    """Looks after a run (health.py): what each part of it knows goes into the checkpoint."""

    def __init__(self, run: Run, state: State, found: dict):
        """Checks the state as it is at the start. found: the checkpoint's manifest, or nothing."""
        hp, self.run, self.tensors, self.fresh, known = run.hp, run, state, not found, found.get("health", {})
        self.m = dataclasses.replace(run.m, seq_len=max(stage.seq_len for stage in run.stages))  # of which positions are checked
        self.skips = health.Skips(hp.skip_sigma, hp.skip_window, hp.max_skips, known.get("skips"))
        self.repeats = health.Repeats(run.order.same_rows, known.get("rows"))
        self.noise = health.Noise(known.get("noise"))
        self.moves = health.Moves(state, run.grid, run.m) if hp.check_every else None
        if hp.check_every:
            health.check_state(state, run.grid, self.m)

    def state(self) -> dict:
        return {"skips": self.skips.state(), "rows": self.repeats.state(), "noise": self.noise.state()}

    def measures_noise(self, step: int) -> bool:
        hp, grid = self.run.hp, self.run.grid
        return bool(hp.noise_every) and step % hp.noise_every == 0 and grid.N * grid.R > 1

    def step_begins(self, step: int):
        if self.run.order.leg(step).step == step:
            self.skips.accepted.clear()  # other data or another batch: its loss and norm are on another level
        self.tensors.node_squared = {} if self.measures_noise(step) else None

    def step_ends(self, step: int, *measured) -> dict:
        """See check."""
        try:
            return self.check(step, *measured)
        except health.CheckFailed:
            self.run.out.progress(step, "unhealthy")
            raise

    def check(self, step: int, told: Told, counts: np.ndarray, balance: Balance, skipped: str) -> dict:
        """What can be told after a step; returns its metrics. counts: [world, 2] targets and tokens of the step."""
        hp, m, grid, out = self.run.hp, self.run.m, self.run.grid, self.run.out
        problem = health.count_problem(balance.counts_LX, counts[:, 1].sum(), m.top_k)
        if problem := problem or self.repeats.problem(step, told.digest):
            raise health.CheckFailed(problem)
        if skipped:
            out.warn(f"step {step} is skipped, {len(self.skips.streak)} in a row: {skipped}")
            return {"skipped": self.skips.total, "skipped_why": skipped, "rows_digest": told.digest}
        if self.fresh and step == 1:
            out.warn(health.loss_warning(told.loss, m.vocab))
        if self.moves:
            self.moves.accepted(rate(self.run, step - 1))
        if hp.check_every and step % hp.check_every == 0:
            health.check_state(self.tensors, grid, self.m)
        if self.measures_noise(step - 1):
            self.noise.add(told.node_parts, told.parts_squared, counts[:, 0].reshape(-1, grid.E).sum(1))
        return {"skipped": self.skips.total, "noise_tokens": self.noise.tokens(), "rows_digest": told.digest}


class Clock:
    """Times and bytes of a step, as metrics. On an accelerator the waits that are over count: those of the optimizer, which still
    runs when the next step begins, in that one."""

    def __init__(self, device: torch.device):
        self.waited_s, self.waited, self.sent = WIRE.waited_s, WIRE.waited.copy(), WIRE.sent.copy()
        self.start = time.perf_counter()
        self.on_host = device.type == "cpu"

    def update_begins(self):
        self.update = time.perf_counter()

    def step_ends(self, times: list[float]) -> dict:
        """Also puts the step's seconds at the end of times."""
        now = time.perf_counter()
        times.append(now - self.start)
        WIRE.settle()
        return {"step_s": times[-1], "optimizer_s": now - self.update if self.on_host else None,
                "exposed_comm_s": WIRE.waited_s - self.waited_s, "exposed_s": dict(WIRE.waited - self.waited),
                "sent_bytes": {" ".join(key): count for key, count in (WIRE.sent - self.sent).items()}}


def why_stop(stop: launch.StopRequest, end_of_job: float | None, times: list[float], held_out_s: float,
             saver: checkpoint.Saver) -> str | None:
    """The signal that asked for an end; or the end of the job, when it is so near that after another step there might be no time
    for a checkpoint. times: of the steps so far, in seconds; held_out_s: of the held-out losses that may lie before it."""
    needs_s = launch.JOB_MARGIN_S + 2 * max(times[-20:], default=0.0) + held_out_s + saver.needs_s
    if end_of_job and time.time() + needs_s > end_of_job:
        return stop.requested or f"the end of the job at {time.strftime('%H:%M:%S', time.localtime(end_of_job))}"
    return stop.requested


def load_of(balance: Balance, grid: Grid) -> dict:
    """Load of each layer's experts, largest over mean; how many experts got no token; the same of the ranks of a node (all nodes
    together), the mean over layers: with E ranks up to E. And the losses that push the load, where there are any."""
    counts_LX, (aux, z) = balance.counts_LX, balance.losses()
    ranks_LE = counts_LX.unflatten(1, (grid.E, -1)).sum(-1)
    even = counts_LX.mean(1).clamp(min=1e-9)
    return {"expert_load": [round(x, 4) for x in (counts_LX.amax(1) / even).tolist()],
            "dead_experts": int((counts_LX == 0).sum()),
            "rank_load": round(float((ranks_LE.amax(1) / ranks_LE.mean(1).clamp(min=1e-9)).mean()), 4),
            **({"aux_loss": aux} if balance.aux else {}), **({"z_loss": z} if balance.z else {})}


def report(run: Run, step: int, measured: dict, flops: float, times: list[float]):
    """One line on the console, one object in metrics.jsonl. flops: per token; times: of the steps so far, in seconds."""
    hp, out = run.hp, run.out
    tokens, world, step_s = run.order.tokens_before(step) - run.order.tokens_before(step - 1), run.grid.world.size, times[-1]
    tok_s, peak = tokens / step_s, launch.peak_flops(run.device)
    out.metrics({"step": step, "tokens": run.order.tokens_before(step), **measured, "tok_s": tok_s, "tok_s_gpu": tok_s / world,
                 "mfu": tok_s / world * flops / peak if peak else None, **peak_memory(run.device)})
    recent = sorted(times[-20:])[len(times[-20:]) // 2]
    held_out = f"  held-out {measured['val_loss']:.4f}" if "val_loss" in measured else ""
    out.log(f"step {step}/{hp.steps}  loss {measured['loss']:.4f}  norm {measured['grad_norm']:.3f}  lr {measured['lr']:.2e}  "
            f"{tok_s:,.0f} tok/s  {step_s:.2f} s  eta {duration(recent * (hp.steps - step))}{held_out}")


def tell_profile(run: Run, profiler: timeline.Profiler, steps: list[dict]):
    """Rank 0 logs what the profiled steps consist of: of itself in full, of others in a line. steps: of this rank, if it was one."""
    out, device = run.out, run.device
    lines = share_texts(timeline.in_a_line(steps), run.grid, device)
    out.log(f"profile of {run.hp.profile}: {profiler.folder}")
    if profiler.mine:
        out.log("\n".join(f"  {line}" for line in timeline.in_words(steps, device.type)))
    for rank in profiler.ranks:
        if rank:
            out.log(f"  rank {rank}: {lines[rank]}")


def ledger() -> str:
    """What this rank has sent since it started, by group and purpose."""
    lines = [f"{group:<8} {purpose:<26} {WIRE.calls[group, purpose]:>9,} calls {count:>18,} bytes sent"
             for (group, purpose), count in sorted(WIRE.sent.items())]
    return "\n".join(["collectives of rank 0:", *lines])


if __name__ == "__main__":
    sys.exit(launch.run(main))
