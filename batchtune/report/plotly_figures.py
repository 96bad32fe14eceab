"""Every figure as plotly draws it: which line, sign and colour stands for what, and how its axes run."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from functools import cache
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from batchtune.report.theme import (
    ABOVE,
    BARS,
    LIGHT,
    LINES,
    LONGEST_LINE,
    MARKERS,
    RIGHT,
    SERIES,
    SHADES,
    shortened,
    two_lines,
)
from batchtune.report.view.figure import Axis, AxisScale, Field, Plot, Scale, Series

_SHADES = [[share, LIGHT[name]] for share, name in SHADES]
_BESIDE = 18  # characters of the name of a low figure's axis
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_GAP = 0.12  # between figures, as a share of the height of one
_MOST_TICKS = 8
_TICKS = {"size": 11.5, "color": LIGHT["muted"]}
_BESIDE_POINTS = {"size": 11, "color": LIGHT["muted"]}
_Properties = dict[str, Any]  # of a part of the figure, as plotly names them


def draw(plot: Plot) -> go.Figure:
    """A figure with those below it, checked by plotly once as a whole: each change of a figure would be as slow."""
    rows = [plot, *plot.below]
    named = any(each.name for each in plot.series) or plot.field is not None
    shown = _layout(label(plot.title), _height(plot)) | {"showlegend": named}
    traces: list[_Properties] = []
    places = _places(len(rows))
    for row, each in enumerate(rows):
        which = str(row + 1) if row else ""
        xs, ys = ([point[at] for series in each.series for point in series.drawn] for at in (0, 1))
        drawn = [_contour(each.field)] if each.field is not None else []
        drawn += [_bars(series) if series.mark in BARS else _scatter(series, max(xs) * RIGHT) for series in each.series]
        traces += [trace | {"xaxis": f"x{which}", "yaxis": f"y{which}"} for trace in drawn]
        below = label(each.x.title) if row == len(rows) - 1 else ""
        beside = _lines(each.y.title, _BESIDE) if plot.below else label(each.y.title)
        shown[f"xaxis{which}"] = _axis(each.x, xs, RIGHT, below) | places[f"xaxis{which}"]
        shown[f"yaxis{which}"] = _axis(each.y, ys, ABOVE, beside) | places[f"yaxis{which}"]
    if plot.note:
        note = {"text": f"↑ {label(plot.note)}", "showarrow": False, "font": {"color": LIGHT["muted"]}}
        corner = {"x": 0, "y": 1, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "top"}
        shown["annotations"] = [note | corner]
    return go.Figure(data=traces, layout=shown)


@cache
def _places(rows: int) -> _Properties:
    """Where axes stand that share theirs across, with labels under the lowest; plotly takes long to say it."""
    return dict(make_subplots(rows, shared_xaxes=True, vertical_spacing=_GAP / rows).layout.to_plotly_json())


def _height(plot: Plot) -> int:
    if plot.below:
        return 240 + 130 * len(plot.below)
    if any(each.mark in BARS for each in plot.series):
        ticks = plot.y.ticks or {}
        return 130 + len(ticks) * (34 if any("<br>" in _lines(text) for text in ticks.values()) else 26)
    return 390


def _lines(text: str, width: int = LONGEST_LINE) -> str:
    return "<br>".join(map(label, two_lines(text, width)))


def _layout(title: str, height: int) -> _Properties:
    return {
        "title": {"text": title, "x": 0, "xref": "paper", "font": {"size": 16}},
        "template": {},
        "height": height,
        "font": {"family": _FONT, "size": 12.5, "color": LIGHT["ink"]},
        "paper_bgcolor": LIGHT["card"],
        "plot_bgcolor": LIGHT["card"],
        "margin": {"l": 8, "r": 16, "t": 64, "b": 8},
        "legend": {"orientation": "h", "x": 0, "y": 1 + 8 / height, "xanchor": "left", "yanchor": "bottom"},
        "hoverlabel": {
            "bgcolor": LIGHT["card"],
            "bordercolor": LIGHT["rule"],
            "font": {"color": LIGHT["ink"], "family": _FONT},
            "align": "left",
        },
        "hovermode": "closest",
        "barmode": "overlay",
    }


def _axis(of: Axis, values: Sequence[float], room: float, title: str) -> _Properties:
    """Thin rules, room for its name, and ticks at round values."""
    look: _Properties = {
        "title": {"text": title, "standoff": 8, "font": {"size": 12, "color": LIGHT["muted"]}},
        "gridcolor": LIGHT["rule"],
        "linecolor": LIGHT["faint"],
        "tickcolor": LIGHT["faint"],
        "tickfont": _TICKS,
        "zeroline": False,
        "automargin": True,
    }
    if of.ticks is not None:
        texts = [_lines(text) for text in of.ticks.values()]
        return look | {"tickmode": "array", "tickvals": list(of.ticks), "ticktext": texts}
    if of.log:
        return look | _logarithmic(of, [value for value in values if value > 0])
    ends = {"range": [0, of.end or max(values) * room], "nticks": 7} if of.from_zero else {}
    return look | {"tickformat": ",d" if of.whole else None} | ends


def _logarithmic(of: Axis, values: Sequence[float]) -> _Properties:
    """Ticks at powers of two, or at every digit of a decade, at 1, 2 and 5, or at the decades, as there is room."""
    exact = AxisScale.over(values, of)
    scale, decades = exact.with_room(1), math.log10(exact.high / exact.low)
    runs = {"type": "log", "range": [math.log10(scale.low), math.log10(scale.high)]}
    if of.whole:
        ticks = scale.round_values(_MOST_TICKS)
        return runs | {"tickmode": "array", "tickvals": ticks, "ticktext": [f"{tick:,.0f}" for tick in ticks]}
    if decades < 3:  # noqa: PLR2004 - about six ticks each
        return runs | {"dtick": "D1" if decades < 0.9 else "D2", "tickformat": "~g"}  # noqa: PLR2004
    return runs | {"dtick": 1, "exponentformat": "power"}


def _shared(series: Series) -> _Properties:
    """What bars and points have in common: their name, and what they say under the pointer."""
    hover = ["<br>".join(map(label, lines)) for lines in series.hover]
    said = {"hovertext": hover, "hoverinfo": "text"} if hover else {"hoverinfo": "skip"}
    return {"name": label(series.name), "showlegend": bool(series.name)} | said


def _bars(series: Series) -> _Properties:
    colour, width = BARS[series.mark]
    lengths, places = [point[0] for point in series.drawn], [point[1] for point in series.drawn]
    marker = {"color": LIGHT[colour], "line": {"width": 0}}
    bars = {"type": "bar", "x": lengths, "y": places, "orientation": "h", "width": width, "marker": marker}
    return bars | _shared(series)


def _scatter(series: Series, right: float) -> _Properties:
    points = list(series.points)
    if series.mark == "limit":
        points = [(0.0, series.drawn[0][1]), (right, series.drawn[0][1])]
    trace: _Properties = {at: [None if each is None else each[i] for each in points] for i, at in enumerate("xy")}
    modes = []
    if series.mark in LINES:
        modes.append("lines")
        colour, width, dash = LINES[series.mark]
        trace["line"] = {"color": _colour(colour, series), "width": width, "dash": dash}
    if series.mark in MARKERS:
        modes.append("markers")
        trace["marker"] = _marker(series)
    if series.mark == "area":
        trace["line"]["shape"] = "hv"
        trace |= {"fill": "tozeroy", "fillcolor": LIGHT["tint"]}
    if series.labels:
        modes.append("text")
        texts = [_lines(text) for text in series.labels]
        trace |= {"text": texts, "textposition": "bottom left", "textfont": _BESIDE_POINTS, "cliponaxis": False}
    if series.spread:
        rates = trace["y"]
        up, down = ([rate * factor for rate in rates] for factor in (series.spread - 1, 1 - 1 / series.spread))
        bar = {"color": trace["marker"]["color"], "thickness": 1.2}
        trace["error_y"] = {"type": "data", "symmetric": False, "array": up, "arrayminus": down} | bar
    return {"type": "scatter", "mode": "+".join(modes)} | trace | _shared(series)


def _colour(name: str, series: Series) -> str:
    return LIGHT[name or SERIES[series.group % len(SERIES)]]


def _marker(series: Series) -> _Properties:
    name, symbol, size = MARKERS[series.mark]
    colour = _colour(name, series)
    marker: _Properties = {"color": colour, "symbol": symbol, "size": size}
    marker["line"] = {"width": 2 if symbol.endswith("-open") else 0, "color": colour}
    if series.scale is not None:
        marker |= {"color": list(series.shades), "colorscale": _SHADES, "reversescale": not series.scale.least_is_best}
        marker |= {"line": {"width": 1, "color": colour}, "colorbar": _colour_bar(series.scale)}
    return marker


def _colour_bar(scale: Scale) -> _Properties:
    title = "".join(f"{label(line)}<br>" for line in textwrap.wrap(scale.title, 10))
    look = {"thickness": 10, "outlinewidth": 0, "len": 0.9, "tickfont": _TICKS}
    ticks = {"tickvals": list(scale.ticks), "ticktext": [*map(label, scale.ticks.values())]}
    return {"title": {"text": f"{title} ", "font": {"size": 11.5}}} | ticks | look


def _contour(field: Field) -> _Properties:
    lines = {"coloring": "none", "showlabels": True, "labelformat": "~g", "labelfont": _BESIDE_POINTS}
    return {
        "type": "contour",
        "x": list(field.x),
        "y": list(field.y),
        "z": [list(row) for row in field.z],
        "hovertext": [["<br>".join(map(label, text)) for text in row] for row in field.hover],
        "hoverinfo": "text",
        "name": label(field.name),
        "contours": lines | {"start": field.start, "end": field.end, "size": field.step},
        "line": {"color": LIGHT["faint"], "width": 1, "dash": "dot"},
        "showlegend": True,
        "showscale": False,
    }


def label(text: object) -> str:
    """A short text for plotly, which reads a few HTML tags: none is left in it."""
    return html.escape(shortened(text))
