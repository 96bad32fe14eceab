"""What only a CUDA GPU can show: the allocator's limit, real OOMs, and both recipes on the device."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]

ROOT = Path(__file__).parents[2]
GIB = 1 << 30

TRANSFORMER = """
import torch
from torch import nn

def build_model():
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    return nn.Sequential(nn.Embedding(5000, 512), nn.TransformerEncoder(layer, 6), nn.Linear(512, 5000))

def make_batch(batch_size):
    return torch.randint(0, 5000, (batch_size, 256))

def compute_loss(model, batch):
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
"""


@pytest.fixture
def task(tmp_path):
    file = tmp_path / "model.py"
    file.write_text(TRANSFORMER)
    return file


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "tf32"])
def test_the_answer_is_proven_from_both_sides_within_the_limit(task, precision):
    import batchtune

    found = batchtune.probe(task, device="cuda", memory_limit=6 * GIB, precision=precision, throughput=False).probe
    assert found.limited_by == "memory"
    assert found.verified_in_fresh_process
    assert found.peak_allocated_bytes <= found.peak_reserved_bytes <= 6 * GIB
    assert found.first_failing_batch_size <= 1.011 * found.max_batch_size + 1
    assert {attempt.outcome for attempt in found.attempts} == {"fit", "oom"}


def test_an_exact_answer_trains_and_one_more_sample_does_not(task):
    import batchtune

    found = batchtune.probe(task, device="cuda", memory_limit=4 * GIB, tolerance=0, throughput=False).probe
    assert found.first_failing_batch_size == found.max_batch_size + 1


def test_the_parent_never_touches_the_device_and_memory_is_given_back(task):
    import batchtune

    before = torch.cuda.mem_get_info()[0]
    batchtune.probe(task, device="cuda", memory_limit=4 * GIB, throughput=False)
    assert torch.cuda.mem_get_info()[0] >= before - (64 << 20)


def test_sensors_are_read_while_steps_are_timed(task):
    import batchtune

    points = batchtune.probe(task, device="cuda", memory_limit=8 * GIB).probe.throughput
    assert all(point.power_watts and point.joules_per_sample and point.gpu_utilization is not None for point in points)


@pytest.mark.parametrize("recipe", ["digits", "charlm"])
def test_a_recipe_is_tuned_on_the_device(recipe, tmp_path):
    import batchtune

    config = ROOT / "recipes" / recipe / "config.yaml"
    result = batchtune.tune(config, overrides=["device=cuda"], run_folders=tmp_path)
    assert result.status == "complete"
    assert result.recommendation is not None
    assert "NVIDIA" in result.environment.device
