"""What is believed before the study: what steps take, which batch sizes are worth trying, and which learning rate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchtune.document import NoiseScale, ProbeResult, RangeTest, ThroughputFit, ThroughputPoint
from batchtune.errors import UsageError
from batchtune.probe.timing.steps import StepLine, step_line
from batchtune.tune.optuna_parts.surface import OPEN_SPREAD, SurfacePrior
from batchtune.units import number
from batchtune.vocabulary import classes_in

Paces = Mapping[tuple[int, int], float]
"""Seconds of an optimizer step by how it is made up: micro-batch size and number of micro-batches."""
MAX_EVALUATION_BATCH = 1024  # samples in a forward pass of the default evaluation
_MOST_SPLITS = 4  # of a fixed global batch are timed
_TIMING_ERROR, _RUN_ERROR = 0.05, 0.05  # of a step's seconds at the least, as the probe timed it and as runs had it
_UNLIKE = 0.2  # by which steps of runs may differ from those that the probe timed, at one size and not at another
_OCTAVES_BEYOND_MEMORY = 2  # by accumulation: it saves no time a sample, but the surface may want larger batches
_NEAR = 1.25  # times as large, or less: as good as the same batch size
_MEASURED_SPREAD = 0.3  # of log B_sat at the least, since no step is just like a line
_BASELINE_SPREAD = 0.7  # decades between the baseline's learning rate, doubled, and the best
_MEASURED_RATE_SPREAD = 0.3  # …and between the share of the range test's rate and the best
_OPEN_EDGE_SPREAD = 0.6  # …where the edge lies beyond the rates searched
_UNKNOWN_SPREAD = 1.0
_SHARE = 1 / 2  # of the rate of least loss: the edge of stability is 2 / curvature, the fastest descent 1 / curvature
_ADAM_SHARE = 1 / 3
_ADAM_FAMILY = {"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Lion", "Adafactor", "RMSprop"}


def split_batch(batch_size: int, max_micro_batch_size: int) -> tuple[int, int]:
    """(micro-batch size, accumulation steps) with the fewest steps whose micro-batches fit and divide evenly."""
    for steps in range(math.ceil(batch_size / max_micro_batch_size), batch_size + 1):
        if batch_size % steps == 0:
            return batch_size // steps, steps
    return 1, batch_size


def splits_to_time(batch_size: int, probe: ProbeResult) -> list[int]:
    """The micro-batch sizes worth timing for a fixed global batch, largest first.

    The largest divisor that fits wins where a step's fixed time counts, a smaller one where caches do: so it is the
    largest, and those down to an octave below the size with the best measured throughput.
    """
    largest = min(probe.max_batch_size or 1, batch_size)
    fitting = [size for size in range(largest, 0, -1) if batch_size % size == 0]
    best = max(probe.throughput, key=lambda point: point.samples_per_second, default=None)
    if best is None:
        return fitting[:1]
    return fitting[:1] + [size for size in fitting[1:_MOST_SPLITS] if 2 * size >= best.batch_size]


def fastest_split(batch_size: int, timed: Sequence[ThroughputPoint], world_size: int = 1) -> tuple[int, str]:
    """The micro-batch size that trains a fixed global batch fastest, and why; of two within 1 % the larger.

    `timed` are whole optimizer steps of that batch, one point for each micro-batch size, as each rank has it.
    """
    ranks, each = f" on each of {world_size} ranks" if world_size > 1 else "", batch_size // world_size
    best = max(point.samples_per_second for point in timed)
    chosen = max(point.batch_size for point in timed if point.samples_per_second >= 0.99 * best)
    speeds = ", ".join(
        f"{number(point.samples_per_second, 4)} samples/s as {point.batch_size:,} × {each // point.batch_size}"
        for point in sorted(timed, key=lambda point: -point.samples_per_second)
    )
    return chosen, f"global batch {batch_size:,} is kept; measured {speeds}{ranks}"


def with_loading(probe: ProbeResult, loader_seconds: float | None, device: str) -> ProbeResult:
    """The probe with the step time of training on data that must be loaded: t(B) = alpha + beta * B with another beta.

    A CPU takes these seconds a sample and then trains; any other device works while the next batch is loaded.
    """
    fit = probe.throughput_fit
    if fit is None or not loader_seconds:
        return probe
    step = fit.beta_seconds_per_sample
    beta = step + loader_seconds if device.startswith("cpu") else max(step, loader_seconds)
    loaded = {"beta_seconds_per_sample": beta, "saturation_batch_size": fit.alpha_seconds / beta}
    return probe.model_copy(update={"throughput_fit": fit.model_copy(update=loaded)})


def as_one_device(probe: ProbeResult, world_size: int) -> ProbeResult:
    """The probe of a group of ranks as if they were one device: sizes and speeds are those of all ranks together."""
    if world_size == 1:
        return probe
    largest = probe.max_batch_size and probe.max_batch_size * world_size
    others = probe.other_variants and {name: size * world_size for name, size in probe.other_variants.items()}
    return rescaled(probe, world_size).model_copy(update={"max_batch_size": largest, "other_variants": others})


def rescaled(probe: ProbeResult, factor: int) -> ProbeResult:
    """The probe with its step times over batch sizes that are so many times as large, as another unit counts them."""
    fit = probe.throughput_fit
    if fit is not None:
        size, near = fit.saturation_batch_size, fit.batch_size_within_5_percent
        update = {
            "beta_seconds_per_sample": fit.beta_seconds_per_sample / factor,
            "saturation_batch_size": size and size * factor,
            "batch_size_within_5_percent": near and near * factor,
        }
        fit = fit.model_copy(update=update)
    points = [
        each.model_copy(
            update={"batch_size": each.batch_size * factor, "samples_per_second": each.samples_per_second * factor}
        )
        for each in probe.throughput
    ]
    return probe.model_copy(update={"throughput": points, "throughput_fit": fit})


def step_seconds(fit: ThroughputFit, batch_size: int) -> float:
    """The fitted time of a step, t(B) = alpha + beta * B."""
    return fit.alpha_seconds + fit.beta_seconds_per_sample * batch_size


def line_of(probe: ProbeResult, paces: Paces) -> StepLine | None:
    """The line of step times by what the probe timed, as slow as runs were against it, and by the runs themselves."""
    fit, timed = probe.throughput_fit, list[tuple[int, float, float]]()
    ran = [(micro, seconds / steps, _RUN_ERROR) for (micro, steps), seconds in paces.items()]
    if fit is not None:
        slower = statistics.median([seconds / step_seconds(fit, size) for size, seconds, _ in ran] or [1.0])
        error = max(_UNLIKE if ran else _TIMING_ERROR, fit.error_share or 0.0)
        for point in probe.throughput:  # the time to load is no part of what was timed, nor of its error
            loaded = step_seconds(fit, point.batch_size)
            timed.append((point.batch_size, slower * loaded, error * min(1.0, point.step_seconds / loaded)))
    return step_line(timed + ran)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The global batch sizes a study chooses from, and why these."""

    batch_sizes: tuple[int, ...]
    reason: str


