"""One training run against the clock: how far a configuration gets in so much training time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator

from batchtune.child.evaluate import fitting_metric_value
from batchtune.child.ranks._base import ALONE, Ranks
from batchtune.child.ranks.parallel import own_seconds, straggler
from batchtune.child.timing import StepClock
from batchtune.child.trainer import Trainer, TrainingBatches, require_finite
from batchtune.device._base import DeviceMemory
from batchtune.device.host import T, read_beside_waits
from batchtune.device.nvml import Energy
from batchtune.document import CurvePoint
from batchtune.protocol.commands import TimeInTurn
from batchtune.protocol.messages import RunEnd, RunSpec
from batchtune.task.contract import Task

EVALUATION_GROWTH = 1.07  # evaluations 7 % of training time apart: the same relative resolution for fast and slow runs
EVALUATION_SHARE = 0.3  # …but never so dense that evaluating takes more than this share of the run's wall time
MOST_WAITING = 5.0  # of the limit: a run that the machine slows down more than this ends all the same
_WORSE_BY = 0.5  # of the metric before training, or of the way: a GAN's, or that of a warm-up, is worse for a while
_WORSE_SHARE = 0.2  # of the limit: a run that is worse by more than that for so long has diverged…
_WORSE_LOOKS = 5  # …if it was looked at so often meanwhile
_WARM_UP_STEPS = 3
_FEWEST_ROUNDS = 3  # of steps that are timed in turn
_LATE_EVALUATIONS = 20  # however long a run, or what it needs, it is looked at this often
_ASKING_SECONDS = 1.0


def next_evaluation(seconds: float, evaluation_seconds: float, spec: RunSpec) -> float:
    """Training time of the evaluation after the one at `seconds`, which took `evaluation_seconds`; within the limit."""
    if spec.evaluate_every is not None:
        return min(spec.limit_seconds, seconds + spec.evaluate_every)
    affordable = evaluation_seconds * (1 - EVALUATION_SHARE) / EVALUATION_SHARE
    expected = spec.expected_seconds or spec.limit_seconds
    of = expected if seconds < expected else spec.limit_seconds
    gap = max(seconds * (EVALUATION_GROWTH - 1), min(affordable, of / _LATE_EVALUATIONS))
    return min(spec.limit_seconds, seconds + gap)


class Divergence:
    """Whether a run is far worse than before training, for so long that it will hardly come back.

    A run has as long again each time that it has come half-way back, from its worst and then from there on:
    BatchNorm's running statistics trail the weights, so that the validation loss of a run that trains well may be a
    hundred times that before training at first. A score such as R² is about 0 before training: what is far is then told
    by the way to the target, or, where there is none, by 1.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._sign, self._patience = (1 if spec.goal == "minimize" else -1), _WORSE_SHARE * spec.limit_seconds
        self._target = None if spec.target is None else self._sign * spec.target
        self._start: float | None = None
        self._left, self._is_rising, self._since, self._looks = 0.0, True, 0.0, 0

    def shows(self, value: float, seconds: float) -> bool:
        """Whether the metric, as it is after so much training, shows that the run has diverged."""
        value = self._sign * value
        if not math.isfinite(value):
            return True
        self._start = value if self._start is None else self._start
        way = 1.0 if self._target is None else abs(self._target - self._start)
        worse = value - self._start - _WORSE_BY * max(abs(self._start), way)
        if self._is_rising:
            self._left = max(self._left, worse)
        if worse <= self._left / 2:
            self._left, self._since, self._looks = max(0.0, worse), seconds, 0
            self._is_rising = self._left == 0
            return False
        self._looks += 1
        return self._looks >= _WORSE_LOOKS and seconds - self._since >= self._patience


def train(
    task: Task,
    memory: DeviceMemory,
    spec: RunSpec,
    joules: Callable[[], float | None] = lambda: None,
    ranks: Ranks = ALONE,
) -> Generator[CurvePoint, bool, RunEnd]:
    """Trains one configuration, yielding each evaluation and being sent whether to go on.

    Ranks that train together all call this, and the first yields: a stretch takes as long as the slowest
    of them, samples and energy are those of all.

    Training seconds count optimizer steps with their data loading, the device synchronised; not evaluation, not
    the warm-up steps on a throwaway model that pay for lazy initialisation. On a CPU the time in which other programs
    had the processor is not counted either, and a stretch that something else on the machine slowed down counts at the
    usual pace; a point then has its measured seconds, too. The start of an epoch is no such stretch and counts in full.
    Energy, by the counter `joules`, is of training, as far as the counter tells it from evaluations: see `Energy`.

    The horizon of the user's scheduler follows from `spec.horizon_seconds`, which is the same for every configuration
    however soon its run is to end: at equal training time all are equally far in their schedules. One on a plateau goes
    by epochs instead, each of which is evaluated, whatever that takes.
    """
    ends = time.perf_counter() + (math.inf if spec.wall_seconds is None else spec.wall_seconds)
    memory.release()
    clock = StepClock(spec.most_step_seconds)
    slow = _Run(task, memory, spec, clock, ranks=ranks).warm_up()
    memory.release()
    horizon = spec.horizon_seconds or spec.limit_seconds
    total_steps = spec.total_steps or max(1, math.ceil(horizon / clock.step_seconds))
    run = _Run(task, memory, spec, clock, joules=joules, ends=ends, total_steps=total_steps, ranks=ranks)
    outcome = yield from run.evaluation()
    while outcome is None:
        if run.advance():
            outcome = yield from run.evaluation()
        else:
            yield from run.tell(None)
            outcome = "diverged"
    steps = total_steps if task.has_horizon else None
    optimizer = run.trainer.optimizers.name if spec.optimizer_arguments else None
    seconds = run.evaluation_seconds, clock.starting_seconds or None
    return RunEnd(outcome, steps, *seconds, optimizer=optimizer, straggler=slow)


