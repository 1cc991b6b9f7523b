"""Rows that arithmetic and the compiled code decide, without the post's GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hiraishin import paths
from hiraishin.errors import UserError
from hiraishin.ledger.base import (
    DIFFERS,
    EXPLAINED,
    TESTS,
    Finding,
    Judge,
    computed,
    finding,
    read_toml,
    row_arithmetic,
)
from hiraishin.ledger.replaying import exactly_without
from hiraishin.report.facts import Published, is_close


@row_arithmetic
def float_spacing(published: Mapping[str, Published]) -> Finding:
    """Row 7: numpy's float32, now."""
    from hiraishin.numerics import spacing, sum_in_order

    gap = float(spacing(1e8))
    sums = [float(sum_in_order((1e8, 1.0, -1e8), order)) for order in ((0, 1, 2), (0, 2, 1))]
    wanted = [published[f"float.{k}"].value for k in ("spacing_at_1e8", "one_order", "other_order")]
    return finding(
        [gap, *sums] == wanted,
        "Spacing {}, sums {} and {}",
        computed(gap, "spacing"),
        *(computed(s, "sum") for s in sums),
    )


@row_arithmetic
def q6_k_row(published: Mapping[str, Published]) -> Finding:
    """Row 10."""
    import numpy as np

    from hiraishin.numerics import real_row

    row = real_row(0)
    blocks = len(row.packed) // 210  # bytes of a Q6_K block (ggml-common.h: 128 + 64 + 16 + 2)
    products = row.quants.astype(np.int64)
    forwards, backwards = int(products.sum()), int(products[::-1].sum())
    good = (
        blocks == published["matvec.row_blocks"].value
        and len(row.quants) == published["matvec.row_length"].value
        and forwards == backwards
    )
    return Finding(
        EXPLAINED if good else DIFFERS,
        Markup("A stored row has {} blocks; its integers sum to the same in both directions").format(
            computed(blocks, "blocks")
        ),
    )


@row_arithmetic
def warp_walk(published: Mapping[str, Published]) -> Finding:
    """Row 11."""
    from hiraishin.numerics import bits, mul_mat_vec_q6_k, real_row, warp_blocks

    blocks = int(published["matvec.row_blocks"].value)
    four, two = warp_blocks(blocks, 4), warp_blocks(blocks, 2)
    row = real_row(0)
    values = [mul_mat_vec_q6_k(row.packed, row.quants, row.scales8, n).value for n in (4, 2)]
    good = (
        four[0] == tuple(range(0, blocks, 4))
        and two[0] == tuple(range(0, blocks, 2))
        and bits(values[0]) != bits(values[1])
    )
    text = Markup(
        "Computed: the first of four warps takes blocks {}, of two {}; a real row sums to <code>{}</code> and <code>{}</code>"
    )
    return Finding(
        EXPLAINED if good else DIFFERS,
        text.format(
            *(Markup("<code>{}</code>").format(" ".join(map(str, w[0]))) for w in (four, two)),
            *(bits(v) for v in values),
        ),
    )


@row_arithmetic
def warp_count(published: Mapping[str, Published]) -> Finding:
    """Row 12."""
    from hiraishin.numerics import nwarps_for

    counts = [nwarps_for(n) for n in range(1, 9)]
    wanted = [int(published["matvec.warps_1_to_4"].value)] * 4 + [int(published["matvec.warps_5_to_8"].value)] * 4
    return Finding(
        EXPLAINED if counts == wanted else DIFFERS,
        Markup("The source's table: {} for one to four tokens, {} for five to eight").format(
            computed(counts[0], "warps"), computed(counts[4], "warps")
        ),
    )


@row_arithmetic
def padding_constant(published: Mapping[str, Published]) -> Finding:
    """Row 20."""
    from hiraishin.numerics.occupancy import PADDING, padded

    good = padded(1) == PADDING == published["attention.padding"].value and padded(PADDING + 1) == 2 * PADDING
    return Finding(
        EXPLAINED if good else DIFFERS,
        Markup("The source rounds up to a multiple of {}; the step from one to two of them shows in the replay").format(
            computed(PADDING, "padding")
        ),
    )


POST_ARCH = 120
"""Compute capability of the post's GPU generation, as the compiled kernels are listed (sm_120)."""


def _post_gpu() -> Any:
    from hiraishin.numerics.occupancy import Gpu, VectorAttention

    one, two = (_registers(kernel="flash_attn_ext_vec", head=128, type="F16", queries=queries) for queries in (1, 2))
    return VectorAttention(Gpu(load_compiled()["gpu"]["sms"]), one, two)


@row_arithmetic
def first_position_model(published: Mapping[str, Published]) -> Finding:
    """Row 22, from arithmetic."""
    first = _post_gpu().first_differing_position(2)
    boundary = published["long.clean_below_kv"].value
    text = Markup("From registers and multiprocessors alone: the first position that differs among two is {}").format(
        computed(first, "position")
    )
    return Finding(EXPLAINED if first == boundary else DIFFERS, text)


