"""Hugging Face Trainers and models as their users write them, behind the task contract."""

import importlib.util
import sys
import warnings

import pytest
import torch
from fakes import opened
from fixtures.adapted import SCRIPT
from torch.utils.data import SequentialSampler

from batchtune.child.evaluate import Inference, metric_value
from batchtune.child.trainer import Trainer, TrainingBatches
from batchtune.errors import UsageError
from batchtune.task.load import current_settings

pytestmark = [
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("transformers", "accelerate"))),
        reason="transformers or accelerate not installed",
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # of the libraries themselves
]
CPU = torch.device("cpu")


@pytest.fixture
def trainer_task(load):
    """The task of a script whose `made` is a Trainer with these arguments."""

    def made(arguments="", more=""):
        return load(f"{SCRIPT}\n{more}\ndef made():\n    return make({arguments})\n", "made")

    return made


def trained(task, steps=1, **options):
    trainer = Trainer(task, CPU, "fp32", **options)
    batches = TrainingBatches(task, 4, 0)
    for _ in range(steps):
        trainer.step(batches)
    return trainer


class TestATrainer:
    def test_it_says_what_is_trained_with_today(self, trainer_task):
        task = trainer_task("per_device_train_batch_size=5, gradient_accumulation_steps=2, learning_rate=3e-4")
        trained(task, learning_rate=0.05)
        known = current_settings(task)
        assert known.batch_size == (
            10,
            "per_device_train_batch_size x gradient_accumulation_steps, at once where that fits",
        )
        assert known.learning_rate == (3e-4, "learning_rate")

    @pytest.mark.parametrize(("how", "steps"), [("max_steps=7", 7), ("num_train_epochs=1.5", 8), ("", 15)])
    def test_it_says_how_long_todays_training_is(self, trainer_task, how, steps):
        task = trainer_task(f"per_device_train_batch_size=5, gradient_accumulation_steps=2, {how}")
        told = opened(training_length=task.adapted.training_length, train_size=task.train_size())
        assert told.training_steps(9) == steps

    @pytest.mark.parametrize(
        ("kind", "trainer", "has"),
        [
            ("constant", "hf.Trainer", False),
            ("constant", "Own", True),
            ("constant_with_warmup", "hf.Trainer", True),
            ("linear", "hf.Trainer", True),
        ],
    )
    def test_a_constant_rate_is_no_schedule(self, trainer_task, kind, trainer, has):
        more = "class Own(hf.Trainer):\n    def create_scheduler(self, num_training_steps, optimizer=None):\n"
        more += "        return torch.optim.lr_scheduler.LinearLR(optimizer)\n"
        task = trainer_task(f"{trainer}, lr_scheduler_type='{kind}'", more)
        task.require("tune")
        model = task.model()
        assert bool(task.schedulers(task.optimizers(model, 0.1), 10)) is has

    def test_it_trains_and_evaluates_with_its_own_metrics(self, trainer_task):
        task = trainer_task()
        task.require("tune")
        trainer = Trainer(task, CPU, "fp32")
        before = metric_value(trainer, "val_loss", 4)
        trainer = trained(task, 30, learning_rate=0.05)
        found = task.evaluate(trainer.model)
        assert found["eval_loss"] == found["val_loss"] < before
        assert 0 <= found["eval_accuracy"] <= 1

    def test_a_trainer_that_is_there_is_taken_as_well(self, load):
        task = load(f"{SCRIPT}\nready = make()\n", "ready")
        task.require("probe")
        assert task.train_size() == 40

    def test_the_worst_batch_has_the_longest_row_and_no_columns_that_the_model_does_not_take(self, trainer_task):
        batch = trainer_task().worst_batch(3)
        assert set(batch) == {"input_ids", "labels"}
        assert batch["input_ids"].shape == (3, 8)

    def test_inference_is_its_loss_in_eval_mode_without_gradients(self, trainer_task):
        seen = "        seen.append((model.training, torch.is_inference_mode_enabled()))\n"
        more = f"class Seeing(hf.Trainer):\n    def compute_loss(self, model, *args, **kw):\n{seen}"
        more = f"seen = []\n{more}        return super().compute_loss(model, *args, **kw)\n"
        task = trainer_task("Seeing", more)
        task.require("inference")
        Inference(task, CPU, "fp32").forward(task.worst_batch(3))
        assert sys.modules["my_task"].seen == [(False, True)]

    def test_models_are_copies_with_the_weights_that_came_with_the_trainer(self, trainer_task):
        task = trainer_task()
        first, second = task.model(), task.model()
        assert first is not second
        assert torch.equal(first.classifier.weight, second.classifier.weight)

    def test_a_teacher_beside_the_model_goes_where_it_goes(self, trainer_task):
        ours = "class Ours(hf.Trainer):\n    def __init__(self, *args, **kw):\n        super().__init__(*args, **kw)\n"
        ours += "        self.teacher = bert().eval()\n    def compute_loss(self, model, inputs, **_):\n"
        ours += "        return model(**inputs).loss + self.teacher(**inputs).loss.detach()\n"
        task = trainer_task("Ours, use_cpu=True", ours)
        given, places = task.adapted._trainer.teacher, []
        for device in ("cpu", "meta", "cpu"):
            model, batch = task.model().to(device), task.worst_batch(2)
            places.append(task.loss(model, {name: each.to(device) for name, each in batch.items()}).device.type)
        assert places == ["cpu", "meta", "cpu"]
        assert task.adapted._trainer.teacher is given  # and no copy, where it is there already

    @pytest.mark.parametrize("init", ["", "model_init=lambda: bert(), "])
    def test_a_part_of_the_model_beside_it_is_that_of_the_model_in_training(self, trainer_task, init):
        ours = "class Ours(hf.Trainer):\n    def __init__(self, *args, **kw):\n        super().__init__(*args, **kw)\n"
        ours += "        self.head, self.net = self.model.classifier, self.model\n"
        ours += "        self.sharing = torch.nn.Sequential(self.head)\n"
        ours += "    def compute_loss(self, model, inputs, **_):\n"
        ours += "        return self.head(self.net.bert(inputs['input_ids']).pooler_output).square().mean()\n"
        task = trainer_task(f"Ours, {init}use_cpu=True", ours)
        given, sharing = task.adapted._trainer.head, task.adapted._trainer.sharing
        for device in ("cpu", "meta", "cpu"):
            model, batch = task.model().to(device), task.worst_batch(2)
            task.loss(model, {name: each.to(device) for name, each in batch.items()}).backward()
            assert model.classifier.weight.grad.device.type == device
            assert task.adapted._trainer.head is given  # which holds no memory of the next attempt's
            assert task.adapted._trainer.sharing is sharing
        assert given.weight.grad is None

    def test_model_init_makes_new_ones(self, trainer_task):
        task = trainer_task("model_init=lambda: bert()")
        assert not torch.equal(task.model().classifier.weight, task.model().classifier.weight)

    def test_nothing_of_a_trained_model_is_kept(self, trainer_task):
        import gc
        import weakref

        task = trainer_task()
        trainer = trained(task)
        task.evaluate(trainer.model)
        gone = weakref.ref(trainer.model)
        del trainer
        gc.collect()
        assert gone() is None

    def test_few_batches_suffice_for_a_look_at_memory(self, trainer_task):
        more = "class Counting(hf.Trainer):\n    def prediction_step(self, *args, **kw):\n        seen.append(1)\n"
        more = f"seen = []\n{more}        return super().prediction_step(*args, **kw)\n"
        task = trainer_task("Counting, per_device_eval_batch_size=2", more)
        task.evaluate(task.model(), max_batches=2)
        assert sum(sys.modules["my_task"].seen) == 2

    def test_where_there_are_several_gpus_it_evaluates_on_one(self, load):
        more = (
            "\nseen = set()\nclass Looking(hf.Trainer):\n    def prediction_step(self, model, *args, **kw):\n"
            "        seen.add((type(model), self.args.eval_batch_size))\n"
            "        return super().prediction_step(model, *args, **kw)\n"
            "def made():\n    made = make(Looking)\n    made.args._n_gpu = 2\n    return made\n"
        )
        task = load(SCRIPT + more, "made")
        model = task.model()
        task.evaluate(model)
        assert sys.modules["my_task"].seen == {(type(model), 8)}

    def test_it_evaluates_on_the_device_of_the_model(self, load):
        task = load(f"{SCRIPT}\nready = make()\n", "ready")
        trainer = sys.modules["my_task"].ready
        vars(trainer.args)["_setup_devices"] = trainer.accelerator.state.device = torch.device("cpu", 1)
        task.evaluate(task.model())
        assert trainer.args.device == trainer.accelerator.device == CPU

    def test_but_not_on_one_of_another_kind(self, trainer_task):
        task = trainer_task()
        with pytest.raises(UsageError, match="the model is on meta, and the Trainer evaluates on cpu; choose"):
            task.evaluate(task.model().to("meta"))

    def test_the_order_of_the_loader_stays(self, trainer_task):
        assert trainer_task().sampler(4) is None
        assert isinstance(trainer_task("train_sampling_strategy='sequential'").sampler(4), SequentialSampler)
        grouped = trainer_task("train_sampling_strategy='group_by_length'").sampler(7)
        assert grouped.batch_size == 7

    def test_callbacks_are_not_called(self, trainer_task):
        more = (
            "class Loud(hf.TrainerCallback):\n    def on_evaluate(self, *_, **__):\n        raise SystemExit\n"
            "class Called(hf.Trainer):\n    def __init__(self, **k):\n        super().__init__(**k, callbacks=[Loud()])"
        )
        task = trainer_task("Called", more)
        assert "eval_loss" in task.evaluate(task.model())


