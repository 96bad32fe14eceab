"""A vision transformer with a class token on scikit-learn's digits."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DIGITS = load_digits()
IMAGES = torch.tensor(DIGITS.images, dtype=torch.float32)[:, None] / 16
IMAGES = nn.functional.interpolate(IMAGES, scale_factor=4, mode="bilinear")
LABELS = torch.tensor(DIGITS.target)
TRAIN, VAL = TensorDataset(IMAGES[:1400], LABELS[:1400]), TensorDataset(IMAGES[1400:], LABELS[1400:])


class ViT(nn.Module):
    def __init__(self, size=32, patch=8, width=64, layers=3, heads=4, classes=10):
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
        return self.head(self.encoder(x)[:, 0])


criterion = nn.CrossEntropyLoss(label_smoothing=0.1)


def train(batch_size, lr, report, epochs=100):
    model = ViT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    for _ in range(epochs):
        for images, labels in DataLoader(TRAIN, batch_size, shuffle=True, drop_last=True):
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            optimizer.step()
            if report(model):
                return


# For batchtune:
build_model = ViT


def train_dataset():
    return TRAIN


def val_dataset():
    return VAL


def compute_loss(model, batch):
    return criterion(model(batch[0]), batch[1])


def build_optimizer(model, lr):
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
