"""What a study finds: what it started from, its runs, the target, and what it recommends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from batchtune.document.probe import (
    READING,
    Count,
    DataParallel,
    Factor,
    Figure,
    Interval,
    Length,
    Rate,
    Record,
    Size,
    Text,
    Value,
)
from batchtune.vocabulary import FAILED_FOR_GOOD, Goal, Kind, Strategy, Variant


@dataclass(frozen=True, slots=True, kw_only=True, config=READING)
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
        default=None,
        description="Energy of the device in training so far; absent where it is not counted. What lies closer to an "
        "evaluation than its counter tells (a tenth of a second) is shared by time.",
    )


class GradientClipping(Record):
    """What is done to gradients before the optimizers' steps."""

    norm: Rate | None = Field(default=None, description="Their norm over all parameters is at most this.")
    value: Rate | None = Field(default=None, description="Each of them is at most this, positive or negative.")


NO_CLIPPING = GradientClipping()


class Straggler(Record):
    """A rank for which all others wait in every step."""

    rank: Count
    times: float = Field(ge=1, description="As long as the others' is what it does by itself: loading data, computing.")


class Trial(Record):
    """One training run of the study."""

    number: Count
    state: Literal["complete", "pruned", "fail", "running", "waiting"]
    role: Literal["baseline", "search", "confirm"] = "search"
    outcome: (
        Literal["reached", "capped", "pruned", "diverged", "finished", "oom", "crash", "timeout", "user_error"] | None
    ) = None
    batch_size: Size = Field(description="Global batch size: micro-batch x accumulation x world size.")
    micro_batch_size: Size | None = Field(default=None, description="Of each rank.")
    gradient_accumulation_steps: Factor | None = None
    world_size: Factor | None = Field(default=None, description="Ranks that trained it as one; absent for one device.")
    strategy: Strategy | None = Field(default=None, description="How they shared the work.")
    activation_checkpointing: bool | None = Field(
        default=None, description="Whether activations were computed again in backward; absent: as the task has it."
    )
    nodes: Factor | None = Field(default=None, description="Machines that they were on; absent for one.")
    straggler: Straggler | None = Field(default=None, description="The rank that was far slower than the others.")
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
    energy_to_target_joules: Figure = Field(
        default=None,
        description="Of the device in training; of stretches under a tenth of a second, their share of all.",
    )
    training_seconds: Figure = None
    measured_training_seconds: Figure = Field(default=None, description="With what the machine slowed down, if it did.")
    evaluation_seconds: Figure = Field(default=None, description="What evaluating took, besides training.")
    starting_seconds: Figure = Field(default=None, description="Of training: what epochs took until their first batch.")
    value: Figure = Field(default=None, description="Best value of the metric in this run.")
    total_steps: Count | None = Field(
        default=None,
        description="The horizon that the schedule asked for: the optimizer steps in budget.run at its pace.",
    )
    curve: list[CurvePoint] = Field(default=[])
    message: Text | None = None

    @property
    def variant(self) -> Variant:
        """What it was trained by."""
        return Variant(self.strategy, self.activation_checkpointing)

    @property
    def is_over(self) -> bool:
        """Whether it ran to an end that counts."""
        return self.state in {"complete", "pruned"}

    @property
    def is_interrupted(self) -> bool:
        """Whether it was stopped before it came to anything, and runs again: it says nothing of its configuration."""
        return self.outcome is None and (self.state == "fail" or (self.state == "running" and self.message is not None))

    @property
    def came_to(self) -> str:
        """How it ended in a word; where it has not, how it stands."""
        return self.outcome or ("interrupted" if self.is_interrupted else self.state)

    @property
    def tells_of_fresh_seed(self) -> bool:
        """Whether it says what its configuration comes to on a fresh seed; not if it was cut off or is done again."""
        return self.role == "confirm" and (self.is_over or self.outcome in FAILED_FOR_GOOD)


