"""One training run against the clock: how far a configuration gets in so much training time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from typing import Any

from batchtune.child.training.batches import TrainingBatches
from batchtune.child.training.clock import StepClock
from batchtune.child.training.evaluate import fitting_metric_value
from batchtune.child.training.trainer import Trainer, require_finite
from batchtune.device._base import DeviceMemory
from batchtune.document import CurvePoint
from batchtune.protocol.run_spec import RunEnd, RunSpec
from batchtune.task.contract import Task

EVALUATION_GROWTH = 1.07  # evaluations 7 % of training time apart: the same relative resolution for fast and slow runs
EVALUATION_SHARE = 0.3  # …but never so dense that evaluating takes more than this share of the run's wall time
MOST_WAITING = 5.0  # of the limit: a run that the machine slows down more than this ends all the same
WORSE_SHARE = 0.2  # of the limit: a run that is worse than before training for so long has diverged…
WORSE_LOOKS = 5  # …if it was looked at so often meanwhile
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


def train(
    task: Task, memory: DeviceMemory, spec: RunSpec, joules: Callable[[], float | None] = lambda: None
) -> Generator[CurvePoint, bool, RunEnd]:
    """Trains one configuration, yielding each evaluation and being sent whether to go on.

    Training seconds count optimizer steps with their data loading, the device synchronised; not evaluation, not
    the warm-up steps on a throwaway model that pay for lazy initialisation. A stretch that something
    else on the machine slowed down counts at the usual pace; a point then has its measured seconds, too.

    The horizon of the user's scheduler follows from `spec.horizon_seconds`, which is the same for every configuration
    however soon its run is to end: at equal training time all are equally far in their schedules, so that a run which
    is compared early is not taken for worse only because its learning rate has not come down yet.

    Args:
        task: the user's code.
        memory: the device.
        spec: the configuration, and when the run is over.
        joules: the device's energy counter, None where it has none. Like seconds, energy is that of training alone.

    Returns:
        `reached`, `finished` (the limit came first), `pruned` (sent False) or `diverged`.
    """
    ends = time.perf_counter() + (math.inf if spec.wall_seconds is None else spec.wall_seconds)
    memory.release()
    clock = StepClock(spec.expected_step_seconds)
    _warm_up(task, memory, spec, clock)
    horizon = spec.horizon_seconds or spec.limit_seconds
    total_steps = spec.total_steps or max(1, math.ceil(horizon / clock.step_seconds))
    run = _Run(_trainer(task, memory, spec, total_steps), memory, spec, clock, joules, ends)
    outcome = yield from run.evaluation()
    while outcome is None:
        if run.advance():
            outcome = yield from run.evaluation()
        else:
            yield run.point(None)
            outcome = "diverged"
    steps = total_steps if task.has("build_scheduler") else None
    optimizer = run.trainer.optimizers.name if spec.optimizer_arguments else None
    return RunEnd(outcome, steps, evaluation_seconds=run.evaluation_seconds, optimizer=optimizer)


class _Run:
    """A run at one moment: where its training stands, and how the next stretch of it goes."""

    def __init__(
        self,
        trainer: Trainer,
        memory: DeviceMemory,
        spec: RunSpec,
        clock: StepClock,
        joules: Callable[[], float | None],
        ends: float,
    ) -> None:
        self._ends = ends
        self.trainer, self._memory, self._spec, self._clock, self._joules = trainer, memory, spec, clock, joules
        self._batches = TrainingBatches(trainer.task, spec.micro_batch_size, spec.seed)
        self._evaluation_batch_size = spec.evaluation_batch_size
        self.evaluation_seconds = 0.0
        self._last_evaluation_seconds = 0.0
        self._start_value: float | None = None
        self._worse_since: float | None = None
        self._worse_looks = 0
        if joules() is not None:
            clock.joules = 0.0

    def evaluation(self) -> Generator[CurvePoint, bool, str | None]:
        """Yields the next point of the curve; returns how the run has ended, None if it goes on."""
        spec, clock = self._spec, self._clock
        started = time.perf_counter()
        value, self._evaluation_batch_size = fitting_metric_value(
            self.trainer, self._memory, spec.metric, self._evaluation_batch_size
        )
        self._memory.synchronize()
        self._last_evaluation_seconds = time.perf_counter() - started
        self.evaluation_seconds += self._last_evaluation_seconds
        go_on = yield self.point(value)
        if spec.reached(value):
            return "reached"
        if not math.isfinite(value) or self._worse_for_long(value):
            return "diverged"
        if clock.seconds >= spec.limit_seconds or clock.measured_seconds >= MOST_WAITING * spec.limit_seconds:
            return "finished"
        if clock.joules is not None and spec.limit_joules is not None and clock.joules >= spec.limit_joules:
            return "finished"
        return None if go_on else "pruned"

    def advance(self) -> bool:
        """Trains until the next evaluation is due; returns whether the loss is still a number."""
        spec, clock = self._spec, self._clock
        due = next_evaluation(clock.seconds, self._last_evaluation_seconds, spec)
        before, finite, left = self._joules(), True, self._seconds_until(due)
        while finite:
            steps = _steps_until(left, clock.step_seconds)
            spent, finite = _timed_steps(self.trainer, self._memory, self._batches, steps, spec.accumulation_steps)
            clock.add(steps, spent)
            left = self._seconds_until(due)
            if left <= 0:
                break
        clock.add_energy(before, self._joules())
        return finite

    def _seconds_until(self, due: float) -> float:
        """What is left until the next evaluation, which is to be over when the run's time on the clock is."""
        until_end = self._ends - self._last_evaluation_seconds - time.perf_counter()
        return min(due - self._clock.seconds, until_end)

    def point(self, value: float | None) -> CurvePoint:
        """The curve's point as things stand."""
        clock = self._clock
        measured = clock.measured_seconds if clock.measured_seconds > clock.seconds else None
        return CurvePoint(
            seconds=clock.seconds,
            samples=self._batches.samples,
            value=value,
            measured_seconds=measured,
            joules=clock.joules,
        )

    def _worse_for_long(self, value: float) -> bool:
        """Whether the run has been worse than before training for so long that it will hardly come back."""
        if self._start_value is None:
            self._start_value = value
        sign, now = (1 if self._spec.goal == "minimize" else -1), self._clock.seconds
        if sign * value <= sign * self._start_value:
            self._worse_since, self._worse_looks = None, 0
            return False
        self._worse_since = now if self._worse_since is None else self._worse_since
        self._worse_looks += 1
        return self._worse_looks >= WORSE_LOOKS and now - self._worse_since >= WORSE_SHARE * self._spec.limit_seconds


