"""The result document: every figure batchtune reports, and its JSON form. Data only; `result.py` shows it."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from batchtune.version import __version__
from batchtune.vocabulary import Goal, Kind, Outcome

SCHEMA_VERSION = 1
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


_READING = ConfigDict(extra="ignore", allow_inf_nan=False)


class Record(BaseModel):
    """A frozen part of the document; keys that a later batchtune added are ignored when read."""

    model_config = ConfigDict(frozen=True, **_READING)


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
    outcome: Outcome
    steps: Count = 0
    peak_allocated_bytes: Count | None = None
    peak_reserved_bytes: Count | None = None
    forward_backward_peak_bytes: Count | None = Field(
        default=None, description="Peak before the optimizer step, in the unit of the better of the two peaks."
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
    message: Text | None = Field(default=None, description="Why it did not fit, in one line.")
    maps_file: bool | None = Field(
        default=None, description="Memory ended where a file was to be mapped; absent elsewhere."
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
        "Absent for two sizes: any two lie on a line.",
    )
    saturation_batch_size: Figure = Field(
        default=None, description="alpha / beta: half of the peak speed is reached here."
    )
    batch_size_within_5_percent: Size | None = Field(
        default=None, description="Smallest measured batch size within 5 % of the best measured throughput."
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
    measured: list[LoaderPoint] = []
    verdict: Text
    reason: Text = Field(default="", description="Why at this batch size.")


class DataParallel(Record):
    """Several ranks that train as one: what they are, what limited them, and what their communication costs.

    Times are of one optimizer step at that micro-batch size, those of the slowest rank.
    """

    world_size: Factor
    strategy: Literal["ddp", "fsdp"]
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


class ProbeResult(Record):
    """The largest batch that really trains, proven from both sides."""

    precision: Text
    inference: bool | None = Field(
        default=None, description="Forward passes without gradients were tried: no size here is one to train with."
    )
    max_batch_size: Size | None = None
    first_failing_batch_size: Size | None = None
    limited_by: Literal["memory", "max", "dataset", "kernel_limit", "crash", "timeout", "user_error"] | None = None
    memory_limit_bytes: Count | None = None
    peak_allocated_bytes: Count | None = None
    peak_reserved_bytes: Count | None = None
    verified_in_fresh_process: bool = False
    verify_steps: Count | None = None
    seconds: float = 0.0
    attempts: list[Attempt] = []
    throughput: list[ThroughputPoint] = []
    throughput_fit: ThroughputFit | None = None
    warnings: list[Text] = Field(default=[], description="What to know of this probe besides its numbers.")
    gradient_accumulation_steps: Factor | None = Field(
        default=None, description="Micro-batches per optimizer step in the final check and the timing."
    )
    input_pipeline: InputPipeline | None = None
    data_parallel: DataParallel | None = Field(
        default=None, description="Where several ranks train as one; all other sizes and speeds are of one rank."
    )


Value = bool | int | float | Text  # of an argument of the user's build_optimizer


@dataclass(frozen=True, slots=True, kw_only=True, config=_READING)
class CurvePoint:
    """One evaluation of one trial: the metric after so much training time and so many samples.

    A study has thousands, so they are no models, which take three times as much memory each.
    """

    seconds: float = Field(description="Training seconds; evaluation is not counted.")
    measured_seconds: Figure = Field(
        default=None, description="As the clock had it, where the machine slowed the run and `seconds` leaves that out."
    )
    samples: Count
    value: Figure = None
    joules: Figure = Field(
        default=None, description="Energy of the device in training so far; absent where it is not counted."
    )


class GradientClipping(Record):
    """What is done to gradients before the optimizers' steps."""

    norm: Rate | None = Field(default=None, description="Their norm over all parameters is at most this.")
    value: Rate | None = Field(default=None, description="Each of them is at most this, positive or negative.")


NO_CLIPPING = GradientClipping()


