"""The probe's search with the estimate as prior, on traced models under an allocator whose overheads nobody told it.

    python tests/benchmarks/prior_simulation.py

The truth of each case is the allocator model with what a GPU adds to a trace drawn at random: workspaces of libraries,
memory inside kernels (more for convolutions and recurrent layers), and some per cent by which a trace may be wrong.
The prior knows the unperturbed trace and the documented table only; "calibrated" also knows what the probes at the
smaller limits have taught.
"""

from __future__ import annotations

import os
import platform
import random
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from zoo import BASICS, Case

from batchtune.config.probe import Bounds
from batchtune.document import Attempt
from batchtune.estimate.calibration import offsets_of
from batchtune.estimate.commands import GpuFacts, TaskEstimate
from batchtune.estimate.memory.allocator import CachingAllocator, OutOfMemory
from batchtune.estimate.memory.events import Trace
from batchtune.estimate.memory.fit import FittedStep, fit, live_bytes, replay
from batchtune.estimate.memory.overheads import UNMEASURED, kind_of
from batchtune.estimate.tracing.answers import expectation
from batchtune.estimate.tracing.trace import trace_step
from batchtune.probe.search import next_size

MIB, GIB = 1 << 20, 1 << 30
LIMITS = tuple(int(each * 0.95 * GIB) for each in (8, 16, 24, 40, 80))
DRAWS = 3
DEVICE = "NVIDIA A100-SXM4-80GB"
_UNSEEN = {"plain": (0.0, 0.01), "convolution": (0.08, 0.05), "recurrent": (0.3, 0.1)}  # share: mean and deviation


@dataclass
class Truth:
    """What a GPU would hold: the trace, scaled, and workspaces beside it."""

    step: FittedStep
    scale: float
    workspace: int

    def attempt(self, size: int, limit: int) -> Attempt:
        grown = replace(self.step, coefficients=np.rint(self.step.coefficients * self.scale).astype(np.int64))
        allocator = CachingAllocator(limit)
        try:
            allocator.allocate(0, self.workspace)
            replay(grown, size, allocator)
        except OutOfMemory:
            return Attempt(batch_size=size, outcome="oom")
        live, trace = live_bytes(grown, size), grown.traced(size)
        update = [trace.births[abs(each) - 1].moment.startswith("optimizer") and each > 0 for each in trace.events]
        return Attempt(
            batch_size=size,
            outcome="fit",
            peak_allocated_bytes=allocator.peak_allocated_bytes,
            peak_reserved_bytes=allocator.peak_reserved_bytes,
            forward_backward_peak_bytes=int(live[~np.array(update)].max()) + self.workspace,
        )

    def search(self, limit: int, estimated: TaskEstimate | None) -> list[Attempt]:
        """The attempts of a probe."""
        attempts: list[Attempt] = []
        while (size := next_size(attempts, Bounds(), limit, estimated).batch_size) is not None:
            attempts.append(self.attempt(size, limit))
        return attempts


def trace(case: Case) -> tuple[FittedStep, set[str]] | None:
    task, ops = case.task(), set()

    def at(size: int) -> Trace:
        found = trace_step(task, size, case.precision, case.accumulation_steps)
        ops.update(found.ops)
        return found

    step = fit(at)
    return (step, ops) if isinstance(step, FittedStep) else None


def simulate(case: Case) -> dict[str, list[list[Attempt]]]:
    """Every search of one model, without the estimate, with it, and with it calibrated."""
    found = trace(case)
    assert found is not None, case.name
    step, ops = found
    kind = kind_of(ops)
    runs: dict[str, list[list[Attempt]]] = {"without": [], "estimate": [], "calibrated": []}
    for draw in range(DRAWS):
        chance = random.Random(f"{case.name}-{draw}")
        unseen = max(-0.02, chance.gauss(*_UNSEEN[kind]))
        truth = Truth(step, 1 + unseen, chance.randrange(0, 160 * MIB))
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = folder
            for limit in LIMITS:
                runs["without"].append(truth.search(limit, None))
                for name in ("estimate", "calibrated"):
                    measured = UNMEASURED if name == "estimate" else offsets_of("A100-80GB")
                    gpu = GpuFacts(generation="Ampere", measured=measured)
                    estimated = expectation(step, ops, gpu, limit, assumed=False)
                    runs[name].append(truth.search(limit, estimated))
                estimated.learn(DEVICE, runs["calibrated"][-1])
    return runs


def cell(searches: list[list[Attempt]]) -> str:
    counts = [len(attempts) for attempts in searches]
    failures = mean(sum(not each.fits for each in attempts) for attempts in searches)
    return f"{median(counts):.0f}, {mean(counts):.2f}, {max(counts)} / {failures:.2f}"


def main() -> None:
    rows = {case.name: simulate(case) for case in BASICS}
    rows["**all**"] = {
        name: [each for runs in rows.values() for each in runs[name]] for name in ("without", "estimate", "calibrated")
    }
    lines = [
        "# The probe's attempts with the estimate as prior: simulation",
        "",
        f"2026-11-21 · torch {torch.__version__} · Python {platform.python_version()} · `python {sys.argv[0]}`",
        "",
        f"{len(BASICS)} traced models x {len(LIMITS)} memory limits x {DRAWS} draws of what a GPU adds to a trace.",
        "Cells: median, mean and most attempts of a search to 1 % / mean failed attempts, without the final check.",
        "",
        "| model | without | estimate | calibrated |",
        "|---|---:|---:|---:|",
        *(f"| {name} | {' | '.join(map(cell, runs.values()))} |" for name, runs in rows.items()),
    ]
    text = "\n".join(lines) + "\n"
    (Path(__file__).parent / "results" / "prior_simulation.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
