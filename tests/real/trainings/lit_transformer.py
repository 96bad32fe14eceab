"""Lightning's own transformer demo, unchanged, on the text of Python's standard library, with a validation step."""

import inspect
import pydoc
import tempfile
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.demos.transformer import LightningTransformer, WikiText2
from lit_autoencoder import fit
from torch.utils.data import DataLoader, random_split


class Text(L.LightningDataModule):
    def __init__(self, batch_size=16):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "wikitext-2.txt").write_text(inspect.getsource(pydoc))
            data = WikiText2(Path(folder), download=False)
        self.train, self.val = random_split(data, [len(data) - 32, 32], torch.Generator().manual_seed(0))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=32)


class Validated(LightningTransformer):
    def prepare_data(self):
        """The demo would fetch its text here."""

    def loss(self, batch):
        inputs, target = batch
        return torch.nn.functional.nll_loss(self(inputs, target), target.view(-1))

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


class AtRate(Validated):
    def __init__(self, lr):
        super().__init__(vocab_size=8192)
        self.lr = lr

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=self.lr)


def train(batch_size, lr, report):
    fit(AtRate(lr), Text(batch_size), report)


# For batchtune:
def make():
    return Validated(vocab_size=8192), Text()
