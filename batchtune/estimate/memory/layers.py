"""Memory inside the kernels of normalizations, softmax and scaled dot product attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch._ops import OpOverload

from batchtune.estimate.memory.allocator import round_up
from batchtune.estimate.memory.events import FLOAT, RESULTS, Arguments, Block, Gpu, Steps, bytes_of
from batchtune.estimate.memory.reductions import contiguous, copy_of, rows_summed

aten = torch.ops.aten
_WARP = 32
_INDEXED = 2**31 - 1  # elements from which on torch takes 64 bits
_WEIGHT, _BIAS = 1, 2  # places of the gradients
_MANY_ROWS, _ROWS_PER_BLOCK, _MOST_BLOCKS = 64 << 10, 32, 32 << 10
_STATE, _UNUSED = 6, 7  # places of flash attention's results
_RANDOM_STATE = 16
_STORAGE_HEADER = 16  # GradQTempStorage: lock, counter and padding before its buffer
_SMALL_HEAD, _LARGE_HEAD = 64, 128
_KEYS_PER_BLOCK = 64  # kBlockSizeJ of the kernels that gather dk and dv


def _layer_norm_backward(args: Arguments) -> Steps:
    """LaunchGammaBetaBackwardCUDAKernel in layer_norm_kernel.cu: with very many short rows, sums of every 32 rows.

    Those are then summed by `sum(0)`, whose result takes the place of the one that was there before.
    """
    rows, width = math.prod(args[3].shape), math.prod(args[2])
    size = args[5].element_size() if args[5] is not None else FLOAT

    def of(formula: Callable[[Gpu, int], int]) -> Block:
        """What there is to sums of so many rows; nothing where there are none."""
        return Block(lambda gpu, rows: formula(gpu, sums) if (sums := _sums_of_rows(gpu, rows, width)) else 0, (rows,))

    wanted = [place for place in (_WEIGHT, _BIAS) if args[7][place]]
    before, parts = of(lambda _, __: width * size), of(lambda _, sums: sums * width * size)
    scratch: Steps = (
        of(lambda gpu, sums: rows_summed(gpu, sums, width, size)[0]),
        of(lambda gpu, sums: rows_summed(gpu, sums, width, size)[1]),
    )
    results = tuple(each for place in wanted for each in (place, scratch))
    inside = (*contiguous(args[0]), *(before,) * len(wanted), *(parts,) * len(wanted), *results)
    return ((*contiguous(args[1]), 0, inside),)


def _sums_of_rows(gpu: Gpu, rows: int, width: int) -> int:
    if rows <= _MANY_ROWS or width // _WARP >= gpu.multiprocessors // 2:
        return 0
    return min(-(-rows // _ROWS_PER_BLOCK), _MOST_BLOCKS // -(-width // _WARP))


def _batch_norm(args: Arguments) -> Steps:
    """batch_norm_mean_var in Normalization.cu: what 32 bits do not index goes to var_mean_out, which casts bf16."""
    tensor, training = args[0], args[5]
    if not training or tensor.dtype != torch.bfloat16:
        return (RESULTS,)
    return (RESULTS, (Block(lambda _, count: count * FLOAT if count >= _INDEXED else 0, (tensor.numel(),)),))


def _group_norm(args: Arguments) -> Steps:
    """GroupNormKernelImplInternal in group_norm_kernel.cu: a scale and an offset for each sample's channels."""
    _, weight, bias, samples, channels, inner = args[:6]
    if inner == 1 or (weight is None and bias is None):
        return (RESULTS,)
    return (RESULTS, (bytes_of(samples * channels * FLOAT),) * 2)


def _group_norm_backward(args: Arguments) -> Steps:
    """GroupNormBackwardKernelImplInternal in group_norm_kernel.cu: two sums and a scale by channel, two by group."""
    weight, samples, channels, inner, groups, mask = args[4:10]
    by_channel, by_group = bytes_of(samples * channels * FLOAT), bytes_of(samples * groups * FLOAT)
    scale = (by_channel,) if inner > 1 and weight is not None else ()
    return (RESULTS, (by_channel, by_channel, *((by_group, by_group, *scale) if mask[0] else ())))


def _flash(args: Arguments) -> Steps:
    """mha_fwd in flash_attn/flash_api.cpp: dropout's random state replaces one that was there before."""
    dropout = args[3] if len(args) > 3 else 0.0  # noqa: PLR2004 - query, key, value, dropout_p
    return ((0, 1, bytes_of(_RANDOM_STATE), _UNUSED, _STATE),) if dropout else (RESULTS,)


