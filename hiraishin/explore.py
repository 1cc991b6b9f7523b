"""Sliders for JupyterLab, and the checks of a notebook's parameters.

A slider calls the same function as the static figure beside it, so nothing here computes. Under papermill no front
end answers; the notebooks show the same figures without sliders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from hiraishin import figures
from hiraishin.errors import UserError
from hiraishin.numerics import real_rows
from hiraishin.profile import Profile, load_profile

if TYPE_CHECKING:
    from hiraishin.results import ResultSet

BOUNDARIES = (256, 512, 768, 1024)


def checked(profile: str, **parameters: tuple[int, int, int]) -> Profile:
    """Check a notebook's parameters, which papermill itself does not: ``name=(value, least, most)``.

    Returns:
        the profile.

    Raises:
        UserError: a parameter is no whole number or out of range, or there is no such profile.
    """
    for name, (value, least, most) in parameters.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise UserError(f"the parameter {name} is {value!r}, not a whole number", f"Give {least} to {most}.")
        if not least <= value <= most:
            raise UserError(f"the parameter {name} is {value}", f"It can be {least} to {most}.")
    if not isinstance(profile, str):
        raise UserError(f"the parameter profile is {profile!r}, not a name", "Pass it as text (papermill -r).")
    return load_profile(profile)


NARROWED_TOKENS = 64
"""Tokens that a narrowed replay decodes: enough to see something, few enough to wait for."""


def narrowed(
    profile: str, *, prompt: str = "", widths: Sequence[int] = (), threads: int = 0, tokens: int = 0
) -> Profile:
    """The profile; or, as soon as anything else is given, one replay under its settings with that changed.

    Args:
        profile: a profile's name, or the path of a ``.toml`` file.
        prompt: one of the replay prompts; its first without a name.
        widths: the widths of the passes; a width of one, the control, is added.
        threads: another number of threads.
        tokens: how many tokens to decode.

    Raises:
        UserError: a value is of another type or out of range, or there is no such profile.
    """
    whole = checked(profile, threads=(threads, 0, 512), tokens=(tokens, 0, 8192))
    if not (prompt or widths or threads or tokens):
        return whole
    given: Any = widths  # from a notebook, so anything
    if isinstance(given, str) or not all(isinstance(w, int) and not isinstance(w, bool) for w in given):
        raise UserError(
            f"the parameter widths is {widths!r}, not a list of whole numbers", "Give one such as [2, 3, 7]."
        )
    from hiraishin.run import replay_profile

    one = replay_profile(
        whole,
        arms=["stock", "patched"],
        widths=sorted({1, *(widths or (2, 3, 4, 5, 8, 9, 16))}),
        tokens=tokens or NARROWED_TOKENS,
        prompt=prompt or "first",
    )
    if threads:
        one = one.model_copy(update={"settings": one.settings.model_copy(update={"threads": threads})})
    return one


def _interactive(function: Any, **controls: Any) -> Any:
    """An ipywidgets panel that redraws when a slider is let go, not while it moves."""
    from ipywidgets import interactive

    panel = interactive(function, **controls)
    for control in panel.children:
        if hasattr(control, "continuous_update"):
            control.continuous_update = False
    return panel


def _slider(value: int, least: int, most: int, step: int = 1) -> Any:
    from ipywidgets import IntSlider

    return IntSlider(value=value, min=least, max=most, step=step)


def _choice(options: list[Any], value: Any = None) -> Any:
    from ipywidgets import Dropdown

    return Dropdown(options=options, value=options[0] if value is None else value)


def float_order() -> Any:
    """Sliders: which stored row, and the numbers of tokens in the two passes compared."""

    def draw(row: int, tokens: int, more_tokens: int) -> figures.Shown:
        return figures.show("float-order", row=row, columns=(tokens, more_tokens))

    return _interactive(draw, row=_slider(0, 0, real_rows() - 1), tokens=_slider(1, 1, 8), more_tokens=_slider(5, 1, 8))


def warp_partition() -> Any:
    """Sliders: which stored row, and the numbers of tokens in the two passes; fused or plain multiply-add."""
    from ipywidgets import Checkbox

    def draw(row: int, tokens: int, more_tokens: int, fused: bool) -> figures.Shown:
        columns = (tokens, more_tokens) if tokens != more_tokens else (tokens,)
        return figures.show("warp-partition", row=row, columns=columns, fused=fused)

    return _interactive(
        draw,
        row=_slider(0, 0, real_rows() - 1),
        tokens=_slider(1, 1, 8),
        more_tokens=_slider(5, 1, 8),
        fused=Checkbox(value=True, description="fused"),
    )


def padding() -> Any:
    """Sliders: the boundary, where the batch starts, its width, and the CPU's threads."""

    def draw(boundary: int, before: int, width: int, threads: int) -> figures.Shown:
        return figures.show("kv-padding", boundary=boundary, before=before, width=width, threads=threads)

    return _interactive(
        draw,
        boundary=_choice(list(BOUNDARIES)),
        before=_slider(4, 0, 15),
        width=_slider(9, 2, 16),
        threads=_slider(3, 1, 8),
    )


