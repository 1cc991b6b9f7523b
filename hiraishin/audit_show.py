"""An audit's report as a terminal table, as Markdown for an issue, and as a page."""

from __future__ import annotations

import html
from typing import Any

from hiraishin.audit import AuditReport
from hiraishin.judge import spell_classes

_HEAD = ("width", "rows", "differ", "first at KV", "largest", "flips", "twice the same")


def _rows(report: AuditReport) -> list[tuple[str, ...]]:
    out: list[tuple[str, ...]] = []
    for e in report.widths:
        kv = e["first_differing_kv"]
        place = "" if kv is None else f"{kv}{' (a multiple of 256)' if kv % 256 == 0 and kv else ''}"
        largest = "not finite" if e["max_abs_diff"] is None else f"{e['max_abs_diff']:.6f}"
        out.append(
            (
                str(e["width"]),
                str(e["positions"]),
                str(e["differing"]),
                place,
                largest,
                str(e["flips"]),
                "no" if e["rerun_differing"] else "yes",
            )
        )
    return out


def _facts(report: AuditReport) -> list[tuple[str, str]]:
    a, c = report.about, report.controls
    facts = [
        (
            "build",
            f"{a['build']} ({a['backend']}), llama.cpp {a['upstream_commit'] or 'of unknown commit'}, switch {a['switch']}, "
            f"on {a['machine']}",
        ),
        ("width classes that give the same bits", spell_classes(report.classes)),
        (
            "controls (rows that differ)",
            f"width 1 replayed {c.get('width1_differing_rows')}, every width twice {c.get('rerun_differing_rows')}, "
            f"watching on against off {c.get('watching_changed_rows')}",
        ),
    ]
    if report.floor:
        f = report.floor
        facts.append(
            (
                "noise floor",
                f"{f['by']}: up to {f['max']:.3f}, rms {f['rms_max']:.4f}"
                if f["by"]
                else "no known reordering moves a logit here",
            )
        )
    for o in report.operations:
        if o["first"]:
            first = o["first"]
            kinds = "; ".join(
                f"{k['op']} {k['weight_type']}{' (' + k['switch'] + ')' if k['switch'] else ''}" for k in o["kinds"]
            )
            of = f"{first['op']} of {first['weight'] or 'no weight'} {first['weight_type']} in {first['backend']}"
            switch = f"; {first['switch']}" if first["switch"] else ""
            share = "" if o["largest_share"] is None else f", outputs moved by {o['largest_share']:.1e} of their size"
            facts.append(
                (
                    f"width {o['width']}, first operation that differs",
                    f"{first['tensor']}: {of}{switch}; {o['origins']} origin(s) in all{share}: {kinds}",
                )
            )
        else:
            facts.append((f"width {o['width']}", f"none of {o['operations']} operations differs"))
    if report.unfused:
        counts = ", ".join(f"width {e['width']} {e['differing']} of {e['positions']}" for e in report.unfused)
        facts.append(
            (
                "operations were watched without CUDA fusion",
                f"fused kernels cannot be looked into, so what fusion alone changes has no name here; "
                f"rows that differ without it: {counts}",
            )
        )
    facts.extend((f"cause: {cause['control']}", cause["finding"]) for cause in report.causes)
    if report.prediction:
        p = report.prediction
        facts.append(("predicted", _prediction(p)))
    facts.append(("libraries", ", ".join(f"{n} {h[:12]}" for n, h in sorted(a["libraries"].items()))))
    return facts


def _prediction(p: dict[str, Any]) -> str:
    if not p["classes"]:
        return "; ".join(p["why"])
    found = p["score"]
    right = {
        "width classes": found["classes_right"],
        "which widths are exact": found["exact_widths_right"],
        "first width that differs": found["first_width_right"],
    }
    verdicts = ", ".join(f"{name} {'right' if ok else 'wrong'}" for name, ok in right.items())
    return f"{spell_classes(p['classes'])}: {verdicts}; because {'; '.join(p['why'])}"


def to_markdown(report: AuditReport) -> str:
    """Markdown to paste into an issue."""
    lines = [f"**{report.verdict}**", "", "| " + " | ".join(_HEAD) + " |", "|" + " --- |" * len(_HEAD)]
    lines += ["| " + " | ".join(row) + " |" for row in _rows(report)]
    lines += [""] + [f"* {name}: {value}" for name, value in _facts(report)]
    return "\n".join(lines) + "\n"


def to_html(report: AuditReport) -> str:
    """A page of its own, without any external reference."""
    cell = "<td>{}</td>".format
    rows = "".join("<tr>" + "".join(cell(html.escape(v)) for v in row) + "</tr>" for row in _rows(report))
    facts = "".join(f"<dt>{html.escape(n)}</dt><dd>{html.escape(v)}</dd>" for n, v in _facts(report))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        "<title>hiraishin audit</title><style>body{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
        "color-scheme:light dark}table{border-collapse:collapse}"
        "td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid}"
        "dt{font-weight:600;margin-top:.6rem}dd{margin:0}</style>"
        f"<main><h1>{html.escape(report.verdict)}</h1><table><thead><tr>{''.join(f'<th>{h}</th>' for h in _HEAD)}</tr></thead>"
        f"<tbody>{rows}</tbody></table><dl>{facts}</dl></main></html>\n"
    )


def print_table(report: AuditReport) -> None:
    """The report in the terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(*_HEAD)
    for row in _rows(report):
        table.add_row(*row)
    console.print(table)
    for name, value in _facts(report):
        console.print(f"{name}: {value}", markup=False, highlight=False)
    colour: Any = {0: "green", 1: "red", 2: "yellow"}[report.exit_code]
    console.print(report.verdict, style=f"bold {colour}", markup=False, highlight=False)
