"""Each command on the pages for users runs: the set-up lines in CI letter by letter, the others here."""

import json
import re
import shlex
from pathlib import Path

import pytest

from batchtune.result import Result

ROOT = Path(__file__).parents[2]


def blocks(page, kind):
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)


PAGES = [
    str(page.relative_to(ROOT))
    for page in sorted([ROOT / "README.md", *(ROOT / "recipes").rglob("README.md")])
    if "```console\n" in page.read_text(encoding="utf-8")
]


def test_the_readme_and_the_recipes_have_commands_that_can_be_tried():
    assert {"README.md", "recipes/README.md", "recipes/cluster/README.md"} <= set(PAGES)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_run_in_order(page, new_quick_cli):
    cli = new_quick_cli()
    config = (cli.folder / "config.yaml").read_text(encoding="utf-8")
    if "cluster" in page:  # four ranks on two processors have to learn something in it
        cli.write("config.yaml", config.replace("run: 300ms", "run: 1s"))
    for code in blocks(page, "python") if page == "README.md" else []:
        (cli.folder / "model.py").write_text(code, encoding="utf-8")
    for line in (line for block in blocks(page, "console") for line in block.splitlines()):
        prompt, program, *arguments = shlex.split(line)
        assert (prompt, program) == ("$", "batchtune")
        done = cli(*arguments)
        assert done.code == 0, f"{line}\n{done.err}"


def test_the_result_that_is_shown_is_a_result_document():
    (shown,) = blocks("recipes/README.md", "json")
    document = json.loads(shown.replace(', "...": "..."', "").replace('"reason": "..."', '"reason": "so"'))
    for trial in document["trials"]:
        trial |= {"precision": "bf16", "seed": 0}
    Result.model_validate(document | {"task": {"path": "model.py"}})
