"""The settings that ran, in the words of training libraries: which of their fields carries which of our values."""

from __future__ import annotations

import math
from collections.abc import Mapping

from batchtune.document import Document, Recommendation
from batchtune.errors import UsageError
from batchtune.report.view.lengths import fairseq, has_lengths, lhotse, lhotse_notes
from batchtune.report.view.settings import (
    Export,
    Values,
    as_json,
    as_variables,
    as_yaml,
    launched,
    made_with,
    optimizer_notes,
    optimizer_of,
    several_notes,
    several_of,
)

_MICRO, _ACCUMULATION, _RATE = "micro_batch_size", "gradient_accumulation_steps", "learning_rate"

_HF_OPTIMIZERS = {
    "AdamW": ("adamw_torch", {"weight_decay": "weight_decay", "eps": "adam_epsilon"}, ()),
    "SGD": ("sgd", {"weight_decay": "weight_decay"}, ("momentum", "dampening", "nesterov")),
    "Adagrad": ("adagrad", {"weight_decay": "weight_decay"}, ("lr_decay", "eps")),
    "RMSprop": ("rmsprop", {"weight_decay": "weight_decay"}, ("momentum", "alpha", "eps", "centered")),
}
"""Of torch's optimizers that the Trainer has: its `optim`, the fields of their settings, and those in `optim_args`."""


def _device(result: Document) -> str | None:
    return result.environment.device_type if result.environment else None


def _refuse_fp16_on_cpu(library: str, found: Recommendation, result: Document) -> None:
    if found.precision == "fp16" and _device(result) == "cpu":
        raise UsageError(f"{library} does not train in fp16 on a CPU, where this was measured; use bf16 or fp32")


def _schedule_notes(found: Recommendation, result: Document, field: str) -> list[str]:
    """What the horizon was that the rate was tuned under; whoever trains for longer gives it another, on purpose."""
    known = result.task.optimizer_settings
    maker = known.made_by if known and known.made_by else "build_scheduler"
    made = f" ({known.scheduler} of your {maker})" if known and known.scheduler else ""
    if found.total_steps is None:
        return [f"measured with a learning-rate schedule{made}, which no field says"] if made else []
    return [f"measured with a learning-rate schedule over {found.total_steps} steps{made}; {field} would say so"]


def _rank_notes(found: Recommendation, command: str = "torchrun --nproc-per-node") -> list[str]:
    """How the ranks are started, where there are several."""
    return [launched(found, command)] if found.world_size > 1 else []


def _clipped(found: Recommendation) -> Mapping[str, float | None]:
    """Norm and value of gradient clipping, 0 where it is known that there is none of the kind."""
    if found.gradient_clipping is None:
        return {"norm": None, "value": None}
    return {"norm": found.gradient_clipping.norm or 0.0, "value": found.gradient_clipping.value or 0.0}


def hf_optimizer(found: Recommendation, result: Document) -> Values:
    """The optimizer and, where the task has none, the constant schedule: the Trainer's own would be linear.

    Raises:
        UsageError: the Trainer has no such optimizer; the learning rate is worth nothing with another.
    """
    if found.learning_rate is None:
        return {}
    optimizer, known = optimizer_of(found, result), result.task.optimizer_settings
    own = known.arguments if known else {}
    if "optim" in own:  # a Trainer makes it by these very fields
        return dict(own)
    if several_of(found, result):
        why = "and a Trainer has one optimizer; take --format env, and a loop of your own"
        raise UsageError(f"the learning rate is one for {optimizer} together, {why}")
    if optimizer is not None and optimizer not in _HF_OPTIMIZERS:
        raise UsageError(
            f"the learning rate is one for {optimizer}, which TrainingArguments cannot name; take --format env, and "
            "give your own to the Trainer: Trainer(..., optimizers=(build_optimizer(model, lr), None))"
        )
    name, fields, arguments = _HF_OPTIMIZERS[optimizer or "AdamW"]
    made = made_with(found, result)
    betas = made.get("betas")
    first, second = betas[:2] if isinstance(betas, list | tuple) else (None, None)
    return {
        "optim": name if optimizer else None,
        **{theirs: made.get(ours) for ours, theirs in fields.items()},
        "adam_beta1": first,
        "adam_beta2": second,
        "optim_args": ",".join(f"{each}={made[each]}" for each in arguments if each in made) or None,
        "lr_scheduler_type": "constant" if known and not known.scheduler and found.total_steps is None else None,
        **own,
    }


