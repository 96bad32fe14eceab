"""Timing steps: the throughput curve, the line t(B) = alpha + beta * B through it, and what ranks cost one another."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from batchtune.config.probe import SECONDS_PER_POINT
from batchtune.device.host import BUSY
from batchtune.document import Attempt, DataParallel, ThroughputFit, ThroughputPoint
from batchtune.errors import BatchtuneError, UserCodeError
from batchtune.observer import Observer
from batchtune.processes.ranks import RankLauncher
from batchtune.processes.worker import Worker, WorkerDied
from batchtune.protocol.commands import Opened, OpenTask, TimeSteps
from batchtune.protocol.messages import Answer, Command
from batchtune.units import share

MAX_POINTS, FEWEST_POINTS = 8, 3
STEPS_PER_POINT = 3  # at least, of timing a size: two to warm up
_APART = 1.1  # sizes that are nearer than this tell the same
_NEAR_PEAK = 0.95
_MOST_ROUNDS = 8  # of timing what was disturbed…
_AGAIN_SHARE = 0.25  # …the later ones so much shorter: a gap between other programs' work is met by short looks
_UNDERCUT = 1.25  # times what a larger batch takes: no step of fewer samples does, others held it up
_ROUNDING = 1e-9  # of a step: no more than its arithmetic
_AGREE = 1.05  # two times so near to one another are those of a machine at its fastest, since load only ever adds
TIMEOUT_SECONDS = 120.0  # without a sign of life
_STEPS_OF_RANKS = {"together": "of the group", "apart": "without communication", "alone": "of one rank alone"}
Times = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class StepLine:
    """The line t(B) = alpha + beta * B through times of steps, neither of both negative, and what it leaves open.

    Attributes:
        alpha_seconds: of a step, whatever its size.
        beta_seconds: of a sample.
        saturation_batch_size: alpha / beta; where one of both is not told from nothing, with its standard error for it.
        spread: standard error of the logarithm of that.
    """

    alpha_seconds: float
    beta_seconds: float
    saturation_batch_size: float
    spread: float


def step_line(times: Sequence[tuple[int, float, float]]) -> StepLine | None:
    """The line of least relative errors; None for fewer than two sizes: no line goes through one point.

    Args:
        times: batch size, seconds of a step, and the error of these seconds as a share of them.
    """
    if len({size for size, _, _ in times}) < 2:  # noqa: PLR2004
        return None
    rows = [(size, seconds, (seconds * error) ** -2) for size, seconds, error in times]
    total = sum(w for _, _, w in rows)
    mean_size = sum(w * b for b, _, w in rows) / total
    mean_time = sum(w * t for _, t, w in rows) / total
    spread = sum(w * (b - mean_size) ** 2 for b, _, w in rows)
    beta = sum(w * (b - mean_size) * (t - mean_time) for b, t, w in rows) / spread
    alpha = mean_time - beta * mean_size
    if alpha < 0:  # pure cost per sample
        alpha, beta = 0.0, sum(w * b * t for b, t, w in rows) / sum(w * b * b for b, _, w in rows)
    elif beta * mean_size < _ROUNDING * alpha:  # the step costs the same at every size timed
        alpha, beta = mean_time, 0.0
    alpha_error, beta_error = math.sqrt(1 / total + mean_size**2 / spread), math.sqrt(1 / spread)
    fixed, sample = max(alpha, alpha_error), max(beta, beta_error)
    both = 2 * mean_size / spread / (fixed * sample)  # where one is too large, the other is too small
    doubt = math.sqrt((alpha_error / fixed) ** 2 + (beta_error / sample) ** 2 + both)
    return StepLine(alpha, beta, fixed / sample, doubt)


def sizes_to_time(maximum: int, *, minimum: int = 1, multiple_of: int = 1, most: int = MAX_POINTS) -> list[int]:
    """The largest size and the powers of two (times `multiple_of`) well below it, at most so many (>= 3), ascending.

    Of more powers the largest, and one of the least: what a step takes whatever its size is hidden in the others.
    """
    powers = [multiple_of * 2**power for power in range(maximum.bit_length())]
    powers = [size for size in powers if minimum <= size <= maximum / _APART]
    if len(powers) >= most:
        powers = [powers[1], *powers[2 - most :]]
    return [*powers, maximum]


def most_to_time(within: float | None, step_seconds: float | None) -> int:
    """How many sizes can be timed in so many seconds where a step of the largest takes that long; 3 at least."""
    if within is None or not step_seconds:
        return MAX_POINTS
    return max(FEWEST_POINTS, min(MAX_POINTS, int(within / (STEPS_PER_POINT * step_seconds))))


def fit_step_time(points: Sequence[ThroughputPoint]) -> ThroughputFit | None:
    """Fits t(B) = alpha + beta * B to undisturbed points with equal relative errors; alpha, beta are not negative.

    The saturation batch size alpha / beta is where half of the peak throughput 1 / beta is reached. Where only the
    largest size was undisturbed, the others are taken to last as long as it does, which they do at the most.

    Returns:
        None for fewer than two sizes: no line goes through one point. Steps that took no time were not timed.
    """
    timed = sorted((point for point in points if point.step_seconds > 0), key=lambda point: point.batch_size)
    points = undisturbed(timed)
    rows = [(point.batch_size, point.step_seconds, 1.0) for point in points]
    tells = len(points) != 2  # noqa: PLR2004 - which lie near some line whatever they are
    if len(points) == 1:
        points, rows = timed, [(point.batch_size, points[0].step_seconds, 1.0) for point in timed]
    line = step_line(rows)
    if line is None:
        return None
    alpha, beta = line.alpha_seconds, line.beta_seconds
    squares = sum(((alpha + beta * point.batch_size) / point.step_seconds - 1) ** 2 for point in points)
    free = len(points) - (alpha > 0) - (beta > 0)  # sizes beyond those that any such line goes through
    best = max(points, key=lambda point: point.samples_per_second)
    up_to_best = points[points.index(best) :: -1]
    near = itertools.takewhile(lambda each: each.samples_per_second >= _NEAR_PEAK * best.samples_per_second, up_to_best)
    return ThroughputFit(
        alpha_seconds=alpha,
        beta_seconds_per_sample=beta,
        error_share=math.sqrt(squares / free) if tells else None,
        saturation_batch_size=alpha / beta if beta > 0 else None,
        batch_size_within_5_percent=min(point.batch_size for point in near),
    )


def undisturbed(points: Sequence[ThroughputPoint]) -> list[ThroughputPoint]:
    """The points that no larger batch undercuts, by size: steps of more samples take as long at least."""
    found: list[ThroughputPoint] = []
    least = math.inf
    for point in sorted(points, key=lambda point: point.batch_size, reverse=True):
        if point.step_seconds <= _UNDERCUT * least:
            found.append(point)
        least = min(least, point.step_seconds)
    return found[::-1]


def measure_curve(
    worker: Worker,
    points: list[ThroughputPoint],
    sizes: Sequence[int],
    observer: Observer,
    command: TimeSteps,
    timeout: float,
    within: float | None = None,
) -> None:
    """Adds a point for each size that can be timed to `points`, as they come; `command` says how all are timed.

    The observer is told of the first times, and of those that turn out to be shorter.

    Sizes at which other programs were busy meanwhile, and those that take longer than a larger one, are timed again, in
    turn and for shorter, until the two least times agree, eight have been taken, or `within` seconds are over. The
    least counts.
    """
    until = math.inf if within is None else time.perf_counter() + within
    timed: dict[int, list[ThroughputPoint]] = {}
    asked, again = command, command.but(seconds=_AGAIN_SHARE * command.seconds)
    due = list(sizes)
    for number in range(_MOST_ROUNDS):
        for size in due:
            if number and time.perf_counter() > until:
                break
            found = ask(worker, asked.but(batch_size=size), timeout, observer, f"throughput at batch size {size}")
            if found is None:
                continue
            timed.setdefault(size, []).append(found)
            points[:] = [min(each, key=lambda point: point.step_seconds) for _, each in sorted(timed.items())]
            if not number:
                observer.throughput(found)
        sound = {point.batch_size for point in undisturbed(points)}
        due, asked = [size for size, found in timed.items() if size not in sound or not _is_known(found)], again
    for point in points:
        if _AGREE * point.step_seconds < timed[point.batch_size][0].step_seconds:
            observer.throughput(point)  # what was told at first is not what counts
    if due:
        observer.note(f"other programs kept the machine busy: step times at {due} may be too long")


def ask(worker: Worker, command: Command[Answer], timeout: float, observer: Observer, what: str) -> Answer | None:
    """The child's answer; None, and a note, where it died or the user's code raised: then there is none."""
    try:
        return worker.call(command, timeout=timeout)
    except (WorkerDied, UserCodeError) as error:
        observer.note(f"no {what}: {error}")
        return None


def _is_known(found: list[ThroughputPoint]) -> bool:
    """Whether a size's times tell what a step takes on a machine that does nothing else."""
    if any((point.processors_used_by_others or 0.0) < BUSY for point in found):
        return True
    least = sorted(point.step_seconds for point in found)
    return len(least) > 1 and least[1] <= _AGREE * least[0]


