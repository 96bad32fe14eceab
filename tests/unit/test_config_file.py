"""YAML, environment and command line become one checked record, or every problem at once."""

from pathlib import Path

import pytest

import batchtune
from batchtune.config.load import config_of_task, load_config
from batchtune.config.options import options_of, with_variables
from batchtune.config.schema import Baseline, Config
from batchtune.errors import UsageError
from batchtune.task.spec import split_spec


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def from_text(text: str, *overrides: str, **environment: str) -> Config:
        Path("config.yaml").write_text(text, encoding="utf-8")
        return load_config("config.yaml", overrides, environment)

    return from_text


@pytest.fixture
def problems(load):
    def of(text: str, *overrides: str, **environment: str) -> list[str]:
        with pytest.raises(UsageError) as raised:
            load(text, *overrides, **environment)
        assert raised.value.exit_code == 2
        return str(raised.value).split("\n")

    return of


def test_numbers_are_read_as_people_spell_them(load):
    config = load("task: model.py\nlearning_rate: {min: 1e-5, max: 1E-1}\nbudget: {run: 1e2, total: 10m}\nconfirm: off")
    assert (config.learning_rate.min, config.learning_rate.max) == (1e-5, 0.1)
    assert (config.budget.run, config.budget.total, config.confirm.seeds) == (100.0, 600.0, 0)


def test_the_task_is_found_beside_the_file(load, tmp_path):
    assert load("task: model.py").task == str(tmp_path / "model.py")
    assert load("task: sub/model.py:Task").task == str(tmp_path / "sub" / "model.py:Task")


@pytest.mark.parametrize("name", ["package.module", "package.module:attribute", "module:Class.make"])
def test_a_task_that_is_a_module_keeps_its_name(load, name):
    assert load(f"task: {name}").task == name


def test_the_run_is_named_by_the_file_or_by_its_folder(load, tmp_path):
    assert load("task: model.py").name == tmp_path.name
    assert load("task: model.py\nname: mine").name == "mine"
    (tmp_path / "my study (2).yaml").write_text("task: model.py")
    assert load_config(tmp_path / "my study (2).yaml", environment={}).name == "my-study-2"
    for stem, name in {"ü": "run", "con": "run-con", "x" * 240: "x" * 90}.items():
        (tmp_path / f"{stem}.yaml").write_text("task: model.py")
        assert load_config(tmp_path / f"{stem}.yaml", environment={}).name == name


class TestPrecedence:
    def test_an_argument_wins_over_the_environment_and_that_over_the_file(self, load):
        text = "task: model.py\nbudget: {total: 1h, run: 1m}\nseed: 1"
        assert load(text).budget.total == 3600
        assert load(text, BATCHTUNE_BUDGET_TOTAL="2h").budget.total == 7200
        config = load(text, "budget.total=3h", BATCHTUNE_BUDGET_TOTAL="2h", BATCHTUNE_SEED="5")
        assert (config.budget.total, config.budget.run, config.seed) == (10800, 60, 5)

    def test_the_last_argument_wins(self, load):
        assert load("task: model.py", "seed=1", "seed=2").seed == 2

    def test_a_whole_section_can_be_given(self, load):
        config = load("task: model.py\nbudget: {run: 1m, total: 1h}", "budget={total: 5m}")
        assert (config.budget.run, config.budget.total) == (60, 300)

    def test_a_section_switched_off_can_be_filled_again(self, load):
        assert load("task: model.py\nconfirm: off", "confirm.seeds=2").confirm.seeds == 2

    def test_lists_and_spaces_are_yaml_on_the_command_line_too(self, load):
        assert load("task: model.py", " precision = [bf16, fp32]").precision == ["bf16", "fp32"]

    def test_the_task_may_come_from_the_command_line(self, load, tmp_path):
        assert load("seed: 1", "task=other.py").task == str(tmp_path / "other.py")

    def test_an_empty_variable_is_as_good_as_none(self, load):
        assert load("task: model.py\nseed: 1", BATCHTUNE_BUDGET_TOTAL="", BATCHTUNE_SEED=" ").seed == 1

    def test_a_variable_that_is_nearly_one_is_told_and_no_other(self, load):
        with pytest.warns(UserWarning, match="TOTL is not read; did you mean BATCHTUNE_BUDGET_TOTAL") as told:
            load("task: m.py", BATCHTUNE_BUDGET_TOTL="5m", BATCHTUNE_BUDGET_TOTAL="6m", BATCHTUNE_CI_FOLDER="x")
        assert len(told) == 1

    def test_the_process_environment_is_the_default(self, tmp_path, monkeypatch):
        monkeypatch.setenv("BATCHTUNE_LEARNING_RATE_MAX", "1e-2")
        (tmp_path / "config.yaml").write_text("task: model.py")
        assert load_config(tmp_path / "config.yaml").learning_rate.max == 0.01


