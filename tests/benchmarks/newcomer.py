"""From a clone to the first recommendation, by the README's own commands: `python tests/benchmarks/newcomer.py`.

The first set-up command runs in a clone, part by part, then the README's model with its commands. Prints a
table with the time of each; packages come from where pip takes them, its cache included unless PIP_NO_CACHE_DIR is set.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def readme(kind: str) -> list[str]:
    """The blocks of one kind in the README."""
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)


def processor_seconds() -> float:
    """Of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Runs all commands and prints the table; the exit code is the last that was not 0."""
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        clone = Path(scratch) / "batchtune"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        (clone / "model.py").write_text(readme("python")[0], encoding="utf-8")
        set_up = readme("bash")[0].strip().split(" && ")
        commands = [line.removeprefix("$ ") for block in readme("console") for line in block.splitlines()]
        load, since_start = os.getloadavg()[0], 0.0
        print(f"{dt.datetime.now(tz=dt.UTC):%Y-%m-%d}, Python {platform.python_version()}, ", end="")
        print(f"{os.cpu_count()} processors, load {load:.1f} at the start")
        print("\n| command | seconds | processor seconds | since the start |\n|---|---:|---:|---:|")
        for command in [*set_up, *commands]:
            path = f"{clone / '.venv' / 'bin'}:{os.environ['PATH']}"
            began, used = time.perf_counter(), processor_seconds()
            done = subprocess.run(
                ["bash", "-c", command], cwd=clone, env=os.environ | {"PATH": path}, capture_output=True, check=False
            )
            seconds = time.perf_counter() - began
            since_start += seconds
            figures = f"{seconds:.1f} | {processor_seconds() - used:.1f} | {since_start:.0f}"
            ended = f" exits with {done.returncode}" if done.returncode else ""
            print(f"| `{command}`{ended} | {figures} |", flush=True)
            if done.returncode:
                sys.stderr.buffer.write(done.stderr)
                failed = done.returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
