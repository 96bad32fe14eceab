"""A trace: when every storage of a training step was born and died, how large it was, and what it was for.

Memory inside a kernel is described by blocks, the order they are taken in, and the GPU they depend on. What training on
several GPUs changes are formulas, laid over the trace of one process; NCCL's own buffers are not in them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, Union

from batchtune.estimate.memory.allocator import MIB

SCRATCH = "scratch:"  # prefix of an op whose storage is memory inside a kernel, sized by a formula and not seen
_LOOK_AHEAD = 6
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = MIB, 25 * MIB  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, bucket_cap_mb
_SHARDED = ("parameters", "gradients", "optimizer_states")
FLOAT, LONG, INT = 4, 8, 4  # bytes


@dataclass(frozen=True)
class Gpu:
    """What the formulas ask of a GPU.

    Attributes:
        multiprocessors: their number.
        threads: that one multiprocessor holds at a time.
        cublas_bytes: workspace of a cuBLAS handle.
        matrix_units: bytes of the numbers that its matrix units multiply, be it as TF32.
    """

    multiprocessors: int = 108
    threads: int = 2048
    cublas_bytes: int = 8_519_680
    matrix_units: tuple[int, ...] = (2, 4)


Formula = Callable[..., int]  # of a Gpu and lengths
Arguments: TypeAlias = Sequence[Any]  # of an operator, as a dispatch mode gets them


@dataclass(frozen=True)
class Block:
    """Memory of one kernel: a formula and what it is calculated from; 0 bytes are none.

    One that `outlives` its group is given back with the group around it.
    """

    formula: Formula
    lengths: tuple[int, ...]
    outlives: bool = False


@dataclass(frozen=True)
class Held:
    """A result whose memory was taken when it was larger."""

    place: int
    size_bytes: int


# What a kernel allocates, in its order: a block, the place of a result among the operator's results, or a group of
# such, whose blocks are given back when the group is done.
Step: TypeAlias = Union[Block, Held, int, "tuple[Step, ...]"]
Steps: TypeAlias = tuple[Step, ...]
RESULTS = -1  # as a step: all results, in their order


def bytes_of(size: int, *, outlives: bool = False) -> Block:
    """A block of a size that is known."""
    return Block(lambda _, size: size, (size,), outlives)


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
        module: path of the module whose forward was running, and its class if it ends in a number; else empty.
        line: `file:line` of the innermost code that is not torch's, for what is born in a forward; else empty.
        moment: `build`, `forward`, `backward` or `optimizer`, with the step's number after the first three letters.
        category: `parameters`, `gradients`, `optimizer_states`, `activations` or `temporaries`.
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
        ops: names of all operators that ran.
        work: what the last optimizer step computes and moves.
        units: bytes of each parameter by unit of sharding; see `distributed`.
        uncut: (length, length of a piece) where a tensor was split that is shorter than a piece.
    """

    batch_size: int
    events: list[int] = field(default_factory=list)
    births: list[Birth] = field(default_factory=list)
    notes: list[Assumption] = field(default_factory=list)
    ops: set[str] = field(default_factory=set)
    work: Work = field(default_factory=Work)
    units: list[list[int]] = field(default_factory=list)
    uncut: set[tuple[int, int]] = field(default_factory=set)


def first_birth(trace: Trace, moment: str) -> int:
    """The place of the first birth in a moment; where there is none, the end."""
    births = ((place, event) for place, event in enumerate(trace.events) if event > 0)
    return next((place for place, event in births if trace.births[event - 1].moment == moment), len(trace.events))


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
    named = (event if event > 0 else -stands_for.get(-event - 1, -event - 1) - 1 for event in kept)
    runs = itertools.groupby(named, lambda event: event > 0)
    ordered = [event for is_births, run in runs for event in (run if is_births else sorted(run, reverse=True))]
    return renumbered(trace, ordered)


