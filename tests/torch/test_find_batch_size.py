"""`batchtune.find_batch_size`: the search in the caller's own process, on a fake device."""

import contextlib
import copy
import functools
import gc
import random
import weakref

import pytest
import torch

import batchtune
from batchtune.config.probe import Bounds
from batchtune.device._base import Peaks
from batchtune.errors import DeviceError, NothingFitsError, UsageError
from batchtune.observer import Observer
from batchtune.probe import final_check
from batchtune.probe.in_process import find_in_process
from batchtune.task.state import KeptState


class FakeMemory:
    """A device of 1000 bytes on which a sample takes 7 and the model 100; it remembers what it was asked."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.peak = 0

    def default_limit(self, margin):
        return 1000

    def describe(self):
        return "fake", 1000, 1000

    def enforce(self, limit_bytes):
        self.asked.append(f"enforce {limit_bytes}")

    def lift(self):
        self.asked.append("lift")

    def release(self):
        self.asked.append("release")

    @contextlib.contextmanager
    def attempt(self, batch_size):
        self.release()
        yield
        self.release()

    def reset_peaks(self):
        self.peak = 0

    def peaks(self):
        return Peaks(self.peak, self.peak)

    def synchronize(self):
        pass


class Step:
    """A training step that needs memory in proportion to its batch, and may fail otherwise at some sizes."""

    def __init__(self, memory, failures=()):
        self.memory, self.failures, self.sizes = memory, dict(failures), []

    def __call__(self, batch_size):
        self.sizes.append(batch_size)
        if batch_size in self.failures:
            raise self.failures[batch_size]
        self.memory.peak = 100 + 7 * batch_size
        if self.memory.peak > 1000:
            raise torch.OutOfMemoryError("no")


class Told(Observer):
    def __init__(self):
        self.sizes = []

    def attempted(self, attempt):
        self.sizes.append(attempt.batch_size)


def found(step, memory, *, limit=None, observer=None, held_before=None, **bounds):
    how = {"memory_limit": limit, "margin": 0.05, "steps": 2, "observer": observer, "held_before": held_before}
    return find_in_process(step, Bounds(**bounds), device="x", **how, open_memory=lambda _: memory)


def allocate_too_much():
    raise torch.OutOfMemoryError("an earlier one")


@pytest.fixture
def memory():
    return FakeMemory()


class TestTheSearch:
    def test_it_finds_the_largest_size_and_that_size_ran_last(self, memory):
        step = Step(memory)
        assert found(step, memory, tolerance=0) == 128
        assert step.sizes[-20:] == [128] * 20
        assert 129 in step.sizes

    def test_what_fails_after_some_steps_more_is_not_the_answer(self, memory):
        step = Step(memory)
        plain = step.__class__.__call__

        def growing(batch_size):
            plain(step, batch_size)
            if batch_size > 100 and step.sizes[-9:] == [batch_size] * 9:  # as an allocator's heap does
                raise torch.OutOfMemoryError("no")

        told = Told()
        assert 90 <= found(growing, memory, observer=told) <= 100
        assert step.sizes[-20:] == [step.sizes[-1]] * 20
        assert len(told.sizes) < 20
        assert 90 <= found(growing, memory, tolerance=0) <= 100

    def test_a_limit_that_the_machine_has_not_is_told_as_it_was_given(self, memory):
        with pytest.raises(UsageError, match="1100 bytes is more than the 1000 bytes of cpu"):
            found(Step(memory), memory, limit=1100)

    def test_what_was_imported_for_it_counts_against_a_cpus_limit(self, memory, monkeypatch):
        monkeypatch.setattr(final_check, "resident_bytes", lambda: 5200)
        found(Step(memory), memory, limit=1000, held_before=5000)
        assert "enforce 640" in memory.asked
        found(Step(memory), memory, limit=1000, held_before=5300)  # what was given back meanwhile is no room for more
        assert "enforce 800" in memory.asked

    def test_every_size_takes_several_steps(self, memory):
        step = Step(memory)
        found(step, memory)
        fitting = [size for size in step.sizes if size <= 128]
        assert all(fitting.count(size) % 2 == 0 for size in fitting)

    def test_its_bounds_are_never_left(self, memory):
        step = Step(memory)
        assert found(step, memory, minimum=8, maximum=99, multiple_of=8) == 96
        assert all(8 <= size <= 99 and size % 8 == 0 for size in step.sizes)

    def test_what_the_caller_was_handling_already_is_not_what_the_step_has_met(self, memory):
        step = Step(memory, failures=dict.fromkeys(range(1, 200), TypeError("no batch of this kind")))
        try:
            allocate_too_much()
        except torch.OutOfMemoryError:
            with pytest.raises(TypeError, match="no batch of this kind"):
                found(step, memory)

    def test_without_risk_nothing_fails(self, memory):
        step = Step(memory)
        assert 100 <= found(step, memory, no_oom=True) <= 128
        assert max(step.sizes) <= 128

    def test_a_size_that_fits_no_more_after_a_failure_is_not_the_answer(self, memory):
        step = Step(memory)
        plain = step.__class__.__call__

        def leaky(batch_size):
            plain(step, batch_size)
            if batch_size > 120 and any(size > 128 for size in step.sizes):  # what failed has left something behind
                raise torch.OutOfMemoryError("no")

        assert found(leaky, memory, tolerance=0) == 120
        assert step.sizes[-1] == 120


class TestFailures:
    def test_an_error_at_every_size_is_the_users_own_with_its_traceback(self, memory):
        error = ValueError("expected 10 classes, got 11")
        with pytest.raises(ValueError, match="got 11") as raised:
            found(Step(memory, {1: error, 2: error, 4: error}), memory)
        assert raised.value is error
        assert memory.asked[-2:] == ["lift", "release"]

    def test_an_error_at_the_smallest_size_only_is_gone_around(self, memory):
        step = Step(memory, {1: ValueError("more than 1 value per channel")})
        assert found(step, memory, tolerance=0) == 128

    def test_an_error_at_large_sizes_is_told_apart_from_memory(self, memory):
        step = Step(memory, {size: IndexError("data is out") for size in range(51, 200)})
        with pytest.warns(UserWarning, match=r"step\(51\) raised IndexError: data is out; larger sizes were not tried"):
            assert found(step, memory, tolerance=0) == 50

    def test_nothing_fits(self, memory):
        with pytest.raises(NothingFitsError, match=r"nothing fits: tried 200; the last attempt said: no"):
            found(Step(memory), memory, minimum=200)

    def test_an_end_of_memory_that_the_step_reports_in_its_own_words_is_one(self, memory):
        def step(batch_size):
            try:
                torch.empty(2**44 if batch_size > 50 else 1)
            except RuntimeError:
                raise ValueError("forward failed")  # noqa: B904 - as users write it

        assert found(step, memory, tolerance=0) == 50  # and no warning of a ValueError

    def test_a_device_that_a_failure_broke_ends_the_search_with_what_ran(self, memory):
        error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        step = Step(memory, dict.fromkeys(range(20, 999), error))
        with pytest.raises(DeviceError, match=r"the largest size that ran is \d+\. 'batchtune probe' goes on"):
            found(step, memory)

    def test_that_it_fails_again_when_memory_is_given_back_changes_nothing(self):
        class Poisoned(FakeMemory):
            """Fails whatever is asked of it once a step has failed there."""

            broken = False

            def release(self):
                if self.broken:
                    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

            lift = release

            @contextlib.contextmanager
            def attempt(self, batch_size):
                try:
                    yield
                finally:
                    self.release()

        memory = Poisoned()

        def step(batch_size):
            memory.broken = batch_size >= 20
            memory.release()

        with pytest.raises(DeviceError, match=r"\(CUDA error: an illegal .*\); the largest size that ran is 1\d?\."):
            found(step, memory)

    @pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
    def test_the_limit_is_lifted_whatever_happens(self, memory, stop):
        def step(_):
            raise stop

        with pytest.raises(stop):
            found(step, memory, limit=1000)
        assert memory.asked[0] == "enforce 800"
        assert memory.asked[-2:] == ["lift", "release"]

    def test_the_tensors_of_a_failed_step_are_freed_before_the_next(self, memory):
        held, alive = [], []

        def step(batch_size):
            gc.collect()
            alive.append(sum(each() is not None for each in held))
            batch = torch.zeros(4)
            held.append(weakref.ref(batch))
            if batch_size == 1:
                raise ValueError("too small")
            if batch_size > 10:
                raise torch.OutOfMemoryError("no")

        assert find_in_process(
            step,
            Bounds(tolerance=0),
            device="x",
            memory_limit=None,
            margin=0,
            steps=1,
            open_memory=lambda _: memory,
        ) == 10  # fmt: skip
        assert set(alive) == {0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min": 0}, "min=0: must be at least 1"),
        ({"min": 9, "max": 8}, "^min=9 is greater than max=8; swap them or raise max$"),
        ({"max": 2**31}, "max=2147483648: must be at most 2147483647"),
        ({"steps": 10**12}, "steps=1000000000000: must be at most"),
        ({"min": "2"}, "min=2: must be an int, not a str"),
        ({"min": None}, "min=None: must be an int, not a NoneType"),
        ({"max": 100.5}, "max=100.5: must be an int, not a float"),
        ({"steps": True}, "steps=True: must be an int, not a bool"),
        ({"margin": "5%"}, "margin=5%: is a share: at least 0 and less than 1"),
        ({"tolerance": float("nan")}, "tolerance=nan: is a share"),
        ({"tolerance": 1.0}, "tolerance=1.0: is a share"),
        ({"memory_limit": "much"}, "'much' is not a size"),
        ({"device": "tpu9"}, "torch knows no such device"),
        ({"step": 3}, "the step is an int; it must be a function that takes a batch size"),
    ],
)
def test_options_that_make_no_sense_are_named(options, words):
    with pytest.raises(UsageError, match=words):
        batchtune.find_batch_size(**{"step": print} | options)


SEARCH = {"device": "cpu", "max": 8, "memory_limit": "500MiB"}


class Net(torch.nn.Module):
    """A model with a buffer, half of it frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
        self.norm.eval()

    def forward(self, rows):
        return self.out(self.norm(rows)).square().mean()


