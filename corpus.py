"""Text in, tokens out, once: documents are found, cleaned and counted, then encoded.

See data.py for the directories that this writes, and for what becomes of them.
"""
import ast
import contextlib
import errno
import fcntl
import gc
import hashlib
import importlib.metadata
import importlib.util
import inspect
import io
import json
import os
import re
import shutil
import sys
import sysconfig
import time
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import sentencepiece

from model import ConfigError

FORMAT = 1                       # raise it when any stage would write other bytes for the same inputs
SPLITS = ("train", "val")
HELD_OUT = 0.01                  # share of the documents that is never trained on
PACKAGES = ("torch", "numpy", "sympy", "networkx")      # besides the standard library; those present are read
SKIP_DIRS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
MIN_DOCSTRING = 200              # characters; shorter ones are labels rather than prose
MAX_SOURCE = 200_000             # bytes; larger source files are tables and generated code, only docstrings are taken
SAMPLE_BYTES = 8_000_000         # text that the tokenizer is trained on
ENCODE_BYTES = 4_000_000         # text that is encoded and written at a time
SPACE = "\u2581"                 # SentencePiece writes a space as this character


# ---------------------------------------------------------------------------------------------------------------------
# Stages: directories that exist only when they are finished
# ---------------------------------------------------------------------------------------------------------------------

