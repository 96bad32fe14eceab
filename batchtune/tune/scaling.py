"""What a configuration that trained on one device would come to on several: its batch split among ranks, its time.

Only batch sizes and learning rates that reached the target here are considered: how many samples they need was
measured, and is the same on any number of ranks. What a step takes there is computed, so every time is an estimate: the
fitted step of one rank, slowed as much for each further rank as ranks side by side were, and the communication that was
measured, which in a ring of W ranks passes on (W - 1) / W of the gradients twice (Patarasuk and Yuan 2009, Bandwidth
optimal all-reduce algorithms for clusters of workstations).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from batchtune.config.schema import Config
from batchtune.device.host import processors
from batchtune.document import (
    Configuration,
    DataParallel,
    Interval,
    ProbeResult,
    Recommendation,
    Scaling,
    ScalingPoint,
    Trial,
    by_configuration,
    config_of,
)
from batchtune.probe.timing.steps import time_group
from batchtune.protocol.commands import Opened
from batchtune.tune.plan.open_task import worker_settings
from batchtune.tune.plan.prior import split_batch, step_seconds
from batchtune.tune.study.phases import TuneStudy
from batchtune.tune.verdict.recommend import TIED
from batchtune.tune.verdict.scores import SECONDS, Expected, median_interval
from batchtune.vocabulary import Variant

WORLD_SIZES = (1, 2, 4, 8)


def split(batch_size: int, world_size: int, largest: int) -> tuple[int, int] | None:
    """The largest micro-batch up to `largest`, and steps, of each rank; None where the global batch does not divide."""
    each, rest = divmod(batch_size, world_size)
    return None if rest or not each else split_batch(each, largest)


def can_scale(found: Recommendation, probe: ProbeResult) -> bool:
    """Whether the time of one device is known: a bound, of runs that were cut off, is none."""
    timed = found.time_to_target_seconds is not None and not found.time_to_target_seconds.at_least
    return timed and found.batch_unit == "samples" and probe.throughput_fit is not None and bool(probe.max_batch_size)


def scaling(
    trials: Sequence[Trial],
    found: Recommendation,
    probe: ProbeResult,
    measured: DataParallel,
    expected: Expected | None = None,
) -> Scaling | None:
    """The best configuration on 1, 2, 4 and 8 ranks, of those that reached the target on one.

    Another than the recommended one is named where its estimate is better by more than can be told apart. What was not
    run on fresh seeds counts with what all runs together tell of it, for the least of many single runs was lucky.
    `probe` and the recommendation that was `found` are of one device, `measured` of a group of ranks that ran; see
    `recommend` for `expected`. None where no time to target is known, or steps were not timed.
    """
    if not can_scale(found, probe):
        return None
    ours = config_of(found)
    times = _times(trials, found.time_to_target_seconds, ours, expected)
    step = _Step(probe, measured)
    seconds = step.seconds(found.micro_batch_size, found.gradient_accumulation_steps, 1)
    one = {"world_size": 1, "step_seconds": seconds, "is_estimate": False}  # the rank that the recommendation ran on
    points = [ScalingPoint.model_validate(dict(found) | one)]
    first = {config: group[0] for config, group in by_configuration(trials).items()}
    for world_size in WORLD_SIZES[1:]:
        every = {config: _point(first[config], each, world_size, step) for config, each in times.items()}
        options = {config: point for config, point in every.items() if point is not None}
        if options:
            best = min(options.values(), key=lambda each: each.time_to_target_seconds.median)
            same = options.get(ours, best)
            is_better = best.time_to_target_seconds.median * TIED < same.time_to_target_seconds.median
            points.append(best if is_better else same)
    return Scaling(measured=measured, points=points)


class _Step:
    """Seconds of an optimizer step on any number of ranks."""

    def __init__(self, probe: ProbeResult, measured: DataParallel) -> None:
        assert probe.throughput_fit is not None  # noqa: S101 - the caller looked
        self._largest, self._others = probe.max_batch_size or 1, probe.other_variants or {}
        self._fit, self._measured = probe.throughput_fit, measured
        apart, alone = measured.step_seconds_without_communication, measured.step_seconds_alone
        slower = max(0.0, apart / alone - 1) if apart and alone else 0.0
        self._slower_each = slower / (measured.world_size - 1)
        errors = [abs(step_seconds(self._fit, each.batch_size) / each.step_seconds - 1) for each in probe.throughput]
        self.error = max(errors, default=0.0)  # relative; the worst of the fit where it was measured, too

    def largest(self, variant: Variant) -> int:
        """The largest micro-batch of a model that is trained by this."""
        return self._others.get(variant.name) or self._largest

    def seconds(self, micro_batch_size: int, accumulation_steps: int, world_size: int) -> float:
        """Of one optimizer step."""
        slower, ran = 1 + self._slower_each * (world_size - 1), self._measured.world_size
        share = ((world_size - 1) / world_size) / ((ran - 1) / ran)
        communication = (self._measured.communication_seconds or 0.0) * share
        return accumulation_steps * step_seconds(self._fit, micro_batch_size) * slower + communication


def _times(
    trials: Sequence[Trial], recommended: Interval | None, ours: Configuration, expected: Expected | None
) -> dict[Configuration, list[float]]:
    """Seconds to the target of each configuration that may be named.

    Those of fresh seeds where it ran on such, unless it came to nothing on half of them; else the recommended one's
    times in the proportion in which all runs together expect the two.
    """
    fresh = by_configuration(trial for trial in trials if trial.tells_of_fresh_seed)
    others = by_configuration(trial for trial in trials if trial.role != "confirm")
    times: dict[Configuration, list[float]] = {}
    for config, group in (others | fresh).items():
        reached = [seconds for each in group if (seconds := each.time_to_target_seconds) is not None]
        if reached and (config not in fresh or 2 * len(reached) > len(group)):
            times[config] = reached
    one = times.get(ours) or ([recommended.median] if recommended else [])
    told = expected or {}
    for config in times.keys() - fresh.keys() - {ours}:
        if {ours, config} <= told.keys():
            times[config] = [seconds * math.exp(told[config] - told[ours]) for seconds in one]
    return times


def _point(trial: Trial, times: Sequence[float], world_size: int, step: _Step) -> ScalingPoint | None:
    """What a trial's configuration would come to on so many ranks; None where its batch cannot be split."""
    largest = step.largest(trial.variant)
    here = split(trial.batch_size, world_size, largest)
    if here is None:
        return None
    seconds, alone = step.seconds(*here, world_size), step.seconds(*split_batch(trial.batch_size, largest), 1)
    ratio, one = seconds / alone, median_interval(times)
    low, high = one.low * ratio * (1 - step.error), one.high * ratio * (1 + step.error)
    changes = {
        "world_size": world_size,
        "global_batch_size": trial.batch_size,
        "micro_batch_size": here[0],
        "gradient_accumulation_steps": here[1],
        "step_seconds": seconds,
        "time_to_target_seconds": Interval(median=one.median * ratio, low=low, high=high),
        "energy_to_target_joules": None,
        "is_estimate": True,
    }
    return ScalingPoint.model_validate(dict(trial) | changes)  # what else it trained with has the same names


