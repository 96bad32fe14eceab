"""LightningModules as their users write them, under both names of the library, behind the task contract."""

import importlib.util
import math
import sys

import pytest
import torch
from fixtures.adapted import MODULE, OWN_LOADERS
from torch.utils.data import SequentialSampler

from batchtune.child import training_run as loop
from batchtune.child.before_study import noise_scale, range_test
from batchtune.child.evaluate import Inference, metric_value, require_metric
from batchtune.child.trainer import Trainer, TrainingBatches
from batchtune.device.memory import open_device
from batchtune.document import GradientClipping
from batchtune.errors import UsageError
from batchtune.protocol.commands import MeasureNoiseScale, RunRangeTest
from batchtune.protocol.messages import RunSpec
from batchtune.task.adapting import loader_parts, resized, set_learning_rate
from batchtune.task.load import current_settings

SPELLINGS = [
    pytest.param(name, marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} not installed"))
    for name in ("lightning", "pytorch_lightning")
]
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning not installed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # of the libraries themselves
]
CPU = torch.device("cpu")

DATAMODULE = """
class Data(L.LightningDataModule):
    def prepare_data(self):
        self.prepared = True

    def setup(self, stage):
        assert self.prepared and stage == "fit"
        self.points = TensorDataset(torch.ones(12, 4))

    def train_dataloader(self):
        return DataLoader(self.points, batch_size=6)
"""
PLATEAU = """
    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters())
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)
        return {"optimizer": opt, "lr_scheduler": plateau, "monitor": "val_loss"}
"""


@pytest.fixture
def lit(load):
    """The task of a file that has a LightningModule `Lit` with more methods in it."""

    def made(methods="", more="", attribute="Lit", base=MODULE + OWN_LOADERS):
        return load(base + methods + more, attribute)

    return made


def test_it_says_what_is_trained_with_today(lit):
    task = lit(more="\ntrainer = L.Trainer(accumulate_grad_batches=2, logger=False, enable_checkpointing=False)\n")
    task.model()
    known = current_settings(task)
    assert known.batch_size == (8, "train_dataloader x accumulate_grad_batches, at once where that fits")
    assert known.learning_rate == (0.1, "configure_optimizers")


def trained(task, steps=1, **options):
    """A trainer that has taken so many steps on the task's own batches."""
    trainer = Trainer(task, CPU, "fp32", **options)
    batches = TrainingBatches(task, 4, 0)
    for _ in range(steps):
        trainer.step(batches)
    return trainer


class TestATask:
    @pytest.mark.parametrize("spelling", SPELLINGS)
    def test_a_module_trains_and_evaluates_under_both_names_of_the_library(self, load, spelling):
        text = (MODULE + OWN_LOADERS).replace("import lightning as L", f"import {spelling} as L")
        task = load(text, "Lit", f"with_{spelling}.py")
        task.require("tune")
        trainer = Trainer(task, CPU, "fp32", learning_rate=0.01)
        before = metric_value(trainer, "val_loss", 4)
        trainer = trained(task, 20, learning_rate=0.01)
        assert type(trainer.model).__mro__[1].__module__.startswith(spelling)
        assert metric_value(trainer, "val_loss", 4) < before

    @pytest.mark.parametrize("attribute", ["Lit", "ready", "make", "make_both"])
    def test_class_instance_and_factories_are_all_taken(self, lit, attribute):
        more = (
            DATAMODULE
            + "\nready = Lit()\ndef make():\n    return Lit(lr=0.5)\ndef make_both():\n    return Lit(), Data()\n"
        )
        task = lit(more=more, attribute=attribute, base=MODULE)
        task.require("probe")
        assert task.train_size() == 12
        assert task.worst_batch(5)[0].shape == (5, 4)

    def test_each_model_is_new_but_an_instance_keeps_its_weights(self, lit):
        task = lit(more="\nready = Lit()\n", attribute="ready")
        first, second = task.model(), task.model()
        assert first is not second
        assert torch.equal(first.head.weight, second.head.weight)
        fresh = lit()
        assert not torch.equal(fresh.model().head.weight, fresh.model().head.weight)

    def test_inference_is_its_validation_with_the_hooks_around_it(self, lit):
        task = lit("""
    def on_validation_epoch_start(self):
        self.seen = []

    def validation_step(self, batch, batch_idx):
        assert not self.training and torch.is_inference_mode_enabled()
        self.seen.append(batch_idx)
        self.log("val_loss", self.head(batch[0]).sum())

    def on_validation_epoch_end(self):
        self.epochs = getattr(self, "epochs", 0) + 1

    def training_step(self, batch):
        raise AssertionError("a training step")
""")
        task.require("inference")
        inference = Inference(task, CPU, "fp32")
        for _ in range(2):
            inference.forward(task.worst_batch(5))
        assert (inference.model.seen, inference.model.epochs) == ([0], 2)

    def test_a_datamodule_in_the_file_goes_before_the_modules_loaders(self, lit):
        task = lit(more=DATAMODULE)
        task.require("probe")
        assert task.train_size() == 12

    def test_loaders_that_do_not_shuffle_keep_their_order(self, lit):
        task = lit(more=DATAMODULE)
        assert isinstance(task.sampler(3), SequentialSampler)
        assert lit().sampler(3) is None

    def test_the_collate_function_of_the_loader_is_used(self, lit):
        base = MODULE + OWN_LOADERS.replace("shuffle=True", "collate_fn=lambda samples: len(samples)")
        assert lit(base=base).collate([1, 2, 3]) == 3


