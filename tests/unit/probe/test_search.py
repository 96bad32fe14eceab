"""The search is a pure function, so every path is tested on made-up memory curves, without a GPU."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

import pytest

from batchtune.config.probe import Bounds
from batchtune.document import Attempt
from batchtune.probe.bracket import bracket, ends_above
from batchtune.probe.search import Choice, next_size
from batchtune.vocabulary import LARGEST, Outcome

GIB = 1 << 30
LIMIT = 24 * GIB
Device = Callable[[int], Attempt]


def fit(size: int) -> Attempt:
    return Attempt(batch_size=size, outcome="fit")


def failure(size: int, outcome: Outcome = "oom", purpose: str = "search") -> Attempt:
    return Attempt(batch_size=size, outcome=outcome, purpose=purpose)


def device(used: Callable[[int], float], *, optimizer: float = 0.0, waste: float = 0.0, peaks: str = "all") -> Device:
    """A device of 24 GiB on which activations use a share `used(size)` of it, and the optimizer a constant share."""

    def attempt(size: int) -> Attempt:
        allocated = max(used(size), optimizer) * LIMIT
        if allocated * (1 + waste / 2) > LIMIT:
            return failure(size)
        if peaks == "none":
            return fit(size)
        reserved, activation = min(LIMIT, int(allocated * (1 + waste))), int(used(size) * LIMIT)
        return Attempt(
            batch_size=size,
            outcome="fit",
            peak_allocated_bytes=int(allocated) if peaks == "all" else None,
            peak_reserved_bytes=reserved,
            forward_backward_peak_bytes=activation,
        )

    return attempt


@dataclass
class Expecting:
    """An estimate: so many samples fit, and so much does a batch take; without a curve, `expected` fill the limit."""

    expected: int
    curve: Callable[[int], float] | None = None

    @property
    def start(self) -> int:
        return min(self.expected, math.ceil((self.expected + 1) / 1.01))

    def allocated_bytes(self, batch_size: int) -> float:
        return self.curve(batch_size) if self.curve else batch_size * LIMIT / self.expected


def dies_above(size: int, outcome: Outcome = "oom") -> Device:
    return lambda tried: fit(tried) if tried <= size else failure(tried, outcome)


def search(
    attempt: Device, bounds: Bounds | None = None, prior: Expecting | None = None, limit: int | None = LIMIT
) -> list[Attempt]:
    """Searches to the end; no size may be tried twice or lie outside the bounds."""
    bounds = bounds or Bounds()
    attempts: list[Attempt] = []
    while (size := next_size(attempts, bounds, limit, prior).batch_size) is not None:
        assert bounds.minimum <= size <= (bounds.maximum or LARGEST)
        assert size % bounds.multiple_of == 0
        assert size not in {earlier.batch_size for earlier in attempts}
        attempts.append(attempt(size))
        assert len(attempts) < 80
    return attempts


def assert_proven(attempts: list[Attempt], bounds: Bounds) -> None:
    low, high = bracket(attempts)
    assert high is not None
    assert high - low <= max(bounds.multiple_of, bounds.tolerance * low)


# ---------------------------------------------------------------- the bracket


def test_bracket_is_empty_before_anything_fits() -> None:
    assert bracket([]) == (0, None)
    assert bracket([failure(8)]) == (0, 8)


def test_bracket_takes_the_smallest_failure_above_the_largest_fit() -> None:
    assert bracket([failure(1, "user_error"), fit(2), failure(64), fit(16), failure(32, "timeout")]) == (16, 32)


def test_a_failure_below_the_largest_fit_does_not_count() -> None:
    assert bracket([failure(16), fit(32)]) == (32, None)


def test_a_failed_verification_takes_the_place_of_the_fit() -> None:
    attempts = [fit(8), fit(16), failure(17), failure(16, "oom", "verify")]
    assert bracket(attempts) == (8, 16)
    assert 8 < (next_size(attempts, Bounds()).batch_size or 0) < 16


def test_a_failed_verification_may_leave_a_bracket_that_is_narrow_enough() -> None:
    assert next_size([fit(1000), fit(1005), failure(1010), failure(1005)], Bounds()).batch_size is None


# ---------------------------------------------------------------- start and first fit


def test_starts_at_the_minimum_rounded_up_to_a_multiple() -> None:
    assert next_size([], Bounds(minimum=5, multiple_of=4)).batch_size == 8


def test_starts_below_what_the_prior_says_fits() -> None:
    assert next_size([], Bounds(), LIMIT, Expecting(1000)).batch_size == pytest.approx(990, abs=2)


def test_a_prior_beyond_the_maximum_does_not_exceed_it() -> None:
    assert (next_size([], Bounds(maximum=50), LIMIT, Expecting(LARGEST)).batch_size or 99) <= 50


def test_nothing_lies_within_contradictory_bounds() -> None:
    assert next_size([], Bounds(minimum=5, maximum=7, multiple_of=4)) == Choice(
        None, "no multiple of 4 lies between the minimum and the maximum"
    )


def test_the_search_is_over_when_the_minimum_fails() -> None:
    choice = next_size([failure(1)], Bounds(), LIMIT)
    assert choice.batch_size is None
    assert "nothing fits" in choice.reason


@pytest.mark.parametrize("outcome", ["oom", "crash", "timeout", "kernel_limit"])
def test_goes_down_while_nothing_fits(outcome: Outcome) -> None:
    sizes = [attempt.batch_size for attempt in search(lambda size: failure(size, outcome), None, Expecting(24 << 10))]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1


def test_a_batch_too_small_for_the_model_is_not_the_end() -> None:
    attempts = search(lambda size: failure(1, "user_error") if size == 1 else dies_above(300)(size))
    assert bracket(attempts)[0] == pytest.approx(300, rel=0.01)


@pytest.mark.parametrize("share", [None, 0.3, 1, 1.3])
@pytest.mark.parametrize("is_told_first", [True, False])
@pytest.mark.parametrize(
    ("queue", "ends", "answer"),
    [(16, 5000, 16), (1024, 5000, 1024), (65536, 5000, 4096), (65536, 700, 512), (65536, 20_000, 16_384)],
)
def test_a_task_that_takes_divisors_only_is_searched_by_powers_of_two(
    queue: int, ends: int, answer: int, is_told_first: bool, share: float | None
) -> None:
    """As MoCo, whose batches have to divide its queue, by such a share of the end as an estimate, too."""
    memory = device(lambda size: 0.1 + 0.9 * size / ends)

    def attempt(size: int) -> Attempt:
        used = memory(size)
        return failure(size, "user_error") if queue % size and (is_told_first or used.fits) else used

    attempts = search(attempt, None, Expecting(int(share * ends)) if share else None)
    assert bracket(attempts)[0] == answer
    assert len(attempts) <= (12 if share else 9)
    assert ends_above(answer, attempts, 1)[0].outcome == ("user_error" if answer == queue else "oom")


def test_a_rejected_size_is_the_end_where_a_rounder_one_is_rejected_too() -> None:
    attempts = search(lambda size: failure(size, "user_error") if size > 12 else device(lambda _: 0.1)(size))
    assert bracket(attempts) == (12, 13)


def test_gives_up_when_the_task_rejects_two_sizes() -> None:
    assert [a.batch_size for a in search(lambda size: failure(size, "user_error"))] == [1, 2]


@pytest.mark.parametrize(("today", "tried"), [(64, 64), (70, 68), (900, 300)])
def test_a_size_that_the_task_trains_with_today_is_tried_where_it_rejects_the_smallest(today: int, tried: int) -> None:
    def attempt(size: int) -> Attempt:
        return failure(size, "user_error") if size < 32 else dies_above(300)(size)

    bounds = Bounds(maximum=300, multiple_of=4, of_today=today)
    attempts = search(attempt, bounds)
    assert [each.batch_size for each in attempts][:3] == [4, 8, tried]
    assert bracket(attempts) == (300, None)


def test_one_that_is_rejected_like_the_smallest_is_the_end() -> None:
    attempts = search(lambda size: failure(size, "user_error"), Bounds(of_today=64))
    assert [each.batch_size for each in attempts] == [1, 2, 64]


def test_a_task_that_rejects_everything_is_found_out_with_a_prior_too() -> None:
    assert len(search(lambda size: failure(size, "user_error"), None, Expecting(24 << 10))) <= 20


def test_searches_between_a_size_too_small_and_a_size_too_large() -> None:
    def attempt(size: int) -> Attempt:
        return failure(size, "user_error") if size < 2 else dies_above(2)(size)

    assert bracket(search(attempt)) == (2, 3)


# ---------------------------------------------------------------- the end of the search


def test_is_over_when_the_maximum_fits() -> None:
    attempts = search(device(lambda _: 0.1), Bounds(maximum=777))
    assert bracket(attempts) == (777, None)
    assert next_size(attempts, Bounds(maximum=777), LIMIT).batch_size is None


def test_ends_at_a_ceiling_when_nothing_ever_fails() -> None:
    assert bracket(search(device(lambda _: 0.1)))[0] == LARGEST
    assert bracket(search(dies_above(10**9), limit=None))[0] == LARGEST


def test_memory_that_does_not_grow_allows_no_leap_without_bounds() -> None:
    sizes = [attempt.batch_size for attempt in search(device(lambda _: 0.1))]
    assert all(after <= 128 * before for before, after in itertools.pairwise(sizes))


@pytest.mark.parametrize("outcome", ["kernel_limit", "crash", "timeout", "user_error"])
def test_a_model_that_dies_above_300_has_the_answer_300(outcome: Outcome) -> None:
    def attempt(size: int) -> Attempt:
        return device(lambda tried: 0.1 + tried / 100_000)(size) if size <= 300 else failure(size, outcome)

    attempts = search(attempt, Bounds(tolerance=0))
    assert bracket(attempts) == (300, 301)
    assert len(attempts) <= 2 * math.log2(300) + 4


def test_exact_means_adjacent_multiples() -> None:
    bounds = Bounds(tolerance=0, multiple_of=8)
    assert bracket(search(dies_above(1003), bounds)) == (1000, 1008)


def test_attempts_outside_the_bounds_are_ignored() -> None:
    assert next_size([fit(4000)], Bounds(maximum=100)).batch_size == 1


def test_every_choice_has_a_reason() -> None:
    attempts: list[Attempt] = []
    while True:
        choice = next_size(attempts, Bounds(), LIMIT)
        assert choice.reason
        if choice.batch_size is None:
            break
        attempts.append(device(lambda size: 0.2 + size / 1000)(choice.batch_size))


# ---------------------------------------------------------------- how good it is


@pytest.mark.parametrize("peaks", ["all", "reserved", "none"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 4321, 150_000])
def test_finds_the_limit_whatever_peaks_are_known(peaks: str, size: int) -> None:
    attempts = search(device(lambda tried: 0.3 + 0.7 * tried / (size + 0.5), peaks=peaks), Bounds(tolerance=0))
    assert bracket(attempts) == (size, size + 1)
    assert len(attempts) <= 2 * math.log2(size) + 4


@pytest.mark.parametrize(("limit", "most"), [(None, 22), (LIMIT, 15)])
def test_a_maximum_above_the_usual_end_of_a_search_is_reached_in_leaps(limit: int | None, most: int) -> None:
    attempts = search(device(lambda tried: tried / 2**32), Bounds(maximum=2**31, tolerance=0), limit=limit)
    assert attempts[-1].batch_size == 2**31
    assert len(attempts) <= most


def test_a_limit_above_the_usual_end_of_a_search_is_found_by_the_memory_used_as_any_other() -> None:
    attempts = search(device(lambda tried: 0.3 + 0.7 * tried / 20_000_000), Bounds(maximum=2**31))
    assert_proven(attempts, Bounds())
    assert len(attempts) <= 10


def test_a_straight_line_takes_few_attempts_and_about_one_oom() -> None:
    counts = [search(device(lambda tried, n=n: 0.3 + 0.7 * tried / n)) for n in (30, 300, 3000, 30_000, 190_000)]
    assert mean(len(attempts) for attempts in counts) <= 6.5
    assert mean(sum(not a.fits for a in attempts) for attempts in counts) <= 1.4


def test_an_optimizer_that_needs_more_than_the_activations_does_not_mislead() -> None:
    attempts = search(device(lambda tried: 0.3 + 0.7 * tried / 5000, optimizer=0.9))
    assert sum(not attempt.fits for attempt in attempts) <= 2
    assert len(attempts) <= 8


def test_a_prior_saves_attempts() -> None:
    prior = Expecting(5512, lambda size: (0.3 + 0.7 * size / 5000) * LIMIT * 0.95 - GIB / 2)
    assert len(search(device(lambda tried: 0.3 + 0.7 * tried / 5000), prior=prior)) <= 4


@pytest.mark.parametrize(("tolerance", "most"), [(0.01, 2), (0.0, 4)])
@pytest.mark.parametrize("size", [100, 444, 9_711, 3_619_840])
def test_an_estimate_that_is_right_is_confirmed_at_once(size: int, tolerance: float, most: int) -> None:
    def used(tried: int) -> float:
        return 0.3 + 0.7 * tried / (size + 0.5)

    prior = Expecting(size, lambda tried: used(tried) * LIMIT / 1.003)
    attempts = search(device(used), Bounds(tolerance=tolerance), prior)
    low, high = bracket(attempts)
    assert (low, high) == (size, size + 1) or tolerance
    assert len(attempts) <= most


@pytest.mark.parametrize("end", [123_904, 124_416])
def test_an_estimate_that_is_off_by_one_block_of_the_allocator_costs_an_exact_search_two_attempts(end: int) -> None:
    def used(size: int) -> float:  # of 256 sizes each takes the same
        return math.ceil(size / 256) * 256 / (end + 0.5)

    attempts = search(device(used), Bounds(tolerance=0), Expecting(124_160, lambda size: used(size) * LIMIT))
    assert bracket(attempts) == (end, end + 1)
    assert len(attempts) <= 5


@pytest.mark.parametrize("factor", [1e-3, 0.1, 10, 1e3])
def test_a_prior_that_is_far_off_costs_attempts_but_not_the_answer(factor: float) -> None:
    attempts = search(device(lambda tried: 0.3 + 0.7 * tried / 500), prior=Expecting(max(1, int(500 / factor))))
    assert_proven(attempts, Bounds())
    assert len(attempts) <= 30


@pytest.mark.parametrize("attempts", [[failure(400)], [fit(100), failure(400)]])
def test_a_prior_that_an_out_of_memory_error_refutes_is_dropped(attempts: list[Attempt]) -> None:
    assert next_size(attempts, Bounds(), LIMIT, Expecting(1000)) == next_size(attempts, Bounds(), LIMIT)


def test_no_oom_stays_below_the_limit_of_a_plain_curve_and_comes_close() -> None:
    for size in (50, 500, 5000, 50_000):
        attempts = search(device(lambda tried, n=size: 0.2 + 0.8 * tried / n, waste=0.02), Bounds(no_oom=True))
        assert all(attempt.fits for attempt in attempts)
        assert bracket(attempts)[0] >= 0.9 * size


def test_no_oom_ends_where_nothing_can_be_predicted() -> None:
    assert [a.batch_size for a in search(dies_above(300), Bounds(no_oom=True))] == [1]
    assert [a.batch_size for a in search(dies_above(300), Bounds(no_oom=True), limit=None)] == [1]


def test_no_oom_ends_after_a_failure_that_was_not_foreseen() -> None:
    def attempt(size: int) -> Attempt:
        return failure(size) if size > 40 else device(lambda tried: 0.1 + tried / 10_000)(size)

    attempts = search(attempt, Bounds(no_oom=True))
    assert sum(not attempt.fits for attempt in attempts) == 1


# ---------------------------------------------------------------- many curves


def curves(shape: str, seed: int) -> Device:
    """One of many curves of a shape; the attempts at one size always end alike."""
    draw = random.Random(f"{shape}{seed}")
    limit, constant = math.exp(draw.uniform(0, math.log(200_000))), draw.uniform(0.02, 0.8)
    kink, step, noise = draw.uniform(0.3, 1.0), draw.uniform(-0.02, 0.06), draw.uniform(0.0, 0.015)

    def used(size: int) -> float:
        share = size / (limit + 0.5)
        if shape == "quadratic":
            return constant + (1 - constant) * share**2
        if shape == "two phases":
            return max(constant + kink * (1 - constant) * share, 0.9 * constant + (1 - 0.9 * constant) * share)
        line = constant + (1 - constant) * share
        if shape == "jumps":
            return line + step * (share > kink / 2) + step * (share > kink)
        if shape == "not monotone":
            return line + (0.05 if random.Random(f"{seed}-{size}").random() < 0.05 else 0.0)
        if shape == "noisy":
            return line * (1 + noise * random.Random(f"{seed}-{size}").uniform(-1, 1))
        return line

    return device(used, optimizer=constant, waste=draw.uniform(0, 0.1) if shape != "noisy" else 0.0)


SHAPES = ["linear", "quadratic", "two phases", "jumps", "not monotone", "noisy"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("tolerance", "most"), [(0.01, 8.5), (0.0, 12.0)])
def test_every_curve_ends_with_a_proven_bracket(shape: str, tolerance: float, most: float) -> None:
    bounds, counts = Bounds(tolerance=tolerance), []
    for seed in range(60):
        attempts = search(curves(shape, seed), bounds)
        if bracket(attempts)[0] == 0:
            assert [attempt.batch_size for attempt in attempts] == [1]
            continue
        assert_proven(attempts, bounds)
        if tolerance == 0:
            assert len(attempts) <= 2 * math.log2(bracket(attempts)[0]) + 4
        counts.append(len(attempts))
    assert mean(counts) <= most


@pytest.mark.parametrize("shape", SHAPES)
def test_no_bound_is_ever_exceeded(shape: str) -> None:
    for seed in range(30):
        draw = random.Random(seed)
        minimum = draw.randint(1, 50)
        bounds = Bounds(
            minimum=minimum,
            maximum=minimum + draw.randint(0, 5000),
            multiple_of=draw.choice((1, 2, 8, 24)),
            tolerance=draw.choice((0.0, 0.01, 0.1)),
            no_oom=draw.random() < 0.3,
        )
        search(curves(shape, seed), bounds, Expecting(24 << 6) if draw.random() < 0.5 else None)


def test_the_worst_case_holds_even_where_memory_lies() -> None:
    for seed in range(80):
        draw = random.Random(seed)
        true_limit, memory = int(math.exp(draw.uniform(0, math.log(200_000)))), draw.uniform(0.01, 0.99)

        def attempt(size: int, true_limit: int = true_limit, memory: float = memory, seed: int = seed) -> Attempt:
            if size > true_limit:
                return failure(size)
            peak = int(LIMIT * memory * random.Random(f"{seed}-{size}").random()) + 1
            return Attempt(batch_size=size, outcome="fit", peak_allocated_bytes=peak, peak_reserved_bytes=peak)

        attempts = search(attempt, Bounds(tolerance=0))
        assert bracket(attempts) == (true_limit, true_limit + 1)
        assert len(attempts) <= 2 * math.log2(true_limit) + 4


def _kept(size: int, share: float) -> Attempt:
    """A fit of a hundred thousand bytes a sample, of which the allocator keeps so much on top."""
    used = size * 100_000
    return Attempt(
        batch_size=size,
        outcome="fit",
        peak_allocated_bytes=used,
        peak_reserved_bytes=int(used * (1 + share)),
        forward_backward_peak_bytes=used,
    )


def test_an_exact_search_looks_at_round_sizes_where_blocks_of_the_allocator_end_there() -> None:
    def used(size: int) -> float:  # each tensor grows by blocks of 2 MiB, the last of which is full every 256 samples
        return math.ceil(size / 256) / 1_536.5

    attempts = search(device(used), Bounds(tolerance=0), Expecting(399_000, lambda size: used(size) * 0.985 * LIMIT))
    assert bracket(attempts) == (393_216, 393_217)
    assert len(attempts) <= 11


def test_where_all_sizes_keep_the_same_an_exact_search_bisects() -> None:
    attempts = [_kept(8_000, 0.01), _kept(9_000, 0.01), _kept(9_500, 0.01), failure(9_560)]
    size = next_size(attempts, Bounds(tolerance=0), 10**9).batch_size
    assert size is not None
    assert 9_505 < size < 9_555


@pytest.mark.parametrize("bounds", [Bounds(minimum=5_000_000), Bounds(multiple_of=5_000_000)])
def test_a_least_size_above_the_ceiling_is_tried_where_there_is_no_maximum(bounds):
    assert next_size([], bounds, 1 << 30).batch_size == 5_000_000
