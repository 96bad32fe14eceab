"""Batches of a loader of the user's own, which may be of another size than was asked for."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from batchtune.errors import EpochTooShortError, UserCodeError
from batchtune.task.samples import lengths_of, tensor_bytes

_AS_ASKED = "its batches must be as large as asked for"


@dataclass(frozen=True)
class OwnLoader:
    """A `train_loader`.

    Attributes:
        batches: of an epoch, by batch size.
        count: of the samples in a batch; None where the user has none.
        where: its name, for messages.
    """

    batches: Callable[[int], Iterable[object]]
    count: Callable[[object], int] | None
    where: str

    def largest_batch(self, batch_size: int, seconds: float) -> tuple[object, bool]:
        """The largest of the first batches of an epoch, as many as there is time for; and whether they differ.

        Raises:
            EpochTooShortError: an epoch has less than such a batch, and smaller ones.
            UserCodeError: there is none, or they are of another size, where that can be told.
        """
        deadline, found, number, differ = time.monotonic() + seconds, None, 0, False
        batches = iter(self.batches(batch_size))
        for number, batch in enumerate(batches, 1):  # noqa: B007 - counts them
            differ |= found is not None and tensor_bytes(batch) != tensor_bytes(found)
            if found is None or tensor_bytes(batch) > tensor_bytes(found):
                found = batch
            if time.monotonic() >= deadline:
                break
        has_more = number > 1 or (number == 1 and any(True for _ in batches))
        has_it, grows = self._compare(batch_size, found) if found is not None else (False, False)
        if not (has_it or (has_more and grows and self.count is None)):  # of graphs, no dimension has as many
            self._refuse(batch_size, found, has_more=has_more, grows=grows)
        return found, differ

    def _refuse(self, batch_size: int, found: object, *, has_more: bool, grows: bool) -> None:
        low, high = 0, 0 if has_more else batch_size
        while high - low > 1:
            middle = (low + high) // 2
            some = list(itertools.islice(self.batches(middle), 2))
            is_there = len(some) > 1 or (some and self._compare(middle, some[0])[0])
            low, high = (middle, high) if is_there else (low, middle)
        asked = f"{self.where}({batch_size})"
        if low:
            text = f"{asked} yields less than one batch; the largest there is has {low:,} samples"
            raise EpochTooShortError(text, low)
        if found is None:
            raise UserCodeError(f"{asked} yields no batch")
        if self.count is not None:
            size = self.count(found)
            raise UserCodeError(f"{asked} yields batches of {size} samples, says batch_size_of; {_AS_ASKED}")
        if not grows:
            raise UserCodeError(f"{asked} yields the same as for another batch size; {_AS_ASKED}")

    def _compare(self, batch_size: int, batch: object) -> tuple[bool, bool]:
        """Whether a batch is as large as asked for, and whether it differs from one of another size.

        The user counts, or it has a dimension so long that is not so in the other one.
        """
        if self.count is not None:
            return self.count(batch) == batch_size, True
        others, lengths = set[tuple[str, int]](), lengths_of(batch)
        with contextlib.suppress(Exception):  # there may be sizes that their loader refuses
            others = lengths_of(next(iter(self.batches(batch_size // 2 or 2)), None))
        new = lengths - others
        return any(size == batch_size for _, size in new), bool(new) or not lengths
