"""The final check in a fresh process: how long it is, which size is next when one did not pass, when to give up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchtune.document import Attempt
from batchtune.errors import NothingFitsError
from batchtune.probe.options import ProbeOptions

_BACKOFF, _EVEN_BACKOFFS = 0.005, 3  # the next size is so much smaller, then ever more
_MOST_SILENCES = 2  # in a row, the second at half the size: then it is not the size that takes long
_HALF = 0.5
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


def cut_short(checks: Sequence[Check]) -> list[Attempt]:
    """Those that were out of memory before their last step."""
    return [each.attempt for each in checks if each.attempt.outcome == "oom" and each.attempt.steps < each.steps]


def out_in_evaluation(checks: Sequence[Check]) -> list[Attempt]:
    """Those that were out of memory after their last step: in evaluation or saving."""
    return [each.attempt for each in checks if each.attempt.outcome == "oom" and each.attempt.steps == each.steps]


def size_below(checks: Sequence[Check], options: ProbeOptions, limit_bytes: int | None = None) -> int | None:
    """The size to check next when none has passed yet; None where the last one was the smallest.

    By halves where training passes and evaluation does not (nobody knows how much more it needs), where the check fell
    silent, or where memory ended late twice, as it does by a leak; as far as a leak needs where it was seen; else by
    little at first.

    Args:
        checks: so far, at least one.
        options: the bounds and the tolerance.
        limit_bytes: that may be reserved.
    """
    unit, failed = options.multiple_of, checks[-1].attempt
    least = -(-max(unit, options.minimum) // unit) * unit
    if failed.batch_size <= least:
        return None
    share = max(options.tolerance / 2, _BACKOFF) * 2 ** max(0, len(checks) - _EVEN_BACKOFFS)
    if failed.outcome == "timeout" or len(out_in_evaluation(checks[-2:])) == 2:  # noqa: PLR2004 - twice in a row
        share = _HALF
    late = [each for each in cut_short(checks[-2:]) if each.steps >= options.steps]
    if failed.growth_bytes_per_step and limit_bytes:
        share = max(share, 2 * failed.growth_bytes_per_step * checks[-1].steps / limit_bytes)
    elif len(late) == 2:  # noqa: PLR2004 - twice in a row
        share = _HALF
    smaller = failed.batch_size - max(unit, int(min(_HALF, share) * failed.batch_size))
    return max(least, smaller // unit * unit)


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
