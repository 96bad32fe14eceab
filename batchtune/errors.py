"""The errors a user can meet: one class for each exit code, with the result until then, and what no message shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Self

if TYPE_CHECKING:
    from batchtune.document import Document


Setting = Literal["device", "memory_limit", "ranks"]
_FLAGS: dict[Setting, str] = {"device": "--device", "memory_limit": "--memory-limit", "ranks": "--nproc-per-node"}
_KEYS = {
    "--device": "device",
    "--memory-limit": "memory.limit",
    "--nproc-per-node": "ranks.per_trial",
    "--lengths auto": "batch_size.unit tokens",
}
"""What stands in a configuration for an option that `tune` does not have."""
_FLAG_FIRST = re.compile(r"^(--[a-z-]{1,30}) (?=.{1,200}?: )")  # what is between is its value
_FLAG = re.compile(
    r"'batchtune [^']*'|torchrun --.*"  # to be typed as it is
    r"|(?P<flag>--[a-z][a-z-]*)(?P<value>=| (?=[0-9.\"]|(?:N|all|auto|cpu|cuda|mps|ddp|fsdp|bf16|fp16|fp32|tf32)\b))?"
)
_BEFORE_THE_HOST = re.compile(r"(://[^:/@\s]{0,200}:).{0,500}(?=@)")  # a password may hold an @: up to the last one
_IN_THE_QUERY = re.compile(r"([?&]\w{0,50}(?:passw|pwd|secret|token)\w{0,50}=)[^&\s'\"]{0,500}", re.IGNORECASE)


def without_passwords(text: str) -> str:
    """A text in which no URL shows a password."""
    return _IN_THE_QUERY.sub(r"\1***", _BEFORE_THE_HOST.sub(r"\1***", text))


def kind_of(value: object) -> str:
    """What a value is, with its article: `an int`, `a Tensor`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


class BatchtuneError(Exception):
    """Base of every error batchtune raises on purpose; its message shows no password of a URL.

    Args:
        detail: what is wrong.
        setting: whose value is wrong, where that is what the message begins with: the command line's name of it, until
            somebody else calls it by theirs.

    Attributes:
        exit_code: what the command line exits with.
        result: what was measured before the error, when anything was.
        remedy: how the message may end in batchtune's words, behind those of the user's code.
    """

    exit_code: ClassVar[int] = 1
    result: Document | None = None
    remedy: str = ""

    def __init__(self, detail: str, *, setting: Setting | None = None) -> None:
        self.detail, self.setting = detail, setting
        super().__init__(without_passwords(f"{_FLAGS[setting]} {detail}" if setting else detail))

    def in_configuration(self) -> Self:
        """The same error for who has a configuration: of options that `tune` lacks, it names the keys."""
        text = f"{_FLAGS[self.setting]} {self.detail}" if self.setting else self.detail
        for flag, key in _KEYS.items():
            text = re.sub(rf"{flag}\b", key, text)
        return type(self)(text)

    def say_arguments(self, names: Mapping[str, str]) -> None:
        """Makes it the error of who has called a function: it names arguments where it has named flags.

        Args:
            names: of each flag, that of the argument; of a switch with its value: `fresh=True`.
        """

        def said(found: re.Match[str]) -> str:
            name = names.get(found["flag"] or "")
            return found[0] if name is None else f"{name.partition('=')[0]}=" if found["value"] else name

        whole = str(self)
        text = whole.removesuffix(self.remedy)
        own, raised, users = text.partition(" raised ")  # whose words are the user's
        first = _FLAG_FIRST.match(own)
        own = f"{first[1]}={own[first.end() :]}" if first and first[1] in names else own
        text = _FLAG.sub(said, own) + raised + users + _FLAG.sub(said, whole[len(text) :])
        self.detail, self.setting, self.args = text, None, (text,)


class UsageError(BatchtuneError):
    """A command, a configuration or a file cannot be used as given; the message says how to fix it."""

    exit_code = 2


class UserCodeError(BatchtuneError):
    """The user's own code raised, or broke the task contract.

    Attributes:
        frames: the lines of theirs that lead to it.
    """

    exit_code = 3

    def __init__(self, message: str, frames: str = "", remedy: str = "") -> None:
        super().__init__(message + remedy)
        self.frames, self.remedy = frames, remedy or self.remedy


class EpochTooShortError(UserCodeError):
    """A batch was asked for that is larger than an epoch.

    Attributes:
        samples: the largest there is.
    """

    def __init__(self, message: str, samples: int) -> None:
        super().__init__(message)
        self.samples = samples


class HalfPrecisionError(UserCodeError):
    """The half precision is why a step fails at every size, by its loss scale or by autocast; fp32 trains.

    Where autocast refuses a loss, the message ends in the remedy.
    """

    remedy = (
        " Take binary_cross_entropy_with_logits or BCEWithLogitsLoss without the sigmoid, or use --precision fp32 (in "
        "a configuration precision: fp32)"
    )


def fp32_instead(precision: str, error: str) -> str:
    """What is said where fp32 takes the place of a half precision that nobody asked for, by what that failed with."""
    after_its_line = re.sub(r"^.*\.py:\d+: ", "", error)
    return f"fp32 and not {precision}, since {re.split('[.;] ', after_its_line)[0]}"


class NothingFitsError(BatchtuneError):
    """No batch size fits in the memory limit, no trial of a study was usable, or nothing could be estimated."""

    exit_code = 4


class DeviceError(BatchtuneError):
    """The device asked for is missing or cannot be used now, or something else kills what is to train on it."""

    exit_code = 5


class RunInterrupted(BatchtuneError):
    """The run was stopped from outside, by Ctrl-C or SIGTERM; what was measured by then is in the result."""

    exit_code = 130


def error_of(exit_code: int, message: str) -> BatchtuneError:
    """The error that another process has ended with."""
    kinds = (UsageError, UserCodeError, NothingFitsError, DeviceError, RunInterrupted)
    return next((kind for kind in kinds if kind.exit_code == exit_code), BatchtuneError)(message)
