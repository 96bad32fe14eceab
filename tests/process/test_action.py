"""The GitHub Action: its shell steps, run in order as a runner would; `gh` and `pip` only take notes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fixtures.tasks import ONES

ROOT = Path(__file__).parents[2]
ACTION = ROOT / ".github" / "actions" / "batchtune"
DECLARED = yaml.safe_load((ACTION / "action.yml").read_text(encoding="utf-8"))
NOTES = """#!{python}
import json, os, sys
name = os.path.basename(sys.argv[0])
page = [word for word in sys.argv if word.endswith("batchtune.md")]
text = open(page[0].removeprefix("body=@"), encoding="utf-8").read() if page else ""
with open(os.environ["NOTES"], "a") as notes:
    notes.write(json.dumps([name, *sys.argv[1:], text]) + "\\n")
if "--jq" in sys.argv:
    print(os.environ["COMMENTS"])
sys.exit(int(os.environ["GH_CODE"]))
"""
PYTHON = """#!/bin/sh
if [ "$2" = pip ]; then printf '%s\\n' "$*" >>"$PIP"; exit; fi
if [ "$1" = -c ]; then exit "$NO_TORCH"; fi
exec {python} "$@"
"""


class Runner:
    """What GitHub does with a composite action, as far as this one needs it."""

    def __init__(self, folder, **inputs):
        self.folder, self.outputs, self.log = folder, {}, ""
        declared = {name: str(each.get("default", "")) for name, each in DECLARED["inputs"].items()}
        self.names = {f"inputs.{name}": value for name, value in (declared | inputs).items()}
        self.names |= {"github.event_name": "pull_request", "github.event.pull_request.number": "7"}
        self.names |= {"github.token": "secret"}
        tools = folder / "bin"
        tools.mkdir(exist_ok=True)
        for name, text in {"gh": NOTES, "python": PYTHON, "nvidia-smi": "#!/bin/sh\nexit ${NO_GPU}\n"}.items():
            (tools / name).write_text(text.replace("{python}", sys.executable))
            (tools / name).chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "GITHUB_ACTION_PATH": str(ACTION),
            "GITHUB_REPOSITORY": "someone/theirs",
            "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
            "RUNNER_TEMP": str(folder),
            "NOTES": str(folder / "notes"),
            "PIP": str(folder / "pip"),
            "COMMENTS": "",
            "GH_CODE": "0",
            "NO_TORCH": "1",
            "NO_GPU": "9",
        }

    def text(self, value):
        """A value of the action with its expressions filled in."""
        return re.sub(r"\$\{\{ ([\w.-]+) \}\}", lambda found: self.names[found[1]], value)

    def is_due(self, step):
        left, right = re.fullmatch(
            r"\$\{\{ (inputs\.\w+ == '\w+') && (github\.\w+ == '\w+') \}\}",
            step.get("if", "${{ inputs.comment == 'true' && github.event_name == 'pull_request' }}"),
        ).groups()
        terms = [term.replace("'", "").split(" == ") for term in (left, right)]
        return "if" not in step or all(self.names[name] == value for name, value in terms)

    def run(self, *names):
        """Runs these steps (all: none named) until one fails; returns the exit code of the last."""
        for step in DECLARED["runs"]["steps"]:
            if (names and step["name"] not in names) or not self.is_due(step):
                continue
            output = self.folder / "output"
            output.write_text("")
            script = self.folder / "step.sh"
            script.write_text(step["run"])
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", script],
                env=self.environment
                | {"GITHUB_OUTPUT": str(output)}
                | {name: self.text(value) for name, value in step.get("env", {}).items()},
                cwd=self.folder / self.text(step.get("working-directory", ".")),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            self.log += done.stdout
            for line in output.read_text().splitlines():
                name, _, value = line.partition("=")
                self.names[f"steps.{step['id']}.outputs.{name}"] = value
            if done.returncode:
                return done.returncode
        return 0

    @property
    def comments(self):
        """What `gh` was told, each with the page that it was given."""
        file = self.folder / "notes"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


AFTER_THE_PROBE = ("Compare", "Comment", "Fail if it is worse")
HARM = 'it\'s "my" $(touch harm) `touch harm`; touch harm'


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A probe by the action itself, of a task whose name is meant to do harm."""
    folder = tmp_path_factory.mktemp("runner")
    project = folder / "a project"
    project.mkdir()
    (project / f"{HARM}.py").write_text(ONES)
    options = "--max\n8\n\n--no-throughput\n--verify-steps\n1\n"
    runner = Runner(folder, task=f"{HARM}.py", options=options, token=HARM, **{"working-directory": "a project"})
    runner.code = runner.run()
    return runner


