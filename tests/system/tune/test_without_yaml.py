"""A study without a YAML file: by the real command, and the same study gone on with."""

import json

import yaml


def test_a_task_is_tuned_against_what_its_file_says_and_its_study_goes_on_from_what_was_saved(cli, quick_cli):
    task = cli.folder / "linear.py"
    task.write_text(task.read_text() + "\nBATCH_SIZE = 16\n")
    line = task.read_text().splitlines().index("BATCH_SIZE = 16") + 1
    short = ("batch_size.max=16", "budget.run=300ms", "confirm=off")
    options = ("--lr", "1e-2", "--budget", "5m", "--save-config", "tune.yaml", "--json")
    first = cli("tune", "linear.py", *options, *short, "budget.trials=2")
    assert first.code == 0, first.err
    assert f"baseline: batch 16 (BATCH_SIZE in linear.py:{line}), learning rate 0.01\n" in first.err
    assert "left, about" in first.err
    assert cli.result("linear") == json.loads(first.out)
    kept = yaml.safe_load((cli.folder / "tune.yaml").read_text())
    assert kept["baseline"] == {"batch_size": 16, "learning_rate": 0.01}
    more = quick_cli("tune", "tune.yaml", "budget.trials=3", "--json")
    assert more.code == 0, more.err
    before, after = (json.loads(each.out)["trials"] for each in (first, more))
    assert after[: len(before)] == before
    assert len(after) == len(before) + 1


def test_a_task_that_does_not_say_it_is_told_with_what_to_type(quick_cli):
    answer = quick_cli("tune", "linear.py", "--lr", "1e-2")
    assert answer.code == 2
    assert answer.err == "batchtune: linear.py: does not say its batch size; add --batch-size 32\n"
    assert not (quick_cli.folder / ".batchtune").exists()


def test_an_option_of_probe_that_tune_has_as_a_key_is_told_with_what_to_type(cli):
    answer = cli("tune", "linear.py", "--memory-limit", "20GiB")
    assert answer.code == 2
    assert answer.err.endswith("No such option: --memory-limit; write memory.limit=… without dashes\n")
