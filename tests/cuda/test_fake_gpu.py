"""The stand-ins against what is known of CUDA, NVML and PyTorch's caching allocator."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import fake_gpu
import pytest
from cuda.tasks import TORCH
from fake_gpu import forks

pynvml = pytest.importorskip("pynvml")
GiB, MiB = 2**30, 2**20
LIBRARIES = Path(sysconfig.get_path("purelib"), "fake_gpu_libraries")

CUDART = f"""
import ctypes, glob, json, os, sys
cuda = ctypes.CDLL(glob.glob({str(LIBRARIES)!r} + "/libcudart.so.*")[0])
driver = ctypes.CDLL("libcuda.so.1")
def device_count():
    count = ctypes.c_int()
    return cuda.cudaGetDeviceCount(ctypes.byref(count)), count.value
def allocate(size):
    pointer = ctypes.c_void_p()
    return cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size))
def seen():
    _, count = device_count()
    uuids = []
    for ordinal in range(count):
        raw = (ctypes.c_ubyte * 16)()
        driver.cuDeviceGetUuid_v2(raw, ordinal)
        uuids.append(bytes(raw).hex())
    return uuids
"""

ALLOCATOR = """
import gc, json, os, torch, fake_gpu
card = fake_gpu.this_machine().cards[0]
facts = {"context before": [torch.cuda.is_available(), torch.cuda.device_count(),
                            torch.cuda.get_device_properties(0).total_memory, card.contexts]}
MiB, GiB = 2**20, 2**30
def take(size): return torch.empty(int(size), dtype=torch.uint8, device="cuda")
def state(): return [torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]
def refused(size):
    try: take(size)
    except torch.OutOfMemoryError as error: return str(error)
held = []
def after(size):
    held.append(take(size)); return state()
facts["1 B"] = after(1)
facts["context after"] = [card.contexts == [os.getpid()], card.used_by(os.getpid())]
facts["513 B"] = after(513)
facts["1 MiB"] = after(MiB)
facts["1 MiB + 1 B"] = after(MiB + 1)
facts["10 MiB - 512 B"] = after(10 * MiB - 512)
facts["10 MiB"] = after(10 * MiB)
facts["11 MiB"] = after(11 * MiB)
facts["card"] = card.used_by(os.getpid()) - torch.cuda.memory_reserved()
held.clear(); torch.cuda.empty_cache()
facts["emptied"] = [*state(), card.used_by(os.getpid())]

a, b, c = take(4 * MiB), take(4 * MiB), take(4 * MiB)  # one segment of 20 MiB, split
del a, b
facts["merged"] = [after(8 * MiB), len(torch.cuda.memory_snapshot())]
del c; held.clear(); torch.cuda.empty_cache()

