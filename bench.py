"""Speed, memory and bytes of nano1t beside PyTorch's own ways to train the same model, on this machine's CPUs.

    python bench.py                                        one node of 4 ranks, two nodes of 2, and one process
    python bench.py --layout 2x2 --rounds 9 --steps 3      one layout, more turns and longer ones
    python bench.py --small --rounds 2                     tiny sizes: does it run?
    python bench.py --json results.jsonl                   also appends a JSON line per table
    python bench.py --tokenize --rounds 1                  text to token shards instead: each encoder, one process, 200 MB
    python bench.py --checkpoint                           saving and restoring beside torch.distributed.checkpoint, two ranks

Contenders, all with the same initial weights, batch, AdamW and clipping, bf16 products on fp32 masters:

    ours            train.schedule and optim.update
    fsdp            fully_shard, one group per block: every rank gathers all experts and processes its own tokens
    ep              experts parallel inside the node: tokens travel by all-to-all; fully_shard between the nodes
    autocast, cast  one process: torch.autocast, or weights cast where they are used
    ...+ckpt        the same with torch.utils.checkpoint for each block

Each contender's first losses, and its first gradient norm of every kind of parameter, must agree with ours, or the
program ends with an error. Of a peer's variants the fastest in two trial turns takes part. Then the contenders take
turns, round after round; all others wait for input. Ratios are formed inside a round, so that whatever else the machine
does meets both alike. Memory is that of the rank that needs most, bytes are those of an average rank and step.
"""

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import itertools
import json
import math
import os
import select
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import weakref
import zlib
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult  # not public yet
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import checkpoint as checkpoints
import corpus
import launch
import optim
import parallel
import tokenizer
import train
from model import Model, Segments, choose_experts, init_std, layer_shapes, model_of, rope_cache, uses_rope

# Settings of ours by layout: schedule's keep_layers, and fields of parallel.Transport. Where there is one node, no expert
# weights travel, and compressing them would only cost.
OURS = {
    "1x4": {"keep_layers": 7, "weights": "compute", "grads": torch.bfloat16, "dense": "step"},
    "2x2": {"keep_layers": 6, "weights": "bf16", "grads": torch.bfloat16, "dense": "step"},
    "single": {"keep_layers": 8, "weights": "compute", "grads": torch.float32, "dense": "layer"},
}
LAYOUTS = {"1x4": (1, 4), "2x2": (2, 2), "single": (1, 1)}  # nodes, ranks per node
SHARDED = (("fsdp", "fsdp+ckpt"), ("ep", "ep+ckpt"))  # peers as tuples of variants, of which one stays
PEERS = {"1x4": SHARDED, "2x2": SHARDED, "single": (("autocast", "autocast+ckpt", "cast", "cast+ckpt"),)}
COMPUTE = torch.bfloat16
LR, DECAY, CLIP, SEED = 1e-3, 0.1, 1.0, 0
LOSS_TOLERANCE, NORM_TOLERANCE = 0.02, 0.02  # in nats, of the first three losses; relative
TRIALS = 3  # turns of each variant
ANSWER_S = 900  # longest that a turn may take


def model_for(size: str) -> Model:
    """size: moe, dense, moe-small or dense-small."""
    changes = dict(layers=8, width=512, heads=8, kv_heads=2, head_dim=64, experts=32, top_k=4, groups=4,
                   expert_width=256, vocab=8192, seq_len=1024)
    if size.endswith("-small"):
        changes |= dict(layers=2, width=64, heads=4, head_dim=16, experts=8, expert_width=32, vocab=512, seq_len=128)
    if size.startswith("dense"):
        changes |= dict(experts=1, top_k=1, groups=1, expert_width=4 * changes["width"])
    return model_of("debug", **changes)


# ------------------------------------------------------------------------------------------------------------------
# The peers' model: plain modules. fp32 parameters that fully_shard gathers in bf16, so that .to() below does nothing;
# in one process it is the cast.
# ------------------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, w.shape, w.to(x.dtype), 1e-6)


def linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype))


def rotate(x_THK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x_THK.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x_THK.dtype)


class AllToAll(torch.autograd.Function):
    """Rows to the ranks of a group: send[j] of them to rank j, receive[i] from rank i."""

    @staticmethod
    def forward(ctx, x_PD, send, receive, group):
        ctx.back = receive, send, group
        out = x_PD.new_empty(sum(receive), x_PD.shape[1])
        dist.all_to_all_single(out, x_PD.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, d_PD):
        return AllToAll.apply(d_PD, *ctx.back), None, None, None


