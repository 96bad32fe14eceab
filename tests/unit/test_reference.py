"""The references of commands and configuration are what the code says today, and their examples are commands."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from batchtune import errors
from batchtune.cli import app
from batchtune.config.schema import known_keys

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference(recipe):
    return recipe("reference")


def test_the_pages_are_as_the_command_line_and_the_configuration_are(reference):
    """Of commands in the words of Typer 0.29: older ones write `[OPTIONS] TASK`, and choices in brackets."""
    is_older = tuple(map(int, typer.__version__.split(".")[:2])) < (0, 29)
    for page, text in reference.pages().items():
        if is_older and page.name == "COMMANDS.md":
            continue
        assert page.read_text(encoding="utf-8") == text, "run: python recipes/reference.py"


def test_it_has_every_command_and_every_option(reference):
    written = reference.commands()
    group = typer.main.get_command(app)
    assert [name for name in group.commands if f"## `batchtune {name} " not in written] == []
    options = {each for command in group.commands.values() for option in command.params for each in option.opts}
    named = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", written))
    assert {option for option in options if option.startswith("-")} - named == set()


def test_it_has_every_exit_code(reference):
    written = re.findall(r"^\| (\d+) \| .+ \|$", reference.commands(), re.MULTILINE)
    assert written == ["0", "1", "2", "3", "4", "5", "130"]
    assert errors.BatchtuneError.exit_code == 1


def test_it_has_every_key_with_a_word_on_what_it_is_for(reference):
    rows = dict(re.findall(r"^\| `([^`]+)` \|.*\| (.*) \|$", reference.configuration(), re.MULTILINE))
    assert set(known_keys()) - set(rows) == set()
    assert [key for key, words in rows.items() if not words.strip()] == []


def test_every_example_is_a_command_that_parses(reference):
    group = typer.main.get_command(app)
    examples = re.findall(r"^batchtune (.+)$", reference.commands(), re.MULTILINE)
    assert len(examples) > len(group.commands)
    for example in examples:
        name, *arguments = shlex.split(example)
        group.commands[name].make_context(name, arguments)  # raises where an option or its value is wrong
