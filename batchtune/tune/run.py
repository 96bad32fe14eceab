"""`batchtune tune` as a function: its steps, the run folder, and how a run ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from batchtune.config.schema import Config
from batchtune.errors import BatchtuneError, NothingFitsError, RunInterrupted, UsageError
from batchtune.observer import Forwarder, Observer
from batchtune.result import ROOT, Result, of_first_rank
from batchtune.run_folder import RunFolder
from batchtune.tune.plan.configure import configure, identity_of, read_warm_start
from batchtune.tune.plan.open_task import require_executor
from batchtune.tune.progress import Progress, Recorder, Status
from batchtune.tune.start import run_study

_Kind = TypeVar("_Kind", bound=BaseException)


def configure_and_run(
    given: str | os.PathLike[str] | Config,
    options: Mapping[str, object],
    save_config: str | os.PathLike[str] | None,
    *,
    fresh: bool,
    observer: Observer,
    root: Path,
    warm_start: str | os.PathLike[str] | None,
) -> Result:
    """What `run_tune` finds by the configuration that `configure` makes; the same in all processes of torchrun.

    `budget.total` counts from now on: reading what the user trains with today may take a while, too.
    """
    began = time.perf_counter()

    def work() -> Result:
        config = configure(given, options, observer, save_config)
        return run_tune(config, fresh=fresh, observer=observer, root=root, warm_start=warm_start, began=began)

    return of_first_rank(work)


def run_tune(
    config: Config,
    *,
    fresh: bool,
    observer: Observer,
    root: Path = ROOT,
    warm_start: str | os.PathLike[str] | None,
    began: float,
) -> Result:
    """Runs or resumes the study of a configuration; a new one starts where the run `warm_start` ended.

    `budget.total` counts from `began` (`time.perf_counter`) on.

    Raises:
        BatchtuneError: with what was measured until then in `result`.
    """
    require_executor(config.executor)
    known = None if warm_start is None else read_warm_start(os.fspath(warm_start), config, root)  # --fresh may clear it
    folder = RunFolder(config.name, root)
    progress = Progress(config, folder, began)
    folder.open()
    try:
        if fresh:
            folder.set_aside()
        folder.check_identity(identity_of(config))
        if folder.identity() is None:  # nothing but what failed, if anything: it may have been another task's
            folder.forget_attempts()
        else:
            progress.load_earlier()
        folder.write("config.yaml", config.to_yaml())
        told = Forwarder(Recorder(progress, observer))
        return run_and_save(lambda: run_study(progress, told, known, fresh=fresh), progress)
    finally:
        folder.close()


def check_kept(config: Config, root: Path, environment: Any = None) -> None:
    """Refuses what `run_tune` would since the run folder was measured with something else, and changes nothing there.

    Raises:
        UsageError: that names it; the device is looked at where its `environment` is known.
    """
    folder = RunFolder(config.name, root)
    if folder.identity() is not None:
        folder.check_identity(identity_of(config) | ({"the device": environment["device"]} if environment else {}))


def run_and_save(run: Callable[[], None], progress: Progress) -> Result:
    """Runs to the end, and saves what there is however that comes.

    Raises:
        BatchtuneError: with what was measured until then in `result`.
    """
    where = progress.folder.path
    try:
        run()
        return progress.save("complete")
    except BatchtuneError as error:
        told = error.in_configuration() if isinstance(error, NothingFitsError) else error
        told.result = progress.save_if_possible("failed", told)
        raise told from error.__cause__
    except (KeyboardInterrupt, Exception) as error:
        stopped: BatchtuneError
        if _behind(error, KeyboardInterrupt):
            keeps = f" ({where} keeps the trials, and 'batchtune report {where.name} -v' shows them)"
            stopped = RunInterrupted(
                f"interrupted; the same command goes on from here{keeps if progress.study else ''}"
            )
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
