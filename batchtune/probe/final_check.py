"""The final check in a fresh process: how long it is, which size is next when one did not pass, when to give up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from batchtune.config.probe import ProbeOptions
from batchtune.device.host import resident_bytes
from batchtune.document import Attempt, Environment
from batchtune.errors import NothingFitsError
from batchtune.lengths.mixing import remedy
from batchtune.probe.memory_model import measured_points
from batchtune.units import size

_BACKOFF, _EVEN_BACKOFFS = 0.005, 3  # the next size is so much smaller, then ever more
_MOST_SILENCES = 2  # in a row, the second at half the size: then it is not the size that takes long
_HALF = 0.5
_BY_LUCK = 0.03  # by so much a size is smaller than one that passed, where a larger one failed by batches that differ
_PROCESSES_ON_A_CPU = 5  # whose allocator takes more or less by what lay in the heap before
_STUDENT = 2.132  # of so many: one more takes less than this, times their deviation, above their mean in 95 % of cases
_LEAST_SPREAD, _MOST_SPREAD = 0.01, 0.25  # of the peaks of such processes; 0.19 was seen
_USUAL_SPREAD = 0.2  # of what of them grows with the batch
RISES = (0.5, 0.1)  # of the same over more steps than the search takes: mostly, and where a larger batch takes less
CPU_TOLERANCE = 0.05
_WORTH_A_CHECK = 0.1  # by so much a size has to be larger
_STEP_DOWN, _SURE = 0.05, 1.25  # at least, since one more process may take more; times the excess that was measured
_SOON_STEPS = 1000  # fewer than these make no training
_SEEN_AGAIN = 2  # checks in a row, of which each shows the same leak


@dataclass(frozen=True, slots=True)
class Check:
    """A final check, or an attempt that evaluates and saves like one.

    Attributes:
        attempt: what came of it.
        steps: optimizer steps that were asked of it, before evaluation and saving.
        by_luck: it was out of memory on a GPU by the batches that happened to come, of those that differ.
    """

    attempt: Attempt
    steps: int
    by_luck: bool = False


def steps_to_verify(attempts: Sequence[Attempt], options: ProbeOptions) -> int:
    """As many steps as asked for, or as there is time for by the slowest fit so far."""
    most, seconds = options.verify_steps, options.verify_seconds
    slowest = max((each.step_seconds or 0.0 for each in attempts if each.fits), default=0.0)
    if seconds is None or not slowest:
        return most
    return max(min(options.steps, most), min(most, int(seconds / slowest)))


def size_with_room(
    fit: Attempt, attempts: Sequence[Attempt], limit_bytes: int, options: ProbeOptions, usual: float = _USUAL_SPREAD
) -> int:
    """The size on a CPU whose peak leaves what further processes may take, by a fit's own peak.

    They differ in what grows with the batch: by what was measured, or else by as much as is usual.
    """
    unit, peak, (grown, sample_bytes) = options.multiple_of, fit.peak_reserved_bytes or 0, _growth(attempts, fit)
    spread = usual if fit.kept_back_bytes is None else fit.kept_back_bytes / max(1, grown)
    room = (limit_bytes - (peak - grown)) / (1 + spread) - grown
    larger = fit.batch_size + math.floor(room / sample_bytes)
    return max(options.least, larger // unit * unit)


def larger_with_room(
    passed: Attempt,
    attempts: Sequence[Attempt],
    limit_bytes: int | None,
    options: ProbeOptions,
    maximum: int | None = None,
) -> int | None:
    """A size on a CPU that may pass, too, and is larger by a difference that matters; None where there is none.

    Only where memory ended the search: what ended in another way ends there again. What a search's process could
    not hold, others may; towards a check that failed it is half the way.
    """
    ends = [each for each in attempts if not each.fits]
    above = [each for each in ends if each.batch_size > passed.batch_size]
    ended = min(above or ends, key=lambda each: each.batch_size, default=passed)
    if limit_bytes is None or ended.outcome != "oom" or passed.peak_reserved_bytes is None:
        return None
    halves = [(passed.batch_size + each.batch_size) // 2 for each in above if each.purpose == "verify"]
    unit = options.multiple_of
    most = size_with_room(passed, attempts, limit_bytes, options)
    larger = min([most, *halves, most if maximum is None else maximum]) // unit * unit
    return larger if larger > (1 + _WORTH_A_CHECK) * passed.batch_size else None


def within_a_cpus(limit_bytes: int, held_before: int | None) -> tuple[int, str]:
    """What of a CPU's limit a process may fill whose training is to go on, for it may take more; and a sentence.

    What it has taken since it held so many bytes is of the limit; None: nothing.
    """
    taken = max(0, resident_bytes() - held_before) if held_before else 0
    found = int(max(0, limit_bytes - taken) / (1 + _MOST_SPREAD))
    return found, f"up to {size(found)} is searched: the rest of the limit is for what later steps may take"


def asks_for_another(passed: Sequence[Attempt], device: str, limit_bytes: int | None, orders: int) -> bool:
    """Whether a size that passed has to pass in one more process, where the limit is near.

    On a CPU processes differ; on a GPU batches may, whose order cuts memory up: it passes in so many. A transformer's
    largest batch of padded samples, checked with the longest alone, ran out of memory in 26 of 60 epochs.
    """
    peak = max(each.peak_reserved_bytes or 0 for each in passed)
    if limit_bytes is None or peak <= limit_bytes / (1 + _MOST_SPREAD):
        return False
    if device != "cpu":
        return len(passed) < orders
    return len(passed) < _PROCESSES_ON_A_CPU and _most_bytes(passed) <= limit_bytes


def _most_bytes(passed: Sequence[Attempt]) -> int:
    """What 19 of 20 further processes stay within, by Student's t, if those yet to come take the mean of these."""
    peaks, count = [each.peak_reserved_bytes or 0 for each in passed], _PROCESSES_ON_A_CPU
    mean = statistics.mean(peaks)
    apart = math.sqrt(sum((peak - mean) ** 2 for peak in peaks) / (count - 1) * (1 + 1 / count))
    return math.ceil(max((1 + _LEAST_SPREAD) * max(peaks), mean + _STUDENT * apart))


