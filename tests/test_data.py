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
import corpus
import data
from model import ConfigError

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
    return corpus.load_tokenizer(small[2])


def stage(cache: Path, name: str) -> Path:
    found, = cache.glob(f"{name}-*")
    return found


def pack_documents(out: Path, documents: list[list[int]], S: int, order=None, vocab: int = 100) -> data.Rows:
    """Pack plain lists (end tokens included) as both splits of a finished directory."""
    tokens = np.array([t for d in documents for t in d], corpus.token_dtype(vocab))
    offsets = np.cumsum([0] + [len(d) for d in documents])
    order = np.arange(len(documents)) if order is None else order

    def build(folder):
        counts = {s: data.pack(folder, s, tokens, offsets, order, S, vocab, EOD) for s in corpus.SPLITS}
        return {"stage": "rows", "seq_len": S, "vocab": vocab, "seed": 0, "dtype": corpus.token_dtype(vocab).str,
                "tokenizer_hash": "", "splits": counts}
    return data.Rows(corpus.stage(out, "rows-x", build), "train")


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
    want = Counter(tuple(ids) + (tok.eos_id(),) for ids in corpus.encode(tok, texts))
    train = Counter(map(tuple, documents_in_rows(data.Rows(path, "train"), tok.eos_id())))
    val = Counter(map(tuple, documents_in_rows(data.Rows(path, "val"), tok.eos_id())))
    assert train + val == want and not train & val and val and len(val) < 0.05 * len(want)


def test_targets_follow_the_documents(small, tok):
    for split in corpus.SPLITS:
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


def test_tokenizer_sees_training_documents_only(small):
    texts = corpus.Corpus(stage(small[1], "corpus"))
    heads = {texts[i].split()[0] for i in np.flatnonzero(texts.held_N)}
    seen = {line.split()[0] for line in corpus._sample_lines(texts) if line}
    assert heads and not heads & seen and len(seen) > 250


def test_sample_keeps_long_lines(tmp_path):
    records = [json.dumps({"text": f"{i} " + "longline " * 3000}) + "\n" for i in range(3)]
    (tmp_path / "s.jsonl").write_text("".join(records))
    corpus.read_corpus(tmp_path, str(tmp_path / "s.jsonl"), quiet)
    texts = corpus.Corpus(stage(tmp_path, "corpus"))
    lines = list(corpus._sample_lines(texts))
    assert max(map(len, lines)) <= 4000
    train = [texts[i] for i in np.flatnonzero(~texts.held_N)]
    assert len(train) == 2 and "".join(lines) in (train[0] + train[1], train[1] + train[0])


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
    assert len(list(here.glob("tokens-*"))) == 3 and len(list(here.glob("corpus-*"))) == 2
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
        monkeypatch.setattr(corpus.fcntl, "flock", refuse)
    fork = multiprocessing.get_context("fork")
    barrier, results = fork.Barrier(3), fork.Queue()
    workers = [fork.Process(target=_prepare_in_process, args=(str(small[0]), str(tmp_path / "c"), barrier, results))
               for _ in range(3)]
    [w.start() for w in workers]
    [w.join(60) for w in workers]
    assert [w.exitcode for w in workers] == [0, 0, 0]
    assert {results.get(timeout=5) for _ in workers} == {small[2].name}
    left = sorted(p.name.split("-")[0] for p in (tmp_path / "c").iterdir() if p.is_dir())
    assert left == ["corpus", "rows", "tokens"]
    data.verify(str(tmp_path / "c" / small[2].name))


def test_failed_build_leaves_nothing(tmp_path):
    def build(out):
        (out / "half").write_text("x")
        raise RuntimeError("stop")
    with pytest.raises(RuntimeError):
        corpus.stage(tmp_path, "rows-y", build)
    assert [p.name for p in tmp_path.iterdir()] == [".rows-y.lock"]


def test_single_document_is_split(tmp_path):
    text = "".join(f"line {i} of the play\n" for i in range(2000))
    (tmp_path / "play.txt").write_text(text)
    path = data.prepare(str(tmp_path / "play.txt"), 300, 64, 0, cache=str(tmp_path / "c"), log=quiet)
    tok = corpus.load_tokenizer(path)
    train, val = (documents_in_rows(data.Rows(path, s), tok.eos_id()) for s in corpus.SPLITS)
    assert len(train) == len(val) == 1
    assert tok.decode(train[0]) + tok.decode(val[0]) == text and 0.005 < len(val[0]) / len(train[0]) < 0.02


def test_embedded_source_split():
    long = "é word " * 40 + "end"
    rest = '        if os:\n            async def g():\n                """short"""\n                return "é"\n'
    head = '"""%s"""\nimport os\nclass A:\n    def f(self):\n        %s\n'
    docstrings, code = corpus.split_source(head % (long, f"r'''{long}1\n        more'''") + rest)
    assert sorted(docstrings) == [long, long + "1\nmore"]
    assert code == head % ("...", '"""..."""') + rest
    compile(code, "code", "exec")


# ---- text -----------------------------------------------------------------------------------------------------------

