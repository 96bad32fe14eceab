"""The largest batch that a step trains within a capacity, as the allocator would see it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import astuple
from functools import cache

from batchtune.errors import EpochTooShortError
from batchtune.estimate.memory.allocator import CachingAllocator, OutOfMemory
from batchtune.estimate.memory.events import Birth, Gpu, Trace, Work
from batchtune.estimate.memory.fit import Step, peak_allocated_bytes, replay
from batchtune.vocabulary import LARGEST

_RESOLUTION = 256  # replays stop at 1/256 of the size: far finer than the estimate is true
_LONGEST_STRIDE = 64  # of the size: blocks fall into place at some sizes and not at smaller ones
_HOLE = 16  # sizes, that may not fit between two that do
_NEAR = 256  # of the size: so far above an end another one is looked for
_STEPS_PER_DOUBLING = 4
_FIRST_TRACED = 8, 16  # samples: before a large size, that it be known how long that takes and how much grows


class Search:
    """The largest batch sizes of one step by capacity; each search makes the next one shorter.

    A size that one capacity holds is taken to be held by a larger one too, and is looked for near the share of its
    live storages at which the last was found.

    Args:
        step: the training step.
        allocator: CachingAllocator or ExpandableAllocator.
        resolution: answers are less than 1/resolution below the largest that fits; sizes up to it are exact.
    """

    def __init__(
        self,
        step: Step,
        allocator: Callable[[int | None], CachingAllocator] = CachingAllocator,
        *,
        resolution: int = _RESOLUTION,
    ) -> None:
        self._step, self._allocator, self._resolution = step, allocator, resolution
        self._bound = 1  # of the last capacity
        self._share = 1.0  # of what live storages alone would allow
        self._held: dict[tuple[int, bool], int] = {}  # the least capacity that held a size, in an attempt or a check
        self._too_small: dict[tuple[int, bool], int] = {}  # the greatest capacity that did not

    def __call__(self, capacity_bytes: int) -> int:
        """The largest batch size whose replay stays within the capacity; 0 where 1 does not fit."""
        bound = self._bound = largest_allocated(self._step, capacity_bytes, self._bound)
        finest = max(1, bound // self._resolution)
        size = bound if bound == LARGEST else min(bound, max(1, round(bound * self._share)))
        fitting = self._around(size, bound, finest, capacity_bytes)
        fitting = self._beyond(fitting, finest, capacity_bytes)
        if not self._fits(fitting, capacity_bytes, check=True):
            fitting = self._around(fitting - 1, fitting - 1, finest, capacity_bytes, check=True)
        self._share = fitting / bound if fitting else self._share
        return fitting

    def _around(self, size: int, bound: int, finest: int, capacity_bytes: int, *, check: bool = False) -> int:
        """The largest size up to a bound that fits, from a first look at one in ever larger strides."""
        gap, longest = finest, max(finest, bound // _LONGEST_STRIDE)
        fitting, failing = 0, bound + 1
        while fitting < size < failing:
            if self._fits(size, capacity_bytes, check=check):
                fitting, size = size, size + gap
            else:
                failing, size = size, size - gap
            if fitting and failing <= bound:
                break
            gap = min(2 * gap, longest)
        while failing - fitting > finest:
            middle = (fitting + failing) // 2
            if self._fits(middle, capacity_bytes, check=check):
                fitting = middle
            else:
                failing = middle
        return fitting

    def below(self, size: int, capacity_bytes: int) -> int:
        """The largest of some sizes from `size` down that fits; `size` itself where none of them does."""
        near = range(size, max(0, size - _HOLE), -1)
        return next((each for each in near if self._fits(each, capacity_bytes)), size)

    def _beyond(self, fitting: int, finest: int, capacity_bytes: int) -> int:
        """A larger size near one that fits, though the next does not: tensors of some sizes fill their blocks."""
        stride = 1 << (fitting // _NEAR).bit_length()
        while stride >= finest and fitting:
            if fitting + stride <= LARGEST and self._fits(fitting + stride, capacity_bytes):
                fitting += stride
            else:
                stride //= 2
        return fitting

    def _fits(self, batch_size: int, capacity_bytes: int, *, check: bool = False) -> bool:
        asked = batch_size, check
        if not batch_size or capacity_bytes >= self._held.get(asked, math.inf):
            return True
        if capacity_bytes <= self._too_small.get(asked, -1):
            return False
        try:
            for free_late in (True, False)[: 1 + check]:  # a check trains both ways
                replay(self._step, batch_size, self._allocator(capacity_bytes), free_late=free_late)
        except OutOfMemory:
            self._too_small[asked] = capacity_bytes
            return False
        self._held[asked] = capacity_bytes
        return True


def largest_allocated(step: Step, capacity_bytes: float, near: int = 1) -> int:
    """The largest batch size whose live storages alone stay within the capacity; 0 where 1 does not.

    By doubling or halving from a size that is `near`, then on straight lines, each third time in the middle.
    """
    held = cache(lambda size: peak_allocated_bytes(step, size))
    fitting, failing, size, tries = 0, LARGEST + 1, max(1, min(near, LARGEST)), 0
    while failing - fitting > 1:
        fitting, failing = (size, failing) if held(size) <= capacity_bytes else (fitting, size)
        if failing > LARGEST or not fitting:
            size = min(2 * size, LARGEST) if fitting else max(1, size // 2)
            continue
        tries += 1
        share = (capacity_bytes - held(fitting)) / (held(failing) - held(fitting)) if tries % 3 else 0.5
        size = min(max(fitting + int(share * (failing - fitting)), fitting + 1), failing - 1)
    return fitting


class TracedGrid:
    """Traces of one step at sizes on a grid, four to a doubling, as they are asked for.

    Args:
        trace_at: traces one batch size; called at most once for each size on the grid.
        seconds: for which to trace; a size that would take longer is not traced any more.
        clock: for tests.
    """

    def __init__(
        self, trace_at: Callable[[int], Trace], seconds: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._trace_at, self._clock = trace_at, clock
        self._traces: dict[int, Trace] = {}
        self._left, self._seconds_per_sample = seconds, 0.0
        self._most, self._cut = LARGEST, ""

    @property
    def notes(self) -> list[str]:
        """What is to be said of it."""
        return [f"above {max(self._traces):,} samples scaled: {self._cut}"] if self._cut else []

    def nearest(self, batch_size: int) -> Trace:
        """The trace of the nearest size below that is on the grid, or of the largest traced one below that."""
        size = min(_on_the_grid(batch_size), self._most)
        if not self._traces and size > _FIRST_TRACED[-1]:
            for first in _FIRST_TRACED:
                self._trace_up_to(first)
            size = min(size, self._most)
        smaller = [traced for traced in self._traces if traced <= size]
        if len(smaller) > 1 and size not in smaller and self._seconds_per_sample * size > self._left:
            size, self._cut = max(smaller), "larger sizes take long to trace"
        if size not in self._traces:
            self._trace_up_to(size)
        return self._traces[min(size, self._most)]

    def _trace_up_to(self, size: int) -> None:
        """Traces a size, or the largest that the user's loader has."""
        try:
            self._trace(size)
        except EpochTooShortError as error:
            self._most, self._cut = error.samples, "an epoch of train_loader has no more"
            if self._most not in self._traces:
                self._trace(self._most)

    def _trace(self, size: int) -> None:
        started = self._clock()
        self._traces[size] = self._trace_at(size)
        spent = self._clock() - started
        self._left, self._seconds_per_sample = self._left - spent, spent / size

    def growth(self, batch_size: int) -> float:
        """By which what grows with the batch is larger than in the nearest trace.

        In proportion to the size; far above what was traced, as between the two largest sizes that were, since some of
        what is there in forward and backward, such as weights in half precision, does not grow.
        """
        nearest = self.nearest(batch_size)
        if nearest.batch_size == _on_the_grid(batch_size):
            return batch_size / nearest.batch_size
        below = self._traces[max(size for size in self._traces if size < nearest.batch_size)]
        held, before = _growing_bytes(nearest), _growing_bytes(below)
        slope = (held - before) / (nearest.batch_size - below.batch_size)
        return 1 + slope * (batch_size - nearest.batch_size) / held if held else 1.0


