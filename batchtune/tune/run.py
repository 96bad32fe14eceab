"""`batchtune tune` as a function: its steps, the run folder, and how a run ends."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TypeVar

from batchtune.config.schema import Config
from batchtune.document import Attempt, ThroughputPoint, Trial
from batchtune.errors import BatchtuneError, NothingFitsError, RunInterrupted, UsageError
from batchtune.observer import Forwarder, Observer
from batchtune.processes.pool import WorkerPool
from batchtune.protocol.commands import Opened
from batchtune.report.view.words import counted
from batchtune.result import ROOT, Result
from batchtune.run_folder import RunFolder
from batchtune.tune.plan.measure_prior import make_plan, measure_prior, study_probe
from batchtune.tune.plan.open_task import identity_of, open_pool, open_task, require_executor
from batchtune.tune.plan.warm_start import WarmStart, read_warm_start
from batchtune.tune.progress import Progress, Status
from batchtune.tune.scaling import scale
from batchtune.tune.study.budget import outlook_at_start
from batchtune.tune.study.phases import TuneStudy
from batchtune.tune.study.storage import Agreement, delete_study, open_storage
from batchtune.units import duration

_Kind = TypeVar("_Kind", bound=BaseException)


def run_tune(
    config: Config,
    *,
    fresh: bool,
    observer: Observer,
    root: Path = ROOT,
    warm_start: str | os.PathLike[str] | None = None,
) -> Result:
    """Runs or resumes the study of a configuration; a new one starts where the run `warm_start` ended.

    Raises:
        BatchtuneError: with what was measured until then in `result`.
    """
    require_executor(config.executor)
    known = None if warm_start is None else read_warm_start(os.fspath(warm_start), config, root)  # --fresh may clear it
    folder = RunFolder(config.name, root)
    progress = Progress(config, folder)
    folder.open()
    try:
        if fresh:
            if config.storage is not None:
                delete_study(open_storage(config.storage, folder.path), config.name)
            folder.clear()
        folder.check_identity(identity_of(config))
        if folder.identity() is None:  # nothing but what failed, if anything: it may have been another task's
            folder.forget_attempts()
        else:
            progress.load_earlier()
        folder.write("config.yaml", config.to_yaml())
        return run_and_save(Tuning(config, observer, progress, known), progress)
    finally:
        folder.close()


def run_and_save(tuning: Tuning, progress: Progress) -> Result:
    """Runs to the end, and saves what there is however that comes.

    Raises:
        BatchtuneError: with what was measured until then in `result`.
    """
    where = progress.folder.path
    try:
        tuning.run()
        return progress.save("complete")
    except BatchtuneError as error:
        error.result = progress.save_if_possible("failed", error)
        raise
    except (KeyboardInterrupt, Exception) as error:
        stopped: BatchtuneError
        if _behind(error, KeyboardInterrupt):
            keeps = f"{where} keeps the trials, and 'batchtune report' shows them"
            stopped = RunInterrupted(f"interrupted; the same command goes on from here ({keeps})")
        elif isinstance(error, OSError | RuntimeError) and (unwritten := _behind(error, OSError)):  # of the journal
            stopped = UsageError(
                f"{where}: the study cannot go on: {unwritten.strerror or unwritten}; make room and start again: the "
                "same command goes on with the trials that are finished"
            )
        else:
            raise
        status: Status = "interrupted" if isinstance(stopped, RunInterrupted) else "failed"
        stopped.result = progress.save_if_possible(status, stopped)
        raise stopped from None


def _behind(error: BaseException | None, kind: type[_Kind]) -> _Kind | None:
    """The error of that kind that came first: a lock of Optuna's that is disturbed raises errors of its own on top."""
    found = None
    while error is not None:
        found, error = (error if isinstance(error, kind) else found), error.__context__
    return found


