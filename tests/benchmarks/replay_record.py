"""Records the learning curves that the replay benchmark answers from: batch size x learning rate x seed, by steps.

    python tests/benchmarks/replay_record.py             # every task that is not recorded yet; about two hours
    python tests/benchmarks/replay_record.py --times     # step times alone; a few minutes on a quiet machine

Curves are validation loss after so many optimizer steps, so the machine's load does not enter. What a step takes is
measured apart, by batchtune's own training step and loader, interleaved over batch sizes. All learning rates and seeds
of a batch size train side by side as one stacked model (torch.func), each with its own weights and data order, by the
task's own optimizer: at learning rate 1 its step is the direction, which each model takes at its own rate (exact for
optimizers whose step is proportional to the rate: SGD with momentum, Adam, AdamW).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from replay_curves import BASELINE_BATCH_SIZE, DATA, HORIZON, RANGE_TEST_RATES, SETTLED_GAIN, SETTLED_POINTS
from replay_tasks import TASKS, ReplayTask
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from batchtune.child.before_study import noise_scale
from batchtune.child.evaluate import metric_value
from batchtune.child.trainer import Trainer, TrainingBatches, seed_everything
from batchtune.child.training_run import EVALUATION_GROWTH
from batchtune.device.memory import open_device
from batchtune.protocol.commands import MeasureNoiseScale
from batchtune.task.contract import Task
from batchtune.tune.plan.measure_prior import DRAWS, LARGE_FACTOR, WARM_UP_STEPS

TIMES = DATA / "times.json"
BATCH_SIZES = tuple(round(2 ** (half / 2)) for half in range(6, 19))  # 8 to 512 in half octaves
MOST_LOSS = 6e4  # what float16 holds; beyond it a run has diverged
HOPELESS_STARTS = 1.2  # a loss so much above the start …
HOPELESS_POINTS = 12  # … for so many evaluations, a factor of 2.2 in steps, will not come back
PATIENCE = 6  # times the steps of its seed's first run at the target: a lower rate is foretold from there
SETTLED_STEPS = 200  # before that nothing is judged settled
BELOW_TARGET = 0.97  # of the target: there a run has shown all that is asked
TIMED_STRETCHES, STRETCH_SECONDS = 30, 0.03
EVALUATION_BATCH_SIZE = 512
BASELINE_STEPS = 20_000  # more than any baseline needs
StepSeconds = Callable[[int], float]


def rates_of(task: ReplayTask) -> np.ndarray:
    """The learning rates of the record, a quarter of a decade apart."""
    low, high = task.log10_rates
    return 10 ** np.linspace(low, high, round((high - low) / 0.25) + 1)


def evaluation_steps(last: int) -> np.ndarray:
    """Steps at which a run is evaluated: as far apart as batchtune's own evaluations."""
    count = math.ceil(math.log(last) / math.log(EVALUATION_GROWTH))
    return np.unique([0, *(min(last, round(EVALUATION_GROWTH**power)) for power in range(count + 1))])


