"""What a probe has found so far, and all that is said of it: its result, its warnings, and why nothing fits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from batchtune.config.probe import Bounds, ProbeOptions
from batchtune.document import Attempt, LengthCheck, LimitedBy, ProbeResult, ThroughputPoint
from batchtune.errors import BatchtuneError, HalfPrecisionError, NothingFitsError, UserCodeError
from batchtune.lengths.mixing import length_warnings
from batchtune.probe.bracket import bracket, ends_above, failures_above, least_above
from batchtune.probe.final_check import Check, cut_short, order_warnings, out_in_evaluation
from batchtune.probe.frontier import length_counts, length_points, unseen_lengths
from batchtune.probe.timing.steps import Times, busy_warnings, data_parallel, fit_step_time
from batchtune.protocol.commands import STEPS_AFTER_EVALUATION, Opened
from batchtune.task.samples import kept_warnings as kept_by_data
from batchtune.task.samples import unseen_warnings
from batchtune.units import size
from batchtune.vocabulary import LARGEST, Length

_APART = 4  # times: among sizes so different, memory that ends after the same number of steps is not the batch's
_ADDS_UP = (
    "compute_loss adds up the samples of a batch: val_loss depends on how many are evaluated at once, and accumulated "
    "micro-batches are not one batch; let it return the mean"
)
_KEPT = "something keeps what each step made: losses that are summed without .item(), or a list of outputs"
_NEAR = 0.8  # of the largest size that is of use: step times are not so sharp that going on would tell more
# What an error says of its own size; the second are the rows of a product whose inner sizes differ.
_SIZE_ITSELF = re.compile(r" at batch size [\d,]+|\(\d+(?=x\d+ and \d+x\d+\))")
_OF_CODE = re.compile(r" raised (Name|Attribute|Import|ModuleNotFound|Type|Key|Syntax|UnboundLocal)Error\b")
_OF_BATCHES = re.compile(r" raised AssertionError\b|\bbatch(es)?\b|\b(divisible|multiple)\b|\bout of range\b")
_SMALLER = "smaller sizes were not asked for: lower --min and --multiple-of, or batch_size.multiple_of"
_REMEDIES = {
    "oom": "use a smaller model, activation checkpointing, a lower precision or a larger --memory-limit",
    "inference oom": "use a smaller model, a lower precision or a larger --memory-limit",
    "timeout": "raise --timeout if one attempt really takes that long",
    "kernel_limit": "an index or a label out of range looks like this, too: run the task by itself on the CPU",
}


@dataclass(kw_only=True)
class Findings:
    """One probe at one precision as far as it has come.

    Attributes:
        options: what is searched for.
        opened: the task on its device.
        precision: bf16, fp16, fp32 or tf32.
        bounds: of the sizes to try.
        attempts: all, in order.
        frames: of the user's code, where that raised last.
        fails_in_half: whether its half precision is why it raised.
        checks: those of them that evaluated and saved, too.
        batches_differ: in what they take, as where each is padded to its longest sample.
        verified: the final check that passed at the largest size.
        too_slow_above: the size above which a step takes longer than is of use; None: none does.
        throughput: the step times.
        rank_times: those of a group of ranks.
        lengths: attempts at each length, the longest first, whose are `attempts`; none where none were asked for.
        length_check: that of all lengths together, once it has passed.
        length_sizes: the batches that it passed with.
    """

    options: ProbeOptions
    opened: Opened
    precision: str
    bounds: Bounds
    attempts: list[Attempt]
    frames: str = ""
    fails_in_half: bool = False
    checks: list[Check] = field(default_factory=list)
    batches_differ: bool = False
    verified: Attempt | None = None
    too_slow_above: int | None = None
    throughput: list[ThroughputPoint] = field(default_factory=list)
    rank_times: Times = field(default_factory=dict)
    lengths: dict[Length, list[Attempt]] = field(default_factory=dict)
    length_check: LengthCheck | None = None
    length_sizes: dict[Length, int] = field(default_factory=dict)

    @property
    def largest_in_search(self) -> int:
        """The largest size that trained, whatever a final check says of it; 0: none."""
        return bracket(self.attempts)[0]

    @property
    def largest(self) -> int:
        """The largest size that trains as far as is known; 0: none.

        Before a final check has passed, no size above one that ran out of memory, if only in more steps than that took.
        """
        if self.verified:
            return self.verified.batch_size
        out = next((each.batch_size for each in failures_above(0, self.attempts) if each.outcome == "oom"), math.inf)
        return bracket([each for each in self.attempts if each.batch_size < out])[0]

    @property
    def limit(self) -> int | None:
        """Bytes that may be reserved."""
        return self.opened.memory_limit_bytes

    def within_time(self, bounds: Bounds) -> Bounds:
        """The bounds, with a maximum where the slowest fit says that a step would take longer than is of use."""
        self.too_slow_above = None
        slowest = max((each for each in self.attempts if each.fits), key=lambda each: each.batch_size, default=None)
        if slowest is None or not slowest.step_seconds:
            return bounds
        longest = self.options.longest_step(verify=slowest.purpose == "verify")
        least = max(slowest.batch_size, self.options.useful_size)
        useful = max(least, int(slowest.batch_size * longest / slowest.step_seconds))
        useful = least if least >= _NEAR * useful else useful
        if bounds.maximum is not None and bounds.maximum <= useful:
            return bounds
        self.too_slow_above = useful
        return replace(bounds, maximum=max(bounds.minimum, useful))

    def result(self, seconds: float) -> ProbeResult:
        """What is known after so many seconds, complete or not."""
        verified, low = self.verified, self.largest
        best = verified or {attempt.batch_size: attempt for attempt in self.attempts}.get(low)
        accumulation, ended = self.options.accumulation_steps, ends_above(low, self.attempts, self.bounds.multiple_of)
        failed = next(iter(ended), None)
        # of those that only left too little room, no rank is known
        limiting = next((each for each in ended if each.kept_back_bytes is None), None)
        ranks = data_parallel(self.opened, low, accumulation, limiting, self.rank_times) if low else None
        return ProbeResult(
            precision=self.precision,
            inference=self.opened.is_for_inference or None,
            max_batch_size=low or None,
            first_failing_batch_size=failed.batch_size if failed else None,
            limited_by=self._limited_by(low, failed),
            memory_limit_bytes=self.limit,
            peak_allocated_bytes=best.peak_allocated_bytes if best else None,
            peak_reserved_bytes=best.peak_reserved_bytes if best else None,
            verified_in_fresh_process=verified is not None,
            verify_steps=verified.steps if verified else None,
            seconds=round(seconds, 3),
            attempts=list(self.attempts),
            throughput=list(self.throughput),
            throughput_fit=fit_step_time(self.throughput),
            warnings=self._warnings(),
            gradient_accumulation_steps=None if self.opened.is_for_inference else accumulation,
            data_parallel=ranks,
            lengths=length_points(self.lengths, self._limited_by, self.length_sizes),
            length_distribution=length_counts(self.opened.lengths),
            length_check=self.length_check,
        )

    def _limited_by(self, low: int, failed: Attempt | None) -> LimitedBy | None:
        if not low:
            return None
        if failed is not None and failed.outcome != "fit":
            return "memory" if failed.outcome == "oom" else failed.outcome
        cap, beyond = self.bounds.maximum, least_above(low, self.attempts, self.bounds.multiple_of)
        if self.too_slow_above is not None and beyond > self.too_slow_above:
            return "timeout"
        if cap is None or beyond <= cap:
            return "memory" if self.options.no_oom else None
        return "max" if cap == self.options.maximum else "dataset"

    def _warnings(self) -> list[str]:
        low, slow = self.largest, self.too_slow_above
        found = [_ADDS_UP] if self.verified is not None and self.verified.loss_adds_up else []
        found += [*attempt_warnings(self.attempts, low), *recompile_warnings(self.attempts, self.throughput)]
        found += [*leak_warnings(self.attempts, self.limit), *self._why_memory_ended()]
        if self.bounds.maximum is None and low >= LARGEST:  # for its own sake: no batch is to fill the host's memory
            found.append(f"a search without a maximum ends at {LARGEST:,} samples: --max looks for more")
        found += [*busy_warnings(self.throughput), *unseen_warnings(self.opened.samples)]
        found += kept_by_data(self.opened.samples) if self.opened.device == "cpu" else []
        found += [*unseen_lengths(self.opened.lengths), *foreign_warnings(self.opened.foreign_parameters)]
        found += length_warnings(self.length_check, self.opened.environment)
        found += order_warnings(self.checks, self.opened.environment) if self.batches_differ else []
        found += self.opened.notes
        if self.verified is not None and self.verified.evaluation_batch_size is not None:
            found.append(f"runs evaluate {self.verified.evaluation_batch_size:,} samples at a time: more do not fit")
        if slow is not None and least_above(low, self.attempts, self.bounds.multiple_of) > slow:
            why = f"one takes longer than a third of --timeout ({self.options.timeout:g} s); raise it"
            why = "budget.run has room for too few of their steps" if self.options.max_step_seconds else why
            found.append(f"batch sizes above {low} were not probed: {why}")
        return found

    def _why_memory_ended(self) -> list[str]:
        """Where that is known and not the batch of a training step."""
        passed = self.verified.batch_size if self.verified else 0
        return [
            *kept_warnings([each.attempt for each in self.checks], cut_short(self.checks, self.limit)),
            *evaluation_warnings(out_in_evaluation(self.checks, self.limit), passed, self.options.tolerance),
            *(mapping_warnings(self.attempts) if self.opened.device == "cpu" else []),
        ]

    def raised(self, message: str | None, remedy: str = "") -> UserCodeError:
        """The error of the user's code, as an attempt has told it."""
        return (HalfPrecisionError if self.fails_in_half else UserCodeError)(str(message), self.frames, remedy)

    def nothing_fits(self) -> BatchtuneError:
        """The error where not even the smallest size trains, or none passes the final check."""
        if all(attempt.outcome == "user_error" for attempt in self.attempts):
            tried = ", ".join(str(each) for each in dict.fromkeys(each.batch_size for each in self.attempts))
            in_study = "in a study by baseline.batch_size and batch_size.multiple_of"
            others = f"others can be asked for, by --min and --multiple-of, {in_study}"
            may_help = not self.fails_in_half and _may_depend_on_size(each.message or "" for each in self.attempts)
            hint = f" (sizes {tried} were tried; {others})" if "," in tried and may_help else ""
            last = self.attempts[-1].message  # that of the first may only be of too few samples
            return self.raised(last, hint)
        failed = [attempt for attempt in reversed(self.attempts) if not attempt.fits]
        first = min(failed, key=lambda attempt: attempt.batch_size)  # the last at the smallest size
        limit = f" within {self.limit / 2**20:,.0f} MiB" if self.limit is not None else ""
        reasons = "; ".join(self._why_memory_ended()) if first.outcome == "oom" else ""
        case = f"inference {first.outcome}" if self.opened.is_for_inference else first.outcome
        remedy = reasons or _REMEDIES.get(case, _REMEDIES.get(first.outcome, "run the task by itself to see why"))
        when = f" after {first.steps:,} steps of the final check" if first.purpose == "verify" else ""
        ended = f"batch size {first.batch_size:,} ended in {first.outcome}{when} ({first.message})"
        leak = "".join(f"; {text}" for text in leak_warnings(self.attempts, self.limit))
        remedy = f"{_SMALLER}, or {remedy}" if first.batch_size > 1 and not reasons else remedy
        return NothingFitsError(f"nothing fits{limit}: {ended}{leak}; {remedy}")


