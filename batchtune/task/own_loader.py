"""Batches of a loader of the user's own, which may be of another size than was asked for."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass

from batchtune.errors import EpochTooShortError, UserCodeError
from batchtune.task.samples import lengths_in, tensor_bytes

_AS_ASKED = "its batches must be as large as asked for"
WHOLE = "def batch_size_of(batch): return 1"
"""What a task says where each batch is one sample, as a whole graph."""


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
            del batch  # no more of them at once than in training
            if time.monotonic() >= deadline:
                break
        has_more = number > 1 or (number == 1 and any(True for _ in batches))
        del batches
        if found is None or not self._is_right(batch_size, found):
            self._refuse(batch_size, found, has_more=has_more)
        return found, differ

    def _is_right(self, batch_size: int, found: object) -> bool:
        """Whether a batch is as large as asked for, as far as can be told: the user counts, or a dimension does.

        Of graphs none may have as many; then one of twice the size is another, or there is none.
        """
        if self.count is not None:
            return self.count(found) == batch_size
        lengths, half = set(lengths_in(found)), self._lengths(batch_size // 2 or 2)
        new = lengths - half
        if any(size == batch_size for _, size in new) or not new:
            return bool(new) or not lengths
        return lengths != self._lengths(2 * batch_size)

    def _refuse(self, batch_size: int, found: object, *, has_more: bool) -> None:
        asked = f"{self.where}({batch_size})"
        if not has_more and (low := self._most_in_epoch(batch_size)):
            text = f"{asked} yields less than one batch; the largest there is has {low:,} samples"
            raise EpochTooShortError(text, low)
        if found is None:
            raise UserCodeError(f"{asked} yields no batch")
        if self.count is not None:
            size = self.count(found)
            raise UserCodeError(f"{asked} yields batches of {size} samples, says batch_size_of; {_AS_ASKED}")
        is_whole = set(lengths_in(found)) == self._lengths(1)
        whole = f" by its argument, or where each is one sample, as a whole graph: {WHOLE}" if is_whole else ""
        raise UserCodeError(f"{asked} yields batches of another size; {_AS_ASKED}{whole}")

    def _most_in_epoch(self, below: int) -> int:
        """The largest batch that an epoch has, below a size; 0 where none is as large as asked for, or some raise."""
        low, high, known = 0, below, self._known_size()
        with contextlib.suppress(Exception):  # there may be sizes that their loader refuses
            while high - low > 1:
                middle = next((size for size in (known, known + 1) if low < size < high), (low + high) // 2)
                some = list(itertools.islice(self.batches(middle), 2))
                is_there = len(some) > 1 or (some and self._is_right(middle, some[0]))
                low, high = (middle, high) if is_there else (low, middle)
            return low
        return 0

    def _known_size(self) -> int:
        """The samples of an epoch as a DataLoader tells them; 0 where it does not."""
        with contextlib.suppress(Exception):  # one that refuses batches of one sample
            sampler = getattr(self.batches(1), "sampler", None)
            return len(sampler) if isinstance(sampler, Sized) else 0
        return 0

    def samples_below(self, batch_size: int, seconds: float) -> int | None:
        """The largest batch of which an epoch has one, by the lengths of loaders alone; None: no less than asked for.

        None, too, where they do not tell it in so many seconds.
        """
        if known := self._known_size():
            return known if known < batch_size else None
        deadline, low, high = time.monotonic() + seconds, 0, batch_size
        if not self._has_none(batch_size):
            return None
        while high - low > 1 and time.monotonic() < deadline:
            middle = (low + high) // 2
            low, high = (low, middle) if self._has_none(middle) else (middle, high)
        return low if low and high - low == 1 else None

    def _has_none(self, batch_size: int) -> bool:
        """Whether an epoch of such batches has none, or their loader refuses that size."""
        try:
            batches = self.batches(batch_size)
            return isinstance(batches, Sized) and not len(batches)
        except Exception:  # noqa: BLE001 - in words of its own
            return True

    def _lengths(self, batch_size: int) -> set[tuple[str, int]]:
        """Of the first batch of another size; none where there is none or the loader refuses it."""
        with contextlib.suppress(Exception):
            return set(lengths_in(next(iter(self.batches(batch_size)), None)))
        return set()
