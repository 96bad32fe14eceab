"""What tensors without data leave open: values that code reads, steps that fail, and the lines they come from."""

from __future__ import annotations

import contextlib
import re
import sys
import sysconfig
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.types import Number
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from batchtune.device.failures import describe_user_error, short_path
from batchtune.errors import BatchtuneError, HalfPrecisionError, UserCodeError
from batchtune.estimate.memory.events import Arguments, Assumption, Trace
from batchtune.estimate.tracing.kernels import MADE_ALIKE
from batchtune.task.state import makes_room_only, written_to

aten = torch.ops.aten
Operands: TypeAlias = tuple[Arguments, Mapping[str, object]]  # an operator's arguments and keyword arguments
_VALUES_KEPT = 1 << 17  # elements up to which a tensor's values are calculated for real
_MOST_READS = 10_000  # of values that are not known, at one line: a loop that waits for one would never end
_ASSUMED_FULL = {aten.nonzero.default, aten.masked_select.default, aten.index.Tensor}
_TORCH = str(Path(torch.__file__).resolve().parent)
_BATCHTUNE = str(Path(__file__).resolve().parents[2])
_STANDARD = sysconfig.get_path("stdlib")
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
    r"[Ff]ake ?[Tt]ensor|[Mm]eta [Tt]ensor|data pointer|have storage|HigherOrderOperator|without data|not allocated yet"
)
_LAZY = "the parameters of lazy modules, such as nn.LazyLinear, are made from data"
_IN_TORCH = (RuntimeError, ValueError, IndexError, TypeError)  # which its checks of shapes and types raise
_numpy = Tensor.numpy
_PRINTED = re.compile(r"FakeTensor\(\.\.\., (?:device='cuda:0', )?")


