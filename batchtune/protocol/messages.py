"""Commands and their answers as JSON: each command is a class that names the type of its answer."""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Generic, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter

Answer = TypeVar("Answer")
Json: TypeAlias = dict[str, Any]  # an object of JSON: one message on a line between processes


class Message(BaseModel):
    """What crosses between processes; it never changes."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


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
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
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

    def read(self, done: Any) -> Answer:
        """The answer, out of its JSON."""
        found: Answer = self._adapter().validate_python(done)
        return found

    def write(self, answer: Answer) -> Any:
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

    def but(self, **changes: Any) -> Self:
        """The same with other arguments."""
        return self.model_copy(update=changes)


AnyCommand: TypeAlias = Command[Any]
