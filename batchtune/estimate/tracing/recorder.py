"""A dispatch mode that sees every operator of a training step and writes down what it allocates and when that dies."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from batchtune.estimate.memory.events import RESULTS, SCRATCH, Arguments, Birth, Block, Held, Steps, Trace, Work
from batchtune.estimate.memory.recurrent import FLOPS
from batchtune.estimate.memory.scratch import inside, workspaces
from batchtune.estimate.tracing.without_data import Values, place_outside_torch

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_PRODUCTS = {str(aten.mm.default), str(aten.bmm.default)}
_FILLS_ZEROS = {aten.index_put.default, aten.index_add.default, aten.scatter.src, aten.scatter_add.default}
_IN_PLACE_IN = {"BinaryCrossEntropyWithLogitsBackward0": (aten.sub.Tensor, aten.mul.Tensor, aten.add.Tensor)}
_ATTENTION = 4  # dimensions: batch, heads, length, head size


class _Call(NamedTuple):
    """An operator that is called."""

    func: OpOverload
    args: Arguments
    in_backward: bool


class _Modules:
    """Which module's forward runs."""

    def __init__(self) -> None:
        self._inside: list[nn.Module] = []
        self._paths: dict[int, str] = {}

    @contextlib.contextmanager
    def followed(self, model: nn.Module) -> Iterator[None]:
        """Follows the modules of a model, which are called by their paths in it; a number's class is told, too."""
        self._paths = {
            id(module): f"{path} ({type(module).__name__})" if path.rpartition(".")[2].isdigit() else path
            for path, module in model.named_modules()
        }
        hooks = nn.modules.module
        entering = hooks.register_module_forward_pre_hook(lambda module, _: self._inside.append(module))
        leaving = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            entering.remove()
            leaving.remove()

    def _leave(self, module: nn.Module, *_: object) -> None:
        if module in self._inside:  # an exception may have skipped the inner ones
            while self._inside.pop() is not module:
                pass

    def path(self) -> str:
        """The innermost module's path, or the name of its class where the model does not have it; '' outside."""
        return (self._paths.get(id(self._inside[-1])) or type(self._inside[-1]).__name__) if self._inside else ""


