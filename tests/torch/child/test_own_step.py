"""Steps as a task's own `train_step` takes them, with several optimizers and modules; each beside a plain loop."""

import copy

import pytest
import torch
from torch import nn

from batchtune.child.trainer import Trainer, TrainingBatches
from batchtune.document import GradientClipping
from batchtune.errors import UserCodeError

CPU = torch.device("cpu")
MSE = nn.functional.mse_loss


def gan():
    return {"generator": nn.Linear(3, 4), "discriminator": nn.Linear(4, 1)}


def gan_optimizers(model, lr):
    return {
        "generator": torch.optim.Adam(model["generator"].parameters(), lr=lr),
        "discriminator": torch.optim.Adam(model["discriminator"].parameters(), lr=4 * lr),
    }


def gan_losses(model, real):
    """The discriminator's loss, then a function of the generator's, which looks at the stepped discriminator."""
    made = model["generator"](real[:, :3])
    first = nn.functional.softplus(model["discriminator"](made.detach()) - model["discriminator"](real)).mean()
    return first, lambda: nn.functional.softplus(-model["discriminator"](model["generator"](real[:, :3]))).mean()


def gan_step(model, batch, optimizers, context):
    with context.autocast():
        loss, generator_loss = gan_losses(model, batch[0])
    context.backward(loss, optimizers["discriminator"])
    context.step(optimizers["discriminator"])
    with context.autocast():
        loss = generator_loss()
    context.backward(loss, optimizers["generator"])
    context.step(optimizers["generator"])
    return loss


def mean_loss(model, batch):
    return MSE(model(batch[0]), batch[1])


def one_step(model, batch, optimizers, context):
    with context.autocast():
        loss = mean_loss(model, batch)
    context.backward(loss)
    context.step(optimizers)
    return loss


@pytest.fixture
def trainer(linear_task):
    def make(precision="fp32", clipping=None, learning_rate=0.1, **functions):
        task = linear_task(**functions)
        return Trainer(task, CPU, precision, learning_rate=learning_rate, gradient_clipping=clipping, loss_scale=1.0)

    return make


def batches_of(trainer, count, size=8):
    source = TrainingBatches(trainer.task, size, 0)
    return [next(source) for _ in range(count)]


def all_weights(model):
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def quarter_and_half(model):
    both = torch.tensor([0.25, 0.5], requires_grad=True) + 0 * all_weights_of(model)
    return both[0], both[1]


def all_weights_of(model):
    return sum(each.sum() for each in model.parameters())


@pytest.fixture
def losses(trainer):
    """What a step of the GAN says that each of its optimizers was trained on."""

    def after(train_step):
        ours = trainer(build_model=gan, build_optimizer=gan_optimizers, train_step=train_step)
        ours.step(TrainingBatches(ours.task, 8, 0))
        names = {each: name for name, each in ours.optimizers.given.items()}
        return {names.get(each): pytest.approx(loss) for each, loss in ours.losses.items()}

    return after


class TestLosses:
    def test_each_optimizer_has_its_own_whether_or_not_backward_is_told_whose_it_is(self, losses):
        def told(model, batch, optimizers, context):
            first, second = quarter_and_half(model)
            context.backward(first, optimizers["discriminator"], retain_graph=True)
            context.backward(second, optimizers["generator"])
            for each in optimizers.values():
                context.step(each)
            return second

        def untold(model, batch, optimizers, context):
            for name, loss in zip(("discriminator", "generator"), quarter_and_half(model), strict=True):
                context.backward(loss, retain_graph=True)
                context.step(optimizers[name])
            return loss

        assert losses(told) == losses(untold) == {"discriminator": 0.25, "generator": 0.5}

    def test_several_passes_before_a_step_make_one_loss(self, losses):
        def real_and_fake(model, batch, optimizers, context):
            for loss in quarter_and_half(model):
                context.backward(loss, retain_graph=True)
            context.step(optimizers["discriminator"])
            return loss

        assert losses(real_and_fake) == {"discriminator": 0.375}

    def test_those_of_a_closure_are_of_the_optimizer_that_calls_it(self, losses):
        def by_closure(model, batch, optimizers, context):
            def closure():
                loss, _ = quarter_and_half(model)
                context.backward(loss)
                return loss

            context.step(optimizers["generator"], closure)
            loss = quarter_and_half(model)[1]
            context.backward(loss)
            context.step(optimizers["discriminator"])
            return loss

        assert losses(by_closure) == {"generator": 0.25, "discriminator": 0.5}

    def test_a_task_with_one_optimizer_has_the_loss_that_it_returns(self, trainer):
        ours = trainer(train_step=one_step)
        loss = ours.step(TrainingBatches(ours.task, 8, 0))
        assert ours.losses == {None: float(loss)}


