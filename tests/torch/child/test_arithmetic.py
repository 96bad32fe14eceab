"""How long a step takes, its floating-point operations, and gradient accumulation."""

import itertools
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from batchtune.child.attempt import attempt
from batchtune.child.timing import count_flops, flops_per_sample, time_steps
from batchtune.device._base import Peaks, stopwatch_on_the_wall
from batchtune.protocol.commands import CountFlops, TimeSteps, TryBatchSize
from batchtune.task.contract import Task


class FakeMemory:
    """A CPU without a limit."""

    device = torch.device("cpu")

    def peaks(self):
        return Peaks(None, None)

    def attempt(self, batch_size):
        return nullcontext()

    def reset_peaks(self):
        pass

    synchronize = release = reset_peaks

    def stopwatch(self):
        return stopwatch_on_the_wall(self.synchronize)


def linear_task(seen=None, seconds=(0,)):
    waits = itertools.cycle(seconds)

    def loss(model, batch):
        if seen is not None:
            seen.append(model.weight.grad is not None)
        time.sleep(next(waits))
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
    assert count_flops(lambda: model(batch).sum().backward()).total() == 2 * (2 * 4 * 16 * 8)


def test_attention_on_the_cpu_is_counted():
    query = torch.randn(1, 2, 32, 8, requires_grad=True)
    flops = count_flops(lambda: functional.scaled_dot_product_attention(query, query, query).sum().backward())
    forward = 2 * 2 * (2 * 32 * 32 * 8)
    assert flops.total() == forward + 2.5 * forward


def test_a_compiled_model_is_counted_like_the_plain_one():
    model, batch = nn.Linear(16, 8), torch.randn(4, 16)
    plain = count_flops(lambda: model(batch).sum().backward())
    compiled = torch.compile(model, backend="eager")
    compiled(batch)
    assert count_flops(lambda: compiled(batch).sum().backward()) == plain


@pytest.mark.parametrize("work", [lambda: 1 / 0, lambda: torch.ones(3) + 1])
def test_what_cannot_be_counted_is_absent(work):
    assert count_flops(work) is None


def test_a_sample_of_a_task_costs_what_its_layers_do():
    found = flops_per_sample(linear_task(), FakeMemory(), CountFlops(batch_size=4, precision="fp32"))
    assert found.per_sample == 2 * 2 * 16 * 8


def test_accumulated_gradients_are_there_from_the_second_micro_batch_on():
    seen = []
    command = TryBatchSize(batch_size=4, steps=2, precision="fp32", accumulation_steps=3)
    found = attempt(linear_task(seen), FakeMemory(), command).attempt
    assert (found.outcome, found.steps) == ("fit", 2)
    assert seen == [False, True, True] * 2


def test_samples_of_all_micro_batches_count_in_the_speed():
    command = TimeSteps(batch_size=4, precision="fp32", seconds=0.01, accumulation_steps=5)
    point = time_steps(linear_task(), FakeMemory(), command)
    assert point.samples_per_second == pytest.approx(20 / point.step_seconds)


def test_timing_ends_as_soon_as_a_step_is_known():
    began = time.perf_counter()
    point = time_steps(
        linear_task(seconds=[0.005]), FakeMemory(), TimeSteps(batch_size=4, precision="fp32", seconds=30.0)
    )
    assert 0.005 < point.step_seconds < 0.02
    assert time.perf_counter() - began < 15


@pytest.mark.parametrize(("others", "least", "most"), [(0.0, 0.03, 1.0), (0.5, 0.002, 0.02)])
def test_beside_other_programs_the_quickest_tenth_of_steps_tells_what_one_takes(monkeypatch, others, least, most):
    @contextmanager
    def watching(_together):
        yield SimpleNamespace(others=others)

    monkeypatch.setattr("batchtune.child.timing.watching_others", watching)
    monkeypatch.setattr("batchtune.child.timing.waited_seconds", lambda: 0.0)  # of the machine that tests run on
    command = TimeSteps(batch_size=4, precision="fp32", seconds=0.4)
    assert least < time_steps(linear_task(seconds=[0.002, 0.03, 0.03]), FakeMemory(), command).step_seconds < most
