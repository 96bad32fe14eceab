"""Which parts of a result belong together, such as the probes of one run; and what ranks trials."""

from __future__ import annotations

from collections.abc import Sequence

from batchtune.device.host import BUSY
from batchtune.document import Attempt, Document, ProbeResult, ThroughputPoint, Trial
from batchtune.units import LEAST_PEAK

SECONDS, JOULES, VALUE = "time_to_target_seconds", "energy_to_target_joules", "value"
"""What a study can want the best of: fields of trials, and of recommendations."""

_BROKEN = {"diverged", "oom", "crash", "timeout", "user_error"}


def probes_of(result: Document) -> list[ProbeResult]:
    """The probe of each precision."""
    return result.probes or ([result.probe] if result.probe else [])


def chosen_probe(result: Document) -> ProbeResult | None:
    """The one that stands for the result."""
    return result.probe or next(iter(probes_of(result)), None)


def fastest(probe: ProbeResult) -> ThroughputPoint | None:
    """Where the most samples a second were measured."""
    return max(probe.throughput, key=lambda point: point.samples_per_second, default=None)


def used_by_others(point: ThroughputPoint) -> float | None:
    """The share of processors that slowed these steps, or may have: then they are no slower than shown."""
    share = point.processors_used_by_others
    return None if share is None or share < BUSY else share


def ran(result: Document) -> list[Trial]:
    """The runs of a study that began, by their number."""
    return [trial for trial in result.trials or [] if trial.state != "waiting"]


def metric_of(result: Document) -> str:
    """What the study's metric is called."""
    return result.target.metric if result.target else "metric"


def objective(result: Document) -> str:
    """What the study wanted the best of; where an earlier version did not write that down, what its trials have."""
    kind = result.target.kind if result.target else None
    if kind is not None:
        return {"time_to_target": SECONDS, "energy_to_target": JOULES, "best_metric": VALUE}[kind]
    return SECONDS if any(trial.time_to_target_seconds is not None for trial in result.trials or []) else VALUE


def best_first(result: Document) -> tuple[list[Trial], str]:
    """The runs that began, and the figure that ranks them."""
    began, key = ran(result), objective(result)
    key = key if any(score(trial, key) is not None for trial in began) else VALUE  # nothing got there yet
    minimize = least_is_best(result, key)

    def rank(trial: Trial) -> float:
        value = score(trial, key)
        return float("inf") if value is None else value if minimize else -value

    return sorted(began, key=rank), key


def least_is_best(result: Document, key: str) -> bool:
    """Whether less of this figure is better."""
    return key != VALUE or result.target is None or result.target.goal == "minimize"


def is_broken(trial: Trial) -> bool:
    """Whether a run diverged or failed; not if it was only interrupted."""
    return (trial.state == "fail" and not trial.is_interrupted) or trial.outcome in _BROKEN


def that_count(runs: Sequence[Trial]) -> Sequence[Trial]:
    """Of one configuration's runs, those that were not interrupted; where there are no others, all."""
    return [trial for trial in runs if not trial.is_interrupted] or runs


def score(trial: Trial, key: str) -> float | None:
    """A trial's figure of this name; the metric that a run had before it broke is none."""
    value: float | None = None if key == VALUE and is_broken(trial) else getattr(trial, key)
    return value


def peak_of(attempt: Attempt) -> int | None:
    """The peak memory of an attempt that fits, in bytes: reserved, or allocated where that is not known.

    None where it is too little to be told.
    """
    peak = attempt.peak_allocated_bytes if attempt.peak_reserved_bytes is None else attempt.peak_reserved_bytes
    return peak if attempt.fits and peak is not None and peak >= LEAST_PEAK else None
