"""Both recipes, end to end and for real: the study they were made for, with a clear speed-up at the end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from batchtune.device.host_load import watching_others
from batchtune.result_file import load_result
from batchtune.results import result_schema

ROOT = Path(__file__).parents[1]
BUSY = 0.2  # share of the processors


def tuned(recipe, folder):
    """The document that the recipe's command prints."""
    output = folder / "result.json"
    config = ROOT / "recipes" / recipe / "config.yaml"
    command = [sys.executable, "-m", "batchtune", "tune", str(config), "--fresh", "--json", "-q", "-o", str(output)]
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
        result = tuned(recipe, tmp_path)
    assert result.status == "complete"
    if load.others is None or load.others < BUSY:  # else runs of a second or two are noise, and the report may say so
        assert result.recommendation.speedup_over_baseline.low > 1
    assert result.probe.verified_in_fresh_process
    sizes = {trial.micro_batch_size for trial in result.trials if trial.state == "complete"}
    assert result.recommendation.micro_batch_size in sizes
