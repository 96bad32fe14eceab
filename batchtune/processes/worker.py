"""The parent's side of a child process: started when needed, kept while healthy, replaced after anything else."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

from batchtune.document import CurvePoint
from batchtune.errors import BatchtuneError, DeviceError, UsageError, UserCodeError
from batchtune.processes.local import LocalProcess, Process, child_environment, entry
from batchtune.protocol.commands import LoadLibraries, Opened, OpenTask, Tried
from batchtune.protocol.messages import Answer, Command

LONG_SILENCE_SECONDS = 600.0  # in which the user's evaluation may say nothing; who is silent for longer hangs
START_TIMEOUT_SECONDS = 600.0  # importing torch from a cold network disk, building a large model
BUSY_SECONDS, _RETRY_SECONDS = 60.0, 2.0  # in which a device that worked before may become free again


class WorkerDied(BatchtuneError):
    """The child died or hung; `outcome` is `crash`, `timeout` or, for an allocation outside an attempt, `oom`.

    Of a group of ranks, `rank` is the one that did, where it is known.
    """

    def __init__(self, outcome: Literal["crash", "timeout", "oom"], message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.outcome: Literal["crash", "timeout", "oom"] = outcome
        self.rank = rank


class NodeLost(BatchtuneError):
    """The machine on which a child trained is gone: nothing that its work is to blame for."""


class Worker:
    """A child process that trains; commands go to it one at a time.

    Args:
        settings: the task that each child opens first; None for a child that opens none.
        echo: called with each line the user's code prints.
        program: the module whose `main` the child runs.

    Attributes:
        opened: what the last child said of the task; None before the first has.
    """

    def __init__(
        self,
        settings: OpenTask | None,
        echo: Callable[[str], None] | None = None,
        program: str = "batchtune.child.server",
    ) -> None:
        self.settings, self._program = settings, program
        self.opened: Opened | None = None
        self._echo = echo
        self._process: Process | None = None
        self._spare: Process | None = None
        self._wants_spare = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Opened:
        """Starts the child unless it runs; returns what it said of the task.

        Raises:
            BatchtuneError: the task or the device cannot be used; the class says whose fault it is.
        """
        self._run()
        assert self.opened is not None  # noqa: S101 - only who names a task asks for what is known of it
        return self.opened

    def _run(self) -> None:
        deadline = time.monotonic() + (BUSY_SECONDS if self.opened else 0.0)
        while self._process is None:
            try:
                self._open()
            except DeviceError:  # it was there before: somebody else fills it at the moment
                if time.monotonic() >= deadline:
                    raise
                self._pause(_RETRY_SECONDS)

    def _pause(self, seconds: float) -> None:
        """Waits for a device."""
        time.sleep(seconds)

    def _open(self) -> None:
        self._process = self._take_spare() or self._start_process()
        if self._wants_spare:
            self.prepare()  # both load at once
        if self.settings is not None:
            try:
                self.opened = self._ask(self.settings, START_TIMEOUT_SECONDS, None)
            except WorkerDied as lost:
                doing = f"{self.settings.task}: importing it and building the model once"
                raise UserCodeError(f"{doing} ended in {lost.outcome}: {lost}") from None
            self.settings = self.settings.but(metric=None)  # it is looked for once
            self._keep_limit(self.settings, self.opened)

    def _keep_limit(self, settings: OpenTask, opened: Opened) -> None:
        """Free memory may change: every later child of this worker gets the limit of the first."""
        self.settings = settings.but(memory_limit=opened.memory_limit_bytes)

    def call(
        self, command: Command[Answer], *, timeout: float, on_event: Callable[[CurvePoint], bool] | None = None
    ) -> Answer:
        """Gives the child one command and waits for its answer.

        Args:
            command: what it is asked for.
            timeout: seconds without a sign of life after which the child is killed; a micro-batch done is one, and
                torch.compile at work.
            on_event: called with each evaluation of a run; what it returns is sent back: whether to go on.

        Raises:
            WorkerDied: the child died or hung; the next call starts a new one.
            BatchtuneError: the child answered with an error.
        """
        self.start() if self.settings is not None else self._run()
        return self._ask(command, timeout, on_event)

    def reaches(self, folder: Path) -> bool:  # noqa: ARG002 - this machine has it
        """Whether the child sees this very folder, and not another of that name."""
        return True

    def kill(self) -> None:
        """Ends the child and everything it started; whoever waits for its answer, in another thread, learns of it."""
        if self._process is not None:
            self._process.kill()

    def prepare(self) -> None:
        """Has another process load the libraries meanwhile, so that nobody waits for that when it is the next child.

        Before the child has been started it does so as soon as that is.
        """
        self._wants_spare = self._process is None
        if self._spare is None and not self._wants_spare:
            self._spare = self._start_process()
            self._spare.send(LoadLibraries().to_message())

    def renew(self) -> None:
        """Ends the child and everything it started; the next command is a fresh one's."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def close(self) -> None:
        """Ends the child, its spare and everything they started, and forgets them."""
        spare, self._spare = self._spare, None
        self.renew()
        if spare is not None:
            spare.close()

    def _take_spare(self) -> Process | None:
        """The process that was prepared, once it is ready; None where there is none, or it has died."""
        spare, is_ready = self._spare, False
        if spare is None:
            return None
        with contextlib.suppress(TimeoutError):
            is_ready = spare.answer(START_TIMEOUT_SECONDS) is not None
        self._spare = None
        if is_ready:
            return spare
        spare.close()
        return None

    def _start_process(self) -> Process:
        return LocalProcess(self._command(), self._environment(), self._echo)

    def _command(self) -> list[str]:
        return entry(self._program)

    def _environment(self) -> dict[str, str]:
        return child_environment()

    def _ask(self, command: Command[Answer], timeout: float, on_event: Callable[[CurvePoint], bool] | None) -> Answer:
        process = self._process
        assert process is not None  # noqa: S101 - it was started
        self._send(process, command.to_message())
        while True:
            answer = self._next_answer(process, timeout)
            if self._heard(answer):
                continue
            if "event" in answer:
                try:
                    go_on = on_event is None or on_event(CurvePoint(**answer["event"]))
                except BaseException:
                    self.renew()  # it waits for an answer that nobody will give
                    raise
                self._send(process, {"go_on": go_on})
            elif "done" in answer:
                done = command.read(answer["done"])
                if isinstance(done, Tried) and not done.usable:
                    self.renew()
                return done
            else:
                raise self._error(answer)

    def _send(self, process: Process, message: dict[str, Any]) -> None:
        try:
            process.send(message)
        except BaseException:
            self.renew()  # its place is lost, or an interruption has left half a message
            raise

    def _heard(self, answer: dict[str, Any]) -> bool:
        """Whether this is a sign of life and no answer: whoever gets on is no hang, however long it takes."""
        return "alive" in answer

    def _next_answer(self, process: Process, timeout: float) -> dict[str, Any]:
        try:
            answer = process.answer(timeout)
            if answer is not None:
                return answer
            lost = WorkerDied("crash", process.last_output())
        except TimeoutError:
            lost = WorkerDied("timeout", f"no sign of life for {timeout:g} s")
        except BaseException:
            self.renew()
            raise
        self.renew()
        raise lost

    def _error(self, answer: dict[str, Any]) -> BatchtuneError:
        self.renew()
        if "outcome" in answer:
            return WorkerDied(answer["outcome"], answer["error"], answer.get("rank"))
        if answer["exit_code"] == UserCodeError.exit_code:
            return UserCodeError(answer["error"], answer["frames"])
        kinds = {kind.exit_code: kind for kind in (UsageError, DeviceError)}
        return kinds.get(answer["exit_code"], BatchtuneError)(answer["error"])
