"""corpus.py, shards.py, tokenizer.py: every way to encode gives SentencePiece's tokens, a run that ends early loses nothing
that was finished, the files are Megatron's."""
import errno
import gzip
import importlib.util
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import corpus
import data
import shards
import tokenizer
from errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
VOCAB = 400
WORDS = "the a rank sends row gather shard expert token step loss warm 12 2048 x=y (f) # ok, done. \t if </s> ▁".split(" ")


def quiet(line):
    pass


def write_jsonl(path: Path, n: int, seed: int = 0, words: int = 400) -> list[str]:
    """n different documents of 1 to `words` words, one per line; returns them."""
    rng = np.random.default_rng(seed)
    texts = [f"doc{i} " + " ".join(rng.choice(WORDS, size=int(rng.integers(1, words) if i % 3 else rng.integers(1, 9)))) + "\n"
             for i in range(n)]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(source file, its texts, token set) of a small corpus that no test changes."""
    base = tmp_path_factory.mktemp("small")
    texts = write_jsonl(base / "source" / "docs.jsonl", 300)
    source = base / "source" / "docs.jsonl"
    return source, texts, corpus.tokenize(base / "cache", str(source), VOCAB, "", 1, quiet)


@pytest.fixture(scope="module")
def tok(small):
    return tokenizer.load_tokenizer(small[2])


def set_tiny_parts(patch) -> None:
    """Parts of 64 kB, and processes for the smallest input."""
    for name, value in (("MIN_PART", 1 << 16), ("HASH_BLOCK", 100_000), ("FEW_BYTES", 0)):
        patch.setattr(corpus, name, value)


@pytest.fixture
def tiny_parts(monkeypatch):
    set_tiny_parts(monkeypatch)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def documents(folder: Path, split: str) -> list[list[int]]:
    """Documents of one split by the independent reader."""
    return [d for p in sorted(folder.glob(f"{split}-*.idx")) for d in read_megatron(p.with_suffix(""))[1]]


# ---- Megatron's format, read and written by hand --------------------------------------------------------------------

def read_megatron(prefix: Path) -> tuple[str, list[list[int]]]:
    """(type, documents) of a .bin/.idx pair, with nothing but struct and the published layout."""
    raw, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    assert raw[:9] == b"MMIDIDX\x00\x00" and struct.unpack_from("<Q", raw, 9) == (1,)
    letter = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "d", 7: "f", 8: "H"}[raw[17]]
    n_sequences, n_marks = struct.unpack_from("<QQ", raw, 18)
    lengths = struct.unpack_from(f"<{n_sequences}i", raw, 34)
    pointers = struct.unpack_from(f"<{n_sequences}q", raw, 34 + 4 * n_sequences)
    marks = struct.unpack_from(f"<{n_marks}q", raw, 34 + 12 * n_sequences)
    assert len(raw) == 34 + 12 * n_sequences + 8 * n_marks and marks[0] == 0 and marks[-1] == n_sequences
    sequences = [list(struct.unpack_from(f"<{n}{letter}", tokens, at)) for n, at in zip(lengths, pointers)]
    assert sum(lengths) * struct.calcsize(letter) == len(tokens)
    return letter, [sum(sequences[a:b], []) for a, b in zip(marks, marks[1:])]


def write_megatron(prefix: Path, docs: list[list[list[int]]], code: int = 4, magic=b"MMIDIDX\x00\x00", version: int = 1) -> None:
    """A foreign data set by hand; a document is a list of sequences."""
    letter = {1: "B", 3: "h", 4: "i", 5: "q", 6: "d", 8: "H"}[code]
    sequences = [s for d in docs for s in d]
    flat = [t for s in sequences for t in s]
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(flat)}{letter}", *flat))
    lengths, marks = [len(s) for s in sequences], np.cumsum([0] + [len(d) for d in docs]).tolist()
    pointers = [sum(lengths[:i]) * struct.calcsize(letter) for i in range(len(lengths))]
    Path(f"{prefix}.idx").write_bytes(
        magic + struct.pack("<QBQQ", version, code, len(sequences), len(marks)) + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(pointers)}q", *pointers) + struct.pack(f"<{len(marks)}q", *marks))


def foreign(n: int = 400) -> list[list[list[int]]]:
    """Documents of one to three sequences, some of them empty, tokens below VOCAB."""
    rng = np.random.default_rng(5)
    return [[rng.integers(2, VOCAB, int(rng.integers(0, 60))).tolist() for _ in range(int(rng.integers(1, 4)))] + [[1]]
            for _ in range(n)]


@pytest.mark.parametrize("vocab, letter", [(VOCAB, "H"), (65_499, "H"), (65_500, "i")])
def test_written_shards_read_back_by_the_published_layout(small, tmp_path, vocab, letter):
    source, texts, folder = small
    if vocab != VOCAB:
        folder = corpus.tokenize(tmp_path, str(source), vocab, str(folder / "tokenizer.model"), 1, quiet)
    tok = tokenizer.load_tokenizer(folder)
    want = [ids + [tok.eos_id()] for ids in tokenizer.encode(tok, texts)]
    assert read_megatron(folder / "train-00000")[0] == letter
    train, val = documents(folder, "train"), documents(folder, "val")
    assert train == [d for d in want if d not in val] and val == [d for d in want if d in val] and 0 < len(val) < 15
    for split, docs in (("train", train), ("val", val), ("all", train + val)):
        read = shards.Shards(folder, split)
        assert [read[i].tolist() for i in range(len(read))] == docs
        assert read.lengths_N.tolist() == [len(d) for d in docs] and read.n_tokens == sum(map(len, docs))
        assert (read.vocab, read.eod, read.dtype) == (vocab, 1, shards.token_dtype(vocab))
    with pytest.raises(IndexError):
        read[len(read)]


@pytest.mark.parametrize("code", [3, 4, 5, 8])
def test_foreign_data_set_is_read(tmp_path, code):
    docs = foreign()
    write_megatron(tmp_path / "a", docs[:150], code)
    write_megatron(tmp_path / "b", docs[150:], code)
    flat = [sum(d, []) for d in docs]
    whole = shards.Shards(tmp_path, "all")
    assert [whole[i].tolist() for i in range(len(whole))] == flat and whole.first_shard.tolist() == [0, 150, 400]
    train, val = (shards.Shards(tmp_path, s) for s in shards.SPLITS)
    split = [[s[i].tolist() for i in range(len(s))] for s in (train, val)]
    assert Counter(map(tuple, split[0] + split[1])) == Counter(map(tuple, flat)) and 0 < len(split[1]) < 16
    assert not {tuple(d) for d in split[0]} & {tuple(d) for d in split[1]}       # equal documents go the same way
    assert train.n_tokens + val.n_tokens == whole.n_tokens and train.fingerprint() != val.fingerprint()
    for path in (tmp_path / "a", tmp_path / "a.bin", tmp_path / "a.idx"):
        assert len(shards.Shards(path, "all")) == 150
    assert "token range not checked" in data.verify(str(tmp_path)) and f"below {VOCAB}" in data.verify(str(tmp_path / "a"), VOCAB)
    with pytest.raises(ConfigError, match=r"b': token 3 of its .bin is 399, outside .* 399.*1 of 2 shards before it"):
        write_megatron(tmp_path / "a", [[[5, 1]]], code)
        write_megatron(tmp_path / "b", [[[5, 1]], [[7, 399, 1]]], code)
        data.verify(str(tmp_path), 399)


def test_foreign_data_set_is_packed(small, tmp_path):
    model = str(small[2] / "tokenizer.model")
    write_megatron(tmp_path / "f", foreign())
    rows = data.prepare(str(tmp_path / "f"), VOCAB, 64, 0, model, str(tmp_path / "c"), quiet)
    n = sum(data.Rows(rows, s).n_tokens for s in shards.SPLITS)
    assert n == sum(len(s) for d in foreign() for s in d) and tokenizer.load_tokenizer(rows).vocab_size() == VOCAB
    assert data.prepare(str(small[2]), VOCAB, 64, 0, "", str(tmp_path / "c"), quiet).is_dir()       # and a token set of ours


def test_a_foreign_data_set_is_read_again_only_where_it_has_changed(small, tmp_path, monkeypatch):
    def prepare():
        read.clear(), shards.HASHES.clear()  # as another process
        rows = data.prepare(str(tmp_path / "f"), VOCAB, 64, 0, str(small[2] / "tokenizer.model"), str(tmp_path / "c"), quiet)
        return rows, sorted(path.name for path in read if path.parent == tmp_path)

    read, real = [], shards.file_sha256
    monkeypatch.setattr(shards, "file_sha256", lambda path: read.append(path) or real(path))
    write_megatron(tmp_path / "f", foreign())
    rows, hashed = prepare()
    assert hashed == ["f.bin", "f.idx"] and prepare() == (rows, [])
    whole, before = (tmp_path / "f.bin").read_bytes(), os.stat(tmp_path / "f.bin")
    (tmp_path / "f.bin").write_bytes(whole[:-8] + whole[-4:] + whole[-4:])
    os.utime(tmp_path / "f.bin", ns=(before.st_atime_ns, before.st_mtime_ns))       # as if nothing had happened
    other, hashed = prepare()
    assert other != rows and hashed == ["f.bin"]
    (tmp_path / "c" / "hashes.json").write_text("[")
    assert prepare() == (other, ["f.bin", "f.idx"])
    (tmp_path / "c" / "hashes.json").unlink()

    def refuse(path, raw):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(shards, "write_synced", refuse)     # prepared data that may only be read
    assert prepare() == (other, ["f.bin", "f.idx"])


def gap(prefix):
    raw = bytearray(Path(f"{prefix}.idx").read_bytes())
    S, = struct.unpack_from("<Q", raw, 18)
    struct.pack_into("<q", raw, 34 + 4 * S + 8, struct.unpack_from("<q", raw, 34 + 4 * S + 8)[0] + 4)
    Path(f"{prefix}.idx").write_bytes(raw)


DAMAGES = {
    "magic": (lambda p: write_megatron(p, foreign(5), magic=b"TNTIDX\0\0\0"), "f.idx.*not a Megatron index"),
    "version": (lambda p: write_megatron(p, foreign(5), version=2), "f.idx.*version 2"),
    "floats": (lambda p: write_megatron(p, foreign(5), 6), "f.idx.*type code 6"),
    "empty index": (lambda p: os.truncate(f"{p}.idx", 0), "f.idx.*not a Megatron index"),
    "index cut off": (lambda p: os.truncate(f"{p}.idx", 100), "f.idx.*header.*cut off"),
    "tokens cut off": (lambda p: os.truncate(f"{p}.bin", 100), "f.bin.*100 bytes.*cut off"),
    "gap": (gap, "f.idx.*end to end"),
    "no tokens": (lambda p: os.remove(f"{p}.bin"), "f.bin.*missing"),
    "no index": (lambda p: os.remove(f"{p}.idx"), "f.idx.*missing"),
    "mixed types": (lambda p: write_megatron(p.with_name("g"), foreign(5), 8), "mixes"),
    "other tokenizer": (lambda p: write_megatron(p, [[[5, 1]], [[VOCAB, 1]]]), f"holds token {VOCAB}.*--tokenizer"),
    "negative": (lambda p: write_megatron(p, [[[5, 1]], [[-7, 1]]]), "holds token -7"),
    "nothing": (lambda p: write_megatron(p, []), "no documents"),
    "one document": (lambda p: write_megatron(p, [[[5, 1]]] * 3), "held out"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_foreign_data_set(small, tmp_path, name):
    write_megatron(tmp_path / "f", foreign(5))
    damage, words = DAMAGES[name]
    damage(tmp_path / "f")
    path = str(tmp_path if name in ("mixed types", "no tokens") else tmp_path / ("f.bin" if name == "no index" else "f.idx"))
    with pytest.raises(ConfigError, match=words):
        corpus.tokenize(tmp_path / "c", path, VOCAB, str(small[2] / "tokenizer.model"), 1, quiet)


def test_foreign_data_set_asks_for_its_tokenizer(small, tmp_path):
    write_megatron(tmp_path / "f", foreign(5))
    with pytest.raises(ConfigError, match="--tokenizer"):
        corpus.tokenize(tmp_path / "c", str(tmp_path / "f"), VOCAB, "", 1, quiet)
    model = tmp_path / "other.model"
    model.write_bytes(train(["some other words"] * 9, vocab_size=280))
    with pytest.raises(ConfigError, match="other.model.*not the tokenizer of"):
        corpus.tokenize(tmp_path / "c", str(small[2]), VOCAB, str(model), 1, quiet)
    with pytest.raises(ConfigError, match="--vocab=300.*400 pieces"):
        corpus.tokenize(tmp_path / "c", str(small[2]), 300, "", 1, quiet)


def test_verify_names_the_first_damaged_shard(tmp_path, small, tiny_parts):
    write_jsonl(tmp_path / "s" / "d.jsonl", 300)
    folder = corpus.tokenize(tmp_path, str(tmp_path / "s"), VOCAB, str(small[2] / "tokenizer.model"), 1, quiet)
    assert "every token below 400" in data.verify(str(folder))
    raw = bytearray((folder / "train-00002.bin").read_bytes())
    raw[50] ^= 1
    (folder / "train-00002.bin").write_bytes(raw)
    with pytest.raises(ConfigError, match=r"train-00002.bin.*differs from its hash.*2 of \d+ shards before it are whole"):
        data.verify(str(folder))
    os.truncate(folder / "train-00002.bin", len(raw) - 2)
    for check in (shards.Shards, data.verify):
        with pytest.raises(ConfigError, match="train-00002.bin.*bytes"):
            check(str(folder))


# ---- encoders -------------------------------------------------------------------------------------------------------

TEXTS = ["a\tb\n\n\tc", "  lead and trail  ", "🤗 émoji 漢字", "0123456789 3.14159", "</s>", "a</s>b<unk><s><0x0A>",
         "\r\n\r", "\0x\0", "\ufeffmid\ufeff", "▁ ▁under▁", "▅", "", " ", "\n",
         "x" * 5000, "        return x\n" * 50, "\ufffd", "a  b   c    ", "\n \n  \n", "don't x2y 2x"]


@pytest.mark.parametrize("n", range(len(TEXTS)))
def test_round_trip(tok, n):
    ids, = tokenizer.encode(tok, [TEXTS[n]])
    assert tok.decode(ids) == TEXTS[n]
    assert tok.eos_id() not in ids and tok.unk_id() not in ids
    assert tokenizer.token_bytes(tok)[ids].sum() == len(TEXTS[n].encode())


def test_round_trip_together(tok):
    assert [tok.decode(ids) for ids in tokenizer.encode(tok, TEXTS)] == TEXTS


def train(lines: list[str], **change) -> bytes:
    """A SentencePiece model with the settings of ours, but for `change`."""
    out = io.BytesIO()
    settings = dict(vocab_size=420, model_type="bpe", normalization_rule_name="identity", byte_fallback=True, split_digits=True,
                    add_dummy_prefix=False, remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
                    user_defined_symbols=["\n"], unk_id=0, eos_id=1, bos_id=-1, pad_id=-1, num_threads=1, minloglevel=2,
                    hard_vocab_limit=False)
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=out, **{**settings, **change})
    return out.getvalue()


# a change of the model's settings -> part of the reason why no cut is allowed, or "" where chunks are exact
MODELS = {
    "ours": ({}, ""),
    "numbers": ({"split_digits": False, "split_by_number": False}, ""),
    "scripts": ({"split_by_unicode_script": False}, ""),
    "symbols": ({"user_defined_symbols": ["\n", "x=", "=y (", "k s", "2 ", "done."]}, "goes on after"),
    "symbols in words": ({"user_defined_symbols": ["\n\n", "x=", "<tag>", "8 "]}, "goes on after"),
    "marks": ({"user_defined_symbols": ["\n\n", "x=", "<tag>", "\n#"]}, ""),
    "sentences": ({"split_by_whitespace": False}, "goes on after"),
    "suffix": ({"treat_whitespace_as_suffix": True}, "space"),
    "prefix": ({"add_dummy_prefix": True}, "space"),
    "unknown": ({"byte_fallback": False}, "fallback"),
    "unigram": ({"model_type": "unigram"}, "unigram"),
    "normal form": ({"normalization_rule_name": "nmt_nfkc"}, "normaliser"),
    "squeezed": ({"remove_extra_whitespaces": True}, "normaliser"),
}


def fuzz(n: int, seed: int) -> list[str]:
    """Random texts in which everything meets everything."""
    rng = np.random.default_rng(seed)
    atoms = WORDS + list("aZ09 \n\t_-=().'é漢🤗\0\r") + "  |\n\n|    |</s>|<unk>|<0x41>|<tag>|don't|ab1c2".split("|")
    return ["".join(rng.choice(atoms, int(rng.integers(1, 120)))) for _ in range(n)]


@pytest.mark.parametrize("name", MODELS)
def test_chunk_cache_is_exact(small, name):
    """Against plain SentencePiece on every text, for every kind of model that allows cuts; and no cuts for the others."""
    change, reason = MODELS[name]
    model = train([line for text in small[1] for line in (text, text.replace(" ", ""))] + fuzz(200, 1), **change)
    pattern, why = tokenizer.chunk_pattern(model)
    assert bool(pattern) != bool(reason) and reason in why
    fast, plain = tokenizer.Encoder(model, 500), tokenizer.Encoder(model, 500, "sentencepiece")
    raws = [text.encode() for text in TEXTS + small[1] + fuzz(400, 2)]
    assert fast(raws) == plain(raws) == [np.array(ids + [1], "<u2").tobytes()
                                         for ids in tokenizer.encode(plain.tok, [raw.decode() for raw in raws])]
    if pattern:
        assert all(b"".join(pattern.findall(raw)) == raw for raw in raws) and len(pattern.findall(raws[-1])) > 3
        assert not fast.note and len(fast.cache) > 100
    else:
        assert why in fast.note


def test_chunk_cache_in_little_memory(small, monkeypatch):
    """Long documents in slices that end anywhere, a cache that is full all the time."""
    model = (small[2] / "tokenizer.model").read_bytes()
    raws = ["".join(fuzz(40, 3)).replace("▁", "").encode(), b" " * 3000, b"x" * 3000, b"a  \n" * 700]
    raws += [text.encode() for text in TEXTS]
    want = tokenizer.Encoder(model, VOCAB, "sentencepiece")(raws)
    for size in (1, 7, 100, 1000):
        monkeypatch.setattr(tokenizer, "SLICE_BYTES", size)
        monkeypatch.setattr(tokenizer, "CACHE_BYTES", 300)
        encoder = tokenizer.Encoder(model, VOCAB)
        assert encoder(raws) == want and encoder(raws) == want


def test_encoder_that_differs_is_not_trusted(small):
    encoder = tokenizer.Encoder((small[2] / "tokenizer.model").read_bytes(), VOCAB)
    plain = tokenizer.Encoder((small[2] / "tokenizer.model").read_bytes(), VOCAB, "sentencepiece")([b"the loss"])
    encoder.trust([b"the loss"])
    assert encoder._encode == encoder._chunked and not encoder.note
    encoder.cache[b"the"] = encoder.cache[b" loss"]
    encoder.trust([b"the loss"])
    assert encoder([b"the loss"]) == plain and "differs from SentencePiece" in encoder.note


ODD_LINES = [b'{"text": "a"}\n', b'  {"x": [1, {"y": null}], "text": "b\\u00e9\\n\\u0000"} \r\n', '{"text": "é\u2028"}'.encode(), b"", b" \t\n",
             b'\xef\xbb\xbf{"text": "c"}', b'{"text": "half \\ud800"}', b'{"text": "\\ud83e\\udd17"}', b'{"text": "bad \xff"}',
             b'{"text": "first", "text": "last"}', b'{"text": "t", "n": NaN, "m": 1' + b"0" * 400 + b'}', b'{"text": "tab\t"}', b"null\n",
             b'{"text": 3}', b'{"other": "d"}', b'["text"]', b'{"text": "cut', b'{"text": "e"} {}', b'{"text": "f", "deep": ' + b"[" * 5000 +
             b"]" * 5000 + b"}", b"{'text': 'g'}", b'{"text": "\\x"}', b'{"text": "h",}']


def test_both_json_parsers_take_and_refuse_the_same(monkeypatch):
    pytest.importorskip("orjson")

    def parsed(raw):
        counts = Counter()
        try:
            return corpus._parse(raw, lambda: "line 1", counts), counts
        except ConfigError as error:
            return re.sub(r"\(.*\)", "", str(error)), counts

    quick = [parsed(raw) for raw in ODD_LINES]
    monkeypatch.setattr(corpus, "strict_json", None)
    assert quick == [parsed(raw) for raw in ODD_LINES]
    assert len([text for text, _ in quick if text and text.startswith("line 1")]) == 11


@pytest.mark.skipif(not importlib.util.find_spec("gigatoken"), reason="the optional package gigatoken is not installed")
@pytest.mark.parametrize("name", ["ours", "scripts", "marks", "sentences", "unigram"])
def test_gigatoken_is_exact(small, tmp_path, name):
    model = train(small[1] + fuzz(200, 1), **MODELS[name][0])
    raws = [text.encode() for text in TEXTS + small[1] + fuzz(400, 2)]
    want = tokenizer.Encoder(model, 500, "sentencepiece")(raws)
    for _ in range(2):  # the second takes what the first has kept
        encoder = tokenizer.Encoder(model, 500, "gigatoken", tmp_path)
        encoder.trust(raws[:4])
        assert encoder(raws) == want
        assert ("does not read" in encoder.note) == (name == "unigram") == (not list(tmp_path.iterdir()))


def test_encoder_names(small, tmp_path, monkeypatch):
    model = (small[2] / "tokenizer.model").read_bytes()
    with pytest.raises(ConfigError, match="--encoder='fast'.*cache"):
        corpus.tokenize(tmp_path, str(small[0]), VOCAB, "", 1, quiet, encoder="fast")
    for name in ("gigatoken", "gigatoken._load.sentencepiece", "gigatoken.gigatoken_rs"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="pip install gigatoken"):
        tokenizer.Encoder(model, VOCAB, "gigatoken")


def test_tokenizer_settings(tok):
    assert tok.vocab_size() == VOCAB and tok.id_to_piece(tok.eos_id()) == "</s>" and tok.bos_id() == -1
    assert tok.encode("\n\n") == [tok.piece_to_id("\n")] * 2
    assert len(tok.encode("2048")) == 4
    sizes = tokenizer.token_bytes(tok)
    assert sizes.dtype == np.int64 and sizes.shape == (VOCAB,)
    assert sizes[tok.eos_id()] == sizes[tok.unk_id()] == 0 and sizes[tok.piece_to_id("<0xE2>")] == 1
    assert sizes[tok.piece_to_id("▁")] == 1


def test_tokenizer_hash(tok):
    model = tok.serialized_model_proto()
    assert [v for f, v in tokenizer.wire(model) if f == 1][1][2:6] == b"</s>"
    assert len([1 for f, _ in tokenizer.wire(model) if f == 1]) == VOCAB
    assert tokenizer.tokenizer_hash(model) == tokenizer.tokenizer_hash(model)
    # trainer settings at the end of the message (here: input file, field 1) change the bytes, not the hash
    assert tokenizer.tokenizer_hash(model + b"\x12\x05\x0a\x03a/b") == tokenizer.tokenizer_hash(model)
    assert tokenizer.tokenizer_hash(model.replace(b"</s>", b"</t>")) != tokenizer.tokenizer_hash(model)
    assert tokenizer.tokenizer_hash(model.replace(b"identity", b"identitz")) != tokenizer.tokenizer_hash(model)


# ---- the token set is a function of the text alone ------------------------------------------------------------------

def test_same_bytes_whatever_does_the_work(tmp_path, tiny_parts):
    """The tokenizer, its sample and the shards do not depend on the number of processes, the encoder or the file's name."""
    texts = write_jsonl(tmp_path / "s" / "d.jsonl", 1500, words=150)
    one = corpus.tokenize(tmp_path / "one", str(tmp_path / "s"), VOCAB, "", 1, quiet)
    (tmp_path / "s" / "d.jsonl").rename(tmp_path / "renamed.jsonl")
    three = corpus.tokenize(tmp_path / "three", str(tmp_path / "renamed.jsonl"), VOCAB, "", 3, quiet)
    assert one.name == three.name and contents(one) == contents(three) and len(list(one.glob("train-*.bin"))) > 4
    plain = corpus.tokenize(tmp_path / "plain", str(tmp_path / "renamed.jsonl"), VOCAB, "", 2, quiet, encoder="sentencepiece")
    assert contents(plain) == contents(one) and str(tmp_path) not in (one / "manifest.json").read_text()
    tok = tokenizer.load_tokenizer(one)
    got = [tok.decode(d) for split in shards.SPLITS for d in documents(one, split)]
    assert Counter(got) == Counter(texts)
    assert not [p for p in one.iterdir() if p.name[0] == "."]


