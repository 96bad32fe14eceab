"""State that is left as it was: random numbers, what a step of the user's trains; modules of fakes, what is written."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any, Protocol, runtime_checkable
from unittest import mock

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from batchtune.errors import DeviceError, UsageError, kind_of


def seed_everything(seed: int) -> None:
    """Seeds Python's and torch's random numbers, and NumPy's where it is there."""
    seed_the_cpu(seed)
    torch.manual_seed(seed)


def without_gradients(step: Callable[[int], object]) -> Callable[[int], object]:
    """A step of the user's own under `torch.inference_mode`."""
    return torch.inference_mode()(step)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The block draws what follows from the seed on the CPU; afterwards it is as if it had drawn nothing."""
    with kept_random_numbers("cpu"):
        seed_the_cpu(seed)
        yield


def seed_the_cpu(seed: int) -> None:
    """As `seed_everything`, without the random numbers of other devices."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy as np

        np.random.seed(seed % 2**32)  # noqa: NPY002 - the user's code may draw from the global generator


def random_numbers() -> Callable[[], None]:
    """What brings the random numbers of the CPU back to where they are now: torch's, Python's and NumPy's."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None, torch.default_generator.get_state()

    def restore() -> None:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
        torch.default_generator.set_state(states[2])

    return restore


@contextlib.contextmanager
def kept_random_numbers(device: torch.device | str) -> Iterator[None]:
    """Leaves the random numbers of torch, Python and NumPy as if the block had drawn none."""
    device = torch.device(device)
    with contextlib.ExitStack() as kept:
        kept.callback(random_numbers())
        if device.type != "cpu":
            kept.enter_context(torch.random.fork_rng(devices=[device], device_type=device.type))
        yield


_KINDS = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_DEEPEST = 3  # functions that a step calls, containers in what they use
_LARGEST = 64  # container that is looked into


@runtime_checkable
class Stateful(Protocol):
    """What gives its state away and takes it back."""

    def state_dict(self) -> object: ...

    def load_state_dict(self, state_dict: Any, /) -> object: ...


def trained_by(step: Callable[..., object]) -> list[Stateful]:
    """The models, optimizers, schedules and scalers that a function uses: by its closure, its globals, its object."""
    found: dict[int, Stateful] = {}
    seen: set[int] = set()

    def look(value: object, depth: int) -> None:
        if id(value) in seen or depth > _DEEPEST:
            return
        seen.add(id(value))
        is_wrapper = type(value).__module__ == "accelerate.scheduler"
        if (isinstance(value, _KINDS) or is_wrapper) and isinstance(value, Stateful):
            found[id(value)] = value
            return
        for each in _inside(value, is_step=depth == 0):
            look(each, depth + 1)

    look(step, 0)
    return list(found.values())


def _inside(value: object, *, is_step: bool) -> Iterable[object]:
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if inspect.ismethod(value):
        return [value.__func__, *vars(value.__self__).values()] if hasattr(value.__self__, "__dict__") else []
    if inspect.isfunction(value):
        return _used(value)
    if isinstance(value, Mapping) and len(value) <= _LARGEST:
        return value.values()
    if isinstance(value, list | tuple) and len(value) <= _LARGEST:
        return value
    return vars(value).values() if is_step and hasattr(value, "__dict__") else []


def _used(function: FunctionType) -> list[object]:
    """What a function closes over, and the globals that it names."""
    used = [function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # nothing is in it yet
            used.append(cell.cell_contents)
    return used


def named(restore: Any) -> list[Stateful]:
    """What the user names as to be restored; raises UsageError where it has no state to be taken and given back."""
    objects: list[Stateful] = list(restore) if isinstance(restore, Sequence) else [] if restore is None else [restore]
    for each in objects:
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise UsageError(
                f"restore: {kind_of(each)} has no state_dict(); name models and optimizers: restore=(model, optimizer)"
            )
    return objects


class KeptState(contextlib.AbstractContextManager["KeptState"]):
    """Gives what is trained within its block the state back that it had before, from a copy in the host's memory.

    Of an optimizer its parameters, too, and what an optimizer holds that it steps by, as SAM and Lookahead do.
    """

    def __init__(self, objects: Sequence[Stateful]) -> None:
        objects = _with_held(objects)
        modules = [module for each in objects if isinstance(each, nn.Module) for module in each.modules()]
        self._modes = [(module, module.training) for module in modules]
        own = {id(each): each for module in modules for each in module.parameters(recurse=False)}
        optimizers = [each for each in objects if isinstance(each, torch.optim.Optimizer)]
        held = {id(each): each for one in optimizers for group in one.param_groups for each in group["params"]}
        self._loose = [(each, _on_host(each)) for key, each in held.items() if key not in own]
        self._gradients = [(each, _on_host(each.grad)) for each in (own | held).values()]
        self._shared = [(each, (getattr(each, "state", {}), each.param_groups)) for each in optimizers]
        self._states = [(each, io.BytesIO()) for each in objects]
        for each, file in self._states:
            torch.save(each.state_dict(), file)

    def __exit__(self, _: object, ended_by: BaseException | None, *__: object) -> None:
        if isinstance(ended_by, DeviceError):  # nothing can be copied to a device on which this process has no hold
            return
        for module, is_training in self._modes:
            module.training = is_training
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        with torch.no_grad():
            for parameter, value in self._loose:
                parameter.copy_(value)
        loads = [(each, functools.partial(_load, each, file)) for each, file in self._states]
        puts = [(each, functools.partial(_put_into, each, *both)) for each, both in self._shared]
        for each, give_back in loads + puts:
            try:
                give_back()
            except Exception as error:  # noqa: BLE001 - of the user's own class; the answer stands
                text = f"{type(each).__name__} did not take its first state back: {error}"
                warnings.warn(f"find_batch_size: {text}", stacklevel=4)


def _with_held(objects: Sequence[Stateful]) -> list[Stateful]:
    """The same and, after each optimizer, those in its attributes, or containers there, with a state of their own."""
    found: list[Stateful] = []
    waiting = list(reversed(objects))
    while waiting:
        each = waiting.pop()
        if any(each is other for other in found):
            continue
        found.append(each)
        if isinstance(each, torch.optim.Optimizer):
            within = [one for value in vars(each).values() for one in (value, *_elements(value))]
            held = [one for one in within if isinstance(one, torch.optim.Optimizer)]
            waiting += [one for one in held if getattr(one, "state", one) is not getattr(each, "state", each)]
    return found


def _elements(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()


def _load(each: Stateful, file: io.BytesIO) -> None:
    file.seek(0)
    each.load_state_dict(torch.load(file, map_location="cpu", weights_only=False))


def _put_into(optimizer: torch.optim.Optimizer, state: dict[Tensor, object], groups: list[dict[str, object]]) -> None:
    """Gives an optimizer its dicts back with what was loaded, which makes new ones: others may look at the same."""
    if getattr(optimizer, "state", state) is not state and _can_set(optimizer, "state"):
        loaded = dict(optimizer.state)
        state.clear()
        state.update(loaded)
        optimizer.state = state  # type: ignore[assignment]  # a defaultdict
    if optimizer.param_groups is not groups and _can_set(optimizer, "param_groups"):
        for group, new in zip(groups, optimizer.param_groups, strict=False):
            group.update(new)
        optimizer.param_groups = groups


def _can_set(optimizer: torch.optim.Optimizer, name: str) -> bool:
    """Whether it is no property without a setter, as of a wrapper, which tells of another optimizer's."""
    return getattr(getattr(type(optimizer), name, None), "fset", name) is not None


