"""Text in, packed rows out: what the trainer reads, and how it came to be.

    python data.py prepare --data=embedded --vocab=4096 --seq_len=512 --seed=0    # prints the directory
    python data.py tokenize --data=texts/ --vocab=32768 --out=sets/texts          # only the tokens, by all cores
    python data.py show data/rows-0123456789abcdef --row=3                        # one row, segment by segment
    python data.py verify data/rows-0123456789abcdef                              # every byte against its hash
    python data.py verify /sets/foreign_text_document --tokenizer=their.model     # a Megatron data set as well

`prepare` runs three stages. Each is a directory under --cache whose name is a hash of all that determines its
content, so a changed input is another directory, and a finished one is never touched again:

    corpus-*  the embedded corpus only: prose.jsonl and code.jsonl
    tokens-*  documents: cleaned, counted, 1% of them, chosen by content hash, held out for validation; a SentencePiece
              tokenizer (given, or trained on training documents only); token shards in Megatron's format (shards.py)
    rows-*    the documents in seeded random order, cut into rows of seq_len tokens          <- the trainer reads this

A new seq_len or seed redoes only the last. A stage is built in a temporary sibling, synced, then renamed: a reader
sees all of it or nothing, and when two processes race, one result stands. Files are flat little-endian arrays.

    train.rows     [R, S+1] u16 or i32   S inputs and the last one's successor (NONE where it has none)
    train.bounds   [*]      i32          per row 0, ..., S: where documents begin and end inside it
    train.offsets  [R+1]    i64          row r's bounds are bounds[offsets[r]:offsets[r+1]]
    val.*                                the held-out documents, packed the same way
    tokenizer.model, manifest.json       hashes of every file, counts, seed, versions

Targets are not stored: they follow from the bounds. No target crosses a document's end.
"""
import argparse
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from corpus import SUFFIXES, check_numbers, describe, tokenize
from errors import ConfigError
from shards import (FORMAT, SPLITS, Shards, digest, file_sha256, is_shards, read_manifest, stage, token_dtype, verify_shards)
from tokenizer import KINDS, load_model, load_tokenizer

PACK_TOKENS = 1 << 22            # tokens that are gathered and written at a time


# ---------------------------------------------------------------------------------------------------------------------
# Packing: token stream -> rows
# ---------------------------------------------------------------------------------------------------------------------

def document_order(n: int, seed: int, stream: int) -> np.ndarray:
    """int64 [n]: a random order keyed by (seed, stream). Raw generator bits and a stable sort: unlike
    Generator.permutation these are promised to stay the same in every numpy version."""
    bits = np.random.PCG64(np.random.SeedSequence([seed, stream])).random_raw(n)
    return np.argsort(bits, kind="stable")