class Trial(Record):
    """One training run of the study."""

    number: Count
    state: Literal["complete", "pruned", "fail", "running", "waiting"]
    role: Literal["baseline", "search", "confirm"] = "search"
    outcome: (
        Literal["reached", "capped", "pruned", "diverged", "finished", "oom", "crash", "timeout", "user_error"] | None
    ) = None
    batch_size: Size = Field(description="Global batch size: micro-batch x accumulation x world size.")
    micro_batch_size: Size | None = None
    gradient_accumulation_steps: Factor | None = None
    learning_rate: Rate
    precision: Text
    optimizer_arguments: dict[Text, Value] = Field(
        default={}, description="What else the study chose for build_optimizer, by the names under `space`."
    )
    optimizer: Text | None = Field(default=None, description="Its class, where such arguments may have chosen it.")
    gradient_clipping: GradientClipping | None = None
    seed: Count
    time_to_target_seconds: Figure = None
    samples_to_target: Count | None = None
    energy_to_target_joules: Figure = Field(default=None, description="Of the device, in training only.")
    training_seconds: Figure = None
    measured_training_seconds: Figure = Field(default=None, description="With what the machine slowed down, if it did.")
    evaluation_seconds: Figure = Field(default=None, description="What evaluating took, besides training.")
    value: Figure = Field(default=None, description="Best value of the metric in this run.")
    total_steps: Count | None = Field(
        default=None, description="The horizon given to build_scheduler: the optimizer steps in budget.run at its pace."
    )
    curve: list[CurvePoint] = []
    message: Text | None = None


class RangeTest(Record):
    """A short run in which the learning rate rises from step to step."""

    batch_size: Size
    edge_learning_rate: Figure = Field(
        default=None, description="Where training diverged; absent where it did not up to the highest rate."
    )
    lowest_loss_learning_rate: Figure = Field(
        default=None, description="Where the smoothed loss was least before training diverged."
    )
    highest_learning_rate: Rate
    steps: Count
    seconds: float


class NoiseScale(Record):
    """The gradient noise scale early in training, in samples; absent where it could not be told from zero."""

    samples: Figure = None
    low: Figure = None
    high: Figure = None
    batch_sizes: list[Size]
    draws: Count
    seconds: float


class Prior(Record):
    """What the search started from: why these batch sizes and learning rates, and what was measured for that."""

    batch_sizes: list[Size]
    batch_sizes_reason: Text
    learning_rate: Rate = Field(description="Believed best at `start_batch_size`.")
    learning_rate_decades: float = Field(ge=0, le=100, description="Standard deviation of that belief.")
    learning_rate_reason: Text
    start_batch_size: Size | None = Field(
        default=None, description="Believed best before the search; absent in results of earlier versions."
    )
    micro_batch_size: Size | None = Field(default=None, description="Chosen for a fixed global batch.")
    micro_batch_reason: Text | None = None
    loader_seconds_per_sample: Figure = Field(default=None, description="To load a sample, in the process that trains.")
    range_tests: list[RangeTest] = []
    noise_scale: NoiseScale | None = None
    seconds: float = 0.0


class Target(Record):
    """The metric value that counts as solved."""

    metric: Text
    goal: Goal
    kind: Kind | None = Field(
        default=None, description="What the study wants the least of until there, or the best metric."
    )
    value: Figure = None
    reason: Text = ""
    baseline_diverged_after_seconds: Figure = Field(
        default=None, description="Where the baseline's run, which set the target, diverged."
    )


class Landscape(Record):
    """What the response surface predicts over batch size and learning rate: estimated from the runs, never measured.

    One row for each batch size, one column for each learning rate.
    """

    batch_sizes: list[Size] = Field(description="Global batch sizes, ascending.")
    learning_rates: list[Rate] = Field(description="Ascending, equal ratios apart.")
    median_seconds: list[list[float]] = Field(description="Predicted time to target.")
    low_seconds: list[list[float]] = Field(description="Lower bound of the prediction's band.")
    high_seconds: list[list[float]] = Field(description="Upper bound of the prediction's band.")
    band: float = Field(description="Share of the belief that lies between the bounds.")
    runs: Count = Field(
        description="Runs of the study that it is fitted to, whatever their precision and other settings."
    )

    @model_validator(mode="after")
    def _is_a_table(self) -> Self:
        tables = (self.median_seconds, self.low_seconds, self.high_seconds)
        shape = [len(self.learning_rates)] * len(self.batch_sizes)
        if any([len(row) for row in table] != shape for table in tables):
            raise ValueError("should have a row for each batch size and a column for each learning rate")
        return self


