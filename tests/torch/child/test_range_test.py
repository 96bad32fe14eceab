"""The range test: where a rising learning rate makes training come apart."""

import math
import time

import pytest
import torch

from batchtune.child.before_study import Edge, range_test
from batchtune.protocol.commands import RunRangeTest


def edge_of(losses):
    """How many losses it takes until training is said to have come apart; None: never."""
    edge = Edge()
    return next((number for number, loss in enumerate(losses) if edge.is_past(loss, float(number))), None)


FALLING = [2.0] * 10 + [2.0 * 0.95**step for step in range(40)]


def test_a_loss_that_falls_or_stays_has_no_edge():
    assert edge_of(FALLING) is None
    assert edge_of([2.0] * 60) is None


def test_a_loss_that_shoots_up_is_past_the_edge_within_a_few_steps():
    assert len(FALLING) <= edge_of([*FALLING, *(3.0 * 2**step for step in range(20))]) <= len(FALLING) + 4


def test_a_loss_that_is_no_number_is_past_the_edge_at_once():
    assert edge_of([*FALLING, math.nan]) == len(FALLING)


def test_one_odd_batch_is_no_edge():
    assert edge_of([*FALLING, 1.5, *FALLING[-5:]]) is None


def test_noise_far_below_the_start_is_no_edge():
    assert edge_of([*FALLING, *[0.3, 0.7] * 20]) is None


def test_losses_below_zero_are_judged_by_the_start():
    assert edge_of([-1.0] * 10 + [-2.0] * 10 + [-1.5] * 10) is None
    assert edge_of([-1.0] * 10 + [-2.0] * 10 + [1.0] * 10) is not None


@pytest.mark.parametrize("offset", [0.0, -0.85, -0.9, -1.0, -5.0])
def test_noise_at_the_start_is_no_edge_whatever_the_loss_counts_from(offset):
    start = [0.9 + 0.05 * math.sin(7 * step) + offset for step in range(15)]
    learned = [0.9 - 0.8 * step / 20 + offset for step in range(20)]
    apart = [*start, *learned, *(0.1 + offset + 0.3 * step for step in range(15))]
    assert edge_of([*start, *learned]) is None
    assert len(start) + len(learned) < edge_of(apart) < len(apart)


