"""The host: its processors and what other programs used of them, what cgroups leave of its memory, and kills for it."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
STAT, STATUS = Path("/proc/stat"), Path("/proc/self/status")
_WAITS = Path("/proc/thread-self/schedstat")  # nanoseconds on a processor, and waiting for one
_MEMORY_FILES = (  # of cgroups: the limit, what is used of it, and the field of memory.stat
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal; guests are counted in user (proc(5))
BUSY = 0.2  # share of our processors that others use; less hardly slows a step
_LEAST_SECONDS = 0.1  # the kernel counts in hundredths of a second


@dataclass
class HostLoad:
    """What a stretch of time told once it has ended.

    Attributes:
        others: share of the processors that this process may use, 0 to 1, that was busy with something else than it and
            its children that ended; None where the system does not tell, or the stretch was too short.
    """

    others: float | None = None


@contextlib.contextmanager
def watching_others(together: Callable[[float], float] = lambda own: own) -> Iterator[HostLoad]:
    """Compares the busy time of our processors with that of this process for as long as the block runs.

    Args:
        together: from this process' own seconds, those of all that are at the same work.
    """
    load, ours = HostLoad(), _processors()
    busy, own, began = _busy_seconds(ours), together(_own_seconds()), time.perf_counter()
    yield load
    elapsed, after, own = time.perf_counter() - began, _busy_seconds(ours), together(_own_seconds()) - own
    if busy is not None and after is not None and elapsed >= _LEAST_SECONDS:
        others = (after - busy) - own
        load.others = min(1.0, max(0.0, others / (elapsed * len(ours))))


def waited_seconds() -> float:
    """Seconds for which this thread could have run, and others had the processors; 0 where the system does not tell."""
    try:
        return int(_WAITS.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def read_beside_waits(read: Callable[[], T]) -> tuple[T, float]:
    """What `read` returns, and `waited_seconds` at that very moment: read again where others had the processor between.

    A wait that falls between the two would else count for one stretch of steps and be taken off another.
    """
    while True:
        before, found, after = waited_seconds(), read(), waited_seconds()
        if before == after:
            return found, after


def _own_seconds() -> float:
    """Processor time of this process and of the children it has seen end."""
    return sum(os.times()[:4])


def _busy_seconds(of: set[int]) -> float | None:
    """Seconds that these processors together have worked since the start of the system; None where it does not tell."""
    names = {f"cpu{number}" for number in of}
    try:
        lines = map(str.split, STAT.read_text(encoding="ascii").splitlines())
        ticks = [sum(int(line[1 + index]) for index in _BUSY) for line in lines if line and line[0] in names]
        return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None
    except (OSError, ValueError, IndexError):
        return None


def anonymous_bytes() -> int | None:
    """What is resident of this process without files that it has mapped; None where the system does not tell."""
    return proc_fields(STATUS).get("RssAnon")


def proc_fields(path: Path) -> dict[str, int]:
    """The `Name: 123 kB` lines of a /proc file, in bytes; empty where there is no such file."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, flags=re.MULTILINE)}


def resident_bytes() -> int:
    """What is resident of this process; 0 where the system does not tell."""
    return proc_fields(STATUS).get("VmRSS", 0)


def processors() -> int:
    """How many processors this process may use."""
    return len(_processors())


def _processors() -> set[int]:
    """The numbers of the processors that a container, Slurm or `taskset` leaves to this process."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def children_of(pid: int, root: Path = Path("/proc")) -> list[int]:
    """The processes that this one has started and that still are; none where the system does not tell."""
    found = []
    for file in root.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            after_name = file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(after_name[1]) == pid:
                found.append(int(file.parent.name))
    return found


def oom_kills(root: Path = Path("/")) -> int | None:
    """Processes that the kernel has killed for want of memory: in our cgroup, or else on the whole host.

    The count only grows; None where the system keeps none.
    """
    counters = [folder / name for folder in _memory_groups(root) for name in ("memory.events", "memory.oom_control")]
    for file in [*counters, root / "proc/vmstat"]:
        if (found := _figure(file, "oom_kill")) is not None:
            return found
    return None


def cgroup_memory(root: Path = Path("/")) -> list[tuple[int, int]]:
    """Bytes that each of our cgroups with a limit may hold (a container's, a Slurm job's), and what is left of them.

    Files that are dropped as soon as their memory is wanted are left, too.
    """
    found = []
    for folder in _memory_groups(root):
        for limit, used, files in _MEMORY_FILES:
            most, now = _figure(folder / limit), _figure(folder / used)
            if most is not None and now is not None:
                now -= _figure(folder / "memory.stat", files) or 0
                found.append((most, max(0, most - max(0, now))))
    return found


def _memory_groups(root: Path) -> list[Path]:
    """The folders of the cgroups that count our memory, our own first and then those that hold it: version 2, then 1.

    A container may see its own group as the root, whatever its path.
    """
    try:
        text = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    own = {names: path for names, path in re.findall(r"^\d+:([^:]*):/(.*)$", text, re.MULTILINE) if ".." not in path}
    groups = [(root / "sys/fs/cgroup", own.get("", "")), (root / "sys/fs/cgroup/memory", own.get("memory", ""))]
    return [base / inner for base, path in groups for inner in (Path(path), *Path(path).parents)]


def _figure(file: Path, field: str = "") -> int | None:
    """A number that is all of a file, or follows a field's name there; None where there is none."""
    try:
        text = file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(rf"^{field} ?(\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


def describe_kill(before: int | None, after: int | None) -> str:
    """Why a process ended by SIGKILL that we did not send, as far as the counts around its life tell."""
    if before is None or after is None:
        return "killed by SIGKILL from outside, most likely because the host ran out of memory"
    if after > before:
        return "killed by the host's out-of-memory killer: the host's memory ran out, not the device's"
    return "killed by SIGKILL from outside, and not by the host's out-of-memory killer, which counted no victim"