class ScalingPoint(Record):
    """What to train with on so many ranks, its batch size and learning rate having reached the target on one."""

    world_size: Factor
    global_batch_size: Size
    micro_batch_size: Size = Field(description="Of each rank.")
    gradient_accumulation_steps: Size
    learning_rate: Rate | None = None
    precision: Text
    optimizer_arguments: dict[Text, Value] = {}
    gradient_clipping: GradientClipping | None = None
    step_seconds: float = Field(description="Of an optimizer step, by the fitted step time and the communication.")
    time_to_target_seconds: Interval = Field(
        description="Of an estimate, the interval over seeds, widened by the error of the fitted step time."
    )
    is_estimate: bool = Field(description="Whether nothing has trained to the target on so many ranks.")


class Scaling(Record):
    """What several ranks would make of the recommendation."""

    measured: DataParallel = Field(description="The ranks whose steps were timed, with the recommended batch.")
    points: list[ScalingPoint] = Field(description="By world size; one that no batch divides by is left out.")


class Recommendation(Record):
    """What to train with; every size in it has run."""

    micro_batch_size: Size
    gradient_accumulation_steps: Factor = 1
    world_size: Factor = 1
    global_batch_size: Count
    learning_rate: Rate | None = None
    precision: Text
    optimizer_arguments: dict[Text, Value] = {}
    optimizer: Text | None = Field(default=None, description="Its class, where such arguments may have chosen it.")
    gradient_clipping: GradientClipping | None = None
    total_steps: Count | None = Field(default=None, description="The horizon to give to the learning rate's scheduler.")
    time_to_target_seconds: Interval | None = None
    energy_to_target_joules: Interval | None = None
    value: Interval | None = Field(default=None, description="The metric reached within budget.run (best_metric).")
    speedup_over_baseline: Interval | None = None
    energy_saving_over_baseline: Interval | None = Field(
        default=None, description="The baseline's joules until the target over these (energy_to_target)."
    )
    scaling: Scaling | None = Field(default=None, description="Where there are several devices: more ranks' times.")
    seeds_to_confirm: Size | None = Field(
        default=None, description="The confirm.seeds that would confirm it; absent where nothing is left to confirm."
    )
    confirm_command: Text | None = Field(default=None, description="What goes on with the study until they have run.")
    reason: Text


class Remedy(Record):
    """Another way to train, and what of it would fit."""

    name: Text = Field(description="bf16, activation checkpointing, …")
    max_batch_size: Count = Field(description="0: nothing.")


class Estimate(Record):
    """A calculated answer to the memory question: never measured, always with its confidence."""

    gpu: Text
    memory_bytes: Count
    precision: Text
    inference: bool | None = Field(default=None, description="Of forward passes without gradients, not of training.")
    max_batch_size: Count | None = None
    safe_max_batch_size: Count | None = None
    expandable_segments_max_batch_size: Count | None = None
    limited_by: Literal["memory", "max"] | None = Field(
        default=None, description="max: larger batches were not looked at; the size is at least the one given."
    )
    peak_bytes: Count | None = None
    samples_per_second: Figure = Field(default=None, description="A roofline: real training stays below it.")
    samples_per_joule: Figure = Field(default=None, description="The same at the most the board may draw.")
    confidence: Text | None = None
    error_share: Figure = Field(default=None, description="The band of the confidence, as a share of peak memory.")
    needed_bytes: Count | None = Field(
        default=None, description="What a batch of 1 needs for tensors alone, where not even that fits."
    )
    remedies: list[Remedy] = Field(default=[], description="What was traced again where nothing fits.")
    notes: list[Text] = []


