"""Measuring the throughput curve: steps timed in a child at one size after another, then their arithmetic counted."""

from __future__ import annotations

from collections.abc import Sequence

from batchtune.device.gpus import peak_flops
from batchtune.document import ThroughputPoint
from batchtune.errors import UserCodeError
from batchtune.observer import Observer
from batchtune.probe.timing.throughput import with_flops
from batchtune.processes.worker import Worker, WorkerDied
from batchtune.protocol.commands import CountFlops, TimeSteps


def measure_curve(
    worker: Worker,
    points: list[ThroughputPoint],
    sizes: Sequence[int],
    observer: Observer,
    command: TimeSteps,
    timeout: float,
) -> None:
    """Adds a point for each size that can be timed to `points`, as they come; `command` says how all are timed."""
    for size in sizes:
        try:
            points.append(worker.call(command.but(batch_size=size), timeout=timeout))
        except (WorkerDied, UserCodeError) as error:
            observer.note(f"no throughput at batch size {size}: {error}")
            continue
        observer.throughput(points[-1])


def add_flops(
    worker: Worker,
    points: list[ThroughputPoint],
    observer: Observer,
    *,
    precision: str,
    timeout: float,
    only_as_share: bool,
) -> None:
    """Adds the FLOPs of a sample to the points, and what share of the device's peak they are where that is known.

    Counting loads parts of torch that take memory of their own: the child ends with it, and the next work of this
    worker begins in a fresh one. Where they are of interest `only_as_share` of a peak, nothing is done without one.
    """
    opened = worker.start()
    peak = None if opened.device == "cpu" else peak_flops(opened.device_name, precision)
    if peak is None and only_as_share:
        return

    def count(size: int) -> float | None:
        try:
            return worker.call(CountFlops(batch_size=size, precision=precision), timeout=timeout).per_sample
        except (WorkerDied, UserCodeError) as error:
            observer.note(f"no FLOPs at batch size {size}: {error}")
            return None

    points[:] = with_flops(points, count, peak)
    worker.renew()