def test_lines_belong_where_they_begin(tmp_path):
    raw = b"a\n\nbcd\n" + b"e" * 9 + b"\nf"
    for first in range(len(raw) + 1):
        for second in range(first, len(raw) + 1):
            spans = [list(corpus._lines(io.BytesIO(raw), a, b, "")) for a, b in ((0, first), (first, second), (second, len(raw)))]
            assert sum(spans, []) == raw.splitlines(keepends=True)


def packed(path: Path, texts: list[str]) -> None:
    """Documents in each kind of file."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines))
    elif path.name.endswith(".zst"):
        import zstandard
        path.write_bytes(zstandard.compress(lines))
    elif path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet
        parquet.write_table(pyarrow.table({"id": list(range(len(texts))), "text": texts}), path)
    else:
        path.write_bytes(lines)


KINDS = [".jsonl", ".jsonl.gz",
         pytest.param(".jsonl.zst", marks=pytest.mark.skipif(not importlib.util.find_spec("zstandard"), reason="no zstandard")),
         pytest.param(".parquet", marks=pytest.mark.skipif(not importlib.util.find_spec("pyarrow"), reason="no pyarrow"))]


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_files(small, tmp_path, kind, tiny_parts, monkeypatch):
    """Every kind gives the documents in order; a compressed file grows to many parts, and goes on where it was stopped."""
    model = str(small[2] / "tokenizer.model")
    packed(tmp_path / f"d{kind}", ["\ufeff" * (i % 3 == 0) + text for i, text in enumerate(small[1])])
    folder = corpus.tokenize(tmp_path / "c", str(tmp_path / f"d{kind}"), VOCAB, model, 2, quiet)
    want = [d for split in shards.SPLITS for d in documents(small[2], split)]
    assert [d for split in shards.SPLITS for d in documents(folder, split)] == want and len(list(folder.glob("train-*.bin"))) > 2
    assert shards.read_manifest(folder)["cleaning"] == {"bom_removed": 100}
    if kind != ".jsonl":
        raw = (tmp_path / f"d{kind}").read_bytes()
        (tmp_path / f"cut{kind}").write_bytes(raw[:len(raw) // 2])
        with pytest.raises(ConfigError, match=f"cut{kind}"):
            corpus.tokenize(tmp_path / "c", str(tmp_path / f"cut{kind}"), VOCAB, model, 2, quiet)
        fails_after(monkeypatch, 200)
        with pytest.raises(OSError, match="No space"):
            corpus.tokenize(tmp_path / "c2", str(tmp_path / f"d{kind}"), VOCAB, model, 1, quiet)
        monkeypatch.undo()
        set_tiny_parts(monkeypatch)
        kept = stamps(tmp_path / "c2")
        again = corpus.tokenize(tmp_path / "c2", str(tmp_path / f"d{kind}"), VOCAB, model, 1, quiet)
        assert contents(again) == contents(folder) and len(kept) > 1 and kept <= stamps(tmp_path / "c2")


def test_text_files_and_missing_packages(tmp_path, monkeypatch, tiny_parts):
    for i in range(200):
        (tmp_path / f"{i}.txt").write_text(f"text {i} of many\n" * (i + 1))
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "x.txt.gz").write_bytes(gzip.compress("packed\nté\n".encode() * 99))
    folder = corpus.tokenize(tmp_path / "c", str(tmp_path), 300, "", 2, quiet)
    tok = tokenizer.load_tokenizer(folder)
    got = [tok.decode(d) for split in shards.SPLITS for d in documents(folder, split)]
    assert Counter(got) == Counter([f"text {i} of many\n" * (i + 1) for i in range(200)] + ["packed\nté\n" * 99])
    assert 4 < len(list(folder.glob("train-*.bin"))) < 20
    for name, module in (("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")):
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.setitem(sys.modules, "compression", None)
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(ConfigError, match=f"pip install {module}"):
            corpus.check_source(str(tmp_path / name))


def test_tokenizer_sees_training_documents_only(tmp_path, tiny_parts, monkeypatch):
    """A bounded sample in hash order, the same however few documents a first look lets through."""
    texts = write_jsonl(tmp_path / "d.jsonl", 1000, words=40)
    seen = {}
    for sample_bytes in (50_000, 1 << 30):
        monkeypatch.setattr(corpus, "SAMPLE_BYTES", sample_bytes)
        units = corpus._units([(str(tmp_path / "d.jsonl"), "text", (tmp_path / "d.jsonl").stat().st_size)], "--data", 1 << 14)
        with corpus.Pool(1) as pool:
            seen[sample_bytes] = corpus._sample_texts(pool, units, {"kind": "hash"}, quiet)
    held = {text for text in texts if corpus._key(text.encode())[0] < shards.HELD_OUT * 2**64}
    order = sorted(set(texts) - held, key=lambda text: corpus._key(text.encode())[1])
    assert held and seen[1 << 30] == order
    assert 50_000 <= sum(len(t.encode()) for t in seen[50_000]) < 100_000 + 16 * 400 and seen[50_000] == order[:len(seen[50_000])]
    assert sum(len(line) + 1 for line in corpus.sample_lines(["x" * 9000 + "\n▅y"])) == 9000 + 3 + 2


def test_single_document_is_split(tmp_path):
    text = "".join(f"line {i} of the play\n" for i in range(2000))
    (tmp_path / "play.txt").write_text(text)
    folder = corpus.tokenize(tmp_path / "c", str(tmp_path / "play.txt"), 300, "", 1, quiet)
    tok = tokenizer.load_tokenizer(folder)
    (train_,), (val,) = documents(folder, "train"), documents(folder, "val")
    assert tok.decode(train_) + tok.decode(val) == text and 0.005 < len(val) / len(train_) < 0.02


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
    path = corpus.tokenize(tmp_path / "c", str(folder), 290, "", 1, lines.append)
    manifest = shards.read_manifest(path)
    assert manifest["cleaning"] == {"bom_removed": 1, "crlf_to_lf": 1, "invalid_utf8_replaced": 1, "with_nul": 1,
                                    "empty_dropped": 2, "surrogates_replaced": 1}
    assert all(name in "".join(lines) for name in manifest["cleaning"])
    tok = tokenizer.load_tokenizer(path)
    texts = {tok.decode(ids) for s in shards.SPLITS for ids in documents(path, s)}
    assert {"with a mark\nand two line ends\n", "bad \ufffd\ufffd bytes, \ufffd and a zero \0 byte",
            "half \ufffd pair, whole 🤗 pair", "y" * 1_000_000} <= texts
    assert len(texts) == 34


# ---- runs that end early --------------------------------------------------------------------------------------------

def stamps(folder: Path) -> set:
    """(inode, time) of every finished shard below a folder: a part that is made again gets others. Of a run that was killed, those
    of parts that have their note, which is written last."""
    return {(s.st_ino, s.st_mtime_ns) for p in folder.rglob("*.bin") for s in [p.stat()]
            if p.name.count(".") == 1 or p.with_name(p.name.rsplit(".", 2)[0] + ".json").is_file()}


def fails_after(monkeypatch, n: int) -> None:
    """The disk is full after n documents."""
    real, left = shards.ShardWriter.add, [n]

    def add(self, tokens):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, tokens)
    monkeypatch.setattr(shards.ShardWriter, "add", add)


def test_full_disk(small, tmp_path, tiny_parts, monkeypatch):
    write_jsonl(tmp_path / "d.jsonl", 600)
    args = str(tmp_path / "d.jsonl"), VOCAB, str(small[2] / "tokenizer.model"), 1, quiet
    want = contents(corpus.tokenize(tmp_path / "whole", *args))
    fails_after(monkeypatch, 450)
    with pytest.raises(OSError, match=r"tokens-.*full.*[1-9][\d,]+ more bytes.*[4-9] of \d+ parts are finished") as error:
        corpus.tokenize(tmp_path / "c", *args)
    assert error.value.errno == errno.ENOSPC
    kept = stamps(tmp_path / "c")
    monkeypatch.undo()
    set_tiny_parts(monkeypatch)
    lines = []
    folder = corpus.tokenize(tmp_path / "c", *args[:-1], lines.append)
    assert contents(folder) == want and len(kept) >= 4 and kept <= stamps(folder)
    assert any("parts were finished before" in line for line in lines) and not list((tmp_path / "c").glob(".*partial"))


def _tokenize_in_process(folder, source, model, pids):
    """In a forked process, which remembers its workers."""
    real = subprocess.Popen

    def remember(*args, **kwargs):
        process = real(*args, **kwargs)
        with open(pids, "a") as f:
            f.write(f"{process.pid}\n")
        return process
    corpus.subprocess.Popen = remember
    corpus.tokenize(folder, str(source), VOCAB, str(model), 2, quiet)


def wait_for(condition, seconds: float = 60):
    end = time.time() + seconds
    while not (found := condition()):
        assert time.time() < end
        time.sleep(0.001)
    return found


def ended(pid: int) -> bool:
    """Whether a process is gone, or dead and not yet waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture(scope="module")
