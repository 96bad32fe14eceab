import pytest

from batchtune.tune.optuna_parts import surface


@pytest.fixture(scope="module")
def few_particles():
    """The response surface from an eighth of its particles, for tests that do not ask how well it guesses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surface, "PARTICLES", surface.PARTICLES // 8)
        yield
