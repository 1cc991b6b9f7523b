"""What an audit concludes from its measurements: which widths give the same bits, and whether a difference is rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LOGIC_FACTOR = 8.0
"""How far past the measured noise floor a row's difference must be to look like a logic error rather than rounding."""

LOGIC_SHARE = 0.02
"""How far an operation's output may move, rms over rms, when its inputs were equal to the bit, and still be rounding.

A wrong position, mask or state starts at an operation too (the rotation, the attention), but moves its output by a
good part of its size. ``docs/localizer.md`` has what both were measured to be."""

PRODUCT_SHARE = 0.25
"""The same for a product with quantized weights. A kernel for many columns may quantize the activations in another way
than the one for a lone column (CUDA's mmq and mmvq do), which moves the output by far more than the order of sums; a
wrong position, mask or state does not start there, and a wrong row moves all of it."""


def share_limit(origin: dict[str, Any]) -> float:
    """The limit for an origin of a localized pass (``op``, ``weight`` and ``weight_type``)."""
    product = origin["op"] in ("MUL_MAT", "MUL_MAT_ID") and origin["weight"]
    return PRODUCT_SHARE if product and origin["weight_type"] not in ("f32", "f16", "bf16") else LOGIC_SHARE


def width_classes(rows: dict[int, tuple[str, ...]]) -> list[list[int]]:
    """Widths grouped by the bits they give, in order of their smallest width.

    Args:
        rows: width -> the sha256 of every logit row.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for width in sorted(rows):
        groups.setdefault(rows[width], []).append(width)
    return sorted(groups.values())


def spell_classes(classes: list[list[int]]) -> str:
    """``{1..3} {4..7} {8..16}``."""

    def spell(widths: list[int]) -> str:
        parts: list[list[int]] = []
        for width in widths:
            if parts and width == parts[-1][-1] + 1:
                parts[-1].append(width)
            else:
                parts.append([width])
        return ",".join(
            str(p[0]) if len(p) == 1 else f"{p[0]}..{p[-1]}" if len(p) > 2 else f"{p[0]},{p[1]}" for p in parts
        )

    return " ".join("{" + spell(c) + "}" for c in classes)


def judge_nature(
    rms: list[float | None],
    floor: dict[str, Any],
    flips: list[tuple[float, float | None]],
    shares: Sequence[tuple[float, float]] = (),
) -> str:
    """Rounding or a logic error, from the size of what moved.

    Args:
        rms: root mean square difference of each row that differs (``None``: not finite).
        floor: what a known reordering of sums moves (:func:`hiraishin.replay.reorder_floor`).
        flips: (margin, largest difference of that row) of each flip.
        shares: for each watched pass the relative size of the difference at the operation that starts the gravest one
            (``relative`` of a localized pass), and its limit (:func:`share_limit`).

    Returns:
        ``"none"``, ``"rounding"``, ``"logic"`` or ``"unknown"`` (no floor and no operation to judge by).
    """
    if not rms:
        return "none"
    if any(value is None for value in rms):
        return "logic"
    # Both logits of a pair can move, towards each other, so a margin of twice the difference can still flip.
    if any(largest is not None and margin > 2 * largest for margin, largest in flips):
        return "logic"
    if any(share > limit for share, limit in shares):
        return "logic"
    worst = max(value for value in rms if value is not None)
    if floor.get("rms_max") and worst > LOGIC_FACTOR * floor["rms_max"]:
        return "logic"
    return "rounding" if floor.get("rms_max") or len(shares) else "unknown"
