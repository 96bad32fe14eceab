"""The settings that ran, in the words of training libraries: which of their fields carries which of our values."""

from __future__ import annotations

import math

from batchtune.errors import UsageError
from batchtune.report.view.lengths import fairseq, has_lengths, lhotse, lhotse_notes
from batchtune.report.view.settings import (
    Export,
    Fields,
    Ran,
    as_json,
    as_variables,
    as_yaml,
    launched,
    optimizer_notes,
    several_notes,
)

_MICRO, _ACCUMULATION, _RATE = "micro_batch_size", "gradient_accumulation_steps", "learning_rate"

_HF_OPTIMIZERS = {
    "AdamW": ("adamw_torch", {"weight_decay": "weight_decay", "eps": "adam_epsilon"}, ()),
    "SGD": ("sgd", {"weight_decay": "weight_decay"}, ("momentum", "dampening", "nesterov")),
    "Adagrad": ("adagrad", {"weight_decay": "weight_decay"}, ("lr_decay", "eps")),
    "RMSprop": ("rmsprop", {"weight_decay": "weight_decay"}, ("momentum", "alpha", "eps", "centered")),
}
"""Of torch's optimizers that the Trainer has: its `optim`, the fields of their settings, and those in `optim_args`."""


def _is_on_cpu(ran: Ran) -> bool:
    return ran.result.environment is not None and ran.result.environment.device_type == "cpu"


def _refuse_fp16_on_cpu(library: str, ran: Ran) -> None:
    if ran.found.precision == "fp16" and _is_on_cpu(ran):
        raise UsageError(f"{library} does not train in fp16 on a CPU, where this was measured; use bf16 or fp32")


def _schedule_notes(ran: Ran, field: str, instead: str = "") -> list[str]:
    """What the horizon was that the rate was tuned under; whoever trains for longer gives it another, on purpose.

    `instead` is what the library does that is told of no schedule.
    """
    scheduler, steps = ran.known.scheduler, ran.found.total_steps
    made = f" ({scheduler} of your {ran.known.made_by or 'build_scheduler'})" if scheduler else ""
    if steps is None:
        return [f"measured with a learning-rate schedule{made}, which no field says{instead}"] if made else []
    return [f"measured with a learning-rate schedule over {steps} steps{made}; {field} would say so{instead}"]


def _rank_notes(ran: Ran, command: str = "torchrun --nproc-per-node") -> list[str]:
    """How the ranks are started, where there are several."""
    return [launched(ran.found, command)] if ran.found.world_size > 1 else []


def _of_torch(ran: Ran) -> str | None:
    """The optimizer by the name that the Trainer may know: Adam that decays no weights steps as AdamW does."""
    return "AdamW" if ran.optimizer == "Adam" and ran.made_with.get("weight_decay") == 0 else ran.optimizer


def _hf_optimizer(ran: Ran) -> Fields:
    """The optimizer and, where the task has none, the constant schedule: the Trainer's own would be linear.

    Raises:
        UsageError: the Trainer has no such optimizer; the learning rate is worth nothing with another.
    """
    if ran.found.learning_rate is None:
        return {}
    optimizer, known, made = _of_torch(ran), ran.result.task.optimizer_settings, ran.made_with
    if "optim" in ran.known.arguments:  # a Trainer makes it by these very fields
        return Fields(ran.known.arguments)
    if ran.several:
        why = "and a Trainer has one optimizer; take --format env, and a loop of your own"
        raise UsageError(f"the learning rate is one for {optimizer} together, {why}")
    if optimizer is not None and optimizer not in _HF_OPTIMIZERS:
        raise UsageError(
            f"the learning rate is one for {optimizer}, which TrainingArguments cannot name; take --format env, and "
            "give your own to the Trainer: Trainer(..., optimizers=(build_optimizer(model, lr), None))"
        )
    name, fields, arguments = _HF_OPTIMIZERS[optimizer or "AdamW"]
    betas = made.get("betas")
    first, second = betas[:2] if isinstance(betas, list | tuple) else (None, None)
    return {
        "optim": name if optimizer else None,
        **{theirs: made.get(ours) for ours, theirs in fields.items()},
        "adam_beta1": first,
        "adam_beta2": second,
        "optim_args": ",".join(f"{each}={made[each]}" for each in arguments if each in made) or None,
        "lr_scheduler_type": "constant" if known and not known.scheduler and ran.found.total_steps is None else None,
        **ran.known.arguments,
    }