class Recorder(TorchDispatchMode):
    """Records storages on one type of device; to be entered inside a `FakeTensorMode`.

    Attributes:
        trace: what is recorded.
        device_type: cuda, or cpu.
        moment: of the step; see `Birth`.
        values: those that are known.
    """

    def __init__(self, trace: Trace, device_type: str = "cuda") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace, self.device_type = trace, device_type
        self.moment = "build"
        self._live: dict[int, tuple[int, weakref.finalize[[int, int], torch.UntypedStorage]]] = {}
        self.values = Values(trace.notes, device_type)
        self._views: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._handles: set[tuple[str, bool]] = set()  # by library, and whether autograd's thread has it
        self._calls: tuple[object, object] = (None, None)  # where in Python the last two operators were called
        self._modules = _Modules()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled while this records, so dispatch need not be guarded against it, call by call."""
        return False

    def number_of(self, tensor: Tensor) -> int | None:
        """The number of a tensor's storage in the trace, of a sparse one's values; None for one that is not there."""
        storage = _storage_of(_parts_of(tensor)[-1])
        found = None if storage is None else self._live.get(storage._cdata)  # noqa: SLF001
        return None if found is None else found[0]

    def holds(self, value: object) -> None:
        """Counts what was made before recording began and lives through all of it, such as a batch on the CPU."""
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor) and tensor.device.type == self.device_type:
                self._see(tensor, _Call(aten.empty.memory_format, (), in_backward=False))

    def live(self) -> set[int]:
        """Numbers of the storages that are alive now."""
        return {number for number, _ in self._live.values()}

    def naming(self, model: nn.Module) -> AbstractContextManager[None]:
        """Notes for each storage in which module's forward it was born."""
        return self._modules.followed(model)

    def forget(self) -> None:
        """Stops recording deaths: what is freed from now on belongs to no step."""
        for _, finalizer in self._live.values():
            finalizer.detach()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Arguments = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is _DEVICE:
            return func(*args)  # most calls are of this one; it makes nothing
        if func is aten._local_scalar_dense.default:  # noqa: SLF001
            return self.values.read(args[0])
        if func is aten.split.Tensor and args[1] > (length := args[0].shape[(*args, 0)[2]]):
            self.trace.uncut.add((length, args[1]))
        call = _Call(func, args, torch._C._current_graph_task_id() != -1)  # noqa: SLF001
        caller = sys._getframe(1)  # noqa: SLF001
        self._calls = (self._calls[1], (id(caller), caller.f_lasti)) if not func.is_view else self._calls
        inputs = (each for each in tree_leaves(args) if isinstance(each, Tensor))
        on_cuda = self.device_type == "cuda" and any(each.device.type == "cuda" for each in inputs)
        steps = inside(func, args) if on_cuda else (RESULTS,)
        out = self.values.run(func, args, kwargs)
        outputs = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        places = out if isinstance(out, list | tuple) else (out,)
        for each in outputs if func.is_view else ():
            self._views[each] = True
        parts = [part for each in outputs for part in _parts_of(each)]
        self._play(steps, parts, places, call)
        self.values.keep(outputs, func, args, kwargs)
        if any(each.device.type == self.device_type for each in outputs):
            self.trace.ops |= {
                str(func),
                *(f"{each.layout} {func}" for each in outputs if each.layout is not torch.strided),
            }
            _count(self.trace.work, func, args, kwargs, out, outputs)
        if on_cuda:
            self._take_workspaces(call)
        return out

    def _play(self, steps: Steps, outputs: list[Tensor], places: Sequence[object], call: _Call) -> list[int]:
        """In a kernel's order its blocks are born and die, its results are born; returns the blocks still to die."""
        taken: list[int] = []
        kept: list[int] = []
        for step in steps:
            if isinstance(step, tuple):
                taken += self._play(step, outputs, places, call)
            elif isinstance(step, Block):
                number = self._born(0, SCRATCH + str(call.func), call, step)
                (kept if step.outlives else taken).append(number)
            else:
                held = step.size_bytes if isinstance(step, Held) else None
                place = step.place if isinstance(step, Held) else step
                for tensor in outputs if place == RESULTS else tree_leaves(places[place]):
                    if isinstance(tensor, Tensor) and tensor.device.type == self.device_type:
                        self._see(tensor, call, held)
        self.trace.events += [-(number + 1) for number in taken]
        return kept

    def _take_workspaces(self, call: _Call) -> None:
        """The workspaces of this thread's library handles: the forward pass and autograd's thread have one each."""
        for library, block in workspaces(call.func, call.args).items():
            if (library, call.in_backward) not in self._handles:
                self._handles.add((library, call.in_backward))
                self._born(0, SCRATCH + library, call, block)

    def _see(self, tensor: Tensor, call: _Call, held: int | None = None) -> None:
        args, storage = call.args, _storage_of(tensor)
        if storage is None or storage._cdata in self._live or not storage.nbytes():  # noqa: SLF001
            return
        key, size = storage._cdata, storage.nbytes()  # noqa: SLF001
        number = self._born(held or size, str(call.func), call)
        finalizer = weakref.finalize(storage, self._died, key, number)
        finalizer.atexit = False
        self._live[key] = (number, finalizer)
        if args and isinstance(args[0], Tensor) and self._is_made_in_place(call):
            self.trace.births[number].replaces = self.number_of(args[0])

    def _is_made_in_place(self, call: _Call) -> bool:
        """Whether torch would write a result over its first argument if tensors were not fake.

        A sum of gradients in `InputBuffer::accumulate` of input_buffer.cpp, which takes the first where it is dense and
        no view, whose base would live on with it, and what FunctionsManual.cpp does where `areAnyTensorSubclassLike`
        is false.
        """
        func, args = call.func, call.args
        summing = call.in_backward and not torch.is_grad_enabled()  # which it is where a checkpoint computes again
        if func is aten.add.Tensor and isinstance(args[1], Tensor):
            if summing:
                return args[0] not in self._views and _is_dense(args[0]) and args[0].shape == args[1].shape
            product = self.number_of(args[0])
            if product is None or self._calls[0] != self._calls[1]:
                return False
            return self.trace.births[product].op in _PRODUCTS
        if not summing:
            return False
        node = torch._C._current_autograd_node()  # noqa: SLF001
        return func in _FILLS_ZEROS or func in _IN_PLACE_IN.get(type(node).__name__, ())

    def _born(self, size: int, op: str, call: _Call, block: Block | None = None) -> int:
        forward = self.moment.startswith("forward") and not call.in_backward
        moment = self.moment.replace("forward", "backward") if call.in_backward else self.moment
        line = (place_outside_torch(sys._getframe()) if forward else None) or ""  # noqa: SLF001
        path = self._modules.path() or (("compute_loss" if line else "batch and loss") if forward else "")
        self.trace.births.append(Birth(size, op, path, line, moment, block=block))
        self.trace.events.append(len(self.trace.births))
        return len(self.trace.births) - 1

    def _died(self, key: int, number: int) -> None:
        self._live.pop(key, None)
        self.trace.events.append(-(number + 1))


def _parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that hold a tensor's memory: of a sparse one its indices and its values."""
    return (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else (tensor,)  # noqa: SLF001


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """None of sparse and other tensors without one storage."""
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, each once, in any order of its dimensions."""
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != filled:
            return False
        filled *= size
    return True


def _count(
    work: Work, func: OpOverload, args: Arguments, kwargs: Mapping[str, object], out: object, outputs: list[Tensor]
) -> None:
    """Adds an operator to what a step computes and moves."""
    formula = flop_registry.get(func.overloadpacket)
    if formula is None and func.is_view:
        return
    inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    moved = sum(each.numel() * each.element_size() for each in (*inputs, *outputs))
    if func in FLOPS:
        work.flops += FLOPS[func](args)
        work.matmul_bytes += moved
    elif formula is None:
        work.other_bytes += moved
    else:
        arguments = _with_as_many_heads(args) if "attention" in str(func) else args
        work.flops += formula(*arguments, **kwargs, out_val=out)
        work.matmul_bytes += moved


def _with_as_many_heads(args: Arguments) -> list[object]:
    """The shapes of grouped-query attention with as many keys and values as queries, as formulas of flops take them."""
    heads = max((each.shape[1] for each in args if isinstance(each, Tensor) and each.dim() == _ATTENTION), default=0)
    return [
        torch.Size((each.shape[0], heads, *each.shape[2:]))
        if isinstance(each, Tensor) and each.dim() == _ATTENTION
        else each
        for each in args
    ]
