"""What a pass of n tokens costs over a pass of one: stock, exact, and every variant that was timed."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from hiraishin.figures import select, style
from hiraishin.figures.style import Frame, Theme
from hiraishin.results import ResultSet

ID = "price"
TITLE = "The price of exactness"
NOTEBOOK = "09_price"
UNSTEADY = 0.15  # quartile range over median from which the caption warns
PUBLISHED = (
    ("stock", 9, "price.stock_9"),
    ("exact", 9, "price.exact_9"),
    ("generic exact", 8, "price.generic_8"),
    ("generic exact", 9, "price.generic_9"),
    ("first own kernel", 8, "price.first_kernel_8"),
)


def tables(results: ResultSet) -> Frame:
    """All pass times, each with its unit's scalar inputs and key as columns; overridden experiments left out."""
    frames = []
    for r in results.of("price"):
        if r.table is not None and len(r.table) and not r.inputs.get("env"):
            extra = {k: v for k, v in r.inputs.items() if isinstance(v, (str, int, float)) and k not in r.table.columns}
            frames.append(r.table.assign(**extra, key=r.key))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def one_unit(frame: Frame) -> Frame:
    """The rows of the unit that timed most builds, then most passes: ratios hold within one run only."""
    units = [rows for _, rows in frame.groupby("key", sort=True)]
    return max(units, key=lambda rows: (rows["build"].nunique(), len(rows))) if units else frame


def data(results: ResultSet, *, quant: str | None = None, context: int | None = None, published: bool = True) -> Frame:
    """One row per arm and width: median ms, ratio over stock's one-token pass with its quartiles, ratio over its own.

    Rows with ``origin`` = ``published`` are the post's numbers, from another machine and model; they carry no times.
    """
    frame: Frame = tables(results)
    if frame.empty:
        return frame
    frame = select.one_setting(frame, results, quant=quant, context=context)
    if "context" in frame.columns:
        frame = frame[frame["context"] == frame["context"].min()]
    frame = one_unit(frame)
    settings = [c for c in (*select.SETTINGS, "context") if c in frame.columns]
    base_arm = select.in_order(frame["build"])[0]
    base = frame[(frame["build"] == base_arm) & (frame["width"] == 1)]["ms"].median()
    out: Frame = frame.groupby([*settings, "build", "width"], as_index=False, dropna=False)["ms"].agg(
        median_ms="median",
        low_ms=lambda x: x.quantile(0.25),
        high_ms=lambda x: x.quantile(0.75),
        rounds="count",
        missing=lambda x: int(x.isna().sum()),
    )
    out.loc[out["missing"] > 0, "median_ms"] = float("nan")
    for name, column in (("ratio", "median_ms"), ("ratio_low", "low_ms"), ("ratio_high", "high_ms")):
        out[name] = out[column] / base
    own = out[out["width"] == 1].set_index("build")["median_ms"]
    out["ratio_own"] = out["median_ms"] / out["build"].map(own)
    out = out.drop(columns="missing").assign(origin="measured", base=base_arm)
    numbers = select.published().get("numbers", {}) if published else {}
    machine = select.published().get("source", {}).get("machine", "")
    rows = [
        {"build": arm, "width": width, "ratio": float(numbers[key]["value"]), "origin": "published", "machine": machine}
        for arm, width, key in PUBLISHED
        if key in numbers
    ]
    return pd.concat([out, pd.DataFrame(rows)], ignore_index=True) if rows else out


def _measured(data: Frame) -> Frame:
    return data[data["origin"] == "measured"]


def _at(data: Frame) -> int:
    widths = sorted(int(w) for w in _measured(data)["width"].unique())
    return 9 if 9 in widths else widths[-1]


def _words(data: Frame, arms: tuple[str, ...] | None = None) -> str:
    width = _at(data)
    rows = _measured(data)[_measured(data)["width"] == width]
    if arms and rows["build"].isin(arms).any():
        rows = rows[rows["build"].isin(arms)]
    return ", ".join(
        f"{select.named(a)} {rows[rows['build'] == a]['ratio'].iloc[0]:.2f}×" for a in select.in_order(rows["build"])
    )


def _own(data: Frame) -> str:
    """The ratios over each build's own one-token pass, in words."""
    rows = _measured(data)[_measured(data)["width"] == _at(data)]
    found = [(a, rows[rows["build"] == a]["ratio_own"].iloc[0]) for a in select.in_order(rows["build"])]
    return ", ".join(f"{select.named(a)} {ratio:.2f}×" for a, ratio in found if pd.notna(ratio))


