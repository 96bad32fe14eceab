"""What a reader of a study's result must know besides its numbers, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from batchtune.config.schema import Config
from batchtune.document import Prior, ProbeResult, Recommendation, Target, Trial
from batchtune.tune.plan.steps import step_seconds, with_loading
from batchtune.units import number

_INPUT_BOUND = 2.0  # times as long as a step alone: then it is mostly the data that training waits for
UNEVEN = 0.2  # of the counted time; less is the ordinary noise of a machine


def study_warnings(
    config: Config,
    probe: ProbeResult,
    prior: Prior | None,
    device: str,
    target: Target | None,
    trials: Sequence[Trial],
    recommended: Recommendation | None,
    *,
    has_ended: bool,
) -> list[str]:
    """All that a reader of a study must know besides its numbers; what its probe says of itself left out.

    Args:
        config: the study's.
        probe: as it was measured.
        prior: what the search started from; None: not measured yet.
        device: that trains.
        target: as far as it is known.
        trials: so far.
        recommended: what to train with by these.
        has_ended: whether all has run.
    """
    return [
        *(loading_warnings(probe, prior, device) if prior else []),
        *baseline_warnings(probe, config.baseline.batch_size),
        *target_warnings(target),
        *uneven_warnings(trials, recommended),
        *(search_warnings(trials) if has_ended else []),
    ]


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


def target_warnings(target: Target | None) -> list[str]:
    """One where the baseline's run, which sets the target, diverged before its end."""
    if target is None or target.baseline_diverged_after_seconds is None:
        return []
    text = "the baseline diverged (NaN, infinite, or long worse than at its start) before its budget.run was over"
    return [f"{text}; what it had reached is the target: set objective.target, or fix it, and start over with --fresh"]


def search_warnings(trials: Sequence[Trial]) -> list[str]:
    """One where a study that has ended never came to search, or where the task raised errors in it."""
    searched = [trial for trial in trials if trial.role == "search" and trial.outcome]
    if not searched:
        text = "no other configuration was tried: probe and baseline took all of budget.total"
        return [f"{text}; raise it and start again"]
    raised = [trial.message for trial in searched if trial.outcome == "user_error"]
    if not raised:
        return []
    runs = f"{len(raised)} of {len(searched)} runs of the search, which tell nothing"
    return [f"the task raised an error in {runs}: {raised[-1]}"]


def uneven_warnings(trials: Sequence[Trial], found: Recommendation | None) -> list[str]:
    """One where runs of the recommendation or the baseline took much longer than they count.

    Stretches that are far slower than the usual pace count as if they were not: mostly it is another program that slows
    them, but batches of very unequal length look the same.
    """
    ours = None if found is None else (found.global_batch_size, found.learning_rate)
    shown = [each for each in trials if each.role != "search" or (each.batch_size, each.learning_rate) == ours]
    counted = sum(each.training_seconds or 0.0 for each in shown)
    took = sum(each.measured_training_seconds or each.training_seconds or 0.0 for each in shown)
    if took <= (1 + UNEVEN) * counted:
        return []
    longer = f"training took longer than it counts by {took / counted - 1:.0%}"
    text = f"{longer}: stretches far slower than the usual pace are put down to other programs"
    rest = "where it is your data, in batches of very unequal length, times are that much longer for you"
    return [f"{text} on this machine; {rest}"]
