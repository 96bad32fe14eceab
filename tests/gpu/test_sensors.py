"""What only a CUDA GPU can show of sensors, sharing, arithmetic and the data loader."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]

TASK = """
import torch
from torch import nn

class Data:
    def __len__(self): return 4096
    def __getitem__(self, index): return torch.randn(4096), index % 10

def build_model(): return {model}
def train_dataset(): return Data()
def compute_loss(model, batch): return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
PLAIN = "nn.Sequential(nn.Linear(4096, 8192), nn.ReLU(), nn.Linear(8192, 10))"
HOLDER = """
import torch
held = torch.empty(2**30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
input()
"""


@pytest.fixture
def task(tmp_path):
    def task(model=PLAIN):
        (tmp_path / "model.py").write_text(TASK.format(model=model))
        return tmp_path / "model.py"

    return task


@pytest.fixture
def somebody_else():
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_probe_reports_utilisation_memory_loader_and_free_memory(task):
    import batchtune

    result = batchtune.probe(task(), device="cuda", max=2048, precision="bf16")
    last = result.probe.throughput[-1]
    assert last.flops_per_sample == pytest.approx(2 * (2 * (4096 * 8192 + 8192 * 10)) + 2 * 8192 * 10)
    assert last.mfu is None or 0 < last.mfu < 1
    assert last.memory_used_bytes > 0
    assert last.throttle_reasons is not None
    assert result.probe.input_pipeline.loader_samples_per_second > 0
    assert any(point.pin_memory for point in result.probe.input_pipeline.measured)
    total = result.environment.device_memory_bytes
    moved = result.environment.device_memory_free_after_bytes - result.environment.device_memory_free_bytes
    assert abs(moved) < 0.01 * total


def test_a_look_before_the_first_context_does_not_see_ourselves(task):
    import batchtune

    before = batchtune.environment("cuda")["environment"]
    again = batchtune.environment("cuda")["environment"]
    assert before["other_processes"] == again["other_processes"]


def test_a_process_that_holds_memory_is_reported_with_what_it_holds(task, somebody_else):
    import batchtune

    result = batchtune.probe(task(), device="cuda", max=4, precision="bf16", throughput=False)
    held = [process.memory_bytes or 0 for process in result.environment.other_processes]
    assert max(held) >= 2**30
    assert any("other processes hold" in warning for warning in result.warnings)


@pytest.mark.silicon
def test_a_compiled_model_is_timed_without_compiling(task):
    import batchtune

    plain = batchtune.probe(task(), device="cuda", max=64, min=64, precision="bf16").probe.throughput[-1]
    compiled = task(f"torch.compile({PLAIN})")
    found = batchtune.probe(compiled, device="cuda", max=64, min=64, precision="bf16", timeout=300).probe
    assert found.throughput[-1].recompiles == 0
    assert found.throughput[-1].step_seconds < 3 * plain.step_seconds
    assert found.throughput[-1].flops_per_sample == plain.flops_per_sample
