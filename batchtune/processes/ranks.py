"""Groups of ranks: one that is started here, or inside of the user's own torchrun, whose processes each run a rank."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from batchtune.errors import UsageError
from batchtune.processes.local import LocalProcess, Process, child_environment, entry
from batchtune.protocol.messages import Message, Rendezvous

_OVER = "over"
_RESULT, _RENDEZVOUS = "batchtune/result", "batchtune/rendezvous/"
_LOOK_SECONDS = 0.1
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class GroupSettings(Message):
    """What a group is started with."""

    world_size: int
    strategy: str
    number: int = 0  # among the groups that the user's own launcher holds; 0: the ranks are launched here


class RankLauncher:
    """Starts processes that train one model together, each on its own device, with the interface of one child.

    The batch size of a command is each rank's. An attempt fits only if it fits on all of them, and a failure on one
    ends it for all: those that wait for the failed one in a collective are killed after a short time of grace, and the
    next command starts the group again. Of the device that is named, each rank takes the one of its number.

    Where the user's own launcher runs the ranks, its leader numbers the groups; else torch's is started for each.
    """

    def __init__(
        self,
        world_size: int,
        strategy: str,
        echo: Callable[[str], None] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        leader: Leader | None = None,
    ) -> None:
        self._world_size, self._strategy = world_size, strategy
        self._echo, self._leader, self._environment = echo, leader, dict(environment or {})

    def start(self) -> Process:
        number = self._leader.next_group() if self._leader else 0
        group = GroupSettings(world_size=self._world_size, strategy=self._strategy, number=number)
        command = [*entry("batchtune.processes.coordinator"), group.model_dump_json()]
        threads = max(1, (os.cpu_count() or 1) // self._world_size)  # ranks that train on the host share its processors
        environment = {"OMP_NUM_THREADS": str(threads)} | child_environment() | self._environment
        return LocalProcess(command, environment, self._echo, leads_sessions=True)


@dataclass(frozen=True, slots=True)
class TorchrunEnv:
    """This process's number among those that torchrun started."""

    rank: int
    world_size: int

    @classmethod
    def from_environment(cls) -> Self | None:
        """None where no launcher of ranks started this process, or it started a single one."""
        if any(name not in os.environ for name in _VARIABLES) or int(os.environ["WORLD_SIZE"]) < 2:  # noqa: PLR2004
            return None
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def rank_of_this_process() -> int:
    """0 where nothing else was started with it."""
    env = TorchrunEnv.from_environment()
    return env.rank if env else 0


class RendezvousStore:
    """Where the processes tell each other which group is at work, one after another: the launcher's own store.

    Raises:
        UsageError: this process `hosts` it, and its port is in use.
    """

    def __init__(self, *, hosts: bool = False) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        own = hosts and not agents
        try:
            self._store = TCPStore(*where, is_master=own, wait_for_workers=False)
        except RuntimeError as error:
            if own:
                raise UsageError(f"MASTER_PORT {where[1]}: another program listens there; choose another") from error
            raise

    def announce(self, number: int, rendezvous: Rendezvous | None) -> None:
        """Tells where group `number` meets; with None, that there is none any more."""
        self._store.set(f"{_RENDEZVOUS}{number}", rendezvous.model_dump_json() if rendezvous else _OVER)

    def publish(self, result: str) -> None:
        """Leaves the first process's result."""
        self._store.set(_RESULT, result)

    def result(self) -> str | None:
        """The result that was published; None where there is none."""
        return self._store.get(_RESULT).decode() if self._store.check([_RESULT]) else None

    def wait_for(self, number: int) -> Rendezvous | None:
        """Where group `number` meets; None once there is none any more, or the store has gone with its host."""
        try:
            while not self._store.check([key := f"{_RENDEZVOUS}{number}"]):
                time.sleep(_LOOK_SECONDS)  # not in the store: a signal must be heard
            text = self._store.get(key).decode()
        except RuntimeError:
            return None
        return None if text == _OVER else Rendezvous.model_validate_json(text)


class Follower:
    """The ranks of one process: in each group that is announced, one, for as long as that group's coordinator lives."""

    def __init__(self, env: TorchrunEnv, store: RendezvousStore) -> None:
        self._env, self._store = env, store

    def follow(self) -> str | None:
        """Runs one rank after another until there are no more groups; returns the published result."""
        number = 1
        while (rendezvous := self._store.wait_for(number)) is not None:
            with contextlib.suppress(OSError):  # the group has ended meanwhile
                self._run_rank(rendezvous)
            number += 1
        with contextlib.suppress(RuntimeError):  # the store has gone with its host
            return self._store.result()
        return None

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
    """The first process's part: it follows, too, in a thread, and ends all groups when its block ends."""

    def __init__(self, env: TorchrunEnv) -> None:
        self._env, self._store = env, RendezvousStore(hosts=True)
        self._groups = 0

    def __enter__(self) -> Self:
        follower = Follower(self._env, RendezvousStore())
        self._thread = threading.Thread(target=follower.follow, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store.announce(self._groups + 1, None)
        self._thread.join(timeout=10)

    def publish(self, result: str) -> None:
        """Leaves the result for the others to read."""
        self._store.publish(result)

    def next_group(self) -> int:
        """The number of the group that is about to meet."""
        self._groups += 1
        return self._groups


def require_whole(env: TorchrunEnv, nproc_per_node: int) -> None:
    """Refuses a number of ranks that is not torchrun's.

    Raises:
        UsageError: it is not.
    """
    if nproc_per_node not in {1, env.world_size}:
        raise UsageError(
            f"--nproc-per-node {nproc_per_node}: torchrun has started {env.world_size} ranks; leave the option out"
        )
