"""Which learning rate is believed best before the study."""

from __future__ import annotations

import math

from batchtune.document import RangeTest
from batchtune.vocabulary import classes_in

_BASELINE_SPREAD = 0.7  # decades between the baseline's learning rate, doubled, and the best
_MEASURED_RATE_SPREAD = 0.3  # …and between the share of the range test's rate and the best
_OPEN_EDGE_SPREAD = 0.6  # …where the edge lies beyond the rates searched
_UNKNOWN_SPREAD = 1.0
_SHARE = 1 / 2  # of the rate of least loss: the edge of stability is 2 / curvature, the fastest descent 1 / curvature
_ADAM_SHARE = 1 / 3
_ADAM_FAMILY = {"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Lion", "Adafactor", "RMSprop"}


def rate_belief(
    *, optimizer: str, baseline_rate: float, batch_size: int, range_test: RangeTest | None = None
) -> tuple[float, float, str]:
    """The learning rate believed best at a batch size, how sure that is, and why.

    A range test of this size counts: the rate at which the loss was least lies a little below the edge of stability,
    and half of it is close to the best for SGD, a third for the Adam family. Where there is none, there is the
    baseline's only, which is more often too low than too high, since a rate that is too high is noticed. A test that
    met no edge is weighed with that for the Adam family, whose steps do not grow with the gradient: what is a good rate
    differs less between tasks than SGD's, which goes by the curvature. For other optimizers there is no such rule, and
    the belief is wide.

    All this is known of one loss that goes down. Where optimizers train on losses of their own, each may rise because
    another's network learns, or be least where that one has collapsed. So their test is a weak hint, whatever came of
    it, and today's rate counts for more.

    Returns:
        The rate, the standard deviation in decades, and the sentence why.
    """
    classes = classes_in(optimizer)
    is_sgd = classes == {"SGD"}
    known = is_sgd or classes <= _ADAM_FAMILY
    lowest = range_test.lowest_loss_learning_rate if range_test else None
    if range_test is None or lowest is None:
        why = f"today's {baseline_rate:g} is more often too low than too high"
        spread = _BASELINE_SPREAD if known else _UNKNOWN_SPREAD
        return 2 * baseline_rate, spread, why if known else f"{why}; nothing more is known about {optimizer}"
    edge, highest = range_test.edge_learning_rate, range_test.highest_learning_rate
    came = f"diverged at {edge:.2g}" if edge else f"was stable up to {highest:.2g}"
    share, part = (_SHARE, "half") if is_sgd else (_ADAM_SHARE, "a third")
    several = range_test.losses > 1
    what = f"one of {range_test.losses} losses" if several else "loss"
    why = f"in the range test at batch {batch_size:,} {what} was least at {lowest:.2g}"
    why += f" and training {came}; {part} of that"
    if several:
        rate, spread = _weighed(lowest * share, _UNKNOWN_SPREAD, baseline_rate)
        why = f"{why}, weighed with twice today's {baseline_rate:g}"
        return rate, spread, f"{why}, as losses with an optimizer each tell little of a rate that is good for all"
    if not known:
        return lowest * share, _UNKNOWN_SPREAD, f"{why}, with little known about {optimizer}"
    why = f"{why} is the usual best of {optimizer}"
    spread = _MEASURED_RATE_SPREAD if edge else _OPEN_EDGE_SPREAD
    if edge or is_sgd:
        return lowest * share, spread, why
    rate, spread = _weighed(lowest * share, spread, baseline_rate)
    return rate, spread, f"{why}; weighed with twice today's {baseline_rate:g}, as no edge was met"


def _weighed(rate: float, spread: float, baseline_rate: float) -> tuple[float, float]:
    """What a test tells and its spread in decades, and today's rate, as two normal beliefs multiply."""
    weight = _BASELINE_SPREAD**2 / (_BASELINE_SPREAD**2 + spread**2)
    return rate**weight * (2 * baseline_rate) ** (1 - weight), spread * math.sqrt(weight)
