"""Memory inside convolutions: copies and sums of Convolution.cpp and cudnn/ConvShared.cpp, and cuDNN's workspace.

What cuDNN takes is not documented. It was measured for the convolutions of nine models on an H100 with cuDNN 9, in
TF32 and bf16: matrix units multiply images whose channels lie last and are a multiple of 16 bytes, so that whatever
lies otherwise is copied: input, result and weights. tests/benchmarks/results/convolutions.md has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from batchtune.estimate.memory.allocator import round_up
from batchtune.estimate.memory.events import FLOAT, RESULTS, Arguments, Block, Steps
from batchtune.estimate.memory.reductions import contiguous, copy_of, reduction

aten = torch.ops.aten
_INPUT, _WEIGHT, _BIAS = 0, 1, 2  # places of the gradients
_LINE, _IMAGE = 3, 4  # dimensions with those of samples and channels
_CHANNELS_BYTES = 16  # a multiple of which matrix units take
_SMALL_KERNEL = 4  # a side
_NARROW = 64  # channels


def layout_of(tensor: Tensor, weight: Tensor) -> torch.memory_format:
    """cudnn_conv_suggest_memory_format in ConvUtils.h: channels last where either is."""
    found: torch.memory_format = suggest_memory_format(tensor)
    return found if found != torch.contiguous_format else suggest_memory_format(weight)


def _in_two_dimensions(tensor: Tensor) -> Tensor:
    """view1d_as_2d."""
    return tensor.unsqueeze(2) if tensor.dim() == _LINE else tensor


def _by_torchs_depthwise(tensor: Tensor, weight: Tensor, groups: int, *, transposed: bool) -> bool:
    """use_cudnn_depthwise is false: torch's own kernel. fp16, where cuDNN may be chosen, is taken to go there too."""
    depthwise = not transposed and groups > 1 and tensor.shape[1] == groups and tensor.dim() == _IMAGE
    return depthwise and layout_of(tensor, weight) == torch.contiguous_format


def _forward(args: Arguments) -> Steps:
    """The input copied to the format before the result is made, the weight after (cudnn_convolution)."""
    tensor, weight, _, stride, padding, dilation, transposed, more, groups = args[:9]
    result = _result(tensor.shape, weight.shape, (stride, padding, dilation, more), groups, transposed=transposed)
    line = contiguous(tensor) if tensor.dim() == _LINE else ()  # "avoid accidentally going through NHWC"
    tensor = tensor.contiguous() if line else tensor
    tensor, weight = _in_two_dimensions(tensor), _in_two_dimensions(weight)
    if _by_torchs_depthwise(tensor, weight, groups, transposed=transposed):
        return ((*line, *contiguous(tensor, weight), RESULTS),)
    layout = layout_of(tensor, weight)
    copied = contiguous(tensor, memory_format=layout)
    weights = contiguous(weight, memory_format=layout)
    workspace = _Workspace(tensor, weight, result, stride, layout, groups, transposed=transposed)
    return ((*line, *copied, RESULTS, *weights, workspace.of_result()),)


def _backward(args: Arguments) -> Steps:
    """convolution_backward, and cudnn_convolution_backward, whose two halves each make the gradient contiguous.

    A gradient that suggests another format than the input is converted before, once for both; a transposed convolution
    makes any gradient contiguous then (cudnn_convolution_transpose_backward).
    """
    gradient, tensor, weight, _, stride, _, _, transposed, _, groups, mask = args[:11]
    sums: Steps = ()
    if mask[_BIAS]:
        sums = (_BIAS, reduction(gradient, [side for side in range(gradient.dim()) if side != 1]))
    line = contiguous(tensor) if tensor.dim() == _LINE else ()
    tensor = tensor.contiguous() if line else tensor
    gradient, tensor, weight = (_in_two_dimensions(each) for each in (gradient, tensor, weight))
    wanted = tuple(place for place in (_INPUT, _WEIGHT) if mask[place])
    if _by_torchs_depthwise(tensor, weight, groups, transposed=transposed):
        return ((*line, (*contiguous(gradient, tensor, weight), *reversed(wanted)), *sums),)
    layout = layout_of(tensor, weight)
    before = contiguous(tensor, memory_format=layout) if mask[_WEIGHT] else ()
    converted = suggest_memory_format(gradient) != layout
    copied = (copy_of(gradient),) if converted else contiguous(gradient, memory_format=layout)
    first, again = (copied, ()) if converted or transposed else ((), copied)
    halves: list[Steps] = []
    workspace = _Workspace(tensor, weight, gradient.shape, stride, layout, groups, transposed=transposed)
    if mask[_INPUT]:
        halves.append((_INPUT, *again, *contiguous(weight, memory_format=layout), workspace.of_input()))
    if mask[_WEIGHT]:
        halves.append((*again, _WEIGHT, workspace.of_weight()))
    return ((*line, (*before, *first, *halves), *sums),)


