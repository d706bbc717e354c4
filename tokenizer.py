"""Text to token numbers and what that rests on: a SentencePiece model, given or trained here.

Every way to encode gives the tokens of plain SentencePiece, `encode`. `Encoder` only gets there sooner: by a cache of
chunks whose borders no merge can cross, or by the gigatoken package where it is installed and asked for.
"""
import hashlib
import importlib.metadata
import io
import itertools
import json
import re
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import sentencepiece

from errors import ConfigError
from shards import digest, token_dtype, write_synced

SPACE = "\u2581"                 # SentencePiece writes a space as this character
SPACE_UTF8 = SPACE.encode()
CACHE_BYTES = 1 << 23           # chunks and their tokens that an Encoder remembers; with Python's overhead about 12 times that
TRUST_BYTES = 1 << 14            # text at the beginning of a part that is compared with plain SentencePiece
GIGATOKEN_BYTES = 1 << 27        # text after which gigatoken starts anew
SLICE_BYTES = 1 << 20            # text that is cut into chunks at a time
KINDS = ("auto", "cache", "sentencepiece", "gigatoken")
# numbers in sentencepiece_model.proto
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BPE = 2


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


@lru_cache(4)
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


def load_model(model: bytes, setting: str) -> sentencepiece.SentencePieceProcessor:
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
    return load_model(file.read_bytes(), repr(str(file)))


def token_bytes(tok) -> np.ndarray:
    """int64 [pieces]: how many UTF-8 bytes of text each piece stands for; control and unknown pieces 0."""
    sizes = [0 if tok.is_control(i) or tok.is_unknown(i) else 1 if tok.is_byte(i)
             else len(tok.id_to_piece(i).replace(SPACE, " ").encode()) for i in range(tok.vocab_size())]
    return np.array(sizes, np.int64)


