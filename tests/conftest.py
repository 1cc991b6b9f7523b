"""Fixtures shared by all tests: a tiny model, an empty store, a home folder of the test's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from hiraishin import paths
from hiraishin.results import Store

# A busy machine is no failure: nothing here is judged by its time.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Test files run side by side, and threads that spin at a barrier would keep the others from running. No bit depends on it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh ``HIRAISHIN_HOME``; native builds and models of the real one, if there are any, are linked in."""
    real = paths.home()
    made = tmp_path / "home"
    made.mkdir()
    for name in ("builds", "models"):
        if (real / name).is_dir():
            (made / name).symlink_to(real / name, target_is_directory=True)
    monkeypatch.setenv("HIRAISHIN_HOME", str(made))
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty result store."""
    return Store(tmp_path / "store")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic llama of two layers and 320 tokens in Q4_K_M (0.8 MB); any text can be a prompt."""
    from hiraishin.synthetic import make_shape

    before = os.environ.get("HIRAISHIN_HOME")
    os.environ["HIRAISHIN_HOME"] = str(tmp_path_factory.mktemp("tiny"))
    try:
        path = make_shape("tiny", "Q4_K_M", echo=lambda _: None)
    finally:
        if before is None:
            del os.environ["HIRAISHIN_HOME"]
        else:
            os.environ["HIRAISHIN_HOME"] = before
    return path
