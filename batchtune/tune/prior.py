"""What is believed before the study: which batch sizes are worth trying, and which learning rate at which of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from batchtune.results import ProbeResult
from batchtune.tune.surface import Prior

_OCTAVES_BEYOND_MEMORY = 2  # by accumulation: it saves no time a sample, but the surface may want larger batches
_LEAST_SATURATION = 0.1  # samples; a step without any fixed time is measurement error
_MEASURED_SPREAD = 0.3  # of log B_sat: training also loads data, which the timed steps did not
_ADAM_FAMILY = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Lion", "Adafactor", "RMSprop")


@dataclass(frozen=True, slots=True)
class Candidates:
    """The global batch sizes a study chooses from, and why these."""

    batch_sizes: tuple[int, ...]
    reason: str


def split_batch(batch_size: int, max_micro_batch_size: int) -> tuple[int, int]:
    """(micro-batch size, accumulation steps) with the fewest steps whose micro-batches fit and divide evenly."""
    for steps in range(math.ceil(batch_size / max_micro_batch_size), batch_size + 1):
        if batch_size % steps == 0:
            return batch_size // steps, steps
    return 1, batch_size


def candidate_batch_sizes(
    probe: ProbeResult, *, minimum: int, maximum: int | None, baseline: int, multiple_of: int, data_size: int | None
) -> Candidates:
    """Powers of two and their multiples from about a quarter of the saturation batch size up to what memory allows.

    Time to target is flat around its optimum (a factor of 2 off costs about 12 %), so octaves suffice.

    Args:
        probe: the largest micro-batch and the step-time fit.
        minimum: the user's smallest batch.
        maximum: the user's largest batch; None for none.
        baseline: the batch size run today; always among the candidates.
        multiple_of: only multiples are taken.
        data_size: samples in the training set.
    """
    largest = probe.max_batch_size or 1
    saturation = probe.throughput_fit.saturation_batch_size if probe.throughput_fit else None
    low = max(minimum, multiple_of, min(baseline, int((saturation or 4) / 4)))
    if maximum is not None:
        high, why = maximum, f"your maximum {maximum}"
    elif probe.limited_by == "memory":
        high = largest * 2**_OCTAVES_BEYOND_MEMORY
        why = f"{2**_OCTAVES_BEYOND_MEMORY} accumulated micro-batches of {largest}, the most that memory holds"
    else:
        high, why = largest, f"{largest}, the largest that trains ({probe.limited_by or 'no limit met'})"
    if data_size is not None and high > data_size:
        high, why = data_size, f"the data set's {data_size} samples"
    sizes = {baseline} if baseline <= (data_size or baseline) else set()
    power = 2 ** math.ceil(math.log2(max(low, 1)))
    while power <= high:
        micro, steps = split_batch(max(multiple_of, power // multiple_of * multiple_of), largest)
        sizes.add(micro * steps)
        power *= 2
    start = f"a quarter of the saturation batch size {saturation:.0f}" if saturation else f"{low}"
    reason = f"powers of two from about {start} to {why}, and the baseline's {baseline}"
    return Candidates(tuple(sorted(sizes)), reason)


def surface_prior(probe: ProbeResult, *, optimizer: str, baseline_batch_size: int, baseline_rate: float) -> Prior:
    """The response surface's prior: measured step time, and the user's learning rate as a hint at their batch size.

    Baselines are more often too low than too high, since a rate that is too high is noticed, so the middle lies a
    little above. Of other optimizers than the SGD and Adam families less is assumed.
    """
    saturation = probe.throughput_fit.saturation_batch_size if probe.throughput_fit else None
    known = optimizer == "SGD" or optimizer in _ADAM_FAMILY
    return Prior(
        saturation_batch_size=max(saturation, _LEAST_SATURATION) if saturation is not None else 45.0,
        saturation_spread=_MEASURED_SPREAD if saturation is not None else 1.2,
        anchor_batch_size=baseline_batch_size,
        anchor_learning_rate=baseline_rate * 2,
        spread=0.7 if known else 1.0,
    )