big, small = take(2.5 * GiB), take(GiB)
del small
facts["flushed and retried"] = [take(1.1 * GiB).numel(), state()[1], torch.cuda.memory_stats()["num_alloc_retries"]]
card.other = {4242: GiB // 2}
facts["message"] = refused(1.5 * GiB)
facts["num_ooms"] = torch.cuda.memory_stats()["num_ooms"]
card.other = {}
del big; torch.cuda.empty_cache()
torch.cuda.set_per_process_memory_fraction(0.25)
half = take(GiB)
facts["fraction"] = refused(MiB * 2)
torch.cuda.set_per_process_memory_fraction(1.0)
del half; torch.cuda.empty_cache()

side = torch.cuda.Stream()
with torch.cuda.stream(side): x = take(64 * MiB)
del x
y = take(64 * MiB)  # the block that the other stream has in its pool is not for this one
facts["streams"] = state()
del y; torch.cuda.empty_cache()
card.capacity = 2 * GiB
facts["shrunk"] = [torch.cuda.mem_get_info(), refused(2.5 * GiB) is not None]
card.capacity = 4 * GiB
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts(script):
    with fake_gpu.machine(fake_gpu.Card("4GiB", context_bytes="300MiB")):
        return script(ALLOCATOR)


def test_asking_for_devices_opens_no_context_and_an_allocation_does(facts):
    assert facts["context before"] == [True, 1, 4 * GiB, []]
    assert facts["context after"] == [True, 300 * MiB + 2 * MiB]


def test_small_requests_are_rounded_to_512_bytes_and_share_segments_of_2_mib(facts):
    assert facts["1 B"] == [512, 2 * MiB]
    assert facts["513 B"] == [512 + 1024, 2 * MiB]
    assert facts["1 MiB"] == [512 + 1024 + MiB, 2 * MiB]


def test_requests_below_10_mib_share_segments_of_20_mib_and_larger_ones_have_their_own(facts):
    assert facts["1 MiB + 1 B"][1] == 22 * MiB
    assert facts["10 MiB - 512 B"][1] == 22 * MiB
    assert facts["10 MiB"][1] == 32 * MiB
    assert facts["11 MiB"][1] == 44 * MiB, "rounded to 12 MiB: segments are multiples of 2 MiB"
    assert facts["11 MiB"][0] - facts["10 MiB"][0] == 12 * MiB, "what is left is too small to be split off"


def test_what_the_allocator_reserves_is_what_the_card_loses(facts):
    assert facts["card"] == 300 * MiB
    assert facts["emptied"] == [0, 0, 300 * MiB]


def test_neighbours_that_are_freed_become_one_block(facts):
    assert facts["merged"] == [[12 * MiB, 20 * MiB], 1]


def test_the_cache_is_given_back_and_the_request_tried_again_before_it_fails(facts):
    assert facts["flushed and retried"] == [int(1.1 * GiB), 2560 * MiB + 1128 * MiB, 1]


def test_the_message_names_capacity_this_process_and_the_others(facts):
    message = facts["message"]
    assert "Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 4.00 GiB" in message
    assert "this process has 2.79 GiB memory in use" in message
    assert "Process 4242 has 512.00 MiB memory in use" in message
    assert facts["num_ooms"] == 1


def test_a_share_of_the_card_is_a_limit(facts):
    assert "1024.00 MiB allowed" in facts["fraction"]


def test_a_block_belongs_to_its_stream(facts):
    assert facts["streams"] == [64 * MiB, 128 * MiB]


def test_capacity_changes_while_a_process_runs(facts):
    assert facts["shrunk"] == [[2 * GiB - 300 * MiB, 2 * GiB], True]


def test_expandable_segments_are_made_of_pages_that_come_and_go(script):
    code = """
import json, os, torch, fake_gpu
card = fake_gpu.this_machine().cards[0]
def take(gib): return torch.empty(int(gib * 2**30), dtype=torch.uint8, device="cuda")
parts = [take(0.5) for _ in range(7)]
reserved = [torch.cuda.memory_reserved(), card.used_by(os.getpid())]
del parts[1], parts[2], parts[3]
joined = take(1.5)  # as one segment of the classic kind it would not fit
try: take(1)
except torch.OutOfMemoryError as error: refused = "4.00 GiB" in str(error)
del parts, joined
torch.cuda.empty_cache()
print(json.dumps([reserved, refused, card.used_by(os.getpid()), card.ooms]))
"""
    with fake_gpu.machine(fake_gpu.Card("4GiB")):
        reserved, refused, left, ooms = script(code, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert reserved == [3600 * MiB, 3600 * MiB], "a large segment grows by pages of 20 MiB"
    assert refused
    assert left == 0
    assert ooms > 0


def test_the_pool_of_cudamallocasync_keeps_what_it_took(script):
    code = """
import json, os, torch, fake_gpu
card = fake_gpu.this_machine().cards[0]
used = lambda: card.used_by(os.getpid())
many = [torch.empty(128, device="cuda") for _ in range(1000)]
first = used()
big = torch.empty(2**28, dtype=torch.uint8, device="cuda")
second = used()
del many, big
third = used()
torch.cuda.empty_cache()
try: torch.empty(5 * 2**30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error: message = str(error)
print(json.dumps([first, second, third, used(), message]))
"""
    with fake_gpu.machine(fake_gpu.Card("4GiB")):
        first, second, third, last, message = script(code, PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    assert (first, second, third, last) == (2 * MiB, 258 * MiB, 258 * MiB, 0)
    assert ("Allocation on device" if TORCH < (2, 10) else "out of memory") in message


# ---- which cards a process sees


A, B, C = (f"GPU-{letter * 8}-1111-2222-3333-444444444444" for letter in "abc")


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, [A, B, C]),
        ("", []),
        ("-1", []),
        ("2,0", [C, A]),
        ("1,7,0", [B]),
        ("1,-1,0", [B]),
        ("GPU-cc,GPU-aaaaaaaa", [C, A]),
        ("GPU-", []),
        (f"{B}", [B]),
        ("0,0", []),
        ("nonsense", []),
    ],
)
def test_cuda_visible_devices_as_cuda_documents_it(script, monkeypatch, visible, seen):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with fake_gpu.machine(*(fake_gpu.Card("1GiB", uuid=uuid) for uuid in (A, B, C))):
        found = script(CUDART + "print(json.dumps([device_count(), seen()]))", **environment)
        pynvml.nvmlInit()
        assert pynvml.nvmlDeviceGetCount() == 3, "NVML ignores the variable"
        pynvml.nvmlShutdown()
    assert found == [[0 if seen else 100, len(seen)], [uuid[4:].replace("-", "") for uuid in seen]]


