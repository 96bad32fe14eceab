"""Temporary storage of CUB's algorithms, by which torch sorts, scans and selects on NVIDIA GPUs.

Its parts are each rounded up to 256 bytes, and 255 more let the first one be aligned (AliasTemporaries in
cub/util_device.cuh). Sizes of tiles are those of compute capability 8.0 in CUDA 13's CUB, found by asking it for many
lengths; they differ a little between versions, and so does what is here.
"""

from __future__ import annotations

from batchtune.estimate.memory.scratch.blocks import LONG, Gpu
from batchtune.estimate.rounding import round_up

_ALIGNED = 256
_DIGITS, _BITS = 256, 8  # that one pass of a radix sort tells apart
_SINGLE_TILE, _TILE = 2304, 3840  # items up to which one block sorts all, and of a block otherwise
_LOOKED_BACK = 4  # bytes for each digit of a tile
_PADDING, _STATE = 32, 16  # tiles more than there are, and bytes for each, where an item has 64 bits
_SCANNED = {4: (1920, 8), 8: (896, _STATE)}  # items of a tile, and bytes for each tile, by bytes of an item
_SELECTED = 320


def _parts(*sizes: int) -> int:
    return sum(round_up(size, _ALIGNED) for size in sizes) + _ALIGNED - 1


def radix_sort(gpu: Gpu, count: int, size: int, bits: int) -> int:  # noqa: ARG001
    """`DispatchRadixSort` of keys of so many bytes and bits, each with a place of 64 bits: the onesweep algorithm."""
    if count <= _SINGLE_TILE:
        return 1
    passes = -(-bits // _BITS)
    bins, looked_back = passes * _DIGITS * LONG, -(-count // _TILE) * _DIGITS * _LOOKED_BACK
    return _parts(bins, looked_back, count * size, count * LONG, passes * LONG)


def scan(gpu: Gpu, count: int, size: int) -> int:  # noqa: ARG001
    """`DispatchScan` of so many items: a state for each tile."""
    items, state = _SCANNED.get(size, _SCANNED[8])
    return _parts((-(-count // items) + _PADDING) * state, 1)


def unique_by_key(gpu: Gpu, count: int, size: int) -> int:  # noqa: ARG001
    """`DispatchUniqueByKey` of so many keys: a state for each tile."""
    return _parts((-(-count // _SELECTED) + _PADDING) * _STATE, 1)