def pack(out: Path, split: str, tokens: np.ndarray, offsets: np.ndarray, order: np.ndarray, seq_len: int,
         vocab: int, eod: int) -> dict:
    """Lay the documents end to end in `order` and cut every seq_len tokens; writes {split}.rows, .bounds, .offsets.

    tokens: [T] any integer type; offsets: [N+1] i64, document d is tokens[offsets[d]:offsets[d+1]], and it may be
    empty; order: [N] i64. Returns the counts. Only the last row has padding (`eod`)."""
    S, dtype = seq_len, token_dtype(vocab)
    none = np.iinfo(dtype).max if dtype.kind == "u" else -1
    source_N = offsets[:-1][order]                           # where each document lies in `tokens` ...
    length_N = np.diff(offsets)[order]
    source_N, length_N = source_N[length_N > 0], length_N[length_N > 0]
    start_N = np.cumsum(length_N) - length_N                 # ... and where in the laid-out stream
    T = int(length_N.sum())
    R = -(-T // S)

    def stream(begin: int, end: int) -> np.ndarray:
        first, last = np.searchsorted(start_N, [begin, end - 1], "right") - 1
        shift = np.repeat((source_N - start_N)[first:last + 1], np.minimum(start_N + length_N, end)[first:last + 1]
                          - np.maximum(start_N, begin)[first:last + 1])
        return tokens[np.arange(begin, end) + shift]

    # A row's last token has a successor unless a document (or the padding) starts right after it.
    edge = np.append(start_N, T)
    ends_R = np.arange(1, R + 1, dtype=np.int64) * S
    continues_R = (ends_R < T) & ~np.isin(ends_R, edge)
    with open(out / f"{split}.rows", "wb") as f:
        step = max(1, PACK_TOKENS // S)
        for r in range(0, R, step):
            rows = np.full((min(step, R - r), S + 1), eod, dtype)
            piece = stream(r * S, min((r + len(rows)) * S + 1, T))
            flat = np.full(len(rows) * S + 1, eod, dtype)
            flat[:len(piece)] = piece
            rows[:, :S] = flat[:-1].reshape(-1, S)
            rows[:, S] = np.where(continues_R[r:r + len(rows)], flat[S::S], none)
            rows.tofile(f)

    starts = np.union1d(edge[edge < R * S], np.arange(R, dtype=np.int64) * S)    # of documents, rows and the padding
    offset_R = np.concatenate([[0], np.cumsum(np.bincount(starts // S, minlength=R) + 1)]).astype("<i8")
    bounds = np.full(offset_R[-1], S, "<i4")
    keep = np.ones(len(bounds), bool)
    keep[offset_R[1:] - 1] = False                           # the S that closes every row
    bounds[keep] = starts % S
    bounds.tofile(out / f"{split}.bounds")
    offset_R.tofile(out / f"{split}.offsets")
    return {"rows": R, "tokens": T, "documents": len(length_N), "segments": len(starts), "padding": R * S - T}


def _rows(cache: Path, tokens_dir: Path, vocab: int, tokenizer: str, seq_len: int, seed: int, log) -> Path:
    """The row stage."""
    before = describe(tokens_dir, vocab, tokenizer)

    def build(out: Path) -> dict:
        start, splits = time.perf_counter(), {}
        for n, split in enumerate(SPLITS):
            shards = Shards(tokens_dir, split)
            tokens, offsets = np.concatenate(shards.bins), np.concatenate([[0], np.cumsum(shards.lengths_N, dtype=np.int64)])
            order = document_order(len(offsets) - 1, seed, n)
            splits[split] = {**before["splits"][split],
                             **pack(out, split, tokens, offsets, order, seq_len, before["vocab"], before["eod"])}
        shutil.copyfile(before["tokenizer"], out / "tokenizer.model")
        log(f"data: packed {splits['train']['rows']:,} training rows and {splits['val']['rows']:,} validation rows "
            f"of {seq_len:,} tokens in {time.perf_counter() - start:.1f} s")
        keep = ("vocab", "pieces", "eod", "dtype", "tokenizer_hash", "versions", "domains", "cleaning", "sources")
        return {"stage": "rows", "seq_len": seq_len, "seed": seed, "splits": splits, **{k: before[k] for k in keep}}

    # by content, not by name: two ways to the same tokens give the same rows
    streams = [Shards(tokens_dir, split).fingerprint for split in SPLITS]
    key = [FORMAT, before["tokenizer_hash"], vocab, streams, seq_len, seed]
    return stage(cache, f"rows-{digest(key)[:16]}", build)


def prepare(data: str, vocab: int, seq_len: int, seed: int, tokenizer: str = "", cache: str = "data",
            log=print) -> Path:
    """The finished directory for these settings, built where it is missing (see the top of this file).

    Raises ConfigError for every setting that is wrong, with its name, value and the fix."""
    check_numbers(("vocab", vocab, 1), ("seq_len", seq_len, 2), ("seed", seed, 0))
    start = time.perf_counter()
    tokens_dir = tokenize(cache, data, vocab, tokenizer, 0, log)
    rows_dir = _rows(Path(cache), tokens_dir, vocab, tokenizer, seq_len, seed, log)
    log(f"data: {rows_dir} ready in {time.perf_counter() - start:.1f} s")
    return rows_dir


# ---------------------------------------------------------------------------------------------------------------------
# Reading: rows, and the order in which they are visited
# ---------------------------------------------------------------------------------------------------------------------

@dataclass
class Row:
    tokens_S: np.ndarray         # int64 [S] inputs
    targets_S: np.ndarray        # int64 [S] next token of the same document, -1 where there is none
    bounds: list[int]            # [0, ..., S] documents inside the row; trailing padding is a segment of its own
    n_real: int                  # tokens that are not padding


class Rows:
    """One split of a prepared directory, memory-mapped. Raises ConfigError where the directory is damaged."""

    def __init__(self, path, split: str):
        path = Path(path)
        manifest = read_manifest(path)
        if manifest["stage"] != "rows" or split not in SPLITS:
            raise ConfigError(f"{str(path)!r} has no packed split {split!r}: "
                              f"give a rows-* directory and one of {SPLITS}.")
        counts = manifest["splits"][split]
        self.seq_len, self.vocab, self.n_rows = manifest["seq_len"], manifest["vocab"], counts["rows"]
        self.n_tokens, self.manifest = counts["tokens"], manifest
        files = {name: f["sha256"] for name, f in manifest["files"].items() if name != "tokenizer.model"}
        identity = ("format", "tokenizer_hash", "vocab", "seq_len", "seed")
        self.fingerprint = digest([files, *(manifest[k] for k in identity)])
        self._rows = np.memmap(path / f"{split}.rows", manifest["dtype"], "r", shape=(self.n_rows, self.seq_len + 1))
        self._bounds = np.memmap(path / f"{split}.bounds", "<i4", "r")
        self._offsets = np.memmap(path / f"{split}.offsets", "<i8", "r")
        self._none = np.iinfo(self._rows.dtype).max if self._rows.dtype.kind == "u" else -1

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, r: int) -> Row:
        if not 0 <= r < self.n_rows:
            raise IndexError(f"row {r} of {self.n_rows}")
        row = self._rows[r].astype(np.int64)
        bounds = self._bounds[self._offsets[r]:self._offsets[r + 1]]
        n_real = min(self.seq_len, self.n_tokens - int(r) * self.seq_len)
        targets_S = row[1:].copy()
        targets_S[bounds[1:-1] - 1] = -1                     # the last token of a document has no target
        if row[-1] == self._none:
            targets_S[-1] = -1
        targets_S[n_real:] = -1
        return Row(row[:-1], targets_S, bounds.tolist(), n_real)


def _mix(x: np.ndarray) -> np.ndarray:
    """u64 [...] -> u64 [...]: a bijection, every input bit reaches every output bit (splitmix64's finalizer)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def row_ids(first: int, count: int, n_rows: int, seed: int) -> np.ndarray:
    """int64 [count]: the rows at global positions first, first + 1, ...; every epoch of n_rows positions visits each
    row once, in an order keyed by (seed, epoch).

    A position costs O(1) and depends on nothing else: neither the run's length nor the world size enters. Four Feistel
    rounds permute the 4^half numbers that are at least n_rows; what falls outside [0, n_rows) is permuted again."""
    if first < 0 or count < 0 or n_rows < 1:
        raise ConfigError(f"row_ids(first={first}, count={count}, n_rows={n_rows}): "
                          f"positions must be at least 0, rows at least 1.")
    n_rows, seed = int(n_rows), int(seed)
    epoch, x = np.divmod(np.arange(first, first + count, dtype=np.int64), n_rows)
    x = x.astype(np.uint64)
    half = np.uint64(max(1, ((n_rows - 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)
    key = _mix(_mix(np.array([seed % 2**64], np.uint64) + np.uint64(0x9E3779B97F4A7C15)) ^ epoch.astype(np.uint64))
    todo = np.arange(count)
    while len(todo):
        left, right = x[todo] >> half, x[todo] & low
        for n in range(4):
            left, right = right, left ^ (_mix(_mix(key[todo] + np.uint64(n)) ^ right) & low)
        x[todo] = (left << half) | right
        todo = todo[x[todo] >= n_rows]
    return x.astype(np.int64)


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------

def show(path: str, split: str, r: int) -> None:
    """Print one row, each segment with its place, its text and whether it goes on in the next row."""
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
        return verify_shards(path, load_model(Path(tokenizer).read_bytes(), repr(tokenizer)).vocab_size() if tokenizer else vocab)
    for name, want in read_manifest(path)["files"].items():
        if file_sha256(Path(path) / name) != want["sha256"]:
            raise ConfigError(f"{str(Path(path) / name)!r} differs from its hash in the manifest. "
                              f"Delete {path!r} and run `python data.py prepare` again.")
    return "all files as written"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Prepare and inspect training data.")
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("prepare", help="build the rows for these settings and print their directory")
    p.add_argument("--data", default="embedded", help='"embedded", a .txt or .jsonl file, or a directory of them')
    p.add_argument("--vocab", type=int, default=4096, help="entries of the vocabulary")
    p.add_argument("--seq_len", type=int, default=512, help="tokens per row")
    p.add_argument("--seed", type=int, default=0, help="order of the documents")
    p.add_argument("--tokenizer", default="", help="a SentencePiece .model; empty: train one on the corpus")
    p.add_argument("--cache", default="data", help="where the stages are kept")
    p = commands.add_parser("show", help="print one row, decoded")
    p.add_argument("dir")
    p.add_argument("--row", type=int, default=0)
    p.add_argument("--split", choices=SPLITS, default="train")
    p = commands.add_parser("tokenize", help="text to a directory of token shards; prints it")
    p.add_argument("--data", default="embedded", help=f'"embedded", a file ({", ".join(SUFFIXES)}), or a directory of them')
    p.add_argument("--vocab", type=int, default=4096, help="entries of the vocabulary")
    p.add_argument("--tokenizer", default="", help="a SentencePiece .model; empty: train one on the text")
    p.add_argument("--workers", type=int, default=0, help="processes; 0: one per usable core")
    p.add_argument("--encoder", choices=KINDS, default="auto", help="all give the same tokens; auto is the chunk cache")
    p.add_argument("--out", default="", help="the directory to make; empty: one in --cache, named after its content")
    p.add_argument("--cache", default="data", help="where the stages are kept")
    p = commands.add_parser("verify", help="check every file against its hash, token shards also for order and range")
    p.add_argument("dir", help="a prepared directory, a token set, or the prefix of a Megatron data set")
    p.add_argument("--vocab", type=int, default=0, help="entries of the vocabulary of a foreign data set")
    p.add_argument("--tokenizer", default="", help="or the SentencePiece .model that it was made with")
    args, log = parser.parse_args(argv), lambda line: print(line, file=sys.stderr)  # noqa: E731
    if args.command == "prepare":
        print(prepare(args.data, args.vocab, args.seq_len, args.seed, args.tokenizer, args.cache, log))
    elif args.command == "tokenize":
        print(tokenize(args.cache, args.data, args.vocab, args.tokenizer, args.workers, log, args.encoder, args.out))
    elif args.command == "show":
        show(args.dir, args.split, args.row)
    else:
        print(f"{args.dir}: {verify(args.dir, args.vocab, args.tokenizer)}")


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, ChildProcessError, OSError) as error:
        sys.exit(f"data.py: {error}")
    except KeyboardInterrupt:
        sys.exit("data.py: stopped. What is finished is kept; the same command goes on from there.")
