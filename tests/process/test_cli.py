"""Every command through the command line itself: what it prints where, what it writes, and what it exits with."""

import contextlib
import functools
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import documents
import jsonschema
import pytest
import yaml
from fake_gpu import forks

import batchtune
from batchtune.__main__ import main
from batchtune.result import result_schema as result_schema_of_the_package

ROOT = Path(__file__).resolve().parents[2]

COMMANDS = ("init", "probe", "tune", "report", "env", "schema")
ESCAPE = "\x1b"

WIDE = """
import torch
from torch import nn

def build_model():
    return nn.Linear(1 << 18, 1)

def make_batch(batch_size):  # 1 MiB a sample
    return torch.ones(batch_size, 1 << 18)

def compute_loss(model, batch):
    return model(batch).mean()
"""


@pytest.fixture(scope="session")
def result_schema():
    return jsonschema.Draft202012Validator(result_schema_of_the_package())


SMALLER = ("tune", "config.yaml", "batch_size.max=8", "baseline.batch_size=8", "budget.trials=1", "confirm=off")
LIMITED = ("--memory-limit", "300MiB", "--max")
BRIEF = ("--verify-steps", 5, "--no-throughput")
WORK = {
    "a new task": [("init", "mine"), ("tune", "mine/config.yaml", "budget.trials=9", "--dry-run", "-q")],
    "wide": [("probe", "wide.py", *LIMITED, 999, "--tolerance", 0.1, *BRIEF, "--json", "-o", "out.json")],
    "capped": [("probe", "linear.py", *LIMITED, 7, "-q")],
    "all precisions": [
        ("probe", "linear.py", *LIMITED, 2, "--precision", "all", "--device", "cpu", "--no-throughput", "--json", "-q")
    ],
    "huge": [("probe", "huge.py", "--memory-limit", "100MiB", "--json", "-q")],
    "fresh": [(*SMALLER, "--json", "--fresh"), (*SMALLER, "--json")],
    "environment": [("env", "--device", "cpu", "--json", "-o", "env.json")],
}

ENVIRONMENT = {
    "a new task": {"BATCHTUNE_BUDGET_TRIALS": "7", "BATCHTUNE_SEED": "5"},
    "capped": {
        "BATCHTUNE_BATCH_SIZE_MULTIPLE_OF": "3",
        "BATCHTUNE_BATCH_SIZE_MAX": "5",
        "BATCHTUNE_PRECISION": "[fp32]",
    },
}


@pytest.fixture(scope="module")
def work(tuned, new_quick_cli):
    """What several tests ask about: a function from a name to its folder and what its commands came to."""

    @functools.cache
    def carried_out(name):
        cli = new_quick_cli()
        cli.write("wide.py", WIDE)
        cli.write("huge.py", WIDE.replace("batch_size, 1", "batch_size * 512, 1"))
        if name == "fresh":
            tuned.copy_to(cli)
        return cli, *(cli(*command, environment=ENVIRONMENT.get(name, {})) for command in WORK[name])

    return carried_out


# help and version


def test_the_version_is_printed(cli):
    finished = cli("--version")
    assert (finished.code, finished.out, finished.err) == (0, f"batchtune {batchtune.__version__}\n", "")


