"""Words with a fixed set of values, and lengths of inputs, which documents, configurations and messages share."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

Precision = Literal["bf16", "fp16", "fp32", "tf32"]
Strategy = Literal["ddp", "fsdp"]  # of several ranks: each holds the model, or a shard of it
Goal = Literal["minimize", "maximize"]  # of the metric
Kind = Literal["time_to_target", "energy_to_target", "best_metric"]  # of the objective
Purpose = Literal["probe", "tune", "inference"]  # of a child: what the task is to do in it
Outcome = Literal["fit", "oom", "kernel_limit", "crash", "timeout", "user_error"]  # of an attempt
LARGEST = 2**22  # samples of a batch: where estimates and searches without a maximum end
FAILED = {"oom", "crash", "timeout", "user_error"}  # outcomes of trials that came to nothing
FAILED_FOR_GOOD = FAILED - {"oom"}  # which is run again, in smaller micro-batches
Length: TypeAlias = int | tuple[int, ...]  # several where an input has several, such as source and target

AskedLengths: TypeAlias = Literal["auto"] | tuple[Length, ...]  # auto: those of the training set

LengthBatches: TypeAlias = tuple[tuple[Length, int], ...]  # samples of a batch by their length


def dimensions(length: Length) -> tuple[int, ...]:
    """All numbers of a length."""
    return length if isinstance(length, tuple) else (length,)


def order(length: Length) -> tuple[int, ...]:
    """What lengths are sorted by: their product, then each number."""
    return math.prod(dimensions(length)), *dimensions(length)


def covers(longer: Length, length: Length) -> bool:
    """Whether an input of the second length has room within the first, in every number."""
    both = dimensions(longer), dimensions(length)
    return len(both[0]) == len(both[1]) and all(most >= each for most, each in zip(*both, strict=True))


def room_for(*lengths: Length) -> Length:
    """The least length that covers all of these, which have equally many numbers."""
    if isinstance(lengths[0], int):
        return max(dimensions(each)[0] for each in lengths)
    return tuple(map(max, zip(*map(dimensions, lengths), strict=True)))


def length_text(length: Length) -> str:
    """A length as people write it: 128, or 128x64."""
    return "x".join(map(str, dimensions(length)))
