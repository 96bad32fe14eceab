"""Losses that are calculated element by element inside of one operator and then reduced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from batchtune.estimate.memory.scratch.blocks import RESULTS, Block, Held, Steps, bytes_of, given
from batchtune.estimate.memory.scratch.reductions import reduction

aten = torch.ops.aten
_NONE = 0  # at::Reduction::None


def _losses(args: Any) -> Tensor:
    """What holds each element's loss, without memory."""
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return torch.empty(shape, dtype=torch.promote_types(args[0].dtype, args[1].dtype), device="meta")


def _is_reduced(args: Any, place: int) -> bool:
    return bool((args[place] if len(args) > place else 1) != _NONE)


def _result_first(args: Any) -> Steps:
    """mse_loss_out and smooth_l1_loss_out in Loss.cpp: the result is as large as the losses until they are reduced."""
    if not _is_reduced(args, 2):
        return (RESULTS,)
    losses = _losses(args)
    size = losses.numel() * losses.element_size()
    return (Held(RESULTS, size), (bytes_of(size), *reduction(losses, ())))


def _resized(args: Any) -> Steps:
    """binary_cross_entropy_out_cuda in Loss.cu and soft_margin_loss_out in Loss.cpp: the reduced is copied over all."""
    place = 3 if len(args) > 3 or (len(args) == 3 and not isinstance(args[2], int)) else 2  # noqa: PLR2004 - a weight
    if not _is_reduced(args, place):
        return (RESULTS,)
    losses = _losses(args)
    size = losses.numel() * losses.element_size()
    return (Held(RESULTS, size), (bytes_of(losses.element_size()), *reduction(losses, ())))


def _losses_first(args: Any) -> Steps:
    """huber_loss in Loss.cpp."""
    if not _is_reduced(args, 2):
        return (RESULTS,)
    losses = _losses(args)
    return ((bytes_of(losses.numel() * losses.element_size()), RESULTS, reduction(losses, ())),)


def _with_logits(args: Any) -> Steps:
    """binary_cross_entropy_with_logits in Loss.cpp: the logarithms of sigmoids, then the losses in place."""
    if not _is_reduced(args, 4):
        losses = _losses(args)
        return ((bytes_of(losses.numel() * losses.element_size()), RESULTS),)
    losses = _losses(args)
    each = Block(given, (losses.numel() * losses.element_size(),))
    return ((each, each, RESULTS, reduction(losses, ())),)


LOSSES = {
    aten.mse_loss.default: _result_first,
    aten.smooth_l1_loss.default: _result_first,
    aten.binary_cross_entropy.default: _resized,
    aten.soft_margin_loss.default: _resized,
    aten.huber_loss.default: _losses_first,
    aten.binary_cross_entropy_with_logits.default: _with_logits,
}
