"""What a child can be asked for. Sizes are micro-batch sizes of each rank, times are in seconds, memory in bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal, Self

from batchtune.document import (
    NO_CLIPPING,
    Attempt,
    Environment,
    GradientClipping,
    LoaderPoint,
    NoiseScale,
    OptimizerSettings,
    RangeTest,
    ThroughputPoint,
    Value,
)
from batchtune.protocol.data import CurrentSettings, LengthsSeen, SamplesSeen, TrainingLength
from batchtune.protocol.messages import NO_VARIANT, Command, Message, RunEnd, RunSpec
from batchtune.vocabulary import AskedLengths, Goal, Length, Purpose, Strategy, Variant

STEPS_AFTER_EVALUATION = 2  # or more: it cuts memory up, too, and training must go on in what it leaves


class Machine(Message):
    """A machine without a task: its versions and device, and what the device's sensors say now."""

    environment: Environment
    sensors: Mapping[str, object]


class Describe(Command[Machine]):
    """What `batchtune env` shows."""

    device: str


class Renew(Command[None]):
    """Ends a fork in favour of the next one of the same image, which opens the task anew."""


class Opened(Message):
    """A task on its device, ready to train.

    Attributes:
        device: as torch names it.
        device_count: devices of that kind which the child sees.
        precision: each with the reason why it was chosen.
        instead: why it is fp32 and not the half precision that the device does well, where the task refuses that.
        train_size: samples; None for a stream, or where the task makes its batches.
        deals_out: the user's code gives each rank of a group its own part of a stream to train on.
        samples: of the worst batch; None where the task makes it.
        lengths: that were asked for or found; None where none were asked for.
        optimizer_defaults: of the arguments of build_optimizer that were asked about.
        optimizer: its class, or those of several; empty for inference, which has none.
        gradient_clipping: that of every step unless a run is asked for another.
        accumulation_steps: micro-batches of an optimizer step in the user's own training; 1 where that is not known.
        accumulates: whether a step may be made of several micro-batches.
        steps_by_itself: it has a train_step, whose gradients nobody else can take.
        strategy: of a group of ranks, as its backend and its limits are; None for a child alone.
        current_settings: what the user trains with, where that was asked for.
        fits_alone: a rank may hold all weights with their gradients, as each does unless they are sharded.
        foreign_parameters: that the optimizer holds and the model does not.
        training_length: of the user's own training, where an object says how long it is.
        notes: sentences on what of the user's own training is not taken over, or had to be assumed.
        forks: whether this child is a fork of an image, which can have others.
    """

    device: str
    device_count: int
    environment: Environment
    nvml_uuid: str | None
    counts_energy: bool
    precision: tuple[tuple[str, str], ...]
    instead: str = ""
    train_size: int | None
    deals_out: bool = False
    samples: SamplesSeen | None = None
    lengths: LengthsSeen | None = None
    has_train_dataset: bool
    memory_limit_bytes: int | None
    optimizer_defaults: dict[str, Value]
    optimizer: str
    optimizer_settings: OptimizerSettings = OptimizerSettings()
    gradient_clipping: GradientClipping = NO_CLIPPING
    accumulation_steps: int = 1
    accumulates: bool = True
    steps_by_itself: bool = False
    world_size: int = 1
    strategy: Strategy | None = None
    backend: str | None = None
    rank_memory_limits_bytes: tuple[int | None, ...] = ()
    current_settings: CurrentSettings = CurrentSettings()
    fits_alone: bool = True
    foreign_parameters: int = 0
    training_length: TrainingLength = TrainingLength()
    notes: tuple[str, ...] = ()
    forks: bool = False

    def in_fp32(self, why: str) -> Self:
        """The same in the place of a half precision that nobody asked for, since the task does not train in that."""
        ((half, _), *_) = self.precision
        return self.but(precision=(("fp32", f"not {half}, which the task refuses"),), instead=why)

    def training_steps(self, batch_size: int) -> int | None:
        """Optimizer steps of the user's own training, of which a batch is so large; None where that is not known."""
        if self.training_length.steps is not None:
            return self.training_length.steps
        if self.training_length.epochs is None or self.train_size is None:
            return None
        return max(1, math.ceil(self.training_length.epochs * math.ceil(self.train_size / batch_size)))

    @property
    def is_for_inference(self) -> bool:
        """Whether forward passes are taken instead of optimizer steps."""
        return not self.optimizer


class OpenTask(Command[Opened | None]):
    """Opens the device, imports the task, builds the model once and sets the memory limit.

    Attributes:
        purpose: what the task must be able to do; for inference, attempts and timings take forward passes instead of
            optimizer steps.
        memory_limit: None: what the device has, less `margin`.
        rank_memory_limits_bytes: of a group's ranks, where each has its own; `memory_limit` is then of no account.
        deals_out: the user's code gives each rank its own part of a stream to train on, as another group has seen.
        samples: of the worst batch, where another child has looked for them.
        lengths: of the inputs; `auto` for those of the training set; None: batches are all made alike.
        lengths_seen: the same, where another child has found them.
        device_name: what the device must be called; None: any.
        precision: names, `auto` or `all`.
        optimizer_arguments: of build_optimizer, whose defaults are asked for.
        gradient_clipping: of every step; None: what the task does by itself.
        activation_checkpointing: wherever a command asks for nothing else; None: as the task has it.
        metric: the evaluation must have it; None: it does not matter.
        goal: of that metric, for schedulers that wait for it.
        strategies: by which a group's ranks are to train the model.
        asks_for_current_settings: what the user trains with is to be told, too.
        again: the task is known: no model is built, and nothing is told.
    """

    task: str
    device: str = "auto"
    purpose: Purpose = "probe"
    memory_limit: int | None = None
    rank_memory_limits_bytes: tuple[int | None, ...] = ()
    deals_out: bool = False
    samples: SamplesSeen | None = None
    lengths: AskedLengths | None = None
    lengths_seen: LengthsSeen | None = None
    device_name: str | None = None
    margin: float = 0.05
    precision: tuple[str, ...] = ("auto",)
    optimizer_arguments: tuple[str, ...] = ()
    gradient_clipping: GradientClipping | None = None
    activation_checkpointing: bool | None = None
    metric: str | None = None
    goal: Goal | None = None
    strategies: tuple[Strategy, ...] = ()
    asks_for_current_settings: bool = False
    again: bool = False


