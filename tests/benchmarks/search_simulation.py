"""The search for the largest batch on thousands of made-up memory curves, against doubling and bisection.

    python tests/benchmarks/search_simulation.py

prints a table and writes tests/benchmarks/results/search_simulation.md. The curves of the report come from seeds that
were not looked at while the search was written (HELD_OUT); those of the seeds that were (DEVELOPMENT) are for comparison.
"""

from __future__ import annotations

import argparse
import datetime
import math
import multiprocessing
import platform
import random
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, quantiles

from batchtune import __version__
from batchtune.probe.search import Bounds, bracket, next_size
from batchtune.results import Attempt

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
        self.power = draw.uniform(0.3, 1.0) if self.shape == "quadratic" else 0.0  # share that is quadratic at the limit
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

    def prior(self) -> Callable[[int], int]:
        """An estimate of this curve: its scale, an offset and half of the fragmentation are wrong."""
        draw = random.Random(f"prior-{self.shape}-{self.seed}")
        scale = 1 + draw.gauss(-0.03, 0.05)
        offset = draw.uniform(0.1, 0.9) / 24 * self.limit_bytes

        def estimate(size: int) -> int:
            allocated = max(self.activation_bytes(size, estimated=True), self.optimizer)
            return int(allocated * (1 + 0.5 * self.fragmentation) * scale - offset)

        return estimate


@dataclass(frozen=True)
class Run:
    """How one search of one curve went."""

    attempts: int
    failures: int
    found: int
    failing: int | None
    limit: int
    samples: int


def search(curve: Curve, bounds: Bounds, *, with_prior: bool = False) -> Run:
    """batchtune's search of one curve."""
    attempts: list[Attempt] = []
    prior = curve.prior() if with_prior else None
    while True:
        choice = next_size(attempts, bounds, int(curve.limit_bytes), prior)
        if choice.batch_size is None:
            return finished(curve, attempts, bounds)
        size = choice.batch_size
        legal = size >= bounds.minimum and size % bounds.multiple_of == 0 and size not in {a.batch_size for a in attempts}
        if not legal or len(attempts) > 200:
            raise AssertionError(f"{curve}: {size} after {[(a.batch_size, a.outcome) for a in attempts]}")
        attempts.append(curve.attempt(size))


def doubling(curve: Curve, bounds: Bounds) -> Run:
    """What most peers do: double until a failure, then bisect."""
    attempts = [curve.attempt(bounds.multiple_of)]
    while True:
        low, high = bracket(attempts)
        gap = max(bounds.multiple_of, bounds.tolerance * low)
        if low == 0 or (high is not None and high - low <= gap):
            return finished(curve, attempts, bounds)
        size = 2 * low if high is None else (low + high) // 2 // bounds.multiple_of * bounds.multiple_of
        attempts.append(curve.attempt(size))


def finished(curve: Curve, attempts: list[Attempt], bounds: Bounds) -> Run:
    """Counts a search."""
    low, high = bracket(attempts)
    failures = sum(not attempt.fits for attempt in attempts)
    return Run(len(attempts), failures, low, high, limit_of(curve, low, bounds.multiple_of), sum(a.batch_size for a in attempts))


def limit_of(curve: Curve, found: int, multiple_of: int) -> int:
    """A locally true limit near what was found: bisected without noise in choosing, never part of the search."""
    low, high = max(found, 0), max(found, multiple_of) * 2
    while curve.attempt(high).fits:
        low, high = high, high * 2
    while high - low > multiple_of:
        middle = (low + high) // 2 // multiple_of * multiple_of
        low, high = (middle, high) if curve.attempt(middle).fits else (low, middle)
    return low
