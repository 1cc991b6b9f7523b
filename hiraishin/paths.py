"""Every folder the project uses, in one place.

``HIRAISHIN_HOME`` holds what can be made again and is shared between clones: sources, builds, models, results.
It defaults to ``.hiraishin`` inside the clone, which git ignores.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def _from_environment(name: str, default: Path) -> Path:
    value = os.environ.get(name, "").strip()
    return Path(os.path.abspath(os.path.expanduser(value))) if value else default


def home() -> Path:
    """The folder for everything that can be made again."""
    return _from_environment("HIRAISHIN_HOME", ROOT / ".hiraishin")


def sources_dir() -> Path:
    """Downloaded source archives and the native working copy."""
    return home() / "sources"


def builds_dir() -> Path:
    """Finished native builds: ``<backend>/<name>/``."""
    return home() / "builds"


def models_dir() -> Path:
    """Model files: the embedded one, requantized variants, synthetic shapes, downloads."""
    return home() / "models"


def results_dir() -> Path:
    """The result store."""
    return home() / "results"


def logs_dir() -> Path:
    """Native logs of the measuring processes and build logs."""
    return home() / "logs"


def scratch_dir() -> Path:
    """Memory maps that live as long as one measuring process."""
    return home() / "scratch"


def report_dir() -> Path:
    """Where the rendered site goes (``HIRAISHIN_REPORT`` overrides)."""
    return _from_environment("HIRAISHIN_REPORT", ROOT / "report" / "html")


def profiles_dir() -> Path:
    """Profiles that ship with the project."""
    return ROOT / "data" / "profiles"


def prompts_dir() -> Path:
    """Prompt sets that ship with the project."""
    return ROOT / "data" / "prompts"


def receipts_dir() -> Path:
    """Results of runs on other machines, small enough for git."""
    return ROOT / "data" / "receipts"


def published_dir() -> Path:
    """The post's own numbers, as data."""
    return ROOT / "data" / "published"


def notebooks_dir() -> Path:
    """The notebooks, in reading order."""
    return ROOT / "notebooks"


def figures_dir() -> Path:
    """Rendered figures of the published runs."""
    return ROOT / "figures"
