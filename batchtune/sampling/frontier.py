"""The lengths that were measured with their largest batches, and which of them a sample belongs to."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from batchtune.errors import UsageError, kind_of

if TYPE_CHECKING:
    from batchtune.document import Document, Length

    Measured = Document | str | os.PathLike[str] | Mapping[Length, int]

_LONGEST_SHOWN = 60  # characters of a value in a message


class Frontier:
    """The buckets of samples, those of the largest batches first.

    Args:
        result: of `batchtune probe --lengths`: itself, its file or run folder; or the largest batch of each length.

    Raises:
        ValueError: the dict is empty, or holds what is no length or no batch size.
        UsageError: the result has no lengths to train with, or cannot be read.
    """

    def __init__(self, result: Measured) -> None:
        measured = [(_numbers(length, "result"), batch) for length, batch in _largest_batches(result).items()]
        if len({len(numbers) for numbers, _ in measured}) > 1:
            shown = ", ".join(_shown(each) for each, _ in measured)
            raise ValueError(f"result: of the lengths {shown} some have more numbers than others")
        measured.sort(key=lambda each: (-each[1], each[0]))
        self.lengths = [numbers for numbers, _ in measured]
        self.batch_sizes = [batch for _, batch in measured]
        self._known: dict[tuple[int, ...], int] = {}

    def bucket_of(self, length: Length, index: int) -> tuple[int, int]:
        """The bucket of the largest batch that a sample fits into, and all numbers of its length together.

        Raises:
            ValueError: the sample is longer than all that was measured, or this is no length; it names `index`.
        """
        numbers = _numbers(length, f"sample {index}")
        if numbers not in self._known:
            self._known[numbers] = self._find(numbers, index)
        return self._known[numbers], sum(numbers)

    def _find(self, numbers: tuple[int, ...], index: int) -> int:
        own, longest = _shown(numbers), _shown(self.lengths[-1])
        if len(numbers) != len(self.lengths[-1]):
            raise ValueError(
                f"sample {index}: its length is {own}, but what was measured are lengths such as {longest}"
            )
        for bucket, edge in enumerate(self.lengths):
            if all(map(operator.le, numbers, edge)):
                return bucket
        raise ValueError(
            f"sample {index}: its length is {own}, longer than the longest measured, {longest}; leave it out, shorten "
            "it, or probe with --lengths up to it"
        )


def _numbers(length: Length, whose: str) -> tuple[int, ...]:
    """A length as a tuple, be it of numpy's numbers or a list."""
    try:
        numbers: tuple[int, ...] = (operator.index(length),)  # type: ignore[arg-type]
    except TypeError:
        try:
            numbers = tuple(map(operator.index, length))  # type: ignore[arg-type]
        except TypeError:
            numbers = ()
    parts = length if isinstance(length, tuple | list) else (length,)
    if not numbers or min(numbers) < 0 or any(isinstance(each, bool) for each in parts):
        shown = f"{length!r}"[:_LONGEST_SHOWN]
        raise ValueError(f"{whose}: its length is {shown}, which is no whole number or tuple of such")
    return numbers


def _shown(numbers: tuple[int, ...]) -> str:
    return str(numbers[0] if len(numbers) == 1 else numbers)


def _largest_batches(result: Measured) -> Mapping[Length, int]:
    from batchtune.document import Document
    from batchtune.report.view.lengths import largest_batches
    from batchtune.result import load_result

    if isinstance(result, Mapping):
        for length, batch in result.items():
            if not isinstance(batch, int) or batch < 1:
                raise ValueError(f"result: the largest batch at length {length} is {batch!r}, no whole number above 0")
        if not result:
            raise ValueError("result: an empty dict; it must have the largest batch of each length")
        return result
    if isinstance(result, str | os.PathLike):
        result = load_result(result)
    if not isinstance(result, Document):
        raise UsageError(f"result is {kind_of(result)}; it must be a result, its path, or a dict {{length: batch}}")
    if result.probe is not None and result.probe.inference:
        raise UsageError("this probe is of inference: it has no batches to train with; probe without --inference")
    return largest_batches(result)
