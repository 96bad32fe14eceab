"""The largest batch of every length, on made-up memory: how many attempts it takes, and that none is too large."""

import math
import random
from statistics import mean

import pytest

from batchtune.config.probe import Bounds
from batchtune.document import Attempt, Environment, LengthCheck
from batchtune.errors import NothingFitsError
from batchtune.lengths.buckets import lengths_of
from batchtune.lengths.mixing import check_lengths, length_warnings, shared
from batchtune.lengths.orders import mixed, mixed_order, padded_to
from batchtune.lengths.surface import PeakPoint, fit_surface
from batchtune.probe.bracket import bracket
from batchtune.probe.frontier import largest_batches, length_points, next_attempt
from batchtune.probe.search import next_size
from batchtune.protocol.commands import TryBatchSize
from batchtune.protocol.data import LengthGroup, LengthsSeen

GIB, MIB = 1 << 30, 1 << 20
LENGTHS = (128, 256, 384, 512, 768, 1024, 1536, 2048)
MEMORY = {  # bytes: held, a sample, a sample and unit of length, its square, the square of the batch, the optimizer's
    "flash attention": (2e9, 2e6, 1.2e6, 0, 0, 5e9),
    "attention by matrices": (1e9, 1e6, 0.3e6, 600, 0, 2e9),
    "recurrent": (0.2e9, 1e5, 0.5e6, 0, 0, 0.3e9),
    "contrastive": (1e9, 0, 0.2e6, 0, 3e3, 2e9),
    "pixels": (0.1e9, 1e6, 0, 800, 0, 0.2e9),
    "nothing by length": (1e9, 4e8, 0, 0, 0, 0),
}


def device(held, sample, unit, square, batch_square, optimizer, limit, *, noise=0.0):
    """A device whose allocator takes blocks of 2 MiB and keeps a hundredth beside them."""

    def attempt(size, length):
        number = math.prod(length) if isinstance(length, tuple) else length
        used = held + size * (sample + unit * number + square * number**2) + batch_square * size**2
        used *= 1 + noise * random.Random(f"{size} {number}").uniform(-1, 1)
        activation = math.ceil(used / (2 * MIB)) * 2 * MIB
        allocated = int(max(activation, optimizer))
        if allocated * 1.01 > limit:
            return Attempt(batch_size=size, length=length, outcome="oom")
        return Attempt(
            batch_size=size,
            length=length,
            outcome="fit",
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=int(allocated * 1.01),
            forward_backward_peak_bytes=activation,
        )

    return attempt


def search(attempt, lengths=LENGTHS, limit=24 * GIB, bounds=None):
    """Searches the longest and then all others, to the end."""
    bounds = bounds or Bounds()
    longest, *others = sorted(lengths, key=lambda each: math.prod(each) if isinstance(each, tuple) else each)[::-1]
    tried = {longest: []} | {length: [] for length in others}
    while (size := next_size(tried[longest], bounds, limit).batch_size) is not None:
        tried[longest].append(attempt(size, longest))
    while True:
        length, choice = next_attempt(tried, bounds, limit)
        if choice.batch_size is None:
            return tried
        assert choice.batch_size not in {each.batch_size for each in tried[length]}
        tried[length].append(attempt(choice.batch_size, length))
        assert sum(map(len, tried.values())) < 200


def largest(attempt, length):
    low, high = 0, 1
    while attempt(high, length).fits:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if attempt(middle, length).fits else (low, middle)
    return low


@pytest.mark.parametrize("noise", [0.0, 0.003])
@pytest.mark.parametrize("gib", [24, 80])
@pytest.mark.parametrize("name", MEMORY)
def test_every_length_gets_nearly_the_largest_batch_that_fits(name, gib, noise):
    attempt = device(*MEMORY[name], gib * GIB, noise=noise)
    for length, attempts in search(attempt, limit=gib * GIB).items():
        found, most = bracket(attempts)[0], largest(attempt, length)
        assert attempt(found, length).fits
        assert found >= min(math.floor(0.97 * most), most - 1)


