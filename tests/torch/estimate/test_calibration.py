"""What probes measured on a GPU, kept between processes: medians, bounds, broken files."""

from __future__ import annotations

import json

import pytest

from batchtune.estimate import calibration
from batchtune.estimate.calibration import cache_folder, offsets_of, record
from batchtune.estimate.memory.overheads import UNMEASURED, capacity_bytes, confidence, kind_of

MIB, GIB = 1 << 20, 1 << 30
DRIVER = "NVIDIA A100-SXM4-80GB"  # the catalogue calls it A100-80GB


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "batchtune"


def test_the_median_of_what_was_measured_is_found_under_the_catalogues_name():
    for value in (90 * MIB, 10 * MIB, 40 * MIB):
        record(DRIVER, "context_bytes", value + 400 * MIB)
    record(DRIVER, "convolution_share", 0.25)
    found = offsets_of("A100-80GB")
    assert (found.convolution_share, found.context_bytes, found.probes) == (0.25, 440 * MIB, 3)
    assert found.recurrent_share is None
    assert offsets_of("H100 SXM") == UNMEASURED


def test_only_the_latest_measurements_are_kept(folder):
    for value in range(100):
        record(DRIVER, "context_bytes", value * MIB)
    kept = json.loads((folder / "calibration.json").read_text())["gpus"][DRIVER]["context_bytes"]
    assert kept == [value * MIB for value in range(84, 100)]
    assert [path.name for path in folder.iterdir()] == ["calibration.json"], "no temporary file is left"


def test_what_cannot_be_true_is_not_kept():
    record(DRIVER, "context_bytes", -1)
    record(DRIVER, "context_bytes", 3 * MIB)
    record(DRIVER, "convolution_share", 7.0)
    assert offsets_of("A100-80GB") == UNMEASURED


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": 3}',
        '{"format": 99, "gpus": {}}',
        '{"format": 3, "gpus": 3}',
        '{"format": 3, "gpus": {"NVIDIA A100-SXM4-80GB": {"torch": "2.13", "context_bytes": ["x", null, NaN, -5]}}}',
        '{"format": 3, "gpus": {"NVIDIA A100-SXM4-80GB": {"torch": "0.1", "context_bytes": [5]}}}',
        '{"format": 3, "gpus": {"no such GPU": [1]}}',
    ],
)
def test_a_broken_or_foreign_file_is_ignored_and_replaced_by_the_next_measurement(folder, text):
    folder.mkdir()
    (folder / "calibration.json").write_text(text)
    assert offsets_of("A100-80GB") == UNMEASURED
    record(DRIVER, "context_bytes", 400 * MIB)
    assert offsets_of("A100-80GB").context_bytes == 400 * MIB


def test_a_folder_that_cannot_be_written_costs_nothing(folder):
    folder.write_text("a file where the folder should be")
    record(DRIVER, "context_bytes", 400 * MIB)
    assert offsets_of("A100-80GB") == UNMEASURED


@pytest.mark.parametrize(
    ("platform", "variables", "end"),
    [
        ("linux", {}, ".cache/batchtune"),
        ("darwin", {}, "Library/Caches/batchtune"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/batchtune"),
        ("linux", {"XDG_CACHE_HOME": "/elsewhere"}, "/elsewhere/batchtune"),
    ],
)
def test_the_file_lies_where_the_platform_keeps_caches(monkeypatch, platform, variables, end):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(calibration.sys, "platform", platform)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder().as_posix().endswith(end)


def test_measured_overheads_take_the_place_of_the_tables():
    plain, conv = {"aten.addmm.default"}, {"aten.addmm.default", "aten.convolution.default"}
    record(DRIVER, "context_bytes", 700 * MIB)
    record(DRIVER, "convolution_share", 0.25)
    measured, left = offsets_of("A100-80GB"), 80 * GIB - 700 * MIB
    assert capacity_bytes(80 * GIB, "Ampere", "NVIDIA", plain, None, measured) == left
    assert capacity_bytes(80 * GIB, "Ampere", "NVIDIA", conv, None, measured) == pytest.approx(left / 1.25, abs=1)
    assert (kind_of(plain), kind_of(conv), kind_of({"aten._cudnn_rnn.default"} | conv)) == (
        "plain",
        "convolution",
        "recurrent",
    )


def test_an_estimate_says_that_it_is_calibrated():
    for _ in range(2):
        record(DRIVER, "context_bytes", 400 * MIB)
    sure = confidence(
        {"aten.mm.default"}, [], aligned=True, vendor="NVIDIA", precision="bf16", measured=offsets_of("A100-80GB")
    )
    assert str(sure) == "high (±4% of memory), calibrated"
    assert sure.notes == ("overheads as measured in 2 probes of this GPU here",)
