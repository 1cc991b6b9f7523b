"""What killed writers leave behind, and receipts that were made to do harm."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hard_runs import apart, can_mount, variables
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hiraishin import bundle
from hiraishin.bundle import write_bundle
from hiraishin.errors import UserError
from hiraishin.receipts import import_receipt
from hiraishin.results import ResultSet, Store, Unit, load_receipt

UNIT = Unit("replay", {"build": "stock", "width": 4})

KILLED = """
import os, signal, sys
from hiraishin.results import Store, Unit
replace, moment = os.replace, sys.argv[2]
def killed(source, target):
    if str(target).endswith(moment):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = killed
Store(sys.argv[1]).put(Unit("replay", {"build": "stock", "width": 4}), {"n": 1}, {"position": [1]})
"""


@pytest.mark.parametrize("moment", [".parquet", ".json"])
def test_a_writer_killed_in_the_middle_leaves_a_missing_unit_and_its_file_is_swept_up(
    tmp_path: Path, moment: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), moment], env=variables(None), capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    store = Store(tmp_path)
    assert store.get(UNIT) is None and store.all() == [] and store.problems == []
    (left,) = (tmp_path / "replay").glob(".*.partial")
    store.put(UNIT, {"n": 2}, {"position": [2]})
    assert left.exists(), "somebody may be writing it"
    os.utime(left, (time.time() - 7200, time.time() - 7200))
    Store(tmp_path).put(UNIT, {"n": 3}, {"position": [3]})
    assert not left.exists()
    found = Store(tmp_path).get(UNIT)
    assert found is not None and found.record["n"] == 3


PUT = """
import sys
from hiraishin.errors import UserError
from hiraishin.results import Store, Unit
store = Store(sys.argv[1])
assert len(store.all()) == 1
try:
    store.put(Unit("replay", {"width": 2}), {"n": 2})
except UserError as error:
    print(error)
assert len(store.all()) == 1
"""


@pytest.mark.skipif(not can_mount("mount --bind /usr/bin /mnt"), reason="mounting is not allowed here")
def test_results_on_a_read_only_disk_are_read_and_a_new_one_is_one_clear_line(tmp_path: Path) -> None:
    Store(tmp_path).put(UNIT, {"n": 1})
    folder = shlex.quote(str(tmp_path))
    script = f"mount --bind {folder} {folder}; mount -o remount,bind,ro {folder}\n" + shlex.join(
        [sys.executable, "-c", PUT, str(tmp_path)]
    )
    done = apart(script, **variables(None))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"cannot store a result in {tmp_path / 'replay'}: Read-only file system. Free some")


@pytest.fixture
def receipt(tmp_path: Path) -> Path:
    return _receipt(tmp_path)


def _receipt(folder: Path) -> Path:
    store = Store(folder / "store")
    store.put(UNIT, {"differing": 3, "max": 0.1}, {"position": [0, 1]}, {"commit": None})
    return write_bundle(ResultSet(None, {"cpu": "c"}, store.all(), name="p"), folder / "receipt")


def _sign(folder: Path, name: str, blob: bytes) -> None:
    """Replace a file of a receipt and make its checksum right again, as somebody with bad intentions would."""
    (folder / name).write_bytes(blob)
    head = json.loads((folder / "receipt.json").read_text())
    head["sha256"][name] = hashlib.sha256(blob).hexdigest()
    (folder / "receipt.json").write_text(json.dumps(head))


@pytest.mark.parametrize("where", ["raw/run.log", "units.jsonl", "raw"])
def test_a_receipt_with_a_link_takes_no_file_of_this_machine(tmp_path: Path, receipt: Path, where: str) -> None:
    secret = tmp_path / "secret"
    if where == "raw":
        secret.mkdir()
        (secret / "x.log").write_text("secret")
    else:
        secret.write_text("secret")
    (receipt / where).parent.mkdir(exist_ok=True)
    (receipt / where).unlink(missing_ok=True)
    (receipt / where).symlink_to(secret)
    with pytest.raises(UserError, match="holds a link"):
        import_receipt(receipt, into=tmp_path / "receipts")
    assert not (tmp_path / "receipts").exists()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_is_none_in_a_receipt_is_refused(receipt: Path, number: str) -> None:
    blob = (receipt / "units.jsonl").read_bytes().replace(b"0.1", number.encode())
    _sign(receipt, "units.jsonl", blob)
    with pytest.raises(UserError, match="no JSON number"):
        load_receipt(receipt)


@pytest.fixture
def packed(receipt: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The receipt once more, as one whose units are many."""
    monkeypatch.setattr(bundle, "_LARGE", 0)
    return write_bundle(load_receipt(receipt), receipt.parent / "packed")


