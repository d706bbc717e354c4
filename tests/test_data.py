"""data.py: every token once, nothing held out is trained on, targets end where documents end, the row order is pure."""
import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import data
import order
import shards
import tokenizer
from errors import ConfigError

EOD, VOCAB = 1, 400
WORDS = "the a rank sends row gather shard expert token step loss warm 12 2048 x=y (f) # ok, done. \t if".split(" ")


def quiet(line):
    pass


def write_corpus(folder: Path, n: int = 300, seed: int = 0) -> Path:
    """A .jsonl file of n different documents of 1 to 400 words."""
    rng = np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
    with open(folder / "docs.jsonl", "w") as f:
        for i in range(n):
            words = rng.choice(WORDS, size=int(rng.integers(1, 400) if i % 3 else rng.integers(1, 9)))
            f.write(json.dumps({"text": f"doc{i} " + " ".join(words) + "\n"}) + "\n")
    return folder / "docs.jsonl"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(source file, cache, rows directory) of a small prepared corpus that no test changes."""
    base = tmp_path_factory.mktemp("small")
    source = write_corpus(base / "source")
    return source, base / "cache", data.prepare(str(source), VOCAB, 64, 0, cache=str(base / "cache"), log=quiet)


@pytest.fixture(scope="module")
def tok(small):
    return tokenizer.load_tokenizer(small[2])


def stage(cache: Path, name: str) -> Path:
    found, = cache.glob(f"{name}-*")
    return found


def as_shards(folder: Path, documents: list, dtype="<i4", per_shard: int = 10**9) -> shards.Shards:
    """Documents (lists of tokens, end tokens included) as a Megatron data set of our own writing."""
    folder.mkdir(parents=True, exist_ok=True)
    for n, at in enumerate(range(0, max(len(documents), 1), per_shard)):
        writer = shards.ShardWriter(folder / f"s-{n:03d}", np.dtype(dtype))
        for document in documents[at:at + per_shard]:
            writer.add(document)
        writer.close()
    return shards.Shards(folder, "all")


def pack_documents(out: Path, documents: list[list[int]], S: int, order=None, vocab: int = 100, packing: str = "stream",
                   per_shard: int = 10**9) -> data.Rows:
    """Pack plain lists (end tokens included) as both splits of a finished directory."""
    source = as_shards(out / "source", documents, shards.token_dtype(vocab), per_shard)
    source.eod = EOD
    order = np.arange(len(documents)) if order is None else order

    def build(folder):
        counts = {s: data.pack(folder, s, source, order, S, vocab, packing) for s in shards.SPLITS}
        files = {name: file for c in counts.values() for name, file in c.pop("files").items()}
        return {"stage": "rows", "seq_len": S, "vocab": vocab, "seed": 0, "dtype": shards.token_dtype(vocab).str,
                "tokenizer_hash": "", "splits": counts, "files": files}
    return data.Rows(shards.stage(out, "rows-x", build), "train")


def expected_rows(documents: list[list[int]], S: int):
    """The same packing, one token at a time: [(tokens, targets, bounds, n_real)]."""
    flat = [(t, d[j + 1] if j + 1 < len(d) else -1, j == 0) for d in documents for j, t in enumerate(d)]
    rows = []
    for at in range(0, len(flat), S):
        part = flat[at:at + S]
        bounds = sorted({0, S} | {i for i, (_, _, first) in enumerate(part) if first} | {len(part)})
        pad = S - len(part)
        rows.append(([t for t, _, _ in part] + [EOD] * pad, [n for _, n, _ in part] + [-1] * pad, bounds, len(part)))
    return rows


# ---- packing --------------------------------------------------------------------------------------------------------

PACKINGS = {
    "empty first document": [[], [5, 6, EOD], [7, EOD]],
    "end token only first": [[EOD], [5, 6, 7, 8, 9, EOD]],
    "empty in between and last": [[5, EOD], [], [], [6, 7, EOD], []],
    "longer than two rows": [[5, EOD], list(range(10, 37)) + [EOD], [6, EOD]],
    "many tiny": [[n % 50 + 2, EOD] for n in range(101)],
    "fills a row exactly": [[5, 6, 7, 8, 9, 10, 11, EOD], [12, 13, EOD]],
    "fills two rows exactly": [list(range(2, 17)) + [EOD]],
    "end token alone in the next row": [[5, 6, 7, 8, 9, 10, 11, 12, EOD], [13, EOD]],
    "without an end token": [[5, 6, 7], [8, 9, 10, 11, 12], [13, 14]],
    "one token": [[5]],
}


@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize("step", [1 << 22, 16])            # 16: two rows are written at a time
def test_packing(tmp_path, monkeypatch, name, step):
    monkeypatch.setattr(data, "WRITE_TOKENS", step)
    documents, S = PACKINGS[name], 8
    rows = pack_documents(tmp_path, documents, S)
    want = expected_rows(documents, S)
    assert len(rows) == len(want)
    for r, (tokens, targets, bounds, n_real) in enumerate(want):
        row = rows[r]
        assert row.tokens_S.dtype == row.targets_S.dtype == np.int64
        assert row.tokens_S.tolist() == tokens and row.targets_S.tolist() == targets
        assert row.bounds == bounds and row.n_real == n_real


def test_packing_random_order(tmp_path):
    rng = np.random.default_rng(1)
    documents = [rng.integers(2, 99, int(rng.choice([0, 1, 3, 40, 500]))).tolist() + [EOD] for _ in range(200)]
    order = data.document_order(200, 7, 0)
    rows = pack_documents(tmp_path, documents, 32, order)
    want = expected_rows([documents[i] for i in order], 32)
    got = [rows[r] for r in range(len(rows))]
    assert [(g.tokens_S.tolist(), g.targets_S.tolist(), g.bounds, g.n_real) for g in got] == want


LENGTHS = {
    "mixed": [0, 1, 3, 8, 20, 31, 32, 33, 64, 100, 7, 5, 5] * 12,
    "hundreds of tiny ones": [2] * 700 + [40, 1, 1],
    "one that is longer than a block": [900, 3],
    "rows of their own": [32] * 9 + [64] * 3,
    "none that fit together": [17] * 40,
    "one token": [1],
}


@pytest.mark.parametrize("packing", data.PACKINGS)
@pytest.mark.parametrize("name", LENGTHS)
def test_every_token_and_every_target_once(tmp_path, monkeypatch, name, packing):
    """Tokens are numbered through, so that each says where it comes from: blocks of 6 rows, two blocks to a file."""
    S, length_N = 32, np.array(LENGTHS[name])
    monkeypatch.setattr(data, "BLOCK_ROWS", 6)
    monkeypatch.setattr(data, "SHARD_BYTES", 6 * 33 * 4 * 2)
    monkeypatch.setattr(data, "WRITE_TOKENS", 4 * S)
    start_N = np.append(0, np.cumsum(length_N))
    documents = [list(range(a + 2, b + 2)) for a, b in zip(start_N, start_N[1:])]
    rows = pack_documents(tmp_path, documents, S, data.document_order(len(length_N), 1, 0), 10**6, packing, per_shard=50)
    every = [rows[r] for r in range(len(rows))]
    tokens = np.concatenate([row.tokens_S[:row.n_real] for row in every])
    assert sorted(tokens) == list(range(2, start_N[-1] + 2)) and len(every) == -(-start_N[-1] // S)
    assert all(row.n_real == S for row in every[:-1])
    last_tokens, ends = set(start_N[1:] + 1), 0
    for row in every:
        assert row.bounds[0] == 0 and row.bounds[-1] == S and (np.diff(row.bounds) > 0).all()
        assert row.n_real == S or row.n_real in row.bounds
        for begin, end in zip(row.bounds, row.bounds[1:]):
            if begin < row.n_real:
                assert (np.diff(row.tokens_S[begin:end]) == 1).all()
                assert (row.targets_S[begin:end - 1] == row.tokens_S[begin + 1:end]).all()
                assert not last_tokens & set(row.tokens_S[begin:end - 1])      # a segment is of one document
                if row.targets_S[end - 1] >= 0:
                    assert row.targets_S[end - 1] == row.tokens_S[end - 1] + 1 and row.tokens_S[end - 1] not in last_tokens
                ends += row.targets_S[end - 1] < 0
        assert (row.targets_S[row.n_real:] == -1).all()
    # without a target: the last token of each document, and where `fit` moved what a block cut off (at most once a block)
    assert 0 <= ends - (length_N > 0).sum() <= (packing == "fit") * (len(rows) // 6)
    square_R = [sum((b - a)**2 for a, b in zip(row.bounds, row.bounds[1:])) for row in every]
    assert (rows.costs() == order.LINEAR_TOKENS * S + np.array(square_R)).all()
    assert (rows.key_R == order.cost_keys(square_R, S)).all() and len(list(rows.path.glob("train-*.rows"))) == -(-len(rows) // 12)


def test_fit_cuts_little_and_evens_costs():
    rng = np.random.default_rng(0)
    S = 4096
    length_N = np.append(rng.lognormal(6, 1.2, 20_000).astype(np.int64).clip(1), [3 * S, S, 2 * S + 5])
    start_N = np.append(0, np.cumsum(length_N))
    cut, spread = {}, {}
    for packing in data.PACKINGS:
        pieces = [data.pack_block(start_N, block, S, packing) for block in range(int(start_N[-1]) // (data.BLOCK_ROWS * S))]
        square_R = np.concatenate([data.squares(p, data.BLOCK_ROWS, S) for p in pieces])
        cut[packing] = sum(data.cut_tokens(p, length_N[p.document_G], S) for p in pieces) / (len(square_R) * S)
        spread[packing] = np.percentile(square_R, 50) / np.percentile(square_R, 10)
    assert cut["fit"] < 0.01 < 0.2 < cut["stream"] and spread["fit"] < 1.3 < spread["stream"], (cut, spread)


def test_the_first_rows_are_like_the_others():
    """Rows filled by long documents do not come first, so that some rows of a corpus stand for all: held-out ones do."""
    length_N = np.tile([700, 10, 30, 50], 1000)
    start_N = np.append(0, np.cumsum(length_N))
    pieces = data.pack_block(start_N, 0, 64, "fit")
    whole_R = np.bincount(pieces.row_G[pieces.length_G == 64], minlength=data.BLOCK_ROWS)
    assert whole_R[:300].mean() == pytest.approx(whole_R.mean(), abs=0.1) and 0.5 < whole_R.mean() < 0.95


def test_documents_are_placed_on_the_cheapest_row_with_room():
    rng = np.random.default_rng(0)
    for _ in range(20):
        length_N, space_R = np.sort(rng.integers(1, 50, 60))[::-1], rng.integers(0, 100, 12)
        left, cost_R, want = space_R.copy(), np.zeros(12), []
        for length in length_N:
            fits = np.flatnonzero(left >= length)
            r = fits[np.argmin(cost_R[fits])] if len(fits) else -1
            want.append(int(r))
            if r >= 0:
                left[r] -= length
                cost_R[r] += length**2
        assert data.place(length_N.tolist(), space_R.tolist()).tolist() == want


def test_far_into_a_shard(tmp_path):
    """Documents that begin beyond 2^31 tokens and 4 GB: a sparse file, whose hole is three documents that are not packed."""
    length_N = np.array([2**30, 2**30, 1000, 40, 10])
    start_N = np.append(0, np.cumsum(length_N))
    with open(tmp_path / "big.bin", "wb") as f:
        f.seek(int(start_N[3]) * 2)
        f.write(np.arange(2, 52, dtype="<u2").tobytes())
    index = [length_N.astype("<i4"), (start_N[:-1] * 2).astype("<i8"), np.arange(6, dtype="<i8")]
    (tmp_path / "big.idx").write_bytes(shards.HEADER.pack(shards.MAGIC, 1, 8, 5, 6) + b"".join(x.tobytes() for x in index))
    counts = data.pack(tmp_path, "train", shards.Shards(tmp_path / "big", "all"), np.array([4, 3]), 8, 100, "stream")
    table = np.fromfile(tmp_path / "train-00000.rows", "<u2").reshape(-1, 9)
    assert counts["tokens"] == 50 and table[:, :8].ravel()[:50].tolist() == [*range(42, 52), *range(2, 42)]
    (tmp_path / "big.bin").unlink()
    # laid end to end: the last block holds the end of a document, and two whole ones
    C = data.BLOCK_ROWS * 64
    pieces = data.pack_block(start_N, block := int(start_N[-1]) // C, 64, "stream")
    assert block * C > 2**31 - C and set(pieces.document_G) == {1, 2, 3, 4} and pieces.length_G.sum() == start_N[-1] - block * C
    assert pieces.from_G[0] == block * C - 2**30


def test_a_token_outside_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="token 200, outside --vocab=100"):
        pack_documents(tmp_path, [[5, EOD], [200, EOD]], 4, vocab=100)


@pytest.mark.parametrize("vocab, kind", [(65_499, "<u2"), (65_500, "<i4"), (65_536, "<i4"), (200_000, "<i4")])
def test_wide_vocabulary(tmp_path, vocab, kind):
    documents = [[vocab - 1, 3, vocab - 2, vocab - 1, EOD], [4, vocab - 1, EOD]]
    rows = pack_documents(tmp_path, documents, 3, vocab=vocab)
    assert rows.dtype.str == kind
    assert np.concatenate([rows[r].tokens_S for r in range(len(rows))]).tolist() == sum(documents, []) + [EOD]
    assert rows[0].targets_S.tolist() == [3, vocab - 2, vocab - 1]
    assert rows[1].targets_S.tolist() == [EOD, -1, vocab - 1]


def test_long_row_bounds(tmp_path):
    """A document of 65,537 tokens in a row of more: lengths do not pass through 16 bits."""
    documents = [[5] * 65_536 + [EOD], [6, EOD]]
    row = pack_documents(tmp_path, documents, 70_000)[0]
    assert row.bounds == [0, 65_537, 65_539, 70_000] and row.n_real == 65_539


def test_document_order_is_seeded():
    a, b, c = data.document_order(500, 0, 0), data.document_order(500, 1, 0), data.document_order(500, 0, 1)
    assert sorted(a) == sorted(b) == list(range(500)) and (a != b).any() and (a != c).any()
    assert data.document_order(5, 0, 0).tolist() == data.document_order(5, 0, 0).tolist()


# ---- the whole pipeline on a small corpus ---------------------------------------------------------------------------

def documents_in_rows(rows: data.Rows, eod: int) -> list[list[int]]:
    """Documents read back from rows by their bounds and end tokens."""
    found, current = [], []
    for r in range(len(rows)):
        row = rows[r]
        for begin, end in zip(row.bounds, row.bounds[1:]):
            if begin < row.n_real:
                current += row.tokens_S[begin:end].tolist()
                if current[-1] == eod:
                    found.append(current)
                    current = []
    assert not current
    return found


def test_every_token_once_and_nothing_held_out(small, tok):
    source, cache, _ = small
    path = data.prepare(str(source), VOCAB, 64, 0, cache=str(cache), log=quiet, packing="stream")
    texts = [json.loads(line)["text"] for line in open(source)]
    want = Counter(tuple(ids) + (tok.eos_id(),) for ids in tokenizer.encode(tok, texts))
    train = Counter(map(tuple, documents_in_rows(data.Rows(path, "train"), tok.eos_id())))
    val = Counter(map(tuple, documents_in_rows(data.Rows(path, "val"), tok.eos_id())))
    assert train + val == want and not train & val and val and len(val) < 0.05 * len(want)


def test_targets_follow_the_documents(small, tok):
    path = data.prepare(str(small[0]), VOCAB, 64, 0, cache=str(small[1]), log=quiet, packing="stream")
    for split in shards.SPLITS:
        rows = data.Rows(path, split)
        every = [rows[r] for r in range(len(rows))]
        flat = np.concatenate([row.tokens_S for row in every])
        target = np.concatenate([row.targets_S for row in every])
        n = rows.n_tokens
        assert sum(row.n_real for row in every) == n
        follows = flat[:n - 1] != tok.eos_id()
        assert (target[:n - 1] == np.where(follows, flat[1:n], -1)).all() and (target[n - 1:] == -1).all()
        assert all(row.bounds[0] == 0 and row.bounds[-1] == rows.seq_len for row in every)
        assert all((np.diff(row.bounds) > 0).all() for row in every)


def test_same_bytes_from_two_runs(small, tmp_path):
    source, _, path = small
    copy = tmp_path / "elsewhere" / "renamed.jsonl"
    copy.parent.mkdir()
    shutil.copy(source, copy)
    again = data.prepare(str(copy.parent), VOCAB, 64, 0, cache=str(tmp_path / "cache"), log=quiet)
    assert again.name == path.name
    for file in sorted(path.iterdir()):
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name
    assert str(tmp_path) not in (again / "manifest.json").read_text()
    assert data.Rows(again, "train").fingerprint == data.Rows(path, "val").fingerprint


def test_prepared_is_reused(small):
    source, cache, path = small
    before = {p: p.stat().st_mtime_ns for p in cache.rglob("*")}
    start = time.perf_counter()
    assert data.prepare(str(source), VOCAB, 64, 0, cache=str(cache), log=quiet) == path
    assert time.perf_counter() - start < 1 and {p: p.stat().st_mtime_ns for p in cache.rglob("*")} == before


def test_what_changes_the_directory(small, tmp_path):
    source, cache, path = small
    here = tmp_path / "cache"
    shutil.copytree(cache, here)
    seen = {path.name: data.Rows(path, "train").fingerprint}
    edited = tmp_path / "docs.jsonl"
    edited.write_text(source.read_text() + json.dumps({"text": "one more"}) + "\n")
    for change in ({"seq_len": 32}, {"seed": 1}, {"vocab": VOCAB + 1}, {"data": str(edited)}):
        setting = {"data": str(source), "vocab": VOCAB, "seq_len": 64, "seed": 0, **change}
        other = data.prepare(**setting, cache=str(here), log=quiet)
        assert other.name not in seen
        seen[other.name] = data.Rows(other, "train").fingerprint
    assert len(set(seen.values())) == 5
    # only the pieces decide, and only the packing is redone for another seq_len
    assert len(list(here.glob("tokens-*"))) == 3
    edited.write_text(source.read_text())
    os.utime(edited, (1, 1))
    assert data.prepare(str(edited), VOCAB, 64, 0, cache=str(here), log=quiet).name == path.name


def _prepare_in_process(source, cache, barrier, results):
    barrier.wait()
    results.put(data.prepare(source, VOCAB, 64, 0, cache=cache, log=quiet).name)


@pytest.mark.parametrize("lock", [True, False])            # False: a file system without locks
def test_processes_prepare_at_once(small, tmp_path, monkeypatch, lock):
    if not lock:
        def refuse(*_):
            raise OSError("no locks here")
        monkeypatch.setattr(shards.fcntl, "flock", refuse)
    fork = multiprocessing.get_context("fork")
    barrier, results = fork.Barrier(3), fork.Queue()
    workers = [fork.Process(target=_prepare_in_process, args=(str(small[0]), str(tmp_path / "c"), barrier, results))
               for _ in range(3)]
    [w.start() for w in workers]
    [w.join(60) for w in workers]
    assert [w.exitcode for w in workers] == [0, 0, 0]
    assert {results.get(timeout=5) for _ in workers} == {small[2].name}
    left = sorted(p.name.split("-")[0] for p in (tmp_path / "c").iterdir() if p.is_dir())
    assert left == ["rows", "tokens"]
    data.verify(str(tmp_path / "c" / small[2].name))


def test_failed_build_leaves_nothing(tmp_path):
    def build(out):
        (out / "half").write_text("x")
        raise RuntimeError("stop")
    with pytest.raises(RuntimeError):
        shards.stage(tmp_path, "rows-y", build)
    assert [p.name for p in tmp_path.iterdir()] == [".rows-y.lock"]


# ---- interruption ---------------------------------------------------------------------------------------------------

def pack_in_process(folder: Path, cache: Path, die_after: int, fail=None) -> int:
    """Exit code of a process that packs in files of two blocks of 50 rows, and kills itself at a certain write of rows."""
    def work():
        data.BLOCK_ROWS, data.SHARD_BYTES, data.WRITE_TOKENS = 50, 100 * 33 * 2, 20 * 32
        gather, calls = data.gather_rows, []

        def gather_or_die(*args):
            calls.append(1)
            if len(calls) == die_after:
                if fail:
                    raise fail
                os.kill(os.getpid(), signal.SIGKILL)
            return gather(*args)

        data.gather_rows = gather_or_die
        data.pack_tokens(cache, folder, str(folder / "tokenizer.model"), 32, VOCAB, 0, "fit", quiet)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    return process.exitcode


def test_killed_packing_goes_on_where_it_was(small, tmp_path):
    folder = stage(small[1], "tokens")
    for name in "ab":
        (tmp_path / name).mkdir()
    assert pack_in_process(folder, tmp_path / "a", 0) == 0
    whole = stage(tmp_path / "a", "rows")
    kept = {}
    for die_after in (15, 40, 1):                            # in the third file, later, and at once
        assert pack_in_process(folder, tmp_path / "b", die_after) == -signal.SIGKILL
        partial, = (tmp_path / "b").glob(".rows-*.partial")
        done = {p.name[1:-4] for p in partial.glob(".*.npz")}
        now = {name: (partial / f"{name}.rows").stat().st_mtime_ns for name in done}
        assert kept.items() <= now.items() and (die_after == 1 or len(now) > len(kept)), "finished files are not made again"
        kept = now
    assert len(kept) > 5 and pack_in_process(folder, tmp_path / "b", 0) == 0
    again = stage(tmp_path / "b", "rows")
    assert sorted(p.name for p in again.iterdir()) == sorted(p.name for p in whole.iterdir())
    assert all(p.read_bytes() == (again / p.name).read_bytes() for p in whole.iterdir()) and again.name == whole.name
    assert all((again / f"{name}.rows").stat().st_mtime_ns == at for name, at in kept.items())
    assert not list((tmp_path / "b").glob(".rows-*.partial")) and data.verify(str(again)) == "all files as written"


def test_a_full_disk_is_told_and_what_is_finished_is_kept(small, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "BLOCK_ROWS", 6)
    monkeypatch.setattr(data, "SHARD_BYTES", 1)
    pack_file, calls = data.pack_file, []

    def full(*args):
        calls.append(1)
        if len(calls) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        pack_file(*args)
    monkeypatch.setattr(data, "pack_file", full)
    args = tmp_path, stage(small[1], "tokens"), "", 64, VOCAB, 0, "fit", quiet
    with pytest.raises(OSError, match=r"is full.*more bytes are needed there. 3 of \d+ files are finished"):
        data.pack_tokens(*args)
    assert len(data.Rows(data.pack_tokens(*args), "train")) == len(data.Rows(small[2], "train"))


# ---- blends ---------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A directory with two corpora, and their blend in the proportion 7 to 3."""
    base = tmp_path_factory.mktemp("two")
    write_corpus(base / "a", 300, 1).rename(base / "my notes.jsonl")
    write_corpus(base / "b", 200, 2).rename(base / "b.jsonl")
    spec = f"7 '{base}/my notes.jsonl' 3 {base}/b.jsonl"
    return base, spec, data.prepare(spec, VOCAB, 64, 0, cache=str(base / "cache"), log=quiet)


