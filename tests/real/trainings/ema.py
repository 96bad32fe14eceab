"""An average of the weights (EMA) that follows each step, and by which the model is judged."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from vit import TRAIN, VAL


def conv_net():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(10),
    )


def with_average():
    model = conv_net()
    model(torch.zeros(1, 1, 32, 32))
    return {"model": model, "ema": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))}


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@torch.no_grad()
def judge(models):
    device = next(models["ema"].parameters()).device
    return sum(loss_of(models["ema"], [each.to(device) for each in batch]).item() for batch in DataLoader(VAL, 397))


def train(batch_size, lr, report, epochs=100):
    models = with_average()
    optimizer = torch.optim.SGD(models["model"].parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        for batch in DataLoader(TRAIN, batch_size, shuffle=True, drop_last=True):
            optimizer.zero_grad()
            loss_of(models["model"], batch).backward()
            optimizer.step()
            models["ema"].update_parameters(models["model"])
            if report(models):
                return


# For batchtune:
build_model = with_average


def train_dataset():
    return TRAIN


def build_optimizer(models, lr):
    return torch.optim.SGD(models["model"].parameters(), lr=lr, momentum=0.9)


def train_step(models, batch, optimizer, context):
    with context.autocast():
        loss = loss_of(models["model"], batch)
    context.backward(loss)
    context.step(optimizer)
    if context.is_last_micro_batch:
        models["ema"].update_parameters(models["model"])
    return loss


def evaluate(models):
    return {"val_loss": judge(models)}
