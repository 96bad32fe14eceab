"""What a Trainer of the user's own holds beside its model, such as a teacher, and where that is in training."""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

import torch
from torch import nn

from batchtune.task.adapting import real_copy

HuggingFaceTrainer: TypeAlias = Any  # Transformers is no dependency, so its types are not looked at


class Beside:
    """Modules that a Trainer of the user's own has beside its model, such as a teacher, where they are with it."""

    def __init__(self, trainer: HuggingFaceTrainer) -> None:
        self._trainer = trainer
        modules = {name: each for name, each in vars(trainer).items() if isinstance(each, nn.Module)}
        paths = {id(each): path for path, each in trainer.model.named_modules()}
        self._of_model = {name: (each, paths[id(each)]) for name, each in modules.items() if id(each) in paths}
        shared = {id(each) for each in trainer.model.parameters()}  # what wraps a part of the model is left as it is
        self._given = {
            name: each
            for name, each in modules.items()
            if name not in self._of_model
            and _device_of(each) in {None, trainer.args.device}
            and not any(id(one) in shared for one in each.parameters())
        }

    def put_back(self) -> None:
        """What was made for a model before, on its device, is let go."""
        for name, each in self._given.items():
            setattr(self._trainer, name, each)

    def leave(self) -> None:
        """Parts of the model are the given one's again."""
        for name, (each, _) in self._of_model.items():
            setattr(self._trainer, name, each)

    def follow(self, model: nn.Module) -> None:
        """Parts of the model are this one's; copies of the others are where it is, as on a script's one device."""
        for name, (_, path) in self._of_model.items():
            setattr(self._trainer, name, model.get_submodule(path))
        device = _device_of(model)
        for name, each in self._given.items():
            if device is not None and _device_of(getattr(self._trainer, name)) not in {None, device}:
                setattr(self._trainer, name, real_copy(each).to(device))


def _device_of(module: nn.Module) -> torch.device | None:
    """Where its parameters or buffers are; None without any."""
    return next((each.device for each in itertools.chain(module.parameters(), module.buffers())), None)
