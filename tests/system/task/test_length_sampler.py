"""The sampler under the trainers of other libraries: every sample once an epoch, in batches that fit."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from batchtune import LengthBatchSampler

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
FRONTIER = {8: 16, 16: 7, 32: 3}
LENGTHS = [1 + 7 * index % 32 for index in range(60)]
EPOCHS = 2


def pad(batch):
    return {"ids": pad_sequence([torch.full((LENGTHS[index],), index) for index in batch], batch_first=True)}


class Model(nn.Module):
    """Remembers what it was trained with."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.batches = []

    def forward(self, ids):
        self.batches.append(ids.clone())
        return {"loss": self.weight**2 + 0 * ids.sum()}


def check(batches, sampler):
    """Two epochs with every sample once, in other batches, none larger than measured."""
    shown = [[int(row[0]) for row in batch] for batch in batches]
    assert len(shown) == EPOCHS * len(sampler)
    first, second = shown[: len(sampler)], shown[len(sampler) :]
    for epoch in (first, second):
        assert sorted(index for batch in epoch for index in batch) == list(range(len(LENGTHS)))
    assert first != second
    for batch in batches:
        assert len(batch) <= max(size for edge, size in FRONTIER.items() if edge >= batch.shape[1])


@pytest.fixture
def loader():
    sampler = LengthBatchSampler(LENGTHS, FRONTIER)
    return DataLoader(range(len(LENGTHS)), batch_sampler=sampler, collate_fn=pad)


def test_lightning_trains_on_it(loader, tmp_path):
    lightning = pytest.importorskip("lightning", reason="lightning not installed")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, loader)
    check(module.model.batches, loader.batch_sampler)


def test_the_trainer_of_transformers_trains_on_it(loader, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers not installed")
    pytest.importorskip("accelerate", reason="accelerate not installed")

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return loader

    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = transformers.TrainingArguments(
            tmp_path, num_train_epochs=EPOCHS, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
        )
        Trainer(model, arguments, train_dataset=range(len(LENGTHS))).train()
    check(model.batches, loader.batch_sampler)