def _devices(config: Config, opened: Opened) -> int:
    """Ranks to be timed where nobody says how many."""
    on_cpu, is_to_train = opened.device.startswith("cpu"), config.ranks.per_trial == "auto"
    if config.executor == "ray" or (on_cpu and not is_to_train):
        return 1
    here = processors() if on_cpu else opened.device_count
    return max(size for size in WORLD_SIZES if size <= here) if is_to_train else here  # a table of such numbers


def scale(
    study: TuneStudy, opened: Opened, probe: ProbeResult, found: Recommendation, earlier: Scaling | None
) -> Scaling | None:
    """Times as many ranks as the configuration asks for, unless an earlier start has; see `scaling`.

    None where only one is asked for, where runs trained on several already, or no time of one device is known.
    """
    config, observer = study.parts.plan.config, study.parts.observer
    count = config.world_size
    if config.ranks.of_each > 1:
        return None
    if count == "auto":
        count = _devices(config, opened)
    if count == 1:
        return None
    if not can_scale(found, probe):
        observer.note(
            "nothing is known of several ranks: no time to target, or steps too noisy for a fit of their time"
        )
        return None
    sizes = split(found.global_batch_size, count, probe.max_batch_size or 1)
    if sizes is None:
        observer.note(f"batch {found.global_batch_size} cannot be split among {count} ranks: none was timed")
        return None
    measured = earlier.measured if earlier else None
    if measured is None or (measured.world_size, measured.global_batch_size) != (count, found.global_batch_size):
        observer.stage(f"timing {count} ranks")
        kind = opened.device.partition(":")[0]
        settings = worker_settings(config).but(device=kind, metric=None)
        measured = time_group(settings, count, *sizes, found.precision, observer)
    expected = study.belief.expected() if study.parts.cost is SECONDS else None
    return scaling(study.compared(), found, probe, measured, expected) if measured else None
