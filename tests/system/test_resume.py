"""A study that is killed again and again ends as if it had never been: no finished trial is lost, none runs twice."""

import contextlib
import json
import random
import shutil
import time

import jsonschema
import pytest
from fake_gpu import forks
from faults.scene import trials_in
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from batchtune.result import result_schema

MORE = ("tune", "config.yaml", "budget.run=400ms", "budget.trials=6", "--json")
# Where the kills fall: after this line of progress, and up to so many seconds later.
KILLS = [
    ("  8  fit", 0.0),
    ("timing steps", 1.0),
    ("baseline", 0.6),
    ("  search  ", 0.5),
    ("confirm  run", 0.0),  # what is left then is short: the baseline is cut off
]


def finished_trials(cli, copy):
    """Every trial that the journal holds as complete or pruned, by number."""
    shutil.copyfile(cli.run_folder() / "study.log", copy)
    storage = JournalStorage(JournalFileBackend(str(copy)))
    ended = [trial for trial in trials_in(storage) if trial.state in {TrialState.COMPLETE, TrialState.PRUNED}]
    return {trial.number: trial for trial in ended}


def identity(trial):
    """The same configuration with the same seed in the same role is the same run."""
    about = trial.user_attrs
    return about["role"], about["seed"], *sorted(trial.params.items())


def kill_again_and_again(cli, journal):
    """What each kill found, the processes it left behind, how the study ended, and its trials."""
    dice, found, orphans = random.Random(20), [], []
    for line, later in KILLS:
        command = cli.start(*MORE, popen=forks.Popen)
        with contextlib.suppress(AssertionError):  # it ended before it came to that
            command.wait_for(line)
        time.sleep(dice.uniform(0, later))
        orphans.append(command.family() if command.process.poll() is None else [])
        command.process.kill()
        command.finish()
        found.append(finished_trials(cli, journal) if (cli.run_folder() / "study.log").exists() else {})
    end = cli.start(*MORE, popen=forks.Popen).finish(120)
    return found, orphans, end, finished_trials(cli, journal)


@pytest.fixture(scope="module", autouse=True)
def begun(new_cli, pool, tmp_path_factory):
    """The study that is killed; it takes its time while the other tests run."""
    return pool.submit(kill_again_and_again, new_cli(), tmp_path_factory.mktemp("journal") / "study.log")


@pytest.fixture(scope="module")
def killed(begun):
    return begun.result()


def test_a_journal_cut_off_in_its_last_line_is_mended(tuned, quick_cli):
    tuned.copy_to(quick_cli)
    journal = quick_cli.run_folder() / "study.log"
    whole = journal.read_text()
    journal.write_text(whole + '{"op_code": 6, "worker_id": "somebody')
    (quick_cli.run_folder() / "study.log.lock").symlink_to("study.log")  # held by a process that was killed
    again = quick_cli("tune", "config.yaml", "--json", "-q")
    assert again.code == 0, again.err
    assert again.document["trials"] == tuned.document["trials"]
    lines = journal.read_text().splitlines(keepends=True)
    assert "".join(lines).startswith(whole)
    assert all(json.loads(line) for line in lines)


def test_a_trial_that_had_ended_when_the_kill_came_is_not_run_again(tuned, quick_cli):
    tuned.copy_to(quick_cli)
    journal = quick_cli.run_folder() / "study.log"
    lines = journal.read_text().splitlines(keepends=True)
    ends = {TrialState.COMPLETE, TrialState.PRUNED}  # a baseline that was cut off may well be the last
    last = max(number for number, line in enumerate(lines) if json.loads(line).get("state") in ends)
    journal.write_text("".join(lines[:last]))  # all about the last trial is there but its end
    again = quick_cli("tune", "config.yaml", "--json", "-q")
    assert again.document["trials"] == tuned.document["trials"]


def test_a_budget_that_grew_is_used_for_more_trials(tuned, quick_cli):
    tuned.copy_to(quick_cli)
    before = tuned.document["trials"]
    more = quick_cli("tune", "config.yaml", "budget.trials=6", "confirm=off", "--json", "-q").document
    assert more["trials"][: len(before)] == before
    assert all(trial["role"] == "search" for trial in more["trials"][len(before) :])


def test_a_study_killed_at_every_stage_completes(killed):
    found, _, end, finished = killed
    assert end.code == 0, end.err
    jsonschema.Draft202012Validator(result_schema()).validate(end.document)
    assert end.document["status"] == "complete"
    assert [len(trials) for trials in found] == sorted(len(trials) for trials in found)
    assert found[2] == {}  # killed in the baseline at the latest
    assert 0 < len(found[-1]) <= len(finished)
    assert any(0 < len(trials) < len(finished) for trials in found)  # a kill came when some were done and some not


def test_no_finished_trial_is_lost_or_changed_by_a_kill(killed):
    found, _, end, finished = killed
    shown = {trial["number"]: trial for trial in end.document["trials"]}
    for trials in found:
        for number, trial in trials.items():
            now = finished[number]
            assert (now.state, now.value, now.params) == (trial.state, trial.value, trial.params)
            assert now.intermediate_values == trial.intermediate_values
            assert shown[number]["state"] == trial.state.name.lower()
            if trial.state is TrialState.COMPLETE:
                assert shown[number]["time_to_target_seconds"] == trial.value


def test_no_run_is_finished_twice(killed):
    *_, finished = killed
    runs = sorted(identity(trial) for trial in finished.values())
    assert runs == sorted(set(runs))


def test_kills_cost_no_run_of_what_was_asked_for(killed):
    _, _, end, _ = killed
    over = [trial["role"] for trial in end.document["trials"] if trial["state"] in {"complete", "pruned"}]
    assert over.count("baseline") == 1
    assert 1 <= over.count("search") <= 6
    assert over.count("confirm") == 2 * 2


def test_the_child_of_a_killed_process_ends_by_itself(killed, all_gone):
    _, orphans, _, _ = killed
    assert sum(len(family) for family in orphans) > len(orphans)
    assert all_gone([process for family in orphans for process in family])


def test_a_study_in_a_file_of_its_own_is_not_mixed_with_another_and_is_started_over_on_demand(quick_cli):
    storage = ("--storage", "sqlite:///study.db")
    command = ("tune", "config.yaml", "batch_size.max=8", "baseline.batch_size=8", "budget.trials=1", "confirm=off")
    first = quick_cli(*command, *storage, "--json", "-q")
    assert first.code == 0, first.err
    shutil.rmtree(quick_cli.run_folder())  # which held the identity: the study still knows what it is of
    task = quick_cli.folder / "linear.py"
    task.write_text(task.read_text() + "\nCHANGED = True\n")
    mixed = quick_cli(*command, *storage, "-q")
    assert mixed.code == 2
    assert "study config was begun with other code than " in mixed.err
    assert "--fresh deletes that study" in mixed.err
    again = quick_cli(*command, *storage, "--fresh", "--json", "-q")
    assert again.code == 0, again.err
    assert [trial["number"] for trial in again.document["trials"]] == [0, 1]
    assert again.document["created_at"] != first.document["created_at"]
    assert again.document["trials"] != first.document["trials"]
