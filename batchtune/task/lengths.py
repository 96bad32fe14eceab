"""How long the samples of a training set are, and which of them make the worst batch of each length."""

from __future__ import annotations

import dis
import inspect
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from batchtune.errors import UsageError, UserCodeError, kind_of
from batchtune.protocol.data import LengthGroup, LengthsSeen, SamplesSeen
from batchtune.task.data import TaskData, samples_at
from batchtune.task.samples import find_largest
from batchtune.task.state import kept_random_numbers
from batchtune.vocabulary import AskedLengths, Length, covers, dimensions, length_text, order, room_for

LOOK_SECONDS = 30.0
_MOST_GROUPS = 200
_MOST_PLACES = 4  # of samples of one length, of which one may be larger in something else


@dataclass(eq=False)
class TaskLengths(TaskData):
    """Batches of each length, where these were asked for.

    Attributes:
        lengths: of the inputs, once they were looked for; None: batches are all made alike.
    """

    lengths: LengthsSeen | None = field(default=None, init=False)
    _longest_samples: dict[Length, list[object]] = field(default_factory=dict, init=False)

    @cached_property
    def sample_lengths(self) -> list[Length]:
        """The length of every sample of the training set, in its order.

        Raises:
            UserCodeError: one is no length; the message has its place.
        """
        data: Any = self.train_data
        with kept_random_numbers("cpu"):
            return [checked_length(self.source.sample_length(data[at]), self.where, at) for at in range(len(data))]

    def worst_batch(self, batch_size: int, length: Length | None = None) -> object:
        """As that of all tasks, or of inputs of this length; without one, of the longest there is."""
        if self.lengths is None:
            return super().worst_batch(batch_size)
        length = self.lengths.longest if length is None else length
        if self._makes_lengths():
            return self.source.make_batch(batch_size, length)
        return self._repeated(batch_size, self._samples_of(length))

    def find_worst_samples(self, known: SamplesSeen | None = None) -> SamplesSeen | None:
        return super().find_worst_samples(known) if self.lengths is None else None

    def find_lengths(self, asked: AskedLengths | None, known: LengthsSeen | None = None) -> None:
        """Looks for the lengths of the training set, or takes those that another process has found.

        Raises:
            UsageError: lengths and task do not go together.
        """
        if self.lengths is None:
            self.lengths = known or (self._look_for_lengths(asked) if asked else None)
        if self.lengths is None and self.has("make_batch") and not takes(self.source.make_batch, 1):
            raise UsageError(
                f"{self.where}: make_batch takes a length, too; say which there are: --lengths 128,256,512,1024"
            )

    def _look_for_lengths(self, asked: AskedLengths) -> LengthsSeen:
        knows = self.has("sample_length") and self.has("train_dataset")
        as_given, makes = asked if asked != "auto" else (), self._makes_lengths()
        if not (knows or as_given):
            raise UsageError(
                f"--lengths auto: {self.where} has no sample_length(sample) with a train_dataset to choose by; write it"
                f"{', or name the lengths' if makes else ''}"
            )
        if self.adapted or not (knows or makes):
            raise UsageError(
                f"--lengths: {self.where} has no make_batch(batch_size, length), and no sample_length(sample) with a "
                "train_dataset; write one of them"
            )
        if not knows:
            return LengthsSeen(edges=as_given)
        with kept_random_numbers("cpu"):
            samples = samples_at(self.train_data)
            lengths = ((at, checked_length(self.source.sample_length(each), self.where, at)) for at, each in samples)
            found = look_at_lengths(lengths, asked, self.train_size())
        return found.model_copy(update={"edges": as_given}) if as_given and makes else found

    def _makes_lengths(self) -> bool:
        return self.has("make_batch") and takes(self.source.make_batch, 2)

    def _samples_of(self, length: Length) -> list[object]:
        """The samples of the worst batch of a length, the largest first."""
        assert self.lengths is not None  # noqa: S101 - who asks for a length has found them
        if length not in self._longest_samples:
            covered = {each.length: list(each.places) for each in self.lengths.groups if covers(length, each.length)}
            places = _worst(list(covered), covered)
            with kept_random_numbers("cpu"):
                self._longest_samples[length] = find_largest(
                    samples_at(self.train_data, places), None, seconds=math.inf
                )[1]
        return self._longest_samples[length]


def takes(function: Callable[..., object], count: int) -> bool:
    """Whether a function can be called with so many arguments; compiled code that does not tell is believed to."""
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)
    return True


