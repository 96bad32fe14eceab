"""What each precision means, and which one a device does well."""

import subprocess
import sys
from collections import Counter

import pytest
import torch

from batchtune.child.stepping import Precision, choose, every_precision
from batchtune.errors import DeviceError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_what_is_asked_for_is_taken(name):
    assert choose(name, CPU) == (name, "asked for")


def test_tf32_needs_cuda_and_says_what_to_use_instead():
    with pytest.raises(DeviceError, match="precision tf32 exists on CUDA devices only, not on cpu; use fp32 or bf16"):
        choose("tf32", CPU)
    assert choose("tf32", CUDA) == ("tf32", "asked for")


@pytest.mark.parametrize(
    ("capability", "name"), [((9, 0), "bf16"), ((8, 6), "bf16"), ((7, 5), "fp16"), ((7, 0), "fp16"), ((6, 1), "fp32")]
)
def test_auto_goes_by_the_matrix_units_and_says_so(monkeypatch, capability, name):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    chosen, reason = choose("auto", CUDA)
    assert chosen == name
    assert f"compute capability {capability[0]}.{capability[1]}" in reason


def test_auto_is_fp32_on_a_cpu_with_a_reason():
    assert choose("auto", CPU) == ("fp32", "half precision is not reliably faster on cpu")


def test_every_precision_of_a_device_can_be_chosen():
    for device in (CPU, CUDA):
        assert [choose(name, device)[0] for name in every_precision(device)] == every_precision(device)


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_forward_pass_computes_in_it(name, dtype):
    with Precision(name, CPU).autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


@pytest.mark.parametrize(("name", "scales"), [("fp32", False), ("bf16", False), ("fp16", True)])
def test_only_fp16_scales_its_loss(name, scales):
    assert Precision(name, CPU).scaler.is_enabled() == scales


@pytest.fixture
def matrix_modes():
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [backend.allow_tf32 for backend in backends]
    yield lambda: [backend.allow_tf32 for backend in backends]
    for backend, allowed in zip(backends, before, strict=True):
        backend.allow_tf32 = allowed


def test_all_but_tf32_compute_as_torch_and_the_users_code_have_it(matrix_modes):
    for own in (False, True), (True, True), (False, False):
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = own
        for name in ("fp32", "tf32", "tf32", "bf16", "tf32", "fp32"):
            Precision(name, CUDA)
            assert matrix_modes() == ([True, True] if name == "tf32" else list(own))


NEWER_NAMES = """
import torch
from batchtune.child.stepping import Precision, tf32_allowed

device = torch.device("cuda", 0)
torch.backends.fp32_precision = "tf32"  # after which torch raises for the older name of matrix products
before = tf32_allowed()
for name in ("fp32", "tf32", "fp32"):
    Precision(name, device)
print(before, tf32_allowed())
"""


def test_torchs_newer_names_for_it_are_understood():
    if not hasattr(torch.backends.cudnn, "conv"):
        pytest.skip("torch has them from 2.9 on")
    done = subprocess.run([sys.executable, "-c", NEWER_NAMES], capture_output=True, text=True, check=True)
    assert done.stdout == "(True, True) (True, True)\n"


@pytest.mark.parametrize(
    ("counts", "found"),
    [({"aten.convolution_backward": 60, "aten.mm": 40}, "tf32"), ({"aten.mm": 9}, "fp32")],
    ids=["convolutions", "products"],
)
def test_most_of_a_steps_operations_say_what_peak_they_are_a_share_of(counts, found, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    flops = Counter(counts)
    assert Precision("fp32", CUDA).computed_in(flops) == found  # torch has convolutions alone in TF32
    assert Precision("bf16", CUDA).computed_in(flops) == "bf16"
    assert Precision("fp32", CPU).computed_in(flops) == "fp32"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))  # which has no units for it
    assert Precision("fp32", CUDA).computed_in(flops) == "fp32"
