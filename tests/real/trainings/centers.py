"""A criterion with parameters: a centre for each class, learned beside the network with a rate of its own."""

import torch
from torch import nn
from torch.utils.data import DataLoader
from vit import TRAIN, VAL


class CenterLoss(nn.Module):
    def __init__(self, classes=10, size=16):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(classes, size))

    def forward(self, features, labels):
        return nn.functional.cross_entropy(-torch.cdist(features, self.centers), labels)


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 16))


def sgd(network, criterion, lr):
    groups = [{"params": network.parameters()}, {"params": criterion.parameters(), "lr": 5 * lr}]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


def train(batch_size, lr, report, epochs=100):
    model, criterion = network(), CenterLoss()
    optimizer = sgd(model, criterion, lr)
    for _ in range(epochs):
        for images, labels in DataLoader(TRAIN, batch_size, shuffle=True, drop_last=True):
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            optimizer.step()
            if report({"network": model, "criterion": criterion}):
                return


# For batchtune:
def build_model():
    return {"network": network(), "criterion": CenterLoss()}


def train_dataset():
    return TRAIN


def val_dataset():
    return VAL


def compute_loss(model, batch):
    return model["criterion"](model["network"](batch[0]), batch[1])


def build_optimizer(model, lr):
    return sgd(model["network"], model["criterion"], lr)
