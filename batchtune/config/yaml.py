"""YAML as people write it: `1e-5` is a number, `on` stays text, duplicate keys are errors, every key knows its line."""

from __future__ import annotations

import re
from typing import Any

import yaml

MAX_CHARACTERS = 100_000
MAX_DEPTH = 50
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL: dict[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}
_NOT_NUMBERS = {".nan": float("nan"), ".inf": float("inf"), "-.inf": float("-inf"), "+.inf": float("inf")}


class MalformedYamlError(Exception):
    """The text is no YAML, or uses what a configuration has no need of; `problems` holds (line, message) pairs."""

    def __init__(self, problems: list[tuple[int, str]]) -> None:
        super().__init__(problems)
        self.problems = problems


def parse_yaml(text: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Parses a document that is a mapping.

    Returns:
        The document, and the line (from 1) of every dotted key in it.

    Raises:
        MalformedYamlError: with every problem found.
    """
    node = _compose(text)
    lines: dict[str, int] = {}
    problems: list[tuple[int, str]] = []
    document = {} if node is None else _construct(node, "", lines, problems, set(), 0)
    if not problems and not isinstance(document, dict):
        problems.append((1, "a configuration is a mapping of keys to values, for example 'task: model.py'"))
    if problems:
        raise MalformedYamlError(problems)
    return document, lines


def parse_value(text: str) -> Any:
    """Parses one value, as it stands after `key=` on a command line.

    Raises:
        MalformedYamlError: the text is no YAML value.
    """
    node = _compose(text)
    problems: list[tuple[int, str]] = []
    value = None if node is None else _construct(node, "", {}, problems, set(), 0)
    if problems:
        raise MalformedYamlError(problems)
    return value


def _compose(text: str) -> yaml.Node | None:
    if len(text) > MAX_CHARACTERS:
        raise MalformedYamlError([(1, f"longer than {MAX_CHARACTERS:,} characters; this is no configuration")])
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        context = getattr(error, "context", None)
        message = f"not valid YAML: {what}" + (f" ({context})" if context else "")
        raise MalformedYamlError([(mark.line + 1 if mark else 1, message)]) from None
    except RecursionError:
        raise MalformedYamlError([(1, f"nested deeper than {MAX_DEPTH} levels")]) from None


def _construct(
    node: yaml.Node, at: str, lines: dict[str, int], problems: list[tuple[int, str]], seen: set[int], depth: int
) -> Any:
    line = node.start_mark.line + 1
    if depth > MAX_DEPTH:
        problems.append((line, f"nested deeper than {MAX_DEPTH} levels"))
        return None
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    if id(node) in seen:  # an alias composes to the node of its anchor
        problems.append((line, "anchors and aliases (&, *) are not supported here; write the value out"))
        return None
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        return [_construct(item, at, lines, problems, seen, depth + 1) for item in node.value]
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
        key_line = key_node.start_mark.line + 1
        dotted = f"{at}.{key}" if at else key
        if not key.isprintable():
            problems.append((key_line, f"key {key[:60]!r} has characters that cannot be shown; remove them"))
        if key in mapping:
            problems.append((key_line, f"key '{dotted}' stands twice (first in line {lines[dotted]}); remove one"))
        lines.setdefault(dotted, key_line)
        mapping[key] = _construct(value_node, dotted, lines, problems, seen, depth + 1)
    return mapping


def _scalar(node: yaml.ScalarNode) -> Any:
    text = str(node.value)
    if node.style is not None:  # quoted or a block: text
        return text
    lower = text.lower()
    if lower in _SPECIAL:
        return _SPECIAL[lower]
    if lower in _NOT_NUMBERS:
        return _NOT_NUMBERS[lower]
    if len(text) < 400 and _INTEGER.fullmatch(text):  # noqa: PLR2004 - longer is no number anybody means
        return int(text.replace("_", ""))
    return float(text.replace("_", "")) if len(text) < 400 and _FLOAT.fullmatch(text) else text  # noqa: PLR2004
