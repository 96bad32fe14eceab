"""One trial of a study from the question to the answer: what is asked for, what is trained, and what is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from optuna import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from batchtune.progress import Observer
from batchtune.results import CurvePoint
from batchtune.train.run_spec import RunSpec
from batchtune.train.worker import Worker
from batchtune.tune.cost import SECONDS, cost_of
from batchtune.tune.ledger import AT_ONCE, Ledger, Role, over
from batchtune.tune.limits import CAP_FACTOR, Limits
from batchtune.tune.paused import Paused
from batchtune.tune.plan import Plan
from batchtune.tune.records import FAILED, curve_attribute, measured, to_curve, to_record
from batchtune.tune.sampler import LOWER_BOUND
from batchtune.tune.space import Space
from batchtune.tune.targets import Targets
from batchtune.tune.workers import TrialRun, run_trial

MAX_USER_ERRORS = 2  # runs of the search in which the user's code may raise (on a NaN, say) before the study stops
NO_TIME_LEFT = "budget.total was used up"


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Runs the trials of one study.

    Attributes:
        seconds_left: of budget.total.
        lock: held while a trial is chosen or told, for several workers may run trials at once.
        at_once: how many do.
    """

    plan: Plan
    study: Study
    space: Space
    ledger: Ledger
    targets: Targets
    paused: Paused
    observer: Observer
    seconds_left: Callable[[], float]
    lock: AbstractContextManager[Any]
    at_once: int = 1

    def run_next(self, worker: Worker, is_wanted: Callable[[], bool]) -> bool:
        """Asks for one trial, runs it, and tells how it went; an interruption leaves it to be run again.

        Args:
            worker: that trains it.
            is_wanted: whether there is to be another one; asked at the moment of asking for it.

        Returns:
            Whether there was.
        """
        with self.lock:  # what one worker asks for depends on what the others run
            if not is_wanted():
                return False
            trial = self.study.ask(self.space.distributions)
            role: Role = trial.user_attrs.get("role", "search")
            earlier = self.paused.find(trial.params) if role == "search" else None
            seed = (earlier or trial).user_attrs.get("seed", self.plan.config.seed + trial.number)
            spec = self._spec(trial, role, seed, earlier)
            for key, value in _about(spec, role, earlier).items():
                trial.set_user_attr(key, value)
        record = to_record(self.study.get_trials(deepcopy=False)[trial.number])
        self.observer.trial_started(record, best_seconds=self.ledger.best_seconds())
        race = _Race(self, trial, role, to_curve(earlier.user_attrs["curve"]) if earlier else [])
        tolerant = role != "baseline" and self.ledger.user_errors() < MAX_USER_ERRORS
        run = run_trial(worker, spec, race.goes_on, tolerant=tolerant)
        with self.lock:
            self._tell(trial, replace(run, curve=race.curve), spec, role, no_time_left=race.no_time_left)
            self.paused.tidy()
        ended = to_record(self.study.get_trials(deepcopy=False)[trial.number])
        done = sum(1 for each in self.ledger.records() if over(each))
        self.observer.trial_ended(ended, done=done, seconds_left=self.seconds_left())
        return True

    def _spec(self, trial: Trial, role: Role, seed: int, earlier: FrozenTrial | None) -> RunSpec:
        runs_through = not self.targets.current.value or (role == "baseline" and self.targets.is_automatic)
        target = None if runs_through else self.targets.current.value
        spec = Limits(self.plan, self.space, self.ledger).spec(trial.params, role, seed, target)
        if earlier is not None:
            return replace(spec, checkpoint=self.paused.path(earlier.number), resume=True)
        return replace(spec, checkpoint=self.paused.path(trial.number)) if role == "search" else spec

    def _tell(self, trial: Trial, run: TrialRun, spec: RunSpec, role: Role, *, no_time_left: bool) -> None:
        """Gives the trial its attributes, the outcome last: with it, a trial can be told after a kill."""
        outcome, cost = run.outcome, cost_of(self.plan.config.objective.kind)
        if role == "baseline":
            self.targets.derive(run.curve)
        capped = Limits(self.plan, self.space, self.ledger).is_capped(spec, run.training_seconds)
        if (outcome == "finished" and capped) or (outcome == "pruned" and no_time_left):
            outcome = "capped"
        attributes: dict[str, Any] = {"wall_seconds": round(run.wall_seconds, 4), "curve": curve_attribute(run.curve)}
        found = {"message": run.message, "total_steps": run.total_steps, "kept": run.kept and outcome == "pruned"}
        attributes |= {key: value for key, value in found.items() if value}
        if role != "baseline" and self.at_once > 1:
            attributes[AT_ONCE] = self.at_once
        if cost is not None:
            best = self.ledger.best_cost() if outcome == "pruned" else None
            attributes[LOWER_BOUND] = CAP_FACTOR * best if best else cost.at(run.curve[-1]) if run.curve else 0.0
        if no_time_left and role == "confirm":
            attributes["message"] = NO_TIME_LEFT
        attributes |= measured(run.curve, outcome, self.targets.current)
        for key, each in attributes.items():
            trial.set_user_attr(key, each)
        self.close(trial.number, {"role": role} | attributes)

    def close(self, number: int, attributes: dict[str, Any]) -> None:
        """Tells a trial that has run to the study, by the attributes it was given."""
        outcome, cost = attributes["outcome"], cost_of(self.plan.config.objective.kind)
        value = attributes.get(cost.attribute if cost else "best_value")
        if outcome in FAILED or (attributes.get("message") == NO_TIME_LEFT and outcome != "reached"):
            self.study.tell(number, state=TrialState.FAIL)
        elif value is None or not math.isfinite(value) or (outcome == "diverged" and cost is None):
            self.study.tell(number, state=TrialState.PRUNED)
        else:
            self.study.tell(number, value)


class _Race:
    """A run under way against those before it: its curve so far, and whether it is worth going on."""

    def __init__(self, trials: Trials, trial: Trial, role: Role, curve: list[CurvePoint]) -> None:
        self.curve = curve
        self.no_time_left = False
        self._trials, self._trial = trials, trial
        self._prunable = role == "search" and not curve  # who was stopped before is given all of its time now
        self._record = to_record(trials.study.get_trials(deepcopy=False)[trial.number])
        self._cost = cost_of(trials.plan.config.objective.kind) or SECONDS
        self._last_step = -1
        for point in curve:
            self._report(point)

    def goes_on(self, point: CurvePoint) -> bool:
        """Takes in the next point of the curve; returns whether there is a reason to train on."""
        self.curve.append(point)
        self._trials.observer.trial_evaluated(self._record, point)
        if self._trials.seconds_left() <= 0:
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


def _about(spec: RunSpec, role: Role, earlier: FrozenTrial | None) -> dict[str, Any]:
    """What a trial's attributes say before it runs."""
    about = {
        "role": role,
        "seed": spec.seed,
        "micro_batch_size": spec.micro_batch_size,
        "gradient_accumulation_steps": spec.accumulation_steps,
        "precision": spec.precision,
    }
    return about | ({"continues": earlier.number} if earlier is not None else {})