def _may_depend_on_size(messages: Iterable[str]) -> bool:
    """Whether another size may cure errors: they differ by size, but for its own mention, or speak of batches."""
    told = {_SIZE_ITSELF.sub("", each) for each in messages}
    return len(told) > 1 or any(_OF_BATCHES.search(each) and not _OF_CODE.search(each) for each in told)


def attempt_warnings(attempts: Sequence[Attempt], largest_fit: int) -> list[str]:
    """What failed for another reason than memory: each size below the largest fit, above it the first of each kind."""
    last = {attempt.batch_size: attempt for attempt in attempts}
    failed = [attempt for _, attempt in sorted(last.items()) if attempt.outcome not in {"fit", "oom"}]
    below = [each for each in failed if each.batch_size < largest_fit]
    found = [_ended(each, ", and the search went on above it") for each in below]
    above = [each for each in failed if each.batch_size > largest_fit]
    for outcome in dict.fromkeys(each.outcome for each in above):
        smallest, *larger = (each for each in above if each.outcome == outcome)
        text = _ended(smallest)
        if larger:
            text += f" ({len(larger)} larger size{'s' if larger[1:] else ''} failed so, too)"
        elif smallest.batch_size == max(last):
            text += " (larger sizes were not searched)"
        found.append(text)
    return found


