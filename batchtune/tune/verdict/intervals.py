"""How sure a median over a few seeds is: its bootstrap interval, and that of the ratio or difference of two."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Sequence

from batchtune.document import Interval

CONFIDENCE = 0.9
_RESAMPLES = 4000
_MAX_ENUMERATED = 5**5


def median_interval(values: Sequence[float]) -> Interval:
    """The median of a few runs with its bootstrap interval."""
    return _interval(statistics.median(values), [statistics.median(each) for each in _resamples(values)])


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """The ratio of two medians with its bootstrap interval over both."""
    return _compared(numerators, denominators, lambda above, below: above / below)


def difference_interval(values: Sequence[float], others: Sequence[float]) -> Interval:
    """By how much one median exceeds another, with its bootstrap interval over both."""
    return _compared(values, others, lambda value, other: value - other)


def _compared(values: Sequence[float], others: Sequence[float], compare: Callable[[float, float], float]) -> Interval:
    left = [statistics.median(each) for each in _resamples(values)]
    right = [statistics.median(each) for each in _resamples(others)]
    generator = random.Random(0)
    pairs = (
        list(itertools.product(left, right))
        if len(left) * len(right) <= _MAX_ENUMERATED
        else [(generator.choice(left), generator.choice(right)) for _ in range(_RESAMPLES)]
    )
    return _interval(compare(statistics.median(values), statistics.median(others)), [compare(*pair) for pair in pairs])


def _resamples(values: Sequence[float]) -> list[tuple[float, ...]]:
    """Every resample where they can be counted out, else a fixed number drawn with a fixed seed."""
    if len(values) ** len(values) <= _MAX_ENUMERATED:
        return list(itertools.product(values, repeat=len(values)))
    generator = random.Random(0)
    return [tuple(generator.choices(values, k=len(values))) for _ in range(_RESAMPLES)]


def _interval(median: float, resampled: list[float]) -> Interval:
    ordered = sorted(resampled)
    cut = int((1 - CONFIDENCE) / 2 * len(ordered))
    return Interval(median=median, low=min(median, ordered[cut]), high=max(median, ordered[-1 - cut]))
