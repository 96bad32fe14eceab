"""Durations and sizes as people write them: `10m`, `20GiB`."""

from __future__ import annotations

import re

_NUMBER = r"(?:[0-9]{1,30}(?:\.[0-9]*)?|\.[0-9]+)"
_UNIT_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_UNIT_BYTES = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("", 1000), ("ib", 1024))
}
TOO_FEW_BYTES, TOO_MANY_BYTES = 2**20, 2**60


def parse_seconds(value: object) -> object:
    """Seconds from `90`, `"90s"`, `"1.5m"`, `"2h"`; other types are left to the validator.

    Raises:
        ValueError: the text is not a duration.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(rf"\s*({_NUMBER}(?:e-?[0-9]+)?)\s*([a-z]*)\s*", value.lower())
    if not match or (match[2] or "s") not in _UNIT_SECONDS:
        raise ValueError(f"{value[:60]!r} is not a duration; write 90s, 10m or 1h")
    return float(match[1]) * _UNIT_SECONDS[match[2] or "s"]


def parse_bytes(value: object) -> object:
    """Bytes of memory from `24000000000`, `"24GB"`, `"20GiB"`; other types are left to the validator.

    Raises:
        ValueError: the text is not a size, or a number so small that its unit must be missing.
    """
    if not isinstance(value, str):
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < TOO_FEW_BYTES:
            raise ValueError(f"{value} is {value} bytes, too few to train in; write the unit: {value}GiB or {value}MiB")
        return value
    match = re.fullmatch(rf"\s*({_NUMBER})\s*([a-z]*)\s*", value.lower())
    size = int(float(match[1]) * _UNIT_BYTES[match[2]]) if match and match[2] in _UNIT_BYTES else TOO_MANY_BYTES
    if size >= TOO_MANY_BYTES:
        raise ValueError(f"{value[:60]!r} is not a size; write 20GiB, 24GB or 500MiB")
    return size if match and match[2] else parse_bytes(size)
