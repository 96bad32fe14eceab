"""What an exception from a training step means: the device's memory, a kernel's limit, or the user's own code."""

from __future__ import annotations

import dis
import inspect
import re
import sysconfig
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch

from batchtune.errors import HalfPrecisionError, UserCodeError

_TORCH = str(Path(torch.__file__).parent)
_ALLOCATION_FAILED = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|^std::bad_alloc$|^\[enforce fail a$"  # no room for the rest of its own message
    r"|(CUDA|HIP)( driver)? error: out of memory|hipErrorOutOfMemory|Triton Error \[\w+\]: out of memory"
    r"|(CUBLAS|CUSOLVER|HIPBLAS)_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED|miopenStatusAllocFailed"
    r"|CUDA error: (allocation failed|insufficient resources) when calling .cusparse"  # cusparseGetErrorString's words
    r"|CUDNN_STATUS_(INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION|ALLOC)_FAILED"
    # their handles take memory of their own, and when they cannot have it they say no more than this
    r"|CUBLAS_STATUS_NOT_INITIALIZED when calling .cublasCreate|CUDNN_STATUS_NOT_INITIALIZED"
    r"|CUSOLVER_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR), when calling .cusolverDnCreate"
    r"|Cuda failure (\d+ )?'out of memory'|Failed to CUDA (c|m|host )alloc"  # NCCL's words
    r"|Failed to initialize NCCL communicator: unhandled cuda error"  # torch 2.15 says no more of them than this
    r"|MPS backend out of memory|Invalid buffer size: "  # Metal: more than one buffer may hold
    r"|UR_RESULT_ERROR_OUT_OF_(DEVICE|HOST|RESOURCES)"
    r"|could not (create a memory|(create|execute) a primitive(?! descriptor))\b"
    r"|can't start new thread|Cannot allocate memory"
)
_KERNEL_LIMIT = re.compile(
    r"(CUDA|HIP)( driver)? error: (invalid (configuration )?argument|too many resources requested for launch)"
    # an index that overflowed lands anywhere
    r"|(CUDA|HIP)( driver)? error: (an illegal memory access was encountered|misaligned address)"
    r"|(CUDA|HIP)( driver)? error: unspecified launch failure"
    r"|Triton Error \[\w+\]: invalid argument|out of resource: (shared memory|threads|tensor memory)"
    r"|CUDNN_STATUS_(NOT_SUPPORTED|BAD_PARAM|EXECUTION_FAILED|INTERNAL_ERROR\b)"
    r"|CUBLAS_STATUS_(NOT_SUPPORTED|INVALID_VALUE|EXECUTION_FAILED|INTERNAL_ERROR)"
    r"|was unable to find an engine to execute this computation"
    r"|No (valid execution plans built|execution plans support the graph|valid engine configs)"
    r"|could not create a primitive descriptor"
    r"|INT_MAX|numeric_limits<int(32_t)?>::max|canUse32BitIndexMath|[Uu]se 32.bit ind|int32 overflow"
    r"|integer out of range|integer multiplication overflow|Storage size calculation overflowed"
    r"|cannot be converted to type int(32_t)? without overflow"
    r"|too many elements|input tensor is too large|cannot exceed 2\^24"
)
_NO_ENGINE = re.compile("was unable to find an engine to execute this computation")
_OF_LIBRARY = re.compile(r"(CUBLAS|CUDNN|CUSOLVER)_STATUS_|CUFFT_|when calling .cusparse|NCCL error")
CAUGHT = re.compile(r"Caught (\w+) in DataLoader worker process \d+\.")
"""How torch begins what a DataLoader's worker has printed of its error, whose type is the group."""
_MOST_CHARACTERS = 300  # of an error's message
_POISONED = re.compile(
    r"\b(CUDA|HIP)( driver)? error\b|CUBLAS|NCCL|Triton Error|CUDNN_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR\b)"
    r"|could not create a primitive(?! descriptor)"  # once oneDNN had no memory for one, it makes none at any size
)
_NO_SHARED_MEMORY = re.compile("unable to allocate shared memory|DataLoader worker .* is killed by signal: Bus error")
_SHARED_MEMORY = (
    "; workers hand batches over in /dev/shm, which is too small: give a container more (docker run --shm-size=8g), or "
    "use num_workers=0"
)
_LIBRARIES = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
_NOT_THE_USERS = (*map(str, _LIBRARIES), str(Path(__file__).resolve().parents[1]), "<frozen")


