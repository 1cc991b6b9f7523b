"""Rows about replays: where stock differs, and what each treated cause leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from markupsafe import Markup

from hiraishin.ledger.base import (
    DIFFERS,
    REPRODUCED,
    Finding,
    Judge,
    finding,
    row_test,
)


@row_test
def replay_sees_more(judge: Judge) -> Finding | None:
    """Row 8."""
    replays = [r for r in judge.results("replay", build="stock") if r.inputs.get("width", 0) > 1]
    if not replays:
        return None
    silent = [r for r in replays if r.record.get("differing") and not r.record.get("flips")]
    differing = [r for r in replays if r.record.get("differing")]
    if not differing:
        return finding(
            False, "none of {} replays of the stock build differs", judge.measured(len(replays), "replays", replays)
        )
    past = [r for r in differing if r.record.get("flips", 0) and r.record["differing"] > r.record["flips"]]
    text = "{} of {} replays that differ do so without one flip, where text shows nothing"
    return finding(
        bool(silent or past),
        text,
        judge.measured(len(silent), "silent", silent),
        judge.measured(len(differing), "differing", differing),
    )


@row_test
def width_two(judge: Judge) -> Finding | None:
    """Row 9."""
    two = list(judge.results("replay", build="stock", width=2))
    if not two:
        return None
    flips = max(int(r.record.get("flips") or 0) for r in two)
    largest = judge.fact("replay.max_abs_diff", "stock", "max")
    first = judge.fact("replay.first_differing_width", "stock", "min")
    text = Markup("at a width of two up to {} flips a prompt").format(judge.measured(flips, "flips", two))
    if first is not None and largest is not None:
        text += Markup("; differences begin at a width of {} and reach {}").format(first, largest)
    margins = [
        judge.fact(f"replay.{which}_flip_margin", "stock", how)
        for which, how in (("smallest", "min"), ("largest", "max"))
    ]
    if all(m is not None for m in margins):
        text += Markup("; flips at margins from {} to {}").format(*margins)
    return Finding(REPRODUCED if flips else DIFFERS, text)


@row_test
def replay_zero(judge: Judge) -> Finding | None:
    """Row 28."""
    named = [q for q in ("Q4_K_M", "Q6_K") if judge.book.has("replay.positions_compared", "patched", quant=q)]
    if not named:
        return None
    compared = judge.fact("replay.positions_compared", "patched", "sum", quant=named)
    differing = judge.fact("replay.differing_positions", "patched", "sum", quant=named)
    if compared is None or differing is None or not compared.value:
        return None
    types = Markup(" and ").join(Markup("<code>{}</code>").format(q) for q in named)
    return finding(differing.value == 0, "{} of {} rows differ ({})", differing, compared, types)


def _patched(judge: Judge, at: Callable[[Any], bool] = lambda r: True) -> Finding | None:
    results = [r for r in judge.results("replay", build="patched") if r.inputs.get("width", 0) > 1 and at(r)]
    if not judge.on_gpu or not results:
        return None
    differing = sum(int(r.record["differing"]) for r in results)
    compared = sum(int(r.record["positions"]) for r in results)
    return finding(
        differing == 0,
        "{} of {} rows differ",
        judge.measured(differing, "differing", results),
        judge.measured(compared, "compared", results),
    )


def _quantized(r: Any) -> bool:
    return str(r.inputs.get("quant", "")).upper() not in ("F32", "F16", "BF16", "")


@row_test
def gpu_exact(judge: Judge) -> Finding | None:
    """Row 14: the quantized mat-vec is what the claim is about."""
    return _patched(judge, _quantized)


@row_test
def gpu_exact_wide(judge: Judge) -> Finding | None:
    """Row 15."""
    return _patched(judge, lambda r: r.inputs["width"] > 8 and _quantized(r))


def _origins(judge: Judge, at: Callable[[int], bool]) -> list[tuple[Any, Mapping[str, Any]]]:
    found = []
    for r in judge.results("localize", build="stock"):
        width = int(r.inputs.get("width") or r.record.get("width") or 0)
        origins = r.record.get("origins") or []
        if at(width) and origins and isinstance(origins[0], Mapping):
            found.append((r, origins[0]))
    return found


@row_test
def leaves_matvec(judge: Judge) -> Finding | None:
    """Row 13."""
    if not judge.on_gpu:
        return None
    wide = [(r, o) for r, o in _origins(judge, lambda w: w >= 9) if "MUL_MAT" in str(o.get("op", ""))]
    narrow = [(r, o) for r, o in _origins(judge, lambda w: 5 <= w <= 8)]
    if not wide or not narrow:
        return None
    largest = [max(float(o.get("max_abs_diff") or 0) for _, o in group) for group in (narrow, wide)]
    text = "products differ by {} from five to eight tokens and by {} from nine"
    return finding(
        largest[1] > 10 * largest[0],
        text,
        judge.measured(largest[0], "difference", [r for r, _ in narrow]),
        judge.measured(largest[1], "difference", [r for r, _ in wide]),
    )


@row_test
def attention_origin(judge: Judge) -> Finding | None:
    """Row 16."""
    if not judge.on_gpu:
        return None
    narrow = _origins(judge, lambda w: 2 <= w <= 4)
    if not narrow:
        return None
    _r, origin = narrow[0]
    return finding(
        "FLASH_ATTN" in str(origin.get("op", "")),
        "first origin of a narrow pass: <code>{}</code>, <code>{}</code>",
        origin.get("op", ""),
        origin.get("tensor", ""),
    )


def _without(judge: Judge, *parts: str) -> list[Any]:
    """Replays of the patched build with at least these parts left out."""
    found = []
    for r in judge.results("replay"):
        build = str(r.inputs.get("build", ""))
        left_out = (
            set(build.removeprefix("patched-without-").split("+")) if build.startswith("patched-without-") else set()
        )
        if left_out and set(parts) <= left_out and r.inputs.get("width", 0) > 1:
            found.append(r)
    return found


def _as_it_is(results: Iterable[Any]) -> list[Any]:
    """Without the runs that made the GPU pretend to be another, or used a switch of llama.cpp's own."""
    return [r for r in results if not r.inputs.get("env")]


