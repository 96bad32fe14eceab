"""Figures as people read them: bytes, seconds, rates."""

from __future__ import annotations


def size(number: float | None) -> str:
    """Bytes with a binary unit; '-' where not measured."""
    if number is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if abs(number) < 1024:  # noqa: PLR2004
            return f"{number:,.0f} {unit}"
        number /= 1024
    return f"{number:,.1f} GiB"


def duration(seconds: float | None) -> str:
    """Seconds with a unit that leaves three digits; '-' where not measured."""
    if seconds is None:
        return "-"
    if seconds == 0:
        return "0 s"
    if seconds < 1e-3:  # noqa: PLR2004
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:  # noqa: PLR2004
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"  # noqa: PLR2004


def number(value: float | None, digits: int = 3) -> str:
    """A plain figure; '-' where not measured."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"  # noqa: PLR2004


def share(value: float | None) -> str:
    """A share of one as per cent; '-' where not measured."""
    return "-" if value is None else f"{value:.0%}"
