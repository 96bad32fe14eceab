"""Workers on a Ray cluster: beside each child stands an actor, by which it is reached from here.

The study stays in this process. Nodes need batchtune and the task's files at the same place as here: on a shared
folder, in an image, or by `ray job submit --working-dir`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Literal

import ray

from batchtune.config.ranks import Ranks, RayCluster
from batchtune.errors import DeviceError, UsageError
from batchtune.observer import Observer
from batchtune.processes.local import without_secrets
from batchtune.processes.pool import Result, WorkerPool
from batchtune.processes.ray_actor import Actor, wait_for
from batchtune.processes.ray_groups import Group, alive, groups_for, placement_of
from batchtune.processes.worker import Worker
from batchtune.protocol.commands import Opened, OpenTask
from batchtune.protocol.messages import Json


def resources_of(asked: RayCluster, device: str, cluster: Mapping[str, float]) -> Json:
    """What an actor asks Ray for, by the configuration and what the cluster has.

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


class RayPool(WorkerPool):
    """A pool whose workers are wherever Ray has room; one whose node was lost waits while the others work.

    More workers than there is room for join when the cluster grows.

    Raises:
        DeviceError: the cluster cannot be reached.
        UsageError: it cannot be asked for such a device.
    """

    where = " on the Ray cluster"

    def __init__(
        self,
        settings: OpenTask,
        asked: int | Literal["auto"],
        observer: Observer,
        cluster: RayCluster,
        ranks: Ranks | None = None,
    ) -> None:
        with contextlib.ExitStack() as opened:
            opened.enter_context(contextlib.redirect_stdout(sys.stderr))  # Ray tells of lost nodes on stdout
            if _connect(cluster.address):
                opened.callback(ray.shutdown)
            self._actors: dict[Worker, Actor] = {}
            self._free: list[Worker] = []
            self._resources = resources_of(cluster, settings.device, ray.cluster_resources())
            share = self._resources["num_gpus"]
            settings = settings.but(
                device=settings.device if share else "cpu",
                margin=1 - share * (1 - settings.margin) if share else settings.margin,
            )
            super().__init__(settings, asked, observer, ranks)
            self._opened = opened.pop_all()

    def __exit__(self, *_: object) -> None:
        self._stop()
        for actor in self._actors.values():
            actor.dismiss()
        self._opened.close()

    def grow(self, opened: Opened) -> None:
        """Adds the others, which start when there is work and room for them."""
        nodes, each = alive(), self._ranks.of_each
        room = groups_for(self._resources, each, nodes)
        if each > 1 and placement_of(self._resources, each, nodes) == "PACK":
            self._observer.announce(
                f"no node of the Ray cluster has room for {each} ranks: those of a run are on several, at the pace of "
                "the network between them"
            )
        count = max(1, room) if self._asked == "auto" else self._asked
        if count > room:
            self._observer.note(f"the Ray cluster has room for {room} of {count} workers; the others join as it grows")
        assert self.first.settings is not None  # noqa: S101 - it was opened with them
        settings = self.first.settings = self.first.settings.but(device_name=opened.environment.device)
        self._all += [self._worker(settings, {}) for _ in range(count - 1)]

    def warm_up(self) -> None:
        """Each starts where and when Ray schedules it."""

    def _worker(self, settings: OpenTask, environment: Mapping[str, str]) -> Worker:  # noqa: ARG002 - Ray's
        how = self._resources, self._stopping, self._observer
        actor = Group(*how, self._ranks) if self._ranks.of_each > 1 else Actor(*how)
        worker = Worker(settings, actor, stopping=self._stopping, note=self._observer.note)
        self._actors[worker] = actor
        self._free.append(worker)
        return worker

    def _step(self, step: Callable[[Worker], Result], worker: Worker) -> Result:  # noqa: ARG002 - any with resources
        scheduled = wait_for(self._take, self._stopping, lambda: len(self._free) < len(self._all))
        try:
            return step(scheduled)
        finally:
            with self.lock:
                self._free.append(scheduled)

    def _take(self) -> Worker | None:
        """An idle worker that has resources."""
        with self.lock:
            for worker in self._free:
                if self._actors[worker].is_there():
                    self._free.remove(worker)
                    return worker
        return None


def _connect(address: str | None) -> bool:
    """Joins the cluster, or starts one on this machine; returns whether to leave it again."""
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
