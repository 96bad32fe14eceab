"""A table for any width: which columns give way where there is little room, so that no figure is ever cut."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_GAP = 2
_LEAST_WRAPPED = 16  # columns that words need to be read


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        name: its heading.
        cells: one text for each row; where all are '-' or empty, the column is left out.
        spare: 0 is always shown; of the others, the highest goes first where room is short.
        left: words stand left, figures right.
        wraps: its words may go on in a second line.
        styles: one for each row.
    """

    name: str
    cells: Sequence[str]
    spare: int = 0
    left: bool = False
    wraps: bool = False
    styles: Sequence[str] = ()

    @property
    def width(self) -> int:
        """The columns of the screen that it needs."""
        widest = max(map(cell_len, (self.name, *self.cells)))
        return min(widest, max(_LEAST_WRAPPED, cell_len(self.name))) if self.wraps else widest

    def placed(self, text: str) -> str:
        """A text at the end of the column where figures stand; Rich would strip the blanks that align their points."""
        return text if self.left else " " * (self.width - cell_len(text)) + text


@dataclass(frozen=True, slots=True)
class FittedTable:
    """Rows under a title, in as many columns as there is room for; what had to go is named below.

    Attributes:
        title: what the rows are.
        columns: from left to right.
        strong: rows that stand out.
    """

    title: str
    columns: Sequence[Column]
    strong: Collection[int] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = [column for column in self.columns if any(cell.strip() not in {"", "-"} for cell in column.cells)]
        left_out: list[str] = []
        while sum(column.width + _GAP for column in shown) - _GAP > options.max_width:
            last = max(shown, key=lambda column: column.spare)
            if not last.spare:
                break
            shown.remove(last)
            left_out.append(last.name)
        yield Text(self.title, style="bold")
        if shown:
            yield self._drawn(shown)
        if any(name.strip() for name in left_out):
            names = ", ".join(name for name in left_out if name.strip())
            yield Text(f"no room here for: {names}", style="dim")

    def _drawn(self, shown: Sequence[Column]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for column in shown:
            name = Text(column.placed(column.name))
            table.add_column(name, no_wrap=not column.wraps, overflow="fold", min_width=column.width)
        for row in range(len(shown[0].cells)):
            cells = [
                Text(column.placed(column.cells[row]), style=column.styles[row] if column.styles else "")
                for column in shown
            ]
            table.add_row(*cells, style="bold" if row in self.strong else None)
        return table


def bar(fraction: float, width: int = 12) -> str:
    """A share of one as a bar."""
    eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
    return "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")
