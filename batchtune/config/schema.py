"""The configuration: its keys, their types, defaults and contradictions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from types import NoneType
from typing import Annotated, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema

from batchtune.config.fields import Bytes, Count, NoSwitch, Off, Positive, RunName, Seconds, Section, distinct
from batchtune.config.objective import Objective
from batchtune.config.ranks import Ranks, RayCluster
from batchtune.config.space import CLIPS_NOTHING, ArgumentName, BatchSize, Clipping, LearningRate, Parameter
from batchtune.errors import without_passwords
from batchtune.vocabulary import Executor, Precision, Variant

_DEVICE = re.compile(r"[a-z]+(:[0-9]{1,4})?")


def _device_name(value: str) -> str:
    if not _DEVICE.fullmatch(value):
        raise ValueError(f"{value!r} names no device; use auto, cpu, cuda, cuda:0 or mps")
    return value


def _task_place(value: str) -> str:
    if not value.isprintable():
        raise ValueError(f"{value[:60]!r} cannot name a task; write model.py or package.module")
    return value


_Precisions = Annotated[list[Precision], Field(min_length=1), distinct("{}: each precision once")]
_Switches = Annotated[list[bool], Field(min_length=1), distinct("each of true and false once")]


class Memory(Section):
    """How much device memory a rank may reserve."""

    margin: Annotated[float, NoSwitch] = Field(
        default=0.05, ge=0, lt=1, description="Share of the device kept free during the probe."
    )
    limit: Annotated[Bytes | None, Off] = Field(
        default=None, description="Bytes a rank may reserve (20GiB); null: the device less the margin."
    )


class Baseline(Section):
    """What the user runs today; the recommendation is measured against it."""

    batch_size: Count = Field(default=32, description="Your global batch size.")
    learning_rate: Positive = Field(default=1e-3, description="Your learning rate.")
    gradient_clipping: Annotated[float, Field(ge=0, allow_inf_nan=False), NoSwitch] | None = Field(
        default=None, description="Where it is searched: its norm or value today, 0 for none; null: the task's own."
    )

    @property
    def defaults(self) -> list[str]:
        """The keys that nobody has given, of those that a task may know."""
        return [key for key in ("batch_size", "learning_rate") if key not in self.model_fields_set]


class Budget(Section):
    """How long the study may take."""

    run: Seconds = Field(
        default=60.0,
        description="Training time of the longest single run; on fresh seeds up to twice as much. If not set, with a "
        "schedule of the learning rate and with best_metric as long as today's training, where a Trainer of "
        "Transformers says how long that is, and a tenth of total at the most.",
    )
    total: Seconds = Field(
        default=600.0,
        description="Wall-clock time of the whole study from the first look at its task on, restarts added up.",
    )
    trials: Count = Field(default=64, description="The most runs of the search.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if "run" in self.model_fields_set and self.run > self.total:
            raise ValueError(f"run {self.run:g} s is longer than total {self.total:g} s; raise total")
        return self

    @property
    def given_total(self) -> float | None:
        """`total`, where it is the user's; None: it follows from the baseline's run."""
        return self.total if "total" in self.model_fields_set else None


class Confirm(Section):
    """How the answer is confirmed against the baseline on fresh seeds."""

    seeds: Annotated[int, Field(ge=0), NoSwitch] = Field(
        default=3, description="Fresh seeds of each configuration, by default more if these leave it open; 0: none."
    )
    top: Count = Field(default=2, description="How many are confirmed; if not set, two of four by one fresh seed.")


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
    device: Annotated[str, AfterValidator(_device_name)] = Field(
        default="auto", description="cuda:0, cpu, mps; auto: the accelerator that there is, else the CPU."
    )
    precision: Precision | Literal["auto"] | _Precisions = Field(
        default="auto",
        description="auto: what the device does well; a list: each is tried, and the first is what you run today. fp32 "
        "leaves TF32 as torch and your code set it (by default on in convolutions), tf32 turns it on everywhere.",
    )
    memory: Memory = Memory()
    batch_size: BatchSize = BatchSize()
    learning_rate: LearningRate = LearningRate()
    space: dict[ArgumentName, Parameter] = Field(
        default={}, description="More arguments of build_optimizer to search; their defaults are what you run today."
    )
    gradient_clipping: Clipping | None = Field(default=None, description="null: what the task does by itself.")
    baseline: Baseline = Field(default=Baseline(), validate_default=True)
    objective: Objective = Objective()
    budget: Budget = Budget()
    evaluate_every: Seconds | Literal["auto"] = Field(default="auto", description="Training time between evaluations.")
    confirm: Annotated[Confirm, BeforeValidator(_confirm_switch)] = Confirm()
    seed: Annotated[int, Field(ge=0, lt=2**31), NoSwitch] = Field(
        default=0, description="Of the search and its runs; confirming runs have seeds of their own."
    )
    workers: Count | Literal["auto"] = Field(
        default=1, description="Runs at once, each on a device of its own; auto: as many as there are devices."
    )
    world_size: Count | Literal["auto"] = Field(
        default="auto",
        description="Ranks that are timed in the end, to say what 1, 2, 4 and 8 would take; auto: one for each device.",
    )
    executor: Executor = Field(default="local", description="Where runs train: here, or on a Ray cluster.")
    ray: RayCluster = RayCluster()
    ranks: Ranks = Ranks()
    activation_checkpointing: bool | _Switches | None = Field(
        default=None,
        description="Whether build_model is to have activations computed again in backward; null: as the task has it; "
        "[false, true]: each is tried, and the first is what you run today.",
    )
    storage: Annotated[str | None, Off] = Field(
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
        if baseline.gradient_clipping == 0 and clipping and clipping.searched and clipping.searched.choices is None:
            raise ValueError(f"gradient_clipping 0: {CLIPS_NOTHING}")
        return baseline

    @field_validator("ray")
    @classmethod
    def _ray_is_asked_for(cls, ray: RayCluster, known: ValidationInfo) -> RayCluster:
        if known.data.get("executor") == "local" and ray != RayCluster():
            raise ValueError("is of no use with executor local; add 'executor: ray' (--executor ray), or remove it")
        return ray

    @field_validator("ranks")
    @classmethod
    def _ranks_can_share(cls, ranks: Ranks, known: ValidationInfo) -> Ranks:
        count, sizes, baseline = ranks.of_each, known.data.get("batch_size"), known.data.get("baseline")
        if ranks.per_trial != 1 and sizes is not None and sizes.unit == "tokens":
            raise ValueError(
                f"per_trial {ranks.per_trial}: not with batch_size.unit tokens, whose runs are on one device"
            )
        if ranks.per_trial == "auto" and known.data.get("executor") == "ray":
            raise ValueError("per_trial auto: groups of 2, 4, 8 are of this machine's devices; use executor local")
        if count == 1:
            return ranks
        share = known.data.get("ray", RayCluster()).num_gpus
        if share is not None and share < 1:
            raise ValueError(f"per_trial {count}: ranks need whole GPUs, so remove ray.num_gpus {share:g}")
        if known.data.get("world_size", "auto") != "auto":
            raise ValueError(f"per_trial {count}: world_size is for runs on one device, so remove it")
        if baseline is not None and baseline.batch_size % count:
            key = "baseline.batch_size" if sizes is None or sizes.global_ is None else "batch_size.global"
            raise ValueError(f"{key} {baseline.batch_size} cannot be split among {count} ranks; use a multiple of it")
        if sizes is not None and sizes.max != "auto":
            unit = math.lcm(count, 1 if sizes.multiple_of == "auto" else sizes.multiple_of)
            if -(-sizes.min // unit) * unit > sizes.max:
                between = f"from batch_size.min {sizes.min} to batch_size.max {sizes.max}"
                raise ValueError(f"no multiple of {unit} is {between}, which {count} ranks could split")
        return ranks

    @field_validator("activation_checkpointing")
    @classmethod
    def _is_probed_in_samples(cls, value: object, known: ValidationInfo) -> object:
        sizes: BatchSize | None = known.data.get("batch_size")
        if isinstance(value, list) and len(value) > 1 and sizes is not None and sizes.unit == "tokens":
            raise ValueError("true or false alone with batch_size.unit tokens, whose lengths are probed once")
        return value

    @field_validator("storage")
    @classmethod
    def _storage_takes_so_many_workers(cls, storage: str | None, known: ValidationInfo) -> str | None:
        if storage is not None and "://" not in storage:  # what it is stays unsaid: it may hold a password
            raise ValueError("is not a database's URL; write postgresql+psycopg://you:password@host:5432/studies")
        if storage is not None and storage.startswith("sqlite") and known.data.get("workers", 1) != 1:
            raise ValueError("SQLite is for one worker; leave storage out, or name a PostgreSQL or MySQL one")
        return storage

    @property
    def variants(self) -> list[Variant]:
        """What runs may be trained by; the first is the baseline's."""
        strategies, again = self.ranks.strategies if self.ranks.of_each > 1 else (None,), self.activation_checkpointing
        return [Variant(how, each) for each in (again if isinstance(again, list) else [again]) for how in strategies]

    def to_yaml(self, *, only_given: bool = False) -> str:
        """The configuration as YAML that loads back to the same record, but for a password in `storage`.

        Args:
            only_given: leaves out what nobody has set.
        """
        import yaml

        document = self.model_dump(mode="json", exclude_unset=only_given)
        if self.storage is not None:
            document["storage"] = without_passwords(self.storage)
        return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def config_schema() -> dict[str, object]:
    """JSON Schema (draft 2020-12) of the configuration, for editors."""
    return {"$schema": GenerateJsonSchema.schema_dialect} | Config.model_json_schema()


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Dotted names of every key, sections and leaves."""
    for name, field in model.model_fields.items():
        name = field.alias or name  # noqa: PLW2901 - the key as people write it
        yield prefix + name
        kinds = [kind for kind in get_args(field.annotation) or [field.annotation] if kind is not NoneType]
        if len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], BaseModel):
            yield from known_keys(kinds[0], f"{prefix}{name}.")
