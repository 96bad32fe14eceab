"""The largest batch of inference on a card, against a plain evaluation loop there, and its estimate."""

import json

import fake_gpu
import pytest
from cuda.tasks import ESTIMATES, PERCEPTRON

import batchtune

GiB = 2**30
LOOP = (
    PERCEPTRON
    + """
import json, sys
limit, sizes = int(sys.argv[1]), json.loads(sys.argv[2])
torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
ran = []
for size in sizes:
    model = build_model().cuda().eval()
    try:
        with torch.inference_mode():
            for _ in range(3):
                batch = make_batch(size).cuda()
                loss = compute_loss(model, batch)
        torch.cuda.synchronize()
        ran.append(True)
    except torch.OutOfMemoryError:
        ran.append(False)
    model = batch = loss = None
    torch.cuda.empty_cache()
print(json.dumps(ran))
os._exit(0)
"""
)


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model.py").write_text(PERCEPTRON)
    return tmp_path / "model.py"


@ESTIMATES
def test_it_runs_in_a_plain_loop_two_percent_more_do_not_and_the_estimate_is_near(task, script):
    options = {"precision": "fp32", "memory_limit": GiB, "inference": True}
    with fake_gpu.machine(fake_gpu.Card("8GiB")):
        probe = batchtune.probe(task, device="cuda", verify_steps=3, throughput=False, **options).probe
        (estimate,) = batchtune.estimate(task, gpus="RTX 3090", **options).estimates
        found = probe.max_batch_size
        assert script(LOOP, GiB, json.dumps([found, int(1.02 * found)])) == [True, False]
    assert (probe.inference, probe.limited_by, probe.verified_in_fresh_process) == (True, "memory", True)
    assert estimate.max_batch_size == pytest.approx(found, rel=0.04)
