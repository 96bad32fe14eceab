"""The CPU's memory: a limit of address space that stands for a device's, and what glibc and MKL must be told for it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import io
import os
import platform
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch

from batchtune.device._base import Peaks

HOST_SHARE_OF_FREE = 0.8  # a host that swaps or kills helps nobody: other programs keep a fifth of what is free
_STATUS = Path("/proc/self/status")
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_PERTURB = -1, -3, -6  # malloc.h of glibc
_MAPPED_IN_ATTEMPTS_BYTES = 2**16  # blocks from this size on are mapped each for itself
_MAPPED_BYTES, _KEPT_FREE_BYTES = 32 << 20, 64 << 20  # where glibc's own thresholds end that rise with use (mallopt(3))
_ONE_SHAPES_BYTES = 8 << 20  # at the most, of what stays after an attempt, belongs to its batch size, until it shows
_SPARED_BYTES = 256 << 10  # the same training takes some pages of the heap more or less from process to process
_OBJECTS_BYTES, _OBJECT_BYTES = 2 << 20, 448  # room for what Python itself makes; one of the objects that make it
_FILL_WITH_ZEROS = 0xFF  # glibc fills new blocks with this value's complement, 0 leaves them as they are


class HostMemory:
    """The CPU's memory, limited by the process's address space.

    The limit counts what comes on top of the process as it stands when `enforce` is called: torch and the task are
    imported by then, so model, optimizer and activations are in it, as they are on an accelerator. Peaks are of
    resident memory, the only high-water mark that Linux lets a process reset.

    Within an attempt every block that could leave a hole behind is mapped for itself, and filled, so that what is
    reserved is resident, too. Otherwise an answer depended on the attempts before it (a transformer's by 10 %), and
    peaks stayed below what counts against the limit (an LSTM's by 20 %); from process to process the same training
    took up to 40 % more or less. It costs time: whatever is timed runs as glibc does by itself, or as the user's
    MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ say.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._origin_bytes = 0  # of address space: what is there and not the attempt's
        self._limit_bytes: int | None = None
        self._limits_before: tuple[int, int] | None = None
        self._fresh_bytes: int | None = None
        self._fresh_used_bytes = 0
        self._kept_bytes: list[int] = []  # by attempt: what it and those before left for good
        self._first_size = 0
        self._objects: list[bytes] = []

    def describe(self) -> tuple[str, int | None, int | None]:
        meminfo = _fields(MEMINFO)
        total, free = meminfo.get("MemTotal"), meminfo.get("MemAvailable")
        cap, used = _cgroup_bytes("memory.max"), _cgroup_used_bytes()
        if total and free and cap and used is not None and cap < total:  # a container's memory is its own
            total, free = cap, min(free, max(0, cap - used))
        return f"{_processor()} ({os.cpu_count()} cores)", total, free

    def default_limit(self, margin: float) -> int | None:
        free = self.describe()[2]
        return None if free is None else int(free * min(HOST_SHARE_OF_FREE, 1 - margin))

    def enforce(self, limit_bytes: int) -> None:
        _leave_malloc_to_itself()
        if self._fresh_bytes is None:
            self._warm_up()
            self._fresh_bytes = self._origin_bytes = _fields(_STATUS).get("VmSize", 0)
            self._fresh_used_bytes = _used_bytes()
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
    def timing(self) -> Iterator[None]:
        """As on any device; what stays of it, such as a library that it loaded, does not count afterwards."""
        if self._fresh_bytes is None or self._limits_before is None:
            yield
            return
        import resource

        before = _used_bytes()
        resource.setrlimit(resource.RLIMIT_AS, self._limits_before)
        try:
            yield
        finally:
            self.release()
            left = max(0, _used_bytes() - before)
            self._fresh_bytes += left
            self._fresh_used_bytes += left
            self._count_from(self._origin_bytes + left)

    @contextlib.contextmanager
    def attempt(self, batch_size: int) -> Iterator[None]:
        self.release()
        if self._fresh_bytes is not None:
            kept = _used_bytes() - self._fresh_used_bytes if self._kept_bytes else 0
            one_off = one_off_bytes(self._first_size, self._kept_bytes) if self._kept_bytes else 0
            self._count_from(self._fresh_bytes + kept - one_off, spared_bytes=_SPARED_BYTES)
        self._first_size = self._first_size or batch_size
        _set_malloc(_MAPPED_IN_ATTEMPTS_BYTES, _MAPPED_IN_ATTEMPTS_BYTES, perturb=_FILL_WITH_ZEROS)
        try:
            yield
        finally:
            _leave_malloc_to_itself()
            self.release()
            self._kept_bytes.append(_used_bytes() - self._fresh_used_bytes)

    def _count_from(self, origin_bytes: int, spared_bytes: int = 0) -> None:
        self._origin_bytes = origin_bytes
        if self._limits_before is not None and self._limit_bytes is not None:
            import resource

            most = origin_bytes + self._limit_bytes - spared_bytes
            resource.setrlimit(resource.RLIMIT_AS, (most, self._limits_before[1]))

    def _warm_up(self) -> None:
        """One step of a small model: what torch sets up then would otherwise count as the user's model's."""
        with torch.enable_grad(), torch.device("cpu"):  # whatever the user's code has made the default
            _step_of_a_small_model()
        # Python takes memory for its objects a mebibyte at a time, and keeps it as long as one object is in it
        self._objects = [bytes(_OBJECT_BYTES) for _ in range(_OBJECTS_BYTES // _OBJECT_BYTES)][::256]
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


def one_off_bytes(first_size: int, kept_bytes: Sequence[int]) -> int:
    """Of what the first attempt left for good, that which it would leave at any size: it counts in any process.

    The rest (oneDNN's kernels for that one shape) comes with each new size again, and what was made for other sizes
    does not count. How much that is shows from the second attempt on; a batch of one has next to nothing.

    Args:
        first_size: batch size of the first attempt.
        kept_bytes: by attempt: what it and those before left for good.
    """
    unknown = 0 if first_size == 1 else _ONE_SHAPES_BYTES
    own = max((after - before for before, after in pairwise(kept_bytes)), default=unknown)
    return max(0, kept_bytes[0] - own)


def _step_of_a_small_model() -> None:
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 256)
    )
    optimizer = torch.optim.AdamW(layers.parameters())
    with torch.random.fork_rng(devices=[]):
        images = torch.randn(256, 3, 8, 8)  # so many that every thread gets a part
        torch.nn.functional.cross_entropy(layers(images), torch.zeros(256, dtype=torch.long)).backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), io.BytesIO())


