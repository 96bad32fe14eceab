"""Small models of many kinds, written in plain PyTorch, with their batches, losses and optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY, LENGTH = 4096, 128


def mlp(*, inplace: bool = False, dropout: float = 0.0) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(512, 2048)]
    for _ in range(4):
        layers += [nn.ReLU(inplace=inplace), nn.Dropout(dropout), nn.Linear(2048, 2048)]
    return nn.Sequential(*layers, nn.ReLU(inplace=inplace), nn.Linear(2048, 1000))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.first(x)).split(width, 2)
        query, key, value = (each.view(batch, length, self.heads, -1).transpose(1, 2) for each in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    def __init__(self, width: int = 256, layers: int = 4, *, checkpointed: bool = False, tied: bool = True) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


class Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, after, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        same = before == after and stride == 1
        self.short = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.short(x), inplace=True)


def resnet() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    before = 64
    for width, depth, stride in ((64, 2, 1), (128, 2, 2), (256, 2, 2)):
        for number in range(depth):
            layers.append(Bottleneck(before, width, stride if number == 0 else 1))
            before = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))


class UNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down, self.deep = self._pair(3, width), self._pair(width, 2 * width)
        self.up, self.join = nn.ConvTranspose2d(2 * width, width, 2, 2), self._pair(2 * width, width)
        self.out = nn.Conv2d(width, 10, 1)

    @staticmethod
    def _pair(before: int, after: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1),
            nn.GroupNorm(4, after),
            nn.SiLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1),
            nn.GroupNorm(4, after),
            nn.SiLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        high = self.down(x)
        low = self.up(self.deep(functional.max_pool2d(high, 2)))
        return self.out(self.join(torch.cat([low, high], 1))).mean((2, 3))


class DenseNet(nn.Module):
    def __init__(self, growth: int = 16, layers: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 2 * growth, 3, padding=1)
        widths = [(2 + number) * growth for number in range(layers)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(w), nn.ReLU(inplace=True), nn.Conv2d(w, growth, 3, padding=1)) for w in widths
        )
        self.out = nn.Linear((2 + layers) * growth, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return self.out(x.mean((2, 3)))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.cells = nn.Embedding(VOCABULARY, 128), nn.LSTM(128, 256, 2, batch_first=True)
        self.out = nn.Linear(256, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.cells(self.tokens(ids))[0])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 256)
        layer = nn.TransformerEncoderLayer(256, 8, 1024, 0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.out = nn.Linear(256, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.layers(self.tokens(ids)))


class Contrast(nn.Module):
    """Logits between all pairs of a batch: quadratic in its size."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(512, 256), nn.Linear(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        return 10 * functional.normalize(self.left(x)) @ functional.normalize(self.right(x)).t()


class FanIn(nn.Module):
    """One tensor used six times: its gradients are added up in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(512, 1024), nn.Linear(1024, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        total = torch.zeros_like(x)
        for weight in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
            total = torch.add(total, x, alpha=weight) * 0.9
        return self.last(total)


def vectors(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 512), torch.randint(0, 1000, (size,))


def pairs(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 512), torch.arange(size)


def images(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 64, 64), torch.randint(0, 10, (size,))


def tokens(size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, VOCABULARY, (size, LENGTH)), torch.randint(0, VOCABULARY, (size, LENGTH))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out = model(batch[0])
    return functional.cross_entropy(out.reshape(-1, out.shape[-1]), batch[1].reshape(-1))


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def fused(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def foreach(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, foreach=True)


class Ema(torch.optim.AdamW):
    """AdamW that keeps a moving average of the weights."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(model.parameters(), lr=lr)
        self._model, self._average = model, torch.optim.swa_utils.AveragedModel(model)

    def step(self, closure: Any = None) -> Any:
        done = super().step(closure)
        self._average.update_parameters(self._model)
        return done
