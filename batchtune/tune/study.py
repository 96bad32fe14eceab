"""The study from start to finish: baseline and target, search, confirmation on fresh seeds, and resuming all that."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from batchtune.config import Config
from batchtune.errors import NothingFitsError, UsageError, UserCodeError
from batchtune.progress import Observer
from batchtune.results import CurvePoint, ProbeResult, Target, Trial
from batchtune.train.run_spec import RunSpec
from batchtune.train.worker import Worker
from batchtune.tune.ledger import Ledger, Role, over
from batchtune.tune.prior import Candidates, split_batch, surface_prior
from batchtune.tune.pruner import TimeToValuePruner
from batchtune.tune.recommend import automatic_target, finalists
from batchtune.tune.records import curve_attribute, to_record
from batchtune.tune.sampler import LOWER_BOUND, TimeToTargetSampler
from batchtune.tune.workers import TrialRun, run_trial

CAP_FACTOR = 1.2  # a run that takes so much longer than the best is not the answer
CONFIRM_CAP_FACTOR = 2.0  # of budget.run: a fresh seed of the baseline may need longer than the first did
ENOUGH = 0.03  # expected improvement of log time below which two proposals in a row end the search
MIN_SEARCH_TRIALS = 6
MOST_RESERVED = 0.5  # of budget.total, for confirmation: a slow baseline must leave room to search
MAX_USER_ERRORS = 2  # runs of the search in which the user's code may raise (on a NaN, say) before the study stops
_MAX_EVALUATION_BATCH = 1024
_CONFIRM_SEEDS = 1_000_003  # confirmation never sees a seed that the search has used
_FAILED = {"oom", "crash", "timeout", "user_error"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the study works with once the probe is done."""

    config: Config
    probe: ProbeResult
    candidates: Candidates
    precisions: list[str]
    optimizer: str


