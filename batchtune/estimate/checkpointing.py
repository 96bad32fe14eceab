"""The task as it would train with activation checkpointing, for models that do not fit without it."""

from __future__ import annotations

from collections import Counter
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from batchtune.task.contract import Task


class Checkpointed(Task):
    """A task whose model recomputes its repeated blocks in backward instead of keeping what is inside them."""

    def model(self) -> nn.Module:
        model = super().model()
        for block in repeated_blocks(model):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return model


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that come two or more of a kind in a list or a sequence, such as a transformer's layers."""
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        kinds = Counter(type(child) for child in module.children())
        for child in module.children():
            if kinds[type(child)] > 1 and next(child.children(), None) is not None and id(child) not in inside:
                found.append(child)
                inside |= {id(each) for each in child.modules()}
    return found
