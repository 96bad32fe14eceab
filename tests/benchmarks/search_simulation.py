"""The search for the largest batch on thousands of made-up memory curves, against doubling and bisection.

    python tests/benchmarks/search_simulation.py

prints a table and writes tests/benchmarks/results/search_simulation.md. The curves of the report come from seeds that
were not looked at while the search was written (HELD_OUT); the others (DEVELOPMENT) are there for comparison.
"""

from __future__ import annotations

import argparse
import datetime as dt
import math
import multiprocessing
import platform
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, quantiles

from batchtune import __version__
from batchtune.config.probe import Bounds
from batchtune.document import Attempt
from batchtune.probe.bracket import bracket
from batchtune.probe.search import next_size
from batchtune.vocabulary import LARGEST

GIB = 1 << 30
BLOCK_BYTES = 2 << 20
DEVELOPMENT = 0
HELD_OUT = 10_000_000
SHAPES = (
    "linear",
    "large offset",
    "two phases",
    "optimizer first",
    "jumps",
    "not monotone",
    "quadratic",
    "CPU noise",
    "multiple of",
    "smooth",
)


@dataclass(frozen=True)
class Prior:
    """An estimate as the search takes it."""

    expected: int
    allocated_bytes: Callable[[int], float]

    @property
    def start(self) -> int:
        return min(self.expected, math.ceil((self.expected + 1) / 1.01))


def _largest(fits: Callable[[int], bool]) -> int:
    low, high = 0, 1
    while high < LARGEST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass
class Curve:
    """The memory that training takes as a function of batch size, and the attempts made on it."""

    shape: str
    seed: int
    limit_bytes: float = field(init=False)

    def __post_init__(self) -> None:
        draw = random.Random(f"{self.shape}-{self.seed}")
        self.limit_bytes = draw.choice((4, 8, 16, 24, 40, 80, 141)) * GIB * 0.95
        self.nominal = math.exp(draw.uniform(0, math.log(200_000)))
        self.multiple_of = draw.choice((2, 4, 8, 16, 32, 64)) if self.shape == "multiple of" else 1
        constant = draw.uniform(0.5, 0.9) if self.shape == "large offset" else draw.uniform(0.01, 0.7)
        self.constant = constant * self.limit_bytes
        self.power = (
            draw.uniform(0.3, 1.0) if self.shape == "quadratic" else 0.0
        )  # share that is quadratic at the limit
        above = draw.uniform(1.0, 1.6) if self.shape == "optimizer first" else draw.uniform(0.7, 1.15)
        self.optimizer = min(0.97 * self.limit_bytes, self.constant * above)
        self.second = self.constant * draw.uniform(0.1, 0.95) if self.shape == "two phases" else None
        self.first_share = draw.uniform(0.4, 1.0) if self.second is not None else 1.0
        cpu = self.shape == "CPU noise"
        self.cpu = cpu
        self.run_noise = draw.uniform(0.005, 0.015) if cpu else 0.0
        self.fragmentation = 0.0 if cpu or self.shape == "smooth" else draw.uniform(0.0, 0.10)
        self.jitter = draw.uniform(0.0, 0.4)  # share of the fragmentation that differs from size to size
        self.unrecoverable = draw.random()  # share of it that the allocator cannot give back under pressure
        self.steps: list[tuple[float, float, float]] = []
        if self.shape in {"jumps", "not monotone", "multiple of"}:
            for _ in range(draw.randint(1, 6)):
                start = self.nominal * math.exp(draw.uniform(-5, 0.3))
                end = start * draw.uniform(1.05, 3) if self.shape != "jumps" else math.inf
                self.steps.append((start, end, draw.uniform(-0.01, 0.05) * self.limit_bytes))
        self.spots = draw.uniform(0.0, 0.08) if self.shape == "not monotone" else 0.0  # sizes with a large workspace

    def chance(self, size: int, what: str) -> float:
        """The same number between 0 and 1 for the same size, whenever it is asked."""
        return random.Random(f"{what}-{self.shape}-{self.seed}-{size}").random()

    def activation_bytes(self, size: int, *, estimated: bool = False) -> float:
        """Peak of forward and backward; an estimate knows nothing of workspaces."""
        share = size / (self.nominal + 0.5)
        room = self.limit_bytes - self.constant
        used = self.constant + room * self.first_share * ((1 - self.power) * share + self.power * share * share)
        if self.second is not None:
            used = max(used, self.second + (self.limit_bytes - self.second) * share)
        if estimated:
            return used
        used += sum(extra for start, end, extra in self.steps if start <= size < end)
        if self.spots and self.chance(size, "spot") < self.spots:
            used += 0.1 * self.limit_bytes * self.chance(size, "workspace")
        return max(used, 0.5 * self.constant)

    def attempt(self, size: int) -> Attempt:
        """One try of one size."""
        activation = self.activation_bytes(size)
        allocated = max(activation, self.optimizer)
        if self.cpu:
            shift = 1 + self.run_noise * (2 * self.chance(size, "run") - 1)
            if allocated * shift > self.limit_bytes:
                return Attempt(batch_size=size, outcome="oom")
            peaks = (int(activation * shift), int(allocated * shift))
            return Attempt(
                batch_size=size, outcome="fit", peak_reserved_bytes=peaks[1], forward_backward_peak_bytes=peaks[0]
            )
        fragmentation = self.fragmentation * (1 - self.jitter * self.chance(size, "fragmentation"))
        if allocated * (1 + fragmentation * self.unrecoverable) > self.limit_bytes:
            return Attempt(batch_size=size, outcome="oom")
        reserved = math.ceil(allocated * (1 + fragmentation) / BLOCK_BYTES) * BLOCK_BYTES
        return Attempt(
            batch_size=size,
            outcome="fit",
            peak_allocated_bytes=int(allocated),
            peak_reserved_bytes=min(reserved, int(self.limit_bytes)),
            forward_backward_peak_bytes=int(activation),
        )

    def prior(self) -> Prior:
        """An estimate of this curve: its scale, an offset and half of the fragmentation are wrong."""
        draw = random.Random(f"prior-{self.shape}-{self.seed}")
        scale = 1 + draw.gauss(-0.03, 0.05)
        offset = draw.uniform(0.1, 0.9) / 24 * self.limit_bytes

        def allocated(size: int) -> float:
            return max(self.activation_bytes(size, estimated=True), self.optimizer) * scale - offset

        room = self.limit_bytes / (1 + 0.5 * self.fragmentation)
        return Prior(_largest(lambda size: allocated(size) <= room), allocated)


