"""A LightningModule as a task, and a callback that applies a result in Lightning."""

from batchtune.task.lightning.adapter import LightningTask
from batchtune.task.lightning.callback import ApplyResult

__all__ = ["ApplyResult", "LightningTask"]
