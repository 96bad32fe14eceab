"""Training lengths one after another: the orders that are checked, and batches that leave memory in one piece.

An allocator that caches keeps blocks of the sizes that one length has asked for. Those of the next are a little larger
or smaller, so that memory is cut up, the more so the less alike lengths are; which order is the worst, nobody knows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, field

from batchtune.document import Attempt, LengthCheck
from batchtune.errors import NothingFitsError
from batchtune.protocol.commands import TryBatchSize, TryLengths
from batchtune.vocabulary import Length, dimensions, length_text, order

ORDERS = 6  # in which lengths are checked where a caching allocator keeps what they left, each in a fresh process
ALL_ORDERS = 18  # in which they are checked where one of those failed: others may fail where it does not
MIXED_STEPS, ORDER_STEPS = 10, 3  # times those of the final check of one length: in all, and in each of several orders
ALIKE, ALIKE_AFTER_FAILURE = 0.06, 0.15  # batches that take so nearly as much in all are made to take the same
_ROUND = 0.02  # of all that a batch takes: so much may be given away for the same total at each length
_NEXT, _NEAR = 0.06, 0.02  # of all batches: how much less is tried after a failure, and how near the end is found
MARGIN = 0.03  # of all batches: by so much larger ones have to pass, too, where an order failed
"""A U-Net's batches passed 18 orders and failed in 3 of 14 more; 3 % smaller ones failed in 5 of the 18."""
_LEAST = 0.2  # of what each length trains alone
_MOST_CHECKS = 16

Sizes = dict[Length, int]
Check = Callable[[Mapping[Length, int], int], Attempt]


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