def large(tmp_path_factory, small):
    """(source, token set of an undisturbed run) of about 50 parts."""
    base, model = tmp_path_factory.mktemp("large"), str(small[2] / "tokenizer.model")
    write_jsonl(base / "d.jsonl", 3000)
    with pytest.MonkeyPatch.context() as patch:
        set_tiny_parts(patch)
        return base / "d.jsonl", corpus.tokenize(base / "c", str(base / "d.jsonl"), VOCAB, model, 1, quiet)


@pytest.mark.parametrize("parts", [0, 1, 20])
def test_kill_and_go_on(small, large, tmp_path, tiny_parts, parts):
    """Kill -9 when so many parts are finished: its workers end too, the next run keeps the parts, and the bytes are the same."""
    source, whole = large
    model = small[2] / "tokenizer.model"
    process = multiprocessing.get_context("fork").Process(
        target=_tokenize_in_process, args=(tmp_path / "c", source, model, tmp_path / "pids"))
    process.start()
    wait_for(lambda: (tmp_path / "pids").exists() and len(list((tmp_path / "c").glob(".*partial/.part-*.json"))) >= parts)
    process.kill()
    process.join()
    assert not list((tmp_path / "c").glob("tokens-*"))
    for pid in (tmp_path / "pids").read_text().split():
        wait_for(lambda: ended(int(pid)), 10)
    kept = stamps(tmp_path / "c")
    assert len(kept) >= parts
    again = corpus.tokenize(tmp_path / "c", str(source), VOCAB, str(model), 2, quiet)
    assert contents(again) == contents(whole) and kept <= stamps(again)