class Tried(Message):
    """An attempt, and whether more may follow in the same process.

    Attributes:
        frames: of the user's code, where that raised, as Python shows them.
        batches_differ: in what they take, as where each is padded to its longest sample.
        most_samples: of a batch, where an epoch has less than the one that was asked for.
        fails_in_half: at every size, where its half precision is the reason; it may train in fp32.
    """

    attempt: Attempt
    usable: bool
    frames: str = ""
    batches_differ: bool = False
    most_samples: int | None = None
    fails_in_half: bool = False


class TryBatchSize(Command[Tried]):
    """Whether a size trains, and how much memory that takes.

    Attributes:
        variant: what it trains by; of what that leaves open, what the task was opened with.
        verify: evaluates and saves a checkpoint, too, and trains on for `STEPS_AFTER_EVALUATION` or more.
        length: of the inputs; None: the longest.
        evaluation_batch_size: of the default evaluation, at most; None: `batch_size`, which then has to fit.
        process: of those that a check takes; each but the first, 0, has a heap of its own, and as its own training
            would, batches that are drawn at random in turns with the worst.
    """

    batch_size: int
    steps: int
    precision: str
    verify: bool = False
    length: Length | None = None
    evaluation_batch_size: int | None = None
    accumulation_steps: int = 1
    process: int = 0
    variant: Variant = NO_VARIANT


class TryLengths(TryBatchSize):
    """Whether batches of several lengths train one after another; the attempt is of the one that failed or took most.

    Attributes:
        sizes, order: lengths, each with its batch size, and which of them each step takes.
        padded_to: of each step, the longest of its inputs: that length, or what samples in their order make it.
        late_steps: the first ones free gradients once the next batch is there, those after them at once.
        evaluate_after: how many steps; a checkpoint is saved then, too.
    """

    sizes: tuple[tuple[Length, int], ...]
    order: tuple[int, ...]
    padded_to: tuple[Length, ...]
    late_steps: int
    evaluate_after: tuple[int, ...]

    def turns(self) -> Iterator[tuple[int, tuple[Length, int], Length]]:
        """Of each step its number, its length and batch size, and its longest input.

        Of further processes, which show by how much their peaks differ, only of the last third of the steps.
        """
        for number in range(len(self.order) * 2 // 3 if self.process else 0, len(self.order)):
            yield number, self.sizes[self.order[number]], self.padded_to[number]


class TimeSteps(Command[ThroughputPoint]):
    """How fast a size trains: by ranks as one, by each apart at the same time, or by the first one alone."""

    batch_size: int
    precision: str
    seconds: float
    accumulation_steps: int = 1
    ranks: Literal["together", "apart", "alone"] = "together"

    def asked(self, world_size: int) -> list[int]:
        return [0] if self.ranks == "alone" else super().asked(world_size)

    @property
    def by_itself(self) -> bool:
        return self.ranks != "together"


class Flops(Message):
    """Floating-point operations of one sample, None where torch counts none, and what most of them are computed in."""

    per_sample: float | None
    computed_in: str = ""


class CountFlops(Command[Flops]):
    """The floating-point operations of a step."""

    batch_size: int
    precision: str
    first_rank_only: ClassVar[bool] = True


class TimeLoader(Command[LoaderPoint]):
    """How fast the training set's batches come, without any training."""

    batch_size: int
    num_workers: int
    pin_memory: bool
    seconds: float


class RunRangeTest(Command[RangeTest]):
    """At which learning rate, rising from step to step, training diverges."""

    batch_size: int
    precision: str
    lowest_rate: float
    highest_rate: float
    steps: int
    seconds: float
    fresh: ClassVar[bool] = True


class MeasureNoiseScale(Command[NoiseScale]):
    """The gradient noise scale, from gradients of two micro-batch sizes.

    Attributes:
        ranks_apart: `small` is for warming up alone, since a backward pass of `large` tells the gradients of single
            ranks and that of all together.
    """

    small: int
    large: int
    precision: str
    learning_rate: float
    warm_up_steps: int
    draws: int
    seconds: float
    ranks_apart: bool = False
    fresh: ClassVar[bool] = True


class Train(Command[RunEnd]):
    """One run; each evaluation is told, and the child waits for whether to go on."""

    spec: RunSpec
    fresh: ClassVar[bool] = True


class TimeInTurn(Command[tuple[tuple[float, ...], ...]]):
    """Steps of several runs in short stretches that alternate, so that a slow spell of the machine hits all alike.

    Attributes:
        specs: what is timed, all in memory at once; the answer has seconds of a step, round by round, in their order.
        stretch_seconds: for how long each one has its turn.
    """

    specs: tuple[RunSpec, ...]
    seconds: float
    stretch_seconds: float
    fresh: ClassVar[bool] = True


class Rejoin(Command[None]):
    """Ranks make their process group anew after an attempt that failed."""
