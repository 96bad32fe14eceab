"""What a report shows, whatever shows it: texts, tables and figures without any schema behind them. Data only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Tone = Literal["good", "bad", "caution", ""]
Mark = Literal[
    "fit", "checked", "oom", "failed", "limit", "curve", "measured", "knee", "reading", "other", "today", "recommended",
    "target", "open", "broken", "scored", "prior", "edge", "ring today", "ring recommended", "bar", "inner bar", "gpu",
    "area", "peak",
]  # fmt: skip
"""What the points of a figure are; each renderer has a sign, a line or a bar for those that it draws."""
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Fact:
    """A name and what is known under it; `about` is what a figure is of, in a few words."""

    name: str
    text: str
    about: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table.

    Attributes:
        name: its heading, without a unit.
        cells: a text for each row, figures with their unit; '-' where nothing was measured.
        values: of a column of figures, what to sort its rows by.
        unit: one that suits all figures of the column.
        lined_up: the figures in that unit, their decimal points under one another.
        spare: 0 is always shown; of the others, the highest goes first where room is short.
        detail: only for renderers that have room for everything.
        wraps: its words may go on in a second line.
        drawn: shares of one, which may be drawn as bars.
        tones: one for each row.
    """

    name: str
    cells: Sequence[str]
    values: Sequence[float | None] = ()
    unit: str = ""
    lined_up: Sequence[str] = ()
    spare: int = 0
    detail: bool = False
    wraps: bool = False
    drawn: bool = False
    tones: Sequence[Tone] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under a title.

    Attributes:
        title: what the rows are.
        columns: from left to right, those in which something is known.
        marked: the rows that stand out.
        unit: of all figures that have none of their own, in columns whose figures are lined up.
        detail: only for renderers that have room for everything.
        summary: a summary has it, too.
        folded: row by row what another one sums up: only for those who ask.
    """

    title: str
    columns: Sequence[Column]
    marked: Collection[int] = ()
    unit: str = ""
    detail: bool = False
    summary: bool = False
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Headline:
    """The answer in one figure, what it is, what to choose for it, and why."""

    figure: str
    words: str
    choice: Sequence[Fact] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Bar:
    """One configuration's figure with its interval; ends as shares of the longest bar, None where none can be drawn."""

    name: str
    about: str
    text: str
    bounds: str
    ends: tuple[float, float, float] | None
    recommended: bool


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
    """What belongs together: tables, then sentences; `detail` as of a table."""

    title: str
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    detail: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """What shades stand for: its title, texts at some of the values, and whether the least is the best."""

    title: str
    ticks: Mapping[float, str]
    least_is_best: bool = True


@dataclass(frozen=True, slots=True)
class Series:
    """Points of a figure that are drawn and named alike; later ones cover earlier ones.

    Attributes:
        mark: what they are.
        name: what the legend calls them; '' where they are not in the legend.
        points: (x, y), None between two lines; of a limit, the first alone counts.
        hover: lines about each point; none: the points say nothing.
        group: which of several precisions they are of.
        labels: a text beside each point.
        spread: each y may be so many times as much, or as little.
        shades: a figure for each point, told by its colour.
        scale: of the shades.
    """

    mark: Mark
    name: str
    points: Sequence[Point | None]
    hover: Sequence[Sequence[str]] = ()
    group: int = 0
    labels: Sequence[str] = ()
    spread: float | None = None
    shades: Sequence[float] = ()
    scale: Scale | None = None

    @property
    def drawn(self) -> list[Point]:
        """The points alone."""
        return [point for point in self.points if point is not None]


@dataclass(frozen=True, slots=True)
class Field:
    """What is predicted over a plane: `z` and lines about it, a row for each y; it is drawn at every `step`."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    z: Sequence[Sequence[float]]
    hover: Sequence[Sequence[Sequence[str]]]
    start: float
    end: float
    step: float


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis is called, its unit included, and how it runs.

    Attributes:
        log: equal distances are equal ratios.
        from_zero: begins at 0 where all values are positive.
        whole: its values are whole numbers, and so are its labels; where it is logarithmic, powers of two.
        end: where it ends, if not at the last point.
        ticks: texts at some of its values instead of figures.
    """

    title: str
    log: bool = False
    from_zero: bool = False
    whole: bool = False
    end: float | None = None
    ticks: Mapping[float, str] | None = None


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure; its note says what is too far off to be drawn, and those `below` share its x axis."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    note: str = ""
    field: Field | None = None
    below: Sequence[Plot] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A result as every report shows it, in the order in which it reads.

    Attributes:
        problem: why it is not complete.
        about: when and where it was measured.
        comparison: the recommended configuration beside today's; `bars` draws the same.
        certificates: one for each precision probed.
        plots: the small figures of the probe that stands for the result.
        lines: what else belongs to the answer.
        sections: the evidence.
        settings: what to paste, by the library that takes it.
        notes: what its reader must know besides, by the same names.
        version: of the batchtune that measured.
    """

    kind: str
    title: str
    status: str
    problem: str
    about: Sequence[str]
    headline: Headline | None
    comparison: Table | None
    bars: Sequence[Bars]
    certificates: Sequence[Certificate]
    plots: Sequence[Plot]
    lines: Sequence[Fact]
    sections: Sequence[Section]
    settings: Mapping[str, str]
    notes: Mapping[str, Sequence[str]]
    warnings: Sequence[str]
    measured_on: str
    environment: Sequence[Fact]
    version: str
