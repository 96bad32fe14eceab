"""The workspaces that an estimate takes cuDNN's convolutions to have, beside those that were measured on a GPU."""

import json

import pytest
from convolution_workspaces import DATA, PASSES, estimated, is_right

pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("dtype", "layout", "shares"),
    [
        ("bf16", "contiguous", {"forward": 0.95, "input": 0.9, "weight": 0.85}),
        ("bf16", "channels last", {"forward": 0.95, "input": 0.95, "weight": 0.6}),
        ("tf32", "contiguous", {"forward": 0.8, "input": 0.8, "weight": 0.65}),
    ],
)
def test_most_are_those_that_were_measured(dtype, layout, shares):
    rows = [row for row in json.loads(DATA.read_text())["rows"] if (row["dtype"], row["layout"]) == (dtype, layout)]
    assert len(rows) > 100
    guesses = [estimated(row) for row in rows]
    for name in PASSES:
        right = sum(is_right(row, name, guess[name]) for row, guess in zip(rows, guesses, strict=True))
        assert right >= shares[name] * len(rows), name


def test_large_ones_are_most_of_what_is_estimated():
    rows = [row for row in json.loads(DATA.read_text())["rows"] if row["dtype"] == "bf16"]
    taken = sum(row["forward"] for row in rows)
    assert taken > 1 << 30
    assert sum(estimated(row)["forward"] for row in rows) == pytest.approx(taken, rel=0.05)
