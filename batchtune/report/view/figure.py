"""A figure without any schema behind it: its points and axes, and where on an axis a number lies."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Mark = Literal[
    "fit", "checked", "oom", "failed", "limit", "curve", "measured", "knee", "reading", "other", "today", "recommended",
    "target", "open", "broken", "scored", "prior", "edge", "ring today", "ring recommended", "bar", "inner bar", "gpu",
    "area", "peak",
]  # fmt: skip
"""What the points of a figure are; each renderer has a sign, a line or a bar for those that it draws."""
Point = tuple[float, float]
_MOST_STEPS = 2**53  # from 0 to a tick; beyond it, floats cannot count


@dataclass(frozen=True, slots=True)
class Scale:
    """What shades stand for: its title, texts at some of the values, and whether the least is the best."""

    title: str
    ticks: Mapping[float, str]
    least_is_best: bool = True


@dataclass(frozen=True, slots=True)
class Series:
    """Points of a figure that are drawn and named alike; later ones cover earlier ones."""

    mark: Mark
    name: str  # what the legend calls them; '' where they are not in the legend
    points: Sequence[Point | None]  # (x, y), None between two lines; of a limit, the first alone counts
    hover: Sequence[Sequence[str]] = ()  # lines about each point; none: the points say nothing
    group: int = 0  # which of several precisions they are of
    labels: Sequence[str] = ()
    spread: float | None = None  # each y may be so many times as much, or as little
    shades: Sequence[float] = ()  # a figure for each point, told by its colour
    scale: Scale | None = None

    @property
    def drawn(self) -> list[Point]:
        """The points alone."""
        return [point for point in self.points if point is not None]


def with_points(series: Iterable[Series]) -> list[Series]:
    """Those that a figure and its legend have; a series without a point is in neither."""
    return [each for each in series if each.points]


@dataclass(frozen=True, slots=True)
class Field:
    """What is predicted over a plane: `z` and lines about it, a row for each y; it is drawn at every `step`."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    z: Sequence[Sequence[float]]
    hover: Sequence[Sequence[Sequence[str]]]
    start: float
    end: float
    step: float


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis is called, its unit included, and how it runs."""

    title: str
    log: bool = False  # equal distances are equal ratios
    from_zero: bool = False  # begins at 0 where all values are positive
    whole: bool = False  # its values are whole numbers, and so are its labels; where it is logarithmic, powers of two
    end: float | None = None  # where it ends, if not at the last point
    ticks: Mapping[float, str] | None = None  # texts at some of its values instead of figures


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure; its note says what is too far off to be drawn, and those `below` share its x axis."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    note: str = ""
    field: Field | None = None
    below: Sequence[Plot] = ()


def drawable(points: Iterable[tuple[float, float]], x_axis: Axis, y_axis: Axis) -> list[tuple[float, float]]:
    """The points that have a place on both axes."""

    def known(value: float, axis: Axis) -> bool:
        return math.isfinite(value) and (value > 0 or not axis.log)

    return [(x, y) for x, y in points if known(x, x_axis) and known(y, y_axis)]


@dataclass(frozen=True, slots=True)
class AxisScale:
    """Maps values of an axis to shares of its length, 0 to 1."""

    low: float
    high: float
    axis: Axis

    @classmethod
    def over(cls, values: Sequence[float], axis: Axis) -> AxisScale:
        low = min(values)
        return cls(min(low, 0.0) if axis.from_zero and not axis.log else low, max(values), axis)

    def share(self, value: float) -> float:
        return min(1.0, max(0.0, self.position(value)))

    def position(self, value: float) -> float:
        """The same for a value that may lie beyond the axis."""
        low, at, high = (math.log2(each) if self.axis.log else each / 2 for each in (self.low, value, self.high))
        room = high - low  # of halves: the difference of two large numbers may be infinite
        return (at - low) / room if room > 0 else 0.5

    def with_room(self, beyond: float) -> AxisScale:
        """The same with room around what it was made for, `beyond` times the last value where it begins at 0."""
        if self.axis.log:
            low, high = math.log10(self.low), math.log10(self.high)
            room = max(0.1 * (high - low), 0.08)
            return replace(self, low=10 ** max(low - room, -307.0), high=10 ** min(high + room, 308.0))
        if self.axis.from_zero and self.high > 0:
            return replace(self, high=self.axis.end or min(self.high * beyond, sys.float_info.max))
        room = 0.05 * (self.high / 2 - self.low / 2)
        furthest = sys.float_info.max
        return replace(self, low=max(self.low - room, -furthest), high=min(self.high + room, furthest))

    def round_values(self, most: int) -> list[float]:
        """Round values within the scale, ascending; of batch sizes on a logarithmic one, powers of two."""
        if self.axis.log and not self.axis.whole and len(found := _round_ratios(self.low, self.high, most)) > 1:
            return found
        if not (self.axis.log and self.axis.whole):
            return _round_values(self.low, self.high, most, least_step=float(self.axis.whole))
        first, last = math.ceil(math.log2(self.low)), math.floor(math.log2(self.high))
        step = max(1, math.ceil((last - first + 1) / most))
        powers = [2.0**power for power in range(first, min(last + 1, sys.float_info.max_exp), step)]
        return powers or [self.low]


def _round_ratios(low: float, high: float, most: int) -> list[float]:
    """Digits of each decade between two values, as many as have room, or every so many decades."""
    powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    for digits in ((1, 2, 3, 4, 5, 6, 8), (1, 2, 5), (1,)):
        found = [value for power in powers for digit in digits if low <= (value := float(f"{digit}e{power}")) <= high]
        if len(found) <= most:
            return found
    return found[:: math.ceil(len(found) / most)]


def _round_values(low: float, high: float, most: int, *, least_step: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between two values; the values themselves where there are none."""
    spread = high / 2 - low / 2
    if not spread / most > 0:
        return [low, high]
    power = 10.0 ** math.floor(math.log10(spread / most))
    for step in (max(power * factor, least_step) for factor in (1, 2, 5, 10, 20, 50)):
        if not 0 < step < math.inf or max(abs(low / step), abs(high / step)) > _MOST_STEPS:
            break
        first, last = math.ceil(low / step), math.floor(high / step)
        if last - first < most:
            return [multiple * step for multiple in range(first, last + 1)] or [low, high]
    return [low, high]


def tick_text(value: float) -> str:
    """A short label."""
    if value == 0 or 1e-4 <= abs(value) < 1e3:  # noqa: PLR2004
        return f"{value:.4g}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.3g}"  # noqa: PLR2004
