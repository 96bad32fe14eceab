"""Optimizer steps as the user trains."""

import dataclasses
import random
import weakref
from collections import namedtuple
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from batchtune.child.trainer import Trainer, TrainingBatches, move, seed_everything
from batchtune.errors import EpochTooShortError, UserCodeError

CPU = torch.device("cpu")


@pytest.fixture
def trainer(linear_task):
    def make(precision="fp32", learning_rate=0.1, seed=0, total_steps=None, samples_per_step=None, **functions):
        scheduled = {"total_steps": total_steps, "samples_per_step": samples_per_step}
        return Trainer(linear_task(**functions), CPU, precision, learning_rate=learning_rate, seed=seed, **scheduled)

    return make


def weights(trainer: Trainer) -> torch.Tensor:
    return trainer.model.weight.detach().clone()


def batch_of(task, size):
    return next(TrainingBatches(task, size, 0))


class TestSteps:
    def test_accumulated_micro_batches_equal_one_large_batch(self, trainer):
        whole, parts = trainer(), trainer()
        inputs, values = batch_of(whole.task, 32)
        whole.step(iter([(inputs, values)]))
        parts.step(iter(zip(inputs.split(8), values.split(8), strict=True)), 4)
        assert torch.allclose(weights(whole), weights(parts), atol=1e-6)

    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
    def test_training_lowers_the_loss_in_every_precision(self, trainer, precision):
        learning = trainer(precision)
        batches = TrainingBatches(learning.task, 16, 0)
        losses = [float(learning.step(batches)) for _ in range(40)]
        assert losses[-1] < losses[0] / 10

    def test_the_learning_rate_is_the_one_given(self, trainer):
        slow, fast = trainer(learning_rate=0.01), trainer(learning_rate=0.1)
        start, batch = weights(slow), batch_of(slow.task, 8)
        for each in (slow, fast):
            each.step(iter([batch]))
        ratio = (weights(fast) - start) / (weights(slow) - start)
        assert torch.allclose(ratio, torch.full_like(ratio, 10), rtol=1e-2)

    def test_gradients_are_freed_after_a_step(self, trainer):
        once = trainer()
        once.step(iter([batch_of(once.task, 8)]))
        assert all(parameter.grad is None for parameter in once.model.parameters())

    def test_the_scheduler_takes_one_step_for_each_of_the_optimizers(self, trainer):
        horizons = []

        def build_scheduler(optimizer, total_steps):
            horizons.append(total_steps)
            return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_steps)

        scheduled = trainer(total_steps=10, build_scheduler=build_scheduler)
        batches = TrainingBatches(scheduled.task, 4, 0)
        for _ in range(5):
            scheduled.step(batches, 3)
        assert horizons == [10]
        assert scheduled.optimizers.param_groups[0]["lr"] == pytest.approx(0.05)

    @pytest.mark.parametrize(("samples", "steps"), [(4, 16), (5, 12), (99, 1)])
    def test_the_scheduler_is_told_how_many_steps_an_epoch_has_where_it_asks(self, trainer, samples, steps):
        told = []

        def build_scheduler(_optimizer, _total_steps, steps_per_epoch):
            told.append(steps_per_epoch)

        trainer(total_steps=10, samples_per_step=samples, build_scheduler=build_scheduler)
        assert told == [steps]

    def test_an_epoch_of_batches_that_the_user_makes_has_no_number_of_steps(self, trainer):
        own = {"train_loader": lambda _size: iter(())}
        own["build_scheduler"] = lambda _optimizer, _total_steps, steps_per_epoch: steps_per_epoch
        with pytest.raises(UserCodeError, match="asks for steps_per_epoch, which is known where train_dataset has a"):
            trainer(total_steps=10, samples_per_step=4, **own)

    def test_without_a_horizon_there_is_no_scheduler(self, trainer):
        assert trainer(build_scheduler=lambda *_: pytest.fail("not asked for")).schedulers == []

    def test_the_model_is_in_training_mode(self, trainer):
        assert trainer(build_model=lambda: nn.Linear(4, 1).eval()).model.training

    def test_a_loss_without_a_graph_is_explained(self, trainer):
        broken = trainer(compute_loss=lambda _model, batch: batch[0].mean())
        with pytest.raises(UserCodeError, match="without a graph; no parameter of the model leads to it"):
            broken.forward_backward(batch_of(broken.task, 4))


