"""The recipes end to end on this machine: is the recommendation as good as the best of a grid, and what did it cost?

    python tests/benchmarks/tune_live.py                 # both recipes; about 25 minutes on a quiet machine
    python tests/benchmarks/tune_live.py digits --seeds 3 --coarse
    python tests/benchmarks/tune_live.py digits --study-only --set budget.total=5m
    python tests/benchmarks/tune_live.py digits --load 2  # the study beside two programs that work in bursts

Runs the recipe's own study, then a grid of 8 batch sizes x 9 learning rates on the same target (a run ends at twice
the best time so far, so the grid is a cheap one), and then baseline, recommendation and the best of the grid on fresh
seeds, interleaved. Prints what share of the study's wall clock was neither the user's training nor evaluation, at the
end of a study of about five minutes, too. With `--load` Optuna's defaults search beside the same programs for as long
as the study took; the grid and the comparison have the machine for themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import optuna
import torch
from replay_curves import BURST_SECONDS, PAUSE_SECONDS

import batchtune
from batchtune.config.load import load_config
from batchtune.config.schema import Config
from batchtune.document import CurvePoint, Recommendation, Trial
from batchtune.observer import Observer
from batchtune.processes.worker import Worker
from batchtune.protocol.commands import OpenTask
from batchtune.protocol.messages import RunSpec
from batchtune.result import Result
from batchtune.tune.study.trials import TrialRun, run_trial
from batchtune.tune.verdict.scores import median_interval, ratio_interval

FIVE_MINUTES = ("charlm", ["budget.total=5m", "budget.run=30s", "objective.target=2.1"])  # no recipe takes as long
RECIPES = Path(__file__).parents[2] / "recipes"
RESULT = Path(__file__).parent / "results" / "tune_live.md"
BATCH_SIZES = tuple(8 * 2**octave for octave in range(8))
RATES = tuple(10 ** (half / 2) for half in range(-8, 1))
GRID_CAP = 2.0  # times the best run of the grid so far
GRID_FINALISTS, GRID_FINALIST_SEEDS = 3, 3  # a grid of single runs is won by luck; its best are run again
FRESH_SEED = 9_000_000


@dataclass(frozen=True, slots=True)
class Choice:
    """A configuration that is compared on fresh seeds."""

    name: str
    batch_size: int
    learning_rate: float


class Recipe:
    """A recipe's task on a worker, and its target once it is known."""

    def __init__(self, config: Config, worker: Worker) -> None:
        self.config, self._worker = config, worker
        self.target: float | None = None
        self.max_micro = 1

    def train(
        self, choice: Choice, seed: int, limit_seconds: float, goes_on: Callable[[CurvePoint], bool] = lambda _: True
    ) -> TrialRun:
        """One run until the target or the limit."""
        steps = -(-choice.batch_size // self.max_micro)
        spec = RunSpec(
            micro_batch_size=choice.batch_size // steps,
            accumulation_steps=steps,
            learning_rate=choice.learning_rate,
            precision=self._worker.start().precision[0][0],
            seed=seed,
            metric=self.config.objective.metric,
            goal=self.config.objective.goal,
            target=self.target,
            limit_seconds=limit_seconds,
            evaluate_every=None,
            evaluation_batch_size=min(self.max_micro, 1024),
            most_step_seconds=None,
        )
        return run_trial(self._worker, spec, goes_on, tolerant=True)


@contextlib.contextmanager
def other_programs(count: int) -> Iterator[None]:
    """So many other programs that keep a processor busy in bursts, for as long as the block runs."""
    burst = f"""
import random, time
while True:
    until = time.monotonic() + random.expovariate({1 / BURST_SECONDS})
    while time.monotonic() < until:
        pass
    time.sleep(random.expovariate({1 / PAUSE_SECONDS}))"""
    running = [subprocess.Popen([sys.executable, "-c", burst]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def search_by_default(recipe: Recipe, seconds: float) -> Choice:
    """What Optuna's defaults (TPE, MedianPruner by step) find in so many seconds of wall clock, the baseline first."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    config, until = recipe.config, time.perf_counter() + seconds
    rates = config.learning_rate.min, config.learning_rate.max
    largest = min(BATCH_SIZES[-1], recipe.max_micro)
    space = {
        "batch_size": optuna.distributions.IntDistribution(BATCH_SIZES[0], largest, log=True),
        "learning_rate": optuna.distributions.FloatDistribution(*rates, log=True),
    }
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), pruner=optuna.pruners.MedianPruner())
    study.enqueue_trial({name: getattr(config.baseline, name) for name in space})
    while time.perf_counter() < until:
        trial = study.ask(space)
        choice = Choice("Optuna's defaults", **trial.params)

        def goes_on(point: CurvePoint, trial: optuna.Trial = trial, choice: Choice = choice) -> bool:
            if not point.samples or point.value is None:
                return True
            trial.report(point.value, point.samples // choice.batch_size)
            return not trial.should_prune() and time.perf_counter() < until

        run = recipe.train(choice, FRESH_SEED - 10_000 - trial.number, config.budget.run, goes_on)
        took = (run.curve[-1].measured_seconds or run.training_seconds) if run.curve else config.budget.run
        if run.outcome == "pruned":
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            study.tell(trial, took if run.outcome == "reached" else config.budget.run)
    return Choice("Optuna's defaults", **study.best_params)


def search_grid(recipe: Recipe, *, coarse: bool) -> tuple[Choice, float]:
    """The best of the grid (of a quarter of it where it is coarse), and the training seconds that it cost."""
    step = 2 if coarse else 1
    points = [Choice("best of the grid", size, rate) for size in BATCH_SIZES[::step] for rate in RATES[::step]]
    random.Random(0).shuffle(points)
    times: dict[Choice, list[float]] = {}
    best, spent = recipe.config.budget.run, 0.0
    for number, point in enumerate(points):
        run = recipe.train(point, FRESH_SEED - 1 - number, min(recipe.config.budget.run, GRID_CAP * best))
        spent += run.training_seconds
        if run.outcome == "reached":
            times[point] = [run.training_seconds]
            best = min(best, run.training_seconds)
    leaders = sorted(times, key=lambda point: times[point][0])[:GRID_FINALISTS]
    for number in range(GRID_FINALIST_SEEDS - 1):
        for point in leaders:
            run = recipe.train(point, FRESH_SEED - 1000 - number, recipe.config.budget.run)
            spent += run.training_seconds
            times[point].append(run.training_seconds)
    return min(leaders, key=lambda point: statistics.median(times[point])), spent


def compare(recipe: Recipe, choices: list[Choice], seeds: int) -> dict[str, list[float]]:
    """Seconds to target of each choice on fresh seeds, taking turns; a run that misses counts with its limit."""
    times: dict[str, list[float]] = {choice.name: [] for choice in choices}
    for number in range(seeds):
        for choice in choices:
            run = recipe.train(choice, FRESH_SEED + number, 2 * recipe.config.budget.run)
            times[choice.name].append(run.training_seconds)
    return times


class Stopwatch(Observer):
    """When the first run of a study began and the last one ended, in seconds from the study's start."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.first_run: float | None = None
        self.last_run = 0.0
        self.timing: float | None = None  # when the probe began to time steps, which prior and first run follow

    @property
    def now(self) -> float:
        return time.perf_counter() - self._started

    def stage(self, name: str) -> None:
        self.timing = self.now if name == "timing steps" else self.timing

    def trial_started(self, trial: Trial, *, best_seconds: float | None) -> None:
        self.first_run = self.now if self.first_run is None else self.first_run

    def trial_ended(self, trial: Trial, *, done: int, seconds_left: float) -> None:
        self.last_run = self.now


def shares(result: Result, watch: Stopwatch) -> dict[str, float]:
    """Where the study's wall clock went, in seconds; `rest` is neither training nor evaluation, and holds the others.

    `around` is what lies before the first and after the last run; attempts, timed steps, loading, noise scale and range
    test are the `steps` of it.
    """
    trials, probe = result.trials or [], result.probe
    assert probe is not None
    assert watch.first_run is not None
    wall_seconds = watch.now
    seconds = [trial.measured_training_seconds or trial.training_seconds or 0.0 for trial in trials]
    training = sum(seconds)
    evaluating = sum(trial.evaluation_seconds or 0.0 for trial in trials)
    around = watch.first_run + wall_seconds - watch.last_run
    steps = sum(attempt.seconds for attempt in probe.attempts)  # those of the prior are within what follows
    steps += watch.first_run - (watch.timing if watch.timing is not None else watch.first_run)
    return {
        "seconds": wall_seconds,
        "training_seconds": training,
        "evaluation_seconds": evaluating,
        "rest_seconds": wall_seconds - training - evaluating,
        "around_seconds": around,
        "steps_seconds": steps,
        "seconds_of_each_run": (wall_seconds - around - training - evaluating) / len(trials),
    }


def overhead(result: Result, watch: Stopwatch) -> str:
    """Where the study's wall clock went, in a sentence."""
    spent, trials = shares(result, watch), result.trials or []
    wall_seconds, rest = spent["seconds"], spent["rest_seconds"]
    without = f"{(rest - spent['steps_seconds']) / wall_seconds:.1%} without these"
    parts = {"training": spent["training_seconds"], "evaluation": spent["evaluation_seconds"], "neither": rest}
    told = ", ".join(f"{what} {part:.1f} s ({part / wall_seconds:.1%})" for what, part in parts.items())
    return (
        f"Study: {wall_seconds:.0f} s of wall clock, {len(trials)} runs, {sum(len(trial.curve) for trial in trials)} "
        f"evaluations: {told} (goal: neither for at most 5 % of 5 minutes). That is {spent['around_seconds']:.1f} s "
        f"before the first and after the last run, of which attempts, timed steps, loading, noise scale and range test "
        f"took {spent['steps_seconds']:.1f} s ({without}), and {spent['seconds_of_each_run']:.2f} s with each run, its "
        f"warm-up steps included."
    )


def report_recipe(
    name: str, seeds: int, overrides: list[str], *, coarse: bool, study_only: bool, programs: int = 0
) -> str:
    """A recipe's section of the report."""
    config = load_config(RECIPES / name / "config.yaml", overrides)
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder, other_programs(programs):
        result = batchtune.tune(config, fresh=True, observer=watch, run_folders=folder)
    spent = overhead(result, watch)
    found, probe = result.recommendation, result.probe
    assert isinstance(found, Recommendation)
    assert probe is not None
    assert result.target is not None
    if study_only:
        return f"## {name}\n\n{spent}"
    settings = OpenTask(task=config.task, device=config.device, purpose="tune", margin=config.memory.margin)
    with Worker(settings) as worker:
        worker.start()
        recipe = Recipe(config, worker)
        recipe.target, recipe.max_micro = result.target.value, probe.max_batch_size or 1
        defaults = []
        if programs:
            with other_programs(programs):
                defaults = [search_by_default(recipe, watch.last_run)]
        best, grid_seconds = search_grid(recipe, coarse=coarse)
        base = config.baseline
        choices = [
            Choice("baseline", base.batch_size, base.learning_rate),
            Choice("recommended", found.global_batch_size, found.learning_rate or base.learning_rate),
            *defaults,
            best,
        ]
        times = compare(recipe, choices, seeds)
    searched = sum(trial.training_seconds or 0.0 for trial in result.trials or [] if trial.role == "search")
    everything = sum(trial.training_seconds or 0.0 for trial in result.trials or [])
    beside = f" beside {programs} other programs" if programs else ""
    lines = [
        f"## {name}{beside}",
        "",
        f"Target: {config.objective.metric} {recipe.target:.4g} ({result.target.reason}).",
        "",
    ]
    lines += ["| configuration | batch size | learning rate | seconds to target (90 % interval) | baseline takes |"]
    lines += ["|---|---:|---:|---:|---:|"]
    for choice in choices:
        its, gain = median_interval(times[choice.name]), ratio_interval(times["baseline"], times[choice.name])
        lines.append(
            f"| {choice.name} | {choice.batch_size} | {choice.learning_rate:.3g} | {its.median:.2f} ({its.low:.2f} to "
            f"{its.high:.2f}) | {gain.median:.2f} × ({gain.low:.2f} to {gain.high:.2f}) |"
        )
    against = ratio_interval(times["recommended"], times[best.name])
    ratio = f"{against.median:.2f} ({against.low:.2f} to {against.high:.2f})"
    lines += [
        "",
        f"Time of the recommendation over that of the grid's best: {ratio}. Training seconds: the study's search",
    ]
    lines += [f"{searched:.0f}, all of the study {everything:.0f}, the grid {grid_seconds:.0f}.", ""]
    lines.append(spent)
    return "\n".join(lines)


def main() -> None:
    """Runs the recipes, prints the report and keeps it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["digits", "charlm"])
    parser.add_argument("--seeds", type=int, default=7, help="fresh seeds of the comparison")
    parser.add_argument("--coarse", action="store_true", help="every second batch size and learning rate of the grid")
    parser.add_argument("--study-only", action="store_true", help="no grid and no comparison; nothing is kept")
    parser.add_argument("--load", type=int, default=0, metavar="N", help="other programs beside the studies")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="laid over the recipe's keys")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "optuna"))
    command = " ".join(["python tests/benchmarks/tune_live.py", *sys.argv[1:]])
    where = f"batchtune {batchtune.__version__}, Python {platform.python_version()}, {versions}"
    threads = f"{torch.get_num_threads()} threads"
    head = f"{dt.datetime.now(dt.UTC).date()}, {where}, {threads}. Command: `{command}`"
    sections = [f"# The recipes on this machine\n\n{head}"]
    for name in arguments.recipes:
        options = {"coarse": arguments.coarse, "study_only": arguments.study_only, "programs": arguments.load}
        sections.append(report_recipe(name, arguments.seeds, arguments.set, **options))
        print(sections[-1], flush=True)
    if not arguments.study_only and not arguments.load:
        name, longer = FIVE_MINUTES
        sections.append(report_recipe(name, 0, longer, coarse=False, study_only=True))
        sections[-1] = sections[-1].replace(f"## {name}", f"## A longer study: {name}, {' '.join(longer)}")
        print(sections[-1], flush=True)
        arguments.output.write_text("\n\n".join(sections) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
