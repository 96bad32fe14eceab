"""What is known of tensors without data: values that follow from none, and what is assumed where one is asked for."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from batchtune.estimate.memory.events import Assumption
from batchtune.estimate.tracing.source_lines import place_outside_torch

aten = torch.ops.aten
_VALUES_KEPT = 1 << 17  # elements up to which a tensor's values are calculated for real
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_MOST_READS = 10_000  # of values that are not known, at one line: a loop that waits for one would never end
_ASSUMED_FULL = {aten.nonzero.default, aten.masked_select.default, aten.index.Tensor}


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

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator on fake tensors; where its result's size depends on values, on the values if they are known."""
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

    def _known(self, arguments: Any) -> Any:
        """The arguments with real values in the place of fake tensors; None where one's value is not known."""
        fakes = [each for each in tree_leaves(arguments) if isinstance(each, FakeTensor)]
        if not fakes or not all(each in self._values for each in fakes):
            return None
        return tree_map_only(FakeTensor, self._values.__getitem__, arguments)

    def read(self, tensor: Tensor) -> Any:
        """The value of one element, as `.item()`, `bool()` and `.tolist()` ask for it."""
        if tensor in self._values:
            with _disable_current_modes():
                return self._values[tensor].item()
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

    def keep(self, outputs: list[Tensor], func: Any, args: Any, kwargs: Any) -> None:
        """Calculates on the CPU what comes of small tensors whose values are known, or of none, such as positions."""
        inputs = [each for each in tree_leaves((args, kwargs)) if is_tensor(each)]
        touched = [*inputs, *outputs]
        small = all(each.device.type in self._calculated and each.numel() <= _VALUES_KEPT for each in touched)
        known = small and all(each in self._values or not isinstance(each, FakeTensor) for each in inputs)
        if not touched or not known or torch.Tag.nondeterministic_seeded in func.tags or _leaves_as_it_was(func):
            for each in touched if func._schema.is_mutable else outputs:  # noqa: SLF001
                self._values.pop(each, None)
            return
        real_args, real_kwargs = tree_map_only(FakeTensor, self._values.__getitem__, (args, kwargs))
        real_kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), real_kwargs)
        with _disable_current_modes(), contextlib.suppress(RuntimeError, NotImplementedError):
            values = tree_leaves(func(*real_args, **real_kwargs))
            self._values.update(zip(outputs, filter(is_tensor, values), strict=False))

    def _note(self, text: str, *, depends_on_data: bool = False) -> None:
        note = Assumption(text, depends_on_data)
        if note not in self._notes:
            self._notes.append(note)

    def _with_everything_selected(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Operators whose result is as long as the data has it: the longest result there can be."""
        tensor = args[0]
        if func is aten.index.Tensor:
            masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
            if not masks:
                return func(*args, **kwargs)
            indices: list[Any] = []
            for each in args[1]:
                if each is None or each.dtype not in (torch.bool, torch.uint8):
                    indices.append(each)
                else:
                    indices += [
                        torch.empty(each.numel(), dtype=torch.int64, device=tensor.device) for _ in range(each.dim())
                    ]
            out = func(tensor, indices, **kwargs)
        elif func is aten.nonzero.default:
            out = tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)
        else:
            out = tensor.new_empty((torch.broadcast_shapes(tensor.shape, args[1].shape).numel(),))
        place = place_outside_torch(sys._getframe())  # noqa: SLF001
        text = f"{func} selects as many elements as the data has it; all are assumed: an upper bound, more may fit"
        self._note(f"{place or 'backward'}: {text}", depends_on_data=True)
        return out


def _leaves_as_it_was(func: Any) -> bool:
    """Whether it makes memory and writes nothing to it."""
    return func.overloadpacket._qualified_op_name.partition("::")[2] in _EMPTY  # noqa: SLF001


def is_tensor(value: Any) -> bool:
    """Whether it is one, fake or real."""
    return isinstance(value, Tensor)
