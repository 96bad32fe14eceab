"""Floating-point operations of a sample at each size that was timed, and the share of the device's peak they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchtune.device.gpus import peak_flops
from batchtune.document import ThroughputPoint
from batchtune.observer import Observer
from batchtune.probe.timing.steps import ask
from batchtune.processes.worker import Worker
from batchtune.protocol.commands import CountFlops

_SAME_FLOPS = 0.001


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


def add_flops(
    worker: Worker,
    points: list[ThroughputPoint],
    observer: Observer,
    precision: str,
    timeout: float,
    *,
    only_as_share: bool,
) -> None:
    """Adds the FLOPs of a sample to the points, and what share of the device's peak they are where that is known.

    Counting loads parts of torch that take memory of their own: the child ends with it, and the next work of this
    worker begins in a fresh one. Where they are of interest `only_as_share` of a peak, nothing is done without one.
    """
    opened = worker.start()
    peak = None if opened.device == "cpu" else peak_flops(opened.device_name, precision)
    if (peak is None and only_as_share) or not opened.fits_alone:
        return

    def count(size: int) -> float | None:
        command = CountFlops(batch_size=size, precision=precision)
        found = ask(worker, command, timeout, observer, f"FLOPs at batch size {size}")
        return found.per_sample if found else None

    points[:] = with_flops(points, count, peak)
    worker.renew()