@dataclass(frozen=True)
class Run:
    """How one search of one curve went."""

    attempts: int
    failures: int
    found: int
    within_tolerance: bool
    share_of_limit: float
    worst_attempts: float  # 2 * log2(limit) + 4


def search(curve: Curve, bounds: Bounds, *, with_prior: bool = False) -> Run:
    """batchtune's search of one curve; every size it asks for is checked against the bounds."""
    attempts: list[Attempt] = []
    prior = curve.prior() if with_prior else None
    while True:
        size = next_size(attempts, bounds, int(curve.limit_bytes), prior).batch_size
        if size is None:
            return finished(curve, attempts, bounds)
        legal = size >= bounds.minimum and size % bounds.multiple_of == 0
        if not legal or size in {attempt.batch_size for attempt in attempts} or len(attempts) > 100:
            raise AssertionError(f"{curve}: {size} after {[(a.batch_size, a.outcome) for a in attempts]}")
        attempts.append(curve.attempt(size))


def doubling(curve: Curve, bounds: Bounds) -> Run:
    """What most tools do: double until a failure, then bisect."""
    attempts = [curve.attempt(bounds.multiple_of)]
    while True:
        low, high = bracket(attempts)
        if low == 0 or (high is not None and high - low <= max(bounds.multiple_of, bounds.tolerance * low)):
            return finished(curve, attempts, bounds)
        size = 2 * low if high is None else (low + high) // 2 // bounds.multiple_of * bounds.multiple_of
        attempts.append(curve.attempt(size))


def finished(curve: Curve, attempts: list[Attempt], bounds: Bounds) -> Run:
    """Counts a search and compares its bracket with the curve."""
    low, high = bracket(attempts)
    width = max(bounds.multiple_of, bounds.tolerance * low)
    proven = high is not None and high - low <= width and curve.attempt(low).fits and not curve.attempt(high).fits
    return Run(
        attempts=len(attempts),
        failures=sum(not attempt.fits for attempt in attempts),
        found=low,
        within_tolerance=proven,
        share_of_limit=low / limit_above(curve, low, bounds.multiple_of) if low else 0.0,
        worst_attempts=2 * math.log2(max(1, low / bounds.multiple_of)) + 4,
    )


def limit_above(curve: Curve, found: int, multiple_of: int) -> int:
    """The limit that doubling and exact bisection reach from what was found: no part of any search."""
    low, high = found, found * 2
    while curve.attempt(high).fits:
        low, high = high, high * 2
    while high - low > multiple_of:
        middle = (low + high) // 2 // multiple_of * multiple_of
        low, high = (middle, high) if curve.attempt(middle).fits else (low, middle)
    return low


MODES: dict[str, Callable[[Curve], Run]] = {
    "doubling + bisection, 1 %": lambda c: doubling(c, Bounds(multiple_of=c.multiple_of)),
    "batchtune, 1 %": lambda c: search(c, Bounds(multiple_of=c.multiple_of)),
    "batchtune, 1 %, prior": lambda c: search(c, Bounds(multiple_of=c.multiple_of), with_prior=True),
    "doubling + bisection, exact": lambda c: doubling(c, Bounds(multiple_of=c.multiple_of, tolerance=0)),
    "batchtune, exact": lambda c: search(c, Bounds(multiple_of=c.multiple_of, tolerance=0)),
    "batchtune, exact, prior": lambda c: search(c, Bounds(multiple_of=c.multiple_of, tolerance=0), with_prior=True),
}
CAREFUL: dict[str, Callable[[Curve], Run]] = {
    "no OOM": lambda c: search(c, Bounds(multiple_of=c.multiple_of, no_oom=True)),
    "no OOM, prior": lambda c: search(c, Bounds(multiple_of=c.multiple_of, no_oom=True), with_prior=True),
}


