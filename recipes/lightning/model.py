"""A classifier of points on three spirals: a LightningModule and its DataModule as Lightning users write them."""

import lightning as L
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ARMS = 3


class Spirals(L.LightningDataModule):
    """Points of the plane, each labelled with the spiral arm it lies on; generated, nothing to download."""

    def __init__(self, batch_size=32):
        """Takes the samples of a batch."""
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        """Makes 24,000 points, an eighth of them for validation."""
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(0, ARMS, (24_000,), generator=generator)
        radius = torch.rand(len(labels), generator=generator)
        angle = 7.0 * radius + labels * (2 * torch.pi / ARMS)
        angle = angle + 0.25 * torch.randn(len(labels), generator=generator)
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        self.train = TensorDataset(points[:21_000], labels[:21_000])
        self.val = TensorDataset(points[21_000:], labels[21_000:])

    def train_dataloader(self):
        """Shuffled batches."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        """Batches in order."""
        return DataLoader(self.val, batch_size=self.batch_size)


class LitModel(L.LightningModule):
    """Three linear layers, trained with AdamW after a warm-up."""

    def __init__(self, width=128, lr=1e-3):
        """Builds the layers."""
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, ARMS)
        )
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(ARMS, average="micro")

    def training_step(self, batch, batch_idx):
        """Cross-entropy of the arms."""
        points, labels = batch
        loss = nn.functional.cross_entropy(self.net(points), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        """Logs val_loss and val_accuracy."""
        points, labels = batch
        logits = self.net(points)
        self.accuracy(logits, labels)
        self.log("val_accuracy", self.accuracy)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels))

    def configure_optimizers(self):
        """AdamW whose learning rate rises over the first twentieth of the steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        warm_up = max(1, int(self.trainer.estimated_stepping_batches) // 20)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


if __name__ == "__main__":
    L.Trainer(max_epochs=5).fit(LitModel(), Spirals())