def encode(tok, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, without end-of-document. Text that looks like a control piece ("</s>") stays text.

    The one character that SentencePiece cannot tell from a space, U+2581, is written as its three bytes."""
    ids = tok.encode(texts, num_threads=1)
    if any(SPACE in text for text in texts) and (special := space_ids(tok)):
        for n, text in enumerate(texts):
            if SPACE in text:
                first, *rest = tok.encode(text.split(SPACE), num_threads=1)
                ids[n] = first + [i for part in rest for i in special + part]
    return ids


def space_ids(tok) -> list[int]:
    """The tokens that stand for a literal U+2581; none where the model has no byte pieces, or puts a space before each text."""
    special = [tok.piece_to_id(f"<0x{b:02X}>") for b in SPACE_UTF8]
    return special if all(map(tok.is_byte, special)) and not tok.encode("a", out_type=str)[0].startswith(SPACE) else []


# ---------------------------------------------------------------------------------------------------------------------
# Encoding fast
# ---------------------------------------------------------------------------------------------------------------------

def model_settings(model: bytes) -> dict:
    """What decides how a model encodes: its type, byte fallback, normaliser; (text, type) of every piece."""
    found = {"type": 1, "byte_fallback": False, "as_suffix": False, "charsmap": b"", "dummy_prefix": True,
             "squeeze": True, "escape": True, "pieces": []}                  # the defaults of the format
    number = lambda raw: int.from_bytes(raw, "little")                       # noqa: E731
    for field, value in wire(model):
        inner = dict(wire(value)) if field in (1, 2, 3) else {}
        if field == 1:
            found["pieces"].append((inner.get(1, b""), number(inner.get(3, b"\1"))))
        elif field == 2:
            found["type"] = number(inner.get(3, b"\1"))
            found["as_suffix"], found["byte_fallback"] = any(inner.get(24, b"")), any(inner.get(35, b""))
        elif field == 3:
            found["charsmap"] = inner.get(2, b"")
            found["dummy_prefix"], found["squeeze"], found["escape"] = (any(inner.get(n, b"\1")) for n in (3, 4, 5))
    return found


def chunk_pattern(model: bytes) -> tuple[re.Pattern | None, str]:
    """A pattern over UTF-8 whose successive matches are the whole text, cut only where no merge can reach across; or None
    and the reason why this model allows no such cut.

    BPE joins two neighbours only into a piece of the vocabulary. So where no piece holds the bytes x and y side by side,
    the text before a border of x and y and the text after it are encoded as if the other were not there. Bytes are sorted
    into classes (letters and everything beyond ASCII, digits, line ends, the rest); two classes that meet inside a piece
    become one. A chunk is the spaces before a run of one class, and that run."""
    s = model_settings(model)
    for bad, reason in ((s["type"] != BPE, "it is not a BPE model (a unigram model's sums are rounded from the text's start)"),
                        (not s["byte_fallback"], "it has no byte fallback (unknown letters side by side become one token)"),
                        (s["charsmap"] or s["squeeze"] or not s["escape"], "its normaliser changes the text"),
                        (s["dummy_prefix"] or s["as_suffix"], "it puts a space before or after the text")):
        if bad:
            return None, reason
    classes = [set(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz") | set(range(128, 256)), set(b"0123456789"), {10}]
    classes.append(set(range(256)) - {32} - set().union(*classes))
    home = {byte: n for n, group in enumerate(classes) for byte in group}
    home[32] = -1
    for text, kind in s["pieces"]:
        text = text.replace(SPACE_UTF8, b" ")
        for x, y in zip(text, text[1:]) if kind in (NORMAL, USER_DEFINED, UNUSED) else ():
            if x != 32 and y == 32:
                return None, f"its piece {text.decode()!r} goes on after a word's end"
            if x != 32 and home[x] != home[y]:
                old, new = home[y], home[x]
                home = {byte: new if n == old else n for byte, n in home.items()}
    groups = [bytes(sorted(b for b in home if home[b] == n)) for n in sorted(set(home.values()) - {-1})]
    if len(groups) == 1:
        return None, "its pieces join letters, digits and signs"
    runs = b"|".join(b"[" + b"".join(b"\\x%02x" % b for b in group) + b"]+" for group in groups)
    return re.compile(b" *(?:" + runs + rb"|\Z)"), ""


class Encoder:
    """Documents to the bytes of their tokens, end token included, in the dtype for `vocab`.

    kind: "sentencepiece"; "cache", exact by construction (see chunk_pattern); "gigatoken", guarded and compared; "auto" is
    the cache. Where the model does not allow a kind, `note` says why and plain SentencePiece works. kept: a directory for
    what gigatoken needs of a model, which takes as long to make as a second of text to encode."""

    def __init__(self, model: bytes, vocab: int, kind: str = "auto", kept: Path | None = None):
        if kind not in KINDS:
            raise ConfigError(f"--encoder={kind!r}: choose one of {', '.join(KINDS)}.")
        self.tok, self.dtype = load_model(model, "the tokenizer"), token_dtype(vocab)
        self.end = np.array(self.tok.eos_id(), self.dtype).tobytes()
        self.cache, self.cached, self.note, self._encode = {}, 0, "", self._plain
        special = space_ids(self.tok)
        self.space = np.array(special, self.dtype).tobytes()
        self.literals = [] if special else [SPACE_UTF8]      # text that holds one of these goes to plain SentencePiece
        if kind in ("auto", "cache"):
            self.pattern, reason = chunk_pattern(model)
            if self.pattern:
                self._encode = self._chunked
            else:
                self.note = f"plain SentencePiece encodes, without the chunk cache: {reason}"
        elif kind == "gigatoken":
            self._open_gigatoken(model, kept)

    def __call__(self, raws: list[bytes]) -> list[bytes]:
        """raws: documents in UTF-8, together about a megabyte or a single longer one."""
        if self._encode == self._plain:
            return [tokens + self.end for tokens in self._plain(raws)]
        split = [raw.split(SPACE_UTF8) if self.space and not raw.isascii() else [raw] for raw in raws]     # as `encode` does
        parts = [part for parts in split for part in parts]
        special = {n for n, part in enumerate(parts) if any(text in part for text in self.literals)}
        if special:
            quick = iter(self._encode([part for n, part in enumerate(parts) if n not in special]))
            plain = iter(self._plain([parts[n] for n in sorted(special)]))
            tokens = (next(plain if n in special else quick) for n in range(len(parts)))
        else:
            tokens = iter(self._encode(parts))
        return [self.space.join(itertools.islice(tokens, len(parts))) + self.end for parts in split]

    def trust(self, raws: list[bytes]) -> None:
        """Compare the first TRUST_BYTES of these documents with plain SentencePiece, and fall back to it where one differs."""
        if self._encode == self._plain:
            return
        first, room = [], TRUST_BYTES
        for raw in raws:
            first.append(raw[:room].decode(errors="ignore").encode())
            if (room := room - len(raw)) <= 0:
                break
        if self(first) != [tokens + self.end for tokens in self._plain(first)]:
            self.note = f"{self._encode.__name__.strip('_')} encoding differs from SentencePiece here; SentencePiece goes on"
            self._encode = self._plain

    def _plain(self, raws: list[bytes]) -> list[bytes]:
        return [np.array(ids, self.dtype).tobytes() for ids in encode(self.tok, [raw.decode() for raw in raws])]

    def _chunked(self, raws: list[bytes]) -> list[bytes]:
        lookup, done, chunks = self.cache.__getitem__, [], []
        for raw in raws:
            if len(raw) > 2 * SLICE_BYTES:
                done.append(b"".join(self._slices(raw)))
            else:
                done.append(None)
                chunks.append(self.pattern.findall(raw))
        self._learn(chunks)
        tokens = (b"".join(map(lookup, of_document)) for of_document in chunks)
        return [next(tokens) if long is None else long for long in done]

    def _slices(self, raw: bytes):
        """Tokens of one long document, a megabyte at a time. A match from anywhere inside a chunk ends where that does."""
        begin = 0
        while begin < len(raw):
            end = self.pattern.match(raw, min(begin + SLICE_BYTES, len(raw))).end()
            chunks = self.pattern.findall(raw, begin, end)
            self._learn([chunks])
            yield b"".join(map(self.cache.__getitem__, chunks))
            begin = end

    def _learn(self, chunks: list[list[bytes]]) -> None:
        """Make sure that the cache has all chunks. When it is full it starts anew."""
        wanted = set().union(*chunks)
        new = sorted(wanted.difference(self.cache))
        if self.cached > CACHE_BYTES:
            self.cache.clear()
            self.cached, new = 0, sorted(wanted)
        for chunk, ids in zip(new, self.tok.encode(new, num_threads=1)):
            tokens = np.array(ids, self.dtype).tobytes()
            self.cache[chunk] = tokens
            self.cached += len(chunk) + len(tokens)

    def _open_gigatoken(self, model: bytes, kept: Path | None) -> None:
        try:
            from gigatoken.gigatoken_rs import load_hf_json
        except ImportError:
            raise ConfigError("--encoder=gigatoken needs the package gigatoken (pip install gigatoken==0.10.0). "
                              "Install it, or use --encoder=auto.") from None
        key = digest([importlib.metadata.version("gigatoken"), hashlib.sha256(model).hexdigest()])
        file = kept and kept / f"gigatoken-{key[:16]}"
        if file and file.is_file():
            literals, settings = file.read_bytes().split(b"\n", 1)
        else:
            literals, settings, self.note = self._for_gigatoken(model)
            if self.note:
                return
            if file:
                write_synced(file, literals + b"\n" + settings)
        self.literals += [name.encode() for name in json.loads(literals)]
        self._new_gigatoken = partial(load_hf_json, settings)
        self.giga = self._new_gigatoken()
        self._encode = self._gigatoken

    def _for_gigatoken(self, model: bytes) -> tuple[bytes, bytes, str]:
        """Names of pieces that are text in a document but that merges could reach, and the model as gigatoken reads it, both in
        JSON; or the reason why it cannot."""
        from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json
        try:
            settings = sentencepiece_to_tokenizer_json(model)
        except ValueError as error:
            return b"", b"", f"plain SentencePiece encodes, gigatoken does not read this model: {error}"
        ids = list(range(self.tok.vocab_size()))
        pieces = self.tok.id_to_piece(ids)
        if any(self.tok.is_unused(ids)):
            return b"", b"", "plain SentencePiece encodes: gigatoken does not know the model's unused pieces"
        # "</s>" in a document is text: gigatoken must neither look for control pieces nor be able to merge their names
        known, kinds = set(pieces), zip(self.tok.is_control(ids), self.tok.is_unknown(ids), self.tok.is_byte(ids))
        literals = [piece for piece, kind in zip(pieces, kinds) if any(kind)
                    and any(piece[:i] in known and piece[i:] in known for i in range(1, len(piece)))]
        begin = re.search(r'"added_tokens":\s*', settings).end()                  # the rest is long: it is left as it is
        tokens, end = json.JSONDecoder().raw_decode(settings, begin)
        settings = settings[:begin] + json.dumps([token for token in tokens if not token["special"]]) + settings[end:]
        return json.dumps(literals).encode(), settings.encode(), ""

    def _gigatoken(self, raws: list[bytes]) -> list[bytes]:
        self.cached += sum(map(len, raws))
        if self.cached > GIGATOKEN_BYTES:                    # what it remembers grows with all that it has seen
            self.giga, self.cached = self._new_gigatoken(), 0
        return [self.giga.encode(raw).astype(self.dtype).tobytes() for raw in raws]
