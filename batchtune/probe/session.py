"""One probe from the first precision to the document: what is known at each moment of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from batchtune.config.probe import ProbeOptions, typed_options
from batchtune.device.sharing import sharing_warnings
from batchtune.document import Failure, InputPipeline, ProbeResult, TaskInfo
from batchtune.errors import (
    BatchtuneError,
    DeviceError,
    HalfPrecisionError,
    NothingFitsError,
    RunInterrupted,
    UserCodeError,
    fp32_instead,
)
from batchtune.estimate.calibration import FreeMemory
from batchtune.estimate.prior import EstimatePrior
from batchtune.observer import Observer
from batchtune.probe.runner import Probe
from batchtune.probe.timing.loader import measure_input_pipeline
from batchtune.processes.worker import Worker
from batchtune.protocol.commands import Opened, OpenTask
from batchtune.result import Result

_ANSWER = ("max_batch_size", "first_failing_batch_size", "limited_by", "data_parallel")


class ProbeSession:
    """What is known so far, so that an error at any moment still leaves a document."""

    def __init__(
        self, worker: Worker, settings: OpenTask, options: ProbeOptions, name: str, task: TaskInfo, observer: Observer
    ) -> None:
        self.worker, self.settings, self.options, self.observer = worker, settings, options, observer
        self._name, self._task = name, task
        self.opened: Opened | None = None  # by the first child
        self.failures: list[tuple[str, BatchtuneError]] = []  # with their precisions
        self._probes: list[Probe] = []
        self._instead: list[str] = []  # why it is not the precision that the device does well
        self._loader: tuple[str, InputPipeline | None] = ("", None)  # timed against this precision's steps
        self.free = FreeMemory(worker)

    def run(self) -> Result:
        """Probes at each precision, then times the data loader.

        Raises:
            BatchtuneError: with what was measured until then in `result`.
        """
        settings, observer = self.settings, self.observer
        try:
            with EstimatePrior(settings.task, settings.device, observer) as prior, self.worker as worker:
                self.opened = opened = worker.start()
                precisions = list(opened.precision)
                for precision, reason in precisions:
                    observer.note(f"precision {precision}: {reason}")
                    try:
                        self.probe_at(precision, opened, prior)
                    except (NothingFitsError, UserCodeError) as error:  # another precision may do better
                        if isinstance(error, HalfPrecisionError) and settings.precision == ("auto",):
                            precisions.append(self._full_instead(precision, error))
                        else:
                            self.failures.append((precision, error))
                if len(self.failures) == len(opened.precision):
                    raise self.failures[0][1]
                if self.options.throughput and opened.has_train_dataset and not opened.is_for_inference:
                    self.time_loader()
                self.free.look_after(opened)
        except KeyboardInterrupt:
            interrupted = RunInterrupted(
                "interrupted; what was measured until then is in the result, and 'batchtune report' shows it"
            )
            interrupted.result = self.document("interrupted", interrupted)
            raise interrupted from None
        except BatchtuneError as error:
            error.result = self.document("failed", error)
            raise
        return self.document("complete")

    def _full_instead(self, precision: str, error: HalfPrecisionError) -> tuple[str, str]:
        """The precision in the place of one that nobody asked for and the task does not train in, and why."""
        self.settings = self.settings.but(precision=("fp32",))
        self._probes.clear()
        self._instead.append(fp32_instead(precision, str(error)))
        return "fp32", f"not {precision}, in which it does not train"

    def probe_at(self, precision: str, opened: Opened, prior: EstimatePrior) -> None:
        """Probes one of the precisions; what it finds, and what it has found when it fails, is kept."""
        accumulation_steps = self.options.accumulation_steps or opened.accumulation_steps
        options, estimated = replace(self.options, accumulation_steps=accumulation_steps), None
        if opened.world_size == 1:  # of a group, the memory of one process alone says too little
            estimated = prior.look(opened, precision, accumulation_steps, timeout=options.timeout)
        probe = Probe(self.worker, options, precision, self.observer, prior=estimated)
        self._probes.append(probe)
        ahead = None
        if estimated and options.lengths is not None:
            ahead = prior.look_at_lengths(opened, precision, accumulation_steps, options.lengths)
        probe.find(ahead)
        self.free.look_beside_child()
        with _told_if_busy(self.observer):
            probe.time_steps()
        if estimated and not opened.is_for_inference:  # workspaces are those of training
            estimated.learn(opened.environment.device, probe.attempts)

    def time_loader(self) -> None:
        """Times the data loader against the fastest precision's steps; it is the same for all of them."""
        self.observer.stage("timing the data loader")
        fastest = max((probe.result() for probe in self._probes), key=_rank_of)
        with _told_if_busy(self.observer):
            found = measure_input_pipeline(self.worker, fastest, self.observer, timeout=self.options.timeout)
            self._loader = (fastest.precision, found)

    def _results(self) -> list[ProbeResult]:
        """Of each precision; one whose every size the final check refused has no answer, whatever its search found."""
        (timed, loader), failed = self._loader, {name for name, _ in self.failures}
        results = []
        for found in (probe.result() for probe in self._probes):
            is_checked = any(each.purpose == "verify" for each in found.attempts)
            refused = found.precision in failed and is_checked and not found.verified_in_fresh_process
            update: dict[str, object] = {"input_pipeline": loader} if found.precision == timed else {}
            results.append(found.model_copy(update=update | (dict.fromkeys(_ANSWER) if refused else {})))
        return results

    def document(
        self, status: Literal["complete", "interrupted", "failed"], error: BatchtuneError | None = None
    ) -> Result:
        results, asked, environment, optimizer = self._results(), self.settings, None, None
        if self.opened is not None:
            optimizer = self.opened.optimizer or None
            after = {"device_memory_free_after_bytes": self.free.after}
            environment = self.opened.environment.model_copy(update=after)
        failed = [f"{precision}: {failure}" for precision, failure in self.failures if failure is not error]
        from_probes = [warning for each in results for warning in each.warnings]
        return Result(
            kind="probe",
            status=status,
            name=self._name,
            environment=environment,
            task=self._task.model_copy(update={"optimizer": optimizer}),
            warnings=list(dict.fromkeys([*sharing_warnings(environment), *self._instead, *failed, *from_probes])),
            error=Failure(exit_code=error.exit_code, message=str(error)) if error else None,
            probe=max(results, key=_rank_of, default=None),
            probes=results if len(results) > 1 else None,
            options=typed_options(asked.precision, asked.memory_limit, asked.margin, asked.device),
        )


@contextlib.contextmanager
def _told_if_busy(observer: Observer) -> Iterator[None]:
    """The answer stands by now: a device that somebody else has filled costs only what was still to be timed."""
    try:
        yield
    except DeviceError as error:
        observer.note(f"no more is timed: {error}")


def _rank_of(probe: ProbeResult) -> tuple[bool, bool, float]:
    """What makes a precision stand for the probe: an answer that was checked, any answer, then its best speed."""
    fastest = max((point.samples_per_second for point in probe.throughput), default=0.0)
    return probe.verified_in_fresh_process, probe.max_batch_size is not None, fastest
