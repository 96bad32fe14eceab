"""Memory that CUDA kernels and libraries take for themselves: formulas from PyTorch's own sources.

A dispatch mode sees results only. These are the operators of usual models whose scratch is not small beside their
results; cuDNN's workspace, which it chooses by algorithm, is in `overheads` instead. What a kernel takes may jump with
the batch, so a block is kept as its formula and the lengths that it is calculated from, polynomials of the batch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload

from batchtune.estimate.memory.allocator import round_up
from batchtune.estimate.memory.convolutions import CONVOLUTIONS
from batchtune.estimate.memory.events import FLOAT, LONG, RESULTS, Arguments, Block, Steps, bytes_of
from batchtune.estimate.memory.layers import LAYERS
from batchtune.estimate.memory.overheads import torch_release
from batchtune.estimate.memory.recurrent import RECURRENT
from batchtune.estimate.memory.reductions import REDUCTIONS, contiguous, copy_of

aten = torch.ops.aten
_UNIFIED, _WORKSPACES_BY_PRODUCT = (2, 12), (2, 15)  # versions of torch
_CUBLAS, _LT = Block(lambda gpu: gpu.cublas_bytes, ()), bytes_of(1 << 20)
_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
# Temporary storage of CUB's algorithms, by which torch sorts, scans and selects on NVIDIA GPUs.
#
# Its parts are each rounded up to 256 bytes, and 255 more let the first one be aligned (AliasTemporaries in
# cub/util_device.cuh). Sizes of tiles are those of compute capability 8.0 in CUDA 13's CUB, found by asking it for many
# lengths; they differ a little between versions, and so does what is here.
_ALIGNED = 256
_DIGITS, _BITS = 256, 8  # that one pass of a radix sort tells apart
_SINGLE_TILE, _TILE = 2304, 3840  # items up to which one block sorts all, and of a block otherwise
_LOOKED_BACK = 4  # bytes for each digit of a tile
_PADDING, _STATE = 32, 16  # tiles more than there are, and bytes for each, where an item has 64 bits
_SCANNED = {4: (1920, 8), 8: (896, _STATE)}  # items of a tile, and bytes for each tile, by bytes of an item
_SELECTED = 320
_UNSORTED_INDICES = 3072  # in embedding_dense_backward_cuda, up to which nothing is sorted
_ROWS_PER_THREAD = 10  # NROWS_PER_THREAD
_MEAN = 1  # of nn.EmbeddingBag's modes, in EmbeddingBag.h
_CTC_LARGE = 4500  # ten times the 450 of `is_large`, in frames, samples and labels


def _embedding(args: Arguments) -> Steps:
    """embedding_symint in Embedding.cpp: `indices.reshape(-1)`, a copy where they are not contiguous."""
    indices: Tensor = args[1]
    if indices.dim() <= 1 or indices.is_contiguous():
        return (RESULTS,)
    return ((copy_of(indices), RESULTS),)


def _embedding_backward(args: Arguments) -> Steps:
    """embedding_dense_backward_cuda in Embedding.cu, and its kernel in EmbeddingBackwardKernel.cu.

    Indices sorted with their places; then segments of equal indices, cut at every tenth, and a row of sums in float for
    each. Indices and gradient are made contiguous before.
    """
    gradient, indices = args[0], args[1]
    weights: int = args[2]
    size, width = indices.element_size(), gradient.shape[-1]  # formulas hold no tensor: it would not die in the trace

    def sorting(items: Callable[[int], int]) -> Block:
        """Something for so many indices, where they are sorted."""
        return Block(lambda _, count: items(count) if count > _UNSORTED_INDICES else 0, (indices.numel(),))

    ids, one = sorting(lambda count: count * size), sorting(lambda _: size)
    segments = sorting(lambda count: min(count, weights) * size)
    before: Steps = (*contiguous(indices, gradient), ids, ids, (ids, sorting(lambda n: _radix_sort(n, size, 8 * size))))
    unique: Steps = (ids, sorting(_unique_by_key))
    scan: Steps = (sorting(lambda count: _scan(min(count, weights), size)),)

    def cut(count: int) -> int:
        return count // _ROWS_PER_THREAD + min(count, weights)

    partial: Steps = (sorting(lambda count: cut(count) * size), sorting(lambda count: cut(count) * width * FLOAT))
    return ((*before, RESULTS, ids, one, unique, segments, segments, scan, one, *partial),)


def _coalesced(args: Arguments) -> Steps:
    """_coalesce_sparse_cuda in SparseCUDATensor.cu: indices sorted with their places, and the first of those alike."""
    tensor: Tensor = args[0]
    count = tensor._nnz()  # noqa: SLF001
    ids = bytes_of(count * LONG)
    sort = Block(lambda _, items: _radix_sort(items, LONG, 8 * LONG), (count,))
    return ((ids, ids, (sort,), (Block(lambda _, items: _unique_by_key(items), (count,)),), RESULTS),)


def _sparse_mask(args: Arguments) -> Steps:
    """sparse_mask in SparseTensorMath.cpp, a product with ones at the mask's places: it picks values first."""
    values: Tensor = args[1]._values()  # noqa: SLF001
    return ((copy_of(values), RESULTS),)


