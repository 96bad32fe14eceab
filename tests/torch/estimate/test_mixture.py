"""A step at any length from traces at four, and batches of several lengths that train in turns."""

from __future__ import annotations

import pytest

from batchtune.estimate.memory.allocator import MIB
from batchtune.estimate.memory.capacity import Search
from batchtune.estimate.memory.events import Birth, Trace
from batchtune.estimate.memory.fit import FittedStep, Misaligned
from batchtune.estimate.memory.mixture import Mixture, fit_lengths

LENGTHS = (64, 128, 192, 256, 384, 512)


def two_steps(batch_size, length, *, size=lambda batch, length: 1000 * batch * length + 40 * batch * length**2):
    """A parameter, and in both of two steps an activation with a temporary on top of it."""
    births = [Birth(MIB, "aten.empty", category="parameters"), Birth(8 * batch_size * length, "aten.empty")]
    for step in (1, 2):
        births.append(Birth(size(batch_size, length), "aten.mm", moment=f"forward {step}", category="activations"))
        births.append(Birth(100 * batch_size * length, "aten.mm", moment=f"backward {step}"))
    return Trace(batch_size, [1, 2, 3, 4, -4, -3, 5, 6, -6, -5], births)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_polynomial_in_batch_and_length_is_found_by_traces_at_four_lengths(length):
    asked = []

    def trace_at(batch_size, at):
        asked.append((batch_size, at))
        return two_steps(batch_size, at)

    step = fit_lengths(trace_at, LENGTHS)[length]
    assert step.sizes(77) == [birth.size_bytes for birth in two_steps(77, length).births]
    assert len({at for _, at in asked}) == 4
    assert len(asked) == 12


@pytest.mark.parametrize(
    "size",
    [lambda batch, length: batch * length**3, lambda batch, length: batch * (100 if length < 200 else 900)],
    ids=["third degree", "another kernel"],
)
def test_what_is_no_polynomial_of_the_length_is_traced_at_each(size):
    steps = fit_lengths(lambda batch_size, length: two_steps(batch_size, length, size=size), LENGTHS)
    assert [steps[length].sizes(10)[2] for length in LENGTHS] == [size(10, length) for length in LENGTHS]


def test_lengths_of_two_numbers_are_traced_at_each():
    pairs = [(8, 4), (16, 4), (16, 16), (32, 16), (32, 32)]
    steps = fit_lengths(lambda batch_size, pair: two_steps(batch_size, pair[0] * pair[1]), pairs)
    assert [steps[pair].sizes(3)[3] for pair in pairs] == [300 * pair[0] * pair[1] for pair in pairs]


def test_a_length_at_which_the_batch_is_no_polynomial_says_so():
    odd = fit_lengths(lambda batch, length: two_steps(batch, length, size=lambda b, n: n * (b // 2 + 1)), LENGTHS)
    assert all(isinstance(step, Misaligned) for step in odd.values())


class TestAMixture:
    def steps(self):
        return fit_lengths(two_steps, LENGTHS)

    def test_alone_a_length_holds_as_many_bytes_as_the_longest(self):
        mixture = Mixture(self.steps())
        largest = Search(mixture.longest)(400 * MIB)
        alone = mixture.alone(largest)
        assert list(alone) == list(LENGTHS)
        assert alone[512] == largest
        assert alone[64] == pytest.approx(Search(mixture.steps[64])(400 * MIB), rel=0.05)

    def test_together_it_is_a_share_that_trains_in_every_order_that_is_tried(self):
        mixture = Mixture(self.steps())
        alone = mixture.alone(Search(mixture.longest)(400 * MIB))
        together = mixture.together(alone, 400 * MIB)
        shares = [together[length] / alone[length] for length in LENGTHS]
        assert 0.4 < min(shares) <= max(shares) <= 1
        assert mixture.together(together, 400 * MIB)[512] < together[512], "the share is found once"

    def test_one_length_keeps_its_batch(self):
        mixture = Mixture({512: self.steps()[512]})
        assert mixture.together(mixture.alone(30), 400 * MIB) == {512: 30}

    def test_where_other_storages_are_born_at_other_lengths_nothing_is_taken_off(self):
        steps = self.steps()
        one = FittedStep(Trace(1, [1], [Birth(1, "aten.mm")]), *(getattr(steps[64], each) for each in _COEFFICIENTS))
        mixture = Mixture(steps | {64: one})
        alone = dict.fromkeys(LENGTHS, 10)
        assert mixture.together(alone, 400 * MIB) == alone


_COEFFICIENTS = ("coefficients", "degree", "work_coefficients")