def digest(value) -> str:
    """Hash of a JSON value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            h.update(block)
    return h.hexdigest()


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def read_manifest(path) -> dict:
    """The manifest of a finished directory, after a check of every file's size (their hashes: `verify`).

    Raises ConfigError for a directory that is not one of ours, of another format, or with a damaged file."""
    path = Path(path)
    file = path / "manifest.json"
    if not file.is_file():
        raise ConfigError(f"{str(path)!r} is not a prepared directory: it has no manifest.json. "
                          f"Make one with `python data.py prepare`.")
    try:
        manifest = json.loads(file.read_bytes())
        intact = manifest.pop("digest") == digest(manifest)
    except (ValueError, KeyError):
        intact = False
    if not intact:
        raise ConfigError(f"{str(file)!r} is damaged. Delete {str(path)!r} and run `python data.py prepare` again.")
    if manifest["format"] != FORMAT:
        raise ConfigError(f"{str(path)!r} has data format {manifest['format']}, this program reads {FORMAT}. "
                          f"Make it anew with `python data.py prepare`.")
    for name, want in manifest["files"].items():
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size != want["bytes"]:
            found = "is missing" if size is None else f"has {size:,} bytes"
            raise ConfigError(f"{str(path / name)!r} {found}, the manifest says {want['bytes']:,} bytes. "
                              f"Delete {str(path)!r} and run `python data.py prepare` again.")
    return manifest


@contextlib.contextmanager
def _locked(path: Path):
    """One builder at a time, to save work. Not needed for safety (the rename is), so a file system without locks
    is no error."""
    with open(path, "w") as f:
        with contextlib.suppress(OSError):
            fcntl.flock(f, fcntl.LOCK_EX)
        yield


def _rename(tmp: Path, final: Path) -> None:
    """Publish tmp as final. Where another process has published the same content first, its copy stands."""
    try:
        tmp.rename(final)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


def stage(cache: Path, name: str, build) -> Path:
    """cache/name, built by build(directory) -> manifest entries if it is not there yet."""
    final = cache / name
    if final.is_dir():
        read_manifest(final)
        return final
    with _locked(cache / f".{name}.lock"):
        if final.is_dir():                                   # another process was faster
            read_manifest(final)
            return final
        for stale in cache.glob(f".{name}.tmp-*"):           # of a killed run: a day old, so surely nobody's
            if time.time() - stale.stat().st_mtime > 86400:
                shutil.rmtree(stale, ignore_errors=True)
        tmp = cache / f".{name}.tmp-{os.uname().nodename}-{os.getpid()}-{os.urandom(4).hex()}"
        tmp.mkdir()
        try:
            manifest = build(tmp)
            files = sorted(p for p in tmp.iterdir())
            manifest["format"] = FORMAT
            manifest["files"] = {p.name: {"bytes": p.stat().st_size, "sha256": file_sha256(p)} for p in files}
            manifest["digest"] = digest(manifest)
            (tmp / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
            for p in [*files, tmp / "manifest.json", tmp]:
                _fsync(p)
            _rename(tmp, final)
            _fsync(cache)
        finally:
            shutil.rmtree(tmp, ignore_errors=True)           # what a failed build, or a lost race, leaves
    read_manifest(final)
    return final


# ---------------------------------------------------------------------------------------------------------------------
# Corpus: files -> cleaned documents
# ---------------------------------------------------------------------------------------------------------------------

def _user_files(data: str) -> list[Path]:
    path = Path(data)
    if path.is_file():
        return [path]

    def refuse(error: OSError):  # a part that is left out silently would be another corpus
        raise ConfigError(f"--data={data!r}: {error.filename!r} cannot be read ({error.strerror}). Change its permissions.")

    found = [Path(place) / name for place, _, names in os.walk(path, onerror=refuse) for name in names]
    return sorted(p for p in found if p.suffix in (".txt", ".jsonl") and p.is_file())


def check_source(data: str, tokenizer: str = "") -> None:
    """Cheap checks of two settings, for every rank before the work begins; `prepare` makes the thorough ones.

    Raises ConfigError where --data or --tokenizer is missing, unreadable, empty or of a kind that is not read."""
    if data != "embedded":
        if not data or not Path(data).exists():
            raise ConfigError(f"--data={data!r} does not exist. Give \"embedded\", a .txt or .jsonl file, or a "
                              f"directory of such files.")
        files = _user_files(data)
        if not files:
            raise ConfigError(f"--data={data!r} holds no .txt or .jsonl file. Put the text into such files.")
        for file in files:
            if file.suffix not in (".txt", ".jsonl"):
                raise ConfigError(f"--data={data!r} is a {file.suffix or 'nameless'} file. "
                                  f"Only .txt and .jsonl are read; rename or convert it.")
            if not os.access(file, os.R_OK):
                raise ConfigError(f"--data={data!r}: {str(file)!r} cannot be read. Change its permissions.")
        if not any(file.stat().st_size for file in files):
            raise ConfigError(f"--data={data!r} is empty. Give a file with text.")
    if tokenizer:
        path = Path(tokenizer)
        if not path.is_file() or not os.access(path, os.R_OK) or not path.stat().st_size:
            raise ConfigError(f"--tokenizer={tokenizer!r} is not a readable SentencePiece .model file. "
                              f"Correct the path, or leave it empty to train one here.")


def clean(text: str, counts: Counter) -> str:
    """A document as it is tokenized; what was changed is added to `counts`. Empty means: drop it."""
    if text.startswith("\ufeff"):
        counts["bom_removed"] += 1
        text = text[1:]
    if "\r\n" in text:
        counts["crlf_to_lf"] += 1
        text = text.replace("\r\n", "\n")
    if re.search("[\ud800-\udfff]", text):                   # JSON may hold half a pair; UTF-8 cannot
        counts["surrogates_replaced"] += 1
        text = re.sub("[\ud800-\udfff]", "\ufffd", text)
    if "\0" in text:
        counts["with_nul"] += 1                              # kept: byte fallback stands for it
    if not text or text.isspace():
        counts["empty_dropped"] += 1
        return ""
    return text


def _decode(raw: bytes, counts: Counter) -> str:
    text = raw.decode("utf-8", errors="replace")
    if "\ufffd" in text and raw.count(b"\xef\xbf\xbd") != text.count("\ufffd"):
        counts["invalid_utf8_replaced"] += 1
    return text


def _user_documents(data: str, files: list[Path], counts: Counter):
    """Yields ("text", document): a .txt file is one document, a .jsonl file one per line."""
    for file in files:
        if file.suffix == ".txt":
            yield "text", _decode(file.read_bytes(), counts)
            continue
        with open(file, "rb") as lines:
            for number, raw in enumerate(lines, 1):
                line = _decode(raw, counts).lstrip("\ufeff")
                if not line.strip():
                    continue
                where = f"--data={data!r}: {str(file)!r} line {number}"
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise ConfigError(f"{where} is not JSON ({error}). Correct or delete the line.") from None
                if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                    raise ConfigError(f"{where} has no string under the key \"text\". "
                                      f"Write one object {{\"text\": \"...\"}} per line.")
                yield "text", record["text"]


def _embedded_files() -> list[bytes]:
    """Python sources of the standard library and PACKAGES, each content once, in hash order, so that neither
    paths nor directory order matter. Nothing is imported."""
    roots = [Path(sysconfig.get_paths()["stdlib"])]
    roots += [Path(spec.origin).parent for spec in map(importlib.util.find_spec, PACKAGES) if spec and spec.origin]
    found = {}
    for root in roots:
        for folder, subfolders, names in os.walk(root):
            # config-* and _sysconfigdata* hold the paths of this machine's build
            subfolders[:] = [s for s in subfolders if s not in SKIP_DIRS and not s.startswith("config-")]
            for name in names:
                if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                    raw = Path(folder, name).read_bytes()
                    if raw:
                        found[hashlib.sha256(raw).digest()] = raw
    return [found[key] for key in sorted(found)]


def _scopes(module: ast.Module):
    """Yields the module and every class and function in it. Only statements are visited: half of `ast.walk`'s time."""
    todo = [module]
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            todo += getattr(node, field, ())


