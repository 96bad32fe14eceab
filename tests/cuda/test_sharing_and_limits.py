"""A limit on a card that is shared: what others hold, what moves while the probe runs, and what the user sets."""

import fake_gpu
import pytest
from cuda.tasks import PERCEPTRON
from fixtures.waiting import wait_until

import batchtune
from batchtune.errors import DeviceError, UsageError
from batchtune.observer import Observer
from batchtune.processes import worker as worker_module

GiB, MiB = 2**30, 2**20
CONTEXT = 300 * MiB
NEIGHBOUR = 4242


class Moves(Observer):
    """The neighbour takes so much when the final check is about to start."""

    def __init__(self, card, held):
        self._card, self._held = card, held

    def attempting(self, batch_size, reason):
        if reason.startswith("final check"):
            self._card.other = {NEIGHBOUR: self._held}


@pytest.fixture
def card():
    with fake_gpu.machine(fake_gpu.Card("8GiB", context_bytes=CONTEXT)) as machine:
        yield machine.cards[0]


@pytest.fixture
def probe(tmp_path, card, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(worker_module, "BUSY_SECONDS", 0.5)
    (tmp_path / "model.py").write_text(PERCEPTRON)

    def probe(**options):
        usual = {"device": "cuda", "precision": "fp32", "tolerance": 0.3, "verify_steps": 2, "throughput": False}
        try:
            return batchtune.probe(tmp_path / "model.py", **usual | options)
        finally:
            assert wait_until(lambda: card.processes == {})  # nothing of ours is left there

    return probe


def test_a_card_that_is_full_is_told_with_who_holds_it(probe, card):
    card.other = {NEIGHBOUR: 8 * GiB - 100 * MiB}
    with pytest.raises(DeviceError, match=r"cannot be used now: CUDA error: out of memory.*pid 4242 7\.9 GiB"):
        probe()


def test_a_card_that_others_fill_before_the_final_check_gives_no_answer_that_was_not_checked(probe, card):
    with pytest.raises(DeviceError, match=r"held by other processes: pid 4242") as caught:
        probe(observer=Moves(card, 8 * GiB))
    assert caught.value.exit_code == 5
    assert not caught.value.result.probe.verified_in_fresh_process


def test_a_task_that_opens_the_card_when_it_is_imported_is_nobody_else(probe, card, tmp_path):
    (tmp_path / "model.py").write_text(PERCEPTRON + "torch.zeros(2**20, device='cuda')\n")
    result = probe(max=8)
    assert result.environment.other_processes == []
    assert result.environment.device_memory_free_bytes == 8 * GiB
    assert result.warnings == []


def test_the_answer_fits_beside_a_neighbour_that_grew_before_the_final_check(probe, card):
    card.other = {NEIGHBOUR: GiB}
    result = probe(observer=Moves(card, 3 * GiB))
    found = result.probe
    assert found.memory_limit_bytes == int((7 * GiB - CONTEXT) * 0.95)  # of what was free when the probe began
    assert found.verified_in_fresh_process
    assert found.peak_reserved_bytes + CONTEXT <= 5 * GiB
    assert found.limited_by == "memory"
    held, moved = result.warnings
    assert held.startswith("other processes hold 1.0 GiB of the device's memory (pid 4242 1.0 GiB): ")
    assert moved.startswith("the device's free memory moved by 25% of the whole, from 7.0 GiB to 5.0 GiB")


def test_no_allocation_fails_where_none_may_and_the_margin_is_kept(probe, card):
    result = probe(no_oom=True, margin=0.5)
    assert result.probe.memory_limit_bytes == 4 * GiB
    assert {attempt.outcome for attempt in result.probe.attempts} == {"fit"}
    assert max(attempt.peak_reserved_bytes for attempt in result.probe.attempts) <= 4 * GiB
    assert card.ooms == 0
    assert result.probe.limited_by == "memory"
    assert result.warnings == []


def test_a_limit_of_all_the_card_has_leaves_room_for_the_context(probe):
    found = probe(memory_limit=8 * GiB).probe
    assert (found.memory_limit_bytes, found.limited_by) == (8 * GiB, "memory")
    assert found.peak_reserved_bytes + CONTEXT <= 8 * GiB


def test_a_limit_above_what_the_card_has_is_refused(probe):
    with pytest.raises(UsageError, match="memory_limit=8589934593 bytes is more than the 8589934592 bytes of cuda:0"):
        probe(memory_limit=8 * GiB + 1)
