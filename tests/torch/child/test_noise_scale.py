"""The gradient noise scale, on gradients whose noise is known."""

import math
import random
import time

import pytest
import torch

from batchtune.child.before_study import estimate, noise_scale
from batchtune.protocol.commands import MeasureNoiseScale

SMALL, LARGE = 8, 128


def pairs(signal, noise, draws, *, seed=0, small_draws=4):
    """Squared norms of means of gradients in 50 dimensions with |G|^2 = signal and tr(S) = noise."""
    dice, size = random.Random(seed), 50

    def norm(batch):
        spread = math.sqrt(noise / size / batch)
        return sum((math.sqrt(signal / size) + dice.gauss(0, spread)) ** 2 for _ in range(size))

    return [(sum(norm(SMALL) for _ in range(small_draws)) / small_draws, norm(LARGE)) for _ in range(draws)]


@pytest.mark.parametrize("truth", [5.0, 50.0, 500.0])
def test_the_noise_scale_is_the_noise_over_the_squared_gradient(truth):
    found, low, high = estimate(pairs(1.0, truth, 200), SMALL, LARGE)
    assert found == pytest.approx(truth, rel=0.15)
    assert low <= truth <= high


def test_its_interval_holds_the_truth_about_as_often_as_it_says():
    held = 0
    for seed in range(60):
        _, low, high = estimate(pairs(1.0, 40.0, 12, seed=seed), SMALL, LARGE)
        held += low <= 40 and (high is None or high >= 40)
    assert held >= 45  # 90 % of 60, less what twelve draws and chance take


def test_gradients_without_noise_have_no_noise_scale():
    assert estimate([(1.0, 1.0)] * 8, SMALL, LARGE) == (None, None, None)


def test_gradients_of_nothing_but_noise_have_none_either():
    only_noise = [(1.0 / SMALL, 1.0 / LARGE * 0.99)] * 8
    assert estimate(only_noise, SMALL, LARGE) == (None, None, None)


def test_where_noise_may_be_all_there_is_the_upper_bound_is_open():
    found, low, high = estimate(pairs(1.0, 5000.0, 6, seed=3), SMALL, LARGE)
    assert found is not None
    assert low > 100
    assert high is None


def test_few_draws_say_nothing():
    assert estimate(pairs(1.0, 40.0, 3), SMALL, LARGE) == (None, None, None)


def measured(task, device, clock=time.perf_counter, **changes):
    usual = {
        "small": 4,
        "large": 32,
        "precision": "fp32",
        "learning_rate": 1e-3,
        "warm_up_steps": 5,
        "draws": 20,
        "seconds": 60.0,
    }
    return noise_scale(task, device(), MeasureNoiseScale(**usual | changes), clock)


def test_a_task_has_the_noise_scale_that_its_samples_gradients_have(linear_task, fake_device):
    """One weight at zero whose gradients are the samples: mean 1, variance 9."""
    samples = 1 + 3 * torch.randn(4096, generator=torch.Generator().manual_seed(0))

    def build_model():
        return torch.nn.Linear(1, 1, bias=False)

    task = linear_task(
        build_model=build_model,
        train_dataset=lambda: torch.utils.data.TensorDataset(samples[:, None]),
        compute_loss=lambda model, batch: model(batch[0]).mean(),
    )
    found = measured(task, fake_device, draws=200, small=2, large=64)
    assert found.samples == pytest.approx(9, rel=0.4)
    assert found.low <= 9 <= found.high
    assert found.batch_sizes == [2, 64]


def test_measuring_moves_no_weight(linear_task, fake_device):
    made = []

    def build_model():
        made.append(torch.nn.Linear(4, 1))
        return made[-1]

    measured(linear_task(build_model=build_model), fake_device, warm_up_steps=0, draws=4)
    torch.manual_seed(0)
    assert torch.equal(made[-1].weight, torch.nn.Linear(4, 1).weight)


def test_it_ends_when_its_time_is_over(linear_task, fake_device):
    times = iter(range(10_000))
    assert measured(linear_task(), fake_device, draws=10_000, seconds=12.0, clock=lambda: next(times)).draws < 12
