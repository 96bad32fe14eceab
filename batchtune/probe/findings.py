"""What a probe has found so far, and all that is said of it: its result, its warnings, and why nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from batchtune.document import Attempt, ProbeResult, ThroughputPoint
from batchtune.errors import BatchtuneError, NothingFitsError, UserCodeError
from batchtune.probe.final_check import Check, cut_short, out_in_evaluation
from batchtune.probe.options import ProbeOptions
from batchtune.probe.search import Bounds, bracket
from batchtune.probe.timing.ranks import Times, data_parallel
from batchtune.probe.timing.throughput import fit_step_time
from batchtune.probe.warnings import (
    attempt_warnings,
    busy_warnings,
    end_warnings,
    evaluation_warnings,
    foreign_warnings,
    kept_warnings,
    leak_warnings,
    mapping_warnings,
    recompile_warnings,
)
from batchtune.protocol.commands import Opened
from batchtune.task.samples import unseen_warnings

_NEAR = 0.8  # of the largest size that is of use: step times are not so sharp that going on would tell more
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
        frames: of the user's code, where that raised in the first attempt.
        checks: those of them that evaluated and saved, too.
        verified: the final check that passed at the largest size.
        too_slow_above: the size above which a step takes longer than is of use; None: none does.
        throughput: the step times.
        rank_times: those of a group of ranks.
    """

    options: ProbeOptions
    opened: Opened
    precision: str
    bounds: Bounds
    attempts: list[Attempt]
    frames: str = ""
    checks: list[Check] = field(default_factory=list)
    verified: Attempt | None = None
    too_slow_above: int | None = None
    throughput: list[ThroughputPoint] = field(default_factory=list)
    rank_times: Times = field(default_factory=dict)

    @property
    def largest(self) -> int:
        """The largest size that trains as far as is known; 0: none."""
        return self.verified.batch_size if self.verified else bracket(self.attempts)[0]

    @property
    def limit(self) -> int | None:
        """Bytes that may be reserved."""
        return self.opened.memory_limit_bytes

    def within_time(self, bounds: Bounds) -> Bounds:
        """The bounds, with a maximum where the slowest fit says that a step would take longer than is of use."""
        longest, self.too_slow_above = self.options.max_step_seconds, None
        slowest = max((each for each in self.attempts if each.fits), key=lambda each: each.batch_size, default=None)
        if longest is None or slowest is None or not slowest.step_seconds:
            return bounds
        least = max(slowest.batch_size, self.options.useful_size)
        useful = max(least, int(slowest.batch_size * longest / slowest.step_seconds))
        useful = least if least >= _NEAR * useful else useful
        if bounds.maximum is not None and bounds.maximum <= useful:
            return bounds
        self.too_slow_above = useful
        return replace(bounds, maximum=max(bounds.minimum, useful))

    def result(self, seconds: float) -> ProbeResult:
        """What is known so far, complete or not.

        Args:
            seconds: that it took.
        """
        verified, low = self.verified, self.largest
        last = {attempt.batch_size: attempt for attempt in self.attempts}
        high = min((size for size, attempt in last.items() if size > low and not attempt.fits), default=None)
        best = verified or last.get(low)
        accumulation = self.options.accumulation_steps
        ranks = data_parallel(self.opened, low, accumulation, last.get(high or 0), self.rank_times) if low else None
        return ProbeResult(
            precision=self.precision,
            inference=self.opened.is_for_inference or None,
            max_batch_size=low or None,
            first_failing_batch_size=high,
            limited_by=self._limited_by(low, last.get(high) if high else None),
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
        )

    def _limited_by(self, low: int, failed: Attempt | None) -> Any:
        if not low:
            return None
        if failed is not None:
            return "memory" if failed.outcome == "oom" else failed.outcome
        cap, beyond = self.bounds.maximum, low + self.bounds.multiple_of
        if self.too_slow_above is not None and beyond > self.too_slow_above:
            return "max"
        if cap is None or beyond <= cap:
            return "memory" if self.options.no_oom else None
        return "max" if cap == self.options.maximum else "dataset"

    def _warnings(self) -> list[str]:
        low, slow = self.largest, self.too_slow_above
        found = [*attempt_warnings(self.attempts, low), *recompile_warnings(self.attempts, self.throughput)]
        found += [*leak_warnings(self.attempts, self.limit), *self._why_memory_ended()]
        found += end_warnings(low, self.bounds.maximum)
        found += [*busy_warnings(self.throughput), *unseen_warnings(self.opened.samples)]
        found += [*foreign_warnings(self.opened.foreign_parameters), *self.opened.notes]
        if self.verified is not None and self.verified.evaluation_batch_size is not None:
            found.append(f"runs evaluate {self.verified.evaluation_batch_size} samples at a time: more do not fit")
        if slow is not None and low + self.bounds.multiple_of > slow:
            found.append(f"batch sizes above {low} were not probed: budget.run has room for too few of their steps")
        return found

    def _why_memory_ended(self) -> list[str]:
        """Where that is known and not the batch of a training step."""
        passed = self.verified.batch_size if self.verified else 0
        return [
            *kept_warnings([each.attempt for each in self.checks], cut_short(self.checks)),
            *evaluation_warnings(out_in_evaluation(self.checks), passed, self.options.tolerance),
            *(mapping_warnings(self.attempts) if self.opened.device == "cpu" else []),
        ]

    def nothing_fits(self) -> BatchtuneError:
        """The error where not even the smallest size trains, or none passes the final check."""
        if all(attempt.outcome == "user_error" for attempt in self.attempts):
            return UserCodeError(str(self.attempts[0].message), self.frames)
        first = _last_at_the_smallest([attempt for attempt in self.attempts if not attempt.fits])
        limit = f" within {self.limit / 2**20:,.0f} MiB" if self.limit is not None else ""
        reasons = "; ".join(self._why_memory_ended()) if first.outcome == "oom" else ""
        case = f"inference {first.outcome}" if self.opened.is_for_inference else first.outcome
        remedy = reasons or _REMEDIES.get(case, _REMEDIES.get(first.outcome, "run the task by itself to see why"))
        when = f" after {first.steps} steps of the final check" if first.purpose == "verify" else ""
        ended = f"batch size {first.batch_size} ended in {first.outcome}{when} ({first.message})"
        leak = "".join(f"; {text}" for text in leak_warnings(self.attempts, self.limit))
        return NothingFitsError(f"nothing fits{limit}: {ended}{leak}; {remedy}")


def _last_at_the_smallest(failed: Sequence[Attempt]) -> Attempt:
    return min(reversed(failed), key=lambda attempt: attempt.batch_size)
