"""Running a probe: attempts in a child process, the final check in a fresh one, and the certificate they make."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchtune.document import Attempt, ProbeResult, ThroughputPoint
from batchtune.errors import BatchtuneError, NothingFitsError, UsageError, UserCodeError
from batchtune.observer import Observer
from batchtune.probe.final_check import (
    Check,
    cut_short,
    out_in_evaluation,
    size_below,
    steps_to_verify,
    timed_out_twice,
)
from batchtune.probe.memory_model import Prior
from batchtune.probe.options import ProbeOptions
from batchtune.probe.search import Bounds, as_in_fresh_process, bracket, next_size
from batchtune.probe.timing.curve import add_flops, measure_curve
from batchtune.probe.timing.ranks import Times, data_parallel, measure_times
from batchtune.probe.timing.throughput import SECONDS_PER_POINT, fit_step_time, sizes_to_time
from batchtune.probe.warnings import (
    attempt_warnings,
    busy_warnings,
    evaluation_warnings,
    kept_warnings,
    leak_warnings,
    mapping_warnings,
    recompile_warnings,
)
from batchtune.processes.worker import Worker, WorkerDied
from batchtune.protocol.commands import TimeSteps, TryBatchSize

_MOST_ACCUMULATED_IN_SEARCH = 2  # from the second micro-batch on, gradients are there and memory is the same
_NEAR = 0.8  # of the largest size that is of use: step times are not so sharp that going on would tell more
_NOTICED = 0.005  # of the limit: a peak that is lower by so much in a fresh process calls for another look


class Probe:
    """One probe at one precision.

    Args:
        worker: a child of the task; it is closed and opened again for the final check.
        options: what to search for.
        precision: bf16, fp16, fp32 or tf32.
        observer: told of every attempt.
        known: attempts of the search in an earlier, interrupted start.
        prior: peak reserved bytes by batch size as estimated; it chooses where to look, never the answer.
    """

    def __init__(
        self,
        worker: Worker,
        options: ProbeOptions,
        precision: str,
        observer: Observer,
        known: Sequence[Attempt] = (),
        prior: Prior | None = None,
    ) -> None:
        self._prior = prior
        self._worker, self._options, self._precision, self._observer = worker, options, precision, observer
        self.attempts: list[Attempt] = list(known)
        self.throughput: list[ThroughputPoint] = []
        self._started = time.perf_counter()
        self._verified: Attempt | None = None
        self._checks: list[Check] = []
        self._too_slow_above: int | None = None
        opened = worker.start()
        worker.prepare()  # the final check's
        self._limit: int | None = opened.memory_limit_bytes
        self._opened = opened
        world_size, samples = opened.world_size, opened.train_size
        self._data_size: int | None = samples // world_size if samples is not None else None
        self._rank_times: Times = {}
        caps = [cap for cap in (options.maximum, self._data_size) if cap is not None]
        self._bounds = Bounds(
            minimum=options.minimum,
            maximum=min(caps, default=None),
            multiple_of=options.multiple_of,
            tolerance=options.tolerance,
            no_oom=options.no_oom,
        )
        cap, unit = self._bounds.maximum, options.multiple_of
        smallest = -(-options.minimum // unit) * unit
        if cap is not None and smallest > cap:
            each = f" for each of {world_size} ranks" if world_size > 1 else ""
            why = f"train_dataset has {cap} samples{each}" if cap == self._data_size else f"the maximum is {cap}"
            raise UsageError(
                f"no batch size to try: {smallest} is the least multiple of {unit} from {options.minimum} up, but {why}"
            )

    def run(self) -> ProbeResult:
        """Searches, checks the answer in a fresh process, and times steps around it.

        Raises:
            NothingFitsError: not even the smallest size trains.
            UserCodeError: the user's code raises at every size, or in the final check.
        """
        self.find()
        self.time_steps()
        return self.result()

    def find(self) -> None:
        """Searches, and checks the answer in a fresh process, which has given its tensors back when this returns.

        Raises:
            NothingFitsError: as `run`.
            UserCodeError: as `run`.
        """
        self._observer.stage(f"probing {self._precision}")
        self._search(self._bounds, self._options.steps, verify=False)
        if bracket(self.attempts)[0] == 0:
            raise self._nothing_fits()
        self._verify()

    def time_steps(self) -> None:
        """Times steps up to the size that was found, where that was asked for."""
        assert self._verified is not None  # noqa: S101 - find() raises otherwise
        if not self._options.throughput:
            return
        sizes = sizes_to_time(
            self._verified.batch_size, minimum=self._options.minimum, multiple_of=self._options.multiple_of
        )
        self._observer.stage("timing steps")
        options = self._options
        how: dict[str, Any] = {"precision": self._precision, "timeout": options.timeout}
        command = TimeSteps(
            batch_size=self._verified.batch_size,
            precision=self._precision,
            seconds=SECONDS_PER_POINT,
            accumulation_steps=options.accumulation_steps,
        )
        if self._opened.is_group:
            self._rank_times = measure_times(self._worker, self._observer, command, options.timeout)
        command = command.but(seconds=options.timing_seconds)
        measure_curve(self._worker, self.throughput, sizes, self._observer, command, options.timeout)
        add_flops(self._worker, self.throughput, self._observer, only_as_share=not options.flops, **how)

    def result(self) -> ProbeResult:
        """What is known so far, complete or not."""
        verified, low = self._verified, self._largest_fit
        last = {attempt.batch_size: attempt for attempt in self.attempts}
        high = min((size for size, attempt in last.items() if size > low and not attempt.fits), default=None)
        best = verified or last.get(low)
        accumulation = self._options.accumulation_steps
        ranks = data_parallel(self._opened, low, accumulation, last.get(high or 0), self._rank_times) if low else None
        return ProbeResult(
            precision=self._precision,
            max_batch_size=low or None,
            first_failing_batch_size=high,
            limited_by=self._limited_by(low, high),
            memory_limit_bytes=self._limit,
            peak_allocated_bytes=best.peak_allocated_bytes if best else None,
            peak_reserved_bytes=best.peak_reserved_bytes if best else None,
            verified_in_fresh_process=verified is not None,
            verify_steps=verified.steps if verified else None,
            seconds=round(time.perf_counter() - self._started, 3),
            attempts=self.attempts,
            throughput=self.throughput,
            throughput_fit=fit_step_time(self.throughput),
            warnings=self._warnings(),
            gradient_accumulation_steps=accumulation,
            data_parallel=ranks,
        )

    def _warnings(self) -> list[str]:
        """What a reader of the result must know besides the numbers."""
        low = self._largest_fit
        found = [*attempt_warnings(self.attempts, low), *recompile_warnings(self.attempts, self.throughput)]
        found += [*leak_warnings(self.attempts, self._limit), *self._reasons()]
        found += busy_warnings(self.throughput)
        slow = self._too_slow_above
        if slow is not None and low + self._bounds.multiple_of > slow:
            found.append(f"batch sizes above {low} were not probed: budget.run has room for too few of their steps")
        return found

    @property
    def _largest_fit(self) -> int:
        return self._verified.batch_size if self._verified else bracket(self.attempts)[0]

    def _reasons(self) -> list[str]:
        """Why memory ended, where that is known and not the batch of a training step."""
        passed = self._verified.batch_size if self._verified else 0
        return [
            *kept_warnings([each.attempt for each in self._checks], cut_short(self._checks)),
            *evaluation_warnings(out_in_evaluation(self._checks), passed, self._options.tolerance),
            *(mapping_warnings(self.attempts) if self._opened.device == "cpu" else []),
        ]

    def _limited_by(self, low: int, high: int | None) -> Any:
        if not low:
            return None
        if high is not None:
            last = {attempt.batch_size: attempt for attempt in self.attempts}
            return "memory" if last[high].outcome == "oom" else last[high].outcome
        cap = self._bounds.maximum
        if self._too_slow_above is not None and low + self._bounds.multiple_of > self._too_slow_above:
            return "max"
        if cap is None or low + self._bounds.multiple_of <= cap:
            return "memory" if self._options.no_oom else None
        return "dataset" if cap == self._data_size and cap != self._options.maximum else "max"

    def _search(self, bounds: Bounds, steps: int, *, verify: bool) -> None:
        while True:
            counted = [each.attempt for each in self._checks] if verify else self.attempts
            choice = next_size(counted, self._within_time(bounds), self._limit, self._prior)
            if choice.batch_size is None:
                self._observer.note(choice.reason)
                return
            self._observer.attempting(choice.batch_size, choice.reason)
            self._attempt(choice.batch_size, steps, verify=verify)

    def _within_time(self, bounds: Bounds) -> Bounds:
        """The bounds, with a maximum where the slowest fit says that a step would take longer than is of use."""
        longest, self._too_slow_above = self._options.max_step_seconds, None
        slowest = max((each for each in self.attempts if each.fits), key=lambda each: each.batch_size, default=None)
        if longest is None or slowest is None or not slowest.step_seconds:
            return bounds
        least = max(slowest.batch_size, self._options.useful_size)
        useful = max(least, int(slowest.batch_size * longest / slowest.step_seconds))
        useful = least if least >= _NEAR * useful else useful
        if bounds.maximum is not None and bounds.maximum <= useful:
            return bounds
        self._too_slow_above = useful
        return replace(bounds, maximum=max(bounds.minimum, useful))

    def _attempt(self, batch_size: int, steps: int, *, verify: bool) -> Attempt:
        started, micro_batches = time.perf_counter(), self._options.accumulation_steps
        try:
            command = TryBatchSize(
                batch_size=batch_size,
                steps=steps,
                precision=self._precision,
                verify=verify,
                accumulation_steps=micro_batches if verify else min(micro_batches, _MOST_ACCUMULATED_IN_SEARCH),
            )
            timeout = self._options.check_timeout if verify else self._options.timeout
            attempt = self._worker.call(command, timeout=timeout).attempt
        except WorkerDied as lost:
            attempt = Attempt(
                batch_size=batch_size,
                outcome=lost.outcome,
                seconds=round(time.perf_counter() - started, 4),
                purpose="verify" if verify else "search",
                message=str(lost),
                limiting_rank=lost.rank,
            )
        self.attempts.append(attempt)
        if verify:
            self._checks.append(Check(attempt, steps))
        self._observer.attempted(attempt)
        return attempt

    def _verify(self) -> None:
        """Runs the answer in a fresh process; where it fails there, backs off until a size passes.

        When that left a gap wider than the tolerance, it is searched with attempts that evaluate and save, too.
        """
        size, failed = bracket(self.attempts)[0], None
        while not self._verify_at(size):
            timed_out = timed_out_twice(self._checks, self._options)
            if timed_out is not None:
                raise timed_out
            smaller = size_below(self._checks, self._options)
            if smaller is None:
                raise self._nothing_fits()
            failed, size = size, smaller
        if failed is None:
            self._look_above()
        elif failed - size > max(self._options.multiple_of, int(self._options.tolerance * failed)):
            proven = size
            self._search(replace(self._bounds, minimum=size), self._options.steps, verify=True)
            passed = {each.attempt.batch_size for each in self._checks if each.attempt.fits}
            any(self._verify_at(size) for size in sorted(passed, reverse=True) if size > proven)

    def _look_above(self) -> None:
        """Where the fresh process took much less than the search's, goes on above the answer, always in fresh ones."""
        assert self._verified is not None  # noqa: S101 - _verify sees to it
        least = max(self._options.tolerance / 2, _NOTICED) * (self._limit or 0)
        searched = as_in_fresh_process(self.attempts[:-1], self._verified, least)
        while searched is not None:
            checked = [each.attempt for each in self._checks]
            choice = next_size([*searched, *checked], self._within_time(self._bounds), self._limit, self._prior)
            if choice.batch_size is None:
                return
            self._verify_at(choice.batch_size)

    def _verify_at(self, size: int) -> bool:
        steps = steps_to_verify(self.attempts, self._options)
        self._worker.renew()
        self._observer.attempting(size, f"final check in a fresh process: {steps} steps, evaluation, saving")
        attempt = self._attempt(size, steps, verify=True)
        if (
            attempt.outcome == "user_error" and self._verified is None
        ):  # training went well: evaluation or saving raises
            raise UserCodeError(str(attempt.message))
        if attempt.fits:
            self._verified = attempt
        return attempt.fits

    def _nothing_fits(self) -> BatchtuneError:
        failed = [attempt for attempt in self.attempts if not attempt.fits]
        first = min(reversed(failed), key=lambda attempt: attempt.batch_size)
        if all(attempt.outcome == "user_error" for attempt in self.attempts):
            return UserCodeError(str(self.attempts[0].message))
        limit = f" within {self._limit / 2**20:,.0f} MiB" if self._limit is not None else ""
        why: dict[str, str] = {
            "oom": "use a smaller model, activation checkpointing, a lower precision or a larger --memory-limit",
            "timeout": "raise --timeout if one attempt really takes that long",
            "kernel_limit": "an index or a label out of range looks like this, too: run the task by itself on the CPU",
        }
        reasons = "; ".join(self._reasons()) if first.outcome == "oom" else ""
        remedy = reasons or why.get(first.outcome, "run the task by itself to see why")
        when = f" after {first.steps} steps of the final check" if first.purpose == "verify" else ""
        ended = f"batch size {first.batch_size} ended in {first.outcome}{when} ({first.message})"
        leak = "".join(f"; {text}" for text in leak_warnings(self.attempts, self._limit))
        return NothingFitsError(f"nothing fits{limit}: {ended}{leak}; {remedy}")