def with_spread(passed: Sequence[Attempt], device: str, limit_bytes: int | None) -> Attempt:
    """The largest of the checks that one size passed; on a CPU out of memory where another process may well need more.

    What is kept back above its peak is what further processes may take.
    """
    largest = max(passed, key=lambda each: each.peak_reserved_bytes or 0)
    largest = largest.model_copy(update={"steps": max(each.steps for each in passed)})
    peaks = [each.peak_reserved_bytes for each in passed if each.peak_reserved_bytes is not None]
    if device != "cpu" or limit_bytes is None or not peaks:
        return largest
    most = _most_bytes(passed)
    kept = {"kept_back_bytes": most - max(peaks)}
    if most <= limit_bytes:
        return largest.model_copy(update=kept if len(peaks) > 1 else {})
    took = f"{size(min(peaks))} to {size(max(peaks))} in {len(peaks)} processes" if len(peaks) > 1 else size(peaks[0])
    text = f"the same training took {took}, which leaves too little room for what another process may take"
    return largest.model_copy(update={"outcome": "oom", "message": text} | kept)


def _excess(check: Check, limit_bytes: int | None) -> int:
    """By how many bytes a peak, with what is kept back, is beyond the limit, as on a CPU, where nobody keeps it."""
    return 0 if limit_bytes is None else max(0, _with_kept(check.attempt) - limit_bytes)


def _with_kept(attempt: Attempt, peak_bytes: int | None = None) -> int:
    """A peak, or the attempt's own, with what another process may take above it."""
    return (peak_bytes or attempt.peak_reserved_bytes or 0) + (attempt.kept_back_bytes or 0)


def tells_room(checks: Sequence[Check], limit_bytes: int | None) -> bool:
    """Whether none failed but by a peak that was measured beyond the limit, so that those that passed tell the room."""
    return all(each.attempt.fits or _excess(each, limit_bytes) for each in checks)


def cut_short(checks: Sequence[Check], limit_bytes: int | None = None) -> list[Attempt]:
    """Those that were out of memory before their last step, where that is known: a measured peak does not say when."""
    out = [each for each in checks if each.attempt.outcome == "oom" and not _excess(each, limit_bytes)]
    return [each.attempt for each in out if each.attempt.steps < each.steps and not each.attempt.in_evaluation]


def out_in_evaluation(checks: Sequence[Check], limit_bytes: int | None = None) -> list[Attempt]:
    """Those that were out of memory in evaluation or saving; by a measured peak, those whose steps had room."""
    found = []
    for check in checks:
        attempt, excess = check.attempt, _excess(check, limit_bytes)
        steps_bytes = (1 + CPU_TOLERANCE) * _with_kept(attempt, attempt.steps_peak_bytes)  # less is the ordinary rise
        has_room = attempt.steps_peak_bytes is not None and steps_bytes <= (limit_bytes or 0)
        if attempt.outcome == "oom" and (has_room if excess else attempt.in_evaluation):
            found.append(attempt)
    return found


