"""Text in, token shards out, once: documents are found, cleaned, held out or not, and encoded by many processes.

    inputs -> units of bounded size -> [one process each: records -> documents -> tokens -> parts] -> token set

Everything that is written is a function of the inputs' content and the settings, not of file names, times or the number of
processes. A part is a pair of shards and a small .json, synced and renamed; what is finished when a run ends early is kept
and not made again. See data.py for the directories that this writes, and for what becomes of them.
"""
import ast
import contextlib
import errno
import gc
import gzip
import hashlib
import heapq
import importlib.metadata
import importlib.util
import inspect
import io
import json
import os
import queue
import re
import selectors
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
import zlib
from collections import Counter
from functools import lru_cache
from pathlib import Path

import sentencepiece

try:
    from orjson import loads as strict_json                  # optional, twice as fast; takes what is nested a little deeper
except ImportError:
    strict_json = None

from errors import ConfigError
from shards import (FORMAT, HELD_OUT, SPLITS, Shards, ShardWriter, digest, is_shards, read_manifest, stage, token_dtype,
                    write_synced)
from tokenizer import KINDS, Encoder, load_model, tokenizer_hash, train_tokenizer

PACKAGES = ("torch", "numpy", "sympy", "networkx")      # besides the standard library; those present are read
SKIP_DIRS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
MIN_DOCSTRING = 200              # characters; shorter ones are labels rather than prose
MAX_SOURCE = 200_000             # bytes; larger source files are tables and generated code, only docstrings are taken
SAMPLE_BYTES = 8_000_000         # text that the tokenizer is trained on
MIN_PART, MAX_PART = 1 << 24, 1 << 30                   # bytes of text in a part; in between, 1/256 of the whole
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
BATCH_BYTES = 1 << 20            # text that is encoded and written at a time
MAX_DOCUMENT = 1 << 30           # bytes; a process holds a document whole, about six times over
HASH_BLOCK = 1 << 26             # bytes of a file that are hashed by one process
FEW_BYTES = 1 << 24              # inputs up to this size are not worth the start of processes
TEXT = (".txt", ".jsonl")
SUFFIXES = (*TEXT, *(kind + packed for kind in TEXT for packed in (".gz", ".zst")), ".parquet")


# ---------------------------------------------------------------------------------------------------------------------
# Inputs
# ---------------------------------------------------------------------------------------------------------------------

def input_kind(path: Path) -> str:
    """The suffix that decides how a file is read (".jsonl.gz", ...), or "" for files that are not."""
    name = path.name.lower()
    return next((kind for kind in SUFFIXES if name.endswith(kind)), "")


def _user_files(data: str) -> list[Path]:
    path = Path(data)
    if path.is_file():
        return [path]

    def refuse(error: OSError):  # a part that is left out silently would be another corpus
        raise ConfigError(f"--data={data!r}: {error.filename!r} cannot be read ({error.strerror}). Change its permissions.")

    found, seen = [], set()
    for place, folders, names in os.walk(path, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(place)) in seen:        # links may lead in a circle, or twice to one directory
            folders.clear()
            continue
        seen.add(real)
        for p in (Path(place) / name for name in names):
            if p.is_symlink() and not p.exists() and (input_kind(p) or not p.suffix):  # no suffix: a directory, perhaps
                raise ConfigError(f"--data={data!r}: {str(p)!r} is a link to {os.readlink(p)!r}, which is not there. "
                                  f"Restore that, or delete the link.")
            found += [p] if input_kind(p) and p.is_file() else []
    return sorted(found)


def check_source(data: str, tokenizer: str = "") -> None:
    """Cheap checks of two settings, for every rank before the work begins; `prepare` makes the thorough ones.

    Raises ConfigError where --data or --tokenizer is missing, unreadable, empty or of a kind that is not read."""
    kinds = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file"
    if data != "embedded" and not (data and is_shards(data)):
        if not data or not Path(data).exists():
            raise ConfigError(f"--data={data!r} does not exist. Give \"embedded\", a {kinds}, a directory of such files, or "
                              f"token shards (a directory or a Megatron prefix).")
        files = _user_files(data)
        if not files:
            raise ConfigError(f"--data={data!r} holds no {kinds}. Put the text into such files.")
        for file in files:
            if not input_kind(file):
                raise ConfigError(f"--data={data!r} is a {file.suffix or 'nameless'} file. "
                                  f"Only {', '.join(SUFFIXES)} are read; rename or convert it.")
            if not os.access(file, os.R_OK):
                raise ConfigError(f"--data={data!r}: {str(file)!r} cannot be read. Change its permissions.")
        if not any(file.stat().st_size for file in files):
            raise ConfigError(f"--data={data!r} is empty. Give a file with text.")
        for file in files:
            if input_kind(file).endswith(".zst"):
                _zstd()
            elif input_kind(file) == ".parquet":
                _parquet()
    check_tokenizer(tokenizer)


def check_tokenizer(tokenizer: str) -> None:
    """Raises ConfigError where --tokenizer is given and is not a file that can be read."""
    if tokenizer:
        path = Path(tokenizer)
        if not path.is_file() or not os.access(path, os.R_OK) or not path.stat().st_size:
            raise ConfigError(f"--tokenizer={tokenizer!r} is not a readable SentencePiece .model file. "
                              f"Correct the path, or leave it empty to train one here.")


def read_tokenizer(tokenizer: str) -> tuple[bytes, sentencepiece.SentencePieceProcessor | None]:
    """The bytes of --tokenizer and the model; b"" and None where none is given. Raises ConfigError where it is no model."""
    check_tokenizer(tokenizer)
    given = Path(tokenizer).read_bytes() if tokenizer else b""
    return given, load_model(given, f"--tokenizer={tokenizer!r}") if given else None


