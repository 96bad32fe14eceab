"""The estimate against the memory that real steps take on the GPU, and as the start of a probe there."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
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
NAMES = [
    "MLP, AdamW",
    "MLP, bf16",
    "MLP, fused AdamW",
    "transformer",
    "transformer, bf16",
    "transformer, fp16",
    "transformer, checkpointing",
    "transformer, bf16, SGD",
    "transformer, untied, 2 micro-batches",
    "nn.TransformerEncoder",
    "ResNet",
    "ResNet, bf16",
]


@pytest.mark.silicon
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.timeout(600)
def test_peaks_are_estimated_within_eight_per_cent(name, monkeypatch):
    from batchtune.device.gpus import find_gpu

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import estimate_gpu

    case = next(case for case in estimate_gpu.CASES if case.name == name)
    rows = estimate_gpu.errors(case, find_gpu(torch.cuda.get_device_name(0)).generation)
    assert len(rows) == len(estimate_gpu.BATCH_SIZES)
    for row in rows:
        assert abs(row["allocated_error"]) < 0.08, row
        assert abs(row["reserved_error"]) < 0.08, row
        assert row["safe_fits"], row


@pytest.mark.timeout(600)
def test_a_probe_starts_from_its_estimate_and_calibrates_the_next(tmp_path, monkeypatch):
    import batchtune
    from batchtune.device.gpus import find_gpu
    from batchtune.estimate.calibration import offsets_of

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    task = tmp_path / "model.py"
    task.write_text(TRANSFORMER)
    found = batchtune.probe(task, device="cuda", memory_limit=8 * GIB, precision="bf16", throughput=False).probe
    searched = [each for each in found.attempts if each.purpose == "search"]
    assert searched[0].batch_size > 0.5 * found.max_batch_size
    assert len(searched) <= 8
    assert offsets_of(find_gpu(torch.cuda.get_device_name(0)).name).probes > 0
    gpu = torch.cuda.get_device_name(0)
    (again,) = batchtune.estimate(task, gpus=gpu, precision="bf16", memory_limit=8 * GIB).estimates
    assert again.max_batch_size == pytest.approx(found.max_batch_size, rel=0.08)
    assert "calibrated" in again.confidence
