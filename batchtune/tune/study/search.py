"""The search: what a study believes, and the runs it proposes."""

from __future__ import annotations

import warnings

import optuna
from optuna.pruners import BasePruner, NopPruner
from optuna.samplers import BaseSampler
from optuna.trial import TrialState

from batchtune.document import Configuration, Landscape, Value, config_of
from batchtune.processes.worker import Worker
from batchtune.tune.optuna_parts.pruner import TimeToValuePruner
from batchtune.tune.optuna_parts.sampler import RoundingSampler, TimeToTargetSampler
from batchtune.tune.optuna_parts.surface import Surface, SurfacePrior, landscape
from batchtune.tune.plan.prior import Paces, surface_prior
from batchtune.tune.plan.space import Plan, Space
from batchtune.tune.study.budget import StudyParts
from batchtune.tune.study.history import to_record
from batchtune.tune.study.limits import CAP_FACTOR
from batchtune.tune.study.trials import Trials
from batchtune.tune.verdict.scores import SECONDS, cost_of

ENOUGH = 0.01  # expected improvement of log time that is worth another run
MIN_SEARCH_TRIALS = 10
USER_ERRORS = 3  # runs of the search in which the user's code raises (on a NaN, say) end it
FIRST_RUNS, RETREAT = 3, 3.0  # first runs before the baseline is asked, and how far apart their learning rates lie
BESIDE = 4  # workers from which one runs the baseline while the others search; of fewer, once FIRST_RUNS failed
_QUIET = 2  # such proposals in a row end the search: twice is no accident


class Search:
    """One start's search."""

    def __init__(self, parts: StudyParts, trials: Trials, belief: Belief) -> None:
        self._parts, self._trials, self._belief = parts, trials, belief
        self._quiet = 0
        self._has_baseline = self._has_told = True  # one worker runs the baseline by itself

    def open(self) -> None:
        """The first runs: where the range test says, and at lower rates while they come to nothing."""
        parts, prior = self._parts, self._parts.plan.prior
        if not prior.range_tests or prior.start_batch_size is None:
            return
        self._trials.drain()
        for number in range(parts.history.searched(), min(FIRST_RUNS, parts.plan.config.budget.trials)):
            if parts.history.last_outcome("search") not in {None, "pruned", "diverged"}:
                return  # it got there, or something else than its learning rate was in the way
            self._queue_start(prior.start_batch_size, prior.learning_rate / RETREAT**number)
            self._trials.drain()

    def open_side_by_side(self) -> None:
        """The same with several workers: the others find by the prior alone what promises most beside the first run."""
        parts, prior = self._parts, self._parts.plan.prior
        has_begun = parts.history.searched() or parts.history.is_under_way("search")
        if prior.start_batch_size is not None and not has_begun:
            self._queue_start(prior.start_batch_size, prior.learning_rate)
        self._has_baseline = self._has_told = False

    def _queue_start(self, batch_size: int, rate: float) -> None:
        parts, (lowest, highest) = self._parts, self._parts.space.learning_rates
        rate = min(max(float(f"{rate:.3g}"), lowest), highest)
        start: dict[str, Value] = {"batch_size": batch_size, "learning_rate": rate}
        params = parts.space.baseline | start
        self._trials.add(params, "search", self._trials.search_seed(params))

    def _beside_the_search(self) -> None:
        """What is due while several workers search: the baseline's run, and the budget once a run has got there."""
        parts, has_best = self._parts, self._parts.history.best_cost() is not None
        if not self._has_told and has_best:
            self._has_told = True
            parts.tell_budget()
        nothing_yet = not has_best and parts.history.searched() >= FIRST_RUNS
        if not self._has_baseline and (len(parts.pool) >= BESIDE or nothing_yet):
            self._has_baseline = True
            self._trials.add_baseline()

    def run(self) -> None:
        """Runs what the sampler proposes until that is enough, or the budget is needed for the confirmation.

        Raises:
            UserCodeError: the user's code raised in run after run, and nothing else came of the search.
        """
        parts, raised = self._parts, self._trials.raised
        parts.pool.work(self._run_one)
        if self._quiet >= _QUIET:
            parts.observer.note(f"the search ends: less than {ENOUGH:.0%} improvement is expected of another run")
        elif len(raised) >= USER_ERRORS:
            parts.observer.note(f"the search ends: the task raised an error in {len(raised)} of its runs: {raised[-1]}")
        elif parts.history.searched() < parts.plan.config.budget.trials:
            parts.observer.note("the search ends: what is left of budget.total is for confirmation")
        parts.study.set_user_attr("searched", parts.search_budget)
        self._quiet = 0  # another search begins anew

    def _run_one(self, worker: Worker) -> bool:
        """Runs one trial on a worker, if there is to be another."""
        self._parts.machines.take_over()
        with self._parts.pool.lock:
            self._beside_the_search()
            self._belief.learn()
        if not self._trials.run_next(worker, self.is_wanted):
            return False
        with self._parts.pool.lock:
            gain = self._belief.expected_improvement
            enough = gain is not None and gain < ENOUGH
            enough = enough and len(self._parts.history.finished("search")) >= MIN_SEARCH_TRIALS
            self._quiet = self._quiet + 1 if enough else 0
        return True

    def is_wanted(self) -> bool:
        """Whether another run is to be proposed.

        Raises:
            UserCodeError: as `run`.
        """
        parts = self._parts
        if self._quiet >= _QUIET or parts.budget.seconds_left() <= parts.budget.reserve():
            return False
        if parts.machines.several and parts.has_searched:
            return False  # another machine has found that it was enough
        if len(raised := self._trials.raised) >= USER_ERRORS:
            others = not parts.machines.several and parts.history.is_under_way("search", TrialState.RUNNING)  # here
            if not parts.history.finished("search") and not others:
                raise raised[-1]
            return False
        running = parts.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return parts.history.searched() + len(running) < parts.plan.config.budget.trials


