"""A worker's child on a node of a Ray cluster: the actor that stands beside it, and how it is reached from here."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from batchtune.errors import DeviceError, RunInterrupted
from batchtune.processes.local import LocalLauncher, Process
from batchtune.processes.worker import STOPPED, NodeLost
from batchtune.protocol.messages import Json

_LOOK_SECONDS = 0.2
_LISTENING_SECONDS = 5.0  # of one question to an actor
_CALLS_AT_ONCE = 4  # of an actor: one waits for its child while another ends that


class ChildlessError(RuntimeError):
    """The actor that is asked is another than the one whose child this was."""


class Host:
    """What runs in an actor: it starts the child, on the node and with the devices that Ray has chosen."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._printed: list[str] = []

    def there(self) -> None:
        """Answers as soon as Ray has scheduled it."""

    def start(self) -> int:
        """Starts a child, in place of an earlier one; returns its process number."""
        self.close()
        self._process = LocalLauncher(self._printed.append).start()
        return self._process.pid

    def do(self, method: str, *arguments: Any) -> Any:
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
        count = len(self._printed)
        printed, self._printed[:count] = self._printed[:count], []
        return answer, is_silent, printed

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()


class Actor:
    """An actor with a `Host`, which Ray starts again wherever there is room when its node dies.

    Args:
        resources: that it asks for, as options of Ray.
        stopping: set when nobody waits for it any more.
    """

    def __init__(self, resources: Json, stopping: threading.Event) -> None:
        self._stopping = stopping
        options = {"max_restarts": -1, "max_concurrency": _CALLS_AT_ONCE, **resources}
        self._handle: Any = ray.remote(Host).options(**options).remote()
        self._arriving = self._handle.there.remote()

    def is_there(self) -> bool:
        """Whether Ray has scheduled it.

        Raises:
            DeviceError: it cannot be started at all.
        """
        if not ray.wait([self._arriving], timeout=0)[0]:
            return False
        try:
            ray.get(self._arriving)
        except ActorUnavailableError:  # it is being started again
            self._arriving = self._handle.there.remote()
            return False
        except RayActorError as error:
            raise DeviceError(f"Ray cannot start a worker: {_in_a_line(error)}") from None
        return True

    def ask(self, method: str, *arguments: Any) -> Any:
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
            self._arriving = self._handle.there.remote()
            raise NodeLost(f"its Ray node was lost: {_in_a_line(error)}") from None

    def kill(self) -> None:
        """Ends the child, and does not wait for that."""
        self._handle.do.remote("kill")

    def dismiss(self) -> None:
        """Ends the actor; its child, whose line is cut, ends itself."""
        ray.kill(self._handle)


def _in_a_line(error: Exception) -> str:
    """The last line of Ray's long messages, where the cause stands."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__


class RemoteProcess:
    """A child beside an actor; see `batchtune.processes.local.Process`."""

    def __init__(self, actor: Actor, echo: Callable[[str], None]) -> None:
        self._actor, self._echo = actor, echo
        self._pid: int = actor.ask("start")

    @property
    def pid(self) -> int:
        return self._pid

    def send(self, message: Json) -> None:
        self._actor.ask("do", "send", dict(message))

    def answer(self, seconds: float) -> Json | None:
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            answer, is_silent, printed = self._actor.ask("answer", max(0.0, min(left, _LISTENING_SECONDS)))
            for line in printed:
                self._echo(line)
            if not is_silent:
                found: Json | None = answer
                return found
            if left <= 0:
                raise TimeoutError

    def last_output(self) -> str:
        return str(self._actor.ask("do", "last_output"))

    def wait(self, seconds: float) -> None:
        self._actor.ask("do", "wait", seconds)

    def kill(self) -> None:
        self._actor.kill()

    def close(self) -> None:
        with contextlib.suppress(NodeLost, RunInterrupted):  # then it is gone, or goes with its actor
            self._actor.ask("close")