def candidate_batch_sizes(
    probe: ProbeResult,
    *,
    minimum: int,
    maximum: int | None,
    baseline: int,
    multiple_of: int,
    data_size: int | None,
    accumulates: bool = True,
) -> Candidates:
    """Powers of two and their multiples from about a quarter of the saturation batch size up to what memory allows.

    Time to target is flat around its optimum (a factor of 2 off costs about 12 %), so octaves suffice; an end that the
    user has set is a candidate itself where no power of two is near, and so is the baseline's batch size where the
    user's bounds allow it.

    Raises:
        UsageError: no batch size is within the bounds.
    """
    largest, fit = probe.max_batch_size or 1, probe.throughput_fit
    saturation = None if fit is None or fit.holds is False else fit.saturation_batch_size
    high, why = _highest(probe, maximum, data_size, accumulates=accumulates)
    allowed = minimum <= baseline <= (maximum or baseline) and baseline % multiple_of == 0
    near = baseline if allowed else min(baseline, high // 2)
    quarter = int((saturation or 4) / 4)
    low = max(minimum, multiple_of, min(near, quarter))
    unit = multiple_of * math.ceil(low / largest)
    lowest, highest = -(-low // unit) * unit, high // multiple_of * multiple_of
    first, last = math.ceil(math.log2(max(low, 1))), math.floor(math.log2(max(high, 1)))
    regular = {max(lowest, 2**exponent // multiple_of * multiple_of) for exponent in range(first, last + 1)}
    ends = {lowest} if minimum > 1 and low == minimum else set()
    ends |= {_even(highest, largest, multiple_of)} if maximum is not None and high == maximum else set()
    regular |= {end for end in ends if all(max(end, size) >= _NEAR * min(end, size) for size in regular)}
    regular = {size for size in regular if lowest <= size <= highest}
    sizes = regular | ({baseline} if allowed and baseline <= (data_size or baseline) else set())
    least = -(-low // multiple_of) * multiple_of
    if not sizes and least > high:
        or_max = ", or set batch_size.max" if maximum is None and high != data_size else ""
        raise UsageError(f"batch_size.min {minimum} leaves no batch size to search: {least} > {why}; lower it{or_max}")
    sizes = sizes or {least}
    start = f"a quarter of the saturation batch size {saturation:.0f}" if saturation and low == quarter else f"{low}"
    start = f"your minimum {low}" if 1 < low == minimum else start
    are_powers = all(size.bit_count() == 1 for size in sizes - {baseline})
    what = "powers of two" if are_powers else "sizes about an octave apart"
    ours = f"; the baseline's {baseline} is outside of your bounds and only measured"
    ours = f", and the baseline's {baseline}" if allowed else ours
    return Candidates(tuple(sorted(sizes)), f"{what} from about {start} to {why}{ours}")


def _highest(probe: ProbeResult, maximum: int | None, data_size: int | None, *, accumulates: bool) -> tuple[int, str]:
    """As far up as candidates go, and why no further."""
    largest = probe.max_batch_size or 1
    if maximum is not None:
        high, why = maximum, f"your maximum {maximum}"
    elif probe.limited_by == "memory" and accumulates:
        high = largest * 2**_OCTAVES_BEYOND_MEMORY
        why = f"{2**_OCTAVES_BEYOND_MEMORY} accumulated micro-batches of {largest}, the most that memory holds"
    else:
        high, why = largest, f"{largest}, the largest that trains ({probe.limited_by or 'no limit met'})"
    if not accumulates and high > largest:
        high, why = largest, f"{largest}, the largest that trains; this task cannot accumulate micro-batches"
    if data_size is not None and high > data_size:
        high, why = data_size, f"the data set's {data_size:,} samples"
    return high, why


def _even(batch_size: int, largest: int, multiple_of: int) -> int:
    """The batch size, or what little less can be made up of as few micro-batches of equal size as fit."""
    steps = math.ceil(batch_size / largest)
    return batch_size // (steps * multiple_of) * steps * multiple_of


def nearest(batch_size: float, batch_sizes: Sequence[int]) -> int:
    """The batch size that is the fewest octaves away."""
    return min(batch_sizes, key=lambda size: abs(math.log(size / batch_size)))


def start_batch_size(probe: ProbeResult, batch_sizes: Sequence[int], noise: NoiseScale | None) -> int:
    """The batch size at which the least time is expected before anything has run.

    What a step of one that must be accumulated takes is not known, so the largest micro-batch that trains is as far as
    it goes, if there are others. The noise scale stands for the critical batch size (McCandlish et al. 2018).
    """
    belief = surface_prior(probe, batch_size=1, rate=1.0, spread_decades=1.0, noise=noise)
    fitting = [size for size in batch_sizes if size <= (probe.max_batch_size or size)] or list(batch_sizes)

    def cost(size: int) -> float:
        return (1 + belief.saturation_batch_size / size) * (1 + size / belief.critical_batch_size)

    return min(fitting, key=cost)


def surface_prior(
    probe: ProbeResult,
    *,
    batch_size: int,
    rate: float,
    spread_decades: float,
    noise: NoiseScale | None = None,
    paces: Paces | None = None,
) -> SurfacePrior:
    """The response surface's prior: the measured step time and noise scale, and the belief about the rate at a size.

    Step times are those of the probe, and of runs where `paces` has some. They are believed as far as their residuals
    allow.
    """
    measured = dict[str, float]()
    if noise is not None and noise.samples:
        measured["critical_batch_size"] = noise.samples
    if (line := line_of(probe, paces or {})) is not None:
        measured["saturation_batch_size"] = line.saturation_batch_size
        measured["saturation_spread"] = min(math.hypot(_MEASURED_SPREAD, line.spread), OPEN_SPREAD)
    return SurfacePrior(batch_size, rate, spread_decades, **measured)


def rate_belief(
    *, optimizer: str, baseline_rate: float, batch_size: int, range_test: RangeTest | None = None
) -> tuple[float, float, str]:
    """The learning rate believed best at a batch size, how sure that is, and why.

    A range test of this size counts: the rate at which the loss was least lies a little below the edge of stability,
    and half of it is close to the best for SGD, a third for the Adam family. Where there is none, there is the
    baseline's only, which is more often too low than too high, since a rate that is too high is noticed. A test that
    met no edge is weighed with that for the Adam family, whose steps do not grow with the gradient: what is a good rate
    differs less between tasks than SGD's, which goes by the curvature. For other optimizers there is no such rule, and
    the belief is wide.

    All this is known of one loss that goes down. Where optimizers train on losses of their own, each may rise because
    another's network learns, or be least where that one has collapsed. So their test is a weak hint, whatever came of
    it, and today's rate counts for more.

    Returns:
        The rate, the standard deviation in decades, and the sentence why.
    """
    classes = classes_in(optimizer)
    is_sgd = classes == {"SGD"}
    known = is_sgd or classes <= _ADAM_FAMILY
    lowest = range_test.lowest_loss_learning_rate if range_test else None
    if range_test is None or lowest is None:
        why = f"today's {baseline_rate:g} is more often too low than too high"
        spread = _BASELINE_SPREAD if known else _UNKNOWN_SPREAD
        return 2 * baseline_rate, spread, why if known else f"{why}; nothing more is known about {optimizer}"
    edge, highest = range_test.edge_learning_rate, range_test.highest_learning_rate
    came = f"diverged at {edge:.2g}" if edge else f"was stable up to {highest:.2g}"
    share, part = (_SHARE, "half") if is_sgd else (_ADAM_SHARE, "a third")
    several = range_test.losses > 1
    what = f"one of {range_test.losses} losses" if several else "loss"
    why = f"in the range test at batch {batch_size:,} {what} was least at {lowest:.2g}"
    why += f" and training {came}; {part} of that"
    if several:
        rate, spread = _weighed(lowest * share, _UNKNOWN_SPREAD, baseline_rate)
        why = f"{why}, weighed with twice today's {baseline_rate:g}"
        return rate, spread, f"{why}, as losses with an optimizer each tell little of a rate that is good for all"
    if not known:
        return lowest * share, _UNKNOWN_SPREAD, f"{why}, with little known about {optimizer}"
    why = f"{why} is the usual best of {optimizer}"
    spread = _MEASURED_RATE_SPREAD if edge else _OPEN_EDGE_SPREAD
    if edge or is_sgd:
        return lowest * share, spread, why
    rate, spread = _weighed(lowest * share, spread, baseline_rate)
    return rate, spread, f"{why}; weighed with twice today's {baseline_rate:g}, as no edge was met"


def _weighed(rate: float, spread: float, baseline_rate: float) -> tuple[float, float]:
    """What a test tells and its spread in decades, and today's rate, as two normal beliefs multiply."""
    weight = _BASELINE_SPREAD**2 / (_BASELINE_SPREAD**2 + spread**2)
    return rate**weight * (2 * baseline_rate) ** (1 - weight), spread * math.sqrt(weight)
