"""What tests of the lane share: tasks whose steps take memory for each sample, and who cannot run on an old torch."""

from importlib.metadata import version

import pytest

TORCH = tuple(map(int, version("torch").split(".")[:2]))
ESTIMATES = pytest.mark.skipif(TORCH < (2, 10), reason="estimate needs torch 2.10 or newer")

PERCEPTRON = """
import os, signal, time
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))

def make_batch(batch_size):
    return torch.zeros(batch_size, 1024)

def compute_loss(model, batch):
    return model(batch).square().mean()
"""

TRANSFORMER = """
import torch
from torch import nn

def build_model():
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    return nn.Sequential(nn.Embedding(5000, 512), nn.TransformerEncoder(layer, 2), nn.Linear(512, 5000))

def make_batch(batch_size):
    return torch.randint(0, 5000, (batch_size, 256))

def compute_loss(model, batch):
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
"""
