"""The linter finds what is planted into a sound report, and nothing in the sound one."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import report_synthetic as made_up
from report_site import build, few_figures

from hiraishin import paths
from hiraishin.report.check import SIZE_BUDGET, check_site


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("HIRAISHIN_HOME", str(root / "home"))
        monkeypatch.setattr("hiraishin.paths.receipts_dir", lambda: root / "no-receipts")
        few_figures(monkeypatch, ("float-order",))
        outcome = build(root / "html", made_up.run(), check=False)
    assert outcome.failures == []
    return outcome.index.parent


@pytest.fixture
def site(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "html"))


def test_a_sound_report_has_no_problem(sound: Path) -> None:
    assert [str(p) for p in check_site(sound)] == []


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(site: Path) -> None:
        text = (site / name).read_text(encoding="utf-8")
        assert old in text, f"{name} does not hold {old!r}"
        (site / name).write_text(text.replace(old, new, 1), encoding="utf-8")

    return change


def insert(html: str, name: str = "index.html") -> Callable[[Path], None]:
    return edit(name, "</main>", f"{html}</main>")


def fatten(site: Path) -> None:
    (site / "data" / "large.bin").write_bytes(b"\0" * SIZE_BUDGET)


def change_a_claim(site: Path) -> None:
    path = site / "data" / "claims.json.gz"
    document = json.loads(gzip.decompress(path.read_bytes()))
    for claim in document["claims"]:
        if claim["id"] == "replay.first_differing_width" and claim["build"] == "stock":
            claim["value"] = 7
    path.write_bytes(gzip.compress(json.dumps(document).encode()))


def drop(name: str) -> Callable[[Path], None]:
    return lambda site: (site / name).unlink()


def blank_provenance(site: Path) -> None:
    (site / "figures" / "float-order.json").write_text("{}", encoding="utf-8")


PLANTED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a link outside": (insert('<a href="https://example.org">x</a>'), "refers outside the report"),
    "a picture from outside": (
        insert('<img src="//example.org/a.png" alt="a picture of something">'),
        "refers outside the report",
    ),
    "a link to the disk's root": (insert('<a href="/etc/hosts">x</a>'), "starts at the root"),
    "a link to a file that is not there": (insert('<a href="nowhere.html">x</a>'), "leads nowhere"),
    "a link out of the folder": (insert('<a href="../../secret.html">x</a>'), "leads nowhere"),
    "a link to a place that is not there": (
        insert('<a href="receipts.html#nope">x</a>'),
        "names a place that is not there",
    ),
    "a script": (insert("<script>1</script>"), "brings a script"),
    "a handler": (insert("<p onclick='x()'>x</p>"), "brings a script"),
    "a style sheet from outside": (
        edit("assets/style.css", "* {", "@import 'http://x/y.css'; * {"),
        "imports another sheet",
    ),
    "a font from outside": (edit("assets/style.css", 'url("fonts/', 'url("https://x/'), "refers outside the report"),
    "a missing font": (
        drop("assets/fonts/source-code-pro-latin-wght-normal.woff2"),
        "refers to a file that is not there",
    ),
    "a picture without alt text": (insert('<img src="assets/icon.svg" alt="">'), "has no alt text"),
    "a file name as alt text": (insert('<img src="assets/icon.svg" alt="icon.svg">'), "is a file name"),
    "an id used twice": (insert('<p id="main">x</p>'), "is used 2 times"),
    "a label that is not there": (insert('<div aria-labelledby="nope">x</div>'), "names the id 'nope'"),
    "a second first-level heading": (insert("<h1>x</h1>"), "first-level headings"),
    "a page without language": (edit("data.html", '<html lang="en">', "<html>"), "has no lang"),
    "a figure without data": (insert('<figure id="f"><figcaption>x</figcaption></figure>'), "has no data"),
    "a figure without provenance": (insert('<figure id="f"><figcaption>x</figcaption></figure>'), "has no provenance"),
    "a figure whose provenance is gone": (drop("figures/float-order.json"), "cannot be read"),
    "a figure whose provenance is empty": (
        blank_provenance,
        "does not say",
    ),
    "a typed number": (insert("<p>It is 3 times faster.</p>"), "a number without a claim"),
    "a typed number in a table": (insert("<table><tr><td>0.338</td></tr></table>"), "a number without a claim"),
    "a number of no claim": (insert('<p><data class="claim" value="3">3</data></p>'), "names no claim"),
    "a number of a claim that no run makes": (
        insert('<p><data class="claim" value="3" data-claim="a.b">3</data></p>'),
        "which no run makes",
    ),
    "a number of no kind": (insert('<p><data value="3">3</data></p>'), "is of no kind"),
    "a published number that is another": (
        insert('<p><data class="published" value="3" data-key="price.stock_9">3</data></p>'),
        "is not the published",
    ),
    "a claim that has another value": (change_a_claim, "is not a value of replay.first_differing_width"),
    "a script in a figure": (
        edit("figures/float-order.light.svg", "</svg>", "<script>1</script></svg>"),
        "brings a script",
    ),
    "a figure that loads something": (
        edit("figures/float-order.light.svg", "</svg>", '<image href="http://x/y.png"/></svg>'),
        "refers outside itself",
    ),
    "too many bytes": (fatten, f"the largest files: data/large.bin {SIZE_BUDGET:,}"),
    "no marker": (drop("report.json"), "was not finished"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_it_finds(site: Path, name: str) -> None:
    plant, words = PLANTED[name]
    plant(site)
    assert any(words in str(p) for p in check_site(site)), [str(p) for p in check_site(site)]


def test_a_folder_without_a_report_is_a_problem(tmp_path: Path) -> None:
    assert [str(p) for p in check_site(tmp_path)] == ["index.html: is missing: this folder holds no report"]


@pytest.mark.slow
def test_the_command_exits_by_what_it_found(site: Path) -> None:
    def status() -> int:
        command = [sys.executable, "-m", "hiraishin", "report", "--check", str(site)]
        return subprocess.run(command, cwd=paths.ROOT, check=False, capture_output=True).returncode

    assert status() == 0
    insert("<p>3 times</p>")(site)
    assert status() == 1
