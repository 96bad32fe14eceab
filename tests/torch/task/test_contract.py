"""What the user's functions must return, and what stands in for those they did not write."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from batchtune.errors import UsageError, UserCodeError
from batchtune.protocol.data import SamplesSeen
from batchtune.task.contract import Task
from batchtune.task.load import load_task
from batchtune.task.optimizers import Optimizers
from batchtune.task.own_loader import OwnLoader

WEIGHT = nn.Parameter(torch.zeros(1))


def task_of(**functions: object) -> Task:
    return Task(
        SimpleNamespace(**{"build_model": lambda: nn.Linear(4, 1), "compute_loss": mean_square} | functions), "m.py"
    )


def mean_square(model, batch):
    return model(batch).square().mean()


def padded(samples):
    whole = torch.zeros(len(samples), *(max(sizes) for sizes in zip(*(each.shape for each in samples), strict=True)))
    for place, sample in zip(whole, samples, strict=True):
        place[tuple(map(slice, sample.shape))] = sample
    return whole


def points(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count * 4.0).reshape(count, 4))


class Stream(IterableDataset):
    """Samples of growing size, and no length."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self):
        return (torch.zeros(size + 1) for size in range(self._count))


class TestRequirements:
    @pytest.mark.parametrize(
        ("functions", "purpose", "missing"),
        [
            ({"make_batch": None}, "probe", r"no make_batch\(batch_size\) .* or train_dataset\(\)"),
            (
                {},
                "tune",
                r"no train_dataset\(\) returning a torch Dataset or train_loader\(batch_size\) .*; 'batchtune init'",
            ),
            ({"train_dataset": lambda: points(9)}, "tune", r"no val_dataset\(\) .* or evaluate\(model\)"),
        ],
    )
    def test_the_first_missing_piece_is_named_with_the_remedy(self, functions, purpose, missing):
        with pytest.raises(UserCodeError, match=missing):
            task_of(**functions).require(purpose)

    @pytest.mark.parametrize(
        ("functions", "purpose"),
        [
            ({"make_batch": torch.zeros}, "probe"),
            ({"train_dataset": lambda: points(1)}, "probe"),
            ({"train_dataset": lambda: points(9), "evaluate": len}, "tune"),
            ({"train_dataset": lambda: points(9), "val_dataset": lambda: points(1)}, "tune"),
            ({"train_dataset": lambda: Stream(9), "evaluate": len}, "tune"),
            ({"train_dataset": lambda: points(1), "evaluate": len, "batch_size_of": lambda _batch: 1}, "tune"),
        ],
    )
    def test_what_suffices_suffices(self, functions, purpose):
        task_of(**functions).require(purpose)

    def test_one_sample_leaves_nothing_to_choose(self):
        with pytest.raises(UserCodeError, match=r"has 1 sample; .* say so: def batch_size_of\(batch\): return 1$"):
            task_of(train_dataset=lambda: points(1), evaluate=len).require("tune")

    @pytest.mark.parametrize("name", ["train_dataset", "val_dataset"])
    def test_an_empty_data_set_is_found_before_the_work_starts(self, name):
        sets = {"train_dataset": lambda: points(9), "val_dataset": lambda: points(9), name: lambda: points(0)}
        with pytest.raises(UserCodeError, match=f"{name} returned a data set of 0 samples"):
            task_of(**sets).require("tune")

    def test_a_loss_is_needed_for_any_model_but_hugging_faces(self):
        with pytest.raises(UserCodeError, match=r"no compute_loss\(model, batch\) returning a scalar tensor"):
            task_of(compute_loss=None).model()
        kind = type("MyModel", (type("PreTrainedModel", (nn.Linear,), {}),), {})
        assert isinstance(task_of(compute_loss=None, build_model=lambda: kind(4, 1)).model(), kind)


