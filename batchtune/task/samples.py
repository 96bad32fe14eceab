"""Which samples of a training set make its worst batch: the largest, and those that are larger in one dimension."""

from __future__ import annotations

import dataclasses
import functools
import random
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from batchtune.device.host import anonymous_bytes
from batchtune.errors import kind_of
from batchtune.protocol.data import SamplesSeen
from batchtune.units import size as as_text

LOOK_SECONDS = 2.0
_MOST_NAMED = 4
_BYTES = ""  # among the sizes of a sample, that of all of it
_MUCH_BYTES, _MOSTLY = 16 << 20, 0.5  # in memory, and as a share of what came
_ENOUGH_SAMPLES = 16  # to tell it from what a library takes once
_NEXT_QUANTILE = 1.3  # times as many samples are larger
_DEEPEST, _FEW = 3, 64  # containers in each other within an object, and what is in one that is no vocabulary
_BY_ROW, _BY_COLUMN = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_HELD_BY = {  # a sparse tensor's dense ones, by its layout
    "torch.sparse_coo": ("_indices", "_values"),
    "torch.sparse_csr": _BY_ROW,
    "torch.sparse_bsr": _BY_ROW,
    "torch.sparse_csc": _BY_COLUMN,
    "torch.sparse_bsc": _BY_COLUMN,
}


def find_largest(
    samples: Iterable[tuple[int, object]],
    total: int | None,
    *,
    seconds: float = LOOK_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[SamplesSeen, list[object]]:
    """Looks at samples, each with its place, for so many seconds.

    `total` counts all there are; None: nobody knows, or no more than can be read. Returns what was seen, and the
    samples of the worst batch, the largest first: in each dimension one of them is as large as any.
    """
    deadline, before = clock() + seconds, None
    largest: dict[str, tuple[int, int, object]] = {}  # size, place and sample
    smallest: dict[str, int] = {}
    every: list[tuple[int, int]] = []  # bytes and place
    seen, is_all = 0, True
    for place, sample in samples:
        seen += 1
        before = anonymous_bytes() if seen == 1 else before  # a set may be loaded as a whole with its first sample
        sizes = sizes_of(sample)
        every.append((sizes[_BYTES], place))
        for name, size in sizes.items():
            if name not in largest or size > largest[name][0]:
                largest[name] = (size, place, sample)
            smallest[name] = min(size, smallest.get(name, size))
        if clock() >= deadline:
            is_all = seen == total
            break
    chosen: dict[int, object] = {}
    for name in sorted(largest, key=lambda name: (name != _BYTES, -largest[name][0])):
        size, place, sample = largest[name]
        if all(sizes_of(other).get(name, 0) < size for other in chosen.values()):
            chosen[place] = sample
    ranges = {name: (smallest[name], size) for name, (size, _, _) in largest.items() if name != _BYTES}
    differing = {name: both for name, both in ranges.items() if both[0] != both[1]}
    told = SamplesSeen(
        places=tuple(chosen),
        seen=seen,
        total=total,
        is_all=is_all,
        differing=differing,
        quantiles=_quantiles(every) if differing else (),
        kept_bytes=_kept_bytes(before, anonymous_bytes(), [size for size, _ in every], len(largest)),
    )
    return told, list(chosen.values())


def _kept_bytes(before: int | None, after: int | None, sizes: list[int], held: int) -> int | None:
    """What a sample has left in memory, where that is much and about what came; None where it is not.

    The look itself holds so many samples and the last one, at the most the largest.
    """
    others = sorted(sizes)[: -held - 1]
    grown = (after or 0) - (before or after or 0) - (sum(sizes) - sum(others))
    least, most = max(_MUCH_BYTES, _MOSTLY * sum(others)), sum(others) / _MOSTLY**2
    return grown // len(others) if len(others) >= _ENOUGH_SAMPLES and least <= grown <= most else None


def _quantiles(every: list[tuple[int, int]]) -> tuple[tuple[float, int], ...]:
    """Of all sizes with their places some forty, close to each other near the largest: a batch is as large as that."""
    every.sort(reverse=True)
    found, larger = [], 0
    while larger < len(every):
        found.append((larger / len(every), every[larger][1]))
        larger = max(larger + 1, int(larger * _NEXT_QUANTILE))
    return tuple(found)


def in_random_order(size: int) -> Iterator[int]:
    """All places of a set of any size, in the same order each time, which costs nothing before the first."""
    dice, moved = random.Random(0), dict[int, int]()  # a shuffle that keeps only what it has moved
    for last in range(size - 1, -1, -1):
        at = dice.randint(0, last)
        yield moved.get(at, at)
        moved[at] = moved.pop(last, last)


def longest_by_column(data: Any) -> list[int]:
    """The place of the longest sample where the set has a column `length`, as those of Hugging Face may have."""
    if "length" not in (getattr(data, "column_names", None) or ()):
        return []
    lengths = list(data["length"])
    return [max(range(len(lengths)), key=lengths.__getitem__)]


def unseen_warnings(seen: SamplesSeen | None) -> list[str]:
    """One where samples differ in size and only some were looked at, with what was seen."""
    if seen is None or seen.is_all or not seen.differing:
        return []
    ranges = [f"{name} from {least:,} to {most:,}" for name, (least, most) in seen.differing.items()]
    of = f" of {seen.total:,}" if seen.total is not None else ""
    seen_of = f"the {seen.seen:,}{of} that {LOOK_SECONDS:g} s sufficed for had {', '.join(ranges[:_MOST_NAMED])}"
    remedy = "write make_batch(batch_size) with the largest there is"
    return [f"samples differ in size, and {seen_of}: a larger one needs more memory than was found; {remedy}"]


def kept_warnings(seen: SamplesSeen | None) -> list[str]:
    """One where the training set keeps what it loads, which attempts at a batch size do not count."""
    if seen is None or not seen.kept_bytes:
        return []
    all_of_them = f", up to {as_text(seen.total * seen.kept_bytes)} of all {seen.total:,}" if seen.total else ""
    text = f"the training set seems to keep what it has loaded, {as_text(seen.kept_bytes)} of a sample{all_of_them}"
    return [f"{text}: that comes on top of the peak that was found; leave so much free, or load it at import"]


def sizes_of(sample: object) -> dict[str, int]:
    """The sizes of a sample: in bytes under no name, and of each dimension of what is in it."""
    found = {_BYTES: tensor_bytes(sample)}
    for name, size in lengths_in(sample):
        found[name] = max(size, found.get(name, 0))
    return found


def lengths_in(value: object, name: str = "") -> Iterator[tuple[str, int]]:
    """The length of each dimension of what is in a sample or batch, with its name."""
    parts = _parts(value)
    shape = getattr(value, "shape", None)
    if parts is not None:
        for key, part in parts.items():
            yield from lengths_in(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, tuple):
        for index, part in enumerate(value):
            yield from lengths_in(part, f"{name}[{index}]")
    elif isinstance(value, list | str | bytes):
        yield name or "length", len(value)
        if isinstance(value, list) and not isinstance(value[0] if value else 0, int | float):
            for part in value:
                yield from lengths_in(part, f"{name}[]")
    elif shape is not None:
        yield from ((f"{name}.shape[{index}]".lstrip("."), int(size)) for index, size in enumerate(shape))


def tensor_bytes(value: object) -> int:
    """Bytes of the tensors in a sample or batch of nested lists, tuples, dicts and objects made of such.

    Arrays count by their nbytes, sparse tensors by what they hold, numbers (a tokenizer's lists of them) as what torch
    makes of them.
    """
    parts = _parts(value)
    if parts is not None:
        return sum(tensor_bytes(item) for item in parts.values())
    if isinstance(value, list | tuple):
        if value and all(type(item) in (int, float) for item in value):
            return 8 * len(value)
        return sum(tensor_bytes(item) for item in value)
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int | float):
        return 8
    held = _HELD_BY.get(str(getattr(value, "layout", "")))  # whose nbytes torch refuses, or gives as of a dense one
    return sum(tensor_bytes(getattr(value, name)()) for name in held) if held else int(getattr(value, "nbytes", 0))


