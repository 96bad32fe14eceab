"""What the record says about a run that nobody recorded: between its learning rates, beyond its end, at its own pace.

Batch sizes are snapped to the record's half octaves. Between two learning rates a run is the nearer one's curve, its
steps stretched so that its time to target is the log-linear mean of both; where one of them never reaches the target,
it is the nearer one as it is. Below the lowest learning rate steps count in proportion to the rate (gradient flow), and
in the same way a run that was still falling when its record ended is foretold from the lowest rate that got there.
A run that settled above the target stays where it was. Between evaluations, values are linear in log steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from batchtune.child.timing import StepClock
from batchtune.child.training_run import MOST_WAITING, Divergence, RunSpec, next_evaluation
from batchtune.document import CurvePoint

DATA = Path(__file__).parent / "data"
SLOWER = 100.0  # than measured: the tasks are small, and stand for trainings whose runs last seconds; ratios count
HORIZON = 1.5  # times the baseline's median time to target: how long the record and a study's longest run last
BASELINE_BATCH_SIZE = 32
RANGE_TEST_RATES = np.geomspace(1e-6, 10, 100)
SETTLED_POINTS, SETTLED_GAIN = 16, 0.01  # a run gained so little of the way to the target while steps grew threefold
BURST_SECONDS, PAUSE_SECONDS = 4.0, 2.0  # of another program, in the mean: it is busy for two thirds of the time
SLOWER_BY_EACH = 0.75  # of a step's time, while it is: two threads on two processors wait for one another
WARM_UP_STEPS = 3
WAITED_SHARE = 0.5  # of what load adds, the thread that trains waits for a processor, and the rest for the other thread
JITTER = 0.05  # of a stretch's time under load (standard deviation of its logarithm)


class Load:
    """Other programs on the machine, which work in bursts and slow training down meanwhile; it keeps the time.

    Args:
        programs: how many; with none, everything takes as long as it says.
        seed: of their bursts.
    """

    def __init__(self, programs: int = 0, seed: int = 0) -> None:
        self.now = 0.0
        self._random = np.random.default_rng([programs, seed])
        shares = BURST_SECONDS / (BURST_SECONDS + PAUSE_SECONDS)
        self._busy = [bool(self._random.random() < shares) for _ in range(programs)]
        self._until = [self._spell(busy=busy) for busy in self._busy]

    def take(self, seconds: float) -> tuple[float, float]:
        """Does what takes so long on a quiet machine; returns how long it took, and what the first thread waited."""
        own = seconds * (math.exp(self._random.normal(0, JITTER)) if self._busy else 1.0)
        began, left = self.now, own
        while left > 0:
            slower = 1 + SLOWER_BY_EACH * sum(self._busy)
            spell = min(left * slower, min(self._until, default=math.inf) - self.now)
            left -= spell / slower if spell < left * slower else left
            self.now += spell
            for number, until in enumerate(self._until):
                if until <= self.now:
                    self._busy[number] = not self._busy[number]
                    self._until[number] = self.now + self._spell(busy=self._busy[number])
        return self.now - began, WAITED_SHARE * max(0.0, self.now - began - own) if self._busy else 0.0

    def _spell(self, *, busy: bool) -> float:
        return float(self._random.exponential(BURST_SECONDS if busy else PAUSE_SECONDS))


@dataclass(frozen=True)
class RecordedRun:
    """One curve of the record.

    Attributes:
        log_steps: log(1 + optimizer steps) of its evaluations.
        values: the losses there; inf at its end where it diverged.
        steps_to_target: inf where the target is out of reach.
    """

    log_steps: np.ndarray
    values: np.ndarray
    steps_to_target: float

    def value(self, steps: float) -> float:
        """The loss after so many steps; the last one stays."""
        return float(np.interp(math.log1p(steps), self.log_steps, self.values))


class Record:
    """The recorded learning curves of one task.

    Args:
        name: of the task.
        target: None for the target that the record was made for; a higher one can be replayed as well.
    """

    def __init__(self, name: str, target: float | None = None) -> None:
        self.name = name
        with np.load(DATA / f"{name}.npz") as stored:
            self._stored: dict[str, Any] = dict(stored)
        times = json.loads((DATA / "times.json").read_text())[name]
        self.alpha_seconds: float = SLOWER * times["alpha_seconds"]
        self.beta_seconds: float = SLOWER * times["beta_seconds_per_sample"]
        self.evaluation_seconds: float = SLOWER * times["evaluation_seconds"]
        self.noise_scale: float = times["noise_scale_samples"]
        self.rates: np.ndarray = self._stored["rates"]
        self.batch_sizes = sorted(int(key.removeprefix("steps_")) for key in self._stored if key.startswith("steps_"))
        self.target = float(self._stored["target"]) if target is None else target
        self.seeds: int = self._stored[f"curves_{self.batch_sizes[0]}"].shape[1]
        self._rows: dict[tuple[int, int], list[RecordedRun]] = {}

    def step_seconds(self, batch_size: int) -> float:
        """Seconds of an optimizer step."""
        return self.alpha_seconds + self.beta_seconds * batch_size

    @property
    def longest_run_seconds(self) -> float:
        """What a user who knows the baseline's time to target gives a single run."""
        return HORIZON * float(self._stored["baseline_steps"]) * self.step_seconds(BASELINE_BATCH_SIZE)

    def range_test(self, batch_size: int, seed: int) -> np.ndarray:
        """Training losses of a learning rate range test."""
        return np.asarray(self._stored[f"range_test_{batch_size}"][seed % self.seeds], dtype=float)

    def snapped(self, batch_size: int) -> int:
        """The nearest batch size of the record."""
        return min(self.batch_sizes, key=lambda size: abs(math.log(size / batch_size)))

    def run(self, batch_size: int, rate: float, seed: int) -> tuple[RecordedRun, float]:
        """The curve that a configuration follows, and how many of its own steps make one of that curve's."""
        row = self._row(self.snapped(batch_size), seed % self.seeds)
        place = (math.log10(rate) - math.log10(self.rates[0])) / 0.25
        if place <= 0:
            return row[0], float(self.rates[0] / rate)
        low = min(int(place), len(row) - 1)
        share, high = place - low, min(low + 1, len(row) - 1)
        near = row[low] if share < 0.5 else row[high]
        times = (row[low].steps_to_target, row[high].steps_to_target)
        if not all(map(math.isfinite, times)) or high == low:
            return near, 1.0
        mean = math.exp((1 - share) * math.log(times[0]) + share * math.log(times[1]))
        return near, mean / near.steps_to_target

    def _row(self, batch_size: int, seed: int) -> list[RecordedRun]:
        """All learning rates of a batch size and seed, those cut off in their fall completed."""
        if (batch_size, seed) in self._rows:
            return self._rows[batch_size, seed]
        steps = self._stored[f"steps_{batch_size}"].astype(float)
        curves = self._stored[f"curves_{batch_size}"][:, seed].astype(float)
        row = [self._recorded(steps, values) for values in curves]
        first = next((index for index, run in enumerate(row) if math.isfinite(run.steps_to_target)), None)
        for index in range(first or 0):
            run = row[index]
            if first is not None and self._was_falling(run.values):
                foretold = row[first].steps_to_target * self.rates[first] / self.rates[index]
                end = max(foretold, 1.07 * math.expm1(run.log_steps[-1]))
                log_steps = np.append(run.log_steps, math.log1p(end))
                row[index] = RecordedRun(log_steps, np.append(run.values, self.target), end)
        return self._rows.setdefault((batch_size, seed), row)

    def _was_falling(self, values: np.ndarray) -> bool:
        """Whether a record ended because it took too long, not because the run had settled or diverged."""
        if len(values) <= SETTLED_POINTS or not math.isfinite(values[-1]):
            return False
        gained = values[:-SETTLED_POINTS].min() - values[-SETTLED_POINTS:].min()
        return bool(gained >= SETTLED_GAIN * (values[0] - self.target))

    def _recorded(self, steps: np.ndarray, values: np.ndarray) -> RecordedRun:
        lasting = ~np.isnan(values)
        log_steps, values = np.log1p(steps[lasting]), values[lasting]
        reached = np.flatnonzero(values <= self.target)
        if not len(reached):
            return RecordedRun(log_steps, values, math.inf)
        at = reached[0]
        share = (values[at - 1] - self.target) / (values[at - 1] - values[at])
        crossing = log_steps[at - 1] + share * (log_steps[at] - log_steps[at - 1])
        return RecordedRun(log_steps, values, math.expm1(crossing))

    def seconds_to_target(self, batch_size: int, rate: float, seed: int) -> float:
        """Training seconds until the target; inf where it is out of reach."""
        run, stretch = self.run(batch_size, rate, seed)
        return run.steps_to_target * stretch * self.step_seconds(self.snapped(batch_size))

    @cache  # noqa: B019 - records are few and live as long as the benchmark
    def true_seconds(self, batch_size: int, rate: float) -> float:
        """The median time to target over the recorded seeds."""
        each = sorted(self.seconds_to_target(batch_size, rate, seed) for seed in range(self.seeds))
        return (each[(len(each) - 1) // 2] + each[len(each) // 2]) / 2

    @cached_property
    def oracle(self) -> tuple[float, int, float]:
        """Seconds, batch size and learning rate of the best configuration of the grid."""
        return min(
            (self.true_seconds(size, float(rate)), size, float(rate))
            for size in self.batch_sizes
            for rate in self.rates
        )

    def train(self, spec: RunSpec, load: Load | None = None) -> Generator[CurvePoint, bool, str]:
        """The recorded run of a configuration, as `batchtune.child.training_run.train` would have yielded it."""
        run, stretch = self.run(spec.batch_size, spec.learning_rate, spec.seed)
        step_seconds, load = self.step_seconds(self.snapped(spec.batch_size)), load or Load()
        steps, divergence = 0, Divergence(spec)
        clock = StepClock(spec.most_step_seconds)
        for _ in range(WARM_UP_STEPS):  # those of the child are not counted, and the clock learns from them
            clock.see(1, *load.take(step_seconds))
        while True:
            value, seconds = run.value(steps / stretch), clock.seconds
            measured = clock.measured_seconds if clock.measured_seconds > seconds else None
            go_on = yield CurvePoint(
                seconds=seconds,
                samples=steps * spec.batch_size,
                value=value if math.isfinite(value) else None,
                measured_seconds=measured,
            )
            if spec.reached(value):
                return "reached"
            if divergence.shows(value, seconds):
                return "diverged"
            if seconds >= spec.limit_seconds or clock.measured_seconds >= MOST_WAITING * spec.limit_seconds:
                return "finished"
            if not go_on:
                return "pruned"
            due = next_evaluation(seconds, self.evaluation_seconds, spec)
            while (left := due - clock.seconds) > 1e-9 * due or clock.seconds == seconds:
                taken = max(1, math.ceil(left / clock.step_seconds - 1e-6))
                taken = -(-taken // 2) if taken > 4 else taken  # half of what is left at a time, as in the child
                clock.add(taken, *load.take(taken * step_seconds))
                steps += taken