class TracedStep:
    """A step whose traces do not align: a size takes the events of the nearest traced size below it.

    Activations and temporaries are scaled in proportion.
    """

    def __init__(self, grid: TracedGrid, gpu: Gpu = Gpu()) -> None:  # noqa: B008 - it is frozen
        self._grid, self.gpu = grid, gpu

    def on(self, gpu: Gpu) -> TracedStep:
        return TracedStep(self._grid, gpu)

    def traced(self, batch_size: int) -> Trace:
        return self._grid.nearest(batch_size)

    def sizes(self, batch_size: int) -> list[int]:
        births, growth = self.traced(batch_size).births, self._grid.growth(batch_size)
        return [math.ceil(birth.bytes_on(self.gpu) * (growth if _grows(birth) else 1)) for birth in births]

    def work(self, batch_size: int) -> Work:
        trace = self.traced(batch_size)
        return Work(*(value * batch_size / trace.batch_size for value in astuple(trace.work)))


def _on_the_grid(batch_size: int) -> int:
    """The nearest size below that is to be traced."""
    steps = math.floor(math.log2(batch_size) * _STEPS_PER_DOUBLING + 1e-9)
    return min(math.ceil(2 ** (steps / _STEPS_PER_DOUBLING) - 1e-9), batch_size)


def _growing_bytes(trace: Trace) -> int:
    return sum(birth.size_bytes for birth in trace.births if _grows(birth))


def _grows(birth: Birth) -> bool:
    of_the_batch = birth.category in ("activations", "temporaries") and (birth.block is None or birth.block.lengths)
    return bool(of_the_batch) and birth.moment.startswith(("forward", "backward"))