def _leave_malloc_to_itself() -> None:
    """Glibc as the user's own training has it, once its thresholds have risen: only the largest blocks are mapped."""
    defaults = {"MALLOC_MMAP_THRESHOLD_": _MAPPED_BYTES, "MALLOC_TRIM_THRESHOLD_": _KEPT_FREE_BYTES}
    named = {name: os.environ.get(name, "") for name in defaults}
    _set_malloc(*(int(named[name][:9]) if named[name].isdecimal() else usual for name, usual in defaults.items()))


def _set_malloc(mapped_from: int, kept_free: int, perturb: int = 0) -> None:
    """Has glibc map every block of so many bytes or more for itself: freeing it gives its address space back."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if set_option is not None:
        options = {_M_MMAP_THRESHOLD: mapped_from, _M_TRIM_THRESHOLD: kept_free, _M_PERTURB: perturb}
        for option, value in options.items():
            set_option(option, value)


class _Mallinfo2(ctypes.Structure):
    """What glibc's heap holds; `fordblks` are the bytes that are free in it, see mallinfo(3)."""

    _fields_ = (("before", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t))


def _used_bytes() -> int:
    """Address space of this process without what its heap has free: holes that attempts left are room for the next."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc from 2.33 on
    free = 0
    if ask is not None:
        ask.restype = _Mallinfo2
        free = ask().fordblks
    return _fields(_STATUS).get("VmSize", 0) - int(free)


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


def _cgroup_bytes(file: str, field: str = "") -> int | None:
    """A figure that our cgroup keeps in a file of its own, or in a line that begins with the field's name."""
    try:
        text = (CGROUP / file).read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(rf"^{field} ?(\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


def _cgroup_used_bytes() -> int | None:
    """What our cgroup uses without the files it keeps in memory though nobody has used them of late, as others count.

    The kernel drops those (memory.stat's inactive_file) as soon as memory is wanted.
    """
    used, kept = _cgroup_bytes("memory.current"), _cgroup_bytes("memory.stat", "inactive_file") or 0
    return None if used is None else max(0, used - kept)


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()
