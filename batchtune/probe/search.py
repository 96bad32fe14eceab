"""Which batch size to try next: turns the attempts so far into guesses of where memory ends, and guesses into a size.

The bracket (largest fit, smallest failure above it) is the answer; guesses only choose where to look inside it. One
that was wrong loses its weight to the others, in the end to bisection, and `_affordable` bounds the worst case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from batchtune.config.probe import Bounds
from batchtune.document import Attempt
from batchtune.probe.bracket import (
    bracket,
    ends_above,
    least_above,
    power_to_try,
    power_within,
    takes_some_sizes,
    was_out_of_memory,
)
from batchtune.probe.memory_model import (
    MAX_GROWTH,
    Guess,
    PeakEstimate,
    Point,
    growth,
    guesses_of,
    is_right,
    measured_points,
    prior_guess,
    quantile,
    reach,
)
from batchtune.vocabulary import LARGEST

MAX_USER_ERRORS = 2  # sizes, from the minimum on, that the user's code may reject
FINE = 0.005  # of the largest fit: whoever asks for a narrower bracket has an exact search among many sizes
MIDDLE = (0.2, 0.4, 0.8)  # shares of what is believed below the next size
LAST = 0.0005  # of the largest fit: in so narrow a bracket, the roundest size may well be the last that fits
LOWER_PRIOR_START, SAFE_PRIOR_START = 0.8, 0.5  # of the prior's largest fit: where its own start fails; with no_oom
_PEAKS = {"peak_allocated_bytes", "peak_reserved_bytes", "forward_backward_peak_bytes"}
PRIOR_REFUTED = 0.85  # an OOM where the prior saw a smaller share of the limit used: it knows nothing of this model


@dataclass(frozen=True, slots=True)
class Choice:
    """The size to try next, or None when the search is over; and why, in a short sentence."""

    batch_size: int | None
    reason: str


def as_in_fresh_process(attempts: Sequence[Attempt], checked: Attempt, least_bytes: float) -> list[Attempt] | None:
    """The attempts as a fresh process would have made them, where that makes a difference; else None.

    What earlier attempts left in a process (a heap full of holes, kernels for other sizes) raises the peaks of later
    ones: then memory has ended too early. Fits keep their size with the difference taken off; OOMs prove nothing.

    `checked` is the final check of the largest fit, in a process of its own. A difference of less than `least_bytes`
    of peak reserved memory is of no consequence.
    """
    peak, same = checked.peak_reserved_bytes, [each for each in attempts if each.batch_size == checked.batch_size]
    worn = same[0].peak_reserved_bytes if same else None
    ended = was_out_of_memory(bracket(attempts)[1], attempts)
    if worn is None or peak is None or not ended or worn - peak <= least_bytes:
        return None
    return [each.model_copy(update=_lowered(each, worn - peak)) for each in attempts if each.fits]


def _lowered(attempt: Attempt, by_bytes: int) -> dict[str, int]:
    """An attempt's peaks, so much lower."""
    peaks = attempt.model_dump(include=_PEAKS, exclude_none=True)
    return {name: max(0, bytes_ - by_bytes) for name, bytes_ in peaks.items()}


