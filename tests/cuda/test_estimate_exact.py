"""The estimate against torch's own CUDA allocator on cases of the zoo: bytes, reserved memory, the largest batch."""

import json
import subprocess
import sys
from pathlib import Path

import fake_gpu
import pytest

CASES = (
    "MLP, AdamW",
    "MLP, 2 micro-batches",
    "gradients added up",
    "contrastive, B x B logits",
    "transformer, bf16",
    "LoRA, bf16",
    "ResNet, channels last, fp16",
    "autoencoder, variational",
    "recommender, large embeddings",
)
MEASURE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import estimate_allocator as table, torch, zoo
torch.set_num_threads(1)
gpu, found = table.forked(table.card), {}
for case in zoo.CASES:
    if case.name not in sys.argv[2:]:
        continue
    guess = table.forked(table.estimated, case, gpu)
    model, row = case.model(**case.options), guess["limits"][0]

    def trained(size, limit=table.LIMITS[0], settings=""):
        return table.forked(table.attempted, case, model, size, limit, settings)

    largest, expandable = row["max_batch_size"], row["expandable_segments_max_batch_size"]
    found[case.name] = {
        "limit": table.LIMITS[0],
        "largest": largest,
        "limited_by": row["limited_by"],
        "peaks": [[guess["peaks"][size], trained(size, None)["peaks"]] for size in list(guess["peaks"])[1:]],
        "trains": trained(largest)["fits"],
        "expandable trains": trained(expandable, settings=table.EXPANDABLE)["fits"],
        "more trains": trained(largest + max(2, largest // 100 + 1))["fits"],
    }
print(json.dumps(found))
"""
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def measured():
    benchmarks = Path(__file__).parents[1] / "benchmarks"
    card = fake_gpu.Card("24GiB", name="NVIDIA RTX A5000", context_bytes="500MiB", multiprocessors=64)
    with fake_gpu.machine(card):
        command = [sys.executable, "-c", MEASURE, benchmarks, *CASES]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_allocated_bytes_are_exact_and_reserved_ones_within_one_per_cent(measured, case):
    for guess, truth in measured[case]["peaks"]:
        assert guess[0] == truth[0]
        assert guess[1] == pytest.approx(truth[1], rel=0.01)


@pytest.mark.parametrize("case", CASES)
def test_the_largest_batch_trains_and_one_per_cent_more_does_not(measured, case):
    found = measured[case]
    assert found["trains"]
    assert found["expandable trains"]
    assert not found["more trains"] or found["limited_by"] == "max"
