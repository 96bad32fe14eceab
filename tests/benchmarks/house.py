"""The package in numbers: `python tests/benchmarks/house.py` prints the table, and what leads each row."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "batchtune"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "templates" not in path.parts)
SHOWN = 5  # of each row's leaders


def name_of(path: Path) -> str:
    """`tune/run.py` of a file of the package."""
    return str(path.relative_to(PACKAGE))


def definitions(path: Path) -> Iterator[tuple[type[ast.AST], str, int]]:
    """Kind, name and lines of each function and class of a file; documentation is not counted."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            inside = ast.walk(node) if isinstance(node, ast.ClassDef) else [node]
            for each in inside:
                if isinstance(each, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(each):
                    first = each.body[0]
                    assert first.end_lineno is not None
                    lines -= first.end_lineno - first.lineno + 1
            yield (ast.ClassDef if isinstance(node, ast.ClassDef) else ast.FunctionDef), node.name, lines


def imports(path: Path) -> int:
    """How many modules of the package a file imports, hidden imports included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("batchtune"):
            found.add(node.module)
    return len(found)


def longest(kind: type[ast.AST]) -> Counter[str]:
    """Lines of every function, or of every class."""
    return Counter(
        {
            f"{name_of(path)}:{name}": lines
            for path in MODULES
            for found, name, lines in definitions(path)
            if found is kind
        }
    )


def main() -> None:
    """Prints the table."""
    texts = {name_of(path): path.read_text(encoding="utf-8") for path in MODULES}
    lines = Counter({name: text.count("\n") for name, text in texts.items()})
    folders = Counter(str(path.parent.relative_to(PACKAGE)) for path in MODULES if path.name[:2] != "__")
    anything = Counter({name: len(re.findall(r"\bAny\b", text)) for name, text in texts.items()})
    rows = {
        "lines of a module (total {total:,} in {count} modules)": (lines, None),
        "files in one folder": (folders, 12),
        "imports in one module": (Counter({name_of(path): imports(path) for path in MODULES}), 12),
        "lines of a function, its documentation not counted": (longest(ast.FunctionDef), 45),
        "lines of a class, documentation not counted": (longest(ast.ClassDef), 150),
        "the word Any (total {total})": (anything, None),
    }
    print("| what | most | goal | where |\n|---|---:|---:|---|")
    for what, (found, goal) in rows.items():
        leaders = found.most_common(SHOWN)
        where = ", ".join(f"{name} {number}" for name, number in leaders)
        said = what.format(total=found.total(), count=len(MODULES))
        above = sum(number > goal for number in found.values()) if goal else 0
        print(f"| {said} | {leaders[0][1]} | {goal or ''} | {where}{f'; {above} above the goal' if above else ''} |")


if __name__ == "__main__":
    main()