def _on_host(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to("cpu", copy=True)


def modules_of_fakes() -> AbstractContextManager[object]:
    """Within, `module.to(...)`, `.half()` and their like work on modules of fake tensors."""
    return mock.patch.object(nn.Module, "_apply", apply_to_fakes)


_OURS = ("torch", "batchtune")  # whose `_apply` is replaced by the following, or needs no more


def apply_to_fakes(
    module: nn.Module,
    convert: Callable[[Tensor], Tensor],
    recurse: bool = True,
    converted: dict[int, tuple[nn.Parameter, nn.Parameter]] | None = None,
) -> nn.Module:
    """`nn.Module._apply`, which cannot swap fake tensors in place, by new parameters; tied ones stay tied.

    Where a library's modules have one of their own, as metrics have for their states, that calls this one in turn.
    """
    converted = {} if converted is None else converted
    for child in module.children() if recurse else ():
        if type(child)._apply.__module__.partition(".")[0] in _OURS:  # noqa: SLF001
            apply_to_fakes(child, convert, converted=converted)
        else:
            child._apply(convert)  # noqa: SLF001
    for name, parameter in module._parameters.items():  # noqa: SLF001
        if parameter is None:
            continue
        if id(parameter) not in converted:
            with torch.no_grad():
                moved = convert(parameter)
            same = moved is parameter
            converted[id(parameter)] = (parameter, parameter if same else _as_parameter(moved, parameter))
        module._parameters[name] = converted[id(parameter)][1]  # noqa: SLF001
    for name, buffer in module._buffers.items():  # noqa: SLF001
        if buffer is not None:
            module._buffers[name] = convert(buffer)  # noqa: SLF001
    return module


def _as_parameter(moved: Tensor, original: nn.Parameter) -> nn.Parameter:
    parameter = nn.Parameter(moved, original.requires_grad)
    for name, value in vars(original).items():  # marks such as `no_weight_decay` that build_optimizer reads
        if not hasattr(parameter, name):
            setattr(parameter, name, value)
    return parameter


def makes_room_only(func: OpOverload) -> bool:
    """Whether an operator makes memory and writes nothing to it."""
    return func.overloadpacket.__name__ in _EMPTY


def written_to(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> list[Tensor]:
    """The tensors that an operator writes to in place, by its schema."""
    arguments = func._schema.arguments  # noqa: SLF001
    named = dict(zip((each.name for each in arguments), args, strict=False)) | dict(kwargs)
    places = [named.get(each.name) for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    return [each for each in tree_leaves(places) if isinstance(each, Tensor)]
