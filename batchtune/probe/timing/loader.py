"""Whether data comes as fast as the step takes it: which loader settings to measure, and what they say together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from batchtune.device.host import processors
from batchtune.document import InputPipeline, LoaderPoint, ProbeResult, ThroughputPoint
from batchtune.errors import UserCodeError
from batchtune.observer import Observer
from batchtune.processes.worker import Worker, WorkerDied
from batchtune.protocol.commands import TimeLoader
from batchtune.units import number, share

SECONDS_PER_SETTING = 1.0
TOTAL_SECONDS = 20.0
KEEPS_UP = 0.95  # share of the step's own speed that training must reach with this loader
WORTHWHILE = 1.1  # gain of twice as many workers below which more are not tried, nor is the faster setting preferred
_IDLE_DOUBLINGS = 2


class Setting(NamedTuple):
    """What the data loader is given."""

    num_workers: int
    pin_memory: bool


def measure_input_pipeline(
    worker: Worker,
    probe: ProbeResult,
    observer: Observer,
    *,
    timeout: float,
    clock: Callable[[], float] = time.monotonic,
) -> InputPipeline | None:
    """Times the training set's loader alone at settings that `next_setting` chooses; None where no step was timed.

    A CPU's memory limit does not hold in the child afterwards. No setting is begun after `TOTAL_SECONDS` of the clock.
    """
    if not probe.throughput:
        return None
    point, reason = batch_to_feed(probe)
    device = worker.start().device
    pins = device.startswith(("cuda", "xpu"))
    measured: list[LoaderPoint] = []
    started = clock()
    while (setting := next_setting(measured, point.samples_per_second, processors=processors(), pins=pins)) is not None:
        if measured and clock() - started > TOTAL_SECONDS:
            break
        found = _time(worker, point.batch_size, setting, timeout)
        rate = f"{number(found.samples_per_second)} samples/s" if found.samples_per_second else found.message
        observer.note(f"loader with {describe(setting)}: {rate}")
        measured.append(found)
    return judge(measured, point, reason, shares_cores=device == "cpu")


def _time(worker: Worker, batch_size: int, setting: Setting, timeout: float) -> LoaderPoint:
    try:
        command = TimeLoader(batch_size=batch_size, seconds=SECONDS_PER_SETTING, **setting._asdict())
        return worker.call(command, timeout=timeout)
    except (WorkerDied, UserCodeError) as error:
        return LoaderPoint(**setting._asdict(), message=str(error))


def batch_to_feed(probe: ProbeResult) -> tuple[ThroughputPoint, str]:
    """The timed size that the loader is measured at, and why: where training is about as fast as it gets."""
    near = probe.throughput_fit.batch_size_within_5_percent if probe.throughput_fit else None
    for point in probe.throughput:
        if point.batch_size == near:
            return point, "the smallest batch size within 5 % of the best speed"
    largest = max(probe.throughput, key=lambda point: point.batch_size)
    return largest, "the largest batch size that was timed"


def training_rate(point: LoaderPoint, step_rate: float) -> float:
    """Samples a second of training with this loader: workers load while the step runs, without them it waits."""
    rate = rate_of(point)
    if point.num_workers:
        return min(rate, step_rate)
    return 1 / (1 / rate + 1 / step_rate) if rate else 0.0


def keeps_up(point: LoaderPoint, step_rate: float) -> bool:
    """Whether training with this loader is about as fast as the step alone."""
    return training_rate(point, step_rate) >= KEEPS_UP * step_rate


def next_setting(measured: Sequence[LoaderPoint], step_rate: float, *, processors: int, pins: bool) -> Setting | None:
    """What to measure next; None when enough is known.

    0, 1, 2, 4, … workers until they keep up or more do not help, never more than processors; then pinned memory where
    the device `pins`. The step alone takes `step_rate` samples a second.
    """
    if not measured:
        return Setting(0, pin_memory=False)
    last = measured[-1]
    if last.samples_per_second is None or last.pin_memory:
        return None
    if not keeps_up(last, step_rate) and last.num_workers < processors and not _idle(measured):
        return Setting(min(max(1, 2 * last.num_workers), processors), pin_memory=False)
    return Setting(choose(measured, step_rate).num_workers, pin_memory=True) if pins else None


def _idle(measured: Sequence[LoaderPoint]) -> bool:
    """Whether the last doublings of workers brought nothing."""
    rates = [rate_of(point) for point in measured if point.num_workers]
    return len(rates) > _IDLE_DOUBLINGS and max(rates[-_IDLE_DOUBLINGS:]) < WORTHWHILE * max(rates[:-_IDLE_DOUBLINGS])


def choose(measured: Sequence[LoaderPoint], step_rate: float) -> LoaderPoint:
    """The fewest workers that keep up; if none do, the fewest among the fastest. Pinned memory where it is faster."""
    good = [point for point in measured if keeps_up(point, step_rate)]
    if not good:
        best = max(training_rate(point, step_rate) for point in measured)
        good = [point for point in measured if training_rate(point, step_rate) * WORTHWHILE >= best]
    fewest = min(point.num_workers for point in good)
    return max((point for point in good if point.num_workers == fewest), key=rate_of)


def rate_of(point: LoaderPoint) -> float:
    """Samples a second; 0 where the loader failed."""
    return point.samples_per_second or 0.0


def describe(setting: Setting | LoaderPoint) -> str:
    """A loader's settings in words."""
    workers = {0: "no workers", 1: "1 worker"}.get(setting.num_workers, f"{setting.num_workers} workers")
    return workers + (" and pinned memory" if setting.pin_memory else "")


def judge(measured: Sequence[LoaderPoint], step: ThroughputPoint, reason: str, *, shares_cores: bool) -> InputPipeline:
    """The record of what was measured, with the settings to use and the verdict in a sentence.

    Where loader and step run on the same processors (`shares_cores`), both are slower together.
    """
    taken = step.samples_per_second
    known = [point for point in measured if point.samples_per_second]
    found = InputPipeline(
        batch_size=step.batch_size,
        step_samples_per_second=taken,
        measured=list(measured),
        verdict=f"the loader failed: {measured[0].message}",
        reason=reason,
    )
    if not known:
        return found
    best = choose(known, taken)
    bound = not keeps_up(best, taken)
    rate, settings = number(best.samples_per_second), describe(best)
    failed = next((point for point in measured if point.num_workers and point.message), None)
    if bound and not best.num_workers and rate_of(best) >= taken:
        waiting = share(taken / (taken + rate_of(best)))
        verdict = f"input-bound: steps wait {waiting} of the time for their data, which comes at {rate} samples/s"
        verdict += "" if failed else ", and workers are slower"
    elif bound:
        verdict = f"input-bound: the loader gives {rate} samples/s (with {settings}), the step takes {number(taken)}"
    else:
        verdict = f"the loader keeps up with {settings}: it gives {rate} samples/s, the step takes {number(taken)}"
    if bound and failed:
        verdict += f"; {describe(failed)} failed: {failed.message}"
    if shares_cores:
        verdict += "; each was timed alone, and on a CPU they share the processors"
    chosen = {
        "loader_samples_per_second": best.samples_per_second,
        "num_workers": best.num_workers,
        "pin_memory": best.pin_memory,
        "input_bound": bound,
        "verdict": verdict,
    }
    return found.model_copy(update=chosen)
