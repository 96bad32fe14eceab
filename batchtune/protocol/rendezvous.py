"""Where the ranks of a group meet whoever speaks for them."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from typing import Any, Self

_VARIABLE = "BATCHTUNE_GROUP"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where a group's ranks find whoever coordinates them; in each rank's environment.

    Attributes:
        host: of the coordinator.
        port: on which it listens.
        token: by which it knows its ranks.
        strategy: ddp or fsdp.
        name: of the group among those that use the same store.
    """

    host: str
    port: int
    token: str
    strategy: str
    name: str

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` made."""
        return cls(**json.loads(text))

    @classmethod
    def from_environment(cls) -> Self:
        """The group's that this process is a rank of."""
        return cls.from_json(os.environ[_VARIABLE])

    def variable(self) -> dict[str, str]:
        """As a part of a rank's environment."""
        return {_VARIABLE: self.to_json()}

    def connect(self, **hello: Any) -> socket.socket:
        """A line to the coordinator, on which it has been told who is there."""
        line = socket.create_connection((self.host, self.port))
        line.sendall((json.dumps({"token": self.token, **hello}) + "\n").encode())
        return line