def test_blend_of_texts(two):
    base, _, path = two
    blend = data.Blend(path)
    assert path.name.startswith("blend-") and blend.weights == [7, 3] and len(blend.corpora) == 2
    assert len({(p / "tokenizer.model").read_bytes() for p in (path, *(c.path for c in blend.corpora))}) == 1   # of both
    spec = f"0.7 '{base}/my notes.jsonl' .3 {base}/b.jsonl"
    assert data.prepare(spec, VOCAB, 64, 0, cache=str(base / "cache"), log=quiet) == path
    # a corpus of weight 0 is not even read
    only = data.prepare(f"0 {base}/b.jsonl 2 '{base}/my notes.jsonl'", VOCAB, 64, 0, cache=str(base / "cache2"), log=quiet)
    assert only.name.startswith("rows-") and len(list((base / "cache2").glob("tokens-*"))) == 1
    assert data.verify(str(path)) == "all files as written"
    found = order.Order([blend.stage(0)], [(0, 10)], 0)
    assert np.mean([found.rows(step)[1] for step in range(128)]) == pytest.approx(0.3, abs=0.002)


def test_held_out_rows_of_a_blend(two):
    held = data.Blend(two[2]).held_out
    sizes = [len(rows) for rows in held.corpora]
    assert len(held) == sum(sizes)
    pairs = list(zip(held._corpus.tolist(), held._index.tolist()))
    assert sorted(pairs) == [(c, r) for c, n in enumerate(sizes) for r in range(n)]
    first = min(n * 10 // w for n, w in zip(sizes, (7, 3)))  # until one runs out
    assert abs(held._corpus[:first].mean() - 0.3) < 1 / max(first, 1) + 0.01
    assert held[0].tokens_S.tolist() == held.corpora[held._corpus[0]][held._index[0]].tokens_S.tolist()


def test_token_sets_in_a_blend(two, small, tmp_path):
    base, _, path = two
    ours = str(stage(small[1], "tokens"))
    mixed = data.prepare(f"1 {ours} 2 {base}/b.jsonl", VOCAB, 64, 0, cache=str(tmp_path), log=quiet)
    model = (small[2] / "tokenizer.model").read_bytes()      # the text takes the set's tokenizer
    assert [(c.path / "tokenizer.model").read_bytes() == model for c in data.Blend(mixed).corpora] == [True, True]
    other = next(p for p in (base / "cache").glob("tokens-*"))
    with pytest.raises(ConfigError, match="different tokenizers"):
        data.prepare(f"1 {ours} 1 {other}", VOCAB, 64, 0, cache=str(tmp_path), log=quiet)
    with pytest.raises(ConfigError, match="not the tokenizer of"):
        data.prepare(f"1 {ours} 1 {base}/b.jsonl", VOCAB, 64, 0, str(path / "tokenizer.model"), str(tmp_path), quiet)
    shutil.copytree(ours, tmp_path / "foreign", ignore=shutil.ignore_patterns("manifest.json", "tokenizer.model"))
    foreign = str(tmp_path / "foreign")
    with pytest.raises(ConfigError, match="does not say how it was tokenized"):
        data.prepare(f"1 {foreign} 1 {base}/b.jsonl", VOCAB, 64, 0, cache=str(tmp_path), log=quiet)
    model = str(small[2] / "tokenizer.model")
    assert data.prepare(f"1 {foreign} 1 {base}/b.jsonl", VOCAB, 64, 0, model, str(tmp_path), quiet).is_dir()


@pytest.mark.parametrize("spec, words", [
    ("7 {a} 3 {a}", "comes twice"), ("7 {a} 3 ./{a}", "comes twice"), ("-1 {a} 2 {b}", "weight -1 is negative"),
    ("nan {a} 2 {b}", "weight nan"), ("0 {a} 0 {b}", "all 0"), ("7 {a} 3 nowhere.txt", "--data='nowhere.txt' does not exist"),
    ("{a} 7 {b} 3", "weight .*a.jsonl is not"), ("1e99999999 {a} 1 {b}", "an exponent beyond"),
    ("my nots.jsonl", "--data='my nots.jsonl' does not exist, and is no blend: weight my is not a finite number"),
    ("all my nots.jsonl", "'all my nots.jsonl' does not exist, and is no blend: weight all is not"),
    ("7 {a} 3", "3 words"), ("7 'x 3 {b}", "quot"),
    ("7 {a} 3 {c}", "hold the same text"),
    ("nowhere.txt", "--data='nowhere.txt' does not exist")])
def test_bad_blends(tmp_path, monkeypatch, spec, words):
    for n, name in enumerate("ab"):
        write_corpus(tmp_path / name, 40, n).rename(tmp_path / f"{name}.jsonl")
    shutil.copy(tmp_path / "a.jsonl", tmp_path / "c.jsonl")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        data.prepare(spec.format(a="a.jsonl", b="b.jsonl", c="c.jsonl"), VOCAB, 64, 0, cache="cache", log=quiet)


def test_a_path_with_blanks_that_exists_is_one_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "7 a.txt 3 b.txt").write_text("text")
    assert data.parse_blend("7 a.txt 3 b.txt") == [("1", "7 a.txt 3 b.txt")]
    assert data.parse_blend("7 'a b.txt' 3 b.txt") == [("7", "a b.txt"), ("3", "b.txt")]
    assert data.parse_blend("embedded") == [("1", "embedded")]


