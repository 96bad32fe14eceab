"""The command reference in the README is what the command line says today, and its examples are commands."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import typer

from batchtune.cli import app

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "recipes" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_has_the_reference_as_the_command_line_is(reference):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text == reference.with_reference(text), "run: python recipes/reference.py"


def test_it_has_every_command_and_every_option(reference):
    written = reference.reference()
    group = typer.main.get_command(app)
    assert [name for name in group.commands if f"### `batchtune {name} " not in written] == []
    options = {each for command in group.commands.values() for option in command.params for each in option.opts}
    named = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", written))
    assert {option for option in options if option.startswith("-")} - named == set()


def test_every_example_is_a_command_that_parses(reference):
    group = typer.main.get_command(app)
    examples = re.findall(r"^batchtune (.+)$", reference.reference(), re.MULTILINE)
    assert len(examples) > len(group.commands)
    for example in examples:
        name, *arguments = shlex.split(example)
        group.commands[name].make_context(name, arguments)  # raises where an option or its value is wrong
