"""How slow a rank is by itself, and which one all the others wait for."""

import itertools
import time

import pytest
import torch
from fixtures.training import FakeDevice, linear_task
from torch import nn

from batchtune.child.ranks.parallel import own_seconds, straggler
from batchtune.child.trainer import Trainer

SLEEP_SECONDS = 0.02


class Sleepy(nn.Linear):
    def forward(self, points):
        time.sleep(SLEEP_SECONDS)
        return super().forward(points)


def own(model, batches, compute_loss=None):
    """What is the rank's own; before each block it waits for the others, as for their shards."""
    for block in model.children():
        block.register_forward_pre_hook(lambda *_: time.sleep(SLEEP_SECONDS))
    more = {"compute_loss": compute_loss} if compute_loss else {}
    trainer = Trainer(linear_task(build_model=lambda: model, **more), torch.device("cpu"), "fp32")
    waits = sum(len(each._forward_pre_hooks) for each in model.modules())
    found = own_seconds(trainer.model, trainer.loss_alone, batches, FakeDevice().synchronize)
    assert sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()) == waits
    return found


def batches(seconds=0.0):
    for _ in itertools.count():
        time.sleep(seconds)
        yield torch.ones(4, 4), torch.ones(4, 1)


def test_loading_and_computing_are_a_ranks_own_and_waiting_for_others_is_not():
    assert own(nn.Sequential(nn.Linear(4, 1)), batches()) < SLEEP_SECONDS / 2
    assert SLEEP_SECONDS <= own(nn.Linear(4, 1), batches(SLEEP_SECONDS)) < 2 * SLEEP_SECONDS
    assert 2 * SLEEP_SECONDS <= own(nn.Sequential(Sleepy(4, 1)), batches(SLEEP_SECONDS)) < 3 * SLEEP_SECONDS


@pytest.mark.parametrize("part", ["all of it", "a part"])
def test_so_is_what_the_loss_does_besides_calling_the_model(part):
    def compute_loss(model, batch):
        time.sleep(SLEEP_SECONDS)
        found = (model if part == "all of it" else model[0])(batch[0])
        time.sleep(SLEEP_SECONDS)
        return (found - batch[1]).square().mean()

    assert 3 * SLEEP_SECONDS <= own(nn.Sequential(Sleepy(4, 1)), batches(), compute_loss) < 4 * SLEEP_SECONDS


def test_of_a_compiled_model_only_loading_is_timed():
    compiled = nn.Sequential(Sleepy(4, 1))
    compiled._compiled_call_impl = compiled._call_impl  # what Module.compile leaves
    assert own(compiled, batches()) < SLEEP_SECONDS / 2


@pytest.mark.parametrize(
    ("seconds", "found"),
    [
        ([0.01, 0.05], (1, 5.0)),
        ([0.05, 0.01, 0.01, 0.02], (0, 5.0)),
        ([0.01, 0.025], None),
        ([0.0001, 0.0005], None),  # what other programs on the machine may do, too
        ([0.0, 0.0], None),
    ],
)
def test_the_one_that_takes_much_longer_is_named(seconds, found):
    assert straggler(seconds) == (found and (found[0], pytest.approx(found[1])))
