"""The batches of all lengths but the longest: attempts at each, and one final check that mixes them."""

from __future__ import annotations

from collections.abc import Mapping

from batchtune.document import Attempt
from batchtune.errors import UserCodeError
from batchtune.estimate.prior import LengthsPrior
from batchtune.lengths.buckets import lengths_of
from batchtune.lengths.mixing import Replay, check_lengths
from batchtune.lengths.orders import mixed, orders_of
from batchtune.observer import Observer
from batchtune.probe.final_check import steps_to_verify
from batchtune.probe.frontier import largest_batches, next_attempt, replayed_capacity
from batchtune.probe.memory_model import PeakEstimate
from batchtune.probe.tries import Tries
from batchtune.vocabulary import Length, length_text


class LengthSearch:
    """Of one probe, once the longest has its answer.

    Args:
        tries: of that probe; what is found goes where it keeps what it knows.
        observer: told of every attempt.
        prior: what was estimated of the longest.
    """

    def __init__(self, tries: Tries, observer: Observer, prior: PeakEstimate | None) -> None:
        self._tries, self._observer, self._prior = tries, observer, prior
        self._found, self._options = tries.found, tries.found.options

    def run(self, ahead: LengthsPrior | None) -> None:
        """Searches at each length below the longest, which is known, and checks all together.

        Raises:
            UserCodeError: the user's code raises in the check.
        """
        seen = self._found.opened.lengths
        assert seen is not None  # noqa: S101 - who asks for none is not here
        longest, *others = lengths_of(seen)
        self._found.lengths = {longest: self._found.attempts} | {length: [] for length in others}
        known = {longest: self._prior} if self._prior is not None else {}
        estimates = dict(ahead.peaks() if ahead else {}) | known
        self._search(estimates)
        self._check(self._replay(ahead, estimates))

    def _replay(self, ahead: LengthsPrior | None, estimates: Mapping[Length, PeakEstimate]) -> Replay | None:
        """What says which batches train one after another; None where it would not tell of this training."""
        capacity = replayed_capacity(self._found.lengths, estimates, self._found.limit)
        if ahead is None or not ahead.replays or capacity is None:
            return None
        return lambda sizes: ahead.fails_in(sizes, capacity)

    def _search(self, estimates: Mapping[Length, PeakEstimate]) -> None:
        """Searches at each length below the longest."""
        found = self._found
        while True:
            length, choice = next_attempt(found.lengths, found.bounds, found.limit, estimates)
            if choice.batch_size is None:
                return self._observer.note(choice.reason)
            self._observer.attempting(choice.batch_size, f"length {length_text(length)}: {choice.reason}")
            command = self._tries.command(choice.batch_size, self._options.steps, length, verify=False)
            found.lengths[length].append(self._tries.run(command))
            self._observer.attempted(found.lengths[length][-1])

    def _check(self, replay: Replay | None) -> None:
        """The final check of all lengths together; their batches become smaller until it passes."""
        found = self._found
        assert found.verified is not None  # noqa: S101 - the longest has passed its own
        longest, *others = found.lengths
        passed = {longest: found.verified.batch_size}
        if not others:
            found.length_sizes = passed
            return
        first = largest_batches(found.lengths)
        if found.opened.device != "cpu":  # where its check keeps back what processes differ by, and so will that of all
            first |= passed
        made, sizes = check_lengths(
            found.lengths,
            first,
            self._try_mixed,
            unit=found.bounds.multiple_of,
            minimum=found.bounds.minimum,
            orders=orders_of(found.opened.device, found.lengths),
            environment=found.opened.environment,
            replay=replay,
        )
        found.length_check, found.length_sizes = made, sizes
        if sizes[longest] != found.verified.batch_size:
            found.verified = [each for each in found.attempts if each.fits and each.batch_size == sizes[longest]][-1]

    def _try_mixed(self, sizes: Mapping[Length, int], first: int) -> Attempt:
        found, (longest, *_) = self._found, sizes
        steps, orders = steps_to_verify(found.attempts, self._options), orders_of(found.opened.device, sizes)
        alone, seen = self._tries.command(sizes[longest], steps, longest, verify=True), found.opened.lengths
        groups = seen.groups if seen else ()
        command = mixed(alone, sizes, first, orders, groups, asked=self._options.verify_steps)
        what = f"{command.steps} steps, evaluation, saving"
        self._observer.attempting(sizes[longest], f"final check of all lengths in a fresh process: {what}")
        attempt = self._tries.run(command)
        if attempt.outcome == "user_error":
            raise UserCodeError(str(attempt.message), found.frames)
        self._observer.attempted(attempt)
        return attempt