@pytest.mark.parametrize(
    ("functions", "use", "words"),
    [
        (
            {"build_model": dict},
            lambda task: task.model(),
            "build_model returned a dict, not an nn.Module or a dict of them",
        ),
        (
            {"build_model": lambda: (nn.Linear(4, 1), "tokenizer")},
            lambda task: task.model(),
            r"returned a tuple, not an nn.Module or a dict of them; return its \[0\] alone",
        ),
        (
            {"compute_loss": lambda model, batch: (model(batch), model(batch).mean())},
            lambda task: task.loss(nn.Linear(4, 1), torch.zeros(2, 4)),
            r"compute_loss returned a tuple, not a tensor; return its \[1\] alone",
        ),
        (
            {"compute_loss": lambda model, batch: {"loss": model(batch).mean(), "step": 3}},
            lambda task: task.loss(nn.Linear(4, 1), torch.zeros(2, 4)),
            r"compute_loss returned a dict, not a tensor; return its \['loss'\] alone",
        ),
        (
            {"build_model": lambda: {"net": nn.Linear(4, 1), "step": 3}},
            lambda task: task.model(),
            "a dict in which 'step' is an int, not an nn.Module; a train_step keeps anything else in context.state",
        ),
        (
            {"build_model": lambda: {"items": nn.Linear(4, 1)}},
            lambda task: task.model(),
            "build_model returned a dict with a wrong key: .*items",
        ),
        (
            {"build_model": lambda: nn.Linear(4, 1, device="meta")},
            lambda task: task.model(),
            "build_model leaves parameters on the meta device, where they have no values; build it on the CPU",
        ),
        (
            {"build_optimizer": lambda model, lr: [model, lr]},
            lambda task: task.optimizers(nn.Linear(1, 1), 0.1),
            "build_optimizer returned a list with a Linear in it, not a torch.optim.Optimizer or a list or dict of",
        ),
        (
            {"build_optimizer": lambda _model, _lr: []},
            lambda task: task.optimizers(nn.Linear(1, 1), 0.1),
            "build_optimizer returned a list, not a torch.optim.Optimizer or a list or dict of them",
        ),
        (
            {"build_optimizer": lambda _model, _lr: SimpleNamespace(warmup=9, adam=torch.optim.Adam([WEIGHT]))},
            lambda task: task.optimizers(nn.Linear(1, 1), 0.1),
            r"list or dict of them; return its adam, and the learning rates that it sets from build_scheduler\(optimiz",
        ),
        (
            {"build_optimizer": lambda model, lr: torch.optim.LBFGS(model.parameters(), lr=lr)},
            lambda task: task.optimizers(nn.Linear(1, 1), 0.1),
            r"returned a LBFGS, whose step\(\) needs a closure: write a train_step.* calls context.step\(optimizers, c",
        ),
        (
            {"build_scheduler": lambda _optimizer, _steps: 3},
            lambda task: task.schedulers(Optimizers([]), 9),
            r"build_scheduler returned an int, which has no step\(\) without arguments",
        ),
        (
            {"build_scheduler": lambda _optimizer, _steps: torch.optim.lr_scheduler.ReduceLROnPlateau},
            lambda task: task.schedulers(Optimizers([]), 9),
            r"build_scheduler returned the class ReduceLROnPlateau, which has no step\(\) without arguments",
        ),
        (
            {"build_scheduler": lambda optimizer, _steps: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)},
            lambda task: task.schedulers(Optimizers(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)), 9),
            "ReduceLROnPlateau waits for the end of an epoch, and train_dataset has no length; use one by steps",
        ),
        (
            {"compute_loss": lambda _model, _batch: 0.5},
            lambda task: task.loss(nn.Linear(4, 1), torch.zeros(2, 4)),
            "compute_loss returned a float, not a tensor",
        ),
        (
            {"compute_loss": lambda model, batch: model(batch)},
            lambda task: task.loss(nn.Linear(4, 1), torch.zeros(2, 4)),
            r"compute_loss returned shape \(2, 1\), not a scalar; take its .mean\(\)",
        ),
        (
            {"train_dataset": lambda: iter([])},
            lambda task: task.train_data,
            "train_dataset returned a .*, not a Dataset",
        ),
        ({"train_dataset": lambda: Stream(0)}, lambda task: task.worst_batch(2), "a data set of 0 samples"),
        ({"evaluate": lambda _model: "good"}, lambda task: task.evaluate(None), r"evaluate\(\) is a str"),
        ({"evaluate": lambda _model: None}, lambda task: task.evaluate(None), r"evaluate\(\) is a NoneType"),
        ({"evaluate": lambda _model: torch.ones(2)}, lambda task: task.evaluate(None), r"evaluate\(\) is a Tensor"),
        ({"evaluate": lambda _model: {"f1": [1]}}, lambda task: task.evaluate(None), r"evaluate\(\)\['f1'\] is a list"),
    ],
)
def test_a_wrong_return_value_is_named(functions, use, words):
    with pytest.raises(UserCodeError, match=words):
        use(task_of(**functions))


