"""The user's own training step on fake CUDA tensors: what is traced is what `batchtune.child` trains."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from batchtune.child.training.inference import Inference
from batchtune.child.training.trainer import Trainer
from batchtune.estimate.memory.events import Assumption, Trace, Work, normalized
from batchtune.estimate.tracing.checkpointing import Checkpointed
from batchtune.estimate.tracing.distributed import distributed, unit_bytes
from batchtune.estimate.tracing.failures import CannotTraceError, naming_the_line
from batchtune.estimate.tracing.fake_cuda import fake_cuda
from batchtune.estimate.tracing.recorder import Recorder
from batchtune.estimate.tracing.source_lines import place_outside_torch
from batchtune.protocol.commands import SamplesSeen
from batchtune.task.adapting.adapted import Adapted
from batchtune.task.contract import Task
from batchtune.task.load import load_task
from batchtune.task.samples import tensor_bytes

_STEPS = 2  # the optimizer's states exist from the first step on; the second is every later one
_REAL_BATCH_BYTES = 256 << 20  # a batch up to this size is made for real: make_batch may read files or use NumPy


class Tracer:
    """Traces one task at one precision at any batch size, keeping what all traces had in common.

    Args:
        task: as the user named it.
        precision: bf16, fp16, fp32 or tf32.
        accumulation_steps: micro-batches per optimizer step.
        checkpointing: recompute the model's repeated blocks in backward, whatever the user's code does.
        strategy: ddp or fsdp, where there is more than one rank.
        world_size: number of ranks.
        device: `cpu` traces what the CPU would allocate.
        samples: of the worst batch, where another child has looked for them.
        inference: forward passes without gradients instead of optimizer steps.

    Attributes:
        samples: of the worst batch; None where the task makes it.
        notes: what the traces had to assume.
        ops: the operators of the step.
    """

    def __init__(
        self,
        task: str,
        precision: str,
        accumulation_steps: int = 1,
        *,
        checkpointing: bool = False,
        strategy: str = "ddp",
        world_size: int = 1,
        device: str = "cuda",
        samples: SamplesSeen | None = None,
        inference: bool = False,
    ) -> None:
        self.notes: list[Assumption] = []
        self._reads_batch = False
        self.ops: set[str] = set()
        self._precision, self._accumulation_steps = precision, accumulation_steps
        self._strategy, self._world_size, self._device = strategy, world_size, device
        if world_size > 1:
            text = f"{strategy} on {world_size} GPUs: by formulas; NCCL's own buffers are not in them"
            self.notes.append(Assumption(text))
        with compilation_ignored(self.notes):
            self._task = load_task(task)
        self._task.require("inference" if inference else "probe")
        if isinstance(self._task.source, Adapted):
            self.notes += [Assumption(text) for text in self._task.source.notes]
        if checkpointing:
            self._task = Checkpointed(self._task.source, self._task.where)  # never of inference
        self.samples = self._task.find_worst_samples(samples)

    def trace(self, batch_size: int) -> Trace:
        """The step at one micro-batch size; see `trace_step`."""
        with compilation_ignored(self.notes):
            trace = self._traced(batch_size)
        if self._world_size > 1:
            trace = distributed(trace, self._strategy, self._world_size)
        self.ops |= trace.ops
        self.notes += [note for note in trace.notes if note not in self.notes]
        return trace

    def _traced(self, batch_size: int) -> Trace:
        """With the batch's whole numbers known, from where on a step fails on what was assumed of them."""
        known = (self._task, batch_size, self._precision, self._accumulation_steps, self._device)
        if not self._reads_batch:
            try:
                return trace_step(*known)
            except CannotTraceError as refusal:
                if not refusal.after_assuming:
                    raise
        trace = trace_step(*known, reads_batch=True)
        if not self._reads_batch:
            self._reads_batch = True
            self.notes.append(
                Assumption("the step depends on whole numbers in the batch: as they are in the worst one")
            )
        return trace


def trace_step(
    task: Task,
    batch_size: int,
    precision: str,
    accumulation_steps: int = 1,
    device: str = "cuda",
    *,
    reads_batch: bool = False,
) -> Trace:
    """Two optimizer steps at one micro-batch size, recorded.

    Args:
        task: the user's code.
        batch_size: micro-batch size, samples.
        precision: bf16, fp16, fp32 or tf32.
        accumulation_steps: micro-batches per optimizer step; beyond two they allocate nothing new.
        device: `cpu` traces what the CPU would allocate.
        reads_batch: whether the values of whole numbers in the batch are known.

    Raises:
        CannotTraceError: the step needs data.
        StepFailedError: it fails with data, too.
        DeviceError: this build of torch cannot trace.
    """
    gc.collect()
    gc.disable()  # a collection in the middle would free storages at a random place
    trace = Trace(batch_size)
    try:
        with naming_the_line(trace), fake_cuda() as mode:
            batch = _fake_batch(task, batch_size, mode, keeps_numbers=reads_batch)
            recorder = Recorder(trace, device)
            if task.is_for_inference:
                _record_inference(trace, recorder, task, batch, precision)
            else:
                _record(trace, recorder, task, batch, precision, min(accumulation_steps, _STEPS))
            return normalized(trace)
    finally:
        gc.enable()