TEXTS = ["a\tb\n\n\tc", "  lead and trail  ", "🤗 émoji 漢字", "0123456789 3.14159", "</s>", "a</s>b<unk><s><0x0A>",
         "\r\n\r", "\0x\0", "\ufeffmid\ufeff", "▁ ▁under▁", "▅", "", " ", "\n",
         "x" * 5000, "        return x\n" * 50, "\ufffd"]


@pytest.mark.parametrize("n", range(len(TEXTS)))
def test_round_trip(tok, n):
    ids, = corpus.encode(tok, [TEXTS[n]])
    assert tok.decode(ids) == TEXTS[n]
    assert tok.eos_id() not in ids and tok.unk_id() not in ids
    assert corpus.token_bytes(tok)[ids].sum() == len(TEXTS[n].encode())


def test_round_trip_together(tok):
    assert [tok.decode(ids) for ids in corpus.encode(tok, TEXTS)] == TEXTS


def test_tokenizer_settings(tok):
    assert tok.vocab_size() == VOCAB and tok.id_to_piece(tok.eos_id()) == "</s>" and tok.bos_id() == -1
    assert tok.encode("\n\n") == [tok.piece_to_id("\n")] * 2
    assert len(tok.encode("2048")) == 4
    sizes = corpus.token_bytes(tok)
    assert sizes.dtype == np.int64 and sizes.shape == (VOCAB,)
    assert sizes[tok.eos_id()] == sizes[tok.unk_id()] == 0 and sizes[tok.piece_to_id("<0xE2>")] == 1
    assert sizes[tok.piece_to_id("▁")] == 1


def test_tokenizer_hash(tok):
    model = tok.serialized_model_proto()
    assert [v for f, v in corpus.wire(model) if f == 1][1][2:6] == b"</s>"
    assert len([1 for f, _ in corpus.wire(model) if f == 1]) == VOCAB
    assert corpus.tokenizer_hash(model) == corpus.tokenizer_hash(model)
    # trainer settings at the end of the message (here: input file, field 1) change the bytes, not the hash
    assert corpus.tokenizer_hash(model + b"\x12\x05\x0a\x03a/b") == corpus.tokenizer_hash(model)
    assert corpus.tokenizer_hash(model.replace(b"</s>", b"</t>")) != corpus.tokenizer_hash(model)
    assert corpus.tokenizer_hash(model.replace(b"identity", b"identitz")) != corpus.tokenizer_hash(model)


def test_odd_text_is_handled_and_counted(tmp_path):
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfwith a mark\r\nand two line ends\r\n")
    (folder / "b.txt").write_bytes(b"bad \xff\xfe bytes, \xef\xbf\xbd and a zero \0 byte")
    (folder / "c.txt").write_bytes(b"")
    (folder / "d.txt").write_bytes(b" \n\t")
    (folder / "e.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "half \\ud800 pair, whole \\ud83e\\udd17 pair"}\n'
                                     b'\n{"text": ""}\n' + json.dumps({"text": "y" * 1_000_000}).encode() + b"\n")
    (folder / "ignored.py").write_bytes(b"\xff")
    for i in range(30):
        (folder / f"f{i}.txt").write_text(f"plain text number {i} and some words to learn\n")
    lines = []
    path = data.prepare(str(folder), 290, 32, 0, cache=str(tmp_path / "c"), log=lines.append)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["cleaning"] == {"bom_removed": 1, "crlf_to_lf": 1, "invalid_utf8_replaced": 1, "with_nul": 1,
                                    "empty_dropped": 3, "surrogates_replaced": 1}
    assert all(name in "".join(lines) for name in manifest["cleaning"])
    tok = corpus.load_tokenizer(path)
    texts = {tok.decode(ids) for s in corpus.SPLITS for ids in documents_in_rows(data.Rows(path, s), tok.eos_id())}
    assert {"with a mark\nand two line ends\n", "bad \ufffd\ufffd bytes, \ufffd and a zero \0 byte",
            "half \ufffd pair, whole 🤗 pair", "y" * 1_000_000} <= texts
    assert len(texts) == 34


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

@pytest.fixture
def sources(tmp_path, small):
    """Files that are wrong in one way each."""
    files = {"empty.txt": b"", "blank.txt": b" \n \n", "text.csv": b"a,b", "line.txt": b"only one line",
             "bad.jsonl": b'{"text": "a"}\n{"text": \n', "key.jsonl": b'{"text": "a"}\n{"txt": "b"}\n',
             "list.jsonl": b"[1]\n", "type.jsonl": b'{"text": 3}\n', "twice.jsonl": b'{"text": "a"}\n' * 3,
             "tiny.txt": b"a few\nwords\n" * 50, "junk.model": b"\x07junk", "empty.model": b"", "file": b""}
    for name, raw in files.items():
        (tmp_path / name).write_bytes(raw)
    (tmp_path / "hollow").mkdir()
    shutil.copy(small[2] / "tokenizer.model", tmp_path / "good.model")
    shutil.copy(small[0], tmp_path / "good.jsonl")
    return tmp_path


