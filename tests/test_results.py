"""The store: a unit is whole or absent, never wrong."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiraishin.bundle import write_bundle
from hiraishin.errors import UserError
from hiraishin.receipts import import_receipt
from hiraishin.results import ResultSet, Store, Unit, load_receipt

UNIT = Unit("replay", {"build": "stock", "width": 4, "prompt": "p"})


def _put(store: Store) -> None:
    store.put(UNIT, {"differing": 3, "max": 0.1}, {"position": [0, 1], "diff": [0.1, 2e-45]}, {"commit": None})


def test_a_unit_comes_back_bit_for_bit(tmp_path: Path) -> None:
    store = Store(tmp_path)
    _put(store)
    result = store.get(UNIT)
    assert result is not None
    assert result.record == {"differing": 3, "max": 0.1}
    assert result.table is not None
    assert result.table["diff"].tolist() == [0.1, 2e-45]


def test_keys_depend_on_every_input_and_not_on_their_order() -> None:
    assert Unit("a", {"x": 1, "y": 2}).key == Unit("a", {"y": 2, "x": 1}).key
    assert Unit("a", {"x": 1}).key != Unit("a", {"x": 2}).key
    assert Unit("a", {"x": 1}).key != Unit("b", {"x": 1}).key
    assert Unit("a", {"x": 1}).key != Unit("a", {"x": True}).key


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other schema", "no table", "changed number"])
def test_a_damaged_unit_counts_as_absent_and_is_named(tmp_path: Path, damage: str) -> None:
    store = Store(tmp_path)
    _put(store)
    manifest = next((tmp_path / "replay").glob("*.json"))
    table = next((tmp_path / "replay").glob("*.parquet"))
    if damage == "cut":
        table.write_bytes(table.read_bytes()[:-7])
    elif damage == "flip":
        blob = bytearray(table.read_bytes())
        blob[len(blob) // 2] ^= 1
        table.write_bytes(bytes(blob))
    elif damage == "empty":
        manifest.write_bytes(b"")
    elif damage == "no table":
        table.unlink()
    else:
        body = json.loads(manifest.read_text())
        if damage == "other schema":
            body["schema"] = 0
        else:
            body["record"]["differing"] = 0
        manifest.write_text(json.dumps(body))
    assert store.get(UNIT) is None
    assert store.all() == []
    assert len(store.problems) >= 1
    _put(store)
    assert store.get(UNIT) is not None


def test_a_renamed_manifest_is_not_believed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    _put(store)
    manifest = next((tmp_path / "replay").glob("*.json"))
    other = Unit("replay", {"build": "patched", "width": 4, "prompt": "p"})
    manifest.rename(manifest.with_name(f"{other.key}.json"))
    assert store.get(other) is None


def test_two_writers_of_one_unit_leave_one_of_the_two_whole(tmp_path: Path) -> None:
    first, second = Store(tmp_path), Store(tmp_path)
    first.put(UNIT, {"n": 1}, {"position": [1]})
    second.put(UNIT, {"n": 2}, {"position": [2]})
    result = first.get(UNIT)
    assert result is not None and result.table is not None
    assert result.record["n"] == result.table["position"][0] == 2


def test_nan_is_refused_rather_than_stored(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        Store(tmp_path).put(UNIT, {"max": float("nan")})
    assert Store(tmp_path).all() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(UserError, match="cannot store"):
        _put(Store(tmp_path))


def test_a_file_in_the_way_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "replay").write_text("not a folder")
    with pytest.raises(UserError, match="cannot store a result"):
        _put(Store(tmp_path))


def _receipt(tmp_path: Path) -> Path:
    store = Store(tmp_path / "store")
    _put(store)
    return write_bundle(ResultSet(None, {"cpu": "c"}, store.all(), name="p"), tmp_path / "receipt")


def test_a_receipt_holds_records_and_rows(tmp_path: Path) -> None:
    read = load_receipt(_receipt(tmp_path))
    assert [r.record["differing"] for r in read.results] == [3]
    assert read.results[0].key == UNIT.key
    table = read.results[0].table
    assert table is not None and table["diff"].tolist() == [0.1, 2e-45]


@pytest.mark.parametrize("name", ["units.jsonl", "replay.parquet"])
def test_a_receipt_with_a_changed_byte_or_a_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    folder = _receipt(tmp_path)
    blob = bytearray((folder / name).read_bytes())
    blob[len(blob) // 2] ^= 1
    (folder / name).write_bytes(bytes(blob))
    with pytest.raises(UserError, match="does not match its checksum"):
        load_receipt(folder)
    (folder / name).unlink()
    with pytest.raises(UserError, match="damaged"):
        load_receipt(folder)


def test_a_receipt_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    folder = _receipt(tmp_path)
    head = json.loads((folder / "receipt.json").read_text())
    head["sha256"]["../store/x"] = "0"
    (folder / "receipt.json").write_text(json.dumps(head))
    with pytest.raises(UserError, match="names a file"):
        load_receipt(folder)


def test_importing_a_receipt_takes_only_its_own_files(tmp_path: Path) -> None:
    folder = _receipt(tmp_path)
    (folder / "evil.py").write_text("print(1)")
    added = import_receipt(folder, into=tmp_path / "receipts")
    assert sorted(p.name for p in added.iterdir()) == ["receipt.json", "replay.parquet", "units.jsonl"]
    with pytest.raises(UserError, match="there already"):
        import_receipt(folder, into=tmp_path / "receipts")


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    inputs=st.dictionaries(st.text(min_size=1, max_size=8), _JSON, max_size=4),
    record=st.dictionaries(st.text(max_size=8), _JSON, max_size=4),
)
def test_any_plain_value_survives_the_store(
    tmp_path_factory: Any, inputs: dict[str, Any], record: dict[str, Any]
) -> None:
    store = Store(tmp_path_factory.mktemp("store"))
    try:
        json.dumps([inputs, record]).encode()
    except UnicodeEncodeError:
        return
    unit = Unit("any", inputs)
    store.put(unit, record, pd.DataFrame({"x": [1.5]}))
    result = store.get(unit)
    assert result is not None
    assert result.record == record
    assert result.inputs == inputs
