"""What storages have in common, and drivers that are missing; servers have tests in `tests/system`."""

import importlib.util

import numpy as np
import optuna
import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from batchtune.config.schema import Config
from batchtune.errors import UsageError
from batchtune.result import Result
from batchtune.tune.optuna_parts import storages
from batchtune.tune.optuna_parts.storages import Journal, SharedStorage
from batchtune.tune.study.storage import as_in_journal, open_storage, open_study


def test_a_proxy_that_does_not_answer_is_named(tmp_path, monkeypatch):
    pytest.importorskip("grpc", reason="grpcio is not installed")
    monkeypatch.setattr(storages, "READY_SECONDS", 0.5)
    with pytest.raises(UsageError, match=r"storage grpc://127.0.0.1:9 cannot be opened: GRPC connection timeout"):
        open_storage("grpc://127.0.0.1:9", tmp_path)
    with pytest.raises(UsageError, match=r"cannot be opened: GRPC connection timeout"):
        storages.reach("grpc://127.0.0.1:9")


def test_who_only_looks_for_a_storage_writes_nothing(tmp_path):
    storages.reach(f"sqlite:///{tmp_path}/studies.db")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match=r"cannot be opened: there is no folder .*nowhere"):
        storages.reach(f"sqlite:///{tmp_path}/nowhere/studies.db")
    (tmp_path / "studies.db").write_bytes(b"")
    storages.reach(f"sqlite:///{tmp_path}/studies.db")
    assert (tmp_path / "studies.db").read_bytes() == b""


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


X = {"x": optuna.distributions.FloatDistribution(0, 1)}


@pytest.fixture
def machines(tmp_path):
    """A study as two machines see it, and as Optuna does by itself; their connections end with the test."""
    databases = [optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/study.db") for _ in range(3)]
    own = optuna.create_study(study_name="shared", storage=databases[0])
    yield own, [optuna.load_study(study_name="shared", storage=SharedStorage(each)) for each in databases[1:]]
    for each in databases:
        each.engine.dispose()


def test_what_others_do_in_a_shared_study_is_seen_but_for_evaluations_under_way(machines, monkeypatch):
    monkeypatch.setattr(storages, "STARTING_SECONDS", -1.0)  # each run is read once, and then at its end
    own, studies = machines
    random, under_way, states = np.random.default_rng(0), [], set()
    for number in range(40):
        study = studies[random.integers(len(studies))]
        what = random.choice(["queue", "ask", "ask", "ask", "report", "tell", "fail"])
        if what == "queue":
            study.enqueue_trial({"x": random.random()}, user_attrs={"queued": number})
        elif what == "ask":
            under_way.append(study.ask(X))
        elif under_way and what == "report":
            under_way[random.integers(len(under_way))].report(random.random(), number)
        elif under_way:
            trial = under_way.pop(random.integers(len(under_way)))
            trial.set_user_attr("outcome", what)
            state = {"tell": TrialState.COMPLETE, "fail": TrialState.FAIL}[what]
            study.tell(trial.number, random.random() if what == "tell" else None, state=state)
        for study in studies:
            truth, found = own.get_trials(deepcopy=False), study.get_trials(deepcopy=False)
            assert [(each.number, each.state) for each in found] == [(each.number, each.state) for each in truth]
            for seen, there in zip(found, truth, strict=True):
                assert seen == there or not seen.state.is_finished()
        states |= {each.state.name for each in truth}
    assert states == {"WAITING", "RUNNING", "COMPLETE", "FAIL"}


def test_what_a_run_that_has_just_begun_tries_is_seen_though_it_was_read_before_that_was_written(machines):
    _, (here, there) = machines
    trial = there.ask()
    assert here.get_trials()[0].params == {}
    trial.suggest_float("x", 0, 1)
    trial.set_user_attr("role", "search")
    (seen,) = here.get_trials()
    assert seen.params.keys() == {"x"}
    assert seen.user_attrs == {"role": "search"}


def test_evaluations_of_others_are_not_read_again_and_again(machines, monkeypatch):
    monkeypatch.setattr(storages, "STARTING_SECONDS", 0.0)
    _, (here, there) = machines
    trial = there.ask(X)
    for step in range(5):
        trial.report(1.0, step)
        here.get_trials()
    (seen,) = here.get_trials()
    assert len(seen.intermediate_values) < 5
    there.tell(trial, 2.0)
    (seen,) = here.get_trials()
    assert (len(seen.intermediate_values), seen.value) == (5, 2.0)


def test_what_a_killed_study_has_finished_since_it_last_saved_is_in_its_report(tmp_path):
    config = Config(task="model.py", name="killed", objective={"target": 0.3})
    saved = Result(kind="tune", status="interrupted", name="killed", task={"path": "model.py"}, trials=[])
    assert as_in_journal(saved, tmp_path) is None  # there is neither
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    study = open_study(Journal(tmp_path / "study.log"), config)
    for role, seconds in (("baseline", 9.0), ("search", 5.0)):
        trial = study.ask({"batch_size": IntDistribution(1, 99), "learning_rate": FloatDistribution(1e-3, 1e-1)})
        study._storage.set_trial_user_attr(trial._trial_id, "role", role)
        study._storage.set_trial_user_attr(trial._trial_id, "time_to_target_seconds", seconds)
        study.tell(trial, seconds)
    study.ask(trial.distributions)  # under way when it was killed
    with (tmp_path / "study.log").open("a") as journal:
        journal.write('{"op_code": 5, "wor')
    before = (tmp_path / "study.log").read_bytes()
    told = as_in_journal(saved, tmp_path)
    assert [each.time_to_target_seconds for each in told.trials] == [9.0, 5.0]
    assert told.recommendation.time_to_target_seconds.median == 5.0
    known = saved.model_copy(update={"recommendation": told.recommendation.model_copy(update={"reason": "known"})})
    assert as_in_journal(known, tmp_path).recommendation.reason == "known"  # by all that its study knew
    assert (tmp_path / "study.log").read_bytes() == before
