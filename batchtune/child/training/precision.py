"""Training precision: what each name means for autocast, loss scaling and matrix units, and what a device does well."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from batchtune.errors import DeviceError

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_AMPERE, _VOLTA = 8, 7  # major compute capabilities with bf16 and with fp16 matrix units
LOSS_SCALE = 2.0**16  # torch's own to begin with; the first steps may be skipped until it is low enough


def choose(name: str, device: torch.device) -> tuple[str, str]:
    """The precision for `auto` (or the one named) and the reason for it.

    Raises:
        DeviceError: the device cannot train in the precision named.
    """
    if name != "auto":
        if name == "tf32" and device.type != "cuda":
            raise DeviceError(f"precision tf32 exists on CUDA devices only, not on {device.type}; use fp32 or bf16")
        return name, "asked for"
    if device.type == "cuda":
        if torch.version.hip is not None:
            return "bf16", "this accelerator has bf16 matrix units"
        major, minor = torch.cuda.get_device_capability(device)
        capability = f"compute capability {major}.{minor}"
        if major >= _AMPERE:
            return "bf16", f"{capability} has bf16 matrix units"
        if major >= _VOLTA:
            return "fp16", f"{capability} has fp16 matrix units and no bf16"
        return "fp32", f"{capability} has no half-precision matrix units"
    return "fp32", f"half precision is not reliably faster on {device.type}"


def every_precision(device: torch.device) -> list[str]:
    """The precisions that a device can train in."""
    return ["fp32", "tf32", "bf16", "fp16"] if device.type == "cuda" else ["fp32", "bf16", "fp16"]


class Precision:
    """How one training run computes: an autocast context, a loss scaler for fp16, and the fp32 matrix mode.

    Args:
        name: bf16, fp16, fp32 or tf32.
        device: where it computes.
        loss_scale: of fp16 to begin with.
    """

    def __init__(self, name: str, device: torch.device, loss_scale: float = LOSS_SCALE) -> None:
        self.name, self._device = name, device
        self.scaler: Any = torch.amp.GradScaler(device.type, init_scale=loss_scale, enabled=name == "fp16")
        if device.type == "cuda":
            tf32 = name == "tf32"
            torch.backends.cuda.matmul.allow_tf32 = tf32
            torch.backends.cudnn.allow_tf32 = tf32

    def autocast(self) -> AbstractContextManager[Any]:
        """The context that forward passes run in."""
        if self.name not in _AUTOCAST:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=_AUTOCAST[self.name])
