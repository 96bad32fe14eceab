"""Which lengths to bucket inputs by: those that waste least memory and padding, chosen by dynamic programming."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from batchtune.protocol.data import LengthsSeen
from batchtune.vocabulary import Length, dimensions, order, room_for

_MOST_GROUPS = 256  # of lengths that are told apart; more cost seconds and gain less than a percent
_BATCH, _PADDED = 2**160, 2**40  # whole numbers, so that padding decides between equals, and rounding nothing

_Needs = Callable[[Length], int]
_Group = tuple[Length, int]  # neighbouring lengths that are not told apart: the longest, and their samples
_Cut = tuple[int, list[Length]]  # what some buckets cost, and their edges


def choose_buckets(
    lengths: Iterable[Length] | Mapping[Length, int], batch_of: Callable[[Length], float], at_most: int = 8
) -> list[Length]:
    """The longest length of each bucket, ascending, of those buckets that give the fewest batches.

    A sample goes into the first bucket that is long enough, and takes 1 / batch_of(edge) of a batch there: what a batch
    leaves unused and what it pads both make the sum over all samples larger.

    The sum is the smallest there is for up to 256 different lengths; of more, neighbours that together need less than
    1/256 of all batches are not told apart. Where the sum is the same, the buckets that pad less are chosen. Lengths of
    several numbers are put in the order of the memory they need (then of their sum), buckets are stretches of that
    order, and a bucket's edge is the largest of each number.

    Args:
        lengths: of the samples, or how many samples there are of each length.
        batch_of: the largest batch of samples of a length, measured or predicted; above 0.
        at_most: how many buckets there may be.

    Raises:
        ValueError: there are no lengths, a batch is not above 0, or `at_most` is below 1.
    """
    counts = Counter(lengths)
    if not counts or at_most < 1:
        raise ValueError("no lengths to choose buckets of" if at_most >= 1 else f"at_most is {at_most}; take 1 or more")

    @functools.cache
    def needs(edge: Length) -> int:
        """What a sample needs: its share of a batch and, as a trifle beside it, what it is padded to."""
        batch = batch_of(edge)
        if not batch > 0:
            raise ValueError(f"the largest batch at length {edge} is {batch}; it must be above 0")
        samples, per = batch.as_integer_ratio()
        return _BATCH * per // samples + _PADDED * sum(dimensions(edge))

    return _cheapest(_grouped(counts, needs), needs, at_most)


def lengths_of(seen: LengthsSeen) -> list[Length]:
    """The lengths to find batches of, the longest first: those that are given, or the best eight of the samples'.

    Nothing is known of memory when these are chosen: each sample is taken to need as much as its length.
    """
    if seen.edges:
        return [*reversed(seen.edges)]
    counts = {each.length: each.samples for each in seen.groups}
    chosen = choose_buckets(counts, lambda length: 1 / order(length)[0])
    return sorted({*chosen, seen.longest}, key=order, reverse=True)


def _grouped(counts: Mapping[Length, int], needs: _Needs) -> list[_Group]:
    """All lengths in order; neighbours together where they are too many."""
    ordered = sorted(
        counts, key=lambda length: (length if isinstance(length, int) else needs(length), sum(dimensions(length)))
    )
    if len(ordered) <= _MOST_GROUPS:
        return [(length, counts[length]) for length in ordered]
    so_far = list(accumulate(needs(length) * counts[length] for length in ordered))
    members: dict[int, list[Length]] = {}
    for length, needed in zip(ordered, so_far, strict=True):
        members.setdefault(min(needed * _MOST_GROUPS // so_far[-1], _MOST_GROUPS - 1), []).append(length)
    return [(room_for(*each), sum(counts[length] for length in each)) for each in members.values()]


def _cheapest(groups: list[_Group], needs: _Needs, at_most: int) -> list[Length]:
    """The edges of the buckets that need least.

    By dynamic programming: the cheapest way to cut the first groups into n buckets ends with one bucket, before which
    the groups are cut in the cheapest way into n - 1.
    """
    ends = range(1, len(groups) + 1)
    ending = {end: accumulate(reversed(groups[:end]), _joined) for end in ends}  # the last one, two, … groups before it
    last = {end: [(needs(edge) * samples, [edge]) for edge, samples in ending[end]] for end in ends}
    best = {end: last[end][-1] for end in ends}  # all groups before that in one bucket
    found = best[len(groups)]
    for _ in range(1, min(at_most, len(groups))):
        best = {end: _with_one_more(best, last[end], end) for end in ends if end - 1 in best}
        found = min(found, best[len(groups)], key=lambda choice: choice[0])
    return found[1]


def _with_one_more(best: dict[int, _Cut], last: list[_Cut], end: int) -> _Cut:
    """The cheapest cut of the first groups up to `end`, of those that add a bucket to one of `best`."""
    cost, size = min((best[end - size][0] + cost, size) for size, (cost, _) in enumerate(last, 1) if end - size in best)
    return cost, best[end - size][1] + last[size - 1][1]


def _joined(group: _Group, shorter: _Group) -> _Group:
    return room_for(group[0], shorter[0]), group[1] + shorter[1]
