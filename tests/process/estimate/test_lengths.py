"""The largest batch of every length on GPUs that are not there."""

import pytest
from fixtures.tasks import MADE_LENGTHS

LENGTHS = "32,64,96,128,256"


@pytest.fixture
def task(quick_cli):
    quick_cli.write("model.py", MADE_LENGTHS)
    return quick_cli


def test_every_gpu_has_a_batch_for_every_length_and_all_formats_show_it(task):
    asked = ("estimate", "model.py", "--lengths", LENGTHS, "-q", "--precision", "fp32")
    found = task(*asked, "--gpu", "T4", "--gpu", "A100-80GB", "--json")
    assert found.code == 0, found.err
    small, large = found.document["estimates"]
    for row in (small, large):
        assert [each["length"] for each in row["lengths"]] == [32, 64, 96, 128, 256]
        batches = [each["max_batch_size"] for each in row["lengths"]]
        assert batches == sorted(batches, reverse=True)
        assert batches[-1] == row["max_batch_size"]
        assert batches[0] / batches[-1] == pytest.approx(8, rel=0.05)
        assert all(0 < each["safe_max_batch_size"] < each["max_batch_size"] for each in row["lengths"])
        assert all(each["max_batch_size"] <= each["alone_max_batch_size"] for each in row["lengths"])
        assert all(each["peak_bytes"] < row["memory_bytes"] for each in row["lengths"])
    assert large["max_batch_size"] > 4 * small["max_batch_size"]
    shown = task(*asked, "--gpu", "T4")
    assert "is the largest safe micro-batch size at length 256" in shown.out
    assert "largest batch of each length at fp32, estimated, not measured" in shown.out
    assert f"batchtune probe model.py --precision fp32 --lengths {LENGTHS}" in shown.out


def test_a_length_is_asked_for_where_batches_take_one(task):
    for flags, message in (
        ((), "make_batch takes a length, too; say which there are: --lengths 128,256,512,1024"),
        (("--lengths", "auto"), "has no sample_length(sample) with a train_dataset to choose by"),
        (("--lengths", "8,many"), "--lengths many: is no length"),
        (("--lengths", "8", "--inference"), "--lengths: not with --inference"),
    ):
        found = task("estimate", "model.py", "--gpu", "T4", "-q", *flags)
        assert (found.code, found.err.count("\n")) == (2, 1)
        assert message in found.err
