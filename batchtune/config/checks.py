"""What people write, checked: durations and sizes such as `10m` and `20GiB`, and the values of options.

A check of an option takes its flag and what was given, and returns that as it is used, or raises a UsageError.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import re
from collections.abc import Callable, Iterable
from typing import Literal, TypeGuard, get_args

from batchtune.errors import UsageError, kind_of
from batchtune.vocabulary import AskedLengths, Executor, Length, Precision, Strategy, dimensions, length_text, order

_NUMBER = r"(?:[0-9]{1,30}(?:\.[0-9]*)?|\.[0-9]+)"
_UNIT_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_UNIT_BYTES = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("", 1000), ("ib", 1024))
}
TOO_FEW_BYTES, TOO_MANY_BYTES = 2**20, 2**60
PRECISIONS: tuple[str, ...] = ("auto", *get_args(Precision), "all")
STRATEGIES: tuple[str, ...] = get_args(Strategy)
EXECUTORS: tuple[str, ...] = get_args(Executor)
SOLVED = re.compile(r"\s*([^\s<>=]+)\s*([<>])=?\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*")
"""A metric, whether it must come below or above, and what."""
MOST_LENGTHS = 64
_LARGEST = 2**31 - 1  # that a result document takes as a count


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


def text(flag: str, value: object) -> str:
    """A text or a path; whoever uses it knows which."""
    if not isinstance(value, str | os.PathLike):
        raise UsageError(f"{flag} {value}: must be a text, not {kind_of(value)}")
    return os.fspath(value)


def switch(flag: str, value: object) -> bool:
    """Yes or no."""
    if not isinstance(value, bool):
        raise UsageError(f"{flag} {value}: must be True or False, not {kind_of(value)}")
    return value


def count(flag: str, value: object) -> int:
    """A whole number from 1 up."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise UsageError(f"{flag} {value}: must be an int, not {kind_of(value)}")
    number = int(value)
    if number < 1:
        raise UsageError(f"{flag} {value}: must be at least 1")
    if number > _LARGEST:
        raise UsageError(f"{flag} {value}: must be at most {_LARGEST}")
    return number


def share(flag: str, value: object) -> float:
    """At least 0 and less than 1."""
    if not _is_number(value) or not 0 <= value < 1:
        raise UsageError(f"{flag} {value}: is a share: at least 0 and less than 1")
    return float(value)


def percentage(flag: str, value: object) -> float:
    """A share as people write it: "5%" or 0.05."""
    text = str(value).strip()
    try:
        return share(flag, float(text.removesuffix("%")) / (100 if text.endswith("%") else 1))
    except (ValueError, UsageError):
        raise UsageError(f"{flag} {text[:20]}: is a share of less than one: write 5% or 0.05") from None


def duration(flag: str, value: object) -> float:
    """Seconds greater than 0, or text such as "2m"."""
    try:
        seconds = parse_seconds(value)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None
    if not _is_number(seconds) or not seconds > 0:
        raise UsageError(f"{flag} {value}: must be seconds greater than 0, or text such as 2m")
    return float(seconds)


def rate(flag: str, value: object) -> float:
    """A learning rate greater than 0."""
    with contextlib.suppress(ValueError):
        value = float(value) if isinstance(value, str) else value
    if not _is_number(value) or not 0 < value < math.inf:
        raise UsageError(f"{flag} {value}: must be a number greater than 0, for example 1e-3")
    return float(value)


def solved(flag: str, value: object) -> str:
    """A metric with what it must come to, such as "val_loss<0.3"."""
    if isinstance(value, str) and SOLVED.fullmatch(value):
        return value
    raise UsageError(f"{flag} {value}: write '{flag} \"val_loss<0.3\"', or '{flag} \"accuracy>0.9\"'")


def memory(flag: str, value: object) -> int:
    """Bytes greater than 0, or text such as "20GiB"."""
    try:
        found = parse_bytes(value)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None
    if not _is_number(found) or not 0 < found < math.inf:
        raise UsageError(f"{flag} {value}: must be more than 0 bytes")
    return int(found)


def lengths(flag: str, value: object) -> AskedLengths:
    """Ascending, each once: from "128,256", "128x64,256x128", or numbers and tuples of them; or `auto`."""
    if value == "auto":
        return "auto"
    given = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    found = [_length(flag, each) for each in given]
    if not found:
        raise UsageError(f"{flag}: names no length; write auto, 128,256,512, or 128x64,256x128")
    if len({len(dimensions(each)) for each in found}) > 1:
        raise UsageError(f"{flag} {','.join(map(length_text, found))[:60]}: some have more numbers than others")
    if len(set(found)) > MOST_LENGTHS:
        raise UsageError(f"{flag}: names {len(set(found))} lengths; at most {MOST_LENGTHS} are probed")
    return tuple(sorted(set(found), key=order))


def _length(flag: str, value: object) -> Length:
    written = value.lower().split("x") if isinstance(value, str) else value
    parts = written if isinstance(written, tuple | list) else [written]
    with contextlib.suppress(UsageError, ValueError):
        found = tuple(count(flag, int(each) if isinstance(each, str) else each) for each in parts)
        if found:
            return found[0] if len(found) == 1 else found
    shown = str(value)[:40].strip() or "(nothing)"
    raise UsageError(f"{flag} {shown}: is no length; write auto, 128,256,512, or 128x64,256x128")


def precisions(flag: str, value: object) -> tuple[str, ...]:
    """Names, of which `all` stands alone."""
    names = one_or_several(flag, value)
    unknown = [name for name in names if name not in PRECISIONS]
    if unknown:
        raise UsageError(f"{flag} {unknown[0]}: unknown; use {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}")
    if "all" in names and len(names) > 1:
        raise UsageError(f"{flag} {', '.join(names)}: name all alone")
    return names


def one_or_several(flag: str, value: object) -> tuple[str, ...]:
    """Texts, of which one may stand for itself."""
    given = (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    if not given:
        raise UsageError(f"{flag} (none): name at least one")
    return tuple(text(flag, each) for each in given)


def one_of(choices: tuple[str, ...]) -> Callable[[str, object], str]:
    """A check for one of these words."""

    def check(flag: str, value: object) -> str:
        if value not in choices:
            raise UsageError(f"{flag} {value}: unknown; use {' or '.join(choices)}")
        return str(value)

    return check


strategy, executor = one_of(STRATEGIES), one_of(EXECUTORS)


def workers(flag: str, value: object) -> int | Literal["auto"] | None:
    """A whole number from 1 up, which may be a text, or auto; nothing, as of a variable that is not set, is none."""
    if value == "auto":
        return "auto"
    if value == "":
        return None
    try:
        return count(flag, int(value) if isinstance(value, str) else value)
    except ValueError:
        raise UsageError(f"{flag} {value}: write a number from 1 up, or auto: as many as there are devices") from None


def observer(flag: str, value: object) -> object:
    """What has the methods of an `Observer`."""
    from batchtune.observer import Observer  # takes long to load

    if isinstance(value, type) or not isinstance(value, Observer):
        raise UsageError(f"{flag} {value}: must be a batchtune.observer.Observer, not {kind_of(value)}")
    return value


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