def test_a_blend_knows_its_rows(two, tmp_path):
    shutil.copytree(two[0] / "cache", tmp_path / "cache")
    path = tmp_path / "cache" / two[2].name
    rows = data.Blend(path).corpora[0].path
    shutil.rmtree(rows)
    with pytest.raises(ConfigError, match="not a prepared directory"):
        data.Blend(path)
    shutil.copytree(data.Blend(two[2]).corpora[1].path, rows)
    with pytest.raises(ConfigError, match="not what .* was made of"):
        data.Blend(path)


# ---- loader ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("world", [1, 2, 4])
def test_loader_reads_what_the_order_says(two, world):
    blend = data.Blend(two[2])
    run_order = order.Order([blend.stage(0)], [(0, 8)], 0)
    loaders = [data.Loader([blend], run_order, world, rank, 3) for rank in range(world)]
    for step in range(3, 140):
        taken = [loader.take(step) for loader in loaders]
        _, corpus_R, row_R = run_order.rows(step)
        want = sorted(tuple(blend.corpora[c][r].tokens_S) for c, r in zip(corpus_R, row_R))
        assert sorted(tuple(row.tokens_S) for rows, _ in taken for row in rows) == want
        assert {len(rows) for rows, _ in taken} == {8 // world} and {digest for _, digest in taken} == {run_order.digest(step)}
    with pytest.raises(RuntimeError, match="the loader is at step 140, asked for was 150"):
        loaders[0].take(150)
    [loader.close() for loader in loaders]
    assert not any(loader._thread.is_alive() for loader in loaders)


def test_loader_is_ahead_by_a_bounded_number_of_steps(two, monkeypatch):
    blend, read = data.Blend(two[2]), []
    monkeypatch.setattr(data.Rows, "read", lambda self, r, read_row=data.Rows.read: read.append(r) or read_row(self, r))
    loader = data.Loader([blend], order.Order([blend.stage(0)], [(0, 4)], 0), 1, 0, 0, ahead=2)
    for taken in range(5):
        deadline = time.monotonic() + 20
        while len(read) < 4 * (taken + 3) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(read) == 4 * (taken + 3)                  # two wait, and one more is ready to
        loader.take(taken)
    loader.close()


def test_an_error_of_the_loader_is_raised_where_the_rows_are_wanted(two, tmp_path):
    shutil.copytree(two[0] / "cache", tmp_path / "cache")
    blend = data.Blend(tmp_path / "cache" / two[2].name)
    file, = blend.corpora[0].path.glob("train-*.rows")
    os.truncate(file, file.stat().st_size // 2)              # after it was opened
    loader = data.Loader([blend], order.Order([blend.stage(0)], [(0, 8)], 0), 1, 0, 0)
    with pytest.raises(ConfigError, match="train-00000.rows' ends before row"):
        [loader.take(step) for step in range(100)]
    assert not loader._thread.is_alive()


# ---- wrong inputs ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("change, words", [({"seq_len": 1}, "--seq_len=1"), ({"seed": -1}, "--seed=-1"),
                                           ({"vocab": 0}, "--vocab=0"), ({"packing": "best"}, "--packing=best"),
                                           ({"data": "nowhere.txt"}, "--data='nowhere.txt'")], ids=str)