SILENT = dict.fromkeys(options_of(batchtune.probe))
"""A command line of `probe` that gives no option."""


@pytest.mark.parametrize(
    ("variable", "text", "option", "value"),
    [
        ("BATCHTUNE_BATCH_SIZE_MAX", "auto", "max", None),
        ("BATCHTUNE_BATCH_SIZE_MAX", "64", "max", 64),
        ("BATCHTUNE_BATCH_SIZE_MAX", " ", "max", None),
        ("BATCHTUNE_BATCH_SIZE_MULTIPLE_OF", "auto", "multiple_of", 1),
        ("BATCHTUNE_PRECISION", "[bf16, fp32]", "precision", ("bf16", "fp32")),
        ("BATCHTUNE_PRECISION", "all", "precision", ("all",)),
        ("BATCHTUNE_PRECISION", "", "precision", "auto"),
        ("BATCHTUNE_MEMORY_LIMIT", "off", "memory_limit", None),
        ("BATCHTUNE_MEMORY_LIMIT", "2GiB", "memory_limit", 2**31),
        ("BATCHTUNE_MEMORY_MARGIN", "0", "margin", 0.0),
        ("BATCHTUNE_DEVICE", "cuda:1", "device", "cuda:1"),
    ],
)
def test_probe_reads_variables_as_the_configuration_does(monkeypatch, variable, text, option, value):
    monkeypatch.setenv(variable, text)
    assert with_variables(batchtune.probe, SILENT)[option] == value


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("BATCHTUNE_MEMORY_MARGIN", "2", "BATCHTUNE_MEMORY_MARGIN 2: is a share: at least 0 and less than 1"),
        ("BATCHTUNE_MEMORY_LIMIT", "0", "BATCHTUNE_MEMORY_LIMIT 0: must be more than 0 bytes"),
        ("BATCHTUNE_PRECISION", "[", "BATCHTUNE_PRECISION: not valid YAML"),
    ],
)
def test_probe_names_the_variable_that_is_wrong(monkeypatch, variable, text, words):
    monkeypatch.setenv(variable, text)
    with pytest.raises(UsageError, match=f"^{words}"):
        with_variables(batchtune.probe, SILENT)
    option = next(name for name, each in options_of(batchtune.probe).items() if each.variable == variable)
    assert with_variables(batchtune.probe, SILENT | {option: 0.1})[option] == 0.1


