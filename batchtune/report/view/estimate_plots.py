"""The points of an estimate's figures: the largest batch and the efficiency of each GPU, and memory over two steps."""

from __future__ import annotations

from collections.abc import Sequence

from batchtune.document import Document, Estimate
from batchtune.report.view.model import Axis, Mark, Plot, Series
from batchtune.report.view.words import estimated
from batchtune.units import bytes_unit, number, size

_MOST_BARS = 24


def largest(result: Document) -> Plot | None:
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
    for mark, key, words in bars:
        sizes = [(getattr(group[0], key), float(at), group) for at, group in enumerate(groups)]
        shown = [(largest, at, group) for largest, at, group in sizes if largest is not None]
        hover = [_about(group, f"{words}: {largest:,}") for largest, _, group in shown]
        series.append(Series(mark, words, [(largest, at) for largest, at, _ in shown], hover))
    return Plot(
        "Largest batch on each GPU, estimated",
        Axis("largest micro-batch size", from_zero=True, whole=True),
        Axis("", ticks={at: _names(group, several=several) for at, group in enumerate(groups)}),
        [each for each in series if each.points],
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
    words = [group[0].gpu, *([f"+{more}"] if more else [])]
    return " ".join(words + (["/".join(dict.fromkeys(each.precision for each in group))] if several else []))


def _about(group: list[Estimate], answer: str) -> list[str]:
    gpus, precisions = (", ".join(dict.fromkeys(getattr(row, key) for row in group)) for key in ("gpu", "precision"))
    confidence = f"confidence: {group[0].confidence or 'not stated'}"
    return [gpus, answer, f"{size(group[0].memory_bytes)}, {precisions}", confidence]


def efficiency(result: Document) -> Plot | None:
    """Samples per joule over samples per second, a point for each GPU; those that none beats in both are named."""
    rates = [
        (row, row.samples_per_second, row.samples_per_joule)
        for row in result.estimates or []
        if row.samples_per_second and row.samples_per_joule
    ]
    if not rates:
        return None
    best = _unbeaten([(speed, lean) for _, speed, lean in rates])
    precisions = list(dict.fromkeys(row.precision for row, *_ in rates))
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


def step(result: Document) -> Plot | None:
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
