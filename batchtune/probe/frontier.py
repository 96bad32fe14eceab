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
from batchtune.probe.memory_model import PeakEstimate, measured_points
from batchtune.probe.search import Choice, bracket, next_size
from batchtune.protocol.data import LengthsSeen
from batchtune.vocabulary import Length, covers

_END = 0.97  # of the limit: where allocated memory ends, before any length has told
_ERROR, _PASSED_ERROR = 0.002, 0.01  # of a measured peak as a point of the model, and of one that was out of memory
_DOUBTS = 0.5  # standard deviations of the model to which a batch is tried that should not fail
_ROOM = 0.005  # of the end: below it by so much a batch is tried of which no failure is to prove that it is the largest
_NEAR = 0.015  # of the batch that the model expects: what is so near to it is the answer
_LOWER = 0.97  # of a batch that was expected to fit and did not: what is tried next
_ESTIMATED_PARTS, _ESTIMATED_ERROR = (2, 4), 0.01  # of the largest fit: where an estimate tells how memory grows

Tried = Mapping[Length, Sequence[Attempt]]  # the longest length first


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
    tried: Tried, bounds: Bounds, limit: int | None, estimate: PeakEstimate | None = None
) -> tuple[Length, Choice]:
    """The length and the size to try next, once the longest is searched; no size where all are.

    At the longest and the shortest length a failure proves the answer. Of the others, a batch within
    1.5 % of what memory has room for is the answer: by a model that is fitted to all attempts and proven at both ends.

    Args:
        tried: every attempt at each length.
        bounds: what may be tried; with a tolerance of 0 every length is proven by a failure.
        limit: bytes that may be reserved; None: grow and bisect at each length.
        estimate: of the longest length; it stands for fits below the largest, where there are none.
    """
    for length, attempts in list(tried.items())[1:]:
        floor = max(bracket(some)[0] for other, some in tried.items() if other != length and covers(other, length))
        within = bounds if attempts else replace(bounds, minimum=max(bounds.minimum, floor))
        prior = _prior(tried, length, bounds, limit, estimate) if limit is not None else None
        if prior is not None and _is_near(tried, length, bounds, prior):
            continue
        choice = next_size(attempts, within, limit, prior)
        if prior is not None and [each.outcome for each in attempts] == ["oom"]:
            lower = int(_LOWER * attempts[0].batch_size) // bounds.multiple_of * bounds.multiple_of
            choice = Choice(max(lower, bounds.minimum), "right below the failure, by what other lengths took")
        if choice.batch_size is not None:
            return length, choice
    return next(iter(tried)), Choice(None, "all lengths are searched")


def _is_proven(tried: Tried, length: Length, bounds: Bounds) -> bool:
    """Whether a failure has to prove the answer at this length."""
    lengths = list(tried)
    return not bounds.tolerance or length in {lengths[0], lengths[-1]}


def _is_near(tried: Tried, length: Length, bounds: Bounds, prior: LengthPrior) -> bool:
    """Whether what fits is so near to the end of memory that it is the answer without a failure."""
    low, high = bracket(tried[length])
    near = max(_NEAR, bounds.tolerance)
    return bool(low) and high is None and not _is_proven(tried, length, bounds) and prior.expected <= (1 + near) * low


def _prior(
    tried: Tried, length: Length, bounds: Bounds, limit: int, estimate: PeakEstimate | None
) -> LengthPrior | None:
    """What to expect of a length; None before anything has fitted."""
    end = _end_bytes(tried, limit)
    points = [*_points(tried, end), *_estimated_points(tried, estimate)]
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
        fits = measured_points(attempts)
        for each in fits:
            yield PeakPoint(each.size, length, each.activation, max(_ERROR, each.noise / each.activation))
        failed = bracket(attempts)[1]
        if (
            fits
            and failed is not None
            and any(each.batch_size == failed and each.outcome == "oom" for each in attempts)
        ):
            yield PeakPoint(failed, length, end, _PASSED_ERROR)


def _estimated_points(tried: Tried, estimate: PeakEstimate | None) -> Iterator[PeakPoint]:
    """What is estimated below the largest fit of the longest length, shifted to what that took."""
    length, attempts = next(iter(tried.items()))
    fits = measured_points(attempts)
    if estimate is None or not fits or fits[-1].activation < fits[-1].allocated:  # else it is not of activations
        return
    off = fits[-1].allocated / estimate.allocated_bytes(fits[-1].size)
    for size in {max(1, fits[-1].size // part) for part in _ESTIMATED_PARTS} - {each.size for each in fits}:
        yield PeakPoint(size, length, off * estimate.allocated_bytes(size), _ESTIMATED_ERROR)


def _end_bytes(tried: Tried, limit: int) -> float:
    """Bytes of forward and backward at which memory ends: by fits that have a failure right above them."""
    ends = []
    for attempts in tried.values():
        fits, (low, high) = measured_points(attempts), bracket(attempts)
        oom = any(each.batch_size == high and each.outcome == "oom" for each in attempts)
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
    points = []
    for length, attempts in tried.items():
        last = {each.batch_size: each for each in attempts}
        low = (checked or {}).get(length, bracket(attempts)[0])
        high = min((size for size, each in last.items() if size > low and not each.fits), default=None)
        if low:
            best, failed = last[low], last.get(high or 0)
            known = {name: getattr(best, name) for name in ("peak_allocated_bytes", "peak_reserved_bytes")}
            ended = limited_by(low, failed) or "memory"
            point = LengthPoint(length=length, max_batch_size=low, limited_by=ended, attempts=list(attempts), **known)
            points.append(point.model_copy(update={"first_failing_batch_size": high}))
    return tuple(points[::-1])


def length_counts(seen: LengthsSeen | None) -> tuple[LengthCount, ...]:
    """How many samples there are of each length, where that is known."""
    return tuple(LengthCount(length=length, samples=samples) for length, samples in (seen.counts if seen else ()))


def unseen_lengths(seen: LengthsSeen | None) -> list[str]:
    """A warning where not all samples were looked at."""
    if seen is None or seen.total is None or not seen.seen < seen.total or not seen.seen:
        return []
    text = f"the lengths of {seen.seen:,} of {seen.total:,} samples are known, for more there was no time"
    return [f"{text}: a longer one needs more memory than was found; name the longest there is with --lengths"]
