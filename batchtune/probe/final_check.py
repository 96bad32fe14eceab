"""The final check in a fresh process: how long it is, which size is next when one did not pass, when to give up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from batchtune.document import Attempt
from batchtune.errors import NothingFitsError
from batchtune.probe.memory_model import measured_points
from batchtune.probe.options import ProbeOptions
from batchtune.probe.search import bracket
from batchtune.units import size

_BACKOFF, _EVEN_BACKOFFS = 0.005, 3  # the next size is so much smaller, then ever more
_MOST_SILENCES = 2  # in a row, the second at half the size: then it is not the size that takes long
_HALF = 0.5
_PROCESSES_ON_A_CPU = 3  # whose allocator takes more or less by where the system happens to load a process
_LEAST_SPREAD = 0.05
_MOST_SPREAD = 0.25  # of the peaks of such processes; 0.15 was seen
_NEAR_ON_A_CPU = 0.05  # processes that train the same differ by more
_SURE = 1.5  # times the excess of a measured peak
_SOON_STEPS = 1000  # fewer than these make no training


@dataclass(frozen=True, slots=True)
class Check:
    """A final check, or an attempt that evaluates and saves like one.

    Attributes:
        attempt: what came of it.
        steps: optimizer steps that were asked of it, before evaluation and saving.
    """

    attempt: Attempt
    steps: int


def steps_to_verify(attempts: Sequence[Attempt], options: ProbeOptions) -> int:
    """As many steps as asked for, or as there is time for by the slowest fit so far."""
    most, seconds = options.verify_steps, options.verify_seconds
    slowest = max((each.step_seconds or 0.0 for each in attempts if each.fits), default=0.0)
    if seconds is None or not slowest:
        return most
    return max(min(options.steps, most), min(most, int(seconds / slowest)))


def with_room(attempts: Sequence[Attempt], device: str, limit_bytes: int | None, options: ProbeOptions) -> int:
    """The size to check first: the largest fit; on a CPU one that leaves the room that another process may need."""
    largest = bracket(attempts)[0]
    fit = next((each for each in reversed(attempts) if each.fits and each.batch_size == largest), None)
    if device != "cpu" or limit_bytes is None or fit is None or fit.peak_reserved_bytes is None:
        return largest
    return min(largest, _roomy(fit, attempts, limit_bytes, options))


def larger_with_room(
    passed: Attempt, attempts: Sequence[Attempt], limit_bytes: int | None, options: ProbeOptions
) -> int | None:
    """A size on a CPU that may pass, too, and is larger by a difference that matters; None where there is none.

    Only where memory ended the search: what ended in another way ends there again.
    """
    failing = bracket(attempts)[1]
    ends_by_memory = any(each.batch_size == failing and each.outcome == "oom" for each in attempts)
    if limit_bytes is None or failing is None or not ends_by_memory or passed.peak_reserved_bytes is None:
        return None
    larger = _roomy(passed, attempts, limit_bytes, options)
    return larger if larger > (1 + _NEAR_ON_A_CPU / 2) * passed.batch_size else None


def _roomy(fit: Attempt, attempts: Sequence[Attempt], limit_bytes: int, options: ProbeOptions) -> int:
    """The size whose peak leaves a twentieth of itself, by that of a fit and what a sample takes."""
    unit, room = options.multiple_of, limit_bytes / (1 + _LEAST_SPREAD) - (fit.peak_reserved_bytes or 0)
    least = -(-max(unit, options.minimum) // unit) * unit
    return max(least, (fit.batch_size + math.floor(room / _sample_bytes(attempts, fit))) // unit * unit)


def asks_for_another(passed: Sequence[Attempt], device: str, limit_bytes: int | None) -> bool:
    """Whether a size that passed has to pass in one more fresh process: on a CPU, where the limit is near."""
    peak = passed[-1].peak_reserved_bytes
    if device != "cpu" or peak is None or limit_bytes is None or (1 + _MOST_SPREAD) * peak <= limit_bytes:
        return False
    return len(passed) < _PROCESSES_ON_A_CPU


def with_spread(passed: Sequence[Attempt], limit_bytes: int | None) -> Attempt:
    """The largest of the checks that one size passed, as out of memory where another process may well need more.

    What is added to its peak is by how much the checks differ, a twentieth at least: few may happen to be alike.
    """
    peaks = [each.peak_reserved_bytes for each in passed if each.peak_reserved_bytes is not None]
    largest = max(passed, key=lambda each: each.peak_reserved_bytes or 0)
    most = 2 * max(peaks, default=0) - min(peaks, default=0)
    if len(peaks) > 1:
        most = max(most, int((1 + _LEAST_SPREAD) * max(peaks)))
    if limit_bytes is None or most <= limit_bytes:
        return largest
    text = f"the same training took {size(min(peaks))} to {size(max(peaks))} in {len(peaks)} processes"
    return largest.model_copy(
        update={"outcome": "oom", "peak_reserved_bytes": most, "message": f"{text}, which leaves too little room"}
    )


def _excess(check: Check, limit_bytes: int | None) -> int:
    """By how many bytes a peak was measured beyond the limit, as on a CPU, where the system keeps none."""
    return max(0, (check.attempt.peak_reserved_bytes or 0) - limit_bytes) if limit_bytes is not None else 0


def nearness(checks: Sequence[Check], options: ProbeOptions, limit_bytes: int | None) -> float:
    """How far below the smallest failure the answer may lie; where processes differ, no further look is worth less."""
    beyond = any(_excess(each, limit_bytes) for each in checks)
    return max(options.tolerance, _NEAR_ON_A_CPU) if beyond else options.tolerance


def cut_short(checks: Sequence[Check], limit_bytes: int | None = None) -> list[Attempt]:
    """Those that were out of memory before their last step."""
    return [each.attempt for each in _out(checks, limit_bytes) if each.attempt.steps < each.steps]


def out_in_evaluation(checks: Sequence[Check], limit_bytes: int | None = None) -> list[Attempt]:
    """Those that were out of memory after their last step: in evaluation or saving."""
    return [each.attempt for each in _out(checks, limit_bytes) if each.attempt.steps == each.steps]


def _out(checks: Sequence[Check], limit_bytes: int | None) -> list[Check]:
    """Those that were out of memory at a known moment; a measured peak does not say when it was."""
    return [each for each in checks if each.attempt.outcome == "oom" and not _excess(each, limit_bytes)]


def size_below(
    checks: Sequence[Check],
    options: ProbeOptions,
    limit_bytes: int | None = None,
    attempts: Sequence[Attempt] = (),
) -> int | None:
    """The size to check next when none has passed yet; None where the last one was the smallest.

    By halves where training passes and evaluation does not (nobody knows how much more it needs), where the check fell
    silent, or where memory ended late twice, as it does by a leak; as far as a leak needs where it was seen, or a peak
    that was measured beyond the limit; else by little at first. The search's attempts tell how much a sample takes.
    """
    unit, failed = options.multiple_of, checks[-1].attempt
    least = -(-max(unit, options.minimum) // unit) * unit
    if failed.batch_size <= least:
        return None
    share = max(options.tolerance / 2, _BACKOFF) * 2 ** max(0, len(checks) - _EVEN_BACKOFFS)
    if failed.outcome == "timeout" or len(out_in_evaluation(checks[-2:], limit_bytes)) == 2:  # noqa: PLR2004 - twice in a row
        share = _HALF
    if excess := _excess(checks[-1], limit_bytes):
        is_known = failed.steps == checks[-1].steps  # else it ended where it met the limit
        share = max(share, 0.0 if is_known else _LEAST_SPREAD)
        share = max(share, _SURE * excess / _sample_bytes(attempts, failed) / failed.batch_size)
    late = [each for each in cut_short(checks[-2:], limit_bytes) if each.steps >= options.steps]
    if failed.growth_bytes_per_step and limit_bytes:
        share = max(share, 2 * failed.growth_bytes_per_step * checks[-1].steps / limit_bytes)
    elif len(late) == 2:  # noqa: PLR2004 - twice in a row
        share = _HALF
    smaller = failed.batch_size - max(unit, int(min(_HALF, share) * failed.batch_size))
    return max(least, smaller // unit * unit)


def _sample_bytes(attempts: Sequence[Attempt], failed: Attempt) -> float:
    """What a sample takes, by the smallest and the largest fit; without two of them, as if nothing else took memory."""
    points = measured_points(attempts)
    if len(points) > 1 and points[-1].reserved > points[0].reserved:
        return (points[-1].reserved - points[0].reserved) / (points[-1].size - points[0].size)
    return (failed.peak_reserved_bytes or 1) / failed.batch_size


def leaks_all(check: Check, limit_bytes: int | None) -> bool:
    """Whether what its steps leave behind fills all memory by itself, so that no size passes."""
    growth = check.attempt.growth_bytes_per_step or 0
    return limit_bytes is not None and not check.attempt.fits and growth * check.steps >= limit_bytes


def leaks_soon(attempt: Attempt, limit_bytes: int | None) -> bool:
    """Whether it passed, and what each step leaves behind ends training soon at any size: a larger one is no better."""
    return limit_bytes is not None and (attempt.growth_bytes_per_step or 0) * _SOON_STEPS >= limit_bytes


def timed_out_twice(checks: Sequence[Check], options: ProbeOptions) -> NothingFitsError | None:
    """The error where the check fell silent again at half the size."""
    last = [each.attempt for each in checks[-_MOST_SILENCES:]]
    if len(last) < _MOST_SILENCES or any(each.outcome != "timeout" for each in last):
        return None
    sizes, seconds = " and ".join(str(each.batch_size) for each in last), options.check_timeout
    return NothingFitsError(
        f"nothing passes the final check: it said nothing for {seconds:g} s at batch sizes {sizes}, most likely in "
        "evaluation or saving, since the training steps of the search passed; make evaluate() quicker, or raise "
        "--timeout of probe if that really takes so long"
    )
