"""The child that traces: a task at one precision, answered for every GPU, or for the device of a probe."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

from batchtune.child.server import Child, serve
from batchtune.errors import HalfPrecisionError
from batchtune.estimate import commands
from batchtune.estimate.memory.fit import FittedStep, fit
from batchtune.estimate.memory.overheads import capacity_bytes, confidence, custom_operators, gpu_of
from batchtune.estimate.tracing import answers
from batchtune.protocol.messages import Answer, AnyCommand, Channel, move_standard_streams
from batchtune.vocabulary import NO_LARGER

if TYPE_CHECKING:
    from batchtune.estimate.tracing.trace import Tracer

_TRACING_SHARE = 0.5  # of the time that may go by with tracing: searching takes the rest


def warm_up() -> None:
    """Loads all that a trace needs but the user's code."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported: a GPU that is there is left alone
    gc.disable()  # modules stay for good: looking for garbage among them takes a fifth of their import
    import batchtune.estimate.tracing.trace  # noqa: F401
    from batchtune.estimate.tracing.fake_cuda import require_cuda_autograd

    require_cuda_autograd()
    gc.freeze()
    gc.enable()


def answer(asked: commands.EstimateMemory, progress: Callable[[float], None]) -> commands.Traced | commands.Refusal:
    """The largest batch on each GPU, of each length where lengths are asked for; tells what share of it is done."""
    deadline = time.monotonic() + asked.seconds * _TRACING_SHARE
    return _by_traces(asked, partial(_estimated, asked, deadline, progress))


def _by_traces(asked: commands.Tracing, answer: Callable[[Tracer], Answer]) -> Answer | commands.Refusal:
    """What follows from traces of a task, or why they cannot be taken."""
    warm_up()
    from batchtune.estimate.tracing.trace import Tracer
    from batchtune.estimate.tracing.without_data import CannotTraceError, StepFailedError

    try:
        return answer(Tracer(asked))
    except (StepFailedError, HalfPrecisionError) as failed:
        instead = "fp32" if isinstance(failed, HalfPrecisionError) and asked.precision != "fp32" else None
        return commands.Refusal(refused=str(failed), frames=failed.frames, instead=instead)
    except CannotTraceError as refusal:
        return commands.Refusal(refused=str(refusal))


def _estimated(
    asked: commands.EstimateMemory, deadline: float, progress: Callable[[float], None], tracer: Tracer
) -> commands.Traced:
    lengths = answers.ascending(tracer.lengths)
    mixture, scaled, grids = answers.mixture_of(tracer.trace, lengths, deadline, progress)
    notes = [*tracer.notes, *tracer.padding(), *scaled]
    searches_on = cache(lambda gpu, memory_bytes: answers.Searches(mixture.on(gpu), memory_bytes))
    rows: list[commands.Row] = []
    for gpu in asked.gpus:
        sure = confidence(
            tracer.ops,
            notes,
            aligned=not scaled,
            precision=asked.precision,
            vendor=gpu.vendor,
            measured=gpu.measured,
        )
        facts = gpu.memory_bytes, gpu.generation, gpu.vendor
        capacity = capacity_bytes(*facts, tracer.ops, asked.memory_limit, gpu.measured)
        searches = searches_on(gpu_of(gpu.name, gpu.generation), gpu.memory_bytes)
        cut = dict.fromkeys(note for grid in grids for note in grid.notes)  # larger sizes took long to trace
        row = answers.row_of(searches, capacity, sure, [*tracer.warnings, *cut])
        rows.append(row)
        progress(answers.TRACED_SHARE + (1 - answers.TRACED_SHARE) * len(rows) / len(asked.gpus))
    largest = max((row.max_batch_size for row in rows), default=0)
    if few := tracer.too_few(largest):
        told = f"{few[0]} has {few[1]:,} samples: {NO_LARGER}"
        rows = [row.but(notes=[*row.notes, told]) if row.max_batch_size > few[1] else row for row in rows]
    details = [answers.detail(mixture.longest, largest or 1, asked.precision)]
    return commands.Traced(gpus=rows, details=details)


def _expected(asked: commands.ExpectMemory, tracer: Tracer) -> commands.TaskEstimate | commands.Refusal:
    step = fit(tracer.trace)
    if not isinstance(step, FittedStep):
        return commands.Refusal(refused=step.reason)
    assumed = bool(tracer.notes) or bool(custom_operators(tracer.ops))
    return answers.expectation(step, tracer.ops, asked.gpu, asked.memory_limit, assumed=assumed)


class TracingChild(Child):
    """A child that never opens a device."""

    _fails_in: answers.FailsIn | None = None  # of the lengths that were last asked about

    def answer(self, command: AnyCommand) -> object:
        match command:
            case commands.LoadTracer():
                warm_up()
                return None
            case commands.EstimateMemory():
                return answer(command, lambda share: self._channel.send(alive=True, share=share))
            case commands.ExpectMemory():
                return _by_traces(command, partial(_expected, command))
            case commands.ExpectLengths():
                found = _by_traces(command, partial(answers.expected_of_lengths, command))
                answered, self._fails_in = (found, None) if isinstance(found, commands.Refusal) else found
                return answered
            case commands.ReplayLengths() if self._fails_in is not None:
                return commands.Replayed(fails_in=self._fails_in(dict(command.sizes), command.capacity_bytes))
        return super().answer(command)


def main() -> None:
    """The child of one parent."""
    channel = Channel(*move_standard_streams())
    serve(TracingChild(channel), channel)
