"""A pool on a Ray cluster: what each worker asks for, which one has resources, and what becomes of a lost node's.

The study stays in this process; only children and their actors are elsewhere. Their nodes need batchtune and the task's
files at the same place as here: on a shared folder, in an image, or by `ray job submit --working-dir`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import ray

from batchtune.config.schema import RayCluster
from batchtune.errors import DeviceError, RunInterrupted, UsageError
from batchtune.observer import Observer
from batchtune.processes.local import Process, without_secrets
from batchtune.processes.pool import WorkerPool
from batchtune.processes.ray.actor import Actor, RemoteProcess
from batchtune.processes.worker import START_TIMEOUT_SECONDS, STOPPED, Worker
from batchtune.protocol.commands import Opened, OpenTask

_LOOK_SECONDS = 0.1


def resources_of(asked: RayCluster, device: str, cluster: Mapping[str, float]) -> dict[str, Any]:
    """What an actor asks Ray for.

    Args:
        asked: in the configuration.
        device: there, too.
        cluster: all that the cluster has, by Ray's names.

    Raises:
        UsageError: the device is not for Ray to choose.
    """
    kind, _, number = device.partition(":")
    if number:
        raise UsageError(f"device {device}: Ray chooses which; write {kind}")
    if kind == "auto":
        kind = "cuda" if asked.num_gpus is not None or cluster.get("GPU") else "cpu"
    gpus = 0.0 if kind == "cpu" else 1.0 if asked.num_gpus is None else asked.num_gpus
    return {"num_cpus": asked.num_cpus, "num_gpus": gpus, "resources": dict(asked.resources)}


def room_for(resources: Mapping[str, Any], nodes: Sequence[Mapping[str, float]]) -> int:
    """How many such actors there is room for.

    Args:
        resources: of each, as `resources_of` has them.
        nodes: what each node has, by Ray's names.
    """
    asked = {"CPU": resources["num_cpus"], "GPU": resources["num_gpus"], **resources["resources"]}
    wanted = {name: amount for name, amount in asked.items() if amount}
    return sum(min(int(node.get(name, 0.0) / amount + 1e-6) for name, amount in wanted.items()) for node in nodes)


class RayLauncher:
    """Starts a worker's children beside an actor.

    Args:
        actor: that one.
        stopping: set when nobody waits for them any more.
        observer: told what they print, and that there is no room yet.
    """

    def __init__(self, actor: Actor, stopping: threading.Event, observer: Observer) -> None:
        self._actor, self._stopping, self._observer = actor, stopping, observer

    def start(self) -> Process:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        if not self._actor.is_there():
            self._observer.note(_WAITING)
        while not self._actor.is_there():
            if self._stopping.wait(_LOOK_SECONDS):
                raise RunInterrupted(STOPPED)
            if time.monotonic() > deadline:
                raise DeviceError(_NO_ROOM)
        return RemoteProcess(self._actor, self._observer.printed)


_WAITING = "waiting for free resources on the Ray cluster"
_NO_ROOM = (
    f"the Ray cluster has had no free resources for a worker for {START_TIMEOUT_SECONDS / 60:g} minutes; see "
    "'ray status', or ask for less with ray.num_cpus, ray.num_gpus and ray.resources"
)


class RayPool(WorkerPool):
    """A pool whose workers are wherever Ray has room; one whose node was lost waits while the others work.

    Args:
        settings: as of any pool.
        asked: how many; more than there is room for join when the cluster grows.
        observer: as of any pool.
        cluster: which one, and what each worker asks of it.

    Raises:
        DeviceError: the cluster cannot be reached.
        UsageError: it cannot be asked for such a device.
    """

    where = " on the Ray cluster"

    def __init__(
        self, settings: OpenTask, asked: int | Literal["auto"], observer: Observer, cluster: RayCluster
    ) -> None:
        self._prints = contextlib.redirect_stdout(sys.stderr)  # Ray tells of lost nodes where the result belongs
        self._prints.__enter__()
        try:
            self._ours = _connect(cluster.address)
        except BaseException:
            self._prints.__exit__(None, None, None)
            raise
        self._actors: dict[Worker, Actor] = {}
        self._free: list[Worker] = []
        try:
            self._resources = resources_of(cluster, settings.device, ray.cluster_resources())
            share = self._resources["num_gpus"]
            settings = settings.but(
                device=settings.device if share else "cpu",
                margin=1 - share * (1 - settings.margin) if share else settings.margin,
            )
            super().__init__(settings, asked, observer)
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *_: object) -> None:
        self._stop()
        for actor in self._actors.values():
            actor.dismiss()
        self._leave()

    def _leave(self) -> None:
        try:
            if self._ours:
                ray.shutdown()
        finally:
            self._prints.__exit__(None, None, None)

    def grow(self, opened: Opened) -> None:
        """Adds the others, which start when there is work and room for them."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        room = room_for(self._resources, nodes)
        count = max(1, room) if self._asked == "auto" else self._asked
        if count > room:
            self._observer.note(f"the Ray cluster has room for {room} of {count} workers; the others join as it grows")
        assert self.first.settings is not None  # noqa: S101 - it was opened with them
        settings = self.first.settings = self.first.settings.but(device_name=opened.device_name)
        self._all += [self._worker(settings, {}) for _ in range(count - 1)]

    def warm_up(self) -> None:
        """Each starts where and when Ray schedules it."""

    def _worker(self, settings: OpenTask, environment: Mapping[str, str]) -> Worker:  # noqa: ARG002 - Ray's
        actor = Actor(self._resources, self._stopping)
        launcher = RayLauncher(actor, self._stopping, self._observer)
        worker = Worker(settings, launcher, stopping=self._stopping, note=self._observer.note)
        self._actors[worker] = actor
        self._free.append(worker)
        return worker

    def _step(self, step: Callable[[Worker], bool], worker: Worker) -> bool:  # noqa: ARG002 - whichever has resources
        with self._scheduled() as scheduled:
            return step(scheduled)

    @contextlib.contextmanager
    def _scheduled(self) -> Iterator[Worker]:
        """An idle worker that has resources; while others work, there may be one soon."""
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while (worker := self._take()) is None:
            if self._stopping.wait(_LOOK_SECONDS):
                raise RunInterrupted(STOPPED)
            if len(self._free) < len(self._all):
                deadline = time.monotonic() + START_TIMEOUT_SECONDS
            if time.monotonic() > deadline:
                raise DeviceError(_NO_ROOM)
        try:
            yield worker
        finally:
            with self.lock:
                self._free.append(worker)

    def _take(self) -> Worker | None:
        with self.lock:
            for worker in self._free:
                if self._actors[worker].is_there():
                    self._free.remove(worker)
                    return worker
        return None


def _connect(address: str | None) -> bool:
    """Joins the cluster, or starts one on this machine; returns whether to leave it again.

    Raises:
        DeviceError: there is none at the address.
    """
    if ray.is_initialized():
        return False
    try:
        with without_secrets():  # a cluster that starts here hands its environment on
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        where = f"ray.address {address}" if address else "executor ray"
        raise DeviceError(f"{where}: no Ray cluster can be reached: {lines[0][:200] if lines else error!r}") from None
    return True
