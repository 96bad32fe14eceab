"""What a study is compared with where no file says it."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import opened

import batchtune
from batchtune.config.load import load_config
from batchtune.config.options import check_options
from batchtune.config.schema import Config
from batchtune.document import ProbeResult
from batchtune.errors import UsageError
from batchtune.observer import Observer
from batchtune.run_folder import RunFolder
from batchtune.tune.plan import configure as configuring
from batchtune.tune.plan.configure import identity_of
from batchtune.tune.plan.open_task import as_probed
from batchtune.tune.plan.study_probe import study_probe


def configure(config, *, save_config=None, **options):
    check_options(batchtune.tune, options)
    return configuring.configure(config, options, Observer(), save_config)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text("BATCH_SIZE = 8\n")
    Path("config.yaml").write_text("task: model.py\nbudget: {total: 1h}\nbaseline: {batch_size: 8}\n")


def test_options_stand_for_keys_and_lie_over_a_file_or_a_task():
    options = {"batch_size": 64, "lr": "3e-4", "budget": "10m", "target": "top1 > 0.9"}
    for source in ("model.py", "config.yaml"):
        found = configure(source, **options, overrides=["seed=3"])
        assert (found.baseline.batch_size, found.baseline.learning_rate) == (64, 3e-4)
        assert (found.budget.total, found.budget.given_total, found.seed) == (600.0, 600.0, 3)
        assert (found.objective.metric, found.objective.goal, found.objective.target) == ("top1", "maximize", 0.9)


def test_where_runs_train_is_an_option_of_the_function_as_of_the_command():
    url = "postgresql+psycopg://tester@db:5432/studies"
    assert configure("config.yaml", workers="auto", storage=url).storage == url
    found = configure("config.yaml", workers="3", executor="ray", ray_address="auto")
    assert (found.workers, found.executor, found.ray.address) == (3, "ray", "auto")
    url = "sqlite:////tmp/a: my study #1.db"
    unset = configure("config.yaml", workers="", storage=url)  # an empty one is of a variable that is not set
    assert (unset.workers, unset.storage) == (1, url)


def test_a_run_folder_that_was_copied_changes_no_other():
    folder = RunFolder("a", Path("runs"))
    folder.path.mkdir(parents=True)
    folder.keep_identity({"task": "model.py"})
    folder.write("config.yaml", Path("config.yaml").read_text() + "name: a\n")
    shutil.copytree("runs/a", "runs/b")
    for source in ("runs/b", "runs/b/config.yaml"):
        with pytest.raises(UsageError, match=r"is of the run 'a', .*, or add name=b for a study of its own"):
            configure(source)
    assert configure("runs/a").name == "a"
    assert configure("runs/b", overrides=["name=b"]).name == "b"


@pytest.mark.parametrize(
    ("told", "as_typed"),
    [
        (
            "objective.metric 'top1' is not among what evaluate() returns: acc; choose one: objective.metric=acc",
            "--target top1 > 0.9: 'top1' is not among what evaluate() returns: acc; choose one: --target \"acc > 0.9\"",
        ),
        ("objective.metric 'top1': m.py has no evaluate()", "--target top1 > 0.9: m.py has no evaluate()"),
        ("batch_size.max 3: too small", "batch_size.max 3: too small"),
    ],
)
def test_what_is_said_of_a_metric_is_said_in_the_words_of_who_typed_its_target(told, as_typed):
    assert configure("config.yaml", target=" top1 > 0.9").objective.as_typed(told) == as_typed
    keys = ["objective.metric=top1", "objective.goal=maximize"]
    assert configure("config.yaml", overrides=keys).objective.as_typed(told) == told
    assert configure("config.yaml", target="f1>0.9", overrides=keys).objective.as_typed(told) == told


@pytest.mark.parametrize(
    ("metric", "overrides", "also"),
    [("acc", [], " objective.goal=maximize"), ("mse", [], ""), ("acc", ["objective.goal=minimize"], "")],
)
def test_a_metric_is_proposed_with_the_goal_that_it_needs(metric, overrides, also):
    told = f"objective.metric 'val_loss' is not among what evaluate() returns; choose one: objective.metric={metric}"
    assert configure("config.yaml", overrides=overrides).objective.as_typed(told) == told + also


def test_a_key_and_a_value_win_over_an_option():
    assert configure("model.py", batch_size=64, lr=1.0, overrides=["baseline.batch_size=16"]).baseline.batch_size == 16


@pytest.mark.parametrize(("target", "goal"), [("val_loss<0.3", "minimize"), ("val_loss<=.3", "minimize")])
def test_a_target_says_metric_direction_and_value(target, goal):
    found = configure("config.yaml", target=target).objective
    assert (found.metric, found.goal, found.target) == ("val_loss", goal, 0.3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "val_loss"}, "--target val_loss: write '--target \"val_loss<0.3\"'"),
        ({"target": 0.3}, "--target 0.3: write"),
        ({"batch_size": 0}, "--batch-size 0: must be at least 1"),
        ({"lr": "fast"}, "--lr fast: must be a number greater than 0, for example 1e-3"),
        ({"lr": 0.0}, "--lr 0.0: must be a number"),
        ({"budget": "soon"}, "--budget: 'soon' is not a duration"),
        ({"workers": "all"}, "--workers all: write a number from 1 up, or auto: as many as there are devices"),
        ({"workers": 0}, "--workers 0: must be at least 1"),
        ({"workers": 1.5}, "--workers 1.5: must be an int, not a float"),
        ({"executor": "slurm"}, "--executor slurm: unknown; use local or ray"),
        ({"storage": 5432}, "--storage 5432: must be a text, not an int"),
        ({"strategy": "fsdp"}, "'ranks.strategy=fsdp': ranks: strategy fsdp: there is nothing to share on one rank"),
        ({"save_config": "missing/tune.yaml"}, "--save-config missing/tune.yaml: cannot be written: No such file"),
    ],
)
def test_what_an_option_cannot_be_is_told_with_what_to_type(options, words):
    with pytest.raises(UsageError) as raised:
        configure("config.yaml", **options)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("given", "file"),
    [("config.yaml", "../{}/config.yaml"), (".", "config.yaml"), ("model.py", "model.py"), ("config.yaml", "model.py")],
)
def test_what_a_study_is_read_from_is_not_written_over(given, file):
    before = Path(file.format(Path.cwd().name)).read_text()
    with pytest.raises(
        UsageError, match=r"^--save-config .*: is a file of code, or what this study is read from; name another that"
    ):
        configure(given, batch_size=32, lr=1e-3, save_config=file.format(Path.cwd().name))
    assert Path(file.format(Path.cwd().name)).read_text() == before


def test_what_is_saved_goes_on_with_the_same_study():
    found = configure("model.py", batch_size=64, lr=1e-3, target="val_loss<0.3", save_config="tune.yaml")
    again = load_config("tune.yaml")
    assert (again.name, identity_of(again)) == (found.name, identity_of(found))
    assert again.budget.given_total is None
    assert Path("tune.yaml").read_text().startswith("# batchtune tune FILE")


def test_a_record_is_not_laid_over():
    with pytest.raises(UsageError, match="a Config is complete"):
        configure(load_config("config.yaml"), batch_size=64)


def test_an_attempt_that_raised_before_is_made_again_since_only_a_child_knows_its_frames_and_whether_fp32_helps():
    config = Config(task="model.py", baseline={"batch_size": 8, "learning_rate": 1e-3})
    kept = {"batch_size": 8, "precision": "fp32", "memory_limit_bytes": 900, "purpose": "search"}
    earlier = [kept | {"outcome": outcome} for outcome in ("fit", "user_error", "oom")]
    worker = SimpleNamespace(start=opened)
    found = study_probe(config, opened(), worker, Observer(), earlier)
    assert [each.outcome for each in found.attempts] == ["fit", "oom"]


def test_the_probe_of_a_study_knows_what_each_rank_trains_with_today():
    baseline = {"batch_size": 64, "learning_rate": 1e-3}
    config = Config(task="model.py", baseline=baseline, ranks={"per_trial": 2})
    found = study_probe(config, opened(), SimpleNamespace(start=opened), Observer(), [])
    assert found._options.of_today == 32


@pytest.mark.parametrize("given", ["auto", "bf16"])
def test_a_study_goes_on_in_the_precision_that_an_earlier_start_or_another_machine_was_left_with(given):
    config = Config(task="model.py", baseline={"batch_size": 8, "learning_rate": 1e-3}, precision=given)
    here = opened(precision=(("bf16", "asked for"),))
    probe = ProbeResult(precision="fp32", warnings=["fp32 and not bf16, since no"])
    found = as_probed(here, probe, config)
    assert (found.precision[0][0], found.instead) == (
        ("fp32", "fp32 and not bf16, since no") if given == "auto" else ("bf16", "")
    )
    assert as_probed(here, probe.model_copy(update={"precision": "bf16"}), config) == here
