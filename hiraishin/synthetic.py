"""Synthetic models: GGUF files with a real model's tensor shapes and quant mix, and weights without meaning.

They are for machines without a network and for shapes that no small real model has. Timing and bit-exactness
depend on shapes and types, not on what the weights mean; margins between logits do depend on it, so every place
that shows such a model calls it synthetic. Weights come from a seeded distribution (:mod:`hiraishin.gguf_blocks`)
with a spread of ``1/sqrt(inputs)``, so activations and logits stay in the range of a trained model.

The tokenizer is a minimal one: 256 bytes, so any text can be a prompt (a token a byte), and made-up words.

A file of several gigabytes is written at disk speed: one bank of quantized blocks per type and spread is laid
cyclically over the tensors, each beginning elsewhere in it. The number of blocks is a prime larger than any
tensor's number of rows, so no two rows of a tensor are alike. The same bytes come out on every machine.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hiraishin import gguf_blocks, paths
from hiraishin.errors import UserError
from hiraishin.gguf_header import read_header
from hiraishin.gguf_tables import GGML_TYPES

RECIPE = 1
"""Raise this when the bytes that come out change; an older file is then made again."""

ALIGNMENT = 32
_TYPE_NUMBERS = {name: number for number, (name, _, _) in GGML_TYPES.items()}
_N_SPECIAL = 3 + 256 + 1
MIXES = {"Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K"}
"""File types that are mixes, with their main type; every other quant is one type throughout."""

Echo = Callable[[str], None]


@dataclass(frozen=True)
class Shape:
    """The dimensions of a model, in llama.cpp's words."""

    architecture: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int = 32768
    tied: bool = False
    """The output matrix is the token embedding."""
    experts: int = 0
    experts_used: int = 0
    window: int = 0
    """Sliding window of every second layer, tokens."""
    state: int = 0
    """State size of a recurrent (mamba) layer."""


_TINY = Shape("llama", layers=2, hidden=256, ffn=512, heads=4, kv_heads=2, head_dim=64, vocab=320, context=8192)

SHAPES: dict[str, Shape] = {
    "qwen3-8b": Shape("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 40960),
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 40960, tied=True),
    "gqa8-head256": Shape("qwen3", 4, 2048, 4096, 16, 2, 256, 1024),
    "moe-small": Shape("qwen3moe", 4, 1024, 512, 16, 4, 64, 4096, experts=32, experts_used=4),
    "small": Shape("llama", 2, 1024, 2048, 8, 2, 128, 1024),
    "tiny": _TINY,
    "tiny-moe": replace(_TINY, architecture="qwen3moe", ffn=256, experts=4, experts_used=2),
    "tiny-swa": replace(_TINY, architecture="gemma3", window=64),
    "tiny-recurrent": replace(_TINY, architecture="mamba", heads=0, kv_heads=0, head_dim=0, ffn=0, state=16),
}
"""The shapes by name. ``small`` is for one type at a time; the ``tiny`` ones, about 1 MB each, are for tests."""


@dataclass(frozen=True)
class _Plan:
    """One tensor to write: ``constant`` fills it with a value (F32), ``sigma`` draws it."""

    name: str
    shape: tuple[int, ...]
    type: str
    sigma: float
    constant: float | None = None

    @property
    def size(self) -> int:
        block, size = gguf_blocks.block_of(self.type)
        return int(np.prod(self.shape)) // block * size


