"""The largest batch of every length, searched and checked on a CPU."""

import json

from fixtures.tasks import MADE_LENGTHS

QUICK = ("--device", "cpu", "--precision", "fp32", "--no-throughput", "-q", "--verify-steps", 1, "--steps", 1)


def test_shorter_inputs_get_larger_batches_and_all_train_together(quick_cli):
    quick_cli.write("model.py", MADE_LENGTHS)
    flags = ("--lengths", "2048,8192", "--memory-limit", "200MiB", "--tolerance", 0.1)
    found = quick_cli("probe", "model.py", *flags, *QUICK, "--json")
    assert found.code == 0, found.err
    probe = json.loads(found.out)["probe"]
    short, long = probe["lengths"]
    assert (short["length"], long["length"]) == (2048, 8192)
    assert long["max_batch_size"] == probe["max_batch_size"]
    assert short["max_batch_size"] >= 2 * long["max_batch_size"]
    assert probe["length_check"]["steps"] == 10
    assert {attempt["length"] for attempt in probe["attempts"]} == {8192}