def _record(trace: Trace, recorder: Recorder, task: Task, batch: Any, precision: str, micro_batches: int) -> None:
    with recorder:
        recorder.holds(batch)
        trainer = Trainer(task, _device(recorder), precision)
        roles = Roles(recorder)
        roles.built()
        trace.units = unit_bytes(trainer.model)
        if task.has("train_step"):
            _note_steps(trainer, recorder)
        with recorder.naming(trainer.model):
            for step in range(_STEPS):
                trace.work = Work()
                for _ in range(micro_batches):
                    recorder.moment = f"forward {step + 1}"
                    loss = trainer.forward_backward(batch, micro_batches)  # noqa: F841 - it lives as long as in a loop
                    roles.backward_done(trainer)
                recorder.moment = f"optimizer {step + 1}"
                trainer.update(free_late=step == 0)  # in turn, as an attempt does
                roles.updated(trainer)
        roles.finish(trace)
        recorder.forget()


def _note_steps(trainer: Trainer, recorder: Recorder) -> None:
    """Tells the optimizers' steps from the rest of a step of the user's own."""

    def before(*_: object) -> None:
        recorder.moment = recorder.moment.replace("forward", "optimizer")

    def after(*_: object) -> None:
        recorder.moment = recorder.moment.replace("optimizer", "forward")

    for optimizer in trainer.optimizers:
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)


def _record_inference(trace: Trace, recorder: Recorder, task: Task, batch: Any, precision: str) -> None:
    with recorder:
        recorder.holds(batch)
        inference, roles = Inference(task, _device(recorder), precision), Roles(recorder)
        roles.built()
        with recorder.naming(inference.model):
            for number in range(_STEPS):
                trace.work = Work()
                recorder.moment = f"forward {number + 1}"
                inference.forward(batch)
        roles.finish(trace)
        recorder.forget()


def _device(recorder: Recorder) -> torch.device:
    return torch.device("cuda", 0) if recorder.device_type == "cuda" else torch.device(recorder.device_type)


class Roles:
    """Which storages are parameters, gradients, optimizer states and activations."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._numbers: dict[str, set[int]] = {"parameters": set(), "gradients": set(), "optimizer_states": set()}

    def built(self) -> None:
        """All that is there before the first step: the model, and copies of it such as an EMA's."""
        self._numbers["parameters"] = self._recorder.live()

    def backward_done(self, trainer: Trainer) -> None:
        """The parameters' gradients."""
        grads = [parameter.grad for parameter in trainer.optimizers.parameters]
        grads += [parameter.grad for parameter in trainer.model.parameters()]
        self._add("gradients", [grad for grad in grads if grad is not None])

    def updated(self, trainer: Trainer) -> None:
        """What the update made and outlives it: the optimizer's states. The last batch and loss live on as well."""
        del trainer
        births = self._recorder.trace.births
        made = {number for number in self._recorder.live() if births[number].moment.startswith("optimizer")}
        self._numbers["optimizer_states"] |= made

    def _add(self, category: str, tensors: list[Tensor]) -> None:
        self._numbers[category] |= {
            number for tensor in tensors if (number := self._recorder.number_of(tensor)) is not None
        }

    def finish(self, trace: Trace) -> None:
        """Writes the categories into the trace."""
        alive: set[int] = set()
        kept: set[int] = set()
        in_backward = False
        for event in trace.events:
            if event < 0:
                alive.discard(-event - 1)
                continue
            backward = trace.births[event - 1].moment.startswith("backward")
            if backward and not in_backward:
                kept |= {number for number in alive if trace.births[number].moment.startswith("forward")}
            in_backward = backward
            alive.add(event - 1)
        for category, numbers in (("activations", kept), *reversed(self._numbers.items())):
            for number in numbers:
                trace.births[number].category = category


def _fake_batch(task: Task, batch_size: int, mode: FakeTensorMode, *, keeps_numbers: bool) -> Any:
    """The worst batch: made for real and then emptied of data where it is small, else made of fake tensors."""
    with unset_fake_temporarily():
        small = tensor_bytes(task.worst_batch(1)) * batch_size <= _REAL_BATCH_BYTES
        batch = task.worst_batch(batch_size) if small else None

    def emptied(tensor: Tensor) -> Tensor:
        whole = not (tensor.is_floating_point() or tensor.is_complex())
        return tensor if keeps_numbers and whole else mode.from_tensor(tensor)

    return tree_map_only(Tensor, emptied, batch) if small else task.worst_batch(batch_size)


@contextlib.contextmanager
def compilation_ignored(notes: list[Assumption]) -> Iterator[None]:
    """Leaves `torch.compile` out: compiled code plans its own memory, so what is traced is the eager step."""
    original = torch.compile

    def eager(model: Callable[..., Any] | None = None, **_: Any) -> Any:
        place = place_outside_torch(sys._getframe())  # noqa: SLF001
        where = f"{place}: " if place else ""
        text = f"{where}torch.compile: traced as eager code; compiled code fuses operators and usually takes less"
        note = Assumption(text)
        if note not in notes:
            notes.append(note)
        return (lambda function: function) if model is None else model

    torch.compile = eager
    try:
        yield
    finally:
        torch.compile = original
