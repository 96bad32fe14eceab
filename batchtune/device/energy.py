"""Energy of work that pauses, by a counter that moves in steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

_KNOWN_SECONDS = 1.0  # an H100's counter moves ten times a second: a second of it is known to a tenth


class Energy:
    """Joules of work between pauses, by the counter of a device.

    Where a stretch of work is shorter than a second, the counter says little of it: it is taken together with the
    pauses and stretches after it until they make a second, and has its share of the time in what these took.

    Args:
        read: the counter, in joules; None where the device has none.

    Attributes:
        joules: so far; None where the device has no counter.
    """

    def __init__(self, read: Callable[[], float | None]) -> None:
        self._read, self._before_window, self._working = read, 0.0, 0.0
        self._window: tuple[float, float] | None = None  # when it began, and what the counter said
        self.joules: float | None = None if read() is None else 0.0

    @contextlib.contextmanager
    def of_work(self) -> Iterator[None]:
        """Counts what the block takes."""
        began, before = time.perf_counter(), self._read()
        yield
        ended, after = time.perf_counter(), self._read()
        if self.joules is None or before is None or after is None:
            return
        since, first = self._window = self._window or (began, before)
        self._working += ended - began
        share = min(1.0, self._working / max(ended - since, 1e-9))
        self.joules = max(self.joules, self._before_window + share * (after - first))
        if ended - since >= _KNOWN_SECONDS:
            self._before_window, self._working, self._window = self.joules, 0.0, None
