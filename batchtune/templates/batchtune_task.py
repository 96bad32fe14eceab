"""What batchtune trains: replace the body of each function by your own. No batchtune import is needed.

Keep everything on the CPU here: batchtune imports this file in a child process and moves the model to the device.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

FEATURES, CLASSES = 32, 4


def build_model():
    """A new model, with fresh weights each time."""
    return nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))


def _samples(count, seed):
    # Stands in for your data: points labelled by which of a few random directions they lean to.
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(0))
    points = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(points, (points @ directions).argmax(dim=1))


def train_dataset():
    """A torch Dataset; batchtune makes the shuffled batches."""
    return _samples(8192, seed=1)


def val_dataset():
    """With it, the metric is the mean of compute_loss over it: `val_loss`."""
    return _samples(2048, seed=2)


def compute_loss(model, batch):
    """The scalar loss of one batch from the data set (or from make_batch)."""
    points, labels = batch
    return nn.functional.cross_entropy(model(points), labels)


def build_optimizer(model, lr):
    """Optional; the default is AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=lr)


# Optional, too:
#
# def make_batch(batch_size):            the worst case for memory: the longest sequence, the largest image
# def evaluate(model):                   a float or {"val_loss": ..., "accuracy": ...}; replaces the default metric
# def build_scheduler(optimizer, total_steps):
#     stepped after each optimizer step. total_steps is what fits into budget.run at this batch size, for every
#     run, however soon it ends: so runs compared early are equally far in their schedules. Set budget.run to the
#     training time you have in mind. With a third parameter steps_per_epoch it is told what an epoch has at this
#     batch size: StepLR(optimizer, step_size=30 * steps_per_epoch) counts epochs. A ReduceLROnPlateau is stepped at
#     the end of each epoch, with the metric of the study.
# def collate(samples):                  how samples become a batch
# def train_loader(batch_size):          the batches of an epoch, instead of train_dataset: your sampler, your batchify
# def batch_size_of(batch):              its samples, where batches are not all as large as asked for
# gradient_clipping = {"norm": 1.0}      or {"value": 0.5}, before each optimizer step
#
# build_model may return a dict of modules (a criterion with parameters, an EMA, a discriminator), and build_optimizer a
# list or dict of optimizers, all made from lr: the ratios you write are kept. A step that is not loss, backward, step:
#
# def train_step(model, batch, optimizers, context):
#     with context.autocast():
#         loss = ...
#     context.backward(loss)             instead of loss.backward(); (loss, optimizer) where losses alternate
#     context.step(optimizers)           instead of optimizer.step(); context.state is kept from call to call
#     return loss                        the one to watch; called for each micro-batch
