"""Memory inside layer, group and batch normalization and softmax."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from batchtune.estimate.memory.scratch.blocks import FLOAT, RESULTS, Block, Gpu, Steps, bytes_of, contiguous, copy_of
from batchtune.estimate.memory.scratch.reductions import rows_summed

aten = torch.ops.aten
_WARP = 32
_INDEXED = 2**31 - 1  # elements from which on torch takes 64 bits
_WEIGHT, _BIAS = 1, 2  # places of the gradients
_MANY_ROWS, _ROWS_PER_BLOCK, _MOST_BLOCKS = 64 << 10, 32, 32 << 10


def _layer_norm(args: Any) -> Steps:
    """layer_norm_cuda in layer_norm_kernel.cu: `input.expect_contiguous()`."""
    return ((*contiguous(args[0]), RESULTS),)


def _layer_norm_backward(args: Any) -> Steps:
    """LaunchGammaBetaBackwardCUDAKernel in layer_norm_kernel.cu: with very many short rows, sums of every 32 rows.

    Those are then summed by `sum(0)`, whose result takes the place of the one that was there before.
    """
    rows = math.prod(args[3].shape)
    lengths = (rows, args[1].numel() // max(1, rows), args[5].element_size() if args[5] is not None else FLOAT)
    wanted = [place for place in (_WEIGHT, _BIAS) if args[7][place]]
    before, partial = Block(_summed, lengths), Block(_sums_of_rows, lengths)
    scratch: Steps = (Block(_partial_results, lengths), Block(_semaphores, lengths))
    sums = tuple(each for place in wanted for each in (place, scratch))
    inside = (*contiguous(args[0]), *(before,) * len(wanted), *(partial,) * len(wanted), *sums)
    return ((*contiguous(args[1]), 0, inside),)


def _blocks_of_rows(gpu: Gpu, rows: int, width: int) -> int:
    if rows <= _MANY_ROWS or width // _WARP >= gpu.multiprocessors // 2:
        return 0
    return min(-(-rows // _ROWS_PER_BLOCK), _MOST_BLOCKS // -(-width // _WARP))


def _sums_of_rows(gpu: Gpu, rows: int, width: int, size: int) -> int:
    return _blocks_of_rows(gpu, rows, width) * width * size


def _summed(gpu: Gpu, rows: int, width: int, size: int) -> int:
    return width * size if _blocks_of_rows(gpu, rows, width) else 0


def _partial_results(gpu: Gpu, rows: int, width: int, size: int) -> int:
    blocks = _blocks_of_rows(gpu, rows, width)
    return rows_summed(gpu, blocks, width, size)[0] if blocks else 0


def _semaphores(gpu: Gpu, rows: int, width: int, size: int) -> int:
    blocks = _blocks_of_rows(gpu, rows, width)
    return rows_summed(gpu, blocks, width, size)[1] if blocks else 0


def _batch_norm(args: Any) -> Steps:
    """batch_norm_mean_var in Normalization.cu: what 32 bits do not index goes to var_mean_out, which casts bf16."""
    tensor, training = args[0], args[5]
    if not training or tensor.dtype != torch.bfloat16:
        return (RESULTS,)
    return (RESULTS, (Block(_cast, (tensor.numel(),)),))


def _cast(gpu: Gpu, count: int) -> int:  # noqa: ARG001
    return count * FLOAT if count >= _INDEXED else 0


def _group_norm(args: Any) -> Steps:
    """GroupNormKernelImplInternal in group_norm_kernel.cu: a scale and an offset for each sample's channels."""
    _, weight, bias, samples, channels, inner = args[:6]
    if inner == 1 or (weight is None and bias is None):
        return (RESULTS,)
    return (RESULTS, (bytes_of(samples * channels * FLOAT),) * 2)


def _group_norm_backward(args: Any) -> Steps:
    """GroupNormBackwardKernelImplInternal in group_norm_kernel.cu: two sums and a scale by channel, two by group."""
    weight, samples, channels, inner, groups, mask = args[4:10]
    by_channel, by_group = bytes_of(samples * channels * FLOAT), bytes_of(samples * groups * FLOAT)
    scale = (by_channel,) if inner > 1 and weight is not None else ()
    return (RESULTS, (by_channel, by_channel, *((by_group, by_group, *scale) if mask[0] else ())))


def _softmax(args: Any) -> Steps:
    """host_softmax in SoftMax.cu: `input.contiguous()`."""
    return (RESULTS, contiguous(args[0]))


def _log_softmax_backward(args: Any) -> Steps:
    """host_softmax_backward in SoftMax.cu: gradient and output contiguous."""
    return (RESULTS, contiguous(args[0], args[1]))


def _softmax_backward(args: Any) -> Steps:
    """softmax_backward_cuda_out in SoftMax.cu: `grad * output` is handed to host_softmax_backward."""
    output: Tensor = args[1]
    return (RESULTS, (copy_of(output), *contiguous(output)))


NORMALIZATIONS = {
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten._softmax.default: _softmax,  # noqa: SLF001
    aten._log_softmax.default: _softmax,  # noqa: SLF001
    aten._log_softmax_backward_data.default: _log_softmax_backward,  # noqa: SLF001
    aten._softmax_backward_data.default: _softmax_backward,  # noqa: SLF001
}
