"""How many workers train at once, and which device is whose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from batchtune.errors import DeviceError, UsageError


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    """Where one worker trains: its device, and what its environment says of that."""

    device: str
    environment: Mapping[str, str]


def count_workers(
    asked: int | Literal["auto"], device: str, *, devices: int, processors: int, visible: str | None
) -> int:
    """How many workers there are to be.

    Args:
        asked: in the configuration.
        device: the first worker's, as torch names it.
        devices: of this kind that one process sees.
        processors: that this process may use.
        visible: `CUDA_VISIBLE_DEVICES`.

    Raises:
        DeviceError: there are fewer devices: two runs on one would slow each other down.
        UsageError: the CPU has fewer processors.
    """
    if device == "cpu":
        if asked != "auto" and asked > processors:
            raise UsageError(f"workers {asked}: more than the {processors} processors here, so runs would share them")
        return 1 if asked == "auto" else asked
    here = max(devices, len(_entries(visible)))
    if asked != "auto" and asked > here:
        raise DeviceError(f"workers {asked}: there are only {here} devices, and runs that share one cannot be timed")
    return here if asked == "auto" else asked


def assign_devices(device: str, count: int, *, devices: int, visible: str | None) -> list[DeviceAssignment]:
    """A device for each worker, the first one's first.

    Of devices that `CUDA_VISIBLE_DEVICES` lists, each worker sees one alone: a process cannot use two slices of a GPU.

    Args:
        device: the first worker's, as torch names it.
        count: of workers.
        devices: of this kind that one process sees.
        visible: `CUDA_VISIBLE_DEVICES`.
    """
    kind, _, first = device.partition(":")
    entries = _entries(visible) if kind == "cuda" else []
    if kind == "cpu":
        return [DeviceAssignment("cpu", {})] * count
    here = max(devices, len(entries), count)
    numbers = [(int(first or 0) + number) % here for number in range(count)]
    if len(entries) >= here:
        return [DeviceAssignment("cuda:0", {"CUDA_VISIBLE_DEVICES": entries[number]}) for number in numbers]
    return [DeviceAssignment(f"{kind}:{number}", {}) for number in numbers]


def _entries(visible: str | None) -> list[str]:
    return [entry.strip() for entry in (visible or "").split(",") if entry.strip()]