def digest(value: Any, before: int = 0) -> int:
    """A number that follows from the values in a sample or batch, of tensors from their sums.

    Raises:
        TypeError: it has a value by which nothing can be told, such as an object of the user's own.
    """
    parts = _parts(value)
    value = list(parts.values()) if parts is not None else value
    if isinstance(value, list | tuple):
        return functools.reduce(lambda found, each: digest(each, found), value, before)
    if _is_tensor(value):
        value = float(value.sum())
    if not isinstance(value, int | float | str | bytes):
        raise TypeError(kind_of(value))
    return zlib.crc32(repr(value).encode(), before)


def _parts(value: object) -> Mapping[Any, object] | None:
    """What a dict or an object (a dataclass, a graph of PyG, a batch of the user's own) is made of; None for others."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _attributes(value)
    if hasattr(value, "dtype") or hasattr(value, "shape"):
        return None
    to_dict = getattr(value, "to_dict", None)
    made = to_dict() if callable(to_dict) else None
    if isinstance(made, Mapping):
        return made
    if isinstance(value, list | tuple | str | bytes | int | float | type) or hasattr(value, "nbytes"):
        return None
    # whatever else it refers to, such as a vocabulary, the data set or its neighbours in a graph, is no part of it
    own = {name: each for name, each in _attributes(value).items() if not isinstance(each, int | float)}
    found = {name: data for name, each in own.items() if (data := _data_of(each)) is not None}
    return found if any(map(_has_tensor, found.values())) else None


def _attributes(value: object) -> dict[str, object]:
    """By name, those in its dict and in its slots."""
    slots = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each) if hasattr(value, name)]
    return {name: getattr(value, name) for name in names if not name.startswith("__")} | getattr(value, "__dict__", {})


def _data_of(value: object, deepest: int = _DEEPEST) -> object:
    """A tensor, a number, or what a list, tuple or dict has of them or of such; None for others, such as objects."""
    if isinstance(value, int | float) or _is_tensor(value):
        return value
    if deepest == 0 or not value or not isinstance(value, list | tuple | dict):
        return None
    if len(value) > _FEW and (isinstance(value, dict) or _data_of(value[0], deepest - 1) is None):
        return None  # a vocabulary
    if isinstance(value, dict):
        return {name: data for name, each in value.items() if (data := _data_of(each, deepest - 1)) is not None} or None
    found = [data for each in value if (data := _data_of(each, deepest - 1)) is not None]
    return (tuple(found) if isinstance(value, tuple) else found) or None


def _has_tensor(data: object) -> bool:
    within = data.values() if isinstance(data, dict) else data if isinstance(data, list | tuple) else ()
    return _is_tensor(data) or any(map(_has_tensor, within))


def _is_tensor(value: object) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")
