"""Memory inside convolutions: copies and sums of Convolution.cpp and cudnn/ConvShared.cpp; cuDNN's workspace is not in here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from batchtune.estimate.memory.events import RESULTS, Arguments, Steps
from batchtune.estimate.memory.reductions import contiguous, copy_of, reduction

aten = torch.ops.aten
_INPUT, _WEIGHT, _BIAS = 0, 1, 2  # places of the gradients
_LINE, _IMAGE = 3, 4  # dimensions with those of samples and channels


def _format(tensor: Tensor, weight: Tensor) -> torch.memory_format:
    """cudnn_conv_suggest_memory_format in ConvUtils.h: channels last where either is."""
    found: torch.memory_format = suggest_memory_format(tensor)
    return found if found != torch.contiguous_format else suggest_memory_format(weight)


def _in_two_dimensions(tensor: Tensor) -> Tensor:
    """view1d_as_2d."""
    return tensor.unsqueeze(2) if tensor.dim() == _LINE else tensor


def _by_torchs_depthwise(tensor: Tensor, weight: Tensor, groups: int, *, transposed: bool) -> bool:
    """use_cudnn_depthwise is false: torch's own kernel. fp16, where cuDNN may be chosen, is taken to go there too."""
    depthwise = not transposed and groups > 1 and tensor.shape[1] == groups and tensor.dim() == _IMAGE
    return depthwise and _format(tensor, weight) == torch.contiguous_format


def _forward(args: Arguments) -> Steps:
    """The input copied to the format before the result is made, the weight after (cudnn_convolution)."""
    tensor, weight, _, _, _, _, transposed, _, groups = args[:9]
    line = contiguous(tensor) if tensor.dim() == _LINE else ()  # "avoid accidentally going through NHWC"
    tensor = tensor.contiguous() if line else tensor
    tensor, weight = _in_two_dimensions(tensor), _in_two_dimensions(weight)
    if _by_torchs_depthwise(tensor, weight, groups, transposed=transposed):
        return ((*line, *contiguous(tensor, weight), RESULTS),)
    layout = _format(tensor, weight)
    copied = contiguous(tensor, memory_format=layout)
    return ((*line, *copied, RESULTS, *contiguous(weight, memory_format=layout)),)


def _backward(args: Arguments) -> Steps:
    """convolution_backward, and cudnn_convolution_backward, whose two halves each make the gradient contiguous.

    A gradient that suggests another format than the input is converted before, once for both; a transposed convolution
    makes any gradient contiguous then (cudnn_convolution_transpose_backward).
    """
    gradient, tensor, weight, _, _, _, _, transposed, _, groups, mask = args[:11]
    sums: Steps = ()
    if mask[_BIAS]:
        sums = (_BIAS, reduction(gradient, [side for side in range(gradient.dim()) if side != 1]))
    line = contiguous(tensor) if tensor.dim() == _LINE else ()
    tensor = tensor.contiguous() if line else tensor
    gradient, tensor, weight = (_in_two_dimensions(each) for each in (gradient, tensor, weight))
    wanted = tuple(place for place in (_INPUT, _WEIGHT) if mask[place])
    if _by_torchs_depthwise(tensor, weight, groups, transposed=transposed):
        return ((*line, (*contiguous(gradient, tensor, weight), *reversed(wanted)), *sums),)
    layout = _format(tensor, weight)
    before = contiguous(tensor, memory_format=layout) if mask[_WEIGHT] else ()
    converted = suggest_memory_format(gradient) != layout
    copied = (copy_of(gradient),) if converted else contiguous(gradient, memory_format=layout)
    first, again = (copied, ()) if converted or transposed else ((), copied)
    halves: list[Steps] = []
    if mask[_INPUT]:
        halves.append((_INPUT, *again, *contiguous(weight, memory_format=layout)))
    if mask[_WEIGHT]:
        halves.append((*again, _WEIGHT))
    return ((*line, (*before, *first, *halves), *sums),)


CONVOLUTIONS: dict[OpOverload, Callable[[Arguments], Steps]] = {
    aten.convolution.default: _forward,
    aten.convolution_backward.default: _backward,
}
