"""The configurations of a study: a row each, the answer first, today's last, and why others are not the answer."""

import io
import re

from documents import choice, trial
from rich.console import Console

from batchtune.report.formats import to_markdown
from batchtune.report.terminal import render
from batchtune.report.view.study import configurations, runs
from batchtune.report.view.study_plots import bars, landscape


def rows_of(result):
    made = configurations(result)
    cells = {column.name: column.cells for column in made.columns}
    return made, [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]


def study(*runs, answer=1, today=0, **more):
    """A study of runs (batch size, role, seconds or an outcome), whose answer is the configuration of one of them."""
    trials = []
    for number, (batch, role, came) in enumerate(runs):
        reached = {"time_to_target_seconds": came} if isinstance(came, float) else {"outcome": came}
        trials.append(
            trial(number, batch, 0.1, None, role=role) | {"outcome": "reached", "state": "complete"} | reached
        )
    seconds = [runs[each][2] for each in (answer, today)]
    found = [choice(runs[each][0], 0.1, took, "so and so") for each, took in zip((answer, today), seconds, strict=True)]
    return {"trials": trials, "recommendation": found[0], "baseline": found[1]} | more


BOTH = [(32, "baseline", 30.0), (64, "confirm", 10.0)]


def test_a_lucky_single_run_stands_below_what_was_confirmed_and_says_that_it_was_not(result_of):
    runs = [*BOTH, (8, "search", 5.0), (64, "search", 9.0), (64, "confirm", 11.0), (16, "confirm", 25.0)]
    made, rows = rows_of(result_of("tune", **study(*runs)))
    assert made.title == "configurations, the recommended first: medians over their seeds"
    assert [(row["batch"], row["to target"], row["seeds"], row["why"]) for row in rows] == [
        ("64", "10 s", "2", "recommended"),
        ("16", "25 s", "1", "2.5 times as long"),
        ("8", "5 s", "-", "a single run, not confirmed"),
        ("32", "30 s", "-", "what you run today: 3 times as long"),
    ]
    assert made.marked == [0]


def test_each_configuration_says_why_it_is_not_the_answer(result_of):
    ended = {"diverged": "diverged", "oom": "out of memory", "finished": "did not reach the target"}
    runs = [(2**power, "search", outcome) for power, outcome in enumerate(ended)]
    fresh = [(200, "confirm", 10.5), (300, "confirm", 2.0), (400, "confirm", 12.0), (400, "confirm", "finished")]
    twice = [(500, "search", 14.0), (500, "search", 15.0)]
    rows = rows_of(result_of("tune", **study(*BOTH, *runs, *fresh, *twice)))[1]
    assert {row["batch"]: row["why"] for row in rows[1:-1]} == {
        "200": "no better beyond noise",
        "300": "ahead on these seeds alone",
        "400": "1 of 2 fresh seeds came to no result",
        "500": "2 runs, not confirmed",
        **dict(zip(("1", "2", "4"), ended.values(), strict=True)),
    }


STOPPED = {
    "state": "fail",
    "outcome": None,
    "time_to_target_seconds": None,
    "value": None,
    "message": "interrupted, so",
}


def interrupted(number, batch, role, **more):
    return trial(number, batch, 0.1, None, role=role) | STOPPED | more


def test_a_run_that_was_only_interrupted_does_not_speak_for_its_configuration(result_of):
    made = study(*BOTH, (16, "search", "diverged"), (128, "search", 14.0))
    first = [interrupted(0, 32, "baseline"), interrupted(1, 16, "search"), interrupted(2, 128, "search")]
    trials = [*first, *(each | {"number": 3 + number} for number, each in enumerate(made["trials"]))]
    alone = [interrupted(7, 8, "search"), interrupted(8, 4, "search", state="running")]
    result = result_of("tune", **made | {"trials": [*trials, *alone]})
    assert [(row["batch"], row["why"]) for row in rows_of(result)[1]] == [
        ("64", "recommended"),
        ("128", "a single run, not confirmed"),
        ("16", "diverged"),
        ("8", "interrupted before its end"),
        ("4", "interrupted before its end"),
        ("32", "what you run today: 3 times as long"),
    ]
    cells = {column.name: column.cells for column in runs(result).columns}
    told = dict(zip(cells["run"], zip(cells["outcome"], cells["note"], strict=True), strict=True))
    assert {told[number] for number in "01278"} == {("interrupted", "interrupted, so")}
    assert {
        layer.name: len(layer.points) for layer in landscape(result).series if layer.mark in {"open", "broken"}
    } == {
        "stopped before the target": 2,
        "diverged or failed": 1,
    }


def test_what_runs_today_is_not_failed_where_its_only_run_was_interrupted(result_of):
    trials = [interrupted(0, 32, "baseline"), interrupted(1, 32, "baseline", state="running", message=None)]
    before, after = (
        rows_of(result_of("tune", trials=part, recommendation=None, baseline=None))[1] for part in (trials[:1], trials)
    )
    assert [row["why"] for row in before] == ["what you run today: interrupted before its end"]
    assert [row["why"] for row in after] == ["what you run today: running"]


