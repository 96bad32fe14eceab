"""YAML as people write it: `1e-5` is a number, `on` stays text, a key that stands twice is an error."""

from __future__ import annotations

import re

import yaml

MAX_CHARACTERS, MAX_DEPTH, _LONGEST_NUMBER = 100_000, 50, 400  # a longer number is none that anybody means
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_CONSTANTS: dict[str, bool | float | None] = {"": None, "~": None, "null": None, "true": True, "false": False} | {
    word: float(word.replace(".", "")) for word in (".nan", ".inf", "-.inf", "+.inf")
}


class MalformedYamlError(Exception):
    """The text is no YAML, or uses what a configuration has no need of; `problems` holds (line, message) pairs."""

    def __init__(self, *problems: tuple[int, str]) -> None:
        super().__init__(problems)
        self.problems = problems


def parse_yaml(text: str) -> tuple[dict[str, object], dict[str, int]]:
    """A document that is a mapping, and the line (from 1) of every dotted key in it.

    Raises:
        MalformedYamlError: with every problem found.
    """
    found, lines = _parse(text)
    document = found or {}
    if not isinstance(document, dict):
        raise MalformedYamlError((1, "a configuration is a mapping of keys to values, for example 'task: model.py'"))
    return document, lines


def parse_value(text: str) -> object:
    """One value, as it stands after `key=` on a command line; refused as `parse_yaml` refuses."""
    return _parse(text)[0]


def _parse(text: str) -> tuple[object, dict[str, int]]:
    if len(text) > MAX_CHARACTERS:
        raise MalformedYamlError((1, f"longer than {MAX_CHARACTERS:,} characters; this is no configuration"))
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        context = getattr(error, "context", None)
        message = f"not valid YAML: {what}" + (f" ({context})" if context else "")
        raise MalformedYamlError((mark.line + 1 if mark else 1, message)) from None
    except RecursionError:
        raise MalformedYamlError((1, f"nested deeper than {MAX_DEPTH} levels")) from None
    values = _Values()
    found = None if node is None else values.of(node)
    if values.problems:
        raise MalformedYamlError(*values.problems)
    return found, values.lines


class _Values:
    """Makes values of YAML's nodes; keeps the line of each key, and every problem with its line."""

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self.problems: list[tuple[int, str]] = []
        self._seen: set[int] = set()

    def of(self, node: yaml.Node, at: str = "", depth: int = 0) -> object:
        """What a node stands for, at a dotted key."""
        line = node.start_mark.line + 1
        if depth > MAX_DEPTH:
            self.problems.append((line, f"nested deeper than {MAX_DEPTH} levels"))
            return None
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        if id(node) in self._seen:  # an alias composes to the node of its anchor
            self.problems.append((line, "anchors and aliases (&, *) are not supported here; write the value out"))
            return None
        self._seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            return [self.of(item, at, depth + 1) for item in node.value]
        mapping: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
            line, dotted = key_node.start_mark.line + 1, f"{at}.{key}" if at else key
            if not key.isprintable():
                self.problems.append((line, f"key {key[:60]!r} has characters that cannot be shown; remove them"))
            if key in mapping:
                first = self.lines[dotted]
                self.problems.append((line, f"key '{dotted}' stands twice (first in line {first}); remove one"))
            self.lines.setdefault(dotted, line)
            mapping[key] = self.of(value_node, dotted, depth + 1)
        return mapping


def _scalar(node: yaml.ScalarNode) -> bool | float | str | None:
    text = str(node.value)
    if node.style is not None or len(text) >= _LONGEST_NUMBER:  # quoted or a block: text
        return text
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text.replace("_", ""))
    return float(text.replace("_", "")) if _FLOAT.fullmatch(text) else text