def hf_optimizer_notes(found: Recommendation, result: Document) -> list[str]:
    """What the Trainer does otherwise than it was measured, or cannot be told."""
    known = result.task.optimizer_settings
    if known and "optim" in known.arguments:
        return []
    notes = optimizer_notes(found, result)
    _, fields, arguments = _HF_OPTIMIZERS.get(optimizer_of(found, result) or "AdamW", ("", {}, ()))
    made = made_with(found, result)
    for name, value in made.items():
        if value is not False and name not in {*fields, *arguments, "betas"}:
            notes.append(f"no field says {name}={value!r}: give it to your optimizer")
    if made.get("weight_decay"):
        notes.append("the Trainer decays no biases and no norms; what was measured decays what build_optimizer says")
    return notes


def _hf(found: Recommendation, result: Document) -> Values:
    """Fields of `transformers.TrainingArguments`."""
    _refuse_fp16_on_cpu("the Trainer", found, result)
    return {
        "per_device_train_batch_size": found.micro_batch_size,
        "gradient_accumulation_steps": found.gradient_accumulation_steps,
        "learning_rate": found.learning_rate,
        "max_grad_norm": _clipped(found)["norm"],
        "bf16": found.precision == "bf16",
        "fp16": found.precision == "fp16",
        "tf32": True if found.precision == "tf32" else None,
        "use_cpu": True if _device(result) == "cpu" else None,
        "fsdp": True if found.strategy == "fsdp" else None,  # Transformers 5: FSDP2, each layer of its own
        "gradient_checkpointing": found.activation_checkpointing,
        "train_sampling_strategy": "group_by_length" if has_lengths(result) else None,
        **hf_optimizer(found, result),
    }


def _hf_notes(found: Recommendation, result: Document) -> list[str]:
    notes = hf_optimizer_notes(found, result)
    if clipped := _clipped(found)["value"]:
        notes.append(f"no field says that each gradient is clipped at {clipped:g}: do so before the optimizer's step")
    if has_lengths(result):
        notes.append("the Trainer has one batch size for all lengths; batchtune.LengthBatchSampler has one for each")
    return notes + _schedule_notes(found, result, "max_steps") + _rank_notes(found)


def _lightning(found: Recommendation, result: Document) -> Values:
    """Arguments as LightningCLI's configuration nests them; `data` and `model` are classes of the user's."""
    _refuse_fp16_on_cpu("Lightning", found, result)
    return {
        "trainer.accelerator": "cpu" if _device(result) == "cpu" else None,
        "trainer.devices": found.world_size // (found.nodes or 1),
        "trainer.num_nodes": found.nodes,
        "trainer.strategy": found.strategy,
        "trainer.precision": {"bf16": "bf16-mixed", "fp16": "16-mixed"}.get(found.precision, "32-true"),
        "trainer.accumulate_grad_batches": found.gradient_accumulation_steps,
        "trainer.gradient_clip_val": _clipped(found)["norm"] or _clipped(found)["value"] or None,
        "trainer.gradient_clip_algorithm": "value" if _clipped(found)["value"] else None,
        "data.batch_size": found.micro_batch_size,
        "model.lr": _module_rate(found, result),
        "model.activation_checkpointing": found.activation_checkpointing,
        **{f"model.{name}": value for name, value in found.optimizer_arguments.items()},
    }


def _module_rate(found: Recommendation, result: Document) -> float | None:
    """The module's own `lr`: the highest of its learning rates is so many times as much; None where nobody knows."""
    known = result.task.optimizer_settings
    if found.learning_rate is None or not known or not known.made_by:
        return found.learning_rate
    if known.lr_ratio is None:
        return None if "lr" in known.differing else found.learning_rate
    is_same = math.isclose(known.lr_ratio, 1.0)
    return found.learning_rate if is_same else float(f"{found.learning_rate / known.lr_ratio:.6g}")


def _lightning_notes(found: Recommendation, result: Document) -> list[str]:
    """The module makes its own optimizer, and names its arguments as it likes."""
    made, optimizer = made_with(found, result), optimizer_of(found, result)
    notes = _tf32_notes(found) + optimizer_notes(found, result)
    if optimizer and found.learning_rate is not None:
        arguments = ", ".join(["lr", *(f"{name}={value!r}" for name, value in made.items())])
        written = optimizer if several_of(found, result) else f"{optimizer}({arguments})"
        notes.append(f"measured with {written}, as your configure_optimizers should make it")
        if _module_rate(found, result) != found.learning_rate:
            notes.append(f"{found.learning_rate:g} is the highest learning rate of its groups; ApplyResult sets all")
    return notes + _schedule_notes(found, result, "trainer.max_steps")


def _tf32_notes(found: Recommendation) -> list[str]:
    if found.precision != "tf32":
        return []
    return ["no field says tf32: call torch.set_float32_matmul_precision('high') before training"]


