"""The lane `cuda`: tests that need PyTorch's CUDA build on the stand-ins of tests/fake_gpu."""

import functools
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from fake_gpu import forks

HERE = Path(__file__).parent
LIBRARIES = Path(sysconfig.get_path("purelib"), "fake_gpu_libraries")
MISSING = "no CUDA build of torch on the stand-ins in this environment: make one with tests/fake_gpu/environment.py"


def pytest_collection_modifyitems(items):
    """Elsewhere these tests are skipped by name; in the lane itself nothing may be missing."""
    if LIBRARIES.is_dir():
        return
    if os.environ.get("FAKE_GPU_LANE") == "1":
        raise pytest.UsageError(MISSING)
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(autouse=True)
def _children_are_forks(request, monkeypatch):
    """Children need not import torch, but for those of commands and of tests that ask for `started_children`."""
    if "started_children" not in request.fixturenames:
        forks.children_are_forks(monkeypatch.setattr)


@pytest.fixture
def started_children():
    """Every child is a process of its own from its first instruction on."""


@pytest.fixture(scope="session")
def script():
    """Run code in a process of its own on the machine that FAKE_GPU names; what it prints last, as JSON, is returned.

    The one setting that torch reads at its import is that of another allocator.
    """

    def script(code, *arguments, timeout=120, **environment):
        starts = any(value.startswith("backend:") for value in environment.values())
        run = functools.partial(subprocess.run, capture_output=True, text=True) if starts else forks.run
        environment = os.environ | {"PYTHONPATH": str(forks.TESTS)} | environment
        result = run([sys.executable, "-c", code, *map(str, arguments)], env=environment, timeout=timeout)
        assert result.returncode == 0, result.stderr[-3000:]
        return json.loads(result.stdout.splitlines()[-1])

    return script
