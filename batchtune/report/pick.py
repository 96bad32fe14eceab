"""Which parts of a result belong together: the probes of one run, the trials of one configuration."""

from __future__ import annotations

import math

from batchtune.results import ProbeResult, Recommendation, Result, Trial


def probes_of(result: Result) -> list[ProbeResult]:
    """The probe of each precision."""
    return result.probes or ([result.probe] if result.probe else [])


def is_of(trial: Trial, configuration: Recommendation | None) -> bool:
    """Whether a trial ran with exactly this configuration."""
    return (
        configuration is not None
        and configuration.learning_rate is not None
        and trial.batch_size == configuration.global_batch_size
        and trial.precision == configuration.precision
        and math.isclose(trial.learning_rate, configuration.learning_rate, rel_tol=1e-6)
    )


def to_train_with(result: Result) -> Recommendation | None:
    """The settings to train with, all of which ran: those recommended, or else the largest batch of a probe.

    A probe tries no learning rates, so its settings have none.
    """
    probe = result.probe
    if result.recommendation is not None or probe is None or probe.max_batch_size is None:
        return result.recommendation
    steps = probe.gradient_accumulation_steps or 1
    return Recommendation(
        micro_batch_size=probe.max_batch_size,
        gradient_accumulation_steps=steps,
        global_batch_size=probe.max_batch_size * steps,
        precision=probe.precision,
        reason="the largest batch that trains",
    )
