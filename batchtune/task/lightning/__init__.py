"""A LightningModule as a task, and the callback that trains with a result."""

from batchtune.task.lightning.adapter import ApplyResult, LightningTask

__all__ = ["ApplyResult", "LightningTask"]
