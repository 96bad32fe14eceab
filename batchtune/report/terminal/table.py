"""A table for any width: which columns give way where there is little room, so that no figure is ever cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as Grid
from rich.text import Text

from batchtune.report.view.model import Column, Table

TONES = {"good": "green", "bad": "red", "caution": "yellow", "": ""}
_GAP = 2
_LEAST_WRAPPED = 16  # columns that words need to be read
_LONGEST = 96  # characters of words; the message of a failure that matters is told in full elsewhere


class FittedTable:
    """Rows under a title, in as many columns as there is room for; what had to go is named below."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._columns = [_Drawn.of(column) for column in table.columns if not column.detail]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown, left_out = list(self._columns), list[str]()
        while sum(column.width + _GAP for column in shown) - _GAP > options.max_width:
            last = max(shown, key=lambda column: column.spare)
            if not last.spare:
                break
            shown.remove(last)
            left_out.append(last.name)
        table = self._table
        yield Text(table.title + (f", {table.unit}" if table.unit else ""), style="bold")
        if shown:
            yield self._grid(shown)
        if left_out:
            yield Text(f"no room here for: {', '.join(left_out)}", style="dim")

    def _grid(self, shown: Sequence[_Drawn]) -> Grid:
        grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for column in shown:
            grid.add_column(
                Text(column.placed(column.name)), no_wrap=not column.wraps, overflow="fold", min_width=column.width
            )
        for row in range(len(shown[0].cells)):
            cells = [Text(column.placed(column.cells[row]), style=column.styles[row]) for column in shown]
            grid.add_row(*cells, style="bold" if row in self._table.marked else None)
        return grid


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A column as characters; words stand left, figures right."""

    name: str
    cells: Sequence[str]
    styles: Sequence[str]
    spare: int
    left: bool
    wraps: bool

    @classmethod
    def of(cls, column: Column) -> _Drawn:
        cells: Sequence[str] = column.lined_up or column.cells
        styles = [TONES[tone] for tone in column.tones] or [""] * len(cells)
        if column.drawn:
            cells = ["" if share is None else bar(share) for share in column.values]
            styles = ["cyan"] * len(cells)
        if column.wraps:
            cells = [shorten(cell, _LONGEST) for cell in cells]
        name = f"{column.name}, {column.unit}" if column.unit else column.name
        left = column.drawn or not column.values
        return cls(name, cells, styles, column.spare, left, column.wraps)

    @property
    def width(self) -> int:
        """The columns of the screen that it needs."""
        widest = max(map(cell_len, (self.name, *self.cells)))
        return min(widest, max(_LEAST_WRAPPED, cell_len(self.name))) if self.wraps else widest

    def placed(self, text: str) -> str:
        """A text at the end of the column where figures stand; Rich would strip the blanks that align their points."""
        return text if self.left else " " * (self.width - cell_len(text)) + text


def bar(fraction: float, width: int = 12) -> str:
    """A share of one as a bar."""
    eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
    return "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")
