"""Figures drawn with characters: where on a small grid of cells a number lies, and which labels find room beside it."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap

from rich.text import Text

from batchtune.report.view.model import Axis, Series

MIN_WIDTH = 20
"""Columns below which there is no figure: its labels alone would fill it."""

_SIGNS = {
    "fit": "●",
    "checked": "◉",
    "oom": "×",
    "failed": "!",
    "limit": "╌",
    "curve": "⠒",
    "measured": "●",
    "knee": "◉",
}
_STYLES = {"fit": "green", "checked": "bold green", "oom": "red", "failed": "red", "limit": "red", "curve": "cyan"}
_STYLES |= {"measured": "green", "knee": "bold green"}
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # a Braille cell's dots, by row and column
_BLANK_DOTS = 0x2800
_MOST_TICKS = 12
_MOST_STEPS = 2**53  # from 0 to a tick; beyond it, floats cannot count
_Cell = tuple[str, str]  # a character and its style


def draw(layers: Sequence[Series], x_axis: Axis, y_axis: Axis, *, width: int, height: int = 6) -> list[Text]:
    """Draws layers over one another.

    Args:
        layers: what to draw.
        x_axis: the axis below.
        y_axis: the axis to the left; its title stands above.
        width: columns that no line exceeds.
        height: rows of the grid; axis, labels and legend come on top.

    Returns:
        The lines from top to bottom; none where there is no point, or no room.
    """
    layers = [Series(each.mark, each.name, _drawable(each.drawn, x_axis, y_axis)) for each in layers]
    layers = [each for each in layers if each.points]
    if not layers or width < MIN_WIDTH:
        return []
    points = [point for each in layers for point in each.drawn]
    xs, ys = _Scale.over([x for x, _ in points], x_axis), _Scale.over([y for _, y in points], y_axis)
    labels = {row: label for label, row in _labels_beside(ys, height)}
    gutter = max(map(len, labels.values()))
    columns = width - gutter - 2
    grid = _Grid(columns, height)
    for each in layers:
        grid.add(each, [(xs.share(x), ys.share(y)) for x, y in each.drawn])
    lines = [Text(line, style="bold") for line in wrap(y_axis.title, width)]
    for row, cells in enumerate(grid.rows()):
        beside = labels.get(row, "")
        lines.append(_line([(f"{beside:>{gutter}} {'┤' if beside else '│'}", "dim"), *cells]))
    below, ticks = _labels_below(xs, columns)
    rule = "".join("┬" if column in ticks else "─" for column in range(columns))
    margin = " " * (gutter + 2)
    lines.append(Text(f"{margin[:-1]}└{rule}", style="dim"))
    lines += [Text(margin + below, style="dim")] if below else []  # no label may have had room
    return lines + [Text(margin).append(line) for line in _legend(layers, x_axis.title, columns)]


def _drawable(points: Iterable[tuple[float, float]], x_axis: Axis, y_axis: Axis) -> list[tuple[float, float]]:
    def known(value: float, axis: Axis) -> bool:
        return math.isfinite(value) and (value > 0 or not axis.log)

    return [(x, y) for x, y in points if known(x, x_axis) and known(y, y_axis)]


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps values of an axis to shares of its length, 0 to 1."""

    low: float
    high: float
    axis: Axis

    @classmethod
    def over(cls, values: Sequence[float], axis: Axis) -> _Scale:
        low = min(values)
        return cls(min(low, 0.0) if axis.from_zero and not axis.log else low, max(values), axis)

    def share(self, value: float) -> float:
        low, at, high = (math.log2(each) if self.axis.log else each / 2 for each in (self.low, value, self.high))
        room = high - low  # of halves: the difference of two large numbers may be infinite
        return min(1.0, max(0.0, (at - low) / room)) if room > 0 else 0.5

    def round_values(self, most: int) -> list[float]:
        """Round values within the scale, ascending: powers of two where it is logarithmic; at least one value."""
        if not self.axis.log:
            return _round_values(self.low, self.high, most, least_step=float(self.axis.whole))
        first, last = math.ceil(math.log2(self.low)), math.floor(math.log2(self.high))
        step = max(1, math.ceil((last - first + 1) / most))
        powers = [2.0**power for power in range(first, min(last + 1, sys.float_info.max_exp), step)]
        return powers or [self.low]


def _round_values(low: float, high: float, most: int, *, least_step: float = 0.0) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between two values; the values themselves where there are none."""
    spread = high / 2 - low / 2
    if not spread / most > 0:
        return [low, high]
    power = 10.0 ** math.floor(math.log10(spread / most))
    for step in (max(power * factor, least_step) for factor in (1, 2, 5, 10, 20, 50)):
        if not 0 < step < math.inf or max(abs(low / step), abs(high / step)) > _MOST_STEPS:
            break
        first, last = math.ceil(low / step), math.floor(high / step)
        if last - first < most:
            return [multiple * step for multiple in range(first, last + 1)] or [low, high]
    return [low, high]


def _number(value: float) -> str:
    """A short label."""
    if value == 0 or 1e-4 <= abs(value) < 1e3:  # noqa: PLR2004
        return f"{value:.4g}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.3g}"  # noqa: PLR2004


def _labels_beside(scale: _Scale, height: int) -> Iterator[tuple[str, int]]:
    """Labels of the left axis with their rows, at most one for every other row."""
    for value in scale.round_values(max(2, height // 2)):
        yield _number(value), height - 1 - round(scale.share(value) * (height - 1))


def _labels_below(scale: _Scale, columns: int) -> tuple[str, set[int]]:
    """The line of labels under the axis, and the columns that have one; those without room are left out."""
    line, ticks = "", set()
    for value in scale.round_values(min(_MOST_TICKS, max(2, columns // 8))):
        label = _number(value)
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
        sign = _SIGNS[layer.mark], _STYLES[layer.mark]
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
        return (" ", "") if dots is None else (chr(dots), _STYLES["curve"])


def _legend(layers: Sequence[Series], x_title: str, width: int) -> Iterator[Text]:
    """The name of the axis below, then what each sign stands for, as much on a line as has room."""
    *before, last = wrap(x_title, width) or [""]
    yield from (Text(line, style="dim") for line in before)
    line = Text.assemble((last, "dim"))
    for each in layers:
        first, *rest = wrap(f"{_SIGNS[each.mark]} {each.name}", width) if each.name else [""]
        if line and line.cell_len + 2 + len(first) > width:
            yield line
            line = Text()
        line.append("  " if line and first else "").append(first[:1], style=_STYLES[each.mark]).append(first[1:])
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
