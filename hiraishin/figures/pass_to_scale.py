"""One pass to scale: reading the weights against the whole pass, for one token and for two."""

from __future__ import annotations

from matplotlib.figure import Figure

from hiraishin.figures import price, select, style
from hiraishin.figures.style import Frame, Theme
from hiraishin.numerics.traffic import floor_ms
from hiraishin.results import ResultSet

ID = "pass-to-scale"
TITLE = "One pass, to scale"
NOTEBOOK = "09_price"


def data(results: ResultSet, *, quant: str | None = None) -> Frame:
    """The floor (weights over bandwidth) and the median pass times of widths 1 and 2, per build; milliseconds."""
    frame: Frame = price.tables(results)
    if frame.empty:
        return frame
    frame = select.one_setting(frame, results, quant=quant)
    if "context" in frame.columns:
        frame = frame[frame["context"] == frame["context"].min()]
    frame = price.one_unit(frame)
    settings = [c for c in (*select.SETTINGS, "context", "weight_bytes") if c in frame.columns]
    frame = frame[frame["width"].isin((1, 2)) & frame["build"].isin(select.ARMS)]
    out: Frame = frame.groupby([*settings, "build", "width"], as_index=False, dropna=False).agg(
        ms=("ms", "median"),
        low_ms=("ms", lambda x: x.quantile(0.25)),
        high_ms=("ms", lambda x: x.quantile(0.75)),
        missing=("ms", lambda x: int(x.isna().sum())),
    )
    out.loc[out["missing"] > 0, "ms"] = float("nan")
    speeds: Frame = results.records("bandwidth")
    if (
        "threads" in out.columns
        and len(speeds)
        and "threads" in speeds.columns
        and (speeds["threads"] == out["threads"].iloc[0]).any()
    ):
        speeds = speeds[speeds["threads"] == out["threads"].iloc[0]]
    speed = float(speeds["gb_per_s"].max()) if len(speeds) else None
    weights = float(out["weight_bytes"].iloc[0]) if "weight_bytes" in out.columns and len(out) else None
    floor = floor_ms(weights, speed) if speed and weights else None
    return out.drop(columns="missing").assign(gb_per_s=speed, floor_ms=floor)


def _row(data: Frame, build: str, width: int) -> float | None:
    rows = data[(data["build"] == build) & (data["width"] == width)]
    return float(rows["ms"].iloc[0]) if len(rows) else None


def _base(data: Frame) -> str:
    return select.in_order(data["build"])[0]


def _second(data: Frame, build: str) -> str:
    one, two = _row(data, build, 1), _row(data, build, 2)
    return f"{100 * (two / one - 1):+.0f} %".replace("-", "−") if one and two else ""


def _title(data: Frame) -> str:
    base = _base(data)
    one = _row(data, base, 1) or float("nan")
    more = _second(data, base)
    second = (
        f"adds {more.lstrip('+')}"
        if more.startswith("+") and more != "+0 %"
        else "costs nothing more"
        if more == "+0 %"
        else f"changes its time by {more}"
    )
    return (
        f"A one-token pass takes {one / float(data['floor_ms'].iloc[0]):.2g} times its floor; a second token {second}"
    )


@style.styled
def draw(data: Frame, theme: Theme) -> Figure:
    """Bars in milliseconds from a common zero: the floor, then one and two tokens of every build."""
    style.require(data, ID, "pass times of one and two tokens", ("build", "width"), ("ms",))
    if data["gb_per_s"].isna().all():
        style.require(data.iloc[:0], ID, "memory bandwidth")
    style.require(data, ID, "memory bandwidth and bytes of weights", (), ("floor_ms",))
    for width in (1, 2):
        style.require(
            data[(data["build"] == _base(data)) & (data["width"] == width)], ID, f"pass times at width {width}"
        )
    floor = float(data["floor_ms"].iloc[0])
    rows = [("weights read once", floor, theme.muted, "")]
    for build in select.in_order(data["build"]):
        for width in (1, 2):
            ms = _row(data, build, width)
            if ms is not None:
                rows.append(
                    (
                        f"{select.named(build)}, {width} token{'s' if width > 1 else ''}",
                        ms,
                        theme.series(build),
                        "//" if build == "patched" else "",
                    )
                )
    figure = style.new(1.35 + 0.42 * len(rows), _title(data))
    axes = figure.subplots()
    y = list(range(len(rows)))[::-1]
    for at, (_, ms, colour, hatch) in zip(y, rows, strict=True):
        axes.barh(at, ms, height=0.66, color=colour, hatch=hatch, edgecolor=theme.paper, linewidth=0)
        axes.text(ms + 0.012 * max(r[1] for r in rows), at, f"{ms:.3g} ms", va="center", fontsize=style.SMALL + 0.5)
    axes.axvline(floor, color=theme.ink, linestyle=(0, (1, 1.5)), linewidth=1.4)
    axes.set_yticks(y, [r[0] for r in rows])
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, max(r[1] for r in rows) * 1.17), xlabel="milliseconds, to scale")
    axes.spines["left"].set_visible(False)
    return figure


def alt(data: Frame) -> str:
    """The finding in words."""
    floor = float(data["floor_ms"].iloc[0])
    words = []
    for build in select.in_order(data["build"]):
        one, two = _row(data, build, 1), _row(data, build, 2)
        if one and two:
            words.append(
                f"On {select.named(build)} one token takes {one:.3g} ms, {one / floor:.2g} times that, and two tokens "
                f"{two:.3g} ms ({_second(data, build)})."
            )
    return f"Bars to scale. Reading the weights once would take {floor:.3g} ms. " + " ".join(words)


def caption(data: Frame) -> str:
    """The line under the picture."""
    row = data.iloc[0]
    context = f", {int(row['context'])} tokens of context" if "context" in data.columns else ""
    worst = float(((data["high_ms"] - data["low_ms"]) / data["ms"]).max())
    care = (
        f" Up to {100 * worst:.0f} % of a median lie between its quartiles: the machine was busy, read with care."
        if worst > price.UNSTEADY
        else ""
    )
    return (
        f"{select.setting(data)}{context}. Floor: {row['weight_bytes'] / 1e9:.3g} GB of weights at {row['gb_per_s']:.3g} "
        "GB/s, the read bandwidth measured here with the same threads. "
        f"Medians of interleaved rounds.{care}"
    )