@pytest.mark.parametrize("change, words", [
    ({"data": "nowhere.txt"}, ["--data", "nowhere.txt", "does not exist"]),
    ({"data": ""}, ["--data=''", "embedded"]),
    ({"data": "hollow"}, ["--data", "hollow", ".jsonl"]),
    ({"data": "empty.txt"}, ["--data", "empty.txt", "empty"]),
    ({"data": "blank.txt"}, ["--data", "blank.txt", "no text"]),
    ({"data": "text.csv"}, ["--data", "text.csv", ".csv"]),
    ({"data": "line.txt"}, ["--data", "line.txt", "two"]),
    ({"data": "twice.jsonl"}, ["--data", "twice.jsonl", "different"]),
    ({"data": "bad.jsonl"}, ["--data", "bad.jsonl", "line 2", "JSON"]),
    ({"data": "key.jsonl"}, ["--data", "key.jsonl", "line 2", "text"]),
    ({"data": "list.jsonl"}, ["--data", "list.jsonl", "line 1"]),
    ({"data": "type.jsonl"}, ["--data", "type.jsonl", "line 1"]),
    ({"data": "tiny.txt", "vocab": 9000}, ["--vocab=9000", "at most"]),
    ({"vocab": 100}, ["--vocab=100", "too small"]),
    ({"vocab": 0}, ["--vocab=0"]),
    ({"vocab": "x"}, ["--vocab='x'"]),
    ({"vocab": 2**31}, [f"--vocab={2**31}"]),
    ({"seq_len": 1}, ["--seq_len=1"]),
    ({"seed": -1}, ["--seed=-1"]),
    ({"tokenizer": "nowhere.model"}, ["--tokenizer", "nowhere.model"]),
    ({"tokenizer": "empty.model"}, ["--tokenizer", "empty.model"]),
    ({"tokenizer": "junk.model"}, ["--tokenizer", "junk.model", "SentencePiece"]),
    ({"tokenizer": "good.model", "vocab": 300}, ["--vocab=300", "400", "good.model"]),
    ({"cache": "file"}, ["--cache", "file"]),
], ids=str)
def test_bad_inputs(sources, change, words):
    setting = {"data": "good.jsonl", "vocab": VOCAB, "seq_len": 64, "seed": 0, "tokenizer": "", "cache": "c", **change}
    for key in ("data", "tokenizer", "cache"):
        setting[key] = setting[key] and str(sources / setting[key])
    with pytest.raises(ConfigError) as error:
        data.prepare(**setting, log=quiet)
    for word in words:
        assert word in str(error.value)


def test_check_source(sources):
    corpus.check_source("embedded")
    corpus.check_source(str(sources / "good.jsonl"), str(sources / "good.model"))
    for bad in ("nowhere", "hollow", "empty.txt", "text.csv"):
        with pytest.raises(ConfigError, match=f"--data=.*{bad}"):
            corpus.check_source(str(sources / bad))
    with pytest.raises(ConfigError, match="--tokenizer=.*nowhere"):
        corpus.check_source("embedded", str(sources / "nowhere"))


def test_given_tokenizer(sources, small):
    """The same pieces give the same rows, whether trained here or given; a larger vocabulary may have room."""
    source, model, cache = (str(sources / name) for name in ("good.jsonl", "good.model", "c"))
    assert data.prepare(source, VOCAB, 64, 0, model, cache, quiet).name == small[2].name
    other = data.prepare(source, 512, 64, 0, model, cache, quiet)
    assert data.Rows(other, "train").vocab == 512 and corpus.load_tokenizer(other).vocab_size() == VOCAB


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
        corpus.load_tokenizer(tmp_path)
    with pytest.raises(IndexError):
        data.Rows(small[2], "train")[10**6]


# ---- command line, and the corpus that comes with Python ------------------------------------------------------------

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


def test_embedded(tmp_path, monkeypatch):
    """The real scan over the smallest of the packages and the standard library."""
    monkeypatch.setattr(corpus, "PACKAGES", ("numpy", "no_such_package"))
    path = data.prepare("embedded", 2048, 256, 0, cache=str(tmp_path), log=quiet)
    manifest = corpus.read_manifest(path)
    prose, code = manifest["domains"]["prose"], manifest["domains"]["code"]
    assert prose["bytes"] > 1_000_000 and 0.8 < code["bytes"] / prose["bytes"] < 1.3
    assert prose["held_out"] and set(manifest["versions"]) == {"numpy", "python", "sentencepiece"}
    texts = corpus.Corpus(stage(tmp_path, "corpus"))
    assert len(set(map(tuple, texts.keys_N2.tolist()))) == len(texts.keys_N2)        # no document twice
    held = [texts[i] for i in np.flatnonzero(texts.held_N & (texts.domain_N == 0))]
    train_code = "\n".join(texts[i] for i in np.flatnonzero(~texts.held_N & (texts.domain_N == 1)))
    assert not any(text.split("\n")[0] in train_code and text in train_code for text in held)
    assert sys.prefix not in train_code and sys.base_prefix not in train_code
