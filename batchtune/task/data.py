"""The data of a task: its sets, its batches, and which of them is the worst for memory."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, cast

from torch.utils.data import Dataset, IterableDataset, Sampler, default_collate

from batchtune.errors import UserCodeError, kind_of
from batchtune.protocol.data import SamplesSeen
from batchtune.task.adapting import Adapted
from batchtune.task.own_loader import OwnLoader
from batchtune.task.samples import (
    LOOK_SECONDS,
    find_largest,
    in_random_order,
    longest_by_column,
    tensor_bytes,
)
from batchtune.task.state import kept_random_numbers, seed_the_cpu, seeded

_TIMED_SAMPLES = 20  # at most
_STRATA, _STRIDE = 18, 7  # of first batches, and how far apart those of two numbers in a row are
_MAKING_SECONDS = 15.0  # of a dozen loaders, which may read their data as they are made
_SEEDS = {"train_dataset": 0, "val_dataset": 1}


@dataclass(eq=False)
class TaskData:
    """The data behind the names of the contract.

    Attributes:
        source: the module or object that carries the names.
        where: how the user named it, for messages.
        parts: of a stream to train on, where the user's code gives each of so many ranks its own.
    """

    source: Any
    where: str
    parts: int = field(default=1, init=False)
    _worst_samples: list[object] = field(default_factory=list, init=False)
    _samples_seen: SamplesSeen | None = field(default=None, init=False)
    _differ: bool | None = field(default=None, init=False)

    def has(self, name: str) -> bool:
        """Whether the user's code carries this name."""
        return getattr(self.source, name, None) is not None

    @property
    def adapted(self) -> Adapted | None:
        """Another library's objects, where the task was made from such; None: it is plain PyTorch."""
        return self.source if isinstance(self.source, Adapted) else None

    @property
    def frees_between(self) -> bool:
        """Whether a step's gradients live through the next one's forward pass, as in Lightning's loop."""
        return bool(self.adapted and self.adapted.frees_between)

    @property
    def always_frees_late(self) -> bool:
        """Whether a step's gradients live into the next step whatever is asked, as they do with a train_step."""
        return self.frees_between or self.has("train_step")

    @cached_property
    def train_data(self) -> Dataset[object]:
        """The training set, built once."""
        return self._dataset("train_dataset")

    @cached_property
    def val_data(self) -> Dataset[object] | None:
        """The validation set, built once; None where the task has none."""
        return self._dataset("val_dataset") if self.has("val_dataset") else None

    def _dataset(self, name: str) -> Dataset[object]:
        with seeded(_SEEDS[name]):  # what is drawn at random is the same in every process, and not in both sets
            data = getattr(self.source, name)()
        if not isinstance(data, IterableDataset) and not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
            raise UserCodeError(
                f"{self.where}: {name} returned {kind_of(data)}, not a Dataset with __getitem__ and __len__"
            )
        if isinstance(data, Sized) and len(data) == 0:
            raise UserCodeError(f"{self.where}: {name} returned a data set of 0 samples")
        return cast("Dataset[object]", data)

    def loader(self, batch_size: int) -> Iterable[object]:
        """The batches of an epoch as the user makes them."""
        found = self.source.train_loader(batch_size)
        if not hasattr(found, "__iter__"):
            raise UserCodeError(f"{self.where}: train_loader returned {kind_of(found)}, not batches to go through")
        return cast("Iterable[object]", found)

    def samples_in(self, batch: object, batch_size: int) -> int:
        """Samples of a batch of about this size: as many as the user counts, where they do."""
        if not self.has("batch_size_of"):
            return batch_size
        found = self.source.batch_size_of(batch)
        if not isinstance(found, int) or found < 1:
            raise UserCodeError(f"{self.where}: batch_size_of returned {found!r}, not a number of samples from 1 up")
        return found

    def train_size(self) -> int | None:
        """Samples in the training set; None where there is no set or nobody has seen how many a stream has."""
        if not self.has("train_dataset"):
            return None
        if isinstance(self.train_data, Sized):
            return len(self.train_data)
        return self._samples_seen.seen * self.parts if self._samples_seen and self._samples_seen.is_all else None

    def rest_of_epoch(self, batch_size: int) -> int:
        """Samples of the smaller batch with which an adapted loader's epoch ends; 0 where it does not, or with one."""
        rest = (self.train_size() or 0) % batch_size if self.adapted is not None and self.adapted.keeps_rest else 0
        return rest if rest > 1 else 0

    def collate(self, samples: Sequence[object]) -> object:
        """A batch from samples, by the user's function or torch's."""
        return self.source.collate(list(samples)) if self.has("collate") else default_collate(list(samples))

    def sampler(self, batch_size: int) -> Sampler[int] | None:
        """The order of the training set where an adapted data loader has one of its own; None: shuffled."""
        return self.adapted.train_sampler(batch_size) if self.adapted else None

    def worst_batch(self, batch_size: int) -> object:
        """The batch that an attempt runs: the user's `make_batch`, or the largest samples of the training set.

        The largest of all is repeated; those that are larger in a dimension come once, so that padding meets them.
        """
        if self.has("make_batch"):
            return self.source.make_batch(batch_size)
        if self.has("train_loader"):
            return self._largest_batch(batch_size)
        self.find_worst_samples()
        return self._repeated(batch_size, self._worst_samples)

    def drawn_batches(self, batch_size: int, number: int) -> Iterator[object]:
        """Batches without end, as large as a loader's, whose largest sample is one of so many drawn at random.

        They are others for each number from 1 up. Beside the first of all the optimizer's states are put where the next
        ones might have their room, so that those of the numbers are spread evenly, and that of 1 is among the smallest.
        There are none where all batches take the same, as those of the user's own `make_batch` are taken to.
        """
        if self.has("train_loader") and self.batches_differ():
            while True:
                yield from self.loader(batch_size)
        dice, quantiles = random.Random(number), self._samples_seen.quantiles if self._samples_seen else ()
        at = ((number - 1) * _STRIDE % _STRATA + dice.random()) / _STRATA
        while quantiles and self.batches_differ():
            share, at = 1 - at ** (1 / batch_size), dice.random()
            place = [place for larger, place in quantiles if larger <= share][-1]
            with kept_random_numbers("cpu"):
                samples = [sample for _, sample in samples_at(self.train_data, (place,))]
            yield self._repeated(batch_size, samples)

    def loads_soon(self, batch_size: int) -> bool:
        """Whether a loader gives a batch of the training set in no more time than the set was looked at."""
        keeps = self._samples_seen is not None and self._samples_seen.kept_bytes  # of those it would take more and more
        if keeps or self.has("make_batch") or self.has("train_loader"):
            return False
        return batch_size * sample_seconds(self.train_data) <= LOOK_SECONDS

    def batches_differ(self) -> bool:
        """Whether some batches take less than others of as many samples; those of a loader, as far as was seen."""
        if self._differ is None and self._samples_seen and self._samples_seen.quantiles:
            places = [place for _, place in self._samples_seen.quantiles]
            with kept_random_numbers("cpu"):
                both = [sample for _, sample in samples_at(self.train_data, (places[0], places[-1]))]
            self._differ = len({tensor_bytes(self._repeated(2, [sample])) for sample in both}) > 1
        return bool(self._differ)

    def _repeated(self, batch_size: int, samples: Sequence[object]) -> object:
        """A batch of the largest sample, which is the first, and of each other one once."""
        largest, *others = samples
        others = others[: batch_size - 1]
        return self.collate([largest] * (batch_size - len(others)) + others)

    def _largest_batch(self, batch_size: int) -> object:
        """The largest of the first batches of an epoch, as many as there is time for."""
        count = partial(self.samples_in, batch_size=batch_size) if self.has("batch_size_of") else None
        loader = OwnLoader(self.loader, count, f"{self.where}: train_loader")
        with kept_random_numbers("cpu"):
            seed_the_cpu(0)
            found, differ = loader.largest_batch(batch_size, LOOK_SECONDS / 4)  # each attempt looks
        self._differ = self._differ or differ or None
        return found

    def most_in_epoch(self, below: int) -> int | None:
        """The largest batch of the user's own loader, where an epoch has less than one of `below` samples; else None.

        None, too, where the loader does not say how many batches it has. None of them is loaded.
        """
        with kept_random_numbers("cpu"):
            seed_the_cpu(0)
            return OwnLoader(self.loader, None, f"{self.where}: train_loader").samples_below(below, _MAKING_SECONDS)

    def find_worst_samples(self, known: SamplesSeen | None = None) -> SamplesSeen | None:
        """Looks for the samples of the worst batch, or takes those that another process has found.

        Returns what was seen; None where the user makes the batches.
        """
        if self.has("make_batch") or self.has("train_loader"):
            return None
        if self._worst_samples:
            return self._samples_seen
        longest = [] if known or is_stream(self.train_data) else longest_by_column(self.train_data)
        seconds, total = (math.inf, None) if known else (LOOK_SECONDS, self.train_size())
        with kept_random_numbers("cpu"):
            samples = samples_at(self.train_data, known.places if known else (), longest)
            seen, self._worst_samples = find_largest(samples, total, seconds=seconds)
        if not self._worst_samples:
            raise UserCodeError(f"{self.where}: train_dataset returned a data set of 0 samples")
        self._samples_seen = known or seen.model_copy(update={"is_all": seen.is_all or bool(longest)})
        return self._samples_seen