def _zstd():
    """open(path) -> binary file, for .zst. Raises ConfigError where nothing here can read it."""
    with contextlib.suppress(ImportError):
        from compression import zstd                         # Python 3.14
        return lambda path: zstd.open(path, "rb")
    try:
        import zstandard
    except ImportError:
        raise ConfigError("--data: .zst files need the package zstandard (pip install zstandard), or Python 3.14. "
                          "Install it, or decompress them.") from None
    return lambda path: io.BufferedReader(_Frames(path, zstandard.ZstdDecompressor), 1 << 20)


class _Frames(io.RawIOBase):
    """A .zst file as zstandard reads it, but with an error where its own reader would take a file that is cut off as whole."""

    def __init__(self, path: str, decompressor):
        self._file, self._new, self._frame, self._ready = open(path, "rb"), decompressor, None, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            block = self._frame.unused_data if self._frame and self._frame.eof else b""
            if not (block := block or self._file.read(1 << 17)):
                if self._frame and not self._frame.eof:
                    raise EOFError("it is cut off")
                return 0
            if not self._frame or self._frame.eof:
                self._frame = self._new().decompressobj()
            self._ready = memoryview(self._frame.decompress(block))
        n = min(len(buffer), len(self._ready))
        buffer[:n], self._ready = self._ready[:n], self._ready[n:]
        return n

    def close(self) -> None:
        self._file.close()
        super().close()


def _parquet():
    try:
        from pyarrow import parquet
    except ImportError:
        raise ConfigError("--data: .parquet files need the package pyarrow (pip install pyarrow). "
                          "Install it, or convert them to .jsonl.") from None
    return parquet


# ---------------------------------------------------------------------------------------------------------------------
# Records: what a file holds, one document after another
# ---------------------------------------------------------------------------------------------------------------------

def _decode(raw: bytes, counts: Counter) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        counts["invalid_utf8_replaced"] += 1
        return raw.decode(errors="replace")


def clean(text: str, counts: Counter) -> bytes:
    """A document as it is tokenized, in UTF-8; what was changed is added to `counts`. Empty means: drop it."""
    if text.startswith("\ufeff"):
        counts["bom_removed"] += 1
        text = text[1:]
    if "\r" in text and "\r\n" in text:                      # one letter is found ten times as fast as two
        counts["crlf_to_lf"] += 1
        text = text.replace("\r\n", "\n")
    if "\0" in text:
        counts["with_nul"] += 1                              # kept: byte fallback stands for it
    if not text or text.isspace():
        counts["empty_dropped"] += 1
        return b""
    try:
        return text.encode()
    except UnicodeEncodeError:                               # JSON may hold half a surrogate pair; UTF-8 cannot
        counts["surrogates_replaced"] += 1
        return re.sub("[\ud800-\udfff]", "\ufffd", text).encode()


def _bounded(raw: bytes, where: str) -> bytes:
    if len(raw) > MAX_DOCUMENT:
        raise ConfigError(f"{where} is longer than {MAX_DOCUMENT:,} bytes, too long for one document. Split it.")
    return raw


def _lines(file, begin: int, end: int, where: str):
    """The lines of an open file that begin in bytes [begin, end)."""
    if begin:
        file.seek(begin - 1)
        while (skipped := file.readline(1 << 20)) and not skipped.endswith(b"\n"):
            pass
        begin = file.tell()
    while begin < end and (raw := file.readline(MAX_DOCUMENT + 1)):
        begin += len(raw)
        yield _bounded(raw, where)


def _parse(raw: bytes, where, counts: Counter) -> str | None:
    """The text of a line of JSON; None for an empty line. where() says which line it is."""
    try:
        record = strict_json(raw) if strict_json else None
    except ValueError:                                       # it may still be something that we take
        record = None
    if record is None:
        line = _decode(raw, counts).lstrip("\ufeff")
        if not line or line.isspace():
            return None
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where()} is not JSON ({error}). Correct or delete the line.") from None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f"{where()} has no string under the key \"text\". Write one object {{\"text\": \"...\"}} per line.")
    return text


def _rows(path: str, where: str):
    """The column "text" of a .parquet file, a batch of rows in memory at a time."""
    parquet = _parquet()
    import pyarrow
    try:
        file = parquet.ParquetFile(path)
        if "text" not in file.schema_arrow.names:
            raise ConfigError(f"{where} has no column \"text\" (it has {', '.join(file.schema_arrow.names)}). Rename one.")
        if not pyarrow.types.is_string(kind := file.schema_arrow.field("text").type) and not pyarrow.types.is_large_string(kind):
            raise ConfigError(f"{where}: its column \"text\" holds {kind}, not strings. Convert it.")
        for batch in file.iter_batches(64, columns=["text"]):
            yield from (cell.as_py() or "" for cell in batch.column(0))
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{where} is not a sound .parquet file ({error}). Copy or make it again.") from None


def _open(path: str, kind: str):
    return gzip.open(path, "rb") if kind.endswith(".gz") else _zstd()(path) if kind.endswith(".zst") else open(path, "rb", 1 << 20)


