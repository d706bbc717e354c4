"""Token shards: pairs of files in Megatron's format, and the directories that hold them.

A .bin file is the tokens of all documents end to end. The .idx file beside it says where they begin (little-endian,
without padding, so its arrays are not aligned):

    9 bytes "MMIDIDX" and two zeros · u64 version 1 · u8 code of the token type (DTYPES) · u64 S sequences · u64 D
    i32 [S] tokens per sequence · i64 [S] byte in the .bin where each begins · i64 [D] documents' first sequences, then S

(D is the number of documents + 1.) Published with Megatron-LM, megatron/core/datasets/indexed_dataset.py. Our own
documents are one sequence each and close with the end token; in foreign ones a document may be several sequences.
"""
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import struct
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np

from errors import ConfigError
from order import splitmix

FORMAT = 2                       # raise it when any stage would write other bytes for the same inputs
SPLITS = ("train", "val")
HELD_OUT = 0.01                  # share of the documents that is never trained on
MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}      # 6 and 7 are floats
CHECK_TOKENS = 1 << 24           # tokens that are compared with the vocabulary at a time


def digest(value) -> str:
    """Hash of a JSON value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            h.update(block)
    return h.hexdigest()


def stamp(path) -> list:
    """What changes when a file does: where it lies, its size, the times of its content and of its inode, which nobody can set."""
    s = os.stat(path)
    return [os.path.realpath(path), s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns]


HASHES: dict[tuple, str] = {}    # of files as this process has met them


def file_hashes(paths: list[Path], record: Path | None = None) -> list[str]:
    """SHA-256 of each file, several at a time. record: keeps them, so that a file that is as it was is not read again."""
    known, stamps = HASHES.copy(), [stamp(path) for path in paths]
    if record and record.is_file():
        with contextlib.suppress(ValueError):                # a damaged one: they are all read again
            known |= {tuple(found): h for found, h in json.loads(record.read_bytes())}
    new = [(path, tuple(s)) for path, s in zip(paths, stamps) if tuple(s) not in known]
    if new:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1) as pool:
            known |= dict(zip([s for _, s in new], pool.map(file_sha256, [path for path, _ in new])))
        kept = [[found, h] for found, h in known.items() if os.path.exists(found[0])]
        with contextlib.suppress(OSError):                   # prepared data may be there to read only
            if record:
                write_synced(record, json.dumps(kept).encode())
    HASHES.update(known)
    return [known[tuple(s)] for s in stamps]


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def token_dtype(vocab: int) -> np.dtype:
    """u16 only where its highest value is free to mean "no successor"; the margin is Megatron's."""
    return np.dtype("<u2") if vocab < 65_500 else np.dtype("<i4")


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
    except (ValueError, KeyError, AttributeError):
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


# ---------------------------------------------------------------------------------------------------------------------
# Stages: directories that exist only when they are finished
# ---------------------------------------------------------------------------------------------------------------------

