"""A LightningModule as a task, and the callback that trains with a result."""

from batchtune.task.lightning.adapter import LightningTask
from batchtune.task.lightning.applying import ApplyResult

__all__ = ["ApplyResult", "LightningTask"]
