"""Running a probe: attempts in a child process, the final check in a fresh one, and step times around the answer."""

from __future__ import annotations

import time
from collections.abc import Sequence

from batchtune.config.probe import ProbeOptions
from batchtune.document import Attempt, ProbeResult
from batchtune.errors import NothingFitsError
from batchtune.estimate.prior import LengthsPrior
from batchtune.observer import Observer
from batchtune.probe import final_check
from batchtune.probe.lengths import LengthSearch
from batchtune.probe.memory_model import PeakEstimate
from batchtune.probe.search import as_in_fresh_process, next_size
from batchtune.probe.timing.throughput import time_ranks, time_sizes
from batchtune.probe.tries import Tries
from batchtune.processes.worker import Worker

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
        self._tries = Tries(worker, options, precision, observer, known, prior)
        self._found = self._tries.found

    @property
    def attempts(self) -> list[Attempt]:
        """All so far, in order."""
        return self._found.attempts

    def run(self) -> ProbeResult:
        """`find` and `time_steps`, and what came of both."""
        self.find()
        self.time_steps()
        return self.result()

    def find(self, ahead: LengthsPrior | None = None) -> None:
        """Searches, and checks the answer in a fresh process, which has given its tensors back when this returns.

        Args:
            ahead: what is expected of all lengths.

        Raises:
            NothingFitsError: not even the smallest size trains.
            UserCodeError: the user's code raises at every size, or in the final check.
        """
        self._observer.stage(f"probing {self._found.precision}")
        self._tries.search(verify=False)
        if self._found.largest_in_search == 0:
            raise self._found.nothing_fits()
        self._verify()
        if self._found.opened.lengths is not None:
            LengthSearch(self._tries, self._observer, self._prior).run(ahead)

    def largest(self) -> int:
        """The size that `find` finds for a study; 0, and a note, where nothing fits."""
        try:
            self.find()
        except NothingFitsError as error:
            self._observer.announce(str(error.in_configuration()))
        return self.result().max_batch_size or 0

    def time_steps(self) -> None:
        """Times steps up to the size that was found, where that was asked for."""
        found = self._found
        assert found.verified is not None  # noqa: S101 - find() raises otherwise
        if self._options.throughput:
            self._observer.stage("timing steps")
            largest, how = found.verified, (self._options, self._observer)
            if found.opened.world_size > 1:
                found.rank_times = time_ranks(self._worker, largest.batch_size, found.precision, *how)
            time_sizes(self._worker, found.throughput, largest, found.precision, *how)

    def result(self) -> ProbeResult:
        """What is known so far, complete or not."""
        return self._found.result(time.perf_counter() - self._started)

    def _verify(self) -> None:
        """Runs the answer in a fresh process; where it fails there, backs off until a size passes.

        When that left a gap wider than the tolerance, it is searched with attempts that evaluate and save, too.
        """
        found, options = self._found, self._options
        size, failed = self._first_size(), None
        while not self._verify_at(size):
            silent = final_check.timed_out_twice(found.checks, options)
            if silent is not None:
                raise silent
            smaller = final_check.size_below(found.checks, options, found.limit, self.attempts)
            if smaller is None or final_check.leaks_all(found.checks, found.limit):
                raise found.nothing_fits()
            failed, size = size, smaller
        if final_check.leaks_soon(self.attempts[-1], found.limit):
            self._observer.note("no larger size is looked for: memory grows with every step")
        elif failed is None or (found.opened.device == "cpu" and final_check.tells_room(found.checks, found.limit)):
            self._look_above()
        elif any(each.by_luck for each in found.checks):
            self._leave_to_luck(size)
        elif failed - size > max(options.multiple_of, int(options.tolerance * failed)):
            proven = size
            self._tries.search(size, verify=True)
            passed = {each.attempt.batch_size for each in found.checks if each.attempt.fits}
            any(self._verify_at(size) for size in sorted(passed, reverse=True) if size > proven)

    def _first_size(self) -> int:
        """The size to check first: the largest fit; on a CPU one that leaves the room that other processes may need.

        There peaks rise for more steps than the search's attempts take, so that one takes as many as the check.
        """
        found, options, largest = self._found, self._options, self._found.largest_in_search
        if found.opened.device != "cpu" or found.limit is None:
            return largest
        searched = next(each for each in reversed(self.attempts) if each.batch_size == largest)
        steps, below = final_check.steps_to_verify(self.attempts, options), [largest]
        for rise in final_check.RISES:
            size = final_check.size_with_room(searched, self.attempts, found.limit, options, rise)
            if size >= largest:
                return largest
            self._observer.attempting(size, "as long as the final check, since peaks may rise")
            tried = self._tries.attempt(size, steps, verify=False)
            if tried.fits:
                return min(largest, final_check.size_with_room(tried, self.attempts, found.limit, options))
            below.append(
                final_check.size_below([final_check.Check(tried, steps)], options, found.limit, self.attempts) or size
            )
        return min(below)

    def _leave_to_luck(self, size: int) -> None:
        """Where the batches that happened to come ended a check, goes some way below the size that passed, too."""
        self._tries.careful = True
        while (smaller := final_check.below_by_luck(size, self._options)) < size and not self._verify_at(smaller):
            size = smaller

    def _look_above(self) -> None:
        """Where the fresh process took much less than expected, goes on above the answer, always in fresh ones."""
        found = self._found
        assert found.verified is not None  # noqa: S101 - _verify sees to it
        if found.opened.device == "cpu":
            while larger := final_check.larger_with_room(  # whose bounds may become narrower meanwhile
                found.verified, self.attempts, found.limit, self._options, found.bounds.maximum
            ):
                self._verify_at(larger)
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
        steps = final_check.steps_to_verify(self.attempts, self._options)
        what = "forward passes" if self._found.opened.is_for_inference else "steps, evaluation, saving"
        self._observer.attempting(size, f"final check in a fresh process: {steps} {what}")
        attempt = self._tries.attempt(size, steps, verify=True)
        if attempt.outcome == "user_error" and self._found.verified is None:  # in evaluation or saving
            raise self._found.raised(attempt.message)
        if attempt.fits:
            self._found.verified = attempt
        return attempt.fits
