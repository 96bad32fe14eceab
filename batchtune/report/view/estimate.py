"""What a report shows of an estimate: its answer, and the tables of GPUs, of memory and of what holds it."""

from __future__ import annotations

from collections.abc import Sequence

from batchtune.document import Estimate, MemoryDetail
from batchtune.report.view.columns import byte_sizes, counts, numbers, table, words
from batchtune.report.view.model import Column, Fact, Headline, Section, Table
from batchtune.report.view.words import estimate_notes, estimated, held_most
from batchtune.units import aligned, bytes_unit, number, size

_PHASES = {
    "peak": "peak_allocated_bytes",
    "parameters": "parameters_bytes",
    "gradients": "gradients_bytes",
    "optimizer": "optimizer_states_bytes",
    "activations": "activations_bytes",
    "temporary": "temporaries_bytes",
}


def headline(estimates: Sequence[Estimate]) -> Headline | None:
    """The largest batch on the GPU asked about, or on how many of several it trains."""
    rows = sorted((row for row in estimates if row.max_batch_size), key=lambda row: (row.memory_bytes, row.gpu))
    if not rows:
        return Headline("0", f"GPUs asked about could {_verb(estimates)} it") if estimates else None
    if len(estimates) == 1:
        (row,) = rows
        facts = {"GPU": row.gpu, "precision": row.precision}
        facts |= {"safe": estimated(row, row.safe_max_batch_size), "confidence": row.confidence or "-"}
        choice = [Fact(name, text) for name, text in facts.items() if text != "-"]
        reason = "Calculated, not measured: 'probe' on this GPU gives the size that runs."
        largest = estimated(row, row.max_batch_size)
        return Headline(largest, f"is the largest {_batch(rows)} size expected to fit", choice, reason)
    count = len({row.gpu for row in rows})
    choice = [
        Fact(name, estimated(row, row.max_batch_size), f"{row.gpu}, {size(row.memory_bytes)}")
        for name, row in (("least memory", rows[0]), ("most memory", rows[-1]))
    ]
    choice.append(Fact("precision", ", ".join(dict.fromkeys(row.precision for row in rows))))
    reason = "Calculated, not measured: 'probe' on a GPU gives the size that runs there."
    return Headline(str(count), f"{'GPUs' if count > 1 else 'GPU'} could {_verb(rows)} it", choice, reason)


def _batch(rows: Sequence[Estimate]) -> str:
    return "inference batch" if rows[0].inference else "micro-batch"


def _verb(rows: Sequence[Estimate]) -> str:
    return "run (inference, not train)" if rows[0].inference else "train"


def section(estimates: Sequence[Estimate]) -> Section:
    """Largest batches by calculation, how sure each is, and what to know about them; nothing here was measured."""
    rows = sorted(estimates, key=lambda row: (row.memory_bytes, row.gpu))

    def largest(name: str, key: str, **more: int) -> Column:
        values = [getattr(row, key) for row in rows]
        return counts(name, values, cells=[*map(estimated, rows, values)], **more)

    precisions = list(dict.fromkeys(row.precision for row in rows))
    one = f" at {precisions[0]}" if len(precisions) == 1 else ""
    columns = [
        words("GPU", [row.gpu for row in rows], wraps=True),
        byte_sizes("memory", [row.memory_bytes for row in rows], spare=3),
        words("precision", ["" if one else row.precision for row in rows], spare=1),
        largest("largest", "max_batch_size"),
        largest("safe", "safe_max_batch_size"),
        largest("expandable segments", "expandable_segments_max_batch_size", spare=5),
        byte_sizes("peak", [row.peak_bytes for row in rows], detail=True),
        numbers("samples/s", [row.samples_per_second for row in rows], spare=2),
        numbers("samples/J", [row.samples_per_joule for row in rows], spare=4),
        words("confidence", [_confidence(row) for row in rows], spare=1),
    ]
    title = f"largest {_batch(rows)} on each GPU{one}, estimated, not measured; ± is of memory"
    return Section("Estimates", [table(title, columns, summary=True)], list(estimate_notes(estimates)))


def _confidence(row: Estimate) -> str:
    """The confidence in a cell, with its error band where there is one."""
    if row.confidence is None or row.error_share is None:
        return row.confidence or "-"
    level, _, rest = row.confidence.partition(" (")
    return f"{level} ±{row.error_share:.0%}{rest.partition(')')[2]}"


def memory(details: Sequence[MemoryDetail]) -> Section:
    """What memory is for at the estimated peak of each precision, and what holds the most activations."""
    unit, scale = bytes_unit(max(row.peak_allocated_bytes for row in details))

    def held(name: str, key: str) -> Column:
        values = [getattr(row, key) for row in details]
        lined_up = aligned([number(value / scale) for value in values])
        spare = 0 if name == "peak" else 3
        return Column(name=name, cells=[*map(size, values)], values=values, lined_up=lined_up, spare=spare)

    columns = [
        words("precision", [row.precision for row in details], spare=2),
        counts("batch", [row.batch_size for row in details]),
        *(held(name, key) for name, key in _PHASES.items()),
        words("peak in", [row.peak_moment for row in details], spare=4),
    ]
    tables = [table("what memory is for at its peak, estimated", columns, unit=unit)]
    known = [row for row in details if row.holders]
    return Section("Memory", tables + [_holders(row) for row in known[:1]], [held_most(row) for row in known])


def _holders(found: MemoryDetail) -> Table:
    """The modules and lines whose activations are alive at the peak, largest first."""
    columns = [
        words("module", [each.module for each in found.holders]),
        words("line", [each.line or "-" for each in found.holders]),
        byte_sizes("activations", [each.activation_bytes for each in found.holders]),
    ]
    title = f"what holds activations at the peak, at {found.precision} and batch {found.batch_size:,}, estimated"
    return table(title, columns, detail=True)