def test_without_a_machine_there_is_no_card(script, monkeypatch):
    monkeypatch.delenv("FAKE_GPU", raising=False)
    assert script(CUDART + "print(json.dumps([device_count(), allocate(1)]))") == [[100, 0], 100]


def test_cards_of_unlike_size_are_charged_apart(script):
    code = """
import json, os, torch, fake_gpu
cards = fake_gpu.this_machine().cards
held = torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda:1")
active = [torch._C._cuda_hasPrimaryContext(i) for i in (0, 1)]
names = [torch.cuda.get_device_properties(i).name for i in (0, 1)]
try: torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda:0")
except torch.OutOfMemoryError as error: message = str(error)
print(json.dumps([active, names, [card.used_by(os.getpid()) for card in cards], message]))
"""
    with fake_gpu.machine(fake_gpu.Card("2GiB", name="small"), fake_gpu.Card("8GiB", name="large")):
        active, names, used, message = script(code)
    assert active == [False, True]
    assert names == ["small", "large"]
    assert used == [0, 3 * GiB]
    assert "GPU 0 has a total capacity of 2.00 GiB" in message


# ---- processes


HOLDER = f"""{CUDART}
print(allocate(int(sys.argv[1])), flush=True)
input()
print(allocate(2**30), flush=True)
input()
"""


@pytest.fixture
def holder():
    processes = []

    def start(size):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        return process, int(process.stdout.readline())

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_process_that_dies_gives_its_memory_back(holder):
    with fake_gpu.machine(fake_gpu.Card("4GiB", context_bytes="100MiB")) as machine:
        card = machine.cards[0]
        first, status = holder(3 * GiB)
        assert (status, card.used, card.processes) == (0, 3172 * MiB, {first.pid: 3172 * MiB})
        assert holder(2 * GiB)[1] == 2, "cudaErrorMemoryAllocation"
        first.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 10
        while first.pid in card.processes and time.monotonic() < deadline:
            time.sleep(0.01)  # not waited for yet: a zombie, but its memory is free
        second, status = holder(3 * GiB)
        assert status == 0
        assert card.used_by(second.pid) == 3172 * MiB
        assert card.mallocs == 2
        assert card.ooms == 1


def test_other_processes_come_and_go_while_one_runs(holder):
    with fake_gpu.machine(fake_gpu.Card("4GiB", other={4242: 3 * GiB})) as machine:
        process, status = holder(2 * GiB)
        assert status == 2
        machine.cards[0].other = {}
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "0\n"
        assert machine.cards[0].used_by(process.pid) == GiB


# ---- NVML


@pytest.fixture
def nvml():
    def nvml():
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByIndex(0)

    yield nvml
    pynvml.nvmlShutdown()


def test_nvml_tells_memory_and_processes(nvml, holder):
    with fake_gpu.machine(fake_gpu.Card("4GiB", uuid=A, other={4242: GiB})):
        process, _ = holder(GiB)
        card = nvml()
        assert pynvml.nvmlDeviceGetUUID(card) == A
        assert pynvml.nvmlDeviceGetMemoryInfo(card).free == 2 * GiB
        found = {item.pid: item.usedGpuMemory for item in pynvml.nvmlDeviceGetComputeRunningProcesses(card)}
        assert found == {process.pid: GiB, 4242: GiB}


def test_a_driver_of_2021_lacks_functions(nvml):
    with fake_gpu.machine(fake_gpu.Card(), nvml="old driver"):
        card = nvml()
        assert pynvml.nvmlDeviceGetMemoryInfo(card).total == 24 * GiB
        assert pynvml.nvmlDeviceGetTotalEnergyConsumption(card) >= 0
        with pytest.raises(pynvml.NVMLLibraryMismatchError):
            pynvml.nvmlDeviceGetComputeRunningProcesses(card)
        with pytest.raises(pynvml.NVMLLibraryMismatchError):
            pynvml.nvmlDeviceGetGraphicsRunningProcesses(card)
        with pytest.raises(pynvml.NVMLError_FunctionNotFound):
            pynvml.nvmlDeviceGetCurrentClocksEventReasons(card)


