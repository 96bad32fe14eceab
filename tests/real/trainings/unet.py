"""A U-Net that finds discs in noise: cross-entropy and dice, RMSprop with momentum, clipping."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Discs(Dataset):
    def __init__(self, count, first):
        self.count, self.first = count, first

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.first + index)
        x, y, radius = torch.rand(3, generator=generator).mul(20).add(6).tolist()
        rows, columns = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
        mask = (rows - x) ** 2 + (columns - y) ** 2 < (radius / 2) ** 2
        return {"image": mask[None].float() + 0.5 * torch.randn(1, 32, 32, generator=generator), "mask": mask.float()}


def double(inputs, outputs):
    layers = []
    for count in (inputs, outputs):
        layers += [nn.Conv2d(count, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down = nn.ModuleList([double(1, width), double(width, 2 * width), double(2 * width, 4 * width)])
        self.up = nn.ModuleList([double(6 * width, 2 * width), double(3 * width, width)])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        kept = []
        for layer in self.down:
            x = layer(nn.functional.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        for layer, beside in zip(self.up, reversed(kept[:-1]), strict=True):
            x = layer(torch.cat([beside, nn.functional.interpolate(x, scale_factor=2)], dim=1))
        return self.head(x).squeeze(1)


def dice_coefficient(found, mask, epsilon=1e-6):
    both = 2 * (found * mask).sum(dim=(-1, -2))
    return ((both + epsilon) / (found.sum(dim=(-1, -2)) + mask.sum(dim=(-1, -2)) + epsilon)).mean()


def loss_of(model, batch):
    found = model(batch["image"])
    loss = nn.functional.binary_cross_entropy_with_logits(found, batch["mask"])
    return loss + 1 - dice_coefficient(found.sigmoid(), batch["mask"])


def rmsprop(model, lr):
    return torch.optim.RMSprop(model.parameters(), lr=lr, weight_decay=1e-8, momentum=0.9, foreach=True)


@torch.inference_mode()
def dice(model):
    model.eval()
    device, scores = next(model.parameters()).device, []
    for batch in DataLoader(Discs(64, 10_000), 32):
        found = (model(batch["image"].to(device)) > 0).float()
        scores.append(dice_coefficient(found, batch["mask"].to(device)).item())
    model.train()
    return sum(scores) / len(scores)


def train(batch_size, lr, report, epochs=50):
    model = UNet()
    optimizer = rmsprop(model, lr)
    for _ in range(epochs):
        for batch in DataLoader(Discs(512, 0), batch_size, shuffle=True, drop_last=True):
            optimizer.zero_grad(set_to_none=True)
            loss_of(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if report(model):
                return


# For batchtune:
build_model, compute_loss, build_optimizer = UNet, loss_of, rmsprop
gradient_clipping = {"norm": 1.0}


def train_dataset():
    return Discs(512, 0)


def evaluate(model):
    return {"dice": dice(model)}
