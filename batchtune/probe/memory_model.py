"""Where memory ends, as guesses: what the peaks of the attempts so far say about sizes that were not tried.

A guess is a size with a spread and a weight; several models of memory (straight, bent, quadratic, an estimate made
beforehand) each give theirs, and the search weighs them. None of them is ever the answer.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from batchtune.document import Attempt
from batchtune.vocabulary import LARGEST

MAX_GROWTH = 128.0  # in one step: memory that hardly grows says nothing about sizes further away
REFUTED = 0.7  # a prior that is off by more than this factor (its logarithm) in growth is not used
FORESEEN = 0.01  # of a measured peak: an estimate of it that is off by less knows the model
PRIOR_SCALE_ERROR = 0.07  # standard deviation of the prior's scale before anything was measured
NOISE, NOISE_OF_RESERVED = 0.001, 0.03  # share of a peak: of allocated bytes; of reserved ones, if that is all (CPU)
KEPT, KEPT_DOUBT = (0.1, 0.5, 0.9), 0.1  # shares of reserved - allocated that stay at the limit, without a prior
IN_USE, IN_USE_DOUBT = 2.0, 0.02  # with one: the weight of a guess by which all of it stays, and its doubt
HALF_KEPT, HALF_DOUBT = 0.5, 0.25  # what is left of reserved - allocated at the limit, where that is not so
CUT_UP = 0.03  # of the limit: what is left of it once the allocator gives back all that it can
GIVES_BACK = 0.9  # of the share that was kept at a smaller size: with less, memory is being given back
ONE_POINT = 6.0  # after one fit: as if a sixth of its memory grew with the batch
TAIL, TAIL_SPREAD = 0.1, 2.0  # of a guess: the weight of a Cauchy distribution, and its width in spreads
LEAST_ERROR, LEAST_NOISE = 0.15, 0.1  # of a slope's error and of noise: so much is believed in whatever three fits say
DRIFT = 0.05  # how far off an extrapolation may be, per factor e
FINEST = 1e-8  # of a quantile's logarithm: a twentieth of a sample at the ceiling of a search
BROAD, BENT, CURVED, FROM_PRIOR = 0.03, 0.15, 4.0, 6.0  # weights of guesses; that of a straight line is 1


class PeakEstimate(Protocol):
    """What was expected before anything was tried; may be off by a tenth and an offset."""

    @property
    def expected(self) -> int:
        """The largest batch size within the limit; 0 where none is expected to fit."""

    @property
    def start(self) -> int:
        """A size about a hundredth below it which is expected to fit, too: at some sizes, memory has holes."""

    def allocated_bytes(self, batch_size: int) -> float:
        """Peak allocated bytes of a batch size; asked some dozens of times."""


class Point(NamedTuple):
    """What a fit used, in bytes; `activation` is the peak of forward and backward, without the optimizer's."""

    size: int
    activation: float
    allocated: float
    reserved: float
    noise: float


class Guess(NamedTuple):
    """The limit is at `size` samples, give or take `spread` (standard deviation of the logarithm)."""

    weight: float
    size: float
    spread: float

    def below(self, log_size: float) -> float:
        """The weight of what lies below a size, which is given by its logarithm."""
        # Once an attempt has contradicted a guess, its tail is all that is left: a normal one would hug that attempt.
        off = (log_size - math.log(self.size)) / self.spread
        wide = 0.5 + math.atan(off / TAIL_SPREAD) / math.pi
        return self.weight * ((1 - TAIL) * 0.5 * math.erfc(-off / math.sqrt(2)) + TAIL * wide)


def measured_points(attempts: Sequence[Attempt]) -> list[Point]:
    """The fits whose memory is known, by size."""
    points = []
    for attempt in {attempt.batch_size: attempt for attempt in attempts}.values():
        allocated = attempt.peak_allocated_bytes or attempt.peak_reserved_bytes
        if attempt.fits and allocated:
            activation = attempt.forward_backward_peak_bytes or allocated
            noise = activation * (NOISE if attempt.peak_allocated_bytes else NOISE_OF_RESERVED)
            reserved = max(allocated, attempt.peak_reserved_bytes or 0)
            points.append(Point(attempt.batch_size, activation, allocated, reserved, noise))
    return sorted(points)


def guesses_of(points: list[Point], limit: int, prior: PeakEstimate | None) -> list[Guess]:
    """Where the limit may lie, by each model of memory that the points allow, for each share of waste."""
    guesses: list[Guess] = []
    grown = growth(points) if len(points) > 1 else None
    for weight, allowed, doubt in _ends(points, limit, estimated=prior is not None) if points else ():
        last = points[-1]
        blur = math.hypot(last.noise * (grown.noise if grown else 1.0), doubt * limit)
        found = [] if prior is None else [prior_guess(points, allowed - last.allocated, blur, prior)]
        room = max(allowed - last.activation, -0.3 * last.activation)
        if grown:
            found += _curve_guesses(grown, last.size, room, blur)
        elif prior is None:
            found.append(Guess(1.0, last.size * max(1.1, 1 + ONE_POINT * room / last.activation), 1.0))
        guesses += [guess._replace(weight=weight * guess.weight) for guess in found]
    return guesses


