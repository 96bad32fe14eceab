"""Optuna's journal and database, for studies that are interrupted and resumed, and that many machines share."""

from __future__ import annotations

import contextlib
import math
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import optuna
from optuna import Study
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage, RDBStorage
from optuna.storages._cached_storage import _CachedStorage, _StudyInfo
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._storage import JournalStorageReplayResult
from optuna.trial import FrozenTrial, TrialState

from batchtune.document import Value
from batchtune.errors import UsageError

HEARTBEAT_SECONDS, GRACE_SECONDS = 10, 150
"""How often a machine says that a run is alive, and after which silence it is not: an outage is shorter."""
PATIENCE_SECONDS = 120.0
"""How long a database may be away."""
READY_SECONDS = 10.0
"""How long a proxy may take to answer."""
_RETRY_SECONDS = 1.0
_OPENINGS = 5  # of tables and of versions, which Optuna writes one after the other
STARTING_SECONDS = 10.0  # in which a run's parameters and attributes are written; it is not read again before its end
_GRPC, _GRPC_PORT = "grpc://", 13000  # the port is Optuna's own default
_PACKAGES = {"psycopg": '"batchtune-cli[postgresql]"', "MySQLdb": "mysqlclient", "grpc": "grpcio"}
Returned = TypeVar("Returned")


def params_of(trial: FrozenTrial) -> dict[str, Value]:
    """The parameters of a trial that has begun, or is queued."""
    return dict(trial.system_attrs.get("fixed_params", {}) | trial.params)


def requeue(study: Study, trial: FrozenTrial) -> None:
    """Queues a trial that did not come to an end again as it was."""
    attributes = {key: trial.user_attrs[key] for key in ("role", "seed") if key in trial.user_attrs}
    study.enqueue_trial(params_of(trial), user_attrs=attributes | {"retry_of": trial.number})


def open_own(url: str) -> BaseStorage:
    """Opens a storage of the user's: a database, a SQLite file, or Optuna's gRPC proxy of one.

    Raises:
        UsageError: it cannot be reached, or its driver is not installed.
    """
    with _told(url):
        if url.startswith("sqlite"):  # one machine's
            return optuna.storages.get_storage(url)
        return _proxy(url) if url.startswith(_GRPC) else _open_database(url)


def reach(url: str) -> None:
    """Looks whether `open_own` would find somebody there, and writes nothing; it raises what that does."""
    with _told(url):
        if url.startswith(_GRPC):
            _proxy(url).close()
            return
        from sqlalchemy import NullPool, create_engine

        engine = create_engine(url, poolclass=NullPool)
        place = Path(engine.url.database or "") if url.startswith("sqlite") else None
        if place is None or place.is_file():
            engine.connect().close()
        elif not place.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {place.parent}")


@contextlib.contextmanager
def _told(url: str) -> Iterator[None]:
    """Whatever a driver raises within the block becomes one line."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - drivers raise what they like
        missing = getattr(error.__cause__ or error, "name", None) if isinstance(error, ImportError) else None
        if missing:
            package = _PACKAGES.get(missing, missing)
            raise UsageError(f"storage {url}: {missing} is not installed; run: pip install {package}") from None
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"storage {url} cannot be opened: {text[:200]}") from None


def _proxy(url: str) -> GrpcStorageProxy:
    """Optuna's gRPC proxy, for one machine, since it tells no signs of life; ConnectionError where nobody answers."""
    place = urlsplit(url)
    with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
        proxy = GrpcStorageProxy(host=place.hostname or "localhost", port=place.port or _GRPC_PORT)
    proxy.wait_server_ready(READY_SECONDS)
    return proxy


def _open_database(url: str) -> SharedStorage:
    """Opens a database; where another machine makes its tables at the same moment, finds them there the next time."""
    from sqlalchemy.exc import DBAPIError

    for _ in range(_OPENINGS):
        try:
            return SharedStorage(PatientStorage(url))
        except DBAPIError as error:
            if "already exists" not in str(error.orig):
                raise
            time.sleep(_RETRY_SECONDS)
    return SharedStorage(PatientStorage(url))


class SharedStorage(_CachedStorage):
    """Optuna's cache of a database, which reads a run that is under way once, and then only how it has ended.

    Optuna reads all that is under way for every question, evaluations included: 256 machines keep a server busy so.
    Of another machine's run it is enough to know what it tries, written at its start.
    """

    def __init__(self, backend: RDBStorage) -> None:
        super().__init__(backend)
        self._under_way: defaultdict[int, dict[int, float]] = defaultdict(dict)  # by study: since when a trial runs
        self._newest: dict[int, int] = {}

    def _read_trials_from_remote_storage(self, study_id: int) -> None:
        with self._lock:
            self._studies.setdefault(study_id, _StudyInfo())
            under_way, newest, now = self._under_way[study_id], self._newest.get(study_id, -1), time.monotonic()
            known = {trial for trial, since in under_way.items() if now - since > STARTING_SECONDS}
            read = self._backend._get_trials  # noqa: SLF001 - as Optuna's cache reads
            trials = read(study_id, [each for each in TrialState if each.is_finished()], known, newest) if known else []
            trials += read(study_id, None, under_way.keys() - known, newest)  # last: whatever began meanwhile is in it
            self._add_trials_to_cache(study_id, trials)
            for trial in trials:
                number = trial._trial_id  # noqa: SLF001 - Optuna's own name of it
                newest = max(newest, number)
                since = now if trial.state is TrialState.RUNNING else math.inf
                under_way[number] = min(since, under_way.get(number, math.inf))
                if trial.state.is_finished():
                    del under_way[number]
            self._newest[study_id] = newest


class Journal(JournalStorage):
    """Optuna's journal, which is read anew from its beginning where an interruption came while it was read.

    Otherwise the line that was being taken in would be missing from what the study says of itself. It is read as
    another writer's: Optuna refuses the second beginning of a study, as every resumed one has it, to whoever wrote it.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(JournalFileBackend(str(file)))

    def _sync_with_backend(self) -> None:
        try:
            super()._sync_with_backend()
        except KeyboardInterrupt:
            self._worker_id_prefix = f"{uuid.uuid4()}-"
            self._replay_result = JournalStorageReplayResult(self._worker_id_prefix)
            raise


class PatientStorage(RDBStorage):
    """Optuna's storage in a database, which waits for the server where that is away for a while."""

    def __init__(self, url: str) -> None:
        with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
            super().__init__(
                url,
                engine_kwargs={"pool_pre_ping": True},
                heartbeat_interval=HEARTBEAT_SECONDS,
                grace_period=GRACE_SECONDS,
                heartbeat_stale_trial_callback=requeue,
            )

    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        return partial(_patiently, self, found) if name in _ASKED and callable(found) else found


_ASKED = {name for name in BaseStorage.__abstractmethods__ if not name.startswith("__")}
_ASKED |= {"record_heartbeat", "_get_stale_trial_ids", "_get_trials", "_create_new_trial", "_set_trial_param"}


def _patiently(
    storage: PatientStorage, method: Callable[..., Returned], *arguments: object, **named: object
) -> Returned:
    from sqlalchemy.exc import DBAPIError, InvalidRequestError

    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return method(*arguments, **named)
        except (StorageInternalError, DBAPIError, InvalidRequestError):
            if time.monotonic() >= deadline:
                raise
            with contextlib.suppress(DBAPIError):
                storage.scoped_session.remove()
            time.sleep(_RETRY_SECONDS)
