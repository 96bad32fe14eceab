"""A stream without end or length: lines of Python's standard library, each a text and whether it is a comment."""

import inspect
import pydoc
from itertools import islice

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

LINES = [line.strip() for line in inspect.getsource(pydoc).splitlines() if len(line.strip()) > 8]


class Lines(IterableDataset):
    def __init__(self, remainder):
        self.lines = [line for number, line in enumerate(LINES) if (number % 8 == 0) == remainder]

    def __iter__(self):
        while True:
            for place in torch.randint(len(self.lines), (1000,)).tolist():
                line = self.lines[place].encode()
                yield torch.tensor(list(line[1:65].ljust(64))), float(line[:1] in b"#d\"'")


class Reader(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.Sequential(
            nn.Conv1d(width, width, 5, padding=2), nn.ReLU(), nn.Conv1d(width, width, 5, padding=2), nn.ReLU()
        )
        self.head = nn.Linear(width, 1)

    def forward(self, ids):
        return self.head(self.layers(self.embed(ids).transpose(1, 2)).amax(2)).squeeze(1)


def loss_of(model, batch):
    return nn.functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1].float())


@torch.no_grad()
def val_loss(model, batches=4):
    state, device = torch.random.get_rng_state(), next(model.parameters()).device
    torch.manual_seed(0)
    few = islice(DataLoader(Lines(remainder=True), 64), batches)
    found = sum(loss_of(model, [each.to(device) for each in batch]).item() for batch in few) / batches
    torch.random.set_rng_state(state)
    return found


def train(batch_size, lr, report, steps=5000):
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for batch in islice(DataLoader(Lines(remainder=False), batch_size), steps):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        if report(model):
            return


# For batchtune:
build_model, compute_loss = Reader, loss_of


def train_dataset():
    return Lines(remainder=False)


def evaluate(model):
    return {"val_loss": val_loss(model)}


def build_optimizer(model, lr):
    return torch.optim.Adam(model.parameters(), lr=lr)
