"""Write the computed tables of docs/localizer.md between their marks; ``--check`` compares instead.

    python docs/make_localizer.py [--check]

Three tables: how predictions of the CUDA dispatch score against the receipts of data/receipts, what the audits among them found,
and what is predicted for cards that no receipt is from.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hiraishin import paths
from hiraishin.dispatch_cuda import Card, Parts, Shape, attention_path, column_path
from hiraishin.errors import UserError
from hiraishin.judge import spell_classes
from hiraishin.predict import Scored, score_receipt
from hiraishin.report.audits import Audit, audits, gone_words, predicted_right
from hiraishin.results import load_receipt

TARGET = paths.ROOT / "docs" / "localizer.md"
QWEN = Shape(32, 8, 128, frozenset({("q4_k", False, True), ("q6_k", False, True)}))
CARDS = {
    "RTX 3090": Card(860, 82),
    "RTX 4090": Card(890, 128),
    "H200": Card(900, 132),
    "RTX 5060 laptop": Card(1200, 26),
    "RTX 5090": Card(1200, 170),
}
CELLS = (40, 1000)
"""Positions at which the cards' table looks: a short context and a long one."""


def cell(text: str) -> str:
    """Text of a receipt as a cell: names of models and tensors are whatever somebody called them."""
    return " ".join(text.split()).replace("<", "&lt;").replace("|", "\\|")


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(cell, row)) + " |" for row in rows])


def spelled_late(scored: list[Scored]) -> str:
    """``0``, or how many widths came later than predicted and by how much at most."""
    late = [value for one in scored for value in one.late.values()]
    if not late:
        return "0"
    absent = sum(value is None for value in late)
    most = max((value for value in late if value is not None), default=0)
    return f"{len(late)}, by up to {most}" + (f", {absent} not at all" if absent else "")


def score_rows() -> list[tuple[str, ...]]:
    """One row a receipt and kind of build."""
    rows = []
    for folder in sorted(paths.receipts_dir().glob("*/receipt.json")):
        arms: dict[str, list[Scored]] = {}
        for one in score_receipt(load_receipt(folder.parent)):
            build = one.inputs["build"]
            plain = build in ("stock", "patched") and not one.inputs.get("env")
            arms.setdefault(build if plain else "parts left out, or another card pretended", []).append(one)
        for arm, scored in sorted(arms.items()):
            rows.append(
                (
                    folder.parent.name,
                    arm,
                    str(len(scored)),
                    f"{sum(one.right for one in scored)} of {len(scored)}",
                    str(sum(one.widths for one in scored)),
                    str(sum(len(one.early) for one in scored)),
                    spelled_late(scored),
                )
            )
    return rows


def stored_audits() -> list[tuple[str, Audit]]:
    """Every audit with the name of its receipt."""
    folders = sorted(path.parent for path in paths.receipts_dir().glob("*/receipt.json"))
    return [(folder.name, one) for folder in folders for one in audits(load_receipt(folder))]


def audit_row(receipt: str, one: Audit) -> tuple[str, ...]:
    """An audit as a row of the table."""
    predicted = "" if one.right is None else "right" if one.right else f"wrong: {one.predicted}"
    first = "; ".join(
        f"{widths}: {operation}" for widths, operation in one.widths_by_operation.items() if one.differing
    )
    gone = "; ".join(gone_words(one.causes)) or ("none" if one.causes else "")
    unfused = ", ".join(f"{width}: {differing}" for width, differing in one.unfused.items())
    noise = f"not to be trusted: {', '.join(one.noise)} not zero" if one.noise else ""
    nature = "; ".join(filter(None, (one.nature, noise)))
    model = f"{one.model}, {one.setting}"
    differ = f"{one.differing} of {one.rows}"
    return (receipt, model, one.build, one.classes, predicted, differ, unfused, first, gone, nature)


def audited(found: list[tuple[str, Audit]]) -> str:
    """The audits: how many were predicted and how many of those rightly, then one row each."""
    if not found:
        return "No receipt holds an audit."
    right, predicted = predicted_right([one for _, one in found])
    what = ("receipt", "model", "build", "widths with the same bits", "prediction", "rows that differ")
    head = (*what, "without fusion, by width", "first operation, by width", "exact with", "looks like")
    count = f"Audits: {len(found)}, predicted before they ran: {predicted}, width classes as predicted: {right}."
    return f"{count}\n\n{table(head, (audit_row(*one) for one in found))}"


def classes(card: Card, kv_type: str, cells: int) -> str:
    """Widths whose first token, at this position, takes the same path in every product and in attention."""
    settings = {"flash_attn": True, "kv_type": kv_type}
    padded = -(-(cells + 16) // 256) * 256
    found: dict[object, list[int]] = {}
    for width in range(1, 17):
        products = tuple(column_path(kind, expert, mmf, width, card) for kind, expert, mmf in sorted(QWEN.kinds))
        path = (products, attention_path(QWEN, settings, cells, padded, width, 0, card, Parts()))
        found.setdefault(path, []).append(width)
    return spell_classes(sorted(found.values()))


def card_rows() -> list[tuple[str, ...]]:
    """One row a card and cache type."""
    return [
        (f"{name} ({card.cc // 100}.{card.cc % 100 // 10}, {card.sms} SMs)", kv, *(classes(card, kv, n) for n in CELLS))
        for name, card in CARDS.items()
        for kv in ("f16", "q8_0")
    ]


def page(text: str) -> str:
    """The page with its computed tables made again."""
    score = table(
        ("receipt", "build", "models and settings", "classes right", "widths", "earlier than predicted", "later"),
        score_rows(),
    )
    cards = table(
        ("card", "cache", f"classes at position {CELLS[0]}", f"classes at position {CELLS[1]}"),
        card_rows(),
    )
    for name, made in (
        ("score", score),
        ("audits", audited(stored_audits())),
        ("cards", cards),
    ):
        pattern = re.compile(rf"(<!-- {name}: make_localizer.py -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"docs/localizer.md has no place for the table {name!r}")
        text = pattern.sub(lambda found, made=made: found[1] + made + "\n" + found[2], text)
    return text


def main(arguments: list[str]) -> int:
    """0: written, or in step; 1: out of step; 2: a receipt is damaged."""
    before = TARGET.read_text(encoding="utf-8")
    try:
        after = page(before)
    except UserError as error:
        print(f"docs/localizer.md cannot be made: {error}", file=sys.stderr)
        return error.exit_code
    if "--check" in arguments:
        if before == after:
            return 0
        print("docs/localizer.md is out of step: run python docs/make_localizer.py", file=sys.stderr)
        return 1
    TARGET.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