def _span_records(path: str, begin: int, end: int, setting: str, counts: Counter, skip: int):
    """Yields the text of each record that begins in bytes [begin, end) of a file, and None for the `skip` first ones and for
    empty lines: a .txt file is one record, a .jsonl file has one per line, a .parquet file one per row.

    A compressed file, and a .parquet file, is one span. Raises ConfigError naming file and line."""
    kind, where = input_kind(Path(path)), f"{setting}: {path!r}"
    if kind == ".parquet":
        for n, text in enumerate(_rows(path, where)):
            yield None if n < skip else text
        return
    packed = kind not in TEXT
    try:
        with _open(path, kind) as file:
            if kind.startswith(".txt"):
                yield None if skip > 0 else _decode(_bounded(file.read(MAX_DOCUMENT + 1), where), counts)
                return

            def line(n: int) -> str:
                before = 0
                if begin:                                    # only for the message: lines before this span
                    with open(path, "rb") as f:
                        for at in range(0, begin, 1 << 24):
                            before += f.read(min(1 << 24, begin - at)).count(b"\n")
                        f.seek(begin - 1)
                        before += f.read(1) != b"\n"
                return f"{where} line {before + n + 1}"

            for n, raw in enumerate(_lines(file, begin, 1 << 62 if packed else end, where)):
                yield None if n < skip else _parse(raw, lambda: line(n), counts)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{where} cannot be decompressed ({error}). Copy or make it again.") from None
    except Exception as error:
        if type(error).__name__ != "ZstdError":              # of either zstd package
            raise
        raise ConfigError(f"{where} cannot be decompressed ({error}). Copy or make it again.") from None


def _key(raw: bytes) -> tuple[int, int]:
    """Two 64-bit numbers of a document's content: the first decides whether it is held out, the second its place in samples."""
    h = hashlib.sha256(raw).digest()
    return int.from_bytes(h[:8], "little"), int.from_bytes(h[8:16], "little")


def _documents(unit: dict, rule: dict, counts: Counter, skip: int = 0):
    """Yields (records read so far, document, its key, whether it is held out) for a unit's spans, after `skip` records."""
    n = 0
    for path, begin, end in unit["spans"]:
        for text in _span_records(path, begin, end, unit["setting"], counts, skip - n):
            n += 1
            if text is None or not (raw := clean(text, counts)):
                continue
            if rule["kind"] == "split":                      # one document in all: its end is held out, from a line's start
                counts["split_single_document"] += 1
                yield n, raw[:rule["cut"]], _key(raw[:rule["cut"]]), False
                yield n, raw[rule["cut"]:], _key(raw[rule["cut"]:]), True
                continue
            key = _key(raw)
            yield n, raw, key, key[0] == rule["lowest"] if rule["kind"] == "lowest" else key[0] < HELD_OUT * 2**64


# ---------------------------------------------------------------------------------------------------------------------
# Units: what one process does at a time, of bounded size and the same however many there are
# ---------------------------------------------------------------------------------------------------------------------

def _stamp(path) -> list[int]:
    """What changes with a file: its size and time."""
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns]


def _units(files: list[tuple[str, str, int]], setting: str, part_bytes: int, step: int = 0) -> list[dict]:
    """Cut and group (path, domain, size) into units of about part_bytes, in order. A unit: spans [path, begin, end], domain.

    step: where any file is cut; without it, .jsonl files at part_bytes (their lines belong where they begin), others never."""
    units, room = [], 0
    for path, domain, size in files:
        kind = input_kind(Path(path))
        cut = step or (part_bytes if kind == ".jsonl" else max(size, 1))
        for begin in range(0, size, cut):
            end = min(begin + cut, size)
            cost = (end - begin) * (1 if step or kind in TEXT else 4)        # what compressed text may grow to
            if cost > room or units[-1]["domain"] != domain:
                units.append({"spans": [], "domain": domain, "setting": setting, "bytes": 0})
                room = part_bytes
            units[-1]["spans"].append([path, begin, end])
            units[-1]["bytes"] += end - begin
            room -= cost
    return units


def _rule(units: list[dict]) -> dict:
    """How documents are held out: 1% by content hash. It reads until there is one of either kind; where there is not (few
    documents), the lowest hash is held out, and of a single document its end.

    Raises ConfigError where there is no text, or nothing that can be held out."""
    counts, n, seen, lowest, first = Counter(), 0, set(), 1 << 64, None
    different, setting = False, units[0]["setting"]
    for unit in units:
        for _, raw, key, held in _documents(unit, {"kind": "hash"}, counts):
            seen.add(held)
            if len(seen) == 2:
                return {"kind": "hash"}
            different = different or n > 0 and key[0] != lowest
            n, lowest, first = n + 1, min(lowest, key[0]), raw if n == 0 else None
    if not n:
        raise ConfigError(f"{setting} has no text in it: {dict(counts)}. Give documents that are not empty.")
    if n == 1:
        cut = first.rfind(b"\n", 0, int(len(first) * (1 - HELD_OUT))) + 1
        if not 0 < cut < len(first):
            raise ConfigError(f"{setting} is one document of one line, so nothing can be held out for validation. "
                              f"Give at least two documents or two lines.")
        return {"kind": "split", "cut": cut}
    if not different:
        raise ConfigError(f"{setting} holds one document {n} times, so nothing can be held out for "
                          f"validation. Give different documents.")
    return {"kind": "lowest", "lowest": lowest}


# ---------------------------------------------------------------------------------------------------------------------
# Work: what a process does with a unit
# ---------------------------------------------------------------------------------------------------------------------

def _hash(task: dict, tell) -> list[str]:
    """The hash of each span."""
    found, block = [], memoryview(bytearray(1 << 18))
    for path, begin, end in task["spans"]:
        h, left = hashlib.sha256(), end - begin
        with open(path, "rb", 0) as f:
            f.seek(begin)
            while left and (n := f.readinto(block[:left])):
                h.update(block[:n])
                left -= n
        found.append(h.hexdigest())
    return found


