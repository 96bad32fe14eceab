"""A run folder whose process is killed, and the page in it while a run goes on."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

import batchtune
from batchtune.observer import Observer
from batchtune.run_folder import RunFolder


def test_it_is_free_again_after_its_process_was_killed(tmp_path):
    code = (
        "import os, pathlib; from batchtune.run_folder import RunFolder; "
        f"RunFolder('digits', pathlib.Path({str(tmp_path)!r})).open(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    folder = RunFolder("digits", tmp_path)
    folder.open()
    folder.close()


class Reader(Observer):
    """Looks at a page whenever something has happened, as it was drawn by then."""

    def __init__(self, page):
        self.page, self.seen = page, []

    def _look(self, *_, **__):
        if self.page.exists():
            shown = self.page.read_text(encoding="utf-8")
            self.seen.append(shown.partition("<strong>running</strong> – ")[2].partition("</p>")[0])
            assert "data-refresh=" in shown

    attempting = throughput = trial_started = trial_ended = _look


@pytest.fixture
def drawn_each_time(monkeypatch):
    """Pages of a run are drawn whenever something happens, as if that took no time."""
    monkeypatch.setattr("batchtune.run_folder.SHOWN_EVERY_SECONDS", 0)
    monkeypatch.setattr("batchtune.run_folder.time", SimpleNamespace(monotonic=time.monotonic, thread_time=lambda: 0.0))


def test_the_page_of_a_probe_tells_its_stages_until_it_is_complete(cli, as_forks, drawn_each_time):
    page = cli.folder / "runs" / "probe-linear" / "report.html"
    reader = Reader(page)
    with as_forks():
        batchtune.probe(cli.folder / "linear.py", device="cpu", max=4, observer=reader, run_folders=cli.folder / "runs")
    assert {"probing fp32", "timing steps"} <= {*reader.seen}
    assert '<span class="status complete">' in page.read_text(encoding="utf-8")
    assert "refresh" not in page.read_text(encoding="utf-8").partition("<style>")[0]


def test_the_page_of_a_study_tells_its_runs_and_the_time_left(cli, as_forks, drawn_each_time):
    page = cli.folder / "runs" / "config" / "report.html"
    reader = Reader(page)
    overrides = ["batch_size.max=8", "baseline.batch_size=8", "budget.trials=3", "confirm=off"]
    with as_forks():
        batchtune.tune(
            cli.folder / "config.yaml", overrides=overrides, observer=reader, run_folders=cli.folder / "runs"
        )
    assert any(words.startswith("searching: 1 run done, at most ") for words in reader.seen)
    assert all(words.endswith(" left") for words in reader.seen if words.startswith("searching"))
    assert '<span class="status complete">' in page.read_text(encoding="utf-8")
