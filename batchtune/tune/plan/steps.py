"""How a batch is made up of micro-batches, and what an optimizer step of it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from batchtune.document import ProbeResult, ThroughputFit, ThroughputPoint

_MOST_SPLITS = 4  # of a fixed global batch are timed


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


def fastest_split(batch_size: int, timed: Sequence[ThroughputPoint]) -> tuple[int, str]:
    """The micro-batch size that trains a fixed global batch fastest, and why; of two within 1 % the larger.

    Args:
        batch_size: the global batch size.
        timed: whole optimizer steps of it, one point for each micro-batch size; samples a second are what counts.
    """
    best = max(point.samples_per_second for point in timed)
    chosen = max(
        (point for point in timed if point.samples_per_second >= 0.99 * best), key=lambda point: point.batch_size
    )
    speeds = ", ".join(
        f"{point.samples_per_second:.4g} samples/s as {point.batch_size} x {batch_size // point.batch_size}"
        for point in sorted(timed, key=lambda point: -point.samples_per_second)
    )
    reason = f"global batch {batch_size} is kept; measured {speeds}"
    return chosen.batch_size, reason


def with_loading(probe: ProbeResult, loader_seconds: float | None, device: str) -> ProbeResult:
    """The probe with the step time of training on data that must be loaded: t(B) = alpha + beta * B with another beta.

    Args:
        probe: whose steps were timed on a batch that was there.
        loader_seconds: to load a sample in the process that trains; None: not known.
        device: of the training: a CPU loads and then trains, any other works while the next batch is loaded.
    """
    fit = probe.throughput_fit
    if fit is None or not loader_seconds:
        return probe
    step = fit.beta_seconds_per_sample
    beta = step + loader_seconds if device.startswith("cpu") else max(step, loader_seconds)
    loaded = {"beta_seconds_per_sample": beta, "saturation_batch_size": fit.alpha_seconds / beta}
    return probe.model_copy(update={"throughput_fit": fit.model_copy(update=loaded)})


def step_seconds(fit: ThroughputFit, batch_size: int) -> float:
    """The fitted time of a step, t(B) = alpha + beta * B."""
    return fit.alpha_seconds + fit.beta_seconds_per_sample * batch_size
