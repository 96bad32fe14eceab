"""An Optuna sampler for batch size and learning rate together, when the value of a trial is its time to a target."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np
from optuna import Study
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.search_space import IntersectionSearchSpace
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from batchtune.tune.optuna_parts.surface import Array, Run, Surface, SurfacePrior
from batchtune.vocabulary import FAILED_FOR_GOOD

LOWER_BOUND = "lower_bound"
_RATE_STEP = 0.125  # decades between the learning rates considered
_TOO_NEAR = 0.07  # decades: the same point again tells less than a new one
_KEPT_APART = 0.3  # decades from where another worker is, or where a run came to nothing, at its batch size
_WIDE = 10.0  # times: in such a range three digits of a number are enough
_DIVERGED_FACTOR = 4.0  # a diverged run counts as this many times slower than the slowest seen


class RoundingSampler(TPESampler):
    """Optuna's TPE, whose numbers have three digits of their range: they are written down, and more mean nothing.

    Args:
        within: as of `TimeToTargetSampler`.
        settings: of TPE.
    """

    def __init__(self, *, within: Mapping[str, BaseDistribution] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._within = within or {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, object]:
        narrow = {name: self._within.get(name, each) for name, each in search_space.items()}
        seen = {name: _range_of(each, narrow[name]) for name, each in search_space.items()}
        found = super().sample_relative(study, trial, seen)
        return {name: _rounded_within(narrow[name], value) for name, value in found.items()}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> object:
        narrow = self._within.get(param_name, param_distribution)
        value = super().sample_independent(study, trial, param_name, _range_of(param_distribution, narrow))
        return _rounded_within(narrow, value)


class TimeToTargetSampler(BaseSampler):
    """Proposes the batch size and learning rate that promise the largest cut in time to target.

    Works on any study that minimises seconds and has a batch-size and a learning-rate parameter. Completed trials are
    times; a pruned trial is a lower bound: its user attribute `lower_bound` (in seconds), or else its last reported
    step, read as milliseconds. Of runs under way the surface says what they may come to, and proposed is what promises
    most beside them. Other parameters are left to `independent`.

    Args:
        prior: step time and the learning rate believed in; without it both come from the first trial.
        batch_size: the name of the batch-size parameter (categorical over sizes, or int).
        learning_rate: the name of the learning-rate parameter (float, log).
        seed: makes proposals reproducible.
        independent: samples every other parameter, and these two before the first trial has finished.
        within: what of the study's distributions may be proposed of batch size and learning rate, by the name of the
            parameter; trials that were queued may lie elsewhere.

    Attributes:
        shares: of a trial's seconds, by its number, that it would take on a machine that does nothing else, as far as
            that is known; they may change as a study learns.
    """

    def __init__(
        self,
        prior: SurfacePrior | None = None,
        *,
        batch_size: str = "batch_size",
        learning_rate: str = "learning_rate",
        seed: int | None = None,
        independent: BaseSampler | None = None,
        within: Mapping[str, BaseDistribution] | None = None,
    ) -> None:
        self.prior = prior
        self.last_expected_improvement: float | None = None
        self.shares: Mapping[int, float] = {}
        self._batch_size, self._learning_rate = batch_size, learning_rate
        self._seed = 0 if seed is None else seed
        self._independent = independent or RandomSampler(seed=seed)
        self._within = within or {}
        self._space, self._has_warned = IntersectionSearchSpace(include_pruned=True), False

    def reseed_rng(self) -> None:
        self._independent.reseed_rng()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The two parameters, once a finished trial has them, or with a prior one that runs.

        Where finished trials do not all have both, over the same range, a warning says so once.

        Raises:
            ValueError: the study does not minimise one value, or a parameter is of a kind that it cannot be.
        """
        require_minimizing(study, type(self).__name__)
        space, wanted = self._space.calculate(study), (self._batch_size, self._learning_rate)
        if not space and self.prior is not None:
            space = next((each.distributions for each in self._others(study, trial)), {})
        if missing := [name for name in wanted if name not in space]:
            self._warn(study, missing)
            return {}
        _batch_sizes(self._batch_size, space[self._batch_size])
        _log10_rates(self._learning_rate, space[self._learning_rate])
        return {name: space[name] for name in wanted}

    def _warn(self, study: Study, missing: list[str]) -> None:
        """Says once that parameters are left to another sampler, as they are in every study until a trial has ended."""
        if self._has_warned or not study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
            return
        self._has_warned = True
        what, other = " and ".join(missing), type(self._independent).__name__
        warnings.warn(
            f"not every finished trial has {what} over the same range, so {type(self).__name__} leaves all to {other}: "
            "suggest both in every trial, or say what they are called by its arguments batch_size and learning_rate",
            stacklevel=2,
        )

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, object]:
        if not search_space:
            return {}
        search_space = {name: self._within.get(name, each) for name, each in search_space.items()}
        runs = [run for _, run in self.runs(study)]
        under_way = [self._run(each.params, 1.0, censored=False) for each in self._others(study, trial)]
        if not runs and self.prior is not None:
            runs = under_way[:1]  # of whose time nothing is known yet: it may as well take a second, ratios count
        if not runs:
            return {}
        apart = [*[(run, _TOO_NEAR) for run in runs], *[(run, _KEPT_APART) for run in under_way + self._failed(study)]]
        prior = self.prior or SurfacePrior(runs[0].batch_size, runs[0].learning_rate)
        surface = Surface(prior, runs, self._seed * 100_003 + trial.number)
        batch_sizes = _batch_sizes(self._batch_size, search_space[self._batch_size])
        rates = _log10_rates(self._learning_rate, search_space[self._learning_rate])
        grid_batch, grid_rate = (axis.ravel() for axis in np.meshgrid(batch_sizes, rates, indexing="ij"))
        gain = surface.expected_improvement(grid_batch, grid_rate, under_way)
        taken = np.zeros(gain.shape, dtype=bool)
        for run, decades in apart:
            taken |= (grid_batch == run.batch_size) & (np.abs(grid_rate - math.log10(run.learning_rate)) < decades)
        gain = np.where(taken, 0.0, gain)
        chosen = int(np.argmax(gain))
        if not gain[chosen]:  # nothing promises more: the best of what has not been tried, if anything
            expected = surface.predict(grid_batch, grid_rate).mean(axis=0)
            chosen = int(np.argmin(np.where(taken & ~taken.all(), np.inf, expected)))
        self.last_expected_improvement = float(gain[chosen])
        return {
            self._batch_size: int(grid_batch[chosen]),
            self._learning_rate: _nearest(search_space[self._learning_rate], _rounded(10 ** grid_rate[chosen])),
        }

    def _others(self, study: Study, asking: FrozenTrial) -> list[FrozenTrial]:
        """What other workers run."""
        running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return [each for each in running if each.number != asking.number and self._has_place(each)]

    def _failed(self, study: Study) -> list[Run]:
        """Runs that came to nothing, as places to keep away from; not those without memory, which is another matter."""
        failed = study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
        again = [trial for trial in failed if trial.user_attrs.get("outcome") in FAILED_FOR_GOOD]
        return [self._run(trial.params, 1.0) for trial in again if self._has_place(trial)]

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> object:
        """Another sampler's proposal.

        Raises:
            ValueError: batch size or learning rate is of a kind that it cannot be.
        """
        for name, check in ((self._batch_size, _batch_sizes), (self._learning_rate, _log10_rates)):
            if param_name == name:
                check(name, param_distribution)
        narrow = self._within.get(param_name, param_distribution)
        seen = _range_of(param_distribution, narrow)
        return _nearest(narrow, self._independent.sample_independent(study, trial, param_name, seen))

    def runs(self, study: Study) -> list[tuple[FrozenTrial, Run]]:
        """The finished trials of which the surface can learn, each with how it sees them."""
        finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        usable = [trial for trial in finished if self._has_place(trial)]
        times = {each.number: each.value for each in usable if each.state is TrialState.COMPLETE}
        finite = {number: value for number, value in times.items() if value is not None and math.isfinite(value)}
        found = []
        for trial in usable:
            complete = trial.number in finite
            seconds = finite.get(trial.number) if complete else _lower_bound(trial, max(finite.values(), default=None))
            if seconds is not None and seconds > 0:
                own = seconds * self.shares.get(trial.number, 1.0)
                found.append((trial, self._run(trial.params, own, censored=not complete)))
        return found

    def _has_place(self, trial: FrozenTrial) -> bool:
        return {self._batch_size, self._learning_rate} <= trial.params.keys()

    def _run(self, params: dict[str, Any], seconds: float, *, censored: bool = True) -> Run:
        batch_size, rate = int(params[self._batch_size]), float(params[self._learning_rate])
        return Run(batch_size, rate, float(seconds), censored=censored)


