"""What batchtune trains: put your own LightningModule and DataModule here, as they are. No batchtune import is needed.

batchtune calls training_step, validation_step and configure_optimizers itself. Of a Trainer(...) in this file, gradient
clipping and accumulation are taken over; its callbacks and precision are not.
"""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES, CLASSES = 32, 4


class Samples(L.LightningDataModule):
    """The data; without a DataModule in the file, the module's own train_dataloader and val_dataloader are used."""

    def setup(self, stage):
        # Stands in for your data: points labelled by which of a few random directions they lean to.
        generator = torch.Generator().manual_seed(0)
        points = torch.randn(10_240, FEATURES, generator=generator)
        labels = (points @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(dim=1)
        self.train = TensorDataset(points[:8192], labels[:8192])
        self.val = TensorDataset(points[8192:], labels[8192:])

    def train_dataloader(self):
        """The loader is made again with other batch sizes; data set, collate function and sampler stay."""
        return DataLoader(self.train, batch_size=32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=32)


class LitModel(L.LightningModule):
    """If it needs arguments, name a function that makes it instead: `task: batchtune_task.py:make_model`."""

    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))

    def training_step(self, batch, batch_idx):
        points, labels = batch
        return nn.functional.cross_entropy(self.net(points), labels)

    def validation_step(self, batch, batch_idx):
        """What it logs may be the metric of config.yaml."""
        points, labels = batch
        logits = self.net(points)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels))
        self.log("val_accuracy", (logits.argmax(dim=1) == labels).float().mean())

    def configure_optimizers(self):
        """With schedulers if you like; batchtune sets the learning rate, parameter groups keep their ratios to it."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