def test_killed_worker_is_an_error(small, large, tmp_path, tiny_parts, monkeypatch):
    source, whole = large
    workers, real = [], subprocess.Popen
    monkeypatch.setattr(corpus.subprocess, "Popen", lambda *a, **k: workers.append(real(*a, **k)) or workers[-1])

    def kill_one(self, *_):
        if not killed and list((tmp_path / "c").glob(".*partial/.part-*.json")):
            killed.append(workers[0].kill())
    killed = []
    monkeypatch.setattr(corpus.Progress, "finished", kill_one)
    with pytest.raises(ChildProcessError, match=r"part \d+ \('.*d.jsonl' from byte .* killed by SIGKILL.*--workers"):
        corpus.tokenize(tmp_path / "c", str(source), VOCAB, str(small[2] / "tokenizer.model"), 2, quiet)
    assert all(w.returncode is not None for w in workers) and len(workers) == 2
    monkeypatch.undo()
    set_tiny_parts(monkeypatch)
    again = corpus.tokenize(tmp_path / "c", str(source), VOCAB, str(small[2] / "tokenizer.model"), 1, quiet)
    assert contents(again) == contents(whole)


def test_worker_that_is_dead_before_its_task_is_an_error(monkeypatch):
    real = subprocess.Popen

    def dead(command, **pipes):
        process = real([sys.executable, "-c", ""], **pipes)
        process.wait()
        return process
    monkeypatch.setattr(corpus.subprocess, "Popen", dead)
    task = {"do": "hash", "bytes": corpus.FEW_BYTES + 1, "spans": [("a.jsonl", 0, 9)]}
    with pytest.raises(ChildProcessError, match="a.jsonl' from byte 0 to 9 ended with code 0"), corpus.Pool(2) as pool:
        list(pool.run([task, task]))


