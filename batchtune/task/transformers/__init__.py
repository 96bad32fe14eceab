"""A Hugging Face Trainer or model as a task, and what applies a result there."""

from batchtune.task.transformers.adapter import ModelTask, TrainerTask
from batchtune.task.transformers.callback import ApplyResult, apply_result

__all__ = ["ApplyResult", "ModelTask", "TrainerTask", "apply_result"]