class Values:
    """Real values of small tensors that follow from no data.

    Schedules of dropout rates, positions and optimizer step counters are such, so that code which reads them builds
    what it would build in training. Another value that is read is assumed to be 0, and noted.
    """

    def __init__(self, notes: list[Assumption], device_type: str) -> None:
        self._notes = notes
        self._values: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._calculated = {"cpu", device_type}
        self._reads: Counter[str | None] = Counter()

    def run(self, func: OpOverload, args: Arguments, kwargs: Mapping[str, object]) -> object:
        """The operator on fake tensors; where its result's size depends on values, on the values if they are known."""
        if func in MADE_ALIKE:
            return MADE_ALIKE[func](*args)
        if func is aten.add_.Tensor and _layouts(args) == [torch.strided, torch.sparse_coo]:
            return args[0]  # add_out_dense_sparse_cuda in SparseCUDATensorMath.cu takes nothing
        if func is aten._coalesce.default:  # noqa: SLF001
            text = "sparse gradients: no row is taken to be twice in a batch, an upper bound; more may fit"
            self._note(text, depends_on_data=True)
        if func is aten._pack_padded_sequence.default:  # noqa: SLF001
            return self._packed(*args)
        if func not in _ASSUMED_FULL:
            try:
                return func(*args, **kwargs)
            except DynamicOutputShapeException:
                if self._known((args, kwargs)) is None:
                    raise
        real = self._known((args, kwargs))
        if real is None:
            return self._with_everything_selected(func, args, kwargs)
        like = next(each for each in tree_leaves(args) if isinstance(each, FakeTensor))  # on the device; values are not
        with unset_fake_temporarily(), _disable_current_modes():
            out = func(*real[0], **real[1])
        fakes = tree_map_only(Tensor, lambda each: like.new_empty(each.shape, dtype=each.dtype), out)
        self._values.update(zip(tree_leaves(fakes), tree_leaves(out), strict=True))
        return fakes

    def _packed(self, padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        """The samples of each step one after the other, and their numbers; every sequence is as long as the longest."""
        if lengths.device.type != "cpu":
            raise RuntimeError("'lengths' argument should be a 1D CPU int64 tensor")
        samples, steps = padded.shape[:2] if batch_first else padded.shape[1::-1]
        self._note("packed sequences: all are taken to be as long as they are padded; with shorter ones more may fit")
        with unset_fake_temporarily(), _disable_current_modes():
            counts = torch.full((steps,), samples)
        return padded.new_empty(samples * steps, *padded.shape[2:]), counts

    def _known(self, arguments: Operands) -> Operands | None:
        """The arguments with real values in the place of fake tensors; None where one's value is not known."""
        fakes = [each for each in tree_leaves(arguments) if isinstance(each, FakeTensor)]
        if not fakes or not all(each in self._values for each in fakes):
            return None
        known: Operands = tree_map_only(FakeTensor, self._values.__getitem__, arguments)
        return known

    def read(self, tensor: Tensor) -> Number:
        """The value of one element, as `.item()`, `bool()` and `.tolist()` ask for it."""
        if tensor in self._values:
            with _disable_current_modes():
                known: Number = self._values[tensor].item()
                return known
        if not isinstance(tensor, FakeTensor):
            with _disable_current_modes():
                return tensor.item()
        place = place_outside_torch(sys._getframe())  # noqa: SLF001
        self._reads[place] += 1
        if self._reads[place] > _MOST_READS:
            raise RuntimeError(
                f"a value that is not known without data was read {_MOST_READS:,} times: a loop over it?"
            )
        if tensor.dtype == torch.bool:
            if place is not None:
                text = "branches on a tensor's value, which is not known without data; the estimate assumes False"
                self._note(f"{place}: {text}", depends_on_data=True)
            return False
        if place is not None:
            self._note(f"{place}: reads a tensor's value, which is not known without data; the estimate assumes 0")
        return 0.0 if tensor.dtype.is_floating_point else 0

    def array(self, tensor: Tensor, *, force: bool = False) -> NDArray[Any]:
        """What `.numpy()` returns, also to NumPy's and SciPy's functions: zeros where values are not known.

        Raises:
            RuntimeError: as torch does, of a tensor that requires gradients.
            TypeError: of one that is not on the CPU.
        """
        if tensor.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        if tensor.device.type != "cpu" and not force:
            raise TypeError(f"can't convert {tensor.device} device type tensor to numpy. Use Tensor.cpu() first.")
        tensor = tensor.detach().cpu()
        known = None if isinstance(tensor, FakeTensor) else tensor
        known = self._values.get(tensor, known)
        if known is None:
            place = place_outside_torch(sys._getframe())  # noqa: SLF001
            text = "NumPy reads a tensor's values, which are not known without data; the estimate assumes 0"
            self._note(f"{place}: {text}" if place else text, depends_on_data=True)
        with unset_fake_temporarily(), _disable_current_modes():
            return _numpy(torch.zeros(tensor.shape, dtype=tensor.dtype) if known is None else known)

    def keep(self, outputs: list[Tensor], func: OpOverload, args: Arguments, kwargs: Mapping[str, object]) -> None:
        """Calculates on the CPU what comes of small tensors whose values are known, or of none, such as positions."""
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        touched = [*inputs, *outputs]
        small = all(each.device.type in self._calculated and each.numel() <= _VALUES_KEPT for each in touched)
        known = small and all(each in self._values or not isinstance(each, FakeTensor) for each in inputs)
        if not touched or not known or torch.Tag.nondeterministic_seeded in func.tags or makes_room_only(func):
            for each in [*written_to(func, args, kwargs), *outputs]:
                self._values.pop(each, None)
            return
        real_args, real_kwargs = tree_map_only(FakeTensor, self._values.__getitem__, (args, kwargs))
        real_kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), real_kwargs)
        with _disable_current_modes(), contextlib.suppress(RuntimeError, NotImplementedError):
            values = tree_leaves(func(*real_args, **real_kwargs))
            self._values.update(zip(outputs, (each for each in values if isinstance(each, Tensor)), strict=False))

    def _note(self, text: str, *, depends_on_data: bool = False) -> None:
        note = Assumption(text, depends_on_data)
        if note not in self._notes:
            self._notes.append(note)

    def _with_everything_selected(self, func: OpOverload, args: Arguments, kwargs: Mapping[str, object]) -> object:
        """Operators whose result is as long as the data has it: the longest result there can be."""
        tensor = args[0]
        if func is aten.index.Tensor:
            masks = [each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]]
            if not any(masks):
                return func(*args, **kwargs)
            indices: list[Tensor | None] = []
            for each, is_mask in zip(args[1], masks, strict=True):
                places = torch.empty(each.numel(), dtype=torch.int64, device=tensor.device) if is_mask else each
                indices += [places] * (each.dim() if is_mask else 1)
            out = func(tensor, indices, **kwargs)
        elif func is aten.nonzero.default:
            out = tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)
        else:
            out = tensor.new_empty((torch.broadcast_shapes(tensor.shape, args[1].shape).numel(),))
        place = place_outside_torch(sys._getframe())  # noqa: SLF001
        text = f"{func} selects as many elements as the data has it; all are assumed: an upper bound, more may fit"
        self._note(f"{place or 'backward'}: {text}", depends_on_data=True)
        return out


