"""The report in a terminal: what stands in it, in which order; a screen of 80 by 24 holds the answer and its proof.

The order is that of the HTML page, but for the lines to paste: they come near the end, where the prompt is.
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from batchtune.document import Document, Prior, ProbeResult
from batchtune.report.export.snippets import snippet
from batchtune.report.terminal import tables as text_tables
from batchtune.report.terminal.ascii import written_in
from batchtune.report.terminal.figures import Figures
from batchtune.report.view.select import believed, estimate_notes, probes_of
from batchtune.report.view.words import (
    CONFIGURATIONS,
    certificate,
    configurations,
    largest_batch,
    machine,
    ranks,
    step_time,
)

_UNBOUNDED = 10_000
_CONTINUED = " \\"
_NARROW = 60  # columns below which a frame would take room that words need


def render(result: Document) -> RenderableType:
    """The whole report of one result."""
    return _Report(result)


class _Report:
    """Lines that neither trail blanks nor hold a character that the output cannot write."""

    def __init__(self, result: Document) -> None:
        self._result = result

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        within = options.update(height=None)
        within.encoding = "utf-8"  # what the output lacks is replaced here alone, not by Rich's other boxes
        for part in _parts(self._result):
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


def _parts(result: Document) -> Iterator[RenderableType]:
    """The report from top to bottom."""
    if result.status != "complete":
        reason = f": {result.error.message}" if result.error else ""
        yield Text(f"{result.status}{reason}", style="bold yellow" if result.status == "interrupted" else "bold red")
    probes = probes_of(result)
    chosen = result.probe or next(iter(probes), None)
    if result.recommendation is not None:
        yield _Framed(result.name, [_Comparison(result), Text(result.recommendation.reason)])
    if result.target is not None and result.target.value is not None:
        target = result.target
        sign = "at most" if target.goal == "minimize" else "at least"
        yield Text.assemble(("target ", "bold"), f"{target.metric} {sign} {target.value:.4g}: {target.reason}")
    largest: list[RenderableType] = [_largest(probe) for probe in probes]
    yield from [_Framed(result.name, largest)] if result.kind == "probe" and largest else largest
    if chosen is not None:
        yield Figures(chosen)
        yield from _speed(chosen)
    if result.prior is not None:
        yield from _start_of_search(result.prior)
    yield from _tables(result, probes, chosen)
    yield from _rest(result)


def _tables(result: Document, probes: list[ProbeResult], chosen: ProbeResult | None) -> Iterator[RenderableType]:
    """Everything behind the answer, row by row."""
    tables = [text_tables.precisions(probes, chosen=chosen)] if len(probes) > 1 else []
    if result.kind == "probe":
        for probe in probes:
            tables += [text_tables.throughput(probe)] if probe.throughput else []
            tables += [text_tables.attempts(probe)] if probe.attempts else []
    more = result.recommendation.scaling if result.recommendation else None
    tables += [text_tables.scaling(more)] if more else []
    tables += [text_tables.trials(result)] if result.trials else []
    tables += [text_tables.estimates(result)] if result.estimates else []
    tables += [text_tables.memory_details(result)] if result.details else []
    for table in tables:
        yield ""
        yield table
    if more is not None:
        yield Text.assemble(("ranks timed ", "bold"), ranks(more.measured))
    yield from (Text(text_tables.held_most(row)) for row in result.details or [] if row.holders)


def _rest(result: Document) -> Iterator[RenderableType]:
    """What to do with it, what to know about it, and where it comes from."""
    yield from (Text(note, style="dim") for note in estimate_notes(result.estimates or []))
    lines = snippet(result)
    if lines:
        yield Text("\npaste", style="bold")
        yield from (_Code(line) for line in lines.splitlines())
    if result.warnings or result.environment is not None:
        yield ""
    if result.warnings:
        yield from (Text(f"warning: {warning}", style="yellow") for warning in result.warnings)
    if result.environment is not None:
        yield Text(f"measured on {machine(result.environment)}, batchtune {result.batchtune_version}", style="dim")


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
    """The recommended configuration beside what is run today, as far as each is known."""

    def __init__(self, result: Document) -> None:
        self._rows = configurations(result)
        self._columns = CONFIGURATIONS[: len(self._rows[0][1])]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self._table()
        if Measurement.get(console, options.update(width=_UNBOUNDED), table).maximum > options.max_width:
            table = self._table(broken=True)
        yield table

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._table())

    def _table(self, *, broken: bool = False) -> Table:
        """The rows; where `broken`, an interval stands below its median."""
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("", overflow="fold")
        for name in self._columns:
            table.add_column(name, overflow="fold", style="bold green" if name == CONFIGURATIONS[0] else "")
        for name, cells in self._rows:
            table.add_row(Text(name), *(Text(cell.replace(" (", "\n(") if broken else cell) for cell in cells))
        return table


def _largest(probe: ProbeResult) -> Text:
    """The largest batch of a probe with its certificate."""
    if probe.max_batch_size is None:
        return Text(f"probe {probe.precision}: {largest_batch(probe)}", style="bold red")
    return Text.assemble(
        (f"probe {probe.precision} ", "bold"),
        "largest batch ",
        (largest_batch(probe), "bold green"),
        f" {certificate(probe)}",
    )


def _speed(probe: ProbeResult) -> Iterator[Text]:
    fit = probe.throughput_fit
    if fit is not None:
        line = step_time(fit)
        if fit.batch_size_within_5_percent is not None:
            line += f"; within 5% of the best measured speed from batch {fit.batch_size_within_5_percent:,}"
        yield Text.assemble(("step time ", "bold"), line)
    if probe.data_parallel is not None:
        yield Text.assemble(("ranks ", "bold"), ranks(probe.data_parallel))
    if probe.input_pipeline is not None:
        yield Text.assemble(("data ", "bold"), probe.input_pipeline.verdict)


def _start_of_search(prior: Prior) -> Iterator[Text]:
    reasons = {
        "why these batch sizes ": prior.batch_sizes_reason,
        "why this micro-batch ": prior.micro_batch_reason,
        "why these learning rates ": believed(prior),
    }
    yield from (Text.assemble((name, "bold"), why) for name, why in reasons.items() if why)
