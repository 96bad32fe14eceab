"""Recurrent layers as CUDA builds run them: all layers and steps in one operator of cuDNN, on weights in one buffer.

Without cuDNN torch has a loop over cells, which is what it would run of fake tensors, step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from batchtune.estimate.memory.recurrent import GRU, LSTM, Layers, buffer_elements, reserve_bytes

aten = torch.ops.aten
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": LSTM, "gru": GRU}  # cudnnRNNMode_t
_FLATTENED = (torch.float16, torch.float32, torch.float64)  # of which `torch.backends.cudnn.is_acceptable`
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd  # noqa: SLF001 - torch's own, no decomposition for compilers
Made = tuple[Tensor | None, Tensor | None, Tensor | None, list[Tensor]]


def operators() -> Iterator[tuple[str, str, Callable[..., object]]]:
    """Name, dispatch key and what is run in place of torch's own."""
    for name, mode in _MODES.items():
        for overload in ("input", "data"):
            operator = getattr(getattr(aten, name), overload)
            yield f"{name}.{overload}", "AutogradCUDA", partial(_in_one, operator, mode)
    yield "_pad_packed_sequence", "AutogradCUDA", _padded
    yield "_cudnn_rnn", "Meta", _results
    yield "_cudnn_rnn_backward", "Meta", _gradients
    yield "_cudnn_rnn_flatten_weight", "Meta", _buffer


def flatten_parameters(module: nn.RNNBase) -> None:
    """`nn.RNNBase.flatten_parameters`, for tensors without addresses: the weights become views of one new buffer."""
    weights = [each for each in module._flat_weights if isinstance(each, Tensor)]  # noqa: SLF001
    kinds = {(each.device.type, each.dtype) for each in weights}
    cudnn = torch.backends.cudnn
    if not cudnn.enabled or len(weights) < len(module._flat_weights_names) or len(kinds) > 1:  # noqa: SLF001
        return
    if kinds.pop() not in {("cuda", each) for each in _FLATTENED}:
        return
    per_layer = (4 if module.bias else 2) + (module.proj_size > 0)
    sizes = (module.hidden_size, module.proj_size, module.num_layers, module.batch_first, module.bidirectional)
    with torch.no_grad():
        how = (per_layer, module.input_size, _MODES[module.mode.lower()], *sizes)
        buffer = aten._cudnn_rnn_flatten_weight(weights, *how)  # noqa: SLF001
        for weight, part in zip(weights, _parts(buffer, weights), strict=True):
            weight.set_(part)  # type: ignore[call-overload]