class TestWhatItTrainsWith:
    def test_the_learning_rate_is_that_of_every_group(self, trainer_task):
        task = trainer_task("weight_decay=0.1")
        groups = task.optimizers(task.model(), 0.02).param_groups
        assert [group["lr"] for group in groups] == [0.02, 0.02]
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]

    @pytest.mark.parametrize(
        "arguments",
        [
            "optimizer_cls_and_kwargs=(torch.optim.SGD, {'lr': 3.0, 'momentum': 0.9})",
            "model=(model := bert()), optimizers=(torch.optim.SGD(model.parameters(), lr=3.0, momentum=0.9), None)",
        ],
    )
    def test_an_optimizer_of_the_users_own_trains_the_new_model(self, trainer_task, arguments):
        trainer = trained(trainer_task(arguments), learning_rate=0.02)
        assert type(trainer.optimizers[0]) is torch.optim.SGD
        assert trainer.optimizers.param_groups[0]["lr"] == pytest.approx(0.02)
        assert trainer.optimizers.param_groups[0]["momentum"] == 0.9
        held = {id(each) for group in trainer.optimizers.param_groups for each in group["params"]}
        assert held == {id(each) for each in trainer.model.parameters()}

    def test_the_schedule_goes_over_the_runs_steps(self, trainer_task):
        task = trainer_task("lr_scheduler_type='linear', warmup_steps=2")
        trainer = Trainer(task, CPU, "fp32", learning_rate=0.1, total_steps=6)
        batches, rates = TrainingBatches(task, 4, 0), []
        for _ in range(6):
            rates.append(trainer.optimizers.param_groups[0]["lr"])
            trainer.step(batches)
        assert rates == pytest.approx([0.0, 0.05, 0.1, 0.075, 0.05, 0.025])

    @pytest.mark.parametrize(("arguments", "clipped"), [("max_grad_norm=1e-3", True), ("max_grad_norm=0", False)])
    def test_gradients_are_clipped_as_the_arguments_say(self, trainer_task, arguments, clipped):
        task = trainer_task(arguments)
        trainer = Trainer(task, CPU, "fp32")
        trainer.forward_backward(task.worst_batch(4))
        norms = []

        def see(optimizer, *_):
            grads = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
            norms.append(float(torch.stack([grad.norm() for grad in grads]).norm()))

        trainer.optimizers[0].register_step_pre_hook(see)  # after ours
        trainer.update()
        assert (norms[0] <= 1.01e-3) is clipped

    def test_the_loss_is_the_trainers_own(self, trainer_task):
        plain, smooth = trainer_task(), trainer_task("label_smoothing_factor=0.9")
        batch = plain.worst_batch(4)
        model = plain.model().eval()
        logits = model(**batch).logits.log_softmax(-1)
        wanted = -(0.1 * logits[torch.arange(4), batch["labels"]] + 0.9 * logits.mean(-1)).mean()
        assert smooth.loss(model, batch).item() == pytest.approx(wanted.item(), rel=1e-4)
        assert "labels" in batch  # the next step has it, too

    def test_a_loss_function_is_told_how_many_items_there_are(self, trainer_task):
        more = (
            "def total(outputs, labels, num_items_in_batch):\n    return outputs.logits.sum() * 0 + num_items_in_batch"
        )
        task = trainer_task("compute_loss_func=total", more)
        assert task.loss(task.model(), task.worst_batch(6)).item() == 6

    def test_a_loss_of_a_subclass_is_told_too(self, trainer_task):
        more = """
class Summed(hf.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits, labels = model(input_ids=inputs["input_ids"]).logits, inputs["labels"]
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch
"""
        task, plain = trainer_task("Summed", more), trainer_task()
        model, batch = plain.model().eval(), plain.worst_batch(6)
        assert task.loss(model, batch).item() == pytest.approx(plain.loss(model, batch).item())

    def test_a_loss_of_a_subclass_that_does_not_ask_is_not_told(self, trainer_task):
        more = "class Own(hf.Trainer):\n    def compute_loss(self, model, inputs, return_outputs=False):\n"
        task = trainer_task("Own", f"{more}        return model(**inputs).loss * 0 + 3\n")
        assert task.loss(task.model(), task.worst_batch(6)).item() == 3

    def test_activations_are_checkpointed_as_the_arguments_say(self, trainer_task):
        import transformers

        name = "activation" if hasattr(transformers.PreTrainedModel, "activation_checkpointing_enable") else "gradient"
        task = trainer_task(f"{name}_checkpointing=True")
        assert any(getattr(part, "gradient_checkpointing", False) for part in task.model().modules())
        assert float(trained(task).model.classifier.weight.detach().sum()) != 0

    def test_a_schedule_on_a_plateau_waits_for_the_metric_of_the_best_model(self, trainer_task):
        import transformers

        task = trainer_task(
            "lr_scheduler_type='reduce_lr_on_plateau', eval_strategy='epoch', metric_for_best_model='accuracy',"
            "lr_scheduler_kwargs={'patience': 0, 'factor': 0.5, 'eps': 0, 'mode': 'max'}"
        )
        task.require("tune")
        trainer = trained(task, learning_rate=1e-9, total_steps=100)
        (plateau,) = trainer.on_plateau
        assert not task.has_horizon
        found = task.evaluate(trainer.model)
        assert plateau.watched(3.0) == found["eval_accuracy"]
        for _ in range(2):
            plateau.end_epoch(plateau.watched(3.0))
        assert trainer.optimizers.param_groups[0]["lr"] == pytest.approx(0.5e-9)
        written = task.adapted.optimizer_settings["arguments"]
        about = ("lr_scheduler_type", "lr_scheduler_kwargs", "eval_strategy", "metric_for_best_model")
        exported = transformers.TrainingArguments(
            output_dir="out", report_to=[], use_cpu=True, **{name: written[name] for name in about}
        )
        assert exported.lr_scheduler_kwargs == {"patience": 0, "factor": 0.5, "eps": 0, "mode": "max"}
        assert (exported.eval_strategy, exported.metric_for_best_model) == ("epoch", "accuracy")

    def test_a_metric_that_is_not_evaluated_is_no_metric_of_the_best_model(self, trainer_task):
        arguments = "lr_scheduler_type='reduce_lr_on_plateau', eval_strategy='epoch', metric_for_best_model='f1'"
        task = trainer_task(arguments)
        task.require("tune")
        with pytest.raises(UsageError, match="metric_for_best_model=f1 is not among what it evaluates: eval_loss"):
            task.evaluate(task.model())


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "purpose", "words"),
        [
            ("train_dataset=None", "probe", "the Trainer has no train_dataset"),
            ("eval_dataset=None", "tune", "tune needs an eval_dataset"),
            ("Stepping", "probe", r"overrides training_step\(\)"),
            ("neftune_noise_alpha=5.0", "probe", "neftune_noise_alpha is not supported"),
            (
                "lr_scheduler_type='reduce_lr_on_plateau', eval_strategy='steps', eval_steps=5",
                "tune",
                "lr_scheduler_type=reduce_lr_on_plateau goes by epochs here; set eval_strategy='epoch'",
            ),
            ("model=(m := bert()), optimizers=scheduled(m)", "tune", "counts on a fixed number of steps"),
        ],
    )
    def test_what_has_no_place_is_refused_in_one_line(self, trainer_task, arguments, purpose, words):
        more = (
            "class Stepping(hf.Trainer):\n    def training_step(self, *a, **k): ...\n"
            "def scheduled(model):\n    made = torch.optim.SGD(model.parameters(), lr=1.0)\n"
            "    return made, torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1.0)\n"
        )
        with pytest.raises(UsageError, match=words) as refused:
            trainer_task(arguments, more).require(purpose)
        assert str(refused.value).startswith("my_task.py:made: ")
        assert "\n" not in str(refused.value)

    @pytest.mark.parametrize("key", ["fsdp", "deepspeed"])
    def test_ranks_of_its_own_are_refused_with_what_takes_their_place(self, trainer_task, key):
        task = trainer_task("")
        setattr(task.adapted._trainer.args, key, True)  # which a Trainer takes in a process of a launcher alone
        with pytest.raises(UsageError, match=f"its {key} is not taken over: .* --ranks N --strategy fsdp"):
            task.require("tune")

    @pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
    def test_so_is_what_accelerate_launch_says(self, trainer_task, monkeypatch, name):
        task = trainer_task("")
        monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
        with pytest.raises(UsageError, match=f"its ACCELERATE_USE_{name} is not taken over: .* --strategy fsdp"):
            task.require("tune")

    def test_the_exported_fields_of_ranks_are_known_to_it_and_not_outdated(self, capfd):
        hf = pytest.importorskip("transformers")
        arguments = hf.TrainingArguments(output_dir="out", use_cpu=True, report_to=[], fsdp=True)
        assert arguments.fsdp
        assert "deprecated" not in capfd.readouterr().err