def _ended(attempt: Attempt, then: str = "") -> str:
    outcome = "an error of the task's code" if attempt.outcome == "user_error" else attempt.outcome
    return f"batch size {attempt.batch_size:,} ended in {outcome}{then}: {attempt.message}"


def recompile_warnings(attempts: Sequence[Attempt], points: Sequence[ThroughputPoint]) -> list[str]:
    """One where torch.compile went on compiling, from the longest look at it."""
    looks: list[Attempt | ThroughputPoint] = [*points, *attempts]
    worst = max(looks, key=lambda each: each.recompiles or 0, default=None)
    if worst is None or not worst.recompiles:
        return []
    text = f"torch.compile compiled {worst.recompiles} more graphs after its first steps at batch {worst.batch_size:,}"
    return [f"{text}: a longer run will do so too (TORCH_LOGS=recompiles says why)"]


def leak_warnings(attempts: Sequence[Attempt], limit_bytes: int | None) -> list[str]:
    """One where memory grew from step to step, if the longest look of all saw it: a short one may see peaks settle."""
    worst = max(attempts, key=lambda each: (each.steps, each.growth_bytes_per_step or 0), default=None)
    if worst is None or not worst.growth_bytes_per_step:
        return []
    text = f"memory grew by {size(worst.growth_bytes_per_step)} a step at batch size {worst.batch_size:,}"
    high = worst.peak_reserved_bytes or worst.peak_allocated_bytes
    if worst.fits and limit_bytes and high:
        trained = worst.steps + (STEPS_AFTER_EVALUATION if worst.purpose == "verify" else 0)
        left = max(0, limit_bytes - high) // worst.growth_bytes_per_step
        text += f": a longer run would be out of memory some {trained + left:,} steps from its start"
    return [f"{text} ({_KEPT})"]


