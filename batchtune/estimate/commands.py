"""What a child that traces can be asked for, besides what any child can."""

from __future__ import annotations

from typing import Any

from batchtune.config.options import TRACE_SECONDS
from batchtune.protocol.commands import Done, SamplesSeen
from batchtune.protocol.messages import Command

PROGRAM = "batchtune.estimate.tracing.server"  # the module whose `main` such a child runs


class LoadTracer(Command[Done]):
    """Loads all that a trace needs but the user's code."""


class EstimateMemory(Command[dict[str, Any]]):
    """The largest batch on each GPU, from one trace; see `batchtune.estimate.tracing.answer.answer`.

    Attributes:
        seconds: after which nobody waits for the answer any more.
    """

    task: str
    precision: str
    gpus: list[dict[str, Any]]
    memory_limit: int | None = None
    accumulation_steps: int = 1
    strategy: str = "ddp"
    world_size: int = 1
    checkpointing: bool = False
    inference: bool = False
    seconds: float = TRACE_SECONDS


class ExpectMemory(Command[dict[str, Any]]):
    """What a probe of one device may expect; see `batchtune.estimate.tracing.answer.estimate_for_probe`."""

    task: str
    precision: str
    accumulation_steps: int
    memory_limit: int
    samples: SamplesSeen | None = None
    gpu: dict[str, Any] | None
    inference: bool = False
