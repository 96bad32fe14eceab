"""What a command left behind, however it was run."""

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Finished:
    """What a command left behind."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def document(self) -> dict:
        return json.loads(self.out)
