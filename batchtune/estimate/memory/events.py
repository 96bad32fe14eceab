"""A trace: when every storage of a training step was born and died, how large it was, and what it was for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from batchtune.estimate.memory.scratch import Block, Gpu

SCRATCH = "scratch:"  # prefix of an op whose storage is memory inside a kernel, sized by a formula and not seen
CATEGORIES = ("parameters", "gradients", "optimizer_states", "activations", "temporaries")
_LOOK_AHEAD = 6


@dataclass(frozen=True, slots=True)
class Assumption:
    """What a trace had to assume.

    Attributes:
        text: in words.
        depends_on_data: the truth is another with other data, so that no comparison says how far off it is.
    """

    text: str
    depends_on_data: bool = False


@dataclass(slots=True)
class Birth:
    """One storage.

    Attributes:
        size_bytes: as asked for, before the allocator rounds it.
        op: the operator whose result it is.
        module: path of the module whose forward was running; empty outside of one.
        line: `file:line` of the innermost code that is not torch's, for what is born in a forward; else empty.
        moment: `build`, `forward`, `backward` or `optimizer`, with the step's number after the first three letters.
        category: one of CATEGORIES.
        replaces: for what torch makes in place but not of fake tensors, the storage in whose place it is made.
        block: for scratch, the formula of its size, which `size_bytes` does not tell.
    """

    size_bytes: int
    op: str
    module: str = ""
    line: str = ""
    moment: str = "build"
    category: str = "temporaries"
    replaces: int | None = None
    block: Block | None = None

    def bytes_on(self, gpu: Gpu) -> int:
        """The size at the traced batch size; scratch may depend on the GPU."""
        return self.size_bytes if self.block is None else self.block.formula(gpu, *self.block.lengths)


@dataclass
class Work:
    """What a step asks of a GPU, for a roofline.

    Attributes:
        flops: floating-point operations of matrix multiplications, convolutions and attention.
        matmul_bytes: bytes that those operators read and write.
        other_bytes: bytes that all other operators read and write; their arithmetic is hidden behind that.
    """

    flops: float = 0.0
    matmul_bytes: float = 0.0
    other_bytes: float = 0.0


@dataclass
class Trace:
    """Births and deaths in order.

    Attributes:
        batch_size: micro-batch size it was recorded at.
        events: `number + 1` where storage `number` is born, `-(number + 1)` where it dies.
        births: the storages by number.
        notes: what the recorder had to assume.
        ops: names of all operators that ran, and `nn.RNNBase` where the model has one.
        work: what the last optimizer step computes and moves.
        units: bytes of each parameter by unit of sharding; see `batchtune.estimate.tracing.distributed`.
    """

    batch_size: int
    events: list[int] = field(default_factory=list)
    births: list[Birth] = field(default_factory=list)
    notes: list[Assumption] = field(default_factory=list)
    ops: set[str] = field(default_factory=set)
    work: Work = field(default_factory=Work)
    units: list[list[int]] = field(default_factory=list)


def normalized(trace: Trace) -> Trace:
    """The trace as a GPU would see it: sums of gradients in place, and runs of frees in one order.

    Autograd adds a gradient that arrives second into the first one's storage, fills zeros of its own, and `linear` adds
    its bias to a product, but never while tensors are fake. Where what could be replaced so dies right after, it was.
    The order within a run of frees is arbitrary (autocast's cache is a hash map) and makes no difference to the
    allocator's totals.
    """
    events = list(trace.events)
    stands_for: dict[int, int] = {}
    dropped: set[int] = set()
    for place, event in enumerate(events):
        replaced = trace.births[event - 1].replaces if event > 0 else None
        if replaced is None:
            continue
        replaced = stands_for.get(replaced, replaced)
        for later in range(place + 1, min(place + 1 + _LOOK_AHEAD, len(events))):
            if events[later] > 0:
                break
            dying = -events[later] - 1
            if stands_for.get(dying, dying) == replaced and later not in dropped:
                dropped |= {place, later}
                stands_for[event - 1] = replaced
                if trace.births[event - 1].category != "temporaries":  # a gradient that arrived in two parts
                    trace.births[replaced].category = trace.births[event - 1].category
                break
    kept = (event for place, event in enumerate(events) if place not in dropped)
    return renumbered(trace, _sorted_frees(_stand_in_for(event, stands_for) for event in kept))


def _stand_in_for(event: int, stands_for: dict[int, int]) -> int:
    number = abs(event) - 1
    number = stands_for.get(number, number)
    return number + 1 if event > 0 else -(number + 1)


def _sorted_frees(events: Iterable[int]) -> list[int]:
    ordered: list[int] = []
    run: list[int] = []
    for event in events:
        if event < 0:
            run.append(event)
        else:
            ordered += sorted(run, reverse=True)
            run = []
            ordered.append(event)
    return ordered + sorted(run, reverse=True)


def renumbered(trace: Trace, events: list[int]) -> Trace:
    """Numbers the remaining storages from 0 in order of birth."""
    number = {event: place for place, event in enumerate(event for event in events if event > 0)}
    births = [trace.births[event - 1] for event in number]
    renamed = [number[event] + 1 if event > 0 else -(number[-event] + 1) for event in events]
    return replace(trace, events=renamed, births=births)