def is_stream(data: object) -> bool:
    """Whether samples of a set come one after the other only, or nobody knows how many there are."""
    return isinstance(data, IterableDataset) or not isinstance(data, Sized)


def sample_seconds(data: Dataset[object]) -> float:
    """The median of what some samples at random take to be loaded, those of a stream from its start on."""
    size = len(data) if isinstance(data, Sized) and not is_stream(data) else None
    samples = (
        iter(cast("IterableDataset[object]", data)) if size is None else map(data.__getitem__, in_random_order(size))
    )
    seconds: list[float] = []
    with kept_random_numbers("cpu"):
        while len(seconds) < _TIMED_SAMPLES and sum(seconds) < LOOK_SECONDS / _TIMED_SAMPLES:
            began = time.perf_counter()
            next(samples, None)
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def samples_at(data: Any, places: Sequence[int] = (), first: Sequence[int] = ()) -> Iterator[tuple[int, object]]:
    """The samples at these places, or all at random, each with its place, from which its random numbers follow."""
    if is_stream(data):
        seed_the_cpu(0)
        some = zip(range(max(places) + 1), data, strict=False) if places else enumerate(data)
        yield from (each for each in some if each[0] in places or not places)
        return
    for place in places or itertools.chain(first, in_random_order(len(data))):
        seed_the_cpu(place % 2**32)
        yield place, data[place]
