"""The arithmetic behind the explanations: against exact rational numbers, other formulas, and the real kernel."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiraishin import paths
from hiraishin.errors import UserError
from hiraishin.numerics import attention, matvec, occupancy
from hiraishin.numerics.floats import bits, fma32, spacing, sum_in_order
from hiraishin.numerics.rows import joined_row, real_row, real_rows, row_results
from hiraishin.numerics.traffic import floor_ms

# Floats ----------------------------------------------------------------------------------------------------------

f32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def test_float32_values_near_one_hundred_million_are_eight_apart() -> None:
    assert spacing(1e8) == 8.0
    assert spacing(1.0) == 2.0**-23


def test_three_numbers_in_two_orders_give_zero_and_one() -> None:
    numbers = (1e8, 1.0, -1e8)
    assert sum_in_order(numbers, (0, 1, 2)) == 0.0
    assert sum_in_order(numbers, (0, 2, 1)) == 1.0


def test_an_order_that_is_no_permutation_is_refused() -> None:
    with pytest.raises(ValueError, match="not an order"):
        sum_in_order((1.0, 2.0), (0, 0))


def _nearest_float32(exact: Fraction) -> np.float32:
    """Round to nearest even through all candidates around the float64 value: slow, and independent of fma32."""
    with np.errstate(over="ignore"):  # the neighbour of the largest float is infinite: meant
        guess = np.float32(float(exact))
        around = [guess, np.nextafter(guess, np.float32(np.inf)), np.nextafter(guess, np.float32(-np.inf))]
    finite = [c for c in around if np.isfinite(c)]
    distance = {c: abs(Fraction(float(c)) - exact) for c in finite}
    least = min(distance.values())
    best = [c for c in finite if distance[c] == least]
    return min(best, key=lambda c: int(np.float32(c).view(np.uint32)) & 1)


@settings(max_examples=400, deadline=None)
@given(f32, f32, f32)
def test_fma_rounds_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    got = fma32(a, b, c)
    if not np.isfinite(got) or abs(exact) > Fraction(float(np.finfo(np.float32).max)):
        return
    assert got == _nearest_float32(exact)


def test_fma_does_not_round_twice_where_float64_would() -> None:
    """1 + p*q lies just below a tie of float32; rounded to float64 first, it becomes the tie and then the wrong side."""
    p = np.float32(1 + 2.0**-12)
    q = np.float32(2.0**-24 * (1 - 2.0**-12 + 2.0**-24))
    exact = Fraction(float(p)) * Fraction(float(q)) + 1
    assert fma32(p, q, 1.0) == _nearest_float32(exact)
    twice = np.float32(np.float64(p) * np.float64(q) + 1.0)
    assert twice != _nearest_float32(exact), "no witness: float64 got it right"


def test_bits_are_eight_hexadecimal_digits() -> None:
    assert bits(1.0) == "3f800000"
    assert bits(np.array([0.0, -0.0], np.float32)) == ["00000000", "80000000"]


# One Q6_K row ----------------------------------------------------------------------------------------------------


def _weights(row: bytes) -> np.ndarray:
    """Dequantized weights in float64, written from the format's description, weight by weight."""
    out = []
    for start in range(0, len(row), matvec.BLOCK_BYTES):
        block = row[start : start + matvec.BLOCK_BYTES]
        ql, qh, scales = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8)
        d = float(np.frombuffer(block[208:210], np.float16)[0])
        for i in range(256):
            half, rest = divmod(i, 128)
            run, at = divmod(rest, 32)
            low = ql[64 * half + 32 * (run % 2) + at] >> (4 * (run // 2)) & 15
            high = qh[32 * half + at] >> (2 * run) & 3
            out.append(d * int(scales[i // 16]) * ((low | high << 4) - 32))
    return np.array(out)


@pytest.mark.parametrize("index", range(real_rows()))
def test_every_lane_and_block_is_covered_once(index: int) -> None:
    """The sum over all lanes and blocks is the row's dot product: no weight is missed, none counted twice."""
    row = real_row(index)
    column = row.quants.astype(np.float64) * np.repeat(row.scales8.astype(np.float64), 32)
    weights = _weights(row.packed)
    sumf, d = matvec.lane_terms(row.packed, row.quants, row.scales8)
    by_lanes = (sumf.astype(np.float64) * d.astype(np.float64)[:, None]).sum(axis=1)
    by_blocks = (weights * column).reshape(-1, 256).sum(axis=1)
    assert by_lanes == pytest.approx(by_blocks, rel=1e-5, abs=1e-5)
    assert sum(matvec.lane_products(row.packed, row.quants, row.scales8)) == pytest.approx(weights @ column, rel=1e-12)


def test_four_warps_and_two_warps_sum_the_blocks_the_post_says() -> None:
    four, two = matvec.warp_blocks(16, 4), matvec.warp_blocks(16, 2)
    assert four[0] == (0, 4, 8, 12)
    assert two[0] == tuple(range(0, 16, 2))
    for dealt in (four, two):
        assert sorted(b for blocks in dealt for b in blocks) == list(range(16))


def test_the_warp_count_depends_on_the_width() -> None:
    assert [matvec.nwarps_for(n) for n in range(1, 9)] == [4, 4, 4, 4, 2, 2, 2, 2]
    for width in (0, 9):
        with pytest.raises(ValueError, match="1 to 8 columns"):
            matvec.nwarps_for(width)


def test_the_number_of_warps_changes_the_bits_of_a_real_row() -> None:
    found = row_results(0)
    assert str(found.loc[1, "bits, fused"]) != str(found.loc[5, "bits, fused"])
    assert (found.loc[1:4, "bits, fused"] == found.loc[1, "bits, fused"]).all()
    assert (found.loc[5:8, "bits, fused"] == found.loc[5, "bits, fused"]).all()


def test_results_stay_near_the_exact_sum() -> None:
    row = real_row(1)
    exact = sum(matvec.lane_products(row.packed, row.quants, row.scales8))
    for warps, fused in itertools.product((1, 2, 4, 8), (True, False)):
        value = matvec.mul_mat_vec_q6_k(row.packed, row.quants, row.scales8, warps, fused=fused).value
        assert float(value) == pytest.approx(exact, rel=1e-5)


def test_the_kernel_loop_written_out_lane_by_lane_gives_the_same_bits() -> None:
    """A slow scalar walk, thread by thread as in the CUDA source, against the vectorized model."""
    row, warps = real_row(2), 4
    sumf, d = matvec.lane_terms(row.packed, row.quants, row.scales8, fused=False)
    shared = np.zeros((warps, 32), np.float32)
    for tid in range(32 * warps):
        acc = np.float32(0)
        kbx = tid // 32
        while kbx < 16:
            acc = np.float32(acc + np.float32(d[kbx] * sumf[kbx, tid % 32]))
            kbx += warps
        shared[tid // 32, tid % 32] = acc
    lanes = shared[0].copy()
    for warp, lane in itertools.product(range(1, warps), range(32)):
        lanes[lane] = np.float32(lanes[lane] + shared[warp, lane])
    for offset in (16, 8, 4, 2, 1):
        lanes = np.array([np.float32(lanes[i] + lanes[i ^ offset]) for i in range(32)], np.float32)
    assert len(set(bits(lanes))) == 1, "after the shuffles every lane holds the same number"
    model = matvec.mul_mat_vec_q6_k(row.packed, row.quants, row.scales8, warps, fused=False)
    assert bits(model.value) == bits(lanes[0])


def test_quantizing_activations_keeps_the_largest_at_127_and_rounds_halves_away_from_zero() -> None:
    x = np.zeros(64, np.float32)
    x[0], x[1], x[2] = 127.0, 2.5, -2.5
    quants, scales = matvec.quantize_q8_1(x)
    assert quants[:3].tolist() == [127, 3, -3]
    assert scales.tolist() == [1.0, 0.0]
    assert not quants[32:].any()


@pytest.mark.parametrize("size", [0, 31, 33])
def test_activations_that_are_no_whole_blocks_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=r"whole blocks|one row"):
        matvec.quantize_q8_1(np.zeros((size,), np.float32) if size else np.zeros((2, 32), np.float32))


def test_a_row_that_does_not_fit_its_activations_is_refused() -> None:
    row = real_row(0)
    with pytest.raises(ValueError, match="activations"):
        matvec.mul_mat_vec_q6_k(row.packed, row.quants[:-32], row.scales8, 4)
    with pytest.raises(ValueError, match="multiple of 210"):
        matvec.unpack_q6_k(row.packed[:-1])
    with pytest.raises(ValueError, match="are stored"):
        real_row(99)


def test_the_stored_rows_are_rows_of_the_requantized_model(tmp_path: Path) -> None:
    """Planted: a file whose Q6_K tensor is known, read back by the function that made the stored rows."""
    gguf = pytest.importorskip("gguf")
    matrix = np.frombuffer(np.random.RandomState(0).bytes(20 * 6 * 210), np.uint8).reshape(20, 6 * 210).copy()
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("w", matrix, raw_dtype=gguf.GGMLQuantizationType.Q6_K)
    writer.add_tensor("f", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert joined_row(path, "w", 3) == matrix[3:6].tobytes()[: 16 * 210]
    with pytest.raises(ValueError, match="not Q6_K"):
        joined_row(path, "f", 0)
    with pytest.raises(ValueError, match="no tensor"):
        joined_row(path, "nothing", 0)
    with pytest.raises(ValueError, match="no 16 blocks"):
        joined_row(path, "w", 18)


# Occupancy, P and positions --------------------------------------------------------------------------------------

LAPTOP = occupancy.VectorAttention(occupancy.Gpu(26))


def test_registers_decide_how_many_blocks_fit() -> None:
    assert occupancy.blocks_per_sm(162, occupancy.Gpu(26)) == 3
    assert occupancy.blocks_per_sm(193, occupancy.Gpu(26)) == 2
    assert occupancy.blocks_per_sm(32, occupancy.Gpu(26)) == 12  # warps run out before registers do
    with pytest.raises(ValueError, match="1 to 255"):
        occupancy.blocks_per_sm(256, occupancy.Gpu(26))


def test_p_is_four_for_one_query_and_three_for_two_on_26_sms() -> None:
    assert (LAPTOP.p(1, 512), LAPTOP.p(2, 512)) == (4, 3)
    assert LAPTOP.p(2, 512, pinned=True) == 4


def test_the_first_differing_position_is_384() -> None:
    assert LAPTOP.first_differing_position(2) == 384
    assert occupancy.same_grouping(383, 4, 3)
    assert not occupancy.same_grouping(384, 4, 3)


def test_other_widths_differ_from_other_positions_on() -> None:
    assert {n: LAPTOP.first_differing_position(n) for n in (3, 5, 9)} == {3: 768, 5: 256, 9: 512}


def test_where_the_guard_matters_with_p_pinned() -> None:
    found = {sms: occupancy.VectorAttention(occupancy.Gpu(sms)).first_guard_boundary() for sms in (26, 36, 58, 84, 132)}
    assert found == {26: 768, 36: 1024, 58: 1792, 84: 1792, 132: None}


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4096), st.integers(1, 32), st.integers(1, 200), st.integers(1, 8))
def test_p_never_exceeds_the_chunks(cells: int, queries: int, sms: int, fit: int) -> None:
    padded = occupancy.padded(cells)
    p = occupancy.parallel_blocks(fit, sms, occupancy.tiles(queries, occupancy.Heads(), 2), padded)
    assert 1 <= p <= padded // occupancy.CHUNK
    owners = occupancy.chunk_owners(padded, p)
    assert set(owners) == set(range(p))


def test_a_kernel_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="fits"):
        occupancy.parallel_blocks(0, 26, 32, 512)
    with pytest.raises(ValueError, match="in use"):
        occupancy.padded(0)


# Attention -------------------------------------------------------------------------------------------------------


def _exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int) -> np.ndarray:
    seen = slice(0, position + 1)
    scores = k[seen].astype(np.float64) @ q.astype(np.float64) / np.sqrt(q.size)
    weights = np.exp(scores - scores.max())
    result: np.ndarray = (weights / weights.sum()) @ v[seen].astype(np.float64)
    return result


@pytest.mark.parametrize(("position", "p"), [(0, 1), (130, 2), (300, 4), (390, 3), (700, 6)])
def test_the_gpu_model_computes_attention(position: int, p: int) -> None:
    q, k, v = attention.made_up_cache(1024, 64, seed=position)
    out = attention.gpu_attention(q, k, v, position, p).output
    assert out == pytest.approx(_exact(q, k, v, position), abs=2e-6)


@pytest.mark.parametrize("seed", range(3))
def test_a_masked_chunk_changes_nothing_and_a_real_one_does(seed: int) -> None:
    q, k, v = attention.made_up_cache(512, 128, seed)

    def differ(position: int) -> bool:
        four, three = (attention.gpu_attention(q, k, v, position, p).output for p in (4, 3))
        return bits(four) != bits(three)

    assert not differ(300)
    assert not differ(383)
    assert differ(384)
    assert differ(390)


def test_the_cpu_splits_a_lone_query_from_512_cells_on() -> None:
    assert attention.cpu_chunks(256, 2) == [(0, 256)]
    assert attention.cpu_chunks(512, 2) == [(0, 256), (256, 512)]
    assert attention.cpu_chunks(512, 3) == [(0, 171), (171, 342), (342, 512)]
    assert attention.cpu_chunks(512, 2, queries=2) == [(0, 512)]
    assert attention.cpu_chunks(512, 1) == [(0, 512)]


def test_on_the_cpu_padding_alone_moves_the_border_between_parts() -> None:
    q, k, v = attention.made_up_cache(512, 64, seed=1)
    for threads, moved in ((2, False), (3, True)):
        short, long = (
            attention.cpu_attention(q, k, v, 255, threads, cells=n, exp=attention.exp32).output for n in (256, 512)
        )
        assert (bits(short) != bits(long)) is moved, f"{threads} threads"


def test_the_dot_product_folds_lanes_as_avx2_does() -> None:
    rng = np.random.RandomState(3)
    x, y = rng.standard_normal(64).astype(np.float16), rng.standard_normal(64).astype(np.float16)
    a, b = x.astype(np.float32), y.astype(np.float32)
    lanes = [np.float32(0)] * 32
    for i in range(64):
        lanes[i % 32] = np.float32(fma32(a[i], b[i], lanes[i % 32]))
    sums = [
        np.float32(np.float32(lanes[i] + lanes[16 + i]) + np.float32(lanes[8 + i] + lanes[24 + i])) for i in range(8)
    ]
    four = [np.float32(sums[i] + sums[4 + i]) for i in range(4)]
    expected = np.float32(np.float32(four[0] + four[1]) + np.float32(four[2] + four[3]))
    assert bits(attention.dot_f16_avx2(a, b)) == bits(expected)


def _stock() -> Path:
    from hiraishin.builds import find_build

    try:
        return find_build("stock", "cpu").lib_dir
    except UserError as error:
        pytest.skip(f"no stock build to hold the model against: {error}")


def _has_avx2_and_no_avx512() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return " avx2 " in flags and " fma " in flags and " f16c " in flags and " avx512f " not in flags


def _real_kernel(
    lib_dir: Path, folder: Path, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, threads: int, queries: int
) -> np.ndarray:
    cells = k.shape[0]
    mask = np.zeros((queries, cells), np.float16)
    mask[:, position + 1 :] = -np.inf
    scale = np.float32(1) / np.sqrt(np.float32(q.size))
    np.savez(folder / "in.npz", q=np.stack([q] * queries), k=k, v=v, mask=mask, scale=scale, threads=threads)
    script = Path(__file__).with_name("numerics_kernel.py")
    done = subprocess.run(
        [sys.executable, str(script), str(lib_dir), str(folder / "in.npz"), str(folder / "out.npy")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result: np.ndarray = np.load(folder / "out.npy")
    return result


CASES = [
    (64, 300, 2, 1),
    (64, 390, 3, 1),
    (128, 390, 2, 1),
    (128, 700, 3, 1),
    (64, 255, 2, 1),
    (64, 390, 2, 2),
    (128, 390, 1, 1),
]


@pytest.mark.real_model
@pytest.mark.parametrize(("head", "position", "threads", "queries"), CASES)
def test_the_cpu_model_has_the_bits_of_the_real_kernel(
    tmp_path: Path, head: int, position: int, threads: int, queries: int
) -> None:
    """Built by gcc for AVX2, every output number is equal bit for bit; elsewhere the grouping's effect must be."""
    lib_dir = _stock()
    q, k, v = attention.made_up_cache(occupancy.padded(position + 1), head, seed=position)
    real = _real_kernel(lib_dir, tmp_path, q, k, v, position, threads, queries)
    assert len({tuple(bits(row)) for row in real}) == 1, "equal queries in one pass must give equal rows"
    if not _has_avx2_and_no_avx512():
        assert real[0] == pytest.approx(_exact(q, k, v, position), abs=2e-3)
        pytest.skip("the dot product's lane order is modelled for AVX2 only; only the value was compared here")
    # The compiler may fuse either product of the merge, or none (gcc 12 fuses the old terms).
    hows: tuple[attention.Contraction, ...] = ("old", "none", "new")
    models = {
        (a, b): bits(attention.cpu_attention(q, k, v, position, threads, queries=queries, merge=a, merge_sum=b).output)
        for a, b in itertools.product(hows, hows)
    }
    assert bits(real[0]) in models.values()


@pytest.mark.real_model
def test_the_real_kernel_regroups_where_the_model_says(tmp_path: Path) -> None:
    lib_dir = _stock()
    for position, threads, moved in ((255, 2, False), (300, 1, False), (300, 2, True), (390, 3, True)):
        q, k, v = attention.made_up_cache(occupancy.padded(position + 1), 64, seed=position)
        alone, among = (_real_kernel(lib_dir, tmp_path, q, k, v, position, threads, n)[0] for n in (1, 2))
        assert (bits(alone) != bits(among)) is moved, f"position {position}, {threads} threads"


# Traffic ---------------------------------------------------------------------------------------------------------


def test_the_floor_of_a_pass_is_bytes_over_bandwidth() -> None:
    assert floor_ms(4.67e9, 286) == pytest.approx(16.33, abs=0.01)
    with pytest.raises(ValueError, match="positive"):
        floor_ms(1e9, 0)


# Against compiled code and a real GPU ----------------------------------------------------------------------------


def test_the_register_counts_are_those_of_the_compiled_kernels() -> None:
    kernels = json.loads((paths.ROOT / "data" / "compiled" / "registers.json").read_text(encoding="utf-8"))["kernels"]
    found = {
        k["queries"]: k
        for k in kernels
        if k["kernel"] == "flash_attn_ext_vec" and (k["arch"], k["head"], k["type"]) == (120, 128, "F16")
    }
    assert (LAPTOP.registers_one, LAPTOP.registers_many) == (found[1]["registers"], found[2]["registers"])
    # Static shared memory (and 1 KB the driver keeps a block) must not be what limits occupancy, as the model assumes.
    for kernel, registers in ((found[1], 162), (found[2], 193)):
        assert (100 << 10) // (kernel["shared_bytes"] + 1024) > occupancy.blocks_per_sm(registers, occupancy.Gpu(26))


@pytest.mark.real_model
def test_the_gpu_sums_a_q6_k_row_as_the_model_says() -> None:
    """Needs a CUDA build and its card; `tests/numerics_gpu.py` prints the same as JSON."""
    from hiraishin.builds import find_build

    try:
        lib_dir = find_build("stock", "cuda").lib_dir
    except UserError as error:
        pytest.skip(f"no CUDA build: {error}")
    script = Path(__file__).with_name("numerics_gpu.py")
    done = subprocess.run(
        [sys.executable, str(script), str(lib_dir)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(paths.ROOT)},
    )
    if done.returncode and "there is no device" in done.stderr:
        pytest.skip("no GPU here")
    assert done.returncode == 0, done.stderr[-2000:]
    for columns, found in json.loads(done.stdout)["columns"].items():
        assert found["columns_equal"], f"{columns} columns"
        assert found["fused_equal"] == found["of"], f"{columns} columns: {found}"
