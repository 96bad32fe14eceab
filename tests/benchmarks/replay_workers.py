"""Many workers on recorded learning curves: one simulated clock, and events in the order in which they would happen.

Each worker is a thread, as in batchtune's own pool, but only one of them runs at any moment: who trains for so many
seconds hands over to whoever is due next. So 256 workers need one processor, and the same seed gives the same study.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import optuna
from optuna.storages import BaseStorage
from optuna.trial import TrialState
from replay_curves import Load, Record
from replay_tuners import (
    SEED_STRIDE,
    Answers,
    Configuration,
    ReplayWorker,
    SimulatedClock,
    baseline_of,
    halving,
    median,
    ray_tuner,
    replayed_plan,
    run_to_end,
    simulated_time,
    space,
)

from batchtune.document import CurvePoint, Trial
from batchtune.processes.pool import work_alone
from batchtune.tune.study.phases import TuneStudy

MOST_TRIALS = 256  # of the other tuners
HORIZON = 240  # oracle runs on the wall, after which the other tuners start no more trials


@dataclass(frozen=True, slots=True)
class Moment:
    """What a tuner had come to when one of its runs had ended.

    Attributes:
        seconds: on the wall, since it began.
        answer: what it would have answered then; None before it had an answer.
        role: of the run: baseline, search or confirm.
    """

    seconds: float
    answer: Configuration | None
    role: str = "search"


class EventClock(SimulatedClock):
    """Simulated time of several threads, of which one runs at a time; `sleep` hands over to the next that is due."""

    def __init__(self) -> None:
        super().__init__()
        self._due: list[tuple[float, int, threading.Lock]] = []
        self._numbers = itertools.count()

    def sleep(self, seconds: float) -> None:
        turn = self._turn_at(self.now + seconds)
        self._hand_over()
        turn.acquire()

    def run(self, jobs: Sequence[Callable[[], object]]) -> None:
        """Runs all jobs side by side until the last one has ended; raises what the first raised that did."""
        over, raised, left = self._closed(), list[BaseException](), len(jobs)

        def live(turn: threading.Lock, job: Callable[[], object]) -> None:
            nonlocal left
            turn.acquire()
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that waits
                raised.append(error)
            left -= 1
            if left:
                self._hand_over()
            else:
                over.release()

        for job in jobs:
            threading.Thread(target=live, args=(self._turn_at(self.now), job), daemon=True).start()
        self._hand_over()
        over.acquire()
        if raised:
            raise raised[0]

    def _turn_at(self, seconds: float) -> threading.Lock:
        turn = self._closed()
        heapq.heappush(self._due, (seconds, next(self._numbers), turn))
        return turn

    def _hand_over(self) -> None:
        self.now, _, turn = heapq.heappop(self._due)
        turn.release()

    @staticmethod
    def _closed() -> threading.Lock:
        lock = threading.Lock()
        lock.acquire()
        return lock


class SideBySide:
    """Stands in for a pool of so many workers, whose runs come from the record."""

    def __init__(self, worker: ReplayWorker, clock: EventClock, workers: int) -> None:
        self.first, self.lock = worker, threading.RLock()
        self._clock, self._workers = clock, workers

    def __len__(self) -> int:
        return self._workers

    def warm_up(self) -> None:
        """They have nothing to start."""

    def work(self, step: Callable[[Any], bool]) -> None:
        """Has every worker call `step` until that says there is nothing more to do."""
        self._clock.run([partial(work_alone, self.first, step)] * self._workers)

    def any_one(self, do: Callable[[Any], Any]) -> Any:
        """What one of them makes of it."""
        return do(self.first)


class Moments(Answers):
    """Notes what a study would answer after each of its trials, and when that was."""

    def __init__(self, clock: SimulatedClock) -> None:
        super().__init__()
        self._clock = clock
        self.noted: list[Moment] = []

    def trial_ended(self, trial: Trial, *, done: int, seconds_left: float) -> None:
        super().trial_ended(trial, done=done, seconds_left=seconds_left)
        self.noted.append(Moment(self._clock.now, self.given[-1], trial.role))


def batchtune_moments(record: Record, seed: int, workers: int, storage: BaseStorage | None = None) -> list[Moment]:
    """The real study with so many workers: measurements before it, search, baseline and confirmation."""
    clock = EventClock()
    worker = ReplayWorker(record, clock, SEED_STRIDE * seed, Load())
    noted = Moments(clock)
    with simulated_time(clock):
        plan = replayed_plan(record, seed, worker)
        pool: Any = SideBySide(worker, clock, workers)
        storage = storage or optuna.storages.InMemoryStorage()
        noted.study = TuneStudy(plan, pool, storage, noted, clock.perf_counter)
        noted.study.run()
    return noted.noted


class OtherTuner(Protocol):
    """What proposes trials and ends them early; a handle is whatever it knows a trial by."""

    def ask(self) -> tuple[Any, int, float]:
        """A handle, batch size and learning rate."""

    def goes_on(self, handle: Any, point: CurvePoint) -> bool:
        """Whether a run is worth going on after an evaluation."""

    def tell(self, handle: Any, outcome: str, seconds: float) -> None:
        """How a run ended: seconds to target, or the longest run's where it did not get there."""


