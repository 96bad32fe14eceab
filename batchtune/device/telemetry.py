"""What a GPU's sensors say while it works: utilisation, memory, power, temperature and energy, sampled through NVML."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from batchtune.device.sharing import Sharing, candidate_uuids, find_handle, sharing, told

_PERIOD_SECONDS = 0.1
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


@dataclass(slots=True)
class Readings:
    """Samples of one stretch of work; a sensor that the device lacks has none."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    joules: float | None = None
    throttle_masks: list[int] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Means over the stretch (memory: the highest), under the names of the result document."""
        found: dict[str, Any] = {
            name: statistics.fmean(values)
            for name, values in self.samples.items()
            if values and name != "memory_used_bytes"
        }
        if self.samples.get("memory_used_bytes"):
            found["memory_used_bytes"] = int(max(self.samples["memory_used_bytes"]))
        if self.throttle_masks:
            least = _COUNTS_FROM * len(self.throttle_masks)
            seen = {
                name: sum(bool(mask & bit) for mask in self.throttle_masks) for bit, name in _THROTTLE_REASONS.items()
            }
            found["throttle_reasons"] = [name for name, times in seen.items() if times and times >= least]
        return found


class Sensors:
    """The NVML sensors of one CUDA device; on any other device there are none and nothing is reported."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        if device.type == "cuda" and torch.version.hip is None:
            with contextlib.suppress(Exception):  # no driver library, or a device NVML does not list: no sensors
                self._open(device)

    def _open(self, device: torch.device) -> None:
        import pynvml

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
        if not self.present:
            return {}
        nvml, handle = self._nvml, self._handle
        sensors: dict[str, Callable[[], float]] = {
            "gpu_utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "memory_controller_utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).memory / 100,
            "memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) * _MILLI,
            "temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        }
        found = ((name, told(sensor)) for name, sensor in sensors.items())
        return {name: float(value) for name, value in found if value is not None}

    def throttle_mask(self) -> int | None:
        """Why the clocks are held back now, as NVML's bits; None where the device does not tell."""
        if not self.present:
            return None
        nvml, handle = self._nvml, self._handle
        mask: Any = told(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if mask is None:  # drivers before 535 know this name only
            mask = told(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        return None if mask is None else int(mask)

    def uuid(self) -> str | None:
        """The device's UUID in NVML, a MIG slice's own."""
        return told(lambda: str(self._nvml.nvmlDeviceGetUUID(self._handle))) if self.present else None

    def sharing(self) -> Sharing | None:
        """Free memory and the processes that hold the rest; None where there are no sensors."""
        return sharing(self._nvml, self._handle) if self.present else None

    def joules(self) -> float | None:
        """Energy used since the driver was loaded, in joules; None where the device does not count it."""
        if not self.present:
            return None
        return told(lambda: float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) * _MILLI)

    def driver(self) -> str | None:
        """The driver's version."""
        return told(lambda: str(self._nvml.nvmlSystemGetDriverVersion())) if self.present else None

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
