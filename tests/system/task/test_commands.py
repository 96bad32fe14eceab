"""Commands on modules and scripts of other libraries that are not rewritten; their recipes are tuned elsewhere."""

import importlib.util
import re

import pytest
from fixtures.adapted import MODULE, OWN_LOADERS, SCRIPT

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} not installed")
    for name in ("lightning", "transformers")
]


def test_a_module_of_lightnings_is_probed(quick_cli):
    quick_cli.write("linear.py", MODULE + OWN_LOADERS)
    found = quick_cli("probe", "linear.py:Lit", "--memory-limit", "500MiB", "--no-throughput", "--json", "-q")
    assert found.code == 0, found.err
    assert found.document["probe"]["max_batch_size"] == 20
    assert found.document["probe"]["limited_by"] == "dataset"


def test_a_module_of_lightnings_is_estimated(quick_cli):
    quick_cli.write("linear.py", MODULE + OWN_LOADERS)
    found = quick_cli("estimate", "linear.py:Lit", "--gpu", "T4", "--json", "-q")
    assert found.code == 0, found.err
    assert found.document["estimates"][0]["max_batch_size"] > 1000


def test_a_refusal_is_one_line_and_exit_code_2(quick_cli):
    quick_cli.write("linear.py", MODULE + OWN_LOADERS + "\n    def optimizer_step(self, *a, **k): ...\n")
    found = quick_cli("probe", "linear.py:Lit", "-q")
    assert found.code == 2
    assert found.err == (
        "batchtune: linear.py:Lit: it overrides optimizer_step(), which batchtune's own loop cannot honour\n"
    )


def test_a_question_to_the_trainer_within_a_step_is_one_line_and_exit_code_2(quick_cli):
    text = (MODULE + OWN_LOADERS).replace("loss = self(", "self.trainer.strategy.barrier()\n        loss = self(")
    quick_cli.write("linear.py", text)
    found = quick_cli("probe", "linear.py:Lit", "-q")
    assert found.code == 2
    assert re.fullmatch(r"batchtune: linear\.py:Lit uses self\.trainer\.strategy\.barrier: .* only\n", found.err)


def test_a_trainer_is_probed(quick_cli):
    quick_cli.write("train.py", SCRIPT)
    found = quick_cli("probe", "train.py:make", "--memory-limit", "1GiB", "--no-throughput", "--json", "-q")
    assert found.code == 0, found.err
    assert found.document["probe"]["max_batch_size"] == 40
    assert found.document["probe"]["limited_by"] == "dataset"


def test_a_trainer_that_shards_by_itself_is_refused_with_what_takes_its_place(quick_cli):
    quick_cli.write("train.py", f"{SCRIPT}\ndef sharded():\n    return make(fsdp=True)\n")
    found = quick_cli("tune", "train.py:sharded", "-q", "budget.total=1m")
    assert found.code == 3
    assert "Using fsdp only works in distributed training. Leave its fsdp out, and tune with --ranks N" in found.err


@pytest.mark.parametrize("attribute", ["make", "bert", "in_bf16", "in_tf32"])
def test_a_trainer_and_a_model_alone_are_estimated(quick_cli, attribute):
    source = "\ndef in_{0}():\n    return make(use_cpu=False, {0}=True)\n"
    quick_cli.write("train.py", SCRIPT + source.format("bf16") + source.format("tf32"))
    found = quick_cli("estimate", f"train.py:{attribute}", "--gpu", "T4", "--json", "-q")
    assert found.code == 0, found.err
    assert found.document["estimates"][0]["max_batch_size"] > 1000