def test_help_names_every_command(invoke):
    shown = invoke("--help")
    assert shown.exit_code == 0
    assert all(command in shown.output for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_examples_in_lines_of_their_own_and_the_common_options(invoke, command):
    shown = invoke(command, "--help")
    assert shown.exit_code == 0
    assert f"\n  Examples:\n    batchtune {command}" in shown.output
    assert all(option in shown.output for option in ("--json", "--output", "--quiet", "--verbose", "--debug"))
    assert "[[" not in shown.output


@pytest.mark.parametrize("arguments", [["--help"], ["tune", "--help"], ["--version"]])
def test_help_loads_no_heavy_library(cli, arguments):
    script = (
        "import sys; sys.argv = ['batchtune', *sys.argv[1:]]\n"
        "from batchtune.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('loaded', [name for name in ('torch', 'optuna', 'pandas', 'numpy', 'plotly') if name in sys.modules])"
    )
    finished = cli(*arguments, python=("-c", script))
    assert finished.out.splitlines()[-1] == "loaded []"


@pytest.mark.parametrize("module", ["probe.run", "tune.run", "estimate.run"])
def test_a_command_starts_its_child_without_waiting_for_torch_to_load_twice(cli, module):
    loaded = cli(python=("-c", f"import sys, batchtune.{module}; print('torch' in sys.modules)"))
    assert loaded.out.splitlines()[-1] == "False"


def test_help_takes_little_longer_than_its_libraries(cli):
    told = "\nimport time; print(time.process_time())"
    help_of_ours = (
        "import sys; sys.argv = ['batchtune', '--help']\n"
        "from batchtune.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass"
    )
    scripts = (help_of_ours + told, "import typer, rich" + told)
    rounds = [[float(cli(python=("-c", script)).out.splitlines()[-1]) for script in scripts] for _ in range(3)]
    ours, theirs = (min(seconds) for seconds in zip(*rounds, strict=True))
    assert ours <= 2.5 * theirs


# init


def test_init_writes_a_task_that_tune_accepts(work):
    cli, written, checked = work("a new task")
    assert written.code == 0
    assert "next: batchtune tune mine/config.yaml" in written.out
    assert checked.code == 0, checked.err
    assert yaml.safe_load(checked.out)["name"] == "mine"
    assert not (cli.folder / ".batchtune").exists()


def test_init_refuses_to_overwrite(invoke, tmp_path):
    (tmp_path / "batchtune_task.py").write_text("precious")
    refused = invoke("init", tmp_path)
    assert refused.exit_code == 2
    assert "batchtune_task.py: already there" in refused.stderr
    assert (tmp_path / "batchtune_task.py").read_text() == "precious"
    assert not (tmp_path / "config.yaml").exists()


def test_init_tells_programs_what_it_wrote(invoke, tmp_path):
    written = json.loads(invoke("init", tmp_path, "--json").stdout)["written"]
    assert written == [str(tmp_path / name) for name in ("batchtune_task.py", "config.yaml", "config.schema.json")]


@pytest.mark.parametrize("library", ["pytorch", "lightning", "transformers"])
def test_an_editor_finds_the_schema_beside_the_configuration_that_names_it(invoke, tmp_path, library):
    assert invoke("init", tmp_path, "--from", library).exit_code == 0
    first_line = (tmp_path / "config.yaml").read_text().splitlines()[0]
    schema = tmp_path / first_line.removeprefix("# yaml-language-server: $schema=")
    assert json.loads(schema.read_text()) == json.loads(invoke("schema", "config").stdout)


# probe


def test_probe_finds_what_a_real_memory_limit_holds(work, result_schema):
    cli, finished = work("wide")
    assert finished.code == 0, finished.err
    result_schema.validate(finished.document)
    probe = finished.document["probe"]
    assert probe["limited_by"] == "memory"
    assert 85 < probe["max_batch_size"] < 140  # two batches of 1 MiB a sample, above what libraries take
    assert probe["max_batch_size"] < probe["first_failing_batch_size"] <= 1.25 * probe["max_batch_size"]
    assert probe["verified_in_fresh_process"]
    outcomes = {attempt["batch_size"]: attempt["outcome"] for attempt in probe["attempts"]}
    assert outcomes[probe["max_batch_size"]] == "fit"
    assert outcomes[probe["first_failing_batch_size"]] == "oom"
    assert probe["throughput"] == []
    assert json.loads((cli.folder / "out.json").read_text()) == finished.document
    assert "oom" in finished.err  # progress, all of it on stderr
    assert ESCAPE not in finished.out + finished.err


def test_probe_tells_of_a_loss_that_adds_up_its_batch(quick_cli):
    task = (quick_cli.folder / "linear.py").read_text()
    quick_cli.write("linear.py", task.replace("(model(points), values)", "(model(points), values, reduction='sum')"))
    found = quick_cli("probe", "linear.py", "--device", "cpu", "--max", "8", "--no-throughput", "--json").document[
        "probe"
    ]
    assert found["warnings"][0].startswith("compute_loss adds up the samples of a batch: ")
    assert [each["purpose"] for each in found["attempts"] if each.get("loss_adds_up")] == ["verify"]


def test_probe_keeps_to_the_cap_and_the_multiple(work):
    cli, finished = work("capped")
    assert finished.code == 0
    assert finished.err == ""
    assert finished.out.startswith("6 is the largest micro-batch size that trains\n")
    assert "samples/s" in finished.out
    assert ESCAPE not in finished.out
    kept = cli.result("probe-linear")["probe"]
    assert {attempt["batch_size"] for attempt in kept["attempts"]} <= {3, 6}
    assert kept["limited_by"] == "max"
    assert {point["batch_size"] for point in kept["throughput"]} <= {3, 6}
    assert all(point["samples_per_second"] > 0 for point in kept["throughput"])


def test_probe_of_all_precisions_reports_each(work, result_schema):
    _, finished = work("all precisions")
    result_schema.validate(finished.document)
    assert [probe["precision"] for probe in finished.document["probes"]] == ["fp32", "bf16", "fp16"]
    assert all(probe["max_batch_size"] == 2 for probe in finished.document["probes"])


def test_probe_of_what_cannot_fit_exits_with_4_and_says_what_helps(work, result_schema):
    _, finished = work("huge")
    assert finished.code == 4
    assert "nothing fits within 100 MiB" in finished.err
    assert "a larger --memory-limit" in finished.err
    result_schema.validate(finished.document)
    assert finished.document["status"] == "failed"
    assert finished.document["error"]["exit_code"] == 4
    assert finished.document["probe"]["attempts"][0]["outcome"] == "oom"


# tune


def test_tune_prints_a_valid_document_alone_on_stdout(tuned, result_schema):
    result_schema.validate(tuned.document)
    assert tuned.document["status"] == "complete"
    assert tuned.document["kind"] == "tune"
    assert "searching" in tuned.finished.err
    assert ESCAPE not in tuned.finished.out + tuned.finished.err


def test_tune_recommends_a_configuration_that_ran(tuned):
    found = tuned.document["recommendation"]
    ran = {(trial["batch_size"], trial["learning_rate"]) for trial in tuned.document["trials"]}
    assert (found["global_batch_size"], found["learning_rate"]) in ran
    assert found["global_batch_size"] == found["micro_batch_size"] * found["gradient_accumulation_steps"]
    assert found["micro_batch_size"] <= tuned.document["probe"]["max_batch_size"]


def test_tune_keeps_to_the_number_of_trials_and_confirms_on_fresh_seeds(tuned):
    trials = tuned.document["trials"]
    by_role = {role: [trial for trial in trials if trial["role"] == role] for role in ("baseline", "search", "confirm")}
    assert len(by_role["baseline"]) == 1
    assert 1 <= len(by_role["search"]) <= 4
    assert len(by_role["confirm"]) == 2 * 2  # two seeds for the winner and the baseline
    assert all(trial["evaluation_seconds"] > 0 for trial in trials)
    confirmed_with = {trial["seed"] for trial in by_role["confirm"]}
    assert len(confirmed_with) == 2
    assert confirmed_with.isdisjoint(trial["seed"] for trial in by_role["baseline"] + by_role["search"])


def test_an_argument_goes_over_the_environment_and_that_over_the_file(work):
    _, _, checked = work("a new task")
    resolved = yaml.safe_load(checked.out)
    assert resolved["budget"] == {"run": 10.0, "total": 180.0, "trials": 9}  # file, file, argument over environment
    assert resolved["seed"] == 5  # environment over the default


def test_the_resolved_configuration_is_kept_with_the_run(tuned):
    kept = yaml.safe_load((tuned.cli.run_folder() / "config.yaml").read_text())
    assert kept["baseline"] == {"batch_size": 16, "learning_rate": 0.01, "gradient_clipping": None}
    assert kept["confirm"] == {"seeds": 2, "top": 1}
    assert (tuned.cli.run_folder() / "study.log").stat().st_size > 0


def test_tune_again_gives_the_same_answer_without_another_trial(tuned, quick_cli):
    tuned.copy_to(quick_cli)
    again = quick_cli("tune", "config.yaml", "--json", "-q")
    assert again.code == 0, again.err
    changes_with_time = {"created_at", "task", "environment"}  # the folder is another; free memory varies
    for key in tuned.document.keys() - changes_with_time:
        assert again.document[key] == tuned.document[key], key


def test_fresh_starts_over_and_a_study_without_confirmation_ends_for_good(work):
    _, first, again = work("fresh")
    assert first.code == 0, first.err
    assert [trial["role"] for trial in first.document["trials"]] == ["baseline", "search"]
    assert {trial["batch_size"] for trial in first.document["trials"]} == {8}
    assert "not confirmed" in first.document["recommendation"]["reason"]
    command = first.document["recommendation"]["confirm_command"]
    assert command.startswith("batchtune tune .batchtune/config/config.yaml confirm.seeds=3")
    assert again.document["trials"] == first.document["trials"]


def test_a_study_whose_budget_is_gone_before_the_search_says_so(tuned, quick_cli):
    tuned.copy_to(quick_cli)
    (quick_cli.run_folder() / "study.log").unlink()  # the probe stands, and has taken longer than this
    finished = quick_cli("tune", "config.yaml", "budget.total=1s", "confirm=off", "--json", "-q")
    assert finished.code == 4
    assert finished.document["probe"]["max_batch_size"] > 0
    told = r"was used up before the baseline had shown a target; start again with budget.total=\d+m, whose"
    assert re.search(told, finished.err)


def test_a_budget_without_time_for_the_steps_of_a_single_run_ends_at_the_first_attempt(quick_cli):
    task = (quick_cli.folder / "linear.py").read_text()
    slow = "def compute_loss(model, batch):\n    import time; time.sleep(0.42)\n"
    quick_cli.write("linear.py", task.replace("def compute_loss(model, batch):\n", slow, 1))
    finished = quick_cli("tune", "config.yaml", "budget.total=5s", "budget.run=1s", "--json", "-q")
    assert finished.code == 4
    assert re.search(
        r"a step takes [\d.]+ m?s at the least: budget.total \(5 s\) has no time for a search; "
        r"start again with budget.run=\d+s budget.total=2m",
        finished.err,
    )
    assert len(finished.document["probe"]["attempts"]) == 1


# report


@pytest.fixture
def in_run(tuned, monkeypatch):
    monkeypatch.chdir(tuned.cli.folder)
    return tuned


@pytest.mark.parametrize("which", [[], ["config"], [".batchtune/config"], [".batchtune/config/result.json"]])
def test_report_finds_the_latest_run_a_name_a_folder_or_a_file(in_run, invoke, which):
    shown = invoke("report", *which, "--format", "json")
    assert shown.exit_code == 0
    assert json.loads(shown.stdout) == in_run.document


def test_report_shows_the_table_unless_told_otherwise(in_run, invoke):
    shown, verbose = invoke("report"), invoke("report", "-v")
    assert len(shown.stdout.splitlines()) < 24
    assert "learning rate" in shown.stdout
    assert in_run.document["recommendation"]["reason"] in " ".join(verbose.stdout.split())
    assert ESCAPE not in shown.stdout


def test_report_writes_markdown_and_csv(in_run, invoke, tmp_path):
    assert invoke("report", "--format", "markdown").stdout.startswith("## batchtune tune: config\n")
    csv = invoke("report", "--format", "csv").stdout.splitlines()
    assert len(csv) == 1 + len(in_run.document["trials"])
    assert csv[0].startswith("number,state,role")


@pytest.mark.parametrize("name", ["table", "json", "markdown", "csv", "hf", "lightning", "deepspeed", "env"])
def test_report_writes_every_format_to_a_file(in_run, invoke, tmp_path, name):
    printed = invoke("report", "--format", name).stdout
    assert printed
    written = invoke("report", "--format", name, "-o", tmp_path / "report")
    assert written.exit_code == 0
    assert written.stdout == ""
    text = (tmp_path / "report").read_text()
    assert text == printed if name != "table" else "learning rate" in text


def test_report_gives_a_training_library_what_is_recommended_under_the_names_asked_for(in_run, invoke):
    found = in_run.document["recommendation"]
    renames = ("--set", "model.lr=model.optimizer.lr", "--set", "micro_batch_size=data.init_args.size")
    exported = yaml.safe_load(invoke("report", "--format", "lightning", *renames).stdout)
    assert exported["model"]["optimizer"]["lr"] == found["learning_rate"]
    assert exported["data"]["init_args"]["size"] == found["micro_batch_size"]
    assert exported["trainer"]["accelerator"] == "cpu"
    assert json.loads(invoke("report", "--format", "hf").stdout)["use_cpu"] is True
    deepspeed = invoke("report", "--format", "deepspeed")
    optimizer = json.loads(deepspeed.stdout)["optimizer"]
    assert optimizer["type"] == "AdamW"
    assert (optimizer["params"]["lr"], optimizer["params"]["betas"]) == (found["learning_rate"], [0.9, 0.999])
    assert deepspeed.stderr == ""  # all of it is in the text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--format", "hf", "--set", "rate=lr"), "--set rate=lr: no field 'rate' here; there are per_device_"),
        (("--set", "learning_rate=lr"), "--set learning_rate=lr: not with --format table; fields of hf, lightning"),
        (("--format", "hf", "--log-to", "mlflow"), "--log-to mlflow: not together with --format hf"),
    ],
)
def test_report_refuses_options_that_say_nothing_in_one_line(in_run, invoke, options, message):
    refused = invoke("report", *options)
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"batchtune: {message}")
    assert refused.stderr.count("\n") == 1


