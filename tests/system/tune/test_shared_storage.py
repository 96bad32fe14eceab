"""A study that two machines share through a real PostgreSQL server: joining, taking over, an outage."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import law
import optuna
import pytest
from fake_gpu import forks
from fakes import FakeCrew
from fixtures.postgresql import own_server, server_programs
from fixtures.waiting import wait_until

from batchtune.document import Prior
from batchtune.errors import UsageError
from batchtune.observer import Observer
from batchtune.tune.optuna_parts import storages
from batchtune.tune.study.phases import TuneStudy
from batchtune.tune.study.storage import Agreement, Machines, delete_study, open_storage

pytest.importorskip("psycopg", reason="the driver psycopg is not installed (extra 'postgresql')")

pytestmark = pytest.mark.filterwarnings("ignore:Heartbeat of storage")

ROOT = Path(__file__).resolve().parents[3]
MACHINE = """
import sys
from pathlib import Path
import batchtune
from batchtune.observer import Observer
from batchtune.tune.optuna_parts import storages
storages.HEARTBEAT_SECONDS, storages.GRACE_SECONDS = 1, 3

class Listener(Observer):
    def stage(self, title):
        print("stage", title, flush=True)

    def trial_started(self, trial, *, best_seconds):
        print("started", trial.number, trial.role, flush=True)

changed = [f"storage={sys.argv[1]}", *sys.argv[2:]]
result = batchtune.tune("config.yaml", overrides=changed, observer=Listener(), run_folders=".runs")
Path("found.json").write_text(result.to_json())
"""
OPENING = """
import sys
from pathlib import Path
from batchtune.tune.study.storage import open_storage

print("ready", flush=True)
input()
print(open_storage(sys.argv[1], Path()).get_all_studies())
"""
SLOW = """
import time
at_once = compute_loss

def compute_loss(model, batch):
    time.sleep(0.005)
    return at_once(model, batch)
