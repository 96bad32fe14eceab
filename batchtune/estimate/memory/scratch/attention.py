"""Memory inside the kernels of scaled dot product attention."""

from __future__ import annotations

from typing import Any

import torch

from batchtune.estimate.memory.scratch.blocks import (
    FLOAT,
    RESULTS,
    Block,
    Gpu,
    Steps,
    bytes_of,
    copy_of,
    given,
)
from batchtune.estimate.rounding import round_up

aten = torch.ops.aten
_STATE, _UNUSED = 6, 7  # places of flash attention's results
_RANDOM_STATE = 16
_STORAGE_HEADER = 16  # GradQTempStorage: lock, counter and padding before its buffer
_SMALL_HEAD, _LARGE_HEAD = 64, 128
_KEYS_PER_BLOCK = 64  # kBlockSizeJ of the kernels that gather dk and dv


def _flash(args: Any) -> Steps:
    """mha_fwd in flash_attn/flash_api.cpp: dropout's random state replaces one that was there before."""
    dropout = args[3] if len(args) > 3 else 0.0  # noqa: PLR2004 - query, key, value, dropout_p
    return ((0, 1, bytes_of(_RANDOM_STATE), _UNUSED, _STATE),) if dropout else (RESULTS,)


def _flash_backward(args: Any) -> Steps:
    """mha_bwd in flash_attn/flash_api.cpp: softmax's row sums, and dq in float; lengths rounded to 128.

    _flash_attention_backward in attention_backward.cu copies the result and its gradient where they do not lie in
    memory as (batch, length, heads, head size). Queries in groups have dk and dv for each query's head before they are
    summed.
    """
    copied = [copy_of(each) for each in (args[0], args[4]) if not each.transpose(1, 2).is_contiguous()]
    query, key = args[1], args[2]
    lengths = (*query.shape,)
    grouped = (copy_of(query),) * 2 if key.shape[1] != query.shape[1] else ()
    return ((*copied, RESULTS, Block(_row_sums, lengths), Block(_float_rows, lengths), *grouped),)


def _row_sums(gpu: Gpu, batch: int, heads: int, length: int, head: int) -> int:  # noqa: ARG001
    return batch * heads * round_up(length, 128) * FLOAT


def _float_rows(gpu: Gpu, batch: int, heads: int, length: int, head: int) -> int:  # noqa: ARG001
    return batch * heads * round_up(length, 128) * round_up(head, 32) * FLOAT


def _efficient(args: Any) -> Steps:  # noqa: ARG001
    """_efficient_attention_forward in attention.cu: seed and offset of dropout are made on the CPU."""
    return (0, 1)


def _efficient_backward(args: Any) -> Steps:
    """_efficient_attention_backward in attention_backward.cu, kernels as for compute capability 8.0 and later.

    Row sums `delta`, which half types' kernels calculate themselves; fp32 has `grad_out * out` first, and its sums
    before they are transposed. The workspace is `workspace_size` in mem_eff_attention/kernel_backward.h.
    """
    gradient, query, key = args[0], args[1], args[2]
    copied = () if gradient.transpose(1, 2).is_contiguous() else (copy_of(gradient),)
    batch, heads, length, head = query.shape
    sums = bytes_of(batch * heads * length * FLOAT)
    float32 = query.dtype == torch.float32
    delta = Block(given, (batch * heads * length * FLOAT,), outlives=float32)
    workspace = Block(_workspace, (batch, heads, length, key.shape[2], head, int(float32)))
    rows: Steps = ((copy_of(gradient), sums, delta),) if float32 else (delta,)
    return ((*copied, RESULTS, *rows, workspace),)


def _workspace(gpu: Gpu, batch: int, heads: int, queries: int, keys: int, head: int, float32: int) -> int:  # noqa: ARG001
    """workspace_elements_gq of tiles of dq in float; larger heads of half types gather dk and dv there as well."""
    rows = 64 if head <= _SMALL_HEAD else 128  # kBlockSizeI
    columns = 128 if not float32 and _SMALL_HEAD < head <= _LARGE_HEAD else 64  # MatmulGradQ::ThreadblockShape::kN
    each = -(-queries // rows) * -(-head // columns) * (_STORAGE_HEADER + rows * columns * FLOAT)
    if not float32 and head > _LARGE_HEAD:  # kOutputInRF is false
        each += -(-keys // _KEYS_PER_BLOCK) * _KEYS_PER_BLOCK * 2 * round_up(head, rows) * FLOAT
    return batch * heads * round_up(each, 16)


ATTENTION = {
    aten._scaled_dot_product_flash_attention.default: _flash,  # noqa: SLF001
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,  # noqa: SLF001
    aten._scaled_dot_product_efficient_attention.default: _efficient,  # noqa: SLF001
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,  # noqa: SLF001
}
