"""Inside of the user's own torchrun: its first process works, the others follow it and run a rank of each group."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Self

from batchtune.config.ranks import TorchrunEnv
from batchtune.errors import BatchtuneError, RunInterrupted, UsageError
from batchtune.processes.local import child_environment, entry
from batchtune.protocol.messages import Message, Rendezvous

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_LOOK_SECONDS = 0.1
_LEAVING_SECONDS = 10.0  # in which the others see that the first process has come to its end
_CALLS = itertools.count(1)  # of this process, each with groups of its own; all processes make the same


class Outcome(Message):
    """What the first process's work came to, as it tells the others."""

    exit_code: int = 0
    error: str = ""
    result: str | None = None  # a document's JSON


LOST = Outcome(exit_code=RunInterrupted.exit_code, error="torchrun's rank 0 has ended without a word; see what it says")


def follow() -> Outcome | None:
    """In a process that torchrun started beside the first one: runs its rank of each group, until there is an outcome.

    Returns:
        The first process's outcome; None in that one, and where there is none.
    """
    env = TorchrunEnv.from_environment()
    return Follower(env, _scope()).follow() if env and env.rank else None


@contextlib.contextmanager
def leading() -> Iterator[Leader | None]:
    """The first process's part, for as long as the block runs; None where torchrun did not start this process."""
    env = TorchrunEnv.from_environment()
    if env is None or Leader.at_work:
        yield Leader.at_work
        return
    with Leader(env, _scope()) as leader:
        yield leader


def _scope() -> str:
    return f"batchtune/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_CALLS)}"


def open_store(*, hosts: bool = False) -> Store:
    """Where the processes tell each other which group is at work, one after another: the launcher's own store.

    Raises:
        UsageError: this process `hosts` it, and its port is in use.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    own = hosts and not agents
    try:
        return TCPStore(*where, is_master=own, wait_for_workers=False)
    except RuntimeError as error:
        if own:
            raise UsageError(f"MASTER_PORT {where[1]}: another program listens there; choose another") from error
        raise


class Follower:
    """The ranks of one process: in each group that is announced, one, for as long as that group's coordinator lives."""

    def __init__(self, env: TorchrunEnv, scope: str) -> None:
        self._env, self._scope, self._store = env, scope, open_store()

    def follow(self) -> Outcome:
        """Runs one rank after another until there are no more groups."""
        number = 1
        while isinstance(found := self._wait_for(number), Rendezvous):
            with contextlib.suppress(OSError):  # the group has ended meanwhile
                self._run_rank(found)
            number += 1
        with contextlib.suppress(RuntimeError):  # where there is still somebody to tell
            self._store.add(f"{self._scope}/read", 1)
        return found

    def _wait_for(self, number: int) -> Rendezvous | Outcome:
        """Where the group of that number meets; or the outcome, once there is one, or the store has gone."""
        try:
            while True:  # not in the store: a signal must be heard
                if self._store.check([over := f"{self._scope}/outcome"]):
                    return Outcome.model_validate_json(self._store.get(over).decode())
                if self._store.check([group := f"{self._scope}/{number}"]):
                    return Rendezvous.model_validate_json(self._store.get(group).decode())
                time.sleep(_LOOK_SECONDS)
        except RuntimeError:
            return LOST

    def _run_rank(self, rendezvous: Rendezvous) -> None:
        with rendezvous.connect(rank=self._env.rank, follows=True) as line:
            environment = child_environment() | rendezvous.variable()
            process = subprocess.Popen(entry("batchtune.child.rank"), env=environment, start_new_session=True)  # noqa: S603
            try:
                threading.Thread(target=_tell_end, args=(process, line), daemon=True).start()
                while line.recv(1):
                    pass
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _tell_end(process: subprocess.Popen[bytes], line: socket.socket) -> None:
    code = process.wait()
    with contextlib.suppress(OSError):
        line.sendall((f'{{"ended": {code}}}\n').encode())


class Leader:
    """The first process's part: it follows, too, in a thread, and tells the outcome when its block ends.

    Attributes:
        at_work: that of this process, which starts no groups on its own meanwhile.
        outcome: what the others are told, unless an error ends the block.
    """

    at_work: ClassVar[Leader | None] = None

    def __init__(self, env: TorchrunEnv, scope: str) -> None:
        self._env, self._scope, self._store = env, scope, open_store(hosts=True)
        self._groups = itertools.count(1)
        self.outcome = Outcome()

    def __enter__(self) -> Self:
        threading.Thread(target=Follower(self._env, self._scope).follow, daemon=True).start()
        Leader.at_work = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Leader.at_work = None
        if error is not None:
            code = RunInterrupted.exit_code if isinstance(error, KeyboardInterrupt) else 1
            result = error.result.to_json() if isinstance(error, BatchtuneError) and error.result else None
            self.outcome = Outcome(exit_code=getattr(error, "exit_code", code), error=str(error), result=result)
        deadline = time.monotonic() + _LEAVING_SECONDS
        with contextlib.suppress(RuntimeError):  # the launcher has gone, and the others with it
            self._store.set(f"{self._scope}/outcome", self.outcome.model_dump_json())
            while self._store.add(f"{self._scope}/read", 0) < self._env.world_size and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)

    def next_group(self) -> str:
        """The name of the group that is about to meet."""
        return f"{self._scope}/{next(self._groups)}"
