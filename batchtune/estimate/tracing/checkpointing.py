"""The task as it would train with activation checkpointing, for models that do not fit without it."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from batchtune.child.training.parallel import repeated_blocks
from batchtune.task.contract import Task


class Checkpointed(Task):
    """A task whose model recomputes its repeated blocks in backward instead of keeping what is inside them."""

    def model(self) -> nn.Module:
        model = super().model()
        for block in repeated_blocks(model):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return model
