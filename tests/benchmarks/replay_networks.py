"""The larger networks of the recorded tasks: a recurrent one, a transformer, two encoders and an autoencoder.

They are written out where torch's own layers do not train side by side as one stacked model (torch.func).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Recurrent(nn.Module):
    """A gated recurrent unit over embedded symbols; its last state says which symbol follows."""

    def __init__(self, symbols: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.given, self.kept = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, symbols)

    def forward(self, symbols: Tensor) -> Tensor:
        given = self.given(self.embedding(symbols))
        state = torch.zeros_like(given[:, 0].chunk(3, dim=-1)[0])
        for step in range(symbols.shape[1]):
            reset, update, new = given[:, step].chunk(3, dim=-1)
            kept_reset, kept_update, kept_new = self.kept(state).chunk(3, dim=-1)
            new = torch.tanh(new + torch.sigmoid(reset + kept_reset) * kept_new)
            state = torch.lerp(new, state, torch.sigmoid(update + kept_update))
        return self.head(state)


class Block(nn.Module):
    """A transformer's block with its norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_feedforward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mixed = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.feedforward = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        parts = self.attention(self.before_attention(tokens)).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = (part.transpose(-3, -2) for part in parts.unbind(-3))
        weights = (queries @ keys.transpose(-2, -1) / queries.shape[-1] ** 0.5).softmax(-1)
        tokens = tokens + self.mixed((weights @ values).transpose(-3, -2).flatten(-2))
        return tokens + self.feedforward(self.before_feedforward(tokens))


class VisionTransformer(nn.Module):
    """Patches of 2 x 2 of images of 8 x 8 as tokens, whose mean is classified."""

    def __init__(self, width: int = 16, blocks: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.places = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(Block(width, 2) for _ in range(blocks)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(-2).transpose(-2, -1) + self.places
        return self.head(self.blocks(tokens).mean(dim=-2))


class TwoEncoders(nn.Module):
    """An encoder for each half of a sample; which halves belong together is told by how alike their codes are."""

    def __init__(self, features: int, width: int = 64, code: int = 16) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(
            nn.Sequential(nn.Linear(features // 2, width), nn.ReLU(), nn.Linear(width, code)) for _ in range(2)
        )
        self.log_sharpness = nn.Parameter(torch.tensor(2.0))

    def forward(self, samples: Tensor) -> Tensor:
        halves = samples.chunk(2, dim=-1)
        one, other = (
            functional.normalize(encode(half), dim=-1) for encode, half in zip(self.encoders, halves, strict=True)
        )
        return self.log_sharpness.exp() * one @ other.transpose(-2, -1)


def autoencoder(features: int, width: int = 48, code: int = 6) -> nn.Module:
    """Squeezes samples through a narrow code and makes them again."""
    return nn.Sequential(
        nn.Linear(features, width),
        nn.Tanh(),
        nn.Linear(width, code),
        nn.Linear(code, width),
        nn.Tanh(),
        nn.Linear(width, features),
    )
