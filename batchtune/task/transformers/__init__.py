"""A Hugging Face Trainer or model as a task, and what applies a result there."""

from batchtune.task.transformers.model import ModelTask
from batchtune.task.transformers.trainer import ApplyResult, TrainerTask, apply_result

__all__ = ["ApplyResult", "ModelTask", "TrainerTask", "apply_result"]
