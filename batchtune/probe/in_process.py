"""A search in the caller's own process: their step is the attempt, and what fails must leave nothing behind."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

from batchtune.config.probe import Bounds, ProbeOptions
from batchtune.device._base import DeviceMemory, PeakTracker, require_no_more
from batchtune.device.failures import classify, free_frames, leaves_device_usable, links, message_of
from batchtune.device.memory import open_device
from batchtune.document import Attempt
from batchtune.errors import DeviceError, NothingFitsError, UsageError, kind_of
from batchtune.observer import Observer
from batchtune.probe.bracket import bracket
from batchtune.probe.final_check import CPU_TOLERANCE, within_a_cpus
from batchtune.probe.search import next_size
from batchtune.task.state import KeptState, kept_random_numbers, named, trained_by, without_gradients


def find_in_process(
    step: Callable[[int], object],
    bounds: Bounds,
    *,
    device: str,
    memory_limit: int | None,
    margin: float,
    steps: int,
    inference: bool = False,
    restore: object = "auto",
    observer: Observer | None = None,
    held_before: int | None = None,
    open_memory: Callable[[str], DeviceMemory] = open_device,
) -> int:
    """The largest batch size at which `step` runs; see `batchtune.find_batch_size`, which hands its arguments on.

    `held_before` is what was resident of this process, in bytes, before anything was imported for the search.

    Raises:
        NothingFitsError: no size runs.
        DeviceError: there is no such device, or a failure has left it unusable for this process.
        UsageError: the step is no function.
        Exception: what `step` raised, where it raises at every size.
    """
    if not callable(step):
        raise UsageError(f"the step is {kind_of(step)}; it must be a function that takes a batch size")
    memory = open_memory(device)
    limit, text = memory_limit or memory.default_limit(margin), ""
    trained = trained_by(step) if restore == "auto" else named(restore)
    with contextlib.nullcontext(observer) if observer else _on_stderr() as told:
        if memory_limit is not None and memory.device.type == "cpu":  # later steps may take so much more than these
            require_no_more(memory_limit, memory.describe()[1], memory.device)
            limit, text = within_a_cpus(memory_limit, held_before)
            bounds = replace(bounds, tolerance=max(bounds.tolerance, CPU_TOLERANCE)) if bounds.tolerance else bounds
        told.stage(_title(trained, is_sought=restore == "auto" and not inference))
        if text:
            told.announce(text)
        with KeptState(trained), kept_random_numbers(memory.device):
            if limit is not None:
                memory.enforce(limit)
            try:
                return _Search(without_gradients(step) if inference else step, memory, steps, told).run(bounds, limit)
            finally:
                with contextlib.suppress(RuntimeError):  # a device that failed fails again, and the search has said so
                    memory.lift()
                    memory.release()


def _on_stderr() -> contextlib.AbstractContextManager[Observer]:
    with kept_random_numbers("cpu"):  # rich draws some when it is imported
        from batchtune.report.live import stderr_observer
    return stderr_observer()


def _title(trained: Sequence[object], *, is_sought: bool) -> str:
    if trained:
        return f"searching; {', '.join(type(each).__name__ for each in trained)} will be restored"
    hint = "; no model is seen in what step uses: name what it trains, restore=(model, optimizer)" if is_sought else ""
    return f"searching{hint}"


class _Search:
    """The attempts so far."""

    def __init__(self, step: Callable[[int], object], memory: DeviceMemory, steps: int, observer: Observer) -> None:
        self._step, self._memory, self._steps, self._observer = step, memory, steps, observer
        self._attempts: list[Attempt] = []
        self._raised: dict[int, Exception] = {}

    def run(self, bounds: Bounds, limit: int | None) -> int:
        """Tries sizes until the bracket is narrow enough, then the answer for longer."""
        while (choice := next_size(self._attempts, bounds, limit)).batch_size is not None:
            self._observer.attempting(choice.batch_size, choice.reason)
            self._attempt(choice.batch_size, self._steps)
        low, high = bracket(self._attempts)
        if not low:
            raise self._nothing(choice.reason)
        if high in self._raised:
            text = f"{type(self._raised[high]).__name__}: {self._raised[high]}"
            warnings.warn(f"step({high}) raised {text}; larger sizes were not tried", stacklevel=4)
        return self._checked(low, bounds, limit)

    def _checked(self, size: int, bounds: Bounds, limit: int | None) -> int:
        """What runs for as many steps as a final check, after all that failed.

        Where it does not, the next is smaller, by ever more; an exact search goes on, each size for as long.
        """
        steps, share = max(self._steps, ProbeOptions.verify_steps), bounds.tolerance
        while True:
            self._attempt(size, steps)
            if self._attempts[-1].fits:
                return size
            if size <= bounds.least:
                raise self._nothing(f"nothing runs for {steps} steps")
            if not bounds.tolerance:
                self._steps = steps
                return self.run(bounds, limit)
            size = max(bounds.least, int((1 - min(share, 0.5)) * size) // bounds.multiple_of * bounds.multiple_of)
            share *= 2

    def _attempt(self, size: int, steps: int) -> None:
        tracker, started = PeakTracker(self._memory), time.perf_counter()
        try:
            with self._memory.attempt(size):
                outcome, message, done = self._run_steps(size, steps, tracker)
        except RuntimeError as error:  # a device that failed fails again when its memory is to be given back
            raise self._broken(size, str(error).strip().split("\n")[0][:300]) from None
        self._attempts.append(
            Attempt(
                batch_size=size,
                outcome=outcome,  # type: ignore[arg-type]  # classify's values are outcomes
                steps=done,
                seconds=round(time.perf_counter() - started, 4),
                peak_allocated_bytes=tracker.highest.allocated_bytes,
                peak_reserved_bytes=tracker.highest.reserved_bytes,
                forward_backward_peak_bytes=tracker.forward_backward_bytes if outcome == "fit" else None,
                message=message,
            )
        )
        self._observer.attempted(self._attempts[-1])

    def _run_steps(self, size: int, steps: int, tracker: PeakTracker) -> tuple[str, str | None, int]:
        """Outcome, message and the steps that were done."""
        done, handled = 0, sys.exc_info()[1]
        try:
            for _ in range(steps):
                tracker.start_phase()
                self._step(size)
                self._memory.synchronize()
                tracker.end_phase(forward_backward=True)
                done += 1
        except Exception as error:  # noqa: BLE001 - whatever the step raises is the outcome
            _cut_off(error, handled)
            outcome, message = classify(error), message_of(error)
            usable = leaves_device_usable(error)
            if outcome == "user_error":
                traceback.clear_frames(error.__traceback__)  # the error is kept, the step's tensors are not
                self._raised[size] = error
            else:
                free_frames(error)
            if not usable:
                raise self._broken(size, message) from None
            return outcome, message, done
        return "fit", None, done

    def _broken(self, size: int, message: str) -> DeviceError:
        ran = bracket(self._attempts)[0] or "none"
        return DeviceError(
            f"step({size}) broke this process's hold on the device ({message}); the largest size that ran is {ran}. "
            "'batchtune probe' goes on from such failures, for its attempts run in processes of their own"
        )

    def _nothing(self, reason: str) -> Exception:
        if all(attempt.outcome == "user_error" for attempt in self._attempts) and self._raised:
            return self._raised[min(self._raised)]
        return NothingFitsError(
            f"{reason}; the last attempt said: {self._attempts[-1].message}" if self._attempts else reason
        )


def _cut_off(error: BaseException, handled: BaseException | None) -> None:
    """Ends an error's chain before what the caller was handling already: that is not what the step has met."""
    for link in links(error) if handled is not None else ():
        if link.__context__ is handled:
            link.__context__ = None
