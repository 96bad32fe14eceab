"""A training loop as people write it in plain PyTorch, and whether a batch size trains in it: the truth of a probe.

Nothing of batchtune is in it. Each try is a fork of a process that has imported torch and has no CUDA context, so that
it is as fresh as a new process and starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # what an optimizer loads when it is first made, here once for all forks
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

torch.set_num_threads(1)  # a fork has no threads of the pool that its parent thinks it has
STEPS = 24  # some sizes train for ten steps, until blocks are cut up so that the next one fails
_PROCESSOR_SECONDS, _SECONDS = 120, 1200  # after which a try hangs; other work may keep the machine busy
_EVALUATE_EVERY, _EVALUATED_BATCHES = 3, 2
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_TRAINS, _OUT_OF_MEMORY, _RAISES = 0, 1, 2


@dataclass(frozen=True)
class Habit:
    """What people do differently in the same loop."""

    name: str
    clips: bool = False
    zeroes_before: bool = False
    looks: bool = False  # evaluates (where there is something to evaluate on) and saves every few steps


HABITS = (
    Habit("all of it", clips=True, zeroes_before=True, looks=True),
    Habit("zeroes after, looks", looks=True),
    Habit("zeroes before", zeroes_before=True),
    Habit("clips", clips=True),
    Habit("bare"),
)


def loop(task: SimpleNamespace, batch_size: int, precision: str, habit: Habit) -> None:
    """Trains a new model for a few steps, with the last batch and loss alive while the next step begins."""
    device, dtype = torch.device("cuda"), _AUTOCAST.get(precision)
    torch.manual_seed(0)
    model = task.build_model().to(device).train()
    made = getattr(task, "build_optimizer", None)
    optimizer = made(model, 1e-3) if made else torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16", init_scale=1.0)
    steps = 0
    while steps < STEPS:
        for cpu_batch in _batches(task, "train_dataset", batch_size):
            batch = _to(cpu_batch, device)
            if habit.zeroes_before:
                optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype, enabled=dtype is not None):
                loss = task.compute_loss(model, batch)
            scaler.scale(loss).backward()
            if habit.clips:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if not habit.zeroes_before:
                optimizer.zero_grad(set_to_none=True)
            steps += 1
            if habit.looks and steps % _EVALUATE_EVERY == 0:
                _evaluate(task, model, batch_size, dtype)
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, os.devnull)
            if steps == STEPS:
                loss.item()
                break
    torch.cuda.synchronize()


def _evaluate(task: SimpleNamespace, model: torch.nn.Module, batch_size: int, dtype: torch.dtype | None) -> None:
    model.eval()
    with torch.no_grad(), torch.autocast("cuda", dtype, enabled=dtype is not None):
        if hasattr(task, "evaluate"):
            task.evaluate(model)
        elif hasattr(task, "val_dataset"):
            total = 0.0
            for number, cpu_batch in enumerate(_batches(task, "val_dataset", batch_size)):
                batch = _to(cpu_batch, torch.device("cuda"))
                total += task.compute_loss(model, batch).item()
                if number + 1 == _EVALUATED_BATCHES:
                    break
    model.train()


class _WorstBatches(torch.utils.data.Dataset):
    """The task's worst batch, again and again."""

    def __init__(self, task: SimpleNamespace, batch_size: int) -> None:
        self._batch = tree_map_only(
            torch.Tensor, torch.Tensor.pin_memory, task.make_batch(batch_size)
        )  # once, to be quick

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Any:
        return self._batch


def _batches(task: SimpleNamespace, name: str, batch_size: int) -> Iterator[Any]:
    if name == "train_dataset" and hasattr(task, "make_batch"):
        return iter(DataLoader(_WorstBatches(task, batch_size), batch_size=None, pin_memory=True))
    data, collate = getattr(task, name)(), getattr(task, "collate", None)
    training = name == "train_dataset"
    return iter(DataLoader(data, batch_size, shuffle=training, drop_last=training, collate_fn=collate, pin_memory=True))


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    return type(value)(_to(item, device) for item in value) if isinstance(value, list | tuple) else value