@contextlib.contextmanager
def _no_gc():
    """Syntax trees are many objects without cycles: the collector would double the time and find nothing."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def split_source(source: str) -> tuple[list[str], str]:
    """The docstrings over MIN_DOCSTRING characters, and the source with each of them replaced by `...`.

    They are cut out so that a held-out docstring does not come back in a training file. Raises SyntaxError."""
    tree = ast.parse(source)
    raw = source.encode()
    line_start = [0]
    for line in raw.split(b"\n"):
        line_start.append(line_start[-1] + len(line) + 1)
    docstrings, cuts = [], []
    for node in _scopes(tree):
        text = ast.get_docstring(node, clean=False)
        text = inspect.cleandoc(text) if text else ""
        if len(text) > MIN_DOCSTRING:
            at = node.body[0].value                          # ast columns are UTF-8 bytes, its lines count from 1
            docstrings.append(text)
            cuts.append((line_start[at.lineno - 1] + at.col_offset, line_start[at.end_lineno - 1] + at.end_col_offset))
    for begin, end in sorted(cuts, reverse=True):
        raw = raw[:begin] + b'"""..."""' + raw[end:]
    return docstrings, raw.decode()


def _embedded_documents(files: list[bytes], counts: Counter):
    """Yields ("prose", docstring) for all, then ("code", source) in hash order up to the same number of bytes."""
    prose, code = {}, []
    with warnings.catch_warnings(), _no_gc():
        warnings.simplefilter("ignore")                      # "\d" in other people's strings
        for raw in files:
            try:
                text = raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
                docstrings, source = split_source(text)
            except (SyntaxError, ValueError):                # templates, other encodings, NUL bytes
                counts["unparsable_files_skipped"] += 1
                continue
            if len(raw) <= MAX_SOURCE:
                code.append(source)
            for text in docstrings:
                prose[hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()] = text
    for key in sorted(prose):
        yield "prose", prose[key]
    budget, seen = sum(len(text) for text in prose.values()), set()
    for source in code:
        key = hashlib.sha256(source.encode()).digest()
        if budget > 0 and key not in seen:
            seen.add(key)
            budget -= len(source)
            yield "code", source


def _content_key(raw: bytes) -> np.ndarray:
    """u64 [2] of a document: the first number decides whether it is held out, the second its place in samples."""
    return np.frombuffer(hashlib.sha256(raw).digest()[:16], "<u8")


def _write_corpus(out: Path, documents, counts: Counter, setting: str) -> dict:
    """Writes text.bin (UTF-8), offsets [N+1] i64, keys [N, 2] u64 (content hash), held [N] u8, domain [N] u8."""
    offsets, keys, domain, names = [0], [], [], []
    with open(out / "text.bin", "wb") as f:
        for name, text in documents:
            if text := clean(text, counts):
                raw = text.encode()
                f.write(raw)
                offsets.append(offsets[-1] + len(raw))
                keys.append(_content_key(raw))
                if name not in names:
                    names.append(name)
                domain.append(names.index(name))
    if not keys:
        raise ConfigError(f"{setting} has no text in it: {dict(counts)}. Give documents that are not empty.")
    keys_N2 = np.stack(keys)
    held_N = keys_N2[:, 0] < np.uint64(HELD_OUT * 2**64)
    if len(keys) == 1:                                       # one file of text: hold out its end, from a line's start
        raw = (out / "text.bin").read_bytes()
        cut = raw.rfind(b"\n", 0, int(len(raw) * (1 - HELD_OUT))) + 1
        if not 0 < cut < len(raw):
            raise ConfigError(f"{setting} is one document of one line, so nothing can be held out for validation. "
                              f"Give at least two documents or two lines.")
        offsets, domain, held_N = [0, cut, len(raw)], domain * 2, np.array([False, True])
        keys_N2 = np.stack([_content_key(raw[:cut]), _content_key(raw[cut:])])
        counts["split_single_document"] += 1
    elif held_N.all() or not held_N.any():                   # few documents: the lowest hash is held out
        held_N = keys_N2[:, 0] == keys_N2[:, 0].min()
        if held_N.all():
            raise ConfigError(f"{setting} holds one document {len(keys)} times, so nothing can be held out for "
                              f"validation. Give different documents.")
    offsets, domain_N = np.array(offsets, "<i8"), np.array(domain, np.uint8)
    for name, array in dict(offsets=offsets, keys=keys_N2, held=held_N.astype(np.uint8), domain=domain_N).items():
        array.tofile(out / f"{name}.bin")
    domains = {name: {"documents": int((domain_N == i).sum()), "bytes": int(np.diff(offsets)[domain_N == i].sum()),
                      "held_out": int(held_N[domain_N == i].sum())} for i, name in enumerate(names)}
    return {"domains": domains, "cleaning": dict(counts)}


def read_corpus(cache: Path, data: str, log) -> Path:
    """The corpus stage. Its name follows from the content of the source files, not their names or times."""
    start = time.perf_counter()
    if data == "embedded":
        files = _embedded_files()
        hashes = [hashlib.sha256(raw).hexdigest() for raw in files]
        n_bytes = sum(map(len, files))
        # another Python parses other files, so it is part of the name; package versions are only told
        key = ["embedded", "%d.%d" % sys.version_info[:2], PACKAGES, MIN_DOCSTRING, MAX_SOURCE]
        versions = {name: importlib.metadata.version(name) for name in PACKAGES if importlib.util.find_spec(name)}
        versions["python"] = "%d.%d.%d" % sys.version_info[:3]
    else:
        hashed = sorted((file_sha256(file), file.suffix, file) for file in _user_files(data))
        files = [file for _, _, file in hashed]
        hashes = [sha + suffix for sha, suffix, _ in hashed]
        n_bytes = sum(file.stat().st_size for file in files)
        key, versions = ["files"], {}

    def build(out: Path) -> dict:
        counts = Counter()
        documents = _embedded_documents(files, counts) if data == "embedded" else _user_documents(data, files, counts)
        manifest = _write_corpus(out, documents, counts, f"--data={data!r}")
        sources = {"files": len(files), "bytes": n_bytes, "sha256": digest(hashes)}
        log(f"data: read {len(files):,} files, {n_bytes / 1e6:.1f} MB in {time.perf_counter() - start:.1f} s; "
            + "; ".join(f"{name} {d['documents']:,} documents, {d['bytes'] / 1e6:.2f} MB, {d['held_out']:,} held out"
                        for name, d in manifest["domains"].items())
            + "".join(f"; {name} {n}" for name, n in sorted(counts.items())))
        return {"stage": "corpus", "sources": sources, "versions": versions, **manifest}

    return stage(cache, f"corpus-{digest([FORMAT, HELD_OUT, key, hashes])[:16]}", build)


class Corpus:
    """A finished corpus directory, memory-mapped: text [bytes], offsets [N+1] i64, keys [N, 2] u64, held [N] bool."""

    def __init__(self, path: Path):
        self.manifest = read_manifest(path)
        self.text = np.memmap(path / "text.bin", np.uint8, "r")
        self.offsets = np.fromfile(path / "offsets.bin", "<i8")
        self.keys_N2 = np.fromfile(path / "keys.bin", "<u8").reshape(-1, 2)
        self.held_N = np.fromfile(path / "held.bin", np.uint8).astype(bool)
        self.domain_N = np.fromfile(path / "domain.bin", np.uint8)

    def __getitem__(self, i: int) -> str:
        return self.text[self.offsets[i]:self.offsets[i + 1]].tobytes().decode()


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer: corpus -> pieces -> one token stream per split
# ---------------------------------------------------------------------------------------------------------------------

def _sample_lines(corpus: Corpus):
    """Lines of training documents in hash order, up to SAMPLE_BYTES; long ones in parts, since the trainer silently
    drops what exceeds its limit."""
    budget = SAMPLE_BYTES
    train = np.flatnonzero(~corpus.held_N)
    for i in train[np.argsort(corpus.keys_N2[train, 1], kind="stable")]:
        if budget <= 0:
            return
        text = corpus[i][:budget]
        budget -= len(text.encode())
        for line in text.replace("\u2585", "").split("\n"):  # the trainer would drop a line that has this character
            yield from (line[at:at + 4000] for at in range(0, len(line), 4000))


def train_tokenizer(lines, vocab: int) -> bytes:
    """A serialized SentencePiece BPE model with exactly `vocab` pieces, a pure function of the lines.

    Raises ConfigError where the text cannot fill, or does not fit into, that many pieces."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, vocab_size=vocab, model_type="bpe",
            normalization_rule_name="identity", byte_fallback=True, split_digits=True, add_dummy_prefix=False,
            remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,      # runs of spaces: indentation
            user_defined_symbols=["\n"], character_coverage=0.9995, max_sentence_length=1 << 16,
            # no <s>: nothing would ever train it, and a prompt could start with it
            unk_id=0, eos_id=1, bos_id=-1, pad_id=-1, num_threads=1, minloglevel=2)
    except RuntimeError as error:
        message = str(error)
        if "Vocabulary size too high" in message:
            limit = int(re.search(r"<= (\d+)", message)[1])
            raise ConfigError(f"--vocab={vocab} is more than this text can fill: at most {limit}. "
                              f"Use --vocab={limit} or less, or give more text.") from None
        if "smaller than required_chars" in message:
            limit = int(re.search(r"vs (\d+)", message)[1])
            raise ConfigError(f"--vocab={vocab} is too small: bytes and letters of this text alone need {limit}. "
                              f"Use --vocab={2 * limit} or more.") from None
        raise
    return model.getvalue()


