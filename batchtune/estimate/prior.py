"""What a probe may expect: a child that traces beside the probe's own, once the longest inputs and then all lengths."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from typing import Any, Self

from batchtune.config.options import TRACE_SECONDS
from batchtune.device.gpus import find_gpu
from batchtune.device.nvml import gpus_here
from batchtune.errors import UsageError
from batchtune.estimate import commands
from batchtune.estimate.tracers import facts_of
from batchtune.observer import Observer
from batchtune.processes.local import LocalLauncher
from batchtune.processes.worker import Worker, WorkerDied
from batchtune.protocol.commands import Opened
from batchtune.protocol.messages import Answer, Command
from batchtune.vocabulary import AskedLengths, Length

_SECONDS_OF_LENGTHS = 5 * TRACE_SECONDS  # of tracing all lengths and of replays: each one saved takes a fresh process
_TOO_LONG = "tracing took too long, and a probe can do without"


def _asked(
    worker: Worker, command: Command[Answer], seconds: float, starting: threading.Thread | None = None
) -> tuple[Answer | commands.Refusal, float]:
    """What a child answers once it has started, or why it does not; and how many of the seconds are left."""
    ends = time.monotonic() + seconds
    if starting is not None:
        starting.join(seconds)
    if starting is not None and starting.is_alive():
        return commands.Refusal(refused=_TOO_LONG), 0.0
    try:
        return worker.call(command, timeout=ends - time.monotonic()), ends - time.monotonic()
    except Exception as error:  # noqa: BLE001 - whatever it is, the probe goes on without
        is_late = isinstance(error, WorkerDied) and error.outcome == "timeout"
        why = _TOO_LONG if is_late else str(error).partition("\n")[0]
        return commands.Refusal(refused=why), ends - time.monotonic()


class LengthsPrior:
    """What a child says of all lengths, which it traces while the probe is at the longest; nothing where it cannot.

    Nobody else asks the worker's child before `peaks` has answered.
    """

    def __init__(self, worker: Worker, command: commands.ExpectLengths, observer: Observer) -> None:
        self._worker, self._observer, self._left = worker, observer, _SECONDS_OF_LENGTHS
        self._found: commands.LengthEstimates | commands.Refusal | None = None
        self._replayed: dict[str, int | None] = {}
        self._asking = threading.Thread(target=self._ask, args=(command,), daemon=True)
        self._asking.start()

    def _ask(self, command: commands.ExpectLengths) -> None:
        answered = _asked(self._worker, command, self._left)
        self._found, self._left = answered

    def peaks(self) -> dict[Length, commands.TaskEstimate]:
        """What to expect of each length; waits for the traces."""
        self._asking.join()
        if isinstance(self._found, commands.Refusal):
            self._observer.note(f"no estimate of each length to start from: {self._found.refused}")
            self._found = None
        return dict(self._found.lengths) if self._found else {}

    @property
    def replays(self) -> bool:
        """Whether batches of all lengths can be replayed."""
        return isinstance(self._found, commands.LengthEstimates) and self._found.replays

    def fails_in(self, sizes: Mapping[Length, int], capacity_bytes: int) -> int | None:
        """The first order in which batches of all lengths do not train by a replay of them; None: they train in all.

        Where no more can be replayed, for want of time as well, none train in the first one.

        Args:
            sizes: by length, the longest first.
            capacity_bytes: of the traced storages.
        """
        command = commands.ReplayLengths(sizes=tuple(sizes.items()), capacity_bytes=capacity_bytes)
        asked = command.model_dump_json()
        if asked not in self._replayed and self.replays and self._left > 0:
            answered = _asked(self._worker, command, self._left)
            found, self._left = answered
            if isinstance(found, commands.Refusal):
                self._found = None
            else:
                self._replayed[asked] = found.fails_in
        return self._replayed.get(asked, 0)


class EstimatePrior:
    """A child that traces while the probe's own child opens; whatever fails in it leaves the probe without it.

    Args:
        task: as the user named it.
        device: as the user named it; the child starts at once where that is likely to mean CUDA.
        observer: told in a note what is expected, or why nothing is.
    """

    def __init__(self, task: str, device: str, observer: Observer) -> None:
        self._task, self._observer = task, observer
        self._worker = Worker(None, LocalLauncher(program=commands.PROGRAM))
        self._starting: threading.Thread | None = None
        self._left = TRACE_SECONDS  # for all precisions together: a probe works without them
        self._lengths: LengthsPrior | None = None
        if device.startswith("cuda") or (device == "auto" and gpus_here()):
            self._starting = threading.Thread(target=self._start, daemon=True)
            self._starting.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def look(
        self, opened: Opened, precision: str, accumulation_steps: int, *, timeout: float
    ) -> commands.TaskEstimate | None:
        """What to expect of the device that the probe's child has opened; None where no trace tells.

        After `timeout` seconds the user's code hangs.
        """
        if not opened.memory_limit_bytes or self._left <= 0 or not opened.device.startswith("cuda"):
            return None
        if self._lengths is not None:  # of another precision
            self._lengths.peaks()
        about = self._about(opened, precision, accumulation_steps)
        command = commands.ExpectMemory(**about, inference=opened.is_for_inference)
        seconds = min(timeout, self._left)
        found, left = _asked(self._worker, command, seconds, self._starting)
        self._left -= seconds - left
        if isinstance(found, commands.Refusal):
            self._observer.note(f"no estimate to start from: {found.refused}")
            return None
        self._observer.note(f"estimate: about {found.expected:,} samples fit at {precision}")
        return found

    def look_at_lengths(
        self, opened: Opened, precision: str, accumulation_steps: int, lengths: AskedLengths
    ) -> LengthsPrior:
        """Begins to trace all lengths that were asked for, once `look` has an answer; the others are its arguments."""
        command = commands.ExpectLengths(**self._about(opened, precision, accumulation_steps), lengths=lengths)
        self._lengths = LengthsPrior(self._worker, command, self._observer)
        return self._lengths

    def _about(self, opened: Opened, precision: str, accumulation_steps: int) -> dict[str, Any]:
        """What is asked about: the task, and the device that the probe's child has opened."""
        gpu = commands.GpuFacts()
        with contextlib.suppress(UsageError):  # the catalogue lacks it
            gpu = facts_of(find_gpu(opened.environment.device))
        return {
            "task": self._task,
            "precision": precision,
            "accumulation_steps": accumulation_steps,
            "samples": opened.samples,
            "lengths_seen": opened.lengths,
            "gpu": gpu,
            "memory_limit": opened.memory_limit_bytes or 0,
        }

    def _start(self) -> None:
        try:
            self._worker.call(commands.LoadTracer(), timeout=TRACE_SECONDS)
        except Exception:  # noqa: BLE001 - whatever it is, `look` meets it again and tells it
            self._worker.close()
