"""Read and judge a GGUF file's header, without loading the model and without trusting a single length in it.

llama.cpp answers many damaged files with a log line and a null pointer, some with ``abort()``. This parser looks
first, and says in one line what is wrong: what the file is instead of a GGUF, where it was cut, or why it is no
language model. It reads the metadata and the tensor table only (well under 0.2 s with a vocabulary of 152k
tokens), skips long arrays without making Python objects of them, and never allocates more than the file holds.

The format is GGUF version 2 and 3 as ``gguf.cpp`` of ggml 0.25 reads it.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from hiraishin.errors import UserError
from hiraishin.gguf_tables import GGML_TYPES, LANGUAGE_ARCHITECTURES, OTHER_ARCHITECTURES

MAX_TENSORS = 1 << 17
MAX_KEYS = 1 << 14
MAX_STRINGS = 1 << 22
"""Bounds on the header; the largest published models stay under a tenth of each."""
MAX_HEADER = 1 << 28

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")

Value = int | float | bool | str | tuple[int | float | bool, ...]


@dataclass(frozen=True)
class Tensor:
    """One entry of the tensor table; ``offset`` counts from the start of the data section."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Header:
    """What a GGUF says about itself.

    ``values`` holds scalar metadata, strings up to 64 KB and numeric arrays up to 4,096 entries; ``lengths`` the
    number of entries of every array. ``data_start`` is the byte where tensor data begins.
    """

    path: Path
    file_size: int
    version: int
    values: dict[str, Value]
    lengths: dict[str, int]
    tensors: tuple[Tensor, ...]
    data_start: int
    alignment: int
    long_strings: frozenset[str] = field(default_factory=frozenset)

    def _number(self, key: str, default: int = 0) -> int:
        value = self.values.get(f"{self.architecture}.{key}", default)
        if isinstance(value, tuple):  # one entry a layer
            value = max(value, default=default)
        return int(value) if isinstance(value, int | float) and abs(value) < 1 << 40 else default

    @property
    def architecture(self) -> str:
        """``general.architecture``, empty when absent."""
        value = self.values.get("general.architecture", "")
        return value if isinstance(value, str) else ""

    @property
    def n_tensors(self) -> int:
        """Number of tensors in this file."""
        return len(self.tensors)

    @property
    def types(self) -> dict[str, int]:
        """How many tensors there are of each ggml type, most frequent first."""
        return dict(Counter(t.type for t in self.tensors).most_common())

    @property
    def n_vocab(self) -> int:
        """Tokens in the vocabulary."""
        return self.lengths.get("tokenizer.ggml.tokens", 0) or self._number("vocab_size")

    @property
    def n_layer(self) -> int:
        """Layers."""
        return self._number("block_count")

    @property
    def n_ctx_train(self) -> int:
        """Context length in training, tokens."""
        return self._number("context_length")

    @property
    def n_embd(self) -> int:
        """Width of the residual stream."""
        return self._number("embedding_length")

    @property
    def n_head(self) -> int:
        """Query heads (the largest number of a layer)."""
        return self._number("attention.head_count")

    @property
    def n_head_kv(self) -> int:
        """Key and value heads (the largest number of a layer)."""
        return self._number("attention.head_count_kv", self.n_head)

    @property
    def head_dim(self) -> int:
        """Length of one key vector."""
        return self._number("attention.key_length", self.n_embd // self.n_head if self.n_head > 0 else 0)

    @property
    def head_dim_v(self) -> int:
        """Length of one value vector."""
        return self._number("attention.value_length", self.n_embd // self.n_head if self.n_head > 0 else 0)

    @property
    def n_ff(self) -> int:
        """Width of the feed-forward layer (of the experts in use together, in a mixture)."""
        experts = self._number("expert_feed_forward_length") * self._number("expert_used_count")
        return max(self._number("feed_forward_length"), experts)

    @property
    def state_elements(self) -> int:
        """Floats of a recurrent layer's state, 0 for attention alone (mamba's: inner size x (state + kernel - 1))."""
        return self._number("ssm.inner_size") * (self._number("ssm.state_size") + self._number("ssm.conv_kernel"))

    @property
    def has_chat_template(self) -> bool:
        """Whether the file carries a chat template."""
        return "tokenizer.chat_template" in self.values or "tokenizer.chat_template" in self.long_strings

    @property
    def split(self) -> tuple[int, int]:
        """Number of this part, from 0, and number of parts (``(0, 1)`` for a whole file)."""
        number, count = self.values.get("split.no", 0), self.values.get("split.count", 1)
        if isinstance(number, int) and isinstance(count, int) and count > 1:
            return number, count
        return 0, 1

    @property
    def parts(self) -> list[Path]:
        """All files of a split model in order, this one included, by llama.cpp's naming; ``[path]`` otherwise."""
        count = self.split[1]
        match = _PART.match(self.path.name)
        if count <= 1 or match is None or count > 99999:
            return [self.path]
        return [self.path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]

    @property
    def weight_bytes(self) -> int:
        """Bytes of tensor data in this file."""
        return sum(t.size for t in self.tensors)

    @property
    def expected_size(self) -> int:
        """Bytes the file must have for every tensor to be complete."""
        return self.data_start + max((t.offset + t.size for t in self.tensors), default=0)

    def check_language_model(self) -> None:
        """Refuse what cannot be decoded token by token, with the reason.

        Raises:
            UserError: tensor data is cut off; the architecture is missing, unknown or of another kind; there is
                only a vocabulary; it is an embedding model; it is one part of several and others are missing.
        """
        name = self.path.name
        if self.file_size < self.expected_size:
            raise UserError(
                f"{name} is cut off: it has {self.file_size:,} bytes of {self.expected_size:,}", "Get the file again."
            )
        kind = self.values.get("general.type", "model")
        if kind != "model":
            raise UserError(f"{name} is no model but of type {str(kind)[:40]!r}", "Give the model's own GGUF file.")
        architecture = self.architecture
        if not architecture:
            raise UserError(f"{name} does not name its architecture", "It is no complete model file.")
        if architecture in OTHER_ARCHITECTURES:
            raise UserError(
                f"{name} is {OTHER_ARCHITECTURES[architecture]} (architecture {architecture})", "Give a language model."
            )
        if architecture not in LANGUAGE_ARCHITECTURES:
            raise UserError(
                f"{name} has the architecture {architecture[:60]!r}, which the pinned llama.cpp does not know",
                "Give a model of a known architecture, such as llama, qwen3 or gemma3.",
            )
        if self._number("pooling_type") > 0 or self.values.get(f"{architecture}.attention.causal") is False:
            raise UserError(f"{name} is an embedding model: it gives vectors, no next token", "Give a language model.")
        self._check_parts()
        if not self.tensors:
            raise UserError(f"{name} holds a vocabulary only, no weights", "Give the whole model's file.")
        if self.split[1] == 1 and "token_embd.weight" not in {t.name for t in self.tensors}:
            raise UserError(
                f"{name} lacks the token embeddings (token_embd.weight)", "It is no complete language model."
            )
        if self.n_layer < 1 or self.n_vocab < 1:
            raise UserError(
                f"{name} says it has {self.n_layer} layers and {self.n_vocab} tokens", "It is damaged; get it again."
            )

    def _check_parts(self) -> None:
        number, count = self.split
        if count <= 1:
            return
        name, parts = self.path.name, self.parts
        if len(parts) == 1:
            raise UserError(
                f"{name} is part {number + 1} of {count} and was renamed, so the others cannot be found",
                f"llama.cpp expects names that end in -{number + 1:05d}-of-{count:05d}.gguf.",
            )
        missing = [part.name for part in parts if not part.is_file()]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise UserError(
                f"{name} is part {number + 1} of {count}; missing beside it: {', '.join(missing[:3])}{more}",
                "Put all parts in one folder, or merge them with llama-gguf-split --merge.",
            )
        if number != 0:
            raise UserError(f"{name} is part {number + 1} of {count}", f"Give the first part, {parts[0].name}.")
        for part in parts[1:]:
            other = read_header(part)
            if other.file_size < other.expected_size:
                raise UserError(
                    f"{part.name} is cut off: it has {other.file_size:,} bytes of {other.expected_size:,}",
                    "Get that part again.",
                )


def read_header(path: str | Path) -> Header:
    """Parse a GGUF's metadata and tensor table.

    Raises:
        UserError: missing, a folder, unreadable, empty, something else than a GGUF (it says what), big-endian, of
            a version that llama.cpp does not read, cut off inside the header, or damaged there.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise UserError(f"{path.name or path} is a folder, not a model file", "Give the .gguf file inside it.")
        with path.open("rb") as stream:
            return _parse(path, stream, path.stat().st_size)
    except FileNotFoundError as error:
        raise UserError(
            f"there is no model file {path}", "Check the path in the profile or on the command line."
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"the model file {path.name} cannot be read: {reason}") from error


class _CutOff(Exception):
    """More header is needed than has been read."""


def _parse(path: Path, stream: BinaryIO, size: int) -> Header:
    start = stream.read(4096)
    _check_start(path, start, size)
    wanted = 1 << 20
    while True:
        # A longer look starts over: twice the work at most, since each one is four times the last.
        stream.seek(0)
        blob = stream.read(min(wanted, MAX_HEADER))
        try:
            return _Reader(path, blob, size).header()
        except _CutOff:
            if len(blob) < wanted:
                raise UserError(
                    f"{path.name} is cut off inside its header, after {size:,} bytes", "Get the file again."
                ) from None
            if wanted >= MAX_HEADER:
                raise UserError(f"{path.name} has a header of more than {MAX_HEADER >> 20} MB: it is damaged") from None
            wanted *= 4


def _check_start(path: Path, start: bytes, size: int) -> None:
    name, again = path.name, "Get the file again."
    if size == 0 or not start:
        raise UserError(f"{name} is empty (0 bytes)", again)
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(b"version https://git-lfs"):
        raise UserError(f"{name} is a Git-LFS pointer, not the model itself", "Run git lfs pull, or download the file.")
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<body", b"<error")):
        raise UserError(f"{name} is a web page, probably an error page saved as a model", again)
    if start[:4] in (b"ggml", b"lmgg", b"tjgg", b"fmgg", b"algg"):
        raise UserError(f"{name} is in a format older than GGUF", "Get the model as GGUF.")
    magic = b"GGUF"
    if start[:4] != magic:
        if magic.startswith(start[:4]):
            raise UserError(f"{name} is cut off inside its header, after {size:,} bytes", again)
        known = {
            b"PK\x03\x04": "a zip archive or PyTorch file",
            b"\x1f\x8b": "gzip data",
            b"\x28\xb5\x2f\xfd": "zstd data",
        }
        what = next((v for k, v in known.items() if start.startswith(k)), None)
        if what is None and start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 1 << 27:
            what = "a safetensors file"
        if what is None:
            shown = start[:16].decode("ascii", errors="replace").encode("ascii", errors="replace").decode()
            what = f"something that begins with {shown!r}"
        raise UserError(f"{name} is no GGUF file but {what}", "Give a model in GGUF format.")
    if len(start) < 8:
        raise UserError(f"{name} is cut off inside its header, after {size:,} bytes", again)
    version = int.from_bytes(start[4:8], "little")
    if version & 0xFFFF == 0:
        raise UserError(f"{name} is a big-endian GGUF", "Get or convert it little-endian (gguf-convert-endian).")
    if not 2 <= version <= 3:
        raise UserError(f"{name} has GGUF version {version}; llama.cpp reads versions 2 and 3", "Get a current file.")


class _Reader:
    """A cursor over the header bytes; every length is checked against what the file can still hold."""

    def __init__(self, path: Path, blob: bytes, file_size: int) -> None:
        self.path = path
        self.blob = blob
        self.file_size = file_size
        self.at = 0
        self.strings = 0

    def damaged(self, what: str) -> UserError:
        return UserError(
            f"the header of {self.path.name} is damaged: {what} (near byte {self.at:,})", "Get the file again."
        )

    def beyond(self, end: int) -> UserError | _CutOff:
        """What to raise when the header goes on to byte ``end``, past what was read."""
        if end <= self.file_size:
            return _CutOff()
        # A wrong length looks like a cut, and a cut is the more frequent case: name both.
        return UserError(
            f"{self.path.name} is cut off inside its header, or damaged there: it ends at byte {self.file_size:,} and "
            f"the header goes on",
            "Get the file again.",
        )

    def take(self, count: int) -> int:
        """Step over ``count`` bytes and give where they begin."""
        start = self.at
        if start + count > len(self.blob):
            raise self.beyond(start + count)
        self.at = start + count
        return start

    def number(self, layout: str) -> int:
        value: int = struct.unpack_from(layout, self.blob, self.take(struct.calcsize(layout)))[0]
        return value

    def raw(self, what: str, limit: int) -> bytes:
        length = self.number("<Q")
        if length > limit:
            raise self.damaged(f"{what} of {length:,} bytes")
        start = self.take(length)
        return self.blob[start : start + length]

    def skip_strings(self, count: int) -> None:
        self.strings += count
        if self.strings > MAX_STRINGS:
            raise self.damaged(f"{self.strings:,} strings")
        if self.at + 8 * count > len(self.blob):
            raise self.beyond(self.at + 8 * count)
        unpack: Callable[[bytes, int], tuple[int]] = struct.Struct("<Q").unpack_from
        blob, at, last = self.blob, self.at, len(self.blob) - 8
        for _ in range(count):
            if at > last:
                raise self.beyond(at + 8)
            at += 8 + unpack(blob, at)[0]
        if at > len(blob):
            raise self.beyond(at)
        self.at = at

    def header(self) -> Header:
        self.take(4)
        version = self.number("<I")
        n_tensors, n_keys = self.number("<Q"), self.number("<Q")
        if n_tensors > MAX_TENSORS or n_keys > MAX_KEYS:
            raise self.damaged(f"{n_tensors:,} tensors and {n_keys:,} keys")
        values: dict[str, Value] = {}
        lengths: dict[str, int] = {}
        long_strings: set[str] = set()
        for _ in range(n_keys):
            key = self.raw("a key", 1 << 16).decode("utf-8", errors="replace")
            if not key or key in values or key in lengths or key in long_strings:
                raise self.damaged(f"the key {key[:60]!r} is {'there twice' if key else 'empty'}")
            kind = self.number("<I")
            if kind == _ARRAY:
                self.array(key, values, lengths)
            elif kind == _STRING:
                text = self.raw("a text", MAX_HEADER)
                if len(text) > 1 << 16:
                    long_strings.add(key)
                else:
                    values[key] = text.decode("utf-8", errors="replace")
            elif kind in _SCALARS:
                values[key] = self.number(_SCALARS[kind])
            else:
                raise self.damaged(f"the key {key[:60]!r} has the unknown type {kind}")
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self.damaged(f"an alignment of {alignment!r}")
        tensors = self.tensors(n_tensors, alignment)
        return Header(
            self.path,
            self.file_size,
            version,
            values,
            lengths,
            tensors,
            -(-self.at // alignment) * alignment,
            alignment,
            frozenset(long_strings),
        )

    def array(self, key: str, values: dict[str, Value], lengths: dict[str, int]) -> None:
        kind, count = self.number("<I"), self.number("<Q")
        lengths[key] = count
        if kind == _STRING:
            self.skip_strings(count)
        elif kind in _SCALARS:
            width = struct.calcsize(_SCALARS[kind])
            start = self.take(count * width)
            if count <= 4096:
                values[key] = struct.unpack_from(f"<{count}{_SCALARS[kind][1]}", self.blob, start)
        else:
            raise self.damaged(f"the array {key[:60]!r} has the unknown type {kind}")

    def tensors(self, count: int, alignment: int) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        seen: set[str] = set()
        expected = 0
        for _ in range(count):
            name = self.raw("a tensor name", 63).decode("utf-8", errors="replace")
            if name in seen:
                raise self.damaged(f"the tensor {name!r} is there twice")
            seen.add(name)
            dimensions = self.number("<I")
            if dimensions > 4:
                raise self.damaged(f"the tensor {name!r} has {dimensions} dimensions")
            shape = tuple(self.number("<Q") for _ in range(dimensions))
            kind, offset = self.number("<I"), self.number("<Q")
            if kind not in GGML_TYPES:
                raise self.damaged(f"the tensor {name!r} has the unknown type {kind}")
            type_name, block, block_size = GGML_TYPES[kind]
            elements = 1
            for extent in shape:
                elements *= extent
            if elements >= 1 << 63 or (shape[0] if shape else 1) % block:
                raise self.damaged(f"the tensor {name!r} has the shape {shape}, impossible for {type_name}")
            if offset != expected:
                raise self.damaged(f"the data of the tensor {name!r} begins at {offset:,} instead of {expected:,}")
            size = elements // block * block_size
            expected += -(-size // alignment) * alignment
            found.append(Tensor(name, type_name, shape, offset, size))
        return tuple(found)
