"""Memory inside reductions, and inside losses that are reduced within one operator.

Partial results of reductions that are spread over blocks of threads: `gpu_reduce_kernel` in Reduce.cuh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from batchtune.estimate.memory.events import (
    FLOAT,
    INT,
    LONG,
    RESULTS,
    Arguments,
    Block,
    Gpu,
    Held,
    Step,
    Steps,
    bytes_of,
)

aten = torch.ops.aten
_THREADS, _FEWEST_VALUES, _MOST_VALUES = 512, 16, 256  # MAX_NUM_THREADS, min_ and max_values_per_thread
_WARP, _VECTOR, _LEAST_VECTORIZED = 32, 4, 128
_INDEXED_BYTES = 2**31 - 1  # by 32 bits; a larger tensor is halved until it is not
_WELFORD_BYTES = 16  # WelfordData: two floats, two 32-bit counts
_CHUNK = 1 << 16  # kChunkSize of MultiTensorApply.cuh
_PAIR_BYTES = 16  # of a float and the 64-bit index of it
_NONE = 0  # at::Reduction::None


def copy_of(tensor: Tensor, element_bytes: int | None = None) -> Block:
    """A copy of a tensor, in another type where its size is told."""
    return bytes_of(tensor.numel() * (element_bytes or tensor.element_size()))


def contiguous(*tensors: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> tuple[Block, ...]:
    """What `tensor.contiguous()` copies of each: nothing of one that is."""
    return tuple(copy_of(each) for each in tensors if not each.is_contiguous(memory_format=memory_format))


def reduction(
    tensor: Tensor,
    dims: Collection[int],
    *,
    element_bytes: int | None = None,
    partial_bytes: int | None = None,
    vector: int = _VECTOR,
) -> tuple[Block, Block] | tuple[()]:
    """Partial results and semaphores of a reduction.

    Args:
        tensor: what is reduced.
        dims: over which; none: over all.
        element_bytes: of the tensor as the kernel reads it, where it is cast.
        partial_bytes: of one partial result; those of the element, at least a float's.
        vector: input_vec_size, how many values a thread loads at once.
    """
    reduced = {dim % tensor.dim() for dim in dims} or set(range(tensor.dim()))
    sides = [(tensor.shape[side], tensor.stride(side), side) for side in range(tensor.dim()) if tensor.shape[side] > 1]
    summed = _coalesced(sorted((stride, size) for size, stride, side in sides if side in reduced))
    kept = _coalesced((stride, size) for size, stride, side in reversed(sides) if side not in reduced)
    if not summed:
        return ()
    along = not kept or summed[0][0] < kept[0][0]
    fastest = summed[0][0] if along else kept[0][0]
    element = element_bytes or tensor.element_size()
    others = [stride for stride, _ in (*summed, *kept[1:])]
    lengths = (
        math.prod(size for _, size in summed),
        math.prod(size for _, size in kept),
        int(along),
        vector if along and fastest == 1 and len(summed) == 1 else 1,
        *((int(tensor.storage_offset()), kept[0][1], *others) if fastest == 1 and not along else (1,)),
    )
    partial = partial_bytes or max(FLOAT, element)
    return (
        Block(lambda gpu, *each: _Spread.of(gpu, element, *each).results * partial, lengths),
        Block(lambda gpu, *each: _Spread.of(gpu, element, *each).semaphores * INT, lengths),
    )


def rows_summed(gpu: Gpu, rows: int, width: int, size: int) -> tuple[int, int]:
    """Bytes of partial results and of semaphores where `rows` rows of a contiguous matrix are summed."""
    spread = _Spread.of(gpu, size, rows, width, 0, 1, 0, width, width)
    return spread.results * max(FLOAT, size), spread.semaphores * INT


def _coalesced(sides: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """TensorIterator's dimensions, (stride, size) from the fastest on: one that continues another is part of it."""
    found: list[tuple[int, int]] = []
    for stride, size in sides:
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = (found[-1][0], found[-1][1] * size)
        else:
            found.append((stride, size))
    return found


