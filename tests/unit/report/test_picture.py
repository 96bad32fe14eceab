"""The command that draws the README's picture draws any result as a terminal shows it."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import documents
import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def picture(recipe):
    return recipe("picture")


def words_of(svg):
    return " ".join("".join(ET.parse(svg).getroot().itertext()).replace("\xa0", " ").split())


def test_a_result_is_drawn_as_a_terminal_shows_it(picture, tmp_path, monkeypatch):
    (tmp_path / "result.json").write_text(documents.result("tune").to_json())
    monkeypatch.setattr(sys, "argv", ["picture.py", str(tmp_path / "result.json"), str(tmp_path / "drawn.svg")])
    picture.main()
    assert "digits" in words_of(tmp_path / "drawn.svg")


def test_the_readme_shows_one_picture_and_says_which_command_drew_it():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", readme)
    assert f"`python recipes/picture.py .batchtune/charlm {shown}`" in " ".join(readme.split())
    assert "time to target" in words_of(ROOT / shown)
    assert (ROOT / shown).stat().st_size < 100_000
