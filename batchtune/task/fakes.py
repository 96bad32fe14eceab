"""Modules whose tensors are fake ones: how they are moved and cast, which torch does to real ones alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def modules_of_fakes() -> Iterator[None]:
    """Within, `module.to(...)`, `.half()` and their like work on modules of fake tensors."""
    original = nn.Module._apply  # noqa: SLF001
    nn.Module._apply = apply_to_fakes  # type: ignore[method-assign] # noqa: SLF001
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign] # noqa: SLF001


def apply_to_fakes(
    module: nn.Module,
    convert: Callable[[Tensor], Tensor],
    recurse: bool = True,
    converted: dict[int, tuple[nn.Parameter, nn.Parameter]] | None = None,
) -> nn.Module:
    """`nn.Module._apply`, which cannot swap fake tensors in place, by new parameters; tied ones stay tied."""
    converted = {} if converted is None else converted
    for child in module.children() if recurse else ():
        apply_to_fakes(child, convert, converted=converted)
    for name, parameter in module._parameters.items():  # noqa: SLF001
        if parameter is None:
            continue
        if id(parameter) not in converted:
            with torch.no_grad():
                moved = convert(parameter)
            same = moved is parameter
            converted[id(parameter)] = (parameter, parameter if same else _as_parameter(moved, parameter))
        module._parameters[name] = converted[id(parameter)][1]  # noqa: SLF001
    for name, buffer in module._buffers.items():  # noqa: SLF001
        if buffer is not None:
            module._buffers[name] = convert(buffer)  # noqa: SLF001
    return module


def _as_parameter(moved: Tensor, original: nn.Parameter) -> nn.Parameter:
    parameter = nn.Parameter(moved, original.requires_grad)
    for name, value in vars(original).items():  # marks such as `no_weight_decay` that build_optimizer reads
        if not hasattr(parameter, name):
            setattr(parameter, name, value)
    return parameter