def write_synced(path: Path, raw: bytes) -> None:
    """All of the file or nothing, on the disk before this returns."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}")
    with open(tmp, "wb") as f:
        f.write(raw)
        f.flush()
        os.fsync(f.fileno())
    tmp.rename(path)
    sync(path.parent)


@contextlib.contextmanager
def _locked(path: Path):
    """One builder at a time, to save work; yields False where the file system has no locks (the rename keeps it safe)."""
    with open(path, "w") as f:
        alone = True
        try:
            fcntl.flock(f, fcntl.LOCK_EX)
        except OSError:
            alone = False
        yield alone


def _rename(tmp: Path, final: Path) -> None:
    """Publish tmp as final. Where another process has published the same content first, its copy stands."""
    try:
        tmp.rename(final)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


def stage(parent: Path, name: str, build, partial: str = "") -> Path:
    """parent/name, built by build(directory) -> manifest entries if it is not there yet.

    With `partial`, a name that stands for all that determines the content, the unfinished directory is parent/partial,
    which outlives a failure: build finds there what an earlier try finished. It may give "files" itself, with hashes."""
    final = parent / name
    if final.is_dir():
        read_manifest(final)
        return final
    with _locked(parent / f".{name}.lock") as alone:
        if final.is_dir():                                   # another process was faster
            read_manifest(final)
            return final
        for stale in parent.glob(f".{name}.tmp-*"):          # of a killed run: a day old, so surely nobody's
            with contextlib.suppress(FileNotFoundError):     # of a live one without locks, published in between
                if time.time() - stale.stat().st_mtime > 86400:
                    shutil.rmtree(stale, ignore_errors=True)
        keep = bool(partial) and alone
        tmp = parent / (partial if keep else f".{name}.tmp-{os.uname().nodename}-{os.getpid()}-{os.urandom(4).hex()}")
        tmp.mkdir(exist_ok=keep)
        try:
            if not (tmp / "manifest.json").is_file():        # else it was killed just before the rename
                manifest = build(tmp)
                known = manifest.setdefault("files", {})
                for p in sorted(p for p in tmp.iterdir() if p.name[0] != "." and p.name not in known):
                    known[p.name] = {"bytes": p.stat().st_size, "sha256": file_sha256(p)}
                    sync(p)
                manifest["format"] = FORMAT
                manifest["digest"] = digest(manifest)
                write_synced(tmp / "manifest.json", json.dumps(manifest, indent=1, sort_keys=True).encode() + b"\n")
            for left in tmp.glob(".*"):                      # notes on parts, files that a killed process began
                left.unlink()
            sync(tmp)
            _rename(tmp, final)
            sync(parent)
        finally:
            if not keep:
                shutil.rmtree(tmp, ignore_errors=True)       # what a failed build, or a lost race, leaves
    read_manifest(final)
    return final


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------

class ShardWriter:
    """Writes prefix.bin document by document and, on `close`, prefix.idx. Per document it keeps four bytes."""

    def __init__(self, prefix, dtype: np.dtype):
        self.paths = [Path(f"{prefix}.bin"), Path(f"{prefix}.idx")]
        self.dtype, self._lengths, self._hash = np.dtype(dtype), array("i"), hashlib.sha256()
        self._code = next(code for code, name in DTYPES.items() if np.dtype(name) == self.dtype)
        self._bin = open(self.paths[0], "wb", 1 << 20)

    def add(self, ids_T) -> None:
        """One document: integers [T], or their bytes in the shard's dtype."""
        raw = ids_T if isinstance(ids_T, bytes) else np.asarray(ids_T).astype(self.dtype).tobytes()
        self._bin.write(raw)
        self._hash.update(raw)
        self._lengths.append(len(raw) // self.dtype.itemsize)

    def close(self) -> dict:
        """Writes the index and syncs both files. Returns documents, tokens and, by suffix, each file's size and hash."""
        length_N = np.frombuffer(self._lengths, np.int32).astype("<i4")
        end_N = np.cumsum(length_N, dtype="<i8")
        N = len(length_N)
        index = b"".join((HEADER.pack(MAGIC, 1, self._code, N, N + 1), length_N.tobytes(),
                          ((end_N - length_N) * self.dtype.itemsize).tobytes(), np.arange(N + 1, dtype="<i8").tobytes()))
        self._bin.close()
        self.paths[1].write_bytes(index)
        for path in self.paths:
            sync(path)
        hashes = self._hash.hexdigest(), hashlib.sha256(index).hexdigest()
        return {"documents": N, "tokens": int(end_N[-1]) if N else 0,
                "files": {p.suffix: {"bytes": p.stat().st_size, "sha256": h} for p, h in zip(self.paths, hashes)}}


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------

def shard_prefixes(path) -> list[Path]:
    """The Megatron pairs at `path`, without their suffix: a prefix, its .bin or .idx, or a directory of pairs.

    Raises ConfigError where there are none, or where one of a pair is missing."""
    path = Path(path)
    if path.is_dir():
        found = sorted({p.with_suffix("") for p in path.iterdir() if p.suffix in (".bin", ".idx")})
        if not found:
            raise ConfigError(f"{str(path)!r} holds no .bin and .idx files. Give a directory of token shards, or a prefix.")
    else:
        found = [path.with_suffix("") if path.suffix in (".bin", ".idx") else path]
    for prefix in found:
        for file in (Path(f"{prefix}.bin"), Path(f"{prefix}.idx")):
            if not file.is_file():
                raise ConfigError(f"{str(file)!r} is missing: a shard is a .bin and an .idx file of one name.")
    return found


def is_shards(path) -> bool:
    """Whether `path` names token shards rather than text: a token set, a Megatron prefix, or a directory of pairs."""
    path = Path(path)
    if path.is_dir():
        return any(p.suffix == ".idx" for p in path.iterdir())
    return path.suffix in (".bin", ".idx") or Path(f"{path}.idx").is_file()


class Shard:
    """One .bin/.idx pair, memory-mapped: tokens [T]; length_N i32 or i64 and start_N i64 [N] of its documents.

    Raises ConfigError for everything that can be seen without reading the tokens."""

    def __init__(self, prefix):
        bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        where = f"{str(idx_path)!r}"
        with open(idx_path, "rb") as f:
            head = f.read(HEADER.size)
        if len(head) < HEADER.size or head[:9] != MAGIC:
            raise ConfigError(f"{where} is not a Megatron index: it does not begin with MMIDIDX. Give the .bin/.idx pair of "
                              f"an mmap data set (Megatron's other formats are not read).")
        _, version, code, S, D = HEADER.unpack(head)
        if version != 1:
            raise ConfigError(f"{where} has version {version} of the format; version 1 is read.")
        if code not in DTYPES:
            raise ConfigError(f"{where} holds values of type code {code}, which are no token numbers: "
                              f"codes {', '.join(map(str, DTYPES))} are read.")
        self.dtype, sizes, want = np.dtype(DTYPES[code]), idx_path.stat().st_size, HEADER.size + 12 * S + 8 * D
        if sizes not in (want, want + S):                    # multimodal sets add a byte per sequence
            raise ConfigError(f"{where} has {sizes:,} bytes, its header ({S:,} sequences, {D:,} document marks) asks for "
                              f"{want:,}. It is cut off or damaged; copy or make it again.")
        index = np.memmap(idx_path, np.uint8, "r") if D else np.zeros(0, np.uint8)
        array_at = lambda at, count, kind: np.frombuffer(index, kind, count, at) if count else np.zeros(0, kind)  # noqa: E731
        length_S, pointer_S = array_at(HEADER.size, S, "<i4"), array_at(HEADER.size + 4 * S, S, "<i8")
        mark_D = array_at(HEADER.size + 12 * S, D, "<i8")
        if D < 1 or mark_D[0] != 0 or mark_D[-1] != S or (np.diff(mark_D) < 0).any():
            raise ConfigError(f"{where}: its document marks do not go from 0 to {S:,} in order. It is damaged; make it again.")
        if S and (length_S.min() < 0 or pointer_S[0] != 0
                  or (np.diff(pointer_S) != length_S[:-1].astype(np.int64) * self.dtype.itemsize).any()):
            raise ConfigError(f"{where}: its sequences do not lie end to end in the .bin. It is damaged, or was made by a "
                              f"program that leaves gaps; merge it anew with Megatron's tools/merge_datasets.py.")
        T = int(pointer_S[-1]) // self.dtype.itemsize + int(length_S[-1]) if S else 0
        if bin_path.stat().st_size != T * self.dtype.itemsize:
            raise ConfigError(f"{str(bin_path)!r} has {bin_path.stat().st_size:,} bytes, its .idx says "
                              f"{T * self.dtype.itemsize:,}. It is cut off or belongs to another .idx; copy or make it again.")
        self.tokens = np.memmap(bin_path, self.dtype, "r") if T else np.zeros(0, self.dtype)
        if S == D - 1 and (np.diff(mark_D) == 1).all():      # one sequence per document (a copy is aligned)
            self.length_N, start_N = length_S.copy(), pointer_S
        else:
            edge_D = np.append(pointer_S, T * self.dtype.itemsize)[mark_D]
            self.length_N, start_N = np.diff(edge_D) // self.dtype.itemsize, edge_D[:-1]
        self.start_N = start_N // self.dtype.itemsize


class Shards:
    """One split of a token set, or of any Megatron data set, memory-mapped.

    path: a token set's directory, a Megatron prefix (or its .bin or .idx), or a directory of Megatron pairs. A foreign set
    has no split of its own: `held_out` chooses, and split="all" takes every document.

    n_documents, n_tokens; dtype of the tokens; vocab and eod (0 and -1 where unknown)
    lengths_N, start_N  [N]         tokens of each document, end token included, and where it begins in its shard
    first_shard         [shards+1]  documents before each shard
    bins                            tokens [T] of each shard

    Raises ConfigError for a damaged directory or shard (what only a reading of all tokens shows: `verify_shards`)."""

    def __init__(self, path, split: str = "train"):
        path = Path(path)
        self.path, self.split, self.manifest = path, split, {}
        if split not in (*SPLITS, "all"):
            raise ConfigError(f"{str(path)!r} has no split {split!r}: choose one of {(*SPLITS, 'all')}.")
        if (path / "manifest.json").is_file():
            self.manifest = read_manifest(path)
            if self.manifest["stage"] != "tokens":
                raise ConfigError(f"{str(path)!r} is a {self.manifest['stage']} directory. Give a tokens-* directory.")
            names = sorted(n[:-4] for n in self.manifest["files"] if n.endswith(".idx"))
            prefixes = [path / n for n in names if split in ("all", n.split("-")[0])]
        else:
            prefixes = shard_prefixes(path)
        shards = [Shard(prefix) for prefix in prefixes]
        kinds = {s.dtype for s in shards}
        if len(kinds) > 1:
            raise ConfigError(f"{str(path)!r} mixes shards of the types {sorted(map(str, kinds))}. Give one type at a time.")
        self.dtype = kinds.pop() if kinds else token_dtype(self.manifest["vocab"])
        self.vocab, self.eod = self.manifest.get("vocab", 0), self.manifest.get("eod", -1)
        self.prefixes, self.bins = prefixes, [s.tokens for s in shards]
        self.lengths_N = _joined([s.length_N for s in shards], np.int32)
        self.start_N = _joined([s.start_N for s in shards], np.int64)
        self.first_shard = np.cumsum([0] + [len(s.length_N) for s in shards])
        if not self.manifest and split != "all":
            keep_N = held_out(path, tuple(tuple(stamp(f"{p}{s}")) for p in prefixes for s in (".bin", ".idx"))) == (split == "val")
            before = np.concatenate([[0], np.cumsum(keep_N)])
            self.lengths_N, self.start_N = self.lengths_N[keep_N], self.start_N[keep_N]
            self.first_shard = before[self.first_shard]
        self.n_documents, self.n_tokens = len(self.lengths_N), int(self.lengths_N.sum(dtype=np.int64))

    def __len__(self) -> int:
        return self.n_documents

    def __getitem__(self, i: int) -> np.ndarray:
        if not 0 <= i < self.n_documents:
            raise IndexError(f"document {i} of {self.n_documents}")
        shard = int(np.searchsorted(self.first_shard, i, "right")) - 1
        return self.bins[shard][self.start_N[i]:self.start_N[i] + self.lengths_N[i]]

    def fingerprint(self, record: Path | None = None) -> str:
        """Hash over the shards' contents, the split and the tokenizer. A foreign set is read for it: see file_hashes."""
        if self.manifest:
            files = [self.manifest["files"][f"{p.name}{s}"]["sha256"] for p in self.prefixes for s in (".bin", ".idx")]
        else:
            files = file_hashes([Path(f"{p}{s}") for p in self.prefixes for s in (".bin", ".idx")], record)
        return digest([FORMAT, files, self.split, self.vocab, self.manifest.get("tokenizer_hash", "")])


def _joined(arrays: list[np.ndarray], kind) -> np.ndarray:
    """The arrays end to end; a single one as it is, not copied."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays) if arrays else np.zeros(0, kind)


@lru_cache(1)
def held_out(path: Path, stamps: tuple) -> np.ndarray:
    """bool [N]: the documents of a foreign set that are never trained on, by a hash of their length and first 32 tokens, so
    that equal documents go the same way wherever they lie. Where chance takes none (few documents), the lowest hash goes.

    stamps: of its files as they are, for a look at each document costs as much as reading it, if it is short."""
    shards, parts = Shards(path, "all"), []
    for n, tokens in enumerate(shards.bins):
        first, last = shards.first_shard[n], shards.first_shard[n + 1]
        for at in range(first, last, 1 << 18):
            begin_N, length_N = shards.start_N[at:min(last, at + (1 << 18))], shards.lengths_N[at:min(last, at + (1 << 18))]
            hash_N = splitmix(length_N.astype(np.uint64))
            for k in range(32):
                inside_N = k < length_N
                hash_N[inside_N] = splitmix(hash_N[inside_N] ^ tokens[begin_N[inside_N] + k].astype(np.int64).astype(np.uint64))
            parts.append(hash_N)
    hash_N = _joined(parts, np.uint64)
    held_N = hash_N < np.uint64(HELD_OUT * 2**64)
    if held_N.all() or not held_N.any():
        held_N = hash_N == hash_N.min() if len(hash_N) else held_N
        if held_N.all():
            raise ConfigError(f"{str(shards.path)!r} holds {len(hash_N)} documents and no two different ones, so nothing can be "
                              f"held out for validation. Give different documents.")
    return held_N


# ---------------------------------------------------------------------------------------------------------------------
# Checking
# ---------------------------------------------------------------------------------------------------------------------

def verify_shards(path, vocab: int = 0) -> str:
    """Reads every byte, shard after shard. Returns what was checked; raises ConfigError naming the first file that is wrong, and
    how many shards before it are whole."""
    manifest = read_manifest(path) if (Path(path) / "manifest.json").is_file() else {}
    vocab, tokens, documents, prefixes = vocab or manifest.get("vocab", 0), 0, 0, shard_prefixes(path)
    for name in sorted(set(manifest.get("files", {})) - {f"{p.name}{suffix}" for p in prefixes for suffix in (".bin", ".idx")}):
        _check_hash(Path(path) / name, manifest)
    for n, prefix in enumerate(prefixes):
        try:
            for suffix in (".bin", ".idx") if manifest else ():
                _check_hash(Path(f"{prefix}{suffix}"), manifest)
            shard = Shard(prefix)
            for at in range(0, len(shard.tokens) if vocab else 0, CHECK_TOKENS):
                part = shard.tokens[at:at + CHECK_TOKENS]
                if part.min() < 0 or part.max() >= vocab:
                    bad = at + int(np.argmax((part < 0) | (part >= vocab)))
                    raise ConfigError(f"{str(prefix)!r}: token {bad:,} of its .bin is {int(shard.tokens[bad])}, outside the "
                                      f"vocabulary of {vocab:,}. Give the tokenizer it was made with.")
        except ConfigError as error:
            raise ConfigError(f"{error} The {n} of {len(prefixes)} shards before it are whole.") from None
        tokens, documents = tokens + len(shard.tokens), documents + len(shard.length_N)
    return (f"{len(prefixes)} shards, {documents:,} documents, {tokens:,} tokens: "
            + ("all files as written" if manifest else "all indices are consistent")
            + (f", every token below {vocab:,}" if vocab else "; token range not checked (give --tokenizer or --vocab)"))


def _check_hash(path: Path, manifest: dict) -> None:
    if path.name not in manifest["files"]:
        raise ConfigError(f"{str(path)!r} is not in the manifest of its directory. Move it elsewhere.")
    if file_sha256(path) != manifest["files"][path.name]["sha256"]:
        raise ConfigError(f"{str(path)!r} differs from its hash in the manifest. Delete its directory and make it again.")