class TestOwnStep:
    def test_it_trains_as_compute_loss_does(self, trainer):
        own, plain = trainer(train_step=one_step), trainer(compute_loss=mean_loss)
        for batch in batches_of(own, 3):
            own.step(iter([batch]))
            plain.step(iter([batch]))
        assert torch.equal(all_weights(own.model), all_weights(plain.model))

    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
    def test_accumulated_micro_batches_step_once(self, trainer, precision):
        own = trainer(precision, train_step=one_step)
        plain = trainer(precision, compute_loss=mean_loss)
        before, batches = all_weights(own.model), batches_of(own, 4)
        own.forward_backward(batches[0], 4)
        assert torch.equal(before, all_weights(own.model))
        for batch in batches[1:]:
            own.forward_backward(batch, 4)
        own.update()
        plain.step(iter(batches), 4)
        assert not torch.equal(before, all_weights(own.model))
        assert torch.allclose(all_weights(own.model), all_weights(plain.model))

    def test_gradients_of_a_step_do_not_reach_the_next(self, trainer):
        own, plain = trainer(train_step=one_step), trainer(compute_loss=mean_loss)
        for batch in batches_of(own, 2):
            own.forward_backward(batch)
            own.update(free_late=True)
            plain.step(iter([batch]))
        assert torch.equal(all_weights(own.model), all_weights(plain.model))

    def test_alternating_losses_train_as_in_a_plain_loop(self, trainer):
        own = trainer(build_model=gan, build_optimizer=gan_optimizers, train_step=gan_step, compute_loss=None)
        model = copy.deepcopy(own.model)
        optimizers = gan_optimizers(model, 0.1)
        for batch in batches_of(own, 3):
            own.step(iter([batch]))
            loss, generator_loss = gan_losses(model, batch[0])
            optimizers["discriminator"].zero_grad()
            loss.backward()
            optimizers["discriminator"].step()
            optimizers["generator"].zero_grad()
            generator_loss().backward()
            optimizers["generator"].step()
        assert torch.allclose(all_weights(own.model), all_weights(model))

    def test_lbfgs_steps_with_a_closure(self, trainer):
        def step(model, batch, optimizer, context):
            def closure():
                optimizer.zero_grad()
                loss = MSE(model(batch[0]), batch[1])
                context.backward(loss)
                return loss

            context.step(optimizer, closure)
            return MSE(model(batch[0]), batch[1])

        def lbfgs(model, lr):
            return torch.optim.LBFGS(model.parameters(), lr=lr, max_iter=5)

        own = trainer(build_optimizer=lbfgs, train_step=step, learning_rate=1.0)
        batch = batches_of(own, 1, size=64)[0]
        losses = [float(own.step(iter([batch]))) for _ in range(5)]
        assert losses[-1] < 1e-3 * float(MSE(torch.zeros_like(batch[1]), batch[1]))

    def test_what_a_closure_leaves_is_clipped_and_its_loss_comes_back(self, trainer):
        norms, losses = [], []

        class Tells(torch.optim.SGD):
            def step(self, closure):
                loss = closure()
                norms.append(torch.cat([each.grad.flatten() for each in self.param_groups[0]["params"]]).norm().item())
                return loss

        def step(model, batch, optimizer, context):
            def closure():
                loss = MSE(model(batch[0]), batch[1])
                context.backward(loss)
                return loss

            losses.append(context.step(optimizer, closure))
            return losses[-1]

        own = trainer(
            build_optimizer=lambda model, lr: Tells(model.parameters(), lr=lr),
            train_step=step,
            gradient_clipping=GradientClipping(norm=1e-3),
        )
        own.step(iter(batches_of(own, 1)))
        assert norms == pytest.approx([1e-3], rel=1e-3)
        assert losses[0].item() > 0

    def test_state_is_kept_from_step_to_step_of_one_run(self, trainer):
        seen = []

        def step(model, batch, optimizer, context):
            seen.append(context.state.get("steps", 0))
            context.state["steps"] = seen[-1] + 1
            return one_step(model, batch, optimizer, context)

        for _ in range(2):
            own = trainer(train_step=step)
            for batch in batches_of(own, 2):
                own.step(iter([batch]))
        assert seen == [0, 1, 0, 1]

    def test_an_average_of_the_weights_follows_after_the_last_micro_batch(self, trainer):
        def build_model():
            net = nn.Linear(4, 1)
            return {"net": net, "ema": torch.optim.swa_utils.AveragedModel(net)}

        def step(model, batch, optimizer, context):
            loss = one_step(model["net"], batch, optimizer, context)
            if context.is_last_micro_batch:
                model["ema"].update_parameters(model["net"])
            return loss

        def build_optimizer(model, lr):
            return torch.optim.SGD(model["net"].parameters(), lr=lr)

        own = trainer(build_model=build_model, build_optimizer=build_optimizer, train_step=step)
        own.step(iter(batches_of(own, 4)), 4)
        assert int(own.model["ema"].n_averaged) == 1


