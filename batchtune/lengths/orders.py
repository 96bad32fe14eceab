"""The orders in which batches of several lengths are checked, and the one command that trains such an order."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from batchtune.protocol.commands import TryBatchSize, TryLengths
from batchtune.protocol.data import LengthGroup
from batchtune.vocabulary import Length, covers
from batchtune.vocabulary import order as order_of

ORDERS = 6  # in which lengths are checked where a caching allocator keeps what they left, each in a fresh process
ALL_ORDERS = 18  # in which they are checked where one of those failed: others may fail where it does not
REPLAYED_ORDERS = 300  # in which an estimate replays them, which takes a hundredth of the time
"""A T5's batches trained in 100 of them and not in one of 100 others, which a long training meets."""
ORDER_STEPS, MIXED_STEPS = 3, 10  # times those of the final check of one length: of an order, and of all together


def orders_of(device: str, lengths: Collection[Length]) -> int:
    """In how many orders lengths are checked."""
    return 1 if device == "cpu" or len(lengths) == 1 else ORDERS


def mixed_order(count: int, steps: int, first: int = 0) -> tuple[int, ...]:
    """Which of so many lengths each step takes: the orders 0 and 1 are long first and short first, others at random.

    Memory is cut up by one batch and must still do for the next: for the longest after the shortest, and the reverse.
    The optimizer's states stay where the first step leaves them, so that it matters which length that is of.
    """
    dice, down = random.Random(first), list(range(count))
    found = [*down, *down[::-1], *down] if first == 0 else [*down[::-1], *down, *down[::-1]] if first == 1 else []
    while len(found) < steps - count:
        found.append(dice.randrange(count))
    return (*found, *dice.sample(down, count))


def late_steps(steps: int, first: int) -> int:
    """How many of the steps of an order free gradients once the next batch is there, and not at once, as loops do.

    Half of them in the orders that are always checked, all or none of them in others.
    """
    return steps // 2 if first < ALL_ORDERS else steps * (first % 2)


def padded_to(order: Sequence[int], edges: Sequence[Length], seen: Sequence[LengthGroup], first: int) -> list[Length]:
    """The longest input of each step's batch: in turns that of samples of its bucket, and its bucket's own.

    A data loader pads a batch to the longest sample that is in it, not to its bucket's. Where such a one comes first,
    the optimizer's states lie where the next batch, which is a little larger, would have had its room: a transformer's
    batches that passed all orders of the buckets' own lengths ran out of memory in 15 of 60 real epochs, most of them
    in the first six steps. The orders 0 and 1 begin with the buckets' own.

    Args:
        order: which bucket each step takes, as of `mixed_order`.
        edges: of the buckets.
        seen: the samples; none: nobody knows them, so that a bucket has no others.
        first: the number of the order.
    """
    dice, within = random.Random(first), defaultdict[Length, list[LengthGroup]](list)
    for group in seen:
        within[min((edge for edge in edges if covers(edge, group.length)), key=order_of)].append(group)
    found = list[Length]()
    for number, edge in enumerate(edges[which] for which in order):
        own = within[edge] if number % 2 == 0 and (first > 1 or number >= 2 * len(edges)) else []
        some = dice.choices(own, [each.samples for each in own]) if own else []
        found.append(some[0].length if some else edge)
    return found


def mixed(
    alone: TryBatchSize,
    sizes: Mapping[Length, int],
    first: int,
    orders: int,
    seen: Sequence[LengthGroup] = (),
    *,
    asked: int,
) -> TryLengths:
    """One of so many final checks of all lengths together, in place of that of the longest alone.

    Args:
        alone: that one.
        sizes: the batch of each length.
        first: the number of the order.
        orders: how many there are.
        seen: the samples that batches are of.
        asked: steps of the final check of one length, for which a study may leave time for fewer; of all, ten times so
            many are taken whatever the time.
    """
    steps = mixed_order(len(sizes), max(-(-MIXED_STEPS * asked // orders), ORDER_STEPS * alone.steps), first)
    return TryLengths(
        **dict(alone) | {"steps": len(steps)},
        sizes=tuple(sizes.items()),
        order=steps,
        padded_to=tuple(padded_to(steps, [*sizes], seen, first)),
        late_steps=late_steps(len(steps), first),
        evaluate_after=(2 * len(sizes), len(steps) * 3 // 4),
    )
