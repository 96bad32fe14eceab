"""Floating-point operations of a step, the share of a device's peak they are, and gradient accumulation."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from batchtune.device.gpus import peak_flops
from batchtune.device.memory import Peaks
from batchtune.task.contract import Task
from batchtune.train.attempt import attempt
from batchtune.train.flops import count_flops
from batchtune.train.timing import arithmetic, time_steps


class FakeMemory:
    """A device of this name, on the CPU; it counts how often a phase was looked at."""

    def __init__(self, name="a CPU", kind="cpu"):
        self.name, self.device, self.looks = name, torch.device(kind), 0

    def describe(self):
        return self.name, None, None

    def peaks(self):
        self.looks += 1
        return Peaks(None, None)

    def reset_peaks(self):
        pass

    synchronize = release = reset_peaks


def linear_task(seen=None):
    def loss(model, batch):
        if seen is not None:
            seen.append(model.weight.grad is not None)
        return model(batch).sum()

    return Task(
        SimpleNamespace(
            build_model=lambda: nn.Linear(16, 8),
            make_batch=lambda batch_size: torch.randn(batch_size, 16),
            compute_loss=loss,
        ),
        "model.py",
    )


def test_a_linear_layer_costs_two_operations_a_weight_forward_and_as_many_for_its_gradient():
    model, batch = nn.Linear(16, 8), torch.randn(4, 16)
    assert count_flops(lambda: model(batch).sum().backward()) == 2 * (2 * 4 * 16 * 8)


def test_attention_on_the_cpu_is_counted():
    query = torch.randn(1, 2, 32, 8, requires_grad=True)
    flops = count_flops(lambda: functional.scaled_dot_product_attention(query, query, query).sum().backward())
    forward = 2 * 2 * (2 * 32 * 32 * 8)
    assert flops == forward + 2.5 * forward


def test_a_compiled_model_is_counted_like_the_plain_one():
    model, batch = nn.Linear(16, 8), torch.randn(4, 16)
    plain = count_flops(lambda: model(batch).sum().backward())
    compiled = torch.compile(model, backend="eager")
    compiled(batch)
    assert count_flops(lambda: compiled(batch).sum().backward()) == plain


@pytest.mark.parametrize("work", [lambda: 1 / 0, lambda: torch.ones(3) + 1])
def test_what_cannot_be_counted_is_absent(work):
    assert count_flops(work) is None


def test_a_timed_size_has_its_operations_but_no_utilisation_on_a_cpu():
    point = time_steps(linear_task(), FakeMemory(), batch_size=4, precision="fp32", seconds=0.01)
    assert point.flops_per_sample == 2 * 2 * 16 * 8
    assert point.mfu is None


def test_utilisation_is_the_share_of_the_peak_at_that_precision():
    name = "NVIDIA A100-SXM4-80GB"
    found = arithmetic(FakeMemory(name, "cuda"), "bf16", 1e9, 1000.0)
    assert found["mfu"] == pytest.approx(1e12 / peak_flops(name, "bf16"))
    assert found["mfu"] < arithmetic(FakeMemory(name, "cuda"), "fp32", 1e9, 1000.0)["mfu"]


def test_a_part_nobody_knows_has_no_utilisation():
    assert "mfu" not in arithmetic(FakeMemory("NVIDIA X9000", "cuda"), "bf16", 1e9, 1000.0)


def test_accumulated_gradients_are_there_from_the_second_micro_batch_on():
    seen = []
    found, _ = attempt(linear_task(seen), FakeMemory(), batch_size=4, steps=2, precision="fp32", accumulation_steps=3)
    assert (found.outcome, found.steps) == ("fit", 2)
    assert seen == [False, True, True] * 2


def test_samples_of_all_micro_batches_count_in_the_speed():
    point = time_steps(linear_task(), FakeMemory(), batch_size=4, precision="fp32", seconds=0.01, accumulation_steps=5)
    assert point.samples_per_second == pytest.approx(20 / point.step_seconds)
