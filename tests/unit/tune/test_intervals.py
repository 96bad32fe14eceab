import math
import random
import statistics

import pytest

from batchtune.tune.verdict.scores import difference_interval, median_interval, ratio_interval


def test_intervals_hold_their_median_and_widen_with_the_spread():
    narrow, wide = median_interval([1.0, 1.1, 1.2]), median_interval([0.5, 1.1, 2.0])
    assert narrow.low <= narrow.median <= narrow.high
    assert wide.high - wide.low > narrow.high - narrow.low
    assert ratio_interval([2.0], [1.0]).median == 2.0


def test_a_single_run_has_no_interval_and_compared_with_others_is_taken_to_vary_as_they_do():
    alone = median_interval([3.0])
    assert (alone.low, alone.high) == (3.0, 3.0)
    one, three = ratio_interval([4.0], [1.0, 1.2, 1.4]), ratio_interval([3.9, 4.0, 4.1], [1.0, 1.2, 1.4])
    assert one.low < three.low < three.high < one.high


def test_the_interval_of_three_seeds_is_students():
    found = difference_interval([10.0, 11.0, 12.0], [4.0, 5.0, 6.0])
    half = 2.132 * math.sqrt(2 / 3)  # t at 4 degrees of freedom
    assert found.median == 6.0
    assert (found.low, found.high) == (pytest.approx(6 - half, abs=0.01), pytest.approx(6 + half, abs=0.01))


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0], [-3.0, -3.1, -3.2], [1e-12, 2e-12, 3e-12]])
def test_any_number_has_an_interval(values):
    found = median_interval(values)
    assert found.low <= found.median <= found.high
    assert ratio_interval([1.0, 1.0, 1.0], [0.0, 0.0, 0.0]).low > 1


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("spreads", [(0.1, 0.1), (0.3, 0.3), (0.6, 0.6), (0.1, 0.6), (0.6, 0.1)])
def test_nine_of_ten_intervals_hold_the_truth_and_one_of_twenty_claims_what_is_not_so(seeds, spreads):
    chance, studies = random.Random(0), 2000

    def found():
        ours, theirs = ([chance.lognormvariate(0, spread) for _ in range(seeds)] for spread in spreads)
        return ratio_interval(ours, theirs)

    intervals = [found() for _ in range(studies)]
    assert statistics.fmean(each.low <= 1 <= each.high for each in intervals) > 0.87
    assert statistics.fmean(each.low > 1 for each in intervals) < 0.065


def test_nine_of_ten_intervals_of_a_median_hold_it():
    chance = random.Random(0)
    intervals = [median_interval([chance.lognormvariate(0, 0.6) for _ in range(3)]) for _ in range(2000)]
    assert statistics.fmean(each.low <= 1 <= each.high for each in intervals) > 0.88
