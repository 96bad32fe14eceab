"""Memory that CUDA kernels and libraries take for themselves: formulas from PyTorch's own sources.

A dispatch mode sees results only. These are the operators of usual models whose scratch is not small beside their
results; cuDNN's workspace, which it chooses by algorithm, is in `overheads` instead. What a kernel takes may jump with
the batch, so a block is kept as its formula and the lengths that it is calculated from, polynomials of the batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from batchtune.estimate.memory.scratch.attention import ATTENTION
from batchtune.estimate.memory.scratch.blocks import RESULTS, Block, Gpu, Held, Steps, bytes_of
from batchtune.estimate.memory.scratch.convolutions import CONVOLUTIONS
from batchtune.estimate.memory.scratch.indices import INDICES
from batchtune.estimate.memory.scratch.losses import LOSSES
from batchtune.estimate.memory.scratch.normalizations import NORMALIZATIONS
from batchtune.estimate.memory.scratch.reductions import REDUCTIONS

__all__ = ["RESULTS", "Block", "Gpu", "Held", "Steps", "inside", "workspaces"]
aten = torch.ops.aten
_WORKSPACES_BY_PRODUCT = (2, 15)
_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
_INSIDE: dict[Any, Callable[[Any], Steps]] = {
    **REDUCTIONS,
    **NORMALIZATIONS,
    **ATTENTION,
    **INDICES,
    **CONVOLUTIONS,
    **LOSSES,
    aten.native_dropout.default: lambda _: (1, 0),  # native_dropout_cuda in Dropout.cu makes the mask first
}


def inside(func: Any, args: Any) -> Steps:
    """What the CUDA kernel of `func` allocates, its results among it; results that are not are not on the device."""
    if func in _PRODUCTS and not _keeps_workspaces():
        return (RESULTS, (_LT if _by_lt(func, args) else _CUBLAS,))
    find = _INSIDE.get(func)
    return (RESULTS,) if find is None else find(args)


def workspaces(func: Any, args: Any) -> dict[str, Block]:
    """The workspaces by library that a matrix product's thread takes at its first one, and never gives back.

    CUDABlas.cpp and CublasHandlePool.cpp: each thread has a handle of its own, with 8,519,680 bytes, 32 MiB on
    compute capability 9.0; cuBLASLt takes 1 MiB more.
    """
    if func not in _PRODUCTS or not _keeps_workspaces():
        return {}
    return {"cublas": _CUBLAS} | ({"cublaslt": _LT} if _by_lt(func, args) else {})


def _keeps_workspaces() -> bool:
    """Not from torch 2.15 on, where each product takes its own for its time (pytorch#194311)."""
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    return release < _WORKSPACES_BY_PRODUCT or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"


def _by_lt(func: Any, args: Any) -> bool:
    """`addmm` with a bias of one dimension goes to cuBLASLt."""
    return func is aten.addmm.default and args[0].dim() == 1 and min(args[1].shape) > 1 and min(args[2].shape) > 1


def _cublas(gpu: Gpu) -> int:
    return gpu.cublas_bytes


_CUBLAS, _LT = Block(_cublas, ()), bytes_of(1 << 20)
