"""What the tests of a study share."""

import pytest

from batchtune.tune.optuna_parts import surface


@pytest.fixture(scope="module")
def few_particles():
    """How well the surface guesses has tests of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surface, "PARTICLES", surface.PARTICLES // 8)
        patch.setattr(surface, "TEMPERATURES", 4)
        patch.setattr(surface, "MOVES", 1)
        yield
