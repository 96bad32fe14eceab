"""An Optuna pruner for runs against the clock: a run that falls behind the best one at equal training time ends."""

from __future__ import annotations

from typing import Literal

from optuna import Study
from optuna.pruners import BasePruner
from optuna.trial import FrozenTrial, TrialState

from batchtune.tune.recommend import time_to_value


class TimeToValuePruner(BasePruner):
    """Prunes a run that needs `factor` times as long as the best trial for every value that it has reached.

    Trials report their metric at steps that are milliseconds of training, so that batch sizes compare; the study
    minimises the time to a target. Loss curves of different batch sizes and learning rates cross early, so nothing is
    judged before `patience` of the best trial's time.

    Args:
        goal: the direction of the reported metric.
        factor: how many times slower than the best is hopeless.
        patience: share of the best time to target before which no run is judged.
    """

    def __init__(self, goal: Literal["minimize", "maximize"], *, factor: float = 2.5, patience: float = 0.3) -> None:
        self._sign = 1.0 if goal == "minimize" else -1.0
        self._factor, self._patience = factor, patience

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        timed = [each for each in finished if each.value is not None and each.intermediate_values]
        if not timed or trial.last_step is None:
            return False
        best = min(timed, key=lambda each: each.value or 0.0)
        now = trial.last_step / 1000
        if now < self._patience * (best.value or 0.0):
            return False
        reached = min(self._sign * value for value in trial.intermediate_values.values())
        curve = [(step / 1000, self._sign * value) for step, value in sorted(best.intermediate_values.items())]
        same = time_to_value(curve, reached)
        return same is not None and now > self._factor * max(same, curve[0][0], 1e-3)