def _sample(task: dict, tell) -> list:
    """[place, text] of the training documents with the lowest places, up to SAMPLE_BYTES and below the place task["below"]."""
    heap, total = [], 0
    for _, raw, (_, place), held in _documents(task, task["rule"], Counter()):
        if not held and place < task["below"]:
            raw = raw[:SAMPLE_BYTES]
            heapq.heappush(heap, (-place, raw))
            total += len(raw)
            while total - len(heap[0][1]) >= SAMPLE_BYTES:
                total -= len(heapq.heappop(heap)[1])
    return [[-place, raw.decode(errors="ignore")] for place, raw in heap]


@lru_cache(1)
def _encoder(model: str, vocab: int, kind: str, cache: str) -> Encoder:
    with _no_gc():
        return Encoder(Path(model).read_bytes(), vocab, kind, Path(cache))


def _note(folder: Path, unit: int, part: int) -> Path:
    return folder / f".part-{unit:05d}-{part:03d}.json"


def _parts(folder: Path, unit: int) -> list[dict]:
    """The notes on a unit's finished parts."""
    found = []
    while (path := _note(folder, unit, len(found))).is_file():
        found.append(json.loads(path.read_bytes()))
    return found


class Part:
    """The shards of one part while they are written, under names that no other process uses."""

    def __init__(self, folder: Path, task: dict, number: int, encoder: Encoder):
        self.folder, self.task, self.encoder, self.number = folder, task, encoder, number
        self.note = _note(folder, task["unit"], number)
        self.name, self.batch, self.batch_bytes, self.bytes = self.note.stem, [], 0, Counter()
        self.tmp = f"{self.name}.{os.uname().nodename}.{os.getpid()}"
        self.writers = {split: ShardWriter(folder / f"{self.tmp}.{split}", encoder.dtype) for split in SPLITS}

    def add(self, raw: bytes, split: str) -> bool:
        """Takes a document; True where it was time to encode and write."""
        self.batch.append((raw, split))
        self.batch_bytes += len(raw)
        if full := self.batch_bytes >= BATCH_BYTES:
            self.flush()
        return full

    def flush(self) -> None:
        if not self.bytes:
            self.encoder.trust([raw for raw, _ in self.batch])
        for (raw, split), tokens in zip(self.batch, self.encoder([raw for raw, _ in self.batch])):
            self.writers[split].add(tokens)
            self.bytes[split] += len(raw)
        self.batch, self.batch_bytes = [], 0

    def commit(self, **facts) -> None:
        """Sync the shards, name them, and only then note the part as finished."""
        self.flush()
        for (path, *_), stamp in zip(self.task["spans"], self.task["stamps"]):
            if _stamp(path) != stamp:                        # else its tokens would go by the hash of what it was
                raise ConfigError(f"{self.task['setting']}: {path!r} was changed while it was read. Leave it, and run again.")
        splits, files = {}, {}
        for split, writer in self.writers.items():
            done = writer.close()
            for suffix, file in done.pop("files").items():
                written = self.folder / f"{self.tmp}.{split}{suffix}"
                if done["documents"]:
                    written.rename(self.folder / f"{self.name}.{split}{suffix}")
                    files[f"{split}{suffix}"] = file
                else:
                    written.unlink()
            splits[split] = {**done, "bytes": self.bytes[split]}
        write_synced(self.note, json.dumps({"splits": splits, "files": files, "encoder": self.encoder.note, **facts}).encode())

    def discard(self) -> None:
        for path in self.folder.glob(f"{self.tmp}.*"):
            path.unlink()


def _encode_unit(task: dict, tell) -> None:
    """Write a unit's parts, those that are not finished yet. A part closes when its text has task["part_bytes"] (compressed
    files may grow to many). tell(bytes of text) now and then."""
    folder, encoder = Path(task["folder"]), _encoder(task["model"], task["vocab"], task["encoder"], task["cache"])
    finished = _parts(folder, task["unit"])
    if finished and finished[-1]["last"]:
        return
    counts, n = Counter(), 0
    part = Part(folder, task, len(finished), encoder)
    try:
        for n, raw, _, held in _documents(task, task["rule"], counts, skip=finished[-1]["records"] if finished else 0):
            if part.add(raw, "val" if held else "train"):
                tell(sum(part.bytes.values()))
            if sum(part.bytes.values()) + part.batch_bytes >= task["part_bytes"] and task["rule"]["kind"] != "split":
                part.commit(records=n, last=False, cleaning=dict(counts), domain=task["domain"])
                part = Part(folder, task, part.number + 1, encoder)
                counts.clear()
        part.commit(records=n, last=True, cleaning=dict(counts), domain=task["domain"])
    except BaseException:
        part.discard()
        raise


def work(task: dict, tell):
    return {"hash": _hash, "sample": _sample, "encode": _encode_unit}[task["do"]](task, tell)


# ---------------------------------------------------------------------------------------------------------------------
# Processes: one line of JSON to each for a task, lines of JSON back
# ---------------------------------------------------------------------------------------------------------------------