def _range_of(wide: BaseDistribution, narrow: BaseDistribution) -> BaseDistribution:
    """What another sampler draws from: it has to know every choice that has run, and may divide by the range."""
    return wide if isinstance(wide, CategoricalDistribution) or narrow.single() else narrow


def _nearest(distribution: BaseDistribution, value: Any) -> object:
    if isinstance(distribution, FloatDistribution | IntDistribution):
        return min(max(value, distribution.low), distribution.high)
    assert isinstance(distribution, CategoricalDistribution)  # noqa: S101 - there are no others
    if value in distribution.choices:
        return value
    return min((each for each in distribution.choices if _is_size(each)), key=lambda each: abs(math.log(each / value)))


def _rounded_within(distribution: BaseDistribution, value: Any) -> object:
    if not isinstance(distribution, FloatDistribution) or distribution.step is not None:
        return _nearest(distribution, value)
    low, high = distribution.low, distribution.high
    if distribution.log and high >= _WIDE * low:
        found = _rounded(value)
    else:  # of the range, not of the number: 0.9 to 0.9999 has its digits at the end
        found = round(value, math.ceil(3 - math.log10(high - low))) if high > low else value
    return min(max(found, low), high)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _lower_bound(trial: FrozenTrial, slowest: float | None) -> float | None:
    came_apart = trial.user_attrs.get("outcome") == "diverged" or trial.state is TrialState.COMPLETE  # at infinity
    if came_apart and slowest is not None:
        return slowest * _DIVERGED_FACTOR
    bound = trial.user_attrs.get(LOWER_BOUND)
    if bound is not None:
        return float(bound)
    return trial.last_step / 1000 if trial.last_step else None


