"""High-water marks of memory over the steps of an attempt, and whether they rise from step to step."""

from __future__ import annotations

import statistics
from itertools import pairwise

import torch

from batchtune.device._base import DeviceMemory, Peaks
from batchtune.units import size

SETTLING_STEPS = 2  # of an attempt, in which torch.compile may compile and the optimizer makes its states
_LEAK_STEPS, _LEAK_BYTES = 4, 2**16  # so many rises, most of them of so much and about the same, are a leak
_LEAK_SHARE = 0.75  # of the rises: where the system counts memory, some steps find room that earlier ones left


class PeakTracker:
    """High-water marks of an attempt, those of forward and backward apart from the optimizer's.

    The optimizer's peak hardly depends on the batch, so a search that extrapolates must not mix the two.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.highest = Peaks(None, None)
        self.forward_backward_bytes: int | None = None
        self.retries = 0
        self._by_step: list[int] = []

    def start_phase(self) -> None:
        """Forgets the high-water mark of the device, not what was seen before."""
        self._memory.reset_peaks()

    def end_phase(self, *, forward_backward: bool) -> None:
        """Takes the high-water mark in; torch.OutOfMemoryError beyond a limit that the device itself does not keep."""
        now = self._memory.peaks()
        self.retries = now.retries
        self.highest = Peaks(
            _higher(self.highest.allocated_bytes, now.allocated_bytes),
            _higher(self.highest.reserved_bytes, now.reserved_bytes),
        )
        best = now.allocated_bytes if now.allocated_bytes is not None else now.reserved_bytes
        if forward_backward and best is not None:
            self.forward_backward_bytes = _higher(self.forward_backward_bytes, best)
            self._by_step.append(best)
        if now.is_beyond:
            raise torch.OutOfMemoryError(f"the process took {size(now.reserved_bytes or 0)} above its imports")

    def out_of_memory(self) -> None:
        """Takes in by how much a limit was passed that the device itself does not keep."""
        now = self._memory.peaks()
        if now.is_beyond:
            self.highest = Peaks(self.highest.allocated_bytes, _higher(self.highest.reserved_bytes, now.reserved_bytes))

    def growth_bytes_per_step(self) -> int | None:
        """What every step left behind for good; None where peaks came to rest, or too few steps tell."""
        settled = self._by_step[SETTLING_STEPS:]
        rises = [after - before for before, after in pairwise(settled)]
        if len(rises) < _LEAK_STEPS:
            return None
        middle, last = statistics.median(rises), statistics.median(rises[-_LEAK_STEPS:])
        alike = sum(middle / 2 < rise < 2 * middle for rise in rises)
        is_steady = alike >= _LEAK_SHARE * len(rises) and last > middle / 2  # else it is the allocator's
        return int(middle) if middle >= _LEAK_BYTES and is_steady else None


def _higher(left: int | None, right: int | None) -> int | None:
    return right if left is None else left if right is None else max(left, right)