def test_bad_inputs(small, tmp_path, change, words):
    """The others: test_corpus.py."""
    setting = {"data": str(small[0]), "vocab": VOCAB, "seq_len": 64, "seed": 0, "cache": str(tmp_path), **change}
    with pytest.raises(ConfigError, match=words):
        data.prepare(**setting, log=quiet)


def test_given_tokenizer(small, tmp_path):
    """The same pieces give the same rows, whether trained here or given; a larger vocabulary may have room."""
    model = str(small[2] / "tokenizer.model")
    assert data.prepare(str(small[0]), VOCAB, 64, 0, model, str(tmp_path), quiet).name == small[2].name
    other = data.prepare(str(small[0]), 512, 64, 0, model, str(tmp_path), quiet)
    assert data.Rows(other, "train").vocab == 512 and tokenizer.load_tokenizer(other).vocab_size() == VOCAB


@pytest.mark.parametrize("name", ["train-00000.rows", "train.bounds", "val.keys", "val.offsets", "tokenizer.model"])
def test_truncated_file_is_refused(small, tmp_path, name):
    here = tmp_path / "cache"
    shutil.copytree(small[1], here)
    path = here / small[2].name
    os.truncate(path / name, (path / name).stat().st_size - 2)
    with pytest.raises(ConfigError, match=name):
        data.Rows(path, "train")
    with pytest.raises(ConfigError, match=name):
        data.prepare(str(small[0]), VOCAB, 64, 0, cache=str(here), log=quiet)
    (path / name).unlink()
    with pytest.raises(ConfigError, match="missing"):
        data.Rows(path, "train")