SMALL = "vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8"
GPT2 = "GPT2LMHeadModel(hf.GPT2Config(vocab_size=9, n_positions=6, n_embd=8, n_layer=1, n_head=1))"
BERT_CONFIG = f"hf.BertConfig({SMALL}, max_position_embeddings=6, num_labels=3)"
T5_CONFIG = (
    "hf.T5Config(vocab_size=9, n_positions=6, d_model=8, d_kv=4, d_ff=8, num_layers=1, decoder_start_token_id=0)"
)
VIT_CONFIG = f"hf.ViTConfig({SMALL.partition(', ')[2]}, image_size=8, patch_size=4)"
CONFIGURED = [
    (GPT2, {"input_ids": (2, 6), "labels": (2, 6)}),
    # RoBERTa's first two places are the padding's
    (f"RobertaForMaskedLM(hf.RobertaConfig({SMALL}, max_position_embeddings=8))", {"labels": (2, 6)}),
    (f"BertForSequenceClassification({BERT_CONFIG})", {"input_ids": (2, 6), "labels": (2,)}),
    (f"BertForTokenClassification({BERT_CONFIG})", {"labels": (2, 6)}),
    (f"BertForQuestionAnswering({BERT_CONFIG.replace(', num_labels=3', '')})", {"start_positions": (2,)}),
    (f"T5ForConditionalGeneration({T5_CONFIG})", {"input_ids": (2, 6), "labels": (2, 6)}),
    (f"ViTForImageClassification({VIT_CONFIG})", {"pixel_values": (2, 3, 8, 8), "labels": (2,)}),
]


