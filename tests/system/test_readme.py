"""Every command of the README runs: the set-up lines in CI letter by letter, the others here."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
CONSOLE = [line[2:] for kind, block in BLOCKS if kind == "console" for line in block.splitlines()]
SETUP = [line for kind, block in BLOCKS if kind == "bash" for line in block.splitlines()]


def test_there_are_exactly_two_set_up_commands_each_a_single_line_with_its_own_environment():
    assert len(SETUP) == 2
    assert all(line.startswith("python3 -m venv .venv") for line in SETUP)
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "batchtune tune recipes/digits/config.yaml" in SETUP[0]
    assert "batchtune tune recipes/digits/config.yaml" in ci
    assert "-m pytest" in SETUP[1]
    assert "-m pytest" in ci


@pytest.mark.timeout(600)
def test_the_commands_run_in_order(new_quick_cli):
    cli = new_quick_cli()
    assert sum("mymodel" in line for line in CONSOLE) > 6
    for line in CONSOLE:
        program, *arguments = shlex.split(line)
        assert program == "batchtune"
        done = cli(*arguments)
        assert done.code == 0, f"{line}\n{done.err}"
    assert "## batchtune tune: mymodel" in (cli.folder / "summary.md").read_text(encoding="utf-8")


def test_the_result_shown_in_the_readme_is_a_result_document():
    import json

    from batchtune.result import Result

    (shown,) = [block for kind, block in BLOCKS if kind == "json"]
    document = json.loads(shown.replace(', "...": "..."', "").replace('"reason": "..."', '"reason": "so"'))
    for trial in document["trials"]:
        trial |= {"precision": "bf16", "seed": 0}
    Result.model_validate(document | {"task": {"path": "model.py"}})


def test_the_files_and_headings_that_the_readme_points_to_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    places = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= places


def test_each_recipe_has_its_page_is_in_the_readme_and_run_by_a_test():
    recipes = ROOT / "recipes"
    tests = (ROOT / "tests" / "system" / "test_recipes.py").read_text(encoding="utf-8")
    folders = sorted(path.name for path in recipes.iterdir() if path.is_dir() and not path.name.startswith("_"))
    assert folders
    for folder in folders:
        assert (recipes / folder / "README.md").is_file()
        assert f"(recipes/{folder})" in (ROOT / "README.md").read_text(encoding="utf-8")
        assert f'"{folder}"' in tests
