"""What a study believes of its configurations: before the first run by what was measured, then by all runs together."""

from __future__ import annotations

from collections.abc import Sequence

from optuna.trial import FrozenTrial

from batchtune.tune.objective.records import to_record
from batchtune.tune.optuna_parts.sampler import TimeToTargetSampler
from batchtune.tune.optuna_parts.surface import Prior, Surface
from batchtune.tune.plan.plan import Plan
from batchtune.tune.plan.prior import rate_belief, surface_prior
from batchtune.tune.verdict.recommend import Configuration, config_of


def belief(plan: Plan) -> Prior:
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


def expected_costs(
    sampler: TimeToTargetSampler, trials: Sequence[FrozenTrial], *, seed: int
) -> dict[Configuration, float] | None:
    """What all runs together tell of the cost of each configuration that ran, as a logarithm.

    Args:
        sampler: of the study; it knows how the surface sees a trial.
        trials: those that are over.
        seed: makes the surface reproducible.

    Returns:
        None as long as nothing has reached the target, since the surface then knows lower bounds only.
    """
    found = sampler.runs(trials)
    if sampler.prior is None or all(run.censored for _, run in found):
        return None
    logs = Surface(sampler.prior, [run for _, run in found], seed).log_seconds_of_runs()
    return {config_of(to_record(trial)): float(each) for (trial, _), each in zip(found, logs, strict=True)}