def test_damage_is_found(small, tmp_path):
    path = tmp_path / "rows"
    shutil.copytree(small[2], path)
    raw = bytearray((path / "train-00000.rows").read_bytes())
    raw[100] ^= 1
    (path / "train-00000.rows").write_bytes(raw)
    with pytest.raises(ConfigError, match="train-00000.rows"):
        data.verify(str(path))
    manifest = (path / "manifest.json").read_text()
    for bad in (manifest.replace('"seed": 0', '"seed": 9'), manifest[:50], ""):
        (path / "manifest.json").write_text(bad)
        with pytest.raises(ConfigError, match="manifest.json.*damaged"):
            data.Rows(path, "train")


def test_wrong_directories(small, tmp_path):
    tokens = stage(small[1], "tokens")
    for path, split in ((tmp_path, "train"), (tmp_path / "none", "train"), (small[2], "test"), (tokens, "train")):
        with pytest.raises(ConfigError):
            data.Rows(path, split)
    with pytest.raises(ConfigError):
        tokenizer.load_tokenizer(tmp_path)
    with pytest.raises(IndexError):
        data.Rows(small[2], "train")[10**6]


# ---- command line ---------------------------------------------------------------------------------------------------

def test_command_line(small, capsys):
    source, cache, path = small
    data.main(["prepare", f"--data={source}", f"--vocab={VOCAB}", "--seq_len=64", "--seed=0", f"--cache={cache}"])
    assert capsys.readouterr().out.strip() == str(path)
    data.main(["pack", str(stage(cache, "tokens")), f"--vocab={VOCAB}", "--seq_len=64", f"--cache={cache}"])
    assert capsys.readouterr().out.strip() == str(path)
    data.main(["show", str(path), "--row=3"])
    shown = capsys.readouterr().out
    assert shown.startswith("row 3 of ") and "--- [0, " in shown
    last = len(data.Rows(path, "train")) - 1
    data.main(["show", str(path), f"--row={last}"])
    assert "padding" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--row"):
        data.main(["show", str(path), f"--row={last + 1}"])
    data.main(["verify", str(path)])


