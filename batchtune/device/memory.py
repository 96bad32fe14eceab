"""Which device a name means, and its memory: that of CUDA, ROCm, MPS, XPU and other accelerators with a limit on it."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from types import ModuleType

import torch

from batchtune.device._base import DeviceMemory, Peaks, require_no_more
from batchtune.device.host_memory import HostMemory
from batchtune.errors import DeviceError, UsageError


def find_device(name: str) -> torch.device:
    """The device called `auto`, `cpu`, `cuda:0`, `mps` or any other kind torch knows, with its number; not opened yet.

    Raises:
        DeviceError: there is no such device here.
        UsageError: torch does not know such a kind of device.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        name = str(accelerator) if accelerator else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(
            f"{name}: torch knows no such device; use auto, cpu, cuda, cuda:0 or mps", setting="device"
        ) from None
    if device.type == "cpu":
        return torch.device("cpu")
    available = torch.accelerator.current_accelerator(check_available=True)
    if available is None or available.type != device.type:
        here = f"{available.type} and cpu" if available else "cpu"
        raise DeviceError(f"{name}: not available here (torch {torch.__version__} sees {here})", setting="device")
    count = torch.accelerator.device_count()
    if (device.index or 0) >= count:
        raise DeviceError(
            f"{name}: there are only {count} {device.type} devices, from {device.type}:0", setting="device"
        )
    return torch.device(device.type, device.index or 0)


def count_devices(device: torch.device) -> int:
    """Devices of this kind that this process sees."""
    return 1 if device.type == "cpu" else torch.accelerator.device_count()


def open_device(name: str) -> DeviceMemory:
    """The memory of the device called so; see `find_device`."""
    device = find_device(name)
    return HostMemory() if device.type == "cpu" else AcceleratorMemory(device)


class AcceleratorMemory(DeviceMemory):
    """CUDA, ROCm, MPS, XPU or any other accelerator's memory, through what its torch module and torch.accelerator tell.

    Where torch cannot keep a process within the limit (older XPU, accelerators of third parties), a peak that passed
    it is reported as the out-of-memory error that the smaller device would have raised.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: ModuleType = torch.get_device_module(device)
        self._watched_limit: int | None = None
        if hasattr(self._module, "set_device"):
            self._module.set_device(device)

    def describe(self) -> tuple[str, int | None, int | None]:
        name, module = self._name(), self._module
        if hasattr(module, "recommended_max_memory"):  # MPS: memory is the host's, and others' use of it is not told
            total = int(module.recommended_max_memory())
            return name, total, total - int(module.driver_allocated_memory())
        asked = getattr(module, "mem_get_info", None) or getattr(torch.accelerator, "get_memory_info", None)
        if asked is not None:
            with contextlib.suppress(RuntimeError):  # a driver that does not tell
                free, total = asked(self.device)
                return name, int(total), int(free)
        properties = module.get_device_properties(self.device) if hasattr(module, "get_device_properties") else None
        return name, getattr(properties, "total_memory", None), None

    def _name(self) -> str:
        if hasattr(self._module, "get_device_name"):
            return str(self._module.get_device_name(self.device))
        if self.device.type == "mps":
            return str(torch.backends.mps.get_name())
        return str(self.device)

    def default_limit(self, margin: float) -> int | None:
        _, total, free = self.describe()
        if total is None:
            return None
        held = getattr(self._module, "memory_reserved", None)  # by this process, in whose own limit it counts
        free = free + int(held()) if free is not None and held is not None else free
        shared = free is not None and free < total * (1 - margin)
        return int((free if shared and free is not None else total) * (1 - margin))

    def enforce(self, limit_bytes: int) -> None:
        total = self.describe()[1]
        require_no_more(limit_bytes, total, self.device)
        if total is not None:
            self._allow(limit_bytes / total)
        if total is None or not self._keeps_limit():
            self._watched_limit = limit_bytes

    def _allow(self, fraction: float) -> None:
        """This share of the device's memory, where torch can keep a process within it."""
        if hasattr(self._module, "set_per_process_memory_fraction"):
            takes_device = self.device.type != "mps"
            self._module.set_per_process_memory_fraction(fraction, *([self.device] if takes_device else []))

    def _keeps_limit(self) -> bool:
        """Whether torch keeps what is reserved within a limit.

        With cudaMallocAsync it counts what tensors take, whatever the driver's pool reserves for them
        (c10/cuda/CUDAMallocAsyncAllocator.cpp, pytorch_memory_limits).
        """
        backend = getattr(self._module, "get_allocator_backend", None)
        in_pool = self.device.type == "cuda" and backend is not None and backend() == "cudaMallocAsync"
        return hasattr(self._module, "set_per_process_memory_fraction") and not in_pool

    @contextlib.contextmanager
    def attempt(self, batch_size: int) -> Iterator[None]:
        self.release()
        if hasattr(self._module, "reset_accumulated_memory_stats"):  # counts of retries and failures
            self._module.reset_accumulated_memory_stats()
        with super().attempt(batch_size):
            yield

    def lift(self) -> None:
        self._watched_limit = None
        self._allow(1.0)

    def reset_peaks(self) -> None:
        if hasattr(self._module, "reset_peak_memory_stats"):
            self._module.reset_peak_memory_stats()

    def peaks(self) -> Peaks:
        found = self._peaks()
        limit, high = self._watched_limit, found.reserved_bytes or found.allocated_bytes
        if limit is not None and high is not None and high > limit:
            raise torch.OutOfMemoryError(f"{high} bytes were in use, more than the limit of {limit} bytes")
        return found

    def _peaks(self) -> Peaks:
        if hasattr(self._module, "driver_allocated_memory"):  # MPS keeps no marks, but gives nothing back in between
            return Peaks(None, int(self._module.driver_allocated_memory()))
        marks = (getattr(self._module, name, None) for name in ("max_memory_allocated", "max_memory_reserved"))
        allocated, reserved = (None if mark is None else int(mark()) for mark in marks)
        stats = self._module.memory_stats() if hasattr(self._module, "memory_stats") else {}
        return Peaks(allocated, reserved, stats.get("num_alloc_retries", 0))

    def synchronize(self) -> None:
        self._module.synchronize()

    def stopwatch(self) -> Callable[[], float]:
        """On CUDA by events: when a busy host wakes up after the device has done its work does not count there."""
        if self.device.type != "cuda":
            return super().stopwatch()
        self.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()

        def seconds() -> float:
            last.record()
            self.synchronize()
            return float(first.elapsed_time(last)) / 1e3

        return seconds

    def release(self) -> None:
        gc.collect()
        forget = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # noqa: SLF001 - torch has no public name for it
        if forget is not None and self.device.type == "cuda":
            forget()  # else they keep their place in the next attempt, which no fresh process would give them
        self._module.empty_cache()


def require_kind(memory: DeviceMemory, wanted: str | None) -> None:
    """Raises DeviceError where a study would go on on another kind of device; None: any kind will do."""
    name = memory.describe()[0]
    if wanted not in {None, name}:
        which = os.environ.get("CUDA_VISIBLE_DEVICES", memory.device)
        raise DeviceError(
            f"workers: device {which} is a {name}, but the study is of {wanted}, and times on different devices do not "
            "compare; list devices of one kind in CUDA_VISIBLE_DEVICES (with Ray: name nodes of one kind, e.g. "
            "ray.resources={'accelerator_type:A100': 0.001}), or start over with --workers 1 --fresh"
        )
