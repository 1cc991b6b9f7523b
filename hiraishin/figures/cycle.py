"""One average speculative cycle to scale, against decoding the same tokens plainly."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from hiraishin.figures import select, style
from hiraishin.figures.style import Frame, Theme
from hiraishin.results import ResultSet

ID = "cycle"
TITLE = "One average cycle, to scale"
NOTEBOOK = "08_cycle"
PARTS = ("draft", "verify", "bookkeeping")


def data(results: ResultSet, *, matrix: str | None = None) -> Frame:
    """One row per build: mean ms a cycle of each part, tokens out a cycle, plain ms a token, identical runs."""
    frame: Frame = select.runs(results)
    if frame.empty:
        return frame
    frame = select.one_matrix(select.one_setting(frame, results), matrix)
    plain: Frame = select.runs(results, "plain")
    rows = []
    for build in select.in_order(frame["build"]):
        mine = frame[frame["build"] == build]
        cycles = float(mine["cycles"].sum())
        tokens = float((mine["tokens"] - 1).sum())  # the first token comes from the prefill, not from a cycle
        row: dict[str, object] = {c: mine[c].iloc[0] for c in (*select.SETTINGS, *select.RUN_KEYS) if c in mine.columns}
        row |= {
            "build": build,
            "runs": len(mine),
            "identical": int(mine["identical"].astype(bool).sum()),
            "cycles": int(cycles),
            "tokens_per_cycle": tokens / cycles if cycles else float("nan"),
            "acceptance": float(mine["accepted"].sum() / mine["drafted"].sum())
            if mine["drafted"].sum()
            else float("nan"),
        }
        for part in PARTS:
            column = f"seconds_{part}"
            row[f"{part}_ms"] = (
                float(1e3 * mine[column].sum(skipna=False) / cycles)
                if column in mine.columns and cycles
                else float("nan")
            )
        row["plain_ms"] = _plain_ms(plain, mine, build)
        rows.append(row)
    return pd.DataFrame(rows)


def _plain_ms(plain: Frame, runs: Frame, build: str) -> float:
    """Milliseconds a plain token takes on the same build and prompts, the prompts weighing as in the runs.

    Runs that know how fast their own process decodes their prompt plainly are compared with that: another hour's plain
    decode, on a machine that was busy then or now, would say more about the hour than about speculation.
    """
    if "plain_tokens_per_second" in runs.columns and runs["plain_tokens_per_second"].gt(0).all():
        tokens = runs["tokens"] - 1
        return float(1e3 * (tokens / runs["plain_tokens_per_second"]).sum() / tokens.sum())
    if plain.empty or "tokens_per_second" not in plain.columns:
        return float("nan")
    keys = [k for k in ("build", *select.SETTINGS, "prompt", "prefill") if k in plain.columns and k in runs.columns]
    mine = plain[(plain["build"] == build) & plain["prompt"].isin(runs["prompt"])]
    for key in keys:
        if key not in ("build", "prompt"):
            mine = mine[mine[key] == runs[key].iloc[0]]
    return float((1e3 / mine["tokens_per_second"]).mean()) if len(mine) else float("nan")


def _totals(row: Any) -> tuple[float, float]:
    return sum(float(row[f"{p}_ms"]) for p in PARTS), float(row["tokens_per_cycle"]) * float(row["plain_ms"])


def _main(data: Frame) -> Any:
    rows = data[data["build"] == "patched"]
    return (rows if len(rows) else data).iloc[0]


def _title(data: Frame) -> str:
    row = _main(data)
    cycle, plain = _totals(row)
    verdict = f"{plain / cycle:.2f}× plain speed" if cycle else ""
    return (
        f"An average {select.named(str(row['build']))} cycle gives {row['tokens_per_cycle']:.2f} tokens in {cycle:.3g} ms: "
        f"{verdict}"
    )


@style.styled
def draw(data: Frame, theme: Theme) -> Figure:
    """For every build two bars on one scale: the cycle's parts, and plain decoding of as many tokens."""
    style.require(data, ID, "speculative runs", ("build",), ("tokens_per_cycle", *(f"{p}_ms" for p in PARTS)))
    style.require(data, ID, "plain runs beside the speculative ones", (), ("plain_ms",))
    figure = style.new(1.95 + 0.98 * len(data), _title(data))
    axes = figure.subplots()
    fills = {"draft": (theme.third, ".."), "verify": (theme.exact, ""), "bookkeeping": (theme.fourth, "xx")}
    longest = max(max(_totals(row)) for _, row in data.iterrows())
    ticks, labels = [], []
    for k, (_, row) in enumerate(data.iterrows()):
        y, at = -2.4 * k, 0.0
        for part in PARTS:
            ms = float(row[f"{part}_ms"])
            colour, hatch = fills[part]
            axes.barh(
                y,
                ms,
                left=at,
                height=0.8,
                color=colour,
                hatch=hatch,
                edgecolor=theme.paper,
                linewidth=0,
                label=part if k == 0 else None,
            )
            if ms > 0.11 * longest:
                axes.text(
                    at + ms / 2,
                    y,
                    f"{ms:.3g}",
                    ha="center",
                    va="center",
                    fontsize=style.SMALL,
                    color=theme.paper,
                    bbox={"facecolor": colour, "edgecolor": "none", "pad": 0.8},
                )
            at += ms
        cycle, plain = _totals(row)
        axes.text(at + 0.01 * longest, y, f"{cycle:.3g} ms", va="center", fontsize=style.SMALL + 0.5)
        whole, each = int(row["tokens_per_cycle"]), float(row["plain_ms"])
        for t in range(whole + 1):
            width = each if t < whole else plain - whole * each
            if width > 1e-9:
                axes.barh(
                    y - 0.9,
                    width,
                    left=t * each,
                    height=0.8,
                    facecolor=theme.faint,
                    edgecolor=theme.muted,
                    linewidth=1.0,
                    label="plain, a token each" if k == t == 0 else None,
                )
        axes.text(plain + 0.01 * longest, y - 0.9, f"{plain:.3g} ms", va="center", fontsize=style.SMALL + 0.5)
        ticks += [y, y - 0.9]
        labels += [
            f"{select.named(str(row['build']))}\n({int(row['identical'])}/{int(row['runs'])} identical)",
            "plain",
        ]
    axes.set_yticks(ticks, labels)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set(xlim=(0, longest * 1.16), xlabel="milliseconds, to scale")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=2)
    return figure


