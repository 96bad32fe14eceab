"""Inputs of many lengths: a step at any of them from a few traces, and batches of all of them that train in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np
from numpy.typing import NDArray

from batchtune.estimate.memory.allocator import CachingAllocator, OutOfMemory
from batchtune.estimate.memory.capacity import largest_allocated
from batchtune.estimate.memory.events import Gpu, Trace
from batchtune.estimate.memory.fit import (
    FittedStep,
    Misaligned,
    Step,
    fit,
    peak_allocated_bytes,
    play,
    play_first_step,
    same_events,
)
from batchtune.lengths.mixing import Sizes, first_replayed, steps_down
from batchtune.lengths.orders import ORDERS, REPLAYED_ORDERS, late_steps, mixed_order
from batchtune.vocabulary import Length

_NODES = 3  # lengths through which a polynomial of the second degree goes; one more proves it
_FIRST_ORDERS = 100  # in which an estimate replays them on the first GPU: it has a minute for all
_STEPS = 60  # of each order that lengths are replayed in, as many as a probe takes
Batches = dict[Length | None, int]


def fit_lengths(
    trace_at: Callable[[int, Length | None], Trace], lengths: Sequence[Length | None]
) -> dict[Length | None, FittedStep | Misaligned]:
    """A step at each length, ascending, or at None: polynomial in batch and length where traces at four lengths say so.

    Else it is traced at each.
    """
    at = cache(lambda length: fit(lambda size: trace_at(size, length)))
    last = len(lengths) - 1
    nodes = [lengths[place * last // _NODES] for place in range(_NODES + 1)]
    steps = {each: found for each in nodes if isinstance(found := at(each), FittedStep) and isinstance(each, int)}
    through: dict[int, FittedStep] = {}
    if last > _NODES and len(steps) == len(nodes) and _are_alike([*steps.values()]):
        proof = [*steps][1]  # neither end proves what runs through it
        some = {length: step for length, step in steps.items() if length != proof}
        expected = _between(some, proof)
        if expected is not None and (expected.coefficients == steps[proof].coefficients).all():
            through = some
    return {length: (_between(through, length) if length not in nodes else None) or at(length) for length in lengths}


def _are_alike(steps: Sequence[object]) -> bool:
    """Whether the same storages are born and die in all."""
    fitted = [step.trace for step in steps if isinstance(step, FittedStep)]
    return len(fitted) == len(steps) and same_events(fitted) is None


def _between(steps: Mapping[int, FittedStep], length: Length | None) -> FittedStep | None:
    """The step at a length by those at three others; None where its sizes are no whole numbers, or nothing is known."""
    if not steps or not isinstance(length, int):
        return None
    weights = [_weight(each, [*steps], length) for each in steps]
    every = [step.coefficients.astype(object) * weight for step, weight in zip(steps.values(), weights, strict=True)]
    sizes: NDArray[np.object_] = sum(every[1:], every[0])
    if any(Fraction(each).denominator != 1 for each in sizes.ravel().tolist()):
        return None
    works = [step.work_coefficients * float(each) for step, each in zip(steps.values(), weights, strict=True)]
    first = next(iter(steps.values()))
    return replace(first, coefficients=sizes.astype(np.int64), work_coefficients=sum(works[1:], works[0]))


def _weight(of: int, nodes: Sequence[int], at: int) -> Fraction:
    """Lagrange's."""
    found = Fraction(1)
    for node in nodes:
        found *= Fraction(at - node, of - node) if node != of else 1
    return found


class Mixture:
    """The largest batches of several lengths, trained one after another, by the memory that there is for them.

    Args:
        steps: by length, ascending.
        found: on other GPUs: how many steps down from the batches alone all trained.
    """

    def __init__(self, steps: Mapping[Length | None, Step], found: list[int] | None = None) -> None:
        self.steps = dict(steps)
        self._found = [] if found is None else found
        self.is_known = len(self.steps) > 1 and _are_alike([*self.steps.values()])

    @property
    def longest(self) -> Step:
        """The step at the longest length."""
        return [*self.steps.values()][-1]

    def on(self, gpu: Gpu) -> Mixture:
        """The same on another GPU."""
        return Mixture({length: step.on(gpu) for length, step in self.steps.items()}, self._found)

    def alone(self, longest_batch: int) -> Batches:
        """What trains at each length without the others: what holds as many bytes as that batch of the longest."""
        held = peak_allocated_bytes(self.longest, longest_batch) if longest_batch else 0
        found: Batches = {}
        for length, step in reversed(self.steps.items()):
            found[length] = largest_allocated(step, held, max(found.values())) if found else longest_batch
        return dict(reversed(found.items()))

    def together(self, alone: Batches, capacity_bytes: int) -> Batches:
        """What trains among the others: a share of the batches of each length alone.

        It is looked for in few orders from where another GPU's was found: what one length leaves to the next is first
        of all a matter of how unlike they are. Where not the same storages are born and die at all lengths, nothing
        is known of it.
        """
        sizes = {length: alone[length] for length in reversed(self.steps) if length is not None and alone[length]}
        if not self.is_known or len(sizes) < len(self.steps):
            return alone
        start, orders = (self._found[0], ORDERS) if self._found else (0, _FIRST_ORDERS)
        steps = steps_down(sizes)
        at = first_replayed(steps, lambda some: self.fails_in(some, capacity_bytes, orders), start)
        self._found.append(at)
        return {length: min(size, steps[at][length]) for length, size in alone.items() if length is not None}

    def fails_in(self, sizes: Sizes, capacity_bytes: int, orders: int = REPLAYED_ORDERS) -> int | None:
        """The first of so many orders that does not train within the capacity; None where all do."""
        for number in range(orders):
            try:
                order = mixed_order(len(sizes), _STEPS, number)
                self._replay(sizes, order, late_steps(len(order), number), CachingAllocator(capacity_bytes))
            except OutOfMemory:
                return number
        return None

    def _replay(self, sizes: Sizes, order: Sequence[int], late: int, allocator: CachingAllocator) -> None:
        """Steps over batches of several lengths, each batch made while the last one is still there."""
        taken = [self.steps[length].sizes(size) for length, size in sizes.items()]
        trace = self.steps[[*sizes][order[0]]].traced(1)
        spare = len(trace.births)
        batch = [
            number
            for number, birth in enumerate(trace.births, 1)
            if birth.moment == "build" and len({some[number - 1] for some in taken}) > 1
        ]
        was_late = late > 0
        again = play_first_step(trace, taken[order[0]], allocator, free_late=was_late)
        if again is None:
            return
        for number, which in enumerate(order[1:], 2):
            for each in batch:
                allocator.allocate(each + spare * (1 - number % 2), taken[which][each - 1])
                allocator.free(each + spare * (number % 2))
            is_late = number <= late
            both = was_late and not is_late  # the last gradients that were kept are freed, and the first that are not
            play(again.turns[number % 2] if both else again.events(number, free_late=is_late), taken[which], allocator)
            was_late = is_late
