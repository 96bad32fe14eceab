"""Words with a fixed set of values, and lengths of inputs, which documents, configurations and messages share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias, get_args

Precision = Literal["bf16", "fp16", "fp32", "tf32"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
Strategy = Literal["ddp", "fsdp"]  # of several ranks: each holds the model, or a shard of it
Executor = Literal["local", "ray"]  # of runs: where they train, here or on a Ray cluster
Goal = Literal["minimize", "maximize"]  # of the metric
Kind = Literal["time_to_target", "energy_to_target", "best_metric"]  # of the objective
Purpose = Literal["probe", "tune", "inference"]  # of a child: what the task is to do in it
Outcome = Literal["fit", "oom", "kernel_limit", "crash", "timeout", "user_error"]  # of an attempt
NO_LARGER = "training makes no larger batches"
"""What an estimate's note ends with whose batch the training set does not hold."""
LARGEST = 2**22  # samples of a batch: where estimates and searches without a maximum end
FAILED = {"oom", "crash", "timeout", "user_error"}  # outcomes of trials that came to nothing
FAILED_FOR_GOOD = FAILED - {"oom"}  # which is run again, in smaller micro-batches
Length: TypeAlias = int | tuple[int, ...]  # several where an input has several, such as source and target
AskedLengths: TypeAlias = Literal["auto"] | tuple[Length, ...]  # auto: those of the training set
LengthBatches: TypeAlias = tuple[tuple[Length, int], ...]  # samples of a batch by their length


def meets(value: float | None, target: float | None, goal: Goal) -> bool:
    """Whether a value of the metric is as good as the target; never where one of them is missing or no number."""
    if value is None or target is None or not math.isfinite(value):
        return False
    return value <= target if goal == "minimize" else value >= target


def together(classes: Iterable[str]) -> str:
    """Classes of optimizers or schedulers that train together: `AdamW`, `Muon + AdamW`, `2 x Adam`."""
    return " + ".join(name if count == 1 else f"{count} x {name}" for name, count in Counter(classes).items())


def are_several(name: str | None) -> bool:
    """Whether a name by `together` is of more than one."""
    return name is not None and " " in name


def classes_in(name: str) -> set[str]:
    """The classes that a name by `together` is made of."""
    return {part.rpartition(" x ")[2] for part in name.split(" + ")}


class Variant(NamedTuple):
    """What a model is trained by besides numbers, of which each has a largest batch and step times of its own.

    Attributes:
        strategy: by which ranks share the work; None: the one that they were started with, or there are none.
        activation_checkpointing: whether activations are computed again in backward; None: as the task has it.
    """

    strategy: Strategy | None = None
    activation_checkpointing: bool | None = None

    @property
    def name(self) -> str:
        """As people read it; empty where nothing is asked for."""
        checkpointing = {None: "", True: "activation checkpointing", False: "no activation checkpointing"}
        return ", ".join(filter(None, [self.strategy or "", checkpointing[self.activation_checkpointing]]))

    @staticmethod
    def named(name: object) -> Variant:
        """The one of this name."""
        every = (Variant(how, again) for how in (None, *get_args(Strategy)) for again in (None, True, False))
        return {each.name: each for each in every}[str(name)]


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
