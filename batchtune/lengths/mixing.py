"""Training lengths one after another: batches that leave memory in one piece, and how the largest of them are found.

An allocator that caches keeps blocks of the sizes that one length has asked for. Those of the next are a little larger
or smaller, so that memory is cut up, the more so the less alike lengths are; which order is the worst, nobody knows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

from batchtune.document import Attempt, Environment, LengthCheck
from batchtune.errors import NothingFitsError
from batchtune.lengths.orders import ALL_ORDERS
from batchtune.vocabulary import Length, dimensions, length_text
from batchtune.vocabulary import order as order_of

ALIKE, ALIKE_AFTER_FAILURE = 0.06, 0.15  # batches that take so nearly as much in all are made to take the same
_ROUND = 0.02  # of all that a batch takes: so much may be given away for the same total at each length
_STEPS_DOWN, _LEAST = 100, 10  # steps from each length's batch alone down to nothing; where the search for one ends
_NEXT, _NEAR = 6, 2  # steps: how much less is tried after a failure, and how near the end is found
_MARGIN = 3  # steps: by so much larger batches have to pass, too, where an order failed and no replay had foreseen it
"""A U-Net's batches passed 18 orders and failed in 3 of 14 more; 3 % smaller ones failed in 5 of the 18."""
_MOST_CHECKS = 16
_GROWING = "expandable_segments:True"  # of an allocator's settings
_CACHED_SHAPES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"

Sizes = dict[Length, int]
Check = Callable[[Mapping[Length, int], int], Attempt]
Replay = Callable[[Sizes], int | None]
"""The first order that an estimate's replay of these batches does not train in; None where it trains in all."""


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


