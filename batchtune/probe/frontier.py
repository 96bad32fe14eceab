"""The largest batch of every length: what one length taught is where the next one is looked for, then all are checked.

A batch that fits at a length fits at any shorter one, so the longest is searched first and each other one from there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from batchtune.config.probe import Bounds
from batchtune.document import Attempt, LengthCount, LengthPoint, LimitedBy
from batchtune.lengths.surface import PeakPoint, Surface, fit_surface
from batchtune.probe.bracket import bracket, failures_above, was_out_of_memory
from batchtune.probe.memory_model import PeakEstimate, is_right, measured_points
from batchtune.probe.search import Choice, next_size
from batchtune.protocol.data import LengthsSeen
from batchtune.vocabulary import Length, covers

_END = 0.97  # of the limit: where allocated memory ends, before any length has told
_ERROR, _PASSED_ERROR = 0.002, 0.01  # of a measured peak as a point of the model, and of one that was out of memory
_DOUBTS = 0.5  # standard deviations of the model to which a batch is tried that should not fail
_ROOM = 0.005  # of the end: below it by so much a batch is tried of which no failure is to prove that it is the largest
_NEAR = 0.015  # of the batch that the model expects: what is so near to it is the answer
_LOWER = 0.03  # of a batch that was expected to fit and did not: by so much less is tried next, then by twice as much
_ESTIMATED_PARTS, _ESTIMATED_ERROR = (2, 4), 0.01  # of the largest fit: where an estimate tells how memory grows

_FORESEEN = 0.02  # of a measured peak: an estimate that is off by less at every length tells what is left to each

Tried = Mapping[Length, Sequence[Attempt]]  # the longest length first
Estimates = Mapping[Length, PeakEstimate]


@dataclass(frozen=True)
class LengthPrior:
    """What the attempts at all lengths say of one, as `PeakEstimate` has it."""

    surface: Surface
    length: Length
    expected: int
    start: int
    optimizer_bytes: float

    def allocated_bytes(self, batch_size: int) -> float:
        """The peak that is expected of a batch."""
        return max(self.optimizer_bytes, self.surface.peak_bytes(batch_size, self.length))


def next_attempt(
    tried: Tried, bounds: Bounds, limit: int | None, estimates: Estimates | None = None
) -> tuple[Length, Choice]:
    """The length and the size to try next, once the longest is searched; no size where all are.

    At the longest and the shortest length a failure proves the answer. Of the others, a batch within
    1.5 % of what memory has room for is the answer: by a model that is fitted to all attempts and proven at both ends.

    Args:
        tried: every attempt at each length.
        bounds: what may be tried; with a tolerance of 0 every length is proven by a failure.
        limit: bytes that may be reserved; None: grow and bisect at each length.
        estimates: of some lengths; they stand for fits where there are none.
    """
    for length, attempts in list(tried.items())[1:]:
        floor = max(bracket(some)[0] for other, some in tried.items() if other != length and covers(other, length))
        within = bounds if attempts else replace(bounds, minimum=max(bounds.minimum, floor))
        prior: PeakEstimate | None = None
        if limit is not None:
            known = estimates or {}
            prior = _foreseen(tried, length, known) or _prior(tried, length, bounds, limit, known)
        if prior is not None and _is_near(tried, length, bounds, prior):
            continue
        choice = next_size(attempts, within, limit, prior)
        if prior is not None and {each.outcome for each in attempts} == {"oom"}:
            failed = min(each.batch_size for each in attempts)
            lower = int((1 - _LOWER * 2 ** (len(attempts) - 1)) * failed) // bounds.multiple_of * bounds.multiple_of
            size = max(lower, floor, bounds.minimum)  # which fits at a longer length
            choice = Choice(size, "right below the failure, by what other lengths took") if size < failed else choice
        if choice.batch_size is not None:
            return length, choice
    return next(iter(tried)), Choice(None, "all lengths are searched")


def _foreseen(tried: Tried, length: Length, estimates: Estimates) -> PeakEstimate | None:
    """The estimate of a length, as long as estimates were right about all that was tried at any."""
    fits = {each: points for each in estimates if (points := measured_points(tried[each]))}
    are_right = fits and all(is_right(estimates[each], points) for each, points in fits.items())
    too_large = any(
        not attempt.fits and attempt.batch_size <= estimate.expected
        for each, estimate in estimates.items()
        for attempt in tried[each]
    )
    return estimates.get(length) if are_right and not too_large else None


def _is_proven(tried: Tried, length: Length, bounds: Bounds) -> bool:
    """Whether a failure has to prove the answer at this length."""
    lengths = list(tried)
    return not bounds.tolerance or length in {lengths[0], lengths[-1]}


def _is_near(tried: Tried, length: Length, bounds: Bounds, prior: PeakEstimate) -> bool:
    """Whether what fits is so near to the end of memory that it is the answer without a failure right above it."""
    low, high = bracket(tried[length])
    near = max(_NEAR, bounds.tolerance)
    is_near = prior.expected <= (1 + near) * low if high is None else high <= (1 + 2 * near) * low
    return bool(low) and is_near and not _is_proven(tried, length, bounds)


def _prior(tried: Tried, length: Length, bounds: Bounds, limit: int, estimates: Estimates) -> LengthPrior | None:
    """What to expect of a length; None before anything has fitted."""
    end = _end_bytes(tried, limit)
    points = [*_points(tried, end), *_estimated_points(tried, estimates)]
    if not points:
        return None
    surface, unit = fit_surface(points), bounds.multiple_of
    expected = surface.largest_batch(length, end)
    careful = surface.largest_batch(length, (1 - _ROOM) * end - _DOUBTS * surface.doubt_bytes(expected, length))
    start = max(careful // unit * unit, min(unit, expected))
    low, high = bracket(tried[length])
    if not _is_proven(tried, length, bounds) or not low:
        expected = start  # a failure would tell nothing that is needed
    else:  # each attempt moves what is expected; the next is as far from it as makes a difference
        far = max(unit, int(bounds.tolerance * low) // unit * unit)
        expected = max(min(expected, high - far if high else expected), low + far - unit)
    every = [each for attempts in tried.values() for each in measured_points(attempts)]
    optimizer = max((each.allocated for each in every if each.activation < each.allocated), default=0.0)
    return LengthPrior(surface, length, expected, start, optimizer)


def _points(tried: Tried, end: float) -> Iterator[PeakPoint]:
    """Peaks of forward and backward at all lengths; where memory ended, at least so much was needed."""
    for length, attempts in tried.items():
        fits, failed = measured_points(attempts), bracket(attempts)[1]
        for each in fits:
            yield PeakPoint(each.size, length, each.activation, max(_ERROR, each.noise / each.activation))
        if fits and failed is not None and was_out_of_memory(failed, attempts):
            yield PeakPoint(failed, length, end, _PASSED_ERROR)


def _estimated_points(tried: Tried, estimates: Estimates) -> Iterator[PeakPoint]:
    """What is estimated below what fits at the longest length, shifted to what that took.

    Where it was right there, what is estimated of the other lengths is known as well.
    """
    (longest, _), off = next(iter(tried.items())), _off(tried, estimates)
    if longest not in off:
        return
    is_right_there = is_right(estimates[longest], measured_points(tried[longest]))
    for length, estimate in estimates.items() if is_right_there else [(longest, estimates[longest])]:
        fits = measured_points(tried[length])
        sizes = {max(1, (fits[-1].size if fits else estimate.expected) // part) for part in _ESTIMATED_PARTS}
        for size in sizes - {each.size for each in fits} if fits else {max(1, estimate.expected), *sizes}:
            peak = off.get(length, off[longest]) * estimate.allocated_bytes(size)
            yield PeakPoint(size, length, peak, _ESTIMATED_ERROR)


def _off(tried: Tried, estimates: Estimates) -> dict[Length, float]:
    """What the largest fit took at each length, as a multiple of what was estimated.

    Only where that is of activations, as the estimate's growth is.
    """
    largest = {length: fits[-1] for length in estimates if (fits := measured_points(tried[length]))}
    return {
        length: fit.allocated / estimates[length].allocated_bytes(fit.size)
        for length, fit in largest.items()
        if fit.activation >= fit.allocated
    }


def replayed_capacity(tried: Tried, estimates: Estimates, limit: int | None) -> int | None:
    """Bytes within which an estimate's replay is as near to the limit as training; None where it does not tell.

    It does where it is off by as much at every length.
    """
    off = _off(tried, estimates).values()
    if limit is None or len(off) < len(tried) or max(off) > (1 + _FORESEEN) * min(off):
        return None
    return int(limit / statistics.fmean(off))


def _end_bytes(tried: Tried, limit: int) -> float:
    """Bytes of forward and backward at which memory ends: by fits that have a failure right above them."""
    ends = []
    for attempts in tried.values():
        fits, (low, high) = measured_points(attempts), bracket(attempts)
        oom = was_out_of_memory(high, attempts)
        if oom and fits and fits[-1].size == low and high is not None and high - low <= max(1, 0.05 * low):
            ends.append(fits[-1].activation * (1 + (high - low) / low / 2))
    return min(limit, statistics.median(ends)) if ends else _END * limit  # one may end far from all others


def largest_batches(tried: Tried) -> dict[Length, int]:
    """What trains at each length alone; where nothing was found, what trains at the next longer one."""
    found, largest = dict[Length, int](), 0
    for length, attempts in tried.items():
        largest = bracket(attempts)[0] or largest
        found[length] = largest
    return found


def length_points(
    tried: Tried,
    limited_by: Callable[[int, Attempt | None], LimitedBy | None],
    checked: Mapping[Length, int] | None = None,
) -> tuple[LengthPoint, ...]:
    """What was found at each length where something fits, ascending.

    `limited_by` says it of a largest fit and the failure above it; `checked` are the batches that passed the final
    check of all lengths.
    """
    points, checked = [], checked or {}
    for length, attempts in tried.items():
        low = checked.get(length, bracket(attempts)[0])
        if low:
            best = {each.batch_size: each for each in attempts}[low]
            failed = next(iter(failures_above(low, attempts)), None)
            points.append(
                LengthPoint(
                    length=length,
                    max_batch_size=low,
                    verified_in_fresh_process=length in checked,
                    first_failing_batch_size=failed.batch_size if failed else None,
                    limited_by=limited_by(low, failed) or "memory",
                    peak_allocated_bytes=best.peak_allocated_bytes,
                    peak_reserved_bytes=best.peak_reserved_bytes,
                    attempts=list(attempts),
                )
            )
    return tuple(points[::-1])


def length_counts(seen: LengthsSeen | None) -> tuple[LengthCount, ...]:
    """How many samples there are of each length, where that is known."""
    return tuple(LengthCount(length=each.length, samples=each.samples) for each in (seen.groups if seen else ()))


def unseen_lengths(seen: LengthsSeen | None) -> list[str]:
    """A warning where not all samples were looked at."""
    if seen is None or seen.total is None or not seen.seen < seen.total or not seen.seen:
        return []
    text = f"the lengths of {seen.seen:,} of {seen.total:,} samples are known, for more there was no time"
    return [f"{text}: a longer one needs more memory than was found; name the longest there is with --lengths"]
