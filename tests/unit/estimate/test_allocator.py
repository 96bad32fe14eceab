"""The model of the caching allocator: its documented rules one by one, and its bookkeeping under any sequence."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.estimate.memory.allocator import (
    MIB,
    CachingAllocator,
    ExpandableAllocator,
    OutOfMemory,
)

ALLOCATORS = pytest.mark.parametrize("kind", [CachingAllocator, ExpandableAllocator])
sizes = st.one_of(
    st.integers(1, 5_000), st.integers(1, MIB), st.integers(MIB, 10 * MIB), st.integers(10 * MIB, 60 * MIB)
)
# a positive number allocates so many bytes, a negative one frees the so-many-th of the live allocations
scripts = st.lists(st.one_of(sizes, st.integers(-50, -1)), max_size=120)
capacities = st.one_of(st.none(), st.integers(20 * MIB, 400 * MIB))


def run(allocator, script):
    live, failed = {}, 0
    for number, step in enumerate(script):
        if step > 0:
            try:
                allocator.allocate(number, step)
                live[number] = step
            except OutOfMemory:
                failed += 1
        elif live:
            key = list(live)[-step % len(live)]
            allocator.free(key)
            del live[key]
    return live, failed


def check(allocator, live):
    blocks = sorted(allocator.blocks(), key=lambda block: block.address)
    used = [block for block in blocks if not block.free]
    assert len(used) == len(live)
    assert allocator.allocated_bytes == sum(block.size for block in used) >= sum(live.values())
    assert allocator.reserved_bytes == sum(block.size for block in blocks)
    assert allocator.reserved_bytes <= allocator.peak_reserved_bytes
    assert allocator.allocated_bytes <= allocator.peak_allocated_bytes <= allocator.peak_reserved_bytes
    for left, right in pairwise(blocks):
        assert left.address + left.size <= right.address, "blocks overlap"
    for block in blocks:
        assert block.size % 512 == 0
        following = block.next
        if following is not None and following.mapped:
            assert following.previous is block
            assert following.address == block.address + block.size
            assert not (block.free and following.free), "free neighbours were not merged"


@ALLOCATORS
@given(script=scripts, capacity=capacities)
@settings(max_examples=60, deadline=None)
def test_whatever_happens_the_books_balance_and_the_capacity_is_kept(kind, script, capacity):
    allocator = kind(capacity)
    live, _ = run(allocator, script)
    check(allocator, live)
    if capacity is not None:
        assert allocator.peak_reserved_bytes <= capacity


@ALLOCATORS
@given(script=scripts)
@settings(max_examples=30, deadline=None)
def test_after_everything_is_freed_one_allocation_can_have_all_that_was_reserved(kind, script):
    allocator = kind()
    live, _ = run(allocator, script)
    for key in live:
        allocator.free(key)
    assert allocator.allocated_bytes == 0
    allocator.capacity_bytes = allocator.reserved_bytes + 80 * MIB  # whole pages of 20 MiB are mapped
    allocator.allocate(-1, allocator.reserved_bytes + 60 * MIB)
    assert allocator.reserved_bytes <= allocator.capacity_bytes


@given(script=scripts)
@settings(max_examples=30, deadline=None)
def test_expandable_segments_reserve_at_most_two_pages_a_pool_beyond_what_a_full_device_needs(script):
    unlimited = ExpandableAllocator()
    run(unlimited, script)
    limited = ExpandableAllocator(unlimited.peak_allocated_bytes + 80 * MIB)
    _, failed = run(limited, script)
    assert limited.peak_reserved_bytes <= unlimited.peak_allocated_bytes + 80 * MIB
    assert failed == 0 or limited.retries > 0


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB - 5, 12 * MIB, 12 * MIB),  # a rest of 1 MiB or less is not split off in the large pool
        (21 * MIB, 22 * MIB, 22 * MIB),
    ],
)
def test_sizes_are_rounded_and_segments_sized_as_cuda_caching_allocator_does(asked, allocated, reserved):
    allocator = CachingAllocator()
    allocator.allocate(0, asked)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


def test_a_freed_block_is_used_again_and_small_requests_never_take_from_the_large_pool():
    allocator = CachingAllocator()
    allocator.allocate(0, 30 * MIB)
    allocator.free(0)
    allocator.allocate(1, 5 * MIB)
    assert allocator.reserved_bytes == 30 * MIB
    allocator.allocate(2, 1000)
    assert allocator.reserved_bytes == 32 * MIB


def test_the_smallest_block_that_fits_is_taken():
    allocator = CachingAllocator()
    for key, size in enumerate((40 * MIB, 24 * MIB, 60 * MIB)):
        allocator.allocate(key, size)
    for key in range(3):
        allocator.free(key)
    allocator.allocate(3, 24 * MIB)
    allocator.allocate(4, 60 * MIB)
    allocator.allocate(5, 40 * MIB)
    assert allocator.reserved_bytes == 124 * MIB


def test_free_segments_are_given_back_before_an_allocation_fails():
    allocator = CachingAllocator(100 * MIB)
    allocator.allocate(0, 60 * MIB)
    allocator.free(0)
    allocator.allocate(1, 80 * MIB)
    assert (allocator.retries, allocator.reserved_bytes) == (1, 80 * MIB)


def test_a_split_segment_cannot_be_given_back_but_an_expandable_one_can_lose_its_free_pages():
    def fill(allocator):
        allocator.allocate(0, 60 * MIB)
        allocator.free(0)
        allocator.allocate(1, 20 * MIB)  # sits in the first third of those 60 MiB
        allocator.allocate(2, 70 * MIB)

    with pytest.raises(OutOfMemory):
        fill(CachingAllocator(100 * MIB))
    allocator = ExpandableAllocator(100 * MIB)
    fill(allocator)
    assert allocator.reserved_bytes == 100 * MIB


def test_an_expandable_segment_needs_room_for_all_of_a_block_even_where_part_of_it_is_mapped():
    allocator = ExpandableAllocator(120 * MIB)
    allocator.allocate(0, 80 * MIB)
    allocator.free(0)
    allocator.allocate(1, 10 * MIB)
    allocator.allocate(2, 90 * MIB)  # 80 MiB and 20 more would do, but 80 and 100 are compared with the limit
    assert (allocator.retries, allocator.reserved_bytes) == (1, 100 * MIB)


@pytest.mark.parametrize(("device", "place"), [(80 * MIB, 70 * MIB), (800 * MIB, 0)], ids=["short", "long"])
def test_a_block_at_the_end_of_an_expandable_segment_is_as_large_as_the_addresses_left(device, place):
    allocator = ExpandableAllocator(device_bytes=device)
    allocator.allocate(0, 60 * MIB)
    start = allocator.blocks()[0].address
    allocator.allocate(1, 10 * MIB)
    allocator.free(0)  # 60 MiB in front, 10 MiB behind and 20 or 820 more that can be mapped
    allocator.allocate(2, 8 * MIB)
    assert start + place in [block.address for block in allocator.blocks() if not block.free]


def test_of_equal_free_blocks_the_one_with_the_lowest_address_is_taken():
    allocator = CachingAllocator()
    for key in (0, 1):
        allocator.allocate(key, 20 * MIB)
    addresses = [block.address for block in allocator.blocks()]
    allocator.free(0)
    allocator.free(1)
    allocator.allocate(2, 20 * MIB)
    assert [block.address for block in allocator.blocks() if not block.free] == [addresses[0]]
