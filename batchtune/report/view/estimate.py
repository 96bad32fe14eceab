"""What a report shows of an estimate: its answer, and the tables of GPUs, of memory and of what holds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from batchtune.document import Estimate, MemoryDetail
from batchtune.report.view.columns import byte_sizes, counts, numbers, table, words
from batchtune.report.view.model import Column, Fact, Headline, Section, Table
from batchtune.report.view.words import estimate_notes, estimated, estimated_safe, held_most
from batchtune.units import aligned, bytes_unit, number, size

_MOST_GPUS = 12
_ABOUT = 1.3  # times as much memory is another size
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
        facts = {"expected": estimated(row, row.max_batch_size), "GPU": row.gpu, "precision": row.precision}
        facts |= {"confidence": row.confidence or "-"}
        choice = [Fact(name, text) for name, text in facts.items() if text != "-"]
        reason = "Calculated, not measured: 'probe' on this GPU gives the size that runs."
        safe = estimated_safe(row) if row.safe_max_batch_size else "none"
        return Headline(safe, f"is the largest safe {_batch(rows)} size, error band included", choice, reason)
    count = len({row.gpu for row in rows})
    choice = [
        Fact(f"safe with the {name}", estimated_safe(row), f"{row.gpu}, {size(row.memory_bytes)}")
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
    shown, count = _one_of_each_size(rows), len({row.gpu for row in rows})
    if len(shown) == len(rows):
        return Section("Estimates", [_table(rows, "each GPU", summary=True)], list(estimate_notes(estimates)))
    tables = [
        _table(shown, "one GPU of about each memory size", summary=True),
        _table(rows, f"each of {count} GPUs", folded=True),
    ]
    part = f"{len({row.gpu for row in shown})} of {count} GPUs are shown: -v shows all, --gpu NAME those that you name"
    return Section("Estimates", tables, [part, *estimate_notes(estimates)])


def _one_of_each_size(rows: Sequence[Estimate]) -> list[Estimate]:
    """Of many GPUs, by their memory, one of about each size: the fastest of those with the most common size."""
    if len({row.gpu for row in rows}) <= _MOST_GPUS:
        return list(rows)
    groups: list[list[Estimate]] = []
    for row in rows:
        if not groups or row.memory_bytes > _ABOUT * groups[-1][0].memory_bytes:
            groups.append([])
        groups[-1].append(row)
    names = set()
    for group in groups:
        count = Counter(size(row.memory_bytes) for row in group)
        names.add(max(group, key=lambda row: (count[size(row.memory_bytes)], row.samples_per_second or 0.0)).gpu)
    return [row for row in rows if row.gpu in names]


def _table(rows: Sequence[Estimate], which: str, **more: bool) -> Table:
    def largest(name: str, key: str, **how: int) -> Column:
        values = [getattr(row, key) for row in rows]
        return counts(name, values, cells=[*map(estimated, rows, values)], **how)

    precisions = list(dict.fromkeys(row.precision for row in rows))
    one = f" at {precisions[0]}" if len(precisions) == 1 else ""
    columns = [
        words("GPU", [row.gpu for row in rows], wraps=True),
        byte_sizes("memory", [row.memory_bytes for row in rows], spare=3),
        words("precision", ["" if one else row.precision for row in rows], spare=1),
        counts("safe", [row.safe_max_batch_size for row in rows], cells=[*map(estimated_safe, rows)]),
        largest("largest", "max_batch_size"),
        largest("expandable segments", "expandable_segments_max_batch_size", spare=5),
        byte_sizes("peak", [row.peak_bytes for row in rows], detail=True),
        numbers("samples/s at most", [row.samples_per_second for row in rows], digits=2, detail=True),
        numbers("samples/J at most", [row.samples_per_joule for row in rows], digits=2, detail=True),
        words("confidence", [_confidence(row) for row in rows], spare=1),
    ]
    title = f"{_batch(rows)} on {which}{one}, estimated, not measured; ± is of memory"
    return table(title, columns, **more)


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
