"""The configuration's keys, their types and their contradictions."""

import jsonschema
import pytest
import yaml
from pydantic import ValidationError

from batchtune.config.checks import parse_bytes, parse_seconds
from batchtune.config.schema import Baseline, Config, Objective, config_schema, known_keys
from batchtune.config.yaml_values import parse_yaml
from batchtune.tune.plan.open_task import multiple_of

EXAMPLE = """
task: model.py
name: digits
device: cuda:0
precision: [bf16, fp32]
memory: {margin: 0.1, limit: 20GiB}
batch_size: {min: 8, max: 512, multiple_of: 8}
learning_rate: {min: 1e-5, max: 1.0}
space: {weight_decay: {min: 1e-4, max: 0.1, log: true}, nesterov: {choices: [true, false]}}
baseline: {batch_size: 32, learning_rate: 1e-3}
objective: {kind: time_to_target, metric: accuracy, goal: maximize, target: 0.97}
budget: {run: 60s, total: 10m, trials: 64}
evaluate_every: 1.5s
confirm: {seeds: 3, top: 2}
seed: 7
storage: postgresql+psycopg://host/studies
"""


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("1.5m", 90),
        ("2 h", 7200),
        ("250ms", 0.25),
        ("1e-1s", 0.1),
        ("1D", 86400),
        ("3min", 180),
    ],
)
def test_durations_are_read_as_people_write_them(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "5 parsecs", "-5s", "1.2.3s", "s", "1,5s", "..s", "infs", "m5"])
def test_what_is_no_duration_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="is not a duration; write 90s, 10m or 1h"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("500000000", 500000000),
        ("500 B", 500),
        ("24GB", 24 * 10**9),
        ("20GiB", 20 * 2**30),
        ("0.5 mib", 2**19),
        ("2k", 2000),
        ("1TiB", 2**40),
    ],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("value", ["20", 20, " 500 "])
def test_a_size_too_small_to_mean_bytes_is_asked_for_its_unit(value):
    with pytest.raises(ValueError, match=r"bytes, too few to train in; write the unit: (20|500)GiB or (20|500)MiB"):
        parse_bytes(value)


@pytest.mark.parametrize("text", ["", "much", "5 gallons", "-5GB", "1..2GB", "GiB", "9" * 400 + "GB", "1e9"])
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="is not a size; write 20GiB, 24GB or 500MiB"):
        parse_bytes(text)


def test_numbers_are_left_to_the_validator():
    assert parse_seconds(1.5) == 1.5
    assert parse_bytes(None) is None


