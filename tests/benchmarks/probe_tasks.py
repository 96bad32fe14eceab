"""Models whose memory takes different shapes, each with a limit: eight that a CPU fills in a moment, three for GPUs.

Every class is a task (`probe_tasks.py:Mlp`). None imports batchtune, so that all methods train the very same code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

MIB = 1 << 20


class Task:
    """What the tasks share: plain AdamW, and a loss against made-up classes.

    Attributes:
        limit_mib: the memory limit on a CPU.
    """

    limit_mib = 0
    classes = 10

    def build_model(self) -> nn.Module:
        raise NotImplementedError

    def inputs(self, batch_size: int) -> Tensor:
        raise NotImplementedError

    def make_batch(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return self.inputs(batch_size), torch.zeros(batch_size, dtype=torch.long)

    def compute_loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=lr)


class Mlp(Task):
    """Memory grows with the batch in a straight line."""

    limit_mib = 310

    def build_model(self) -> nn.Module:
        hidden = [layer for _ in range(24) for layer in (nn.Linear(128, 128), nn.LayerNorm(128), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(128, self.classes))

    def inputs(self, batch_size: int) -> Tensor:
        return torch.randn(batch_size, 128)


class Transformer(Task):
    """A straight line with a large offset: the weights of the vocabulary, their gradients and moments."""

    limit_mib = 376
    vocabulary, length, width, heads, layers = 40_000, 32, 64, 4, 2

    def build_model(self) -> nn.Module:
        return _Language(self.vocabulary, self.width, self.heads, self.layers)

    def make_batch(self, batch_size: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(self.vocabulary, (batch_size, self.length + 1))
        return tokens[:, :-1], tokens[:, -1]


class _Language(nn.Module):
    """Tells the token after the last one; with `every_token`, after each."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, *, every_token: bool = False) -> None:
        super().__init__()
        self.every_token = every_token
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        states: Tensor = self.layers(self.embedding(tokens), mask=mask, is_causal=True)
        output: Tensor = self.head(states if self.every_token else states[:, -1])
        return output


class ConvNet(Task):
    """Convolutions take workspaces besides their activations, and scratch that nobody sees."""

    limit_mib = 320

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(32, self.classes),
        )  # fmt: skip

    def inputs(self, batch_size: int) -> Tensor:
        return torch.randn(batch_size, 3, 32, 32)


class Contrastive(Task):
    """Memory grows with the square of the batch: every sample is compared with every other."""

    limit_mib = 370

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))

    def make_batch(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch_size, 64), torch.randn(batch_size, 64)

    def compute_loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        left, right = (functional.normalize(model(view), dim=1) for view in batch)
        similarity = left @ right.T / 0.1
        target = torch.arange(len(left), device=left.device)
        return (functional.cross_entropy(similarity, target) + functional.cross_entropy(similarity.T, target)) / 2


class Embedding(Task):
    """The optimizer's step has the highest peak until batches are large: attempts below tell nothing of the limit."""

    limit_mib = 440
    rows, width, length = 200_000, 64, 32

    def build_model(self) -> nn.Module:
        table = nn.Embedding(self.rows, self.width)
        return nn.Sequential(table, nn.Linear(self.width, 64), nn.GELU(), _Mean(), nn.Linear(64, self.classes))

    def inputs(self, batch_size: int) -> Tensor:
        return torch.randint(self.rows, (batch_size, self.length))


class _Mean(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values.mean(1)


class Recurrent(Task):
    """An LSTM keeps every step of a sequence, in kernels of its own."""

    limit_mib = 320
    length = 40

    def build_model(self) -> nn.Module:
        return _Lstm(self.classes)

    def inputs(self, batch_size: int) -> Tensor:
        return torch.randn(batch_size, self.length, 16)


class _Lstm(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 48, batch_first=True)
        self.head = nn.Linear(48, classes)

    def forward(self, sequence: Tensor) -> Tensor:
        output: Tensor = self.head(self.lstm(sequence)[0][:, -1])
        return output


class Jump(Task):
    """Memory comes in stairs: a batch is filled up to a multiple of 256, as padded or bucketed kernels do."""

    limit_mib = 320
    stair = 256

    def build_model(self) -> nn.Module:
        hidden = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.Tanh())]
        return nn.Sequential(*hidden, nn.Linear(128, self.classes))

    def inputs(self, batch_size: int) -> Tensor:
        return torch.randn(batch_size, 16, 128)

    def compute_loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        values, labels = batch
        filling = -len(values) % self.stair
        full = functional.pad(values, (0, 0, 0, 0, 0, filling))
        return functional.cross_entropy(model(full)[: len(values)].mean(1), labels)


class BatchNorm(ConvNet):
    """Batch normalisation of one value a channel rejects a batch of one sample."""

    limit_mib = 280

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 24, 3, stride=2), nn.BatchNorm2d(24), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(24, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, self.classes),
        )  # fmt: skip


class Gpt2(Transformer):
    """As large as GPT-2 small, 124 million weights and the head's own 39: 12 layers, 1024 tokens."""

    vocabulary, length, width, heads, layers = 50_257, 1024, 768, 12, 12

    def build_model(self) -> nn.Module:
        return _Language(self.vocabulary, self.width, self.heads, self.layers, every_token=True)

    def make_batch(self, batch_size: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(self.vocabulary, (batch_size, self.length + 1))
        return tokens[:, :-1], tokens[:, 1:]

    def compute_loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


class ResNet50(Task):
    """Bottleneck blocks 3, 4, 6, 3 as in ResNet-50, at 224 x 224."""

    classes = 1000

    def build_model(self) -> nn.Module:
        layers: list[nn.Module] = [*_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        channels = 64
        for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for block in range(blocks):
                layers.append(_Bottleneck(channels, width, stride if block == 0 else 1))
                channels = 4 * width
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, self.classes))

    def inputs(self, batch_size: int) -> Tensor:
        return torch.randn(batch_size, 3, 224, 224)


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(channels, width, 1), nn.ReLU(),
            *_convolution(width, width, 3, stride), nn.ReLU(),
            *_convolution(width, 4 * width, 1),
        )  # fmt: skip
        same = channels == 4 * width and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(channels, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def _convolution(channels: int, width: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(channels, width, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(width)


class WideContrastive(Contrastive):
    """The contrastive model with an encoder that a GPU notices."""

    def build_model(self) -> nn.Module:
        hidden = [layer for _ in range(4) for layer in (nn.Linear(2048, 2048), nn.GELU())]
        return nn.Sequential(nn.Linear(64, 2048), *hidden, nn.Linear(2048, 256))


ON_CPU = (Mlp, Transformer, ConvNet, Contrastive, Embedding, Recurrent, Jump, BatchNorm)
ON_GPU = (Gpt2, ResNet50, WideContrastive)
TASKS: dict[str, type[Task]] = {each.__name__: each for each in (*ON_CPU, *ON_GPU)}