def test_an_output_file_that_is_a_link_stays_one(in_run, invoke, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "target").write_text("old")
    assert invoke("report", "--json", "-o", tmp_path / "link").exit_code == 0
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "target").read_text()) == in_run.document


def test_an_output_file_that_is_a_link_to_nothing_yet_stays_one(in_run, invoke, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert invoke("report", "--json", "-o", tmp_path / "link").exit_code == 0
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "target").read_text()) == in_run.document


def test_report_without_a_run_says_how_to_get_one(invoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = invoke("report")
    assert shown.exit_code == 2
    assert "run 'batchtune probe' or 'batchtune tune' first" in shown.stderr


# env and schema


def test_env_describes_the_machine(work):
    cli, finished = work("environment")
    assert finished.code == 0
    facts = json.loads((cli.folder / "env.json").read_text())
    assert facts["batchtune"] == batchtune.__version__
    assert facts["environment"]["torch"]
    assert facts["environment"]["device_memory_bytes"] > 0


@pytest.mark.parametrize("which", ["config", "result"])
def test_schema_prints_a_json_schema(invoke, which):
    schema = json.loads(invoke("schema", which).stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == jsonschema.Draft202012Validator.META_SCHEMA["$id"]


def test_the_schema_of_the_configuration_accepts_the_template_and_no_unknown_key(invoke, tmp_path):
    invoke("init", tmp_path)
    validator = jsonschema.Draft202012Validator(json.loads(invoke("schema", "config").stdout))
    template = yaml.safe_load((tmp_path / "config.yaml").read_text())
    template["baseline"]["learning_rate"] = 1e-3  # PyYAML reads 1e-3 as text; batchtune does not
    assert validator.is_valid(template)
    assert not validator.is_valid(template | {"learning_rte": 1})


# streams


def on_a_terminal(cli, *arguments, code=0, popen=subprocess.Popen, **environment):
    """What a command shows on a terminal of its own, standard error included."""
    leader, follower = pty.openpty()
    shown_there = {"stdout": follower, "stderr": follower, "popen": popen}
    command = cli.start(*arguments, environment={"TERM": "xterm-256color"} | environment, **shown_there)
    os.close(follower)
    shown = b""
    with contextlib.suppress(OSError):  # Linux says so when the other side has gone
        while part := os.read(leader, 65536):
            shown += part
    os.close(leader)
    assert command.process.wait(timeout=60) == code
    return shown.decode()


def test_colours_are_for_terminals_and_no_color_is_honoured(tuned):
    coloured = re.compile(r"\x1b\[[0-9;]*3[0-7]m")
    assert coloured.search(on_a_terminal(tuned.cli, "report"))
    assert not coloured.search(on_a_terminal(tuned.cli, "report", NO_COLOR="1"))


@pytest.mark.parametrize("refused", [("--workers", "99"), ("--warm-start", "none"), ("--storage", "grpc+://h")])
def test_a_dry_run_refuses_what_the_command_would(quick_cli, refused):
    finished = quick_cli("tune", "config.yaml", "--dry-run", *refused)
    assert finished.code == 2
    assert finished.err.count("\n") == 1
    assert refused[1] in finished.err


def test_a_dry_run_says_its_verdict_alone_in_a_terminal(tuned):
    shown = on_a_terminal(tuned.cli, "tune", "config.yaml", "--dry-run")
    assert "nothing is wrong, and nothing was trained" in " ".join(shown.split())
    assert "learning_rate:" not in shown
    assert "learning_rate:" in on_a_terminal(tuned.cli, "tune", "config.yaml", "--dry-run", "-v", popen=forks.Popen)


def test_what_is_to_be_said_of_a_task_and_its_metric_is_said_by_a_dry_run_and_first_by_the_study(quick_cli):
    task = (quick_cli.folder / "linear.py").read_text()
    quick_cli.write(
        "linear.py",
        f"{task}\n"
        "def evaluate(model): return {'margin': float(model.weight.square().sum())}\n"
        "def build_scheduler(optimizer, total_steps): return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)\n",
    )
    odd = ("objective.metric=margin", "objective.kind=best_metric", "objective.target=auto", "device=cpu")
    dry = quick_cli("tune", "config.yaml", *odd, "--dry-run")
    assert "StepLR takes the learning rate below a hundredth within 7 of 1,000 optimizer steps" in dry.err
    assert "margin is minimized, since objective.goal is not set" in " ".join(dry.err.split())
    short = ("budget.trials=1", "confirm=off", "budget.run=200ms", "learning_rate.max=1e-3", "learning_rate.min=5e-4")
    told = quick_cli("tune", "config.yaml", *odd, *short, "--json", "-q").document["warnings"]
    assert told[0].startswith("margin is minimized, since objective.goal is not set")
    assert any(each.startswith("StepLR takes") for each in told[1:])


def test_a_failure_is_told_once_in_a_terminal_and_no_word_is_cut(cli):
    cli.write("huge.py", WIDE.replace("batch_size, 1", "batch_size * 512, 1"))
    limited = ("probe", "huge.py", "--memory-limit", "100MiB", "-q")
    shown = on_a_terminal(cli, *limited, code=4, popen=forks.Popen, COLUMNS="40")
    told = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert "batchtune: nothing fits within 100 MiB:" in told[0]
    assert sum("nothing fits" in line for line in told) == 1
    assert max(map(len, told)) <= 40
    assert "failed" in told


@pytest.mark.parametrize("arguments", [("schema", "result"), ("report", "tune.json")])
def test_a_reader_that_goes_away_is_no_error(cli, arguments):
    cli.write("tune.json", documents.result("tune").to_json())
    reading, writing = os.pipe()
    os.close(reading)
    finished = cli(*arguments, stdout=writing)
    os.close(writing)
    assert (finished.code, finished.err) == (0, "")


def unusual(name):
    """The text of a document with a name that no narrow encoding can write."""
    result = documents.result(name)
    return result.model_copy(update={"name": "modèle 日本"}).to_json()


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "cp437"},
        {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=lambda each: next(iter(each.values())),
)
def test_what_programs_read_is_utf8_whatever_stdout_is(cli, environment):
    cli.write("estimate.json", unusual("estimate"))
    for arguments in [("--json",), ("--format", "html"), ("--format", "markdown")]:
        with (cli.folder / "out").open("wb") as out:
            finished = cli("report", "estimate.json", *arguments, stdout=out, environment=environment)
        assert (finished.code, finished.err) == (0, "")
        assert "modèle 日本" in (cli.folder / "out").read_text(encoding="utf-8")


def test_words_for_people_are_written_as_stdout_can(cli):
    finished = cli("init", "modèle", environment={"PYTHONIOENCODING": "ascii"})
    assert (finished.code, finished.err) == (0, "")
    assert "wrote mod?le/batchtune_task.py" in finished.out


def test_with_json_every_command_prints_its_document_and_writes_it_to_the_file(quick_cli):
    quick_cli.write("tune.json", unusual("tune"))
    commands = [
        ("report", "tune.json"),
        ("env", "--device", "cpu"),
        ("schema", "config"),
        ("init", "mine"),
        ("tune", "config.yaml", "--dry-run", "-q"),
    ]
    for command in commands:
        finished = quick_cli(*command, "--json", "-o", "out.json")
        assert finished.code == 0, finished.err
        assert finished.document == json.loads((quick_cli.folder / "out.json").read_text()), command


@pytest.mark.parametrize(
    "arguments",
    [("--version",), ("--help",), ("report", "tune.json"), ("report", "tune.json", "--json", "-o", "out.json")],
)
def test_a_full_disk_behind_stdout_is_said_in_one_line(cli, arguments):
    cli.write("tune.json", unusual("tune"))
    with Path("/dev/full").open("w") as full:
        finished = cli(*arguments, stdout=full)
    assert finished.code == 2
    assert finished.err.startswith("batchtune: stdout cannot be written: No space left on device; make room")
    assert finished.err.count("\n") == 1
    if "-o" in arguments:
        assert (cli.folder / "out.json").read_text() == (cli.folder / "tune.json").read_text() + "\n"


@pytest.mark.parametrize(("arguments", "code"), [("--version", 0), ("report none", 2)])
def test_closed_streams_are_no_bug(cli, arguments, code):
    command = ["bash", "-c", f"{shlex.quote(sys.executable)} -m batchtune {arguments} >&-"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=cli.folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr.count("\n") == code / 2


def test_a_file_has_no_colours_even_where_they_are_forced(cli):
    cli.write("tune.json", unusual("tune"))
    assert cli("report", "tune.json", "-o", "out.txt", environment={"FORCE_COLOR": "1"}).code == 0
    assert ESCAPE not in (cli.folder / "out.txt").read_text()


# a bug of ours


def test_a_bug_is_said_in_one_line_and_shown_with_debug(invoke, monkeypatch):
    def broken(device):
        raise RuntimeError("no such thing")

    monkeypatch.setattr("batchtune.api.environment", broken)
    short = invoke("env")
    assert short.exit_code == 1
    assert short.stderr.startswith("batchtune: this is a bug in batchtune: RuntimeError: no such thing\n")
    assert "Traceback" not in short.stderr
    assert "Traceback" in invoke("env", "--debug").stderr


# interruptions

SLOW = """
def compute_loss(model, batch):
    import time
    points, values = batch
    if len(points) > 1:
        time.sleep(600)
    return nn.functional.mse_loss(model(points), values)
"""


def test_ctrl_c_while_the_command_line_is_loaded_ends_as_any_other(monkeypatch, capsys):
    class CtrlC:
        def find_spec(self, name, *_):
            if name == "batchtune.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "batchtune.cli")
    monkeypatch.setattr(sys, "meta_path", [CtrlC(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("number", "popen"),
    [(signal.SIGINT, subprocess.Popen), (signal.SIGTERM, forks.Popen)],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_an_interrupted_probe_prints_what_it_knows_and_leaves_no_process(cli, result_schema, all_gone, number, popen):
    cli.write("slow.py", (cli.folder / "linear.py").read_text() + SLOW)
    command = cli.start("probe", "slow.py", "--json", popen=popen)
    command.wait_for("  1  fit")
    family = command.family()
    command.process.send_signal(number)
    finished = command.finish()
    assert finished.code == 130
    assert "interrupted; what was measured until then is in the result" in finished.err
    assert "Traceback" not in finished.err
    result_schema.validate(finished.document)
    assert finished.document["status"] == "interrupted"
    assert len(finished.document["probe"]["attempts"]) == 1
    assert finished.document == cli.result("probe-slow")
    assert len(family) > 1
    assert all_gone(family)


@pytest.mark.parametrize(
    ("number", "form", "popen"),
    [(signal.SIGINT, "--json", forks.Popen), (signal.SIGTERM, "-v", subprocess.Popen)],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_an_interrupted_tune_says_how_it_goes_on_and_leaves_no_process(
    tuned, cli, result_schema, all_gone, number, form, popen
):
    tuned.copy_to(cli)
    command = cli.start("tune", "config.yaml", "budget.trials=1000", "budget.total=1h", form, popen=popen)
    command.wait_for("  search  ")
    family = command.family()
    command.process.send_signal(number)
    finished = command.finish()
    assert finished.code == 130
    assert "the same command goes on from here" in finished.err
    assert "Traceback" not in finished.err
    kept = cli.result()
    result_schema.validate(kept)
    assert kept["status"] == "interrupted"
    over, before = (
        [trial for trial in document["trials"] if trial["state"] in {"complete", "pruned"}]
        for document in (kept, tuned.document)
    )
    assert over[: len(before)] == before
    assert len(over) > len(before)
    if form == "--json":
        assert finished.document == kept
    else:
        assert finished.out == ""
        assert finished.err.count("the same command goes on from here") == 1
    assert len(family) > 1
    assert all_gone(family)


def test_a_finished_study_carries_what_its_surface_predicts(tuned):
    document = tuned.document
    ended = [trial for trial in document["trials"] if trial["state"] in {"complete", "pruned"}]
    predicted = document["landscape"]
    assert predicted["runs"] == len(ended)
    assert set(predicted["batch_sizes"]) >= {trial["batch_size"] for trial in ended}
    assert predicted["learning_rates"][0] <= min(trial["learning_rate"] for trial in ended)
