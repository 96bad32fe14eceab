"""The polynomial replay against the tracer's own direct trace: peaks at five batch sizes of 19 models, to the byte.

python tests/benchmarks/estimate_exact.py
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from zoo import BASICS, Case

from batchtune.estimate.memory.allocator import CachingAllocator, ExpandableAllocator
from batchtune.estimate.memory.events import Trace
from batchtune.estimate.memory.fit import FittedStep, fit, peak_allocated_bytes, replay
from batchtune.estimate.tracing.trace import trace_step

BATCH_SIZES = (2, 7, 16, 37, 100)


def peaks(step: FittedStep, size: int) -> tuple[int, ...]:
    fixed, expandable = (replay(step, size, make()) for make in (CachingAllocator, ExpandableAllocator))
    live = peak_allocated_bytes(step, size)
    return live, fixed.peak_allocated_bytes, fixed.peak_reserved_bytes, expandable.peak_reserved_bytes


class Direct:
    """A trace as a step of its own one batch size."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def traced(self, _: int) -> Trace:
        return self.trace

    def sizes(self, _: int) -> list[int]:
        return [birth.size_bytes for birth in self.trace.births]


def row(case: Case) -> str:
    task = case.task()

    def trace(size: int) -> Trace:
        return trace_step(task, size, case.precision, case.accumulation_steps)

    step = fit(trace)
    if not isinstance(step, FittedStep):
        return f"| {case.name} | not aligned: {step.reason} | | |"
    equal = sum(peaks(step, size) == peaks(Direct(trace(size)), size) for size in BATCH_SIZES)
    reserved = peaks(step, BATCH_SIZES[-1])[2]
    return f"| {case.name} | {equal} of {len(BATCH_SIZES)} | {step.degree} | {reserved:,} |"


def main() -> None:
    lines = [
        "# Replay of the fitted step against direct traces",
        "",
        f"2026-11-21 · torch {torch.__version__} · Python {platform.python_version()} · `python {sys.argv[0]}`",
        "",
        f"Equal means to the byte, at batch sizes {', '.join(map(str, BATCH_SIZES))}: live bytes, and bytes allocated",
        "and reserved by both allocator models.",
        "",
        "| model | equal | degree | reserved at 100, bytes |",
        "|---|---|---|---:|",
        *(row(case) for case in BASICS),
    ]
    text = "\n".join(lines) + "\n"
    (Path(__file__).parent / "results" / "estimate_exact.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
