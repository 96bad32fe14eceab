"""Memory inside CUDA kernels, as PyTorch's sources have it: what an operator takes beside its results."""

from __future__ import annotations

import pytest
import torch

from batchtune.estimate.memory import overheads, scratch
from batchtune.estimate.memory.allocator import MIB
from batchtune.estimate.memory.events import RESULTS, Block, Gpu, Held
from batchtune.estimate.memory.scratch import inside, workspaces

aten = torch.ops.aten
GPU = Gpu()
FLOAT, LONG = 4, 8
CONVOLUTION = ([1, 1], [0, 0], [1, 1])


BF16 = torch.bfloat16


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def flat(steps):
    """Bytes of each block in order, and `result` for each place of one; blocks of no bytes are left out."""
    found = []
    for step in steps:
        if isinstance(step, tuple):
            found += flat(step)
        elif isinstance(step, Block):
            size = step.formula(GPU, *step.lengths)
            found += [size] if size else []
        else:
            found.append(f"held {step.size_bytes}" if isinstance(step, Held) else "result")
    return found


def test_what_has_no_rule_has_results_only():
    assert inside(aten.gelu.default, (meta(3),)) == (RESULTS,)


@pytest.mark.parametrize(("transposed", "copies"), [(False, 2), (True, 1)], ids=["twice", "once"])
def test_a_transposed_convolution_makes_its_gradient_contiguous_once(transposed, copies):
    gradient = meta(2, 16, 8, 8)[:, :8]  # half of the channels: what comes back from a concatenation
    arguments = (gradient, meta(2, 8, 8, 8), meta(8, 8, 1, 1), None, *CONVOLUTION, transposed, [0, 0], 1)
    found = flat(inside(aten.convolution_backward.default, (*arguments, [True, True, False])))
    assert found.count(2 * 8 * 8 * 8 * FLOAT) == copies
    assert (found[0] == "result") is not transposed


IMAGE, KERNEL = meta(4, 64, 16, 16, dtype=BF16), meta(32, 64, 3, 3, dtype=BF16)
COPIES = (4 * 64 * 16 * 16 + 32 * 64 * 3 * 3) * 2  # of input and weights


@pytest.mark.parametrize(
    ("stride", "padding", "side"),
    [([1, 1], [1, 1], 16), ([1], [1], 16), ([1], [0], 14), ([2], [0], 7), ([2, 1], [1], (8, 16))],
    ids=["each side", "one for all", "valid", "every other", "both"],
)
def test_images_as_pytorch_lays_them_are_copied_for_matrix_units_as_are_weights_and_result(stride, padding, side):
    sides = side if isinstance(side, tuple) else (side, side)
    found = flat(inside(aten.convolution.default, (IMAGE, KERNEL, None, stride, padding, [1], False, [0], 1)))
    assert found == ["result", COPIES + 4 * 32 * sides[0] * sides[1] * 2]


def test_nothing_is_copied_of_images_whose_channels_lie_last_or_by_gpus_without_matrix_units():
    last = [each.to(memory_format=torch.channels_last) for each in (IMAGE, KERNEL)]
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert flat(inside(aten.convolution.default, (*last, None, *how))) == ["result"]
    (block,) = blocks(inside(aten.convolution.default, (IMAGE, KERNEL, None, *how)))
    assert block.formula(Gpu(matrix_units=()), *block.lengths) == 0


@pytest.mark.parametrize(("samples", "mib"), [(512, 1120.0), (128, 280.0), (32, 8.03515625)])
def test_small_images_of_few_channels_have_gradients_of_weights_by_fourier_transforms_of_many_samples(samples, mib):
    """1120, 280 and 10 MiB on an H100."""
    image, kernel = meta(samples, 32, 32, 32), meta(32, 32, 3, 3)
    how = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
    assert flat(inside(aten.convolution_backward.default, (image, image, kernel, *how))) == ["result", mib * 2**20]


@pytest.mark.parametrize(("groups", "each", "taken"), [(5, 24, 32), (32, 4, 4), (16, 1, 0)])
def test_groups_are_copied_with_as_many_channels_as_matrix_units_take_unless_they_are_of_one(groups, each, taken):
    image, kernel = meta(8, groups * each, 14, 14, dtype=BF16), meta(groups * each, each, 3, 3, dtype=BF16)
    found = flat(inside(aten.convolution.default, (image, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)))
    assert [size for size in found if size != "result"] == ([2 * 8 * groups * taken * 14 * 14 * 2] if taken else [])


