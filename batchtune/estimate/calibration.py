"""What probes of a GPU found in its memory beside what a trace sees; kept for later estimates on GPUs of that name."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchtune.device.gpus import find_gpu
from batchtune.device.nvml import look
from batchtune.errors import UsageError
from batchtune.estimate.memory.allocator import MIB
from batchtune.estimate.memory.overheads import Offsets
from batchtune.processes.local import is_of_a_child
from batchtune.run_folder import write_atomically

if TYPE_CHECKING:
    from batchtune.processes.worker import Worker
    from batchtune.protocol.commands import Opened

_CALIBRATION = "calibration.json"
_FORMAT = 3  # 1: without cuDNN's workspaces in the trace; 2: recurrent layers cell by cell
_MOST_OFFSETS = 16  # of each term; the oldest go first
_BELIEVED = {  # what lies outside was no measurement: somebody else used the GPU, or the file was edited
    "context_bytes": (64 * MIB, 4096 * MIB),  # no context takes less: nobody had one when that was measured
    "convolution_share": (-0.5, 2.0),
    "recurrent_share": (-0.5, 2.0),
}
SAME_BYTES = 16 << 20
"""Free memory that differs by less before and after: nobody else came or went."""
SETTLING_SECONDS = (0.0, 0.3, 1.0)


def cache_folder() -> Path:
    """Where this platform keeps what programs can find out again."""
    if "XDG_CACHE_HOME" in os.environ:
        return Path(os.environ["XDG_CACHE_HOME"]) / "batchtune"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "batchtune"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "batchtune"


def offsets_of(gpu: str) -> Offsets:
    """What probes with this torch measured on GPUs that the catalogue calls `gpu`; nothing from a broken file."""
    measured = defaultdict[str, list[float]](list)
    for name, entry in _read().items():
        with contextlib.suppress(UsageError):  # a driver's name that fits no row, or several
            if find_gpu(name).name == gpu:
                for term, values in _believed(entry).items():
                    measured[term] += values
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
    if not _is_believed(term, value):
        return
    gpus = _read()
    entry = _believed(gpus.get(device_name))
    entry[term] = [*entry.get(term, []), value][-_MOST_OFFSETS:]
    document = {"format": _FORMAT, "gpus": gpus | {device_name: {"torch": _torch(), **entry}}}
    with contextlib.suppress(OSError):
        cache_folder().mkdir(parents=True, exist_ok=True)
        write_atomically(cache_folder() / _CALIBRATION, json.dumps(document, indent=2) + "\n")


def _torch() -> str:
    """The version as far as memory may depend on it."""
    return ".".join(version("torch").split(".")[:2])


def _read() -> dict[str, object]:
    try:
        document = json.loads((cache_folder() / _CALIBRATION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    gpus = document.get("gpus") if isinstance(document, dict) and document.get("format") == _FORMAT else None
    return gpus if isinstance(gpus, dict) else {}


def _believed(entry: object) -> dict[str, list[float]]:
    """The measurements of one GPU with this torch that can be what they claim to be."""
    if not isinstance(entry, dict) or entry.get("torch") != _torch():
        return {}
    terms = {term: entry[term] for term in _BELIEVED if isinstance(entry.get(term), list)}
    kept = {term: [each for each in values if _is_believed(term, each)] for term, values in terms.items()}
    return {term: values[-_MOST_OFFSETS:] for term, values in kept.items() if values}


def _is_believed(term: str, value: object) -> bool:
    low, high = _BELIEVED[term]
    return isinstance(value, int | float) and low <= value <= high  # which NaN is not


class FreeMemory:
    """Free memory of an accelerator before our first child, beside it and after the last; None where none tells.

    Attributes:
        after: bytes that are free once nothing of ours is there any more.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._beside_child = 0, 0  # free bytes before a child opened, and once it had trained
        self.after: int | None = None

    def look_beside_child(self) -> None:
        """To be called when a child has trained and given its tensors back."""
        opened = self._worker.opened
        if opened is None or opened.nvml_uuid is None or opened.world_size > 1:
            return
        seen, free = look(opened.nvml_uuid), opened.environment.device_memory_free_bytes
        if seen and seen.free_bytes and free:
            self._beside_child = free, seen.free_bytes

    def look_after(self, first: Opened) -> None:
        """To be called when all is done, with what the first child opened: closes the last, and keeps what was learnt.

        Where nobody tells what is free, `after` is what was when the last child opened.
        """
        last = self._worker.opened
        if last is None or first.device == "cpu" or first.world_size > 1:
            return
        self._worker.close()
        at_last, uuid = last.environment.device_memory_free_bytes, first.nvml_uuid
        self.after = _settled_free_bytes(uuid, first) if uuid else at_last
        opened, beside = self._beside_child
        if self.after and opened and abs(opened - self.after) <= SAME_BYTES:
            record(first.environment.device, "context_bytes", opened - beside)


def _settled_free_bytes(uuid: str, opened: Opened) -> int | None:
    """Free memory once the driver has taken back what our last child had, which may take a moment."""
    before, free = opened.environment.device_memory_free_bytes, None
    for wait in SETTLING_SECONDS:
        time.sleep(wait)
        seen = look(uuid)
        free = seen.without(is_of_a_child).free_bytes if seen else None
        if free is None or before is None or before - free <= SAME_BYTES:
            break
    return free
