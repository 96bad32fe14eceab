"""Which batch size to try next: turns the attempts so far into guesses of where memory ends, and guesses into a size.

The bracket (largest fit, smallest failure above it) is the answer; guesses only choose where to look inside it. One
that was wrong loses its weight to the others, in the end to bisection, and `_affordable` bounds the worst case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batchtune.results import Attempt

Prior = Callable[[int], int]  # batch size -> estimated peak reserved bytes, called some dozens of times

CEILING = 2**22  # samples; a search without a maximum ends here
MAX_GROWTH = 32.0  # in one step: memory that hardly grows says nothing about sizes further away
PATIENCE = 4  # same outcomes in a row inside the bracket, before guesses give way to bisection
MAX_USER_ERRORS = 3  # sizes, from the minimum on, that the user's code may reject
PRIOR_START, SAFE_PRIOR_START = 0.8, 0.5  # of the prior's largest fit; the second with no_oom
REFUTED = 0.7  # a prior that is off by more than this factor (its logarithm) in growth is not used
PRIOR_SCALE_ERROR = 0.07  # standard deviation of the prior's scale before anything was measured
NOISE, NOISE_OF_RESERVED = 0.001, 0.01  # share of a peak: of allocated bytes; of reserved ones, if that is all (CPU)
WASTE = (0.1, 0.5, 0.9)  # shares of reserved - allocated that the allocator may be unable to give back at the limit
ONE_POINT = 6.0  # after one fit: as if a sixth of its memory grew with the batch
DRIFT = 0.05  # how far off an extrapolation may be, per factor e
BROAD, BENT, CURVED, FROM_PRIOR = 0.03, 0.15, 4.0, 6.0  # weights of guesses; that of a straight line is 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the search may try; `maximum` (the smaller of the user's and the data set's size) is never exceeded."""

    minimum: int = 1
    maximum: int | None = None
    multiple_of: int = 1  # the minimum is rounded up, the maximum down
    tolerance: float = 0.01  # relative distance of largest fit and smallest failure; 0 is exact
    no_oom: bool = False  # only sizes predicted to fit even at worst, until such a step gains too little


@dataclass(frozen=True, slots=True)
class Choice:
    """The size to try next, or None when the search is over; and why, in a short sentence."""

    batch_size: int | None
    reason: str


class _Point(NamedTuple):
    """What a fit used, in bytes; `activation` is the peak of forward and backward, without the optimizer's."""

    size: int
    activation: float
    allocated: float
    reserved: float
    noise: float


class _Guess(NamedTuple):
    """The limit is at `size` samples, give or take `spread` (standard deviation of the logarithm)."""

    weight: float
    size: float
    spread: float

    def below(self, size: float) -> float:
        return self.weight * 0.5 * math.erfc(math.log(self.size / size) / (self.spread * math.sqrt(2)))


def bracket(attempts: Sequence[Attempt]) -> tuple[int, int | None]:
    """Largest fit (0: none) and smallest failure above it (None: none); the last attempt at a size counts."""
    last = {attempt.batch_size: attempt.fits for attempt in attempts}
    low = max((size for size, fits in last.items() if fits), default=0)
    return low, min((size for size, fits in last.items() if not fits and size > low), default=None)