def _parts(buffer: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Views of a buffer, of the weights' shapes, one after the other."""
    sizes = [each.numel() for each in weights]
    parts = buffer[: sum(sizes)].split(sizes)
    return [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]


def _in_one(operator: OpOverload, mode: int, *args: Any) -> tuple[Tensor, ...]:
    """`_cudnn_impl` in RNN.cpp, and torch's loop where cuDNN is switched off."""
    if not torch.backends.cudnn.enabled:
        looped: tuple[Tensor, ...] = operator._op_dk(_COMPOSITE, *args)  # noqa: SLF001
        return looped
    is_packed = operator._overloadname == "data"  # noqa: SLF001
    data, *rest = (args[0], *args[2:]) if is_packed else args[:-1]
    states, weights, has_biases, count, dropout, is_training, is_bidirectional = rest
    hx, cx = (states, None) if isinstance(states, Tensor) else states
    hidden = hx.shape[2] if cx is None else cx.shape[2]
    projected = hx.shape[2] if hidden != hx.shape[2] else 0
    sizes = [hx.shape[1]] * len(args[1]) if is_packed else []
    batch_first = False if is_packed else args[-1]
    layers = Layers(mode, hidden, projected, count, batch_first, dropout, is_training, is_bidirectional, sizes)
    per_layer = (4 if has_biases else 2) + (projected > 0)
    buffer = _shared(weights, buffer_elements(weights, per_layer, layers))
    if torch.is_autocast_enabled("cuda"):
        buffer, weights, cx, hx, data = _in_half(buffer, weights, per_layer, layers, (cx, hx, data))
    with torch.autocast("cuda", enabled=False):
        made = aten._cudnn_rnn(data, weights, per_layer, buffer, hx, cx, *layers, None)  # noqa: SLF001
    return made[:2] if cx is None else made[:3]  # type: ignore[no-any-return]


def _padded(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """`_pad_packed_sequence` in PackedSequence.cpp, of sequences that are all as long as the longest."""
    steps, rest = len(batch_sizes), data.shape[1:]
    samples = len(data) // steps
    padded = data.new_full((max(steps, total_length), samples, *rest), padding)
    padded[:steps, :samples].copy_(data.view(steps, samples, *rest))
    return padded.transpose(0, 1) if batch_first else padded, torch.full((samples,), steps)


def _shared(weights: Sequence[Tensor], elements: int) -> Tensor | None:
    """`try_get_weight_buf`: the buffer of which all weights are parts; None where they are not."""
    storages = {each.untyped_storage()._cdata for each in weights}  # noqa: SLF001
    size = weights[0].untyped_storage().nbytes() // weights[0].element_size()
    return weights[0].detach().as_strided((elements,), (1,), 0) if len(storages) == 1 and size >= elements else None


def _in_half(
    buffer: Tensor | None, weights: Sequence[Tensor], per_layer: int, layers: Layers, others: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    """AutocastRNN.cpp: float32 becomes half, whichever type autocast has, and the weights a new buffer, by autograd."""

    def cast(tensor: Tensor | None) -> Tensor | None:
        return tensor.half() if tensor is not None and tensor.dtype == torch.float32 else tensor

    if weights[0].dtype == torch.float32:
        buffer = weights[0].new_zeros(buffer_elements(weights, per_layer, layers), dtype=torch.float16)
        parts = (part.detach() for part in _parts(buffer, weights))
        weights = [part.copy_(weight) for part, weight in zip(parts, weights, strict=True)]
    return buffer, weights, *map(cast, others)


def _results(
    data: Tensor,
    weights: Sequence[Tensor],
    per_layer: int,
    buffer: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    *how: Any,
) -> tuple[Tensor, ...]:
    """Output, last states, reserve and the weights' buffer, as `_cudnn_rnn` lays them out."""
    layers = Layers(*how[:-1])
    if not hx.is_contiguous() or not (cx is None or cx.is_contiguous()):
        raise RuntimeError("rnn: hx and cx have to be contiguous")
    rows, width = data.shape[:-1], (layers.projected_size or layers.hidden_size) * layers.directions
    output = data.new_empty(*(reversed(rows) if layers.swaps else rows), width)
    reserve = data.new_empty(reserve_bytes(data, hx, layers) if layers.is_training else 0, dtype=torch.uint8)
    if buffer is None:
        buffer = data.new_empty(buffer_elements(weights, per_layer, layers))
    last = torch.empty_like(hx), hx.new_empty(0) if cx is None else torch.empty_like(cx)
    return output.transpose(0, 1) if layers.swaps else output, *last, reserve, buffer


def _gradients(*args: Any) -> Made:
    """Gradients of input, states and weights, as `_cudnn_rnn_backward` lays them out."""
    data, weights, per_layer, buffer, hx, cx, _, *gradients = args[:10]
    layers, wanted = Layers(*args[10:19]), args[21]
    if all(each is None for each in gradients):
        return None, None, None, []
    if not layers.is_training:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")
    of_input = (
        data.new_empty(data.transpose(0, 1).shape).transpose(0, 1) if layers.swaps else data.new_empty(data.shape)
    )
    of_weights: list[Tensor] = []
    if wanted[3] and per_layer >= 4:  # noqa: PLR2004 - with biases: views of one buffer
        of_weights = _parts(buffer.new_empty(buffer.shape), weights)
    elif wanted[3]:
        of_weights = [each.new_empty(each.shape) for each in weights]
    return of_input, torch.empty_like(hx), None if cx is None else torch.empty_like(cx), of_weights


def _buffer(weights: Sequence[Tensor], per_layer: int, _: int, *how: Any) -> Tensor:
    *sizes, is_bidirectional = how
    layers = Layers._make((*sizes, 0.0, True, is_bidirectional, ()))  # no dropout, in training, nothing packed
    return weights[0].new_empty(buffer_elements(weights, per_layer, layers))
