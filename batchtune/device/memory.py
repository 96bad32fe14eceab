"""One device's memory: how much there is, how a limit on it is enforced, and how high an attempt went."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import io
import os
import platform
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from batchtune.errors import DeviceError, UsageError

HOST_SHARE_OF_FREE = 0.8  # a host that swaps or kills helps nobody: other programs keep a fifth of what is free
_STATUS = Path("/proc/self/status")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_PERTURB = -1, -3, -6  # malloc.h of glibc
_MAPPED_BYTES, _MAPPED_IN_ATTEMPTS_BYTES = 2**20, 2**16  # blocks from this size on are mapped each for itself
_ONE_SHAPES_BYTES = 8 << 20  # at the most, of what stays after an attempt, belongs to its batch size, until it shows
_SPARED_BYTES = 512 << 10  # the same training takes some pages of the heap more or less from process to process
_FILL_WITH_ZEROS = 0xFF  # glibc fills new blocks with this value's complement, 0 leaves them as they are


@dataclass(frozen=True, slots=True)
class Peaks:
    """High-water marks in bytes since the last reset; None where the device does not tell."""

    allocated_bytes: int | None
    reserved_bytes: int | None


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

    def attempt(self, batch_size: int) -> AbstractContextManager[None]:
        """The span of one attempt at this size, against which nothing counts that earlier ones left behind."""

    def reset_peaks(self) -> None:
        """Starts a new high-water mark."""

    def peaks(self) -> Peaks:
        """The high-water marks since the last reset."""

    def synchronize(self) -> None:
        """Waits until the device has done what was asked of it."""

    def release(self) -> None:
        """Gives cached memory back, so that one attempt does not change the next."""


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
        raise UsageError(f"--device {name}: torch knows no such device; use auto, cpu, cuda, cuda:0 or mps") from None
    if device.type == "cpu":
        return torch.device("cpu")
    available = torch.accelerator.current_accelerator(check_available=True)
    if available is None or available.type != device.type:
        here = f"{available.type} and cpu" if available else "cpu"
        raise DeviceError(f"--device {name}: not available here (torch {torch.__version__} sees {here})")
    count = torch.accelerator.device_count()
    if (device.index or 0) >= count:
        raise DeviceError(f"--device {name}: there are only {count} {device.type} devices, from {device.type}:0")
    return torch.device(device.type, device.index or 0)


def count_devices(device: torch.device) -> int:
    """Devices of this kind that this process sees."""
    return 1 if device.type == "cpu" else torch.accelerator.device_count()


def open_device(name: str) -> DeviceMemory:
    """The memory of the device called so; see `find_device`."""
    device = find_device(name)
    return HostMemory() if device.type == "cpu" else AcceleratorMemory(device)


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
            with contextlib.suppress(AttributeError, RuntimeError):  # torch before 2.8
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
            raise UsageError(f"--memory-limit {limit_bytes} bytes is more than the {total} bytes of {self.device}")
        if total is not None and hasattr(self._module, "set_per_process_memory_fraction"):
            fraction = limit_bytes / total
            takes_device = self.device.type != "mps"
            self._module.set_per_process_memory_fraction(fraction, *([self.device] if takes_device else []))
        else:
            self._watched_limit = limit_bytes

    @contextlib.contextmanager
    def attempt(self, batch_size: int) -> Iterator[None]:  # noqa: ARG002 - the CPU's memory asks
        self.release()
        try:
            yield
        finally:
            self.release()

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
        return Peaks(*(None if mark is None else int(mark()) for mark in marks))

    def synchronize(self) -> None:
        self._module.synchronize()

    def release(self) -> None:
        gc.collect()
        self._module.empty_cache()


class HostMemory:
    """The CPU's memory, limited by the process's address space.

    The limit counts what comes on top of the process as it stands when `enforce` is called: torch and the task are
    imported by then, so model, optimizer and activations are in it, as they are on an accelerator. Peaks are of
    resident memory, the only high-water mark that Linux lets a process reset.

    Within an attempt every block that could leave a hole behind is mapped for itself, and filled, so that what is
    reserved is resident, too. Otherwise an answer depended on the attempts before it (a transformer's by 10 %), and
    peaks stayed below what counts against the limit (an LSTM's by 20 %). It costs time: steps are timed without.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._origin_bytes = 0  # of address space: what is there and not the attempt's
        self._limit_bytes: int | None = None
        self._limits_before: tuple[int, int] | None = None
        self._fresh_bytes: int | None = None
        self._kept_bytes: list[int] = []  # by attempt: what it and those before left for good
        self._first_size = 0

    def describe(self) -> tuple[str, int | None, int | None]:
        meminfo = _fields(Path("/proc/meminfo"))
        total, free = meminfo.get("MemTotal"), meminfo.get("MemAvailable")
        cap, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
        if total and free and cap and used is not None and cap < total:  # a container's memory is its own
            total, free = cap, min(free, cap - used)
        return f"{_processor()} ({os.cpu_count()} cores)", total, free

    def default_limit(self, margin: float) -> int | None:  # noqa: ARG002 - the host keeps a larger reserve of its own
        free = self.describe()[2]
        return int(free * HOST_SHARE_OF_FREE) if free else None

    def enforce(self, limit_bytes: int) -> None:
        _set_malloc(mapped_from=_MAPPED_BYTES)
        if self._fresh_bytes is None:
            self._warm_up()
            self._fresh_bytes = self._origin_bytes = _fields(_STATUS).get("VmSize", 0)
        if platform.system() != "Linux":
            return  # elsewhere an address-space limit is not kept by the system
        import resource

        self._limit_bytes = limit_bytes
        self._limits_before = self._limits_before or resource.getrlimit(resource.RLIMIT_AS)
        self._count_from(self._fresh_bytes)

    def lift(self) -> None:
        if self._limits_before is not None:
            import resource

            resource.setrlimit(resource.RLIMIT_AS, self._limits_before)
            self._limits_before = self._limit_bytes = None

    @contextlib.contextmanager
    def attempt(self, batch_size: int) -> Iterator[None]:
        self.release()
        if self._fresh_bytes is not None:
            kept = _fields(_STATUS).get("VmSize", 0) - self._fresh_bytes if self._kept_bytes else 0
            one_off = self._one_off_bytes() if self._kept_bytes else 0
            self._count_from(self._fresh_bytes + kept - one_off, spared_bytes=_SPARED_BYTES)
        self._first_size = self._first_size or batch_size
        _set_malloc(mapped_from=_MAPPED_IN_ATTEMPTS_BYTES, perturb=_FILL_WITH_ZEROS)
        try:
            yield
        finally:
            _set_malloc(mapped_from=_MAPPED_BYTES)
            self.release()
            self._kept_bytes.append(_fields(_STATUS).get("VmSize", 0) - (self._fresh_bytes or 0))

    def _one_off_bytes(self) -> int:
        """Of what the first attempt left for good, that which it would leave at any size: it counts in any process.

        The rest (oneDNN's kernels for that one shape) comes with each new size again, and what was made for other
        sizes does not count. How much that is shows from the second attempt on; a batch of one has next to nothing.
        """
        unknown = 0 if self._first_size == 1 else _ONE_SHAPES_BYTES
        own = max((after - before for before, after in pairwise(self._kept_bytes)), default=unknown)
        return max(0, self._kept_bytes[0] - own)

    def _count_from(self, origin_bytes: int, spared_bytes: int = 0) -> None:
        self._origin_bytes = origin_bytes
        if self._limits_before is not None and self._limit_bytes is not None:
            import resource

            most = origin_bytes + self._limit_bytes - spared_bytes
            resource.setrlimit(resource.RLIMIT_AS, (most, self._limits_before[1]))

    def _warm_up(self) -> None:
        """One step of a small model: what torch sets up then would otherwise count as the user's model's."""
        layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 256)
        )
        optimizer = torch.optim.AdamW(layers.parameters())
        with torch.random.fork_rng(devices=[]):
            images = torch.randn(256, 3, 8, 8)  # so many that every thread gets a part
            torch.nn.functional.cross_entropy(layers(images), torch.zeros(256, dtype=torch.long)).backward()
        optimizer.step()
        torch.save(optimizer.state_dict(), io.BytesIO())
        del layers, optimizer, images
        self.release()

    def reset_peaks(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return

    def peaks(self) -> Peaks:
        now = _fields(_STATUS)
        if "VmHWM" not in now:
            return Peaks(None, None)
        higher = now["VmHWM"] - now["VmRSS"]  # Linux resets the high-water mark of resident memory only
        return Peaks(None, max(0, now["VmSize"] + higher - self._origin_bytes))

    def synchronize(self) -> None:
        """The host has done its work when a call returns."""

    def release(self) -> None:
        gc.collect()
        _free_blas_buffers()
        if platform.system() == "Linux":
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps freed pages otherwise; musl has none
            if trim is not None:
                trim(0)


def _set_malloc(*, mapped_from: int, perturb: int = 0) -> None:
    """Has glibc map every block of so many bytes or more for itself: freeing it gives its address space back."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if set_option is not None:
        options = {_M_MMAP_THRESHOLD: mapped_from, _M_TRIM_THRESHOLD: mapped_from, _M_PERTURB: perturb}
        for option, value in options.items():
            set_option(option, value)


@functools.cache
def _mkl() -> ctypes.CDLL | None:
    """The library that holds MKL, in which torch's x86 builds multiply matrices."""
    library = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    return ctypes.CDLL(str(library)) if library.is_file() else None


def _free_blas_buffers() -> None:
    """MKL keeps its packing buffers for the next product, several mebibytes of them for each new shape."""
    free = getattr(_mkl(), "mkl_serv_free_buffers", None)
    if free is not None:
        free()


def _fields(path: Path) -> dict[str, int]:
    """The `Name: 123 kB` lines of a /proc file, in bytes; empty where there is no such file."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, flags=re.MULTILINE)}


def _cgroup_bytes(name: str) -> int | None:
    try:
        text = Path("/sys/fs/cgroup", name).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()
