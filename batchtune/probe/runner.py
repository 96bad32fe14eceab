"""Running a probe: attempts in a child process, the final check in a fresh one, and step times around the answer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from batchtune.document import Attempt, ProbeResult
from batchtune.errors import UsageError, UserCodeError
from batchtune.observer import Observer
from batchtune.probe.final_check import (
    Check,
    asks_for_another,
    larger_with_room,
    leaks_all,
    leaks_soon,
    nearness,
    size_below,
    steps_to_verify,
    timed_out_twice,
    with_room,
    with_spread,
)
from batchtune.probe.findings import Findings
from batchtune.probe.frontier import largest_batches, lengths_of, next_attempt
from batchtune.probe.lengths.mixing import check_lengths, mixed, orders_of
from batchtune.probe.memory_model import PeakEstimate
from batchtune.probe.options import SECONDS_PER_POINT, Bounds, ProbeOptions
from batchtune.probe.search import as_in_fresh_process, bracket, next_size
from batchtune.probe.timing import add_flops, measure_curve, measure_times, sizes_to_time
from batchtune.processes.worker import Worker, WorkerDied
from batchtune.protocol.commands import Opened, TimeSteps, TryBatchSize, TryLengths
from batchtune.protocol.data import LengthsSeen
from batchtune.vocabulary import Length, length_text

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
        bounds = _bounds(options, opened)
        self._found = Findings(options=options, opened=opened, precision=precision, bounds=bounds, attempts=list(known))

    @property
    def attempts(self) -> list[Attempt]:
        """All so far, in order."""
        return self._found.attempts

    def run(self) -> ProbeResult:
        """`find` and `time_steps`, and what came of both."""
        self.find()
        self.time_steps()
        return self.result()

    def find(self) -> None:
        """Searches, and checks the answer in a fresh process, which has given its tensors back when this returns.

        Raises:
            NothingFitsError: not even the smallest size trains.
            UserCodeError: the user's code raises at every size, or in the final check.
        """
        self._observer.stage(f"probing {self._found.precision}")
        self._search(self._found.bounds, verify=False)
        if bracket(self.attempts)[0] == 0:
            raise self._found.nothing_fits()
        self._verify()
        if self._found.opened.lengths is not None:
            self._search_lengths(self._found.opened.lengths)
            self._check_lengths()

    def time_steps(self) -> None:
        """Times steps up to the size that was found, where that was asked for."""
        found, options = self._found, self._options
        assert found.verified is not None  # noqa: S101 - find() raises otherwise
        if not options.throughput:
            return
        self._observer.stage("timing steps")
        largest, micro_batches = found.verified.batch_size, options.accumulation_steps
        command = TimeSteps(
            batch_size=largest, precision=found.precision, seconds=SECONDS_PER_POINT, accumulation_steps=micro_batches
        )
        worker, observer, timeout = self._worker, self._observer, options.timeout
        if found.opened.is_group:
            found.rank_times = measure_times(worker, observer, command, timeout)
        sizes = sizes_to_time(largest, minimum=options.minimum, multiple_of=options.multiple_of)
        command = command.but(seconds=options.timing_seconds)
        measure_curve(worker, found.throughput, sizes, observer, command, timeout)
        add_flops(worker, found.throughput, observer, found.precision, timeout, only_as_share=not options.flops)

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
        """One try; with `verify` in as many fresh processes as the device asks for, of which it has to pass all."""
        found = self._found
        longest = found.opened.lengths.longest if found.opened.lengths else None
        attempt = self._tried(_command(found, batch_size, steps, longest, verify=verify))
        found.attempts.append(attempt)
        if verify:
            found.checks.append(Check(attempt, steps))
        self._observer.attempted(attempt)
        return attempt

    def _tried(self, command: TryBatchSize) -> Attempt:
        """What came of a command; of a final check in as many processes as the device asks for."""
        found = self._found
        tries = [_try(self._worker, found, command)]
        while command.verify and tries[-1].fits and asks_for_another(tries, found.opened.device, found.limit):
            tries.append(_try(self._worker, found, command))
        return with_spread(tries, found.limit) if tries[-1].fits else tries[-1]

    def _search_lengths(self, seen: LengthsSeen) -> None:
        """Searches at each length below the longest."""
        found, (longest, *others) = self._found, lengths_of(seen, self._options.at_most_lengths)
        found.lengths = {longest: found.attempts} | {length: [] for length in others}
        while True:
            length, choice = next_attempt(found.lengths, found.bounds, found.limit, self._prior)
            if choice.batch_size is None:
                return self._observer.note(choice.reason)
            self._observer.attempting(choice.batch_size, f"length {length_text(length)}: {choice.reason}")
            command = _command(found, choice.batch_size, self._options.steps, length, verify=False)
            found.lengths[length].append(self._tried(command))
            self._observer.attempted(found.lengths[length][-1])

    def _check_lengths(self) -> None:
        """The final check of all lengths together; their batches become smaller until it passes."""
        found = self._found
        made, sizes = check_lengths(
            found.lengths,
            largest_batches(found.lengths),
            self._try_mixed,
            unit=found.bounds.multiple_of,
            minimum=found.bounds.minimum,
            limit=found.limit,
            orders=orders_of(found.opened.device, found.lengths),
            allocator=found.opened.environment.allocator_conf,
        )
        (longest, *_), found.length_check, found.length_sizes = sizes, made, sizes
        if longest in made.lowered:
            found.verified = [each for each in found.attempts if each.fits and each.batch_size == sizes[longest]][-1]

    def _try_mixed(self, sizes: Mapping[Length, int], first: int) -> Attempt:
        found, (longest, *_) = self._found, sizes
        steps, orders = steps_to_verify(found.attempts, self._options), orders_of(found.opened.device, sizes)
        command = mixed(_command(found, sizes[longest], steps, longest, verify=True), sizes, first, orders)
        what = f"{command.steps} steps, evaluation, saving"
        self._observer.attempting(sizes[longest], f"final check of all lengths in a fresh process: {what}")
        attempt = self._tried(command)
        if attempt.outcome == "user_error":
            raise UserCodeError(str(attempt.message), found.frames)
        self._observer.attempted(attempt)
        return attempt

    def _verify(self) -> None:
        """Runs the answer in a fresh process; where it fails there, backs off until a size passes.

        When that left a gap wider than the tolerance, it is searched with attempts that evaluate and save, too.
        """
        found, options = self._found, self._options
        size, failed = with_room(self.attempts, found.opened.device, found.limit, options), None
        while not self._verify_at(size):
            silent = timed_out_twice(found.checks, options)
            if silent is not None:
                raise silent
            smaller = size_below(found.checks, options, found.limit, self.attempts)
            if smaller is None or leaks_all(found.checks[-1], found.limit):
                raise found.nothing_fits()
            failed, size = size, smaller
        near = nearness(found.checks, options, found.limit)
        if leaks_soon(self.attempts[-1], found.limit):
            self._observer.note("no larger size is looked for: memory grows with every step")
        elif failed is None:
            self._look_above()
        elif failed - size > max(options.multiple_of, int(near * failed)):
            proven = size
            self._search(replace(found.bounds, minimum=size, tolerance=near), verify=True)
            passed = {each.attempt.batch_size for each in found.checks if each.attempt.fits}
            any(self._verify_at(size) for size in sorted(passed, reverse=True) if size > proven)

    def _look_above(self) -> None:
        """Where the fresh process took much less than expected, goes on above the answer, always in fresh ones."""
        found = self._found
        assert found.verified is not None  # noqa: S101 - _verify sees to it
        if found.opened.device == "cpu":
            larger = larger_with_room(found.verified, self.attempts, found.limit, self._options)
            if larger is not None and self._verify_at(larger):
                self._look_above()
            return
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
        what = "forward passes" if self._found.opened.is_for_inference else "steps, evaluation, saving"
        self._observer.attempting(size, f"final check in a fresh process: {steps} {what}")
        attempt = self._attempt(size, steps, verify=True)
        if attempt.outcome == "user_error" and self._found.verified is None:  # in evaluation or saving
            raise UserCodeError(str(attempt.message), self._found.frames)
        if attempt.fits:
            self._found.verified = attempt
        return attempt.fits


def _command(
    found: Findings, batch_size: int, steps: int, length: Length | None = None, *, verify: bool
) -> TryBatchSize:
    """What an attempt is asked for."""
    micro_batches = found.options.accumulation_steps
    return TryBatchSize(
        batch_size=batch_size,
        steps=steps,
        precision=found.precision,
        verify=verify,
        length=length,
        evaluation_batch_size=found.options.evaluation_batch_size,
        accumulation_steps=micro_batches if verify else min(micro_batches, _MOST_ACCUMULATED_IN_SEARCH),
    )


def _try(worker: Worker, found: Findings, command: TryBatchSize) -> Attempt:
    """One attempt in a child: in a fresh one where it is to verify, and for each on a CPU that can be forked."""
    on_cpu, options, verify = found.opened.device == "cpu", found.options, command.verify
    if verify or (on_cpu and found.opened.forks):  # whose allocator remembers what went before
        worker.renew(as_fork=not verify or not on_cpu)
    started = time.perf_counter()
    try:
        tried = worker.call(command, timeout=options.check_timeout if verify else options.timeout)
    except WorkerDied as died:
        return Attempt(
            batch_size=command.batch_size,
            length=None if isinstance(command, TryLengths) else command.length,
            outcome=died.outcome,
            seconds=round(time.perf_counter() - started, 4),
            purpose="verify" if verify else "search",
            message=str(died),
            limiting_rank=died.rank,
        )
    found.frames = tried.frames if verify else found.frames or tried.frames
    return tried.attempt


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
    return replace(options, maximum=cap)
