"""The report in a terminal: one screen with the answer, what to paste and what to run next; the rest is for -v."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import shorten, wrap

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table as Grid
from rich.text import Text

from batchtune.document import Document
from batchtune.report.text_figures import Figures
from batchtune.report.view.model import Certificate, Column, Fact, Headline, Table, View
from batchtune.report.view.read import view_of
from batchtune.report.view.words import gist
from batchtune.units import counted

_UNBOUNDED = 10_000
_CONTINUED = " \\"
_MOST_WARNINGS = 2  # on the one screen, and fewer on a low one
TONES = {"good": "green", "bad": "red", "caution": "yellow", "": ""}
_GAP = 2
_FIRST_TO_GO = 9  # where room is short
_LEAST_WRAPPED = 16  # columns that words need to be read
_LONGEST = 96  # characters of words; the message of a failure that matters is told in full elsewhere
_STAND_INS = {
    "×": "x", "µ": "u", "°": " ", "±": "~", "≈": "~", "≥": ">", "·": "*", "…": ".", "–": "-", "—": "-", "’": "'",
    "α": "a", "β": "b", "█": "#", "●": "o", "◉": "@", "╌": "-", "─": "-", "│": "|", "┤": "+", "┬": "+", "└": "+",
} | dict.fromkeys("▏▎▍▌▋▊▉", "#") | dict.fromkeys("╭╮╰╯", "+")  # fmt: skip
_DOTS = range(0x2800, 0x2900)  # Braille: the dots of a curve


def render(result: Document, *, verbose: bool = False, page: str = "") -> RenderableType:
    """The report of one result, in the lines of one screen; `page` is where the report's page lies.

    A verbose one has figures, tables and reasons before it, and tells warnings in full.
    """
    return _Report(view_of(result), verbose, page)


@dataclass(frozen=True, slots=True)
class _Report:
    """Lines that neither trail blanks nor hold a character that the output cannot write."""

    view: View
    verbose: bool
    page: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        within = options.update(height=None)
        within.encoding = "utf-8"  # what the output lacks is replaced here alone, not by Rich's other boxes

        def drawn(parts: Iterable[RenderableType]) -> list[list[Segment]]:
            return [line for part in parts for line in console.render_lines(part, within, pad=False)]

        lines = drawn(_evidence(self.view)) if self.verbose else []
        for warnings in range(len(self.view.warnings) if self.verbose else _MOST_WARNINGS, -1, -1):
            screen = drawn(_screen(self.view, warnings=warnings, verbose=self.verbose, page=self.page))
            if self.verbose or len(screen) < console.height:  # the prompt has a line
                break
        else:
            screen = [line for line in screen if any(text.strip() for text, *_ in line)]
        for line in lines + screen:
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


def _screen(view: View, *, warnings: int, verbose: bool, page: str) -> Iterator[RenderableType]:
    """The answer, what to paste, what to run next, what to know besides, and where the rest is."""
    if view.status != "complete":
        style = "bold yellow" if view.status in {"interrupted", "running"} else "bold red"
        said = f"{view.status}: {view.problem}" if view.status == "failed" else gist(view.problem)
        yield Text(said if view.problem else view.status, style=style)
    if view.headline is not None and (view.headline.choice or view.status == "complete"):  # else there is no answer
        yield from _answer(view, view.headline, verbose=verbose)
    yield from _named([line for line in view.lines if not line.detail])
    if "PyTorch" in view.settings:
        yield Text("\npaste", style="bold")
        yield from (_Code(line) for line in view.settings["PyTorch"].splitlines())
    if view.commands or view.warnings or page:
        yield ""
    for each in view.commands:
        yield _Code(f"{each.name}: {each.text}" + (f"  # {each.about}" if each.about else ""))
    yield from _caveats(view, warnings, verbose=verbose)
    if page:
        yield Text(f"page: {page} (--open shows it)", style="dim")


def _answer(view: View, headline: Headline, *, verbose: bool) -> Iterator[RenderableType]:
    """The head figure, then what it is made of: a table where there is one."""
    tone = "bold green" if view.status == "complete" else "bold"
    yield Text.assemble((headline.figure, tone), f" {headline.words}")
    if headline.reason and (verbose or not headline.repeats):
        yield Text(headline.reason)
    if view.comparison is not None:
        yield _Comparison(view.comparison)
    elif view.overview is not None:
        yield FittedTable(view.overview, verbose=verbose)
    else:
        yield from _named(headline.choice)


def _named(facts: Sequence[Fact]) -> Iterator[RenderableType]:
    """Each under its name, the texts below one another."""
    grid = Grid.grid(padding=(0, 2, 0, 0))
    for fact in facts:
        grid.add_row(Text(fact.name, overflow="fold"), Text(fact.text, overflow="fold"))
    if facts:
        yield grid


def _caveats(view: View, warnings: int, *, verbose: bool) -> Iterator[RenderableType]:
    """The first warnings, in full or what each begins with, and how much there is besides."""
    told = [each if verbose else gist(each) for each in view.warnings[:warnings]]
    yield from (Text(f"warning: {each}", style="yellow") for each in told)
    hidden = {"more warning" if told else "warning": len(view.warnings) - len(told)}
    notes = [note for section in view.sections for note in section.notes]
    hidden["note"] = 0 if verbose or view.status == "failed" else len(notes)
    if any(hidden.values()):
        said = " and ".join(counted(count, name) for name, count in hidden.items() if count)
        yield Text(f"{said}: -v", style="dim")


def _evidence(view: View) -> Iterator[RenderableType]:
    """What is behind the answer."""
    if view.kind != "probe" or len(view.certificates) > 1:
        yield from map(_certificate, view.certificates)
    yield Figures(view.plots)
    for line in view.lines:
        yield Text.assemble((f"{line.name} ", "bold"), line.text + (f": {line.about}" if line.about else ""))
    for section in view.sections:
        for table in section.tables:
            yield from ("", FittedTable(table, verbose=True)) if table is not view.overview else ()
        yield from (Text(note, style="dim") for note in section.notes)
    if view.measured_on:
        yield Text(f"\nmeasured on {view.measured_on}, batchtune {view.version}", style="dim")
    yield ""


def _certificate(found: Certificate) -> Text:
    """The largest batch of a precision with its proof."""
    if not found.proof:
        return Text(f"probe {found.precision}: {found.largest}", style="bold red")
    name = (f"probe {found.precision} ", "bold")
    return Text.assemble(name, f"largest {found.batch} ", (found.largest, "bold green"), f" {found.proof}")


@dataclass(frozen=True, slots=True)
class _Code:
    """A line of Python or of a shell; where it is too long its comment goes, and then it is continued as both allow."""

    line: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code, width, at_the_end, next_line = self.line, options.max_width, _CONTINUED, ""
        if code.startswith("#"):
            at_the_end, next_line = "", "# "
        elif len(code) > width:
            code = code.partition("  #")[0]
        lines = [code]
        if len(code) > width:
            room = max(1 + len(next_line), width - len(at_the_end))
            lines = wrap(code, room, subsequent_indent=next_line, break_long_words=False, break_on_hyphens=False)
        yield Text(f"{at_the_end}\n".join(lines), style="cyan", overflow="fold")


@dataclass(frozen=True, slots=True)
class _Comparison:
    """The recommended configuration beside what is run today; in a narrow terminal, an interval below its median."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        grid = self._grid()
        if Measurement.get(console, options.update(width=_UNBOUNDED), grid).maximum > options.max_width:
            grid = self._grid(broken=True)
        yield grid

    def _grid(self, *, broken: bool = False) -> Grid:
        grid = Grid(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        for at, column in enumerate(self.table.columns):
            grid.add_column(column.name, overflow="fold", style="bold green" if at == 1 else "")
        for name, *cells in zip(*(column.cells for column in self.table.columns), strict=True):
            grid.add_row(Text(name), *(Text(cell.replace(" (", "\n(") if broken else cell) for cell in cells))
        return grid


class FittedTable:
    """Rows under a title, in as many columns as there is room for; a verbose one names below it what had to go."""

    def __init__(self, table: Table, *, verbose: bool = False) -> None:
        self._table, self._verbose = table, verbose
        self._columns = [_Drawn.of(column) for column in table.columns if verbose or not column.detail]

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
        if left_out and self._verbose:
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
        return cls(name, cells, styles, _FIRST_TO_GO if column.detail else column.spare, left, column.wraps)

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


def written_in(encoding: str, text: str) -> str:
    """The text with nothing in it that an encoding cannot write; its width on the screen stays the same."""
    return text.encode(encoding, "batchtune.stand_in").decode(encoding)


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    """For characters that an encoding lacks, as `codecs` asks: texts as wide, and where to go on."""
    assert isinstance(error, UnicodeEncodeError)  # noqa: S101 - of encoding only
    missing = error.object[error.start : error.end]
    shown = ("." if ord(each) in _DOTS else _STAND_INS.get(each, "?" * cell_len(each)) for each in missing)
    return "".join(shown), error.end


codecs.register_error("batchtune.stand_in", _stand_in)