def steps_down(first: Sizes, unit: int = 1, minimum: int = 1, *, align: bool = True) -> list[Sizes]:
    """Ever smaller shares of the largest batches alone, a hundredth less each time.

    Args:
        first: the largest batch of each length alone.
        unit: batches are multiples of it,
        minimum: and none smaller.
        align: whether batches that nearly take the same in all are made to, from the second step on more of them.
    """
    least = -(-minimum // unit) * unit
    rules = [(_STEPS_DOWN, ALIKE), *((left, ALIKE_AFTER_FAILURE) for left in range(_STEPS_DOWN, _LEAST - 1, -1))]
    found: list[Sizes] = []
    for left, alike in rules:
        sizes = shared(first, left / _STEPS_DOWN, unit, alike=alike if align else None)
        found.append({length: max(least, size) for length, size in sizes.items()})
    return found


def first_replayed(steps: Sequence[Sizes], replay: Replay | None, start: int = 0) -> int:
    """The first of them from `start` on that a replay trains in all orders; `start` itself without one."""
    return next((at for at in range(start, len(steps)) if replay and replay(steps[at]) is None), start)


@dataclass
class _Checks:
    """The checks so far; what they are made with is as `check_lengths` is given it."""

    tried: MutableMapping[Length, list[Attempt]]
    check: Check
    orders: int
    environment: Environment
    replay: Replay | None = None
    failed: list[Attempt] = field(default_factory=list)
    passed: list[Attempt] = field(default_factory=list)  # at the sizes of the last call
    surprises: bool = False  # whether a check came out in another way than foreseen, or nothing was
    _first: int = 0
    _known: dict[tuple[int, ...], dict[int, Attempt]] = field(default_factory=dict)  # by sizes, then by order

    def pass_at(self, sizes: Sizes) -> bool:
        """Whether all orders pass: first the one that is foreseen to fail, then the one that failed last."""
        known = self._known.setdefault(tuple(sizes.values()), {})
        foreseen = self.replay(sizes) if self.replay else None
        ahead = [number for number, each in known.items() if not each.fits]
        ahead += [foreseen] if foreseen is not None else []
        for number in dict.fromkeys([*ahead, self._first, *range(self.orders)]):
            if number not in known:
                known[number] = self.check(sizes, number)
                if not known[number].fits:
                    self._failed(known[number], sizes)
            if not known[number].fits:
                self._first = number
                self.surprises |= not self.replay or foreseen is None
                return False
        self.passed = list(known.values())
        self.surprises |= not self.replay or foreseen is not None
        return True

    def _failed(self, last: Attempt, sizes: Sizes) -> None:
        self.failed.append(last)
        for length in sizes if last.length is None else [last.length]:  # of a process that died, nobody knows
            self.tried[length].append(last.model_copy(update={"batch_size": sizes[length], "length": length}))

    def refuse(self) -> NothingFitsError:
        """The error where nothing passes."""
        last = self.failed[-1]
        where = f" at length {length_text(last.length)}, batch size {last.batch_size:,}" if last.length else ""
        return NothingFitsError(
            "batches of several lengths do not train one after another: the last of "
            f"{len(self.failed)} final checks ended in {last.outcome}{where} ({last.message})"
            f"{remedy(self.environment) or '; probe fewer --lengths'}"
        )


def check_lengths(
    tried: MutableMapping[Length, list[Attempt]],
    first: Sizes,
    check: Check,
    *,
    unit: int = 1,
    minimum: int = 1,
    orders: int = 1,
    environment: Environment,
    replay: Replay | None = None,
) -> tuple[LengthCheck, Sizes]:
    """Trains all lengths mixed until that passes in so many orders, and says with which batches it does.

    Where that fails, all batches are made smaller, to near the largest share of them that passes, and until that passes
    in three times as many orders: what one length leaves is what another one fails on. A replay says where to begin;
    where it is not right about each check, or there is none, a share 3 % above the answer has to pass, too. The one
    order on a CPU passes in several processes, and its end is found to 6 %.

    Args:
        tried: every attempt at each length, the longest first; what the checks come to is added.
        first: the largest batch of each length alone.
        check: trains batches of these sizes in a fresh process, in the order of this number; its attempt is of the
            length that failed, if one did.
        unit: batches become multiples of it,
        minimum: and none smaller.
        orders: that must all pass at the same sizes.
        environment: of the device; unless its allocator's segments grow, batches that nearly take the same in all are
            made to.
        replay: of an allocator whose segments do not grow.

    Raises:
        NothingFitsError: they do not pass.
    """
    cuts = orders > 1 and _GROWING not in (environment.allocator_conf or "")
    checks = _Checks(tried, check, orders, environment, replay if cuts else None)
    sizes = _largest_that_passes(checks, steps_down(first, unit, minimum, align=cuts))
    last = max(checks.passed, key=lambda each: each.peak_reserved_bytes or 0)
    for length, size in sizes.items():
        if size not in {each.batch_size for each in tried[length] if each.fits}:  # it has trained in the check alone
            tried[length].append(last.model_copy(update={"batch_size": size, "length": length}))
    found = LengthCheck(
        steps=sum(each.steps for each in checks.passed),
        orders=len(checks.passed),
        failures=len(checks.failed),
        peak_reserved_bytes=last.peak_reserved_bytes,
        lowered=sorted((each for each in sizes if sizes[each] != first[each]), key=order_of),
        seconds=round(sum(each.seconds for each in [*checks.failed, *checks.passed]), 3),
    )
    return found, sizes


def _largest_that_passes(checks: _Checks, steps: list[Sizes]) -> Sizes:
    """Nearly the largest of them, and one that passes in more orders where a larger one failed."""
    passed, failed = _end(checks, steps)
    if failed is None or (checks.orders == 1 and checks.passed):
        return steps[passed]
    checks.orders = max(checks.orders, ALL_ORDERS) if checks.orders > 1 else checks.orders
    passes_above = False
    for sizes in [*steps[passed:-1:_MARGIN], steps[-1]]:
        passes = checks.pass_at(sizes)
        if passes and (passes_above or not checks.surprises or sizes == steps[-1]):
            return sizes
        passes_above = passes
    raise checks.refuse()


def _near(checks: _Checks, passed: int) -> int:
    """How many steps below one that failed the end is found; the one order of a CPU is no matter of luck."""
    if checks.orders == 1:
        return max(1, _NEXT * (_STEPS_DOWN - passed) // _STEPS_DOWN)
    return _NEAR if checks.surprises else 1


def _end(checks: _Checks, steps: list[Sizes]) -> tuple[int, int | None]:
    """A step that passes, and one near above it that does not; None where none failed.

    It is looked for downwards until one passes, upwards from one that was foreseen, by ever more; and between two.
    """
    passed, failed, last = len(steps), -1, len(steps) - 1
    at, up, down = first_replayed(steps, checks.replay), 1, _NEXT
    while True:
        if checks.pass_at(steps[at]):
            passed = at
        else:
            failed = at
        if not passed or passed - failed <= _near(checks, passed):
            return passed, failed if failed >= 0 else None
        if passed > last:
            if at == last or len(checks.failed) >= _MOST_CHECKS:
                raise checks.refuse()
            at, down = (min(at + down, last), 2 * down) if at else (1, down)
            at = first_replayed(steps, checks.replay, at)
        elif failed < 0:
            at, up = max(0, passed - up), 2 * up
        else:
            at = (passed + failed) // 2


def length_warnings(check: LengthCheck | None, environment: Environment) -> list[str]:
    """One where batches of other lengths left too little memory for one that fits alone."""
    if check is None or not check.failures or environment.device_type not in {"cuda", "cpu"}:
        return []
    does = "cut memory up" if environment.device_type == "cuda" else "leave memory behind"
    text = f"batches of different lengths {does}: at {', '.join(map(length_text, check.lowered))} less fits among the "
    return [f"{text}others than alone, and an order that was not tried may need more{remedy(environment)}"]


def remedy(environment: Environment) -> str:
    """The end of a message about batches that differ: what has them leave more memory to each other; '' for nothing.

    On a CPU oneDNN keeps what it has prepared for each of 1,024 shapes: a small convolution over 170 lengths held
    1.3 GB after 240 steps, and 0.2 GB with 8 shapes.
    """
    if environment.device_type == "cpu":
        if _CACHED_SHAPES in os.environ:
            return ""
        text = "oneDNN keeps memory for every shape of a convolution or recurrent layer, more in a longer training"
        return f". {text}: pad batches to few lengths, or set {_CACHED_SHAPES}=16, and probe again"
    if _GROWING in (environment.allocator_conf or ""):
        return ""
    return f". With PYTORCH_CUDA_ALLOC_CONF={_GROWING} it is cut up less: set it, and probe again"
