"""Reading a configuration: YAML, environment and command line become one checked record, or every problem at once."""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from batchtune.config.fields import is_run_name
from batchtune.config.ranks import lay_under
from batchtune.config.schema import Config, known_keys
from batchtune.config.space import meant_instead_of
from batchtune.config.yaml_values import MAX_CHARACTERS, MalformedYamlError, parse_value, parse_yaml
from batchtune.errors import UsageError

_LONGEST, _MOST_PROBLEMS = 60, 50  # characters of a value in a message, which stays a line; told at once
_MISSPELT = 0.85  # how alike a variable is to the one that was meant
_MODULE = re.compile(r"(?!.*\.py(:|$))[A-Za-z_][\w.]*(:[\w.]+)?")


def load_config(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Config:
    """Reads a YAML file, lays `BATCHTUNE_*` and then `key=value` overrides over it, and checks the whole.

    Args:
        path: the YAML file; `task` is relative to it.
        overrides: texts such as `budget.total=5m`.
        environment: where `BATCHTUNE_BUDGET_TOTAL` and the like are looked up; None: `os.environ`.

    Raises:
        UsageError: every problem at once, a line each, with file and line and the remedy.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.yaml"
    try:
        with file.open(encoding="utf-8") as stream:
            document, lines = parse_yaml(stream.read(MAX_CHARACTERS + 1))  # more would be refused, and may never end
    except OSError as error:
        remedy = "; 'batchtune init' writes one" if isinstance(error, FileNotFoundError) else ""
        raise UsageError(f"{file}: cannot be read: {error.strerror}{remedy}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file}: not a UTF-8 text file") from None
    except MalformedYamlError as error:
        raise _refused([f"{file}:{line}: {text}" for line, text in error.problems]) from None
    return _complete(document, {key: f"{file}:{line}" for key, line in lines.items()}, file, overrides, environment)


def config_of_task(
    task: str, name: str, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Config:
    """The configuration of a task of that name for which there is no file; otherwise as `load_config`."""
    return _complete({"task": task}, {}, Path(f"{name}.py"), overrides, environment)


def _complete(
    document: dict[str, object],
    origins: dict[str, str],
    file: Path,
    overrides: Sequence[str],
    environment: Mapping[str, str] | None,
) -> Config:
    """Validates; entries found wrong are taken out and the rest is checked again, so that contradictions show too.

    What is wrong then with a section that lacks an entry, or with its absence, may be so for that reason alone.
    """
    known = os.environ if environment is None else environment
    lay_under(document, known)
    names = {f"BATCHTUNE_{key.upper().replace('.', '_')}": key for key in known_keys()}
    for name in known:
        if name.startswith("BATCHTUNE_") and name not in names:
            for near in difflib.get_close_matches(name, names, n=1, cutoff=_MISSPELT):
                warnings.warn(f"the variable {name} is not read; did you mean {near}?", stacklevel=2)
    settings = [(key, text, name) for name, key in names.items() if (text := known.get(name, "").strip())]
    problems = _lay_over(document, origins, [*settings, *map(_split_override, overrides)])
    found: list[tuple[str, str]] = []
    taken: list[tuple[str, ...]] = []
    while True:
        try:
            config = Config.model_validate(document)
            break
        except ValidationError as error:
            by_key: dict[tuple[str, ...], list[ErrorDetails]] = {}
            for detail in error.errors():
                found_at = _written_keys(detail["loc"], document, missing=detail["type"] == "missing")
                by_key.setdefault(found_at, []).append(detail)
            for keys, details in by_key.items():
                if not any(each[: len(keys)] == keys for each in taken):
                    found.append((_where(keys, origins, file), _explain(details, keys)))
                _take_out(document, keys, missing=details[0]["type"] == "missing")
            taken += by_key
    if found or problems:
        lines = {where: where.removeprefix(f"{file}:") for where, _ in found}
        found.sort(key=lambda each: int(lines[each[0]]) if lines[each[0]].isdigit() else 0)  # from elsewhere: first
        raise _refused([*problems, *(f"{where}: {what}" for where, what in found)])
    task = config.task if _MODULE.fullmatch(config.task) else str((file.parent / config.task).resolve())
    return config.model_copy(update={"task": task, "name": config.name or default_name(file)})


def _split_override(text: str) -> tuple[str, str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not key.isprintable():
        raise UsageError(f"{text!r} is not of the form key=value, for example budget.total=5m")
    return key.strip(), value, "'storage=…'" if key.strip() == "storage" else f"'{text}'"


def _lay_over(document: dict[str, object], origins: dict[str, str], settings: list[tuple[str, str, str]]) -> list[str]:
    """Puts each value where its key says; returns the problems of those that are no YAML."""
    problems: list[str] = []
    for key, text, origin in settings:
        try:
            value = parse_value(text)
        except MalformedYamlError as error:
            problems.append(f"{origin}: {error.problems[0][1]}")
            continue
        *parents, leaf = key.split(".")
        section = document
        for parent in parents:
            section[parent] = section = below if isinstance(below := section.get(parent), dict) else {}
        section[leaf] = value
        for stale in [known for known in origins if known == key or known.startswith(f"{key}.")]:
            del origins[stale]  # its own, too: what is laid over stands last, as `_where` looks for it
        origins[key] = origin
    return problems


def _refused(problems: list[str]) -> UsageError:
    more = [f"… and {len(problems) - _MOST_PROBLEMS} more like these"] if len(problems) > _MOST_PROBLEMS else []
    return UsageError("\n".join(problems[:_MOST_PROBLEMS] + more))


def default_name(file: Path) -> str:
    """The config's own name, or its folder's where the file is called what every config is called."""
    stem = file.resolve().parent.name if file.stem in {"config", "batchtune"} else file.stem
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem)[:90].strip(".-_")
    return name if is_run_name(name) else f"run-{name}".rstrip("-")


def _written_keys(location: tuple[int | str, ...], document: dict[str, object], *, missing: bool) -> tuple[str, ...]:
    """The part of pydantic's location that the user wrote, or should have (it appends the names of union members)."""
    keys: list[str] = []
    at: object = document
    for part in location:
        if not isinstance(at, dict) or not (part in at or missing):
            break
        keys.append(str(part))
        at = at.get(part)
    return tuple(keys)


def _where(keys: tuple[str, ...], origins: Mapping[str, str], file: Path) -> str:
    """File and line (or the variable or argument) of a key; where it is missing, of its section.

    What is wrong with a section as a whole is told of the last key laid over it, since the file alone may be right.
    """
    below = [origin for key, origin in origins.items() if key.startswith(f"{'.'.join(keys)}.")]
    if below and not below[-1].startswith(f"{file}:"):
        return below[-1]
    candidates = (origins.get(".".join(keys[:depth])) for depth in range(len(keys), 0, -1))
    return next(filter(None, candidates), f"{file}:1")


def _take_out(document: dict[str, object], keys: tuple[str, ...], *, missing: bool) -> None:
    section = document
    for key in keys[:-1]:  # another problem may have taken it out
        section = below if isinstance(below := section.get(key), dict) else {}
    if missing:
        section[keys[-1]] = "-"
    else:
        section.pop(keys[-1], None)


def _explain(details: list[ErrorDetails], keys: tuple[str, ...]) -> str:
    dotted, detail = ".".join(keys), details[0]
    meant = meant_instead_of(keys[1]) if keys[0] == "space" and len(keys) > 1 else None
    if meant is not None or detail["type"] == "extra_forbidden":
        if "." in keys[-1]:
            section, _, leaf = keys[-1].partition(".")
            return f"unknown key '{keys[-1]}'; write a section, '{section}: {{{leaf}: ...}}'"
        return f"unknown key '{dotted}'. {_nearest_key(dotted, meant)}"
    if detail["type"] == "missing":
        return f"'{dotted}' is missing; add 'task: model.py' ('batchtune init' writes a template)"
    if detail["type"] == "model_type":
        first = next(iter(_children(dotted)), "min")  # a parameter of `space` has a name of the user's
        return f"{dotted}: should be a section of keys, for example '{keys[-1]}: {{{first}: ...}}'"
    own = [each for each in details if each["type"] == "value_error"]
    if own:  # ours say more than those of the other kinds that the value might have been
        return f"{dotted}: {own[0]['msg'].removeprefix('Value error, ')}"
    reasons, given = dict.fromkeys(each["msg"].removeprefix("Input ") for each in details), repr(detail["input"])
    return f"{dotted}: {' or '.join(reasons)}, not {given if len(given) <= _LONGEST else given[: _LONGEST - 3] + '...'}"


def _children(section: str) -> list[str]:
    return [key.rpartition(".")[2] for key in known_keys() if key.rpartition(".")[0] == section]


def _nearest_key(dotted: str, meant: str | None) -> str:
    """What an unknown key was probably meant to be, unless that is known: a key of that name, a neighbour, or any."""
    section, _, leaf = dotted.rpartition(".")
    leaves = {key.rpartition(".")[2]: key for key in known_keys()}
    near = [each for each in (meant, leaves.get(leaf)) if each]
    near += [f"{section}.{each}".lstrip(".") for each in difflib.get_close_matches(leaf, _children(section), n=1)]
    near += [leaves[each] for each in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)]
    return f"Did you mean '{near[0]}'?" if near else f"Known here: {', '.join(_children(section) or _children(''))}."