class Tuning:
    """One start of `tune`, by what `progress` knows already."""

    def __init__(
        self, config: Config, observer: Observer, progress: Progress, warm_start: WarmStart | None = None
    ) -> None:
        self._config, self._progress, self._warm_start = config, progress, warm_start
        self._observer = Forwarder(Recorder(progress, observer))  # of several threads

    def run(self) -> None:
        """Probe, then study.

        Raises:
            BatchtuneError: it cannot go on; `progress` has what was found until then.
        """
        progress, config, began = self._progress, self._config, time.perf_counter()
        with open_pool(config, self._observer, progress.folder.attempts()) as pool:
            opened = self._open(pool)
            opening_seconds = time.perf_counter() - began
            if progress.earlier is None and config.budget.given_total is not None:
                schedule = opened.optimizer_settings.scheduler is not None
                told = outlook_at_start(config, len(pool), opening_seconds, has_schedule=schedule)
                self._observer.announce(told)
            storage = open_storage(config.storage, progress.folder.path)
            self._prepare(pool, opened, Agreement(storage, config, opened.device_name))
            assert progress.probe is not None and progress.prior is not None  # noqa: PT018, S101 - they are prepared
            plan = make_plan(config, opened, progress.probe, progress.prior)
            progress.study = study = TuneStudy(plan, pool, storage, self._observer, opening_seconds=opening_seconds)
            study.run()
        if not any(trial.state in {"complete", "pruned"} for trial in study.records()):
            raise NothingFitsError("no trial was usable; see the messages of the trials")
        found = study.recommendation()[0]
        if found is None:
            raise NothingFitsError(study.why_nothing())
        earlier = progress.earlier and progress.earlier.recommendation
        timed = earlier.scaling if earlier else None
        progress.scaling = scale(study, opened, progress.probe, found, timed, self._observer)

    def _open(self, pool: WorkerPool) -> Opened:
        progress = self._progress
        progress.opened = opened = open_task(pool.first, self._config)
        progress.identity = identity_of(self._config) | {"the device": opened.device_name}
        progress.folder.check_identity(progress.identity)  # whatever 'auto' was
        pool.grow(opened)
        if len(pool) > 1:
            self._observer.note(f"{len(pool)} workers{pool.where}")
        if opened.is_group:
            ranks = f"{opened.world_size} ranks with {opened.strategy} ({opened.backend})"
            self._observer.note(f"each run trains on {ranks}: batch sizes are of all ranks together")
        for name, reason in opened.precision:
            self._observer.note(f"precision {name}: {reason}")
        return opened

    def _prepare(self, pool: WorkerPool, opened: Opened, agreement: Agreement) -> None:
        """Probe and prior: another machine's where it has begun the study, an earlier start's, or measured now."""
        progress, begun = self._progress, agreement.look()
        if begun is not None:
            self._observer.note(f"study {self._config.name} was begun on another machine or earlier: joining it")
            progress.probe, progress.prior = begun
        progress.probe = progress.probe or progress.earlier_probe()
        if progress.probe is None:
            attempts = progress.folder.attempts()
            progress.probing = study_probe(self._config, opened, pool.first, self._observer, attempts)
            progress.probe = progress.probing.run()
        progress.save("interrupted")
        progress.prior = progress.prior or (progress.earlier.prior if progress.earlier else None)
        if progress.prior is None:
            progress.prior = measure_prior(
                self._config, progress.probe, opened, pool.first, self._observer, self._warm_start
            )
        elif self._warm_start is not None:
            self._observer.note(
                f"--warm-start {self._warm_start.run}: not used, as the study goes on from where it was"
            )
        progress.probe, progress.prior = agreement.settle(progress.probe, progress.prior)
        progress.save("interrupted")
        progress.keep_identity()  # of another machine's probe, too


class Recorder(Forwarder):
    """Keeps attempts and results in the run folder as they come, and hands everything on."""

    def __init__(self, progress: Progress, behind: Observer) -> None:
        super().__init__(behind)
        self._progress = progress
        self._stage, self._done = "", ""

    def stage(self, title: str) -> None:
        super().stage(title)
        self._stage = title

    def attempted(self, attempt: Attempt) -> None:
        self._progress.keep(attempt)
        super().attempted(attempt)
        self._show()

    def throughput(self, point: ThroughputPoint) -> None:
        super().throughput(point)
        self._show()

    def trial_started(self, trial: Trial, *, best_seconds: float | None) -> None:
        super().trial_started(trial, best_seconds=best_seconds)
        self._show()

    def trial_ended(self, trial: Trial, *, done: int, seconds_left: float) -> None:
        self._progress.save_now_and_then()
        super().trial_ended(trial, done=done, seconds_left=seconds_left)
        self._done = f": {counted(done, 'run')} done, at most {duration(max(0.0, seconds_left))} left"
        self._show()

    def _show(self) -> None:
        """Redraws the page of the run; never while a run waits to go on, whose time is measured."""
        self._progress.show(self._stage + self._done)
