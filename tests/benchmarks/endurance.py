"""2,000 attempts in one worker and 1,000 trials in one `tune`: do memory, files, processes or processor time grow?

    python tests/benchmarks/endurance.py [--attempts N] [--trials N]

writes tests/benchmarks/results/endurance.md, and ends with 1 where something grew. The task is tiny, so that what is
left is what batchtune itself does and keeps. Every fourth attempt is far beyond the memory limit. Processor time, not
wall time, so that a busy machine does not matter. `probe_endurance.py` asks whether the boundary moves.
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import os
import platform
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

import batchtune
from batchtune.config.schema import Config
from batchtune.document import Trial
from batchtune.observer import Observer
from batchtune.processes.worker import Worker
from batchtune.protocol.commands import OpenTask, TryBatchSize

FLAT_MIB = 20.0  # by which a process may change between the second and the last tenth
FLAT_TIMES = 1.5  # by which the processor time of one may grow
BEYOND = 1 << 26  # samples; 2 GiB
RESULTS = Path(__file__).parent / "results" / "endurance.md"
ABOUT = f"""\
By tenths: medians of resident memory, most open files and processes, mean processor time of parent and child. Flat is,
from the second tenth to the last: memory within {FLAT_MIB:.0f} MiB, as many files and processes, processor time within
{FLAT_TIMES:g} times.\
"""
TASK = """
import torch
from torch import nn

def build_model():
    return nn.Linear(8, 1)

def train_dataset():
    return [torch.ones(8)] * 4096

def val_dataset():
    return [torch.ones(8)] * 8

def make_batch(batch_size):
    return torch.ones(batch_size, 8)

def compute_loss(model, batch):
    return model(batch).square().mean()
"""


@dataclass(frozen=True, slots=True)
class Look:
    """What parent and children hold at one moment: resident MiB, files, processes; and their processor seconds."""

    parent_mib: float
    children_mib: float
    files: int
    processes: int
    seconds: float

    @classmethod
    def now(cls) -> Look:
        me = psutil.Process()
        family = me.children(recursive=True)
        times = [process.cpu_times() for process in (me, *family)]
        mib = [process.memory_info().rss / 2**20 for process in (me, *family)]
        seconds = sum(each.user + each.system for each in times)
        return cls(mib[0], sum(mib[1:]), me.num_fds(), 1 + len(family), seconds)


class Watch(Observer):
    """Looks after every trial."""

    def __init__(self) -> None:
        self.looks: list[Look] = []

    def trial_ended(self, trial: Trial, *, done: int, seconds_left: float) -> None:
        self.looks.append(Look.now())


def attempts(number: int, task: str) -> list[Look]:
    """Looks after each of so many attempts, three that fit and one out-of-memory error in turn."""
    looks = []
    with Worker(OpenTask(task=task, device="cpu", memory_limit=1 << 30, precision=("fp32",))) as worker:
        for size in itertools.islice(itertools.cycle((8, 64, 512, BEYOND)), number):
            answer = worker.call(TryBatchSize(batch_size=size, steps=3, precision="fp32"), timeout=600)
            outcome = answer.attempt.outcome
            if outcome != ("oom" if size == BEYOND else "fit"):
                sys.exit(f"batch size {size} came to {outcome}")
            looks.append(Look.now())
    return looks


def trials(number: int, task: str) -> list[Look]:
    """Looks after each of so many runs of a search."""
    config = Config.model_validate(
        {
            "task": task,
            "device": "cpu",
            "batch_size": {"max": 64},
            "objective": {"kind": "best_metric"},
            "budget": {"run": "5ms", "total": "10h", "trials": number},
            "confirm": False,
        }
    )
    watch = Watch()
    batchtune.tune(config, observer=watch, run_folders=Path(task).parent / "runs")
    return watch.looks


def rows(looks: list[Look]) -> list[tuple[float, ...]]:
    """By tenths: medians of memory, most files and processes, median milliseconds of one."""
    tenth, found = max(1, len(looks) // 10), []
    costs = [1000 * (after.seconds - before.seconds) for before, after in itertools.pairwise(looks)]
    for end in range(tenth, len(looks) + 1, tenth):
        part = looks[end - tenth : end]
        memory = [statistics.median(getattr(look, name) for look in part) for name in ("parent_mib", "children_mib")]
        most = [max(getattr(look, name) for look in part) for name in ("files", "processes")]
        found.append((end, *memory, *most, statistics.mean(costs[max(0, end - tenth - 1) : end - 1])))
    return found


def is_flat(table: list[tuple[float, ...]]) -> bool:
    """Compares the last tenth with the second: the first loads what is loaded once."""
    (_, *first), (_, *last) = table[1], table[-1]
    memory = all(abs(last[each] - first[each]) <= FLAT_MIB for each in (0, 1))
    return memory and last[2:4] == first[2:4] and last[4] <= FLAT_TIMES * first[4]


def section(name: str, looks: list[Look]) -> tuple[str, bool]:
    """The table of one kind of work, and whether all is flat."""
    table = rows(looks)
    lines = [
        f"## {len(looks):,} {name}: {'flat' if is_flat(table) else 'NOT FLAT'}",
        "",
        f"| {name} | parent MiB | child MiB | open files | processes | processor ms of one |",
        "|---:|---:|---:|---:|---:|---:|",
        *(f"| {n:,} | {a:.1f} | {b:.1f} | {c} | {d} | {e:.0f} |" for n, a, b, c, d, e in table),
    ]
    return "\n".join(lines), is_flat(table)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--attempts", type=int, default=2_000)
    parser.add_argument("--trials", type=int, default=1_000)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    facts = [str(dt.datetime.now(tz=dt.UTC).date()), f"batchtune {batchtune.__version__}"]
    text = [
        "# Long runs",
        f"{' · '.join(facts)} · Python {platform.python_version()} · `python {' '.join(sys.argv)}`",
        ABOUT,
    ]
    flat = True
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder, "linear.py")
        task.write_text(TASK)
        for name, work, number in (("attempts", attempts, given.attempts), ("trials", trials, given.trials)):
            found, is_good = section(name, work(number, str(task)))
            text, flat = [*text, found], flat and is_good
            RESULTS.write_text("\n\n".join(text) + "\n")
            print(found, flush=True)
    sys.exit(not flat)


if __name__ == "__main__":
    main()
