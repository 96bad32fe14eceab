"""What a study believes of its configurations: before the first run by what was measured, then by all runs together."""

from __future__ import annotations

from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from batchtune.document import Landscape
from batchtune.tune.objective.cost import SECONDS, cost_of
from batchtune.tune.objective.records import to_record
from batchtune.tune.optuna_parts.sampler import TimeToTargetSampler
from batchtune.tune.optuna_parts.surface import Surface, SurfacePrior
from batchtune.tune.plan.plan import Plan
from batchtune.tune.plan.prior import rate_belief, surface_prior
from batchtune.tune.study.parts import StudyParts
from batchtune.tune.verdict.landscape import landscape
from batchtune.tune.verdict.recommend import Configuration, config_of


def prior_of(plan: Plan) -> SurfacePrior:
    """What the response surface starts from: what was measured before the study, or else what the baseline tells."""
    base, known = plan.config.baseline, plan.prior
    if known is None:
        rate, decades, _ = rate_belief(
            optimizer=plan.optimizer, rate_today=base.learning_rate, batch_size=base.batch_size
        )
        return surface_prior(plan.probe, batch_size=base.batch_size, rate=rate, spread_decades=decades)
    return surface_prior(
        plan.probe,
        batch_size=known.start_batch_size or base.batch_size,
        rate=known.learning_rate,
        spread_decades=known.learning_rate_decades,
        noise=known.noise_scale,
    )


class Belief:
    """What the response surface makes of the runs of a study so far; nothing where another sampler proposes.

    Args:
        parts: of the study.
        sampler: the study's; it knows how the surface sees a trial.
    """

    def __init__(self, parts: StudyParts, sampler: BaseSampler) -> None:
        self._parts = parts
        self._sampler = sampler if isinstance(sampler, TimeToTargetSampler) and sampler.prior is not None else None

    @property
    def expected_improvement(self) -> float | None:
        """Of log time by the latest proposal; None where nothing is expected, as of other parameters."""
        known = self._sampler is not None and not self._parts.space.has_other_parameters
        return self._sampler.last_expected_improvement if self._sampler and known else None

    def expected(self) -> dict[Configuration, float] | None:
        """Logarithm of what each configuration that ran costs on average, by all runs together.

        None as long as nothing has reached the target, since the surface then knows lower bounds only.
        """
        sampler = self._sampler
        if sampler is None or sampler.prior is None or self._parts.space.has_other_parameters:
            return None
        found = sampler.runs(self._finished())
        if all(run.censored for _, run in found):
            return None
        logs = Surface(sampler.prior, [run for _, run in found], self._parts.plan.config.seed).log_seconds_of_runs()
        return {config_of(to_record(trial)): float(each) for (trial, _), each in zip(found, logs, strict=True)}

    def landscape(self) -> Landscape | None:
        """What the surface predicts once all has run; None where the objective is no time."""
        config, sampler = self._parts.plan.config, self._sampler
        if sampler is None or sampler.prior is None or cost_of(config.objective.kind) != SECONDS:
            return None
        sizes = sorted(self._parts.plan.candidates.batch_sizes)
        runs = [run for _, run in sampler.runs(self._finished())]
        return landscape(sampler.prior, runs, sizes, self._parts.space.learning_rates, seed=config.seed)

    def _finished(self) -> list[FrozenTrial]:
        return self._parts.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