class RangeTest(Record):
    """A short run in which the learning rate rises from step to step."""

    batch_size: Size
    edge_learning_rate: Figure = Field(
        default=None, description="Where training diverged; absent where it did not up to the highest rate."
    )
    lowest_loss_learning_rate: Figure = Field(
        default=None, description="Where the smoothed loss was least before training diverged."
    )
    losses: Count = Field(default=1, description="That a step trains optimizers on; of several, the first edge counts.")
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
    range_tests: list[RangeTest] = Field(default=[])
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
    optimizer_arguments: dict[Text, Value] = Field(default={})
    gradient_clipping: GradientClipping | None = None
    activation_checkpointing: bool | None = None
    step_seconds: float = Field(description="Of an optimizer step, by the fitted step time and the communication.")
    time_to_target_seconds: Interval = Field(
        description="Of an estimate, the interval over seeds, widened by the error of the fitted step time."
    )
    energy_to_target_joules: Interval | None = Field(default=None, description="Of all ranks, where it was measured.")
    is_estimate: bool = Field(description="Whether nothing has trained to the target on so many ranks.")
    estimated_seconds: Figure = Field(
        default=None, description="Where ranks have trained to the target: the time that was estimated before."
    )

    @property
    def variant(self) -> Variant:
        """What to train by."""
        return Variant(None, self.activation_checkpointing)


class Scaling(Record):
    """What several ranks would make of the recommendation."""

    measured: DataParallel = Field(description="The ranks whose steps were timed, with the recommended batch.")
    points: list[ScalingPoint] = Field(description="By world size; one that no batch divides by is left out.")


class LengthBatch(Record):
    """The samples of a micro-batch of a length, or shorter ones that no shorter one of the list has room for."""

    length: Length
    samples: Size


class Recommendation(Record):
    """What to train with; every size in it has run."""

    micro_batch_size: Size
    gradient_accumulation_steps: Factor = 1
    world_size: Factor = 1
    strategy: Strategy | None = Field(default=None, description="How several ranks share the work.")
    activation_checkpointing: bool | None = Field(
        default=None, description="Whether activations are computed again in backward; absent: as the task has it."
    )
    nodes: Factor | None = Field(default=None, description="Machines that they are on; absent for one.")
    global_batch_size: Count
    batch_unit: Literal["samples", "tokens"] = Field(
        default="samples", description="Of its sizes; tokens: in the mean."
    )
    length_batches: tuple[LengthBatch, ...] = Field(
        default=(), description="Of samples of similar length, where sizes count tokens; the baseline's have none."
    )
    learning_rate: Rate | None = None
    precision: Text
    optimizer_arguments: dict[Text, Value] = Field(default={})
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
    timed_in_turn: bool | None = Field(
        default=None, description="Its seconds are those of steps timed beside the baseline's, the machine being busy."
    )
    reason: Text

    @property
    def variant(self) -> Variant:
        """What to train by."""
        return Variant(self.strategy, self.activation_checkpointing)


Configuration = tuple[int, float, str, tuple[tuple[str, Value], ...], GradientClipping | None, Variant]
"""What makes two trials the same configuration."""


def config_of(found: Trial | Recommendation | ScalingPoint) -> Configuration:
    """What makes two of them the same configuration, whatever their seed and how a batch is made up."""
    size = found.batch_size if isinstance(found, Trial) else found.global_batch_size
    arguments = tuple(sorted(found.optimizer_arguments.items()))
    return size, found.learning_rate or 0.0, found.precision, arguments, found.gradient_clipping, found.variant


def by_configuration(trials: Iterable[Trial]) -> dict[Configuration, list[Trial]]:
    """The runs of each configuration, both in their order."""
    found: dict[Configuration, list[Trial]] = {}
    for trial in trials:
        found.setdefault(config_of(trial), []).append(trial)
    return found


def is_of(trial: Trial, configuration: Recommendation | None) -> bool:
    """Whether a trial ran with exactly this configuration."""
    return configuration is not None and config_of(trial) == config_of(configuration)
