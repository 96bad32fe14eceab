"""The largest batch of every length on a card: what it took, and that a plain loop trains."""

import fake_gpu
import pytest
from cuda.tasks import ESTIMATES, TRANSFORMER

import batchtune

CONVOLUTIONS = """
import torch
from torch import nn

def build_model():
    def block(before, after):
        return nn.Sequential(nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.ReLU())
    return nn.Sequential(block(3, 64), block(64, 128), block(128, 256), nn.AdaptiveAvgPool2d(1), nn.Flatten())

def make_batch(batch_size, length):
    return torch.zeros(batch_size, 3, *length)

def compute_loss(model, batch):
    return model(batch).square().mean()
"""
LENGTHS = (64, 128, 256, 512)


def with_lengths(text):
    """A task whose batches have 256 positions, with those of any length."""
    return text.replace("make_batch(batch_size):", "make_batch(batch_size, length):").replace("256)", "length)")


PLAIN_LOOP = """
import random, sys
TASK
points, limit = eval(sys.argv[1]), int(sys.argv[2])
torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
model, dice = build_model().cuda(), random.Random(1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(60):
    length, size = dice.choice(points)
    batch = make_batch(size, length).cuda()
    optimizer.zero_grad()
    loss = compute_loss(model, batch)
    loss.backward()
    optimizer.step()
print("true")
"""


@ESTIMATES
@pytest.mark.parametrize(
    ("text", "lengths", "attempts", "failures"),
    [
        (with_lengths(TRANSFORMER), LENGTHS, 2.75, 0.6),
        (CONVOLUTIONS, ((64, 64), (64, 128), (128, 128), (256, 256)), 4.0, 1.5),
    ],
    ids=["transformer", "convolutions"],
)
def test_each_length_gets_the_batch_that_trains_among_all_others(
    tmp_path, monkeypatch, script, text, lengths, attempts, failures
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model.py").write_text(text)
    options = {"precision": "fp32", "memory_limit": "2GiB", "throughput": False}
    with fake_gpu.machine(fake_gpu.Card("8GiB")):
        found = batchtune.probe(tmp_path / "model.py", device="cuda", lengths=list(lengths), **options).probe
        points = [(point.length, point.max_batch_size) for point in found.lengths]
        assert script(PLAIN_LOOP.replace("TASK", text), points, found.memory_limit_bytes)
    warned = any("an order that was not tried may need more" in each for each in found.warnings)
    assert warned == (found.length_check.failures > 0)
    assert [length for length, _ in points] == list(lengths)
    batches = [batch for _, batch in points]
    assert batches == sorted(batches, reverse=True)
    assert found.max_batch_size == batches[-1]
    assert all(point.limited_by == "memory" for point in found.lengths)
    assert found.length_check.steps >= 200
    assert found.length_check.peak_reserved_bytes <= found.memory_limit_bytes
    tried = [attempt for point in found.lengths for attempt in point.attempts if attempt.purpose == "search"]
    assert len(tried) <= attempts * len(lengths)
    assert sum(attempt.outcome == "oom" for attempt in tried) <= failures * len(lengths)


@ESTIMATES
def test_with_expandable_segments_all_lengths_train_nearly_what_each_does_alone(tmp_path, monkeypatch, script):
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for name, value in {"XDG_CACHE_HOME": str(tmp_path / "cache"), **setting}.items():
        monkeypatch.setenv(name, value)
    text = with_lengths(TRANSFORMER)
    (tmp_path / "model.py").write_text(text)
    with fake_gpu.machine(fake_gpu.Card("8GiB")):
        found = batchtune.probe(
            tmp_path / "model.py",
            device="cuda",
            lengths=list(LENGTHS),
            precision="fp32",
            memory_limit="2GiB",
            throughput=False,
        )
        points = [(point.length, point.max_batch_size) for point in found.probe.lengths]
        assert script(PLAIN_LOOP.replace("TASK", text), points, found.probe.memory_limit_bytes, **setting)
    assert "expandable_segments:True" in found.environment.allocator_conf
    check = found.probe.length_check
    assert check.orders == (18 if check.failures else 6)
    assert found.probe.length_check.steps >= 200
    for point in found.probe.lengths:
        alone = max(each.batch_size for each in point.attempts if each.fits and each.purpose == "search")
        assert point.max_batch_size >= 0.9 * alone


PADDED = """
import random
from torch.nn.utils.rnn import pad_sequence

dice = random.Random(3)
LENGTHS = [min(512, max(8, int(dice.lognormvariate(4.5, 0.8)))) for _ in range(6000)]

def train_dataset():
    return [torch.full((length,), 5) for length in LENGTHS]

def collate(samples):
    return pad_sequence(samples, batch_first=True)
"""
EPOCHS = """
import os, sys
TASK
size, limit = int(sys.argv[1]), int(sys.argv[2])
data, ran_out = train_dataset(), []
for seed in range(20):
    if not (child := os.fork()):
        code = 1
        try:
            torch.set_num_threads(1)
            torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
            model, places = build_model().cuda(), [*range(len(data))]
            random.Random(seed).shuffle(places)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for first in range(0, 20 * size, size):
                batch = collate([data[place] for place in places[first : first + size]]).cuda()
                optimizer.zero_grad()
                loss = compute_loss(model, batch)
                loss.backward()
                optimizer.step()
            code = 0
        finally:
            os._exit(code)
    ran_out += [seed] * (os.waitpid(child, 0)[1] != 0)
print(ran_out)
"""


@ESTIMATES
def test_batches_that_are_padded_to_their_longest_sample_train_in_any_order(tmp_path, monkeypatch, script):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = TRANSFORMER.replace("def make_batch", "def made_batch") + PADDED
    (tmp_path / "model.py").write_text(text)
    with fake_gpu.machine(fake_gpu.Card("8GiB")):
        found = batchtune.probe(
            tmp_path / "model.py", device="cuda", precision="fp32", memory_limit="2GiB", throughput=False
        ).probe
        assert script(EPOCHS.replace("TASK", text), found.max_batch_size, found.memory_limit_bytes) == []
    alone = max(attempt.batch_size for attempt in found.attempts if attempt.fits and attempt.purpose == "search")
    assert found.max_batch_size >= 0.8 * alone
