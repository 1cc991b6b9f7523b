"""The site in a real headless browser: accessibility, no network, no script, nothing cut off."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from report_site import site  # noqa: F401  (a fixture)

from hiraishin.report import ReportOutcome

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page

pytestmark = [pytest.mark.slow, pytest.mark.browser]

# What headless chromium needs as root, and what keeps it from calling home.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SCHEMES = ("light", "dark")


def find_browser() -> str:
    """A chromium on this machine; installed with apt-get where that works without asking (root on Debian).

    Fails, and does not skip, when there is none: without a browser nobody has looked at the page.
    """
    found = os.environ.get("HIRAISHIN_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]):
            subprocess.run(command, check=False, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, **quiet)  # type: ignore[call-overload]
        found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.fail(
            "no chromium: install it with `apt-get install chromium`, or name one in HIRAISHIN_BROWSER", pytrace=False
        )
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("no playwright: install it with `make setup` (requirements.lock has it)", pytrace=False)
    executable = find_browser()
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def axe() -> str:
    """The source of axe-core, from the package that carries it."""
    try:
        import axe_playwright_python  # type: ignore[import-untyped]
    except ImportError:
        pytest.fail("no axe-core: install axe-playwright-python with `make setup`", pytrace=False)
    return (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


def pages(outcome: ReportOutcome) -> list[Path]:
    return sorted(outcome.index.parent.rglob("*.html"))


def listen(tab: Page) -> tuple[list[str], list[str]]:
    """Every address the page asks for, and everything it says: console, errors, dialogs, failed requests."""
    asked: list[str] = []
    said: list[str] = []

    def dismiss(dialog: Dialog) -> None:
        said.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    tab.on("request", lambda request: asked.append(request.url))
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("requestfailed", lambda request: said.append(f"failed: {request.url}"))
    tab.on("dialog", dismiss)
    return asked, said


def violations(browser: Browser, axe: str, page: Path, scheme: str) -> list[str]:
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 900})  # type: ignore[arg-type]
    try:
        tab = context.new_page()
        tab.goto(page.as_uri())
        tab.evaluate(axe)
        result: dict[str, Any] = tab.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    finally:
        context.close()
    return [f"{v['id']}: {v['help']}: {v['nodes'][0]['html'][:160]}" for v in result["violations"]]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_axe_finds_nothing_on_any_page(site: ReportOutcome, browser: Browser, axe: str, scheme: str) -> None:  # noqa: F811
    found = {f"{p.name}: {line}" for p in pages(site) for line in violations(browser, axe, p, scheme)}
    assert not found


def test_axe_would_find_a_picture_without_alt_text_and_pale_text(browser: Browser, axe: str, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        "<!doctype html><html lang=en><title>x</title><main><h1>x</h1><img src=a.png>"
        "<p style='color:#bbb;background:#fff'>pale</p></main>",
        encoding="utf-8",
    )
    found = " ".join(violations(browser, axe, page, "light"))
    assert "image-alt" in found
    assert "color-contrast" in found


def test_no_page_asks_for_anything_outside_or_complains(site: ReportOutcome, browser: Browser) -> None:  # noqa: F811
    root = site.index.parent.as_uri()
    for page in pages(site):
        context = browser.new_context(offline=True)
        tab = context.new_page()
        asked, said = listen(tab)
        tab.goto(page.as_uri(), wait_until="load")
        assert [url for url in asked if not url.startswith((root, "data:"))] == []
        assert said == []
        context.close()


@pytest.mark.parametrize("width", [400, 900, 1600])
def test_nothing_sticks_out_sideways(site: ReportOutcome, browser: Browser, width: int) -> None:  # noqa: F811
    for page in pages(site):
        context = browser.new_context(viewport={"width": width, "height": 900})
        tab = context.new_page()
        tab.goto(page.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, page.name
        context.close()


def test_zoomed_to_twice_the_size_the_text_still_fits(site: ReportOutcome, browser: Browser) -> None:  # noqa: F811
    context = browser.new_context(viewport={"width": 640, "height": 450}, device_scale_factor=2)
    tab = context.new_page()
    tab.goto(site.index.as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") <= 640
    context.close()


def test_it_reads_the_same_without_javascript(site: ReportOutcome, browser: Browser) -> None:  # noqa: F811
    texts = []
    for enabled in (True, False):
        context = browser.new_context(java_script_enabled=enabled)
        tab = context.new_page()
        tab.goto(site.index.as_uri())
        texts.append(tab.inner_text("main"))
        context.close()
    assert texts[0] == texts[1]


def test_dark_readers_get_the_dark_figures_and_print_gets_light_ones(site: ReportOutcome, browser: Browser) -> None:  # noqa: F811
    context = browser.new_context(color_scheme="dark")
    tab = context.new_page()
    tab.goto(site.index.as_uri())
    source = "() => [...document.querySelectorAll('figure img')].map(i => (i.loading = 'eager', i.currentSrc || i.src))"
    tab.evaluate(source)
    tab.wait_for_timeout(300)
    assert all(".dark.svg" in url for url in tab.evaluate(source))
    tab.emulate_media(media="print")
    tab.wait_for_timeout(300)
    assert all(".light.svg" in url for url in tab.evaluate(source))
    context.close()


def test_every_figure_loads_and_the_keyboard_reaches_the_article(site: ReportOutcome, browser: Browser) -> None:  # noqa: F811
    context = browser.new_context()
    tab = context.new_page()
    tab.goto(site.index.as_uri())
    tab.evaluate("document.querySelectorAll('img').forEach(i => i.loading = 'eager')")
    tab.wait_for_function("[...document.images].every(i => i.complete)")
    assert tab.evaluate("[...document.images].filter(i => !i.naturalWidth).map(i => i.src)") == []
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.id") == "main"
    context.close()


def test_hostile_text_is_shown_and_never_run(site: ReportOutcome, browser: Browser) -> None:  # noqa: F811
    context = browser.new_context()
    tab = context.new_page()
    tab.goto((site.index.parent / "notebooks" / "01_hostile.html").as_uri())
    assert "owned" not in tab.title()
    text = tab.inner_text("main")
    assert "<script>alert(1)</script>" in text
    assert "more characters are in the notebook file" in text
    assert tab.evaluate("document.scripts.length") == 0
    context.close()
