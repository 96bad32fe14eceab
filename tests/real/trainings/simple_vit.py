"""SimpleViT: fixed sine positions, mean pooling, no dropout; warm-up, then a cosine, and accuracy as its metric."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, Dataset


def sines(height, width, size):
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    speed = 1 / 10000 ** (torch.arange(size // 4) / (size // 4 - 1))
    angles = [places.flatten()[:, None] * speed for places in (columns, rows)]
    return torch.cat([part for each in angles for part in (each.sin(), each.cos())], dim=1)


class Layer(nn.Module):
    def __init__(self, size, heads):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(size), nn.MultiheadAttention(size, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class SimpleViT(nn.Module):
    def __init__(self, *, image=8, patch=2, size=64, layers=2, heads=4, classes=10):
        super().__init__()
        self.patch, side = patch, image // patch
        self.embed = nn.Sequential(nn.LayerNorm(patch**2), nn.Linear(patch**2, size), nn.LayerNorm(size))
        self.register_buffer("places", sines(side, side, size))
        self.layers = nn.Sequential(*[Layer(size, heads) for _ in range(layers)])
        self.head = nn.Linear(size, classes)

    def forward(self, images):
        patches = nn.functional.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
        return self.head(self.layers(self.embed(patches) + self.places).mean(dim=1))


class Digits(Dataset):
    def __init__(self, split):
        images, labels = load_digits(return_X_y=True)
        parts = train_test_split(images, labels, random_state=0, test_size=0.2)
        self.images, self.labels = (parts[0], parts[2]) if split == "train" else (parts[1], parts[3])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return torch.tensor(self.images[index] / 16, dtype=torch.float32).view(1, 8, 8), int(self.labels[index])


def schedule(optimizer, steps):
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=max(1, steps // 10))
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - steps // 10))
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [max(1, steps // 10)])


@torch.no_grad()
def accuracy(model):
    device = next(model.parameters()).device
    batches = DataLoader(Digits("val"), 128)
    right = sum((model(images.to(device)).argmax(1).cpu() == labels).sum().item() for images, labels in batches)
    return right / len(batches.dataset)


def train(batch_size, lr, report, steps=2000):
    model, loader = SimpleViT(), DataLoader(Digits("train"), batch_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = schedule(optimizer, steps)
    for _ in range(1000):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            if report(model):
                return


# For batchtune:
build_model = SimpleViT
build_scheduler = schedule


def train_dataset():
    return Digits("train")


def compute_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def evaluate(model):
    return {"accuracy": accuracy(model)}
