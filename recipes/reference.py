"""Writes the command reference in README.md anew from the command line itself: `python recipes/reference.py`."""

from pathlib import Path

import typer

from batchtune.cli import app
from batchtune.console import COMMON

README = Path(__file__).parents[1] / "README.md"
START, END = "<!-- reference: written by recipes/reference.py -->\n", "<!-- end of reference -->\n"
ON_EVERY_COMMAND = {each.name for each in COMMON}


def reference():
    """All commands as Markdown: what they do, examples, arguments, options."""
    group = typer.main.get_command(app)
    first, *others = group.commands.items()
    shared = _table([each for each in first[1].params if each.name in ON_EVERY_COMMAND], first[1])
    return "\n".join([*map(_command, [first, *others]), "### Options of every command\n", shared])


def _command(item):
    name, command = item
    words, _, examples = command.help.partition("\n\n\b\nExamples:\n")
    usage = " ".join(["batchtune", name, *command.collect_usage_pieces(_context(command))])
    lines = "\n".join(line.strip() for line in examples.splitlines())
    own = [each for each in command.params if each.name not in ON_EVERY_COMMAND]
    return f"### `{usage}`\n\n{' '.join(words.split())}\n\n```sh\n{lines}\n```\n\n{_table(own, command)}"


def _table(parameters, command):
    records = [each.get_help_record(_context(command)) for each in parameters]
    rows = [f"| `{_cell(what)}` | {_cell(words)} |\n" for what, words in records]
    return f"| | |\n|---|---|\n{''.join(rows)}" if rows else ""


def _context(command):
    return command.make_context(command.name, [], resilient_parsing=True)


def _cell(text):
    return " ".join(text.split()).replace("|", "\\|")


def with_reference(text):
    """The README's text with the reference between its marks as the command line is now."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{reference()}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(with_reference(README.read_text(encoding="utf-8")), encoding="utf-8")
