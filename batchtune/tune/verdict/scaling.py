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

from batchtune.document import DataParallel, Interval, ProbeResult, Recommendation, Scaling, ScalingPoint, Trial
from batchtune.tune.objective.records import FAILED_FOR_GOOD
from batchtune.tune.plan.steps import split_batch
from batchtune.tune.verdict.intervals import median_interval
from batchtune.tune.verdict.recommend import TIED, Configuration, Expected, config_of

WORLD_SIZES = (1, 2, 4, 8)


def split(batch_size: int, world_size: int, largest: int) -> tuple[int, int] | None:
    """Micro-batch and accumulation steps of each rank at a global batch size.

    Args:
        batch_size: of all ranks and accumulation steps together.
        world_size: number of ranks.
        largest: micro-batch that fits.

    Returns:
        Those with the fewest steps; None where the batch does not divide.
    """
    each, rest = divmod(batch_size, world_size)
    if rest or not each:
        return None
    return split_batch(each, largest)


def can_scale(found: Recommendation, probe: ProbeResult) -> bool:
    """Whether the time of one device is known: a bound, of runs that were cut off, is none."""
    timed = found.time_to_target_seconds is not None and not found.time_to_target_seconds.at_least
    return timed and probe.throughput_fit is not None and bool(probe.max_batch_size)


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

    Args:
        trials: of the study.
        found: the recommendation for one device.
        probe: with the fitted step time and the largest micro-batch of one device.
        measured: a group of ranks that ran.
        expected: see `recommend`; None: each run counts as it was.

    Returns:
        None where no time to target is known, or steps were not timed.
    """
    if not can_scale(found, probe):
        return None
    times = _times(trials, found, expected)
    step = _Step(probe, measured)
    points = []
    for world_size in WORLD_SIZES:
        options = [each for config in times if (each := _point(config, times[config], world_size, step)) is not None]
        ours = next((each for each in options if _is(each, found)), None)
        best = min(options, key=lambda each: each.time_to_target_seconds.median, default=None)
        if world_size == 1:
            points += [_as_recommended(found, step)]
        elif best is not None:
            is_better = ours is None or best.time_to_target_seconds.median * TIED < ours.time_to_target_seconds.median
            points += [best if is_better else ours or best]
    return Scaling(measured=measured, points=points)


class _Step:
    """Seconds of an optimizer step on any number of ranks.

    Attributes:
        error: relative; the worst of the fitted step time where it was measured, too.
    """

    def __init__(self, probe: ProbeResult, measured: DataParallel) -> None:
        assert probe.throughput_fit is not None  # noqa: S101 - the caller looked
        self.largest = probe.max_batch_size or 1
        self._fit, self._measured = probe.throughput_fit, measured
        apart, alone = measured.step_seconds_without_communication, measured.step_seconds_alone
        slower = max(0.0, apart / alone - 1) if apart and alone else 0.0
        self._slower_each = slower / (measured.world_size - 1)
        errors = [abs(self._micro(point.batch_size) / point.step_seconds - 1) for point in probe.throughput]
        self.error = max(errors, default=0.0)

    def _micro(self, batch_size: int) -> float:
        return self._fit.alpha_seconds + self._fit.beta_seconds_per_sample * batch_size

    def seconds(self, micro_batch_size: int, accumulation_steps: int, world_size: int) -> float:
        """Of one optimizer step."""
        computing = accumulation_steps * self._micro(micro_batch_size) * (1 + self._slower_each * (world_size - 1))
        return computing + self._communication(world_size)

    def _communication(self, world_size: int) -> float:
        ran = self._measured.world_size
        share = ((world_size - 1) / world_size) / ((ran - 1) / ran)
        return (self._measured.communication_seconds or 0.0) * share


def _times(
    trials: Sequence[Trial], found: Recommendation, expected: Expected | None
) -> dict[Configuration, list[float]]:
    """Seconds to the target of each configuration that may be named.

    Those of fresh seeds where it ran on such, unless it came to nothing on half of them; else the recommended one's
    times in the proportion in which all runs together expect the two.
    """
    ended: dict[str, dict[Configuration, list[float | None]]] = {"confirm": {}, "search": {}}
    for trial in trials:
        counts = trial.state in {"complete", "pruned"} or trial.outcome in FAILED_FOR_GOOD
        if counts:
            role = "confirm" if trial.role == "confirm" else "search"
            ended[role].setdefault(config_of(trial), []).append(trial.time_to_target_seconds)
    arguments = tuple(sorted(found.optimizer_arguments.items()))
    ours = found.global_batch_size, found.learning_rate or 0.0, found.precision, arguments, found.gradient_clipping
    times: dict[Configuration, list[float]] = {}
    for config, each in (ended["search"] | ended["confirm"]).items():
        reached = [seconds for seconds in each if seconds is not None]
        if reached and (config not in ended["confirm"] or 2 * len(reached) > len(each)):
            times[config] = reached
    one = times.get(ours) or ([found.time_to_target_seconds.median] if found.time_to_target_seconds else [])
    told = expected or {}
    for config in times.keys() - ended["confirm"].keys() - {ours}:
        if {ours, config} <= told.keys():
            times[config] = [seconds * math.exp(told[config] - told[ours]) for seconds in one]
    return times


def _point(config: Configuration, times: Sequence[float], world_size: int, step: _Step) -> ScalingPoint | None:
    batch_size, rate, precision, arguments, clipping = config
    alone, here = split(batch_size, 1, step.largest), split(batch_size, world_size, step.largest)
    if alone is None or here is None:
        return None
    seconds = step.seconds(*here, world_size)
    ratio, one = seconds / step.seconds(*alone, 1), median_interval(times)
    return ScalingPoint(
        world_size=world_size,
        global_batch_size=batch_size,
        micro_batch_size=here[0],
        gradient_accumulation_steps=here[1],
        learning_rate=rate,
        precision=precision,
        optimizer_arguments=dict(arguments),
        gradient_clipping=clipping,
        step_seconds=seconds,
        time_to_target_seconds=Interval(
            median=one.median * ratio,
            low=one.low * ratio * (1 - step.error),
            high=one.high * ratio * (1 + step.error),
        ),
        is_estimate=True,
    )


def _is(point: ScalingPoint, found: Recommendation) -> bool:
    """Whether it is the recommended configuration."""
    names = ("global_batch_size", "learning_rate", "precision", "optimizer_arguments", "gradient_clipping")
    return all(getattr(point, name) == getattr(found, name) for name in names)


def _as_recommended(found: Recommendation, step: _Step) -> ScalingPoint:
    """The recommendation, which ran, on the one rank that it ran on."""
    micro, accumulation = found.micro_batch_size, found.gradient_accumulation_steps
    assert found.time_to_target_seconds is not None  # noqa: S101 - the caller looked
    return ScalingPoint(
        world_size=1,
        global_batch_size=found.global_batch_size,
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        learning_rate=found.learning_rate,
        precision=found.precision,
        optimizer_arguments=found.optimizer_arguments,
        gradient_clipping=found.gradient_clipping,
        step_seconds=step.seconds(micro, accumulation, 1),
        time_to_target_seconds=found.time_to_target_seconds,
        is_estimate=False,
    )