def _layouts(args: Arguments) -> list[torch.layout]:
    return [each.layout for each in args if isinstance(each, Tensor)]


def place_outside_torch(frame: FrameType | None) -> str | None:
    """`file:line` of the innermost caller that is neither torch nor batchtune; None where batchtune called torch."""
    left_the_recorder = False
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_BATCHTUNE):
            if left_the_recorder:
                return None
        else:
            left_the_recorder = True
            if not _is_internal(path):
                return f"{short_path(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def place_of_error(error: BaseException) -> str | None:
    """`file:line` of the innermost frame of an exception that is neither torch's nor batchtune's."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_BATCHTUNE) and not _is_internal(frame.filename)
    ]
    return f"{short_path(frames[-1].filename)}:{frames[-1].lineno}" if frames else None


@cache
def _is_internal(path: str) -> bool:
    standard = path.startswith(_STANDARD) and "site-packages" not in path and "dist-packages" not in path
    return standard or path.startswith((_TORCH, "<frozen")) or path == "<string>"  # as dataclasses and tuples are made


class CannotTraceError(BatchtuneError):
    """The user's step does something that needs data; the message names its line."""

    after_assuming = False  # of a value that the step had read


class StepFailedError(UserCodeError):
    """The user's step fails with data just so."""

    on_two_devices = False  # of which the CPU may be one that the code chose where it saw no GPU


@contextlib.contextmanager
def naming_the_line(trace: Trace, precision: str) -> Iterator[None]:
    """Says of whatever the block raises whose fault it is, and where.

    Raises:
        CannotTraceError: the step needs data.
        HalfPrecisionError: it fails with data, too, and trains in fp32.
        StepFailedError: it fails with data, too.
    """
    try:
        yield
    except BatchtuneError:
        raise
    except Exception as error:
        text = (str(error).strip().splitlines() or ["(no message)"])[0][:300]
        if not trace.notes and not needs_data(error):  # nothing was assumed before: it would come with data, too
            failed = describe_user_error(as_on_a_gpu(error), f"in a {precision} step of batch size {trace.batch_size}")
            if isinstance(failed, HalfPrecisionError):
                raise failed from error
            told = StepFailedError(failed.detail, failed.frames)
            told.on_two_devices = bool(_DEVICES.search(text))
            raise told from error
        place = place_of_error(error)
        operator = re.search(r"no rule registered for HigherOrderOperator (\w+)", text)
        text = f"{operator[1]} is no operator that can be recorded" if operator else text
        missing = re.search(r"Could not run '([\w:.]+)' with arguments from the '\w*CUDA", text)
        text = (
            f"torch has no {missing[1]} for such tensors (sparse ones, say); probe measures them" if missing else text
        )
        text = f"{_LAZY}: give them their sizes" if "UninitializedParameter" in text else text
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
    told = _PRINTED.sub("tensor(", text)
    if _DEVICES.search(text):
        remedy = "move what is made outside of the model, such as a loss with weights, to the batch's device"
        told = f"tensors are on different devices, cuda:0 and cpu: {remedy}"
    return error if told == text else RuntimeError(told).with_traceback(error.__traceback__)
