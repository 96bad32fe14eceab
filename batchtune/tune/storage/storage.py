"""Where a study is kept: a journal in the run folder, mended after a kill, or a database, which may go for a while."""

from __future__ import annotations

import contextlib
import time
import uuid
import warnings
from collections.abc import Callable, Container
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages._cached_storage import _CachedStorage
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._storage import JournalStorageReplayResult
from optuna.trial import FrozenTrial, TrialState

from batchtune.errors import UsageError
from batchtune.run_folder import cut_to_whole_lines
from batchtune.tune.storage.shared import requeue

HEARTBEAT_SECONDS, GRACE_SECONDS = 10, 150
"""How often a machine says that a run is alive, and after which silence it is not: an outage is shorter."""
PATIENCE_SECONDS = 120.0
"""How long a database may be away."""
_RETRY_SECONDS = 1.0
MOMENT_SECONDS = 0.05  # what other machines write is seen so much later
READY_SECONDS = 10.0
_GRPC, _GRPC_PORT = "grpc://", 13000  # the port is Optuna's own default
_PACKAGES = {"psycopg": '"batchtune-cli[postgresql]"', "MySQLdb": "mysqlclient", "grpc": "grpcio"}


def open_storage(storage: str | None, folder: Path) -> BaseStorage:
    """The study's storage: a journal in the run folder, or the user's own.

    Raises:
        UsageError: the storage cannot be reached, or its driver is not installed.
    """
    if storage is None:
        journal = folder / "study.log"
        _mend_journal(journal)
        return Journal(journal)
    try:
        if storage.startswith("sqlite"):  # one machine's
            return optuna.storages.get_storage(storage)
        if storage.startswith(_GRPC):
            return _proxy(storage)
        return OneReading(shared_database(storage))
    except Exception as error:  # noqa: BLE001 - drivers raise what they like
        missing = getattr(error.__cause__ or error, "name", None) if isinstance(error, ImportError) else None
        if missing:
            package = _PACKAGES.get(missing, missing)
            raise UsageError(f"storage {storage}: {missing} is not installed; run: pip install {package}") from None
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"storage {storage} cannot be opened: {text[:200]}") from None


class Journal(JournalStorage):
    """Optuna's journal, which is read anew from its beginning where an interruption came while it was read.

    Otherwise the line that was being taken in would be missing from what the study says of itself. It is read as
    another writer's: Optuna refuses the second beginning of a study, as every resumed one has it, to whoever wrote it.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(JournalFileBackend(str(file)))
        self._known: tuple[int, int, list[FrozenTrial]] = 0, 0, []

    def _sync_with_backend(self) -> None:
        try:
            super()._sync_with_backend()
        except KeyboardInterrupt:
            self._worker_id_prefix = f"{uuid.uuid4()}-"
            self._replay_result = JournalStorageReplayResult(self._worker_id_prefix)
            raise

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """As Optuna's; as long as nothing is added to the journal, who asks again is answered at once."""
        if deepcopy:
            return super().get_all_trials(study_id, deepcopy, states)
        with self._thread_lock:
            self._sync_with_backend()
            study, length, trials = self._known
            if (study, length) != (study_id, self._replay_result.log_number_read):
                trials = self._replay_result.get_all_trials(study_id, None)
                self._known = study_id, self._replay_result.log_number_read, trials
        return _in_states(trials, states)


class OneReading(_CachedStorage):
    """Optuna's cache before a database, which reads once for several questions at one moment.

    Half of what a trial cost was to read the same again.

    Attributes:
        database: behind the cache.
    """

    def __init__(self, backend: PatientStorage) -> None:
        super().__init__(backend)
        self.database = backend
        self._known: tuple[object, int, float, list[FrozenTrial]] = None, 0, 0.0, []

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """As Optuna's, as of the last write of this machine, and of not much before now."""
        if deepcopy:
            return super().get_all_trials(study_id, deepcopy, states)
        now, writing = time.monotonic(), self.database.latest_write
        written, study, at, trials = self._known
        if written is not writing or study != study_id or now - at > MOMENT_SECONDS:
            trials = super().get_all_trials(study_id, deepcopy=False)
            self._known = writing, study_id, now, trials
        return _in_states(trials, states)


def _in_states(trials: list[FrozenTrial], states: Container[TrialState] | None) -> list[FrozenTrial]:
    return [trial for trial in trials if trial.state in states] if states is not None else list(trials)


def _proxy(url: str) -> BaseStorage:
    """Optuna's gRPC proxy of a database; it tells no signs of life, so it is for one machine at a time.

    Raises:
        ConnectionError: nobody answers there.
    """
    place = urlsplit(url)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        proxy = optuna.storages.GrpcStorageProxy(host=place.hostname or "localhost", port=place.port or _GRPC_PORT)
    proxy.wait_server_ready(READY_SECONDS)
    return proxy


def shared_database(url: str) -> PatientStorage:
    """A database that several machines use; a machine that says nothing for long has died."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return PatientStorage(
            url,
            engine_kwargs={"pool_pre_ping": True},
            heartbeat_interval=HEARTBEAT_SECONDS,
            grace_period=GRACE_SECONDS,
            heartbeat_stale_trial_callback=requeue,
        )


class PatientStorage(RDBStorage):
    """Optuna's storage in a database, which waits for the server where that is away for a while.

    Attributes:
        latest_write: another object after each write of this machine.
    """

    latest_write = object()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return partial(_patiently, self, found) if name in _ASKED and callable(found) else found


_ASKED = {name for name in BaseStorage.__abstractmethods__ if not name.startswith("__")}
_WRITING = ("create_", "set_", "delete_")
_ASKED |= {"record_heartbeat", "_get_stale_trial_ids", "_get_trials", "_create_new_trial", "_set_trial_param"}


def _patiently(storage: PatientStorage, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    from sqlalchemy.exc import DBAPIError, InvalidRequestError

    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            found = method(*arguments, **named)
        except (StorageInternalError, DBAPIError, InvalidRequestError):
            if time.monotonic() >= deadline:
                raise
            with contextlib.suppress(DBAPIError):
                storage.scoped_session.remove()
            time.sleep(_RETRY_SECONDS)
        else:
            if method.__name__.lstrip("_").startswith(_WRITING):
                storage.latest_write = object()
            return found


def _mend_journal(journal: Path) -> None:
    """Takes away what a kill left behind: a last line cut off in the middle, and the lock of a dead process."""
    for lock in journal.parent.glob(f"{journal.name}.lock*"):  # the run folder's own lock says that nobody has it
        lock.unlink()
    cut_to_whole_lines(journal)
