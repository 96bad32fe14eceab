"""The child's part of an estimate: traces the task at one precision and answers for every GPU."""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from batchtune.estimate.calibration import Offsets
from batchtune.estimate.memory.allocator import ExpandableAllocator, FallingAllocator
from batchtune.estimate.memory.capacity import Search, TracedGrid, TracedStep, largest_allocated
from batchtune.estimate.memory.events import Assumption, Trace
from batchtune.estimate.memory.fit import FittedStep, Step, fit, live_bytes, peak_allocated_bytes, peak_of
from batchtune.estimate.memory.overheads import (
    Confidence,
    capacity_bytes,
    confidence,
    custom_operators,
    gpu_of,
    kind_of,
    unseen_share,
    workspace_bytes,
)
from batchtune.estimate.memory.scratch import Gpu
from batchtune.task.samples import unseen_warnings
from batchtune.vocabulary import LARGEST

_SHARES = (0.25, 0.5, 0.75)  # that is done once another size has been traced
_TRACING_SHARE = 0.5  # of the time that may go by with tracing: searching takes the rest
_CURVE_POINTS = 400
_HOLDERS = 12
_START = 1 / 1.01  # of what is expected: where a probe to 1 % begins, so that a failure right above ends it
_DIGITS = 10  # binary digits of a capacity that count, 0.2 %: so GPUs of one size are searched for once


def warm_up() -> None:
    """Loads all that a trace needs but the user's code."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported: a GPU that is there is left alone
    gc.disable()  # modules stay for good: looking for garbage among them takes a fifth of their import
    import batchtune.estimate.tracing.trace  # noqa: F401
    from batchtune.estimate.tracing.fake_cuda import require_cuda_autograd

    require_cuda_autograd()
    gc.freeze()
    gc.enable()


def answer(
    *,
    gpus: list[dict[str, Any]],
    memory_limit: int | None,
    seconds: float,
    progress: Callable[[float], None],
    **traced: Any,
) -> dict[str, Any]:
    """Traces a task once and finds the largest batch on each GPU; run in a child process.

    Args:
        gpus: dicts with name, memory_bytes, generation, vendor and measured (fields of `Offsets`).
        memory_limit: bytes that a process may reserve; None for what the GPU has.
        seconds: after which nobody waits for the answer any more.
        progress: told what share of it is done.
        **traced: what a `Tracer` is made with.

    Returns:
        `{"refused": why}`, with `frames` where the user's code failed, or
        `{"gpus": [one dict each], "details": [the peak at the largest size], "has_softmax": …}`.
    """
    started = time.monotonic()
    warm_up()
    from batchtune.estimate.tracing.failures import CannotTraceError, StepFailedError
    from batchtune.estimate.tracing.trace import Tracer

    try:
        tracer = Tracer(**traced)
        shares = iter(_SHARES)

        def trace_at(batch_size: int) -> Trace:
            trace = tracer.trace(batch_size)
            progress(next(shares, _SHARES[-1]))
            return trace

        found = fit(trace_at)
        notes = list(tracer.notes)
        grid = TracedGrid(tracer.trace, seconds * _TRACING_SHARE - (time.monotonic() - started))
        step: Step = found if isinstance(found, FittedStep) else TracedStep(grid)
        if not isinstance(found, FittedStep):
            notes.append(Assumption(f"{found.reason}; sizes between traced ones are scaled"))
        searches: dict[tuple[Gpu, int], _Searches] = {}
        rows = []
        for gpu in gpus:
            facts, measured = (gpu["memory_bytes"], gpu["generation"], gpu["vendor"]), _measured(gpu)
            aligned = isinstance(found, FittedStep)
            sure = confidence(tracer.ops, notes, aligned=aligned, vendor=gpu["vendor"], measured=measured)
            kind = gpu_of(gpu["name"], gpu["generation"])
            key = kind, gpu["memory_bytes"]
            if key not in searches:
                searches[key] = _Searches.of(step.on(kind), gpu["memory_bytes"])
            rows.append(_row(searches[key], capacity_bytes(*facts, tracer.ops, memory_limit, measured), sure))
            rows[-1]["notes"] += [*unseen_warnings(tracer.samples), *grid.notes]
            progress(_SHARES[-1] + (1 - _SHARES[-1]) * len(rows) / len(gpus))
        largest = max((row["max_batch_size"] for row in rows), default=0)
        has_softmax = any(op.startswith("aten._softmax.") for op in tracer.ops)
        return {"gpus": rows, "details": [detail(step, largest or 1)], "has_softmax": has_softmax}
    except StepFailedError as failed:
        return {"refused": str(failed), "frames": failed.frames}
    except CannotTraceError as refusal:
        return {"refused": str(refusal)}


def estimate_for_probe(*, gpu: dict[str, Any] | None, memory_limit: int, **traced: Any) -> dict[str, Any]:
    """What a probe of one device may expect; run in a child process.

    Args:
        gpu: a dict with generation and measured (fields of `Offsets`); None: the CPU.
        memory_limit: bytes that a process may reserve.
        **traced: what a `Tracer` is made with, but for the device.

    Returns:
        `{"refused": why}`, or `TaskEstimate`'s fields.
    """
    warm_up()
    from batchtune.estimate.tracing.failures import CannotTraceError, StepFailedError
    from batchtune.estimate.tracing.trace import Tracer

    try:
        tracer = Tracer(**traced, device="cuda" if gpu else "cpu")
        step = fit(tracer.trace)
    except (CannotTraceError, StepFailedError) as refusal:
        return {"refused": str(refusal)}
    if not isinstance(step, FittedStep):
        return {"refused": step.reason}
    if gpu is None and kind_of(tracer.ops) == "recurrent":
        return {"refused": "the memory inside of recurrent layers is not seen"}
    assumed = bool(tracer.notes) or bool(custom_operators(tracer.ops))
    return expectation(step, tracer.ops, gpu, memory_limit) | {"model_independent": not assumed}


def expectation(step: Step, ops: set[str], gpu: dict[str, Any] | None, memory_limit: int) -> dict[str, Any]:
    """The fields of `TaskEstimate` that follow from the step, the device and the limit."""
    unseen, workspace = 0.0, 0
    step = step if gpu is None else step.on(gpu_of(gpu.get("name", ""), gpu["generation"]))
    if gpu is None:  # a block of its own for every large tensor, nothing cached
        expected = largest_allocated(step, memory_limit)
        start = min(expected, math.ceil(_START * (expected + 1)))
    else:
        measured = _measured(gpu)
        unseen, workspace = unseen_share(ops, measured), workspace_bytes(ops, measured)
        capacity, search = max(0, int((memory_limit - workspace) / (1 + unseen))), Search(step, resolution=LARGEST)
        expected = search(capacity)
        start = search.below(min(expected, math.ceil(_START * (expected + 1))), capacity)
    sizes = {max(1, int(1.2**power)) for power in range(round(math.log(32 * max(expected, 32), 1.2)))}
    return {
        "expected": expected,
        "start": start,
        "peaks": [(size, peak_allocated_bytes(step, size)) for size in sorted(sizes | {max(1, expected)})],
        "unseen_share": unseen,
        "workspace_bytes": workspace,
        "kind": kind_of(ops),
    }


def _measured(gpu: dict[str, Any]) -> Offsets:
    return Offsets(**gpu.get("measured", {}))


@dataclass(frozen=True)
class _Searches:
    """The searches of one step, by the allocator's segments: fixed ones, and those with falling addresses."""

    step: Step
    fixed: Search
    falling: Search
    expandable: Search

    def safe(self, capacity_bytes: int) -> int:
        """The largest batch size that fits in whichever order the driver hands out addresses."""
        return min(self.fixed(capacity_bytes), self.falling(capacity_bytes))

    @classmethod
    def of(cls, step: Step, device_bytes: int) -> _Searches:
        expandable = partial(ExpandableAllocator, device_bytes=device_bytes)
        return cls(step, Search(step), Search(step, FallingAllocator), Search(step, expandable))