def time_in_turn(
    task: Task, memory: DeviceMemory, command: TimeInTurn, ranks: Ranks = ALONE
) -> tuple[tuple[float, ...], ...]:
    """Seconds of an optimizer step of each run, data loading included, round by round; see `TimeInTurn`."""
    memory.release()
    runs = [_Run(task, memory, spec, StepClock(), ranks=ranks) for spec in command.specs]
    for run in runs:
        run.warm_up()
    rounds: list[tuple[float, ...]] = []
    ends = time.perf_counter() + command.seconds
    while len(rounds) < _FEWEST_ROUNDS or ranks.agree(time.perf_counter() < ends):
        rounds.append(tuple(run.stretch(command.stretch_seconds) for run in runs))
    return tuple(rounds)


class _Run:
    """A run at one moment: where its training stands, and how the next stretch of it goes."""

    def __init__(
        self,
        task: Task,
        memory: DeviceMemory,
        spec: RunSpec,
        clock: StepClock,
        *,
        joules: Callable[[], float | None] = lambda: None,
        ends: float = math.inf,
        total_steps: int | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._memory, self._spec, self._clock, self._own_joules, self._ends = memory, spec, clock, joules, ends
        self._ranks = ranks
        self.trainer = Trainer(
            task,
            memory.device,
            spec.precision,
            learning_rate=spec.learning_rate,
            seed=spec.seed,
            total_steps=total_steps,
            optimizer_arguments=spec.optimizer_arguments,
            samples_per_step=spec.batch_size,
            gradient_clipping=spec.gradient_clipping,
            activation_checkpointing=spec.variant.activation_checkpointing,
            ranks=ranks,
        )
        self._batches = TrainingBatches(
            task, spec.micro_batch_size, spec.seed, ranks, spec.samples, spec.length_batches
        )
        self._evaluation_batch_size = spec.evaluation_batch_size
        self.evaluation_seconds = 0.0
        self._last_evaluation_seconds = 0.0
        self._due, self._epoch, self._at_epochs_end = 0.0, 0, False
        self._divergence = Divergence(spec)
        self._energy = Energy(self._joules)

    def _joules(self) -> float | None:
        """What the counters of all devices say together; None where one has none."""
        own = self._own_joules()
        found = self._ranks.together("sum", math.nan if own is None else own)
        return None if math.isnan(found) else found

    def warm_up(self) -> tuple[int, float] | None:
        """A few steps on a model that is thrown away: caches fill, kernels load, and the clock learns the pace.

        Returns the rank that is far slower than the others, and how many times; None where none is.
        """
        require_finite(self.trainer.forward_backward(next(self._batches)), self._spec.micro_batch_size)
        self.trainer.update()
        for _ in range(_WARM_UP_STEPS):
            _, seconds, waited, *_ = self._timed_steps(1)
            self._clock.see(1, seconds, waited)
        if self._ranks.world_size == 1:
            return None
        trainer = self.trainer
        own = own_seconds(trainer.model, trainer.loss_alone, self._batches, self._memory.synchronize)
        return straggler(self._ranks.each(own))

    def stretch(self, seconds: float) -> float:
        """Trains for about so long; returns what a step took."""
        taken, spent, waited, *_ = self._timed_steps(max(1, round(seconds / self._clock.step_seconds)))
        return self._clock.see(taken, spent, waited) / taken

    def evaluation(self) -> Generator[CurvePoint, bool, str | None]:
        """Yields the next point of the curve, if it is due; returns how the run has ended, None if it goes on."""
        spec, clock = self._spec, self._clock
        started = time.perf_counter()
        value, self._evaluation_batch_size = fitting_metric_value(
            self.trainer, self._memory, spec.metric, self._evaluation_batch_size
        )
        self._memory.synchronize()
        self._last_evaluation_seconds = self._ranks.together("max", time.perf_counter() - started)
        self.evaluation_seconds += self._last_evaluation_seconds
        if self._at_epochs_end:
            self._epoch, self._at_epochs_end = self._epoch + 1, False
            for scheduler in self.trainer.on_plateau:
                scheduler.end_epoch(self._ranks.together("first", scheduler.watched(value)))
        if self._seconds_until_due() > 0 and math.isfinite(value) and not spec.reached(value):
            return None
        go_on = yield from self.tell(value)
        if spec.reached(value):
            return "reached"
        if self._divergence.shows(value, clock.seconds):
            return "diverged"
        if clock.seconds >= spec.limit_seconds or clock.measured_seconds >= MOST_WAITING * spec.limit_seconds:
            return "finished"
        joules = self._energy.joules or 0.0
        if spec.limit_joules is not None and not self._ranks.agree(joules < spec.limit_joules):
            return "finished"
        return None if go_on else "pruned"

    def advance(self) -> bool:
        """Trains until an evaluation is due, by the clock or a scheduler; returns whether the loss is a number."""
        clock = self._clock
        if clock.seconds >= self._due:
            self._due = next_evaluation(clock.seconds, self._last_evaluation_seconds, self._spec)
        finite, left = True, self._seconds_until_due()
        with self._energy.of_work():
            while finite:
                taken, *spent, finite = self._timed_steps(_steps_until(left, clock.step_seconds))
                clock.add(taken, *spent)
                left = self._seconds_until_due()
                if left <= 0 or self._at_epochs_end:
                    break
        return finite

    def _epoch_is_over(self) -> bool:
        """Whether a scheduler waits for an evaluation, since an epoch has ended on all ranks; loads the next batch."""
        return bool(self.trainer.on_plateau) and self._ranks.together("min", self._batches.epochs_ended()) > self._epoch

    def _seconds_until_due(self) -> float:
        """What is left until the curve's next point, which is to be there when the run's time on the clock is over."""
        until_end = self._ends - self._last_evaluation_seconds - time.perf_counter()
        return self._ranks.together("min", min(self._due - self._clock.seconds, until_end))

    def _timed_steps(self, steps: int) -> tuple[int, float, float, float, bool]:
        """So many optimizer steps, or fewer where the clock on the wall runs out: others may hold the machine up.

        Returns the steps taken, their training seconds, of these those waited for a processor and those in which epochs
        started, and whether the last loss is finite.
        """
        taken, starting = 0, self._batches.starting_seconds
        seconds, waited = self._read(self._memory.stopwatch)
        while taken == 0 or (taken < steps and not self._at_epochs_end and self._has_time(taken)):
            self.trainer.step(self._batches, self._spec.accumulation_steps)
            taken += 1
            self._at_epochs_end = self._epoch_is_over()
        spent, until_now = self._read(seconds)
        spent = self._ranks.together("max", spent)
        starting = self._ranks.together("max", self._batches.starting_seconds - starting)
        is_finite = self._ranks.agree(math.isfinite(float(self.trainer.loss)))
        return taken, spent, until_now - waited, starting, is_finite

    def _read(self, clock: Callable[[], T]) -> tuple[T, float]:
        """What a clock tells, and what was waited for a processor until then: 0 where that slows nothing down.

        Every other device works on while the host waits; ranks on one host wait for each other.
        """
        if self._ranks.world_size > 1 or self._memory.device.type != "cpu":
            return clock(), 0.0
        return read_beside_waits(clock)

    def _has_time(self, taken: int) -> bool:
        """Whether the clock on the wall lets another step begin; ranks ask each other once a second or so."""
        every = 1 if self._ranks.world_size == 1 else max(1, int(_ASKING_SECONDS / self._clock.step_seconds))
        if taken % every:
            return True
        return self._ranks.agree(time.perf_counter() < self._ends - self._last_evaluation_seconds)

    def tell(self, value: float | None) -> Generator[CurvePoint, bool, bool]:
        """Yields the curve's next point on the first rank; returns on all whether to go on, as that one was sent."""
        clock, samples = self._clock, int(self._ranks.together("sum", self._batches.samples))
        measured = clock.measured_seconds if clock.measured_seconds > clock.seconds else None
        point = CurvePoint(
            seconds=clock.seconds,
            samples=samples,
            value=value,
            measured_seconds=measured,
            joules=self._energy.joules,
        )
        go_on = (yield point) if self._ranks.rank == 0 else False
        return bool(self._ranks.together("first", float(bool(go_on))))


def _steps_until(seconds: float, step_seconds: float) -> int:
    """Steps that fill a stretch of training time; half of what is left at a time, since a step's time varies."""
    left = seconds / max(step_seconds, 1e-9)
    return max(1, int(left / 2) if left > 4 else round(left))  # noqa: PLR2004 - the last few steps at once
