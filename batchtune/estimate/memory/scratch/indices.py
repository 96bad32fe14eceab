"""Memory inside embeddings, scattered writes, cumulative sums and rolls."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from batchtune.estimate.memory.scratch.blocks import (
    FLOAT,
    LONG,
    RESULTS,
    Block,
    Gpu,
    Steps,
    bytes_of,
    contiguous,
    copy_of,
    given,
)
from batchtune.estimate.memory.scratch.cub import radix_sort, scan, unique_by_key

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

    Indices sorted with their places; then segments of equal indices, cut at every tenth, and a row of sums in float for
    each. Indices and gradient are made contiguous before.
    """
    gradient, indices, weights = args[0], args[1], args[2]
    sorting = (indices.numel(), indices.element_size())
    rows = (*sorting, weights)
    ids = Block(_sorted, sorting)
    before: Steps = (*contiguous(indices, gradient), ids, ids, (ids, Block(_sorted_by_radix, sorting)))
    segments, one = Block(_segments, rows), Block(_one, sorting)
    unique: Steps = (ids, Block(_unique_by_key, sorting))
    partial: Steps = (Block(_partial_segments, rows), Block(_partial_sums, (*rows, gradient.shape[-1])))
    return ((*before, RESULTS, ids, one, unique, segments, segments, (Block(_scanned, rows),), one, *partial),)


def _sorted(gpu: Gpu, count: int, size: int) -> int:  # noqa: ARG001
    return count * size if count > _UNSORTED_INDICES else 0


def _one(gpu: Gpu, count: int, size: int) -> int:  # noqa: ARG001
    return size if count > _UNSORTED_INDICES else 0


def _sorted_by_radix(gpu: Gpu, count: int, size: int) -> int:
    return radix_sort(gpu, count, size, 8 * size) if count > _UNSORTED_INDICES else 0


def _unique_by_key(gpu: Gpu, count: int, size: int) -> int:
    return unique_by_key(gpu, count, size) if count > _UNSORTED_INDICES else 0


def _scanned(gpu: Gpu, count: int, size: int, weights: int) -> int:
    return scan(gpu, min(count, weights), size) if count > _UNSORTED_INDICES else 0


def _segments(gpu: Gpu, count: int, size: int, weights: int) -> int:  # noqa: ARG001
    return min(count, weights) * size if count > _UNSORTED_INDICES else 0


def _partial_segments(gpu: Gpu, count: int, size: int, weights: int) -> int:  # noqa: ARG001
    return (count // _ROWS_PER_THREAD + min(count, weights)) * size if count > _UNSORTED_INDICES else 0


def _partial_sums(gpu: Gpu, count: int, size: int, weights: int, width: int) -> int:
    return _partial_segments(gpu, count, size, weights) // size * width * FLOAT


def _sorted_indices(args: Any) -> Steps:
    """index_put_with_sort_kernel in Indexing.cu: linear indices and their places, sorted by the bits that are needed.

    computeLinearIndex in IndexingUtils.h multiplies each index into a product of its own and adds it to the first.
    """
    accumulate = len(args) > 3 and args[3]  # noqa: PLR2004 - self, indices, values, accumulate
    if not accumulate:
        return (RESULTS,)
    tensor, indices = args[0], [index for index in args[1] if index is not None]
    count = math.prod(torch.broadcast_shapes(*(index.shape for index in indices)))
    each = bytes_of(count * LONG)
    replaced = math.prod(tensor.shape[side] for side, index in enumerate(args[1]) if index is not None)
    first: Steps = ((each, Block(given, (count * LONG,), outlives=True)),)  # a remainder, and its product
    others: Steps = ((each, each),) * (len(indices) - 1)
    return (
        (*first, *others, *contiguous(args[2]), each, each, each, (Block(_sorted_by_bits, (count, replaced)),)),
        RESULTS,
    )


def _sorted_by_bits(gpu: Gpu, count: int, replaced: int) -> int:
    return radix_sort(gpu, count, LONG, max(1, replaced.bit_length()))


def _cumulative(args: Any) -> Steps:
    """cumsum_cuda_kernel in ScanKernels.cpp: whole numbers and bools are cast to 64 bits before (ReduceOps.cpp).

    A tensor of one dimension goes to cub (scan_dim in ScanUtils.cuh).
    """
    tensor: Tensor = args[0]
    cast = not tensor.dtype.is_floating_point and tensor.dtype != torch.int64
    size = tensor.element_size() if tensor.dtype.is_floating_point else LONG
    inside: Steps = (Block(scan, (tensor.numel(), size)),) if tensor.dim() == 1 else ()
    return (RESULTS, ((copy_of(tensor, LONG),) if cast else contiguous(tensor)) + inside)


def _rolled(args: Any) -> Steps:
    """roll_common in TensorTransformations.h: one dimension after the other."""
    shifts = args[1] if isinstance(args[1], list | tuple) else [args[1]]
    return ((copy_of(args[0]),) * (len(shifts) - 1) + (RESULTS,),)


INDICES = {
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.index_put.default: _sorted_indices,
    aten.index_put_.default: _sorted_indices,
    aten._index_put_impl_.default: _sorted_indices,
    aten.cumsum.default: _cumulative,
    aten.roll.default: _rolled,
}