def test_bad_line_in_a_worker(small, tmp_path, tiny_parts):
    write_jsonl(tmp_path / "d.jsonl", 900)
    lines = (tmp_path / "d.jsonl").read_text().splitlines(keepends=True)
    for n, bad, words in ((700, '{"text": \n', "not JSON"), (333, '{"txt": "a"}\n', "no string")):
        (tmp_path / "bad.jsonl").write_text("".join(lines[:n] + [bad] + lines[n:]))
        with pytest.raises(ConfigError, match=rf"bad.jsonl' line {n + 1} .*{words}"):
            corpus.tokenize(tmp_path / "c", str(tmp_path / "bad.jsonl"), VOCAB, str(small[2] / "tokenizer.model"), 2, quiet)


def test_source_that_changes_meanwhile(small, tmp_path, monkeypatch):
    """Its tokens must not go by the name of what it was before."""
    write_jsonl(tmp_path / "d.jsonl", 300)

    def touch(self, raw, split):
        os.utime(tmp_path / "d.jsonl", (1, 1))
        return real(self, raw, split)
    real = corpus.Part.add
    monkeypatch.setattr(corpus.Part, "add", touch)
    with pytest.raises(ConfigError, match="d.jsonl' was changed while it was read"):
        corpus.tokenize(tmp_path / "c", str(tmp_path / "d.jsonl"), VOCAB, "", 1, quiet)
    assert not list(tmp_path.rglob("*.bin"))


