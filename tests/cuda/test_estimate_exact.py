"""The estimate against torch's own CUDA allocator: bytes allocated and reserved, and the largest batch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here, nor a fake one")
BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "estimate_allocator.py"


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("allocator")
    subprocess.run([sys.executable, str(BENCHMARK), "--quick", "--folder", str(folder)], check=True)
    return json.loads((folder / "estimate_allocator.json").read_text())


@pytest.mark.timeout(600)
def test_a_dozen_cases_are_measured(records):
    assert [record["case"] for record in records if "measured" not in record] == []
    assert len(records) == 12


@pytest.mark.timeout(600)
def test_allocated_bytes_are_exact(records):
    off = {}
    for record in records:
        for size, (allocated, _) in record["measured"]["peaks"].items():
            if record["estimated"]["peaks"][size][0] != allocated:
                off[record["case"], size] = record["estimated"]["peaks"][size][0] - allocated, record["difference"]
    assert off == {}


@pytest.mark.timeout(600)
def test_reserved_bytes_are_within_one_per_cent(records):
    for record in records:
        for size, (_, reserved) in record["measured"]["peaks"].items():
            assert record["estimated"]["peaks"][size][1] == pytest.approx(reserved, rel=0.01), (record["case"], size)


@pytest.mark.timeout(600)
def test_the_largest_batch_fits_and_is_within_one_per_cent(records):
    for record in records:
        limits = zip(record["estimated"]["limits"], record["measured"]["limits"], strict=False)
        for guess, truth in limits:
            largest, real = guess["max_batch_size"], truth["max"]
            assert guess["safe_max_batch_size"] <= largest <= real, record["case"]
            assert largest >= real - max(1, 0.01 * real), record["case"]
