"""What only a CUDA GPU can show: the allocator's limit, real OOMs, and both recipes on the device."""

from pathlib import Path

import pytest
from cuda.tasks import TRANSFORMER

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


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


POISON = """
at_once = compute_loss

def compute_loss(model, batch):
    if len(batch) > 12:  # an index out of range on the device poisons its context
        torch.zeros(4, device=batch.device)[batch.flatten() + 100].sum().item()
    return at_once(model, batch)
"""


@pytest.mark.silicon
def test_a_size_that_poisons_the_context_is_an_outcome_and_the_next_ones_have_a_context_of_their_own(task):
    import batchtune

    task.write_text(task.read_text() + POISON)
    found = batchtune.probe(task, device="cuda", memory_limit=8 * GIB, tolerance=0, throughput=False).probe
    assert (found.max_batch_size, found.first_failing_batch_size) == (12, 13)
    assert found.limited_by in {"user_error", "kernel_limit"}  # torch calls it a device-side assert
    assert found.verified_in_fresh_process


def test_a_precision_that_fails_does_not_end_the_others(task):
    import batchtune

    refusing = "if not torch.is_autocast_enabled('cuda'): raise RuntimeError('only half precision here')"
    task.write_text(task.read_text() + POISON.replace("if len(batch) > 12:", f"{refusing}\n    if False:"))
    result = batchtune.probe(task, device="cuda", memory_limit=4 * GIB, precision="all", throughput=False)
    assert {probe.precision for probe in result.probes if probe.max_batch_size} == {"bf16", "fp16"}
    assert result.probe.precision in {"bf16", "fp16"}
    assert any(warning.startswith("fp32: ") for warning in result.warnings)


@pytest.mark.silicon
@pytest.mark.parametrize("recipe", ["digits", "charlm"])
def test_a_recipe_is_tuned_on_the_device(recipe, tmp_path):
    import batchtune

    config = ROOT / "recipes" / recipe / "config.yaml"
    result = batchtune.tune(config, overrides=["device=cuda"], run_folders=tmp_path)
    assert result.status == "complete"
    assert result.recommendation is not None
    assert "NVIDIA" in result.environment.device
