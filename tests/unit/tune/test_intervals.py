from batchtune.tune.verdict.scores import median_interval, ratio_interval


def test_intervals_hold_their_median_and_widen_with_the_spread():
    narrow, wide = median_interval([1.0, 1.1, 1.2]), median_interval([0.5, 1.1, 2.0])
    assert narrow.low <= narrow.median <= narrow.high
    assert wide.high - wide.low > narrow.high - narrow.low
    assert ratio_interval([2.0], [1.0]).median == 2.0


def test_many_seeds_are_resampled_without_counting_every_case():
    values = [1 + 0.01 * n for n in range(12)]
    first, second = ratio_interval(values, values), ratio_interval(values, values)
    assert first == second
    assert first.low < 1 < first.high