def make_shape(shape: str, quant: str = "Q4_K_M", echo: Echo = print) -> Path:
    """The GGUF file of a shape in a quant, written if it is not there yet (deterministic: same bytes every time).

    Args:
        shape: a key of :data:`SHAPES`.
        quant: a mix of :data:`MIXES` as llama.cpp would choose it, or one ggml type for every matrix.
        echo: called with one line before anything is written.

    Raises:
        UserError: unknown shape or quant, a row length that the type cannot hold, or no space.
    """
    from hiraishin.models import placing, remember_sha256

    if shape not in SHAPES:
        raise UserError(f"there is no synthetic shape {shape!r}", f"Known: {', '.join(SHAPES)}.")
    if MIXES.get(quant, quant) not in gguf_blocks.TYPES:
        known = ", ".join([*MIXES, *gguf_blocks.TYPES])
        raise UserError(f"a synthetic model cannot have the quant {quant!r}", f"Known: {known}.")
    path = paths.models_dir() / f"synthetic-{shape}.{quant}.gguf"
    plans = _plans(SHAPES[shape], quant)
    recipe = _recipe(SHAPES[shape], plans)
    if _is_made(path, recipe):
        return path
    head = _head(shape, SHAPES[shape], quant, plans, recipe)
    size = len(head) + sum(_padded(plan.size) for plan in plans)
    echo(f"writing the synthetic model {path.name} ({size / 1e9:.2f} GB)")
    with placing(path, size) as partial, partial.open("wb") as sink:
        digest = _write(sink, head, plans)
    remember_sha256(path, digest)
    return path


def _is_made(path: Path, recipe: str) -> bool:
    try:
        header = read_header(path)
    except UserError:
        return False
    return header.values.get("hiraishin.recipe") == recipe and header.file_size >= header.expected_size


def _recipe(shape: Shape, plans: list[_Plan]) -> str:
    what = [RECIPE, asdict(shape), [(p.name, p.shape, p.type, p.sigma, p.constant) for p in plans]]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def _spread(inputs: int, gain: float = 1.0) -> float:
    """The power of two nearest to ``gain/sqrt(inputs)``: scaling by it is exact in every format."""
    return float(2.0 ** round(float(np.log2(gain / np.sqrt(inputs)))))


def _plans(shape: Shape, quant: str) -> list[_Plan]:
    """Every tensor, in file order."""
    main = MIXES.get(quant, quant)
    edge = "Q6_K" if quant in MIXES else main
    hidden, vocab = shape.hidden, shape.vocab
    plans = [
        _matrix("token_embd.weight", (hidden, vocab), *((edge, _spread(hidden, 4)) if shape.tied else (main, 1.0))),
        _vector("output_norm.weight", hidden),
    ]
    if not shape.tied:
        plans.append(_matrix("output.weight", (hidden, vocab), edge, _spread(hidden, 4)))
    for layer in range(shape.layers):
        more = "Q6_K" if quant in MIXES and _more_bits(layer, shape.layers) else main
        build = _recurrent_layer if shape.state else _attention_layer
        plans += [replace(p, name=f"blk.{layer}.{p.name}") for p in build(shape, main, more)]
    return plans


