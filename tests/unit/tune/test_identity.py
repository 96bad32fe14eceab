"""What must not change under a study while it goes on."""

import pytest

from batchtune.config.schema import Config
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


def test_more_of_the_same_may_be_measured(identity):
    assert not changed(identity(), identity(budget={"total": "1h", "trials": 99}, confirm={"seeds": 5}, name="other"))
