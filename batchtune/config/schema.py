"""The configuration: its keys, their types, defaults and contradictions."""

from __future__ import annotations

import difflib
import keyword
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema

from batchtune.config.quantities import TOO_MANY_BYTES, parse_bytes, parse_seconds
from batchtune.document import GradientClipping
from batchtune.errors import without_passwords
from batchtune.vocabulary import Goal, Kind, Precision

_SEARCHED = {"learning_rate", "batch_size", "precision", "gradient_clipping"}
_NOT_EXTRA = {"model", "lr", *_SEARCHED}
_MISSPELLED = 0.9  # difflib's ratio of two words of which one is meant by the other
_DEVICE = re.compile(r"[a-z]+(:[0-9]{1,4})?")
_RUN_NAME = re.compile(r"(?!(?i:con|prn|aux|nul|com\d|lpt\d)(?:\.|$))[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9_-])?")


def _no_switch(value: object) -> object:
    """Python counts true as 1; nobody who writes true means a number."""
    if isinstance(value, bool):
        raise ValueError(f"should be a number, not {str(value).lower()}")  # noqa: TRY004 - pydantic wants a ValueError
    return value


def _off_is_null(value: object) -> object:
    """`storage: off` is how people spell that there is none."""
    return None if value is False or (isinstance(value, str) and value in {"off", "no", "none"}) else value


def _device_name(value: str) -> str:
    if not _DEVICE.fullmatch(value):
        raise ValueError(f"{value!r} names no device; use auto, cpu, cuda, cuda:0 or mps")
    return value


def _each_once(value: list[str]) -> list[str]:
    if len(set(value)) < len(value):
        raise ValueError(f"{', '.join(value)}: each precision once")
    return value


def is_run_name(value: str) -> bool:
    """Whether every system takes this for the name of a folder within another; Windows takes some for devices."""
    return _RUN_NAME.fullmatch(value) is not None


def _run_name(value: str) -> str:
    if value and not is_run_name(value):
        raise ValueError(f"{value[:110]!r} cannot name a run folder; use up to 100 letters, digits, '.', '_' and '-'")
    return value


def _task_place(value: str) -> str:
    if not value.isprintable():
        raise ValueError(f"{value[:60]!r} cannot name a task; write model.py or package.module")
    return value


_SECONDS_SCHEMA = {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "examples": ["90s", "10m"]}]}
_BYTES_SCHEMA = {"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "string", "examples": ["20GiB"]}]}
NoSwitch = BeforeValidator(_no_switch)
Seconds = Annotated[
    float, Field(gt=0, allow_inf_nan=False), NoSwitch, BeforeValidator(parse_seconds), WithJsonSchema(_SECONDS_SCHEMA)
]
Bytes = Annotated[
    int, Field(gt=0, lt=TOO_MANY_BYTES), NoSwitch, BeforeValidator(parse_bytes), WithJsonSchema(_BYTES_SCHEMA)
]
RunName = Annotated[str, AfterValidator(_run_name)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), NoSwitch]
Count = Annotated[int, Field(ge=1, lt=2**31), NoSwitch]


