"""Polynomials through traces, the peaks that follow, and the largest batch under a capacity."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.errors import EpochTooShortError
from batchtune.estimate.memory.allocator import MIB, CachingAllocator, ExpandableAllocator, OutOfMemory
from batchtune.estimate.memory.capacity import Search, TracedGrid, TracedStep, largest_allocated
from batchtune.estimate.memory.events import SCRATCH, Birth, Block, Gpu, Trace, Work, normalized
from batchtune.estimate.memory.fit import FittedStep, Misaligned, fit, peak_allocated_bytes, replay
from batchtune.estimate.tracing.answers import detail
from batchtune.vocabulary import LARGEST


def rounded(gpu, length):
    return -(-length // 128) * 128 + (1 << 20) * (gpu.multiprocessors - Gpu().multiprocessors)


def step_trace(batch_size, *, constant=1 << 20, linear=1 << 16, quadratic=0, op="aten.mm"):
    """A parameter that stays, an activation that grows with the batch, and a scratch with a round-up in it."""
    births = [
        Birth(constant, "aten.empty", category="parameters"),
        Birth(
            linear * batch_size + quadratic * batch_size**2, op, "blocks.3.up", "model.py:7", "forward 1", "activations"
        ),
        Birth(0, SCRATCH + "aten.mm", moment="backward", block=Block(rounded, (batch_size * 1000,))),
    ]
    return Trace(batch_size, [1, 2, 3, -3, -2], births, work=Work(10.0 * batch_size, 4.0 * batch_size, 2.0))


@given(constant=st.integers(1, 1 << 30), linear=st.integers(0, 1 << 24), batch_size=st.integers(1, 5000))
@settings(max_examples=50, deadline=None)
def test_linear_sizes_are_exact_at_every_batch_size(constant, linear, batch_size):
    step = fit(lambda size: step_trace(size, constant=constant, linear=linear + 1))
    assert isinstance(step, FittedStep)
    assert step.degree == 1
    assert step.sizes(batch_size) == [constant, (linear + 1) * batch_size, rounded(Gpu(), 1000 * batch_size)]


def test_scratch_may_depend_on_the_gpu():
    step = fit(step_trace)
    assert [larger - size for larger, size in zip(step.on(Gpu(109)).sizes(7), step.sizes(7), strict=True)] == [
        0,
        0,
        1 << 20,
    ]


def test_quadratic_sizes_take_a_fourth_trace_and_are_exact():
    asked = []

    def trace(size):
        asked.append(size)
        return step_trace(size, quadratic=4)

    step = fit(trace)
    assert asked == [3, 5, 8, 13]
    assert step.degree == 2
    assert step.sizes(1001)[1] == 65536 * 1001 + 4 * 1001**2


def test_halves_are_exact_too():
    step = fit(lambda size: Trace(size, [1], [Birth(size * (size - 1) // 2, "aten.triu")]))
    assert step.sizes(101) == [5050]


def test_a_size_that_is_no_polynomial_is_found_out_and_named():
    found = fit(lambda size: Trace(size, [1], [Birth(4 * (size // 2), "aten.chunk", "head")]))
    assert found == Misaligned("the size of aten.chunk in head is no polynomial of the batch size")


def test_a_step_that_does_other_things_at_other_sizes_is_found_out_and_named():
    found = fit(lambda size: step_trace(size, op="aten.mm" if size < 8 else "aten.bmm"))
    assert "aten.mm or aten.bmm in blocks.3.up" in found.reason
    longer = fit(lambda size: Trace(size, [1, -1] * size, [Birth(4, "aten.mm")]))
    assert "differs between batch sizes 3 and 5" in longer.reason


def test_what_a_step_computes_and_moves_is_interpolated():
    assert fit(step_trace).work(100) == Work(pytest.approx(1000), pytest.approx(400), pytest.approx(2))


def test_the_peak_is_split_by_what_storages_are_for():
    peak = detail(fit(step_trace), 16, "fp32")
    assert peak.peak_allocated_bytes == peak_allocated_bytes(fit(step_trace), 16)
    assert peak.peak_allocated_bytes == 2 * MIB + peak.temporaries_bytes
    assert peak.parameters_bytes == peak.activations_bytes == MIB
    assert [each.model_dump() for each in peak.holders] == [
        {"module": "blocks.*.up", "line": "model.py:7", "activation_bytes": MIB}
    ]
    assert (peak.peak_moment, peak.peak_operator) == ("backward", SCRATCH + "aten.mm")


@pytest.mark.parametrize("allocator", [CachingAllocator, ExpandableAllocator])
@pytest.mark.parametrize("capacity", [30 * MIB, 500 * MIB, 4000 * MIB])
def test_the_largest_batch_fits_and_the_next_one_does_not(allocator, capacity):
    step = fit(lambda size: step_trace(size, linear=MIB))
    found = Search(step, allocator, resolution=1 << 30)(capacity)
    assert replay(step, found, allocator(capacity)).peak_reserved_bytes <= capacity
    with pytest.raises(Exception, match=r"\d+"):
        replay(step, found + 1, allocator(capacity))


@pytest.mark.parametrize("allocator", [CachingAllocator, ExpandableAllocator])
def test_a_search_for_many_capacities_finds_what_a_search_for_each_alone_finds(allocator):
    step, capacities = fit(lambda size: step_trace(size, linear=MIB)), [share * 7 * MIB for share in range(5, 60)]
    search = Search(step, allocator)
    assert [search(each) for each in capacities] == [Search(step, allocator)(each) for each in capacities]


def test_a_step_that_fits_at_any_size_is_answered_with_the_cap_itself():
    step = fit(lambda size: step_trace(size, linear=100))
    search = Search(step)
    assert search(9000 * MIB) == search(8000 * MIB) == LARGEST
    assert 0 < search(20 * MIB) < LARGEST


class WithHoles(CachingAllocator):
    """Up to 900 samples of 64 KiB fit, above them every fourth size up to 912, and not from 886 to 890."""

    def allocate(self, key, size):
        samples = size >> 16
        if 886 <= samples <= 890 or samples > 912 or (samples > 900 and samples % 4):
            raise OutOfMemory(size)
        super().allocate(key, size)


def test_sizes_that_do_not_fit_between_those_that_do_hide_neither_the_end_nor_a_start():
    search = Search(fit(step_trace), WithHoles, resolution=LARGEST)
    assert search(200 * MIB) == 912
    assert [search.below(size, 200 * MIB) for size in (890, 885, 902)] == [885, 885, 900]


def test_no_batch_fits_where_the_model_alone_is_too_large():
    assert Search(fit(step_trace))(MIB // 2) == 0


def test_live_bytes_bound_what_any_allocator_can_hold():
    step = fit(step_trace)
    assert largest_allocated(step, 200 * MIB) >= Search(step)(200 * MIB)


def test_a_step_that_does_not_align_is_traced_on_a_grid_and_scaled_between():
    traced = []

    def trace(size):
        traced.append(size)
        return step_trace(size, linear=MIB)

    step = TracedStep(TracedGrid(trace))
    found = Search(step)(300 * MIB)
    assert 250 < found < 300
    assert len(traced) == len(set(traced)) < 20
    assert step.traced(1).births[0].category == "parameters"


def test_sizes_that_would_take_too_long_to_trace_are_extrapolated_from_those_that_were():
    clock, traced = [0.0], []

    def trace(size):
        traced.append(size)
        clock[0] += size
        births = [
            Birth(50 * MIB + MIB * size, "aten.mm", moment="forward 1", category="activations"),
            Birth(0, SCRATCH + "cublas", moment="forward 1", block=Block(lambda _: 8 * MIB, ())),
        ]
        return Trace(size, [1, 2, -2, -1], births)

    grid = TracedGrid(trace, 60.0, lambda: clock[0])
    assert 900 < Search(TracedStep(grid))(1000 * MIB) < 960
    assert sum(traced) <= 60
    assert grid.notes == [f"above {max(traced)} samples scaled: larger sizes take long to trace"]
    traced.clear()
    assert TracedGrid(trace, 60.0, lambda: clock[0]).nearest(7000).batch_size == 16
    assert traced == [8, 16]  # at once, it would have taken 7000 s
    alone = TracedGrid(trace)
    assert largest_allocated(TracedStep(alone), 1000 * MIB) > 900
    assert alone.notes == []


def test_sizes_beyond_an_epoch_of_the_users_loader_are_extrapolated_from_the_largest_it_has():
    traced = []

    def trace(size):
        if size > 70:
            raise EpochTooShortError("less than one batch", 70)
        traced.append(size)
        return step_trace(size, linear=MIB)

    step = TracedStep(grid := TracedGrid(trace))
    assert 250 < Search(step)(300 * MIB) < 300
    assert max(traced) == 70
    assert len(traced) == len(set(traced))
    assert grid.notes == ["above 70 samples scaled: an epoch of train_loader has no more"]


def test_an_epoch_of_fewer_samples_than_are_traced_first_will_do():
    def trace(size):
        if size > 10:
            raise EpochTooShortError("less than one batch", 10)
        return step_trace(size, linear=MIB)

    grid = TracedGrid(trace)
    assert (grid.nearest(1000).batch_size, grid.nearest(9).batch_size) == (10, 8)


def test_a_gradient_that_is_added_to_another_takes_no_memory_of_its_own():
    births = [Birth(100, "first"), Birth(100, "second"), Birth(100, "aten.add.Tensor", replaces=0), Birth(7, "x")]
    trace = normalized(Trace(3, [1, 2, 3, -1, -2, 4, -3, -4], births))
    assert trace.events == [1, 2, -2, 3, -1, -3]
    assert [birth.op for birth in trace.births] == ["first", "second", "x"]


def test_a_sum_whose_terms_live_on_keeps_its_own_memory():
    births = [Birth(100, "first"), Birth(100, "second"), Birth(100, "aten.add.Tensor", replaces=0), Birth(7, "x")]
    trace = normalized(Trace(3, [1, 2, 3, 4, -1, -2, -3, -4], births))
    assert len(trace.births) == 4


def stepped(late):
    """Two steps of a batch, a gradient that arrives in two parts, and its end: late in so many of the steps."""
    births, events = [Birth(MIB, "empty", category="parameters")], [1]

    def born(size, moment, category="temporaries", replaces=None):
        births.append(Birth(size, "op", moment=moment, category=category, replaces=replaces))
        events.append(len(births))
        return len(births)

    left = []
    for step in (1, 2):
        batch = born(30 * MIB, f"forward {step}")
        events.extend(-number for number in left)
        first = born(40 * MIB, f"backward {step}")
        gradient = born(40 * MIB, f"backward {step}", "gradients", replaces=first - 1)
        events.append(-first)
        left = [batch, gradient] if step <= late else [batch]
        if gradient not in left:
            events.append(-gradient)
    return Trace(3, events, births)


@pytest.mark.parametrize(("late", "held"), [(2, 71 * MIB), (1, 71 * MIB), (0, 31 * MIB)])
def test_a_third_step_frees_its_gradients_late_where_the_first_did(late, held):
    trace = normalized(stepped(late=late))
    step = fit(lambda size: Trace(size, trace.events, trace.births))
    allocator = replay(step, 3, CachingAllocator())
    assert allocator.allocated_bytes == held  # the parameter, the last batch, and the last gradient or none
    assert allocator.peak_allocated_bytes == (101 if late else 71) * MIB  # with the next batch, and without it
    assert replay(step, 3, CachingAllocator(), free_late=False).allocated_bytes == 31 * MIB


def test_what_trains_where_gradients_are_freed_early_but_not_where_they_are_freed_late_is_too_large():
    """Sizes at which the gradients of a step lie where the next one's activations would."""
    births, events = [Birth(MIB, "empty", category="parameters")], [1]

    def born(size, moment, category="temporaries"):
        births.append(Birth(size * MIB, "op", moment=moment, category=category))
        events.append(len(births))
        return len(births)

    left = []
    for step in (1, 2):
        batch, *held = (born(size, f"forward {step}") for size in (30, 29, 40, 59))
        events.extend(-number for number in left)
        left = []
        for size, activation in zip((53, 21, 21), reversed(held), strict=True):
            left.append(born(size, f"backward {step}", "gradients"))
            events.append(-activation)
        if step == 2:
            events.extend(-number for number in left)
        left.append(batch)
    step = fit(lambda size: Trace(size, events, births))
    assert replay(step, 3, CachingAllocator(), free_late=False).peak_reserved_bytes < 370 * MIB
    with pytest.raises(OutOfMemory):
        replay(step, 3, CachingAllocator(370 * MIB))
    assert Search(step)(370 * MIB) == 0


def test_a_gradient_in_two_parts_is_one_gradient():
    (part,) = [birth for birth in normalized(stepped(late=0)).births if birth.moment == "backward 1"]
    assert part.category == "gradients"


def test_a_second_step_that_leaves_other_storages_than_it_found_is_not_repeated():
    births = [Birth(MIB, "empty", category="parameters")]
    births += [Birth(30 * MIB, "mm", moment="backward 1", category="gradients")] * 2  # one network's are not made again
    births += [Birth(30 * MIB, "mm", moment="forward 2", category="activations")]  # and something else is kept
    births += [Birth(30 * MIB, "mm", moment="backward 2", category="gradients")]
    step = fit(lambda size: Trace(size, [1, 2, 3, 4, -2, -3, 5, -5], births))
    assert replay(step, 3, CachingAllocator()).allocated_bytes == 31 * MIB
