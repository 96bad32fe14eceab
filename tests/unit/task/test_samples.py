"""Which samples make the worst batch, and what is said where not all could be looked at."""

import re
from dataclasses import dataclass
from itertools import count, islice, pairwise
from types import SimpleNamespace

import pytest

from batchtune.task.samples import (
    find_largest,
    in_random_order,
    kept_warnings,
    longest_by_column,
    sizes_of,
    tensor_bytes,
    unseen_warnings,
)


def array(*shape):
    size = 4
    for each in shape:
        size *= each
    return SimpleNamespace(shape=shape, nbytes=size)


def looked(sizes, total=None, *, seconds=1e9):
    """At samples, of which each takes a second."""
    return find_largest(enumerate(array(*size) for size in sizes), total, seconds=seconds, clock=count().__next__)


def test_the_largest_comes_first_then_what_is_larger_in_a_dimension():
    seen, samples = looked([(8, 8), (2, 30), (9, 9), (20, 2), (1, 1)])
    assert seen.places == (2, 1, 3)
    assert [sample.shape for sample in samples] == [(9, 9), (2, 30), (20, 2)]


def test_one_sample_stands_for_all_of_one_size():
    seen, samples = looked([(3, 8)] * 5)
    assert (seen.places, len(samples)) == ((0,), 1)
    assert seen.differing == {}


def test_of_samples_that_differ_some_forty_are_kept_by_what_share_is_larger():
    seen, _ = looked([(size,) for size in range(1, 10_001)])
    shares, places = zip(*seen.quantiles, strict=True)
    assert shares[:4] == (0, 1 / 10_000, 2 / 10_000, 3 / 10_000)
    assert [9_999 - place for place in places] == [round(share * 10_000) for share in shares]
    assert len(places) < 45
    assert max(after - before for before, after in pairwise(shares)) < 0.25
    assert looked([(3, 8)] * 5)[0].quantiles == ()


def test_a_look_ends_with_its_time_and_says_how_many_were_seen():
    seen, _ = looked(((size,) for size in count(5)), 1000, seconds=12)
    assert (seen.seen, seen.is_all, seen.differing) == (12, False, {"shape[0]": (5, 16)})
    assert "the 12 of 1,000" in unseen_warnings(seen)[0]
    assert "shape[0] from 5 to 16" in unseen_warnings(seen)[0]


