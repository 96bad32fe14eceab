"""How samples make steps: a batch for every rank, none larger than its bucket allows, every sample in one of them."""

from __future__ import annotations

import heapq
from itertools import chain, cycle, islice
from typing import TypeVar

Sample = TypeVar("Sample")
Batch = list[Sample]
Step = list[Batch[Sample]]  # a batch for each rank


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


def number_of_steps(counts: list[int], batch_sizes: list[int], ranks: int) -> int:
    """How many `steps_of` makes of so many samples."""
    steps, rest = 0, 0
    for samples, size in zip(counts, batch_sizes, strict=True):
        full, left = divmod(samples, size * ranks)
        shared = left >= ranks
        steps += full + shared
        rest += 0 if shared else _rounded_up(left, size)
    return steps + _rounded_up(rest, ranks)


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


def _rounded_up(count: int, size: int) -> int:
    return -(-count // size)
