"""Draws a result as its readers see it: `python recipes/picture.py .batchtune/digits recipes/digits`.

Writes `terminal.svg`, the report in a terminal, and `report.png` and `report-phone.png`, the top of the HTML report on
a desktop and on a phone, for which the package playwright and a Chromium have to be there.
"""

import io
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console

import batchtune
from batchtune.report.formats import to_html

SCREENS = {
    "report.png": {"viewport": {"width": 1120, "height": 1400}},
    "report-phone.png": {"viewport": {"width": 390, "height": 1180}, "is_mobile": True, "has_touch": True},
}


def terminal(result, target):
    """Records the terminal report as an SVG."""
    console = Console(record=True, width=88, file=io.StringIO(), force_terminal=True)
    console.print(result)
    console.save_svg(str(target), title=f"batchtune report {result.name}")


def screenshots(result, folder):
    """Photographs the HTML report in a Chromium, one picture for each of `SCREENS`."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        page_file = Path(scratch) / "report.html"
        page_file.write_text(to_html(result), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, screen in SCREENS.items():
            page = browser.new_page(color_scheme="light", **screen)
            page.goto(page_file.as_uri())
            for place in page.locator("[data-figure]").all():
                place.locator(".main-svg").first.wait_for(state="attached")
            page.screenshot(path=str(folder / name), animations="disabled")
            page.close()
        browser.close()


def main():
    """Draws the pictures of a result file or run folder into a folder."""
    source, folder = sys.argv[1:]
    result = batchtune.load_result(source)
    terminal(result, Path(folder) / "terminal.svg")
    screenshots(result, Path(folder))


if __name__ == "__main__":
    main()
