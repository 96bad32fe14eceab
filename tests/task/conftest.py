"""What the tests of the user's code share: files of theirs, imported and forgotten again."""

import json
import sys

import pytest

from batchtune.task.load import load_task


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch, tmp_path):
    """What a task adds to this process's imports goes away again."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")) or name == "batchtune_task":
            del sys.modules[name]


@pytest.fixture
def load(tmp_path):
    def from_text(text: str | bytes, attribute: str = "", name: str = "my_task.py"):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_task(f"{name}:{attribute}" if attribute else name)

    return from_text


@pytest.fixture
def result_file(tmp_path):
    """Writes a result of `tune` that recommends 5 × 2 samples at a learning rate of 0.02, or something else."""

    def written(kind="tune", recommendation=(), **changed):
        found = {
            "micro_batch_size": 5,
            "gradient_accumulation_steps": 2,
            "global_batch_size": 10,
            "learning_rate": 0.02,
            "precision": "fp32",
            "reason": "so",
        }
        document = {"schema": "batchtune.result/1", "kind": kind, "status": "complete", "task": {"path": "m.py"}}
        document["recommendation"] = None if recommendation is None else found | changed
        path = tmp_path / "result.json"
        path.write_text(json.dumps(document))
        return path

    return written