def _trainer(task: Task, memory: DeviceMemory, spec: RunSpec, total_steps: int | None = None) -> Trainer:
    return Trainer(
        task,
        memory.device,
        spec.precision,
        learning_rate=spec.learning_rate,
        seed=spec.seed,
        total_steps=total_steps,
        optimizer_arguments=spec.optimizer_arguments,
        samples_per_step=spec.batch_size,
        gradient_clipping=spec.gradient_clipping,
    )


def _steps_until(seconds: float, step_seconds: float) -> int:
    """Steps that fill a stretch of training time; half of what is left at a time, since a step's time varies."""
    left = seconds / max(step_seconds, 1e-9)
    return max(1, int(left / 2) if left > 4 else round(left))  # noqa: PLR2004 - the last few steps at once


def _timed_steps(
    trainer: Trainer, memory: DeviceMemory, batches: TrainingBatches, steps: int, accumulation_steps: int
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
    trainer: Any = _trainer(task, memory, spec)
    batches = TrainingBatches(task, spec.micro_batch_size, spec.seed)
    require_finite(trainer.forward_backward(next(batches)), spec.micro_batch_size)
    trainer.update()
    for _ in range(_WARM_UP_STEPS):
        clock.see(1, _timed_steps(trainer, memory, batches, 1, spec.accumulation_steps)[0])
    del trainer, batches
    memory.release()
