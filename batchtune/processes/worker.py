"""The parent's side of a child process: started when needed, kept while healthy, replaced after anything else."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

from batchtune.document import CurvePoint
from batchtune.errors import BatchtuneError, DeviceError, RunInterrupted, UsageError, UserCodeError
from batchtune.processes.local import Launcher, LocalLauncher, Process
from batchtune.protocol.commands import Describe, Opened, OpenTask, Renew, Train, Tried, TryBatchSize
from batchtune.protocol.messages import Answer, Command, Json
from batchtune.version import __version__

LONG_SILENCE_SECONDS = 600.0  # in which the user's evaluation may say nothing; who is silent for longer hangs
START_TIMEOUT_SECONDS = 600.0  # importing torch from a cold network disk, building a large model
LONG_OPENING_SECONDS = 20.0  # after which one is told what is being waited for
BUSY_SECONDS, RETRY_SECONDS = 60.0, 2.0  # in which a device that worked before may become free again
_RETRIES = 2  # of what is no run of a study, where nodes are lost
STOPPED = "stopped with the others"
_LET_LIVE = (
    "make room in the host's memory, or see what ends processes here: a batch system's limit, earlyoom or systemd-oomd"
)
DiedOf: TypeAlias = Literal["crash", "timeout", "oom"]


class WorkerDied(BatchtuneError):
    """The child died or hung; `outcome` is `crash`, `timeout` or, for an allocation outside an attempt, `oom`.

    Of a group of ranks, `rank` is the one that did, where it is known. `from_outside` says that nothing it did itself
    ended it, as far as can be told: a signal did, or its machine is gone.
    """

    def __init__(self, outcome: DiedOf, message: str, rank: int | None = None, *, from_outside: bool = False) -> None:
        super().__init__(message)
        self.outcome: DiedOf = outcome
        self.rank, self.from_outside = rank, from_outside

    def said_of(self, doing: str) -> BatchtuneError:
        """What a user is told where their task's child has died of that for good: of a signal from outside, twice."""
        if self.from_outside:
            return DeviceError(f"{doing} was ended twice by something else: {self}; {_LET_LIVE}")
        return UserCodeError(f"{doing} ended in {self.outcome}: {self}")


class NodeLost(BatchtuneError):
    """The place where a child trained is gone: nothing that its work is to blame for, unless it happens over again.

    `outcome` is what it comes to then.
    """

    def __init__(self, message: str, outcome: DiedOf = "crash") -> None:
        super().__init__(message)
        self.outcome: DiedOf = outcome


