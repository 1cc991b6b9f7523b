"""Claims: every number that the report, the tests and CI quote, computed from results and nowhere else."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from hiraishin.intervals import binomial_interval, median_interval
from hiraishin.results import Result, ResultSet

SETTING_KEYS = ("quant", "threads", "flash_attn", "kv_type", "env")


@dataclass(frozen=True)
class Claim:
    """One number: what it is (``id``), of which build, under which parameters, its value (or null) and unit."""

    id: str
    build: str
    params: dict[str, Any] = field(default_factory=dict)
    value: float | int | None = None
    unit: str = ""
    detail: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def claims(results: ResultSet) -> list[Claim]:
    """Every claim that the result set supports, in a stable order."""
    found: list[Claim] = []
    for maker in _MAKERS:
        found.extend(maker(results))
    return found


def find(all_claims: Iterable[Claim], id: str, build: str | None = None, **params: Any) -> Claim | None:
    """The first claim with that id (and build, and parameters); ``None`` when there is none."""
    for claim in all_claims:
        if claim.id == id and (build is None or claim.build == build):
            if all(claim.params.get(k) == v for k, v in params.items()):
                return claim
    return None


def to_json(results: ResultSet) -> dict[str, Any]:
    """``{"profile", "machine", "claims": [...]}``, the form that ``hiraishin receipts --json`` prints."""
    return {
        "profile": results.name,
        "machine": dict(results.machine),
        "missing": len(results.missing),
        "failures": list(results.failures),
        "claims": [claim.as_dict() for claim in claims(results)],
    }


def _groups(results: list[Result], keys: tuple[str, ...]) -> dict[tuple[Any, ...], list[Result]]:
    grouped: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        grouped.setdefault(tuple(result.inputs.get(k) for k in keys), []).append(result)
    return grouped


def _replay(results: ResultSet) -> Iterator[Claim]:
    keys = ("build", *SETTING_KEYS)
    for group, members in _groups(results.of("replay"), keys).items():
        build, params = group[0], dict(zip(SETTING_KEYS, group[1:], strict=True))
        differing = [r for r in members if r.record["differing"]]
        widths = sorted({r.inputs["width"] for r in members})
        first = min((r.inputs["width"] for r in differing), default=None)
        span = f"widths {widths[0]} to {widths[-1]}, {len({r.inputs['prompt'] for r in members})} prompt(s)"
        yield Claim("replay.first_differing_width", build, params, first, "tokens", span)
        short = [r.inputs["width"] for r in differing if _differs_below(r, 256)]
        yield Claim(
            "replay.first_differing_width_short",
            build,
            params,
            min(short, default=None),
            "tokens",
            "rows before KV position 256, where attention is not split",
        )
        yield Claim(
            "replay.positions_compared", build, params, sum(r.record["positions"] for r in members), "rows", span
        )
        yield Claim(
            "replay.differing_positions", build, params, sum(r.record["differing"] for r in members), "rows", span
        )
        largest = [r.record["max_abs_diff"] for r in members]
        yield Claim(
            "replay.max_abs_diff",
            build,
            params,
            None if None in largest else max(largest),
            "logit",
            "not finite" if None in largest else span,
        )
        yield Claim("replay.flips", build, params, sum(r.record["flips"] for r in members), "positions", span)
        margins = [m for r in members for m in r.record.get("flip_margins", [])]
        if margins:
            yield Claim("replay.smallest_flip_margin", build, params, min(margins), "logit", "")
            yield Claim("replay.largest_flip_margin", build, params, max(margins), "logit", "")
        kv = [r.record["first_differing_kv"] for r in differing]
        yield Claim(
            "replay.first_differing_kv", build, params, min(kv, default=None), "cells", "over all widths and prompts"
        )
        reruns = [r.record["rerun_differing"] for r in members if r.record.get("rerun_differing") is not None]
        if reruns:
            yield Claim(
                "control.rerun_differing_rows", build, params, sum(reruns), "rows", "every width replayed twice"
            )
        for width in widths:
            here = [r for r in members if r.inputs["width"] == width]
            if width == 1:
                yield Claim(
                    "control.width1_differing_rows",
                    build,
                    params,
                    sum(r.record["differing"] for r in here),
                    "rows",
                    "width 1 replayed against the trace",
                )
            at = {**params, "width": width}
            yield Claim(
                "replay.width_differing_positions", build, at, sum(r.record["differing"] for r in here), "rows", ""
            )
            yield Claim("replay.width_flips", build, at, sum(r.record["flips"] for r in here), "positions", "")
            finite = [r.record["max_abs_diff"] for r in here]
            yield Claim("replay.width_max_abs_diff", build, at, None if None in finite else max(finite), "logit", "")


def _differs_below(result: Result, cells: int) -> bool:
    """Whether a replay has a differing row at a KV position below ``cells``."""
    if result.table is None:
        return False
    return bool((result.table["differing"] & (result.table["kv_position"] < cells)).any())


def _rows(result: Result) -> list[str]:
    return [] if result.table is None else [str(h) for h in result.table["row_sha256"]]


def _tie(
    results: ResultSet, kind: str, build: str, against: str, extra: tuple[str, ...] = ()
) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Rows that differ between two builds, unit by unit of equal inputs: (params, differing, compared)."""
    keys = (*SETTING_KEYS, *extra)
    identity = (*SETTING_KEYS, "prompt", "prompt_sha256", "prompt_tokens", "tokens", "model_sha256", "width")
    theirs = {tuple(r.inputs.get(k) for k in identity): r for r in results.of(kind, build=against)}
    sums: dict[tuple[Any, ...], list[int]] = {}
    for result in results.of(kind, build=build):
        other = theirs.get(tuple(result.inputs.get(k) for k in identity))
        if other is None:
            continue
        mine, reference = _rows(result), _rows(other)
        total = sums.setdefault(tuple(result.inputs.get(k) for k in keys), [0, 0])
        total[0] += sum(a != b for a, b in zip(mine, reference, strict=False)) + abs(len(mine) - len(reference))
        total[1] += max(len(mine), len(reference))
    for group, (differing, compared) in sums.items():
        yield dict(zip(keys, group, strict=True)), differing, compared