def alt(data: Frame) -> str:
    """The finding in words."""
    words = []
    for _, row in data.iterrows():
        _, plain = _totals(row)
        words.append(
            f"On {select.named(str(row['build']))}: {row['draft_ms']:.3g} ms drafting, {row['verify_ms']:.3g} ms "
            f"verifying, {row['bookkeeping_ms']:.2g} ms bookkeeping give "
            f"{row['tokens_per_cycle']:.2f} tokens, which plain decoding takes {plain:.3g} ms for; "
            f"{int(row['identical'])} of {int(row['runs'])} runs identical to plain."
        )
    return "Bars to scale of one average speculative cycle. " + " ".join(words)


def caption(data: Frame) -> str:
    """The line under the picture."""
    row = _main(data)
    matrix = f"matrix {row['matrix']}, " if "matrix" in data.columns else ""
    who = f"{select.drafter(str(row['drafter']))}, " if "drafter" in data.columns and pd.notna(row["drafter"]) else ""
    length = (
        f"up to {int(row['draft_length'])} guesses, "
        if "draft_length" in data.columns and pd.notna(row["draft_length"])
        else ""
    )
    return (
        f"{select.setting(data)}; {matrix}{length}{who}{int(row['cycles']):,} cycles, {100 * row['acceptance']:.1f} % of "
        "drafted tokens accepted. Prefill left out."
    )
