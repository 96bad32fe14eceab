"""A model that is built without its weights, and gets each when it is sharded: no process ever holds them all.

What `build_model` does to tensors is recorded on fake ones, which have shapes and no data. What a weight comes to is
calculated from that when it is asked for, with the random numbers that were drawn for it: the same values, bit by bit,
that building it as usual comes to.
"""

from __future__ import annotations

import gc
import math
import mmap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from batchtune.errors import UserCodeError
from batchtune.task.state import makes_room_only, modules_of_fakes, random_numbers, written_to

Fill: TypeAlias = Callable[[nn.Module], None]
"""Gives a module, and what is in it, its weights, buffers and other tensors."""
_FILLS = {f"{name}_" for name in ("uniform", "normal", "random", "exponential", "log_normal", "cauchy", "geometric")}
_DRAWS = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", *_FILLS, "bernoulli_"}
_OVERWRITES = {"zero_", "fill_", "copy_", "bernoulli_", *_FILLS}
_NO_TENSORS = (torch.NumberType, torch.BoolType, torch.IntType, torch.FloatType)
_LARGE_BYTES = 2**18
_OF_MODULES = set(vars(nn.Module()))


class _CannotDeferError(Exception):
    """What was done to a tensor cannot be done again later, or somebody else counts on its value now."""


def build_deferred(build: Callable[[], nn.Module]) -> tuple[nn.Module, Fill]:
    """The model with fake tensors on the CPU, and what fills a module of it; or as usual, with nothing to fill.

    As usual where the code reads values, loads them from files in a way that cannot be watched, draws random numbers by
    what it has drawn before, or keeps tensors elsewhere than in the model.
    """
    restore = random_numbers()
    try:
        recording = _Recording()
        model = recording.of(build)
    except Exception:  # noqa: BLE001 - what is wrong with the code shows when it is run as usual
        restore()
        model = build()
        if any(isinstance(each, FakeTensor) for each in (*model.parameters(), *model.buffers())):
            raise UserCodeError(
                "build_model keeps tensors from one call to the next, in a cache or a global, which cannot be with "
                "strategy fsdp; make them anew in each call"
            ) from None
        return model, lambda _: None
    return model, recording.fill


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies: in which storage, and how."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class _Step:
    """An operator that was called, with places for fake tensors; `state` is that of the random numbers before."""

    func: OpOverload
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    made: Mapping[int, tuple[int, _Place]] = field(default_factory=dict)  # by storage: which of the results it is
    overwrites: int | None = None  # the storage that it fills, whatever was in it
    state: Tensor | None = None

    @property
    def generator(self) -> torch.Generator:
        given = self.kwargs.get("generator")
        return given if isinstance(given, torch.Generator) else torch.default_generator

    def run(self, real: Callable[[_Place], Tensor]) -> list[Tensor]:
        args, kwargs = tree_map_only(_Place, real, (self.args, self.kwargs))
        if self.state is None:
            return tree_leaves(self.func(*args, **kwargs))
        now = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            return tree_leaves(self.func(*args, **kwargs))
        finally:
            self.generator.set_state(now)