@pytest.mark.parametrize("model", [nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1))], ids=["module", "sequential"])
def test_who_takes_the_model_for_its_parameters_is_told_what_build_optimizer_is_given(model):
    task = task_of(build_optimizer=torch.optim.SGD)
    with pytest.raises(TypeError, match=r"; build_optimizer is given the model: take model.parameters\(\)$"):
        task.optimizers(model, 0.1)


class TestStandIns:
    def test_the_optimizer_is_adamw(self):
        (optimizer,) = task_of().optimizers(nn.Linear(4, 1), 0.03)
        assert isinstance(optimizer, torch.optim.AdamW)
        assert optimizer.param_groups[0]["lr"] == 0.03

    def test_there_is_no_scheduler(self):
        assert task_of().schedulers(Optimizers([]), 9) == []
        assert task_of(build_scheduler=lambda _optimizer, _steps: None).schedulers(Optimizers([]), 9) == []

    def test_hugging_face_models_bring_their_loss(self):
        model = nn.Linear(4, 1)
        model.forward = lambda x: SimpleNamespace(loss=x.sum())
        assert float(task_of(compute_loss=None).loss(model, {"x": torch.ones(3)})) == 3

    def test_batches_are_collated_by_torch_or_by_the_user(self):
        samples = [torch.zeros(4), torch.ones(4)]
        assert task_of().collate(samples).shape == (2, 4)
        assert task_of(collate=len).collate(samples) == 2


class TestWorstBatch:
    def test_it_is_the_users_where_they_wrote_one(self):
        assert task_of(make_batch=lambda size: torch.ones(size, 4)).worst_batch(3).shape == (3, 4)

    def test_it_repeats_the_largest_sample(self):
        data = [torch.zeros(length) for length in (3, 9, 5)]
        assert task_of(train_dataset=lambda: data).worst_batch(4).shape == (4, 9)

    def test_it_looks_all_over_a_large_data_set(self):
        data = [torch.zeros(1 + index) for index in range(1000)]
        assert task_of(train_dataset=lambda: data).worst_batch(1).shape[1] == 1000

    def test_no_batch_of_a_shuffled_loop_is_larger_where_large_samples_lie_at_even_distances(self):
        sizes = [
            (3, 24, 8) if index % 100 == 49 else (3, 8, 30) if index % 100 == 99 else (3, 8, 8) for index in range(6400)
        ]
        data = [torch.zeros(size) for size in sizes]
        task = task_of(train_dataset=lambda: data, collate=padded)
        loader = torch.utils.data.DataLoader(data, 64, shuffle=True, collate_fn=padded)
        assert task.worst_batch(64).shape == (64, 3, 24, 30)
        assert max(batch.numel() for batch in loader) <= task.worst_batch(64).numel()

    def test_other_processes_train_the_same_batch_without_looking_again(self):
        class Random(torch.utils.data.Dataset):
            def __len__(self):
                return 10**12

            def __getitem__(self, index):
                read.append(index)
                return torch.zeros(int(torch.randint(1, 10**6, ())))

        read = []
        first, second = task_of(train_dataset=Random), task_of(train_dataset=Random)
        state = torch.get_rng_state()
        seen = first.find_worst_samples()
        assert seen.seen == len(read) > 100
        assert not seen.is_all
        read.clear()
        assert second.find_worst_samples(seen) == seen
        assert read == list(seen.places)
        assert torch.equal(second.worst_batch(2), first.worst_batch(2))
        assert torch.equal(torch.get_rng_state(), state)

    def test_the_longest_by_its_column_is_looked_at_first(self):
        class Rows(list):
            column_names = ("ids", "length")

            def __getitem__(self, key):
                return [len(row) for row in self] if key == "length" else super().__getitem__(key)

        task = task_of(train_dataset=lambda: Rows([torch.zeros(2), torch.zeros(7), torch.zeros(3)]))
        assert task.find_worst_samples().places == (1,)
        assert task.worst_batch(2).shape == (2, 7)

    def test_a_stream_is_looked_at_as_it_comes(self):
        assert task_of(train_dataset=lambda: Stream(10)).worst_batch(2).shape == (2, 10)


