"""What the user trains with today, as their file says it."""

import pytest

from batchtune.task.load import current_settings

MODEL = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
points = TensorDataset(torch.ones(8, 4))
def build_model(): return nn.Linear(4, 1)
def train_dataset(): return points
def compute_loss(model, batch): return model(batch[0]).mean()
"""
RATES = """
def build_optimizer(model, lr=None):
    groups = [{"params": [each], "lr": lr or rate} for each, rate in zip(model.parameters(), (0.1, 0.2))]
    return torch.optim.SGD(groups)
"""


@pytest.mark.parametrize(
    ("text", "batch_size", "learning_rate"),
    [
        ("", None, None),
        ("BATCH_SIZE = 64\nLR: float = 3e-4", (64, "BATCH_SIZE in my_task.py:9"), (3e-4, "LR in my_task.py:10")),
        ("batch_size = True\nlearning_rate = 'fast'", None, None),
        ("loader = DataLoader(points, batch_size=4)", (4, "the batch size of loader"), None),
        ("train = DataLoader(points, batch_size=4)\nval = DataLoader(points, batch_size=8)", None, None),
        ("def train_loader(batch_size=16): ...", (16, "train_loader's default"), None),
        ("def build_optimizer(model, lr): return torch.optim.SGD(model.parameters(), lr)", None, None),
        ("BATCH_SIZE = 64\ndef batch_size_of(graph): return 1", (1, "batch_size_of"), None),
        ("def batch_size_of(batch): return len(batch)", None, None),
        (RATES, None, (0.2, "SGD's lr")),
        (
            RATES.replace("lr=None", "lr=0.01").replace("lr or rate", "lr * rate"),
            None,
            (0.01, "build_optimizer's default"),
        ),
    ],
)
def test_a_file_says_it_by_constants_defaults_or_objects(load, text, batch_size, learning_rate):
    found = current_settings(load(MODEL + text))
    assert (found.batch_size, found.learning_rate) == (batch_size, learning_rate)


def test_an_object_says_it_and_its_file_after_it(load):
    found = current_settings(
        load(
            MODEL.replace("\ndef ", "\n@staticmethod\ndef ") + "lr = 0.5\nclass Mine:\n    lr = 0.1\n"
            "    build_model, compute_loss = build_model, compute_loss\nBATCH_SIZE = 2",
            "Mine",
        )
    )
    assert found.learning_rate[0] == 0.1
    assert found.batch_size == (2, "BATCH_SIZE in my_task.py:16")
