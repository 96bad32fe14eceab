"""The estimate against torch's own CUDA allocator, on a few cases of the benchmark: bytes, and the largest batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cuda.tasks import ESTIMATES

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "estimate_allocator.py"
CASES = ("MLP, AdamW", "transformer, bf16", "ResNet", "ResNet, bf16", "diffusion, bf16", "LSTM, packed, fp16")
pytestmark = [pytest.mark.timeout(600), ESTIMATES]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("allocator")
    own = {name: value for name, value in os.environ.items() if name != "FAKE_GPU"}  # its card is that of the table
    subprocess.run([sys.executable, BENCHMARK, "--fake", "--folder", folder, "--only", *CASES], check=True, env=own)
    found = json.loads((folder / "estimate_allocator.json").read_text())
    assert sorted(record["case"] for record in found if "measured" in record) == sorted(CASES)
    return found


def test_peaks_are_those_of_the_allocator(records):
    for record in records:
        for size, truth in record["measured"]["peaks"].items():
            guess = record["estimated"]["peaks"][size]
            assert guess[0] == truth[0], (record["case"], size)
            assert guess[1] == pytest.approx(truth[1], rel=0.01), (record["case"], size)


def test_the_largest_batch_trains_and_is_within_one_per_cent(records):
    for record in records:
        for guess, truth in zip(record["estimated"]["limits"], record["measured"]["limits"], strict=False):
            assert truth["trains_max"], record["case"]
            assert truth.get("trains_expandable", True), record["case"]
            assert guess["max_batch_size"] == pytest.approx(truth["max"], rel=0.01), record["case"]
            assert guess["safe_max_batch_size"] <= guess["max_batch_size"], record["case"]
