"""Evaluation: which metric, over what, and without a trace in training."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from batchtune.child import evaluate
from batchtune.child.evaluate import adds_up, fitting_metric_value, metric_value
from batchtune.child.trainer import Trainer
from batchtune.errors import UsageError, UserCodeError


@pytest.fixture
def trainer(linear_task):
    return lambda precision="fp32", **functions: Trainer(linear_task(**functions), torch.device("cpu"), precision)


class TestUsersOwn:
    def test_a_float_is_whatever_metric_is_asked_for(self, trainer):
        assert metric_value(trainer(evaluate=lambda _model: 0.25), "anything", 8) == 0.25

    def test_a_dict_is_asked_by_name(self, trainer):
        scores = trainer(evaluate=lambda _model: {"val_loss": 2.0, "accuracy": torch.tensor(0.5)})
        assert metric_value(scores, "accuracy", 8) == 0.5

    def test_a_metric_that_is_not_there_is_answered_with_those_that_are(self, trainer):
        scores = trainer(evaluate=lambda _model: {"val_loss": 2.0, "accuracy": 0.5})
        with pytest.raises(UsageError, match=r"'f1' is not among what .* in model.py returns: val_loss, accuracy; cho"):
            metric_value(scores, "f1", 8)

    @pytest.mark.parametrize("others", [None, {}, {"val_loss": 2.0}])
    def test_ranks_but_the_first_may_have_none(self, trainer, others):
        scores, told = trainer(evaluate=lambda _model: others), []
        first = iter([1.0, 0.5])  # it has one
        scores.ranks = SimpleNamespace(
            rank=1, world_size=2, align=lambda _: None, together=lambda *said: told.append(said) or next(first)
        )
        assert metric_value(scores, "accuracy", 8) == 0.5
        assert told[0] == ("first", 0.0)
        assert math.isnan(told[1][1])

    def test_where_the_first_has_none_each_rank_says_so(self, trainer):
        scores = trainer(evaluate=lambda _model: {"val_loss": 2.0})
        scores.ranks = SimpleNamespace(rank=1, world_size=2, align=lambda _: None, together=lambda *_: 0.0)
        with pytest.raises(UsageError, match="'accuracy' is not among what"):
            metric_value(scores, "accuracy", 8)

    def test_the_first_must_have_one(self, trainer):
        with pytest.raises(UserCodeError, match="evaluate must return a float or a dict of floats"):
            metric_value(trainer(evaluate=lambda _model: None), "accuracy", 8)

    def test_the_one_that_was_meant_is_proposed(self, trainer):
        with pytest.raises(UsageError, match=r"choose one: objective\.metric=eval_f1$"):
            metric_value(trainer(evaluate=lambda _model: {"eval_loss": 2.0, "eval_f1": 0.5}), "f1", 8)

    def test_the_model_is_in_eval_mode_without_gradients_and_back_afterwards(self, trainer):
        seen = []
        checked = trainer(evaluate=lambda model: seen.append((model.training, torch.is_grad_enabled())) or 1.0)
        metric_value(checked, "x", 8)
        assert seen == [(False, False)]
        assert checked.model.training
        assert torch.is_grad_enabled()

    def test_each_module_is_left_in_the_mode_in_which_it_was(self, trainer):
        parts = trainer(build_model=lambda: nn.Sequential(nn.Linear(4, 1), nn.Dropout()), evaluate=lambda _model: 1.0)
        parts.model[1].eval()
        metric_value(parts, "x", 8)
        assert [module.training for module in parts.model.modules()] == [True, True, False]

    def test_what_a_train_of_the_users_own_does_is_done_again(self, trainer):
        class Merging(nn.Linear):
            def train(self, mode=True):
                self.merged = not mode
                return super().train(mode)

        own = trainer(build_model=lambda: nn.Sequential(Merging(4, 1)), evaluate=lambda model: float(model[0].merged))
        assert metric_value(own, "x", 8) == 1.0
        assert not own.model[0].merged

    def test_an_evaluation_that_raises_leaves_training_mode_on(self, trainer):
        broken = trainer(evaluate=lambda _model: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            metric_value(broken, "x", 8)
        assert broken.model.training


class TestMeanLoss:
    def test_it_is_the_mean_over_samples_whatever_the_batch(self, trainer):
        default = trainer()
        inputs, values = default.task.val_data.tensors
        whole = float(nn.functional.mse_loss(default.model(inputs), values).detach())
        for batch_size in (32, 8, 7, 1, 100):
            assert metric_value(default, "val_loss", batch_size) == pytest.approx(whole, rel=1e-5)

    def test_a_loss_that_differentiates_is_given_gradients(self, trainer):
        held = []

        def residual(model, batch):
            place = batch[0].requires_grad_()
            (slope,) = torch.autograd.grad(model(place).sum(), place, create_graph=True)
            held.append(torch.is_grad_enabled())
            return (slope - 1).square().mean()

        own = trainer(compute_loss=residual)
        expected = float((own.model.weight.detach() - 1).square().mean())
        assert metric_value(own, "val_loss", 8) == pytest.approx(expected, rel=1e-5)
        scores = trainer(evaluate=lambda model: {"residual": residual(model, [torch.ones(2, 4)])})
        assert metric_value(scores, "residual", 8) == pytest.approx(expected, rel=1e-5)
        assert all(held)

    def test_gradients_that_an_evaluation_leaves_are_not_trained_with(self, trainer):
        def attacked(model):
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            return {"loss": loss}

        own = trainer(evaluate=attacked)
        for before in (None, torch.ones_like(own.model.weight)):  # of accumulation under way
            own.model.weight.grad = before
            metric_value(own, "loss", 8)
            assert own.model.weight.grad is before

    def test_an_error_of_another_kind_is_not_tried_again(self, trainer):
        calls = []

        def failing(_model, _batch):
            calls.append(1)
            raise RuntimeError("no such label")

        with pytest.raises(RuntimeError, match="no such label"):
            metric_value(trainer(compute_loss=failing), "val_loss", 8)
        assert len(calls) == 1

    def test_a_data_set_without_an_end_is_named(self, trainer, monkeypatch):
        class Endless(IterableDataset):
            def __iter__(self):
                while True:
                    yield torch.zeros(4), torch.zeros(1)

        monkeypatch.setattr(evaluate, "ENDLESS_SECONDS", 0.05)
        with pytest.raises(
            UserCodeError, match=r"val_dataset has given [\d,]+ samples in 0.05 s and goes on; give it an end"
        ):
            metric_value(trainer(val_dataset=Endless), "val_loss", 8)

    def test_it_can_stop_after_a_few_batches(self, trainer):
        sizes = []
        task = {"compute_loss": lambda _model, batch: sizes.append(len(batch[0])) or torch.tensor(1.0)}
        assert metric_value(trainer(**task), "val_loss", 8, max_batches=2) == 1.0
        assert sizes == [8, 8]

    def test_a_stream_is_evaluated_too(self, trainer):
        class Stream(IterableDataset):
            def __iter__(self):
                return ((torch.ones(4), torch.ones(1)) for _ in range(10))

        streaming = trainer(val_dataset=Stream, compute_loss=lambda _model, batch: batch[0].mean())
        assert metric_value(streaming, "val_loss", 4) == pytest.approx(1.0)

    def test_the_last_samples_of_a_stream_count_as_many_as_they_are(self, trainer):
        class Stream(IterableDataset):
            def __iter__(self):
                return ((torch.full((4,), float(number)), torch.ones(1)) for number in range(10))

        streaming = trainer(val_dataset=Stream, compute_loss=lambda _model, batch: batch[0].mean())
        for batch_size in (1, 4, 8, 100):
            assert metric_value(streaming, "val_loss", batch_size) == pytest.approx(4.5)

    @pytest.mark.parametrize("of", [lambda batch: batch, lambda batch: (row for row in zip(*batch, strict=True))])
    def test_a_data_set_that_gives_whole_batches_is_weighted_by_its_samples(self, trainer, of):
        class Whole(Dataset):
            inputs, targets = torch.arange(10.0).repeat(4, 1).T, torch.ones(10, 1)

            def __len__(self):
                return 10

            def __getitem__(self, index):
                return self.inputs[index], self.targets[index]

            def __getitems__(self, indices):
                return of((self.inputs[indices], self.targets[indices]))

        def collate(found):
            return found if torch.is_tensor(found[0]) else default_collate(found)

        whole = trainer(val_dataset=Whole, collate=collate, compute_loss=lambda _model, batch: batch[0].mean())
        for batch_size in (1, 4, 8, 100):
            assert metric_value(whole, "val_loss", batch_size) == pytest.approx(4.5)

    def test_any_other_metric_needs_an_evaluate(self, trainer):
        with pytest.raises(
            UsageError, match=r"'accuracy': model.py has no evaluate\(\), so the only metric is 'val_loss'"
        ):
            metric_value(trainer(), "accuracy", 8)


LOSSES = {
    "mean": lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    "sum": lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum"),
    "negative sum": lambda model, batch: -nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum"),
    "noisy sum": lambda model, batch: (model(batch[0]).square() + torch.rand(1) + 20).sum(),
    "noise": lambda _model, _batch: torch.rand(()).exp(),
    "infinite": lambda model, batch: (model(batch[0]) - torch.inf).mean(),
    "contrastive": lambda model, batch: (model(batch[0]) @ model(batch[0]).T).logsumexp(1).mean(),
    "error": lambda _model, _batch: 1 / 0,
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("count", "batch_size", "seen"), [(64, 50, True), (4, 4, True), (3, 8, False), (64, 3, False)])
def test_whether_a_loss_adds_up_its_batch_is_seen_of_a_few_samples(linear_task, loss, count, batch_size, seen):
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(count, 4), torch.randn(count, 1))
    model = Trainer(linear_task(val_dataset=lambda: data, compute_loss=LOSSES[loss]), torch.device("cpu"), "fp32")
    assert adds_up(model, batch_size) == (seen and loss.endswith("sum"))
    assert model.model.training


class TestMemory:
    def scene(self, trainer, fake_device, most, **functions):
        """A trainer whose evaluation has room for so many samples at once, its memory, and the sizes that it saw."""
        sizes = []

        def compute_loss(model, batch):
            sizes.append(len(batch[0]))
            if sizes[-1] > most:
                raise torch.OutOfMemoryError("no")
            return nn.functional.mse_loss(model(batch[0]), batch[1])

        return trainer(**{"compute_loss": compute_loss} | functions), fake_device(), sizes

    def test_where_the_samples_of_an_evaluation_do_not_fit_at_once_half_of_them_are_taken(self, trainer, fake_device):
        tight, memory, sizes = self.scene(trainer, fake_device, most=5)
        roomy, *_ = self.scene(trainer, fake_device, most=32)
        value, batch_size = fitting_metric_value(tight, memory, "val_loss", 32)
        assert (batch_size, sizes[:4]) == (4, [32, 16, 8, 4])
        assert memory.released == 3
        assert value == pytest.approx(metric_value(roomy, "val_loss", 32))
        assert fitting_metric_value(roomy, memory, "val_loss", 32)[1] == 32

    def test_one_sample_that_does_not_fit_is_the_end_of_it(self, trainer, fake_device):
        tight, memory, sizes = self.scene(trainer, fake_device, most=0)
        with pytest.raises(torch.OutOfMemoryError):
            fitting_metric_value(tight, memory, "val_loss", 3)
        assert sizes == [3, 1]

    def test_what_the_task_evaluates_itself_is_not_called_again(self, trainer, fake_device):
        calls = []
        own, memory, _ = self.scene(
            trainer, fake_device, most=0, evaluate=lambda model: calls.append(1) or model(torch.ones(1, 4)) / {}
        )
        with pytest.raises(TypeError):
            fitting_metric_value(own, memory, "x", 8)
        out = trainer(evaluate=lambda _model: calls.append(1) or allocate_too_much())
        with pytest.raises(torch.OutOfMemoryError):
            fitting_metric_value(out, memory, "x", 8)
        assert len(calls) == 2

    def test_an_error_that_is_none_of_memory_is_the_users(self, trainer, fake_device):
        broken, memory, _ = self.scene(trainer, fake_device, most=0, compute_loss=lambda model, batch: batch.nothing)
        with pytest.raises(AttributeError):
            fitting_metric_value(broken, memory, "val_loss", 8)


def allocate_too_much():
    raise torch.OutOfMemoryError("too much")


class TestRandomNumbers:
    @pytest.mark.parametrize(
        "draw", [lambda: float(torch.rand(1)), random.random, np.random.rand], ids=["torch", "Python", "NumPy"]
    )
    def test_an_evaluation_that_draws_some_leaves_those_of_training_as_they_were(self, trainer, draw):
        noisy = trainer(evaluate=lambda _model: draw())
        assert self._drawn(noisy, draw, evaluate=True) == self._drawn(noisy, draw, evaluate=False)

    @staticmethod
    def _drawn(trainer, draw, *, evaluate):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(5)
        if evaluate:
            metric_value(trainer, "x", 8)
        return draw()