class Truth:
    """The largest batch size that the loop trains with every habit, each try in a process of its own.

    Args:
        task: the user's functions.
        precision: bf16, fp16, fp32 or tf32.
        limit: bytes that the process may reserve; None: all that the card has.
        habits: with which it is to train; each takes so many steps of every size that is tried.
    """

    def __init__(
        self, task: SimpleNamespace, precision: str, limit: int | None, habits: Sequence[Habit] = HABITS
    ) -> None:
        self._task, self._precision, self._limit, self._habits = task, precision, limit, habits
        self.tries = 0
        self.broken: list[str] = []
        self._known: dict[tuple[int, str], bool] = {}

    def trains(self, batch_size: int) -> bool:
        """Whether all habits train at a size; those that have failed before are tried first."""
        failed = {name for (_, name), fits in self._known.items() if not fits}
        return all(
            self._try(batch_size, habit) for habit in sorted(self._habits, key=lambda each: each.name not in failed)
        )

    def beside(self, answer: int, close: float, step: float) -> int:
        """The largest size that trains: the answer where it does and so much more does not, else bisected."""
        above = int(answer * (1 + close)) + 1
        return answer if self.trains(answer) and not self.trains(above) else self.largest(answer, step)

    def largest(self, near: int, step: float = 0.0) -> int:
        """Bisected from a bracket around `near` that widens until it holds the end; 0: not even one sample trains.

        Args:
            near: where to look first.
            step: how wide the bracket may remain, relative; 0: the exact end.
        """
        low, high, share = (near, 0, 0.01) if self.trains(near) else (0, near, 0.01)
        while not low and high > 1:
            smaller = min(high - 1, max(1, int(high * (1 - share))))
            low, high, share = (smaller, high, share) if self.trains(smaller) else (0, smaller, min(0.5, 2 * share))
        while not high:
            larger = int(low * (1 + share)) + 1
            low, high, share = (larger, 0, 2 * share) if self.trains(larger) else (low, larger, share)
        while high - low > max(1, int(step * low)):
            middle = (low + high) // 2
            low, high = (middle, high) if self.trains(middle) else (low, middle)
        return low

    def habits_that_train(self, batch_size: int) -> list[str]:
        """The names of those that do."""
        return [habit.name for habit in self._habits if self._try(batch_size, habit)]

    def _try(self, batch_size: int, habit: Habit) -> bool:
        key = batch_size, habit.name
        if key not in self._known:
            self.tries += 1
            self._known[key] = self._in_fork(batch_size, habit) == _TRAINS
        return self._known[key]

    def _in_fork(self, batch_size: int, habit: Habit) -> int:
        assert not torch.cuda.is_initialized()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            resource.setrlimit(resource.RLIMIT_CPU, (_PROCESSOR_SECONDS, _PROCESSOR_SECONDS))
            signal.alarm(_SECONDS)
            code = _RAISES
            with contextlib.suppress(BaseException):
                code = self._run(batch_size, habit, writing)
            os._exit(code)
        os.close(writing)
        with os.fdopen(reading, encoding="utf-8", errors="replace") as lines:
            message = lines.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code not in {_TRAINS, _OUT_OF_MEMORY}:
            self.broken.append(f"{habit.name} at {batch_size}: {message.strip() or f'exit status {code}'}")
        return code

    def _run(self, batch_size: int, habit: Habit, writing: int) -> int:
        """In the child: trains, and tells why it does not where that is not for lack of memory."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        try:
            if self._limit is not None:
                total = torch.cuda.mem_get_info()[1]
                torch.cuda.set_per_process_memory_fraction(self._limit / total)
            if self._precision == "tf32":
                torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
            loop(self._task, batch_size, self._precision, habit)
        except torch.OutOfMemoryError:
            return _OUT_OF_MEMORY
        except RuntimeError as error:
            out_of_memory = torch.cuda.memory_stats().get("num_ooms")  # a convolution says that it found no engine
            if "ALLOC_FAILED" in str(error) or out_of_memory:
                return _OUT_OF_MEMORY
            os.write(writing, traceback.format_exc()[-600:].encode())
            return _RAISES
        return _TRAINS
