"""Muon for the matrices, AdamW in two groups for the rest, with a bag of features on digits."""

import torch
from torch import nn
from torch.utils.data import DataLoader
from vit import TRAIN, VAL


class Net(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 4, stride=4)
        self.layers = nn.Sequential(
            nn.Linear(1024, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU()
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        return self.head(self.layers(self.stem(images).flatten(1)))


def optimizers_of(model, lr):
    matrices = [each for each in model.layers.parameters() if each.dim() == 2]
    biases = [each for each in model.layers.parameters() if each.dim() < 2]
    ends = [*model.stem.parameters(), *model.head.parameters()]
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": ends, "lr": 0.1 * lr}]
    return [torch.optim.Muon(matrices, lr=lr, momentum=0.95), torch.optim.AdamW(groups, lr=0.05 * lr)]


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(batch_size, lr, report, epochs=100):
    model = Net()
    optimizers = optimizers_of(model, lr)
    for _ in range(epochs):
        for batch in DataLoader(TRAIN, batch_size, shuffle=True, drop_last=True):
            loss_of(model, batch).backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad(set_to_none=True)
            if report(model):
                return


# For batchtune:
build_model, compute_loss, build_optimizer = Net, loss_of, optimizers_of


def train_dataset():
    return TRAIN


def val_dataset():
    return VAL
