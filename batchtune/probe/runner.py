"""Running a probe: attempts in a child process, the final check in a fresh one, and step times around the answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from batchtune.document import Attempt, ProbeResult
from batchtune.errors import UsageError, UserCodeError
from batchtune.observer import Observer
from batchtune.probe.final_check import Check, leaks_all, leaks_soon, size_below, steps_to_verify, timed_out_twice
from batchtune.probe.findings import Findings
from batchtune.probe.memory_model import PeakEstimate
from batchtune.probe.options import ProbeOptions
from batchtune.probe.search import Bounds, as_in_fresh_process, bracket, next_size
from batchtune.probe.timing.curve import add_flops, measure_curve
from batchtune.probe.timing.ranks import measure_times
from batchtune.probe.timing.throughput import SECONDS_PER_POINT, sizes_to_time
from batchtune.processes.worker import Worker, WorkerDied
from batchtune.protocol.commands import Opened, TimeSteps, TryBatchSize

_MOST_ACCUMULATED_IN_SEARCH = 2  # from the second micro-batch on, gradients are there and memory is the same
_NOTICED = 0.005  # of the limit: a peak that is lower by so much in a fresh process calls for another look


class Probe:
    """One probe at one precision.

    Args:
        worker: a child of the task; it is closed and opened again for the final check.
        options: what to search for.
        precision: bf16, fp16, fp32 or tf32.
        observer: told of every attempt.
        known: attempts of the search in an earlier, interrupted start.
        prior: what was estimated; it chooses where to look, never the answer.
    """

    def __init__(
        self,
        worker: Worker,
        options: ProbeOptions,
        precision: str,
        observer: Observer,
        known: Sequence[Attempt] = (),
        prior: PeakEstimate | None = None,
    ) -> None:
        self._worker, self._options, self._observer, self._prior = worker, options, observer, prior
        self._started = time.perf_counter()
        opened = worker.start()
        self._found = Findings(
            options=options,
            opened=opened,
            precision=precision,
            bounds=_bounds(options, opened),
            attempts=list(known),
        )

    @property
    def attempts(self) -> list[Attempt]:
        """All so far, in order."""
        return self._found.attempts

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
        self._observer.stage(f"probing {self._found.precision}")
        self._search(self._found.bounds, verify=False)
        if bracket(self.attempts)[0] == 0:
            raise self._found.nothing_fits()
        self._verify()

    def time_steps(self) -> None:
        """Times steps up to the size that was found, where that was asked for."""
        found, options = self._found, self._options
        assert found.verified is not None  # noqa: S101 - find() raises otherwise
        if not options.throughput:
            return
        self._observer.stage("timing steps")
        command = TimeSteps(
            batch_size=found.verified.batch_size,
            precision=found.precision,
            seconds=SECONDS_PER_POINT,
            accumulation_steps=options.accumulation_steps,
        )
        if found.opened.is_group:
            found.rank_times = measure_times(self._worker, self._observer, command, options.timeout)
        sizes = sizes_to_time(command.batch_size, minimum=options.minimum, multiple_of=options.multiple_of)
        command = command.but(seconds=options.timing_seconds)
        measure_curve(self._worker, found.throughput, sizes, self._observer, command, options.timeout)
        add_flops(
            self._worker,
            found.throughput,
            self._observer,
            precision=found.precision,
            timeout=options.timeout,
            only_as_share=not options.flops,
        )

    def result(self) -> ProbeResult:
        """What is known so far, complete or not."""
        return self._found.result(time.perf_counter() - self._started)

    def _search(self, bounds: Bounds, *, verify: bool) -> None:
        found = self._found
        while True:
            counted = [each.attempt for each in found.checks] if verify else found.attempts
            choice = next_size(counted, found.within_time(bounds), found.limit, self._prior)
            if choice.batch_size is None:
                self._observer.note(choice.reason)
                return
            self._observer.attempting(choice.batch_size, choice.reason)
            self._attempt(choice.batch_size, self._options.steps, verify=verify)

    def _attempt(self, batch_size: int, steps: int, *, verify: bool) -> Attempt:
        started, micro_batches = time.perf_counter(), self._options.accumulation_steps
        command = TryBatchSize(
            batch_size=batch_size,
            steps=steps,
            precision=self._found.precision,
            verify=verify,
            evaluation_batch_size=self._options.evaluation_batch_size,
            accumulation_steps=micro_batches if verify else min(micro_batches, _MOST_ACCUMULATED_IN_SEARCH),
        )
        try:
            timeout = self._options.check_timeout if verify else self._options.timeout
            tried = self._worker.call(command, timeout=timeout)
            attempt = tried.attempt
            self._found.frames = tried.frames if verify else self._found.frames or tried.frames
        except WorkerDied as died:
            attempt = Attempt(
                batch_size=batch_size,
                outcome=died.outcome,
                seconds=round(time.perf_counter() - started, 4),
                purpose="verify" if verify else "search",
                message=str(died),
                limiting_rank=died.rank,
            )
        self.attempts.append(attempt)
        if verify:
            self._found.checks.append(Check(attempt, steps))
        self._observer.attempted(attempt)
        return attempt

    def _verify(self) -> None:
        """Runs the answer in a fresh process; where it fails there, backs off until a size passes.

        When that left a gap wider than the tolerance, it is searched with attempts that evaluate and save, too.
        """
        found, options = self._found, self._options
        size, failed = bracket(self.attempts)[0], None
        while not self._verify_at(size):
            silent = timed_out_twice(found.checks, options)
            if silent is not None:
                raise silent
            smaller = size_below(found.checks, options, found.limit)
            if smaller is None or leaks_all(found.checks[-1], found.limit):
                raise found.nothing_fits()
            failed, size = size, smaller
        if leaks_soon(self.attempts[-1], found.limit):
            self._observer.note("no larger size is looked for: memory grows with every step")
        elif failed is None:
            self._look_above()
        elif failed - size > max(options.multiple_of, int(options.tolerance * failed)):
            proven = size
            self._search(replace(found.bounds, minimum=size), verify=True)
            passed = {each.attempt.batch_size for each in found.checks if each.attempt.fits}
            any(self._verify_at(size) for size in sorted(passed, reverse=True) if size > proven)

    def _look_above(self) -> None:
        """Where the fresh process took much less than the search's, goes on above the answer, always in fresh ones."""
        found = self._found
        assert found.verified is not None  # noqa: S101 - _verify sees to it
        least = max(self._options.tolerance / 2, _NOTICED) * (found.limit or 0)
        searched = as_in_fresh_process(self.attempts[:-1], found.verified, least)
        while searched is not None:
            checked = [each.attempt for each in found.checks]
            choice = next_size([*searched, *checked], found.within_time(found.bounds), found.limit, self._prior)
            if choice.batch_size is None:
                return
            self._verify_at(choice.batch_size)

    def _verify_at(self, size: int) -> bool:
        steps = steps_to_verify(self.attempts, self._options)
        self._worker.renew()
        what = "forward passes" if self._found.opened.is_for_inference else "steps, evaluation, saving"
        self._observer.attempting(size, f"final check in a fresh process: {steps} {what}")
        attempt = self._attempt(size, steps, verify=True)
        if attempt.outcome == "user_error" and self._found.verified is None:
            raise UserCodeError(
                str(attempt.message), self._found.frames
            )  # training went well: evaluation or saving raises
        if attempt.fits:
            self._found.verified = attempt
        return attempt.fits


def _bounds(options: ProbeOptions, opened: Opened) -> Bounds:
    """The sizes to try, of which the data set has enough samples for each rank.

    Raises:
        UsageError: there are none.
    """
    world_size, samples, unit = opened.world_size, opened.train_size, options.multiple_of
    data_size = samples // world_size if samples is not None else None
    cap = min((each for each in (options.maximum, data_size) if each is not None), default=None)
    smallest = -(-options.minimum // unit) * unit
    if cap is not None and smallest > cap:
        each = f" for each of {world_size} ranks" if world_size > 1 else ""
        why = f"train_dataset has {cap} samples{each}" if cap == data_size else f"the maximum is {cap}"
        raise UsageError(
            f"no batch size to try: {smallest} is the least multiple of {unit} from {options.minimum} up, but {why}"
        )
    return Bounds(
        minimum=options.minimum,
        maximum=cap,
        multiple_of=unit,
        tolerance=options.tolerance,
        no_oom=options.no_oom,
    )
