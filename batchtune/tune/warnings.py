"""What a reader of a study's result must know besides its numbers, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from batchtune.report.units import number
from batchtune.results import Prior, ProbeResult, Trial
from batchtune.tune.steps import step_seconds, with_loading

_INPUT_BOUND = 2.0  # times as long as a step alone: then it is mostly the data that training waits for
NOT_SEARCHED = "no other configuration was tried"


def loading_warnings(probe: ProbeResult, prior: Prior, device: str) -> list[str]:
    """One where steps at the batch size that the search starts with wait for their data for most of the time.

    Args:
        probe: whose steps were timed on a batch that was there.
        prior: what was measured of loading.
        device: as in `with_loading`.
    """
    alone, size, seconds = probe.throughput_fit, prior.start_batch_size, prior.loader_seconds_per_sample
    loaded = with_loading(probe, seconds, device).throughput_fit
    if alone is None or loaded is None or not seconds or not size:
        return []
    slower = step_seconds(loaded, size) / max(step_seconds(alone, size), 1e-9)
    if slower < _INPUT_BOUND:
        return []
    rate = f"{1 / seconds:,.0f} samples/s"
    told = f"input-bound: loading data ({rate}) makes steps at batch {size} {number(slower)} times as long"
    return [f"{told}: prepare the data beforehand, or keep it in memory, and tune again"]


def baseline_warnings(probe: ProbeResult, batch_size: int) -> list[str]:
    """One where the user's bounds keep the probe below the baseline's batch size, so that it had to be accumulated."""
    most = probe.max_batch_size
    if most is None or probe.limited_by != "max" or batch_size <= most:
        return []
    text = f"the baseline's batch {batch_size} is above what batch_size allows ({most} at once): it was measured in"
    return [f"{text} accumulated micro-batches, which may be slower than what you run today"]


def search_warnings(trials: Sequence[Trial]) -> list[str]:
    """One where a study that has ended never came to search."""
    if any(trial.role == "search" and trial.outcome for trial in trials):
        return []
    return [f"{NOT_SEARCHED}: probe and baseline took all of budget.total; raise it and start again"]
