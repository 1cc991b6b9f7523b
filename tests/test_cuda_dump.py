"""Rows and a column dumped from a GPU (`tests/numerics_gpu.py --out`): the numpy model gives the bits that came out there."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hiraishin import paths
from hiraishin.numerics import bits, mul_mat_vec_q6_k, nwarps_for

DUMPS = sorted((paths.ROOT / "data" / "compiled").glob("q6k-dump-*.json"))


def check(dump: dict[str, Any]) -> None:
    """Every row at every number of columns, from the dumped bytes alone."""
    rows = [base64.b64decode(row) for row in dump["rows"]]
    quants = np.frombuffer(base64.b64decode(dump["column"]["quants"]), np.int8)
    scales = np.frombuffer(base64.b64decode(dump["column"]["scales"]), np.float16)
    for columns, found in dump["columns"].items():
        warps = nwarps_for(1 if dump["switch"] else int(columns))
        assert found["columns_equal"]
        assert found["bits"] == [bits(mul_mat_vec_q6_k(row, quants, scales, warps).value) for row in rows], columns


@pytest.mark.parametrize("path", DUMPS, ids=lambda p: p.stem)
def test_the_model_gives_the_bits_that_a_gpu_gave(path: Path) -> None:
    dump = json.loads(path.read_text(encoding="utf-8"))
    check(dump)
    one, five = (dump["columns"][n]["bits"] for n in ("1", "5"))
    assert (one == five) == bool(dump["switch"])


def made_up_dump() -> dict[str, Any]:
    """A dump whose results are the model's own."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 256, 208, np.uint8).tobytes() + np.float16(0.01).tobytes() for _ in range(2)]
    quants, scales = rng.integers(-127, 128, 256).astype(np.int8), rng.random(8).astype(np.float16)
    results = {
        str(n): [bits(mul_mat_vec_q6_k(row, quants, scales, nwarps_for(n)).value) for row in rows] for n in (1, 5)
    }
    return {
        "switch": 0,
        "rows": [base64.b64encode(row).decode() for row in rows],
        "column": {
            "quants": base64.b64encode(quants.tobytes()).decode(),
            "scales": base64.b64encode(scales.tobytes()).decode(),
        },
        "columns": {n: {"bits": found, "columns_equal": True} for n, found in results.items()},
    }


def test_one_wrong_bit_in_a_dump_is_noticed() -> None:
    dump = made_up_dump()
    check(dump)
    first = int(dump["columns"]["5"]["bits"][0], 16) ^ 1
    dump["columns"]["5"]["bits"][0] = f"{first:08x}"
    with pytest.raises(AssertionError, match="5"):
        check(dump)
