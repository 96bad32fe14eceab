"""A worker's child on a Ray cluster: beside it stands an actor, by which it is reached from here."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from batchtune.errors import DeviceError, RunInterrupted
from batchtune.observer import Observer
from batchtune.processes.local import Launcher, LocalLauncher, Process
from batchtune.processes.worker import START_TIMEOUT_SECONDS, STOPPED, NodeLost
from batchtune.protocol.messages import Json

_LOOK_SECONDS = 0.1
LISTENING_SECONDS = 5.0  # of one question to an actor
CALLS_AT_ONCE = 4  # of an actor: one waits for its child while another ends that
_NO_ROOM = (
    f"the Ray cluster has had no free resources for a worker for {START_TIMEOUT_SECONDS / 60:g} minutes; see "
    "'ray status', or ask for less with ray.num_cpus, ray.num_gpus and ray.resources"
)
T = TypeVar("T")


def wait_for(
    find: Callable[[], T | None], stopping: threading.Event, others_work: Callable[[], bool] = lambda: False
) -> T:
    """What is found once the cluster has resources; a DeviceError where nobody works and it has none for too long."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while (found := find()) is None:
        if stopping.wait(_LOOK_SECONDS):
            raise RunInterrupted(STOPPED)
        if others_work():
            deadline = time.monotonic() + START_TIMEOUT_SECONDS
        if time.monotonic() > deadline:
            raise DeviceError(_NO_ROOM)
    return found


class ChildlessError(RuntimeError):
    """The actor that is asked is another than the one whose child this was."""


class Host:
    """What runs in an actor: it starts the child, on the node and with the devices that Ray has chosen."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._printed: list[str] = []
        self._launcher: Launcher = LocalLauncher(self._printed.append)

    def there(self) -> None:
        """Answers as soon as Ray has scheduled it."""

    def start(self) -> None:
        """Starts a child, in place of an earlier one."""
        self.close()
        self._process = self._launcher.start()

    def do(self, method: str, *arguments: object) -> Any:
        """What a method of the child's `Process` returns."""
        if self._process is None:
            raise ChildlessError("Ray has started it again elsewhere")
        return getattr(self._process, method)(*arguments)

    def answer(self, seconds: float) -> tuple[Json | None, bool, list[str]]:
        """What the child says, None once it has ended; whether it is silent instead; what it printed meanwhile."""
        answer, is_silent = None, False
        try:
            answer = self.do("answer", seconds)
        except TimeoutError:
            is_silent = True
        printed = self._printed[:]
        del self._printed[: len(printed)]
        return answer, is_silent, printed

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()


class Actor:
    """Starts a worker's children by a `Host`, which Ray starts again wherever there is room when its node dies."""

    def __init__(self, resources: Json, stopping: threading.Event, observer: Observer) -> None:
        self._stopping, self._observer = stopping, observer
        options = {"max_restarts": -1, "max_concurrency": CALLS_AT_ONCE, **resources}
        self._handle: Any = ray.remote(Host).options(**options).remote()
        self._arriving = self._handle.there.remote()

    def start(self) -> Process:
        """A new child, as soon as there is room; the observer is told that there is none yet."""
        if not self.is_there():
            self._observer.note("waiting for free resources on the Ray cluster")
        wait_for(lambda: self.is_there() or None, self._stopping)
        return RemoteProcess(self, self._observer.printed)

    def is_there(self) -> bool:
        """Whether Ray has scheduled it; a DeviceError where it cannot be started at all."""
        if not ray.wait([self._arriving], timeout=0)[0]:
            return False
        try:
            ray.get(self._arriving)
        except ActorUnavailableError:  # it is being started again
            self._arriving = self._handle.there.remote()
            return False
        except RayActorError as error:
            raise DeviceError(f"Ray cannot start a worker: {in_a_line(error)}") from None
        return True

    def ask(self, method: str, *arguments: object) -> Any:
        """What a method of `Host` returns.

        Raises:
            NodeLost: the actor or its node has died, or cannot be reached.
            RunInterrupted: the pool has stopped.
        """
        asked = getattr(self._handle, method).remote(*arguments)
        while not ray.wait([asked], timeout=_LOOK_SECONDS)[0]:
            if self._stopping.is_set():
                raise RunInterrupted(STOPPED)
        try:
            return ray.get(asked)
        except (RayActorError, ChildlessError) as error:
            self._lost()
            raise NodeLost(f"its Ray node was lost: {in_a_line(error)}") from None

    def _lost(self) -> None:
        self._arriving = self._handle.there.remote()

    def kill(self) -> None:
        """Ends the child, and does not wait for that."""
        self._handle.do.remote("kill")

    def dismiss(self) -> None:
        """Ends the actor; its child, whose line is cut, ends itself."""
        ray.kill(self._handle)


def in_a_line(error: Exception) -> str:
    """The last line of Ray's long messages, where the cause stands."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__


class RemoteProcess:
    """A child beside an actor; see `batchtune.processes.local.Process`."""

    def __init__(self, actor: Actor, echo: Callable[[str], None]) -> None:
        self._actor, self._echo = actor, echo
        actor.ask("start")

    def send(self, message: Json) -> None:
        self._actor.ask("do", "send", dict(message))

    def answer(self, seconds: float) -> Json | None:
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            answer, is_silent, printed = self._actor.ask("answer", max(0.0, min(left, LISTENING_SECONDS)))
            for line in printed:
                self._echo(line)
            if not is_silent:
                found: Json | None = answer
                return found
            if left <= 0:
                raise TimeoutError

    def last_output(self) -> tuple[str, bool]:
        text, from_outside = self._actor.ask("do", "last_output")
        return text, from_outside

    def kill(self) -> None:
        self._actor.kill()

    def close(self) -> None:
        with contextlib.suppress(NodeLost, RunInterrupted):  # then it is gone, or goes with its actor
            self._actor.ask("close")


def asked_of(resources: Json) -> dict[str, float]:
    """What is asked for, by the names that Ray has for it where it is reserved."""
    asked = {"CPU": resources["num_cpus"], "GPU": resources["num_gpus"], **resources["resources"]}
    return {name: amount for name, amount in asked.items() if amount}


def room_for(resources: Json, nodes: Sequence[Mapping[str, float]]) -> int:
    """How many actors that ask for such resources there is room for on nodes that have so much."""
    wanted = asked_of(resources)
    return sum(min(int(node.get(name, 0.0) / amount + 1e-6) for name, amount in wanted.items()) for node in nodes)
