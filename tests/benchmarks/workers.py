"""Workers and storages of `tune`: trials a minute with one and two workers, and what a trial costs besides training.

Two workers are compared with one on a task that sleeps instead of computing, so that they do not share processors. The
cost of a trial is measured with a worker that answers at once: what is left is asking, telling and keeping, after so
many trials. What the sampler takes of it to propose one (Optuna's TPE, since only a search for the best metric has so
many trials) is told apart. Run: `python tests/benchmarks/workers.py [postgresql+psycopg://…]`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from optuna.samplers import BaseSampler
from replay_tuners import OneWorker

import batchtune
from batchtune.config.schema import Config
from batchtune.document import CurvePoint, Prior, ProbeResult, ThroughputFit, Trial
from batchtune.observer import Observer
from batchtune.protocol.commands import Train
from batchtune.protocol.messages import RunEnd
from batchtune.tune.plan.space import Plan
from batchtune.tune.study.phases import TuneStudy
from batchtune.tune.study.storage import open_storage

SLEEPING = """
import time
import torch
from torch import nn

def build_model():
    return nn.Linear(4, 1)

def train_dataset():
    return [torch.ones(4)] * 4096

def val_dataset():
    return [torch.ones(4)] * 8

def compute_loss(model, batch):
    time.sleep(0.02)
    return model(batch).square().mean() + 1.0
"""

WHAT = (
    "asking, telling, keeping, ms a trial",
    "the sampler's proposal, ms a trial",
    "together, ms a trial",
    "of which this process worked, ms",
)


class Stopwatch(Observer):
    """When runs of the search begin and end; what this process has worked by then, and what its sampler has taken."""

    def __init__(self) -> None:
        self.begun: list[float] = []
        self.ended: list[float] = []
        self.worked: list[float] = []
        self.proposed: list[float] = []
        self._proposing = 0.0

    def watch(self, sampler: BaseSampler) -> None:
        """Counts the time of a sampler's methods from now on."""
        for name in ("infer_relative_search_space", "sample_relative", "sample_independent"):
            setattr(sampler, name, partial(self._timed, getattr(sampler, name)))

    def _timed(self, method: Callable[..., Any], *arguments: Any) -> Any:
        began = time.monotonic()
        try:
            return method(*arguments)
        finally:
            self._proposing += time.monotonic() - began

    def trial_started(self, trial: Trial, *, best_seconds: float | None) -> None:
        if trial.role == "search":
            self.begun.append(time.monotonic())

    def trial_ended(self, trial: Trial, *, done: int, seconds_left: float) -> None:
        if trial.role == "search":
            self.ended.append(time.monotonic())
            self.worked.append(time.process_time())
            self.proposed.append(self._proposing)


def trials_per_minute(workers: int) -> float:
    """Of a search whose runs all take budget.run."""
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder, "sleeping.py")
        task.write_text(SLEEPING)
        config = Config.model_validate(
            {
                "task": str(task),
                "device": "cpu",
                "batch_size": {"max": 64},
                "objective": {"kind": "best_metric"},
                "budget": {"run": "3s", "total": "10m", "trials": 12},
                "confirm": False,
                "workers": workers,
            }
        )
        watch = Stopwatch()
        batchtune.tune(config, observer=watch, run_folders=folder)
    return 60 * len(watch.ended) / (max(watch.ended) - min(watch.begun))


class Instant:
    """A worker whose runs have no duration."""

    def call(self, command: Train, *, timeout: float, on_event: Any) -> RunEnd:
        for point in ({"seconds": 0.0, "samples": 0, "value": 2.0}, {"seconds": 1.0, "samples": 99, "value": 1.0}):
            on_event(CurvePoint(**point))
        return RunEnd("finished")


def cost_of_trials(url: str | None, sizes: list[int]) -> dict[int, tuple[float, ...]]:
    """Median seconds of the ten trials up to each number of trials: see `WHAT`."""
    config = Config.model_validate(
        {
            "task": "instant.py",
            "name": f"cost-{time.time_ns()}",
            "objective": {"kind": "best_metric"},
            "budget": {"run": "1s", "total": "10h", "trials": max(sizes)},
            "confirm": False,
        }
    )
    fit = ThroughputFit(alpha_seconds=0.01, beta_seconds_per_sample=0.001)
    plan = Plan(
        config=config,
        probe=ProbeResult(precision="fp32", max_batch_size=64, throughput_fit=fit),
        prior=Prior(
            batch_sizes=[16, 32, 64],
            batch_sizes_reason="given",
            learning_rate=1e-3,
            learning_rate_decades=0.7,
            learning_rate_reason="given",
        ),
        precisions=["fp32"],
    )
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        pool: Any = OneWorker(Instant())
        study = TuneStudy(plan, pool, open_storage(url, Path(folder)), watch)
        watch.watch(study.parts.study.sampler)
        study.run()
    by_clock, by_processor, proposing = (
        [after - before for before, after in itertools.pairwise(moments)]
        for moments in (watch.ended, watch.worked, watch.proposed)
    )
    kept = [whole - proposal for whole, proposal in zip(by_clock, proposing, strict=True)]
    return {
        size: tuple(
            statistics.median(steps[max(0, size - 11) : size - 1])
            for steps in (kept, proposing, by_clock, by_processor)
        )
        for size in sizes
        if size <= len(watch.ended)
    }


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("storage", nargs="?", help="a database to measure besides the journal")
    parser.add_argument("--without-workers", action="store_true")
    parser.add_argument("--trials", type=int, nargs="+", default=[10, 100, 1_000, 2_000])
    given = parser.parse_args()
    if not given.without_workers:
        one, two = trials_per_minute(1), trials_per_minute(2)
        print(f"trials a minute: 1 worker {one:.1f}, 2 workers {two:.1f} ({two / one:.2f} times as many)\n")
    print("| trials | " + " | ".join(f"{size:,}" for size in given.trials) + " |\n|---|" + "---:|" * len(given.trials))
    for name, url in {"journal": None, "database": given.storage}.items():
        if name == "journal" or url:
            found = cost_of_trials(url, given.trials)
            for number, what in enumerate(WHAT):
                cells = " | ".join(f"{1000 * each[number]:.1f}" for each in found.values())
                print(f"| {name}, {what} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