def _hf_optimizer_notes(ran: Ran) -> list[str]:
    """What the Trainer does otherwise than it was measured, or cannot be told."""
    if "optim" in ran.known.arguments:
        return []
    _, fields, arguments = _HF_OPTIMIZERS.get(_of_torch(ran) or "AdamW", ("", {}, ()))
    told = {*fields, *arguments, "betas"}
    notes = optimizer_notes(ran) + [
        f"no field says {name}={value!r}: give it to your optimizer"
        for name, value in ran.made_with.items()
        if value is not False and name not in told
    ]
    if ran.made_with.get("weight_decay"):
        notes.append("the Trainer decays no biases and no norms; what was measured decays what build_optimizer says")
    return notes


def _hf(ran: Ran) -> Fields:
    """Fields of `transformers.TrainingArguments`."""
    _refuse_fp16_on_cpu("the Trainer", ran)
    found = ran.found
    return {
        "per_device_train_batch_size": found.micro_batch_size,
        "gradient_accumulation_steps": found.gradient_accumulation_steps,
        "learning_rate": found.learning_rate,
        "max_grad_norm": ran.norm,
        "bf16": found.precision == "bf16",
        "fp16": found.precision == "fp16",
        "tf32": True if found.precision == "tf32" else None,
        "use_cpu": True if _is_on_cpu(ran) else None,
        "fsdp": True if found.strategy == "fsdp" else None,  # Transformers 5: FSDP2, each layer of its own
        "gradient_checkpointing": found.activation_checkpointing,
        "train_sampling_strategy": "group_by_length" if has_lengths(ran.result) else None,
        **_hf_optimizer(ran),
    }


def _hf_notes(ran: Ran) -> list[str]:
    notes = _hf_optimizer_notes(ran)
    if clipped := ran.clipped:
        notes.append(f"no field says that each gradient is clipped at {clipped:g}: do so before the optimizer's step")
    if has_lengths(ran.result):
        notes.append("the Trainer has one batch size for all lengths; batchtune.LengthBatchSampler has one for each")
    if not ran.known.made_by and "lr_scheduler_type" in ran.known.arguments:  # a ReduceLROnPlateau, which is all said
        return notes + _rank_notes(ran)
    instead = "; the Trainer's own schedule, linear to 0, was not measured: pass yours, Trainer(optimizers=(…, …))"
    theirs = "" if "lr_scheduler_type" in ran.known.arguments else instead
    return notes + _schedule_notes(ran, "max_steps", theirs) + _rank_notes(ran)


def _lightning(ran: Ran) -> Fields:
    """Arguments as LightningCLI's configuration nests them; `data` and `model` are classes of the user's."""
    _refuse_fp16_on_cpu("Lightning", ran)
    found = ran.found
    return {
        "trainer.accelerator": "cpu" if _is_on_cpu(ran) else None,
        "trainer.devices": found.world_size // (found.nodes or 1),
        "trainer.num_nodes": found.nodes,
        "trainer.strategy": found.strategy,
        "trainer.precision": {"bf16": "bf16-mixed", "fp16": "16-mixed"}.get(found.precision, "32-true"),
        "trainer.accumulate_grad_batches": found.gradient_accumulation_steps,
        "trainer.gradient_clip_val": ran.norm or ran.clipped,
        "trainer.gradient_clip_algorithm": "value" if ran.clipped else None,
        "data.batch_size": found.micro_batch_size,
        "model.lr": _module_rate(ran),
        "model.activation_checkpointing": found.activation_checkpointing,
        **{f"model.{name}": value for name, value in found.optimizer_arguments.items()},
    }


def _module_rate(ran: Ran) -> float | None:
    """The module's own `lr`: the highest of its learning rates is so many times as much; None where nobody knows."""
    rate, known = ran.found.learning_rate, ran.known
    if rate is None or not known.made_by or (known.lr_ratio is not None and math.isclose(known.lr_ratio, 1.0)):
        return rate
    if known.lr_ratio is None:
        return None if "lr" in known.differing else rate
    return float(f"{rate / known.lr_ratio:.6g}")


def _lightning_notes(ran: Ran) -> list[str]:
    """The module makes its own optimizer, and names its arguments as it likes."""
    notes, rate = _tf32_notes(ran) + optimizer_notes(ran), ran.found.learning_rate
    if ran.optimizer and rate is not None:
        arguments = ", ".join(["lr", *(f"{name}={value!r}" for name, value in ran.made_with.items())])
        written = ran.several or f"{ran.optimizer}({arguments})"
        notes.append(f"measured with {written}, as your configure_optimizers should make it")
        if _module_rate(ran) != rate:
            notes.append(f"{rate:g} is the highest learning rate of its groups; ApplyResult sets all")
    return notes + _schedule_notes(ran, "trainer.max_steps")


