"""Inputs of many lengths: the batches that were measured, in the words of libraries that batch by length."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import accumulate

from batchtune.document import Document, Estimate, Length, LengthPoint, ProbeResult
from batchtune.errors import UsageError
from batchtune.report.view.figure import Axis, Mark, Plot, Series, with_points
from batchtune.report.view.model import Column, Fact, Table, byte_sizes, counts, numbers, shares
from batchtune.report.view.settings import Fields, Ran
from batchtune.report.view.words import estimated
from batchtune.units import LEAST_PEAK
from batchtune.vocabulary import covers, length_text, order

_ALONE = "fits alone, not checked"  # with the other lengths, on which its memory depends


def has_lengths(result: Document) -> bool:
    """Whether the largest batch of more than one length was measured."""
    return result.probe is not None and bool(result.probe.lengths)


def largest_batches(result: Document) -> dict[Length, int]:
    """The largest batch of each length, shortest first; UsageError where there are none, or none checked together."""
    points = result.probe.lengths if result.probe else ()
    if not points:
        raise UsageError(
            f"this {result.kind} has no lengths; run 'batchtune probe {shlex.quote(result.task.path)} --lengths auto'"
        )
    if result.probe is not None and result.probe.lacks_length_check:
        raise UsageError(f"this probe ended before its lengths were checked together; run it again: {result.task.path}")
    return {point.length: point.max_batch_size for point in points}


def lhotse(ran: Ran) -> Fields:
    """Fields of the data loaders that NeMo makes with lhotse's bucketing, by one number of a sample or two.

    Raises:
        UsageError: the result has no lengths.
    """
    batches = largest_batches(ran.result)
    bins = [length if isinstance(length, int) else list(length) for length in batches]
    return {
        "use_bucketing": True,
        "num_buckets": len(bins),
        "bucket_duration_bins": bins,
        "bucket_batch_size": list(batches.values()),
    }


def lhotse_notes(_: Ran) -> list[str]:
    """What else its configuration must say, or not."""
    return [
        "the bins are in the unit of your lengths; lhotse counts seconds of audio, or tokens of text",
        "take batch_size, batch_duration and quadratic_duration out of your configuration",
    ]


def fairseq(ran: Ran) -> Fields:
    """Batches by their number of tokens, the longest sample times how many, as fairseq and those after it count.

    Raises:
        UsageError: the result has no lengths, those of several numbers, or too few of them in between.
    """
    batches = {length: batch for length, batch in largest_batches(ran.result).items() if isinstance(length, int)}
    if not batches:
        raise UsageError("max_tokens counts one length of a sample, and these have several; take --format lhotse")
    tokens, longest = most_tokens(batches), max(batches)
    if tokens < longest:
        raise UsageError(
            f"max_tokens would be {tokens} to be safe at every length, less than the longest sample, {longest}; probe "
            "more --lengths in between"
        )
    return {"dataset.max_tokens": tokens, "dataset.batch_size": max(batches.values())}


def most_tokens(batches: Mapping[int, int]) -> int:
    """The most tokens, padding counted, of batches that fit at every length; to be used with the largest batch of all.

    What was measured at a length holds for all samples up to it. The shortest of those samples, one longer than the
    length before, is the one of which a number of tokens makes the most: it may make no more than the batch measured.
    Lengths at which the largest batch of all fits are limited by the number of samples alone.

    Args:
        batches: the largest batch at each length.
    """
    lengths = sorted(batches)
    largest = list(accumulate((batches[length] for length in reversed(lengths)), max))[::-1]
    limits = [
        (batch + 1) * (before + 1) - 1
        for before, batch in zip(lengths, largest[1:], strict=False)
        if batch < largest[0]
    ]
    return min(limits, default=largest[0] * lengths[-1])


def lengths_table(probe: ProbeResult) -> Table:
    """A row for each length: its largest batch, what failed above it, memory and speed there, and what was tried."""
    points = probe.lengths
    steps = [_step_seconds(point) for point in points]
    speeds = [point.max_batch_size / step if step else None for point, step in zip(points, steps, strict=True)]
    peaks, limit = [point.peak_reserved_bytes for point in points], probe.memory_limit_bytes
    columns = [
        _length_column([point.length for point in points]),
        counts(_ALONE if probe.lacks_length_check else "largest batch", [each.max_batch_size for each in points]),
        counts("fails at", [point.first_failing_batch_size for point in points], spare=1),
        byte_sizes("peak", peaks, least=LEAST_PEAK, spare=3),
        shares("of limit", [peak / limit if peak and limit else None for peak in peaks], digits=1, spare=4),
        numbers("samples/s", speeds, spare=2),
        *_token_speeds(points, speeds),
        counts("attempts", [len(point.attempts) for point in points], spare=5),
        counts("out of memory", [sum(a.outcome == "oom" for a in point.attempts) for point in points], detail=True),
    ]
    so_far = ", not checked together yet" if probe.lacks_length_check else ""
    return Table(f"largest batch of each length at {probe.precision}{so_far}", columns, summary=True)


def _token_speeds(points: Sequence[LengthPoint], speeds: Sequence[float | None]) -> list[Column]:
    """A column of tokens a second, padding counted; none where a length has several numbers."""
    lengths = [point.length for point in points if isinstance(point.length, int)]
    if len(lengths) < len(points):
        return []
    tokens = [speed * length if speed else None for length, speed in zip(lengths, speeds, strict=True)]
    return [numbers("tokens/s", tokens, spare=2)]


def estimated_lengths(rows: list[Estimate]) -> Table:
    """The calculated batches of each length: of one GPU all that is known, of several those that are safe."""
    points, precisions = rows[0].lengths, list(dict.fromkeys(row.precision for row in rows))
    title = f"largest batch of each length at {' or '.join(precisions)}, estimated, not measured"
    if len(rows) > 1:
        columns = [Column("GPU", [row.gpu for row in rows], wraps=True)]
        columns += [
            estimated_sizes(
                length_text(point.length), rows, [row.lengths[at].safe_max_batch_size for row in rows], down=True
            )
            for at, point in enumerate(points)
        ]
        return Table(f"{title}, error band included", columns, summary=True)
    columns = [
        _length_column([point.length for point in points]),
        estimated_sizes("safe", rows * len(points), [point.safe_max_batch_size for point in points], down=True),
        estimated_sizes("largest", rows * len(points), [point.max_batch_size for point in points]),
        estimated_sizes("alone", rows * len(points), [point.alone_max_batch_size for point in points], spare=2),
        byte_sizes("peak", [point.peak_bytes for point in points], spare=1),
        numbers("samples/s at most", [point.samples_per_second for point in points], digits=2, detail=True),
    ]
    return Table(f"{title}, on {rows[0].gpu}; alone: no others beside it", columns, summary=True)


def estimated_sizes(
    name: str, rows: Sequence[Estimate], sizes: Sequence[int | None], *, down: bool = False, spare: int = 0
) -> Column:
    """A column of an estimate's sizes, a row of `rows` each, with the digits that its error leaves."""
    cells = [estimated(row, size, down=down) for row, size in zip(rows, sizes, strict=True)]
    return counts(name, sizes, cells=cells, spare=spare)


