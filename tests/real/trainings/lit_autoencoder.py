"""Lightning's autoencoder example, on scikit-learn's digits: nothing in it is batchtune's."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split


class LitAutoEncoder(L.LightningModule):
    def __init__(self, hidden_dim=64, learning_rate=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(8 * 8, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 6))
        self.decoder = nn.Sequential(nn.Linear(6, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 8 * 8))

    def training_step(self, batch, batch_idx):
        return self._common_step(batch, batch_idx, "train")

    def validation_step(self, batch, batch_idx):
        self._common_step(batch, batch_idx, "val")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)

    def loss(self, batch):
        x = batch[0].view(batch[0].size(0), -1)
        return F.mse_loss(self.decoder(self.encoder(x)), x)

    def _common_step(self, batch, batch_idx, stage):
        loss = self.loss(batch)
        self.log(f"{stage}_loss", loss, on_step=True, on_epoch=True)
        return loss


class MyDataModule(L.LightningDataModule):
    def __init__(self, batch_size=32):
        super().__init__()
        images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
        dataset = TensorDataset(images, torch.tensor(load_digits().target))
        self.train, self.val = random_split(dataset, [1500, 297], torch.Generator().manual_seed(42))
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)


class Report(L.Callback):
    def __init__(self, report):
        self.report = report

    def on_train_batch_end(self, trainer, module, *_):
        trainer.should_stop = self.report(module)


def fit(model, data, report, epochs=200, **arguments):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    callbacks = [Report(report)]
    L.Trainer(max_epochs=epochs, limit_val_batches=0, callbacks=callbacks, **quiet, **arguments).fit(model, data)


def train(batch_size, lr, report):
    fit(LitAutoEncoder(learning_rate=lr), MyDataModule(batch_size), report)
