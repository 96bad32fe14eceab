"""Where a study is kept, alone or with other machines: a journal in the run folder, or a database.

Each machine runs the same command. The first to have probed decides what all choose from; a run whose machine has sent
no sign of life for `GRACE_SECONDS` is given back, and whoever asks next runs it again.
"""

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
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages._cached_storage import _CachedStorage, _StudyInfo
from optuna.storages._heartbeat import BaseHeartbeat, get_heartbeat_thread, is_heartbeat_enabled
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._storage import JournalStorageReplayResult
from optuna.trial import FrozenTrial, TrialState

from batchtune.config.schema import Config
from batchtune.document import Prior, ProbeResult
from batchtune.errors import UsageError
from batchtune.protocol.messages import Json
from batchtune.run_folder import cut_to_whole_lines
from batchtune.tune.plan.configure import identity_of
from batchtune.tune.verdict.scores import cost_of
from batchtune.vocabulary import Goal

_BEGUN = "begun"  # the study's attribute
_SETTLING_SECONDS = 1.0  # in which two machines that settle at the same time have both written
HEARTBEAT_SECONDS, GRACE_SECONDS = 10, 150
"""How often a machine says that a run is alive, and after which silence it is not: an outage is shorter."""
PATIENCE_SECONDS = 120.0
"""How long a database may be away."""
_RETRY_SECONDS = 1.0
_OPENINGS = 5  # of tables and of versions, which Optuna writes one after the other
STARTING_SECONDS = 10.0  # in which a run's parameters and attributes are written; it is not read again before its end
Returned = TypeVar("Returned")

READY_SECONDS = 10.0
_GRPC, _GRPC_PORT = "grpc://", 13000  # the port is Optuna's own default
_PACKAGES = {"psycopg": '"batchtune-cli[postgresql]"', "MySQLdb": "mysqlclient", "grpc": "grpcio"}


def requeue(study: Study, trial: FrozenTrial) -> None:
    """Queues a trial that did not come to an end again as it was."""
    attributes = {key: trial.user_attrs[key] for key in ("role", "seed") if key in trial.user_attrs}
    params = trial.system_attrs.get("fixed_params", {}) | trial.params
    study.enqueue_trial(params, user_attrs=attributes | {"retry_of": trial.number})


class Machines:
    """The machines of one study; where its storage tells no signs of life, there is only this one."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self.several = is_heartbeat_enabled(study._storage)  # noqa: SLF001 - Optuna shows it nowhere else
        if self.several:  # it wants Study.optimize, whose signs of life are given here
            warnings.filterwarnings("ignore", message="Heartbeat of storage|.*fail_stale_trials is experimental")

    def announce(self, trial: optuna.Trial) -> None:
        """Gives a trial its first sign of life, at once after it was asked for: without one it is never missed."""
        storage = self._study._storage  # noqa: SLF001 - as above
        if self.several and isinstance(storage, BaseHeartbeat):
            storage.record_heartbeat(trial._trial_id)  # noqa: SLF001 - Optuna's own name of it

    @contextlib.contextmanager
    def sign_of_life(self, trial: optuna.Trial) -> Iterator[None]:
        """For as long as the block runs, the others see that this trial's machine is alive."""
        with get_heartbeat_thread(trial._trial_id, self._study._storage):  # noqa: SLF001 - as Study.optimize
            yield

    def take_over(self) -> None:
        """Gives back the trials of machines that are dead."""
        if self.several:
            optuna.storages.fail_stale_trials(self._study)


def delete_study(storage: BaseStorage, name: str) -> None:
    """Deletes what a storage has of a study, if it has anything.

    Raises:
        UsageError: a machine is at work in it.
    """
    try:
        study = optuna.load_study(study_name=name, storage=storage)
    except KeyError:
        return
    machines = Machines(study)
    machines.take_over()
    if machines.several and study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        raise UsageError(
            f"storage: a run of study {name} was alive a moment ago, here or on another machine; stop what trains it "
            "and try again a few minutes later, or choose another 'name'"
        )
    optuna.delete_study(study_name=name, storage=storage)


