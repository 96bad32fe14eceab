"""Which parts of a result belong together: the probes of one run, the trials of one configuration, peaks and limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from batchtune.document import Attempt, Document, ProbeResult, Recommendation, ThroughputFit, ThroughputPoint, Trial

SECONDS, JOULES, VALUE = "time_to_target_seconds", "energy_to_target_joules", "value"
"""What a study can want the best of: fields of trials, and of recommendations."""

_BROKEN = {"diverged", "oom", "crash", "timeout", "user_error"}
_CURVE_POINTS = 80
_FAR_ABOVE = 2.5  # a limit so many times the highest peak would press the curve to the ground


def probes_of(result: Document) -> list[ProbeResult]:
    """The probe of each precision."""
    return result.probes or ([result.probe] if result.probe else [])


def chosen_probe(result: Document) -> ProbeResult | None:
    """The one that stands for the result."""
    return result.probe or next(iter(probes_of(result)), None)


def fastest(probe: ProbeResult) -> ThroughputPoint | None:
    """Where the most samples a second were measured."""
    return max(probe.throughput, key=lambda point: point.samples_per_second, default=None)


def ran(result: Document) -> list[Trial]:
    """The runs of a study that began, by their number."""
    return [trial for trial in result.trials or [] if trial.state != "waiting"]


def metric_of(result: Document) -> str:
    """What the study's metric is called."""
    return result.target.metric if result.target else "metric"


def is_of(trial: Trial, configuration: Recommendation | None) -> bool:
    """Whether a trial ran with exactly this configuration."""
    return (
        configuration is not None
        and configuration.learning_rate is not None
        and trial.batch_size == configuration.global_batch_size
        and trial.precision == configuration.precision
        and trial.optimizer_arguments == configuration.optimizer_arguments
        and math.isclose(trial.learning_rate, configuration.learning_rate, rel_tol=1e-6)
    )


def objective(result: Document) -> str:
    """What the study wanted the best of; where an earlier version did not write that down, what its trials have."""
    kind = result.target.kind if result.target else None
    if kind is not None:
        return {"time_to_target": SECONDS, "energy_to_target": JOULES, "best_metric": VALUE}[kind]
    return SECONDS if any(trial.time_to_target_seconds is not None for trial in result.trials or []) else VALUE


def is_broken(trial: Trial) -> bool:
    """Whether a run diverged or failed."""
    return trial.state == "fail" or trial.outcome in _BROKEN


def score(trial: Trial, key: str) -> float | None:
    """A trial's figure of this name; the metric that a run had before it broke is none."""
    value: float | None = None if key == VALUE and is_broken(trial) else getattr(trial, key)
    return value


def peak_of(attempt: Attempt) -> int | None:
    """The peak memory of an attempt that fits, in bytes: reserved, or allocated where that is not known."""
    if not attempt.fits:
        return None
    return attempt.peak_allocated_bytes if attempt.peak_reserved_bytes is None else attempt.peak_reserved_bytes


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """How far up a figure of peak memory reaches.

    Attributes:
        limit_bytes: the highest limit; 0 where there is none.
        near: the limit is near enough to the peaks to be drawn with them.
        ceiling_bytes: the highest peak, or the limit where it is near.
    """

    limit_bytes: int
    near: bool
    ceiling_bytes: int


def memory_range(probes: Sequence[ProbeResult]) -> MemoryRange | None:
    """Peaks and limit of some probes together; None where neither is known."""
    peaks = [peak for probe in probes for attempt in probe.attempts if (peak := peak_of(attempt)) is not None]
    limit = max((probe.memory_limit_bytes or 0 for probe in probes), default=0)
    if not peaks and not limit:
        return None
    failed = any(not attempt.fits for probe in probes for attempt in probe.attempts)
    near = bool(limit) and (failed or not peaks or limit <= _FAR_ABOVE * max(peaks))
    return MemoryRange(limit, near, max([*peaks, limit if near else 0]))


def fitted_speeds(fit: ThroughputFit, low: float, high: float) -> list[tuple[float, float]]:
    """Points (batch size, samples per second) of the fitted curve between two batch sizes, equal ratios apart."""
    sizes = [low * (high / low) ** (step / _CURVE_POINTS) for step in range(_CURVE_POINTS + 1)]
    steps = [(batch, fit.alpha_seconds + fit.beta_seconds_per_sample * batch) for batch in sizes]
    return [(batch, batch / seconds) for batch, seconds in steps if seconds > 0]
