import sys

import pytest
import workers_simulated
import workers_storage
from fixtures.postgresql import server_programs
from replay_curves import Record
from replay_workers import EventClock, batchtune_moments, optuna_asha, other_moments
from workers_simulated import Kept, judged


@pytest.fixture(scope="module")
def record():
    return Record("digits_adam")


def test_whoever_is_due_next_goes_on_and_the_clock_shows_its_time():
    clock, seen = EventClock(), []

    def job(name, *pauses):
        for pause in pauses:
            clock.sleep(pause)
            seen.append((clock.now, name))

    clock.run([lambda: job("a", 3.0, 3.0), lambda: job("b", 2.0, 2.0, 3.0), lambda: job("c")])
    assert seen == [(2.0, "b"), (3.0, "a"), (4.0, "b"), (6.0, "a"), (7.0, "b")]
    clock.sleep(1.0)
    assert clock.now == 8.0


def test_what_a_job_raises_is_raised_once_all_have_ended():
    clock, seen = EventClock(), []

    def ends():
        clock.sleep(5.0)
        seen.append(clock.now)

    def fails():
        clock.sleep(1.0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        clock.run([ends, fails])
    assert seen == [5.0]


def test_other_tuners_keep_all_workers_at_work(record):
    by_one, by_four = (other_moments(optuna_asha, record, 0, workers) for workers in (1, 4))
    assert len(by_four) >= len(by_one)
    assert by_four[-1].seconds < by_one[-1].seconds / 2
    seconds = [moment.seconds for moment in by_four]
    assert seconds == sorted(seconds)


def test_the_benchmark_runs_is_the_same_for_a_seed_and_goes_on_from_what_it_has_kept(
    record, tmp_path, monkeypatch, capsys
):
    kept, found = tmp_path / "runs.jsonl", tmp_path / "found.md"
    command = ["workers_simulated.py", "digits_adam", "--seeds", "1", "--workers", "1", "8", "--tuners", "batchtune"]
    monkeypatch.setattr(sys, "argv", [*command, "--kept", str(kept), "-o", str(found)])
    workers_simulated.main()
    first = found.read_text()
    assert all(f"\n| {count} | " in first for count in (1, 8))
    assert "8 workers at least 4 times as fast as one" in first
    assert capsys.readouterr().err.count("batchtune") == 2
    workers_simulated.main()
    assert found.read_text() == first
    assert capsys.readouterr().err == ""
    studies = Kept(kept)
    alone, by_eight = (studies["digits_adam", "batchtune", count, 0] for count in (1, 8))
    assert by_eight.runs / by_eight.wall > 2 * alone.runs / alone.wall
    assert judged(record, batchtune_moments(record, seed=0, workers=8)) == by_eight


@pytest.mark.skipif(server_programs() is None, reason="no PostgreSQL server here (Debian's package has one)")
def test_what_a_run_asks_of_a_database_hardly_grows_with_what_runs_beside_it(tmp_path, monkeypatch):
    pytest.importorskip("psycopg")
    found = {}
    monkeypatch.setattr(workers_storage, "table", lambda costs: str(found.update(costs)))
    command = ["workers_storage.py", "--others", "0", "12", "--runs", "2", "-o", str(tmp_path / "found.md")]
    monkeypatch.setattr(sys, "argv", command)
    workers_storage.main()
    assert set(found) == {1, 13}
    assert found[13].statements < 1.5 * found[1].statements
    assert found[1].evaluations > 5
