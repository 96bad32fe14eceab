"""The house rules about imports: floors import downward only, and heavy libraries have their rooms."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "batchtune"
FLOORS = {
    0: {"errors", "results", "config", "config_file", "yamlfile", "progress", "run_folder"},
    1: {"device", "task", "report"},
    2: {"train"},
    3: {"probe", "tune", "estimate"},
    4: {"__init__"},
    5: {"cli", "__main__"},
}
FLOOR_OF = {unit: floor for floor, units in FLOORS.items() for unit in units}
TORCH_ROOMS = {"train", "device", "estimate", "task"}
UPWARD = {"results": {"batchtune.report.terminal.render"}}  # how a result draws itself; loaded when it does
PURE = {"probe/search.py", "tune/recommend.py"}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "templates" not in path.parts)


def imports(path: Path) -> Iterator[str]:
    """The dotted names of all imports of a file, lazy ones too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def unit(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_unit(name: str) -> str | None:
    """The unit of batchtune that a dotted name leads to; its version alone may be read from anywhere."""
    parts = name.split(".")
    if parts[0] != "batchtune" or name == "batchtune.__version__":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in FLOOR_OF else "__init__"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
class TestEveryModule:
    def test_stands_on_a_floor_and_imports_from_its_own_or_a_lower_one(self, path):
        floor = FLOOR_OF[unit(path)]
        above = {name for name in imports(path) if (found := imported_unit(name)) and FLOOR_OF[found] > floor}
        assert above <= UPWARD.get(unit(path), set())

    def test_loads_torch_and_optuna_in_their_rooms_only(self, path):
        roots = {name.split(".")[0] for name in imports(path)}
        if unit(path) not in TORCH_ROOMS:
            assert "torch" not in roots
        if unit(path) != "tune":
            assert "optuna" not in roots

    def test_decides_without_torch_and_optuna_where_it_only_decides(self, path):
        if path.relative_to(PACKAGE).as_posix() in PURE:
            assert {name.split(".")[0] for name in imports(path)}.isdisjoint({"torch", "optuna"})


def test_the_pure_modules_exist():
    assert all((PACKAGE / name).is_file() for name in PURE)


def test_every_unit_of_the_package_has_a_floor():
    assert {unit(path) for path in MODULES} <= FLOOR_OF.keys()


def test_the_command_line_starts_without_the_heavy_libraries():
    heavy = ("torch", "optuna", "pandas", "plotly", "numpy")
    code = f"import sys, batchtune.cli; print(*(name for name in {heavy} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert done.stdout.split() == []