def parallel_blocks() -> Any:
    """Sliders: the query's position, P alone and in the batch, and the CPU's threads."""

    def draw(position: int, p_alone: int, p_batch: int, threads: int) -> figures.Shown:
        return figures.show("parallel-blocks", queries=(position,), p=(p_alone, p_batch), threads=threads)

    return _interactive(
        draw,
        position=_slider(390, 0, 1023),
        p_alone=_slider(4, 1, 8),
        p_batch=_slider(3, 1, 8),
        threads=_slider(2, 1, 8),
    )


def replay_row(results: ResultSet, build: str, prompt: str, width: int, position: int) -> pd.DataFrame:
    """Both logit rows' top candidates at one position of a replay, side by side.

    Args:
        results: holds the replay.
        build, prompt, width: which replay.
        position: index in the trace.

    Returns:
        rank, token and logit alone, token and logit in the batch. A row that is equal bit for bit keeps no
        candidates: then the margin and the verdict are all there is.

    Raises:
        UserError: no such replay or position.
    """
    found = results.of("replay", build=build, prompt=prompt, width=width)
    if not found:
        raise UserError(f"there is no replay of {prompt!r} at width {width} on {build}", "Measure it with the profile.")
    table = found[0].table
    if table is None:
        # A stored replay without a differing row may keep no table: its trace knows the token and the margin.
        inputs = {k: v for k, v in found[0].inputs.items() if k != "width"}
        traces = [r for r in results.of("trace", build=build, prompt=prompt) if dict(r.inputs) == inputs]
        if not traces or traces[0].table is None:
            raise UserError(f"the replay of {prompt!r} at width {width} on {build} keeps no rows: all are equal")
        table = traces[0].table.assign(differing=False, max_abs_diff=0.0, flip=False)
    rows = table[table["position"] == position]
    if rows.empty:
        raise UserError(f"the trace of {prompt!r} has no position {position}", f"It has {len(table)} positions.")
    row: Any = rows.iloc[0]
    columns = ("reference_top_ids", "reference_top_logits", "top_ids", "top_logits")
    lists = [row[c] if c in row and row[c] is not None else [] for c in columns]
    out = pd.DataFrame(
        {
            "rank": range(1, len(lists[0]) + 1),
            "token alone": list(lists[0]),
            "logit alone": list(lists[1]),
            "token in the batch": list(lists[2]),
            "logit in the batch": list(lists[3]),
        }
    )
    out.attrs = {
        "token": int(row["token"]),
        "margin": float(row["margin"]),
        "differing": bool(row["differing"]),
        "max_abs_diff": float(row["max_abs_diff"]),
        "flip": bool(row["flip"]),
    }
    return out


def replay_words(row: pd.DataFrame) -> str:
    """What :func:`replay_row` found, in one line."""
    about = row.attrs
    start = f"token {about['token']}, margin {about['margin']:.4g}: "
    if not about["differing"]:
        return start + "the two rows are equal bit for bit"
    end = "the argmax flipped" if about["flip"] else "the argmax stayed"
    return start + f"the logits moved by up to {about['max_abs_diff']:.4g}, {end}"


def replay_example(results: ResultSet) -> pd.DataFrame:
    """The position that the explorer opens with, without sliders: a flip if there is one, else the largest difference.

    Raises:
        UserError: the results hold no replay with rows.
    """
    build, prompt, width, position = _telling(results)
    row = replay_row(results, build, prompt, width, position)
    print(f"{build}, {prompt}, width {width}, position {position}: {replay_words(row)}")
    return row


def _telling(results: ResultSet) -> tuple[str, str, int, int]:
    best: tuple[tuple[bool, float, str], tuple[str, str, int, int]] | None = None
    for r in results.of("replay"):
        if r.table is None or not len(r.table):
            continue
        table: Any = r.table.sort_values(["flip", "max_abs_diff"], ascending=False)
        row = table.iloc[0]
        rank = (bool(row["flip"]), float(row["max_abs_diff"]), r.key)
        if best is None or rank > best[0]:
            inputs = r.inputs
            best = rank, (str(inputs["build"]), str(inputs["prompt"]), int(inputs["width"]), int(row["position"]))
    if best is None:
        raise UserError("the results hold no replay to explore", "Run the profile's replays first.")
    return best[1]


def replay(results: ResultSet) -> Any:
    """A replay explorer: pick build, prompt, width and position; see both rows' top candidates and the margin.

    Raises:
        UserError: the results hold no replay.
    """
    found = results.of("replay")
    if not found:
        raise UserError("the results hold no replay to explore", "Run the profile's replays first.")
    longest = max(int(r.record["positions"]) for r in found)
    build, prompt, width, position = _telling(results)

    def draw(build: str, prompt: str, width: int, position: int) -> pd.DataFrame | None:
        try:
            row = replay_row(results, build, prompt, width, position)
        except UserError as error:
            print(error)
            return None
        print(replay_words(row))
        return row

    return _interactive(
        draw,
        build=_choice(sorted({str(r.inputs["build"]) for r in found}, reverse=True), build),
        prompt=_choice(sorted({str(r.inputs["prompt"]) for r in found}), prompt),
        width=_choice(sorted({int(r.inputs["width"]) for r in found}), width),
        position=_slider(position, 0, longest - 1),
    )
