"""What a child tells of the task: its settings, and its data, so that later children train the same batches."""

from __future__ import annotations

from batchtune.protocol.messages import Message
from batchtune.vocabulary import Length


class SamplesSeen(Message):
    """What a look at the samples of the training set has found.

    Attributes:
        places: of the samples that make the worst batch, the largest first.
        seen: how many were looked at.
        total: of how many; None for a stream.
        is_all: nothing is left that may be larger.
        differing: by dimension, the least and greatest size among them where they differ.
        quantiles: places of some samples, the largest first, each with what share of all is larger.
        kept_bytes: of each, where the training set keeps what it has loaded.
    """

    places: tuple[int, ...]
    seen: int
    total: int | None
    is_all: bool
    differing: dict[str, tuple[int, int]]
    quantiles: tuple[tuple[float, int], ...] = ()
    kept_bytes: int | None = None


class LengthGroup(Message):
    """Samples of neighbouring lengths: those up to a length that the next shorter group has not.

    Attributes:
        length: that covers all of them; one of them has it, or several have its numbers.
        samples: how many there are.
        places: of those that have it.
    """

    length: Length
    samples: int
    places: tuple[int, ...] = ()


class LengthsSeen(Message):
    """The lengths that a probe may be of.

    Attributes:
        edges: ascending; none: those of the groups to choose from.
        groups: of the training set, ascending and at most 200, or one for each edge; none: nobody knows its lengths.
        seen: samples that were looked at.
        total: of how many; None for a stream.
    """

    edges: tuple[Length, ...] = ()
    groups: tuple[LengthGroup, ...] = ()
    seen: int = 0
    total: int | None = None

    @property
    def longest(self) -> Length:
        """The longest of all."""
        return self.edges[-1] if self.edges else self.groups[-1].length


class TrainingLength(Message):
    """How long the user's own training is: so many optimizer steps, or epochs; None: that is not known."""

    steps: int | None = None
    epochs: float | None = None


class CurrentSettings(Message):
    """What the user trains with today, as far as the task says so, each with where it stands."""

    batch_size: tuple[int, str] | None = None
    learning_rate: tuple[float, str] | None = None
