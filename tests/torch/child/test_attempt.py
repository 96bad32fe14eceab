"""One attempt, in this process, on a device that runs out of memory on demand."""

import contextlib
import dataclasses
import gc
import re
import tempfile
import time
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from batchtune.child import heartbeat
from batchtune.child.attempt import attempt
from batchtune.child.timing import time_steps
from batchtune.child.trainer import Trainer
from batchtune.device._base import PeakTracker
from batchtune.device.host_memory import HostMemory
from batchtune.protocol.commands import TimeSteps, TryBatchSize, TryLengths
from batchtune.task.adapting import Adapted

WIDTH = 256
SAMPLE_BYTES = WIDTH * 4
FROM_NEW = 5  # steps of a short final check that free gradients early, two of them after evaluation


def tried(task, device, **arguments):
    """The attempt, and whether the process may be used for another."""
    answer = attempt(task, device, TryBatchSize(**arguments))
    return answer.attempt, answer.usable


@pytest.fixture
def wide(linear_task):
    """A task whose samples outweigh its model."""

    def make(**functions: object):
        usual = {
            "build_model": lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)),
            "make_batch": lambda batch_size: torch.ones(batch_size, WIDTH),
            "compute_loss": lambda model, batch: model(batch).square().mean(),
            "val_dataset": None,
        }
        return linear_task(**usual | functions)

    return make


@pytest.fixture
def run(fake_device):
    def on_device(task, batch_size, *, limit=None, steps=3, precision="fp32", **more):
        with fake_device(limit) as device:
            device.last = tried(task, device, batch_size=batch_size, steps=steps, precision=precision, **more)
        return device.last

    return on_device


