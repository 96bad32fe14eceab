"""The recipes, end to end and for real: the study they were made for, with a clear speed-up at the end."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import optuna
import pytest

from batchtune.device.host_load import watching_others
from batchtune.result_file import load_result
from batchtune.results import result_schema

ROOT = Path(__file__).parents[1]
BUSY = 0.2  # share of the processors


def tuned(recipe, folder, *overrides):
    """The document that the recipe's command prints."""
    output = folder / "result.json"
    config = ROOT / "recipes" / recipe / "config.yaml"
    command = [sys.executable, "-m", "batchtune", "tune", str(config), *overrides]
    command += ["--fresh", "--json", "-q", "-o", str(output)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == output.read_text(encoding="utf-8")
    jsonschema.validate(json.loads(done.stdout), result_schema())
    return load_result(output)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", ["digits", "charlm"])
def test_a_recipe_finds_a_clear_speed_up_over_its_baseline(recipe, tmp_path):
    with watching_others() as load:
        result = tuned(recipe, tmp_path, "batch_size.max=64", "budget.trials=5", "confirm.seeds=2", "confirm.top=1")
    assert result.status == "complete"
    if load.others is None or load.others < BUSY:  # else runs of a second or two are noise, and the report may say so
        assert result.recommendation.speedup_over_baseline.low > 1
    assert result.probe.verified_in_fresh_process
    sizes = {trial.micro_batch_size for trial in result.trials if trial.state == "complete"}
    assert result.recommendation.micro_batch_size in sizes


@pytest.mark.timeout(300)
def test_the_sampler_and_pruner_serve_a_study_of_ones_own(tmp_path):
    script = ROOT / "recipes" / "optuna-sampler" / "study.py"
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    command = [sys.executable, str(script), "--trials", "8", "--storage", storage]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^best of 8: \d+\.\d+ s with \{'batch_size': \d+, ", done.stdout, re.MULTILINE)
    study = optuna.load_study(study_name="optuna-sampler", storage=storage)
    assert study.best_value <= (study.trials[0].value or 5.0)
    assert all("lower_bound" in t.user_attrs or "outcome" in t.user_attrs for t in study.trials if t.value is None)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("recipe", "metric"), [("lightning", "val_accuracy"), ("transformers", "eval_loss")])
def test_a_recipe_of_another_library_is_tuned_as_its_users_wrote_it(recipe, metric, tmp_path):
    if importlib.util.find_spec(recipe) is None:
        pytest.skip(f"{recipe} is not installed")
    assert "batchtune" not in (ROOT / "recipes" / recipe / "model.py").read_text(encoding="utf-8")
    budget = ("budget.run=1s", "budget.total=5m", "budget.trials=3", "batch_size.max=32")
    result = tuned(recipe, tmp_path, *budget, "confirm.seeds=2", "confirm.top=1")
    assert result.status == "complete"
    assert result.target.metric == metric
    assert result.probe.verified_in_fresh_process
    sizes = {trial.micro_batch_size for trial in result.trials if trial.state == "complete"}
    assert result.recommendation.micro_batch_size in sizes
