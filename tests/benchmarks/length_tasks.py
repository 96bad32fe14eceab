"""Trainings on inputs of many lengths, small in the host's time and large on a card; by `length_tasks.py:NAME`.

Batches are zeros that cost the host nothing: nobody writes to them, and a card that pins them needs no copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, WORDS = 256, 4, 4096
Length = int | tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A task, the lengths to probe it at and the precision."""

    build: Callable[[], nn.Module]
    make_batch: Callable[[int, Length], object]
    lengths: tuple[Length, ...]
    precision: str = "bf16"

    def source(self) -> SimpleNamespace:
        """The functions that a user writes."""
        return SimpleNamespace(
            build_model=self.build, make_batch=self.make_batch, compute_loss=lambda model, batch: model(*batch)
        )


def _layers(count: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, count, enable_nested_tensor=False)


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    if torch.cuda.is_initialized():
        return torch.empty(shape, dtype=dtype, pin_memory=True)  # the fake card's are zeros as they come
    return torch.zeros(shape, dtype=dtype)


def _words(*shape: int) -> Tensor:
    return _zeros(*shape, dtype=torch.long)


class Gpt(nn.Module):
    """Causal attention without its matrices, and the loss of every next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(_Block() for _ in range(4))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.project(self.before(hidden)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.wide(self.after(hidden))


class Bert(nn.Module):
    """Attention with a mask of padding, as matrices; the loss of a seventh of the words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers, self.head = nn.Embedding(WORDS, WIDTH), _layers(4), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, padded: Tensor) -> Tensor:
        hidden = self.layers(self.embedding(words), src_key_padding_mask=padded)[:, ::7]
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), words[:, ::7].flatten())


class T5(nn.Module):
    """An encoder of the source and a decoder of the target."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.body = nn.Transformer(WIDTH, HEADS, 3, 3, 4 * WIDTH, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        hidden = self.body(self.embedding(source), self.embedding(target), tgt_mask=mask, tgt_is_causal=True)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), target.flatten())


class Conformer(nn.Module):
    """Speech: frames halved twice by convolutions, attention and depthwise convolutions in turn, then CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.halved = nn.Sequential(nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU())
        self.enter, self.head = nn.Linear(32 * 20, WIDTH), nn.Linear(WIDTH, 64)
        self.layers = nn.ModuleList(_layers(1) for _ in range(3))
        self.depthwise = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(WIDTH, 2 * WIDTH, 1),
                nn.GLU(1),
                nn.Conv1d(WIDTH, WIDTH, 31, padding=15, groups=WIDTH),
                nn.BatchNorm1d(WIDTH),
                nn.SiLU(),
                nn.Conv1d(WIDTH, WIDTH, 1),
            )
            for _ in range(3)
        )

    def forward(self, frames: Tensor, text: Tensor) -> Tensor:
        hidden = self.enter(self.halved(frames[:, None]).transpose(1, 2).flatten(2))
        for layer, depthwise in zip(self.layers, self.depthwise, strict=True):
            hidden = layer(hidden)
            hidden = hidden + depthwise(hidden.transpose(1, 2)).transpose(1, 2)
        heard = self.head(hidden).float().log_softmax(-1).transpose(0, 1)
        count, size = heard.shape[:2]
        return functional.ctc_loss(heard, text, (count,) * size, (text.shape[1],) * size)


