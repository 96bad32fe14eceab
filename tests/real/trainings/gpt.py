"""A GPT on the source text of Python's standard library, character by character: get_batch, clipping, a cosine."""

import argparse
import inspect
import math

import torch
from torch import nn
from torch.nn import functional as F

BLOCK = 64
TEXT = "".join(inspect.getsource(module) for module in (argparse, inspect))
CHARACTERS = sorted(set(TEXT))
IDS = torch.tensor([CHARACTERS.index(each) for each in TEXT])
SPLITS = {"train": IDS[: int(0.9 * len(IDS))], "val": IDS[int(0.9 * len(IDS)) :]}


def get_batch(split, batch_size):
    data = SPLITS[split]
    starts = torch.randint(len(data) - BLOCK - 1, (batch_size,))
    inputs = torch.stack([data[start : start + BLOCK] for start in starts])
    return inputs, torch.stack([data[start + 1 : start + 1 + BLOCK] for start in starts])


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        parts = self.attend(self.norm_1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, width=64, layers=2, heads=4):
        super().__init__()
        self.tokens, self.places = nn.Embedding(len(CHARACTERS), width), nn.Embedding(BLOCK, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(CHARACTERS), bias=False)

    def forward(self, ids, targets=None):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        logits = self.head(self.norm(self.blocks(x)))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss

    def configure_optimizers(self, lr):
        decayed = [each for each in self.parameters() if each.dim() >= 2]
        others = [each for each in self.parameters() if each.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


@torch.no_grad()
def estimate_loss(model, batches=4):
    model.eval()
    device = next(model.parameters()).device
    generator = torch.random.get_rng_state()
    torch.manual_seed(0)
    losses = [model(*(each.to(device) for each in get_batch("val", 32)))[1].item() for _ in range(batches)]
    torch.random.set_rng_state(generator)
    model.train()
    return sum(losses) / batches


def cosine(optimizer, steps):
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 20, 0.1 + 0.45 * (1 + math.cos(math.pi * min(1, step / steps))))
    )


def train(batch_size, lr, report, steps=2000):
    model = GPT()
    optimizer = model.configure_optimizers(lr)
    schedule = cosine(optimizer, steps)
    for _ in range(steps):
        _, loss = model(*get_batch("train", batch_size))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if report(model):
            break


# For batchtune:
build_model = GPT
build_scheduler = cosine
gradient_clipping = {"norm": 1.0}


def train_loader(batch_size):
    return (get_batch("train", batch_size) for _ in range(len(SPLITS["train"]) // BLOCK // batch_size))


def compute_loss(model, batch):
    return model(*batch)[1]


def build_optimizer(model, lr):
    return model.configure_optimizers(lr)


def evaluate(model):
    return {"val_loss": estimate_loss(model)}
