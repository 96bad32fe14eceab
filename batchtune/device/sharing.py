"""Who else holds memory of a device: one look at that, and what is said of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from batchtune.document import DeviceProcess, Environment
from batchtune.errors import DeviceError
from batchtune.units import share, size

MOVED = 0.01  # share of the device's memory by which its free memory may move before it is worth a sentence


@dataclass(frozen=True, slots=True)
class Sharing:
    """One look at a device: its free bytes, and every process that holds some of the others."""

    free_bytes: int | None
    processes: tuple[DeviceProcess, ...] = ()

    def without(self, is_ours: Callable[[int], bool]) -> Sharing:
        """What it will be once the processes that are ours, by their ids, have ended."""
        held = sum(each.memory_bytes or 0 for each in self.processes if is_ours(each.pid))
        free = None if self.free_bytes is None else self.free_bytes + held
        return Sharing(free, tuple(each for each in self.processes if not is_ours(each.pid)))


def name_processes(processes: Sequence[DeviceProcess]) -> str:
    """Processes by their ids, with what each holds where that is known."""
    held = ((process.pid, process.memory_bytes) for process in processes)
    return ", ".join(f"pid {pid}" + (f" {size(memory)}" if memory else "") for pid, memory in held)


@contextlib.contextmanager
def usable_now(name: str, seen: Sharing | None, *, only_if_full: bool = False) -> Iterator[None]:
    """What a device raises while the user's code is not at work is none of theirs: others fill it, or have it alone.

    `seen` is who held its memory before. With `only_if_full` other errors are passed on: the user's code has been
    there, and may have left something behind.

    Raises:
        DeviceError: the same in one line, with those who hold its memory.
    """
    try:
        yield
    except RuntimeError as error:
        from batchtune.device.failures import classify  # loads torch, which whoever raised this has

        if only_if_full and classify(error) != "oom":
            raise
        first = str(error).strip().split("\n")[0][:300]
        holders = name_processes(seen.processes) if seen else ""
        held = f"; its memory is held by other processes: {holders}" if holders else ""
        raise DeviceError(f"{name}: cannot be used now: {first}{held}", setting="device") from None


def sharing_warnings(environment: Environment | None) -> list[str]:
    """Who else held memory of the device, and whether what was free moved meanwhile."""
    if environment is None:
        return []
    found = []
    others = environment.other_processes or []
    if others:
        known = [process.memory_bytes for process in others if process.memory_bytes]
        held = size(sum(known)) if known else "some"
        found.append(
            f"other processes hold {held} of the device's memory ({name_processes(others)}): what they leave free is "
            "what was probed, and their work slows the timing"
        )
    before, after = environment.device_memory_free_bytes, environment.device_memory_free_after_bytes
    total = environment.device_memory_bytes
    if total and before is not None and after is not None and abs(after - before) > MOVED * total:
        found.append(
            f"the device's free memory moved by {share(abs(after - before) / total)} of the whole, from {size(before)} "
            f"to {size(after)}, during the probe: somebody else uses it, and the answer may not hold later"
        )
    return found
