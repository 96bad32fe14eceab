"""The user's own training step on fake CUDA tensors: what is traced is what `batchtune.child` trains."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from batchtune.child.evaluate import Inference
from batchtune.child.ranks.parallel import repeated_blocks
from batchtune.child.trainer import Trainer
from batchtune.estimate.commands import Tracing
from batchtune.estimate.memory.events import Assumption, Trace, Work, distributed, normalized
from batchtune.estimate.tracing.fake_cuda import (
    chosen_at_import,
    compilation_ignored,
    fake_cuda,
    precisions_supported,
    taken_to_be_cuda,
)
from batchtune.estimate.tracing.recorder import Recorder
from batchtune.estimate.tracing.without_data import CannotTraceError, StepFailedError, naming_the_line
from batchtune.task.contract import Task
from batchtune.task.load import load_task
from batchtune.task.samples import tensor_bytes, unseen_warnings
from batchtune.vocabulary import Length

_WITH_FAST_PATH = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
_FAST_PATH = Assumption(
    "encoder layers and attention without torch's fast path for inference in fp32, which needed a quarter less",
    depends_on_data=True,
)
_STEPS = 2  # the optimizer's states exist from the first step on; the second is every later one
_REAL_BATCH_BYTES = 256 << 20  # a batch up to this size is made for real: make_batch may read files or use NumPy


class Checkpointed(Task):
    """A task whose model recomputes its repeated blocks in backward instead of keeping what is inside them."""

    def model(self, activation_checkpointing: bool | None = None) -> nn.Module:
        model = super().model(activation_checkpointing)
        for block in repeated_blocks(model):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return model


class Tracer:
    """Traces one task at any batch size, keeping what all traces had in common.

    Attributes:
        warnings: of what may be larger than the worst batch that was found.
        notes: what the traces had to assume.
        ops: the operators of the step.
        lengths: that batches can be made of; None: they are all made alike.
    """

    def __init__(self, asked: Tracing) -> None:
        self.notes: list[Assumption] = []
        self.ops: set[str] = set()
        self._asked = asked
        self._reads_batch = False
        self._chosen: list[tuple[ModuleType, str]] = []
        if asked.world_size > 1:
            text = f"{asked.strategy} on {asked.world_size} GPUs: by formulas; NCCL's own buffers are not in them"
            text += ", nor what your code gathers from other ranks"
            self.notes.append(Assumption(text))
        with compilation_ignored(self.notes), precisions_supported():
            self._task = load_task(asked.task)
        if asked.checkpointing:
            self._task = Checkpointed(self._task.source, self._task.where)
        self._task.require("inference" if asked.inference else "probe")
        self._task.find_lengths(asked.lengths, asked.lengths_seen)
        if self._task.adapted:
            self.notes += [Assumption(text) for text in self._task.adapted.notes]
        self.lengths = self._task.lengths
        self.warnings = unseen_warnings(self._task.find_worst_samples(asked.samples))

    def too_few(self, batch_size: int) -> tuple[str, int] | None:
        """What has fewer samples than a batch of such a size, and how many: no batch of training is larger.

        None where there are as many, or nobody can tell.
        """
        task, loads = self._task, self._task.has("train_loader")
        if self._asked.inference or task.has("make_batch"):
            return None
        samples = task.most_in_epoch(batch_size) if loads else task.train_size()
        name = "an epoch of train_loader" if loads else "train_dataset"
        return (name, samples) if samples is not None and samples < batch_size else None

    def padding(self) -> list[Assumption]:
        """What is assumed of batches that are padded to their longest sample: that each is as long as the longest.

        Shorter ones cut memory up: probes found up to a quarter less, between lengths of buckets up to a third.
        """
        known = self.lengths
        differ = len(known.groups) > len(known.edges) if known else self._task.batches_differ()
        if self._asked.inference or not differ:
            return []
        text = "samples differ in size: batches padded to their own longest one cut memory up, so that less may train"
        return [Assumption(text, depends_on_data=True)]

    def trace(self, batch_size: int, length: Length | None = None) -> Trace:
        """The step at one micro-batch size; see `trace_step`.

        Where it mixes devices, once more with those that the user's code chose at import, when no GPU was to be seen.
        """
        with compilation_ignored(self.notes):
            try:
                trace = self._traced(batch_size, length)
            except StepFailedError as failed:
                self._chosen = chosen_at_import() if failed.on_two_devices and not self._chosen else []
                if not self._chosen:
                    raise
                try:
                    trace = self._traced(batch_size, length)
                except (CannotTraceError, StepFailedError):
                    self._chosen = []
                    raise failed from None
                names = sorted({f"{module.__name__}.{name}" for module, name in self._chosen})
                self.notes.append(Assumption(f"{', '.join(names)}: taken to be cuda, as where there is a GPU"))
        if self._asked.world_size > 1:
            trace = distributed(trace, self._asked.strategy, self._asked.world_size)
        self.ops |= trace.ops
        self.notes += [note for note in trace.notes if note not in self.notes]
        return trace

    def _traced(self, batch_size: int, length: Length | None) -> Trace:
        """With the batch's whole numbers known, from where on a step fails on what was assumed of them."""
        known = partial(trace_step, self._task, batch_size, self._asked.precision, self._asked.accumulation_steps)
        if not self._reads_batch:
            try:
                return known(length=length, chosen=self._chosen)
            except CannotTraceError as refusal:
                if not refusal.after_assuming:
                    raise
        trace = known(length=length, chosen=self._chosen, reads_batch=True)
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
    length: Length | None = None,
    reads_batch: bool = False,
    chosen: Sequence[tuple[ModuleType, str]] = (),
) -> Trace:
    """Two optimizer steps at one micro-batch size, recorded.

    Args:
        task: the user's code.
        batch_size: micro-batch size, samples.
        precision: bf16, fp16, fp32 or tf32.
        accumulation_steps: micro-batches per optimizer step; beyond two they allocate nothing new.
        device: `cpu` traces what the CPU would allocate.
        length: of the inputs; None: of the longest.
        reads_batch: whether the values of whole numbers in the batch are known.
        chosen: names of the user's code that hold cuda while the step is traced, and not while its batch is made.

    Raises:
        CannotTraceError: the step needs data.
        StepFailedError: it fails with data, too.
        DeviceError: this build of torch cannot trace.
    """
    gc.collect()
    gc.disable()  # a collection in the middle would free storages at a random place
    trace = Trace(batch_size)
    try:
        with naming_the_line(trace, precision), fake_cuda() as mode:
            batch = _fake_batch(partial(task.worst_batch, length=length), batch_size, mode, keeps_numbers=reads_batch)
            with taken_to_be_cuda(chosen):
                _record(trace, Recorder(trace, device), task, batch, precision, min(accumulation_steps, _STEPS))
            return normalized(trace)
    finally:
        gc.enable()


