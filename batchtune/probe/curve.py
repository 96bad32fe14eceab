"""Measuring the throughput curve: steps timed in a child at one size after another, then their arithmetic counted."""

from __future__ import annotations

from collections.abc import Sequence

from batchtune.device.gpus import peak_flops
from batchtune.errors import UserCodeError
from batchtune.probe.throughput import with_flops
from batchtune.progress import Observer
from batchtune.results import ThroughputPoint
from batchtune.train.worker import Worker, WorkerLost

SECONDS_PER_POINT = 1.0


def measure_curve(
    worker: Worker,
    points: list[ThroughputPoint],
    sizes: Sequence[int],
    observer: Observer,
    *,
    precision: str,
    accumulation_steps: int,
    timeout: float,
) -> None:
    """Adds a point for each size that can be timed to `points`, as they come, and their FLOPs at the end.

    Counting loads parts of torch that take memory of their own: the child ends with it, and the next work of this
    worker begins in a fresh one.
    """
    for size in sizes:
        try:
            answer = worker.call(
                "time_steps",
                timeout=timeout,
                batch_size=size,
                precision=precision,
                seconds=SECONDS_PER_POINT,
                accumulation_steps=accumulation_steps,
            )
        except (WorkerLost, UserCodeError) as error:
            observer.note(f"no throughput at batch size {size}: {error}")
            continue
        points.append(ThroughputPoint.model_validate(answer))
        observer.throughput(points[-1])

    _add_flops(worker, points, observer, precision=precision, timeout=timeout)


def _add_flops(
    worker: Worker, points: list[ThroughputPoint], observer: Observer, *, precision: str, timeout: float
) -> None:
    def count(size: int) -> float | None:
        try:
            answer = worker.call("count_flops", timeout=timeout, batch_size=size, precision=precision)
        except (WorkerLost, UserCodeError) as error:
            observer.note(f"no FLOPs at batch size {size}: {error}")
            return None
        flops: float | None = answer["flops_per_sample"]
        return flops

    facts = worker.start()
    peak = None if facts["device"] == "cpu" else peak_flops(facts["environment"]["device"], precision)
    points[:] = with_flops(points, count, peak)
    worker.close()
