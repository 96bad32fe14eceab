"""What memory inside a kernel is described with: blocks, the order they are taken in, and the GPU they depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, Union

import torch
from torch import Tensor

FLOAT, LONG, INT = 4, 8, 4  # bytes


@dataclass(frozen=True)
class Gpu:
    """What the formulas ask of a GPU.

    Attributes:
        multiprocessors: their number.
        threads: that one multiprocessor holds at a time.
        cublas_bytes: workspace of a cuBLAS handle.
    """

    multiprocessors: int = 108
    threads: int = 2048
    cublas_bytes: int = 8_519_680


Formula = Callable[..., int]  # of a Gpu and lengths


@dataclass(frozen=True)
class Block:
    """Memory of one kernel: a formula and what it is calculated from; 0 bytes are none.

    One that `outlives` its group is given back with the group around it.
    """

    formula: Formula
    lengths: tuple[int, ...]
    outlives: bool = False


@dataclass(frozen=True)
class Held:
    """A result whose memory was taken when it was larger."""

    place: int
    size_bytes: int


# What a kernel allocates, in its order: a block, the place of a result among the operator's results, or a group of
# such, whose blocks are given back when the group is done.
Step: TypeAlias = Union[Block, Held, int, "tuple[Step, ...]"]
Steps: TypeAlias = tuple[Step, ...]
RESULTS = -1  # as a step: all results, in their order


def given(gpu: Gpu, size: int) -> int:  # noqa: ARG001 - a formula's signature
    """A size that is known: the formula of what depends on no kernel."""
    return size


def bytes_of(size: int) -> Block:
    """A block of a size that is known."""
    return Block(given, (size,))


def copy_of(tensor: Tensor, element_bytes: int | None = None) -> Block:
    """A copy of a tensor, in another type where its size is told."""
    return bytes_of(tensor.numel() * (element_bytes or tensor.element_size()))


def contiguous(*tensors: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> tuple[Block, ...]:
    """What `tensor.contiguous()` copies of each: nothing of one that is."""
    return tuple(copy_of(each) for each in tensors if not each.is_contiguous(memory_format=memory_format))