def serve() -> None:
    """A worker process: tasks come on stdin, answers go to stdout. When stdin closes, the parent is gone and so is this."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                                            # what a library prints is no answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)             # the parent's to handle
    tasks = queue.SimpleQueue()

    def listen():
        for line in sys.stdin:
            tasks.put(json.loads(line))
        os._exit(1)

    def tell(**answer):
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    threading.Thread(target=listen, daemon=True).start()
    while True:
        try:
            tell(result=work(tasks.get(), lambda n: tell(bytes=n)))
        except ConfigError as error:
            tell(wrong=str(error))
        except OSError as error:
            tell(errno=error.errno, text=str(error))


class Pool:
    """Runs tasks on `workers` processes (started when there is enough to do), or here."""

    def __init__(self, workers: int):
        self.workers, self.processes = workers, []

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            with contextlib.suppress(BrokenPipeError):       # the end of a task that it died before reading
                process.stdin.close()
            process.stdout.close()

    def run(self, tasks: list[dict], progress=lambda index, n_bytes: None):
        """Yields (index of the task, its result) as they come. progress(index, bytes so far) now and then.

        Raises what the task raised (ConfigError, OSError), and ChildProcessError naming the task whose process died."""
        if self.workers == 1 or len(tasks) < 2 or sum(t["bytes"] for t in tasks) <= FEW_BYTES:
            for index, task in enumerate(tasks):
                yield index, work(task, lambda n: progress(index, n))
            return
        command = [sys.executable, str(Path(__file__).resolve())]
        for _ in range(min(self.workers, len(tasks)) - len(self.processes)):
            self.processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        todo, doing, pending = iter(enumerate(tasks)), {}, {}
        with selectors.DefaultSelector() as selector:
            def give(process):
                if (following := next(todo, None)) is None:
                    selector.unregister(process.stdout)
                    return
                doing[process], pending[process] = following[0], []
                with contextlib.suppress(BrokenPipeError):   # it has died: its stdout says so below
                    process.stdin.write(json.dumps(following[1]).encode() + b"\n")
                    process.stdin.flush()

            for process in self.processes:
                selector.register(process.stdout, selectors.EVENT_READ, process)
                give(process)
            while selector.get_map():
                for event, _ in selector.select():
                    process = event.data
                    index, block = doing[process], os.read(event.fd, 1 << 20)
                    if not block:
                        raise ChildProcessError(_obituary(process.wait(), tasks[index]))
                    *lines, rest = block.split(b"\n")
                    if lines:
                        lines[0] = b"".join(pending[process]) + lines[0]
                        pending[process] = []
                    pending[process].append(rest)
                    for line in lines:
                        answer = json.loads(line)
                        if "bytes" in answer:
                            progress(index, answer["bytes"])
                        elif "wrong" in answer:
                            raise ConfigError(answer["wrong"])
                        elif "errno" in answer:
                            raise OSError(answer["errno"], answer["text"])
                        else:
                            yield index, answer["result"]
                            give(process)


def _obituary(code: int, task: dict) -> str:
    (path, begin, _), (last, _, end) = task["spans"][0], task["spans"][-1]
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    place = f"{path!r} from byte {begin:,} to " + (f"{end:,}" if path == last else f"{last!r}, byte {end:,}")
    what = f"part {task['unit']} ({place})" if "unit" in task else place
    return (f"the process that worked on {what} {how}. If the machine was short of memory, use fewer --workers. "
            f"Finished parts are kept: run the same command again to go on.")


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---------------------------------------------------------------------------------------------------------------------
# The embedded corpus: two domains from the Python that is installed
# ---------------------------------------------------------------------------------------------------------------------

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
    """Syntax trees and vocabularies are many objects without cycles: the collector would double the time and find nothing."""
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


def read_embedded(cache: Path, log) -> Path:
    """The corpus stage, of the embedded corpus only: prose.jsonl and code.jsonl. Its name follows from the sources' content."""
    start = time.perf_counter()
    files = _embedded_files()
    hashes = [hashlib.sha256(raw).hexdigest() for raw in files]
    # another Python parses other files, so it is part of the name; package versions are only told
    key = ["embedded", "%d.%d" % sys.version_info[:2], PACKAGES, MIN_DOCSTRING, MAX_SOURCE]
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if importlib.util.find_spec(name)}
    versions["python"] = "%d.%d.%d" % sys.version_info[:3]

    def build(out: Path) -> dict:
        counts, written = Counter(), Counter()
        with open(out / "prose.jsonl", "w") as prose, open(out / "code.jsonl", "w") as code:
            for domain, text in _embedded_documents(files, counts):
                (prose if domain == "prose" else code).write(json.dumps({"text": text}) + "\n")
                written[domain] += 1
        n_bytes = sum(map(len, files))
        log(f"data: read {len(files):,} files, {n_bytes / 1e6:.1f} MB in {time.perf_counter() - start:.1f} s: "
            + ", ".join(f"{n:,} documents of {name}" for name, n in written.items()))
        return {"stage": "corpus", "versions": versions, "cleaning": dict(counts),
                "sources": {"files": len(files), "bytes": n_bytes, "sha256": digest(hashes)}}

    return stage(cache, f"corpus-{digest([FORMAT, key, hashes])[:16]}", build)


# ---------------------------------------------------------------------------------------------------------------------
# The token stage
# ---------------------------------------------------------------------------------------------------------------------

