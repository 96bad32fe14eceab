"""What probes of a GPU found in its memory beside what a trace sees; kept for later estimates on GPUs of that name."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from batchtune.device.gpus import find_gpu
from batchtune.errors import UsageError
from batchtune.files import write_atomically

_FORMAT = 1
_MOST_OFFSETS = 16  # of each term; the oldest go first
_GIB = 1 << 30
_BELIEVED = {  # what lies outside was no measurement: somebody else used the GPU, or the file was edited
    "context_bytes": (64 << 20, 4 * _GIB),  # no context takes less: nobody had one when that was measured
    "workspace_bytes": (0, 4 * _GIB),
    "convolution_share": (-0.5, 2.0),
    "recurrent_share": (-0.5, 2.0),
}


@dataclass(frozen=True)
class Offsets:
    """Medians of what was measured; None for a term that was not.

    Attributes:
        context_bytes: taken from the device by a process beside what its allocator reserves.
        workspace_bytes: allocated beside the storages of the trace, in steps without convolutions or recurrent layers.
        convolution_share: the same in steps with convolutions, as a share of the traced peak.
        recurrent_share: the same in steps with recurrent layers.
        probes: how many measurements the best-known term rests on.
    """

    context_bytes: int | None = None
    workspace_bytes: int | None = None
    convolution_share: float | None = None
    recurrent_share: float | None = None
    probes: int = 0


UNMEASURED = Offsets()


def cache_folder() -> Path:
    """Where this platform keeps what programs can find out again."""
    if "XDG_CACHE_HOME" in os.environ:
        return Path(os.environ["XDG_CACHE_HOME"]) / "batchtune"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "batchtune"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "batchtune"


def offsets_of(gpu: str) -> Offsets:
    """What probes with this torch measured on GPUs that the catalogue calls `gpu`; nothing from a broken file."""
    measured: dict[str, list[float]] = {}
    for name, entry in _read().items():
        with contextlib.suppress(UsageError):  # a driver's name that fits no row, or several
            if find_gpu(name).name == gpu:
                measured |= _believed(entry)
    found: dict[str, Any] = {
        term: statistics.median(values) if term.endswith("_share") else int(statistics.median(values))
        for term, values in measured.items()
    }
    return Offsets(**found, probes=max(map(len, measured.values()), default=0))


def record(device_name: str, term: str, value: float) -> None:
    """Keeps one measurement of a term of `Offsets`; where it cannot be written, or is not believed, nothing is kept.

    Args:
        device_name: as the driver reports it.
        term: a field of `Offsets`.
        value: bytes, or a share of the traced peak.
    """
    low, high = _BELIEVED[term]
    if not low <= value <= high:
        return
    gpus = _read()
    entry = _believed(gpus.get(device_name))
    entry[term] = [*entry.get(term, []), value][-_MOST_OFFSETS:]
    document = {"format": _FORMAT, "gpus": gpus | {device_name: {"torch": _torch(), **entry}}}
    with contextlib.suppress(OSError):
        cache_folder().mkdir(parents=True, exist_ok=True)
        write_atomically(_file(), json.dumps(document, indent=2) + "\n")


def _file() -> Path:
    return cache_folder() / "calibration.json"


def _torch() -> str:
    """The version as far as memory may depend on it."""
    return ".".join(version("torch").split(".")[:2])


def _read() -> dict[str, Any]:
    try:
        document = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    gpus = document.get("gpus") if isinstance(document, dict) and document.get("format") == _FORMAT else None
    return gpus if isinstance(gpus, dict) else {}


def _believed(entry: object) -> dict[str, list[float]]:
    """The measurements of one GPU with this torch that can be what they claim to be."""
    if not isinstance(entry, dict) or entry.get("torch") != _torch():
        return {}
    found = {}
    for term, (low, high) in _BELIEVED.items():
        values = entry.get(term)
        kept = [
            value
            for value in (values if isinstance(values, list) else [])
            if isinstance(value, int | float) and math.isfinite(value) and low <= value <= high
        ]
        if kept:
            found[term] = kept[-_MOST_OFFSETS:]
    return found
