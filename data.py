"""Token shards in, packed rows out: what the trainer reads, and how it came to be.

    python data.py prepare --data="7 notes.jsonl 3 books.txt" --vocab=4096 --seq_len=512    # prints the directory
    python data.py tokenize --data=texts/ --vocab=32768 --out=sets/texts                    # only the tokens, by all cores
    python data.py show data/rows-0123456789abcdef --row=3                                  # one row, segment by segment
    python data.py verify /sets/foreign_text_document --tokenizer=their.model               # every byte; of ours, too
    python data.py --help                                                                   # all commands

--data is a text file or a directory of them, "embedded", token shards (a tokens-* directory, or a data set in Megatron's
format: a prefix or a directory of pairs), or several of these, each after its weight. `prepare` runs these stages. Each is a
directory under --cache whose name is a hash of all that determines its content, so a changed input is another directory, and
a finished one is never touched again:

    corpus-*             the embedded corpus only: prose.jsonl and code.jsonl
    tokens-*             documents: cleaned, counted, 1% of them, chosen by content hash, held out for validation; a SentencePiece
                         tokenizer (given, or trained on training documents only); token shards in Megatron's format (shards.py)
    tokenizer-*          of a blend of texts: trained on all in proportion
    rows-*               one corpus, its documents packed into rows of seq_len tokens      <- the trainer reads these
    blend-*              several rows-*, and their weights

    train-00000.rows     [R, S+1] u16 or i32   S inputs and the last one's successor (NONE where it has none)
    train.bounds         [*]      i32          per row 0, ..., S: where documents begin and end inside it
    train.offsets        [R+1]    i64          row r's bounds are bounds[offsets[r]:offsets[r+1]]
    train.keys           [R]      u8           cost of the row, on order.py's scale
    val*                                       the held-out documents, packed the same way
    tokenizer.model, manifest.json             hashes of every file, counts, seed, versions

Targets are not stored: they follow from the bounds. No target crosses a document's end. In which order rows are visited:
order.py.
"""
import argparse
import contextlib
import errno
import hashlib
import math
import os

if __name__ == "__main__":  # before numpy is imported, whose threads for matrix products would spin once, for nothing
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import queue
import shlex
import shutil
import sys
import threading
import time
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush, heapreplace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from corpus import SUFFIXES, check_numbers, check_source, describe, make_directory, read_tokenizer, tokenize, tokenizer_of_texts
from errors import ConfigError
from order import (BALANCE, BLOCK_STEPS, LINEAR_TOKENS, Order, Source, Stage, balanced, blend, cost_keys, dealt, exact_weight,
                   integer_weights, shuffled, split_tree)
from shards import FORMAT, SPLITS, Shards, digest, file_sha256, is_shards, read_manifest, stage, sync, token_dtype, verify_shards
from tokenizer import KINDS, load_tokenizer

BLOCK_ROWS = 1536                # rows that are packed together
LONG_SHARE = 64                  # documents of at least seq_len / LONG_SHARE tokens, or of LONG_TOKENS, are placed whole where
LONG_TOKENS = 1024               # they fit; of shorter ones little is lost when they are cut
SHARD_BYTES = 1 << 30            # about so large is a file of rows, at least a block; it is what a killed packing loses
WRITE_TOKENS = 1 << 22           # tokens that are gathered and written at a time
PACKINGS = ("fit", "stream")
PACK_FORMAT = 2                  # raise it when packing would make other rows of the same tokens
OPEN_FILES = 64                  # files of rows that a process keeps open


# ---------------------------------------------------------------------------------------------------------------------
# Packing: which part of which document lies in which row. Lengths are enough.
# ---------------------------------------------------------------------------------------------------------------------

class Pieces(NamedTuple):
    """Parts of documents in rows, in the order in which they lie there; int64 [G] each."""
    row_G: np.ndarray            # from 0
    document_G: np.ndarray       # number in the packing order
    from_G: np.ndarray           # first token, inside the document
    length_G: np.ndarray         # > 0


def document_order(n: int, seed: int, stream: int) -> np.ndarray:
    """int64 [n]: a random order keyed by (seed, stream). Raw generator bits and a stable sort: unlike
    Generator.permutation these are promised to stay the same in every numpy version."""
    bits = np.random.PCG64(np.random.SeedSequence([seed, stream])).random_raw(n)
    return np.argsort(bits, kind="stable")


def by_row(pieces: Pieces) -> Pieces:
    """In the order of their rows; within a row as they are."""
    order_G = np.argsort(pieces.row_G, kind="stable")
    return Pieces(*(x[order_G] for x in pieces))


def flow(length_N: np.ndarray, space_R: np.ndarray) -> Pieces:
    """Lays documents end to end into the space of the rows, cut where a row is full. Numbers them from 0."""
    end_N, room_R = np.cumsum(length_N), np.cumsum(space_R)
    total = end_N[-1] if len(end_N) else 0
    cut_G = np.union1d(end_N, room_R[room_R < total]).astype(np.int64)
    cut_G = cut_G[cut_G > 0]
    begin_G = np.append(0, cut_G[:-1])[:len(cut_G)]
    n_G = np.searchsorted(end_N, begin_G, "right")
    return Pieces(np.searchsorted(room_R, begin_G, "right"), n_G, begin_G - (end_N - length_N)[n_G], cut_G - begin_G)


def place(length_N: list[int], space_R: list[int]) -> np.ndarray:
    """int64 [N]: for documents of descending length, the row with the least cost so far (sum of squared lengths) of those with
    room, or -1. A row without room waits until documents are short enough, so a document costs O(log R)."""
    row_N, open_rows, tight = np.full(len(length_N), -1), [(0, r) for r, space in enumerate(space_R) if space], []
    for n, length in enumerate(length_N):
        while tight and -tight[0][0] >= length:
            _, cost, r = heappop(tight)
            heappush(open_rows, (cost, r))
        while open_rows and space_R[open_rows[0][1]] < length:
            cost, r = heappop(open_rows)
            heappush(tight, (-space_R[r], cost, r))
        if open_rows:
            cost, r = open_rows[0]
            row_N[n], space_R[r] = r, space_R[r] - length
            heapreplace(open_rows, (cost + length * length, r))
    return row_N


