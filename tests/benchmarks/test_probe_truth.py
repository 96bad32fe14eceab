"""The order in which probes are measured against a plain loop, and what the table says of them."""

import json
from dataclasses import asdict

from probe_truth import setups, soonest_whole
from truth_rows import SIZES, Row, misses, read, read_table, report


def measured(setup, seconds, *, answer=100, truth=100):
    return Row(setup, answer=answer, truth=truth, attempts=3, seconds=seconds)


def test_a_case_is_measured_at_all_sizes_before_the_next_and_the_soonest_done_first():
    wanted = setups(["slow", "quick", "nearly", "unknown"], SIZES)
    of = {(setup.slug, setup.gib): setup for setup in wanted}
    rows = {of["slow", 8]: measured(of["slow", 8], 100), of["quick", 8]: measured(of["quick", 8], 1)}
    rows |= {of["nearly", gib]: measured(of["nearly", gib], 20) for gib in SIZES[1:]}
    order = [setup.slug for setup in soonest_whole(wanted, rows)]
    assert order == [slug for slug in ("quick", "nearly", "unknown", "slow") for _ in SIZES]


def test_a_setup_is_the_same_whatever_else_is_measured():
    assert set(setups(["one", "two"], (24, 80))) < set(setups(["one", "two", "three"], SIZES))


def test_the_table_counts_what_is_too_high_or_too_low_and_the_cases_at_all_sizes():
    wanted = sorted(setups(["whole"], SIZES), key=lambda setup: setup.gib)
    rows = [measured(setup, 1.0) for setup in wanted] + [
        measured(setup, 1.0, answer=answer, truth=100)
        for setup, answer in zip(setups(["other"], (8, 24)), (101, 98), strict=True)
    ]
    text = report(rows, "command")
    assert "6 answers of 2 models, 1 of them at all of 8, 24, 80, 141 GiB" in text
    assert "1 that the loop cannot train, 1 more than 1 % below" in text
    assert len(misses(rows)) == 2


def test_what_is_kept_is_read_as_it_was(tmp_path):
    (setup,) = setups(["case"], (80,))
    state = tmp_path / "state.jsonl"
    state.write_text(json.dumps(asdict(measured(setup, 2.5))) + "\n")
    assert read(state) == {setup: measured(setup, 2.5)}
    assert read(tmp_path / "none") == {}


def test_a_table_is_read_as_it_was_written():
    wanted = setups(["case"], SIZES)
    rows = {setup: measured(setup, 2.5, answer=123_456, truth=123_456) for setup in wanted}
    for row, truth, trouble in zip(
        rows.values(), (1, 1_000_000, None, 123_456), ("", "why", "raises", ""), strict=True
    ):
        row.truth, row.trouble, row.estimated, row.commit = truth, trouble, truth == 1, "abc123"
    last = rows[wanted[3]]
    last.easier, last.plain, rows[wanted[2]].answer = ["clips", "zeroes after, looks"], (8, 2, 7.5), None
    last.trouble = "rough"
    found = read_table(report(list(rows.values()), "command"))
    assert found[wanted[3]].easier == ["clips", "zeroes after", "looks"]
    found[wanted[3]].easier = last.easier
    assert found == rows
