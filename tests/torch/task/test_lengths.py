"""Lengths of inputs: how long samples are, which of them make a batch of a length, and what does not go together."""

from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from batchtune.config import checks
from batchtune.errors import UsageError, UserCodeError
from batchtune.protocol.data import LengthsSeen
from batchtune.task.contract import Task
from batchtune.task.lengths import look_at_lengths


def task_of(**functions):
    usual = {"build_model": lambda: nn.Linear(1, 1), "compute_loss": lambda model, batch: model(batch).mean()}
    return Task(SimpleNamespace(**usual | functions), "m.py")


def made(batch_size, length):
    return torch.ones(batch_size, length)


def made_alike(batch_size):
    return torch.ones(batch_size)


def padded(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def of_samples(*lengths, **functions):
    """A task with a sample of each length, whose every number is its place."""
    data = [torch.full((length,), float(place)) for place, length in enumerate(lengths)]
    return task_of(**{"train_dataset": lambda: data, "sample_length": len, "collate": padded} | functions)


def counts(seen):
    return [(group.length, group.samples) for group in seen.groups]


class TestMadeBatches:
    def test_they_are_of_the_length_asked_for_or_of_the_longest(self):
        task = task_of(make_batch=made)
        task.find_lengths((8, 16, 32))
        assert task.worst_batch(2, 8).shape == (2, 8)
        assert task.worst_batch(2).shape == (2, 32)

    def test_a_length_may_have_several_numbers(self):
        task = task_of(make_batch=lambda batch_size, length: torch.ones(batch_size, *length))
        task.find_lengths(((8, 4), (16, 4)))
        assert task.worst_batch(2, (8, 4)).shape == (2, 8, 4)

    def test_a_length_with_a_default_is_left_to_the_task_where_none_was_asked_for(self):
        task = task_of(make_batch=lambda batch_size, length=12: torch.ones(batch_size, length))
        task.find_lengths(None)
        assert task.worst_batch(2).shape == (2, 12)

    def test_one_that_needs_a_length_says_how_to_name_them(self):
        task = task_of(make_batch=made)
        with pytest.raises(UsageError, match="make_batch takes a length, too; say which there are: --lengths 128"):
            task.find_lengths(None)


class TestDrawnBatches:
    """Batches as a loader makes them of samples that differ."""

    def test_their_largest_sample_is_one_of_so_many_drawn(self):
        task = of_samples(*range(1, 201))
        task.find_worst_samples()
        one, many = ([len(next(task.drawn_batches(size, number))[0]) for number in range(1, 19)] for size in (1, 20))
        assert min(one) < 40
        assert max(one) > 160
        assert one[0] == min(one)
        assert min(many) > 100
        assert next(task.drawn_batches(20, 3)).shape[0] == 20

    def test_they_are_the_same_for_a_number_in_another_process(self):
        first, later = of_samples(*range(1, 50)), of_samples(*range(1, 50))
        later.find_worst_samples(first.find_worst_samples())
        for number in (1, 2):
            some = [[len(batch[0]) for batch in islice(task.drawn_batches(4, number), 9)] for task in (first, later)]
            assert some[0] == some[1]
            assert len(set(some[0])) > 3

    def test_there_are_none_where_samples_or_batches_are_all_alike(self):
        alike = of_samples(7, 7, 7)
        padded_to_one_length = of_samples(3, 9, collate=lambda some: torch.zeros(len(some), 16))
        for task in (alike, padded_to_one_length, task_of(make_batch=made_alike)):
            task.find_worst_samples()
            assert list(task.drawn_batches(4, 1)) == []
            assert not task.batches_differ()

    def test_a_loaders_own_come_as_they_are(self):
        task = task_of(train_loader=lambda size: [torch.zeros(size, length) for length in (3, 8, 5)])
        task.worst_batch(4)
        assert [batch.shape for batch in islice(task.drawn_batches(4, 1), 4)] == [(4, 3), (4, 8), (4, 5), (4, 3)]
        alike = task_of(train_loader=lambda size: [torch.zeros(size, 8)] * 3)
        alike.worst_batch(4)
        assert list(alike.drawn_batches(4, 1)) == []


class TestSamples:
    def test_a_batch_is_of_the_longest_samples_up_to_its_length(self):
        task = of_samples(3, 9, 5, 30, 16, 15)
        task.find_lengths((8, 16, 32))
        assert task.lengths.edges == (5, 16, 30)
        assert task.worst_batch(3, 16).tolist() == [[4.0] * 16] * 3
        assert task.worst_batch(2, 5).tolist() == [[2.0] * 5] * 2
        assert task.worst_batch(2).shape == (2, 30)

    def test_of_several_numbers_each_is_met_by_a_sample(self):
        data = [torch.ones(6, 2), torch.ones(3, 5), torch.ones(2, 2)]
        collate = lambda some: torch.zeros(len(some), *(max(each.shape[at] for each in some) for at in (0, 1)))  # noqa: E731
        task = task_of(train_dataset=lambda: data, sample_length=lambda each: tuple(each.shape), collate=collate)
        task.find_lengths(((2, 2), (8, 8)))
        assert task.lengths.edges == ((2, 2), (6, 5))
        assert task.worst_batch(4, (6, 5)).shape == (4, 6, 5)
        assert task.worst_batch(4, (2, 2)).shape == (4, 2, 2)

    def test_their_distribution_is_told(self):
        task = of_samples(3, 9, 3, 9, 9)
        task.find_lengths("auto")
        assert counts(task.lengths) == [(3, 2), (9, 3)]
        assert (task.lengths.seen, task.lengths.total) == (5, 5)

    def test_of_many_lengths_at_most_200_are_told_and_none_is_lost(self):
        seen = look_at_lengths(enumerate(range(1, 1002)), "auto", 1001)
        assert len(seen.groups) <= 200
        assert sum(samples for _, samples in counts(seen)) == 1001
        assert seen.longest == seen.groups[-1].length == 1001

    @pytest.mark.parametrize("asked", ["auto", (4, 7, 30)])
    def test_batches_of_lengths_between_those_that_are_probed_are_of_samples_that_have_them(self, asked):
        task = of_samples(3, 9, 5, 30, 16, 15, 6)
        task.find_lengths(asked)
        for length in (3, 5, 6, 9, 15, 16, 30):
            assert task.worst_batch(2, length).shape == (2, length)

    def test_later_children_train_the_same_samples_without_a_look(self):
        first = of_samples(3, 9, 5)
        first.find_lengths((4, 16))
        known = LengthsSeen.model_validate(first.lengths.model_dump())
        later = of_samples(3, 9, 5, sample_length=lambda _: 1 / 0)
        later.find_lengths((4, 16), known)
        assert torch.equal(later.worst_batch(2, 9), first.worst_batch(2, 9))

    def test_a_look_ends_when_its_time_is_up(self):
        clock = iter([0.0, 1.0, 31.0]).__next__
        seen = look_at_lengths(enumerate([4, 5, 6]), "auto", 3, seconds=30.0, clock=clock)
        assert (seen.seen, seen.total) == (2, 3)

    def test_made_batches_keep_the_lengths_asked_for_beside_a_distribution(self):
        task = of_samples(3, 9, 5, make_batch=made)
        task.find_lengths((4, 16))
        assert task.lengths.edges == (4, 16)
        assert counts(task.lengths) == [(3, 1), (5, 1), (9, 1)]
        assert task.worst_batch(2, 16).shape == (2, 16)


class TestBadInput:
    def test_a_sample_longer_than_the_longest_is_named_with_its_index(self):
        with pytest.raises(
            UsageError, match=r"sample 2 of train_dataset has length 40, longer than the longest, 32: add 40"
        ):
            of_samples(3, 9, 40).find_lengths((8, 32))

    def test_a_length_of_which_there_is_no_sample_is_named(self):
        with pytest.raises(
            UsageError, match="--lengths 16: no sample of train_dataset is longer than 8 and no longer than that: leave"
        ):
            of_samples(3, 30).find_lengths((8, 16, 32))

    def test_a_task_that_knows_no_length_says_what_to_write(self):
        with pytest.raises(UsageError, match=r"no make_batch\(batch_size, length\), and no sample_length\(sample\)"):
            task_of(make_batch=made_alike).find_lengths((8, 16))

    @pytest.mark.parametrize(("function", "end"), [(made, "write it, or name the lengths"), (made_alike, "write it")])
    def test_auto_needs_samples_to_choose_by(self, function, end):
        with pytest.raises(UsageError, match=rf"^--lengths auto: m.py has no sample_length\(sample\) .* by; {end}$"):
            task_of(make_batch=function).find_lengths("auto")

    @pytest.mark.parametrize("length", [0, -1, 2.5, "12", None, True, (), (3, 0), (3, "4")])
    def test_what_is_no_length_is_named_with_its_sample(self, length):
        with pytest.raises(
            UserCodeError, match=r"sample_length returned .* for sample 0 of train_dataset; it must return"
        ):
            of_samples(3, sample_length=lambda _: length).find_lengths("auto")

    def test_lengths_of_another_kind_than_the_samples_are_named(self):
        with pytest.raises(UsageError, match="sample 0 of train_dataset has length 3: both must have equally many"):
            of_samples(3).find_lengths(((8, 8),))

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ("128,x", "--lengths x: is no length; write auto, 128,256,512"),
            ("", "--lengths .nothing.: is no length"),
            ("128,,256", "--lengths .nothing.: is no length"),
            ("0", "--lengths 0: is no length"),
            ("-5", "--lengths -5: is no length"),
            ("12.5", "--lengths 12.5: is no length"),
            ("128,128x64", "some have more numbers than others"),
            ([], "--lengths: names no length"),
            ([1.5], "--lengths 1.5: is no length"),
            (list(range(1, 100)), "--lengths: names 99 lengths; at most 64"),
        ],
    )
    def test_what_is_written_wrong_is_said_in_one_line(self, given, message):
        with pytest.raises(UsageError, match=message):
            checks.lengths("--lengths", given)


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ("auto", "auto"),
        ("512, 128,128", (128, 512)),
        ("128x64,16X32", ((16, 32), (128, 64))),
        ([256, 64], (64, 256)),
        ([(4, 8), (2, 2)], ((2, 2), (4, 8))),
        (96, (96,)),
    ],
)
def test_lengths_are_read_ascending_and_each_once(given, lengths):
    assert checks.lengths("--lengths", given) == lengths
