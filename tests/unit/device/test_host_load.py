"""How much of the host's processors others used, measured against a real program that does."""

import time

import pytest

from batchtune.device import host
from batchtune.device.host import watching_others

pytestmark = pytest.mark.skipif(not host.STAT.exists(), reason="needs /proc/stat")


@pytest.fixture(autouse=True)
def two_processors(monkeypatch):
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: {0, 2})


def work(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_what_this_process_does_is_not_counted(monkeypatch, tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu0 100 0 0 900 0 0 0 0 0 0\n")
    monkeypatch.setattr(host, "STAT", stat)
    monkeypatch.setattr(host.os, "sysconf", lambda _: 100)
    with watching_others() as load:
        work(0.3)
        stat.write_text("cpu0 130 0 0 900 0 0 0 0 0 0\n")
    assert load.others == pytest.approx(0, abs=0.02)


def test_what_its_ranks_do_is_not_counted(monkeypatch, tmp_path):
    stat, own = tmp_path / "stat", iter([(1.0, 0.0, 0.0, 0.0, 9.0), (1.3, 0.0, 0.0, 0.0, 9.3)])
    stat.write_text("cpu0 100 0 0 900 0 0 0 0 0 0\n")
    monkeypatch.setattr(host, "STAT", stat)
    monkeypatch.setattr(host.os, "sysconf", lambda _: 100)
    monkeypatch.setattr(host.os, "times", lambda: next(own))
    with watching_others(lambda seconds: 2 * seconds) as load:
        time.sleep(0.12)
        stat.write_text("cpu0 160 0 0 900 0 0 0 0 0 0\n")
    assert load.others == pytest.approx(0, abs=1e-9)


def test_what_others_do_on_processors_that_are_not_ours_is_not_counted(monkeypatch, tmp_path):
    stat, rest = tmp_path / "stat", " 0 0 0 0 0 0 0 0 0\n"
    monkeypatch.setattr(host, "STAT", stat)
    stat.write_text(f"cpu  9{rest}cpu0 7{rest}cpu1 1{rest}cpu2 1{rest}")
    with watching_others() as load:
        time.sleep(0.2)
        stat.write_text(f"cpu  2000{rest}cpu0 7{rest}cpu1 1982{rest}cpu2 11{rest}")
    assert 0 < load.others <= 0.25


def test_a_stretch_too_short_to_tell_says_nothing():
    with watching_others() as load:
        pass
    assert load.others is None


@pytest.mark.parametrize("text", ["", "cpu0 a b c\n", "cpu  1 2 3 4 5 6 7 8\n"])
def test_a_system_that_does_not_tell_says_nothing(monkeypatch, tmp_path, text):
    (tmp_path / "stat").write_text(text)
    monkeypatch.setattr(host, "STAT", tmp_path / "stat")
    with watching_others() as load:
        time.sleep(0.25)
    assert load.others is None


def test_a_clock_is_read_again_where_others_had_the_processor_at_that_moment(monkeypatch):
    waits, times = iter([1.0, 1.25, 1.25, 1.25]), iter([10.0, 10.25])
    monkeypatch.setattr(host, "waited_seconds", lambda: next(waits))
    assert host.read_beside_waits(lambda: next(times)) == (10.25, 1.25)
