"""Those that train together, as one of them sees them; a process that trains alone is a group of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

How = Literal["sum", "max", "min", "first"]


class RankLoss(Protocol):
    """The user's loss of one micro-batch; with `synchronize`, its backward pass leaves the ranks' mean gradient."""

    def __call__(self, batch: object, *, synchronize: bool) -> Tensor: ...


class Ranks(Protocol):
    """Those that train together, as one of them sees them; every rank calls each of these methods.

    Attributes:
        rank: its number, from 0.
        world_size: how many they are.
    """

    rank: int
    world_size: int

    def agree(self, go_on: bool) -> bool:
        """Whether every rank says so."""

    def together(self, how: How, value: float) -> float:
        """The sum, the largest or the smallest of the ranks' values, or the first rank's; NaN where a sum has one."""

    def each(self, value: float) -> list[float]:
        """The values of all ranks, in their order."""

    def align(self, model: nn.Module) -> None:
        """Gives every rank the first one's running statistics, such as those of batch norm, as saving would."""

    def squared_norm(self, gradients: Iterable[Tensor]) -> float:
        """Of the mean gradient, which a backward pass has left on all ranks, each a shard of it or all."""

    def squared_norms_apart(self, gradients: Iterable[Tensor]) -> tuple[float, float]:
        """The mean over ranks of their own gradients' squared norms, and that of the mean, which replaces them."""

    def place(self, build: Callable[[], nn.Module]) -> nn.Module:
        """The model, or this rank's shard of it, on the device."""

    def sketch(self, build: Callable[[], nn.Module]) -> nn.Module:
        """The model as an optimizer is to see it: without its values where no rank is to hold them all."""

    def holds_whole(self, model: nn.Module, limit_bytes: int | None) -> bool:
        """Whether a rank may hold all weights with their gradients, as each does unless they are sharded."""

    def loss_of(self, model: nn.Module, loss: Callable[[nn.Module, object], Tensor]) -> RankLoss:
        """The loss of a placed model."""


class Alone:
    """A process that trains by itself: all there is to agree on is its own."""

    rank, world_size = 0, 1

    def agree(self, go_on: bool) -> bool:
        return go_on

    def together(self, how: How, value: float) -> float:  # noqa: ARG002 - of one value all are the same
        return value

    def each(self, value: float) -> list[float]:
        return [value]

    def align(self, model: nn.Module) -> None:
        """Its statistics are those of the model."""

    def squared_norm(self, gradients: Iterable[Tensor]) -> float:
        return sum_of_squares(gradients)

    def squared_norms_apart(self, gradients: Iterable[Tensor]) -> tuple[float, float]:
        both = sum_of_squares(gradients)
        return both, both

    def loss_of(self, model: nn.Module, loss: Callable[[nn.Module, object], Tensor]) -> RankLoss:
        return lambda batch, *, synchronize: loss(model, batch)  # noqa: ARG005 - there is nobody to synchronize with


ALONE = Alone()


def sum_of_squares(gradients: Iterable[Tensor]) -> float:
    """Of all elements; 0 where there are none."""
    norms = [gradient.float().norm() for gradient in gradients]
    return float(torch.stack(norms).square().sum()) if norms else 0.0
