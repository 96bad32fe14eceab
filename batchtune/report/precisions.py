"""Precisions side by side: what each makes of the same memory."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from batchtune.report.units import number, size
from batchtune.results import ProbeResult


def comparison(probes: Sequence[ProbeResult], *, chosen: ProbeResult | None) -> Table:
    """One row for each precision: largest batch, peak there, best speed and the batch size it came from.

    Args:
        probes: one for each precision.
        chosen: the one that stands for the result; its row stands out.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="precisions compared", title_justify="left")
    table.add_column("precision")
    for name in ("largest batch", "peak", "best samples/s", "at batch", "MFU"):
        table.add_column(name, justify="right")
    rows = [_row(probe) for probe in probes]
    for probe, row in zip(probes, rows, strict=True):
        stands_out = chosen is not None and probe.precision == chosen.precision
        table.add_row(*row, style="bold green" if stands_out else None)
    if all(row[-1] == "-" for row in rows):
        table.columns.pop()
    return table


def _row(probe: ProbeResult) -> list[str]:
    best = max(probe.throughput, key=lambda point: point.samples_per_second, default=None)
    return [
        probe.precision,
        f"{probe.max_batch_size:,}" if probe.max_batch_size else "nothing fits",
        size(probe.peak_reserved_bytes),
        number(best.samples_per_second) if best else "-",
        f"{best.batch_size:,}" if best else "-",
        f"{best.mfu:.0%}" if best and best.mfu is not None else "-",
    ]
