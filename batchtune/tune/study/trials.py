"""One trial of a study from the question to the answer: what is asked for, what is trained, and what is told."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import Trial, TrialState

from batchtune.document import CurvePoint, Value
from batchtune.document import Trial as TrialRecord
from batchtune.errors import UserCodeError
from batchtune.processes.worker import LONG_SILENCE_SECONDS, NodeLost, Worker, WorkerDied
from batchtune.protocol.commands import Train
from batchtune.protocol.messages import Json, RunEnd, RunSpec
from batchtune.tune.optuna_parts.sampler import LOWER_BOUND
from batchtune.tune.optuna_parts.storages import requeue
from batchtune.tune.study.budget import StudyParts
from batchtune.tune.study.history import CUT_OFF, INTERRUPTED, RAISED, SEEN, Role, curve_attribute, to_record
from batchtune.tune.study.targets import levelled_off, measured
from batchtune.tune.verdict.scores import SECONDS
from batchtune.vocabulary import FAILED

MOST_RETRIES = 2  # of a run whose place was lost
KEEPING_SECONDS, KEEPING_SHARE = 10.0, 0.05  # of a run, the longer: what a kill may cost of its curve, which is kept
LOOK_SECONDS = 0.5  # between two looks at what other machines do


class Trials:
    """Runs the trials of one study.

    Attributes:
        raised: by the user's code in runs of the search, since this start.
    """

    def __init__(self, parts: StudyParts) -> None:
        self._parts, self._study, self._cost = parts, parts.study, parts.cost
        self.raised: list[UserCodeError] = []

    def add(self, params: dict[str, Value], role: Role, seed: int) -> None:
        """Has a configuration run next that is not for the sampler to choose."""
        self._study.enqueue_trial(params, user_attrs={"role": role, "seed": seed})

    def add_baseline(self) -> None:
        """Has the baseline run next, unless it is queued already, runs or has run."""
        parts = self._parts
        if not parts.history.finished("baseline") and not parts.history.is_under_way("baseline"):
            self.add(parts.space.baseline, "baseline", parts.plan.config.seed)

    def revive(self) -> None:
        """Trials that a killed start left running are queued again as they were; those that had ended are told.

        Where other machines are in the study, they may be theirs: they are taken over when nobody is heard of them.
        """
        if self._parts.machines.several:
            return
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if "outcome" in trial.user_attrs:
                self._close(trial.number, trial.user_attrs)
                continue
            self._study.tell(trial.number, state=TrialState.FAIL)
            requeue(self._study, trial)

    def drain(self, awaited: Role | Literal["any"] | None = None) -> None:
        """Runs whatever is queued, and waits for other machines' runs of the `awaited` role, or takes them over."""
        parts = self._parts

        def run_queued(worker: Worker) -> bool:
            parts.machines.take_over()
            if self.run_next(worker, lambda: parts.history.is_under_way(None, TrialState.WAITING)):
                return True
            if awaited is None or not parts.machines.several or parts.budget.seconds_left() <= 0:
                return False
            time.sleep(LOOK_SECONDS)
            return parts.history.is_under_way(None if awaited == "any" else awaited)

        parts.pool.work(run_queued)

    def run_next(self, worker: Worker, is_wanted: Callable[[], bool]) -> bool:
        """Asks for one trial, runs it, and tells how it went; an interruption leaves it to be run again.

        Returns:
            Whether there was one; `is_wanted` is asked at the moment of asking for it.
        """
        parts = self._parts
        with parts.pool.lock:  # what one worker asks for depends on what the others run
            if not is_wanted():
                return False
            trial = self._study.ask(parts.space.distributions)
            parts.machines.announce(trial)
            role: Role = trial.user_attrs.get("role", "search")
            seed = trial.user_attrs.get("seed", self.search_seed(trial.params))
            spec = parts.limits.spec(trial.params, role, seed)
            left = max(0.0, parts.budget.seconds_left())
            is_first = role == "search" and not parts.history.finished("baseline") and parts.history.best_cost() is None
            spec = replace(spec, wall_seconds=left / 2 if is_first else left)  # today's setting is to have its time
            for key, value in _about(spec, role, parts.plan.config.ranks.nodes).items():
                trial.set_user_attr(key, value)
        record = to_record(self._study.get_trials(deepcopy=False)[trial.number])
        parts.observer.trial_started(record, best_seconds=parts.history.best_seconds())
        race = _Race(parts, trial, record)
        try:
            with parts.machines.sign_of_life(trial):
                run = run_trial(worker, spec, race.goes_on, tolerant=role != "baseline")
            with parts.pool.lock:
                self._tell(race, run, spec)
                if role == "search" and isinstance(run.failure, UserCodeError):
                    self.raised.append(run.failure)
                parts.targets.check_start()
        except UpdateFinishedTrialError:
            parts.observer.note(f"run {trial.number} was taken over by another machine, which had heard nothing of us")
        except NodeLost as lost:
            with parts.pool.lock:
                race.keep()
                self._give_back(trial, lost)
        except BaseException as error:
            race.stopped_by(error)
            raise
        else:
            records = {each.number: each for each in parts.history.records()}  # once: a database is asked several times
            done = sum(each.is_over for each in records.values())
            parts.observer.trial_ended(records[trial.number], done=done, seconds_left=parts.budget.seconds_left())
        return True

    def search_seed(self, params: Mapping[str, Value]) -> int:
        """The seed of a run of the search, the same for all: what luck there is in it is then common to them.

        Only a configuration that runs again gets another. Source: common random numbers, Kleijnen 1975 (Statistical
        Techniques in Simulation).
        """
        ended = self._parts.history.finished("search")
        return self._parts.plan.config.seed + sum(each.params == params for each in ended)

    def _give_back(self, trial: Trial, lost: NodeLost) -> None:
        """Has a run done again whose place was lost, unless it has lost some: then it may be what ends them."""
        retries, number = 0, trial.user_attrs.get("retry_of")
        trials = self._study.get_trials(deepcopy=False)
        while number is not None:
            retries, number = retries + 1, trials[number].user_attrs.get("retry_of")
        trial.set_user_attr("message", str(lost))
        if retries == MOST_RETRIES:
            trial.set_user_attr("outcome", lost.outcome)
        self._study.tell(trial.number, state=TrialState.FAIL)
        if retries < MOST_RETRIES:
            requeue(self._study, trials[trial.number])
            self._parts.observer.note(f"run {trial.number} is requeued: {lost}")

    def _tell(self, race: _Race, run: TrialRun, spec: RunSpec) -> None:
        """Gives the trial its attributes, the outcome last: with it, a trial can be told after a kill."""
        cost, targets, role, no_time_left = self._cost, self._parts.targets, race.record.role, race.no_time_left
        outcome = "finished" if race.has_shown_enough and run.outcome == "pruned" else run.outcome
        if role == "baseline" and outcome not in FAILED and not no_time_left:
            targets.derive(run.curve, diverged=outcome == "diverged")
        capped = self._parts.limits.is_capped(spec, run.curve[-1].seconds if run.curve else 0.0)
        if (outcome == "finished" and capped) or (outcome == "pruned" and no_time_left):
            outcome = "capped"
        attributes: Json = {"wall_seconds": round(run.wall_seconds, 4), "curve": curve_attribute(run.curve)}
        found = {
            "message": run.failure and str(run.failure),
            "total_steps": run.total_steps,
            "optimizer": run.optimizer,
            "straggler": run.straggler and {"rank": run.straggler[0], "times": round(run.straggler[1], 2)},
            "evaluation_seconds": round(run.evaluation_seconds or 0.0, 4),
            "starting_seconds": round(run.starting_seconds or 0.0, 4),
        }
        attributes |= {key: value for key, value in found.items() if value}
        if cost is not None:
            spent = cost.at(run.curve[-1]) if run.curve else 0.0
            attributes[LOWER_BOUND] = (self._parts.limits.capped_at() if outcome == "pruned" else None) or spent
        sets_measure = targets.is_automatic or targets.current.value is None  # by how far it gets in its whole time
        needs_all = role == "confirm" or (role == "baseline" and sets_measure)
        if no_time_left and (needs_all or not any(point.samples for point in run.curve)):
            attributes |= CUT_OFF
        attributes |= measured(run.curve, outcome, targets.current)
        for key, each in attributes.items():
            race.trial.set_user_attr(key, each)
        self._close(race.trial.number, {"role": role} | attributes)

    def _close(self, number: int, attributes: Json) -> None:
        """Tells a trial that has run to the study, by the attributes it was given."""
        outcome, cost = attributes["outcome"], self._cost
        value = attributes.get(cost.attribute if cost else "best_value")
        if outcome in FAILED or ("cut_off" in attributes and outcome != "reached"):
            self._study.tell(number, state=TrialState.FAIL)
        elif value is None or not math.isfinite(value) or (outcome == "diverged" and cost is None):
            # without a value: `tell` would take the last metric, for a trial in no time at all
            storage, trial = self._study._storage, self._study.get_trials(deepcopy=False)[number]  # noqa: SLF001
            storage.set_trial_state_values(trial._trial_id, TrialState.PRUNED)  # noqa: SLF001
        else:
            self._study.tell(number, value)


