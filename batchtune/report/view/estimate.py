"""What a report shows of an estimate: its answer, its tables, and the points of its figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from batchtune.device.gpus import COMMON
from batchtune.document import Document, Estimate, MemoryDetail
from batchtune.report.view.figure import Axis, Mark, Plot, Series, with_points
from batchtune.report.view.lengths import estimated_lengths, estimated_sizes
from batchtune.report.view.model import Column, Fact, Headline, Section, Table, byte_sizes, counts, facts, numbers
from batchtune.report.view.words import estimate_notes, estimated, estimated_safe, gist, held_most
from batchtune.units import aligned, bytes_unit, number, size
from batchtune.vocabulary import NO_LARGER, length_text

_REFUSED = "refused"  # the confidence where there is no estimate
MOST_ROWS = 10
"""Of estimates, on one screen."""
_FEW_GPUS = 5
_PHASES = {
    "peak": "peak_allocated_bytes",
    "parameters": "parameters_bytes",
    "gradients": "gradients_bytes",
    "optimizer": "optimizer_states_bytes",
    "activations": "activations_bytes",
    "temporary": "temporaries_bytes",
}

_MOST_BARS = 24


def headline(estimates: Sequence[Estimate]) -> Headline | None:
    """The largest batch on the GPU asked about, or on how many of several it trains."""
    rows = _by_memory(row for row in estimates if row.max_batch_size)
    answered = [row for row in estimates if row.confidence != _REFUSED]
    which = " that were estimated" if 0 < len(answered) < len(estimates) else ""
    if not rows:
        return Headline("0", f"GPUs{which or ' asked about'} could {_verb(estimates)} it") if estimates else None
    if len(estimates) == 1:
        (row,) = rows
        known = {"expected": estimated(row, row.max_batch_size), "GPU": row.gpu, "precision": row.precision}
        choice = facts(known | {"confidence": row.confidence})
        safe = estimated_safe(row) if row.safe_max_batch_size else "none"
        where = f" at length {length_text(row.lengths[-1].length)}" if row.lengths else ""
        text = f"is the largest safe {_batch(rows)} size{where}, error band included"
        return Headline(safe, text, choice, "calculated, not measured")
    count = len({row.gpu for row in rows})
    choice = [
        Fact(f"safe with the {name}", estimated_safe(row), f"{row.gpu}, {size(row.memory_bytes)}")
        for name, row in (("least memory", rows[0]), ("most memory", rows[-1]))
    ]
    choice.append(Fact("precision", ", ".join(_precisions(rows))))
    text = f"of {len({row.gpu for row in answered})} GPUs{which} could {_verb(rows)} it"
    return Headline(str(count), text, choice, "calculated, not measured", repeats=True)


def lines(estimates: Sequence[Estimate]) -> list[Fact]:
    """Of how many GPUs nothing could be said, and why; where the training set has fewer samples than fit."""
    few = dict.fromkeys(note for row in estimates for note in row.notes if note.endswith(NO_LARGER))
    said = [Fact("data", note) for note in few]
    refused = [row for row in estimates if row.confidence == _REFUSED and row.notes]
    if not refused or len(refused) == len(estimates):  # else that is the error
        return said
    which, asked = ({row.gpu for row in rows} for rows in (refused, estimates))
    return [*said, Fact(_REFUSED, f"{len(which)} of {len(asked)} GPUs: {gist(refused[0].notes[0])}")]


def _by_memory(rows: Iterable[Estimate]) -> list[Estimate]:
    return sorted(rows, key=lambda row: (row.memory_bytes, row.gpu))


def _batch(rows: Sequence[Estimate]) -> str:
    return "inference batch" if rows[0].inference else "micro-batch"


def _verb(rows: Sequence[Estimate]) -> str:
    return "run (inference, not train)" if rows[0].inference else "train"


def section(estimates: Sequence[Estimate]) -> Section:
    """Largest batches by calculation, how sure each is, and what to know about them; nothing here was measured."""
    rows = _by_memory(estimates)
    shown, count = _common(rows), len({row.gpu for row in rows})
    which = f"{len({row.gpu for row in shown})} of {count} GPUs" if len(shown) < len(rows) else "each GPU"
    tables = [_table(shown, which, summary=True)]
    if len(shown) < len(rows):
        tables.append(_table(rows, f"each of {count} GPUs", folded=True))
    return Section("Estimates", tables, list(estimate_notes(estimates)))


def lengths(estimates: Sequence[Estimate]) -> Section:
    """The largest batch of each length, on the GPU asked about or the most common ones; a table for each precision.

    One table has all where each GPU was asked about at one precision, such as the best that it has.
    """
    known = _by_memory(row for row in estimates if row.lengths)
    some = [[row for row in known if row.precision == each] for each in _precisions(known)]
    if len(known) == len({row.gpu for row in known}):
        some = [known]
    return Section("Lengths", [estimated_lengths(_common(rows)) for rows in some if rows])


def _precisions(rows: Sequence[Estimate]) -> list[str]:
    return list(dict.fromkeys(row.precision for row in rows))


def _common(rows: Sequence[Estimate]) -> list[Estimate]:
    """Of many rows those of the most common GPUs, in the same order; all of a few, which were asked for by name."""
    names = {row.gpu: None for row in rows}
    if len(names) <= _FEW_GPUS:
        return list(rows)
    answered = {row.gpu for row in rows if row.max_batch_size}
    ranks = {name: rank for rank, name in enumerate(COMMON)}
    first = sorted(names, key=lambda name: (name not in answered, ranks.get(name, len(ranks))))
    kept = first[: max(1, MOST_ROWS * len(names) // len(rows))]
    return [row for row in rows if row.gpu in kept]


def _table(rows: Sequence[Estimate], which: str, *, summary: bool = False, folded: bool = False) -> Table:
    precisions = _precisions(rows)
    one = f" at {precisions[0]}" if len(precisions) == 1 else ""
    expandable = [row.expandable_segments_max_batch_size for row in rows]
    columns = [
        Column("GPU", [row.gpu for row in rows], wraps=True),
        byte_sizes("memory", [row.memory_bytes for row in rows], spare=3),
        Column("precision", ["" if one else row.precision for row in rows], spare=1),
        estimated_sizes("safe", rows, [row.safe_max_batch_size for row in rows], down=True),
        estimated_sizes("largest", rows, [row.max_batch_size for row in rows]),
        estimated_sizes("expandable segments", rows, expandable, spare=5),
        byte_sizes("peak", [row.peak_bytes for row in rows], detail=True),
        numbers("samples/s at most", [row.samples_per_second for row in rows], digits=2, detail=True),
        numbers("samples/J at most", [row.samples_per_joule for row in rows], digits=2, detail=True),
        Column("confidence", [_confidence(row) for row in rows], spare=1),
    ]
    title = f"{_batch(rows)} on {which}{one}, estimated, not measured; ± is of memory"
    return Table(title, columns, summary=summary, folded=folded)


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
        Column("precision", [row.precision for row in details], spare=2),
        counts("batch", [row.batch_size for row in details]),
        *(held(name, key) for name, key in _PHASES.items()),
        Column("peak in", [row.peak_moment for row in details], spare=4),
    ]
    tables = [Table("what memory is for at its peak, estimated", columns, unit=unit)]
    known = [row for row in details if row.holders]
    return Section("Memory", tables + [_holders(row) for row in known[:1]], [held_most(row) for row in known])


def _holders(found: MemoryDetail) -> Table:
    """The modules and lines whose activations are alive at the peak, largest first."""
    columns = [
        Column("module", [each.module for each in found.holders]),
        Column("line", [each.line or "-" for each in found.holders]),
        byte_sizes("activations", [each.activation_bytes for each in found.holders]),
    ]
    title = f"what holds activations at the peak, at {found.precision} and batch {found.batch_size:,}, estimated"
    return Table(title, columns)


def largest_plot(result: Document) -> Plot | None:
    """The largest batch on each GPU as calculated, with the part of it that is safe inside."""
    known = [row for row in result.estimates or [] if row.max_batch_size is not None]
    if not known:
        return None
    groups = _alike(sorted(known, key=lambda row: (row.memory_bytes, row.max_batch_size or 0)))
    several = len({row.precision for row in known}) > 1
    bars: list[tuple[Mark, str, str]] = [
        ("bar", "max_batch_size", "expected"),
        ("inner bar", "safe_max_batch_size", "safe, error band included"),
    ]
    series = []
    for mark, key, meaning in bars:
        sizes = [(getattr(group[0], key), float(at), group) for at, group in enumerate(groups)]
        shown = [(largest, at, group) for largest, at, group in sizes if largest is not None]
        hover = [_about(group, f"{meaning}: {largest:,}") for largest, _, group in shown]
        series.append(Series(mark, meaning, [(largest, at) for largest, at, _ in shown], hover))
    return Plot(
        "Largest batch on each GPU, estimated",
        Axis("largest micro-batch size", from_zero=True, whole=True),
        Axis("", ticks={at: _names(group, several=several) for at, group in enumerate(groups)}),
        with_points(series),
    )


def _alike(rows: list[Estimate]) -> list[list[Estimate]]:
    """GPUs and precisions with one and the same answer share a bar where there are too many for a bar each."""
    if len(rows) <= _MOST_BARS:
        return [[row] for row in rows]
    groups: dict[tuple[object, ...], list[Estimate]] = {}
    for row in rows:
        groups.setdefault((row.memory_bytes, row.max_batch_size, row.safe_max_batch_size), []).append(row)
    return list(groups.values())


def _names(group: list[Estimate], *, several: bool) -> str:
    """What stands beside a bar; all its GPUs are named where the pointer rests on it."""
    more = len({each.gpu for each in group}) - 1
    parts = [group[0].gpu, *([f"+{more}"] if more else [])]
    return " ".join(parts + (["/".join(dict.fromkeys(each.precision for each in group))] if several else []))


def _about(group: list[Estimate], answer: str) -> list[str]:
    gpus, precisions = (", ".join(dict.fromkeys(getattr(row, key) for row in group)) for key in ("gpu", "precision"))
    confidence = f"confidence: {group[0].confidence or 'not stated'}"
    return [gpus, answer, f"{size(group[0].memory_bytes)}, {precisions}", confidence]


def efficiency_plot(result: Document) -> Plot | None:
    """Samples per joule over samples per second, a point for each GPU; those that none beats in both are named."""
    rates = [
        (row, row.samples_per_second, row.samples_per_joule)
        for row in result.estimates or []
        if row.samples_per_second and row.samples_per_joule
    ]
    if not rates:
        return None
    best = _unbeaten([(speed, lean) for _, speed, lean in rates])
    precisions = _precisions([row for row, *_ in rates])
    series = []
    for group, precision in enumerate(precisions):
        shown = [(row, (speed, lean)) for row, speed, lean in rates if row.precision == precision]
        hover = [
            (
                row.gpu,
                f"{number(speed)} samples/s",
                f"{number(lean)} samples/J",
                f"largest batch {estimated(row, row.max_batch_size)}",
            )
            for row, (speed, lean) in shown
        ]
        labels = [row.gpu if point in best else "" for row, point in shown]
        name = precision if len(precisions) > 1 else ""
        series.append(Series("gpu", name, [point for _, point in shown], hover, group, labels))
    title = "Speed and energy on each GPU, estimated (roofline at full board power)"
    return Plot(title, Axis("samples per second", log=True), Axis("samples per joule", log=True), series)


def _unbeaten(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those than which no other is faster without being less lean, or leaner without being slower."""

    def beats(other: tuple[float, float], point: tuple[float, float]) -> bool:
        return other != point and other[0] >= point[0] and other[1] >= point[1]

    return [point for point in points if not any(beats(other, point) for other in points)]


def step_plot(result: Document) -> Plot | None:
    """Allocated bytes over two training steps at the estimated batch of the first precision, from phase to phase."""
    detail = next((each for each in result.details or [] if each.curve), None)
    if detail is None:
        return None
    unit, scale = bytes_unit(detail.peak_allocated_bytes)
    points = [(float(at), point.allocated_bytes / scale) for at, point in enumerate(detail.curve)]
    moments = [point.moment for point in detail.curve]
    starts = {float(at): moment for at, moment in enumerate(moments) if at == 0 or moment != moments[at - 1]}
    peak = max(points, key=lambda point: point[1])
    held = [(moment, f"{number(value, 4)} {unit}") for moment, (_, value) in zip(moments, points, strict=True)]
    most = f"peak: {size(detail.peak_allocated_bytes)} in {moments[int(peak[0])]}"
    return Plot(
        f"Memory over two steps at batch {detail.batch_size:,}, {detail.precision}, estimated",
        Axis("", ticks=starts),
        Axis(f"allocated, {unit}", from_zero=True),
        [Series("area", "", points, held), Series("peak", "", [peak], [(most,)])],
    )