def busy_warnings(points: Sequence[ThroughputPoint]) -> list[str]:
    """One where other programs used the host's processors while steps were timed."""
    others = max((point.processors_used_by_others or 0.0 for point in points), default=0.0)
    if others < BUSY:
        return []
    busy = f"other programs used up to {share(others)} of the processors while steps were timed"
    return [f"{busy}: the speeds are those of a busy machine, so probe again when it is idle"]


def measure_times(worker: Worker, observer: Observer, command: TimeSteps, timeout: float) -> Times:
    """Seconds of an optimizer step by name, as `data_parallel` takes them; None for what could not be measured."""
    times: Times = {}
    for ranks, what in _STEPS_OF_RANKS.items():
        found = ask(worker, command.but(ranks=ranks), timeout, observer, f"step time {what}")
        times[ranks] = found.step_seconds if found else None
        if ranks == "together" and not worker.start().fits_alone:  # the whole of a sharded model
            break
    return times


def time_group(
    settings: OpenTask,
    world_size: int,
    batch_size: int,
    accumulation_steps: int,
    precision: str,
    observer: Observer,
) -> DataParallel | None:
    """The record of ranks that are started to be timed and nothing else; None where they could not be.

    The settings are those of a child alone; their device names a kind.
    """
    with Worker(settings, RankLauncher(world_size, "ddp", observer.printed)) as group:
        try:
            opened = group.start()
        except BatchtuneError as error:
            observer.note(f"no step times of {world_size} ranks: {error}")
            return None
        command = TimeSteps(
            batch_size=batch_size, precision=precision, seconds=SECONDS_PER_POINT, accumulation_steps=accumulation_steps
        )
        times = measure_times(group, observer, command, TIMEOUT_SECONDS)
    return data_parallel(opened, batch_size, accumulation_steps, None, times) if times["together"] else None


def data_parallel(
    opened: Opened, batch_size: int, accumulation_steps: int, failure: Attempt | None, times: Times
) -> DataParallel | None:
    """The record of a group, with the last attempt at the smallest size that failed; None for a child alone.

    Times are those of `measure_times`, or none: `together` with all ranks training as one, `apart` at the same time
    each on its own, `alone` with the first rank only.
    """
    world_size = opened.world_size
    if opened.strategy is None or opened.backend is None:
        return None
    together, apart, alone = (times.get(name) for name in ("together", "apart", "alone"))
    overhead = together - apart if together and apart and together > apart else None  # else it is lost in the noise
    global_batch_size = batch_size * accumulation_steps * world_size
    return DataParallel(
        world_size=world_size,
        strategy=opened.strategy,
        backend=opened.backend,
        batch_size=batch_size,
        global_batch_size=global_batch_size,
        limiting_rank=failure.limiting_rank if failure else None,
        step_seconds=together,
        step_seconds_without_communication=apart,
        step_seconds_alone=alone,
        communication_seconds=overhead,
        communication_share=overhead / together if overhead and together else None,
        scaling_efficiency=alone / together if alone and together else None,
        samples_per_second=global_batch_size / together if together else None,
    )
