"""``hiraishin doctor`` names what is missing, and the command that mends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hiraishin import doctor
from hiraishin.native import tools


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HIRAISHIN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def findings() -> dict[str, doctor.Finding]:
    return {finding.what: finding for finding in doctor.examine()}


def test_a_fresh_clone_is_told_how_to_get_builds_and_model(
    empty_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = findings()
    assert "./build.sh stock" in found["cpu stock build"].fix
    assert "./build.sh patched" in found["cpu patched build"].fix
    assert found["default model"].fix == "hiraishin model"
    assert doctor.doctor() == 1
    printed = capsys.readouterr().out
    assert printed.count("missing ") >= 3
    assert "-> hiraishin model" in printed


def test_a_missing_tool_is_named_with_its_package(
    empty_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "search_path", lambda: str(tmp_path))
    found = findings()
    for name, package in {"c++": "g++", "patch": "patch", "make": "make", "ninja": "ninja-build"}.items():
        assert not found[name].ok
        assert f"apt-get install {package} " in found[name].fix


def test_a_model_that_is_cut_short_is_not_called_fine(empty_home: Path) -> None:
    (empty_home / "models").mkdir(parents=True)
    (empty_home / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    finding = findings()["default model"]
    assert "cut short" in finding.state
    assert not finding.ok


def test_a_home_that_cannot_be_made_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIRAISHIN_HOME", "/proc/hiraishin")
    finding = findings()["HIRAISHIN_HOME"]
    assert not finding.ok
    assert "HIRAISHIN_HOME" in finding.fix


def test_what_the_default_profile_can_do_without_is_no_failure(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    optional = doctor.Finding("nvcc", "not found", "install it", required=False)
    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Finding("Python", "3.11"), optional])
    assert doctor.doctor() == 0
    assert "optional" in capsys.readouterr().out