class Progress:
    """Bytes done so far, as one line rewritten on a terminal, otherwise as a log line every half minute."""

    def __init__(self, what: str, tasks: list[dict], log, done: int = 0):
        self.what, self.sizes, self.log = what, [t["bytes"] for t in tasks], log
        self.done, self.first, self.total, self.doing = done, done, done + sum(self.sizes), {}
        self.tty, self.start = sys.stderr.isatty(), time.perf_counter()
        self.shown = self.start

    def __call__(self, index: int, n_bytes: int) -> None:
        self.doing[index] = min(n_bytes, self.sizes[index])
        self.show()

    def finished(self, index: int) -> None:
        self.doing.pop(index, None)
        self.done += self.sizes[index]
        self.show()

    def show(self) -> None:
        now, done = time.perf_counter(), self.done + sum(self.doing.values())
        if now - self.shown < (0.2 if self.tty else 30):
            return
        self.shown = now
        rate = max(1, done - self.first) / (now - self.start)
        line = (f"{self.what} {done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB, {rate / 1e6:.1f} MB/s, "
                f"{(self.total - done) / rate / 60:.1f} min left")
        if self.tty:
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        else:
            self.log(f"data: {line}")

    def close(self) -> None:
        if self.tty:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _run(pool: Pool, what: str, tasks: list[dict], log, done: int = 0) -> list:
    """Results of the tasks in order, with progress shown."""
    progress, results = Progress(what, tasks, log, done), [None] * len(tasks)
    try:
        for index, result in pool.run(tasks, progress):
            results[index] = result
            progress.finished(index)
    finally:
        progress.close()
    return results


def _source(cache: Path, data: str, pool: Pool, log) -> dict:
    """What --data stands for: files (path, domain, bytes) in an order that follows from their content, and what is told of
    them. The key stands for all content."""
    if data == "embedded":
        folder = read_embedded(cache, log)
        manifest = read_manifest(folder)
        names = ("prose", "code")
        written = [manifest["files"][f"{name}.jsonl"] for name in names]
        files = [(str(folder / f"{name}.jsonl"), name, file["bytes"]) for name, file in zip(names, written)]
        return {"files": files, "stamps": {path: _stamp(path) for path, *_ in files},
                "key": ["embedded", *(file["sha256"] for file in written)],
                **{k: manifest[k] for k in ("versions", "cleaning", "sources")}}
    stamps = {str(path): _stamp(path) for path in _user_files(data)}
    blocks = _units([(path, "", size) for path, (size, _) in stamps.items()], "", HASH_BLOCK, HASH_BLOCK)
    tasks = [{"do": "hash", **unit} for unit in blocks]
    of_file: dict[str, list[str]] = {}
    for task, hashes in zip(tasks, _run(pool, "hashed", tasks, log)):
        for (path, _, _), h in zip(task["spans"], hashes):
            of_file.setdefault(path, []).append(h)
    hashed = sorted((digest(hashes), input_kind(Path(path)), path) for path, hashes in of_file.items())
    files = [(path, "text", stamps[path][0]) for _, _, path in hashed]
    key = digest([h + kind for h, kind, _ in hashed])
    return {"files": files, "stamps": stamps, "key": ["files", key], "versions": {}, "cleaning": {},
            "sources": {"files": len(files), "bytes": sum(size for *_, size in files), "sha256": key}}


def _sample_texts(pool: Pool, units: list[dict], rule: dict, log):
    """Training documents in hash order up to SAMPLE_BYTES: a function of the documents alone.

    Only those below a place that should let through twice the wanted text are sent here; too few, and it is raised."""
    total, share = sum(u["bytes"] for u in units), 2.0
    while True:
        below = int(min(1.0, share * SAMPLE_BYTES / max(total, 1)) * 2**64)
        found = _run(pool, "sampled", [{"do": "sample", "rule": rule, "below": below, **u} for u in units], log)
        sample = sorted((tuple(entry) for part in found for entry in part))
        if below >= 2**64 or sum(len(text.encode()) for _, text in sample) >= SAMPLE_BYTES:
            return [text for _, text in sample]
        share *= 8


def sample_lines(texts: list[str], share: float = 1.0):
    """Lines up to that share of SAMPLE_BYTES; long ones in parts, since the trainer silently drops what exceeds its limit."""
    budget = int(share * SAMPLE_BYTES)
    for text in texts:
        if budget <= 0:
            return
        text = text[:budget]
        budget -= len(text.encode())
        for line in text.replace("\u2585", "").split("\n"):  # the trainer would drop a line that has this character
            yield from (line[at:at + 4000] for at in range(0, len(line), 4000))


def tokenizer_of_texts(cache: Path, sources: list[tuple[int, str]], vocab: int, log) -> str:
    """The file of a tokenizer that is trained on samples of several texts, (weight, --data) each, in proportion."""
    total, found = sum(weight for weight, _ in sources), []
    with Pool(usable_cores()) as pool:
        for weight, data in sources:
            if data != "embedded" and is_shards(data):
                raise ConfigError(f"--data: {data!r} is a Megatron data set, which does not say how it was tokenized. Give the "
                                  f"SentencePiece .model that it was made with as --tokenizer.")
            found.append((weight, _source(cache, data, pool, log), f"--data={data!r}"))

        def build(folder: Path) -> dict:
            lines = []
            for weight, source, setting in found:
                units = _units(source["files"], setting, MIN_PART)
                lines += sample_lines(_sample_texts(pool, units, _rule(units), log), weight / total)
            write_synced(folder / "tokenizer.model", train_tokenizer(lines, vocab))
            return {"stage": "tokenizer"}

        key = [FORMAT, HELD_OUT, [(weight, source["key"]) for weight, source, _ in found], vocab, SAMPLE_BYTES,
               sentencepiece.__version__]
        return str(stage(cache, f"tokenizer-{digest(key)[:16]}", build) / "tokenizer.model")


