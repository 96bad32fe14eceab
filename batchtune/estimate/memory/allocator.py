"""A model of torch's CUDA caching allocator: which blocks and segments a sequence of allocations ends up in.

Constants and rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.9 to 2.13, default settings): sizes rounded
to 512 bytes; best fit among cached blocks; 2 MiB segments for requests up to 1 MiB, 20 MiB segments up to 10 MiB, and
beyond that segments of the request rounded to 2 MiB; free neighbours merge; segments that are wholly free are given
back before an allocation fails.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

MIB = 1 << 20
ROUNDING_BYTES = 512
SMALL_LIMIT_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
LARGE_SEGMENT_LIMIT_BYTES = 10 * MIB
SEGMENT_ROUNDING_BYTES = 2 * MIB
_SEGMENT_GAP = 1 << 40  # segments are far apart, so that blocks of two never look adjacent


def round_up(size: int, multiple: int) -> int:
    """The least multiple that is not below `size`."""
    return -(-size // multiple) * multiple


class OutOfMemory(Exception):
    """The device has not the memory for another segment, even with every free one given back."""


@dataclass(slots=True, eq=False)
class Block:
    """A stretch of a segment; `previous` and `next` are its neighbours there."""

    address: int
    size: int
    small: bool
    free: bool = True
    mapped: bool = True
    previous: Block | None = None
    next: Block | None = None


class CachingAllocator:
    """The allocator with its default, fixed segments, each above the last one.

    Of equal free blocks the one with the lowest address is taken; in which order a driver hands them out is not known.

    Args:
        capacity_bytes: what it may reserve; None for no limit.

    Attributes:
        allocated_bytes: bytes in blocks that are in use.
        reserved_bytes: bytes in segments.
        peak_allocated_bytes: the highest `allocated_bytes` so far.
        peak_reserved_bytes: the highest `reserved_bytes` so far.
        retries: how often it gave segments back in order not to fail.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.retries = 0
        self._in_use: dict[int, Block] = {}
        self._at: dict[int, Block] = {}  # free blocks by address
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (size, address), sorted, by pool
        self._next_address = 0

    def allocate(self, key: int, size: int) -> None:
        """Takes a block of at least `size` bytes, known from now on by `key`.

        Raises:
            OutOfMemory: it would pass the capacity.
        """
        size = max(ROUNDING_BYTES, round_up(size, ROUNDING_BYTES))
        small = size <= SMALL_LIMIT_BYTES
        block = self._best_fit(size, small=small) or self._grow(size, small=small)
        rest = block.size - size
        if rest and self._splits(rest, small=small):
            self._split(block, size)
        block.free = False
        self._in_use[key] = block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, key: int) -> None:
        """Returns a block to the cache and merges it with its free neighbours."""
        block = self._in_use.pop(key)
        self.allocated_bytes -= block.size
        self._add_free(block)

    def blocks(self) -> list[Block]:
        """Every block, in use or free, for tests that check the bookkeeping."""
        return [*self._in_use.values(), *self._at.values()]

    def _splits(self, rest: int, *, small: bool) -> bool:
        return rest >= ROUNDING_BYTES if small else rest > SMALL_LIMIT_BYTES

    def _best_fit(self, size: int, *, small: bool) -> Block | None:
        candidates = self._free[small]
        place = bisect.bisect_left(candidates, (size, 0))
        if place == len(candidates):
            return None
        return self._at.pop(candidates.pop(place)[1])

    def _grow(self, size: int, *, small: bool) -> Block:
        segment = self._segment_bytes(size, small=small)
        if self.capacity_bytes is not None and self.reserved_bytes + segment > self.capacity_bytes:
            self.retries += 1
            self._release_cached()
            if self.reserved_bytes + segment > self.capacity_bytes:
                raise OutOfMemory(segment)
        return self._mapped(size, segment, small=small)

    def _segment_bytes(self, size: int, *, small: bool) -> int:
        if small:
            return SMALL_SEGMENT_BYTES
        return LARGE_SEGMENT_BYTES if size < LARGE_SEGMENT_LIMIT_BYTES else round_up(size, SEGMENT_ROUNDING_BYTES)

    def _mapped(self, size: int, segment: int, *, small: bool) -> Block:  # noqa: ARG002 - for those that expand
        """New memory from the device: a segment of its own."""
        self._reserve(segment)
        self._next_address += _SEGMENT_GAP
        return Block(self._next_address, segment, small)

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _release_cached(self) -> None:
        """Gives back every segment that is one free block."""
        for block in list(self._at.values()):
            if block.previous is None and block.next is None:
                self._take_free(block)
                self.reserved_bytes -= block.size

    def _split(self, block: Block, size: int) -> None:
        """Cuts `block` at `size`; what is left behind it is a free block, or an unmapped one."""
        rest = Block(
            block.address + size, block.size - size, block.small, mapped=block.mapped, previous=block, next=block.next
        )
        if block.next is not None:
            block.next.previous = rest
        block.size, block.next = size, rest
        if rest.mapped:
            self._insert_free(rest)

    def _add_free(self, block: Block) -> None:
        block.free = True
        following, before = block.next, block.previous
        if following is not None and following.free and following.mapped:
            self._take_free(following)
            self._join(block, following)
        if before is not None and before.free and before.mapped:
            self._take_free(before)
            self._join(before, block)
            block = before
        self._insert_free(block)

    def _join(self, left: Block, right: Block) -> None:
        left.size += right.size
        left.next = right.next
        if right.next is not None:
            right.next.previous = left

    def _insert_free(self, block: Block) -> None:
        bisect.insort(self._free[block.small], (block.size, block.address))
        self._at[block.address] = block

    def _take_free(self, block: Block) -> None:
        candidates = self._free[block.small]
        del candidates[bisect.bisect_left(candidates, (block.size, block.address))]
        del self._at[block.address]


