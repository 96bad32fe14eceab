"""What a probe finds: attempts, speeds, the loader, ranks, the largest batch; and the kinds of values of a document."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from batchtune.vocabulary import Outcome, Strategy

_MOST_ERROR = 0.1  # of steps about a line that says something


def _finite(value: object) -> object:
    """A figure that is not a number was not measured: absent, never NaN (JSON has none)."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _writable(value: str) -> str:
    """Text that any file takes: what Python could not decode (in the name of a file, say) becomes a question mark."""
    return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")


Figure = Annotated[float | None, BeforeValidator(_finite)]
Text = Annotated[str, AfterValidator(_writable)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Size = Annotated[int, Field(ge=1, lt=2**32)]
Factor = Annotated[int, Field(ge=1, lt=2**31)]
Rate = Annotated[float, Field(gt=0)]
Length = Size | tuple[Size, ...]  # of an input; several where it has several, such as source and target
LimitedBy = Literal["memory", "max", "dataset", "kernel_limit", "crash", "timeout", "user_error"]
Value = bool | int | float | Text  # of an argument of the user's build_optimizer
READING = ConfigDict(extra="ignore", allow_inf_nan=False)


class Record(BaseModel):
    """A frozen part of the document; keys that a later batchtune added are ignored when read."""

    model_config = ConfigDict(frozen=True, **READING)


class Interval(Record):
    """A median with the bounds of its interval."""

    median: float
    low: float
    high: float
    at_least: bool = Field(
        default=False,
        description="Runs were cut off before their end, so that the true median is higher and has no upper bound.",
    )


class Attempt(Record):
    """One try of one micro-batch size. Peaks count from the moment the task was imported, in bytes."""

    batch_size: Size
    length: Length | None = Field(default=None, description="Of its inputs, where one was asked for.")
    outcome: Outcome
    steps: Count = 0
    peak_allocated_bytes: Count | None = None
    peak_reserved_bytes: Count | None = None
    kept_back_bytes: Count | None = Field(
        default=None, description="What another process on a CPU may take above the highest peak; elsewhere absent."
    )
    forward_backward_peak_bytes: Count | None = Field(
        default=None, description="Peak before the optimizer step, in the unit of the better of the two peaks."
    )
    steps_peak_bytes: Count | None = Field(
        default=None, description="Peak of a final check's steps, before its evaluation and saving."
    )
    growth_bytes_per_step: Count | None = Field(
        default=None, description="By how much each step's peak was higher than the one's before; absent if it was not."
    )
    step_seconds: Figure = Field(
        default=None, description="Median optimizer step, device synchronised, warm-up and compilation excluded."
    )
    recompiles: Count | None = Field(
        default=None, description="Graphs that torch.compile compiled after the first two steps; absent without it."
    )
    seconds: float = 0.0
    purpose: Literal["search", "verify"] = "search"
    evaluation_batch_size: Size | None = Field(
        default=None, description="Samples of a forward pass of the evaluation, where fewer had to be taken."
    )
    loss_adds_up: bool | None = Field(
        default=None, description="compute_loss adds up the samples of a batch; absent where it does not."
    )
    message: Text | None = Field(default=None, description="Why it did not fit, in one line.")
    maps_file: bool | None = Field(
        default=None, description="Memory ended where a file was to be mapped; absent elsewhere."
    )
    in_evaluation: bool | None = Field(
        default=None, description="It ended in evaluation or saving, not in training; absent elsewhere."
    )
    limiting_rank: Count | None = Field(
        default=None, description="Of several ranks, the one that did not fit; absent where all failed alike."
    )

    @property
    def fits(self) -> bool:
        """Whether this size trained within the memory limit."""
        return self.outcome == "fit"


class ThroughputPoint(Record):
    """Training speed at one micro-batch size, with what the device's sensors said while it ran."""

    batch_size: Size
    samples_per_second: float
    step_seconds: float
    gpu_utilization: Figure = Field(default=None, description="Share of time with a kernel running, 0 to 1.")
    memory_controller_utilization: Figure = Field(default=None, description="Share of time memory was read or written.")
    memory_used_bytes: Count | None = None
    power_watts: Figure = None
    temperature_celsius: Figure = None
    joules_per_sample: Figure = None
    throttle_reasons: list[Text] | None = Field(
        default=None, description="What held the clocks back for at least a tenth of the time; empty: nothing did."
    )
    flops_per_sample: Figure = Field(
        default=None,
        description="Floating-point operations of matrix products, convolutions and attention, forward and backward "
        "(what activation checkpointing computes again is counted again).",
    )
    mfu: Figure = Field(default=None, description="Model FLOPs utilisation: share of the device's peak, 0 to 1.")
    recompiles: Count | None = Field(
        default=None, description="Graphs compiled during the timed steps (left out of it)."
    )
    processors_used_by_others: Figure = Field(
        default=None, description="Share of the host's processors that other programs used meanwhile, 0 to 1."
    )


class ThroughputFit(Record):
    """Step time t(B) = alpha + beta * B, fitted to the throughput points."""

    alpha_seconds: float
    beta_seconds_per_sample: float
    error_share: Figure = Field(
        default=None,
        description="Standard error of measured steps about the line, as a share; above 0.1 the line tells nothing. "
        "Absent for two sizes: any two lie near some line.",
    )
    saturation_batch_size: Figure = Field(
        default=None, description="alpha / beta: half of the peak speed is reached here."
    )
    batch_size_within_5_percent: Size | None = Field(
        default=None,
        description="From here to the fastest of the batch sizes measured, each is within 5 % of its throughput.",
    )

    @property
    def holds(self) -> bool | None:
        """Whether the steps are so near the line that something follows from it; None where nothing tells."""
        return None if self.error_share is None else self.error_share <= _MOST_ERROR


class LoaderPoint(Record):
    """How fast batches come, at one setting of the data loader."""

    num_workers: Count
    pin_memory: bool = False
    samples_per_second: Figure = Field(default=None, description="Absent where the loader failed; see the message.")
    message: Text | None = None


class InputPipeline(Record):
    """The training set's loader alone against the training step."""

    batch_size: Size
    loader_samples_per_second: Figure = Field(
        default=None, description="Batches from the training set brought to the device, with the settings chosen."
    )
    step_samples_per_second: float
    num_workers: Count | None = Field(default=None, description="The fewest that keep up, or the fastest if none does.")
    pin_memory: bool | None = None
    input_bound: bool | None = Field(default=None, description="Whether the step waits for data at the best setting.")
    measured: list[LoaderPoint] = Field(default=[])
    verdict: Text
    reason: Text = Field(default="", description="Why at this batch size.")


class DataParallel(Record):
    """Several ranks that train as one: what they are, what limited them, and what their communication costs.

    Times are of one optimizer step at that micro-batch size, those of the slowest rank.
    """

    world_size: Factor
    strategy: Strategy
    backend: Text
    batch_size: Size = Field(description="Micro-batch size of every rank; a probe's is the largest.")
    global_batch_size: Count = Field(description="Micro-batch x accumulation x world size.")
    limiting_rank: Count | None = Field(
        default=None, description="The rank that failed at the smallest size that did not fit; absent if all did alike."
    )
    step_seconds: Figure = None
    step_seconds_without_communication: Figure = Field(
        default=None, description="All ranks at the same time, each training on its own."
    )
    step_seconds_alone: Figure = Field(default=None, description="The first rank training on its own, the others idle.")
    communication_seconds: Figure = Field(
        default=None, description="What a step takes longer for communicating; absent where that is lost in the noise."
    )
    communication_share: Figure = Field(default=None, description="The same as a share of the step, 0 to 1.")
    scaling_efficiency: Figure = Field(
        default=None, description="Speed over world size times the speed of the first rank alone; 1 is perfect."
    )
    samples_per_second: Figure = Field(default=None, description="Of all ranks together.")


class LengthPoint(Record):
    """The largest batch at one length of the inputs, proven from both sides like the probe's own."""

    length: Length
    max_batch_size: Size
    verified_in_fresh_process: bool | None = Field(
        default=None, description="With all other lengths; false: the probe ended before, and it trained alone so far."
    )
    first_failing_batch_size: Size | None = None
    limited_by: LimitedBy | None = None
    peak_allocated_bytes: Count | None = None
    peak_reserved_bytes: Count | None = None
    attempts: list[Attempt] = Field(default=[])


class LengthCount(Record):
    """How many samples of the training set are of a length, or longer than the next smaller one of the list."""

    length: Length
    samples: Count


class LengthCheck(Record):
    """The final check of all lengths together: steps over them in a fresh process, short after long and reverse."""

    steps: Count
    orders: Count = Field(default=1, description="Of lengths, each in a process of its own; all passed.")
    failures: Count = Field(default=0, description="Checks that did not pass, before batches were made smaller.")
    peak_reserved_bytes: Count | None = None
    lowered: list[Length] = Field(default=[], description="Lengths whose batch the check made smaller.")
    seconds: float = 0.0


class ProbeResult(Record):
    """The largest batch that really trains, proven from both sides."""

    precision: Text
    inference: bool | None = Field(
        default=None, description="Forward passes without gradients were tried: no size here is one to train with."
    )
    max_batch_size: Size | None = None
    first_failing_batch_size: Size | None = None
    limited_by: LimitedBy | None = None
    memory_limit_bytes: Count | None = None
    peak_allocated_bytes: Count | None = None
    peak_reserved_bytes: Count | None = None
    verified_in_fresh_process: bool = False
    verify_steps: Count | None = None
    seconds: float = 0.0
    attempts: list[Attempt] = Field(default=[])
    throughput: list[ThroughputPoint] = Field(default=[])
    throughput_fit: ThroughputFit | None = None
    warnings: list[Text] = Field(default=[], description="What to know of this probe besides its numbers.")
    gradient_accumulation_steps: Factor | None = Field(
        default=None, description="Micro-batches per optimizer step in the final check and the timing."
    )
    input_pipeline: InputPipeline | None = None
    data_parallel: DataParallel | None = Field(
        default=None, description="Where several ranks train as one; all other sizes and speeds are of one rank."
    )
    other_variants: dict[Text, Count] | None = Field(
        default=None,
        description="Where strategy or activation checkpointing is searched: the largest batch with each but the "
        "baseline's; 0: none fits.",
    )
    lengths: tuple[LengthPoint, ...] = Field(
        default=(), description="The largest batch of each, ascending; the other figures are those of the longest."
    )
    length_distribution: tuple[LengthCount, ...] = Field(
        default=(), description="Of the training set, ascending and at most 200, where its samples tell their length."
    )
    length_check: LengthCheck | None = None

    @property
    def lacks_length_check(self) -> bool:
        """Whether it has lengths that were only tried one by one, as it ended before its check of all of them."""
        return len(self.lengths) > 1 and self.length_check is None
