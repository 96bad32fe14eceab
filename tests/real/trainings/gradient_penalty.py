"""WGAN-GP on points of a ring: five critic steps with a gradient penalty for each of the generator."""

import torch
from torch import nn
from torch.utils.data import DataLoader

POINTS = torch.randn(4096, 2, generator=torch.Generator().manual_seed(0))
POINTS = POINTS / POINTS.norm(dim=1, keepdim=True) + 0.05 * POINTS
CRITIC_STEPS, LATENT = 5, 8


def mlp(inputs, outputs, width=128):
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


def networks():
    return {"generator": mlp(LATENT, 2), "critic": mlp(2, 1)}


def adams(models, lr):
    return {name: torch.optim.Adam(each.parameters(), lr=lr, betas=(0.5, 0.9)) for name, each in models.items()}


def critic_loss(models, real):
    fake = models["generator"](torch.randn(len(real), LATENT, device=real.device)).detach()
    share = torch.rand(len(real), 1, device=real.device)
    between = (share * real + (1 - share) * fake).requires_grad_()
    slope = torch.autograd.grad(models["critic"](between).sum(), between, create_graph=True)[0]
    penalty = (slope.norm(dim=1) - 1).square().mean()
    return models["critic"](fake).mean() - models["critic"](real).mean() + 10 * penalty


def generator_loss(models, real):
    return -models["critic"](models["generator"](torch.randn(len(real), LATENT, device=real.device))).mean()


@torch.no_grad()
def distance(models):
    """Mean distance of made points from their nearest real ones and back."""
    state, device = torch.random.get_rng_state(), next(models["generator"].parameters()).device
    torch.manual_seed(0)
    apart = torch.cdist(models["generator"](torch.randn(512, LATENT).to(device)).cpu(), POINTS[:512])
    torch.random.set_rng_state(state)
    return (apart.min(0).values.mean() + apart.min(1).values.mean()).item()


def train(batch_size, lr, report, epochs=100):
    models = networks()
    optimizers = adams(models, lr)
    number = 0
    for _ in range(epochs):
        for real in DataLoader(POINTS, batch_size, shuffle=True, drop_last=True):
            number += 1
            optimizers["critic"].zero_grad()
            critic_loss(models, real).backward()
            optimizers["critic"].step()
            if number % CRITIC_STEPS == 0:
                optimizers["generator"].zero_grad()
                generator_loss(models, real).backward()
                optimizers["generator"].step()
            if report(models):
                return


# For batchtune:
build_model, build_optimizer = networks, adams


def train_dataset():
    return POINTS


def train_step(models, real, optimizers, context):
    context.state["steps"] = number = context.state.get("steps", 0) + 1
    loss = critic_loss(models, real)
    context.backward(loss, optimizers["critic"])
    context.step(optimizers["critic"])
    if number % CRITIC_STEPS == 0:
        context.backward(generator_loss(models, real), optimizers["generator"])
        context.step(optimizers["generator"])
    return loss


def evaluate(models):
    return {"distance": distance(models)}
