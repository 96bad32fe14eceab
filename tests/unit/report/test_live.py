"""A run as it goes: rows of a growing table, a moving line in a terminal only, plain lines in a pipe."""

import io
import re

import pytest
from rich.console import Console

from batchtune.document import Attempt, CurvePoint, ThroughputPoint, Trial
from batchtune.report.live import LiveObserver

ATTEMPTS = [
    Attempt(batch_size=1, outcome="fit", steps=3, peak_reserved_bytes=200 << 20, step_seconds=0.004),
    Attempt(batch_size=4096, outcome="oom", message="tried to allocate 2 GiB while 1 GiB was free [of 8 GiB] " * 2),
    Attempt(batch_size=1437, outcome="fit", peak_reserved_bytes=7 << 30, step_seconds=1.5, purpose="verify"),
]
TRIAL = Trial(
    number=3, state="complete", outcome="reached", batch_size=128, learning_rate=3e-4, precision="bf16", seed=0
).model_copy(update={"time_to_target_seconds": 41.0})


def run(width=80, *, terminal=False, verbose=False, encoding="utf-8"):
    page = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    console = Console(file=page, width=width, force_terminal=terminal, color_system="standard" if terminal else None)
    with LiveObserver(console, verbose=verbose, total_seconds=60.0) as observer:
        observer.stage("probing bf16")
        for attempt in ATTEMPTS:
            observer.attempting(attempt.batch_size, "aimed at the limit")
            observer.attempted(attempt)
        observer.note("a reason")
        observer.stage("timing steps")
        observer.throughput(ThroughputPoint(batch_size=64, samples_per_second=8123.4, step_seconds=2e-5))
        observer.stage("searching")
        observer.trial_started(TRIAL, best_seconds=12.0)
        observer.trial_evaluated(TRIAL, CurvePoint(seconds=3.0, samples=5, value=0.5))
        observer.trial_ended(TRIAL, done=1, seconds_left=30.0)
        observer.printed("epoch [1] done")
    page.flush()
    return page.buffer.getvalue().decode(encoding)


def test_a_pipe_gets_one_plain_line_for_each_event():
    lines = run().splitlines()
    assert not any("\x1b" in line for line in lines)
    assert lines[0] == "probing bf16"
    assert lines[1].split() == ["batch", "outcome", "peak", "step", "why"]
    assert lines[2].split() == ["1", "fit", "200", "MiB", "4", "ms"]
    assert lines[3].split()[:2] == ["4,096", "oom"]
    assert lines[3].endswith(ATTEMPTS[1].message.strip())
    assert lines[4].endswith("final check")
    assert [line.split()[0] for line in lines[5:]] == ["timing", "batch", "64", "searching", "run", "3"]


def test_progress_is_a_share_and_a_time_now_and_then():
    page = io.StringIO()
    with LiveObserver(Console(file=page, width=80), verbose=False) as observer:
        for seconds in range(1, 26):
            observer.progress(seconds / 100, float(seconds), 60.0)
    assert page.getvalue().splitlines() == [
        "  10% done after 10 s of at most 60 s",
        "  20% done after 20 s of at most 60 s",
    ]


def test_rows_stand_under_their_headings():
    lines = run().splitlines()
    assert lines[2].index("fit") == lines[1].index("outcome")
    assert lines[2].index("200 MiB") + len("200 MiB") == lines[1].index("peak") + len("peak")
    assert lines[-1].index("41 s") + len("41 s") == lines[-2].index("result") + len("result")


def test_reasons_and_what_the_user_s_code_prints_are_for_those_who_ask():
    assert "a reason" not in run()
    assert "epoch" not in run()
    assert "  a reason\n" in run(verbose=True)
    assert "  | epoch [1] done\n" in run(verbose=True)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_in_a_terminal_no_row_is_wider_than_it_and_no_figure_is_cut(width):
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", run(width, terminal=True)).replace("\r", "\n")
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= width
    assert all(any(figure in line for line in lines) for figure in ("4,096", "1,437", "7.0 GiB", "8,123", "41 s"))
    assert "…" not in text
    assert any(line.split()[:2] == ["4,096", "oom"] for line in lines)


def test_outcomes_have_their_colours_in_a_terminal():
    text = run(terminal=True)
    assert "\x1b[32mfit" in text
    assert "\x1b[31moom" in text


def test_an_error_stream_that_knows_few_characters_gets_others_instead():
    assert "20 us" in run(encoding="ascii")


def played(text):
    """What a terminal shows after all this, and how many lines it needed at most."""
    rows, at, across = [""], 0, 0
    for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if part == "\n":
            at, across = at + 1, 0
            rows += [""] if at == len(rows) else []
        elif part == "\r":
            across = 0
        elif part.startswith("\x1b"):
            at -= int(part[2:-1] or 1) if part.endswith("A") else 0
            rows[at] = "" if part.endswith("K") else rows[at]
        else:
            rows[at] = rows[at][:across].ljust(across) + part + rows[at][across + len(part) :]
            across += len(part)
    return [row for row in rows if row.strip()], len(rows)


def trial(number, batch, seconds, role="search"):
    made = {"state": "complete", "outcome": "reached", "precision": "bf16", "seed": number, "role": role}
    return Trial(number=number, batch_size=batch, learning_rate=1e-3, time_to_target_seconds=seconds, **made)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20)])
def test_a_terminal_shows_a_picture_no_higher_than_it_that_is_gone_at_the_end(width, height):
    page = io.StringIO()
    console = Console(file=page, width=width, height=height, force_terminal=True, _environ={"TERM": "xterm"})
    with LiveObserver(console, verbose=False, total_seconds=60.0) as observer:
        observer.stage("probing bf16")
        for attempt in ATTEMPTS * 9:
            observer.attempted(attempt)
        shown, lines = played(page.getvalue())
        assert lines <= height
        assert "probing bf16" in shown[0]
        assert shown[1].strip() == "1,437 fits, 4,096 does not"
        observer.stage("searching")
        for number in range(40):
            observer.trial_ended(trial(number, 16 + number, 50.0 - number), done=number, seconds_left=30.0)
        observer.trial_started(trial(40, 64, None), best_seconds=11.0)
        observer.stage("confirming")
        shown, lines = played(page.getvalue())
        assert lines <= height
        assert "30 s left" in shown[0]
        assert shown[1].strip() == "best so far: 11 s at batch 55, lr 0.001"
    assert played(page.getvalue())[0] == []


def test_a_study_s_picture_has_a_row_for_each_configuration_the_best_first():
    page = io.StringIO()
    console = Console(file=page, width=80, height=24, force_terminal=True, _environ={"TERM": "xterm"})
    with LiveObserver(console, verbose=False) as observer:
        observer.stage("confirming")
        for number, (batch, seconds, role) in enumerate(
            [(32, 30.0, "baseline"), (64, 12.0, "search"), (64, 14.0, "confirm"), (8, None, "search")]
        ):
            observer.trial_ended(trial(number, batch, seconds, role), done=number, seconds_left=30.0)
        rows = [line.split() for line in played(page.getvalue())[0]]
    assert rows[-4:] == [
        ["batch", "lr", "median", "runs", "last", "run"],
        ["64", "0.001", "13", "s", "2", "reached"],
        ["32", "0.001", "30", "s", "1", "today,", "reached"],
        ["8", "0.001", "-", "1", "reached"],
    ]