def wire(message: bytes):
    """Yields (field number, raw value) of a protobuf message: enough to look into a .model without protobuf."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint().to_bytes(10, "little")
            continue
        size = varint() if tag & 7 == 2 else {1: 8, 5: 4}[tag & 7]
        yield tag >> 3, message[at:at + size]
        at += size


def tokenizer_hash(model: bytes) -> str:
    """Hash over pieces, scores and types (field 1), normaliser (3), denormaliser (5), and of the training settings (2)
    the model type (3), the side spaces attach to (24) and byte fallback (35). Not over the bytes:
    they hold paths and the trainer's thread count."""
    h = hashlib.sha256()
    for field, value in wire(model):
        if field == 2:
            parts = [part for inner, part in wire(value) if inner in (3, 24, 35)]
        else:
            parts = [value] if field in (1, 3, 5) else []
        for part in parts:
            h.update(b"%d:%d:" % (field, len(part)) + part)
    return h.hexdigest()


def _load_model(model: bytes, setting: str) -> sentencepiece.SentencePieceProcessor:
    try:
        tok = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError:
        raise ConfigError(f"{setting} is not a SentencePiece model. Give a .model file.") from None
    if tok.eos_id() < 0:
        raise ConfigError(f"{setting} has no end-of-sentence piece to end documents with. "
                          f"Train it with eos_id >= 0.")
    return tok


