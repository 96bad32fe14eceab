"""The floors of the house: imports go downward only, and heavy libraries stay where they belong."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "batchtune"
FLOORS = {
    "errors": 0, "config": 0, "config_file": 0, "yamlfile": 0, "results": 0, "result_file": 0, "progress": 0,
    "run_folder": 0,
    "device": 1, "task": 1, "report": 1,
    "train": 2,
    "probe": 3, "tune": 3, "estimate": 3,
    "__init__": 4,
    "cli": 5, "session": 5, "__main__": 5,
}  # fmt: skip
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "templates" not in path.parts)
RESULTS_MAY_RENDER = {"batchtune.report"}  # Result's own terminal and notebook forms, loaded when asked for


def name_of(path):
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def floor_of(module):
    parts = module.removeprefix("batchtune").lstrip(".").split(".")
    return FLOORS[parts[0] or "__init__"]


def imported(path):
    """Modules a file imports outside of `if TYPE_CHECKING:`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(node)
        for guard in ast.walk(tree)
        if isinstance(guard, ast.If) and "TYPE_CHECKING" in ast.dump(guard.test)
        for node in ast.walk(guard)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_from_its_own_floor_or_below(path):
    here = floor_of(name_of(path))
    for module in imported(path):
        if module == "batchtune":
            continue  # the version; the package itself is empty until asked
        if module.startswith("batchtune.") and not (
            path.name == "results.py" and any(module.startswith(each) for each in RESULTS_MAY_RENDER)
        ):
            assert floor_of(module) <= here, f"{name_of(path)} imports {module}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_torch_and_optuna_are_imported_only_where_they_belong(path):
    folder = path.relative_to(PACKAGE).parts[0]
    roots = {module.partition(".")[0] for module in imported(path)}
    if folder not in {"train", "device", "estimate", "task"}:
        assert "torch" not in roots
    if folder != "tune":
        assert "optuna" not in roots


PURE = [
    *("probe/search.py", "probe/final_check.py", "probe/throughput.py", "probe/warnings.py"),
    *("tune/recommend.py", "tune/intervals.py", "tune/steps.py", "tune/seats.py", "tune/warnings.py"),
]


@pytest.mark.parametrize("name", PURE)
def test_decisions_are_pure(name):
    roots = {module.partition(".")[0] for module in imported(PACKAGE / name)}
    assert not roots & {"torch", "optuna", "numpy", "pandas"}


@pytest.mark.parametrize("arguments", [["-c", "import batchtune.cli"], ["-m", "batchtune", "--help"]])
def test_the_command_line_starts_without_anything_heavy(arguments):
    command = [sys.executable, "-X", "importtime", *arguments]
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in loaded
    assert not loaded & {"torch", "optuna", "pandas", "plotly", "numpy", "pydantic"}


def test_the_functions_stay_functions_after_the_packages_of_their_names_are_imported():
    import inspect

    import batchtune
    import batchtune.estimate.memory.allocator
    import batchtune.probe.search
    import batchtune.tune.verdict.recommend

    assert all(inspect.isfunction(each) for each in (batchtune.probe, batchtune.tune, batchtune.estimate))
