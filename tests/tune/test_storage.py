"""Storages that are neither the journal nor PostgreSQL: Optuna's gRPC proxy, and drivers that are missing."""

import importlib.util
import socket
from concurrent.futures import ThreadPoolExecutor

import law
import optuna
import pytest

from batchtune.errors import UsageError
from batchtune.progress import Observer
from batchtune.tune import storage as storage_module
from batchtune.tune.storage import open_storage
from batchtune.tune.study import TuneStudy


@pytest.fixture
def proxy(tmp_path):
    """Optuna's server before a database in a file, as `run_grpc_proxy_server` has it, and its address."""
    pytest.importorskip("grpc", reason="grpcio is not installed")
    from optuna.storages._grpc.server import make_server

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    database = optuna.storages.get_storage(f"sqlite:///{tmp_path}/study.db")
    with ThreadPoolExecutor(4) as threads:
        server = make_server(database, "127.0.0.1", port, threads)
        server.start()
        yield database, f"grpc://127.0.0.1:{port}"
        server.stop(None).wait()
    database.remove_session()
    database._backend.engine.dispose()


def test_a_study_behind_a_grpc_proxy_has_the_trials_that_the_journal_would_have(proxy, tmp_path):
    def trials(storage):
        keys = {"budget": {"run": 120.0, "total": 3600.0, "trials": 6}, "confirm": {"seeds": 1, "top": 1}}
        tuned = TuneStudy(law.plan(**keys), law.LawWorker(), storage, Observer())
        tuned.run()
        return [trial.model_dump() for trial in tuned.records()]

    database, url = proxy
    storage = open_storage(url, tmp_path)
    found = trials(storage)
    storage.close()
    assert found == trials(open_storage(None, tmp_path))
    assert len(optuna.load_study(study_name="law", storage=database).trials) == len(found)


def test_a_proxy_that_does_not_answer_is_named(tmp_path, monkeypatch):
    pytest.importorskip("grpc", reason="grpcio is not installed")
    monkeypatch.setattr(storage_module, "_READY_SECONDS", 0.5)
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