def _page(*, small: bool) -> int:
    return SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES


class ExpandableAllocator(CachingAllocator):
    """The allocator with `expandable_segments:True`: a segment a pool that grows, mapped page by page.

    Pages are 2 MiB in the small pool and 20 MiB in the large one. A block is compared with the capacity as a whole,
    also where part of it is mapped already (here in whole pages, so that none passes the capacity; torch rounds later).
    Before an allocation fails, every wholly free page is unmapped, wherever it lies. A segment has addresses for
    1.125 x the device's memory, and best fit takes a block at its end to be as large as those let it become.
    """

    def __init__(self, capacity_bytes: int | None = None, device_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self._addresses = device_bytes + device_bytes // 8 if device_bytes else _SEGMENT_GAP // 2
        self._segments: dict[bool, list[Block]] = {True: [], False: []}  # the first block of each, by pool

    def _splits(self, rest: int, *, small: bool) -> bool:  # noqa: ARG002 - the pool makes no difference here
        return rest >= ROUNDING_BYTES

    def _best_fit(self, size: int, *, small: bool) -> Block | None:
        """Best fit, where a block that could still grow counts with the room it could grow to."""
        candidates = self._free[small]
        place = bisect.bisect_left(candidates, (size, 0))
        if place == len(candidates):
            return None

        def room(index: int) -> int:
            block = self._at[candidates[index][1]]
            return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)

        while place + 1 < len(candidates) and room(place + 1) < room(place):
            place += 1
        return self._at.pop(candidates.pop(place)[1])

    def _segment_bytes(self, size: int, *, small: bool) -> int:
        return round_up(size, _page(small=small))

    def _mapped(self, size: int, segment: int, *, small: bool) -> Block:  # noqa: ARG002 - pages are mapped, not segments
        """Maps pages into the first hole that has room, together with the free block before it."""
        block = self._hole(size, small=small)
        if block.mapped:
            self._take_free(block)
        else:
            self._map(block, size)
        while block.size < size:
            following = block.next
            assert following is not None  # noqa: S101 - the hole was found to have room
            if following.mapped:
                self._take_free(following)
            else:
                self._map(following, size - block.size)
            self._join(block, following)
        return block

    def _hole(self, size: int, *, small: bool) -> Block:
        for first in self._segments[small]:
            block: Block | None = first
            start: Block | None = None
            room, holed = 0, False
            while block is not None:
                if not block.free:
                    start, room, holed = None, 0, False
                else:
                    start, room, holed = start or block, room + block.size, holed or not block.mapped
                    if holed and room >= size:
                        return start
                block = block.next
        self._next_address += _SEGMENT_GAP
        self._segments[small].append(
            Block(self._next_address, round_up(self._addresses, _page(small=small)), small, mapped=False)
        )
        return self._segments[small][-1]

    def _map(self, block: Block, size: int) -> None:
        pages = min(round_up(size, _page(small=block.small)), block.size)
        self._reserve(pages)
        if pages < block.size:
            self._split(block, pages)
        block.mapped = True

    def _release_cached(self) -> None:
        for block in list(self._at.values()):
            page = _page(small=block.small)
            base = block.address // _SEGMENT_GAP * _SEGMENT_GAP
            start = base + round_up(block.address - base, page)
            end = base + (block.address + block.size - base) // page * page
            if end > start:
                self._unmap(block, start, end)

    def _unmap(self, block: Block, start: int, end: int) -> None:
        self._take_free(block)
        if block.address + block.size > end:
            self._split(block, end - block.address)
        if start > block.address:
            self._split(block, start - block.address)
            hole = block.next
            assert hole is not None  # noqa: S101 - it was just cut off
            self._take_free(hole)
            self._insert_free(block)
        else:
            hole = block
        hole.mapped = False
        self.reserved_bytes -= hole.size
        self._join_holes(hole)

    def _join_holes(self, hole: Block) -> None:
        if hole.next is not None and not hole.next.mapped:
            self._join(hole, hole.next)
        if hole.previous is not None and not hole.previous.mapped:
            self._join(hole.previous, hole)