def test_the_data_sets_are_built_once():
    built = []
    task = task_of(train_dataset=lambda: built.append(1) or points(5))
    assert (task.train_size(), task.train_size(), task.train_data is task.train_data) == (5, 5, True)
    assert built == [1]


def test_streams_and_missing_sets_have_no_size():
    assert task_of().train_size() is None
    assert task_of(train_dataset=lambda: Stream(9)).train_size() is None


def test_metrics_come_as_plain_numbers():
    found = task_of(evaluate=lambda _model: {"acc": torch.tensor(0.5), "f1": np.float32(1), "n": 3}).evaluate(None)
    assert found == {"acc": 0.5, "f1": 1.0, "n": 3.0}
    assert task_of(evaluate=lambda _model: torch.tensor([[2.0]])).evaluate(None) == 2.0


@pytest.mark.parametrize("kept_bytes", [None, 4096])
def test_a_loader_works_beside_attempts_only_where_the_set_keeps_nothing_of_what_it_loads(kept_bytes):
    task = task_of(train_dataset=lambda: points(9))
    task.find_worst_samples(SamplesSeen(places=(0,), seen=9, total=9, is_all=True, differing={}, kept_bytes=kept_bytes))
    assert task.loads_soon(4) == (kept_bytes is None)


def test_the_worst_batch_of_a_stream_that_tells_its_size_is_read_from_its_start():
    class Stream(torch.utils.data.IterableDataset):
        def __len__(self):
            return 10

        def __iter__(self):
            return (torch.zeros(number + 1) for number in range(10))

    task = task_of(train_dataset=Stream, collate=torch.stack)
    assert task.train_size() == 10
    assert task.worst_batch(3).shape == (3, 10)


class TestWhatIsDrawnAtRandom:
    """Every process must have the same data: a target is set in one and reached in another."""

    def test_a_split_is_the_same_whatever_was_drawn_before(self):
        def split():
            return torch.randperm(50).tolist()

        def drawn(before):
            torch.manual_seed(before)
            data = type("Data", (), {"__len__": lambda _: 50, "__getitem__": lambda data, index: data.order[index]})
            made = []

            def train_dataset():
                made.append(data())
                made[-1].order = split()
                return made[-1]

            return task_of(train_dataset=train_dataset).train_data.order

        assert drawn(1) == drawn(2)

    def test_data_made_up_at_random_is_not_the_same_for_training_and_validation(self):
        def made_up():
            return TensorDataset(torch.randn(8, 4))

        task = task_of(train_dataset=made_up, val_dataset=made_up)
        assert not torch.equal(task.train_data[0][0], task.val_data[0][0])

    def test_building_a_data_set_leaves_the_random_numbers_of_a_run_alone(self):
        torch.manual_seed(3)
        expected = torch.rand(1)
        torch.manual_seed(3)
        task_of(train_dataset=lambda: TensorDataset(torch.randn(8, 4))).train_data  # noqa: B018 - it is built
        assert torch.equal(torch.rand(1), expected)

    def test_so_is_what_a_file_draws_while_it_is_imported(self, tmp_path):
        file = tmp_path / "model.py"
        file.write_text(
            "import random, torch\nDRAWN = random.random(), torch.rand(3).tolist()\n"
            "def build_model(): ...\ndef compute_loss(model, batch): ...\n"
        )
        torch.manual_seed(1)
        first = load_task(str(file)).source.DRAWN
        torch.manual_seed(2)
        assert first == load_task(str(file)).source.DRAWN


class Greedy(nn.Linear):
    """Its train() trains, as that of forward-forward networks does."""

    def train(self, positive, negative):
        raise AssertionError


