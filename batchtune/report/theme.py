"""What figures share: colours on a light ground and on a dark one, what each mark looks like, its sign as SVG."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise

from markupsafe import Markup, escape

from batchtune.report.view.figure import Plot, Series

_COLOURS = {
    "page": ("#f6f6f3", "#0f1214"),
    "card": ("#ffffff", "#171b1e"),
    "ink": ("#1c2024", "#e7e9eb"),
    "muted": ("#646b73", "#a0a8b0"),
    "faint": ("#9aa1a8", "#6f7881"),
    "rule": ("#e3e4df", "#2b3136"),
    "accent": ("#0b6e5f", "#54cdb4"),
    "tint": ("#e4f1ee", "#16302b"),
    "baseline": ("#b4580a", "#f0a158"),
    "bad": ("#b3261e", "#ff7a70"),
    "caution": ("#fbf1da", "#33290f"),
    "second": ("#3659b5", "#8aa8ff"),
    "third": ("#7b4bb0", "#c59bf2"),
    "quick": ("#0c6b5d", "#5fe0c5"),
    "brisk": ("#63b59f", "#3a9c88"),
    "slow": ("#edc36b", "#a9863c"),
    "slowest": ("#d2733a", "#b5592a"),
}
"""Each colour on a light ground and on a dark one."""
LIGHT = {name: light for name, (light, _) in _COLOURS.items()}
DARK = {name: dark for name, (_, dark) in _COLOURS.items()}
SERIES = ("accent", "second", "third", "baseline")
"""One colour for each precision."""
_OF_GROUP = ""  # in place of a colour: that of the precision
MARKERS = {
    "fit": (_OF_GROUP, "circle", 8),
    "checked": (_OF_GROUP, "circle-open", 15),
    "oom": ("bad", "x-thin-open", 10),
    "failed": ("bad", "diamond-open", 10),
    "measured": (_OF_GROUP, "circle", 9),
    "knee": (_OF_GROUP, "circle-open", 18),
    "reading": (_OF_GROUP, "circle", 7),
    "open": ("faint", "circle-open", 10),
    "broken": ("bad", "x-thin-open", 10),
    "scored": ("card", "circle", 14),
    "prior": ("second", "diamond-open", 12),
    "edge": ("second", "line-ew-open", 12),
    "ring today": ("baseline", "circle-open", 24),
    "ring recommended": ("accent", "circle-open", 24),
    "gpu": (_OF_GROUP, "circle", 8),
    "peak": ("bad", "circle", 9),
}
"""Colour, sign and size of points, by their mark."""
LINES = {
    "fit": (_OF_GROUP, 1.5, "solid"),
    "reading": (_OF_GROUP, 1.5, "solid"),
    "limit": ("bad", 1.5, "dash"),
    "curve": (_OF_GROUP, 1.5, "dot"),
    "other": ("faint", 1.0, "solid"),
    "today": ("baseline", 2.0, "solid"),
    "recommended": ("accent", 2.5, "solid"),
    "target": ("ink", 1.2, "dash"),
    "area": ("accent", 1.5, "solid"),
}
"""Colour, width and dashes of lines."""
BARS = {"bar": ("brisk", 0.62), "inner bar": ("accent", 0.34)}
"""Colour and width of bars, in rows."""
SHADES = ((0.0, "quick"), (0.35, "brisk"), (0.7, "slow"), (1.0, "slowest"))
"""The colours between which a figure is told by its shade, the best first."""
SHADE_COUNT = 8
RIGHT, ABOVE = 1.04, 1.12
"""Room beyond the last point of an axis that begins at 0."""
_LONGEST_LABEL = 80
LONGEST_LINE = 26  # characters: of a GPU's name, for one
_PATHS = {
    "x-thin-open": "M-{0}-{0} {0} {0}M-{0} {0} {0}-{0}",
    "diamond-open": "M0-{0} {0} 0 0 {0}-{0} 0Z",
    "line-ew-open": "M-{0} 0H{0}",
}
_DASHES = {"solid": "none", "dash": "7 5", "dot": "2 4"}
_LARGEST_ICON = 13


def shades(colours: Mapping[str, str]) -> dict[str, str]:
    """A few colours on the way from the best to the worst, by name."""
    found = {}
    for at in range(SHADE_COUNT):
        share = at / (SHADE_COUNT - 1)
        (low, first), (high, last) = next(pair for pair in pairwise(SHADES) if share <= pair[1][0])
        ends = [[int(colours[name][i : i + 2], 16) for i in (1, 3, 5)] for name in (first, last)]
        mixed = [round(a + (b - a) * (share - low) / (high - low)) for a, b in zip(*ends, strict=True)]
        found[f"shade{at}"] = "#" + "".join(f"{value:02x}" for value in mixed)
    return found


def shortened(text: object) -> str:
    """A text of the user's as long as a figure has room for."""
    shown = str(text)
    return shown if len(shown) <= _LONGEST_LABEL else shown[: _LONGEST_LABEL - 1] + "…"


