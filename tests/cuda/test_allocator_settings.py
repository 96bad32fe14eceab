"""The allocator as the user has it set: the limit holds, and the answer trains within it; in the user's own process."""

import fake_gpu
import pytest
from fixtures.waiting import wait_until

GiB, MiB = 2**30, 2**20

FIND = """
import json, os, sys, torch, batchtune, fake_gpu
from torch import nn
model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
highest = []
def step(batch_size):
    model(torch.zeros(batch_size, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    highest.append((batch_size, torch.cuda.max_memory_reserved()))
found = batchtune.find_batch_size(step, device="cuda", memory_limit=int(sys.argv[1]), tolerance=0.05)
torch.cuda.empty_cache()
poisoned = None
def poison(batch_size):
    if batch_size > 2:
        fake_gpu.poison()
    step(batch_size)
try:
    batchtune.find_batch_size(poison, device="cuda", memory_limit=int(sys.argv[1]))
except batchtune.errors.DeviceError as error:
    poisoned = str(error)
print(json.dumps([found, max(reserved for size, reserved in highest if size == found), poisoned]))
os._exit(0)
"""


@pytest.mark.parametrize(
    "setting",
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:64,garbage_collection_threshold:0.8",
        "roundup_power2_divisions:4",
        "backend:cudaMallocAsync",
    ],
)
def test_an_answer_in_the_users_own_process_is_within_the_limit(script, setting):
    limit = GiB + MiB  # no multiple of the 2 MiB in which memory is taken from the card
    with fake_gpu.machine(fake_gpu.Card("4GiB")) as machine:
        found, reserved, poisoned = script(FIND, limit, PYTORCH_CUDA_ALLOC_CONF=setting)
        assert wait_until(lambda: machine.cards[0].processes == {})
    assert found > 1000
    assert 0.85 * limit < reserved <= limit
    assert poisoned.startswith("step(")
    assert "broke this process's hold on the device (CUDA error: device-side assert triggered)" in poisoned


WATCHED = """
import json, torch
from batchtune.device.memory import open_device
memory, limit = open_device("cuda"), 2**26 + 2**20
memory.enforce(limit)
held = torch.empty(limit - 2**16, dtype=torch.uint8, device="cuda")  # a pool of 66 MiB
try:
    told = memory.peaks().reserved_bytes
except torch.OutOfMemoryError as error:
    told = str(error)
memory.lift()
print(json.dumps([told, memory.peaks().reserved_bytes]))
"""


def test_a_pool_that_grew_past_the_limit_is_out_of_memory_though_torch_let_it(script):
    with fake_gpu.machine(fake_gpu.Card("4GiB")):
        told, reserved = script(WATCHED, PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    assert reserved == 66 * MiB
    assert told == f"{66 * MiB} bytes were in use, more than the limit of {65 * MiB} bytes"
