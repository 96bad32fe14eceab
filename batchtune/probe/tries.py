"""Sizes tried in a child of the task, one after the other, and what has been found by them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from batchtune.config.probe import Bounds, ProbeOptions
from batchtune.document import Attempt
from batchtune.errors import UsageError
from batchtune.lengths.orders import ALL_ORDERS, ORDERS
from batchtune.observer import Observer
from batchtune.probe.final_check import CPU_TOLERANCE, Check, asks_for_another, with_spread
from batchtune.probe.findings import Findings
from batchtune.probe.memory_model import PeakEstimate
from batchtune.probe.search import next_size
from batchtune.processes.worker import Worker, WorkerDied
from batchtune.protocol.commands import Opened, TryBatchSize, TryLengths
from batchtune.vocabulary import Length


class Tries:
    """The attempts of one probe at one precision; the arguments are those of `Probe`.

    Attributes:
        found: all so far, and what came of them.
        careful: whether a size whose batches differ has to pass three times as many final checks on a GPU.

    Raises:
        UsageError: the data set has too few samples for the smallest size.
    """

    def __init__(
        self,
        worker: Worker,
        options: ProbeOptions,
        precision: str,
        observer: Observer,
        known: Sequence[Attempt],
        prior: PeakEstimate | None,
    ) -> None:
        self._worker, self._observer, self._prior = worker, observer, prior
        self.careful, self._failed_in = False, 0
        opened = worker.start()
        bounds = _bounds(options, opened)
        self.found = Findings(options=options, opened=opened, precision=precision, bounds=bounds, attempts=list(known))

    def search(self, minimum: int | None = None, *, verify: bool) -> None:
        """Tries one size after the other, from a minimum up, until the largest is known; see `attempt` for `verify`."""
        found = self.found
        while True:
            counted = [each.attempt for each in found.checks] if verify else found.attempts
            bounds = replace(found.bounds, minimum=minimum or found.bounds.minimum)
            choice = next_size(counted, found.within_time(bounds), found.limit, self._prior)
            if choice.batch_size is None:
                self._observer.note(choice.reason)
                return
            self._observer.attempting(choice.batch_size, choice.reason)
            self.attempt(choice.batch_size, found.options.steps, verify=verify)

    def attempt(self, batch_size: int, steps: int, *, verify: bool) -> Attempt:
        """One try; with `verify` in as many fresh processes as the device asks for, of which it has to pass all.

        It is none where the child has found that no epoch has so many samples: then the bounds end there.
        """
        found = self.found
        longest = found.opened.lengths.longest if found.opened.lengths else None
        bounds, attempt = found.bounds, self.run(self.command(batch_size, steps, longest, verify=verify))
        if found.bounds is not bounds:
            return attempt
        found.attempts.append(attempt)
        if verify:
            on_gpu, out = found.opened.device != "cpu", attempt.outcome == "oom"
            found.checks.append(Check(attempt, steps, by_luck=on_gpu and out and self._failed_in > 0))
        self._observer.attempted(attempt)
        return attempt

    def run(self, command: TryBatchSize) -> Attempt:
        """What came of a command; of a final check in as many processes as it takes, that which failed last first."""
        if not command.verify:
            return self._in_child(command)
        device, limit, passed = self.found.opened.device, self.found.limit, list[Attempt]()
        orders = ALL_ORDERS if self.careful else ORDERS
        is_order = isinstance(command, TryLengths) and device != "cpu"  # of several, each in one process
        for process in (0,) if is_order else dict.fromkeys((self._failed_in, *range(orders))):
            attempt = self._in_child(command.but(process=process))
            if not attempt.fits:
                self._failed_in = process
                return attempt
            passed.append(attempt)
            has_worst = process == 0 or len(passed) > 1  # the first process trains the most of them
            if has_worst and not asks_for_another(passed, device, limit, orders if self.found.batches_differ else 1):
                break
        return with_spread(passed, device, limit)

    def command(self, batch_size: int, steps: int, length: Length | None = None, *, verify: bool) -> TryBatchSize:
        """What a child is asked for."""
        found = self.found
        return TryBatchSize(
            batch_size=batch_size,
            steps=steps,
            precision=found.precision,
            verify=verify,
            length=length,
            evaluation_batch_size=found.options.evaluation_batch_size,
            variant=found.options.variant,
            accumulation_steps=found.options.micro_batches(verify=verify),
        )

    def _in_child(self, command: TryBatchSize) -> Attempt:
        """One attempt in a child: in a fresh one where it is to verify, and for each on a CPU that can be forked."""
        found, worker = self.found, self._worker
        on_cpu, options, verify = found.opened.device == "cpu", found.options, command.verify
        if verify or (on_cpu and found.opened.forks):  # whose allocator remembers what went before
            worker.renew()
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
        found.batches_differ |= tried.batches_differ
        if tried.most_samples is not None:
            found.bounds = _bounds(options, found.opened, tried.most_samples)
            return tried.attempt
        if verify or not tried.attempt.fits:
            found.frames, found.fails_in_half = tried.frames, tried.fails_in_half and found.precision != "fp32"
        return tried.attempt


def _bounds(options: ProbeOptions, opened: Opened, most_samples: int | None = None) -> Bounds:
    """The sizes to try, of which the data set has enough samples for each rank, and a loader's epoch a batch.

    On a CPU they are told apart no finer than processes differ, unless an exact search is asked for.

    Raises:
        UsageError: there are none.
    """
    world_size, samples, unit = opened.world_size, opened.train_size, options.multiple_of
    most = samples if samples is not None else most_samples
    data_size = most // world_size if most is not None else None
    cap = min((each for each in (options.maximum, data_size) if each is not None), default=None)
    if cap is not None and (least := options.least) > cap:
        each = f" for each of {world_size} ranks" if world_size > 1 else ""
        data = "an epoch of train_loader" if most_samples else "train_dataset"
        why = f"{data} has {cap} samples{each}" if cap == data_size else f"the maximum is {cap}"
        raise UsageError(
            f"no batch size to try: {least} is the least multiple of {unit} from {options.minimum} up, but {why}"
        )
    coarse = CPU_TOLERANCE if opened.device == "cpu" and options.tolerance else 0.0
    return replace(options, maximum=cap, tolerance=max(options.tolerance, coarse))