def test_reports(two, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)     # as where it is not installed
    data.main(["blend", str(two[2]), "--rows_per_step=10"])
    told = capsys.readouterr().out
    assert "corpus 1: weight 3 of 10" in told and "shares in a block: 0: 0.7000 (0.7000 to 0.7000), 1: 0.3000" in told, told
    data.main(["stats", str(two[2]), "--ranks=2", "--rows_per_step=8", "--steps=256"])
    told = capsys.readouterr().out
    for words in ("b.jsonl", "as they come", "sorted in blocks", "256 steps of 8 rows of 64 tokens, 2 ranks", "is not installed"):
        assert words in told
    with pytest.raises(ConfigError, match="multiple of --ranks=3"):
        data.main(["balance", str(two[2]), "--ranks=3", "--rows_per_step=8"])


@pytest.mark.parametrize("argv, words", [
    (["pack", "{text}"], "docs.jsonl' holds no token shards"), (["pack", "gone"], "'gone' holds no token shards"),
    (["pack", "{cache}"], "holds no token shards"), (["pack", "{rows}"], "is a rows directory"),
    (["pack", "{tokens}", "--tokenizer=gone"], "--tokenizer='gone' is not a readable"),
    (["pack", "{tokens}", "--tokenizer={text}"], "--tokenizer=.*docs.jsonl' is not a SentencePiece model"),
    (["verify", "{tokens}", "--tokenizer={text}"], "--tokenizer=.*docs.jsonl' is not a SentencePiece model"),
    (["verify", "{tokens}", "--tokenizer=gone"], "--tokenizer='gone' is not a readable"),
    (["tokenize", "--data={tokens}", "--out=sets/x"], "--out='sets/x': .* is token shards already")])