def _finish(folder: Path, units: list[dict]) -> dict:
    """Give all parts' shards their numbers and add up their counts. Done again after an interruption, it changes nothing."""
    splits = {split: {"documents": 0, "tokens": 0, "bytes": 0, "tokens_by_domain": Counter()} for split in SPLITS}
    files, cleaning, domains, notes, number = {}, Counter(), {}, [], Counter()
    for n in range(len(units)):
        for k, part in enumerate(_parts(folder, n)):
            cleaning.update(part["cleaning"])
            notes += [part["encoder"]] if part["encoder"] and part["encoder"] not in notes else []
            domain = domains.setdefault(part["domain"], Counter(documents=0, bytes=0, held_out=0))
            for split, counts in part["splits"].items():
                for what in ("documents", "tokens", "bytes"):
                    splits[split][what] += counts[what]
                splits[split]["tokens_by_domain"][part["domain"]] += counts["tokens"]
                domain.update(documents=counts["documents"], bytes=counts["bytes"],
                              held_out=counts["documents"] if split == "val" else 0)
                if counts["documents"]:
                    for suffix in (".bin", ".idx"):
                        name, written = f"{split}-{number[split]:05d}{suffix}", f"{_note(folder, n, k).stem}.{split}{suffix}"
                        files[name] = part["files"][f"{split}{suffix}"]
                        if (folder / written).is_file():
                            (folder / written).rename(folder / name)
                    number[split] += 1
    return {"splits": splits, "files": files, "cleaning": dict(cleaning), "domains": domains, "notes": notes}


def _no_space(error: OSError, folder: Path, units: list[dict], itemsize: int) -> OSError:
    """The same error, with what is needed to go on."""
    finished = [unit for n, unit in enumerate(units) if (parts := _parts(folder, n)) and parts[-1]["last"]]
    done, total = sum(u["bytes"] for u in finished), sum(u["bytes"] for u in units)
    written = sum(p.stat().st_size for p in folder.glob("*.bin"))
    need = (total - done) * (written / done if done else itemsize / 3)
    return OSError(error.errno, f"{str(folder)!r} is full ({os.strerror(error.errno)}): about {need:,.0f} more bytes are needed "
                   f"there. {len(finished)} of {len(units)} parts are finished and kept. Free the space, then run the same "
                   f"command again.")


def check_numbers(*settings: tuple) -> None:
    """Each (name, value, least): a whole number from `least` to 2^31. Raises ConfigError."""
    for name, value, least in settings:
        if isinstance(value, bool) or not isinstance(value, int) or value < least or value >= 2**31 and name != "seed":
            raise ConfigError(f"--{name}={value!r} must be a whole number of at least {least}"
                              f"{'' if name == 'seed' else ' and below 2^31'}.")


def make_directory(cache) -> None:
    try:
        Path(cache).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise
        raise ConfigError(f"{str(cache)!r}, the directory for prepared data, cannot be made ({error.strerror}). Start in "
                          "another directory, or make it writable (data.py prepare takes --cache).") from None


def tokenize(cache, data: str, vocab: int, tokenizer: str, workers: int, log, encoder: str = "auto", out: str = "") -> Path:
    """The token stage: the finished token set of these settings, built where it is missing; `data` itself where it names
    token shards already (see `describe`).

    workers: processes, 0 for the usable cores; out: a directory of its own instead of one in the cache. Raises ConfigError
    for wrong input, OSError where the disk is full, ChildProcessError where a process died; finished parts are kept."""
    if encoder not in KINDS:
        raise ConfigError(f"--encoder={encoder!r}: choose one of {', '.join(KINDS)}.")
    check_numbers(("vocab", vocab, 1), ("workers", workers, 0))
    check_source(data, tokenizer)
    make_directory(cache)
    cache = Path(cache)
    given, model = read_tokenizer(tokenizer)
    if given and (pieces := model.vocab_size()) > vocab:
        raise ConfigError(f"--vocab={vocab} is less than the {pieces} pieces of --tokenizer={tokenizer!r}. "
                          f"Use --vocab={pieces} or more.")
    if data != "embedded" and is_shards(data):
        if out:
            raise ConfigError(f"--out={out!r}: --data={data!r} is token shards already, so nothing would be made there. Leave "
                              f"out --out, or copy them.")
        describe(data, vocab, tokenizer)
        return Path(data)
    with Pool(workers or usable_cores()) as pool:
        source = _source(cache, data, pool, log)
        total = sum(size for *_, size in source["files"])
        part_bytes = min(max(1 << (total >> 8).bit_length(), MIN_PART), MAX_PART)
        units = _units(source["files"], f"--data={data!r}", part_bytes)
        for unit in units:
            unit["stamps"] = [source["stamps"][path] for path, *_ in unit["spans"]]
        key = digest([FORMAT, HELD_OUT, part_bytes, source["key"], vocab,
                      tokenizer_hash(given) if given else ["trained", sentencepiece.__version__, SAMPLE_BYTES]])[:16]

        def build(folder: Path) -> dict:
            for left in folder.glob(f".part-*.{os.uname().nodename}.*"):             # of a killed process
                left.unlink()
            try:
                return _build(folder, cache, source, units, part_bytes, vocab, given, encoder, pool, log)
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                raise _no_space(error, folder, units, token_dtype(vocab).itemsize) from None

        if not out:
            return stage(cache, f"tokens-{key}", lambda folder: {**build(folder), "key": key}, f".tokens-{key}.partial")
        place = Path(out).absolute()
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise
            raise ConfigError(f"--out={out!r}: {str(place.parent)!r} cannot be made ({error.strerror}). Give another "
                              "directory.") from None
        if place.exists() and not (place / "manifest.json").is_file():
            raise ConfigError(f"--out={out!r} exists and holds no token set. Give a directory that is not there yet.")
        if place.exists() and read_manifest(place).get("key") != key:
            raise ConfigError(f"--out={out!r} holds tokens of other settings or other text. Give another directory, or "
                              f"delete it.")
        return stage(place.parent, place.name, lambda folder: {**build(folder), "key": key}, f".{place.name}-{key}.partial")