@pytest.fixture
def again(measured, tmp_path):
    """The steps after the probe, with a committed result in whose place another may stand."""
    committed = json.loads((measured.folder / "batchtune.json").read_text())
    (tmp_path / "batchtune.json").write_text(json.dumps(committed))

    def run(before=None, code="0", comments="", **inputs):
        (tmp_path / "old result.json").write_text(json.dumps(committed | (before or {})))
        runner = Runner(tmp_path, **({"task": f"{HARM}.py", "against": "old result.json"} | inputs))
        runner.environment |= {"GH_CODE": code, "COMMENTS": comments}
        runner.code = runner.run(*AFTER_THE_PROBE)
        return runner

    return run


def larger(measured):
    """What stands in a committed result where more fitted."""
    probe = json.loads((measured.folder / "batchtune.json").read_text())["probe"]
    return {"probe": probe | {"max_batch_size": 2 * probe["max_batch_size"]}}


def test_it_probes_the_task_and_keeps_the_result(measured):
    assert measured.code == 0, measured.log
    result = json.loads(Path(measured.names["steps.probe.outputs.result"]).read_text())
    assert (result["status"], result["probe"]["max_batch_size"], result["probe"]["verify_steps"]) == ("complete", 8, 1)
    assert (measured.folder / "summary.md").read_text().startswith("<!-- batchtune ")


def test_no_input_is_run_as_a_command(measured, again, tmp_path):
    assert again(allow=HARM, against=HARM).code == 2
    assert not list(measured.folder.rglob("harm")) + list(tmp_path.rglob("harm"))
    scripts = [step["run"] for step in DECLARED["runs"]["steps"]]
    assert [
        script for script in scripts if "${{" in script
    ] == []  # what GitHub would fill in before the shell reads it


def test_pytorch_without_cuda_is_installed_only_where_there_is_neither_a_gpu_nor_pytorch(measured, tmp_path):
    def installed(**machine):
        runner = Runner(tmp_path / "-".join(machine.values()))
        runner.environment |= machine
        assert runner.run("Install batchtune") == 0
        return (runner.folder / "pip").read_text().splitlines()

    for name in ("1-9", "0-9", "1-0"):
        (tmp_path / name).mkdir()
    own = f"-m pip install --quiet {ACTION}/../../.."
    cpu_wheel = "-m pip install --quiet torch --index-url https://download.pytorch.org/whl/cpu"
    assert installed(NO_TORCH="1", NO_GPU="9") == [cpu_wheel, own]
    assert installed(NO_TORCH="0", NO_GPU="9") == [own]
    assert installed(NO_TORCH="1", NO_GPU="0") == [own]
    assert (Path(own.rsplit(maxsplit=1)[-1]) / "pyproject.toml").is_file()


def test_the_first_comment_is_written_and_later_ones_replace_it(again):
    *_, first = again().comments
    assert first[:5] == ["gh", "pr", "comment", "7", "--repo"]
    assert "nothing is worse by more than the 5% allowed" in first[-1]
    marker = first[-1].splitlines()[0]
    listed, replaced = again(comments="11\n12").comments[-2:]
    assert marker in listed[listed.index("--jq") + 1]
    assert "repos/someone/theirs/issues/comments/12" in replaced
    assert replaced[-1].startswith(marker)


def test_it_fails_when_the_result_is_worse_and_has_commented_by_then(measured, again):
    worse = again(before=larger(measured))
    assert (worse.code, "::error::" in worse.log) == (1, True)
    assert "**worse by more than the 5% allowed: largest batch" in worse.comments[-1][-1]
    assert again(before=larger(measured), allow="60%").code == 0


def test_what_cannot_be_compared_fails_and_says_why(again):
    other = again(before={"task": {"path": "other.py"}})
    assert (other.code, other.comments) == (2, [])
    assert "only what was measured alike can be compared" in other.log


def test_it_comments_only_where_it_is_asked_to(again):
    assert again(comment="false").comments == []


def test_a_token_that_may_not_write_costs_the_comment_alone(again):
    forked = again(code="4")
    assert forked.code == 0
    assert "::warning::" in forked.log


def test_its_page_shows_inputs_that_it_has():
    (example,) = re.findall(r"```yaml\n(.*?)```", (ACTION / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (job,) = yaml.safe_load(example)["jobs"].values()
    (step,) = (each for each in job["steps"] if "batchtune@" in each.get("uses", ""))
    assert step["with"].keys() <= DECLARED["inputs"].keys()