@pytest.mark.parametrize(
    ("sizes", "grown", "kept"),
    [
        ([1 << 20] * 40, 40 << 20, 1 << 20),
        ([1 << 20] * 40, 2 << 20, None),  # the one at hand, and the largest
        ([1 << 20] * 400, 50 << 20, None),  # a cache that has an end
        ([128] * 400, 20 << 20, None),  # what a library takes
        ([189 << 20] * 3, 570 << 20, None),  # too few to tell
        ([1 << 20] * 39 + [60 << 20], 61 << 20, None),  # the largest is held by the look
    ],
)
def test_a_training_set_that_keeps_what_it_has_loaded_is_told_of_with_what_all_of_it_takes(
    monkeypatch, sizes, grown, kept
):
    resident = iter([1 << 30, (1 << 30) + grown])
    monkeypatch.setattr(f"{find_largest.__module__}.anonymous_bytes", lambda: next(resident))
    seen, _ = looked([(each // 4,) for each in sizes], 4000)
    assert seen.kept_bytes == (None if kept is None else pytest.approx(kept, rel=0.06))
    told = [each.partition(": that")[0] for each in kept_warnings(seen)]
    text = r"the training set seems to keep what it has loaded, \S+ [KM]iB of a sample, up to 3\.\d+ GiB of all 4,000"
    assert [bool(re.fullmatch(text, each)) for each in told] == [True] * (kept is not None)


@pytest.mark.parametrize("sizes", [[(3,)] * 4, [(3,), (4,)]])
def test_nothing_is_said_where_all_were_seen_or_none_differ(sizes):
    everything, _ = looked(sizes, len(sizes))
    some, _ = looked([(3,)] * 9, 9, seconds=2)
    assert unseen_warnings(everything) == unseen_warnings(some) == unseen_warnings(None) == []


def test_no_samples_make_no_batch():
    assert looked([])[1] == []


def test_the_order_has_every_place_once_and_is_the_same_again():
    assert sorted(in_random_order(100)) == list(range(100))
    assert list(in_random_order(100)) == list(in_random_order(100)) != list(range(100))
    assert len(set(islice(in_random_order(10**12), 1000))) == 1000


def test_a_column_of_lengths_tells_the_longest():
    class Rows(SimpleNamespace):
        def __getitem__(self, name):
            return {"length": [3, 9, 4]}[name]

    assert longest_by_column(Rows(column_names=["ids", "length"])) == [1]
    assert longest_by_column(Rows(column_names=["ids"])) == longest_by_column([1, 2]) == []


def test_the_bytes_of_a_sample_are_those_of_all_its_tensors_and_numbers():
    assert tensor_bytes({"x": array(3), "y": [array(2, 2), "four"], "z": (1, None)}) == 12 + 16 + 4 + 8
    assert tensor_bytes(list(range(100))) == 800


def test_the_dimensions_of_nested_samples_have_names():
    @dataclass
    class Boxed:
        boxes: list

    sample = {"image": array(3, 5), "found": Boxed([array(2), array(7)]), "ids": [1, 2, 3]}
    names = {"image.shape[0]": 3, "image.shape[1]": 5, "found.boxes": 2, "found.boxes[].shape[0]": 7, "ids": 3}
    assert sizes_of(sample) == names | {"": 60 + 36 + 24}


@pytest.mark.parametrize(
    ("layout", "indices"),
    [
        ("sparse_coo", ("_indices", "_values")),
        ("sparse_csr", ("crow_indices", "col_indices", "values")),
        ("sparse_bsc", ("ccol_indices", "row_indices", "values")),
    ],
)
def test_a_sparse_tensor_takes_what_it_holds_and_is_not_asked_for_its_bytes(layout, indices):
    class Sparse:
        """An adjacency matrix: torch raises for the nbytes of some, and gives those of a dense one for others."""

        shape, dtype = (1000, 1000), "float32"

        @property
        def nbytes(self):
            raise RuntimeError("nbytes is not defined for sparse tensors")

    adjacency = Sparse()
    adjacency.layout = f"torch.{layout}"
    for size, name in enumerate(indices, 1):
        setattr(adjacency, name, lambda size=size: array(size))
    assert sizes_of((adjacency, array(2))) == {
        "": 4 * sum(range(1, len(indices) + 1)) + 8,
        "[0].shape[0]": 1000,
        "[0].shape[1]": 1000,
        "[1].shape[0]": 2,
    }


def test_an_object_of_the_users_own_is_as_large_as_its_tensors_and_lists():
    class Vocabulary:
        words = array(10**6)

    class Batch:
        def __init__(self, length):
            self.source, self.labels = array(8, length), [1] * length
            self.source.dtype, self.vocabulary, self.is_padded = "int64", Vocabulary(), True

    assert sizes_of(Batch(3)) == {"": 96 + 24, "source.shape[0]": 8, "source.shape[1]": 3, "labels": 3}
    seen, samples = find_largest(enumerate([Batch(3), Batch(7), Batch(5)]), 3)
    assert (seen.places, seen.differing) == ((1,), {"source.shape[1]": (3, 7), "labels": (3, 7)})
    assert len(samples[0].labels) == 7


class Node:
    """An object of the user's own."""

    def __init__(self, **attributes) -> None:
        vars(self).update(attributes)


def tensor(*shape):
    return SimpleNamespace(**vars(array(*shape)), dtype="float32")


def test_objects_that_hold_each_other_end_nothing():
    atoms = [Node(x=tensor(4), bonds=[], weighted=[]) for _ in range(3)]
    for one, other in pairwise(atoms):
        one.bonds.append(other)
        other.bonds.append(one)
        other.weighted.append((1.5, one))
    atoms[0].loop = [atoms[0].bonds]
    atoms[0].loop.append(atoms[0].loop)
    assert tensor_bytes(atoms[:1]) == 16
    assert sizes_of(atoms)["[].x.shape[0]"] == 4


@pytest.mark.parametrize(
    "image",
    [
        Node(info={"exif": b"1" * 40, "dpi": (1, 1)}, tile=["jpeg"] * 3, quantization={0: [1] * 64}, _size=(32, 32)),
        Node(frames=["a.png", "b.png"], ids=[1, 2, 3]),
    ],
)
def test_an_object_without_tensors_has_no_sizes(image):
    assert sizes_of(image) == {"": 0}


def test_an_object_that_tells_its_bytes_is_asked_for_nothing_else():
    assert sizes_of(Node(nbytes=3 << 20, frames=["a.png"] * 3, ids=[1, 2], x=tensor(3))) == {"": 3 << 20}


def test_a_vocabulary_is_no_part_of_a_sample():
    class Words(list):
        def __iter__(self):
            raise AssertionError("each word is looked at")

    words = Words(f"word{number}" for number in range(100))
    pairs = Words((word, word) for word in list.__iter__(words))
    numbers = dict.fromkeys(range(100), 1)
    sample = Node(words=words, pairs=pairs, numbers=numbers, ids=tensor(3))
    assert sizes_of(sample) == {"": 12, "ids.shape[0]": 3}


def test_tensors_in_containers_of_an_object_and_in_slots_count():
    class Slotted:
        __slots__ = ("left", "x")

    @dataclass(slots=True)
    class Sample:
        x: object

    slotted = Slotted()
    slotted.x = tensor(9)
    batch = Node(inputs={"ids": tensor(3, 8)}, pair=("name", tensor(5)), targets=[{"boxes": tensor(2, 4)}] * 70)
    assert tensor_bytes(batch) == 96 + 20 + 70 * 32
    assert sizes_of(batch)["targets[].boxes.shape[1]"] == 4
    assert sizes_of(slotted) == sizes_of(Sample(tensor(9))) == {"": 36, "x.shape[0]": 9}