class _Race:
    """A run under way against those before it: its curve so far, and whether it is worth going on."""

    def __init__(self, parts: StudyParts, trial: Trial, record: TrialRecord) -> None:
        self.curve: list[CurvePoint] = []
        self.no_time_left = self.has_shown_enough = False
        self._parts, self.trial, self.record = parts, trial, record
        self._cost, self._last_step, self._left_before = parts.cost or SECONDS, -1, parts.budget.seconds_left()
        self._began, self._keep_after = time.perf_counter(), KEEPING_SECONDS

    def goes_on(self, point: CurvePoint) -> bool:
        """Takes in the next point of the curve; returns whether there is a reason to train on."""
        self.curve.append(point)
        parts, role = self._parts, self.record.role
        parts.observer.trial_evaluated(self.record, point)
        if time.perf_counter() - self._began >= self._keep_after:
            self.keep()
        if parts.budget.seconds_left() <= 0:
            self.no_time_left = True
            return False
        if parts.budget.foresees(point.seconds, self._left_before - parts.budget.seconds_left()):
            parts.observer.announce(parts.budget.outlook())
        if point.value is None:
            return True
        self._last_step = max(self._last_step + 1, round(self._cost.at(point) / self._cost.step))
        self.trial.report(point.value, self._last_step)
        if role == "baseline" and parts.budget.is_open:
            level = levelled_off(self.curve, parts.plan.config.objective.goal)
            self.has_shown_enough = level or point.seconds >= parts.budget.longest
            return not self.has_shown_enough
        return not (role == "search" and self.trial.should_prune())

    def keep(self) -> None:
        """Has the study know the curve so far, and how long the run has been at work."""
        seconds = time.perf_counter() - self._began
        self._keep_after = seconds + max(KEEPING_SECONDS, KEEPING_SHARE * seconds)
        self.trial.set_user_attr("curve", curve_attribute(self.curve))
        self.trial.set_user_attr(SEEN, round(seconds, 4))

    def stopped_by(self, error: BaseException) -> None:
        """Keeps what the run was at, and why it is none yet, unless it had come to its end."""
        with contextlib.suppress(Exception):  # where nothing can be kept, the first error is what to tell
            if "outcome" not in self.trial.user_attrs:
                self.keep()
                raised = isinstance(error, UserCodeError)
                self.trial.set_user_attr("message", str(error) if raised else INTERRUPTED)
                self.trial.set_user_attr(RAISED, raised)