class OptunaTuner:
    """Optuna's TPE as its documentation has it for many workers, with a pruner that looks at milliseconds."""

    def __init__(
        self, record: Record, seed: int, workers: int, make_pruner: Callable[[int], optuna.pruners.BasePruner]
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._study = optuna.create_study(
                sampler=optuna.samplers.TPESampler(seed=SEED_STRIDE * seed, constant_liar=workers > 1),
                pruner=make_pruner(round(1000 * record.longest_run_seconds)),
            )
        self._study.enqueue_trial(baseline_of(record))

    def ask(self) -> tuple[optuna.Trial, int, float]:
        trial = self._study.ask(space())
        return trial, trial.params["batch_size"], trial.params["learning_rate"]

    def goes_on(self, handle: optuna.Trial, point: CurvePoint) -> bool:
        handle.report(point.value or 0.0, round(1000 * point.seconds))
        return not handle.should_prune()

    def tell(self, handle: optuna.Trial, outcome: str, seconds: float) -> None:
        if outcome == "pruned":
            self._study.tell(handle, state=TrialState.PRUNED)
        else:
            self._study.tell(handle, seconds)


class RayTuner:
    """Ray Tune's scheduler and search (see `ray_tuner`) without its actors."""

    def __init__(self, record: Record, seed: int, workers: int) -> None:
        self._scheduler, self._search = ray_tuner(record, seed)
        self._names = map(str, itertools.count())

    def ask(self) -> tuple[Any, int, float]:
        trial = types.SimpleNamespace(trial_id=next(self._names))
        chosen = self._search.suggest(trial.trial_id)
        self._scheduler.on_trial_add(None, trial)
        return trial, chosen["batch_size"], chosen["learning_rate"]

    def goes_on(self, handle: Any, point: CurvePoint) -> bool:
        result = {"seconds": point.seconds, "val_loss": point.value}
        return self._scheduler.on_trial_result(None, handle, result) == "CONTINUE"

    def tell(self, handle: Any, outcome: str, seconds: float) -> None:
        self._search.on_trial_complete(handle.trial_id, {"score": seconds, "training_iteration": 1})


def other_moments(
    make: Callable[[Record, int, int], OtherTuner], record: Record, seed: int, workers: int
) -> list[Moment]:
    """Another tuner with so many workers: each starts a trial as soon as its last one has ended."""
    tuner, clock, longest = make(record, seed, workers), EventClock(), record.longest_run_seconds
    best, answer, noted, numbers = math.inf, None, list[Moment](), iter(range(MOST_TRIALS))

    def work() -> None:
        nonlocal best, answer
        while clock.now < HORIZON * record.oracle[0] and (number := next(numbers, None)) is not None:
            handle, batch_size, rate = tuner.ask()
            began = clock.now

            def goes_on(point: CurvePoint, began: float = began, handle: Any = handle) -> bool:
                clock.sleep(began + point.seconds - clock.now)
                return not point.samples or tuner.goes_on(handle, point)

            outcome, seconds = run_to_end(record, batch_size, rate, SEED_STRIDE * seed + number, goes_on)
            clock.sleep(max(0.0, began + seconds - clock.now))  # of a last point without a value
            tuner.tell(handle, outcome, seconds if outcome == "reached" else longest)
            if outcome == "reached" and seconds < best:
                best, answer = seconds, (batch_size, rate)
            noted.append(Moment(clock.now, answer))

    clock.run([work] * workers)
    return noted


def optuna_defaults(record: Record, seed: int, workers: int) -> OtherTuner:
    """TPE and MedianPruner."""
    return OptunaTuner(record, seed, workers, median)


def optuna_asha(record: Record, seed: int, workers: int) -> OtherTuner:
    """TPE and SuccessiveHalvingPruner, Optuna's asynchronous successive halving, of factor 2."""
    return OptunaTuner(record, seed, workers, halving)


OURS = "batchtune"
WORKERS_TUNERS: dict[str, Callable[[Record, int, int], list[Moment]]] = {
    OURS: batchtune_moments,
    "Optuna: TPE, MedianPruner on time": partial(other_moments, optuna_defaults),
    "Optuna: TPE, ASHA (SuccessiveHalvingPruner, factor 2) on time": partial(other_moments, optuna_asha),
    "Ray Tune: ASHA on time, OptunaSearch": partial(other_moments, RayTuner),
}
