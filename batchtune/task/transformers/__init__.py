"""A Hugging Face Trainer or model as a task, and what applies a result there."""

from batchtune.task.transformers.applying import ApplyResult, apply_result
from batchtune.task.transformers.model import ModelTask
from batchtune.task.transformers.trainer import TrainerTask

__all__ = ["ApplyResult", "ModelTask", "TrainerTask", "apply_result"]
