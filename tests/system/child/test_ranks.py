"""Two ranks that train one model: what they come to is what one device comes to, and the same on both."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_gpu import forks
from fixtures.training import linear_task
from torch import nn
from torch.distributed import TCPStore
from torch.utils.data import TensorDataset

from batchtune.child.evaluate import metric_value
from batchtune.child.ranks._base import ALONE
from batchtune.child.ranks.parallel import repeated_blocks
from batchtune.child.trainer import Trainer, TrainingBatches

MICRO, STEPS, MEAN, VARIANCE = 4, 6, 1.0, 9.0
DEEP_BYTES = 160 << 20
TWO_RANKS = f"""
import json, sys, time
import torch
from torch import nn
from fixtures.training import FakeDevice, linear_task
from system.child import test_ranks as here
from batchtune.child.before_study import noise_scale, range_test
from batchtune.child.ranks.parallel import Parallel
from batchtune.child.trainer import Trainer
from batchtune.child.training_run import train
from batchtune.errors import UsageError
from batchtune.protocol.commands import MeasureNoiseScale, RunRangeTest
from batchtune.protocol.messages import Rendezvous, RunSpec

torch.set_num_threads(1)
strategy = sys.argv[1]
ranks = Parallel(torch.device("cpu"), Rendezvous(host="", port=0, token="", strategy=strategy, name="test"))
ranks.join()
told = {{"together": [ranks.together(how, ranks.rank + 1.0) for how in ("sum", "max", "min", "first")]}}
told["agree"] = [ranks.agree(True), ranks.agree(ranks.rank == 0)]
told["weights"], told["loss"] = here.trained({MICRO}, ranks)

statistics = nn.BatchNorm1d(1)
statistics.running_mean += ranks.rank
ranks.align(statistics)
told["running_mean"] = float(statistics.running_mean)

spec = RunSpec(
    micro_batch_size={MICRO}, accumulation_steps=2, learning_rate=0.01, precision="fp32", seed=0, metric="val_loss",
    goal="minimize", target=None, limit_seconds=0.3, evaluate_every=0.1, evaluation_batch_size=8, world_size=2,
    wall_seconds=60.0,
)
began = time.perf_counter()
watts = ranks.rank + 1.0
run, curve = train(linear_task(), FakeDevice(), spec, lambda: watts * (time.perf_counter() - began), ranks), []
try:
    point = next(run)
    while True:
        curve.append((point.seconds, point.samples, point.value, point.joules))
        point = run.send(True)
except StopIteration as end:
    told["outcome"] = end.value.outcome
told["curve"], told["run_seconds"] = curve, time.perf_counter() - began

how = {{"precision": "fp32", "seconds": 60.0}}
command = MeasureNoiseScale(
    small=4, large=32, learning_rate=1e-3, warm_up_steps=2, draws=60,
    ranks_apart=strategy == "ddp", **how
)
noise = noise_scale(here.noisy_task(), FakeDevice(), command, ranks=ranks)
told["noise"] = [noise.samples, noise.low, noise.high, noise.batch_sizes]
rising = RunRangeTest(batch_size={MICRO}, lowest_rate=1e-3, highest_rate=100.0, steps=40, **how)
test = range_test(linear_task(), FakeDevice(), rising, ranks=ranks)
told["edge"] = [test.batch_size, test.edge_learning_rate, test.lowest_loss_learning_rate]
told["peak"] = here.peak_bytes(lambda: ranks.place(here.deep, ranks.device))
try:
    Trainer(linear_task(build_model=here.tied), torch.device("cpu"), "fp32", ranks=ranks)
except UsageError as error:
    told["refused"] = str(error)
try:
    Trainer(linear_task(build_model=here.scaled), torch.device("cpu"), "fp32", ranks=ranks)
except UsageError as error:
    told["scaled"] = str(error)
print(json.dumps(told))
"""


def noisy_task():
    """One weight at zero whose gradients are the samples, of known mean and variance."""
    samples = MEAN + VARIANCE**0.5 * torch.randn(4096, generator=torch.Generator().manual_seed(0))
    return linear_task(
        build_model=lambda: nn.Linear(1, 1, bias=False),
        train_dataset=lambda: TensorDataset(samples[:, None]),
        compute_loss=lambda model, batch: model(batch[0]).mean(),
    )


def tied():
    """Two blocks that share their weight."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)), nn.Linear(4, 1))
    blocks[1][0].weight = blocks[0][0].weight
    return blocks


class Scaled(nn.Linear):
    """A layer with a parameter that has no dimension, which FSDP2 does not take."""

    def __init__(self, size):
        super().__init__(4, size)
        self.inner, self.scale = nn.Identity(), nn.Parameter(torch.tensor(1.0))


def scaled():
    return nn.Sequential(Scaled(4), Scaled(4), nn.Linear(4, 1))


def blocks():
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)), nn.Linear(4, 1))


