"""The CPU's memory: what is resident of a process above its imports, measured against a limit."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import platform
import random
import re
import threading
from array import array
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import torch

from batchtune.device._base import DeviceMemory, Peaks, require_no_more
from batchtune.device.host import STATUS, cgroup_memory, proc_fields, resident_bytes

HOST_SHARE_OF_FREE = 0.8  # a host that swaps or kills helps nobody: other programs keep a fifth of what is free
SYSTEM = Path("/")  # where /proc and /sys are
_LOOK_SECONDS = 0.005  # between two looks at what is resident
_ROOM_BYTES = 16 << 20  # for what Python itself makes once a limit was passed
_ARENA_BYTES = 136 << 20  # of address space that a thread may reserve and not use: glibc's arena, and its stack
_MADV_POPULATE_READ = 22  # asm-generic/mman-common.h
_SHAKING_BLOCKS, _LARGEST_SHAKING_BYTES = 300, 4096

_loaded_early_bytes = 0
_shaken: list[torch.Tensor] = []


class HostMemory(DeviceMemory):
    """The CPU's memory, limited by what is resident of the process above its imports.

    That is what a container's memory.max and the host's free memory count. The allocator is left as it is, so that an
    attempt takes what the same training takes in the user's own process: what glibc keeps of freed blocks, libraries'
    buffers and what torch loads when it is first used are all in it.

    The system has no such limit, so that peaks are measured, and an attempt that went beyond has failed. Meanwhile a
    thread looks: from the limit on, the process gets no more address space, as a device has no more memory.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._imported_bytes = 0
        self._limit_bytes: int | None = None
        self._limits_before: tuple[int, int] | None = None
        self._most_bytes = self._allowed_bytes = 0  # of address space
        self._ended = threading.Event()

    def describe(self) -> tuple[str, int | None, int | None]:
        meminfo = proc_fields(SYSTEM / "proc/meminfo")
        total, free = meminfo.get("MemTotal"), meminfo.get("MemAvailable")
        if total and free:
            own = [(limit, left) for limit, left in cgroup_memory(SYSTEM) if limit < total]  # a container's, or a job's
            total, free = (min(each) for each in zip((total, free), *own, strict=True))
        return f"{_processor()} ({os.cpu_count()} cores)", total, free

    def default_limit(self, margin: float) -> int | None:
        free = self.describe()[2]
        return None if free is None else int(free * min(HOST_SHARE_OF_FREE, 1 - margin))

    def enforce(self, limit_bytes: int) -> None:
        if platform.system() != "Linux":
            return  # elsewhere nothing tells what is resident
        import resource

        require_no_more(limit_bytes, self.describe()[1], self.device)
        _map_what_the_image_has()
        self.release()  # of what the imports have freed and glibc has kept: training would fill it unseen
        now, free = proc_fields(STATUS), self.describe()[2] or 0
        self._imported_bytes = now.get("VmRSS", 0) - _loaded_early_bytes
        # An only tensor may pass the limit at once; beyond what is free it would end other programs.
        reserve = min(limit_bytes, max(0, free - limit_bytes)) + (torch.get_num_threads() + 4) * _ARENA_BYTES
        self._limits_before = own, _ = resource.getrlimit(resource.RLIMIT_AS)
        most = now.get("VmSize", 0) + limit_bytes + reserve
        self._most_bytes = most if own == resource.RLIM_INFINITY else min(most, own)  # what `ulimit -v` allows
        self._limit_bytes = limit_bytes
        self._allow(self._most_bytes)
        self._ended = threading.Event()
        threading.Thread(target=self._look, args=(self._ended,), daemon=True).start()

    def lift(self) -> None:
        self._ended.set()
        if self._limits_before is not None:
            self._allow(self._limits_before[0])
            self._limits_before = self._limit_bytes = None

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        limit, self._limit_bytes = self._limit_bytes, None
        if limit is None or self._limits_before is None:
            yield
            return
        self._allow(self._limits_before[0])
        try:
            yield
        finally:
            self._limit_bytes = limit
            self.release()

    def _look(self, ended: threading.Event) -> None:
        while not ended.wait(_LOOK_SECONDS):
            limit, now = self._limit_bytes, proc_fields(STATUS)
            if limit is not None and now["VmRSS"] - self._imported_bytes > limit:
                self._allow(min(self._allowed_bytes, now["VmSize"] + _ROOM_BYTES))

    def _allow(self, address_space: int) -> None:
        import resource

        assert self._limits_before is not None  # noqa: S101 - whoever limits has asked first
        self._allowed_bytes = address_space
        resource.setrlimit(resource.RLIMIT_AS, (address_space, self._limits_before[1]))

    def reset_peaks(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def peaks(self) -> Peaks:
        now = proc_fields(STATUS)
        if "VmHWM" not in now:
            return Peaks(None, None)
        taken = max(0, now["VmHWM"] - self._imported_bytes)
        return Peaks(None, taken, is_beyond=self._limit_bytes is not None and taken > self._limit_bytes)

    def synchronize(self) -> None:
        """The host has done its work when a call returns."""

    def release(self) -> None:
        gc.collect()
        if platform.system() == "Linux":
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps freed pages otherwise; musl has none
            if trim is not None:
                trim(0)
        if self._limit_bytes is not None:
            self._allow(self._most_bytes)


def load_early(load: Callable[[], object]) -> None:
    """Loads before a fork what training would load, of whose memory it counts as a part."""
    global _loaded_early_bytes  # noqa: PLW0603 - of this process and its forks
    before = resident_bytes()
    load()
    _loaded_early_bytes = _loaded_early_bytes or max(0, resident_bytes() - before)


def shake_heap(number: int) -> None:
    """Takes small blocks and gives some of them back, others for each number; 0: none.

    Where glibc puts the blocks of a training depends on what small ones lay there before, which differs from process
    to process by addresses and hashes, but not among the forks of an image. What forks take that were shaken is spread
    as what processes take.
    """
    drawn = random.Random(number)
    sizes = [int(_LARGEST_SHAKING_BYTES ** drawn.uniform(0.4, 1)) for _ in range(_SHAKING_BLOCKS if number else 0)]
    blocks = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    _shaken.extend(drawn.sample(blocks, drawn.randint(0, len(blocks))))


def _map_what_the_image_has() -> None:
    """Maps the pages of libraries that this process's image has mapped: a fork begins without them.

    Their import would count as training's otherwise. Where the system does not help, that is how it is.
    """
    page, image = mmap.PAGESIZE, Path(f"/proc/{os.getppid()}")
    with contextlib.suppress(OSError), (image / "pagemap").open("rb", buffering=0) as pagemap:
        advise = ctypes.CDLL(None).madvise
        same = set(Path("/proc/self/maps").read_text("utf-8").splitlines())
        for line in (image / "maps").read_text("utf-8").splitlines():
            found = re.match(r"(\w+)-(\w+) r-[x-]p .* /", line)
            if found is None or line not in same:
                continue
            first, end = int(found[1], 16), int(found[2], 16)
            pagemap.seek(first // page * 8)
            entries = array("q", pagemap.read((end - first) // page * 8))
            for is_there, pages in groupby(enumerate(entries), key=lambda entry: entry[1] < 0):  # its highest bit
                if is_there:
                    numbers = [number for number, _ in pages]
                    start = ctypes.c_void_p(first + numbers[0] * page)
                    advise(start, ctypes.c_size_t(len(numbers) * page), _MADV_POPULATE_READ)


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()
