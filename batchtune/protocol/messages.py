"""What goes between processes, and how: commands and answers as lines of JSON, from a parent to its child and back.

A child has its line on its original stdin and stdout. Both are moved away before the user's code is imported, so that
nothing it prints, reads or closes can disturb them; forks of one image have the line one after the other. A rank has a
socket in their place (see `batchtune.child.rank`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, ClassVar, Generic, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter

from batchtune.document import NO_CLIPPING, GradientClipping, Value
from batchtune.vocabulary import Goal, LengthBatches, Variant, meets

_GROUP_VARIABLE = "BATCHTUNE_GROUP"
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 45_000}
Answer = TypeVar("Answer")
Json: TypeAlias = dict[str, Any]  # an object of JSON: one message on a line between processes


class Message(BaseModel):
    """What crosses between processes; it never changes."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    def but(self, **changes: object) -> Self:
        """The same with other values."""
        return self.model_copy(update=changes)


class Command(Message, Generic[Answer]):
    """What a parent asks of its child.

    Attributes:
        first_rank_only: of a group of ranks, only the first one is asked.
        fresh: it is done by a child that has opened the task and done nothing else, so that it begins as any other.
    """

    first_rank_only: ClassVar[bool] = False
    fresh: ClassVar[bool] = False
    _by_name: ClassVar[dict[str, type[AnyCommand]]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        if "[" not in cls.__name__:
            Command._by_name[cls.__name__] = cls

    def to_message(self) -> Json:
        """As JSON has it."""
        return {"command": type(self).__name__, **self.model_dump()}

    @staticmethod
    def from_message(message: Json) -> AnyCommand:
        """What `to_message` made, in another process."""
        arguments = dict(message)
        return Command._by_name[arguments.pop("command")].model_validate(arguments)

    def read(self, done: object) -> Answer:
        """The answer, out of its JSON."""
        found: Answer = self._adapter().validate_python(done)
        return found

    def write(self, answer: Answer) -> object:
        """The answer as JSON has it."""
        return self._adapter().dump_python(answer, exclude_unset=True)

    @classmethod
    @functools.cache
    def _adapter(cls) -> TypeAdapter[Any]:
        arguments = (getattr(base, "__pydantic_generic_metadata__", {}).get("args") for base in cls.__mro__)
        return TypeAdapter(next(found for found in arguments if found)[0])

    def asked(self, world_size: int) -> list[int]:
        """The ranks of a group that are asked."""
        return [0] if self.first_rank_only else list(range(world_size))

    @property
    def by_itself(self) -> bool:
        """Whether a rank does it without the others."""
        return self.first_rank_only


AnyCommand: TypeAlias = Command[Any]


PaceKind: TypeAlias = tuple[tuple[str, Value], ...]
NO_VARIANT = Variant()


def pace_kind(optimizer_arguments: Mapping[str, Value], variant: Variant = NO_VARIANT) -> PaceKind:
    """What may change how long a step takes: the variant, and of the optimizer's arguments all but floats."""
    named = sorted((name, each) for name, each in optimizer_arguments.items() if not isinstance(each, float))
    return (*named, *([("trained by", variant.name)] if variant.name else []))


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One configuration and how long it may train.

    Attributes:
        micro_batch_size: of each rank.
        limit_seconds: training time after which the run ends.
        target: metric value at which the run ends; None runs to the limit.
        evaluate_every: training seconds between evaluations; None for the automatic pace.
        expected_seconds: until the target, at the most, by what other runs took: the automatic pace tells a twentieth
            of that; None for `limit_seconds`.
        evaluation_batch_size: samples in one forward pass of the default evaluation.
        most_step_seconds: that an optimizer step takes by what other runs had; None where there were none.
        optimizer_arguments: what else is handed to the user's build_optimizer, by name.
        gradient_clipping: before the optimizers' steps.
        limit_joules: energy in training after which the run ends; None for no such limit.
        horizon_seconds: training time that the user's scheduler is laid out for; None for `limit_seconds`.
        total_steps: the same in steps, where an earlier run of the configuration has settled it.
        wall_seconds: on the clock on the wall after which it is to ask whether to go on; None: there is no hurry.
        world_size: ranks that train it as one.
        variant: what it is trained by; its strategy is None for one rank alone.
        samples: of each micro-batch, where sizes count tokens and batches are of any samples.
        length_batches: samples of a micro-batch by their length, where batches are of samples of similar length.
    """

    micro_batch_size: int
    accumulation_steps: int
    learning_rate: float
    precision: str
    seed: int
    metric: str
    goal: Goal
    target: float | None
    limit_seconds: float
    evaluate_every: float | None
    evaluation_batch_size: int
    expected_seconds: float | None = None
    most_step_seconds: float | None = None
    optimizer_arguments: dict[str, Value] = field(default_factory=dict)
    gradient_clipping: GradientClipping = NO_CLIPPING
    limit_joules: float | None = None
    horizon_seconds: float | None = None
    total_steps: int | None = None
    wall_seconds: float | None = None
    world_size: int = 1
    variant: Variant = NO_VARIANT
    samples: int | None = None
    length_batches: LengthBatches = ()

    @property
    def batch_size(self) -> int:
        """Global batch size."""
        return self.micro_batch_size * self.accumulation_steps * self.world_size

    def reached(self, value: float) -> bool:
        """Whether a metric value meets the target."""
        return meets(value, self.target, self.goal)


@dataclass(frozen=True)
class RunEnd:
    """How a run ended.

    Attributes:
        outcome: `reached`, `finished`, `pruned` or `diverged`.
        total_steps: the horizon that the user's scheduler asked for; None without one.
        evaluation_seconds: what its evaluations took.
        starting_seconds: what of its training epochs took until their first batch, if anything.
        optimizer: its class, where arguments of build_optimizer may have chosen it.
        straggler: the rank that is far slower than the others by itself, and how many times as slow.
    """

    outcome: str
    total_steps: int | None = None
    evaluation_seconds: float | None = None
    starting_seconds: float | None = None
    optimizer: str | None = None
    straggler: tuple[int, float] | None = None


class Channel:
    """The line to the parent, on two file descriptors; when the parent is gone, so is this process with its children.

    A command that was read before the line was there is its first. `at_end` is called when the parent is gone.
    """

    def __init__(
        self, commands: int, answers: int, first: Json | None = None, at_end: Callable[[], None] = lambda: None
    ) -> None:
        self._at_end = at_end
        self._lock = threading.Lock()  # a thread says when torch.compile is at work
        self._answers, self._process = os.fdopen(answers, "w", encoding="utf-8"), os.getpid()
        self._commands: queue.Queue[Json] = queue.Queue()
        if first is not None:
            self._commands.put(first)
        threading.Thread(target=self._listen, args=(os.fdopen(commands, encoding="utf-8"),), daemon=True).start()

    def _listen(self, commands: IO[str]) -> None:
        try:
            for line in commands:
                self._commands.put(json.loads(line))
        except OSError as error:
            end_if_closed(error)
        self._at_end()
        end_with_parent()

    def receive(self) -> Json:
        """The next command."""
        return self._commands.get()

    def send(self, **message: object) -> None:
        """One message to the parent; a copy of this process that the user's code has forked off ends here instead."""
        if os.getpid() != self._process:
            os._exit(0)
        try:
            with self._lock:
                self._answers.write(json.dumps(message) + "\n")
                self._answers.flush()
        except OSError as error:
            end_if_closed(error)
            raise


def end_if_closed(error: OSError) -> None:
    """Ends the process with a word on why where the user's code, and not the parent, has closed the line."""
    if error.errno == errno.EBADF:
        with contextlib.suppress(OSError):
            os.write(2, b"the task's code has closed file descriptors that it did not open\n")
        os._exit(1)


def end_with_parent() -> None:
    """Ends this process and all of its session's first group: what the parent started, and what that has started."""
    if os.getpgrp() == os.getsid(0):
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def move_standard_streams() -> tuple[int, int]:
    """New file descriptors of stdin and stdout; what is printed from now on goes to stderr."""
    moved = os.dup(0), os.dup(1)
    give_standard_streams_away()
    return moved


def give_standard_streams_away() -> None:
    """From now on nothing can be read from stdin, and what is printed goes to stderr."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)


class Rendezvous(Message):
    """Where a group's ranks find whoever coordinates them; in each rank's environment."""

    host: str
    port: int
    token: str  # by which the coordinator knows its ranks
    strategy: str
    name: str  # of the group among those that use the same store

    @classmethod
    def from_environment(cls) -> Self:
        """The group's that this process is a rank of."""
        return cls.model_validate_json(os.environ[_GROUP_VARIABLE])

    def variable(self) -> dict[str, str]:
        """As a part of a rank's environment."""
        return {_GROUP_VARIABLE: self.model_dump_json()}

    def connect(self, **hello: object) -> socket.socket:
        """A line to the coordinator, on which it has been told who is there."""
        line = watched(socket.create_connection((self.host, self.port)))
        line.sendall((json.dumps({"token": self.token, **hello}) + "\n").encode())
        return line


def watched(line: socket.socket) -> socket.socket:
    """A line that ends within a minute of the machine at its other end, which may have no time to close it."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return line