def _length_column(lengths: Sequence[Length]) -> Column:
    return Column("length", [*map(length_text, lengths)], [*map(_extent, lengths)])


def lengths_lines(probe: ProbeResult) -> list[Fact]:
    """The final check of all lengths, and what they gain over one batch size for all."""
    said, check = [], probe.length_check
    if check is not None:
        made = f"; made smaller by it: {', '.join(map(length_text, check.lowered))}" if check.lowered else ""
        said.append(Fact("all lengths", f"{check.steps} steps over them in random order, evaluation and saving{made}"))
    if probe.lacks_length_check:
        said.append(Fact("all lengths", "not checked together yet; what is here was tried at each length alone"))
    elif probe.lengths:
        fixed = _fixed_batch(probe.lengths[-1])
        gain = _gain(probe, fixed)
        if gain > 1:
            said.append(Fact("gain", f"{gain:.2g} times fewer batches an epoch than with {fixed:,} at every length"))
    return said


def _fixed_batch(longest: LengthPoint) -> int:
    """The batch for all lengths: the longest's that has passed a final check, with no other lengths beside it, too."""
    checked = [each.batch_size for each in longest.attempts if each.purpose == "verify" and each.fits]
    return max(checked, default=longest.max_batch_size)


def _gain(probe: ProbeResult, fixed: int) -> float:
    """How many times fewer batches of the shortest sufficient length there are than of a fixed size; 0: not known."""
    needed = samples = 0.0
    for count in probe.length_distribution:
        enough = [point.max_batch_size for point in probe.lengths if covers(point.length, count.length)]
        if not enough:
            return 0.0
        needed, samples = needed + count.samples / max(enough), samples + count.samples
    return samples / fixed / needed if needed else 0.0


def lengths_plot(probes: Sequence[ProbeResult]) -> Plot | None:
    """The largest batch against length: what fitted, and what failed above it."""
    series = []
    probes = [probe for probe in probes if len(probe.lengths) > 1]
    for group, probe in enumerate(probes):
        name = f"{probe.precision} " if len(probes) > 1 else ""
        fits, trains = (_ALONE, "fitted alone") if probe.lacks_length_check else ("largest batch", "trains")
        sides: list[tuple[Mark, str, str, str]] = [
            ("fit", fits, "max_batch_size", trains),
            ("oom", "fails", "first_failing_batch_size", "fails"),
        ]
        for mark, meaning, key, verb in sides:
            shown = [(each, batch) for each in probe.lengths if (batch := getattr(each, key)) is not None]
            hover = [
                (f"length {length_text(each.length)}", f"batch {batch:,} {verb}", f"{len(each.attempts)} attempts")
                for each, batch in shown
            ]
            points = [(float(_extent(each.length)), float(batch)) for each, batch in shown]
            series.append(Series(mark, f"{name}{meaning}", points, hover, group))
    if not series:
        return None
    several = any(not isinstance(point.length, int) for probe in probes for point in probe.lengths)
    axis = Axis("length, product of its numbers" if several else "length", log=True, whole=True)
    upward = Axis("largest micro-batch", log=True, whole=True)
    return Plot("Largest batch against length", axis, upward, with_points(series))


def _extent(length: Length) -> int:
    return order(length)[0]


def _step_seconds(point: LengthPoint) -> float | None:
    """Of the attempt at the largest batch, which trained this length alone."""
    found = [each for each in point.attempts if each.fits and each.batch_size == point.max_batch_size]
    return next((each.step_seconds for each in found if each.step_seconds), None)