def _deepspeed(found: Recommendation, result: Document) -> Values:
    """DeepSpeed's configuration, which checks that train_batch_size is micro-batch × accumulation × ranks.

    Half precision is autocast over fp32 weights, as it was measured; its bf16 and fp16 sections would turn the weights
    themselves to half precision, which is another training with another need of memory.
    """
    half = {"bf16": "bfloat16", "fp16": "float16"}.get(found.precision)
    kind, made = optimizer_of(found, result), made_with(found, result)
    if kind == "Adam":  # its own default is decoupled, by a name of its own
        made["adam_w_mode"] = bool(made.pop("decoupled_weight_decay", False))
    optimizer = {
        "type": kind,
        "params.lr": found.learning_rate,
        **{f"params.{name}": value for name, value in made.items()},
    }
    is_one = found.learning_rate is not None and not several_of(found, result)
    return {
        "train_batch_size": found.micro_batch_size * found.gradient_accumulation_steps * found.world_size,
        "train_micro_batch_size_per_gpu": found.micro_batch_size,
        "gradient_accumulation_steps": found.gradient_accumulation_steps,
        "gradient_clipping": _clipped(found)["norm"],
        "zero_optimization.stage": 3 if found.strategy == "fsdp" else None,  # both shard all there is
        **{f"optimizer.{name}": value for name, value in optimizer.items() if is_one},
        "torch_autocast.enabled": True if half else None,
        "torch_autocast.dtype": half,
    }


def _deepspeed_notes(found: Recommendation, result: Document) -> list[str]:
    notes = _tf32_notes(found)
    if found.activation_checkpointing is not None:
        how = "with" if found.activation_checkpointing else "without"
        notes.append(f"measured {how} activation checkpointing, which your model does: DeepSpeed has no switch for it")
    if found.precision in {"bf16", "fp16"}:
        notes.append("torch_autocast is known to DeepSpeed 0.17.2 and newer; older ones pass it over")
    if clipped := _clipped(found)["value"]:
        notes.append(f"DeepSpeed clips norms only; each gradient was clipped at {clipped:g} here")
    if found.learning_rate is not None:
        if optimizer_of(found, result) is None:
            notes.append("the optimizer's type is not known: add it yourself")
        engines = "a DeepSpeed engine steps one, so give each of them deepspeed.initialize(optimizer=...)"
        notes += several_notes(found, result, "'optimizer'", engines) + optimizer_notes(found, result)
    notes += _schedule_notes(found, result, "total_num_steps of its 'scheduler'")
    return notes + _rank_notes(found, "deepspeed --num_gpus")


def _env(found: Recommendation, result: Document) -> Values:
    made = made_with(found, result).items()
    is_one = found.learning_rate is not None and not several_of(found, result)
    return {
        "BATCH_SIZE": found.micro_batch_size,
        "GRADIENT_ACCUMULATION_STEPS": found.gradient_accumulation_steps,
        "LEARNING_RATE": found.learning_rate,
        "OPTIMIZER": optimizer_of(found, result) if is_one else None,
        **{name.upper(): ",".join(map(str, each)) if isinstance(each, list) else each for name, each in made},
        "GRADIENT_CLIPPING_NORM": _clipped(found)["norm"] or None,
        "GRADIENT_CLIPPING_VALUE": _clipped(found)["value"] or None,
        "TOTAL_STEPS": found.total_steps,
        "NNODES": found.nodes,  # WORLD_SIZE is the launcher's own
        "NPROC_PER_NODE": found.world_size // (found.nodes or 1) if found.world_size > 1 else None,
        "STRATEGY": found.strategy,
        "ACTIVATION_CHECKPOINTING": None
        if found.activation_checkpointing is None
        else int(found.activation_checkpointing),
        "PRECISION": found.precision,
    }


def _env_notes(found: Recommendation, result: Document) -> list[str]:
    several = several_notes(found, result, "OPTIMIZER", "let that make them")
    schedule = _schedule_notes(found, result, "TOTAL_STEPS") if found.total_steps is None else []
    return several + optimizer_notes(found, result) + schedule + _rank_notes(found)


EXPORTS: dict[str, Export] = {
    "hf": Export("HF TrainingArguments", _hf, {_MICRO: "per_device_train_batch_size"}, as_json, _hf_notes),
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
        as_yaml,
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
        as_json,
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
        as_variables,
        _env_notes,
        takes_comments=True,
    ),
    "lhotse": Export("lhotse", lhotse, {}, as_yaml, lhotse_notes, takes_comments=True),
    "fairseq": Export("fairseq", fairseq, {}, as_yaml, takes_comments=True),
}
"""What `report --format` writes for another program to train with; `--set` renames its fields."""