def test_a_workspace_has_as_many_lengths_whatever_the_sides_of_the_image_are():
    found = set()
    for points in (6, 7):
        tensors = meta(1, 32, points), meta(1, 16, points), meta(32, 16, 1)
        arguments = (*tensors, None, [1], [0], [1], False, [0], 1, [True, True, False])
        found.add(tuple(len(each.lengths) for each in blocks(inside(aten.convolution_backward.default, arguments))))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("rows", "dtype", "bytes_"),
    [
        (1 << 15, torch.bfloat16, [(1 << 31) * FLOAT]),
        ((1 << 15) - 1, torch.bfloat16, []),
        (1 << 15, torch.float16, []),
        (1 << 15, torch.float32, []),
    ],
)
def test_batch_norm_casts_bf16_that_32_bits_do_not_index(rows, dtype, bytes_):
    arguments = (meta(rows, 16, 64, 64, dtype=dtype), None, None, None, None)
    assert flat(inside(aten.native_batch_norm.default, (*arguments, True, 0.1, 1e-5))) == ["result", *bytes_]
    assert flat(inside(aten.native_batch_norm.default, (*arguments, False, 0.1, 1e-5))) == ["result"]


def blocks(steps):
    """Every block, in order."""
    found = []
    for step in steps:
        found += blocks(step) if isinstance(step, tuple) else [step] if isinstance(step, Block) else []
    return found


def scattered(rows):
    index = torch.empty(5000, dtype=torch.int64, device="meta")
    return inside(aten.index_put.default, (meta(rows, 64), [index], meta(5000, 64), True))


def test_scattered_sums_are_sorted_by_as_many_bits_as_the_rows_need():
    few, many = (flat(scattered(rows))[-2] for rows in (200, 1 << 20))  # one pass of eight bits, and three
    assert many > few


def test_what_sorting_is_calculated_from_grows_linearly_with_the_batch():
    lengths = [[each for block in blocks(scattered(rows)) for each in block.lengths] for rows in (3, 5, 8)]
    assert all(3 * (second - first) == 2 * (third - second) for first, second, third in zip(*lengths, strict=True))


@pytest.mark.parametrize(("operator", "held"), [(aten.mse_loss.default, True), (aten.huber_loss.default, False)])
def test_a_loss_takes_memory_for_each_element_before_it_is_reduced(operator, held):
    both = meta(100, 30), meta(100, 30)
    size = 100 * 30 * FLOAT
    found = flat(inside(operator, (*both, 1)))
    assert (f"held {size}" if held else size) in found
    assert flat(inside(operator, (*both, 0))) == ["result"]


def test_an_embedding_copies_indices_that_do_not_lie_together():
    indices = torch.empty(6, 9, dtype=torch.int64, device="meta")
    assert flat(inside(aten.embedding.default, (meta(50, 4), indices[:, :-1]))) == [6 * 8 * LONG, "result"]
    assert flat(inside(aten.embedding.default, (meta(50, 4), indices))) == ["result"]


def test_few_embedding_gradients_are_added_without_sorting():
    def taken(count):
        gradient, indices = meta(count, 4), torch.empty(count, dtype=torch.int64, device="meta")
        return [
            each
            for each in flat(inside(aten.embedding_dense_backward.default, (gradient, indices, 50, -1, False)))
            if each != "result"
        ]

    assert taken(3072) == []
    assert taken(3073).count(3073 * LONG) >= 4  # keys and places, before and after


def test_cumulative_sums_of_flags_are_of_64_bits():
    assert flat(inside(aten.cumsum.default, (meta(7, 9, dtype=torch.bool), 1))) == ["result", 7 * 9 * LONG]
    assert flat(inside(aten.cumsum.default, (meta(7, 9), 1))) == ["result"]


def test_a_roll_of_several_dimensions_rolls_one_after_the_other():
    assert flat(inside(aten.roll.default, (meta(4, 5), [1, 2], [0, 1]))) == [4 * 5 * FLOAT, "result"]
    assert flat(inside(aten.roll.default, (meta(4, 5), [1], [0]))) == ["result"]


