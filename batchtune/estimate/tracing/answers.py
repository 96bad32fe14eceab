"""From a step, or those at each length, to answers: what fits on a GPU, what a probe may expect, what holds memory."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from batchtune.document import Holder, MemoryDetail, Moment
from batchtune.estimate.commands import ExpectLengths, GpuFacts, LengthEstimates, LengthRow, Refusal, Row, TaskEstimate
from batchtune.estimate.memory.allocator import ROUNDING_BYTES, ExpandableAllocator, round_up
from batchtune.estimate.memory.capacity import Search, TracedGrid, TracedStep
from batchtune.estimate.memory.events import Assumption, Trace
from batchtune.estimate.memory.fit import BATCH_SIZES, FittedStep, Misaligned, Step, live_bytes, peak_allocated_bytes
from batchtune.estimate.memory.mixture import Mixture, fit_lengths
from batchtune.estimate.memory.overheads import Confidence, gpu_of, kind_of, unseen_share
from batchtune.lengths.buckets import lengths_of
from batchtune.protocol.data import LengthsSeen
from batchtune.vocabulary import LARGEST, Length

if TYPE_CHECKING:
    from batchtune.estimate.tracing.trace import Tracer

_CURVE_POINTS = 400
_HOLDERS = 12
_START = 1 / 1.01  # of what is expected: where a probe to 1 % begins, so that a failure right above ends it
_LOST_TO_PAGES = 0.003  # of the capacity: a check of DINOv2 had to map 0.23 % more pages than its replay
_IN_TURNS = "lengths: what each leaves to the next is replayed in turns; a probe may find a fifth more or less"
_ALONE = "lengths: steps differ between them, so that what each leaves to the next is not known; less may train"
_DIGITS = 10  # binary digits of a capacity that count, 0.2 %: so GPUs of one size are searched for once


def expectation(step: Step, ops: Iterable[str], gpu: GpuFacts, memory_limit: int, *, assumed: bool) -> TaskEstimate:
    """What a probe may expect of a GPU within a limit; `assumed`: not all that was traced was seen."""
    ops = set(ops)
    step, unseen = step.on(gpu_of(gpu.name, gpu.generation)), unseen_share(ops, gpu.measured)
    capacity, search = int(memory_limit / (1 + unseen)), Search(step, resolution=LARGEST)
    expected = search(capacity)
    start = search.below(min(expected, math.ceil(_START * (expected + 1))), capacity)
    sizes = {max(1, int(1.2**power)) for power in range(round(math.log(32 * max(expected, 32), 1.2)))}
    return TaskEstimate(
        expected=expected,
        start=start,
        peaks=[(size, peak_allocated_bytes(step, size)) for size in sorted(sizes | {max(1, expected)})],
        unseen_share=unseen,
        kind=kind_of(ops),
        model_independent=not assumed,
    )


class Searches:
    """The searches of all lengths' steps on a GPU with so much memory: of the longest, by the allocator's segments."""

    def __init__(self, mixture: Mixture, device_bytes: int) -> None:
        self.mixture, self.step = mixture, mixture.longest
        self.fixed = Search(self.step)
        self.expandable = Search(self.step, partial(ExpandableAllocator, device_bytes=device_bytes))


def row_of(searches: Searches, capacity: int, sure: Confidence, notes: Sequence[str]) -> Row:
    """The largest batch within a capacity, in bytes; of each length where lengths are asked for."""
    step, within = searches.step, _rounded_down(capacity)
    expected = searches.fixed(within)
    row = Row(
        confidence=str(sure),
        error_share=sure.band,
        notes=[*sure.notes, *notes],
        max_batch_size=expected,
        limited_by="max" if expected >= LARGEST else "memory",
        safe_max_batch_size=min(expected, searches.fixed(_rounded_down(int(capacity / (1 + sure.band))))),
        expandable_segments_max_batch_size=searches.expandable(int(within * (1 - _LOST_TO_PAGES))),
        peak_bytes=peak_allocated_bytes(step, expected) if expected else None,
        work=step.work(expected) if expected else None,
        needed_bytes=None if expected else peak_allocated_bytes(step, 1),
    )
    return row if None in searches.mixture.steps else _with_lengths(row, searches.mixture, capacity)


def _with_lengths(row: Row, mixture: Mixture, capacity: int) -> Row:
    """The row of the longest with the largest batch of each length, of batches of all that train in turns."""
    alone = mixture.alone(row.max_batch_size)
    together = mixture.together(alone, _rounded_down(capacity))
    surely = mixture.together(mixture.alone(row.safe_max_batch_size), capacity)
    lengths = tuple(
        LengthRow(
            length=length,
            max_batch_size=together[length],
            safe_max_batch_size=min(together[length], surely[length]),
            alone_max_batch_size=alone[length],
            work=step.work(together[length]) if together[length] else None,
            peak_bytes=peak_allocated_bytes(step, together[length]) if together[length] else None,
        )
        for length, step in mixture.steps.items()
        if length is not None
    )
    said = [_IN_TURNS if mixture.is_known else _ALONE] if len(lengths) > 1 else []
    longest = lengths[-1].model_dump(include={"max_batch_size", "safe_max_batch_size", "peak_bytes"})
    return row.model_copy(update=longest | {"work": lengths[-1].work, "lengths": lengths, "notes": [*row.notes, *said]})


def _rounded_down(capacity: int) -> int:
    unit = 1 << max(0, capacity.bit_length() - _DIGITS)
    return capacity // unit * unit


def detail(step: Step, batch_size: int, precision: str) -> MemoryDetail:
    """The peak at one size by category, module and line, and live bytes over the two traced steps."""
    live, trace, sizes = live_bytes(step, batch_size), step.traced(batch_size), step.sizes(batch_size)
    last = int(live.argmax())
    until, births = trace.events[: last + 1], trace.births
    alive = {event for event in until if event > 0} - {-event for event in until}
    categories: Counter[str] = Counter()
    holders: Counter[tuple[str, str]] = Counter()
    for birth, size in ((births[event - 1], round_up(sizes[event - 1], ROUNDING_BYTES)) for event in alive):
        categories[f"{birth.category}_bytes"] += size
        if birth.category == "activations":
            holders[_without_numbers(birth.module), birth.line] += size
    at = births[abs(until[-1]) - 1]
    return MemoryDetail(
        precision=precision,
        batch_size=batch_size,
        peak_allocated_bytes=int(live[last]),
        peak_moment=at.moment,
        peak_module=at.module or None,
        peak_operator=at.op,
        holders=[
            Holder(module=module, line=line or None, activation_bytes=held)
            for (module, line), held in holders.most_common(_HOLDERS)
        ],
        curve=_curve(trace, live.tolist()),
        **categories,
    )


def _without_numbers(path: str) -> str:
    return re.sub(r"(^|(?<=\.))\d+(?=[. ])", "*", path)


def _curve(trace: Trace, live: Sequence[int]) -> list[Moment]:
    """The highest use in each of some 400 stretches, each within one moment, so that the peak is among them."""
    every = max(1, len(live) // _CURVE_POINTS)
    points: list[tuple[str, int]] = []
    count = 0
    for event, held in zip(trace.events, live, strict=True):
        moment = trace.births[event - 1].moment if event > 0 else points[-1][0]
        if not points or moment != points[-1][0] or count == every:
            points.append((moment, held))
            count = 0
        points[-1] = (moment, max(points[-1][1], held))
        count += 1
    return [Moment(moment=moment, allocated_bytes=held) for moment, held in points]


FailsIn = Callable[[dict[Length, int], int], int | None]
"""Which of the mixed orders of such batches is the first that does not fit within so many bytes; None: all fit."""
TRACED_SHARE = 0.75  # of all that is to be done: tracing


def mixture_of(
    trace_at: Callable[[int, Length | None], Trace],
    lengths: Sequence[Length | None],
    deadline: float,
    progress: Callable[[float], None],
) -> tuple[Mixture, list[Assumption], list[TracedGrid]]:
    """The step at each length, ascending, by traces at each or at some that say what all others take.

    Where nobody asked for lengths, it is the one at None. Beside it why sizes are scaled, where they are, and what is
    traced later, as it is asked for.
    """
    count = itertools.count(1)

    def trace(batch_size: int, length: Length | None) -> Trace:
        found = trace_at(batch_size, length)
        progress(min(TRACED_SHARE, TRACED_SHARE * next(count) / (len(BATCH_SIZES) * len(lengths))))
        return found

    fitted, steps, grids = fit_lengths(trace, lengths), dict[Length | None, Step](), list[TracedGrid]()
    reasons = [each for each in fitted.values() if isinstance(each, Misaligned)]
    for length, found in fitted.items():
        if isinstance(found, Misaligned):
            seconds = (deadline - time.monotonic()) / len(reasons)
            grids.append(TracedGrid(partial(_at, trace_at, length), seconds))
        steps[length] = TracedStep(grids[-1]) if isinstance(found, Misaligned) else found
    scaled = "sizes between traced ones are scaled"
    return Mixture(steps), [Assumption(f"{each.reason}; {scaled}", each.is_far_off) for each in reasons[:1]], grids


def ascending(seen: LengthsSeen | None) -> Sequence[Length | None]:
    """The lengths to find batches of; None alone where nobody asked for lengths."""
    return lengths_of(seen)[::-1] if seen else [None]


def _at(trace_at: Callable[[int, Length | None], Trace], length: Length | None, batch_size: int) -> Trace:
    return trace_at(batch_size, length)


def expected_of_lengths(asked: ExpectLengths, tracer: Tracer) -> tuple[LengthEstimates, FailsIn] | Refusal:
    """What a probe of one device may expect of each length, and what replays batches of all."""
    fitted = fit_lengths(tracer.trace, ascending(tracer.lengths))
    steps = {length: step for length, step in fitted.items() if isinstance(step, FittedStep)}
    if len(steps) < len(fitted):
        return Refusal(refused="sizes at some lengths are no polynomials of the batch size")
    mixture, gpu, limit = Mixture(steps), asked.gpu, asked.memory_limit
    known = tuple(
        (each, expectation(step, tracer.ops, gpu, limit, assumed=True))
        for each, step in steps.items()
        if each is not None
    )
    on_gpu = mixture.on(gpu_of(gpu.name, gpu.generation))
    return LengthEstimates(lengths=known, replays=mixture.is_known), on_gpu.fails_in