def test_wsl_has_no_process_list_no_energy_and_no_throttle_reasons(nvml):
    with fake_gpu.machine(fake_gpu.Card(), nvml="wsl"):
        card = nvml()
        assert pynvml.nvmlDeviceGetTemperature(card, pynvml.NVML_TEMPERATURE_GPU) == 35
        for question in (
            pynvml.nvmlDeviceGetComputeRunningProcesses,
            pynvml.nvmlDeviceGetTotalEnergyConsumption,
            pynvml.nvmlDeviceGetCurrentClocksEventReasons,
        ):
            with pytest.raises(pynvml.NVMLError_NotSupported):
                question(card)


def test_a_container_may_have_no_nvml():
    with fake_gpu.machine(fake_gpu.Card(), nvml="absent"), pytest.raises(pynvml.NVMLError_LibraryNotFound):
        pynvml.nvmlInit()


def test_a_mig_slice_is_a_device_of_its_own(nvml, script, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with fake_gpu.machine(fake_gpu.Card("40GiB", name="NVIDIA A100", mig=["5GiB", "10GiB"])) as machine:
        gpu = machine.cards[0]
        uuids = [part.uuid for part in gpu.slices]
        gpu.slices[1].other = {4242: 3 * GiB}
        card = nvml()
        assert pynvml.nvmlDeviceGetMigMode(card)[0] == 1
        part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, 1)
        assert pynvml.nvmlDeviceGetUUID(part) == uuids[1]
        assert pynvml.nvmlDeviceGetMemoryInfo(part).free == 7 * GiB
        assert pynvml.nvmlDeviceGetMemoryInfo(card).used == 3 * GiB
        with pytest.raises(pynvml.NVMLError_NotSupported):
            pynvml.nvmlDeviceGetUtilizationRates(part)
        code = CUDART + "print(json.dumps([seen(), allocate(6 * 2**30)]))"
        first, second = ([uuid[4:].replace("-", "")] for uuid in uuids)
        assert script(code) == [first, 2], "one slice, the first, and no more than its memory"
        assert script(code, CUDA_VISIBLE_DEVICES=",".join(reversed(uuids))) == [second, 0]


# ---- faults, clock, values, ranks


