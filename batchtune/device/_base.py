"""What an attempt needs from the device that it runs on, and its high-water marks of memory over the steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from batchtune.errors import UsageError
from batchtune.units import size

SETTLING_STEPS = 2  # of an attempt, in which torch.compile may compile and the optimizer makes its states
_LEAK_STEPS, _LEAK_BYTES = 4, 2**16  # so many rises, most of them of so much and about the same, are a leak
_LEAK_SHARE = 0.75  # of the rises: where the system counts memory, some steps find room that earlier ones left


@dataclass(frozen=True, slots=True)
class Peaks:
    """High-water marks in bytes since the last reset; None where the device does not tell.

    `retries` counts, since the attempt began, how often cached memory was given back to make room for an allocation.
    `is_beyond` is true where a limit that is kept by measuring was passed.
    """

    allocated_bytes: int | None
    reserved_bytes: int | None
    retries: int = 0
    is_beyond: bool = False


class DeviceMemory(Protocol):
    """What an attempt needs from the device it runs on; tests put a fake of a few lines in its place."""

    device: torch.device

    def describe(self) -> tuple[str, int | None, int | None]:
        """The device's name, its memory in bytes and how much of that is free now."""

    def default_limit(self, margin: float) -> int | None:
        """Bytes a process may reserve when the user names no limit."""

    def enforce(self, limit_bytes: int) -> None:
        """From now on an allocation that would pass the limit fails as it would on a smaller device."""

    def lift(self) -> None:
        """Takes the limit away again; nothing is measured against it afterwards."""

    def timing(self) -> AbstractContextManager[None]:
        """A span in which time is measured and no memory: a limit that makes it harder does not hold meanwhile."""
        return nullcontext()

    @contextmanager
    def attempt(self, batch_size: int) -> Iterator[None]:  # noqa: ARG002 - fakes of devices ask
        """The span of one attempt at this size, against which nothing counts that earlier ones left behind."""
        try:
            yield
        finally:
            self.release()

    def reset_peaks(self) -> None:
        """Starts a new high-water mark."""

    def peaks(self) -> Peaks:
        """The high-water marks since the last reset."""

    def synchronize(self) -> None:
        """Waits until the device has done what was asked of it."""

    def stopwatch(self) -> Callable[[], float]:
        """Starts once the device is idle; called, waits for what was asked of it and returns the seconds that took."""
        return stopwatch_on_the_wall(self.synchronize)

    def release(self) -> None:
        """Gives cached memory back, so that one attempt does not change the next."""


def stopwatch_on_the_wall(synchronize: Callable[[], None]) -> Callable[[], float]:
    """The stopwatch of a device without a clock of its own."""
    synchronize()
    began = time.perf_counter()

    def seconds() -> float:
        synchronize()
        return time.perf_counter() - began

    return seconds


def require_no_more(limit_bytes: int, total_bytes: int | None, device: torch.device) -> None:
    """Raises UsageError for a limit beyond what the device has in all; None: it does not tell."""
    if total_bytes is not None and limit_bytes > total_bytes:
        told = f"{limit_bytes} bytes is more than the {total_bytes} bytes of {device}"
        raise UsageError(told, setting="memory_limit")


class PeakTracker:
    """High-water marks of an attempt, those of forward and backward apart from the optimizer's.

    The optimizer's peak hardly depends on the batch, so a search that extrapolates must not mix the two.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.highest = Peaks(None, None)
        self.forward_backward_bytes: int | None = None
        self._by_step: list[int] = []

    def start_phase(self) -> None:
        """Forgets the high-water mark of the device, not what was seen before."""
        self._memory.reset_peaks()

    def end_phase(self, *, forward_backward: bool) -> None:
        """Takes the high-water mark in; torch.OutOfMemoryError beyond a limit that the device itself does not keep."""
        now = self._memory.peaks()
        self._take_in(now)
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
            self._take_in(now)

    def _take_in(self, now: Peaks) -> None:
        allocated = _higher(self.highest.allocated_bytes, now.allocated_bytes)
        self.highest = Peaks(allocated, _higher(self.highest.reserved_bytes, now.reserved_bytes), now.retries)

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
