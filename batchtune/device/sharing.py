"""Who else is on a GPU: the memory that other processes hold, with their process ids, as NVML tells it.

Nothing here opens a CUDA context or loads torch, so that a look changes nothing and the parent process may take one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from batchtune.document import DeviceProcess
from batchtune.errors import DeviceError
from batchtune.units import size

Answer = TypeVar("Answer")


def told(ask: Callable[..., Answer], *arguments: Any) -> Answer | None:
    """What NVML answers; None where the driver, its library or the device does not tell: such a sensor is absent."""
    try:
        return ask(*arguments)
    except Exception:  # noqa: BLE001 - pynvml has several kinds, one for functions that an older library lacks
        return None


@dataclass(frozen=True, slots=True)
class Sharing:
    """One look at a device: its free bytes, and every process that holds some of the others."""

    free_bytes: int | None
    processes: tuple[DeviceProcess, ...] = ()


def name_processes(processes: Sequence[DeviceProcess]) -> str:
    """Processes by their ids, with what each holds where that is known."""
    held = ((process.pid, process.memory_bytes) for process in processes)
    return ", ".join(f"pid {pid}" + (f" {size(memory)}" if memory else "") for pid, memory in held)


@contextlib.contextmanager
def usable_now(name: str, seen: Sharing | None, *, only_if_full: bool = False) -> Iterator[None]:
    """What a device raises while the user's code is not at work is none of theirs: others fill it, or have it alone.

    Args:
        name: of the device, as the user gave it.
        seen: who held memory of it before.
        only_if_full: other errors are passed on: the user's code has been there, and may have left something behind.

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


def candidate_uuids(torch_uuid: str, index: int, visible: str | None) -> list[str]:
    """The names NVML may know a CUDA device by, the likeliest first.

    torch leaves out the prefix that tells a MIG slice from a whole GPU, and older drivers give a slice the UUID of
    the GPU it is cut from; `CUDA_VISIBLE_DEVICES` names slices in full.

    Args:
        torch_uuid: what torch calls the device's UUID, with or without a prefix.
        index: the device's number among the visible ones.
        visible: `CUDA_VISIBLE_DEVICES`.
    """
    entries = [entry.strip() for entry in (visible or "").split(",")]
    named = [entries[index]] if index < len(entries) and entries[index].startswith("MIG-") else []
    bare = torch_uuid.removeprefix("GPU-").removeprefix("MIG-")
    return [*named, f"MIG-{bare}", f"GPU-{bare}"]


def find_handle(nvml: Any, uuids: Sequence[str]) -> Any:
    """NVML's handle of the first name it knows; of a GPU cut into slices, its first one, as CUDA takes it.

    Raises:
        LookupError: it knows none of them.
    """
    for uuid in uuids:
        handle = told(nvml.nvmlDeviceGetHandleByUUID, uuid)
        if handle is not None:
            return _slice_of(nvml, handle)
    raise LookupError(f"NVML knows no device {' or '.join(uuids)}")


def _slice_of(nvml: Any, handle: Any) -> Any:
    is_slice = told(nvml.nvmlDeviceIsMigDeviceHandle, handle)
    mode = told(nvml.nvmlDeviceGetMigMode, handle)  # None: a GPU that cannot be cut
    if is_slice or not mode or not mode[0]:
        return handle
    slices = range(told(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0)
    handles = (told(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number) for number in slices)
    return next((each for each in handles if each is not None), handle)


def sharing(nvml: Any, handle: Any) -> Sharing:
    """Free bytes and processes of one device; what the driver does not tell is absent."""
    memory = told(nvml.nvmlDeviceGetMemoryInfo, handle)
    held: dict[int, int | None] = {}
    for kind in ("Compute", "Graphics"):
        for process in _running(nvml, handle, f"nvmlDeviceGet{kind}RunningProcesses"):
            held[process.pid] = process.usedGpuMemory or held.get(process.pid)
    free = None if memory is None else int(memory.free)
    return Sharing(free, tuple(DeviceProcess(pid=pid, memory_bytes=held[pid]) for pid in sorted(held)))


def _running(nvml: Any, handle: Any, name: str) -> Sequence[Any]:
    """The processes that a function of NVML lists; drivers before 510 know the second of its names only."""
    lists = (told(getattr(nvml, each, lambda _: None), handle) for each in (name, f"{name}_v2"))
    return next((each for each in lists if each is not None), ())


def _with_nvml(ask: Callable[[Any], Answer]) -> Answer | None:
    """What NVML answers, opened for this one question."""

    def asked() -> Answer:
        import pynvml

        pynvml.nvmlInit()
        try:
            return ask(pynvml)
        finally:
            pynvml.nvmlShutdown()

    return told(asked)


def look(uuid: str) -> Sharing | None:
    """One look at the device of this NVML UUID; None where there is no NVML or no such device any more."""
    return _with_nvml(lambda nvml: sharing(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)))


def gpus_here() -> bool:
    """Whether NVML sees a GPU."""
    return bool(_with_nvml(lambda nvml: nvml.nvmlDeviceGetCount()))