def test_a_task_is_all_that_must_be_given():
    config = Config(task="model.py")
    assert (config.device, config.precision, config.batch_size.max, config.storage) == ("auto", "auto", "auto", None)
    assert (config.budget.run, config.budget.total) == (60.0, 600.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": {"min": 64, "max": 32}}, "min 64 is greater than max 32"),
        ({"batch_size": {"max": 4, "multiple_of": 8}}, "no multiple of multiple_of 8 is within max 4"),
        (
            {"batch_size": {"min": 17, "max": 31, "multiple_of": 16}},
            "no multiple of multiple_of 16 is from min 17 to max 31",
        ),
        ({"batch_size": {"min": 0}}, "greater than or equal to 1"),
        ({"batch_size": {"min": True}}, "should be a number, not true"),
        ({"batch_size": {"max": 1.5}}, "valid integer"),
        ({"learning_rate": {"min": 1.0, "max": 0.1}}, "min 1 is greater than max 0.1"),
        ({"learning_rate": {"max": float("inf")}}, "finite"),
        ({"learning_rate": {"min": 0}}, "greater than 0"),
        ({"budget": {"run": "10m", "total": "1m"}}, "run 600 s is longer than total 60 s; raise total"),
        ({"budget": {"run": "0s"}}, "greater than 0"),
        ({"budget": {"trials": 0}}, "greater than or equal to 1"),
        ({"memory": {"margin": 1.0}}, "less than 1"),
        ({"memory": {"limit": "0GiB"}}, "greater than 0"),
        ({"precision": "bf61"}, "'bf16'"),
        ({"precision": []}, "at least 1 item"),
        ({"precision": ["bf16", "bf16"]}, "each precision once"),
        ({"device": "GPU 0"}, "'GPU 0' names no device; use auto, cpu, cuda, cuda:0 or mps"),
        ({"name": "../escape"}, "cannot name a run folder"),
        ({"name": "a" * 101}, "cannot name a run folder"),
        ({"objective": {"metric": "val_accuracy"}}, "write objective.goal=maximize"),
        ({"objective": {"target": float("nan")}}, "finite"),
        ({"objective": {"metric": ""}}, "at least 1 character"),
        ({"seed": -1}, "greater than or equal to 0"),
        ({"seed": True}, "should be a number, not true"),
        ({"confirm": 3}, "valid dictionary"),
        ({"nonsense": 1}, "Extra inputs are not permitted"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, words):
    with pytest.raises(ValidationError) as raised:
        Config.model_validate({"task": "model.py"} | settings)
    assert words in str(raised.value)


@pytest.mark.parametrize("spelled", ["off", "no", False])
def test_off_means_no_confirmation_and_no_storage(spelled):
    config = Config.model_validate(
        {"task": "m.py", "confirm": spelled, "storage": spelled, "memory": {"limit": spelled}}
    )
    assert (config.confirm.seeds, config.storage, config.memory.limit) == (0, None, None)


@pytest.mark.parametrize("spelled", ["on", "yes", True])
def test_on_means_the_usual_confirmation(spelled):
    assert Config.model_validate({"task": "m.py", "confirm": spelled}).confirm == Config(task="m.py").confirm


@pytest.mark.parametrize("text", [EXAMPLE, "task: m.py", "{task: m.py, confirm: off, name: naïve-0, storage: ~}"])
def test_the_yaml_of_a_configuration_loads_back_to_the_same_record(text):
    text = text.replace("naïve", "naive")
    config = Config.model_validate(parse_yaml(text)[0])
    assert Config.model_validate(parse_yaml(config.to_yaml())[0]) == config
    assert Config.model_validate(yaml.safe_load(config.to_yaml())) == config


def test_the_schema_accepts_what_people_write():
    schema = config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(parse_yaml(EXAMPLE)[0], schema, jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    "wrong", ["batch_sise: 3", "budget: {run: -5}", "precision: bf61", "objective: {goal: up}", "batch_size: {min: 0}"]
)
def test_the_schema_refuses_what_the_configuration_refuses(wrong):
    document = parse_yaml(f"task: model.py\n{wrong}")[0]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, config_schema(), jsonschema.Draft202012Validator)
    with pytest.raises(ValidationError):
        Config.model_validate(document)


def test_the_known_keys_are_sections_and_leaves():
    keys = set(known_keys())
    assert {"task", "budget", "budget.total", "confirm.seeds", "memory.limit", "gradient_clipping.norm"} <= keys


def test_the_password_of_a_storage_is_kept_and_not_shown():
    config = Config(task="model.py", storage="mysql://you:secret@host/studies")
    assert yaml.safe_load(config.to_yaml())["storage"] == "mysql://you:***@host/studies"
    assert config.storage == "mysql://you:secret@host/studies"


@pytest.mark.parametrize(
    "name",
    [
        "../../x",
        "..",
        ".",
        "/etc",
        "a/b",
        "a\\b",
        "C:x",
        "\0",
        "a\0b",
        "a" * 101,
        "CON",
        "nul",
        "aux.txt",
        "Com1",
        "a.",
        " a",
        "-a",
        "ü",
    ],
)
def test_a_name_that_could_leave_the_run_folder_or_is_none_elsewhere_is_refused(name):
    with pytest.raises(ValidationError, match="cannot name a run folder"):
        Config(task="model.py", name=name)