def _row(searches: _Searches, capacity: int, sure: Confidence) -> dict[str, Any]:
    step, within = searches.step, _rounded_down(capacity)
    expected = searches.fixed(within)
    row: dict[str, Any] = {
        "capacity_bytes": capacity,
        "confidence": str(sure),
        "error_share": sure.band,
        "notes": list(sure.notes),
        "max_batch_size": expected,
        "limited_by": "max" if expected >= LARGEST else "memory",
        "safe_max_batch_size": min(expected, searches.safe(_rounded_down(int(capacity / (1 + sure.band))))),
        "expandable_segments_max_batch_size": searches.expandable(within),
    }
    if expected:
        row["peak_bytes"] = peak_allocated_bytes(step, expected)
        row["work"] = asdict(step.work(expected))
    else:
        row["needed_bytes"] = peak_allocated_bytes(step, 1)
    return row


def _rounded_down(capacity: int) -> int:
    unit = 1 << max(0, capacity.bit_length() - _DIGITS)
    return capacity // unit * unit


def detail(step: Step, batch_size: int) -> dict[str, Any]:
    """The peak at one size by category, module and line, and live bytes over the two traced steps."""
    peak = peak_of(step, batch_size)
    return {
        "batch_size": batch_size,
        "peak_allocated_bytes": peak.allocated_bytes,
        **{f"{name}_bytes": held for name, held in peak.by_category.items()},
        "peak_moment": peak.moment,
        "peak_module": peak.module or None,
        "peak_operator": peak.op,
        "holders": [
            {"module": module, "line": line or None, "activation_bytes": held}
            for module, line, held in peak.activations[:_HOLDERS]
        ],
        "curve": _curve(step, batch_size),
    }


def _curve(step: Step, batch_size: int) -> list[dict[str, Any]]:
    """The highest use in each of some 400 stretches, each within one moment, so that the peak is among them."""
    live, births = live_bytes(step, batch_size), step.births(batch_size)
    every = max(1, len(live) // _CURVE_POINTS)
    points: list[dict[str, Any]] = []
    moment, count = "", 0
    for event, held in zip(step.events(batch_size), live.tolist(), strict=True):
        now = births[event - 1].moment if event > 0 else moment
        if now != moment or count == every:
            points.append({"moment": now, "allocated_bytes": held})
            moment, count = now, 0
        points[-1]["allocated_bytes"] = max(points[-1]["allocated_bytes"], held)
        count += 1
    return points