def test_sources_that_a_command_cannot_use(small, tmp_path, monkeypatch, argv, words):
    source, cache, rows = small
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        data.main([arg.format(text=source, cache=cache, rows=rows, tokens=stage(cache, "tokens")) for arg in argv])


@pytest.mark.parametrize("argv, words", [
    (["balance", "{dir}", "--ranks=-1"], "--ranks=-1"), (["balance", "{dir}", "--rows_per_step=-4"], "--rows_per_step=-4"),
    (["balance", "{dir}", "--steps=-5"], "--steps=-5"), (["stats", "{dir}", "--seed=-1"], "--seed=-1"),
    (["blend", "{dir}", "--rows_per_step=-1"], "--rows_per_step=-1"), (["blend", "{dir}", "--seed=-1"], "--seed=-1"),
    (["balance", "--synthetic", "--ranks=3", "--rows_per_step=4"], "--rows_per_step=4 must be a multiple of --ranks=3"),
    (["balance", "--synthetic", "--seq_len=1"], "--seq_len=1"), (["balance", "--synthetic", "--steps=-1"], "--steps=-1"),
    (["verify", "{dir}", "--vocab=-1"], "--vocab=-1")])
def test_bad_numbers_of_reports(two, argv, words):
    with pytest.raises(ConfigError, match=words):
        data.main([arg.format(dir=two[2]) for arg in argv])


def test_wrong_input_ends_with_the_code_of_every_program(tmp_path):
    done = subprocess.run([sys.executable, data.__file__, "show", "nowhere"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("data.py: 'nowhere' is not a prepared directory"), done.stderr


def test_synthetic_balance():
    """The proof at a smaller size: 64 ranks, 256 steps of rows of 65,536 tokens."""
    stage_, cost_CR, info = data.synthetic(256 * 64 * 65_536, 65_536, 0, "fit")
    found = {m: data.measure(stage_, cost_CR, 64, 64, 256, 0, m) for m in ("none", "published", "sorted")}
    middle = {m: np.median(x.slowest_N) for m, x in found.items()}
    assert middle["none"] > 5 and middle["published"] < 1.15 and middle["sorted"] < 1.01
    assert np.percentile(found["sorted"].slowest_N, 99) < 1.15
    drift = {m: data.over_16(x.cost_N).std() / x.cost_N.mean() for m, x in found.items()}
    assert drift["sorted"] < drift["published"] / 2
    assert all(c["cut_tokens"] / c["tokens"] < 0.02 for c in info.values())