def _tf32_notes(ran: Ran) -> list[str]:
    call = "torch.set_float32_matmul_precision('high')"
    return [f"no field says tf32: call {call} before training"] if ran.found.precision == "tf32" else []


def _deepspeed(ran: Ran) -> Fields:
    """DeepSpeed's configuration, which checks that train_batch_size is micro-batch × accumulation × ranks.

    Half precision is autocast over fp32 weights, as it was measured; its bf16 and fp16 sections would turn the weights
    themselves to half precision, which is another training with another need of memory.
    """
    found, made = ran.found, ran.made_with
    half = {"bf16": "bfloat16", "fp16": "float16"}.get(found.precision)
    if ran.optimizer == "Adam":  # its own default is decoupled, by a name of its own
        made["adam_w_mode"] = bool(made.pop("decoupled_weight_decay", False))
    optimizer: Fields = {}
    if found.learning_rate is not None and not ran.several:
        optimizer = {"optimizer.type": ran.optimizer, "optimizer.params.lr": found.learning_rate}
        optimizer |= {f"optimizer.params.{name}": value for name, value in made.items() if name not in ran.foreign}
    return {
        "train_batch_size": found.micro_batch_size * found.gradient_accumulation_steps * found.world_size,
        "train_micro_batch_size_per_gpu": found.micro_batch_size,
        "gradient_accumulation_steps": found.gradient_accumulation_steps,
        "gradient_clipping": ran.norm,
        "zero_optimization.stage": 3 if found.strategy == "fsdp" else None,  # both shard all there is
        **optimizer,
        "torch_autocast.enabled": True if half else None,
        "torch_autocast.dtype": half,
    }


def _deepspeed_notes(ran: Ran) -> list[str]:
    notes, found = _tf32_notes(ran), ran.found
    if found.activation_checkpointing is not None:
        how = "with" if found.activation_checkpointing else "without"
        notes.append(f"measured {how} activation checkpointing, which your model does: DeepSpeed has no switch for it")
    if found.precision in {"bf16", "fp16"}:
        notes.append("torch_autocast is known to DeepSpeed 0.17.2 and newer; older ones pass it over")
    if ran.clipped:
        notes.append(f"DeepSpeed clips norms only; each gradient was clipped at {ran.clipped:g} here")
    if found.learning_rate is not None and ran.optimizer is None:
        notes.append("the optimizer's type is not known: add it yourself")
    engines = "a DeepSpeed engine steps one, so give each of them deepspeed.initialize(optimizer=...)"
    notes += several_notes(ran, "'optimizer'", engines) + optimizer_notes(ran)
    given = [f"{name}={found.optimizer_arguments[name]!r}" for name in sorted(ran.foreign)]
    notes += [f"no field says {each}, which is build_optimizer's own" for each in given]
    notes += _schedule_notes(ran, "total_num_steps of its 'scheduler'")
    return notes + _rank_notes(ran, "deepspeed --num_gpus")


def _env(ran: Ran) -> Fields:
    found, again = ran.found, ran.found.activation_checkpointing
    return {
        "BATCH_SIZE": found.micro_batch_size,
        "GRADIENT_ACCUMULATION_STEPS": found.gradient_accumulation_steps,
        "LEARNING_RATE": found.learning_rate,
        "OPTIMIZER": None if found.learning_rate is None or ran.several else ran.optimizer,
        **{
            name.upper(): ",".join(map(str, value)) if isinstance(value, list) else value
            for name, value in ran.made_with.items()
        },
        "GRADIENT_CLIPPING_NORM": ran.norm or None,
        "GRADIENT_CLIPPING_VALUE": ran.clipped,
        "TOTAL_STEPS": found.total_steps,
        "NNODES": found.nodes,  # WORLD_SIZE is the launcher's own
        "NPROC_PER_NODE": found.world_size // (found.nodes or 1) if found.world_size > 1 else None,
        "STRATEGY": found.strategy,
        "ACTIVATION_CHECKPOINTING": None if again is None else int(again),
        "PRECISION": found.precision,
    }


def _env_notes(ran: Ran) -> list[str]:
    schedule = _schedule_notes(ran, "TOTAL_STEPS") if ran.found.total_steps is None else []
    return several_notes(ran, "OPTIMIZER", "let that make them") + optimizer_notes(ran) + schedule + _rank_notes(ran)


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
