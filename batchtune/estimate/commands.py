"""What a child that traces can be asked for, besides what any child can, and what it answers. Memory is in bytes."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Sequence
from typing import Literal

from batchtune.config.options import TRACE_SECONDS
from batchtune.document import Attempt, EstimatedLength, MemoryDetail
from batchtune.estimate.calibration import record
from batchtune.estimate.memory.events import Work
from batchtune.estimate.memory.overheads import UNMEASURED, Offsets
from batchtune.protocol.data import LengthsSeen, SamplesSeen
from batchtune.protocol.messages import Command, Message
from batchtune.vocabulary import AskedLengths, Length, LengthBatches

PROGRAM = "batchtune.estimate.tracing.server"  # the module whose `main` such a child runs


class LoadTracer(Command[None]):
    """Loads all that a trace needs but the user's code."""


class Refusal(Message):
    """Why there is no answer.

    Attributes:
        frames: of the user's code, where that fails as it would in training.
        instead: the precision that it trains in, where the one asked for is the reason.
    """

    refused: str
    frames: str | None = None
    instead: str | None = None


class GpuFacts(Message):
    """What an answer depends on. Nothing is known of a GPU that the catalogue lacks."""

    name: str = ""
    memory_bytes: int = 0
    generation: str = ""
    vendor: str = "NVIDIA"
    measured: Offsets = UNMEASURED


class Tracing(Message):
    """How a task is traced.

    Attributes:
        task: as the user named it.
        precision: bf16, fp16, fp32 or tf32.
        accumulation_steps: micro-batches per optimizer step.
        strategy: ddp or fsdp, where there is more than one rank.
        world_size: number of ranks; the answer is for each of them.
        checkpointing: recompute the model's repeated blocks in backward, whatever the user's code does.
        inference: forward passes without gradients instead of optimizer steps.
        samples: of the worst batch, where another child has looked for them.
        lengths: of the inputs, where they are asked for; `auto` means those of the training set.
        lengths_seen: those that another child has found.
    """

    task: str
    precision: str = "fp32"
    accumulation_steps: int = 1
    strategy: str = "ddp"
    world_size: int = 1
    checkpointing: bool = False
    inference: bool = False
    samples: SamplesSeen | None = None
    lengths: AskedLengths | None = None
    lengths_seen: LengthsSeen | None = None


class LengthRow(EstimatedLength):
    """The largest batch of one length on one GPU, and the work of a step of that size; None where nothing fits."""

    work: Work | None = None


class Row(Message):
    """The largest batch on one GPU; names are those of `Estimate`.

    Attributes:
        work: of a step of that size; None where nothing fits.
    """

    max_batch_size: int
    safe_max_batch_size: int
    expandable_segments_max_batch_size: int
    limited_by: Literal["memory", "max"]
    peak_bytes: int | None = None
    needed_bytes: int | None = None
    confidence: str
    error_share: float
    notes: list[str]
    work: Work | None = None
    lengths: tuple[LengthRow, ...] = ()


class Traced(Message):
    """An answer for every GPU, in the order they were asked about.

    Attributes:
        details: the peak at the largest size.
    """

    gpus: list[Row]
    details: list[MemoryDetail]


class EstimateMemory(Tracing, Command[Traced | Refusal]):
    """The largest batch on each GPU, from one trace.

    Attributes:
        memory_limit: that a process may reserve; None for all that the GPU has beside its context.
        seconds: after which nobody waits for the answer any more.
    """

    gpus: tuple[GpuFacts, ...] = ()
    memory_limit: int | None = None
    seconds: float = TRACE_SECONDS


class TaskEstimate(Message):
    """What a trace says about one device, limit and precision.

    Attributes:
        expected: the largest batch size within the limit; 0 where none is expected to fit.
        start: a size about a hundredth below, which fits, too; some sizes between two that fit do not.
        peaks: (batch size, bytes of the traced storages at their peak), by size; straight lines run between them.
        unseen_share: of the traced peak, which kernels take on top of it.
        kind: whose kernels take memory that the trace does not see.
        model_independent: the trace assumed nothing, so that what it lacks is the GPU's and the libraries'.
    """

    expected: int
    start: int
    peaks: list[tuple[int, int]]
    unseen_share: float
    kind: Literal["plain", "convolution", "recurrent"]
    model_independent: bool

    def traced_bytes(self, batch_size: int) -> float:
        """Peak of the traced storages."""
        at = bisect.bisect_left(self.peaks, (batch_size, 0))
        at = min(max(at, 1), len(self.peaks) - 1)
        (low, below), (high, above) = self.peaks[at - 1], self.peaks[at]
        return below + (above - below) * (batch_size - low) / (high - low)

    def allocated_bytes(self, batch_size: int) -> float:
        """Peak of what a step allocates, libraries and all."""
        return self.traced_bytes(batch_size) * (1 + self.unseen_share)

    def learn(self, device_name: str, attempts: Sequence[Attempt]) -> None:
        """Keeps the median of what cuDNN took beside the trace for later estimates on this GPU."""
        fits = {each.batch_size: each.peak_allocated_bytes for each in attempts if each.fits}
        shares = [peak / self.traced_bytes(size) - 1 for size, peak in fits.items() if peak]
        if self.model_independent and shares and self.kind != "plain":  # there the trace is exact
            record(device_name, f"{self.kind}_share", statistics.median(shares))


class ExpectMemory(Tracing, Command[TaskEstimate | Refusal]):
    """What a probe of one device may expect whose process may reserve `memory_limit`."""

    gpu: GpuFacts
    memory_limit: int


class LengthEstimates(Message):
    """What a probe may expect of each length, and whether `ReplayLengths` has an answer."""

    lengths: tuple[tuple[Length, TaskEstimate], ...]
    replays: bool


class ExpectLengths(Tracing, Command[LengthEstimates | Refusal]):
    """What a probe of one device may expect of each length, and steps to replay; see `ExpectMemory`."""

    gpu: GpuFacts
    memory_limit: int


class Replayed(Message):
    """The first order that batches do not train in; None where they train in all."""

    fails_in: int | None


class ReplayLengths(Command[Replayed]):
    """Whether batches of the lengths that were last asked about train one after another.

    Attributes:
        sizes: the largest batch by length, the longest first.
        capacity_bytes: of the traced storages.
    """

    sizes: LengthBatches
    capacity_bytes: int