def exactly_without(judge: Judge, *parts: str) -> list[Any]:
    """Replays of the patched build with these parts left out and no others."""
    name = {frozenset(parts)}
    return [
        r
        for r in _without(judge, *parts)
        if frozenset(str(r.inputs["build"]).removeprefix("patched-without-").split("+")) in name
    ]


def sums(results: Iterable[Any]) -> tuple[int, int, float]:
    """Rows that differ, flips, and the largest change."""
    listed = list(results)
    return (
        sum(int(r.record["differing"]) for r in listed),
        sum(int(r.record["flips"]) for r in listed),
        max((float(r.record.get("max_abs_diff") or 0) for r in listed), default=0.0),
    )


@row_test
def ladder_attention(judge: Judge) -> Finding | None:
    """Row 17: attention up to eight queries treated, mat-vec, wider attention and parallel blocks not."""
    runs = [
        r
        for r in _as_it_is(_without(judge, "cuda-mul-mat", "cuda-attention-16", "cuda-parallel-blocks"))
        if "cuda-attention-8" not in str(r.inputs["build"])
    ]
    narrow = [r for r in runs if r.inputs["width"] in (2, 3)]
    wide = [r for r in runs if r.inputs["width"] in (5, 9)]
    if not judge.on_gpu or not narrow or not wide:
        return None
    exact = {r.inputs["prompt"] for r in narrow} - {r.inputs["prompt"] for r in narrow if r.record["differing"]}
    prompts = {r.inputs["prompt"] for r in narrow}
    text = "narrow passes exact on {} of {} prompts; wider ones differ in {} rows"
    return finding(
        bool(exact) and sums(wide)[0] > 0,
        text,
        judge.measured(len(exact), "prompts", narrow),
        judge.measured(len(prompts), "prompts", narrow),
        judge.measured(sums(wide)[0], "differing", wide),
    )


def _reach(judge: Judge, r: Any) -> int:
    """The last KV position of a replay: from its rows, or (receipts leave out rows that are all equal) its trace's."""
    if r.table is not None and len(r.table):
        return int(r.table["kv_position"].max())
    key = ("prompt", "prompt_tokens", "tokens", "model_sha256")
    for t in judge.results("trace"):
        if t.table is not None and all(t.inputs.get(k) == r.inputs.get(k) for k in key):
            return int(t.table["kv_position"].max())
    return 0


def _without_blocks(judge: Judge) -> list[Any]:
    """All treated but the parallel blocks; with the guard if that was run."""
    with_guard = _as_it_is(exactly_without(judge, "cuda-parallel-blocks"))
    return with_guard or _as_it_is(exactly_without(judge, "guard", "cuda-parallel-blocks"))


@row_test
def ladder_three(judge: Judge) -> Finding | None:
    """Row 18."""
    runs = _without_blocks(judge)
    short = [r for r in runs if 0 < _reach(judge, r) < 384]
    if not judge.on_gpu or not short:
        return None
    return finding(
        sums(short)[0] == 0,
        "{} rows differ on prompts that end below the third chunk",
        judge.measured(sums(short)[0], "differing", short),
    )


@row_test
def ladder_long(judge: Judge) -> Finding | None:
    """Row 19."""
    runs = _without_blocks(judge)
    long = [r for r in runs if _reach(judge, r) >= 384]
    if not judge.on_gpu or not long:
        return None
    differing, flips, largest = sums(long)
    text = "{} rows of long prompts differ, by up to {}, with {} flips"
    return finding(
        differing > 0,
        text,
        judge.measured(differing, "differing", long),
        judge.measured(largest, "max_abs_diff", long),
        judge.measured(flips, "flips", long),
    )


@row_test
def blocks_pinned(judge: Judge) -> Finding | None:
    """Row 26."""
    before = _as_it_is(exactly_without(judge, "cuda-parallel-blocks"))
    if not judge.on_gpu or not before:
        return None
    prompts = {
        (r.inputs["prompt"], r.inputs["width"], r.inputs.get("quant"), r.inputs.get("model_sha256")) for r in before
    }
    after = [
        r
        for r in _as_it_is(judge.results("replay", build="patched"))
        if (r.inputs["prompt"], r.inputs["width"], r.inputs.get("quant"), r.inputs.get("model_sha256")) in prompts
    ]
    if not after or not sums(before)[0]:
        return None
    text = "{} becomes {}"
    return finding(
        sums(after)[0] == 0,
        text,
        judge.measured(sums(before)[2], "max_abs_diff", before),
        judge.measured(sums(after)[2], "max_abs_diff", after),
    )


@row_test
def padding_alone(judge: Judge) -> Finding | None:
    """Row 21."""
    runs = exactly_without(judge, "guard")
    crossing = [r for r in runs if _reach(judge, r) >= 256]
    if not crossing:
        return None
    differing, _, largest = sums(crossing)
    if not differing:
        return finding(True, "without the guard {} rows differ", judge.measured(0, "differing", crossing))
    text = "without the guard {} rows differ, by up to {}: here padding moves logits by itself"
    return finding(
        False, text, judge.measured(differing, "differing", crossing), judge.measured(largest, "max_abs_diff", crossing)
    )