class _Spread(NamedTuple):
    """`setReduceConfig`: how a reduction is spread over threads; 0 where one block of threads has all of an output."""

    results: int = 0
    semaphores: int = 0

    @classmethod
    def of(
        cls, gpu: Gpu, size: int, inputs: int, outputs: int, along: int, input_vector: int, *divisors: int
    ) -> _Spread:
        results = outputs
        while inputs * outputs * size > _INDEXED_BYTES:
            inputs, outputs = (inputs, -(-outputs // 2)) if along and outputs > 1 else (-(-inputs // 2), outputs)
        across, down = (inputs, outputs) if along else (outputs, inputs)
        vector = 1 if along else math.gcd(_VECTOR, *divisors)  # get_output_vec_size
        across //= (input_vector if across >= _LEAST_VECTORIZED else 1) if along else vector
        most = _THREADS // vector
        across, down = (min(1 << (max(1, each).bit_length() - 1), most) for each in (across, down))
        height = min(down, most // min(across, _WARP))
        width = min(across, most // height)
        step = width if along else 1
        values = -(-inputs // (step * height))
        grid = -(-(outputs // vector) // (1 if along else width))
        target = gpu.multiprocessors * (gpu.threads // (width * height))
        too_few = -(-inputs // step) < min(height * 16, _MOST_VALUES)
        if too_few or values < _MOST_VALUES or grid > target:
            return cls()
        ctas = max(min(-(-target // grid), -(-values // _FEWEST_VALUES)), -(-values // _MOST_VALUES))
        return cls(results * ctas * (1 if along else width * vector), grid) if ctas > 1 else cls()


def _dims(args: Arguments, place: int = 1) -> list[int]:
    named = args[place] if len(args) > place else None
    return [named] if isinstance(named, int) else list(named or ())


def _sum(args: Arguments) -> Steps:
    """sum_kernel_cuda in ReduceSumProdKernel.cu; whole numbers and bools are cast to 64 bits before (ReduceOps.cpp)."""
    tensor: Tensor = args[0]
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.int64:
        return (RESULTS, reduction(tensor, _dims(args)))
    return (RESULTS, (copy_of(tensor, LONG), *reduction(tensor, _dims(args), element_bytes=LONG)))


def _reduced(place: int = 1, **how: int) -> Callable[[Arguments], Steps]:
    """Operators that do nothing but reduce their first argument, over the dimensions at a place of the arguments."""
    return lambda args: (RESULTS, reduction(args[0], _dims(args, place), **how))


def _norms(args: Arguments) -> Steps:
    """foreach_tensor_norm_cuda in ForeachReduceOp.cu: as many partial results for each as the longest has chunks."""
    longest = max((-(-each.numel() // _CHUNK) for each in args[0]), default=0)
    return ((bytes_of(len(args[0]) * longest * max(FLOAT, args[0][0].element_size())), RESULTS),)


def _distances(args: Arguments) -> Steps:
    """_euclidean_dist in Distance.cpp: one product of both sides, each joined with its squared norms and with ones."""
    inside: list[Step] = []
    joined: list[Step] = []
    for tensor in args[:2]:
        rows, size = tensor.numel() // tensor.shape[-1], tensor.element_size()
        norms = bytes_of(rows * size, outlives=True)
        inside += [(copy_of(tensor), norms), bytes_of(rows * size)]
        joined.append(bytes_of(tensor.numel() * size + 2 * rows * size, outlives=True))
    return ((*inside, (copy_of(args[0]), joined[0]), (joined[1],), RESULTS),)


def _losses(args: Arguments) -> Tensor:
    """What holds each element's loss, without memory."""
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return torch.empty(shape, dtype=torch.promote_types(args[0].dtype, args[1].dtype), device="meta")


def _is_reduced(args: Arguments, place: int) -> bool:
    return bool((args[place] if len(args) > place else 1) != _NONE)


def _resized(elements: Callable[[Tensor], int], place: int = 2) -> Callable[[Arguments], Steps]:
    """A loss whose result is as large as all losses until they are reduced, beside the losses of so many elements."""

    def steps(args: Arguments) -> Steps:
        if not _is_reduced(args, place):
            return (RESULTS,)
        losses = _losses(args)
        size = losses.element_size()
        return (Held(RESULTS, losses.numel() * size), (bytes_of(elements(losses) * size), *reduction(losses, ())))

    return steps


def _losses_first(copies: int, place: int) -> Callable[[Arguments], Steps]:
    """A loss that is reduced after so many copies of all losses were made; one fewer where it is not reduced."""

    def steps(args: Arguments) -> Steps:
        losses, is_reduced = _losses(args), _is_reduced(args, place)
        made = (copy_of(losses),) * (copies if is_reduced else copies - 1)
        return ((*made, RESULTS, reduction(losses, ()) if is_reduced else ()),)

    return steps


REDUCTIONS: dict[OpOverload, Callable[[Arguments], Steps]] = {
    aten._euclidean_dist.default: _distances,  # noqa: SLF001
    aten._foreach_norm.Scalar: _norms,  # noqa: SLF001
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _sum,
    aten.mean.dim: _sum,
    # max_values_kernel_cuda in ReduceMaxValuesKernel.cu; max_kernel_impl in TensorCompare.cu: a value and its index
    aten.amax.default: _reduced(),
    aten.amin.default: _reduced(),
    aten.max.dim: _reduced(partial_bytes=_PAIR_BYTES),
    aten.min.dim: _reduced(partial_bytes=_PAIR_BYTES),
    aten.linalg_vector_norm.default: _reduced(2),  # norm_kernel_cuda in ReduceNormKernel.cu
    # std_var_kernel_cuda in ReduceMomentKernel.cu: Welford's, two values at a time
    aten.var.correction: _reduced(partial_bytes=_WELFORD_BYTES, vector=2),
    aten.var_mean.correction: _reduced(partial_bytes=_WELFORD_BYTES, vector=2),
    # mse_loss_out and smooth_l1_loss_out in Loss.cpp
    aten.mse_loss.default: _resized(Tensor.numel),
    aten.smooth_l1_loss.default: _resized(Tensor.numel),
    # binary_cross_entropy_out_cuda in Loss.cu and soft_margin_loss_out in Loss.cpp: the reduced is copied over all
    aten.binary_cross_entropy.default: _resized(lambda _: 1, place=3),
    aten.soft_margin_loss.default: _resized(lambda _: 1),
    # huber_loss and binary_cross_entropy_with_logits in Loss.cpp: the latter has the logarithms of sigmoids before, and
    # makes its losses in place
    aten.huber_loss.default: _losses_first(1, 2),
    aten.binary_cross_entropy_with_logits.default: _losses_first(2, 4),
}
