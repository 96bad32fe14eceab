"""Random numbers of torch, Python and NumPy: seeded together, and left as they were around what is not to count."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


def seed_everything(seed: int) -> None:
    """Seeds Python's and torch's random numbers, and NumPy's where it is there."""
    _seed_the_host(seed)
    torch.manual_seed(seed)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The block draws what follows from the seed on the CPU; afterwards it is as if it had drawn nothing."""
    with kept_random_numbers(torch.device("cpu")):
        seed_the_cpu(seed)
        yield


def seed_the_cpu(seed: int) -> None:
    """As `seed_everything`, without the random numbers of other devices."""
    _seed_the_host(seed)
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def kept_random_numbers(device: torch.device) -> Iterator[None]:
    """Leaves the random numbers of torch, Python and NumPy as if the block had drawn none."""
    devices = [] if device.type == "cpu" else [device]
    numpy: Any = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=devices, device_type=device.type):
            yield
    finally:
        random.setstate(python_state)
        if numpy_state is not None:
            numpy.random.set_state(numpy_state)


def _seed_the_host(seed: int) -> None:
    random.seed(seed)
    try:
        import numpy as np
    except ImportError:
        return
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the user's code may draw from the global generator
