"""The confirmation: finalists and baseline on fresh seeds, interleaved."""

from __future__ import annotations

from typing import Any

from batchtune.document import Trial
from batchtune.tune.objective.history import over
from batchtune.tune.objective.records import FAILED_FOR_GOOD
from batchtune.tune.study.belief import Belief
from batchtune.tune.study.parts import StudyParts
from batchtune.tune.study.queue import RunQueue
from batchtune.tune.verdict.recommend import finalists

_CONFIRM_SEEDS = 1_000_003  # confirmation never sees a seed that the search has used


class Confirmation:
    """Of one study, from where an earlier start left it.

    Args:
        parts: of the study.
        queue: for its runs.
        belief: by which finalists are chosen.
    """

    def __init__(self, parts: StudyParts, queue: RunQueue, belief: Belief) -> None:
        self._parts, self._queue, self._belief = parts, queue, belief

    def run(self) -> None:
        """The finalists and the baseline on fresh seeds, interleaved so that a slow spell of the machine hits all."""
        parts, config = self._parts, self._parts.plan.config
        planned = self._finalists()
        if planned == [parts.space.baseline]:
            return
        done = [(parts.space.of(trial), trial.seed) for trial in parts.history.records() if self._is_done(trial)]
        at_once = len(parts.pool)
        for number in range(config.confirm.seeds):
            seed = config.seed + _CONFIRM_SEEDS + number
            missing = [params for params in planned if (params, seed) not in done]
            for first in range(0, len(missing), at_once):
                if parts.budget.seconds_left() <= 0:
                    parts.observer.note("the confirmation ends: budget.total was used up")
                    return
                for params in missing[first : first + at_once]:
                    if not parts.machines.several or not self._is_taken(params, seed):
                        self._queue.add(params, "confirm", seed)
                self._queue.drain(awaited="confirm")

    def _is_done(self, trial: Trial) -> bool:
        """Whether a run has told what there is to tell; what the baseline failed at is worth another try."""
        failed_for_good = trial.role == "confirm" and trial.outcome in FAILED_FOR_GOOD
        space = self._parts.space
        return over(trial) or (failed_for_good and space.of(trial) != space.baseline)

    def _is_taken(self, params: dict[str, Any], seed: int) -> bool:
        """Whether another machine has queued this run already, or runs it, or ran it."""
        records, space = self._parts.history.records(), self._parts.space
        same = [trial for trial in records if trial.seed == seed and space.of(trial) == params]
        return any(trial.state in {"waiting", "running"} or self._is_done(trial) for trial in same)

    def _finalists(self) -> list[dict[str, Any]]:
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
