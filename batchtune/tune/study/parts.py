"""What the phases of a study share, and the time that it has."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from optuna import Study
from optuna.trial import TrialState

from batchtune.observer import Observer
from batchtune.processes.pool import WorkerPool
from batchtune.tune.objective.cost import cost_of
from batchtune.tune.objective.history import StudyHistory
from batchtune.tune.objective.targets import Targets
from batchtune.tune.plan.plan import Plan
from batchtune.tune.plan.space import Space
from batchtune.tune.storage.shared import Machines
from batchtune.tune.study.limits import CAP_FACTOR, LOST_FACTOR

MOST_RESERVED = 0.5  # of budget.total, for confirmation: a slow baseline must leave room to search
Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class StudyParts:
    """One study and what is known around it.

    Attributes:
        plan: configuration and measurements before the study.
        study: Optuna's.
        pool: the workers that share its trials.
        machines: that share it.
        budget: its time.
    """

    plan: Plan
    study: Study
    space: Space
    history: StudyHistory
    targets: Targets
    pool: WorkerPool
    machines: Machines
    budget: StudyBudget
    observer: Observer

    def has(self, *states: TrialState, **attributes: Any) -> bool:
        """Whether a trial in one of these states has these attributes."""
        trials = self.study.get_trials(deepcopy=False, states=states)
        return any(attributes.items() <= trial.user_attrs.items() for trial in trials)

    @property
    def search_budget(self) -> list[float]:
        """What the search may use; with a larger one it goes on."""
        return [self.plan.config.budget.total, self.plan.config.budget.trials]

    @property
    def has_searched(self) -> bool:
        """Whether the search has ended, on this machine or another."""
        return bool(self.study.user_attrs.get("searched") == self.search_budget)


class StudyBudget:
    """budget.total; opening the task, the probe, the measurements after it and earlier starts have used a part of it.

    Args:
        plan: configuration and measurements before the study.
        history: the trials so far.
        at_once: how many runs train side by side.
        clock: seconds.
        opening_seconds: that this start has taken before its probe.
    """

    def __init__(
        self,
        plan: Plan,
        history: StudyHistory,
        at_once: int,
        clock: Clock = time.perf_counter,
        opening_seconds: float = 0.0,
    ) -> None:
        self._config, self._history, self._at_once, self._clock = plan.config, history, at_once, clock
        before = plan.probe.seconds + (plan.prior.seconds if plan.prior else 0.0) + history.wall_seconds()
        self._ends = clock() + self._config.budget.total - before - opening_seconds

    def seconds_left(self) -> float:
        """Of budget.total."""
        return self._ends - self._clock()

    def reserve(self) -> float:
        """Seconds that confirmation and one more run of the search need; half of the whole budget at the most.

        Where a baseline takes all of budget.run, its confirmation could take all of budget.total, and nothing would be
        searched: it is then cut short instead.
        """
        return min(self._needed(self._config.confirm.seeds), MOST_RESERVED * self._config.budget.total)

    def to_confirm(self, seeds: int) -> str:
        """What of the configuration to change for so many fresh seeds to run, as on the command line."""
        total, seeds = self._config.budget.total, max(seeds, self._config.confirm.seeds)
        needed = self._needed(seeds)
        enough = math.ceil(max(total - self.seconds_left() + needed, needed / MOST_RESERVED))
        return f"confirm.seeds={seeds}" + (f" budget.total={enough}s" if enough > total else "")

    def _needed(self, seeds: int) -> float:
        """Seconds for the confirmation and one more run of the search, with what runs take besides training."""
        config, longest = self._config, self._config.budget.run
        best = self._history.best_seconds() or longest
        one_baseline = min(LOST_FACTOR * best, longest)
        needed = seeds * 1.2 * (one_baseline + config.confirm.top * best) + CAP_FACTOR * best
        runs = seeds * (1 + config.confirm.top) + (not self._history.finished("baseline")) + 1
        needed += math.ceil(runs / self._at_once) * self._history.seconds_beside_training()
        if not self._history.finished("baseline"):
            needed += longest
        return needed

    def affordable_contenders(self) -> int:
        """How many are confirmed: as asked for, or where every run takes all of budget.run, as all seeds allow."""
        config, most = self._config, self._config.confirm.top
        if cost_of(config.objective.kind) is not None:
            return most
        round_seconds = config.confirm.seeds * (config.budget.run + self._history.seconds_beside_training())
        rounds = self.seconds_left() // max(round_seconds, 1e-9)  # of each seed, in which all workers train once
        return next((each for each in range(most, 1, -1) if math.ceil((each + 1) / self._at_once) <= rounds), 1)
