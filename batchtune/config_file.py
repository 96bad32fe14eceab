"""Reading a configuration: YAML, environment and command line become one checked record, or every problem at once."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from batchtune.config import Config, known_keys
from batchtune.errors import UsageError
from batchtune.yamlfile import MalformedYamlError, parse_value, parse_yaml

ENVIRONMENT_PREFIX = "BATCHTUNE_"
_MODULE = re.compile(r"(?!.*\.py(:|$))[A-Za-z_][\w.]*(:[\w.]+)?")


def load_config(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Config:
    """Reads a YAML file, lays `BATCHTUNE_*` and then `key=value` overrides over it, and checks the whole.

    Args:
        path: the YAML file; `task` and a file-like `storage` are relative to it.
        overrides: texts of the form `budget.total=5m`.
        environment: where `BATCHTUNE_BUDGET_TOTAL` and the like are looked up; default `os.environ`.

    Raises:
        UsageError: every problem at once, a line each, with file and line and the remedy.
    """
    file = Path(path)
    try:
        document, lines = parse_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        remedy = "; 'batchtune init' writes one" if isinstance(error, FileNotFoundError) else ""
        raise UsageError(f"{file}: cannot be read: {error.strerror}{remedy}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file}: not a UTF-8 text file") from None
    except MalformedYamlError as error:
        raise UsageError("\n".join(f"{file}:{line}: {text}" for line, text in error.problems)) from None
    origins: dict[str, str] = {key: f"{file}:{line}" for key, line in lines.items()}
    _lay_over(document, origins, _from_environment(os.environ if environment is None else environment))
    _lay_over(document, origins, [_split_override(text) for text in overrides])
    return _check(document, origins, file)


def _from_environment(environment: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(key, text, origin) of each variable that names a key; BATCHTUNE_BUDGET_TOTAL is budget.total."""
    names = {ENVIRONMENT_PREFIX + key.upper().replace(".", "_"): key for key in known_keys()}
    return [(key, environment[name], name) for name, key in names.items() if name in environment]


def _split_override(text: str) -> tuple[str, str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UsageError(f"{text!r} is not of the form key=value, for example budget.total=5m")
    return key.strip(), value, f"'{text}'"


def _lay_over(document: dict[str, Any], origins: dict[str, str], settings: list[tuple[str, str, str]]) -> None:
    for key, text, origin in settings:
        try:
            value = parse_value(text)
        except MalformedYamlError as error:
            raise UsageError(f"{origin}: {error.problems[0][1]}") from None
        *parents, leaf = key.split(".")
        section: dict[str, Any] = document
        for parent in parents:
            below = section.get(parent)
            section[parent] = section = below if isinstance(below, dict) else {}
        section[leaf] = value
        for stale in [known for known in origins if known.startswith(f"{key}.")]:
            del origins[stale]
        origins[key] = origin


def _check(document: dict[str, Any], origins: Mapping[str, str], file: Path) -> Config:
    """Validates; entries found wrong are taken out and the rest is checked again, so that contradictions show too."""
    problems: list[str] = []
    while True:
        try:
            config = Config.model_validate(document)
            break
        except ValidationError as error:
            by_key: dict[tuple[str, ...], list[Any]] = {}
            for detail in error.errors():
                by_key.setdefault(_written_keys(detail["loc"], document), []).append(detail)
            for keys, details in by_key.items():
                problems.append(f"{_where(keys, origins, file)}: {_explain(details, keys)}")
                _take_out(document, keys, missing=details[0]["type"] == "missing")
    if problems:
        raise UsageError("\n".join(problems))
    task = config.task if _MODULE.fullmatch(config.task) else str((file.parent / config.task).resolve())
    return config.model_copy(update={"task": task, "name": config.name or _default_name(file)})


def _default_name(file: Path) -> str:
    """The config's own name, or its folder's where the file is called what every config is called."""
    stem = file.resolve().parent.name if file.stem in {"config", "batchtune"} else file.stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-_") or "run"


def _written_keys(location: tuple[int | str, ...], document: dict[str, Any]) -> tuple[str, ...]:
    """The part of pydantic's location that the user wrote (it appends the names of union members)."""
    keys: list[str] = []
    at: Any = document
    for part in location:
        if not isinstance(at, dict):
            break
        keys.append(str(part))
        at = at.get(part)
    return tuple(keys)


def _where(keys: tuple[str, ...], origins: Mapping[str, str], file: Path) -> str:
    """File and line (or the variable or argument) of a key; where it is missing, of its section."""
    candidates = (origins.get(".".join(keys[:depth])) for depth in range(len(keys), 0, -1))
    return next(filter(None, candidates), f"{file}:1")


def _take_out(document: dict[str, Any], keys: tuple[str, ...], *, missing: bool) -> None:
    section = document
    for key in keys[:-1]:
        section = section[key]
    if missing:
        section[keys[-1]] = "-"
    else:
        del section[keys[-1]]


def _explain(details: list[Any], keys: tuple[str, ...]) -> str:
    dotted, detail = ".".join(keys), details[0]
    if detail["type"] == "extra_forbidden":
        return f"unknown key '{dotted}'. {_nearest_key(dotted)}"
    if detail["type"] == "missing":
        return f"'{dotted}' is missing; add 'task: model.py' ('batchtune init' writes a template)"
    if detail["type"] == "value_error":
        return f"{dotted}: {detail['msg'].removeprefix('Value error, ')}"
    if detail["type"] == "model_type":
        return f"{dotted}: should be a section of keys, for example '{dotted}: {{{_children(dotted)[0]}: ...}}'"
    reasons = list(dict.fromkeys(each["msg"].removeprefix("Input ").removeprefix("Value error, ") for each in details))
    return f"{dotted}: {' or '.join(reasons)}, not {detail['input']!r}"


def _children(section: str) -> list[str]:
    return [key.rpartition(".")[2] for key in known_keys() if key.rpartition(".")[0] == section]


def _nearest_key(dotted: str) -> str:
    """What an unknown key was probably meant to be: a neighbour spelled alike, or any key of that name."""
    section, _, leaf = dotted.rpartition(".")
    near = difflib.get_close_matches(leaf, _children(section), n=1)
    if near:
        return f"Did you mean '{near[0]}'?"
    leaves = {key.rpartition(".")[2]: key for key in known_keys()}
    far = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
    if far:
        return f"Did you mean '{leaves[far[0]]}'?"
    return f"Known here: {', '.join(_children(section) or _children(''))}."
