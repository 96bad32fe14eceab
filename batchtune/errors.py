"""The errors a user can meet: one class for each documented exit code, each able to carry the partial result."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from batchtune.results import Result


class BatchtuneError(Exception):
    """Base of every error batchtune raises on purpose.

    Attributes:
        exit_code: what the command line exits with.
        result: what was measured before the error, when anything was.
    """

    exit_code: ClassVar[int] = 1
    result: Result | None = None


class UsageError(BatchtuneError):
    """A command, a configuration or a file that cannot be used as given; the message says how to mend it."""

    exit_code = 2


class UserCodeError(BatchtuneError):
    """The user's own code raised, or broke the task contract; `frames` holds the lines of theirs that lead to it."""

    exit_code = 3

    def __init__(self, message: str, frames: str = "") -> None:
        super().__init__(message)
        self.frames = frames


class NothingFitsError(BatchtuneError):
    """No batch size fits in the memory limit, or no trial of a study was usable."""

    exit_code = 4


class DeviceError(BatchtuneError):
    """The device asked for is missing or cannot be used now."""

    exit_code = 5


class RunInterrupted(BatchtuneError):
    """The run was stopped from outside; what was known by then is in `result`."""

    exit_code = 130
