"""An LSTM language model as PyTorch's examples have it: batchify, hidden state carried on, clipping."""

import inspect
import pydoc

import torch
from torch import nn

BPTT = 32
TEXT = inspect.getsource(pydoc)
CHARACTERS = sorted(set(TEXT))
IDS = torch.tensor([CHARACTERS.index(each) for each in TEXT])
TRAIN, VAL = IDS[:80_000], IDS[80_000:]


def batchify(data, batch_size):
    rows = len(data) // batch_size
    return data[: rows * batch_size].view(batch_size, rows).t().contiguous()


def get_batches(data, batch_size):
    columns = batchify(data, batch_size)
    for at in range(0, len(columns) - BPTT, BPTT):
        yield columns[at : at + BPTT], columns[at + 1 : at + 1 + BPTT]


def repackage_hidden(hidden):
    return tuple(each.detach() for each in hidden)


class RNNModel(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.encoder, self.drop = nn.Embedding(len(CHARACTERS), width), nn.Dropout(0.1)
        self.rnn, self.decoder = nn.LSTM(width, width), nn.Linear(width, len(CHARACTERS))

    def forward(self, inputs, hidden=None):
        output, hidden = self.rnn(self.drop(self.encoder(inputs)), hidden)
        return self.decoder(self.drop(output)).flatten(0, 1), hidden


def loss_of(model, inputs, targets, hidden=None):
    output, hidden = model(inputs, hidden)
    return nn.functional.cross_entropy(output, targets.flatten()), hidden


@torch.no_grad()
def evaluate(model):
    model.eval()
    device, hidden, losses = next(model.parameters()).device, None, []
    for inputs, targets in get_batches(VAL, 10):
        loss, hidden = loss_of(model, inputs.to(device), targets.to(device), hidden)
        losses.append(loss.item())
    model.train()
    return sum(losses) / len(losses)


def train(batch_size, lr, report, epochs=50):
    model = RNNModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(epochs):
        hidden = None
        for inputs, targets in get_batches(TRAIN, batch_size):
            loss, hidden = loss_of(model, inputs, targets, hidden)
            hidden = repackage_hidden(hidden)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            if report(model):
                return


# For batchtune:
build_model = RNNModel
gradient_clipping = {"norm": 0.25}


def train_loader(batch_size):
    return get_batches(TRAIN, batch_size)


def build_optimizer(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr)


def train_step(model, batch, optimizer, context):
    with context.autocast():
        loss, hidden = loss_of(model, *batch, context.state.get("hidden"))
    context.state["hidden"] = repackage_hidden(hidden)
    context.backward(loss)
    context.step(optimizer)
    return loss
