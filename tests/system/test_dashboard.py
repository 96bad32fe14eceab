"""A run folder in optuna-dashboard: the real server lists the study of the journal and its trials."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed; install '.[test]'")


def test_optuna_dashboard_opens_the_journal_of_a_run_as_the_recipes_say(tuned, tmp_path):
    recipes = (Path(__file__).parents[2] / "recipes" / "README.md").read_text(encoding="utf-8")
    assert "\noptuna-dashboard .batchtune/mymodel/study.log " in recipes
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    journal = tuned.cli.run_folder() / "study.log"
    command = [Path(sys.executable).parent / "optuna-dashboard", journal, "--host", "127.0.0.1", "--port", str(port)]
    with (tmp_path / "log").open("w") as told, subprocess.Popen(command, stdout=told, stderr=told) as server:
        try:
            (study,) = answer_of(f"http://127.0.0.1:{port}/api/studies", server)["study_summaries"]
            assert study["study_name"] == "config"
            trials = answer_of(f"http://127.0.0.1:{port}/api/studies/{study['study_id']}", server)["trials"]
        finally:
            server.terminate()
    ours = tuned.document["trials"]
    assert len(trials) == len(ours)
    sizes = [{each["name"]: each["param_external_value"] for each in trial["params"]}["batch_size"] for trial in trials]
    assert sizes == [str(trial["batch_size"]) for trial in ours]


def answer_of(url, server):
    """The server's answer, once it listens."""
    for _ in range(300):
        assert server.poll() is None, "the dashboard ended"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.URLError:
            time.sleep(0.2)
    raise AssertionError("the dashboard does not listen")
