"""One child process as its parent has it: messages to and from it, what it prints, and how it came to its end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from batchtune.config.ranks import OF_LAUNCHERS, TorchrunEnv
from batchtune.device.host import children_of, describe_kill, oom_kills
from batchtune.protocol.messages import Json

_ROOT = str(Path(__file__).resolve().parents[2])
_TAIL_LINES = 40
_PATIENCE_SECONDS = 1.0  # between two looks at whether a silent child still lives
_DYING_SECONDS = 10.0
_REAPING_SECONDS = 3.0  # for whoever started sessions to see their end; torch's launcher looks ten times a second
_READING_SECONDS = 0.5  # for what a dead child has left in its pipes
FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""Signals by which no process ends itself by accident."""
_SESSIONS: set[int] = set()  # of all children so far
_NOT_FOR_CHILDREN = "BATCHTUNE_STORAGE"  # it may hold a password


def entry(module: str) -> list[str]:
    """The command line on which this interpreter runs a module's `main` in a new process."""
    load = f"import gc, sys; sys.path.append({_ROOT!r}); gc.disable(); from {module} import main"
    start = "gc.freeze(); gc.enable(); main()"  # modules stay: garbage is not looked for, a fifth of torch's import
    return [sys.executable, "-P", "-c", f"{load}; {start}"]


def child_environment() -> dict[str, str]:
    """The environment of every child."""
    ours = {name: value for name, value in os.environ.items() if name != _NOT_FOR_CHILDREN}
    return ours | {"PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def without_secrets() -> Iterator[None]:
    """Keeps what children must not see out of this process's environment, for a library that starts some."""
    kept = os.environ.pop(_NOT_FOR_CHILDREN, None)
    try:
        yield
    finally:
        if kept is not None:
            os.environ[_NOT_FOR_CHILDREN] = kept


def describe_exit(code: int | None) -> str:
    """How a process ended, in words; negative codes are signals."""
    if code is None:
        return (
            "the process is running but its messages cannot be read: the task's code has replaced a standard module, "
            "or has closed file descriptors that it did not open"
        )
    if code >= 0:
        return f"the process ended with exit status {code}"
    name = signal.Signals(-code).name if -code in signal.Signals.__members__.values() else f"signal {-code}"
    return f"the process died by {name}"


class Process(Protocol):
    """A child that was started, here or elsewhere."""

    def send(self, message: Json) -> None:
        """Gives it a message; its death is told by the answer that is missing."""

    def answer(self, seconds: float) -> Json | None:
        """Its next message; None once it has ended.

        Raises:
            TimeoutError: it has said nothing for so long.
        """

    def last_output(self) -> tuple[str, bool]:
        """How it ended and what it printed last; whether somebody else's signal ended it."""

    def kill(self) -> None:
        """Ends it and everything it started; whoever waits for its answer, in another thread, learns of it."""

    def close(self) -> None:
        """Ends it and everything it started, and frees what it took here."""


class Launcher(Protocol):
    """Starts a worker's children, here or elsewhere."""

    def start(self) -> Process:
        """A new child.

        Raises:
            BatchtuneError: there are no resources for one.
        """


class LocalLauncher:
    """Starts children on this machine, each by itself; `echo` is called with each line that they print."""

    def __init__(
        self,
        echo: Callable[[str], None] | None = None,
        environment: Mapping[str, str] | None = None,
        program: str = "batchtune.child.image",
    ) -> None:
        self._echo, self._environment, self._program = echo, dict(environment or {}), program

    def start(self) -> Process:
        environment = child_environment()
        if TorchrunEnv.from_environment():  # it is none of torchrun's ranks, and must not wait for the others
            environment = {name: value for name, value in environment.items() if name not in OF_LAUNCHERS}
        return LocalProcess(entry(self._program), environment | self._environment, self._echo)


class LocalProcess:
    """A child on this machine, with a pipe each way; messages are JSON, one a line.

    A child that starts sessions of their own tells their numbers as `sessions`: they end with it. Where it
    `leads_sessions`, so do those that it could not tell of yet, for each child of its own leads one.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        echo: Callable[[str], None] | None = None,
        *,
        leads_sessions: bool = False,
    ) -> None:
        self._echo, self._leads_sessions = echo, leads_sessions
        self._answers: queue.Queue[Json | None] = queue.Queue()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._sessions: list[int] = []
        self._kills_before, self._is_ended_here = oom_kills(), False
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            encoding="utf-8",
            errors="replace",
        )
        _SESSIONS.add(self._process.pid)
        reading = ((self._read_answers, self._process.stdout), (self._read_prints, self._process.stderr))
        self._readers = [threading.Thread(target=reader, args=(stream,), daemon=True) for reader, stream in reading]
        for reader in self._readers:
            reader.start()

    def _read_answers(self, stream: IO[str]) -> None:
        with stream, contextlib.suppress(ValueError, OSError):
            for line in stream:
                answer = json.loads(line)
                self._sessions += answer.get("sessions", [])
                self._answers.put(answer)
        self._answers.put(None)

    def _read_prints(self, stream: IO[str]) -> None:
        with stream:
            while line := stream.readline(4096):
                self._tail.append(line.rstrip("\n"))
                if self._echo is not None:
                    with contextlib.suppress(ValueError, OSError):
                        self._echo(line.rstrip("\n"))

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Json) -> None:
        assert self._process.stdin is not None  # noqa: S101 - opened above
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def answer(self, seconds: float) -> Json | None:
        """As of any process; what it started may hold its end of the line open, so that its life is looked at, too."""
        deadline, ended = time.monotonic() + seconds, False
        while True:
            left = deadline - time.monotonic()
            try:
                return self._answers.get(timeout=max(0.0, min(left, _PATIENCE_SECONDS)))
            except queue.Empty:
                if ended:
                    return None
                ended = self._process.poll() is not None  # what it said last may still be on its way
                if left <= 0 and not ended:
                    raise TimeoutError from None

    def last_output(self) -> tuple[str, bool]:
        self.wait(_DYING_SECONDS)
        code = self._process.returncode
        time.sleep(0.05)  # the last printed lines are on their way
        last = next((line.strip() for line in reversed(self._tail) if line.strip()), "")
        how = describe_kill(self._kills_before, oom_kills()) if code == -signal.SIGKILL else describe_exit(code)
        from_outside = code is not None and -code in FROM_OUTSIDE and not self._is_ended_here
        return f"{how}{f'; last output: {last[:200]}' if last else ''}", from_outside

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=seconds)

    def kill(self) -> None:
        self._is_ended_here = True
        if self._leads_sessions and self._process.poll() is None:
            _signal_group(self._process.pid, signal.SIGSTOP)  # it starts no more
            kill_sessions_below(self._process.pid)
        _signal_group(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        for session in self._sessions:
            _signal_group(session, signal.SIGKILL)
        if self._sessions:
            self.wait(_REAPING_SECONDS)
        self.kill()
        self._process.wait()
        assert self._process.stdin is not None  # noqa: S101 - opened above
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        for reader in self._readers:  # each closes what it has read to its end, which a process that got away holds up
            reader.join(_READING_SECONDS)


def is_of_a_child(pid: int) -> bool:
    """Whether a process belongs to a child of this one, which may have ended before it."""
    with contextlib.suppress(OSError):
        return os.getsid(pid) in _SESSIONS
    return False


def kill_sessions_below(pid: int) -> None:
    """Ends the sessions that a process's own children lead, be they stopped."""
    for child in children_of(pid):
        _signal_group(child, signal.SIGKILL)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)