def next_size(
    attempts: Sequence[Attempt],
    bounds: Bounds,
    memory_limit_bytes: int | None = None,
    prior: PeakEstimate | None = None,
) -> Choice:
    """The size to try next: an untried multiple within the bounds, or None when the search is over.

    Args:
        attempts: Every attempt in order, of search and verification.
        bounds: What may be tried, and how narrow the bracket must become.
        memory_limit_bytes: What peak reserved bytes may reach. None: grow and bisect without guesses.
        prior: An estimate of the end and of the peaks below it.
    """
    unit, limit = bounds.multiple_of, memory_limit_bytes
    floor = max(1, math.ceil(bounds.minimum / unit)) * unit
    ceiling = max(LARGEST, floor) if bounds.maximum is None else bounds.maximum
    ceiling = ceiling // unit * unit
    if ceiling < floor:
        return Choice(None, f"no multiple of {unit} lies between the minimum and the maximum")
    attempts = [attempt for attempt in attempts if floor <= attempt.batch_size <= ceiling]
    low, _ = bracket(attempts)
    prior = None if limit is None or _is_refuted(prior, attempts) else prior
    expected = min(prior.expected, ceiling) // unit * unit if prior else 0
    if low == 0:
        starts = _starts(prior, bounds)
        *starts, today = (max(min(size, ceiling) // unit * unit, floor) for size in [*starts, bounds.of_today or floor])
        return _first_fit(attempts, starts, (floor, today, ceiling), unit)
    gap = max(unit, int(bounds.tolerance * low) // unit * unit)
    takes_some, least = takes_some_sizes(attempts), least_above(low, attempts, unit)
    high = next((each.batch_size for each in ends_above(low, attempts, unit)), None)
    if (end := _end(attempts, bounds, (low, high), least, ceiling)) is not None:
        return end
    points = measured_points(attempts) if limit else []
    if bounds.no_oom:
        wanted, reason = _safe(points, limit or 0, prior, low, high)
        if wanted < min(low + gap, ceiling):
            return Choice(None, f"{low} fits, {reason}")
    else:
        is_foreseen = prior is not None and is_right(prior, points)
        block = _block(expected, unit) if is_foreseen and gap == unit else unit
        wanted, reason = _by_estimate(expected, block, low, high, gap) if is_foreseen else (0, "")
        if not wanted:
            wide = high is None or high - low > block
            guesses = guesses_of(points, limit or 0, prior)
            wanted, reason = _next_inside(attempts, guesses, low, high, max(gap, block) if wide else gap)
        # Only an exact search promises its worst case; the others may leap a little further.
        tried = len({attempt.batch_size for attempt in attempts}) - (3 if bounds.tolerance else 0)
        wanted = min(wanted, max(LARGEST, 2 * low)) // unit * unit
        wanted = wanted if takes_some else _affordable(wanted, low, high, gap, tried)  # of powers there are few
    size = int(min(wanted, low * MAX_GROWTH, ceiling, (high or math.inf) - unit)) // unit * unit
    size = power_within(size, unit) if takes_some else size
    return Choice(max(size, least if takes_some else low // unit * unit + unit), reason)


def _starts(prior: PeakEstimate | None, bounds: Bounds) -> list[int]:
    """Where to begin by an estimate."""
    if prior is None:
        return []
    return (
        [int(SAFE_PRIOR_START * prior.expected)]
        if bounds.no_oom
        else [prior.start, int(LOWER_PRIOR_START * prior.expected)]
    )


def _end(
    attempts: Sequence[Attempt], bounds: Bounds, between: tuple[int, int | None], least: int, ceiling: int
) -> Choice | None:
    """How the search ends between the largest fit and the smallest failure; None where it goes on.

    A size that the task rejected is no end before the power of two above it was tried.
    """
    low, high = between
    unit = bounds.multiple_of
    gap = max(unit, int(bounds.tolerance * low) // unit * unit)
    is_over = least > ceiling or (high is not None and (high - low <= gap or least >= high))
    power = 0 if bounds.no_oom else power_to_try(attempts, low, unit, is_over=is_over)
    if 0 < power <= ceiling:
        return Choice(power, f"the task raised an error at {high}: it may take only some sizes, such as powers of two")
    end = f", {high} does not" if high is not None else " and is the largest size that may be tried"
    return Choice(None, f"{low} fits{end}") if is_over else None


def _is_refuted(prior: PeakEstimate | None, attempts: Sequence[Attempt]) -> bool:
    failed = (attempt.batch_size for attempt in attempts if attempt.outcome == "oom")
    return prior is not None and any(
        prior.allocated_bytes(size) < PRIOR_REFUTED * prior.allocated_bytes(prior.expected) for size in failed
    )


def _block(expected: int, unit: int) -> int:
    """So many sizes up to the expected one take the same: at round sizes, tensors fill the allocator's blocks."""
    block = unit
    while block and expected % (2 * block) == 0 and 2 * block <= FINE * expected:
        block *= 2
    return block


def _by_estimate(expected: int, block: int, low: int, high: int | None, gap: int) -> tuple[int, str]:
    """Where to look when an estimate has foreseen the memory used so far; 0 where it does not say."""
    if high is not None and low % block == 0 and gap < high - low <= block:
        return low + gap, f"{low} fills the allocator's blocks, as far as the estimate tells"
    if block < gap and high is not None and high - low <= 2 * gap:
        return 0, ""  # one attempt ends it
    if low <= expected and (high is None or high > expected):
        wanted = expected + block if low + gap > expected else expected
        return wanted, f"by an estimate of {expected}, which foresaw the memory used so far"
    return 0, ""


def _first_fit(attempts: Sequence[Attempt], starts: Sequence[int], among: tuple[int, int, int], unit: int) -> Choice:
    """While nothing fits: down after a failure, up after an error of the user's code (BatchNorm rejects one sample).

    `among` the smallest size that may be tried, that of today and the largest.
    """
    floor, today, ceiling = among
    last = {attempt.batch_size: attempt.outcome for attempt in attempts}
    start = starts[len(last)] if len(last) < len(starts) else floor
    if not last or (start not in {floor, *last} and set(last.values()) == {"oom"}):
        return Choice(start, "the minimum" if start == floor else "below what the estimate says fits")
    most = floor * 2 ** (MAX_USER_ERRORS - 1)  # a larger size that the task rejects is too large, not too small
    rejected = [size for size, outcome in last.items() if outcome == "user_error" and size <= most]
    failed = min((size for size in last if size not in rejected), default=ceiling + unit)
    under = max((size for size in rejected if size < failed), default=floor - unit)
    if floor not in last and rejected:
        return Choice(floor, "nothing fits yet, try the minimum")
    if len(rejected) >= MAX_USER_ERRORS and today not in last and most < today < failed:
        return Choice(today, f"the task raised an error up to {max(rejected)}, try what it trains with today")
    if len(rejected) >= MAX_USER_ERRORS or failed - under <= unit:
        return Choice(None, f"nothing fits: tried {', '.join(map(str, sorted(last)))}")
    if rejected:
        wanted = min(2 * under, (under + failed) // 2 if failed in last else ceiling) // unit * unit
        return Choice(max(wanted, under + unit), f"the task raised an error at {under}, try more")
    return Choice(max(floor, int(0.5 ** (2 ** len(last)) * failed) // unit * unit), f"{failed} failed, try less")


def _next_inside(
    attempts: Sequence[Attempt], guesses: list[Guess], low: int, high: int | None, gap: int
) -> tuple[float, str]:
    """Where to look: below the limit while a fit still teaches, then where one attempt may end the search."""
    if high is None:
        if not guesses:
            return 4 * low, "memory unknown: up to four times the largest fit"
        middle = quantile(guesses, 0.5, low, None)
        # A fit near the limit tells where it is; an OOM only that it was passed.
        wanted = min(quantile(guesses, 0.3 if middle > 2 * low else 0.4, low, None), middle - 0.5 * gap)
        return max(wanted, low + gap), f"the memory used so far points to a limit near {middle:.0f}"
    width = high - low
    if width <= 2 * gap:
        size = _roundest(high - gap, max(high - gap, (low + high) // 2))
        return size, f"fit or not, {size} ends the search"
    fine, between = gap < FINE * low, f"between {low} and {high}"
    if fine and width <= LAST * low * 0.25 ** _neighbours(attempts, gap) and low % (1 << (width.bit_length() - 1)) == 0:
        return low + gap, f"{between}, where {low} is the roundest"
    unexpected = any(a.batch_size == high and a.outcome != "oom" for a in attempts)
    if unexpected or not guesses:
        if high > 4 * low:
            return math.sqrt(low * high), between
        least, aim, most = (low + share * width for share in (0.2, 0.5, 0.8))
    else:
        least, aim, most = (quantile(guesses, share, low, high) for share in MIDDLE)
        between += ", by the memory used so far"
    wanted = _roundest(math.ceil(least), math.ceil(most)) if fine else aim
    return min(max(wanted, low + gap), high - gap), between


def _neighbours(attempts: Sequence[Attempt], gap: int) -> int:
    """How many fits lie next to each other: so often memory did not end at the first, round as it was."""
    fits = {attempt.batch_size for attempt in attempts if attempt.fits}
    return sum(size + gap in fits for size in fits)


def _roundest(least: int, most: int) -> int:
    """The number with the most factors of two: at such sizes tensors fill the allocator's blocks of 2 MiB.

    Of a block that is not full, what is left holds small tensors, for which it is kept when memory runs out.
    """
    power = 1
    while most // (2 * power) * 2 * power >= least:
        power *= 2
    return most // power * power if most >= least else most


def _affordable(wanted: float, low: int, high: int | None, gap: int, tried: int) -> float:
    """`wanted`, moved so that bisection can end an exact search within 2 * log2(limit) + 4 attempts."""

    def width(size: float, attempts: int) -> float:
        """The widest bracket above `size` that bisection can narrow to the gap after so many attempts."""
        return gap * 2.0 ** min(60, math.floor(2 * math.log2(max(1.0, size / gap))) + 4 - attempts)

    if high is None:
        split = low + width(low, tried + 2)  # where the bracket that a failure leaves would be split
        # Small steps use up what doubling would need later.
        wanted = max(wanted, min(2.0 * low, gap * 2.0 ** (min(60, tried) - 2)))
        return min(wanted, max(2 * low, split + width(split, tried + 2)))
    most = low + width(low, tried + 1)
    if wanted > most or high - wanted > width(wanted, tried + 1):
        wanted = most
    if wanted >= high or wanted <= low or high - wanted > width(wanted, tried + 1):
        return (low + high) / 2 if high <= 4 * low else max(2 * low, min(wanted, math.sqrt(low * high)))
    return wanted


def _safe(points: list[Point], limit: int, prior: PeakEstimate | None, low: int, high: int | None) -> tuple[float, str]:
    """The largest size that every model of memory, taken at its worst, puts within the limit."""
    if high is not None or not points or points[-1].size != low:
        return 0, "and nothing larger is known to be safe"
    last, size = points[-1], math.inf
    room = limit * last.allocated / last.reserved - last.activation - 2 * last.noise
    if prior is not None:
        guess = prior_guess(points, room + last.activation - last.allocated, last.noise, prior)
        size = guess.size * math.exp(-2.5 * guess.spread) if guess.weight else math.inf
    if len(points) > 1:
        grown = growth(points)
        curvature = grown.worst
        slope = grown.slope + 2 * grown.error + curvature * grown.span
        if points[2:]:
            slope = max(slope, growth(points[:-1]).slope)
        # Further away the curve may get steeper than it ever was: take half of the room, then look again.
        half = max(1.25 * low, low + reach(0.5 * room, slope, curvature))
        size = min(size, low + reach(room, slope, curvature), half)
    elif prior is None:
        # If the optimizer's peak is the higher, activations are a small part of it; else up to half of the peak.
        size = low + low * room / last.activation / (0.15 if last.activation < last.allocated else 0.5)
    return size, "the next step that is sure to fit gains too little"