class TestAModelAlone:
    @pytest.mark.parametrize(("model", "shapes"), CONFIGURED, ids=[text.partition("(")[0] for text, _ in CONFIGURED])
    def test_it_trains_on_the_largest_batch_its_configuration_allows(self, load, model, shapes):
        task = load(f"import transformers as hf\nmodel = hf.{model}\n", "model")
        task.require("probe")
        batch = task.worst_batch(2)
        assert {name: tuple(batch[name].shape) for name in shapes} == shapes
        trainer = Trainer(task, CPU, "fp32")
        assert torch.isfinite(trainer.forward_backward(batch))
        trainer.update()

    @pytest.mark.parametrize(("attribute", "equal"), [("model", True), ("make", False)])
    def test_a_factory_makes_new_weights_an_instance_is_copied(self, load, attribute, equal):
        text = f"import transformers as hf\ndef make():\n    return hf.{GPT2}\nmodel = make()\n"
        task = load(text, attribute)
        first, second = (each.transformer.wte.weight for each in (task.model(), task.model()))
        assert torch.equal(first, second) is equal

    def test_labels_of_a_regression_are_numbers(self, load):
        text = CONFIGURED[2][0].replace("num_labels=3", "num_labels=1")
        task = load(f"import transformers as hf\nmodel = hf.{text}\n", "model")
        assert task.worst_batch(2)["labels"].is_floating_point()
        assert torch.isfinite(task.loss(task.model(), task.worst_batch(2)))

    def test_it_has_no_data_to_tune_on(self, load):
        task = load(f"import transformers as hf\nmodel = hf.{GPT2}\n", "model")
        with pytest.raises(UsageError, match="no data to tune on; name a function that returns a Trainer"):
            task.require("tune")


