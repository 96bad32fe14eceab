"""Partial results of reductions that are spread over blocks of threads: `gpu_reduce_kernel` in Reduce.cuh."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchtune.estimate.memory.scratch.blocks import (
    FLOAT,
    INT,
    LONG,
    RESULTS,
    Block,
    Gpu,
    Step,
    Steps,
    bytes_of,
    copy_of,
    given,
)

aten = torch.ops.aten
_THREADS, _FEWEST_VALUES, _MOST_VALUES = 512, 16, 256  # MAX_NUM_THREADS, min_ and max_values_per_thread
_WARP, _VECTOR, _LEAST_VECTORIZED = 32, 4, 128
_INDEXED_BYTES = 2**31 - 1  # by 32 bits; a larger tensor is halved until it is not
_WELFORD_BYTES = 16  # WelfordData: two floats, two 32-bit counts
_CHUNK = 1 << 16  # kChunkSize of MultiTensorApply.cuh
_PAIR_BYTES = 16  # of a float and the 64-bit index of it


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
        element,
        partial_bytes or max(FLOAT, element),
        *((int(tensor.storage_offset()), kept[0][1], *others) if fastest == 1 and not along else (1,)),
    )
    return Block(_partial_results, lengths), Block(_semaphores, lengths)


def rows_summed(gpu: Gpu, rows: int, width: int, size: int) -> tuple[int, int]:
    """Bytes of partial results and of semaphores where `rows` rows of a contiguous matrix are summed."""
    lengths = (rows, width, 0, 1, size, max(FLOAT, size), 0, width, width)
    return _partial_results(gpu, *lengths), _semaphores(gpu, *lengths)


def _coalesced(sides: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """TensorIterator's dimensions, (stride, size) from the fastest on: one that continues another is part of it."""
    found: list[tuple[int, int]] = []
    for stride, size in sides:
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = (found[-1][0], found[-1][1] * size)
        else:
            found.append((stride, size))
    return found


@dataclass(frozen=True)
class _Config:
    """`setReduceConfig`: how a reduction is spread over threads."""

    ctas_per_output: int
    width: int
    vector: int
    grid: int


def _config(
    gpu: Gpu, inputs: int, outputs: int, along: int, input_vector: int, size: int, divisors: tuple[int, ...]
) -> _Config | None:
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
    if -(-inputs // step) < min(height * 16, _MOST_VALUES):
        return None
    values = -(-inputs // (step * height))
    grid = -(-(outputs // vector) // (1 if along else width))
    target = gpu.multiprocessors * (gpu.threads // (width * height))
    if values < _MOST_VALUES or grid > target:
        return None
    ctas = max(min(-(-target // grid), -(-values // _FEWEST_VALUES)), -(-values // _MOST_VALUES))
    return _Config(ctas, width, vector, grid) if ctas > 1 else None


def _partial_results(
    gpu: Gpu, inputs: int, outputs: int, along: int, vector: int, size: int, partial: int, *divisors: int
) -> int:
    found = _config(gpu, inputs, outputs, along, vector, size, divisors)
    if found is None:
        return 0
    return partial * outputs * found.ctas_per_output * (1 if along else found.width * found.vector)


def _semaphores(
    gpu: Gpu,
    inputs: int,
    outputs: int,
    along: int,
    vector: int,
    size: int,
    partial: int,  # noqa: ARG001 - both are formulas of the same lengths
    *divisors: int,
) -> int:
    found = _config(gpu, inputs, outputs, along, vector, size, divisors)
    return 0 if found is None else found.grid * INT


def _dims(args: Any, place: int = 1) -> list[int]:
    named = args[place] if len(args) > place else None
    if isinstance(named, bool) or not isinstance(named, list | tuple | int):
        return []
    return [named] if isinstance(named, int) else list(named)


def _sum(args: Any) -> Steps:
    """sum_kernel_cuda in ReduceSumProdKernel.cu; whole numbers and bools are cast to 64 bits before (ReduceOps.cpp)."""
    tensor: Tensor = args[0]
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.int64:
        return (RESULTS, reduction(tensor, _dims(args)))
    return (RESULTS, (copy_of(tensor, LONG), *reduction(tensor, _dims(args), element_bytes=LONG)))


def _largest(args: Any) -> Steps:
    """max_values_kernel_cuda in ReduceMaxValuesKernel.cu, and its like."""
    return (RESULTS, reduction(args[0], _dims(args)))


def _largest_and_where(args: Any) -> Steps:
    """max_kernel_impl in TensorCompare.cu: a value goes with its index."""
    return (RESULTS, reduction(args[0], _dims(args), partial_bytes=_PAIR_BYTES))


def _norm(args: Any) -> Steps:
    """norm_kernel_cuda in ReduceNormKernel.cu."""
    return (RESULTS, reduction(args[0], _dims(args, 2)))


def _moments(args: Any) -> Steps:
    """std_var_kernel_cuda in ReduceMomentKernel.cu: Welford's, two values at a time."""
    return (RESULTS, reduction(args[0], _dims(args), partial_bytes=_WELFORD_BYTES, vector=2))


def _norms(args: Any) -> Steps:
    """foreach_tensor_norm_cuda in ForeachReduceOp.cu: as many partial results for each as the longest has chunks."""
    longest = max((-(-each.numel() // _CHUNK) for each in args[0]), default=0)
    return ((bytes_of(len(args[0]) * longest * max(FLOAT, args[0][0].element_size())), RESULTS),)


def _distances(args: Any) -> Steps:
    """_euclidean_dist in Distance.cpp: one product of both sides, each joined with its squared norms and with ones."""
    inside: list[Step] = []
    joined: list[Step] = []
    for tensor in args[:2]:
        rows, size = tensor.numel() // tensor.shape[-1], tensor.element_size()
        norms = Block(given, (rows * size,), outlives=True)
        inside += [(copy_of(tensor), norms), bytes_of(rows * size)]
        joined.append(Block(given, (tensor.numel() * size + 2 * rows * size,), outlives=True))
    return ((*inside, (copy_of(args[0]), joined[0]), (joined[1],), RESULTS),)


REDUCTIONS = {
    aten._euclidean_dist.default: _distances,  # noqa: SLF001
    aten._foreach_norm.Scalar: _norms,  # noqa: SLF001
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _sum,
    aten.mean.dim: _sum,
    aten.amax.default: _largest,
    aten.amin.default: _largest,
    aten.max.dim: _largest_and_where,
    aten.min.dim: _largest_and_where,
    aten.linalg_vector_norm.default: _norm,
    aten.var.correction: _moments,
    aten.var_mean.correction: _moments,
}
