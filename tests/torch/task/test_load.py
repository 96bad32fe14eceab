"""Importing the user's code, and telling what they did wrong in their own frames."""

import os
import re
import sys
import types
from pathlib import Path

import pytest

from batchtune.device.failures import describe_user_error
from batchtune.errors import UsageError, UserCodeError
from batchtune.task.load import load_task

MODEL = (
    "from torch import nn\n\ndef build_model():\n    return nn.Linear(2, 1)\n\ndef compute_loss(model, batch): ...\n"
)


@pytest.fixture
def message(load):
    def of(*arguments: object) -> str:
        with pytest.raises(UserCodeError) as raised:
            load(*arguments)
        assert raised.value.exit_code == 3
        return str(raised.value)

    return of


def test_a_script_that_wants_a_command_line_is_told_that_it_is_imported(message):
    parsing = (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('data')\nparser.parse_args([])\n"
    )
    found = message(parsing + MODEL)
    assert re.search(
        r"^importing \S+ raised SystemExit: \S+:4: it ends the process with exit\(2\); \w+\.py is imported, not run: "
        r"what is to run as a script goes under if __name__ == '__main__'$",
        found,
    )


class TestPlaces:
    def test_a_file(self, load):
        assert load(MODEL).model().in_features == 2

    def test_a_file_may_import_its_neighbours(self, load, tmp_path):
        (tmp_path / "neighbour_of_my_task.py").write_text("WIDTH = 7\n")
        text = MODEL.replace("(2, 1)", "(WIDTH, 1)") + "from neighbour_of_my_task import WIDTH\n"
        assert load(text).model().in_features == 7

    @pytest.mark.parametrize("name", ["json.py", "torch.py", "my model.py"])
    def test_a_file_named_as_a_library_shadows_nothing(self, load, name):
        library = sys.modules.get(Path(name).stem)
        assert load(MODEL, "", name).model().in_features == 2
        assert sys.modules.get(Path(name).stem) is library

    def test_a_module_found_from_the_current_folder(self, tmp_path):
        (tmp_path / "package_of_mine").mkdir()
        (tmp_path / "package_of_mine" / "module.py").write_text(MODEL)
        assert load_task("package_of_mine.module").has("build_model")

    def test_an_object_a_class_and_a_factory(self, load):
        text = (
            "from torch import nn\n"
            "class Task:\n    def build_model(self):\n        return nn.Linear(3, 1)\n"
            "    def compute_loss(self, model, batch): ...\n"
            "def make():\n    return Task()\n"
            "class Box:\n    task = Task()\n"
        )
        for attribute in ("Task", "make", "Box.task"):
            assert load(text, attribute).model().in_features == 3


class TestWhatIsNotThere:
    def test_a_module_is_named(self):
        with pytest.raises(UsageError, match=r"no_such_package\.inner: no such module here"):
            load_task("no_such_package.inner")

    def test_an_attribute_is_answered_with_those_there_are(self, load):
        with pytest.raises(UsageError, match="no attribute 'Tusk' there; it has nn, build_model"):
            load(MODEL, "Tusk")

    def test_a_function_of_the_contract_comes_with_the_template(self, message):
        text = message("x = 1")
        assert text.startswith(
            "my_task.py: no build_model() returning an nn.Module or a dict of them; 'batchtune init'"
        )

    def test_a_lightning_module_that_the_file_holds_is_suggested(self, message):
        text = message(
            "Base = type('LightningModule', (), {'__module__': 'lightning.pytorch'})\nclass MyLit(Base): ...\n"
        )
        assert text.endswith("my_task.py: no build_model(), but MyLit is a LightningModule; name it: my_task.py:MyLit")

    def test_of_a_trainers_class_the_function_that_makes_one_is_asked_for(self, message):
        text = message("Base = type('Trainer', (), {'__module__': 'transformers.trainer'})\nclass Mine(Base): ...\n")
        assert text.endswith("no build_model(); name the function that returns your Mine: my_task.py:FUNCTION")

    @pytest.mark.parametrize("line", ["from my_task import GPT", "import my_task.layers"])
    def test_a_module_that_the_tasks_own_file_hides_is_told(self, message, line):
        assert message(line).endswith(
            "; this file hides your own module 'my_task': call it otherwise, e.g. batchtune_task.py"
        )

    def test_a_file_of_a_package_is_told_the_name_of_its_module(self, tmp_path):
        package = tmp_path / "work" / "quant"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "train.py").write_text("from .model import Net\n")
        with pytest.raises(UserCodeError, match=rf"name it as a module, quant\.train, in {tmp_path}/work$"):
            load_task(str(package / "train.py"))

    def test_a_library_that_a_task_wants_is_told_with_the_line(self, message):
        text = message("\nimport no_such_library\n")
        assert "ModuleNotFoundError: my_task.py:2: No module named 'no_such_library'" in text


