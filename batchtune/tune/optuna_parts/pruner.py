"""An Optuna pruner for runs against the clock: a run that falls behind the best one at equal training time ends."""

from __future__ import annotations

import math
from collections.abc import Sequence

from optuna import Study
from optuna.pruners import BasePruner
from optuna.trial import FrozenTrial, TrialState

from batchtune.tune.optuna_parts.sampler import require_minimizing
from batchtune.vocabulary import Goal

MILLISECOND = 1e-3
_STALLED_GAIN = 0.03  # of the whole way so far, in half of the time
_FEWEST_LOOKS = 12
_EARLY = 0.1  # of the longest run


class TimeToValuePruner(BasePruner):
    """Prunes a run that needs `factor` times as long as the best trial for every value that it has reached.

    Trials report their metric at steps that are milliseconds of training, so that batch sizes compare; the study
    minimises the time to a target. Loss curves of different batch sizes and learning rates cross early, so nothing is
    judged before `patience` of the best trial's time. What the best trial reached and lost again does not count
    while its metric was worse than before training, in two reports in a row: where a validation loss rises first, as it
    may with BatchNorm, a run that the best one was like goes on.

    As long as no trial has got there, a run ends where the second half of its time has brought it less than 3 %
    further: its learning rate is too high. Where target and longest run are known, it also has to be too slow for them,
    since a curve that has levelled off right above its target gets there all the same: at the pace of that half, and
    curves only slow down, it would still be short at its end. Some stay level at first: none is judged before a tenth
    of the longest run. One that is worse than before training goes on while it rises or comes half-way back.

    Args:
        goal: the direction of the reported metric.
        target: the value at which a trial ends; None: it is not known.
        longest: what a trial may take without it, in the study's unit; None: it is not known.
        factor: how many times slower than the best is hopeless.
        cap: how many times the best trial's time is hopeless by itself, where a run that began beside it has no limit.
        patience: share of the best time to target before which no run is judged.
        step: what a reported step is worth in the study's unit: a millisecond where its values are seconds.
    """

    def __init__(
        self,
        goal: Goal,
        *,
        target: float | None = None,
        longest: float | None = None,
        factor: float = 2.5,
        cap: float = math.inf,
        patience: float = 0.3,
        step: float = MILLISECOND,
    ) -> None:
        self._sign = 1.0 if goal == "minimize" else -1.0
        self._target, self._longest = target, longest
        self._factor, self._cap, self._patience, self._step = factor, cap, patience, step

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """Whether the run is to end.

        Raises:
            ValueError: the study does not minimise one value.
        """
        require_minimizing(study, type(self).__name__)
        if trial.last_step is None:
            return False
        best, taken = self._best(study), trial.last_step * self._step
        if best is None:
            return self._stalled(trial)
        if taken < self._patience * best[0]:
            return False
        return taken > self._cap * best[0] or self._behind(best[1], trial, taken) > self._factor

    def _stalled(self, trial: FrozenTrial) -> bool:
        """Whether the second half of a run's time brought it hardly any further, and not fast enough."""
        (_, start), *looks = self._curve(trial)
        rise = _rise(start, looks)
        is_worse = rise == len(looks)  # than before training
        looks = looks if is_worse else looks[rise:]
        if len(looks) < _FEWEST_LOOKS or looks[-1][0] < _EARLY * (self._longest or 0.0):
            return False
        taken, last = looks[-1]
        before = [value for seconds, value in looks if seconds <= taken / 2]
        late = [value for seconds, value in looks if seconds > taken / 2]
        if len(late) < _FEWEST_LOOKS / 2:
            return False
        if is_worse:  # and has neither risen nor come half-way back since
            return bool(before) and (before[-1] - start) / 2 < last - start <= before[-1] - start
        reached, now = min([start, *before]), min(start, *before, *late)
        if reached - now > _STALLED_GAIN * (start - now):
            return False
        if self._target is None or self._longest is None:
            return True
        left = self._longest - taken
        return (reached - now) / (taken / 2) * left < now - self._sign * self._target

    def _best(self, study: Study) -> tuple[float, FrozenTrial] | None:
        finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        timed = [(each.value, each) for each in finished if each.value is not None and each.intermediate_values]
        return min(timed, key=lambda pair: pair[0], default=None)

    def _behind(self, best: FrozenTrial, trial: FrozenTrial, taken: float) -> float:
        """How many times as long as the best trial the run took for the best value that it has reached."""
        reached = min((value for _, value in self._curve(trial)[1:]), default=math.inf)
        (_, start), *looks = self._curve(best)
        back = _rise(start, looks)
        lost = max((after for after, (_, value) in enumerate(looks[:back], 1) if value >= reached), default=0)
        same = next((seconds for seconds, value in looks[lost:] if value < reached), math.inf)
        return taken / max(same, MILLISECOND)

    def _curve(self, trial: FrozenTrial) -> list[tuple[float, float]]:
        """Seconds and values, of which less is better; the first is the one before training."""
        return [(step * self._step, self._sign * value) for step, value in sorted(trial.intermediate_values.items())]


def _rise(start: float, looks: Sequence[tuple[float, float]]) -> int:
    """How many looks a curve is worse than before training, up to the last two in a row; less is better."""
    above = [value > start for _, value in looks]
    return max((after for after in range(2, len(looks) + 1) if all(above[after - 2 : after])), default=0)
