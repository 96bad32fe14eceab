"""The estimate on CUDA builds is blind to the card, whatever it is."""

import fake_gpu
import pytest
from cuda.tasks import ESTIMATES, PERCEPTRON

import batchtune

pytestmark = ESTIMATES

NO_CARD, THAT_CARD, ANOTHER = [], [fake_gpu.Card(capability=(8, 6))], [fake_gpu.Card("8GiB", capability=(12, 0))]


@pytest.fixture(scope="module")
def told():
    return {}


@pytest.mark.parametrize(
    ("cards", "visible"),
    [(NO_CARD, None), (THAT_CARD, None), (THAT_CARD, ""), (ANOTHER, "0")],
    ids=["no card", "that card", "hidden", "another generation, shown by the task"],
)
def test_an_estimate_is_the_same_with_any_card_or_none_and_opens_none(tmp_path, told, cards, visible, monkeypatch):
    shown = f'os.environ["CUDA_VISIBLE_DEVICES"] = "{visible}"\n' if visible else ""
    (tmp_path / "task.py").write_text(PERCEPTRON + shown)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with fake_gpu.machine(*cards) as machine:
        machine.fail("cudaMalloc", 2, times=1 << 30)  # whoever opens the card ends here
        (found,) = batchtune.estimate(tmp_path / "task.py", gpus="A5000").estimates
        assert [card.mallocs for card in machine.cards] == [0 for _ in cards]
    assert found.confidence.startswith("high")
    assert told.setdefault("first", found) == found
