"""The size of every storage as a polynomial in the batch size, from a few traces, and the peaks that follow from it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchtune.estimate.memory.allocator import ROUNDING_BYTES, CachingAllocator
from batchtune.estimate.memory.events import Birth, Trace, Work
from batchtune.estimate.memory.scratch import Gpu

BATCH_SIZES = (3, 5, 8)  # 1 and 2 are special to broadcasting and to some kernels; odd and even are both there
QUADRATIC_BATCH_SIZE = 13
_DENOMINATOR = 2  # B * (B - 1) / 2 is the one fraction that real losses have
_LINEAR, _QUADRATIC = 1, 2
_SECOND = "forward 2"  # the moment in which the second step begins
_FEWEST_STEPS, _MOST_STEPS, _CALM_STEPS = 3, 9, 2  # of a replay, as of an attempt; without making room


class Step(Protocol):
    """A training step whose storages are known at any batch size."""

    def on(self, gpu: Gpu) -> Step:
        """The same step on another GPU."""

    def events(self, batch_size: int) -> list[int]:
        """Births and deaths, as in `Trace.events`."""

    def sizes(self, batch_size: int) -> list[int]:
        """Bytes of every storage, by number."""

    def births(self, batch_size: int) -> list[Birth]:
        """What every storage is, by number; sizes in it are those of some traced batch size."""

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

    def events(self, batch_size: int) -> list[int]:  # noqa: ARG002 - the same at every size
        return self.trace.events

    def births(self, batch_size: int) -> list[Birth]:  # noqa: ARG002
        return self.trace.births

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
    """Why traces could not be fitted."""

    reason: str


def fit(trace_at: Callable[[int], Trace]) -> FittedStep | Misaligned:
    """Fits every storage's size through traces at 3, 5 and 8 samples; a fourth, at 13, where they are not linear.

    One trace more than coefficients is always taken, so that a size which is no polynomial is found out.
    """
    traces = [trace_at(size) for size in BATCH_SIZES]
    found = align(traces, _LINEAR)
    if isinstance(found, Misaligned) and _same_events(traces) is None:
        found = align([*traces, trace_at(QUADRATIC_BATCH_SIZE)], _QUADRATIC)
    return found


def align(traces: Sequence[Trace], degree: int) -> FittedStep | Misaligned:
    """The polynomials of one degree through all but the last trace, exact at the last one too, or why not."""
    different = _same_events(traces)
    if different is not None:
        return different
    births = traces[0].births
    batch_sizes = [trace.batch_size for trace in traces]
    sizes = np.array([[each for birth in trace.births for each in _lengths(birth)] for trace in traces], dtype=np.int64)
    through = list(range(degree + 1))
    doubled = _DENOMINATOR * _coefficients([batch_sizes[i] for i in through], sizes[through])
    whole = np.rint(doubled).astype(np.int64)
    powers = np.array([[1, size, size**2] for size in batch_sizes], dtype=np.int64)
    wrong = _DENOMINATOR * sizes != (whole @ powers.T).T
    if wrong.any():
        owners = [birth for birth in births for _ in _lengths(birth)]
        at = owners[int(wrong.any(axis=0).argmax())]
        return Misaligned(f"the size of {at.op} in {at.module or at.moment} is no polynomial of the batch size")
    works = np.array([astuple(traces[i].work) for i in through], dtype=np.float64)
    return FittedStep(traces[0], whole, degree, _coefficients([batch_sizes[i] for i in through], works))


def _lengths(birth: Birth) -> tuple[int, ...]:
    """What must be a polynomial of the batch size."""
    return (birth.size_bytes,) if birth.block is None else birth.block.lengths


def _same_events(traces: Sequence[Trace]) -> Misaligned | None:
    first = traces[0]
    for other in traces[1:]:
        for mine, theirs in zip(first.births, other.births, strict=False):
            if mine.op != theirs.op:
                sizes = f"{first.batch_size} and {other.batch_size}"
                where = mine.module or mine.moment
                return Misaligned(f"the step differs between batch sizes {sizes}: {mine.op} or {theirs.op} in {where}")
        if first.events != other.events:
            return Misaligned(f"the step differs between batch sizes {first.batch_size} and {other.batch_size}")
    return None


def _coefficients(batch_sizes: Sequence[int], values: NDArray[Any]) -> NDArray[np.float64]:
    """(columns, 3) coefficients of the polynomials through two or three points, by divided differences."""
    x, y = batch_sizes, values.astype(np.float64)
    first = (y[1] - y[0]) / (x[1] - x[0])
    second = np.zeros_like(first)
    if len(x) > _QUADRATIC:
        second = ((y[2] - y[1]) / (x[2] - x[1]) - first) / (x[2] - x[0])
    linear = first - second * (x[0] + x[1])
    return np.stack([y[0] - linear * x[0] - second * x[0] ** 2, linear, second], axis=1)


def live_bytes(step: Step, batch_size: int) -> NDArray[np.int64]:
    """Bytes that are alive after each event, every storage rounded to the allocator's 512 bytes."""
    events = np.array(step.events(batch_size), dtype=np.int64)
    sizes = np.array(step.sizes(batch_size), dtype=np.int64)
    rounded = -(-sizes // ROUNDING_BYTES) * ROUNDING_BYTES
    live: NDArray[np.int64] = np.cumsum(np.sign(events) * rounded[np.abs(events) - 1])
    return live


def peak_allocated_bytes(step: Step, batch_size: int) -> int:
    """The high-water mark of live storages; no allocator can do with less."""
    return int(live_bytes(step, batch_size).max(initial=0))


def replay(step: Step, batch_size: int, allocator: CachingAllocator) -> CachingAllocator:
    """Runs the step's allocations through an allocator, for as many steps as `batchtune.child.commands.attempt` takes.

    Blocks are cut up anew from step to step: the second one is repeated, once, or more often where the allocator had
    to make room, until it had not to for two steps in a row.

    Raises:
        OutOfMemory: they pass its capacity.
    """
    sizes, events = step.sizes(batch_size), step.events(batch_size)
    _play(events, sizes, allocator)
    steps, calm = 2, 0
    for repeated in itertools.cycle(_repeated(events, sizes, step.births(batch_size))):
        if steps >= (_MOST_STEPS if allocator.retries and calm < _CALM_STEPS else _FEWEST_STEPS):
            break
        before = allocator.retries
        _play(repeated, sizes, allocator)
        steps, calm = steps + 1, calm + 1 if allocator.retries == before else 0
    return allocator


def _play(events: Sequence[int], sizes: Sequence[int], allocator: CachingAllocator) -> None:
    for event in events:
        size = sizes[abs(event) - 1]
        if event > 0 and size:
            allocator.allocate(event, size)
        elif size:
            allocator.free(-event)


def _repeated(events: list[int], sizes: list[int], births: list[Birth]) -> list[list[int]]:
    """The events of the third step and of the fourth; none where the second left more or other storages than it found.

    What the second step leaves behind, such as the last batch, takes the place of what it frees of the first. In the
    third, those numbers change places, and in the fourth they do so again. Gradients are freed late in turn, as in an
    attempt: the first step's in the second, the second's at its end, the third's in the fourth.
    """
    first = next((place for place, each in enumerate(events) if each > 0 and births[each - 1].moment == _SECOND), None)
    second = events[first:] if first is not None else []
    born = {event for event in second if event > 0}
    died = {-event for event in second if event < 0}
    gradients = {event for event in died if births[event - 1].category == "gradients"}
    old = sorted(gradients - born)
    new = sorted(gradients & born) if old else []
    before, after = sorted(died - born - gradients), sorted(born - died)
    found, left = ([[sizes[each - 1] for each in some] for some in both] for both in ((before, old), (after, new)))
    if found != left:
        return []
    places = dict(zip(before + after + new, after + before + old, strict=True))
    places |= {-one: -other for one, other in places.items()}
    return [[places.get(event, event) for event in second if -event not in {*old, *new}], second]


@dataclass(frozen=True)
class Peak:
    """The moment of the highest use of memory.

    Attributes:
        allocated_bytes: bytes alive then.
        by_category: those bytes by parameters, gradients, optimizer_states, activations and temporaries.
        moment: such as `backward 2`.
        op: the operator whose result made it the peak.
        module: whose forward was running, where one was.
        activations: bytes of activations alive then by module path, numbers in it replaced by `*`, and by line.
    """

    allocated_bytes: int
    by_category: dict[str, int]
    moment: str
    op: str
    module: str
    activations: list[tuple[str, str, int]]


def peak_of(step: Step, batch_size: int) -> Peak:
    """What is alive at the peak, and what it is for."""
    live = live_bytes(step, batch_size)
    events, sizes, births = step.events(batch_size), step.sizes(batch_size), step.births(batch_size)
    last = int(live.argmax())
    alive = {event for event in events[: last + 1] if event > 0} - {-event for event in events[: last + 1]}
    categories: Counter[str] = Counter()
    holders: Counter[tuple[str, str]] = Counter()
    for event in alive:
        birth = births[event - 1]
        rounded = -(-sizes[event - 1] // ROUNDING_BYTES) * ROUNDING_BYTES
        categories[birth.category] += rounded
        if birth.category == "activations":
            holders[_collapsed(birth.module), birth.line] += rounded
    at = births[abs(events[last]) - 1]
    largest = [(module, line, held) for (module, line), held in holders.most_common()]
    return Peak(int(live[last]), dict(categories), at.moment, at.op, at.module, largest)


def _collapsed(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))
