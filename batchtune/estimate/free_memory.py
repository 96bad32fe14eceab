"""Free memory of an accelerator before our first child, beside it and after the last: what a context of ours takes."""

from __future__ import annotations

import time

from batchtune.device.nvml import look
from batchtune.estimate.calibration import record
from batchtune.processes.worker import Worker
from batchtune.protocol.commands import Opened

SAME_BYTES = 16 << 20
"""Free memory that differs by less before and after: nobody else came or went."""
SETTLING_SECONDS = (0.0, 0.3, 1.0)


class FreeMemory:
    """What a probe sees of free memory; all of it is None where there is no accelerator that tells.

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
        if opened is None or opened.nvml_uuid is None or opened.is_group:
            return
        seen, free = look(opened.nvml_uuid), opened.environment.device_memory_free_bytes
        if seen and seen.free_bytes and free:
            self._beside_child = free, seen.free_bytes

    def look_after(self, first: Opened) -> None:
        """To be called when all is done, with what the first child opened: closes the last, and keeps what was learnt.

        Where nobody tells what is free, `after` is what was when the last child opened.
        """
        last = self._worker.opened
        if last is None or first.device == "cpu" or first.is_group:
            return
        self._worker.close()
        at_last, uuid = last.environment.device_memory_free_bytes, first.nvml_uuid
        self.after = _settled_free_bytes(uuid, first) if uuid else at_last
        opened, beside = self._beside_child
        if self.after and opened and abs(opened - self.after) <= SAME_BYTES:
            record(first.device_name, "context_bytes", opened - beside)


def _settled_free_bytes(uuid: str, opened: Opened) -> int | None:
    """Free memory once the driver has taken back what our last child had, which may take a moment."""
    before, free = opened.environment.device_memory_free_bytes, None
    for wait in SETTLING_SECONDS:
        time.sleep(wait)
        seen = look(uuid)
        free = seen.free_bytes if seen else None
        if free is None or before is None or before - free <= SAME_BYTES:
            break
    return free
