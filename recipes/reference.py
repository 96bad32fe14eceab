"""Writes the references anew from what they describe: `python recipes/reference.py`.

`batchtune/COMMANDS.md` comes from the command line, `batchtune/CONFIGURATION.md` from the configuration's schema.
"""

import json
from pathlib import Path

import typer

from batchtune import errors
from batchtune.cli import app
from batchtune.config.schema import config_schema
from batchtune.console import COMMON

PACKAGE = Path(__file__).parents[1] / "batchtune"
WRITTEN = "<!-- written by recipes/reference.py -->"
ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__base__ is errors.BatchtuneError]
ON_EVERY_COMMAND = {each.name for each in COMMON}
HEAD = "| | |\n|---|---|\n"
UNBOUNDED = 2**31  # what no count exceeds
PRECEDENCE = """\
The keys of `config.yaml`, and of `key=value` on the command line of `batchtune tune`. A `key=value` goes before a flag
(`--budget 5m`), that before the environment (`BATCHTUNE_BUDGET_TOTAL=5m`), that before the file, that before the
default. Unknown keys are errors.

| key | value | default | |
|---|---|---|---|"""


def commands():
    """All commands as Markdown: what they do, examples, arguments, options, exit codes."""
    group = typer.main.get_command(app)
    first, *others = group.commands.items()
    shared = _options([each for each in first[1].params if each.name in ON_EVERY_COMMAND], first[1])
    parts = [f"# Commands\n\n{WRITTEN}\n", *map(_command, [first, *others])]
    return "\n".join([*parts, "## Options of every command\n", shared, "## Exit codes\n", _exit_codes()])


def _command(item):
    name, command = item
    words, _, examples = command.help.partition("\n\n\b\nExamples:\n")
    usage = " ".join(["batchtune", name, *command.collect_usage_pieces(_context(command))])
    lines = "\n".join(line.strip() for line in examples.splitlines())
    own = [each for each in command.params if each.name not in ON_EVERY_COMMAND]
    return f"## `{usage}`\n\n{' '.join(words.split())}\n\n```sh\n{lines}\n```\n\n{_options(own, command)}"


def _options(parameters, command):
    records = [each.get_help_record(_context(command)) for each in parameters]
    rows = [f"| `{_cell(what)}` | {_cell(words)} |\n" for what, words in records]
    return f"{HEAD}{''.join(rows)}" if rows else ""


def _exit_codes():
    rows = [f"| {kind.exit_code} | {_cell(kind.__doc__.partition(chr(10))[0])} |\n" for kind in ERRORS]
    return (
        f"{HEAD}| 0 | Done. |\n| 1 | A bug in batchtune; of `report --against`, something is worse. |\n{''.join(rows)}"
    )


def _context(command):
    return command.make_context(command.name, [], resilient_parsing=True)


def configuration():
    """All keys of the configuration as Markdown: what they may be, their defaults, what they are for."""
    schema = config_schema()
    return f"# Configuration\n\n{WRITTEN}\n\n{PRECEDENCE}\n{''.join(_keys(schema, '', schema['$defs']))}"


def _keys(section, prefix, sections):
    """The rows of a section's keys and those below them; what several keys may hold is described with the first."""
    for name, key in section["properties"].items():
        inner, within = sections.pop(_reference(key), None), f"{prefix}{name}"
        words = _cell(key.get("description") or inner["description"])
        default = "required" if name in section.get("required", ()) else f"`{json.dumps(key.get('default'))}`"
        value = _value(key)
        yield f"| `{within}` | {value} | {default if value else ''} | {words} |\n"
        if inner is not None:
            yield from _keys(inner, f"{within}.{'<argument>.' if 'additionalProperties' in key else ''}", sections)


def _reference(key):
    """The name of the section that a key holds, be it one of several things that it may hold."""
    held = [key, *key.get("anyOf", ()), key.get("additionalProperties", {})]
    return next((each["$ref"].rpartition("/")[2] for each in held if "$ref" in each), None)


def _value(key):
    """What a key may be, in words, from its schema; nothing: a section."""
    if "anyOf" in key:
        each = [_value(one) or "a mapping" for one in key["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(each))
    if "enum" in key or "const" in key:
        return ", ".join(f"`{one}`" for one in key.get("enum", [key.get("const")]))
    if "examples" in key:
        return f"text such as {', '.join(f'`{one}`' for one in key['examples'])}"
    if key.get("type") == "array":
        return f"a list of {_value(key['items'])}"
    bounds = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "up to", "exclusiveMaximum": "below"}
    said = [f"{word} {key[name]:g}" for name, word in bounds.items() if abs(key.get(name, UNBOUNDED)) < UNBOUNDED]
    kind = {"integer": "whole number", "boolean": "`true` or `false`", "string": "text", "object": "a mapping"}
    return " ".join([kind.get(key.get("type"), key.get("type", "")), *said])


def _cell(text):
    return " ".join(text.split()).replace("|", "\\|")


def pages():
    """The text of each page by its place."""
    return {PACKAGE / "COMMANDS.md": commands(), PACKAGE / "CONFIGURATION.md": configuration()}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
