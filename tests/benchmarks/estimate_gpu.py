"""The estimate against a real GPU: peak allocated and reserved bytes of real steps, model by model.

    python tests/benchmarks/estimate_gpu.py

Each case is traced as `estimate` traces it in a process of its own, and trained for three steps in another: at two
batch sizes, and within a memory limit at the batch size that the estimate calls safe there. The overheads are those of
the documented table; nothing is fitted to these measurements.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from zoo import BASICS, Case
from zoo_basics import fused, sgd

BATCH_SIZES = (64, 256)
LIMIT_BYTES = 4 << 30
STEPS = 3
_TRANSFORMER = next(case for case in BASICS if case.name == "transformer, bf16")
CASES = (
    *BASICS,
    replace(_TRANSFORMER, name="transformer, fp16", precision="fp16"),
    replace(_TRANSFORMER, name="transformer, tf32", precision="tf32"),
    replace(_TRANSFORMER, name="transformer, bf16, SGD", optimizer=sgd),
    replace(_TRANSFORMER, name="transformer, bf16, fused AdamW", optimizer=fused),
    replace(_TRANSFORMER, name="transformer, bf16, checkpointing", options={"checkpointed": True}),
)


def measured(case: Case, safe: int) -> tuple[dict[int, tuple[int, int]], bool]:
    """Peak allocated and reserved bytes on the GPU by batch size, and whether the safe one trains within the limit."""
    from batchtune.device.memory import open_device
    from batchtune.train.attempt import attempt

    memory, found = open_device("cuda:0"), {}

    def tried(size: int) -> Any:
        outcome, _ = attempt(
            case.task(),
            memory,
            batch_size=size,
            steps=STEPS,
            precision=case.precision,
            accumulation_steps=case.accumulation_steps,
        )
        return outcome

    for size in BATCH_SIZES:
        outcome = tried(size)
        if not outcome.fits:
            raise RuntimeError(f"{case.name} at {size}: {outcome.outcome}: {outcome.message}")
        found[size] = (outcome.peak_allocated_bytes or 0, outcome.peak_reserved_bytes or 0)
    memory.release()
    memory.enforce(LIMIT_BYTES)
    return found, tried(safe).fits


def estimated(case: Case, generation: str) -> tuple[dict[int, tuple[int, int]], int]:
    """The same bytes as the estimate has them, and the batch size that is safe within the limit."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from batchtune.estimate.allocator import CachingAllocator
    from batchtune.estimate.capacity import Search
    from batchtune.estimate.fit import FittedStep, fit, replay
    from batchtune.estimate.overheads import confidence, workspace_bytes
    from batchtune.estimate.trace import trace_step

    task, ops = case.task(), set()

    def at(size: int) -> Any:
        trace = trace_step(task, size, case.precision, case.accumulation_steps)
        ops.update(trace.ops)
        return trace

    step = fit(at)
    if not isinstance(step, FittedStep):
        raise TypeError(f"{case.name}: {step.reason}")
    beside, found = workspace_bytes(ops), {}
    for size in BATCH_SIZES:
        allocator = replay(step, size, CachingAllocator())
        found[size] = (allocator.peak_allocated_bytes + beside, allocator.peak_reserved_bytes + beside)
    band = confidence(ops, (), aligned=True, vendor="NVIDIA").band
    return found, Search(step)(int((LIMIT_BYTES - beside) / (1 + band)))


def errors(case: Case, generation: str) -> list[dict[str, Any]]:
    """One row for each batch size: bytes measured, the estimate's relative errors, and whether the safe size held."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:  # tracing replaces parts of torch: never in the process that trains
        guess, safe = pool.apply(estimated, (case, generation))
    with context.Pool(1) as pool:
        truth, held = pool.apply(measured, (case, safe))
    return [
        {
            "case": case.name,
            "batch_size": size,
            "allocated_bytes": truth[size][0],
            "reserved_bytes": truth[size][1],
            "allocated_error": guess[size][0] / truth[size][0] - 1,
            "reserved_error": guess[size][1] / truth[size][1] - 1,
            "safe_batch_size": safe,
            "safe_fits": held,
        }
        for size in BATCH_SIZES
    ]


def main() -> None:
    import torch

    from batchtune.device.gpus import find_gpu

    name = torch.cuda.get_device_name(0)
    rows = [row for case in CASES for row in errors(case, find_gpu(name).generation)]
    lines = [
        "# Estimate against a real GPU",
        "",
        f"{name} · torch {torch.__version__} · Python {platform.python_version()} · `python {sys.argv[0]}`",
        "",
    ]
    for key in ("allocated", "reserved"):
        off = [abs(row[f"{key}_error"]) for row in rows]
        lines.append(f"Error of {key} bytes: median {median(off):.1%}, worst {max(off):.1%}.")
    broken = list(dict.fromkeys(row["case"] for row in rows if not row["safe_fits"]))
    but = f", but not in {', '.join(broken)}" if broken else " in every case"
    lines.append(f"Within {LIMIT_BYTES >> 30} GiB, the batch that is called safe trained{but}.")
    lines += ["", "| case | batch | allocated, MiB | error | reserved, MiB | error |", "|---|---:|---:|---:|---:|---:|"]
    for row in rows:
        allocated, reserved = (row[f"{key}_bytes"] / 2**20 for key in ("allocated", "reserved"))
        lines.append(
            f"| {row['case']} | {row['batch_size']} | {allocated:,.1f} | {row['allocated_error']:+.1%} "
            f"| {reserved:,.1f} | {row['reserved_error']:+.1%} |"
        )
    folder = Path(__file__).parent / "results"
    (folder / "estimate_gpu.md").write_text("\n".join(lines) + "\n")
    (folder / "estimate_gpu.json").write_text(json.dumps(rows, indent=1) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
