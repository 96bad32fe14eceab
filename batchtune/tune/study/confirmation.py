"""The confirmation: the finalists of the search and the baseline on fresh seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from batchtune.document import Trial, Value
from batchtune.errors import UserCodeError
from batchtune.processes.worker import LONG_SILENCE_SECONDS, NodeLost, WorkerDied
from batchtune.protocol.commands import TimeInTurn
from batchtune.tune.optuna_parts.storages import params_of
from batchtune.tune.study.budget import StudyParts
from batchtune.tune.study.history import to_record
from batchtune.tune.study.search import Belief
from batchtune.tune.study.trials import Trials
from batchtune.tune.verdict.scores import (
    SECONDS,
    WORTHLESS,
    Scoring,
    at_pace,
    comparable_paces,
    finalists,
    is_disturbed,
)

IN_TURN = "timed_in_turn"  # attribute of the study: parameters, and the seconds of a step
IN_TURN_ROUNDS = 100  # in which steps are timed: the quieter half of them counts
IN_TURN_SHARE, LEAST_IN_TURN, MOST_IN_TURN = 0.02, 2.0, 30.0  # of budget.total, and seconds
FINALISTS = "finalists"  # attribute of the study: what was chosen last, from what, and whether any of it was new
_CONFIRM_SEEDS = 1_000_003  # confirmation never sees a seed that the search has used
_Run = tuple[dict[str, Value], int]  # parameters and a fresh seed


class Confirmation:
    """Of one study, from where an earlier start left it."""

    def __init__(self, parts: StudyParts, trials: Trials, belief: Belief) -> None:
        self._parts, self._trials, self._belief = parts, trials, belief

    @property
    def seeds(self) -> int:
        """Fresh seeds of each: as many as configured, or as the baseline has run on."""
        parts = self._parts
        ran = [trial.params for trial in parts.history.finished("confirm")].count(parts.space.baseline)
        return max(parts.plan.config.confirm.seeds, ran)

    def run(self, seeds: int) -> None:
        """The finalists and the baseline on so many fresh seeds, of which the first may choose from more contenders."""
        planned = self._finalists()
        if len(planned) - 1 > self._parts.plan.config.confirm.top:
            if not self._train(planned, 1):
                return
            planned = self._narrow(planned)
        if planned != [self._parts.space.baseline] and self._train(planned, seeds):
            self._time_in_turn(planned)

    def _train(self, planned: list[dict[str, Value]], seeds: int) -> bool:
        """Runs them on so many fresh seeds, in turn: a slow spell hits all. Returns whether there was time for that."""
        parts, config = self._parts, self._parts.plan.config
        done = [(parts.space.of(trial), trial.seed) for trial in parts.history.records() if self._is_done(trial)]
        fresh = range(config.seed + _CONFIRM_SEEDS, config.seed + _CONFIRM_SEEDS + seeds)
        missing = [(params, seed) for seed in fresh for params in planned if (params, seed) not in done]
        missing = _baseline_first(parts, missing, planned)
        at_once = len(parts.pool)
        while missing:
            if parts.budget.seconds_left() <= 0:
                parts.observer.note("the confirmation ends: budget.total was used up")
                return False
            missing = self._affordable(missing, planned)
            for params, seed in missing[:at_once]:
                if not self._is_taken(params, seed):
                    self._trials.add(params, "confirm", seed)
            missing = missing[at_once:]
            self._trials.drain(awaited="confirm")
        return True

    def _narrow(self, planned: list[dict[str, Value]]) -> list[dict[str, Value]]:
        """The baseline and as many contenders as are confirmed: the best by all runs, those that got there before."""
        parts = self._parts
        best = sorted((each for each in self._ranked() if each in planned), key=self._is_refused)
        chosen = [*best[: parts.plan.config.confirm.top], parts.space.baseline]
        parts.study.set_user_attr(FINALISTS, parts.study.user_attrs[FINALISTS] | {"params": chosen})
        return chosen

    def has_time_for(self, seeds: int) -> bool:
        """Whether the finalists and the baseline can run on so many fresh seeds each, by what those so far took."""
        parts, planned = self._parts, self._finalists()
        ran = [trial.params for trial in parts.history.finished("confirm")]
        needed = sum((self._seconds(params) or 0.0) * (seeds - ran.count(params)) for params in planned)
        return needed / len(parts.pool) <= parts.budget.seconds_left()

    def _affordable(self, missing: list[_Run], planned: list[dict[str, Value]]) -> list[_Run]:
        """What there is time for: where it is too little for all, the best contender goes on alone.

        It is then compared with the baseline on all seeds, in place of several contenders on too few. What runs take
        is known once each has run on a fresh seed.
        """
        parts = self._parts
        known = [each for params, _ in missing if (each := self._seconds(params)) is not None]
        is_enough = sum(known) / len(parts.pool) <= parts.budget.seconds_left()
        if is_enough or len(known) < len(missing) or parts.machines.several:
            return missing
        best = next(params for params in self._ranked() if params in planned)
        left = [each for each in missing if each[0] in (best, parts.space.baseline)]
        if len(left) < len(missing):
            parts.observer.note("one contender on fresh seeds from here on: budget.total has room for no more")
        return left

    def _seconds(self, params: dict[str, Value]) -> float | None:
        """What a run of a configuration takes on a fresh seed, by those so far; None where there were none."""
        history = self._parts.history
        ran = [trial.user_attrs for trial in history.finished("confirm") if trial.params == params]
        took = [each.get("measured_training_seconds", each.get("training_seconds", 0.0)) for each in ran]
        return statistics.mean(took) + history.seconds_beside_training() if took else None

    def _time_in_turn(self, planned: list[dict[str, Value]]) -> None:
        """Where others had a part in how long runs took, times the steps of all in turn: a slow spell then hits all.

        How many steps a run needs does not depend on the machine. All are in memory at once, and what trains alone need
        not fit beside others: where this cannot be done, what the runs took counts.
        """
        parts, known = self._parts, self._parts.study.user_attrs.get(IN_TURN, [])
        ran = [trial for trial in parts.history.records() if trial.is_over and parts.space.of(trial) in planned]
        in_groups = parts.plan.config.ranks.of_each > 1  # not tried yet
        if parts.cost is not SECONDS or parts.machines.several or in_groups or not is_disturbed(ran):
            return
        seconds = min(max(IN_TURN_SHARE * parts.budget.total, LEAST_IN_TURN), MOST_IN_TURN)
        timed = [params for params, _ in known]
        if all(params in timed for params in planned) or parts.budget.seconds_left() < seconds:
            return
        specs = tuple(parts.limits.spec(params, "confirm", parts.plan.config.seed) for params in planned)
        stretch = seconds / IN_TURN_ROUNDS / len(specs)
        command = TimeInTurn(specs=specs, seconds=seconds, stretch_seconds=stretch)
        parts.observer.note(f"the machine was not steady: the steps of {len(specs)} configurations are timed in turn")
        paces: Sequence[float | None] | None = None
        why = "the machine was too busy"
        try:
            rounds = parts.pool.any_one(lambda worker: worker.call(command, timeout=LONG_SILENCE_SECONDS))
            paces = comparable_paces(rounds, [parts.history.pace(spec) for spec in specs])
        except (WorkerDied, NodeLost, UserCodeError) as error:
            why = str(error)
        if paces is None:  # what was timed before does not compare with what was not
            parts.observer.note(f"they could not be, so that what each run took counts: {why}")
        others = [[params, pace if paces else None] for params, pace in known if params not in planned]
        parts.study.set_user_attr(IN_TURN, [*zip(planned, paces or [None] * len(planned), strict=True), *others])

    def as_timed_in_turn(self, trials: Sequence[Trial]) -> list[Trial]:
        """The trials, those of configurations whose steps were timed in turn with what their steps take by that."""
        known = self._parts.study.user_attrs.get(IN_TURN, [])

        def timed(trial: Trial) -> Trial:
            params = self._parts.space.of(trial) if known else {}
            return next((at_pace(trial, seconds) for each, seconds in known if each == params and seconds), trial)

        return [timed(trial) for trial in trials]

    def _is_done(self, trial: Trial) -> bool:
        """Whether a run has told what there is to tell; what the baseline failed at is worth another try."""
        space = self._parts.space
        return trial.is_over or (trial.tells_of_fresh_seed and space.of(trial) != space.baseline)

    def _is_taken(self, params: dict[str, Value], seed: int) -> bool:
        """Whether another machine has queued this run already, or runs it, or ran it."""
        trials = self._parts.study.get_trials(deepcopy=False)
        same = [each for each in trials if each.user_attrs.get("seed") == seed and params_of(each) == params]
        return any(not each.state.is_finished() or self._is_done(to_record(each)) for each in same)

    def _finalists(self) -> list[dict[str, Value]]:
        """The baseline and what to confirm; chosen anew when the search went on, or where all came to nothing."""
        parts, config = self._parts, self._parts.plan.config
        chosen_from = [*parts.search_budget, config.confirm.top]
        stored = parts.study.user_attrs.get(FINALISTS, {})
        if stored.get("chosen_from") == chosen_from and not self._came_to_nothing(stored["params"]):
            return list(stored["params"])
        count = parts.budget.affordable_contenders()
        if count < config.confirm.top:
            parts.observer.note(
                f"{count} of {config.confirm.top} contenders on fresh seeds: budget.total has room for no more"
            )
        best = [params for params in self._ranked() if not self._is_refused(params)][:count]
        planned, ran = [*best, parts.space.baseline], [each.params for each in parts.history.finished("confirm")]
        are_new = any(params not in ran for params in best)
        parts.study.set_user_attr(FINALISTS, {"chosen_from": chosen_from, "params": planned, "are_new": are_new})
        return planned

    def _came_to_nothing(self, planned: list[dict[str, Value]]) -> bool:
        """Whether no contender is left, and nothing to compare one with."""
        *contenders, baseline = planned
        ran = self._on_fresh_seeds(baseline)
        return bool(ran) and all(each.outcome in WORTHLESS for each in ran) and all(map(self._is_refused, contenders))

    def _is_refused(self, params: dict[str, Value]) -> bool:
        """Whether too many runs of a configuration on fresh seeds came to no result."""
        objective = self._parts.plan.config.objective
        return Scoring(objective.kind, objective.goal).refused(self._on_fresh_seeds(params))

    def _on_fresh_seeds(self, params: dict[str, Value]) -> list[Trial]:
        """What a configuration's runs on fresh seeds came to, those left out that tell nothing."""
        ran = [trial for trial in self._parts.history.records() if trial.tells_of_fresh_seed]
        return [trial for trial in ran if self._parts.space.of(trial) == params]

    def _ranked(self) -> list[dict[str, Value]]:
        """The configurations of the search by all runs so far, the best first; see `finalists`."""
        parts, objective = self._parts, self._parts.plan.config.objective
        kind, goal, expected = objective.kind, objective.goal, self._belief.expected()
        chosen = finalists(parts.history.records(), kind=kind, goal=goal, expected=expected)
        return [parts.space.of(trial) for trial in chosen]


def _baseline_first(parts: StudyParts, missing: list[_Run], planned: list[dict[str, Value]]) -> list[_Run]:
    """Where the baseline lacks results that contenders have, it catches up with the one that has the most.

    Nothing compares the two until then, however often others run. In a round that was interrupted it is the last.
    """
    baseline, told = parts.space.baseline, [trial for trial in parts.history.records() if trial.tells_of_fresh_seed]
    ran = [parts.space.of(trial) for trial in told if trial.outcome not in WORTHLESS]
    ours, *theirs = ran.count(baseline), *(ran.count(params) for params in planned if params != baseline)
    is_behind = ours < max(min(theirs, default=0), max(theirs, default=0) - 1)
    first = [each for each in missing if is_behind and each[0] == baseline][: max(theirs, default=0) - ours]
    return first + [each for each in missing if each not in first]