def _reference(results: ResultSet) -> Iterator[Claim]:
    for build in ("patched", "patched-off", "patched-serial"):
        for params, differing, compared in _tie(results, "trace", build, "stock"):
            yield Claim(
                "reference.differing_rows", build, params, differing, "rows", f"{compared} width-1 rows against stock's"
            )
    for params, differing, compared in _tie(results, "replay", "patched-off", "stock"):
        yield Claim(
            "switch_off.differing_rows",
            "patched",
            params,
            differing,
            "rows",
            f"{compared} rows at every width against stock's",
        )
    for group, members in _groups(results.of("replay", build="patched-serial"), SETTING_KEYS).items():
        params = dict(zip(SETTING_KEYS, group, strict=True))
        rows = sum(r.record["positions"] for r in members)
        yield Claim(
            "serial.differing_rows",
            "patched",
            params,
            sum(r.record["differing"] for r in members),
            "rows",
            f"{rows} rows in serial mode against width 1",
        )


def _price(results: ResultSet) -> Iterator[Claim]:
    # The steadiest unit first: no switch of llama.cpp's own set, the most passes before a timed one.
    steadiest = sorted(
        results.of("price"), key=lambda r: (r.inputs.get("env") is not None, -(r.inputs.get("settle") or 0))
    )
    for result in steadiest:
        params = {k: result.inputs.get(k) for k in ("quant", "threads", "context", "model", "settle", "env")}
        for build, ratios in result.record["ratio"].items():
            for width, ratio in sorted(ratios.items(), key=lambda item: int(item[0])):
                at = {**params, "width": int(width)}
                spread = result.record["spread"][build][width]
                base = result.record["base"]
                yield Claim(
                    "price.ratio",
                    build,
                    at,
                    ratio,
                    f"times {base}'s one-token pass",
                    f"median of {result.inputs['rounds']} interleaved rounds, interquartile range {100 * spread:.0f} %",
                )
                yield Claim("price.ms", build, at, result.record["median_ms"][build][width], "ms", "")
    for result in results.of("bandwidth"):
        yield Claim(
            "bandwidth.gb_per_s",
            "machine",
            {"threads": result.inputs["threads"]},
            result.record["gb_per_s"],
            "GB/s",
            "",
        )


def _localize(results: ResultSet) -> Iterator[Claim]:
    for result in results.of("localize"):
        params = {k: result.inputs.get(k) for k in (*SETTING_KEYS, "width", "prompt")}
        origins = result.record.get("origins") or []
        first = origins[0] if origins else {}
        name = first.get("tensor", "") if isinstance(first, dict) else str(first)
        switch = first.get("switch") or first.get("kernel") or "" if isinstance(first, dict) else ""
        yield Claim(
            "localize.origins",
            str(result.inputs["build"]),
            params,
            len(origins),
            "operations",
            f"{name} ({first.get('op', '')}, {first.get('weight_type', '')}{', ' + switch if switch else ''})"
            if name
            else "",
        )