class Wrapping(torch.optim.Optimizer):
    """An optimizer that has another one step, and gives away its own state alone, as SAM does."""

    def __init__(self, inner) -> None:
        super().__init__(inner.param_groups, {"lr": 0.1})
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure=None):
        self.inner.step(closure)

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.inner.param_groups = self.param_groups


class Telling(torch.optim.Optimizer):
    """An optimizer that tells what another one has, as wrappers do that torch's constructor has not made."""

    def __init__(self, inner) -> None:
        self.inner, self.defaults = inner, {}
        self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = {}

    state = property(lambda self: self.inner.state)
    param_groups = property(lambda self: self.inner.param_groups)

    def step(self, closure=None):
        self.inner.step(closure)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict)


class Both(torch.optim.Optimizer):
    """One for each kind of parameters, as Muon with Adam."""

    def __init__(self, inner) -> None:
        super().__init__([group for each in inner for group in each.param_groups], {"lr": 0.1})
        self.inner = inner

    def step(self, closure=None):
        for each in self.inner:
            each.step()


class TestWhatAStepTrains:
    """It begins its training after the search as it would have without."""

    @pytest.fixture
    def trained(self):
        torch.manual_seed(0)
        model = Net()
        loose = torch.ones(4, requires_grad=True)
        optimizer = torch.optim.AdamW([*model.parameters(), loose], lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        optimizer.zero_grad()
        model(torch.rand(3, 4)).backward()  # a script may have trained before
        optimizer.step()
        return model, optimizer, scheduler, loose

    def state(self, trained):
        model, optimizer, scheduler, loose = trained
        modes = [module.training for module in model.modules()]
        gradients = [None if each.grad is None else each.grad.clone() for each in (*model.parameters(), loose)]
        states = [each.state_dict() for each in (model, optimizer, scheduler)]
        return copy.deepcopy([states, loose.detach(), gradients, modes, torch.get_rng_state(), random.getstate()])

    def step_of(self, trained):
        model, optimizer, scheduler, loose = trained

        def step(batch_size):
            model.train()
            optimizer.zero_grad()
            (model(torch.rand(batch_size + 1, 4) * loose) * random.random()).backward()
            optimizer.step()
            scheduler.step()

        return step

    @pytest.mark.parametrize("way", ["closure", "partial", "method", "function that it calls", "named"])
    def test_has_its_first_state_back(self, trained, way):
        plain = self.step_of(trained)

        class Script:
            def __init__(self):
                self.step = plain

            def once(self, batch_size):
                self.step(batch_size)

        opaque = [plain]
        steps = {
            "closure": plain,
            "partial": functools.partial(lambda inner, batch_size: inner(batch_size), plain),
            "method": Script().once,
            "function that it calls": lambda batch_size: [plain(batch_size)],
            "named": lambda batch_size, hidden=opaque: hidden[0](batch_size),
        }
        named = {"restore": trained[:3]} if way == "named" else {}
        before = self.state(trained)
        assert batchtune.find_batch_size(steps[way], **SEARCH, **named) == 8
        assert_close(self.state(trained), before)

    def test_so_has_a_schedule_that_accelerate_has_prepared(self, trained):
        scheduler = pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(trained[2])
        step = self.step_of((*trained[:2], scheduler, trained[3]))
        before = self.state(trained)
        assert batchtune.find_batch_size(step, **SEARCH) == 8
        assert_close(self.state(trained), before)

    @pytest.mark.parametrize("is_named", [False, True])
    def test_so_has_an_optimizer_that_another_steps_by(self, trained, is_named):
        model, inner, scheduler, loose = trained
        outer = Wrapping(inner)
        before = self.state(trained)
        step = self.step_of((model, outer, scheduler, loose))
        named = {"restore": (model, outer, scheduler)} if is_named else {}
        assert batchtune.find_batch_size(step, **SEARCH, **named) == 8
        assert_close(self.state(trained), before)
        assert outer.param_groups is inner.param_groups  # a schedule of one goes on to reach the other
        assert scheduler.optimizer.param_groups is inner.param_groups

    @pytest.mark.parametrize("own", [{}, {"state": {}}, {"state": property(lambda self: self.none)}])
    def test_so_has_one_that_tells_what_another_has(self, trained, own, recwarn):
        model, inner, scheduler, loose = trained
        before = self.state(trained)
        step = self.step_of((model, type("Own", (Telling,), own)(inner), scheduler, loose))

        def evaluating(batch_size):
            step(batch_size)
            model.eval()

        assert batchtune.find_batch_size(evaluating, **SEARCH) == 8
        assert_close(self.state(trained), before)
        assert not [each for each in recwarn if "did not take" in str(each.message)]

    def test_one_that_takes_no_state_is_told_of_and_the_answer_stands(self, trained):
        class Closed(Wrapping):
            def __setattr__(self, name, value):
                if name == "param_groups" and "inner" in vars(self) and "closed" in vars(self):
                    raise AttributeError("it is closed")
                super().__setattr__(name, value)

        model, inner, scheduler, loose = trained
        outer = Closed(inner)
        outer.closed = True
        step = self.step_of((model, outer, scheduler, loose))
        with pytest.warns(UserWarning, match="Closed did not take its first state back: it is closed"):
            assert batchtune.find_batch_size(step, **SEARCH) == 8

    @pytest.mark.parametrize("container", [list, tuple, lambda inner: dict(enumerate(inner))])
    def test_so_have_those_in_a_list_or_dict_of_another(self, trained, container):
        model, adam, _, loose = trained
        momentum = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1, momentum=0.9)
        outer = Both([adam, momentum])
        outer.inner = container(outer.inner)
        before = self.state(trained)

        def step(batch_size):
            model(torch.rand(batch_size + 1, 4) * loose).backward()
            momentum.param_groups[0]["params"][0].grad = torch.ones(2)
            for each in outer.inner.values() if isinstance(outer.inner, dict) else outer.inner:
                each.step()

        assert batchtune.find_batch_size(step, **SEARCH, restore=(model, outer)) == 8
        assert_close(self.state(trained), before)
        assert not momentum.state

    def test_unless_it_is_not_to_be(self, trained):
        before = trained[0].out.weight.clone()
        batchtune.find_batch_size(self.step_of(trained), **SEARCH, restore=None)
        assert not torch.equal(trained[0].out.weight, before)

    def test_even_where_the_search_ends_in_an_error(self, trained):
        plain, before = self.step_of(trained), self.state(trained)

        def step(batch_size):
            plain(batch_size)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            batchtune.find_batch_size(step, **SEARCH)
        assert_close(self.state(trained), before)

    def test_is_said_with_every_attempt(self, trained, capsys):
        batchtune.find_batch_size(self.step_of(trained), **SEARCH)
        printed = capsys.readouterr()
        assert "Net, AdamW, StepLR will be restored" in printed.err
        assert "fit" in printed.err
        assert not printed.out

    def test_that_none_was_seen_is_said_too(self, capsys):
        batchtune.find_batch_size(lambda _: None, **SEARCH)
        assert "no model is seen in what step uses: name what it trains, restore=(model, optimizer)" in (
            " ".join(capsys.readouterr().err.split())
        )

    def test_what_has_no_state_cannot_be_named(self):
        with pytest.raises(UsageError, match="restore: an int has no state_dict"):
            batchtune.find_batch_size(print, **SEARCH, restore=[1])