def make_pruner(plan: Plan) -> BasePruner:
    """What stops a run of a study that is behind."""
    objective, cost = plan.config.objective, cost_of(plan.config.objective.kind)
    if cost is None:
        return NopPruner()
    target = None if objective.target == "auto" else objective.target
    longest = plan.config.budget.run if cost is SECONDS else None
    return TimeToValuePruner(objective.goal, target=target, longest=longest, cap=CAP_FACTOR, step=cost.step)


def make_sampler(plan: Plan, space: Space) -> BaseSampler:
    """What proposes the runs of a search."""
    config = plan.config
    with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
        fallback = RoundingSampler(within=space.searched, seed=config.seed, n_startup_trials=8)
    if cost_of(config.objective.kind) is None:
        return fallback
    return TimeToTargetSampler(_prior_of(plan, {}), seed=config.seed, independent=fallback, within=space.searched)


def _prior_of(plan: Plan, paces: Paces) -> SurfacePrior:
    """What the response surface starts from: what was measured before the study, and the paces of its runs so far."""
    known, probe = plan.prior, plan.probe
    if cost_of(plan.config.objective.kind) != SECONDS:  # of a step's joules, its seconds tell little
        probe = probe.model_copy(update={"throughput_fit": None})
    return surface_prior(
        probe,
        batch_size=known.start_batch_size or plan.config.baseline.batch_size,
        rate=known.learning_rate,
        spread_decades=known.learning_rate_decades,
        noise=known.noise_scale,
        paces=paces,
    )


class Belief:
    """What the response surface makes of the runs of a study so far; nothing where another sampler proposes."""

    def __init__(self, parts: StudyParts) -> None:
        self._parts, sampler = parts, parts.study.sampler
        self._sampler = sampler if isinstance(sampler, TimeToTargetSampler) else None
        self._judge = None if parts.space.has_other_parameters else self._sampler  # of others it knows nothing

    def learn(self) -> None:
        """Has the sampler know what steps cost in the runs so far: they are of the very sizes that matter."""
        if self._judge is None:
            return
        parts, cost = self._parts, self._parts.cost or SECONDS
        paces = parts.history.paces(parts.space.precision(parts.space.baseline), cost=cost)
        self._judge.prior = _prior_of(parts.plan, paces)
        self._judge.shares = parts.history.shares(paces) if cost is SECONDS else {}

    @property
    def expected_improvement(self) -> float | None:
        """Of log time by the latest proposal; None where nothing is expected, as of other parameters."""
        return self._judge.last_expected_improvement if self._judge else None

    def expected(self) -> dict[Configuration, float] | None:
        """Logarithm of what each configuration that ran costs on average, by all runs together.

        None as long as nothing has reached the target, since the surface then knows lower bounds only.
        """
        self.learn()
        sampler = self._judge
        if sampler is None or sampler.prior is None:
            return None
        found = sampler.runs(self._parts.study)
        if all(run.censored for _, run in found):
            return None
        logs = Surface(sampler.prior, [run for _, run in found], self._parts.plan.config.seed).log_seconds_of_runs()
        return {config_of(to_record(trial)): float(each) for (trial, _), each in zip(found, logs, strict=True)}

    def landscape(self) -> Landscape | None:
        """What the surface predicts once all has run; None where the objective is no time."""
        plan, sampler = self._parts.plan, self._sampler
        if sampler is None or sampler.prior is None or self._parts.cost is not SECONDS:
            return None
        runs = [run for _, run in sampler.runs(self._parts.study)]
        sizes, rates = sorted(plan.prior.batch_sizes), self._parts.space.learning_rates
        return landscape(sampler.prior, runs, sizes, rates, seed=plan.config.seed)
