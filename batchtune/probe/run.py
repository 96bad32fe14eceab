"""`batchtune probe` as a function: one or several precisions on one device, and the document that comes of it."""

from __future__ import annotations

from typing import Any, Literal

from batchtune.errors import BatchtuneError, RunInterrupted
from batchtune.probe.runner import Probe, ProbeOptions
from batchtune.progress import Observer
from batchtune.results import Environment, Failure, ProbeResult, Result, TaskInfo
from batchtune.task.spec import file_hash
from batchtune.train.worker import Worker, WorkerSettings


def run_probe(settings: WorkerSettings, options: ProbeOptions, *, name: str, observer: Observer) -> Result:
    """Probes a task at each precision of `settings`, in children of their own.

    Raises:
        BatchtuneError: with what was measured until then in `result`.
    """
    session = _Session(settings, name)
    try:
        with Worker(settings, observer.printed) as worker:
            session.facts = worker.start()
            for precision, reason in session.facts["precision"]:
                observer.note(f"precision {precision}: {reason}")
                session.probes.append(Probe(worker, options, precision, observer))
                session.probes[-1].run()
    except KeyboardInterrupt:
        interrupted = RunInterrupted("interrupted; what was measured until then is in the result")
        interrupted.result = session.document("interrupted", interrupted)
        raise interrupted from None
    except BatchtuneError as error:
        error.result = session.document("failed", error)
        raise
    return session.document("complete")


class _Session:
    """What is known so far, so that an error at any moment still leaves a document."""

    def __init__(self, settings: WorkerSettings, name: str) -> None:
        self._settings, self._name = settings, name
        self._task = TaskInfo(path=settings.task, sha256=file_hash(settings.task))
        self.facts: dict[str, Any] = {}
        self.probes: list[Probe] = []

    def document(
        self, status: Literal["complete", "interrupted", "failed"], error: BatchtuneError | None = None
    ) -> Result:
        results = [probe.result() for probe in self.probes]
        return Result(
            kind="probe",
            status=status,
            name=self._name,
            environment=Environment.model_validate(self.facts["environment"]) if self.facts else None,
            task=self._task,
            warnings=[warning for probe in self.probes for warning in probe.warnings()],
            error=Failure(exit_code=error.exit_code, message=str(error)) if error else None,
            probe=max(results, key=_peak_samples_per_second, default=None),
            probes=results if len(results) > 1 else None,
        )


def _peak_samples_per_second(probe: ProbeResult) -> float:
    """How fast a precision trains at best; the fastest one stands for the probe."""
    return max((point.samples_per_second for point in probe.throughput), default=0.0)