def test_few_attempts_and_failures_suffice():
    runs = [
        search(device(*memory, gib * GIB, noise=0.002), limit=gib * GIB)
        for memory in MEMORY.values()
        for gib in (24, 80)
    ]
    attempts = [sum(map(len, tried.values())) / len(tried) for tried in runs]
    failures = [sum(not each.fits for some in tried.values() for each in some) / len(tried) for tried in runs]
    assert mean(attempts) <= 2.6  # without an estimate to start from, which saves some at the longest
    assert mean(failures) <= 0.6


def test_the_longest_and_the_shortest_are_proven_by_a_failure():
    tried = search(device(*MEMORY["recurrent"], 24 * GIB))
    for length in (128, 2048):
        low, high = bracket(tried[length])
        assert high is not None
        assert high - low <= max(1, 0.01 * low)


def test_an_exact_search_proves_every_length():
    tried = search(device(*MEMORY["recurrent"], 24 * GIB), bounds=Bounds(tolerance=0.0))
    assert all(bracket(attempts)[1] == bracket(attempts)[0] + 1 for attempts in tried.values())


@pytest.mark.parametrize("name", MEMORY)
def test_a_search_that_must_not_fail_does_not_at_any_length_below_the_longest(name):
    attempt = device(*MEMORY[name], 80 * GIB)
    _, *others = search(attempt, (64, 128, 256, 512), 80 * GIB, Bounds(no_oom=True)).items()
    assert all(each.fits for _, attempts in others for each in attempts)
    assert all(bracket(attempts)[0] >= 0.9 * largest(attempt, length) for length, attempts in others)


def test_sizes_are_multiples_within_bounds():
    tried = search(device(*MEMORY["recurrent"], 24 * GIB), bounds=Bounds(multiple_of=8, maximum=100))
    assert all(each.batch_size % 8 == 0 and each.batch_size <= 100 for some in tried.values() for each in some)
    assert bracket(tried[128])[0] == 96


def test_without_a_limit_sizes_grow_and_are_bisected():
    attempt = device(*MEMORY["recurrent"], 4 * GIB)
    tried = search(attempt, (128, 512), limit=None)
    assert all(bracket(attempts)[0] >= 0.98 * largest(attempt, length) for length, attempts in tried.items())


def test_lengths_of_two_numbers_are_searched_alike():
    attempt = device(*MEMORY["recurrent"], 24 * GIB)
    lengths = [(8, 16), (16, 16), (32, 16), (32, 32), (64, 32)]
    for length, attempts in search(attempt, lengths).items():
        assert bracket(attempts)[0] >= 0.97 * largest(attempt, length)


def test_no_length_starts_below_what_a_longer_one_has_trained():
    tried = {1024: [*search(device(*MEMORY["recurrent"], 24 * GIB), (1024,))[1024]], 512: []}
    length, choice = next_attempt(tried, Bounds(), 24 * GIB)
    assert length == 512
    assert choice.batch_size > bracket(tried[1024])[0]


