"""What is exported to training libraries: exactly what ran, in each library's words, or one line that says why not."""

import html
import json
import re
import shlex

import pytest
import yaml

from batchtune.document import DataParallel, Environment, GradientClipping, OptimizerSettings, TaskInfo
from batchtune.errors import UsageError
from batchtune.report.formats import to_html
from batchtune.report.view.read import view_of
from batchtune.report.view.settings import pytorch
from batchtune.report.view.trainers import EXPORTS

OF_ONE_BATCH = sorted(EXPORTS.keys() - {"lhotse", "fairseq"})  # the others are of a probe of many lengths


def on(device_type, result, **recommended):
    """The same result as if measured on such a device, with its recommendation changed."""
    found = result.recommendation.model_copy(update=recommended) if result.recommendation else None
    where = Environment(device="some device", device_type=device_type)
    return result.model_copy(update={"environment": where, "recommendation": found})


def hf(result, *renames):
    return json.loads(EXPORTS["hf"].text(result, renames))


def lightning(result, *renames):
    return yaml.safe_load(EXPORTS["lightning"].text(result, renames))


def deepspeed(result, *renames):
    return json.loads(EXPORTS["deepspeed"].text(result, renames))


def test_the_trainer_gets_micro_batch_accumulation_rate_and_precision(tuned):
    assert hf(on("cuda", tuned)) == {
        "per_device_train_batch_size": 128,
        "gradient_accumulation_steps": 2,
        "learning_rate": 3e-4,
        "bf16": True,
        "fp16": False,
    }


def test_the_trainer_is_kept_on_the_cpu_where_that_was_measured(tuned):
    exported = hf(on("cpu", tuned, precision="fp32"))
    assert exported["use_cpu"] is True
    assert not exported["bf16"]


@pytest.mark.parametrize(("precision", "field"), [("bf16", "bf16"), ("fp16", "fp16"), ("tf32", "tf32"), ("fp32", None)])
def test_the_trainer_has_one_switch_for_each_precision(tuned, precision, field):
    exported = hf(on("cuda", tuned, precision=precision))
    assert [name for name in ("bf16", "fp16", "tf32") if exported.get(name)] == ([field] if field else [])


def test_lightning_gets_nested_arguments(tuned):
    assert lightning(on("cuda", tuned)) == {
        "trainer": {"devices": 1, "precision": "bf16-mixed", "accumulate_grad_batches": 2},
        "data": {"batch_size": 128},
        "model": {"lr": 3e-4},
    }
    assert lightning(on("cpu", tuned))["trainer"]["accelerator"] == "cpu"


@pytest.mark.parametrize(
    ("precision", "theirs"),
    [("bf16", "bf16-mixed"), ("fp16", "16-mixed"), ("fp32", "32-true"), ("tf32", "32-true")],
)
def test_lightning_has_a_word_for_each_precision(tuned, precision, theirs):
    assert lightning(on("cuda", tuned, precision=precision))["trainer"]["precision"] == theirs


def test_deepspeed_gets_a_train_batch_size_that_is_the_product_it_asserts(tuned):
    exported = deepspeed(on("cuda", tuned, world_size=4, global_batch_size=1024))
    assert exported["train_micro_batch_size_per_gpu"] == 128
    assert exported["gradient_accumulation_steps"] == 2
    assert exported["train_batch_size"] == 128 * 2 * 4
    assert exported["optimizer"] == {"params": {"lr": 3e-4}}


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", None)])
def test_deepspeed_trains_in_half_precision_as_it_was_measured_by_autocast_over_full_weights(tuned, precision, dtype):
    exported = deepspeed(on("cuda", tuned, precision=precision))
    assert exported.get("torch_autocast") == ({"enabled": True, "dtype": dtype} if dtype else None)
    assert "bf16" not in exported


def test_deepspeed_gets_the_optimizer_that_the_learning_rate_was_found_with(tuned):
    with_sgd = tuned.model_copy(update={"task": TaskInfo(path="model.py", optimizer="SGD")})
    assert deepspeed(with_sgd)["optimizer"] == {"type": "SGD", "params": {"lr": 3e-4}}


def made_with(result, optimizer, *, differing=(), scheduler=None, adapted=None, **values):
    """The same result, of a task that makes this optimizer; `adapted` is known of one of another library."""
    settings = OptimizerSettings(values=values, differing=list(differing), scheduler=scheduler, **adapted or {})
    return result.model_copy(
        update={"task": TaskInfo(path="model.py", optimizer=optimizer, optimizer_settings=settings)}
    )


