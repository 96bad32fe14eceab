"""The study from start to finish: baseline and target, search, confirmation on fresh seeds, and resuming all that."""

from __future__ import annotations

import time
from dataclasses import replace

from optuna.storages import BaseStorage

from batchtune.document import LengthBatch, Recommendation, Target, Trial, config_of
from batchtune.errors import NothingFitsError
from batchtune.observer import Observer
from batchtune.processes.pool import WorkerPool
from batchtune.tune.plan.space import Plan
from batchtune.tune.study.budget import AGAIN, Clock, StudyParts, with_run_length
from batchtune.tune.study.confirmation import FINALISTS, Confirmation
from batchtune.tune.study.search import Belief, Search, make_pruner, make_sampler
from batchtune.tune.study.storage import open_study
from batchtune.tune.study.trials import Trials
from batchtune.tune.verdict.recommend import MOST_MORE, recommend
from batchtune.vocabulary import FAILED


class TuneStudy:
    """The Optuna study of one run; see `StudyBudget` for `clock` and `opening_seconds`.

    Attributes:
        parts: what its phases share.
        trials: runs them.
        belief: what all runs together tell.
        search: the runs that the sampler chooses.
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
        study = open_study(storage, plan.config)
        settled = with_run_length(
            plan.config, study, has_schedule=plan.has_schedule, training_seconds=plan.training_seconds
        )
        plan = replace(plan, config=settled)
        self.parts = StudyParts(plan, study, pool, observer, clock, opening_seconds)
        study.pruner, study.sampler = make_pruner(plan), make_sampler(plan, self.parts.space)
        self.trials = Trials(self.parts)
        self.belief = Belief(self.parts)
        self.search = Search(self.parts, self.trials, self.belief)
        self._confirmation = Confirmation(self.parts, self.trials, self.belief)
        self.trials.revive()
        self.parts.budget.count_earlier()

    def run(self) -> None:
        """Baseline, search and confirmation, each from where an earlier start left it.

        Raises:
            UserCodeError: the user's code raised in the baseline run, or its metric is no number.
            NothingFitsError: the baseline cannot be trained, so there is nothing to compare with.
        """
        parts = self.parts
        if not parts.has_searched:
            parts.pool.warm_up()
            if parts.plan.config.budget.given_total is not None:
                parts.tell_budget()
        if not self._opens_with_the_search():
            self._run_baseline()
        self.trials.drain()  # what an earlier start left
        if not parts.has_searched:  # another machine may have, meanwhile
            self._search()
        if parts.budget.seconds_left() > 0:
            self._run_baseline()
        if parts.plan.config.confirm.seeds:
            self._confirm()
            while self._is_to_go_on():
                parts.study.set_user_attr(AGAIN, parts.study.user_attrs.get(AGAIN, 0) + 1)
                parts.observer.announce("nothing better on fresh seeds, and there is time: the search goes on")
                parts.observer.stage("searching")
                self.search.run()
                self._confirm()
        if parts.machines.several and parts.history.is_under_way() and parts.budget.seconds_left() > 0:
            parts.observer.announce("waiting for the last runs of other machines")  # which may change the answer
            self.trials.drain(awaited="any")

    def _search(self) -> None:
        parts = self.parts
        parts.observer.stage("searching")
        if self._opens_with_the_search() and len(parts.pool) > 1:
            self.search.open_side_by_side()
        else:
            self.search.open()
            if self._opens_with_the_search():
                parts.tell_budget()
            if parts.history.best_cost() is None and parts.budget.seconds_left() > 0:  # its time is what to go by
                self._run_baseline()
        self.search.run()

    def _confirm(self) -> None:
        """On as many fresh seeds as configured; on more where nobody set that, they may tell, and there is time."""
        parts, confirm = self.parts, self.parts.plan.config.confirm
        parts.observer.stage("confirming")
        seeds, most = self._confirmation.seeds, MOST_MORE * confirm.seeds
        self._confirmation.run(seeds)
        is_open = "seeds" not in confirm.model_fields_set and parts.cost is not None and not parts.machines.several
        while is_open:
            found, _ = self.recommendation()
            wanted = found.seeds_to_confirm if found is not None else None
            if not wanted or not seeds < wanted <= most or not self._confirmation.has_time_for(wanted):
                return
            parts.observer.announce(f"{wanted} fresh seeds of each may tell, and there is time for them")
            self._confirmation.run(wanted)
            seeds = wanted

    def _is_to_go_on(self) -> bool:
        """Whether to search again: fresh seeds have refuted what seemed better than the baseline, and there is time."""
        parts, (found, baseline) = self.parts, self.recommendation()
        were_new = parts.study.user_attrs.get(FINALISTS, {}).get("are_new")
        if found is None or not were_new or parts.cost is None or parts.machines.several:
            return False
        is_today = any(trial.role == "baseline" and config_of(trial) == config_of(found) for trial in self.records())
        is_open = is_today or (baseline is None and found.seeds_to_confirm is not None)  # all were refuted
        return is_open and self.search.is_wanted()

    def _opens_with_the_search(self) -> bool:
        """Whether a first run can do without the baseline's: there is a target, and a range test says where to start.

        A baseline is slow, or nobody would tune it: whatever runs after a good configuration can be cut sooner.
        """
        targets = self.parts.targets
        has_target = targets.current.value is not None and not targets.is_automatic
        return has_target and bool(self.parts.plan.prior.range_tests)

    def _run_baseline(self) -> None:
        parts, has_run = self.parts, bool(self.parts.history.finished("baseline"))
        if not has_run:
            parts.observer.stage("baseline")
            self.trials.add_baseline()
            self.trials.drain(awaited="baseline")
        parts.targets.check(parts.budget.enough())
        if not has_run and not parts.has_searched:
            parts.tell_budget()

    @property
    def target(self) -> Target:
        """The target as far as it is known."""
        return self.parts.targets.current

    def records(self) -> list[Trial]:
        """All trials, in the form of the result document."""
        return self.parts.history.records()

    def compared(self) -> list[Trial]:
        """All trials as they are compared: those whose steps were timed in turn with what they take by that."""
        return self._confirmation.as_timed_in_turn(self.records())

    def recommendation(self) -> tuple[Recommendation | None, Recommendation | None]:
        """What to train with by the trials so far, and what the baseline came to; see `recommend`."""
        objective = self.parts.plan.config.objective
        if self.parts.targets.met_at_start():
            return None, None
        records, trials = self.records(), self.compared()
        found, baseline = recommend(trials, kind=objective.kind, goal=objective.goal, expected=self.belief.expected())
        if found is not None and trials != records:
            reason = f"{found.reason}; by the steps that each needed, timed in turn since the machine was not steady"
            found = found.model_copy(update={"reason": reason, "timed_in_turn": True})
        return self._with_unit(found), self._with_unit(baseline)

    def _with_unit(self, found: Recommendation | None) -> Recommendation | None:
        """The same, with what its batches are made of where they count tokens."""
        tokens = self.parts.plan.tokens
        if found is None or tokens is None:
            return found
        own = () if found.global_batch_size == tokens.baseline else tokens.made_up(found.micro_batch_size)
        made = tuple(LengthBatch(length=length, samples=samples) for length, samples in own)
        return found.model_copy(update={"batch_unit": "tokens", "length_batches": made})

    def answer(self) -> Recommendation:
        """What is recommended now that all has run.

        Raises:
            NothingFitsError: nothing is, and why.
        """
        trials, budget = self.records(), self.parts.budget
        if not any(trial.is_over for trial in trials):
            if any(trial.outcome in FAILED for trial in trials):
                raise NothingFitsError("no trial was usable; see the messages of the trials")
            used = f"budget.total ({budget.total:g} s) was used up before a run had shown anything"
            raise NothingFitsError(f"{used}; start again with budget.total={budget.enough()}")
        found = self.recommendation()[0]
        if found is None:
            raise NothingFitsError(self.parts.targets.unmet(budget.enough()))
        return found