def test_interrupt_ends_all_processes(small, tmp_path):
    """The command itself, by Ctrl-C: what every process of the terminal gets."""
    for i in range(3):
        write_jsonl(tmp_path / "s" / f"{i}.jsonl", 12_000, seed=i)
    argv = [sys.executable, ROOT / "data.py", "tokenize", f"--data={tmp_path / 's'}", f"--vocab={VOCAB}", "--workers=2",
            f"--tokenizer={small[2] / 'tokenizer.model'}", f"--out={tmp_path / 'out'}"]
    process = subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for(lambda: list(tmp_path.glob(".out-*/.part-*.bin")))
    os.killpg(process.pid, signal.SIGINT)
    assert "goes on from there" in process.communicate(timeout=20)[1] and process.returncode == 1
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_out(small, tmp_path, capsys):
    source, _, folder = small
    out = tmp_path / "sets" / "mine"
    argv = ["tokenize", f"--data={source}", f"--vocab={VOCAB}", f"--cache={tmp_path / 'c'}", f"--out={out}"]
    data.main(argv)
    assert capsys.readouterr().out.strip() == str(out) and contents(out) == contents(folder)
    before = stamps(tmp_path)
    data.main(argv)
    assert stamps(tmp_path) == before
    with pytest.raises(ConfigError, match="--out=.*other settings"):
        data.main([*argv, "--vocab=401"])
    with pytest.raises(ConfigError, match="--workers=-1"):
        data.main([*argv, "--workers=-1"])
    with pytest.raises(ConfigError, match="--out=.*exists and holds no token set"):
        data.main([*argv, f"--out={tmp_path}"])
    with pytest.raises(ConfigError, match="--out=.*cannot be made"):
        data.main([*argv, f"--out={source}/below/a/file"])