@pytest.mark.parametrize(
    ("part", "value"),
    [("inputs", "[]"), ("inputs", "null"), ("record", "[1]"), ("record", "null"), ("record", '{"n":1e999}')],
)
def test_a_unit_without_inputs_or_a_record_is_refused(receipt: Path, part: str, value: str) -> None:
    units = receipt / "units.jsonl"
    changed = [{**json.loads(line), part: "here"} for line in units.read_text(encoding="utf-8").splitlines()]
    units.write_text("".join(json.dumps(u).replace('"here"', value) + "\n" for u in changed), encoding="utf-8")
    head = json.loads((receipt / "receipt.json").read_text(encoding="utf-8"))
    head["sha256"]["units.jsonl"] = hashlib.sha256(units.read_bytes()).hexdigest()
    (receipt / "receipt.json").write_text(json.dumps(head), encoding="utf-8")
    with pytest.raises(UserError, match="is damaged"):
        load_receipt(receipt)


@pytest.mark.parametrize("where", [".", "sent"])
def test_a_folder_that_holds_something_else_is_not_replaced_by_a_receipt(
    tmp_path: Path, where: str, receipt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    (folder / "sent" / "below").mkdir(parents=True)
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match="which is of no receipt"):
        write_bundle(load_receipt(receipt), Path(where))
    assert (folder / "sent" / "below").is_dir()


def test_many_units_are_compressed_and_read_as_the_same_results(receipt: Path, packed: Path) -> None:
    assert (packed / "units.jsonl.gz").is_file() and not (packed / "units.jsonl").exists()
    plain, small = load_receipt(receipt), load_receipt(packed)
    assert [(r.key, r.record) for r in small.results] == [(r.key, r.record) for r in plain.results]
    assert gzip.decompress((packed / "units.jsonl.gz").read_bytes()) == (receipt / "units.jsonl").read_bytes()
    assert import_receipt(packed, into=packed.parent / "into").name


def test_units_that_unpack_to_more_than_is_sane_are_refused(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "_LARGEST", 10)
    with pytest.raises(UserError, match="unpacks to more than"):
        load_receipt(packed)


@pytest.mark.parametrize("cut", [0, 1, 9, 20, -9, -1])
def test_compressed_units_that_are_cut_or_no_archive_are_one_line(packed: Path, cut: int) -> None:
    blob = (packed / "units.jsonl.gz").read_bytes()
    _sign(packed, "units.jsonl.gz", blob[:cut] if cut else b"no archive")
    with pytest.raises(UserError, match="is damaged"):
        load_receipt(packed)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.sampled_from(
    ["schema", "profile", "machine", "provenances", "sha256", "kind", "inputs", "record", "provenance"]
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _receipt(tmp_path_factory.mktemp("sound"))


def _give(folder: Path, blobs: dict[str, bytes]) -> None:
    for name, blob in blobs.items():
        (folder / name).write_bytes(blob)
    try:
        assert load_receipt(folder).results is not None
        import_receipt(folder, into=folder.parent / "into")
    except UserError as error:
        assert "\n" not in error.what
    shutil.rmtree(folder.parent / "into", ignore_errors=True)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=_NAMES, value=_JSON, unit=st.booleans())
def test_any_value_anywhere_in_a_receipt_is_read_or_refused(
    tmp_path: Path, sound: Path, name: str, value: Any, unit: bool
) -> None:
    folder = shutil.copytree(sound, tmp_path / "receipt", dirs_exist_ok=True)
    if unit:
        line = json.loads((sound / "units.jsonl").read_text(encoding="utf-8"))
        _sign(folder, "units.jsonl", (json.dumps({**line, name: value}) + "\n").encode())
        _give(folder, {})
    else:
        head = json.loads((sound / "receipt.json").read_text(encoding="utf-8"))
        _give(folder, {"receipt.json": json.dumps({**head, name: value}).encode()})


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(["receipt.json", "units.jsonl", "replay.parquet"]), data=st.data())
def test_any_mutation_of_a_receipt_is_read_or_refused(
    tmp_path: Path, sound: Path, name: str, data: st.DataObject
) -> None:
    folder = shutil.copytree(sound, tmp_path / "receipt", dirs_exist_ok=True)
    blob = bytearray((sound / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(blob) - 1))
        blob[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        if not blob:
            break
    if name == "receipt.json":
        _give(folder, {name: bytes(blob)})
    else:
        _sign(folder, name, bytes(blob))
        _give(folder, {})
