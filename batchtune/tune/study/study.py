"""The study from start to finish: baseline and target, search, confirmation on fresh seeds, and resuming all that."""

from __future__ import annotations

import time
import warnings

import optuna
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from batchtune.document import Landscape, Recommendation, Target, Trial
from batchtune.observer import Observer
from batchtune.processes.pool import WorkerPool
from batchtune.tune.objective.cost import SECONDS, cost_of
from batchtune.tune.objective.history import StudyHistory
from batchtune.tune.objective.targets import Targets
from batchtune.tune.optuna_parts.pruner import TimeToValuePruner
from batchtune.tune.optuna_parts.sampler import RoundingSampler, TimeToTargetSampler
from batchtune.tune.plan.plan import Plan
from batchtune.tune.plan.space import Space
from batchtune.tune.storage.shared import Machines
from batchtune.tune.study.belief import Belief, prior_of
from batchtune.tune.study.confirmation import Confirmation
from batchtune.tune.study.parts import Clock, StudyBudget, StudyParts
from batchtune.tune.study.queue import RunQueue
from batchtune.tune.study.search import Search
from batchtune.tune.study.trials import Trials
from batchtune.tune.verdict.recommend import Configuration, recommend


class TuneStudy:
    """The Optuna study of one run.

    Args:
        plan: configuration and measurements before the study.
        pool: the workers that train.
        storage: where the study is kept.
        observer: told of every trial.
        clock: seconds; what budget.total is counted by.
        opening_seconds: that this start has taken before its probe.

    Attributes:
        parts: what its phases share.
        trials: runs them.
        queue: those that the sampler does not choose.
        search: those that it does.
    """

    def __init__(
        self,
        plan: Plan,
        pool: WorkerPool,
        storage: BaseStorage,
        observer: Observer,
        clock: Clock = time.perf_counter,
        opening_seconds: float = 0.0,
    ) -> None:
        config, cost = plan.config, cost_of(plan.config.objective.kind)
        pruner, space = _pruner(plan), Space(plan)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study(
            study_name=config.name,
            storage=storage,
            pruner=pruner or optuna.pruners.NopPruner(),
            direction="minimize" if cost else config.objective.goal,
            load_if_exists=True,
        )
        if study.metric_names is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                study.set_metric_names([f"{cost.field} to target" if cost else config.objective.metric])
        history = StudyHistory(study, cost)
        self.parts = StudyParts(
            plan=plan,
            study=study,
            space=space,
            history=history,
            targets=Targets(study, config),
            pool=pool,
            machines=Machines(study),
            budget=StudyBudget(plan, history, len(pool), clock, opening_seconds),
            observer=observer,
        )
        study.sampler = _sampler(plan, space)
        self.trials = Trials(self.parts)
        self._belief = Belief(self.parts, study.sampler)
        self.queue = RunQueue(self.parts, self.trials)
        self.search = Search(self.parts, self.queue, self.trials, self._belief)
        self._confirmation = Confirmation(self.parts, self.queue, self._belief)
        if plan.prior is not None and "prior" not in study.user_attrs:
            study.set_user_attr("prior", plan.prior.model_dump(mode="json", exclude_none=True))
        self.queue.revive()

    def run(self) -> None:
        """Baseline, search and confirmation, each from where an earlier start left it.

        Raises:
            UserCodeError: the user's code raised in the baseline run, or its metric is no number.
            NothingFitsError: the baseline cannot be trained, so there is nothing to compare with.
        """
        parts = self.parts
        if not parts.has_searched:
            parts.pool.warm_up()
        if not self._opens_with_the_search():
            self._run_baseline()
        self.queue.drain()  # what an earlier start left
        if not parts.has_searched:  # another machine may have, meanwhile
            parts.observer.stage("searching")
            self.search.open()
            if parts.history.best_cost() is None:  # then its time is what there is to go by
                self._run_baseline()
            self.search.run()
        if parts.budget.seconds_left() > 0:
            self._run_baseline()
        if parts.plan.config.confirm.seeds:
            parts.observer.stage("confirming")
            self._confirmation.run()

    def _opens_with_the_search(self) -> bool:
        """Whether a first run can do without the baseline's: there is a target, and a range test says where to start.

        A baseline is slow, or nobody would tune it: whatever runs after a good configuration can be cut sooner.
        """
        prior, targets = self.parts.plan.prior, self.parts.targets
        has_target = targets.current.value is not None and not targets.is_automatic
        return has_target and prior is not None and bool(prior.range_tests)

    def _run_baseline(self) -> None:
        parts = self.parts
        if not parts.history.finished("baseline"):
            parts.observer.stage("baseline")
            if not parts.has(TrialState.WAITING, TrialState.RUNNING, role="baseline"):
                self.queue.add(parts.space.baseline, "baseline", parts.plan.config.seed)
            self.queue.drain(awaited="baseline")
        parts.targets.check(parts.history)

    @property
    def target(self) -> Target:
        """The target as far as it is known."""
        return self.parts.targets.current

    def records(self) -> list[Trial]:
        """All trials, in the form of the result document."""
        return self.parts.history.records()

    def recommendation(self) -> tuple[Recommendation | None, Recommendation | None]:
        """What to train with by the trials so far, and what the baseline came to; see `recommend`."""
        objective = self.parts.plan.config.objective
        if self.parts.targets.met_at_start(self.parts.history):
            return None, None
        return recommend(self.records(), kind=objective.kind, goal=objective.goal, expected=self.expected())

    def why_nothing(self) -> str:
        """Why there is no recommendation though all has run."""
        return self.parts.targets.unmet(self.parts.history)

    def landscape(self) -> Landscape | None:
        """What the response surface predicts once all has run; None where the objective is no time."""
        return self._belief.landscape()

    def expected(self) -> dict[Configuration, float] | None:
        """Logarithm of what each configuration costs on average, by all runs together; None where that is not told."""
        return self._belief.expected()


def _pruner(plan: Plan) -> TimeToValuePruner | None:
    config = plan.config
    objective, cost = config.objective, cost_of(config.objective.kind)
    if cost is None:
        return None
    target = None if objective.target == "auto" else objective.target
    longest = config.budget.run if cost is SECONDS else None
    return TimeToValuePruner(objective.goal, target=target, longest=longest, step=cost.step)


def _sampler(plan: Plan, space: Space) -> BaseSampler:
    config = plan.config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        fallback = RoundingSampler(within=space.searched, seed=config.seed, n_startup_trials=8)
    if cost_of(config.objective.kind) is None:
        return fallback
    return TimeToTargetSampler(prior_of(plan), seed=config.seed, independent=fallback, within=space.searched)