class TestProblems:
    def test_all_of_them_are_told_at_once_with_file_and_line(self, problems):
        text = """\
            learning_rte: {min: 1e-4}
            batch_size:
              min: 64
              max: 32
            budget:
              run: soon
              trials: many
            objective: {gaol: maximize, metric: val_loss}
            precision: bf61
            memory:
            device: GPU 0
        """
        found = problems("\n".join(line[12:] for line in text.splitlines()))
        expected = [
            "config.yaml:1: 'task' is missing; add 'task: model.py'",
            "config.yaml:1: unknown key 'learning_rte'. Did you mean 'learning_rate'?",
            "config.yaml:2: batch_size: min 64 is greater than max 32; swap them or raise max",
            "config.yaml:6: budget.run: 'soon' is not a duration; write 90s, 10m or 1h",
            "config.yaml:7: budget.trials: should be a valid integer",
            "config.yaml:8: unknown key 'objective.gaol'. Did you mean 'objective.goal'?",
            "config.yaml:9: precision: should be 'bf16', 'fp16', 'fp32' or 'tf32'",
            "config.yaml:10: memory: should be a section of keys, for example 'memory: {margin: ...}'",
            "config.yaml:11: device: 'GPU 0' names no device",
        ]
        assert len(found) == len(expected)
        assert all(line.startswith(start) for line, start in zip(found, expected, strict=True)), found

    def test_the_problems_come_in_the_order_of_the_file(self, problems):
        found = problems("batch_size: {min: 9, max: 3}\nseed: x\nbudget: {run: y}\ntask: m.py\nwhat: 1")
        assert [int(line.split(":")[1]) for line in found] == [1, 2, 3, 5]

    def test_a_key_of_another_section_is_pointed_to(self, problems):
        assert problems("task: m.py\nmargin: 0.1") == [
            "config.yaml:2: unknown key 'margin'. Did you mean 'memory.margin'?"
        ]
        (line,) = problems("task: m.py\ntarget: 0.9")  # which is also a little like 'storage'
        assert line == "config.yaml:2: unknown key 'target'. Did you mean 'objective.target'?"

    def test_a_key_like_no_other_is_answered_with_those_there_are(self, problems):
        (line,) = problems("task: m.py\nmemory: {colour: blue}")
        assert line == "config.yaml:2: unknown key 'memory.colour'. Known here: margin, limit."

    def test_a_dotted_key_in_the_file_is_a_section(self, problems):
        (line,) = problems("task: m.py\nbatch_size.min: 3")
        assert line == "config.yaml:2: unknown key 'batch_size.min'; write a section, 'batch_size: {min: ...}'"

    def test_a_further_argument_to_search_that_says_nothing_is_told_what_it_lacks(self, problems):
        (line,) = problems("task: m.py\nspace:\n  decay:")
        assert line == "config.yaml:3: space.decay: should be a section of keys, for example 'decay: {min: ...}'"

    @pytest.mark.parametrize("value", ["{min: 1e-4, max: 0.1}", "{min: 1}", "3"])
    def test_a_misspelled_rate_is_no_further_argument_to_search(self, problems, value):
        assert problems(f"task: m.py\nspace:\n  learning_rte: {value}") == [
            "config.yaml:3: unknown key 'space.learning_rte'. Did you mean 'learning_rate'?"
        ]

    def test_an_argument_that_only_begins_like_one_is_searched(self, load):
        assert "learning_rate_d" in load("task: m.py\nspace: {learning_rate_d: {min: 0.1, max: 1.0}}").space

    def test_a_metric_at_its_best_has_no_target(self, problems):
        (line,) = problems("task: m.py\nobjective: {kind: best_metric, target: 0.1}")
        assert line.startswith("config.yaml:2: objective: best_metric has no target; leave it out")

    @pytest.mark.parametrize("choice", [".inf", ".nan"])
    def test_choices_are_finite(self, problems, choice):
        (line,) = problems(f"task: m.py\nspace: {{clip: {{choices: [1.0, {choice}]}}}}")
        assert line == "config.yaml:2: space.clip: choices are finite numbers, words or booleans"

    def test_two_problems_in_one_place_are_both_told(self, problems):
        assert len(problems("task: m.py", "space={'': {'': 1}}")) == 2

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("gradient_clipping.norm=-1", "gradient_clipping.norm: should be greater than 0"),
            ("gradient_clipping.nrm=1", "unknown key 'gradient_clipping.nrm'. Did you mean 'gradient_clipping.norm'?"),
            ("gradient_clipping.colour=1", "unknown key 'gradient_clipping.colour'. Known here: norm, value."),
            ("space.decay={min: low, max: 1.0}", "space.decay.min: should be a valid number"),
            ("task=", "task: should be a valid string, not None"),
        ],
    )
    def test_what_is_wrong_with_a_part_is_not_told_of_the_whole_as_well(self, problems, text, told):
        (line,) = problems("task: m.py", text)
        assert line.startswith(f"'{text}': {told}")

    def test_a_switch_is_no_number(self, problems):
        assert problems("task: m.py\nbatch_size: {max: true}") == [
            "config.yaml:2: batch_size.max: should be a number, not true"
        ]
        assert problems("task: m.py\nworkers: true") == ["config.yaml:2: workers: should be a number, not true"]

    def test_what_the_command_line_breaks_is_told_of_the_command_line(self, problems):
        assert problems("task: m.py\nbatch_size:\n  max: 32", "batch_size.min=64") == [
            "'batch_size.min=64': batch_size: min 64 is greater than max 32; swap them or raise max"
        ]
        file = "task: m.py\nbudget: {run: 8s, total: 100s, trials: 12}"  # which has keys after that one
        assert problems(file, "budget.total=5s") == [
            "'budget.total=5s': budget: run 8 s is longer than total 5 s; raise total"
        ]
        assert problems("task: m.py", BATCHTUNE_SEED="x")[0].startswith(
            "BATCHTUNE_SEED: seed: should be a valid integer"
        )

    def test_a_mistyped_argument_is_an_unknown_key(self, problems):
        assert problems("task: m.py", "budget.totl=5m") == [
            "'budget.totl=5m': unknown key 'budget.totl'. Did you mean 'budget.total'?"
        ]

    def test_arguments_that_are_no_yaml_are_told_with_all_other_problems(self, problems):
        found = problems("task: m.py\nseed: x", "budget.total=[", "memory.margin=}")
        assert [line.partition(":")[0] for line in found] == ["'budget.total=['", "'memory.margin=}'", "config.yaml"]

    @pytest.mark.parametrize("text", ["seed", "=5", " =5"])
    def test_an_argument_without_key_or_value_is_explained(self, problems, text):
        assert "is not of the form key=value, for example budget.total=5m" in problems("task: m.py", text)[0]

    def test_an_argument_of_bytes_that_are_no_text_is_explained(self, problems):
        assert "is not of the form key=value" in problems("task: m.py", "\udcff=5")[0]
        assert problems("task: m.py", "name=\udcff")[0].startswith("'name=\udcff': not valid YAML: ")

    def test_a_key_that_cannot_be_shown_is_told_with_its_line(self, problems):
        assert problems('task: m.py\n"\\uD800": 1') == [
            "config.yaml:2: key '\\ud800' has characters that cannot be shown; remove them"
        ]

    @pytest.mark.parametrize("key", ["storage", "memory.limit", "objective.target", "batch_size.max"])
    @pytest.mark.parametrize("value", ["[]", "{}", "[[1]]", "{x: {}}"])
    def test_a_list_or_section_in_the_place_of_a_value_is_told_by_its_key(self, problems, key, value):
        (line,) = problems("task: m.py", f"{key}={value}")
        assert f"': {key}: " in line

    def test_no_more_problems_are_told_than_anybody_reads(self, problems):
        found = problems("task: m.py\n" + "".join(f"k{number}: 1\n" for number in range(500)))
        assert len(found) == 51
        assert found[-1] == "… and 450 more like these"

    def test_a_password_on_the_command_line_is_told_to_nobody(self, problems):
        for text in ("storge=mysql://you:secret@host", "mysql://you:secret@host", "storage=[mysql://you:secret@host]"):
            (line,) = problems("task: m.py", text)
            assert "mysql://you:***@host" in line
            assert "secret" not in line
        assert problems("task: m.py", "storage=you:secret@host") == [
            "'storage=…': storage: is not a database's URL; write postgresql+psycopg://you:***@host:5432/studies"
        ]

    def test_an_absurd_number_is_told_in_one_short_line(self, problems):
        for value in ("9" * 390, "9" * 390 + "GB", "1e999"):
            (line,) = problems(f"task: m.py\nmemory: {{limit: {value}}}")
            assert len(line) < 200

    def test_yaml_that_does_not_parse_is_told_with_its_line(self, problems):
        assert problems("task: m.py\nseed: [1,\n")[0].startswith("config.yaml:3: not valid YAML: ")
        assert problems("task: a\ntask: b\nseed: 1\nseed: 2") == [
            "config.yaml:2: key 'task' stands twice (first in line 1); remove one",
            "config.yaml:4: key 'seed' stands twice (first in line 3); remove one",
        ]

    def test_an_empty_file_lacks_its_task(self, problems):
        assert problems("")[0].startswith("config.yaml:1: 'task' is missing")


