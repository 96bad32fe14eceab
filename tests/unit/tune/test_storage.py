"""What storages have in common, and drivers that are missing; servers have tests in `tests/system`."""

import importlib.util
import time

import optuna
import pytest
import sqlalchemy
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from batchtune.errors import UsageError
from batchtune.tune.storage import storage as storage_module
from batchtune.tune.storage.storage import Journal, OneReading, open_storage


def test_a_proxy_that_does_not_answer_is_named(tmp_path, monkeypatch):
    pytest.importorskip("grpc", reason="grpcio is not installed")
    monkeypatch.setattr(storage_module, "READY_SECONDS", 0.5)
    with pytest.raises(UsageError, match=r"storage grpc://127.0.0.1:9 cannot be opened: GRPC connection timeout"):
        open_storage("grpc://127.0.0.1:9", tmp_path)


@pytest.mark.parametrize(
    ("url", "module", "package"),
    [("mysql+pymysql", "pymysql", "pymysql"), ("mysql", "MySQLdb", "mysqlclient")],
)
def test_a_driver_that_is_missing_is_named_in_one_line_with_its_package(url, module, package, tmp_path):
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    with pytest.raises(UsageError) as caught:
        open_storage(f"{url}://me:secret@host/studies", tmp_path)
    place = f"storage {url}://me:***@host/studies"
    assert str(caught.value) == f"{place}: {module} is not installed; run: pip install {package}"


def test_a_resumed_study_that_is_interrupted_while_it_is_read_can_still_be_read(tmp_path, monkeypatch):
    for _ in range(2):  # the second start begins the same study once more, and this process is its writer
        journal = Journal(tmp_path / "study.log")
        study = optuna.create_study(study_name="resumed", storage=journal, load_if_exists=True)
        study.tell(study.ask(), 1.0)
    read = JournalFileBackend.read_logs

    def interrupted(backend, log_number_from):
        yield next(read(backend, log_number_from))
        raise KeyboardInterrupt

    monkeypatch.setattr(JournalFileBackend, "read_logs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        study.set_user_attr("after", 1)
    monkeypatch.setattr(JournalFileBackend, "read_logs", read)
    assert study.user_attrs == {"after": 1}
    assert [trial.value for trial in study.get_trials(deepcopy=False)] == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore:Heartbeat of storage|heartbeat")  # they are given elsewhere
class TestAskingAgain:
    """Questions at one moment are answered at once, and nobody is told what is no longer true."""

    @pytest.fixture(params=["journal", "database"])
    def machines(self, request, tmp_path):
        """Two machines' views of one study, and how long one may not see what the other writes."""
        if request.param == "journal":
            yield *(Journal(tmp_path / "study.log") for _ in range(2)), 0.0
            return
        url = f"sqlite:///{tmp_path}/study.db"
        storages = [OneReading(storage_module.shared_database(url)) for _ in range(2)]
        yield *storages, storage_module.MOMENT_SECONDS
        for storage in storages:
            storage.remove_session()
            storage.database.engine.dispose()

    def test_what_this_machine_writes_is_seen_at_once_and_what_another_does_a_moment_later(self, machines):
        mine, theirs, moment = machines
        study = optuna.create_study(study_name="both", storage=mine)
        other = optuna.load_study(study_name="both", storage=theirs)
        for number in range(4):
            trial = study.ask()
            assert [each.number for each in study.get_trials(deepcopy=False)] == list(range(2 * number + 1))
            trial.set_user_attr("seed", number)
            assert study.get_trials(deepcopy=False)[-1].user_attrs == {"seed": number}
            study.tell(trial, 1.0)
            assert study.get_trials(deepcopy=False)[-1].state is TrialState.COMPLETE
            other.tell(other.ask(), 2.0)
            time.sleep(moment)
            assert [each.value for each in study.get_trials(deepcopy=False)] == [1.0, 2.0] * (number + 1)
            assert study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)) == []

    def test_whoever_changes_an_answer_changes_only_his_own(self, machines):
        study = optuna.create_study(study_name="both", storage=machines[0])
        study.tell(study.ask(), 1.0)
        study.get_trials(deepcopy=False).clear()
        assert len(study.get_trials(deepcopy=False)) == 1

    def test_a_database_is_read_once_in_a_moment(self, tmp_path, monkeypatch):
        monkeypatch.setattr(storage_module, "MOMENT_SECONDS", 600.0)
        backend = storage_module.shared_database(f"sqlite:///{tmp_path}/study.db")
        study, statements = optuna.create_study(storage=OneReading(backend)), []
        study.ask()
        study.get_trials(deepcopy=False)
        sqlalchemy.event.listen(backend.engine, "before_cursor_execute", lambda *about: statements.append(about[2]))
        for states in (None, (TrialState.RUNNING,), (TrialState.COMPLETE,)):
            study.get_trials(deepcopy=False, states=states)
        assert statements == []
        study.ask()
        assert len(study.get_trials(deepcopy=False)) == 2
        backend.remove_session()
        backend.engine.dispose()
