"""How many bytes of weights one pass must read: the floor of its time is these bytes over the memory's bandwidth."""

from __future__ import annotations

from pathlib import Path

from hiraishin.gguf_header import read_header

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"


def weights_read(model: Path) -> int:
    """Bytes of weights that a pass reads: every tensor once, but of a separate embedding table only a row a token.

    A model whose output shares the embedding table reads the whole table for its logits, so there it counts.
    Raises UserError when the file is no readable GGUF.
    """
    first = read_header(model)
    tensors = [t for part in first.parts for t in (first if part == first.path else read_header(part)).tensors]
    names = {t.name for t in tensors}
    return sum(t.size for t in tensors if not (t.name == EMBEDDING and OUTPUT in names))


def floor_ms(weight_bytes: float, gb_per_s: float) -> float:
    """The least time of a pass in milliseconds: bytes over bandwidth (GB = 1e9 bytes).

    Raises ValueError when the bandwidth is not positive.
    """
    if not gb_per_s > 0:
        raise ValueError(f"a bandwidth is positive, not {gb_per_s} GB/s")
    return weight_bytes / (gb_per_s * 1e9) * 1e3
