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