def offers(function: Callable[..., object], name: str) -> bool:
    """Whether a function has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # compiled code does not tell
        return False


def reads(function: Callable[..., object], place: int) -> bool:
    """Whether the code of a function reads its parameter at this place; code that does not tell is taken to."""
    code, at = getattr(function, "__code__", None), place + inspect.ismethod(function)
    if code is None or at >= code.co_argcount:
        return True
    name, loads = code.co_varnames[at], {"LOAD_DEREF", "LOAD_CLOSURE", "MAKE_CELL"}
    read = (each.argval for each in dis.get_instructions(code) if "LOAD_FAST" in each.opname or each.opname in loads)
    return any(name in each if isinstance(each, tuple) else name == each for each in read)


def checked_length(value: object, where: str, place: int) -> Length:
    """What sample_length has returned for a sample.

    Raises:
        UserCodeError: it is neither a whole number from 1 up nor a tuple of them.
    """
    parts = value if isinstance(value, tuple | list) else (value,)
    try:
        whole = tuple(each.__index__() for each in parts)
    except AttributeError:
        whole = ()
    if not whole or min(whole) < 1 or any(isinstance(each, bool) for each in parts):
        raise UserCodeError(
            f"{where}: sample_length returned {kind_of(value)}, {str(value)[:40]}, for sample {place:,} of "
            "train_dataset; it must return a whole number from 1 up, or a tuple of them"
        )
    return whole if isinstance(value, tuple | list) else whole[0]


def look_at_lengths(
    samples: Iterable[tuple[int, Length]],
    asked: AskedLengths,
    total: int | None,
    *,
    seconds: float = LOOK_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> LengthsSeen:
    """The lengths of samples, each given with its place, that are looked at for so many seconds.

    Raises:
        UsageError: a sample is longer than the longest length asked for, or there is none of one that was.
    """
    places: dict[Length, list[int]] = defaultdict(list)
    counts: dict[Length, int] = defaultdict(int)
    deadline = clock() + seconds
    for place, length in samples:
        counts[length] += 1
        if len(places[length]) < _MOST_PLACES:
            places[length].append(place)
        if asked != "auto" and not any(covers(edge, length) for edge in asked):
            raise _too_long(place, length, asked)
        if clock() >= deadline:
            break
    if not counts:
        raise UserCodeError("train_dataset returned a data set of 0 samples")
    buckets = [[*counts]] if asked == "auto" else _by_edge(counts, asked)
    chunks = [each for some in buckets for each in _chunks(sorted(some, key=order), _MOST_GROUPS // len(buckets))]
    return LengthsSeen(
        edges=() if asked == "auto" else tuple(room_for(*each) for each in buckets),
        groups=tuple(
            LengthGroup(
                length=room_for(*chunk), samples=sum(counts[each] for each in chunk), places=_worst(chunk, places)
            )
            for chunk in chunks
        ),
        seen=sum(counts.values()),
        total=total,
    )


def _too_long(place: int, length: Length, asked: Sequence[Length]) -> UsageError:
    known = [each for each in asked if len(dimensions(each)) == len(dimensions(length))]
    what = f"sample {place:,} of train_dataset has length {length_text(length)}"
    if not known:
        return UsageError(f"--lengths {length_text(asked[-1])}: {what}: both must have equally many numbers")
    return UsageError(
        f"--lengths: {what}, longer than the longest, {length_text(known[-1])}: add {length_text(length)} or more, or "
        "leave such samples out"
    )


def _chunks(lengths: Sequence[Length], most: int) -> list[list[Length]]:
    """Neighbours together, so that there are no more than so many."""
    size = -(-len(lengths) // most)
    cut = len(lengths) % size or size  # the first may be short, so that the longest have the same
    return [list(lengths[:cut]), *(list(lengths[at : at + size]) for at in range(cut, len(lengths), size))]


def _by_edge(lengths: Iterable[Length], edges: Sequence[Length]) -> list[list[Length]]:
    """Those that each edge covers and no shorter one does."""
    found: dict[Length, list[Length]] = {edge: [] for edge in edges}
    for length in lengths:
        found[next(edge for edge in edges if covers(edge, length))].append(length)
    for number, (edge, some) in enumerate(found.items()):
        if not some:
            none = (
                f"is longer than {length_text(edges[number - 1])} and no longer than that" if number else "is as short"
            )
            raise UsageError(f"--lengths {length_text(edge)}: no sample of train_dataset {none}: leave it out")
    return list(found.values())


def _worst(chunk: Sequence[Length], places: dict[Length, list[int]]) -> tuple[int, ...]:
    """Places of the largest samples: of those with the greatest length, and of one with the greatest of each number."""
    longest = max(chunk, key=order)
    numbers = range(len(dimensions(longest)))
    others = [max((dimensions(each)[number], order(each), each) for each in chunk)[-1] for number in numbers]
    return tuple(dict.fromkeys([*places[longest], *(places[each][0] for each in others)]))