def load_tokenizer(path) -> sentencepiece.SentencePieceProcessor:
    """The tokenizer of a prepared directory. Raises ConfigError where there is none."""
    file = Path(path) / "tokenizer.model"
    if not file.is_file():
        raise ConfigError(f"{str(path)!r} has no tokenizer.model. Make it with `python data.py prepare`.")
    return _load_model(file.read_bytes(), repr(str(file)))


def token_bytes(tok) -> np.ndarray:
    """int64 [pieces]: how many UTF-8 bytes of text each piece stands for; control and unknown pieces 0."""
    sizes = [0 if tok.is_control(i) or tok.is_unknown(i) else 1 if tok.is_byte(i)
             else len(tok.id_to_piece(i).replace(SPACE, " ").encode()) for i in range(tok.vocab_size())]
    return np.array(sizes, np.int64)


def encode(tok, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, without end-of-document. Text that looks like a control piece ("</s>") stays text.

    The one character that SentencePiece cannot tell from a space, U+2581, is written as its three bytes."""
    ids = tok.encode(texts, num_threads=1)
    special = [tok.piece_to_id(f"<0x{b:02X}>") for b in SPACE.encode()]
    exact = all(map(tok.is_byte, special)) and not tok.encode("a", out_type=str)[0].startswith(SPACE)
    for n, text in enumerate(texts):
        if SPACE in text and exact:
            first, *rest = tok.encode(text.split(SPACE), num_threads=1)
            ids[n] = first + [i for part in rest for i in special + part]
    return ids


def token_dtype(vocab: int) -> np.dtype:
    """u16 only where its highest value is free to mean "no successor"; the margin is Megatron's."""
    return np.dtype("<u2") if vocab < 65_500 else np.dtype("<i4")


def _write_tokens(out: Path, corpus: Corpus, tok, vocab: int) -> dict:
    """Writes {split}.tokens, every document with its end token, and {split}.offsets [N+1] i64. Returns the counts."""
    names = list(corpus.manifest["domains"])
    counts = {}
    for split, held in zip(SPLITS, (False, True)):
        documents = np.flatnonzero(corpus.held_N == held)
        sizes = np.diff(corpus.offsets)[documents]
        group_N = np.cumsum(sizes) // ENCODE_BYTES           # documents that are encoded together
        lengths, per_domain = [], Counter()
        with open(out / f"{split}.tokens", "wb") as f:
            for part in np.split(documents, np.flatnonzero(np.diff(group_N)) + 1):
                for i, ids in zip(part, encode(tok, [corpus[i] for i in part])):
                    ids.append(tok.eos_id())
                    np.array(ids, token_dtype(vocab)).tofile(f)
                    lengths.append(len(ids))
                    per_domain[names[corpus.domain_N[i]]] += len(ids)
        np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype("<i8").tofile(out / f"{split}.offsets")
        counts[split] = {"documents": len(lengths), "tokens": sum(lengths), "bytes": int(sizes.sum()),
                         "tokens_by_domain": dict(per_domain)}
    return counts


def tokenize(cache: Path, corpus_dir: Path, vocab: int, tokenizer: str, log) -> Path:
    """The token stage. Raises ConfigError where the tokenizer is unfit or has more pieces than `vocab`."""
    given = Path(tokenizer).read_bytes() if tokenizer else b""
    if given:
        pieces = _load_model(given, f"--tokenizer={tokenizer!r}").vocab_size()
        if pieces > vocab:
            raise ConfigError(f"--vocab={vocab} is less than the {pieces} pieces of --tokenizer={tokenizer!r}. "
                              f"Use --vocab={pieces} or more.")
    key = tokenizer_hash(given) if given else ["trained", sentencepiece.__version__, SAMPLE_BYTES]

    def build(out: Path) -> dict:
        corpus, start = Corpus(corpus_dir), time.perf_counter()
        model = given or train_tokenizer(_sample_lines(corpus), vocab)
        (out / "tokenizer.model").write_bytes(model)
        tok, trained = _load_model(model, f"--tokenizer={tokenizer!r}"), time.perf_counter()
        log(f"data: tokenizer {'read' if given else 'trained'}, {tok.vocab_size():,} pieces in {trained - start:.1f} s")
        counts = _write_tokens(out, corpus, tok, vocab)
        seconds = time.perf_counter() - trained
        total = {k: sum(counts[s][k] for s in SPLITS) for k in ("tokens", "bytes")}
        log(f"data: encoded {total['tokens']:,} tokens in {seconds:.1f} s ({total['tokens'] / seconds:,.0f} tokens/s, "
            f"{total['bytes'] / seconds / 1e6:.1f} MB/s, {total['bytes'] / total['tokens']:.2f} bytes per token), "
            f"{counts['val']['tokens']:,} of them held out")
        versions = {"sentencepiece": sentencepiece.__version__, **corpus.manifest["versions"]}
        return {"stage": "tokens", "vocab": vocab, "pieces": tok.vocab_size(), "eod": tok.eos_id(),
                "dtype": token_dtype(vocab).str, "tokenizer_hash": tokenizer_hash(model), "splits": counts,
                "versions": versions, **{k: corpus.manifest[k] for k in ("domains", "cleaning", "sources")}}

    return stage(cache, f"tokens-{digest([FORMAT, corpus_dir.name, vocab, key])[:16]}", build)
