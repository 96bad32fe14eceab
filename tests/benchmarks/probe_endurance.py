"""200 attempts in one worker, OOM and success in turn: is the boundary where a fresh process finds it, is memory flat?

    python tests/benchmarks/probe_endurance.py

writes tests/benchmarks/results/probe_endurance.md, and ends with 1 where a check fails. Sizes are drawn anew for every
attempt, as a search would: successes from 40 to 70 % of the boundary, OOMs from 150 to 250 %.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import os
import platform
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from batchtune.protocol.commands import TryBatchSize

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from fixtures.children import Recorded
from probe_methods import STEPS, TASK_FILE, TOLERANCE
from probe_peers import ENVIRONMENT, MIB, boundary
from probe_tasks import TASKS

from batchtune import __version__
from batchtune.processes.worker import Worker
from batchtune.protocol.commands import OpenTask

ATTEMPTS = 200
FLAT_MIB = 8  # growth of the parent over all attempts; a tensor's worth, or an object an attempt, would be more
KERNELS_MIB = 64  # growth of the child: oneDNN keeps its kernels for each new size, of the last thousand
MODELS = ("Mlp", "ConvNet", "Contrastive")


@dataclass(frozen=True)
class Endured:
    """One model's figures; memory is resident, in MiB, before and after the attempts."""

    model: str
    surprises: int  # attempts that came to something else than their size lets expect
    replaced: bool  # the child, for an OOM had broken a library in it
    fresh: tuple[int, int]
    worn: int
    parent: tuple[float, float]
    child: tuple[float, float]

    def problems(self) -> list[str]:
        low, high = self.fresh
        found = []
        if self.surprises:
            found.append(f"{self.surprises} attempts came to something else than expected")
        if not low * (1 - TOLERANCE) - 1 <= self.worn <= high * (1 + TOLERANCE) + 1:
            found.append("the boundary moved")
        memory = {"parent": (*self.parent, FLAT_MIB), "child": (*self.child, KERNELS_MIB)}
        return found + [
            f"the {who}'s memory grew" for who, (before, after, most) in memory.items() if after > before + most
        ]

    def row(self) -> str:
        fresh = " to ".join(f"{size:,}" for size in sorted(set(self.fresh)))
        memory = [f"{before:.1f} | {after:.1f}" for before, after in (self.parent, self.child)]
        replaced = "yes" if self.replaced else "no"
        cells = [self.model, fresh, f"{self.worn:,}", *memory, replaced, "; ".join(self.problems()) or "none"]
        return f"| {' | '.join(cells)} |"


def resident_mib(pid: int | str) -> float:
    gc.collect()
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


def fits(worker: Worker, size: int) -> bool:
    answer = worker.call(TryBatchSize(batch_size=size, steps=STEPS, precision="fp32"), timeout=120)
    return answer.attempt.fits


def endure(model: str) -> Endured:
    settings = OpenTask(
        task=f"{TASK_FILE}:{model}", device="cpu", memory_limit=TASKS[model].limit_mib * MIB, precision=("fp32",)
    )
    draw = random.Random(0)

    def fits_in_a_fresh_process(size: int) -> bool:
        with Worker(settings) as fresh:
            return fits(fresh, size)

    first = boundary(fits_in_a_fresh_process, 256)
    again = boundary(fits_in_a_fresh_process, first - first // 9)
    with Worker(settings, launcher := Recorded()) as worker:
        expected = [(True, int(first * draw.uniform(0.4, 0.7))), (False, int(first * draw.uniform(1.5, 2.5)))]
        surprises = sum(
            fits(worker, size) != fit for fit, size in expected
        )  # what is kept from the first is not a leak
        pid, parent, child = launcher.pids[-1], resident_mib("self"), resident_mib(launcher.pids[-1])
        for _ in range(ATTEMPTS // 2):
            surprises += fits(worker, int(first * draw.uniform(1.5, 2.5)))
            surprises += not fits(worker, int(first * draw.uniform(0.4, 0.7)))
        replaced = launcher.pids[-1] != pid
        memory = (parent, resident_mib("self")), (child, resident_mib(launcher.pids[-1]))
        tried: Callable[[int], bool] = lambda size: fits(worker, size)  # noqa: E731
        return Endured(
            model, surprises, replaced, (min(first, again), max(first, again)), boundary(tried, first), *memory
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(TASKS)}")
    given = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    facts = [str(dt.datetime.now(tz=dt.UTC).date()), f"batchtune {__version__}", f"Python {platform.python_version()}"]
    lines = [
        f"# {ATTEMPTS} attempts in one worker, OOM and success in turn",
        "",
        f"{' · '.join(facts)} · `python {' '.join(sys.argv)}`",
        "",
        f"Boundary: largest size that trains {STEPS} steps; it may move by {TOLERANCE:.0%}. Resident memory (MiB) may",
        f"grow by {FLAT_MIB} in the parent, and by {KERNELS_MIB} in the child, where oneDNN keeps its kernels for each",
        "new size. A child is replaced where an OOM has broken a library in it.",
        "",
        "| model | fresh boundary | after | parent before | after | child before | after | replaced | problems |",
        "|---|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    print("\n".join(lines), flush=True)
    found = []
    for model in given.models.split(","):
        found.append(endure(model))
        lines.append(found[-1].row())
        print(lines[-1], flush=True)
    if given.models == ",".join(MODELS):
        (Path(__file__).parent / "results" / "probe_endurance.md").write_text("\n".join(lines) + "\n")
    sys.exit(any(each.problems() for each in found))


if __name__ == "__main__":
    main()
