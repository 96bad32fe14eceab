"""Progress in a notebook: one place that is replaced, and none outside of notebooks."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from batchtune.document import Attempt, Trial
from batchtune.observer import Observer
from batchtune.report.live import NotebookObserver, usual_observer


class Cell:
    """What a notebook shows under a cell: a text for each place, and how often one was replaced."""

    def __init__(self, monkeypatch):
        self.places, self.updates, self.now = [], 0, 0.0
        module = ModuleType("IPython.display")
        module.HTML, module.display = str, self.display
        monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
        monkeypatch.setitem(sys.modules, "IPython.display", module)
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr("batchtune.report.live.time", clock)

    def display(self, text, *, display_id):
        assert display_id
        self.places.append(text)
        return self

    def update(self, text):
        self.places[-1] = text
        self.updates += 1


@pytest.fixture
def cell(monkeypatch):
    return Cell(monkeypatch)


def trial(number, **more):
    about = {"number": number, "batch_size": 64, "learning_rate": 0.003, "precision": "bf16", "seed": 0}
    return Trial.model_validate({"state": "running", "role": "search"} | about | more)


def test_who_gives_no_observer_sees_progress_in_a_notebook_and_nothing_elsewhere(monkeypatch):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert type(usual_observer()) is Observer
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    assert isinstance(usual_observer(), NotebookObserver)


def test_a_study_shows_the_run_the_best_and_the_time_left_in_one_place(cell):
    shown = NotebookObserver()
    shown.stage("searching")
    cell.now = 60
    shown.trial_ended(trial(2), done=3, seconds_left=180)
    cell.now = 61
    shown.trial_started(trial(3), best_seconds=9.5)
    (text,) = cell.places
    assert "searching · run 3: batch 64, learning rate 0.003 · best so far 9.5 s · 3 runs done, at most 3 min" in text
    assert '<progress value="0.25" max="1">' in text


def test_a_probe_shows_its_attempts_a_few_times_a_second_at_most(cell):
    shown = NotebookObserver()
    shown.stage("probing bf16")
    for batch in range(1, 101):
        cell.now += 0.25
        shown.attempted(Attempt(batch_size=batch, outcome="oom", seconds=0.1))
    assert cell.updates == 50
    assert cell.places == ["<p>probing bf16 · batch 100: oom</p>"]


def test_what_a_task_is_called_stays_a_text(cell):
    NotebookObserver().stage("<script>alert(1)</script>")
    assert cell.places == ["<p>&lt;script&gt;alert(1)&lt;/script&gt;</p>"]
