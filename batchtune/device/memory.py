"""Which device a name means, and its memory."""

from __future__ import annotations

import torch

from batchtune.device._base import DeviceMemory
from batchtune.device.accelerator import AcceleratorMemory
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
