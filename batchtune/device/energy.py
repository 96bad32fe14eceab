"""Energy of work that pauses, by a counter that moves in steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

_PERIOD_SECONDS = 0.1  # of an H100's counter, from one move to the next


class Energy:
    """Joules of work between pauses, by the counter of a device.

    Between two moves the counter says nothing: stretches of work whose pauses are no longer than that are taken
    together with them, and have their share of the time in what both drew.

    Args:
        read: the counter, in joules; None where the device has none.

    Attributes:
        joules: so far; None where the device has no counter.
    """

    def __init__(self, read: Callable[[], float | None]) -> None:
        self._read, self._before, self._total = read, 0.0, 0.0  # the stretches that are together now, and with them
        self._since, self._first, self._worked, self._ended = 0.0, 0.0, 0.0, float("-inf")
        self.joules: float | None = None if read() is None else 0.0

    @contextlib.contextmanager
    def of_work(self) -> Iterator[None]:
        """Counts what the block takes."""
        began, before = time.perf_counter(), self._read()
        yield
        ended, after = time.perf_counter(), self._read()
        if self.joules is None or before is None or after is None:
            return
        if began - self._ended > _PERIOD_SECONDS:
            self._since, self._first, self._worked, self._before = began, before, 0.0, self._total
        self._worked, self._ended = self._worked + ended - began, ended
        share = min(1.0, self._worked / max(ended - self._since, 1e-9))
        self._total = self._before + share * (after - self._first)
        self.joules = max(self.joules, self._total)
