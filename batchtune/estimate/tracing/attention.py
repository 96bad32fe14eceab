"""Which kernel CUDA's scaled dot product attention runs: the choice decides whether T x T scores are kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

_FLASH_MAX_HEAD = 256  # check_head_dim_size_flash in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
_HALF = (torch.float16, torch.bfloat16)
_BATCHED_HEADS = 4  # (batch, heads, length, head size); anything else goes to the math kernel


@contextlib.contextmanager
def cuda_attention() -> Iterator[None]:
    """Registers the choice of an sm80 or later GPU for CUDA tensors; CPU builds only know the math kernel there.

    It is registered with the dispatcher and not as a function mode, because such a mode is off while checkpointing
    recomputes inside backward.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attention, "AutogradCUDA")
    try:
        yield
    finally:
        library._destroy()  # noqa: SLF001


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    aten = torch.ops.aten
    flash_allowed, efficient_allowed = (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
    )
    batched, half = query.dim() == _BATCHED_HEADS, query.dtype in _HALF
    head = query.shape[-1]
    if batched and half and flash_allowed and attn_mask is None and head <= _FLASH_MAX_HEAD:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if batched and efficient_allowed and (half or query.dtype == torch.float32) and not enable_gqa:
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        needs_gradient = query.requires_grad or key.requires_grad or value.requires_grad
        found: Tensor = aten._scaled_dot_product_efficient_attention(  # noqa: SLF001
            query, key, value, bias, needs_gradient, dropout_p, is_causal, scale=scale
        )[0]
        return found
    plain: Tensor = aten._scaled_dot_product_attention_math(  # noqa: SLF001
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return plain


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:
    """Flash attention as `at::scaled_dot_product_attention` calls it: head sizes padded to a multiple of 8."""
    head = query.shape[-1]
    padding = -head % 8
    if padding:
        query, key, value = (torch.nn.functional.pad(each, (0, padding)) for each in (query, key, value))
        scale = scale if scale is not None else head**-0.5
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(  # noqa: SLF001
        query, key, value, dropout_p, is_causal, return_debug_mask=False, scale=scale
    )[0]
    return out[..., :head] if padding else out


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as the efficient kernel takes it: of the query's type, broadcast without copying.

    As in `preprocess_mask`: a last dimension that is no multiple of 16 bytes' alignment is padded to one and sliced.
    """
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    padding = -mask.shape[-1] % 8
    if padding and mask.shape[-1] > 1:
        mask = torch.nn.functional.pad(mask, (0, padding))[..., : key.shape[-2]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
