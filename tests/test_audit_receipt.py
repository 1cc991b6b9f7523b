"""An audit stored as a receipt: what is kept, what another machine makes of it, and what the article then says."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import report_synthetic as made_up
from bs4 import BeautifulSoup
from report_site import build, few_figures

from hiraishin import paths
from hiraishin.audit import AuditReport
from hiraishin.audit_receipt import as_report, as_result, write_audits
from hiraishin.bundle import write_bundle
from hiraishin.cli import app
from hiraishin.errors import UserError
from hiraishin.receipts import import_receipt
from hiraishin.report.article import environment, gpu_chapters
from hiraishin.report.audits import audits, gone_words, predicted_right
from hiraishin.report.check import _bare_numbers, check_site
from hiraishin.report.facts import Book
from hiraishin.results import Result, ResultSet, Unit, load_receipt

FIRST = {"op": "FLASH_ATTN_EXT", "tensor": "attn-0", "weight_type": "", "weight": "", "switch": "", "backend": "CUDA0"}


def made(build: str = "stock", *, right: bool = True, **about: Any) -> AuditReport:
    """An audit of a GPU build: widths 2 and 5 differ on stock, none on patched."""
    wrong = build == "stock"
    rows = [
        {"width": w, "positions": 64, "differing": 9 * wrong, "rerun_differing": 0, "first_differing": 3 if wrong else None,
         "first_differing_kv": 99 + w if wrong else None, "max_abs_diff": 0.5, "flips": 0, "flip_list": [],
         "rms": [0.1], "worst": 3}
        for w in (2, 5)
    ]  # fmt: skip
    operation = {"width": 2, "position": 0, "kv_position": 96, "operations": 900, "watching_changed_rows": 0, "origins": 1,
                 "first": FIRST, "largest_share": float("inf"), "share_limit": 0.02, "kinds": []}  # fmt: skip
    settings = {
        "kv_type": "f16",
        "flash_attn": True,
        "threads": 4,
        "gpu_layers": 99,
        "n_batch": 512,
        "extra_bufts": True,
    }
    told = {"build": build, "backend": "cuda", "fingerprint": build, "upstream_commit": "0c1e57098", "switch": 0 if wrong else 16,
            "libraries": {"libllama.so": "0" * 64}, "model": "synthetic-small.Q4_K_M", "quant": "as given",
            "model_sha256": "1" * 64,
            "prompt": "p", "prompt_tokens": 96, "tokens": 64, "machine": "A Test GPU", **settings, **about}  # fmt: skip
    classes = [[1], [2], [5]] if wrong else [[1, 2, 5]]
    cause: dict[str, Any] = {
        "control": "flash attention off",
        "before": {2: 9, 5: 9},
        "after": {2: 0, 5: 4},
        "finding": "",
    }
    return AuditReport(
        int(wrong), "a verdict", told, {"width1_differing_rows": 0, "watching_changed_rows": 0}, rows, classes,
        [operation] if wrong else [], {"by": "", "differing": 0, "rms_max": 0.0}, "rounding" if wrong else "none",
        [cause] if wrong else [],
        {"classes": classes if right else [[1, 2, 5]], "why": ["because"], "score": {"classes_right": right}},
    )  # fmt: skip


@pytest.fixture
def stored() -> list[Result]:
    return [as_result(made("patched")), as_result(made())]


def test_a_receipt_of_audits_is_read_back_and_imported(tmp_path: Path, stored: list[Result]) -> None:
    folder = write_audits(stored, tmp_path / "sent")
    assert {path.name for path in folder.iterdir()} == {"receipt.json", "units.jsonl"}
    (folder / "raw").mkdir()
    for name in ("a.log", "a.md", "a.py"):
        (folder / "raw" / name).write_text(name, encoding="utf-8")
    added = import_receipt(folder, into=tmp_path / "receipts")
    assert sorted(path.name for path in (added / "raw").iterdir()) == ["a.log", "a.md"]
    found = load_receipt(added)
    assert found.name == "audit" and [r.kind for r in found.results] == ["audit", "audit"]
    assert as_report(found.results[1]).verdict == "a verdict"
    assert found.results[1].record["widths"][0]["differing"] == 9


def test_what_is_no_number_becomes_null_and_sizes_of_rows_stay_out(stored: list[Result]) -> None:
    text = json.dumps(stored[1].record, allow_nan=False)
    assert '"largest_share": null' in text and '"rms"' not in text
    assert "machine" not in stored[1].inputs and stored[1].inputs["widths"] == [2, 5]


def test_the_same_audit_has_the_same_key_and_other_settings_another(stored: list[Result]) -> None:
    assert as_result(made()).key == stored[1].key
    assert as_result(made(kv_type="q8_0")).key != stored[1].key


def test_the_command_writes_the_receipt_and_keeps_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hiraishin.audit.run_audit", lambda options, echo: made())
    with pytest.raises(SystemExit) as ended:
        app(["audit", "--out", str(tmp_path / "sent"), "--json"])
    assert ended.value.code == 1
    (result,) = load_receipt(tmp_path / "sent").results
    assert as_report(result).verdict == "a verdict"


def test_a_place_that_holds_something_else_is_refused_before_the_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hiraishin.audit.run_audit", lambda options, echo: pytest.fail("it ran"))
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    for verb in (["audit"], ["run", "quick"]):
        with pytest.raises(UserError, match=r"mine\.txt"):
            app([*verb, "--out", str(tmp_path)], standalone_mode=False)
    assert (tmp_path / "mine.txt").is_file()


def test_an_audit_that_cannot_be_stored_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> Path:
        raise UserError("cannot write the receipt: No space left on device")

    monkeypatch.setattr("hiraishin.audit.run_audit", lambda options, echo: made())
    monkeypatch.setattr("hiraishin.audit_receipt.write_bundle", full)
    with pytest.raises(UserError, match="No space left"):
        app(["audit", "--json", "--out", str(tmp_path / "sent")], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["verdict"] == "a verdict"


def test_nothing_to_write_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there are no results of audit to write"):
        write_audits([], tmp_path / "sent")


def test_a_second_audit_joins_the_first_and_the_same_question_replaces_it(tmp_path: Path) -> None:
    folder = tmp_path / "sent"
    write_audits([as_result(made())], folder)
    (folder / "raw").mkdir()
    (folder / "raw" / "a.log").write_text("log", encoding="utf-8")
    write_audits([as_result(made("patched"))], folder)
    write_audits([as_result(replace(made(), verdict="another verdict"))], folder)
    found = {as_report(r).about["build"]: as_report(r).verdict for r in load_receipt(folder).results}
    assert found == {"stock": "another verdict", "patched": "a verdict"}
    assert (folder / "raw" / "a.log").is_file()


def _thesis(folder: Path) -> None:
    (folder / "thesis.txt").write_text("years of work", encoding="utf-8")


def _beside_a_receipt(folder: Path) -> None:
    write_audits([as_result(made())], folder)
    _thesis(folder)


def _receipt_of_a_profile(folder: Path) -> None:
    write_bundle(ResultSet(None, {}, [replace(as_result(made()), unit=Unit("plain", {}))], name="default"), folder)


def _damaged(folder: Path) -> None:
    write_audits([as_result(made())], folder)
    (folder / "units.jsonl").write_text("", encoding="utf-8")


def _of_another_machine(folder: Path) -> None:
    result = as_result(made())
    write_audits([replace(result, provenance={**result.provenance, "machine": {"cpu": "another"}})], folder)


@pytest.mark.parametrize(
    ("fill", "what"),
    [
        (_thesis, "holds thesis.txt"),
        (_beside_a_receipt, "holds thesis.txt"),
        (_receipt_of_a_profile, "other results than audits"),
        (_damaged, "does not match its checksum"),
        (_of_another_machine, "audits of another machine"),
    ],
)
def test_what_a_folder_holds_is_not_removed_for_a_receipt(
    tmp_path: Path, fill: Callable[[Path], None], what: str
) -> None:
    folder = tmp_path / "sent"
    folder.mkdir()
    fill(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UserError, match=what):
        write_audits([as_result(made("patched"))], folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("kind", ["file", "link", "dangling"])
def test_what_is_no_folder_is_no_place_for_a_receipt(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "sent"
    if kind == "file":
        place.write_text("mine", encoding="utf-8")
    else:
        place.symlink_to(tmp_path if kind == "link" else tmp_path / "nowhere")
    with pytest.raises(UserError, match="it is no folder"):
        write_audits([as_result(made())], place)


def test_a_row_says_what_was_found_what_was_predicted_and_what_each_switch_took_away(stored: list[Result]) -> None:
    stock, patched = audits(ResultSet(None, {}, stored))
    assert (stock.build, stock.classes, stock.right, stock.nature) == ("stock", "{1} {2} {5}", True, "reordered sums")
    assert stock.model == "synthetic-small.Q4_K_M" and stock.setting == "f16 KV, flash attention, positions 96 to 160"
    assert stock.operations == {2: "FLASH_ATTN_EXT (attn-0)"} and stock.first_kv == 101
    several = replace(stock, operations={2: "A", 3: "A", 5: "B", 9: "A"})
    assert several.widths_by_operation == {"2, 3, 9": "A", "5": "B"}
    assert (stock.rows, stock.differing, patched.differing, patched.first_kv) == (128, 18, 0, None)
    assert gone_words(stock.causes) == ["flash attention off at 2"] and stock.causes[0].stays == [5]
    assert 'value="18"' in stock.number("differing")


def test_predictions_are_counted_only_where_there_was_one() -> None:
    none = as_result(replace(made(tokens=32), prediction={"classes": [], "why": ["no model of the dispatch"]}))
    found = audits(ResultSet(None, {}, [as_result(made()), as_result(made("patched", right=False)), none]))
    assert predicted_right(found) == (1, 2)


def test_the_localizers_page_says_whose_audit_it_is_and_predicted_only_of_those_that_were() -> None:
    page = runpy.run_path(str(paths.ROOT / "docs" / "make_localizer.py"))
    unpredicted = replace(
        made("patched", model="a|b <!-- end -->"), prediction={}, controls={"watching_changed_rows": 4}
    )
    text = page["audited"](
        [("one", a) for a in audits(ResultSet(None, {}, [as_result(made()), as_result(unpredicted)]))]
    )
    assert text.startswith("Audits: 2, predicted before they ran: 1, width classes as predicted: 1.\n\n| receipt |")
    _, row = (line for line in text.splitlines() if line.startswith("| one |"))
    assert "| one | a\\|b &lt;!-- end -->, f16 KV" in text and "not to be trusted: watching not zero" in text
    assert "<!--" not in text and "| right |" in row
    assert page["audited"]([]) == "No receipt holds an audit."


ENDLESS = {"positions": 64, "differing": 1, "first_differing_kv": float("inf")}
"""JSON has no infinity, but 1e999 is read as one."""
HUGE = {**ENDLESS, "first_differing_kv": 10**400}


@pytest.mark.parametrize("record", [{}, {"verdict": 1}, {"widths": 3}, {"widths": [ENDLESS]}, {"widths": [HUGE]}])
def test_an_audit_that_cannot_be_read_is_left_out(stored: list[Result], record: dict[str, Any]) -> None:
    broken = replace(stored[0], record={**stored[0].record, **record} if record else {})
    found = audits(ResultSet(None, {}, [broken, stored[1]]))
    assert [a.build for a in found][-1:] == ["stock"] or record == {"verdict": 1}
    assert len(found) == (2 if record == {"verdict": 1} else 1)


def test_the_chapter_of_the_gpu_shows_them_and_every_number_has_a_home(stored: list[Result]) -> None:
    noisy = replace(made("patched", model="other"), controls={"watching_changed_rows": 4})
    results = ResultSet(None, {"gpu": {"name": "A Test GPU"}}, [*stored, as_result(noisy)], name="audit")
    chapter = gpu_chapters([Book("sent", "A Test GPU", results.machine, (), results)], {})[0]
    html = environment().get_template("article/audits.html.j2").render(gpu=chapter)
    soup = BeautifulSoup(f"<main>{html}</main>", "html.parser")
    assert list(_bare_numbers(soup)) == []
    text = " ".join(soup.get_text().split())
    assert "each of one build with one model: 3." in text and "predictions that hold: 3." in text
    assert "2: FLASH_ATTN_EXT (attn-0)" in text
    assert "flash attention off" in text and "not to be trusted, for these controls are not zero: watching" in text


def test_a_report_with_a_receipt_of_audits_is_sound(
    tmp_path: Path, stored: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    few_figures(monkeypatch, ())
    machine = {"cpu": "A CPU", "gpu": {"name": "A Test GPU"}}
    results = [replace(r, provenance={**r.provenance, "machine": machine}) for r in stored]
    write_audits(results, tmp_path / "receipts" / "audit-made-up")
    monkeypatch.setattr(paths, "receipts_dir", lambda: tmp_path / "receipts")
    monkeypatch.setenv("HIRAISHIN_HOME", str(tmp_path / "home"))
    outcome = build(tmp_path / "html", made_up.run())
    assert outcome.failures == []
    html = outcome.index.read_text(encoding="utf-8")
    assert "Audits, stock beside patched" in html and "2: FLASH_ATTN_EXT (attn-0)" in html
    assert check_site(outcome.index.parent) == []
    assert "audit" in (outcome.index.parent / "provenance.html").read_text(encoding="utf-8")
