"""Training to a target on one rank and on two, in turn, beside what `batchtune.tune.scaling` makes of their step times.

    python tests/benchmarks/ranks_scaling.py [--rounds 3]

Each round times steps of one rank and of the group, and trains both on one seed; on a busy machine only ratios of a
round say something. It prints a table for `tests/benchmarks/results/ranks.md`.
"""

import argparse
import os
import statistics
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from batchtune.document import Interval, ProbeResult, Recommendation, Target, ThroughputFit, Trial
from batchtune.observer import Observer
from batchtune.probe.timing.steps import data_parallel, measure_times
from batchtune.processes.ranks import RankLauncher
from batchtune.processes.worker import Worker
from batchtune.protocol.commands import OpenTask, TimeSteps
from batchtune.protocol.messages import RunSpec
from batchtune.tune.scaling import scaling
from batchtune.tune.study.targets import measured
from batchtune.tune.study.trials import run_trial

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait spinning slow those of other processes
ROOT = Path(__file__).resolve().parents[2]
RECIPES = {"digits": (32, 0.01, 0.5), "charlm": (32, 0.0133, 2.6)}  # batch, learning rate, validation loss
SECONDS, LIMIT = 1.0, 60.0


def step_seconds(worker, size):
    """Of an optimizer step."""
    return worker.call(TimeSteps(batch_size=size, precision="fp32", seconds=SECONDS), timeout=300).step_seconds


def estimate(alone, group, batch, rate, seconds):
    """The time on two ranks that would be told of `seconds` on one."""
    half, whole = step_seconds(alone, batch // 2), step_seconds(alone, batch)
    slope = max(0.0, (whole - half) / (batch - batch // 2))
    fit = ThroughputFit(alpha_seconds=max(0.0, whole - slope * batch), beta_seconds_per_sample=slope)
    probe = ProbeResult(precision="fp32", max_batch_size=batch, throughput_fit=fit)
    times = measure_times(group, Observer(), TimeSteps(batch_size=batch // 2, precision="fp32", seconds=SECONDS), 300)
    ranks = data_parallel(group.opened, batch // 2, 1, None, times)
    found = Recommendation(
        micro_batch_size=batch,
        global_batch_size=batch,
        learning_rate=rate,
        precision="fp32",
        time_to_target_seconds=Interval(median=seconds, low=seconds, high=seconds),
        reason="",
    )
    ran = {"batch_size": batch, "learning_rate": rate, "precision": "fp32", "time_to_target_seconds": seconds}
    trial = Trial(number=0, state="complete", role="confirm", seed=0, **ran)
    return scaling([trial], found, probe, ranks).points[1].time_to_target_seconds.median


def train(worker, spec, target):
    """Seconds of training until the target; None where it was not reached."""
    run = run_trial(worker, spec, lambda _: True)
    return measured(run.curve, run.outcome, target).get("time_to_target_seconds")


def rounds(recipe, count):
    """Of each round: seconds on one rank, on two, and the estimate for two."""
    batch, rate, value = RECIPES[recipe]
    target = Target(metric="val_loss", goal="minimize", value=value)
    settings = OpenTask(task=str(ROOT / "recipes" / recipe / "model.py"), device="cpu", purpose="tune")
    settings = settings.but(precision=("fp32",), metric="val_loss")
    one = RunSpec(
        micro_batch_size=batch,
        accumulation_steps=1,
        learning_rate=rate,
        precision="fp32",
        seed=0,
        metric="val_loss",
        goal="minimize",
        target=value,
        limit_seconds=LIMIT,
        evaluate_every=None,
        evaluation_batch_size=256,
    )
    with ExitStack() as opened:
        alone = opened.enter_context(Worker(settings))
        group = opened.enter_context(Worker(settings, RankLauncher(2, "ddp")))
        alone.start(), group.start()
        for seed in range(count):
            spec = replace(one, seed=seed)
            first = train(alone, spec, target)
            second = train(group, replace(spec, micro_batch_size=batch // 2, world_size=2), target)
            yield first, second, estimate(alone, group, batch, rate, first or LIMIT)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print("| recipe | round | one rank, s | two, s | two / one | estimated two / one | estimate / measured |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for recipe in RECIPES:
        off = []
        for number, (one, two, told) in enumerate(rounds(recipe, given.rounds), 1):
            if one is None or two is None:
                print(f"| {recipe} | {number} | {one} | {two} | target not reached | | |", flush=True)
                continue
            off.append(told / two)
            row = f"{one:.2f} | {two:.2f} | {two / one:.2f} | {told / one:.2f} | {told / two:.2f}"
            print(f"| {recipe} | {number} | {row} |", flush=True)
        if off:
            print(f"| {recipe} | median | | | | | {statistics.median(off):.2f} |", flush=True)


if __name__ == "__main__":
    main()
