"""Several children that train at once, each on a device of its own, and how they share work."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self, TypeVar

from batchtune.config.ranks import Ranks
from batchtune.device.host import processors
from batchtune.device.nvml import visible_devices
from batchtune.errors import BatchtuneError, DeviceError, UsageError
from batchtune.observer import Observer
from batchtune.processes.local import Launcher, LocalLauncher
from batchtune.processes.ranks import RankLauncher, closest_seats
from batchtune.processes.worker import Worker
from batchtune.protocol.commands import Opened, OpenTask

_LOOK_SECONDS = 0.2
Result = TypeVar("Result")


class WorkerPool:
    """Workers that do the same work side by side.

    Args:
        settings: of the first one.
        asked: how many; on the CPU they split the processors, the first one, too, so that all runs compare.
        observer: told what their code prints.
        ranks: what each of them is: one child, or a group of ranks.

    Attributes:
        where: where they are, in words.
    """

    where = ", each on a device of its own"

    def __init__(
        self, settings: OpenTask, asked: int | Literal["auto"], observer: Observer, ranks: Ranks | None = None
    ) -> None:
        self._asked, self._observer, self._ranks = asked, observer, ranks or Ranks()
        self._stopping = threading.Event()
        self._threads: dict[str, str] = {}
        if asked != "auto" and asked > 1:
            self._threads = {"OMP_NUM_THREADS": str(max(1, processors() // (asked * self._ranks.of_each)))}
        seated = closest_seats(settings.device, self._ranks.of_each)
        self._visible = seated.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
        self.first = self._worker(settings, self._threads | seated)
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
        if self._asked == 1:
            return
        visible, device, each = self._visible, opened.device, self._ranks.of_each
        count = count_workers(
            self._asked, device, devices=opened.device_count, processors=processors(), visible=visible, each=each
        )
        assert self.first.settings is not None  # noqa: S101 - it was opened with them
        for assigned in assign_devices(device, count, devices=opened.device_count, visible=visible, each=each)[1:]:
            settings = self.first.settings.but(device=assigned.device, device_name=opened.environment.device)
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
        launcher = launcher_of(self._ranks, self._observer, environment)
        return Worker(settings, launcher, stopping=self._stopping, note=self._observer.announce)

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

    def any_one(self, do: Callable[[Worker], Result]) -> Result:
        """What `do` makes of a worker that can work now, when the others are idle."""
        return self._step(do, self.first)

    def _serve(self, worker: Worker, step: Callable[[Worker], bool], raised: list[BaseException]) -> None:
        try:
            while not self._stopping.is_set() and self._step(step, worker):
                pass
        except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that waits
            with self.lock:
                raised.append(error)
            self._stop()

    def _step(self, step: Callable[[Worker], Result], worker: Worker) -> Result:
        return step(worker)

    def _stop(self) -> None:
        self._stopping.set()
        for worker in self._all:
            worker.kill()


def launcher_of(ranks: Ranks, observer: Observer, environment: Mapping[str, str] | None = None) -> Launcher:
    """What starts the children of a worker: one at a time, or a group of ranks."""
    if ranks.of_each == 1:
        return LocalLauncher(observer.printed, environment)
    return RankLauncher(ranks.of_each, ranks.strategies[0], observer.printed, environment=environment)


def work_alone(worker: Worker, step: Callable[[Worker], bool]) -> None:
    """Calls `step` until it says that there is nothing more to do."""
    while step(worker):
        pass


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    """Where one worker trains: its device, and what its environment says of that."""

    device: str
    environment: Mapping[str, str]


def count_workers(
    asked: int | Literal["auto"], device: str, *, devices: int, processors: int, visible: str | None, each: int = 1
) -> int:
    """How many workers there are to be, by what is asked for and how many devices of this kind one process sees.

    Each of them takes so many; on a CPU the ranks of a single worker may share the processors.

    Raises:
        DeviceError: there are fewer devices: two runs on one would slow each other down.
        UsageError: the CPU has fewer processors.
    """
    of_ranks = f" of {each} ranks each" if each > 1 else ""
    if device == "cpu":
        if asked not in {"auto", 1} and int(asked) * each > processors:
            told = f"workers {asked}{of_ranks}: more than the {processors} processors here"
            raise UsageError(f"{told}, so runs would share them")
        return 1 if asked == "auto" else asked
    if each > 1 and asked != 1 and not device.startswith("cuda"):
        raise UsageError(f"workers {asked}{of_ranks}: groups side by side need CUDA or ROCm; use one worker")
    here = max(devices, len(visible_devices(visible)))
    if asked != "auto" and asked * each > here:
        told = f"workers {asked}{of_ranks}: there are only {here} devices"
        raise DeviceError(f"{told}, and runs that share one cannot be timed")
    return here // each if asked == "auto" else asked


def assign_devices(
    device: str, count: int, *, devices: int, visible: str | None, each: int = 1
) -> list[DeviceAssignment]:
    """A device for each worker, the first one's first; for a group of `each` ranks so many, which it alone sees.

    Of devices that `CUDA_VISIBLE_DEVICES` lists, each worker sees one alone: a process cannot use two slices of a GPU.
    """
    kind, _, first = device.partition(":")
    entries = visible_devices(visible) if kind == "cuda" else []
    if kind == "cpu":
        return [DeviceAssignment("cpu", {})] * count
    if each > 1:
        known = entries or [str(number) for number in range(devices)]
        sets = [known[worker * each : (worker + 1) * each] for worker in range(count)]
        return [DeviceAssignment(kind, {"CUDA_VISIBLE_DEVICES": ",".join(own)}) for own in sets]
    here = max(devices, len(entries), count)
    numbers = [(int(first or 0) + number) % here for number in range(count)]
    if len(entries) >= here:
        return [DeviceAssignment("cuda:0", {"CUDA_VISIBLE_DEVICES": entries[number]}) for number in numbers]
    return [DeviceAssignment(f"{kind}:{number}", {}) for number in numbers]
