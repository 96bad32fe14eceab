"""What a report shows, whatever shows it: texts, tables and figures without any schema behind them. Data only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, TypedDict, Unpack

from batchtune.report.view.figure import Plot
from batchtune.units import aligned, duration, number, size, sizes, times

Tone = Literal["good", "bad", "caution", ""]

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Fact:
    """A name and what is known under it."""

    name: str
    text: str
    about: str = ""  # what a figure is of, in a few words, or why it is that
    detail: bool = False  # only for renderers that have room for everything


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    name: str  # its heading, without a unit
    cells: Sequence[str]  # a text for each row, figures with their unit; '-' where nothing was measured
    values: Values = ()  # of a column of figures, what to sort its rows by
    unit: str = ""  # one that suits all figures of the column
    lined_up: Sequence[str] = ()  # the figures in that unit, their decimal points under one another
    spare: int = 0  # 0 is always shown; of the others, the highest goes first where room is short
    detail: bool = False  # only for renderers that have room for everything
    wraps: bool = False  # its words may go on in a second line
    drawn: bool = False  # shares of one, which may be drawn as bars
    tones: Sequence[Tone] = ()


@dataclass(slots=True)
class Table:
    """Rows under a title; of the columns given, those in which something is known."""

    title: str  # what the rows are
    columns: Sequence[Column]
    _: KW_ONLY
    marked: Collection[int] = ()
    unit: str = ""  # of all figures that have none of their own, in columns whose figures are lined up
    summary: bool = False  # a summary has it, too
    folded: bool = False  # row by row what another one sums up: only for those who ask

    def __post_init__(self) -> None:
        self.columns = [each for each in self.columns if any(cell not in {"", "-"} for cell in each.cells)]


@dataclass(frozen=True, slots=True)
class Headline:
    """The answer in one figure, what it is, what to choose for it, and why.

    `repeats`: the reason says the same in more words.
    """

    figure: str
    words: str
    choice: Sequence[Fact] = ()
    reason: str = ""
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """One configuration's figure with its interval; ends as shares of the longest bar, None where none can be drawn."""

    name: str
    about: str
    text: str
    bounds: str
    ends: tuple[float, float, float] | None


@dataclass(frozen=True, slots=True)
class Bars:
    """What is recommended against what runs today, in one quantity."""

    title: str
    bars: Sequence[Bar]


@dataclass(frozen=True, slots=True)
class Certificate:
    """The largest batch of one precision ('nothing fits', say), the proof as a sentence ('' without) and as facts.

    `batch` is what sort of batch it is.
    """

    batch: str
    precision: str
    largest: str
    proof: str
    facts: Sequence[Fact]


@dataclass(frozen=True, slots=True)
class Section:
    """What belongs together: tables, then sentences."""

    title: str
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A result as every report shows it, in the order in which it reads."""

    kind: str
    title: str
    status: str
    problem: str  # why it is not complete
    about: Sequence[str]  # when and where it was measured
    headline: Headline | None
    comparison: Table | None  # the recommended configuration beside today's; `bars` draws the same
    bars: Sequence[Bars]
    overview: Table | None  # a row for each of several answers
    certificates: Sequence[Certificate]  # one for each precision probed
    plots: Sequence[Plot]  # the small figures of the probe that stands for the result
    lines: Sequence[Fact]  # what else belongs to the answer
    commands: Sequence[Fact]
    sections: Sequence[Section]
    settings: Mapping[str, str]  # what to paste, by the library that takes it
    notes: Mapping[str, Sequence[str]]  # what its reader must know besides, by the same names
    warnings: Sequence[str]
    measured_on: str
    environment: Sequence[Fact]
    version: str  # of the batchtune that measured


class _Look(TypedDict, total=False):
    """What may be said of any column; see `Column`."""

    spare: int
    detail: bool
    wraps: bool
    drawn: bool
    tones: Sequence[Tone]


def facts(texts: Mapping[str, str | None], *, detail: bool = False) -> list[Fact]:
    """What is known, each under its name."""
    return [Fact(name, text, detail=detail) for name, text in texts.items() if text and text != "-"]


def byte_sizes(name: str, values: Values, *, least: float = 0, **more: Unpack[_Look]) -> Column:
    """A column of bytes, of which less than the least cannot be told."""
    unit, lined_up = sizes(values, least)
    cells = [size(value, least) for value in values]
    return Column(name, cells, values, unit=unit, lined_up=lined_up, **more)


def seconds(name: str, values: Values, **more: Unpack[_Look]) -> Column:
    """A column of times."""
    unit, lined_up = times(values)
    return Column(name, [*map(duration, values)], values, unit=unit, lined_up=lined_up, **more)


def counts(name: str, values: Values, cells: Sequence[str] = (), **more: Unpack[_Look]) -> Column:
    """A column of whole numbers; `cells` says them otherwise."""
    cells = cells or ["-" if value is None else f"{value:,.0f}" for value in values]
    return Column(name, cells, values, lined_up=cells, **more)


def shares(name: str, values: Values, *, digits: int = 0, **more: Unpack[_Look]) -> Column:
    """A column of shares of one, as per cent."""
    cells = ["-" if value is None else f"{value:.{digits}%}" for value in values]
    return Column(name, cells, values, lined_up=cells, **more)


def numbers(name: str, values: Values, *, unit: str = "", digits: int = 3, **more: Unpack[_Look]) -> Column:
    """A column of plain figures, all in one unit."""
    plain = [number(value, digits) for value in values]
    cells = [text if text == "-" or not unit else f"{text} {unit}" for text in plain]
    return Column(name, cells, values, unit=unit, lined_up=aligned(plain), **more)
