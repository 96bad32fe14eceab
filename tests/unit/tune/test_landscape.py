"""The grid for the figure: predictions with a band that mostly holds the truth, and none where nothing reached."""

import law
import pytest

from batchtune.tune.optuna_parts.surface import Run, SurfacePrior, landscape

PRIOR = SurfacePrior(
    saturation_batch_size=law.ALPHA / law.BETA, saturation_spread=0.3, anchor_batch_size=16, anchor_learning_rate=2e-3
)
SIZES = (8, 16, 32, 64, 128, 256, 512)
CONFIGURATIONS = [(16, 1e-3), (32, 4e-3), (64, 1e-2), (64, 3e-2), (128, 2e-2), (256, 3e-2), (128, 6e-2), (32, 1e-2)]


def seconds_to_target(batch, rate, *, noise=0.0, seed=0):
    """The law's best time at a batch size, and over the learning rate gradient flow below and instability above."""
    off = rate / law.best_rate(batch)
    slower = (3.0 * off**-0.9 + 0.9 * off**3.0) / 3.9
    return slower * law.seconds_to_target(batch, law.best_rate(batch), noise=noise, seed=f"{seed} {rate}")


def runs(seed, *, noise=0.15):
    return [
        Run(batch, rate, seconds_to_target(batch, rate, noise=noise, seed=seed), censored=False)
        for batch, rate in CONFIGURATIONS
    ]


def predicted(seed=0):
    return landscape(PRIOR, runs(seed), SIZES, (1e-4, 0.1), seed=seed)


def test_the_grid_covers_the_search_space_with_bounds_around_each_median():
    found = predicted()
    assert found.batch_sizes == list(SIZES)
    assert (found.learning_rates[0], found.learning_rates[-1]) == (1e-4, 0.1)
    assert found.runs == len(CONFIGURATIONS)
    for rows in (found.median_seconds, found.low_seconds, found.high_seconds):
        assert len(rows) == len(SIZES)
        assert all(len(row) == len(found.learning_rates) for row in rows)
    for low, median, high in zip(found.low_seconds, found.median_seconds, found.high_seconds, strict=True):
        assert all(0 < a <= b <= c for a, b, c in zip(low, median, high, strict=True))


def test_the_band_holds_the_law_about_as_often_as_it_says():
    held = total = 0
    for seed in range(10):
        found = predicted(seed)
        for row, batch in enumerate(found.batch_sizes):
            for column, rate in enumerate(found.learning_rates):
                if abs(law.math.log10(rate / law.best_rate(batch))) > 0.7:
                    continue  # nobody searches there
                total += 1
                truth = seconds_to_target(batch, rate)
                held += found.low_seconds[row][column] <= truth <= found.high_seconds[row][column]
    assert total > 500
    assert held / total > 0.8


def test_the_band_is_wider_where_nothing_ran():
    found = predicted()

    def width(batch, rate):
        row = found.batch_sizes.index(batch)
        column = min(range(len(found.learning_rates)), key=lambda i: abs(found.learning_rates[i] - rate))
        return found.high_seconds[row][column] / found.low_seconds[row][column]

    assert width(64, 1e-2) < width(512, 1e-4)


def test_lower_bounds_alone_make_no_landscape():
    bounds = [Run(run.batch_size, run.learning_rate, run.seconds, censored=True) for run in runs(0)]
    assert landscape(PRIOR, bounds, SIZES, (1e-4, 0.1), seed=0) is None


def test_a_search_space_of_one_rate_and_one_size_is_a_grid_of_one_point():
    found = landscape(PRIOR, runs(0), [64], (0.01, 0.01), seed=0)
    assert found.learning_rates == pytest.approx([0.01])
    assert len(found.median_seconds) == len(found.median_seconds[0]) == 1
