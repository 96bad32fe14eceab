"""What the shells' completion scripts get from the command: the protocol of bash, zsh and fish."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def proposed(folder, typed, shell="bash"):
    """What a shell is told that may follow; the last word is the one being typed."""
    asked = {"_BATCHTUNE_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": typed}
    asked |= {
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split(" ")) - 1),
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    script = "import sys; sys.argv = ['batchtune']; from batchtune.__main__ import main; main()"
    environment = os.environ | asked | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.fixture
def folder(tmp_path):
    for name in ("digits", "charlm", "probe-model"):
        (tmp_path / ".batchtune" / name).mkdir(parents=True)
        (tmp_path / ".batchtune" / name / "result.json").write_text("{}")
    (tmp_path / ".batchtune" / "running").mkdir()  # no result yet
    return tmp_path


def test_report_proposes_the_runs_that_have_a_result(folder):
    assert proposed(folder, "batchtune report ") == ["charlm", "digits", "probe-model"]
    assert proposed(folder, "batchtune report --against d", "fish") == ["digits"]


def test_estimate_proposes_gpus_that_it_then_finds(folder):
    from batchtune.device.gpus import find_gpu

    names = proposed(folder, "batchtune estimate model.py --gpu rtx-30")
    assert len(names) > 1
    assert [name for name in names if not find_gpu(name).name.startswith("RTX 30")] == []
    assert '"A100-80GB-PCIe"' in " ".join(proposed(folder, "batchtune estimate model.py --gpu A100-8", "zsh"))


def test_tune_proposes_keys_that_have_a_value(folder):
    assert proposed(folder, "batchtune tune config.yaml budget.") == ["budget.run=", "budget.total=", "budget.trials="]
    assert "batch_size=" not in proposed(folder, "batchtune tune config.yaml b")