def deep():
    """A model of `DEEP_BYTES`, in blocks each of which is a small part of it."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU()) for _ in range(DEEP_BYTES >> 22))
    )


def peak_bytes(make):
    """The most that was resident of this process while something was made, above what was before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    made = make()
    return _resident("VmHWM") - before if made is not None else None


def _resident(name):
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) << 10


def trained(micro_batch_size, ranks=ALONE):
    """The weights after a few steps of two micro-batches each, and an evaluation in batches that do not come out."""
    task = linear_task(build_model=blocks)
    trainer = Trainer(task, torch.device("cpu"), "fp32", learning_rate=0.05, seed=5, ranks=ranks)
    batches = TrainingBatches(task, micro_batch_size, 7, ranks)
    for _ in range(STEPS):
        trainer.step(batches, 2)
    loss = metric_value(trainer, "val_loss", 5)
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in trainer.model.parameters()]
    return [each.detach().flatten().tolist() for each in whole], loss


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def both(request):
    """What each of two ranks tells."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    paths = os.pathsep.join(map(str, (forks.TESTS, forks.TESTS.parent)))
    usual = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    ranks = [
        forks.Popen(
            [sys.executable, "-c", TWO_RANKS, request.param],
            env=os.environ | usual | {"PYTHONPATH": paths, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], told
    return request.param, [json.loads(out.splitlines()[-1]) for out, _ in told]


def test_they_train_the_weights_that_one_device_trains_with_their_batches(both):
    weights, loss = trained(2 * MICRO)
    for told in both[1]:
        for found, expected in zip(told["weights"], weights, strict=True):
            assert found == pytest.approx(expected, abs=1e-6)
        assert told["loss"] == pytest.approx(loss, rel=1e-5)


def test_the_first_tells_the_run_of_both_with_their_samples_and_energy(both):
    _, (first, second) = both
    assert second["curve"] == []
    assert first["outcome"] == second["outcome"] == "finished"
    samples = [samples for _, samples, _, _ in first["curve"]]
    assert all(each % (2 * 2 * MICRO) == 0 for each in samples)
    assert samples[-1] > 0
    values = [value for _, _, value, _ in first["curve"]]
    assert values[-1] < values[0]
    trained, *_, joules = first["curve"][-1]
    assert 0.9 * 3 * trained < joules < 3 * first["run_seconds"]  # one draws a watt, the other two


def test_what_one_says_the_other_hears(both):
    for told in both[1]:
        assert told["together"] == [3.0, 2.0, 1.0, 1.0]
        assert told["agree"] == [True, False]
        assert told["running_mean"] == 0.0


def test_the_gradients_of_single_ranks_tell_the_noise_scale(both):
    strategy, (first, second) = both
    assert first["noise"] == second["noise"]
    samples, low, high, sizes = first["noise"]
    assert samples == pytest.approx(VARIANCE / MEAN**2, rel=0.5)
    assert low <= VARIANCE / MEAN**2 <= high
    assert sizes == ([32, 64] if strategy == "ddp" else [8, 64])


def test_training_diverges_on_both_at_the_same_rate(both):
    _, (first, second) = both
    assert first["edge"] == second["edge"]
    batch_size, edge, lowest = first["edge"]
    assert batch_size == 2 * MICRO
    assert 0.05 < lowest < edge < 10


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a process")
def test_with_shards_no_rank_ever_holds_the_whole_model(both):
    strategy, ranks = both
    for told in ranks:
        if strategy == "ddp":
            assert told["peak"] > 0.95 * DEEP_BYTES
        else:
            assert told["peak"] < 0.7 * DEEP_BYTES  # half of it, one block, and what is kept of how it is made


def test_a_weight_in_two_shards_is_refused_by_its_names(both):
    strategy, (first, second) = both
    told = "strategy fsdp: 0.0.weight and 1.0.weight are one weight (tied), in two shards; use ddp"
    assert first.get("refused") == second.get("refused") == (told if strategy == "fsdp" else None)


def test_a_block_that_cannot_be_sharded_is_refused_with_the_reason(both):
    strategy, (first, second) = both
    assert first.get("scaled") == second.get("scaled")
    if strategy == "fsdp":
        assert first["scaled"].startswith("strategy fsdp: Scaled: fully_shard doesn't support scalar parameters")
        assert first["scaled"].endswith("; change that, or use ddp")


def test_lists_in_a_list_are_no_blocks_what_is_in_them_may_be():
    groups = nn.ModuleList(nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)) for _ in range(2))
    assert repeated_blocks(groups) == [block for group in groups for block in group]


def test_a_device_alone_evaluates_as_before():
    task = linear_task()
    trainer = Trainer(task, torch.device("cpu"), "fp32")
    points, values = task.val_data.tensors
    with torch.no_grad():
        whole = float(nn.functional.mse_loss(trainer.model(points), values))
    for size in (1, 5, 32, 100):
        assert metric_value(trainer, "val_loss", size) == pytest.approx(whole, rel=1e-5)
