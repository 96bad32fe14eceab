"""Memory inside embeddings, scattered writes and cumulative sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from batchtune.estimate.scratch.blocks import FLOAT, LONG, RESULTS, Block, Gpu, Steps, bytes_of, contiguous, copy_of

aten = torch.ops.aten


def _embedding(args: Any) -> Steps:
    """embedding_symint in Embedding.cpp: `indices.reshape(-1)`, a copy where they are not contiguous."""
    indices: Tensor = args[1]
    if indices.dim() <= 1 or indices.is_contiguous():
        return (RESULTS,)
    return ((copy_of(indices), RESULTS),)


_UNSORTED_INDICES = 3072  # in embedding_dense_backward_cuda, up to which nothing is sorted
_ROWS_PER_THREAD = 10  # NROWS_PER_THREAD


def _embedding_backward(args: Any) -> Steps:
    """embedding_dense_backward_cuda in Embedding.cu, and its kernel in EmbeddingBackwardKernel.cu.

    Indices sorted with their places, by a radix sort that takes both again; then segments of equal indices, cut at
    every tenth, and a row of sums in float for each. Gradient and indices are made contiguous before.
    """
    gradient, indices, weights = args[0], args[1], args[2]
    sorting = (indices.numel(), indices.element_size())
    rows = (*sorting, weights)
    ids = Block(_sorted, sorting)
    before: Steps = (*contiguous(gradient, indices), ids, ids, (ids, Block(_radix_sort, sorting)))
    segments, one = Block(_segments, rows), Block(_one, sorting)
    partial: Steps = (Block(_partial_segments, rows), Block(_partial_sums, (*rows, gradient.shape[-1])))
    return ((*before, RESULTS, ids, one, segments, segments, one, *partial),)


def _sorted(gpu: Gpu, count: int, size: int) -> int:  # noqa: ARG001
    return count * size if count > _UNSORTED_INDICES else 0


def _one(gpu: Gpu, count: int, size: int) -> int:  # noqa: ARG001
    return size if count > _UNSORTED_INDICES else 0


def _radix_sort(gpu: Gpu, count: int, size: int) -> int:
    return 2 * _sorted(gpu, count, size) + (20 << 10) * (count > _UNSORTED_INDICES)


def _segments(gpu: Gpu, count: int, size: int, weights: int) -> int:  # noqa: ARG001
    return min(count, weights) * size if count > _UNSORTED_INDICES else 0


def _partial_segments(gpu: Gpu, count: int, size: int, weights: int) -> int:  # noqa: ARG001
    return (count // _ROWS_PER_THREAD + min(count, weights)) * size if count > _UNSORTED_INDICES else 0


def _partial_sums(gpu: Gpu, count: int, size: int, weights: int, width: int) -> int:
    return _partial_segments(gpu, count, size, weights) // size * width * FLOAT


def _sorted_indices(args: Any) -> Steps:
    """index_put_with_sort_kernel in Indexing.cu: linear indices and places, sorted with buffers of the same size."""
    accumulate = len(args) > 3 and args[3]  # noqa: PLR2004 - self, indices, values, accumulate
    if not accumulate:
        return (RESULTS,)
    count: int = max((index.numel() for index in args[1] if index is not None), default=0)
    return (RESULTS, (bytes_of(count * LONG * 6),))


def _cumulative(args: Any) -> Steps:
    """cumsum_cuda_kernel in ScanKernels.cpp: whole numbers and bools are cast to 64 bits before (ReduceOps.cpp)."""
    tensor: Tensor = args[0]
    cast = not tensor.dtype.is_floating_point and tensor.dtype != torch.int64
    return (RESULTS, (copy_of(tensor, LONG),)) if cast else (RESULTS, contiguous(tensor))


INDICES = {
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.index_put.default: _sorted_indices,
    aten.index_put_.default: _sorted_indices,
    aten._index_put_impl_.default: _sorted_indices,
    aten.cumsum.default: _cumulative,
}
