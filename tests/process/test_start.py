"""What the command line loads when it starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import batchtune


@pytest.mark.parametrize("arguments", [["-c", "import batchtune.cli"], ["-m", "batchtune", "--help"]])
def test_the_command_line_starts_without_anything_heavy(arguments):
    command = [sys.executable, "-X", "importtime", *arguments]
    environment = os.environ | {"PYTHONPATH": str(Path(batchtune.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in loaded
    assert not loaded & {"torch", "optuna", "pandas", "plotly", "numpy", "pydantic"}
