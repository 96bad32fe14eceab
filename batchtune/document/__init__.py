"""The result document: every figure batchtune reports, and its JSON form. Data only; `result.py` shows it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from pydantic import ConfigDict, Field

from batchtune.document.probe import Attempt as Attempt
from batchtune.document.probe import Count, Figure, Record, Size, Text
from batchtune.document.probe import DataParallel as DataParallel
from batchtune.document.probe import InputPipeline as InputPipeline
from batchtune.document.probe import Interval as Interval
from batchtune.document.probe import Length as Length
from batchtune.document.probe import LengthCheck as LengthCheck
from batchtune.document.probe import LengthCount as LengthCount
from batchtune.document.probe import LengthPoint as LengthPoint
from batchtune.document.probe import LimitedBy as LimitedBy
from batchtune.document.probe import LoaderPoint as LoaderPoint
from batchtune.document.probe import ProbeResult as ProbeResult
from batchtune.document.probe import ThroughputFit as ThroughputFit
from batchtune.document.probe import ThroughputPoint as ThroughputPoint
from batchtune.document.probe import Value as Value
from batchtune.document.study import NO_CLIPPING as NO_CLIPPING
from batchtune.document.study import Configuration as Configuration
from batchtune.document.study import CurvePoint as CurvePoint
from batchtune.document.study import GradientClipping as GradientClipping
from batchtune.document.study import Landscape as Landscape
from batchtune.document.study import LengthBatch as LengthBatch
from batchtune.document.study import NoiseScale as NoiseScale
from batchtune.document.study import Prior as Prior
from batchtune.document.study import RangeTest as RangeTest
from batchtune.document.study import Recommendation as Recommendation
from batchtune.document.study import Scaling as Scaling
from batchtune.document.study import ScalingPoint as ScalingPoint
from batchtune.document.study import Straggler as Straggler
from batchtune.document.study import Target as Target
from batchtune.document.study import Trial as Trial
from batchtune.document.study import by_configuration as by_configuration
from batchtune.document.study import config_of as config_of
from batchtune.document.study import is_of as is_of
from batchtune.version import __version__

SCHEMA_VERSION = 1


class Remedy(Record):
    """Another way to train, and what of it would fit."""

    name: Text = Field(description="bf16, activation checkpointing, …")
    max_batch_size: Count = Field(description="0: nothing.")


class EstimatedLength(Record):
    """The calculated answer of one length of the inputs, of batches of all lengths that train in turns."""

    length: Length
    max_batch_size: Count
    safe_max_batch_size: Count
    alone_max_batch_size: Count = Field(description="Where no batch of another length has cut memory up before.")
    peak_bytes: Count | None = None
    samples_per_second: Figure = Field(default=None, description="A roofline: real training stays below it.")


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
    lengths: tuple[EstimatedLength, ...] = Field(
        default=(), description="The largest batch of each, ascending; the other figures are those of the longest."
    )
    notes: list[Text] = Field(default=[])


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
    made_by: Text | None = Field(
        default=None,
        description="'configure_optimizers' or 'Trainer' of an adapted object; absent for the user's build_optimizer.",
    )
    arguments: dict[Text, Value] = Field(
        default={},
        description="TrainingArguments that make optimizer and schedule, of a Hugging Face Trainer; "
        "of other tasks those of a ReduceLROnPlateau.",
    )
    lr_ratio: float | None = Field(
        default=None, description="The learning rate over the hyperparameter 'lr' of a LightningModule, if it has one."
    )


class TaskInfo(Record):
    """Which task was measured, and the hash of its file."""

    path: Text
    sha256: Text | None = None
    optimizer: Text | None = Field(
        default=None, description="Class of what build_optimizer makes; of several 'SGD + Adam' or '2 x Adam'."
    )
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
    warnings: list[Text] = Field(default=[])
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
    options: Text | None = Field(
        default=None,
        description="As they are typed: of an estimate those that its rows do not tell, but for --gpu; of a probe "
        "those for precision, device and memory.",
    )
    details: list[MemoryDetail] | None = Field(default=None, description="One for each precision of an estimate.")

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    def to_json(self) -> str:
        """The document as indented JSON, figures that were not measured left out."""
        return self.model_dump_json(by_alias=True, exclude_none=True, indent=2)