class Slow:
    """A clock on which every look takes a second."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1
        return self.now


def run(task, device, clock=time.perf_counter, **changes):
    usual = {
        "batch_size": 8,
        "precision": "fp32",
        "lowest_rate": 1e-3,
        "highest_rate": 10.0,
        "steps": 80,
        "seconds": 60.0,
    }
    return range_test(task, device(), RunRangeTest(**usual | changes), clock)


@pytest.mark.parametrize("curvature", [1.0, 10.0])
def test_gradient_descent_comes_apart_soon_after_two_over_the_curvature(linear_task, fake_device, curvature):
    def build_model():
        torch.manual_seed(0)
        return torch.nn.Linear(1, 1, bias=False)

    def compute_loss(model, batch):
        target = 3 + 0.5 * torch.randn(1, 1)  # or the weight would meet it to the last bit, and never leave it again
        return 0.5 * curvature * (model(torch.ones(1, 1)) - target).square().mean()

    found = run(linear_task(build_model=build_model, compute_loss=compute_loss), fake_device)
    assert 0.5 / curvature < found.lowest_loss_learning_rate < found.edge_learning_rate
    assert 2 / curvature <= found.edge_learning_rate <= 4 * 2 / curvature
    assert found.highest_learning_rate == pytest.approx(found.edge_learning_rate)
    assert found.steps < 80


def test_what_stays_stable_has_no_edge_and_says_how_far_it_was_tried(linear_task, fake_device):
    found = run(linear_task(), fake_device, highest_rate=1e-2)
    assert found.edge_learning_rate is None
    assert found.highest_learning_rate == pytest.approx(1e-2)
    assert found.steps == 80


def test_the_rates_of_all_groups_rise_together(linear_task, fake_device):
    made = []

    def build_optimizer(model, lr):
        groups = [{"params": [model.weight], "lr": lr}, {"params": [model.bias], "lr": 0.1 * lr}]
        made.append(torch.optim.SGD(groups, lr=lr))
        return made[-1]

    run(linear_task(build_optimizer=build_optimizer), fake_device, highest_rate=1e-2)
    first, second = (group["lr"] for group in made[-1].param_groups)
    assert second == pytest.approx(0.1 * first)
    assert first == pytest.approx(1e-2, rel=0.1)


CURVATURES = {"steep": 10.0, "flat": 0.001}


def two_weights():
    torch.manual_seed(0)
    return {name: torch.nn.Linear(1, 1, bias=False) for name in CURVATURES}


def an_optimizer_each(model, lr):
    return {name: torch.optim.SGD(module.parameters(), lr=lr) for name, module in model.items()}


def one_after_another(*order, every=None):
    """A step that descends on each weight's parabola in turn and returns the last one's loss, as GANs do."""
    every, taken = every or {}, []

    def train_step(model, batch, optimizers, context):
        taken.append(None)
        for name in order:
            if len(taken) % every.get(name, 1):
                continue
            target = 3 + 0.1 * torch.randn(1, 1)
            loss = 0.5 * CURVATURES[name] * (model[name](torch.ones(1, 1)) - target).square().mean()
            context.backward(loss, optimizers[name])
            context.step(optimizers[name])
        return loss

    return {"build_model": two_weights, "build_optimizer": an_optimizer_each, "train_step": train_step}


@pytest.mark.parametrize("order", [("steep", "flat"), ("flat", "steep")])
def test_of_several_losses_none_hides_another(order, linear_task, fake_device):
    found = run(linear_task(**one_after_another(*order)), fake_device)
    assert found.losses == 2
    assert 0.05 < found.lowest_loss_learning_rate < found.edge_learning_rate
    assert 0.2 <= found.edge_learning_rate <= 0.8


def test_a_critic_that_steps_more_often_than_its_actor_is_watched_apart_from_it(linear_task, fake_device):
    found = run(linear_task(**one_after_another("steep", "flat", every={"steep": 2})), fake_device)
    assert found.losses == 2
    assert 0.2 <= found.edge_learning_rate <= 1.6


def test_losses_of_which_none_has_learned_tell_no_rate(linear_task, fake_device):
    found = run(linear_task(**one_after_another("steep", "flat")), fake_device, lowest_rate=1e-6, highest_rate=1e-5)
    assert (found.losses, found.lowest_loss_learning_rate, found.edge_learning_rate) == (2, None, None)


def test_a_loss_that_is_no_number_ends_it_although_the_returned_one_is(linear_task, fake_device):
    parts = one_after_another("steep", "flat")

    def train_step(model, batch, optimizers, context):
        context.backward(math.nan * model["steep"](torch.ones(1, 1)).mean(), optimizers["steep"])
        context.step(optimizers["steep"])
        loss = model["flat"](torch.ones(1, 1)).square().mean()
        context.backward(loss, optimizers["flat"])
        context.step(optimizers["flat"])
        return loss

    found = run(linear_task(**parts | {"train_step": train_step}), fake_device)
    assert (found.steps, found.losses, found.edge_learning_rate) == (1, 2, 1e-3)


def test_two_optimizers_that_one_loss_trains_have_one_loss(linear_task, fake_device):
    def train_step(model, batch, optimizers, context):
        loss = sum(module(torch.ones(1, 1)).square().mean() for module in model.values())
        context.backward(loss)
        for each in optimizers.values():
            context.step(each)
        return loss

    parts = one_after_another("steep", "flat") | {"train_step": train_step}
    assert run(linear_task(**parts), fake_device).losses == 1


def test_it_ends_when_its_time_is_over(linear_task, fake_device):
    assert run(linear_task(), fake_device, highest_rate=1e-2, seconds=10.0, clock=Slow()).steps <= 11