SGD = {"momentum": 0.9, "dampening": 0, "weight_decay": 1e-4, "nesterov": True}
ADAMW = {"betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0.1, "amsgrad": False}


def test_the_trainer_makes_the_optimizer_that_was_measured_and_keeps_its_rate_constant(tuned):
    sgd = hf(made_with(tuned, "SGD", **SGD))
    assert (sgd["optim"], sgd["optim_args"]) == ("sgd", "momentum=0.9,dampening=0,nesterov=True")
    assert (sgd["weight_decay"], sgd["lr_scheduler_type"]) == (1e-4, "constant")
    adamw = hf(made_with(tuned, "AdamW", **ADAMW))
    assert (adamw["optim"], adamw["adam_beta1"], adamw["adam_beta2"], adamw["adam_epsilon"]) == (
        "adamw_torch", 0.8, 0.95, 1e-7,
    )  # fmt: skip
    assert "optim_args" not in adamw


def test_a_trainer_gets_back_the_arguments_that_made_its_optimizer_and_schedule(tuned):
    arguments = {"optim": "adafactor", "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 20}
    result = made_with(
        tuned,
        "Adafactor",
        differing=["weight_decay"],
        scheduler="LambdaLR",
        adapted={"made_by": "Trainer", "arguments": arguments},
    )
    result = on("cuda", result, total_steps=500)
    exported = hf(result)
    assert arguments.items() <= exported.items()
    assert exported["learning_rate"] == 3e-4
    notes = EXPORTS["hf"].said_beside(result)
    assert not any("build_" in note for note in notes)
    assert any("(LambdaLR of your Trainer)" in note for note in notes)


@pytest.mark.parametrize(("ratio", "differing", "rate"), [(10.0, ["lr"], 3e-5), (1.0, ["lr"], 3e-4), (None, [], 3e-4)])
def test_a_module_gets_its_own_learning_rate_of_which_the_highest_is_a_multiple(tuned, ratio, differing, rate):
    known = {"made_by": "configure_optimizers", "lr_ratio": ratio}
    result = made_with(tuned, "AdamW + SGD", differing=differing, adapted=known)
    assert lightning(result)["model"]["lr"] == pytest.approx(rate)
    to_the_last_digit = on("cuda", result, learning_rate=1 / 3)
    assert (lightning(to_the_last_digit)["model"]["lr"] == 1 / 3) == (rate == 3e-4)
    notes = "; ".join(EXPORTS["lightning"].said_beside(result))
    assert "measured with AdamW + SGD, as your" in notes
    assert ("is the highest learning rate of its groups; ApplyResult sets all" in notes) == (rate != 3e-4)


def test_several_optimizers_are_not_written_as_the_call_of_one(tuned):
    made = made_with(tuned, "AdamW + SGD", adapted={"made_by": "configure_optimizers"})
    assert "# optimizers: AdamW + SGD, as your configure_optimizers makes them" in pytorch(made)
    assert "as your build_optimizer makes them" in pytorch(made_with(tuned, "Muon + AdamW"))
    assert "# optimizers: 2 x Adam, as your build_optimizer makes them" in pytorch(made_with(tuned, "2 x Adam"))
    assert "measured with 2 x Adam, as" in " ".join(EXPORTS["lightning"].said_beside(made_with(tuned, "2 x Adam")))


@pytest.mark.parametrize("optimizers", ["SparseAdam + Adam", "2 x Adam", "2 x AdamW + SGD"])
def test_where_there_is_room_for_one_optimizer_several_are_left_out_and_what_to_do_is_said(tuned, optimizers):
    made = made_with(on("cuda", tuned), optimizers, betas=[0.0, 0.9])
    assert "optimizer" not in deepspeed(made)
    engines, *_ = EXPORTS["deepspeed"].said_beside(made)[1:]  # the first is of its autocast
    assert engines.startswith(f"'optimizer' names one, and is left out: {optimizers} are made by your build_optimizer ")
    assert "with lr=0.0003, betas=[0.0, 0.9]; a DeepSpeed engine steps one" in engines
    commented, *fields = EXPORTS["env"].text(made).splitlines()
    assert commented.startswith(
        f"# OPTIMIZER names one, and is left out: {optimizers} are made by your build_optimizer"
    )
    assert not any(field.startswith("OPTIMIZER=") for field in fields)
    assert "LEARNING_RATE=0.0003" in fields


@pytest.mark.parametrize("optimizers", ["Muon + AdamW", "2 x AdamW"])
def test_the_trainer_has_one_optimizer(tuned, optimizers):
    with pytest.raises(UsageError, match=f"one for {re.escape(optimizers)} together, and a Trainer has one optimizer"):
        hf(made_with(tuned, optimizers))
    assert "HF TrainingArguments" not in view_of(made_with(tuned, optimizers)).settings


def test_a_module_of_several_learning_rates_without_one_of_its_own_is_given_none(tuned):
    result = made_with(tuned, "AdamW + SGD", differing=["lr"], adapted={"made_by": "configure_optimizers"})
    assert "lr" not in lightning(result).get("model", {})


@pytest.mark.parametrize("optimizer", ["LBFGS", "Adam"])
def test_the_trainer_is_given_no_learning_rate_of_an_optimizer_that_it_cannot_name(tuned, optimizer):
    with pytest.raises(UsageError, match="which TrainingArguments cannot name; take --format env"):
        hf(made_with(tuned, optimizer))
    assert "HF TrainingArguments" not in view_of(made_with(tuned, optimizer)).settings


def test_adam_that_decays_no_weights_is_the_trainers_adamw(tuned):
    made = {"betas": [0.9, 0.98], "eps": 1e-9, "decoupled_weight_decay": False}
    told = hf(made_with(tuned, "Adam", weight_decay=0, **made))
    assert (told["optim"], told["weight_decay"], told["adam_beta2"], told["adam_epsilon"]) == (
        "adamw_torch",
        0,
        0.98,
        1e-9,
    )
    with pytest.raises(UsageError, match="one for Adam, which TrainingArguments cannot name"):
        hf(made_with(tuned, "Adam", weight_decay=0.1, **made))


def test_deepspeed_gets_the_whole_optimizer(tuned):
    assert deepspeed(made_with(tuned, "SGD", **SGD))["optimizer"] == {"type": "SGD", "params": {"lr": 3e-4} | SGD}
    assert EXPORTS["deepspeed"].said_beside(on("cuda", made_with(tuned, "SGD", **SGD), precision="fp32")) == []
    assert deepspeed(made_with(tuned, "Adam", **ADAMW))["optimizer"]["params"]["adam_w_mode"] is False


@pytest.mark.parametrize("decoupled", [{}, {"decoupled_weight_decay": False}, {"decoupled_weight_decay": True}])
def test_deepspeed_has_a_name_of_its_own_for_how_adam_decays_its_weights(tuned, decoupled):
    made = deepspeed(made_with(tuned, "Adam", weight_decay=0.1, **decoupled))["optimizer"]["params"]
    assert made == {"lr": 3e-4, "weight_decay": 0.1, "adam_w_mode": any(decoupled.values())}


def test_what_takes_comments_says_in_them_what_its_fields_cannot(tuned):
    text = EXPORTS["lightning"].text(made_with(tuned, "SGD", **SGD))
    line = "# measured with SGD(lr, momentum=0.9, dampening=0, weight_decay=0.0001, nesterov=True)"
    assert text.startswith(line)
    assert yaml.safe_load(text)["model"] == {"lr": 3e-4}
    shell = EXPORTS["env"].text(made_with(tuned, "AdamW", differing=["weight_decay"], betas=[0.9, 0.99])).splitlines()
    assert shell[0].startswith("# groups of parameters differ in weight_decay")
    assert {"OPTIMIZER=AdamW", "BETAS=0.9,0.99"} < set(shell)
    assert "# optimizer: SGD(model.parameters(), lr=learning_rate, momentum=0.9" in pytorch(
        made_with(tuned, "SGD", **SGD)
    )


def test_a_page_says_beside_each_text_what_the_terminal_says_beside_it(tuned):
    result = made_with(tuned, "SGD", differing=["lr"], scheduler="OneCycleLR", **SGD)
    view = view_of(on("cuda", result, total_steps=1200))
    page = to_html(on("cuda", result, total_steps=1200))
    for name in OF_ONE_BATCH:
        export = EXPORTS[name]
        said = export.said_beside(on("cuda", result, total_steps=1200))
        assert said
        assert view.notes[export.title] == said, name
        assert all(html.escape(note, quote=True).replace("&#x27;", "&#39;") in page for note in said)


def test_the_optimizer_that_an_argument_chose_goes_before_the_one_of_today(tuned):
    task = TaskInfo(path="model.py", optimizer="SGD")
    chosen = on("cuda", tuned, optimizer="AdamW", optimizer_arguments={"kind": "adamw"}).model_copy(
        update={"task": task}
    )
    assert deepspeed(chosen)["optimizer"]["type"] == "AdamW"
    assert not any("SGD" in note for note in EXPORTS["hf"].said_beside(chosen))


def test_further_arguments_of_the_optimizer_that_were_searched_come_along(tuned):
    searched = on("cuda", tuned, optimizer_arguments={"weight_decay": 0.05, "nesterov": True})
    assert hf(searched)["weight_decay"] == 0.05
    assert "no field says nesterov=True: give it to your optimizer" in EXPORTS["hf"].said_beside(searched)
    assert lightning(searched)["model"] == {"lr": 3e-4, "weight_decay": 0.05, "nesterov": True}
    assert lightning(searched, "model.weight_decay=model.decay")["model"]["decay"] == 0.05
    assert deepspeed(searched)["optimizer"]["params"] == {"lr": 3e-4, "weight_decay": 0.05, "nesterov": True}
    assert "what else your optimizer was made with is not known" in EXPORTS["deepspeed"].said_beside(searched)[-1]
    assert {"WEIGHT_DECAY=0.05", "NESTEROV=True"} < set(EXPORTS["env"].text(searched).splitlines())


def test_what_an_argument_of_build_optimizers_own_has_changed_is_not_said_to_be_known(tuned):
    """It was read with the defaults: `beta2` of the recommended run makes other betas of them."""
    task = TaskInfo(
        path="model.py", optimizer="AdamW", optimizer_settings=OptimizerSettings(values={"betas": [0.9, 0.999]})
    )
    found = on("cuda", tuned, optimizer="AdamW", optimizer_arguments={"beta2": 0.9}).model_copy(update={"task": task})
    assert "adam_beta2" not in hf(found)
    assert deepspeed(found)["optimizer"] == {"type": "AdamW", "params": {"lr": 3e-4}}
    assert "no field says beta2=0.9, which is build_optimizer's own" in EXPORTS["deepspeed"].said_beside(found)
    assert not any(line.startswith("BETAS=") for line in EXPORTS["env"].text(found).splitlines())
    assert not any("0.999" in note for note in EXPORTS["lightning"].said_beside(found))


@pytest.mark.parametrize("rate", [1e-5, 0.012345678901234567, 3e-4])
def test_a_learning_rate_comes_through_to_the_last_digit(tuned, rate):
    result = on("cuda", tuned, learning_rate=rate)
    assert hf(result)["learning_rate"] == rate
    assert lightning(result)["model"]["lr"] == rate
    assert deepspeed(result)["optimizer"]["params"]["lr"] == rate
    (line,) = [line for line in EXPORTS["env"].text(result).splitlines() if line.startswith("LEARNING_RATE=")]
    assert float(shlex.split(line.partition("=")[2])[0]) == rate


@pytest.mark.parametrize("name", OF_ONE_BATCH)
def test_a_probe_gives_its_largest_batch_and_no_learning_rate(probed, name):
    text = EXPORTS[name].text(probed)
    assert "176" in text
    assert "lr" not in text.lower().replace("learning_rate", "lr")


@pytest.mark.parametrize("name", EXPORTS)
def test_an_estimate_is_refused(result_of, name):
    with pytest.raises(UsageError, match=r"an estimate is no measurement.*run 'batchtune probe'"):
        EXPORTS[name].text(result_of("estimate"))


def test_a_study_without_a_recommendation_exports_no_batch_of_its_probe(result_of):
    nothing = result_of("tune").model_copy(update={"recommendation": None, "status": "failed"})
    for export in EXPORTS.values():
        with pytest.raises(UsageError, match="this tune is failed: it has no recommendation; 'batchtune report' says"):
            export.text(nothing)
        assert export.title not in view_of(nothing).settings
    assert pytorch(nothing) == ""


def test_a_size_that_is_not_yet_checked_is_said_to_be_wherever_it_is_written(result_of):
    checked = result_of("probe")
    early = checked.probe.model_copy(update={"verified_in_fresh_process": False})
    found = checked.model_copy(update={"probe": early, "status": "interrupted"})
    for export in EXPORTS.values():
        assert export.said_beside(found)[0].startswith("the largest batch that trained so far: not checked")
        assert not any("not checked" in said for said in export.said_beside(checked))
    assert "not checked in a fresh process" in pytorch(found)


def test_a_result_without_a_size_that_ran_is_refused(result_of):
    with pytest.raises(UsageError, match="this probe is failed: it has no batch size that ran"):
        EXPORTS["hf"].text(result_of("probe where nothing fits"))


@pytest.mark.parametrize("name", ["hf", "lightning"])
def test_what_a_library_would_silently_train_otherwise_is_refused(tuned, name):
    with pytest.raises(UsageError, match="does not train in fp16 on a CPU"):
        EXPORTS[name].text(on("cpu", tuned, precision="fp16"))


def test_a_precision_that_nobody_knows_is_refused(tuned):
    with pytest.raises(UsageError, match=r"precision '\$\(reboot\)' is none of"):
        EXPORTS["env"].text(on("cuda", tuned, precision="$(reboot)"))


def test_fields_are_renamed_by_their_own_name_or_by_ours(tuned):
    exported = lightning(tuned, "model.lr=model.optimizer.lr", "micro_batch_size=data.init_args.train_batch_size")
    assert exported["model"] == {"optimizer": {"lr": 3e-4}}
    assert exported["data"] == {"init_args": {"train_batch_size": 128}}
    assert hf(tuned, "learning_rate=lr")["lr"] == 3e-4
    assert "TRAIN_PRECISION=bf16" in EXPORTS["env"].text(tuned, ["precision=TRAIN_PRECISION"])


@pytest.mark.parametrize(
    ("name", "rename", "message"),
    [
        ("lightning", "rate=lr", "no field 'rate' here; there are trainer.devices, .*model.lr, micro_batch_size"),
        ("hf", "learning_rate", "not of the form field=name"),
        ("hf", "learning_rate=", "not of the form field=name"),
        ("hf", "learning_rate=bf16", "two fields would be called 'bf16'"),
        ("lightning", "model.lr=data", "two fields would be called 'data'"),
        ("env", "LEARNING_RATE=learning rate", "'learning rate' cannot name a variable"),
    ],
)
def test_a_rename_that_cannot_be_is_refused_in_one_line(tuned, name, rename, message):
    with pytest.raises(UsageError, match=message) as refused:
        EXPORTS[name].text(tuned, [rename])
    assert "\n" not in str(refused.value)


def test_what_a_text_cannot_say_is_said_beside_it(tuned):
    sgd = tuned.model_copy(update={"task": TaskInfo(path="model.py", optimizer="SGD")})  # an earlier version's result
    assert "what else SGD was made with is not known" in EXPORTS["hf"].said_beside(sgd)[0]
    assert EXPORTS["hf"].said_beside(made_with(tuned, "AdamW", betas=[0.9, 0.99])) == []
    assert (
        "set_float32_matmul_precision('high')"
        in EXPORTS["lightning"].said_beside(on("cuda", tuned, precision="tf32"))[0]
    )
    assert "the optimizer's type is not known: add it yourself" in EXPORTS["deepspeed"].said_beside(tuned)


def test_a_page_shows_only_what_can_be_exported(tuned, result_of):
    shown = view_of(tuned).settings
    assert shown["HF TrainingArguments"] == EXPORTS["hf"].text(tuned)
    assert view_of(result_of("estimate")).settings == {}


@pytest.mark.parametrize(
    ("name", "field"), [("hf", "max_steps"), ("lightning", "trainer.max_steps"), ("deepspeed", "total_num_steps")]
)
def test_the_horizon_of_a_schedule_is_said_beside_the_text(tuned, name, field):
    scheduled = on("cuda", tuned, total_steps=1200)
    said = EXPORTS[name].said_beside(scheduled)[-1]
    assert "a learning-rate schedule over 1200 steps" in said
    assert field in said
    lines = [line for line in EXPORTS[name].text(scheduled).splitlines() if not line.startswith("#")]
    assert "1200" not in "".join(lines)  # how long to train is the user's


def test_a_trainer_steps_a_plateau_that_was_measured_and_is_told_of_no_other_schedule(tuned):
    arguments = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": '{"patience": 2}'}
    plateau = made_with(tuned, "AdamW", scheduler="ReduceLROnPlateau", adapted={"arguments": arguments})
    assert arguments.items() <= hf(on("cuda", plateau)).items()
    assert EXPORTS["hf"].said_beside(plateau) == []


@pytest.mark.parametrize("name", ["hf", "lightning", "deepspeed", "env"])
def test_of_a_schedule_that_is_made_for_no_number_of_steps_none_is_said(tuned, name):
    made = on("cuda", made_with(tuned, "AdamW", scheduler="ExponentialLR"))
    said = EXPORTS[name].said_beside(made)[-1]
    beside = "; the Trainer's own schedule, linear to 0, was not measured: pass yours, Trainer(optimizers=(…, …))"
    told = "measured with a learning-rate schedule (ExponentialLR of your build_scheduler), which no field says"
    assert said == told + (beside if name == "hf" else "")
    assert "# learning-rate schedule: ExponentialLR, as your build_scheduler makes it" in pytorch(made).splitlines()
    assert "total_steps" not in pytorch(made)


def test_a_shell_is_told_the_horizon_of_a_schedule(tuned):
    assert "TOTAL_STEPS=1200" in EXPORTS["env"].text(on("cuda", tuned, total_steps=1200)).splitlines()
    assert "TOTAL_STEPS" not in EXPORTS["env"].text(tuned)


def test_several_ranks_of_a_probe_are_trained_on_as_they_were_probed(probed):
    ranks = DataParallel(world_size=4, strategy="ddp", backend="gloo", batch_size=176, global_batch_size=1408)
    probe = probed.probe.model_copy(update={"data_parallel": ranks, "gradient_accumulation_steps": 2})
    result = probed.model_copy(update={"probe": probe})
    assert deepspeed(result)["train_batch_size"] == 1408
    assert lightning(result)["trainer"]["devices"] == 4
    assert any(each.text.endswith("--ranks 4 --strategy ddp") for each in view_of(result).commands)


def test_what_ranks_have_trained_is_exported_with_how_they_shared_the_work(tuned):
    result = on("cuda", tuned, world_size=4, strategy="fsdp", global_batch_size=1024)
    assert lightning(result)["trainer"]["strategy"] == "fsdp"
    assert deepspeed(result)["zero_optimization"]["stage"] == 3
    assert json.loads(EXPORTS["hf"].text(result))["fsdp"] is True
    lines = EXPORTS["env"].text(result).splitlines()
    assert {"NPROC_PER_NODE=4", "STRATEGY=fsdp", "# for 4 ranks with fsdp: torchrun --nproc-per-node 4"} <= set(lines)
    assert "for 4 ranks with fsdp: torchrun --nproc-per-node 4" in pytorch(result)
    for name in OF_ONE_BATCH:
        alone = EXPORTS[name].text(on("cuda", tuned))
        assert "fsdp" not in alone
        assert "NPROC" not in alone


@pytest.mark.parametrize("again", [True, False])
def test_activation_checkpointing_is_exported_where_it_was_asked_for(tuned, again):
    result = on("cuda", tuned, activation_checkpointing=again)
    assert hf(result)["gradient_checkpointing"] is again
    assert lightning(result)["model"]["activation_checkpointing"] is again
    assert f"ACTIVATION_CHECKPOINTING={int(again)}" in EXPORTS["env"].text(result).splitlines()
    assert f"activation_checkpointing = {again}" in pytorch(result)
    told = f"measured with{'' if again else 'out'} activation checkpointing, "
    assert any(note.startswith(told) for note in EXPORTS["deepspeed"].said_beside(result))
    for name in OF_ONE_BATCH:
        assert "checkpointing" not in EXPORTS[name].text(on("cuda", tuned)).lower()


@pytest.mark.parametrize(
    ("clipping", "of_hf", "of_lightning", "of_deepspeed", "line"),
    [
        ({"norm": 0.5}, 0.5, (0.5, None), 0.5, "clip_grad_norm_(model.parameters(), 0.5)"),
        ({"value": 0.1}, 0.0, (0.1, "value"), 0.0, "clip_grad_value_(model.parameters(), 0.1)"),
        ({}, 0.0, (None, None), 0.0, None),
        (None, None, (None, None), None, None),
    ],
)
def test_every_library_clips_gradients_as_it_was_measured(tuned, clipping, of_hf, of_lightning, of_deepspeed, line):
    result = on("cuda", tuned, gradient_clipping=None if clipping is None else GradientClipping(**clipping))
    assert hf(result).get("max_grad_norm") == of_hf
    trainer = lightning(result)["trainer"]
    assert (trainer.get("gradient_clip_val"), trainer.get("gradient_clip_algorithm")) == of_lightning
    assert deepspeed(result).get("gradient_clipping") == of_deepspeed
    assert ("clip_grad" in pytorch(result)) is (line is not None)
    assert (line or "") in pytorch(result)
    said = [text for name in ("hf", "deepspeed") for text in EXPORTS[name].said_beside(result) if "clip" in text]
    assert len(said) == (2 if clipping and "value" in clipping else 0)
