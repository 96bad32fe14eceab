"""The child's part of an estimate: traces the task at one precision and answers for every GPU."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from batchtune.estimate.allocator import CachingAllocator, ExpandableAllocator
from batchtune.estimate.capacity import TracedStep, largest_allocated, largest_batch
from batchtune.estimate.fit import FittedStep, Step, fit, live_bytes, peak_allocated_bytes, peak_of
from batchtune.estimate.overheads import Confidence, capacity_bytes, confidence

_CURVE_POINTS = 400
_DIGITS = 10  # binary digits of a capacity that count, 0.2 %: so GPUs of one size are searched for once


def answer(
    *,
    task: str,
    precision: str,
    accumulation_steps: int,
    gpus: list[dict[str, Any]],
    memory_limit: int | None,
    checkpointing: bool = False,
) -> dict[str, Any]:
    """Traces a task once and finds the largest batch on each GPU; run in a child process through `Child.apply`.

    Args:
        task: as the user named it.
        precision: bf16, fp16, fp32 or tf32.
        accumulation_steps: micro-batches per optimizer step.
        gpus: dicts with name, memory_bytes, generation and vendor.
        memory_limit: bytes a process may reserve; None for what the GPU has.
        checkpointing: recompute the model's repeated blocks in backward, whatever the user's code does.

    Returns:
        `{"refused": why}`, or `{"gpus": [one dict each], "detail": the peak at the first size}`.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported: a GPU that is there is left alone
    from batchtune.estimate.trace import CannotTraceError, Tracer

    try:
        tracer = Tracer(task, precision, accumulation_steps, checkpointing=checkpointing)
        found = fit(tracer.trace)
        notes = list(tracer.notes)
        step: Step = found if isinstance(found, FittedStep) else TracedStep(tracer.trace)
        if not isinstance(found, FittedStep):
            notes.append(f"{found.reason}; sizes between traced ones are scaled")
        ops = tracer.ops
        search = _Search(step)
        rows = [
            _row(
                step,
                search,
                capacity_bytes(gpu["memory_bytes"], gpu["generation"], gpu["vendor"], ops, memory_limit),
                confidence(ops, notes, aligned=isinstance(found, FittedStep), vendor=gpu["vendor"]),
            )
            for gpu in gpus
        ]
        sizes = sorted({row["max_batch_size"] for row in rows if row["max_batch_size"]})
        return {"gpus": rows, "details": [detail(step, size) for size in sizes[-1:]]}
    except CannotTraceError as refusal:
        return {"refused": str(refusal)}


class _Search:
    """Largest batches of one step by capacity: each is sought once, and near the share at which the last was found."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._found: dict[tuple[int, type[CachingAllocator]], int] = {}
        self._near: dict[type[CachingAllocator], float] = {}

    def __call__(self, capacity: int, allocator: type[CachingAllocator] = CachingAllocator) -> int:
        within = _rounded_down(capacity)
        if (within, allocator) not in self._found:
            found = largest_batch(self._step, within, allocator, near=self._near.get(allocator, 1.0))
            self._found[within, allocator] = found
            self._near[allocator] = found / (largest_allocated(self._step, within) or 1)
        return self._found[within, allocator]


def _row(step: Step, search: _Search, capacity: int, sure: Confidence) -> dict[str, Any]:
    expected = search(capacity)
    row: dict[str, Any] = {
        "capacity_bytes": capacity,
        "confidence": str(sure),
        "notes": list(sure.notes),
        "max_batch_size": expected,
        "safe_max_batch_size": min(expected, search(int(capacity / (1 + sure.band)))),
        "expandable_segments_max_batch_size": max(expected, search(capacity, ExpandableAllocator)),
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
    """The peak at one size by category and module, and the curve of live bytes over the two traced steps."""
    live = live_bytes(step, batch_size)
    every = max(1, len(live) // _CURVE_POINTS)
    births, events = step.births(batch_size), step.events(batch_size)
    curve: list[list[Any]] = [
        [births[abs(events[at]) - 1].moment if events[at] > 0 else "", int(live[at : at + every].max())]
        for at in range(0, len(live), every)
    ]
    return {"batch_size": batch_size, **asdict(peak_of(step, batch_size)), "curve": curve}