def kept_warnings(checks: Sequence[Attempt], cut_short: Sequence[Attempt]) -> list[str]:
    """One where every final check took about the same number of steps to fill the memory, whatever its batch size."""
    sizes, steps = [each.batch_size for each in cut_short], [each.steps for each in cut_short]
    if not sizes or len(checks) > len(sizes) or max(sizes) < _APART * min(sizes):
        return []
    if any(each.growth_bytes_per_step for each in checks):  # which says more
        return []
    if not 1 <= min(steps) <= max(steps) <= min(steps) + 1:
        return []
    after = f"{min(steps)} to {max(steps)}" if max(steps) > min(steps) else f"{min(steps)}"
    text = f"memory grows from step to step whatever the batch size: from {max(sizes):,} down to {min(sizes):,}"
    return [f"{text} every final check was out of it after {after} steps ({_KEPT})"]


def evaluation_warnings(evaluated: Sequence[Attempt], largest_fit: int, tolerance: float) -> list[str]:
    """One where memory ends later in training than in evaluation or saving, by more than the tolerance."""
    trained = max((each.batch_size for each in evaluated), default=0)
    if trained - largest_fit <= 2 * tolerance * trained:  # the largest fit may itself be one below where memory ends
        return []
    where = f"beyond {largest_fit:,}" if largest_fit else "at any size that was tried"
    return [f"training alone fits {trained:,}, but evaluation or saving does not {where}: evaluate in smaller batches"]


def mapping_warnings(attempts: Sequence[Attempt]) -> list[str]:
    """One where the end of memory was that a file could not be mapped, which counts as memory only on a CPU."""
    if not any(each.maps_file for each in attempts):
        return []
    text = "a file that is memory-mapped during training counts against a CPU's limit with its whole size"
    return [f"{text}: map it at import, where it does not count, or raise --memory-limit by its size"]


def foreign_warnings(parameters: int) -> list[str]:
    """One where the optimizer holds parameters that are not the model's."""
    if not parameters:
        return []
    which = f"{parameters} parameter{'s that are' if parameters > 1 else ' that is'} not the model's"
    text = f"the optimizer holds {which} (of a loss, say), which nobody moves to the device or saves with the model"
    return [f"{text}; make it a module of what build_model returns"]
