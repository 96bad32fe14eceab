"""A study that counts tokens: batches of samples of similar length, and its plan with every size in tokens.

What comes before the study is measured in samples, as anybody trains who has one batch size; so does its baseline.
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from batchtune.config.schema import Config
from batchtune.config.space import BatchSize
from batchtune.document import NoiseScale, Prior, ProbeResult
from batchtune.errors import UsageError
from batchtune.protocol.commands import Opened
from batchtune.tune.plan.prior import candidate_batch_sizes, nearest, rescaled, split_batch
from batchtune.vocabulary import LengthBatches


@dataclass(frozen=True)
class TokenBatches:
    """What batches of tokens are made of.

    Attributes:
        buckets: length, samples of it that train at once, and samples of the training set up to it; shortest first.
        total: tokens of the training set.
        samples: the largest micro-batch of any samples, and that of the baseline.
        steps: micro-batches of the baseline's batch.
    """

    buckets: tuple[tuple[int, int, int], ...]
    total: int
    samples: tuple[int, int]
    steps: int

    @property
    def mean(self) -> float:
        """Tokens of a sample."""
        return self.total / sum(samples for *_, samples in self.buckets)

    @property
    def largest(self) -> int:
        """Tokens of a micro-batch of all that fits, in the mean of an epoch."""
        return self._in_the_mean(self._most)

    @property
    def baseline(self) -> int:
        """Tokens of the baseline's batch, in the mean."""
        return _tokens_of(self.samples[1], self.mean) * self.steps

    def made_up(self, micro_batch_size: int) -> LengthBatches:
        """Samples at each length of a micro-batch of so many tokens in the mean: as many tokens in each as fit."""
        budgets = range(1, self._most + 1)
        budget = bisect.bisect_left(budgets, micro_batch_size, key=self._in_the_mean) + 1
        return tuple((length, _samples(length, most, budget)) for length, most, _ in self.buckets)

    @property
    def _most(self) -> int:
        return max(length * most for length, most, _ in self.buckets)

    def _in_the_mean(self, budget: int) -> int:
        """Tokens of a batch in the mean of an epoch, where none has more than the budget, padding counted."""
        return int(self.total / sum(samples / _samples(length, most, budget) for length, most, samples in self.buckets))


def _samples(length: int, most: int, budget: int) -> int:
    return min(most, max(1, budget // length))


class Split(NamedTuple):
    """How a batch is made up, in names of `RunSpec`; `at_once` samples of any length are a micro-batch that trains."""

    micro_batch_size: int
    steps: int
    at_once: int
    samples: int | None = None
    length_batches: LengthBatches = ()


def split(tokens: TokenBatches | None, batch_size: int, most: int, largest: int) -> Split:
    """A batch as micro-batches of at most so many samples, or tokens; `largest` is the most that the probe found."""
    if tokens is None:
        return Split(*split_batch(batch_size, most), largest)
    if batch_size != tokens.baseline:
        micro, steps = split_batch(batch_size, most)
        return Split(micro, steps, tokens.samples[0], None, tokens.made_up(micro))
    samples, steps = split_batch(tokens.samples[1] * tokens.steps, max(1, tokens.samples[1] * most // largest))
    return Split(max(1, batch_size // steps), steps, tokens.samples[0], samples)


def token_batches(config: Config, probe: ProbeResult) -> TokenBatches | None:
    """By the probe of a study's lengths; None where the study counts samples."""
    if config.batch_size.unit == "samples":
        return None
    edges = [(point.length, point.max_batch_size) for point in probe.lengths if isinstance(point.length, int)]
    known = [(each.length, each.samples) for each in probe.length_distribution if isinstance(each.length, int)]
    in_bucket = Counter[int]()
    for length, samples in known:
        in_bucket[next(edge for edge, _ in edges if edge >= length)] += samples
    at_once = probe.max_batch_size or 1
    micro, steps = split_batch(config.baseline.batch_size, at_once)
    buckets = tuple((edge, most, in_bucket[edge]) for edge, most in edges)
    return TokenBatches(buckets, sum(length * samples for length, samples in known), (at_once, micro), steps)


def require_tokens(config: Config, opened: Opened) -> None:
    """Refuses what cannot count tokens.

    Raises:
        UsageError: a data set without a length of its own, or samples with several.
    """
    if config.batch_size.unit == "samples":
        return
    if opened.train_size is None:
        raise UsageError("batch_size.unit tokens: train_dataset tells no number of samples, which batches are made of")
    if opened.lengths is None or not isinstance(opened.lengths.longest, int):
        raise UsageError("batch_size.unit tokens: sample_length must return one number, the tokens of a sample")


def in_samples(config: Config) -> Config:
    """The configuration of what is measured before the study, where that counts tokens: without bounds."""
    return config if config.batch_size.unit == "samples" else config.model_copy(update={"batch_size": BatchSize()})


def prior_in_tokens(config: Config, probe: ProbeResult, opened: Opened, prior: Prior) -> Prior:
    """The prior of a study, which was measured in samples, with every size in tokens."""
    tokens = token_batches(config, probe)
    if tokens is None:
        return prior
    sizes, mean = config.batch_size, tokens.mean
    found = candidate_batch_sizes(
        probe_in_tokens(probe, tokens),
        minimum=sizes.min,
        maximum=None if sizes.max == "auto" else sizes.max,
        baseline=tokens.baseline,
        multiple_of=1,
        data_size=int(mean * (opened.train_size or 1)),
        accumulates=opened.accumulates,
    )
    ours = [size for size in found.batch_sizes if size != tokens.baseline] or [tokens.baseline + 1]
    return prior.model_copy(
        update={
            "batch_sizes": ours,
            "batch_sizes_reason": f"in tokens: {found.reason}, which has {config.baseline.batch_size} samples a batch",
            "start_batch_size": nearest(mean * (prior.start_batch_size or 1), ours),
            "loader_seconds_per_sample": prior.loader_seconds_per_sample and prior.loader_seconds_per_sample / mean,
            "range_tests": [
                each.model_copy(update={"batch_size": _tokens_of(each.batch_size, mean)}) for each in prior.range_tests
            ],
            "noise_scale": prior.noise_scale and _noise_in_tokens(prior.noise_scale, mean),
        }
    )


def _noise_in_tokens(noise: NoiseScale, mean: float) -> NoiseScale:
    scaled = {name: each and each * mean for name, each in noise if name in {"samples", "low", "high"}}
    return noise.model_copy(update=scaled | {"batch_sizes": [_tokens_of(size, mean) for size in noise.batch_sizes]})


def _tokens_of(size: int, mean: float) -> int:
    return max(1, round(size * mean))


def probe_in_tokens(probe: ProbeResult, tokens: TokenBatches | None) -> ProbeResult:
    """The probe with sizes and speeds in tokens; its steps were timed at the longest length, the worst."""
    if tokens is None:
        return probe
    found = {"max_batch_size": tokens.largest, "attempts": []}
    return rescaled(probe, tokens.buckets[-1][0]).model_copy(update=found)
