"""The report in a terminal: what stands in it, in which order; a screen of 80 by 24 holds the answer and its proof.

The order is that of the page, but for the lines to paste: they come near the end, where the prompt is.
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table as Grid
from rich.text import Text

from batchtune.document import Document
from batchtune.report.terminal.ascii import written_in
from batchtune.report.terminal.figures import Figures
from batchtune.report.terminal.table import FittedTable
from batchtune.report.view.model import Certificate, Table, View
from batchtune.report.view.read import view_of

_UNBOUNDED = 10_000
_CONTINUED = " \\"
_NARROW = 60  # columns below which a frame would take room that words need


def render(result: Document, *, verbose: bool = False) -> RenderableType:
    """The report of one result; a verbose one has every row, too, of what its tables sum up."""
    return _Report(result, verbose=verbose)


class _Report:
    """Lines that neither trail blanks nor hold a character that the output cannot write."""

    def __init__(self, result: Document, *, verbose: bool) -> None:
        self._view, self._verbose = view_of(result), verbose

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        within = options.update(height=None)
        within.encoding = "utf-8"  # what the output lacks is replaced here alone, not by Rich's other boxes
        for part in _parts(self._view, verbose=self._verbose):
            for line in console.render_lines(part, within, pad=False):
                yield from _tidy(line, options.encoding)
                yield Segment.line()


def _tidy(line: list[Segment], encoding: str) -> list[Segment]:
    kept = [Segment(written_in(encoding, text), style, control) for text, style, control in line]
    while kept and not kept[-1].text.strip():
        kept.pop()
    if kept:
        text, style, control = kept[-1]
        kept[-1] = Segment(text.rstrip(), style, control)
    return kept


def _parts(view: View, *, verbose: bool) -> Iterator[RenderableType]:
    """The report from top to bottom."""
    if view.status != "complete":
        style = "bold yellow" if view.status in {"interrupted", "running"} else "bold red"
        yield Text(view.status + (f": {view.problem}" if view.problem else ""), style=style)
    if view.comparison is not None and view.headline is not None:
        yield _Framed(view.title, [_Comparison(view.comparison), Text(view.headline.reason)])
    certificates: list[RenderableType] = [_certificate(each) for each in view.certificates]
    yield from [_Framed(view.title, certificates)] if view.kind == "probe" and certificates else certificates
    yield Figures(view.plots)
    yield from (Text.assemble((f"{line.name} ", "bold"), line.text) for line in view.lines)
    yield from _evidence(view, verbose=verbose)
    if "PyTorch" in view.settings:
        yield Text("\npaste", style="bold")
        yield from (_Code(line) for line in view.settings["PyTorch"].splitlines())
    if view.warnings or view.measured_on:
        yield ""
    yield from (Text(f"warning: {warning}", style="yellow") for warning in view.warnings)
    if view.measured_on:
        yield Text(f"measured on {view.measured_on}, batchtune {view.version}", style="dim")


def _certificate(found: Certificate) -> Text:
    """The largest batch of a precision with its proof."""
    if not found.proof:
        return Text(f"probe {found.precision}: {found.largest}", style="bold red")
    name = (f"probe {found.precision} ", "bold")
    return Text.assemble(name, f"largest {found.batch} ", (found.largest, "bold green"), f" {found.proof}")


def _evidence(view: View, *, verbose: bool) -> Iterator[RenderableType]:
    """What is behind the answer."""
    for section in view.sections:
        if not section.detail:
            for table in section.tables:
                yield from () if table.detail or (table.folded and not verbose) else ("", FittedTable(table))
            yield from (Text(note, style="dim") for note in section.notes)


class _Framed:
    """Parts under a title, in a frame where there is room for one."""

    def __init__(self, title: str, parts: list[RenderableType]) -> None:
        self._title, self._parts = Text(title or "batchtune", style="bold"), parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width < _NARROW:
            yield from (self._title, *self._parts)
        else:
            yield Panel(Group(*self._parts), title=self._title, box=box.ROUNDED, expand=False)


class _Code:
    """A line of Python; where it is too long its comment goes, and then it is continued as Python allows."""

    def __init__(self, line: str) -> None:
        self._line = line

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [self._line]
        if len(self._line) > options.max_width:
            code = self._line.partition("  #")[0]
            room = options.max_width if len(code) <= options.max_width else options.max_width - len(_CONTINUED)
            lines = wrap(code, max(1, room), break_long_words=False, break_on_hyphens=False)
        yield Text(f"{_CONTINUED}\n".join(lines), style="cyan", overflow="fold")


class _Comparison:
    """The recommended configuration beside what is run today; in a narrow terminal, an interval below its median."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        grid = self._grid()
        if Measurement.get(console, options.update(width=_UNBOUNDED), grid).maximum > options.max_width:
            grid = self._grid(broken=True)
        yield grid

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._grid())

    def _grid(self, *, broken: bool = False) -> Grid:
        grid = Grid(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        for at, column in enumerate(self._table.columns):
            grid.add_column(column.name, overflow="fold", style="bold green" if at == 1 else "")
        for name, *cells in zip(*(column.cells for column in self._table.columns), strict=True):
            grid.add_row(Text(name), *(Text(cell.replace(" (", "\n(") if broken else cell) for cell in cells))
        return grid
