"""A study behind Optuna's gRPC proxy."""

import socket
from concurrent.futures import ThreadPoolExecutor

import law
import optuna
import pytest
from fakes import FakeCrew

from batchtune.observer import Observer
from batchtune.tune.study.phases import TuneStudy
from batchtune.tune.study.storage import open_storage


@pytest.fixture
def proxy(tmp_path):
    """Optuna's server before a database in a file, as `run_grpc_proxy_server` has it, and its address."""
    pytest.importorskip("grpc", reason="grpcio is not installed")
    from optuna.storages._grpc.server import make_server

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    database = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/study.db")
    with ThreadPoolExecutor(4) as threads:
        server = make_server(database, "127.0.0.1", port, threads)
        server.start()
        yield database, f"grpc://127.0.0.1:{port}"
        server.stop(None).wait()
    database.remove_session()
    database.engine.dispose()


def test_a_study_behind_a_grpc_proxy_has_the_trials_that_the_journal_would_have(proxy, tmp_path):
    def trials(storage):
        keys = {"budget": {"run": 120.0, "total": 3600.0, "trials": 6}, "confirm": {"seeds": 1, "top": 1}}
        tuned = TuneStudy(law.plan(**keys), FakeCrew(law.LawWorker()), storage, Observer())
        tuned.run()
        return [trial.model_dump() for trial in tuned.records()]

    database, url = proxy
    storage = open_storage(url, tmp_path)
    found = trials(storage)
    storage.close()
    assert found == trials(open_storage(None, tmp_path))
    assert len(optuna.load_study(study_name="law", storage=database).trials) == len(found)