@dataclass
class Stack:
    """Runs that train side by side; those that are over leave.

    Attributes:
        rates: learning rate of each run, shape [runs].
        seeds: its seed.
        parameters: name to tensor of shape [runs, ...].
    """

    task: ReplayTask
    rates: Tensor
    seeds: Tensor
    parameters: dict[str, Tensor]

    @classmethod
    def of(cls, task: ReplayTask, rates: Tensor, seeds: Tensor) -> Stack:
        """New models, those of a seed alike."""
        models = []
        for seed in seeds.tolist():
            seed_everything(seed)
            models.append(task.build_model())
        return cls(task, rates, seeds, stack_module_state(models)[0])

    def __post_init__(self) -> None:
        with torch.device("meta"):
            self.skeleton = self.task.build_model()
        self.optimizer = self.task.optimizer(self.parameters.values(), lr=1.0)

    def losses(self, inputs: Tensor, labels: Tensor, *, shared: bool = False) -> Tensor:
        """The loss of every run, shape [runs], on batches of its own, shape [runs, batch, ...], or a shared one."""

        def loss(parameters: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
            return self.task.loss(functional_call(self.skeleton, parameters, (inputs,)), labels)

        dims = (0, None, None) if shared else (0, 0, 0)
        return vmap(loss, in_dims=dims)(self.parameters, inputs, labels)

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """One optimizer step of every run; returns the losses before it."""
        losses = self.losses(inputs, labels)
        losses.sum().backward()
        with torch.no_grad():
            before = [each.clone() for each in self.parameters.values()]
            self.optimizer.step()
            self.optimizer.zero_grad()
            for now, earlier in zip(self.parameters.values(), before, strict=True):
                now.copy_(torch.lerp(earlier, now, self.rates.view(-1, *[1] * (now.ndim - 1))))
        return losses.detach()

    def keep(self, going_on: Tensor) -> None:
        """Leaves out the runs that are over."""
        runs = len(self.rates)
        for each in self.parameters.values():
            for name, value in self.optimizer.state[each].items():
                if value.ndim and len(value) == runs:
                    self.optimizer.state[each][name] = value[going_on]
            each.grad = None
            each.data = each.data[going_on]
        self.rates, self.seeds = self.rates[going_on], self.seeds[going_on]


class Order:
    """Shuffled batches without end for several seeds at once, incomplete ones left out."""

    def __init__(self, samples: int, batch_size: int, seeds: int) -> None:
        self._samples, self._batch_size = samples, batch_size
        self._generators = [torch.Generator().manual_seed(seed) for seed in range(seeds)]
        self._at, self._epoch = samples, torch.empty(0)

    def next(self) -> Tensor:
        """Indices of shape [seeds, batch]."""
        if self._at + self._batch_size > self._samples:
            self._epoch = torch.stack([torch.randperm(self._samples, generator=each) for each in self._generators])
            self._at = 0
        self._at += self._batch_size
        return self._epoch[:, self._at - self._batch_size : self._at]


def record_batch_size(
    task: ReplayTask, batch_size: int, rates: np.ndarray, seeds: int, *, last_step: int
) -> tuple[np.ndarray, np.ndarray]:
    """Validation losses by (rate, seed, evaluation) and the steps of the evaluations.

    A diverged run ends with inf; after the end of a run stands nan.
    """
    points = evaluation_steps(last_step)
    curves = np.full((len(rates) * seeds, len(points)), np.nan)
    each_rate = torch.tensor(rates, dtype=torch.float32).repeat_interleave(seeds)
    stack = Stack.of(task, each_rate, torch.arange(seeds).repeat(len(rates)))
    inputs, labels = task.train_dataset().tensors
    order, alive, at = Order(len(inputs), batch_size, seeds), np.arange(len(curves)), 0
    first_reached, fastest_rate = np.full(seeds, np.inf), np.full(seeds, -np.inf)
    for column, step in enumerate(points):
        for _ in range(at, step):
            chosen = order.next()[stack.seeds]
            stack.step(inputs[chosen], labels[chosen])
        at = step
        with torch.no_grad():
            losses = stack.losses(*task.val_dataset().tensors, shared=True).numpy()
        curves[alive, column] = np.where(np.isfinite(losses) & (losses < MOST_LOSS), losses, np.inf)
        over = is_over(curves[alive, : column + 1], step, task.target)
        seed, rate = stack.seeds.numpy(), stack.rates.numpy()
        arrived = curves[alive, column] <= task.target
        np.minimum.at(first_reached, seed[arrived], step)
        np.maximum.at(fastest_rate, seed[arrived], rate[arrived])
        going_on = ~(over | ((rate < fastest_rate[seed]) & (step > PATIENCE * first_reached[seed])))
        if not going_on.any():
            break
        if not going_on.all():
            alive = alive[going_on]
            stack.keep(torch.tensor(going_on))
    return curves.reshape(len(rates), seeds, -1), points


def is_over(curves: np.ndarray, step: int, target: float) -> np.ndarray:
    """Which runs have shown all that is asked: the target is behind them, or they are lost, or they have settled."""
    now, start, recent = curves[:, -1], curves[:, 0], curves[:, -SETTLED_POINTS:]
    lost = (curves[:, -HOPELESS_POINTS:] > HOPELESS_STARTS * start[:, None]).sum(axis=1) >= HOPELESS_POINTS
    over = (now <= BELOW_TARGET * target) | ~np.isfinite(now) | lost
    if step > SETTLED_STEPS:
        gained = curves[:, :-SETTLED_POINTS].min(axis=1) - recent.min(axis=1)
        over |= (gained < SETTLED_GAIN * (start - target)) & (now > recent.min(axis=1))
    return over


def record_range_test(task: ReplayTask, batch_size: int, seeds: int) -> np.ndarray:
    """Training losses while the learning rate climbs from step to step, shape [seeds, RANGE_TEST_STEPS]."""
    stack = Stack.of(task, torch.zeros(seeds), torch.arange(seeds))
    inputs, labels = task.train_dataset().tensors
    order, losses = Order(len(inputs), batch_size, seeds), []
    for rate in RANGE_TEST_RATES:
        chosen = order.next()
        stack.rates = torch.full((seeds,), rate)
        losses.append(stack.step(inputs[chosen], labels[chosen]).numpy())
    return np.stack(losses, axis=1)


def record(task: ReplayTask, step_seconds: StepSeconds) -> dict[str, Any]:
    """Every curve of a task, up to HORIZON times what its baseline needs in the median."""
    rates = rates_of(task)
    base, points = record_batch_size(
        task, BASELINE_BATCH_SIZE, np.array([task.baseline_rate]), task.seeds, last_step=BASELINE_STEPS
    )
    baseline_steps = float(np.median(points[np.argmax(base[0] <= task.target, axis=1)]))
    horizon_seconds = HORIZON * baseline_steps * step_seconds(BASELINE_BATCH_SIZE)
    found: dict[str, Any] = {"rates": rates, "target": task.target, "baseline_steps": baseline_steps}
    for batch_size in BATCH_SIZES:
        started = time.perf_counter()
        last_step = round(horizon_seconds / step_seconds(batch_size))
        curves, points = record_batch_size(task, batch_size, rates, task.seeds, last_step=last_step)
        found |= {f"curves_{batch_size}": curves.astype(np.float16), f"steps_{batch_size}": points}
        found[f"range_test_{batch_size}"] = record_range_test(task, batch_size, task.seeds)
        reached = (curves <= task.target).any(axis=2).mean()
        spent = time.perf_counter() - started
        print(f"{task.name} {batch_size}: {spent:.0f} s, {reached:.0%} reached the target", flush=True)
    return found


def record_times(task: ReplayTask) -> dict[str, Any]:
    """Seconds of a step at each batch size, by batchtune's own step and loader, and of one evaluation.

    Sizes take turns, so that a slow spell of the machine hits all of them, and the lower quartile of many short
    stretches counts. The curves are replayed with alpha + beta * B fitted to these.
    """
    contract = Task(task, task.name)
    trainer = Trainer(contract, torch.device("cpu"), "fp32")
    batches = {size: TrainingBatches(contract, size, 0) for size in BATCH_SIZES}
    stretches: dict[int, list[float]] = {size: [] for size in BATCH_SIZES}
    evaluations = []
    for _ in range(TIMED_STRETCHES):
        for size, its_batches in batches.items():
            stretches[size].append(_seconds_a_step(trainer, its_batches))
        started = time.perf_counter()
        metric_value(trainer, "val_loss", EVALUATION_BATCH_SIZE)
        evaluations.append(time.perf_counter() - started)
    usual = np.array([np.quantile(each[1:], 0.25) for each in stretches.values()])
    sizes = np.array(BATCH_SIZES, dtype=float)
    # relative errors count
    alpha, beta = np.linalg.lstsq(np.stack([1 / usual, sizes / usual], axis=1), np.ones_like(usual), rcond=None)[0]
    return {
        "alpha_seconds": float(alpha),
        "beta_seconds_per_sample": float(beta),
        "step_seconds": {size: float(f"{each:.4g}") for size, each in zip(BATCH_SIZES, usual, strict=True)},
        "evaluation_seconds": float(np.quantile(evaluations, 0.25)),
    }


def record_noise_scale(task: ReplayTask) -> float:
    """The gradient noise scale as batchtune measures it before a study, in samples."""
    command = MeasureNoiseScale(
        small=BASELINE_BATCH_SIZE,
        large=LARGE_FACTOR * BASELINE_BATCH_SIZE,
        precision="fp32",
        learning_rate=task.baseline_rate,
        warm_up_steps=WARM_UP_STEPS,
        draws=DRAWS,
        seconds=60.0,
    )
    found = noise_scale(Task(task, task.name), open_device("cpu"), command)
    return float(f"{found.samples:.4g}")


def _seconds_a_step(trainer: Trainer, batches: Iterator[Any]) -> float:
    trainer.step(batches)
    started, steps = time.perf_counter(), 0
    while (spent := time.perf_counter() - started) < STRETCH_SECONDS:
        trainer.step(batches)
        steps += 1
    return spent / steps


def main() -> None:
    """Records what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=list(TASKS), help="of " + ", ".join(TASKS))
    parser.add_argument("--times", action="store_true", help="time steps anew; curves stay")
    parser.add_argument("--fresh", action="store_true", help="record curves that are there already")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    DATA.mkdir(exist_ok=True)
    times = json.loads(TIMES.read_text()) if TIMES.exists() else {}
    for name in arguments.tasks:
        if arguments.times or name not in times:
            times[name] = record_times(TASKS[name])
        if "noise_scale_samples" not in times[name]:
            times[name]["noise_scale_samples"] = record_noise_scale(TASKS[name])
        TIMES.write_text(json.dumps(times, indent=1) + "\n")
    if arguments.times:
        return
    for name in arguments.tasks:
        path, its = DATA / f"{name}.npz", times[name]
        if arguments.fresh or not path.exists():
            alpha, beta = its["alpha_seconds"], its["beta_seconds_per_sample"]
            np.savez_compressed(path, **record(TASKS[name], lambda size, a=alpha, b=beta: a + b * size))


if __name__ == "__main__":
    main()
