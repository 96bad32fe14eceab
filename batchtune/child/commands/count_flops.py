"""The floating-point operations of a piece of training, as torch counts them while it runs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils import flop_counter

from batchtune.child.training.inference import Inference
from batchtune.child.training.trainer import Trainer
from batchtune.device._base import DeviceMemory
from batchtune.protocol.commands import CountFlops, Flops
from batchtune.task.contract import Task

_FORWARD: Any = flop_counter.sdpa_flop_count
_BACKWARD: Any = flop_counter.sdpa_backward_flop_count


def flops_per_sample(task: Task, memory: DeviceMemory, command: CountFlops) -> Flops:
    """Floating-point operations of one sample in forward and backward, of inference in forward alone."""
    memory.release()
    device, precision, batch = memory.device, command.precision, task.worst_batch(command.batch_size)
    if task.is_for_inference:
        inference = Inference(task, device, precision)
        flops = count_flops(lambda: inference.forward(batch))
    else:
        trainer = Trainer(task, device, precision)
        flops = count_flops(lambda: trainer.forward_backward(batch))
    return Flops(per_sample=None if flops is None else flops / command.batch_size)


def count_flops(work: Callable[[], object]) -> int | None:
    """Runs `work` once and counts its matrix products, convolutions and attention.

    Compiled models run uncompiled meanwhile: compiled kernels hide their operations.

    Returns:
        Floating-point operations (a multiplication and an addition are two); None where torch cannot count them.
    """
    compiled = "torch._dynamo" in sys.modules
    try:
        eager: Any = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
        with (
            warnings.catch_warnings(),
            eager,
            flop_counter.FlopCounterMode(display=False, custom_mapping=_more()) as counter,
        ):
            warnings.simplefilter("ignore")  # compiled modules do not like to be watched
            work()
    except Exception:  # noqa: BLE001 - a model that takes no counting, or no memory for it: not measured
        return None
    return counter.get_total_flops() or None


def _more() -> dict[Any, Any]:
    """Attention on the CPU, which torch's table lacks."""
    name = "_scaled_dot_product_flash_attention_for_cpu"
    counts = {
        name: lambda *shapes, **_: _FORWARD(*shapes[:3]),
        f"{name}_backward": lambda *shapes, **_: _BACKWARD(*shapes[:4]),
    }
    return {getattr(torch.ops.aten, each): count for each, count in counts.items() if hasattr(torch.ops.aten, each)}
