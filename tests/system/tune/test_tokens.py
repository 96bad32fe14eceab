"""A study that counts tokens, from its probe to its report, on a CPU."""

import pytest

import batchtune
from batchtune.errors import BatchtuneError
from batchtune.report.view.read import view_of

TASK = """
import random
import torch
from torch import nn

def samples(seed, count):
    dice = random.Random(seed)
    lengths = [dice.choice([3, 8, 30]) for _ in range(count)]
    return [torch.tensor([[dice.gauss(0, 1) for _ in range(4)] for _ in range(length)]) for length in lengths]

def train_dataset():
    return samples(0, 400)

def val_dataset():
    return samples(1, 50)

def sample_length(sample):
    return len(sample)

def collate(samples):
    if len(samples) > 1:
        with open("seen.txt", "a") as file:
            file.write(f"{len(samples)} {min(map(len, samples))} {max(map(len, samples))}\\n")
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)

def build_model():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))

def compute_loss(model, batch):
    known = batch.abs().sum(-1) > 0
    return ((model(batch).squeeze(-1) - batch.sum(-1))[known]).square().mean()

def build_optimizer(model, lr):
    return torch.optim.AdamW(model.parameters(), lr=lr)
"""
STUDY = """
task: model.py
device: cpu
precision: fp32
batch_size: {unit: tokens, max: 1024}
baseline: {batch_size: 16, learning_rate: 1e-3}
objective: {kind: best_metric}
budget: {run: 500ms, total: 60s, trials: 2}
confirm: off
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.yaml").write_text(STUDY)
    (tmp_path / "model.py").write_text(TASK)
    return tmp_path


def test_runs_batch_samples_of_similar_length_and_the_result_counts_tokens(study):
    found = batchtune.tune("study.yaml")
    searched = [each for each in found.trials if each.role == "search" and each.curve]
    (baseline,) = [each for each in found.trials if each.role == "baseline"]
    assert searched
    assert all(each.batch_size <= 1024 for each in searched)
    mean = sum(each.length * each.samples for each in found.probe.length_distribution) / 400
    assert baseline.batch_size == round(16 * mean)
    assert found.recommendation.batch_unit == "tokens"
    batches = {each.length: each.samples for each in found.recommendation.length_batches}
    assert list(batches) == [3, 8, 30]
    assert batches[3] > batches[30]
    largest = {each.length: each.max_batch_size for each in found.probe.lengths}
    assert all(batches[length] <= largest[length] for length in batches)
    seen = [tuple(map(int, line.split())) for line in (study / "seen.txt").read_text().splitlines()]
    alike = [each for each in seen if each[0] > 16 and each[1] == each[2] < 30]
    assert len(alike) > 20, "batches of one length, larger than the baseline's"
    view = view_of(found)
    assert "batchtune.LengthBatchSampler" in view.settings["PyTorch"]
    assert "Hugging Face Trainer" not in view.settings


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        (TASK.replace("def sample_length", "def sample_size"), r"^batch_size\.unit tokens: .*sample_length\(sample\)"),
        (TASK.replace("return len(sample)\n", "return (len(sample), 2)\n"), "sample_length must return one number"),
    ],
    ids=["no lengths", "two numbers"],
)
def test_what_has_no_tokens_is_refused_in_one_line(study, task, problem):
    (study / "model.py").write_text(task)
    with pytest.raises(BatchtuneError, match=problem) as raised:
        batchtune.tune("study.yaml")
    assert "\n" not in str(raised.value)
