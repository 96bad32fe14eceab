"""Memory that CUDA kernels take for themselves while they run: formulas from PyTorch's own sources.

A dispatch mode sees results only. These are the operators of usual models whose scratch is not small beside their
results; convolutions' (cuDNN chooses by algorithm) is in `overheads` instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from batchtune.estimate.allocator import round_up

aten = torch.ops.aten
_FLOAT, _LONG = 4, 8


def scratch_bytes(func: Any, args: Any, kwargs: Any, out: Any) -> int:  # noqa: ARG001 - the formulas' common signature
    """Bytes that the CUDA kernel of `func` allocates beside its results and frees before it returns."""
    formula = _FORMULAS.get(func)
    return 0 if formula is None else formula(args)


def _flash_backward(args: Any) -> int:
    """mha_bwd in flash_attn/flash_api.cpp: dq in float, and softmax's row sums, lengths rounded to 128."""
    query: Tensor = args[1]
    batch, heads, length, head = query.shape
    rows: int = batch * heads * round_up(length, 128)
    return rows * (round_up(head, 32) + 1) * _FLOAT


def _efficient_backward(args: Any) -> int:
    """_efficient_attention_backward in attention_backward.cu: row sums; half types gather dq in float as well."""
    query: Tensor = args[1]
    batch, heads, length, head = query.shape
    rows = batch * heads * round_up(length, 32)
    gathered = 0 if query.dtype == torch.float32 else round_up(head, 32)
    return rows * (gathered + 1) * _FLOAT


def _embedding_backward(args: Any) -> int:
    """embedding_backward_cuda_kernel in EmbeddingBackwardKernel.cu: indices sorted with their places, and partial sums.

    Keys and values go in and come out of a radix sort, whose own buffers are as large again; partial sums are kept in
    float for every tenth index. Up to 3,072 indices are not sorted; that little is not worth an exception.
    """
    gradient, indices = args[0], args[1]
    count: int = indices.numel()
    width: int = gradient.shape[-1]
    return count * _LONG * 6 + math.ceil(count / 10) * width * _FLOAT


def _sorted_indices(args: Any) -> int:
    """index_put_with_sort_kernel in Indexing.cu: linear indices and places, sorted with buffers of the same size."""
    accumulate = len(args) > 3 and args[3]  # noqa: PLR2004 - self, indices, values, accumulate
    if not accumulate:
        return 0
    count: int = max((index.numel() for index in args[1] if index is not None), default=0)
    return count * _LONG * 6


_FORMULAS: dict[Any, Callable[[Any], int]] = {
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,  # noqa: SLF001
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,  # noqa: SLF001
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.index_put.default: _sorted_indices,
    aten.index_put_.default: _sorted_indices,
    aten._index_put_impl_.default: _sorted_indices,
}
