"""One trial of a study from the question to the answer: what is asked for, what is trained, and what is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import Trial, TrialState

from batchtune.document import CurvePoint
from batchtune.document import Trial as TrialRecord
from batchtune.errors import UserCodeError
from batchtune.processes.worker import NodeLost, Worker
from batchtune.protocol.run_spec import RunSpec
from batchtune.tune.objective.cost import SECONDS, cost_of
from batchtune.tune.objective.history import Role, over
from batchtune.tune.objective.records import CUT_OFF, FAILED, curve_attribute, is_cut_off, measured, to_record
from batchtune.tune.optuna_parts.sampler import LOWER_BOUND
from batchtune.tune.storage.shared import requeue
from batchtune.tune.study.limits import CAP_FACTOR, Limits
from batchtune.tune.study.parts import StudyParts
from batchtune.tune.study.workers import TrialRun, run_trial

MOST_RETRIES = 2  # of a run whose place was lost


class Trials:
    """Runs the trials of one study.

    Args:
        parts: of the study.

    Attributes:
        raised: by the user's code in runs of the search, since this start.
    """

    def __init__(self, parts: StudyParts) -> None:
        self._parts = parts
        self._study, self._plan, self._cost = parts.study, parts.plan, cost_of(parts.plan.config.objective.kind)
        self.raised: list[UserCodeError] = []

    def run_next(self, worker: Worker, is_wanted: Callable[[], bool]) -> bool:
        """Asks for one trial, runs it, and tells how it went; an interruption leaves it to be run again.

        Args:
            worker: that trains it.
            is_wanted: whether there is to be another one; asked at the moment of asking for it.

        Returns:
            Whether there was.
        """
        parts = self._parts
        with parts.pool.lock:  # what one worker asks for depends on what the others run
            if not is_wanted():
                return False
            trial = self._study.ask(parts.space.distributions)
            parts.machines.announce(trial)
            role: Role = trial.user_attrs.get("role", "search")
            spec = self._spec(trial, role)
            for key, value in _about(spec, role).items():
                trial.set_user_attr(key, value)
        record = to_record(self._study.get_trials(deepcopy=False)[trial.number])
        parts.observer.trial_started(record, best_seconds=parts.history.best_seconds())
        race = _Race(parts, trial, record)
        try:
            with parts.machines.sign_of_life(trial):
                run = run_trial(worker, spec, race.goes_on, tolerant=role != "baseline")
            with parts.pool.lock:
                self._tell(trial, replace(run, curve=race.curve), spec, role, no_time_left=race.no_time_left)
                if role == "search" and run.error is not None:
                    self.raised.append(run.error)
                parts.targets.check_start(parts.history)
        except UpdateFinishedTrialError:
            parts.observer.note(f"run {trial.number} was taken over by another machine, which had heard nothing of us")
        except NodeLost as lost:
            with parts.pool.lock:
                self._give_back(trial, lost)
        else:
            records = {each.number: each for each in parts.history.records()}  # once: a database is asked several times
            done = sum(1 for each in records.values() if over(each))
            parts.observer.trial_ended(records[trial.number], done=done, seconds_left=parts.budget.seconds_left())
        return True

    def _spec(self, trial: Trial, role: Role) -> RunSpec:
        """What is trained."""
        seed, targets = trial.user_attrs.get("seed", self._plan.config.seed + trial.number), self._parts.targets
        target = None if role == "baseline" and targets.is_automatic else targets.current.value
        spec = Limits(self._plan, self._parts.space, self._parts.history).spec(trial.params, role, seed, target)
        return replace(spec, wall_seconds=max(0.0, self._parts.budget.seconds_left()))

    def _give_back(self, trial: Trial, lost: NodeLost) -> None:
        """Has a run done again whose place was lost, unless it has lost some: then it may be what ends them."""
        retries, number = 0, trial.user_attrs.get("retry_of")
        trials = self._study.get_trials(deepcopy=False)
        while number is not None:
            retries, number = retries + 1, trials[number].user_attrs.get("retry_of")
        trial.set_user_attr("message", str(lost))
        if retries == MOST_RETRIES:
            trial.set_user_attr("outcome", "crash")
        self._study.tell(trial.number, state=TrialState.FAIL)
        if retries < MOST_RETRIES:
            requeue(self._study, trials[trial.number])
            self._parts.observer.note(f"run {trial.number} is requeued: {lost}")

    def _tell(self, trial: Trial, run: TrialRun, spec: RunSpec, role: Role, *, no_time_left: bool) -> None:
        """Gives the trial its attributes, the outcome last: with it, a trial can be told after a kill."""
        outcome, cost, targets = run.outcome, self._cost, self._parts.targets
        if role == "baseline" and outcome not in FAILED and not no_time_left:
            targets.derive(run.curve, diverged=outcome == "diverged")
        capped = Limits(self._plan, self._parts.space, self._parts.history).is_capped(spec, run.training_seconds)
        if (outcome == "finished" and capped) or (outcome == "pruned" and no_time_left):
            outcome = "capped"
        attributes: dict[str, Any] = {"wall_seconds": round(run.wall_seconds, 4), "curve": curve_attribute(run.curve)}
        found = {
            "message": run.message,
            "total_steps": run.total_steps,
            "optimizer": run.optimizer,
            "evaluation_seconds": round(run.evaluation_seconds or 0.0, 4),
        }
        attributes |= {key: value for key, value in found.items() if value}
        if cost is not None:
            best = self._parts.history.best_cost() if outcome == "pruned" else None
            attributes[LOWER_BOUND] = CAP_FACTOR * best if best else cost.at(run.curve[-1]) if run.curve else 0.0
        if no_time_left and (role == "confirm" or (role == "baseline" and targets.is_automatic)):
            attributes |= CUT_OFF
        attributes |= measured(run.curve, outcome, targets.current)
        for key, each in attributes.items():
            trial.set_user_attr(key, each)
        self.close(trial.number, {"role": role} | attributes)

    def close(self, number: int, attributes: dict[str, Any]) -> None:
        """Tells a trial that has run to the study, by the attributes it was given."""
        outcome, cost = attributes["outcome"], self._cost
        value = attributes.get(cost.attribute if cost else "best_value")
        if outcome in FAILED or (is_cut_off(attributes) and outcome != "reached"):
            self._study.tell(number, state=TrialState.FAIL)
        elif value is None or not math.isfinite(value) or (outcome == "diverged" and cost is None):
            self._tell_pruned(number)
        else:
            self._study.tell(number, value)

    def _tell_pruned(self, number: int) -> None:
        """Ends a trial without a value: Optuna would take the last metric, for a trial in no time at all."""
        storage, trial = self._study._storage, self._study.get_trials(deepcopy=False)[number]  # noqa: SLF001 - see above
        storage.set_trial_state_values(trial._trial_id, TrialState.PRUNED)  # noqa: SLF001 - Optuna's name of it


class _Race:
    """A run under way against those before it: its curve so far, and whether it is worth going on."""

    def __init__(self, parts: StudyParts, trial: Trial, record: TrialRecord) -> None:
        self.curve: list[CurvePoint] = []
        self.no_time_left = False
        self._parts, self._trial = parts, trial
        self._prunable = record.role == "search"
        self._record = record
        self._cost = cost_of(parts.plan.config.objective.kind) or SECONDS
        self._last_step = -1

    def goes_on(self, point: CurvePoint) -> bool:
        """Takes in the next point of the curve; returns whether there is a reason to train on."""
        self.curve.append(point)
        self._parts.observer.trial_evaluated(self._record, point)
        if self._parts.budget.seconds_left() <= 0:
            self.no_time_left = True
            return False
        if point.value is None:
            return True
        self._report(point)
        return not (self._prunable and self._trial.should_prune())

    def _report(self, point: CurvePoint) -> None:
        if point.value is not None:
            self._last_step = max(self._last_step + 1, round(self._cost.at(point) / self._cost.step))
            self._trial.report(point.value, self._last_step)


def _about(spec: RunSpec, role: Role) -> dict[str, Any]:
    """What a trial's attributes say before it runs."""
    return {
        "role": role,
        "seed": spec.seed,
        "micro_batch_size": spec.micro_batch_size,
        "gradient_accumulation_steps": spec.accumulation_steps,
        "precision": spec.precision,
        "gradient_clipping": spec.gradient_clipping.model_dump(exclude_none=True),
    }
