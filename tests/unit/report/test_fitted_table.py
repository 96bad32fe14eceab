"""Tables at any width: columns give way by rank, words wrap, and no figure is cut."""

import io

from rich.console import Console

from batchtune.report.terminal import FittedTable, bar
from batchtune.report.view.model import Column, Table, numbers


def shown(made, width=80, *, verbose=False):
    page = io.StringIO()
    Console(file=page, width=width).print(FittedTable(made, verbose=verbose))
    return [line.rstrip() for line in page.getvalue().splitlines()]


COLUMNS = [
    Column(name="batch", cells=["1", "1,000"], values=[1, 1000]),
    Column(name="time", cells=["12.5 s", "7.25 s"], values=[12.5, 7.25], unit="s", lined_up=["12.5 ", "7.25"], spare=1),
    Column(name="bar", cells=["100%", "50%"], values=[1.0, 0.5], drawn=True, spare=3),
    Column("why", ["a reason of many words, and then some", ""], spare=2, wraps=True),
]


def test_all_columns_are_shown_where_there_is_room():
    lines = shown(Table("rows", COLUMNS))
    assert lines[0] == "rows"
    assert lines[1].split() == ["batch", "time,", "s", "bar", "why"]
    assert not any("no room" in line for line in lines)


def test_the_column_that_can_be_spared_most_goes_first_and_is_named_where_all_was_asked_for():
    assert shown(Table("rows", COLUMNS), 40, verbose=True)[-1] == "no room here for: bar"
    for width, names in ((20, "bar, why"), (8, "bar, why, time, s")):
        assert " ".join(shown(Table("rows", COLUMNS), width, verbose=True)).endswith(f"no room here for: {names}")
        assert "no room" not in " ".join(shown(Table("rows", COLUMNS), width))


def test_words_wrap_and_figures_do_not():
    lines = shown(Table("rows", COLUMNS), 36)
    assert " ".join(" ".join(line.split()) for line in lines).count("a reason of") == 1
    assert lines[3].split()[:2] == ["1", "12.5"]
    assert max(map(len, lines)) <= 36


def test_a_column_in_which_nothing_was_measured_is_left_out_without_a_word():
    lines = shown(Table("rows", [Column("batch", ["1", "2"]), Column("power", ["-", ""])]))
    assert lines[1] == "batch"
    assert "power" not in " ".join(lines)


def test_decimal_points_stand_under_one_another():
    lines = shown(Table("rows", [numbers("samples/s", [16.6, 140.0, 9.25])]))
    assert lines[3].index(".") == lines[5].index(".") == len(lines[4])


def test_text_in_brackets_is_no_markup():
    assert "[red]x" in " ".join(shown(Table("[b]", [Column("why", ["[red]x"])])))


def test_a_bar_is_as_long_as_its_share():
    assert [len(bar(share)) for share in (0.0, 0.25, 0.5, 1.0, 7.0, -1.0)] == [0, 3, 6, 12, 12, 0]
    assert bar(0.25 + 1 / 96) == "███▏"
