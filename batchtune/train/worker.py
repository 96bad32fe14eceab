"""The parent's side of a child process: started when needed, kept while healthy, replaced after anything else."""

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
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal, Self

from batchtune.device.host_kills import describe_kill, oom_kills
from batchtune.errors import BatchtuneError, DeviceError, UsageError, UserCodeError

START_TIMEOUT_SECONDS = 600.0  # importing torch from a cold network disk, building a large model
_ROOT = str(Path(__file__).resolve().parents[2])
_TAIL_LINES = 40
_NOT_FOR_CHILDREN = "BATCHTUNE_STORAGE"  # it may hold a password
_PATIENCE_SECONDS = 1.0  # between two looks at whether a silent child still lives


class WorkerLost(BatchtuneError):
    """The child died or hung; `outcome` is `crash`, `timeout` or, for an allocation outside an attempt, `oom`.

    Of a group of ranks, `rank` is the one that did, where it is known.
    """

    def __init__(self, outcome: Literal["crash", "timeout", "oom"], message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.outcome: Literal["crash", "timeout", "oom"] = outcome
        self.rank = rank


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What a child is opened with."""

    task: str
    device: str = "auto"
    purpose: str = "probe"
    memory_limit: int | None = None
    margin: float = 0.05
    precision: tuple[str, ...] = ("auto",)
    optimizer_arguments: tuple[str, ...] = ()
    metric: str | None = None


def entry(module: str) -> list[str]:
    """The command line on which this interpreter runs a module's `main` in a new process."""
    return [sys.executable, "-P", "-c", f"import sys; sys.path.append({_ROOT!r}); from {module} import main; main()"]


def describe_exit(code: int | None) -> str:
    """How a process ended, in words; negative codes are signals."""
    if code is None:
        return "the process lives, but what it answers cannot be read: has the task's code changed a standard module?"
    if code >= 0:
        return f"the process ended with exit status {code}"
    name = signal.Signals(-code).name if -code in signal.Signals.__members__.values() else f"signal {-code}"
    return f"the process died by {name}"


class Worker:
    """A child process that trains; commands go to it one at a time.

    Args:
        settings: None for a child that only describes the machine.
        echo: called with each line the user's code prints.
    """

    def __init__(self, settings: WorkerSettings | None, echo: Callable[[str], None] | None = None) -> None:
        self.settings = settings
        self.facts: dict[str, Any] = {}
        self._echo = echo
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._kills_before: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> dict[str, Any]:
        """Starts the child unless it runs; returns the facts it was opened with.

        Raises:
            BatchtuneError: the task or the device cannot be used; the class says whose fault it is.
        """
        if self._process is None:
            self._spawn()
            if self.settings is not None:
                try:
                    self.facts = self._ask("open", asdict(self.settings), START_TIMEOUT_SECONDS, None)
                except WorkerLost as lost:
                    doing = f"{self.settings.task}: importing it and building the model once"
                    raise UserCodeError(f"{doing} ended in {lost.outcome}: {lost}") from None
                self._keep_limit(self.facts)
                self.settings = replace(self.settings, metric=None)  # it is looked for once
        return self.facts

    def _keep_limit(self, facts: dict[str, Any]) -> None:
        """Free memory may change: every later child of this worker gets the limit of the first."""
        assert self.settings is not None  # noqa: S101 - it was opened with them
        self.settings = replace(self.settings, memory_limit=facts["memory_limit_bytes"])

    def call(
        self,
        command: str,
        *,
        timeout: float,
        on_event: Callable[[dict[str, Any]], bool] | None = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Gives the child one command and waits for its answer.

        Args:
            command: a method of `batchtune.train.child.Child`.
            timeout: seconds between two signs of life after which the child is killed; torch.compile at work is one.
            on_event: called with each event on the way; what it returns is sent back as `go_on`.
            **arguments: the command's own.

        Raises:
            WorkerLost: the child died or hung; the next call starts a new one.
            BatchtuneError: the child answered with an error.
        """
        self.start()
        return self._ask(command, arguments, timeout, on_event)

    def kill(self) -> None:
        """Ends the child and everything it started; whoever waits for its answer, in another thread, learns of it."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()

    def close(self) -> None:
        """Ends the child and everything it started, and forgets it."""
        self.kill()
        process, self._process = self._process, None
        if process is None:
            return
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _command(self) -> list[str]:
        return entry("batchtune.train.child")

    def _environment(self) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if name != _NOT_FOR_CHILDREN}
        return ours | {"MALLOC_ARENA_MAX": "1", "PYTHONUNBUFFERED": "1"}

    def _spawn(self) -> None:
        self._answers, self._tail = queue.Queue(), deque(maxlen=_TAIL_LINES)
        self._kills_before = oom_kills()
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter
            self._command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment(),
            start_new_session=True,
            encoding="utf-8",
            errors="replace",
        )
        for reader, stream in ((self._read_answers, self._process.stdout), (self._read_prints, self._process.stderr)):
            threading.Thread(target=reader, args=(stream, self._answers, self._tail), daemon=True).start()

    def _read_answers(self, stream: IO[str], answers: queue.Queue[dict[str, Any] | None], _: deque[str]) -> None:
        with contextlib.suppress(ValueError, OSError):
            for line in stream:
                answers.put(json.loads(line))
        answers.put(None)

    def _read_prints(self, stream: IO[str], _: object, tail: deque[str]) -> None:
        with contextlib.suppress(ValueError, OSError):
            while line := stream.readline(4096):
                tail.append(line.rstrip("\n"))
                if self._echo is not None:
                    self._echo(line.rstrip("\n"))

    def _ask(
        self,
        command: str,
        arguments: dict[str, Any],
        timeout: float,
        on_event: Callable[[dict[str, Any]], bool] | None,
    ) -> dict[str, Any]:
        self._send({"command": command, **arguments})
        while True:
            answer = self._next_answer(timeout)
            if self._heard(answer):
                continue
            if "event" in answer:
                try:
                    go_on = on_event is None or on_event(answer["event"])
                except BaseException:
                    self.close()  # it waits for an answer that nobody will give
                    raise
                self._send({"go_on": go_on})
            elif "done" in answer:
                done: dict[str, Any] = answer["done"]
                if not done.get("usable", True):
                    self.close()
                return done
            else:
                raise self._error(answer)

    def _heard(self, answer: dict[str, Any]) -> bool:
        """Whether this is a sign of life and no answer: torch.compile at work is no hang, however long it takes."""
        return "compiling" in answer

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None  # noqa: PT018, S101 - started above
        with contextlib.suppress(BrokenPipeError):  # its death is told by the missing answer
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _next_answer(self, timeout: float) -> dict[str, Any]:
        try:
            answer = self._await_answer(timeout)
        except queue.Empty:
            self.close()
            raise WorkerLost("timeout", f"no sign of life for {timeout:g} s") from None
        except BaseException:
            self.close()
            raise
        if answer is None:
            raise self._death()
        return answer

    def _await_answer(self, timeout: float) -> dict[str, Any] | None:
        """The next answer; None once the child has ended, though what it started may hold its end of the line open."""
        assert self._process is not None  # noqa: S101 - it was asked
        deadline, ended = time.monotonic() + timeout, False
        while True:
            left = deadline - time.monotonic()
            try:
                return self._answers.get(timeout=max(0.0, min(left, _PATIENCE_SECONDS)))
            except queue.Empty:
                if ended:
                    return None
                ended = self._process.poll() is not None  # what it said last may still be on its way
                if left <= 0 and not ended:
                    raise

    def _death(self) -> WorkerLost:
        process = self._process
        assert process is not None  # noqa: S101 - an answer was awaited from it
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        code = process.returncode
        time.sleep(0.05)  # the last printed lines are on their way
        last = next((line.strip() for line in reversed(self._tail) if line.strip()), "")
        self.close()
        text = describe_exit(code)
        if code == -signal.SIGKILL:
            text = describe_kill(self._kills_before, oom_kills())
        return WorkerLost("crash", f"{text}{f'; its last words: {last[:200]}' if last else ''}")

    def _error(self, answer: dict[str, Any]) -> BatchtuneError:
        self.close()
        if "outcome" in answer:
            return WorkerLost(answer["outcome"], answer["error"], answer.get("rank"))
        if answer["exit_code"] == UserCodeError.exit_code:
            return UserCodeError(answer["error"], answer["frames"])
        kinds = {kind.exit_code: kind for kind in (UsageError, DeviceError)}
        return kinds.get(answer["exit_code"], BatchtuneError)(answer["error"])