def _result(
    image: Sequence[int], weight: Sequence[int], how: Sequence[Sequence[int]], groups: int, *, transposed: bool
) -> list[int]:
    """Shape of a convolution's result; `how` is stride, padding, dilation and what a transposed one adds.

    Each of these has a number for each side, or one for all.
    """
    count, sides = len(image) - 2, []
    every = [each if len(each) == count else [each[0]] * count for each in how]
    for side, kernel, stride, padding, dilation, more in zip(image[2:], weight[2:], *every, strict=True):
        reach = dilation * (kernel - 1) + 1
        if transposed:
            sides.append((side - 1) * stride - 2 * padding + reach + more)
        else:
            sides.append((side + 2 * padding - reach) // stride + 1)
    return [image[0], weight[1] * groups if transposed else weight[0], *sides]


class _Workspace:
    """What cuDNN takes for a convolution; nothing of one in groups, for which no rule was found.

    Args:
        image: the convolution's input.
        weight: its weights.
        result: the shape of what comes out.
        stride: by side.
        layout: of the image.
        groups: of channels.
        transposed: whether it is a transposed one, whose forward pass is the gradient of another's input.
    """

    def __init__(
        self,
        image: Tensor,
        weight: Tensor,
        result: Sequence[int],
        stride: Sequence[int],
        layout: torch.memory_format,
        groups: int,
        *,
        transposed: bool,
    ) -> None:
        self._element, self._in_groups, channels = image.element_size(), groups > 1, image.shape[1]
        kernel, is_last = max(weight.shape[2:]), layout != torch.contiguous_format
        is_pointwise = kernel == max(stride) == 1
        self._is_product = is_pointwise and math.prod(image.shape[2:]) % 2 == 0  # of matrices as they lie
        shapes = [image.shape, result] if is_last or kernel == 1 else [image.shape, result, weight.shape]
        odd = [each for each in shapes if each[1] * self._element % _CHANNELS_BYTES]
        self._copies = self._forward = sum(map(self._copied, odd if is_last else shapes))
        if channels * self._element < _CHANNELS_BYTES and (kernel <= _SMALL_KERNEL or self._element == FLOAT):
            self._forward = self._copies if transposed else 0  # there are kernels for images of few channels
        elif self._element == FLOAT and channels <= _NARROW and not (is_last or transposed):
            self._forward -= self._copied(result)  # which is written where it belongs
        self._sums = FLOAT * image.shape[0] * weight.numel()

    def _copied(self, shape: Sequence[int]) -> int:
        """Bytes of a copy whose channels are as many as matrix units take."""
        return shape[0] * round_up(shape[1] * self._element, _CHANNELS_BYTES) * math.prod(shape[2:])

    def _block(self, *lengths: int) -> Block:
        element, in_groups = self._element, self._in_groups
        return Block(lambda gpu, *found: min(found) if element in gpu.matrix_units and not in_groups else 0, lengths)

    def of_result(self) -> Block:
        """In the forward pass."""
        return self._block(0 if self._is_product else self._forward)

    def of_input(self) -> Block:
        """For the gradient of the input."""
        return self._block(0 if self._is_product else self._copies)

    def of_weight(self) -> Block:
        """For the gradient of the weights: of a product of matrices, sums of each sample, where that is less."""
        return self._block(self._copies, self._sums if self._is_product else self._copies)


CONVOLUTIONS: dict[OpOverload, Callable[[Arguments], Steps]] = {
    aten.convolution.default: _forward,
    aten.convolution_backward.default: _backward,
}
