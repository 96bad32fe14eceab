"""Figures drawn with characters, side by side where there is room."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from batchtune.report.view.figure import Axis, AxisScale, Plot, Series, drawable, tick_text

MIN_WIDTH = 20
"""Columns below which there is no figure: its labels alone would fill it."""

_SIGNS = {
    "fit": ("●", "green"),
    "checked": ("◉", "bold green"),
    "oom": ("×", "red"),
    "failed": ("!", "red"),
    "limit": ("╌", "red"),
    "curve": ("⠒", "cyan"),
    "measured": ("●", "green"),
    "knee": ("◉", "bold green"),
}
"""A character for each mark, and its style."""
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # a Braille cell's dots, by row and column
_BLANK_DOTS = 0x2800
_MOST_TICKS = 12
_Cell = tuple[str, str]  # a character and its style
_GAP = 3
_SIDE_BY_SIDE = 72  # columns from which two figures stand beside one another
_WIDEST = 72  # of one figure; wider, the eye no longer compares
_ROWS = 6


def draw(layers: Sequence[Series], x_axis: Axis, y_axis: Axis, *, width: int, height: int = 6) -> list[Text]:
    """Layers over one another, as lines no wider than that; none where there is no point, or no room.

    The title of the y axis stands above; `height` counts the rows of the grid, without axis, labels and legend.
    """
    layers = [Series(each.mark, each.name, drawable(each.drawn, x_axis, y_axis)) for each in layers]
    layers = [each for each in layers if each.points]
    if not layers or width < MIN_WIDTH:
        return []
    points = [point for each in layers for point in each.drawn]
    xs, ys = AxisScale.over([x for x, _ in points], x_axis), AxisScale.over([y for _, y in points], y_axis)
    beside = ys.round_values(max(2, height // 2))  # at most one for every other row
    labels = {height - 1 - round(ys.share(value) * (height - 1)): tick_text(value) for value in beside}
    gutter = max(map(len, labels.values()))
    columns = width - gutter - 2
    grid = _Grid(columns, height)
    for each in layers:
        grid.add(each, [(xs.share(x), ys.share(y)) for x, y in each.drawn])
    lines = [Text(line, style="bold") for line in wrap(y_axis.title, width)]
    for row, cells in enumerate(grid.rows()):
        label = labels.get(row, "")
        lines.append(_line([(f"{label:>{gutter}} {'┤' if label else '│'}", "dim"), *cells]))
    below, ticks = _labels_below(xs, columns)
    rule = "".join("┬" if column in ticks else "─" for column in range(columns))
    margin = " " * (gutter + 2)
    lines.append(Text(f"{margin[:-1]}└{rule}", style="dim"))
    lines += [Text(margin + below, style="dim")] if below else []  # no label may have had room
    return lines + [Text(margin).append(line) for line in _legend(layers, x_axis.title, columns)]


def _labels_below(scale: AxisScale, columns: int) -> tuple[str, set[int]]:
    """The line of labels under the axis, and the columns that have one; those without room are left out."""
    line, ticks = "", set()
    for value in scale.round_values(min(_MOST_TICKS, max(2, columns // 8))):
        label = tick_text(value)
        column = round(scale.share(value) * (columns - 1))
        start = min(max(0, column - (len(label) - 1) // 2), columns - len(label))
        if start >= (len(line) + 1 if line else 0):  # a label longer than the line would start before it
            line += " " * (start - len(line)) + label
            ticks.add(column)
    return line, ticks


class _Grid:
    """Cells that hold a sign each, and dots of curves where they hold none."""

    def __init__(self, columns: int, rows: int) -> None:
        self._columns, self._rows = columns, rows
        self._signs: dict[tuple[int, int], _Cell] = {}
        self._dots: dict[tuple[int, int], int] = {}

    def add(self, layer: Series, shares: Sequence[tuple[float, float]]) -> None:
        """Draws a layer whose points are given as shares of both axes."""
        if layer.mark == "curve":
            for start, end in itertools.pairwise(shares) if len(shares) > 1 else [(shares[0], shares[0])]:
                self._draw_line(start, end)
            return
        sign = _SIGNS[layer.mark]
        for across, up in shares[:1] if layer.mark == "limit" else shares:
            row = self._rows - 1 - round(up * (self._rows - 1))
            column = round(across * (self._columns - 1))
            for each in range(self._columns) if layer.mark == "limit" else [column]:
                self._signs[row, each] = sign

    def _draw_line(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        wide, high = self._columns * len(_DOTS[0]) - 1, self._rows * len(_DOTS) - 1
        steps = max(1, math.ceil(max(abs(end[0] - start[0]) * wide, abs(end[1] - start[1]) * high)))
        for step in range(steps + 1):
            across, up = (first + (last - first) * step / steps for first, last in zip(start, end, strict=True))
            column, row = round(across * wide), high - round(up * high)
            cell = row // len(_DOTS), column // len(_DOTS[0])
            dot = _DOTS[row % len(_DOTS)][column % len(_DOTS[0])]
            self._dots[cell] = self._dots.get(cell, _BLANK_DOTS) | dot

    def rows(self) -> Iterator[list[_Cell]]:
        """The cells of each row, from the top."""
        for row in range(self._rows):
            yield [self._signs.get((row, column)) or self._curve(row, column) for column in range(self._columns)]

    def _curve(self, row: int, column: int) -> _Cell:
        dots = self._dots.get((row, column))
        return (" ", "") if dots is None else (chr(dots), _SIGNS["curve"][1])


def _legend(layers: Sequence[Series], x_title: str, width: int) -> Iterator[Text]:
    """The name of the axis below, then what each sign stands for, as much on a line as has room."""
    *before, last = wrap(x_title, width) or [""]
    yield from (Text(line, style="dim") for line in before)
    line = Text.assemble((last, "dim"))
    for each in (layer for layer in layers if layer.name):
        sign, style = _SIGNS[each.mark]
        first, *rest = wrap(f"{sign} {each.name}", width)
        if line and line.cell_len + 2 + len(first) > width:
            yield line
            line = Text()
        line.append("  " if line else "").append(first[:1], style=style).append(first[1:])
        for more in rest:
            yield line
            line = Text(more)
    yield line


def _line(cells: Iterable[_Cell]) -> Text:
    """Neighbours of one style become one span; nothing trails."""
    line = Text(no_wrap=True)
    for style, run in itertools.groupby(cells, key=lambda cell: cell[1]):
        line.append("".join(text for text, _ in run), style=style or None)
    line.rstrip()
    return line


@dataclass(frozen=True, slots=True)
class Figures:
    """Plots, each two of which share the width where it is enough for both."""

    plots: Sequence[Plot]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        beside = len(self.plots) > 1 and width >= max(_SIDE_BY_SIDE, 2 * MIN_WIDTH + _GAP)
        each = min(_WIDEST, (width - _GAP) // 2 if beside else width)
        drawn = [_lines(plot, each) for plot in self.plots]
        lefts, rights = (drawn[::2], drawn[1::2]) if beside else (drawn, [])
        for pair in itertools.zip_longest(lefts, rights, fillvalue=list[Text]()):
            for left, right in itertools.zip_longest(*pair):
                line = Text(no_wrap=True).append(left or "")
                yield line.append(" " * (each + _GAP - line.cell_len)).append(right) if right else line


def _lines(plot: Plot, width: int) -> list[Text]:
    """A figure under its title, which names the limit; what failed stands in a row above it."""
    limit = next((f"╌ {each.name}" for each in plot.series if each.mark == "limit"), plot.note)
    title = f"{plot.y.title} ({limit})" if limit else plot.y.title
    series = []
    for each in sorted(plot.series, key=lambda each: each.mark != "limit"):
        lift = (_ROWS - 1) / (_ROWS - 2) if each.mark in {"oom", "failed"} else 1.0
        name = "" if each.mark == "limit" else each.name
        series.append(replace(each, name=name, points=[(x, lift * y) for x, y in each.drawn]))
    return draw(series, plot.x, replace(plot.y, title=title), width=width, height=_ROWS)
