"""Do intervals of few seeds hold the truth as often as they say, and what does that cost?

    python tests/benchmarks/interval_coverage.py

writes tests/benchmarks/results/interval_coverage.md, in a minute. Made-up times are log-normal; times of the
records are drawn, with replacement, from all seeds of a pair of recorded configurations. What is compared:

- now: `ratio_interval`, Student's interval of the logarithms with the spread of each side (Welch).
- resampled: quantiles of the ratio of medians over all resamples of both sides.
- pooled: Student's interval with one spread of baseline, winner and another finalist together.
- at least the pool: Welch's, with the pooled spread where that is larger.
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import math
import os
import platform
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from replay_curves import BASELINE_BATCH_SIZE, Record
from replay_tasks import TASKS

from batchtune.tune.verdict import scores
from batchtune.tune.verdict.scores import CONFIDENCE, ratio_interval

RESULT = Path(__file__).parent / "results" / "interval_coverage.md"
Times = list[float]
Bounds = tuple[float, float]
Method = Callable[[Times, Times, Times], Bounds]
SPREADS = [(0.1,) * 3, (0.3,) * 3, (0.6,) * 3, (0.1, 0.6, 0.6), (0.6, 0.1, 0.1), (0.1, 0.6, 0.1)]
RESAMPLES, MOST_ENUMERATED = 400, 5**5
GAIN, NEAR = 1.5, 2.5  # whose power is told; times the least median time: a configuration that may become the answer
HEADER = f"""\
# How often intervals of few seeds hold the truth

{{facts}}

{CONFIDENCE:.0%} intervals of the ratio of two times to the target, the baseline's and the winner's; both and another
finalist ran so many seeds. In % of {{studies}} studies:

- holds: the true ratio lies within.
- false: the interval lies above 1 where there is no gain; {(1 - CONFIDENCE) / 2:.0%} is what it says.
- finds: it lies above 1 where the winner is {GAIN} times as fast.
- ×: its half width as a factor, in the median.

| spread of log times: baseline, winner, other | seeds | interval | holds | false | finds | × |
|---|---:|---|---:|---:|---:|---:|"""


def now(ours: Times, theirs: Times, _: Times) -> Bounds:
    found = ratio_interval(ours, theirs)
    return found.low, found.high


def resampled(ours: Times, theirs: Times, _: Times) -> Bounds:
    def medians(values: Sequence[float]) -> Times:
        if len(values) ** len(values) <= 27:
            return [statistics.median(each) for each in itertools.product(values, repeat=len(values))]
        return [statistics.median(random.choices(values, k=len(values))) for _ in range(RESAMPLES)]

    left, right = medians(ours), medians(theirs)
    ratios = sorted(random.choice(left) / random.choice(right) for _ in range(RESAMPLES))
    cut = int((1 - CONFIDENCE) / 2 * RESAMPLES)
    return ratios[cut], ratios[-1 - cut]


def pooled(ours: Times, theirs: Times, other: Times) -> Bounds:
    sides = [[math.log(each) for each in side] for side in (ours, theirs, other)]
    variance = statistics.fmean(statistics.variance(side) for side in sides)
    half = scores._student(sum(len(side) - 1 for side in sides)) * math.sqrt(2 * variance / len(ours))
    centre = statistics.fmean(sides[0]) - statistics.fmean(sides[1])
    return math.exp(centre - half), math.exp(centre + half)


def at_least_the_pool(ours: Times, theirs: Times, other: Times) -> Bounds:
    both = now(ours, theirs, other), pooled(ours, theirs, other)
    return min(low for low, _ in both), max(high for _, high in both)


METHODS: dict[str, Method] = {
    "now": now,
    "resampled": resampled,
    "pooled": pooled,
    "at least the pool": at_least_the_pool,
}


def lognormal(spreads: Sequence[float], seeds: int, gain: float) -> tuple[Times, Times, Times]:
    """Times of one study's baseline, winner and other finalist."""
    ours, theirs, other = (
        [scale * random.lognormvariate(0, spread) for _ in range(seeds)]
        for scale, spread in zip((gain, 1.0, 1.0), spreads, strict=True)
    )
    return ours, theirs, other


def row(name: str, seeds: int, method: str, level: list[Bounds], gain: list[Bounds], holds: float) -> str:
    false, finds = (statistics.fmean(low > 1 for low, _ in each) for each in (level, gain))
    width = math.exp(statistics.median(math.log(high / low) / 2 for low, high in level))
    cells = [name, str(seeds), method, *(f"{100 * share:.1f}" for share in (holds, false, finds)), f"{width:.2f}"]
    return f"| {' | '.join(cells)} |"


def made_up(studies: int) -> Iterator[str]:
    for spreads, seeds in itertools.product(SPREADS, (3, 5)):
        level = [lognormal(spreads, seeds, 1.0) for _ in range(studies)]
        gain = [lognormal(spreads, seeds, GAIN) for _ in range(studies)]
        for name, method in METHODS.items():
            found, better = ([method(*each) for each in some] for some in (level, gain))
            holds = statistics.fmean(low <= 1 <= high for low, high in found)
            yield row(", ".join(map(str, spreads)), seeds, name, found, better, holds)


def configurations(record: Record) -> list[Times]:
    """Times of all recorded seeds of what may become an answer, the baseline's first; all seeds reached the target."""
    every = [
        [record.seconds_to_target(size, float(rate), seed) for seed in range(record.seeds)]
        for size in record.batch_sizes
        for rate in record.rates
    ]
    rate = TASKS[record.name].baseline_rate
    ours = [record.seconds_to_target(BASELINE_BATCH_SIZE, rate, seed) for seed in range(record.seeds)]
    least = min(statistics.median(each) for each in every)
    near = [each for each in every if all(map(math.isfinite, each)) and statistics.median(each) <= NEAR * least]
    return [[each for each in ours if math.isfinite(each)], *near]


def recorded(studies: int) -> Iterator[str]:
    """Each pair of the baseline or another against a candidate, both scaled to the same median: no gain, or GAIN."""
    for name, seeds in itertools.product(TASKS, (3, 5)):
        every = [[value / statistics.geometric_mean(each) for value in each] for each in configurations(Record(name))]
        drawn = [
            [random.choices(each, k=seeds) for each in (every[0], *random.sample(every[1:], 2))] for _ in range(studies)
        ]
        for method_name in ("now", "resampled", "pooled"):
            method = METHODS[method_name]
            level = [method(*each) for each in drawn]
            gain = [method([GAIN * value for value in each[0]], *each[1:]) for each in drawn]
            holds = statistics.fmean(low <= 1 <= high for low, high in level)
            yield row(f"recorded: {name}", seeds, method_name, level, gain, holds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--studies", type=int, default=4000)
    studies = parser.parse_args().studies
    random.seed(0)
    facts = f"{dt.datetime.now(tz=dt.UTC):%Y-%m-%d}, Python {platform.python_version()}, {os.cpu_count()} cores, "
    facts += f"load {os.getloadavg()[0]:.1f}. Command: `python tests/benchmarks/interval_coverage.py`"
    lines = [HEADER.format(facts=facts, studies=studies), *made_up(studies), *recorded(studies)]
    RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
