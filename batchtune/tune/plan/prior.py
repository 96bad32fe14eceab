"""What is believed before the study: which batch sizes are worth trying, and which learning rate at which of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from batchtune.document import NoiseScale, ProbeResult, RangeTest
from batchtune.errors import UsageError
from batchtune.tune.optuna_parts.surface import SurfacePrior

_OCTAVES_BEYOND_MEMORY = 2  # by accumulation: it saves no time a sample, but the surface may want larger batches
_NEAR = 1.25  # times as large, or less: as good as the same batch size
_LEAST_SATURATION = 0.1  # samples; a step without any fixed time is measurement error
_MEASURED_SPREAD = 0.3  # of log B_sat: runs are not just like timed steps and loading
_TODAY_SPREAD = 0.7  # decades between today's learning rate, doubled, and the best
_MEASURED_RATE_SPREAD = 0.3  # …and between the share of the range test's rate and the best
_OPEN_EDGE_SPREAD = 0.6  # …where the edge lies beyond the rates searched
_UNKNOWN_SPREAD = 1.0
_SHARE = 1 / 2  # of the rate of least loss: the edge of stability is 2 / curvature, the fastest descent 1 / curvature
_ADAM_SHARE = 1 / 3
_ADAM_FAMILY = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Lion", "Adafactor", "RMSprop")


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
    user has set is a candidate itself where no power of two is near.

    Args:
        probe: the largest micro-batch and the step-time fit.
        minimum: the user's smallest batch.
        maximum: the user's largest batch; None for none.
        baseline: the batch size run today; a candidate where the user's bounds allow it.
        multiple_of: only multiples are taken.
        data_size: samples in the training set.
        accumulates: whether a batch may be made of several micro-batches.

    Raises:
        UsageError: no batch size is within the bounds.
    """
    largest, saturation = probe.max_batch_size or 1, _saturation(probe)
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
        high, why = data_size, f"the data set's {data_size} samples"
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
    what = (
        "powers of two" if all(size.bit_count() == 1 for size in sizes - {baseline}) else "sizes about an octave apart"
    )
    today = ", and the baseline's {}" if allowed else "; the baseline's {} is outside of your bounds and only measured"
    return Candidates(tuple(sorted(sizes)), f"{what} from about {start} to {why}{today.format(baseline)}")


def _even(batch_size: int, largest: int, multiple_of: int) -> int:
    """The batch size, or what little less can be made up of as few micro-batches of equal size as fit."""
    steps = math.ceil(batch_size / largest)
    return batch_size // (steps * multiple_of) * steps * multiple_of


def start_batch_size(probe: ProbeResult, batch_sizes: Sequence[int], noise: NoiseScale | None) -> int:
    """The batch size at which the least time is expected before anything has run.

    Args:
        probe: the step time alpha + beta * B, as far as it is known.
        batch_sizes: to choose from; what a step of one that must be accumulated takes is not known, so the largest
            micro-batch that trains is as far as it goes, if there are others.
        noise: the gradient noise scale, which stands for the critical batch size (McCandlish et al. 2018).
    """
    belief = surface_prior(probe, batch_size=1, rate=1.0, spread_decades=1.0, noise=noise)
    fitting = [size for size in batch_sizes if size <= (probe.max_batch_size or size)] or list(batch_sizes)
    return min(
        fitting, key=lambda size: (1 + belief.saturation_batch_size / size) * (1 + size / belief.critical_batch_size)
    )


def rate_belief(
    *, optimizer: str, rate_today: float, batch_size: int, range_test: RangeTest | None = None
) -> tuple[float, float, str]:
    """The learning rate believed best at a batch size, how sure that is, and why.

    A range test of this size counts: the rate at which the loss was least lies a little below the edge of stability,
    and half of it is close to the best for SGD, a third for the Adam family. Where there is none, there is today's
    rate only, which is more often too low than too high, since a rate that is too high is noticed. For other
    optimizers there is no such rule, and the belief is wide.

    Returns:
        The rate, the standard deviation in decades, and the sentence why.
    """
    known = optimizer == "SGD" or optimizer in _ADAM_FAMILY
    lowest = range_test.lowest_loss_learning_rate if range_test else None
    if range_test is None or lowest is None:
        why = f"today's {rate_today:g} is more often too low than too high"
        spread = _TODAY_SPREAD if known else _UNKNOWN_SPREAD
        return 2 * rate_today, spread, why if known else f"{why}; nothing more is known about {optimizer}"
    edge, highest = range_test.edge_learning_rate, range_test.highest_learning_rate
    came = f"diverged at {edge:.2g}" if edge else f"was stable up to {highest:.2g}"
    share, part = (_SHARE, "half") if optimizer == "SGD" else (_ADAM_SHARE, "a third")
    why = f"in the range test at batch {batch_size} loss was least at {lowest:.2g} and training {came}; {part} of that"
    if not known:
        return lowest * share, _UNKNOWN_SPREAD, f"{why}, with little known about {optimizer}"
    spread = _MEASURED_RATE_SPREAD if edge else _OPEN_EDGE_SPREAD
    return lowest * share, spread, f"{why} is the usual best of {optimizer}"


def surface_prior(
    probe: ProbeResult, *, batch_size: int, rate: float, spread_decades: float, noise: NoiseScale | None = None
) -> SurfacePrior:
    """The response surface's prior: the measured step time and noise scale, and the belief about the rate at a size."""
    saturation = _saturation(probe)
    critical = {} if noise is None or not noise.samples else {"critical_batch_size": noise.samples}
    return SurfacePrior(
        saturation_batch_size=max(saturation, _LEAST_SATURATION) if saturation is not None else 45.0,
        saturation_spread=_MEASURED_SPREAD if saturation is not None else 1.2,
        anchor_batch_size=batch_size,
        anchor_learning_rate=rate,
        spread=spread_decades,
        **critical,
    )


def _saturation(probe: ProbeResult) -> float | None:
    """The saturation batch size, where step times are known well enough to tell it."""
    fit = probe.throughput_fit
    return None if fit is None or fit.holds is False else fit.saturation_batch_size