class TestFits:
    def test_a_size_that_trains_is_a_fit_with_its_peaks_and_times(self, run, wide):
        result, usable = run(wide(), 1000)
        assert (result.batch_size, result.outcome, result.steps, result.message, usable) == (1000, "fit", 3, None, True)
        assert 2 * 1000 * SAMPLE_BYTES < result.peak_allocated_bytes < 8 * 1000 * SAMPLE_BYTES
        assert 0 < result.step_seconds <= result.seconds

    def test_twice_the_samples_take_about_twice_the_memory(self, run, wide):
        small, large = (run(wide(), size)[0].peak_allocated_bytes for size in (2000, 4000))
        assert large / small == pytest.approx(2, rel=0.05)

    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
    def test_every_precision_of_the_device_trains(self, run, wide, precision):
        assert run(wide(), 8, precision=precision)[0].fits

    def test_the_optimizers_states_exist_and_are_told_apart_from_the_activations(self, run, wide):
        hungry = wide(
            build_model=lambda: nn.Linear(WIDTH, WIDTH * 64),
            build_optimizer=lambda model, lr: torch.optim.Adam(model.parameters(), lr=lr, foreach=True),
        )
        result, _ = run(hungry, 1)
        parameters = WIDTH * WIDTH * 64 * 4
        assert result.peak_allocated_bytes > 4 * parameters
        assert result.forward_backward_peak_bytes < result.peak_allocated_bytes

    def test_the_final_check_evaluates_and_saves(self, run, wide):
        seen = []
        task = wide(evaluate=lambda model: seen.append((model.training, torch.is_grad_enabled())) or 0.5)
        assert run(task, 4)[0].purpose == "search"
        assert seen == []
        assert run(task, 4, verify=True)[0].purpose == "verify"
        assert seen == [(False, False)]

    def test_after_an_evaluation_of_the_users_own_it_trains_in_training_mode_again(self, run, wide):
        modes = []

        def compute_loss(model, batch):
            modes.append(model.training)
            return model(batch).square().mean()

        task = wide(compute_loss=compute_loss, evaluate=lambda model: float(model.training))
        assert run(task, 4, verify=True)[0].fits
        assert modes == [True] * len(modes)

    def test_the_final_check_tells_what_its_steps_take_apart_from_its_evaluation(self, run, wide):
        def evaluate(model):
            return float(torch.ones(64 << 18).sum())  # 64 MiB

        assert run(wide(evaluate=evaluate), 4)[0].steps_peak_bytes is None
        found = run(wide(evaluate=evaluate), 4, verify=True)[0]
        assert found.peak_reserved_bytes - found.steps_peak_bytes > 48 << 20

    def test_the_final_check_says_that_it_lives_before_it_evaluates_and_before_it_saves(
        self, run, wide, listen, monkeypatch
    ):
        monkeypatch.setattr(heartbeat, "PERIOD_SECONDS", 3600.0)  # what is said every few seconds is not meant
        told = []
        task = wide(evaluate=lambda model: told.append("evaluating") or 0.5)
        listen(lambda: told.append("alive"))
        assert run(task, 4)[0].fits
        assert told == []
        assert run(task, 4, verify=True)[0].fits
        assert told == ["alive", "evaluating", "alive"]

    @pytest.mark.parametrize(("steps", "verify"), [(3, False), (20, True)])
    def test_gradients_are_freed_late_and_in_a_check_from_new_early(self, run, wide, monkeypatch, steps, verify):
        late, update = [], Trainer.update

        def watched(trainer, *, free_late=False):
            late.append(free_late)
            update(trainer, free_late=free_late)

        monkeypatch.setattr(Trainer, "update", watched)
        assert run(wide(), 8, steps=steps, verify=verify)[0].fits
        assert late == ([True] * 22 + [False] * 12 if verify else [True] * 3)

    @pytest.mark.parametrize("keeps", [False, True])
    def test_a_check_trains_from_new_once_more_unless_the_users_code_keeps_what_it_made(self, run, wide, keeps):
        models, kept = [], []

        def build_model():
            model = nn.Linear(WIDTH, 2**20 // WIDTH)
            models.append(weakref.ref(model))
            kept.extend([model] * keeps)
            return model

        found, usable = run(wide(build_model=build_model), 8, steps=4, verify=True)
        assert (found.outcome, found.steps, usable) == ("fit", 4, not keeps)
        assert len(models) == 2 - keeps

    def test_after_evaluation_it_trains_on_until_no_room_must_be_made(self, fake_device, wide):
        steps = []
        task = wide(compute_loss=lambda model, batch: steps.append(1) or model(batch).square().mean())
        with fake_device() as device:
            peaks = device.peaks
            device.peaks = lambda: dataclasses.replace(peaks(), retries=min(len(steps), 11))
            assert tried(task, device, batch_size=8, steps=8, precision="fp32", verify=True)[0].fits
        assert len(steps) == 12 + FROM_NEW + 1

    def test_after_evaluation_no_more_losses_live_than_in_a_loop(self, run, wide):
        losses, alive = [], []

        def compute_loss(model, batch):
            loss = model(batch).square().mean()
            losses.append(weakref.ref(loss.untyped_storage()))
            return loss

        def build_optimizer(model, lr):
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            optimizer.register_step_pre_hook(lambda *_: alive.append(sum(each() is not None for each in losses)))
            return optimizer

        task = wide(compute_loss=compute_loss, build_optimizer=build_optimizer)
        assert run(task, 8, steps=4, verify=True)[0].fits
        assert alive == [1] * (6 + FROM_NEW)

    def test_an_old_loss_lives_until_the_next_one_is_there_and_not_while_gradients_are_calculated(self, run, wide):
        losses, alive = [], []

        def living():
            return sum(each() is not None for each in losses)

        def compute_loss(model, batch):
            loss = model(batch).square().mean()
            alive.append(("forward", living()))
            losses.append(weakref.ref(loss.untyped_storage()))
            loss.register_hook(lambda _: alive.append(("backward", living())))
            return loss

        assert run(wide(compute_loss=compute_loss), 8, steps=4)[0].fits
        assert alive == [("forward", 0), ("backward", 1)] + [("forward", 1), ("backward", 1)] * 3

    @pytest.mark.parametrize("how", ["tried", "timed"])
    def test_in_half_precision_no_step_is_skipped_however_high_the_gradients_are(self, fake_device, wide, how):
        steps, optimizers = [], []

        def compute_loss(model, batch):
            steps.append(1)
            return model(batch).float().sum()  # 8 for the bias: more than 8187 times that is no fp16

        def build_optimizer(model, lr):
            optimizers.append(torch.optim.Adam(model.parameters(), lr=lr))
            return optimizers[-1]

        task = wide(compute_loss=compute_loss, build_optimizer=build_optimizer)
        with fake_device() as device:
            if how == "tried":
                assert attempt(task, device, TryBatchSize(batch_size=8, steps=3, precision="fp16")).attempt.fits
            else:
                time_steps(task, device, TimeSteps(batch_size=8, precision="fp16", seconds=0.0))
        states = optimizers[0].state.values()
        assert states
        assert {int(state["step"]) for state in states} == {len(steps)}

    def test_saving_in_the_final_check_needs_no_room_on_a_disk(self, run, wide, monkeypatch):
        monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
        assert run(wide(), 4, verify=True)[0].fits

    def test_evaluation_that_needs_more_memory_than_training_fails_the_final_check(self, run, wide):
        task = wide(evaluate=lambda model: float(model(torch.ones(9000, WIDTH)).mean()))
        limit = 4000 * SAMPLE_BYTES
        assert run(task, 100, limit=limit)[0].fits
        found = run(task, 100, limit=limit, verify=True)[0]
        assert (found.outcome, found.in_evaluation) == ("oom", True)

    @pytest.mark.parametrize("last", [5, 5 + 3], ids=["after evaluation", "from new"])  # of the steps that have room
    def test_a_step_after_evaluation_that_needs_more_memory_failed_in_training(self, run, wide, last):
        steps = []

        def compute_loss(model, batch):
            steps.append(1)
            return model(batch if len(steps) <= last else batch.repeat(100, 1)).square().mean()

        task = wide(compute_loss=compute_loss, evaluate=lambda _: 0.5)
        found = run(task, 100, limit=4000 * SAMPLE_BYTES, steps=5, verify=True)[0]
        assert (found.outcome, found.in_evaluation, len(steps)) == ("oom", None, last + 1)

    def test_a_study_evaluates_as_many_samples_at_a_time_as_fit(self, run, wide):
        sizes = []

        def compute_loss(model, batch):
            sizes.append((model.training, len(batch)))
            return model(batch).square().mean()

        class Large(Dataset):
            def __len__(self):
                return 64

            def __getitem__(self, index):
                return torch.ones(200, WIDTH)

        task = wide(val_dataset=Large, compute_loss=compute_loss)
        limit = 4000 * SAMPLE_BYTES  # a sample of the validation is as large as 200 of training
        assert run(task, 32, limit=limit, verify=True)[0].outcome == "oom"
        for asked in (16, 1024):
            sizes.clear()
            found = run(task, 32, limit=limit, verify=True, evaluation_batch_size=asked)[0]
            seen = [size for training, size in sizes if not training]
            seen = seen[:-7] if found.evaluation_batch_size >= 4 else seen  # seven tell whether the loss adds up
            assert (found.outcome, seen[-2:]) == ("fit", [found.evaluation_batch_size] * 2)
            assert 1 <= found.evaluation_batch_size <= 8
        assert run(task, 32, limit=limit, verify=True, evaluation_batch_size=1)[0].evaluation_batch_size is None


class TestAsInAProcessOfTheUsers:
    """What a CPU's attempts do as a plain loop does it."""

    def test_on_a_cpu_each_step_has_a_batch_of_its_own_beside_the_last_one(self, wide):
        alive = []
        made = weakref.WeakSet()

        def make_batch(batch_size):
            batch = torch.ones(batch_size, WIDTH)
            made.add(batch)
            alive.append(len(made))
            return batch

        tried(wide(make_batch=make_batch), HostMemory(), batch_size=4, steps=3, precision="fp32")
        assert alive == [1, 2, 2]

    @pytest.mark.parametrize(
        ("sample_seconds", "lengths", "loads"),
        [(0, {WIDTH}, True), (0, {WIDTH - 1, WIDTH}, True), (0.1, {WIDTH}, False)],
        ids=["alike", "unlike", "slow"],
    )
    def test_a_loader_works_beside_the_steps_on_a_cpu(self, wide, sample_seconds, lengths, loads):
        asked, trained = [], []

        class Data(Dataset):
            def __len__(self):
                return 60

            def __getitem__(self, place):
                time.sleep(sample_seconds if seen else 0)
                asked.append(place)
                return torch.full((min(lengths) if place % 7 else max(lengths),), float(place))

        def loss(model, batch):
            trained.append((batch.shape[1], len(batch.unique())))
            return model(nn.functional.pad(batch, (0, WIDTH - batch.shape[1]))).square().mean()

        def collate(samples):
            return nn.utils.rnn.pad_sequence(samples, batch_first=True)

        task, seen = wide(make_batch=None, train_dataset=Data, collate=collate, compute_loss=loss), []
        seen.append(task.find_worst_samples())
        asked.clear()
        tried(task, HostMemory(), batch_size=25, steps=3, precision="fp32")
        assert (len(asked) > 25) == loads  # of no more than 20 it is seen how long they take
        assert {length for length, _ in trained} == {WIDTH}  # the largest, where they are unlike
        assert (trained[0] == (WIDTH, 25)) == (loads and len(lengths) == 1)

    @pytest.mark.parametrize("lengths", [{WIDTH}, {WIDTH - 1, WIDTH}], ids=["alike", "unlike"])
    def test_no_batch_is_held_beside_that_of_a_step(self, wide, lengths):
        made, held = weakref.WeakSet(), []

        class Data(Dataset):
            def __len__(self):
                return 60

            def __getitem__(self, place):
                return torch.full((min(lengths) if place % 7 else max(lengths),), float(place))

        def loss(model, batch):
            held.append(len(made))
            time.sleep(0.02)  # so that there is time to load the next
            return model(nn.functional.pad(batch, (0, WIDTH - batch.shape[1]))).square().mean()

        def collate(samples):
            batch = nn.utils.rnn.pad_sequence(samples, batch_first=True)
            made.add(batch)
            return batch

        task = wide(make_batch=None, train_dataset=Data, collate=collate, compute_loss=loss)
        task.find_worst_samples()
        tried(task, HostMemory(), batch_size=25, steps=8, precision="fp32")
        assert set(held) == {1}

    def test_a_stream_that_can_be_read_but_once_trains_on_what_was_seen(self, wide):
        class Once(IterableDataset):
            samples = iter(torch.ones(40, WIDTH))

            def __iter__(self):
                return self.samples

        task = wide(make_batch=None, train_dataset=Once)
        task.find_worst_samples()
        found, _ = tried(task, HostMemory(), batch_size=25, steps=3, precision="fp32")
        assert found.fits, found.message

    @pytest.mark.parametrize("limit", [None, 900 << 20])
    def test_what_making_a_batch_takes_counts_on_a_cpu(self, wide, limit):
        taken = 64 << 20

        def make_batch(batch_size):
            return torch.ones(taken // WIDTH // 4, WIDTH)[:batch_size].clone()

        memory = HostMemory()
        if limit is not None:
            memory.enforce(limit)
        try:
            few, many = (
                tried(wide(make_batch=make), memory, batch_size=4, steps=3, precision="fp32")[0].peak_reserved_bytes
                for make in (lambda size: torch.ones(size, WIDTH), make_batch)
            )
        finally:
            memory.lift()
        assert many - few > 0.9 * taken

    @pytest.mark.parametrize(("keeps_rest", "samples", "least"), [(True, 11, 3), (True, 9, 4), (False, 11, 4)])
    def test_a_loader_that_keeps_the_rest_of_an_epoch_has_it_trained_in_the_final_check(
        self, wide, monkeypatch, keeps_rest, samples, least
    ):
        sizes = []

        def make_batch(batch_size):
            sizes.append(batch_size)
            return torch.ones(batch_size, WIDTH)

        task = wide(make_batch=make_batch)
        library = Adapted("it")
        library.keeps_rest = keeps_rest
        monkeypatch.setattr(type(task), "adapted", library)
        monkeypatch.setattr(task, "train_size", lambda: samples)
        found, _ = tried(task, HostMemory(), batch_size=4, steps=6, precision="fp32", verify=True)
        assert (found.outcome, min(sizes), max(sizes)) == ("fit", least, 4)

    @pytest.mark.parametrize(("process", "late"), [(0, True), (1, False), (2, True)])
    def test_every_other_process_frees_gradients_early(self, wide, monkeypatch, process, late):
        habits, update = [], Trainer.update

        def noted(self, *, free_late=False):
            habits.append(free_late)
            update(self, free_late=free_late)

        monkeypatch.setattr(Trainer, "update", noted)
        found, _ = tried(wide(), HostMemory(), batch_size=4, steps=4, precision="fp32", verify=True, process=process)
        assert found.fits
        assert set(habits) == {late}

    def test_further_processes_take_batches_that_are_drawn_in_turns_with_the_worst(self, wide, run):
        sizes = []

        def loss(model, batch):
            if torch.is_grad_enabled():
                sizes.append(len(batch[0]))
            return model(nn.functional.pad(batch, (0, WIDTH - batch.shape[1]))).square().mean()

        data = [torch.ones(length) for length in range(1, WIDTH + 1)]
        collate = nn.utils.rnn.pad_sequence
        functions = {
            "make_batch": None,
            "train_dataset": lambda: data,
            "collate": lambda some: collate(some, batch_first=True),
        }
        task = wide(compute_loss=loss, **functions)
        task.find_worst_samples()
        for process in range(3):
            sizes.clear()
            assert run(task, 2, steps=6, verify=True, process=process)[0].fits
            worst = [at for at, size in enumerate(sizes[:6], 1) if size == WIDTH]
            assert worst == {0: [1, 2, 3, 4, 5, 6], 1: [2, 4, 6], 2: [3, 6]}[process]


class TestOutOfMemory:
    def test_a_size_beyond_the_limit_is_an_oom_and_leaves_the_process_usable(self, run, wide):
        result, usable = run(wide(), 1000, limit=1000 * SAMPLE_BYTES * 3 // 2)
        assert (result.outcome, result.steps, usable) == ("oom", 0, True)
        assert result.message.startswith("out of memory: ")
        assert result.step_seconds is None
        assert result.forward_backward_peak_bytes is None

    def test_ten_of_them_in_turn_with_fits_change_nothing(self, fake_device, wide):
        limit, task = 4000 * SAMPLE_BYTES, wide()
        with fake_device(limit) as device:

            def outcomes(size: int) -> str:
                return attempt(task, device, TryBatchSize(batch_size=size, steps=2, precision="fp32")).attempt.outcome

            assert [outcomes(size) for _ in range(10) for size in (500, 5000)] == ["fit", "oom"] * 10
            gc.collect()
            assert sum(device.live.values()) == 0

    def test_nothing_of_a_failed_step_stays_alive(self, fake_device, wide):
        class Broken(ValueError):
            """Holds on to what it is told, as users' exceptions do."""

        def compute_loss(model, batch):
            raise Broken(model(batch).square().mean())

        with fake_device() as device:
            result, _ = tried(wide(compute_loss=compute_loss), device, batch_size=500, steps=1, precision="fp32")
            gc.collect()
            assert result.outcome == "user_error"
            assert sum(device.live.values()) == 0

    def test_memory_is_given_back_before_and_after(self, fake_device, wide):
        with fake_device() as device:
            attempt(wide(), device, TryBatchSize(batch_size=4, steps=1, precision="fp32"))
        assert device.released == 2

    def test_numpy_that_finds_no_memory_is_an_oom(self, run, wide):
        result, usable = run(wide(make_batch=lambda _size: np.empty(2**58)), 4)
        assert (result.outcome, usable) == ("oom", True)
        assert "Unable to allocate" in result.message


class TestUserErrors:
    @pytest.mark.parametrize("kind", [RuntimeError, MemoryError, ValueError, OSError], ids=lambda kind: kind.__name__)
    def test_words_about_memory_make_no_oom(self, run, wide, kind):
        def compute_loss(model, batch):
            raise kind("CUDA out of memory. DefaultCPUAllocator: can't allocate memory")

        result, _ = run(wide(compute_loss=compute_loss), 7)
        assert result.outcome == "user_error"
        start = rf"compute_loss raised {kind.__name__} at batch size 7 \(not an out-of-memory error\): "
        assert re.match(start + r".*test_attempt.py:\d+: CUDA out of memory", result.message)

    @pytest.mark.parametrize(
        ("code", "said"), [(None, "with exit\\(\\)"), (3, "with exit\\(3\\)"), ("no data", "no data")]
    )
    def test_code_that_ends_the_process_is_the_users(self, run, wide, code, said):
        def compute_loss(model, batch):
            raise SystemExit(code)

        result, usable = run(wide(compute_loss=compute_loss), 7)
        assert (result.outcome, usable) == ("user_error", True)
        assert re.search(rf"compute_loss raised SystemExit .*test_attempt.py:\d+: .*{said}", result.message)

    def test_a_size_that_the_users_layers_reject_is_theirs(self, run, wide):
        model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4))
        result, usable = run(wide(build_model=lambda: model), 1)
        assert (result.outcome, usable) == ("user_error", True)
        assert "Expected more than 1 value per channel" in result.message
        assert run(wide(build_model=lambda: model), 2)[0].fits

    def test_a_loss_without_a_graph_is_named_as_such(self, run, wide):
        result, _ = run(wide(compute_loss=lambda model, batch: model(batch).mean().detach()), 2)
        assert result.outcome == "user_error"
        assert "a tensor without a graph; no parameter of the model leads to it" in result.message

    @pytest.mark.parametrize("factor", [float("nan"), float("inf")])
    def test_a_loss_that_is_no_number_from_the_first_step_is_the_users(self, run, wide, factor):
        """As of a standard deviation of one sample: larger ones may train."""
        task = wide(compute_loss=lambda model, batch: model(batch).sum() * (factor if len(batch) == 1 else 1.0))
        result, _ = run(task, 1)
        assert result.outcome == "user_error"
        assert "in the very first step, at batch size 1, before any weight" in result.message
        assert run(task, 2)[0].fits


class TestADeviceThatFailed:
    """After some failures whatever is asked of it raises once more, giving memory back, too."""

    @pytest.fixture
    def poisoned(self, fake_device):
        class Poisoned(fake_device):
            error = None

            @contextlib.contextmanager
            def attempt(self, batch_size):
                self.release()
                try:
                    yield
                finally:
                    self.release()

            def release(self):
                if self.error is not None:
                    exec(compile("raise error", torch.__file__, "exec"), {"error": self.error})  # as torch does

        return Poisoned()

    def test_the_outcome_is_that_of_the_first_failure_and_the_process_is_done_with(self, poisoned, wide):
        def compute_loss(model, batch):
            poisoned.error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
            poisoned.release()

        with poisoned:
            found, usable = tried(wide(compute_loss=compute_loss), poisoned, batch_size=8, steps=1, precision="fp32")
        assert (found.outcome, found.steps, usable) == ("kernel_limit", 0, False)
        assert found.message == "CUDA error: an illegal memory access was encountered"

    def test_a_failure_of_the_users_own_stays_theirs(self, poisoned, wide):
        def compute_loss(model, batch):
            poisoned.error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
            raise ValueError("expected 10 classes")

        with poisoned:
            found, usable = tried(wide(compute_loss=compute_loss), poisoned, batch_size=8, steps=1, precision="fp32")
        assert (found.outcome, usable) == ("user_error", False)
        assert "expected 10 classes" in found.message

    def test_a_failure_that_shows_only_then_is_the_outcome(self, poisoned, wide):
        def compute_loss(model, batch):
            poisoned.error = torch.AcceleratorError("CUDA error: unspecified launch failure")
            return model(batch).mean()

        with poisoned:
            found, usable = tried(wide(compute_loss=compute_loss), poisoned, batch_size=8, steps=1, precision="fp32")
        assert (found.outcome, found.steps, usable) == ("kernel_limit", 1, False)


def test_the_peak_of_forward_and_backward_is_kept_apart_from_the_optimizers(fake_device):
    device = fake_device()
    tracker = PeakTracker(device)
    for peak, forward_backward in ((300, True), (900, False), (200, True)):
        tracker.start_phase()
        device.peak = peak
        tracker.end_phase(forward_backward=forward_backward)
    assert tracker.forward_backward_bytes == 300
    assert (tracker.highest.allocated_bytes, tracker.highest.reserved_bytes) == (900, 900)


class TestSeveralLengths:
    """One attempt that trains batches of several lengths one after another."""

    SIZES = ((64, 2), (16, 8))  # 128 positions each

    @pytest.fixture
    def lengths_task(self, wide):
        def make(**functions):
            task = wide(make_batch=lambda batch_size, length: torch.ones(batch_size, length, WIDTH), **functions)
            task.find_lengths((16, 64))
            return task

        return make

    @pytest.fixture
    def mixed(self, fake_device):
        def mixed(task, sizes, order, *, limit=None, evaluate_after=(), padded_to=None):
            command = TryLengths(
                batch_size=sizes[0][1],
                length=sizes[0][0],
                steps=len(order),
                precision="fp32",
                verify=True,
                sizes=sizes,
                order=order,
                padded_to=padded_to or tuple(sizes[which][0] for which in order),
                late_steps=len(order) // 2,
                evaluate_after=evaluate_after,
            )
            with fake_device(limit) as device:
                return attempt(task, device, command).attempt

        return mixed

    def test_every_step_takes_the_batch_that_its_order_says(self, mixed, lengths_task):
        seen = []

        def loss(model, batch):
            seen.append(tuple(batch.shape[:2]))
            return model(batch).square().mean()

        found = mixed(lengths_task(compute_loss=loss), self.SIZES, (1, 0, 0, 1), padded_to=(16, 64, 40, 16))
        assert seen == [(8, 16), (2, 64), (2, 40), (8, 16)]
        assert (found.outcome, found.steps, found.purpose) == ("fit", 4, "verify")

    def test_it_is_of_the_length_that_took_most(self, mixed, lengths_task):
        found = mixed(lengths_task(), ((64, 2), (16, 20)), (0, 1, 0))
        assert (found.length, found.batch_size) == (16, 20)

    def test_it_is_of_the_length_that_failed(self, mixed, lengths_task):
        found = mixed(lengths_task(), ((64, 2), (16, 400)), (0, 0, 1), limit=30_000_000)
        assert (found.outcome, found.length, found.batch_size, found.steps) == ("oom", 16, 400, 2)

    def test_it_evaluates_and_saves_between(self, mixed, lengths_task):
        seen = []

        def evaluate(_model):
            seen.append("evaluation")
            return 0.0

        def loss(model, batch):
            seen.append("step")
            return model(batch).square().mean()

        mixed(lengths_task(compute_loss=loss, evaluate=evaluate), self.SIZES, (0, 1, 0, 1), evaluate_after=(2, 3))
        assert seen == ["step", "step", "evaluation", "step", "evaluation", "step"]
