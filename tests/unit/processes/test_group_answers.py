"""What several ranks' answers come to as one."""

from fakes import opened

from batchtune.processes.ranks import failed, merge
from batchtune.protocol.commands import OpenTask, TimeSteps, TryBatchSize

OPEN = OpenTask(task="model.py")


def attempt(outcome="fit", peak=100, seconds=1.0, usable=True, message=None):
    figures = {"peak_reserved_bytes": peak, "step_seconds": seconds, "forward_backward_peak_bytes": peak}
    figures["steps_peak_bytes"] = peak
    return {"done": {"attempt": {"batch_size": 4, "outcome": outcome, "message": message, **figures}, "usable": usable}}


def merged(answers, world_size=2):
    return merge(TryBatchSize(batch_size=4, steps=3, precision="fp32"), answers, world_size)["done"]


def test_an_attempt_fits_if_it_fits_on_all_with_the_highest_peak_and_the_slowest_step():
    done = merged({1: attempt(peak=90, seconds=3.0), 0: attempt(peak=120)})
    assert done["usable"]
    assert done["attempt"]["outcome"] == "fit"
    assert (done["attempt"]["peak_reserved_bytes"], done["attempt"]["step_seconds"]) == (120, 3.0)
    assert done["attempt"]["steps_peak_bytes"] == 120
    assert "limiting_rank" not in done["attempt"]


def test_batches_that_differ_on_a_rank_make_a_group_be_checked_in_several_orders():
    assert merged({0: attempt(), 1: {"done": attempt()["done"] | {"batches_differ": True}}})["batches_differ"]
    assert not merged({0: attempt(), 1: attempt()})["batches_differ"]


def test_a_precision_that_fails_on_a_rank_fails_on_all():
    assert merged({0: attempt(), 1: {"done": attempt()["done"] | {"fails_in_half": True}}})["fails_in_half"]
    assert not merged({0: attempt(), 1: attempt()})["fails_in_half"]


def test_the_rank_that_failed_first_is_named_with_what_it_said():
    done = merged({2: attempt("oom", message="no memory left"), 0: attempt(), 1: attempt("oom")}, 3)
    assert (done["attempt"]["outcome"], done["attempt"]["limiting_rank"]) == ("oom", 2)
    assert done["attempt"]["message"] == "rank 2: no memory left"
    assert done["attempt"]["forward_backward_peak_bytes"] is None
    assert done["usable"]


def test_where_all_failed_alike_no_rank_limits():
    done = merged({1: attempt("oom", message="none"), 0: attempt("oom", message="none")})
    assert done["attempt"]["outcome"] == "oom"
    assert done["attempt"]["message"] == "none"
    assert "limiting_rank" not in done["attempt"]


def test_a_rank_that_did_not_answer_or_is_damaged_makes_the_group_start_again():
    assert not merged({1: attempt("oom")})["usable"]
    assert not merged({1: attempt("oom", usable=False), 0: attempt("oom")})["usable"]


def test_the_memory_limit_of_a_group_is_that_of_its_least_rank_and_its_neighbours_are_all_of_theirs():
    def facts(limit, *pids):
        environment = {"device": "a T4", "other_processes": [{"pid": pid} for pid in pids]}
        return {"done": opened(memory_limit_bytes=limit, environment=environment).model_dump(exclude_unset=True)}

    done = merge(OPEN, {1: facts(7, 42, 43), 0: facts(9, 42)}, 2)["done"]
    assert (done["memory_limit_bytes"], done["rank_memory_limits_bytes"]) == (7, (9, 7))
    assert done["environment"]["other_processes"] == [{"pid": 42}, {"pid": 43}]


def test_what_the_ranks_know_already_is_told_again_by_none():
    assert merge(OPEN, {0: {"done": None}, 1: {"done": None}}, 2) == {"done": None}
    assert not failed({"done": None})
    assert not failed({"done": [[0.1, 0.2]]})


def test_a_group_begins_anew_by_forks_only_where_all_its_ranks_do():
    for others, forks in ((True, True), (False, False)):
        told = [opened(forks=each).model_dump(exclude_unset=True) for each in (True, others)]
        assert merge(OPEN, {rank: {"done": each} for rank, each in enumerate(told)}, 2)["done"]["forks"] is forks


def test_an_evaluation_is_as_large_as_fits_on_every_rank():
    answers = {rank: attempt() for rank in range(3)}
    answers[1]["done"]["attempt"]["evaluation_batch_size"] = 64
    answers[2]["done"]["attempt"]["evaluation_batch_size"] = 32
    assert merged(answers, 3)["attempt"]["evaluation_batch_size"] == 32


def test_a_group_is_as_fast_as_its_slowest_rank():
    points = [{"batch_size": 8, "samples_per_second": rate, "step_seconds": 8 / rate} for rate in (9.0, 4.0)]
    answers = {rank: {"done": point} for rank, point in enumerate(points)}
    assert merge(TimeSteps(batch_size=8, precision="fp32", seconds=1.0), answers, 2)["done"] == points[1]


def test_an_error_of_one_rank_is_told_with_its_number_and_one_of_all_without():
    error = {"error": "no such thing", "exit_code": 3, "frames": ""}
    assert merge(OPEN, {1: error, 0: {"done": {}}}, 2)["error"] == "rank 1: no such thing"
    assert merge(OPEN, {1: error, 0: error}, 2)["error"] == "no such thing"


def test_errors_and_attempts_that_do_not_fit_are_failures():
    assert failed({"error": "…"})
    assert failed(attempt("oom"))
    assert not failed(attempt())
    assert not failed({"done": {"step_seconds": 1.0}})
