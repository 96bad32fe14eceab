"""Every command of the README runs: the set-up lines in CI letter by letter, the others here."""

import os
import re
import shlex
import subprocess
import sys
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


def run_in_order(lines, folder):
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for line in lines:
        command = [sys.executable, "-m", "batchtune", *shlex.split(line)[1:]]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}\n{done.stderr}"


@pytest.mark.timeout(600)
def test_the_commands_run_in_order(tmp_path, pool):
    folders = [line.split()[2] for line in CONSOLE if line.startswith("batchtune init ")]
    chains = {folder: [line for line in CONSOLE if re.search(rf"\b{folder}\b", line)] for folder in folders}
    assert sorted(line for chain in chains.values() for line in chain) == sorted(CONSOLE)
    assert len(chains["mymodel"]) > 6
    for done in [pool.submit(run_in_order, chain, tmp_path / folder) for folder, chain in chains.items()]:
        done.result()
    assert "## batchtune tune: mymodel" in (tmp_path / "mymodel" / "summary.md").read_text(encoding="utf-8")


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
