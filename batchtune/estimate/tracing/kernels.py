"""What operators do on CUDA and not on a CPU: which have a kernel there, and which kernel attention runs.

That choice decides whether T x T scores are kept.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload

from batchtune.estimate.tracing import recurrent

# What native_functions.yaml gives a kernel for CUDA and, for all other devices, a composite of several operators, each
# with a result of its own: without the kernel, that composite is what a CPU-only build would run.
_ONE_KERNEL_ON_CUDA = ("silu_backward", "mish_backward", "_fused_rms_norm")
_GRU_WORKSPACE, _GRU_GATES = 5, 3  # times the hidden size
_FLASH_MAX_HEAD = 256  # check_head_dim_size_flash in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
_FRAMES_OF_SAMPLES = 3  # dimensions of log-probabilities: frames, samples, labels
_MEAN = 1  # at::Reduction::Mean
_HALF = (torch.float16, torch.bfloat16)
_BATCHED_HEADS = 4  # (batch, heads, length, head size); anything else goes to the math kernel


@contextlib.contextmanager
def cuda_kernels() -> Iterator[None]:
    """Kernels by name only, which tensors without data never reach, and attention's choice of an sm80 or later GPU.

    CPU builds only know the math kernel there. The choice is registered with the dispatcher and not as a function mode,
    because such a mode is off while checkpointing recomputes inside backward.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:  # noqa: SLF001
        for name in _ONE_KERNEL_ON_CUDA:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):  # noqa: SLF001
                library.impl(name, _not_to_be_run, "CUDA")
        for name, shapes in _GRU_CELLS.items():
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):  # noqa: SLF001
                library.impl(name, shapes, "Meta")
        library.impl("_thnn_fused_lstm_cell", _lstm_cell, "Meta", allow_override=True)
        library.impl("_grouped_mm", _grouped_mm, "Meta", allow_override=True)
        for name, device in itertools.product(("ctc_loss.Tensor", "ctc_loss.IntList"), ("AutogradCUDA", "AutogradCPU")):
            library.impl(name, _ctc_loss, device)
        for name, device in itertools.product(_COMPARISONS, ("AutogradCUDA", "AutogradCPU")):
            library.impl(name, _COMPARISONS[name], device)
        library.impl("_ctc_loss_backward", lambda _, log_probs, *__: log_probs.new_empty(log_probs.shape), "Meta")
        for name, shapes in _SPARSE.items():
            library.impl(name, shapes, "SparseMeta", allow_override=True)
        library.impl("scaled_dot_product_attention", _attention, "AutogradCUDA")
        for name, key, replacement in recurrent.operators():
            library.impl(name, replacement, key, allow_override=True)
        yield


def _lstm_cell(gates: Tensor, _: object, cell: Tensor, *__: object) -> tuple[Tensor, Tensor, Tensor]:
    """As of a cell of a GRU; torch's own rule asks for biases."""
    return torch.empty_like(cell), torch.empty_like(cell), torch.empty_like(gates)


def _gru_cell(_: object, __: object, hidden: Tensor, *___: object) -> tuple[Tensor, Tensor]:
    """The shapes of a cell's results in RNN.cu."""
    return torch.empty_like(hidden), hidden.new_empty(len(hidden), hidden.shape[1] * _GRU_WORKSPACE)


def _gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    rows, gates = len(workspace), workspace.shape[1] // _GRU_WORKSPACE * _GRU_GATES
    of_input, of_hidden = workspace.new_empty(rows, gates), workspace.new_empty(rows, gates)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, torch.empty_like(grad), *biases


_GRU_CELLS = {"_thnn_fused_gru_cell": _gru_cell, "_thnn_fused_gru_cell_backward": _gru_cell_backward}