def _more_bits(layer: int, layers: int) -> bool:
    """Which layers keep attn_v and ffn_down in more bits: ``use_more_bits`` of ``llama-quant.cpp``."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _matrix(name: str, shape: tuple[int, ...], type_: str, sigma: float) -> _Plan:
    block = gguf_blocks.block_of(type_)[0]
    if shape[0] % block:
        raise UserError(
            f"rows of {shape[0]} weights cannot be of type {type_} ({name})", f"It needs multiples of {block}."
        )
    return _Plan(name, shape, type_, sigma)


def _vector(name: str, length: int, value: float = 1.0) -> _Plan:
    return _Plan(name, (length,), "F32", 0.0, value)


def _attention_layer(shape: Shape, main: str, more: str) -> Iterator[_Plan]:
    hidden, ffn = shape.hidden, shape.ffn
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    spread = _spread(hidden)
    normed = shape.architecture != "llama"
    yield _vector("attn_norm.weight", hidden)
    # Scores with a spread near 2 let a few positions stand out, as in a trained model.
    yield _matrix("attn_q.weight", (hidden, queries), main, spread if normed else 2 * spread)
    yield _matrix("attn_k.weight", (hidden, keys), main, spread)
    yield _matrix("attn_v.weight", (hidden, keys), more, spread)
    yield _matrix("attn_output.weight", (queries, hidden), main, _spread(queries))
    if normed:
        yield _vector("attn_q_norm.weight", shape.head_dim, 2.0)
        yield _vector("attn_k_norm.weight", shape.head_dim)
    if shape.architecture == "gemma3":
        yield _vector("post_attention_norm.weight", hidden)
        yield _vector("post_ffw_norm.weight", hidden)
    yield _vector("ffn_norm.weight", hidden)
    if shape.experts:
        yield _matrix("ffn_gate_inp.weight", (hidden, shape.experts), "F32", spread)
    suffix, extra = ("_exps", (shape.experts,)) if shape.experts else ("", ())
    yield _matrix(f"ffn_gate{suffix}.weight", (hidden, ffn, *extra), main, spread)
    yield _matrix(f"ffn_up{suffix}.weight", (hidden, ffn, *extra), main, spread)
    yield _matrix(f"ffn_down{suffix}.weight", (ffn, hidden, *extra), more, _spread(ffn))


def _recurrent_layer(shape: Shape, main: str, more: str) -> Iterator[_Plan]:
    hidden, inner, rank = shape.hidden, 2 * shape.hidden, max(1, shape.hidden // 16)
    yield _vector("attn_norm.weight", hidden)
    yield _matrix("ssm_in.weight", (hidden, 2 * inner), main, _spread(hidden))
    yield _matrix("ssm_conv1d.weight", (4, inner), "F32", 0.5)
    yield _vector("ssm_conv1d.bias", inner, 0.0)
    yield _matrix("ssm_x.weight", (inner, rank + 2 * shape.state), main, _spread(inner))
    yield _matrix("ssm_dt.weight", (rank, inner), "F32", _spread(rank))
    yield _vector("ssm_dt.bias", inner, -2.0)
    yield _Plan("ssm_a", (shape.state, inner), "F32", 0.0, -1.0)
    yield _vector("ssm_d", inner)
    yield _matrix("ssm_out.weight", (inner, hidden), more, _spread(inner))


def _metadata(name: str, shape: Shape, quant: str, recipe: str) -> dict[str, Any]:
    arch = shape.architecture
    values: dict[str, Any] = {
        "general.architecture": arch,
        "general.name": f"synthetic-{name}",
        "general.description": f"Synthetic weights in the shape of {name}, {quant}; they mean nothing.",
        "general.quantization_version": 2,
        "general.alignment": ALIGNMENT,
        "hiraishin.recipe": recipe,
        f"{arch}.block_count": shape.layers,
        f"{arch}.context_length": shape.context,
        f"{arch}.embedding_length": shape.hidden,
        f"{arch}.feed_forward_length": shape.ffn,
        f"{arch}.attention.head_count": shape.heads,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{arch}.vocab_size": shape.vocab,
    }
    if shape.heads:
        values |= {
            f"{arch}.attention.head_count_kv": shape.kv_heads,
            f"{arch}.attention.key_length": shape.head_dim,
            f"{arch}.attention.value_length": shape.head_dim,
            f"{arch}.rope.freq_base": 1e6,
        }
    if shape.experts:
        values |= {
            f"{arch}.expert_count": shape.experts,
            f"{arch}.expert_used_count": shape.experts_used,
            f"{arch}.expert_feed_forward_length": shape.ffn,
        }
    if shape.window:
        values |= {f"{arch}.attention.sliding_window": shape.window, f"{arch}.attention.sliding_window_pattern": 2}
    if shape.state:
        values |= {
            f"{arch}.ssm.conv_kernel": 4,
            f"{arch}.ssm.inner_size": 2 * shape.hidden,
            f"{arch}.ssm.state_size": shape.state,
            f"{arch}.ssm.time_step_rank": max(1, shape.hidden // 16),
        }
    words = shape.vocab - _N_SPECIAL
    values |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            "<unk>",
            "<s>",
            "</s>",
            *(f"<0x{b:02X}>" for b in range(256)),
            "▁",
            *(_word(i) for i in range(words)),
        ],
        "tokenizer.ggml.scores": [0.0] * shape.vocab,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (1 + words)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }
    return values


def _word(index: int) -> str:
    """A made-up word. Long enough that no merge of the tokenizer can build one out of bytes."""
    return (
        "▁"
        + "".join("bdfgklmn"[index >> s & 7] + "aeiou"[(index >> s) % 5] for s in (0, 3, 6, 9))
        + f"{index // 4096:x}"
    )


def _head(name: str, shape: Shape, quant: str, plans: list[_Plan], recipe: str) -> bytes:
    values = _metadata(name, shape, quant, recipe)
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(plans), len(values))]
    parts += [_text(key) + _value(value) for key, value in values.items()]
    offset = 0
    for plan in plans:
        dimensions = struct.pack(f"<I{len(plan.shape)}Q", len(plan.shape), *plan.shape)
        parts.append(_text(plan.name) + dimensions + struct.pack("<IQ", _TYPE_NUMBERS[plan.type], offset))
        offset += _padded(plan.size)
    blob = b"".join(parts)
    return blob + bytes(_padded(len(blob)) - len(blob))


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _text(value: str) -> bytes:
    blob = value.encode()
    return struct.pack("<Q", len(blob)) + blob


def _value(value: Any) -> bytes:
    """A GGUF metadata value with its type: bool, unsigned 32-bit integer, float32, text, or an array of one."""
    if isinstance(value, list):
        kind = {str: 8, float: 6, int: 5}[type(value[0])]
        if kind == 8:
            body = b"".join(map(_text, value))
        else:
            body = struct.pack(f"<{len(value)}{'f' if kind == 6 else 'i'}", *value)
        return struct.pack("<IIQ", 9, kind, len(value)) + body
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<I", 8) + _text(value)


def _write(sink: BinaryIO, head: bytes, plans: list[_Plan]) -> str:
    """Write everything; the sha256 is computed beside it, one piece behind."""
    digest = hashlib.sha256()
    rows = max(int(np.prod(p.shape[1:])) for p in plans)
    blocks = _next_prime(max(2 * rows if rows < 2048 else rows, 509))
    with ThreadPoolExecutor(1) as pool:
        pending: Future[None] = pool.submit(digest.update, head)
        sink.write(head)
        for plan in plans:
            for piece in _pieces(plan, blocks):
                pending.result()
                pending = pool.submit(digest.update, piece)
                sink.write(piece)
        pending.result()
    return digest.hexdigest()


def _pieces(plan: _Plan, blocks: int) -> Iterator[memoryview | bytes]:
    """A tensor's bytes, padding included."""
    if plan.constant is not None:
        data = np.full(int(np.prod(plan.shape)), plan.constant, np.float32)
        if len(plan.shape) == 1 and plan.constant:
            # Norm weights of exactly 1 would make a multiplication that no real model has.
            data += np.float32(1 / 16) * gguf_blocks.normal(len(data), _seed(plan.name))
        yield memoryview(data.tobytes())
        yield bytes(_padded(plan.size) - plan.size)
        return
    # The embedding has a bank of its own: with a shared one, some rows of the output matrix would be rows of the
    # embedding, and those tokens would win every time.
    bank = _bank(plan.type, blocks, plan.sigma, "embedding" if plan.name.startswith("token_embd") else "weights")
    start, left = _seed(plan.name) % blocks * (len(bank) // blocks), plan.size
    while left:
        count = min(left, len(bank) - start)
        yield bank[start : start + count]
        start, left = 0, left - count
    yield bytes(_padded(plan.size) - plan.size)


@functools.lru_cache(maxsize=8)
def _bank(type_: str, blocks: int, sigma: float, use: str) -> memoryview:
    if type_ in ("F32", "F16", "BF16"):
        # A block of one weight: draw enough of them for rows to differ.
        blocks = blocks * 128 + 1
    made = gguf_blocks.rescale(type_, _unit_bank(type_, blocks, use), sigma)
    if made is None:
        made = gguf_blocks.bank(type_, blocks, sigma, _seed(f"{type_} {use}"))
    return memoryview(made.reshape(-1).data)


@functools.lru_cache(maxsize=2)
def _unit_bank(type_: str, blocks: int, use: str) -> gguf_blocks.Bytes:
    return gguf_blocks.bank(type_, blocks, 1.0, _seed(f"{type_} {use}"))


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def _next_prime(number: int) -> int:
    candidate = number | 1
    while any(candidate % divisor == 0 for divisor in range(3, int(candidate**0.5) + 1, 2)):
        candidate += 2
    return candidate
