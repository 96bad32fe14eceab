"""Mixed precision in fp16 with a GradScaler, whose gradients are unscaled and clipped."""

import torch
from torch import nn
from torch.utils.data import DataLoader
from vit import TRAIN, VAL


class Mlp(nn.Sequential):
    def __init__(self, width=256):
        super().__init__(nn.Flatten(), nn.Linear(1024, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.append(nn.Linear(width, 10))


def train(batch_size, lr, report, epochs=100):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Mlp().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scaler = torch.amp.GradScaler(device)
    for _ in range(epochs):
        for images, labels in DataLoader(TRAIN, batch_size, shuffle=True, drop_last=True):
            optimizer.zero_grad()
            with torch.autocast(device, torch.float16):
                loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if report(model):
                return


# For batchtune:
build_model = Mlp
gradient_clipping = {"norm": 1.0}


def train_dataset():
    return TRAIN


def val_dataset():
    return VAL


def compute_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