class Block(nn.Module):
    """One layer. node: the group that shares the experts out, or None where each rank has all of them."""

    def __init__(self, m: Model, layer: int, node, checkpointed: bool):
        super().__init__()
        self.m, self.node, self.checkpointed, self.rope = m, node, checkpointed, uses_rope(layer, m)
        local, F_, D = m.experts // (node.size() if node else 1), m.expert_width, m.width
        shapes = layer_shapes(m) | {"gate_up": (local, 2 * F_, D), "down": (local, D, F_)}
        for name, shape in shapes.items():
            if name != "router" or m.experts > 1:  # a dense model needs none
                self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))

    def forward(self, x_TD, segments, tables):
        if self.checkpointed:
            return checkpoint(self.layer, x_TD, segments, tables, use_reentrant=False, preserve_rng_state=False)
        return self.layer(x_TD, segments, tables)

    def layer(self, x_TD, segments, tables):
        x_TD = x_TD + self.attention(rms_norm(x_TD, self.attn_norm), segments, tables)
        h_TD = rms_norm(x_TD, self.moe_norm)
        return x_TD + (self.moe(h_TD) if self.m.experts > 1 else self.dense(h_TD))

    def attention(self, h_TD, segments, tables):
        m, T = self.m, len(h_TD)
        q_THK = rms_norm(linear(h_TD, self.q).view(T, m.heads, m.head_dim), self.q_norm)
        k_TJK = rms_norm(linear(h_TD, self.k).view(T, m.kv_heads, m.head_dim), self.k_norm)
        v_TJK = linear(h_TD, self.v).view(T, m.kv_heads, m.head_dim)
        if self.rope:
            q_THK, k_TJK = rotate(q_THK, *tables), rotate(k_TJK, *tables)
        y_THK = []
        for a, b in itertools.pairwise(segments.bounds):  # fp32 would take as long
            q, k, v = (x[None, a:b].transpose(1, 2).to(COMPUTE) for x in (q_THK, k_TJK, v_TJK))
            y_THK.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
        return linear(torch.cat(y_THK).view(T, -1), self.o)

    def dense(self, h_TD):
        gate_TF, up_TF = linear(h_TD, self.gate_up[0]).chunk(2, -1)
        return linear(F.silu(gate_TF) * up_TF, self.down[0])

    def moe(self, h_TD):
        with torch.autocast(h_TD.device.type, enabled=False):
            logits_TX = F.linear(h_TD.float(), self.router.float())
        h_TD = h_TD.to(COMPUTE)
        chosen_Tk = choose_experts(logits_TX, logits_TX.new_zeros(()), self.m).long()
        weights_Tk = torch.softmax(logits_TX.gather(1, chosen_Tk), -1).to(COMPUTE)
        order_P = chosen_Tk.flatten().argsort(stable=True)
        token_P = order_P // self.m.top_k
        counts_X = torch.bincount(chosen_Tk.flatten(), minlength=self.m.experts)
        # of the ways to permute rows that torch offers, index_select and index_add are the fastest in both passes
        rows_PD, weight_P1 = h_TD.index_select(0, token_P), weights_Tk.flatten().index_select(0, order_P)[:, None]
        if self.node:
            y_PD = self.on_their_ranks(rows_PD, counts_X) * weight_P1
        else:
            y_PD = self.experts(rows_PD, counts_X, weight_P1)
        return torch.zeros_like(h_TD).index_add(0, token_P, y_PD)

    def experts(self, rows_PD, counts_X, weight_P1=None):
        """rows sorted by expert; the weight multiplies where rows are narrow."""
        offsets_X = counts_X.cumsum(0).to(torch.int32)
        gate_up_PU = F.grouped_mm(rows_PD, self.gate_up.to(COMPUTE).transpose(1, 2), offs=offsets_X)
        gate_PF, up_PF = gate_up_PU.chunk(2, -1)
        hidden_PF = F.silu(gate_PF) * up_PF
        hidden_PF = hidden_PF if weight_P1 is None else hidden_PF * weight_P1
        return F.grouped_mm(hidden_PF, self.down.to(COMPUTE).transpose(1, 2), offs=offsets_X)

    def on_their_ranks(self, rows_PD, counts_X):
        """Rows travel to the ranks of their experts, are sorted by expert there, processed, and travel back."""
        to_Ex = counts_X.view(self.node.size(), -1)
        from_Ex = torch.empty_like(to_Ex)
        dist.all_to_all_single(from_Ex, to_Ex, group=self.node)
        send, receive = to_Ex.sum(1).tolist(), from_Ex.sum(1).tolist()
        arrived_PD = AllToAll.apply(rows_PD, send, receive, self.node)
        experts_P = torch.arange(to_Ex.shape[1]).repeat(len(send)).repeat_interleave(from_Ex.flatten())
        order_P = experts_P.argsort(stable=True)
        arrival_P = torch.empty_like(order_P).scatter_(0, order_P, torch.arange(len(order_P)))
        y_PD = self.experts(arrived_PD.index_select(0, order_P), from_Ex.sum(0))
        return AllToAll.apply(y_PD.index_select(0, arrival_P), receive, send, self.node)


class Peer(nn.Module):
    """tokens, targets -> summed loss in nats."""

    def __init__(self, m: Model, node, checkpointed: bool):
        super().__init__()
        for name, shape in {"embed": (m.vocab, m.width), "final_norm": (m.width,), "head": (m.vocab, m.width)}.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))
        self.layers = nn.ModuleList(Block(m, i, node, checkpointed) for i in range(m.layers))

    def forward(self, tokens_T, targets_T, segments, tables):
        x_TD = F.embedding(tokens_T, self.embed)
        if not torch.is_autocast_enabled(x_TD.device.type):
            x_TD = x_TD.to(COMPUTE)
        for block in self.layers:
            x_TD = block(x_TD, segments, tables)
        logits_TV = linear(rms_norm(x_TD, self.final_norm), self.head)
        return F.cross_entropy(logits_TV.float(), targets_T, ignore_index=-1, reduction="sum")


