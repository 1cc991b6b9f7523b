"""An SVG in fewer bytes: the same picture, text as text, the same bytes every time."""

from __future__ import annotations

import base64
import io
import re
import xml.etree.ElementTree as ET

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hiraishin.figures import style
from hiraishin.figures.slim import slim

SVG = "{http://www.w3.org/2000/svg}"


def written(*, dots: bool = True) -> str:
    """A figure as matplotlib writes it, with a dotted hatch, markers, a bitmap and clipped lines."""
    with mpl.rc_context(style.LIGHT.rc()):
        figure = Figure(figsize=(4, 3))
        axes = figure.subplots()
        axes.add_patch(Rectangle((0.2, 0.2), 0.5, 0.5, facecolor="#1a6fb5", hatch=".." if dots else "", edgecolor="w"))
        axes.plot(np.linspace(0, 1, 40), np.linspace(0, 1, 40) ** 2, "o-", label="a line & more")
        axes.plot(np.linspace(0, 1, 300), np.linspace(0, 1, 300), ".", rasterized=True)
        axes.set_title("1.23456 stays as it is")
        axes.legend()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue().decode()


@pytest.fixture(scope="module")
def pair() -> tuple[str, str]:
    before = written()
    return before, slim(before)


def test_it_is_a_third_or_less_and_the_same_every_time(pair: tuple[str, str]) -> None:
    before, after = pair
    assert 3 * len(after) < len(before)
    assert slim(before) == after
    assert slim(written()) == after


def test_every_text_and_its_place_is_kept(pair: tuple[str, str]) -> None:
    def texts(document: str) -> list[tuple[str, float, float]]:
        found = ET.fromstring(document).iter(f"{SVG}text")
        return [(t.text or "", float(t.get("x", 0)), float(t.get("y", 0))) for t in found]

    before, after = pair
    for new, old in zip(texts(after), texts(before), strict=True):
        assert new[0] == old[0]
        assert new[1:] == pytest.approx(old[1:], abs=0.0051)
    assert "1.23456 stays as it is" in after


def test_every_reference_still_leads_somewhere_and_no_id_is_kept_for_nothing(pair: tuple[str, str]) -> None:
    after = pair[1]
    ids = set(re.findall(r' id="([^"]+)"', after))
    used = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', after))
    assert {a or b for a, b in used} == ids


def test_every_coordinate_moves_by_less_than_a_hundredth_of_a_point(pair: tuple[str, str]) -> None:
    def lines(document: str) -> list[list[float]]:
        paths = [p.get("d", "") for p in ET.fromstring(document).iter(f"{SVG}path")]
        return [[float(n) for n in re.findall(r"-?[\d.]+", d)] for d in paths if not re.search("[Ca]", d)]

    for old, new in zip(lines(pair[0]), lines(pair[1]), strict=True):
        assert np.allclose(old, new, atol=0.0051)


def test_dots_of_a_hatch_become_arcs_of_the_same_centre_and_size(pair: tuple[str, str]) -> None:
    before, after = (re.search(r"<pattern.*?<path d=\"([^\"]*)\"", d, re.DOTALL) for d in (pair[0], pair[1]))
    assert before is not None
    assert after is not None
    circles = [c for c in before[1].split("M")[1:] if "C" in c]
    arcs = re.findall(r"M(\S+) (\S+)a(\S+) ", after[1])
    assert len(arcs) == len(circles) > 10
    for circle, (left, y, r) in zip(circles, arcs, strict=True):
        xs = [float(n) for n in re.findall(r"-?[\d.]+", circle)][0::2]
        ys = [float(n) for n in re.findall(r"-?[\d.]+", circle)][1::2]
        assert abs(min(xs) - float(left)) < 0.02
        assert abs((min(ys) + max(ys)) / 2 - float(y)) < 0.02
        assert abs((max(xs) - min(xs)) / 2 - float(r)) < 0.02


def test_a_curve_that_is_no_circle_is_left_alone() -> None:
    wave = "M0 0" + "".join(f"C{k} 1 {k + 0.5} -1 {k + 1} {k}" for k in range(8))
    document = f'<svg xmlns="http://www.w3.org/2000/svg"><path d="{wave}"/></svg>'
    assert wave in slim(document)


def test_a_bitmap_shows_the_same_picture(pair: tuple[str, str]) -> None:
    from PIL import Image

    def pixels(document: str) -> np.ndarray:
        found = re.search(r"data:image/png;base64,([^\"]+)", document)
        assert found is not None
        with Image.open(io.BytesIO(base64.b64decode(re.sub(r"\s", "", found[1])))) as image:
            return np.asarray(image.convert("RGBA"), dtype=float)

    before, after = (pixels(d) for d in pair)
    assert before.shape == after.shape
    assert np.abs(before[..., 3] - after[..., 3]).mean() < 2  # opacity: where the dots are


def test_two_pictures_on_one_page_share_no_class_and_no_id() -> None:
    one, other = slim(written()), slim(written(dots=False))
    names = [set(re.findall(r'(?: id| class)="([^"]+)"', d)) for d in (one, other)]
    assert not names[0] & names[1]
