"""What an attempt needs from the device that it runs on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from batchtune.errors import UsageError


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

    def attempt(self, batch_size: int) -> AbstractContextManager[None]:
        """The span of one attempt at this size, against which nothing counts that earlier ones left behind."""

    def reset_peaks(self) -> None:
        """Starts a new high-water mark."""

    def peaks(self) -> Peaks:
        """The high-water marks since the last reset."""

    def synchronize(self) -> None:
        """Waits until the device has done what was asked of it."""

    def stopwatch(self) -> Callable[[], float]:
        """Starts once the device is idle; called, waits for what was asked of it and returns the seconds that took."""

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