def _record(trace: Trace, recorder: Recorder, task: Task, batch: object, precision: str, micro_batches: int) -> None:
    device = torch.device("cuda", 0) if recorder.device_type == "cuda" else torch.device(recorder.device_type)

    def array(tensor: Tensor, **force: bool) -> object:  # a method of tensors, not of the values
        return recorder.values.array(tensor, **force)

    with recorder, mock.patch.object(Tensor, "numpy", array):
        recorder.holds(batch)
        trainer = (Inference if task.is_for_inference else Trainer)(task, device, precision)
        roles = _Roles(recorder)
        for metric in [each for each in trainer.model.modules() if getattr(each, "validate_args", None) is True]:
            vars(metric).update(validate_args=False)  # torchmetrics' look at values, of which there are none
        trace.units = unit_bytes(trainer.model)
        if task.is_for_inference and any(isinstance(each, _WITH_FAST_PATH) for each in trainer.model.modules()):
            trace.notes.append(_FAST_PATH)
        if task.has("train_step") and isinstance(trainer, Trainer):
            _note_steps(trainer, recorder)
        with recorder.naming(trainer.model):
            for step in range(1, _STEPS + 1):
                trace.work = Work()
                recorder.moment = f"forward {step}"
                if isinstance(trainer, Inference):
                    trainer.forward(batch)
                    continue
                for _ in range(micro_batches):
                    recorder.moment = f"forward {step}"
                    trainer.forward_backward(batch, micro_batches)
                    roles.backward_done(trainer)
                recorder.moment = f"optimizer {step}"
                trainer.update(free_late=step == 1)  # in turn, as an attempt does
                trainer.step_the_others()
                roles.updated()
        roles.finish(trace)
        recorder.forget()


def unit_bytes(model: nn.Module) -> list[list[int]]:
    """Bytes of each parameter by unit of sharding: what belongs to no repeated block first, then block by block."""
    seen: set[int] = set()

    def of(module: nn.Module) -> list[int]:
        new = [each for each in module.parameters() if id(each) not in seen]
        seen.update(map(id, new))
        return [each.numel() * each.element_size() for each in new]

    blocks = [of(block) for block in repeated_blocks(model)]
    return [of(model), *blocks]


def _note_steps(trainer: Trainer, recorder: Recorder) -> None:
    """Tells the optimizers' steps from the rest of a step of the user's own."""

    def before(*_: object) -> None:
        recorder.moment = recorder.moment.replace("forward", "optimizer")

    def after(*_: object) -> None:
        recorder.moment = recorder.moment.replace("optimizer", "forward")

    for optimizer in trainer.optimizers:
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)


class _Roles:
    """Which storages are parameters, gradients, optimizer states and activations.

    Parameters are all that is there before the first step: the model, and copies of it such as an EMA's.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._parameters, self._gradients, self._states = recorder.live(), set[int](), set[int]()

    def backward_done(self, trainer: Trainer) -> None:
        """The parameters' gradients."""
        parameters = (*trainer.optimizers.parameters, *trainer.model.parameters())
        numbers = (self._recorder.number_of(each.grad) for each in parameters if each.grad is not None)
        self._gradients |= {number for number in numbers if number is not None}

    def updated(self) -> None:
        """What the update made and outlives it: the optimizer's states. The last batch and loss live on as well."""
        births = self._recorder.trace.births
        self._states |= {each for each in self._recorder.live() if births[each].moment.startswith("optimizer")}

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
        roles = {"activations": kept, "optimizer_states": self._states, "gradients": self._gradients}
        for category, numbers in (roles | {"parameters": self._parameters}).items():  # the last that claims it has it
            for number in numbers:
                trace.births[number].category = category


def _fake_batch(
    worst_batch: Callable[[int], object], batch_size: int, mode: FakeTensorMode, *, keeps_numbers: bool
) -> object:
    """The worst batch: made for real and then emptied of data where it is small, else made of fake tensors."""
    with unset_fake_temporarily():
        small = tensor_bytes(worst_batch(1)) * batch_size <= _REAL_BATCH_BYTES
        batch = worst_batch(batch_size) if small else None

    def emptied(tensor: Tensor) -> Tensor:
        whole = not (tensor.is_floating_point() or tensor.is_complex())
        return tensor if keeps_numbers and whole else mode.from_tensor(tensor)

    return tree_map_only(Tensor, emptied, batch) if small else worst_batch(batch_size)
