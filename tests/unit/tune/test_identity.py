"""What must not change under a study while it goes on."""

from contextlib import nullcontext

import pytest

from batchtune.config.schema import Config
from batchtune.errors import UsageError
from batchtune.run_folder import THE_CODE, RunFolder
from batchtune.task.spec import code_hashes
from batchtune.tune.plan.configure import identity_of


@pytest.fixture
def identity(tmp_path):
    task = tmp_path / "model.py"
    task.write_text("x = 1\n")

    def of(**sections):
        return identity_of(Config(task=str(task), **sections))

    return of


def changed(before, now):
    return {key for key in now if key in before and before[key] != now[key]}


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"gradient_clipping": {"norm": 1.0}}, "gradient_clipping"),
        ({"gradient_clipping": {"norm": {"choices": [0, 1]}}}, "gradient_clipping"),
        ({"space": {"decay": {"choices": [0, 1]}}}, "the arguments under space"),
        ({"baseline": {"batch_size": 64}}, "baseline.batch_size"),
        ({"budget": {"run": 5}}, "budget.run"),
    ],
)
def test_what_gives_a_measurement_its_meaning_is_in_it(identity, sections, key):
    assert changed(identity(), identity(**sections)) == {key}


@pytest.mark.parametrize("kept", ["both hashes", "that of the file, as earlier versions did"])
@pytest.mark.parametrize(
    ("text", "is_same"),
    [
        ("x = 1\n", True),
        ('"""What it is."""\n\nx = 1  # one\n', None),  # as the file's hash alone cannot tell
        ("x = 2\n", False),
        ("x = 1 +\n", False),
    ],
)
def test_a_comment_or_a_docstring_makes_no_other_study_of_it(tmp_path, identity, kept, text, is_same):
    before, folder = identity(), RunFolder("study", tmp_path)
    folder.path.mkdir()
    folder.keep_identity(before if kept == "both hashes" else before | {THE_CODE: before[THE_CODE][0]})
    (tmp_path / "model.py").write_text(text)
    refused = nullcontext() if is_same or (is_same is None and kept == "both hashes") else pytest.raises(UsageError)
    with refused:
        folder.check_identity(identity())


def test_code_that_does_another_thing_is_another(tmp_path):
    file, seen = tmp_path / "model.py", set()
    for text in ('def f():\n    "a"\n    return 1\n', 'def f():\n    "b"\n    return 1\n', "def f():\n    return 2\n"):
        file.write_text(text)
        seen.add(code_hashes(str(file))[1])
    assert len(seen) == 2


def test_more_of_the_same_may_be_measured(identity):
    assert not changed(identity(), identity(budget={"total": "1h", "trials": 99}, confirm={"seeds": 5}, name="other"))
