"""What of range test and noise scale a study has time for, by the probe's step times."""

from __future__ import annotations

import math

from batchtune.document import ProbeResult
from batchtune.tune.plan.prior import step_seconds

PRIOR_SHARE = 0.1  # of budget.total, and no more than one run: what range test and noise scale may take together
STEPS_PER_DECADE, FEWEST_STEPS = 14, 20  # of a range test
LARGE_FACTOR, LEAST_FACTOR = 8, 4  # between the two batch sizes of the noise scale
WARM_UP_STEPS, DRAWS, SMALL_PER_LARGE = 40, 4, 4  # of the noise scale
FORWARD_SHARE = 0.9  # of a step: the noise scale takes gradients and no optimizer step


def affordable_noise_scale(
    batch_size: int, probe: ProbeResult, seconds: float, *, ranks_apart: bool = False
) -> tuple[int, int, int, float] | str:
    """The two batch sizes, the draws and the seconds of a noise scale that stays within so many, or why there is none.

    The smaller size is the baseline's `batch_size`, or what of it fits. Where the gradients of several ranks are seen
    apart, it is for warming up alone: a pass of the larger one tells what a rank's share of it does, too.
    """
    fit, largest = probe.throughput_fit, probe.max_batch_size or 1
    if fit is None:
        return "no noise scale, since steps were not timed"
    small = min(batch_size, largest)
    large = min(LARGE_FACTOR * small, largest)
    warm_up = WARM_UP_STEPS * step_seconds(fit, small)
    if ranks_apart:
        draws = math.ceil(DRAWS * (SMALL_PER_LARGE * small / large + 1))  # of as many samples as below
        needed = warm_up + draws * step_seconds(fit, large) * FORWARD_SHARE
        told = f"a noise scale of the ranks' gradients at batch {large:,}"
        return _too_long(told, needed, seconds) or (small, large, draws, needed)
    if large < LEAST_FACTOR * small:
        return f"no noise scale, since {largest}, the largest batch to train at once, is not {LEAST_FACTOR} of today's"
    gradients = DRAWS * (SMALL_PER_LARGE * step_seconds(fit, small) + step_seconds(fit, large)) * FORWARD_SHARE
    needed = warm_up + gradients
    return _too_long(f"a noise scale at batch {small:,} and {large:,}", needed, seconds) or (
        small,
        large,
        DRAWS,
        needed,
    )


def affordable_range_test(batch_size: int, rates: tuple[float, float], probe: ProbeResult, seconds: float) -> int | str:
    """The steps of a range test at a batch size that stays within so many seconds, or why there is none.

    It starts at the baseline's learning rate, with which training is known to go well: below it there is nothing to
    find; or at the user's least rate, where that is higher.
    """
    fit, largest = probe.throughput_fit, probe.max_batch_size or 1
    if rates[0] > rates[1]:
        return f"no range test, since today's {rates[0]:g} is above {rates[1]:g}, the largest to search"
    if fit is None:
        return "no range test, since steps were not timed"
    if batch_size > largest:
        return f"no range test, since batch {batch_size:,} must be accumulated"
    steps = max(FEWEST_STEPS, math.ceil(STEPS_PER_DECADE * math.log10(rates[1] / rates[0])))
    what = f"{steps} steps of a range test at batch {batch_size:,}"
    return _too_long(what, steps * step_seconds(fit, batch_size), seconds) or steps


def _too_long(what: str, needed: float, seconds: float) -> str | None:
    if needed <= seconds:
        return None
    share = f"one run, or {PRIOR_SHARE:.0%} of budget.total, is for all of it"
    return f"no more was measured: {what} would take about {needed:.2g} s, and {share}"