class Agreement:
    """What the starts of a study go by that share a storage: the probe and the prior of the one that had them first.

    The journal in the run folder is of one machine, and the folder itself says what it holds: nothing to agree on.
    """

    def __init__(self, storage: BaseStorage, config: Config, device: str) -> None:
        self._storage, self._config = storage, config
        self._is_shared, self._several = config.storage is not None, is_heartbeat_enabled(storage)
        self._identity = identity_of(config) | {"device": device}  # whatever the configuration calls it
        del self._identity["task"]  # the same file may lie elsewhere

    def look(self) -> tuple[ProbeResult, Prior] | None:
        """What is settled already; None where nothing is.

        Raises:
            UsageError: the study cannot be opened, or is of another device, task or configuration.
        """
        found = self._settled(None) if self._is_shared else None
        return None if found is None else self._taken(found)

    def settle(self, probe: ProbeResult, prior: Prior) -> tuple[ProbeResult, Prior]:
        """What holds: this, unless another machine was sooner; it raises what `look` does."""
        if not self._is_shared:
            return probe, prior
        begun = {
            "identity": self._identity,
            "probe": probe.model_dump(mode="json", exclude_none=True),
            "prior": prior.model_dump(mode="json", exclude_none=True),
        }
        return self._taken(self._settled(begun) or begun)

    def _settled(self, begun: Json | None) -> Json | None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        name, objective = self._config.name, self._config.objective
        direction: Goal = "minimize" if cost_of(objective.kind) else objective.goal
        try:
            study = optuna.create_study(
                study_name=name, storage=self._storage, direction=direction, load_if_exists=True
            )
        except ValueError as error:
            raise UsageError(f"storage: study {name} cannot be joined: {error}") from None
        if _BEGUN not in study.user_attrs and begun is not None:
            study.set_user_attr(_BEGUN, begun)
            time.sleep(_SETTLING_SECONDS if self._several else 0.0)
        return study.user_attrs.get(_BEGUN)

    def _taken(self, found: Json) -> tuple[ProbeResult, Prior]:
        theirs = found["identity"]
        for key, value in self._identity.items():
            if key in theirs and theirs[key] != value:
                raise UsageError(
                    f"storage: study {self._config.name} was begun with {key} = {theirs[key]}, here it is {value}; "
                    "results would mix, so choose another 'name'; --fresh deletes that study, whoever began it"
                )
        return ProbeResult.model_validate(found["probe"]), Prior.model_validate(found["prior"])


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
        return SharedStorage(_first_opened(storage))
    except Exception as error:  # noqa: BLE001 - drivers raise what they like
        missing = getattr(error.__cause__ or error, "name", None) if isinstance(error, ImportError) else None
        if missing:
            package = _PACKAGES.get(missing, missing)
            raise UsageError(f"storage {storage}: {missing} is not installed; run: pip install {package}") from None
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"storage {storage} cannot be opened: {text[:200]}") from None


def _first_opened(url: str) -> PatientStorage:
    """Opens a database; where another machine makes its tables at the same moment, finds them there the next time."""
    from sqlalchemy.exc import DBAPIError

    for _ in range(_OPENINGS):
        try:
            return PatientStorage(url)
        except DBAPIError as error:
            if "already exists" not in str(error.orig):
                raise
            time.sleep(_RETRY_SECONDS)
    return PatientStorage(url)


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


class PatientStorage(RDBStorage):
    """Optuna's storage in a database, which waits for the server where that is away for a while."""

    def __init__(self, url: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
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


def _mend_journal(journal: Path) -> None:
    """Takes away what a kill left behind: a last line cut off in the middle, and the lock of a dead process."""
    for lock in journal.parent.glob(f"{journal.name}.lock*"):  # the run folder's own lock says that nobody has it
        lock.unlink()
    cut_to_whole_lines(journal)
