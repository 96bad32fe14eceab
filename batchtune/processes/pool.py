"""Several children that train at once, each on a device of its own, and how they share work."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, Self

from batchtune.device.host_load import processors
from batchtune.document import CurvePoint, Trial
from batchtune.errors import BatchtuneError
from batchtune.observer import Forwarder, Observer
from batchtune.processes.assignment import assign_devices, count_workers
from batchtune.processes.local import LocalLauncher
from batchtune.processes.worker import Worker
from batchtune.protocol.commands import Opened, OpenTask

_LOOK_SECONDS = 0.2


class WorkerPool:
    """Workers that do the same work side by side.

    Args:
        settings: of the first one.
        asked: how many; on the CPU they split the processors, the first one, too, so that all runs compare.
        observer: told what their code prints.

    Attributes:
        where: where they are, in words.
    """

    where = ", each on a device of its own"

    def __init__(self, settings: OpenTask, asked: int | Literal["auto"], observer: Observer) -> None:
        self._asked, self._observer = asked, observer
        self._stopping = threading.Event()
        self._threads: dict[str, str] = {}
        if asked != "auto" and asked > 1:
            self._threads = {"OMP_NUM_THREADS": str(max(1, processors() // asked))}
        self.first = self._worker(settings, self._threads)
        self._all = [self.first]
        self.lock = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        for worker in self._all:
            worker.close()

    def __len__(self) -> int:
        return len(self._all)

    def grow(self, opened: Opened) -> None:
        """Adds the others, which start when there is work for them.

        Args:
            opened: the task by the first one; all have its memory limit.

        Raises:
            BatchtuneError: there are not enough devices.
        """
        visible, device = os.environ.get("CUDA_VISIBLE_DEVICES"), opened.device
        count = count_workers(
            self._asked, device, devices=opened.device_count, processors=processors(), visible=visible
        )
        assert self.first.settings is not None  # noqa: S101 - it was opened with them
        for assigned in assign_devices(device, count, devices=opened.device_count, visible=visible)[1:]:
            settings = self.first.settings.but(device=assigned.device, device_name=opened.device_name)
            self._all.append(self._worker(settings, self._threads | dict(assigned.environment)))

    def warm_up(self) -> None:
        """Starts the others' children beside what the first one does, so that the search need not wait for them.

        What is wrong with one is told when there is work for it.
        """

        def start(worker: Worker) -> None:
            with contextlib.suppress(BatchtuneError):
                worker.start()

        for worker in self._all[1:]:
            threading.Thread(target=start, args=(worker,), daemon=True).start()

    def _worker(self, settings: OpenTask, environment: Mapping[str, str]) -> Worker:
        return Worker(settings, LocalLauncher(self._observer.printed, environment), stopping=self._stopping)

    def work(self, step: Callable[[Worker], bool]) -> None:
        """Has every worker call `step` with itself until that says there is nothing more to do.

        Raises:
            BaseException: whatever the first one raised that did; the others' runs are cut off.
        """
        if len(self._all) == 1:
            work_alone(self.first, partial(self._step, step))
            return
        raised: list[BaseException] = []
        threads = [
            threading.Thread(target=self._serve, args=(worker, step, raised), daemon=True) for worker in self._all
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(_LOOK_SECONDS)  # a signal must be heard
        except BaseException:
            self._stop()
            for thread in threads:
                thread.join()
            raise
        if raised:
            raise raised[0]

    def _serve(self, worker: Worker, step: Callable[[Worker], bool], raised: list[BaseException]) -> None:
        try:
            while not self._stopping.is_set() and self._step(step, worker):
                pass
        except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that waits
            with self.lock:
                raised.append(error)
            self._stop()

    def _step(self, step: Callable[[Worker], bool], worker: Worker) -> bool:
        return step(worker)

    def _stop(self) -> None:
        self._stopping.set()
        for worker in self._all:
            worker.kill()


class OneAtATime(Forwarder):
    """Hands on what several threads tell, one thing after another."""

    def __init__(self, behind: Observer) -> None:
        super().__init__(behind)
        self._lock = threading.RLock()

    def note(self, text: str) -> None:
        with self._lock:
            super().note(text)

    def trial_started(self, trial: Trial, *, best_seconds: float | None) -> None:
        with self._lock:
            super().trial_started(trial, best_seconds=best_seconds)

    def trial_evaluated(self, trial: Trial, point: CurvePoint) -> None:
        with self._lock:
            super().trial_evaluated(trial, point)

    def trial_ended(self, trial: Trial, *, done: int, seconds_left: float) -> None:
        with self._lock:
            super().trial_ended(trial, done=done, seconds_left=seconds_left)

    def printed(self, line: str) -> None:
        with self._lock:
            super().printed(line)


def work_alone(worker: Worker, step: Callable[[Worker], bool]) -> None:
    """Calls `step` until it says that there is nothing more to do."""
    while step(worker):
        pass