def _ends(points: list[Point], limit: int, *, estimated: bool) -> list[tuple[float, float, float]]:
    """Allocated bytes at which memory may end: weight, bytes and doubt (a share of the limit).

    Reserved bytes are limited but allocated ones extrapolated. What the allocator holds beyond those are blocks that
    are in use in part, which it keeps, and free ones, which it gives back when it must. Measured with torch's own
    allocator: all that is held stays, or all but some hundredths of the limit is given back.
    """
    last = points[-1]
    kept = last.reserved / last.allocated - 1
    if not estimated:
        return [(1.0, limit / (1 + share * kept), KEPT_DOUBT * kept) for share in KEPT]
    earlier = [each.reserved / each.allocated - 1 for each in points[:-1] if last.size < 2 * each.size]
    if any(kept < GIVES_BACK * each for each in earlier):
        return [(1.0, (1 - CUT_UP) * limit, CUT_UP)]
    half = 1.0, limit / (1 + HALF_KEPT * kept), HALF_DOUBT * kept
    return [half, (IN_USE, limit / (1 + kept), IN_USE_DOUBT * kept)]


class Growth(NamedTuple):
    """How activations grow up to the largest fit.

    Attributes:
        span: samples between the two fits that tell the slope.
        slope: bytes a sample.
        error: the slope's standard deviation.
        curvature: bytes a sample squared, if it shows; else 0.
        worst: curvature at worst.
        noise: share of the noise that was feared which three fits still allow.
    """

    span: float
    slope: float
    error: float
    curvature: float
    worst: float
    noise: float = 1.0


def growth(points: list[Point]) -> Growth:
    """The growth that two or more fits show."""
    last = points[-1]
    middle = next((point for point in points[-2::-1] if point.size <= 0.9 * last.size), points[0])
    first = next((point for point in points[::-1] if point.size <= 0.7 * middle.size), None)
    span = last.size - middle.size
    slope, error = max(last.activation - middle.activation, 0.5 * last.noise) / span, 1.4 * last.noise / span
    worst = slope / (last.size + middle.size)  # as if all growth were with the square of the size
    if first is None:
        return Growth(span, slope, error, 0.0, worst)
    run, width = middle.size - first.size, last.size - first.size
    change = slope - (middle.activation - first.activation) / run
    doubt = math.hypot(error, 1.4 * middle.noise / run)
    off_line = abs(change) / doubt  # the nearer three points are to a line, the less noise there is
    shown = change / width if change > 2 * doubt else 0.0
    return Growth(
        span,
        slope,
        error * min(max(off_line, LEAST_ERROR), 1.0),
        shown,
        max(shown, min(worst, max(0.0, change + 2 * doubt) / width)),
        min(max(off_line, LEAST_NOISE), 1.0) if last.noise <= NOISE * last.activation else 1.0,
    )


def reach(room: float, slope: float, curvature: float) -> float:
    """How many samples more until `room` bytes are used."""
    return 2 * room / (slope + math.sqrt(slope * slope + 4 * curvature * max(room, 0.0)))


def _curve_guesses(grown: Growth, last: int, room: float, blur: float) -> list[Guess]:
    """A straight line and a parabola on from the largest fit; `room` is what activations may still grow, in bytes."""
    span, slope, error, shown, worst, _ = grown
    guesses = []
    for weight, curvature in ((1.0, 0.0), (CURVED, shown) if shown else (BENT, worst)):
        ahead = reach(room, slope + curvature * span, curvature)
        size = max(last + ahead, 0.5 * last)
        spread = math.hypot(blur, error * ahead) / slope / size + DRIFT * abs(math.log(size / last))
        guesses.append(Guess(weight, size, min(2.0, spread) + 1e-4))
    return guesses


def prior_guess(points: list[Point], room: float, blur: float, prior: PeakEstimate) -> Guess:
    """The prior, shifted to the largest fit and scaled by the growth measured since the smallest."""
    last, first = points[-1], points[0]
    here, scale, scale_error = prior.allocated_bytes(last.size), 1.0, PRIOR_SCALE_ERROR
    rise, weight = here - prior.allocated_bytes(first.size), FROM_PRIOR
    if rise > 0:
        measured, error = (last.allocated - first.allocated) / rise, 1.4 * last.noise / rise + 0.01
        trust = scale_error**2 / (scale_error**2 + error**2)
        if error < trust and abs(math.log(max(measured, 0.01))) > REFUTED:
            weight = 0.0  # no such curve: the measured one takes over
        scale, scale_error = min(max(1 + trust * (measured - 1), 0.5), 2.0), math.sqrt(trust) * error
    size = max(1, bisect_right(range(1, LARGEST + 1), here + room / scale, key=prior.allocated_bytes))
    step = max(1, size // 50)
    slope = scale * max(prior.allocated_bytes(size + step) - prior.allocated_bytes(size), 1) / step
    return Guess(weight, size, min(1.0, math.hypot(blur, scale_error * room) / slope / size) + 1e-4)


def is_right(prior: PeakEstimate, points: list[Point]) -> bool:
    """Whether the prior has foreseen the peak of the largest fit, so that it may well know the end, too."""
    return bool(points) and abs(points[-1].allocated / prior.allocated_bytes(points[-1].size) - 1) < FORESEEN


def quantile(guesses: list[Guess], share: float, low: int, high: int | None) -> float:
    """The size below which the limit lies with probability `share`, now that it is known to lie in the bracket."""
    start, end = first, last = math.log(low), math.log(high or low * MAX_GROWTH)
    known = sum(guess.below(first) for guess in guesses)

    def below(log_size: float) -> float:
        # The last term is bisection (of logarithms): what is left where every guess has failed.
        return sum(guess.below(log_size) for guess in guesses) - known + BROAD * (log_size - first) / (last - first)

    whole = below(last) if high else BROAD + sum(guess.weight for guess in guesses) - known
    while end - start > FINEST:
        middle = (start + end) / 2
        start, end = (middle, end) if below(middle) < share * whole else (start, middle)
    return math.exp(end)