def assert_close(one, other):
    torch.testing.assert_close(one[:3], other[:3], rtol=0, atol=0)
    assert one[3] == other[3]
    assert torch.equal(one[4], other[4])
    assert one[5] == other[5]


def test_it_decorates_a_step_too():
    @batchtune.find_batch_size(**SEARCH)
    def step(batch_size):
        return batch_size

    assert step.batch_size == 8
    assert step(3) == 3


def test_inference_takes_the_steps_without_gradients(memory):
    seen, step = [], Step(memory)

    def forward(batch_size):
        seen.append(torch.is_inference_mode_enabled())
        step(batch_size)

    bounds = Bounds(tolerance=0)
    for inference in (False, True):
        seen.clear()
        size = find_in_process(
            forward, bounds, device="x", memory_limit=None, margin=0.05, steps=1, inference=inference,
            open_memory=lambda _: memory,
        )  # fmt: skip
        assert (size, set(seen)) == (128, {inference})
    assert not torch.is_inference_mode_enabled()


def test_nothing_is_copied_to_a_device_on_which_the_process_has_no_hold():
    model = torch.nn.Linear(2, 2)
    kept = KeptState([model])
    torch.nn.init.zeros_(model.weight)
    kept.__exit__(DeviceError, DeviceError("lost"), None)
    assert torch.equal(model.weight.detach(), torch.zeros(2, 2))
