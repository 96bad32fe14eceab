"""The study from start to finish: baseline and target, search, confirmation on fresh seeds, and resuming all that."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import Any

import optuna
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from batchtune.document import Landscape, Recommendation, Target, Trial
from batchtune.observer import Observer
from batchtune.processes.pool import Crew, work_alone
from batchtune.processes.worker import Worker
from batchtune.tune.objective.cost import SECONDS, cost_of
from batchtune.tune.objective.ledger import Ledger, Role, over
from batchtune.tune.objective.records import FAILED_FOR_GOOD, NO_TIME_LEFT
from batchtune.tune.objective.targets import Targets
from batchtune.tune.optuna_parts.pruner import TimeToValuePruner
from batchtune.tune.optuna_parts.sampler import RoundingSampler, TimeToTargetSampler
from batchtune.tune.plan.plan import Plan
from batchtune.tune.plan.space import Space
from batchtune.tune.storage.shared import Machines, requeue
from batchtune.tune.study.belief import belief, expected_costs
from batchtune.tune.study.limits import CAP_FACTOR, LOST_FACTOR
from batchtune.tune.study.paused import Paused
from batchtune.tune.study.trials import Trials
from batchtune.tune.verdict.landscape import landscape
from batchtune.tune.verdict.recommend import Configuration, finalists, recommend

ENOUGH = 0.01  # expected improvement of log time that is worth another run
MIN_SEARCH_TRIALS = 10
USER_ERRORS = 3  # runs of the search in which the user's code raises (on a NaN, say) end it
_LOOK_SECONDS = 0.5  # between two looks at what other machines do
_QUIET = 2  # such proposals in a row end the search: twice is no accident
MOST_RESERVED = 0.5  # of budget.total, for confirmation: a slow baseline must leave room to search
OPENING, RETREAT = 3, 3.0  # first runs before the baseline is asked, and how far apart their learning rates lie
_CONFIRM_SEEDS = 1_000_003  # confirmation never sees a seed that the search has used


class TuneStudy:
    """The Optuna study of one run, its trials run one after another on a worker.

    Args:
        plan: configuration and measurements before the study.
        worker: the child that trains.
        storage: where the study is kept.
        observer: told of every trial.
        crew: the workers that share the trials, `worker` among them; None: there is no other.
    """

    def __init__(
        self, plan: Plan, worker: Worker, storage: BaseStorage, observer: Observer, crew: Crew | None = None
    ) -> None:
        self._plan, self._observer = plan, observer
        self._work: Callable[[Callable[[Worker], bool]], None] = crew.work if crew else partial(work_alone, worker)
        self._lock = crew.lock if crew else RLock()
        self._crew = crew
        self._at_once, self._quiet = len(crew) if crew else 1, 0
        config = plan.config
        cost = cost_of(config.objective.kind)
        pruner = self._make_pruner()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.study = optuna.create_study(
            study_name=config.name,
            storage=storage,
            pruner=pruner or optuna.pruners.NopPruner(),
            direction="minimize" if cost else config.objective.goal,
            load_if_exists=True,
        )
        self._machines = Machines(self.study)
        self._space = Space(plan)
        self._ledger = Ledger(self.study, cost)
        self._targets = Targets(self.study, config)
        paused = Paused(self.study, plan.checkpoints, pruner)
        self.study.sampler = self._sampler = self._make_sampler(paused)
        self._trials = Trials(
            plan=plan,
            study=self.study,
            space=self._space,
            ledger=self._ledger,
            targets=self._targets,
            paused=paused,
            observer=observer,
            seconds_left=self._seconds_left,
            lock=self._lock,
            machines=self._machines,
        )
        if plan.prior is not None and "prior" not in self.study.user_attrs:
            self.study.set_user_attr("prior", plan.prior.model_dump(mode="json", exclude_none=True))
        self._seconds_before = plan.probe.seconds + (plan.prior.seconds if plan.prior else 0.0)
        self._seconds_before += self._ledger.wall_seconds()
        self._started = time.perf_counter()
        self._revive()

    def _make_pruner(self) -> TimeToValuePruner | None:
        config = self._plan.config
        objective, cost = config.objective, cost_of(config.objective.kind)
        if cost is None:
            return None
        target = None if objective.target == "auto" else objective.target
        longest = config.budget.run if cost is SECONDS else None
        return TimeToValuePruner(objective.goal, target=target, longest=longest, step=cost.step)

    def _make_sampler(self, paused: Paused) -> BaseSampler:
        config = self._plan.config
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            fallback = RoundingSampler(within=self._space.searched, seed=config.seed, n_startup_trials=8)
        if cost_of(config.objective.kind) is None:
            return fallback
        prior = belief(self._plan)
        return TimeToTargetSampler(
            prior, seed=config.seed, independent=fallback, resumable=paused.numbers, within=self._space.searched
        )

    def run(self) -> None:
        """Baseline, search and confirmation, each from where an earlier start left it.

        Raises:
            UserCodeError: the user's code raised in the baseline run, or its metric is no number.
            NothingFitsError: the baseline cannot be trained, so there is nothing to compare with.
        """
        if self._crew is not None and not self._has_searched():
            self._crew.warm_up()
        if not self._opens_with_the_search():
            self._run_baseline()
        self._drain()  # what an earlier start left
        if not self._has_searched():  # another machine may have, meanwhile
            self._observer.stage("searching")
            self._open()
            if self._ledger.best_cost() is None:  # then its time is what there is to go by
                self._run_baseline()
            self._search()
            self.study.set_user_attr("searched", self._search_budget())
        if self._seconds_left() > 0:
            self._run_baseline()
        if self._plan.config.confirm.seeds:
            self._observer.stage("confirming")
            self._confirm()

    def _opens_with_the_search(self) -> bool:
        """Whether a first run can do without the baseline's: there is a target, and a range test says where to start.

        A baseline is slow, or nobody would tune it: whatever runs after a good configuration can be cut sooner.
        """
        prior, has_target = self._plan.prior, self._targets.current.value is not None
        return has_target and not self._targets.is_automatic and prior is not None and bool(prior.range_tests)

    def _run_baseline(self) -> None:
        if not self._ledger.finished("baseline"):
            self._observer.stage("baseline")
            if not self._has(TrialState.WAITING, TrialState.RUNNING, role="baseline"):
                self._queue(self._space.baseline, "baseline", self._plan.config.seed)
            self._drain(awaited="baseline")
        self._targets.check(self._ledger)

    def _open(self) -> None:
        """The first runs of the search: where the range test says, and at lower rates while they come to nothing."""
        prior = self._plan.prior
        if prior is None or not prior.range_tests or prior.start_batch_size is None:
            return
        self._drain()
        lowest, highest = self._space.learning_rates
        for number in range(self._ledger.searched(), OPENING):
            rate = float(f"{prior.learning_rate / RETREAT**number:.3g}")
            start = {"batch_size": prior.start_batch_size, "learning_rate": min(max(rate, lowest), highest)}
            self._queue(self._space.baseline | start, "search", self._plan.config.seed + len(self.study.trials))
            self._drain()
            self._targets.check_start(self._ledger)
            if self._ledger.last_outcome("search") not in {"pruned", "diverged"}:
                return  # it got there, or something else than its learning rate was in the way

    @property
    def target(self) -> Target:
        """The target as far as it is known."""
        return self._targets.current

    def records(self) -> list[Trial]:
        """All trials, in the form of the result document."""
        return self._ledger.records()

    def recommendation(self) -> tuple[Recommendation | None, Recommendation | None]:
        """What to train with by the trials so far, and what the baseline came to; see `recommend`."""
        objective = self._plan.config.objective
        if self._targets.met_at_start(self._ledger):
            return None, None
        return recommend(self.records(), kind=objective.kind, goal=objective.goal, expected=self.expected())

    def why_nothing(self) -> str:
        """Why there is no recommendation though all has run."""
        return self._targets.unmet(self._ledger)

    def landscape(self) -> Landscape | None:
        """What the response surface predicts once all has run; None where the objective is no time."""
        sampler, config = self._sampler, self._plan.config
        if not isinstance(sampler, TimeToTargetSampler) or sampler.prior is None:
            return None
        if cost_of(config.objective.kind) != SECONDS:
            return None
        sizes = sorted(self._plan.candidates.batch_sizes)
        runs = [run for _, run in sampler.runs(self._finished())]
        return landscape(sampler.prior, runs, sizes, self._space.learning_rates, seed=config.seed)

    def expected(self) -> dict[Configuration, float] | None:
        """Logarithm of what each configuration costs on average, by all runs together; None where that is not told."""
        if not isinstance(self._sampler, TimeToTargetSampler) or self._space.has_other_parameters:
            return None
        return expected_costs(self._sampler, self._finished(), seed=self._plan.config.seed)

    def _finished(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))

    def _queue(self, params: dict[str, Any], role: Role, seed: int) -> None:
        self.study.enqueue_trial(params, user_attrs={"role": role, "seed": seed})

    def _revive(self) -> None:
        """Trials that a killed start left running are queued again as they were; those that had ended are told.

        Where other machines are in the study, they may be theirs: they are taken over when nobody is heard of them.
        """
        if self._machines.several:
            return
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if "outcome" in trial.user_attrs:
                self._trials.close(trial.number, trial.user_attrs)
                continue
            self.study.tell(trial.number, state=TrialState.FAIL)
            requeue(self.study, trial)

    def _drain(self, awaited: Role | None = None) -> None:
        """Runs whatever is queued.

        Args:
            awaited: other machines' runs of this role are waited for; they become this one's when those die.
        """

        def run_queued(worker: Worker) -> bool:
            self._machines.take_over()
            if self._trials.run_next(worker, lambda: self._has(TrialState.WAITING)):
                return True
            if awaited is None or not self._machines.several or self._seconds_left() <= 0:
                return False
            time.sleep(_LOOK_SECONDS)
            return self._has(TrialState.RUNNING, TrialState.WAITING, role=awaited)

        self._work(run_queued)

    def _has(self, *states: TrialState, **attributes: Any) -> bool:
        """Whether a trial in one of these states has these attributes."""
        trials = self.study.get_trials(deepcopy=False, states=states)
        return any(attributes.items() <= trial.user_attrs.items() for trial in trials)

    def _search(self) -> None:
        self._quiet = 0
        self._work(self._search_on)
        if self._quiet >= _QUIET:
            self._observer.note(f"the search ends: less than {ENOUGH:.0%} improvement is expected of another run")
        elif len(raised := self._trials.raised) >= USER_ERRORS:
            self._observer.note(f"the search ends: the task raised an error in {len(raised)} of its runs: {raised[-1]}")
        elif self._ledger.searched() < self._plan.config.budget.trials:
            self._observer.note("the search ends: what is left of budget.total is for confirmation")

    def _search_on(self, worker: Worker) -> bool:
        """Runs one trial of the search on a worker, if there is to be another."""
        self._machines.take_over()
        if not self._trials.run_next(worker, self._is_search_wanted):
            return False
        with self._lock:
            gain = getattr(self._sampler, "last_expected_improvement", None)
            settled = gain is not None and len(self._ledger.finished("search")) >= MIN_SEARCH_TRIALS and gain < ENOUGH
            settled = settled and not self._space.has_other_parameters  # of which the surface expects nothing
            self._quiet = self._quiet + 1 if settled else 0
        return True

    def _is_search_wanted(self) -> bool:
        if self._quiet >= _QUIET or self._seconds_left() <= self._reserve():
            return False
        if self._machines.several and self._has_searched():
            return False  # another machine has found that it was enough
        if len(raised := self._trials.raised) >= USER_ERRORS:
            others = not self._machines.several and self._has(TrialState.RUNNING, role="search")  # here
            if not self._ledger.finished("search") and not others:
                raise raised[-1]
            return False
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return self._ledger.searched() + len(running) < self._plan.config.budget.trials

    def _seconds_left(self) -> float:
        """Of budget.total; the probe and earlier starts are counted in."""
        return self._plan.config.budget.total - self._seconds_before - (time.perf_counter() - self._started)

    def _reserve(self) -> float:
        """Seconds that confirmation and one more run of the search need; half of the whole budget at the most.

        What runs take besides training, most of it evaluation, is that of those that ran.

        Where a baseline takes all of budget.run, its confirmation could take all of budget.total, and nothing would be
        searched: it is then cut short instead.
        """
        config, longest = self._plan.config, self._plan.config.budget.run
        best = self._ledger.best_seconds() or longest
        one_baseline = min(LOST_FACTOR * best, longest)
        needed = config.confirm.seeds * 1.2 * (one_baseline + config.confirm.top * best) + CAP_FACTOR * best
        runs = config.confirm.seeds * (1 + config.confirm.top) + (not self._ledger.finished("baseline")) + 1
        needed += math.ceil(runs / self._at_once) * self._ledger.seconds_beside_training()
        if not self._ledger.finished("baseline"):
            needed += longest
        return min(needed, MOST_RESERVED * config.budget.total)

    def _has_searched(self) -> bool:
        return bool(self.study.user_attrs.get("searched") == self._search_budget())

    def _search_budget(self) -> list[float]:
        return [self._plan.config.budget.total, self._plan.config.budget.trials]

    def _confirm(self) -> None:
        """The finalists and the baseline on fresh seeds, interleaved so that a slow spell of the machine hits all."""
        config = self._plan.config
        planned = self._finalists()
        if len(planned) < 2:  # noqa: PLR2004 - the baseline alone
            return
        done = [(self._space.of(trial), trial.seed) for trial in self._ledger.records() if self._is_done(trial)]
        for number in range(config.confirm.seeds):
            seed = config.seed + _CONFIRM_SEEDS + number
            missing = [params for params in planned if (params, seed) not in done]
            for first in range(0, len(missing), self._at_once):
                if self._seconds_left() <= 0:
                    self._observer.note(f"the confirmation ends: {NO_TIME_LEFT}")
                    return
                for params in missing[first : first + self._at_once]:
                    if not self._machines.several or not self._is_taken(params, seed):
                        self._queue(params, "confirm", seed)
                self._drain(awaited="confirm")

    def _is_done(self, trial: Trial) -> bool:
        """Whether a run has told what there is to tell; what the baseline failed at is worth another try."""
        failed_for_good = trial.role == "confirm" and trial.outcome in FAILED_FOR_GOOD
        return over(trial) or (failed_for_good and self._space.of(trial) != self._space.baseline)

    def _is_taken(self, params: dict[str, Any], seed: int) -> bool:
        """Whether another machine has queued this run of the confirmation already, or runs it, or ran it."""
        same = [trial for trial in self._ledger.records() if trial.seed == seed and self._space.of(trial) == params]
        return any(trial.state in {"waiting", "running"} or self._is_done(trial) for trial in same)

    def _finalists(self) -> list[dict[str, Any]]:
        """The baseline and the configurations to confirm; chosen anew when the budget changes: the search went on."""
        config = self._plan.config
        chosen_from = [*self._search_budget(), config.confirm.top]
        stored = self.study.user_attrs.get("finalists")
        if stored and stored["chosen_from"] == chosen_from:
            return list(stored["params"])
        objective = config.objective
        chosen = finalists(
            self._ledger.records(),
            self._affordable_contenders(),
            kind=objective.kind,
            goal=objective.goal,
            expected=self.expected(),
        )
        planned = [self._space.of(trial) for trial in chosen] + [self._space.baseline]
        self.study.set_user_attr("finalists", {"chosen_from": chosen_from, "params": planned})
        return planned

    def _affordable_contenders(self) -> int:
        """How many are confirmed: as asked for, or where every run takes all of budget.run, as all seeds allow."""
        config, most = self._plan.config, self._plan.config.confirm.top
        if cost_of(config.objective.kind) is not None:
            return most
        round_seconds = config.confirm.seeds * (config.budget.run + self._ledger.seconds_beside_training())
        rounds = self._seconds_left() // max(round_seconds, 1e-9)  # of each seed, in which all workers train once
        count = next((each for each in range(most, 1, -1) if math.ceil((each + 1) / self._at_once) <= rounds), 1)
        if count < most:
            self._observer.note(f"{count} of {most} contenders on fresh seeds: budget.total has room for no more")
        return count