def _build(folder: Path, cache: Path, source: dict, units: list[dict], part_bytes: int, vocab: int, given: bytes, encoder: str,
           pool: Pool, log) -> dict:
    """Hold out, train the tokenizer where none is given, encode; returns the manifest."""
    start, model = time.perf_counter(), folder / "tokenizer.model"
    rule = _rule(units)
    if not model.is_file():
        write_synced(model, given or train_tokenizer(sample_lines(_sample_texts(pool, units, rule, log)), vocab))
    tok = load_model(model.read_bytes(), f"{str(model)!r}")
    log(f"data: tokenizer {'read' if given else 'trained'}, {tok.vocab_size():,} pieces in {time.perf_counter() - start:.1f} s")
    start = time.perf_counter()
    shared = {"do": "encode", "rule": rule, "folder": str(folder), "cache": str(cache), "model": str(model), "vocab": vocab,
              "encoder": encoder, "part_bytes": part_bytes}
    tasks = [{**shared, "unit": n, **unit} for n, unit in enumerate(units) if not ((p := _parts(folder, n)) and p[-1]["last"])]
    if kept := len(units) - len(tasks):
        log(f"data: {kept} of {len(units)} parts were finished before")
    _run(pool, "encoded", tasks, log, sum(u["bytes"] for u in units) - sum(t["bytes"] for t in tasks))
    _encoder.cache_clear()                                   # its memory, where it worked in this process
    done, seconds = _finish(folder, units), time.perf_counter() - start
    for note in done.pop("notes"):
        log(f"data: {note}")
    tokens, n_bytes = (sum(done["splits"][split][k] for split in SPLITS) for k in ("tokens", "bytes"))
    counts = Counter(done["cleaning"]) + Counter(source["cleaning"])
    log("data: " + "; ".join(f"{name} {d['documents']:,} documents, {d['bytes'] / 1e6:.2f} MB, {d['held_out']:,} held out"
                             for name, d in done["domains"].items())
        + "".join(f"; {name} {n}" for name, n in sorted(counts.items())))
    log(f"data: encoded {tokens:,} tokens in {seconds:.1f} s ({tokens / seconds:,.0f} tokens/s, "
        f"{n_bytes / seconds / 1e6:.1f} MB/s, {n_bytes / tokens:.2f} bytes per token), "
        f"{done['splits']['val']['tokens']:,} of them held out")
    return {**done, "stage": "tokens", "vocab": vocab, "pieces": tok.vocab_size(), "eod": tok.eos_id(), "cleaning": dict(counts),
            "dtype": token_dtype(vocab).str, "tokenizer_hash": tokenizer_hash(model.read_bytes()), "sources": source["sources"],
            "versions": {"sentencepiece": sentencepiece.__version__, **source["versions"]}}


def describe(path, vocab: int, tokenizer: str = "") -> dict:
    """The manifest of a token set, or what stands for it of a foreign Megatron data set, which must come with the tokenizer
    that it was made with. Adds "tokenizer", the path of the .model.

    Raises ConfigError where tokenizer, vocabulary and tokens do not belong together (by a look at the first tokens of each
    shard; `verify` reads all), or where `path` holds none."""
    given, tok = read_tokenizer(tokenizer)
    if (Path(path) / "manifest.json").is_file():
        manifest, model = read_manifest(path), Path(path) / "tokenizer.model"
        if given and tokenizer_hash(given) != manifest["tokenizer_hash"]:
            raise ConfigError(f"--tokenizer={tokenizer!r} is not the tokenizer of --data={str(path)!r}. Leave it empty.")
        if manifest["pieces"] > vocab:
            raise ConfigError(f"--vocab={vocab} is less than the {manifest['pieces']} pieces of --data={str(path)!r}. "
                              f"Use --vocab={manifest['pieces']} or more.")
        return {**manifest, "vocab": vocab, "dtype": token_dtype(vocab).str, "tokenizer": str(model)}
    if not is_shards(path):
        raise ConfigError(f"{str(path)!r} holds no token shards. Give a tokens-* directory, or a data set in Megatron's format; "
                          f"text goes through `python data.py prepare --data=...`.")
    if not given:
        raise ConfigError(f"--data={str(path)!r} is a Megatron data set, which does not say how it was tokenized. Give the "
                          f"SentencePiece .model that it was made with as --tokenizer.")
    shards = Shards(path, "all")
    if not shards.n_documents:
        raise ConfigError(f"--data={str(path)!r} holds no documents.")
    for prefix, tokens in zip(shards.prefixes, shards.bins):
        first = tokens[:1 << 16]
        if len(first) and (first.min() < 0 or first.max() >= tok.vocab_size()):
            raise ConfigError(f"{prefix}.bin holds token {max(int(first.max()), int(first.min()), key=abs)}, outside the "
                              f"{tok.vocab_size():,} pieces of --tokenizer={tokenizer!r}. Give the tokenizer it was made with.")
    splits = {}
    for split in SPLITS:
        of_split = Shards(path, split)
        splits[split] = {"documents": of_split.n_documents, "tokens": of_split.n_tokens, "bytes": 0,
                         "tokens_by_domain": {"text": of_split.n_tokens}}
    return {"stage": "tokens", "vocab": vocab, "pieces": tok.vocab_size(), "eod": tok.eos_id(), "dtype": token_dtype(vocab).str,
            "tokenizer_hash": tokenizer_hash(given), "splits": splits, "versions": {}, "domains": {}, "cleaning": {},
            "sources": {}, "files": {}, "tokenizer": tokenizer}


if __name__ == "__main__":
    serve()
