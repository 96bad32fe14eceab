"""The lane `unit`: no torch, and no other process, so that a thousand answers come in seconds."""

import importlib.util
import sys
from pathlib import Path

import pytest

STARTS = {"subprocess.Popen", "os.fork", "os.posix_spawn"}
_started = []
sys.addaudithook(lambda event, _: _started.append(event) if event in STARTS else None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    _started.clear()  # before the fixtures, which belong to the test as well


@pytest.fixture(autouse=True)
def _alone():
    had_torch = "torch" in sys.modules  # another lane's tests may have run in this process
    yield
    assert _started == [], "this test starts a process: it belongs to tests/process"
    assert had_torch or "torch" not in sys.modules, "this test loads torch: it belongs to tests/torch"


@pytest.fixture(scope="session")
def recipe():
    """Imports a script of recipes/ by its name."""

    def load(name):
        path = Path(__file__).parents[2] / "recipes" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
