"""How a task is named on a command line."""

import hashlib
from pathlib import Path

import pytest

from batchtune.errors import UsageError
from batchtune.task.spec import file_hash, names_task, split_spec, task_name


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe").mkdir()
    for name in ("model.py", "recipe/model.py", "recipe/plain"):
        (tmp_path / name).write_text("x = 1\n")
    return tmp_path


@pytest.mark.parametrize(
    ("spec", "place", "attribute"),
    [
        ("model.py", Path("model.py"), ""),
        ("model.py:Task", Path("model.py"), "Task"),
        ("recipe/model.py:make.task", Path("recipe/model.py"), "make.task"),
        ("recipe", Path("recipe/model.py"), ""),
        ("package.module", "package.module", ""),
        ("package.module:attribute", "package.module", "attribute"),
        ("model", "model", ""),
    ],
)
def test_a_task_is_a_file_or_a_module_with_an_attribute(spec, place, attribute):
    assert split_spec(spec) == (place, attribute)


@pytest.mark.parametrize("spec", ["nowhere.py", "nowhere.py:Task", "nowhere/model.py", "recipe/other.py"])
def test_a_missing_file_comes_with_the_command_that_writes_one(spec):
    with pytest.raises(UsageError, match="no such task file; 'batchtune init' writes a template"):
        split_spec(spec)


@pytest.mark.parametrize("spec", ["my-model", "a b", "3d", ":x", "pkg..module"])
def test_what_names_neither_is_explained(spec):
    with pytest.raises(UsageError, match="neither a Python file nor a module"):
        split_spec(spec)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("model.py:Task", "model"),
        ("recipe", "recipe"),
        ("recipe:make_trainer", "recipe"),
        ("recipe/model.py", "model"),
        ("package.module:attribute", "package.module"),
        ("package.other", "package.other"),
    ],
)
def test_two_modules_of_a_package_have_names_of_their_own(spec, name):
    assert task_name(spec) == name


def test_the_hash_is_of_the_file_and_changes_with_it(here):
    before = file_hash("model.py:Task")
    assert before == hashlib.sha256(b"x = 1\n").hexdigest()
    (here / "model.py").write_text("x = 2\n")
    assert file_hash("model.py") != before


def test_a_module_has_no_hash():
    assert file_hash("package.module") is None


@pytest.mark.parametrize(
    "text", ["model.py", "missing.py", "model.py:Task", "recipe", "package.module", "module:attribute"]
)
def test_what_names_a_task(text):
    assert names_task(text)


@pytest.mark.parametrize("text", ["config.yaml", "missing.yml", "config", "recipe/plain", ".", "/dev/zero"])
def test_what_names_a_configuration(text, here):
    (here / "config.yaml").write_text("task: model.py")
    assert not names_task(text)
