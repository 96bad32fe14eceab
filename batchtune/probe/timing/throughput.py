"""What a probe times once its answer stands: sizes up to it with what their samples cost, and of ranks the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from batchtune.config.probe import SECONDS_PER_POINT, ProbeOptions
from batchtune.device.gpus import peak_flops
from batchtune.document import Attempt, ThroughputPoint
from batchtune.observer import Observer
from batchtune.probe.timing.steps import Times, ask, measure_curve, measure_times, most_to_time, sizes_to_time
from batchtune.processes.worker import Worker
from batchtune.protocol.commands import CountFlops, Flops, TimeSteps

_SAME_FLOPS = 0.001


def time_sizes(
    worker: Worker,
    points: list[ThroughputPoint],
    largest: Attempt,
    precision: str,
    options: ProbeOptions,
    observer: Observer,
) -> None:
    """Adds a point for each size up to the largest to `points`, as they come, and then the FLOPs of their samples.

    Counting loads parts of torch that take memory of their own: the child ends with it, and the next work of this
    worker begins in a fresh one. Unless FLOPs are asked for, none are counted where the device's peak is not known.
    """
    most = most_to_time(options.timing_within, largest.step_seconds)
    sizes = sizes_to_time(largest.batch_size, minimum=options.minimum, multiple_of=options.multiple_of, most=most)
    command = _command(largest.batch_size, precision, options).but(seconds=options.timing_seconds)
    measure_curve(worker, points, sizes, observer, command, options.timeout, options.timing_within)

    opened = worker.start()
    peak = None if opened.device == "cpu" else peak_flops(opened.environment.device, precision)
    if (peak is None and not options.flops) or not opened.fits_alone:
        return

    @cache
    def count(size: int) -> Flops:
        asked = CountFlops(batch_size=size, precision=precision)
        found = ask(worker, asked, options.timeout, observer, f"FLOPs at batch size {size}")
        return found or Flops(per_sample=None)

    if peak and points:
        peak = peak_flops(opened.environment.device, count(points[0].batch_size).computed_in or precision)
    points[:] = with_flops(points, lambda size: count(size).per_sample, peak)
    worker.renew()


def time_ranks(worker: Worker, largest: int, precision: str, options: ProbeOptions, observer: Observer) -> Times:
    """Step times of a group at its answer; see `measure_times`."""
    return measure_times(worker, observer, _command(largest, precision, options), options.timeout)


def _command(size: int, precision: str, options: ProbeOptions) -> TimeSteps:
    steps = options.accumulation_steps
    return TimeSteps(batch_size=size, precision=precision, seconds=SECONDS_PER_POINT, accumulation_steps=steps)


def with_flops(
    points: Sequence[ThroughputPoint], count: Callable[[int], float | None], peak: float | None
) -> list[ThroughputPoint]:
    """The points with the FLOPs of a sample at their size, and the share of the device's peak they are.

    Two neighbouring sizes with the same FLOPs a sample stand for all larger ones.

    Args:
        points: by size, ascending.
        count: FLOPs of a sample at a batch size; None where they cannot be counted.
        peak: the device's peak FLOP/s at the precision of the points; None where it is not known.
    """
    found: list[ThroughputPoint] = []
    settled, before = False, None
    for point in points:
        flops = before if settled else count(point.batch_size)
        if flops is None:
            return [*found, *points[len(found) :]]
        settled = settled or (before is not None and abs(flops - before) <= _SAME_FLOPS * before)
        before = flops
        mfu = flops * point.samples_per_second / peak if peak else None
        found.append(point.model_copy(update={"flops_per_sample": flops, "mfu": mfu}))
    return found
