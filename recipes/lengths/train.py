"""Trains the model of model.py with batches that fit at their length: python train.py RESULT [BATCHES]."""

import itertools
import sys

import model as task
import torch
from torch.utils.data import DataLoader

import batchtune


def main(result, batches=None):
    """Trains an epoch, or its first batches; prints the shape and the loss of every twentieth."""
    data = task.train_dataset()
    sampler = batchtune.LengthBatchSampler([task.sample_length(sample) for sample in data], result)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=task.collate)
    model = task.build_model()
    optimizer = task.build_optimizer(model, lr=1e-3)
    for number, batch in enumerate(itertools.islice(loader, batches)):
        loss = task.compute_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 20 == 0:
            print(f"batch {number} of {len(loader)}: {tuple(batch.shape)}, loss {loss.item():.2f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    main(sys.argv[1], *map(int, sys.argv[2:]))
