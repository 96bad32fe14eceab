"""Memory of recurrent layers in cuDNN: `_cudnn_rnn` and `_cudnn_rnn_backward` in cudnn/RNN.cpp, and cuDNN's own.

Copies, results and the one buffer of all weights follow from RNN.cpp. What cuDNN keeps for backward (the reserve) and
works in (the workspace) is not documented. An LSTM has to keep four gates and a cell for each step, and what one layer
hands to the next; that is just what a GPU of 2017 kept of four layers in fp32: 736,000,000 bytes at 25,000 steps of
samples and 320 hidden units, five values a unit and the outputs between layers, a GRU 864,000,000, six (a maintainer in
pytorch#2895). Workspaces there, 17,730,560 and 13,169,920 bytes at 100 samples, are the weights' matrices and 11 and 8
values a unit. For a plain RNN nothing was seen: its gate and its state are taken. Only a GPU can say what later
versions of cuDNN, their persistent kernels, half precision, projections and dropout's mask between layers change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from batchtune.estimate.memory.events import RESULTS, Arguments, Steps, bytes_of
from batchtune.estimate.memory.reductions import contiguous, copy_of

aten = torch.ops.aten
LSTM, GRU = 2, 3  # cudnnRNNMode_t
_GATES, _KEPT, _WORKED = {LSTM: 4, GRU: 3}, {LSTM: 5, GRU: 6}, {LSTM: 11, GRU: 8}
_PLAIN_GATES, _PLAIN_KEPT, _PLAIN_WORKED = 1, 2, 5
_WITH_BIASES = 4  # weights of each layer, or five with a projection; two or three without


class Layers(NamedTuple):
    """What `_cudnn_rnn` is told of its layers, in its order from the mode on."""

    mode: int
    hidden_size: int
    projected_size: int
    number: int
    batch_first: bool
    dropout: float
    is_training: bool
    is_bidirectional: bool
    batch_sizes: Sequence[int]

    @property
    def directions(self) -> int:
        """One or two."""
        return 2 if self.is_bidirectional else 1

    @property
    def swaps(self) -> bool:
        """Whether samples and steps change places: cuDNN has the steps first, and packed sequences neither."""
        return self.batch_first and not self.batch_sizes

    def steps(self, data: Tensor) -> int:
        """Time steps of the longest sequence."""
        return len(self.batch_sizes) or data.shape[1 if self.batch_first else 0]


def buffer_elements(weights: Sequence[Tensor], per_layer: int, layers: Layers) -> int:
    """Elements of the buffer of all weights: cuDNN has places for biases, whether there are any or not."""
    biases = 0 if per_layer >= _WITH_BIASES else 2 * _GATES.get(layers.mode, _PLAIN_GATES) * layers.hidden_size
    return sum(each.numel() for each in weights) + biases * layers.number * layers.directions


def reserve_bytes(data: Tensor, states: Tensor, layers: Layers) -> int:
    """What cuDNN keeps for backward."""
    values = _KEPT.get(layers.mode, _PLAIN_KEPT) * layers.number + layers.number - 1
    return values * layers.steps(data) * _units(data, states, layers)


def _workspace_bytes(data: Tensor, weights: Sequence[Tensor], states: Tensor, layers: Layers) -> int:
    values = _WORKED.get(layers.mode, _PLAIN_WORKED) * layers.number
    return _in_matrices(weights) * data.element_size() + values * _units(data, states, layers)


def _units(data: Tensor, states: Tensor, layers: Layers) -> int:
    """Bytes of one value for each hidden unit of a layer, of all samples."""
    return layers.hidden_size * layers.directions * states.shape[1] * data.element_size()


def _in_matrices(weights: Sequence[Tensor]) -> int:
    return sum(each.numel() for each in weights if each.dim() > 1)


def flops(args: Arguments) -> int:
    """Operations of the forward pass: each matrix once for every step of every sample, two for each element."""
    data: Tensor = args[0]
    return 2 * _in_matrices(args[1]) * (data.numel() // data.shape[-1])


def _forward(args: Arguments) -> Steps:
    """Input in order of steps, output and last states, weights in one buffer unless they are, workspace and reserve."""
    data, weights, states, layers = args[0], args[1], args[4], Layers(*args[6:15])
    data = data.transpose(0, 1) if layers.swaps else data
    workspace = bytes_of(_workspace_bytes(args[0], weights, states, layers))
    return ((*contiguous(data), 0, 1, 2, 4, workspace, 3),)


def _backward(args: Arguments) -> Steps:
    """Zeros for gradients that there are none of; gradients of input and states, then the weights' in one buffer.

    Those are views of the buffer; where weights have no biases each is copied out of it.
    """
    data, weights, per_layer, _, states, cells, output, *gradients = args[:10]
    layers, wanted = Layers(*args[10:19]), args[21]
    if all(each is None for each in gradients):
        return (RESULTS,)
    likes = zip(gradients, (output, states, cells), strict=True)
    zeros = [copy_of(like) for gradient, like in likes if gradient is None and like is not None]
    data, of_output = (
        each.transpose(0, 1) if layers.swaps and each is not None else each for each in (data, gradients[0])
    )
    dense = contiguous(*(each for each in (of_output, *gradients[1:]) if each is not None))
    workspace, copied = bytes_of(_workspace_bytes(args[0], weights, states, layers)), contiguous(data)
    inward: Steps = (*copied, *dense, 0, 1, 2, workspace)
    if not wanted[3]:
        return ((*zeros, inward),)
    size = buffer_elements(weights, per_layer, layers) * data.element_size()
    buffer = () if per_layer >= _WITH_BIASES else (bytes_of(size),)
    outward: Steps = (*copied, *buffer, workspace, 3) if buffer else (*copied, 3, workspace)
    return ((*zeros, inward, outward),)


RECURRENT: dict[OpOverload, Callable[[Arguments], Steps]] = {
    aten._cudnn_rnn.default: _forward,  # noqa: SLF001
    aten._cudnn_rnn_backward.default: _backward,  # noqa: SLF001
}
FLOPS: dict[OpOverload, Callable[[Arguments], int]] = {
    aten._cudnn_rnn.default: flops,  # noqa: SLF001
    aten._cudnn_rnn_backward.default: lambda args: (1 + args[21][3]) * flops(args),  # noqa: SLF001
}
