"""The workspaces that an estimate takes cuDNN's convolutions to have, beside those that were measured on a GPU."""

import json
import math
from functools import cache

import pytest
from convolution_workspaces import DATA, PASSES, estimated, is_right, more_jobs

pytest.importorskip("torch")


@cache
def measured():
    """Those of models, in batches of 32, and the others."""
    more = [shape | {"dtype": dtype, "layout": layout} for shape, dtype, layout in more_jobs()]
    rows = [(row, {key: row[key] for key in row if key not in PASSES}) for row in json.loads(DATA.read_text())["rows"]]
    return [row for row, shape in rows if shape not in more], [row for row, shape in rows if shape in more]


def of_kind(rows, dtype, layout):
    found = [row for row in rows if (row["dtype"], row["layout"]) == (dtype, layout)]
    return [(row, estimated(row)) for row in found]


def kind_of(row):
    return "grouped" if row["groups"] > 1 else "transposed" if row["transposed"] else "one"


@pytest.mark.parametrize(
    ("dtype", "layout", "shares"),
    [
        ("bf16", "contiguous", {"forward": 0.95, "input": 0.9, "weight": 0.85}),
        ("bf16", "channels last", {"forward": 0.95, "input": 0.95, "weight": 0.6}),
        ("tf32", "contiguous", {"forward": 0.8, "input": 0.8, "weight": 0.65}),
    ],
)
def test_most_are_those_that_were_measured(dtype, layout, shares):
    rows = of_kind(measured()[0], dtype, layout)
    assert len(rows) > 100
    for name in PASSES:
        right = sum(is_right(row, name, guess[name]) for row, guess in rows)
        assert right >= shares[name] * len(rows), name


@pytest.mark.parametrize(
    ("dtype", "layout", "kind", "errors"),
    [
        ("bf16", "contiguous", "one", {"forward": 0.04, "input": 0.01, "weight": 0.06}),
        ("bf16", "contiguous", "transposed", {"forward": 0.01, "input": 0.02, "weight": 0.06}),
        ("bf16", "contiguous", "grouped", {"forward": 0.05, "input": 0.05, "weight": 0.2}),
        ("bf16", "channels last", "grouped", {"forward": 0.1, "input": 0.1, "weight": 0.15}),
        ("tf32", "contiguous", "one", {"forward": 0.08, "input": 0.13, "weight": 0.1}),
        ("tf32", "contiguous", "transposed", {"forward": 0.01, "input": 0.2, "weight": 0.2}),
        ("tf32", "contiguous", "grouped", {"forward": 0.02, "input": 0.12, "weight": 0.12}),
        ("tf32", "channels last", "grouped", {"forward": 0.01, "input": 0.15, "weight": 0.12}),
    ],
)
def test_bytes_of_narrow_and_grouped_ones_are_about_those_that_were_measured(dtype, layout, kind, errors):
    kinds = [
        ("grouped" if row["groups"] > 1 else "transposed" if row["transposed"] else "one") for row in measured()[1]
    ]
    rows = of_kind([row for row, each in zip(measured()[1], kinds, strict=True) if each == kind], dtype, layout)
    assert len(rows) >= 24
    for name in PASSES:
        off = sum(abs(guess[name] - row[name]) for row, guess in rows)
        assert off <= errors[name] * sum(row[name] for row, _ in rows), name


def test_channels_last_in_tf32_takes_next_to_nothing():
    rows = of_kind([row for row in measured()[1] if row["groups"] == 1], "tf32", "channels last")
    sizes = [row["batch"] * math.prod(row["size"]) * 4 for row, _ in rows]
    for name in PASSES:
        assert sum(row[name] for row, _ in rows) < 0.1 * sum(sizes)
        assert sum(guess[name] for _, guess in rows) <= sum(row[name] for row, _ in rows)


def test_large_ones_are_most_of_what_is_estimated():
    rows = [row for row in measured()[0] if row["dtype"] == "bf16"]
    taken = sum(row["forward"] for row in rows)
    assert taken > 1 << 30
    assert sum(estimated(row)["forward"] for row in rows) == pytest.approx(taken, rel=0.05)
