"""The floating-point operations of a piece of training, as torch counts them while it runs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


def count_flops(work: Callable[[], object]) -> int | None:
    """Runs `work` once and counts its matrix products, convolutions and attention.

    Compiled models run uncompiled meanwhile: compiled kernels hide their operations.

    Returns:
        Floating-point operations (a multiplication and an addition are two); None where torch cannot count them.
    """
    compiled = "torch._dynamo" in sys.modules
    compiled = "torch._dynamo" in sys.modules
    try:
        eager: Any = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
        with warnings.catch_warnings(), eager, FlopCounterMode(display=False, custom_mapping=_more()) as counter:
            warnings.simplefilter("ignore")  # compiled modules do not like to be watched
            work()
    except Exception:  # noqa: BLE001 - a model that takes no counting, or no memory for it: not measured
        return None
    return counter.get_total_flops() or None


def _more() -> dict[Any, Any]:
    """Attention on the CPU, which torch's table lacks."""
    names = {
        "_scaled_dot_product_flash_attention_for_cpu": lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
        "_scaled_dot_product_flash_attention_for_cpu_backward": lambda *shapes, **_: sdpa_backward_flop_count(
            *shapes[:4]
        ),
    }
    return {getattr(torch.ops.aten, name): count for name, count in names.items() if hasattr(torch.ops.aten, name)}
