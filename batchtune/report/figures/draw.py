"""Any figure as plotly draws it: which line, sign and colour stands for what, and how its axes run."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from batchtune.report.figures.theme import LIGHT, SERIES, axis, batch_axis, label, layout, log_axis
from batchtune.report.view.model import Axis, Field, Plot, Scale, Series

_OF_GROUP = ""  # in place of a colour: that of the precision
_MARKERS = {
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
_LINES = {
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
_BARS = {"bar": ("brisk", 0.62), "inner bar": ("accent", 0.34)}  # colour and width
_SHADES = [[0, LIGHT["quick"]], [0.35, LIGHT["brisk"]], [0.7, LIGHT["slow"]], [1, LIGHT["slowest"]]]
_RIGHT, _ABOVE = 1.04, 1.12  # room beyond the last point
_LONGEST_LINE, _BESIDE = 26, 18  # characters: of a GPU's name, of the name of a low figure's axis


def draw(plot: Plot) -> go.Figure:
    """A figure with those below it, checked by plotly once as a whole: each change of a figure would be as slow."""
    rows = [plot, *plot.below]
    named = any(each.name for each in plot.series) or plot.field is not None
    shown = layout(label(plot.title), height=_height(plot), showlegend=named, barmode="overlay")
    traces: list[dict[str, Any]] = []
    for row, each in enumerate(rows):
        which = str(row + 1) if row else ""
        xs, ys = ([point[at] for series in each.series for point in series.drawn] for at in (0, 1))
        drawn = [_contour(each.field)] if each.field is not None else []
        drawn += [
            _bars(series) if series.mark in _BARS else _scatter(series, max(xs) * _RIGHT) for series in each.series
        ]
        traces += [trace | {"xaxis": f"x{which}", "yaxis": f"y{which}"} for trace in drawn]
        below = label(each.x.title) if row == len(rows) - 1 else ""
        beside = _lines(each.y.title, _BESIDE) if plot.below else label(each.y.title)
        shown[f"xaxis{which}"] = _axis(each.x, xs, _RIGHT, below) | _across(row, len(rows))
        place = {"anchor": f"x{which}", "domain": _heights(row, len(rows))}
        shown[f"yaxis{which}"] = _axis(each.y, ys, _ABOVE, beside) | place
    if plot.note:
        note = {"text": f"↑ {label(plot.note)}", "showarrow": False, "font": {"color": LIGHT["muted"]}}
        corner = {"x": 0, "y": 1, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "top"}
        shown["annotations"] = [note | corner]
    return go.Figure(data=traces, layout=shown)


def _across(row: int, rows: int) -> dict[str, Any]:
    """The x axis of a row: all of them run alike, and the lowest is labelled."""
    above = {"matches": f"x{rows}", "showticklabels": False} if row < rows - 1 else {}
    return {"anchor": f"y{row + 1}" if row else "y", "domain": [0.0, 1.0]} | above


def _heights(row: int, rows: int) -> list[float]:
    """Where a row begins and ends, counted from the bottom of the figure."""
    gap = 0.12 / rows
    height = (1 - gap * (rows - 1)) / rows
    bottom = (rows - 1 - row) * (height + gap)
    return [bottom, min(bottom + height, 1.0)]


def _height(plot: Plot) -> int:
    if plot.below:
        return 240 + 130 * len(plot.below)
    if any(each.mark in _BARS for each in plot.series):
        ticks = plot.y.ticks or {}
        return 130 + len(ticks) * (34 if any("<br>" in _lines(text) for text in ticks.values()) else 26)
    return 390


def _lines(text: str, width: int = _LONGEST_LINE) -> str:
    """Two lines rather than a short first one: what tells GPUs apart is often at the end of their names."""
    return "<br>".join(map(label, textwrap.wrap(text, width, max_lines=2, placeholder="…")))


def _axis(of: Axis, values: Sequence[float], room: float, title: str) -> dict[str, Any]:
    if of.ticks is not None:
        texts = [_lines(text) for text in of.ticks.values()]
        return axis(title, tickmode="array", tickvals=list(of.ticks), ticktext=texts)
    if of.log:
        known = [value for value in values if value > 0]
        return (batch_axis if of.whole else log_axis)(title, min(known), max(known))
    ends: dict[str, Any] = {"range": [0, of.end or max(values) * room], "nticks": 7} if of.from_zero else {}
    return axis(title, tickformat=",d" if of.whole else None, **ends)


def _shared(series: Series) -> dict[str, Any]:
    """What bars and points have in common: their name, and what they say under the pointer."""
    hover = ["<br>".join(map(label, lines)) for lines in series.hover]
    said = {"hovertext": hover, "hoverinfo": "text"} if hover else {"hoverinfo": "skip"}
    return {"name": label(series.name), "showlegend": bool(series.name)} | said


def _bars(series: Series) -> dict[str, Any]:
    colour, width = _BARS[series.mark]
    lengths, places = [point[0] for point in series.drawn], [point[1] for point in series.drawn]
    marker = {"color": LIGHT[colour], "line": {"width": 0}}
    bars = {"type": "bar", "x": lengths, "y": places, "orientation": "h", "width": width, "marker": marker}
    return bars | _shared(series)


def _scatter(series: Series, right: float) -> dict[str, Any]:
    points = list(series.points)
    if series.mark == "limit":
        points = [(0.0, series.drawn[0][1]), (right, series.drawn[0][1])]
    trace: dict[str, Any] = {at: [None if each is None else each[i] for each in points] for i, at in enumerate("xy")}
    modes = []
    if series.mark in _LINES:
        modes.append("lines")
        colour, width, dash = _LINES[series.mark]
        trace["line"] = {"color": _colour(colour, series), "width": width, "dash": dash}
    if series.mark in _MARKERS:
        modes.append("markers")
        trace["marker"] = _marker(series)
    if series.mark == "area":
        trace["line"]["shape"] = "hv"
        trace |= {"fill": "tozeroy", "fillcolor": LIGHT["tint"]}
    if series.labels:
        modes.append("text")
        font = {"size": 11, "color": LIGHT["muted"]}
        texts = [_lines(text) for text in series.labels]
        trace |= {"text": texts, "textposition": "bottom left", "textfont": font, "cliponaxis": False}
    if series.spread:
        rates = trace["y"]
        up, down = ([rate * factor for rate in rates] for factor in (series.spread - 1, 1 - 1 / series.spread))
        bar = {"color": trace["marker"]["color"], "thickness": 1.2}
        trace["error_y"] = {"type": "data", "symmetric": False, "array": up, "arrayminus": down} | bar
    return {"type": "scatter", "mode": "+".join(modes)} | trace | _shared(series)


def _colour(name: str, series: Series) -> str:
    return LIGHT[name] if name else SERIES[series.group % len(SERIES)]


def _marker(series: Series) -> dict[str, Any]:
    name, symbol, size = _MARKERS[series.mark]
    colour = _colour(name, series)
    marker: dict[str, Any] = {"color": colour, "symbol": symbol, "size": size}
    marker["line"] = {"width": 2 if symbol.endswith("-open") else 0, "color": colour}
    if series.scale is not None:
        marker |= {"color": list(series.shades), "colorscale": _SHADES, "reversescale": not series.scale.least_is_best}
        marker |= {"line": {"width": 1, "color": colour}, "colorbar": _colour_bar(series.scale)}
    return marker


def _colour_bar(scale: Scale) -> dict[str, Any]:
    title = "".join(f"{label(line)}<br>" for line in textwrap.wrap(scale.title, 10))
    look = {"thickness": 10, "outlinewidth": 0, "len": 0.9, "tickfont": {"size": 11.5, "color": LIGHT["muted"]}}
    ticks = {"tickvals": list(scale.ticks), "ticktext": [*map(label, scale.ticks.values())]}
    return {"title": {"text": f"{title} ", "font": {"size": 11.5}}} | ticks | look


def _contour(field: Field) -> dict[str, Any]:
    font = {"size": 11, "color": LIGHT["muted"]}
    lines = {"coloring": "none", "showlabels": True, "labelformat": "~g", "labelfont": font}
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
