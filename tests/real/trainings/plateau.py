"""The U-Net as it is published, with ReduceLROnPlateau on the dice score."""

import torch
from unet import *  # noqa: F403


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)


def train(batch_size, lr, report, epochs=50):
    model = UNet()  # noqa: F405
    optimizer = rmsprop(model, lr)  # noqa: F405
    schedule = plateau(optimizer)
    for _ in range(epochs):
        for batch in DataLoader(Discs(512, 0), batch_size, shuffle=True, drop_last=True):  # noqa: F405
            optimizer.zero_grad(set_to_none=True)
            loss_of(model, batch).backward()  # noqa: F405
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # noqa: F405
            optimizer.step()
            if report(model):
                return
        schedule.step(dice(model))  # noqa: F405


# For batchtune:
def build_scheduler(optimizer, total_steps):
    return plateau(optimizer)