def mixed(alone: TryBatchSize, sizes: Mapping[Length, int], first: int, orders: int) -> TryLengths:
    """One of so many final checks of all lengths together, in place of that of the longest alone."""
    steps = mixed_order(len(sizes), (MIXED_STEPS if orders == 1 else ORDER_STEPS) * alone.steps, first)
    return TryLengths(
        **dict(alone) | {"steps": len(steps)},
        sizes=tuple(sizes.items()),
        order=steps,
        evaluate_after=(2 * len(sizes), len(steps) * 3 // 4),
    )


def shared(sizes: Mapping[Length, int], share: float, unit: int = 1, *, alike: float | None = ALIKE) -> Sizes:
    """A share of each batch; where batches take nearly as much in all at several lengths, exactly as much at each.

    What a batch takes in all is its size times the numbers of its length. With the same at two lengths, most blocks of
    memory are of one size, and the one length can use what the other has left. `alike` is by how much their totals may
    differ, as a share of the smallest; None leaves all as they are.
    """
    total = {length: size * math.prod(dimensions(length)) for length, size in sizes.items()}
    left, found = sorted(total, key=total.__getitem__), dict[Length, int]()
    while left:
        same = [each for each in left if total[each] <= (1 + (alike or 0)) * total[left[0]]]
        left = left[len(same) :]
        if alike and len(same) > 1:
            each_in_all = int(share * total[same[0]])
            step = math.lcm(*(unit * math.prod(dimensions(each)) for each in same))
            each_in_all -= each_in_all % step if step <= _ROUND * each_in_all else 0
            found |= {each: each_in_all // math.prod(dimensions(each)) for each in same}
        else:
            found |= {each: round(share * sizes[each]) for each in same}
    return {length: max(1, found[length] // unit) * unit for length in sizes}


@dataclass
class _Checks:
    """The checks so far.

    Attributes:
        tried: every attempt at each length, to which failures are added.
        check: trains batches of some sizes in a fresh process, in the order of a number.
        orders: that must all pass at the same sizes.
        failed: those that did not pass.
        passed: those that did, at the sizes of the last call.
    """

    tried: MutableMapping[Length, list[Attempt]]
    check: Check
    orders: int
    failed: list[Attempt] = field(default_factory=list)
    passed: list[Attempt] = field(default_factory=list)
    _first: int = 0

    def pass_at(self, sizes: Sizes) -> bool:
        """Whether all orders pass, the one that failed last first."""
        self.passed = []
        for number in range(self.orders):
            last = self.check(sizes, (self._first + number) % self.orders)
            if not last.fits:
                self._first = (self._first + number) % self.orders
                self.failed.append(last)
                for length in sizes if last.length is None else [last.length]:  # of a process that died, nobody knows
                    self.tried[length].append(last.model_copy(update={"batch_size": sizes[length], "length": length}))
                return False
            self.passed.append(last)
        return True

    def refuse(self) -> NothingFitsError:
        """The error where nothing passes."""
        last = self.failed[-1]
        where = f" at length {length_text(last.length)}, batch size {last.batch_size:,}" if last.length else ""
        return NothingFitsError(
            "batches of several lengths do not train one after another: the last of "
            f"{len(self.failed)} final checks ended in {last.outcome}{where} ({last.message}); set a smaller "
            "--memory-limit, so that each length leaves more free"
        )


def check_lengths(
    tried: MutableMapping[Length, list[Attempt]],
    first: Sizes,
    check: Check,
    *,
    unit: int = 1,
    minimum: int = 1,
    orders: int = 1,
    allocator: str | None = None,
) -> tuple[LengthCheck, Sizes]:
    """Trains all lengths mixed until that passes in so many orders, and says with which batches it does.

    Where that fails, all batches are made smaller, to within 2 % of the largest share of them that passes, less 3 %,
    and until both pass in three times as many orders: what one length leaves is what another one fails on.

    Args:
        tried: every attempt at each length, the longest first; what the checks come to is added.
        first: the largest batch of each length alone.
        check: trains batches of these sizes in a fresh process, in the order of this number; its attempt is of the
            length that failed, if one did.
        unit: batches become multiples of it,
        minimum: and none smaller.
        orders: that must all pass at the same sizes.
        allocator: its settings; unless its segments grow, batches that nearly take the same in all are made to.

    Raises:
        NothingFitsError: they do not pass.
    """
    checks = _Checks(tried, check, orders)
    cuts = orders > 1 and "expandable_segments:True" not in (allocator or "")
    sizes = _largest_share(checks, first, unit, -(-minimum // unit) * unit, align=cuts)
    last = max(checks.passed, key=lambda each: each.peak_reserved_bytes or 0)
    for length, size in sizes.items():
        if size not in {each.batch_size for each in tried[length] if each.fits}:  # it has trained in the check alone
            tried[length].append(last.model_copy(update={"batch_size": size, "length": length}))
    found = LengthCheck(
        steps=sum(each.steps for each in checks.passed),
        orders=len(checks.passed),
        failures=len(checks.failed),
        peak_reserved_bytes=last.peak_reserved_bytes,
        lowered=sorted((each for each in sizes if sizes[each] != first[each]), key=order),
        seconds=round(sum(each.seconds for each in [*checks.failed, *checks.passed]), 3),
    )
    return found, sizes


def _largest_share(checks: _Checks, first: Sizes, unit: int, least: int, *, align: bool) -> Sizes:
    """The largest share of all batches that passes, to within a fiftieth, less what other orders may need."""

    def at(share: float) -> Sizes:
        alike = (ALIKE_AFTER_FAILURE if checks.failed else ALIKE) if align else None
        return {each: max(least, size) for each, size in shared(first, share, unit, alike=alike).items()}

    passed, failed, found, known = 0.0, 0.0, Sizes(), list[Sizes]()
    share = 1.0
    while not passed or (failed and failed - passed > _NEAR):
        sizes = at(share)
        if sizes == found or (sizes not in known and checks.pass_at(sizes)):
            passed, found, kept = share, sizes, checks.passed
        else:
            known.append(sizes)
            if at(share) not in known:  # so that more of them take the same
                continue
            failed = share
            if not passed and (share <= _LEAST or len(checks.failed) >= _MOST_CHECKS):
                raise checks.refuse()
        share = (passed + failed) / 2 if passed else share - _NEXT
    checks.orders = max(checks.orders, ALL_ORDERS) if failed and checks.orders > 1 else checks.orders
    passes_above = False
    while failed and passed > _LEAST:
        passes = checks.pass_at(at(passed))
        if passes and passes_above:
            return at(passed)
        passes_above, passed = passes, passed - MARGIN
    checks.passed = kept
    return found


def order_warnings(check: LengthCheck | None, device: str) -> list[str]:
    """One where batches of other lengths left too little memory for one that fits alone."""
    if check is None or not check.failures or not device.startswith("cuda"):
        return []
    which = ", ".join(map(length_text, check.lowered))
    text = f"batches of different lengths cut memory up: at {which} less fits among the others than alone"
    remedy = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    return [f"{text}, and an order that was not tried may need more; {remedy}"]