class _Recording(TorchDispatchMode):
    """What was done to fake tensors, storage by storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._steps: list[_Step] = []
        self._writers: dict[int, list[int]] = {}  # numbers of steps, by the storage that they write to
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept, so that no two have the same number
        self._stand_ins: list[Tensor] = []
        self._kept: dict[int, tuple[_Place, Mapping[str, object]]] = {}  # of the model's tensors, by their id
        self._real: dict[int, Tensor] = {}  # buffers that have their values

    def of(self, build: Callable[[], nn.Module]) -> nn.Module:
        """The model that this makes; its parameters and buffers are fake ones that nobody else can have kept."""
        with warnings.catch_warnings(), modules_of_fakes(), self._fake, self:
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # as copy.deepcopy does
            model = build()
        stand_ins: dict[int, Tensor] = {}
        _replace(model, lambda tensor: self._stand_in(tensor, stand_ins))
        self._stand_ins = list(stand_ins.values())
        if self._are_others_alive():
            gc.collect()
            if self._are_others_alive():
                raise _CannotDeferError
        return model

    def _are_others_alive(self) -> bool:
        """Whether anybody keeps one of the fake tensors, other than the model."""
        fake = (each for each in gc.get_objects() if type(each) is FakeTensor and each.fake_mode is self._fake)
        return any(id(each) not in self._kept for each in fake)

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Gives a module, and what is in it, its values."""
        parameters: dict[int, Tensor] = {}  # which go when they are sharded

        def real(tensor: Tensor) -> Tensor:
            if id(tensor) not in self._kept:
                return tensor
            place, about = self._kept[id(tensor)]
            known = parameters if isinstance(tensor, nn.Parameter) else self._real
            if id(tensor) not in known:
                known[id(tensor)] = _like(tensor, place.of(self._contents(place.storage, len(self._steps), {})), about)
            return known[id(tensor)]

        _replace(module, real)

    def _stand_in(self, tensor: Tensor, known: dict[int, Tensor]) -> Tensor:
        """A new fake tensor for one of the model's, by which its place is known; a real one remains."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in known:
            place = self._place(tensor)
            if place.storage not in self._writers:
                raise _CannotDeferError  # made behind our back, as torch.load does
            with self._fake:
                new: Tensor = torch.empty_strided(place.size, place.stride, dtype=place.dtype)
            about = {name: each for name, each in vars(tensor).items() if name not in {*vars(new), "_is_param"}}
            known[id(tensor)] = new = _like(tensor, new, about)
            self._kept[id(new)] = place, about
        return known[id(tensor)]

    def _place(self, tensor: Tensor) -> _Place:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            raise _CannotDeferError
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage  # noqa: SLF001
        size, stride = tuple(tensor.size()), tensor.stride()
        return _Place(storage._cdata, size, stride, int(tensor.storage_offset()), tensor.dtype)  # noqa: SLF001

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        del types
        kwargs = kwargs or {}
        state = self._draw(func, args, kwargs) if torch.Tag.nondeterministic_seeded in func.tags else None
        places, named = tree_map_only(FakeTensor, self._place, (tuple(args), kwargs))
        if all(isinstance(each.type, _NO_TENSORS) for each in func._schema.returns):  # noqa: SLF001
            with _disable_current_modes():  # a value is read
                return _Step(func, places, named).run(self._now)[0]
        found = func(*args, **kwargs)
        written = written_to(func, args, kwargs)
        if len(written) > 1 or not all(isinstance(each, FakeTensor) for each in written):
            raise _CannotDeferError
        into = [self._place(each) for each in written]
        given = {each.storage for each in tree_leaves((places, named)) if isinstance(each, _Place)}
        results = [each if isinstance(each, Tensor) else None for each in tree_leaves(found)]
        made = {
            place.storage: (number, place)
            for number, each in enumerate(results)
            if each is not None and (place := self._place(each)).storage not in given
        }
        whole = [each.storage for each in into if func.overloadpacket.__name__ in _OVERWRITES and self._is_whole(each)]
        for storage in {*made, *(each.storage for each in into)}:
            self._writers.setdefault(storage, []).append(len(self._steps))
        if made or into:
            self._steps.append(_Step(func, places, named, made, whole[0] if whole else None, state))
        return found

    def _draw(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> Tensor:
        """Draws the random numbers that this would, so that what comes next is as usual; returns the state before."""
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if func.overloadpacket.__name__ not in _DRAWS or len(tensors) > 1:
            raise _CannotDeferError  # what is drawn depends on values
        with _disable_current_modes():
            places, named = tree_map_only(FakeTensor, self._place, (tuple(args), kwargs))
            step = _Step(func, places, named)
            state = step.generator.get_state()
            step.run(lambda place: place.of(_room(self._storages[place.storage].nbytes())))
        return state

    def _is_whole(self, place: _Place) -> bool:
        return math.prod(place.size) * place.dtype.itemsize == self._storages[place.storage].nbytes()

    def _now(self, place: _Place) -> Tensor:
        return place.of(self._contents(place.storage, len(self._steps), {}))

    def _contents(
        self, storage: int, before: int, known: dict[tuple[int, int], torch.UntypedStorage]
    ) -> torch.UntypedStorage:
        """What is in a storage before a step, by the steps that wrote to it; `known` is what other steps asked for."""
        numbers = [number for number in self._writers.get(storage, ()) if number < before]
        if not numbers:
            raise _CannotDeferError
        if (key := (storage, numbers[-1])) in known:
            return known[key]
        first = max((number for number in numbers if self._steps[number].overwrites == storage), default=numbers[0])
        contents = _room(self._storages[storage].nbytes())
        for number in numbers[numbers.index(first) :]:
            step = self._steps[number]
            if makes_room_only(step.func):
                continue

            def real(place: _Place, number: int = number) -> Tensor:
                return place.of(contents if place.storage == storage else self._contents(place.storage, number, known))

            found = step.run(real)
            if storage in step.made:
                which, place = step.made[storage]
                place.of(contents).copy_(found[which])
        known[key] = contents
        return contents


def _room(size_bytes: int) -> torch.UntypedStorage:
    """Memory that goes back to the system when it is not used any more: the allocator would keep most of it."""
    if size_bytes < _LARGE_BYTES:
        return torch.UntypedStorage(size_bytes)
    return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8).untyped_storage()


def _replace(model: nn.Module, by: Callable[[Tensor], Tensor]) -> None:
    """Puts something in the place of each tensor of a model: parameters, buffers, and those in plain attributes."""
    for module in model.modules():
        for own in (module._parameters, module._buffers):  # noqa: SLF001
            own |= {name: None if each is None else by(each) for name, each in own.items()}
        for name, each in vars(module).items():
            if name not in _OF_MODULES and any(isinstance(leaf, Tensor) for leaf in tree_leaves(each)):
                vars(module)[name] = tree_map_only(Tensor, by, each)


def _like(tensor: Tensor, new: Tensor, about: Mapping[str, object]) -> Tensor:
    """The new one as a parameter where this is one, and with the attributes that it was given."""
    found = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    vars(found).update(about)
    return found
