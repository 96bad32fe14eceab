"""The memory of CUDA, ROCm, MPS, XPU and other accelerators: a limit on it, and how high an attempt went."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from batchtune.device._base import Peaks
from batchtune.errors import UsageError


class AcceleratorMemory:
    """CUDA, ROCm, MPS, XPU or any other accelerator's memory, through what its torch module and torch.accelerator tell.

    Where torch cannot keep a process within the limit (older XPU, accelerators of third parties), a peak that passed
    it is reported as the out-of-memory error that the smaller device would have raised.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
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
        if total is not None and limit_bytes > total:
            raise UsageError(
                f"{limit_bytes} bytes is more than the {total} bytes of {self.device}", setting="memory_limit"
            )
        if total is not None and hasattr(self._module, "set_per_process_memory_fraction"):
            fraction = limit_bytes / total
            takes_device = self.device.type != "mps"
            self._module.set_per_process_memory_fraction(fraction, *([self.device] if takes_device else []))
        if total is None or not self._keeps_limit():
            self._watched_limit = limit_bytes

    def _keeps_limit(self) -> bool:
        """Whether torch keeps what is reserved within a limit.

        With cudaMallocAsync it counts what tensors take, whatever the driver's pool reserves for them
        (c10/cuda/CUDAMallocAsyncAllocator.cpp, pytorch_memory_limits).
        """
        backend = getattr(self._module, "get_allocator_backend", None)
        in_pool = self.device.type == "cuda" and backend is not None and backend() == "cudaMallocAsync"
        return hasattr(self._module, "set_per_process_memory_fraction") and not in_pool

    @contextlib.contextmanager
    def attempt(self, batch_size: int) -> Iterator[None]:  # noqa: ARG002 - the CPU's memory asks
        self.release()
        if hasattr(self._module, "reset_accumulated_memory_stats"):  # counts of retries and failures
            self._module.reset_accumulated_memory_stats()
        try:
            yield
        finally:
            self.release()

    def timing(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def lift(self) -> None:
        self._watched_limit = None
        if hasattr(self._module, "set_per_process_memory_fraction"):
            takes_device = self.device.type != "mps"
            self._module.set_per_process_memory_fraction(1.0, *([self.device] if takes_device else []))

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

    def release(self) -> None:
        gc.collect()
        forget = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # noqa: SLF001 - torch has no public name for it
        if forget is not None and self.device.type == "cuda":
            forget()  # else they keep their place in the next attempt, which no fresh process would give them
        self._module.empty_cache()