NO_STEP = r"train_step stepped no optimizer; call context.step\(optimizer\) .*, or context.step\(optimizer, closure\)"


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda model, batch, _optimizer, _context: mean_loss(model, batch), NO_STEP),
        (
            lambda model, batch, optimizer, _context: (mean_loss(model, batch).backward(), optimizer.step()),
            r"train_step called optimizer.step\(\); call context.step\(optimizer\)",
        ),
        (lambda *given: one_step(*given).item(), "train_step returned a float, not a tensor"),
        (
            lambda model, _batch, _optimizer, context: context.step(torch.optim.SGD(model.parameters(), lr=0.1)),
            "context.step was given a SGD that build_optimizer has not returned",
        ),
    ],
)
def test_a_wrong_step_is_explained(trainer, step, words):
    own = trainer(train_step=step)
    with pytest.raises(UserCodeError, match=words):
        own.step(iter(batches_of(own, 1)))


def test_backward_passes_that_would_mix_when_accumulated_are_explained(trainer):
    def step(model, batch, optimizers, context):
        loss, generator_loss = gan_losses(model, batch[0])
        context.backward(loss)
        context.backward(generator_loss())
        for each in optimizers.values():
            context.step(each)
        return loss

    own = trainer(build_model=gan, build_optimizer=gan_optimizers, train_step=step)
    own.step(iter(batches_of(own, 1)))
    with pytest.raises(
        UserCodeError, match=r"gradients mix when micro-batches are accumulated; .* context.backward\(lo"
    ):
        own.step(iter(batches_of(own, 2)), 2)


