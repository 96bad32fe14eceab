"""A model whose weights and optimizer states fit on no single card: estimate, probe and study of a group agree."""

import fake_gpu
import pytest
from cuda.tasks import ESTIMATES

import batchtune
from batchtune.errors import NothingFitsError

CARD, WEIGHTS_BYTES = {"memory": "512MiB", "context_bytes": "32MiB"}, 8 * 2 * 1024 * 2048 * 4  # with Adam 4 times that
DEEP = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(1024, 2048, bias=False), nn.ReLU(), nn.Linear(2048, 1024, bias=False)

    def forward(self, points):
        return points + self.down(self.act(self.up(points)))

def build_model(): return nn.Sequential(*(Block() for _ in range(8)), nn.Linear(1024, 1))
def train_dataset(): return TensorDataset(torch.zeros(8192, 1024), torch.zeros(8192, 1))
def compute_loss(model, batch): return nn.functional.mse_loss(model(batch[0]), batch[1])
val_dataset = train_dataset
"""
STUDY = """
task: deep.py
device: cuda
precision: fp32
baseline: {batch_size: 64, learning_rate: 1e-3}
batch_size: {max: 256}
objective: {kind: best_metric}
budget: {run: 500ms, total: 5m, trials: 2}
confirm: off
ranks: {per_trial: 2, strategy: fsdp}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "deep.py").write_text(DEEP)
    (tmp_path / "config.yaml").write_text(STUDY)
    return tmp_path


@pytest.fixture
def cards():
    with fake_gpu.machine(*[fake_gpu.Card(CARD["memory"], context_bytes=CARD["context_bytes"])] * 2) as machine:
        yield machine.cards
        assert [card.used for card in machine.cards] == [0, 0]


def probed(folder, **options):
    usual = {"device": "cuda", "precision": "fp32", "verify_steps": 2, "tolerance": 0.05, "throughput": False}
    return batchtune.probe(folder / "deep.py", run_folders=folder / "runs", **usual | options).probe


@pytest.mark.usefixtures("cards")
def test_on_one_card_nothing_fits(folder):
    with pytest.raises(NothingFitsError):
        probed(folder)


@ESTIMATES
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("cards")
def test_two_ranks_train_it_as_the_estimate_says(folder):
    found = probed(folder, nproc_per_node=2, strategy="fsdp")
    assert (found.limited_by, found.verified_in_fresh_process) == ("memory", True)
    assert 4 * WEIGHTS_BYTES > found.memory_limit_bytes >= found.peak_reserved_bytes
    limit = found.memory_limit_bytes
    (told,) = batchtune.estimate(
        folder / "deep.py", gpus="T4", precision="fp32", memory_limit=limit, world_size=2, strategy="fsdp"
    ).estimates
    assert told.safe_max_batch_size <= found.max_batch_size
    assert told.max_batch_size == pytest.approx(found.max_batch_size, rel=0.25)  # 24 MB, 5 % of the card
    assert found.first_failing_batch_size is not None


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("cards")
def test_a_study_of_two_ranks_trains_it(folder):
    result = batchtune.tune(folder / "config.yaml", run_folders=folder / "runs")
    assert result.status == "complete"
    runs = [trial for trial in result.trials if trial.state in {"complete", "pruned"}]
    assert {(trial.role, trial.strategy) for trial in runs} == {("baseline", "fsdp"), ("search", "fsdp")}
    assert result.probe.max_batch_size >= result.recommendation.micro_batch_size
