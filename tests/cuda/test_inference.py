"""The largest batch of inference on a card, against a plain evaluation loop there, and its estimate."""

import json

import fake_gpu
import pytest
from cuda.tasks import ESTIMATES, PERCEPTRON

import batchtune

GiB = 2**30
ATTENTION = """
import os
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(256, 768), nn.Linear(256, 10)

    def forward(self, x):
        q, k, v = self.into(x).view(len(x), 128, 3, 4, 64).permute(2, 0, 3, 1, 4)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))

def build_model():
    return Attention()

def make_batch(batch_size):
    return torch.zeros(batch_size, 128, 256)

def compute_loss(model, batch):
    return model(batch).square().mean()
"""
LOOP = """
import json, sys
limit, sizes = int(sys.argv[1]), json.loads(sys.argv[2])
torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
ran = []
for size in sizes:
    model = build_model().cuda().eval()
    try:
        with torch.inference_mode():
            for _ in range(3):
                batch = make_batch(size).cuda()
                loss = compute_loss(model, batch)
        torch.cuda.synchronize()
        ran.append(True)
    except torch.OutOfMemoryError:
        ran.append(False)
    model = batch = loss = None
    torch.cuda.empty_cache()
print(json.dumps(ran))
os._exit(0)
"""


@ESTIMATES
@pytest.mark.parametrize("source", [PERCEPTRON, ATTENTION], ids=["perceptron", "attention"])
def test_it_runs_in_a_plain_loop_two_percent_more_do_not_and_the_estimate_is_near(
    source, script, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    task = tmp_path / "model.py"
    task.write_text(source)
    options = {"precision": "fp32", "memory_limit": GiB, "inference": True}
    with fake_gpu.machine(fake_gpu.Card("8GiB")):
        probe = batchtune.probe(task, device="cuda", verify_steps=3, throughput=False, **options).probe
        (estimate,) = batchtune.estimate(task, gpus="RTX 3090", **options).estimates
        found = probe.max_batch_size
        assert script(source + LOOP, GiB, json.dumps([found, int(1.02 * found)])) == [True, False]
    assert (probe.inference, probe.limited_by, probe.verified_in_fresh_process) == (True, "memory", True)
    assert estimate.max_batch_size == pytest.approx(found, rel=0.04)
