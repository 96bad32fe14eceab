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


@pytest.mark.parametrize("module", ["batchtune.api", "batchtune.sampling.sampler", "typer"])
def test_ctrl_c_at_any_moment_of_the_start_ends_without_a_traceback(tmp_path, module):
    script = tmp_path / "batchtune"
    lines = [
        "import os, signal, sys",
        "signal.signal(signal.SIGINT, signal.default_int_handler)",  # which a background job ignores otherwise
        f"said = ('import', {module!r})",
        "hook = lambda event, given: said == (event, *given[:1]) and os.kill(os.getpid(), signal.SIGINT)",
        "sys.addaudithook(hook)",
        "from batchtune.__main__ import main",
        "main()",
    ]
    script.write_text("\n".join(lines))
    environment = os.environ | {"PYTHONPATH": str(Path(batchtune.__file__).parents[1])}
    how = {"env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, script, "env"], check=False, **how)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
