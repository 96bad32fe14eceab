"""One training run against the clock: how far a configuration gets in so much training time."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator
from typing import Any

from batchtune.device.memory import DeviceMemory
from batchtune.results import CurvePoint
from batchtune.task.contract import Task
from batchtune.train.clock import StepClock
from batchtune.train.compiled import forget_compiled
from batchtune.train.evaluate import metric_value
from batchtune.train.run_spec import RunSpec
from batchtune.train.step import Trainer, require_finite, training_batches

EVALUATION_GROWTH = 1.07  # evaluations 7 % of training time apart: the same relative resolution for fast and slow runs
EVALUATION_SHARE = 0.3  # …but never so dense that evaluating takes more than this share of the run's wall time
MOST_WAITING = 5.0  # of the limit: a run that the machine slows down more than this ends all the same
_WARM_UP_STEPS = 3
_LATE_EVALUATIONS = 20  # however long a run, it is looked at this often


def next_evaluation(seconds: float, evaluation_seconds: float, spec: RunSpec) -> float:
    """Training time of the evaluation after the one at `seconds`, in seconds; never beyond the run's limit.

    Args:
        seconds: training time so far.
        evaluation_seconds: what the last evaluation took.
        spec: the run.
    """
    if spec.evaluate_every is not None:
        return min(spec.limit_seconds, seconds + spec.evaluate_every)
    affordable = evaluation_seconds * (1 - EVALUATION_SHARE) / EVALUATION_SHARE
    gap = max(seconds * (EVALUATION_GROWTH - 1), min(affordable, spec.limit_seconds / _LATE_EVALUATIONS))
    return min(spec.limit_seconds, seconds + gap)


def train(task: Task, memory: DeviceMemory, spec: RunSpec) -> Generator[CurvePoint, bool, str]:
    """Trains one configuration, yielding each evaluation and being sent whether to go on.

    Training seconds count optimizer steps with their data loading, the device synchronised; not evaluation, not the
    warm-up steps on a throwaway model that pay for lazy initialisation. A stretch that something else on the machine
    slowed down counts at the usual pace; where that happened, a point has its measured seconds, too.

    Returns:
        `reached`, `finished` (the limit came first), `pruned` (sent False) or `diverged`.
    """
    forget_compiled()
    memory.release()
    shape = (spec.micro_batch_size, spec.accumulation_steps, spec.precision)
    clock = StepClock(shape, spec.expected_step_seconds)
    _warm_up(task, memory, spec, clock)
    total_steps = max(1, math.ceil(spec.limit_seconds / clock.step_seconds))
    trainer = Trainer(
        task,
        memory.device,
        spec.precision,
        learning_rate=spec.learning_rate,
        seed=spec.seed,
        total_steps=total_steps,
    )
    batches = training_batches(task, spec.micro_batch_size, spec.seed)
    samples = 0
    while True:
        started = time.perf_counter()
        value = metric_value(trainer, spec.metric, spec.evaluation_batch_size)
        memory.synchronize()
        evaluation_seconds = time.perf_counter() - started
        go_on = yield _point(clock, samples, value)
        if spec.reached(value):
            return "reached"
        if not math.isfinite(value):
            return "diverged"
        if clock.seconds >= spec.limit_seconds or clock.measured_seconds >= MOST_WAITING * spec.limit_seconds:
            return "finished"
        if not go_on:
            return "pruned"
        due = next_evaluation(clock.seconds, evaluation_seconds, spec)
        while clock.seconds < due:
            steps = _steps_until(due - clock.seconds, clock.step_seconds)
            spent, finite = _timed_steps(trainer, memory, batches, steps, spec.accumulation_steps)
            clock.add(steps, spent)
            samples += steps * spec.batch_size
            if not finite:
                yield _point(clock, samples, None)
                return "diverged"


def _point(clock: StepClock, samples: int, value: float | None) -> CurvePoint:
    slowed = clock.measured_seconds > clock.seconds
    measured = clock.measured_seconds if slowed else None
    return CurvePoint(seconds=clock.seconds, samples=samples, value=value, measured_seconds=measured)


def _steps_until(seconds: float, step_seconds: float) -> int:
    """Steps that fill a stretch of training time; half of what is left at a time, since a step's time varies."""
    left = seconds / max(step_seconds, 1e-9)
    return max(1, int(left / 2) if left > 4 else round(left))  # noqa: PLR2004 - the last few steps at once


def _timed_steps(
    trainer: Trainer, memory: DeviceMemory, batches: Iterator[Any], steps: int, accumulation_steps: int
) -> tuple[float, bool]:
    """Training seconds of so many optimizer steps, and whether the last loss is finite."""
    memory.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        loss = trainer.step(batches, accumulation_steps)
    memory.synchronize()
    return time.perf_counter() - started, math.isfinite(float(loss))


def _warm_up(task: Task, memory: DeviceMemory, spec: RunSpec, clock: StepClock) -> None:
    """A few steps on a model that is thrown away: caches fill, kernels load, and the clock learns the pace."""
    trainer = Trainer(task, memory.device, spec.precision, learning_rate=spec.learning_rate, seed=spec.seed)
    batches = training_batches(task, spec.micro_batch_size, spec.seed)
    require_finite(trainer.forward_backward(next(batches)), spec.micro_batch_size)
    trainer.update()
    for _ in range(_WARM_UP_STEPS):
        clock.see(1, _timed_steps(trainer, memory, batches, 1, spec.accumulation_steps)[0])
    del trainer, batches
    memory.release()
