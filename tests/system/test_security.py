"""What is not trusted: a run folder that somebody else made runs no code, and nobody is told a password."""

import json
import os
import pickle

import pytest

from batchtune.config.load import load_config
from batchtune.tune.plan.configure import identity_of
from batchtune.tune.study.storage import open_storage

SECRET = "correct-horse-battery-staple"
URL = f"postgresql+psycopg://you:{SECRET}@127.0.0.1:9/studies"
NOSY = """
import os
from pathlib import Path

def told(process):
    return b"".join(Path(f"/proc/{process}/{name}").read_bytes() for name in ("cmdline", "environ"))

Path("told").write_bytes(told("self"))
print(os.environ)
"""


class Bomb:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, marker):
        self._marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self._marker,)


@pytest.fixture
def bomb(tmp_path):
    """A pickle, and whether it has gone off."""
    marker = tmp_path / "marker"
    pickle.loads(pickle.dumps(Bomb(marker)))
    assert marker.exists()  # it would
    marker.rmdir()
    yield Bomb(marker)
    assert not marker.exists()


def test_a_pickle_in_every_file_of_a_run_folder_is_not_loaded(tuned, quick_cli, bomb):
    tuned.copy_to(quick_cli)
    folder = quick_cli.run_folder()
    kept = [trial["number"] for trial in tuned.document["trials"]]
    for name in ("study.log", "attempts.jsonl"):
        with (folder / name).open("ab") as stream:
            stream.write(pickle.dumps(bomb, protocol=0) + b"\n")
    (folder / "study.log.snapshot").write_bytes(pickle.dumps(bomb))
    again = quick_cli("tune", "config.yaml", "budget.trials=5", "confirm=off", "--json", "-q")
    assert again.code == 0, again.err
    assert again.document["trials"][: len(kept)] == tuned.document["trials"]
    known = (folder / "identity.json").read_bytes()
    for name in ("config.yaml", "identity.json", "result.json", "report.html"):
        (folder / name).write_bytes(pickle.dumps(bomb))
    refused = quick_cli("tune", "config.yaml")
    assert (refused.code, "identity.json is damaged" in refused.err) == (2, True)
    (folder / "identity.json").write_bytes(known)
    for command in (["tune", "config.yaml"], ["report"], ["report", "config", "--format", "html"]):
        refused = quick_cli(*command)
        assert refused.code == 2
        assert "result.json: not a JSON document" in refused.err


def test_the_password_of_a_storage_is_told_to_nobody(cli):
    cli.write("linear.py", NOSY + (cli.folder / "linear.py").read_text())
    cli.write("config.yaml", (cli.folder / "config.yaml").read_text() + f"storage: {URL}\n")
    told = {"environment": {"BATCHTUNE_STORAGE": URL}}
    answer = cli("tune", "config.yaml", "--storage", URL, "-v", "--debug", "--json", **told)
    assert answer.code == 2, answer.err
    line = f"storage {URL.replace(SECRET, '***')} cannot be opened"
    assert line in answer.err
    assert answer.document["error"]["message"].startswith(line)
    assert "Traceback" in answer.err  # that of --debug
    assert SECRET not in answer.out + answer.err
    assert "USER" in answer.err or "PATH" in answer.err  # the child was nosy
    left = [path for path in cli.folder.rglob("*") if path.is_file() and path.name != "config.yaml"]
    left += [cli.run_folder() / "config.yaml"]
    assert {path.name for path in left} >= {"told", "result.json", "report.html"}
    assert [path.name for path in left if SECRET.encode() in path.read_bytes()] == []


def test_what_a_study_is_known_by_does_not_hold_the_password(cli):
    cli.write("config.yaml", (cli.folder / "config.yaml").read_text() + f"storage: {URL}\n")
    config = load_config(cli.folder / "config.yaml")
    assert config.storage == URL
    assert SECRET not in json.dumps(identity_of(config))


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql+psycopg://you:{SECRET}@host:port/studies",
        f"postgresql+nothing://you:{SECRET}@host/studies",
        f"nothing://you:{SECRET}@host/studies",
        f"sqlite:///nowhere/study.db?password={SECRET}",
    ],
)
def test_no_reason_for_which_a_storage_cannot_be_opened_shows_its_password(tmp_path, url):
    with pytest.raises(Exception, match="cannot be opened") as raised:
        open_storage(url, tmp_path)
    assert SECRET not in str(raised.value)
    assert raised.value.__suppress_context__
    assert json.dumps(str(raised.value)).count("***") == 1