def test_no_tensors_in_workers():
    code = "import corpus, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ---- wrong inputs ---------------------------------------------------------------------------------------------------

@pytest.fixture
def sources(tmp_path, small):
    """Files that are wrong in one way each."""
    files = {"empty.txt": b"", "blank.txt": b" \n \n", "text.csv": b"a,b", "line.txt": b"only one line",
             "bad.jsonl": b'{"text": "a"}\n{"text": \n', "key.jsonl": b'{"text": "a"}\n{"txt": "b"}\n',
             "list.jsonl": b"[1]\n", "type.jsonl": b'{"text": 3}\n', "twice.jsonl": b'{"text": "a"}\n' * 3,
             "tiny.txt": b"a few\nwords\n" * 50, "junk.model": b"\x07junk", "empty.model": b"", "file": b"",
             "junk.txt.gz": b"no gzip", "junk.parquet": b"no table"}
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
    ({"data": "junk.txt.gz"}, ["--data", "junk.txt.gz", "decompressed"]),
    ({"data": "tiny.txt", "vocab": 9000}, ["--vocab=9000", "at most"]),
    ({"vocab": 100}, ["--vocab=100", "too small"]),
    ({"vocab": 0}, ["--vocab=0"]),
    ({"vocab": "x"}, ["--vocab='x'"]),
    ({"vocab": 2**31}, [f"--vocab={2**31}"]),
    ({"tokenizer": "nowhere.model"}, ["--tokenizer", "nowhere.model"]),
    ({"tokenizer": "empty.model"}, ["--tokenizer", "empty.model"]),
    ({"tokenizer": "junk.model"}, ["--tokenizer", "junk.model", "SentencePiece"]),
    ({"tokenizer": "good.model", "vocab": 300}, ["--vocab=300", "400", "good.model"]),
    ({"cache": "file"}, ["--cache", "file"]),
], ids=str)
def test_bad_inputs(sources, change, words):
    setting = {"data": "good.jsonl", "vocab": VOCAB, "tokenizer": "", "cache": "c", **change}
    for key in ("data", "tokenizer", "cache"):
        setting[key] = setting[key] and str(sources / setting[key])
    with pytest.raises(ConfigError) as error:
        corpus.tokenize(**setting, workers=1, log=quiet)
    for word in words:
        assert word in str(error.value)


