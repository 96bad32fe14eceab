"""The command line of benchmarks whose measuring needs a GPU and whose comparing does not."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def run(description: str | None, measure: Callable[[float], None], compare: Callable[[], None], seconds: float) -> None:
    """Compares, or with `--measure` measures for so many seconds, unless `--seconds` says otherwise."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="on a GPU")
    parser.add_argument("--seconds", type=float, default=seconds, help="of measuring")
    given = parser.parse_args()
    if given.measure:
        measure(given.seconds)
    else:
        compare()
