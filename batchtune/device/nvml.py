"""What NVML tells of a GPU: who holds its memory, what its sensors say while it works, and what energy work takes.

Nothing here opens a CUDA context or loads torch by itself, so that a look changes nothing and the parent may take one.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from batchtune.device.sharing import Sharing
from batchtune.document import DeviceProcess

if TYPE_CHECKING:
    import torch

_PERIOD_SECONDS = 0.1
_MOVES_SECONDS = 0.1  # of an H100's counter of energy, from one move to the next
_MILLI = 1e-3
_COUNTS_FROM = 0.1  # share of the samples in which clocks must have been held back, for the reason to be named
_THROTTLE_REASONS = {  # nvml.h: nvmlClocksEventReason…; an idle GPU is not held back
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "power brake",
    0x100: "display clocks",
}
Answer = TypeVar("Answer")


def told(ask: Callable[..., Answer], *arguments: object) -> Answer | None:
    """What NVML answers; None where the driver, its library or the device does not tell: such a sensor is absent."""
    try:
        return ask(*arguments)
    except Exception:  # noqa: BLE001 - pynvml has several kinds, one for functions that an older library lacks
        return None


def visible_devices(visible: str | None) -> list[str]:
    """The entries of `CUDA_VISIBLE_DEVICES`; none where it is not set."""
    return [entry.strip() for entry in (visible or "").split(",") if entry.strip()]


def candidate_uuids(torch_uuid: str, index: int, visible: str | None) -> list[str]:
    """The names NVML may know a CUDA device by, the likeliest first.

    torch leaves out the prefix that tells a MIG slice from a whole GPU, and older drivers give a slice the UUID of
    the GPU it is cut from; `CUDA_VISIBLE_DEVICES` (`visible`) names slices in full.
    """
    entries = [entry.strip() for entry in (visible or "").split(",")]
    named = [entries[index]] if index < len(entries) and entries[index].startswith("MIG-") else []
    bare = torch_uuid.removeprefix("GPU-").removeprefix("MIG-")
    return [*named, f"MIG-{bare}", f"GPU-{bare}"]


def find_handle(nvml: ModuleType, uuids: Sequence[str]) -> object:
    """NVML's handle of the first name it knows; of a GPU cut into slices, its first one, as CUDA takes it.

    Raises:
        LookupError: it knows none of them.
    """
    for uuid in uuids:
        handle = told(nvml.nvmlDeviceGetHandleByUUID, uuid)
        if handle is not None:
            return _slice_of(nvml, handle)
    raise LookupError(f"NVML knows no device {' or '.join(uuids)}")


def _slice_of(nvml: ModuleType, handle: object) -> object:
    is_slice = told(nvml.nvmlDeviceIsMigDeviceHandle, handle)
    mode = told(nvml.nvmlDeviceGetMigMode, handle)  # None: a GPU that cannot be cut
    if is_slice or not mode or not mode[0]:
        return handle
    slices = range(told(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0)
    handles = (told(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number) for number in slices)
    return next((each for each in handles if each is not None), handle)


def sharing(nvml: ModuleType, handle: object) -> Sharing:
    """Free bytes and processes of one device; what the driver does not tell is absent."""
    memory = told(nvml.nvmlDeviceGetMemoryInfo, handle)
    held: dict[int, int | None] = {}
    for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        for process in _known_as(nvml, handle, name, f"{name}_v2") or ():
            held[process.pid] = process.usedGpuMemory or held.get(process.pid)
    free = None if memory is None else int(memory.free)
    return Sharing(free, tuple(DeviceProcess(pid=pid, memory_bytes=held[pid]) for pid in sorted(held)))


def _known_as(nvml: ModuleType, handle: object, *names: str) -> Any:
    """What a function tells under the first of its names that the driver knows: those before 510 or 535 have others."""
    answers = (told(getattr(nvml, name, lambda _: None), handle) for name in names)
    return next((each for each in answers if each is not None), None)


def _with_nvml(ask: Callable[[ModuleType], Answer]) -> Answer | None:
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


def distances(visible: str | None) -> tuple[list[str], list[list[int]]] | None:
    """The GPUs of this machine by UUID, those that `CUDA_VISIBLE_DEVICES` lists, and how far apart any two are.

    The level of their common ancestor on the PCI bus; less than 0 where NVLink connects them, by its lanes. None where
    NVML does not tell, where there are slices, or unlike GPUs, which CUDA numbers in an order of its own.
    """

    def asked(nvml: ModuleType) -> tuple[list[str], list[list[int]]]:
        by_number = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        handles = [
            by_number[int(entry)] if entry.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(entry)
            for entry in visible_devices(visible)
        ]
        handles = handles or by_number
        (_,) = {nvml.nvmlDeviceGetName(each) for each in by_number}
        apart = [[0 if one is other else _apart(nvml, one, other) for other in handles] for one in handles]
        return [nvml.nvmlDeviceGetUUID(each) for each in handles], apart

    return None if "MIG-" in (visible or "") else _with_nvml(asked)


def _apart(nvml: ModuleType, one: object, other: object) -> int:
    place, linked = nvml.nvmlDeviceGetPciInfo(other).busId, nvml.NVML_P2P_CAPS_INDEX_NVLINK
    remotes = (told(nvml.nvmlDeviceGetNvLinkRemotePciInfo, one, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS))
    if lanes := sum(1 for remote in remotes if remote is not None and remote.busId == place):
        return -lanes
    if told(nvml.nvmlDeviceGetP2PStatus, one, other, linked) == nvml.NVML_P2P_STATUS_OK:
        return -1  # through a switch
    return int(nvml.nvmlDeviceGetTopologyCommonAncestor(one, other))


@dataclass(slots=True)
class Readings:
    """Samples of one stretch of work; a sensor that the device lacks has none."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    joules: float | None = None
    throttle_masks: list[int] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Means over the stretch (memory: the highest), under the names of the result document."""
        found: dict[str, Any] = {name: statistics.fmean(values) for name, values in self.samples.items()}
        if "memory_used_bytes" in found:
            found["memory_used_bytes"] = max(self.samples["memory_used_bytes"])
        if masks := self.throttle_masks:
            seen = {name: sum(bool(mask & bit) for mask in masks) for bit, name in _THROTTLE_REASONS.items()}
            least = max(1, _COUNTS_FROM * len(masks))
            found["throttle_reasons"] = [name for name, times in seen.items() if times >= least]
        return found


class Sensors:
    """The NVML sensors of one CUDA device; on any other device there are none and nothing is reported."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._nvml: Any = None
        self._handle: object = None
        if device.type == "cuda" and torch.version.hip is None:
            with contextlib.suppress(Exception):  # no driver library, or a device NVML does not list: no sensors
                self._open(device)

    def _open(self, device: torch.device) -> None:
        import pynvml
        import torch

        pynvml.nvmlInit()
        torch_uuid = str(torch.cuda.get_device_properties(device).uuid)
        uuids = candidate_uuids(torch_uuid, device.index or 0, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._handle = find_handle(pynvml, uuids)
        self._nvml = pynvml

    @property
    def present(self) -> bool:
        """Whether this device has sensors."""
        return self._nvml is not None

    def read(self) -> dict[str, float]:
        """One reading of every sensor the device has, under the names of the result document."""
        nvml, handle = self._nvml, self._handle
        sensors: dict[str, Callable[[], float]] = {
            "gpu_utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "memory_controller_utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).memory / 100,
            "memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) * _MILLI,
            "temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        }
        found = ((name, told(sensor)) for name, sensor in sensors.items())
        return {name: value for name, value in found if value is not None}

    def throttle_mask(self) -> int | None:
        """Why the clocks are held back now, as NVML's bits; None where the device does not tell."""
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        mask: int | None = _known_as(self._nvml, self._handle, *names)
        return mask

    def uuid(self) -> str | None:
        """The device's UUID in NVML, a MIG slice's own."""
        return told(lambda: str(self._nvml.nvmlDeviceGetUUID(self._handle)))

    def sharing(self) -> Sharing | None:
        """Free memory and the processes that hold the rest, but for this one; None where there are no sensors."""
        return sharing(self._nvml, self._handle).without(os.getpid().__eq__) if self.present else None

    def joules(self) -> float | None:
        """Energy used since the driver was loaded, in joules; None where the device does not count it."""
        return told(lambda: float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) * _MILLI)

    def driver(self) -> str | None:
        """The driver's version."""
        return told(lambda: str(self._nvml.nvmlSystemGetDriverVersion()))

    @contextlib.contextmanager
    def sampling(self) -> Iterator[Readings]:
        """Samples the sensors from a thread for as long as the block runs."""
        readings = Readings()
        if not self.present:
            yield readings
            return
        done = threading.Event()

        def sample() -> None:
            while not done.wait(_PERIOD_SECONDS):
                for name, value in self.read().items():
                    readings.samples.setdefault(name, []).append(value)
                mask = self.throttle_mask()
                if mask is not None:
                    readings.throttle_masks.append(mask)

        thread = threading.Thread(target=sample, daemon=True)
        before = self.joules()
        thread.start()
        try:
            yield readings
        finally:
            done.set()
            thread.join()
            after = self.joules()
            if before is not None and after is not None:
                readings.joules = after - before