def next_size(
    attempts: Sequence[Attempt], bounds: Bounds, memory_limit_bytes: int | None = None, prior: Prior | None = None
) -> Choice:
    """The size to try next: an untried multiple within the bounds, or None when the search is over.

    Args:
        attempts: Every attempt in order, of search and verification.
        bounds: What may be tried, and how narrow the bracket must become.
        memory_limit_bytes: What peak reserved bytes may reach. None: grow and bisect without guesses.
        prior: An estimate of peak reserved bytes by size; may be off by a tenth and an offset.
    """
    unit, limit = bounds.multiple_of, memory_limit_bytes
    floor = max(1, math.ceil(bounds.minimum / unit)) * unit
    ceiling = (CEILING if bounds.maximum is None else bounds.maximum) // unit * unit
    if ceiling < floor:
        return Choice(None, f"no multiple of {unit} lies between the minimum and the maximum")
    attempts = [attempt for attempt in attempts if floor <= attempt.batch_size <= ceiling]
    low, high = bracket(attempts)
    if low == 0:
        share = (SAFE_PRIOR_START if bounds.no_oom else PRIOR_START) if prior and limit else 0
        start = int(share * _prior_fit(prior, limit, floor, ceiling)) // unit * unit if prior and limit else 0
        return _first_fit(attempts, max(start, floor), floor, ceiling, unit)
    gap = max(unit, int(bounds.tolerance * low) // unit * unit)
    if high is not None and high - low <= gap:
        return Choice(None, f"{low} fits, {high} does not")
    if low + unit > ceiling:
        return Choice(None, f"{low} fits and is the largest size that may be tried")
    points = _points(attempts) if limit else []
    if bounds.no_oom:
        wanted, reason = _safe(points, limit or 0, prior, low, high)
        if wanted < min(low + gap, ceiling):
            return Choice(None, f"{low} fits, {reason}")
    else:
        wanted, reason = _aim(attempts, _guesses(points, limit or 0, prior), low, high, gap)
        # Only an exact search promises its worst case; the others may leap a little further.
        tried = len({attempt.batch_size for attempt in attempts}) - (3 if bounds.tolerance else 0)
        wanted = _affordable(min(wanted, CEILING) // unit * unit, low, high, gap, tried)
    size = int(min(wanted, low * MAX_GROWTH, ceiling, (high or math.inf) - unit)) // unit * unit
    return Choice(max(size, low // unit * unit + unit), reason)


def _first_fit(attempts: Sequence[Attempt], start: int, floor: int, ceiling: int, unit: int) -> Choice:
    """While nothing fits: down after a failure, up after an error of the user's code (BatchNorm rejects one sample)."""
    last = {attempt.batch_size: attempt.outcome for attempt in attempts}
    if not last:
        return Choice(start, "the minimum" if start == floor else "below what the estimate says fits")
    most = floor * 2 ** (MAX_USER_ERRORS - 1)  # a larger size that the task rejects is too large, not too small
    rejected = [size for size, outcome in last.items() if outcome == "user_error" and size <= most]
    failed = min((size for size in last if size not in rejected), default=ceiling + unit)
    under = max((size for size in rejected if size < failed), default=floor - unit)
    if len(rejected) >= MAX_USER_ERRORS or failed - under <= unit:
        return Choice(None, f"nothing fits: tried {', '.join(map(str, sorted(last)))}")
    if floor not in last and rejected:
        return Choice(floor, "nothing fits yet, try the minimum")
    if rejected:
        wanted = min(2 * under, (under + failed) // 2 if failed in last else ceiling) // unit * unit
        return Choice(max(wanted, under + unit), f"the task raised an error at {under}, try more")
    return Choice(max(floor, int(0.7 ** (2 ** (len(last) - 1)) * failed) // unit * unit), f"{failed} failed, try less")


def _points(attempts: Sequence[Attempt]) -> list[_Point]:
    """The fits whose memory is known, by size."""
    points = []
    for attempt in {attempt.batch_size: attempt for attempt in attempts}.values():
        allocated = attempt.peak_allocated_bytes or attempt.peak_reserved_bytes
        if attempt.fits and allocated:
            activation = attempt.forward_backward_peak_bytes or allocated
            noise = activation * (NOISE if attempt.peak_allocated_bytes else NOISE_OF_RESERVED)
            reserved = max(allocated, attempt.peak_reserved_bytes or 0)
            points.append(_Point(attempt.batch_size, activation, allocated, reserved, noise))
    return sorted(points)


def _guesses(points: list[_Point], limit: int, prior: Prior | None) -> list[_Guess]:
    """Where the limit may lie, by each model of memory that the points allow, for each share of waste."""
    guesses: list[_Guess] = []
    for share in WASTE if points else ():
        last = points[-1]
        # Reserved bytes are limited but allocated ones extrapolated: under pressure the allocator gives back some of
        # what it holds in vain; how much shows only at the limit.
        waste = last.reserved / last.allocated - 1
        allowed = limit / (1 + share * waste)
        blur = math.hypot(last.noise, 0.1 * waste * limit)
        if prior is not None:
            guesses.append(_prior_guess(points, allowed - last.allocated, blur, prior))
        room = max(allowed - last.activation, -0.3 * last.activation)
        if len(points) > 1:
            guesses += _curve_guesses(points, room, blur)
        elif prior is None:
            guesses.append(_Guess(1.0, last.size * max(1.1, 1 + ONE_POINT * room / last.activation), 1.0))
    return guesses


def _curve(points: list[_Point]) -> tuple[float, float, float, float, float]:
    """Growth of activations up to the largest fit: span, slope, its error, curvature if it shows, and at worst."""
    last = points[-1]
    middle = next((point for point in points[-2::-1] if point.size <= 0.9 * last.size), points[0])
    first = next((point for point in points[::-1] if point.size <= 0.7 * middle.size), None)
    span = last.size - middle.size
    slope, error = max(last.activation - middle.activation, 0.5 * last.noise) / span, 1.4 * last.noise / span
    worst = slope / (last.size + middle.size)  # as if all growth were with the square of the size
    if first is None:
        return span, slope, error, 0.0, worst
    run, width = middle.size - first.size, last.size - first.size
    change = slope - (middle.activation - first.activation) / run
    doubt = math.hypot(error, 1.4 * middle.noise / run)
    error *= min(max(abs(change) / doubt, 0.15), 1.0)  # three points on a line: less noise than feared
    shown = change / width if change > 2 * doubt else 0.0
    return span, slope, error, shown, max(shown, min(worst, max(0.0, change + 2 * doubt) / width))


def _reach(room: float, slope: float, curvature: float) -> float:
    """How many samples more until `room` bytes are used."""
    return 2 * room / (slope + math.sqrt(slope * slope + 4 * curvature * max(room, 0.0)))


def _curve_guesses(points: list[_Point], room: float, blur: float) -> list[_Guess]:
    """A straight line and a parabola through the largest fits; `room` is what activations may still grow, in bytes."""
    last, guesses = points[-1].size, []
    span, slope, error, shown, worst = _curve(points)
    for weight, curvature in ((1.0, 0.0), (CURVED, shown) if shown else (BENT, worst)):
        ahead = _reach(room, slope + curvature * span, curvature)
        size = max(last + ahead, 0.5 * last)
        spread = math.hypot(blur, error * ahead) / slope / size + DRIFT * abs(math.log(size / last))
        guesses.append(_Guess(weight, size, min(2.0, spread) + 1e-4))
    return guesses


def _prior_guess(points: list[_Point], room: float, blur: float, prior: Prior) -> _Guess:
    """The prior, shifted to the largest fit and scaled by the growth measured since the smallest."""
    last, first = points[-1], points[0]
    here, scale, scale_error = prior(last.size), 1.0, PRIOR_SCALE_ERROR
    rise, weight = here - prior(first.size), FROM_PRIOR
    if rise > 0:
        measured, error = (last.allocated - first.allocated) / rise, 1.4 * last.noise / rise + 0.01
        trust = scale_error**2 / (scale_error**2 + error**2)
        if error < trust and abs(math.log(max(measured, 0.01))) > REFUTED:
            weight = 0.0  # no such curve: the measured one takes over
        scale, scale_error = min(max(1 + trust * (measured - 1), 0.5), 2.0), math.sqrt(trust) * error
    size = _prior_fit(prior, here + room / scale, 1, CEILING)
    step = max(1, size // 50)
    slope = scale * max(prior(size + step) - prior(size), 1) / step
    return _Guess(weight, size, min(1.0, math.hypot(blur, scale_error * room) / slope / size) + 1e-4)


def _prior_fit(prior: Prior, limit: float, floor: int, ceiling: int) -> int:
    """Largest size, at least `floor`, that the prior puts within `limit` bytes, to within a thousandth."""
    low, high = floor, floor * 2
    while high < ceiling and prior(high) <= limit:
        low, high = high, high * 2
    high = min(high, ceiling + 1)
    while high - low > max(1, low // 1000):
        middle = (low + high) // 2
        low, high = (middle, high) if prior(middle) <= limit else (low, middle)
    return low


def _quantile(guesses: list[_Guess], share: float, low: int, high: int | None) -> float:
    """The size below which the limit lies with probability `share`, now that it is known to lie in the bracket."""
    top = high or low * MAX_GROWTH
    known = sum(guess.below(low) for guess in guesses)

    def below(size: float) -> float:
        # The last term is bisection (of logarithms): what is left where every guess has failed.
        return sum(guess.below(size) for guess in guesses) - known + BROAD * math.log(size / low) / math.log(top / low)

    whole = below(high) if high else BROAD + sum(guess.weight for guess in guesses) - known
    start, end = math.log(low), math.log(top)
    for _ in range(30):
        middle = (start + end) / 2
        start, end = (middle, end) if below(math.exp(middle)) < share * whole else (start, middle)
    return math.exp(end)


def _aim(attempts: Sequence[Attempt], guesses: list[_Guess], low: int, high: int | None, gap: int) -> tuple[float, str]:
    """Where to look: below the limit while a fit still teaches, then where one attempt may end the search."""
    if high is None:
        if not guesses:
            return 4 * low, "memory unknown: up to four times the largest fit"
        middle = _quantile(guesses, 0.5, low, None)
        # A fit near the limit tells where it is; an OOM only that it was passed.
        wanted = min(_quantile(guesses, 0.3 if middle > 2 * low else 0.4, low, None), middle - 0.5 * gap)
        return max(wanted, low + gap), f"the memory used so far points to a limit near {middle:.0f}"
    if high - low <= 2 * gap:
        return high - gap, f"fit or not, {high - gap} ends the search"
    recent = [attempt.fits for attempt in attempts[-PATIENCE:]]
    unexpected = any(a.batch_size == high and a.outcome != "oom" for a in attempts)
    if unexpected or not guesses or sum(recent) in (0, PATIENCE):
        return math.sqrt(low * high) if high > 4 * low else (low + high) / 2, f"between {low} and {high}"
    stepped = any(a.fits and low - 2 * gap < a.batch_size < low for a in attempts)
    if 1000 * gap < low and high - low <= 0.01 * low and not stepped:
        # An exact search among thousands: what fits may differ from size to size, and then the next one may end it.
        return low + gap, f"{high} does not fit, perhaps {low + gap} does not either"
    wanted = _quantile(guesses, 0.4, low, high)
    return min(max(wanted, low + gap), high - gap), f"between {low} and {high}, by the memory used so far"


def _affordable(wanted: float, low: int, high: int | None, gap: int, tried: int) -> float:
    """`wanted`, moved so that bisection can always end an exact search within 2 * log2(limit) + 4 attempts."""

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


def _safe(points: list[_Point], limit: int, prior: Prior | None, low: int, high: int | None) -> tuple[float, str]:
    """The largest size that every model of memory, taken at its worst, puts within the limit."""
    if high is not None or not points or points[-1].size != low:
        return 0, "and nothing larger is known to be safe"
    last, size = points[-1], math.inf
    room = limit * last.allocated / last.reserved - last.activation - 2 * last.noise
    if prior is not None:
        guess = _prior_guess(points, room + last.activation - last.allocated, last.noise, prior)
        size = guess.size * math.exp(-2.5 * guess.spread) if guess.weight else math.inf
    if len(points) > 1:
        span, slope, error, _, curvature = _curve(points)
        slope += 2 * error + curvature * span
        if points[2:]:
            slope = max(slope, _curve(points[:-1])[1])
        # Further away the curve may get steeper than it ever was: take half of the room, then look again.
        half = max(1.25 * low, low + _reach(0.5 * room, slope, curvature))
        size = min(size, low + _reach(room, slope, curvature), half)
    elif prior is None:
        # If the optimizer's peak is the higher, activations are a small part of it; else up to half of the peak.
        size = low + low * room / last.activation / (0.15 if last.activation < last.allocated else 0.5)
    return size, "the next step that is sure to fit gains too little"
