"""A task's step as it was traced at each length: fitted, or traced again wherever it is asked for."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from batchtune.estimate.commands import ExpectLengths, LengthEstimates, Refusal
from batchtune.estimate.memory.capacity import TracedGrid, TracedStep
from batchtune.estimate.memory.events import Assumption, Gpu, Trace
from batchtune.estimate.memory.fit import BATCH_SIZES, FittedStep, Misaligned, Step
from batchtune.estimate.memory.mixture import Mixture, fit_lengths
from batchtune.estimate.memory.overheads import gpu_of
from batchtune.estimate.tracing.answers import Searches, expectation
from batchtune.vocabulary import Length

FailsIn = Callable[[dict[Length, int], int], int | None]
"""Which of the mixed orders of such batches is the first that does not fit within so many bytes; None: all fit."""
TRACED_SHARE = 0.75  # of all that is to be done: tracing


@dataclass(frozen=True)
class TracedLengths:
    """The step at each length, ascending; where nobody asked for lengths, by None.

    Attributes:
        mixture: of all of them.
        notes: why sizes are scaled, where they are.
        grids: what is traced later, as it is asked for.
    """

    mixture: Mixture
    notes: list[Assumption]
    grids: list[TracedGrid]

    @classmethod
    def of(
        cls,
        trace_at: Callable[[int, Length | None], Trace],
        lengths: Sequence[Length | None],
        deadline: float,
        progress: Callable[[float], None],
    ) -> Self:
        """By traces at each length, or at some that say what all others take."""
        count = itertools.count(1)

        def trace(batch_size: int, length: Length | None) -> Trace:
            found = trace_at(batch_size, length)
            progress(min(TRACED_SHARE, TRACED_SHARE * next(count) / (len(BATCH_SIZES) * len(lengths))))
            return found

        fitted, steps, grids = fit_lengths(trace, lengths), dict[Length | None, Step](), list[TracedGrid]()
        reasons = [each.reason for each in fitted.values() if isinstance(each, Misaligned)]
        for length, found in fitted.items():
            if isinstance(found, Misaligned):
                seconds = (deadline - time.monotonic()) / len(reasons)
                grids.append(TracedGrid(partial(_at, trace_at, length), seconds))
            steps[length] = TracedStep(grids[-1]) if isinstance(found, Misaligned) else found
        return cls(
            Mixture(steps), [Assumption(f"{each}; sizes between traced ones are scaled") for each in reasons[:1]], grids
        )

    def searches_on(self, kind: Gpu, memory_bytes: int) -> tuple[Searches, Mixture]:
        """Of the longest, and of all."""
        mixture = self.mixture.on(kind)
        return Searches.of(mixture.longest, memory_bytes), mixture

    def cut(self) -> list[str]:
        """What is to be said of larger sizes that took long to trace."""
        return list(dict.fromkeys(note for grid in self.grids for note in grid.notes))


def _at(trace_at: Callable[[int, Length | None], Trace], length: Length | None, batch_size: int) -> Trace:
    return trace_at(batch_size, length)


def expected_of_lengths(
    trace_at: Callable[[int, Length | None], Trace],
    lengths: Sequence[Length],
    ops: Iterable[str],
    asked: ExpectLengths,
) -> tuple[LengthEstimates, FailsIn] | Refusal:
    """What a probe of one device may expect of each length, ascending, and what replays batches of all."""
    fitted = fit_lengths(trace_at, lengths)
    steps = {length: step for length, step in fitted.items() if isinstance(step, FittedStep)}
    if not lengths or len(steps) < len(lengths):
        return Refusal(refused="sizes at some lengths are no polynomials of the batch size")
    mixture, gpu, limit = Mixture(steps), asked.gpu, asked.memory_limit
    known = tuple((each, expectation(steps[each], ops, gpu, limit, assumed=True)) for each in lengths)
    on_gpu = mixture.on(gpu_of(gpu.name, gpu.generation))
    return LengthEstimates(lengths=known, replays=mixture.is_known), on_gpu.fails_in
