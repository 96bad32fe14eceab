"""Draws a result as it looks in a terminal: `python recipes/picture.py .batchtune/digits recipes/digits/result.svg`."""

import io
import sys

from rich.console import Console

import batchtune


def main():
    """Records the terminal report of a result file or run folder as an SVG."""
    source, target = sys.argv[1:]
    result = batchtune.load_result(source)
    console = Console(record=True, width=88, file=io.StringIO(), force_terminal=True)
    console.print(result)
    console.save_svg(target, title=f"batchtune report {result.name}")


if __name__ == "__main__":
    main()
