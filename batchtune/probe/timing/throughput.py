"""What a probe times once its answer stands: sizes up to it with what their samples cost, and of ranks the answer."""

from __future__ import annotations

from batchtune.config.probe import SECONDS_PER_POINT, ProbeOptions
from batchtune.document import ThroughputPoint
from batchtune.observer import Observer
from batchtune.probe.timing.flops import add_flops
from batchtune.probe.timing.steps import Times, measure_curve, measure_times, sizes_to_time
from batchtune.processes.worker import Worker
from batchtune.protocol.commands import TimeSteps


def time_sizes(
    worker: Worker,
    points: list[ThroughputPoint],
    largest: int,
    precision: str,
    options: ProbeOptions,
    observer: Observer,
) -> None:
    """Adds a point for each size up to the largest to `points`, as they come, and then their FLOPs."""
    sizes = sizes_to_time(largest, minimum=options.minimum, multiple_of=options.multiple_of)
    command = _command(largest, precision, options).but(seconds=options.timing_seconds)
    measure_curve(worker, points, sizes, observer, command, options.timeout)
    add_flops(worker, points, observer, precision, options.timeout, only_as_share=not options.flops)


def time_ranks(worker: Worker, largest: int, precision: str, options: ProbeOptions, observer: Observer) -> Times:
    """Step times of a group at its answer; see `measure_times`."""
    return measure_times(worker, observer, _command(largest, precision, options), options.timeout)


def _command(size: int, precision: str, options: ProbeOptions) -> TimeSteps:
    steps = options.accumulation_steps
    return TimeSteps(batch_size=size, precision=precision, seconds=SECONDS_PER_POINT, accumulation_steps=steps)
