"""The maps for newcomers name only what is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAPS = {"batchtune/README.md": "batchtune", "tests/README.md": "tests", ".github/CONTRIBUTING.md": "."}


def words_of(page):
    return re.findall(r"`([^`\n]+)`", (ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", MAPS)
def test_every_path_on_a_map_is_there(page):
    paths = [word for word in words_of(page) if re.fullmatch(r"[\w./-]+(/|\.(py|md|toml|c|h|txt)|/run)", word)]
    assert len(paths) > 3
    missing = [path for path in paths if not any((ROOT / home / path).exists() for home in (MAPS[page], "."))]
    assert missing == []


def test_every_room_is_on_the_map():
    text = " ".join(words_of("batchtune/README.md"))
    rooms = [path.name for path in (ROOT / "batchtune").iterdir() if (path / "__init__.py").exists()]
    files = [path.name for path in (ROOT / "batchtune").glob("[!_]*.py") if path.name != "version.py"]
    assert [room for room in rooms if f"{room}/" not in text] == []
    assert [name for name in files if name not in text] == []