class Energy:
    """Joules of work between pauses, by the counter of a device.

    Between two moves the counter says nothing: stretches of work whose pauses are no longer than that are taken
    together with them, and have their share of the time in what both drew.

    Args:
        read: the counter, in joules; None where the device has none.

    Attributes:
        joules: so far; None where the device has no counter.
    """

    def __init__(self, read: Callable[[], float | None]) -> None:
        self._read, self._before, self._total = read, 0.0, 0.0  # the stretches that are together now, and with them
        self._since, self._first, self._worked, self._ended = 0.0, 0.0, 0.0, float("-inf")
        self.joules: float | None = None if read() is None else 0.0

    @contextlib.contextmanager
    def of_work(self) -> Iterator[None]:
        """Counts what the block takes."""
        began, before = time.perf_counter(), self._read()
        yield
        ended, after = time.perf_counter(), self._read()
        if self.joules is None or before is None or after is None:
            return
        if began - self._ended > _MOVES_SECONDS:
            self._since, self._first, self._worked, self._before = began, before, 0.0, self._total
        self._worked, self._ended = self._worked + ended - began, ended
        share = min(1.0, self._worked / max(ended - self._since, 1e-9))
        self._total = self._before + share * (after - self._first)
        self.joules = max(self.joules, self._total)
