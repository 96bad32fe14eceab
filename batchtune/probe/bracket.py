"""Between which sizes the end lies, by the attempts so far: the largest that fits, and what failed above it.

A task may take only some sizes, such as divisors of a queue's: it rejects one and trains at a larger one. The search
then goes on by powers of two, and a rejected size that is none says nothing of the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchtune.document import Attempt


def bracket(attempts: Sequence[Attempt]) -> tuple[int, int | None]:
    """Largest fit (0: none) and smallest failure above it (None: none); the last attempt at a size counts."""
    last = {attempt.batch_size: attempt.fits for attempt in attempts}
    low = max((size for size, fits in last.items() if fits), default=0)
    return low, next((attempt.batch_size for attempt in failures_above(low, attempts)), None)


def failures_above(size: int, attempts: Sequence[Attempt]) -> list[Attempt]:
    """Those at larger sizes, the smallest first; the last attempt at a size counts."""
    last = {attempt.batch_size: attempt for attempt in attempts}
    return [last[each] for each in sorted(last) if each > size and not last[each].fits]


def was_out_of_memory(size: int | None, attempts: Sequence[Attempt]) -> bool:
    """Whether any attempt at a size was."""
    return any(each.batch_size == size and each.outcome == "oom" for each in attempts)


def takes_some_sizes(attempts: Sequence[Attempt]) -> bool:
    """Whether the task rejected a size between two that trained: it takes some only, such as divisors of a queue's."""
    fits = [attempt.batch_size for attempt in attempts if attempt.fits]
    rejected = [attempt.batch_size for attempt in attempts if attempt.outcome == "user_error"]
    return any(min(fits) < size < max(fits) for size in rejected) if fits else False


def least_above(low: int, attempts: Sequence[Attempt], unit: int) -> int:
    """The next size that could be tried above a fit: the next power of two where the task takes only some sizes."""
    return 2 * power_within(low, unit) if takes_some_sizes(attempts) else low + unit


def ends_above(low: int, attempts: Sequence[Attempt], unit: int) -> list[Attempt]:
    """The failures above a fit that may be an end: where the task takes only some sizes, powers of two alone."""
    failed = failures_above(low, attempts)
    return [each for each in failed if not _is_no_power(each, unit)] if takes_some_sizes(attempts) else failed


def power_to_try(attempts: Sequence[Attempt], low: int, unit: int, *, is_over: bool) -> int:
    """The power of two above a rejected size that is none, at the first such and where the search ends; else 0.

    Sizes that were rejected before any trained are no first: they lie where an estimate put the end.
    """
    first = next(number for number, each in enumerate(attempts) if each.fits)
    rejected = [each for each in failures_above(low, attempts[first:]) if each.outcome == "user_error"]
    ends = ends_above(low, attempts, unit)
    if not ends or not _is_no_power(ends[0], unit) or not (is_over or len(rejected) == 1):
        return 0
    power = 2 * power_within(ends[0].batch_size, unit)
    return power if all(_is_no_power(each, unit) or each.batch_size > power for each in ends) else 0


def _is_no_power(attempt: Attempt, unit: int) -> bool:
    """Whether the task rejected a size that is no power of two, in units."""
    return attempt.outcome == "user_error" and attempt.batch_size != power_within(attempt.batch_size, unit)


def power_within(size: int, unit: int) -> int:
    """The largest power of two, in units, that is no larger than a size."""
    return unit << max(0, (size // unit).bit_length() - 1)
