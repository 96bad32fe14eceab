"""Ten small trainings of many kinds, each a batchtune task, whose learning curves the replay benchmark recorded.

    batchtune tune task=tests/benchmarks/replay_tasks.py:DIGITS_SGD

works with each of them. Targets follow from the baseline's own run by the rule that `objective.target: auto` uses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pydoc_data.topics import topics
from typing import Any

import torch
from replay_networks import Recurrent, TwoEncoders, VisionTransformer, autoencoder
from sklearn.datasets import load_digits, make_classification, make_friedman1
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset, default_collate

Tensors = tuple[Tensor, Tensor]
CONTEXT, SYMBOLS = 8, 32


class WholeBatches(TensorDataset):
    """Samples handed out as whole batches, with no Python for each of them: large batches pay."""

    def __getitems__(self, indices: list[int]) -> list[Tensors]:
        chosen = torch.tensor(indices)
        return [(self.tensors[0][chosen], self.tensors[1][chosen])]


@dataclass(frozen=True, kw_only=True)
class ReplayTask:
    """A task as the contract has it, and what its user runs today.

    Attributes:
        data: inputs and labels of all samples.
        validation_samples: as many of the samples, the first after shuffling, are never trained on.
        model: builds the network.
        loss: of outputs and labels.
        optimizer: of parameters and learning rate.
        baseline_rate: the learning rate people start with; with a batch of 32.
        target: validation loss that counts as solved.
        log10_rates: first and last learning rate of the record.
        whole_batches: the data set hands out batches; otherwise the loader collects sample by sample, as is usual.
        seeds: of the record.
    """

    name: str
    data: Callable[[], Tensors]
    validation_samples: int
    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    baseline_rate: float
    target: float
    log10_rates: tuple[float, float]
    whole_batches: bool = True
    seeds: int = 12

    @cached_property
    def _split(self) -> tuple[TensorDataset, TensorDataset]:
        inputs, labels = self.data()
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
        held_out, rest = order[: self.validation_samples], order[self.validation_samples :]
        kind = WholeBatches if self.whole_batches else TensorDataset
        return kind(inputs[rest], labels[rest]), kind(inputs[held_out], labels[held_out])

    def build_model(self) -> nn.Module:
        return self.model()

    def train_dataset(self) -> TensorDataset:
        return self._split[0]

    def val_dataset(self) -> TensorDataset:
        return self._split[1]

    def collate(self, samples: list[Tensors]) -> Tensors:
        return samples[0] if self.whole_batches else default_collate(samples)

    def make_batch(self, batch_size: int) -> Tensors:
        inputs, labels = self.train_dataset()[torch.arange(batch_size) % len(self.train_dataset())]
        return inputs, labels

    def compute_loss(self, model: nn.Module, batch: Tensors) -> Tensor:
        return self.loss(model(batch[0]), batch[1])

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return self.optimizer(model.parameters(), lr=lr)


def digits(shape: tuple[int, ...]) -> Tensors:
    """1797 images of 8 x 8."""
    found = load_digits()
    return torch.tensor(found.data, dtype=torch.float32).reshape(-1, *shape) / 16, torch.tensor(found.target)


def text() -> Tensors:
    """Windows of CONTEXT characters of Python's own help texts, and the character that follows."""
    help_text = "".join(topics[key] for key in sorted(topics)).lower()[:120_000]
    alphabet = {letter: index for index, letter in enumerate(" abcdefghijklmnopqrstuvwxyz.,'\n")}
    codes = torch.tensor([alphabet.get(letter, SYMBOLS - 1) for letter in help_text])
    windows = codes.unfold(0, CONTEXT + 1, 3)
    return windows[:, :CONTEXT].contiguous(), windows[:, CONTEXT].contiguous()


def table() -> Tensors:
    """12,000 made-up rows of 24 numbers in 5 classes, of which 3 % are mislabelled."""
    rows, classes = make_classification(
        n_samples=12_000,
        n_features=24,
        n_informative=10,
        n_redundant=6,
        n_classes=5,
        n_clusters_per_class=3,
        flip_y=0.03,
        random_state=0,
    )
    return torch.tensor((rows / rows.std(axis=0)), dtype=torch.float32), torch.tensor(classes)


def friedman() -> Tensors:
    """Friedman's first regression problem with as much noise as is usual, 10,000 samples."""
    rows, values = make_friedman1(n_samples=10_000, noise=1.0, random_state=0)
    scaled = (values - values.mean()) / values.std()
    return torch.tensor(2 * rows - 1, dtype=torch.float32), torch.tensor(scaled, dtype=torch.float32)


def halves() -> Tensors:
    """The digits as rows, and nothing to tell of them: their upper halves are to find their lower ones."""
    images, _ = digits((64,))
    return images, torch.zeros(len(images))


