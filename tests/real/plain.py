"""A training's own loop without batchtune: does a batch size train within a limit, how soon is a target met?

    python tests/real/plain.py trains gpt 300 200       # a batch size, and MiB
    python tests/real/plain.py race gpt '{"metric": "val_loss", …}'

Each prints one line of JSON at its end; measure.py starts it.
"""

import contextlib
import importlib
import inspect
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

STEPS, SECONDS = 10, 60  # of a training at the largest batch; at least two steps


def main(what: str, name: str, *arguments: str) -> None:
    sys.path.insert(0, str(Path(__file__).parent / "trainings"))
    training = importlib.import_module(name)
    with contextlib.redirect_stdout(sys.stderr):
        found = (
            trains(training, *map(int, arguments)) if what == "trains" else race(training, *map(json.loads, arguments))
        )
    print(json.dumps(found))


def trains(training: ModuleType, batch_size: int, limit_mib: int) -> dict[str, Any]:
    """Steps of shuffled batches that the loop did, and whether its resident memory stayed within the limit.

    What counts is what comes on top of the process as it is once the training, and its library, is imported.
    """
    if hasattr(training, "make_trainer"):
        training.make_trainer()  # what a Trainer loads only when it is made belongs to the imports
    before, done, began = resident("VmRSS"), [], time.monotonic()
    passed: list[int] = []

    def report(_: object) -> bool:
        if resident("VmHWM") - before > limit_mib << 20:
            passed.append(len(done))
            return True
        done.append(None)
        return len(done) >= STEPS or (len(done) > 1 and time.monotonic() - began > SECONDS)

    training.train(batch_size, 1e-6, report)
    if passed:
        return {"steps": passed[0], "trains": False, "why": "resident memory passed the limit"}
    return {"steps": len(done), "trains": len(done) > 1}


def resident(name: str) -> int:
    """Bytes by a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) << 10


class Stopwatch:
    """Ends a training once its metric has reached the target or its time is over; evaluation does not count."""

    def __init__(self, metric: Callable[[Any], float], asked: dict[str, Any]) -> None:
        self._metric, self._asked = metric, asked
        self._since, self._next, self.trained = None, 0.0, 0.0
        self.reached = False

    def __call__(self, model: Any) -> bool:
        now = time.perf_counter()
        self.trained += now - (self._since or now)  # what the first step sets up does not count
        if self.trained >= self._next:
            self._next = self.trained + self._asked["every"]
            sign = 1 if self._asked["goal"] == "minimize" else -1
            self.reached = sign * self._metric(model) <= sign * self._asked["target"]
        self._since = time.perf_counter()
        return self.reached or self.trained >= self._asked["limit"]


def race(training: ModuleType, asked: dict[str, Any]) -> list[list[float | None]]:
    """Seconds to the target of each setting, taking turns, on seeds that no study has seen; None: not in time."""
    metric = metric_of(training, asked["metric"])
    times: list[list[float | None]] = [[] for _ in asked["settings"]]
    for seed in range(asked["seeds"]):
        for place, (batch_size, rate, steps) in zip(times, asked["settings"], strict=True):
            torch.manual_seed(4_000_000 + seed)
            watch = Stopwatch(metric, asked)
            horizon = {"steps": steps} if steps and "steps" in inspect.signature(training.train).parameters else {}
            training.train(batch_size, rate, watch, **horizon)
            place.append(watch.trained if watch.reached else None)
    return times


def metric_of(training: ModuleType, name: str) -> Callable[[Any], float]:
    """The training's own evaluation, its library's, or the mean loss of its validation set."""
    if hasattr(training, "make_trainer"):
        return partial(evaluated_by, training.make_trainer(), name)
    batches = [] if hasattr(training, "evaluate") else list(validation(training))

    def metric(model: Any) -> float:
        modules = list(model.values()) if isinstance(model, dict) else [model]
        for each in modules:
            each.eval()
        with torch.no_grad():
            if batches:
                sizes = [samples_in(training, batch) for batch in batches]
                total = sum(
                    float(loss(training, model, each)) * size for each, size in zip(batches, sizes, strict=True)
                )
                found = total / sum(sizes)
            else:
                found = training.evaluate(model)
        for each in modules:
            each.train()
        return float(found[name] if isinstance(found, dict) else found)

    return metric


def evaluated_by(trainer: Any, name: str, model: Any) -> float:
    """A Trainer's own metric, which weighs its batches as it does."""
    trainer.model = trainer.model_wrapped = model
    found = trainer.evaluate()[name]
    model.train()
    return float(found)


def validation(training: ModuleType) -> Any:
    """Batches of the validation set."""
    if hasattr(training, "fit"):
        data = training.make()[1] if hasattr(training, "make") else training.MyDataModule()
        data.setup("fit")
        return data.val_dataloader()
    return DataLoader(training.val_dataset(), 64, collate_fn=getattr(training, "collate", None))


def samples_in(training: ModuleType, batch: Any) -> int:
    """As the training counts them, or by the first dimension."""
    if hasattr(training, "batch_size_of"):
        return training.batch_size_of(batch)
    first = next(iter(batch.values())) if hasattr(batch, "values") else batch[0]
    return len(first)


def loss(training: ModuleType, model: Any, batch: Any) -> torch.Tensor:
    """Of one batch, as the training computes it."""
    if hasattr(training, "compute_loss"):
        return training.compute_loss(model, batch)
    return model.loss(batch) if isinstance(model, nn.Module) and hasattr(model, "loss") else model(**batch).loss


if __name__ == "__main__":
    main(*sys.argv[1:])
