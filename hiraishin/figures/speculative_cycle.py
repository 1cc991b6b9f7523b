"""A real speculative cycle from the results: what was guessed, what the target picked, what was kept."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from hiraishin.figures import select, style
from hiraishin.figures.style import Frame, Theme
from hiraishin.results import Result, ResultSet

ID = "speculative-cycle"
TITLE = "A guess is kept only if the target picks it too"
NOTEBOOK = "08_cycle"
LONGEST = 11  # characters of a token that are shown


def data(results: ResultSet, *, prompt: str | None = None, build: str = "patched") -> Frame:
    """One row per token of one cycle: step, role (``last``, ``guess``), text, kept, what the target picked there.

    The cycle is the one a run recorded as its example; of all runs, one with both kept and rejected guesses and the most kept.
    """
    runs = [
        r
        for r in results.of("speculative")
        if isinstance(r.record.get("example"), dict) and (prompt is None or r.inputs.get("prompt") == prompt)
    ]
    if not runs:
        return pd.DataFrame()
    mine = [r for r in runs if r.inputs.get("build") == build] or runs

    def rank(r: Result) -> tuple[bool, bool, int, str]:
        e = r.record["example"]
        short = all(len(_shown(t)) <= LONGEST for t in [*e["drafts"], *e["emitted"]]) and len(e["drafts"]) <= 8
        return short, 0 < int(e["accepted"]) < len(e["drafts"]), int(e["accepted"]), str(r.key)

    best = max(mine, key=rank)
    e = best.record["example"]
    accepted = int(e["accepted"])
    about = {k: best.inputs.get(k) for k in (*select.SETTINGS, *select.RUN_KEYS, "build", "prompt") if k in best.inputs}
    about |= {
        "before": str(e["before"]),
        "n_past": int(e["n_past"]),
        "accepted": accepted,
        "draft_ms": e.get("draft_ms"),
        "verify_ms": e.get("verify_ms"),
    }
    rows = [
        {
            "step": 0,
            "role": "last",
            "text": str(e["last"]),
            "kept": True,
            "picked": str(e["emitted"][0]) if e["emitted"] else None,
        }
    ]
    for i, guess in enumerate(e["drafts"]):
        picked = str(e["emitted"][i + 1]) if i + 1 < len(e["emitted"]) else None
        rows.append({"step": i + 1, "role": "guess", "text": str(guess), "kept": i < accepted, "picked": picked})
    return pd.DataFrame(rows).assign(**about)


def _shown(text: str) -> str:
    """A token as it is drawn: spaces and line ends made visible, unprintable characters replaced, ``$`` kept from being TeX."""
    visible = text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·")
    return "".join(c if c.isprintable() and ord(c) < 0x3000 else "□" for c in visible)


def _short(text: str) -> str:
    shown = _shown(text)
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"


def _guesses(data: Frame) -> tuple[int, int]:
    guesses = data[data["role"] == "guess"]
    return len(guesses), int(guesses["kept"].astype(bool).sum())


def _title(data: Frame) -> str:
    n, kept = _guesses(data)
    return f"{n} guessed, {kept} kept: this cycle gives {kept + 1} tokens from one pass of {n + 1}"


@style.styled
def draw(data: Frame, theme: Theme) -> Figure:
    """A line per token of the pass: what went in, what the target picked after it, and the verdict on the next guess."""
    style.require(data, ID, "recorded example cycle of a speculative run", ("role", "text", "picked"), ("step", "kept"))
    rows = data.sort_values("step").reset_index(drop=True)
    n = len(rows)
    figure = style.new(1.05 + 0.37 * (n + 1), _title(data))
    ax = figure.subplots()
    small = style.SMALL + 0.5
    for x, text in ((0.02, "into the pass"), (2.7, "target picks"), (5.05, "so the next guess is")):
        ax.text(x, 0.15, text, fontsize=small, fontweight="bold", va="center")
    for k, r in rows.iterrows():
        y = -0.9 - float(k)
        if r["role"] == "last":
            fill, edge, sign = theme.faint, theme.muted, "last token"
        else:
            fill, edge, sign = (
                (theme.exact, theme.exact, f"guess {int(r['step'])}")
                if r["kept"]
                else (theme.paper, theme.stock, f"guess {int(r['step'])}")
            )
        ax.add_patch(
            FancyBboxPatch(
                (1.02, y - 0.32),
                1.42,
                0.64,
                boxstyle="round,pad=0.02",
                facecolor=fill,
                edgecolor=edge,
                linewidth=1.4,
                linestyle="-" if r["kept"] else "--",
            )
        )
        ax.text(
            1.73,
            y,
            _short(str(r["text"])),
            ha="center",
            va="center",
            fontsize=style.SMALL,
            family="monospace",
            parse_math=False,
            color=theme.paper if r["role"] == "guess" and r["kept"] else theme.ink,
        )
        ax.text(0.02, y, sign, va="center", fontsize=small, color=theme.ink)
        if pd.notna(r["picked"]):
            ax.annotate(
                "",
                xy=(2.72, y),
                xytext=(2.5, y),
                arrowprops={"arrowstyle": "->", "color": theme.muted, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0},
            )
            ax.text(
                2.8,
                y,
                _short(str(r["picked"])),
                va="center",
                fontsize=style.SMALL,
                family="monospace",
                fontweight="bold",
                parse_math=False,
            )
            following = rows.iloc[k + 1] if k + 1 < n else None
            if following is None:
                ax.text(5.05, y, "(no guess left: a free token)", va="center", fontsize=small, color=theme.muted)
            elif following["kept"]:
                ax.text(5.05, y, "✓ right, kept", va="center", fontsize=small, color=theme.exact)
            else:
                ax.text(5.05, y, "✗ wrong: the pick replaces it", va="center", fontsize=small, color=theme.stock)
        else:
            ax.text(2.8, y, "thrown away: its context was wrong", va="center", fontsize=small, color=theme.muted)
    ax.set(xlim=(0, 7.6), ylim=(-n - 0.4, 0.6))
    style.plain(ax)
    for t in ax.texts:
        t.set_in_layout(False)
    return figure


def alt(data: Frame) -> str:
    """The finding in words."""
    n, kept = _guesses(data)
    rows = data.sort_values("step")
    out = [str(t) for t in rows["picked"].dropna()]
    return (
        f"One real cycle, a line a token. The draft guessed {n} tokens: "
        f"{' '.join(repr(str(t)) for t in rows[rows['role'] == 'guess']['text'])}. "
        f"The target checked them in one pass of {n + 1} tokens and kept {kept}; {style.count(len(out), 'token')} came "
        f"out, each the target's own pick: {' '.join(repr(t) for t in out)}."
    )


def caption(data: Frame) -> str:
    """The line under the picture."""
    row = data.iloc[0]
    drafter = (
        f", {select.drafter(str(row['drafter']))}" if "drafter" in data.columns and row["drafter"] is not None else ""
    )
    times = (
        f" Drafting took {row['draft_ms']:.3g} ms, verifying {row['verify_ms']:.3g} ms."
        if pd.notna(row["draft_ms"]) and pd.notna(row["verify_ms"])
        else ""
    )
    return (
        f"From the results: prompt {row['prompt']}, KV position {int(row['n_past'])}, {select.named(str(row['build']))} "
        f"build{drafter}. "
        f"A middle dot is a space. Every token that comes out is the target's own argmax.{times}"
    )