class TestApplyResult:
    def run(self, load, path, arguments):
        """Trains a Trainer of the user's for real and says with what."""
        text = f"""{SCRIPT}
from batchtune.task.transformers import ApplyResult, apply_result
seen = dict()

class Spy(hf.TrainerCallback):
    def on_step_end(self, args, state, control, optimizer, train_dataloader, **_):
        seen.update(steps=state.max_steps, rate=optimizer.param_groups[0]["lr"], args=args)

def made():
    args = hf.TrainingArguments(output_dir="out", use_cpu=True, report_to=[], disable_tqdm=True, num_train_epochs=1,
                                save_strategy="no", logging_strategy="no", lr_scheduler_type="constant")
    return hf.Trainer(args={arguments}, model=bert(), data_collator=pad, train_dataset=Rows(40),
                      callbacks=[ApplyResult(r"{path}"), Spy()])

build_model = made
"""
        load(text)
        import my_task

        my_task.made().train()
        return my_task.seen

    @pytest.mark.filterwarnings("ignore")
    def test_arguments_take_what_is_recommended(self, load, result_file):
        path = result_file()
        seen = self.run(load, path, f"apply_result(args, r'{path}')")
        assert seen["steps"] == 4  # forty samples by 5 × 2
        assert seen["rate"] == pytest.approx(0.02)
        assert seen["args"].per_device_train_batch_size == 5

    def test_precision_comes_with_them(self, result_file):
        import transformers

        from batchtune.task.transformers import apply_result

        given = transformers.TrainingArguments(output_dir="out", use_cpu=True, report_to=[])
        assert apply_result(given, result_file(precision="bf16")).bf16
        assert not given.bf16
        assert not apply_result(given, result_file()).bf16

    @pytest.mark.parametrize("given", [{}, {"num_train_epochs": 9}, {"max_steps": 7}])
    def test_the_horizon_of_the_measured_schedule_is_said_where_it_is_another(self, result_file, given):
        import transformers

        from batchtune.task.transformers import apply_result

        arguments = transformers.TrainingArguments(output_dir="out", use_cpu=True, report_to=[], **given)
        with pytest.warns(UserWarning, match=r"over 900 steps, and max_steps is .*; 900 is as measured"):
            assert apply_result(arguments, result_file(total_steps=900)).max_steps == arguments.max_steps

    def test_of_the_same_horizon_or_of_none_nothing_is_said(self, result_file):
        import transformers

        from batchtune.task.transformers import apply_result

        arguments = transformers.TrainingArguments(output_dir="out", use_cpu=True, report_to=[], max_steps=900)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for kept in ({"total_steps": 900}, {}):
                apply_result(arguments, result_file(**kept))

    @pytest.mark.filterwarnings("ignore")
    def test_a_run_with_another_batch_size_is_stopped(self, load, result_file):
        with pytest.raises(
            UsageError, match=r"about to train with batch size 8 × 2, not the 5 × 2 .*args=apply_result\(args"
        ):
            self.run(load, result_file(), "args")
