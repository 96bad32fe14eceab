"""What a command left behind, however it was run."""

import json
import shutil
from dataclasses import dataclass
from typing import Any


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


@dataclass(frozen=True)
class Tuned:
    """A `tune` and the command line that it was started by, never to be written to."""

    cli: Any
    finished: Finished

    @property
    def document(self) -> dict:
        return self.finished.document

    def copy_to(self, cli: Any) -> None:
        """Gives another folder the same run, as if it had been made there."""
        shutil.copytree(self.cli.run_folder(), cli.run_folder())
        for path in cli.run_folder().iterdir():
            path.write_text(path.read_text().replace(str(self.cli.folder), str(cli.folder)))