class Holder(Record):
    """A part of the model, and the line of code, whose activations are alive at the peak."""

    module: Text = Field(description="Its path in the model, numbers replaced by *; `compute_loss` outside of it.")
    line: Text | None = Field(default=None, description="file:line of the innermost code that is not torch's.")
    activation_bytes: Count


class Moment(Record):
    """Memory in use at one point of a training step."""

    moment: Text = Field(description="build, or forward, backward or optimizer with the number of the step.")
    allocated_bytes: Count


class MemoryDetail(Record):
    """Where the memory of a training step goes at its estimated peak: calculated, like the estimate it belongs to."""

    precision: Text
    batch_size: Size = Field(description="The largest that fits on the roomiest GPU asked about, or 1.")
    peak_allocated_bytes: Count
    parameters_bytes: Count = 0
    gradients_bytes: Count = 0
    optimizer_states_bytes: Count = 0
    activations_bytes: Count = 0
    temporaries_bytes: Count = 0
    peak_moment: Text
    peak_module: Text | None = Field(default=None, description="Whose forward runs at the peak, where one does.")
    peak_operator: Text
    holders: list[Holder] = Field(default=[], description="What holds the most activations at the peak, largest first.")
    curve: list[Moment] = Field(default=[], description="Over two optimizer steps.")


class DeviceProcess(Record):
    """A process that holds memory of the device."""

    pid: Count = Field(description="As the driver counts them, outside of containers.")
    memory_bytes: Count | None = None


class Environment(Record):
    """Where the figures were measured."""

    device: Text
    device_type: Text | None = Field(default=None, description="As torch names it: cuda, cpu, mps, …")
    device_memory_bytes: Count | None = None
    device_memory_free_bytes: Count | None = Field(default=None, description="Free when the work began.")
    device_memory_free_after_bytes: Count | None = Field(default=None, description="Free when it was done.")
    other_processes: list[DeviceProcess] | None = Field(
        default=None, description="Who else held memory of the device when the work began."
    )
    torch: Text | None = None
    cuda: Text | None = None
    driver: Text | None = None
    allocator_conf: Text | None = None
    python: Text | None = None
    platform: Text | None = None
    cpu_count: Count | None = None


class OptimizerSettings(Record):
    """What the task's optimizer is made with besides its learning rate, by its own names."""

    values: dict[Text, Value | list[float]] = Field(default={}, description="Of all groups of parameters alike.")
    differing: list[Text] = Field(default=[], description="What some groups of parameters have otherwise than others.")
    scheduler: Text | None = Field(default=None, description="Class of what build_scheduler makes; absent without one.")


class TaskInfo(Record):
    """Which task was measured, and the hash of its file."""

    path: Text
    sha256: Text | None = None
    optimizer: Text | None = Field(default=None, description="Class of what build_optimizer makes.")
    optimizer_settings: OptimizerSettings | None = None


class Failure(Record):
    """Why a run did not complete."""

    exit_code: Count
    message: Text


class Document(Record):
    """What a command found, from its first attempt to its last word."""

    schema_: Text = Field(
        default=f"batchtune.result/{SCHEMA_VERSION}", alias="schema", pattern=r"^batchtune\.result/\d+$"
    )
    kind: Literal["probe", "tune", "estimate"]
    status: Literal["complete", "interrupted", "failed", "running"]
    name: Text = ""
    batchtune_version: Text = __version__
    created_at: Text = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    environment: Environment | None = None
    task: TaskInfo
    warnings: list[Text] = []
    error: Failure | None = None
    probe: ProbeResult | None = None
    probes: list[ProbeResult] | None = Field(
        default=None, description="One for each precision, when several were asked for."
    )
    prior: Prior | None = None
    target: Target | None = None
    trials: list[Trial] | None = None
    landscape: Landscape | None = None
    recommendation: Recommendation | None = None
    baseline: Recommendation | None = None
    estimates: list[Estimate] | None = None
    details: list[MemoryDetail] | None = Field(default=None, description="One for each precision of an estimate.")

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    def to_json(self) -> str:
        """The document as indented JSON, figures that were not measured left out."""
        return self.model_dump_json(by_alias=True, exclude_none=True, indent=2)
