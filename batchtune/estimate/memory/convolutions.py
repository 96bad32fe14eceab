"""Memory inside convolutions: copies and sums of Convolution.cpp and cudnn/ConvShared.cpp, and cuDNN's workspace.

What cuDNN takes is not documented. It was measured on an H100 with cuDNN 9, in TF32 and bf16, for the convolutions of
nine models and of many shapes: matrix units multiply images whose channels lie last and are a multiple of 16 bytes, so
that whatever lies otherwise is copied: input, result and weights. tests/benchmarks/results/convolutions.md has the
figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._meta_registrations import calc_conv_nd_return_shape
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from batchtune.estimate.memory.allocator import round_up
from batchtune.estimate.memory.events import FLOAT, RESULTS, Arguments, Block, Steps
from batchtune.estimate.memory.reductions import contiguous, copy_of, reduction

aten = torch.ops.aten
_INPUT, _WEIGHT, _BIAS = 0, 1, 2  # places of the gradients
_LINE, _IMAGE = 3, 4  # dimensions with those of samples and channels
_CHANNELS_BYTES = 16  # a multiple of which matrix units take
_CHANNELS = 16  # a multiple of which each group has
_SMALL_KERNEL = 4  # a side
_NARROW = 64  # channels
_FEW = (16, 32)  # channels
_LEAST_SIDE, _MOST_SIDE = 14, 32  # of an image that has a spectrum
_MANY, _MORE = 64, 512  # samples from which, of more than 16 channels (not with 32), and of those (not with 128)
_COMPLEX = 8  # bytes


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
    how = (stride, padding, dilation, transposed, groups)
    result = calc_conv_nd_return_shape(tensor, weight, *how, more if transposed else None)
    line = contiguous(tensor) if tensor.dim() == _LINE else ()  # "avoid accidentally going through NHWC"
    tensor = tensor.contiguous() if line else tensor
    tensor, weight = _in_two_dimensions(tensor), _in_two_dimensions(weight)
    if _by_torchs_depthwise(tensor, weight, groups, transposed=transposed):
        return ((*line, *contiguous(tensor, weight), RESULTS),)
    layout = layout_of(tensor, weight)
    copied = contiguous(tensor, memory_format=layout)
    weights = contiguous(weight, memory_format=layout)
    workspace, _, _ = _workspaces(tensor, weight, result, (stride, dilation), layout, groups, transposed=transposed)
    return ((*line, *copied, RESULTS, *weights, workspace),)


def _backward(args: Arguments) -> Steps:
    """convolution_backward, and cudnn_convolution_backward, whose two halves each make the gradient contiguous.

    A gradient that suggests another format than the input is converted before, once for both; a transposed convolution
    makes any gradient contiguous then (cudnn_convolution_transpose_backward).
    """
    gradient, tensor, weight, _, stride, _, dilation, transposed, _, groups, mask = args[:11]
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
    how = (gradient.shape, (stride, dilation), layout, groups)
    _, of_input, of_weight = _workspaces(tensor, weight, *how, transposed=transposed)
    if mask[_INPUT]:
        halves.append((_INPUT, *again, *contiguous(weight, memory_format=layout), of_input))
    if mask[_WEIGHT]:
        halves.append((*again, _WEIGHT, of_weight))
    return ((*line, (*before, *first, *halves), *sums),)


def _workspaces(
    image: Tensor,
    weight: Tensor,
    result: Sequence[int],
    steps: tuple[Sequence[int], Sequence[int]],
    layout: torch.memory_format,
    groups: int,
    *,
    transposed: bool,
) -> tuple[Block, Block, Block]:
    """What cuDNN takes for a convolution's result, and for the gradients of its input and weights.

    A transposed one is the gradient of a convolution from its result to its image. `result` is a shape, `steps` are
    stride and dilation, and the layout is that of the image.
    """
    element = image.element_size()
    source, target = (result, image.shape) if transposed else (image.shape, result)
    stride, dilation = map(max, steps)

    def block(size: Callable[..., int], *lengths: int) -> Block:
        is_copied = groups == 1 or groups < source[1]  # nothing is for each channel by itself
        return Block(lambda gpu, *found: size(*found) if is_copied and element in gpu.matrix_units else 0, lengths)

    how = (element, groups, layout != torch.contiguous_format)
    forward, inward, few = _copied(source, target, weight, stride, *how)
    is_plain = groups == stride == dilation == 1 and element == FLOAT and layout == torch.contiguous_format
    many = _of_spectra(source, target, weight) if is_plain and _has_spectra(source, target, weight) else few
    if element != FLOAT and transposed:
        inward = forward = max(forward, inward)
    enough = _MANY if source[1] > _FEW[0] else _MORE
    passes = block(int, forward), block(int, inward)
    by_size = block(lambda samples, few, many: many if samples >= enough else few, source[0], few, many)
    return (*(reversed(passes) if transposed else passes), by_size)


def _copied(
    source: Sequence[int], target: Sequence[int], weight: Tensor, stride: int, element: int, groups: int, is_last: bool
) -> tuple[int, int, int]:
    """Bytes that are copied for the result, and for the gradients of input and weights."""
    kernel, sides = max(weight.shape[2:]), source[2:]
    is_small, is_tf32 = kernel <= _SMALL_KERNEL, element == FLOAT and not is_last

    def copy(shape: Sequence[int]) -> int:
        return shape[0] * _taken_for(shape[1], element, groups) * element * math.prod(shape[2:])

    shapes = [source, target] if is_last or kernel == 1 or groups > 1 else [source, target, weight.shape]
    odd = [each for each in shapes if _taken_for(each[1], element, groups) != each[1]]
    forward = weights = copies = sum(map(copy, odd if is_last else shapes))
    if source[1] * element < _CHANNELS_BYTES and (is_small or element == FLOAT):  # there are kernels for few channels
        if not is_tf32 or len(sides) != _IMAGE - 2:
            return 0, copies, copies
        unpadded = 0 if is_small else element * (math.prod(source) + math.prod(target))
        return 0 if stride >= kernel else unpadded, 0, unpadded
    if kernel == stride == 1 and math.prod(sides) % 2 == 0:  # a product of matrices as they lie
        return 0, 0, min(copies, FLOAT * source[0] * weight.numel())  # sums of each sample
    if groups > 1 and element == FLOAT:  # whatever the layout
        weights = sum(map(copy, shapes))
    if is_tf32 and source[1] <= _NARROW and source[1] < target[1]:
        forward = 0 if stride > 1 and source[1] <= _FEW[1] else copy(source)  # the result is written where it belongs
    return forward, copies, weights


def _has_spectra(source: Sequence[int], target: Sequence[int], weight: Tensor) -> bool:
    """Whether gradients of the weights are found by Fourier transforms: for most such channels and sides they were."""
    channels, wanted, sides = source[1], target[1], source[2:]
    is_seen = _FEW[0] <= channels <= wanted <= _FEW[1] or (channels > _NARROW and _FEW[1] <= wanted <= _NARROW)
    fits = len(sides) == _IMAGE - 2 and all(_LEAST_SIDE <= side <= _MOST_SIDE for side in sides)
    return is_seen and fits and 1 < max(weight.shape[2:]) <= _SMALL_KERNEL


def _of_spectra(source: Sequence[int], target: Sequence[int], weight: Tensor) -> int:
    """Twice the spectra of image and result, whose sides are powers of two, and a copy of the result."""
    reach = (side + kernel - 1 for side, kernel in zip(source[2:], weight.shape[2:], strict=True))
    rows, columns = (1 << (each - 1).bit_length() for each in reach)
    spectra = source[0] * (source[1] + target[1]) * rows * (columns // 2 + 1) * _COMPLEX
    return 2 * spectra + FLOAT * math.prod(target)


def _taken_for(channels: int, element: int, groups: int) -> int:
    """As how many channels matrix units take so many."""
    if groups == 1:
        return round_up(channels * element, _CHANNELS_BYTES) // element
    each = channels // groups
    return groups * (each if each <= _CHANNELS // 2 else round_up(each, _CHANNELS))


CONVOLUTIONS: dict[OpOverload, Callable[[Arguments], Steps]] = {
    aten.convolution.default: _forward,
    aten.convolution_backward.default: _backward,
}
