"""The estimate on CUDA builds: blind to the card, whatever it is, and to the byte what torch's allocator does."""

import fake_gpu
import pytest

import batchtune

MLP = """
import torch
from torch import nn
def build_model():
    return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.LayerNorm(2048), nn.Dropout(0.1), nn.Linear(2048, 512))
def make_batch(size):
    return torch.randn(size, 128, 512)
def compute_loss(model, batch):
    return model(batch).square().mean()
"""
LANGUAGE = """
import torch
from torch import nn
def build_model():
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    return nn.Sequential(nn.Embedding(4000, 256), nn.TransformerEncoder(layer, 2), nn.Linear(256, 4000))
def make_batch(size):
    return torch.randint(0, 4000, (size, 128))
def compute_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
"""
CONVOLUTIONS = """
import torch
from torch import nn
def build_model():
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.Conv2d(32, 64, 3, stride=2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
def make_batch(size):
    return torch.randn(size, 3, 64, 64), torch.randint(0, 10, (size,))
def compute_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
TRAINED = """
import json, sys, torch
from batchtune.task.load import load_task
from batchtune.child.training.trainer import Trainer
path, precision, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
task = load_task(path)
batch, trainer = task.worst_batch(size), Trainer(task, torch.device("cuda", 0), precision, loss_scale=1.0)
for _ in range(3):
    loss = trainer.forward_backward(batch)  # which a loop holds until the next one is there
    trainer.update()
print(json.dumps([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]))
"""
TRACED = """
import json, sys
from batchtune.estimate.tracing.answer import warm_up
warm_up()
import torch
from batchtune.estimate.memory.allocator import CachingAllocator
from batchtune.estimate.memory.fit import fit, replay
from batchtune.estimate.memory.scratch import Gpu
from batchtune.estimate.tracing.trace import trace_step
from batchtune.task.load import load_task
path, precision, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
task = load_task(path)
step = fit(lambda batch_size: trace_step(task, batch_size, precision)).on(Gpu(108, 2048))
found = replay(step, size, CachingAllocator())
assert not torch.cuda.is_initialized()
print(json.dumps([found.peak_allocated_bytes, found.peak_reserved_bytes]))
"""


@pytest.fixture
def task(tmp_path):
    def task(source):
        path = tmp_path / "task.py"
        path.write_text(source)
        return path

    return task


NO_CARD, THAT_CARD, ANOTHER = [], [fake_gpu.Card(capability=(8, 6))], [fake_gpu.Card("8GiB", capability=(12, 0))]


@pytest.fixture(scope="module")
def told():
    return {}


@pytest.mark.parametrize(
    ("cards", "visible"),
    [(NO_CARD, None), (THAT_CARD, None), (THAT_CARD, ""), (ANOTHER, "0")],
    ids=["no card", "that card", "hidden", "another generation, shown by the task"],
)
def test_an_estimate_is_the_same_with_any_card_or_none_and_opens_none(task, told, cards, visible, monkeypatch):
    path = task(MLP + (f'\nimport os\nos.environ["CUDA_VISIBLE_DEVICES"] = "{visible}"\n' if visible else ""))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with fake_gpu.machine(*cards) as machine:
        machine.fail("cudaMalloc", 2, times=1 << 30)  # whoever opens the card ends here
        (found,) = batchtune.estimate(path, gpus="A5000").estimates
        assert [card.mallocs for card in machine.cards] == [0 for _ in cards]
    assert found.confidence.startswith("high")
    assert told.setdefault("first", found) == found


def test_a_probe_starts_from_its_estimate(task):
    with fake_gpu.machine(fake_gpu.Card("8GiB")):
        found = batchtune.probe(task(MLP), device="cuda", memory_limit="2GiB", verify_steps=1, throughput=False).probe
    assert found.attempts[0].batch_size > 0.5 * found.max_batch_size > 1


@pytest.mark.parametrize(
    ("source", "precision"),
    [(MLP, "fp32"), (LANGUAGE, "bf16"), (CONVOLUTIONS, "bf16")],
    ids=["MLP", "language model", "convolutions"],
)
def test_peaks_are_those_of_torchs_own_allocator(script, task, source, precision):
    path = task(source)
    with fake_gpu.machine(fake_gpu.Card("80GiB", capability=(8, 0), multiprocessors=108, cudnn_workspace_bytes=0)):
        for size in (3, 500):
            allocated, reserved = script(TRAINED, path, precision, size)
            assert script(TRACED, path, precision, size) == [allocated, pytest.approx(reserved, rel=0.01)], size