def test_a_softmax_copies_what_is_not_contiguous():
    assert flat(inside(aten._softmax.default, (meta(6, 4).t(), -1, False))) == ["result", 6 * 4 * FLOAT]
    assert flat(inside(aten._softmax.default, (meta(6, 4), -1, False))) == ["result"]


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_ctc_keeps_alphas_and_its_gradient_takes_betas_and_sums_of_both(zero_infinity):
    log_probs, alphas, losses = meta(1000, 64, 32), meta(64, 1000, 251), meta(64)
    lengths = [[1000] * 64, [125] * 64]
    forward = (log_probs, meta(64, 125, dtype=torch.long), *lengths, 0, zero_infinity)
    three = [64 * LONG] * 3
    assert flat(inside(aten._ctc_loss.default, forward)) == [*three, "result", "result"]
    backward = (losses, *forward[:4], losses, alphas, 0, zero_infinity)
    every, row = 64 * 1000 * 126 * FLOAT, 64 * 1000 * FLOAT
    sums, gradient = [every, row, row, 64 * 1000, every, row], 64 * 1000 * 32 * FLOAT
    in_order = [gradient, *sums, "result"] if zero_infinity else ["result", *sums]
    assert flat(inside(aten._ctc_loss_backward.default, backward)) == [*three, 64 * 1000 * 251 * FLOAT, *in_order]


def test_ctc_of_few_frames_takes_no_sums():
    log_probs, alphas, losses = meta(50, 8, 32), meta(8, 50, 21), meta(8)
    arguments = (losses, log_probs, meta(8, 10, dtype=torch.long), [50] * 8, [10] * 8, losses, alphas, 0, False)
    assert flat(inside(aten._ctc_loss_backward.default, arguments))[-1] == "result"


def test_group_norm_scales_by_channel():
    found = flat(inside(aten.native_group_norm.default, (meta(3, 8, 5), meta(8), meta(8), 3, 8, 5, 2, 1e-5)))
    assert found == ["result", 3 * 8 * FLOAT, 3 * 8 * FLOAT]


def test_flash_attention_keeps_row_sums_and_gradients_in_float():
    query = meta(2, 4, 100, 48, dtype=torch.bfloat16)
    arguments = (query.transpose(1, 2).contiguous().transpose(1, 2),) * 5
    found = flat(inside(aten._scaled_dot_product_flash_attention_backward.default, arguments))
    assert found == ["result", 2 * 4 * 128 * FLOAT, 2 * 4 * 128 * 64 * FLOAT]


@pytest.mark.parametrize(
    ("release", "setting", "taken"),
    [
        ((2, 11), None, {"cublas", "cublaslt"}),
        ((2, 11), "1", {"cublas"}),
        ((2, 14), None, {"cublas"}),
        ((2, 14), "0", {"cublas", "cublaslt"}),
    ],
)
def test_products_take_workspaces_once_and_a_bias_takes_one_more_unless_they_are_one(
    release, setting, taken, monkeypatch
):
    monkeypatch.setattr(scratch, "torch_release", lambda: release)
    if setting:
        monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", setting)
    left, right, bias = meta(8, 16), meta(16, 32), meta(32)
    assert set(workspaces(aten.mm.default, (left, right))) == {"cublas"}
    assert set(workspaces(aten.addmm.default, (bias, left, right))) == taken
    assert workspaces(aten.gelu.default, (left,)) == {}
    assert inside(aten.mm.default, (left, right)) == (RESULTS,)


@pytest.mark.parametrize(("release", "mebibytes"), [((2, 11), 8.125), ((2, 12), 32)])
def test_from_torch_2_12_on_the_workspace_is_larger_on_blackwell(release, mebibytes, monkeypatch):
    monkeypatch.setattr(overheads, "torch_release", lambda: release)
    assert overheads.gpu_of("RTX 5090", "Blackwell").cublas_bytes == mebibytes * MIB
    assert overheads.gpu_of("RTX 4090", "Ada Lovelace").cublas_bytes == 8.125 * MIB
    assert overheads.gpu_of("H100 SXM", "Hopper").cublas_bytes == 32 * MIB


def test_from_torch_2_15_on_each_product_takes_a_workspace_for_its_time_unless_they_are_cached(monkeypatch):
    monkeypatch.setattr(scratch, "torch_release", lambda: (2, 15))
    left, right, bias = meta(8, 16), meta(16, 32), meta(32)
    assert workspaces(aten.mm.default, (left, right)) == {}
    assert flat(inside(aten.mm.default, (left, right))) == ["result", GPU.cublas_bytes]
    assert flat(inside(aten.addmm.default, (bias, left, right))) == ["result", 1 << 20]
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    assert set(workspaces(aten.mm.default, (left, right))) == {"cublas"}
    assert inside(aten.mm.default, (left, right)) == (RESULTS,)


@pytest.mark.parametrize(("mode", "sparse", "blocks"), [(1, True, [16, 16]), (0, True, []), (1, False, [])])
def test_a_sparse_gradient_of_bags_holds_their_sizes_for_a_mean_alone(mode, sparse, blocks):
    arguments = (meta(4, 8), *[None] * 5, 10, False, mode, sparse)
    assert flat(inside(aten._embedding_bag_backward.default, arguments)) == ["result", *blocks]
