"""Memory that CUDA kernels and libraries take for themselves: formulas from PyTorch's own sources.

A dispatch mode sees results only. These are the operators of usual models whose scratch is not small beside their
results; convolutions' (cuDNN chooses by algorithm) is in `overheads` instead. What a kernel takes may jump with the
batch, so a block is kept as its formula and the lengths that it is calculated from, which are polynomials of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from batchtune.estimate.allocator import round_up

aten = torch.ops.aten
_FLOAT, _LONG, _INT = 4, 8, 4
_WARP = 32


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
    """Memory of one kernel: a formula and what it is calculated from; 0 bytes are none."""

    formula: Formula
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Inside:
    """What a kernel allocates, in its order, and gives back when it is done.

    Attributes:
        before: allocated before the results.
        passing: allocated together after those, and given back before the results are allocated.
        after: allocated after the results.
    """

    before: tuple[Block, ...] = ()
    passing: tuple[Block, ...] = ()
    after: tuple[Block, ...] = field(default=())


def inside(func: Any, args: Any) -> Inside:
    """What the CUDA kernel of `func` allocates beside its results."""
    find = _INSIDE.get(func)
    return _NOTHING if find is None else find(args)


def given(gpu: Gpu, size: int) -> int:  # noqa: ARG001 - a formula's signature
    """A size that is known: the formula of what depends on no kernel."""
    return size


def workspaces(func: Any, args: Any) -> dict[str, Block]:
    """The workspaces by library that a matrix product's thread takes at its first one, and never gives back.

    CUDABlas.cpp and CublasHandlePool.cpp: each thread has a handle of its own, with 8,519,680 bytes, 32 MiB on
    compute capability 9.0; `addmm` with a bias of one dimension goes to cuBLASLt, which takes 1 MiB more.
    """
    if func not in _PRODUCTS:
        return {}
    found = {"cublas": Block(_cublas, ())}
    if func is aten.addmm.default and args[0].dim() == 1 and min(args[1].shape) > 1 and min(args[2].shape) > 1:
        found["cublaslt"] = Block(given, (1 << 20,))
    return found


def _cublas(gpu: Gpu) -> int:
    return gpu.cublas_bytes


def _flash_backward(args: Any) -> Inside:
    """mha_bwd in flash_attn/flash_api.cpp: softmax's row sums, and dq in float; lengths rounded to 128.

    _flash_attention_backward in attention_backward.cu copies the result and its gradient where they do not lie in
    memory as (batch, length, heads, head size).
    """
    copied = [each for each in (args[0], args[4]) if not each.transpose(1, 2).is_contiguous()]
    return Inside(
        before=tuple(Block(given, (each.numel() * each.element_size(),)) for each in copied),
        after=(Block(_row_sums, (128, *args[1].shape)), Block(_float_rows, (128, *args[1].shape))),
    )


def _efficient_backward(args: Any) -> Inside:
    """_efficient_attention_backward in attention_backward.cu: row sums; half types gather dq in float as well."""
    query: Tensor = args[1]
    lengths = (32, *query.shape)
    gathered = () if query.dtype == torch.float32 else (Block(_float_rows, lengths),)
    return Inside(after=(Block(_row_sums, lengths), *gathered))


def _row_sums(gpu: Gpu, multiple: int, batch: int, heads: int, length: int, head: int) -> int:  # noqa: ARG001
    return batch * heads * round_up(length, multiple) * _FLOAT


def _float_rows(gpu: Gpu, multiple: int, batch: int, heads: int, length: int, head: int) -> int:  # noqa: ARG001
    return batch * heads * round_up(length, multiple) * round_up(head, 32) * _FLOAT


def _embedding(args: Any) -> Inside:
    """embedding_symint in Embedding.cpp: `indices.reshape(-1)`, a copy where they are not contiguous."""
    indices: Tensor = args[1]
    if indices.dim() <= 1 or indices.is_contiguous():
        return _NOTHING
    return Inside(before=(Block(given, (indices.numel() * indices.element_size(),)),))


_UNSORTED_INDICES = 3072  # in embedding_dense_backward_cuda, up to which nothing is sorted
_ROWS_PER_THREAD = 10  # NROWS_PER_THREAD


def _embedding_backward(args: Any) -> Inside:
    """embedding_dense_backward_cuda in Embedding.cu, and its kernel in EmbeddingBackwardKernel.cu.

    Indices sorted with their places, by a radix sort that takes both again; then segments of equal indices, cut at
    every tenth, and a row of sums in float for each.
    """
    gradient, indices, weights = args[0], args[1], args[2]
    sorting = (indices.numel(), indices.element_size())
    rows = (*sorting, weights)
    return Inside(
        before=(Block(_sorted, sorting),) * 3,
        passing=(Block(_sorted, sorting), Block(_radix_sort, sorting)),
        after=(
            Block(_sorted, sorting),
            Block(_one, sorting),
            *(Block(_segments, rows),) * 2,
            Block(_one, sorting),
            Block(_partial_segments, rows),
            Block(_partial_sums, (*rows, gradient.shape[-1])),
        ),
    )


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
    return _partial_segments(gpu, count, size, weights) // size * width * _FLOAT


def _sorted_indices(args: Any) -> Inside:
    """index_put_with_sort_kernel in Indexing.cu: linear indices and places, sorted with buffers of the same size."""
    accumulate = len(args) > 3 and args[3]  # noqa: PLR2004 - self, indices, values, accumulate
    if not accumulate:
        return _NOTHING
    count: int = max((index.numel() for index in args[1] if index is not None), default=0)
    return Inside(after=(Block(given, (count * _LONG * 6,)),))


_MANY_ROWS, _ROWS_PER_BLOCK, _MOST_BLOCKS = 64 << 10, 32, 32 << 10


def _layer_norm_backward(args: Any) -> Inside:
    """LaunchGammaBetaBackwardCUDAKernel in layer_norm_kernel.cu: with very many short rows, sums of every 32 rows."""
    rows = math.prod(args[3].shape)
    gradients = sum(args[7][1:])
    lengths = (rows, args[1].numel() // max(1, rows), args[5].element_size() if args[5] is not None else _FLOAT)
    return Inside(after=(Block(_sums_of_rows, lengths),) * gradients)


def _sums_of_rows(gpu: Gpu, rows: int, width: int, size: int) -> int:
    if rows <= _MANY_ROWS or width // _WARP >= gpu.multiprocessors // 2:
        return 0
    across = -(-width // _WARP)
    return min(-(-rows // _ROWS_PER_BLOCK), _MOST_BLOCKS // across) * width * size


def _reduction(args: Any) -> Inside:
    """gpu_reduce_kernel in Reduce.cuh: partial results of a reduction that is spread over blocks of threads."""
    tensor: Tensor = args[0]
    named = args[1] if len(args) > 1 and isinstance(args[1], list | tuple | int) else None
    dims = [named] if isinstance(named, int) else named
    reduced = {dim % max(1, tensor.dim()) for dim in dims} if dims else set(range(tensor.dim()))
    sides = [side for side in range(tensor.dim()) if tensor.shape[side] > 1]
    if not sides:
        return _NOTHING
    fastest = min(sides, key=lambda side: (tensor.stride(side), -side))
    kept = [side for side in sides if side not in reduced]
    inner = tensor.shape[min(kept, key=lambda side: (tensor.stride(side), -side))] if kept else 1
    outputs = math.prod(tensor.shape[side] for side in kept)
    lengths = (
        math.prod(tensor.shape[side] for side in sides if side in reduced),
        outputs,
        inner if tensor.stride(fastest) == 1 else 1,
        int(fastest in reduced),
        tensor.element_size(),
        max(_FLOAT, tensor.element_size()),
    )
    return Inside(after=(Block(_partial_results, lengths), Block(_semaphores, lengths)))


@dataclass(frozen=True)
class _Reduction:
    """`setReduceConfig`: how a reduction is spread over threads."""

    blocks_per_output: int
    width: int
    vector: int
    grid: int


_THREADS, _FEWEST_VALUES, _MOST_VALUES = 512, 16, 256  # MAX_NUM_THREADS, min_ and max_values_per_thread
_VECTOR, _LEAST_VECTORIZED = 4, 128
_INDEXED_BYTES = 2**31 - 1  # by 32 bits; a larger tensor is halved until it is not


def _spread(gpu: Gpu, inputs: int, outputs: int, inner: int, along: int, size: int) -> _Reduction | None:
    while inputs * outputs * size > _INDEXED_BYTES:
        inputs, outputs = (inputs, -(-outputs // 2)) if along and outputs > 1 else (-(-inputs // 2), outputs)
    vector, across, down = 1, *((inputs, outputs) if along else (outputs, inputs))
    if along and outputs == 1 and across > _LEAST_VECTORIZED:
        across //= _VECTOR
    elif not along:
        vector = math.gcd(inner, _VECTOR)
        across //= vector
    most = _THREADS // vector
    across, down = (min(1 << (each.bit_length() - 1), most) for each in (max(1, across), max(1, down)))
    height = min(down, most // min(across, _WARP))
    width = min(across, most // height)
    step = width if along else 1
    if -(-inputs // step) < min(height * 16, _MOST_VALUES):
        return None
    values = -(-inputs // (step * height))
    grid = -(-(outputs // vector) // (1 if along else width))
    target = gpu.multiprocessors * (gpu.threads // (width * height))
    if values < _MOST_VALUES or grid > target:
        return None
    blocks = max(min(-(-target // grid), -(-values // _FEWEST_VALUES)), -(-values // _MOST_VALUES))
    return _Reduction(blocks, width, vector, grid) if blocks > 1 else None


def _partial_results(gpu: Gpu, inputs: int, outputs: int, inner: int, along: int, size: int, kept: int) -> int:
    found = _spread(gpu, inputs, outputs, inner, along, size)
    if found is None:
        return 0
    return kept * outputs * found.blocks_per_output * (1 if along else found.width * found.vector)


def _semaphores(gpu: Gpu, inputs: int, outputs: int, inner: int, along: int, size: int, kept: int) -> int:  # noqa: ARG001
    found = _spread(gpu, inputs, outputs, inner, along, size)
    return 0 if found is None else found.grid * _INT


_NOTHING = Inside()
_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
_INSIDE: dict[Any, Callable[[Any], Inside]] = {
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,  # noqa: SLF001
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,  # noqa: SLF001
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.index_put.default: _sorted_indices,
    aten.index_put_.default: _sorted_indices,
    aten._index_put_impl_.default: _sorted_indices,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.sum.default: _reduction,
    aten.sum.dim_IntList: _reduction,
    aten.mean.default: _reduction,
    aten.mean.dim: _reduction,
}
LAST_FIRST = {aten.native_dropout.default}  # whose kernels allocate their results from the last to the first
