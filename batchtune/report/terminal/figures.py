"""Small figures of characters, side by side where there is room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from batchtune.report.terminal.plots import MIN_WIDTH, draw
from batchtune.report.view.model import Plot

_GAP = 3
_SIDE_BY_SIDE = 72  # columns from which two figures stand beside one another
_WIDEST = 72  # of one figure; wider, the eye no longer compares
_ROWS = 6


class Figures:
    """Plots, two of which share the width where it is enough for both."""

    def __init__(self, plots: Sequence[Plot]) -> None:
        self._plots = plots

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        beside = len(self._plots) > 1 and width >= max(_SIDE_BY_SIDE, 2 * MIN_WIDTH + _GAP)
        each = min(_WIDEST, (width - _GAP) // 2 if beside else width)
        drawn = [_lines(plot, each) for plot in self._plots]
        if not beside:
            yield from (line for lines in drawn for line in lines)
            return
        for left, right in zip_longest(*drawn):
            line = Text(no_wrap=True).append(left or "")
            yield line.append(" " * (each + _GAP - line.cell_len)).append(right or "")


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
