"""A dispatch mode that sees every operator of a training step and writes down what it allocates and when that dies."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from batchtune.estimate.memory.events import SCRATCH, Birth, Trace
from batchtune.estimate.memory.scratch import RESULTS, Block, Held, Steps, inside, workspaces
from batchtune.estimate.tracing.source_lines import place_outside_torch
from batchtune.estimate.tracing.values import Values, is_tensor

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_PRODUCTS = {str(aten.mm.default), str(aten.bmm.default)}
_ATTENTION = 4  # dimensions: batch, heads, length, head size
_FILLS_ZEROS = {aten.index_put.default, aten.index_add.default, aten.scatter.src, aten.scatter_add.default}
_IN_PLACE_IN = {"BinaryCrossEntropyWithLogitsBackward0": (aten.sub.Tensor, aten.mul.Tensor, aten.add.Tensor)}


class Recorder(TorchDispatchMode):
    """Records storages on one type of device; to be entered inside a `FakeTensorMode`."""

    def __init__(self, trace: Trace, device_type: str = "cuda") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace, self.device_type = trace, device_type
        self.moment = "build"
        self._live: dict[int, tuple[int, Any]] = {}
        self._storages: Counter[int] = Counter()  # a view of a deep-copied fake tensor comes with a storage of its own
        self._values = Values(trace.notes, device_type)
        self._views: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._handles: set[tuple[str, bool]] = set()  # by library, and whether autograd's thread has it
        self._calls: tuple[Any, Any] = (None, None)  # where in Python the last two operators were called
        self._modules: list[nn.Module] = []
        self._paths: dict[int, str] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled while this records, so dispatch need not be guarded against it, call by call."""
        return False

    def number_of(self, tensor: Tensor) -> int | None:
        """The number of a tensor's storage in the trace; None for one that is not there."""
        try:
            found = self._live.get(tensor.untyped_storage()._cdata)  # noqa: SLF001
        except (RuntimeError, NotImplementedError):  # sparse and other tensors without one storage
            return None
        return None if found is None else found[0]

    def holds(self, value: Any) -> None:
        """Counts what was made before recording began and lives through all of it, such as a batch on the CPU."""
        for tensor in tree_leaves(value):
            if is_tensor(tensor) and tensor.device.type == self.device_type:
                self._see(tensor, aten.empty.memory_format, (), in_backward=False)

    def live(self) -> set[int]:
        """Numbers of the storages that are alive now."""
        return {number for number, _ in self._live.values()}

    @contextlib.contextmanager
    def naming(self, model: nn.Module) -> Iterator[None]:
        """Notes for each storage in which module's forward it was born."""
        self._paths = {id(module): path for path, module in model.named_modules()}
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            self.trace.ops.add("nn.RNNBase")
        hooks = nn.modules.module
        entering = hooks.register_module_forward_pre_hook(lambda module, _: self._modules.append(module))
        leaving = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            entering.remove()
            leaving.remove()

    def _leave(self, module: nn.Module, *_: object) -> None:
        if module in self._modules:  # an exception may have skipped the inner ones
            while self._modules.pop() is not module:
                pass

    def forget(self) -> None:
        """Stops recording deaths: what is freed from now on belongs to no step."""
        for _, finalizer in self._live.values():
            finalizer.detach()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:
            return func(*args)  # most calls are of this one; it makes nothing
        if func is aten._local_scalar_dense.default:  # noqa: SLF001
            return self._values.read(args[0])
        in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001
        caller = sys._getframe(1)  # noqa: SLF001
        self._calls = (self._calls[1], (id(caller), caller.f_lasti)) if not func.is_view else self._calls
        steps = inside(func, args) if self.device_type == "cuda" and self._on_device(args) else (RESULTS,)
        out = self._values.run(func, args, kwargs)
        outputs = [each for each in tree_leaves(out) if is_tensor(each)]
        places = out if isinstance(out, list | tuple) else (out,)
        for each in outputs if func.is_view else ():
            self._views[each] = True
        self._play(steps, outputs, places, func, args, in_backward=in_backward)
        self._values.keep(outputs, func, args, kwargs)
        self._count(func, args, kwargs, out, outputs)
        if self.device_type == "cuda":
            self._take_workspaces(func, args, in_backward=in_backward)
        return out

    def _on_device(self, args: Any) -> bool:
        return any(each.device.type == self.device_type for each in tree_leaves(args) if is_tensor(each))

    def _play(
        self, steps: Steps, outputs: list[Tensor], places: Any, func: Any, args: Any, *, in_backward: bool
    ) -> list[int]:
        """What happens inside a kernel, in its order: its blocks are born and die, its results are born.

        Returns:
            The blocks that are still to die.
        """
        taken: list[int] = []
        kept: list[int] = []
        for step in steps:
            if isinstance(step, tuple):
                taken += self._play(step, outputs, places, func, args, in_backward=in_backward)
            elif isinstance(step, Block):
                number = self._born(0, SCRATCH + str(func), in_backward=in_backward, block=step)
                (kept if step.outlives else taken).append(number)
            else:
                held = step.size_bytes if isinstance(step, Held) else None
                place = step.place if isinstance(step, Held) else step
                for tensor in outputs if place == RESULTS else [places[place]]:
                    if is_tensor(tensor) and tensor.device.type == self.device_type:
                        self._see(tensor, func, args, in_backward=in_backward, held=held)
        self.trace.events += [-(number + 1) for number in taken]
        return kept

    def _take_workspaces(self, func: Any, args: Any, *, in_backward: bool) -> None:
        """The workspaces of this thread's library handles: the forward pass and autograd's thread have one each."""
        if not self._on_device(args):
            return
        for library, block in workspaces(func, args).items():
            if (library, in_backward) not in self._handles:
                self._handles.add((library, in_backward))
                self._born(0, SCRATCH + library, in_backward=in_backward, block=block)

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, outputs: list[Tensor]) -> None:
        """Adds an operator of the device to what the step computes and moves."""
        if not any(each.device.type == self.device_type for each in outputs):
            return
        self.trace.ops.add(str(func))
        work, formula = self.trace.work, flop_registry.get(func.overloadpacket)
        if formula is None and func.is_view:
            return
        inputs = [each for each in tree_leaves((args, kwargs)) if is_tensor(each)]
        moved = sum(each.numel() * each.element_size() for each in (*inputs, *outputs))
        if formula is None:
            work.other_bytes += moved
        else:
            arguments = _with_as_many_heads(args) if "attention" in str(func) else args
            work.flops += formula(*arguments, **kwargs, out_val=out)
            work.matmul_bytes += moved

    def _see(self, tensor: Tensor, func: Any, args: Any, *, in_backward: bool, held: int | None = None) -> None:
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            return
        key, size = storage._cdata, storage.nbytes()  # noqa: SLF001
        if key in self._live or size == 0:
            return
        number = self.number_of(args[0]) if func.is_view and args and is_tensor(args[0]) else None
        if number is None:
            number = self._born(held or size, str(func), in_backward=in_backward)
        self._storages[number] += 1
        finalizer = weakref.finalize(storage, self._died, key, number)
        finalizer.atexit = False
        self._live[key] = (number, finalizer)
        if args and is_tensor(args[0]) and self._is_made_in_place(func, args, in_backward=in_backward):
            self.trace.births[number].replaces = self.number_of(args[0])

    def _is_made_in_place(self, func: Any, args: Any, *, in_backward: bool) -> bool:
        """Whether torch would write a result over its first argument if tensors were not fake.

        A sum of gradients in `InputBuffer::accumulate` of input_buffer.cpp, which takes the first where it is dense and
        no view, whose base would live on with it, and what FunctionsManual.cpp does where `areAnyTensorSubclassLike`
        is false.
        """
        summing = in_backward and not torch.is_grad_enabled()  # which it is where a checkpoint computes again
        if func is aten.add.Tensor and isinstance(args[1], Tensor):
            if summing:
                return args[0] not in self._views and _is_dense(args[0]) and args[0].shape == args[1].shape
            product = self.number_of(args[0])
            if product is None or self._calls[0] != self._calls[1]:
                return False
            return self.trace.births[product].op in _PRODUCTS
        if not summing:
            return False
        node: Any = torch._C._current_autograd_node()  # noqa: SLF001
        return func in _FILLS_ZEROS or func in _IN_PLACE_IN.get(type(node).__name__, ())

    def _born(self, size: int, op: str, *, in_backward: bool, block: Block | None = None) -> int:
        module = self._modules[-1] if self._modules else None
        forward = self.moment.startswith("forward") and not in_backward
        path = "compute_loss" if forward else ""
        if module is not None:
            path = self._paths.get(id(module)) or type(module).__name__
        moment = self.moment.replace("forward", "backward") if in_backward else self.moment
        line = (place_outside_torch(sys._getframe()) if forward else None) or ""  # noqa: SLF001
        self.trace.births.append(Birth(size, op, path, line, moment, block=block))
        self.trace.events.append(len(self.trace.births))
        return len(self.trace.births) - 1

    def _died(self, key: int, number: int) -> None:
        self._live.pop(key, None)
        self._storages[number] -= 1
        if not self._storages[number]:
            self.trace.events.append(-(number + 1))


def _with_as_many_heads(args: Any) -> Any:
    """The shapes of grouped-query attention with as many keys and values as queries, as formulas of flops take them."""
    heads = max((each.shape[1] for each in args if is_tensor(each) and each.dim() == _ATTENTION), default=0)
    return [
        torch.Size((each.shape[0], heads, *each.shape[2:])) if is_tensor(each) and each.dim() == _ATTENTION else each
        for each in args
    ]


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, each once, in any order of its dimensions."""
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != filled:
            return False
        filled *= size
    return True
