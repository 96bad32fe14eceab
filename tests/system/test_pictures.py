"""The command that draws the README's pictures draws any result, in a real Chromium."""

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import documents
import pytest

ROOT = Path(__file__).parents[2]
SIZES = {"report.png": (1120, 1400), "report-phone.png": (390, 1180)}


@pytest.mark.skipif(
    not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    reason="no Chromium here; install the system's package 'chromium'",
)
def test_a_result_is_drawn_as_in_a_terminal_on_a_desktop_and_on_a_phone(tmp_path):
    (tmp_path / "result.json").write_text(documents.result("tune").to_json())
    command = [sys.executable, str(ROOT / "recipes" / "picture.py"), "result.json", "."]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=120)
    drawn = ET.parse(tmp_path / "terminal.svg").getroot()
    assert "digits" in "".join(drawn.itertext())
    for name, size in SIZES.items():
        picture = (tmp_path / name).read_bytes()
        assert struct.unpack(">II", picture[16:24]) == size
        assert len(picture) < 400_000


def test_the_readme_shows_all_of_them_compact():
    shown = ROOT / "recipes" / "digits"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("terminal.svg", *SIZES):
        assert f"recipes/digits/{name}" in readme
        assert (shown / name).stat().st_size < 200_000
