"""What a probe is asked for, by the command line or by a study, and what holds where nothing is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchtune.config.options import MARGIN, STEPS, TIMEOUT_SECONDS, TOLERANCE, VERIFY_STEPS
from batchtune.units import typed_size
from batchtune.vocabulary import AskedLengths, Variant

SILENT_SHARE = 1 / 3  # of the timeout, that a batch may take: the three steps of an attempt are then over by then
_MOST_ACCUMULATED_IN_SEARCH = 2  # from the second micro-batch on, gradients are there and memory is the same
SECONDS_PER_POINT = 1.0  # of timing a size


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What the search may try.

    Attributes:
        minimum: smallest micro-batch size, rounded up to a multiple.
        maximum: largest one, rounded down and never exceeded; None: no cap.
        multiple_of: only multiples are tried.
        tolerance: how far apart largest fit and smallest failure may be, relative; 0 is exact.
        no_oom: try only sizes that are predicted to fit even at worst, until such a step gains too little.
        of_today: what the task is trained with, and so no size that it rejects; None: that is not known.
    """

    minimum: int = 1
    maximum: int | None = None
    multiple_of: int = 1
    tolerance: float = TOLERANCE
    no_oom: bool = False
    of_today: int | None = None

    @property
    def least(self) -> int:
        """The smallest size that may be tried."""
        return -(-self.minimum // self.multiple_of) * self.multiple_of


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(Bounds):
    """What a probe is asked for; where the command line has it as an option, under the same name.

    Attributes:
        steps: optimizer steps of one attempt.
        timeout: seconds after which a silent attempt counts as hanging.
        verify_steps: optimizer steps of the final check in a fresh process.
        verify_timeout: the same for the final check, whose evaluation is the user's own; None: no other.
        verify_seconds: that these may take; with less time there are fewer, down to those of an attempt. None: any.
        evaluation_batch_size: of the final check's default evaluation, as `TryBatchSize` has it.
        throughput: also time steps at several sizes.
        timing_seconds: of each of them.
        timing_within: seconds for all of them; where steps are slow fewer sizes are timed, and none again. None: any.
        flops: count those of a sample even where the device's peak is not known.
        accumulation_steps: micro-batches of one step; 0: as in the user's own training, 1 if that is not known.
        max_step_seconds: sizes whose step takes longer are of no use to whoever asks; None: see `longest_step`.
        lengths: that are asked for; `auto` for the best of those that the training set has.
        variant: what is trained by; what it leaves open is as the task was opened.
        useful_size: up to here sizes are of use however long their step takes.
    """

    steps: int = STEPS
    timeout: float = TIMEOUT_SECONDS
    verify_steps: int = VERIFY_STEPS
    verify_timeout: float | None = None
    verify_seconds: float | None = None
    evaluation_batch_size: int | None = None
    throughput: bool = True
    timing_seconds: float = SECONDS_PER_POINT
    timing_within: float | None = None
    flops: bool = True
    accumulation_steps: int = 1
    max_step_seconds: float | None = None
    useful_size: int = 1
    lengths: AskedLengths | None = None
    variant: Variant = Variant()  # noqa: RUF009 - it never changes

    def micro_batches(self, *, verify: bool) -> int:
        """Of a step: all of them in a final check, and in a search as many as take memory."""
        return self.accumulation_steps if verify else min(self.accumulation_steps, _MOST_ACCUMULATED_IN_SEARCH)

    def longest_step(self, *, verify: bool) -> float:
        """Seconds; a child is silent during a micro-batch, and of some trainings memory ends far above any timeout."""
        return self.max_step_seconds or self.micro_batches(verify=verify) * SILENT_SHARE * self.timeout

    @property
    def check_timeout(self) -> float:
        """Seconds after which a silent final check counts as hanging."""
        return self.verify_timeout or self.timeout


def typed_options(precision: Sequence[str], memory_limit: int | None, margin: float, device: str) -> str | None:
    """What a probe was asked for of precision, memory (in bytes) and device, as it is typed; None: nothing unusual."""
    given = [f"--precision {each}" for each in precision if len(precision) == 1 and each not in {"auto", "all"}]
    if memory_limit:
        given.append(f"--memory-limit {typed_size(memory_limit)}")
    if margin != MARGIN:
        given.append(f"--margin {margin:g}")
    if device != "auto":
        given.append(f"--device {device}")
    return " ".join(given) or None