def test_a_configuration_that_was_not_timed_beside_the_answer_is_compared_with_its_runs_as_they_were(result_of):
    runs = study((32, "baseline", 45.0), (64, "confirm", 20.0), (32, "confirm", 45.0), (16, "confirm", 40.0))
    answer, today = choice(64, 0.1, 10.0, "so", timed_in_turn=True), choice(32, 0.1, 30.0, "so")
    result = result_of("tune", **runs | {"recommendation": answer, "baseline": today})
    made, rows = rows_of(result)
    assert {row["batch"]: row["why"] for row in rows[1:]} == {
        "16": "2 times as long: on the busy machine, where the recommended took 20 s",
        "32": "what you run today: 3 times as long",
    }
    assert [row["to target"] for row in rows] == ["≈ 10 s", "40 s", "≈ 30 s"]
    assert made.title.endswith("medians over their seeds; ≈: machine idle (estimate)")
    assert bars(result, result.recommendation)[0].title == "Time to target, machine idle (estimate)"
    del today["time_to_target_seconds"]
    stopped = [each | {"time_to_target_seconds": None} for each in runs["trials"] if each["batch_size"] == 32]
    unknown = runs | {"recommendation": answer, "baseline": today, "trials": [*runs["trials"][1:2], *stopped]}
    assert [row["to target"] for row in rows_of(result_of("tune", **unknown))[1]] == ["≈ 10 s", "-"]


def test_runs_that_were_cut_off_are_a_lower_bound_of_their_median(result_of):
    runs = study((32, "baseline", 45.0), (64, "confirm", 20.0))
    runs["baseline"]["time_to_target_seconds"] |= {"median": 30.0, "low": 30.0, "at_least": True}
    rows = rows_of(result_of("tune", **runs))[1]
    assert [row["to target"] for row in rows] == ["20 s", "≥ 30 s"]


def test_a_single_run_that_is_recommended_is_not_compared_with_fresh_seeds(result_of):
    runs = study(
        (64, "search", 1.4), (32, "baseline", 3.0), (256, "search", 0.4), (256, "confirm", 2.2), answer=0, today=1
    )
    del runs["baseline"]
    rows = rows_of(result_of("tune", **runs))[1]
    assert [(row["batch"], row["why"]) for row in rows[:2]] == [
        ("64", "recommended, not confirmed on fresh seeds"),
        ("256", "on fresh seeds, of which the recommended ran on none"),
    ]


def test_what_runs_today_is_as_much_slower_as_the_headline_says(result_of):
    gain = {"median": 2.0, "low": 1.4, "high": 9.0, "at_least": True}
    runs = study((32, "baseline", 10.0), (64, "confirm", 10.0), (32, "confirm", 10.0))
    answer, today = choice(64, 0.1, 10.0, "so", speedup_over_baseline=gain), choice(32, 0.1, 10.0, "so")
    rows = rows_of(result_of("tune", **runs | {"recommendation": answer, "baseline": today}))[1]
    assert rows[1]["why"] == "what you run today: at least 1.4 times as long"


def test_where_what_runs_today_is_the_answer_it_stands_first_and_once(result_of):
    rows = rows_of(result_of("tune", **study(*BOTH, (32, "confirm", 30.0), answer=0)))[1]
    assert [(row["batch"], row["why"]) for row in rows] == [
        ("32", "recommended, and what you run today"),
        ("64", "ahead on these seeds alone"),
    ]


def test_of_many_configurations_the_best_are_shown_and_counted_and_what_runs_today_stays_last(result_of):
    many = [(100 + number, "search", 90.0 - number) for number in range(30)]
    made, rows = rows_of(result_of("tune", **study(*BOTH, *many)))
    assert made.title == "configurations, the recommended first, 12 of 32: medians over their seeds"
    assert [row["batch"] for row in rows] == ["64", *(str(129 - number) for number in range(10)), "32"]


def test_a_metric_to_maximise_ranks_configurations_from_the_highest(result_of):
    common = {"state": "complete", "outcome": "finished", "learning_rate": 0.1, "precision": "bf16", "seed": 0}
    trials = [
        {"number": 0, "batch_size": 16, "value": 0.7, "role": "baseline"} | common,
        {"number": 1, "batch_size": 32, "value": 0.9, "role": "confirm"} | common,
        {"number": 2, "batch_size": 64, "value": 0.8, "role": "confirm"} | common,
    ]
    found = choice(32, 0.1, 1.0, "so and so", value={"median": 0.9, "low": 0.9, "high": 0.9})
    target = {"metric": "accuracy", "goal": "maximize", "kind": "best_metric"}
    rows = rows_of(result_of("tune", target=target, trials=trials, recommendation=found, baseline=None))[1]
    assert [(row["best accuracy"], row["why"]) for row in rows] == [
        ("0.9", "recommended"),
        ("0.8", "worse"),
        ("0.7", "what you run today: a single run, not confirmed"),
    ]


def test_single_runs_are_shown_in_the_terminal_where_they_are_asked_for_and_folded_on_the_page(tuned):
    texts = [io.StringIO(), io.StringIO()]
    for verbose, page in enumerate(texts):
        Console(file=page, width=160).print(render(tuned, verbose=bool(verbose)))
    assert ["every run, best first" in page.getvalue() for page in texts] == [False, True]
    assert "configurations, the recommended first" in texts[1].getvalue()
    page = tuned.to_html()
    assert re.search(r"<details><summary>Every run, best first.*?<table.*?</details>", page, re.DOTALL)
    assert page.index("<caption><span>configurations") < page.index("<details>")
    assert "Configurations, the recommended first" in to_markdown(tuned)
    assert "very run, best first" not in to_markdown(tuned)