def _first_position_run(judge: Judge) -> Finding | None:
    """Row 22, where a GPU was made to pretend the post's number of multiprocessors."""
    sms = load_compiled()["gpu"]["sms"]
    runs = [
        r
        for r in exactly_without(judge, "cuda-parallel-blocks")
        + exactly_without(judge, "guard", "cuda-parallel-blocks")
        if r.inputs["width"] == 2 and f"GGML_CUDA_TEST_NSM={sms}" in str(r.inputs.get("env") or "").split()
    ]
    places = [r.record["first_differing_kv"] for r in runs if r.record["differing"]]
    if not judge.on_gpu or not places:
        return None
    clean, seen = (judge.published[f"long.{k}"].value for k in ("clean_below_kv", "first_differing_kv"))
    return finding(
        clean <= min(places) <= seen,
        "made to share its work as {} multiprocessors would, two tokens first differ at KV position {}",
        computed(sms, "multiprocessors"),
        judge.measured(min(places), "position", runs),
    )


TESTS["first_position_model"] = _first_position_run


@row_arithmetic
def chunks_dealt(published: Mapping[str, Published]) -> Finding:
    """Row 23."""
    from hiraishin.numerics.attention import gpu_attention, made_up_cache
    from hiraishin.numerics.occupancy import CHUNK, chunk_owners

    owners = chunk_owners(512, 3)
    q, k, v = made_up_cache(512, 128)
    moved = bool((gpu_attention(q, k, v, 390, 4).output != gpu_attention(q, k, v, 390, 3).output).any())
    good = owners == [0, 1, 2, 0] and published["attention.chunk"].value == CHUNK and moved
    return Finding(
        EXPLAINED if good else DIFFERS,
        Markup(
            "Modelled bit by bit: chunks of {} dealt in turn, and the output {} on how many blocks there are"
        ).format(computed(CHUNK, "chunk"), "depends" if moved else "does not depend"),
    )


@row_arithmetic
def occupancy(published: Mapping[str, Published]) -> Finding:
    """Row 24."""
    gpu = _post_gpu()
    one, two = gpu.p(1, 512), gpu.p(2, 512)
    good = (
        one == published["attention.blocks_one_query"].value and two == published["attention.blocks_two_queries"].value
    )
    text = Markup("{} and {} registers a thread give {} and {} parallel blocks on the post’s GPU").format(
        computed(gpu.registers_one, "registers"),
        computed(gpu.registers_many, "registers"),
        computed(one, "blocks"),
        computed(two, "blocks"),
    )
    return Finding(EXPLAINED if good else DIFFERS, text)


@row_arithmetic
def masked_chunk(published: Mapping[str, Published]) -> Finding:
    """Row 25."""
    from hiraishin.numerics.attention import gpu_attention, made_up_cache

    q, k, v = made_up_cache(512, 128)
    changed = {
        position: int((gpu_attention(q, k, v, position, 4).output != gpu_attention(q, k, v, position, 3).output).sum())
        for position in (300, 390)
    }
    text = Markup("Modelled: {} of the outputs change for the earlier query, {} for the later one").format(
        *(computed(n, "outputs") for n in changed.values())
    )
    return Finding(EXPLAINED if changed[300] == 0 and changed[390] > 0 else DIFFERS, text)


@row_arithmetic
def shared_loads(published: Mapping[str, Published]) -> Finding:
    """Row 33."""
    loads = {int(n): int(v) for n, v in load_compiled()["matvec"]["Q4_K"]["loads"].items()}
    (a, la), (b, lb), (c, lc) = sorted(loads.items())
    each = (lb - la) / (b - a)
    fixed = la - each * a
    linear = is_close(lc, fixed + each * c)
    text = Markup("Compiled for that GPU: {} loads whatever the width and {} a column").format(
        computed(fixed, "loads"), computed(each, "loads")
    )
    return Finding(EXPLAINED if linear and fixed > 0 else DIFFERS, text)


@row_arithmetic
def registers(published: Mapping[str, Published]) -> Finding:
    """Row 34."""
    pairs = {
        name: [_registers(kernel="mul_mat_vec_q", type=name, columns=n, geometry="stock") for n in (1, 8)]
        for name in ("Q4_K", "Q6_K")
    }
    text = Markup("; ").join(
        Markup("<code>{}</code>: {} at one column, {} at eight").format(
            name, computed(a, "registers"), computed(b, "registers")
        )
        for name, (a, b) in pairs.items()
    )
    return Finding(EXPLAINED if all(b >= 1.8 * a for a, b in pairs.values()) else DIFFERS, text)


def load_compiled(path: Path | None = None) -> dict[str, Any]:
    """What the compiled code does not tell of itself, or was counted in it by hand (``data/published/compiled.toml``)."""
    return read_toml(path or paths.published_dir() / "compiled.toml")


def _registers(**wanted: Any) -> int:
    """Registers a thread of a kernel compiled for the post's GPU generation (``data/compiled/registers.json``).

    Raises:
        UserError: the file is missing, or holds no such kernel.
    """
    path = paths.ROOT / "data" / "compiled" / "registers.json"
    try:
        kernels = json.loads(path.read_text(encoding="utf-8"))["kernels"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{path.name} cannot be read: {error}", "It is part of the project: restore it with git."
        ) from error
    for kernel in kernels:
        if kernel.get("arch") == POST_ARCH and all(kernel.get(k) == v for k, v in wanted.items()):
            return int(kernel["registers"])
    raise UserError(
        f"{path.name} holds no kernel with {wanted}",
        "data/compiled/extract_registers.py reads it from the compiled code.",
    )