@pytest.mark.parametrize("name", ["digits", "a" * 100, "console", "nul-1", "1", "a.b_c-d", "com10"])
def test_a_name_of_letters_digits_dots_and_dashes_is_taken(name):
    assert Config(task="model.py", name=name).name == name


@pytest.mark.parametrize("task", ["a\0.py", "a\nb.py", "\x1b[31m.py"])
def test_a_task_whose_name_cannot_be_shown_is_refused(task):
    with pytest.raises(ValidationError, match="cannot name a task"):
        Config(task=task)


@pytest.mark.parametrize("workers", [2, "auto"])
def test_sqlite_is_for_one_worker(workers):
    assert Config(task="model.py", storage="sqlite:///study.db").workers == 1
    assert Config(task="model.py", workers=workers).storage is None
    with pytest.raises(ValidationError, match="SQLite is for one worker"):
        Config(task="model.py", workers=workers, storage="sqlite:///study.db")


def test_a_fixed_global_batch_is_that_of_the_baseline_too():
    config = Config(task="model.py", batch_size={"global": 512}, baseline={"learning_rate": 0.1})
    assert config.baseline == Baseline(batch_size=512, learning_rate=0.1)
    assert Config(task="model.py", batch_size={"global": 512}).baseline.batch_size == 512
    assert Config(**yaml.safe_load(config.to_yaml())) == config
    assert "global: 512" in config.to_yaml()
    assert "batch_size.global" in set(known_keys())


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"batch_size": {"global": 512, "max": 256}}, "global 512 fixes the batch size, so there is no max of it"),
        ({"batch_size": {"global": 512, "min": 2, "multiple_of": 8}}, "there is no min, multiple_of of it"),
        ({"batch_size": {"global": 512}, "baseline": {"batch_size": 32}}, "batch_size 32 is not batch_size.global 512"),
        ({"batch_size": {"global": 0}}, "greater than or equal to 1"),
        ({"space": {"decay": {"min": 1.0}}}, "should have min and max, or choices"),
        ({"space": {"decay": {"min": 1.0, "max": 0.5}}}, "min 1 is not less than max 0.5"),
        ({"space": {"decay": {"min": 0.0, "max": 0.5, "log": True}}}, "min 0 has no logarithm"),
        ({"space": {"decay": {"min": 0.0, "choices": [1]}}}, "has choices and a range"),
        ({"space": {"decay": {"choices": [1, 2, 1]}}}, "each choice once"),
        ({"space": {"decay": {"choices": []}}}, "at least 1 item"),
        ({"space": {"lr": {"choices": [1]}}}, "'lr' is searched already"),
        ({"gradient_clipping": {}}, "should have either norm or value"),
        ({"gradient_clipping": {"norm": 1.0, "value": 0.5}}, "should have either norm or value"),
        ({"gradient_clipping": {"norm": 0.0}}, "greater than 0"),
        ({"gradient_clipping": {"value": {"choices": [-1, 2]}}}, r"choices are numbers from 0 \(none\) up"),
        ({"gradient_clipping": {"norm": {"choices": [True, 2]}}}, r"choices are numbers from 0 \(none\) up"),
        ({"gradient_clipping": {"norm": {"min": 0.0, "max": 1.0}}}, "min 0 clips everything away"),
        (
            {"gradient_clipping": {"norm": {"min": 0.1, "max": 1.0}}, "baseline": {"gradient_clipping": 0}},
            "gradient_clipping 0: a range has no place for what you run today",
        ),
        ({"baseline": {"gradient_clipping": 1.0}}, "is for a study that searches it; write it outside of baseline"),
        ({"space": {"weight decay": {"choices": [1]}}}, "'weight decay' cannot name an argument of build_optimizer"),
    ],
)
def test_contradictions_of_fixed_batch_and_further_arguments_are_named(sections, told):
    with pytest.raises(ValidationError, match=told):
        Config(task="model.py", **sections)


