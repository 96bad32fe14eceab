"""Probes of a few models on a fake card, against what a plain PyTorch loop trains there."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "probe_truth.py"

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="needs torch's CUDA build on the fake card")


def test_no_probe_answers_more_than_a_plain_loop_trains_or_a_percent_less():
    done = subprocess.run([sys.executable, SCRIPT, "--quick"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
