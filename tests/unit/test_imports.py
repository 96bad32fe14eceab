"""The floors of the house: imports go downward only, and heavy libraries stay where they belong."""

import ast
import functools
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "batchtune"
FLOORS = (
    ("version", "vocabulary"),
    ("document",),
    ("protocol", "errors", "observer", "units"),
    ("config", "device", "lengths"),
    ("processes", "report.view", "tune.optuna_parts", "tune.verdict"),
    ("report",),
    ("result",),
    ("run_folder", "task.adapting"),
    ("session", "task.lightning", "task.transformers"),
    ("task", "console", "sampling"),
    ("estimate.memory",),
    ("estimate",),
    ("child.ranks",),
    ("child",),
    ("estimate.tracing",),
    ("probe.timing",),
    ("probe",),
    ("tune.plan",),
    ("tune.study",),
    ("tune",),
    ("api",),
    ("",),  # the package's own names
    ("cli_report",),
    ("cli",),
    ("__main__",),
)
"""Rooms from the ground up: a folder with its own files, or a file of the package itself. Imports go down only."""
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "templates" not in path.parts)
MOST_FILES = 12  # in one folder, besides __init__ and __main__
MOST_IMPORTS = 12  # of the package's own modules or rooms in one: what imports more knows too much


def name_of(path):
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(path) for path in MODULES}
FOLDERS = {name_of(path) for path in MODULES if path.name == "__init__.py"}


def room_of(module):
    """The folder of a module, or the module itself where it lies in the package's own folder."""
    folder = module if module in FOLDERS else module.rpartition(".")[0]
    return (module if folder == "batchtune" else folder).removeprefix("batchtune").lstrip(".")


@functools.cache
def imported(path):
    """Modules that a file imports anywhere: in functions and for type checkers, too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & NAMES
            found |= inner or {node.module}
    return found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_from_its_own_room_or_from_a_lower_floor(path):
    room = room_of(name_of(path))
    for module in imported(path):
        if module.partition(".")[0] == "batchtune" and room_of(module) != room:
            assert FLOOR_OF[room_of(module)] < FLOOR_OF[room], f"{name_of(path)} imports {module}"


def test_no_modules_import_each_other():
    below = {
        name_of(path): {module for module in imported(path) if module in NAMES} - {name_of(path)} for path in MODULES
    }
    while ends := [module for module, others in below.items() if not others & below.keys()]:
        for module in ends:
            del below[module]
    assert below == {}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_module_knows_too_many_others(path):
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    named = {node.module for node in tree if isinstance(node, ast.ImportFrom) and node.module}
    own = {module for module in named if module.partition(".")[0] == "batchtune"}
    assert len(own) <= MOST_IMPORTS, sorted(own)


def test_every_room_has_a_floor_and_no_folder_is_crowded():
    assert {room_of(name_of(path)) for path in MODULES} == FLOOR_OF.keys()
    crowded = {path.parent for path in MODULES if len(list(path.parent.glob("[!_]*.py"))) > MOST_FILES}
    assert crowded == set()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_torch_and_optuna_are_imported_only_where_they_belong(path):
    folder = path.relative_to(PACKAGE).parts[0]
    roots = {module.partition(".")[0] for module in imported(path)}
    if folder not in {"child", "device", "estimate", "task", "processes"}:
        assert "torch" not in roots
    if folder != "tune":
        assert "optuna" not in roots


PURE = [
    *("probe/search.py", "probe/final_check.py", "probe/findings.py", "lengths/buckets.py", "sampling/sampler.py"),
    *("tune/verdict/recommend.py", "tune/verdict/scores.py", "tune/findings.py", "tune/plan/prior.py"),
    "processes/pool.py",
]


@pytest.mark.parametrize("name", PURE)
def test_decisions_are_pure(name):
    roots = {module.partition(".")[0] for module in imported(PACKAGE / name)}
    assert not roots & {"torch", "optuna", "numpy", "pandas"}


def test_the_functions_stay_functions_after_the_packages_of_their_names_are_imported():
    import inspect

    import batchtune
    import batchtune.estimate.memory.allocator
    import batchtune.probe.search
    import batchtune.tune.verdict.recommend

    assert all(inspect.isfunction(each) for each in (batchtune.probe, batchtune.tune, batchtune.estimate))
