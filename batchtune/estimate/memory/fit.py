"""The size of every storage as a polynomial in the batch size, from a few traces, and the peaks that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from batchtune.estimate.memory.allocator import ROUNDING_BYTES, CachingAllocator
from batchtune.estimate.memory.events import Birth, Gpu, Trace, Work, first_birth

BATCH_SIZES = (3, 5, 8)  # 1 and 2 are special to broadcasting and to some kernels; odd and even are both there
QUADRATIC_BATCH_SIZE = 13
_DENOMINATOR = 2  # B * (B - 1) / 2 is the one fraction that real losses have
_LINEAR, _QUADRATIC = 1, 2
_SECOND = "forward 2"  # the moment in which the second step begins
_TRACED_STEPS, _FEWEST_STEPS, _MOST_STEPS = 2, 3, 9  # those of a trace; of a replay, as of an attempt
_CALM_STEPS = 2  # in a row without making room


class Step(Protocol):
    """A training step whose storages are known at any batch size."""

    def on(self, gpu: Gpu) -> Step:
        """The same step on another GPU."""

    def traced(self, batch_size: int) -> Trace:
        """The trace that it goes by, at this batch size or another: births, deaths and what every storage is."""

    def sizes(self, batch_size: int) -> list[int]:
        """Bytes of every storage, by number."""

    def work(self, batch_size: int) -> Work:
        """What one optimizer step computes and moves."""


@dataclass(frozen=True)
class FittedStep:
    """A step whose traces align: the same events at every batch size, only the sizes differ.

    Attributes:
        trace: one of the traces, for its events and what they are.
        coefficients: (lengths, 3) int64, twice the constant, linear and quadratic coefficient of each size, or of each
            length that a scratch's size is calculated from.
        degree: 1 or 2, the highest that a size needed.
        work_coefficients: (3, 3) float64, constant, linear and quadratic coefficient of each field of `Work`.
        gpu: on which it runs.
    """

    trace: Trace
    coefficients: NDArray[np.int64]
    degree: int
    work_coefficients: NDArray[np.float64]
    gpu: Gpu = field(default_factory=Gpu)

    def on(self, gpu: Gpu) -> FittedStep:
        return replace(self, gpu=gpu)

    def traced(self, batch_size: int) -> Trace:  # noqa: ARG002 - the same at every size
        return self.trace

    def work(self, batch_size: int) -> Work:
        powers = np.array([1, batch_size, batch_size**2], dtype=np.float64)
        return Work(*(self.work_coefficients @ powers).tolist())

    def sizes(self, batch_size: int) -> list[int]:
        powers = np.array([1, batch_size, batch_size**2], dtype=np.int64)
        found: list[int] = (-(-(self.coefficients @ powers) // _DENOMINATOR)).tolist()
        lengths = iter(found)
        return [
            next(lengths)
            if birth.block is None
            else birth.block.formula(self.gpu, *(next(lengths) for _ in birth.block.lengths))
            for birth in self.trace.births
        ]


@dataclass(frozen=True)
class Misaligned:
    """Why traces could not be fitted; and whether their sizes say little of those of larger batches."""

    reason: str
    is_far_off: bool = False


def fit(trace_at: Callable[[int], Trace]) -> FittedStep | Misaligned:
    """Fits every storage's size through traces at 3, 5 and 8 samples; a fourth, at 13, where they are not linear.

    One trace more than coefficients is always taken, so that a size which is no polynomial is found out.
    """
    traces = [trace_at(size) for size in BATCH_SIZES]
    found = align(traces, _LINEAR)
    if isinstance(found, Misaligned) and same_events(traces) is None:
        found = align([*traces, trace_at(QUADRATIC_BATCH_SIZE)], _QUADRATIC)
    return found


def align(traces: Sequence[Trace], degree: int) -> FittedStep | Misaligned:
    """The polynomials of one degree through all but the last trace, exact at the last one too, or why not."""
    different = same_events(traces)
    if different is not None:
        return different
    births = traces[0].births
    batch_sizes = [trace.batch_size for trace in traces]
    sizes = np.array([[each for birth in trace.births for each in _lengths(birth)] for trace in traces], dtype=np.int64)
    through = slice(degree + 1)
    doubled = _DENOMINATOR * _coefficients(batch_sizes[through], sizes[through])
    whole = np.rint(doubled).astype(np.int64)
    powers = np.array([[1, size, size**2] for size in batch_sizes], dtype=np.int64)
    wrong = _DENOMINATOR * sizes != (whole @ powers.T).T
    if wrong.any():
        owners = [birth for birth in births for _ in _lengths(birth)]
        at = owners[int(wrong.any(axis=0).argmax())]
        return Misaligned(f"the size of {at.op} in {at.module or at.moment} is no polynomial of the batch size")
    works = np.array([astuple(trace.work) for trace in traces[through]])
    return FittedStep(traces[0], whole, degree, _coefficients(batch_sizes[through], works))


def _lengths(birth: Birth) -> tuple[int, ...]:
    """What must be a polynomial of the batch size."""
    return (birth.size_bytes,) if birth.block is None else birth.block.lengths


def same_events(traces: Sequence[Trace]) -> Misaligned | None:
    """Why not the same storages are born and die in all traces, in one order; None where they are."""
    first = traces[0]
    for other in traces[1:]:
        once, again = first.uncut - other.uncut, other.uncut - first.uncut
        if pieces := {piece for _, piece in once} & {piece for _, piece in again}:  # of lengths that grow
            text = f"the step works in pieces of {max(pieces)}, larger than small batches; more may fit"
            return Misaligned(text, is_far_off=True)
        for mine, theirs in zip(first.births, other.births, strict=False):
            if mine.op != theirs.op:
                sizes = f"{first.batch_size} and {other.batch_size}"
                where = mine.module or mine.moment
                return Misaligned(f"the step differs between batch sizes {sizes}: {mine.op} or {theirs.op} in {where}")
        if first.events != other.events:
            return Misaligned(f"the step differs between batch sizes {first.batch_size} and {other.batch_size}")
    return None


def _coefficients(batch_sizes: Sequence[int], values: NDArray[np.integer | np.floating]) -> NDArray[np.float64]:
    """(columns, 3) coefficients of the polynomials through two or three points."""
    found = np.zeros((values.shape[1], 3))
    found[:, : len(batch_sizes)] = np.linalg.solve(np.vander(batch_sizes, increasing=True), values).T
    return found


def live_bytes(step: Step, batch_size: int) -> NDArray[np.int64]:
    """Bytes that are alive after each event, every storage rounded to the allocator's 512 bytes."""
    events = np.array(step.traced(batch_size).events, dtype=np.int64)
    sizes = np.array(step.sizes(batch_size), dtype=np.int64)
    rounded = -(-sizes // ROUNDING_BYTES) * ROUNDING_BYTES
    live: NDArray[np.int64] = np.cumsum(np.sign(events) * rounded[np.abs(events) - 1])
    return live


def peak_allocated_bytes(step: Step, batch_size: int) -> int:
    """The high-water mark of live storages; no allocator can do with less."""
    return int(live_bytes(step, batch_size).max(initial=0))


def replay(step: Step, batch_size: int, allocator: CachingAllocator, *, free_late: bool = True) -> CachingAllocator:
    """Runs the step's allocations through an allocator, for as many steps as `batchtune.child.attempt` takes.

    Blocks are cut up anew from step to step: the second one is repeated, once, or more often where the allocator had
    to make room, until it had not to for two steps in a row.

    Args:
        step: the training step.
        batch_size: micro-batch size, samples.
        allocator: what holds the storages.
        free_late: gradients, with the next batch, as attempts do; else after each step, as a final check does, too.

    Raises:
        OutOfMemory: they pass its capacity.
    """
    sizes, trace = step.sizes(batch_size), step.traced(batch_size)
    repeated = play_first_step(trace, sizes, allocator, free_late=free_late)
    if repeated is None:
        play(trace.events[first_birth(trace, _SECOND) :], sizes, allocator)
        return allocator
    number, calm = _TRACED_STEPS, 0
    while number <= (_MOST_STEPS if allocator.retries and calm < _CALM_STEPS else _FEWEST_STEPS):
        before = allocator.retries
        play(repeated.events(number, free_late=free_late), sizes, allocator)
        calm = calm + 1 if number > _TRACED_STEPS and allocator.retries == before else 0
        number += 1
    return allocator


def play_first_step(trace: Trace, sizes: list[int], allocator: CachingAllocator, *, free_late: bool) -> Repeated | None:
    """Plays the first of two steps; returns the second one, as `repeated_step` does."""
    first = first_birth(trace, _SECOND)
    play(trace.events[:first], sizes, allocator)
    repeated = repeated_step(trace.events[first:], sizes, trace.births)
    if repeated is not None and not free_late:
        play([-number for number in repeated.gradients[0][0]], sizes, allocator)
    return repeated


def play(events: Sequence[int], sizes: Sequence[int], allocator: CachingAllocator) -> None:
    """Has an allocator hold what is born, of these sizes by number, and give back what dies."""
    for event in events:
        size = sizes[abs(event) - 1]
        if event > 0 and size:
            allocator.allocate(event, size)
        elif size:
            allocator.free(-event)


@dataclass(frozen=True)
class Repeated:
    """The second step, to be taken again and again.

    What it leaves behind, such as the last batch, takes the place of what it frees of the first. In the third step
    those numbers change places, and in the fourth they do so again.

    Attributes:
        turns: the events of an even step and of an odd one, with all gradients freed.
        gradients: for each, those of the step before and its own, where the first step's are freed in the second.
    """

    turns: tuple[list[int], list[int]]
    gradients: tuple[tuple[set[int], set[int]], tuple[set[int], set[int]]]

    def events(self, number: int, *, free_late: bool) -> list[int]:
        """Those of a step by its number, which frees the gradients of the step before, or its own."""
        found, own = self.gradients[number % 2]
        kept = own if free_late else found
        return [event for event in self.turns[number % 2] if -event not in kept]


def repeated_step(second: list[int], sizes: list[int], births: list[Birth]) -> Repeated | None:
    """A second step, to be repeated; None where it left more or other storages than it found, or there was none.

    Gradients that it leaves, as a task does that always frees them late, are freed at its end.
    """
    born = {event for event in second if event > 0}
    outlived = sorted(born - {-event for event in second})
    second = second + [-each for each in outlived if births[each - 1].category == "gradients"]
    died = {-event for event in second if event < 0}
    gradients = {event for event in died if births[event - 1].category == "gradients"}
    old = sorted(gradients - born)
    new = sorted(gradients & born) if old else []
    before, after = sorted(died - born - gradients), sorted(born - died)
    found, left = ([[sizes[each - 1] for each in some] for some in both] for both in ((before, old), (after, new)))
    if found != left or not second:
        return None
    places = dict(zip(before + old + after + new, after + new + before + old, strict=True))
    places |= {-one: -other for one, other in places.items()}
    swapped = [places.get(event, event) for event in second]
    return Repeated((second, swapped), ((set(old), set(new)), (set(new), set(old))))