def test_choices_keep_their_kinds():
    found = Config(task="model.py", space={"kind": {"choices": [True, 1, 0.5, "a"]}}).space["kind"].choices
    assert [type(choice) for choice in found] == [bool, int, float, str]


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"ranks": {"per_trial": 3}}, "baseline.batch_size 32 cannot be split among 3 ranks; use a multiple of it"),
        ({"batch_size": {"global": 10}, "ranks": {"per_trial": 4}}, "batch_size.global 10 cannot be split among 4"),
        ({"batch_size": {"min": 9, "max": 11}, "ranks": {"per_trial": 4}}, "no multiple of 4 is from batch_size.min 9"),
        (
            {"batch_size": {"max": 10, "multiple_of": 6}, "ranks": {"per_trial": 4}},
            "no multiple of 12 is from batch_size.min 1 to batch_size.max 10, which 4 ranks could split",
        ),
        (
            {"executor": "ray", "ray": {"num_gpus": 0.5}, "ranks": {"per_trial": 2}},
            "per_trial 2: ranks need whole GPUs, so remove ray.num_gpus 0.5",
        ),
        ({"world_size": 4, "ranks": {"per_trial": 2}}, "per_trial 2: world_size is for runs on one device"),
        ({"ranks": {"per_trial": "auto", "strategy": "fsdp"}}, "strategy fsdp: there is nothing to share on one rank"),
        ({"executor": "ray", "ranks": {"per_trial": "auto"}}, "per_trial auto: groups of 2, 4, 8 are of this machine"),
        ({"ranks": {"strategy": ["ddp", "fsdp"]}}, "strategy ddp, fsdp: there is nothing to share on one rank"),
        ({"ranks": {"per_trial": 2, "strategy": ["ddp", "ddp"]}}, "ddp, ddp: each strategy once"),
        ({"ranks": {"strategy": "fsdp"}}, "strategy fsdp: there is nothing to share on one rank; add per_trial"),
    ],
)
def test_ranks_that_cannot_train_a_run_as_one_are_refused(sections, told):
    with pytest.raises(ValidationError, match=told):
        Config.model_validate({"task": "model.py"} | sections)


def test_with_ranks_auto_each_run_trains_on_one():
    ranks = Config.model_validate({"task": "m.py", "ranks": {"per_trial": "auto"}}).ranks
    assert (ranks.per_trial, ranks.of_each) == ("auto", 1)


def test_ranks_train_sizes_that_all_of_them_share():
    found = Config.model_validate(
        {
            "task": "model.py",
            "batch_size": {"max": 96, "multiple_of": 6},
            "ranks": {"per_trial": 4, "strategy": "fsdp", "nodes": 1},
        }
    )
    assert multiple_of(found) == 12


@pytest.mark.parametrize(
    "metric",
    [
        "psnr",
        "val_ssim",
        "dice",
        "miou",
        "rougeL",
        "precision",
        "mean_reward",
        "acc_loss",
        "mean_return",
        "exact",
        "r2",
        "val/r2",
        "top1",
        "top_5",
        "hits@10",
        "mrr",
        "ndcg@10",
        "mean_ndcg",
        "mcc",
        "kappa",
        "pearson",
        "corr",
    ],
)
def test_a_metric_that_looks_like_one_to_maximize_needs_its_goal(metric):
    with pytest.raises(ValueError, match="looks like one to maximize"):
        Objective(metric=metric)
    assert Objective(metric=metric, goal="maximize").goal == "maximize"


@pytest.mark.parametrize(
    "metric",
    [
        "val_loss",
        "dice_loss",
        "ssim_loss",
        "iou_loss",
        "indices_off",
        "previous_error",
        "perplexity",
        "inexact",
        "corr_loss",
        "stop1",
        "white",
        "r2d2",
        "correctness_error",
        "top1_error",
        "val_top5_err",
        "decorrelation",
        "kappa_nll",
    ],
)
def test_a_metric_that_looks_like_a_loss_is_minimized(metric):
    assert Objective(metric=metric).goal == "minimize"
