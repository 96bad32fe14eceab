"""Would the tests notice? Each defect of the changelog comes back, alone, in a copy; the tests named for it must fail.

    python tests/benchmarks/mutations.py [word of a defect] …

A defect whose code is no longer there is an error: `changelog_defects.py` has to follow the code. Each takes
its own row of `results/mutations.md` anew.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from changelog_defects import DEFECTS, Defect

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results") / "mutations.md"
MISSED = "**no test**"
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "results", "fake_gpu", "dist")


def run_tests(house: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs tests of the copy, against the copy."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", "-rfE", *tests]
    environment = os.environ | {"PYTHONPATH": str(house), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=house, env=environment, capture_output=True, text=True, check=False)


def bring_back(house: Path, defect: Defect) -> str:
    """Puts the defect into the copy; returns the file as it was.

    Raises:
        SystemExit: the code that it replaces is not there, or in several places.
    """
    file = house / "batchtune" / defect.file
    sound = file.read_text(encoding="utf-8")
    if sound.count(defect.sound) != 1:
        sys.exit(f"{defect.name}: {sound.count(defect.sound)} times in batchtune/{defect.file}: {defect.sound!r}")
    file.write_text(sound.replace(defect.sound, defect.broken), encoding="utf-8")
    return sound


def caught_by(house: Path, defect: Defect) -> str | None:
    """The first test that fails with the defect; None where all pass.

    Raises:
        SystemExit: the tests could not be run.
    """
    sound = bring_back(house, defect)
    try:
        done = run_tests(house, defect.tests.split())
    finally:
        (house / "batchtune" / defect.file).write_text(sound, encoding="utf-8")
    if done.returncode not in {0, 1}:
        sys.exit(f"{defect.name}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = [
        line.split()[1].partition("[")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))
    ]
    return failed[0] if failed else None


def write(found: dict[str, str | None]) -> None:
    """Writes the table; defects that were not brought back this time keep the rows that they have."""
    old = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in old if line.startswith("| ")}
    for each in DEFECTS:
        if each.name in found:
            test = found[each.name]
            rows[each.name] = f"| {each.name} | `{each.file}` | {f'`{test}`' if test else MISSED} |"
    table = [rows[each.name] for each in DEFECTS if each.name in rows]
    caught = sum(MISSED not in row for row in table)
    head = f"{caught} of {len(table)} defects of the changelog, each brought back alone, are caught."
    lines = [
        head,
        "`python tests/benchmarks/mutations.py`",
        "",
        "| defect | in `batchtune/` | caught by |",
        "|---|---|---|",
    ]
    RESULTS.write_text("\n".join([*lines, *table, ""]), encoding="utf-8")


def main() -> None:
    words = sys.argv[1:]
    chosen = [each for each in DEFECTS if not words or any(word in each.name for word in words)]
    found: dict[str, str | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        house = Path(folder) / "house"
        shutil.copytree(ROOT, house, ignore=_LEFT_OUT)
        for each in chosen:  # an error in the last one is known before the first has run
            (house / "batchtune" / each.file).write_text(bring_back(house, each), encoding="utf-8")
        sound = run_tests(house, sorted({test for each in chosen for test in each.tests.split()}))
        if sound.returncode:
            sys.exit(f"the tests fail without any defect:\n{sound.stdout[-2000:]}")
        for number, defect in enumerate(chosen, 1):
            found[defect.name] = caught_by(house, defect)
            print(f"{number}/{len(chosen)} {defect.name}: {found[defect.name] or 'NOT CAUGHT'}", flush=True)
    write(found)
    sys.exit(1 if None in found.values() else 0)


if __name__ == "__main__":
    main()
