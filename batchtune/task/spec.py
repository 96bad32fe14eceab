"""How a task is named on a command line: a file or a module, and an attribute in it. Imports none of it."""

from __future__ import annotations

import ast
import hashlib
import os
import warnings
from pathlib import Path

from batchtune.errors import UsageError, kind_of

TEMPLATE = "batchtune_task.py"  # what `batchtune init` writes: a name that hides no module of the user's
_FILES = (TEMPLATE, "model.py")  # that a folder may stand for
_YAML = {".yaml", ".yml"}
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def spec_of(task: object) -> str:
    """A task as a function of the library is given it, as a text; UsageError for what names none."""
    if not isinstance(task, str | os.PathLike):
        raise UsageError(f"the task is {kind_of(task)}; it must be a path or a text such as 'model.py:attribute'")
    if not (spec := os.fspath(task)):  # a variable of the shell that is not set
        raise UsageError("the task is empty; use model.py, path.py:name or pkg.module:name")
    return spec


def split_spec(spec: str) -> tuple[Path | str, str]:
    """A task's file or module, and the attribute in it ('' for the module itself); UsageError where it is neither."""
    try:
        return _split(spec)
    except OSError as error:
        raise UsageError(f"{spec[:100]}: cannot be looked up: {error.strerror}") from None


def _split(spec: str) -> tuple[Path | str, str]:
    place, _, attribute = spec.rpartition(":")
    if not place or "/" in attribute or "\\" in attribute:  # no colon, or that of a Windows drive
        place, attribute = spec, ""
    if Path(place).suffix in _YAML:
        raise UsageError(
            f"{place}: a configuration, and no task: run 'batchtune tune {place}', or name its task's file"
        )
    if not place.endswith(".py") and "/" not in place and not Path(place).exists():
        if all(part.isidentifier() for part in place.split(".")):
            return place, attribute
        raise UsageError(f"{spec!r}: neither a Python file nor a module; use model.py, path.py:name or pkg.module:name")
    path = Path(place)
    if path.is_dir():
        path = next((path / name for name in _FILES if (path / name).is_file()), path)
    if not path.is_file():
        raise UsageError(f"{place}: no such task file; 'batchtune init' writes a template")
    return path, attribute


def names_task(text: str) -> bool:
    """Whether a text names a task, and not a configuration's file or a folder with one in it."""
    place, attribute = Path(text.rpartition(":")[0] or text), text.rpartition(":")[2]
    if Path(text).is_dir():
        return not (Path(text) / "config.yaml").exists() and any((Path(text) / each).is_file() for each in _FILES)
    if place.suffix == ".py" or Path(text).exists():
        return place.suffix == ".py"
    is_module = all(part.isidentifier() for part in str(place).split("."))
    return is_module and place.suffix not in _YAML and ("." in str(place) or attribute != text)


def task_name(spec: str) -> str:
    """What a task is called: as its file without the ending, as its folder, or as its module with all its dots."""
    place, attribute = split_spec(spec)
    if isinstance(place, str):
        return place
    folder = Path(spec.removesuffix(f":{attribute}") if attribute else spec)
    return folder.resolve().name if folder.is_dir() else place.stem


def file_hash(spec: str) -> str | None:
    """SHA-256 of the task's file, in hex; None for a module that is found by name; UsageError if it cannot be read."""
    place, _ = split_spec(spec)
    try:
        return hashlib.sha256(place.read_bytes()).hexdigest() if isinstance(place, Path) else None
    except OSError as error:
        raise UsageError(f"{place}: cannot be read: {error.strerror}") from None


def code_hashes(spec: str) -> list[str] | None:
    """By which a task's code is known again: of its file, and of what that says without comments and docstrings.

    None for a module that is found by name; UsageError if the file cannot be read.
    """
    place, whole = split_spec(spec)[0], file_hash(spec)
    if whole is None:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # whoever imports it hears them
            tree = ast.parse(Path(place).read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
                del node.body[0]
        said = ast.dump(tree).encode("utf-8", "surrogatepass")
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # its import tells
        return [whole]
    return [whole, hashlib.sha256(said).hexdigest()]
