"""The response surface: what a few runs, finished or cut short, say about the time to target everywhere else.

log T(B, x) = log T_0 + log(1 + B_sat / B) + log(1 + B / B_crit) + g(x - x_best(B)), where x is log10 of the learning
rate, B_sat = alpha / beta of the step time t(B) = alpha + beta * B, and
x_best(B) = x_0 - e * (log10(1 + B_crit / B) - log10(1 + B_crit / B_0)). The samples to target follow McCandlish et al.
2018, E = E_min * (1 + B / B_crit); e = 1 is their rule for SGD, e = 1/2 the one for Adam, and the data decide.
g(d) = log((q r^-p + p r^q) / (p + q)) with r = 10^d: far below the best rate training follows the gradient flow, whose
time is in proportion to 1 / r, so p is close to 1; above it the steeper q leads to divergence, or log T rises no more
than by h: normalised weights grow with the rate until their steps are as small again (Li and Arora 2019).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchtune.document import Landscape

Array = npt.NDArray[np.float64]
PARTICLES = 1024
TEMPERATURES = 10
MOVES = 3
_NOISE, _NOISE_SPREAD = 0.2, 0.4  # of log T between seeds, and how far off (its logarithm) that may be
_CEILING, _CEILING_SPREAD = 3.0, 0.8  # of log T above the best rate's, where it stays, and of its logarithm
_SATURATION, OPEN_SPREAD = 45.0, 1.2  # of log B_sat where nothing tells: from 4 to 500 samples
_MISFIT = 0.1  # of log T: how far the law is off a configuration's mean
_OUTLIER_SCALE = 4.0  # degrees of freedom of the Student t that keeps one odd run from bending the surface
_RATES = 25
_BAND = 0.9
_DIGITS = 4


@dataclass(frozen=True, slots=True)
class Run:
    """One run as the surface sees it.

    Attributes:
        batch_size: global batch size.
        learning_rate: its learning rate.
        seconds: time to target; where `censored`, a time by which it had not been reached.
        censored: the run was stopped before its target.
    """

    batch_size: int
    learning_rate: float
    seconds: float
    censored: bool


@dataclass(frozen=True, slots=True)
class SurfacePrior:
    """What is believed before the first run.

    Attributes:
        anchor_batch_size: batch size at which the learning rate is best known.
        anchor_learning_rate: the learning rate believed best there.
        spread: standard deviation of that belief, in decades.
        critical_batch_size: B_crit, the middle of a belief two octaves wide.
        saturation_batch_size: B_sat, at which a step's fixed time equals that of its samples.
        saturation_spread: standard deviation of its natural logarithm; small where it was measured.
    """

    anchor_batch_size: int
    anchor_learning_rate: float
    spread: float = 0.7
    critical_batch_size: float = 256.0
    saturation_batch_size: float = _SATURATION
    saturation_spread: float = OPEN_SPREAD


# the parameters of the surface, one column each
_LOG_T, _LOG_SATURATION, _LOG_CRITICAL, _BEST, _EXPONENT, _LOG_BELOW, _LOG_ABOVE, _LOG_CEILING, _LOG_NOISE = range(9)


class Surface:
    """The posterior over surfaces, as a cloud of particles moved there by tempered Monte Carlo (Del Moral 2006).

    It takes at least one run; the same seed makes the same cloud.
    """

    def __init__(self, prior: SurfacePrior, runs: Sequence[Run], seed: int) -> None:
        self._prior = prior
        self._batch = np.array([run.batch_size for run in runs], dtype=float)
        self._x = np.log10(np.array([run.learning_rate for run in runs], dtype=float))
        self._y = np.log(np.maximum(np.array([run.seconds for run in runs], dtype=float), 1e-9))
        self._censored = np.array([run.censored for run in runs], dtype=bool)
        self._places, self._place_of = np.unique([self._batch, self._x], axis=1, return_inverse=True)
        self._mean, self._spread = self._belief()
        self.particles = self._sample(np.random.default_rng(seed))

    def predict(self, batch_sizes: Array, log10_rates: Array, particles: Array | None = None) -> Array:
        """Gives log T at points (shape [n]) for every particle (shape [p, 9]); shape [p, n]."""
        theta = self.particles if particles is None else particles
        column = theta.T[:, :, None]
        sizes, size_of = np.unique(batch_sizes, return_inverse=True)  # half of the law knows nothing of learning rates
        critical = np.exp(column[_LOG_CRITICAL])
        beyond = np.log1p(critical / sizes)
        shift = (beyond - np.log1p(critical / self._prior.anchor_batch_size)) / math.log(10)
        best = column[_BEST] - column[_EXPONENT] * shift
        below, above = np.exp(column[_LOG_BELOW]), np.exp(column[_LOG_ABOVE])
        samples = beyond + np.log(sizes) - column[_LOG_CRITICAL]  # log(1 + B / B_crit)
        level = column[_LOG_T] + np.log1p(np.exp(column[_LOG_SATURATION]) / sizes) + samples
        off = math.log(10) * (log10_rates - best[:, size_of])
        penalty = np.logaddexp(column[_LOG_ABOVE] - below * off, column[_LOG_BELOW] + above * off)
        penalty -= np.log(below + above)
        ceiling = np.exp(column[_LOG_CEILING])
        bounded = np.log1p(np.exp(-ceiling)) - np.logaddexp(-penalty, -ceiling)
        return np.asarray(level[:, size_of] + np.where(off > 0, bounded, penalty))

    def log_seconds_of_runs(self) -> Array:
        """What each run's configuration is believed to take on average, log T; shape [runs].

        The surface's mean, moved towards the configuration's own finished runs as far as their number outweighs the
        noise between seeds: the law is none of nature's, and is off by about `_MISFIT` where nothing tells it better.
        """
        expected = self.predict(self._batch, self._x).mean(axis=0)
        noise = float(np.exp(self.particles[:, _LOG_NOISE]).mean())
        found = np.asarray(expected.copy(), dtype=np.float64)
        for index in range(len(expected)):
            same = (self._batch == self._batch[index]) & (self._x == self._x[index]) & ~self._censored
            if same.any():
                off = np.median(self._y[same] - expected[same])
                found[index] += off * _MISFIT**2 / (_MISFIT**2 + noise**2 / same.sum())
        return found

    def expected_improvement(self, batch_sizes: Array, log10_rates: Array, under_way: Sequence[Run] = ()) -> Array:
        """How much lower log T is than at the configuration that would be the answer now, in the mean; shape [n].

        With runs under way, what they may turn out to be is taken into account: each particle says what they will
        show, and only what is better than the best of them counts, so that runs side by side are chosen jointly.

        What a configuration takes on average counts, not the luck of its one run (the noise between seeds is a part of
        the belief): Frazier et al. 2009 on noisy observations. The answer is the one believed best of those that
        reached the target, so that doubt about it is a reason to go on as well.
        """
        tried = self.predict(self._batch, self._x)
        believed = np.where(self._censored & ~self._censored.all(), np.inf, tried.mean(axis=0))
        answer = tried[:, int(believed.argmin())]
        if under_way:
            sizes = np.array([run.batch_size for run in under_way], dtype=float)
            rates = np.log10(np.array([run.learning_rate for run in under_way], dtype=float))
            answer = np.minimum(answer, self.predict(sizes, rates).min(axis=1))
        return np.asarray(np.maximum(answer[:, None] - self.predict(batch_sizes, log10_rates), 0).mean(axis=0))

    def _belief(self) -> tuple[Array, Array]:
        prior, first = self._prior, int(np.argmin(self._censored))
        size = self._batch[first]
        slow, large = math.log1p(prior.saturation_batch_size / size), math.log1p(size / prior.critical_batch_size)
        mean = [
            self._y[first] - slow - large - 0.3,  # the first run was hardly the best
            math.log(prior.saturation_batch_size),
            math.log(prior.critical_batch_size),
            math.log10(prior.anchor_learning_rate),
            0.6,  # between Adam's 1/2 and SGD's 1; the median exponent over MLPerf's convergence points is 0.43
            0.0,  # gradient flow
            math.log(2.5),
            math.log(_CEILING),
            math.log(_NOISE),
        ]
        spread = [0.8, prior.saturation_spread, 2 * math.log(2), prior.spread, 0.3, 0.15, 0.4]
        return np.array(mean), np.array([*spread, _CEILING_SPREAD, _NOISE_SPREAD])

    def _log_prior(self, theta: Array) -> Array:
        return np.asarray(-0.5 * (((theta - self._mean) / self._spread) ** 2).sum(axis=1))

    def _log_likelihood(self, theta: Array) -> Array:
        log_noise = theta[:, _LOG_NOISE]
        sizes, rates = self._places
        expected = self.predict(sizes, rates, theta)[:, self._place_of]
        off = (self._y - expected) / np.exp(log_noise)[:, None]
        seen, below = off[:, ~self._censored], off[:, self._censored]
        measured = -0.5 * (_OUTLIER_SCALE + 1) * np.log1p(seen**2 / _OUTLIER_SCALE).sum(axis=1)
        # a censored run only says that log T lies above: smooth step, linear far below
        cut = np.logaddexp(0.0, 1.7 * below).sum(axis=1)
        return np.asarray(measured - seen.shape[1] * log_noise - cut)

    def _sample(self, random: np.random.Generator) -> Array:
        theta = self._mean + self._spread * random.standard_normal((PARTICLES, self._mean.size))
        likelihood = self._log_likelihood(theta)
        steps = np.linspace(0, 1, TEMPERATURES + 1) ** 2
        for before, now in itertools.pairwise(steps):
            weights = np.exp((now - before) * (likelihood - likelihood.max()))
            chosen = random.choice(PARTICLES, size=PARTICLES, p=weights / weights.sum())
            theta, likelihood = theta[chosen], likelihood[chosen]
            for move in range(MOVES):
                scale = 2.38 / math.sqrt(theta.shape[1]) / 2**move
                moved = theta + scale * _correlated_noise(theta, random)
                moved_likelihood = self._log_likelihood(moved)
                log_ratio = now * (moved_likelihood - likelihood) + self._log_prior(moved) - self._log_prior(theta)
                accept = np.log(random.random(PARTICLES)) < log_ratio
                theta = np.where(accept[:, None], moved, theta)
                likelihood = np.where(accept, moved_likelihood, likelihood)
        return theta


def _correlated_noise(theta: Array, random: np.random.Generator) -> Array:
    """Noise with the covariance of the particles, by sums that start no threads: these arrays are small."""
    off = theta - theta.mean(axis=0)
    covariance = np.einsum("pi,pj->ij", off, off) / len(theta) + 1e-9 * np.eye(theta.shape[1])
    return np.asarray(np.einsum("pj,ij->pi", random.standard_normal(theta.shape), np.linalg.cholesky(covariance)))


def landscape(
    prior: SurfacePrior, runs: Sequence[Run], batch_sizes: Sequence[int], rates: tuple[float, float], *, seed: int
) -> Landscape | None:
    """The surface as a grid for a figure, over ascending batch sizes and from the least to the largest learning rate.

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
