"""YAML as people write it."""

import math

import pytest

from batchtune.config.yaml_values import MAX_CHARACTERS, MAX_DEPTH, MalformedYamlError, parse_value, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("1.5e3", 1500.0),
        (".5", 0.5),
        ("-2.", -2.0),
        ("1_000", 1000),
        ("007", 7),
        ("+3", 3),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("-.inf", -math.inf),
    ],
)
def test_numbers_and_constants_mean_what_they_look_like(text, value):
    found = parse_value(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    "text", ["on", "off", "yes", "No", "12:30", "2024-01-01", "0x10", "1e", "e5", "20GiB", "1.2.3"]
)
def test_everything_else_stays_text(text):
    assert parse_value(text) == text


def test_quoted_numbers_stay_text():
    assert parse_value("'1e-5'") == "1e-5"
    assert parse_value('"true"') == "true"


def test_a_number_too_long_to_be_meant_stays_text():
    assert parse_value("9" * 5000) == "9" * 5000


def test_not_a_number_is_one():
    assert math.isnan(parse_value(".nan"))


def test_every_key_knows_its_line():
    document, lines = parse_yaml("task: model.py\n\nbudget:\n  run: 1m   # a comment\n  total: 5m\nlist: [a, {b: 1}]\n")
    assert document == {"task": "model.py", "budget": {"run": "1m", "total": "5m"}, "list": ["a", {"b": 1}]}
    assert lines == {"task": 1, "budget": 3, "budget.run": 4, "budget.total": 5, "list": 6, "list.b": 6}


def test_an_empty_document_is_an_empty_mapping():
    assert parse_yaml("# nothing yet\n") == ({}, {})


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm():
    assert parse_yaml("\ufefftask: model.py\r\nseed: 3\r\n") == (
        {"task": "model.py", "seed": 3},
        {"task": 1, "seed": 2},
    )


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: [", 2, "not valid YAML"),
        ("a: 1\n\tb: 2", 2, "not valid YAML"),
        ("a: \x00", 1, "special characters"),
        ("a: 1\n---\nb: 2", 2, "another document"),
        ("a: 1\nb: 2\na: 3", 3, "'a' stands twice (first in line 1)"),
        ("s:\n  a: 1\n  a: 2", 3, "'s.a' stands twice (first in line 2)"),
        ("a: &x {b: 1}\nc: *x", 1, "anchors and aliases"),
        ("- a\n- b", 1, "a mapping of keys to values"),
        ("just text", 1, "a mapping of keys to values"),
        ("a: " + "[" * 60 + "]" * 60, 1, f"nested deeper than {MAX_DEPTH}"),
        ("{" * 5000, 1, f"nested deeper than {MAX_DEPTH}"),
        ("a" * (MAX_CHARACTERS + 1), 1, "this is no configuration"),
    ],
)
def test_what_is_no_configuration_is_named_with_its_line(text, line, words):
    with pytest.raises(MalformedYamlError) as raised:
        parse_yaml(text)
    assert raised.value.problems[0][0] == line
    assert words in raised.value.problems[0][1]


def test_every_key_that_stands_twice_is_reported():
    with pytest.raises(MalformedYamlError) as raised:
        parse_yaml("a: 1\na: 2\nb: 1\nb: 2")
    assert [line for line, _ in raised.value.problems] == [2, 4]


def test_a_bomb_of_aliases_is_refused_before_it_grows():
    levels = "".join(f"l{n}: &l{n} [{', '.join(f'*l{n - 1}' for _ in range(9))}]\n" for n in range(1, 12))
    with pytest.raises(MalformedYamlError):
        parse_yaml("l0: &l0 [a]\n" + levels)


def test_a_value_that_is_no_yaml_says_so():
    with pytest.raises(MalformedYamlError):
        parse_value("[1, 2")