class TestSeeds:
    def test_the_same_seed_gives_the_same_weights_and_another_one_others(self, trainer):
        assert torch.equal(weights(trainer(seed=3)), weights(trainer(seed=3)))
        assert not torch.equal(weights(trainer(seed=3)), weights(trainer(seed=4)))

    @pytest.mark.parametrize("draw", [random.random, lambda: float(torch.rand(1)), np.random.rand])
    def test_every_source_of_random_numbers_is_seeded(self, draw):
        def first() -> float:
            seed_everything(2**31 - 1)
            return draw()

        assert first() == first()


class TestBatches:
    def test_an_epoch_has_every_sample_once_in_an_order_of_its_own(self, linear_task):
        task = linear_task(train_dataset=lambda: list(range(10)))
        epochs = [torch.cat(list(part)).tolist() for part in self._epochs(task, 5, 2)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2
        assert epochs[0] != epochs[1]

    @staticmethod
    def _epochs(task, size, count):
        batches = TrainingBatches(task, size, 0)
        return [list(islice(batches, 10 // size)) for _ in range(count)]

    def test_the_order_follows_from_the_seed(self, linear_task):
        task = linear_task(train_dataset=lambda: list(range(100)))
        orders = [torch.cat(list(islice(TrainingBatches(task, 10, seed), 10))).tolist() for seed in (1, 1, 2)]
        assert orders[0] == orders[1] != orders[2]

    def test_incomplete_batches_are_left_out(self, linear_task):
        task = linear_task(train_dataset=lambda: list(range(10)))
        assert {len(batch) for batch in islice(TrainingBatches(task, 4, 0), 12)} == {4}

    def test_a_set_smaller_than_the_batch_is_given_whole(self, linear_task):
        task = linear_task(train_dataset=lambda: list(range(3)))
        assert {len(batch) for batch in islice(TrainingBatches(task, 4, 0), 3)} == {3}

    def test_the_users_collate_makes_the_batches(self, linear_task):
        task = linear_task(train_dataset=lambda: list(range(8)), collate=sum)
        assert sum(islice(TrainingBatches(task, 4, 0), 2)) == sum(range(8))

    def test_a_stream_starts_again_when_it_ends(self, linear_task):
        class Stream(IterableDataset):
            def __iter__(self):
                return iter(range(4))

        task = linear_task(train_dataset=Stream)
        assert [batch.tolist() for batch in islice(TrainingBatches(task, 2, 0), 3)] == [[0, 1], [2, 3], [0, 1]]

    def test_what_is_left_of_a_stream_is_no_batch_and_does_not_count_as_one(self, linear_task):
        class Stream(IterableDataset):
            def __iter__(self):
                return iter(range(5))

        task = linear_task(train_dataset=Stream)
        assert [len(batch) for batch in islice(TrainingBatches(task, 2, 0), 5)] == [2] * 5
        with pytest.raises(UserCodeError, match="train_dataset yields no batch of 6 samples in an epoch"):
            next(TrainingBatches(task, 6, 0))

    def test_a_stream_without_samples_is_an_error_and_no_endless_loop(self, linear_task):
        class Empty(IterableDataset):
            def __iter__(self):
                return iter(())

        with pytest.raises(UserCodeError, match=r"train_dataset yields no batch of . samples in an epoch"):
            next(TrainingBatches(linear_task(train_dataset=Empty), 2, 0))


class TestMove:
    Pair = namedtuple("Pair", "inputs values")  # noqa: PYI024 - as users write it

    def test_tensors_go_along_in_any_nesting_and_the_rest_stays(self):
        meta, tensor = torch.device("meta"), torch.zeros(2)
        moved = move({"a": [tensor, "text"], "b": (tensor, 3), "c": self.Pair(tensor, None)}, meta)
        assert {moved["a"][0].device, moved["b"][0].device, moved["c"].inputs.device} == {meta}
        assert (moved["a"][1], moved["b"][1], moved["c"].values) == ("text", 3, None)
        assert isinstance(moved["c"], self.Pair)

    def test_whatever_knows_how_to_move_does_so(self):
        mover = SimpleNamespace(to=lambda device: f"on {device}")
        assert move([mover], CPU) == ["on cpu"]


def test_a_plain_tensor_dataset_works_too(linear_task):
    task = linear_task(train_dataset=lambda: TensorDataset(torch.arange(6.0)))
    assert len(next(TrainingBatches(task, 2, 0))[0]) == 2


class Sentence:
    """A batch that is an object of the user's."""

    def __init__(self, words):
        self.words = words


@dataclasses.dataclass(frozen=True)
class Graphs:
    nodes: torch.Tensor
    names: list


class TestBatchesOfTheUsersOwn:
    @staticmethod
    def loader(batch_size):
        """A text cut into columns, read row by row."""
        columns = torch.arange(60).reshape(batch_size, -1)
        return [columns[:, at : at + 2] for at in range(0, columns.shape[1], 2)]

    def test_an_epoch_is_over_before_the_next_is_made(self, linear_task):
        alive = weakref.WeakSet()

        class Epoch:
            def __init__(self):
                assert not alive
                alive.add(self)
                self.left = iter([torch.zeros(4, 1)] * 2)

            def __iter__(self):
                return self

            def __next__(self):
                return next(self.left)

        class Loader:
            def __iter__(self):
                return Epoch()

        batches = TrainingBatches(linear_task(train_loader=lambda _size: Loader()), 4, 0)
        assert len([next(batches) for _ in range(6)]) == 6
        assert batches.epochs_ended() == 3
        assert len([next(batches) for _ in range(2)]) == 2

    def test_a_loader_keeps_its_order_and_starts_again(self, linear_task):
        task = linear_task(train_loader=self.loader)
        batches = TrainingBatches(task, 10, 0)
        columns = [next(batches)[0].tolist() for _ in range(4)]
        assert columns == [[0, 1], [2, 3], [4, 5], [0, 1]]
        assert batches.samples == 40

    def test_samples_are_counted_by_the_user(self, linear_task):
        def loader(batch_size):
            return [Sentence("a" * batch_size), Sentence("a")]

        task = linear_task(train_loader=loader, batch_size_of=lambda batch: len(batch.words))
        batches = TrainingBatches(task, 10, 0)
        assert [len(next(batches).words) for _ in range(3)] == [10, 1, 10]
        assert batches.samples == 21

    def test_the_worst_batch_is_the_largest_of_the_first(self, linear_task):
        sizes = [3, 7, 5]
        task = linear_task(train_loader=lambda size: [torch.zeros(size, length) for length in sizes])
        assert task.worst_batch(4).shape == (4, 7)

    @pytest.mark.parametrize(
        ("functions", "words"),
        [
            ({"train_loader": lambda _size: 3}, "train_loader returned an int, not batches to go through"),
            ({"train_loader": lambda _size: []}, r"train_loader\(8\) yields no batch"),
            (
                {"train_loader": lambda _size: [torch.zeros(4)] * 2, "batch_size_of": len},
                r"train_loader\(8\) yields batches of 4 samples, says batch_size_of; its batches must be as large",
            ),
            (
                {"train_loader": lambda size: [torch.zeros(size)], "batch_size_of": lambda _batch: None},
                "batch_size_of returned None, not a number of samples",
            ),
            (
                {"train_loader": lambda _size: [torch.zeros(4, 8)] * 2},
                r"train_loader\(8\) yields batches of another size; its batches must be as large as asked",
            ),
        ],
    )
    def test_what_is_wrong_with_them_is_said(self, linear_task, functions, words):
        with pytest.raises(UserCodeError, match=words):
            linear_task(**functions).worst_batch(8)

    @pytest.mark.parametrize("size", [1, 2])
    def test_where_each_batch_is_a_whole_graph_the_remedy_is_to_say_so(self, linear_task, size):
        loading = {"train_loader": lambda _size: [torch.zeros(600, 64)]}
        with pytest.raises(UserCodeError, match=r"another size; .* def batch_size_of\(batch\): return 1$"):
            linear_task(**loading).worst_batch(size)
        assert linear_task(**loading, batch_size_of=lambda _batch: 1).worst_batch(1).shape == (600, 64)

    @pytest.mark.parametrize(
        ("make_batch", "settings"),
        [
            (torch.stack, {}),
            (torch.stack, {"drop_last": True}),
            (Sentence, {"batch_size_of": lambda batch: len(batch.words)}),
            (lambda samples: Graphs(torch.cat([sample[: 1 + i % 3] for i, sample in enumerate(samples)]), []), {}),
            (lambda samples: (torch.stack(samples, 1), torch.zeros(len(samples), 64)), {}),
        ],
        ids=["whole", "drop_last", "counted", "no dimension has as many", "features as many as asked for"],
    )
    def test_no_batch_is_larger_than_an_epoch(self, linear_task, make_batch, settings):
        data, keys = torch.randn(37, 5), {"batch_size", "drop_last"}
        loading = {"collate_fn": make_batch} | {name: value for name, value in settings.items() if name in keys}
        functions = {name: value for name, value in settings.items() if name not in keys}
        task = linear_task(train_loader=lambda size: DataLoader(data, size, **loading), **functions)
        for fits in (1, 2, 5, 19, 36):
            task.worst_batch(fits)
        for too_large in (38, 64, 1000):
            with pytest.raises(
                EpochTooShortError, match=rf"train_loader\({too_large}\) yields less than one"
            ) as caught:
                task.worst_batch(too_large)
            assert caught.value.samples == (36 if isinstance(task.worst_batch(3), Graphs) else 37)

    def test_what_the_loader_leaves_over_tells_whether_one_batch_of_graphs_is_whole(self, linear_task):
        def graphs(samples):
            return Graphs(torch.cat([sample[: 1 + i % 3] for i, sample in enumerate(samples)]), [])

        data = torch.randn(37, 5)
        task = linear_task(train_loader=lambda size: DataLoader(data, size, drop_last=True, collate_fn=graphs))
        for fits in (19, 30, 37):
            task.worst_batch(fits)
        with pytest.raises(EpochTooShortError) as caught:
            task.worst_batch(38)
        assert caught.value.samples == 37

    def test_an_epoch_is_not_read_again_and_again_to_know_what_it_has(self, linear_task):
        asked = []

        def loader(size):
            asked.append(size)
            return DataLoader(torch.randn(1000, 2), size, drop_last=True)

        with pytest.raises(EpochTooShortError):
            linear_task(train_loader=loader).worst_batch(100_000)
        assert len(asked) < 8

    @pytest.mark.parametrize("size", [1, 2, 1000])
    def test_a_loader_that_draws_one_batch_of_several_points_a_sample_may_be_of_any_size(self, linear_task, size):
        assert len(linear_task(train_loader=lambda size: [torch.randn(3 * size, 2)]).worst_batch(size)) == 3 * size

    @pytest.mark.parametrize("size", [300, 400, 600])
    def test_a_loader_with_a_largest_batch_of_its_own_has_no_larger_one(self, linear_task, size):
        data = torch.randn(1000, 5)
        task = linear_task(train_loader=lambda size: DataLoader(data, min(size, 256)))
        task.worst_batch(256)
        with pytest.raises(UserCodeError, match=rf"train_loader\({size}\) yields batches of another size"):
            task.worst_batch(size)

    def test_a_loader_is_enough_to_probe_and_with_evaluate_to_tune(self, linear_task):
        for purpose in ("probe", "tune"):
            task = linear_task(train_dataset=None, train_loader=self.loader, evaluate=lambda _model: 0.0)
            task.require(purpose)
            assert task.train_size() is None

    def test_dataclasses_are_moved_field_by_field(self):
        moved = move(Graphs(torch.zeros(2), ["a"]), torch.device("meta"))
        assert moved.nodes.device.type == "meta"
        assert moved.names == ["a"]