def classify(error: BaseException) -> Literal["oom", "kernel_limit", "user_error"]:
    """The outcome of an attempt that ended in `error`.

    torch's out-of-memory type decides; a message is read only when compiled code raised the error, because a user's
    exception may say "out of memory" too. An error raised while an out-of-memory error was being handled is that one.
    """
    return _deciding(error)[1]


def message_of(error: BaseException) -> str:
    """What the error that decides the outcome says, in one line."""
    link, _ = _deciding(error)
    first = next(iter(lines_of(link)), "")
    return textwrap.shorten(first, _MOST_CHARACTERS, placeholder=" …") or type(link).__name__


def lines_of(error: BaseException) -> list[str]:
    """What an error says, line by line; of one in a DataLoader's worker, what the traceback it printed ends with."""
    text = str(error).strip().splitlines()
    caught = CAUGHT.match(str(error))
    ends = [number for number, line in enumerate(text) if caught and re.match(rf"([\w.]+\.)?{caught[1]}: ", line)]
    return [text[ends[-1]].partition(": ")[2], *text[ends[-1] + 1 :]] if ends else text


def maps_file(error: BaseException) -> bool:
    """Whether memory ended where a file was to be mapped, by torch, numpy or the user's own call of mmap."""
    link, outcome = _deciding(error)
    frames = traceback.extract_tb(link.__traceback__)
    calls = isinstance(link, OSError) and frames and re.search(r"\bmmap\(", frames[-1].line or "")
    return outcome == "oom" and (bool(calls) or "unable to mmap" in str(link))


def leaves_device_usable(error: BaseException) -> bool:
    """Whether more attempts may follow in this process: some failures poison the device's context or a library.

    They do so whatever was made of them on their way here.
    """
    return not any(
        isinstance(link, torch.AcceleratorError) or _POISONED.search(str(link))
        for link in links(error)
        if not isinstance(link, torch.OutOfMemoryError | MemoryError)
    )


def free_frames(error: BaseException) -> None:
    """Lets go of what the frames of an error hold: the tensors of a step that failed."""
    for link in links(error):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None


def links(error: BaseException) -> Iterator[BaseException]:
    """The error and all that came before it: stated causes, what a compiler met, and what was being handled."""
    left, met = [error], set[int]()
    while left:
        link = left.pop()
        if id(link) not in met:
            met.add(id(link))
            yield link
            behind = (getattr(link, "inner_exception", None), link.__cause__, link.__context__)
            left += [each for each in behind if isinstance(each, BaseException)]


def _reasons(error: BaseException) -> Iterator[tuple[BaseException, bool]]:
    """The error and those behind it: what a compiler met, a stated cause, else what was being handled.

    Each comes with whether it was stated; what was only being handled may have nothing to do with the error.
    """
    link: BaseException | None = error
    is_stated, met = True, set[int]()
    while link is not None and id(link) not in met:
        met.add(id(link))
        yield link, is_stated
        inner = getattr(link, "inner_exception", None)  # torch._dynamo's BackendCompilerFailed
        behind = inner if isinstance(inner, BaseException) else link.__cause__
        if behind is None and (_is_dynamos(link) or not link.__suppress_context__):
            behind, is_stated = link.__context__, is_stated and _is_dynamos(link)
        link = behind


def _deciding(error: BaseException) -> tuple[BaseException, Literal["oom", "kernel_limit", "user_error"]]:
    """Which of the error and those behind it decides, and for which outcome."""
    for link, is_stated in _reasons(error):
        outcome = _outcome(link)
        if outcome == "oom" or (outcome and is_stated):
            ended = _end_of_context() if _OF_LIBRARY.search(str(link)) else None
            return (ended, _outcome(ended) or "user_error") if ended else (link, outcome)
    return error, "user_error"


def _outcome(error: BaseException) -> Literal["oom", "kernel_limit"] | None:
    """What this error alone says, whatever is behind it."""
    if isinstance(error, torch.OutOfMemoryError):
        return "oom"
    if isinstance(error, MemoryError) and not _raised_by_python(error):
        return "oom"
    # torch._dynamo's errors quote what they met, be it of the user's own: that itself is behind them
    compiled = isinstance(error, RuntimeError | OSError | torch.AcceleratorError) and not _is_dynamos(error)
    if compiled and not _raised_by_python(error):
        if _ALLOCATION_FAILED.search(str(error)) or (_NO_ENGINE.search(str(error)) and _allocations_failed()):
            return "oom"
        if _KERNEL_LIMIT.search(str(error)):
            return "kernel_limit"
    if type(error).__name__ == "OutOfResources" and type(error).__module__.startswith("triton."):
        return "kernel_limit"
    return None