def _flash_backward(args: Arguments) -> Steps:
    """mha_bwd in flash_attn/flash_api.cpp: softmax's row sums, and dq in float; lengths rounded to 128.

    _flash_attention_backward in attention_backward.cu copies the result and its gradient where they do not lie in
    memory as (batch, length, heads, head size). Queries in groups have dk and dv for each query's head before they are
    summed.
    """
    copied = [copy_of(each) for each in (args[0], args[4]) if not each.transpose(1, 2).is_contiguous()]
    query, key = args[1], args[2]
    grouped = (copy_of(query),) * 2 if key.shape[1] != query.shape[1] else ()

    def rows(width: int) -> Block:
        batch, heads, length, _ = query.shape
        return Block(lambda _, heads, length: heads * round_up(length, 128) * width * FLOAT, (batch * heads, length))

    return ((*copied, RESULTS, rows(1), rows(round_up(query.shape[-1], 32)), *grouped),)


def _efficient_backward(args: Arguments) -> Steps:
    """_efficient_attention_backward in attention_backward.cu, kernels as for compute capability 8.0 and later.

    Row sums `delta`, which half types' kernels calculate themselves; fp32 has `grad_out * out` first, and its sums
    before they are transposed. The workspace is `workspace_size` in mem_eff_attention/kernel_backward.h.
    """
    gradient, query, key = args[0], args[1], args[2]
    copied = () if gradient.transpose(1, 2).is_contiguous() else (copy_of(gradient),)
    batch, heads, length, head = query.shape
    sums = bytes_of(batch * heads * length * FLOAT)
    float32 = query.dtype == torch.float32
    delta = bytes_of(batch * heads * length * FLOAT, outlives=float32)
    workspace = Block(partial(_workspace, head=head, float32=float32), (batch * heads, length, key.shape[2]))
    rows: Steps = ((copy_of(gradient), sums, delta),) if float32 else (delta,)
    return ((*copied, RESULTS, *rows, workspace),)


def _workspace(_: Gpu, heads: int, queries: int, keys: int, *, head: int, float32: bool) -> int:
    """workspace_elements_gq of tiles of dq in float; larger heads of half types gather dk and dv there as well."""
    rows = 64 if head <= _SMALL_HEAD else 128  # kBlockSizeI
    columns = 128 if not float32 and _SMALL_HEAD < head <= _LARGE_HEAD else 64  # MatmulGradQ::ThreadblockShape::kN
    each = -(-queries // rows) * -(-head // columns) * (_STORAGE_HEADER + rows * columns * FLOAT)
    if not float32 and head > _LARGE_HEAD:  # kOutputInRF is false
        each += -(-keys // _KEYS_PER_BLOCK) * _KEYS_PER_BLOCK * 2 * round_up(head, rows) * FLOAT
    return heads * round_up(each, 16)


LAYERS: dict[OpOverload, Callable[[Arguments], Steps]] = {
    # layer_norm_cuda in layer_norm_kernel.cu: `input.expect_contiguous()`
    aten.native_layer_norm.default: lambda args: ((*contiguous(args[0]), RESULTS),),
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    # host_softmax in SoftMax.cu: `input.contiguous()`; host_softmax_backward: gradient and output
    aten._softmax.default: lambda args: (RESULTS, contiguous(args[0])),  # noqa: SLF001
    aten._log_softmax.default: lambda args: (RESULTS, contiguous(args[0])),  # noqa: SLF001
    aten._log_softmax_backward_data.default: lambda args: (RESULTS, contiguous(*args[:2])),  # noqa: SLF001
    # softmax_backward_cuda_out in SoftMax.cu: `grad * output` is handed to host_softmax_backward
    aten._softmax_backward_data.default: lambda args: (RESULTS, (copy_of(args[1]), *contiguous(args[1]))),  # noqa: SLF001
    aten._scaled_dot_product_flash_attention.default: _flash,  # noqa: SLF001
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,  # noqa: SLF001
    # _efficient_attention_forward in attention.cu: seed and offset of dropout are made on the CPU
    aten._scaled_dot_product_efficient_attention.default: lambda _: (0, 1),  # noqa: SLF001
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,  # noqa: SLF001
}
