"""A GAN that learns eight points on a circle: two optimizers in turn, an average of the weights, clipped gradients."""

import math

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

NOISE, POINTS = 8, 8

gradient_clipping = {"norm": 5.0}


def network(inputs, outputs):
    """Three layers."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def build_model():
    """Everything that is trained, and the average of the generator's weights."""
    generator = network(NOISE, 2)
    average = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    return {"generator": generator, "discriminator": network(2, 1), "average": average}


def centres():
    """The eight points."""
    angles = torch.arange(POINTS) * (2 * math.pi / POINTS)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def train_dataset():
    """Points around them."""
    drawn = torch.randint(POINTS, (8192,))
    return TensorDataset(centres()[drawn] + 0.05 * torch.randn(len(drawn), 2))


def build_optimizer(model, lr):
    """The discriminator learns twice as fast."""
    return {
        "generator": torch.optim.Adam(model["generator"].parameters(), lr=lr, betas=(0.5, 0.99)),
        "discriminator": torch.optim.Adam(model["discriminator"].parameters(), lr=2 * lr, betas=(0.5, 0.99)),
    }


def train_step(model, batch, optimizers, context):
    """The discriminator's step, then the generator's."""
    noise = torch.randn(len(batch[0]), NOISE, device=context.device)
    with context.autocast():
        fake, real = model["discriminator"](model["generator"](noise).detach()), model["discriminator"](batch[0])
        loss = softplus(fake).mean() + softplus(-real).mean()
    context.backward(loss, optimizers["discriminator"])
    context.step(optimizers["discriminator"])
    with context.autocast():
        loss = softplus(-model["discriminator"](model["generator"](noise))).mean()
    context.backward(loss, optimizers["generator"])
    context.step(optimizers["generator"])
    if context.is_last_micro_batch:
        model["average"].update_parameters(model["generator"])
    return loss


def evaluate(model):
    """How far the averaged generator's points are from the nearest centre, and each centre from its nearest point."""
    noise = torch.randn(2048, NOISE, generator=torch.Generator().manual_seed(0))
    made = model["average"](noise.to(next(model.parameters()).device))
    distances = torch.cdist(made, centres().to(made))
    return {"distance": float(distances.amin(1).mean() + distances.amin(0).mean())}
