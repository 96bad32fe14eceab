"""The campaign for a real GPU, on a fake one: every part reports, and no part costs the others anything."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fake_gpu
import pytest

GPU = Path(__file__).parents[1] / "gpu"
CARD = fake_gpu.Card("81559MiB", name="NVIDIA H100 80GB HBM3", capability=(9, 0), multiprocessors=132)
SCRIPT = f"""
import json, sys, time
from pathlib import Path
sys.path.insert(0, {str(GPU)!r})
import campaign
from campaign_report import goal

def works(quick, there):
    yield {{"case": "one", "peak_bytes": 3 << 20, "seconds": 2.5}}

def breaks(quick, there):
    yield {{"case": "before the end", "batch_size": 7}}
    raise ValueError("no such kernel")

def hangs(quick, there):
    yield {{"case": "then nothing", "batch_size": 8}}
    time.sleep(600)

def lasts(quick, there):
    for size in (16, 32):
        if str(size) not in there:
            yield {{"case": str(size), "batch_size": size, "peak_bytes": 3 << 20}}
            time.sleep(600 if size == 16 else 0)

def judge(rows):
    return [goal("a row of three MiB", str(len(rows)), met=rows[0]["peak_bytes"] == 3 << 20)]

parts = {{"first": works, "breaks": breaks, "hangs": hangs, "lasts": lasts, "last": works}}
campaign.PARTS = {{name: campaign.Part(f"The {{name}}", work, judge, 1) for name, work in parts.items()}}
campaign.LEAST_SECONDS = 1
campaign.RIG = Path(__file__).with_name("rig.json")
campaign.main()
"""
RIG = {"parts": {"first": {"rows": [{"case": "one", "peak_bytes": 4 << 20, "seconds": 1.0}]}}}


def run(script, *arguments, timeout):
    return subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def read(folder):
    return json.loads((folder / "gpu_campaign.json").read_text())


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A campaign of five parts: one fails, one hangs, one lasts too long; what two calls of it wrote."""
    folder = tmp_path_factory.mktemp("campaign")
    (folder / "script.py").write_text(SCRIPT)
    (folder / "rig.json").write_text(json.dumps(RIG))
    with fake_gpu.machine(CARD):
        done = run(folder / "script.py", "--output", folder, "--seconds", 40, timeout=160)
        assert done.returncode == 0, done.stderr
        first = read(folder)
        again = run(folder / "script.py", "--output", folder, "--seconds", 30, timeout=160)
    return folder, first, again


def test_a_part_that_fails_or_hangs_is_told_with_what_it_measured_and_the_others_go_on(ended):
    _, campaign, _ = ended
    parts = campaign["parts"]
    assert {name: part["state"] for name, part in parts.items()} == {
        "first": "done", "breaks": "failed", "hangs": "unfinished", "lasts": "unfinished", "last": "done"
    }  # fmt: skip
    assert parts["breaks"]["error"] == "ValueError: no such kernel"
    assert parts["breaks"]["rows"] == [{"case": "before the end", "batch_size": 7}]
    assert parts["hangs"]["rows"] == [{"case": "then nothing", "batch_size": 8}]
    assert parts["first"]["goals"][0]["met"] is True
    assert parts["hangs"]["goals"][0]["met"] is False
    assert campaign["machine"]["device"] == CARD.name


def test_the_parts_share_the_time_that_the_whole_is_given(ended):
    _, campaign, _ = ended
    assert sum(part["seconds"] for part in campaign["parts"].values()) < 40


def test_the_next_call_goes_on_with_the_cases_that_are_missing(ended):
    folder, first, again = ended
    assert again.returncode == 0, again.stderr
    assert [line.split(":")[0] for line in again.stderr.splitlines()] == ["hangs", "lasts"]
    parts = read(folder)["parts"]
    assert parts["first"] == first["parts"]["first"]
    assert [row["case"] for row in first["parts"]["lasts"]["rows"]] == ["16"]
    assert [row["case"] for row in parts["lasts"]["rows"]] == ["16", "32"]
    assert parts["lasts"]["state"] == "done"
    assert parts["lasts"]["seconds"] > first["parts"]["lasts"]["seconds"]


def test_a_part_that_comes_to_nothing_new_is_not_tried_again(ended):
    folder, _, _ = ended
    assert read(folder)["parts"]["hangs"]["state"] == "stopped"
    with fake_gpu.machine(CARD):
        third = run(folder / "script.py", "--output", folder, timeout=120)
    assert third.stderr == ""
    assert not list(folder.glob("*.jsonl"))


def test_figures_of_few_and_small_cases_are_not_mixed_in(ended):
    with fake_gpu.machine(CARD):
        refused = run(ended[0] / "script.py", "--output", ended[0], "--quick", timeout=120)
    assert refused.returncode == 1
    assert "the figures there are of all cases; name another" in refused.stderr


def test_the_report_has_each_figure_beside_the_rigs_where_that_can_tell(ended):
    text = (ended[0] / "gpu_campaign.md").read_text()
    assert "| one | 3.0 (rig 4.0, -25.00%) | 2.5 |" in text
    assert "failed in" in text
    assert "ValueError: no such kernel" in text
    assert "1 figures: 0 the same, 0 within 1 %, median 25.00%, worst 25.0% off; 7 have none of the rig's" in text


def test_figures_of_another_device_are_not_mixed_in(ended):
    folder = ended[0]
    with fake_gpu.machine(fake_gpu.Card("24GiB", name="NVIDIA RTX A5000")):
        refused = run(folder / "script.py", "--output", folder, timeout=120)
    assert refused.returncode == 1
    assert f"the figures there are of {CARD.name}; name another" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_part_reports(tmp_path):
    sys.path.insert(0, str(GPU))
    import campaign

    with fake_gpu.machine(CARD):
        done = run(GPU / "campaign.py", "--output", tmp_path, "--quick", "--seconds", 4800, timeout=550)
    assert done.returncode == 0, done.stderr
    found = read(tmp_path)["parts"]
    assert found.keys() == campaign.PARTS.keys(), done.stderr
    assert {name: (part["state"], part.get("end")) for name, part in found.items() if part["state"] != "done"} == {}
    for name, part in found.items():
        assert part["rows"], name
        assert not [row for row in part["rows"] if row.get("refused") or row.get("failed") or row.get("broken")], name
        assert part["goals"], name
        assert not any(each["goal"] == "all of it measured" for each in part["goals"]), name
        assert f"## {campaign.PARTS[name].title}" in (tmp_path / "gpu_campaign.md").read_text()
