"""The largest batch that a step trains within a capacity, as the allocator would see it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple

from batchtune.estimate.memory.allocator import CachingAllocator, OutOfMemory
from batchtune.estimate.memory.events import Birth, Trace, Work
from batchtune.estimate.memory.fit import Step, peak_allocated_bytes, replay
from batchtune.estimate.memory.scratch import Gpu
from batchtune.vocabulary import LARGEST

_RESOLUTION = 256  # replays stop at 1/256 of the size: far finer than the estimate is true
_LONGEST_STRIDE = 64  # of the size: blocks fall into place at some sizes and not at smaller ones
_HOLE = 16  # sizes, that may not fit between two that do
_NEAR = 256  # of the size: so far above an end another one is looked for
_STEPS_PER_DOUBLING = 4


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
        self._share = 1.0  # of what live storages alone would allow
        self._held: dict[int, int] = {}  # the least capacity that held a size
        self._too_small: dict[int, int] = {}  # the greatest capacity that did not

    def __call__(self, capacity_bytes: int) -> int:
        """The largest batch size whose replay stays within the capacity; 0 where 1 does not fit."""
        bound = largest_allocated(self._step, capacity_bytes)
        gap = finest = max(1, bound // self._resolution)
        longest = max(gap, bound // _LONGEST_STRIDE)
        fitting, failing = 0, bound + 1
        size = bound if bound == LARGEST else min(bound, max(1, round(bound * self._share)))
        while fitting < size < failing:  # away from the first look in larger strides, until the limit is passed
            if self._fits(size, capacity_bytes):
                fitting, size = size, size + gap
            else:
                failing, size = size, size - gap
            if fitting and failing <= bound:
                break
            gap = min(2 * gap, longest)
        while failing - fitting > finest:
            middle = (fitting + failing) // 2
            if self._fits(middle, capacity_bytes):
                fitting = middle
            else:
                failing = middle
        fitting = self._beyond(fitting, finest, capacity_bytes)
        self._share = fitting / bound if fitting else self._share
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

    def _fits(self, batch_size: int, capacity_bytes: int) -> bool:
        if capacity_bytes >= self._held.get(batch_size, math.inf):
            return True
        if capacity_bytes <= self._too_small.get(batch_size, -1):
            return False
        try:
            replay(self._step, batch_size, self._allocator(capacity_bytes))
        except OutOfMemory:
            self._too_small[batch_size] = capacity_bytes
            return False
        self._held[batch_size] = capacity_bytes
        return True


def largest_allocated(step: Step, capacity_bytes: float) -> int:
    """The largest batch size whose live storages alone stay within the capacity; 0 where 1 does not."""
    failing = 1
    while failing <= LARGEST and peak_allocated_bytes(step, failing) <= capacity_bytes:
        failing *= 2
    fitting = failing // 2
    failing = min(failing, LARGEST + 1)
    while failing - fitting > 1:
        middle = (fitting + failing) // 2
        if peak_allocated_bytes(step, middle) <= capacity_bytes:
            fitting = middle
        else:
            failing = middle
    return fitting


class TracedStep:
    """A step whose traces do not align: traced at sizes on a grid, four to a doubling; between them, scaled.

    A size off the grid takes the events of the nearest traced size below it, with activations and temporaries scaled in
    proportion.

    Args:
        trace_at: traces one batch size; called at most once for each size on the grid.
    """

    def __init__(self, trace_at: Callable[[int], Trace], gpu: Gpu = Gpu()) -> None:  # noqa: B008 - it is frozen
        self._trace_at, self.gpu = trace_at, gpu
        self._traces: dict[int, Trace] = {}

    def on(self, gpu: Gpu) -> TracedStep:
        other = TracedStep(self._trace_at, gpu)
        other._traces = self._traces
        return other

    def events(self, batch_size: int) -> list[int]:
        return self._nearest(batch_size).events

    def births(self, batch_size: int) -> list[Birth]:
        return self._nearest(batch_size).births

    def sizes(self, batch_size: int) -> list[int]:
        trace = self._nearest(batch_size)
        return [
            -(-birth.bytes_on(self.gpu) * batch_size // trace.batch_size) if _grows(birth) else birth.bytes_on(self.gpu)
            for birth in trace.births
        ]

    def work(self, batch_size: int) -> Work:
        trace = self._nearest(batch_size)
        return Work(*(value * batch_size / trace.batch_size for value in astuple(trace.work)))

    def _nearest(self, batch_size: int) -> Trace:
        steps = math.floor(math.log2(batch_size) * _STEPS_PER_DOUBLING + 1e-9)
        size = math.ceil(2 ** (steps / _STEPS_PER_DOUBLING) - 1e-9)
        size = min(size, batch_size)
        if size not in self._traces:
            self._traces[size] = self._trace_at(size)
        return self._traces[size]


def _grows(birth: Birth) -> bool:
    of_the_batch = birth.category in ("activations", "temporaries")
    return of_the_batch and birth.moment.startswith(("forward", "backward"))