def _about(spec: RunSpec, role: Role, nodes: int) -> Json:
    """What a trial's attributes say before it runs."""
    group: Json = {"world_size": spec.world_size} if spec.world_size > 1 else {}
    group |= {name: each for name, each in spec.variant._asdict().items() if each is not None}
    group |= {"nodes": nodes} if nodes > 1 else {}
    return {
        **group,
        "role": role,
        "seed": spec.seed,
        "micro_batch_size": spec.micro_batch_size,
        "gradient_accumulation_steps": spec.accumulation_steps,
        "precision": spec.precision,
        "gradient_clipping": spec.gradient_clipping.model_dump(exclude_none=True),
    }


@dataclass(frozen=True, kw_only=True)
class TrialRun(RunEnd):
    """What one trial came to; `wall_seconds` count evaluation, too, and `failure` is what it died of."""

    curve: list[CurvePoint]
    wall_seconds: float
    failure: WorkerDied | UserCodeError | None


def run_trial(
    worker: Worker, spec: RunSpec, on_point: Callable[[CurvePoint], bool], *, tolerant: bool = False
) -> TrialRun:
    """Trains one configuration; `on_point` is told of each evaluation and answers whether to go on.

    A child that dies or runs out of memory is an outcome of the trial, not an error of the study; where `tolerant`, so
    is an exception of the user's code.
    """
    curve: list[CurvePoint] = []
    started = time.perf_counter()

    def on_event(point: CurvePoint) -> bool:
        curve.append(point)
        return on_point(point)

    failure: WorkerDied | UserCodeError | None = None
    try:
        timeout = max(LONG_SILENCE_SECONDS, 2 * spec.limit_seconds)
        end = worker.call(Train(spec=spec), timeout=timeout, on_event=on_event)
    except WorkerDied as lost:
        end, failure = RunEnd(lost.outcome), lost
    except UserCodeError as error:
        if not tolerant:
            raise
        end, failure = RunEnd("user_error"), error
    return TrialRun(**vars(end), curve=curve, wall_seconds=time.perf_counter() - started, failure=failure)
