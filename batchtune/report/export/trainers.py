"""The settings that ran, in the words of training libraries: which of their fields carries which of our values."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from batchtune.document import Document, Recommendation
from batchtune.errors import UsageError
from batchtune.report.export.optimizers import (
    hf_optimizer,
    hf_optimizer_notes,
    made_with,
    optimizer_notes,
    optimizer_of,
)
from batchtune.report.export.settings import UNCHECKED, is_checked, to_train_with

Values = dict[str, Any]
_MICRO, _ACCUMULATION, _RATE = "micro_batch_size", "gradient_accumulation_steps", "learning_rate"
_PRECISIONS = ("bf16", "fp16", "fp32", "tf32")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Export:
    """How one library takes the settings.

    Attributes:
        title: the library's name, for a reader.
        values: its fields (a dot goes one level down) with their values; None where there is nothing to say.
        words: the result document's names of what some of these fields are, for `--set`.
        write: the fields as the text that the library loads.
        notes: what a reader must know and no field can say, in sentences.
        takes_comments: whether the text has the notes, too, each behind a '#'.
    """

    title: str
    values: Callable[[Recommendation, Document], Values]
    words: Mapping[str, str]
    write: Callable[[Values], str]
    notes: Callable[[Recommendation, Document], list[str]] = lambda *_: []
    takes_comments: bool = False

    def text(self, result: Document, renames: Sequence[str] = ()) -> str:
        """The settings of a result as this library loads them.

        Args:
            result: a study's result, or a probe's (then without a learning rate).
            renames: texts `field=name`: the field of this name, ours or the library's, is called otherwise.

        Raises:
            UsageError: the result has no settings that ran, the library cannot train so, or a rename is wrong.
        """
        found = _settings(result)
        values = {name: value for name, value in self.values(found, result).items() if value is not None}
        comments = [f"# {note}" for note in self.said_beside(result)] if self.takes_comments else []
        return "\n".join([*comments, self.write(_renamed(values, self.words, renames))])

    def said_beside(self, result: Document) -> list[str]:
        """What a reader of `text` must know besides it, in sentences."""
        found = _settings(result)
        return [*([] if is_checked(result) else [UNCHECKED]), *self.notes(found, result)]

    def snippet(self, result: Document) -> str:
        """The same text for a page that shows what there is: '' instead of an error."""
        try:
            return self.text(result)
        except UsageError:
            return ""


def _settings(result: Document) -> Recommendation:
    found = to_train_with(result)
    if found is None:
        if result.kind == "tune":
            raise UsageError(f"this tune is {result.status}: it has no recommendation; 'batchtune report' says why")
        if result.probe is not None and result.probe.inference:
            raise UsageError("this probe is of inference: it has no batch to train with; probe without --inference")
        why = "an estimate is no measurement" if result.estimates else f"this {result.kind} is {result.status}"
        raise UsageError(f"{why}: it has no batch size that ran; run 'batchtune probe' or 'batchtune tune' first")
    if found.precision not in _PRECISIONS:
        raise UsageError(f"precision {found.precision!r} is none of {', '.join(_PRECISIONS)}; measure again")
    return found


def _device(result: Document) -> str | None:
    return result.environment.device_type if result.environment else None


def _renamed(values: Values, words: Mapping[str, str], renames: Sequence[str]) -> Values:
    names = {name: name for name in values}
    for rename in renames:
        field, _, name = (part.strip() for part in rename.partition("="))
        target = words.get(field, field)
        if not field or not name:
            raise UsageError(f"--set {rename}: not of the form field=name, for example --set {next(iter(values))}=name")
        if target not in values:
            ours = [word for word, theirs in words.items() if theirs in values and word not in values]
            raise UsageError(f"--set {rename}: no field {field!r} here; there are {', '.join([*values, *ours])}")
        names[target] = name
    taken = list(names.values())
    for name in taken:
        if taken.count(name) > 1 or any(other.startswith(f"{name}.") for other in taken):
            raise UsageError(f"--set: two fields would be called {name!r}; give each a name of its own")
    return {names[field]: value for field, value in values.items()}


def _nested(values: Values) -> Values:
    """Dotted names as sections."""
    document: Values = {}
    for name, value in values.items():
        *sections, leaf = name.split(".")
        section = document
        for each in sections:
            section = section.setdefault(each, {})
        section[leaf] = value
    return document


def _json(values: Values) -> str:
    return json.dumps(_nested(values), indent=2)


def _yaml(values: Values) -> str:
    return yaml.safe_dump(_nested(values), sort_keys=False).rstrip()


def _shell(values: Values) -> str:
    wrong = [name for name in values if not _VARIABLE.fullmatch(name)]
    if wrong:
        raise UsageError(f"--set: {wrong[0]!r} cannot name a variable; use letters, digits and '_'")
    return "\n".join(f"{name}={shlex.quote(str(value))}" for name, value in values.items())


def _refuse_fp16_on_cpu(library: str, found: Recommendation, result: Document) -> None:
    if found.precision == "fp16" and _device(result) == "cpu":
        raise UsageError(f"{library} does not train in fp16 on a CPU, where this was measured; use bf16 or fp32")


def _schedule_notes(found: Recommendation, result: Document, field: str) -> list[str]:
    """What the horizon was that the rate was tuned under; whoever trains for longer gives it another, on purpose."""
    if found.total_steps is None:
        return []
    name = result.task.optimizer_settings.scheduler if result.task.optimizer_settings else None
    made = f" ({name} of your build_scheduler)" if name else ""
    return [f"measured with a learning-rate schedule over {found.total_steps} steps{made}; {field} would say so"]


def _clipped(found: Recommendation) -> Mapping[str, float | None]:
    """Norm and value of gradient clipping, 0 where it is known that there is none of the kind."""
    if found.gradient_clipping is None:
        return {"norm": None, "value": None}
    return {"norm": found.gradient_clipping.norm or 0.0, "value": found.gradient_clipping.value or 0.0}


def _hf(found: Recommendation, result: Document) -> Values:
    """Fields of `transformers.TrainingArguments`; whatever is not tf32 ran without it."""
    _refuse_fp16_on_cpu("the Trainer", found, result)
    return {
        "per_device_train_batch_size": found.micro_batch_size,
        "gradient_accumulation_steps": found.gradient_accumulation_steps,
        "learning_rate": found.learning_rate,
        "max_grad_norm": _clipped(found)["norm"],
        "bf16": found.precision == "bf16",
        "fp16": found.precision == "fp16",
        "tf32": found.precision == "tf32" if _device(result) in {"cuda", None} else None,
        "use_cpu": True if _device(result) == "cpu" else None,
        **hf_optimizer(found, result),
    }


def _hf_notes(found: Recommendation, result: Document) -> list[str]:
    notes = hf_optimizer_notes(found, result)
    if clipped := _clipped(found)["value"]:
        notes.append(f"no field says that each gradient is clipped at {clipped:g}: do so before the optimizer's step")
    return notes + _schedule_notes(found, result, "max_steps")


def _lightning(found: Recommendation, result: Document) -> Values:
    """Arguments as LightningCLI's configuration nests them; `data` and `model` are classes of the user's."""
    _refuse_fp16_on_cpu("Lightning", found, result)
    return {
        "trainer.accelerator": "cpu" if _device(result) == "cpu" else None,
        "trainer.devices": found.world_size,
        "trainer.precision": {"bf16": "bf16-mixed", "fp16": "16-mixed"}.get(found.precision, "32-true"),
        "trainer.accumulate_grad_batches": found.gradient_accumulation_steps,
        "trainer.gradient_clip_val": _clipped(found)["norm"] or _clipped(found)["value"],
        "trainer.gradient_clip_algorithm": "value" if _clipped(found)["value"] else None,
        "data.batch_size": found.micro_batch_size,
        "model.lr": found.learning_rate,
        **{f"model.{name}": value for name, value in found.optimizer_arguments.items()},
    }


def _lightning_notes(found: Recommendation, result: Document) -> list[str]:
    """The module makes its own optimizer, and names its arguments as it likes."""
    made, optimizer = made_with(found, result), optimizer_of(found, result)
    notes = _tf32_notes(found, result) + optimizer_notes(found, result)
    if optimizer and found.learning_rate is not None:
        arguments = ", ".join(["lr", *(f"{name}={value!r}" for name, value in made.items())])
        notes.append(f"measured with {optimizer}({arguments}), as your configure_optimizers should make it")
    return notes + _schedule_notes(found, result, "trainer.max_steps")


def _tf32_notes(found: Recommendation, result: Document) -> list[str]:  # noqa: ARG001 - one signature for all
    if found.precision != "tf32":
        return []
    return ["no field says tf32: call torch.set_float32_matmul_precision('high') before training"]


def _deepspeed(found: Recommendation, result: Document) -> Values:
    """DeepSpeed's configuration, which checks that train_batch_size is micro-batch × accumulation × ranks.

    Half precision is autocast over fp32 weights, as it was measured; its bf16 and fp16 sections would turn the weights
    themselves to half precision, which is another training with another need of memory.
    """
    half = {"bf16": "bfloat16", "fp16": "float16"}.get(found.precision)
    return {
        "train_batch_size": found.micro_batch_size * found.gradient_accumulation_steps * found.world_size,
        "train_micro_batch_size_per_gpu": found.micro_batch_size,
        "gradient_accumulation_steps": found.gradient_accumulation_steps,
        "gradient_clipping": _clipped(found)["norm"],
        "optimizer.type": optimizer_of(found, result) if found.learning_rate is not None else None,
        "optimizer.params.lr": found.learning_rate,
        "optimizer.params.adam_w_mode": False if optimizer_of(found, result) == "Adam" else None,  # its own default
        **{f"optimizer.params.{name}": value for name, value in made_with(found, result).items()},
        "torch_autocast.enabled": True if half else None,
        "torch_autocast.dtype": half,
    }


def _deepspeed_notes(found: Recommendation, result: Document) -> list[str]:
    notes = _tf32_notes(found, result)
    if found.precision in {"bf16", "fp16"}:
        notes.append("torch_autocast is known to DeepSpeed 0.17.2 and newer; older ones pass it over")
    if clipped := _clipped(found)["value"]:
        notes.append(f"DeepSpeed clips norms only; each gradient was clipped at {clipped:g} here")
    if found.learning_rate is not None:
        if optimizer_of(found, result) is None:
            notes.append("the optimizer's type is not known: add it yourself")
        notes += optimizer_notes(found, result)
    return notes + _schedule_notes(found, result, "total_num_steps of its 'scheduler'")


def _listed(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _env(found: Recommendation, result: Document) -> Values:
    return {
        "BATCH_SIZE": found.micro_batch_size,
        "GRADIENT_ACCUMULATION_STEPS": found.gradient_accumulation_steps,
        "LEARNING_RATE": found.learning_rate,
        "OPTIMIZER": optimizer_of(found, result) if found.learning_rate is not None else None,
        **{name.upper(): _listed(value) for name, value in made_with(found, result).items()},
        "GRADIENT_CLIPPING_NORM": _clipped(found)["norm"] or None,
        "GRADIENT_CLIPPING_VALUE": _clipped(found)["value"] or None,
        "TOTAL_STEPS": found.total_steps,
        "PRECISION": found.precision,
    }


EXPORTS: dict[str, Export] = {
    "hf": Export("HF TrainingArguments", _hf, {_MICRO: "per_device_train_batch_size"}, _json, _hf_notes),
    "lightning": Export(
        "Lightning",
        _lightning,
        {
            _MICRO: "data.batch_size",
            _ACCUMULATION: "trainer.accumulate_grad_batches",
            _RATE: "model.lr",
            "precision": "trainer.precision",
            "world_size": "trainer.devices",
        },
        _yaml,
        _lightning_notes,
        takes_comments=True,
    ),
    "deepspeed": Export(
        "DeepSpeed",
        _deepspeed,
        {
            _MICRO: "train_micro_batch_size_per_gpu",
            _RATE: "optimizer.params.lr",
            "global_batch_size": "train_batch_size",
        },
        _json,
        _deepspeed_notes,
    ),
    "env": Export(
        "env",
        _env,
        {
            _MICRO: "BATCH_SIZE",
            _ACCUMULATION: "GRADIENT_ACCUMULATION_STEPS",
            _RATE: "LEARNING_RATE",
            "precision": "PRECISION",
        },
        _shell,
        optimizer_notes,
        takes_comments=True,
    ),
}
"""What `report --format` writes for another program to train with; `--set` renames its fields."""
