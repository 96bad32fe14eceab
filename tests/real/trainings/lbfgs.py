"""Logistic regression on digits by LBFGS, whose step evaluates the loss several times."""

import torch
from torch import nn
from torch.utils.data import DataLoader
from vit import TRAIN, VAL


class Regression(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(1024, 10))


def loss_of(model, batch):
    decay = sum(each.square().sum() for each in model.parameters())
    return nn.functional.cross_entropy(model(batch[0]), batch[1]) + 1e-3 * decay


def lbfgs(model, lr):
    return torch.optim.LBFGS(model.parameters(), lr=lr, max_iter=4, history_size=5)


def train(batch_size, lr, report, epochs=100):
    model = Regression()
    optimizer = lbfgs(model, lr)
    for _ in range(epochs):
        for batch in DataLoader(TRAIN, batch_size, shuffle=True, drop_last=True):

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            optimizer.step(closure)
            if report(model):
                return


# For batchtune:
build_model, compute_loss, build_optimizer = Regression, loss_of, lbfgs


def train_dataset():
    return TRAIN


def val_dataset():
    return VAL


def train_step(model, batch, optimizer, context):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        context.backward(loss)
        return loss

    context.step(optimizer, closure)
    return loss_of(model, batch)