def size_below(
    checks: Sequence[Check],
    options: ProbeOptions,
    limit_bytes: int | None = None,
    attempts: Sequence[Attempt] = (),
) -> int | None:
    """The size to check next when none has passed yet; None where the last one was the smallest.

    By halves where training passes and evaluation does not (nobody knows how much more it needs; the smallest at once
    where two peaks say that none between would help), where the check fell silent, or where memory ended late twice, as
    it does by a leak; as far as a leak needs where it was seen, or a peak that was measured beyond the limit; by 3 %
    where it was batches that differ; else by little at first. The search's attempts tell how much a sample takes.
    """
    unit, failed = options.multiple_of, checks[-1].attempt
    if failed.batch_size <= options.least:
        return None
    if checks[-1].by_luck:
        return below_by_luck(failed.batch_size, options)
    share = max(options.tolerance / 2, _BACKOFF) * 2 ** max(0, len(checks) - _EVEN_BACKOFFS)
    evaluated = out_in_evaluation(checks[-2:], limit_bytes)
    if failed.outcome == "timeout" or len(evaluated) == 2:  # noqa: PLR2004 - twice in a row
        share = _HALF
    if limit_bytes and len(evaluated) == 2 and _least_bytes(evaluated[0], evaluated[1], options.least) > limit_bytes:  # noqa: PLR2004
        return options.least
    if excess := _excess(checks[-1], limit_bytes):
        told = _SURE * excess / _growth(attempts, failed)[1] / failed.batch_size
        share = max(share, told, _STEP_DOWN)
    late = [each for each in cut_short(checks[-2:], limit_bytes) if each.steps >= options.steps]
    if failed.growth_bytes_per_step and limit_bytes:
        share = max(share, 2 * failed.growth_bytes_per_step * checks[-1].steps / limit_bytes)
    elif len(late) == 2:  # noqa: PLR2004 - twice in a row
        share = _HALF
    smaller = failed.batch_size - max(unit, int(min(_HALF, share) * failed.batch_size))
    return max(options.least, smaller // unit * unit)


def _least_bytes(larger: Attempt, smaller: Attempt, batch_size: int) -> float:
    """What a size takes by the line through the peaks of two others; 0 where these are not known."""
    if not (larger.peak_reserved_bytes and smaller.peak_reserved_bytes):
        return 0.0
    of_a_sample = (larger.peak_reserved_bytes - smaller.peak_reserved_bytes) / (larger.batch_size - smaller.batch_size)
    return smaller.peak_reserved_bytes - max(0.0, of_a_sample) * (smaller.batch_size - batch_size)


def below_by_luck(batch_size: int, options: ProbeOptions) -> int:
    """The size to check below one, or to keep below one that passed, where batches come by luck."""
    unit = options.multiple_of
    return max(options.least, min(batch_size - unit, int((1 - _BY_LUCK) * batch_size)) // unit * unit)


def _growth(attempts: Sequence[Attempt], attempt: Attempt) -> tuple[int, float]:
    """What of its peak is above that of the smallest fit, if that is smaller, and how much of it a sample takes."""
    points, peak = measured_points(attempts), attempt.peak_reserved_bytes or 0
    is_above = points and points[0].size < attempt.batch_size and points[0].reserved < peak
    least_size, least_bytes = (points[0].size, int(points[0].reserved)) if is_above else (0, 0)
    grown = peak - least_bytes
    return grown, max(1, grown) / (attempt.batch_size - least_size)


def order_warnings(checks: Sequence[Check], environment: Environment) -> list[str]:
    """One where batches that differ in size left too little memory for one that trains among its like.

    On a CPU: where that is more than what processes differ by.
    """
    failed, does = [each.attempt.batch_size for each in checks if each.by_luck], "cut memory up"
    if environment.device_type == "cpu":
        least = (1 + _MOST_SPREAD) * max((each.attempt.batch_size for each in checks if each.attempt.fits), default=0)
        out, does = [each.attempt for each in checks if each.attempt.outcome == "oom"], "leave memory behind"
        failed = [each.batch_size for each in out if each.batch_size > least]
    if not failed:
        return []
    text = (
        f"samples differ in size, and batches padded to their longest one {does}: {max(failed):,} did not train in "
        "every order; one that was not tried may need more than was found"
    )
    return [text + remedy(environment)]


def leaks_all(checks: Sequence[Check], limit_bytes: int | None) -> bool:
    """Whether what steps leave behind fills all memory by itself, so that no size passes: seen twice in a row.

    Peaks that rise for a few steps look like it where the system counts memory; at the next size, they do not again.
    """
    last = checks[-_SEEN_AGAIN:]
    if limit_bytes is None or len(last) < _SEEN_AGAIN or any(each.attempt.fits for each in last):
        return False
    return all((each.attempt.growth_bytes_per_step or 0) * each.steps >= limit_bytes for each in last)


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