def _swing(data: Frame) -> float:
    """How far the quartiles of the one-token pass lie apart that everything is divided by, over its median."""
    rows = _measured(data)
    base = rows[(rows["build"] == rows["base"].iloc[0]) & (rows["width"] == 1)]
    return float((base["ratio_high"] - base["ratio_low"]).iloc[0]) if len(base) else 0.0


def _title(data: Frame) -> str:
    base = select.named(str(_measured(data)["base"].iloc[0]))
    return f"A pass of {_at(data)} tokens: {_words(data, select.ARMS)} the time of {base}'s one-token pass"


@style.styled
def draw(data: Frame, theme: Theme) -> Figure:
    """Ratio by width with quartile bars; published numbers are hollow, unconnected and labelled with their machine."""
    style.require(data, ID, "pass times", ("origin", "build"))
    measured = _measured(data)
    style.require(measured, ID, "pass times", (), ("width", "ratio", "ratio_low", "ratio_high"))
    figure = style.new(4.3, _title(data))
    axes = figure.subplots()
    looks = [("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", (0, (5, 1, 1, 1))), ("P", (0, (1, 1)))]
    colours = {"stock": theme.stock, "patched": theme.exact}
    spare = [theme.third, theme.fourth, theme.muted, theme.warn]
    for k, arm in enumerate(select.in_order(measured["build"])):
        rows = measured[measured["build"] == arm].sort_values("width")
        colour = colours.get(arm) or spare[(k - 2) % len(spare)]
        marker, line = looks[k % len(looks)]
        axes.errorbar(
            rows["width"],
            rows["ratio"],
            yerr=[
                (rows["ratio"] - rows["ratio_low"]).clip(lower=0),
                (rows["ratio_high"] - rows["ratio"]).clip(lower=0),
            ],
            marker=marker,
            linestyle=line,
            color=colour,
            capsize=2.5,
            elinewidth=1.0,
            label=f"{select.named(arm)}, measured",
        )
    other = data[data["origin"] == "published"]
    signs = {"stock": "o", "exact": "s", "generic exact": "^", "first own kernel": "D"}
    for arm, rows in other.groupby("build", sort=False):
        axes.plot(
            rows["width"] + 0.18,
            rows["ratio"],
            signs.get(str(arm), "v"),
            markerfacecolor=theme.paper,
            markeredgecolor=theme.ink,
            markeredgewidth=1.3,
            linestyle="none",
            label=f"{arm}, published",
        )
    axes.axhline(1, color=theme.muted, linewidth=1, linestyle=":")
    top = int(measured["width"].max())
    base = select.named(str(measured["base"].iloc[0]))
    axes.set(xlim=(0.6, max(top, 9) + 0.6), xlabel="tokens in the pass", ylabel=f"over {base}'s one token")
    axes.set_ylim(bottom=0)
    axes.set_xticks([w for w in range(1, top + 1) if top <= 10 or w % 2 == 0 or w == 1])
    axes.grid(axis="y")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=2, columnspacing=1.2, handlelength=2.4)
    return figure


def alt(data: Frame) -> str:
    """The finding in words."""
    widths = sorted(int(w) for w in _measured(data)["width"].unique())
    base = select.named(str(_measured(data)["base"].iloc[0]))
    text = (
        f"Lines of pass time over {base}'s one-token pass, widths {widths[0]} to {widths[-1]}. At {_at(data)} tokens: "
        f"{_words(data)}; over each build's own one-token pass: {_own(data)}."
    )
    other = data[data["origin"] == "published"]
    if len(other):
        points = ", ".join(f"{r.build} {r.ratio:g}× at {int(r.width)}" for r in other.itertuples())
        text += f" Published, on another machine ({other['machine'].iloc[0]}): {points}."
    return text


def caption(data: Frame) -> str:
    """The line under the picture."""
    rows = _measured(data)
    at = f", {int(rows['context'].iloc[0])} tokens of context" if "context" in rows.columns else ""
    other = data[data["origin"] == "published"]
    hollow = f" Hollow: published, {other['machine'].iloc[0]}, not measured here." if len(other) else ""
    care = (
        f" That one-token pass itself swung by {100 * _swing(data):.0f} % between quartiles: read these ratios with care."
        if _swing(data) > UNSTEADY
        else ""
    )
    return (
        f"{select.setting(rows)}{at}; medians of {int(rows['rounds'].min())} interleaved rounds over "
        f"{rows['base'].iloc[0]}'s one-token median, bars from quartile to quartile, "
        f"logits of every row asked for.{care} At {_at(data)} tokens over each build's own one-token pass: {_own(data)}.{hollow}"
    )