def _grouped_mm(
    left: Tensor, right: Tensor, offsets: Tensor | None = None, _: object = None, dtype: torch.dtype | None = None
) -> Tensor:
    """The shape of a product by groups, as of experts; torch's own rule is for bf16 only, as its quickest kernel is."""
    groups: tuple[int, ...] = left.shape[:-2] if right.dim() > 2 else ()  # noqa: PLR2004
    if offsets is not None and left.dim() == right.dim() == 2:  # noqa: PLR2004
        groups = offsets.shape
    columns, aligned = right.shape[-1], 16 // left.element_size()  # rows begin at multiples of 16 bytes
    rows = left.new_empty(*groups, left.shape[-2], -(-columns // aligned) * aligned, dtype=dtype)
    return rows[..., :columns]


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    _: object,
    target_lengths: Tensor | list[int],
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """`ctc_loss_impl` in LossCTC.cpp, which reads lengths; those that are data are here as long as may be."""
    log_probs = log_probs if log_probs.dim() == _FRAMES_OF_SAMPLES else log_probs[:, None]
    frames, samples = log_probs.shape[:2]
    if isinstance(target_lengths, Tensor):
        if targets.dim() == 1 and samples > 1:
            raise NotImplementedError(
                "targets of CTC one after another, whose lengths are data; pad them: [batch, length]"
            )
        target_lengths = [targets.shape[-1]] * samples
    if targets.dim() == 1 and (targets.dtype, log_probs.dtype, blank) == (torch.int32, torch.float32, 0):
        raise NotImplementedError("cuDNN's CTC, whose workspace is not known; make its targets int64")
    losses: Tensor = torch.ops.aten._ctc_loss(  # noqa: SLF001
        log_probs, targets, [frames] * samples, target_lengths, blank, zero_infinity
    )[0]
    if zero_infinity:
        losses = torch.where(losses == float("inf"), losses.new_zeros(()), losses)
    if reduction == _MEAN:
        return (losses / losses.new_empty(samples).clamp_min(1)).mean()
    return losses.sum() if reduction else losses


def _equal(left: Tensor, right: Tensor) -> bool:
    """`cuda_equal` in Equal.cpp, whose answer follows from the shapes, or from both being one; else a value is read."""
    if left.shape != right.shape:
        return False
    return left is right or not left.numel() or bool((left == right).all())


def _allclose(left: Tensor, right: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """`allclose` in TensorCompare.cpp."""
    return bool(torch.isclose(left, right, rtol, atol, equal_nan).all())


_COMPARISONS = {"equal": _equal, "allclose": _allclose}


def _sparse(indices: Tensor, values: Tensor, like: Tensor, *, coalesced: bool) -> Tensor:
    sides = indices.shape[0], values.dim() - 1
    make = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors  # noqa: SLF001
    out: Tensor = make(
        *sides, like.shape, indices, values, dtype=values.dtype, layout=torch.sparse_coo, device=values.device
    )
    return out._coalesced_(coalesced)


def _sparse_clone(tensor: Tensor, *, memory_format: object = None) -> Tensor:  # noqa: ARG001
    """A copy; in backward it is the gradient itself, which AccumulateGrad in accumulate_grad.h takes as it is."""
    indices, values = tensor._indices(), tensor._values()  # noqa: SLF001
    if torch.is_grad_enabled() or torch._C._current_graph_task_id() == -1:  # noqa: SLF001
        indices, values = indices.clone(), values.clone()
    return _sparse(indices, values, tensor, coalesced=tensor.is_coalesced())


def _coalesced(tensor: Tensor) -> Tensor:
    """`_coalesce_sparse_cuda` in SparseCUDATensor.cpp where no index is there twice, as far as there are so many."""
    indices, values = tensor._indices(), tensor._values()  # noqa: SLF001
    rows = min(values.shape[0], math.prod(tensor.shape[: tensor.sparse_dim()]))
    new = values.new_empty(rows, *values.shape[1:])
    return _sparse(indices.new_empty(indices.shape[0], rows), new, tensor, coalesced=True)


def _sparse_mask(tensor: Tensor, mask: Tensor) -> Tensor:
    """The values of a dense tensor where a sparse one has some."""
    values = tensor.new_empty(mask._values().shape)  # noqa: SLF001
    return _sparse(mask._indices().clone(), values, mask, coalesced=mask.is_coalesced())  # noqa: SLF001


_SPARSE = {"clone": _sparse_clone, "_coalesce": _coalesced, "sparse_mask": _sparse_mask}


def _not_to_be_run(*_: object) -> NoReturn:
    raise NotImplementedError("a kernel for tensors without data")


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
    aten, allowed = torch.ops.aten, torch.backends.cuda
    batched, half = query.dim() == _BATCHED_HEADS, query.dtype in _HALF
    small = query.shape[-1] <= _FLASH_MAX_HEAD
    if batched and half and allowed.flash_sdp_enabled() and attn_mask is None and small:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    efficient = allowed.mem_efficient_sdp_enabled() and (half or query.dtype == torch.float32) and not enable_gqa
    if batched and efficient:
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        needs_gradient = query.requires_grad or key.requires_grad or value.requires_grad
        found = aten._scaled_dot_product_efficient_attention(  # noqa: SLF001
            query, key, value, bias, needs_gradient, dropout_p, is_causal, scale=scale
        )
    else:
        found = aten._scaled_dot_product_attention_math(  # noqa: SLF001
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
    out: Tensor = found[0]
    return out


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


def _ctc(log_probs: Tensor, _: Tensor, __: object, targets: Sequence[int], *___: object) -> tuple[Tensor, Tensor]:
    """What CTC makes where lengths are numbers, not tensors."""
    frames, samples, _classes = log_probs.shape
    return log_probs.new_empty(samples), log_probs.new_empty(samples, frames, 2 * max(targets) + 1)


def _least_squares(matrix: Tensor, right: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solution, residuals, rank and singular values, as the CPU's default method tells them; on a GPU nobody knows."""
    if matrix.device.type != "cpu":
        raise NotImplementedError("what least squares take on a GPU is not known")
    batch, columns = matrix.shape[:-2], matrix.shape[-1]
    several = right.shape[-1:] if right.dim() == matrix.dim() else ()
    nothing = right.new_empty(0)
    return right.new_empty(*batch, columns, *several), nothing, matrix.new_empty(batch, dtype=torch.int64), nothing


MADE_ALIKE: dict[OpOverload, Callable[..., tuple[Tensor, ...]]] = {
    torch.ops.aten._ctc_loss.default: _ctc,  # noqa: SLF001
    torch.ops.aten.linalg_lstsq.default: _least_squares,
}
"""Operators whose results have these sizes whatever the data; torch has no rule for them, or one that asks for data."""
