"""What training on several GPUs changes in the memory of each: DDP's buckets, FSDP's shards and gathered layers.

Formulas, laid over the trace of one process; NCCL's own buffers are outside of the allocator and not in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from batchtune.child.training.parallel import repeated_blocks
from batchtune.estimate.memory.allocator import MIB
from batchtune.estimate.memory.events import Birth, Trace, renumbered

_FIRST_BUCKET_BYTES, _BUCKET_BYTES = MIB, 25 * MIB  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, bucket_cap_mb
_SHARDED = ("parameters", "gradients", "optimizer_states")


def unit_bytes(model: nn.Module) -> list[list[int]]:
    """Bytes of each parameter by unit of sharding: what belongs to no repeated block first, then block by block."""
    seen: set[int] = set()

    def of(module: nn.Module) -> list[int]:
        new = [each for each in module.parameters() if id(each) not in seen]
        seen.update(map(id, new))
        return [each.numel() * each.element_size() for each in new]

    blocks = [of(block) for block in repeated_blocks(model)]
    return [of(model), *blocks]


def distributed(trace: Trace, strategy: str, world_size: int) -> Trace:
    """The trace of one rank of `world_size`.

    Args:
        trace: the step of a process on its own.
        strategy: ddp or fsdp, with torch's defaults.
        world_size: number of ranks.
    """
    return _ddp(trace) if strategy == "ddp" else _fsdp(trace, world_size)


def _ddp(trace: Trace) -> Trace:
    """Gradients are copied to buckets that live as long as the model, as `gradient_as_bucket_view=False` has it.

    Source: torch.nn.parallel.DistributedDataParallel's documentation, and compute_bucket_assignment_by_size in
    torch/csrc/distributed/c10d/reducer.cpp: buckets of 25 MiB, the first of 1 MiB, filled from the last parameter on.
    """
    buckets = [
        Birth(size, "distributed: DDP bucket", category="gradients")
        for size in _buckets(size for unit in reversed(trace.units) for size in reversed(unit))
    ]
    numbers = range(len(trace.births) + 1, len(trace.births) + len(buckets) + 1)
    start = _first(trace, "forward 1")
    events = [*trace.events[:start], *numbers, *trace.events[start:]]
    return renumbered(replace(trace, births=[*trace.births, *buckets]), events)


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
    in_forward, in_backward = root + 3 * block, root + max(2 * block, root)
    events = list(trace.events)
    for step in (2, 1):  # from the end, so that places before stay
        extra = replace(trace, births=births, events=events)
        update = _first(extra, f"optimizer {step}")
        places = [_first(extra, f"forward {step}"), _first(extra, f"backward {step}")]
        gathered = [len(births) + 1, len(births) + 2]
        births += [
            Birth(max(1, size), "distributed: FSDP gathers", moment=f"{phase} {step}")
            for phase, size in (("forward", in_forward), ("backward", in_backward))
        ]
        first, second = places
        events = [
            *events[:first], gathered[0], *events[first:second], gathered[1], *events[second:update],
            *(-number for number in gathered), *events[update:],
        ]  # fmt: skip
    return renumbered(replace(trace, births=births), events)


def _shard(birth: Birth, whole: Counter[int], world_size: int) -> Birth:
    """A storage as large as a parameter, or one that the optimizer makes, by the number of ranks."""
    of_a_parameter = birth.category in _SHARDED and birth.size_bytes in whole
    if of_a_parameter or birth.moment.startswith("optimizer"):
        return replace(birth, size_bytes=-(-birth.size_bytes // world_size))
    return birth


def _first(trace: Trace, moment: str) -> int:
    """The place of the first birth in a moment; where there is none, the end."""
    return next(
        (at for at, event in enumerate(trace.events) if event > 0 and trace.births[event - 1].moment == moment),
        len(trace.events),
    )