class TestLearningRate:
    def test_it_is_the_highest_of_the_groups_and_the_others_keep_their_ratio(self, lit):
        task = lit()
        optimizers = task.optimizers(task.model(), 0.02)
        assert [group["lr"] for group in optimizers.param_groups] == pytest.approx([0.002, 0.02])

    @pytest.mark.parametrize(
        ("returned", "rates"),
        [
            ("[opt], [{'scheduler': warm, 'interval': 'step'}]", [0.5, 1.0, 1.0]),
            (
                "{'optimizer': opt, 'lr_scheduler': {'scheduler': warm, 'interval': 'step', 'frequency': 2}}",
                [0.5, 0.5, 1.0],
            ),
            ("{'optimizer': opt, 'lr_scheduler': warm}", [0.5, 0.5, 0.5, 0.5, 0.5, 1.0]),  # five steps are an epoch
        ],
    )
    def test_schedulers_step_as_lightning_steps_them(self, lit, returned, rates):
        methods = f"""
    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=3.0)
        warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / 2))
        return {returned}
"""
        task = lit(methods)
        trainer = Trainer(task, CPU, "fp32", learning_rate=0.1, total_steps=100)
        batches, seen = TrainingBatches(task, 4, 0), []
        for _ in rates:
            seen.append(trainer.optimizers.param_groups[0]["lr"] / 0.1)
            trainer.step(batches)
        assert seen == pytest.approx(rates)

    @pytest.mark.parametrize(("frequency", "rates"), [(1, [1, 0.5, 0.25]), (2, [1, 1, 1, 0.5])])
    def test_a_schedule_on_a_plateau_waits_for_what_it_monitors(self, lit, frequency, rates):
        methods = f"""
    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=1e-9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, "max", factor=0.5, patience=0, eps=0)
        config = {{"scheduler": plateau, "monitor": "val_loss", "frequency": {frequency}}}
        return {{"optimizer": opt, "lr_scheduler": config}}
"""
        task = lit(methods)
        task.require("tune")
        trainer, seen = Trainer(task, CPU, "fp32", learning_rate=1e-9, total_steps=100), []
        (plateau,) = trainer.on_plateau
        for _ in rates:
            trainer.step(TrainingBatches(task, 4, 0))
            metric_value(trainer, "val_loss", 4)
            plateau.end_epoch(plateau.watched(3.0))
            seen.append(trainer.optimizers.param_groups[0]["lr"] / 1e-9)
        assert seen == pytest.approx(rates)
        assert plateau.scheduler.best == task.evaluate(trainer.model)["val_loss"]

    def test_a_metric_that_validation_does_not_log_cannot_be_monitored(self, lit):
        task = lit(PLATEAU.replace('"monitor": "val_loss"', '"monitor": "train_loss"'))
        task.require("tune")
        with pytest.raises(
            UsageError,
            match="ReduceLROnPlateau monitors 'train_loss', which validation does not log; monitor one of val",
        ):
            require_metric(task, CPU, "val_loss", "fp32")

    def test_a_module_without_a_schedule_is_given_no_horizon(self, lit):
        plain, scheduled = lit(), lit(PLATEAU)
        plain.require("tune")
        scheduled.require("probe")
        assert not plain.has("build_scheduler")
        assert scheduled.has("build_scheduler")

    def test_a_schedule_knows_how_many_steps_there_will_be(self, lit):
        methods = """
    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=3.0)
        total = self.trainer.estimated_stepping_batches
        return [opt], [{"scheduler": torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total), "interval": "step"}]
"""
        trainer = trained(lit(methods), steps=5, learning_rate=0.1, total_steps=10)
        assert trainer.optimizers.param_groups[0]["lr"] == pytest.approx(0.05)

    @pytest.mark.parametrize("asked", ["model", "lightning_module"])
    def test_the_trainers_model_is_the_module(self, lit, asked):
        methods = f"""
    def configure_optimizers(self):
        return torch.optim.SGD(self.trainer.{asked}.parameters(), lr=3.0)
"""
        trainer = trained(lit(methods), steps=1)
        own = {id(each) for each in trainer.model.parameters()}
        assert {id(each) for each in trainer.optimizers.param_groups[0]["params"]} == own

    @pytest.mark.parametrize(
        ("made", "asks"),
        [
            ("ExponentialLR(opt, 0.9999)", False),
            ("StepLR(opt, self.trainer.num_training_batches)", False),
            ("LinearLR(opt, 1.0, 0.0, self.trainer.estimated_stepping_batches)", True),
            ("CosineAnnealingLR(opt, self.trainer.max_steps)", True),
            ("StepLR(opt, max(1, self.trainer.max_epochs // 3))", True),
        ],
    )
    def test_a_schedule_is_made_for_a_number_of_steps_where_it_has_asked_for_it(self, lit, made, asks):
        methods = f"""
    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=3.0)
        return [opt], [torch.optim.lr_scheduler.{made}]
"""
        task = lit(methods)
        task.require("tune")
        Trainer(task, CPU, "fp32", learning_rate=0.1, total_steps=10)
        assert task.has_horizon is asks

    @pytest.mark.parametrize(
        ("schedule", "start"),
        [
            ("OneCycleLR(opt, 3.0, total_steps=100)", 1 / 25),
            ("LambdaLR(opt, lambda step: min(1.0, step / 4))", 0.0),
            ("LinearLR(opt)", 1 / 3),
        ],
    )
    def test_it_is_what_a_schedule_leads_to_where_none_runs_and_what_it_starts_with_where_one_does(
        self, lit, schedule, start
    ):
        methods = f"""
    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=3.0)
        return [opt], [{{"scheduler": torch.optim.lr_scheduler.{schedule}, "interval": "step"}}]
"""
        task = lit(methods)
        alone = Trainer(task, CPU, "fp32", learning_rate=0.1)
        assert alone.optimizers.param_groups[0]["lr"] == pytest.approx(0.1)
        scheduled = Trainer(task, CPU, "fp32", learning_rate=0.1, total_steps=100)
        assert scheduled.optimizers.param_groups[0]["lr"] == pytest.approx(0.1 * start)

    @pytest.mark.parametrize(("highest", "ratio"), [("self.hparams.lr", 1.0), ("10 * self.hparams.lr", 10.0)])
    def test_how_many_times_the_modules_own_it_is_is_known(self, lit, highest, ratio):
        methods = f"""
    def configure_optimizers(self):
        opt = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        return [opt], [torch.optim.lr_scheduler.OneCycleLR(opt, {highest}, total_steps=100)]
"""
        task = lit(methods)
        Trainer(task, CPU, "fp32", learning_rate=0.7)
        assert task.adapted.optimizer_settings["lr_ratio"] == pytest.approx(ratio)

    def test_a_cycle_keeps_its_shape_around_the_learning_rate(self):
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2.0, total_steps=10)
        set_learning_rate([optimizer], 0.5, [cycle], where="m.py")
        rates = []
        for _ in range(9):
            optimizer.step()
            cycle.step()
            rates.append(optimizer.param_groups[0]["lr"])
        assert max(rates) == pytest.approx(0.5, rel=0.05)

    def test_an_optimizer_without_one_is_refused(self):
        optimizer = torch.optim.Adafactor([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
        with pytest.raises(UsageError, match=r"m\.py: Adafactor has no learning rate that could be set"):
            set_learning_rate([optimizer], 0.5, where="m.py")


MANUAL = """
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        body, head = self.optimizers()
        with body.toggle_model():
            loss = self.body(batch[0]).square().mean()
            body.zero_grad()
            self.manual_backward(loss)
            body.step()
        loss = self(batch[0]).square().mean()
        head.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(head, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        head.step()
        for schedule in self.lr_schedulers():
            schedule.step()

    def configure_optimizers(self):
        both = [torch.optim.SGD(self.body.parameters(), lr=0.4), torch.optim.SGD(self.head.parameters(), lr=0.1)]
        total = self.trainer.estimated_stepping_batches
        return both, [torch.optim.lr_scheduler.LinearLR(each, 1.0, 0.0, total) for each in both]
"""


class TestManualOptimization:
    def test_it_knows_the_last_batch_of_an_epoch(self, lit):
        methods = MANUAL.replace(
            "for schedule in self", "self.seen.append(self.trainer.is_last_batch)\n        for schedule in self"
        )
        task = lit(methods)
        trainer = Trainer(task, CPU, "fp32", learning_rate=0.4, total_steps=10)
        batches = TrainingBatches(task, 4, 0)
        for _ in range(6):
            trainer.step(batches)
        assert trainer.model.seen == [False, False, False, False, True, False]  # of 20 samples

    @pytest.mark.parametrize("spelling", SPELLINGS)
    def test_it_trains_as_lightning_trains_it(self, load, spelling):
        import importlib

        library = importlib.import_module("lightning.pytorch" if spelling == "lightning" else spelling)
        text = (MODULE + OWN_LOADERS + MANUAL).replace("import lightning as L", f"import {spelling} as L")
        task = load(text.replace("shuffle=True", "shuffle=False"), "Lit", f"manual_{spelling}.py")
        task.require("tune")
        ours = Trainer(task, CPU, "fp32", learning_rate=0.4, total_steps=5)
        theirs = sys.modules[f"manual_{spelling}"].Lit()
        theirs.load_state_dict(ours.model.state_dict())
        batches = TrainingBatches(task, 4, 0)
        for _ in range(5):
            ours.step(batches)
        trainer = library.Trainer(
            max_steps=10, max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, limit_train_batches=5,
        )  # fmt: skip
        theirs.configure_optimizers = lambda: type(theirs).configure_optimizers(theirs)
        trainer.fit(theirs)
        assert ours.model.global_step == theirs.global_step == 10
        for mine, other in zip(ours.model.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(mine, other)

    def test_none_of_its_losses_hides_another(self, lit):
        task = lit(MANUAL)
        rising = RunRangeTest(
            batch_size=4, lowest_rate=1e-4, highest_rate=1e-3, steps=2, precision="fp32", seconds=5.0
        )  # fmt: skip
        assert range_test(task, open_device("cpu"), rising).losses == 2
        task = lit(MANUAL.replace("self.manual_backward(loss)", "self.manual_backward(float('nan') * loss)", 1))
        assert math.isnan(Trainer(task, CPU, "fp32").step(TrainingBatches(task, 4, 0)))


@pytest.mark.parametrize("methods", ["", MANUAL], ids=["automatic", "manual"])
def test_gradients_live_through_the_next_forward_pass_as_in_lightnings_loop(load, methods):
    import lightning

    noted = """
    def forward(self, x):
        self.seen.append(self.head.weight.grad is not None)
        return super().forward(x)
"""
    text = (MODULE + OWN_LOADERS + methods).replace("class Lit(", "class Plain(") + "\nclass Lit(Plain):" + noted
    task = load(text, "Lit", "noted.py")
    task.require("probe")
    ours, batches = Trainer(task, CPU, "fp32"), TrainingBatches(task, 4, 0)
    for _ in range(3):
        ours.step(batches)
    theirs = sys.modules["noted"].Lit()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(
        max_epochs=1, limit_train_batches=3, limit_val_batches=0, accelerator="cpu", logger=False, **quiet
    )
    trainer.fit(theirs)
    assert ours.model.seen == theirs.seen == [False, True, True]


class TestClipping:
    TRAINER = "\ntrainer = L.Trainer({}, accelerator='cpu', logger=False, accumulate_grad_batches=3)\n"

    def test_that_of_the_trainer_in_the_file_is_done(self, lit):
        base = MODULE + OWN_LOADERS
        task = lit(more=self.TRAINER.format("gradient_clip_val=1e-3"), base=base)
        trainer = Trainer(task, CPU, "fp32", learning_rate=1.0)
        before = torch.cat([each.detach().flatten() for each in trainer.model.parameters()])
        trainer.step(TrainingBatches(task, 4, 0))
        after = torch.cat([each.detach().flatten() for each in trainer.model.parameters()])
        assert float((after - before).norm()) <= 1.01e-3
        assert task.source.accumulation_steps == 3
        assert trainer.model.trainer.gradient_clip_val == 1e-3

    MAIN = "\ndef main(args):\n    L.Trainer(accelerator='cpu', {}).fit(Lit())\n"

    def test_that_of_a_trainer_made_elsewhere_in_the_file_is_read(self, lit):
        task = lit(more=self.MAIN.format("gradient_clip_val=0.5, accumulate_grad_batches=4"))
        task.require("probe")
        assert task.gradient_clipping == GradientClipping(norm=0.5)
        assert task.source.accumulation_steps == 4

    def test_what_cannot_be_read_is_told(self, lit):
        task = lit(more=self.MAIN.format("gradient_clip_val=args.clip"))
        task.require("probe")
        assert task.gradient_clipping is None
        assert task.source.notes[0].startswith("Trainer(gradient_clip_val=args.clip) in the file is not applied")

    @pytest.mark.parametrize("more", [TRAINER, MAIN])
    def test_callbacks_that_may_do_more_than_watch_are_told_as_left_out(self, lit, more):
        both = "L.pytorch.callbacks.EarlyStopping('loss'), L.pytorch.callbacks.StochasticWeightAveraging(0.1)"
        task = lit(more=more.format(f"callbacks=[{both}]"))
        task.require("probe")
        told = "the Trainer's callbacks StochasticWeightAveraging are not called, whatever they do to the training"
        assert task.source.notes == (told,)

    def test_the_users_own_is_called_with_what_the_trainer_says(self, lit):
        methods = """
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.seen.append((gradient_clip_val, gradient_clip_algorithm))
"""
        more = self.TRAINER.format("gradient_clip_val=0.5, gradient_clip_algorithm='value'")
        assert trained(lit(methods, more=more)).model.seen == [(0.5, "value")]


class TestLogging:
    def test_what_validation_logs_is_the_mean_over_samples_not_over_batches(self, lit):
        found = trained(lit()).task.evaluate(trained(lit()).model)
        assert found["size"] == pytest.approx((4 * 4 + 4 * 4 + 2 * 2) / 10)

    def test_metrics_sums_extremes_and_epoch_ends_are_logged_too(self, lit):
        methods = """
    def setup(self, stage):
        import torchmetrics
        self.mean = torchmetrics.MeanMetric()

    def validation_step(self, batch, batch_idx):
        self.mean(float(batch_idx))
        self.log("metric", self.mean)
        self.log("sum", 1.0, reduce_fx="sum")
        self.log("most", batch_idx, reduce_fx=torch.max)

    def on_validation_epoch_end(self):
        self.log("end", 7)
"""
        task = lit(methods)
        model = task.model().eval()
        assert task.evaluate(model) == {"metric": 1.0, "sum": 3.0, "most": 2.0, "end": 7.0}
        assert task.evaluate(model)["sum"] == 3.0  # the second time starts over

    def test_several_validation_loaders_are_told_apart(self, lit):
        methods = """
    def val_dataloader(self):
        return [DataLoader(TensorDataset(torch.ones(4, 4) * k), batch_size=2) for k in (1, 3)]

    def validation_step(self, batch, batch_idx, dataloader_idx):
        self.log("mean", batch[0].mean())
"""
        task = lit(methods)
        assert task.evaluate(task.model()) == {"mean/dataloader_idx_0": 1.0, "mean/dataloader_idx_1": 3.0}

    @pytest.mark.parametrize("methods", ["", "    def val_dataloader(self):\n        return None\n"])
    def test_without_one_there_is_nothing_to_evaluate_on(self, lit, methods):
        task = lit(methods, base=MODULE + OWN_LOADERS.partition("    def val_dataloader")[0])
        assert task.evaluate(task.model()) == {}

    @pytest.mark.parametrize("made", ['{"a": one, "b": three}', 'CombinedLoader([one, three], "sequential")'])
    def test_they_are_so_however_lightning_takes_them_together(self, lit, made):
        methods = f"""
    def val_dataloader(self):
        from lightning.pytorch.utilities.combined_loader import CombinedLoader
        one, three = (DataLoader(TensorDataset(torch.ones(4, 4) * k), batch_size=2) for k in (1, 3))
        return {made}

    def validation_step(self, batch, batch_idx, dataloader_idx):
        self.log("mean", batch[0].mean())
"""
        task = lit(methods)
        assert task.evaluate(task.model()) == {"mean/dataloader_idx_0": 1.0, "mean/dataloader_idx_1": 3.0}

    def test_a_look_at_memory_takes_batches_as_large_as_trainings_where_the_user_made_them_equal(self, lit):
        task = lit()
        trainer = Trainer(task, CPU, "fp32")
        trainer.forward_backward(task.worst_batch(10))
        assert task.evaluate(trainer.model, max_batches=1)["size"] == 10

    def test_a_run_is_measured_on_the_users_own_batches_whatever_it_trains_with(self, lit):
        own = OWN_LOADERS.replace("(10, 4)), batch_size=4", "(10, 4)), batch_size=4, drop_last=True")
        task = lit(base=MODULE + own)
        trainer = Trainer(task, CPU, "fp32")
        trainer.forward_backward(task.worst_batch(16))
        assert metric_value(trainer, "size", 16) == 4

    def test_few_batches_suffice_for_a_look_at_memory(self, lit):
        task = lit()
        assert task.evaluate(task.model(), max_batches=1)["size"] == 4


class TestProgress:
    TELLING = """
    batches = []

    def configure_optimizers(self):
        self.batches.append(self.trainer.num_training_batches)
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
    MEMORY = open_device("cpu")

    def test_each_run_has_the_batches_of_its_own_size_whatever_ran_before(self, lit):
        task = lit(self.TELLING)
        batches = task.model().batches
        for micro_batch_size, accumulation_steps, per_epoch in [(2, 2, 5), (10, 1, 2), (2, 2, 5), (10, 1, 2)]:
            spec = RunSpec(
                micro_batch_size=micro_batch_size, accumulation_steps=accumulation_steps, learning_rate=0.1,
                precision="fp32", seed=0, metric="val_loss", goal="minimize", target=None, limit_seconds=0.01,
                evaluate_every=1.0, evaluation_batch_size=4,
            )  # fmt: skip
            batches.clear()
            list(loop.train(task, self.MEMORY, spec))
            assert set(batches) == {per_epoch}

    def test_so_have_range_test_and_noise_scale(self, lit):
        task = lit(self.TELLING)
        batches = task.model().batches
        usual = {"precision": "fp32", "seconds": 5.0}
        rising = RunRangeTest(batch_size=10, lowest_rate=1e-4, highest_rate=1e-3, steps=2, **usual)
        range_test(task, self.MEMORY, rising)
        drawn = MeasureNoiseScale(small=4, large=8, learning_rate=1e-4, warm_up_steps=1, draws=1, **usual)
        noise_scale(task, self.MEMORY, drawn)
        assert batches == [2, 5]

    def test_an_epoch_has_as_many_batches_as_are_trained_in_it(self, lit):
        task = lit(self.TELLING)
        trainer, batches = Trainer(task, CPU, "fp32", samples_per_step=6), TrainingBatches(task, 6, 0)
        for _ in range(trainer.model.trainer.num_training_batches):
            assert trainer.model.current_epoch == 0
            trainer.step(batches)
        assert trainer.model.current_epoch == 1

    def test_of_two_ranks_it_has_half_as_many_and_the_module_knows_which_one_it_is(self, lit, monkeypatch):
        for name, value in {"is_initialized": True, "get_world_size": 2, "get_rank": 1}.items():
            monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        task = lit()
        trainer, batches = Trainer(task, CPU, "fp32", samples_per_step=8), TrainingBatches(task, 4, 0)
        view, epochs = trainer.model.trainer, []
        assert (view.world_size, view.num_devices, view.num_nodes) == (2, 2, 1)
        assert (view.global_rank, view.local_rank, view.node_rank, view.is_global_zero) == (1, 1, 0, False)
        for _ in range(5):  # an epoch of its 20 samples has two such steps
            trainer.step(batches)
            epochs.append((trainer.model.current_epoch, view.num_training_batches))
        assert epochs == [(0, 2), (1, 2), (1, 2), (2, 2), (2, 2)]


class TestModes:
    def test_what_the_user_froze_stays_in_eval_mode(self, lit):
        frozen = MODULE.replace("self.seen = []", "self.seen = []\n        self.body.eval()")
        trainer = trained(lit(base=frozen + OWN_LOADERS))
        metric_value(trainer, "val_loss", 4)
        model = trainer.model
        assert (model.training, model.head.training, model.body.training) == (True, True, False)


class TestHooks:
    def test_they_are_called_in_lightnings_order(self, lit):
        names = ["on_train_start", "on_train_epoch_start", "on_after_backward", "on_train_epoch_end"]
        methods = "".join(f"\n    def {name}(self):\n        self.seen.append('{name}')\n" for name in names)
        methods += """
    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append(batch_idx)

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(type(optimizer).__name__)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(float(outputs.requires_grad))
"""
        step = [0, "on_after_backward", "SGD", 0.0]
        epoch = [value for index in range(5) for value in (index, *step[1:])]
        start = ["on_train_start", "on_train_epoch_start"]
        assert trained(lit(methods), steps=4).model.seen == start + epoch[:16]
        six = trained(lit(methods), steps=6).model
        assert six.seen == [*start, *epoch, "on_train_epoch_end", "on_train_epoch_start", *step]
        assert (six.current_epoch, six.global_step) == (1, 6)

    def test_all_gather_of_one_device_is_its_own(self, lit):
        methods = """
    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append(self.all_gather(torch.ones(2), sync_grads=True).tolist())
"""
        assert trained(lit(methods)).model.seen == [[1.0, 1.0]]

    def test_transfer_hooks_of_the_datamodule_change_the_batch(self, lit):
        more = (
            DATAMODULE
            + "\n    def on_after_batch_transfer(self, batch, dataloader_idx):\n        return [batch[0] * 0]\n"
        )
        task = lit(more=more)
        model = task.model()
        assert task.loss(model, [torch.ones(2, 4)]).item() == model(torch.zeros(1, 4)).square().item()

    def test_loggers_take_everything_and_keep_nothing(self, lit):
        methods = """
    def on_train_start(self):
        self.logger.experiment.add_text("a", "b")
        self.print("started", self.trainer.max_epochs, self.trainer.datamodule, self.trainer.callback_metrics)
"""
        assert trained(lit(methods)).model.global_step == 1


class TestRefusals:
    @pytest.mark.parametrize(
        ("methods", "purpose", "words"),
        [
            ("\n    def optimizer_step(self, *a, **k): ...\n", "probe", r"overrides optimizer_step\(\)"),
            (
                "\n    def configure_optimizers(self):\n        return [torch.optim.SGD(self.parameters())] * 2\n",
                "probe",
                "returned 2 optimizers, which Lightning trains by manual optimization only",
            ),
            (
                "\n    def configure_callbacks(self):\n        return []\n",
                "probe",
                r"overrides configure_callbacks\(\), and batchtune trains without callbacks",
            ),
            ("\n    def configure_optimizers(self): ...\n", "probe", "configure_optimizers returned None"),
            ("\n    def training_step(self, dataloader_iter): ...\n", "probe", "let it take the batch"),
            (
                "\n    def train_dataloader(self):\n        return {'a': DataLoader([1]), 'b': DataLoader([2])}\n",
                "probe",
                r"train_dataloader\(\) returned 2 data loaders; batchtune takes one: join their data sets, or",
            ),
            (
                "\n    def train_dataloader(self):\n        return DataLoader([1, 2], batch_sampler=[[0], [1]])\n",
                "probe",
                r"batch sampler of its own \(list\)",
            ),
            (
                "\n    def train_dataloader(self):\n        return DataLoader([1, 2], batch_size=None)\n",
                "probe",
                "has no batch size",
            ),
            (
                PLATEAU.replace(": plateau", ': {"scheduler": plateau, "monitor": "val_loss", "interval": "step"}'),
                "tune",
                "ReduceLROnPlateau waits for the end of an epoch",
            ),
            ("\n    validation_step = L.LightningModule.validation_step\n", "tune", "tune needs a validation_step"),
        ],
    )
    def test_what_has_no_place_is_refused_in_one_line(self, lit, methods, purpose, words):
        with pytest.raises(UsageError, match=words) as refused:
            lit(methods).require(purpose)
        assert str(refused.value).startswith("my_task.py:Lit: ")
        assert "\n" not in str(refused.value)

    def test_a_plateau_schedule_does_not_keep_from_probing(self, lit):
        lit(PLATEAU).require("probe")

    @pytest.mark.parametrize(
        ("more", "words"),
        [
            ("", "no training data; write a train_dataloader"),
            (DATAMODULE + DATAMODULE.replace("Data(", "More("), r"several DataModules in the file \(Data, More\)"),
            (
                DATAMODULE.replace(
                    "def prepare_data(self):", "def __init__(self, path): ...\n    def prepare_data(self):"
                ),
                r"Data needs arguments \(path\); name a function that returns \(module, datamodule\)",
            ),
        ],
    )
    def test_data_that_is_not_found_is_asked_for(self, lit, more, words):
        with pytest.raises(UsageError, match=words):
            lit(more=more, base=MODULE).require("probe")

    def test_a_module_that_needs_arguments_is_asked_for_as_a_function(self, lit):
        with pytest.raises(UsageError, match=r"Lit needs arguments \(width\); name a function that returns a Lit"):
            lit(base=MODULE.replace("lr=0.1", "width"))

    @pytest.mark.parametrize(("name", "exists"), [("profiler", False), ("global_step", True)])
    def test_what_the_trainer_is_asked_for_is_told_where_it_is_not_there(self, lit, name, exists):
        model = lit().model()
        assert hasattr(model.trainer, name) is exists
        if not exists:
            with pytest.raises(UsageError, match=rf"uses self\.trainer\.{name}: batchtune trains the module without"):
                getattr(model.trainer, name)

    def test_an_error_of_the_users_stays_theirs(self, lit):
        with pytest.raises(ZeroDivisionError):
            lit("\n    def setup(self, stage):\n        1 / 0\n").require("probe")

    def test_a_step_without_a_loss_is_named(self, lit):
        task = lit("\n    def training_step(self, batch): ...\n")
        with pytest.raises(UsageError, match="training_step returned NoneType instead of a loss"):
            task.loss(task.model(), [torch.ones(2, 4)])


class TestApplyResult:
    def fit(self, lit, path, data=None, text="", **options):
        import lightning
        from lightning.pytorch import Callback

        from batchtune.task.lightning import ApplyResult

        seen = {}

        class Spy(Callback):
            def on_train_batch_start(self, trainer, module, batch, batch_idx):
                seen.update(batch=len(batch[0]), rates=[group["lr"] for group in trainer.optimizers[0].param_groups])

            def on_train_end(self, trainer, module):
                seen.update(steps=trainer.global_step)

        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, limit_val_batches=0, callbacks=[ApplyResult(path), Spy()], **options,
        )  # fmt: skip
        lit(text)
        module = sys.modules["my_task"].Lit()
        trainer.fit(module, data)
        return seen

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("given", ["hooks", "loader"])
    def test_a_run_trains_with_what_is_recommended(self, lit, result_file, given):
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(20, 4)), batch_size=2)
        seen = self.fit(lit, result_file(), data if given == "loader" else None)
        assert seen["batch"] == 5
        assert seen["steps"] == 2  # twenty samples by 5 × 2
        assert seen["rates"] == pytest.approx([0.002, 0.02])

    def test_another_precision_is_said(self, lit, result_file):
        with pytest.warns(
            UserWarning, match=r"measured in bf16, this Trainer has precision='32-true'; give it 'bf16-mixed'"
        ):
            self.fit(lit, result_file(precision="bf16"))

    def test_a_result_without_a_recommendation_is_refused(self, result_file):
        from batchtune.task.lightning import ApplyResult

        with pytest.raises(UsageError, match="a result of 'probe' that recommends nothing; apply one of 'tune'"):
            ApplyResult(result_file(kind="probe", recommendation=None))


def test_a_loader_is_made_again_with_another_batch_size():
    samples = list(range(10))
    loader = torch.utils.data.DataLoader(samples, batch_size=3, drop_last=True, collate_fn=list)
    assert list(resized(loader, 4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    parts = loader_parts(resized(loader, 4), "it")
    assert (parts.batch_size, parts.drop_last) == (4, loader.drop_last)


class TestRanksOfTheUsersTrainer:
    MAIN = "\ndef main(args):\n    L.Trainer({}).fit(Lit())\n"

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            ("strategy='ddp', devices=4", "--ranks 4 --strategy ddp"),
            ("strategy='fsdp', devices='auto'", "--ranks N --strategy fsdp"),
            ("strategy=FSDPStrategy(sharding_strategy='FULL_SHARD'), devices=[0, 1]", "--ranks 2 --strategy fsdp"),
            ("strategy=L.strategies.DDPStrategy(gradient_as_bucket_view=True)", "--ranks N --strategy ddp"),
            ("devices=2", "--ranks 2 --strategy ddp"),
            ("strategy=args.strategy", "tune with --ranks N and --strategy ddp or fsdp"),
        ],
    )
    def test_a_note_says_how_to_tune_on_as_many(self, lit, arguments, told, monkeypatch):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        task = lit(more=self.MAIN.format(arguments))
        task.require("probe")
        (note,) = task.source.notes
        assert note.endswith(told)

    @pytest.mark.parametrize("arguments", ["strategy='auto', devices=1", "strategy='ddp', devices=2"])
    def test_there_is_none_for_one_device_nor_where_ranks_train_as_one(self, lit, arguments, monkeypatch):
        if "ddp" in arguments:
            monkeypatch.setenv("WORLD_SIZE", "2")
        task = lit(more=self.MAIN.format(arguments))
        task.require("probe")
        assert task.source.notes == ()

    @pytest.mark.parametrize(
        "strategy",
        ["'deepspeed_stage_3'", "DeepSpeedStrategy(stage=2)", "ModelParallelStrategy()", "'fsdp_cpu_offload'"],
    )
    def test_what_has_no_equal_here_is_refused_with_what_takes_its_place(self, lit, strategy):
        task = lit(more=self.MAIN.format(f"strategy={strategy}"))
        with pytest.raises(UsageError, match=r"its Trainer's strategy .* is not taken over: leave it out, and tune"):
            task.require("probe")

    def test_that_of_a_trainer_in_the_file_is_told_too(self, lit, monkeypatch):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        made = "L.Trainer(strategy='ddp', devices=2, accelerator='cpu', logger=False, enable_checkpointing=False)"
        task = lit(more=f"\ntrainer = {made}\n")
        task.require("probe")
        assert task.source.notes[0].endswith("tune with --ranks 2 --strategy ddp")