class Frozen(nn.Linear):
    """Its train() keeps it in eval, as is usual."""

    def train(self, mode=True):
        return super().train(mode=False)


@pytest.mark.parametrize("made", [lambda: Greedy(4, 1), lambda: nn.Sequential(nn.Linear(4, 4), Greedy(4, 1))])
def test_a_model_in_which_train_is_not_torchs_is_told_so(made):
    functions = {"train_dataset": lambda: points(9), "evaluate": len}
    with pytest.raises(UserCodeError, match=r"train\(\) of Greedy takes other arguments than torch's"):
        task_of(build_model=made, **functions).model()
    assert not task_of(build_model=lambda: Frozen(4, 1), **functions).model().train().training


def test_to_tune_a_model_must_be_a_new_one_each_time():
    model = nn.Linear(4, 1)
    functions = {"build_model": lambda: model, "train_dataset": lambda: points(9), "evaluate": len}
    probed = task_of(**functions)
    assert probed.model() is probed.model()  # memory is the same
    tuned = task_of(**functions)
    tuned.require("tune")
    tuned.model()
    with pytest.raises(UserCodeError, match="build_model returned the same object again, which other runs"):
        tuned.model()


class TestActivationCheckpointing:
    """Asked of the parameter of build_model, or of a Hugging Face model's own switch; refused where there is none."""

    def test_build_model_is_asked_only_where_somebody_asks(self):
        asked = []

        def build_model(activation_checkpointing="as it is"):
            asked.append(activation_checkpointing)
            return nn.Linear(4, 1)

        task = task_of(build_model=build_model)
        task.model()
        task.model(activation_checkpointing=True)
        task.activation_checkpointing = False
        task.model()
        task.model(activation_checkpointing=True)
        assert asked == ["as it is", True, False, True]

    @pytest.mark.parametrize("kind", ["activation", "gradient"])
    def test_a_hugging_face_model_is_switched(self, kind):
        switched = []
        names = [f"{kind}_checkpointing_{each}" for each in ("enable", "disable")]
        methods = {name: lambda self, name=name: switched.append(name) for name in names}
        model = type("PreTrainedModel", (nn.Linear,), {"supports_gradient_checkpointing": True, **methods})
        task = task_of(build_model=lambda: model(4, 1))
        task.model(activation_checkpointing=True)
        task.model(activation_checkpointing=False)
        assert switched == names

    @pytest.mark.parametrize("asked", [True, False])
    def test_what_does_not_offer_it_is_refused_with_the_fix(self, asked):
        told = (
            f"activation_checkpointing {str(asked).lower()}: m.py: build_model does not offer it; give it a parameter"
        )
        with pytest.raises(UsageError, match=told):
            task_of().model(activation_checkpointing=asked)


@pytest.mark.parametrize("given", [lambda each: each, lambda each: [each], lambda each: {"one": each}])
def test_optimizers_that_accelerate_has_wrapped_are_those_within(given):
    accelerate = pytest.importorskip("accelerate")
    adam = torch.optim.AdamW(nn.Linear(4, 1).parameters(), weight_decay=0.3)
    wrapped = accelerate.Accelerator(cpu=True).prepare(adam)
    made = Optimizers(given(wrapped))
    assert list(made) == [adam]
    assert made.given == given(adam)
    assert made.name == "AdamW"
    assert made.settings().values["weight_decay"] == 0.3


class Unread(list):
    def __iter__(self):
        raise AssertionError("loaded")


@pytest.mark.parametrize(
    ("batches", "below"),
    [
        (lambda size: DataLoader(Unread(range(100)), size, drop_last=True), 100),
        (lambda size: DataLoader(Unread(range(100)), size), 100),
        (lambda size: DataLoader(Unread(range(1001)), size), None),
        (lambda size: Unread(range(100 // size)), 100),
        (lambda size: Unread(range(400 // size // (size < 300))), 299),
        (lambda size: iter(range(100 // size)), None),
        (lambda _size: 1 // 0, None),
    ],
)
def test_how_many_samples_an_epoch_has_is_told_by_a_loader_without_loading_any(batches, below):
    assert OwnLoader(batches, None, "train_loader").samples_below(1001, 10.0) == below
