"""A small convolutional net on scikit-learn's handwritten digits: real data, nothing to download."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

VALIDATION_SAMPLES = 360


def build_model():
    """Two convolutions and a linear layer for images of 1 x 8 x 8."""
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def _split():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    return data, order


def train_dataset():
    """1437 images with their digits."""
    data, order = _split()
    return Subset(data, order[VALIDATION_SAMPLES:])


def val_dataset():
    """The 360 images that are never trained on."""
    data, order = _split()
    return Subset(data, order[:VALIDATION_SAMPLES])


def compute_loss(model, batch):
    """Cross-entropy of the ten classes."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def build_optimizer(model, lr):
    """Stochastic gradient descent with momentum."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
