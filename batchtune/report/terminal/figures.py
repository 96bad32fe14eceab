"""A probe as two small figures of characters: memory and speed over batch size, side by side where there is room."""

from __future__ import annotations

from itertools import zip_longest

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from batchtune.document import ProbeResult
from batchtune.report.terminal.plots import MIN_WIDTH, Axis, Layer, draw
from batchtune.report.view.select import fitted_speeds, memory_range, peak_of
from batchtune.units import bytes_unit, size

_GAP = 3
_SIDE_BY_SIDE = 72  # columns from which two figures stand beside one another
_WIDEST = 72  # of one figure; wider, the eye no longer compares
_ROWS = 6
_BATCH = "micro-batch size"
_Figure = tuple[list[Layer], Axis, Axis]


class Figures:
    """Peak memory with the limit, and throughput with its fitted curve; what was not measured is left out."""

    def __init__(self, probe: ProbeResult) -> None:
        self._figures = [figure for figure in (memory(probe), throughput(probe)) if figure is not None]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        beside = len(self._figures) > 1 and width >= max(_SIDE_BY_SIDE, 2 * MIN_WIDTH + _GAP)
        each = min(_WIDEST, (width - _GAP) // 2 if beside else width)
        drawn = [draw(layers, x_axis, y_axis, width=each, height=_ROWS) for layers, x_axis, y_axis in self._figures]
        if not beside:
            yield from (line for lines in drawn for line in lines)
            return
        for left, right in zip_longest(*drawn):
            line = Text(no_wrap=True).append(left or "")
            yield line.append(" " * (each + _GAP - line.cell_len)).append(right or "")


def memory(probe: ProbeResult) -> _Figure | None:
    """Every attempt at its peak, failures in the row above the limit; None where nothing was attempted."""
    reach = memory_range([probe])
    if reach is None:
        return None
    unit, scale = bytes_unit(reach.ceiling_bytes)
    fits = [(attempt, peak / scale) for attempt in probe.attempts if (peak := peak_of(attempt)) is not None]
    failed = [attempt for attempt in probe.attempts if not attempt.fits]
    top = max(reach.limit_bytes, reach.ceiling_bytes) / scale
    above = top * (_ROWS - 1) / (_ROWS - 2)
    layers = [
        Layer("limit", "", [(0, top)] if reach.near else []),
        Layer("fit", "fit", [(attempt.batch_size, peak) for attempt, peak in fits if attempt.purpose == "search"]),
        Layer(
            "checked", "checked", [(attempt.batch_size, peak) for attempt, peak in fits if attempt.purpose != "search"]
        ),
        Layer("oom", "oom", [(attempt.batch_size, above) for attempt in failed if attempt.outcome == "oom"]),
        Layer("failed", "failed", [(attempt.batch_size, above) for attempt in failed if attempt.outcome != "oom"]),
    ]
    limit = f" ({'╌ ' if reach.near else ''}limit {size(reach.limit_bytes)})" if reach.limit_bytes else ""
    title = f"peak memory, {unit}{limit}"
    return layers, Axis(_BATCH, from_zero=True, whole=True), Axis(title, from_zero=True)


def throughput(probe: ProbeResult) -> _Figure | None:
    """The speeds measured over the curve B / (alpha + beta * B); None where none was."""
    points = sorted((point.batch_size, point.samples_per_second) for point in probe.throughput)
    if not points:
        return None
    fit = probe.throughput_fit
    knee = fit.batch_size_within_5_percent if fit else None
    layers = [
        Layer("curve", "t = α + β·B", fitted_speeds(fit, points[0][0], points[-1][0]) if fit else []),
        Layer("fit", "measured", points),
        Layer("checked", "95% of best", [point for point in points if point[0] == knee]),
    ]
    return layers, Axis(_BATCH, log=True), Axis("throughput, samples/s", from_zero=True)
