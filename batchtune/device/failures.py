"""What an exception from a training step means: the device's memory, a kernel's limit, or the user's own code."""

from __future__ import annotations

import dis
import re
from types import TracebackType
from typing import Literal

import torch

_ACCELERATOR_ERROR: type[BaseException] = getattr(torch, "AcceleratorError", RuntimeError)
_ALLOCATION_FAILED = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|^std::bad_alloc$"
    r"|CUDA error: out of memory"
    r"|(CUBLAS|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED"
    r"|CUDNN_STATUS_ALLOC_FAILED"
    r"|hipErrorOutOfMemory|MPS backend out of memory|UR_RESULT_ERROR_OUT_OF_(DEVICE|HOST|RESOURCES)"
    r"|could not create a (memory|primitive|memory object)\b"
    r"|can't start new thread|Cannot allocate memory"
)
_KERNEL_LIMIT = re.compile(
    r"CUDA error: invalid configuration argument"
    r"|CUDNN_STATUS_NOT_SUPPORTED|CUDNN_STATUS_BAD_PARAM|GET was unable to find an engine to execute this computation"
    r"|INT_MAX|integer out of range|canUse32BitIndexMath|[Uu]se 32.bit ind|int32 overflow|too many elements"
)


def classify(error: BaseException) -> Literal["oom", "kernel_limit", "user_error"]:
    """The outcome of an attempt that ended in `error`.

    torch's out-of-memory type decides; a message is read only when compiled code raised the error, because a user's
    exception may say "out of memory" too.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError):
            return "oom"
        if isinstance(seen, MemoryError) and not _raised_by_python(seen):
            return "oom"
        if isinstance(seen, RuntimeError | OSError | _ACCELERATOR_ERROR) and not _raised_by_python(seen):
            if _ALLOCATION_FAILED.search(str(seen)):
                return "oom"
            if _KERNEL_LIMIT.search(str(seen)):
                return "kernel_limit"
        seen = seen.__cause__
    return "user_error"


def leaves_device_usable(error: BaseException) -> bool:
    """Whether more attempts may follow in this process: a failed kernel poisons the device's context."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or not (
        isinstance(error, _ACCELERATOR_ERROR) or "CUDA error" in str(error) or "CUBLAS" in str(error)
    )


def _raised_by_python(error: BaseException) -> bool:
    """Whether a `raise` statement in somebody's Python raised this, rather than a call into compiled code."""
    at: TracebackType | None = error.__traceback__
    if at is None:
        return False
    while at.tb_next is not None:
        at = at.tb_next
    if "/torch/" in at.tb_frame.f_code.co_filename.replace("\\", "/"):
        return False  # torch's own Python hands on what its compiled parts met
    instructions = dis.get_instructions(at.tb_frame.f_code)
    return any(each.offset == at.tb_lasti and each.opname == "RAISE_VARARGS" for each in instructions)
