"""Who else is on a GPU: the memory that other processes hold, with their process ids, as NVML tells it.

Nothing here opens a CUDA context or loads torch, so that a look changes nothing and the parent process may take one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batchtune.results import DeviceProcess


@dataclass(frozen=True, slots=True)
class Sharing:
    """One look at a device: its free bytes, and every process that holds some of the others."""

    free_bytes: int | None
    processes: tuple[DeviceProcess, ...] = ()


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
        with contextlib.suppress(nvml.NVMLError):
            return _slice_of(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    raise LookupError(f"NVML knows no device {' or '.join(uuids)}")


def _slice_of(nvml: Any, handle: Any) -> Any:
    with contextlib.suppress(nvml.NVMLError):  # a GPU that cannot be cut
        if not nvml.nvmlDeviceIsMigDeviceHandle(handle) and nvml.nvmlDeviceGetMigMode(handle)[0]:
            for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
                with contextlib.suppress(nvml.NVMLError):
                    return nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
    return handle


def sharing(nvml: Any, handle: Any) -> Sharing:
    """Free bytes and processes of one device; what the driver does not tell is absent."""
    free = None
    with contextlib.suppress(nvml.NVMLError):
        free = int(nvml.nvmlDeviceGetMemoryInfo(handle).free)
    held: dict[int, int | None] = {}
    for listed in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        with contextlib.suppress(nvml.NVMLError):
            for process in listed(handle):
                held[process.pid] = process.usedGpuMemory or held.get(process.pid)
    return Sharing(free, tuple(DeviceProcess(pid=pid, memory_bytes=held[pid]) for pid in sorted(held)))


def look(uuid: str) -> Sharing | None:
    """One look at the device of this NVML UUID; None where there is no NVML or no such device any more."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return sharing(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # noqa: BLE001 - whatever the driver library lacks: nothing to see
        return None


def gpus_here() -> bool:
    """Whether NVML sees a GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return bool(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # noqa: BLE001 - no driver, or one too old to tell
        return False
