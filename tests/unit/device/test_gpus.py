import copy
import pickle
import re

import pytest

from batchtune.device.gpus import PRECISIONS, all_gpus, find_gpu, gpus_called, peak_flops
from batchtune.errors import UsageError

GIB = 2**30
every_gpu = pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.name)


def test_the_catalogue_holds_what_people_train_on_from_three_vendors():
    assert len(all_gpus()) >= 45
    assert {gpu.vendor for gpu in all_gpus()} == {"NVIDIA", "AMD", "Apple"}


def test_a_card_that_comes_with_more_or_less_memory_is_not_another_card():
    assert [gpu.name for gpu in gpus_called("NVIDIA GeForce RTX 3060")] == ["RTX 3060 8GB", "RTX 3060 12GB"]
    assert peak_flops("NVIDIA GeForce RTX 3060", "bf16") == 25.5e12
    assert [gpu.name for gpu in gpus_called("3080 Ti")] == ["RTX 3080 Ti"]


def test_a_name_that_says_too_little_is_said_to():
    with pytest.raises(UsageError, match="--gpu RTX: says too little"):
        gpus_called("RTX")


def test_names_and_aliases_are_unique():
    names = [name.casefold() for gpu in all_gpus() for name in (gpu.name, *gpu.aliases)]
    assert len(names) == len(set(names))


@every_gpu
def test_every_row_has_a_source_a_generation_and_plausible_figures(gpu):
    assert gpu.source
    assert gpu.generation
    assert 8 * GIB <= gpu.memory_bytes <= 512 * GIB
    assert 1e11 <= gpu.bandwidth_bytes_per_second < 1e13
    assert gpu.board_power_watts is None or 50 < gpu.board_power_watts < 2000
    assert set(gpu.tflops) <= set(PRECISIONS)
    assert (gpu.compute_capability is not None) == (gpu.vendor == "NVIDIA")


@every_gpu
def test_the_device_reports_a_little_less_memory_than_the_vendor_names(gpu):
    least = 0.7 if gpu.vendor == "Apple" else 0.9  # macOS keeps a quarter of unified memory for itself
    assert least * gpu.memory_bytes < gpu.capacity_bytes <= gpu.memory_bytes
    assert gpu.capacity_bytes == (gpu.usable_memory_bytes or gpu.memory_bytes)


@every_gpu
def test_lower_precision_is_never_slower(gpu):
    order = [gpu.tflops[p] for p in ("fp32", "tf32", "bf16", "fp16") if p in gpu.tflops]
    assert order == sorted(order)
    assert all(rate > 0 for rate in order)


@every_gpu
def test_bf16_and_tf32_are_listed_only_where_there_are_units_for_them(gpu):
    if gpu.compute_capability and gpu.compute_capability < (8, 0):
        assert not {"bf16", "tf32"} & set(gpu.tflops)
    if gpu.compute_capability and "bf16" in gpu.tflops:
        assert gpu.tflops["bf16"] == gpu.tflops["fp16"]


@pytest.mark.parametrize(
    "gpu", [gpu for gpu in all_gpus() if gpu.vendor == "NVIDIA" and "bf16" in gpu.tflops], ids=lambda gpu: gpu.name
)
def test_tensor_cores_do_tf32_at_half_the_bf16_rate_so_no_figure_is_for_sparse_matrices(gpu):
    assert gpu.tflops["tf32"] == pytest.approx(gpu.tflops["bf16"] / 2, rel=0.02)