class Worker(contextlib.AbstractContextManager["Worker"]):
    """A child process that trains; commands go to it one at a time.

    Args:
        settings: the task that each child opens first; None for a child that opens none.
        launcher: starts its children; None: on this machine.
        stopping: once it is set, every command is cut off; None: nobody else can do that.
        note: told that a task takes long to be imported, and what is retried because a node was lost.
        progress: told what share of a command is done, where its child tells.

    Attributes:
        opened: what the last child said of the task; None before the first has.
    """

    def __init__(
        self,
        settings: OpenTask | None,
        launcher: Launcher | None = None,
        *,
        stopping: threading.Event | None = None,
        note: Callable[[str], None] | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self.settings = settings
        self.opened: Opened | None = None
        self._launcher = launcher or LocalLauncher()
        self._stopping = stopping or threading.Event()
        self._note = note or (lambda _: None)
        self._progress = progress or (lambda _: None)
        self._starting = threading.RLock()
        self._process: Process | None = None
        self._image: Process | None = None  # whose next fork has opened nothing yet
        self._is_fresh = False

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Opened:
        """Starts the child unless it runs; returns what the first one said of the task.

        Raises:
            BatchtuneError: the task or the device cannot be used, or `stopping` is set; the class says which.
        """
        self._run()
        assert self.opened is not None  # noqa: S101 - only who names a task asks for what is known of it
        return self.opened

    def _run(self) -> None:
        deadline = time.monotonic() + (BUSY_SECONDS if self.opened else 0.0)
        with self._starting:
            while self._process is None:
                try:
                    self._open()
                except DeviceError:  # it was there before: somebody else fills it at the moment
                    if time.monotonic() >= deadline:
                        raise
                    self._stopping.wait(RETRY_SECONDS)

    def _open(self, *, is_last: bool = False) -> None:
        """Starts a child and has it open the task; once more where something else has killed it meanwhile."""
        image, self._image = self._image, None
        self._process = image or self._launcher.start()
        if self.settings is None:
            return
        again, doing = self.opened is not None, f"{self.settings.task}: importing it and building the model once"
        told = f"{self.settings.task}: importing it, building the model and looking at its data takes long"
        slow = threading.Timer(LONG_OPENING_SECONDS, self._note, [told])
        slow.daemon = True
        try:
            if not again:
                slow.start()
            self.opened = self._ask(self.settings.but(again=again), START_TIMEOUT_SECONDS, None) or self.opened
        except WorkerDied as died:
            if is_last or not died.from_outside:
                raise died.said_of(doing) from None
            self._note(f"{doing} is tried again: {died}")
        finally:
            slow.cancel()
        if self._process is None:  # killed
            self._open(is_last=True)
            return
        assert self.opened is not None  # noqa: S101 - the first child tells
        self._is_fresh = again
        self.settings = self.settings.but(
            metric=None,  # it is looked for once
            memory_limit=self.opened.memory_limit_bytes,  # what is free may change: it is settled once
            rank_memory_limits_bytes=self.opened.rank_memory_limits_bytes,
            deals_out=self.opened.deals_out,
            samples=None if self.opened.deals_out else self.opened.samples,  # every child is to train the same batch
            lengths_seen=self.opened.lengths,
        )

    def call(
        self, command: Command[Answer], *, timeout: float, on_event: Callable[[CurvePoint], bool] | None = None
    ) -> Answer:
        """Gives the child one command and waits for its answer; what is no run is retried where its node was lost.

        Args:
            command: what it is asked for.
            timeout: seconds without a sign of life after which the child is killed; a micro-batch done is one, and
                torch.compile at work.
            on_event: called with each evaluation of a run; what it returns is sent back: whether to go on.

        Raises:
            WorkerDied: the child died or hung; the next call starts a new one.
            NodeLost: that of a run was lost, or several in a row.
            BatchtuneError: the child answered with an error.
            RunInterrupted: `stopping` is set.
        """
        for _ in range(0 if isinstance(command, Train) else _RETRIES):
            try:
                return self._call(command, timeout, on_event)
            except NodeLost as lost:
                self._note(f"{type(command).__name__} is retried: {lost}")
        return self._call(command, timeout, on_event)

    def _call(self, command: Command[Answer], timeout: float, on_event: Callable[[CurvePoint], bool] | None) -> Answer:
        self._run()
        if command.fresh and not self._is_fresh:
            self.renew()
            self._run()
        self._is_fresh = False
        return self._ask(command, timeout, on_event)

    def kill(self) -> None:
        """Ends the child and everything it started; whoever waits for its answer, in another thread, learns of it."""
        if self._process is not None:
            self._process.kill()

    def renew(self) -> None:
        """Ends the child; the next command is a fresh one's: another fork of its image, or a new process."""
        if self._process is None:
            return
        if self.opened is None or not self.opened.forks:
            self._discard()
            return
        with contextlib.suppress(WorkerDied, NodeLost):  # then the next one is a new process
            self._ask(Renew(), START_TIMEOUT_SECONDS, None)
            self._image, self._process = self._process, None

    def _discard(self) -> None:
        """Ends the child with its image and everything they started."""
        for process in (self._process, self._image):
            if process is not None:
                process.close()
        self._process = self._image = None

    def close(self) -> None:
        """Ends the child and everything it started, and forgets it."""
        self.kill()
        with self._starting:
            self._discard()

    def _ask(self, command: Command[Answer], timeout: float, on_event: Callable[[CurvePoint], bool] | None) -> Answer:
        """The answer; after anything else the child is of no more use."""
        assert self._process is not None  # noqa: S101 - it was started
        if self._stopping.is_set():
            raise RunInterrupted(STOPPED)
        try:
            answer = _answer(self._process, command, timeout, on_event, self._progress)
        except BaseException as error:
            self._discard()
            if isinstance(error, WorkerDied) and self._stopping.is_set():
                raise RunInterrupted(STOPPED) from None
            if isinstance(error, WorkerDied) and self._is_no_fault_of(command, error):
                raise NodeLost(str(error), error.outcome) from None
            raise
        if isinstance(answer, Tried) and not answer.usable:
            self.renew()
        return answer

    def _is_no_fault_of(self, command: Command[Answer], died: WorkerDied) -> bool:
        """Whether a group that has worked was struck: of many processes one is, sooner or later.

        What befalls an attempt of a probe is its outcome: a rank that takes too much of the host's memory is killed,
        too. Who coordinates ranks runs no code of the user's, so that its own end is no fault of theirs.
        """
        opened_before = self.settings is not None and bool(self.settings.rank_memory_limits_bytes)  # by another worker
        has_worked = opened_before if self.opened is None else self.opened.world_size > 1
        if not has_worked or isinstance(command, TryBatchSize):
            return False
        return died.from_outside or died.outcome == "timeout" or (died.outcome == "crash" and died.rank is None)


def _answer(
    process: Process,
    command: Command[Answer],
    timeout: float,
    on_event: Callable[[CurvePoint], bool] | None,
    progress: Callable[[float], None],
) -> Answer:
    """A child's answer to one command; raised where it is an error, or where the child died or hung."""
    process.send(command.to_message())
    while True:
        try:
            answer = process.answer(timeout)
        except TimeoutError:
            raise WorkerDied("timeout", f"no sign of life for {timeout:g} s") from None
        if answer is None:
            text, from_outside = process.last_output()
            raise WorkerDied("crash", text, from_outside=from_outside)
        if "event" in answer:
            process.send({"go_on": on_event is None or on_event(CurvePoint(**answer["event"]))})
        elif "done" in answer:
            return command.read(answer["done"])
        elif "alive" not in answer:  # a child at work is no hang, however long it takes
            raise _error(answer)
        elif "share" in answer:
            progress(answer["share"])


def _error(answer: Json) -> BatchtuneError:
    if "outcome" in answer:
        outside = answer.get("from_outside", False)
        return WorkerDied(answer["outcome"], answer["error"], answer.get("rank"), from_outside=outside)
    if answer["exit_code"] == UserCodeError.exit_code:
        return UserCodeError(answer["error"], answer["frames"])
    kinds = {kind.exit_code: kind for kind in (UsageError, DeviceError)}
    return kinds.get(answer["exit_code"], BatchtuneError)(answer["error"], setting=answer.get("setting"))


def describe_machine(device: str) -> dict[str, object]:
    """Versions of batchtune and torch, the device and what its sensors say, by a child that opens no task."""
    with Worker(None) as worker:
        machine = worker.call(Describe(device=device), timeout=START_TIMEOUT_SECONDS)
    return {"batchtune": __version__} | machine.model_dump(exclude_unset=True)