def shard(model: Peer, experts_mesh):
    """fully_shard over all ranks; for the experts over experts_mesh, if given. Gradients become sums, not means."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # a mesh per parameter: a nested fully_shard of the experts would gather them once more for the recomputation
    own = ShardPlacementResult(Shard(0), FSDPMeshInfo(experts_mesh, shard_mesh_dim=0)) if experts_mesh else None

    def placement(p):
        return own if p.dim() == 3 else None

    policy = MixedPrecisionPolicy(param_dtype=COMPUTE, reduce_dtype=torch.float32, cast_forward_inputs=False)
    blocks = list(model.layers)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True, shard_placement_fn=placement)
    fully_shard(model, mesh=mesh, mp_policy=policy)  # the root's stay for the backward pass
    model.set_modules_to_forward_prefetch(blocks[:1])
    model.set_modules_to_backward_prefetch(blocks[-1:])
    for before, after in itertools.pairwise(blocks):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    model._set_unshard_async_op(True)  # there are no streams on a CPU: without it prefetching would overlap nothing
    for module in (model, *blocks):
        module.set_force_sum_reduction_for_comms(True)  # gloo can neither average nor scale
        for group in module._get_fsdp_state()._fsdp_param_groups:
            # set_gradient_divide_factor(1.0); but a group of one would make a copy to divide
            group.gradient_divide_factor = None if group.mesh_info.shard_mesh_size == 1 else 1.0


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@torch.no_grad()
def fill(model: Peer, m: Model, first_expert: int):
    """Draws what this rank has of each parameter, as parallel.init_state does. first_expert: of this rank's slot."""

    def draw(x: Tensor, name: str, start: int):
        x.copy_(parallel.initial_values(SEED, name, start, start + x.numel(), init_std(name, m)).view_as(x))

    for name, p in model.named_parameters():
        prefix, _, kind = name.rpartition(".")
        sharded = isinstance(p, DTensor)
        first_row = p.device_mesh.get_local_rank() * math.ceil(len(p) / p.device_mesh.size()) if sharded else 0
        if p.dim() < 3:
            draw(local(p), name, first_row * math.prod(p.shape[1:]))
        for j, expert in enumerate(local(p) if p.dim() == 3 else ()):
            parts = {"gate_up": ("gate", "up")}.get(kind, (kind,))
            for short, x in zip(parts, expert.chunk(len(parts))):
                draw(x, f"{prefix}.experts.{first_expert + first_row + j}.{short}", 0)


# ------------------------------------------------------------------------------------------------------------------
# Each contender's step: () -> (mean loss in nats, global gradient norm before clipping), and after a step, squares:
# () -> {kind of parameter: squared norm of the gradients that this rank owns}
# ------------------------------------------------------------------------------------------------------------------


