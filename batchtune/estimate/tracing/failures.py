"""Whether a step that failed on tensors without data would have failed with data, too."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._subclasses import fake_tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from batchtune.errors import BatchtuneError, UserCodeError
from batchtune.estimate.memory.events import Trace
from batchtune.estimate.tracing.source_lines import place_of_error
from batchtune.task.load import describe_user_error

_TORCH = str(Path(torch.__file__).resolve().parent)
_KINDS = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedMutationAliasingException,
    fake_tensor.UnsupportedOperatorException,
    GuardOnDataDependentSymNode,
    NotImplementedError,
)
_DEVICES = re.compile(r"same device, but found at least two devices|found two different devices")
_WITHOUT_DATA = re.compile(
    r"[Ff]ake ?[Tt]ensor|[Mm]eta [Tt]ensor|data pointer|numpy\(\)|have storage|HigherOrderOperator|without data"
)
_IN_TORCH = (RuntimeError, ValueError, IndexError, TypeError)  # which its checks of shapes and types raise
_PRINTED = re.compile(r"FakeTensor\(\.\.\., (?:device='cuda:0', )?")


class CannotTraceError(BatchtuneError):
    """The user's step does something that needs data; the message names its line."""

    after_assuming = False  # of a value that the step had read


class StepFailedError(UserCodeError):
    """The user's step fails with data just so."""


@contextlib.contextmanager
def naming_the_line(trace: Trace) -> Iterator[None]:
    """Says of whatever the block raises whose fault it is, and where.

    Raises:
        CannotTraceError: the step needs data.
        StepFailedError: it fails with data, too.
    """
    try:
        yield
    except BatchtuneError:
        raise
    except Exception as error:
        text = (str(error).strip().splitlines() or ["(no message)"])[0][:300]
        if not trace.notes and not needs_data(error):  # nothing was assumed before: it would come with data, too
            failed = describe_user_error(as_on_a_gpu(error), f"in a step of batch size {trace.batch_size}")
            raise StepFailedError(failed.detail, failed.frames) from error
        place = place_of_error(error)
        operator = re.search(r"no rule registered for HigherOrderOperator (\w+)", text)
        text = f"{operator[1]} is no operator that can be recorded" if operator else text
        assumed = "".join(f" ({each.text})" for each in trace.notes[:1])
        refusal = CannotTraceError(
            f"{f'{place}: ' if place else ''}cannot be traced without data at batch size {trace.batch_size}: "
            f"{type(error).__name__}: {text}{assumed}"
        )
        refusal.after_assuming = bool(trace.notes)
        raise refusal from error


def needs_data(error: BaseException) -> bool:
    """Whether it comes of there being no data, or of what torch does for tensors without."""
    text = _PRINTED.sub("", str(error))
    if _DEVICES.search(text):
        return False
    if isinstance(error, _KINDS) or _WITHOUT_DATA.search(text):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_TORCH) and not isinstance(error, _IN_TORCH)


def as_on_a_gpu(error: Exception) -> Exception:
    """The error in the words that there are for it where tensors have data."""
    text = str(error).partition("\n")[0]
    if not _DEVICES.search(text):
        return error if text == _PRINTED.sub("tensor(", text) else _like(error, _PRINTED.sub("tensor(", text))
    remedy = "move what is made outside of the model, such as a loss with weights, to the batch's device"
    return _like(error, f"tensors are on different devices, cuda:0 and cpu: {remedy}")


def _like(error: Exception, text: str) -> Exception:
    return RuntimeError(text).with_traceback(error.__traceback__)