FAULTS = """
import torch, fake_gpu
from torch import nn
machine = fake_gpu.this_machine(); card = machine.cards[0]
facts = {}
def caught(work):
    try: work()
    except Exception as error: return f"{type(error).__name__}: {error}".splitlines()[0]
x = torch.randn(8, 3, 16, 16, device="cuda")
card.other = {4242: card.capacity - card.used - 2**20}
facts["cudnn"] = caught(lambda: torch.backends.cudnn.is_acceptable(x) and nn.functional.conv2d(x, x))
card.other = {4242: card.capacity - card.used_by(os.getpid()) - 40 * 2**20}  # not for a handle
facts["cublas"] = caught(lambda: x[0, 0] @ x[0, 0])
card.other = {}
x[0, 0] @ x[0, 0]
facts["handle"] = card.used_by(os.getpid()) - torch.cuda.memory_reserved()
for function in ("cublasSgemm_v2", "cublasGemmEx", "cublasLtMatmul"):  # PyTorch's choice differs between versions
    fake_gpu.fail(function, 13, after=1)
facts["sgemm"] = [caught(lambda: x[0, 0] @ x[0, 0]) for _ in range(3)]
lstm = nn.LSTM(4, 8, 2, bidirectional=True).cuda()
lstm(torch.randn(5, 2, 4, device="cuda"))[0].sum().backward()
facts["lstm"] = sum(p.grad.numel() for p in lstm.parameters())
conv = nn.Conv2d(3, 8, 3).cuda()
torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats(); before = torch.cuda.memory_allocated()
conv(x)
facts["workspace"] = torch.cuda.max_memory_allocated() - before
scaler = torch.amp.GradScaler("cuda"); optimizer = torch.optim.AdamW(conv.parameters())
loss = conv(x).square().mean(); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
facts["finite"] = [loss.item(), bool(torch.isfinite(loss).all()), len(optimizer.state)]
launch = cuda.cudaLaunchKernel
class Dim(ctypes.Structure): _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]
launch.argtypes = [ctypes.c_void_p, Dim, Dim, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
facts["grid"] = [launch(None, Dim(*grid), Dim(*block), None, 0, None) for grid, block in
                 [((1, 1, 1), (1024, 1, 1)), ((1, 65536, 1), (1, 1, 1)),
                  ((1, 1, 1), (1025, 1, 1)), ((0, 1, 1), (1, 1, 1))]]
facts["launches"] = card.launches > 20
fake_gpu.poison(fake_gpu.ILLEGAL_ADDRESS)
facts["poison"] = [caught(torch.cuda.synchronize), caught(lambda: torch.zeros(1, device="cuda").item())]
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def faults(script):
    card = fake_gpu.Card(
        "4GiB", cublas_handle_bytes="64MiB", cudnn_handle_bytes="32MiB", cudnn_workspace_bytes="100MiB"
    )
    with fake_gpu.machine(card):
        return script(CUDART + FAULTS)


def test_handles_take_memory_outside_the_allocator_and_fail_as_their_libraries_do(faults):
    assert "CUDNN_STATUS_NOT_INITIALIZED" in faults["cudnn"]
    assert "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate" in faults["cublas"]
    assert faults["handle"] == 64 * MiB


def test_a_function_fails_when_told(faults):
    first, second, third = faults["sgemm"]
    assert first is None
    assert "CUBLAS_STATUS_EXECUTION_FAILED" in second
    assert third is None


def test_what_trains_on_a_gpu_trains_here(faults):
    assert faults["lstm"] == 2 * 4 * 8 * (4 + 8 + 2) + 2 * 4 * 8 * (16 + 8 + 2)
    assert 100 * MiB <= faults["workspace"] < 101 * MiB
    assert faults["finite"] == [0.0, True, 2]


def test_a_kernel_with_a_bad_grid_fails(faults):
    assert faults["grid"] == [0, 9, 9, 9]
    assert faults["launches"]


def test_a_poisoned_context_fails_every_call(faults):
    assert all("an illegal memory access was encountered" in message for message in faults["poison"])


def test_the_clock_makes_work_take_time_and_the_sensors_follow(nvml, script):
    code = """
import json, time, torch
x = torch.empty(4096, 4096, device="cuda")
def measured(count):
    start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
    torch.cuda.synchronize(); began = time.perf_counter(); start.record()
    for _ in range(count): torch.mm(x, x)
    stop.record(); queued = time.perf_counter() - began; torch.cuda.synchronize()
    return [queued, time.perf_counter() - began, start.elapsed_time(stop) / 1e3]
measured(1)
print(json.dumps([measured(5), measured(50)]))
"""
    with fake_gpu.machine(fake_gpu.Card("4GiB", flops=10e12, launch_seconds=1e-5)):
        card = nvml()
        idle = pynvml.nvmlDeviceGetPowerUsage(card)
        energy = pynvml.nvmlDeviceGetTotalEnergyConsumption(card)
        (_, short, _), (queued, long, events) = script(code)
        busy = pynvml.nvmlDeviceGetUtilizationRates(card)
        warm = pynvml.nvmlDeviceGetTemperature(card, pynvml.NVML_TEMPERATURE_GPU)
        power = pynvml.nvmlDeviceGetPowerUsage(card)
        energy = pynvml.nvmlDeviceGetTotalEnergyConsumption(card) - energy
    expected = 50 * (2 * 4096**3 / 10e12 + 1e-5)
    assert expected <= long < expected + 0.25
    assert events == pytest.approx(expected, abs=0.05)
    assert queued < expected / 2, "launches return before the work is done"
    assert long - short > 0.7 * 45 / 50 * expected
    assert 0 < busy.gpu <= 100
    assert 0 < busy.memory < busy.gpu
    assert warm > 35
    assert power > idle
    assert energy > 325 * expected * 1e3, "millijoules: (full - idle) watts for as long as it was busy"


def test_data_keeps_values_when_asked(script):
    code = """
