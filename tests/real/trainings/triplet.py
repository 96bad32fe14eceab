"""Embeddings of digits by a triplet loss on (anchor, positive, negative)."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

IMAGES = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
LABELS = torch.tensor(load_digits().target)


class Triplets(Dataset):
    def __init__(self, first, last):
        self.images, self.labels = IMAGES[first:last], LABELS[first:last]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        same = (self.labels == self.labels[index]).nonzero().flatten()
        others = (self.labels != self.labels[index]).nonzero().flatten()
        return [self.images[place] for place in (index, same[(7 * index) % len(same)], others[index % len(others)])]


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Linear(512, 32)

    def forward(self, images):
        return nn.functional.normalize(self.head(self.layers(images).flatten(1)), dim=1)


criterion = nn.TripletMarginLoss(margin=0.5)


def train(batch_size, lr, report, epochs=100):
    model = Embedding()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
    for _ in range(epochs):
        for anchor, positive, negative in DataLoader(Triplets(0, 1400), batch_size, shuffle=True, drop_last=True):
            optimizer.zero_grad()
            criterion(model(anchor), model(positive), model(negative)).backward()
            optimizer.step()
            if report(model):
                return


# For batchtune:
build_model = Embedding


def train_dataset():
    return Triplets(0, 1400)


def val_dataset():
    return Triplets(1400, 1797)


def compute_loss(model, batch):
    return criterion(*(model(each) for each in batch))


def build_optimizer(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
