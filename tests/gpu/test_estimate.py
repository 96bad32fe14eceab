"""The estimate against the memory that real steps take on the GPU, and as the start of a probe there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cuda.tasks import ESTIMATES, TRANSFORMER

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
GIB = 1 << 30
NAMES = [
    "MLP, AdamW",
    "MLP, bf16",
    "MLP, fused AdamW",
    "transformer",
    "transformer, bf16",
    "transformer, checkpointing",
    "transformer, untied, 2 micro-batches",
    "nn.TransformerEncoder",
    "ResNet",
    "ResNet, bf16",
    "transformer, reentrant checkpoints, fp16",
    "transformer, fused AdamW, tf32",
]


@pytest.mark.silicon
@pytest.mark.timeout(1800)
def test_peaks_are_estimated_within_eight_per_cent(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "estimate_allocator.py"), "--folder", str(tmp_path), "--only", *NAMES]
    subprocess.run(command, check=True)
    records = json.loads((tmp_path / "estimate_allocator.json").read_text())
    assert [record["case"] for record in records] == NAMES
    for record in records:
        estimated, measured = record["estimated"], record["measured"]
        for size, real in measured["peaks"].items():
            assert estimated["peaks"][size][:2] == pytest.approx(real, rel=0.08), record["case"]
        for guess, truth in zip(estimated["limits"], measured["limits"], strict=False):
            assert guess["safe_max_batch_size"] <= truth["max"], record["case"]


@ESTIMATES
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
