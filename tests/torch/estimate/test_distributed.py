"""Buckets and shards laid over a trace: DDP adds a copy of the gradients, FSDP divides what it shards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from batchtune.estimate.memory.allocator import MIB
from batchtune.estimate.memory.events import Birth, Trace, distributed
from batchtune.estimate.memory.fit import FittedStep, fit, live_bytes
from batchtune.estimate.tracing.trace import unit_bytes

UNITS = [[8 * MIB], [20 * MIB, 10 * MIB], [20 * MIB, 10 * MIB]]  # root, and two blocks
PARAMETERS = sum(map(sum, UNITS))


def step_trace(batch_size):
    """Parameters, an activation, gradients and Adam's states over two steps."""
    sizes = [size for unit in UNITS for size in unit]
    births = [Birth(size, "empty", category="parameters") for size in sizes]
    events = list(range(1, len(births) + 1))

    def born(size, moment, category="temporaries"):
        births.append(Birth(size, "op", moment=moment, category=category))
        events.append(len(births))
        return len(births)

    for step in (1, 2):
        activation = born(MIB * batch_size, f"forward {step}", "activations")
        gradients = [born(size, f"backward {step}", "gradients") for size in sizes]
        events.append(-activation)
        if step == 1:
            for size in sizes:
                born(2 * size, "optimizer 1", "optimizer_states")
        else:
            born(512, "optimizer 2")
        events += [-number for number in gradients]
    return Trace(batch_size, events, births, units=UNITS)


def peak(trace):
    step = fit(lambda size: distributed(step_trace(size), *trace) if trace else step_trace(size))
    assert isinstance(step, FittedStep)
    return int(live_bytes(step, 4).max())


def test_ddp_keeps_two_copies_of_all_gradients():
    two = 2 * PARAMETERS  # those of the first step are still held when the second makes its own
    assert peak(("ddp", 8)) == peak(None) + two


def test_ddp_fills_buckets_from_the_last_parameter_on():
    trace = distributed(step_trace(4), "ddp", 8)
    buckets = [birth.size_bytes // MIB for birth in trace.births if "bucket" in birth.op]
    assert buckets == 2 * [10, 30, 28], "a first of 1 MiB, then of 25 MiB, each full once it has passed that"


def test_fsdp_divides_states_and_gathers_a_few_layers():
    ranks, block, root = 8, 30 * MIB, 8 * MIB
    backward = PARAMETERS * (1 + 1 + 2) // ranks + 4 * MIB + (root + 3 * block) + (root + 2 * block)
    assert peak(("fsdp", ranks)) == pytest.approx(backward, rel=0.001)


def test_fsdp_gives_the_gathered_layers_back_before_the_update():
    trace = distributed(step_trace(4), "fsdp", 8)
    step = fit(lambda size: distributed(step_trace(size), "fsdp", 8))
    live = live_bytes(step, 4)
    update = [
        at for at, event in enumerate(trace.events) if event > 0 and "optimizer" in trace.births[event - 1].moment
    ]
    assert live[update[0]] < PARAMETERS * 4 // 8 + 5 * MIB


def test_more_ranks_never_need_more_memory_each():
    peaks = [peak(("fsdp", ranks)) for ranks in (2, 4, 8, 64)]
    assert peaks == sorted(peaks, reverse=True)


def test_a_unit_is_a_repeated_block_and_tied_weights_count_once():
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4, bias=False)) for _ in range(3)))
    head = nn.Linear(4, 4, bias=False)
    head.weight = blocks[2][0].weight
    assert unit_bytes(nn.ModuleDict({"blocks": blocks, "head": head})) == [[], [64], [64], [64]]
    assert unit_bytes(nn.Linear(4, 2, dtype=torch.bfloat16)) == [[16, 4]]