def fit(length_N: np.ndarray, space_R: np.ndarray, seq_len: int) -> Pieces:
    """Like `flow`, but what is longer than a row first fills rows of its own, then every document of at least LONG of a row is
    placed whole where there is room, the longest first. The rest flows into the space that is left."""
    whole_N = length_N // seq_len
    own = int(whole_N.sum())
    document = np.repeat(np.arange(len(length_N)), whole_N)
    number = np.arange(own) - np.repeat(np.cumsum(whole_N) - whole_N, whole_N)
    full = Pieces(np.arange(own), document, number * seq_len, np.full(own, seq_len))

    rest_N, space_R = length_N - whole_N * seq_len, space_R.copy()
    space_R[:own] = 0
    long = np.flatnonzero(rest_N >= max(1, min(LONG_TOKENS, seq_len // LONG_SHARE)))
    long = long[np.argsort(-rest_N[long], kind="stable")]
    row = place(rest_N[long].tolist(), space_R.tolist())
    row, long = row[row >= 0], long[row >= 0]
    space_R -= np.bincount(row, rest_N[long], len(space_R)).astype(np.int64)
    flowing_N = rest_N.copy()
    flowing_N[long] = 0
    small = flow(flowing_N, space_R)
    parts = [full, Pieces(row, long, (whole_N * seq_len)[long], rest_N[long]),
             small._replace(from_G=small.from_G + (whole_N * seq_len)[small.document_G])]
    return by_row(Pieces(*map(np.concatenate, zip(*parts))))


def pack_block(start_N: np.ndarray, block: int, seq_len: int, packing: str) -> Pieces:
    """Tokens [block * C, (block + 1) * C) of the documents laid end to end, C = BLOCK_ROWS * seq_len, packed into as few rows
    as hold them; only the last row of the last block has space left, at its end. Rows are numbered within the block.

    start_N: int64 [N+1], where documents begin, and the end. packing: stream (documents follow each other) or fit."""
    C = BLOCK_ROWS * seq_len
    begin, end = block * C, min((block + 1) * C, int(start_N[-1]))
    first, last = np.searchsorted(start_N, begin, "right") - 1, np.searchsorted(start_N, end, "left")
    from_N = np.maximum(start_N[first:last], begin)
    length_N = np.minimum(start_N[first + 1:last + 1], end) - from_N
    space_R = np.full(-(-(end - begin) // seq_len), seq_len)
    space_R[-1] -= len(space_R) * seq_len - (end - begin)
    if packing == "fit":
        # in random order, else the longest documents would come first; a row with space stays last
        pieces, last_R = fit(length_N, space_R, seq_len), len(space_R) - 1
        row_R = np.append(shuffled(np.arange(last_R), max(last_R, 1), block), last_R)
        pieces = by_row(pieces._replace(row_G=row_R[pieces.row_G]))
    else:
        pieces = flow(length_N, space_R)
    skipped_N = from_N - start_N[first:last]                 # what the block before has of its documents
    return pieces._replace(document_G=pieces.document_G + first, from_G=pieces.from_G + skipped_N[pieces.document_G])


def cut_tokens(pieces: Pieces, whole_G: np.ndarray, seq_len: int) -> int:
    """Tokens of documents (whole_G: their lengths) that would have fitted into a row and were cut."""
    return int(pieces.length_G[(pieces.length_G < whole_G) & (whole_G <= seq_len)].sum())


def squares(pieces: Pieces, rows: int, seq_len: int) -> np.ndarray:
    """fp64 [rows]: sum of squared lengths of each row's segments, padding being one."""
    padding_R = seq_len - np.bincount(pieces.row_G, pieces.length_G, rows)
    return np.bincount(pieces.row_G, pieces.length_G.astype(np.float64)**2, rows) + padding_R**2


# ---------------------------------------------------------------------------------------------------------------------
# Writing rows
# ---------------------------------------------------------------------------------------------------------------------

def progress(done: int, total: int, what: str) -> None:
    """A bar on stderr, where that is a terminal."""
    if sys.stderr.isatty():
        bar = "#" * (30 * done // max(total, 1))
        print(f"\r{what} [{bar:30}] {done:,} of {total:,}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def row_bounds(pieces: Pieces, rows: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(bounds i32 [*] of all rows end to end, how many each row has i64 [rows])."""
    filled_R = np.bincount(pieces.row_G, pieces.length_G, rows).astype(np.int64)
    before_G = np.cumsum(pieces.length_G) - pieces.length_G  # the rows before are full
    begin_G = before_G - pieces.row_G * seq_len
    padded = np.flatnonzero(filled_R < seq_len)
    row = np.concatenate([pieces.row_G, padded, np.arange(rows)])
    at = np.concatenate([begin_G, filled_R[padded], np.full(rows, seq_len)])
    return at[np.argsort(row, kind="stable")].astype("<i4"), np.bincount(row, minlength=rows)


def gather_rows(pieces: Pieces, rows: int, shards: Shards, order_N: np.ndarray, seq_len: int, vocab: int) -> np.ndarray:
    """[rows, S+1] in the rows' type: the tokens of these pieces. Raises ConfigError for one outside the vocabulary."""
    S, dtype = seq_len, token_dtype(vocab)
    flat = np.full(rows * (S + 1), max(shards.eod, 0), np.int64)
    flat[S::S + 1] = -1
    id_G = order_N[pieces.document_G]
    shard_G = np.searchsorted(shards.first_shard, id_G, "right") - 1
    source_G = shards.start_N[id_G] + pieces.from_G
    begin_G = np.cumsum(pieces.length_G) - pieces.length_G + pieces.row_G       # every row is a token longer here
    # A row's last token has a successor unless a document, or the padding, ends the row.
    goes_on_G = pieces.from_G + pieces.length_G < shards.lengths_N[id_G]
    length_G = pieces.length_G + (goes_on_G & ((begin_G + pieces.length_G) % (S + 1) == S))
    bins = [np.asarray(tokens) for tokens in shards.bins]
    for shard, source, begin, length in zip(*(x.tolist() for x in (shard_G, source_G, begin_G, length_G))):
        flat[begin:begin + length] = bins[shard][source:source + length]
    table = flat.reshape(rows, S + 1)
    if flat.max() >= vocab or table[:, :S].min() < 0:
        bad = int(flat.max() if flat.max() >= vocab else table[:, :S].min())
        raise ConfigError(f"{str(shards.path)!r} holds the token {bad}, outside --vocab={vocab}. Give the vocabulary it was made "
                          "with, or --tokenizer.")
    if dtype.kind == "u":
        table[table[:, S] < 0, S] = np.iinfo(dtype).max
    return table.astype(dtype)


def pack_file(to: Path, note: Path, blocks: range, shards: Shards, order_N: np.ndarray, start_N: np.ndarray, seq_len: int,
              vocab: int, packing: str) -> None:
    """Writes the rows of these blocks to `to`, and last, as the mark of a finished file, to `note` what else belongs to them."""
    parts, cut, h = {"bounds": [], "segments": [], "keys": []}, 0, hashlib.sha256()
    with open(to, "wb") as f:
        for block in blocks:
            pieces = pack_block(start_N, block, seq_len, packing)
            rows = int(pieces.row_G[-1]) + 1
            for first in range(0, rows, step := max(1, WRITE_TOKENS // seq_len)):
                here = slice(*np.searchsorted(pieces.row_G, [first, first + step]))
                some = Pieces(*(x[here] for x in pieces))
                some = some._replace(row_G=some.row_G - first)
                raw = gather_rows(some, min(step, rows - first), shards, order_N, seq_len, vocab).tobytes()
                f.write(raw)
                h.update(raw)
            bounds, segments_R = row_bounds(pieces, rows, seq_len)
            cut += cut_tokens(pieces, shards.lengths_N[order_N[pieces.document_G]], seq_len)
            for name, array in (("bounds", bounds), ("segments", segments_R),
                                ("keys", cost_keys(squares(pieces, rows, seq_len), seq_len))):
                parts[name].append(array)
    sync(to)
    tmp = note.with_suffix(".tmp")
    with open(tmp, "wb") as f:
        np.savez(f, cut=cut, sha256=h.hexdigest(), **{name: np.concatenate(arrays) for name, arrays in parts.items()})
    sync(tmp)
    tmp.rename(note)


def pack(out: Path, split: str, shards: Shards, order_N: np.ndarray, seq_len: int, vocab: int, packing: str) -> dict:
    """Packs documents in `order_N` (int64 [N], numbers of documents in `shards`); writes {split}-*.rows, {split}.bounds,
    .offsets and .keys. Empty documents are left out. Returns the counts, and under "files" sizes and hashes of the first.

    A file of rows that has its note (a hidden file) is not made again: a killed call, made once more, goes on where it was."""
    order_N = order_N[shards.lengths_N[order_N] > 0]
    start_N = np.append(0, np.cumsum(shards.lengths_N[order_N], dtype=np.int64))
    T, S, itemsize = int(start_N[-1]), seq_len, token_dtype(vocab).itemsize
    blocks = -(-T // (BLOCK_ROWS * S))
    per_file = max(1, SHARD_BYTES // (BLOCK_ROWS * (S + 1) * itemsize))
    names = [f"{split}-{n:05d}" for n in range(-(-blocks // per_file))]
    for n, name in enumerate(names):
        if not (out / f".{name}.npz").exists():
            try:
                pack_file(out / f"{name}.rows", out / f".{name}.npz", range(n * per_file, min((n + 1) * per_file, blocks)),
                          shards, order_N, start_N, S, vocab, packing)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                (out / f"{name}.rows").unlink(missing_ok=True)
                need = (T - n * per_file * BLOCK_ROWS * S) * itemsize
                raise OSError(error.errno, f"{str(out)!r} is full ({os.strerror(error.errno)}): {need:,} more bytes are needed "
                              f"there. {n} of {len(names)} files are finished and kept. Free the space, then run the same "
                              "command again") from None
        progress(n + 1, len(names), f"packing {split}, files")
    offset, cut, files = np.zeros(1, "<i8"), 0, {}
    with open(out / f"{split}.bounds", "wb") as bounds, open(out / f"{split}.keys", "wb") as keys, \
            open(out / f"{split}.offsets", "wb") as offsets:
        offset.tofile(offsets)
        for name in names:
            part = np.load(out / f".{name}.npz")
            part["bounds"].tofile(bounds)
            part["keys"].tofile(keys)
            files[f"{name}.rows"] = {"bytes": len(part["keys"]) * (S + 1) * itemsize, "sha256": str(part["sha256"])}
            offset = offset[-1] + np.cumsum(part["segments"], dtype="<i8")
            offset.tofile(offsets)
            cut += int(part["cut"])
    R = -(-T // S)
    return {"rows": R, "rows_per_file": per_file * BLOCK_ROWS, "tokens": T, "documents": len(order_N),
            "padding": R * S - T, "segments": int(offset[-1]) - R, "cut_tokens": cut,
            "lengths": lengths(shards.lengths_N[order_N]), "files": files}


def pack_tokens(cache: Path, tokens, tokenizer: str, seq_len: int, vocab: int, seed: int, packing: str, log) -> Path:
    """The rows-* directory of a token set, or of another Megatron data set with its tokenizer's file."""
    before = describe(tokens, vocab, tokenizer)
    sets = {split: Shards(tokens, split) for split in SPLITS}

    def build(out: Path) -> dict:
        start, splits, files = time.perf_counter(), {}, {}
        for n, (split, shards) in enumerate(sets.items()):
            counts = pack(out, split, shards, document_order(len(shards), seed, n), seq_len, vocab, packing)
            files |= counts.pop("files")
            splits[split] = {**before["splits"][split], **counts}
        shutil.copyfile(before["tokenizer"], out / "tokenizer.model")
        counts = splits["train"]
        log(f"data: packed {counts['rows']:,} training rows and {splits['val']['rows']:,} validation rows of {seq_len:,} tokens "
            f"in {time.perf_counter() - start:.1f} s; {counts['cut_tokens'] / max(counts['tokens'], 1):.1%} of the tokens are of "
            "documents that are shorter than a row and were cut")
        keep = ("vocab", "pieces", "eod", "dtype", "tokenizer_hash", "versions", "domains", "cleaning", "sources")
        return {"stage": "rows", "seq_len": seq_len, "seed": seed, "packing": packing, "splits": splits, "files": files,
                **{k: before[k] for k in keep}}

    # by content, not by name: two ways to the same tokens give the same rows
    prints = [shards.fingerprint(Path(cache) / "hashes.json") for shards in sets.values()]
    key = digest([FORMAT, PACK_FORMAT, before["tokenizer_hash"], vocab, prints, seq_len, seed, packing, SHARD_BYTES])[:16]
    return stage(cache, f"rows-{key}", build, f".rows-{key}.partial")


def find(fingerprint: str, cache: str = "data") -> Path | None:
    """The finished directory of this content, wherever its text is now."""
    for path in sorted([*Path(cache).glob("rows-*"), *Path(cache).glob("blend-*")]):
        with contextlib.suppress(ConfigError, OSError):      # one that is damaged is not it
            if Blend(path).fingerprint == fingerprint:
                return path
    return None


# ---------------------------------------------------------------------------------------------------------------------
# From --data to rows
# ---------------------------------------------------------------------------------------------------------------------

def parse_blend(data: str) -> list[tuple[str, str]]:
    """[(weight, source), ...] of --data: one source, or weights and sources in turn, quoted as in a shell. What exists as a
    whole is one source. Raises ConfigError where it cannot be read so, or where a source comes twice."""
    if data == "embedded" or (data and (Path(data).exists() or is_shards(data))):
        return [("1", data)]
    try:
        words = shlex.split(data)
    except ValueError as error:
        raise ConfigError(f"--data={data!r}: {error}; quote paths with spaces, as in \"7 'my notes.jsonl' "
                          "3 books.txt\"") from None
    if len(words) < 2:
        return [("1", data)]                                 # check_data says what is wrong with it
    try:
        exact_weight(words[0])
    except ConfigError as error:
        raise ConfigError(f"--data={data!r} does not exist, and is no blend: {str(error).removeprefix('--data: ')}, before each "
                          "source, and quote paths with spaces") from None
    if len(words) % 2:
        raise ConfigError(f"--data={data!r} does not exist, and is no blend: {len(words)} words. Write a weight before each "
                          "source, as in \"7 notes.jsonl 3 books.txt\", and quote paths with spaces.")
    parts = list(zip(words[::2], words[1::2]))
    places = [os.path.realpath(source) for _, source in parts]
    for n, place_ in enumerate(places):
        if place_ in places[:n]:
            raise ConfigError(f"--data={data!r}: {parts[n][1]!r} comes twice. Give it once, with the sum of its weights.")
    return parts


def check_data(data: str, tokenizer: str = "") -> None:
    """Cheap checks of two settings, for every rank before the work begins; `prepare` makes the thorough ones.

    Raises ConfigError where --data or --tokenizer is missing, unreadable, empty or of a kind that is not read."""
    parts = parse_blend(data)
    integer_weights([weight for weight, _ in parts])
    for _, source in parts:
        check_source(source, tokenizer)


def tokenizer_for(cache: Path, used: list[tuple[int, str]], vocab: int, tokenizer: str, log) -> str:
    """The file of the tokenizer that all sources share: the given one, else that of the token sets among them, else one
    trained on the texts in proportion to their weights. "" where there is one source alone: it trains its own.

    Raises ConfigError where two token sets differ."""
    sets = [source for _, source in used if source != "embedded" and (Path(source) / "manifest.json").is_file()]
    for source in sets:
        if read_manifest(source).get("tokenizer_hash") != read_manifest(sets[0]).get("tokenizer_hash"):
            raise ConfigError(f"--data: {source!r} and {sets[0]!r} were made with different tokenizers, and a run has one. "
                              "Tokenize the text of one again, with the tokenizer.model of the other.")
    if tokenizer or not sets:
        return tokenizer or (tokenizer_of_texts(cache, used, vocab, log) if len(used) > 1 else "")
    return str(Path(sets[0]) / "tokenizer.model")


def blend_rows(cache: Path, rows: list[Path], weights: list[int], sources: list[str]) -> Path:
    """The blend-* directory of several rows-*."""
    opened = [Rows(path, "train") for path in rows]
    for n, corpus_ in enumerate(opened):
        if corpus_.fingerprint in (same := [other.fingerprint for other in opened[:n]]):
            raise ConfigError(f"--data: {sources[n]!r} and {sources[same.index(corpus_.fingerprint)]!r} hold the same text. Give "
                              "it once, with the sum of its weights.")

    def build(out: Path) -> dict:
        shutil.copyfile(rows[0] / "tokenizer.model", out / "tokenizer.model")
        members = [{"rows": path.name, "weight": weight, "source": Path(source).name, "fingerprint": corpus_.fingerprint}
                   for path, weight, source, corpus_ in zip(rows, weights, sources, opened)]
        return {"stage": "blend", "corpora": members}

    key = [FORMAT, [(weight, corpus_.fingerprint) for weight, corpus_ in zip(weights, opened)]]
    return stage(cache, f"blend-{digest(key)[:16]}", build)


def prepare(data: str, vocab: int, seq_len: int, seed: int, tokenizer: str = "", cache: str = "data", log=print,
            packing: str = PACKINGS[0], workers: int = 0) -> Path:
    """The finished directory for these settings, rows-* or blend-*, built where it is missing (see the top of this file).

    Raises ConfigError for every setting that is wrong, with its name, value and the fix."""
    check_numbers(("vocab", vocab, 1), ("seq_len", seq_len, 2), ("seed", seed, 0))
    if packing not in PACKINGS:
        raise ConfigError(f"--packing={packing}: unknown; use one of {', '.join(PACKINGS)}")
    check_data(data, tokenizer)
    make_directory(cache)
    start, parts = time.perf_counter(), parse_blend(data)
    weights = integer_weights([weight for weight, _ in parts])
    used = [(weight, source) for weight, (_, source) in zip(weights, parts) if weight]
    tokenizer, rows = tokenizer_for(Path(cache), used, vocab, tokenizer, log), []
    for _, source in used:
        tokens = tokenize(cache, source, vocab, tokenizer, workers, log)
        rows.append(pack_tokens(Path(cache), tokens, tokenizer, seq_len, vocab, seed, packing, log))
    made = rows[0] if len(rows) == 1 else blend_rows(Path(cache), rows, [weight for weight, _ in used], [s for _, s in used])
    log(f"data: {made} ready in {time.perf_counter() - start:.1f} s")
    return made


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------

@dataclass
class Row:
    tokens_S: np.ndarray         # int64 [S] inputs
    targets_S: np.ndarray        # int64 [S] next token of the same document, -1 where there is none
    bounds: list[int]            # [0, ..., S] documents inside the row; trailing padding is a segment of its own
    n_real: int                  # tokens that are not padding
    origin: str = ""             # its corpus, and its number there


class Rows:
    """One split of a rows-* directory. Raises ConfigError where the directory is damaged."""

    def __init__(self, path, split: str):
        path = Path(path)
        manifest = read_manifest(path)
        if manifest["stage"] != "rows" or split not in SPLITS:
            raise ConfigError(f"{str(path)!r} has no packed split {split!r}: "
                              f"give a rows-* directory and one of {SPLITS}.")
        counts = manifest["splits"][split]
        self.path, self.split, self.manifest = path, split, manifest
        self.seq_len, self.vocab, self.n_rows, self.n_tokens = (*(manifest[k] for k in ("seq_len", "vocab")), counts["rows"],
                                                                counts["tokens"])
        files = {name: f["sha256"] for name, f in manifest["files"].items() if name != "tokenizer.model"}
        identity = (manifest[k] for k in ("format", "tokenizer_hash", "vocab", "seq_len", "seed"))
        self.fingerprint = digest([files, *identity])
        self.dtype, self.rows_per_file, self._open = np.dtype(manifest["dtype"]), counts["rows_per_file"], {}
        self._none = np.iinfo(self.dtype).max if self.dtype.kind == "u" else -1
        self.key_R, self._bounds, self._offsets = (
            np.memmap(path / f"{split}.{name}", kind, "r") if self.n_rows else np.zeros(1, kind)[:name == "offsets"]
            for name, kind in (("keys", "u1"), ("bounds", "<i4"), ("offsets", "<i8")))

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, r: int) -> Row:
        if not 0 <= r < self.n_rows:
            raise IndexError(f"row {r} of {self.n_rows}")
        row = self.read(int(r)).astype(np.int64)
        bounds = self._bounds[self._offsets[r]:self._offsets[r + 1]]
        n_real = min(self.seq_len, self.n_tokens - int(r) * self.seq_len)
        targets_S = row[1:].copy()
        targets_S[bounds[1:-1] - 1] = -1                     # the last token of a document has no target
        if row[-1] == self._none:
            targets_S[-1] = -1
        targets_S[n_real:] = -1
        return Row(row[:-1], targets_S, bounds.tolist(), n_real, f"{self.fingerprint[:16]} {int(r)}")

    def read(self, r: int) -> np.ndarray:
        """[S+1]: one read of consecutive bytes. Raises ConfigError where the file ends before."""
        n, at = divmod(r, self.rows_per_file)
        if n not in self._open:
            while len(self._open) >= OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[n] = os.open(self.path / f"{self.split}-{n:05d}.rows", os.O_RDONLY)
        size = (self.seq_len + 1) * self.dtype.itemsize
        raw = os.pread(self._open[n], size, at * size)
        if len(raw) < size:
            raise ConfigError(f"{str(self.path / f'{self.split}-{n:05d}.rows')!r} ends before row {r}: it was cut off after it "
                              f"was opened. Delete {str(self.path)!r} and run `python data.py prepare` again.")
        return np.frombuffer(raw, self.dtype)

    def costs(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """fp64: exact costs of rows [first, last), of which `key_R` has the logarithm; see order.cost_keys."""
        offset_R = self._offsets[first:(self.n_rows if last is None else last) + 1]
        length_G = np.diff(self._bounds[offset_R[0]:offset_R[-1]], append=0).clip(0).astype(np.float64)  # below 0: next row
        return LINEAR_TOKENS * self.seq_len + np.add.reduceat(length_G**2, offset_R[:-1] - offset_R[0])

    def __del__(self):
        for fd in getattr(self, "_open", {}).values():
            os.close(fd)


class Blend:
    """Training rows of one or more corpora with their weights, and their held-out rows: a rows-* or blend-* directory."""

    def __init__(self, path):
        self.path = Path(path)
        manifest = read_manifest(self.path)
        members = manifest["corpora"] if manifest["stage"] == "blend" else [{"rows": self.path.name, "weight": 1, "source": ""}]
        self.corpora = [Rows(self.path.parent / member["rows"], "train") for member in members]
        self.weights, self.sources = [member["weight"] for member in members], [member["source"] for member in members]
        for corpus_, member in zip(self.corpora, members):
            if corpus_.fingerprint != member.get("fingerprint", corpus_.fingerprint):
                raise ConfigError(f"{str(corpus_.path)!r} is not what {str(path)!r} was made of. Delete the latter and run "
                                  "`python data.py prepare` again.")
        self.seq_len, self.vocab = self.corpora[0].seq_len, self.corpora[0].vocab
        self.fingerprint = digest([[corpus_.fingerprint for corpus_ in self.corpora], self.weights])

    def stage(self, from_step: int) -> Stage:
        return Stage(from_step, [Source(c.fingerprint, c.key_R) for c in self.corpora], self.weights, self.seq_len)

    @cached_property
    def held_out(self) -> "HeldOut":
        return HeldOut([Rows(c.path, "val") for c in self.corpora], self.weights)


class HeldOut:
    """Held-out rows of several corpora as one: in proportion to the weights while there are some of each, then the rest."""

    def __init__(self, corpora: list[Rows], weights: list[int]):
        self.corpora, self.seq_len, self.vocab = corpora, corpora[0].seq_len, corpora[0].vocab
        size_C = np.array([len(rows) for rows in corpora])
        corpus_P, index_P = blend(np.arange(size_C.sum()), split_tree(tuple(weights)))
        over = np.flatnonzero(index_P >= size_C[corpus_P])
        corpus_P, index_P = corpus_P[:over[0] if len(over) else None], index_P[:over[0] if len(over) else None]
        rest = [np.arange(n, size) for n, size in zip(np.bincount(corpus_P, minlength=len(corpora)), size_C)]
        self._corpus = np.concatenate([corpus_P, np.repeat(np.arange(len(corpora)), [len(r) for r in rest])])
        self._index = np.concatenate([index_P, *rest])

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, i: int) -> Row:
        return self.corpora[self._corpus[i]][self._index[i]]


class Loader:
    """Reads this rank's rows of the next steps in a thread. It is at most `ahead` steps ahead, which bounds its memory, and
    ends with `close`. What goes wrong in it is raised by `take`."""

    def __init__(self, blends: list[Blend], order: Order, world: int, rank: int, step: int, ahead: int = 2):
        self._ready, self._closed, self._order = queue.Queue(ahead), threading.Event(), order
        self._thread = threading.Thread(target=self._work, args=(blends, world, rank, step), name="loader", daemon=True)
        self._thread.start()

    def _work(self, blends: list[Blend], world: int, rank: int, step: int):
        try:
            while not self._closed.is_set():
                stage_, corpus_R, row_R = self._order.rows(step)
                mine = dealt(len(row_R), world, rank)
                rows = [blends[stage_].corpora[c][r] for c, r in zip(corpus_R[mine].tolist(), row_R[mine].tolist())]
                self._put((step, rows, self._order.digest(step)))
                step += 1
        except BaseException as error:
            self._put(error)

    def _put(self, item):
        while not self._closed.is_set():
            try:
                return self._ready.put(item, timeout=0.1)
            except queue.Full:
                pass

    def take(self, step: int) -> tuple[list[Row], str]:
        """(this rank's rows, digest of the rows of all ranks) of a step; to be called for one step after the other."""
        item = self._ready.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        if item[0] != step:
            raise RuntimeError(f"the loader is at step {item[0]}, asked for was {step}")
        return item[1:]

    def close(self):
        self._closed.set()
        self._thread.join()


# ---------------------------------------------------------------------------------------------------------------------
# Reports
# ---------------------------------------------------------------------------------------------------------------------

METHODS = {"none": "as they come", "buckets": "buckets in blocks", "published": "buckets, whole run",
           "sorted": "sorted in blocks"}


class Steps(NamedTuple):
    """What a number of steps cost and hold."""
    slowest_N: np.ndarray        # cost of the most expensive rank to the mean of all ranks, of each step
    cost_N: np.ndarray           # mean cost of a rank
    share_NC: np.ndarray         # share of each corpus in the rows


def measure(stage_: Stage, cost_CR: list[np.ndarray], rows_per_step: int, ranks: int, steps: int, seed: int,
            method: str) -> Steps:
    """Of the first steps of a run, by exact costs of the rows of each corpus. "published": one sort over all steps."""
    order = Order([stage_], [(0, rows_per_step)], seed, "none" if method == "published" else method)
    found = [order.rows(step)[1:] for step in range(steps)]
    corpus_NR, row_NR = (np.stack(x) for x in zip(*found))
    if method == "published":
        key_P = np.empty(corpus_NR.size, np.uint8)
        for c, source in enumerate(stage_.sources):
            key_P[here] = source.key_R[row_NR.ravel()[here := corpus_NR.ravel() == c]]
        taken = balanced(key_P, rows_per_step, stage_.seq_len, "buckets", seed)
        corpus_NR, row_NR = (x.ravel()[taken].reshape(steps, -1) for x in (corpus_NR, row_NR))
    cost_NR = np.zeros(row_NR.shape)
    for c, cost_R in enumerate(cost_CR):
        cost_NR[here] = cost_R[row_NR[here := corpus_NR == c]]
    rank_NW = np.stack([cost_NR[:, dealt(rows_per_step, ranks, rank)].sum(1) for rank in range(ranks)], 1)
    share_NC = np.stack([(corpus_NR == c).mean(1) for c in range(len(cost_CR))], 1)
    return Steps(rank_NW.max(1) / rank_NW.mean(1), rank_NW.mean(1), share_NC)


def over_16(x_N: np.ndarray) -> np.ndarray:
    """Means over 16 steps in a row."""
    return x_N[:len(x_N) // 16 * 16].reshape(-1, 16, *x_N.shape[1:]).mean(1) if len(x_N) >= 16 else x_N


def balance_report(stage_: Stage, cost_CR: list[np.ndarray], rows_per_step: int, ranks: int, steps: int, seed: int,
                   picture: str) -> None:
    """Prints a line for each method, and draws them where matplotlib is installed."""
    print(f"{steps:,} steps of {rows_per_step:,} rows of {stage_.seq_len:,} tokens, {ranks} ranks; a block is "
          f"{Order([stage_], [(0, rows_per_step)], seed).legs[0].block_steps} steps\n"
          f"cost of a row = {LINEAR_TOKENS} x tokens + sum of squared document lengths; slowest rank to the mean, and how far "
          "costs and shares\nof the corpora are from the whole run's (standard deviation; mean difference in rows of 100)\n")
    print(f"{'':20}{'max/mean: median':>17}{'p99':>8}{'worst':>8}{'cost: a step':>14}{'16 steps':>10}{'share: a step':>15}"
          f"{'16 steps':>10}")
    goal_C, found = np.array(stage_.weights) / sum(stage_.weights), {}
    for method, name in METHODS.items():
        found[name] = m = measure(stage_, cost_CR, rows_per_step, ranks, steps, seed, method)
        drift = [x.std() / m.cost_N.mean() for x in (m.cost_N, over_16(m.cost_N))]
        share = [100 * np.abs(x - goal_C).mean() for x in (m.share_NC, over_16(m.share_NC))]
        print(f"{name:20}{np.median(m.slowest_N):17.4f}{np.percentile(m.slowest_N, 99):8.3f}{m.slowest_N.max():8.3f}"
              f"{drift[0]:14.1%}{drift[1]:10.1%}{share[0]:15.2f}{share[1]:10.2f}")
    draw(found, goal_C, picture)


def draw(found: dict[str, Steps], goal_C: np.ndarray, picture: str) -> None:
    try:
        import matplotlib
    except ImportError:
        print("\nno picture: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(10, 8), constrained_layout=True)
    for name, m in found.items():
        above.plot(np.sort(m.slowest_N), label=name)
        below.plot(16 * np.arange(len(over_16(m.cost_N))), over_16(m.cost_N) / m.cost_N.mean(), label=name)
    above.set(yscale="log", xlabel="steps, sorted", ylabel="cost of the slowest rank / mean")
    below.set(xlabel="step", ylabel="cost over 16 steps / mean")
    above.legend()
    figure.savefig(picture, dpi=100)
    pyplot.close(figure)
    print(f"\n{picture} shows them")


# Lengths of documents in tokens, log-normal: (share of the tokens, median, sigma). A mix of the kinds that language models
# are trained on; many books are longer than a row.
SYNTHETIC = {"web": (0.60, 500, 0.9), "code": (0.20, 700, 1.0), "papers": (0.16, 9000, 0.9), "books": (0.04, 60_000, 1.0)}


def synthetic(tokens: int, seq_len: int, seed: int, packing: str) -> tuple[Stage, list[np.ndarray], dict[str, dict]]:
    """(stage, exact costs of the rows of each corpus, counts) of corpora with random lengths, packed without their tokens."""
    sources, cost_CR, info = [], [], {}
    for n, (name, (share, median, sigma)) in enumerate(SYNTHETIC.items()):
        rng = np.random.default_rng([seed, n])
        want, length_N = int(share * tokens) + BLOCK_ROWS * seq_len, np.zeros(0, np.int64)
        while length_N.sum() < want:
            more = int((want - length_N.sum()) / (median * math.exp(sigma**2 / 2))) + 100
            length_N = np.append(length_N, rng.lognormal(math.log(median), sigma, more).astype(np.int64).clip(1))
        start_N = np.append(0, np.cumsum(length_N))
        start_N = start_N[:np.searchsorted(start_N, want) + 1]
        length_N, cut, square_R = np.diff(start_N), 0, []
        blocks = int(start_N[-1]) // (BLOCK_ROWS * seq_len)
        for block in range(blocks):
            pieces = pack_block(start_N, block, seq_len, packing)
            square_R.append(squares(pieces, BLOCK_ROWS, seq_len))
            cut += cut_tokens(pieces, length_N[pieces.document_G], seq_len)
            progress(block + 1, blocks, f"packing {name}, blocks")
        square_R = np.concatenate(square_R)
        sources.append(Source(f"{n:016x}", cost_keys(square_R, seq_len)))
        cost_CR.append(LINEAR_TOKENS * seq_len + square_R)
        info[name] = {"lengths": lengths(length_N), "documents": len(length_N), "rows": len(square_R),
                      "tokens": len(square_R) * seq_len, "cut_tokens": cut, "padding": 0}
    weights = integer_weights([share for share, _, _ in SYNTHETIC.values()])
    return Stage(0, sources, weights, seq_len), cost_CR, info


def lengths(length_N: np.ndarray) -> list[int]:
    """Of documents in tokens: least, median, mean, 99th percentile, greatest."""
    if not len(length_N):
        return [0] * 5
    low, middle, high, most = np.percentile(length_N, [0, 50, 99, 100], method="nearest")
    return [int(x) for x in (low, middle, length_N.mean(), high, most)]


def stats_report(info: dict[str, dict], cost_CR: list[np.ndarray]) -> None:
    """Prints a line for each corpus: its documents, its rows, what packing cut, how costs spread."""
    print(f"{'':20}{'documents':>11}{'tokens':>16}{'least':>7}{'median':>8}{'mean':>8}{'p99':>9}{'most':>10}{'rows':>9}{'cut':>7}"
          f"{'pad':>7}{'cost p1':>9}{'p99':>6}")
    for (name, c), cost_R in zip(info.items(), cost_CR):
        spread = np.percentile(cost_R, [1, 99]) / cost_R.mean()
        least, middle, mean, high, most = c["lengths"]
        cut, pad = (c[name] / max(c["tokens"], 1) for name in ("cut_tokens", "padding"))
        print(f"{name[-20:]:20}{c['documents']:11,}{c['tokens']:16,}{least:7,}{middle:8,}{mean:8,}{high:9,}{most:10,}"
              f"{c['rows']:9,}{cut:7.2%}{pad:7.2%}{spread[0]:9.2f}{spread[1]:6.2f}")
    print("cut: tokens of documents that are shorter than a row and lie in two; cost: of a row, to the mean\n")


def bench(rows: int = 10**8, rows_per_step: int = 49_152 // BLOCK_STEPS) -> None:
    """Prints how fast the order of so many rows is computed, by this process alone, and the memory it needs."""
    sizes = [7 * rows // 10, rows - 7 * rows // 10]
    keys = [np.random.default_rng(n).integers(0, 256, size, np.uint8) for n, size in enumerate(sizes)]
    stage_ = Stage(0, [Source(f"{n:016x}", key_R) for n, key_R in enumerate(keys)], [7, 3], 65_536)
    order = Order([stage_], [(0, rows_per_step)], 0, "sorted")
    start, steps = time.process_time(), rows // rows_per_step
    for step in range(0, steps, BLOCK_STEPS):
        order.rows(step)
        progress(min(step + BLOCK_STEPS, steps), steps, "planning, steps")
    seconds = time.process_time() - start
    print(f"{steps * rows_per_step:,} positions of two corpora blended, shuffled and sorted in {seconds:.1f} s of CPU time: "
          f"{steps * rows_per_step / seconds:,.0f} positions/s\nindex: {sum(x.nbytes for x in keys) / rows:.2f} bytes per row; "
          f"a block of {BLOCK_STEPS} steps is computed at a time, {BLOCK_STEPS * rows_per_step * 16 / 1e6:.1f} MB")


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------

def show(path: str, split: str, r: int) -> None:
    """Print one row, each segment with its place, its text and whether it goes on in another row."""
    rows, tok = Rows(path, split), load_tokenizer(path)
    if not 0 <= r < len(rows):
        raise ConfigError(f"--row={r} is not in {split!r}: it has rows 0 to {len(rows) - 1}.")
    row = rows[r]
    print(f"row {r} of {len(rows):,} ({split}): {row.n_real} tokens, {(row.targets_S >= 0).sum()} targets, "
          f"{len(row.bounds) - 1} segments")
    for begin, end in zip(row.bounds, row.bounds[1:]):
        kind = "padding" if begin >= row.n_real else "continues" if row.targets_S[end - 1] >= 0 else "ends"
        print(f"--- [{begin}, {end}) {kind}")
        if kind != "padding":
            print(tok.decode(row.tokens_S[begin:end].tolist()))


def verify(path: str, vocab: int = 0, tokenizer: str = "") -> str:
    """Check every byte of a prepared directory, or of token shards (with the vocabulary, or tokenizer, given for foreign ones).

    Returns what was checked. Raises ConfigError naming the first file that is wrong."""
    if is_shards(path):
        return verify_shards(path, read_tokenizer(tokenizer)[1].vocab_size() if tokenizer else vocab)
    manifest = read_manifest(path)
    for n, (name, want) in enumerate(manifest["files"].items()):
        if file_sha256(Path(path) / name) != want["sha256"]:
            raise ConfigError(f"{str(Path(path) / name)!r} differs from its hash in the manifest. "
                              f"Delete {path!r} and run `python data.py prepare` again.")
        progress(n + 1, len(manifest["files"]), "verifying, files")
    for rows in Blend(path).corpora if manifest["stage"] == "blend" else ():
        verify(str(rows.path))
    return "all files as written"


def show_blend(path: str, rows_per_step: int, seed: int, balance: str) -> None:
    """Print the weights, the rows of the first steps, and the shares of the corpora in the first blocks."""
    blend_ = Blend(path)
    total, order = sum(blend_.weights), Order([blend_.stage(0)], [(0, rows_per_step)], seed, balance)
    for n, (rows, weight, source) in enumerate(zip(blend_.corpora, blend_.weights, blend_.sources)):
        epoch = len(rows) * total / weight
        print(f"corpus {n}: weight {weight} of {total}, {len(rows):,} rows, all seen after {epoch:,.0f} rows of the run; "
              f"{rows.path.name} {source}")
    for step in range(4):
        _, corpus_R, row_R = order.rows(step)
        pairs = " ".join(f"{c}:{r}" for c, r in zip(corpus_R[:16], row_R[:16]))
        print(f"step {step}, corpus:row  {pairs}{' ...' if rows_per_step > 16 else ''}")
    for name, steps in (("a step", 1), ("16 steps", 16), ("a block", order.legs[0].block_steps)):
        corpus_NR = np.stack([order.rows(step)[1] for step in range(4 * BLOCK_STEPS)]).reshape(-1, steps * rows_per_step)
        shares = [(corpus_NR == n).mean(1) for n in range(len(blend_.corpora))]
        print(f"shares in {name}: " + ", ".join(f"{n}: {s.mean():.4f} ({s.min():.4f} to {s.max():.4f})"
                                                for n, s in enumerate(shares)))


def report(args) -> None:
    """The commands `stats` and `balance`."""
    if getattr(args, "bench", False):
        return bench()
    synthetic_ = getattr(args, "synthetic", False)
    ranks, steps = args.ranks or (384 if synthetic_ else 4), args.steps or (1057 if synthetic_ else 1024)
    rows_per_step = args.rows_per_step or ranks
    check_numbers(("ranks", ranks, 1), ("rows_per_step", rows_per_step, 1), ("steps", steps, 1), ("seed", args.seed, 0))
    if rows_per_step % ranks:
        raise ConfigError(f"--rows_per_step={rows_per_step} must be a multiple of --ranks={ranks}")
    if synthetic_:
        check_numbers(("seq_len", args.seq_len, 2))
        stage_, cost_CR, info = synthetic(steps * rows_per_step * args.seq_len, args.seq_len, args.seed, args.packing)
        stats_report(info, cost_CR)
        return balance_report(stage_, cost_CR, rows_per_step, ranks, steps, args.seed, args.png or "balance-synthetic.png")
    if not args.dir:
        raise ConfigError("give a rows-* or blend-* directory, or --synthetic or --bench")
    blend_ = Blend(args.dir)
    cost_CR = [rows.costs() for rows in blend_.corpora]
    if args.command == "stats":
        names = [source or rows.path.name for rows, source in zip(blend_.corpora, blend_.sources)]
        stats_report({name: rows.manifest["splits"]["train"] for name, rows in zip(names, blend_.corpora)}, cost_CR)
    picture = args.png or f"{args.dir.rstrip('/')}.png"
    balance_report(blend_.stage(0), cost_CR, rows_per_step, ranks, steps, args.seed, picture)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prepare and inspect training data.")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str, *options: str) -> argparse.ArgumentParser:
        p = commands.add_parser(name, help=text, description=text)
        for option in options:
            p.add_argument(f"--{option}", **OPTIONS[option])
        return p

    command("prepare", "build the rows for these settings and print their directory",
            "data", "vocab", "seq_len", "seed", "tokenizer", "packing", "workers", "cache")
    p = command("pack", "the last stage of it alone: token shards to rows",
                "vocab", "seq_len", "seed", "tokenizer", "packing", "cache")
    p.add_argument("tokens", help="a tokens-* directory, or a Megatron prefix or a directory of pairs")
    for name, text in (("balance", "print costs of ranks and shares of corpora, step by step, in all orders"),
                       ("stats", "the same, after lengths of documents and what packing did")):
        p = command(name, text, "ranks", "rows_per_step", "steps", "seed", "png")
        p.add_argument("dir", nargs="?" if name == "balance" else None, help="a rows-* or blend-* directory")
        if name == "balance":
            p.add_argument("--synthetic", action="store_true", help="web, code, papers and books by lengths alone, no tokens")
            p.add_argument("--bench", action="store_true", help="speed and memory of the order of 10^8 rows")
            p.add_argument("--seq_len", type=int, default=65_536, help="with --synthetic")
            p.add_argument("--packing", choices=PACKINGS, default=PACKINGS[0], help="with --synthetic")
    p = command("blend", "print the rows of the first steps, and shares of the corpora", "rows_per_step", "seed")
    p.add_argument("--balance", choices=BALANCE, default="auto", help="the run's")
    p.add_argument("dir", help="a blend-* directory")
    p = command("show", "print one row, decoded")
    p.add_argument("dir")
    p.add_argument("--row", type=int, default=0)
    p.add_argument("--split", choices=SPLITS, default="train")
    p = command("tokenize", "text to a directory of token shards; prints it", "vocab", "tokenizer", "workers", "cache")
    p.add_argument("--data", default="embedded", help=f'"embedded", a file ({", ".join(SUFFIXES)}), or a directory of them')
    p.add_argument("--encoder", choices=KINDS, default="auto", help="all give the same tokens; auto is the chunk cache")
    p.add_argument("--out", default="", help="the directory to make; empty: one in --cache, named after its content")
    p = command("verify", "check every file against its hash, token shards also for order and range")
    p.add_argument("dir", help="a prepared directory, a token set, or the prefix of a Megatron data set")
    p.add_argument("--vocab", type=int, default=0, help="entries of the vocabulary of a foreign data set")
    p.add_argument("--tokenizer", default="", help="or the SentencePiece .model that it was made with")
    return parser.parse_args(argv)


OPTIONS = {
    "data": dict(default="embedded", help='"embedded", text, token shards, or several after weights: "7 a.jsonl 3 b.txt"'),
    "vocab": dict(type=int, default=4096, help="entries of the vocabulary"),
    "seq_len": dict(type=int, default=512, help="tokens per row"),
    "seed": dict(type=int, default=0, help="order of the documents and of the rows"),
    "tokenizer": dict(default="", help="a SentencePiece .model; empty: train one on the corpus"),
    "packing": dict(choices=PACKINGS, default=PACKINGS[0], help="fit: documents whole where they fit; stream: end to end"),
    "workers": dict(type=int, default=0, help="processes; 0: one per usable core"),
    "cache": dict(default="data", help="where the stages are kept"),
    "ranks": dict(type=int, default=0, help="how many share a step's rows; 0: 4, with --synthetic 384"),
    "rows_per_step": dict(type=int, default=0, help="rows of all ranks; 0: one each"),
    "steps": dict(type=int, default=0, help="0: 1024, with --synthetic 1057"),
    "png": dict(default="", help="the picture; empty: beside the directory"),
}


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    log = lambda line: print(line, file=sys.stderr)  # noqa: E731
    if args.command == "prepare":
        print(prepare(args.data, args.vocab, args.seq_len, args.seed, args.tokenizer, args.cache, log, args.packing,
                      args.workers))
    elif args.command == "tokenize":
        print(tokenize(args.cache, args.data, args.vocab, args.tokenizer, args.workers, log, args.encoder, args.out))
    elif args.command == "pack":
        check_numbers(("vocab", args.vocab, 1), ("seq_len", args.seq_len, 2), ("seed", args.seed, 0))
        make_directory(args.cache)
        print(pack_tokens(Path(args.cache), args.tokens, args.tokenizer, args.seq_len, args.vocab, args.seed, args.packing, log))
    elif args.command in ("balance", "stats"):
        report(args)
    elif args.command == "blend":
        check_numbers(("rows_per_step", args.rows_per_step, 0), ("seed", args.seed, 0))
        show_blend(args.dir, args.rows_per_step or 4, args.seed, args.balance)
    elif args.command == "show":
        show(args.dir, args.split, args.row)
    else:
        check_numbers(("vocab", args.vocab, 0))
        print(f"{args.dir}: {verify(args.dir, args.vocab, args.tokenizer)}")


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, ChildProcessError, OSError) as error:
        print(f"data.py: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit("data.py: stopped. What is finished is kept; the same command goes on from there.")