def two_lines(text: str, width: int = LONGEST_LINE) -> list[str]:
    """Two lines rather than a short first one: what tells GPUs apart is often at the end of their names."""
    return textwrap.wrap(text, width, max_lines=2, placeholder="…")


def tag(name: str, *inside: str, **attributes: object) -> Markup:
    """An element whose texts are escaped; an underscore in an attribute's name stands for a dash."""
    given = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value != "")
    shown = "".join(f' {key}="{escape(short(value))}"' for key, value in given)
    return Markup(f"<{name}{shown}>{''.join(map(escape, inside))}</{name}>")  # noqa: S704 - each part is escaped


def short(value: object) -> object:
    """A number as exact as a screen is."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


def title(lines: Sequence[str]) -> Markup:
    """What a browser shows where the pointer rests."""
    return tag("title", "\n".join(map(shortened, lines))) if lines else Markup()


def line_look(series: Series) -> dict[str, object]:
    """The attributes of a series' lines."""
    colour, width, dashes = LINES[series.mark]
    return {"class_": f"line {colour or colour_of(series)}", "stroke_width": width, "stroke_dasharray": _DASHES[dashes]}


def colour_of(series: Series) -> str:
    """The colour that tells a series' precision."""
    return SERIES[series.group % len(SERIES)]


def sign(series: Series, x: str, y: float, said: str = "", *, shade: str = "", most: float = 99) -> Markup:
    """The sign of a point of that series, no larger than `most`; `said` is the element with what is said about it."""
    colour, shape, size = MARKERS[series.mark]
    look, half = shade or colour or colour_of(series), min(size, most) / 2
    if shape in _PATHS:
        return tag("svg", tag("path", said, class_=f"open {look}", d=_PATHS[shape].format(short(half))), x=x, y=y)
    kind = "open" if shape.endswith("open") else "dot"
    return tag("circle", said, class_=f"{kind} {look}", cx=x, cy=y, r=half)


def shade_of(value: float, series: Series) -> str:
    """One of a few shades between those of the least and the greatest figure."""
    low, high = min(series.shades), max(series.shades)
    share = (value - low) / (high - low) if high > low else 0.0
    least_is_best = series.scale is None or series.scale.least_is_best
    return f"shade{round((share if least_is_best else 1 - share) * (SHADE_COUNT - 1))}"


def legend(plot: Plot) -> Markup:
    """What each sign stands for, as text beside small drawings."""
    entries = []
    for series in plot.series:
        if series.name and series.drawn:
            entries.append((_swatch(series), series.name))
            for value, text in series.scale.ticks.items() if series.scale else ():
                shaded = sign(series, "50%", 7, shade=shade_of(value, series), most=_LARGEST_ICON)
                entries.append((_icon(shaded), text))
    if plot.field is not None:
        line = tag("line", class_="line faint", x1=0, x2="100%", y1=7, y2=7)
        entries.append((_icon(line), f"{plot.field.name}, not measured"))
    items = [tag("li", icon, shortened(name)) for icon, name in entries]
    return tag("ul", *items, class_="legend") if items else Markup()


def _swatch(series: Series) -> Markup:
    parts = []
    if series.mark in BARS:
        parts.append(tag("rect", class_=f"bar {BARS[series.mark][0]}", x=4, y=2, width=16, height=10, rx=2))
    if series.mark in LINES:
        parts.append(tag("line", x1=0, x2="100%", y1=7, y2=7, **line_look(series)))
    if series.mark in MARKERS:
        parts.append(sign(series, "50%", 7, shade="shade0" if series.scale else "", most=_LARGEST_ICON))
    return _icon(*parts)


def _icon(*parts: Markup) -> Markup:
    return tag("svg", *parts, class_="icon", width=24, height=14, aria_hidden="true")
