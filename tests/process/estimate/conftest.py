"""A child process that traces task files, one for all tests of a file."""

from __future__ import annotations

import textwrap

import pytest

from batchtune.estimate.commands import PROGRAM, EstimateMemory
from batchtune.processes.local import LocalLauncher
from batchtune.processes.worker import Worker

A100 = {"name": "A100", "memory_bytes": 84_974_501_888, "generation": "Ampere", "vendor": "NVIDIA"}


@pytest.fixture(scope="module", autouse=True)
def _children_are_forks(as_forks):
    with as_forks():
        yield


@pytest.fixture(scope="module")
def child(_children_are_forks):
    with Worker(None, LocalLauncher(program=PROGRAM)) as worker:
        yield worker


@pytest.fixture
def ask(child, tmp_path):
    """Estimates the task in a source text; returns the child's answer."""

    def asking(
        source,
        precision="fp32",
        *,
        accumulation_steps=1,
        gpus=(A100,),
        memory_limit=None,
        name="task",
        worker=child,
        **more,
    ):
        path = tmp_path / f"{name}.py"
        path.write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(source))
        arguments = {
            "task": str(path),
            "precision": precision,
            "accumulation_steps": accumulation_steps,
            "gpus": list(gpus),
            "memory_limit": memory_limit,
            **more,
        }
        return worker.call(EstimateMemory(**arguments), timeout=120).model_dump(exclude_none=True)

    return asking
