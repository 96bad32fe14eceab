"""The child that traces: a task at one precision, answered for every GPU, or for the device of a probe."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from functools import cache

from batchtune.child.server import Child, serve
from batchtune.estimate.commands import EstimateMemory, ExpectMemory, LoadTracer, Refusal, Row, TaskEstimate, Traced
from batchtune.estimate.memory.capacity import TracedGrid, TracedStep
from batchtune.estimate.memory.events import Assumption, Trace
from batchtune.estimate.memory.fit import FittedStep, Step, fit
from batchtune.estimate.memory.overheads import capacity_bytes, confidence, custom_operators, gpu_of, kind_of
from batchtune.estimate.tracing.answers import Searches, detail, expectation, row_of
from batchtune.protocol.commands import Done
from batchtune.protocol.messages import AnyCommand, Channel

_SHARES = (0.25, 0.5, 0.75)  # that is done once another size has been traced
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


def answer(asked: EstimateMemory, progress: Callable[[float], None]) -> Traced | Refusal:
    """Traces a task once and finds the largest batch on each GPU.

    Args:
        asked: the task and the GPUs.
        progress: told what share of it is done.
    """
    started = time.monotonic()
    warm_up()
    from batchtune.estimate.tracing.trace import Tracer
    from batchtune.estimate.tracing.without_data import CannotTraceError, StepFailedError

    try:
        tracer = Tracer(asked)
        shares = iter(_SHARES)

        def trace_at(batch_size: int) -> Trace:
            trace = tracer.trace(batch_size)
            progress(next(shares, _SHARES[-1]))
            return trace

        found = fit(trace_at)
        notes = list(tracer.notes)
        grid = TracedGrid(tracer.trace, asked.seconds * _TRACING_SHARE - (time.monotonic() - started))
        step: Step = found if isinstance(found, FittedStep) else TracedStep(grid)
        if not isinstance(found, FittedStep):
            notes.append(Assumption(f"{found.reason}; sizes between traced ones are scaled"))
        searches_on = cache(lambda kind, memory_bytes: Searches.of(step.on(kind), memory_bytes))
        rows: list[Row] = []
        for gpu in asked.gpus:
            aligned = isinstance(found, FittedStep)
            sure = confidence(tracer.ops, notes, aligned=aligned, vendor=gpu.vendor, measured=gpu.measured)
            facts = gpu.memory_bytes, gpu.generation, gpu.vendor
            capacity = capacity_bytes(*facts, tracer.ops, asked.memory_limit, gpu.measured)
            searches = searches_on(gpu_of(gpu.name, gpu.generation), gpu.memory_bytes)
            rows.append(row_of(searches, capacity, sure, [*tracer.warnings, *grid.notes]))
            progress(_SHARES[-1] + (1 - _SHARES[-1]) * len(rows) / len(asked.gpus))
        largest = max((row.max_batch_size for row in rows), default=0)
        has_softmax = any(op.startswith("aten._softmax.") for op in tracer.ops)
        return Traced(gpus=rows, details=[detail(step, largest or 1, asked.precision)], has_softmax=has_softmax)
    except StepFailedError as failed:
        return Refusal(refused=str(failed), frames=failed.frames)
    except CannotTraceError as refusal:
        return Refusal(refused=str(refusal))


def estimate_for_probe(asked: ExpectMemory) -> TaskEstimate | Refusal:
    """What a probe of one device may expect."""
    warm_up()
    from batchtune.estimate.tracing.trace import Tracer
    from batchtune.estimate.tracing.without_data import CannotTraceError, StepFailedError

    try:
        tracer = Tracer(asked, "cuda" if asked.gpu else "cpu")
        step = fit(tracer.trace)
    except (CannotTraceError, StepFailedError) as refusal:
        return Refusal(refused=str(refusal))
    if not isinstance(step, FittedStep):
        return Refusal(refused=step.reason)
    if asked.gpu is None and kind_of(tracer.ops) == "recurrent":
        return Refusal(refused="the memory inside of recurrent layers is not seen")
    assumed = bool(tracer.notes) or bool(custom_operators(tracer.ops))
    return expectation(step, tracer.ops, asked.gpu, asked.memory_limit, assumed=assumed)


class TracingChild(Child):
    """A child that never opens a device."""

    def answer(self, command: AnyCommand) -> object:
        match command:
            case LoadTracer():
                warm_up()
                return Done()
            case EstimateMemory():
                return answer(command, lambda share: self._channel.send(alive=True, share=share))
            case ExpectMemory():
                return estimate_for_probe(command)
        return super().answer(command)


def main() -> None:
    """The child of one parent."""
    channel = Channel.on_standard_streams()
    serve(TracingChild(channel), channel)