import json, torch
x = torch.arange(100_000.0)
there = x.cuda()
again = torch.empty_like(there); again.copy_(there)
print(json.dumps([bool((x == again.cpu()).all()), there[7:9].tolist()]))
"""
    with fake_gpu.machine(fake_gpu.Card("1GiB"), data=True):
        assert script(code) == [True, [7.0, 8.0]]


RESERVED = """
import json, torch
found, samples = [], torch.zeros(250, 100, 123, device="cuda")
for kind, mode in ((torch.nn.LSTM, 2), (torch.nn.GRU, 3)):
    net = kind(123, 320, 4).cuda()
    state = torch.zeros(4, 100, 320, device="cuda")
    sizes = (320, 0, 4, False, 0.0, True, False, [], None)
    made = torch._cudnn_rnn(samples, net._flat_weights, 4, None, state, state if mode == 2 else None, mode, *sizes)
    found.append(made[3].numel())
print(json.dumps(found))
"""


def test_what_a_recurrent_layer_keeps_for_backward_is_what_was_seen_on_a_gpu(script):
    with fake_gpu.machine(fake_gpu.Card("8GiB")):
        assert script(RESERVED) == [736_000_000, 864_000_000]  # ngimel in pytorch#2895


def test_two_ranks_train_with_ddp_and_pay_for_their_communicator(script):
    code = """
import json, os, sys, torch, fake_gpu
import torch.distributed as dist
from torch import nn
rank = int(sys.argv[1])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
layers = [nn.Linear(512, 512), *(nn.LayerNorm(512) for _ in range(40))]  # more copies than are remembered
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).cuda(), device_ids=[rank])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(8, 512, device="cuda")).sum().backward(); optimizer.step(); optimizer.zero_grad()
torch.cuda.synchronize()
said = torch.tensor([5 - rank], device="cuda")
dist.all_reduce(said, op=dist.ReduceOp.MIN)
heard = [torch.empty(1, dtype=torch.long, device="cuda") for _ in range(2)]
dist.all_gather(heard, torch.tensor([rank + 7], device="cuda"))
told = torch.tensor([rank + 3.5], device="cuda")
dist.broadcast(told, 1)
heard = [said.item(), [each.item() for each in heard], told.item()]
outside = fake_gpu.this_machine().cards[rank].used_by(os.getpid()) - torch.cuda.memory_reserved()
dist.barrier()
dist.destroy_process_group()
print(json.dumps([outside, torch.cuda.max_memory_allocated(), heard]))
"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with fake_gpu.machine(*[fake_gpu.Card("2GiB", nccl_bytes="200MiB")] * 2):
        environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks = [forks.Popen([sys.executable, "-c", code, str(rank)], env=environment, **pipes) for rank in (0, 1)]
        said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said[0][1][-2000:] + said[1][1][-2000:]
    for out, _ in said:
        outside, peak, heard = json.loads(out)
        assert heard == [4, [7, 8], 4.5], "small collectives are heard"
        assert outside == 200 * MiB
        assert peak > 4 * 513 * 512 * 4, "parameters, gradients and two states of AdamW"


def test_a_fork_is_a_child_like_any_other_that_has_torch_already(tmp_path, monkeypatch):
    code = (
        "import os, sys, torch; print(os.getppid(), os.getcwd(), os.environ['HERE'], len(sys.argv), sys.stdin.read())"
    )
    code += "; print(torch.cuda.device_count(), torch.cuda.is_initialized(), file=sys.stderr); raise SystemExit(7)"
    monkeypatch.delenv("FAKE_GPU", raising=False)
    for cards in ([], [fake_gpu.Card()] * 3):
        with fake_gpu.machine(*cards):
            pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            child = forks.Popen([sys.executable, "-c", code, "an argument"], cwd=tmp_path, text=True,
                                env=os.environ | {"HERE": "yes"}, **pipes)  # fmt: skip
            out, err = child.communicate("what is said", timeout=60)
        assert out == f"{os.getpid()} {tmp_path} yes 2 what is said\n"
        assert err == f"{len(cards)} False\n"
        assert child.returncode == 7
    killed = forks.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert os.getpgid(killed.pid) == killed.pid
    killed.kill()
    assert killed.wait(10) == -signal.SIGKILL


def test_python_and_c_agree_on_the_layout():
    with fake_gpu.machine(fake_gpu.Card("3GiB", multiprocessors=7, busy_by_others=0.5)) as machine:
        raw = machine.raw
        assert raw.size == ctypes.sizeof(raw)
        pynvml.nvmlInit()  # a library that expects another size ends the process
        card = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlDeviceGetMemoryInfo(card).total == 3 * GiB
        pynvml.nvmlShutdown()