@pytest.mark.parametrize(
    "gpu", [gpu for gpu in all_gpus() if re.match("RTX [345]0[6-9]0", gpu.name)], ids=lambda gpu: gpu.name
)
def test_geforce_accumulates_in_fp32_at_twice_its_plain_fp32_rate(gpu):
    assert gpu.tflops["bf16"] == pytest.approx(2 * gpu.tflops["fp32"], rel=0.02)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("A100-80GB", "A100-80GB"),
        ("a100 80gb", "A100-80GB"),
        ("a10080GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB PCIe"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("GeForce RTX 3090 Ti", "RTX 3090 Ti"),
        ("4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("Tesla P100-PCIE-16GB", "P100-PCIE-16GB"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("Quadro RTX 6000", "Quadro RTX 6000"),
        ("NVIDIA TITAN RTX", "TITAN RTX"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell Workstation"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Blackwell Max-Q Workstation"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("h100sxm", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("a100-80g", "A100-80GB"),
        ("A100 80 GiB", "A100-80GB"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA GH200 480GB", "GH200 96GB"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("4060 ti 16GB", "RTX 4060 Ti 16GB"),
        ("AMD Instinct MI300X", "MI300X"),
        ("MI250X", "MI250X GCD"),
        ("Radeon RX 7900 XTX", "RX 7900 XTX"),
        ("W7900", "Radeon PRO W7900"),
        ("Apple M2 Ultra", "M2 Ultra"),
        ("m2", "M2"),
    ],
)
def test_a_part_is_found_by_what_people_and_drivers_call_it(name, expected):
    assert find_gpu(name).name == expected


@every_gpu
def test_every_part_is_found_by_each_of_its_own_names(gpu):
    for name in (gpu.name, *gpu.aliases):
        assert find_gpu(f"{gpu.vendor} {name}") is gpu


@pytest.mark.parametrize(
    ("name", "candidates"),
    [
        ("A100", ["A100-40GB", "A100-80GB", "A100-80GB PCIe"]),
        ("H100", ["H100 PCIe", "H100 SXM", "H100 NVL"]),
        ("NVIDIA GeForce RTX 3080", ["RTX 3080 10GB", "RTX 3080 12GB"]),
        ("4060ti", ["RTX 4060 Ti 8GB", "RTX 4060 Ti 16GB"]),
        ("RTX 6000", ["Quadro RTX 6000", "RTX 6000 Ada", "RTX PRO 6000 Blackwell Server"]),
    ],
)
def test_a_name_that_several_parts_have_means_all_of_them_but_where_one_is_needed(name, candidates):
    assert {gpu.name for gpu in gpus_called(name)} >= set(candidates)
    with pytest.raises(UsageError, match=f"^--gpu {name}: ") as refusal:
        find_gpu(name)
    for candidate in candidates:
        assert candidate in str(refusal.value)


@pytest.mark.parametrize(("name", "meant"), [("RTX 4095", "RTX 4090"), ("H10O PCIe", "H100 PCIe"), ("MI300", "MI300X")])
def test_an_unknown_name_gets_suggestions(name, meant):
    with pytest.raises(UsageError, match=rf"not in the catalogue\. Did you mean .*\b{meant}\b.*\?"):
        find_gpu(name)


@pytest.mark.parametrize("name", ["", "NVIDIA", "  ", "Voodoo Banshee"])
def test_a_name_without_likeness_is_refused_with_the_way_out(name):
    with pytest.raises(UsageError, match="--memory-limit"):
        find_gpu(name)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 5090 D",
        "Tesla P4",
        "NVIDIA L2",
    ],
)
def test_a_part_that_only_resembles_a_row_is_not_taken_for_it(name):
    with pytest.raises(UsageError, match="not in the catalogue"):
        find_gpu(name)
    assert peak_flops(name, "bf16") is None


def test_peak_flops_are_in_flop_per_second():
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bf16") == pytest.approx(312e12)
    assert peak_flops("NVIDIA GeForce RTX 3090", "bf16") == pytest.approx(71e12)
    assert peak_flops("Tesla T4", "fp16") == pytest.approx(65e12)


def test_peak_flops_are_absent_where_unknown_or_where_the_name_fits_different_rates():
    assert peak_flops("Tesla T4", "bf16") is None
    assert peak_flops("Apple M2 Max", "fp32") is None
    assert peak_flops("NVIDIA GeForce RTX 3080", "bf16") is None
    assert peak_flops("cpu", "fp32") is None
    assert peak_flops("", "fp32") is None


def test_peak_flops_are_given_where_all_parts_of_that_name_agree():
    assert peak_flops("NVIDIA GeForce RTX 4060 Ti", "bf16") == pytest.approx(44.1e12)


def test_a_part_can_be_hashed_copied_and_sent_to_another_process():
    gpu = find_gpu("T4")
    assert len({gpu, copy.deepcopy(gpu), pickle.loads(pickle.dumps(gpu))}) == 1
