"""Figures as people read them: bytes, seconds, rates."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from batchtune.document import Interval

_TIMES = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_BYTES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_LARGE = 4 * _BYTES["GiB"]
LEAST_PEAK = _BYTES["MiB"]
"""A measured peak below it is nothing: those of a CPU are of the whole process, whose own memory varies by more."""


def counted(count: int, name: str) -> str:
    """So many of something."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def size(number: float | None, least: float = 0) -> str:
    """Bytes with a binary unit; '-' where not measured, '< 1 MiB' where less than the least that can be told."""
    if number is None:
        return "-"
    if number < least:
        return f"< {size(least)}"
    for unit in ("B", "KiB", "MiB"):
        if abs(number) < 1024:  # noqa: PLR2004
            return f"{number:,.0f} {unit}"
        number /= 1024
    return f"{number:,.1f} GiB"


def typed_size(bytes_: int) -> str:
    """Bytes as an option takes them, exactly."""
    return f"{bytes_ >> 20}MiB" if bytes_ % 2**20 == 0 else str(bytes_)


def duration(seconds: float | None) -> str:
    """Seconds with a unit that leaves three digits; '-' where not measured."""
    if seconds is None:
        return "-"
    if seconds == 0:
        return "0 s"
    rounded = float(f"{seconds:.3g}")  # which may be one of the next unit
    if rounded < 1e-3:  # noqa: PLR2004
        micro = rounded * 1e6
        return f"{micro:.0f} µs" if micro >= 10 else f"{micro:.2g} µs"  # noqa: PLR2004
    if rounded < 1:
        return f"{rounded * 1e3:.3g} ms"
    if rounded < 120:  # noqa: PLR2004
        return f"{rounded:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"  # noqa: PLR2004


def number(value: float | None, digits: int = 3) -> str:
    """A plain figure; '-' where not measured."""
    if value is None:
        return "-"
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if abs(float(text)) >= 1000 else text  # noqa: PLR2004


def share(value: float | None) -> str:
    """A share of one as per cent; '-' where not measured."""
    return "-" if value is None else f"{value:.0%}"


def interval(value: Interval | None, unit: str = "") -> str:
    """A median with its bounds, all with as many decimals; '-' where not measured.

    Of runs that were cut off it is a least value: what each was given is less than it would have taken.
    """
    if value is None:
        return "-"
    median, low, high = _alike([value.median, value.low, value.high])
    if value.at_least:
        return f"at least {median}{unit}"
    between = bounds(low, high)
    return f"{median}{unit} ({between})" if between else f"{median}{unit}"


def bounds(low: str, high: str) -> str:
    """The bounds of an interval; none of one run, or of runs that are all alike."""
    return "" if low == high else f"{low} to {high}"


def time_interval(value: Interval | None) -> str:
    """Seconds with their bounds, in the unit that suits the median; '-' where not measured."""
    if value is None:
        return "-"
    unit, scale = time_unit(value.median)
    scaled = {"median": value.median / scale, "low": value.low / scale, "high": value.high / scale}
    return interval(value.model_copy(update=scaled), f" {unit}")


def time_unit(typical_seconds: float) -> tuple[str, float]:
    """The unit for times of about so many seconds, and how many seconds it is.

    Minutes from ten on, hours from two on: below, seconds and minutes are what people count in.
    """
    if typical_seconds >= 10 * _TIMES["min"]:
        unit = "h" if typical_seconds >= 2 * _TIMES["h"] else "min"
    elif typical_seconds >= 1 or typical_seconds <= 0:
        unit = "s"
    else:
        unit = "ms" if typical_seconds >= _TIMES["ms"] else "µs"
    return unit, _TIMES[unit]


def times(values: Sequence[float | None]) -> tuple[str, list[str]]:
    """Seconds of a column in one unit, their decimal points under one another; gives the unit and the texts."""
    known = [value for value in values if value is not None]
    unit, scale = time_unit(statistics.median(known) if known else 1.0)
    return unit, aligned([number(None if value is None else value / scale) for value in values])


def bytes_unit(largest: float) -> tuple[str, int]:
    """The unit for bytes of which these are the most, and how many bytes it is."""
    unit = "GiB" if largest >= _LARGE else "MiB" if largest >= _BYTES["MiB"] else "KiB"
    return unit, _BYTES[unit]


def sizes(values: Sequence[float | None], least: float = 0) -> tuple[str, list[str]]:
    """Bytes of a column in one unit, their decimal points under one another; gives the unit and the texts."""
    unit, scale = bytes_unit(max([least, *(value for value in values if value is not None)]))
    shown = [None if value is None else max(value, least) / scale for value in values]
    below = [value is not None and value < least for value in values]
    return unit, aligned([("< " if less else "") + number(value) for value, less in zip(shown, below, strict=True)])


def aligned(texts: Sequence[str]) -> list[str]:
    """Figures of a right-justified column with their decimal points under one another."""
    if any("e" in text for text in texts):
        return list(texts)
    tails = [len(text.partition(".")[2]) + ("." in text) for text in texts]
    return [text + " " * (max(tails, default=0) - tail) for text, tail in zip(texts, tails, strict=True)]


def _alike(values: Sequence[float]) -> list[str]:
    """Figures with as many decimals as the one with the most needs for three digits."""
    texts = [number(value) for value in values]
    if any("e" in text for text in texts):
        return texts
    decimals = max(len(text.partition(".")[2]) for text in texts)
    return [f"{value:,.{decimals}f}" for value in values]
