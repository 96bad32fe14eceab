"""Batches of samples of many lengths, each as large as was measured to train at its length; every sample in one."""

from __future__ import annotations

import heapq
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, cycle, islice
from typing import TYPE_CHECKING, Any, TypeVar

from batchtune.sampling.frontier import Frontier

if TYPE_CHECKING:
    from batchtune.document import Length
    from batchtune.sampling.frontier import Measured

Sample = TypeVar("Sample")
Batch = list[Sample]
Step = list[Batch[Sample]]  # a batch for each rank
_MOST_SORTED = 16  # steps whose samples are put in order of length: little padding, and other batches in each epoch


class LengthBatchSampler:
    """Indices of batches of samples of similar length: the `batch_sampler` of a torch DataLoader.

    Every batch fits: it has at most as many samples as were measured to train at the longest length of its bucket.
    Every sample comes once in an epoch. Every rank has as many batches as the others, and at each step of the same
    bucket, but for the few samples that are too few for all ranks. Within a bucket samples are shuffled, then put in
    order of length by some batches at a time, so that little is padded. Batches that are not full come last in an
    epoch: between full ones they may cut up memory that these need. (Where every batch is of one sample, the ranks can
    only be made even by repeating some, as torch's DistributedSampler does.)

        sampler = batchtune.LengthBatchSampler([len(text) for text in texts], ".batchtune/probe-model")
        loader = DataLoader(texts, batch_sampler=sampler, collate_fn=pad)

    Args:
        lengths: of all samples of the data set, in its order: whole numbers, or tuples of them.
        result: of `batchtune probe --lengths`: itself, its file or run folder; or the largest batch of each length.
        shuffle: whether each epoch has other batches, in another order.
        seed: of the shuffling; the same on all ranks.
        num_replicas: ranks that train together; by default those of torch's process group, 1 without one.
        rank: which of them this one is; by default as the process group says.

    Attributes:
        epoch: what the next iteration shuffles by; one more from an epoch's last batch on, or what `set_epoch` says.

    Raises:
        ValueError: a sample is longer than the longest length measured, or a length is none; the message has its index.
        UsageError: the result has no lengths, or cannot be read.
    """

    def __init__(
        self,
        lengths: Iterable[Length],
        result: Measured,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        frontier = Frontier(result)
        self._ranks, self._rank = _place(num_replicas, rank)
        self._buckets: list[list[int]] = [[] for _ in frontier.batch_sizes]
        self._totals: list[int] = []
        self._full: list[int] = []  # the batch size of the bucket of each sample
        for index, length in enumerate(lengths):
            bucket, total = frontier.bucket_of(length, index)
            self._buckets[bucket].append(index)
            self._totals.append(total)
            self._full.append(frontier.batch_sizes[bucket])
        if not any(self._buckets):
            raise ValueError("lengths: there are none, so that there is nothing to make batches of")
        self._batch_sizes = frontier.batch_sizes
        self._length = len(steps_of(self._buckets, self._batch_sizes, self._ranks))
        self._shuffle, self._seed = shuffle, seed
        self.epoch = 0
        self._first = 0  # batch of the next iteration
        self._given = 0  # batches of this epoch so far, those before the first of a resumed one counted

    @property
    def sampler(self) -> LengthBatchSampler:
        """Itself: Lightning calls `set_epoch` of what it finds under this name."""
        return self

    def __len__(self) -> int:
        """Batches of an epoch on this rank."""
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of this rank, from the first one or from where a loaded state says."""
        epoch, first = self.epoch, self._first
        self._first, self._given = 0, first
        steps = self._steps(epoch)
        if first >= len(steps):  # all of them were trained before
            self.set_epoch(epoch + 1)
        for step in steps[first:]:
            self._given += 1
            if self._given == len(steps):  # now: not every trainer asks whether there is one more
                self.set_epoch(epoch + 1)
            yield step[self._rank]

    def _steps(self, epoch: int) -> list[Step[int]]:
        """All steps of an epoch, the same on every rank: those of full batches, then the others."""
        buckets = [list(each) for each in self._buckets]
        shuffled = random.Random(f"{self._seed} {epoch}")
        for samples, size in zip(buckets, self._batch_sizes, strict=True) if self._shuffle else ():
            shuffled.shuffle(samples)
            self._sort_some(samples, size * self._ranks)
        steps = sorted(steps_of(buckets, self._batch_sizes, self._ranks))
        if self._shuffle:
            shuffled.shuffle(steps)
        return sorted(steps, key=lambda step: any(len(batch) < self._full[batch[0]] for batch in step))

    def _sort_some(self, samples: list[int], step: int) -> None:
        """Puts the samples of some steps at a time in order of length; of half of them at most, that batches differ."""
        steps = -(-len(samples) // step)
        pool = step * min(_MOST_SORTED, -(-steps // 2))
        for start in range(0, len(samples), pool or 1):
            samples[start : start + pool] = sorted(samples[start : start + pool], key=self._totals.__getitem__)

    def set_epoch(self, epoch: int) -> None:
        """Shuffles the next iteration by this number; an epoch other than the present one begins at its first batch."""
        if epoch != self.epoch:
            self._first = self._given = 0
        self.epoch = epoch

    def state_dict(self, *, epoch: int | None = None, batch: int | None = None) -> dict[str, object]:
        """Where to go on, as plain numbers for a checkpoint.

        Args:
            epoch: the one that is trained; by default that of the next batch.
            batch: how many batches of it were trained; by default how many were given out. A DataLoader with workers
                asks for batches long before they are trained: say both where there are workers.
        """
        state = {"epoch": self.epoch if epoch is None else epoch, "batch": self._given if batch is None else batch}
        return state | self._origin()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the next iteration go on where `state_dict` was taken.

        Raises:
            ValueError: it is of other samples, batch sizes, ranks, seed or shuffling; the message says of which.
        """
        differing = [name for name, value in self._origin().items() if state.get(name) != value]
        if differing:
            raise ValueError(f"this state is of another {' and '.join(differing)}, with which the batches are others")
        self.epoch, self._first = int(state["epoch"]), int(state["batch"])
        self._given = self._first

    def _origin(self) -> dict[str, object]:
        """What the batches follow from."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_replicas": self._ranks,
            "samples": [len(each) for each in self._buckets],
            "batch_sizes": self._batch_sizes,
        }


def length_batches(
    samples: Iterable[Sample],
    length_of: Callable[[Sample], Length],
    result: Measured,
    num_replicas: int | None = None,
    rank: int | None = None,
) -> Iterator[list[Sample]]:
    """Batches of samples as they come, for an IterableDataset: what LengthBatchSampler is for others.

    Samples wait until their bucket has a batch for every rank; what waits at the end makes the last batches. All ranks
    are given the same samples in the same order, and each takes its part of every step.

        class Batches(IterableDataset):
            def __iter__(self):
                return batchtune.length_batches(stream(), len, ".batchtune/probe-model")

        loader = DataLoader(Batches(), batch_size=None, collate_fn=pad)

    Args:
        samples: of an epoch.
        length_of: the length of a sample.
        result: as LengthBatchSampler takes it.
        num_replicas: as LengthBatchSampler takes it.
        rank: as LengthBatchSampler takes it.

    Yields:
        Batches, none with more samples than were measured to train at their length.

    Raises:
        ValueError: a sample is longer than the longest length measured; the message has its number, from 0.
        UsageError: the result has no lengths, or cannot be read.
    """
    frontier = Frontier(result)
    ranks, own = _place(num_replicas, rank)
    waiting: list[list[Sample]] = [[] for _ in frontier.batch_sizes]
    for index, sample in enumerate(samples):
        bucket, _ = frontier.bucket_of(length_of(sample), index)
        waiting[bucket].append(sample)
        size = frontier.batch_sizes[bucket]
        if len(waiting[bucket]) == size * ranks:
            yield waiting[bucket][own * size : (own + 1) * size]
            waiting[bucket] = []
    for step in steps_of(waiting, frontier.batch_sizes, ranks):
        yield step[own]


def _place(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Number of ranks and this one's; torch's process group says what is not given (who has one has imported it)."""
    group = sys.modules.get("torch.distributed")
    if group is not None and not (group.is_available() and group.is_initialized()):
        group = None
    ranks = num_replicas if num_replicas is not None else group.get_world_size() if group else 1
    own = rank if rank is not None else group.get_rank() if group else 0
    if not 0 <= own < ranks:
        raise ValueError(f"rank is {own} of {ranks}; it must be from 0 to num_replicas - 1")
    return ranks, own


def steps_of(buckets: list[list[Sample]], batch_sizes: list[int], ranks: int) -> list[Step[Sample]]:
    """Steps with all samples of each bucket, full batches first.

    The last step of a bucket is shared evenly. What is less than a sample for each rank makes steps with what is left
    of other buckets, for which batches are halved until each rank has one; where none can be, samples are repeated.
    """
    steps: list[Step[Sample]] = []
    rest: list[Batch[Sample]] = []
    for samples, size in zip(buckets, batch_sizes, strict=True):
        full = len(samples) - len(samples) % (size * ranks)
        batches, left = _cut(samples[:full], size), samples[full:]
        if len(left) >= ranks:
            batches += [left[rank::ranks] for rank in range(ranks)]
        else:
            rest += _cut(left, size)
        steps += _cut(batches, ranks)
    _fill_up(rest, steps, ranks)
    return steps + _cut(rest, ranks)


def _fill_up(rest: list[Batch[Sample]], steps: list[Step[Sample]], ranks: int) -> None:
    """Adds batches to `rest` until their number is a multiple of the ranks: halves of the largest there are."""
    while missing := -len(rest) % ranks:
        largest = [batch for batch in heapq.nlargest(missing, chain(rest, *steps), key=len) if len(batch) > 1]
        if not largest:
            samples = [sample for batch in chain(rest, *steps) for sample in batch]
            rest += [[sample] for sample in islice(cycle(samples), missing)]
        for batch in largest:
            half = len(batch) // 2
            rest.append(batch[half:])
            del batch[half:]


def _cut(items: list[Sample], size: int) -> list[list[Sample]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
