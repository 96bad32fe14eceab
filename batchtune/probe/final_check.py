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


def size_below(checks: Sequence[Check], options: ProbeOptions) -> int | None:
    """The size to check next when none has passed yet; None where the last one was the smallest.

    By halves where training passes and evaluation does not (nobody knows how much more it needs), or where the check
    fell silent; else by little at first.

    Args:
        checks: so far, at least one.
        options: the bounds and the tolerance.
    """
    unit, failed = options.multiple_of, checks[-1].attempt
    least = -(-max(unit, options.minimum) // unit) * unit
    if failed.batch_size <= least:
        return None
    share = max(options.tolerance / 2, _BACKOFF) * 2 ** max(0, len(checks) - _EVEN_BACKOFFS)
    if failed.outcome == "timeout" or len(out_in_evaluation(checks[-2:])) == 2:  # noqa: PLR2004 - twice in a row
        share = _HALF
    smaller = failed.batch_size - max(unit, int(min(_HALF, share) * failed.batch_size))
    return max(least, smaller // unit * unit)


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
