"""The pages that users read point to what is there, and the README stays short enough to be read."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOLDERS = (".", ".github", "batchtune", "recipes", "recipes/*", "recipes/cluster/*", "tests", "tests/benchmarks")
PAGES = sorted(page for folder in FOLDERS for page in ROOT.glob(f"{folder}/*.md"))
MOST_WORDS = 1000  # of all that stands between blanks, code and tables included


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", README, flags=re.DOTALL)


def places(page):
    """What links may name after a #: its headings as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_the_readme_has_at_most_a_thousand_words():
    assert len(README.split()) <= MOST_WORDS


def test_its_model_has_twelve_lines():
    (code,) = blocks("python")
    assert len([line for line in code.splitlines() if line]) <= 12
    ast.parse(code)


def test_there_are_exactly_two_set_up_commands_each_a_single_line_with_its_own_environment():
    setup = [line for block in blocks("bash") for line in block.splitlines()]
    assert len(setup) == 2
    assert all(line.startswith("python3 -m venv .venv") for line in setup)
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "batchtune tune recipes/digits/config.yaml" in setup[0]
    assert "batchtune tune recipes/digits/config.yaml" in ci
    assert "-m pytest" in setup[1]
    assert "-m pytest" in ci


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_points_to_is_there(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in [link for link in links if "://" not in link]:
        path, _, place = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not place or place in places(target), link


def test_each_recipe_has_its_page_is_listed_and_run_by_a_test():
    recipes = ROOT / "recipes"
    tests = (ROOT / "tests" / "system" / "test_recipes.py").read_text(encoding="utf-8")
    folders = sorted(path.name for path in recipes.iterdir() if path.is_dir() and not path.name.startswith("_"))
    assert folders
    for folder in folders:
        assert (recipes / folder / "README.md").is_file()
        assert f"]({folder})" in (recipes / "README.md").read_text(encoding="utf-8")
        assert f'"{folder}"' in tests