def _speculative(results: ResultSet) -> Iterator[Claim]:
    plain = results.of("plain")
    for build in ("patched", "stock"):
        speeds = [
            r.record["tokens_per_second"]
            for r in plain
            if r.inputs["build"] == build and r.record.get("tokens_per_second")
        ]
        if speeds:
            yield Claim(
                "plain.tokens_per_second",
                build,
                {},
                statistics.median(speeds),
                "tokens/s",
                f"median over {len(speeds)} prompts",
            )
    yield from _plain_equal(plain)
    keys = ("matrix", "build", "drafter", "prefill", "client_guard", "quant")
    for group, members in _groups(results.of("speculative"), keys).items():
        params = dict(zip(keys, group, strict=True))
        matrix, build = str(params.pop("matrix")), str(params.pop("build"))
        same = sum(bool(r.record["identical"]) for r in members)
        prompts = {r.inputs["prompt"] for r in members}
        good = {p for p in prompts if all(r.record["identical"] for r in members if r.inputs["prompt"] == p)}
        yield Claim(f"{matrix}.runs", build, params, len(members), "runs", "")
        yield Claim(f"{matrix}.identical", build, params, same, "runs", _share(same, len(members)))
        logic = sum(r.record.get("fork_kind") == "logic" for r in members)
        yield Claim(
            f"{matrix}.forks_not_rounding", build, params, logic, "runs", "forks that a control does not repeat"
        )
        if matrix.startswith("evaluation"):
            at = {**params, "matrix": matrix}
            yield Claim("evaluate.prompts", build, at, len(prompts), "prompts", "")
            yield Claim("evaluate.identical", build, at, len(good), "prompts", _share(len(good), len(prompts)))
        yield from _speed(matrix, build, params, members)
        yield from _reruns(matrix, build, params, members)


def _share(part: int, whole: int) -> str:
    low, high = binomial_interval(part, whole)
    return f"of {whole}; exact 95 % interval of the share {low:.3f} to {high:.3f}"


def _plain_equal(plain: list[Result]) -> Iterator[Claim]:
    by_prompt: dict[tuple[Any, ...], dict[str, str]] = {}
    for r in plain:
        key = tuple(r.inputs.get(k) for k in ("prompt", "prompt_sha256", "quant", "tokens", "prefill", *SETTING_KEYS))
        by_prompt.setdefault(key, {})[str(r.inputs["build"])] = str(r.record.get("rows_sha256"))
    pairs = [(b["patched"], b["stock"]) for b in by_prompt.values() if "patched" in b and "stock" in b]
    if pairs:
        yield Claim(
            "reference.plain_identical",
            "patched",
            {},
            sum(a == b for a, b in pairs),
            "prompts",
            f"of {len(pairs)}: every logit row of the plain decode, patched against stock",
        )


def _speed(matrix: str, build: str, params: dict[str, Any], members: list[Result]) -> Iterator[Claim]:
    params = {**params, "matrix": matrix}
    records = [r.record for r in members]
    drafted, accepted = sum(r["drafted"] for r in records), sum(r["accepted"] for r in records)
    # The first token of a run comes from the prefill, not from a cycle.
    cycles, tokens = sum(r["cycles"] for r in records), sum(r["tokens"] - 1 for r in records)
    yield Claim(
        "speculative.acceptance",
        build,
        params,
        accepted / drafted if drafted else None,
        "share",
        f"{accepted} of {drafted}",
    )
    yield Claim(
        "speculative.tokens_per_cycle", build, params, tokens / cycles if cycles else None, "tokens", f"{cycles} cycles"
    )
    spent = {part: sum(r["seconds"].get(part, 0.0) for r in records) for part in ("draft", "verify", "bookkeeping")}
    total = sum(spent.values())
    yield Claim(
        "speculative.tokens_per_second",
        build,
        params,
        tokens / total if total else None,
        "tokens/s",
        "prefill left out",
    )
    pairs = [
        r["tokens_per_second"] / r["plain_tokens_per_second"]
        for r in records
        if r.get("tokens_per_second") and r.get("plain_tokens_per_second")
    ]
    if pairs:
        interval = median_interval(pairs)
        yield Claim(
            "speculative.speedup",
            build,
            params,
            statistics.median(pairs),
            "times plain speed",
            f"median of {len(pairs)} runs, each against plain decoding of its prompt in the same process"
            + (f"; 95 % interval {interval[0]:.3f} to {interval[1]:.3f}" if interval else ""),
        )
    share = spent["bookkeeping"] / total if total else None
    yield Claim("cycle.bookkeeping_share", build, params, share, "share", "of a cycle's time")
    for part, seconds in spent.items():
        yield Claim(
            f"cycle.{part}_ms", build, params, 1e3 * seconds / cycles if cycles else None, "ms", "mean over cycles"
        )


def _reruns(matrix: str, build: str, params: dict[str, Any], members: list[Result]) -> Iterator[Claim]:
    repeats: dict[tuple[Any, ...], set[Any]] = {}
    for r in members:
        key = (r.inputs["prompt"], r.inputs.get("draft_length"))
        repeats.setdefault(key, set()).add(r.record.get("first_differing_byte"))
    if len(members) > len(repeats):
        moved = sum(len(places) > 1 for places in repeats.values())
        yield Claim(f"{matrix}.rerun_moved", build, params, moved, "runs", "forks that a rerun placed at another byte")


_MAKERS: tuple[Callable[[ResultSet], Iterator[Claim]], ...] = (_replay, _reference, _price, _localize, _speculative)
