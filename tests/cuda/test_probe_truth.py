"""Probes of a few models on a fake card, against what a plain PyTorch loop trains there."""

import subprocess
import sys
from pathlib import Path

import fake_gpu
import pytest
import torch

from batchtune.processes.worker import Worker
from batchtune.protocol.commands import OpenTask, TryBatchSize

MiB = 2**20
ISLAND = """
import torch
from torch import nn

class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, batch):
        ctx.save_for_backward(weight, torch.empty(len(batch) * 2**20, dtype=torch.uint8, device="cuda"))
        return torch.zeros((), device="cuda")

    @staticmethod
    def backward(ctx, gradient):
        return torch.empty_like(ctx.saved_tensors[0]), None

def build_model():
    return nn.ParameterList([torch.zeros(200 * 2**18)])

def build_optimizer(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr, fused=True)

def make_batch(batch_size):
    return torch.zeros(batch_size, 2**20 // 10, dtype=torch.uint8)

def compute_loss(model, batch):
    return Keeps.apply(model[0], batch)
"""

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "probe_truth.py"

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="needs torch's CUDA build on the fake card")


def test_no_probe_answers_more_than_a_plain_loop_trains_or_a_percent_less():
    done = subprocess.run([sys.executable, SCRIPT, "--quick"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def island(tmp_path):
    """Tries a size of a task, as in a search or in a final check: outcome and steps, and what the child says of itself.

    At 250 a batch takes its place in the block of a gradient that is gone, which is then too small for the next
    gradient. Where the gradient is still there, the batch is put where it is in nobody's way, and stays there.
    """
    (tmp_path / "model.py").write_text(ISLAND)
    settings = OpenTask(task=str(tmp_path / "model.py"), device="cuda", precision=("fp32",), memory_limit=760 * MiB)

    def tried(size, *, verify=True):
        command = TryBatchSize(batch_size=size, steps=20 if verify else 3, precision="fp32", verify=verify)
        with fake_gpu.machine(fake_gpu.Card("4GiB")), Worker(settings) as worker:
            opened, done = worker.start(), worker.call(command, timeout=60.0).attempt
        return done.outcome, done.steps, opened.environment.allocator_conf

    return tried


def test_a_size_that_trains_only_where_gradients_are_freed_late_is_no_answer(island):
    assert island(250, verify=False) == ("fit", 9, None)
    assert island(250) == ("oom", 1, None)
    assert island(150) == ("fit", 20, None)


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_it_is_one_with_the_users_own_settings_of_the_allocator_which_are_told(island, monkeypatch, variable):
    monkeypatch.setenv(variable, "expandable_segments:True")
    assert island(250) == ("fit", 20, "expandable_segments:True")