def require_minimizing(study: Study, who: str) -> None:
    """Refuses, for whoever that is, a study in which the least value is not the best.

    Raises:
        ValueError: it has several objectives, or maximises.
    """
    if study.directions != [StudyDirection.MINIMIZE]:
        raise ValueError(f'{who} needs a study whose one value is a time: create_study(direction="minimize")')


def _is_size(choice: object) -> TypeGuard[int]:
    return isinstance(choice, int) and not isinstance(choice, bool) and choice >= 1


def _batch_sizes(name: str, distribution: BaseDistribution) -> Array:
    """The sizes of a parameter to consider; ValueError where it is no batch size."""
    if isinstance(distribution, IntDistribution) and distribution.low >= 1:
        low, high, step = distribution.low, distribution.high, distribution.step
        half_octaves = 2.0 ** (np.arange(math.ceil(2 * math.log2(low)), math.floor(2 * math.log2(high)) + 1) / 2)
        snapped = low + np.round((np.concatenate([half_octaves, [low, high]]) - low) / step) * step
        return np.unique(np.clip(snapped, low, high))
    choices = distribution.choices if isinstance(distribution, CategoricalDistribution) else ()
    if choices and all(_is_size(each) for each in choices):
        return np.array(choices, dtype=float)
    usual = f'suggest_categorical("{name}", [16, 32, ...]) or suggest_int'
    is_int = isinstance(distribution, IntDistribution)
    raise ValueError(f"{name} is no batch size: {'it must be at least 1' if is_int else usual}")


def _log10_rates(name: str, distribution: BaseDistribution) -> Array:
    """The logarithms of a parameter's learning rates to consider; ValueError where it is none."""
    if not isinstance(distribution, FloatDistribution) or distribution.low <= 0:
        raise ValueError(f'{name} is no learning rate: suggest_float("{name}", 1e-5, 1.0, log=True), above 0')
    low, high = math.log10(distribution.low), math.log10(distribution.high)
    return np.linspace(low, high, max(2, round((high - low) / _RATE_STEP) + 1)) if high > low else np.array([low])