class Section(BaseModel):
    """A part of the configuration: frozen, and unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True, serialize_by_alias=True
    )


class Memory(Section):
    """How much device memory a rank may reserve."""

    margin: Annotated[float, NoSwitch] = Field(
        default=0.05, ge=0, lt=1, description="Share of the device kept free during the probe."
    )
    limit: Annotated[Bytes | None, BeforeValidator(_off_is_null)] = Field(
        default=None, description="Bytes a rank may reserve (20GiB); null: the device less the margin."
    )


class BatchSize(Section):
    """Which batch sizes are searched; beyond what fits, by gradient accumulation; the baseline's is measured anyway."""

    min: Count = 1
    max: Count | Literal["auto"] = Field(default="auto", description="auto: from the probe and the data set.")
    multiple_of: Count | Literal["auto"] = "auto"
    global_: Count | None = Field(
        default=None,
        alias="global",
        description="Keep this global batch size; micro-batch and accumulation are chosen.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        searched = {"min": self.min != 1, "max": self.max != "auto", "multiple_of": self.multiple_of != "auto"}
        if self.global_ is not None and any(searched.values()):
            names = ", ".join(name for name, is_set in searched.items() if is_set)
            raise ValueError(
                f"global {self.global_} fixes the batch size, so there is no {names} of it; remove one side"
            )
        if self.max != "auto":
            if self.min > self.max:
                raise ValueError(f"min {self.min} is greater than max {self.max}; swap them or raise max")
            if self.multiple_of != "auto" and -(-self.min // self.multiple_of) * self.multiple_of > self.max:
                between = f"from min {self.min} to max {self.max}" if self.min > 1 else f"within max {self.max}"
                raise ValueError(f"no multiple of multiple_of {self.multiple_of} is {between}")
        return self


class LearningRate(Section):
    """Which learning rates are searched, on a logarithmic scale; a bound left out gives way to the baseline's.

    The baseline is measured wherever it is.
    """

    min: Positive = 1e-5
    max: Positive = 1.0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min:g} is greater than max {self.max:g}; swap them or raise max")
        return self


class Baseline(Section):
    """What the user runs today; the recommendation is measured against it."""

    batch_size: Count = 32
    learning_rate: Positive = 1e-3
    gradient_clipping: Annotated[float, Field(ge=0, allow_inf_nan=False), NoSwitch] | None = Field(
        default=None, description="Where it is searched: its norm or value today, 0 for none; null: the task's own."
    )


class Objective(Section):
    """What makes one configuration better than another."""

    kind: Kind = Field(
        default="time_to_target",
        description="What is least: training seconds or joules until the target; or the best value within budget.run.",
    )
    metric: Annotated[str, Field(min_length=1)] = "val_loss"
    goal: Goal = "minimize"
    target: Annotated[float, Field(allow_inf_nan=False), NoSwitch] | Literal["auto"] = Field(
        default="auto", description="auto: what the baseline reaches within budget.run."
    )

    @model_validator(mode="after")
    def _goal_is_clear(self) -> Self:
        if "goal" not in self.model_fields_set and re.search(
            r"acc|f1|auc|score|bleu|recall|map\b", self.metric.lower()
        ):
            raise ValueError(
                f"metric {self.metric!r} looks like one to maximize; say so with 'goal: maximize' (or minimize)"
            )
        if self.kind == "best_metric" and self.target != "auto":
            raise ValueError("best_metric has no target; leave it out, or use kind: time_to_target")
        return self


class Parameter(Section):
    """One more argument of the user's build_optimizer to search: a range of floats, or choices."""

    min: Annotated[float, Field(allow_inf_nan=False), NoSwitch] | None = None
    max: Annotated[float, Field(allow_inf_nan=False), NoSwitch] | None = None
    log: bool = Field(default=False, description="Search the range on a logarithmic scale.")
    choices: Annotated[list[bool | int | float | str], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _range_or_choices(self) -> Self:
        if self.choices is not None:
            if self.min is not None or self.max is not None or self.log:
                raise ValueError("has choices and a range; keep one of them")
            if any(isinstance(choice, float) and not math.isfinite(choice) for choice in self.choices):
                raise ValueError("choices are finite numbers, words or booleans")
            if len({repr(choice) for choice in self.choices}) < len(self.choices):
                raise ValueError(f"{', '.join(map(str, self.choices))}: each choice once")
            return self
        if self.min is None or self.max is None:
            raise ValueError("should have min and max, or choices, for example {min: 1e-4, max: 0.1, log: true}")
        if self.min >= self.max:
            raise ValueError(f"min {self.min:g} is not less than max {self.max:g}; swap them or raise max")
        if self.log and self.min <= 0:
            raise ValueError(f"min {self.min:g} has no logarithm; raise it above 0 or leave out log")
        return self


class Clipping(Section):
    """What is done to gradients before the optimizers' steps: one of the two, a number or what to search."""

    norm: Positive | Parameter | None = Field(default=None, description="Their norm over all parameters is at most so.")
    value: Positive | Parameter | None = Field(default=None, description="Each of them is at most so.")

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.norm is None) == (self.value is None):
            raise ValueError("should have either norm or value, for example {norm: 1.0}")
        return self

    @property
    def kind(self) -> str:
        """Which of the two it is."""
        return "value" if self.norm is None else "norm"

    @property
    def given(self) -> float | Parameter:
        """The number, or what is searched; of choices and of what is run today, 0 is none."""
        found = self.value if self.norm is None else self.norm
        assert found is not None  # noqa: S101 - checked above
        return found

    @property
    def searched(self) -> Parameter | None:
        """What is searched; None: it is one number."""
        return self.given if isinstance(self.given, Parameter) else None

    def of(self, number: float) -> GradientClipping:
        """The clipping that a number stands for; 0 is none."""
        return GradientClipping.model_validate({self.kind: number} if number else {})


def _argument_name(value: str) -> str:
    if not value.isidentifier() or keyword.iskeyword(value):
        raise ValueError(f"{value!r} cannot name an argument of build_optimizer")
    if value in _NOT_EXTRA:
        raise ValueError(f"{value!r} is searched already, or is not build_optimizer's to choose")
    if meant := meant_instead_of(value):
        raise ValueError(f"{value!r} is too much like {meant!r}, which is searched already")
    return value


def meant_instead_of(argument: str) -> str | None:
    """What somebody who writes this under `space` has most likely misspelled; None where it is a name of its own."""
    near = difflib.get_close_matches(argument, _SEARCHED, n=1, cutoff=_MISSPELLED)
    return near[0] if near and not argument.startswith(near[0]) else None


class Budget(Section):
    """How long the study may take."""

    run: Seconds = Field(
        default=60.0, description="Training time of the longest single run; on fresh seeds up to twice as much."
    )
    total: Seconds = Field(
        default=600.0, description="Wall-clock time of the whole study from its probe on, restarts added up."
    )
    trials: Count = 64

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.run > self.total:
            raise ValueError(f"run {self.run:g} s is longer than total {self.total:g} s; raise total")
        return self


class Confirm(Section):
    """How the answer is confirmed against the baseline on fresh seeds."""

    seeds: Annotated[int, Field(ge=0), NoSwitch] = 3
    top: Count = 2


class RayCluster(Section):
    """What each worker asks of a Ray cluster."""

    address: str | None = Field(
        default=None, description="Of the cluster; null: RAY_ADDRESS, else one that runs here, else a new one here."
    )
    num_gpus: Annotated[float, NoSwitch] | None = Field(
        default=None, gt=0, le=1, description="null: 1 where the cluster has GPUs. Less: that share of a GPU's memory."
    )
    num_cpus: Count = Field(default=1, description="Processors; on the CPU also the threads of a run.")
    resources: dict[str, Positive] = Field(
        default={}, description="What else Ray is asked for, e.g. {'accelerator_type:A100': 0.001}."
    )


def _confirm_switch(value: object) -> object:
    """`confirm: off` is how people spell zero seeds, and `on` the default."""
    if value is True or value in ("on", "yes"):
        return {}
    return {"seeds": 0} if value is False or value in ("off", "no") else value


class Config(Section):
    """Everything `batchtune tune` needs to know; paths are relative to the file that names them."""

    task: Annotated[str, Field(min_length=1), AfterValidator(_task_place)] = Field(
        description="model.py, path.py:attribute or package.module:attribute"
    )
    name: RunName = Field(
        default="", validate_default=False, description="The run folder's name; default: the config's."
    )
    device: Annotated[str, AfterValidator(_device_name)] = "auto"
    precision: (
        Precision | Literal["auto"] | Annotated[list[Precision], Field(min_length=1), AfterValidator(_each_once)]
    ) = "auto"
    memory: Memory = Memory()
    batch_size: BatchSize = BatchSize()
    learning_rate: LearningRate = LearningRate()
    space: dict[Annotated[str, AfterValidator(_argument_name)], Parameter] = Field(
        default={}, description="More arguments of build_optimizer to search; their defaults are what you run today."
    )
    gradient_clipping: Clipping | None = Field(default=None, description="null: what the task does by itself.")
    baseline: Baseline = Field(default=Baseline(), validate_default=True)
    objective: Objective = Objective()
    budget: Budget = Budget()
    evaluate_every: Seconds | Literal["auto"] = Field(default="auto", description="Training time between evaluations.")
    confirm: Annotated[Confirm, BeforeValidator(_confirm_switch)] = Confirm()
    seed: Annotated[int, Field(ge=0, lt=2**31), NoSwitch] = 0
    workers: Count | Literal["auto"] = Field(
        default=1, description="Runs at once, each on a device of its own; auto: as many as there are devices."
    )
    world_size: Count | Literal["auto"] = Field(
        default="auto",
        description="Ranks that are timed in the end, to say what 1, 2, 4 and 8 would take; auto: one for each device.",
    )
    executor: Literal["local", "ray"] = Field(
        default="local", description="Where runs train: here, or on a Ray cluster."
    )
    ray: RayCluster = RayCluster()
    storage: Annotated[str | None, BeforeValidator(_off_is_null)] = Field(
        default=None, description="An Optuna storage URL; null: a journal in the run folder."
    )

    @field_validator("baseline")
    @classmethod
    def _baseline_has_the_fixed_batch(cls, baseline: Baseline, known: ValidationInfo) -> Baseline:
        sizes: BatchSize | None = known.data.get("batch_size")
        if sizes is None or sizes.global_ is None or baseline.batch_size == sizes.global_:
            return baseline
        if "batch_size" in baseline.model_fields_set:
            raise ValueError(
                f"batch_size {baseline.batch_size} is not batch_size.global {sizes.global_}, which is kept; drop it"
            )
        return baseline.model_copy(update={"batch_size": sizes.global_})

    @field_validator("baseline")
    @classmethod
    def _clipping_is_searched(cls, baseline: Baseline, known: ValidationInfo) -> Baseline:
        clipping: Clipping | None = known.data.get("gradient_clipping")
        if baseline.gradient_clipping is not None and (clipping is None or clipping.searched is None):
            raise ValueError("gradient_clipping is for a study that searches it; write it outside of baseline")
        return baseline

    @field_validator("ray")
    @classmethod
    def _ray_is_asked_for(cls, ray: RayCluster, known: ValidationInfo) -> RayCluster:
        if known.data.get("executor") == "local" and ray != RayCluster():
            raise ValueError("is of no use with executor local; add 'executor: ray' (--executor ray), or remove it")
        return ray

    @field_validator("storage")
    @classmethod
    def _storage_takes_so_many_workers(cls, storage: str | None, known: ValidationInfo) -> str | None:
        if storage is not None and "://" not in storage:  # what it is stays unsaid: it may hold a password
            raise ValueError("is not a database's URL; write postgresql+psycopg://you:password@host:5432/studies")
        if storage is not None and storage.startswith("sqlite") and known.data.get("workers", 1) != 1:
            raise ValueError("SQLite is for one worker; leave storage out, or name a PostgreSQL or MySQL one")
        return storage

    def to_yaml(self) -> str:
        """The resolved configuration as YAML that loads back to the same record, but for a password in `storage`."""
        import yaml

        document = self.model_dump(mode="json")
        if self.storage is not None:
            document["storage"] = without_passwords(self.storage)
        return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def config_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the configuration, for editors."""
    return {"$schema": GenerateJsonSchema.schema_dialect} | Config.model_json_schema()


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Dotted names of every key, sections and leaves."""
    for name, field in model.model_fields.items():
        name = field.alias or name  # noqa: PLW2901 - the key as people write it
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from known_keys(field.annotation, f"{prefix}{name}.")
