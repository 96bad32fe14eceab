"""Which devices form a group of ranks: those closest to one another, where anybody tells how close they are."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TypeAlias

MOST_DEVICES = 16  # whose groups are all looked at
Apart: TypeAlias = tuple[int, int]  # of a group, or of all: the most that two of its devices are apart, and all pairs'


def by_closeness(distances: Sequence[Sequence[int]], each: int) -> list[int]:
    """An order of the devices in which so many at a time are a group; as they are, where no other is closer.

    The widest distance within a group counts first, since ranks wait for their slowest connection, then the sum of all.
    The closest group comes first, and devices that are left over come last.

    Args:
        distances: of each device to each.
        each: devices of a group.
    """
    count = len(distances)
    if not 1 < each < count <= MOST_DEVICES:
        return list(range(count))

    def apart(group: tuple[int, ...]) -> Apart:
        pairs = [distances[one][other] for one, other in itertools.combinations(group, 2)]
        return max(pairs), sum(pairs)

    @functools.cache
    def best(left: tuple[int, ...], spare: int) -> tuple[Apart, tuple[tuple[int, ...], ...]]:
        """The groups of these devices, of which so many need not be in any, and how far apart they are."""
        if len(left) < each:
            return (-(2**62), 0), ()
        first, *others = left
        found = [best(left[1:], spare - 1)] if spare else []
        for more in itertools.combinations(others, each - 1):
            group = first, *more
            widest, total = apart(group)
            rest, groups = best(tuple(device for device in others if device not in more), spare)
            found.append(((max(widest, rest[0]), total + rest[1]), (group, *groups)))
        return min(found, key=lambda either: either[0])

    groups = best(tuple(range(count)), count % each)[1]
    order = list(itertools.chain(*sorted(groups, key=apart)))
    return order + [device for device in range(count) if device not in order]
