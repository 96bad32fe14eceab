"""The lane `cuda`: tests that need PyTorch's CUDA build on the stand-ins of tests/fake_gpu."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import fake_gpu
import pytest

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


@pytest.fixture(scope="session")
def script():
    """Run code in a fresh interpreter on the machine that FAKE_GPU names; what it prints last, as JSON, is returned."""

    def script(code, *arguments, timeout=120, **environment):
        result = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": str(Path(fake_gpu.__file__).parents[1])} | environment,
            capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr[-3000:]
        return json.loads(result.stdout.splitlines()[-1])

    return script
