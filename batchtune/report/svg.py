"""Every figure as static SVG: it needs no script, takes the width that there is and its colours from the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby, pairwise

from markupsafe import Markup

from batchtune.report.theme import (
    ABOVE,
    BARS,
    LINES,
    MARKERS,
    RIGHT,
    colour_of,
    legend,
    line_look,
    shade_of,
    short,
    shortened,
    sign,
    tag,
    title,
    two_lines,
)
from batchtune.report.view.figure import Axis, AxisScale, Field, Plot, Point, Series, drawable, tick_text

_HEIGHT, _LOW_HEIGHT, _ROW_HEIGHT = 280, 76, 30  # of a figure, of one of several, of a bar
_HEAD, _LINE, _GAP = 26, 14, 18  # above an axis for its name, one line of labels, between two figures
_CHARACTER = 6.6  # the width of one in a label
_NARROW = 308  # pixels across on a phone, both axes' labels included: what does not touch there never does
_WIDE = 1000  # units across of a line, however wide it is drawn
_MOST_CORNERS = 3000  # of the lines of one mark
_MOST_LEVELS = 12
_Corner = tuple[float, float]  # of a line, in units across and pixels downward


def chart(plot: Plot) -> Markup:
    """A figure with those below it and its legend; where it has no point, nothing."""
    frames = _frames(plot)
    if not frames:
        return Markup()
    labels = [line for frame in frames for _, text in frame.ticks(frame.ys) for line in two_lines(text)]
    gutter = max(map(len, labels), default=0) * _CHARACTER + 10
    frames = [replace(frame, narrow=_NARROW - gutter) for frame in frames]
    last, lanes = frames[-1], _below(frames[-1])
    height = last.bottom + _LINE * (2 + max((lane for lane, _ in lanes), default=0) + bool(last.plot.x.title))
    beside = [part for frame in frames for part in _beside(frame, gutter)]
    inside = [part for frame in frames for part in _inside(frame)] + [text for _, text in lanes]
    inside.append(tag("text", last.plot.x.title, class_="name middle", x="50%", y=height - 6))
    parts = [tag("svg", *beside, width=gutter, height=height), tag("svg", *inside, width="100%", height=height)]
    return legend(plot) + tag("div", *parts, class_="drawing", role="img", aria_label=_said(plot))


@dataclass(frozen=True, slots=True)
class _Frame:
    """One pair of axes and where it stands: pixels downward, shares across."""

    plot: Plot
    series: Sequence[Series]
    xs: AxisScale
    ys: AxisScale
    top: float
    height: float
    narrow: float = _NARROW  # the width of the plane on a phone

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def x(self, value: float) -> str:
        return f"{100 * self.xs.share(value):.2f}%"

    def y(self, value: float) -> float:
        return self.bottom - self.height * self.ys.share(value)

    def corner(self, point: Point) -> _Corner:
        """Where a point lies, within the axes or beyond them."""
        return _WIDE * self.xs.position(point[0]), self.height * (1 - self.ys.position(point[1]))

    def lines(self, *parts: Markup) -> Markup:
        """Lines that keep their width however wide they are drawn, without what lies beyond the axes."""
        size = {"viewBox": f"0 0 {_WIDE} {self.height}", "preserveAspectRatio": "none", "width": "100%"}
        return tag("svg", *parts, class_="lines", y=self.top, height=self.height, **size)

    def ticks(self, scale: AxisScale) -> list[tuple[float, str]]:
        if scale.axis.ticks is not None:
            return list(scale.axis.ticks.items())
        most = round(self.narrow / 40 if scale is self.xs else max(3, self.height / 45))
        return [(value, tick_text(value)) for value in scale.round_values(most)]


def _frames(plot: Plot) -> list[_Frame]:
    """The figures that have points, one under the other, with one scale across."""
    known = [(each, [_known(series, each) for series in each.series]) for each in (plot, *plot.below)]
    shown = [(each, drawn) for each, series in known if (drawn := [one for one in series if one.drawn])]
    points = [point for _, series in shown for each in series for point in each.drawn]
    frames: list[_Frame] = []
    for each, series in shown:
        values, height = [y for one in series for _, y in one.drawn], _LOW_HEIGHT if plot.below else _HEIGHT
        if each.y.ticks is not None:
            values, height = [min(each.y.ticks) - 0.5, max(each.y.ticks) + 0.5], _ROW_HEIGHT * len(each.y.ticks)
        top = (frames[-1].bottom + _GAP if frames else 0) + (_HEAD if each.y.title else 8)
        xs = _scale(each.x, [x for x, _ in points], RIGHT)
        frames.append(_Frame(each, series, xs, _scale(each.y, values, ABOVE), top, height))
    return frames


def _known(series: Series, plot: Plot) -> Series:
    """A series without the points that have no place on its axes; a limit has none across."""
    points = [point if point and drawable([point], plot.x, plot.y) else None for point in series.points]
    return replace(series, points=points)


def _scale(axis: Axis, values: Sequence[float], beyond: float) -> AxisScale:
    found = AxisScale.over(values, axis)
    return found if axis.ticks is not None else found.with_room(beyond)


def _beside(frame: _Frame, gutter: float) -> Iterator[Markup]:
    """The labels of the left axis, and its name above them."""
    yield tag("text", frame.plot.y.title, class_="name", x=0, y=frame.top - 12)
    for value, text in frame.ticks(frame.ys):
        lines = two_lines(text) or [""]
        for at, line in enumerate(lines):
            y = frame.y(value) + 4 + (at - (len(lines) - 1) / 2) * (_LINE - 1)
            yield tag("text", line, class_="end", x=gutter - 8, y=y)


def _below(frame: _Frame) -> list[tuple[int, Markup]]:
    """The labels under the lowest axis, each with the line it is in: as many as it takes that none touches another."""
    placed: list[tuple[int, Markup]] = []
    ends: list[float] = []
    for value, text in frame.ticks(frame.xs):
        centre, half = frame.narrow * frame.xs.share(value), len(text) * _CHARACTER / 2
        lane = next((at for at, end in enumerate(ends) if end < centre - half), len(ends))
        ends[lane : lane + 1] = [centre + half + _CHARACTER]
        y = frame.bottom + 18 + lane * _LINE
        placed.append((lane, tag("text", shortened(text), class_="middle", x=frame.x(value), y=y)))
    return placed


def _inside(frame: _Frame) -> Iterator[Markup]:
    """The rules of both axes, then the points; later ones cover earlier ones."""
    bars = frame.plot.y.ticks is not None
    for value, _ in [] if bars else frame.ticks(frame.ys):
        yield tag("line", class_="rule", x1=0, x2="100%", y1=frame.y(value), y2=frame.y(value))
    for value, _ in frame.ticks(frame.xs):
        yield tag("line", class_="rule", x1=frame.x(value), x2=frame.x(value), y1=frame.top, y2=frame.bottom + 4)
    if not bars:
        yield tag("line", class_="axis", x1=0, x2="100%", y1=frame.bottom, y2=frame.bottom)
    if frame.plot.note:
        yield tag("text", f"↑ {frame.plot.note}", x=6, y=frame.top + 12)
    texts = _Texts(frame)
    if frame.plot.field is not None:
        yield from _contours(frame.plot.field, frame, texts)
    for series in frame.series:
        yield from _bars(series, frame) if series.mark in BARS else _lines(series, frame)
        yield from _points(series, frame)
    for series in frame.series:
        for point, text in zip(series.points, series.labels, strict=False):
            if text and point is not None:
                yield texts.beside(*frame.corner(point), shortened(text))


class _Texts:
    """Texts beside points, moved up or down where another one has the place, on a phone too; else left out."""

    def __init__(self, frame: _Frame) -> None:
        self._frame = frame
        self._taken: list[tuple[float, float, float]] = []

    def beside(self, across: float, down: float, text: str) -> Markup:
        width, share = len(text) * _CHARACTER, across / _WIDE
        before = share > 0.5  # noqa: PLR2004 - where there is more room
        left = self._frame.narrow * share + (-width - 8 if before else 8)
        for lift in (_LINE, -6, 2 * _LINE, -6 - _LINE, 3 * _LINE, -6 - 2 * _LINE):
            y = self._frame.top + min(max(down + lift, _LINE), self._frame.height - 4)
            if all(abs(y - other) >= _LINE or left > end or left + width < start for other, start, end in self._taken):
                self._taken.append((y, left, left + width))
                return tag("text", text, class_="end beside" if before else "beside", x=f"{100 * share:.2f}%", y=y)
        return Markup()


def _bars(series: Series, frame: _Frame) -> Iterator[Markup]:
    colour, share = BARS[series.mark]
    for point, said in _with_hover(series):
        height = share * _ROW_HEIGHT
        y = frame.y(point[1]) - height / 2
        yield tag("rect", title(said), class_=f"bar {colour}", x=0, y=y, width=frame.x(point[0]), height=height, rx=2)


def _lines(series: Series, frame: _Frame) -> Iterator[Markup]:
    if series.mark not in LINES:
        return
    if series.mark == "limit":
        y = frame.y(series.drawn[0][1])
        yield tag("line", x1=0, x2="100%", y1=y, y2=y, **line_look(series))
        return
    runs, parts = list(_runs(series)), []
    for run in runs:
        step = math.ceil(len(run) / max(_MOST_CORNERS // len(runs), 6))
        corners = [frame.corner(point) for point in [*run[:-1:step], run[-1]]]
        if series.mark == "area":  # holds until the next point
            corners = [each for a, b in pairwise([*corners, corners[-1]]) for each in (a, (b[0], a[1]))]
            floor = [(corners[0][0], frame.height), *corners, (corners[-1][0], frame.height)]
            parts.append(tag("path", class_="area", d=_path(floor)))
        parts.append(tag("path", d=_path(corners), **line_look(series)))
    yield frame.lines(*parts)


def _runs(series: Series) -> Iterator[list[Point]]:
    """The points between two gaps."""
    for is_gap, run in groupby(series.points, lambda point: point is None):
        if not is_gap:
            yield [point for point in run if point is not None]


def _path(corners: Iterable[_Corner]) -> str:
    return "M" + " ".join(f"{short(x)},{short(y)}" for x, y in corners)


def _points(series: Series, frame: _Frame) -> Iterator[Markup]:
    """A sign for each point; of lines without signs, a place where the pointer may rest."""
    if series.mark not in MARKERS:
        last = {id(run[-1]) for run in _runs(series)}
        for point, said in _with_hover(series):
            if said and series.mark in LINES and (series.mark == "area" or id(point) in last):
                yield tag("circle", title(said), class_="hit", cx=frame.x(point[0]), cy=frame.y(point[1]), r=6)
        return
    shades = iter(series.shades)
    for point, said in _with_hover(series):
        x, y = frame.x(point[0]), frame.y(point[1])
        if series.spread:
            ends = frame.y(point[1] / series.spread), frame.y(point[1] * series.spread)
            look = f"line {MARKERS[series.mark][0] or colour_of(series)}"
            yield tag("line", class_=look, stroke_width=1.2, x1=x, x2=x, y1=ends[0], y2=ends[1])
        yield sign(series, x, y, title(said), shade=shade_of(next(shades), series) if series.shades else "")


def _contours(field: Field, frame: _Frame, texts: _Texts) -> Iterator[Markup]:
    """Lines of equal value with their figure, found triangle by triangle."""
    places = [
        [(*frame.corner((x, y)), z) for x, z in zip(field.x, row, strict=True)]
        for y, row in zip(field.y, field.z, strict=True)
    ]
    corners = [(*above, *below) for rows in pairwise(places) for above, below in zip(*map(pairwise, rows), strict=True)]
    triangles = [each for a, b, c, d in corners for each in ((a, b, c), (b, c, d))]
    for level in (field.start + field.step * at for at in range(_MOST_LEVELS)):
        pieces = [piece for triangle in triangles if (piece := _crossings(triangle, level))]
        inside = [(x, y) for (x, y), _ in pieces if 0 < x < _WIDE and 0 < y < frame.height]
        if inside and level <= field.end:
            yield frame.lines(tag("path", class_="line faint", d="".join(map(_path, pieces))))
            yield texts.beside(*max(inside), tick_text(level))


def _crossings(triangle: Sequence[tuple[float, float, float]], level: float) -> list[_Corner]:
    """Where a level crosses two of the sides; none where it crosses none."""
    found = []
    for (x, y, z), (to_x, to_y, to_z) in combinations(triangle, 2):
        if (z < level) != (to_z < level):
            share = (level - z) / (to_z - z)
            found.append((x + share * (to_x - x), y + share * (to_y - y)))
    return found


def _said(plot: Plot) -> str:
    """The figure in a sentence, for who cannot see it; its numbers are in the tables."""
    axes = ", ".join(each.y.title for each in (plot, *plot.below) if each.y.title)
    names = ", ".join(f"{each.name} ({len(each.drawn)})" for each in plot.series if each.name)
    over = " over ".join(part for part in (axes, plot.x.title) if part)
    return ". ".join(part for part in (plot.title, over, names) if part)


def _with_hover(series: Series) -> Iterator[tuple[Point, Sequence[str]]]:
    hover = series.hover or [()] * len(series.points)
    return ((point, said) for point, said in zip(series.points, hover, strict=False) if point is not None)
