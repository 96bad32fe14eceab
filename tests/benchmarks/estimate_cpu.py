"""The tracer against real runs: the peak of the CPU allocator's own events, while nothing watches the operators.

    python tests/benchmarks/estimate_cpu.py

The trace is of the CPU's operators here, on the same kind of fake tensors; it does not test the parts for CUDA.
"""

from __future__ import annotations

import gc
import platform
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))
from zoo import BASICS, Case

from batchtune.child.trainer import Trainer
from batchtune.estimate.tracing.trace import trace_step

STEPS = 2


def train(case: Case) -> None:
    batch = case.batch(case.size)
    trainer = Trainer(case.task(), torch.device("cpu"), case.precision)
    for _ in range(STEPS):
        for _ in range(case.accumulation_steps):
            trainer.forward_backward(batch, case.accumulation_steps)
        trainer.update()


def measured_peak(case: Case) -> int:
    train(case)  # what libraries keep from the first run on is not the step's
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            train(case)
    finally:
        gc.enable()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]")
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak


def traced_peak(case: Case) -> int:
    trace = trace_step(case.task(), case.size, case.precision, case.accumulation_steps, device="cpu")
    live = peak = 0
    for event in trace.events:
        size = trace.births[abs(event) - 1].size_bytes
        live += size if event > 0 else -size
        peak = max(peak, live)
    return peak


def main() -> None:
    lines = [
        "# Trace against the CPU allocator's events",
        "",
        f"2026-11-21 · torch {torch.__version__} · Python {platform.python_version()} · `python {sys.argv[0]}`",
        "",
        "Peak of two optimizer steps, model and batch included; bytes as asked for.",
        "",
        "| model | batch | measured, MiB | traced, MiB | error |",
        "|---|---:|---:|---:|---:|",
    ]
    for case in BASICS:
        try:
            real, traced = measured_peak(case), traced_peak(case)
        except Exception as error:  # noqa: BLE001 - one case's failure is a row
            lines.append(f"| {case.name} | {case.size} | {str(error)[:100]} | | |")
            continue
        error = f"{traced / real - 1:+.3%}"
        lines.append(f"| {case.name} | {case.size} | {real / 2**20:.2f} | {traced / 2**20:.2f} | {error} |")
        print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    (Path(__file__).parent / "results" / "estimate_cpu.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