def signals() -> Tensors:
    """8,000 made-up signals of 48 values, three waves and noise each, that are to be made again."""
    draw = torch.Generator().manual_seed(0)
    sizes, phases = torch.rand(2, 8000, 3, 1, generator=draw)
    waves = sizes * torch.sin(torch.tensor([1.0, 2.0, 4.0])[:, None] * torch.linspace(0, 6.3, 48) + 6.3 * phases)
    found = waves.sum(dim=1) + 0.05 * torch.randn(8000, 48, generator=draw)
    return found, found


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def mlp(*widths: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths[:-1]):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))

    return build


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def character_model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(SYMBOLS, 8), nn.Flatten(), nn.Linear(8 * CONTEXT, 64), nn.ReLU(), nn.Linear(64, SYMBOLS)
    )


def pairing(likeness: Tensor, _: Tensor) -> Tensor:
    """Cross-entropy of which halves belong together, in both directions; its level depends on the batch size."""
    own = torch.arange(likeness.shape[-1])
    return (functional.cross_entropy(likeness, own) + functional.cross_entropy(likeness.T, own)) / 2


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.mse_loss(outputs.squeeze(-1), labels)


DIGITS_SGD = ReplayTask(
    name="digits_sgd",
    data=lambda: digits((64,)),
    validation_samples=360,
    model=mlp(64, 64, 10),
    loss=functional.cross_entropy,
    optimizer=momentum,
    baseline_rate=0.01,
    target=0.12,
    log10_rates=(-2.75, 0.25),
)
DIGITS_ADAM = ReplayTask(
    name="digits_adam",
    whole_batches=False,
    data=lambda: digits((64,)),
    validation_samples=360,
    model=mlp(64, 64, 10),
    loss=functional.cross_entropy,
    optimizer=torch.optim.Adam,
    baseline_rate=1e-3,
    target=0.12,
    log10_rates=(-3.5, -0.5),
)
DIGITS_CONV = ReplayTask(
    name="digits_conv",
    data=lambda: digits((1, 8, 8)),
    validation_samples=360,
    model=convolutions,
    loss=functional.cross_entropy,
    optimizer=momentum,
    baseline_rate=0.01,
    target=0.2,
    log10_rates=(-2.75, 0.25),
)
CHARLM = ReplayTask(
    name="charlm",
    data=text,
    validation_samples=1000,
    model=character_model,
    loss=functional.cross_entropy,
    optimizer=torch.optim.AdamW,
    baseline_rate=1e-3,
    target=2.1,
    log10_rates=(-3.5, -0.5),
)
TABLE = ReplayTask(
    name="table",
    whole_batches=False,
    data=table,
    validation_samples=1000,
    model=mlp(24, 48, 5),
    loss=functional.cross_entropy,
    optimizer=torch.optim.AdamW,
    baseline_rate=1e-3,
    target=0.85,
    log10_rates=(-3.5, -0.5),
)
REGRESSION = ReplayTask(
    name="regression",
    data=friedman,
    validation_samples=1000,
    model=mlp(10, 64, 1),
    loss=squared_error,
    optimizer=torch.optim.SGD,
    baseline_rate=0.01,
    target=0.11,
    log10_rates=(-2.25, 0.5),
)
GRU = ReplayTask(
    name="gru",
    data=text,
    validation_samples=1000,
    model=lambda: Recurrent(SYMBOLS, 24),
    loss=functional.cross_entropy,
    optimizer=torch.optim.Adam,
    baseline_rate=1e-3,
    target=2.3,
    log10_rates=(-3.25, -0.5),
    seeds=8,
)
VIT = ReplayTask(
    name="vit",
    data=lambda: digits((1, 8, 8)),
    validation_samples=360,
    model=VisionTransformer,
    loss=functional.cross_entropy,
    optimizer=torch.optim.AdamW,
    baseline_rate=1e-3,
    target=0.25,
    log10_rates=(-3.5, -0.5),
    seeds=8,
)
CONTRASTIVE = ReplayTask(
    name="contrastive",
    whole_batches=False,
    data=halves,
    validation_samples=360,
    model=lambda: TwoEncoders(64),
    loss=pairing,
    optimizer=torch.optim.Adam,
    baseline_rate=1e-3,
    target=3.1,
    log10_rates=(-3.5, -0.5),
)
AUTOENCODER = ReplayTask(
    name="autoencoder",
    data=signals,
    validation_samples=1000,
    model=lambda: autoencoder(48),
    loss=functional.mse_loss,
    optimizer=torch.optim.Adam,
    baseline_rate=1e-3,
    target=0.009,
    log10_rates=(-3.5, -0.5),
)
LOOKED_AT = (DIGITS_SGD, DIGITS_ADAM, DIGITS_CONV, CHARLM, TABLE, REGRESSION)  # while the study was made
TASKS = {each.name: each for each in (*LOOKED_AT, GRU, VIT, CONTRASTIVE, AUTOENCODER)}