def renumbered(trace: Trace, events: list[int]) -> Trace:
    """Numbers the remaining storages from 0 in order of birth."""
    number = {event: place for place, event in enumerate(event for event in events if event > 0)}
    births = [trace.births[event - 1] for event in number]
    renamed = [number[event] + 1 if event > 0 else -(number[-event] + 1) for event in events]
    return replace(trace, events=renamed, births=births)


def distributed(trace: Trace, strategy: str, world_size: int) -> Trace:
    """The trace of one rank of `world_size`, under ddp or fsdp with torch's defaults."""
    return _ddp(trace) if strategy == "ddp" else _fsdp(trace, world_size)


def _ddp(trace: Trace) -> Trace:
    """Gradients are copied to buckets that live as long as the model, as `gradient_as_bucket_view=False` has it.

    The second forward makes them anew. The first ones live on with the collectives that reduced them, until the process
    group has seen these end, which a host that is ahead of its GPU does not wait for.

    Source: torch.nn.parallel.DistributedDataParallel's documentation, and compute_bucket_assignment_by_size and
    rebuild_buckets in torch/csrc/distributed/c10d/reducer.cpp: buckets of 25 MiB, the first of 1 MiB, filled from the
    last parameter on.
    """
    sizes = _buckets(size for unit in reversed(trace.units) for size in reversed(unit))
    births, events = list(trace.births), list(trace.events)
    for moment in ("forward 2", "forward 1"):  # from the end, so that places before stay
        place = first_birth(trace, moment)
        events[place:place] = range(len(births) + 1, len(births) + len(sizes) + 1)
        births += [Birth(size, "distributed: DDP bucket", category="gradients") for size in sizes]
    return renumbered(replace(trace, births=births), events)


def _buckets(sizes: Iterable[int]) -> list[int]:
    found, filling, limit = [], 0, _FIRST_BUCKET_BYTES
    for size in sizes:
        filling += size
        if filling >= limit:
            found.append(filling)
            filling, limit = 0, _BUCKET_BYTES
    return [*found, filling] if filling else found


def _fsdp(trace: Trace, world_size: int) -> Trace:
    """FSDP2's `fully_shard` on every repeated block and on the model, with its defaults.

    Parameters, gradients and optimizer states are 1/N of what they were. In forward and backward come on top: the
    root's parameters, which stay gathered; those of the block at work, of the next one, and the flat buffer of a
    gather; in backward the root's gradients, and a block's with the buffer that is reduced, or the root's buffer.

    Source: torch.distributed.fsdp.fully_shard's documentation (`reshard_after_forward`), and foreach_all_gather,
    foreach_all_gather_copy_out and foreach_reduce in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
    """
    whole = Counter(size for unit in trace.units for size in unit)
    births = [_shard(birth, whole, world_size) for birth in trace.births]
    root, block = sum(trace.units[0]), max((sum(unit) for unit in trace.units[1:]), default=0)
    gathered = {"forward": root + 3 * block, "backward": root + max(2 * block, root)}
    events = list(trace.events)
    for step in (2, 1):  # from the end, so that places before stay
        update = first_birth(trace, f"optimizer {step}")
        for phase in ("backward", "forward"):
            place = first_birth(trace, f"{phase} {step}")
            births.append(Birth(max(1, gathered[phase]), "distributed: FSDP gathers", moment=f"{phase} {step}"))
            events[update:update] = [-len(births)]
            events[place:place] = [len(births)]
            update += 1
    return renumbered(replace(trace, births=births), events)


def _shard(birth: Birth, whole: Counter[int], world_size: int) -> Birth:
    """A storage as large as a parameter, or one that the optimizer makes, by the number of ranks."""
    together = birth.op.startswith("aten._cudnn_rnn")  # the buffer of a recurrent layer's weights, or their gradients
    of_a_parameter = birth.category in _SHARDED and (together or birth.size_bytes in whole)
    if of_a_parameter or birth.moment.startswith("optimizer"):
        return replace(birth, size_bytes=-(-birth.size_bytes // world_size))
    return birth