@pytest.mark.skipif(not importlib.util.find_spec("pyarrow"), reason="the optional package pyarrow is not installed")
def test_bad_parquet(sources):
    import pyarrow
    from pyarrow import parquet
    parquet.write_table(pyarrow.table({"texts": ["a"]}), sources / "column.parquet")
    parquet.write_table(pyarrow.table({"text": [1]}), sources / "type.parquet")
    for name, words in (("junk", "not a sound .parquet"), ("column", "no column \"text\""), ("type", "int64, not strings")):
        with pytest.raises(ConfigError, match=f"{name}.parquet.*{words}"):
            corpus.tokenize(sources / "c", str(sources / f"{name}.parquet"), VOCAB, "", 1, quiet)


def test_document_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "MAX_DOCUMENT", 1000)
    (tmp_path / "a.txt").write_text("x\n" * 600)
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n' + json.dumps({"text": "x" * 1000}) + "\n")
    for name in ("a.txt", "b.jsonl"):
        with pytest.raises(ConfigError, match=f"{name}.*longer than 1,000 bytes"):
            corpus.tokenize(tmp_path / "c", str(tmp_path / name), VOCAB, "", 1, quiet)


def test_check_source(sources):
    corpus.check_source("embedded")
    corpus.check_source(str(sources / "good.jsonl"), str(sources / "good.model"))
    for bad in ("nowhere", "hollow", "empty.txt", "text.csv"):
        with pytest.raises(ConfigError, match=f"--data=.*{bad}"):
            corpus.check_source(str(sources / bad))
    with pytest.raises(ConfigError, match="--tokenizer=.*nowhere"):
        corpus.check_source("embedded", str(sources / "nowhere"))


def test_links_in_a_directory_are_followed(tmp_path):
    texts, other = tmp_path / "texts", tmp_path / "other"
    for folder, name in ((texts / "inside", "a.txt"), (other / "deep", "b.txt")):
        folder.mkdir(parents=True)
        (folder / name).write_text("text")
    (texts / "linked").symlink_to(other)                     # a directory elsewhere,
    (texts / "again").symlink_to("inside")                   # one that is read anyway,
    (other / "deep" / "up").symlink_to("..")                 # a circle,
    (texts / "self").symlink_to("self")                      # and what leads nowhere at all
    (texts / "file.txt").symlink_to(other / "deep" / "b.txt")
    with pytest.raises(ConfigError, match="texts/self' is a link to 'self', which is not there"):
        corpus.check_source(str(texts))
    (texts / "self").unlink()
    found = [path.relative_to(texts) for path in corpus._user_files(str(texts))]
    assert sorted(path.name for path in found) == ["a.txt", "b.txt", "file.txt"] and Path("linked/deep/b.txt") in found
    for name, gone in (("c.jsonl.gz", True), ("folder", True), ("readme.md", False)):
        (texts / name).symlink_to(tmp_path / "gone")
        if gone:
            with pytest.raises(ConfigError, match=f"{name}' is a link to .*gone', which is not there"):
                corpus.check_source(str(texts))
            (texts / name).unlink()
    corpus.check_source(str(texts))


# ---- the corpus that comes with Python ------------------------------------------------------------------------------

def test_embedded_source_split():
    long = "é word " * 40 + "end"
    rest = '        if os:\n            async def g():\n                """short"""\n                return "é"\n'
    head = '"""%s"""\nimport os\nclass A:\n    def f(self):\n        %s\n'
    docstrings, code = corpus.split_source(head % (long, f"r'''{long}1\n        more'''") + rest)
    assert sorted(docstrings) == [long, long + "1\nmore"]
    assert code == head % ("...", '"""..."""') + rest
    compile(code, "code", "exec")


def test_embedded(tmp_path, monkeypatch):
    """The real scan over the smallest of the packages and the standard library."""
    monkeypatch.setattr(corpus, "PACKAGES", ("numpy", "no_such_package"))
    folder = corpus.tokenize(tmp_path, "embedded", 2048, "", 0, quiet)
    manifest = shards.read_manifest(folder)
    prose, code = manifest["domains"]["prose"], manifest["domains"]["code"]
    assert prose["bytes"] > 1_000_000 and 0.8 < code["bytes"] / prose["bytes"] < 1.3
    assert prose["held_out"] and set(manifest["versions"]) == {"numpy", "python", "sentencepiece"}
    cached, = tmp_path.glob("corpus-*")
    texts = {name: [json.loads(line)["text"] for line in open(cached / f"{name}.jsonl")] for name in ("prose", "code")}
    every = texts["prose"] + texts["code"]
    assert len(set(every)) == len(every) == prose["documents"] + code["documents"]       # no document twice
    held = {text for text in every if corpus._key(text.encode())[0] < shards.HELD_OUT * 2**64}
    assert len(held) == prose["held_out"] + code["held_out"]
    train_code = "\n".join(text for text in texts["code"] if text not in held)
    assert not any(text.split("\n")[0] in train_code and text in train_code for text in held & set(texts["prose"]))
    assert sys.prefix not in train_code and sys.base_prefix not in train_code
