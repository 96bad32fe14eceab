"""The estimate as a probe's prior: what a trace expects of this device, and what the attempts teach about a GPU."""

from __future__ import annotations

import bisect
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from batchtune.config.options import TRACE_SECONDS
from batchtune.device.gpus import find_gpu
from batchtune.device.sharing import gpus_here
from batchtune.document import Attempt
from batchtune.errors import BatchtuneError, UsageError
from batchtune.estimate.calibration import offsets_of, record
from batchtune.estimate.commands import PROGRAM, ExpectMemory, LoadTracer
from batchtune.observer import Observer
from batchtune.processes.local import LocalLauncher
from batchtune.processes.worker import Worker, WorkerDied
from batchtune.protocol.commands import Opened

_CONSTANT_SHARE = 0.02  # of the traced growth between two sizes, by which an offset may differ and be the GPU's own


@dataclass(frozen=True)
class TaskEstimate:
    """What a trace says about one device, limit and precision.

    Attributes:
        expected: the largest batch size within the limit; 0 where none is expected to fit.
        start: a size about a hundredth below, which fits, too; some sizes between two that fit do not.
        peaks: (batch size, bytes of the traced storages at their peak), by size; straight lines run between them.
        unseen_share: of the traced peak, which kernels take on top of it.
        workspace_bytes: taken by libraries within the limit.
        kind: whose kernels take memory that the trace does not see.
        model_independent: the trace assumed nothing, so that what it lacks is the GPU's and the libraries'.
    """

    expected: int
    start: int
    peaks: list[tuple[int, int]]
    unseen_share: float
    workspace_bytes: int
    kind: Literal["plain", "convolution", "recurrent"]
    model_independent: bool

    def traced_bytes(self, batch_size: int) -> float:
        """Peak of the traced storages."""
        at = bisect.bisect_left(self.peaks, (batch_size, 0))
        at = min(max(at, 1), len(self.peaks) - 1)
        (low, below), (high, above) = self.peaks[at - 1], self.peaks[at]
        return below + (above - below) * (batch_size - low) / (high - low)

    def allocated_bytes(self, batch_size: int) -> float:
        """Peak of what a step allocates, libraries and all."""
        return self.traced_bytes(batch_size) * (1 + self.unseen_share) + self.workspace_bytes

    def learn(self, device_name: str, attempts: Sequence[Attempt]) -> None:
        """Keeps the median offset between attempts and trace for later estimates on this GPU.

        An offset in bytes that grows with the batch belongs to the model and not to the GPU: it is not kept.
        """
        fits = {each.batch_size: each.peak_allocated_bytes for each in attempts if each.fits}
        pairs = [(peak, self.traced_bytes(size)) for size, peak in sorted(fits.items()) if peak]
        if not self.model_independent or not pairs:
            return
        if self.kind == "plain":
            offsets = [peak - traced for peak, traced in pairs]
            growth = pairs[-1][1] - pairs[0][1]
            if max(offsets) - min(offsets) <= _CONSTANT_SHARE * growth:
                record(device_name, "workspace_bytes", int(statistics.median(offsets)))
        else:
            shares = [(peak - self.workspace_bytes) / traced - 1 for peak, traced in pairs]
            record(device_name, f"{self.kind}_share", statistics.median(shares))


class EstimatePrior:
    """A child that traces while the probe's own child opens; whatever fails in it leaves the probe without it.

    Args:
        task: as the user named it.
        device: as the user named it; the child starts at once where that is likely to mean CUDA or a CPU.
        observer: told in a note what is expected, or why nothing is.
        on_cpu: whether to look ahead on a CPU, too.
    """

    def __init__(self, task: str, device: str, observer: Observer, *, on_cpu: bool) -> None:
        self._task, self._observer, self._on_cpu = task, observer, on_cpu
        self._worker = Worker(None, LocalLauncher(program=PROGRAM))
        self._starting: threading.Thread | None = None
        self._left = TRACE_SECONDS  # for all precisions together: a probe works without them
        if device.startswith("cuda") or (device == "auto" and gpus_here()) or (on_cpu and device in {"auto", "cpu"}):
            self._starting = threading.Thread(target=self._start, daemon=True)
            self._starting.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def look(self, opened: Opened, precision: str, accumulation_steps: int, *, timeout: float) -> TaskEstimate | None:
        """What to expect of the device that the probe's child has opened; None where no trace tells.

        Args:
            opened: what the probe's child said of the task.
            precision: of the probe.
            accumulation_steps: micro-batches per optimizer step.
            timeout: seconds after which the user's code hangs.
        """
        limit, is_cpu = opened.memory_limit_bytes, opened.device == "cpu"
        if not limit or self._left <= 0 or not (opened.device.startswith("cuda") or (is_cpu and self._on_cpu)):
            return None
        started, left = time.monotonic(), min(timeout, self._left)
        try:
            if self._starting is not None:
                self._starting.join(left)
                if self._starting.is_alive():
                    raise WorkerDied("timeout", "still loading")
            command = ExpectMemory(
                task=self._task,
                precision=precision,
                accumulation_steps=accumulation_steps,
                memory_limit=limit,
                samples=opened.samples,
                gpu=None if is_cpu else _gpu(opened.device_name),
                inference=opened.is_for_inference,
            )
            found = self._worker.call(command, timeout=left - (time.monotonic() - started))
        except BatchtuneError as error:
            is_late = isinstance(error, WorkerDied) and error.outcome == "timeout"
            reason = "tracing took too long, and a probe can do without" if is_late else str(error).partition("\n")[0]
            found = {"refused": reason}
        self._left -= time.monotonic() - started
        if "refused" in found:
            self._observer.note(f"no estimate to start from: {found['refused']}")
            return None
        estimated = TaskEstimate(**found | {"peaks": [(size, peak) for size, peak in found["peaks"]]})
        self._observer.note(f"estimate: about {estimated.expected:,} samples fit at {precision}")
        return estimated

    def _start(self) -> None:
        try:
            self._worker.call(LoadTracer(), timeout=TRACE_SECONDS)
        except Exception:  # noqa: BLE001 - whatever it is, `look` meets it again and tells it
            self._worker.close()


def _gpu(device_name: str) -> dict[str, Any]:
    """What a trace needs to know of a GPU: its generation, and what was measured on it before."""
    try:
        gpu = find_gpu(device_name)
    except UsageError:
        return {"generation": "", "measured": {}}
    return {"name": gpu.name, "generation": gpu.generation, "measured": asdict(offsets_of(gpu.name))}
