"""Those that train together, as one of them sees them; a process that trains alone is a group of one.

They take the samples of the training set in turn, as `DistributedSampler` has it: ranks together see the batches that
one device would see with the same seed; what is left of an epoch for less than a whole round is left out.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler, IterableDataset, Sampler

from batchtune.task.samples import digest
from batchtune.task.state import seeded

_FIRST = 2  # batches, of so many samples, by which the parts of ranks are told from each other
T = TypeVar("T")
How = Literal["sum", "max", "min", "first"]


class RankLoss(Protocol):
    """The user's loss of one micro-batch; with `synchronize`, its backward pass leaves the ranks' mean gradient."""

    def __call__(self, batch: object, *, synchronize: bool) -> Tensor: ...


class Ranks:
    """Those that train together, as one of them sees them; every rank calls each of these methods.

    Here it is a process that trains alone: all there is to agree on is its own.

    Attributes:
        rank: its number, from 0.
        world_size: how many they are.
    """

    rank, world_size = 0, 1

    def agree(self, go_on: bool) -> bool:
        """Whether every rank says so."""
        return go_on

    def together(self, how: How, value: float) -> float:  # noqa: ARG002 - of one value all are the same
        """The sum, the largest or the smallest of the ranks' values, or the first rank's; NaN where a sum has one."""
        return value

    def each(self, value: float) -> list[float]:
        """The values of all ranks, in their order."""
        return [value]

    def align(self, model: nn.Module) -> None:
        """Gives every rank the first one's running statistics, such as those of batch norm, as saving would."""

    def squared_norm(self, gradients: Iterable[Tensor]) -> float:
        """Of the mean gradient, which a backward pass has left on all ranks, each a shard of it or all."""
        return sum_of_squares(gradients)

    def squared_norms_apart(self, gradients: Iterable[Tensor]) -> tuple[float, float]:
        """The mean over ranks of their own gradients' squared norms, and that of the mean, which replaces them."""
        both = sum_of_squares(gradients)
        return both, both

    def place(self, build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
        """The model, or this rank's shard of it, on the device."""
        return build().to(device)

    def sketch(self, build: Callable[[], nn.Module]) -> nn.Module:
        """The model as an optimizer is to see it: without its values where no rank is to hold them all."""
        return build()

    def holds_whole(self, model: nn.Module, limit_bytes: int | None) -> bool:  # noqa: ARG002 - it does so anyway
        """Whether a rank may hold all weights with their gradients, as each does unless they are sharded."""
        return True

    def loss_of(self, model: nn.Module, loss: Callable[[nn.Module, object], Tensor]) -> RankLoss:
        """The loss of a placed model."""
        return lambda batch, *, synchronize: loss(model, batch)  # noqa: ARG005 - there is nobody to synchronize with


ALONE = Ranks()


def sum_of_squares(gradients: Iterable[Tensor]) -> float:
    """Of all elements; 0 where there are none."""
    norms = [gradient.float().norm() for gradient in gradients]
    return float(torch.stack(norms).square().sum()) if norms else 0.0


class Shard(Sampler[int]):
    """This rank's places in each epoch of an order that all ranks draw alike.

    Args:
        order: of the whole set, anew in each epoch; what it draws from the global random numbers follows from the seed.
        seed: the same on all ranks.
        ranks: those that share the set.
    """

    def __init__(self, order: Sampler[int], seed: int, ranks: Ranks) -> None:
        self._order, self._seed, self._ranks, self._epoch = order, seed, ranks, 0

    def set_epoch(self, number: int) -> None:
        """Tells the order, where that wants to know."""
        _tell(self._order, number)

    def __len__(self) -> int:
        return len(cast("Sized", self._order)) // self._ranks.world_size

    def __iter__(self) -> Iterator[int]:
        with seeded(self._seed + self._epoch):
            places = list(self._order)
        self._epoch += 1
        count = self._ranks.world_size
        return iter(places[self._ranks.rank : len(places) // count * count : count])


class StreamShard(IterableDataset[object]):
    """This rank's samples of a stream, which every rank reads."""

    def __init__(self, stream: Iterable[object], ranks: Ranks) -> None:
        self._stream, self._ranks = stream, ranks

    def set_epoch(self, number: int) -> None:
        """Tells the stream, where that wants to know."""
        _tell(self._stream, number)

    def __iter__(self) -> Iterator[object]:
        return every_nth(self._stream, self._ranks)


def every_nth(found: Iterable[T], ranks: Ranks) -> Iterator[T]:
    """This rank's part of each whole round."""
    left = iter(found)
    while len(of_all := list(itertools.islice(left, ranks.world_size))) == ranks.world_size:
        yield of_all[ranks.rank]


def own_batches(loader: Iterable[T], seed: int, ranks: Ranks) -> Iterator[T]:
    """This rank's batches of an epoch of the user's own loader, which may share the set among ranks by itself."""
    if ranks.world_size == 1 or deals_out(loader):
        return iter(loader)
    with seeded(seed):  # a loader that shuffles draws its order when the first batch is asked for
        batches = iter(loader)
        first = list(itertools.islice(batches, 1))
    return every_nth(itertools.chain(first, batches), ranks)


def shared_by_user(loader_of: Callable[[int], Iterable[object]], ranks: Ranks) -> bool:
    """Whether the user's code gives each rank a part of a stream of its own.

    Then ranks read unlike samples first, though all draw alike. What one rank does not read twice alike says nothing.
    Sets of samples by number are whole: their order is dealt out by a sampler, which can be asked.

    Args:
        loader_of: makes batches of so many samples.
        ranks: those that train together.
    """

    def first() -> float:
        with contextlib.suppress(Exception), seeded(0):  # of a loader that takes no small batches: that is told later
            loader = loader_of(_FIRST)
            tell_epoch(loader, 0)
            is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset | None)
            return digest(list(itertools.islice(loader, _FIRST))) if is_stream else math.nan
        return math.nan

    own = ranks.each(first())
    return len(set(own)) == len(own) and own == ranks.each(first())


def deals_out(loader: object) -> bool:
    """Whether a loader's order is that of one rank's own part, as torch makes it."""
    return any(isinstance(each, DistributedSampler) for each in _samplers(loader))


def tell_epoch(loader: object, number: int) -> None:
    """Calls `set_epoch` of a loader or what it is made of, as a loop over epochs does: by it orders are drawn anew."""
    parts = {id(each): each for each in (loader, getattr(loader, "dataset", None), *_samplers(loader))}
    for each in parts.values():
        _tell(each, number)


def _tell(each: object, number: int) -> None:
    if callable(tell := getattr(each, "set_epoch", None)):
        tell(number)


def _samplers(loader: object) -> tuple[object, ...]:
    batches = getattr(loader, "batch_sampler", None)
    return getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)
