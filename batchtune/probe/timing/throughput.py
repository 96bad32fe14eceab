"""The throughput curve: which sizes to time, and the step-time line t(B) = alpha + beta * B through them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from batchtune.document import ThroughputFit, ThroughputPoint

MAX_POINTS = 8
SECONDS_PER_POINT = 1.0
_APART = 1.1  # sizes that are nearer than this tell the same
_NEAR_PEAK = 0.95
_SAME_FLOPS = 0.001


def sizes_to_time(maximum: int, *, minimum: int = 1, multiple_of: int = 1) -> list[int]:
    """The largest size and the powers of two (times `multiple_of`) well below it, at most `MAX_POINTS`, ascending."""
    powers = [multiple_of * 2**power for power in range(maximum.bit_length())]
    return [*[size for size in powers if minimum <= size <= maximum / _APART][1 - MAX_POINTS :], maximum]


def fit_step_time(points: Sequence[ThroughputPoint]) -> ThroughputFit | None:
    """Fits t(B) = alpha + beta * B with equal relative errors; alpha and beta are not negative.

    The saturation batch size alpha / beta is where half of the peak throughput 1 / beta is reached.

    Returns:
        None for fewer than two sizes: no line goes through one point. Steps that took no time were not timed.
    """
    points = [point for point in points if point.step_seconds > 0]
    if len({point.batch_size for point in points}) < 2:  # noqa: PLR2004
        return None
    # weights 1 / t^2: a relative error counts the same at every size
    rows = [(point.batch_size, point.step_seconds, point.step_seconds**-2) for point in points]
    total = sum(w for _, _, w in rows)
    mean_size = sum(w * b for b, _, w in rows) / total
    mean_time = sum(w * t for _, t, w in rows) / total
    spread = sum(w * (b - mean_size) ** 2 for b, _, w in rows)
    beta = sum(w * (b - mean_size) * (t - mean_time) for b, t, w in rows) / spread
    alpha = mean_time - beta * mean_size
    if alpha < 0:  # pure cost per sample
        alpha, beta = 0.0, sum(w * b * t for b, t, w in rows) / sum(w * b * b for b, _, w in rows)
    elif beta < 0:  # the step costs the same at every size timed
        alpha, beta = mean_time, 0.0
    squares = sum((alpha / t + beta * b / t - 1) ** 2 for b, t, _ in rows)
    free = len(rows) - (alpha > 0) - (beta > 0)  # sizes beyond those that any such line goes through
    best = max(point.samples_per_second for point in points)
    near = [point.batch_size for point in points if point.samples_per_second >= _NEAR_PEAK * best]
    return ThroughputFit(
        alpha_seconds=alpha,
        beta_seconds_per_sample=beta,
        error_share=math.sqrt(squares / free) if len(rows) > 2 else None,  # noqa: PLR2004
        saturation_batch_size=alpha / beta if beta > 0 else None,
        batch_size_within_5_percent=min(near),
    )


def with_flops(
    points: Sequence[ThroughputPoint], count: Callable[[int], float | None], peak: float | None
) -> list[ThroughputPoint]:
    """The points with the FLOPs of a sample at their size, and the share of the device's peak they are.

    Two neighbouring sizes with the same FLOPs a sample stand for all larger ones.

    Args:
        points: by size, ascending.
        count: FLOPs of a sample at a batch size; None where they cannot be counted.
        peak: the device's peak FLOP/s at the precision of the points; None where it is not known.
    """
    found: list[ThroughputPoint] = []
    settled, before = False, None
    for point in points:
        flops = before if settled else count(point.batch_size)
        if flops is None:
            return [*found, *points[len(found) :]]
        settled = settled or (before is not None and abs(flops - before) <= _SAME_FLOPS * before)
        before = flops
        mfu = flops * point.samples_per_second / peak if peak else None
        found.append(point.model_copy(update={"flops_per_sample": flops, "mfu": mfu}))
    return found
