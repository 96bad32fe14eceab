"""The host's processors: how many there are for us, and how much of them other programs used meanwhile."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

STAT = Path("/proc/stat")
_BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal; guests are counted in user (proc(5))
_LEAST_SECONDS = 0.2  # the kernel counts in hundredths of a second


class HostLoad:
    """What a stretch of time told; `others` is known when it has ended.

    Attributes:
        others: share of all processors that was busy with something else than this process and
            its children that ended, 0 to 1; None where the
            system does not tell or the stretch was too short.
    """

    def __init__(self) -> None:
        self.others: float | None = None


@contextlib.contextmanager
def watching_others() -> Iterator[HostLoad]:
    """Compares the busy time of the machine with that of this process for as long as the block runs."""
    load = HostLoad()
    busy, own, began = _busy_seconds(), _own_seconds(), time.perf_counter()
    yield load
    elapsed, after = time.perf_counter() - began, _busy_seconds()
    if busy is not None and after is not None and elapsed >= _LEAST_SECONDS:
        others = (after - busy) - (_own_seconds() - own)
        load.others = min(1.0, max(0.0, others / (elapsed * (os.cpu_count() or 1))))


def _own_seconds() -> float:
    """Processor time of this process and of the children it has seen end."""
    return sum(os.times()[:4])


def _busy_seconds() -> float | None:
    """Seconds that the processors together have worked since the start of the system; None where it does not tell."""
    try:
        fields = STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
        return sum(int(fields[index]) for index in _BUSY) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def processors() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