class Vit(nn.Module):
    """Patches of pictures of any size, with positions that are scaled to it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.layers, self.head = nn.Conv2d(3, WIDTH, 16, 16), _layers(4), nn.Linear(WIDTH, 1000)
        self.positions = nn.Parameter(torch.zeros(1, WIDTH, 14, 14))

    def forward(self, pictures: Tensor, classes: Tensor) -> Tensor:
        patches = self.patches(pictures)
        positions = functional.interpolate(self.positions, patches.shape[-2:], mode="bilinear")
        hidden = self.layers((patches + positions).flatten(2).transpose(1, 2))
        return functional.cross_entropy(self.head(hidden.mean(1)), classes)


def _twice(before: int, after: int) -> nn.Sequential:
    parts = (
        (nn.Conv2d(each, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()) for each in (before, after)
    )
    return nn.Sequential(*itertools.chain(*parts))


class UNet(nn.Module):
    """Four halvings down, as many doublings up, and a class for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        widths = (32, 64, 128, 256)
        self.down = nn.ModuleList(_twice(before, after) for before, after in itertools.pairwise((3, *widths)))
        pairs = list(itertools.pairwise(widths[::-1]))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(before, after, 2, 2) for before, after in pairs)
        self.up = nn.ModuleList(_twice(2 * after, after) for _, after in pairs)
        self.head = nn.Conv2d(widths[0], 8, 1)

    def forward(self, pictures: Tensor, classes: Tensor) -> Tensor:
        hidden, kept = pictures, []
        for number, block in enumerate(self.down):
            hidden = block(functional.max_pool2d(hidden, 2) if number else hidden)
            kept.append(hidden)
        for grow, block, beside in zip(self.grow, self.up, kept[-2::-1], strict=True):
            hidden = block(torch.cat([grow(hidden), beside], 1))
        return functional.cross_entropy(self.head(hidden), classes)


class Detector(nn.Module):
    """A pyramid of features with one head for classes and boxes at every place of every level."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128, 256, 256)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
            for before, after in itertools.pairwise(widths)
        )
        self.lateral = nn.ModuleList(nn.Conv2d(width, 64, 1) for width in widths[-3:])
        self.head = nn.Sequential(nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU(), nn.Conv2d(64, 3 * (20 + 4), 3, 1, 1))

    def forward(self, pictures: Tensor, boxes: Tensor) -> Tensor:
        levels, hidden, above = [], pictures, None
        for stage in self.stages:
            hidden = stage(hidden)
            levels.append(hidden)
        loss = pictures.new_zeros(())
        for lateral, level in zip(self.lateral[::-1], levels[:-4:-1], strict=True):
            here = lateral(level)
            above = here if above is None else here + functional.interpolate(above, here.shape[-2:])
            told = self.head(above).unflatten(1, (3, 24)).float()
            anchors = torch.sigmoid(told[:, :, 20:]).flatten(3).mean(-1)
            apart = (anchors.mean(1)[:, None] - boxes).abs().mean()
            loss = loss + functional.softplus(told[:, :, :20]).mean() + apart
        return loss


class Lstm(nn.Module):
    """A recurrent language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(512, WORDS)
        self.body = nn.LSTM(WIDTH, 512, 2, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.body(self.embedding(words))[0]).flatten(0, 1), words.flatten())


def _picture(size: int, sides: Length) -> Tensor:
    assert isinstance(sides, tuple)
    return _zeros(size, 3, *sides)


TEXT = (128, 256, 384, 512, 768, 1024, 1536, 2048)
PICTURES = ((128, 128), (128, 192), (192, 192), (192, 256), (256, 256), (256, 384), (384, 384), (512, 512))
CASES = {
    "gpt": Case(Gpt, lambda size, length: (_words(size, length),), TEXT),
    "bert": Case(
        Bert,
        lambda size, length: (_words(size, length), _zeros(size, length, dtype=torch.bool)),
        (32, 64, 96, 128, 192, 256, 384, 512),
    ),
    "t5": Case(
        T5,
        lambda size, length: (_words(size, length[0]), _words(size, length[1])),
        ((32, 16), (64, 16), (64, 64), (128, 64), (256, 64), (256, 128), (512, 128), (512, 256)),
    ),
    "conformer": Case(
        Conformer,
        lambda size, length: (_zeros(size, length, 80), torch.ones(size, length // 16, dtype=torch.long)),
        (160, 320, 480, 640, 960, 1280, 1600, 2400),
        "fp32",
    ),
    "vit": Case(Vit, lambda size, sides: (_picture(size, sides), _words(size)), PICTURES),
    "unet": Case(UNet, lambda size, sides: (_picture(size, sides), _words(size, *sides)), PICTURES, "fp32"),
    "detector": Case(Detector, lambda size, sides: (_picture(size, sides), _zeros(size, 50, 4)), PICTURES, "fp32"),
    "lstm": Case(Lstm, lambda size, length: (_words(size, length),), (16, 32, 48, 64, 96, 128, 192, 256)),
}


def __getattr__(name: str) -> SimpleNamespace:
    if name not in CASES:
        raise AttributeError(name)
    return CASES[name].source()
