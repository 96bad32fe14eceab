"""A study in real trackers: written through their own clients by the real command, read back by them."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchtune.errors import UsageError
from batchtune.report.trackers import log_to, study_of

ROOT = Path(__file__).parents[3]
QUIET = {"DO_NOT_TRACK": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}
theirs = pytest.mark.filterwarnings("ignore")  # what a tracker's own reader says about its future is not for us


def needs(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed; install '.[test]'")


@pytest.fixture
def log(result_of, tmp_path, monkeypatch):
    """Logs the made-up study with the real command in a folder of its own; gives what the command printed."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "WANDB_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "result.json").write_text(result_of("tune").to_json())

    def run(tracker, **environment):
        command = [sys.executable, "-m", "batchtune", "report", "result.json", "--log-to", tracker]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=os.environ | QUIET | {"PYTHONPATH": str(ROOT)} | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@needs("mlflow")
@theirs
def test_mlflow_has_a_run_for_each_trial_with_parameters_curve_and_outcome(log, result_of, tmp_path):
    from mlflow.tracking import MlflowClient

    where = f"sqlite:///{tmp_path}/tracking.db"
    assert "logged 7 of 7 trials to experiment 'digits' at sqlite:///" in log("mlflow", MLFLOW_TRACKING_URI=where)
    client = MlflowClient(where)
    experiment = client.get_experiment_by_name("digits").experiment_id
    runs = {run.info.run_name: run for run in client.search_runs([experiment])}
    trials = result_of("tune").trials
    assert sorted(runs) == [f"trial-{trial.number:03}-{trial.role}" for trial in trials]
    second = runs["trial-001-search"]
    assert second.data.params["batch_size"] == "64"
    assert float(second.data.params["learning_rate"]) == 0.002
    assert second.data.metrics["time_to_target_seconds"] == 12.0
    assert second.data.tags["outcome"] == "reached"
    history = client.get_metric_history(second.info.run_id, "val_loss")
    assert [point.value for point in history] == [point.value for point in trials[1].curve]
    assert [point.step for point in history] == [point.samples // 64 for point in trials[1].curve]
    took = (history[-1].timestamp - history[0].timestamp) / 1000
    assert took == pytest.approx(trials[1].curve[-1].seconds, abs=0.01)  # the time axis is training time
    answer = runs["trial-005-confirm"]
    assert {name for name, run in runs.items() if "recommended" in run.data.tags} == {
        answer.info.run_name,
        "trial-002-search",
    }
    assert {file.path for file in client.list_artifacts(answer.info.run_id)} == {"report.html", "report.md"}
    assert answer.data.tags["mlflow.note.content"].startswith("## batchtune tune: digits")
    assert client.list_artifacts(second.info.run_id) == []
    diverged = runs["trial-004-search"]
    assert diverged.info.status == "FAILED"
    assert diverged.data.tags["message"] == "loss was not finite"
    assert "time_to_target_seconds" not in diverged.data.metrics
    assert "nothing was logged: all 7 trials are in " in log("mlflow", MLFLOW_TRACKING_URI=where)
    assert len(client.search_runs([experiment])) == 7


@needs("tensorboard")
@theirs
def test_tensorboard_has_a_run_for_each_trial_with_parameters_curve_and_outcome(log, result_of, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    assert "logged 7 of 7 trials to runs/digits" in log("tensorboard")
    folders = sorted((tmp_path / "runs" / "digits").iterdir())
    trials = result_of("tune").trials
    assert [folder.name[:-7] for folder in folders] == [f"trial-{trial.number:03}-{trial.role}" for trial in trials]
    read = EventAccumulator(str(folders[1]))
    read.Reload()
    curve = read.Scalars("val_loss")
    assert [point.value for point in curve] == pytest.approx([point.value for point in trials[1].curve])
    assert curve[-1].wall_time - curve[0].wall_time == pytest.approx(12.0, abs=0.01)
    assert read.Scalars("time_to_target_seconds")[0].value == 12.0
    assert read.Tensors("outcome")[0].tensor_proto.string_val == [b"reached"]
    content = read.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    parameters = HParamsPluginData.FromString(content).session_start_info.hparams
    assert parameters["batch_size"].number_value == 64
    assert parameters["learning_rate"].number_value == 0.002
    assert parameters["precision"].string_value == "bf16"
    before = {path: path.stat().st_size for path in folders[1].iterdir()}
    assert [path.parent.name[:-7] for path in tmp_path.rglob("report.html")] == ["trial-005-confirm"]
    answer = EventAccumulator(str(folders[5]))
    answer.Reload()
    assert answer.Tensors("recommended")[0].tensor_proto.string_val == [b"yes"]
    assert answer.Tensors("report")[0].tensor_proto.string_val[0].startswith(b"## batchtune tune: digits")
    assert "nothing was logged: all 7 trials are in " in log("tensorboard")
    assert {path: path.stat().st_size for path in folders[1].iterdir()} == before


@needs("wandb")
@theirs
def test_wandb_has_an_offline_run_for_each_trial_with_parameters_curve_and_outcome(log, result_of, tmp_path):
    assert "logged 7 of 7 trials to wandb; bring offline runs to the server" in log("wandb")
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    runs = {run["name"]: run for run in map(read_wandb, files)}
    trials = result_of("tune").trials
    assert sorted(runs) == [f"trial-{trial.number:03}-{trial.role}" for trial in trials]
    second = runs["trial-001-search"]
    assert (second["project"], second["group"]) == ("digits", "digits")
    assert second["config"]["batch_size"] == 64
    assert second["config"]["learning_rate"] == 0.002
    assert [row["val_loss"] for row in second["history"]] == [point.value for point in trials[1].curve]
    assert [row["seconds"] for row in second["history"]] == [point.seconds for point in trials[1].curve]
    assert second["summary"]["outcome"] == "reached"
    assert second["summary"]["time_to_target_seconds"] == 12.0
    assert {name for name, run in runs.items() if "recommended" in run["tags"]} == {
        "trial-002-search", "trial-005-confirm",
    }  # fmt: skip
    assert runs["trial-005-confirm"]["notes"].startswith("## batchtune tune: digits")
    assert {name: run["files"] for name, run in runs.items() if run["files"]} == {
        "trial-005-confirm": ["report.html", "report.md"]
    }
    assert "nothing was logged: all 7 trials are in " in log("wandb")
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 7


def read_wandb(file):
    """An offline run's file: wandb's own messages out of the LevelDB log that it keeps them in."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = {"history": [], "summary": {}, "config": {}, "files": []}

    def values(items):
        return {each.key or ".".join(each.nested_key): json.loads(each.value_json) for each in items}

    for data in leveldb_records(file.read_bytes()):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found |= {"name": record.run.display_name, "project": record.run.project, "group": record.run.run_group}
            found |= {"tags": list(record.run.tags), "notes": record.run.notes}
            found["config"] |= values(record.run.config.update)
        elif kind == "artifact":
            found["files"] = sorted(each.path for each in record.artifact.manifest.contents)
        elif kind == "history":
            found["history"].append(values(record.history.item))
        elif kind == "summary":
            found["summary"] |= values(record.summary.update)
    return found


def leveldb_records(content, block=32768):
    """Records of a log: after a file header of 7 bytes, blocks of fragments of checksum, length, kind and data."""
    at, whole = 7, b""
    while at + 7 <= len(content):
        if block - at % block < 7:  # no room for another header: padding
            at += block - at % block
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in {1, 4}:  # all of it, or the last part
            yield whole
            whole = b""


def test_what_is_logged_twice_has_the_same_id_and_each_trial_its_own(result_of):
    first, second = study_of(result_of("tune")), study_of(result_of("tune", created_at="2027-01-01T00:00:00+00:00"))
    assert [run.id for run in first.runs] == [run.id for run in second.runs]
    assert len({run.id for run in first.runs}) == 7


def test_a_metric_is_named_so_that_every_tracker_takes_it(result_of):
    target = {"metric": "acc@1 (%)", "goal": "maximize", "value": 1.0}
    assert "acc_1____" in study_of(result_of("tune", target=target)).runs[1].points[0].seen


@pytest.mark.parametrize("name", ["probe", "estimate", "interrupted in its probe"])
def test_a_result_without_trials_is_refused(result_of, name):
    with pytest.raises(UsageError, match=r"--log-to logs the trials of a study, and this .* result has none"):
        log_to("mlflow", result_of(name))


@pytest.mark.parametrize("tracker", ["mlflow", "tensorboard", "wandb"])
def test_a_client_that_is_missing_is_named_with_the_command_that_installs_it(result_of, tracker, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == tracker]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(tracker), *sys.meta_path])
    with pytest.raises(UsageError, match=f"{tracker} is not installed; run: pip install {tracker}$"):
        log_to(tracker, result_of("tune"))


class Missing:
    """Finds one package missing, installed or not."""

    def __init__(self, name):
        self.name = name

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == self.name:
            raise ModuleNotFoundError(f"No module named {self.name!r}", name=self.name)


@needs("mlflow")
@theirs
def test_a_tracker_that_refuses_is_quoted_in_one_line(result_of, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://nowhere")
    with pytest.raises(UsageError, match=r"--log-to mlflow: .*nonsense") as refused:
        log_to("mlflow", result_of("tune"))
    assert "\n" not in str(refused.value)


def test_what_else_was_searched_and_spent_is_logged(result_of):
    trials = result_of("tune of energy").model_dump()["trials"]
    trials[1]["optimizer_arguments"] = {"weight_decay": 0.05, "precision": "high"}
    run = study_of(result_of("tune", trials=trials)).runs[1]
    assert (run.parameters["optimizer.weight_decay"], run.parameters["optimizer.precision"]) == (0.05, "high")
    assert run.parameters["precision"] == "bf16"
    assert run.figures["energy_to_target_joules"] == 4000.0


def test_a_result_without_a_date_is_refused_in_one_line(result_of):
    with pytest.raises(UsageError, match="--log-to dates runs by created_at, and 'yesterday' is no date"):
        log_to("mlflow", result_of("tune", created_at="yesterday"))


@needs("tensorboard")
@theirs
@pytest.mark.parametrize("name", ["../../outside", "/{}/outside", ".."])
def test_no_name_leads_out_of_the_folder_of_runs(result_of, name, tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    log_to("tensorboard", result_of("tune").model_copy(update={"name": name.format(tmp_path)}))
    assert [path.name for path in tmp_path.iterdir()] == ["work"]
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["runs"]
    (root,) = (tmp_path / "work" / "runs").iterdir()
    assert len(list(root.iterdir())) == 7