class TestCodeThatFails:
    @pytest.mark.parametrize("text", ["def f(:\n", b"x = '\xff'\n", b"x = 1\x00\n", "  x = 1\n y"])
    def test_what_does_not_parse_is_told_with_its_file(self, message, text):
        found = message(text)
        assert "my_task.py" in found
        assert "None" not in found
        assert "\n" not in found

    def test_a_syntax_error_has_its_line_and_text(self, message):
        assert message("x = 1\ndef f(:\n").endswith("my_task.py:2: invalid syntax: def f(:")

    @pytest.mark.parametrize("statement", ["raise ValueError('no data')", "raise SystemExit('no data')"])
    def test_what_is_raised_at_import_is_told_with_its_line(self, message, statement):
        text = message(f"\n{statement}\n")
        assert text.startswith("importing my_task.py raised ")
        assert text.endswith("my_task.py:2: no data")

    def test_what_a_factory_raises_is_told_with_its_name(self, message):
        text = message("def make():\n    raise KeyError('width')\n", "make")
        assert text == "make raised KeyError calling make(): my_task.py:2: 'width'"

    def test_an_interruption_is_none_of_the_users_errors(self, load):
        with pytest.raises(KeyboardInterrupt):
            load("raise KeyboardInterrupt\n")

    @pytest.mark.parametrize(("line", "kind"), [("evaluate = 3", "an int"), ("val_dataset = []", "a list")])
    def test_a_name_of_the_contract_that_cannot_be_called_is_named(self, message, line, kind):
        assert f"'{line.split()[0]}' is {kind}; it must be" in message(MODEL + line)


class TestDescription:
    @pytest.fixture(autouse=True)
    def _loads(self, load):
        self.made = lambda body: load(f"import torch\n\ndef build_model():\n    {body}\n").source.build_model()

    @pytest.fixture
    def raised(self, load):
        """What `build_model` of a task raises."""

        def by(body: str) -> Exception:
            task = load(f"import torch\n\ndef build_model():\n    {body}\n")
            with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever it is
                task.model()
            return raised.value.with_traceback(raised.tb.tb_next)  # without the frame of this test

        return by

    def test_it_has_function_type_place_and_text(self, raised):
        found = describe_user_error(raised("raise ValueError('expected 10 classes, got 11')"), "at batch size 64")
        assert str(found) == "build_model raised ValueError at batch size 64: my_task.py:4: expected 10 classes, got 11"

    def test_a_loss_that_half_precision_does_not_allow_comes_with_its_remedy(self, raised):
        loss = "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast."
        found = describe_user_error(raised(f"raise RuntimeError('{loss}' + chr(10) + 'Many models')"), "in training")
        assert f"{loss} Take " in str(found)
        assert str(found).endswith("or use --precision fp32 (in a configuration precision: fp32)")

    def test_only_the_users_frames_are_shown(self, raised):
        found = describe_user_error(raised("torch.nn.Linear(2, 1)(torch.zeros(3, 3))"), "in training")
        assert "mat1 and mat2 shapes" in str(found)
        assert found.frames.count("File") == 1
        assert "my_task.py" in found.frames

    def test_a_function_that_a_library_was_given_is_told_where_none_of_the_users_was_at_work(self, raised):
        lines = (
            "optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)",
            "def pre_hook(*_): return torch.ones(1)",
            "optimizer.register_step_pre_hook(pre_hook)",
            "return optimizer",
        )
        with pytest.raises(RuntimeError) as found:
            self.made("\n    ".join(lines)).step()
        text = str(describe_user_error(found.value.with_traceback(found.tb.tb_next), "in training"))
        assert text.startswith("pre_hook raised RuntimeError in training: my_task.py:5: ")
        assert "must return None or a tuple" in text

    @pytest.mark.parametrize(
        ("line", "told"),
        [
            ("raise ValueError('no' + chr(10) + 'label')", "ValueError in training: my_task.py:7: no"),
            ("{}['label']", "KeyError in training: my_task.py:7: 'label'"),
        ],
    )
    def test_an_error_in_a_loaders_worker_is_the_users_as_any_other(self, raised, line, told):
        body = f"""
    from torch._utils import ExceptionWrapper
    def read():
        {line}
    try:
        read()
    except Exception:
        wrapped = ExceptionWrapper(where='in DataLoader worker process 1')
    wrapped.reraise()"""
        found = describe_user_error(raised(body), "in training")
        assert str(found) == f"build_model raised {told}"
        assert "in read" in found.frames

    def test_a_shared_memory_that_is_too_small_is_told_with_the_remedy(self, raised):
        torchs = "unable to allocate shared memory(shm) for file </torch_7_8_0>: No space left on device (28)"
        found = describe_user_error(raised(f"raise RuntimeError('{torchs}')"), "at batch size 64")
        assert str(found).endswith("give a container more (docker run --shm-size=8g), or use num_workers=0")

    def test_only_the_first_line_of_a_long_text_is_shown(self, raised):
        found = str(describe_user_error(raised("raise ValueError('a' * 9999 + chr(10) + 'b')"), "in training"))
        assert "\n" not in found
        assert len(found) < 700

    def test_an_exception_without_text_says_so(self, raised):
        assert str(describe_user_error(raised("raise ValueError"), "in training")).endswith("(no message)")

    def test_an_error_of_the_contract_stays_as_it_is(self):
        error = UserCodeError("no build_model")
        assert describe_user_error(error, "in training") is error

    def test_a_current_folder_that_is_gone_does_not_hide_the_error(self, raised, tmp_path):
        error = raised("raise ValueError('no data')")
        gone = tmp_path / "gone"
        gone.mkdir()
        os.chdir(gone)
        gone.rmdir()
        assert "my_task.py:4: no data" in str(describe_user_error(error, "in training"))


def test_a_task_needs_no_file(tmp_path):
    module = types.ModuleType("made_up")
    module.build_model = lambda: None
    sys.modules["made_up"] = module
    try:
        assert load_task("made_up").source is module
    finally:
        del sys.modules["made_up"]