def batch(m: Model, rank: int) -> train.DeviceRow:
    """A fixed row of four documents, whose last tokens have no target."""
    T = m.seq_len
    tokens = torch.from_numpy(np.random.default_rng((SEED, rank)).integers(0, m.vocab, T))
    bounds = [0, T // 8, T // 4 + T // 8, T // 2, T]
    targets = tokens.roll(-1)
    targets[torch.tensor(bounds[1:]) - 1] = -1
    return train.DeviceRow(tokens, targets, Segments(bounds, torch.tensor(bounds, dtype=torch.int32)), T - 4)


def our_step(m: Model, layout: str, where: launch.Place) -> tuple[Callable, Callable]:
    row, settings = batch(m, where.rank), dict(OURS[layout])
    keep_layers, transport = settings.pop("keep_layers"), parallel.Transport(compute=COMPUTE, **settings)
    grid = parallel.make_grid(where.rank, where.world, where.ranks_per_node, 1, m)
    parallel.check_transport(transport, m, grid)
    state = parallel.init_state(m, grid, SEED, where.device)
    optim.init_moments(state, "adamw")
    plan = optim.plan_muon(state, grid, m, "adamw")
    parallel.start_refresh(state, grid, transport)()
    targets, count = row.n_targets * where.world, itertools.count()

    def step():
        sums = torch.stack(train.schedule([row], state, grid, m, transport, 1 / targets, keep_layers=keep_layers)).tolist()
        loss, squared = parallel.exchange(sums, grid, where.device).sum(0)
        norm = math.sqrt(squared)
        optim.update(state, grid, plan, "adamw", LR, DECAY, optim.clip_scale(norm, CLIP), next(count), transport)
        return loss / targets, norm

    def squares():
        return by_kind((name, float(square)) for name, square in state.squared.items())

    return step, squares


def peer_step(contender: str, m: Model, where: launch.Place) -> tuple[Callable, Callable]:
    kind, _, checkpointed = contender.partition("+")
    node, experts_mesh, slot = None, None, 0
    if kind == "ep":
        mesh = init_device_mesh("cpu", (where.world // where.ranks_per_node, where.ranks_per_node),
                                mesh_dim_names=("column", "node"))
        node, experts_mesh, slot = mesh.get_group("node"), mesh["column"], where.local_rank
    model = Peer(m, node, bool(checkpointed))
    if where.world > 1:
        shard(model, experts_mesh)
    model.to_empty(device="cpu")
    fill(model, m, slot * m.experts // where.ranks_per_node)
    optimizer = adamw(model)
    row, tables = batch(m, where.rank), rope_cache(m.rope_theta, m.head_dim, m.seq_len, where.device)
    tables = [table[:, None] for table in tables]
    targets, params, norms = row.n_targets * where.world, list(model.parameters()), []

    def step():
        with torch.autocast("cpu", COMPUTE, enabled=kind == "autocast"):
            loss = model(row.tokens_T, row.targets_T, row.segments, tables) / targets
        loss.backward()
        # every value has one owner, whatever the mesh, so that a plain sum over all ranks is the global norm
        grads = [local(p.grad) for p in params]
        norms[:] = torch._foreach_norm(grads)
        sums = torch.stack([loss.detach(), torch.stack(norms).square().sum()]).double()
        if where.world > 1:
            dist.all_reduce(sums)
        mean, norm = float(sums[0]), math.sqrt(sums[1])
        if norm > CLIP:
            torch._foreach_mul_(grads, CLIP / norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return mean, norm

    def squares():
        names = (name for name, _ in model.named_parameters())
        return by_kind((rule(name).bucket, float(norm) ** 2) for name, norm in zip(names, norms))

    return step, squares


def by_kind(values) -> dict[str, float]:
    """Sums of (name, value) by the last part of the name."""
    total = Counter()
    for name, value in values:
        total[name.rpartition(".")[2]] += value
    return total


def rule(name: str) -> parallel.Rule:
    """That of a peer's parameter; gate and up are one there."""
    return parallel.OWNERSHIP[name.rpartition(".")[2].replace("gate_up", "gate")]


def adamw(model: Peer) -> torch.optim.AdamW:
    """Fused; one group per mesh and decay, since one call cannot mix meshes."""
    groups = {}
    for name, p in model.named_parameters():
        groups.setdefault((p.dim() == 3, rule(name).decay), []).append(p)
    groups = [{"params": params, "weight_decay": DECAY if decays else 0.0} for (_, decays), params in groups.items()]
    return torch.optim.AdamW(groups, lr=LR, betas=optim.BETAS, eps=optim.EPS, fused=True)


# ------------------------------------------------------------------------------------------------------------------
# A worker: one rank of a contender
# ------------------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations have seen and that are still alive; `peak` is their largest sum.

    A storage counts once, whatever views there are, with its size at the moment, since fully_shard empties and refills
    storages. A step sees all that persists, so in a second one all counts from the start. What a kernel or a collective
    allocates for itself stays unseen."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = weakref.WeakValueDictionary(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # the operation comes back on the local tensors
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            if isinstance(x, Tensor) and not isinstance(x, DTensor):
                storage = x.untyped_storage()
                self.storages[storage._cdata] = storage
        self.peak = max(self.peak, sum(storage.nbytes() for storage in list(self.storages.values())))
        return out


def resident_mb(field: str, reset: bool = False) -> float:
    """VmRSS or VmHWM (its peak) of this process in MB (10^6 bytes); with reset the peak starts again from here."""
    lines = Path("/proc/self/status").read_text().splitlines()
    value = next(int(line.split()[1]) for line in lines if line.startswith(field))
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return value * 1024 / 1e6


def measure_memory(step: Callable, before_mb: float) -> dict:
    """MB of this rank: peak of resident memory so far, above before_mb; peak of live tensors in one more step."""
    result = {"resident_mb": resident_mb("VmHWM") - before_mb}
    with LiveBytes() as live:
        step()
        live.peak = 0
        step()
    return result | {"tensors_mb": live.peak / 1e6}


def worker(contender: str, size: str, layout: str):
    """Answers each line of input with one line of JSON: `run K` with what K steps gave and the seconds of each but the
    first, `memory 0` with MB."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints
    if contender != "ours":
        import torch._dynamo  # noqa: F401  peers import it in their first step: modules are not the memory in question

    where = launch.place()
    launch.setup(where, timeout_s=ANSWER_S)
    before_mb, m = resident_mb("VmRSS", reset=True), model_for(size)
    step, squares = our_step(m, layout, where) if contender == "ours" else peer_step(contender, m, where)
    # glibc keeps what is freed, and all contenders together would not fit into this machine's memory
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        command, steps = line.split()
        if command == "memory":
            print(json.dumps(measure_memory(step, before_mb)), file=answers)
            continue
        done = [step()]  # not timed: what was given back while others had their turns comes back
        dist.barrier()
        start = time.perf_counter()
        done += [step() for _ in range(int(steps) - 1)]
        dist.barrier()
        seconds = (time.perf_counter() - start) / max(1, int(steps) - 1)
        losses, norms = zip(*done)
        give_back(0)
        result = {"seconds": seconds, "losses": losses, "norms": norms, "squares": squares()}
        print(json.dumps(result), file=answers)


# ------------------------------------------------------------------------------------------------------------------
# Saving and restoring
# ------------------------------------------------------------------------------------------------------------------


FOLDERS = {"ours": "ours", "torch.distributed.checkpoint": "dcp"}


def checkpoint_ways(folder: Path, m: Model, where: launch.Place) -> tuple[dict, list[Tensor], int]:
    """Contender -> (save, restore) of the same live tensors, these, and their bytes on this rank. Ours writes and compares
    checksums; restoring begins with files that are not in memory. Both end a save when everything is on the disk."""
    grid = parallel.make_grid(where.rank, where.world, where.ranks_per_node, 1, m)
    state = parallel.init_state(m, grid, SEED, where.device)
    optim.init_moments(state, "muon")
    for kinds in state.moments.values():
        for x in kinds.values():
            x.normal_()
    saver, mesh = checkpoints.Saver(folder / "ours", state, grid), init_device_mesh("cpu", (where.world,))
    shards = {name: DTensor.from_local(x, mesh, [Shard(0)]) for name, x in saver.tensors.items()}
    options = {"storage_writer": FileSystemWriter(folder / "dcp", overwrite=True)}

    def ours_save():
        saver.start(1, {})
        if error := saver.wait().error:
            raise RuntimeError(error)

    def ours_restore():
        checkpoints.load(checkpoints.directory(folder / "ours", 1), state, grid, m)

    ways = {"ours": (ours_save, ours_restore), "torch.distributed.checkpoint": (
        lambda: dcp.save(shards, **options), lambda: dcp.load(shards, storage_reader=FileSystemReader(folder / "dcp")))}
    return ways, list(saver.tensors.values()), sum(x.nbytes for x in saver.tensors.values())


def checkpoint_worker(folder: str, size: str, rounds: str):
    """Takes turns and leaves what each of them took, in seconds and in seconds of CPU, in a file of this rank."""
    where, root = launch.place(), Path(folder)
    launch.setup(where)
    ways, tensors, nbytes = checkpoint_ways(root, model_for(size), where)
    sums = [zlib.crc32(x.numpy()) for x in tensors]
    found = {f"{name} {what}": [] for name in ways for what in ("save", "restore")}
    for r in range(int(rounds) + 1):  # the first is not counted
        for name in list(ways)[:: 1 if r % 2 else -1]:
            for what, action in zip(("save", "restore"), ways[name]):
                for x in tensors if what == "restore" else ():
                    x.zero_()
                dist.barrier()
                if where.rank == 0:
                    (forget_files if what == "restore" else partial(shutil.rmtree, ignore_errors=True))(root / FOLDERS[name])
                dist.barrier()
                began, cpu = time.perf_counter(), time.process_time()
                action()
                cpu = time.process_time() - cpu
                dist.barrier()
                found[f"{name} {what}"].append((time.perf_counter() - began, cpu))
            if sums != [zlib.crc32(x.numpy()) for x in tensors]:
                raise Failure(f"{name}: what was restored is not what was saved")
    (root / f"found.{where.rank}.json").write_text(json.dumps({"bytes": nbytes, "turns": {k: v[1:] for k, v in found.items()}}))


def forget_files(folder: Path):
    """Drops them from memory at one blow, after all have been read: so whoever reads next finds free pages that are there. In a
    virtual machine the host may first have to bring in pages that have long been free, at several times the cost of the read."""
    files = [open(path, "rb", buffering=0) for path in folder.rglob("*.*") if path.is_file()]
    for file in files:
        while file.read(1 << 20):
            pass
    for file in files:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.close()


def bench_checkpoint(size: str, rounds: int, results: Path | None):
    """Prints the table."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        launcher = [sys.executable, "launch.py", "--scheduler=none", "--ranks-per-node", "2", "--threads", "1", "--"]
        command = [*launcher, "bench.py", "checkpoint-worker"]
        subprocess.run([*command, folder, size, str(rounds)], cwd=Path(__file__).parent, check=True)
        ranks = [json.loads((Path(folder) / f"found.{rank}.json").read_text()) for rank in range(2)]
    total = sum(rank["bytes"] for rank in ranks)
    print(f"{total / 1e6:,.0f} MB of masters and momentum on 2 ranks, {rounds} rounds, medians\n"
          f"  {'':<38}{'MB/s':>8}{'CPU s':>8}  time of this / of ours")
    median, line = statistics.median, {"bytes": total, "turns": {}}
    for key in ranks[0]["turns"]:
        turns = line["turns"][key] = [[rank["turns"][key][r] for rank in ranks] for r in range(rounds)]
        seconds = [max(rank[0] for rank in turn) for turn in turns]
        own = [max(rank[0] for rank in turn) for turn in line["turns"]["ours " + key.split()[-1]]]
        ratios = [a / b for a, b in zip(seconds, own)]
        print(f"  {key:<38}{total / 1e6 / median(seconds):>8,.0f}{median(sum(rank[1] for rank in turn) for turn in turns):>8.2f}"
              f"  {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    if results:
        with open(results, "a") as file:
            file.write(json.dumps({"checkpoint": size, "torch": torch.__version__, **line}) + "\n")


# ------------------------------------------------------------------------------------------------------------------
# The program: starts the workers, gives each contender its turns, prints the tables
# ------------------------------------------------------------------------------------------------------------------


class Failure(Exception):
    """A worker failed, or contenders do not do the same work."""


class Team(NamedTuple):
    """The processes of one contender."""

    name: str
    ranks: list[subprocess.Popen]
    errors: list  # files with what each rank wrote to stderr


TEAMS: list[Team] = []  # all that were started and not yet ended


def start(name: str, size: str, layout: str) -> Team:
    nodes, per_node = LAYOUTS[layout]
    names, mark = [f"node{n}" for n in range(nodes)], f"bench-{os.getpid()}"
    environments = launch.rank_environments(names, per_node, launch.meeting_port(None), None, mark)
    team, libc, parent = Team(name, [], []), ctypes.CDLL(None), os.getpid()
    TEAMS.append(team)
    for environment in environments:
        team.errors.append(tempfile.TemporaryFile())
        team.ranks.append(subprocess.Popen(
            [sys.executable, __file__, "worker", name, size, layout], env=environment | {"CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=team.errors[-1], text=True, start_new_session=True,
            preexec_fn=partial(launch.die_with_parent, libc, parent)))
    answers(team)
    return team


def answers(team: Team) -> list:
    """One line of JSON from each rank. Raises Failure, with what the ranks wrote to stderr, if one ends instead."""
    got, waiting = {}, {process.stdout: rank for rank, process in enumerate(team.ranks)}
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], ANSWER_S)
        if not ready:
            raise Failure(f"{team.name}: no answer from ranks {sorted(waiting.values())} within {ANSWER_S} s")
        for pipe in ready:
            rank, line = waiting.pop(pipe), pipe.readline()
            if not line:
                time.sleep(1)  # the others mostly fail as well, and say less about why
                raise Failure("\n".join(f"{team.name}, rank {r}: exit code {process.poll()}\n{tail(team.errors[r])}"
                                        for r, process in enumerate(team.ranks) if process.poll() is not None))
            got[rank] = json.loads(line)
    return [got[rank] for rank in sorted(got)]


def tail(file) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")[-2000:]


def ask(team: Team, command: str) -> list:
    for process in team.ranks:
        with contextlib.suppress(BrokenPipeError):  # it has ended: answers() will say why
            process.stdin.write(command + "\n")
            process.stdin.flush()
    return answers(team)


def end(team: Team):
    for process in team.ranks:
        launch.kill_group(process.pid)
    for process, errors in zip(team.ranks, team.errors):
        process.wait()
        with contextlib.suppress(BrokenPipeError):  # what an ended worker did not read
            process.stdin.close()
        process.stdout.close()
        errors.close()
    TEAMS.remove(team)


def own_loopback() -> bool:
    """Moves this process, and all that it will start, into a network namespace of its own; False where it may not."""
    new_user, new_net, set_flags, up_and_running = 0x10000000, 0x40000000, 0x8914, 0x41
    unshare = getattr(ctypes.CDLL(None), "unshare", None)
    if unshare is None or unshare(new_net if os.geteuid() == 0 else new_user | new_net) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        fcntl.ioctl(s, set_flags, struct.pack("16sh", b"lo", up_and_running))
    return True


def loopback_bytes() -> int:
    """That were sent so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


def turn(team: Team, steps: int, result: dict):
    """Runs some steps and one before them, and notes seconds and bytes per step in the contender's result."""
    before = loopback_bytes()
    result["seconds"].append(ask(team, f"run {steps + 1}")[0]["seconds"])
    result["bytes"].append((loopback_bytes() - before) / len(team.ranks) / (steps + 1))


def enter(name: str, size: str, layout: str, ours: dict | None) -> tuple[Team, dict]:
    """Starts a contender and compares its first steps, which also warm it up, with ours."""
    team = start(name, size, layout)
    first, later = ask(team, "run 1"), ask(team, "run 2")
    losses = first[0]["losses"] + later[0]["losses"]
    norms = {kind: math.sqrt(sum(rank["squares"][kind] for rank in first)) for kind in first[0]["squares"]}
    norms["all"] = first[0]["norms"][0]
    line = f"  {name:<14}losses {' '.join(f'{loss:.4f}' for loss in losses)}  gradient norm {norms['all']:.4f}"
    if ours:
        apart = max(abs(a - b) for a, b in zip(losses, ours["losses"]))
        off = {kind: norms[kind] / ours["norms"][kind] - 1 for kind in ours["norms"]}
        worst = max(off, key=lambda kind: (off[kind] != off[kind], abs(off[kind])))  # NaN is worst
        line += f"  most off: {worst} {off[worst]:+.2%}"
        if not (apart <= LOSS_TOLERANCE and abs(off[worst]) <= NORM_TOLERANCE):
            raise Failure(f"not the same work as ours; allowed are {LOSS_TOLERANCE} and {NORM_TOLERANCE:.0%}\n{line}")
    print(line, flush=True)
    return team, {"losses": losses, "norms": norms, "seconds": [], "bytes": []}


def leave(team: Team, result: dict):
    """Measures memory, the largest of all ranks, and ends the contender."""
    for rank in ask(team, "memory 0"):
        for key, value in rank.items():
            result[key] = max(value, result.get(key, 0))
    end(team)


def contest(size: str, layout: str, rounds: int, steps: int) -> dict[str, dict]:
    """All contenders of a layout, ours first; `tried` are those that had no turns but in the trial."""
    teams, results, fastest = {}, {}, []
    teams["ours"], results["ours"] = enter("ours", size, layout, None)
    for variants in PEERS[layout]:
        for name in variants:  # one after the other: together they would need more memory than there may be
            team, results[name] = enter(name, size, layout, results["ours"])
            for _ in range(TRIALS):
                turn(team, steps, results[name])
            results[name]["tried"] = True
            leave(team, results[name])
        fastest.append(min(variants, key=lambda name: min(results[name]["seconds"])))
    for name in fastest:
        teams[name], results[name] = enter(name, size, layout, results["ours"])
    names = list(teams)
    for r in range(rounds):
        first = r % len(names)
        for name in names[first:] + names[:first]:
            turn(teams[name], steps, results[name])
    for name in names:
        leave(teams[name], results[name])
    return results


def table(results: dict[str, dict], tokens: int) -> str:
    """tokens: of all ranks in a step. Puts speeds and ratios into the results as well."""
    lines = [f"  {'':<14}{'tokens/s':>10}{'tensors MB':>12}{'resident MB':>13}{'sent MB':>10}  speed of ours / of this"]
    for name, r in results.items():
        r["tokens_per_s"], ratio = tokens / statistics.median(r["seconds"]), ""
        if r.get("tried"):
            ratio = "slower in its trial turns"
        elif name != "ours":
            r["ratios"] = [theirs / own for theirs, own in zip(r["seconds"], results["ours"]["seconds"])]
            ratio = f"{statistics.median(r['ratios']):.2f} ({min(r['ratios']):.2f} to {max(r['ratios']):.2f})"
        lines.append(f"  {name:<14}{r['tokens_per_s']:>10,.0f}{r['tensors_mb']:>12,.1f}{r['resident_mb']:>13,.1f}"
                     f"{statistics.median(r['bytes']) / 1e6:>10,.2f}  {ratio}")
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizing
# ----------------------------------------------------------------------------------------------------------------------

TEXT_BYTES, TEXT_VOCAB = 200_000_000, 32_768


def installed_text(path: Path, n_bytes: int) -> tuple[int, int]:
    """Writes a .jsonl of the sources and texts that are installed here, each content once and in hash order, so that they are
    mixed. Every thousandth document gets the names of control pieces. Returns documents and bytes of text."""
    found: dict[bytes, Path] = {}
    for root in {Path(p).resolve() for p in sys.path if Path(p).is_dir() and Path(p).resolve() != Path(__file__).parent}:
        for file in root.rglob("*"):
            if file.suffix in (".py", ".md", ".rst", ".txt") and file.is_file() and 0 < file.stat().st_size <= corpus.MAX_SOURCE:
                found.setdefault(hashlib.sha256(file.read_bytes()).digest(), file)
    documents = written = 0
    with open(path, "w") as out:
        for key in sorted(found):
            text = found[key].read_text(errors="replace") + ("" if documents % 1000 else "</s> <unk> <0x0A>\n")
            out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            documents, written = documents + 1, written + len(text.encode())
            if written >= n_bytes:
                break
    return documents, written


def tokenize_once(source: Path, model: Path, encoder: str, out: Path) -> tuple[float, float, float]:
    """CPU and wall seconds, and peak memory in MB, of one process that makes a token set of a .jsonl file."""
    command = [sys.executable, Path(__file__).parent / "data.py", "tokenize", f"--data={source}", f"--vocab={TEXT_VOCAB}",
               f"--tokenizer={model}", "--workers=1", f"--encoder={encoder}", f"--out={out}", f"--cache={out.parent}"]
    # the peak of a child counts what its parent held when it forked, so a small process stands in between
    measure = ("import json, os, subprocess, sys; _, status, used = os.wait4(subprocess.Popen(sys.argv[1:], stdout=2).pid, 0);"
               "print(json.dumps([status, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))")
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", measure, *map(str, command)], capture_output=True, text=True, check=True)
    status, cpu_s, peak_mb = json.loads(done.stdout)
    if status:
        raise Failure(f"{encoder}: {done.stderr}")
    return cpu_s, time.perf_counter() - start, peak_mb


def tokenize_bench(n_bytes: int, rounds: int) -> dict[str, dict]:
    """Prints a table; raises Failure where an encoder's files differ from plain SentencePiece's by a byte."""
    encoders = ["sentencepiece", "cache"] + ["gigatoken"] * bool(importlib.util.find_spec("gigatoken"))
    results = {encoder: {"cpu_s": [], "wall_s": [], "peak_mb": {}} for encoder in encoders}
    with tempfile.TemporaryDirectory() as folder:
        whole, quarter, model = Path(folder, "text.jsonl"), Path(folder, "quarter.jsonl"), Path(folder, "bench.model")
        documents, written = installed_text(whole, n_bytes)
        with open(whole) as text:
            model.write_bytes(tokenizer.train_tokenizer(
                corpus.sample_lines(json.loads(line)["text"] for line in text), min(TEXT_VOCAB, written // 500)))
        installed_text(quarter, written // 4)
        print(f"{documents:,} documents, {written / 1e6:.1f} MB, {rounds} rounds", flush=True)
        for n in range(rounds):
            for encoder in encoders:
                for source in (quarter, whole) if n == 0 else (whole,):
                    out = Path(folder, f"{source.stem}-{encoder}")
                    shutil.rmtree(out, ignore_errors=True)
                    cpu_s, wall_s, peak_mb = tokenize_once(source, model, encoder, out)
                    results[encoder]["peak_mb"][source.stem] = peak_mb
                results[encoder]["cpu_s"].append(cpu_s)
                results[encoder]["wall_s"].append(wall_s)
        for encoder in encoders:
            for file in Path(folder, f"text-{encoder}").iterdir():
                if file.read_bytes() != Path(folder, "text-sentencepiece", file.name).read_bytes():
                    raise Failure(f"{encoder}: {file.name} differs from SentencePiece's")
    print(f"  {'':<14}{'MB/s of CPU':>12}{'MB/s':>8}{'peak MB, a quarter':>20}{'whole':>7}  times SentencePiece's, CPU and wall")
    for encoder, r in results.items():
        r["ratios"] = [[a / b for a, b in zip(results["sentencepiece"][k], r[k])] for k in ("cpu_s", "wall_s")]
        cpu, wall = statistics.median(r["cpu_s"]), statistics.median(r["wall_s"])
        print(f"  {encoder:<14}{written / 1e6 / cpu:>12.1f}{written / 1e6 / wall:>8.1f}{r['peak_mb']['quarter']:>20.0f}"
              f"{r['peak_mb']['text']:>7.0f}  {statistics.median(r['ratios'][0]):.2f}  {statistics.median(r['ratios'][1]):.2f}")
    print("  all files are the same, byte for byte")
    return results


def parse(argv: list[str]) -> argparse.Namespace:
    def positive(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
        return int(text)

    parser = argparse.ArgumentParser(prog="bench.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=LAYOUTS, action="append",
                        help="nodes x ranks per node, or single; may be repeated (default: all)")
    parser.add_argument("--checkpoint", action="store_true", help="saving and restoring instead")
    parser.add_argument("--rounds", type=positive, default=5, help="in each, every contender has one turn (default 5)")
    parser.add_argument("--steps", type=positive, default=2, help="of a turn (default 2)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, whose figures say nothing")
    parser.add_argument("--tokenize", action="store_true", help="compare the encoders of data.py tokenize instead")
    parser.add_argument("--json", metavar="FILE", type=Path, help="append a line of JSON for each table")
    args = parser.parse_args(argv)
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json={args.json}: no directory {args.json.absolute().parent}")
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    if args.tokenize:
        try:
            results = tokenize_bench(TEXT_BYTES // (200 if args.small else 1), args.rounds)
        except Failure as failure:
            print(f"error: {failure}", file=sys.stderr)
            return 1
        if args.json:
            with open(args.json, "a") as file:
                file.write(json.dumps({"tokenize": results}) + "\n")
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda n, _: sys.exit(128 + n))
    alone, cores = own_loopback(), len(os.sched_getaffinity(0))
    print(f"torch {torch.__version__}, {cores} cores; bytes sent are {'its own' if alone else 'of all that runs here'}")
    try:
        if args.checkpoint:
            bench_checkpoint("moe-small" if args.small else "moe", args.rounds, args.json)
            return 0
        for layout in args.layout or LAYOUTS:
            for kind in ("moe", "dense") if layout == "single" else ("moe",):
                size = f"{kind}{'-small' if args.small else ''}"
                m, ranks = model_for(size), math.prod(LAYOUTS[layout])
                print(f"\n{layout}, {size}: {ranks} ranks x {m.seq_len} tokens, {m.layers} layers of width {m.width}, "
                      f"top {m.top_k} of {m.experts} experts; {args.rounds} rounds of {args.steps} steps", flush=True)
                results = contest(size, layout, args.rounds, args.steps)
                print(table(results, ranks * m.seq_len), flush=True)
                if args.json:
                    line = {"layout": layout, "size": size, "rounds": args.rounds, "steps": args.steps, "cores": cores,
                            "torch": torch.__version__, "own_loopback": alone, "model": asdict(m), "results": results,
                            "settings": {name: str(value) for name, value in OURS[layout].items()}}
                    with open(args.json, "a") as file:
                        file.write(json.dumps(line) + "\n")
    except Failure as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        for team in list(TEAMS):
            end(team)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["checkpoint-worker"]:
        checkpoint_worker(*sys.argv[2:])
    elif sys.argv[1:2] == ["worker"]:
        worker(*sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1:]))
