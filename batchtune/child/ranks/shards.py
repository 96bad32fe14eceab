"""Whose the samples of the training set are: the ranks take them in turn, as `DistributedSampler` has it.

Ranks together see the batches that one device would see with the same seed; what is left of an epoch for less than a
whole round is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch.utils.data import DistributedSampler, IterableDataset, Sampler

from batchtune.child.ranks._base import Ranks
from batchtune.task.state import seeded

T = TypeVar("T")


class Shard(Sampler[int]):
    """This rank's places in each epoch of an order that all ranks draw alike.

    Args:
        order: of the whole set, anew in each epoch; what it draws from the global random numbers follows from the seed.
        seed: the same on all ranks.
        ranks: those that share the set.
    """

    def __init__(self, order: Sampler[int], seed: int, ranks: Ranks) -> None:
        self._order, self._seed, self._ranks, self._epoch = order, seed, ranks, 0

    def __len__(self) -> int:
        sized: Any = self._order
        return len(sized) // self._ranks.world_size

    def __iter__(self) -> Iterator[int]:
        with seeded(self._seed + self._epoch):
            places = list(self._order)
        self._epoch += 1
        count = self._ranks.world_size
        return iter(places[self._ranks.rank : len(places) // count * count : count])


class StreamShard(IterableDataset[Any]):
    """This rank's samples of a stream, which every rank reads."""

    def __init__(self, stream: Iterable[Any], ranks: Ranks) -> None:
        self._stream, self._ranks = stream, ranks

    def __iter__(self) -> Iterator[Any]:
        return every_nth(self._stream, self._ranks)


def every_nth(found: Iterable[T], ranks: Ranks) -> Iterator[T]:
    """This rank's part of each whole round."""
    left = iter(found)
    while len(of_all := list(itertools.islice(left, ranks.world_size))) == ranks.world_size:
        yield of_all[ranks.rank]


def own_batches(loader: Iterable[T], seed: int, ranks: Ranks) -> Iterator[T]:
    """This rank's batches of an epoch of the user's own loader, which may share the set among ranks by itself."""
    if ranks.world_size == 1 or isinstance(getattr(loader, "sampler", None), DistributedSampler):
        return iter(loader)
    with seeded(seed):  # a loader that shuffles draws its order when the first batch is asked for
        batches = iter(loader)
        first = list(itertools.islice(batches, 1))
    return every_nth(itertools.chain(first, batches), ranks)