def simulate(job: tuple[str, int, int]) -> dict[str, list[Run]]:
    """Every search of `count` curves of one shape; curves whose smallest size does not fit are left out."""
    shape, first_seed, count = job
    curves = [Curve(shape, first_seed + number) for number in range(count)]
    curves = [curve for curve in curves if curve.attempt(curve.multiple_of).fits]
    return {name: [run(curve) for curve in curves] for name, run in {**MODES, **CAREFUL}.items()}


def figures(runs: list[Run]) -> str:
    """Mean attempts / mean OOMs (most attempts) of a search, as a table cell."""
    return (
        f"{mean(r.attempts for r in runs):.2f} / {mean(r.failures for r in runs):.2f} ({max(r.attempts for r in runs)})"
    )


def table(rows: dict[str, dict[str, list[Run]]]) -> str:
    """Two markdown tables: searches for the limit, and searches that avoid it."""
    lines = [f"| shape | curves | {' | '.join(MODES)} |", "|---|" + "---:|" * (len(MODES) + 1)]
    for shape, runs in rows.items():
        lines.append(f"| {shape} | {len(runs['no OOM'])} | {' | '.join(figures(runs[name]) for name in MODES)} |")
    lines += ["", f"| shape | {' | '.join(CAREFUL)} |", "|---|" + "---|" * len(CAREFUL)]
    for shape, runs in rows.items():
        cells = []
        for name in CAREFUL:
            shares = [run.share_of_limit for run in runs[name]]
            hit = mean(run.failures > 0 for run in runs[name])
            low, middle = quantiles(shares, n=10)[0], quantiles(shares, n=10)[4]
            cells.append(
                f"{mean(r.attempts for r in runs[name]):.2f} attempts, {hit:.1%} of searches met an OOM, "
                f"found/limit median {middle:.2f}, 10th percentile {low:.2f}"
            )
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdicts(runs: dict[str, list[Run]]) -> str:
    """What must hold for every single search, and for how many it did not."""
    lines = []
    for name in (name for name in MODES if name.startswith("batchtune")):
        wide = sum(not run.within_tolerance for run in runs[name])
        lines.append(f"- {name}: {wide} of {len(runs[name])} ended without a proven bracket within the tolerance.")
    for name in ("batchtune, exact", "batchtune, exact, prior"):
        over = sum(run.attempts > run.worst_attempts for run in runs[name])
        lines.append(f"- {name}: {over} took more than 2 log2(limit) + 4 attempts.")
    return "\n".join(lines)


def together(rows: dict[str, dict[str, list[Run]]]) -> dict[str, list[Run]]:
    """All shapes as one."""
    return {name: [run for runs in rows.values() for run in runs[name]] for name in {**MODES, **CAREFUL}}


def report(count: int) -> str:
    """Runs the simulation on two processes and returns the report in markdown."""
    development = max(20, count // 4)
    jobs = [(shape, HELD_OUT, count) for shape in SHAPES] + [(shape, DEVELOPMENT, development) for shape in SHAPES]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.map(simulate, jobs, chunksize=1)
    rows = dict(zip(SHAPES, results[: len(SHAPES)], strict=True))
    rows["**all**"] = together(rows)
    seen = together(dict(zip(SHAPES, results[len(SHAPES) :], strict=True)))
    every = rows["**all**"]
    exact = every["batchtune, exact"]
    small = mean(run.attempts for run in exact if run.found <= 1000)
    large = mean(run.attempts for run in exact if run.found > 1000)
    return f"""# Search for the largest batch: simulation

{dt.datetime.now(dt.UTC).date()}, batchtune {__version__}, Python {platform.python_version()}, 2 processes.
Command: `python tests/benchmarks/search_simulation.py --curves {count}`

{count * len(SHAPES)} made-up memory curves with limits log-uniform from 1 to 200,000 samples; {len(exact)} of them fit
their smallest size and are counted. Cells: mean attempts / mean failed attempts (most attempts). The seeds were held
out: constants were chosen on others, which the last row of each table shows.

{table({**rows, "all, development seeds": seen})}

{verdicts(every)}

An exact search must bisect what nothing predicts: at limits of many thousand samples, fragmentation known to a percent
leaves hundreds of sizes equally likely. Up to 1,000 samples it took {small:.2f} attempts, above that {large:.2f}.
"""


def main() -> None:
    """Prints the report and keeps it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", type=int, default=1000, help="curves of each shape")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "search_simulation.md")
    arguments = parser.parse_args()
    text = report(arguments.curves)
    print(text)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
