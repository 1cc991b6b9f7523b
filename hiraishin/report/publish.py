"""The published rendering: a finished report's figures, copied to ``figures/`` with a page that shows them.

    python -m hiraishin.report.publish [REPORT] [--to FOLDER]

Nothing is drawn here: what is published is what the report showed, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hiraishin import paths
from hiraishin.errors import UserError
from hiraishin.report.check import MARKER
from hiraishin.report.facts import machine_label

LARGEST = 3_000_000
"""Bytes of all published figures together."""

PAGE = "README.md"


def publish(report: Path, to: Path) -> list[Path]:
    """Copy every figure of a finished report, both themes and provenance, and write the page; old ones are taken away.

    Returns:
        the files written.

    Raises:
        UserError: the report is not finished or holds no figure, the target is no folder of published figures, they are
            too large, or the target cannot be written.
    """
    if not (report / MARKER).is_file():
        raise UserError(f"{report} holds no finished report", "Run `make report` first.")
    records = sorted((report / "figures").rglob("*.json"), key=lambda p: (len(p.relative_to(report).parts), p))
    if not records:
        raise UserError(f"the report {report} holds no figure", "Run `make report` first.")
    if to.exists() and (not to.is_dir() or (any(to.iterdir()) and not (to / PAGE).is_file())):
        raise UserError(f"{to} is no folder of published figures", "Choose another folder, or empty that one first.")
    entries: list[tuple[Path, dict[str, Any]]] = []
    chosen: list[Path] = []
    for record in records:
        stem = record.relative_to(report / "figures").with_suffix("")
        pictures = [record.with_name(f"{record.stem}.{theme}.svg") for theme in ("light", "dark")]
        if all(p.is_file() for p in pictures):
            entries.append((stem, json.loads(record.read_text(encoding="utf-8"))))
            chosen += [*pictures, record]
    entries.sort(
        key=lambda e: (len(e[0].parts), str(e[1].get("notebook")), e[0])
    )  # this machine first, in reading order
    size = sum(p.stat().st_size for p in chosen)
    if size > LARGEST:
        raise UserError(
            f"the figures take {size:,} bytes, more than {LARGEST:,}", "Leave receipts out, or make them smaller."
        )
    written = []
    try:
        if to.exists():
            shutil.rmtree(to)
        for path in chosen:
            target = to / path.relative_to(report / "figures")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            written.append(target)
        (to / PAGE).write_text(_page(entries), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {to}: {error.strerror or error}", "Choose another folder.") from error
    return [*written, to / PAGE]


def _page(entries: Sequence[tuple[Path, dict[str, Any]]]) -> str:
    """Markdown with every figure, its caption, and which machine and commit stand behind it."""
    lines = [
        "# Published figures",
        "",
        "Copied from a finished report by `make figures`; `make report` draws them anew from the results of the machine it "
        "runs on. Beside each picture a JSON file names the results it was drawn from.",
        "",
    ]
    for stem, about in entries:
        machine = machine_label(about.get("machine") or {}, "unknown machine")
        commit = about.get("commit") or {}
        name = str(commit.get("commit") or "unknown")[:12] + (", edited" if commit.get("dirty") else "")
        where = stem.as_posix()
        lines += [
            f"## {about['title']} ({machine})",
            "",
            f'<picture><source media="(prefers-color-scheme: dark)" srcset="{where}.dark.svg">'
            f'<img src="{where}.light.svg" alt="{_attribute(str(about["alt"]))}"></picture>',
            "",
            f"{_text(str(about['caption']))} Drawn by commit `{name}`; [provenance]({where}.json).",
            "",
        ]
    return "\n".join(lines)


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def _text(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m hiraishin.report.publish", description="Copy a report's figures.")
    parser.add_argument("report", nargs="?", type=Path, default=paths.report_dir(), help="a finished report's folder")
    parser.add_argument("--to", type=Path, default=paths.figures_dir(), help="where they go (default: figures/)")
    given = parser.parse_args(arguments)
    try:
        written = publish(given.report, given.to)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{len(written)} files, {sum(p.stat().st_size for p in written):,} bytes, in {given.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
