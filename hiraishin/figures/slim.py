"""The same picture in fewer bytes: what matplotlib writes into an SVG that no reader sees is taken out.

Gone are the metadata block, comments, indentation and ids that nothing refers to; coordinates keep two decimals (a hundredth
of a point), styles that every text repeats become classes, embedded bitmaps get a palette. Text stays text, and equal input
gives equal bytes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re

_TAG = re.compile(r"<[^>]*>")
_NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
_COORDINATES = re.compile(r'\b(d|x|y|x1|y1|x2|y2|width|height|points|transform|cx|cy|r)="([^"]*)"')
_TURNED_BY_NOTHING = re.compile(r'\s*transform="rotate\(-?0 [^)]*\)"')
_BITMAP = re.compile(r'"data:image/png;base64,([^"]*)"')
_TIGHT, _FIRST = re.compile(r"([:;,]) "), r"\1"
_CIRCLE = re.compile(r"M([-\d. ]+(?:C[-\d. ]+){8})z?")
_COLOURS = 48


def slim(text: str) -> str:
    """An SVG document of matplotlib's, smaller; what it shows does not change."""
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = _BITMAP.sub(_with_palette, text)
    used = set(re.findall(r'href="#([^"]+)"', text)) | set(re.findall(r"url\(#([^)]+)\)", text))
    text = _TAG.sub(lambda m: _tag(m[0], used), text)
    text = re.sub(r">\s+<", "><", text)
    text = _short_names(_classes(text))
    for _ in range(3):  # groups without a property, around one element or none
        text = re.sub(r"<g>(<(text|path|use)\b[^>]*?(?:/>|>[^<]*</\2>))?</g>", lambda m: m[1] or "", text)
    return text.rstrip() + "\n"


def _tag(tag: str, used: set[str]) -> str:
    if tag.startswith(("<?", "<!", "</")):
        return tag
    tag = re.sub(r'\s+id="([^"]*)"', lambda m: m[0] if m[1] in used else "", tag)
    tag = _TURNED_BY_NOTHING.sub("", tag)
    if "data:" not in tag:
        tag = _COORDINATES.sub(lambda m: f'{m[1]}="{_coordinates(m[2])}"', tag)
    return re.sub(r"\s+", " ", tag) if "data:" not in tag else tag


def _coordinates(value: str) -> str:
    value = _NUMBER.sub(lambda m: _short(float(m[0])), value)
    value = re.sub(r"\s+", " ", value).strip()
    return _CIRCLE.sub(_arcs, re.sub(r"\s*([MLCQzZ])\s*", r"\1", value))


def _arcs(match: re.Match[str]) -> str:
    """A circle that is drawn as eight curves (a dotted hatch is full of them), as two arcs."""
    numbers = [float(n) for n in match[1].replace("C", " ").split()]
    points = list(zip(numbers[0::2], numbers[1::2], strict=True))[0::3]
    x, y = (sum(p[axis] for p in points[1:]) / 8 for axis in (0, 1))
    radii = [math.hypot(px - x, py - y) for px, py in points]
    r = sum(radii) / len(radii)
    if max(abs(each - r) for each in radii) > 0.02:
        return match[0]
    left, r2, d = _short(x - r), _short(r), _short(2 * r)
    return f"M{left} {_short(y)}a{r2} {r2} 0 1 0 {d} 0a{r2} {r2} 0 1 0 -{d} 0z"


def _short(number: float) -> str:
    shown = f"{number:.2f}".rstrip("0").rstrip(".")
    return "0" if shown in ("-0", "") else shown


def _classes(text: str) -> str:
    """Styles that occur often enough are said once, as classes."""
    found: dict[str, int] = {}
    for style in re.findall(r' style="([^"]*)"', text):
        found[style] = found.get(style, 0) + 1
    worth = [s for s, n in found.items() if n > 2 and len(s) > 12]
    own = "s" + hashlib.sha256(text.encode()).hexdigest()[:4]  # pictures inlined on one page must not share a class
    names = {s: f"{own}-{k}" for k, s in enumerate(sorted(worth, key=lambda s: (-found[s], s)))}
    if not names:
        return text
    text = re.sub(r' style="([^"]*)"', lambda m: f' class="{names[m[1]]}"' if m[1] in names else m[0], text)
    rules = "".join(f".{name}{{{_TIGHT.sub(_FIRST, style)}}}" for style, name in names.items())
    return text.replace("</style>", rules + "</style>", 1)


def _short_names(text: str) -> str:
    """Ids of clip paths, markers and hatches, short; they start with a hash of the picture, like the classes."""
    own = "i" + hashlib.sha256(text.encode()).hexdigest()[:4]
    names = {name: f"{own}-{k}" for k, name in enumerate(dict.fromkeys(re.findall(r' id="([^"]+)"', text)))}
    return re.sub(r'( id="|href="#|url\(#)([^")]+)', lambda m: m[1] + names.get(m[2], m[2]), text)


def _with_palette(match: re.Match[str]) -> str:
    from PIL import Image

    raw = base64.b64decode(re.sub(r"\s", "", match[1]))
    with Image.open(io.BytesIO(raw)) as image:
        few = image.convert("RGBA").quantize(_COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    few.save(buffer, format="PNG", optimize=True)
    best = min(raw, buffer.getvalue(), key=len)
    return f'"data:image/png;base64,{base64.b64encode(best).decode()}"'