class TestUnreadableFiles:
    def test_a_missing_file_comes_with_the_command_that_writes_one(self, tmp_path):
        with pytest.raises(UsageError, match="No such file or directory; 'batchtune init' writes one"):
            load_config(tmp_path / "nowhere.yaml")

    def test_a_folder_is_no_file(self, tmp_path):
        with pytest.raises(UsageError, match=r"config\.yaml: cannot be read: No such file"):
            load_config(tmp_path)

    def test_a_file_without_end_is_not_read_to_it(self):
        with pytest.raises(UsageError, match=r"^/dev/zero:1: longer than 100,000 characters; this is no configuration"):
            load_config("/dev/zero")

    def test_a_binary_file_is_no_text(self, tmp_path):
        (tmp_path / "model.pt").write_bytes(b"\x80\x02\xff\xfe")
        with pytest.raises(UsageError, match="not a UTF-8 text file"):
            load_config(tmp_path / "model.pt")


def test_a_folder_stands_for_the_configuration_in_it(tmp_path):
    (tmp_path / "config.yaml").write_text("task: model.py\n")
    assert load_config(tmp_path, environment={}).task.endswith("model.py")


def test_a_task_without_a_file_has_the_defaults_and_what_is_laid_over_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config_of_task("model.py:Task", "model", ["baseline.batch_size=64"], {"BATCHTUNE_SEED": "5"})
    assert config == Config(
        task=str(tmp_path / "model.py:Task"), name="model", baseline=Baseline(batch_size=64), seed=5
    )
    with pytest.raises(UsageError, match=r"^'budget.total=soon': budget.total: 'soon' is not a duration"):
        config_of_task("model.py", "model", ["budget.total=soon"], {})


def test_a_configuration_in_the_place_of_a_task_is_told_apart():
    with pytest.raises(UsageError, match=r"config\.yaml: a configuration, and no task: run"):
        split_spec("config.yaml")
