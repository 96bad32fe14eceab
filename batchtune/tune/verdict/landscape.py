"""The response surface as a grid for a figure: what it predicts for every batch size and learning rate, with a band."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchtune.document import Landscape
from batchtune.tune.optuna_parts.surface import Array, Run, Surface, SurfacePrior

_RATES = 25
_BAND = 0.9
_DIGITS = 4


def landscape(
    prior: SurfacePrior, runs: Sequence[Run], batch_sizes: Sequence[int], rates: tuple[float, float], *, seed: int
) -> Landscape | None:
    """Fits the surface to all runs once more and evaluates it.

    Args:
        prior: the belief before the runs.
        runs: every run of the study that tells about time.
        batch_sizes: those of the search space, ascending.
        rates: the smallest and the largest learning rate of the search space.
        seed: makes the surface reproducible.

    Returns:
        Medians and the bounds of the belief about the time that a configuration takes on average; None where no run
        has reached the target, since the surface then knows lower bounds only.
    """
    if all(run.censored for run in runs):
        return None
    learning_rates = np.geomspace(*rates, _RATES if rates[1] > rates[0] else 1)
    batch, rate = np.meshgrid(np.asarray(batch_sizes, dtype=float), np.log10(learning_rates), indexing="ij")
    seconds = np.exp(Surface(prior, runs, seed).predict(batch.ravel(), rate.ravel()))
    low, median, high = np.quantile(seconds, [(1 - _BAND) / 2, 0.5, (1 + _BAND) / 2], axis=0)
    return Landscape(
        batch_sizes=list(batch_sizes),
        learning_rates=_rounded(learning_rates),
        median_seconds=[_rounded(row) for row in median.reshape(batch.shape)],
        low_seconds=[_rounded(row) for row in low.reshape(batch.shape)],
        high_seconds=[_rounded(row) for row in high.reshape(batch.shape)],
        band=_BAND,
        runs=len(runs),
    )


def _rounded(values: Array) -> list[float]:
    return [float(f"{value:.{_DIGITS}g}") for value in values]
