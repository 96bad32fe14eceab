"""The choice of buckets: the best there is for few lengths, and near it for many."""

import itertools
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.lengths.buckets import choose_buckets

COUNTS = st.dictionaries(st.integers(1, 40), st.integers(1, 9), min_size=1, max_size=7)
LAWS = {
    "linear": lambda length: max(1, 300 // length),
    "quadratic": lambda length: max(1, 2000 // length**2),
    "capped": lambda length: min(16, max(1, 300 // length)),
    "one at a time": lambda length: 1,
}


def batches(counts, edges, batch_of):
    """The sum that is minimised, in exact numbers."""
    return sum(
        samples / Fraction(batch_of(next(edge for edge in edges if edge >= length)))
        for length, samples in counts.items()
    )


def proportional(length):
    return Fraction(10**6, length)


def padded(counts, edges):
    return sum(samples * next(edge for edge in edges if edge >= length) for length, samples in counts.items())


def every_choice(counts, at_most):
    *shorter, longest = sorted(counts)
    for number in range(min(at_most, len(counts))):
        for chosen in itertools.combinations(shorter, number):
            yield [*chosen, longest]


@given(COUNTS, st.integers(1, 5), st.sampled_from(sorted(LAWS)))
@settings(max_examples=300, deadline=None)
def test_it_is_the_best_of_all_choices(counts, at_most, law):
    batch_of = LAWS[law]
    found = choose_buckets(counts, batch_of, at_most)
    best = min((batches(counts, edges, batch_of), padded(counts, edges)) for edges in every_choice(counts, at_most))
    assert len(found) <= at_most
    assert (batches(counts, found, batch_of), padded(counts, found)) == best


def test_lengths_may_be_given_one_by_one():
    lengths = [5, 9, 5, 30, 9, 9]
    assert choose_buckets(lengths, LAWS["linear"]) == choose_buckets({5: 2, 9: 3, 30: 1}, LAWS["linear"])


def test_of_thousands_of_lengths_it_loses_less_than_a_hundredth():
    drawn = random.Random(3)
    lengths = [max(1, int(drawn.lognormvariate(6.5, 0.8))) for _ in range(20_000)]
    counts = {length: lengths.count(length) for length in set(lengths) if length <= 4096}
    assert len(counts) > 2000
    found = choose_buckets(counts, proportional, at_most=1000)
    assert len(found) <= 256
    assert batches(counts, found, proportional) <= 1.01 * batches(counts, sorted(counts), proportional)


def test_more_buckets_are_never_worse_and_eight_are_near_the_end():
    lengths = {length: 1 + 4096 // length for length in range(16, 2049, 16)}
    chosen = [choose_buckets(lengths, proportional, number) for number in range(1, 12)]
    by_number = [batches(lengths, edges, proportional) for edges in chosen]
    assert by_number == sorted(by_number, reverse=True)
    assert by_number[0] > 1.5 * by_number[7]


def test_lengths_of_two_numbers_are_padded_to_the_largest_of_each():
    counts = {(10, 3): 4, (12, 2): 4, (60, 80): 1}
    found = choose_buckets(counts, lambda length: 1200 // sum(length), 2)
    assert found == [(12, 3), (60, 80)]


@pytest.mark.parametrize(
    ("lengths", "batch", "at_most", "message"),
    [
        ([], 4, 8, "no lengths"),
        ([3], 4, 0, "at_most is 0"),
        ([3], 0, 8, "largest batch at length 3 is 0"),
        ([3], math.nan, 8, "largest batch at length 3 is nan"),
    ],
)
def test_nothing_to_choose_from_is_refused(lengths, batch, at_most, message):
    with pytest.raises(ValueError, match=message):
        choose_buckets(lengths, lambda length: batch, at_most)
