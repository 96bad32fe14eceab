"""Measuring the throughput curve: steps timed in a child at one size after another, then their arithmetic counted."""

from __future__ import annotations

from collections.abc import Sequence

from batchtune.device.gpus import peak_flops
from batchtune.errors import UserCodeError
from batchtune.observer import Observer
from batchtune.probe.throughput import SECONDS_PER_POINT, with_flops
from batchtune.processes.worker import Worker, WorkerLost
from batchtune.results import ThroughputPoint


def measure_curve(
    worker: Worker,
    points: list[ThroughputPoint],
    sizes: Sequence[int],
    observer: Observer,
    *,
    precision: str,
    accumulation_steps: int,
    timeout: float,
    seconds: float = SECONDS_PER_POINT,
) -> None:
    """Adds a point for each size that can be timed to `points`, as they come; each takes about so many seconds."""
    for size in sizes:
        try:
            answer = worker.call(
                "time_steps",
                timeout=timeout,
                batch_size=size,
                precision=precision,
                seconds=seconds,
                accumulation_steps=accumulation_steps,
            )
        except (WorkerLost, UserCodeError) as error:
            observer.note(f"no throughput at batch size {size}: {error}")
            continue
        points.append(ThroughputPoint.model_validate(answer))
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
    facts = worker.start()
    peak = None if facts["device"] == "cpu" else peak_flops(facts["environment"]["device"], precision)
    if peak is None and only_as_share:
        return

    def count(size: int) -> float | None:
        try:
            answer = worker.call("count_flops", timeout=timeout, batch_size=size, precision=precision)
        except (WorkerLost, UserCodeError) as error:
            observer.note(f"no FLOPs at batch size {size}: {error}")
            return None
        flops: float | None = answer["flops_per_sample"]
        return flops

    points[:] = with_flops(points, count, peak)
    worker.renew()