"""
CONFIG = """
task: linear.py
name: shared
device: cpu
baseline: {batch_size: 16, learning_rate: 1e-2}
batch_size: {max: 16, multiple_of: 8}
learning_rate: {min: 1e-3, max: 1.0}
budget: {run: 1s, total: 5m, trials: 4}
confirm: {seeds: 2, top: 1}
"""


@pytest.fixture(scope="module")
def server():
    if server_programs() is None:
        pytest.skip("no PostgreSQL server here (Debian's package 'postgresql' has one)")
    with own_server() as started:
        yield started


@pytest.fixture
def opened(server):
    """Opens the storage in a database of that name, new the first time; closes its connections afterwards."""
    kept, urls = [], {}

    def open_new(name: str):
        url = urls[name] = urls.get(name) or server.new_database(name)
        kept.append(open_storage(url, Path()))
        return kept[-1]

    yield open_new
    for storage in kept:
        storage._backend.scoped_session.remove()
        storage._backend.engine.dispose()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(storages, "HEARTBEAT_SECONDS", 1)
    monkeypatch.setattr(storages, "GRACE_SECONDS", 2)


@pytest.fixture
def machine(tmp_path, new_cli):
    """Starts machines, and ends those that the test has left."""
    started = []
    task = (new_cli().folder / "linear.py").read_text() + SLOW

    def start(name: str, url: str, *changed: str) -> subprocess.Popen:
        started.append(start_machine(tmp_path / name, task, url, *changed))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def start_machine(folder: Path, task: str, url: str, *changed: str) -> subprocess.Popen:
    folder.mkdir()
    for name, text in {"linear.py": task, "config.yaml": CONFIG, "machine.py": MACHINE}.items():
        (folder / name).write_text(text)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "machine.py", url, *changed]
    return forks.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def await_line(process: subprocess.Popen, beginning: str) -> str:
    for line in process.stdout:
        if line.startswith(beginning):
            return line
    raise AssertionError(f"ended before {beginning!r}")


def test_a_second_machine_joins_takes_over_from_one_that_is_killed_and_finishes(server, machine, tmp_path):
    url = server.new_database("takeover")
    first = machine("first", url)
    await_line(first, "started 0 baseline")
    second = machine("second", url)
    started = await_line(first, "started").split()  # a run of the search
    first.send_signal(signal.SIGKILL)
    first.communicate()
    said, _ = second.communicate(timeout=200)
    assert second.returncode == 0
    assert "stage probing" not in said  # the first machine had
    found = json.loads((tmp_path / "second" / "found.json").read_text())
    assert found["status"] == "complete"
    trials = {trial["number"]: trial for trial in found["trials"]}
    assert trials[int(started[1])]["state"] == "fail"
    assert [trial["role"] for trial in found["trials"] if trial["state"] == "complete"].count("baseline") == 1
    confirmed = [trial for trial in found["trials"] if trial["role"] == "confirm" and trial["state"] != "fail"]
    runs = [(trial["batch_size"], trial["learning_rate"], trial["seed"]) for trial in confirmed]
    assert len(runs) == len(set(runs)) == 4  # the answer and the baseline, on two seeds each
    assert found["recommendation"]["learning_rate"] > 0


@pytest.mark.timeout(400)
def test_groups_of_ranks_on_two_machines_share_a_study(server, machine, tmp_path):
    url = server.new_database("groups")
    first, second = (machine(name, url, "ranks.per_trial=2", "confirm.seeds=1") for name in ("first", "second"))
    told = [each.communicate(timeout=300)[0] for each in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    found = json.loads((tmp_path / "second" / "found.json").read_text())
    assert {(trial["world_size"], trial["strategy"]) for trial in found["trials"]} == {(2, "ddp")}
    started = [int(line.split()[1]) for said in told for line in said.splitlines() if line.startswith("started")]
    assert len(started) == len(set(started))  # no run on both
    assert all("started" in said for said in told)


def test_machines_that_open_an_empty_database_at_the_same_moment_all_get_in(server):
    opening = [sys.executable, "-c", OPENING, server.new_database("at_once")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    machines = [subprocess.Popen(opening, **pipes) for _ in range(4)]
    for each in machines:
        assert each.stdout.readline() == "ready\n"
    for each in machines:
        each.stdin.write("go\n")
        each.stdin.flush()
    assert [each.communicate()[0] for each in machines] == ["[]\n"] * len(machines)


def test_a_run_without_a_sign_of_life_is_queued_again_as_it_was(opened, quick):
    study = optuna.create_study(storage=opened("silence"))
    study.enqueue_trial({"x": 0.5}, user_attrs={"role": "confirm", "seed": 7})
    machines = Machines(study)
    trial = study.ask({"x": optuna.distributions.FloatDistribution(0, 1)})

    def is_missed():
        machines.take_over()
        return study.get_trials()[0].state.name != "RUNNING"

    with machines.sign_of_life(trial):
        time.sleep(2.5)
        assert not is_missed()
    wait_until(is_missed)
    old, new = study.get_trials()
    assert (old.state.name, new.state.name) == ("FAIL", "WAITING")
    assert new.user_attrs == {"role": "confirm", "seed": 7, "retry_of": 0}
    assert new.system_attrs["fixed_params"] == {"x": 0.5}


def test_a_machine_that_has_nothing_left_to_do_waits_for_the_last_runs_of_the_others(opened):
    keys = {"budget": {"run": 120.0, "total": 3600.0, "trials": 3}, "confirm": "off"}
    tuned = TuneStudy(law.plan(**keys), FakeCrew(law.LawWorker()), opened("last"), Observer())
    parts = tuned.parts
    parts.study.enqueue_trial({"batch_size": 16, "learning_rate": 0.01}, user_attrs={"role": "search", "seed": 0})
    elsewhere = parts.study.ask(parts.space.distributions)
    here = threading.Thread(target=tuned.run)
    with Machines(parts.study).sign_of_life(elsewhere):
        here.start()
        wait_until(lambda: parts.history.searched() == 2)
        here.join(1.0)
        assert here.is_alive()
        parts.study.tell(elsewhere, state=optuna.trial.TrialState.PRUNED)
    here.join(60)
    assert not here.is_alive()


def test_it_waits_no_longer_than_the_budget(opened):
    keys = {"budget": {"run": 1.0, "total": 12.0, "trials": 2}, "confirm": "off"}
    tuned = TuneStudy(law.plan(**keys), FakeCrew(law.LawWorker()), opened("silent"), Observer())
    study = tuned.parts.study
    study.enqueue_trial({"batch_size": 16, "learning_rate": 0.01}, user_attrs={"role": "search", "seed": 0})
    with Machines(study).sign_of_life(study.ask(tuned.parts.space.distributions)):
        tuned.run()
    assert tuned.parts.budget.seconds_left() <= 0
    assert [each.state.name for each in study.get_trials()].count("RUNNING") == 1


def test_how_a_run_of_another_machine_ended_is_seen_though_it_is_not_read_meanwhile(opened, monkeypatch):
    monkeypatch.setattr(storages, "STARTING_SECONDS", 0.0)
    monkeypatch.setattr(storages, "PATIENCE_SECONDS", 0.0)
    here = optuna.create_study(study_name="read", storage=opened("read"))
    there = optuna.load_study(study_name="read", storage=opened("read"))
    for number in range(3):
        trial = there.ask({"x": optuna.distributions.FloatDistribution(0, 1)})
        for step in range(3):
            trial.report(1.0, step)
            assert here.get_trials()[number].params == trial.params
        assert len(here.get_trials()[number].intermediate_values) < 3
        there.tell(trial, number)
        assert [each.value for each in here.get_trials()] == list(range(number + 1))


def test_a_server_that_goes_away_is_waited_for(server, opened):
    study = optuna.create_study(storage=opened("outage"))
    trial = study.ask({"x": optuna.distributions.FloatDistribution(0, 1)})
    server.stop()
    telling = threading.Thread(target=lambda: (trial.report(1.0, 1), study.tell(trial, 2.0)))
    telling.start()
    telling.join(1.0)
    assert telling.is_alive()  # there is nobody to tell
    server.start()
    telling.join(60)
    assert study.best_value == 2.0


def test_machines_go_by_what_the_first_has_settled_unless_they_are_of_another_kind(opened, tmp_path):
    task = tmp_path / "model.py"
    task.touch()
    storage, plan = opened("settled"), law.plan(task=str(task), storage="postgresql+psycopg://host/settled")
    reasons = {"batch_sizes_reason": "for the test", "learning_rate_reason": "for the test"}
    prior = Prior(batch_sizes=[8, 16], learning_rate=0.01, learning_rate_decades=0.5, **reasons)
    first, second = (Agreement(storage, plan.config, "A100") for _ in range(2))
    assert first.look() is None
    assert first.settle(plan.probe, prior) == (plan.probe, prior)
    another = prior.model_copy(update={"learning_rate": 1.0})
    assert second.settle(plan.probe, another) == second.look() == (plan.probe, prior)
    with pytest.raises(UsageError, match=r"study law was begun with device = A100, here it is T4"):
        Agreement(storage, plan.config, "T4").look()


def test_a_study_is_deleted_unless_a_machine_is_at_work_in_it(opened, quick):
    storage = opened("again")
    delete_study(storage, "law")  # there is none yet
    study = optuna.create_study(study_name="law", storage=storage)
    trial = study.ask()
    Machines(study).announce(trial)
    with pytest.raises(UsageError, match="a run of study law was alive a moment ago"):
        delete_study(storage, "law")

    def is_deleted():
        with contextlib.suppress(UsageError):
            delete_study(storage, "law")
        return optuna.get_all_study_names(storage) == []

    wait_until(is_deleted)  # once nothing has been heard of it for long enough


def test_the_same_seed_gives_the_same_trials_as_the_journal(opened, tmp_path):
    def trials(storage):
        keys = {"budget": {"run": 120.0, "total": 3600.0, "trials": 6}, "confirm": {"seeds": 1, "top": 1}}
        tuned = TuneStudy(law.plan(**keys), FakeCrew(law.LawWorker(noise=0.05)), storage, Observer())
        tuned.run()
        return [trial.model_dump() for trial in tuned.records()]

    journal = trials(open_storage(None, tmp_path))
    assert trials(opened("alike")) == journal
    assert len(journal) == 1 + 6 + 2