class TuneStudy:
    """The Optuna study of one run, its trials run one after another on a worker.

    Args:
        plan: configuration and measurements before the study.
        worker: the child that trains.
        storage: where the study is kept.
        observer: told of every trial.
    """

    def __init__(self, plan: Plan, worker: Worker, storage: BaseStorage, observer: Observer) -> None:
        self._plan, self._worker, self._observer = plan, worker, observer
        config = plan.config
        self._objective = config.objective
        self.timed = self._objective.kind == "time_to_target"
        rates, base = config.learning_rate, config.baseline
        self._space: dict[str, BaseDistribution] = {
            "batch_size": CategoricalDistribution(plan.candidates.batch_sizes),
            "learning_rate": FloatDistribution(
                min(rates.min, base.learning_rate), max(rates.max, base.learning_rate), log=True
            ),
        }
        if len(plan.precisions) > 1:
            self._space["precision"] = CategoricalDistribution(plan.precisions)
        self._sampler = self._make_sampler()
        pruner = TimeToValuePruner(self._objective.goal) if self.timed else optuna.pruners.NopPruner()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.study = optuna.create_study(
            study_name=config.name,
            storage=storage,
            sampler=self._sampler,
            pruner=pruner,
            direction="minimize" if self.timed else self._objective.goal,
            load_if_exists=True,
        )
        self._ledger = Ledger(self.study, timed=self.timed)
        self._revive()
        self._seconds_before = plan.probe.seconds + self._ledger.wall_seconds()
        self._started = time.perf_counter()

    def _make_sampler(self) -> BaseSampler:
        config = self._plan.config
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            fallback = TPESampler(seed=config.seed, n_startup_trials=8)
        if not self.timed:
            return fallback
        prior = surface_prior(
            self._plan.probe,
            optimizer=self._plan.optimizer,
            baseline_batch_size=config.baseline.batch_size,
            baseline_rate=config.baseline.learning_rate,
        )
        return TimeToTargetSampler(prior, seed=config.seed, independent=fallback)

    def run(self) -> None:
        """Baseline, search and confirmation, each from where an earlier start left it.

        Raises:
            UserCodeError: the user's code raised in the baseline run, or its metric is no number.
            NothingFitsError: the baseline cannot be trained, so there is nothing to compare with.
        """
        self._observer.stage("baseline")
        if not self._ledger.finished("baseline") and not self._ledger.waiting("baseline"):
            self._queue(self._baseline_params(), "baseline", self._plan.config.seed)
        self._drain()
        self._check_target()
        if self.study.user_attrs.get("searched") != self._search_budget():
            self._observer.stage("searching")
            self._search()
            self.study.set_user_attr("searched", self._search_budget())
        if self._plan.config.confirm.seeds:
            self._observer.stage("confirming")
            self._confirm()

    @property
    def target(self) -> Target:
        """The target as far as it is known."""
        objective = self._objective
        stored = self.study.user_attrs.get("target")
        if objective.kind != "time_to_target":
            return Target(
                metric=objective.metric, goal=objective.goal, reason="the best value within budget.run counts"
            )
        if objective.target != "auto":
            return Target(
                metric=objective.metric, goal=objective.goal, value=objective.target, reason="set in the configuration"
            )
        value, reason = stored or (None, "not known before the baseline has run")
        return Target(metric=objective.metric, goal=objective.goal, value=value, reason=reason)

    def records(self) -> list[Trial]:
        """All trials, in the form of the result document."""
        return self._ledger.records()

    def _baseline_params(self) -> dict[str, Any]:
        base = self._plan.config.baseline
        params: dict[str, Any] = {"batch_size": base.batch_size, "learning_rate": base.learning_rate}
        if "precision" in self._space:
            params["precision"] = self._plan.precisions[0]
        return params

    def _queue(self, params: dict[str, Any], role: Role, seed: int) -> None:
        self.study.enqueue_trial(params, user_attrs={"role": role, "seed": seed})

    def _revive(self) -> None:
        """Trials that a killed start left running are queued again as they were; those that had ended are told."""
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if "outcome" in trial.user_attrs:
                self._close(trial.number, trial.user_attrs)
                continue
            self.study.tell(trial.number, state=TrialState.FAIL)
            attributes = {key: trial.user_attrs[key] for key in ("role", "seed") if key in trial.user_attrs}
            params = trial.system_attrs.get("fixed_params", {}) | trial.params
            self.study.enqueue_trial(params, user_attrs=attributes | {"retry_of": trial.number})

    def _drain(self) -> None:
        """Runs whatever is queued."""
        while self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            self._run_next()

    def _check_target(self) -> None:
        if not self.timed:
            return
        baselines = self._ledger.finished("baseline")
        failed = [trial for trial in self._ledger.records() if trial.role == "baseline" and trial.state == "fail"]
        if not baselines:
            why = failed[-1].message if failed else "it did not run"
            raise NothingFitsError(f"the baseline could not be trained: {why}; change baseline: in the configuration")
        if all(point.value is None for point in to_record(baselines[0]).curve):
            raise UserCodeError(f"{self._objective.metric} is NaN or infinite before training; mend evaluate() or data")
        if self.target.value is None:
            raise NothingFitsError(
                f"the baseline did not improve {self._objective.metric} within budget.run "
                f"({self._plan.config.budget.run:g} s), so there is no target; raise budget.run, mend the baseline, "
                "or set objective.target"
            )
        value, start = self.target.value, to_record(baselines[0]).curve[0].value
        if start is not None and self._meets(start, value):
            raise UsageError(
                f"objective.target {value:g} is met before training ({self._objective.metric} starts at {start:.4g}); "
                "set a harder one, or check objective.goal"
            )

    def _meets(self, value: float, target: float) -> bool:
        return value <= target if self._objective.goal == "minimize" else value >= target

    def _search(self) -> None:
        config = self._plan.config
        quiet = 0
        while quiet < 2 and self._ledger.searched() < config.budget.trials:  # noqa: PLR2004 - twice is no accident
            if self._seconds_left() <= self._reserve():
                self._observer.note("the search ends: what is left of budget.total is for confirmation")
                return
            self._run_next()
            gain = getattr(self._sampler, "last_expected_improvement", None)
            settled = gain is not None and len(self._ledger.finished("search")) >= MIN_SEARCH_TRIALS and gain < ENOUGH
            quiet = quiet + 1 if settled else 0
        if quiet:
            self._observer.note(f"the search ends: less than {ENOUGH:.0%} improvement is expected of another run")

    def _seconds_left(self) -> float:
        """Of budget.total; the probe and earlier starts are counted in."""
        return self._plan.config.budget.total - self._seconds_before - (time.perf_counter() - self._started)

    def _reserve(self) -> float:
        """Seconds that confirmation and one more run of the search need."""
        config, best = self._plan.config, self._ledger.best_seconds() or self._plan.config.budget.run
        wall = [trial.user_attrs.get("wall_seconds", 0.0) for trial in self._ledger.finished("baseline")]
        base = min(max(wall, default=config.budget.run), config.budget.run)
        times = [trial.value for trial in self._ledger.finished("baseline") if self.timed and trial.value]
        one_baseline = min([*times, base])
        needed = config.confirm.seeds * 1.2 * (one_baseline + config.confirm.top * best) + CAP_FACTOR * best
        return min(needed, MOST_RESERVED * config.budget.total)

    def _search_budget(self) -> list[float]:
        return [self._plan.config.budget.total, self._plan.config.budget.trials]

    def _finalists(self) -> list[dict[str, Any]] | None:
        """What an earlier start chose to confirm; forgotten when the budget has changed, since the search went on."""
        chosen = self.study.user_attrs.get("finalists")
        return chosen["params"] if chosen and chosen["chosen_from"] == self._chosen_from() else None

    def _chosen_from(self) -> list[float]:
        return [*self._search_budget(), self._plan.config.confirm.top]

    def _confirm(self) -> None:
        """The finalists and the baseline on fresh seeds, interleaved so that a slow spell of the machine hits all."""
        config = self._plan.config
        records = self._ledger.records()
        planned = self._finalists()
        if planned is None:
            chosen = finalists(records, config.confirm.top, timed=self.timed, goal=self._objective.goal)
            keys = set(self._space)
            planned = [self._baseline_params()] + [
                {key: value for key, value in trial.model_dump().items() if key in keys} for trial in chosen
            ]
            self.study.set_user_attr("finalists", {"chosen_from": self._chosen_from(), "params": planned})
        if len(planned) < 2:  # noqa: PLR2004 - the baseline alone
            return
        done = {
            (trial.batch_size, trial.learning_rate, trial.precision, trial.seed) for trial in records if over(trial)
        }
        for number in range(config.confirm.seeds):
            seed = config.seed + _CONFIRM_SEEDS + number
            for params in planned:
                precision = params.get("precision", self._plan.precisions[0])
                if (params["batch_size"], params["learning_rate"], precision, seed) not in done:
                    self._queue(params, "confirm", seed)
                self._drain()

    def _run_next(self) -> None:
        """Asks for one trial, runs it, and tells how it went; an interruption leaves it to be run again."""
        trial = self.study.ask(self._space)
        role: Role = trial.user_attrs.get("role", "search")
        seed = trial.user_attrs.get("seed", self._plan.config.seed + trial.number)
        spec = self._spec(trial.params, role, seed)
        for key, value in {
            "role": role,
            "seed": seed,
            "micro_batch_size": spec.micro_batch_size,
            "gradient_accumulation_steps": spec.accumulation_steps,
            "precision": spec.precision,
        }.items():
            trial.set_user_attr(key, value)
        record = to_record(self.study.get_trials(deepcopy=False)[trial.number])
        self._observer.trial_started(record, best_seconds=self._ledger.best_seconds())
        last_step = -1

        def on_point(point: CurvePoint) -> bool:
            nonlocal last_step
            self._observer.trial_evaluated(record, point)
            if point.value is None:
                return True
            last_step = max(last_step + 1, round(point.seconds * 1000))
            trial.report(point.value, last_step)
            return role != "search" or not trial.should_prune()

        run = run_trial(
            self._worker, spec, on_point, tolerant=role != "baseline" and self._ledger.user_errors() < MAX_USER_ERRORS
        )
        self._tell(trial, run, spec, role)
        ended = to_record(self.study.get_trials(deepcopy=False)[trial.number])
        done = sum(1 for each in self._ledger.records() if over(each))
        self._observer.trial_ended(ended, done=done, seconds_left=self._seconds_left())

    def _spec(self, params: dict[str, Any], role: Role, seed: int) -> RunSpec:
        config, objective = self._plan.config, self._objective
        max_micro = self._plan.probe.max_batch_size or 1
        micro, steps = split_batch(params["batch_size"], max_micro)
        best = self._ledger.best_seconds()
        limit = config.budget.run
        if role == "search" and best is not None:
            limit = min(limit, CAP_FACTOR * best)
        elif role == "confirm" and self.timed:
            limit *= CONFIRM_CAP_FACTOR
            baseline = [trial.value for trial in self._ledger.finished("baseline") if trial.value is not None]
            if params != self._baseline_params():  # a contender twice as slow as the baseline has lost
                limit = min([limit, *(CONFIRM_CAP_FACTOR * value for value in baseline)])
        whole_run = role == "baseline" and objective.target == "auto"
        return RunSpec(
            micro_batch_size=micro,
            accumulation_steps=steps,
            learning_rate=params["learning_rate"],
            precision=params.get("precision", self._plan.precisions[0]),
            seed=seed,
            metric=objective.metric,
            goal=objective.goal,
            target=None if whole_run or not self.timed else self.target.value,
            limit_seconds=limit,
            evaluate_every=None if config.evaluate_every == "auto" else config.evaluate_every,
            evaluation_batch_size=min(max_micro, _MAX_EVALUATION_BATCH),
            expected_step_seconds=self._ledger.step_seconds(params["batch_size"], self._plan.probe.throughput_fit),
        )

    def _tell(self, trial: optuna.Trial, run: TrialRun, spec: RunSpec, role: Role) -> None:
        outcome = run.outcome
        if role == "baseline":
            self._derive_target(run.curve)
        if outcome == "finished" and self.timed and spec.limit_seconds < self._plan.config.budget.run:
            outcome = "capped"
        attributes = {"wall_seconds": round(run.wall_seconds, 4), "curve": curve_attribute(run.curve)}
        if run.message:
            attributes["message"] = run.message
        if self.timed:
            best = self._ledger.best_seconds() if outcome == "pruned" else None
            attributes[LOWER_BOUND] = CAP_FACTOR * best if best else run.training_seconds
        attributes |= self._measured(run.curve, outcome)  # the outcome last: with it, a trial can be told after a kill
        for key, each in attributes.items():
            trial.set_user_attr(key, each)
        self._close(trial.number, attributes)

    def _close(self, number: int, attributes: dict[str, Any]) -> None:
        """Tells a trial that has run to the study, by the attributes it was given."""
        outcome = attributes["outcome"]
        value = attributes.get("time_to_target_seconds" if self.timed else "best_value")
        if outcome in _FAILED:
            self.study.tell(number, state=TrialState.FAIL)
        elif value is None or not math.isfinite(value) or (outcome == "diverged" and not self.timed):
            self.study.tell(number, state=TrialState.PRUNED)
        else:
            self.study.tell(number, value)

    def _derive_target(self, curve: list[CurvePoint]) -> None:
        """The automatic target follows from the baseline's whole run, before that run is told to the study."""
        if self.timed and self._objective.target == "auto" and "target" not in self.study.user_attrs:
            found = automatic_target(curve, self._objective.goal)
            if found is not None:
                self.study.set_user_attr("target", found)

    def _measured(self, curve: list[CurvePoint], outcome: str) -> dict[str, Any]:
        """A trial's attributes from its curve."""
        values = [point.value for point in curve if point.value is not None]
        attributes: dict[str, Any] = {"training_seconds": curve[-1].seconds if curve else 0.0}
        if curve and curve[-1].measured_seconds is not None:
            attributes["measured_training_seconds"] = curve[-1].measured_seconds
        if values:
            attributes["best_value"] = min(values) if self._objective.goal == "minimize" else max(values)
        target = self.target.value if self.timed and outcome not in _FAILED else None
        for point in curve:
            if target is not None and point.value is not None and self._meets(point.value, target):
                attributes |= {"time_to_target_seconds": point.seconds, "samples_to_target": point.samples}
                return attributes | {"outcome": "reached"}
        return attributes | {"outcome": outcome}