def _end_of_context() -> BaseException | None:
    """The error that a kernel has ended CUDA's context with, where there is one: from then on every call returns it.

    A library that is called next knows only that it failed: "not initialized", says cuBLAS, of an index out of range.
    """
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError as error:
        return error
    return None


def _allocations_failed() -> bool:
    """Whether PyTorch's allocator could not give what it was asked for since the attempt began.

    A convolution goes on to cuDNN's next engine when there is no memory for the workspace of one, and says only that
    there was none left (aten/src/ATen/native/cudnn/Conv_v8.cpp catches the error, pytorch/pytorch#108645).
    """
    return torch.cuda.is_initialized() and bool(torch.cuda.memory_stats().get("num_ooms"))


def _is_dynamos(error: BaseException) -> bool:
    """Whether this is torch.compile's word for an error that it met, which it hides (`raise … from None`)."""
    return type(error).__module__ == "torch._dynamo.exc"


def _raised_by_python(error: BaseException) -> bool:
    """Whether a `raise` statement in somebody's Python raised this, rather than a call into compiled code."""
    at: TracebackType | None = error.__traceback__
    if at is None:
        return False
    while at.tb_next is not None:
        at = at.tb_next
    if Path(at.tb_frame.f_code.co_filename).is_relative_to(_TORCH):
        return False  # torch's own Python hands on what its compiled parts met
    instructions = dis.get_instructions(at.tb_frame.f_code)
    return any(each.offset == at.tb_lasti and each.opname == "RAISE_VARARGS" for each in instructions)


def describe_user_error(error: BaseException, doing: str, hint: str = "") -> UserCodeError:
    """The user's exception as one line (function, type, place, text, hint) with their own frames, and nobody else's."""
    if isinstance(error, UserCodeError):
        return error
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    kind, text = type(error).__name__, lines_of(error) or ["(no message)"]
    if caught := CAUGHT.match(str(error)):
        kind, frames = caught[1], _frames_in(str(error)) or frames
    frames = frames or _named_last(error)
    own = frames[0].name if frames and frames[0].name != "<module>" else None
    whole = own is None and doing.startswith(("importing", "calling"))
    who, when = (doing, "") if whole else (own or "a library that the task uses", f" {doing}")
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
        text = [f"it ends the process with exit({'' if error.code is None else error.code})"]
    if _NO_SHARED_MEMORY.search(text[0]):
        hint += _SHARED_MEMORY
    kind_of_error = UserCodeError
    if "unsafe to autocast" in text[0]:  # torch's, of binary_cross_entropy
        hint, kind_of_error = hint + HalfPrecisionError.remedy, HalfPrecisionError
    place = f"{short_path(frames[-1].filename)}:{frames[-1].lineno}: " if frames else ""
    return kind_of_error(
        f"{who} raised {kind}{when}: {place}{text[0][:500]}{hint}", "".join(traceback.format_list(frames))
    )


def _frames_in(printed: str) -> list[traceback.FrameSummary]:
    """The user's own frames in a traceback that another process has printed."""
    found = re.findall(r'^  File "(.+)", line (\d+), in (.+)$', printed, re.MULTILINE)
    return [traceback.FrameSummary(file, int(line), name) for file, line, name in found if is_users(file)]


def _named_last(error: BaseException) -> list[traceback.FrameSummary]:
    """Where none of the user's functions was at work: that of theirs which the innermost frame has to do with."""
    *_, (innermost, _) = [(None, 0), *traceback.walk_tb(error.__traceback__)]
    called = [each for each in innermost.f_locals.values() if inspect.isfunction(each)] if innermost else []
    codes = [each.__code__ for each in called if is_users(each.__code__.co_filename)]
    return [traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name) for code in codes[:1]]


def is_users(filename: str) -> bool:
    """Whether a file is of the user's own code, and neither a library's nor batchtune's."""
    path = filename if filename.startswith("<") else str(Path(filename).resolve())
    return not path.startswith(_NOT_THE_USERS) and "site-packages" not in path


def short_path(filename: str) -> str:
    """A file of the user's from here, a library's from its package on."""
    if "site-packages/" in filename:
        return filename.rpartition("site-packages/")[2]
    try:
        return str(Path(filename).relative_to(Path.cwd()))
    except (ValueError, OSError):  # elsewhere, or the user's code has left for a folder that is gone
        return filename
