"""`batchtune probe` as a function: one or several precisions on one device, and the document that comes of it."""

from __future__ import annotations

from typing import Any, Literal

from batchtune.errors import BatchtuneError, RunInterrupted
from batchtune.probe.runner import Probe, ProbeOptions
from batchtune.progress import Forwarder, Observer
from batchtune.results import Attempt, Environment, Failure, ProbeResult, Result, TaskInfo
from batchtune.run_folder import RunFolder
from batchtune.task.spec import file_hash
from batchtune.train.worker import Worker, WorkerSettings


def run_probe(
    settings: WorkerSettings, options: ProbeOptions, *, name: str, observer: Observer, folder: RunFolder | None = None
) -> Result:
    """Probes a task at each precision of `settings`, in children of their own.

    Raises:
        BatchtuneError: with what was measured until then in `result`.
    """
    session = _Session(settings, name)
    if folder is None:
        return _run(session, settings, options, observer)
    folder.open(fresh=True)
    try:
        result = _run(session, settings, options, _Recorder(folder, observer))
    except BatchtuneError as error:
        if error.result is not None:
            folder.write_result(error.result)
        raise
    else:
        folder.write_result(result)
        return result
    finally:
        folder.close()


class _Recorder(Forwarder):
    """Keeps each attempt in the run folder as it comes."""

    def __init__(self, folder: RunFolder, behind: Observer) -> None:
        super().__init__(behind)
        self._folder = folder

    def attempted(self, attempt: Attempt) -> None:
        self._folder.append_attempt(attempt)
        super().attempted(attempt)


def _run(session: _Session, settings: WorkerSettings, options: ProbeOptions, observer: Observer) -> Result:
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