def _embedding_bag_backward(args: Arguments) -> Steps:
    """_embedding_bag_sparse_backward in EmbeddingBag.cpp: a mean's gradient is divided by its bag's size, as floats."""
    gradient, mode, sparse = args[0], args[8], args[9]
    sizes = bytes_of(len(gradient) * FLOAT)
    return (RESULTS, (sizes, sizes)) if sparse and mode == _MEAN else (RESULTS,)


def _sorted_indices(args: Arguments) -> Steps:
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
    first: Steps = ((each, bytes_of(count * LONG, outlives=True)),)  # a remainder, and its product
    others: Steps = ((each, each),) * (len(indices) - 1)
    by_bits = Block(lambda _, items, most: _radix_sort(items, LONG, max(1, most.bit_length())), (count, replaced))
    return ((*first, *others, *contiguous(args[2]), each, each, each, (by_bits,)), RESULTS)


def _cumulative(args: Arguments) -> Steps:
    """cumsum_cuda_kernel in ScanKernels.cpp: whole numbers and bools are cast to 64 bits before (ReduceOps.cpp).

    A tensor of one dimension goes to cub (scan_dim in ScanUtils.cuh).
    """
    tensor: Tensor = args[0]
    cast = not tensor.dtype.is_floating_point and tensor.dtype != torch.int64
    size = tensor.element_size() if tensor.dtype.is_floating_point else LONG
    inside: Steps = (Block(lambda _, count: _scan(count, size), (tensor.numel(),)),) if tensor.dim() == 1 else ()
    return (RESULTS, ((copy_of(tensor, LONG),) if cast else contiguous(tensor)) + inside)


def _rolled(args: Arguments) -> Steps:
    """roll_common in TensorTransformations.h: one dimension after the other."""
    shifts = args[1] if isinstance(args[1], list | tuple) else [args[1]]
    return ((copy_of(args[0]),) * (len(shifts) - 1) + (RESULTS,),)


def _ctc_backward(args: Arguments) -> Steps:
    """ctc_loss_backward_gpu_template in LossCTC.cu: betas beside alphas; by sums over every other of both, if large."""
    log_probs, alphas, zero_infinity = args[1], args[6], len(args) > 8 and args[8]  # noqa: PLR2004 - the last of nine
    frames, samples, labels = log_probs.shape
    blanks, size = alphas.shape[-1] // 2 + 1, alphas.element_size()

    def if_large(bytes_: int) -> Block:
        return Block(
            lambda _, size, tenths: size if tenths > _CTC_LARGE else 0,
            (bytes_, 20 * frames + 24 * samples + 2 * labels),
        )

    each, row = if_large(samples * frames * blanks * size), if_large(samples * frames * size)
    sums: Steps = (each, row, (row, (if_large(samples * frames),)), (each, row))
    gradient: Steps = (copy_of(log_probs), sums, RESULTS) if zero_infinity else (RESULTS, sums)
    return ((*_ctc_lengths(log_probs), copy_of(alphas), gradient),)


