"""Forward passes as an attempt and a timing take them, in this process, on a device that runs out of memory."""

import pytest
import torch
from torch import nn

from batchtune.child.attempt import attempt
from batchtune.child.timing import flops_per_sample, time_steps
from batchtune.errors import UserCodeError
from batchtune.protocol.commands import CountFlops, TimeSteps, TryBatchSize

WIDTH = 256
SAMPLE_BYTES = WIDTH * 4


@pytest.fixture
def deep(linear_task):
    """A task whose layers keep what they computed for backward; training needs an optimizer that raises."""

    def make(purpose="inference", **functions):
        usual = {
            "build_model": lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))),
            "make_batch": lambda batch_size: torch.ones(batch_size, WIDTH),
            "compute_loss": lambda model, batch: model(batch).square().mean(),
            "build_optimizer": None if purpose == "probe" else lambda model, lr: 1 / 0,
            "train_dataset": None,
            "val_dataset": None,
        }
        task = linear_task(**usual | functions)
        task.require(purpose)
        return task

    return make


@pytest.fixture
def tried(fake_device):
    def on_device(task, batch_size=8, *, limit=None, **command):
        with fake_device(limit) as device:
            command = TryBatchSize(**{"batch_size": batch_size, "steps": 3, "precision": "fp32"} | command)
            return attempt(task, device, command).attempt

    return on_device


@pytest.mark.parametrize("verify", [False, True])
def test_an_attempt_is_forward_passes_in_eval_mode_without_gradients_and_nothing_else(tried, deep, verify):
    seen = []

    def compute_loss(model, batch):
        seen.append((model.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return model(batch).square().mean()

    task = deep(compute_loss=compute_loss, evaluate=lambda model: 1 / 0)
    found = tried(task, steps=5, verify=verify)
    assert (found.outcome, found.steps, found.purpose) == ("fit", 5, "verify" if verify else "search")
    assert seen == [(False, False, True)] * 5
    assert found.step_seconds > 0


def test_it_takes_what_a_layer_makes_and_not_what_backward_would_need_of_all(tried, deep):
    inference, training = tried(deep(), 4000), tried(deep("probe"), 4000)
    assert 2 * 4000 * SAMPLE_BYTES < inference.peak_allocated_bytes < 4.5 * 4000 * SAMPLE_BYTES
    assert training.peak_allocated_bytes > 2 * inference.peak_allocated_bytes
    limit = 2 * inference.peak_allocated_bytes
    assert [tried(task, 4000, limit=limit).outcome for task in (deep(), deep("probe"))] == ["fit", "oom"]


def test_out_of_memory_is_an_outcome(tried, deep):
    found = tried(deep(), 4000, limit=2 * 4000 * SAMPLE_BYTES)
    assert (found.outcome, found.steps) == ("oom", 0)


def test_it_computes_at_the_precision_asked_for(tried, deep):
    types = []
    task = deep(compute_loss=lambda model, batch: types.append(model(batch).dtype) or torch.zeros(()))
    assert tried(task, precision="bf16").fits
    assert set(types) == {torch.bfloat16}


def test_what_the_users_code_raises_is_told_as_such(tried, deep):
    found = tried(deep(compute_loss=lambda model, batch: model(batch).nothing))
    assert (found.outcome, "nothing" in found.message) == ("user_error", True)


def test_passes_are_timed_and_their_operations_counted(fake_device, deep):
    calls = []
    task = deep(compute_loss=lambda model, batch: calls.append(torch.is_grad_enabled()) or model(batch).sum())
    with fake_device() as device:
        point = time_steps(task, device, TimeSteps(batch_size=8, precision="fp32", seconds=0.01))
    assert (point.batch_size, set(calls)) == (8, {False})
    assert point.samples_per_second == pytest.approx(8 / point.step_seconds)
    with fake_device() as device:
        flops = flops_per_sample(deep(), device, CountFlops(batch_size=8, precision="fp32")).per_sample
    assert flops == 2 * 8 * WIDTH**2


def test_a_task_with_a_step_of_its_own_needs_the_forward_pass_named(deep):
    with pytest.raises(UserCodeError, match=r"no compute_loss\(model, batch\)"):
        deep(compute_loss=None, train_step=lambda model, batch, optimizers, context: None)