class TestTheModel:
    def test_it_finds_the_polynomial_that_made_the_points(self):
        made = lambda batch, length: 1e9 + batch * (1e6 + 2e5 * length + 300 * length**2)  # noqa: E731
        points = [PeakPoint(b, n, made(b, n), 1e-4) for n in (128, 512, 2048) for b in (2, 4096 // n * 4)]
        surface = fit_surface(points)
        assert surface.peak_bytes(10, 1024) == pytest.approx(made(10, 1024), rel=0.01)

    def test_its_doubt_grows_away_from_what_was_measured(self):
        surface = fit_surface([PeakPoint(batch, 1024, 1e9 + 1e8 * batch, 1e-3) for batch in (1, 10, 40)])
        assert surface.doubt_bytes(40, 1024) < 0.3 * surface.doubt_bytes(160, 256)

    def test_nothing_of_it_is_below_nothing(self):
        surface = fit_surface([PeakPoint(batch, 64, 1e9 - 1e6 * batch, 1e-3) for batch in (1, 50, 100)])
        assert min(surface.coefficients) >= 0
        assert surface.largest_batch(64, 0.5e9) == 0


class TestTheFinalCheck:
    @pytest.mark.parametrize("count", [2, 8])
    def test_its_orders_are_long_first_short_first_and_random_ones(self, count):
        orders = [mixed_order(count, 60, first) for first in range(4)]
        down = tuple(range(count))
        assert orders[0][: 3 * count] == (*down, *down[::-1], *down)
        assert orders[1][: 3 * count] == (*down[::-1], *down, *down[::-1])
        assert len(set(orders)) == 4
        assert all(len(order) >= 60 and set(order) == set(down) for order in orders)
        assert orders == [mixed_order(count, 60, first) for first in range(4)]

    @pytest.mark.parametrize(
        ("of_one_length", "orders", "asked", "steps"),
        [(20, 1, 20, 200), (6, 1, 20, 200), (1, 1, 1, 10), (100, 1, 100, 1000), (20, 6, 20, 60), (6, 6, 20, 34)],
    )
    def test_each_order_takes_three_times_the_steps_of_one_length_and_all_ten_times_those_asked_for(
        self, of_one_length, orders, asked, steps
    ):
        alone = TryBatchSize(batch_size=4, steps=of_one_length, precision="fp32", verify=True, length=512)
        command = mixed(alone, {512: 4, 128: 16}, 0, orders, asked=asked)
        assert (command.steps, len(command.order), command.batch_size) == (steps, steps, 4)
        assert command.sizes == ((512, 4), (128, 16))
        assert command.evaluate_after == (4, steps * 3 // 4)

    def test_without_samples_every_batch_is_as_long_as_its_bucket(self):
        assert padded_to((0, 1, 1, 0, 1, 1), [512, 128], (), 3) == [512, 128, 128, 512, 128, 128]

    def test_every_other_batch_is_as_long_as_samples_of_its_bucket_from_the_first_step_on(self):
        groups = [LengthGroup(length=length, samples=length) for length in (16, 100, 128, 300, 512)]
        order = mixed_order(2, 200, 3)
        found = padded_to(order, [512, 128], groups, 3)
        assert found == padded_to(order, [512, 128], groups, 3)
        assert found != padded_to(order, [512, 128], groups, 4)
        edges = [(512, 128)[which] for which in order]
        assert found[1::2] == edges[1::2]
        between = list(zip(edges[::2], found[::2], strict=True))
        assert {length for edge, length in between if edge == 128} == {16, 100, 128}
        assert {length for edge, length in between if edge == 512} == {300, 512}
        long = [length for _, length in between]
        assert long.count(100) > long.count(16)  # of which there are more samples

    @pytest.mark.parametrize("first", [0, 1])
    def test_long_first_and_short_first_begin_with_the_buckets_own_lengths(self, first):
        groups, order = (
            [LengthGroup(length=100, samples=1), LengthGroup(length=300, samples=1)],
            mixed_order(2, 60, first),
        )
        found = padded_to(order, [512, 128], groups, first)
        assert found[:4] == [(512, 128)[which] for which in order[:4]]
        assert {100, 300} <= set(found)

    def test_orders_beyond_those_that_are_always_checked_free_gradients_late_or_at_once_all_along(self):
        alone = TryBatchSize(batch_size=4, steps=20, precision="fp32", verify=True, length=512)
        late = [mixed(alone, {512: 4, 128: 16}, first, 6, asked=20).late_steps for first in (0, 17, 18, 19)]
        assert late == [30, 30, 0, 60]

    def test_further_processes_take_the_last_third_of_the_steps_with_each_length(self):
        alone = TryBatchSize(batch_size=4, steps=20, precision="fp32", verify=True, length=512)
        command = mixed(alone, {512: 4, 128: 16}, 0, 1, asked=20)
        turns, further = list(command.turns()), list(command.but(process=3).turns())
        assert [number for number, *_ in turns] == list(range(200))
        assert further == turns[133:]
        assert {at for _, at, _ in further} == {(512, 4), (128, 16)}
        assert any(number + 1 in command.evaluate_after for number, *_ in further)

    def test_what_fails_makes_all_smaller_and_is_checked_again(self):
        tried = {512: [fit(512, 40)], 128: [fit(128, 200)]}

        def check(sizes, _seed):
            return failed(128, sizes[128]) if sizes[128] > 190 else fit(512, sizes[512], "verify", steps=200)

        found, sizes = check_all(tried, check)
        assert 180 <= sizes[128] <= 190
        assert sizes[512] == pytest.approx(sizes[128] / 5, abs=1)
        assert (found.lowered, found.steps) == ([128, 512], 200)
        points = {each.length: each for each in length_points(tried, lambda *_: "memory", sizes)}
        assert 190 < points[128].first_failing_batch_size <= 200
        assert (points[512].max_batch_size, points[512].first_failing_batch_size) == (sizes[512], None)
        assert [each.verified_in_fresh_process for each in points.values()] == [True, True]
        before = length_points(tried, lambda *_: "memory")
        assert [each.verified_in_fresh_process for each in before] == [False, False]

    def test_of_one_order_which_takes_long_a_share_near_the_end_is_the_answer(self):
        tried, checked = {512: [fit(512, 400)], 128: [fit(128, 3000)]}, []

        def check(sizes, _order):
            checked.append(sizes[512] <= 0.72 * 400)
            return fit(512, sizes[512], "verify", steps=200) if checked[-1] else failed(512, sizes[512])

        found, sizes = check_all(tried, check)
        assert len(checked) <= 7
        assert checked.count(False) == found.failures
        assert 0.66 * 400 <= sizes[512] <= 0.72 * 400

    @pytest.mark.parametrize("end", [1.0, 0.97, 0.9, 0.83, 0.5])
    def test_in_several_orders_all_batches_shrink_to_the_largest_share_that_passes_in_each(self, end):
        tried = {512: [fit(512, 400)], 128: [fit(128, 3000)]}

        def check(sizes, order):
            fits = sizes[512] <= end * 400 or order != 3
            return fit(512, sizes[512], "verify", steps=60) if fits else failed(512, sizes[512])

        found, sizes = check_all(tried, check, orders=4)
        assert (end - 0.05) * 400 <= sizes[512] <= end * 400
        assert sizes[128] == pytest.approx(7.5 * sizes[512], rel=0.01)
        count = 18 if end < 1 else 4
        assert (found.orders, found.steps) == (count, 60 * count)
        assert found.failures <= (10 if end < 0.8 else 5)
        points = {each.length: each for each in length_points(tried, lambda *_: "memory", sizes)}
        assert {length: point.max_batch_size for length, point in points.items()} == sizes

    def test_after_a_failure_lengths_that_take_a_tenth_more_take_the_same_before_all_shrink(self):
        tried = {512: [fit(512, 440)], 128: [fit(128, 1600)]}

        def check(sizes, order):
            fits = sizes[128] * 128 == sizes[512] * 512
            return fit(512, sizes[512], "verify", steps=60) if fits else failed(512, sizes[512])

        found, sizes = check_all(tried, check, orders=4)
        assert (found.failures, found.orders) == (1, 18)
        assert 388 <= sizes[512] <= 400
        assert sizes[128] == 4 * sizes[512]

    def test_a_share_that_passes_alone_among_others_that_fail_is_not_the_answer(self):
        tried = {512: [fit(512, 400)], 128: [fit(128, 1600)]}

        def check(sizes, order):
            fits = sizes[512] <= 340 or 374 <= sizes[512] <= 386
            return fit(512, sizes[512], "verify", steps=60) if fits else failed(512, sizes[512])

        found, sizes = check_all(tried, check, orders=4)
        assert 300 <= sizes[512] <= 340
        assert found.orders == 18

    def test_after_a_failure_the_order_that_failed_comes_first(self):
        tried, seen = {512: [fit(512, 40)]}, []

        def check(sizes, order):
            seen.append((sizes[512], order))
            return failed(512, 40) if sizes[512] == 40 and order == 1 else fit(512, sizes[512], "verify", steps=60)

        check_all(tried, check, orders=2)
        assert seen[:4] == [(40, 0), (40, 1), (38, 1), (38, 0)]

    def test_where_a_replay_is_right_about_what_passes_one_failure_right_above_it_proves_the_answer(self):
        tried, seen = {512: [fit(512, 400)], 128: [fit(128, 3000)]}, []

        def check(sizes, order):
            seen.append((sizes[512], order))
            return failed(512, sizes[512]) if replay(sizes) == order else fit(512, sizes[512], "verify", steps=60)

        def replay(sizes):
            return 45 if sizes[512] > 320 or 300 < sizes[512] < 310 else None

        found, sizes = check_all(tried, check, orders=6, replay=replay)
        assert sizes[512] == 320
        assert (found.failures, found.orders) == (1, 19)
        assert seen[6] == (324, 45), "the order that is foreseen to fail comes first"
        assert len(seen) == len(set(seen)), "no order is trained twice with the same batches"

    @pytest.mark.parametrize(("foreseen", "largest"), [(200, 344), (400, 344), (300, 380)])
    def test_a_replay_that_is_wrong_costs_checks_and_makes_no_batch_too_large(self, foreseen, largest):
        tried = {512: [fit(512, 400)], 128: [fit(128, 3000)]}

        def check(sizes, order):
            fits = sizes[512] <= largest or order != 4
            return fit(512, sizes[512], "verify", steps=60) if fits else failed(512, sizes[512])

        found, sizes = check_all(tried, check, orders=6, replay=lambda sizes: None if sizes[512] <= foreseen else 0)
        assert 0.93 * largest <= sizes[512] <= largest
        assert found.orders >= 18
        assert found.failures <= 6

    def test_where_a_replay_foresees_nothing_and_nothing_fails_six_orders_are_trained(self):
        tried = {512: [fit(512, 400)], 128: [fit(128, 3000)]}
        check = lambda sizes, _: fit(512, sizes[512], "verify", steps=60)  # noqa: E731
        found, sizes = check_all(tried, check, orders=6, replay=lambda _: None)
        assert (sizes, found.orders) == ({512: 400, 128: 3000}, 6)

    def test_a_replay_of_segments_that_do_not_grow_says_nothing_of_those_that_do(self):
        tried = {512: [fit(512, 400)], 128: [fit(128, 3000)]}
        check = lambda sizes, _: fit(512, sizes[512], "verify", steps=60)  # noqa: E731
        growing = GPU.model_copy(update={"allocator_conf": "expandable_segments:True"})
        _, sizes = check_all(tried, check, orders=6, environment=growing, replay=lambda _: pytest.fail("asked"))
        assert sizes == {512: 400, 128: 3000}

    def test_nothing_shrinks_below_the_minimum_and_all_stay_multiples(self):
        tried = {512: [fit(512, 64)], 128: [fit(128, 256)]}
        check = lambda sizes, _: failed(512, sizes[512]) if sizes[512] > 56 else fit(512, sizes[512])  # noqa: E731
        _, sizes = check_all(tried, check, minimum=48, unit=8, orders=2)
        assert sizes[512] in {48, 56}
        assert sizes[128] % 8 == 0

    def test_a_process_that_died_makes_all_smaller(self):
        tried = {512: [fit(512, 40)], 128: [fit(128, 200)]}
        died = Attempt(batch_size=40, outcome="crash", purpose="verify", message="killed")
        found, sizes = check_all(tried, lambda sizes, _: died if sizes[512] == 40 else fit(512, sizes[512], "verify"))
        assert found.lowered == [128, 512]
        assert sizes[512] < 40
        assert sizes[128] < 200

    def test_it_gives_up_where_nothing_passes(self):
        tried = {512: [fit(512, 4)], 128: [fit(128, 8)]}
        with pytest.raises(
            NothingFitsError, match="the last of 4 final checks ended in oom at length 128, batch size 1"
        ):
            check_all(tried, lambda sizes, _seed: failed(128, sizes[128]))

    def test_sizes_far_below_those_alone_are_found_in_few_checks(self):
        tried = {512: [fit(512, 400)], 128: [fit(128, 1600)]}
        check = lambda sizes, _: fit(512, sizes[512]) if sizes[512] <= 100 else failed(512, sizes[512])  # noqa: E731
        found, sizes = check_all(tried, check)
        assert 92 <= sizes[512] <= 100
        assert found.failures <= 8

    def test_a_length_at_which_nothing_was_found_takes_the_next_longer_one_s(self):
        tried = {512: [fit(512, 4)], 128: [failed(128, 9, "crash")]}
        check_all(tried, lambda sizes, _seed: fit(512, sizes[512], "verify", steps=200))
        assert bracket(tried[128])[0] == 4


@pytest.mark.parametrize(
    ("device_type", "allocator", "says"),
    [
        ("cuda", None, "cut memory up: at 128 less fits among the others than alone"),
        ("cuda", None, "With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it is cut up less"),
        ("cuda", "expandable_segments:True", "may need more"),  # and that is all
        ("cpu", None, "leave memory behind: at 128 less fits"),
        ("cpu", None, "or set ONEDNN_PRIMITIVE_CACHE_CAPACITY=16"),
    ],
)
def test_a_warning_of_lengths_says_what_helps_there(device_type, allocator, says):
    environment = Environment(device="it", device_type=device_type, allocator_conf=allocator)
    check = LengthCheck(steps=200, orders=1, failures=1, lowered=[128], seconds=1.0)
    (warning,) = length_warnings(check, environment)
    assert says in warning
    assert ("set it, and probe again" in warning) == (device_type == "cuda" and allocator is None)
    assert length_warnings(check.model_copy(update={"failures": 0}), environment) == []


class TestSharesOfAllBatches:
    def test_lengths_that_take_nearly_the_same_in_all_take_exactly_the_same(self):
        found = {128: 2174, 256: 1083, 384: 721, 512: 541, 768: 360, 1024: 270, 1536: 180, 2048: 135}
        assert {length * size for length, size in shared(found, 1.0).items()} == {276480}

    def test_others_keep_their_share(self):
        assert shared({128: 1000, 512: 100}, 0.9) == {128: 900, 512: 90}
        assert shared({128: 1003, 256: 501}, 1.0, alike=None) == {128: 1003, 256: 501}

    def test_pictures_count_by_their_area(self):
        assert shared({(64, 64): 520, (64, 128): 256, (128, 128): 128}, 1.0) == {
            (64, 64): 512,
            (64, 128): 256,
            (128, 128): 128,
        }

    def test_no_batch_vanishes_and_all_are_multiples(self):
        assert shared({128: 3, 512: 1}, 0.1) == {128: 1, 512: 1}
        assert all(size % 8 == 0 for size in shared({128: 80, 512: 24}, 0.7, 8).values())


GPU = Environment(device="a GPU", device_type="cuda")


def check_all(tried, check, **settings):
    return check_lengths(tried, largest_batches(tried), check, **({"environment": GPU} | settings))


def fit(length, size, purpose="search", steps=3):
    return Attempt(batch_size=size, length=length, outcome="fit", purpose=purpose, steps=steps)


def failed(length, size, outcome="oom"):
    return Attempt(batch_size=size, length=length, outcome=outcome, purpose="verify", message="no")


def test_lengths_that_were_asked_for_are_probed_the_longest_first():
    assert lengths_of(LengthsSeen(edges=(128, 256, 512))) == [512, 256, 128]


def test_of_many_lengths_few_are_chosen_and_the_longest_among_them():
    groups = tuple(LengthGroup(length=length, samples=200 - length) for length in range(10, 110))
    chosen = lengths_of(LengthsSeen(groups=groups))
    assert (len(chosen), chosen[0]) == (8, 109)
    assert chosen == sorted(chosen, reverse=True)