class TestGradientsOfTheTasksOwnMaking:
    @staticmethod
    def step(adds_up):
        def step(model, batch, optimizer, context):
            """As with gradients of each sample, by torch.func."""
            loss, parameters = mean_loss(model, batch), list(model.parameters())
            for each, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                part = gradient / context.accumulation_steps if adds_up else gradient
                each.grad = part if each.grad is None or not adds_up else each.grad + part
            context.step(optimizer)
            return loss.detach()

        return step

    def test_they_train_as_in_a_plain_loop(self, trainer):
        own, plain = trainer(train_step=self.step(adds_up=False)), trainer(compute_loss=mean_loss)
        for each in (own, plain):
            each.step(iter(batches_of(own, 1)))
        assert torch.equal(all_weights(own.model), all_weights(plain.model))

    def test_which_replace_those_of_earlier_micro_batches_are_no_larger_batch(self, trainer):
        own = trainer(train_step=self.step(adds_up=False))
        with pytest.raises(UserCodeError, match=r"without context.backward\(loss\).* within what fits at once"):
            own.step(iter(batches_of(own, 2)), 2)

    @pytest.mark.parametrize("with_loss", [{0}, {1}, set()])
    def test_micro_batches_without_a_loss_add_nothing(self, trainer, with_loss):
        """Such as of no positive anchor, or of a NaN that is left out."""

        def step(model, batch, optimizer, context):
            loss = mean_loss(model, batch)
            if context.micro_batch in with_loss:
                context.backward(loss)
            context.step(optimizer)
            return loss

        own, plain = trainer(train_step=step), trainer(compute_loss=mean_loss)
        batches = batches_of(own, 2)
        own.step(iter(batches), 2)
        for number in with_loss:
            (mean_loss(plain.model, batches[number]) / 2).backward()
            next(iter(plain.optimizers)).step()
        assert torch.equal(all_weights(own.model), all_weights(plain.model))

    def test_which_are_added_up_are_one(self, trainer):
        own, plain = trainer(train_step=self.step(adds_up=True)), trainer(compute_loss=mean_loss)
        for each in (own, plain):
            each.step(iter(batches_of(own, 2)), 2)
        assert torch.allclose(all_weights(own.model), all_weights(plain.model))


class TestSeveralOptimizers:
    @pytest.mark.parametrize("kind", [list, lambda each: dict(enumerate(each))])
    def test_all_step_after_a_loss(self, trainer, kind):
        def build_optimizer(model, lr):
            return kind([torch.optim.SGD([model.weight], lr=lr), torch.optim.AdamW([model.bias], lr=lr / 10)])

        both = trainer(build_optimizer=build_optimizer)
        before = [each.detach().clone() for each in both.model.parameters()]
        both.step(iter(batches_of(both, 1)))
        changes = [
            float((each - was).detach().abs().max()) for each, was in zip(both.model.parameters(), before, strict=True)
        ]
        assert changes[0] > 0
        assert changes[1] == pytest.approx(0.01, rel=0.1)  # Adam's first step
        assert both.optimizers.name == "SGD + AdamW"

    def test_several_of_one_class_are_told_as_several(self, trainer):
        def build_optimizer(model, lr):
            return [torch.optim.Adam([each], lr=lr) for each in model.parameters()]

        assert trainer(build_optimizer=build_optimizer).optimizers.name == "2 x Adam"

    def test_schedules_of_all_step(self, trainer):
        def build_optimizer(model, lr):
            return [torch.optim.SGD([model.weight], lr=lr), torch.optim.SGD([model.bias], lr=lr / 10)]

        def build_scheduler(optimizers, total_steps):
            return [torch.optim.lr_scheduler.LinearLR(each, 1.0, 0.0, total_steps) for each in optimizers]

        task = trainer(build_optimizer=build_optimizer, build_scheduler=build_scheduler).task
        both = Trainer(task, CPU, "fp32", learning_rate=0.1, total_steps=10)
        for batch in batches_of(both, 5):
            both.step(iter([batch]))
        assert [group["lr"] for group in both.optimizers.param_groups] == pytest.approx([0.05, 0.005])


class TestClipping:
    @pytest.mark.parametrize("precision", ["fp32", "fp16"])
    @pytest.mark.parametrize("functions", [{}, {"train_step": one_step}])
    @pytest.mark.parametrize("clipping", [GradientClipping(norm=1e-3), GradientClipping(value=1e-3)])
    def test_gradients_are_clipped_before_the_step(self, linear_task, precision, functions, clipping):
        def build_optimizer(model, lr):
            return torch.optim.SGD(model.parameters(), lr=lr)

        task = linear_task(build_optimizer=build_optimizer, **functions)
        clipped = Trainer(task, CPU, precision, learning_rate=1.0, gradient_clipping=clipping, loss_scale=2.0**10)
        before = all_weights(clipped.model)
        clipped.step(iter(batches_of(clipped, 1)))
        change = all_weights(clipped.model) - before
        size = change.norm() if clipping.norm else change.abs().max()
        assert float(size) == pytest.approx(1e-3, rel=1e-2)
