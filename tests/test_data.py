"""data.py: every token once, nothing held out is trained on, targets end where documents end, the row order is pure."""
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import data
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


def pack_documents(out: Path, documents: list[list[int]], S: int, order=None, vocab: int = 100) -> data.Rows:
    """Pack plain lists (end tokens included) as both splits of a finished directory."""
    tokens = np.array([t for d in documents for t in d], shards.token_dtype(vocab))
    offsets = np.cumsum([0] + [len(d) for d in documents])
    order = np.arange(len(documents)) if order is None else order

    def build(folder):
        counts = {s: data.pack(folder, s, tokens, offsets, order, S, vocab, EOD) for s in shards.SPLITS}
        return {"stage": "rows", "seq_len": S, "vocab": vocab, "seed": 0, "dtype": shards.token_dtype(vocab).str,
                "tokenizer_hash": "", "splits": counts}
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
    monkeypatch.setattr(data, "PACK_TOKENS", step)
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


@pytest.mark.parametrize("vocab, kind", [(65_499, "<u2"), (65_500, "<i4"), (65_536, "<i4"), (200_000, "<i4")])
def test_wide_vocabulary(tmp_path, vocab, kind):
    documents = [[vocab - 1, 3, vocab - 2, vocab - 1, EOD], [4, vocab - 1, EOD]]
    rows = pack_documents(tmp_path, documents, 3, vocab=vocab)
    assert rows._rows.dtype.str == kind
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
    source, cache, path = small
    texts = [json.loads(line)["text"] for line in open(source)]
    want = Counter(tuple(ids) + (tok.eos_id(),) for ids in tokenizer.encode(tok, texts))
    train = Counter(map(tuple, documents_in_rows(data.Rows(path, "train"), tok.eos_id())))
    val = Counter(map(tuple, documents_in_rows(data.Rows(path, "val"), tok.eos_id())))
    assert train + val == want and not train & val and val and len(val) < 0.05 * len(want)


def test_targets_follow_the_documents(small, tok):
    for split in shards.SPLITS:
        rows = data.Rows(small[2], split)
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


# ---- order of the rows ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 16, 17, 1000])
def test_row_ids_permute_each_epoch(n):
    ids = data.row_ids(0, 6 * n, n, seed=3)
    assert ids.dtype == np.int64
    for epoch in ids.reshape(6, n):
        assert sorted(epoch) == list(range(n))


def test_row_ids_depend_on_position_only():
    whole = data.row_ids(0, 5000, 1000, 3)
    for first, count in ((0, 1), (999, 2), (1234, 0), (1500, 3500)):
        assert (data.row_ids(first, count, 1000, 3) == whole[first:first + count]).all()
    assert (np.concatenate([data.row_ids(i, 7, 1000, 3) for i in range(0, 4998, 7)]) == whole[:4998]).all()


def test_row_ids_differ_by_epoch_and_seed():
    a, b = data.row_ids(0, 2000, 1000, 0).reshape(2, 1000)
    c = data.row_ids(0, 1000, 1000, 1)
    for x, y in ((a, b), (a, c), (b, c), (a, np.arange(1000))):
        assert (x == y).sum() < 20                           # one fixed point is the expectation
        assert abs(np.corrcoef(x, y)[0, 1]) < 0.12
    # seed 0, epoch 1 must not be seed 1, epoch 0, nor any such alias
    firsts = {tuple(data.row_ids(e * 1000, 8, 1000, s)) for e in range(30) for s in range(30)}
    assert len(firsts) == 900


def test_row_ids_far_out():
    n = 3_000_000_000                                        # more than 2^31 rows, and positions beyond 2^40
    ids = data.row_ids(2**40, 1000, n, 0)
    assert len(set(ids.tolist())) == 1000 and ids.min() >= 0 and ids.max() > 2**31 and ids.max() < n


# ---- wrong inputs ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("change, words", [({"seq_len": 1}, "--seq_len=1"), ({"seed": -1}, "--seed=-1"),
                                           ({"vocab": 0}, "--vocab=0"),
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


@pytest.mark.parametrize("name", ["train.rows", "train.bounds", "val.rows", "val.offsets", "tokenizer.model"])
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
    raw = bytearray((path / "train.rows").read_bytes())
    raw[100] ^= 1
    (path / "train.rows").write_bytes(raw)
    with pytest.raises(ConfigError, match="train.rows"):
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


# ---- command line  ------------------------------------------------------------

def test_command_line(small, capsys):
    source, cache, path = small
    data.main(["prepare", f"--data={source}", f"--vocab={VOCAB}", "--seq_len=64", "--seed=0", f"--cache={cache}"])
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
