"""The estimate against torch's own CUDA allocator, on a few cases of the benchmark: bytes, and the largest batch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "estimate_allocator.py"
CASES = ("MLP, AdamW", "transformer, bf16", "ResNet")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("allocator")
    subprocess.run([sys.executable, BENCHMARK, "--fake", "--folder", folder, "--only", *CASES], check=True)
    found = json.loads((folder / "estimate_allocator.json").read_text())
    assert sorted(record["case"] for record in found if "measured" in record) == sorted(CASES)
    return found


@pytest.mark.parametrize(("place", "within"), [(0, 0.005), (1, 0.01)], ids=["allocated", "reserved"])
def test_peaks_are_those_of_the_allocator(records, place, within):
    for record in records:
        for size, truth in record["measured"]["peaks"].items():
            guess = record["estimated"]["peaks"][size]
            assert guess[place] == pytest.approx(truth[place], rel=within), (record["case"], size)


def test_the_largest_batch_is_within_one_per_cent_and_the_safe_one_fits(records):
    for record in records:
        for guess, truth in zip(record["estimated"]["limits"], record["measured"]["limits"], strict=False):
            assert guess["max_batch_size"] == pytest.approx(truth["max"], rel=0.01), record["case"]
            assert guess["safe_max_batch_size"] <= truth["max"], record["case"]
