"""Draws a result as a terminal shows it: `python recipes/picture.py .batchtune/charlm .github/result.svg`."""

import io
import sys

from rich.console import Console

import batchtune

WIDTH = 88  # columns


def main():
    """Draws a result file or run folder into an SVG."""
    source, picture = sys.argv[1:]
    result = batchtune.load_result(source)
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(result)
    console.save_svg(picture, title=f"batchtune tune: {result.name}")


if __name__ == "__main__":
    main()
