"""The confirmation: the finalists of the search and the baseline on fresh seeds."""

from __future__ import annotations

from collections.abc import Sequence

from batchtune.document import Trial, Value
from batchtune.tune.study.budget import StudyParts
from batchtune.tune.study.history import over
from batchtune.tune.study.search import Belief
from batchtune.tune.study.trials import Trials
from batchtune.tune.verdict.scores import SECONDS, at_pace, comparable_paces, finalists, is_disturbed
from batchtune.vocabulary import FAILED_FOR_GOOD

IN_TURN = "timed_in_turn"  # attribute of the study: parameters, and the seconds of a step
IN_TURN_SHARE, LEAST_IN_TURN, MOST_IN_TURN = 0.02, 2.0, 30.0  # of budget.total, and seconds
_CONFIRM_SEEDS = 1_000_003  # confirmation never sees a seed that the search has used


class Confirmation:
    """Of one study, from where an earlier start left it."""

    def __init__(self, parts: StudyParts, trials: Trials, belief: Belief) -> None:
        self._parts, self._trials, self._belief = parts, trials, belief

    def run(self) -> None:
        """The finalists and the baseline on fresh seeds, interleaved so that a slow spell of the machine hits all."""
        parts, config = self._parts, self._parts.plan.config
        planned = self._finalists()
        if planned == [parts.space.baseline]:
            return
        done = [(parts.space.of(trial), trial.seed) for trial in parts.history.records() if self._is_done(trial)]
        seeds = range(config.seed + _CONFIRM_SEEDS, config.seed + _CONFIRM_SEEDS + config.confirm.seeds)
        missing = [(params, seed) for seed in seeds for params in planned if (params, seed) not in done]
        at_once = len(parts.pool)
        for first in range(0, len(missing), at_once):
            if parts.budget.seconds_left() <= 0:
                parts.observer.note("the confirmation ends: budget.total was used up")
                return
            for params, seed in missing[first : first + at_once]:
                if not parts.machines.several or not self._is_taken(params, seed):
                    self._trials.add(params, "confirm", seed)
            self._trials.drain(awaited="confirm")
        self._time_in_turn(planned)

    def _time_in_turn(self, planned: list[dict[str, Value]]) -> None:
        """Where others had a part in how long runs took, times the steps of all in turn: a slow spell then hits all.

        How many steps a run needs does not depend on the machine. Where this cannot be done, what the runs took counts.
        """
        parts, known = self._parts, self._parts.study.user_attrs.get(IN_TURN, [])
        ran = [trial for trial in parts.history.records() if over(trial) and parts.space.of(trial) in planned]
        if parts.cost is not SECONDS or parts.machines.several or not is_disturbed(ran):
            return
        seconds = min(max(IN_TURN_SHARE * parts.budget.total, LEAST_IN_TURN), MOST_IN_TURN)
        if [params for params, _ in known] == planned or parts.budget.seconds_left() < seconds:
            return
        specs = tuple(self._trials.spec(params, "confirm", parts.plan.config.seed) for params in planned)
        if rounds := self._trials.time_in_turn(specs, seconds):
            paces = comparable_paces(rounds, [parts.history.pace(spec) for spec in specs])
            parts.study.set_user_attr(IN_TURN, list(zip(planned, paces, strict=True)))

    def as_timed_in_turn(self, trials: Sequence[Trial]) -> list[Trial]:
        """The trials, those of configurations whose steps were timed in turn with what their steps take by that."""
        known = self._parts.study.user_attrs.get(IN_TURN, [])

        def timed(trial: Trial) -> Trial:
            params = self._parts.space.of(trial) if known else {}
            return next((at_pace(trial, seconds) for each, seconds in known if each == params), trial)

        return [timed(trial) for trial in trials]

    def _is_done(self, trial: Trial) -> bool:
        """Whether a run has told what there is to tell; what the baseline failed at is worth another try."""
        failed_for_good = trial.role == "confirm" and trial.outcome in FAILED_FOR_GOOD
        space = self._parts.space
        return over(trial) or (failed_for_good and space.of(trial) != space.baseline)

    def _is_taken(self, params: dict[str, Value], seed: int) -> bool:
        """Whether another machine has queued this run already, or runs it, or ran it."""
        records, space = self._parts.history.records(), self._parts.space
        same = [trial for trial in records if trial.seed == seed and space.of(trial) == params]
        return any(trial.state in {"waiting", "running"} or self._is_done(trial) for trial in same)

    def _finalists(self) -> list[dict[str, Value]]:
        """The baseline and the configurations to confirm; chosen anew when the budget changes: the search went on."""
        parts, config = self._parts, self._parts.plan.config
        chosen_from = [*parts.search_budget, config.confirm.top]
        stored = parts.study.user_attrs.get("finalists")
        if stored and stored["chosen_from"] == chosen_from:
            return list(stored["params"])
        count, objective = parts.budget.affordable_contenders(), config.objective
        if count < config.confirm.top:
            parts.observer.note(
                f"{count} of {config.confirm.top} contenders on fresh seeds: budget.total has room for no more"
            )
        chosen = finalists(
            parts.history.records(), count, kind=objective.kind, goal=objective.goal, expected=self._belief.expected()
        )
        planned = [parts.space.of(trial) for trial in chosen] + [parts.space.baseline]
        parts.study.set_user_attr("finalists", {"chosen_from": chosen_from, "params": planned})
        return planned