def _ctc_lengths(log_probs: Tensor) -> tuple[Block, ...]:
    return (bytes_of(log_probs.shape[1] * LONG),) * 3


def _parts(*sizes: int) -> int:
    return sum(round_up(size, _ALIGNED) for size in sizes) + _ALIGNED - 1


def _radix_sort(count: int, size: int, bits: int) -> int:
    """`DispatchRadixSort` of keys of so many bytes and bits, each with a place of 64 bits: the onesweep algorithm."""
    if count <= _SINGLE_TILE:
        return 1
    passes = -(-bits // _BITS)
    bins, looked_back = passes * _DIGITS * LONG, -(-count // _TILE) * _DIGITS * _LOOKED_BACK
    return _parts(bins, looked_back, count * size, count * LONG, passes * LONG)


def _scan(count: int, size: int) -> int:
    """`DispatchScan` of so many items: a state for each tile."""
    items, state = _SCANNED.get(size, _SCANNED[8])
    return _parts((-(-count // items) + _PADDING) * state, 1)


def _unique_by_key(count: int) -> int:
    """`DispatchUniqueByKey` of so many keys: a state for each tile."""
    return _parts((-(-count // _SELECTED) + _PADDING) * _STATE, 1)


_INSIDE: dict[OpOverload, Callable[[Arguments], Steps]] = {
    **REDUCTIONS,
    **LAYERS,
    **CONVOLUTIONS,
    **RECURRENT,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten._embedding_bag_backward.default: _embedding_bag_backward,  # noqa: SLF001
    aten.index_put.default: _sorted_indices,
    aten.index_put_.default: _sorted_indices,
    aten._index_put_impl_.default: _sorted_indices,
    aten.cumsum.default: _cumulative,
    aten.roll.default: _rolled,
    aten._coalesce.default: _coalesced,  # noqa: SLF001
    aten.sparse_mask.default: _sparse_mask,
    # ctc_loss_gpu_template in LossCTC.cu: places and lengths of each sample's targets, then alphas, then losses
    aten._ctc_loss.default: lambda args: ((*_ctc_lengths(args[0]), 1, 0),),  # noqa: SLF001
    aten._ctc_loss_backward.default: _ctc_backward,  # noqa: SLF001
    aten.native_dropout.default: lambda _: (1, 0),  # native_dropout_cuda in Dropout.cu makes the mask first
}


def inside(func: OpOverload, args: Arguments) -> Steps:
    """What the CUDA kernel of `func` allocates, its results among it; results that are not are not on the device."""
    if func in _PRODUCTS and not _keeps_workspaces():
        return (RESULTS, (_LT if _by_lt(func, args) else _CUBLAS,))
    find = _INSIDE.get(func)
    return (RESULTS,) if find is None else find(args)


def workspaces(func: OpOverload, args: Arguments) -> dict[str, Block]:
    """The workspaces by library that a matrix product's thread takes at its first one, and never gives back.

    CUDABlas.cpp and CublasHandlePool.cpp: each thread has a handle of its own, with 8,519,680 bytes, 32 MiB on some
    GPUs; cuBLASLt takes 1 MiB more, or what cuBLAS has.
    """
    if func not in _PRODUCTS or not _keeps_workspaces():
        return {}
    return {"cublas": _CUBLAS} | ({"cublaslt": _LT} if _by_lt(func, args) and not _are_unified() else {})


def _keeps_workspaces() -> bool:
    """Not from torch 2.15 on, where each product takes its own for its time (pytorch#194311)."""
    return torch_release() < _WORKSPACES_BY_PRODUCT or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"


def _are_unified() -> bool:
    """Whether cuBLASLt works in cuBLAS's workspace: by default from torch 2.12 on (pytorch#168175, #175879)."""
    return os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "01"[torch_release() >= _UNIFIED]) == "1"


def _by_lt(func: OpOverload, args: Arguments) -> bool:
    """`addmm` with a bias of one dimension goes to cuBLASLt."""
    return func is aten.addmm.default and args[0].dim() == 1 and min(args[1].shape) > 1 and min(args[2].shape) > 1
