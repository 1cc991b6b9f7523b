"""What enters a key: code that can change a value does, prose does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from hiraishin import provenance


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path)
    (tmp_path / "measure.py").write_text(
        '"""Doc."""\nfrom hiraishin.helper import f\n\n\ndef g():\n    """Doc."""\n    return f() + 1\n'
    )
    (tmp_path / "helper.py").write_text("def f():\n    return 1\n")
    (tmp_path / "other.py").write_text("x = 1\n")
    return tmp_path


def test_prose_comments_and_layout_rerun_nothing(package: Path) -> None:
    before = provenance.code_version("measure")
    text = (package / "measure.py").read_text()
    (package / "measure.py").write_text(text.replace('"""Doc."""', '"""Another."""').replace("+ 1", "+  1  # why"))
    assert provenance.code_version("measure") == before


def test_a_changed_function_reruns_what_imports_it(package: Path) -> None:
    before = provenance.code_version("measure"), provenance.code_version("other")
    (package / "helper.py").write_text("def f():\n    return 2\n")
    assert provenance.code_version("measure") != before[0]
    assert provenance.code_version("other") == before[1]


def test_a_changed_number_reruns_its_own_module(package: Path) -> None:
    before = provenance.code_version("measure")
    (package / "measure.py").write_text((package / "measure.py").read_text().replace("+ 1", "+ 2"))
    assert provenance.code_version("measure") != before


def test_every_measuring_module_has_a_version() -> None:
    versions = {name: provenance.code_version(name) for name in ("replay", "timing", "localize", "evaluate")}
    assert len(set(versions.values())) == 4
