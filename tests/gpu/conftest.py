"""In an environment that has the stand-ins of tests/fake_gpu, these tests run on a card of theirs."""

import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ON_STAND_INS = Path(sysconfig.get_path("purelib"), "fake_gpu_libraries").is_dir()

if ON_STAND_INS:  # before the modules of this folder ask whether there is a GPU
    import tempfile

    import fake_gpu

    _file = tempfile.NamedTemporaryFile(prefix="fake-gpu-", delete=True)  # noqa: SIM115 - for the whole session
    _card = fake_gpu.Card(
        "80GiB", name="NVIDIA H100 80GB HBM3", capability=(9, 0), multiprocessors=132, context_bytes="500MiB",
        launch_seconds=5e-6, flops=4e14, full_watts=700,
    )  # fmt: skip
    fake_gpu.create(_file.name, _card)


def pytest_collection_modifyitems(items):
    """On the stand-ins, what needs silicon is skipped by name."""
    if not ON_STAND_INS:
        return
    for item in items:
        if item.path.is_relative_to(HERE) and "silicon" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a real GPU: arithmetic, times or sensors of silicon"))


@pytest.fixture(autouse=True)
def _children_are_forks(monkeypatch):
    """On the stand-ins children start without importing torch."""
    if ON_STAND_INS:
        from fake_gpu import forks

        forks.children_are_forks(monkeypatch.setattr)
